"""Fills the mirrors of a dataset ahead of training: with all rows of a matrix, and with obs and obsm.

Rows that are in a mirror already are not read again, so an interrupted run continues where it stopped. Several
processes that warm or train at the same time share the work.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from zloader.caching.rows_file import Held, RowsFile, contents_of
from zloader.common.checks import names_of
from zloader.common.errors import OptionError
from zloader.common.keywords import answers
from zloader.common.options import FetchOptions
from zloader.common.records import Rows
from zloader.dataset.dataset import Dataset, require_dataset
from zloader.reading.bridge import Bridge, Channel
from zloader.reading.matrix_reader import MatrixReader, opened_readers
from zloader.reading.recipe import MatrixPart
from zloader.reading.resources import Counters

_WINDOW_BYTES = 16 << 20  # decoded bytes of the blocks that are read together
_WINDOWS = 16  # windows in flight, enough to keep a fast link busy
_MANY_CHUNKS, _PAUSE_S = 1 << 21, 2.0  # from that many chunks on, progress is reported at most that often


@dataclass(frozen=True, kw_only=True)
class Warmed(Held):
    """The progress of `warm`, for all its matrices together.

    >>> import zloader as zl
    >>> warmed = zl.warm(zl.open_dataset("atlas.zarr", cache="cache"))
    >>> warmed.bytes_held == warmed.bytes_in_all, warmed.full
    (True, False)

    - `chunks`, `chunks_held`: the blocks of rows of the matrices, and how many of them are in the cache.
    - `bytes_in_all`, `bytes_held`: the same in bytes, all of them estimated from those that are there.
    - `gets`, `bytes_read`: requests made and bytes read from the stores by this call.
    - `elapsed_s`: seconds since the call.
    - `full`: whether the cache has reached its limits, or its disk is full.
    """

    gets: int
    bytes_read: int
    elapsed_s: float
    full: bool


@answers
def warm(
    dataset: Dataset,
    *,
    x: Sequence[str] = ("X",),
    options: FetchOptions | None = None,
    on_progress: Callable[[Warmed], None] | None = None,
) -> Warmed:
    """Fills the cache of a dataset: matrices, and the metadata, var, obs columns and obsm arrays of its stores.

    >>> import zloader as zl
    >>> dataset = zl.open_dataset("atlas.zarr", cache="cache")
    >>> warmed = zl.warm(dataset)
    >>> warmed.chunks_held == warmed.chunks
    True
    >>> loader = zl.Loader(dataset)  # now reads from the cache only
    >>> sum(len(minibatch) for minibatch in loader), loader.statistics().gets
    (1000, 0)

    - `dataset`: a dataset opened with a cache. For a view, all rows of its whole dataset are cached.
    - `x`: names of the matrices, as a Loader takes them.
    - `options`: the options of a Loader for reading.
    - `on_progress`: called from time to time with the progress so far, on the calling thread.

    Returns when everything is cached or the cache is full. Raises OptionError for a dataset without a usable cache, for
    a matrix it does not have and for other unusable arguments; FormatError for a matrix that cannot be read; and any
    ReadError.
    """
    require_dataset(dataset)
    x = names_of(x=x)
    if dataset.cache is None:
        raise OptionError("the dataset has no cache to fill: open it with cache=")
    options = options or FetchOptions()
    parts = [part for name in x for part in dataset.matrices.parts(name, options)]
    unmirrored = next((part for part in parts if part.mirror is None and part.matrix.values.n_elements), None)
    if unmirrored is not None:
        raise OptionError(f"cannot fill the mirror of {unmirrored.url}: it cannot be used (see the warning)")
    dataset.observations.cache_all()
    for name in ("X", *x):
        dataset.matrices.var_of(name)  # reading the frame writes it to the cache
    counters, began = Counters(), time.perf_counter()

    def warmed() -> Warmed:
        held, elapsed_s = contents_of(_files(parts)), time.perf_counter() - began
        return Warmed(**held, gets=counters.gets, bytes_read=counters.bytes_read, elapsed_s=elapsed_s)

    async def produce(put: Channel[None]) -> None:
        await _fill_all(parts, options, counters, put)

    # Counting the chunks of a billion rows takes a tenth of a second, and there are a hundred thousand windows.
    many, due = sum(file.form.n_blocks for file in _files(parts)) > _MANY_CHUNKS, began
    for _ in Bridge(produce, ready_bytes=1 << 20, name="zloader-warm"):
        if on_progress is not None and (not many or time.perf_counter() > due):
            on_progress(warmed())
            due = time.perf_counter() + _PAUSE_S
    return warmed()


def _files(parts: Sequence[MatrixPart]) -> list[RowsFile]:
    return [part.mirror.rows for part in parts if part.mirror is not None]


async def _fill_all(parts: Sequence[MatrixPart], options: FetchOptions, counters: Counters, put: Channel[None]) -> None:
    """Reads all blocks, window by window, and puts one item after each window."""
    in_flight = asyncio.Semaphore(_WINDOWS)
    with opened_readers(parts, options, counters, sweeps=True) as readers:
        async with asyncio.TaskGroup() as group:

            async def fill(reader: MatrixReader, window: Rows) -> None:
                try:
                    if reader.mirror is not None and reader.mirror.writable:
                        await reader.fill_mirror(window, turn=1)
                    await put([None], 1)
                finally:
                    in_flight.release()

            for reader, window in itertools.chain.from_iterable(map(_windows, readers)):
                await in_flight.acquire()
                group.create_task(fill(reader, window))


def _windows(reader: MatrixReader) -> Iterator[tuple[MatrixReader, Rows]]:
    """All blocks of a reader's mirror, in windows."""
    if reader.mirror is not None:
        n_blocks = reader.mirror.form.n_blocks
        size = max(1, _WINDOW_BYTES // reader.mirror.form.block_bytes)
        for first in range(0, n_blocks, size):
            yield reader, np.arange(first, min(first + size, n_blocks))
