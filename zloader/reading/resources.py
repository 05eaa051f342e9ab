"""Resources that all loads of an epoch share: threads, buffers, the bound on bytes in flight, and counters."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from zloader.access.file_source import FileSource, ReadClock
from zloader.common.locks import forkable_lock
from zloader.common.options import FetchOptions
from zloader.common.records import ByteSource, Span
from zloader.reading.gates import ByteBudget
from zloader.storage.layout import ObjectIndex

_GROWTH = 1 << 20  # bytes: memory that grows little by little is fresh each time, and fresh memory costs page faults

Bytes = NDArray[np.uint8]
Result = TypeVar("Result")


@dataclass(kw_only=True)
class Counters:
    """Counters of one epoch, as in Statistics. Only the scheduler's thread writes them."""

    gets: int = 0
    spans: int = 0
    retries: int = 0
    bytes_read: int = 0
    chunks_decoded: int = 0
    chunks_from_mirror: int = 0
    bytes_from_mirror: int = 0
    in_flight_bytes: int = 0
    most_in_flight_bytes: int = 0
    decode_s: float = 0.0
    gather_s: float = 0.0


class BufferPool:
    """Reuses the memory of decoded fetches, because fresh memory costs one page fault per 4 KiB. Thread-safe."""

    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []
        self._lock = forkable_lock()  # two epochs of one loader may run at once

    def take(self, n_bytes: int) -> NDArray[np.uint8]:
        """A buffer of at least `n_bytes`, with arbitrary contents."""
        with self._lock:
            for position, buffer in enumerate(self._free):
                if len(buffer) >= n_bytes:
                    return self._free.pop(position)
            if self._free:
                self._free.pop()  # all are too small: drop one instead of keeping both
        return np.empty(n_bytes + n_bytes // 8, np.uint8)

    def __reduce__(self) -> tuple[type[BufferPool], tuple[()]]:
        return BufferPool, ()  # a worker process begins with an empty pool

    def give_back(self, buffer: NDArray[np.uint8]) -> None:
        """Makes a buffer available again, once nothing reads it any more."""
        self._free.append(buffer)


@dataclass
class Resources:
    """Resources that all loads from one store share in an epoch."""

    url: str  # of the store, for messages
    options: FetchOptions
    source: ByteSource
    object_sizes: Mapping[str, int]
    counters: Counters
    threads: ThreadPoolExecutor
    in_flight: ByteBudget  # shared by all stores of the epoch
    bands: ByteBudget  # of rows whose parts are decoded in several threads, on their way to a mirror; shared, too
    own_buffers: threading.local  # of each thread, shared by all stores of the epoch
    indexes: dict[str, dict[int, ObjectIndex]] = field(default_factory=dict)  # that were read, by array and shard

    def __post_init__(self) -> None:
        self._retries = 0  # of the source, as last counted

    def run(self, function: Callable[..., Result], *args: Any) -> asyncio.Future[tuple[Result, float]]:
        """Runs a function in one of the threads: its result, and the seconds it took there."""
        return begun(self.threads, function, *args)

    async def read(self, spans: Sequence[Span]) -> list[bytes]:
        """Reads spans from the source, and counts GETs, bytes and retries."""
        if not spans:  # of rows without values, which need no store
            return []
        with self._counted(spans):
            return await self.source.read(spans)

    async def decode(self, spans: Sequence[Span], decode: Callable[[Sequence[bytes | Bytes]], Result]) -> Result:
        """Reads spans, and decodes them in one of the threads: `decode` gets the bytes of each, and must not keep them.

        A local source is read by the same thread into memory that the thread reuses. The bytes are still in the core's
        cache when they are decoded, and no fresh memory is needed.
        """
        if not isinstance(self.source, FileSource):
            result, seconds = await self.run(decode, await self.read(spans))
        else:
            self.source.prefetch(spans)
            with self._counted(spans):
                clock = ReadClock()
                decoding = self.run(self._read_now, self.source, spans, decode, clock)
                (result, seconds), _ = await self.source.within_deadline(decoding, spans, clock)
        self.counters.decode_s += seconds
        return result

    def _read_now(
        self,
        source: FileSource,
        spans: Sequence[Span],
        decode: Callable[[Sequence[bytes | Bytes]], Result],
        clock: ReadClock,
    ) -> tuple[Result, float]:
        """Reads and decodes on this thread; returns the seconds of decoding, too."""
        buffer = self.own_buffer("stored", sum(span.size for span in spans))
        clock.began = time.monotonic()
        stored = source.read_now(spans, buffer)
        clock.ended = True
        before = time.perf_counter()
        result = decode(stored)
        return result, time.perf_counter() - before

    def own_buffer(self, use: str, n_bytes: int) -> Bytes:
        """Memory for a use that the calling thread keeps, with arbitrary contents."""
        buffer = getattr(self.own_buffers, use, None)
        if buffer is None or len(buffer) < n_bytes:
            buffer = np.empty(-(-n_bytes // _GROWTH) * _GROWTH, np.uint8)
            setattr(self.own_buffers, use, buffer)
        return buffer[:n_bytes]

    @contextlib.contextmanager
    def _counted(self, spans: Sequence[Span]) -> Iterator[None]:
        """Counts the bytes of a read, which are in flight meanwhile, its GETs and its retries."""
        counters, n_bytes = self.counters, sum(span.size for span in spans)
        counters.gets += len(spans)
        counters.bytes_read += n_bytes
        counters.in_flight_bytes += n_bytes
        counters.most_in_flight_bytes = max(counters.most_in_flight_bytes, counters.in_flight_bytes)
        try:
            yield
        finally:
            counters.in_flight_bytes -= n_bytes
            counters.retries += self.source.retries - self._retries
            counters.gets += self.source.retries - self._retries
            self._retries = self.source.retries


def begun(
    threads: ThreadPoolExecutor, function: Callable[..., Result], *args: Any
) -> asyncio.Future[tuple[Result, float]]:
    """Runs a function in a thread: its result, and the seconds it took there.

    The future is no task, which would cost as much again. It may be dropped, even if it has an error.
    """

    def run() -> tuple[Result, float]:
        before = time.perf_counter()
        result = function(*args)
        return result, time.perf_counter() - before

    future = asyncio.get_running_loop().run_in_executor(threads, run)
    future.add_done_callback(_retrieved)
    return future


def _retrieved(future: asyncio.Future[Any]) -> None:
    """Keeps asyncio from logging an error that nobody has asked for."""
    if not future.cancelled():
        future.exception()
