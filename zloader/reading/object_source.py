"""Reads the bytes of chunks of remote stores, one ranged GET per span.

A RangeReader makes single attempts through TensorStore (tensorstore_reader.py: S3) or obstore (all other schemes). Here
they are retried after pauses, until the deadline, and each answer is compared with the object that was listed. A read
that stalls ends when its connection is closed, as TensorStore and obstore do once it has received nothing for 20 s, or
at the deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from zloader.access.location import Location
from zloader.access.scheme import ReadRange, is_denial, status_of, wait_s
from zloader.access.stored_objects import StoredObject
from zloader.common.concurrent_calls import aside
from zloader.common.errors import DeadlineError, StoreChangedError, TruncatedObjectError
from zloader.common.locks import cached_property
from zloader.common.messages import reason_of
from zloader.common.options import FetchOptions
from zloader.common.records import Span
from zloader.reading.answers import MISSING, OTHER_TAG, RANGE_IGNORED, Answer, ReadFailure, denied, truncated

_log = logging.getLogger("zloader")
_PASSING = (408, 425, 429)  # statuses below 500 that pass
_WARN_S = 5.0  # a read retried for longer than this logs a warning, at most one warning per such interval


class RangeReader(Protocol):
    """Starts single ranged GETs of a library, and reports how they ended."""

    async def start(self, spans: Sequence[Span]) -> list[Any]:
        """Begins all reads; returns a future for each span."""

    def answer(self, span: Span, read: Any) -> Answer | ReadFailure:
        """How a completed read ended."""


@dataclass(kw_only=True)
class _Attempts:
    """The attempts to read a span: when the first began, their number, and the last answer."""

    span: Span
    began: float
    number: int = 1
    limited: int = 0  # those whose failure has a limit of its own (ReadFailure.attempts)
    answer: str = "none"

    def __str__(self) -> str:
        return f"last answer: {self.answer}; attempt {self.number}, after {time.monotonic() - self.began:.1f} s"


class ObjectSource:
    """A ByteSource that reads a remote location's objects.

    Nothing is opened before the first `read`, which has to happen in the process that iterates.
    """

    def __init__(
        self,
        location: Location,
        objects: Mapping[str, StoredObject],
        options: FetchOptions,
    ) -> None:
        """`objects` were listed when the store was opened. An object that has changed since then raises an error."""
        self._location, self._objects, self._options = location, objects, options
        self._tags: dict[str, bytes] = {}  # the answers' tag of each object that was read
        self.retries = 0  # so far, over all reads
        self._warned = float("-inf")
        self._random = random.Random()  # leaves the state of the global generator unchanged

    async def read(self, spans: Sequence[Span]) -> list[bytes]:
        """The bytes of each span, in order.

        Raises the error of the first failure that is final (ReadError, AccessDeniedError or StoreChangedError), or
        DeadlineError `deadline_s` after the call, with URL, key and byte range.
        """
        began = time.monotonic()
        started: list[Any] = []
        stored: list[bytes] = []
        pending: dict[int, _Attempts] = {}  # by position in `stored`
        try:
            async with asyncio.timeout(self._options.deadline_s) as deadline:
                started += await self._reader.start(spans)
                await settled(started)
                for position, (span, read) in enumerate(zip(spans, started, strict=True)):
                    succeeded = read.done() and read.exception() is None
                    outcome = await self._outcome(span, read) if succeeded else None
                    if not isinstance(outcome, bytes):
                        pending[position] = _Attempts(span=span, began=began)
                        outcome = b""
                    stored.append(outcome)
                if pending:
                    await self._finish_all(pending, started, stored)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            late = (span for span, read in zip(spans, started, strict=False) if not read.done())
            attempts = next(iter(pending.values()), None) or _Attempts(span=next(late, spans[0]), began=began)
            raise self._deadline_error(attempts) from error
        finally:
            for read in started:
                read.cancel()
        return stored

    async def _finish_all(self, pending: dict[int, _Attempts], started: list[Any], stored: list[bytes]) -> None:
        async def finish(position: int, attempts: _Attempts) -> None:
            stored[position] = await self._finish(attempts, started[position], started)
            del pending[position]

        try:
            async with asyncio.TaskGroup() as group:
                for position, attempts in pending.items():
                    group.create_task(finish(position, attempts))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors.exceptions[0].__cause__

    async def _finish(self, attempts: _Attempts, read: Any, started: list[Any]) -> bytes:
        """Reads a span again until an attempt succeeds; raises once the last allowed attempt has failed."""
        while True:
            await settled([read])
            outcome = await self._outcome(attempts.span, read)
            if isinstance(outcome, bytes):
                return outcome
            await self._pause(attempts, outcome)
            attempts.number += 1
            self.retries += 1
            (read,) = await self._reader.start([attempts.span])
            started.append(read)

    async def _pause(self, attempts: _Attempts, failure: ReadFailure) -> None:
        """Waits before the next attempt; raises if no attempts or no time is left."""
        described, now = self.describe(attempts.span), time.monotonic()
        attempts.answer = failure.answer
        attempts.limited += failure.attempts is not None
        exhausted = failure.attempts is not None and attempts.limited >= failure.attempts
        if attempts.number > self._options.retries or exhausted:
            if failure.error is TruncatedObjectError:
                await self._check_listed(attempts.span)
            raise failure.error(f"{described} {failure.verdict} ({attempts}). {failure.advice}")
        seconds = max(failure.wait_s, pause_s(attempts.number, self._random.random()))
        if now + seconds > attempts.began + self._options.deadline_s:
            raise self._deadline_error(attempts)
        level = logging.DEBUG
        if now - max(attempts.began, self._warned) > _WARN_S:
            level, self._warned = logging.WARNING, now
        _log.log(level, "%s failed (%s); retrying in %.1f s", described, attempts, seconds)
        await asyncio.sleep(seconds)

    def _deadline_error(self, attempts: _Attempts) -> DeadlineError:
        return DeadlineError(
            f"{self.describe(attempts.span)} did not finish within deadline_s={self._options.deadline_s} ({attempts}). "
            "Is the server overloaded, down or unreachable? A slow link needs a larger deadline_s or fewer "
            "in_flight_bytes"
        )

    async def _outcome(self, span: Span, read: Any) -> bytes | ReadFailure:
        """The bytes of a completed read, or its failure. Raises StoreChangedError."""
        answer = self._reader.answer(span, read)
        if answer is OTHER_TAG:
            await self._check_listed(span)
        if isinstance(answer, ReadFailure):
            return answer
        if self._tags.get(span.key) != answer.tag:
            await self._check_unchanged(span, answer.tag)
        return (
            answer.stored
            if len(answer.stored) == span.size
            else truncated(f"{len(answer.stored)} of {span.size} bytes")
        )

    @cached_property
    def _reader(self) -> RangeReader:
        """Opened by the first read, in the process that iterates, so that no client is in use before a fork."""
        return _reader(self._location, self._objects)

    def describe(self, span: Span) -> str:
        """URL, key and byte range, for messages."""
        return span.read_from(self._location.url)

    # ---- has the object changed?

    async def _check_unchanged(self, span: Span, tag: bytes) -> None:
        """Raises StoreChangedError if the object has changed since it was listed, or since an earlier read."""
        if self._tags.get(span.key, tag) != tag:
            raise self._changed(span)
        # A tag ends in the ETag. If that is not the listed ETag, ask the server again.
        listed = self._objects[span.key].tag.encode()
        if not (listed and tag.endswith(listed)):
            await self._check_listed(span)
        self._tags[span.key] = tag

    async def _check_listed(self, span: Span) -> None:
        """Raises StoreChangedError if the object is no longer the one that was listed, or MissingObjectError."""
        found = await aside(self._location.find_object, span.key)
        if found is None:
            raise MISSING.error(f"{self.describe(span)} {MISSING.verdict}: {MISSING.answer}. {MISSING.advice}")
        if found != self._objects[span.key]:
            raise self._changed(span)

    def _changed(self, span: Span) -> StoreChangedError:
        return StoreChangedError(
            f"{self.describe(span)}: the object has changed since the store was opened. Open the store again"
        )


class _ObstoreReader:
    """Reads through obstore: all schemes but s3://, and buckets of S3 whose requester pays.

    Asks for objects that still have their listed tags, until a server is found to refuse one that has not changed.
    """

    def __init__(self, location: Location, objects: Mapping[str, StoredObject], read_range: ReadRange) -> None:
        self._location, self._objects, self._read_range = location, objects, read_range
        self._matches = True

    async def start(self, spans: Sequence[Span]) -> list[Any]:
        return [asyncio.ensure_future(self._read(span)) for span in spans]

    def _read(self, span: Span) -> Awaitable[tuple[str, bytes]]:
        tag = self._objects[span.key].tag if self._matches else ""
        return self._read_range(span.key, span.start, span.stop, tag)

    def answer(self, span: Span, read: Any) -> Answer | ReadFailure:
        if (error := read.exception()) is not None:
            return self._failure(error)
        tag, stored = read.result()
        return Answer(tag=tag.encode(), stored=stored)

    def _failure(self, error: BaseException) -> ReadFailure:
        from obstore.exceptions import NotSupportedError, PreconditionError

        answer, status = reason_of(error), status_of(error)
        if is_denial(error):
            return denied(answer, self._location.kind.advice)
        if isinstance(error, FileNotFoundError):
            return MISSING
        if isinstance(error, NotSupportedError):
            return RANGE_IGNORED
        if status == 416:
            return truncated(answer)
        if isinstance(error, PreconditionError):
            self._matches = False  # the object is looked up, and has changed or is read again
            return OTHER_TAG
        if "redirect" not in answer and (status is None or status >= 500 or status in _PASSING):
            return ReadFailure(answer=answer, wait_s=wait_s(error))
        return ReadFailure(answer=answer, advice="A retry would not help", attempts=1)


def _reader(location: Location, objects: Mapping[str, StoredObject]) -> RangeReader:
    """The library that reads a location is imported here, so that a process loads only that one."""
    if (read_range := location.kind.read_range()) is not None:
        return _ObstoreReader(location, objects, read_range)
    from zloader.reading.tensorstore_reader import TensorStoreReader

    return TensorStoreReader(location)


# ---- waiting


def pause_s(failures: int, jitter: float) -> float:
    """Seconds to wait after `failures` failures: 0.1 s doubling to 4 s, plus or minus a quarter by `jitter` (0 to 1).

    The first 16 pauses take 46 s in total, plus or minus 5 s: enough to outlast half a minute of SlowDown.
    """
    return float(min(4.0, 0.1 * 2 ** min(failures - 1, 10)) * (0.75 + jitter / 2))


async def settled(reads: Sequence[Any]) -> None:
    """Waits until all reads are done, or one has failed.

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
        if next(counter) == len(reads) or read.cancelled() or read.exception() is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the epoch has ended and nothing is waiting
                loop.call_soon_threadsafe(settle)

    for read in reads:
        read.add_done_callback(on_done)
    if reads:
        await settled
