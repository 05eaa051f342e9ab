"""Reads spans of local files with pread; a ByteSource that a thread can also read by itself.

TensorStore's file driver returns the same bytes but costs several times the CPU time, for its thread pool, freshly
allocated memory and one more copy: 0.35 s of the 1.25 s that an epoch of 100 000 rows takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from zloader.access.location import Location
from zloader.access.stored_objects import StoredObject, stored_file
from zloader.common import page_cache
from zloader.common.errors import (
    AccessDeniedError,
    DeadlineError,
    MissingObjectError,
    ReadError,
    StoreChangedError,
    StoreError,
    TruncatedObjectError,
)
from zloader.common.file_systems import has_stable_inodes
from zloader.common.locks import cached_property
from zloader.common.options import FetchOptions
from zloader.common.records import Span

Result = TypeVar("Result")


@dataclass
class ReadClock:
    """When a read in another thread `began`, in seconds of time.monotonic, and whether it has `ended`."""

    began: float | None = None
    ended: bool = False

    def left_s(self, deadline_s: float) -> float:
        """The seconds until the read has taken too long, if it is under way; all of them, if it is not."""
        if self.began is None or self.ended:
            return deadline_s
        return self.began + deadline_s - time.monotonic()


class FileSource:
    """Reads spans of the files below a local location. Files are closed after each read, and reads are not retried."""

    retries = 0

    def __init__(
        self,
        location: Location,
        objects: Mapping[str, StoredObject],
        options: FetchOptions,
    ) -> None:
        """`objects` is the listing from when the store was opened; a file that differs from it is an error."""
        self._location, self._objects, self._options = location, objects, options

    async def read(self, spans: Sequence[Span]) -> list[bytes]:
        """The bytes of each span, in order.

        Raises ReadError, AccessDeniedError or StoreChangedError; the message names the path, key and byte range.
        """
        reading = asyncio.get_running_loop().run_in_executor(None, self._read, spans)
        return await self.within_deadline(reading, spans, ReadClock(began=time.monotonic()))

    def _read(self, spans: Sequence[Span]) -> list[bytes]:
        buffer = np.empty(sum(span.size for span in spans), np.uint8)
        return [content.tobytes() for content in self.read_now(spans, buffer)]

    async def within_deadline(self, reading: Awaitable[Result], spans: Sequence[Span], clock: ReadClock) -> Result:
        """Waits for a read of `spans` in another thread. Raises DeadlineError.

        Only the read counts. A busy machine may take minutes until the thread begins, or to compile the loops that use
        the bytes.
        """
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def check() -> None:
            nonlocal timer
            left_s = clock.left_s(self._options.deadline_s)
            if left_s > 0:
                timer = loop.call_later(left_s, check)
            else:
                limit.reschedule(loop.time())

        timer = loop.call_later(self._options.deadline_s, check)
        try:
            async with asyncio.timeout(None) as limit:
                return await reading
        except TimeoutError as error:
            raise DeadlineError(
                f"{self._at(spans[0])} did not finish within deadline_s={self._options.deadline_s}: "
                "is the disk responding? A slow disk needs a larger deadline_s"
            ) from error
        finally:
            timer.cancel()

    def prefetch(self, spans: Sequence[Span]) -> None:
        """Tells the kernel to load spans that will be read soon, unless they are in memory."""
        with contextlib.suppress(OSError):  # `read_now` reports it
            for key, group in groupby(spans, lambda span: span.key):
                of_file = list(group)
                starts, sizes = np.array([span.start for span in of_file]), np.array([span.size for span in of_file])
                with self._opened(key) as file:
                    page_cache.prefetch(file, starts, starts + sizes)

    def read_now(self, spans: Sequence[Span], buffer: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """Like `read`, on the calling thread and without a deadline. The result is a part of `buffer` per span."""
        ends = np.cumsum([span.size for span in spans]).tolist()
        found = [buffer[end - span.size : end] for span, end in zip(spans, ends, strict=True)]
        for _, group in groupby(zip(spans, found, strict=True), lambda each: each[0].key):
            self._read_file(list(group))
        return found

    def _read_file(self, reads: Sequence[tuple[Span, NDArray[np.uint8]]]) -> None:
        """Reads several spans of one file."""
        key = reads[0][0].key
        try:
            with self._opened(key) as file:
                n_read = [os.preadv(file, [into.data], span.start) for span, into in reads]
                status = os.fstat(file)
        except OSError as error:
            raise self._translated(error, reads[0][0]) from error
        # The status is taken after reading, so that a change during the read is also detected.
        if stored_file(status, stable_inode=self._stable_inodes) != self._objects[key]:
            raise StoreChangedError(
                f"{self._at(reads[0][0])}: the file, its permissions or its times have changed since the store was "
                f"opened. Open the store again"
            )
        for (span, _), n_bytes in zip(reads, n_read, strict=True):
            if n_bytes != span.size:
                raise TruncatedObjectError(
                    f"{self._at(span)} returned {n_bytes} of {span.size} bytes: the file is truncated. "
                    "Restore it or convert the store again"
                )

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[int]:
        file = os.open(f"{self._location.path}/{key}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield file
        finally:
            os.close(file)

    @cached_property
    def _stable_inodes(self) -> bool:
        return has_stable_inodes(self._location.path)

    def _translated(self, error: OSError, span: Span) -> StoreError:
        if isinstance(error, FileNotFoundError):
            return MissingObjectError(f"{self._at(span)}: there is no such file. Was the store changed or deleted?")
        if isinstance(error, PermissionError):
            return AccessDeniedError(f"{self._at(span)} was denied: {error}. Change the file's permissions")
        return ReadError(f"{self._at(span)} failed: {error}. Check the disk")

    def _at(self, span: Span) -> str:
        return span.read_from(self._location.url)
