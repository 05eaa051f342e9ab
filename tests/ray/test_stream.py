"""A stream yields what its Loader would yield, bit for bit, whatever dies meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import PATIENCE_S, assert_same_minibatches, assert_threads_end, check_minibatch, counts, write_store

import zloader as zl
from zloader.common.errors import OptionError, ProducerError, StoreError
from zloader.dataset import obsm_arrays
from zloader.reading.bridge import Bridge
from zloader.reading.resources import Counters
from zloader.testing import assert_resumes_anywhere
from zloader.training.devices import PlainDevice

zr = pytest.importorskip("zloader.ray", exc_type=ImportError, reason='Ray is not installed: pip install "zloader[ray]"')
producers = pytest.importorskip("zloader.ray.producers")
crew = pytest.importorskip("zloader.ray.crew")
stream_module = pytest.importorskip("zloader.ray.streams")
window = pytest.importorskip("zloader.producing.window")
ray = pytest.importorskip("ray")

pytestmark = pytest.mark.slow  # Ray takes ten seconds to start

OBS = ["cell_type", "donor", "n_counts", "passed", "lane"]
ADATA = counts(503, 97)
ADATA.obsm["X_pca"] = np.random.default_rng(0).random((503, 5), np.float32)
TOKENS = {name: k for k, name in enumerate(["<pad>", "<mask>", "<cls>", "<eoc>", *ADATA.var_names])}
SMALL = {"num_cpus": 0.1}  # of the two cores that a test machine has


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    write_store(ADATA, folder / "counts.zarr", folder)
    return folder / "counts.zarr"


def loader_of(store: Path | str, **options: Any) -> zl.Loader:
    """32 minibatches in 8 fetches."""
    options = {"batch_size": 16, "fetch_factor": 4, "sampling": zl.BlockShuffling(8), "obs": OBS} | options
    storage_options = options.pop("storage_options", None)
    return zl.Loader(zl.open_dataset(str(store), storage_options=storage_options), **options)


@pytest.fixture(scope="module")
def stream(cluster, store) -> Iterator[zr.Stream]:
    """A stream with one producer, which tests share because each new producer takes seconds."""
    with zr.stream(loader_of(store), producers=1, resources=SMALL) as one:
        yield one


def assert_rows_once(minibatches: list[zl.Minibatch]) -> None:
    rows = np.concatenate([check_minibatch(minibatch, ADATA) for minibatch in minibatches])
    assert sorted(rows) == list(range(503))


def pids(stream: zr.Stream) -> list[int]:
    """The processes of the producers that have opened the stores."""
    return [member.pid for member in list(stream._crew._members) if member.pid]


def killed(pid: int) -> bool:
    """Kills a process, unless it is dead already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


class Killer:
    """Kills a random producer before random minibatches of an epoch."""

    def __init__(self, stream: zr.Stream, kills: int) -> None:
        self.stream, self.kills, self.random = stream, kills, random.Random(0)

    def epoch(self) -> list[zl.Minibatch]:
        found = []
        for minibatch in self.stream:
            found.append(minibatch)
            if self.kills and self.random.random() < 0.2 and (running := pids(self.stream)):
                self.kills -= killed(self.random.choice(running))
        return found


LAYOUTS = {
    "csr": {},
    "dense": {"layout": "dense", "dtype": "float64"},
    "packed": {"layout": "packed", "obsm": ["X_pca"]},
    "tokens": {
        "x": None,
        "tokens": zl.tokenizers.ScGPT(TOKENS),
    },
    "sets": {"sampling": zl.CellSets("donor", set_size=4)},
    "controls": {"controls": zl.MatchedControls("cell_type == 'a'", match="donor", n=2)},
    "own functions": {
        "batch_transform": lambda minibatch: {"rows": minibatch.index, "sums": minibatch.x.to_dense().sum(1)}
    },
    "device": {"device": PlainDevice(torch.device("cpu"))},
}


def in_this_process(loader: zl.Loader) -> Any:
    """Makes an epoch by a producer in this process, whose groups go through Ray's object store."""

    def start(work):
        producer = producers.Actor()
        producer.open(producers.pickled(loader.recipes))
        plan = producers.pickled(work.plan)

        async def produce(put):
            for remaining in work.remaining:
                for items, _ in producer.make(0, plan, remaining, 1 << 20):
                    shared = ray.get(ray.put(items))
                    assert not any(item.index.flags.writeable for item in shared)
                    await put([crew.writable(item) for item in shared], 0)

        return Bridge(produce, ready_bytes=1, name="zloader-test"), Counters()

    return loader.epoch_by(start)


@pytest.mark.any_version
@pytest.mark.parametrize("layout", LAYOUTS)
def test_minibatches_survive_the_object_store(cluster, store, layout):
    """Ray's arrays are read-only, but minibatches may be written to, as those of a Loader."""
    found = list(in_this_process(loader_of(store, **LAYOUTS[layout])))
    wanted = list(loader_of(store, **LAYOUTS[layout]))
    if layout == "own functions":
        assert all(one["rows"].equal(other["rows"]) for one, other in zip(found, wanted, strict=True))
        assert all(one["sums"].equal(other["sums"]) for one, other in zip(found, wanted, strict=True))
        return
    assert_same_minibatches(found, wanted)
    if layout == "controls":
        assert_same_minibatches([one.control for one in found], [one.control for one in wanted])
    for minibatch in found:
        minibatch.index[:] = -1  # an error, or a crash, if the memory were read-only
        minibatch.obs["n_counts"] += 1
        if minibatch.x is not None:
            values = minibatch.x if layout == "dense" else minibatch.x.values
            (values() if callable(values) else values)[:] = 0
    if layout == "sets":
        assert all(one.set_of_row.equal(other.set_of_row) for one, other in zip(found, wanted, strict=True))
    if layout == "tokens":
        for one, other in zip(found, wanted, strict=True):
            assert one.tokens["input_ids"].equal(other.tokens["input_ids"])
            assert one.tokens["attention_mask"].equal(other.tokens["attention_mask"])
            one.tokens["input_ids"][:] = 0


@pytest.mark.parametrize("producers", [1, 2, 3])
def test_equals_the_loader_bit_for_bit(stream, store, producers):
    loader = loader_of(store)
    stream.resize(producers)
    for epoch in (3, 4):
        stream.set_epoch(epoch)
        loader.set_epoch(epoch)
        found, wanted = list(stream), list(loader)
        assert_same_minibatches(found, wanted)
        assert_rows_once(found)
        assert len(stream) == len(found) == 32
        assert stream.state_dict() == loader.state_dict()
        assert stream.statistics().rows == 503
        assert stream.statistics().bytes_read >= loader.statistics().bytes_read > 0
        assert stream.statistics().in_flight_bytes == 0
    assert len(pids(stream)) <= producers
    assert_threads_end()


@pytest.mark.any_version
def test_counts_epochs_and_resumes_as_the_loader_does(stream, store):
    stream.resize(2)
    stream.set_epoch(0)
    next(iter(stream))  # a look does not cost an epoch
    iterator = iter(stream)
    head = [next(iterator) for _ in range(13)]
    state = json.loads(json.dumps(stream.state_dict()))
    del iterator
    loader = loader_of(store)
    loader.load_state_dict(state)  # a loader resumes a stream
    rest = list(loader)
    assert_same_minibatches([*head, *rest], loader_of(store))
    stream.load_state_dict(state)  # and a stream resumes itself
    assert_same_minibatches(stream, rest)
    assert stream.state_dict()["epoch"] == 1


@pytest.mark.any_version
def test_resumes_anywhere(stream):
    stream.resize(2)

    def again():
        stream.set_epoch(0)
        return stream

    assert_resumes_anywhere(again, every=3)


@pytest.mark.any_version
def test_a_killed_producer_costs_nothing(stream):
    stream.resize(2)
    stream.set_epoch(0)
    killer = Killer(stream, 1)
    assert_rows_once(killer.epoch())
    assert not killer.kills
    assert_rows_once(list(stream))


@pytest.mark.any_version
def test_producers_join_and_leave_during_an_epoch(stream, store):
    stream.resize(2)
    stream.set_epoch(0)
    found = []
    for number, minibatch in enumerate(stream):
        found.append(minibatch)
        stream.resize(1 + number % 2)
    assert_same_minibatches(found, loader_of(store))


@pytest.mark.any_version
def test_an_error_comes_when_its_minibatch_is_due(cluster, store, tmp_path):
    """With the URL and the key, after all minibatches before it."""
    folder = tmp_path / "damaged"
    write_store(ADATA, folder / "counts.zarr", folder)
    loader = loader_of(folder / "counts.zarr", shuffle=False, sampling=None)
    with zr.stream(loader, producers=1, resources=SMALL) as minibatches:
        assert len(list(minibatches)) == 32
        shards = sorted((folder / "counts.zarr/X/data/c").iterdir(), key=lambda shard: int(shard.name))
        shards[len(shards) // 2].unlink()
        minibatches.set_epoch(0)
        found = []
        with pytest.raises(StoreError, match=r"damaged/counts.zarr.*X/data/c/") as caught:
            found += minibatches
        assert "raised by a producer, on Ray node" in caught.value.__notes__[-1]
        done = minibatches.statistics().minibatches
        assert done in range(4, 32, 4)  # whole fetches
        assert minibatches.state_dict()["stretches"] == [[1, done]]


@pytest.mark.any_version
def test_an_error_in_opening_names_the_store(cluster, store, tmp_path):
    folder = tmp_path / "moved"
    write_store(ADATA, folder / "counts.zarr", folder)
    loader = loader_of(folder / "counts.zarr")
    (folder / "counts.zarr").rename(folder / "elsewhere.zarr")
    with (
        zr.stream(loader, producers=1, resources=SMALL) as minibatches,
        pytest.raises(StoreError, match=r"moved/counts.zarr") as caught,
    ):
        next(iter(minibatches))
    assert type(caught.value).__module__ == "zloader.common.errors"


@pytest.mark.any_version
def test_resources_that_no_machine_has_are_named(cluster, store):
    with (
        zr.stream(loader_of(store), producers=2, resources={"num_cpus": 77}, start_s=0.5) as minibatches,
        pytest.raises(ProducerError, match=r"no producer has started for 0.5 s. Each one asks for {'num_cpus': 77}"),
    ):
        next(iter(minibatches))
    assert_threads_end()


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"producers": 0}, "producers must be a whole number of at least 1, not 0"),
        ({"ahead_bytes": "lots"}, "ahead_bytes: 'lots' is not a size"),
        (
            {"ahead_bytes": "1TB"},
            "ahead_bytes='1TB' does not fit into .* which has 100 MiB",
        ),
        ({"resources": {"cpus": 2}}, "resources=.*cpus"),
        ({"locality": "global"}, "locality must be one of"),
        ({"overtake_s": 0}, "overtake_s must be a number of at least"),
        ({"start_s": "long"}, "start_s must be a number of at least"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refuses_invalid_options(cluster, store, options, message):
    with pytest.raises(OptionError, match=message):
        zr.stream(loader_of(store), **options)


@pytest.mark.any_version
def test_a_stream_is_iterable_like_a_loader(stream):
    with pytest.raises(TypeError, match="'Stream' object is not an iterator"):
        next(stream)


@pytest.mark.any_version
def test_refuses_what_is_no_loader(cluster, store):
    with pytest.raises(OptionError, match=r"zr.stream needs a zl.Loader, not 'cells.zarr'"):
        zr.stream("cells.zarr")


@pytest.mark.any_version
def test_a_closed_stream_says_so(cluster, store):
    minibatches = zr.stream(loader_of(store), producers=1, resources=SMALL)
    minibatches.close()
    with pytest.raises(ProducerError, match="the stream was closed"):
        list(minibatches)


@pytest.mark.any_version
def test_random_kills_of_producers_and_of_a_machine(two_machines, store):
    machine = two_machines.add_node(num_cpus=2, object_store_memory=100 << 20)
    with zr.stream(loader_of(store), producers=3, resources={"num_cpus": 0.3}, ahead_bytes=200_000) as minibatches:
        killer = Killer(minibatches, 20)
        epochs = 0
        while killer.kills or epochs < 3:
            if epochs == 1:
                timer = threading.Timer(0.5, two_machines.remove_node, [machine], {"allow_graceful": False})
                timer.start()
            assert_rows_once(killer.epoch())
            epochs += 1
        timer.join()
        loader = loader_of(store)
        loader.set_epoch(epochs)
        assert_same_minibatches(minibatches, loader)


@pytest.mark.any_version
def test_a_stopped_producer_stops_nobody(cluster, store):
    loader = loader_of(store)
    with zr.stream(loader, producers=2, resources=SMALL, overtake_s=1) as minibatches:
        list(minibatches)
        loader.set_epoch(0)
        found = []
        stopped = pids(minibatches)[0]
        os.kill(stopped, signal.SIGSTOP)
        try:
            found += minibatches
        finally:
            killed(stopped)
        assert_same_minibatches(found, loader_of(store))


def run_driver(script: str) -> subprocess.CompletedProcess[str]:
    """Runs a driver of the cluster in a process of its own."""
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path])
    return subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.any_version
def test_resumes_after_the_driver_has_died(two_machines, store):
    script = f"""
import json, os
import ray, zloader.ray as zr
from test_stream import loader_of
ray.init(address={two_machines.address!r}, log_to_driver=False)
minibatches = zr.stream(loader_of({str(store)!r}), producers=1, resources={SMALL!r})
for number, minibatch in enumerate(minibatches):
    if number == 9:
        print(json.dumps(minibatches.state_dict()), flush=True)
        os.kill(os.getpid(), 9)
"""
    done = run_driver(script)
    assert done.returncode == -signal.SIGKILL, done.stderr
    state = json.loads(done.stdout.strip().splitlines()[-1])
    with zr.stream(loader_of(store), producers=1, resources=SMALL) as minibatches:
        minibatches.load_state_dict(state)
        assert_same_minibatches(minibatches, list(loader_of(store))[10:])


@pytest.mark.any_version
def test_store_on_s3(two_machines, s3, tmp_path):
    write_store(ADATA, s3.url("counts.zarr"), tmp_path, storage_options=s3.storage_options)
    options = {"storage_options": s3.storage_options}
    with zr.stream(loader_of(s3.url("counts.zarr"), **options), producers=2, resources=SMALL) as minibatches:
        assert_same_minibatches(minibatches, loader_of(s3.url("counts.zarr"), **options))


@ray.remote(num_cpus=0)
class Rank:
    """A training process that averages with the others over gloo, and streams its own part."""

    def train(self, rank: int, world_size: int, store: str, rendezvous: str) -> tuple[list[list[int]], float]:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
        )
        total, rows = torch.zeros(1, dtype=torch.float64), []
        with zr.stream(loader_of(store), producers=1, resources=SMALL) as minibatches:
            for minibatch in minibatches:
                of_all = minibatch.x.values().sum(dtype=torch.float64)
                torch.distributed.all_reduce(of_all)  # hangs unless all ranks have as many minibatches
                total += of_all
                rows.append(minibatch.index.tolist())
        torch.distributed.destroy_process_group()
        return rows, float(total)


@pytest.mark.any_version
def test_two_ranks_train_with_gloo(two_machines, store, tmp_path):
    ranks = [Rank.remote() for _ in range(2)]
    results = ray.get([rank.train.remote(k, 2, str(store), str(tmp_path / "meet")) for k, rank in enumerate(ranks)])
    rows = [row for each, _ in results for minibatch in each for row in minibatch]
    assert sorted(rows) == list(range(503))
    assert [total for _, total in results] == [ADATA.X.sum(dtype=np.float64)] * 2
    for rank, (found, _) in enumerate(results):
        wanted = loader_of(store, rank=rank, world_size=2)
        assert found == [minibatch.index.tolist() for minibatch in wanted]


@pytest.mark.any_version
def test_a_producer_counts_what_its_mirror_holds(cluster, store, tmp_path):
    dataset = zl.open_dataset(str(store), cache=tmp_path / "cache")
    loader = zl.Loader(dataset, batch_size=16, fetch_factor=4, shuffle=False)
    producer = producers.Actor()
    producer.open(producers.pickled(loader.recipes))
    plan = loader.plan(0)
    asked = producers.pickled(plan), list(plan.remaining())
    assert producer.held(0, *asked) == [0.0] * 8
    list(zl.Loader(dataset[:256], batch_size=64, options=zl.FetchOptions(least_read_bytes=0)))
    half = producer.held(0, *asked)
    assert half[:4] == [1.0] * 4
    assert max(half[5:]) < 0.5  # a chunk may hold rows of two fetches
    list(loader)
    assert producer.held(0, *asked) == [1.0] * 8


class CacheOfTheMachine(zl.Cache):
    """A cache whose directory has the name of the Ray node on which it is unpickled."""

    def __reduce__(self):
        return cache_of, (self.directory, None)


def cache_of(directory: Path, node: str | None) -> zl.Cache:
    return zl.Cache(directory / (node or ray.get_runtime_context().get_node_id()))


@pytest.mark.any_version
def test_fetches_go_to_the_machine_whose_mirror_holds_them(two_machines, store, tmp_path, monkeypatch):
    """The mirror of one machine has the first half of the rows, and that of the other one has the second half.

    Only four fetches begin before the homes of the others are known, and all of them have room.
    """
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    for node, half in zip(nodes, (slice(0, 256), slice(256, 503)), strict=True):
        opened = zl.open_dataset(str(store), cache=cache_of(tmp_path, node))
        list(zl.Loader(opened[half], batch_size=64, options=zl.FetchOptions(least_read_bytes=0)))
    dataset = zl.open_dataset(str(store), cache=CacheOfTheMachine(tmp_path))
    loader = zl.Loader(dataset, batch_size=16, fetch_factor=1, obs=OBS, shuffle=False)
    shares, choices = {}, []

    class Spied(stream_module.Window):
        def set_home(self, number, of_machines):
            shares[number] = of_machines
            super().set_home(number, of_machines)

        def next(self, maker, now_s, machine=""):
            homes, coming = dict(self.homes), [each.number for each in self.coming(window.LOOK_AHEAD)]
            if not homes and coming[:1] == [4]:
                return None
            fetch = super().next(maker, now_s, machine)
            if fetch is not None and fetch.number in coming:
                choices.append((machine, fetch.number, [k for k in coming if homes.get(k) == machine]))
            return fetch

    monkeypatch.setattr(stream_module, "Window", Spied)
    options = {"resources": {"num_cpus": 1.5}, "locality": "machine", "ahead_bytes": 10_000_000}
    with zr.stream(loader, producers=2, **options) as minibatches:
        iterator = iter(minibatches)
        found = [next(iterator)]
        deadline = time.monotonic() + PATIENCE_S
        while not shares and time.monotonic() < deadline:
            time.sleep(0.05)
        found += iterator
        assert {member.machine for member in minibatches._crew._members} == set(nodes)
    assert_rows_once(found)
    for number, of_machines in shares.items():
        if number in range(14, 18):
            continue  # a chunk may hold rows of both halves
        held = [of_machines[node] for node in nodes]
        assert held[number >= 16] == 1.0
        assert held[number < 16] < 1.0
    chosen = [(number, at_home) for _, number, at_home in choices if at_home]
    assert all(number in at_home for number, at_home in chosen)  # one of its own, where it had any
    assert chosen


@pytest.mark.any_version
def test_groups_are_as_small_as_the_share_of_a_producer(cluster, store):
    loader = loader_of(store)
    producer = producers.Actor()
    producer.open(producers.pickled(loader.recipes))
    plan, (first, *_) = producers.pickled(loader.plan(0)), loader.plan(0).remaining()
    sizes = {share: [len(items) for items, _ in producer.make(0, plan, first, share)] for share in (1, 1 << 20)}
    assert sizes == {1: [1] * 4, 1 << 20: [4]}


@pytest.mark.any_version
def test_a_producer_opens_an_epoch_once(cluster, store, monkeypatch):
    """Its fetches share the recipe, and with it the shard indexes, which are read once."""
    loader = loader_of(store)
    producer = producers.Actor()
    producer.open(producers.pickled(loader.recipes))
    plan, remaining = producers.pickled(loader.plan(0)), list(loader.plan(0).remaining())
    made = [list(producer.make(0, plan, each, 1 << 20))[-1][1] for each in remaining * 2]
    recipe = producer._producer._epoch[2]
    known = sum(len(indexes) for part in recipe.x["X"] for indexes in part.indexes.values())
    spans = sum(counted.gets for counted in made)
    list(loader)
    assert sum(counted.bytes_read for counted in made[8:]) < sum(counted.bytes_read for counted in made[:8])
    assert spans - loader.statistics().gets == sum(counted.gets for counted in made[8:])
    assert known == sum(array.n_shards for array in loader.dataset.store.matrix("X").arrays)
    assert producer._producer._opened(1, plan)[1] is not recipe


@pytest.fixture
def on_a_simulated_server(store, tmp_path, sim, monkeypatch) -> tuple[Any, zl.Loader]:
    """A simulated S3 server, and a loader of a store there that keeps some columns chunk by chunk."""
    monkeypatch.setattr(obsm_arrays, "_MOST_WHOLE", 8)
    shutil.copytree(store, tmp_path / "bucket/counts.zarr")
    server = sim()
    dataset = zl.open_dataset(
        "s3://bucket/counts.zarr",
        cache=tmp_path / "cache",
        storage_options={"key": "any", "secret": "any", "endpoint_url": server.url},
    )
    options = zl.FetchOptions(deadline_s=PATIENCE_S, gap_bytes=0, least_read_bytes=0)  # every fetch reads
    order = {"batch_size": 16, "fetch_factor": 4, "sampling": zl.BlockShuffling(8)}
    loader = zl.Loader(dataset, obs=OBS, obsm=["X_pca"], options=options, **order)
    return server, loader


@pytest.mark.any_version
def test_two_fetches_at_once_read_large_columns(cluster, on_a_simulated_server):
    """Each has its own event loop, and sources of its own."""
    _, loader = on_a_simulated_server
    producer = producers.Actor()
    producer.open(producers.pickled(loader.recipes))
    plan, remaining = producers.pickled(loader.plan(0)), list(loader.plan(0).remaining())
    together = threading.Barrier(2, timeout=PATIENCE_S)

    def make(each):
        producer._producer._opened(0, plan)
        together.wait()
        return [item for items, _ in producer.make(0, plan, each, 1 << 20) for item in items]

    with ThreadPoolExecutor(2) as lanes:
        made = [item for items in lanes.map(make, remaining) for item in items]
    assert len(remaining) == 8
    rows = [item.index for item in made]
    assert sorted(np.concatenate(rows)) == list(range(503))
    for item in made:
        np.testing.assert_array_equal(item.obs["n_counts"], ADATA.obs["n_counts"].to_numpy()[item.index])
        np.testing.assert_array_equal(item.obsm["X_pca"], ADATA.obsm["X_pca"][item.index])


@pytest.mark.any_version
def test_a_retry_counts_for_its_own_fetch_only(cluster, on_a_simulated_server):
    server, loader = on_a_simulated_server
    producer = producers.Actor()
    producer.open(producers.pickled(loader.recipes))
    server.faults = [{"kind": "status", "match": "obsm/X_pca/c/", "count": 1}]
    plan, remaining = producers.pickled(loader.plan(0)), list(loader.plan(0).remaining())
    counted = [[counters for _, counters in producer.make(0, plan, each, 1 << 20)][-1] for each in remaining]
    assert [each.retries for each in counted] == [1] + [0] * 7


@pytest.mark.any_version
def test_takes_only_so_many_bytes_of_a_large_fetch(cluster, store):
    """One fetch has all rows, and `ahead_bytes` room for about five of its 32 minibatches."""
    loader = loader_of(store, fetch_factor=32)
    nbytes = 16 * 30 * 8
    with zr.stream(loader, producers=2, resources=SMALL, ahead_bytes=5 * nbytes) as minibatches:
        iterator = iter(minibatches)
        found = [next(iterator)]
        (running,) = minibatches._running
        deadline = time.monotonic() + PATIENCE_S
        while (ready_bytes := running._window.ready_bytes) < 5 * nbytes and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)  # for more than there is room for
        assert running._window.ready_bytes < 8 * nbytes
        found += iterator
        assert ready_bytes >= 5 * nbytes
        assert_same_minibatches(found, loader_of(store, fetch_factor=32))


@pytest.mark.any_version
def test_the_end_of_ray_is_an_error_and_no_hang(cluster, store):
    script = f"""
import threading, time
import ray, zloader.ray as zr
from test_stream import loader_of
def never(minibatch):
    time.sleep(3600)
ray.init(address={cluster.address!r}, log_to_driver=False)
loader = loader_of({str(store)!r}, batch_transform=never)
minibatches = zr.stream(loader, producers=1, resources={SMALL!r})
errors = []
def take():
    try:
        next(iter(minibatches))
    except Exception as error:
        errors.append(error)
waiting = threading.Thread(target=take)
waiting.start()
while not [member for member in list(minibatches._crew._members) if member.pid]:
    time.sleep(0.1)
time.sleep(1)
ray.shutdown()
waiting.join()
ray.init(address={cluster.address!r}, log_to_driver=False)
take()
for error in errors:
    print(type(error).__name__, str(error)[:33])
minibatches.close()
"""
    done = run_driver(script)
    assert done.stdout.splitlines() == ["ProducerError Ray was shut down in this process"] * 2, done.stderr
    assert done.returncode == 0
