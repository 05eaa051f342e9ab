"""Several threads share one iterator: they take turns, lose no minibatch, and none waits for ever."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import PATIENCE_S, assert_threads_end, check_minibatch, counts, write_store

import zloader as zl
from zloader.common.errors import ConcurrentUseError

pytestmark = pytest.mark.any_version

ADATA = counts(503, 97)
SIZES = {"batch_size": 8, "fetch_factor": 4, "sampling": zl.BlockShuffling(4)}


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("threads")
    write_store(ADATA, folder / "atlas" / "counts.zarr", folder)
    return folder


@pytest.fixture
def loader(bucket) -> zl.Loader:
    return zl.Loader(zl.open_dataset(bucket / "atlas" / "counts.zarr"), **SIZES)


@pytest.fixture
def stalled(sim, bucket) -> zl.Loader:
    """A loader whose reads never end."""
    server = sim(root=bucket)
    options = {"key": "any", "secret": "any", "endpoint_url": server.url}
    loader = zl.Loader(zl.open_dataset("s3://atlas/counts.zarr", storage_options=options), **SIZES)
    loader.dataset.store.offsets(loader.dataset.store.matrix("X")).load()
    server.faults = [{"kind": "stall", "match": "X/(indices|data)/c/"}]
    return loader


def started(*functions) -> list[threading.Thread]:
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    return threads


def joined(threads) -> None:
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def rows_of(minibatches) -> list[int]:
    return sorted(np.concatenate([check_minibatch(minibatch, ADATA) for minibatch in minibatches]).tolist())


def outcome_of(minibatches, outcomes) -> None:
    """Takes minibatches until an exception, and puts that into `outcomes`."""
    try:
        while True:
            next(minibatches)
    except (StopIteration, ConcurrentUseError) as error:
        outcomes.put(error)


# ---- taking


def test_threads_that_try_again_share_an_epoch(loader):
    minibatches, taken = iter(loader), []

    def take():
        while True:
            try:
                taken.append(next(minibatches))
            except ConcurrentUseError:
                time.sleep(0)
            except StopIteration:
                return

    joined(started(*[take] * 4))
    assert rows_of(taken) == list(range(503))
    assert loader.statistics().rows == 503
    assert loader.state_dict()["epoch"] == 1
    assert_threads_end()


def test_threads_one_after_another_share_an_epoch(loader):
    minibatches, taken, ended = iter(loader), [], []

    def take():
        try:
            taken.append(next(minibatches))
        except StopIteration:
            ended.append(True)

    while not ended:
        joined(started(take))
    assert len(taken) == len(loader)
    assert rows_of(taken) == list(range(503))


def test_a_second_thread_gets_an_error_at_once_and_closing_ends_the_first(stalled):
    minibatches, outcomes = iter(stalled), queue.Queue()
    threads = started(*[lambda: outcome_of(minibatches, outcomes)] * 2)
    first = outcomes.get(timeout=60)
    assert isinstance(first, ConcurrentUseError)
    assert "only one thread at a time" in str(first)
    minibatches.close()
    assert isinstance(outcomes.get(timeout=60), StopIteration)
    joined(threads)
    assert list(minibatches) == []
    assert stalled.state_dict()["epoch"] == 0  # a closed epoch is not finished
    assert_threads_end()


def test_an_error_for_one_thread_ends_nothing_for_the_other(loader, caplog):
    """The second thread calls next() while the first is in it, logging the end of the epoch."""
    minibatches, outcomes = iter(loader), queue.Queue()

    class Meanwhile(logging.Handler):
        def emit(self, record):
            if "epoch ends" in record.msg:
                joined(started(lambda: outcome_of(minibatches, outcomes)))

    caplog.set_level(logging.DEBUG, "zloader")
    handler = Meanwhile()
    logging.getLogger("zloader").addHandler(handler)
    try:
        assert rows_of(minibatches) == list(range(503))
    finally:
        logging.getLogger("zloader").removeHandler(handler)
    assert isinstance(outcomes.get_nowait(), ConcurrentUseError)
    assert loader.state_dict()["epoch"] == 1


def test_a_minibatch_that_cannot_be_made_ends_the_iteration(loader):
    """If the iteration went on, the epoch would lack this minibatch."""
    minibatches = iter(loader)
    next(minibatches)
    dataset = zl.open_dataset(loader.dataset.url)
    dataset.positions = lambda rows: [][len(rows)]
    failing = zl.Loader(dataset, **SIZES)
    other = iter(failing)
    with pytest.raises(IndexError):
        next(other)
    assert list(other) == []
    assert failing.statistics().minibatches == 0
    assert len(list(minibatches)) == len(loader) - 1


# ---- leaving


def test_closing_in_another_thread(loader):
    minibatches = iter(loader)
    next(minibatches)
    joined(started(minibatches.close))
    assert list(minibatches) == []
    assert_threads_end()
    assert rows_of(loader) == list(range(503))


def test_the_last_reference_dropped_in_another_thread(loader):
    held = [iter(loader)]
    next(held[0])
    joined(started(held.clear))
    assert_threads_end()
    assert rows_of(loader) == list(range(503))


def test_collected_as_garbage_in_another_thread(loader):
    cycle = [iter(loader)]
    next(cycle[0])
    cycle.append(cycle)
    gc.disable()
    try:
        del cycle
        joined(started(gc.collect))
    finally:
        gc.enable()
    assert_threads_end()
    assert rows_of(loader) == list(range(503))


# ---- asking


def test_state_and_statistics_while_another_thread_iterates(loader):
    """Each state is a state between two minibatches, and the states appear in order."""
    states, minibatches = [], iter(loader)
    known = [loader.state_dict()]
    done = threading.Event()

    def ask():
        while not done.is_set():
            states.append((loader.state_dict(), loader.statistics().minibatches))

    threads = started(ask)
    known.extend(loader.state_dict() for _ in minibatches)
    known.append(loader.state_dict())
    done.set()
    joined(threads)
    numbers = [known.index(state) for state, _ in states]
    assert numbers == sorted(numbers)
    assert [seen for _, seen in states] == sorted(seen for _, seen in states)


@pytest.mark.parametrize("received", [0, 3])
def test_the_state_while_an_epoch_is_planned(loader, received):
    """An epoch is counted before its plan is made. Its state still says that nothing more of it has been received."""

    class Asking(zl.Loader):
        found: list | None = None

        def plan(self, epoch):
            if self.found is not None:
                joined(started(lambda: self.found.append(self.state_dict())))
            return super().plan(epoch)

    minibatches = iter(loader)
    for _ in range(received):
        next(minibatches)
    state = loader.state_dict()
    asking = Asking(loader.dataset, **SIZES)
    asking.load_state_dict(state)
    asking.found = []
    next(iter(asking))
    assert asking.found
    assert asking.found == [state] * len(asking.found)


def test_the_state_while_an_epoch_begins(loader, caplog):
    """It still says that nothing of the epoch has been received."""
    found = []

    class Asking(logging.Handler):
        def emit(self, record):
            if "begins" in record.msg:
                joined(started(lambda: found.append(loader.state_dict())))

    before = loader.state_dict()
    caplog.set_level(logging.DEBUG, "zloader")
    handler = Asking()
    logging.getLogger("zloader").addHandler(handler)
    try:
        next(iter(loader))
    finally:
        logging.getLogger("zloader").removeHandler(handler)
    assert found == [before]


def test_state_and_statistics_speak_of_the_iterator_that_began_last(loader):
    first, second = iter(loader), iter(loader)
    taken = [next(first) for _ in range(3)]
    other = [next(second)]
    assert loader.statistics().epoch == loader.state_dict()["epoch"] == 1
    assert loader.statistics().minibatches == 1
    state = loader.state_dict()
    assert rows_of([*taken, *first]) == list(range(503))
    assert loader.state_dict() == state
    assert rows_of([*other, *second]) == list(range(503))
    assert loader.state_dict()["epoch"] == 2


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_iterator_cannot_be_copied(loader, way):
    minibatches = iter(loader)
    with pytest.raises(TypeError, match=r"pickle the Loader, or save its state_dict\(\)"):
        way(minibatches)
    assert rows_of(minibatches) == list(range(503))


_AFTER_THE_MAIN_THREAD = """
import sys, threading, zloader as zl
begun = threading.Event()

def iterate():
    loader = zl.Loader(zl.open_dataset(sys.argv[1]), obs=["donor"], batch_size=8, fetch_factor=4)
    minibatches = iter(loader)
    if sys.argv[2] == "in an epoch":
        next(minibatches)
    begun.set()
    threading.main_thread().join()
    try:
        for _ in range(100):
            for _ in minibatches:
                pass
            minibatches = iter(loader)
    except zl.ZloaderError as error:
        print(error)

threading.Thread(target=iterate).start()
begun.wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before an epoch", "in an epoch"])
def test_a_thread_that_iterates_when_the_main_thread_has_ended_is_told_so(bucket, when):
    """Python starts no more work in threads then."""
    command = [sys.executable, "-c", _AFTER_THE_MAIN_THREAD, str(bucket / "atlas" / "counts.zarr"), when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "the main thread has ended" in done.stdout
    assert "damaged" not in done.stdout
