"""Where the values of an array lie: row <-> element <-> chunk <-> shard <-> byte. Pure.

Every array is seen as one flat run of elements. For CSR, `indices` and `data` are such runs and `indptr` says which
elements belong to a row; a dense matrix of n genes is a run in which row r owns the elements r*n to (r+1)*n. A chunk
holds `chunk_elements` consecutive elements; a shard is one stored object of one or more chunks and, where there may be
more than one, an index of their byte ranges (Zarr v3 sharding codec, https://zarr-specs.readthedocs.io).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from zloader.common.errors import CorruptChunkError, MissingObjectError, TruncatedObjectError
from zloader.common.records import Rows, Span

ABSENT = np.iinfo(np.uint64).max  # offset and size of a chunk that was never written


@dataclass(frozen=True, kw_only=True)
class ArrayLayout:
    """How one array is stored; `path` is its key in the store, `codecs` are the Zarr v3 codecs of one chunk.

    A codec of Zarr v2 has the name "numcodecs" and numcodecs' own configuration.
    """

    path: str
    dtype: np.dtype[Any]
    n_elements: int
    chunk_elements: int
    chunks_per_shard: int
    codecs: tuple[Mapping[str, Any], ...]
    sharded: bool
    index_checksum: bool
    index_at_end: bool
    key_prefix: str  # of a shard's key after the path: "c" and the separator, nothing in Zarr v2
    separator: str
    n_dims: int
    fill_value: Any
    # Whether an object or chunk that is not there stands for fill values (never, in a store that zloader wrote).
    absent_is_fill: bool
    # Every element must be at least 0 and below this; None for no bound. Gene indices index memory later on.
    below: int | None = None

    @property
    def n_chunks(self) -> int:
        """Chunks of the array."""
        return -(-self.n_elements // self.chunk_elements)

    @property
    def n_shards(self) -> int:
        """Stored objects of the array."""
        return -(-self.n_chunks // self.chunks_per_shard)

    @property
    def index_bytes(self) -> int:
        """Bytes of a shard's index."""
        return (16 * self.chunks_per_shard + 4 * self.index_checksum) if self.sharded else 0

    def chunk_bytes(self, object_sizes: Mapping[str, int]) -> float:
        """Stored bytes of a chunk on average, going by the first objects; 0 where there are none."""
        keys = map(self.shard_key, range(min(self.n_shards, 16)))
        sizes = [object_sizes[key] for key in keys if key in object_sizes]
        return sum(sizes) / max(1, min(len(sizes) * self.chunks_per_shard, self.n_chunks))

    def chunks_in(self, n_bytes: int, object_sizes: Mapping[str, int]) -> int:
        """How many chunks of one object about `n_bytes` hold; at least 1."""
        mean = self.chunk_bytes(object_sizes)
        return max(1, min(self.chunks_per_shard, round(n_bytes / mean))) if mean else 1

    def shard_key(self, shard: int) -> str:
        """The key of one stored object, relative to the store."""
        return f"{self.path}/{self.key_prefix}" + self.separator.join([str(shard), *["0"] * (self.n_dims - 1)])

    def chunk_bounds(self, chunks: Rows) -> tuple[Rows, Rows]:
        """First element of each chunk, and one past its last."""
        first = chunks * self.chunk_elements
        return first, np.minimum(first + self.chunk_elements, self.n_elements)

    def check_bounds(self, elements: NDArray[Any]) -> None:
        """Raises CorruptChunkError for an element that `below` forbids."""
        if self.below is not None and len(elements) and not 0 <= elements.min() <= elements.max() < self.below:
            bad = elements.min() if elements.min() < 0 else elements.max()
            raise CorruptChunkError(f"it holds gene {bad}, but there are {self.below} genes")

    def find_index(self, shard: int, object_size: int | None, url: str) -> Span | NDArray[np.uint64]:
        """Where the index of a shard is read, or the index itself where there is none to read.

        An object that does not exist (`object_size` None) stands for fill values, or raises MissingObjectError; one
        that is smaller than its index, or empty, raises TruncatedObjectError.
        """
        if object_size is None:
            if not self.absent_is_fill:
                raise MissingObjectError(
                    f"{url}: {self.shard_key(shard)} is not there: the store is incomplete. Convert it again"
                )
            return np.full((self.chunks_per_shard, 2), ABSENT, np.uint64)
        require_bytes(url, self.shard_key(shard), object_size, self.index_bytes)
        return self.index_span(shard, object_size) if self.sharded else np.array([[0, object_size]], np.uint64)

    def index_span(self, shard: int, object_size: int) -> Span:
        """Where the index of a shard lies in its object of `object_size` bytes."""
        start = object_size - self.index_bytes if self.index_at_end else 0
        return Span(key=self.shard_key(shard), start=start, stop=start + self.index_bytes)

    def parse_index(self, stored: bytes, *, shard: int, object_size: int) -> NDArray[np.uint64]:
        """Offset and size in bytes of each chunk of a shard (chunks x 2, uint64); ABSENT for one that is not there."""
        where = f"the shard index of {self.shard_key(shard)}"
        if len(stored) != self.index_bytes:
            raise CorruptChunkError(f"{where} has {len(stored)} bytes instead of {self.index_bytes}")
        body = stored[:-4] if self.index_checksum else stored
        if self.index_checksum and google_crc32c.value(body) != int.from_bytes(stored[-4:], "little"):
            raise CorruptChunkError(f"{where} does not match its checksum")
        table = np.frombuffer(body, "<u8").reshape(-1, 2)
        there = table[:, 0] != ABSENT
        ends = table[there].sum(axis=1)
        if len(ends) and (ends.max() > object_size or (table[there] > object_size).any()):
            raise CorruptChunkError(f"{where} points to byte {int(ends.max())}, but the object has {object_size} bytes")
        return table


@dataclass(frozen=True, kw_only=True)
class MatrixLayout:
    """How a matrix of rows x genes is stored: CSR (`genes` and `values`), or dense (`values` alone)."""

    path: str
    n_rows: int
    n_genes: int
    values: ArrayLayout
    genes: ArrayLayout | None

    @property
    def arrays(self) -> tuple[ArrayLayout, ...]:
        """The arrays to read: genes, if any, then values."""
        return (self.values,) if self.genes is None else (self.genes, self.values)

    def elements_of(self, rows: Rows, indptr: NDArray[np.integer] | None) -> tuple[Rows, Rows]:
        """First element and one past the last of each row; `indptr` is that of a CSR matrix."""
        if indptr is None:
            return rows * self.n_genes, (rows + 1) * self.n_genes
        return indptr[rows].astype(np.int64, copy=False), indptr[rows + 1].astype(np.int64, copy=False)


def require_bytes(url: str, key: str, size: int, needed: int = 1) -> None:
    """Raises TruncatedObjectError for an object of `size` bytes that must have `needed`, and one at least."""
    if size < max(1, needed):
        raise TruncatedObjectError(
            f"{url}: {key} has {size} bytes, but must have at least {max(1, needed)}: it was cut short when it was "
            "written or copied. Restore it, or convert the store again"
        )


def expand(starts: Rows, lengths: Rows) -> Rows:
    """`[start, start + length)` for each pair, laid end to end."""
    offsets = np.cumsum(lengths) - lengths
    return np.repeat(starts - offsets, lengths) + np.arange(int(lengths.sum()), dtype=np.int64)


def distinct(numbers: Rows) -> Rows:
    """The numbers in ascending order, each once: np.unique, which hashes them and takes twenty times as long."""
    ordered: Rows = np.sort(numbers)
    first: NDArray[np.bool_] = np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]
    return ordered[first]


def chunks_of(starts: Rows, stops: Rows, chunk_elements: int) -> Rows:
    """The chunks that hold the elements `[start, stop)` of each pair; ascending, each once."""
    filled = stops > starts
    first = starts[filled] // chunk_elements
    last = (stops[filled] - 1) // chunk_elements
    # Rows of a block follow one another, so most pairs repeat the one before: drop those before the costly part.
    new = np.ones(len(first), bool)
    new[1:] = (first[1:] != first[:-1]) | (last[1:] != last[:-1])
    return distinct(expand(first[new], last[new] - first[new] + 1))


def widened(layout: ArrayLayout, chunks: Rows, run: int) -> Rows:
    """`chunks` and those beside them, so that every run of `run` chunks of an object is there whole or not at all."""
    within = chunks % layout.chunks_per_shard
    begins = distinct(chunks - within % run)
    ends = np.minimum(begins + run, (begins // layout.chunks_per_shard + 1) * layout.chunks_per_shard)
    return expand(begins, np.minimum(ends, layout.n_chunks) - begins)


def closed(layout: ArrayLayout, chunks: Rows, gap: int) -> Rows:
    """`chunks` (ascending) and those that lie between two of them of one object, where these are at most `gap`."""
    between = np.diff(chunks) - 1
    small = (between <= gap) & (np.diff(chunks // layout.chunks_per_shard) == 0)
    return expand(chunks, np.append(np.where(small, between, 0), np.zeros(min(1, len(chunks)), np.int64)) + 1)


def needed(chunks: Rows, starts: Rows, stops: Rows, chunk_elements: int) -> tuple[Rows, Rows]:
    """First element, and one past the last, that the elements `[start, stop)` of any pair need of each of `chunks`.

    `chunks` are those of chunks_of; elements are counted from the first of their chunk.
    """
    firsts, ends = np.full(len(chunks), chunk_elements), np.zeros(len(chunks), np.int64)
    filled = stops > starts
    starts, stops = starts[filled], stops[filled]
    first, last = (
        np.searchsorted(chunks, starts // chunk_elements),
        np.searchsorted(chunks, (stops - 1) // chunk_elements),
    )
    np.minimum.at(firsts, first, starts % chunk_elements)
    np.maximum.at(ends, last, (stops - 1) % chunk_elements + 1)
    onward = last > first  # rows that go on from one chunk into the next
    firsts[expand(first[onward] + 1, (last - first)[onward])] = 0
    ends[expand(first[onward], (last - first)[onward])] = chunk_elements
    return firsts, ends


@dataclass(frozen=True, kw_only=True)
class ChunkSpan:
    """A span and the chunks in it: chunk `chunks[i]` is bytes `[offsets[i], offsets[i] + sizes[i])` of the span."""

    span: Span
    chunks: Rows
    offsets: Rows
    sizes: Rows


def coalesce(starts: Rows, stops: Rows, *, gap_bytes: int, max_read_bytes: int) -> Rows:
    """Which of the ascending byte ranges open a new read: ranges closer than the gap share one, up to about the cap.

    A range is never split, since a chunk cannot be decoded in parts: a read may exceed the cap by one range.
    """
    apart = np.ones(len(starts), bool)
    apart[1:] = starts[1:] - stops[:-1] > gap_bytes
    begins = starts[np.maximum.accumulate(np.where(apart, np.arange(len(starts)), 0))]
    part = (stops - begins - 1) // max_read_bytes
    apart[1:] |= part[1:] != part[:-1]
    return np.flatnonzero(apart)


def chunk_spans(
    layout: ArrayLayout,
    chunks: Rows,
    indexes: Mapping[int, NDArray[np.uint64]],
    *,
    gap_bytes: int,
    max_read_bytes: int,
) -> tuple[list[ChunkSpan], Rows]:
    """The reads that fetch `chunks` (ascending), and those of them that are not stored.

    `indexes` holds the parsed index of every shard concerned.
    """
    spans: list[ChunkSpan] = []
    absent: list[Rows] = []
    shards = chunks // layout.chunks_per_shard
    for shard in distinct(shards).tolist():
        here = chunks[shards == shard]
        table = indexes[shard][here % layout.chunks_per_shard]
        there = table[:, 0] != ABSENT
        absent.append(here[~there])
        offsets, sizes = table[there].astype(np.int64).T
        by_offset = np.argsort(offsets, kind="stable")
        here, offsets, sizes = here[there][by_offset], offsets[by_offset], sizes[by_offset]
        if not len(here):
            continue
        opens = coalesce(offsets, offsets + sizes, gap_bytes=gap_bytes, max_read_bytes=max_read_bytes)
        starts, stops = offsets[opens], np.maximum.reduceat(offsets + sizes, opens)
        within = offsets - np.repeat(starts, np.diff(opens, append=len(here)))
        key = layout.shard_key(shard)
        ends = [*opens[1:].tolist(), len(here)]
        for begin, end, start, stop in zip(opens.tolist(), ends, starts.tolist(), stops.tolist(), strict=True):
            spans.append(
                ChunkSpan(
                    span=Span(key=key, start=start, stop=stop),
                    chunks=here[begin:end],
                    offsets=within[begin:end],
                    sizes=sizes[begin:end],
                )
            )
    return spans, np.concatenate(absent) if absent else np.empty(0, np.int64)


def total_bytes(spans: Sequence[ChunkSpan]) -> int:
    """Bytes that the spans read."""
    return sum(piece.span.size for piece in spans)
