"""Asks for spans until they are there, within a deadline over all attempts; the only place that retries a read.

Knows no store: `Asked` starts reads and says what came of them. A read that fails is asked for again after a pause. One
that does not come is asked for once more beside the first, and whichever comes first counts: TensorStore does not abort
the transfer of a read that is given up, so there is nothing to gain by giving it up. On a slow link, where none comes
soon, a second read beside each would take from the first what it needs; so it is only done where reads of that size
are known to come sooner. (For the others there is curl, which ends a connection that brings nothing for 20 s.)
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from zloader.access.read_errors import ReadFailure
from zloader.common.errors import DeadlineError, TruncatedObjectError
from zloader.common.options import FetchOptions
from zloader.common.records import Span

_log = logging.getLogger("zloader")
_SMALL_BYTES = 64 << 10  # reads up to this size take about as long as one another
_LOOKS = 12  # at what has not come, within a deadline
_WARN_S = 5.0  # a read tried for so long is worth a line in the log, but no more lines than one in so long


class Asked(Protocol):
    """What reads spans, once each."""

    async def start(self, spans: Sequence[Span]) -> list[Any]:
        """Futures of the bytes of each span, all under way."""
        ...

    async def outcome(self, span: Span, read: Any) -> bytes | ReadFailure:
        """What has come of a read that is done: its bytes, all of them, or why not. Raises what is final."""
        ...

    async def check_there(self, span: Span) -> None:
        """Raises StoreChangedError when another object is there now than the one that was listed."""
        ...

    def place(self, span: Span) -> str:
        """URL, key and bytes, for messages."""
        ...


@dataclass(kw_only=True)
class _Reading:
    """A span that did not come at once: when it was asked for, what is under way, and what came of it."""

    span: Span
    began: float
    running: dict[Any, float]  # futures not looked at yet, with when each was started
    attempts: int = 1
    setbacks: int = 0
    doubts: int = 0  # of the setbacks, those of a kind that few are final of
    answer: str = "none"  # the last one

    def __str__(self) -> str:
        return f"last answer: {self.answer}; attempt {self.attempts}, after {time.monotonic() - self.began:.1f} s"


class Retrier:
    """Reads spans as often as it takes; `retries` counts the reads asked for again."""

    def __init__(self, asked: Asked, options: FetchOptions) -> None:
        self.retries = 0
        self._asked, self._options = asked, options
        self._look_s = options.deadline_s / _LOOKS  # from one look at what has not come to the next
        self._slowest_s, self._largest_bytes = 0.0, 0  # of the reads that went well
        self._warned = float("-inf")
        self._random = random.Random()  # of our own: the program may count on what its seed gives

    async def read(self, spans: Sequence[Span]) -> list[bytes]:
        """The bytes of each span, in order.

        Raises the error of the first setback that is final; DeadlineError, `deadline_s` after the call.
        """
        began = time.monotonic()
        started: list[Any] = []
        stored: list[bytes] = []
        pending: dict[int, _Reading] = {}  # by position in `stored`
        try:
            async with asyncio.timeout(self._options.deadline_s) as deadline:
                started += await self._asked.start(spans)
                asked = time.monotonic()  # later than `began` by what opening took
                await _settled(started, self._look_s, enough=len(started))
                for position, (span, read) in enumerate(zip(spans, started, strict=True)):
                    fine = read.done() and read.exception() is None
                    outcome = await self._asked.outcome(span, read) if fine else None
                    if not isinstance(outcome, bytes):
                        pending[position], outcome = _Reading(span=span, began=began, running={read: asked}), b""
                    stored.append(outcome)
                if pending:
                    await self._pursue_all(pending, started, stored)
                else:
                    self._went_well(asked, max(map(len, stored)))
        except TimeoutError as error:
            if not deadline.expired():
                raise
            nothing = _Reading(span=spans[0], began=began, running={})
            raise self._late(next(iter(pending.values()), nothing)) from error
        finally:
            for read in started:
                read.cancel()
        return stored

    async def _pursue_all(self, pending: dict[int, _Reading], started: list[Any], stored: list[bytes]) -> None:
        async def pursue(position: int, reading: _Reading) -> None:
            stored[position] = await self._pursue(reading, started)
            del pending[position]

        try:
            async with asyncio.TaskGroup() as group:
                for position, reading in pending.items():
                    group.create_task(pursue(position, reading))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors.exceptions[0].__cause__

    async def _pursue(self, reading: _Reading, started: list[Any]) -> bytes:
        """Asks for a span again until it is there; raises when there have been setbacks enough."""
        while not isinstance(outcome := await self._next_outcome(reading), bytes):
            if outcome is not None:
                await self._pause(reading, outcome)
            self.retries += 1
            reading.attempts += 1
            (read,) = await self._asked.start([reading.span])
            started.append(read)
            reading.running[read] = time.monotonic()
        return outcome

    async def _next_outcome(self, reading: _Reading) -> bytes | ReadFailure | None:
        """What comes of the first read to end; None when it is time to ask once more beside those under way."""
        while not (done := [read for read in reading.running if read.done()]):
            if self._is_overdue(reading):
                place = self._asked.place(reading.span)
                _log.debug("%s has not come (%s); asked for once more", place, str(reading))
                return None
            await _settled([*reading.running], self._look_s, enough=1)
        asked = reading.running.pop(done[0])
        outcome = await self._asked.outcome(reading.span, done[0])
        if isinstance(outcome, bytes):
            self._went_well(asked, len(outcome))
        return outcome

    def _went_well(self, asked: float, n_bytes: int) -> None:
        self._slowest_s = max(self._slowest_s, time.monotonic() - asked)
        self._largest_bytes = max(self._largest_bytes, n_bytes)

    def _is_overdue(self, reading: _Reading) -> bool:
        """Whether what is under way has taken thrice as long as any read of about its size, or smaller, has before."""
        known = self._largest_bytes and reading.span.size <= max(2 * self._largest_bytes, _SMALL_BYTES)
        if not known or reading.attempts > self._options.retries:
            return False
        patience_s = max(self._look_s, 3 * self._slowest_s) * (1 << min(reading.attempts - 1, 8))
        return time.monotonic() - max(reading.running.values()) >= patience_s

    async def _pause(self, reading: _Reading, setback: ReadFailure) -> None:
        """Waits before the next attempt, or raises where there shall be none."""
        place, now = self._asked.place(reading.span), time.monotonic()
        reading.answer = setback.answer
        reading.setbacks += 1
        reading.doubts += setback.attempts is not None
        if reading.attempts > self._options.retries or (setback.attempts and reading.doubts >= setback.attempts):
            if setback.error is TruncatedObjectError:
                await self._asked.check_there(reading.span)
            raise setback.error(f"{place} {setback.verdict} ({reading}). {setback.advice}")
        seconds = pause_s(reading.setbacks, self._random.random())
        if now + seconds > reading.began + self._options.deadline_s:
            raise self._late(reading)
        level = logging.DEBUG
        if now - max(reading.began, self._warned) > _WARN_S:
            level, self._warned = logging.WARNING, now
        _log.log(level, "%s failed (%s); asked for again in %.1f s", place, str(reading), seconds)
        await asyncio.sleep(seconds)

    def _late(self, reading: _Reading) -> DeadlineError:
        return DeadlineError(
            f"{self._asked.place(reading.span)} did not finish within deadline_s={self._options.deadline_s} "
            f"({reading}). Is the server overloaded, down or out of reach? A slow link needs a longer deadline_s or "
            "fewer in_flight_bytes"
        )


def pause_s(setbacks: int, chance: float) -> float:
    """Seconds to wait after so many setbacks: 0.1 s doubling to 4 s, give or take a quarter by `chance` (0 to 1).

    The first 16 make 46 s, give or take 5: enough for half a minute of SlowDown.
    """
    return float(min(4.0, 0.1 * 2 ** min(setbacks - 1, 10)) * (0.75 + chance / 2))


async def _settled(reads: Sequence[Any], timeout_s: float | None, *, enough: int) -> None:
    """Waits until `enough` reads are done, one has failed or the time is up.

    Not `await read`: that makes TensorStore complain on stderr when a cancelled read ends after the loop is closed.
    """
    loop = asyncio.get_running_loop()
    settled = loop.create_future()
    counter = itertools.count(1)  # counts in one step, on whichever threads the reads end

    def settle() -> None:
        if not settled.done():
            settled.set_result(None)

    def on_done(read: Any) -> None:
        if next(counter) == enough or read.cancelled() or read.exception() is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the epoch has ended, and nobody waits
                loop.call_soon_threadsafe(settle)

    timer = None if timeout_s is None else loop.call_later(timeout_s, settle)
    for read in reads:
        read.add_done_callback(on_done)
    try:
        if reads:
            await settled
    finally:
        if timer is not None:
            timer.cancel()
