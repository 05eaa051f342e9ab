"""Which bytes to read, and where they go: rows become chunks, runs, byte spans, and slots of a buffer. Pure, no I/O.

The reader reads these spans, and `zloader.insight.cost` counts them without reading. All chunk numbers are ascending
and distinct. Every step is a few NumPy operations, linear in the rows or chunks that it is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.locks import cached_property
from zloader.common.options import FetchOptions
from zloader.common.records import Rows
from zloader.storage.decode import CHUNK
from zloader.storage.layout import (
    ArrayLayout,
    ChunkSpan,
    align_to_runs,
    chunk_spans,
    chunks_of,
    distinct,
    fill_gaps,
)
from zloader.storage.placement import ObjectIndex

# A mirror keeps every chunk that is read, so the chunks in a small gap are planned as chunks of their own, unless they
# are already there. Bytes that belong to no chunk are read over up to this many: some writers pad between chunks.
PADDING_BYTES = 4096
# What costs little to read may cost much to decode: sorted labels shrink to a hundredth. Reads are not extended by more
# decoded bytes than this for each stored byte of the options.
MOST_SHRUNK = 16
_RUNS = 12  # at least, in a piece of an array that is read completely: a third of the GETs for 3 % more bytes


@dataclass(frozen=True, kw_only=True)
class ReadPlanner:
    """Plans the reads of one array.

    `run_chunks` and `gap_chunks` shape what a mirror takes, in chunks; `gap_bytes` and `max_read_bytes` shape the
    spans, as in FetchOptions.
    """

    layout: ArrayLayout
    run_chunks: int
    gap_chunks: int
    gap_bytes: int
    max_read_bytes: int

    def chunks(self, starts: Rows, stops: Rows) -> Rows:
        """The chunks that contain the elements `[start, stop)` of each row."""
        return chunks_of(starts, stops, self.layout)

    def chunks_to_mirror(self, chunks: Rows, *, first_fetch: bool) -> Rows:
        """The chunks to read into a mirror when a fetch needs `chunks`, including those that are already there.

        These are whole runs of `run_chunks`, and all chunks in gaps of at most `gap_chunks` within one object. The
        consumer waits for the first fetch, so that fetch leaves the runs out.
        """
        run = 1 if first_fetch else self.run_chunks
        return fill_gaps(self.layout, align_to_runs(self.layout, chunks, run), self.gap_chunks)

    def shards(self, chunks: Rows) -> list[int]:
        """The shards that contain the chunks."""
        found: list[int] = distinct(chunks // self.layout.chunks_per_shard).tolist()
        return found

    def spans(
        self, chunks: Rows, indexes: Mapping[int, ObjectIndex], *, into_mirror: bool
    ) -> tuple[list[ChunkSpan], Rows]:
        """The spans to read for `chunks`, and the chunks that are not stored.

        `indexes` has the index of each of their shards.
        """
        gap_bytes = PADDING_BYTES if into_mirror else self.gap_bytes
        return chunk_spans(self.layout, chunks, indexes, gap_bytes=gap_bytes, max_read_bytes=self.max_read_bytes)


def planner_of(
    layout: ArrayLayout, options: FetchOptions, object_sizes: Mapping[str, int], *, sweeping: float
) -> ReadPlanner:
    """The planner of an array; `sweeping` is the share of it that is read in one piece.

    The average size of a stored chunk, from `object_sizes` (bytes per key), converts the options' bytes to chunks.
    """
    decoded_bytes = layout.chunk_elements * layout.dtype.itemsize
    most_in_run = max(1, MOST_SHRUNK * options.least_read_bytes // decoded_bytes)
    run = min(most_in_run, layout.chunks_in(options.least_read_bytes, object_sizes))
    most_in_gap = MOST_SHRUNK * options.gap_bytes // decoded_bytes
    return ReadPlanner(
        layout=layout,
        run_chunks=run_of(layout, run, sweeping),
        gap_chunks=min(most_in_gap, int(options.gap_bytes / max(1.0, layout.chunk_bytes(object_sizes)))),
        gap_bytes=options.gap_bytes,
        max_read_bytes=options.max_read_bytes,
    )


def share_of(swept_rows: int, n_rows: int) -> float:
    """The share of a store of `n_rows` that is read in one piece, where that has `swept_rows`: see Plan.swept_rows."""
    return min(1.0, swept_rows / max(1, n_rows))


def run_of(layout: ArrayLayout, wanted: int, sweeping: float) -> int:
    """`wanted` chunks in a run, if the share of the array that is read in one piece has many such runs; otherwise 1.

    At the ends of a piece are parts of runs that others need, on average one run for both ends.
    """
    return wanted if sweeping == 1 or wanted * _RUNS <= layout.n_chunks * sweeping else 1


def batches(
    spans: Sequence[ChunkSpan], *, chunk_bytes: int, stored_bytes: int, decoded_bytes: int = 32 << 20
) -> Iterator[list[ChunkSpan]]:
    """The spans in order, grouped into batches that one task reads and decodes.

    A batch is full at `stored_bytes`, or at `decoded_bytes`, where a chunk is `chunk_bytes`.
    """
    batch: list[ChunkSpan] = []
    stored = decoded = 0
    for piece in spans:
        batch.append(piece)
        stored += piece.span.size
        decoded += len(piece.chunks) * chunk_bytes
        if stored >= stored_bytes or decoded >= decoded_bytes:
            yield batch
            batch, stored, decoded = [], 0, 0
    if batch:
        yield batch


# ---- the buffer that chunks are decoded into


@dataclass(frozen=True, kw_only=True)
class Elements:
    """The elements of some rows: row i begins at `source[starts[i]]`."""

    source: NDArray[Any]
    starts: Rows


@dataclass(frozen=True, kw_only=True)
class Slots:
    """The buffer of one fetch: one slot per chunk in `chunks` (ascending), laid end to end in `elements`.

    The slot of a chunk holds its elements from `firsts` to `stops`, counted from its first element.
    """

    layout: ArrayLayout
    chunks: Rows
    elements: NDArray[Any]
    firsts: Rows
    stops: Rows

    @cached_property
    def _begins(self) -> Rows:
        lengths = self.stops - self.firsts
        return np.asarray(np.cumsum(lengths) - lengths)

    def locate(self, chunks: Rows) -> tuple[Rows, Rows, Rows]:
        """For each chunk: where its slot begins, its first element in there, and one past its last."""
        at = np.searchsorted(self.chunks, chunks)
        return self._begins[at], self.firsts[at], self.stops[at]

    def of(self, chunks: Rows) -> list[NDArray[Any]]:
        """The slot of each chunk."""
        begins, firsts, stops = self.locate(chunks)
        return [self.elements[a:b] for a, b in zip(begins.tolist(), (begins + stops - firsts).tolist(), strict=True)]

    def filled(self, starts: Rows) -> Elements:
        """The elements of rows that begin at `starts` in the array, with their positions in the buffer."""
        self.elements.flags.writeable = False
        # An empty row may begin in a chunk that is not in the buffer. Its position is never used.
        shifts = np.append(self._begins - self.firsts - self.layout.chunk_bounds(self.chunks)[0], 0)
        return Elements(
            source=self.elements, starts=shifts[np.searchsorted(self.chunks, self.layout.chunk_of(starts))] + starts
        )

    def jobs(self, chunks: Rows, reads: Rows | int = 0, offsets: Rows | int = 0, sizes: Rows | int = 0) -> NDArray[Any]:
        """How to decode chunks into their slots (dtype CHUNK), from these places in some reads, if any."""
        jobs = np.empty(len(chunks), CHUNK)
        jobs["read"], jobs["offset"], jobs["size"] = reads, offsets, sizes
        jobs["begin"], jobs["first"], jobs["stop"] = self.locate(chunks)
        jobs["elements"] = 0 if self.layout.cut else self.layout.chunk_elements
        return jobs
