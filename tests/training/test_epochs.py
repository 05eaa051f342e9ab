"""Which epoch an iteration yields: after looks at the first minibatch, broken loops, threads and workers."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from pathlib import Path

import pytest
from helpers import counts, write_store
from torch.utils.data import DataLoader

import zloader as zl

N_ROWS = 203
SIZES = {"batch_size": 16, "fetch_factor": 4, "sampling": zl.BlockShuffling(4)}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("epochs")
    write_store(counts(N_ROWS, 11), folder / "s.zarr", folder)
    return folder / "s.zarr"


@pytest.fixture
def loader(store) -> zl.Loader:
    return zl.Loader(zl.open_dataset(store), **SIZES)


@pytest.fixture(scope="module")
def epochs(store) -> list[list[list[int]]]:
    """The rows of the minibatches of the first epochs."""
    loader = zl.Loader(zl.open_dataset(store), **SIZES)
    return [rows(loader) for _ in range(4)]


def rows(minibatches) -> list[list[int]]:
    return [minibatch.index.tolist() for minibatch in minibatches]


def look(loader):
    next(iter(loader))


def begin_twice(loader):
    kept = [iter(loader), iter(loader)]
    assert kept


def break_off(loader):
    for _ in loader:
        break


def close_after_one(loader):
    iterator = iter(loader)
    next(iterator)
    iterator.close()
    iterator.close()


def fail_at_the_first(loader):
    def train():
        for _ in loader:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()


def lose_in_a_cycle(loader):
    cycle = [iter(loader)]
    cycle.append(cycle)
    next(cycle[0])
    del cycle
    gc.collect()


def look_in_a_thread(loader):
    thread = threading.Thread(target=look, args=(loader,))
    thread.start()
    thread.join()


LOOKS = [look, begin_twice, break_off, close_after_one, fail_at_the_first, lose_in_a_cycle, look_in_a_thread]


@pytest.mark.every(4)
@pytest.mark.parametrize("a_look", LOOKS, ids=lambda way: way.__name__)
def test_a_look_does_not_cost_an_epoch(loader, epochs, a_look):
    for epoch in epochs[:2]:
        a_look(loader)
        a_look(loader)
        assert rows(loader) == epoch


@pytest.mark.parametrize("a_look", [look, begin_twice], ids=lambda way: way.__name__)
def test_a_look_at_a_restored_epoch_leaves_its_rest(loader, store, epochs, a_look):
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    restored = zl.Loader(zl.open_dataset(store), **SIZES)
    restored.load_state_dict(loader.state_dict())
    a_look(restored)
    assert rows(restored) == epochs[0][3:]
    assert rows(restored) == epochs[1]


def test_a_loop_broken_off_after_two_minibatches_has_used_its_epoch(loader, epochs):
    for number, _ in enumerate(loader):
        if number == 1:
            break
    assert rows(loader) == epochs[1]


def test_an_epoch_of_one_minibatch_counts_when_its_end_is_reached(store):
    loader = zl.Loader(zl.open_dataset(store), batch_size=N_ROWS, fetch_factor=1, sampling=zl.BlockShuffling(1))
    seen = [rows(loader) for _ in range(3)]
    assert loader.statistics().epoch == 2
    assert seen[0] != seen[1] != seen[2]


def test_iterators_in_use_at_the_same_time_are_different_epochs(loader, epochs):
    first, second = iter(loader), iter(loader)
    pairs = [(a.index.tolist(), b.index.tolist()) for a, b in zip(first, second, strict=True)]
    assert [list(of) for of in zip(*pairs, strict=True)] == epochs[:2]
    assert rows(loader) == epochs[2]


def test_an_iterator_dropped_after_another_has_begun_takes_nothing_back(loader, epochs):
    looked = iter(loader)
    next(looked)
    other = iter(loader)
    assert next(other).index.tolist() == epochs[1][0]
    del looked
    assert rows(other) == epochs[1][1:]
    assert rows(loader) == epochs[2]


def test_an_iterator_dropped_after_set_epoch_takes_nothing_back(loader, epochs):
    looked = iter(loader)
    next(looked)
    loader.set_epoch(1)
    running = iter(loader)
    next(running)
    del looked
    assert rows(running) == epochs[1][1:]
    assert rows(loader) == epochs[2]


def test_copies_take_looks_back_from_their_own_count(loader, epochs):
    look(loader)
    for again in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        look(again)
        assert rows(again) == epochs[0]
        assert rows(loader) == epochs[0]
        loader.set_epoch(0)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_look_before_workers_iterate(loader, epochs, workers):
    look(loader)
    through = DataLoader(loader, batch_size=None, num_workers=workers)
    assert sorted(map(tuple, rows(through))) == sorted(map(tuple, epochs[0]))


def test_a_state_while_an_iterator_waits_is_that_of_its_epoch(loader, store, epochs):
    rows(loader)
    waiting = iter(loader)
    restored = zl.Loader(zl.open_dataset(store), **SIZES)
    restored.load_state_dict(loader.state_dict())
    assert rows(waiting) == rows(restored) == epochs[1]
