"""Locates the values of an array: row <-> element <-> chunk <-> shard <-> byte. Pure.

Every array is treated as a flat sequence of elements. In CSR, `indices` and `data` are such sequences, and `indptr`
gives the elements of each row. In a dense matrix of n genes, row r owns elements r*n to (r+1)*n. A chunk holds
`chunk_elements` consecutive elements, or parts of some rows if the array is cut by columns, too (`Grid`). A shard is
one stored object with one or more chunks. Its index says which bytes each of them takes.

All functions are vectorised; their cost is proportional to the rows or chunks given, not to the array.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from zloader.common.errors import CorruptChunkError, FormatError, MissingObjectError, TruncatedObjectError
from zloader.common.locks import cached_property
from zloader.common.records import Rows, Span
from zloader.storage.row_offsets import RowOffsets

ABSENT = np.iinfo(np.uint64).max  # offset and size of a chunk that is not stored

Index = NDArray[np.uint64]  # the offset and size of each chunk of an object, in bytes (chunks x 2)

_MOST_ELEMENTS = 1 << 62  # damaged metadata may claim more
_MOST_PIECES = 1 << 20  # of a row


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Chunks that hold parts of rows, `chunk` elements along each dimension of an array of this `shape`.

    An object takes `outer` elements along each dimension: one or more chunks. Chunks are numbered object by object, in
    row-major order within each, and so are those of edges that no element is in. A band is a row of chunks.
    """

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    outer: tuple[int, ...]

    @classmethod
    def of(cls, path: str, shape: Sequence[int], chunk: Sequence[int], outer: Sequence[int]) -> Grid | None:
        """The grid of an array; None if its chunks hold whole rows. Raises FormatError for damaged metadata."""
        if not shape:
            raise FormatError(f"{path} is a single value, without rows")
        grid = cls(shape=tuple(shape), chunk=tuple(chunk), outer=tuple(outer))
        sizes = list(zip(grid.shape, grid.chunk, grid.outer, strict=True))
        wrong = any(whole > 0 and (size < 1 or within < size or within % size) for whole, size, within in sizes)
        if not wrong and (not math.prod(shape) or all(whole == size == within for whole, size, within in sizes[1:])):
            return None
        if wrong or math.prod(whole + within for whole, _, within in sizes) > _MOST_ELEMENTS:
            raise FormatError(
                f"{path} has chunks of {chunk} in objects of {outer}, and a shape of {shape}: its metadata is damaged"
            )
        if math.prod(shape[1:-1]) * -(-shape[-1] // chunk[-1]) > _MOST_PIECES:
            raise FormatError(
                f"{path} has chunks of {chunk}, which cut a row of {shape} into more than {_MOST_PIECES} pieces: run "
                "'zloader convert' on it"
            )
        return grid

    @property
    def chunks_per_object(self) -> int:
        """Chunks that an object has room for."""
        return math.prod(within // size for within, size in zip(self.outer, self.chunk, strict=True))

    @property
    def objects(self) -> tuple[int, ...]:
        """Objects along each dimension."""
        return tuple(-(-whole // within) for whole, within in zip(self.shape, self.outer, strict=True))

    @property
    def row_elements(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape[1:])

    @property
    def part_elements(self) -> int:
        """Elements of a row in a chunk, which follow one another."""
        return math.prod(self.chunk[1:])

    @cached_property
    def pieces(self) -> tuple[Rows, Rows, Rows, Rows]:
        """The pieces of row 0 that lie in one piece in a chunk, too: where they begin in the row, their lengths, their
        chunks, and where they begin there.
        """
        steps = [1] * (len(self.shape) - 2) + [self.chunk[-1]]
        sizes = zip(self.shape[1:], steps, strict=True)
        places = np.meshgrid(*(np.arange(0, size, step) for size, step in sizes), indexing="ij")
        begins, objects, within, parts = (np.zeros(places[0].shape, np.int64) for _ in range(4))
        for place, whole, size, outer, n in zip(
            places, self.shape[1:], self.chunk[1:], self.outer[1:], self.objects[1:], strict=True
        ):
            begins, parts = begins * whole + place, parts * size + place % size
            objects, within = objects * n + place // outer, within * (outer // size) + place % outer // size
        lengths = np.minimum(self.chunk[-1], self.shape[-1] - places[-1])
        chunks = objects * self.chunks_per_object + within
        return begins.reshape(-1), lengths.reshape(-1), chunks.reshape(-1), parts.reshape(-1)

    def first_chunks(self, bands: Rows) -> Rows:
        """The chunks of the first elements of bands."""
        per_object = self.outer[0] // self.chunk[0]
        objects, within = np.divmod(bands, per_object)
        across = math.prod(self.objects[1:])
        return (objects * (across * per_object) + within) * (self.chunks_per_object // per_object)

    def bands(self, starts: Rows, stops: Rows) -> tuple[Rows, Rows, Rows, Rows]:
        """Whole rows, given as the elements `[start, stop)` of some runs of them, cut where bands end.

        Returns the run and the band of each part, and its rows `[first, stop)`.
        """
        firsts, lasts = starts // self.row_elements, stops // self.row_elements
        height = self.chunk[0]
        counts = (lasts - 1) // height + 1 - firsts // height
        run, bands = np.repeat(np.arange(len(starts)), counts), expand(firsts // height, counts)
        return run, bands, np.maximum(firsts[run], bands * height), np.minimum(lasts[run], (bands + 1) * height)


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


@dataclass(frozen=True, kw_only=True)
class ArrayLayout:
    """How one array is stored. `path` is its key in the store; `codecs` are the Zarr v3 codecs of a chunk.

    Those of Zarr v2 are named like in v3: the filters, "bytes" and the compressor, with names such as "numcodecs.zlib".
    """

    path: str
    dtype: np.dtype[Any]
    n_elements: int
    chunk_elements: int
    codecs: tuple[Mapping[str, Any], ...]
    placement: Placement
    fill_value: Any = 0
    # Whether a missing object or chunk stands for fill values. Never the case in stores written by zloader.
    absent_is_fill: bool = False
    # The dtype of stored elements, if they are kept in a narrower one in memory and in a mirror, as gene indices of
    # .h5ad files are. All have to be in range(below).
    stored_dtype: np.dtype[Any] | None = None
    # Whether the last chunk ends with the array, as in an array that is stored in one piece, instead of being padded.
    cut: bool = False
    # Every element must be in range(below); None means no bound. Gene indices are checked because they index memory.
    below: int | None = None
    # How chunks hold parts of rows. None if they hold whole rows, or elements of a vector.
    grid: Grid | None = None

    @property
    def chunks_per_shard(self) -> int:
        """Number of chunks in a whole shard."""
        return self.placement.chunks_per_object

    @property
    def n_chunks(self) -> int:
        """Number of chunks."""
        if self.grid is not None:
            return math.prod(self.grid.objects) * self.chunks_per_shard
        return -(-self.n_elements // self.chunk_elements)

    @property
    def band_elements(self) -> int:
        """Elements of whole rows that a chunk holds, or that the chunks of a band hold together."""
        return self.chunk_elements if self.grid is None else self.grid.chunk[0] * self.grid.row_elements

    @property
    def n_shards(self) -> int:
        """Number of shards, which are stored objects."""
        return -(-self.n_chunks // self.chunks_per_shard)

    def chunk_bytes(self, object_sizes: Mapping[str, int]) -> float:
        """Average stored bytes per chunk, estimated from the first 16 objects; 0 if there are no objects."""
        stored, n_chunks = self.placement.stored_bytes(range(min(self.n_shards, 16)), object_sizes)
        return stored / max(1, min(n_chunks, self.n_chunks))

    def shard_key(self, shard: int) -> str:
        """The key of a stored object, relative to the store."""
        return self.placement.key(shard)

    def chunk_bounds(self, chunks: Rows) -> tuple[Rows, Rows]:
        """The first element of each chunk, and the element after its last."""
        n_elements = min(self.n_elements, _MOST_ELEMENTS)
        width = min(self.chunk_elements, max(1, n_elements))
        first = chunks * width
        return first, np.minimum(first + width, n_elements)

    def chunk_of(self, elements: Rows) -> Rows:
        """The chunk of each element."""
        return elements // self.chunk_elements

    def check_bounds(self, elements: NDArray[Any]) -> None:
        """Raises CorruptChunkError if an element is outside `range(below)`."""
        if self.below is not None and len(elements) and not 0 <= elements.min() <= elements.max() < self.below:
            bad = elements.min() if elements.min() < 0 else elements.max()
            raise CorruptChunkError(f"it holds gene {bad}, but there are {self.below} genes")

    def narrowed(self, below: int) -> ArrayLayout:
        """The layout of whole numbers in range(below), kept in the smallest dtype that holds them."""
        narrow = np.min_scalar_type(max(0, below - 1))
        if self.dtype.kind not in "iu" or narrow.itemsize >= self.dtype.itemsize:
            return replace(self, below=below)
        return replace(self, below=below, dtype=narrow, stored_dtype=self.dtype)

    def find_index(self, shard: int, object_size: int | None, url: str) -> Span | Index:
        """The span of a shard's index, or the index itself if it need not be read.

        `object_size` is None for a missing object, which stands for fill values or raises MissingObjectError. An object
        that is empty or smaller than its index raises TruncatedObjectError.
        """
        if object_size is None:
            if not self.absent_is_fill:
                raise MissingObjectError(
                    f"{url}: {self.shard_key(shard)} is not there: the store is incomplete. Convert it again"
                )
            return np.full((self.chunks_per_shard, 2), ABSENT, np.uint64)
        require_bytes(url, self.shard_key(shard), object_size, self.placement.index_bytes)
        return self.placement.index(shard, object_size)


@dataclass(frozen=True, kw_only=True)
class MatrixLayout:
    """How a matrix of rows x genes is stored: as CSR (`genes` and `values`) or dense (`values` only)."""

    path: str
    n_rows: int
    n_genes: int
    values: ArrayLayout
    genes: ArrayLayout | None

    @property
    def arrays(self) -> tuple[ArrayLayout, ...]:
        """The arrays to read: `genes` if the matrix is CSR, then `values`."""
        return (self.values,) if self.genes is None else (self.genes, self.values)

    def elements_of(self, rows: Rows, indptr: RowOffsets | None) -> tuple[Rows, Rows]:
        """The first element of each row and the element after its last. `indptr` is None for a dense matrix."""
        if indptr is None:
            return rows * self.n_genes, (rows + 1) * self.n_genes
        return indptr.bounds(rows)


def require_bytes(url: str, key: str, size: int, needed: int = 1) -> None:
    """Raises TruncatedObjectError if an object of `size` bytes is empty or has fewer than `needed` bytes."""
    if size < max(1, needed):
        raise TruncatedObjectError(
            f"{url}: {key} has {size} bytes, but must have at least {max(1, needed)}: it was truncated when it was "
            "written or copied. Restore it, or convert the store again"
        )


def expand(starts: Rows, lengths: Rows) -> Rows:
    """The numbers of `[start, start + length)` for each pair, concatenated."""
    offsets = np.cumsum(lengths) - lengths
    return np.repeat(starts - offsets, lengths) + np.arange(int(lengths.sum()), dtype=np.int64)


def runs_of(starts: Rows, stops: Rows) -> tuple[Rows, Rows, Rows]:
    """The pairs `[start, stop)`, with those that adjoin united: their starts, their stops, and how many each unites."""
    opens = np.flatnonzero(np.append(True, starts[1:] != stops[:-1])[: len(starts)])
    counts = np.diff(opens, append=len(starts))
    return starts[opens], stops[opens + counts - 1], counts


def distinct(numbers: Rows) -> Rows:
    """The distinct numbers in ascending order. Twenty times as fast as np.unique, which hashes."""
    ordered: Rows = np.sort(numbers)
    first: NDArray[np.bool_] = np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]
    return ordered[first]


def chunks_of(starts: Rows, stops: Rows, layout: ArrayLayout) -> Rows:
    """The distinct chunks that hold the elements `[start, stop)` of all pairs, in ascending order."""
    filled = stops > starts
    if layout.grid is not None:
        _, bands, _, _ = layout.grid.bands(starts[filled], stops[filled])
        firsts, (_, _, of_row, _) = layout.grid.first_chunks(distinct(bands)), layout.grid.pieces
        return distinct((firsts[:, None] + distinct(of_row)).reshape(-1))
    first = layout.chunk_of(starts[filled])
    last = layout.chunk_of(stops[filled] - 1)
    # Rows of a block are adjacent, so most pairs repeat the chunks of the pair before. Drop the repeats first.
    new = np.ones(len(first), bool)
    new[1:] = (first[1:] != first[:-1]) | (last[1:] != last[:-1])
    return distinct(expand(first[new], last[new] - first[new] + 1))


def align_to_runs(numbers: Rows, run: int, end: int) -> Rows:
    """Numbers below `end`, extended to whole runs: each run of `run` numbers is included entirely or not at all."""
    begins = distinct(numbers - numbers % run)
    return expand(begins, np.minimum(begins + run, end) - begins)


def fill_gaps(chunks: Rows, gap: int) -> Rows:
    """`chunks` (ascending) with gaps filled: up to `gap` chunks between two chunks are included."""
    lengths = np.diff(chunks, append=chunks[-1:] + 1)
    return expand(chunks, np.where(lengths - 1 <= gap, lengths, 1))


@dataclass(frozen=True, kw_only=True)
class Reads:
    """Spans to be read, and the chunks (ascending) that they bring.

    Chunk `chunks[i]` is bytes `[offsets[i], offsets[i] + sizes[i])` of span `numbers[i]`. `absent` are the chunks that
    are not stored.
    """

    spans: Sequence[Span]
    chunks: Rows
    numbers: Rows
    offsets: Rows
    sizes: Rows
    absent: Rows

    @property
    def n_bytes(self) -> int:
        """Bytes of all spans."""
        return sum(span.size for span in self.spans)

    def some(self, numbers: Rows) -> Reads:
        """Those of some spans (ascending)."""
        here = np.isin(self.numbers, numbers)
        return Reads(
            spans=[self.spans[number] for number in numbers.tolist()],
            chunks=self.chunks[here],
            numbers=np.searchsorted(numbers, self.numbers[here]),
            offsets=self.offsets[here],
            sizes=self.sizes[here],
            absent=self.absent[:0],
        )


def coalesce(starts: Rows, stops: Rows, *, gap_bytes: int, max_read_bytes: int) -> Rows:
    """Indices of the byte ranges (ascending) that start a new read.

    Ranges at most `gap_bytes` apart share a read of up to about `max_read_bytes`. A range is never split, because a
    chunk cannot be decoded in parts, so a read may exceed `max_read_bytes` by one range.
    """
    apart = np.ones(len(starts), bool)
    apart[1:] = starts[1:] - stops[:-1] > gap_bytes
    begins = starts[np.maximum.accumulate(np.where(apart, np.arange(len(starts)), 0))]
    part = (stops - begins - 1) // max_read_bytes
    apart[1:] |= part[1:] != part[:-1]
    return np.flatnonzero(apart)


def reads_of(
    layout: ArrayLayout,
    chunks: Rows,
    indexes: Mapping[int, ObjectIndex],
    *,
    gap_bytes: int,
    max_read_bytes: int,
) -> Reads:
    """The reads for `chunks` (ascending). `indexes` has the index of each shard with such chunks."""
    none = np.empty(0, np.int64)
    spans: list[Span] = []
    absent, places = [none], [np.empty((4, 0), np.int64)]
    per_shard = layout.chunks_per_shard
    shards = chunks // per_shard
    for here in np.split(chunks, np.flatnonzero(np.diff(shards)) + 1) if len(chunks) else []:
        shard = int(here[0]) // per_shard
        stored, offsets, sizes = indexes[shard].ranges(here - shard * per_shard)
        absent.append(here[~stored])
        by_offset = np.argsort(offsets, kind="stable")
        here, offsets, sizes = here[stored][by_offset], offsets[by_offset], sizes[by_offset]
        if not len(here):
            continue
        opens = coalesce(offsets, offsets + sizes, gap_bytes=gap_bytes, max_read_bytes=max_read_bytes)
        starts, stops = offsets[opens], np.maximum.reduceat(offsets + sizes, opens)
        of_span = np.repeat(np.arange(len(opens)), np.diff(opens, append=len(here)))
        places.append(np.stack([here, len(spans) + of_span, offsets - starts[of_span], sizes]))
        key = layout.shard_key(shard)
        spans += [
            Span(key=key, start=start, stop=stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
        ]
    table = np.concatenate(places, axis=1)
    found, numbers, offsets, sizes = table[:, np.argsort(table[0], kind="stable")]
    absent_chunks = np.concatenate(absent)
    return Reads(spans=spans, chunks=found, numbers=numbers, offsets=offsets, sizes=sizes, absent=absent_chunks)
