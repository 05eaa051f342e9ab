"""The gates that a fetch passes on its way to the consumer. They bound what an epoch holds at any moment.

    gate       lets through                        taken before                      given back when
    ahead      2 fetches, later `prefetch + 1`     a fetch is planned                all its minibatches are put
    room       `buffer_bytes`                      a fetch is read                   all its minibatches are put
    in flight  `in_flight_bytes`                   some chunks are read              they are decoded, or have failed
    jobs       `threads + 1` groups                a group of minibatches is made    it is put
    making     3/4 of `ready_bytes`, as it grows   a group of minibatches is made    it is put
    ready      1/4 of `ready_bytes`                a group is put                    the consumer takes it

Gates are taken in this order, and whoever gives one back waits only for later gates: the last is given back by the
consumer. So there is no circle of waits, and an epoch cannot deadlock. Fetches take the first two one after another, in
the order of the epoch. Reads of earlier fetches go first. A request larger than its bound passes when nothing else is
held, so every request passes in the end.

`Gates` has all of them but two, which are ByteBudgets of others: the readers of an epoch share that of bytes in flight
(zloader.reading.matrix_parts), and the bridge to the consumer has that of what is ready (zloader.reading.bridge).
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from zloader.common.options import FetchOptions
from zloader.common.records import Rows

# One job gathers a group of minibatches as one, and then cuts it apart. A group is large enough to make the hand-over
# between threads and the calls per source cheap, and small enough to keep all threads busy. One minibatch may exceed
# these bytes.
_GROUP_BYTES = 16 << 20  # malloc takes larger blocks fresh from the system each time
_FIRST_AHEAD = 2  # fetches: memory that is used for the first time is slow, so an epoch starts with little of it


class ByteBudget:
    """A bound on the bytes that the coroutines of one event loop hold.

    Requests are granted by ascending `turn`, and in order of arrival within a turn. A request larger than the bound
    waits until nothing else is held.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._held = 0
        self._arrivals = itertools.count()
        self._waiting: list[
            tuple[int, int, int, asyncio.Future[None]]
        ] = []  # a heap of (turn, arrival, bytes, granted)

    def _fits(self, n_bytes: int) -> bool:
        return self._held == 0 or self._held + n_bytes <= self._limit

    async def acquire(self, n_bytes: int, turn: int = 0) -> None:
        """Waits until `n_bytes` more fit into the budget, and takes them."""
        if not self._waiting and self._fits(n_bytes):
            self._held += n_bytes
            return
        go: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (turn, next(self._arrivals), n_bytes, go))
        try:
            await go
        except asyncio.CancelledError:
            granted = go.done() and not go.cancelled()  # granted just before it was cancelled
            go.cancel()
            self.release(n_bytes if granted else 0)  # also grants requests that were queued behind this one
            raise

    def release(self, n_bytes: int) -> None:
        """Returns bytes to the budget, and grants the requests that now fit."""
        self._held -= n_bytes
        while self._waiting and (self._waiting[0][3].cancelled() or self._fits(self._waiting[0][2])):
            _, _, granted, go = heapq.heappop(self._waiting)
            if not go.cancelled():
                self._held += granted
                go.set_result(None)


class Waits:
    """Judges, from one load to the next, whether an epoch waits for reads rather than for the processor."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._last_s: float | None = None  # when the last load was complete
        self._busy_s = 0.0

    def for_reads(self, *, began_s: float, now_s: float, busy_s: float) -> bool:
        """Whether it waited most of the time since the last load, while most threads had nothing to do.

        The wait for this load began at `began_s` and ended at `now_s`. The threads have been busy for `busy_s` seconds
        altogether. The first load, which starts from nothing, is not judged.
        """
        last_s, self._last_s = self._last_s, now_s
        busy_before_s, self._busy_s = self._busy_s, busy_s
        if last_s is None:
            return False
        since_s = now_s - last_s
        return 2 * (now_s - began_s) > since_s and 2 * (busy_s - busy_before_s) < since_s * self._threads


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a group of minibatches holds while it is made: the bytes of its x, and with growth."""

    x_bytes: int
    n_bytes: int


class Gates:
    """The gates of one epoch, for the coroutines of its event loop.

    If minibatches `grow`, they may take more bytes than their x. The most that any group has grown is then expected of
    the next ones, and groups become smaller by it; while it is not known, one group is made at a time. A group has at
    `most` so many minibatches, and at least so many `groups` fit into `ready_bytes`.
    """

    def __init__(self, options: FetchOptions, *, grows: bool, most: int, groups: int) -> None:
        self.room = ByteBudget(options.buffer_bytes)
        # A quarter for minibatches that are ready, and the rest for those being gathered: if they are large, only a few
        # threads can gather at once.
        self.ready_bytes = options.ready_bytes // 4
        self._making = ByteBudget(options.ready_bytes - self.ready_bytes)
        self._most_making_bytes = options.ready_bytes
        self._group_bytes = min(_GROUP_BYTES, options.ready_bytes // groups)
        self._jobs = asyncio.Semaphore(options.threads + 1)
        self._ahead = asyncio.Semaphore(_FIRST_AHEAD)
        self._more_ahead = options.prefetch + 1 - _FIRST_AHEAD
        self._waits = Waits(options.threads)
        self._grows, self._most = grows, most
        self._growth = math.inf if grows else 1.0  # bytes put per byte of x

    async def fetch_begins(self) -> None:
        """Waits until one more fetch may be loaded ahead."""
        await self._ahead.acquire()

    def fetch_is_loaded(self, *, began_s: float, now_s: float, busy_s: float) -> None:
        """Lets one more fetch be loaded ahead from now on if the epoch waits for reads, as `Waits` judges."""
        waits = self._waits.for_reads(began_s=began_s, now_s=now_s, busy_s=busy_s)
        if waits and self._more_ahead:
            self._more_ahead -= 1
            self._ahead.release()

    def fetch_ends(self, n_bytes: int) -> None:
        """Gives back what a fetch held ahead, and its bytes of the room."""
        self.room.release(n_bytes)
        self._ahead.release()

    def groups(self, cuts: Rows, x_bytes: Callable[[Rows], int]) -> Iterator[Rows]:
        """For each group of minibatches that are made together, their cuts. `x_bytes` are those of x between cuts."""
        begin, n_minibatches = 0, len(cuts) - 1
        average = max(1, x_bytes(cuts) // max(1, n_minibatches))
        while begin < n_minibatches:
            size = max(1, min(self._most, int(self._group_bytes // (average * self._growth))))
            yield cuts[begin : begin + size + 1]
            begin += size

    async def group_begins(self, x_bytes: int) -> Claim:
        """Waits until a group whose x has so many bytes may be made."""
        await self._jobs.acquire()
        n_bytes = math.ceil(min(x_bytes * self._growth, self._most_making_bytes))
        await self._making.acquire(n_bytes)
        return Claim(x_bytes=x_bytes, n_bytes=n_bytes)

    def group_is_made(self, claim: Claim, put_bytes: int) -> None:
        """Learns from the bytes of its minibatches how much a group grows."""
        if self._grows:
            known = 1.0 if math.isinf(self._growth) else self._growth
            self._growth = max(known, put_bytes / claim.x_bytes)

    def group_ends(self, claim: Claim) -> None:
        """Gives back what a group held, once it is put."""
        self._making.release(claim.n_bytes)
        self._jobs.release()
