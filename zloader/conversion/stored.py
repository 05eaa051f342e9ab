"""Reads stored arrays back, one piece per stored object, and verifies every checksum.

`verify` reads in this way. The memory in use is that of one read and one chunk.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from zloader.access.location import Location
from zloader.access.zarr_groups import UNDECODABLE
from zloader.common.errors import CorruptChunkError, FormatError, TruncatedObjectError, ZloaderError
from zloader.common.options import MiB
from zloader.common.records import Span
from zloader.conversion.object_writer import translated
from zloader.storage.decode import Decoder
from zloader.storage.layout import ArrayLayout, reads_of
from zloader.storage.metadata import layout_of
from zloader.storage.placement import ABSENT, Index, ObjectIndex

_READ_BYTES = 8 * MiB  # per read


class StoredArray:
    """One array, whose piece i is its stored object i. zloader's decoder reads it if it can, otherwise zarr.

    `sizes` has the bytes of the objects in the store. With `absent_is_fill`, objects and chunks may be absent.
    """

    def __init__(
        self,
        location: Location,
        array: zarr.Array[Any],
        sizes: Mapping[str, int],
        *,
        absent_is_fill: bool = False,
        read_bytes: int = _READ_BYTES,
    ) -> None:
        self.path, self.dtype = array.path, array.dtype
        self._location, self._array, self._sizes, self._read_bytes = location, array, sizes, read_bytes
        self._layout = _layout(array, absent_is_fill=absent_is_fill)
        self._shard = tuple(array.shards or array.chunks)
        self._grid = tuple(-(-size // shard) for size, shard in zip(array.shape, self._shard, strict=True))

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

    def chunks(self) -> Iterator[NDArray[Any]]:
        """The elements of all chunks. Raises the errors of `chunks_of`."""
        for piece in range(self.n_pieces):
            yield from self.chunks_of(piece)

    def chunks_of(self, piece: int) -> Iterator[NDArray[Any]]:
        """The elements of each chunk of a piece.

        Raises MissingObjectError, CorruptChunkError or TruncatedObjectError for what cannot be decoded, or translated
        file system errors.
        """
        return self._read_through_zarr(piece) if self._layout is None else self._read_shard(piece, self._layout)

    def _read_through_zarr(self, piece: int) -> Iterator[NDArray[Any]]:
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
                raise CorruptChunkError(
                    f"{self._location.url}: {self.key(piece)} does not decode{at}: {error}"
                ) from error

    def _read_shard(self, shard: int, layout: ArrayLayout) -> Iterator[NDArray[Any]]:
        decoder, url, key = Decoder(layout), self._location.url, layout.shard_key(shard)
        for chunk, stored in self._stored_chunks(shard, layout):
            out = np.empty(min(layout.chunk_elements, layout.n_elements - chunk * layout.chunk_elements), layout.dtype)
            if stored is None:
                out[:] = layout.fill_value
            else:
                try:
                    decoder.decode(stored, out)
                except CorruptChunkError as error:
                    number = chunk % layout.chunks_per_shard
                    raise CorruptChunkError(f"{url}: chunk {number} of {key}: {error}") from error
            yield out

    def _stored_chunks(self, shard: int, layout: ArrayLayout) -> Iterator[tuple[int, NDArray[np.uint8] | None]]:
        """The number and the stored bytes of each chunk of a shard, in order. None stands for an absent chunk."""
        first = shard * layout.chunks_per_shard
        chunks = np.arange(first, min(first + layout.chunks_per_shard, layout.n_chunks))
        table = self._read_index(shard, layout)[: len(chunks)]
        # Neighbours are read together. Chunks out of order, which other programs may write, are read one by one.
        groups = [chunks] if _in_order(table) else chunks.reshape(-1, 1)
        indexes = {shard: ObjectIndex(table)}
        at = first
        for group in groups:
            reads = reads_of(layout, group, indexes, gap_bytes=0, max_read_bytes=self._read_bytes)
            for number, span in enumerate(reads.spans):
                stored, here = np.frombuffer(self._read(span), np.uint8), reads.numbers == number
                where = (reads.chunks[here], reads.offsets[here], reads.sizes[here])
                for chunk, offset, size in np.stack(where, axis=1).tolist():
                    yield from ((absent, None) for absent in range(at, chunk))
                    yield chunk, stored[offset : offset + size]
                    at = chunk + 1
        yield from ((absent, None) for absent in range(at, first + len(chunks)))

    def _read_index(self, shard: int, layout: ArrayLayout) -> Index:
        """The offset and size of each chunk of a shard. All chunks must exist, in order, unless they may be absent."""
        url, key = self._location.url, layout.shard_key(shard)
        size = self._sizes.get(key)
        try:
            table = layout.find_index(shard, size, url)
            if isinstance(table, Span):
                assert size is not None
                table = layout.placement.parse(self._read(table), shard, size)
        except CorruptChunkError as error:
            raise CorruptChunkError(f"{url}: {error}") from error
        here = table[: layout.n_chunks - shard * layout.chunks_per_shard]
        if not layout.absent_is_fill and ((here == ABSENT).any() or not _in_order(here)):
            raise CorruptChunkError(
                f"{url}: {key} lacks chunks, or has them out of order: the object was not written completely"
            )
        return table

    def _read(self, span: Span) -> bytes:
        location, start, stop = self._location, span.start, span.stop
        with translated(f"read {span.key} from", location.url):
            stored: bytes = location.filesystem().cat_file(f"{location.path}/{span.key}", start=start, end=stop)
        if len(stored) != stop - start:
            raise TruncatedObjectError(
                f"{location.url}: {span.key} returned {len(stored)} bytes for the range {start}-{stop - 1}"
            )
        return stored


def _in_order(table: Index) -> bool:
    """Whether the chunks that are stored follow one another."""
    offsets = table[table[:, 0] != ABSENT, 0].astype(np.int64)
    return bool((np.diff(offsets) > 0).all())


def _layout(array: zarr.Array[Any], *, absent_is_fill: bool) -> ArrayLayout | None:
    """The layout of an array, or None if zloader's decoder does not support it, or if chunks hold parts of rows."""
    if not isinstance(array, zarr.Array) or array.ndim == 0 or array.size == 0 or array.dtype.kind not in "biuf":
        return None
    try:
        layout = layout_of(array, absent_is_fill=absent_is_fill)
        Decoder(layout)
    except FormatError:
        return None
    return layout if layout.grid is None else None
