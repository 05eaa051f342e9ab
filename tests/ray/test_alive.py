"""A stream notices that the cluster is gone: sockets that stop to listen, and a raylet that is killed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket

import pytest
from helpers import PATIENCE_S, counts, write_store

from zloader.common.errors import OptionError, ProducerError

alive = pytest.importorskip("zloader.ray.alive", exc_type=ImportError, reason="Ray is not installed: pip install ray")

pytestmark = pytest.mark.any_version


async def listening() -> tuple[asyncio.Server, tuple[str, int]]:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()


async def closed(server: asyncio.Server) -> None:
    server.close()
    await server.wait_closed()


def test_a_raylet_that_refuses_twice_in_a_row_is_gone(monkeypatch):
    monkeypatch.setattr(alive, "_APART_S", 0.0)

    async def run() -> None:
        head, at_head = await listening()
        raylet, at_raylet = await listening()
        cluster = alive.Cluster(head=at_head, raylet=at_raylet, patience_s=1e9)
        await cluster.require()
        await closed(raylet)
        await cluster.require()
        raylet = await asyncio.start_server(lambda _, writer: writer.close(), *at_raylet)
        await cluster.require()
        await closed(raylet)
        await cluster.require()
        with pytest.raises(ProducerError, match=rf"the raylet .* at 127\.0\.0\.1:{at_raylet[1]}, is gone.* state_dict"):
            await cluster.require()
        await closed(head)

    asyncio.run(run())


def test_two_refusals_in_the_same_instant_count_once(monkeypatch):
    monkeypatch.setattr(alive, "_APART_S", 1e9)

    async def run() -> None:
        head, at_head = await listening()
        raylet, at_raylet = await listening()
        cluster = alive.Cluster(head=at_head, raylet=at_raylet, patience_s=1e9)
        await cluster.require()
        await closed(raylet)
        await asyncio.gather(*(cluster.require() for _ in range(3)))
        await closed(head)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "is_silence"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), True),
        (socket.gaierror(socket.EAI_SYSTEM, "System error"), False),
        (OSError("Multiple exceptions: [Errno 111] ..., [Errno 101] ..."), True),
        (OSError(errno.EHOSTUNREACH, "No route to host"), True),
        (TimeoutError(), True),
        (OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address"), False),
    ],
)
def test_the_errors_of_a_silent_head(monkeypatch, error, is_silence):
    """Its name may be gone with it, as that of a service in Kubernetes."""
    monkeypatch.setattr(alive, "_CONNECT_S", PATIENCE_S)  # on a busy machine, 5 s may not be enough to be answered

    async def failing(*address: object) -> None:
        raise error

    async def run() -> None:
        head, at_head = await listening()
        cluster = alive.Cluster(head=at_head, raylet=None, patience_s=0)
        await cluster.require()
        monkeypatch.setattr(asyncio, "open_connection", failing)
        await cluster.require()
        with pytest.raises(ProducerError, match="the head") if is_silence else contextlib.nullcontext():
            await cluster.require()
        await closed(head)

    asyncio.run(run())


def test_a_head_may_come_back_and_is_an_error_when_it_does_not():
    async def run() -> None:
        head, at_head = await listening()
        raylet, at_raylet = await listening()
        cluster = alive.Cluster(head=at_head, raylet=at_raylet, patience_s=0)
        await cluster.require()
        await closed(head)
        await cluster.require()  # silent from here
        head = await asyncio.start_server(lambda _, writer: writer.close(), *at_head)
        for _ in range(2):
            await cluster.require()
        await closed(head)
        await cluster.require()
        with pytest.raises(ProducerError, match=r"the head of the Ray cluster at 127\.0\.0\.1:.* has not answered"):
            await cluster.require()
        await closed(raylet)

    asyncio.run(run())


def test_a_process_without_file_descriptors_judges_nobody(monkeypatch):
    """Its connections fail with EMFILE although both listen."""
    monkeypatch.setattr(alive, "_APART_S", 0.0)

    async def run() -> None:
        head, at_head = await listening()
        raylet, at_raylet = await listening()
        cluster = alive.Cluster(head=at_head, raylet=at_raylet, patience_s=0)
        await cluster.require()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                await asyncio.open_connection(*at_raylet)
            for _ in range(3):
                await cluster.require()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        await closed(raylet)
        await cluster.require()
        with pytest.raises(ProducerError, match="the raylet"):
            await cluster.require()
        await closed(head)

    asyncio.run(run())


def test_a_raylet_that_ray_does_not_list_yet_is_not_judged():
    nodes = [{"NodeID": "a", "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": 7}]
    assert alive.raylet_of("a", nodes) == ("127.0.0.1", 7)
    assert alive.raylet_of("b", nodes) is None

    async def run() -> None:
        head, at_head = await listening()
        cluster = alive.Cluster(head=at_head, raylet=None, patience_s=0)
        for _ in range(3):
            await cluster.require()
        await closed(head)

    asyncio.run(run())


def test_the_patience_of_ray_must_be_a_number_of_seconds():
    name = "RAY_gcs_rpc_server_reconnect_timeout_s"
    assert alive.patience_of({}) == 60
    assert alive.patience_of({name: "90"}) == 90
    for stated in ("", "1m", "-1", "nan"):
        with pytest.raises(OptionError, match=f"{name} must be a number of seconds.*{stated!r}"):
            alive.patience_of({name: stated})


def test_an_address_that_never_answered_is_not_judged():
    async def run() -> None:
        server, address = await listening()
        await closed(server)
        cluster = alive.Cluster(head=address, raylet=address, patience_s=0)
        for _ in range(3):
            await cluster.require()

    asyncio.run(run())


KILLED = """
import os, signal, threading, time
import ray, zloader.ray as zr
from ray.cluster_utils import Cluster
from test_stream import SMALL, loader_of
def never(minibatch):
    time.sleep(3600)
cluster = Cluster(initialize_head=True, head_node_args={{"num_cpus": 1, "include_dashboard": False}})
ray.init(address=cluster.address, log_to_driver=False)
minibatches = zr.stream(loader_of({store!r}, batch_transform=never), producers=1, resources=SMALL)
def kill():
    while not [member for member in list(minibatches._crew._members) if member.pid]:
        time.sleep(0.1)
    time.sleep(2)
    os.kill(cluster.head_node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
threading.Thread(target=kill, daemon=True).start()
try:
    next(iter(minibatches))
except Exception as error:
    print(type(error).__name__, error, flush=True)
    minibatches.close()
    os._exit(3)
"""


@pytest.mark.slow  # a cluster of its own
def test_a_raylet_that_is_killed_hangs_nobody(cluster, tmp_path):
    """Ray ends the process, too, about as fast: either way it ends, and says that the raylet is gone."""
    from test_stream import run_driver

    write_store(counts(503, 97), tmp_path / "counts.zarr", tmp_path)
    done = run_driver(KILLED.format(store=str(tmp_path / "counts.zarr")))
    assert (done.returncode, "ProducerError the raylet of this machine" in done.stdout) in [(3, True), (1, False)]
    assert "aylet" in done.stdout + done.stderr
