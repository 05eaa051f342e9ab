"""Reads the arrays of a store piece by piece, one piece per stored object, and verifies every checksum."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from zloader.access.implied_objects import UNDECODABLE
from zloader.common.errors import CorruptChunkError, FormatError, ZloaderError
from zloader.common.options import MiB
from zloader.conversion.checking.hierarchy import Hierarchy
from zloader.conversion.writing.object_writer import translated
from zloader.conversion.writing.shards import scan_shard
from zloader.storage.decode import Decoder
from zloader.storage.layout import ArrayLayout
from zloader.storage.metadata import layout_of

_BATCH_BYTES = 8 * MiB  # decoded ahead of the consumer

Chunk = NDArray[Any] | CorruptChunkError


class StoredArray:
    """One array, whose piece i is its stored object i. zloader's decoder reads it if it can, otherwise zarr."""

    def __init__(self, hierarchy: Hierarchy, path: str) -> None:
        self.path = path
        self._location, self._sizes = hierarchy.location, hierarchy.sizes
        self._array = hierarchy.arrays[path]
        self.dtype = self._array.dtype
        self._layout = _layout(self._array, absent_is_fill=not hierarchy.written_by_us)
        self._shard = tuple(self._array.shards or self._array.chunks)
        self._grid = tuple(-(-size // shard) for size, shard in zip(self._array.shape, self._shard, strict=True))

    @property
    def n_elements(self) -> int:
        """Elements of the array."""
        return math.prod(self._array.shape)

    @property
    def n_pieces(self) -> int:
        """Stored objects of the array."""
        return math.prod(self._grid)

    @property
    def chunk_elements(self) -> int:
        """Elements per chunk."""
        return math.prod(self._array.chunks)

    def first_element(self, piece: int) -> int:
        """The first element of a piece, for an array whose chunks hold complete rows."""
        return min(piece * math.prod(self._shard), self.n_elements)

    def key(self, piece: int) -> str:
        """The key of a piece in the store."""
        return f"{self.path}/{self._array.metadata.encode_chunk_key(self._cell(piece))}"

    def _cell(self, piece: int) -> tuple[int, ...]:
        return tuple(int(index) for index in np.unravel_index(piece, self._grid)) if self._grid else ()

    def read(self, piece: int) -> Iterator[Chunk]:
        """The elements of each chunk of a piece, or the error of a chunk that cannot be decoded.

        Raises MissingObjectError, CorruptChunkError or TruncatedObjectError if the whole piece cannot be read.
        """
        if self._layout is not None:
            return scan_shard(self._location, self._layout, piece, self._sizes.get(self.key(piece)))
        return self._read_through_zarr(piece)

    def _read_through_zarr(self, piece: int) -> Iterator[Chunk]:
        begins = [index * shard for index, shard in zip(self._cell(piece), self._shard, strict=True)]
        bounds = zip(begins, self._shard, self._array.shape, self._array.chunks, strict=True)
        starts = [range(begin, min(begin + shard, whole), chunk) for begin, shard, whole, chunk in bounds]
        for corner in itertools.product(*starts):
            block = tuple(slice(at, at + chunk) for at, chunk in zip(corner, self._array.chunks, strict=True))
            try:
                with translated(f"read {self.key(piece)} from", self._location.url):
                    yield np.asarray(self._array[block])
            except ZloaderError:
                raise
            except UNDECODABLE as error:
                at = f" at {', '.join(map(str, corner))}" if corner else ""
                yield CorruptChunkError(f"{self._location.url}: {self.key(piece)} does not decode{at}: {error}")

    def chunks(self) -> Iterator[NDArray[Any]]:
        """The elements of all chunks. Raises the errors that `read` yields or raises."""
        for piece in range(self.n_pieces):
            for elements in self.read(piece):
                if isinstance(elements, CorruptChunkError):
                    raise elements
                yield elements


def _layout(array: zarr.Array[Any], *, absent_is_fill: bool) -> ArrayLayout | None:
    """The layout of an array, or None if zloader's decoder does not support it."""
    if array.ndim == 0 or array.size == 0 or array.dtype.kind not in "biuf":
        return None
    try:
        layout = layout_of(array, absent_is_fill=absent_is_fill)
        Decoder(layout)
    except FormatError:
        return None
    return layout


class ElementStream:
    """Reads the elements of an array sequentially, any number at a time. A thread decodes ahead."""

    def __init__(self, array: StoredArray, thread: Executor) -> None:
        self._chunks, self._thread = array.chunks(), thread
        self._at_once = max(1, _BATCH_BYTES // max(1, array.chunk_elements * array.dtype.itemsize))
        self._decoded = np.empty(0, array.dtype)
        self._ahead = self._decode_ahead()

    def _decode_ahead(self) -> Future[list[NDArray[Any]]]:
        return self._thread.submit(lambda: list(itertools.islice(self._chunks, self._at_once)))

    def take(self, n: int) -> NDArray[Any]:
        """The next `n` elements, or fewer at the end. Raises the errors of `StoredArray.chunks`."""
        parts, missing = [self._decoded], n - len(self._decoded)
        while missing > 0:
            batch = self._ahead.result()
            if not batch:
                break
            self._ahead = self._decode_ahead()
            parts += batch
            missing -= sum(map(len, batch))
        decoded = np.concatenate(parts) if len(parts) > 1 else self._decoded
        self._decoded = decoded[n:]
        return decoded[:n]
