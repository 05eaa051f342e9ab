"""The gates of an epoch: bounds hold at every moment, and nobody waits who could go ahead."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest
from helpers import PATIENCE_S, fetch_options
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zloader.common.options import FetchOptions
from zloader.reading.bridge import Bridge
from zloader.reading.gates import Ahead, ByteBudget, GroupSizes

pytestmark = pytest.mark.any_version


class _Budget:
    """A ByteBudget that records which requests were made, granted and are held."""

    def __init__(self, limit):
        self.limit = limit
        self.budget = ByteBudget(limit)
        self.sizes = []
        self.tasks = []
        self.granted = []
        self.holding = set()

    async def _hold(self, number, n_bytes):
        await self.budget.acquire(n_bytes)
        self.granted.append(number)
        self.holding.add(number)

    def ask(self, n_bytes):
        self.tasks.append(asyncio.ensure_future(self._hold(len(self.tasks), n_bytes)))
        self.sizes.append(n_bytes)

    def release(self, place):
        if self.holding:
            number = sorted(self.holding)[place % len(self.holding)]
            self.holding.remove(number)
            self.budget.release(self.sizes[number])

    def cancel(self, place):
        if self.waiting():
            self.tasks[self.waiting()[place % len(self.waiting())]].cancel()

    def waiting(self):
        return [number for number, task in enumerate(self.tasks) if not task.done()]

    def held(self):
        return [self.sizes[number] for number in self.holding]

    async def settle(self):
        for _ in range(4 + 2 * len(self.tasks)):
            await asyncio.sleep(0)


OPERATIONS = st.lists(
    st.tuples(st.just("ask"), st.integers(0, 14))
    | st.tuples(st.sampled_from(["release", "cancel", "release and cancel"]), st.integers(0, 9)),
    max_size=30,
)


async def _after_each(budget, operations, check):
    for operation, number in operations:
        if operation == "ask":
            budget.ask(number)
        if operation.startswith("release"):
            budget.release(number)
        if operation.endswith("cancel"):  # perhaps of a request that has just been granted
            budget.cancel(number)
        await budget.settle()
        check()
    while budget.holding:
        budget.release(0)
        await budget.settle()
        check()
    assert budget.waiting() == []


@given(turns=st.lists(st.integers(0, 3), max_size=8))
def test_a_budget_serves_the_smallest_turn_first_and_within_it_who_came_first(turns):
    async def run():
        budget, granted = ByteBudget(10), []

        async def ask(number, turn):
            await budget.acquire(10, turn)
            granted.append(number)

        await budget.acquire(10)
        asked = [asyncio.ensure_future(ask(number, turn)) for number, turn in enumerate(turns)]
        for _ in range(len(asked) + 1):
            await asyncio.sleep(0)
            budget.release(10)
            await asyncio.sleep(0)
        await asyncio.gather(*asked)
        assert granted == sorted(range(len(turns)), key=lambda number: turns[number])

    asyncio.run(run())


@given(operations=OPERATIONS)
@example(operations=[("ask", 6), ("ask", 8), ("ask", 2), ("cancel", 0)])
def test_a_budget_is_never_exceeded_but_by_one_alone_and_nobody_waits_who_could_go_ahead(operations):
    """Requests are granted in the order asked for, also those behind one that was cancelled."""

    async def run():
        budget = _Budget(10)

        def check():
            sizes, waiting = [size for size in budget.held() if size], budget.waiting()
            assert sum(sizes) <= 10 or len(sizes) == 1
            assert budget.granted == sorted(budget.granted)
            if waiting:
                assert not budget.granted or budget.granted[-1] < waiting[0]
                assert sum(sizes) + budget.sizes[waiting[0]] > 10
                assert sum(sizes) > 0

        await _after_each(budget, operations, check)
        budget.ask(10)  # cancelled requests leave nothing behind
        await budget.settle()
        assert budget.waiting() == []

    asyncio.run(run())


async def _passes(ahead):
    """How many more fetches may begin now."""
    passed = 0
    while not ahead.locked():
        await ahead.acquire()
        passed += 1
    return passed


@pytest.mark.parametrize(
    ("waited_s", "busy_s", "reads"),
    [(9.0, 1.0, True), (9.0, 9.9, True), (9.0, 10.1, False), (5.1, 0.0, True), (4.9, 0.0, False), (0.0, 0.0, False)],
    ids=["reads", "half busy", "busy", "waits mostly", "waits little", "waits never"],
)
def test_an_epoch_waits_for_reads_if_it_waits_while_threads_are_idle(waited_s, busy_s, reads):
    async def run():
        ahead = Ahead(FetchOptions(threads=2))
        assert await _passes(ahead) == 2
        ahead.loaded(began_s=0.0, now_s=100.0, busy_s=7.0)
        assert await _passes(ahead) == 0  # the first load is not judged
        ahead.loaded(began_s=110.0 - waited_s, now_s=110.0, busy_s=7.0 + busy_s)
        assert await _passes(ahead) == reads

    asyncio.run(run())


@pytest.mark.parametrize("prefetch", [1, 2, 6])
def test_two_fetches_go_ahead_and_one_more_after_each_wait_for_reads(prefetch):
    async def run():
        ahead = Ahead(fetch_options(prefetch=prefetch, threads=1))
        assert await _passes(ahead) == 2
        for load in range(10):  # each waited for all of the time
            ahead.loaded(began_s=float(load), now_s=load + 1.0, busy_s=0.0)
        assert await _passes(ahead) == prefetch - 1
        ahead.release()
        assert await _passes(ahead) == 1

    asyncio.run(run())


# ---- groups of minibatches

MiB = 1 << 20
READY = 48 * MiB


def _sizes(*, grows=False, threads=60):
    return GroupSizes(fetch_options(ready_bytes=READY, threads=threads), grows=grows)


LEAST = READY // 63  # with 60 threads


def test_groups_claim_as_many_bytes_as_the_most_has_grown():
    assert _sizes().claim(MiB) == _sizes().made(MiB, MiB) == MiB
    assert _sizes().claim(READY + 1) == READY
    sizes = _sizes(grows=True)
    assert sizes.claim(1) == READY  # nobody knows how they grow, so one is made at a time
    for n_bytes in (2 * MiB, 3 * MiB, MiB):
        assert sizes.made(MiB, n_bytes) == n_bytes
    assert sizes.claim(MiB) == 3 * MiB
    shrinking = _sizes(grows=True)
    shrinking.made(MiB, 1)
    assert shrinking.claim(MiB) == MiB


def test_there_are_no_more_groups_than_keep_the_threads_busy():
    """Beside those of the threads, three wait for the consumer, however small they are."""
    assert _sizes().claim(0) == _sizes().made(0, 0) == LEAST
    assert _sizes(threads=2).claim(MiB) == _sizes(threads=2).made(MiB, MiB) == READY // 5
    assert _sizes(threads=2).claim(READY // 2) == READY // 2
    tiny = GroupSizes(fetch_options(ready_bytes=1), grows=False)
    assert tiny.claim(0) == tiny.claim(9) == tiny.made(0, 0) == 1


@pytest.mark.parametrize(("mib", "size"), [(0, 8), (0.1, 8), (1, 3), (2, 1), (100, 1)])
def test_groups_are_small_beside_the_memory_of_minibatches(mib, size):
    cuts = np.arange(0, 101, 5)
    groups = list(_sizes().groups(cuts, lambda cuts: int(mib * MiB) * (len(cuts) - 1)))
    assert np.diff([group[0] for group in groups]).tolist() == [5 * size] * (len(groups) - 1)
    assert np.unique(np.concatenate(groups)).tolist() == cuts.tolist()
    assert all(group[-1] == after[0] for group, after in itertools.pairwise(groups))


# ---- the gates together


@settings(deadline=None)
@given(
    fetches=st.lists(st.tuples(st.integers(0, 9 * READY), st.lists(st.integers(1, 4 * READY), max_size=4)), max_size=8),
    growth=st.sampled_from([1, 7]),
)
def test_fetches_and_groups_of_any_size_come_through(fetches, growth):
    """However large they are, the consumer gets all groups, no bound is exceeded but by one alone, and in the end
    nothing is held."""
    ahead_of, room, sizes = [], ByteBudget(3 * READY), _sizes(grows=growth > 1)
    held, most_held = {}, [0]

    async def produce(put):
        ahead = Ahead(FetchOptions(threads=1))
        ahead_of.append(ahead)
        loads, jobs = asyncio.Queue(), asyncio.Queue()

        async def load():
            for n_bytes, groups in fetches:
                await ahead.acquire()
                await room.acquire(n_bytes)
                loads.put_nowait((n_bytes, groups))

        async def gather():
            number = itertools.count()
            for _ in fetches:
                n_bytes, groups = await loads.get()
                for x_bytes in groups:
                    claim = sizes.claim(x_bytes)
                    await put.claim(claim)
                    jobs.put_nowait((next(number), x_bytes, claim))
                jobs.put_nowait(n_bytes)

        async def finish():
            left = len(fetches)
            while left:
                job = await jobs.get()
                if isinstance(job, int):
                    room.release(job)
                    ahead.release()
                    left -= 1
                    continue
                number, x_bytes, claim = job
                held[number] = sizes.made(x_bytes, growth * x_bytes)
                put.claimed([(number, x_bytes)], held[number], claim)
                budget = put._budget
                most_held[0] = max(most_held[0], budget._held)

        await asyncio.wait_for(asyncio.gather(load(), gather(), finish()), PATIENCE_S)

    bridge = Bridge(produce, ready_bytes=READY, name="gates")
    wanted = [x_bytes for _, groups in fetches for x_bytes in groups]
    assert list(bridge) == list(enumerate(wanted))
    assert room._held == 0
    # A group claims what the most has grown so far, so only one that grows more than any before exceeds the bound.
    assert most_held[0] <= READY + max(held.values(), default=0)
    for ahead in ahead_of:
        assert ahead._value == 2


def test_what_is_claimed_is_held_until_the_consumer_takes_it():
    """No more is made than fits, whatever it turned out to take."""
    made = []

    async def produce(put):
        for number in range(20):
            await put.claim(4)
            made.append(number)
            put.claimed([number], 2, 4)

    bridge = Bridge(produce, ready_bytes=10, name="claims")
    for number in range(20):
        assert next(bridge) == number
        assert len(made) <= number + 1 + 5  # of 2 bytes each, and the first was given back
    assert made == list(range(20))
    assert list(bridge) == []
