"""Which bytes to read, and where they go: rows become chunks, runs, byte spans, and places in a buffer. Pure, no I/O.

The reader reads these spans, and `zloader.insight.cost` counts them without reading. All chunk numbers are ascending,
and all but those of jobs are distinct. Every step is a few NumPy operations, linear in the rows or chunks that it gets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.options import FetchOptions
from zloader.common.records import Rows
from zloader.storage.decode import CHUNK, PART
from zloader.storage.layout import (
    ArrayLayout,
    Grid,
    MatrixLayout,
    Reads,
    align_to_runs,
    expand,
    fill_gaps,
    runs_of,
)
from zloader.storage.row_blocks import RowForm

# What costs little to read may cost much to decode: sorted labels shrink to a hundredth. Reads are not extended by more
# decoded bytes than this for each stored byte of the options.
MOST_SHRUNK = 16
_CHUNKS_OF_RUN, _RUN_BYTES = 4, 32 << 20  # the chunks at the ends of a run are decoded with both neighbours
_BATCH_BYTES, _DECODED_BYTES = 8 << 20, 16 << 20  # stored and decoded, of the blocks that are read together


@dataclass(frozen=True, kw_only=True)
class FillPlanner:
    """Plans which blocks of rows a mirror takes, and which of them are read together.

    Of the `n_blocks`, `run` are read together at least, and in the first fetch of an epoch `least`, with up to `gap`
    blocks between two of them. A batch has `few` blocks. If chunks hold parts of rows, a batch has whole bands, so that
    each chunk is decoded once, as far as they fit into an eighth of the memory, with `parts_bytes` for where the parts
    of a block go.
    """

    n_blocks: int
    run: int
    least: int
    gap: int
    few: int
    parts_bytes: int = 0

    @classmethod
    def of(
        cls,
        matrix: MatrixLayout,
        form: RowForm,
        options: FetchOptions,
        object_sizes: Mapping[str, int],
        *,
        sweeps: bool,
    ) -> FillPlanner:
        """The planner of a matrix. Blocks beside the needed ones are worth reading if an epoch `sweeps` all rows."""
        n_blocks, decoded = max(1, form.n_blocks), form.block_bytes
        whole = sum(array.chunk_bytes(object_sizes) * array.n_chunks for array in matrix.arrays)
        stored = max(whole / len(matrix.arrays) / n_blocks, decoded / MOST_SHRUNK)  # of a block, in one array
        # A chunk that holds several blocks is decoded once if they are read together.
        of_chunk, grid = max(-(-n_blocks // max(1, array.n_chunks)) for array in matrix.arrays), matrix.values.grid
        if grid is not None:
            of_chunk = max(1, grid.chunk[0] // form.block_rows)
        run = max(1, round(options.least_read_bytes / stored))
        run = max(run, min(_CHUNKS_OF_RUN * of_chunk, max(1, _RUN_BYTES // decoded)))
        most_stored = min(_BATCH_BYTES, options.in_flight_bytes // 8) / len(matrix.arrays)
        few = max(1, int(min(most_stored / stored, _DECODED_BYTES / decoded)))
        parts_bytes = 0
        if grid is not None:
            parts_bytes = 2 * len(grid.pieces[0]) * PART.itemsize
            few = of_chunk * max(1, _DECODED_BYTES // (of_chunk * (decoded + parts_bytes)))
            few = max(1, min(few, options.memory // 8 // (decoded + parts_bytes)))
        return cls(
            n_blocks=form.n_blocks,
            run=-(-run // of_chunk) * of_chunk if sweeps else of_chunk,
            least=of_chunk,
            gap=int(options.gap_bytes / stored),
            few=few,
            parts_bytes=parts_bytes,
        )

    def to_fill(self, blocks: Rows, *, first_fetch: bool) -> Rows:
        """The blocks to read when a fetch needs `blocks`, including those that are already there.

        The consumer waits for the first fetch, so that fetch leaves most of the neighbours out.
        """
        run = self.least if first_fetch else self.run
        return fill_gaps(align_to_runs(blocks, run, self.n_blocks), self.gap)

    def batches(self, blocks: Rows) -> Iterator[Rows]:
        """The blocks that are read together and decoded by one call in a thread, or by several if they are of bands."""
        if self.parts_bytes:
            opens = np.flatnonzero(np.diff(blocks // self.few)) + 1
            yield from np.split(blocks, opens) if len(blocks) else ()
            return
        for first in range(0, len(blocks), self.few):
            yield blocks[first : first + self.few]


def batches(
    reads: Reads, *, chunk_bytes: int, stored_bytes: int, decoded_bytes: int = 32 << 20
) -> Iterator[NDArray[np.int64]]:
    """The numbers of the spans that one task reads and decodes together, in order.

    A batch is full at `stored_bytes`, or at `decoded_bytes`, where a chunk is `chunk_bytes`.
    """
    first = stored = decoded = 0
    counts = np.bincount(reads.numbers, minlength=len(reads.spans)).tolist()
    for number, (span, count) in enumerate(zip(reads.spans, counts, strict=True), 1):
        stored += span.size
        decoded += count * chunk_bytes
        if stored >= stored_bytes or decoded >= decoded_bytes or number == len(counts):
            yield np.arange(first, number)
            first, stored, decoded = number, 0, 0


# ---- where chunks are decoded to


@dataclass(frozen=True, kw_only=True)
class Elements:
    """The elements that rows need from the arrays of a matrix, one row after another.

    Row i begins at `begins[i]` of `n_elements`. For each array, `jobs` has chunks, ascending, and how their pieces
    are decoded to there (dtype CHUNK, or PART in a grid), without where they are stored.
    """

    arrays: Sequence[ArrayLayout]
    begins: Rows
    n_elements: int
    jobs: Sequence[tuple[Rows, NDArray[Any]]]

    @classmethod
    def of(cls, arrays: Sequence[ArrayLayout], starts: Rows, stops: Rows) -> Elements:
        """The elements `[start, stop)` of each row. Rows that adjoin are one piece, as far as they are in one chunk."""
        firsts, lasts, counts = runs_of(starts, stops)
        lengths = lasts - firsts
        to = np.cumsum(lengths) - lengths
        jobs = [jobs_of(array, firsts, lasts, to) for array in arrays]
        begins = starts + np.repeat(to - firsts, counts)
        return cls(arrays=arrays, begins=begins, n_elements=int(lengths.sum()), jobs=jobs)

    @property
    def n_bytes(self) -> int:
        """Bytes of the elements, a multiple of 64 for each array."""
        return sum(self._aligned(array) for array in self.arrays)

    def _aligned(self, array: ArrayLayout) -> int:
        return -(-self.n_elements * array.dtype.itemsize // 64) * 64

    @property
    def parts_bytes(self) -> int:
        """Bytes of the jobs, which are many if chunks hold parts of rows."""
        return sum(jobs.nbytes for array, (_, jobs) in zip(self.arrays, self.jobs, strict=True) if array.grid)

    def places(self, buffer: NDArray[np.uint8]) -> list[NDArray[Any]]:
        """Where the elements of each array go in a buffer of `n_bytes`."""
        places, used = [], 0
        for array in self.arrays:
            places.append(buffer[used : used + self.n_elements * array.dtype.itemsize].view(array.dtype))
            used += self._aligned(array)
        return places


def jobs_of(layout: ArrayLayout, starts: Rows, stops: Rows, begins: Rows) -> tuple[Rows, NDArray[Any]]:
    """How to decode the elements `[start, stop)` of some pieces to `begins` in memory (dtype CHUNK, or PART in a grid).

    Returns the chunk of each job, ascending, so that those of one chunk follow one another.
    """
    some = np.flatnonzero(stops > starts)
    starts, stops, begins = starts[some], stops[some], begins[some]
    if layout.grid is not None:
        return _jobs_of_grid(layout.grid, starts, stops, begins)
    firsts = layout.chunk_of(starts)
    counts = layout.chunk_of(stops - 1) + 1 - firsts
    piece, chunks = np.repeat(np.arange(len(some)), counts), expand(firsts, counts)
    if (chunks[1:] < chunks[:-1]).any():
        order = np.argsort(chunks, kind="stable")
        piece, chunks = piece[order], chunks[order]
    chunk_starts, chunk_stops = layout.chunk_bounds(chunks)
    starts_there = np.maximum(starts[piece], chunk_starts)
    jobs = np.empty(len(piece), CHUNK)
    jobs["begin"] = begins[piece] + starts_there - starts[piece]
    jobs["first"], jobs["stop"] = starts_there - chunk_starts, np.minimum(stops[piece], chunk_stops) - chunk_starts
    jobs["elements"] = chunk_stops - chunk_starts if layout.cut else layout.chunk_elements
    return chunks, jobs


def _jobs_of_grid(grid: Grid, starts: Rows, stops: Rows, begins: Rows) -> tuple[Rows, NDArray[Any]]:
    """How to decode whole rows of chunks that hold parts of rows (dtype PART)."""
    run, bands, first_rows, stop_rows = grid.bands(starts, stops)
    columns, lengths, of_row, parts = grid.pieces
    chunks = (grid.first_chunks(bands)[:, None] + of_row).reshape(-1)
    jobs = np.empty((len(bands), len(columns)), PART)
    jobs["begin"] = (begins[run] + first_rows * grid.row_elements - starts[run])[:, None]
    jobs["first"] = ((first_rows - bands * grid.chunk[0]) * grid.part_elements)[:, None] + parts
    jobs["stop"] = jobs["first"] + lengths
    jobs["elements"] = math.prod(grid.chunk)
    jobs["rows"], jobs["column"] = (stop_rows - first_rows)[:, None], columns
    order = np.argsort(chunks, kind="stable")
    return chunks[order], jobs.reshape(-1)[order]
