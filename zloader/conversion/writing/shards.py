"""Writes the shards of an array sequentially, and reads shards back with every checksum verified.

Several threads encode chunks, and one thread per array stores them in order. So neither a decoded nor an encoded shard
is ever complete in memory.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np
import zarr
from numpy.typing import NDArray

from zloader.access.location import Location
from zloader.common.errors import CorruptChunkError, StoreError, TruncatedObjectError
from zloader.common.options import MiB
from zloader.conversion.writing.encode import ChunkEncoder, shard_index
from zloader.conversion.writing.object_writer import ObjectWriter, run_to_completion, translated
from zloader.storage.decode import Decoder
from zloader.storage.layout import ArrayLayout
from zloader.storage.metadata import layout_of
from zloader.storage.placement import ABSENT

_MAX_ENCODING = 16
_JOB_ELEMENTS = 1 << 19  # encoded per job: a few chunks, so that the overhead per job is negligible
_READ_BYTES = 8 * MiB  # per read, when a shard is read back


@dataclass(frozen=True, kw_only=True)
class Threads:
    """The threads of one conversion. Indices, data and indptr may be stored at the same time.

    `ended` is set when the results of long jobs are no longer needed.
    """

    encoding: ThreadPoolExecutor
    storing: ThreadPoolExecutor
    ended: threading.Event


@contextlib.contextmanager
def threads(at: str) -> Iterator[Threads]:
    """As many threads as a single reader keeps busy. When the context ends, they stop and pending jobs are dropped.

    `at` names the destination in errors.
    """
    encoding = ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_ENCODING), thread_name_prefix="zloader-encode")
    storing = ThreadPoolExecutor(3, thread_name_prefix="zloader-store")
    ended = threading.Event()
    try:
        yield Threads(encoding=encoding, storing=storing, ended=ended)
    finally:
        ended.set()
        for pool in (encoding, storing):
            run_to_completion(partial(pool.shutdown, cancel_futures=True), at)


class ShardWriter:
    """Fills a sharded zarr array sequentially, starting at `first_shard`. Each shard is stored once, complete.

    A context manager. If it is left by an error, an incomplete shard is dropped. It keeps the elements of the last two
    `append` calls in memory, and their encoded chunks.
    """

    def __init__(
        self,
        array: zarr.Array[Any],
        encoder: ChunkEncoder,
        pool: Threads,
        create_object: Callable[[str], ObjectWriter],
        *,
        first_shard: int = 0,
    ) -> None:
        assert array.shards is not None
        self._array, self._encoder, self._threads, self._create_object = array, encoder, pool, create_object
        self._chunk = math.prod(array.chunks)
        self._chunks_per_shard = array.shards[0] // array.chunks[0]
        self._tail = np.empty(0, encoder.dtype)  # elements of an incomplete chunk
        self._encoding: list[Future[list[bytes]]] = []
        self._storing: Future[None] | None = None
        self._shard = first_shard
        self._object: ObjectWriter | None = None
        self._sizes: list[int] = []  # of the chunks in the object, in bytes
        self._lock = threading.Lock()  # held to write the object, and to drop it
        self._dropped = False
        self.n_elements = min(first_shard * self._chunks_per_shard * self._chunk, math.prod(array.shape))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._close()
        finally:
            run_to_completion(self._drop, self._array.path)

    def append(self, elements: NDArray[Any]) -> None:
        """Appends elements, a flat array that must not be changed afterwards."""
        self._collect()
        self.n_elements += len(elements)
        missing = self._chunk - len(self._tail)
        if len(elements) < missing:
            self._tail = np.concatenate([self._tail, elements.astype(self._encoder.dtype)])
            return
        if len(self._tail):
            self._encode(np.concatenate([self._tail, elements[:missing].astype(self._encoder.dtype)]))
            elements = elements[missing:]
        whole = len(elements) - len(elements) % self._chunk
        together = max(1, _JOB_ELEMENTS // self._chunk) * self._chunk
        for start in range(0, whole, together):
            self._encode(elements[start : min(start + together, whole)])
        self._tail = elements[whole:].astype(self._encoder.dtype)

    def _close(self) -> None:
        if len(self._tail):
            self._encode(self._tail)
        self._collect(last=True)
        if self._storing is not None:
            self._storing.result()

    def _encode(self, elements: NDArray[Any]) -> None:
        self._encoding.append(self._threads.encoding.submit(self._encoded, elements))

    def _encoded(self, elements: NDArray[Any]) -> list[bytes]:
        starts = range(0, len(elements), self._chunk)
        return [self._encoder.encode(elements[start : start + self._chunk], self._chunk) for start in starts]

    def _collect(self, *, last: bool = False) -> None:
        """Waits for the chunks being encoded, and submits them to be stored while the next chunks are encoded."""
        chunks = [chunk for job in self._encoding for chunk in job.result()]
        self._encoding = []
        if self._storing is not None:
            self._storing.result()
        self._storing = self._threads.storing.submit(self._store, chunks, last)

    def _drop(self) -> None:
        """Stops storing after the current chunk, and drops an incomplete shard."""
        self._dropped = True
        with self._lock, contextlib.suppress(StoreError):  # the original error matters more
            if self._object is not None:
                self._object.abort()

    def _store(self, chunks: list[bytes], last: bool) -> None:
        with self._lock:
            self._store_chunks(chunks)
            if last and self._object is not None and not self._dropped:
                self._finish_shard(self._object)

    def _store_chunks(self, chunks: list[bytes]) -> None:
        for chunk in chunks:
            if self._dropped:
                return
            if self._object is None:
                coordinates = (self._shard, *[0] * (self._array.ndim - 1))
                key = f"{self._array.path}/{self._array.metadata.encode_chunk_key(coordinates)}"
                self._object = self._create_object(key)
            self._object.write(chunk)
            self._sizes.append(len(chunk))
            if len(self._sizes) == self._chunks_per_shard:
                self._finish_shard(self._object)

    def _finish_shard(self, shard: ObjectWriter) -> None:
        shard.write(shard_index(self._sizes, self._chunks_per_shard))
        shard.commit()
        self._object, self._sizes = None, []
        self._shard += 1


def stored_layout(array: zarr.Array[Any]) -> ArrayLayout:
    """The layout of an array whose objects must all exist."""
    return layout_of(array, absent_is_fill=False)


def read_shard(location: Location, layout: ArrayLayout, shard: int, size: int) -> Iterator[NDArray[Any]]:
    """The elements of every chunk of a stored shard of `size` bytes, in order, with checksums verified.

    Raises CorruptChunkError or TruncatedObjectError with the object and the chunk, or translated file system errors.
    """
    for elements in scan_shard(location, layout, shard, size):
        if isinstance(elements, CorruptChunkError):
            raise elements
        yield elements


def scan_shard(
    location: Location, layout: ArrayLayout, shard: int, size: int | None
) -> Iterator[NDArray[Any] | CorruptChunkError]:
    """Like `read_shard`, but yields the error of a damaged chunk instead of its elements, and continues.

    `size` is None if the object does not exist. If the layout allows it, absent chunks are fill values.
    """
    decoder = Decoder(layout)
    first, key = shard * layout.chunks_per_shard, layout.shard_key(shard)
    n_chunks = min(layout.n_chunks - first, layout.chunks_per_shard)
    table = _read_index(location, layout, shard, size)[:n_chunks]
    for begin, end in _reads(table):
        stored = np.empty(0, np.uint8)
        if table[begin, 0] != ABSENT:
            start, stop = int(table[begin, 0]), int(table[end - 1].sum())
            stored = np.frombuffer(_read(location, key, start, stop), np.uint8)
        for chunk in range(begin, end):
            at = first + chunk
            out = np.empty(min(layout.chunk_elements, layout.n_elements - at * layout.chunk_elements), layout.dtype)
            if table[begin, 0] == ABSENT:
                out[:] = layout.fill_value
            else:
                offset = int(table[chunk, 0] - table[begin, 0])
                try:
                    decoder.decode(stored[offset : offset + int(table[chunk, 1])], out)
                    layout.check_bounds(out)
                except CorruptChunkError as error:
                    yield CorruptChunkError(f"{location.url}: chunk {chunk} of {key}: {error}")
                    continue
            yield out


def _reads(table: NDArray[np.uint64]) -> Iterator[tuple[int, int]]:
    """Groups chunks `[begin, end)` into reads: consecutive stored chunks of up to 8 MiB, or absent chunks."""
    begin, previous, start = 0, (ABSENT, 0), 0
    for chunk, (offset, size) in enumerate(table.tolist()):
        if previous[0] == ABSENT or offset == ABSENT:
            continues = previous[0] == offset
        else:
            continues = offset >= sum(previous) and offset + size <= start + _READ_BYTES
        if chunk and not continues:
            yield begin, chunk
        if not chunk or not continues:
            begin, start = chunk, offset
        previous = (offset, size)
    if len(table):
        yield begin, len(table)


def _read_index(location: Location, layout: ArrayLayout, shard: int, size: int | None) -> NDArray[np.uint64]:
    """The offset and size of each chunk of a shard. All chunks must exist, in order, unless they may be absent."""
    key = layout.shard_key(shard)
    try:
        found = layout.find_index(shard, size, location.url)
        if isinstance(found, np.ndarray):
            return found
        assert size is not None
        table = layout.placement.parse(_read(location, key, found.start, found.stop), shard, size)
    except CorruptChunkError as error:
        raise CorruptChunkError(f"{location.url}: {error}") from error
    here = table[: layout.n_chunks - shard * layout.chunks_per_shard]
    disordered = (here == ABSENT).any() or (np.diff(here[:, 0].astype(np.int64)) <= 0).any()
    if disordered and not layout.absent_is_fill:
        raise CorruptChunkError(
            f"{location.url}: {key} lacks chunks, or has them out of order: the object was not written completely"
        )
    return table


def _read(location: Location, key: str, start: int, stop: int) -> bytes:
    with translated(f"read {key} from", location.url):
        stored: bytes = location.filesystem().cat_file(f"{location.path}/{key}", start=start, end=stop)
    if len(stored) != stop - start:
        raise TruncatedObjectError(
            f"{location.url}: {key} returned {len(stored)} bytes for the range {start}-{stop - 1}"
        )
    return stored
