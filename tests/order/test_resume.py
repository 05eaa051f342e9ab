"""Resuming before any minibatch gives the same minibatches, or with other ranks exactly the rows not yet received."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from helpers import PATIENCE_S, check_seen_once, counts, digest, fetch_options, plan_of, write_store
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import zloader as zl
from zloader.common.errors import OptionError
from zloader.order.plan import Plan
from zloader.order.resume import described, resumed
from zloader.testing import assert_resumes_anywhere

pytestmark = pytest.mark.any_version

N_ROWS = 61
ADATA = counts(N_ROWS, 20)
SAMPLINGS = {
    "streaming": zl.Streaming(),
    "blocks": zl.BlockShuffling(3),
    "strata": zl.BlockShuffling(3, n_strata=5),
    "scanners": zl.MixtureOfScanners(n_scanners=4, active=3),
    "weights": zl.BlockWeightedSampling(1.0 + np.arange(N_ROWS) % 5, block_size=3),
    "classes": zl.ClassBalancedSampling("cell_type", block_size=3, total_size=50),
    "mixture": zl.Mixture({"a": ("cell_type == 'a'", 0.7), "rest": (range(20, N_ROWS), 0.3)}, block_size=3),
}
SIZES = {"batch_size": 4, "fetch_factor": 2, "sampling": SAMPLINGS["blocks"]}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    write_store(ADATA, folder / "counts.zarr", folder)
    return folder / "counts.zarr"


@pytest.fixture(scope="module")
def dataset(store) -> zl.Dataset:
    return zl.open_dataset(store)


def rows_of(minibatches) -> list[int]:
    return [row for minibatch in minibatches for row in minibatch.index.tolist()]


def taken(loader, n) -> dict:
    """The state of a loader after `n` minibatches, after a round trip through JSON."""
    minibatches = iter(loader)
    for _ in range(n):
        next(minibatches)
    return json.loads(json.dumps(loader.state_dict()))


# ---- arithmetic


@st.composite
def plans(draw):
    batch_size, fetch_factor = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    kinds = [zl.Streaming(), zl.BlockShuffling(1), zl.BlockShuffling(1, n_strata=9), zl.MixtureOfScanners(3, active=1)]
    sampling = draw(st.sampled_from(kinds))
    return plan_of(
        dataset_rows=draw(st.integers(5, 150)),
        sampling=sampling,
        batch_size=batch_size,
        fetch_factor=fetch_factor,
        seed=draw(st.integers(0, 99)),
        epoch=draw(st.integers(0, 9)),
        world_size=draw(st.integers(1, 4)),
        drop_last=draw(st.booleans()),
    )


def minibatches_of(fetches) -> list[list[int]]:
    cut = [(fetch.rows[fetch.order].tolist(), fetch.cuts.tolist()) for fetch in fetches]
    return [rows[begin:end] for rows, cuts in cut for begin, end in pairwise(cuts)]


def ranks(plan) -> list[Plan]:
    return [dataclasses.replace(plan, rank=rank) for rank in range(plan.world_size)]


@pytest.mark.slow
@given(plan=plans(), place=st.floats(0, 1), n_workers=st.integers(1, 3))
def test_the_rest_of_a_plan_is_its_tail(plan, place, n_workers):
    done = round(place * plan.n_minibatches)
    for rank in ranks(plan):
        whole = minibatches_of(rank.fetches())
        assert whole == minibatches_of(map(rank.fetch, rank.fetch_numbers()))
        assert minibatches_of(rank.fetches(done=done)) == whole[done:]
        shared = [list(rank.fetches(done=done, worker=w, n_workers=n_workers)) for w in range(n_workers)]
        in_turn = sorted(fetch.number for fetches in shared for fetch in fetches)
        assert in_turn == sorted(fetch.number for fetch in rank.fetches(done=done))
        for worker, fetches in enumerate(shared):
            own = minibatches_of(fetches)
            for skip in range(len(own) + 1):
                rest = rank.fetches(done=done, worker=worker, n_workers=n_workers, skip=skip)
                assert minibatches_of(rest) == own[skip:]


@given(plan=plans(), first=st.floats(0, 1), second=st.floats(0, 1), sizes=st.tuples(*[st.integers(1, 5)] * 2))
def test_other_ranks_get_exactly_what_nobody_has_seen(plan, first, second, sizes):
    """The world size changes twice in one epoch."""
    stretches, seen = [], []
    places = [*zip((plan.world_size, *sizes), (first, second, 1.0), strict=True)]
    for world_size, place in places:
        now, done = resumed(dataclasses.replace(plan, rank=0, world_size=world_size), stretches)
        taken = round(place * (now.n_minibatches - done)) + done
        made = [minibatches_of(rank.fetches(done=done)) for rank in ranks(now)]
        assert {len(minibatches) for minibatches in made} == {now.n_minibatches - done}
        seen += [row for minibatches in made for rows in minibatches[: taken - done] for row in rows]
        if stretches and stretches[-1][0] == world_size:
            stretches.pop()
        stretches += [(world_size, taken)] if taken else []
    check_seen_once(plan, seen, world_size)


def test_what_is_left_costs_what_a_fetch_costs():
    plan = plan_of(dataset_rows=10**12, sampling=zl.BlockShuffling(64), batch_size=64, fetch_factor=4, world_size=8)
    now, _ = resumed(dataclasses.replace(plan, world_size=3), [(8, 10**6 + 1)])
    assert now.n_rows == 10**12 - 8 * 64 * (10**6 + 1)
    assert now.order.draw.args[1].shape == (8 * 64 * 3,)  # the rows that are listed
    assert len(now.fetch(10**6).rows) == 256


# ---- the loader


@pytest.mark.every(15)
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_resumes_before_any_minibatch(dataset, name, world_size):
    for rank in {0, world_size - 1}:
        options = SIZES | {"sampling": SAMPLINGS[name], "rank": rank, "world_size": world_size}
        assert_resumes_anywhere(lambda options=options: zl.Loader(dataset, x=None, **options))


def test_values_are_the_same_and_so_are_later_epochs(dataset):
    options = SIZES | {"obs": ["cell_type"]}
    whole = zl.Loader(dataset, **options)
    list(whole)
    state = taken(whole, 5)
    loader = zl.Loader(dataset, **options)
    loader.load_state_dict(state)
    expected = zl.Loader(dataset, **options)
    expected.set_epoch(1)
    assert digest(loader) == digest([*expected][5:])
    assert digest(loader) == digest(expected)


def test_a_loader_that_was_used_can_be_put_back(dataset):
    loader = zl.Loader(dataset, x=None, **SIZES)
    state = taken(loader, 3)
    assert state == loader.state_dict()
    list(loader)
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    rest = rows_of(loader)
    assert loader.state_dict() == state | {"epoch": 1, "stretches": []}
    fresh = zl.Loader(dataset, x=None, **SIZES)
    assert rest == rows_of(fresh)[12:]
    assert rows_of(loader) == rows_of(fresh)
    loader.load_state_dict(state)
    loader.set_epoch(0)  # discards the state
    assert len(rows_of(loader)) == N_ROWS


def test_an_epoch_resumed_twice(dataset):
    first = zl.Loader(dataset, x=None, **SIZES)
    whole = rows_of(first)
    first.set_epoch(0)
    second, third = (zl.Loader(dataset, x=None, **SIZES) for _ in range(2))
    second.load_state_dict(taken(first, 3))
    third.load_state_dict(taken(second, 6))
    assert rows_of(third) == whole[36:]


def test_what_failed_or_was_closed_is_not_finished(dataset):
    loader = zl.Loader(dataset, x=None, **SIZES)
    minibatches = iter(loader)
    next(minibatches)
    minibatches.close()
    assert list(minibatches) == []
    assert loader.state_dict()["stretches"] == [[1, 1]]


def test_other_ranks(dataset):
    """A run of 3 ranks continues with 2 ranks, then with 1, from within a fetch."""
    options = SIZES | {"x": None}
    seen, state = [], None
    for world_size, n_taken in ((3, 3), (2, 2), (1, 100)):
        states = []
        for rank in range(world_size):
            loader = zl.Loader(dataset, rank=rank, world_size=world_size, **options)
            if state is not None:
                loader.load_state_dict(state)
            minibatches = iter(loader)
            for _, minibatch in zip(range(n_taken), minibatches, strict=False):
                seen += minibatch.index.tolist()
            states.append(loader.state_dict())
        assert all(each == states[0] for each in states)
        state = json.loads(json.dumps(states[0]))
    assert sorted(seen) == list(range(N_ROWS))
    assert state["epoch"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("began", [0, 4], ids=["whole epoch", "rest of an epoch"])
def test_unused_minibatches_come_again(dataset, began):
    loader = zl.Loader(dataset, x=None, **SIZES)
    epoch = [minibatch.index.tolist() for minibatch in loader]
    loader.set_epoch(0)
    loader.load_state_dict(taken(loader, began))
    iterator = iter(loader)
    for received in range(1, len(epoch) - began + 1):
        next(iterator)
        for unused in {0, 1, received}:
            again = zl.Loader(dataset, x=None, **SIZES)
            again.load_state_dict(loader.state_dict(unused=unused))
            assert [minibatch.index.tolist() for minibatch in again] == epoch[began + received - unused :]
    assert next(iterator, None) is None  # the end of the epoch
    assert loader.state_dict()["epoch"] == 1
    assert loader.state_dict(unused=1)["stretches"] == [[1, len(epoch) - 1]]
    with pytest.raises(OptionError, match="20 minibatches cannot be unused"):
        loader.state_dict(unused=20)


def test_resuming_reads_nothing_of_what_is_skipped(store):
    options = {"batch_size": 5, "fetch_factor": 3, "sampling": zl.Streaming(shuffle=True)}
    options |= {"options": fetch_options(gap_bytes=0)}
    whole = zl.Loader(zl.open_dataset(store), **options)
    list(whole)
    all_of_it = whole.statistics()
    whole.set_epoch(0)
    state = taken(whole, 9)  # of 13 minibatches, in fetches of three
    loader = zl.Loader(zl.open_dataset(store), **options)
    loader.load_state_dict(state)
    assert len(rows_of(loader)) == N_ROWS - 45
    rest = loader.statistics()
    assert rest.bytes_read < 0.5 * all_of_it.bytes_read
    assert rest.gets < all_of_it.gets
    ended = zl.Loader(zl.open_dataset(store), **options)
    ended.load_state_dict(state | {"stretches": [[1, 13]]})
    assert list(ended) == []
    assert ended.statistics().gets == 0


DIFFERENT = {
    "seed": ({"seed": 1}, "seed was 0, is 1"),
    "batch size": ({"batch_size": 8}, "batch_size was 4, is 8"),
    "fetch factor": ({"fetch_factor": 3}, "fetch_factor was 2, is 3"),
    "drop_last": ({"drop_last": True}, "drop_last was False, is True"),
    "sampling": ({"sampling": zl.Streaming()}, r"was 'BlockShuffling\(block_size=3, .*, is 'Streaming\("),
    "block size": ({"sampling": zl.BlockShuffling(2)}, "block_size=3.*block_size=2"),
    "indices": ({"sampling": zl.BlockShuffling(3, indices=range(N_ROWS))}, "indices=None.*indices=<61 values, "),
    "two": ({"seed": 1, "batch_size": 8}, "seed was 0, is 1; .*batch_size was 4, is 8"),
}


@pytest.mark.parametrize(("options", "says"), DIFFERENT.values(), ids=DIFFERENT)
def test_a_state_of_another_run_is_refused(dataset, options, says):
    state = taken(zl.Loader(dataset, x=None, **SIZES), 3)
    with pytest.raises(OptionError, match=says):
        zl.Loader(dataset, x=None, **(SIZES | options)).load_state_dict(state)


def test_a_state_of_other_weights_or_rows_is_refused(dataset, tmp_path):
    weights = np.ones(N_ROWS)
    sizes = SIZES | {"x": None, "sampling": zl.BlockWeightedSampling(weights, block_size=3)}
    state = zl.Loader(dataset, **sizes).state_dict()
    zl.Loader(dataset, **(sizes | {"sampling": zl.BlockWeightedSampling(weights.tolist(), block_size=3)}))
    weights[7] = 2
    with pytest.raises(OptionError, match="weights=<61 values"):
        zl.Loader(dataset, **sizes).load_state_dict(state)
    write_store(ADATA[:60].copy(), tmp_path / "s.zarr", tmp_path)
    other = zl.Loader(zl.open_dataset(tmp_path / "s.zarr"), x=None, **SIZES)
    with pytest.raises(OptionError, match=r"fingerprint was .*rows was 61, is 60"):
        other.load_state_dict(zl.Loader(dataset, x=None, **SIZES).state_dict())


def test_a_state_of_another_mixture_is_refused(dataset):
    def mixed(rows, weight=0.5, **options):
        groups = {"a": (rows, weight), "b": ("passed", 0.5)}
        return zl.Loader(dataset, x=None, **(SIZES | {"sampling": zl.Mixture(groups, block_size=3, **options)}))

    state = taken(mixed(dataset[:20]), 3)
    mixed(zl.open_dataset(dataset.url)[:20]).load_state_dict(state)
    others = [mixed(dataset[:21]), mixed(range(20)), mixed(dataset[:20], 0.6), mixed(dataset[:20], epoch_rows=70)]
    for other in others:
        with pytest.raises(OptionError, match='sampling was "Mixture'):
            other.load_state_dict(state)


BROKEN = {
    "another version": ({"version": 2}, "of version 2, but this zloader reads version 3"),
    "too far": ({"stretches": [[1, 17]]}, "after 17 minibatches of each of 1 ranks, but there are only 16"),
    "too far before": ({"stretches": [[2, 9], [1, 1]]}, "after 9 minibatches of each of 2 ranks, but there are only 8"),
    "no numbers": ({"stretches": [["a", 1]]}, "damaged"),
    "no pairs": ({"stretches": [[1]]}, "damaged"),
    "negative": ({"epoch": -1}, "damaged"),
    "another worker": (
        {"worker": 1, "of_workers": 2},
        "worker 1 of 2 in .*, and this is 0 of 1 in .* only Loader.state_dict without workers fits any",
    ),
}


@pytest.mark.parametrize(("changed", "says"), BROKEN.values(), ids=BROKEN)
def test_a_broken_state_is_refused(dataset, changed, says):
    loader = zl.Loader(dataset, x=None, **SIZES)
    state = loader.state_dict()
    with pytest.raises(OptionError, match=says):
        loader.load_state_dict(state | changed)
    with pytest.raises(OptionError, match="not a state"):
        loader.load_state_dict({})
    with pytest.raises(OptionError, match="no 'seed'"):
        loader.load_state_dict({name: value for name, value in state.items() if name != "seed"})
    assert len(rows_of(loader)) == N_ROWS


class Doubled(zl.Sampling):
    """A user-defined sampling that wraps another."""

    def __init__(self, inner) -> None:
        self.inner = inner

    def order(self, dataset, batch_size, fetch_rows):
        inner = self.inner.order(dataset, batch_size, fetch_rows)

        def twice(start, stop, seed, epoch):
            return np.tile(inner.rows(0, inner.n_rows, seed=seed, epoch=epoch), 2)[start:stop]

        return dataclasses.replace(inner, n_rows=2 * inner.n_rows, draw=twice, repeats=True)


def test_what_is_no_order_is_refused(dataset):
    sampling = type("Own", (zl.Sampling,), {"order": lambda self, *of: None})()
    with pytest.raises(OptionError, match=r"order of Own\(...\) must return a zl.Order, not None"):
        zl.Loader(dataset, sampling=sampling)


@pytest.mark.slow
def test_a_sampling_of_ones_own(dataset):
    options = SIZES | {"x": None, "sampling": Doubled(zl.BlockShuffling(3))}
    assert_resumes_anywhere(lambda: zl.Loader(dataset, **(options | {"sampling": Doubled(zl.BlockShuffling(3))})))
    state = zl.Loader(dataset, **options).state_dict()
    assert state["sampling"] == "Doubled(inner=BlockShuffling(block_size=3, indices=None, n_strata=1))"
    with pytest.raises(OptionError, match=r"Doubled\(inner=BlockShuffling\(block_size=2"):
        zl.Loader(dataset, **(options | {"sampling": Doubled(zl.BlockShuffling(2))})).load_state_dict(state)


# Prints the description of a sampling with attributes of all kinds.
_OF_ONES_OWN = """
import functools, pathlib
from zloader.order.resume import described
class Choice:
    def __init__(self, value): self.value, self._private = value, object()
class Slots:
    __slots__ = ("choice", "_private", "unset")
    def __init__(self, value): self.choice, self._private = Choice(value), object()
class Mine(Slots):
    def __init__(self, value):
        super().__init__(value)
        self.plates = {"a", "b", "c", "d", ("e", value)}
        self.by_plate = {"a": {"x", "y", value}}
        self.inner = [Choice(value), Choice({value}), self]
        self.uneven = [[1], [2, value]]
        self.rule, self.path = functools.partial(len, Mine), pathlib.Path("a")
    @functools.cached_property
    def order(self): return [3, 1, 2]
first, second = Mine(1), Mine(1)
assert first.order and described(first) == described(second)
print(described(first))
"""


def test_a_sampling_of_ones_own_is_the_same_in_every_process(capsys):
    """This process has another hash seed than the one that it starts."""
    command, environment = [sys.executable, "-c", _OF_ONES_OWN], os.environ | {"PYTHONHASHSEED": "1"}
    text = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=True, env=environment
    ).stdout
    exec(_OF_ONES_OWN, {"__name__": "__main__"})
    assert text == capsys.readouterr().out
    assert text.startswith("Mine(by_plate={'a': <3 values, ")
    assert "choice=Choice(value=1), inner=<3 values, " in text
    assert "rule=functools.partial(<built-in function len>, <class '__main__.Mine'>)" in text
    assert " at 0x" not in text
    assert "private" not in text
    assert "order" not in text


class Option:
    """A plain class, as users write it."""

    def __init__(self, value) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({1, 2}, {1, 3}),
        ({"a": {1}}, {"a": {2}}),
        ([{1}, {2}], [{2}, {1}]),
        ([[1], [2, 3]], [[1, 2], [3]]),
        (Option(1), Option(2)),
        ([Option(1)], [Option(2)]),
        (Path("a"), Path("b")),
    ],
)
def test_other_options_are_told_apart(one, other):
    assert described(Option(one)) == described(Option(copy.deepcopy(one)))
    assert described(Option(one)) != described(Option(other))


def test_what_minibatches_hold_may_change(dataset):
    state = taken(zl.Loader(dataset, x=None, **SIZES), 3)
    loader = zl.Loader(dataset, layout="dense", dtype="float64", obs=["donor"], **SIZES)
    loader.load_state_dict(state)
    assert len(list(loader)) == 13


# ---- DataLoaders


def test_in_a_dataloader_without_workers(dataset):
    loader = zl.Loader(dataset, x=None, **SIZES)
    whole = rows_of(loader)
    loader.set_epoch(0)
    through = DataLoader(loader, batch_size=None)
    minibatches = iter(through)
    for _ in range(5):
        next(minibatches)
    other = zl.Loader(dataset, x=None, **SIZES)
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert rows_of(DataLoader(other, batch_size=None)) == whole[20:]


@pytest.mark.parametrize("persistent", [False, True])
def test_what_is_left_is_shared_out_to_workers(dataset, persistent):
    state = taken(zl.Loader(dataset, x=None, **SIZES), 5)
    loader = zl.Loader(dataset, x=None, **SIZES)
    loader.load_state_dict(state)
    through = DataLoader(
        loader, batch_size=None, num_workers=2, persistent_workers=persistent, multiprocessing_context="fork"
    )
    first = rows_of(zl.Loader(dataset, x=None, **SIZES))[:20]
    assert sorted(rows_of(through)) == sorted(set(range(N_ROWS)) - set(first))
    assert sorted(rows_of(through)) == list(range(N_ROWS))
    with pytest.raises(OptionError, match="StatefulDataLoader"):
        loader.state_dict()
    loader.set_epoch(0)
    assert sorted(rows_of(through)) == list(range(N_ROWS))


@pytest.mark.slow
def test_workers_take_a_new_order_each_epoch(dataset):
    """Includes workers restarted each epoch and workers of a resumed epoch. Processes get the loader by pickle."""
    loader = zl.Loader(dataset, x=None, **SIZES)
    state = taken(loader, 5)
    whole = rows_of(loader)
    loader.load_state_dict(state)
    through = DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    fresh = zl.Loader(dataset, x=None, **SIZES)
    assert rows_of(through) == rows_of(fresh)[20:]
    assert rows_of(through) == rows_of(fresh) == whole
    loader = zl.Loader(dataset, x=None, **SIZES)
    for each in (loader, copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        forked = DataLoader(each, batch_size=None, num_workers=2, multiprocessing_context="fork")
        epochs = [rows_of(forked) for _ in range(3)]
        assert all(sorted(epoch) == list(range(N_ROWS)) for epoch in epochs)
        assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # raised by torchdata
@pytest.mark.parametrize(
    ("name", "n_workers", "world_size"),
    [("blocks", 0, 1), ("blocks", 0, 3), ("blocks", 1, 1), *((name, 2, 1) for name in SAMPLINGS), ("blocks", 2, 3)],
)
def test_with_torchdata(dataset, name, n_workers, world_size):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    context = {"multiprocessing_context": "fork"} if n_workers else {}
    options = SIZES | {"x": None, "sampling": SAMPLINGS[name], "rank": 0, "world_size": world_size}
    assert_resumes_anywhere(
        lambda: stateful(zl.Loader(dataset, **options), batch_size=None, num_workers=n_workers, **context),
        every=4 if n_workers else 1,
        begin=1 if n_workers else 0,
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize(("n_workers", "world_size"), [(2, 3), (0, 1), (2, 1)])
def test_with_torchdata_transforms_and_sets_resume(dataset, n_workers, world_size):
    """A random transform and sets of cells give the same values after any minibatch."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    context = {"multiprocessing_context": "fork"} if n_workers else {}
    options = {
        "batch_size": 4,
        "fetch_factor": 2,
        "sampling": zl.CellSets("donor", set_size=2, rest="fill"),
        "layout": "dense",
        "obs": ["cell_type"],
        "transforms": [zl.transforms.Downsample(20), zl.transforms.LogNormalize(50)],
        "rank": 0,
        "world_size": world_size,
    }

    def described(minibatch):
        of_sets = minibatch.set_of_row.tolist(), minibatch.obs["cell_type"].tolist()
        return minibatch.index.tolist(), minibatch.x.tolist(), *of_sets

    assert_resumes_anywhere(
        lambda: stateful(zl.Loader(dataset, **options), batch_size=None, num_workers=n_workers, **context),
        described=described,
        every=3,
        begin=1 if n_workers else 0,
    )


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_workers_of_a_resumed_epoch_resume_and_refuse_other_ranks(dataset):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    context = {"batch_size": None, "num_workers": 2, "multiprocessing_context": "fork"}
    options = SIZES | {"x": None, "rank": 0}
    loaders = [zl.Loader(dataset, world_size=2, **options) for _ in range(3)]
    state = taken(zl.Loader(dataset, world_size=3, **options), 1)
    for loader in loaders[:2]:
        loader.load_state_dict(state)
    whole = rows_of(DataLoader(loaders[0], **context))
    through = stateful(loaders[1], **context)
    minibatches = iter(through)
    first = rows_of(next(minibatches) for _ in range(3))
    middle = through.state_dict()
    again = stateful(loaders[2], **context)
    again.load_state_dict(middle)
    assert first + rows_of(again) == whole
    other = stateful(zl.Loader(dataset, world_size=3, **options), **context)
    other.load_state_dict(middle)
    with pytest.raises(OptionError, match="in a world of 2 ranks"):
        next(iter(other))


@pytest.mark.slow
def test_a_view_resumes_and_is_not_taken_for_another(dataset):
    view = dataset.where(np.arange(N_ROWS) % 3 > 0)
    assert_resumes_anywhere(lambda: zl.Loader(view, x=None, **SIZES))
    state = taken(zl.Loader(view, x=None, **SIZES), 3)
    with pytest.raises(OptionError, match="fingerprint was"):
        zl.Loader(dataset, x=None, **SIZES).load_state_dict(state)
    other = dataset.where(np.arange(N_ROWS) % 3 < 2)
    with pytest.raises(OptionError, match="fingerprint was"):
        zl.Loader(other, x=None, **SIZES).load_state_dict(state)


@pytest.mark.slow
def test_the_helper_sees_what_differs(dataset):
    class Forgets(zl.Loader):
        def load_state_dict(self, state):
            super().load_state_dict(state | {"stretches": []})

    with pytest.raises(AssertionError, match="before minibatch 1, epoch 0"):
        assert_resumes_anywhere(lambda: Forgets(dataset, x=None, **SIZES))
