"""Decides who makes which fetch of an epoch, and which minibatches may come to the consumer's machine. Pure.

Makers are the producers as an epoch sees them. `zloader.ray.crew` has those of a cluster; tests and benchmarks have
others.

Each producer makes some fetches at a time. All of them read and decode at once. Their minibatches come in the order in
which the consumer takes them, as far as they fit into `ahead_bytes`. The others wait on the machines of the producers.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from zloader.order.plan import Remaining
from zloader.reading.resources import Counters

LANES = 2  # fetches that a producer makes at a time: it reads one while it gathers another
_LEAST_LEAD = 0.1  # by which one machine's share exceeds the others'
LOOK_AHEAD = 64  # fetches of which a producer may begin one that its machine's mirror holds


class LostError(Exception):
    """A producer, its machine, or its results are gone. Reading the data has not failed."""


class FailedError(Exception):
    """A fetch cannot be made. The cause is the error for the consumer."""


class Making(Protocol):
    """A fetch that a producer makes, group by group. It waits when a few groups have not been asked for."""

    async def next(self) -> tuple[Sequence[Any], Counters] | None:
        """The next group, with all that was counted so far; None at the end. Raises LostError or FailedError."""

    def cancel(self) -> None:
        """Ends the making, if it has not ended."""


class Maker(Protocol):
    """A producer that is ready to work."""

    machine: str
    lost: bool

    def make(self, plan: Any, remaining: Remaining, ready_bytes: int) -> Making:
        """Begins what remains of a fetch. `ready_bytes` bounds the minibatches that are made ahead."""

    async def held(self, plan: Any, coming: Sequence[Remaining]) -> list[float]:
        """The share of each of these fetches that the mirrors of its machine hold. Raises LostError or FailedError."""

    async def ended(self) -> None:
        """Returns when the producer is dead."""


class Makers(Protocol):
    """Starts producers, and keeps up to `size` of them. Ends those that are dropped."""

    size: int

    async def join(self, others_work: Callable[[], bool]) -> Maker:
        """A producer that is ready to work. Raises ProducerError if there is none, and no other works."""

    def leave(self, maker: Any) -> None:
        """Keeps a producer for the next epoch."""

    def drop(self, maker: Any) -> None:
        """Ends a producer."""

    async def watch(self) -> None:
        """Raises ProducerError when no producer can be reached any more."""


@dataclass(kw_only=True)
class MeanBytes:
    """The bytes of a minibatch, on average: an estimate that counts like one minibatch, and all that were made."""

    n_bytes: float
    minibatches: int = 1

    def add(self, n_bytes: int, minibatches: int) -> None:
        """Counts some minibatches that were made."""
        self.n_bytes += n_bytes
        self.minibatches += minibatches

    def of(self, minibatches: int) -> int:
        """The bytes that so many minibatches are likely to have."""
        return int(self.n_bytes / self.minibatches * minibatches)


@dataclass(eq=False)
class Job:
    """A producer's work on a fetch."""

    maker: Maker
    rival: bool = False  # of a producer that began earlier and made no progress
    waits: bool = False  # for room, so that it can make no progress
    woken: asyncio.Event = field(default_factory=asyncio.Event)  # to look whether there is room
    step: asyncio.Timeout | None = None  # of the group that is expected of the producer

    def stop(self) -> None:
        """Ends it, because nothing is left to make."""
        self.woken.set()
        if self.step is not None:
            self.step.reschedule(-math.inf)


@dataclass(eq=False, kw_only=True)
class OpenFetch:
    """A fetch on its way. `groups` are here and wait for the consumer. `jobs` are those of the producers at work."""

    number: int
    begin: int
    size: int
    expected_bytes: int
    groups: deque[tuple[Sequence[Any], int]] = field(default_factory=deque)
    n_made: int = 0
    made_bytes: int = 0
    taken_bytes: int = 0
    jobs: dict[Maker, Job] = field(default_factory=dict)  # by producer, in the order in which they began
    since_s: float = 0.0  # of the last progress
    losses: int = 0  # of producers, since the last progress
    error: BaseException | None = None  # instead of the minibatches that have not been made

    @property
    def complete(self) -> bool:
        """Whether no producer has to make anything of it."""
        return self.n_made == self.size or self.error is not None

    @property
    def waits(self) -> bool:
        """Whether it waits for room, so that it can make no progress."""
        return any(job.waits for job in self.jobs.values())

    @property
    def ready_bytes(self) -> int:
        """The bytes that wait for the consumer."""
        return self.made_bytes - self.taken_bytes

    @property
    def held_bytes(self) -> int:
        """The bytes that wait for the consumer, or will."""
        made = self.made_bytes if self.complete else max(self.made_bytes, self.expected_bytes)
        return made - self.taken_bytes

    def rest(self) -> Remaining:
        """What has not been made."""
        return Remaining(self.number, self.begin + self.n_made, self.size - self.n_made)

    def fail(self, error: BaseException | None) -> None:
        """Sets the error that comes after the minibatches that were made, unless these are all."""
        if not self.complete:
            self.error = error
            self._stop()

    def add(self, first: int, items: Sequence[Any], now_s: float) -> None:
        """Adds minibatches from number `first` on, without those that another producer has made meanwhile."""
        new = items[self.n_made - first :]
        if not new or self.complete:
            return
        n_bytes = sum(item.nbytes for item in new)
        self.groups.append((new, n_bytes))
        self.n_made += len(new)
        self.made_bytes += n_bytes
        self.since_s, self.losses = now_s, 0
        if getattr(new[-1], "error", None) is not None:  # of the user's own function: nothing comes after it
            self.size = self.n_made
        if self.complete:
            self._stop()

    def _stop(self) -> None:
        for job in self.jobs.values():
            job.stop()


class Window:
    """Begins fetches in order, one whenever a producer asks for one. Their minibatches have room in order, too.

    Of the fetches that come next, one whose home is the producer's machine is begun first, then one without a home, as
    far as they fit into `ahead_bytes`. A fetch that has lost its producer comes before all of them. If a fetch has made
    no progress for `overtake_s`, another producer makes it, too.
    """

    def __init__(self, remaining: Iterable[Remaining], mean: MeanBytes, *, ahead_bytes: int, overtake_s: float) -> None:
        self.open: deque[OpenFetch] = deque()  # in order
        self.homes: dict[int, str] = {}  # the machine whose mirror holds more of a fetch than others, by its number
        self.ahead_bytes = ahead_bytes
        self._later = deque(remaining)
        self._mean = mean
        self.overtake_s = overtake_s

    @property
    def done(self) -> bool:
        """Whether the consumer has everything."""
        return not self.open and not self._later

    @property
    def head(self) -> OpenFetch | None:
        """The fetch whose minibatches come next, if it has been begun."""
        begun = self.open and (not self._later or self.open[0].number < self._later[0].number)
        return self.open[0] if begun else None

    @property
    def ready_bytes(self) -> int:
        """The bytes of all minibatches that wait for the consumer."""
        return sum(fetch.ready_bytes for fetch in self.open)

    def set_home(self, number: int, shares: Mapping[str, float]) -> None:
        """Sets the home of a fetch, of which the mirrors of machines hold these shares."""
        second, most = sorted([0.0, *shares.values()])[-2:]
        if most - second >= _LEAST_LEAD:
            self.homes[number] = max(shares, key=lambda machine: shares[machine])

    def coming(self, n_fetches: int) -> list[Remaining]:
        """The fetches that will be begun next."""
        return list(itertools.islice(self._later, n_fetches))

    def next(self, maker: Maker, now_s: float, machine: str = "") -> OpenFetch | None:
        """The fetch that `maker`, on a machine, should make now, if there is one."""
        unfinished = (fetch for fetch in self.open if not fetch.complete)
        fetch = next((fetch for fetch in unfinished if self._needs(maker, fetch, now_s)), None) or self._new(machine)
        if fetch is not None:
            fetch.jobs[maker] = Job(maker, rival=bool(fetch.jobs))
            fetch.since_s = now_s
        return fetch

    def with_room(self) -> Iterator[OpenFetch]:
        """The fetches whose next minibatches may come to the consumer's machine, in order.

        All that come before those have room already. The consumer's next minibatch always has. If the fetch that comes
        next has not been begun, all have, so that a producer becomes free for it.
        """
        head, earlier_bytes = self.head, 0
        if head is None:
            yield from self.open
            return
        full = self.ready_bytes >= self.ahead_bytes
        for fetch in self.open:
            fits = not full and earlier_bytes + fetch.ready_bytes < self.ahead_bytes
            if fits or (fetch is head and not fetch.groups):
                yield fetch
            earlier_bytes += fetch.held_bytes
            if full or earlier_bytes >= self.ahead_bytes:
                return

    def to_leave(self, now_s: float) -> Job | None:
        """The job whose producer should make the fetch that comes next instead, which needs it.

        It is one of the last fetch that waits for room.
        """
        head = self.head
        if head is None or head.complete or head.waits:
            return None
        overdue = now_s >= self.overdue_s(head) and len(head.jobs) == 1
        if head.jobs and not overdue:
            return None
        jobs = (job for fetch in reversed(self.open) for job in fetch.jobs.values())
        return next((job for job in jobs if job.waits and job.maker not in head.jobs), None)

    def _needs(self, maker: Maker, fetch: OpenFetch, now_s: float) -> bool:
        return not fetch.jobs or (now_s >= self.overdue_s(fetch) and self._is_rival(maker, fetch))

    def overdue_s(self, fetch: OpenFetch) -> float:
        """When another producer may make a fetch, too, if it makes no progress."""
        return fetch.since_s + self.overtake_s

    def _is_rival(self, maker: Maker, fetch: OpenFetch) -> bool:
        return not fetch.complete and not fetch.waits and len(fetch.jobs) == 1 and maker not in fetch.jobs

    def next_change_s(self, maker: Maker) -> float | None:
        """When `maker` may overtake a fetch, if none makes progress; None if there is none to overtake."""
        return min((self.overdue_s(fetch) for fetch in self.open if self._is_rival(maker, fetch)), default=None)

    def _new(self, machine: str) -> OpenFetch | None:
        failed = min((fetch.number for fetch in self.open if fetch.error is not None), default=math.inf)
        coming = [each for each in self.coming(LOOK_AHEAD if self.homes else 1) if each.number < failed]
        preference = {machine: 0, "": 1}
        for remaining in sorted(coming, key=lambda each: preference.get(self.homes.get(each.number, ""), 2)):
            expected = self._mean.of(remaining.size)
            if remaining is coming[0] or self._held_bytes + expected <= self.ahead_bytes:
                return self._begun(remaining, expected)
        return None

    @property
    def _held_bytes(self) -> int:
        return sum(fetch.held_bytes for fetch in self.open)

    def _begun(self, remaining: Remaining, expected_bytes: int) -> OpenFetch:
        self._later.remove(remaining)
        self.homes.pop(remaining.number, None)
        number, begin, size = remaining
        fetch = OpenFetch(number=number, begin=begin, size=size, expected_bytes=expected_bytes)
        self.open.append(fetch)
        if len(self.open) > 1 and self.open[-2].number > number:
            self.open = deque(sorted(self.open, key=lambda each: each.number))
        return fetch
