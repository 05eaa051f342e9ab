"""Fills mirrors ahead of training: every chunk of a matrix is read once and kept, and so are all columns of obs.

Whatever is there already is not read again, so that an interrupted run goes on where it was; several processes that do
the same share the work, as they do while training.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from zloader.caching.mirror import MirrorArray, holding
from zloader.common.checks import names_of, require_count
from zloader.common.errors import OptionError
from zloader.common.options import FetchOptions
from zloader.common.records import ByteSource, Rows, Span
from zloader.dataset.dataset import Dataset, require_dataset
from zloader.reading.bridge import Bridge, Put
from zloader.reading.matrix_parts import MatrixPart, opened_readers
from zloader.reading.reader import ArrayReader
from zloader.reading.resources import Counters
from zloader.storage.layout import ArrayLayout

_WINDOW_BYTES = 16 << 20  # decoded, brought as one; several at once keep a link busy
_WINDOWS = 16


@dataclass(frozen=True, kw_only=True)
class Warmed:
    """What `warm` has done so far: chunks and decoded bytes held and in all, and what it read for that.

    `full` says that the cache's limits, or its disk, allow no more.
    """

    chunks: int
    chunks_held: int
    bytes_held: int
    bytes_in_all: int
    gets: int
    bytes_read: int
    elapsed_s: float
    full: bool


def warm(
    dataset: Dataset,
    *,
    x: Sequence[str] = ("X",),
    bytes_per_s: int | None = None,
    options: FetchOptions | None = None,
    on_progress: Callable[[Warmed], None] | None = None,
) -> Warmed:
    """Brings matrices, and the metadata, var, obs columns and obsm of their stores, into the dataset's cache.

    `x` are names such as Loader takes; `bytes_per_s` bounds what is read from the store. `on_progress` is called now
    and then, on the calling thread.
    Raises OptionError for a dataset without a cache or names that it does not have; any ReadError.
    """
    require_dataset(dataset)
    x = names_of(x=x)
    if dataset.cache is None:
        raise OptionError("there is no cache to fill: open the dataset with cache=")
    if bytes_per_s is not None:
        require_count(bytes_per_s=bytes_per_s)
    options = options or FetchOptions()
    parts = [part for name in x for part in dataset.parts(name, options)]
    unmirrored = next((part for part in parts if part.mirror is None), None)
    if unmirrored is not None:
        raise OptionError(f"the mirror of {unmirrored.url} cannot be used (see the warning): nothing can be filled")
    dataset.keep_columns()
    dataset.var  # noqa: B018 - reading is keeping
    counters, began = Counters(), time.perf_counter()

    def warmed() -> Warmed:
        held = holding(_arrays(parts))
        return Warmed(
            chunks=held.chunks,
            chunks_held=held.chunks_held,
            bytes_held=held.bytes_held,
            bytes_in_all=held.bytes_in_all,
            gets=counters.gets,
            bytes_read=counters.bytes_read,
            elapsed_s=time.perf_counter() - began,
            full=held.full,
        )

    async def produce(put: Put[None]) -> None:
        await _bring_all(_throttled(parts, bytes_per_s), options, counters, put)

    for _ in Bridge(produce, ready_bytes=1 << 20, name="zloader-warm"):
        if on_progress is not None:
            on_progress(warmed())
    return warmed()


def _arrays(parts: Sequence[MatrixPart]) -> Iterator[MirrorArray]:
    for part in parts:
        if part.mirror is not None:
            yield from part.mirror.arrays.values()


async def _bring_all(parts: Sequence[MatrixPart], options: FetchOptions, counters: Counters, put: Put[None]) -> None:
    """Brings all chunks, window by window; puts something after each."""
    ahead = asyncio.Semaphore(_WINDOWS)
    with opened_readers(parts, options, counters, sweeping=True) as readers:
        async with asyncio.TaskGroup() as group:

            async def bring(reader: ArrayReader, mirror: MirrorArray, window: Rows) -> None:
                try:
                    if mirror.writable:
                        await reader.bring(window, turn=1)
                    await put([None], 1)
                finally:
                    ahead.release()

            arrays = []
            for part, of_part in zip(parts, readers, strict=True):
                assert part.mirror is not None
                for reader, array in zip(of_part, part.matrix.arrays, strict=True):
                    arrays.append(_windows(array, reader, part.mirror.arrays[array.path]))
            # All arrays side by side: where there is no room for all, whole rows are held, not one array of them.
            for _, window, reader, mirror in heapq.merge(*arrays, key=lambda window: window[0]):
                await ahead.acquire()
                group.create_task(bring(reader, mirror, window))


def _windows(
    array: ArrayLayout, reader: ArrayReader, mirror: MirrorArray
) -> Iterator[tuple[float, Rows, ArrayReader, MirrorArray]]:
    """All chunks of an array, in runs, with the share of the array that lies before each."""
    size = max(1, _WINDOW_BYTES // (array.chunk_elements * array.dtype.itemsize))
    for first in range(0, array.n_chunks, size):
        yield first / array.n_chunks, np.arange(first, min(first + size, array.n_chunks)), reader, mirror


def _throttled(parts: Sequence[MatrixPart], bytes_per_s: int | None) -> Sequence[MatrixPart]:
    if bytes_per_s is None:
        return parts
    pace = _Pace(bytes_per_s)
    return [dataclasses.replace(part, source=_PacedSource(part.source, pace)) for part in parts]


class _Pace:
    """Spreads bytes over time: each amount begins when those before it should have ended."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    async def wait(self, n_bytes: int) -> None:
        now = time.monotonic()
        begin = max(now, self._free_s)
        self._free_s = begin + n_bytes / self._bytes_per_s
        await asyncio.sleep(begin - now)


@dataclass(frozen=True)
class _PacedSource:
    """A source whose reads keep to a pace."""

    source: ByteSource
    pace: _Pace

    @property
    def retries(self) -> int:
        return self.source.retries

    async def read(self, spans: Sequence[Span]) -> list[bytes]:
        """As the source's, each span when its turn has come."""
        return list(await asyncio.gather(*map(self._read_one, spans)))

    async def _read_one(self, span: Span) -> bytes:
        await self.pace.wait(span.size)
        (stored,) = await self.source.read([span])
        return stored
