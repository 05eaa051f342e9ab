"""Rows come in proportion to their weights, rows of weight 0 never, and the order is a pure function."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import pickle
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from helpers import plan_of
from hypothesis import example, given
from hypothesis import strategies as st

from zloader.common.errors import OptionError
from zloader.order.permutation import key_of, mix
from zloader.order.shuffling import stratified
from zloader.order.weighted import BlockWeightedSampling, ClassBalancedSampling
from zloader.selecting.columns import ObsColumn

pytestmark = pytest.mark.any_version

WEIGHTS = st.lists(st.sampled_from([0.0, 0.0, 0.3, 1.0, 1.0, 2.5, 40.0]), min_size=1, max_size=120).filter(any)
BLOCK_SIZES = st.integers(1, 20)
SEEDS = st.integers(0, 2**63)
EPOCHS = st.integers(0, 1000)
CUTS = st.lists(st.integers(0, 700), max_size=5)


def _order(sampling, dataset_rows, *, table=None, seed=0, epoch=0, cuts=()):
    """The whole order of an epoch, computed in slices between `cuts`."""
    order = sampling.order(table or SimpleNamespace(n_obs=dataset_rows), 64, 16_384)
    bounds = [0, *sorted(cut % (order.n_rows + 1) for cut in cuts), order.n_rows]
    return np.concatenate([order.rows(*bound, seed=seed, epoch=epoch) for bound in itertools.pairwise(bounds)])


def _is_as_expected(counts, weights):
    """Chi-square test that counts do not vary more than draws by weight. Rows of weight 0 must have a count of 0."""
    counts, weights = np.asarray(counts), np.asarray(weights, float)
    assert not counts[weights == 0].any()
    expected = (weights / weights.sum() * counts.sum())[weights > 0]
    assert expected.min() > 5, "too few draws to judge by"
    statistic = ((counts[weights > 0] - expected) ** 2 / expected).sum()
    return scipy.stats.chi2.sf(statistic, len(expected) - 1) > 0.001


def _table(**columns):
    """A dataset with these obs columns."""
    return SimpleNamespace(obs_column=columns.__getitem__, n_obs=len(next(iter(columns.values())).values))


def _typed(codes, labels):
    """A dataset with a single obs column of labels."""
    return _table(type=ObsColumn(values=np.asarray(codes, np.int8), coded=pd.Index(labels)))


# ---- the same draws by hand


def _word(key, counter):
    return int(mix(np.array([(key + 0x9E3779B97F4A7C15 * counter) % 2**64], np.uint64))[0])


def _unit(word):
    return (word >> 11) / 2**53


def _draw_by_hand(weights, block_size, total_size, key):
    """The row of each draw, before blocks are shuffled, in plain Python."""
    runs = [weights[begin : begin + 64] for begin in range(0, len(weights), 64)]
    total = sum(map(sum, runs))
    levels = collections.defaultdict(list)
    for number, run in enumerate(runs):
        if any(run):
            expected = max(run) * (total_size / total) * (1 - 1e-9)
            levels[min(max(math.ceil(math.log2(max(expected, 2.0**-60))), -40), 60)].append(number)
    axis = [(level, number) for level in sorted(levels) for number in levels[level]]
    ends = [0.0, *itertools.accumulate(sum(runs[number]) for _, number in axis)]
    bounds = {
        level: (ends[[at for at, _ in axis].index(level)], ends[len(axis) - [at for at, _ in axis[::-1]].index(level)])
        for level in levels
    }
    stratum, drawn = ends[-1] / total_size, []
    for draw in range(total_size):
        group = draw // block_size
        jitter, begin = _unit(_word(key, group)), group * block_size
        level = next((level for level in sorted(levels) if (draw + jitter) * stratum < bounds[level][1]), max(levels))
        first, stop = (bound / ends[-1] * total_size for bound in bounds[level])
        whole = range(math.ceil(first), math.floor(stop))  # strata in the level
        passes = 2 ** max(0, level)
        in_passes = whole[: len(whole) // passes * passes]
        if draw in in_passes:
            draw = [each for number in range(passes) for each in in_passes[number::passes]][draw - whole[0]]
        point = (draw + jitter) * stratum
        if level < 0 and len(whole) and whole[0] <= begin and begin + block_size <= whole[-1] + 1:
            turned = _unit(_word(~key % 2**64, group)) + (draw - begin + jitter) / block_size * 2.0**level
            point = (begin + turned % 1.0 * block_size) * stratum
        of_level = [at for at, (of, _) in enumerate(axis) if of == level]
        at = next((at for at in of_level if point < ends[at + 1]), of_level[-1])
        number, left = axis[at][1], max(0.0, point - ends[at])
        running = list(itertools.accumulate(runs[number]))
        place = next((row for row, reached in enumerate(running) if reached > left), None)
        drawn.append(64 * number + (max(np.flatnonzero(runs[number])) if place is None else place))
    return np.array(drawn)


@given(weights=WEIGHTS, block_size=BLOCK_SIZES, total_size=st.integers(1, 150), seed=SEEDS, epoch=EPOCHS, cuts=CUTS)
@example(weights=[1.0] * 64, block_size=16, total_size=100, seed=0, epoch=0, cuts=[17])
@example(weights=[1.0] * 640 + [900.0] * 64, block_size=20, total_size=100, seed=0, epoch=0, cuts=[17])  # two levels
@example(weights=[0.1] * 640, block_size=8, total_size=40, seed=0, epoch=0, cuts=[17])  # parts of strata
@example(weights=[5e-324, 1.0], block_size=1, total_size=4, seed=0, epoch=0, cuts=[])
def test_draws_equal_the_same_by_hand_however_they_are_sliced(weights, block_size, total_size, seed, epoch, cuts):
    sampling = BlockWeightedSampling(weights, block_size=block_size, total_size=total_size)
    order = _order(sampling, len(weights), seed=seed, epoch=epoch, cuts=cuts)
    assert order.dtype == np.int64
    drawn = _draw_by_hand(weights, block_size, total_size, key_of(seed, epoch, 5))
    places = _order(stratified(block_size), total_size, seed=seed, epoch=epoch)
    np.testing.assert_array_equal(order, drawn[places])


# ---- how often rows come


def _blocky(n_blocks):
    """Blocks of eight weights of every kind: equal, mixed, with one dominant weight, and with no weight."""
    rng = np.random.Generator(np.random.PCG64(1))
    kinds = [np.ones(8), rng.uniform(0.5, 2, 8), np.array([30, 1, 1, 2, 1, 1, 1, 1]), np.zeros(8)]
    return np.concatenate([kinds[number % 4] for number in range(n_blocks)])


@pytest.mark.parametrize("block_size", [1, 3, 8])
@pytest.mark.parametrize("total_size", [24, 200])
def test_a_row_is_drawn_as_often_as_it_weighs(block_size, total_size):
    """Over many epochs, which are independent. Strata vary less than chance. The seed is fixed."""
    weights = _blocky(60)
    sampling = BlockWeightedSampling(weights, block_size=block_size, total_size=total_size)
    order = np.concatenate([_order(sampling, len(weights), epoch=epoch) for epoch in range(72_000 // total_size)])
    counts = np.bincount(order, minlength=len(weights))
    assert _is_as_expected(counts, weights)
    assert not _is_as_expected(counts, np.roll(weights, 1) * (weights > 0) + (weights > 0))


def test_in_an_epoch_a_row_comes_as_often_as_it_should_give_or_take_one():
    weights = np.repeat([1.0, 2.0, 4.0, 0.5], 640)
    counts = np.bincount(_order(BlockWeightedSampling(weights, total_size=4800), len(weights)), minlength=len(weights))
    assert abs(counts - weights).max() <= 1


def test_all_places_together_give_each_row_its_share():
    """Rows of a block are not independent, so their shares are compared instead of a chi-square test."""
    weights = _blocky(12)
    order = _order(BlockWeightedSampling(weights, block_size=8, total_size=400_000), len(weights))
    shares = np.bincount(order, minlength=len(weights)) / len(order)
    np.testing.assert_allclose(shares, weights / weights.sum(), rtol=0.12)


@given(weights=WEIGHTS, block_size=BLOCK_SIZES, seed=SEEDS, epoch=EPOCHS)
def test_as_many_rows_as_weigh_something_and_never_one_that_does_not(weights, block_size, seed, epoch):
    sampling = BlockWeightedSampling(weights, block_size=block_size)
    order = _order(sampling, len(weights), seed=seed, epoch=epoch)
    assert len(order) == np.count_nonzero(weights)
    assert np.asarray(weights)[order].all()


@given(n_rows=st.integers(1, 700), block_size=BLOCK_SIZES, epoch=EPOCHS)
def test_rows_of_equal_weight_come_once_and_in_whole_blocks(n_rows, block_size, epoch):
    order = _order(BlockWeightedSampling(np.full(n_rows, 0.1), block_size=block_size), n_rows, epoch=epoch)
    np.testing.assert_array_equal(order, _order(stratified(block_size), n_rows, epoch=epoch))


def test_a_few_of_many_rows_come_in_blocks_of_neighbours():
    weights = np.zeros(64_000)
    weights[::10] = 1
    order = _order(BlockWeightedSampling(weights, block_size=16, total_size=400), 64_000)
    assert np.count_nonzero(np.diff(np.sort(order)) > 10) <= 2 * 400 // 16
    assert np.ptp(order) > 50_000


def test_heavy_rows_do_not_come_in_bursts():
    """With few heavy rows among many light rows, a fetch has nearly as many distinct rows as with single draws."""
    rng = np.random.Generator(np.random.PCG64(2))
    weights = np.where(rng.random(100_000) < 0.02, 50.0, 1.0)
    rows = _order(BlockWeightedSampling(weights, block_size=64), 100_000)[:8192]
    chances = weights / weights.sum()
    expected = (1 - (1 - chances) ** 8192).sum()
    assert len(np.unique(rows)) > 0.9 * expected
    heavy = rows[weights[rows] > 1]
    assert (
        collections.Counter(heavy.tolist()).most_common(1)[0][1] < 20
    )  # 4 096 draws from 2 000 rows; a burst would have 25


# ---- without replacement


@given(weights=WEIGHTS, block_size=BLOCK_SIZES, seed=SEEDS, epoch=EPOCHS, cuts=CUTS, part=st.floats(0, 1))
def test_without_replacement_no_row_comes_twice(weights, block_size, seed, epoch, cuts, part):
    total_size = max(1, int(part * sum(weights) / max(weights)))
    options = {"block_size": block_size, "total_size": total_size, "replace": False}
    order = _order(BlockWeightedSampling(weights, **options), len(weights), seed=seed, epoch=epoch, cuts=cuts)
    assert len(np.unique(order)) == len(order) == total_size
    assert np.asarray(weights)[order].all()
    more = options | {"total_size": int(sum(weights) / max(weights) * (1 + 1e-6)) + 1}
    with pytest.raises(OptionError, match=r"no row comes twice, but one .* lower total_size to \d+, or draw with repl"):
        _order(BlockWeightedSampling(weights, **more), len(weights))


def test_without_replacement_rows_come_as_often_as_they_weigh():
    weights = np.random.Generator(np.random.PCG64(3)).uniform(0.2, 1, 300)
    sampling = BlockWeightedSampling(weights, block_size=4, total_size=100, replace=False)
    counts = np.bincount(np.concatenate([_order(sampling, 300, epoch=epoch) for epoch in range(300)]), minlength=300)
    assert _is_as_expected(counts, weights)


# ---- classes


def test_classes_are_drawn_alike_and_rows_of_a_class_too():
    codes = np.repeat([0, 1, -1, 2, 3], [500, 40, 30, 8, 100])
    codes = codes[np.random.Generator(np.random.PCG64(3)).permutation(len(codes))]
    sampling = ClassBalancedSampling("type", block_size=8, total_size=80_000)
    order = _order(sampling, len(codes), table=_typed(codes, list("abcd")))
    assert _is_as_expected(np.bincount(codes[order], minlength=4), np.ones(4))
    for code in range(4):
        of_class = np.bincount(order[codes[order] == code], minlength=len(codes))
        assert _is_as_expected(of_class, codes == code)


LABELS = {
    "strings": ["b", "a", "c", "a", "a", "c", "b", "a"],
    "categories": pd.Categorical(["b", "a", "c", "a", "a", "c", "b", "a"], categories=["unused", "c", "b", "a"]),
    "numbers": [70, -5, 3, -5, -5, 3, 70, -5],
    "small numbers": np.array([2, 0, 1, 0, 0, 1, 2, 0], np.uint8),
}


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS.keys())
def test_labels_of_any_kind_are_classes(labels):
    """Two classes of two rows and one class of four give the same order as the equivalent weights."""
    weights = [1 / 2, 1 / 4, 1 / 2, 1 / 4, 1 / 4, 1 / 2, 1 / 2, 1 / 4]
    for replace in (True, False):
        options = {"block_size": 4, "replace": replace, "total_size": 6}
        order = _order(ClassBalancedSampling(labels, **options), 8, epoch=2)
        np.testing.assert_array_equal(order, _order(BlockWeightedSampling(weights, **options), 8, epoch=2))


def test_rows_without_a_label_do_not_count():
    sampling = ClassBalancedSampling(["a", None, "b", "a"])
    order = _order(sampling, 4, epoch=1).tolist()
    assert len(order) == 3
    assert {*order} <= {0, 2, 3}


def test_weights_of_labels_are_those_of_their_rows():
    codes = [0, 1, 2, 1, -1, 0]
    by_label = BlockWeightedSampling({"a": 2.0, "c": 5}, column="type", block_size=2, total_size=40)
    by_row = BlockWeightedSampling([2.0, 0, 5, 0, 0, 2], block_size=2, total_size=40)
    np.testing.assert_array_equal(_order(by_label, 6, table=_typed(codes, list("abc"))), _order(by_row, 6))


# ---- with indices, ranks, epochs, processes


def test_the_rows_that_weigh_something_are_chosen():
    table = _typed([0, 1, 2, 1, -1, 0], list("abc"))
    by_label = BlockWeightedSampling({"a": 2.0}, column="type").order(table, 2, 4)
    balanced = ClassBalancedSampling("type").order(table, 2, 4)
    assert np.flatnonzero(by_label.chosen()).tolist() == [0, 5]
    assert np.flatnonzero(balanced.chosen()).tolist() == [0, 1, 2, 3, 5]
    assert BlockWeightedSampling(np.ones(6)).order(table, 2, 4).chosen is None


@given(weights=WEIGHTS, world_size=st.integers(1, 4), total=st.integers(20, 90))
def test_ranks_and_workers_share_out_the_draws(weights, world_size, total):
    weights = [*weights, *[1.0] * 90]
    sampling = BlockWeightedSampling(weights, block_size=3, total_size=total)
    plan = plan_of(dataset_rows=len(weights), sampling=sampling, batch_size=4, fetch_factor=2, world_size=world_size)
    dealt = []
    for rank, worker in itertools.product(range(world_size), range(2)):
        of_rank = dataclasses.replace(plan, rank=rank)
        dealt += [of_rank.fetch(number).rows for number in of_rank.fetch_numbers(worker=worker, n_workers=2)]
    order = _order(sampling, len(weights))
    np.testing.assert_array_equal(np.sort(np.concatenate(dealt)), np.sort(order))


@pytest.mark.parametrize("replace", [True, False])
def test_epochs_and_seeds_differ(replace):
    sampling = BlockWeightedSampling(np.arange(200), block_size=4, total_size=90, replace=replace)
    orders = {tuple(_order(sampling, 200, seed=seed, epoch=epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


@pytest.mark.parametrize("replace", [True, False])
def test_a_plan_of_draws_sweeps_only_where_no_row_comes_twice(replace):
    sampling = BlockWeightedSampling(np.ones(40), block_size=4, replace=replace)
    assert plan_of(dataset_rows=40, sampling=sampling, batch_size=4, fetch_factor=2).sweeps is not replace


def test_a_pickled_sampling_draws_the_same():
    labels = ["a", "b", "b", "c"] * 20
    for sampling in (BlockWeightedSampling(np.arange(80.0)), ClassBalancedSampling(labels)):
        again = pickle.loads(pickle.dumps(sampling))
        np.testing.assert_array_equal(_order(again, 80, seed=3), _order(sampling, 80, seed=3))


def test_a_table_holds_a_quarter_of_a_byte_a_row_and_a_fetch_little():
    weights = np.random.Generator(np.random.PCG64(4)).random(1_000_000).astype(np.float32)
    plan = {"dataset_rows": len(weights), "batch_size": 64, "fetch_factor": 256}
    plan_of(sampling=BlockWeightedSampling(weights), **plan).fetch(0)  # compiles
    tracemalloc.start()
    try:
        made = plan_of(sampling=BlockWeightedSampling(weights, block_size=64), **plan)
        assert tracemalloc.get_traced_memory()[0] < 18 * len(weights) / 64  # a float64 and an index per 64 rows
        tracemalloc.reset_peak()
        made.fetch(3)
        assert tracemalloc.get_traced_memory()[1] < 2_500_000
    finally:
        tracemalloc.stop()


# ---- invalid options


def _bad(sampling, table=None, n_rows=1):
    """Makes a sampling, and its order for a table."""
    return lambda: _order(sampling(), n_rows, table=table)


BAD = {
    "negative weight": (_bad(lambda: BlockWeightedSampling([1.0, -1.0]), n_rows=2), "weight 1 is -1.0"),
    "NaN": (_bad(lambda: BlockWeightedSampling([np.nan])), "weight 0 is nan"),
    "too large": (_bad(lambda: BlockWeightedSampling([1e308] * 9), n_rows=9), "add up to inf"),
    "too large together": (_bad(lambda: BlockWeightedSampling([1e308] * 9, block_size=1), n_rows=9), "add up to inf"),
    "too small": (_bad(lambda: BlockWeightedSampling([5e-324])), "add up to 5e-324"),
    "nothing weighs": (_bad(lambda: BlockWeightedSampling([0.0, 0.0]), n_rows=2), "no row"),
    "table": (lambda: BlockWeightedSampling([[1.0]]), "one number per row"),
    "words": (_bad(lambda: BlockWeightedSampling(["1"])), "one number per row"),
    "mapping without column": (lambda: BlockWeightedSampling({"a": 1}), "column"),
    "column without mapping": (lambda: BlockWeightedSampling([1.0], column="type"), "mapping"),
    "replace": (lambda: BlockWeightedSampling([1.0], replace=None), "replace"),
    "a negative weight of a label": (
        _bad(lambda: BlockWeightedSampling({"a": -1}, column="type"), _typed([0], ["a"])),
        "'a' has the weight -1",
    ),
    "words as weights of labels": (
        _bad(lambda: BlockWeightedSampling({"a": "1"}, column="type"), _typed([0], ["a"])),
        "'a' has the weight '1'",
    ),
    "no column or labels": (lambda: ClassBalancedSampling(None), "labels must be .* not None"),
    "a table of labels": (lambda: ClassBalancedSampling([[1, 2]]), "labels must be"),
    "fractions as classes": (_bad(lambda: ClassBalancedSampling([0.5, 1.5])), "float64"),
    "fractions in a column": (
        _bad(lambda: ClassBalancedSampling("age"), _table(age=ObsColumn(values=np.array([0.5, 1.5])))),
        "'age' holds float64",
    ),
    "no labels": (_bad(lambda: ClassBalancedSampling([None, None])), "no row"),
    "unknown label": (
        _bad(lambda: BlockWeightedSampling({"d": 1}, column="type"), _typed([0], ["a"])),
        "'d'.*'type'.*'a'",
    ),
    "weights of numbers": (
        _bad(lambda: BlockWeightedSampling({1: 1}, column="n"), _table(n=ObsColumn(values=np.arange(3)))),
        "'n' holds numbers",
    ),
    "another dataset": (_bad(lambda: BlockWeightedSampling([1.0, 1.0]), n_rows=3), "2 rows.* 3"),
    "a block larger than a fetch": (
        lambda: plan_of(sampling=ClassBalancedSampling([0] * 80), dataset_rows=80, batch_size=8, fetch_factor=2),
        "block_size 64",
    ),
}


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD.keys())
def test_options_that_make_no_sense_are_refused(make, message):
    with pytest.raises(OptionError, match=message):
        make()
