"""Where the stored bytes of an array's chunks lie: chunk -> object, offset and size, or absent. Pure.

An object holds consecutive chunks. The index of an object says which bytes each of its chunks takes. It is read from
the object itself, or is known without reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from zloader.common.errors import CorruptChunkError
from zloader.common.records import Rows, Span

ABSENT = np.iinfo(np.uint64).max  # offset and size of a chunk that is not stored

Index = NDArray[np.uint64]  # the offset and size of each chunk of an object, in bytes (chunks x 2)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Objects of the Zarr array `path`: shards (https://zarr-specs.readthedocs.io, v3, sharding codec), or chunks.

    A key is the path, `prefix` ("c" and the separator; empty in Zarr v2) and the position of the object in each
    dimension. Those after the first have so many objects each: `across`. With a `table`, as of an array in an HDF5
    file, all chunks are in the one object `path`, which may be seen as several, of `chunks_per_object` chunks each.
    """

    path: str
    chunks_per_object: int = 1
    sharded: bool = False
    index_checksum: bool = True
    index_at_end: bool = True
    prefix: str = "c/"
    separator: str = "/"
    across: tuple[int, ...] = ()
    table: Index | None = field(default=None, compare=False)

    @property
    def index_bytes(self) -> int:
        """Bytes of the index of a shard; 0 if none has to be read."""
        return (16 * self.chunks_per_object + 4 * self.index_checksum) if self.sharded else 0

    def stored_bytes(self, objects: range, object_sizes: Mapping[str, int]) -> tuple[int, int]:
        """The bytes of the array in some of its objects, and how many chunks these have room for."""
        if self.table is not None:  # in an object with other contents, too
            stored = self.table[self.table[:, 0] != ABSENT, 1]
            return int(stored.sum()), len(stored)
        keys = map(self.key, objects)
        sizes = [object_sizes[key] for key in keys if key in object_sizes]
        return sum(sizes), len(sizes) * self.chunks_per_object

    def key(self, number: int) -> str:
        """The key of an object, relative to the store."""
        if self.table is not None:
            return self.path
        position: list[int] = []
        for n in reversed(self.across):
            number, place = divmod(number, n)
            position.append(place)
        return f"{self.path}/{self.prefix}" + self.separator.join(map(str, [number, *reversed(position)]))

    def index(self, number: int, object_size: int) -> Span | Index:
        """The span of the index in a shard of `object_size` bytes; or the index itself, if it need not be read.

        Raises CorruptChunkError for a table that names bytes that the object lacks.
        """
        if self.table is not None:
            begin = number * self.chunks_per_object
            table = self.table[begin : begin + self.chunks_per_object]
            return _inside(table, object_size, f"the chunk table of an array in {self.path}")
        if not self.sharded:
            return np.array([[0, object_size]], np.uint64)
        start = object_size - self.index_bytes if self.index_at_end else 0
        return Span(key=self.key(number), start=start, stop=start + self.index_bytes)

    def parse(self, stored: bytes, number: int, object_size: int) -> Index:
        """The index of a shard from its stored bytes. Raises CorruptChunkError."""
        where = f"the shard index of {self.key(number)}"
        if len(stored) != self.index_bytes:
            raise CorruptChunkError(f"{where} has {len(stored)} bytes instead of {self.index_bytes}")
        body = stored[:-4] if self.index_checksum else stored
        if self.index_checksum and google_crc32c.value(body) != int.from_bytes(stored[-4:], "little"):
            raise CorruptChunkError(f"{where} does not match its checksum")
        return _inside(np.frombuffer(body, "<u8").reshape(-1, 2), object_size, where)


def _inside(table: Index, object_size: int, where: str) -> Index:
    """The table. Raises CorruptChunkError if it names bytes beyond the end of its object."""
    stored_chunks = table[table[:, 0] != ABSENT]
    ends = stored_chunks.sum(axis=1)
    if len(ends) and (ends.max() > object_size or (stored_chunks > object_size).any()):
        raise CorruptChunkError(f"{where} points to byte {int(ends.max())}, but the object has {object_size} bytes")
    return table


class ObjectIndex:
    """The byte ranges of an object's chunks in memory.

    A process keeps the indexes of all objects that it reads. Chunks that are stored end to end, as zloader and zarr
    write them, take 4 bytes each: 50 MB for 100 million rows in chunks of 16. Others take 16.
    """

    def __init__(self, table: Index) -> None:
        n_stored = int(np.count_nonzero(table[:, 0] != ABSENT))
        offsets, sizes = table[:n_stored].T
        bounds = np.append(offsets[:1], offsets + sizes)
        end_to_end = (bounds[:-1] == offsets).all() and (table[n_stored:, 0] == ABSENT).all()
        self._table = None if end_to_end and n_stored and bounds[-1] < 1 << 32 else table
        self._bounds = bounds.astype(np.uint32) if self._table is None else None

    def ranges(self, chunks: Rows) -> tuple[NDArray[np.bool_], Rows, Rows]:
        """Which of the object's chunks are stored, and the offsets and sizes in bytes of those that are."""
        if self._bounds is None:
            assert self._table is not None
            table = self._table[chunks]
            stored = table[:, 0] != ABSENT
            offsets, sizes = table[stored].astype(np.int64).T
            return stored, offsets, sizes
        stored = chunks < len(self._bounds) - 1
        offsets, ends = (self._bounds[chunks[stored] + more].astype(np.int64) for more in (0, 1))
        return stored, offsets, ends - offsets
