"""The gates of an epoch: bounds hold at every moment, and nobody waits who could go ahead."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest
from helpers import PATIENCE_S
from hypothesis import example, given
from hypothesis import strategies as st

from zloader.common.options import FetchOptions
from zloader.reading.back_pressure import ByteBudget, Gates, Waits

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
def test_a_budget_is_never_exceeded_but_by_one_alone(operations):
    async def run():
        budget = _Budget(10)

        def check():
            sizes = [size for size in budget.held() if size]
            assert sum(sizes) <= 10 or len(sizes) == 1

        await _after_each(budget, operations, check)
        budget.ask(10)  # cancelled requests leave nothing behind
        await budget.settle()
        assert budget.waiting() == []

    asyncio.run(run())


@given(operations=OPERATIONS)
def test_a_budget_grants_in_the_order_asked_for(operations):
    async def run():
        budget = _Budget(10)

        def check():
            assert budget.granted == sorted(budget.granted)
            assert not budget.waiting() or not budget.granted or budget.granted[-1] < budget.waiting()[0]

        await _after_each(budget, operations, check)

    asyncio.run(run())


@given(operations=OPERATIONS)
@example(operations=[("ask", 6), ("ask", 8), ("ask", 2), ("cancel", 0)])
def test_nobody_waits_for_a_budget_who_could_go_ahead(operations):
    """This includes requests behind one that was cancelled."""

    async def run():
        budget = _Budget(10)

        def check():
            if budget.waiting():
                assert sum(budget.held()) + budget.sizes[budget.waiting()[0]] > 10
                assert sum(budget.held()) > 0

        await _after_each(budget, operations, check)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("waited_s", "busy_s", "reads"),
    [(9.0, 1.0, True), (9.0, 9.9, True), (9.0, 10.1, False), (5.1, 0.0, True), (4.9, 0.0, False), (0.0, 0.0, False)],
    ids=["reads", "half busy", "busy", "waits mostly", "waits little", "waits never"],
)
def test_an_epoch_waits_for_reads_if_it_waits_while_threads_are_idle(waited_s, busy_s, reads):
    waits = Waits(threads=2)
    assert not waits.for_reads(began_s=0.0, now_s=100.0, busy_s=7.0)  # the first load is not judged
    assert waits.for_reads(began_s=110.0 - waited_s, now_s=110.0, busy_s=7.0 + busy_s) is reads


# ---- the gates together

MiB = 1 << 20
MEMORY = 256 * MiB


def _gates(*, threads=1, prefetch=2, grows=False):
    options = FetchOptions(memory=MEMORY, threads=threads, prefetch=prefetch)
    return Gates(options, grows=grows, most=8, groups=16)


async def _all_that_pass(asked):
    """How many of these requests are granted while nothing is given back."""
    tasks = [asyncio.ensure_future(each) for each in asked]
    for _ in range(2 * len(tasks) + 2):
        await asyncio.sleep(0)
    passed = sum(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return passed


@pytest.mark.parametrize("prefetch", [1, 2, 6])
def test_two_fetches_go_ahead_and_one_more_after_each_wait_for_reads(prefetch):
    async def run():
        gates = _gates(prefetch=prefetch)
        for begun in range(2):
            assert await _all_that_pass([gates.fetch_begins()]) == 1, begun
        assert await _all_that_pass([gates.fetch_begins()]) == 0
        for load in range(10):  # each waited for all of the time
            gates.fetch_is_loaded(began_s=float(load), now_s=load + 1.0, busy_s=0.0)
        assert await _all_that_pass([gates.fetch_begins() for _ in range(10)]) == prefetch - 1

    asyncio.run(run())


def test_as_many_groups_are_made_as_there_are_threads_and_one_more():
    async def run():
        gates = _gates(threads=3)
        assert await _all_that_pass([gates.group_begins(1) for _ in range(9)]) == 4

    asyncio.run(run())


def test_groups_take_as_many_bytes_as_the_most_has_grown():
    async def run():
        gates = _gates(threads=64, grows=True)
        making = FetchOptions(memory=MEMORY).ready_bytes - gates.ready_bytes
        assert await _all_that_pass([gates.group_begins(1) for _ in range(9)]) == 1  # nobody knows how they grow

        gates = _gates(threads=64, grows=True)
        claim = await gates.group_begins(MiB)
        gates.group_is_made(claim, 3 * MiB)
        gates.group_ends(claim)
        assert await _all_that_pass([gates.group_begins(MiB) for _ in range(64)]) == making // (3 * MiB)

        gates = _gates(threads=64, grows=True)
        for put_bytes in (2 * MiB, 3 * MiB, MiB):
            claim = await gates.group_begins(MiB)
            gates.group_is_made(claim, put_bytes)
            gates.group_ends(claim)
        assert (await gates.group_begins(MiB)).n_bytes == 3 * MiB

    asyncio.run(run())


@pytest.mark.parametrize(("mib", "size"), [(0, 8), (0.1, 8), (1, 3), (2, 1), (100, 1)])
def test_groups_are_small_beside_the_memory_of_minibatches(mib, size):
    cuts = np.arange(0, 101, 5)
    groups = list(_gates().groups(cuts, lambda cuts: int(mib * MiB) * (len(cuts) - 1)))
    assert np.diff([group[0] for group in groups]).tolist() == [5 * size] * (len(groups) - 1)
    assert np.unique(np.concatenate(groups)).tolist() == cuts.tolist()
    assert all(group[-1] == after[0] for group, after in itertools.pairwise(groups))


@given(
    fetches=st.lists(st.tuples(st.integers(0, 3 * MEMORY), st.lists(st.integers(1, MEMORY), max_size=4)), max_size=8),
    growth=st.sampled_from([1, 7]),
    threads=st.integers(1, 3),
)
def test_fetches_and_groups_of_any_size_come_through(fetches, growth, threads):
    """However large they are, the consumer gets all groups, and in the end nothing is held."""

    async def run():
        gates, ready = _gates(threads=threads, grows=growth > 1), ByteBudget(10 * MiB)
        loads, jobs, taken = asyncio.Queue(), asyncio.Queue(), asyncio.Queue()

        async def load():
            for n_bytes, groups in fetches:
                await gates.fetch_begins()
                await gates.room.acquire(n_bytes)
                loads.put_nowait((n_bytes, groups))

        async def gather():
            for _ in fetches:
                n_bytes, groups = await loads.get()
                for x_bytes in groups:
                    jobs.put_nowait(await gates.group_begins(x_bytes))
                jobs.put_nowait(n_bytes)

        async def put():
            left = len(fetches)
            while left:
                job = await jobs.get()
                if isinstance(job, int):
                    gates.fetch_ends(job)
                    left -= 1
                    continue
                gates.group_is_made(job, growth * job.x_bytes)
                await ready.acquire(growth * job.x_bytes)
                taken.put_nowait(job.x_bytes)
                gates.group_ends(job)

        async def consume():
            for wanted in [x_bytes for _, groups in fetches for x_bytes in groups]:
                assert await taken.get() == wanted
                ready.release(growth * wanted)

        await asyncio.wait_for(asyncio.gather(load(), gather(), put(), consume()), PATIENCE_S)
        for budget in (gates.room, gates._making, ready):
            assert budget._held == 0

    asyncio.run(run())
