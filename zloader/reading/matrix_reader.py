"""Loads rows of one matrix: from the mirror, which is filled with the blocks that it lacks, or from the store.

A block of rows that the mirror lacks is read once, together with its neighbours: one call in a thread decodes the
chunks of its rows, puts the genes that are trained on into the order of x, packs the rows and writes them. If an
earlier fetch or another process is reading a block already, it is waited for. Rows that the mirror does not take, as on
a full disk, are decoded into the buffer of their fetch.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zloader.caching.leases import Leases
from zloader.caching.rows_file import RowsFile
from zloader.common.concurrent_calls import aside
from zloader.common.errors import CorruptChunkError
from zloader.common.options import FetchOptions
from zloader.common.records import Rows, Span
from zloader.reading.chunks import ArrayReader, Stored, located, read_again
from zloader.reading.gates import ByteBudget
from zloader.reading.gather import SourceRows, as_bits, totals_of
from zloader.reading.loops import copy_rows
from zloader.reading.read_plan import Elements, FillPlanner, jobs_of
from zloader.reading.recipe import MatrixPart
from zloader.reading.resources import Counters, Resources
from zloader.storage.coded_rows import code_blocks, views_of, words_of
from zloader.storage.layout import Reads, chunks_of
from zloader.storage.row_blocks import RowForm, begun_blocks

# Decoded bytes that a thread holds on their way to the mirror. Fresh memory costs page faults, and memory that is used
# again stays in the core's cache. Rows of this size cost 0.2 ms of interpreter time, so fewer slow the threads down.
_STRETCH_BYTES = 4 << 20
# How often a fetch checks whether the blocks that it waits for have arrived. It has to poll: other processes share only
# the mirror's files with this one, so they cannot notify it.
_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Needed:
    """Some rows of a matrix that a fetch needs, at positions `at` of it.

    `through` are the elements that are read into the buffer of the fetch, as far as is known now.
    """

    reader: MatrixReader
    at: Rows | slice
    rows: Rows
    through: Elements | None = None

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffer that loading needs."""
        return 0 if self.through is None else self.through.n_bytes

    @property
    def ahead_bytes(self) -> int:
        """The memory that the rows take until they are gathered, about, in the buffer or in the page cache.

        Rows of a mirror count, too, because a small page cache would evict them.
        """
        if self.through is None:
            return int(len(self.rows) * self.reader.row_bytes)
        return self.through.n_bytes + self.through.parts_bytes

    @property
    def chooses_later(self) -> bool:
        """Whether the genes of x are chosen when minibatches are gathered, for some rows at least."""
        return self.through is not None or not self.reader.keeps_columns


@contextlib.contextmanager
def opened_readers(
    parts: Sequence[MatrixPart], options: FetchOptions, counters: Counters, *, sweeps: bool
) -> Iterator[list[MatrixReader]]:
    """The reader of each part. They share threads and one bound on the bytes in flight.

    `sweeps` says that this machine will read all rows, so that the blocks beside those that are needed are worth
    mirroring. On leaving, the mirrors record the blocks whose checksums were verified, and the leases are released, so
    that other processes may download the remaining blocks.
    """
    in_flight, bands = ByteBudget(options.in_flight_bytes), ByteBudget(options.memory // 8)
    own_buffers = threading.local()
    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(options.threads, thread_name_prefix="zloader-decode"))
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        readers: list[MatrixReader] = []
        for part in parts:
            resources = Resources(
                url=part.url,
                options=options,
                source=part.open_source(),
                object_sizes=part.object_sizes,
                counters=counters,
                threads=threads,
                in_flight=in_flight,
                bands=bands,
                own_buffers=own_buffers,
                indexes=part.indexes,
            )
            leases = None
            if part.mirror is not None:
                stack.callback(part.mirror.record_verified)
                leases = stack.enter_context(contextlib.closing(Leases(part.mirror.directory.path)))
            readers.append(MatrixReader(part, leases, resources, sweeps=sweeps))
        yield readers


class MatrixReader:
    """Loads rows of one matrix, a `part` of the matrix over all stores.

    Its `mirror` keeps the genes of x that are chosen of CSR rows, and all genes of dense rows. Another one with all
    genes may be there, which is not filled any more. `leases` are the epoch's leases on blocks.
    """

    def __init__(self, part: MatrixPart, leases: Leases | None, resources: Resources, *, sweeps: bool) -> None:
        self.part = part
        self.mirror: RowsFile | None = None if part.mirror is None else part.mirror.rows
        self._whole: RowsFile | None = None if part.mirror is None else part.mirror.whole
        self._matrix, self._indptr, self._chosen = part.matrix, part.indptr, part.genes
        self._leases, self._resources = leases, resources
        if self._keeps_chosen and self.mirror is not None and self.mirror.form.is_whole:
            self.mirror, self._whole = None, self.mirror  # there is no room for the genes
        self._arrays = [ArrayReader(array, resources) for array in part.matrix.arrays]
        itemsizes = sum(array.dtype.itemsize for array in part.matrix.arrays)
        kept_bytes = 2 if self.mirror is not None and (self.mirror.form.coded or self._keeps_chosen) else itemsizes
        self.row_bytes = part.matrix.values.n_elements / max(1, part.matrix.n_rows) * kept_bytes
        if self.mirror is not None:
            self._planner = FillPlanner.of(
                part.matrix, self.mirror.form, resources.options, part.object_sizes, sweeps=sweeps
            )

    @property
    def _keeps_chosen(self) -> bool:
        return self._chosen is not None and self._matrix.genes is not None

    @property
    def keeps_columns(self) -> bool:
        """Whether the mirror keeps rows whose genes are columns of x."""
        return self.mirror is not None and self._matrix.genes is not None

    def needed(self, at: Rows | slice, rows: Rows) -> Needed:
        """Some rows, to be loaded. Reads the offsets of rows that no mirror has, maybe from the store."""
        needed, mirror = Needed(reader=self, at=at, rows=rows), self.mirror
        if mirror is not None:
            rows = rows[:0] if mirror.writable else rows[self._absent(mirror, rows, mirror.absent(mirror.blocks(rows)))]
            if not len(rows):
                return needed
        return replace(needed, through=self._through(*self._matrix.elements_of(rows, self._indptr)))

    @property
    def looks_up(self) -> bool:
        """Whether `needed` may read row offsets from the store."""
        return self._indptr is not None and (self.mirror is None or not self.mirror.writable)

    def _through(self, starts: Rows, stops: Rows) -> Elements:
        for array in self._arrays:
            array.require_room(starts, stops)
        return Elements.of(self._matrix.arrays, starts, stops)

    @staticmethod
    def _absent(mirror: RowsFile, rows: Rows, missing: Rows) -> NDArray[np.bool_]:
        return np.isin(rows // mirror.form.block_rows, missing)

    async def load(self, needed: Needed, buffer: NDArray[np.uint8], *, turn: int) -> list[SourceRows]:
        """The needed rows, from one to three sources. Reads with a smaller `turn` go first."""
        rows, at, absent, sources = needed.rows, needed.at, np.ones(len(needed.rows), bool), []
        # Rows with all genes are for a full or read-only cache, which has no room for those of the chosen ones.
        for mirror, take in ((self.mirror, self._kept_in), (self._whole, self._chosen_of)):
            if mirror is None or not absent.any():
                continue
            blocks = mirror.blocks(rows[absent])
            fills = mirror is self.mirror and mirror.writable
            filled = await self.fill_mirror(blocks, turn) if fills else blocks[:0]
            missing = await self._missing(mirror, blocks)
            self._count_kept(mirror, blocks[~np.isin(blocks, np.concatenate([filled, missing]))])
            here = absent & ~self._absent(mirror, rows, missing)
            if here.any():
                kept, _ = await self._resources.run(take, mirror, rows[here])
                sources.append(replace(kept, at=at if here.all() else _some(at, here)))
                absent &= ~here
        if absent.any() or not sources:
            through = needed.through
            if through is None or self.mirror is not None or not absent.all():
                through = self._through(*await aside(self._matrix.elements_of, rows[absent], self._indptr))
                at = _some(at, absent)
            sources.append(await self._read_through(at, through, buffer, turn))
        return sources

    def _count_kept(self, mirror: RowsFile, blocks: Rows) -> None:
        self._resources.counters.chunks_from_mirror += len(blocks)
        self._resources.counters.bytes_from_mirror += mirror.bytes_of(blocks)

    def _chosen_of(self, whole: RowsFile, rows: Rows) -> SourceRows:
        """The chosen genes of some rows with all genes, as a mirror of a panel has them."""
        assert self._chosen is not None
        found = self._kept_in(whole, rows).decoded(self._matrix.n_genes)
        totals = totals_of(found.values, found.starts[1], found.lengths)
        return replace(found.with_genes(self._chosen, None), totals=totals)

    def _kept_in(self, mirror: RowsFile, rows: Rows) -> SourceRows:
        """Some rows where they are in the memory of a mirror."""
        kept = mirror.rows(rows)
        return SourceRows(at=slice(None), chosen=self._chosen if kept.genes is None else None, **vars(kept))

    async def _read_through(
        self, at: Rows | slice, through: Elements, buffer: NDArray[np.uint8], turn: int
    ) -> SourceRows:
        """Rows that are decoded into the buffer, or into memory of their own if it is too small."""
        if through.n_bytes > len(buffer):  # the mirror's disk has filled up meanwhile
            buffer = np.empty(through.n_bytes, np.uint8)
        places = through.places(buffer)
        async with asyncio.TaskGroup() as group:
            for array, (chunks, jobs), place in zip(self._arrays, through.jobs, places, strict=True):
                group.create_task(array.load(chunks, jobs, place, turn=turn))
        *genes, values = places
        rows, totals = _rows_at(at, genes[0] if genes else None, values, through), None
        if (self.mirror or self._whole) is not None and self._keeps_chosen:  # as of rows that are in the mirror
            totals, _ = await self._resources.run(totals_of, rows.values, rows.starts[1], rows.lengths)
        return replace(rows, chosen=self._chosen, totals=totals)

    # ---- filling

    async def _missing(self, mirror: RowsFile, blocks: Rows) -> Rows:
        """The blocks that a mirror lacks; checksums that have to be compared are compared in a thread."""
        if not mirror.has_unverified(blocks):
            return mirror.missing(blocks)
        missing, _ = await self._resources.run(mirror.missing, blocks)
        return np.asarray(missing)

    async def fill_mirror(self, blocks: Rows, turn: int) -> Rows:
        """Reads the blocks that the mirror lacks into it, with those beside them that are missing, too.

        Waits for those that others are reading. Returns the blocks that were read here.
        """
        mirror, leases = self.mirror, self._leases
        assert mirror is not None
        assert leases is not None
        if mirror.contains(blocks):
            return blocks[:0]
        left = await self._missing(mirror, self._planner.to_fill(blocks, first_fetch=not turn))
        filled, waited_s = [blocks[:0]], 0.0
        while len(left):
            if waited_s > self._resources.options.deadline_s:
                mine, others = left, left[:0]
            else:
                mine, others = mirror.acquire(left, leases)
            filled.append(mine)
            try:
                await self._fill(mirror, mine, turn)
            finally:
                mirror.release(mine, leases)
            left = await self._missing(mirror, others[np.isin(others, blocks)])
            if len(left):
                await asyncio.sleep(_POLL_S)
                waited_s += _POLL_S
        return np.concatenate(filled)

    async def _fill(self, mirror: RowsFile, blocks: Rows, turn: int) -> None:
        async with asyncio.TaskGroup() as group:
            for some in self._planner.batches(blocks):
                if not mirror.writable:
                    return
                if self._whole is not None and not len(
                    await self._missing(self._whole, self._whole.blocks(mirror.form.rows_of(some)))
                ):
                    group.create_task(self._fill_from_whole(mirror, self._whole, some))
                    continue
                if self._planner.parts_bytes:
                    n_bytes = mirror.form.most_bytes(len(some) * mirror.form.block_rows, 0)
                    n_bytes += len(some) * self._planner.parts_bytes
                    await self._resources.bands.acquire(n_bytes, turn)
                    group.create_task(self._fill_bands(mirror, some, n_bytes, turn))
                    continue
                batch = await self._batch(mirror, some, turn)
                await self._resources.in_flight.acquire(batch.n_bytes, turn)
                group.create_task(self._fill_batch(mirror, batch, turn))

    async def _fill_bands(self, mirror: RowsFile, blocks: Rows, n_bytes: int, turn: int) -> None:
        """Decodes chunks that hold parts of rows to where the rows are packed, in several threads, and keeps these."""
        try:
            form, (array,), rows = mirror.form, self._arrays, mirror.form.rows_of(blocks)
            starts, stops = self._matrix.elements_of(rows, None)
            memory = np.empty(form.most_bytes(len(rows), 0), np.uint8)
            ends, (places,) = begun_blocks(form, stops - starts, np.empty(0), memory)
            firsts = np.arange(0, len(rows), form.block_rows)
            lasts = np.minimum(firsts + form.block_rows, len(rows)) - 1
            chunks, jobs = jobs_of(array.layout, starts[firsts], stops[lasts], places)
            await array.load(chunks, jobs, words_of(memory, form.values), turn=turn)
            await self._resources.run(mirror.put, blocks, ends, memory)
        finally:
            self._resources.bands.release(n_bytes)

    async def _batch(self, mirror: RowsFile, blocks: Rows, turn: int) -> _Batch:
        """The reads for some blocks."""
        rows = mirror.form.rows_of(blocks)
        starts, stops = await aside(self._matrix.elements_of, rows, self._indptr)
        chunks = [chunks_of(starts, stops, array.layout) for array in self._arrays]
        async with asyncio.TaskGroup() as group:  # either may read an index first
            reads = [
                group.create_task(array.reads(of_array, turn))
                for array, of_array in zip(self._arrays, chunks, strict=True)
            ]
        return _Batch(blocks=blocks, starts=starts, stops=stops, reads=[each.result() for each in reads])

    async def _fill_batch(self, mirror: RowsFile, batch: _Batch, turn: int) -> None:
        """Reads and keeps some blocks; those with a corrupt chunk are read once more."""
        resources, n_bytes = self._resources, batch.n_bytes

        async def read(some: _Batch) -> tuple[_Batch, Sequence[CorruptChunkError]]:
            left, errors = await resources.decode(some.spans, partial(self._keep, mirror, some))
            resources.counters.chunks_decoded += some.n_chunks
            return await self._batch(mirror, left, turn) if errors else some, errors

        try:
            await read_again(batch, self._arrays[0].rereads, resources.counters, read)
        finally:
            resources.in_flight.release(n_bytes)

    def _stretches(self, mirror: RowsFile, blocks: Rows) -> Iterator[slice]:
        n = -(-len(blocks) * mirror.form.block_bytes // _STRETCH_BYTES)
        bounds = np.linspace(0, len(blocks), min(n, len(blocks)) + 1).astype(int).tolist()
        yield from map(slice, bounds, bounds[1:])

    def _keep(self, mirror: RowsFile, batch: _Batch, stored: Stored) -> tuple[Rows, list[CorruptChunkError]]:
        """Decodes, packs and writes blocks on this thread. Returns those with corrupt chunks, and their errors."""
        size = mirror.form.block_rows
        begin = self._packing if mirror.form.coded or self._keeps_chosen else self._in_place
        left, errors = [batch.blocks[:0]], list[CorruptChunkError]()
        for some in self._stretches(mirror, batch.blocks):
            rows = slice(some.start * size, some.stop * size)
            all_jobs, places, keep = begin(mirror, batch.blocks[some], batch.starts[rows], batch.stops[rows])
            wrong = list[CorruptChunkError]()
            of_arrays = zip(self._arrays, all_jobs, places, batch.reads, batch.shared(stored), strict=True)
            for array, jobs, place, reads, of_reads in of_arrays:
                wrong += array.decode(reads, located(*jobs, reads), place, of_reads).values()
            if not wrong:
                keep()
            else:
                left.append(batch.blocks[some])
                errors += wrong
        return np.concatenate(left), errors

    def _in_place(self, mirror: RowsFile, blocks: Rows, starts: Rows, stops: Rows) -> _Decoding:
        """Decodes rows to where they are packed."""
        form, lengths = mirror.form, stops - starts
        memory = self._resources.own_buffer("packed", form.most_bytes(len(lengths), int(lengths.sum())))
        ends, begins = begun_blocks(form, lengths, np.zeros(len(lengths)), memory)
        if form.genes is None:  # the rows of a block are one piece
            firsts = np.arange(0, len(starts), form.block_rows)
            starts, stops = starts[firsts], stops[np.minimum(firsts + form.block_rows, len(stops)) - 1]
        layouts = [array.layout for array in self._arrays]
        jobs = [jobs_of(layout, starts, stops, to) for layout, to in zip(layouts, begins, strict=True)]
        return jobs, [words_of(memory, layout.dtype) for layout in layouts], partial(mirror.put, blocks, ends, memory)

    def _packing(self, mirror: RowsFile, blocks: Rows, starts: Rows, stops: Rows) -> _Decoding:
        """Decodes rows, whose genes are then chosen and coded."""
        elements = self._through(starts, stops)
        genes, values = elements.places(self._resources.own_buffer("decoded", elements.n_bytes))
        rows = _rows_at(slice(None), genes, values, elements)
        return elements.jobs, [genes, values], partial(self._put, mirror, blocks, rows)

    async def _fill_from_whole(self, mirror: RowsFile, whole: RowsFile, blocks: Rows) -> None:
        self._count_kept(whole, whole.blocks(mirror.form.rows_of(blocks)))
        await self._resources.run(self._keep_from_whole, mirror, whole, blocks)

    def _keep_from_whole(self, mirror: RowsFile, whole: RowsFile, blocks: Rows) -> None:
        """Packs and writes blocks of the chosen genes, from rows with all genes, on this thread."""
        for some in self._stretches(mirror, blocks):
            rows = self._kept_in(whole, mirror.form.rows_of(blocks[some]))
            self._put(mirror, blocks[some], rows.decoded(self._matrix.n_genes))

    def _put(self, mirror: RowsFile, blocks: Rows, rows: SourceRows) -> None:
        form, n_rows = mirror.form, len(rows.lengths)
        sums = np.zeros(n_rows)
        if self._keeps_chosen:
            assert self._chosen is not None
            sums = totals_of(rows.values, rows.starts[1], rows.lengths)
            rows = rows.with_genes(self._chosen, form.genes)
        memory = self._resources.own_buffer("packed", form.most_bytes(n_rows, int(rows.lengths.sum())))
        mirror.put(blocks, packed(form, rows, sums, memory), memory)


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """Some blocks, the elements `[start, stop)` of each of their rows, and the reads for them from each array."""

    blocks: Rows
    starts: Rows
    stops: Rows
    reads: Sequence[Reads]

    @property
    def spans(self) -> list[Span]:
        return [span for reads in self.reads for span in reads.spans]

    @property
    def n_bytes(self) -> int:
        return sum(reads.n_bytes for reads in self.reads)

    @property
    def n_chunks(self) -> int:
        return sum(len(reads.chunks) for reads in self.reads)

    def shared(self, stored: Stored) -> Iterator[Stored]:
        """The bytes of the reads from each array, given those of `spans`."""
        first = 0
        for reads in self.reads:
            yield stored[first : first + len(reads.spans)]
            first += len(reads.spans)


# The jobs and the memory for each array, and what keeps the rows once they are decoded.
_Decoding: TypeAlias = "tuple[Sequence[tuple[Rows, NDArray[Any]]], Sequence[NDArray[Any]], Callable[[], None]]"


def _rows_at(at: Rows | slice, genes: NDArray[Any] | None, values: NDArray[Any], elements: Elements) -> SourceRows:
    """The rows whose elements are in memory one after another."""
    begins = elements.begins
    lengths = np.diff(begins, append=elements.n_elements)
    return SourceRows(at=at, genes=genes, values=values, starts=(begins, begins), lengths=lengths)


def _some(at: Rows | slice, chosen: NDArray[np.bool_]) -> Rows:
    """The positions of the chosen ones of rows that are at these positions."""
    return np.flatnonzero(chosen) + (at.start or 0) if isinstance(at, slice) else at[chosen]


def packed(form: RowForm, rows: SourceRows, sums: NDArray[np.float64], memory: NDArray[np.uint8]) -> Rows:
    """Packs CSR rows, from the first one of a block on, into blocks at the beginning of some memory.

    Returns the byte after each block. `sums` are those of the rows with all genes.
    """
    starts, lengths, values = rows.starts, rows.lengths, as_bits(rows.values)
    assert form.genes is not None
    assert rows.genes is not None
    if form.coded:
        ends, views = np.empty(-(-len(lengths) // form.block_rows), np.int64), views_of(memory, form.genes, form.values)
        words = words_of(memory, np.uint64)
        code_blocks(rows.genes, values, starts, lengths, sums.view(np.uint64), form.block_rows, views, words, ends)
        return ends
    ends, (of_genes, of_values) = begun_blocks(form, lengths, sums, memory)
    copy_rows(rows.genes, starts[0], lengths, of_genes, words_of(memory, form.genes))
    copy_rows(values, starts[1], lengths, of_values, words_of(memory, values.dtype))
    return ends
