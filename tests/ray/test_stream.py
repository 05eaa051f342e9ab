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
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import MACHINE
from helpers import (
    PATIENCE_S,
    assert_same_minibatches,
    assert_threads_end,
    check_minibatch,
    counts,
    fetch_options,
    write_store,
)

import zloader as zl
from zloader.common.errors import OptionError, ProducerError, StoreError
from zloader.dataset import obsm_arrays
from zloader.reading.bridge import Bridge
from zloader.reading.resources import Counters
from zloader.testing import assert_resumes_anywhere
from zloader.training.device import PlainDevice

zr = pytest.importorskip("zloader.ray", exc_type=ImportError, reason='Ray is not installed: pip install "zloader[ray]"')
sent = pytest.importorskip("zloader.ray.sent")
streams = pytest.importorskip("zloader.ray.streams")
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
def stream(cluster, store) -> zr.Stream:
    return zr.stream(loader_of(store), tasks=1, resources=SMALL)


def assert_rows_once(minibatches: list[zl.Minibatch]) -> None:
    rows = np.concatenate([check_minibatch(minibatch, ADATA) for minibatch in minibatches])
    assert sorted(rows) == list(range(503))


def processes() -> list[int]:
    """The processes of the cluster that run tasks of streams now, and that have not just been killed."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if not (process / "cmdline").read_bytes().startswith(b"ray::_make"):
                continue
            state, parent, *_ = (process / "stat").read_text().rpartition(")")[2].split()
            if state != "Z" and os.environ["RAY_TMPDIR"].encode() in Path(f"/proc/{parent}/cmdline").read_bytes():
                found.append(int(process.name))
    return found


def killed(pid: int) -> bool:
    """Kills a process, unless it is dead already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def slowed(minibatch: zl.Minibatch) -> zl.Minibatch:
    """So that tasks run long enough to be killed."""
    time.sleep(0.02)
    return minibatch


class Killer:
    """Kills a random task before random minibatches of an epoch."""

    def __init__(self, stream: zr.Stream, kills: int) -> None:
        self.stream, self.kills, self.random = stream, kills, random.Random(0)

    def epoch(self) -> list[zl.Minibatch]:
        found = []
        for minibatch in self.stream:
            found.append(minibatch)
            if self.kills and self.random.random() < 0.5 and (running := processes()):
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


def made_of(loader: zl.Loader, plan: Any, remaining: Any) -> list[Any]:
    """What a task yields of a fetch."""
    ids = str(id(loader)), str(id(plan))
    return list(streams._make(ids, sent.pickled(loader.recipes), sent.pickled(plan), remaining))


def in_this_process(loader: zl.Loader) -> Any:
    """Makes an epoch by tasks in this process, whose groups go through Ray's object store."""

    def start(work):
        async def produce(put):
            for remaining in work.remaining:
                *groups, _ = made_of(loader, work.plan, remaining)
                for items in groups:
                    shared = ray.get(ray.put(items))
                    assert not any(item.index.flags.writeable for item in shared)
                    await put([sent.writable(item) for item in shared], 0)

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


@pytest.mark.parametrize("tasks", [1, 2, 3])
def test_equals_the_loader_bit_for_bit(stream, store, tasks):
    loader = loader_of(store)
    stream.resize(tasks)
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
def test_a_killed_task_costs_nothing(cluster, store):
    loader = loader_of(store, batch_transform=slowed)
    killer = Killer(zr.stream(loader, tasks=2, resources=SMALL), 1)
    while killer.kills:
        assert_rows_once(killer.epoch())
    assert_rows_once(list(killer.stream))


@pytest.mark.any_version
def test_the_number_of_tasks_changes_during_an_epoch(stream, store):
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
    minibatches = zr.stream(loader, tasks=2, resources=SMALL)
    assert len(list(minibatches)) == 32
    shards = sorted((folder / "counts.zarr/X/data/c").iterdir(), key=lambda shard: int(shard.name))
    shards[len(shards) // 2].unlink()
    minibatches.set_epoch(0)
    found = []
    with pytest.raises(StoreError, match=r"damaged/counts.zarr.*X/data/c/") as caught:
        found += minibatches
    assert "raised by a task, on Ray node" in caught.value.__notes__[-1]
    done = minibatches.statistics().minibatches
    assert done in range(4, 32, 4)  # whole fetches
    assert minibatches.state_dict()["stretches"] == [[1, done]]


@pytest.mark.any_version
def test_an_error_in_opening_names_the_store(cluster, store, tmp_path):
    folder = tmp_path / "moved"
    write_store(ADATA, folder / "counts.zarr", folder)
    loader = loader_of(folder / "counts.zarr")
    (folder / "counts.zarr").rename(folder / "elsewhere.zarr")
    with pytest.raises(StoreError, match=r"moved/counts.zarr") as caught:
        next(iter(zr.stream(loader, tasks=1, resources=SMALL)))
    assert type(caught.value).__module__ == "zloader.common.errors"


@pytest.mark.any_version
def test_resources_that_no_machine_has_are_named(cluster, store):
    minibatches = zr.stream(loader_of(store), resources={"num_cpus": 77}, deadline_s=0.5)
    message = r"fetch 0 has made no progress for 0.5 s. Its task asks for {'num_cpus': 77}"
    with pytest.raises(ProducerError, match=message):
        next(iter(minibatches))
    assert_threads_end()


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": 0}, "tasks must be a whole number of at least 1, not 0"),
        ({"ahead_bytes": "lots"}, "ahead_bytes: 'lots' is not a size"),
        (
            {"ahead_bytes": "1TB"},
            "ahead_bytes='1TB' does not fit into .* which has 100 MiB",
        ),
        ({"resources": {"cpus": 2}}, "resources=.*cpus"),
        ({"deadline_s": 0}, "deadline_s must be a number of at least"),
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
@pytest.mark.long
@pytest.mark.parametrize(("n_machines", "kills"), [(2, 20), (0, 30)])
def test_fifty_kills_and_two_lost_machines(cluster, store, n_machines, kills):
    """The machines are lost with finished minibatches that nobody has taken."""
    machines = [cluster.add_node(**MACHINE) for _ in range(n_machines)]
    loader = loader_of(store, batch_transform=slowed)
    minibatches = zr.stream(loader, tasks=6, resources={"num_cpus": 0.5}, ahead_bytes=1 << 20)
    killer = Killer(minibatches, kills)
    epochs = 0
    while killer.kills or machines:
        lost = [machines.pop()] if machines else []
        timers = [threading.Timer(0.5, cluster.remove_node, [each], {"allow_graceful": False}) for each in lost]
        for timer in timers:
            timer.start()
        assert_rows_once(killer.epoch())
        epochs += 1
        for timer in timers:
            timer.join()
    loader = loader_of(store)
    loader.set_epoch(epochs)
    assert_same_minibatches(minibatches, loader)


@pytest.mark.any_version
def test_minibatches_that_are_lost_with_their_machine_are_made_again(cluster, store):
    """All of an epoch is ready on a machine that goes away before anything but the first minibatch is taken."""
    machine = cluster.add_node(**MACHINE, resources={"here": 8})
    loader = loader_of(store, layout="dense", batch_size=64, fetch_factor=2)  # objects that Ray keeps on their machine
    minibatches = zr.stream(loader, tasks=8, resources={"num_cpus": 0.1, "resources": {"here": 1}}, ahead_bytes=1 << 25)
    iterator = iter(minibatches)
    found = [next(iterator)]
    deadline = time.monotonic() + PATIENCE_S
    while processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    cluster.remove_node(machine, allow_graceful=False)
    cluster.add_node(**MACHINE, resources={"here": 8})
    found += iterator
    assert_same_minibatches(found, loader_of(store, layout="dense", batch_size=64, fetch_factor=2))


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
minibatches = zr.stream(loader_of({str(store)!r}), tasks=1, resources={SMALL!r})
for number, minibatch in enumerate(minibatches):
    if number == 9:
        print(json.dumps(minibatches.state_dict()), flush=True)
        os.kill(os.getpid(), 9)
"""
    done = run_driver(script)
    assert done.returncode == -signal.SIGKILL, done.stderr
    state = json.loads(done.stdout.strip().splitlines()[-1])
    minibatches = zr.stream(loader_of(store), tasks=1, resources=SMALL)
    minibatches.load_state_dict(state)
    assert_same_minibatches(minibatches, list(loader_of(store))[10:])


@pytest.mark.any_version
def test_store_on_s3(two_machines, s3, tmp_path):
    write_store(ADATA, s3.url("counts.zarr"), tmp_path, storage_options=s3.storage_options)
    options = {"storage_options": s3.storage_options}
    minibatches = zr.stream(loader_of(s3.url("counts.zarr"), **options), tasks=2, resources=SMALL)
    assert_same_minibatches(minibatches, loader_of(s3.url("counts.zarr"), **options))


@ray.remote(num_cpus=0)
class Rank:
    """A training process that averages with the others over gloo, and streams its own part."""

    def train(self, rank: int, world_size: int, store: str, rendezvous: str) -> tuple[list[list[int]], float]:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
        )
        total, rows = torch.zeros(1, dtype=torch.float64), []
        for minibatch in zr.stream(loader_of(store), tasks=1, resources=SMALL):
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
def test_a_process_opens_an_epoch_once(cluster, store):
    """Its fetches share the recipe, and with it the shard indexes, which are read once."""
    loader = loader_of(store)
    plan = loader.plan(0)
    made = [made_of(loader, plan, each)[-1] for each in [*plan.remaining()] * 2]
    _, recipe = streams._opened[str(id(plan))]
    known = sum(len(indexes) for part in recipe.x["X"] for indexes in part.indexes.values())
    spans = sum(counted.gets for counted in made)
    list(loader)
    assert sum(counted.bytes_read for counted in made[8:]) < sum(counted.bytes_read for counted in made[:8])
    assert spans - loader.statistics().gets == sum(counted.gets for counted in made[8:])
    assert known == sum(array.n_shards for array in loader.dataset.store.matrix("X").arrays)
    for epoch in range(streams._MOST_OPENED + 1):
        streams._once(f"epoch {epoch}", lambda: "another")
    assert len(streams._opened) == streams._MOST_OPENED


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
    options = fetch_options(deadline_s=PATIENCE_S, gap_bytes=0, least_read_bytes=0)  # every fetch reads
    order = {"batch_size": 16, "fetch_factor": 4, "sampling": zl.BlockShuffling(8)}
    loader = zl.Loader(dataset, obs=OBS, obsm=["X_pca"], options=options, **order)
    return server, loader


@pytest.mark.any_version
def test_tasks_read_large_columns(cluster, on_a_simulated_server):
    _, loader = on_a_simulated_server
    plan = loader.plan(0)
    groups = [group for each in plan.remaining() for group in made_of(loader, plan, each)[:-1]]
    made = [item for group in groups for item in group]
    assert sorted(np.concatenate([item.index for item in made])) == list(range(503))
    for item in made:
        np.testing.assert_array_equal(item.obs["n_counts"], ADATA.obs["n_counts"].to_numpy()[item.index])
        np.testing.assert_array_equal(item.obsm["X_pca"], ADATA.obsm["X_pca"][item.index])


@pytest.mark.any_version
def test_a_retry_counts_for_its_own_fetch_only(cluster, on_a_simulated_server):
    server, loader = on_a_simulated_server
    plan = loader.plan(0)
    server.faults = [{"kind": "status", "match": "obsm/X_pca/c/", "count": 1}]
    counted = [made_of(loader, plan, each)[-1] for each in plan.remaining()]
    assert [each.retries for each in counted] == [1] + [0] * 7


@pytest.mark.any_version
@pytest.mark.parametrize("fetches", [1, 3])
def test_a_trainer_that_stalls_bounds_the_bytes_made_ahead(cluster, store, tmp_path, fetches):
    """`ahead_bytes` has room for some fetches of about 64 rows of 30 values. The trainer has one, and one is due."""

    def noted(minibatch):
        (tmp_path / str(int(minibatch.index[0]))).touch()
        return minibatch

    loader = loader_of(store, obs=[], batch_transform=noted)
    mean = loader.recipes.expected_bytes(64)
    minibatches = zr.stream(loader, tasks=8, resources=SMALL, ahead_bytes=int((fetches + 0.5) * mean))
    iterator = iter(minibatches)
    found = [next(iterator)]
    deadline = time.monotonic() + PATIENCE_S
    while (processes() or len(list(tmp_path.iterdir())) < 4 * fetches) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)  # for more than there is room for
    assert 4 * fetches <= len(list(tmp_path.iterdir())) <= 4 * (fetches + 2)
    found += iterator
    assert_same_minibatches(found, loader_of(store, obs=[]))


@pytest.mark.any_version
def test_the_end_of_ray_is_an_error_and_no_hang(cluster, store):
    script = f"""
import threading, time
import ray, zloader.ray as zr
from test_stream import loader_of, processes
def never(minibatch):
    time.sleep(3600)
ray.init(address={cluster.address!r}, log_to_driver=False)
loader = loader_of({str(store)!r}, batch_transform=never)
minibatches = zr.stream(loader, tasks=1, resources={SMALL!r})
errors = []
def take():
    try:
        next(iter(minibatches))
    except Exception as error:
        errors.append(error)
waiting = threading.Thread(target=take)
waiting.start()
while not processes():
    time.sleep(0.1)
time.sleep(1)
began = time.monotonic()
ray.shutdown()
waiting.join()
assert time.monotonic() - began < 60
ray.init(address={cluster.address!r}, log_to_driver=False)
take()
for error in errors:
    print(type(error).__name__, str(error)[:33])
"""
    done = run_driver(script)
    assert done.stdout.splitlines() == ["ProducerError Ray was shut down in this process"] * 2, done.stderr
    assert done.returncode == 0
