"""Reads spans with retries, within one deadline over all attempts. No other module retries reads of spans.

The Retrier knows nothing of stores: an `AttemptReader` starts reads and reports their outcomes. A read that fails is
retried after a pause. A read that is overdue is hedged: a second read of the same span starts beside it, and the first
to finish counts. The overdue read is not cancelled, because TensorStore would not abort its transfer anyway. On a slow
link, where every read takes long, second reads would compete with the first for bandwidth. So a read is hedged only if
reads of its size are known to finish sooner. Other stalled reads are left to curl, which closes a connection that
receives nothing for 20 s.

`classify_failure` says of a failed read whether a retry may help, and which error to raise.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from zloader.common.errors import (
    AccessDeniedError,
    DeadlineError,
    MissingObjectError,
    ReadError,
    StoreError,
    TruncatedObjectError,
)
from zloader.common.options import FetchOptions
from zloader.common.records import Span

# TensorStore's statuses for transient failures: 5xx, 429, S3's SlowDown, RequestTimeout and similar, and connection
# errors. It reports them as ABORTED once its own retries are used up, which is at once, since it is told not to retry.
_TRANSIENT = {"ABORTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"}
# S3 rejects invalid credentials with 403, and expired ones with 400 and one of these codes.
_DENIED = re.compile(r"ExpiredToken|InvalidToken|TokenRefreshRequired")
_PREFIX = re.compile(r"([A-Z_]+: )?(All \d+ retry attempts failed: )?")
_DETAILS = re.compile(r" \[(HTTP code|[\w-]+=)")
_CODE = re.compile(r"\[(?:http_response_code='|HTTP code )(\d+)")
_SHORT_ATTEMPTS = 3  # this many answers of the wrong length cannot be due to the connection


@dataclass(frozen=True, kw_only=True)
class ReadFailure:
    """One failed attempt to read a span.

    `answer` is the server's answer or the connection's error. `error` is the exception to raise once no retry is left;
    its message includes `verdict` and `advice`. `attempts` limits the attempts (None: the options' `retries` do).
    `wait_s` is how long the server asks to wait.
    """

    answer: str
    error: type[StoreError] = ReadError
    verdict: str = "failed"
    advice: str = (
        "Is the server overloaded, down or unreachable? To retry longer, set FetchOptions(retries=, deadline_s=)"
    )
    attempts: int | None = None
    wait_s: float = 0.0


MISSING = ReadFailure(
    answer="the object does not exist",
    error=MissingObjectError,
    advice="Was the store changed or deleted?",
    attempts=1,
)


def truncated(answer: str) -> ReadFailure:
    """The failure of a read that returned fewer bytes than requested."""
    return ReadFailure(
        answer=answer,
        error=TruncatedObjectError,
        advice="The object is truncated. Restore it or convert the store again",
        attempts=_SHORT_ATTEMPTS,
    )


def denied(answer: str, advice: str, attempts: int = 1) -> ReadFailure:
    """The failure of a read that the server did not permit; `advice` says what to check."""
    return ReadFailure(
        answer=answer,
        error=AccessDeniedError,
        verdict="was denied",
        advice=f"Check {advice}, and whether they have expired",
        attempts=attempts,
    )


RANGE_IGNORED = ReadFailure(
    answer="the range was ignored by the server", advice="Does a proxy drop the Range header?", attempts=_SHORT_ATTEMPTS
)


def classify_failure(message: str, advice: str) -> ReadFailure:
    """The ReadFailure for the message of a TensorStore error; `advice` is what to check if access is denied."""
    status, code = message.partition(":")[0], _CODE.search(message)
    reason = " ".join(_DETAILS.split(_PREFIX.sub("", message, count=1))[0].split())[:300]
    answer = f"{code[1]} {reason}" if code else reason
    if status in ("PERMISSION_DENIED", "UNAUTHENTICATED") or _DENIED.search(reason):
        return denied(answer, advice)
    if status in _TRANSIENT:
        return ReadFailure(answer=answer)
    if status == "OUT_OF_RANGE":
        return truncated(answer)
    if "was ignored by server" in reason:
        return replace(RANGE_IGNORED, answer=answer)
    return ReadFailure(answer=answer, advice="A retry would not help", attempts=1)


_log = logging.getLogger("zloader")
_SMALL_BYTES = 64 << 10  # reads up to this size all take about the same time
_CHECKS = 12  # for overdue reads, per deadline
_WARN_S = 5.0  # a read retried for longer than this logs a warning, at most one warning per such interval


class AttemptReader(Protocol):
    """Makes single attempts to read spans, without retries."""

    async def start(self, spans: Sequence[Span]) -> list[Any]:
        """Starts one read per span and returns their futures."""

    async def outcome(self, span: Span, read: Any) -> bytes | ReadFailure:
        """The outcome of a finished read: all of its bytes, or the failure. Raises errors that no retry can help."""

    async def check_listed(self, span: Span) -> None:
        """Raises StoreChangedError if the object is no longer the one that was listed."""

    def describe(self, span: Span) -> str:
        """The URL, key and byte range of a span, for messages."""


@dataclass(kw_only=True)
class _PendingRead:
    """A span whose first attempt failed or is overdue: when it began, its running attempts, and its failures."""

    span: Span
    began: float
    running: dict[Any, float]  # futures whose outcome is not known yet, with their start times
    attempts: int = 1
    failures: int = 0
    limited_failures: int = 0  # failures with a limit of their own (ReadFailure.attempts)
    answer: str = "none"  # the last answer

    def __str__(self) -> str:
        return f"last answer: {self.answer}; attempt {self.attempts}, after {time.monotonic() - self.began:.1f} s"


class Retrier:
    """Reads spans, with retries; `retries` counts the additional reads so far."""

    def __init__(self, reader: AttemptReader, options: FetchOptions) -> None:
        self.retries = 0
        self._reader, self._options = reader, options
        self._check_s = options.deadline_s / _CHECKS  # between checks for overdue reads
        self._slowest_s, self._largest_bytes = 0.0, 0  # over all successful reads
        self._warned = float("-inf")
        self._random = random.Random()  # leaves the state of the global generator unchanged

    async def read(self, spans: Sequence[Span]) -> list[bytes]:
        """The bytes of each span, in order.

        Raises the error of the first failure that is final, or DeadlineError `deadline_s` after the call.
        """
        began = time.monotonic()
        started: list[Any] = []
        stored: list[bytes] = []
        pending: dict[int, _PendingRead] = {}  # by position in `stored`
        try:
            async with asyncio.timeout(self._options.deadline_s) as deadline:
                started += await self._reader.start(spans)
                start_s = time.monotonic()  # later than `began` by the time that opening the store took
                await settled(started, self._check_s, enough=len(started))
                for position, (span, read) in enumerate(zip(spans, started, strict=True)):
                    succeeded = read.done() and read.exception() is None
                    outcome = await self._reader.outcome(span, read) if succeeded else None
                    if not isinstance(outcome, bytes):
                        pending[position] = _PendingRead(span=span, began=began, running={read: start_s})
                        outcome = b""
                    stored.append(outcome)
                if pending:
                    await self._finish_all(pending, started, stored)
                else:
                    self._record_success(start_s, max(map(len, stored)))
        except TimeoutError as error:
            if not deadline.expired():
                raise
            unstarted = _PendingRead(span=spans[0], began=began, running={})
            raise self._deadline_error(next(iter(pending.values()), unstarted)) from error
        finally:
            for read in started:
                read.cancel()
        return stored

    async def _finish_all(self, pending: dict[int, _PendingRead], started: list[Any], stored: list[bytes]) -> None:
        async def finish(position: int, reading: _PendingRead) -> None:
            stored[position] = await self._finish(reading, started)
            del pending[position]

        try:
            async with asyncio.TaskGroup() as group:
                for position, reading in pending.items():
                    group.create_task(finish(position, reading))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors.exceptions[0].__cause__

    async def _finish(self, reading: _PendingRead, started: list[Any]) -> bytes:
        """Reads a span again until an attempt succeeds; raises once the last allowed attempt has failed."""
        while not isinstance(outcome := await self._next_outcome(reading), bytes):
            if outcome is not None:
                await self._pause(reading, outcome)
            self.retries += 1
            reading.attempts += 1
            (read,) = await self._reader.start([reading.span])
            started.append(read)
            reading.running[read] = time.monotonic()
        return outcome

    async def _next_outcome(self, reading: _PendingRead) -> bytes | ReadFailure | None:
        """The outcome of the first attempt to finish, or None when it is time to start another one beside them."""
        while not (done := [read for read in reading.running if read.done()]):
            if self._is_overdue(reading):
                _log.debug("%s is overdue (%s); reading it again", self._reader.describe(reading.span), str(reading))
                return None
            await settled([*reading.running], self._check_s, enough=1)
        start_s = reading.running.pop(done[0])
        outcome = await self._reader.outcome(reading.span, done[0])
        if isinstance(outcome, bytes):
            self._record_success(start_s, len(outcome))
        return outcome

    def _record_success(self, start_s: float, n_bytes: int) -> None:
        self._slowest_s = max(self._slowest_s, time.monotonic() - start_s)
        self._largest_bytes = max(self._largest_bytes, n_bytes)

    def _is_overdue(self, reading: _PendingRead) -> bool:
        """Whether the latest attempt has taken 3 times as long as the slowest successful read so far.

        This time doubles with each attempt. A read that is much larger than any successful one is never overdue.
        """
        known = self._largest_bytes and reading.span.size <= max(2 * self._largest_bytes, _SMALL_BYTES)
        if not known or reading.attempts > self._options.retries:
            return False
        patience_s = max(self._check_s, 3 * self._slowest_s) * (1 << min(reading.attempts - 1, 8))
        return time.monotonic() - max(reading.running.values()) >= patience_s

    async def _pause(self, reading: _PendingRead, failure: ReadFailure) -> None:
        """Waits before the next attempt; raises if no attempts or no time is left."""
        described, now = self._reader.describe(reading.span), time.monotonic()
        reading.answer = failure.answer
        reading.failures += 1
        reading.limited_failures += failure.attempts is not None
        exhausted = failure.attempts is not None and reading.limited_failures >= failure.attempts
        if reading.attempts > self._options.retries or exhausted:
            if failure.error is TruncatedObjectError:
                await self._reader.check_listed(reading.span)
            raise failure.error(f"{described} {failure.verdict} ({reading}). {failure.advice}")
        seconds = max(failure.wait_s, pause_s(reading.failures, self._random.random()))
        if now + seconds > reading.began + self._options.deadline_s:
            raise self._deadline_error(reading)
        level = logging.DEBUG
        if now - max(reading.began, self._warned) > _WARN_S:
            level, self._warned = logging.WARNING, now
        _log.log(level, "%s failed (%s); retrying in %.1f s", described, str(reading), seconds)
        await asyncio.sleep(seconds)

    def _deadline_error(self, reading: _PendingRead) -> DeadlineError:
        return DeadlineError(
            f"{self._reader.describe(reading.span)} did not finish within deadline_s={self._options.deadline_s} "
            f"({reading}). Is the server overloaded, down or unreachable? A slow link needs a larger deadline_s or "
            "fewer in_flight_bytes"
        )


def pause_s(failures: int, jitter: float) -> float:
    """Seconds to wait after `failures` failures: 0.1 s doubling to 4 s, plus or minus a quarter by `jitter` (0 to 1).

    The first 16 pauses take 46 s in total, plus or minus 5 s: enough to outlast half a minute of SlowDown.
    """
    return float(min(4.0, 0.1 * 2 ** min(failures - 1, 10)) * (0.75 + jitter / 2))


async def settled(reads: Sequence[Any], timeout_s: float | None, *, enough: int) -> None:
    """Waits until `enough` reads are done, one read has failed, or `timeout_s` has passed.

    Uses callbacks instead of `await read`, with which TensorStore prints an error to stderr if a cancelled read ends
    after the loop is closed.
    """
    loop = asyncio.get_running_loop()
    settled = loop.create_future()
    counter = itertools.count(1)  # next() is atomic; reads may finish on any thread

    def settle() -> None:
        if not settled.done():
            settled.set_result(None)

    def on_done(read: Any) -> None:
        if next(counter) == enough or read.cancelled() or read.exception() is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the epoch has ended and nothing is waiting
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
