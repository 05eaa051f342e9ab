"""Rows come in proportion to their weights, rows of weight 0 never, and the order is a pure function."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import pickle
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from hypothesis import example, given
from hypothesis import strategies as st

from zloader.common.errors import OptionError
from zloader.order.permutation import key_of, mix
from zloader.order.plan import Plan
from zloader.order.weighted import BlockWeightedSampling, ClassBalancedSampling
from zloader.selecting.columns import ObsColumn

pytestmark = pytest.mark.any_version

WEIGHTS = st.lists(st.sampled_from([0.0, 0.0, 0.3, 1.0, 1.0, 2.5, 40.0]), min_size=1, max_size=120).filter(any)
BLOCK_SIZES = st.integers(1, 20)
SEEDS = st.integers(0, 2**63)
EPOCHS = st.integers(0, 1000)
CUTS = st.lists(st.integers(0, 700), max_size=5)


def _order(sampling, dataset_rows, *, seed=0, epoch=0, cuts=()):
    """The whole order of an epoch, computed in slices between `cuts`."""
    n_rows = sampling.n_rows(dataset_rows)
    bounds = [0, *sorted(cut % (n_rows + 1) for cut in cuts), n_rows]
    slices = itertools.pairwise(bounds)
    options = {"dataset_rows": dataset_rows, "seed": seed, "epoch": epoch}
    return np.concatenate([sampling.rows(start, stop, **options) for start, stop in slices])


def _is_as_expected(counts, weights):
    """Chi-square test that counts match draws by weight. Rows of weight 0 must have a count of 0."""
    counts, weights = np.asarray(counts), np.asarray(weights, float)
    assert not counts[weights == 0].any()
    expected = (weights / weights.sum() * counts.sum())[weights > 0]
    assert expected.min() > 5, "too few draws to judge by"
    statistic = ((counts[weights > 0] - expected) ** 2 / expected).sum()
    return 0.001 < scipy.stats.chi2.sf(statistic, len(expected) - 1) < 0.999


def _table(**columns):
    """A dataset with these obs columns."""
    return SimpleNamespace(obs_column=columns.__getitem__)


def _typed(codes, labels):
    """A dataset with a single obs column of labels."""
    return _table(type=ObsColumn(values=np.asarray(codes, np.int8), coded=pd.Index(labels)))


# ---- the same draws by hand


def _word(key, counter):
    return int(mix(np.array([(key + 0x9E3779B97F4A7C15 * counter) % 2**64], np.uint64))[0])


def _unit(word):
    return (word >> 11) / 2**53


def _pick(weights, point):
    """The first entry whose running weight is above the point, or the last entry."""
    running = list(itertools.accumulate(weights))
    return next((i for i, reached in enumerate(running) if reached > point), len(running) - 1)


def _draw_by_hand(weights, block_size, n_rows, key):
    rows = [row for row, weight in enumerate(weights) if weight]
    levels = [[] for _ in range(block_size.bit_length())]
    for begin in range(0, len(rows), block_size):
        block = rows[begin : begin + block_size]
        total, most = sum(weights[row] for row in block), max(weights[row] for row in block)
        shares = [block_size >> level for level in range(len(levels))]
        level = next(level for level, share in enumerate(shares) if share == 1 or share * most <= total * (1 + 1e-9))
        levels[level].append((block, total))
    table = [(level, *each) for level, blocks in enumerate(levels) for each in blocks]
    ends = [0.0, *itertools.accumulate(total for _, _, total in table)]
    drawn = []
    for slot in range(-(-n_rows // block_size)):
        point = _unit(_word(key, slot)) * ends[-1]
        level = next(level for (level, _, _), end in zip(table, ends[1:], strict=True) if end > point)
        of_level = [number for number, entry in enumerate(table) if entry[0] == level]
        low, high = ends[of_level[0]], ends[of_level[-1] + 1]
        taken = block_size >> level
        for number in range(-(-block_size // taken)):
            word = _word(key_of(key, 1), slot * block_size + number)
            point = low + _unit(word) * (high - low)
            at = min(next((i for i, end in enumerate(ends[1:]) if end > point), len(table)), of_level[-1])
            _, block, total = table[at]
            begin = _unit(_word(word, 1))
            for step in range(min(taken, block_size - number * taken)):
                share = begin + step / taken
                point = (share - (share >= 1)) * total
                drawn.append(block[_pick([weights[row] for row in block], point)])
    return drawn[:n_rows]


@given(weights=WEIGHTS, block_size=BLOCK_SIZES, total_size=st.integers(1, 150), seed=SEEDS, epoch=EPOCHS, cuts=CUTS)
@example(weights=[1.0] * 64, block_size=16, total_size=100, seed=0, epoch=0, cuts=[17])  # one level
@example(weights=[1.0, 900.0] * 32, block_size=20, total_size=100, seed=0, epoch=0, cuts=[17])  # 20 = 10 + 10
@example(weights=[5e-324, 1.0], block_size=1, total_size=4, seed=0, epoch=0, cuts=[])
def test_draws_equal_the_same_by_hand_however_they_are_sliced(weights, block_size, total_size, seed, epoch, cuts):
    sampling = BlockWeightedSampling(weights, block_size=block_size, total_size=total_size)
    order = _order(sampling, len(weights), seed=seed, epoch=epoch, cuts=cuts)
    assert order.dtype == np.int64
    assert order.tolist() == _draw_by_hand(weights, block_size, total_size, key_of(seed, epoch))


# ---- how often rows come


def _blocky(n_blocks):
    """Blocks of eight weights of every kind: equal, mixed, with one dominant weight, and with no weight."""
    rng = np.random.Generator(np.random.PCG64(1))
    kinds = [np.ones(8), rng.uniform(0.5, 2, 8), np.array([30, 1, 1, 2, 1, 1, 1, 1]), np.zeros(8)]
    return np.concatenate([kinds[number % 4] for number in range(n_blocks)])


@pytest.mark.parametrize("block_size", [1, 3, 8])
@pytest.mark.parametrize("place", [0, -1])
def test_a_row_is_drawn_as_often_as_it_weighs_at_every_place_of_a_block(block_size, place):
    """Slots are drawn independently, so the counts at one position of all slots must pass. The seed is fixed."""
    weights = _blocky(12)
    order = _order(BlockWeightedSampling(weights, block_size=block_size, total_size=24_000 * block_size), len(weights))
    counts = np.bincount(order.reshape(-1, block_size)[:, place], minlength=len(weights))
    assert _is_as_expected(counts, weights)
    assert not _is_as_expected(counts, np.roll(weights, 1) * (weights > 0) + (weights > 0))


def test_all_places_together_give_each_row_its_share():
    """Rows of a block are not independent, so their shares are compared instead of a chi-square test."""
    weights = _blocky(12)
    order = _order(BlockWeightedSampling(weights, block_size=8, total_size=400_000), len(weights))
    shares = np.bincount(order, minlength=len(weights)) / len(order)
    np.testing.assert_allclose(shares, weights / weights.sum(), rtol=0.12)


@given(weights=WEIGHTS, block_size=BLOCK_SIZES, seed=SEEDS, epoch=EPOCHS, replace=st.booleans())
def test_as_many_rows_as_weigh_something_and_never_one_that_does_not(weights, block_size, seed, epoch, replace):
    sampling = BlockWeightedSampling(weights, block_size=block_size, replace=replace)
    order = _order(sampling, len(weights), seed=seed, epoch=epoch)
    assert len(order) == np.count_nonzero(weights)
    assert np.asarray(weights)[order].all()


@given(n_rows=st.integers(1, 200), block_size=BLOCK_SIZES, epoch=EPOCHS)
def test_blocks_of_equal_weight_are_drawn_whole(n_rows, block_size, epoch):
    sampling = BlockWeightedSampling(np.full(n_rows, 0.1), block_size=block_size, total_size=20 * block_size)
    for slot in _order(sampling, n_rows, epoch=epoch).reshape(-1, block_size):
        if (
            slot.max() < n_rows // block_size * block_size
        ):  # otherwise the slot repeats the short block until it is full
            begin = slot.min()
            assert begin % block_size == 0
            np.testing.assert_array_equal(np.sort(slot), begin + np.arange(block_size))


def test_blocks_are_consecutive_among_the_rows_that_weigh_something():
    weights = np.zeros(400)
    weights[::10] = 1
    for slot in _order(BlockWeightedSampling(weights, block_size=4, total_size=400), 400).reshape(-1, 4):
        np.testing.assert_array_equal(np.sort(slot), slot.min() + 10 * np.arange(4))


def test_heavy_rows_do_not_come_in_bursts():
    """With few heavy rows among many light rows, a fetch has nearly as many distinct rows as with single draws."""
    rng = np.random.Generator(np.random.PCG64(2))
    weights = np.where(rng.random(100_000) < 0.02, 50.0, 1.0)
    rows = BlockWeightedSampling(weights, block_size=64).rows(0, 8192, dataset_rows=100_000, seed=0, epoch=0)
    chances = weights / weights.sum()
    expected = (1 - (1 - chances) ** 8192).sum()
    assert len(np.unique(rows)) > 0.9 * expected
    heavy = rows[weights[rows] > 1]
    assert (
        collections.Counter(heavy.tolist()).most_common(1)[0][1] < 20
    )  # 4 096 draws from 2 000 rows; a burst would have 32


# ---- without replacement


@given(weights=WEIGHTS, block_size=BLOCK_SIZES, seed=SEEDS, epoch=EPOCHS, cuts=CUTS, part=st.floats(0, 1))
def test_without_replacement_no_row_comes_twice(weights, block_size, seed, epoch, cuts, part):
    n_positive = np.count_nonzero(weights)
    options = {"block_size": block_size, "total_size": max(1, round(part * n_positive)), "replace": False}
    sampling = BlockWeightedSampling(weights, **options)
    order = _order(sampling, len(weights), seed=seed, epoch=epoch, cuts=cuts)
    assert len(np.unique(order)) == len(order) == options["total_size"]
    assert np.asarray(weights)[order].all()
    other = BlockWeightedSampling(weights, **options)
    _order(other, len(weights), seed=seed, epoch=epoch + 1)  # earlier calls have no effect
    np.testing.assert_array_equal(order, _order(other, len(weights), seed=seed, epoch=epoch))


@pytest.mark.slow  # the golden orders notice any change
def test_without_replacement_rows_are_drawn_one_after_the_other_by_weight():
    """The probability of a pair of rows is that of drawing either row first and then the other."""
    weights = np.array([1.0, 2.0, 0.0, 3.0, 6.0])
    sampling = BlockWeightedSampling(weights, total_size=2, replace=False)
    pairs = list(itertools.combinations([0, 1, 3, 4], 2))
    found = collections.Counter(tuple(sorted(_order(sampling, 5, epoch=epoch).tolist())) for epoch in range(6000))
    chances = weights / weights.sum()
    expected = [chances[a] * chances[b] * (1 / (1 - chances[a]) + 1 / (1 - chances[b])) for a, b in pairs]
    assert set(found) <= set(pairs)
    assert _is_as_expected([found[pair] for pair in pairs], expected)


def test_without_replacement_the_chosen_rows_come_in_shuffled_blocks():
    order = _order(BlockWeightedSampling(np.ones(640), block_size=16, total_size=320, replace=False), 640)
    chosen = np.sort(order)
    blocks = order.reshape(-1, 16)
    np.testing.assert_array_equal(np.sort(blocks[:, 0]), chosen[::16])
    for block in blocks:
        begin = np.searchsorted(chosen, block[0])
        np.testing.assert_array_equal(block, chosen[begin : begin + 16])
    assert blocks[:, 0].tolist() != chosen[::16].tolist()


# ---- classes


def test_classes_are_drawn_alike_and_rows_of_a_class_too():
    codes = np.repeat([0, 1, -1, 2, 3], [500, 40, 30, 8, 100])
    codes = codes[np.random.Generator(np.random.PCG64(3)).permutation(len(codes))]
    sampling = ClassBalancedSampling("type", block_size=8, total_size=80_000)
    order = _order(sampling.bound(_typed(codes, list("abcd"))), len(codes))
    first = order[::8]  # first row of each slot
    assert _is_as_expected(np.bincount(codes[first], minlength=4), np.ones(4))
    for code in range(4):
        of_class = np.bincount(first[codes[first] == code], minlength=len(codes))
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
    assert sampling.n_rows(4) == 3
    assert set(_order(sampling, 4, epoch=1).tolist()) <= {0, 2, 3}


def test_classes_are_counted_among_the_indices_alone():
    labels = ["a"] * 10 + ["b"] * 10
    indices = [12, 0, 1, 2]
    order = _order(ClassBalancedSampling(labels, block_size=1, indices=indices, total_size=4000), 20)
    assert _is_as_expected(np.bincount(order, minlength=20)[[0, 1, 2, 12]], [1, 1, 1, 3])
    assert set(order.tolist()) == set(indices)


def test_weights_of_labels_are_those_of_their_rows():
    codes = [0, 1, 2, 1, -1, 0]
    by_label = BlockWeightedSampling({"a": 2.0, "c": 5}, column="type", block_size=2, total_size=40)
    by_row = BlockWeightedSampling([2.0, 0, 5, 0, 0, 2], block_size=2, total_size=40)
    np.testing.assert_array_equal(_order(by_label.bound(_typed(codes, list("abc"))), 6), _order(by_row, 6))


# ---- with indices, ranks, epochs, processes


@given(weights=WEIGHTS, block_size=BLOCK_SIZES, epoch=EPOCHS, replace=st.booleans(), chooser=st.randoms())
def test_indices_are_the_rows_that_take_part(weights, block_size, epoch, replace, chooser):
    indices = chooser.sample(range(len(weights)), chooser.randint(1, len(weights)))
    masked = np.where(np.isin(np.arange(len(weights)), indices), weights, 0)
    options = {"block_size": block_size, "replace": replace}
    if not masked.any():
        with pytest.raises(OptionError, match="no row"):
            BlockWeightedSampling(weights, indices=indices, **options)
        return
    order = _order(BlockWeightedSampling(weights, indices=indices, **options), len(weights), epoch=epoch)
    np.testing.assert_array_equal(order, _order(BlockWeightedSampling(masked, **options), len(weights), epoch=epoch))


@pytest.mark.parametrize("indices", [None, [0, 5, 3, 4]], ids=["all", "some"])
@pytest.mark.parametrize(
    "sampling",
    [
        lambda **options: BlockWeightedSampling({"a": 2.0}, column="type", **options),
        lambda **options: ClassBalancedSampling("type", **options),
    ],
    ids=["weighted", "balanced"],
)
def test_what_is_bound_to_a_column_still_names_its_indices(sampling, indices):
    known = sampling(indices=indices).bound(_typed([0, 1, 2, 1, -1, 0], list("abc"))).indices
    assert (known if indices is None else known.tolist()) == (indices and sorted(indices))


@given(weights=WEIGHTS, world_size=st.integers(1, 4), replace=st.booleans(), total=st.integers(20, 90))
def test_ranks_and_workers_share_out_the_draws(weights, world_size, replace, total):
    weights = [*weights, *[1.0] * 90]
    sampling = BlockWeightedSampling(weights, block_size=3, total_size=total, replace=replace)
    plan = Plan(dataset_rows=len(weights), sampling=sampling, batch_size=4, fetch_factor=2, world_size=world_size)
    dealt = []
    for rank, worker in itertools.product(range(world_size), range(2)):
        of_rank = dataclasses.replace(plan, rank=rank)
        dealt += [of_rank.fetch(number).rows for number in of_rank.fetch_numbers(worker=worker, n_workers=2)]
    order = _order(sampling, len(weights))
    np.testing.assert_array_equal(np.sort(np.concatenate(dealt)), np.sort(order))


@pytest.mark.parametrize("replace", [True, False])
def test_epochs_and_seeds_differ(replace):
    sampling = BlockWeightedSampling(np.arange(200), block_size=4, total_size=100, replace=replace)
    orders = {tuple(_order(sampling, 200, seed=seed, epoch=epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


@pytest.mark.parametrize("replace", [True, False])
def test_a_plan_of_draws_sweeps_only_where_no_row_comes_twice(replace):
    sampling = BlockWeightedSampling(np.ones(40), block_size=4, replace=replace)
    assert sampling.repeats is replace
    assert Plan(dataset_rows=40, sampling=sampling, batch_size=4, fetch_factor=2).sweeps is not replace


def test_a_pickled_sampling_draws_the_same():
    labels = ["a", "b", "b", "c"] * 20
    for sampling in (BlockWeightedSampling(np.arange(80.0), replace=False), ClassBalancedSampling(labels)):
        again = pickle.loads(pickle.dumps(sampling))
        np.testing.assert_array_equal(_order(again, 80, seed=3), _order(sampling, 80, seed=3))


def test_a_table_holds_a_few_bytes_a_block_and_a_fetch_little():
    weights = np.random.Generator(np.random.PCG64(4)).random(1_000_000).astype(np.float32)
    plan = {"dataset_rows": len(weights), "batch_size": 64, "fetch_factor": 256}
    Plan(sampling=BlockWeightedSampling(weights), **plan).fetch(0)  # compiles
    tracemalloc.start()
    try:
        sampling = BlockWeightedSampling(weights, block_size=64)
        assert tracemalloc.get_traced_memory()[0] < 18 * len(weights) / 64  # a float64 and an index per block
        tracemalloc.reset_peak()
        Plan(sampling=sampling, **plan).fetch(3)
        assert tracemalloc.get_traced_memory()[1] < 2_500_000
    finally:
        tracemalloc.stop()


# ---- invalid options

BAD = {
    "negative weight": (lambda: BlockWeightedSampling([1.0, -1.0]), "weight 1 is -1.0"),
    "too large": (lambda: BlockWeightedSampling([1e308] * 9), "add up to inf"),
    "too large together": (lambda: BlockWeightedSampling([1e308] * 9, block_size=1), "add up to inf"),
    "too small": (lambda: BlockWeightedSampling([5e-324]), "add up to 5e-324"),
    "nothing weighs": (lambda: BlockWeightedSampling([0.0, 0.0]), "no row"),
    "table": (lambda: BlockWeightedSampling([[1.0]]), "shape"),
    "mapping without column": (lambda: BlockWeightedSampling({"a": 1}), "column"),
    "column without mapping": (lambda: BlockWeightedSampling([1.0], column="type"), "mapping"),
    "more than there are": (
        lambda: BlockWeightedSampling([1.0, 1.0, 0.0], total_size=3, replace=False),
        "total_size 3.* 2 rows",
    ),
    "replace": (lambda: BlockWeightedSampling([1.0], replace=None), "replace"),
    "mask": (lambda: BlockWeightedSampling([1.0, 1.0], indices=[True, False]), "indices"),
    "index twice": (lambda: BlockWeightedSampling([1.0, 1.0], indices=[1, 1]), "row 1"),
    "index beyond the labels": (
        lambda: ClassBalancedSampling(["a", "b"], indices=[5]),
        "row 5.*of the dataset",
    ),
    "a negative weight of a label": (
        lambda: BlockWeightedSampling({"a": -1}, column="type").bound(_typed([0], ["a"])),
        "-1 for 'a'",
    ),
    "words as weights of labels": (
        lambda: BlockWeightedSampling({"a": "1"}, column="type").bound(_typed([0], ["a"])),
        "'1' for 'a'",
    ),
    "no column or labels": (lambda: ClassBalancedSampling(None), "labels must be .* not None"),
    "a table of labels": (lambda: ClassBalancedSampling([[1, 2]]), "labels must be"),
    "fractions as classes": (lambda: ClassBalancedSampling([0.5, 1.5]), "float64"),
    "fractions in a column": (
        lambda: ClassBalancedSampling("age").bound(_table(age=ObsColumn(values=np.array([0.5, 1.5])))),
        "'age' holds float64",
    ),
    "no labels": (lambda: ClassBalancedSampling([None, None]), "no row"),
    "unknown label": (
        lambda: BlockWeightedSampling({"d": 1}, column="type").bound(_typed([0], ["a"])),
        "'d'.*'type'.*'a'",
    ),
    "weights of numbers": (
        lambda: BlockWeightedSampling({1: 1}, column="n").bound(_table(n=ObsColumn(values=np.arange(3)))),
        "'n' holds numbers",
    ),
    "another dataset": (lambda: BlockWeightedSampling([1.0, 1.0]).n_rows(3), "2 rows.* 3"),
    "unbound": (lambda: ClassBalancedSampling("type").n_rows(3), "bound"),
    "unbound weights": (lambda: BlockWeightedSampling({"a": 1}, column="type").n_rows(3), "bound"),
}


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD.keys())
def test_options_that_make_no_sense_are_refused(make, message):
    with pytest.raises(OptionError, match=message):
        make()


def test_a_block_larger_than_a_fetch_is_refused_also_once_bound():
    sampling = ClassBalancedSampling("type", block_size=64).bound(_typed([0, 1] * 40, ["a", "b"]))
    with pytest.raises(OptionError, match="block_size 64"):
        Plan(dataset_rows=80, sampling=sampling, batch_size=8, fetch_factor=2)
