"""Writes the shards of an array sequentially.

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

from zloader.common.errors import StoreError
from zloader.conversion.writing.encode import ChunkEncoder, shard_index
from zloader.conversion.writing.object_writer import ObjectWriter, run_to_completion

_MAX_ENCODING = 16
_JOB_ELEMENTS = 1 << 19  # encoded per job: a few chunks, so that the overhead per job is negligible


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
