"""Resources that all loads of an epoch share: threads, buffers, the bound on bytes in flight, and counters."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from zloader.common.options import FetchOptions
from zloader.common.records import ByteSource, Span
from zloader.reading.bridge import ByteBudget

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
        self._lock = threading.Lock()  # two epochs of one loader may run at once

    def take(self, n_bytes: int) -> NDArray[np.uint8]:
        """A buffer of at least `n_bytes`, with arbitrary contents."""
        with self._lock:
            for position, buffer in enumerate(self._free):
                if len(buffer) >= n_bytes:
                    return self._free.pop(position)
            if self._free:
                self._free.pop()  # all are too small: drop one instead of keeping both
        return np.empty(n_bytes + n_bytes // 8, np.uint8)

    @property
    def n_free(self) -> int:
        """Buffers that are not in use."""
        return len(self._free)

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
    # Whether this process will need the whole store. Then the chunks beside a block are worth mirroring with it.
    sweeping: bool

    def __post_init__(self) -> None:
        self._retries = 0  # of the source, as last counted
        self.scratch = threading.local()

    async def run(self, function: Callable[..., Result], *args: Any) -> tuple[Result, float]:
        """Runs a function in one of the threads; returns its result and the seconds it took there."""
        return await timed(self.threads, function, *args)

    async def read(self, spans: Sequence[Span]) -> list[bytes]:
        """Reads spans from the source, and counts GETs, bytes and retries."""
        counters, n_bytes = self.counters, sum(span.size for span in spans)
        counters.gets += len(spans)
        counters.bytes_read += n_bytes
        counters.in_flight_bytes += n_bytes
        counters.most_in_flight_bytes = max(counters.most_in_flight_bytes, counters.in_flight_bytes)
        try:
            return await self.source.read(spans)
        finally:
            counters.in_flight_bytes -= n_bytes
            counters.retries += self.source.retries - self._retries
            counters.gets += self.source.retries - self._retries
            self._retries = self.source.retries


async def timed(threads: ThreadPoolExecutor, function: Callable[..., Result], *args: Any) -> tuple[Result, float]:
    """Runs a function in a thread; returns its result and the seconds it took there."""

    def run() -> tuple[Result, float]:
        before = time.perf_counter()
        result = function(*args)
        return result, time.perf_counter() - before

    return await asyncio.get_running_loop().run_in_executor(threads, run)
