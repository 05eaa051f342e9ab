"""One epoch made by a crew of producers: a coroutine that hands out fetches, and puts their minibatches in order.

It knows nothing of Ray: `zloader.ray.crew` has the producers of a cluster. benchmarks/scale/ runs the same code with
simulated ones, in virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from zloader.common.errors import ProducerError
from zloader.order.plan import Remaining
from zloader.producing.window import (
    LANES,
    LOOK_AHEAD,
    FailedError,
    Job,
    LostError,
    Maker,
    Makers,
    Making,
    MeanBytes,
    OpenFetch,
    Window,
)
from zloader.reading.bridge import Channel
from zloader.reading.resources import Counters

_MOST_LOSSES = 16  # of producers that make the same fetch, without any progress


class _OvertakenError(Exception):
    """Another producer has completed the fetch."""


class _GivenWayError(Exception):
    """The producer is needed for an earlier fetch."""


class Production:
    """The minibatches of an epoch, in order. `run` is the coroutine of a Bridge.

    `plan` is what producers take as the plan. If the fetch that comes next makes no progress for `stall_s`, or no fetch
    does while nobody makes that one, the epoch ends with an error. Each producer makes `lanes` fetches at a time.
    """

    def __init__(
        self,
        crew: Makers,
        plan: Any,
        window: Window,
        mean: MeanBytes,
        *,
        by_mirror: bool,
        stall_s: float,
        lanes: int = LANES,
    ) -> None:
        self.counters = Counters()
        self._crew = crew
        self._plan = plan
        self._window = window
        self._mean = mean
        self._by_mirror = by_mirror
        self._lanes = lanes
        self._stall_s = stall_s
        self._at_work: set[Maker] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed, self._sized = asyncio.Event(), asyncio.Event()
        self._moved_s = 0.0  # when the consumer took minibatches or a producer came, most recently

    def resized(self) -> None:
        """Starts or ends producers, as the size of the crew says. Any thread may call this."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the epoch has just ended, and its loop with it
                self._loop.call_soon_threadsafe(self._sized.set)

    def _change(self) -> None:
        """Wakes all coroutines that wait for a change. Of those that wait for room, it wakes those that have it now."""
        self._changed.set()
        self._changed.clear()
        for fetch in self._window.with_room():
            for job in fetch.jobs.values():
                job.woken.set()

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def run(self, put: Channel[Any]) -> None:
        """Puts all minibatches. Raises the first error in their order."""
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            others = [group.create_task(self._staff()), group.create_task(self._crew.watch())]
            if self._by_mirror:
                others.append(group.create_task(self._find_homes()))
            await self._put_in_order(put)
            for task in others:
                task.cancel()

    async def _put_in_order(self, put: Channel[Any]) -> None:
        window = self._window
        while not window.done:
            fetch = window.head
            if fetch is not None and fetch.groups:
                items, n_bytes = fetch.groups.popleft()
                await put(items, 1)  # waits until the consumer has the group before
                fetch.taken_bytes += n_bytes
                self._moved_s = self._now_s()
                self._change()
            elif fetch is not None and fetch.error is not None:
                raise fetch.error
            elif fetch is not None and fetch.complete:
                window.open.popleft()
                self._change()
            else:
                await self._progress_of(fetch)

    async def _progress_of(self, fetch: OpenFetch | None) -> None:
        """Waits for a change. Finds a producer for the fetch that comes next if it needs one.

        Raises ProducerError if those that it has make no progress, or if it has none and none at work makes progress.
        """
        now_s = self._now_s()
        leaving = self._window.to_leave(now_s)
        if leaving is not None:
            leaving.woken.set()
        deadlines = [self._stalled_s(fetch)] if self._at_work else []  # `join` has a deadline of its own
        if fetch is not None and fetch.jobs and self._window.overdue_s(fetch) > now_s:
            deadlines.append(self._window.overdue_s(fetch))
        try:
            async with asyncio.timeout_at(min(deadlines, default=None)):
                await self._changed.wait()
        except TimeoutError:
            if self._at_work and self._now_s() >= self._stalled_s(fetch):
                made = f"fetch {fetch.number}" if fetch is not None and fetch.jobs else "later fetches"
                n_makers = len(fetch.jobs) if fetch is not None and fetch.jobs else len(self._at_work)
                raise ProducerError(
                    f"{n_makers} of {len(self._at_work)} producers make {made}, and have made no progress for "
                    f"{self._stall_s:g} s: look at their machines, or give a larger start_s"
                ) from None

    def _stalled_s(self, fetch: OpenFetch | None) -> float:
        """When producers have made no progress for too long, with this fetch or, if nobody makes it, with any."""
        makes = [fetch] if fetch is not None and fetch.jobs else self._window.open
        return max([self._moved_s, *(each.since_s for each in makes)]) + self._stall_s

    async def _find_homes(self) -> None:
        """Asks one producer of each machine how much of the coming fetches its mirrors hold."""
        asked, many = -1, 2 * LOOK_AHEAD
        while True:
            coming = self._window.coming(many)
            new = [remaining for remaining in coming if remaining.number > asked]
            machines = {maker.machine: maker for maker in self._at_work}
            if len(machines) < 2 or not new or (len(coming) == many and len(new) < LOOK_AHEAD):
                await self._changed.wait()
                continue
            answers = await asyncio.gather(*(self._held(maker, new) for maker in machines.values()))
            asked = new[-1].number
            later = set(self._window.coming(many))
            for remaining, shares in zip(new, zip(*answers, strict=True), strict=True):
                if remaining in later:
                    self._window.set_home(remaining.number, dict(zip(machines, shares, strict=True)))

    async def _held(self, maker: Maker, coming: list[Remaining]) -> list[float]:
        try:
            return await maker.held(self._plan, coming)
        except (LostError, FailedError):  # which `make` will raise, too
            return [0.0] * len(coming)

    async def _staff(self) -> None:
        """Keeps as many producers at work as the crew should have."""
        async with asyncio.TaskGroup() as group:
            posts: list[asyncio.Task[None]] = []
            while True:
                while len(posts) > self._crew.size:
                    posts.pop().cancel()
                posts += [group.create_task(self._post()) for _ in range(self._crew.size - len(posts))]
                self._sized.clear()
                await self._sized.wait()

    async def _post(self) -> None:
        """Keeps one producer at work, and replaces it when it is lost."""
        while True:
            maker = await self._crew.join(lambda: bool(self._at_work))
            self._at_work.add(maker)
            self._moved_s = self._now_s()
            self._change()
            try:
                async with asyncio.TaskGroup() as group:
                    watching = group.create_task(self._drop_when_dead(maker))
                    await asyncio.wait([group.create_task(self._lane(maker)) for _ in range(self._lanes)])
                    watching.cancel()
            finally:
                self._at_work.discard(maker)
                self._crew.leave(maker)

    async def _drop_when_dead(self, maker: Maker) -> None:
        """Lets a dead producer's fetches be made by others, also while nothing is expected from it."""
        await maker.ended()
        self._crew.drop(maker)
        for fetch in self._window.open:
            if maker in fetch.jobs:
                fetch.jobs[maker].woken.set()
        self._change()

    async def _lane(self, maker: Maker) -> None:
        """Lets a producer make one fetch after another, until it is lost."""
        while (fetch := await self._next(maker)) is not None:
            job = fetch.jobs[maker]
            try:
                await self._make(job, fetch)
            except LostError as error:
                self._crew.drop(maker)
                fetch.losses += 1
                if fetch.losses > _MOST_LOSSES:
                    fetch.fail(_given_up(fetch, error))
            except _OvertakenError:
                if fetch.error is None and not job.rival:  # it was too slow
                    self._crew.drop(maker)
            except FailedError as error:
                fetch.fail(error.__cause__)
            except _GivenWayError:
                pass
            finally:
                self._ended(job, fetch)

    def _ended(self, job: Job, fetch: OpenFetch) -> None:
        """A producer does not make a fetch any more."""
        del fetch.jobs[job.maker]
        for other in fetch.jobs.values():
            other.rival = other.rival and fetch.complete
        self._change()

    async def _next(self, maker: Maker) -> OpenFetch | None:
        """The next fetch for a producer, as soon as there is one; None if the producer is lost."""
        while not maker.lost:
            fetch = self._window.next(maker, self._now_s(), maker.machine)
            if fetch is not None:
                self._change()  # whoever waits for this fetch now waits for its progress
                return fetch
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._window.next_change_s(maker)):
                    await self._changed.wait()
        return None

    async def _make(self, job: Job, fetch: OpenFetch) -> None:
        """Lets a producer make what is left of a fetch. Raises _OvertakenError if another one completes it."""
        at, before = fetch.n_made, Counters()
        making = job.maker.make(self._plan, fetch.rest(), max(1, self._window.ahead_bytes // self._crew.size))
        try:
            while True:
                await self._room(job, fetch)
                if fetch.error is not None or (fetch.complete and at < fetch.size):
                    raise _OvertakenError
                group = await self._step(job, making)
                if group is None:
                    break
                items, counted = group
                self._count(counted, before)
                self._mean.add(sum(item.nbytes for item in items), len(items))
                fetch.add(at, items, self._now_s())
                at, before = at + len(items), counted
                self._change()
            if not fetch.complete:
                raise ProducerError(f"fetch {fetch.number} ended after {fetch.n_made} of {fetch.size} minibatches")
        finally:
            making.cancel()

    async def _room(self, job: Job, fetch: OpenFetch) -> None:
        """Waits until the next minibatches of a fetch have room here.

        Raises LostError if the producer dies meanwhile, and _GivenWayError if it should make another fetch instead.
        """
        window = self._window
        while not fetch.complete and not any(each is fetch for each in window.with_room()):
            if job.maker.lost:
                raise LostError("the producer died while its minibatches waited")
            job.waits = True
            if window.to_leave(self._now_s()) is job:
                raise _GivenWayError
            job.woken.clear()
            await job.woken.wait()
        if job.waits:
            job.waits, fetch.since_s = False, self._now_s()
            self._change()

    async def _step(self, job: Job, making: Making) -> tuple[Sequence[Any], Counters] | None:
        """The next group of a fetch. Raises _OvertakenError if another producer completes the fetch meanwhile."""
        stopped = asyncio.timeout(None)  # `Job.stop` sets the time
        try:
            async with stopped as job.step:
                return await making.next()
        except TimeoutError:
            if stopped.expired():
                raise _OvertakenError from None
            raise
        finally:
            job.step = None

    def _count(self, counted: Counters, before: Counters) -> None:
        """Adds what a producer has counted since `before`."""
        most = max(self.counters.most_in_flight_bytes, counted.most_in_flight_bytes)
        for name, value in vars(counted).items():
            setattr(self.counters, name, getattr(self.counters, name) + value - getattr(before, name))
        self.counters.most_in_flight_bytes = most


def _given_up(fetch: OpenFetch, error: Exception) -> ProducerError:
    given_up = ProducerError(
        f"{fetch.losses} producers in a row were lost with fetch {fetch.number}, the last one because: {error}. "
        "If they ran out of memory, lower fetch_factor or FetchOptions.memory, or give resources={'memory': ...}"
    )
    given_up.__cause__ = error
    return given_up
