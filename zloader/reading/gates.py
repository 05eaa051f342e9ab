"""The three gates of an epoch: how many fetches are ahead, how much memory they take, and how much is being read.

    gate       lets through                        taken before                      given back when
    ahead      2 fetches, later `prefetch + 1`     a fetch is planned                all its minibatches are made
    memory     `buffer_bytes` of fetches           a fetch is read                   all its minibatches are made
               `ready_bytes` of minibatches, and   a group of them is made           the consumer takes it
               `threads + 3` groups
               an eighth of `memory` of bands      chunks of parts of rows are read  their rows are in the mirror
    in flight  `in_flight_bytes`                   some chunks are read              they are decoded, or have failed

All are taken in the order of the epoch, reads of earlier fetches first. Whoever gives one back waits only for gates
below, and the last is given back by the consumer. So there is no circle of waits, and an epoch cannot deadlock. Memory
has parts for this reason: otherwise later fetches could take the memory that the minibatches of an earlier one need. A
request larger than its bound passes when nothing else is held, so every request passes in the end.

The scheduler has the first two (zloader.reading.fetch). The consumer gives back the memory of minibatches, so the
bridge to it has that budget (zloader.reading.bridge). All readers of an epoch share that of bands and the last
(zloader.reading.matrix_reader).
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable, Iterator

from zloader.common.options import FetchOptions
from zloader.common.records import Rows

# One job gathers a group of minibatches as one, and then cuts it apart. A group is large enough to make the hand-over
# between threads and the calls per source cheap, and small enough to keep all threads busy. One minibatch may exceed
# these bytes.
_GROUP_BYTES = 16 << 20  # malloc takes larger blocks fresh from the system each time
_MOST = 8  # minibatches of a group
_GROUPS = (
    16  # that fit into `ready_bytes` at least: malloc gives freed memory to groups of all sizes, and fits them badly
)
_WAITING = 3  # groups beside those that threads make
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
        # A heap of (turn, arrival, bytes, granted).
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []

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


class Ahead(asyncio.Semaphore):
    """How many fetches may be ahead: two, and one more after each load for which the epoch had to wait."""

    def __init__(self, options: FetchOptions) -> None:
        super().__init__(_FIRST_AHEAD)
        self._threads, self._more = options.threads, options.prefetch + 1 - _FIRST_AHEAD
        self._last_s: float | None = None  # when the last load was complete
        self._busy_s = 0.0

    def loaded(self, *, began_s: float, now_s: float, busy_s: float) -> None:
        """Judges whether the epoch waits for reads rather than for the processor, and if so lets one more through.

        It does if it waited most of the time since the last load, while most threads had nothing to do. The wait for
        this load began at `began_s` and ended at `now_s`. The threads have been busy for `busy_s` seconds altogether.
        The first load, which starts from nothing, is not judged.
        """
        last_s, self._last_s = self._last_s, now_s
        since_busy_s, self._busy_s = busy_s - self._busy_s, busy_s
        if last_s is None or not self._more:
            return
        since_s = now_s - last_s
        if 2 * (now_s - began_s) > since_s and 2 * since_busy_s < since_s * self._threads:
            self._more -= 1
            self.release()


class GroupSizes:
    """How many minibatches are made as one, and the memory that they claim for it.

    If minibatches `grow`, they may take more bytes than their x. The most that any group has grown is then expected of
    the next ones, and groups become smaller by it; while it is not known, one group is made at a time. Small groups
    count as a share of `ready_bytes`.
    """

    def __init__(self, options: FetchOptions, *, grows: bool) -> None:
        self._ready_bytes, self._group_bytes = options.ready_bytes, min(_GROUP_BYTES, options.ready_bytes // _GROUPS)
        # Memory that is used for the first time is slow, so there are no more groups than keep the threads busy.
        self._least_bytes = max(1, options.ready_bytes // (options.threads + _WAITING))
        self._grows = grows
        self._growth = math.inf if grows else 1.0  # bytes of minibatches per byte of x

    def groups(self, cuts: Rows, x_bytes: Callable[[Rows], int]) -> Iterator[Rows]:
        """For each group of minibatches that are made together, their cuts. `x_bytes` are those of x between cuts."""
        begin, n_minibatches = 0, len(cuts) - 1
        average = max(1, x_bytes(cuts) // max(1, n_minibatches))
        while begin < n_minibatches:
            size = max(1, min(_MOST, int(self._group_bytes // (average * self._growth))))
            yield cuts[begin : begin + size + 1]
            begin += size

    def claim(self, x_bytes: int) -> int:
        """The bytes that a group holds while it is made."""
        return max(self._least_bytes, math.ceil(min(max(1, x_bytes) * self._growth, self._ready_bytes)))

    def made(self, x_bytes: int, n_bytes: int) -> int:
        """The bytes that a group holds once it is made. Learns from those of its minibatches how much groups grow."""
        if self._grows:
            known = 1.0 if math.isinf(self._growth) else self._growth
            self._growth = max(known, n_bytes / max(1, x_bytes))
        return max(self._least_bytes, n_bytes)
