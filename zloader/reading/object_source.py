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
from zloader.common.errors import DeadlineError, StoreChangedError
from zloader.common.locks import cached_property
from zloader.common.messages import reason_of
from zloader.common.options import FetchOptions
from zloader.common.records import Span
from zloader.reading.answers import MISSING, OTHER_TAG, RANGE_IGNORED, Answer, ReadFailure, denied, refused, truncated

_log = logging.getLogger("zloader")
_PASSING = (408, 425, 429)  # statuses below 500 that pass
_WARN_S = 5.0  # a read retried for longer than this logs a warning, at most one warning per such interval


class RangeReader(Protocol):
    """Starts single ranged GETs of a library, and reports how they ended."""

    async def start(self, spans: Sequence[Span]) -> list[Any]:
        """Begins all reads; returns a future for each span."""

    def answer(self, read: Any) -> Answer | ReadFailure:
        """How a completed read ended."""


@dataclass(kw_only=True)
class _Read:
    """The attempts to read a span: when the first began, their number, the last one, and how it was answered."""

    span: Span
    began: float
    number: int = 1
    attempt: Any = None
    answer: str = "none"
    stored: bytes | None = None  # once it has succeeded

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
        reads = [_Read(span=span, began=began) for span in spans]
        try:
            async with asyncio.timeout(self._options.deadline_s) as deadline, asyncio.TaskGroup() as group:
                for read, attempt in zip(reads, await self._reader.start(spans), strict=True):
                    read.attempt = attempt
                await settled([read.attempt for read in reads])
                for read in reads:  # without a task for each, as most have succeeded
                    succeeded = read.attempt.done() and read.attempt.exception() is None
                    outcome = await self._outcome(read) if succeeded else None
                    if isinstance(outcome, bytes):
                        read.stored = outcome
                    else:
                        group.create_task(self._finish(read))
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise self._deadline_error(next(read for read in reads if read.stored is None)) from error
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors.exceptions[0].__cause__
        finally:
            for read in reads:
                if read.attempt is not None:
                    read.attempt.cancel()
        return [read.stored or b"" for read in reads]

    async def _finish(self, read: _Read) -> None:
        """Reads a span again until an attempt succeeds; raises once the last allowed attempt has failed."""
        while True:
            await settled([read.attempt])
            outcome = await self._outcome(read)
            if isinstance(outcome, bytes):
                read.stored = outcome
                return
            await self._pause(read, outcome)
            read.number += 1
            self.retries += 1
            (read.attempt,) = await self._reader.start([read.span])

    async def _pause(self, read: _Read, failure: ReadFailure) -> None:
        """Waits before the next attempt; raises if no attempts or no time is left."""
        described, now = self.describe(read.span), time.monotonic()
        read.answer = failure.answer
        if read.number > self._options.retries or not failure.passes:
            raise failure.error(f"{described} {failure.verdict} ({read}). {failure.advice}")
        seconds = max(failure.wait_s, pause_s(read.number, self._random.random()))
        if now + seconds > read.began + self._options.deadline_s:
            raise self._deadline_error(read)
        level = logging.DEBUG
        if now - max(read.began, self._warned) > _WARN_S:
            level, self._warned = logging.WARNING, now
        _log.log(level, "%s failed (%s); retrying in %.1f s", described, read, seconds)
        await asyncio.sleep(seconds)

    def _deadline_error(self, read: _Read) -> DeadlineError:
        return DeadlineError(
            f"{self.describe(read.span)} did not finish within deadline_s={self._options.deadline_s} ({read}). "
            "Is the server overloaded, down or unreachable? A slow link needs a larger deadline_s or fewer "
            "in_flight_bytes"
        )

    async def _outcome(self, read: _Read) -> bytes | ReadFailure:
        """The bytes of a completed attempt, or its failure. Raises StoreChangedError."""
        span, answer = read.span, self._reader.answer(read.attempt)
        if isinstance(answer, Answer) and len(answer.stored) != span.size:
            answer = truncated(f"{len(answer.stored)} of {span.size} bytes")
        if isinstance(answer, ReadFailure):
            if answer.changed:
                await self._check_listed(span)
            return answer
        if (known := self._tags.get(span.key)) != answer.tag:
            if known is not None:
                raise self._changed(span)
            # A tag ends in the ETag. If that is not the listed ETag, ask the server again.
            listed = self._objects[span.key].tag.encode()
            if not (listed and answer.tag.endswith(listed)):
                await self._check_listed(span)
            self._tags[span.key] = answer.tag
        return answer.stored

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

    @cached_property
    def _reader(self) -> RangeReader:
        """Opened by the first read, in the process that iterates, so that no client is in use before a fork."""
        return _reader(self._location, self._objects)

    def describe(self, span: Span) -> str:
        """URL, key and byte range, for messages."""
        return span.read_from(self._location.url)


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

    def answer(self, read: Any) -> Answer | ReadFailure:
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
        return refused(answer)


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
