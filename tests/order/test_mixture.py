"""Groups of rows come in their shares, and every row of a group before any of them comes again."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zloader.common.errors import OptionError
from zloader.dataset.views import RowSet
from zloader.order.mixture import Mixture
from zloader.order.plan import Plan

pytestmark = pytest.mark.any_version


@dataclass(frozen=True)
class Table:
    """A dataset whose groups are lists of rows, or Stretches."""

    n_obs: int

    def rows_of(self, group):
        return group if isinstance(group, Stretch) else RowSet.of(np.isin(np.arange(self.n_obs), group))


@dataclass(frozen=True)
class Stretch:
    """Consecutive rows, however many."""

    rows: range = field(repr=False)

    def __len__(self):
        return len(self.rows)

    def numbers(self, positions):
        return self.rows.start + positions


def stretches(sizes) -> dict[str, np.ndarray]:
    """Disjoint groups of these sizes, one after the other."""
    ends = np.cumsum(sizes)
    return {f"{number}": np.arange(end - size, end) for number, (end, size) in enumerate(zip(ends, sizes, strict=True))}


def mixture(sizes, weights, **options):
    """A bound mixture of disjoint groups, and the group of each row."""
    groups = stretches(sizes)
    pairs = {name: (rows, weight) for (name, rows), weight in zip(groups.items(), weights, strict=True)}
    return Mixture(pairs, **options).bound(Table(sum(sizes))), np.repeat(np.arange(len(sizes)), sizes)


def order_of(sampling, n_obs, *, seed=0, epochs=range(1), cuts=()) -> np.ndarray:
    """The rows of some epochs, one after another, each computed in slices between `cuts`."""
    n_rows = sampling.n_rows(n_obs)
    slices = list(itertools.pairwise([0, *sorted(cut % (n_rows + 1) for cut in cuts), n_rows]))
    options = {"dataset_rows": n_obs, "seed": seed}
    return np.concatenate([sampling.rows(*each, epoch=epoch, **options) for epoch in epochs for each in slices])


GROUPS = st.lists(
    st.tuples(st.integers(1, 70), st.sampled_from([1, 1, 2, 0.3, 0.7, 11, 1e-3]) | st.floats(1e-6, 1e6)),
    min_size=1,
    max_size=6,
)


@pytest.mark.slow
@given(
    groups=GROUPS,
    block_size=st.integers(1, 20),
    epoch_rows=st.none() | st.integers(1, 150),
    seed=st.integers(0, 2**63),
    cuts=st.lists(st.integers(0, 300), max_size=4),
)
@example(groups=[(1, 1), (70, 1)], block_size=1, epoch_rows=1, seed=0, cuts=[])
@example(groups=[(5, 0.7), (64, 0.3)], block_size=20, epoch_rows=7, seed=0, cuts=[3])
def test_every_stretch_has_the_shares_and_every_group_comes_in_whole_passes(groups, block_size, epoch_rows, seed, cuts):
    sizes, weights = zip(*groups, strict=True)
    sampling, group_of = mixture(sizes, weights, block_size=block_size, epoch_rows=epoch_rows)
    n_rows = sampling.n_rows(sum(sizes))
    assert n_rows == (sum(sizes) if epoch_rows is None else epoch_rows)
    epochs = range(3 + 60 // n_rows)
    order = order_of(sampling, sum(sizes), seed=seed, epochs=epochs)
    assert order.dtype == np.int64
    np.testing.assert_array_equal(order, order_of(sampling, sum(sizes), seed=seed, epochs=epochs, cuts=cuts))
    for number, (size, weight) in enumerate(groups):
        own = order[group_of[order] == number]
        for begin in range(0, len(own), size):
            one_pass = own[begin : begin + size].tolist()
            assert len({*one_pass}) == len(one_pass)
        running = np.append(0, np.cumsum(group_of[order] == number))
        ahead = running - weight / sum(weights) * np.arange(len(running))
        apart = ahead.max() - ahead.min()  # the largest deviation from the share in any stretch of the order
        assert apart <= block_size * (1 + 1e-6 if len(groups) <= 2 else 4)


@pytest.mark.every(2)
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_fetch_of_every_rank_has_the_shares_to_one_block(world_size):
    sampling, group_of = mixture([5000, 300], [0.7, 0.3], block_size=8)
    n_fetches = 0
    for epoch, rank in itertools.product(range(3), range(world_size)):
        plan = Plan(
            dataset_rows=5300,
            sampling=sampling,
            batch_size=16,
            fetch_factor=8,
            epoch=epoch,
            rank=rank,
            world_size=world_size,
        )
        for fetch in plan.fetches():
            taken = group_of[fetch.rows]
            n_fetches += 1
            assert abs(np.count_nonzero(taken) - 0.3 * len(taken)) <= 8
    assert n_fetches > 3 * 40


def test_minibatches_have_the_shares_on_average():
    sampling, group_of = mixture([40_000, 500, 7000], [0.5, 0.3, 0.2], block_size=16)
    plan = Plan(dataset_rows=47_500, sampling=sampling, batch_size=64, fetch_factor=32)
    counts = []
    for fetch in plan.fetches():
        rows = fetch.rows[fetch.order]
        counts += [
            np.bincount(group_of[rows[a:b]], minlength=3) for a, b in itertools.pairwise(fetch.cuts) if b - a == 64
        ]
    assert len(counts) > 700
    # Rows drawn from a fetch without replacement: the variance is at most that of a binomial distribution.
    error = np.sqrt(64 * np.array([0.25, 0.21, 0.16]) / len(counts))
    assert (np.abs(np.mean(counts, axis=0) - 64 * np.array([0.5, 0.3, 0.2])) < 5 * error).all()
    assert (np.std(counts, axis=0) < 1.2 * np.sqrt(64 * np.array([0.25, 0.21, 0.16]))).all()


def test_over_the_epochs_all_rows_of_a_group_come_equally_often():
    sampling, group_of = mixture([900, 40], [1, 1], epoch_rows=100, block_size=8)
    counts = np.bincount(order_of(sampling, 940, epochs=range(50)), minlength=940)
    assert set(counts[group_of == 0]) == {2, 3}
    assert set(counts[group_of == 1]) == {62, 63}
    epochs = [order_of(sampling, 940, epochs=[epoch]) for epoch in range(2)]
    large = [{*epoch[group_of[epoch] == 0].tolist()} for epoch in epochs]
    assert not large[0] & large[1]


def test_rows_come_in_blocks_of_neighbours():
    sampling, _ = mixture([640, 1280], [1, 2], block_size=32)
    order = order_of(sampling, 1920)
    assert (np.diff(order.reshape(-1, 32)) == 1).all()
    assert sorted(order) == list(range(1920))


def test_each_pass_seed_and_group_has_an_order_of_its_own():
    sampling, group_of = mixture([64, 64], [1, 1], block_size=4)
    order = order_of(sampling, 128, epochs=range(2))
    first, second = (order[group_of[order] == number] for number in range(2))
    assert not np.array_equal(first[:64], first[64:])
    assert not np.array_equal(first[:64], second[:64] - 64)
    assert not np.array_equal(order, order_of(sampling, 128, epochs=range(2), seed=1))


def test_a_row_of_two_groups_comes_for_each():
    groups = {"all": (np.arange(100), 0.5), "few": ([3, 4], 0.5)}
    counts = Counter(order_of(Mixture(groups, block_size=2, epoch_rows=200).bound(Table(100)), 100).tolist())
    assert counts[3] == counts[4] == 51
    assert all(counts[row] == 1 for row in range(100) if row not in (3, 4))


def test_a_group_of_weight_0_never_comes_and_may_be_empty():
    groups = {"a": ([1, 2, 3], 1), "none": ([], 0), "b": (np.arange(50, 90), 0.0)}
    sampling = Mixture(groups).bound(Table(100))
    assert sampling.n_rows(100) == 3
    assert {*order_of(sampling, 100, epochs=range(9)).tolist()} == {1, 2, 3}
    assert sampling.indices.tolist() == [1, 2, 3]
    assert Mixture({"a": (range(60), 1), "b": (range(40, 100), 2)}).bound(Table(100)).indices is None


@pytest.mark.parametrize("epoch", [0, 1, 10**6, 10**15])
def test_more_rows_than_an_int32_counts_take_little_memory(epoch):
    groups = {"a": (Stretch(range(5 * 10**9)), 0.7), "b": (Stretch(range(5 * 10**9, 6 * 10**9)), 0.3)}
    sampling = Mixture(groups).bound(Table(6 * 10**9))
    plan = Plan(dataset_rows=6 * 10**9, sampling=sampling, batch_size=64, fetch_factor=256, epoch=epoch)
    plan.fetch(0)  # compiles
    tracemalloc.start()
    try:
        rows = plan.fetch(plan.n_fetches // 2).rows
        assert tracemalloc.get_traced_memory()[1] < 3_000_000
    finally:
        tracemalloc.stop()
    assert len(np.unique(rows)) == len(rows) >= 16_384 - 64
    assert abs(np.count_nonzero(rows >= 5 * 10**9) - 0.3 * len(rows)) <= 64


def test_tiny_weights_and_many_groups():
    sampling, group_of = mixture([10] * 300, 2.0 ** -np.arange(300), block_size=1, epoch_rows=4096)
    counts = np.bincount(group_of[order_of(sampling, 3000)], minlength=300)
    np.testing.assert_allclose(counts[:9], 4096 * 0.5 ** np.arange(1, 10), atol=4)
    sampling, group_of = mixture([10, 10], [1e308, 5e-324], block_size=1)
    assert not group_of[order_of(sampling, 20)].any()


def test_equal_weights_alternate():
    sampling, group_of = mixture([30] * 4, [5] * 4, block_size=3)
    slots = group_of[order_of(sampling, 120)].reshape(-1, 3)[:, 0]
    assert {*map(frozenset, slots.reshape(-1, 4))} == {frozenset(range(4))}


TABLE = Table(10)
BAD = {
    "no groups": (lambda: Mixture({}), "groups must be a mapping such as"),
    "a list": (lambda: Mixture([([1], 0.5)]), "groups must be a mapping such as"),
    "a number as a name": (lambda: Mixture({1: ([1], 0.5)}), "names of groups are strings, but groups has 1"),
    "a weight alone": (lambda: Mixture({"a": 0.5}), "'a' must be a pair of its rows and its weight, not 0.5"),
    "negative": (lambda: Mixture({"a": ([1], -1)}), "'a' has the weight -1: give a number of at least 0"),
    "NaN": (lambda: Mixture({"a": ([1], np.nan)}), "'a' has the weight nan"),
    "all 0": (lambda: Mixture({"a": ([1], 0), "b": ([2], 0)}), "every group has the weight 0"),
    "empty": (lambda: Mixture({"a": ([], 1), "b": ([2], 1)}).bound(TABLE), "the group 'a' has no row"),
    "unbound": (lambda: Mixture({"a": ([1], 1)}).n_rows(10), "call bound"),
    "another dataset": (lambda: Mixture({"a": ([1], 1)}).bound(TABLE).n_rows(11), "of 10 rows, .* has 11"),
}


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD.keys())
def test_options_that_make_no_sense_are_refused(make, message):
    with pytest.raises(OptionError, match=message):
        make()


def test_a_mixture_may_be_bound_to_several_datasets():
    sampling = Mixture({"a": ([1, 2], 1)})
    small, large = sampling.bound(Table(10)), sampling.bound(Table(20))
    assert small.n_rows(10) == large.n_rows(20) == 2
    assert small.bound(SimpleNamespace(n_obs=20, rows_of=Table(20).rows_of)).n_rows(20) == 2
