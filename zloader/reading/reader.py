"""Loads the elements of some rows of one array, from the mirror or from the store.

The rows become chunks, and the chunks that the mirror lacks become coalesced reads (`zloader.reading.read_plan`). Each
read is decoded in a thread as soon as it arrives. With a mirror, the chunks are kept there, and the rows are taken from
there. Without one, or once it is full, chunks are decoded into the buffer of the fetch. If an earlier fetch or another
process is already downloading a chunk into the mirror, the reader waits for it instead of reading it twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from zloader.caching.leases import Leases
from zloader.caching.mirror import MirrorArray
from zloader.common.errors import CorruptChunkError, MissingObjectError
from zloader.common.locks import cached_property
from zloader.common.records import Rows, Span
from zloader.reading.read_plan import Elements, Slots, batches, planner_of
from zloader.reading.resources import Resources
from zloader.reading.shard_indexes import ShardIndexes, explained
from zloader.storage.decode import Decoder
from zloader.storage.layout import ArrayLayout, ChunkSpan, needed_bounds, total_bytes
from zloader.storage.placement import ObjectIndex

# One task reads and decodes spans of up to this many stored bytes, or an eighth of `in_flight_bytes` if that is less.
# A task costs about 0.3 ms of interpreter time, which is then small beside decoding, and eight tasks at once keep the
# link and the threads busy.
_BATCH_BYTES = 8 << 20
_BATCHES_IN_FLIGHT = 8
# Decoded bytes that a thread holds on their way to the mirror. Memory that is used again costs no page faults. A group
# of this size costs 0.2 ms of interpreter time, so smaller ones slow the threads down.
_SCRATCH_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class Needed:
    """The elements that some rows need from one array: `[start, stop)` of each row, contained in `chunks`."""

    reader: ArrayReader
    layout: ArrayLayout
    starts: Rows
    stops: Rows
    chunks: Rows

    @cached_property
    def bounds(self) -> tuple[Rows, Rows]:
        """The first needed element of each chunk and the element after its last, counted from its first element."""
        return needed_bounds(self.chunks, self.starts, self.stops, self.layout)

    @property
    def n_bytes(self) -> int:
        """Bytes of the needed elements and of those between them in the same chunk."""
        firsts, stops = self.bounds
        return int((stops - firsts).sum()) * self.layout.dtype.itemsize

    @cached_property  # what a mirror has may change
    def buffer_bytes(self) -> int:
        """Size of the buffer that loading needs, a multiple of 64; 0 if a mirror has the elements in place."""
        return 0 if self.reader.has_in_place(self.chunks) else -(-self.n_bytes // 64) * 64

    @property
    def ahead_bytes(self) -> int:
        """The memory that the elements take until they are gathered, in the buffer or in the page cache."""
        return self.buffer_bytes or int((self.stops - self.starts).sum()) * self.layout.dtype.itemsize

    async def load(self, buffer: NDArray[np.uint8], *, turn: int) -> Elements:
        """Loads the elements, as `reader` does."""
        return await self.reader.load(self, buffer, turn=turn)

    def slots(self, buffer: NDArray[np.uint8]) -> Slots:
        """Slots for the chunks in a buffer of at least `n_bytes`."""
        firsts, stops = self.bounds
        elements = buffer[: self.n_bytes].view(self.layout.dtype)
        return Slots(layout=self.layout, chunks=self.chunks, elements=elements, firsts=firsts, stops=stops)


class ArrayReader:
    """Loads the elements of rows of one array. With a mirror that has room, it reads each chunk only once."""

    def __init__(
        self,
        layout: ArrayLayout,
        mirror: MirrorArray | None,
        leases: Leases | None,
        resources: Resources,
    ) -> None:
        """`leases` are the epoch's leases on chunks of the mirror."""
        self._layout = layout
        self.mirror = mirror
        self._filler = None if mirror is None or leases is None else resources.filler(mirror, leases)
        self._resources = resources
        self._decoder = Decoder(layout, few=True)  # or else the epoch has loaded numba
        # If a chunk is corrupt twice, the stored object is corrupt. Unlike a busy server, that does not pass.
        self._rereads = min(1, resources.options.retries)
        known = resources.indexes.setdefault(layout.path, {})
        self._indexes = ShardIndexes(layout, resources.object_sizes, resources.url, known=known, rereads=self._rereads)
        self._planner = planner_of(layout, resources.options, resources.object_sizes, sweeping=resources.sweeping)

    def needed(self, rows: Rows, starts: Rows, stops: Rows) -> Needed:
        """The elements `[start, stop)` of each of some rows, to be loaded."""
        chunks = self._planner.chunks(starts, stops)
        return Needed(reader=self, layout=self._layout, starts=starts, stops=stops, chunks=chunks)

    def _bytes(self, chunks: Rows) -> int:
        return len(chunks) * self._layout.chunk_elements * self._layout.dtype.itemsize

    def has_in_place(self, chunks: Rows) -> bool:
        """Whether `load` needs no buffer for these chunks, because a mirror has their elements in place, or will."""
        mirror = self.mirror
        return mirror is not None and (mirror.writable or mirror.contains(chunks))

    async def load(self, needed: Needed, buffer: NDArray[np.uint8], *, turn: int) -> Elements:
        """The needed elements of each row. Reads with a smaller `turn` go first."""
        mirror, chunks = self.mirror, needed.chunks
        missing = chunks
        if mirror is not None and self._filler is not None:
            downloaded = await self.fill_mirror(chunks, turn) if mirror.writable else chunks[:0]
            missing = await self._filler.missing(chunks)
            self._count_mirrored(chunks[~np.isin(chunks, np.concatenate([downloaded, missing]))])
            if not len(missing):
                (source, positions), _ = await self._resources.run(mirror.rows, needed.starts, needed.stops)
                return Elements(source=source, starts=positions)
        if len(buffer) < needed.n_bytes:
            buffer = np.empty(needed.n_bytes, np.uint8)  # the mirror's disk has filled up meanwhile
        slots = needed.slots(buffer)
        await self._read_chunks(missing, slots, turn)
        await self._take_mirrored(chunks[~np.isin(chunks, missing)], slots)
        return slots.filled(needed.starts)

    async def _take_mirrored(self, chunks: Rows, slots: Slots) -> None:
        """Fills the slots of chunks that the mirror has."""
        mirror, run = self.mirror, self._resources.run
        if mirror is None or not len(chunks):
            return
        await run(mirror.prefetch, chunks)
        async with asyncio.TaskGroup() as group:
            for few in self._few_of(chunks):
                group.create_task(run(mirror.take, few, slots.jobs(few), slots.elements))

    async def fill_mirror(self, chunks: Rows, turn: int) -> Rows:
        """Reads the chunks that the mirror lacks into it, and waits for those that others are reading.

        Returns the chunks that were read here.
        """
        mirror, filler = self.mirror, self._filler
        assert mirror is not None
        assert filler is not None
        if mirror.contains(chunks):
            return chunks[:0]
        wanted = self._planner.chunks_to_mirror(chunks, first_fetch=not turn)
        return await filler.fill(chunks, wanted, lambda mine: self._read_chunks(mine, None, turn))

    def _count_mirrored(self, chunks: Rows) -> None:
        first, last = self._layout.chunk_bounds(chunks)
        self._resources.counters.chunks_from_mirror += len(chunks)
        self._resources.counters.bytes_from_mirror += int((last - first).sum()) * self._layout.dtype.itemsize

    async def _read_chunks(self, missing: Rows, slots: Slots | None, turn: int) -> None:
        """Reads and decodes chunks into their slots, or into the mirror if `slots` is None."""
        if not len(missing):
            return
        indexes = await self._indexes_of(missing, turn)
        spans, absent = self._planner.spans(missing, indexes, into_mirror=slots is None)
        self._resources.counters.spans += len(spans)
        self._fill_absent(absent, slots)
        stored_bytes = min(_BATCH_BYTES, self._resources.options.in_flight_bytes // _BATCHES_IN_FLIGHT)
        async with asyncio.TaskGroup() as group:
            for batch in batches(spans, chunk_bytes=self._bytes(missing[:1]), stored_bytes=stored_bytes):
                await self._resources.in_flight.acquire(total_bytes(batch), turn)
                group.create_task(self._read_batch(batch, slots))

    async def _read_batch(self, batch: list[ChunkSpan], slots: Slots | None) -> None:
        """Reads some spans and decodes their chunks; a span that fails its checksum is read once more."""
        left, attempts = batch, self._rereads + 1
        try:
            for attempt in range(attempts):
                decode = partial(self._decode, left, slots)
                corrupt = await self._resources.decode([piece.span for piece in left], decode)
                if not corrupt:
                    break
                left = [piece for piece, _ in corrupt]
                if attempt + 1 == attempts:
                    raise corrupt[0][1]
                self._resources.counters.retries += len(left)
            self._resources.counters.chunks_decoded += sum(len(piece.chunks) for piece in batch)
        finally:
            self._resources.in_flight.release(total_bytes(batch))

    def _decode(
        self, pieces: Sequence[ChunkSpan], slots: Slots | None, stored: Sequence[bytes | NDArray[np.uint8]]
    ) -> list[tuple[ChunkSpan, CorruptChunkError]]:
        """Decodes spans into their slots, or the mirror; returns the corrupt spans, each with its first error."""
        chunks = np.concatenate([piece.chunks for piece in pieces])
        reads = np.repeat(np.arange(len(pieces)), [len(piece.chunks) for piece in pieces])
        offsets = np.concatenate([piece.offsets for piece in pieces])
        sizes = np.concatenate([piece.sizes for piece in pieces])
        if slots is None:
            errors = self._decode_to_mirror(stored, chunks, reads, offsets, sizes)
        else:
            errors = self._decoder.decode_all(stored, slots.jobs(chunks, reads, offsets, sizes), slots.elements)
        corrupt: dict[int, tuple[ChunkSpan, CorruptChunkError]] = {}
        for position, error in errors:
            read, start, size = (int(each[position]) for each in (reads, offsets, sizes))
            where = self._describe(pieces[read].span, start, start + size, int(chunks[position]))
            corrupt.setdefault(read, (pieces[read], explained(error, where)))
        return list(corrupt.values())

    def _describe(self, span: Span, start: int, stop: int, chunk: int) -> str:
        at = f"bytes {span.start + start}-{span.start + stop - 1} of {span.key}"
        return f"{self._resources.url}: chunk {chunk} of {self._layout.path}, {at}"

    def _fill_absent(self, absent: Rows, slots: Slots | None) -> None:
        """Fills in chunks that were never written, or raises if the store should have them."""
        if len(absent) and not self._layout.absent_is_fill:
            raise MissingObjectError(
                f"{self._resources.url}: chunk {absent[0]} of {self._layout.path} was never written: the store is "
                "incomplete. Convert it again"
            )
        if len(absent):
            self._layout.check_bounds(np.atleast_1d(self._layout.fill_value))
        for chunk in absent[:, None]:
            filled = self._scratch(chunk) if slots is None else slots
            filled.of(chunk)[0][:] = self._layout.fill_value
            if slots is None and self.mirror is not None:
                self.mirror.keep(chunk, filled.jobs(chunk), filled.elements)

    def _decode_to_mirror(
        self,
        stored: Sequence[bytes | NDArray[np.uint8]],
        chunks: Rows,
        reads: Rows,
        offsets: Rows,
        sizes: Rows,
    ) -> list[tuple[int, CorruptChunkError]]:
        """Decodes chunks and writes them to the mirror, a few at a time, so that they stay in the processor's cache.

        Returns the position and the error of each corrupt chunk.
        """
        assert self.mirror is not None
        corrupt = []
        for here in self._few_of(np.argsort(chunks, kind="stable")):
            slots = self._scratch(chunks[here])
            jobs = slots.jobs(chunks[here], reads[here], offsets[here], sizes[here])
            errors = self._decoder.decode_all(stored, jobs, slots.elements)
            corrupt += [(int(here[position]), error) for position, error in errors]
            kept = np.delete(np.arange(len(here)), [position for position, _ in errors])
            self.mirror.keep(chunks[here[kept]], jobs[kept], slots.elements)
        return corrupt

    def _few_of(self, chunks: Rows) -> list[Rows]:
        """Some chunks, or their positions, in groups that decode to about 8 MiB."""
        step = max(1, _SCRATCH_BYTES // self._bytes(chunks[:1]))
        return np.split(chunks, range(step, len(chunks), step))

    def _scratch(self, chunks: Rows) -> Slots:
        """Slots for chunks (ascending) on their way to the mirror, in memory that this thread reuses."""
        elements = self._resources.own_buffer("decoded", self._bytes(chunks)).view(self._layout.dtype)
        first, last = self._layout.chunk_bounds(chunks)
        return Slots(layout=self._layout, chunks=chunks, elements=elements, firsts=first - first, stops=last - first)

    async def _indexes_of(self, chunks: Rows, turn: int) -> dict[int, ObjectIndex]:
        """The index of each shard that contains some of the chunks."""
        return await self._indexes.of(self._planner.shards(chunks), partial(self._read_spans, turn))

    async def _read_spans(self, turn: int, spans: Sequence[Span], attempt: int) -> Sequence[bytes]:
        """The bytes of some indexes, within the bound of those in flight."""
        resources, n_bytes = self._resources, sum(span.size for span in spans)
        resources.counters.retries += len(spans) * (attempt > 0)
        await resources.in_flight.acquire(n_bytes, turn)
        try:
            return await resources.read(spans)
        finally:
            resources.in_flight.release(n_bytes)
