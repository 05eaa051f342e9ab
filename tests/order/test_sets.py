"""Sets agree in their columns, come whole, and hold every row as often as the options say."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from dataclasses import dataclass

import helpers
import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zloader.common.errors import OptionError
from zloader.order.cell_sets import CellSets
from zloader.order.permutation import dealt, permute_each, shared_out
from zloader.order.plan import Plan
from zloader.order.resume import resumed
from zloader.selecting.columns import as_numbers
from zloader.selecting.groups import groups_of

pytestmark = pytest.mark.any_version


@dataclass(frozen=True)
class Table:
    """A dataset with these obs columns."""

    columns: dict[str, np.ndarray]

    @property
    def n_obs(self):
        return len(next(iter(self.columns.values())))

    def obs_column(self, name):
        return as_numbers(name, self.columns[name])


def table_of(sizes, seed=0) -> Table:
    """Groups of these sizes, with their rows in random order."""
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    return Table({"group": labels.astype(np.int32)})


def plan_of(sampling, table, batch_size, **options) -> Plan:
    return helpers.plan_of(sampling=sampling, table=table, batch_size=batch_size, **({"fetch_factor": 3} | options))


def order_of(sampling, table, batch_size=8):
    return sampling.order(table, batch_size, 3 * batch_size)


def minibatches(plan, **options) -> list[list[list[int]]]:
    """The sets of each minibatch."""
    found = []
    for fetch in plan.fetches(**options):
        rows, sets = fetch.rows[fetch.order].tolist(), fetch.sets[fetch.order].tolist()
        assert sets == sorted(sets)
        for first, last in itertools.pairwise(fetch.cuts.tolist()):
            by_set: dict[int, list[int]] = {}
            for row, number in zip(rows[first:last], sets[first:last], strict=True):
                by_set.setdefault(number, []).append(row)
            found.append([*by_set.values()])
    return found


def sets_of(plan) -> list[list[int]]:
    return [each for minibatch in minibatches(plan) for each in minibatch]


SIZES = st.lists(st.integers(1, 60) | st.just(1000), min_size=1, max_size=6)


@settings(max_examples=20)
@given(
    sizes=SIZES,
    set_size=st.integers(1, 20) | st.just(100),
    per_minibatch=st.integers(1, 4),
    rest=st.sampled_from(["drop", "fill"]),
    distinct=st.booleans(),
    world_size=st.integers(1, 3),
    seed=st.integers(0, 2**63),
)
@example(sizes=[1, 1000, 7], set_size=8, per_minibatch=2, rest="fill", distinct=True, world_size=2, seed=0)
def test_every_row_comes_once_in_whole_sets(sizes, set_size, per_minibatch, rest, distinct, world_size, seed):
    table, sampling = table_of(sizes, 1), CellSets("group", set_size, rest=rest, distinct=distinct)
    labels = table.columns["group"]
    n_sets = sum(size // set_size if rest == "drop" else -(-size // set_size) for size in sizes)
    batch_size = per_minibatch * set_size
    if n_sets < world_size:
        with pytest.raises(OptionError):
            plan_of(sampling, table, batch_size, world_size=world_size)
        return
    plans = [
        plan_of(sampling, table, batch_size, world_size=world_size, rank=rank, seed=seed, epoch=3)
        for rank in range(world_size)
    ]
    of_ranks = [minibatches(plan) for plan in plans]
    assert {len(each) for each in of_ranks} == {plans[0].n_minibatches}
    found = [each for of_rank in of_ranks for minibatch in of_rank for each in minibatch]
    group_of = labels.tolist()
    dropped = per_minibatch == 1 and n_sets % world_size
    assert len(found) == n_sets - dropped
    assert all(len({group_of[row] for row in each}) == 1 for each in found)
    counts, of_group = Counter(itertools.chain(*found)), Counter(group_of[each[0]] for each in found)
    for minibatch in itertools.chain(*of_ranks):
        assert 1 <= len(minibatch) <= per_minibatch
    if rest != "fill":
        assert {*counts.values()} <= {1}
    if dropped:
        return
    for group, size in enumerate(sizes):
        rows = np.flatnonzero(labels == group)
        lengths = sorted(len(each) for each in found if labels[each[0]] == group)
        if rest == "drop":
            assert lengths == [set_size] * (size // set_size)
            continue
        assert {*rows.tolist()} <= counts.keys()
        assert of_group[group] == -(-size // set_size)
        assert lengths == [set_size] * of_group[group]
        if size >= set_size:
            assert all(len({*each}) == set_size for each in found if labels[each[0]] == group)
            assert max(counts[row] for row in rows.tolist()) <= 2


def test_the_rows_that_are_dropped_are_others_in_each_epoch():
    table = table_of([21, 30])
    seen = [{*itertools.chain(*sets_of(plan_of(CellSets("group", 8), table, 16, epoch=epoch)))} for epoch in range(12)]
    assert all(len(rows) == 16 + 24 for rows in seen)
    assert len({*map(frozenset, seen)}) == 12
    assert set.union(*seen) == {*range(51)}


@pytest.mark.parametrize(
    ("sizes", "n_minibatches"), [([8] * 20, 10), ([80, 8, 8, 8, 16, 40], 10)], ids=["equal", "unequal"]
)
def test_no_group_comes_twice_in_a_minibatch_if_it_can_be_avoided(sizes, n_minibatches):
    table = table_of(sizes)
    labels = table.columns["group"]
    for epoch in range(5):
        found = minibatches(plan_of(CellSets("group", 8), table, 16, epoch=epoch))
        assert len(found) == n_minibatches
        assert all(len({labels[each[0]] for each in minibatch}) == len(minibatch) for minibatch in found)


def test_sets_of_a_minibatch_repeat_a_group_if_asked():
    table = table_of([80, 8, 8, 8, 16, 40])
    labels = table.columns["group"]
    sampling = CellSets("group", 8, distinct=False)
    found = [each for epoch in range(5) for each in minibatches(plan_of(sampling, table, 16, epoch=epoch))]
    assert any(len({labels[each[0]] for each in minibatch}) < len(minibatch) for minibatch in found)


@pytest.mark.parametrize("replace", [True, False])
def test_every_group_has_per_group_sets(replace):
    table = table_of([9, 40, 200])
    labels = table.columns["group"]
    found = sets_of(plan_of(CellSets("group", 8, per_group=5, replace=replace), table, 16))
    assert Counter(labels[each[0]] for each in found) == {0: 5 if replace else 1, 1: 5, 2: 5}
    counts = Counter(itertools.chain(*(each for each in found if labels[each[0]] != 0)))
    assert {*counts.values()} == {1}
    assert all(len({*each}) == 8 for each in found)


@given(
    sizes=st.lists(st.integers(8, 300), min_size=4, max_size=30), epoch=st.integers(0, 5), world_size=st.integers(1, 3)
)
def test_balanced_groups_come_equally_often_and_never_twice_in_a_minibatch(sizes, epoch, world_size):
    table, n_sets = table_of(sizes), 7 * len(sizes)
    labels = table.columns["group"]
    sampling = CellSets("group", 8, weights="balanced", epoch_sets=n_sets)
    plans = [plan_of(sampling, table, 32, epoch=epoch, world_size=world_size, rank=rank) for rank in range(world_size)]
    found = [minibatch for plan in plans for minibatch in minibatches(plan)]
    assert all(len({labels[each[0]] for each in minibatch}) == 4 for minibatch in found)
    if world_size == 1:
        counts = Counter(labels[each[0]] for minibatch in found for each in minibatch)
        total = -(-n_sets // 4) * 4
        assert sum(counts.values()) == total
        assert {counts[group] for group in range(len(sizes))} <= {total // len(sizes), -(-total // len(sizes))}


def test_rows_of_a_group_that_comes_often_come_equally_often():
    table = table_of([24, 4000])
    found = sets_of(plan_of(CellSets("group", 8, weights="balanced", epoch_sets=60), table, 16))
    counts = Counter(itertools.chain(*found))
    assert {counts[row] for row in np.flatnonzero(table.columns["group"] == 0).tolist()} == {10}
    assert {counts[row] for row in np.flatnonzero(table.columns["group"] == 1).tolist()} <= {0, 1}


def test_weights_by_label():
    line, drug = np.repeat(["A", "B"], 300), np.tile(["x", "y", "z"], 200)
    table = Table({"line": line, "drug": drug})
    weights = {("A", "x"): 1, ("A", "y"): 2, ("B", "z"): 0.5, ("B", "x"): 0}
    sampling = CellSets(["line", "drug"], 10, weights=weights, epoch_sets=70, distinct=False)
    found = sets_of(plan_of(sampling, table, 20))
    assert Counter((line[each[0]], drug[each[0]]) for each in found) == {("A", "x"): 20, ("A", "y"): 40, ("B", "z"): 10}
    assert plan_of(sampling, table, 20).order.counts.groups == 3


@given(
    weights=st.lists(st.integers(1, 2**30), min_size=1, max_size=20),
    total=st.integers(0, 10**6),
    key=st.integers(0, 2**63),
)
def test_shares_are_exact_to_one_set(weights, total, key):
    counts = shared_out(np.array(weights), total, key)
    assert counts.sum() == total
    exact = [total * weight / sum(weights) for weight in weights]
    assert (np.abs(counts - exact) < 1 + 1e-6).all()


@given(counts=st.lists(st.integers(0, 40), min_size=1, max_size=20), size=st.integers(1, 9), key=st.integers(0, 2**63))
def test_sets_are_dealt_so_that_groups_repeat_as_little_as_possible(counts, size, key):
    groups, numbers = dealt(np.array(counts), size, key)
    assert sorted(zip(groups, numbers, strict=True)) == [
        (group, n) for group, count in enumerate(counts) for n in range(count)
    ]
    n_full = sum(counts) // size
    for begin in range(0, len(groups), size):
        here = Counter(groups[begin : begin + size].tolist())
        for group, times in here.items():
            if counts[group] <= n_full:
                assert times == 1


@given(sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=6), key=st.integers(0, 2**63))
def test_permutations_of_different_sizes(sizes, key):
    which = np.repeat(np.arange(len(sizes)), sizes)
    index = np.concatenate([np.arange(size) for size in sizes])
    found = permute_each(index, np.repeat(sizes, sizes), which, key)
    for number, size in enumerate(sizes):
        assert sorted(found[which == number]) == list(range(size))


def test_a_missing_label_leaves_a_row_out_and_is_counted():
    line = pd.Categorical.from_codes([0, 0, -1, 1, 1, 1, 0, -1], ["A", "B"])
    number = np.array([1, 1, 1, 2, np.nan, 2, 1, np.nan])
    table = Table({"line": line, "number": number})
    sampling = CellSets(["line", "number"], 2, rest="fill", least=3)
    order = order_of(sampling, table, 2)
    assert np.flatnonzero(order.chosen()).tolist() == [0, 1, 6]
    counts = order.counts
    assert (counts.groups, counts.rows, counts.sets) == (1, 3, 2)
    assert (counts.small_groups, counts.small_rows, counts.unlabelled_rows) == (1, 2, 3)


def test_groups_are_numbered_by_label():
    table = Table({"a": np.array([2, 0, 2, 0, 1]), "b": np.array(["y", "x", "x", "x", "y"])})
    groups = groups_of(["a", "b"], table.obs_column, 5)
    assert groups.codes.tolist() == [3, 0, 2, 0, 1]
    assert (groups.sizes.tolist(), groups.first.tolist()) == ([2, 1, 1, 1], [1, 4, 2, 0])
    assert groups.named(3, table.obs_column) == "a=2/b=y"
    assert groups_of([], table.obs_column, 5).sizes.tolist() == [5]


@pytest.mark.parametrize("options", [{}, {"rest": "fill"}, {"per_group": 4}, {"weights": "balanced"}], ids=str)
def test_an_epoch_resumes_with_any_number_of_ranks(options):
    table = table_of([30, 21, 100, 64])
    sampling = CellSets("group", 8, **options)
    whole = minibatches(plan_of(sampling, table, 16))
    for done in range(1, len(whole)):
        plan, skip = resumed(plan_of(sampling, table, 16), [(1, done)])
        assert minibatches(plan, done=skip) == whole[done:]
        if len(whole) - done < 2:
            continue
        rest = []
        for rank in range(2):
            plan, skip = resumed(plan_of(sampling, table, 16, rank=rank, world_size=2), [(1, done)])
            rest += [each for minibatch in minibatches(plan, done=skip) for each in minibatch]
        wanted = [each for minibatch in whole[done:] for each in minibatch]
        missing = Counter(map(tuple, wanted)) - Counter(map(tuple, rest))
        assert not Counter(map(tuple, rest)) - Counter(map(tuple, wanted))
        assert sum(missing.values()) <= (2 if options.get("weights") else 0)


def test_the_order_is_that_of_the_seed_and_the_epoch_in_any_slices():
    order = order_of(CellSets("group", 8), table_of([300, 200, 50]))
    whole = order.rows(0, order.n_rows, epoch=2, seed=7)
    parts = [
        pickle.loads(pickle.dumps(order)).rows(a, b, epoch=2, seed=7)
        for a, b in itertools.pairwise([0, 3, 100, 257, order.n_rows])
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert not np.array_equal(order.rows(0, order.n_rows, epoch=3, seed=7), whole)
    assert not np.array_equal(order.rows(0, order.n_rows, epoch=2, seed=8), whole)


def test_epochs_that_are_planned_at_the_same_time_do_not_mix():
    """A thread that plans another epoch whenever this one has computed its order."""
    order, other = (order_of(CellSets("group", 8), table_of([300, 200, 50])) for _ in range(2))
    wanted, sets = order.rows(0, 80, epoch=2, seed=7), order.draw.__self__

    class Meddled(type(sets)):
        def __setattr__(self, name, value):
            super().__setattr__(name, (1, *other.draw.__self__._sets(1)) if name == "_ordered" else value)

    sets.__class__ = Meddled
    for epoch in (3, 2):
        found = order.rows(0, 80, epoch=epoch, seed=7)
    np.testing.assert_array_equal(found, wanted)


TABLE = table_of([3, 5, 40])
BAD = {
    "no columns": (lambda: CellSets([], 4), "group is an empty list"),
    "a column twice": (lambda: CellSets(["a", "a"], 4), "group lists 'a' more than once"),
    "rest": (lambda: CellSets("group", 4, rest="pad"), "rest must be one of 'drop', 'fill'"),
    "weights": (lambda: CellSets("group", 4, weights="equal"), "weights must be 'balanced' or a mapping"),
    "two rules": (lambda: CellSets("group", 4, weights="balanced", per_group=2), "give one of them"),
    "epoch_sets": (lambda: CellSets("group", 4, epoch_sets=2), "epoch_sets goes with weights"),
    "too large": (
        lambda: order_of(CellSets("group", 50), TABLE, 50),
        r"none of the 3 groups by group has 50 rows. The largest are group=2 \(40 rows\), group=1 \(5 rows\)",
    ),
    "least": (
        lambda: order_of(CellSets("group", 5, least=41, rest="fill"), TABLE, 5),
        "none of the 3 groups .* lower least",
    ),
    "unlabelled": (
        lambda: order_of(CellSets("group", 2), Table({"group": pd.Categorical.from_codes([-1, -1], ["a"])})),
        "none of the 2 rows has a label in group",
    ),
    "an unknown label": (
        lambda: order_of(CellSets("group", 4, weights={7: 1}), TABLE),
        "weights names 7, but no group",
    ),
    "a small group": (lambda: order_of(CellSets("group", 4, weights={0: 1}), TABLE), "group=0, which has only 3 rows"),
    "a weight": (lambda: order_of(CellSets("group", 4, weights={2: -1}), TABLE), "2 has the weight -1"),
    "no weight": (lambda: order_of(CellSets("group", 4, weights={2: 0}), TABLE), "every group has the weight 0"),
    "too heavy": (
        lambda: plan_of(CellSets("group", 4, weights={1: 1, 2: 3}), TABLE, 8),
        r"no group can be more than 1/2 of all sets, but of 2 groups group=2 has 75.0% of the weight",
    ),
    "once": (
        lambda: plan_of(CellSets("group", 4, weights="balanced", replace=False), TABLE, 8),
        "1 of 2 groups have fewer sets than weights ask for",
    ),
    "batch_size": (lambda: plan_of(CellSets("group", 4), TABLE, 10), "not a multiple of set_size 4, .* take 8 or 12"),
    "a small batch_size": (lambda: plan_of(CellSets("group", 4), TABLE, 2), "take 4"),
    "fractions": (lambda: order_of(CellSets("x", 2), Table({"x": np.array([0.5, 1])})), "obs column 'x' holds float64"),
    "ranks": (lambda: plan_of(CellSets("group", 20), TABLE, 20, world_size=3), "2 units of 20 rows cannot be divided"),
}


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD.keys())
def test_options_that_make_no_sense_are_refused(make, message):
    with pytest.raises(OptionError, match=message):
        make()
