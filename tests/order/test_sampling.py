"""Every row comes once per epoch, in an order that is a pure function and never changes."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
from helpers import plan_of
from hypothesis import example, given
from hypothesis import strategies as st

from zloader.common.errors import OptionError
from zloader.dataset.views import RowSet
from zloader.order.permutation import key_of, permute, shuffled, strata_of
from zloader.order.plan import Plan
from zloader.order.sampling import Order
from zloader.order.shuffling import BlockShuffling, MixtureOfScanners, Streaming, stratified

pytestmark = pytest.mark.any_version

KEYS = st.integers(0, 2**64 - 1)
N_ROWS = st.integers(1, 700)
BLOCK_SIZES = st.integers(1, 90)
SEEDS = st.integers(0, 2**63)
EPOCHS = st.integers(0, 1000)


def _order(sampling, dataset_rows, *, table=None, seed=0, epoch=0, cuts=()):
    """The whole order of an epoch, computed in slices between `cuts`."""
    order = sampling.order(table or SimpleNamespace(n_obs=dataset_rows), 64, 16_384)
    bounds = [0, *sorted(cut % (order.n_rows + 1) for cut in cuts), order.n_rows]
    return np.concatenate([order.rows(*bound, seed=seed, epoch=epoch) for bound in itertools.pairwise(bounds)])


# ---- the keyed permutation

_WORD = 2**64 - 1


def _mix_by_hand(word):
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _WORD
    return word ^ (word >> 31)


def _permute_by_hand(index, n, key, which=0, size=None):
    """The same Feistel network and cycle walk for one index, with Python integers."""
    tweak = _mix_by_hand(which * 0x9E3779B97F4A7C15 & _WORD)
    half = next(bits for bits in itertools.count(1) if 4**bits >= n)
    while True:
        left, right = index >> half, index % 2**half
        for number in range(1, 9):
            round_key = _mix_by_hand(key + number * 0x9E3779B97F4A7C15 & _WORD)
            left, right = right, left ^ (_mix_by_hand(right ^ tweak ^ round_key) % 2**half)
        index = left << half | right
        if index < (n if size is None else size):
            return index


@given(n=st.integers(1, 2**40), key=KEYS, draw=st.data())
def test_permute_equals_the_same_in_plain_integers(n, key, draw):
    index = draw.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=8))
    by_hand = [_permute_by_hand(each, n, key) for each in index]
    assert permute(np.array(index, np.int64), n, key).tolist() == by_hand


@given(n=st.integers(1, 10**6), key=KEYS, which=st.lists(st.integers(0, 2**40), min_size=1, max_size=5), draw=st.data())
def test_permute_has_families(n, key, which, draw):
    """Each index has a permutation and a range of its own."""
    sizes = [draw.draw(st.integers(max(1, n // 8), n)) for _ in which]
    index = [draw.draw(st.integers(0, size - 1)) for size in sizes]
    by_hand = [_permute_by_hand(each, n, key, *of) for each, *of in zip(index, which, sizes, strict=True)]
    assert permute(np.array(index), n, key, which=np.array(which), sizes=np.array(sizes)).tolist() == by_hand


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 100])
def test_the_permutations_of_a_family_differ(size):
    index, which = np.tile(np.arange(size), 50), np.repeat(np.arange(50), size)
    sent = permute(index, 100, 9, which=which, sizes=np.full(50 * size, size)).reshape(50, size)
    np.testing.assert_array_equal(np.sort(sent, axis=1), np.tile(np.arange(size), (50, 1)))
    assert len(set(map(tuple, sent))) >= min(45, math.factorial(size))


@given(n=st.integers(1, 5000), key=KEYS)
def test_permute_is_a_bijection(n, key):
    sent = permute(np.arange(n), n, key)
    assert sent.dtype == np.int64
    np.testing.assert_array_equal(np.sort(sent), np.arange(n))


@pytest.mark.parametrize("n", sorted({max(1, 4**power + by) for power in range(8) for by in (-1, 0, 1)} | {2, 3}))
def test_permute_is_a_bijection_next_to_the_powers_of_four(n):
    np.testing.assert_array_equal(np.sort(permute(np.arange(n), n, 0xC0FFEE)), np.arange(n))


@given(n=st.integers(1, 10**12), key=KEYS, draw=st.data())
def test_permute_of_a_subset_is_that_part_of_the_whole(n, key, draw):
    index = np.array(draw.draw(st.lists(st.integers(0, n - 1), max_size=20, unique=True)), np.int64)
    sent = permute(index, n, key)
    assert len(set(sent.tolist())) == len(index)
    assert ((sent >= 0) & (sent < n)).all()
    one_by_one = [permute(index[i : i + 1], n, key)[0] for i in range(len(index))]
    np.testing.assert_array_equal(sent, np.array(one_by_one, np.int64))


def test_permute_leaves_its_argument_alone():
    index = np.arange(10)
    index.flags.writeable = False
    permute(index, 10, 1)
    np.testing.assert_array_equal(index, np.arange(10))


def test_permute_leaves_no_neighbours_together():
    """A random permutation keeps about two pairs of neighbours, for every n."""
    sent = permute(np.arange(100_000), 100_000, key_of(0, 0))
    assert (np.abs(np.diff(sent)) == 1).sum() < 15
    assert abs(np.corrcoef(sent, np.arange(100_000))[0, 1]) < 0.02


def test_key_of_tells_its_parts_apart():
    parts = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (2**63,), (2**64 - 1,)]
    assert len({key_of(*each) for each in parts}) == len(parts)
    assert len({key_of(seed, epoch) for seed in range(60) for epoch in range(60)}) == 3600


@given(n=st.integers(0, 3000), key=KEYS)
def test_shuffled_is_a_permutation(n, key):
    order = shuffled(n, key)
    assert order.dtype == np.int64
    np.testing.assert_array_equal(np.sort(order), np.arange(n))


@given(n=st.integers(0, 3000), key=KEYS)
@example(n=16_384, key=3)
@example(n=2**21 + 5, key=3)  # large enough that some words share their high bits
def test_shuffled_is_the_order_of_the_words(n, key):
    words = np.random.Philox(key=key).random_raw(n)
    np.testing.assert_array_equal(shuffled(n, key), np.argsort(words, kind="stable"))


# ---- golden values: a resumed run must get the same order with every later NumPy version


def test_golden_permute():
    assert permute(np.arange(10), 10, 42).tolist() == GOLDEN["permute"]
    assert permute(np.array([0, 1, 10**11]), 10**11 + 1, 2**64 - 1).tolist() == GOLDEN["permute_large"]


def test_golden_keys():
    assert [key_of(), key_of(0), key_of(0, 0), key_of(1, 2, 3), key_of(2**64 - 1)] == GOLDEN["keys"]


def test_golden_shuffled():
    assert shuffled(12, 0).tolist() == GOLDEN["shuffled"]
    assert shuffled(8, 2**64 - 1).tolist() == GOLDEN["shuffled_large_key"]


def test_golden_block_shuffling():
    blocks = BlockShuffling(block_size=4)
    assert _order(blocks, 22, seed=0, epoch=0).tolist() == GOLDEN["blocks_epoch_0"]
    assert _order(blocks, 22, seed=7, epoch=3).tolist() == GOLDEN["blocks_epoch_3"]
    some = BlockShuffling(block_size=2, indices=[9, 3, 5, 1, 7])
    assert _order(some, 10, seed=1, epoch=1).tolist() == GOLDEN["blocks_of_indices"]


GOLDEN = {
    "permute": [2, 9, 1, 5, 3, 7, 0, 4, 8, 6],
    "permute_large": [68093427801, 28694262308, 6247315809],
    "keys": [0, 3069472533636442495, 3024556869350070252, 6548580830893916435, 7521888212171461645],
    "shuffled": [0, 2, 11, 9, 1, 8, 5, 4, 3, 10, 6, 7],
    "shuffled_large_key": [0, 7, 4, 2, 6, 3, 1, 5],
    "blocks_epoch_0": [2, 3, 4, 5, 6, 7, 8, 9, 14, 15, 16, 17, 18, 19, 20, 21, 10, 11, 12, 13, 0, 1],
    "blocks_epoch_3": [18, 19, 20, 21, 4, 5, 6, 7, 14, 15, 16, 17, 10, 11, 12, 13, 0, 1, 2, 3, 8, 9],
    "blocks_of_indices": [5, 7, 1, 3, 9],
}


# ---- the samplings


N_STRATA = st.integers(1, 80)


@given(
    n_rows=N_ROWS,
    block_size=BLOCK_SIZES,
    n_strata=N_STRATA,
    seed=SEEDS,
    epoch=EPOCHS,
    cuts=st.lists(st.integers(0, 700), max_size=6),
)
@example(n_rows=1, block_size=90, n_strata=1, seed=0, epoch=0, cuts=[0, 1])
@example(n_rows=64, block_size=64, n_strata=64, seed=0, epoch=0, cuts=[])
@example(n_rows=65, block_size=64, n_strata=1, seed=0, epoch=0, cuts=[64])
@example(n_rows=700, block_size=1, n_strata=64, seed=0, epoch=0, cuts=[640, 699])  # 60 strata have one more turn
def test_block_shuffling_gives_every_row_once_however_it_is_sliced(n_rows, block_size, n_strata, seed, epoch, cuts):
    sampling = BlockShuffling(block_size=block_size, n_strata=n_strata)
    order = _order(sampling, n_rows, seed=seed, epoch=epoch, cuts=cuts)
    assert order.dtype == np.int64
    np.testing.assert_array_equal(np.sort(order), np.arange(n_rows))
    np.testing.assert_array_equal(order, _order(sampling, n_rows, seed=seed, epoch=epoch))


@given(n_rows=N_ROWS, shuffle=st.booleans(), seed=SEEDS, epoch=EPOCHS, cuts=st.lists(st.integers(0, 700), max_size=6))
def test_streaming_gives_every_row_in_order(n_rows, shuffle, seed, epoch, cuts):
    sampling = Streaming(shuffle=shuffle)
    order = _order(sampling, n_rows, seed=seed, epoch=epoch, cuts=cuts)
    np.testing.assert_array_equal(order, np.arange(n_rows))


@given(
    indices=st.lists(st.integers(0, 999), min_size=1, max_size=200, unique=True),
    block_size=BLOCK_SIZES,
    epoch=EPOCHS,
    cuts=st.lists(st.integers(0, 200), max_size=5),
)
def test_indices_are_the_rows_that_take_part(indices, block_size, epoch, cuts):
    blocks = _order(BlockShuffling(block_size=block_size, indices=indices), 1000, epoch=epoch, cuts=cuts)
    np.testing.assert_array_equal(np.sort(blocks), np.sort(indices))
    in_order = _order(Streaming(indices=np.array(indices)), 1000, epoch=epoch, cuts=cuts)
    np.testing.assert_array_equal(in_order, indices)


@given(n_rows=N_ROWS, block_size=BLOCK_SIZES, n_strata=N_STRATA, seed=SEEDS, epoch=EPOCHS)
def test_blocks_are_contiguous_and_the_short_one_comes_last(n_rows, block_size, n_strata, seed, epoch):
    order = _order(BlockShuffling(block_size=block_size, n_strata=n_strata), n_rows, seed=seed, epoch=epoch)
    blocks = [order[begin : begin + block_size] for begin in range(0, n_rows, block_size)]
    for block in blocks:
        np.testing.assert_array_equal(block, block[0] + np.arange(len(block)))
    assert [len(block) for block in blocks[:-1]] == [block_size] * (len(blocks) - 1)


@given(n_blocks=st.integers(1, 300), block_size=st.integers(1, 5), n_strata=N_STRATA, seed=SEEDS, epoch=EPOCHS)
def test_every_round_has_one_block_of_each_stratum(n_blocks, block_size, n_strata, seed, epoch):
    sampling = BlockShuffling(block_size=block_size, n_strata=n_strata)
    blocks = _order(sampling, n_blocks * block_size, seed=seed, epoch=epoch)[::block_size] // block_size
    n_strata = strata_of(n_blocks, n_strata)
    turned = key_of(key_of(seed, epoch), 4) % n_strata
    ends = [((number + 1) * n_blocks + turned) // n_strata for number in range(n_strata)]
    strata = np.searchsorted(ends, blocks, side="right").tolist()
    n_rounds, left = divmod(n_blocks, n_strata)
    for number in range(n_rounds):
        assert sorted(strata[number * n_strata : (number + 1) * n_strata]) == list(range(n_strata))
    assert len(set(strata[n_rounds * n_strata :])) == left


@pytest.mark.parametrize("n_strata", [16, 63, 64, 300])
@pytest.mark.parametrize("length", [4, 8, 16, 40, 100])
def test_blocks_in_sequence_come_evenly_from_all_rows(n_strata, length):
    """Wherever a fetch begins and however long it is, each quarter of the rows has its share of the blocks."""

    def deviation(n_strata):
        """The variance of the number of blocks from a quarter, over all runs of `length` blocks in 8 epochs."""
        orders = [_order(BlockShuffling(1, n_strata=n_strata), 2000, epoch=epoch) for epoch in range(8)]
        quarter = np.stack(orders)[:, :, None] // 500 == np.arange(4)
        counts = np.pad(np.cumsum(quarter, axis=1), ((0, 0), (1, 0), (0, 0)))
        return ((counts[:, length:] - counts[:, :-length] - length / 4) ** 2).mean()

    assert deviation(n_strata) < min(1.5, 0.6 * deviation(1))


@pytest.mark.parametrize(
    ("n_blocks", "n_strata", "expected"),
    [
        *((0, 256, 1), (1, 256, 1), (3, 256, 2), (78, 256, 64), (255, 256, 128), (256, 256, 256), (10**9, 256, 256)),
        *((8, 9, 8), (9, 9, 9), (10, 9, 9), (5, 1, 1), (0, 1, 1)),  # a number that is not too large is taken as it is
    ],
)
def test_the_number_of_strata_follows_the_number_of_blocks(n_blocks, n_strata, expected):
    assert strata_of(n_blocks, n_strata) == expected


@pytest.mark.slow
def test_which_blocks_come_last_changes_with_the_epoch():
    """With 65 blocks in 64 strata, any block may be the one left after the full round."""
    last = {int(_order(BlockShuffling(1, n_strata=64), 65, epoch=epoch)[-1]) for epoch in range(1000)}
    assert len(last) > 60


def test_one_stratum_is_the_order_of_blocks_alone():
    orders = [_order(BlockShuffling(3, n_strata=n_strata), 700, seed=5, epoch=2).tolist() for n_strata in (1, 2)]
    assert orders[0] == _order(BlockShuffling(3), 700, seed=5, epoch=2).tolist() != orders[1]


N_SCANNERS = st.integers(1, 40)


@given(
    n_rows=N_ROWS,
    n_scanners=N_SCANNERS,
    block_size=BLOCK_SIZES,
    seed=SEEDS,
    epoch=EPOCHS,
    cuts=st.lists(st.integers(0, 700), max_size=6),
)
@example(n_rows=1, n_scanners=40, block_size=90, seed=0, epoch=0, cuts=[0, 1])
@example(n_rows=64, n_scanners=8, block_size=4, seed=0, epoch=0, cuts=[32])  # nothing is left after full rounds
@example(n_rows=71, n_scanners=8, block_size=4, seed=0, epoch=0, cuts=[64, 65])  # seven scanners have one row left
def test_scanners_give_every_row_once_however_it_is_sliced(n_rows, n_scanners, block_size, seed, epoch, cuts):
    sampling = MixtureOfScanners(n_scanners=n_scanners, block_size=block_size)
    order = _order(sampling, n_rows, seed=seed, epoch=epoch, cuts=cuts)
    assert order.dtype == np.int64
    np.testing.assert_array_equal(np.sort(order), np.arange(n_rows))
    np.testing.assert_array_equal(order, _order(sampling, n_rows, seed=seed, epoch=epoch))


def _scan_by_hand(n_rows, n_scanners, block_size, starts, turns):
    """Simulates scanners block by block. They begin at `starts` and read in the order of `turns`."""
    ends = [*starts[1:], starts[0] + n_rows]
    at, read = list(starts), []
    for scanner in turns:
        stop = min(at[scanner] + block_size, ends[scanner])
        read += [row % n_rows for row in range(at[scanner], stop)]
        at[scanner] = stop
    assert at == ends
    return read


@given(n_rows=N_ROWS, n_scanners=N_SCANNERS, block_size=BLOCK_SIZES, seed=SEEDS, epoch=EPOCHS)
def test_scanners_read_on_where_they_were_and_each_takes_one_turn_a_round(n_rows, n_scanners, block_size, seed, epoch):
    """Infers starts and turns from the order, then checks the whole order against a simulation."""
    order = _order(MixtureOfScanners(n_scanners=n_scanners, block_size=block_size), n_rows, seed=seed, epoch=epoch)
    n_scanners = min(n_scanners, n_rows)
    length, extra = divmod(n_rows, n_scanners)
    if length < block_size:  # each scanner reads all its rows in one turn
        cuts = np.flatnonzero(np.diff(order) % n_rows != 1) + 1
        assert len(cuts) < n_scanners
        return
    begins = order[: n_scanners * block_size : block_size]
    gaps = np.diff(np.sort(begins), append=np.sort(begins)[0] + n_rows)
    assert sorted(gaps) == [length] * (n_scanners - extra) + [length + 1] * extra
    starts = np.sort(begins).tolist()
    stretch = (np.searchsorted(starts, order, side="right") - 1) % n_scanners
    in_rounds = length // block_size * n_scanners * block_size
    full = stretch[:in_rounds:block_size]
    assert all(sorted(turn) == list(range(n_scanners)) for turn in full.reshape(-1, n_scanners).tolist())
    ends = [scanner for scanner, _ in itertools.groupby(stretch[in_rounds:])]
    assert len(set(ends)) == len(ends)
    assert _scan_by_hand(n_rows, n_scanners, block_size, starts, [*full, *ends]) == order.tolist()


@pytest.mark.slow  # the golden orders notice any change
def test_scanners_begin_and_take_turns_everywhere_alike():
    """Chi-square over the start of the first turn, and over the turns of the second round. The seed is fixed."""
    n_epochs, n_scanners, n_rows = 4000, 5, 60
    first, turns = np.zeros(n_rows), np.zeros((n_scanners, n_scanners))
    for epoch in range(n_epochs):
        order = _order(MixtureOfScanners(n_scanners=n_scanners, block_size=4), n_rows, seed=3, epoch=epoch)
        first[order[0]] += 1
        turns[np.arange(n_scanners), np.argsort(order[20:40:4])] += 1
    for counts, freedom in ((first, n_rows - 1), (turns, (n_scanners - 1) ** 2)):
        expected = counts.sum() / counts.size
        assert 0.001 < scipy.stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), freedom) < 0.999


@given(indices=st.lists(st.integers(0, 999), min_size=1, max_size=200, unique=True), epoch=EPOCHS)
def test_scanners_of_indices_read_those_alone(indices, epoch):
    order = _order(MixtureOfScanners(n_scanners=3, block_size=5, indices=indices), 1000, epoch=epoch)
    np.testing.assert_array_equal(np.sort(order), np.sort(indices))
    whole = _order(MixtureOfScanners(n_scanners=3, block_size=5), len(indices), epoch=epoch)
    np.testing.assert_array_equal(order, np.sort(indices)[whole])


@pytest.mark.parametrize(
    ("active", "fetch_rows", "block_size"), [(4, 16_384, 4096), (16, 100, 6), (1, 64, 64), (16, 10, 1)]
)
def test_a_fetch_advances_as_many_scanners_as_are_active(active, fetch_rows, block_size):
    scanners = MixtureOfScanners(16, active)
    plan = plan_of(dataset_rows=1_000_003, sampling=scanners, batch_size=fetch_rows, fetch_factor=1)
    known = plan_of(
        dataset_rows=1_000_003,
        sampling=MixtureOfScanners(16, block_size=block_size),
        batch_size=fetch_rows,
        fetch_factor=1,
    )
    assert plan.order.block_size == block_size
    np.testing.assert_array_equal(plan.fetch(3).rows, known.fetch(3).rows)
    stretches = np.diff(plan.fetch(0).rows) != 1
    assert stretches.sum() + 1 == -(-fetch_rows // block_size)


def test_more_scanners_than_there_are_cannot_be_active():
    with pytest.raises(OptionError, match="active 17 is more than the 16 scanners"):
        MixtureOfScanners(16, 17)
    with pytest.raises(OptionError, match="active must be"):
        MixtureOfScanners(16, 0)


def test_scanners_are_elsewhere_in_other_epochs_and_seeds():
    scanners = MixtureOfScanners(n_scanners=4, block_size=8)
    orders = {tuple(_order(scanners, 400, seed=seed, epoch=epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


ALL_KINDS = {
    "streaming": Streaming(shuffle=True),
    "blocks of 1": BlockShuffling(block_size=1),
    "blocks of 64": BlockShuffling(block_size=64),
    "rows in strata": stratified(1),
    "blocks in strata": stratified(),
    "scanners": MixtureOfScanners(n_scanners=16, block_size=64),
    "scanners, 1": MixtureOfScanners(n_scanners=1000, block_size=1),
}


@pytest.mark.parametrize("sampling", ALL_KINDS.values(), ids=ALL_KINDS.keys())
def test_planning_a_fetch_of_100_million_rows_takes_little_memory(sampling):
    plan = plan_of(dataset_rows=100_000_000, sampling=sampling, batch_size=64, fetch_factor=256, seed=1, epoch=1)
    plan.fetch(0)  # compiles
    tracemalloc.start()
    try:
        rows = plan.fetch(plan.n_fetches // 2).rows
        assert len(np.unique(rows)) == len(rows) >= 16_384 - 64
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_a_view_and_the_rest_of_an_epoch_are_orders_like_the_one_that_they_are_of():
    rows = np.array([0, 1, 4, 5] * 25)
    whole = Order(
        dataset_rows=70,
        n_rows=50,
        draw=lambda start, stop, seed, epoch: rows[start:stop],
        block_size=4,
        shuffles_fetch=True,
        repeats=True,
        unit=2,
        set_size=2,
        chosen=lambda: np.isin(np.arange(70), rows),
    )
    view = RowSet.of(np.arange(100) >= 30).ordered(whole)
    rest = Plan(order=view, batch_size=4, fetch_factor=2).rest(3)
    for order, n_rows in ((view, 50), (rest, 38)):
        expected = replace(view, n_rows=n_rows, draw=order.draw, is_rest=order is rest)
        assert vars(order) == vars(expected)
        assert np.flatnonzero(order.chosen()).tolist() == [30, 31, 34, 35]
        plan = Plan(order=order, batch_size=4, fetch_factor=2)
        assert np.unique(plan.fetch(1).rows).tolist() == [30, 31, 34, 35]
        assert plan.fetch(0).sets[:4].tolist() == [0, 0, 1, 1]
    np.testing.assert_array_equal(rest.rows(4, 38, seed=0, epoch=0), rows[16:50] + 30)


@pytest.mark.parametrize(("indices", "repeats"), [(None, False), ([3, 1, 2], False), ([3, 1, 3], True)])
def test_streaming_says_whether_a_row_comes_twice(indices, repeats):
    assert Streaming(indices=indices).order(SimpleNamespace(n_obs=4), 2, 4).repeats is repeats


def test_the_short_block_is_another_in_other_epochs():
    short = [_order(BlockShuffling(block_size=10), 95, epoch=epoch)[-5:] for epoch in range(40)]
    begins = {int(block[0]) for block in short}
    assert begins <= set(range(0, 91, 10))
    assert len(begins) >= 8  # of ten possible
    assert len(set(np.concatenate(short).tolist())) > 40  # so no row is always among the last


@pytest.mark.parametrize("n_strata", [1, 8])
@given(seed=SEEDS, epoch=EPOCHS)
def test_epochs_and_seeds_differ(n_strata, seed, epoch):
    blocks = BlockShuffling(block_size=4, n_strata=n_strata)
    order = _order(blocks, 400, seed=seed, epoch=epoch).tolist()
    assert order != _order(blocks, 400, seed=seed, epoch=epoch + 1).tolist()
    assert order != _order(blocks, 400, seed=seed + 1, epoch=epoch).tolist()
    assert order != list(range(400))


def _alike(counts, freedom):
    """Chi-square test that counts with equal expectation differ neither too much nor too little."""
    expected = counts.sum() / counts.size
    return 0.001 < scipy.stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), freedom) < 0.999


@pytest.mark.slow  # the golden orders notice any change
@pytest.mark.parametrize("n_strata", [1, 2, 4])
def test_every_block_begins_everywhere_alike(n_strata):
    """Counts (block, position) for 8 blocks and a short block over 3 000 epochs. The seed is fixed."""
    n_blocks = 8
    counts = np.zeros((n_blocks, n_blocks), np.int64)
    for epoch in range(3000):
        order = _order(BlockShuffling(block_size=4, n_strata=n_strata), 4 * n_blocks + 1, seed=11, epoch=epoch)
        begins = order[: 4 * n_blocks : 4]
        counts[np.argsort(np.argsort(begins)), np.arange(n_blocks)] += 1
    assert _alike(counts, (n_blocks - 1) ** 2)


@pytest.mark.slow  # the golden orders notice any change
def test_blocks_of_two_strata_meet_alike():
    """Counts pairs of blocks in the same round, for 3 strata of 7 blocks over 3 000 epochs."""
    counts = np.zeros((3, 7, 7), np.int64)
    for epoch in range(3000):
        order = _order(BlockShuffling(block_size=1, n_strata=3), 21, seed=2, epoch=epoch)
        rounds = np.sort(order.reshape(7, 3), axis=1) % 7
        for number, (i, j) in enumerate(itertools.combinations(range(3), 2)):
            counts[number, rounds[:, i], rounds[:, j]] += 1
    assert all(_alike(of_pair, 36) for of_pair in counts)


def test_more_blocks_from_one_stratum_do_not_come_in_step():
    """The orders of the blocks in two strata are independent: one is not a shift of the other."""
    order = _order(BlockShuffling(block_size=1, n_strata=2), 200, seed=1).reshape(100, 2)
    rounds = np.sort(order, axis=1) - [0, 100]
    assert len(set(((rounds[:, 0] - rounds[:, 1]) % 100).tolist())) > 50


def test_indices_of_the_caller_are_neither_changed_nor_followed():
    indices = np.array([5, 2, 9])
    sampling = BlockShuffling(block_size=1, indices=indices)
    before = _order(sampling, 10).tolist()
    assert indices.tolist() == [5, 2, 9]
    indices[:] = 0
    assert _order(sampling, 10).tolist() == before


# ---- invalid options


BAD_INDICES = [
    [],
    np.empty(0, np.int64),
    np.array([True, False]),
    [True, False],
    [0.5, 1.0],
    ["a", "b"],
    [[1, 2], [3, 4]],
    3,
]


@pytest.mark.parametrize("kind", [Streaming, BlockShuffling, MixtureOfScanners])
def test_indices_that_are_no_rows_of_the_dataset_are_refused(kind):
    for indices in BAD_INDICES:
        with pytest.raises(OptionError, match="indices"):
            kind(indices=indices)
    for indices, bad in (([0, 10], 10), ([-1, 3], -1), ([2**40], 2**40)):
        with pytest.raises(OptionError, match=rf"row {bad}\b"):
            _order(kind(indices=indices), 10)
    if kind is not Streaming:
        with pytest.raises(OptionError, match=r"row 7\b"):
            kind(indices=[3, 7, 1, 7])
