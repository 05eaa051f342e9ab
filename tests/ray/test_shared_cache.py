"""Machines on a Ray cluster that keep one copy of a store together: what they read, and that kills change nothing.

A machine is a cache directory. Its keeper is a process of its own, and training processes are threads here.
"""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
from helpers import PATIENCE_S, counts

import zloader as zl
from benchmarks.harness.s3 import Sim
from zloader.common.errors import OptionError

zr = pytest.importorskip("zloader.ray", exc_type=ImportError, reason='Ray is not installed: pip install "zloader[ray]"')
ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.any_version, pytest.mark.slow]  # Ray takes ten seconds to start

N_ROWS, BATCH_SIZE = 6000, 64


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sim]:
    """A bucket with a store of some megabytes, and so of several stretches."""
    folder = tmp_path_factory.mktemp("bucket")
    counts(N_ROWS, 500, density=0.4).write_h5ad(folder / "source.h5ad")
    zl.convert(folder / "source.h5ad", folder / "cells" / "atlas.zarr", progress=False)
    with Sim(root=folder) as sim:
        yield sim


def matrix_bytes(sim: Sim) -> int:
    assert sim.root is not None
    return sum(path.stat().st_size for path in sim.root.glob("cells/**/*") if path.is_file())


def loader_of(sim: Sim, cache: Any = None, **options: Any) -> zl.Loader:
    storage = {"key": "any", "secret": "any", "endpoint_url": sim.url}
    dataset = zl.open_dataset("s3://cells/atlas.zarr", cache=cache, storage_options=storage)
    return zl.Loader(dataset, batch_size=BATCH_SIZE, seed=5, options=zl.FetchOptions(threads=1), **options)


def digest(minibatches: Any, each: Callable[[], None] = lambda: None) -> str:
    found = hashlib.sha256()
    for minibatch in minibatches:
        for array in (minibatch.index, minibatch.x.crow_indices(), minibatch.x.col_indices(), minibatch.x.values()):
            found.update(array.numpy().tobytes())
        each()
    return found.hexdigest()


def shared(folder: Path, name: str, group: str, machines: int, **options: Any) -> Any:
    options = {"wait_s": PATIENCE_S, "deadline_s": PATIENCE_S} | options
    return zr.cache(folder / name, group=group, machines=machines, **options)


def together(loaders: list[zl.Loader], each: Callable[[], None] = lambda: None) -> list[str]:
    """The digests of an epoch of all machines, which run at the same time."""
    with ThreadPoolExecutor(len(loaders)) as threads:
        return list(threads.map(lambda loader: digest(loader, each), loaders))


def keepers_of(group: str) -> dict[str, Any]:
    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
    prefix = f"keeper/{group}/"
    return {name: ray.get_actor(name, "zloader") for name in names if name.startswith(prefix)}


def test_machines_read_the_store_once_and_yield_the_same(cluster, bucket, tmp_path):
    places = [{"rank": rank, "world_size": 2} for rank in range(2)]
    expected = [[digest(loader) for _ in range(2)] for loader in (loader_of(bucket, **place) for place in places)]
    caches = [shared(tmp_path, f"machine{rank}", "once", 2) for rank in range(2)]
    loaders = [loader_of(bucket, cache, **place) for cache, place in zip(caches, places, strict=True)]
    first = together(loaders)
    statistics = [loader.statistics() for loader in loaders]
    figures = zr.keepers(caches[0])
    assert len(figures) == 2
    of_keepers = [each for stores in figures.values() for each in stores]
    read = sum(each.bytes_read for each in statistics) + sum(each["bytes_read"] for each in of_keepers)
    held = sum(each["bytes_held"] for each in of_keepers)
    sent = sum(each["bytes_sent"] for each in of_keepers)
    assert 0.9 * matrix_bytes(bucket) < read <= matrix_bytes(bucket)
    assert read == held
    assert sent == sum(each.bytes_from_peers for each in statistics) > 0
    second = together(loaders)
    assert [first, second] == [list(each) for each in zip(*expected, strict=True)]
    assert [loader.statistics().gets for loader in loaders] == [0, 0]
    assert {each["bytes_read"] for each in of_keepers} == {
        each["bytes_read"] for stores in zr.keepers(caches[1]).values() for each in stores
    }


@pytest.mark.parametrize("kills", [20, pytest.param(100, marks=pytest.mark.long)])
def test_kills_change_no_value(cluster, bucket, tmp_path, kills):
    expected = [digest(each) for each in (loader_of(bucket, rank=rank, world_size=2) for rank in range(2))]
    loaders = []
    for rank in range(2):
        cache = shared(tmp_path, f"machine{rank}", "kills", 2, deadline_s=1.0)
        loaders.append(loader_of(bucket, cache, rank=rank, world_size=2))
    rng, lock, done = random.Random(0), threading.Lock(), []

    def kill() -> None:
        with lock:
            running = list(keepers_of("kills").values())
            if running and rng.random() < 0.3:
                ray.kill(rng.choice(running), no_restart=rng.random() < 0.3)
                done.append(time.monotonic())

    while len(done) < kills:
        for loader in loaders:
            loader.set_epoch(0)
        assert together(loaders, kill) == expected
    deadline = time.monotonic() + PATIENCE_S
    while not all(loader.statistics().bytes_from_peers for loader in loaders):  # the keepers are found again
        assert time.monotonic() < deadline
        together(loaders)


def test_keepers_end_with_the_processes_that_started_them(cluster, bucket, tmp_path):
    script = f"""
import ray, sys
ray.init(address={cluster.address!r}, log_to_driver=False)
import zloader as zl, zloader.ray as zr
cache = zr.cache(sys.argv[1], group="ends", wait_s={PATIENCE_S})
storage = {{"key": "any", "secret": "any", "endpoint_url": {bucket.url!r}}}
loader = zl.Loader(zl.open_dataset("s3://cells/atlas.zarr", cache=cache, storage_options=storage), seed=5)
print(sum(len(minibatch) for minibatch in loader), len(zr.keepers(cache)), "torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "cache")],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert done.stdout.split()[-3:] == [str(N_ROWS), "1", "True"]
    deadline = time.monotonic() + PATIENCE_S
    while keepers_of("ends"):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_workers_and_producers_share_too(cluster, bucket, tmp_path):
    expected = digest(loader_of(bucket))
    loader = loader_of(bucket, shared(tmp_path, "machine", "workers", 1))
    with zr.stream(loader, producers=1, resources={"num_cpus": 0.1}) as minibatches:
        assert digest(minibatches) == expected
    assert minibatches.statistics().bytes_read <= matrix_bytes(bucket)
    loader.set_epoch(0)
    workers = torch.utils.data.DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert digest(workers) == expected


def test_a_machine_alone_and_groups(cluster, bucket, tmp_path):
    expected = digest(loader_of(bucket))
    for group in ("one", "two"):
        loader = loader_of(bucket, shared(tmp_path, group, group, 1))
        assert digest(loader) == expected
        assert (loader.statistics().bytes_from_peers, len(keepers_of(group))) == (0, 1)
        assert 0.9 * matrix_bytes(bucket) < loader.statistics().bytes_read <= matrix_bytes(bucket)


def test_machines_that_do_not_come_are_not_waited_for_longer(cluster, bucket, tmp_path, caplog):
    loader = loader_of(bucket, shared(tmp_path, "machine", "absent", 3, wait_s=0.5))
    assert digest(loader) == digest(loader_of(bucket))
    assert "1 of 3 machines share the cache after 0.5 s" in caplog.text


def test_without_ray_the_machine_reads_by_itself(cluster, bucket, tmp_path, monkeypatch, caplog):
    cache = shared(tmp_path, "machine", "gone", 1)
    loader = loader_of(bucket, cache)

    def fails(**options):
        raise ConnectionError("no such cluster")

    monkeypatch.setattr(ray.util, "list_named_actors", fails)
    assert digest(loader) == digest(loader_of(bucket))
    assert "cannot look for the other machines that share the cache: no such cluster" in caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"machines": 0}, "machines"),
        ({"wait_s": -1}, "wait_s"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"group": "a/b"}, "group"),
        ({"max_bytes": "many"}, "max_bytes"),
    ],
)
def test_invalid_arguments(cluster, tmp_path, options, words):
    with pytest.raises(OptionError, match=words):
        zr.cache(tmp_path / "cache", **options)


def test_machines_of_torchrun(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "12")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert zr.cache(tmp_path).machines == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "x")
    assert zr.cache(tmp_path).machines == 1


def test_no_ray_here(monkeypatch, tmp_path):
    def fails(**options):
        raise ConnectionError("could not find any running Ray instance")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", fails)
    with pytest.raises(OptionError, match="ray start --head"):
        zr.cache(tmp_path)
