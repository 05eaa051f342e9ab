"""Groups of rows come in their shares, and all rows of a group equally often."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from helpers import plan_of
from hypothesis import example, given
from hypothesis import strategies as st

from zloader.common.errors import OptionError
from zloader.dataset.views import RowSet
from zloader.order.weighted import Mixture

pytestmark = pytest.mark.any_version


@dataclass(frozen=True)
class Table:
    """A dataset whose groups are lists of rows."""

    n_obs: int

    def rows_of(self, group):
        return RowSet.of(np.isin(np.arange(self.n_obs), group))


def stretches(sizes) -> dict[str, np.ndarray]:
    """Disjoint groups of these sizes, one after the other."""
    ends = np.cumsum(sizes)
    return {f"{number}": np.arange(end - size, end) for number, (end, size) in enumerate(zip(ends, sizes, strict=True))}


def mixture(sizes, weights, **options):
    """A mixture of disjoint groups, and the group of each row."""
    groups = stretches(sizes)
    pairs = {name: (rows, weight) for (name, rows), weight in zip(groups.items(), weights, strict=True)}
    return Mixture(pairs, **options), np.repeat(np.arange(len(sizes)), sizes)


def order_of(sampling, n_obs, *, seed=0, epochs=range(1), cuts=()) -> np.ndarray:
    """The rows of some epochs, one after another, each computed in slices between `cuts`."""
    order = sampling.order(Table(n_obs), 64, 1024)
    slices = list(itertools.pairwise([0, *sorted(cut % (order.n_rows + 1) for cut in cuts), order.n_rows]))
    return np.concatenate([order.rows(*each, seed=seed, epoch=epoch) for epoch in epochs for each in slices])


GROUPS = st.lists(
    st.tuples(st.integers(1, 70), st.sampled_from([1, 1, 2, 0.3, 0.7, 11, 1e-3]) | st.floats(1e-6, 1e6)),
    min_size=1,
    max_size=6,
)


@given(
    groups=GROUPS,
    block_size=st.integers(1, 20),
    epoch_rows=st.none() | st.integers(1, 150),
    seed=st.integers(0, 2**63),
    cuts=st.lists(st.integers(0, 300), max_size=4),
)
@example(groups=[(1, 1), (70, 1)], block_size=1, epoch_rows=1, seed=0, cuts=[])
@example(groups=[(5, 0.7), (64, 0.3)], block_size=20, epoch_rows=7, seed=0, cuts=[3])
def test_an_epoch_has_the_rows_that_were_asked_for_however_it_is_sliced(groups, block_size, epoch_rows, seed, cuts):
    sizes, weights = zip(*groups, strict=True)
    sampling, _ = mixture(sizes, weights, block_size=block_size, epoch_rows=epoch_rows)
    order = order_of(sampling, sum(sizes), seed=seed, cuts=cuts)
    assert len(order) == (sum(sizes) if epoch_rows is None else epoch_rows)
    np.testing.assert_array_equal(order, order_of(sampling, sum(sizes), seed=seed))


@pytest.mark.parametrize("weights", [[0.7, 0.3], [0.2, 0.2], [1e-3, 1], [11, 0.3]])
def test_all_rows_of_a_group_come_equally_often(weights):
    """Groups of whole runs of rows, so that each has a level of its own."""
    sampling, group_of = mixture([640, 6400], weights, epoch_rows=8000, block_size=16)
    counts = np.bincount(order_of(sampling, 7040), minlength=7040)
    for number, (size, weight) in enumerate(zip([640, 6400], weights, strict=True)):
        of_group = counts[group_of == number]
        assert abs(of_group.sum() - 8000 * weight / sum(weights)) <= 2
        assert abs(of_group - 8000 * weight / sum(weights) / size).max() < 2


@pytest.mark.every(2)
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_fetch_of_every_rank_has_about_the_shares(world_size):
    sampling, group_of = mixture([50_000, 3000], [0.7, 0.3], block_size=8)
    n_fetches = 0
    for epoch, rank in itertools.product(range(3), range(world_size)):
        plan = plan_of(
            table=Table(53_000),
            sampling=sampling,
            batch_size=64,
            fetch_factor=16,
            epoch=epoch,
            rank=rank,
            world_size=world_size,
        )
        for fetch in plan.fetches():
            taken = group_of[fetch.rows]
            n_fetches += 1
            assert abs(np.count_nonzero(taken) - 0.3 * len(taken)) <= 32  # of 1 024 rows
    assert n_fetches > 150


def test_minibatches_have_the_shares_on_average():
    sampling, group_of = mixture([40_000, 500, 7000], [0.5, 0.3, 0.2], block_size=16)
    plan = plan_of(table=Table(47_500), sampling=sampling, batch_size=64, fetch_factor=32)
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


def test_each_seed_and_epoch_has_an_order_of_its_own():
    sampling, _ = mixture([64, 64], [1, 1], block_size=4)
    orders = [order_of(sampling, 128, epochs=[epoch], seed=seed).tolist() for epoch in range(2) for seed in range(2)]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == list(range(128)) for order in orders)


def test_a_row_of_several_groups_comes_for_each():
    groups = {"all": (np.arange(640), 0.5), "few": (np.arange(64, 128), 0.25), "some": (np.arange(96, 192), 0.25)}
    sampling = Mixture(groups, block_size=2, epoch_rows=64_000)
    expected = np.full(640, 50.0)
    expected[64:128] += 250
    expected[96:192] += 16_000 / 96
    counts = np.bincount(order_of(sampling, 640), minlength=640)
    assert abs(counts - expected).max() < 2


def test_a_group_of_weight_0_never_comes_and_may_be_empty():
    groups = {"a": ([1, 2, 3], 1), "none": ([], 0), "b": (np.arange(50, 90), 0.0)}
    sampling = Mixture(groups)
    assert len(order_of(sampling, 100)) == 3
    assert {*order_of(sampling, 100, epochs=range(9)).tolist()} == {1, 2, 3}
    assert np.flatnonzero(sampling.order(Table(100), 2, 4).chosen()).tolist() == [1, 2, 3]
    assert Mixture({"a": (range(60), 1), "b": (range(40, 100), 2)}).order(Table(100), 2, 4).chosen is None


def test_tiny_weights_and_many_groups():
    sampling, group_of = mixture([10] * 300, 2.0 ** -np.arange(300), block_size=1, epoch_rows=4096)
    counts = np.bincount(group_of[order_of(sampling, 3000)], minlength=300)
    np.testing.assert_allclose(counts[:9], 4096 * 0.5 ** np.arange(1, 10), atol=4)
    sampling, group_of = mixture([10, 10], [1e308, 5e-324], block_size=1)
    assert not group_of[order_of(sampling, 20)].any()


TABLE = Table(10)
BAD = {
    "no groups": (lambda: Mixture({}), "groups must be a mapping from names"),
    "a list": (lambda: Mixture([([1], 0.5)]), "groups must be a mapping from names"),
    "a number as a name": (lambda: Mixture({1: ([1], 0.5)}), "groups must be a mapping from names to pairs"),
    "a weight alone": (lambda: Mixture({"a": 0.5}), "groups must be a mapping from names to pairs"),
    "negative": (lambda: Mixture({"a": ([1], -1)}), "'a' has the weight -1: give a number of at least 0"),
    "NaN": (lambda: Mixture({"a": ([1], np.nan)}), "'a' has the weight nan"),
    "all 0": (lambda: Mixture({"a": ([1], 0), "b": ([2], 0)}), "every group has the weight 0"),
    "empty": (lambda: Mixture({"a": ([], 1), "b": ([2], 1)}).order(TABLE, 2, 4), "the group 'a' has no row"),
}


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD.keys())
def test_options_that_make_no_sense_are_refused(make, message):
    with pytest.raises(OptionError, match=message):
        make()
