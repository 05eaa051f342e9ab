"""One epoch made by a crew of producers: a coroutine that hands out fetches, and puts their minibatches in order.

It knows nothing of Ray: `zloader.ray.crew` has the producers of a cluster. benchmarks/scale.py runs the same code with
simulated ones, in virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from zloader.common.errors import ProducerError
from zloader.order.plan import Remaining
from zloader.ray.window import LOOK_AHEAD, MeanBytes, OpenFetch, Window
from zloader.reading.bridge import Put
from zloader.reading.resources import Counters

LANES = 2  # fetches that a producer makes at a time: it reads one while it gathers another
_MOST_LOSSES = 16  # of producers that make the same fetch, without any progress


class LostError(Exception):
    """A producer, its machine, or its results are gone. Reading the data has not failed."""


class FailedError(Exception):
    """A fetch cannot be made. The cause is the error for the consumer."""


class _OvertakenError(Exception):
    """Another producer has completed the fetch."""


class _GivenWayError(Exception):
    """The producer is needed for an earlier fetch."""


class Making(Protocol):
    """A fetch that a producer makes, group by group. It waits when a few groups have not been asked for."""

    async def next(self) -> tuple[Sequence[Any], Counters] | None:
        """The next group, with all that was counted so far; None at the end. Raises LostError or FailedError."""
        ...

    def cancel(self) -> None:
        """Ends the making, if it has not ended."""
        ...


class Maker(Protocol):
    """A producer that is ready to work."""

    machine: str
    lost: bool

    def make(self, plan: Any, remaining: Remaining, ready_bytes: int) -> Making:
        """Begins what remains of a fetch. `ready_bytes` bounds the minibatches that are made ahead."""
        ...

    async def held(self, plan: Any, coming: Sequence[Remaining]) -> list[float]:
        """The share of each of these fetches that the mirrors of its machine hold. Raises LostError or FailedError."""
        ...

    async def ended(self) -> None:
        """Returns when the producer is dead."""
        ...


class Makers(Protocol):
    """Starts producers, and keeps up to `size` of them. Ends those that are dropped."""

    size: int

    async def join(self, others_work: Callable[[], bool]) -> Maker:
        """A producer that is ready to work. Raises ProducerError if there is none, and no other works."""
        ...

    def leave(self, maker: Any) -> None:
        """Keeps a producer for the next epoch."""
        ...

    def drop(self, maker: Any) -> None:
        """Ends a producer."""
        ...

    async def watch(self) -> None:
        """Raises ProducerError when no producer can be reached any more."""
        ...


class Production:
    """The minibatches of an epoch, in order. `run` is the coroutine of a Bridge.

    `plan` is what producers take as the plan. If the fetch that comes next makes no progress for `stall_s`, the epoch
    ends with an error.
    """

    def __init__(
        self, crew: Makers, plan: Any, window: Window, mean: MeanBytes, *, by_mirror: bool, stall_s: float
    ) -> None:
        self.counters = Counters()
        self._crew = crew
        self._plan = plan
        self._window = window
        self._mean = mean
        self._by_mirror = by_mirror
        self._stall_s = stall_s
        self._at_work: set[Maker] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._waiting: dict[OpenFetch, asyncio.Event] = {}  # for room
        self._steps: dict[OpenFetch, set[asyncio.Future[Any]]] = {}  # what is expected of its producers

    def resized(self) -> None:
        """Starts or ends producers, as the size of the crew says. Any thread may call this."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the epoch has just ended, and its loop with it
                self._loop.call_soon_threadsafe(self._change)

    def _change(self) -> None:
        """Wakes all coroutines that wait for a change. Of those that wait for room, it wakes those that have it now."""
        self._changed.set()
        self._changed.clear()
        if self._waiting:
            for fetch in self._window.with_room():
                self._wake(fetch)

    def _wake(self, fetch: OpenFetch | None) -> None:
        if fetch in self._waiting:
            self._waiting[fetch].set()

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def run(self, put: Put[Any]) -> None:
        """Puts all minibatches. Raises the first error in their order."""
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            others = [group.create_task(self._staff()), group.create_task(self._crew.watch())]
            if self._by_mirror:
                others.append(group.create_task(self._find_homes()))
            await self._put_in_order(put)
            for task in others:
                task.cancel()

    async def _put_in_order(self, put: Put[Any]) -> None:
        window = self._window
        while not window.done:
            fetch = window.head
            if fetch is not None and fetch.groups:
                items, n_bytes = fetch.groups.popleft()
                await put(items, 1)  # waits until the consumer has the group before
                fetch.taken_bytes += n_bytes
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

        Raises ProducerError if those that it has make no progress.
        """
        self._wake(self._window.to_leave(self._now_s()))
        if fetch is None or not fetch.makers or fetch.waits:
            await self._changed.wait()
            return
        since_s, overdue_s = fetch.since_s, self._window.overdue_s(fetch)
        stalled_s = since_s + self._stall_s
        try:
            async with asyncio.timeout_at(overdue_s if self._now_s() < overdue_s else stalled_s):
                await self._changed.wait()
        except TimeoutError:
            if fetch.since_s == since_s and self._now_s() >= stalled_s:
                raise ProducerError(
                    f"{len(fetch.makers)} of {len(self._at_work)} producers make fetch {fetch.number}, and have made "
                    f"no progress for {self._stall_s:g} s: look at their machines, or give a larger start_s"
                ) from None

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
                await self._changed.wait()

    async def _post(self) -> None:
        """Keeps one producer at work, and replaces it when it is lost."""
        while True:
            maker = await self._crew.join(lambda: bool(self._at_work))
            self._at_work.add(maker)
            self._change()
            watching = asyncio.ensure_future(self._drop_when_dead(maker))
            try:
                async with asyncio.TaskGroup() as lanes:
                    for _ in range(LANES):
                        lanes.create_task(self._lane(maker))
            finally:
                watching.cancel()
                self._at_work.discard(maker)
                self._crew.leave(maker)

    async def _drop_when_dead(self, maker: Maker) -> None:
        """Lets a dead producer's fetches be made by others, also while nothing is expected from it."""
        await maker.ended()
        self._crew.drop(maker)
        for fetch in self._waiting:
            self._wake(fetch)
        self._change()

    async def _lane(self, maker: Maker) -> None:
        """Lets a producer make one fetch after another, until it is lost."""
        while (fetch := await self._next(maker)) is not None:
            try:
                await self._make(maker, fetch)
            except (LostError, _OvertakenError) as error:
                self._crew.drop(maker)
                fetch.losses += 1
                if fetch.losses > _MOST_LOSSES:
                    fetch.error = _given_up(fetch, error)
            except FailedError as error:
                fetch.error = error.__cause__
            except _GivenWayError:
                pass
            finally:
                self._ended(maker, fetch)

    def _ended(self, maker: Maker, fetch: OpenFetch) -> None:
        """A producer does not make a fetch any more. If it is complete, nobody does."""
        fetch.makers.discard(maker)
        fetch.waits = False
        if fetch.complete:
            self._waiting.pop(fetch, None)
            steps = self._steps.pop(fetch, set())
            for step in steps if fetch.error is None else ():
                step.cancel()
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

    async def _make(self, maker: Maker, fetch: OpenFetch) -> None:
        """Lets a producer make what is left of a fetch."""
        at, before = fetch.n_made, Counters()
        making = maker.make(self._plan, fetch.rest(), max(1, self._window.ahead_bytes // self._crew.size))
        try:
            while True:
                await self._room(maker, fetch)
                if fetch.complete and at < fetch.size and fetch.error is None:
                    raise _OvertakenError
                group = await self._step(fetch, making)
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

    async def _room(self, maker: Maker, fetch: OpenFetch) -> None:
        """Waits until the next minibatches of a fetch have room here.

        Raises LostError if the producer dies meanwhile, and _GivenWayError if it should make another fetch instead.
        """
        window = self._window
        while not fetch.complete and not any(each is fetch for each in window.with_room()):
            if maker.lost:
                raise LostError("the producer died while its minibatches waited")
            fetch.waits = True
            if window.to_leave(self._now_s()) is fetch:
                fetch.waits = False
                raise _GivenWayError
            room = self._waiting.setdefault(fetch, asyncio.Event())
            await room.wait()
            room.clear()
        if fetch.waits:
            fetch.waits, fetch.since_s = False, self._now_s()
            self._change()

    async def _step(self, fetch: OpenFetch, making: Making) -> tuple[Sequence[Any], Counters] | None:
        """The next group of a fetch. Raises _OvertakenError if another producer completes the fetch meanwhile."""
        step = asyncio.ensure_future(making.next())
        steps = self._steps.setdefault(fetch, set())
        steps.add(step)
        try:
            await asyncio.wait({step})
            if step.cancelled():
                raise _OvertakenError
            return step.result()
        finally:
            steps.discard(step)
            step.cancel()

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
