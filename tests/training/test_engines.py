"""A Loader with `processes`: the same minibatches, made by engines that may die at any time, and that leave nothing."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
import torch
from helpers import PATIENCE_S, of_genes
from nbclient import NotebookClient
from test_frameworks import ADATA, GENEFORMER, SIZES, plain, url  # noqa: F401 -- the fixture

import zloader as zl
from zloader.common.errors import ReadError
from zloader.producing import shared_memory
from zloader.testing import assert_resumes_anywhere

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="/proc, which these tests ask, is Linux's")
MANY = {"batch_size": 8, "fetch_factor": 2, "seed": 3, "obs": ["cell_type", "n_counts"]}


@pytest.fixture(scope="module")
def dataset(url) -> zl.Dataset:  # noqa: F811
    return zl.open_dataset(url)


@pytest.fixture(scope="module")
def crew(dataset) -> zl.Loader:
    """A loader whose engines run already."""
    loader = zl.Loader(dataset, processes=2, **MANY)
    list(loader)
    return loader


def assert_same(found: Any, wanted: Any) -> None:
    """The same values in the same types."""
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for name, part in wanted.items():
            assert_same(found[name], part)
    elif isinstance(wanted, list | tuple):
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    elif isinstance(wanted, np.ndarray):
        np.testing.assert_array_equal(found, wanted, strict=True)
    else:
        assert found == wanted


def epochs(loader: zl.Loader, n_epochs: int) -> list[list[Any]]:
    return [[plain(minibatch) for minibatch in loader] for _ in range(n_epochs)]


def engines_of(loader: zl.Loader) -> list[Any]:
    return list(loader._engines._engines._members)


def is_there(pid: int) -> bool:
    """Whether a process runs, and is no zombie."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until(holds: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---- what is yielded


def scaled(minibatch):
    return {"x": minibatch.x.to_dense() * 2, "half": minibatch.obs["n_counts"].bfloat16(), "rows": minibatch.index}


CONTENTS = [
    {},
    {"layout": "dense", "dtype": "float64", "obsm": ["place"], "framework": "torch"},
    {"x": ["X", "layers/halves"], "layout": "packed", "genes": ["gene 7", "gene 3"]},
    {"tokens": GENEFORMER, "transforms": [zl.transforms.LogNormalize(1e4)]},
    {"sampling": zl.CellSets("donor", set_size=4)},
    {"neighbors": zl.Neighbors("distances", k=2), "framework": "numpy"},
    {"batch_transform": scaled},
    {"x": None, "drop_last": True, "rank": 1, "world_size": 2},
]


@pytest.mark.slow  # engines for each
@pytest.mark.parametrize("options", CONTENTS, ids=[" ".join(each) or "plain" for each in CONTENTS])
def test_minibatches_are_those_of_a_loader_without(dataset, options):
    options = MANY | options
    dataset = of_genes(dataset, options.pop("genes", None))
    assert_same(epochs(zl.Loader(dataset, processes=3, **options), 2), epochs(zl.Loader(dataset, **options), 2))


def test_two_engines_make_what_one_process_makes(dataset, crew):
    crew.set_epoch(0)
    assert_same(epochs(crew, 3), epochs(zl.Loader(dataset, **MANY), 3))
    statistics = crew.statistics()
    assert (statistics.rows, statistics.minibatches) == (ADATA.n_obs, len(crew))


def test_engines_do_not_import_torch(crew):
    for engine in engines_of(crew):
        assert "libtorch" not in Path(f"/proc/{engine.pid}/maps").read_text()


def test_minibatches_are_writable_and_stay(crew):
    crew.set_epoch(0)
    kept = list(crew)
    copies = [plain(pickle.loads(pickle.dumps(each.index))).copy() for each in kept]
    for minibatch in kept:
        minibatch.x.values().mul_(0)
        minibatch.obs["n_counts"].zero_()
    list(crew)
    assert_same([plain(each.index) for each in kept], copies)
    assert not any(each.x.values().any() for each in kept)


@pytest.mark.slow  # engines for each state
def test_states_are_those_of_a_loader_without(dataset):
    both = [zl.Loader(dataset, processes=each, **MANY) for each in (0, 2)]
    for one, other in zip(*both, strict=True):
        assert both[0].state_dict() == both[1].state_dict()
        assert one.index.tolist() == other.index.tolist()
    assert_resumes_anywhere(lambda: zl.Loader(dataset, processes=1, **MANY), every=6)


# ---- engines that die


@pytest.mark.slow
def test_random_kills_lose_and_repeat_nothing(dataset):
    wanted, chance, kills = epochs(zl.Loader(dataset, **MANY), 1)[0], random.Random(5), 0
    loader = zl.Loader(dataset, processes=3, **MANY)
    while kills < 30:
        loader.set_epoch(0)
        found = []
        for minibatch in loader:
            found.append(plain(minibatch))
            alive = [engine.pid for engine in engines_of(loader) if is_there(engine.pid) and engine.pid]
            if chance.random() < 0.2 and alive:
                os.kill(chance.choice(alive), chance.choice([signal.SIGKILL, signal.SIGTERM]))
                kills += 1
        assert_same(found, wanted)


@pytest.mark.slow
def test_engines_that_died_between_epochs_are_replaced(dataset, crew):
    crew.set_epoch(1)
    wanted = epochs(crew, 1)
    dead = [engine.pid for engine in engines_of(crew)]
    for pid in dead:
        os.kill(pid, signal.SIGKILL)
    crew.set_epoch(1)
    assert_same(epochs(crew, 1), wanted)
    assert not any(map(is_there, dead))


OTHER = """
import sys, zloader as zl
loader = zl.Loader(zl.open_dataset(sys.argv[1]), processes=2, batch_size=8, fetch_factor=2)
for minibatch in loader:
    break
print(*[engine.pid for engine in loader._engines._engines._members if engine.pid], flush=True)
{then}
"""


@pytest.mark.slow
@pytest.mark.parametrize("then", ["input()", "raise SystemExit", "del loader; import gc; gc.collect(); input()"])
def test_nothing_is_left_of_a_script_without_main(url, then):  # noqa: F811
    """The script has no `if __name__ == "__main__"`, and would start itself again if engines imported it."""
    command = [sys.executable, "-c", OTHER.format(then=then), url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as script:
        pids = [int(pid) for pid in script.stdout.readline().split()]
        assert pids
        if then == "input()":
            assert all(map(is_there, pids))
            script.kill()
        wait_until(lambda: not any(map(is_there, pids)))
        script.kill()


FROM_STDIN = """
import sys, zloader as zl
def halved(minibatch):
    return {"rows": minibatch.index, "x": minibatch.x.to_dense() / 2}
url = sys.argv[1]
found = []
for processes in (0, 2):
    loader = zl.Loader(zl.open_dataset(url), processes=processes, batch_size=8, fetch_factor=2, batch_transform=halved)
    found.append([(each["rows"].tolist(), each["x"].tolist()) for each in loader])
print(found[0] == found[1], len(found[0]))
"""


@pytest.mark.slow
def test_a_script_from_standard_input_has_engines(url):  # noqa: F811
    """There is no file that an engine could import, and its functions are of `__main__`, as in a notebook."""
    done = subprocess.run(
        [sys.executable, "-", url], input=FROM_STDIN, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.stderr == ""
    assert done.stdout.split() == ["True", str(-(-ADATA.n_obs // 8))]


@pytest.mark.slow
def test_a_notebook_has_engines(url):  # noqa: F811
    code = FROM_STDIN.replace("sys.argv[1]", repr(url))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    NotebookClient(notebook, timeout=PATIENCE_S, kernel_name="python3").execute()
    assert notebook.cells[0].outputs[0].text.split()[0] == "True"


@pytest.mark.slow
def test_many_epochs_leave_nothing(dataset, crew):
    def held() -> tuple[int, ...]:
        gc.collect()
        pids = [os.getpid(), *(engine.pid for engine in engines_of(crew))]
        return tuple(len(list(Path(f"/proc/{pid}/{what}").iterdir())) for pid in pids for what in ("fd", "task"))

    def run(n_epochs: int) -> None:
        for epoch in range(n_epochs):
            for number, _ in enumerate(crew):
                if epoch % 3 == 0 and number == epoch % 7:
                    break
        list(crew)

    run(30)  # until there are slots enough for every order in which engines come
    before, threads = held(), threading.active_count()
    run(120)
    wait_until(lambda: sum(held()) <= sum(before) + 24 and threading.active_count() <= threads)


@pytest.mark.slow
def test_a_consumer_that_stalls_bounds_memory(dataset):
    options = zl.FetchOptions(memory="16MiB", ready_bytes=4000)
    loader = zl.Loader(dataset, processes=1, layout="dense", batch_size=2, options=options)
    minibatches = iter(loader)
    next(minibatches)
    (engine,) = engines_of(loader)
    time.sleep(0.5)
    assert np.count_nonzero(engine._memory.bytes[:1000]) < 24  # slots, for 150 minibatches


# ---- errors


@pytest.mark.slow
def test_errors_are_those_of_a_loader(dataset, tmp_path):
    import shutil

    shutil.copytree(dataset.stores[0].location.path, tmp_path / "damaged.zarr")
    largest = max((tmp_path / "damaged.zarr" / "X").rglob("c/*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 3] ^= 255
    largest.write_bytes(content)
    loader = zl.Loader(zl.open_dataset(tmp_path / "damaged.zarr"), processes=2, **MANY)
    with pytest.raises(ReadError, match="damaged"):
        list(loader)


class OwnError(Exception):
    pass


@pytest.mark.slow
def test_errors_of_own_functions_come_in_order(dataset):
    calls = 7

    def fails(minibatch):  # a closure, in a process that cannot import this file
        if int(minibatch.index[0]) == first:
            raise OwnError(calls)
        return minibatch.index

    first = int([each.index for each in zl.Loader(dataset, **MANY)][3][0])
    minibatches = iter(zl.Loader(dataset, processes=2, batch_transform=fails, **MANY))
    assert all(torch.is_tensor(next(minibatches)) for _ in range(3))
    with pytest.raises(Exception, match="7") as caught:
        next(minibatches)
    assert type(caught.value).__name__ == "OwnError"
    assert "engine process" in "".join(caught.value.__notes__)


def test_what_cannot_be_pickled_is_done_here(dataset, caplog):
    lock = threading.Lock()

    def locked(minibatch):
        with lock:
            return minibatch

    loader = zl.Loader(dataset, processes=2, batch_transform=locked, **MANY)
    with caplog.at_level(logging.WARNING, "zloader"):
        found = epochs(loader, 2)
    assert_same(found, epochs(zl.Loader(dataset, **MANY), 2))
    said = [record.message for record in caplog.records if "have no label" not in record.message]
    assert [message.partition(",")[0] for message in said] == ["processes=2 has no effect"]


def test_no_shared_memory_is_an_error(dataset, monkeypatch):
    loader = zl.Loader(dataset, processes=1, **MANY)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(zl.common.errors.ProducerError, match="bytes of shared memory"):
        list(loader)


# ---- other processes


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_a_data_loader_make_their_own(dataset, crew, context):
    workers = torch.utils.data.DataLoader(crew, batch_size=None, num_workers=2, multiprocessing_context=context)
    seen = np.sort(np.concatenate([minibatch.index for minibatch in workers]))
    assert seen.tolist() == list(range(ADATA.n_obs))


def test_a_forked_process_keeps_the_minibatches_that_it_has(crew):
    """The engines must not write there when the other process has dropped them."""
    crew.set_epoch(0)
    kept = list(crew)
    wanted = [plain(each.x) for each in kept]
    wanted = [[parts[0], *(part.copy() for part in parts[1:])] for parts in wanted]
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        same = False
        try:
            os.read(reader, 1)
            assert_same([plain(each.x) for each in kept], wanted)
            same = True
        finally:
            os._exit(0 if same else 1)
    del kept
    gc.collect()
    for _ in range(3):
        list(crew)
    os.write(writer, b"1")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.slow
def test_a_forked_process_has_engines_of_its_own(crew):
    crew.set_epoch(0)
    wanted, pids = epochs(crew, 1), [engine.pid for engine in engines_of(crew)]
    crew.set_epoch(0)
    pid = os.fork()
    if not pid:
        same = False
        try:
            assert_same(epochs(crew, 1), wanted)
            same = not {engine.pid for engine in engines_of(crew)} & set(pids)
        finally:
            crew._engines._engines.close()
            os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    crew.set_epoch(0)  # the processes share the count
    assert_same(epochs(crew, 1), wanted)
    assert [engine.pid for engine in engines_of(crew)] == pids


# ---- shared memory


def test_values_come_back_in_the_same_memory():
    memory = shared_memory.range_for_slots()
    slots = shared_memory.Slots(memory)
    half = torch.arange(6, dtype=torch.float32).bfloat16()
    large = slots.empty(2000, np.dtype(np.float32))
    large[:] = np.arange(2000)
    arrays = {"a": np.arange(5), "b": np.zeros((0, 3)), "f": np.asfortranarray(np.eye(3)), "large": large}
    value = arrays | {"names": np.array(["x", None])}
    sent = value | {"half": half, "sparse": torch.eye(3).to_sparse_csr()}
    packed = shared_memory.Packed(sent, slots)
    assert packed.nbytes < large.nbytes
    number, *place = slots.put(packed)
    found = shared_memory.read(memory, number, *place)
    assert_same({name: found[name] for name in value}, value)
    assert torch.equal(found["half"], half)
    assert torch.equal(found["sparse"].to_dense(), torch.eye(3))
    assert found["large"].ctypes.data == large.ctypes.data
    del sent, value, arrays, packed, large
    gc.collect()
    assert memory.bytes[:3].tolist() == [1, 1, 0]
    found["a"][:] = 7
    assert slots.take(place[1]) not in (0, number)  # somebody reads these
    kept = found["a"]
    del found
    gc.collect()
    assert memory.bytes[:3].tolist() == [0, 1, 1]  # the large array is free, not the one with the small ones
    assert kept.tolist() == [7] * 5
    del kept
    assert slots.take(place[1]) == number


def test_arrays_that_are_not_sent_leave_their_slots():
    memory = shared_memory.range_for_slots()
    slots = shared_memory.Slots(memory)
    rows = slots.empty(5000, np.dtype(np.int32))[10:20]
    assert memory.bytes[0] == 1
    del rows
    assert memory.bytes[0] == 0
    assert len(slots.empty(5000, np.dtype(np.int32))) == 5000
    slots.forget_free(0)
    assert not memory.bytes[1]
