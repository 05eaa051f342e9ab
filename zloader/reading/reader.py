"""Loads the elements of some rows of one array, from the mirror or from the store.

The rows become chunks, and the chunks that the mirror lacks become coalesced reads (`zloader.reading.read_plan`). Each
read is decoded in a thread as soon as it arrives. With a mirror, the chunks are decoded into its file, and the rows are
taken from there. Without a mirror, they are decoded into the buffer of the fetch. If an earlier fetch or another
process is already downloading a chunk into the mirror, the reader waits for it instead of reading it twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.caching.leases import Leases
from zloader.caching.mirror import MirrorArray
from zloader.common.errors import CorruptChunkError, MissingObjectError
from zloader.common.records import Rows, Span
from zloader.reading.read_plan import batches, planner_of
from zloader.reading.resources import Resources
from zloader.storage import blosc
from zloader.storage.decode import Decoder
from zloader.storage.layout import ArrayLayout, ChunkSpan, ShardIndex, needed_bounds, total_bytes

# One task reads and decodes spans of up to this many stored bytes, or an eighth of `in_flight_bytes` if that is less.
# A task costs about 0.3 ms of interpreter time, which is then small beside decoding, and eight tasks at once keep the
# link and the threads busy.
_BATCH_BYTES = 8 << 20
_BATCHES_IN_FLIGHT = 8
# Decoded bytes that a thread holds on their way to the mirror. They stay in the processor's cache until they are written,
# and need no fresh memory, which costs a page fault per 4 KiB. A group costs 0.2 ms of interpreter time.
_SCRATCH_BYTES = 4 << 20
# How often a fetch checks whether the chunks that it waits for have arrived. It has to poll: other processes share only
# the mirror's files with this one, so they cannot notify it.
_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Elements:
    """The elements of some rows: row i begins at `source[starts[i]]`."""

    source: NDArray[Any]
    starts: Rows


@dataclass(frozen=True, kw_only=True)
class _Slots:
    """The buffer of one fetch: one slot per chunk in `chunks` (ascending), laid end to end in `elements`.

    Only the elements from `firsts` to `stops` of each chunk, counted from its first element, have to be filled in.
    """

    layout: ArrayLayout
    chunks: Rows
    elements: NDArray[Any]
    firsts: Rows
    stops: Rows

    def locate(self, chunks: Rows) -> tuple[Rows, Rows, Rows]:
        """For each chunk: where its slot begins, its first needed element, and one past its last needed element."""
        at = np.searchsorted(self.chunks, chunks)
        return at * self.layout.chunk_elements, self.firsts[at], self.stops[at]

    def of(self, chunks: Rows) -> list[NDArray[Any]]:
        """The slot of each chunk."""
        begins, _, stops = self.locate(chunks)
        return [self.elements[a:b] for a, b in zip(begins.tolist(), (begins + stops).tolist(), strict=True)]

    def filled(self, starts: Rows) -> Elements:
        """The elements of rows that begin at `starts` in the array, with their positions in the buffer."""
        self.elements.flags.writeable = False
        width = self.layout.chunk_elements
        chunk = starts // width
        # An empty row may begin in a chunk that is not in the buffer. Its position is never used.
        positions = np.searchsorted(self.chunks, chunk) * width + (starts - chunk * width)
        return Elements(source=self.elements, starts=positions)


class ArrayReader:
    """Loads the elements of rows of one array. With a mirror that has room, it reads each chunk only once."""

    def __init__(
        self, layout: ArrayLayout, mirror: MirrorArray | None, leases: Leases | None, resources: Resources
    ) -> None:
        """`leases` are the epoch's leases on chunks of the mirror."""
        self._layout = layout
        self._mirror = mirror
        self._leases = leases
        self._resources = resources
        self._decoder = Decoder(layout)
        self._indexes: dict[int, asyncio.Task[ShardIndex]] = {}
        # If a chunk is corrupt twice, the stored object is corrupt. Unlike a busy server, that does not pass.
        self._rereads = min(1, resources.options.retries)
        self._planner = planner_of(layout, resources.options, resources.object_sizes, sweeping=resources.sweeping)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self._layout.dtype.itemsize

    def chunks(self, starts: Rows, stops: Rows) -> Rows:
        """The chunks that contain the elements `[start, stop)` of each row."""
        return self._planner.chunks(starts, stops)

    def _bytes(self, chunks: Rows) -> int:
        return len(chunks) * self._layout.chunk_elements * self._layout.dtype.itemsize

    def buffer_bytes(self, chunks: Rows) -> int:
        """Size of the buffer that `load` needs for these chunks, a multiple of 64; 0 if they go into a mirror."""
        if self._mirror is not None and (self._mirror.writable or self._mirror.contains(chunks)):
            return 0
        return -(-self._bytes(chunks) // 64) * 64

    async def load(self, chunks: Rows, starts: Rows, stops: Rows, buffer: NDArray[np.uint8], *, turn: int) -> Elements:
        """The elements `[start, stop)` of each row; `chunks` are the chunks that contain them.

        Reads with a smaller `turn` go first.
        """
        mirror, missing = self._mirror, chunks
        if mirror is not None:
            downloaded = await self.fill_mirror(chunks, turn) if mirror.writable else chunks[:0]
            missing = await self._missing(mirror, chunks)
            self._count_mirrored(chunks[~np.isin(chunks, np.concatenate([downloaded, missing]))])
            if not len(missing):
                (source, positions), _ = await self._resources.run(mirror.rows, starts, stops)
                return Elements(source=source, starts=positions)
        if len(buffer) < self._bytes(chunks):
            buffer = np.empty(self._bytes(chunks), np.uint8)  # the mirror's disk has filled up since `buffer_bytes`
        elements = buffer[: self._bytes(chunks)].view(self._layout.dtype)
        firsts, ends = needed_bounds(chunks, starts, stops, self._layout.chunk_elements)
        slots = _Slots(layout=self._layout, chunks=chunks, elements=elements, firsts=firsts, stops=ends)
        await self._read_chunks(missing, slots, turn)
        cached = chunks[~np.isin(chunks, missing)]
        if mirror is not None and len(cached):
            await self._resources.run(mirror.copy, cached, slots.of(cached))
        return slots.filled(starts)

    async def fill_mirror(self, chunks: Rows, turn: int) -> Rows:
        """Reads the chunks that the mirror lacks into it, and waits for those that others are reading.

        Returns the chunks that were read here.
        """
        mirror = self._mirror
        assert mirror is not None
        assert self._leases is not None
        if mirror.contains(chunks):
            return chunks[:0]
        wanted = self._planner.chunks_to_mirror(chunks, first_fetch=not turn)
        left = await self._missing(mirror, wanted)
        downloaded = [chunks[:0]]
        waited_s = 0.0
        while len(left):
            mine, others = await self._claim(mirror, left, waited_s)
            downloaded.append(mine)
            try:
                await self._read_chunks(mine, None, turn)
            finally:
                mirror.release(mine, self._leases)
            # Of the chunks that others are reading, this fetch waits only for those that it needs.
            left = await self._missing(mirror, others[np.isin(others, chunks)])
            if len(left):
                await asyncio.sleep(_POLL_S)
                waited_s += _POLL_S
        return np.concatenate(downloaded)

    async def _claim(self, mirror: MirrorArray, chunks: Rows, waited_s: float) -> tuple[Rows, Rows]:
        """The chunks to read here and the chunks that others are reading; after the deadline, all are read here."""
        if waited_s > self._resources.options.deadline_s:
            return chunks, chunks[:0]
        assert self._leases is not None
        if not mirror.limited:
            return mirror.acquire(chunks, self._leases)
        claimed, _ = await self._resources.run(mirror.acquire, chunks, self._leases)  # allocates space on disk
        return claimed

    async def _missing(self, mirror: MirrorArray, chunks: Rows) -> Rows:
        """The chunks that the mirror lacks; checksums that have to be compared are compared in a thread."""
        if not mirror.has_unverified(chunks):
            return mirror.missing(chunks)
        missing, _ = await self._resources.run(mirror.missing, chunks)
        return missing

    def _count_mirrored(self, chunks: Rows) -> None:
        first, last = self._layout.chunk_bounds(chunks)
        self._resources.counters.chunks_from_mirror += len(chunks)
        self._resources.counters.bytes_from_mirror += int((last - first).sum()) * self._layout.dtype.itemsize

    async def _read_chunks(self, missing: Rows, slots: _Slots | None, turn: int) -> None:
        """Reads and decodes chunks into their slots, or into the mirror if `slots` is None."""
        if not len(missing):
            return
        shards = self._planner.shards(missing)
        indexes = dict(zip(shards, await asyncio.gather(*(self._index(shard, turn) for shard in shards)), strict=True))
        spans, absent = self._planner.spans(missing, indexes, into_mirror=slots is None)
        self._resources.counters.spans += len(spans)
        self._fill_absent(absent, slots)
        stored_bytes = min(_BATCH_BYTES, self._resources.options.in_flight_bytes // _BATCHES_IN_FLIGHT)
        async with asyncio.TaskGroup() as group:
            for batch in batches(spans, chunk_bytes=self._bytes(missing[:1]), stored_bytes=stored_bytes):
                await self._resources.in_flight.acquire(total_bytes(batch), turn)
                group.create_task(self._read_batch(batch, slots))

    async def _read_batch(self, batch: list[ChunkSpan], slots: _Slots | None) -> None:
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
        self, pieces: Sequence[ChunkSpan], slots: _Slots | None, stored: Sequence[bytes | NDArray[np.uint8]]
    ) -> list[tuple[ChunkSpan, CorruptChunkError]]:
        """Decodes spans into their slots, or the mirror; returns the corrupt spans, each with its first error."""
        chunks = np.concatenate([piece.chunks for piece in pieces])
        jobs = np.empty(len(chunks), blosc.CHUNK)
        jobs["read"] = np.repeat(np.arange(len(pieces)), [len(piece.chunks) for piece in pieces])
        jobs["offset"] = np.concatenate([piece.offsets for piece in pieces])
        jobs["size"] = np.concatenate([piece.sizes for piece in pieces])
        if slots is None:
            errors = self._decode_to_mirror(stored, chunks, jobs)
        else:
            jobs["begin"], jobs["first"], jobs["stop"] = slots.locate(chunks)
            errors = self._decoder.decode_all(stored, jobs, slots.elements)
        corrupt: dict[int, tuple[ChunkSpan, CorruptChunkError]] = {}
        for position, error in errors:
            read, start, size = (int(jobs[name][position]) for name in ("read", "offset", "size"))
            where = self._describe(pieces[read].span, start, start + size, int(chunks[position]))
            corrupt.setdefault(read, (pieces[read], _explained(error, where)))
        return list(corrupt.values())

    def _describe(self, span: Span, start: int, stop: int, chunk: int) -> str:
        at = f"bytes {span.start + start}-{span.start + stop - 1} of {span.key}"
        return f"{self._resources.url}: chunk {chunk} of {self._layout.path}, {at}"

    def _fill_absent(self, absent: Rows, slots: _Slots | None) -> None:
        """Fills in chunks that were never written, or raises if the store should have them."""
        if len(absent) and not self._layout.absent_is_fill:
            raise MissingObjectError(
                f"{self._resources.url}: chunk {absent[0]} of {self._layout.path} was never written: the store is "
                "incomplete. Convert it again"
            )
        for chunk in absent[:, None]:
            filled = self._scratch(chunk) if slots is None else slots
            filled.of(chunk)[0][:] = self._layout.fill_value
            if slots is None:
                self._write_to_mirror(chunk, filled)

    def _decode_to_mirror(
        self, stored: Sequence[bytes | NDArray[np.uint8]], chunks: Rows, jobs: NDArray[Any]
    ) -> list[tuple[int, CorruptChunkError]]:
        """Decodes chunks and writes them to the mirror, a few at a time, so that they stay in the processor's cache.

        Returns the position and the error of each corrupt chunk.
        """
        corrupt = []
        order = np.argsort(chunks, kind="stable")
        step = max(1, _SCRATCH_BYTES // self._bytes(chunks[:1]))
        for here in np.split(order, range(step, len(order), step)):
            slots = self._scratch(chunks[here])
            jobs["begin"][here], jobs["first"][here], jobs["stop"][here] = slots.locate(chunks[here])
            errors = self._decoder.decode_all(stored, jobs[here], slots.elements)
            self._write_to_mirror(np.delete(chunks[here], [position for position, _ in errors]), slots)
            corrupt += [(int(here[position]), error) for position, error in errors]
        return corrupt

    def _scratch(self, chunks: Rows) -> _Slots:
        """Slots for chunks (ascending) on their way to the mirror, in memory that this thread reuses."""
        elements = self._resources.own_buffer("decoded", self._bytes(chunks)).view(self._layout.dtype)
        first, last = self._layout.chunk_bounds(chunks)
        return _Slots(layout=self._layout, chunks=chunks, elements=elements, firsts=first - first, stops=last - first)

    def _write_to_mirror(self, chunks: Rows, slots: _Slots) -> None:
        """Writes decoded chunks (ascending) to the mirror, consecutive chunks in one write."""
        assert self._mirror is not None
        for run in np.split(chunks, np.flatnonzero(np.diff(chunks) != 1) + 1):
            if len(run):
                begins, _, lengths = slots.locate(run)
                self._mirror.put(int(run[0]), slots.elements[begins[0] : begins[-1] + lengths[-1]])

    async def _index(self, shard: int, turn: int) -> ShardIndex:
        if shard not in self._indexes:
            self._indexes[shard] = asyncio.ensure_future(self._read_index(shard, turn))
        return await self._indexes[shard]

    async def _read_index(self, shard: int, turn: int) -> ShardIndex:
        resources, key = self._resources, self._layout.shard_key(shard)
        span = self._layout.find_index(shard, resources.object_sizes.get(key), resources.url)
        if not isinstance(span, Span):
            return ShardIndex(span)
        await resources.in_flight.acquire(span.size, turn)
        try:
            return await self._parsed_index(shard, span)
        finally:
            resources.in_flight.release(span.size)

    async def _parsed_index(self, shard: int, span: Span) -> ShardIndex:
        resources = self._resources
        for attempt in range(self._rereads + 1):
            try:
                (stored,) = await resources.read([span])
                size = resources.object_sizes[span.key]
                return ShardIndex(self._layout.parse_index(stored, shard=shard, object_size=size))
            except CorruptChunkError as error:
                if attempt == self._rereads:
                    where = f"{resources.url}: {span.key} bytes {span.start}-{span.stop - 1}"
                    raise _explained(error, where) from error
                resources.counters.retries += 1
        raise AssertionError("unreachable")


def _explained(error: CorruptChunkError, where: str) -> CorruptChunkError:
    explained = CorruptChunkError(f"{where}: {error}. Restore this object or convert the store again")
    explained.__cause__ = error
    return explained
