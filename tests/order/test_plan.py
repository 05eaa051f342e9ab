"""Every row comes once per epoch over all ranks and workers, and all ranks get the same number of minibatches."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
from helpers import plan_of
from hypothesis import assume, example, given
from hypothesis import strategies as st

from zloader.common.errors import OptionError
from zloader.order.plan import Plan
from zloader.order.sampling import Order
from zloader.order.shuffling import BlockShuffling, MixtureOfScanners, Streaming, stratified

pytestmark = pytest.mark.any_version


@st.composite
def plans(draw, drop_last=None, sampling=None):
    """Plans of rank 0, from less than one minibatch per rank to several rounds of fetches."""
    batch_size = draw(st.integers(1, 8))
    fetch_factor = draw(st.integers(1, 5))
    world_size = draw(st.integers(1, 5))
    block_size = draw(st.integers(1, batch_size * fetch_factor))
    scanners = MixtureOfScanners(n_scanners=draw(st.integers(1, 9)), block_size=block_size)
    strata = BlockShuffling(block_size=block_size, n_strata=draw(st.integers(1, 9)))
    samplings = [BlockShuffling(block_size=block_size), strata, scanners, Streaming(), Streaming(shuffle=True)]
    return plan_of(
        dataset_rows=draw(st.integers(world_size, 400)),
        sampling=draw(st.sampled_from(samplings)) if sampling is None else sampling,
        batch_size=batch_size,
        fetch_factor=fetch_factor,
        seed=draw(st.integers(0, 2**63)),
        epoch=draw(st.integers(0, 10_000)),
        world_size=world_size,
        drop_last=draw(st.booleans()) if drop_last is None else drop_last,
    )


def _ranks(plan):
    return [dataclasses.replace(plan, rank=rank) for rank in range(plan.world_size)]


def _minibatches(plan, *, worker=0, n_workers=1):
    """The rows of every minibatch of one worker, in order."""
    made = []
    for number in plan.fetch_numbers(worker=worker, n_workers=n_workers):
        fetch = plan.fetch(number)
        assert fetch.number == number
        assert fetch.cuts[0] == 0
        assert fetch.cuts[-1] == len(fetch.rows) == len(fetch.order)
        rows = fetch.rows[fetch.order]
        made += [rows[begin:end] for begin, end in itertools.pairwise(fetch.cuts.tolist())]
    return made


def _all_rows(plan, *, n_workers=1):
    made = [
        _minibatches(rank, worker=worker, n_workers=n_workers) for rank in _ranks(plan) for worker in range(n_workers)
    ]
    return np.concatenate([np.empty(0, np.int64), *itertools.chain(*made)])


def _listed(plan):
    return [rows.tolist() for rows in _minibatches(plan)]


@given(plan=plans(drop_last=False), n_workers=st.integers(1, 4))
def test_every_row_comes_exactly_once_over_ranks_and_workers(plan, n_workers):
    rows = np.sort(_all_rows(plan, n_workers=n_workers))
    if plan.batch_size == 1:  # minibatches of one row cannot be divided evenly, so a few are left out
        assert len(np.unique(rows)) == len(rows)
        assert set(rows.tolist()) <= set(range(plan.order.dataset_rows))
        assert plan.order.dataset_rows - len(rows) < plan.world_size
    else:
        np.testing.assert_array_equal(rows, np.arange(plan.order.dataset_rows))


@pytest.mark.slow
@given(plan=plans(drop_last=True), n_workers=st.integers(1, 4))
def test_drop_last_leaves_out_less_than_one_minibatch_a_rank(plan, n_workers):
    rows = _all_rows(plan, n_workers=n_workers)
    assert len(np.unique(rows)) == len(rows)
    assert set(rows.tolist()) <= set(range(plan.order.dataset_rows))
    assert plan.order.dataset_rows - len(rows) < plan.world_size * plan.batch_size
    sizes = {len(minibatch) for rank in _ranks(plan) for minibatch in _minibatches(rank)}
    assert sizes <= {plan.batch_size}


@given(plan=plans(), n_workers=st.integers(1, 4))
@example(
    plan=plan_of(dataset_rows=9, sampling=Streaming(), batch_size=2, fetch_factor=2, world_size=2), n_workers=1
)  # one row is left for two ranks
@example(plan=plan_of(dataset_rows=5, sampling=Streaming(), batch_size=4, fetch_factor=2, world_size=1), n_workers=2)
def test_ranks_agree_on_the_number_of_minibatches_and_say_it(plan, n_workers):
    for rank in _ranks(plan):
        made = [_minibatches(rank, worker=worker, n_workers=n_workers) for worker in range(n_workers)]
        assert sum(map(len, made)) == plan.n_minibatches == rank.n_minibatches
    if plan.n_rows >= plan.world_size * plan.batch_size:
        assert plan.n_minibatches > 0


@pytest.mark.slow
@given(plan=plans())
def test_minibatches_are_full_but_for_the_last_two_of_a_rank(plan):
    for rank in _ranks(plan):
        sizes = [len(rows) for rows in _minibatches(rank)]
        assert all(1 <= size <= plan.batch_size for size in sizes)
        assert all(size == plan.batch_size for size in sizes[:-2])
        if len(sizes) > 1 and sizes[-2] != plan.batch_size:
            # Another rank has one row and one minibatch more, so this rank's last minibatch is cut in two.
            assert sizes[-2:] == [plan.batch_size - 1, 1]


@pytest.mark.slow
@given(plan=plans(drop_last=False))
def test_ranks_are_given_equally_many_rows_but_for_one(plan):
    given_rows = [sum(map(len, _minibatches(rank))) for rank in _ranks(plan)]
    assert max(given_rows) - min(given_rows) <= (0 if plan.batch_size == 1 else 1)


@given(plan=plans())
def test_one_rank_yields_full_minibatches_and_one_rest(plan):
    alone = dataclasses.replace(plan, world_size=1)
    sizes = [len(rows) for rows in _minibatches(alone)]
    n_full, rest = divmod(plan.order.dataset_rows, plan.batch_size)
    assert sizes == [plan.batch_size] * n_full + ([rest] if rest and not plan.drop_last else [])


@given(plan=plans(), n_workers=st.integers(1, 4))
def test_workers_share_out_the_fetches_of_their_rank(plan, n_workers):
    dealt = [list(plan.fetch_numbers(worker=worker, n_workers=n_workers)) for worker in range(n_workers)]
    assert sorted(itertools.chain(*dealt)) == list(range(plan.n_fetches))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    turns = [numbers for turn in itertools.zip_longest(*dealt) for numbers in turn if numbers is not None]
    assert turns == list(range(plan.n_fetches))  # in turn, the workers give the order of the rank


@given(plan=plans(sampling=Streaming()))
def test_streaming_reads_in_order_and_deals_fetches_in_turn(plan):
    alone = dataclasses.replace(plan, world_size=1, drop_last=False)
    np.testing.assert_array_equal(np.concatenate(_minibatches(alone)), np.arange(plan.order.dataset_rows))
    fetches = [rank.fetch(number).rows for number in range(plan.n_fetches) for rank in _ranks(plan)]
    dealt = np.concatenate([np.empty(0, np.int64), *fetches])
    np.testing.assert_array_equal(dealt, np.arange(len(dealt)))


@pytest.mark.slow
@given(plan=plans())
@example(plan=plan_of(dataset_rows=200_000, sampling=BlockShuffling(64), batch_size=64, fetch_factor=256))
@example(plan=plan_of(dataset_rows=801, sampling=BlockShuffling(16), batch_size=4, fetch_factor=8, world_size=5))
@example(plan=plan_of(dataset_rows=41, sampling=BlockShuffling(1), batch_size=4, fetch_factor=1, world_size=5))
def test_fetches_are_equally_long_to_a_minibatch_or_a_block(plan):
    """So the last fetch is not left with a few blocks."""
    block_size = plan.order.block_size
    step = math.lcm(block_size, plan.batch_size) // plan.batch_size if plan.fetch_rows % block_size == 0 else 1
    left = plan.n_rows % (plan.world_size * plan.batch_size)
    # Fewer rows than ranks come in addition, because they are no minibatch for every rank.
    more = int(plan.batch_size > 1 and not plan.drop_last and 0 < left < plan.world_size < plan.n_rows)
    for rank in _ranks(plan):
        fetches = [rank.fetch(number) for number in range(rank.n_fetches)]
        sizes = [len(fetch.cuts) - 1 for fetch in fetches]
        assert len(sizes) == -(-(plan.n_minibatches - more) // plan.fetch_factor)
        assert not any(size % step for size in sizes[:-1])
        assert max(sizes, default=0) - min(sizes, default=0) <= 2 * step - 1 + more
        assert all(len(fetch.rows) <= plan.fetch_rows + more for fetch in fetches)


@pytest.mark.slow
@given(plan=plans())
def test_fetches_hold_whole_blocks(plan):
    """A fetch reads consecutive positions of the order of the sampling."""
    order = plan.order.rows(0, plan.n_rows, seed=plan.seed, epoch=plan.epoch)
    place = np.argsort(order)
    for rank in _ranks(plan):
        for number in range(rank.n_fetches):
            positions = place[rank.fetch(number).rows]
            np.testing.assert_array_equal(positions, positions[0] + np.arange(len(positions)))
            np.testing.assert_array_equal(np.sort(rank.fetch(number).order), np.arange(len(positions)))


@pytest.mark.slow
@given(plan=plans())
def test_the_same_options_give_the_same_plan_and_fetches_come_in_any_order(plan):
    again = dataclasses.replace(plan)
    backwards = [again.fetch(number) for number in reversed(range(again.n_fetches))][::-1]
    for number, fetch in enumerate(backwards):
        np.testing.assert_array_equal(fetch.rows, plan.fetch(number).rows)
        np.testing.assert_array_equal(fetch.order, plan.fetch(number).order)
        np.testing.assert_array_equal(fetch.cuts, plan.fetch(number).cuts)


@pytest.mark.slow
@given(plan=plans())
def test_other_epochs_and_seeds_give_another_order(plan):
    assume(plan.order.shuffles_fetch)
    draw = functools.partial(plan.order.draw.func, *plan.order.draw.args[:-1], 400)
    order = dataclasses.replace(plan.order, dataset_rows=400, n_rows=400, draw=draw)
    plan = dataclasses.replace(plan, order=order, batch_size=8, fetch_factor=5, world_size=1)
    listed = _listed(plan)
    assert listed != _listed(dataclasses.replace(plan, epoch=plan.epoch + 1))
    assert listed != _listed(dataclasses.replace(plan, seed=plan.seed + 1))


def test_the_rows_of_a_fetch_are_permuted_differently_in_each_fetch():
    plan = plan_of(dataset_rows=320, sampling=Streaming(shuffle=True), batch_size=8, fetch_factor=4, world_size=2)
    orders = [rank.fetch(number).order.tolist() for rank in _ranks(plan) for number in range(5)]
    assert len(set(map(tuple, orders))) == 10


def test_what_is_left_out_for_equal_counts_changes_with_the_epoch():
    plan = plan_of(
        dataset_rows=103,
        sampling=BlockShuffling(block_size=4),
        batch_size=8,
        fetch_factor=2,
        world_size=3,
        drop_last=True,
    )
    left_out = [
        frozenset(range(103)) - set(_all_rows(dataclasses.replace(plan, epoch=epoch)).tolist()) for epoch in range(30)
    ]
    assert {len(rows) for rows in left_out} == {7}  # 103 rows = 4 minibatches per rank x 3 ranks x 8 rows + 7
    assert len(set(left_out)) > 15
    assert len(frozenset.union(*left_out)) > 60


@given(
    indices=st.lists(st.integers(0, 999), min_size=4, max_size=150, unique=True),
    world_size=st.integers(1, 4),
    n_workers=st.integers(1, 3),
)
def test_a_subset_is_shared_out_like_a_whole(indices, world_size, n_workers):
    plan = plan_of(
        dataset_rows=1000,
        sampling=BlockShuffling(block_size=3, indices=indices),
        batch_size=4,
        fetch_factor=2,
        world_size=world_size,
    )
    np.testing.assert_array_equal(np.sort(_all_rows(plan, n_workers=n_workers)), np.sort(indices))


@pytest.mark.parametrize(
    ("sampling", "sweeps"),
    [
        (Streaming(), True),
        (BlockShuffling(block_size=2), True),
        (MixtureOfScanners(block_size=2), True),
        (Streaming(indices=range(20)), True),
        (Streaming(indices=range(19)), False),
        (Streaming(indices=[0] * 20), False),
    ],
)
def test_a_plan_sweeps_that_takes_every_row(sampling, sweeps):
    plan = plan_of(dataset_rows=20, sampling=sampling, batch_size=2, fetch_factor=2)
    assert plan.sweeps is sweeps
    assert not dataclasses.replace(plan, world_size=2).sweeps


def test_golden_minibatches():
    """A resumed run must get the same minibatches with every later NumPy version."""
    plan = plan_of(
        dataset_rows=41,
        sampling=BlockShuffling(block_size=2, n_strata=5),
        batch_size=3,
        fetch_factor=3,
        seed=7,
        epoch=2,
        world_size=2,
    )
    assert [_listed(rank) for rank in _ranks(plan)] == GOLDEN


GOLDEN = [
    [[27, 21, 38], [37, 20, 26], [28, 5, 4], [23, 22, 29], [0, 1, 2], [25, 24, 35], [19, 18, 36]],
    [[9, 7, 14], [6, 8, 15], [31, 39, 32], [13, 40, 12], [33, 30, 10], [11, 3, 34], [16, 17]],
]


def test_the_last_fetch_holds_the_labels_that_all_rows_have():
    """With 200 000 rows sorted by 56 labels, the 53 blocks left after full fetches would not hold all labels."""
    plan = plan_of(dataset_rows=200_000, sampling=stratified(), batch_size=64, fetch_factor=256)
    assert {len(plan.fetch(number).rows) // 64 for number in range(plan.n_fetches)} == {240, 241}
    labels = plan.fetch(plan.n_fetches - 1).rows * 56 // 200_000
    assert len(set(labels.tolist())) == 56


def test_a_plan_of_a_million_million_rows_costs_what_one_fetch_costs():
    plan = plan_of(dataset_rows=10**12 + 5, sampling=BlockShuffling(block_size=64), batch_size=64, fetch_factor=4)
    assert plan.n_minibatches == 10**12 // 64 + 1
    fetch = plan.fetch(plan.n_fetches - 1)
    assert len(fetch.rows) == 3 * 64 + 5
    assert fetch.rows.max() < 10**12 + 5


# ---- invalid options


GOOD = {
    "dataset_rows": 100,
    "sampling": BlockShuffling(block_size=8),
    "batch_size": 8,
    "fetch_factor": 2,
    "seed": 0,
    "epoch": 0,
    "rank": 0,
    "world_size": 1,
}
BAD = {
    "no batch": ({"batch_size": 0}, "batch_size"),
    "rank beyond the world": ({"rank": 2, "world_size": 2}, "rank 2"),
    "block larger than a fetch": ({"sampling": BlockShuffling(block_size=17)}, "block_size 17.*16 rows"),
    "no rows": ({"dataset_rows": 0}, "0 rows"),
    "fewer rows than ranks": ({"dataset_rows": 3, "world_size": 4}, "3 rows.*4 ranks"),
    "row beyond the dataset": ({"sampling": Streaming(indices=[100])}, "row 100"),
}


@pytest.mark.parametrize(("wrong", "message"), BAD.values(), ids=BAD.keys())
def test_options_that_make_no_sense_are_refused(wrong, message):
    plan_of(**GOOD)
    with pytest.raises(OptionError, match=message):
        plan_of(**(GOOD | wrong))


@pytest.mark.parametrize("kind", [np.int64, np.uint16])
def test_numpy_integers_are_numbers_too(kind):
    plain = plan_of(**GOOD)
    numbers = {name: kind(value) for name, value in GOOD.items() if isinstance(value, int)}
    numpy = plan_of(**(GOOD | numbers | {"sampling": BlockShuffling(block_size=kind(8))}))
    assert _listed(numpy) == _listed(plain)
    for name, value in numbers.items():
        assert _listed(plan_of(**(GOOD | {name: value}))) == _listed(plain)
    assert _listed(plan_of(**(GOOD | {"sampling": BlockShuffling(block_size=kind(8))}))) == _listed(plain)


def test_a_block_as_large_as_a_fetch_is_allowed():
    plan = plan_of(**(GOOD | {"sampling": BlockShuffling(block_size=16)}))
    np.testing.assert_array_equal(np.sort(_all_rows(plan)), np.arange(100))


def written(rows, **options) -> Plan:
    """A plan of four rows in an order that somebody has written."""
    order = Order(dataset_rows=4, n_rows=4, draw=lambda start, stop, seed, epoch: rows, **options)
    return Plan(order=order, batch_size=2, fetch_factor=2)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.arange(4) - 1, "from 0 to 3, but gave -1"),
        (np.arange(4) + 1, "from 0 to 3, but gave 4"),
        (np.arange(3), "must give 4 row numbers for positions 0 to 4, not 3"),
        (np.arange(4.0), "1-d array of integers"),
        ([0, 1, 2, 3], "1-d array of integers"),
        (np.zeros((4, 1), np.int64), "1-d array of integers"),
    ],
)
def test_rows_that_are_none_are_refused(rows, message):
    with pytest.raises(OptionError, match=message):
        written(rows).fetch(0)


@pytest.mark.parametrize("dtype", [np.int8, np.uint64])
def test_rows_may_be_integers_of_any_dtype(dtype):
    assert written(np.arange(4, dtype=dtype)).fetch(0).rows.dtype == np.int64


@pytest.mark.parametrize("name", ["block_size", "n_rows"])
@pytest.mark.parametrize("value", [-1, 2.5, "8", None])
def test_sizes_of_an_order_are_whole_numbers(name, value):
    with pytest.raises(OptionError, match=f"{name} must be .* not {value!r}"):
        Order(**({"dataset_rows": 4, "n_rows": 4, "draw": np.arange} | {name: value}))


@given(plan=plans(), n_workers=st.integers(1, 3), data=st.data())
def test_a_worker_that_skips_goes_on_behind_what_it_skipped(plan, n_workers, data):
    """However many fetches it skips."""
    worker = data.draw(st.integers(0, n_workers - 1))
    done = data.draw(st.integers(0, plan.n_minibatches))

    def minibatches(skip):
        left = plan.remaining(done=done, worker=worker, n_workers=n_workers, skip=skip)
        return [(each.number, each.begin + number) for each in left for number in range(each.size)]

    whole = minibatches(0)
    skip = data.draw(st.integers(0, len(whole) + 1))
    assert minibatches(skip) == whole[skip:]
