"""Loads rows of a matrix from the form of the mirror that keeps coded rows, which is filled from the arrays.

A block of rows that the mirror lacks is read once: the elements of its rows are loaded, the genes that are trained on
are put into the order of x, and the rows are coded and kept. Rows that the mirror does not take, as on a full disk, are
coded in memory for the fetch alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zloader.caching.row_blocks import CodedRows, RowBlocks
from zloader.common.compiled import compiled
from zloader.common.concurrent_calls import aside
from zloader.common.locks import cached_property
from zloader.common.records import Rows
from zloader.reading import gather
from zloader.reading.filling import MirrorFiller
from zloader.reading.read_plan import MOST_SHRUNK, Elements, run_of
from zloader.reading.reader import ArrayReader
from zloader.reading.resources import Resources
from zloader.selecting.genes import ChosenGenes
from zloader.storage.coded_rows import ALIGNED, ENTRY, code_rows, most_bytes, row_bytes, views_of
from zloader.storage.layout import MatrixLayout, RowOffsets, align_to_runs, expand, fill_gaps
from zloader.transforms.normalizing import sum_of

_BATCH_BYTES = 4 << 20  # decoded bytes of the rows that are read and coded together, at most


@dataclass(frozen=True, kw_only=True)
class NeededRows:
    """Some rows that a fetch needs from the mirror, and the elements `[start, stop)` of each in the store."""

    reader: RowReader
    rows: Rows
    starts: Rows
    stops: Rows

    buffer_bytes = 0  # they are gathered from the mirror

    @cached_property
    def ahead_bytes(self) -> int:
        """The memory that the rows take until they are gathered, about, in the page cache."""
        return int((self.stops - self.starts).sum()) * 2

    async def load(self, buffer: NDArray[np.uint8], *, turn: int) -> CodedRows:
        """Loads the rows, as `reader` does."""
        return await self.reader.load(self, turn=turn)


class RowReader:
    """Loads rows of one matrix. `arrays` load its genes and values; the mirror keeps the genes in `chosen`, or all.

    `whole` has a mirror of rows with all genes, if there is one. It is not filled any more.
    """

    def __init__(
        self,
        matrix: MatrixLayout,
        indptr: NDArray[np.integer] | RowOffsets | None,
        arrays: Sequence[ArrayReader],
        filler: MirrorFiller[RowBlocks],
        whole: MirrorFiller[RowBlocks] | None,
        chosen: ChosenGenes | None,
        resources: Resources,
    ) -> None:
        self._matrix, self._indptr, self._chosen = matrix, indptr, chosen
        self._genes, self._values = arrays
        self._whole = whole
        self._filler, self.mirror, self._resources = filler, filler.mirror, resources
        stored_bytes = sum(
            array.chunk_bytes(resources.object_sizes) / array.chunk_elements * matrix.values.n_elements
            for array in matrix.arrays
        )
        block_bytes = stored_bytes / len(matrix.arrays) / max(1, self.mirror.layout.n_chunks)
        # What costs little to read may cost much to decode (zloader.reading.read_plan).
        block_bytes = max(block_bytes, self.mirror.decoded_chunk_bytes / MOST_SHRUNK)
        options = resources.options
        run = max(1, round(options.least_read_bytes / block_bytes))
        self._run = run_of(self.mirror.layout, run, resources.sweeping)
        self._gap = int(options.gap_bytes / block_bytes)

    def needed(self, rows: Rows, starts: Rows, stops: Rows) -> NeededRows:
        """Some rows, to be loaded."""
        return NeededRows(reader=self, rows=rows, starts=starts, stops=stops)

    async def load(self, needed: NeededRows, *, turn: int) -> CodedRows:
        """The needed rows. Reads with a smaller `turn` go first."""
        blocks, mirror = self.mirror.blocks(needed.rows), self.mirror
        filled = await self.fill_mirror(blocks, turn) if mirror.writable else blocks[:0]
        missing = await self._filler.missing(blocks)
        self._count(blocks[~np.isin(blocks, np.concatenate([filled, missing]))])
        if not len(missing):
            rows, _ = await self._resources.run(mirror.rows, needed.rows)
            return rows
        absent = np.isin(needed.rows // mirror.form.block_rows, missing)
        read = await self._read(needed.rows[absent], needed.starts[absent], needed.stops[absent], turn)
        rows, _ = await self._resources.run(self._joined, needed.rows, absent, read)
        return rows

    def _count(self, blocks: Rows) -> None:
        counters = self._resources.counters
        counters.chunks_from_mirror += len(blocks)
        counters.bytes_from_mirror += self.mirror.coded_bytes(blocks)

    def _joined(self, rows: Rows, absent: NDArray[np.bool_], read: _ReadRows) -> CodedRows:
        """Rows in memory: those that were read, and copies of those in the mirror."""
        kept = self.mirror.rows(rows[~absent])
        sizes = row_bytes(views_of(kept.source, *kept.dtypes), kept.starts, kept.lengths)
        begins = np.cumsum(sizes) - sizes
        memory = self._memory(len(read.entries), read.n_values, int(sizes.sum()))
        n_coded, entries = self._coded(read, memory), read.entries
        _copy(kept.source, kept.starts, begins + n_coded, sizes, memory)
        found = np.empty(len(rows), ENTRY)
        found[absent], found[~absent] = entries, kept.entries
        heads = np.empty(len(rows), np.int64)
        heads[absent], heads[~absent] = entries["offset"], begins + n_coded
        return CodedRows(source=memory, starts=heads, entries=found, dtypes=kept.dtypes)

    def _memory(self, n_rows: int, n_values: int, more: int = 0) -> NDArray[np.uint8]:
        n_bytes = int(most_bytes(n_rows, n_values, self.mirror.form.itemsizes)) + more
        return np.empty(-(-n_bytes // ALIGNED), np.uint64).view(np.uint8)

    def _views(self, memory: NDArray[np.uint8]) -> Any:
        return views_of(memory, *self.mirror.form.dtypes)

    # ---- filling

    async def fill_mirror(self, blocks: Rows, turn: int) -> Rows:
        """Reads the blocks that the mirror lacks into it, and waits for those that others are reading.

        Returns the blocks that were read here.
        """
        if self.mirror.contains(blocks):
            return blocks[:0]
        layout = self.mirror.layout
        wanted = fill_gaps(layout, align_to_runs(layout, blocks, self._run if turn else 1), self._gap)
        return await self._filler.fill(blocks, wanted, lambda mine: self._fill(mine, turn))

    async def _fill(self, blocks: Rows, turn: int) -> None:
        """Reads blocks, codes their rows and keeps them, a few at a time."""
        most = min(_BATCH_BYTES, self._resources.options.in_flight_bytes)
        few = max(1, most // self.mirror.decoded_chunk_bytes)
        async with asyncio.TaskGroup() as group:
            for first in range(0, len(blocks), few):
                group.create_task(self._fill_few(blocks[first : first + few], turn))

    async def _fill_few(self, blocks: Rows, turn: int) -> None:
        size, n_rows = self.mirror.form.block_rows, self._matrix.n_rows
        firsts = blocks * size
        rows = expand(firsts, np.minimum(firsts + size, n_rows) - firsts)
        async with self._resources.coding:
            if isinstance(self._indptr, np.ndarray):
                starts, stops = self._matrix.elements_of(rows, self._indptr)
            else:  # may read from the store
                starts, stops = await aside(self._matrix.elements_of, rows, self._indptr)
            read = await self._read(rows, starts, stops, turn)
            _, seconds = await self._resources.run(self._keep, blocks, starts[::size], read)
            self._resources.counters.decode_s += seconds

    async def _read(self, rows: Rows, starts: Rows, stops: Rows, turn: int) -> _ReadRows:
        """Rows from a mirror of whole rows or else from the store, with the genes as the mirror keeps them."""
        if self._whole is not None and not len(await self._whole.missing(self._whole.mirror.blocks(rows))):
            read, _ = await self._resources.run(self._of_whole, self._whole.mirror, rows)
            return read
        loads = []
        async with asyncio.TaskGroup() as group:
            for array in (self._genes, self._values):
                needed = array.needed(starts, starts, stops)
                buffer = np.empty(needed.buffer_bytes, np.uint8)
                loads.append(group.create_task(array.load(needed, buffer, turn=turn)))
        genes, values = (load.result() for load in loads)
        read, _ = await self._resources.run(self._arranged, genes, values, stops - starts)
        return read

    def _of_whole(self, whole: RowBlocks, rows: Rows) -> _ReadRows:
        found = whole.rows(rows)
        views, lengths = views_of(found.source, *found.dtypes), found.lengths
        coded = replace(_rows(views[1], views[2], found.starts, found.starts, lengths), coded=views)
        x = gather.csr_rows(
            [coded], len(rows), n_genes=self._matrix.n_genes, dtype=found.dtypes[1].name, genes=found.dtypes[0]
        )
        starts = x.indptr[:-1].astype(np.int64)
        return self._arranged(
            Elements(source=x.indices, starts=starts), Elements(source=x.values, starts=starts), lengths
        )

    def _arranged(self, genes: Elements, values: Elements, lengths: Rows) -> _ReadRows:
        rows = _rows(genes.source, values.source, genes.starts, values.starts, lengths)
        entries = np.zeros(len(lengths), ENTRY)
        entries["whole_length"] = lengths
        _totals(rows.values, values.starts, lengths, entries["whole_sum"])
        if self._chosen is None:
            return _ReadRows(rows, entries)
        form, chosen = self.mirror.form, gather.choose(rows, self._chosen)
        x = gather.csr_rows([chosen], len(lengths), n_genes=len(self._chosen), dtype=form.values.name, genes=form.genes)
        starts = x.indptr[:-1].astype(np.int64)
        return _ReadRows(_rows(x.indices, x.values, starts, starts, np.diff(x.indptr).astype(np.int64)), entries)

    def _keep(self, blocks: Rows, first_values: Rows, read: _ReadRows) -> None:
        rooms, size = self.mirror.room(blocks, first_values), self.mirror.form.block_rows
        for number, (block, room) in enumerate(zip(blocks.tolist(), rooms.tolist(), strict=True)):
            some = read.some(slice(number * size, (number + 1) * size))
            memory = self._memory(len(some.entries), some.n_values)
            n_bytes = self._coded(some, memory)
            self.mirror.keep(block, room, memory[:n_bytes])

    def _coded(self, read: _ReadRows, memory: NDArray[np.uint8]) -> int:
        """Codes rows as a block at the beginning of some memory, and completes their entries. Returns its bytes."""
        rows, entries = read
        assert rows.genes is not None
        n_bytes = code_rows(rows.genes, rows.values, rows.starts, rows.lengths, entries, self._views(memory))
        memory[: entries.nbytes] = entries.view(np.uint8)
        return int(n_bytes)


class _ReadRows(NamedTuple):
    """Rows that were read, and their entries without places."""

    rows: gather.StoreRows
    entries: NDArray[Any]

    @property
    def n_values(self) -> int:
        return int(self.rows.lengths.sum())

    def some(self, which: slice) -> _ReadRows:
        """Some consecutive rows."""
        genes, values = self.rows.starts
        some = replace(self.rows, starts=(genes[which], values[which]), lengths=self.rows.lengths[which])
        return _ReadRows(some, self.entries[which])


@compiled
def _totals(values: NDArray[Any], starts: Rows, lengths: Rows, out: NDArray[np.float64]) -> None:
    """The sum of each row, or a negative value that it has."""
    for row in range(len(starts)):
        of_row = values[starts[row] : starts[row] + lengths[row]]
        out[row] = sum_of(of_row)
        for i in range(len(of_row)):
            if of_row[i] < 0:
                out[row] = of_row[i]


def _rows(
    genes: NDArray[Any], values: NDArray[Any], of_genes: Rows, of_values: Rows, lengths: Rows
) -> gather.StoreRows:
    """Rows of `lengths` whose genes and values begin at these elements."""
    return gather.StoreRows(at=slice(None), genes=genes, values=values, starts=(of_genes, of_values), lengths=lengths)


@compiled
def _copy(source: NDArray[np.uint8], heads: Rows, begins: Rows, sizes: Rows, out: NDArray[np.uint8]) -> None:
    for row in range(len(heads)):
        n = sizes[row]
        taken, given = source[heads[row] : heads[row] + n], out[begins[row] : begins[row] + n]
        for i in range(n):
            given[i] = taken[i]
