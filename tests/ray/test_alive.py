"""A stream notices that the cluster is gone: sockets that stop to listen, and a raylet that is killed."""

from __future__ import annotations

import asyncio

import pytest
from helpers import counts, write_store

from zloader.common.errors import ProducerError

alive = pytest.importorskip("zloader.ray.alive", exc_type=ImportError, reason="Ray is not installed: pip install ray")

pytestmark = pytest.mark.any_version


async def listening() -> tuple[asyncio.Server, tuple[str, int]]:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()


async def closed(server: asyncio.Server) -> None:
    server.close()
    await server.wait_closed()


def test_a_raylet_that_is_gone_is_an_error_at_once():
    async def run() -> None:
        head, at_head = await listening()
        raylet, at_raylet = await listening()
        cluster = alive.Cluster(head=at_head, raylet=at_raylet, patience_s=1e9)
        await cluster.require()
        await closed(raylet)
        with pytest.raises(ProducerError, match=rf"the raylet .* at 127\.0\.0\.1:{at_raylet[1]}, is gone.* state_dict"):
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
