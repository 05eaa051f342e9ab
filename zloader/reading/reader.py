"""The elements of some rows of one array: from the mirror, or read, decoded and mirrored.

Rows become chunks, and those that the mirror does not hold become coalesced reads; each read is decoded in a thread as
soon as it arrives: into the mirror, which the rows are then taken from, or without one into the buffer of the fetch. A
chunk that an earlier fetch or another process is reading into the mirror is waited for, not read twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.caching.leases import Leases
from zloader.caching.mirror import MirrorArray
from zloader.common.errors import CorruptChunkError, MissingObjectError
from zloader.common.records import Rows, Span
from zloader.reading.resources import Resources
from zloader.storage import blosc
from zloader.storage.decode import Decoder
from zloader.storage.layout import (
    ArrayLayout,
    ChunkSpan,
    chunk_spans,
    chunks_of,
    closed,
    distinct,
    needed,
    total_bytes,
    widened,
)

# Into a mirror nothing is read that is not kept: what lies in a small gap is brought too, unless it is there already.
# Only what some writers leave between chunks is read over.
PADDING_BYTES = 4096
# Spans read and decoded as one task, up to these many bytes or an eighth of what may be in flight: what a task costs,
# about 0.3 ms of the interpreter, is then little beside decoding, and eight of them keep a link and the threads busy.
_BATCH_BYTES = 8 << 20
_BATCH_DECODED = 32 << 20
_IN_FLIGHT = 8
# How often a fetch looks whether others have brought what it waits for. They may be other processes, which share
# nothing with this one but the mirror's files: there is nobody to be called by.
_LOOK_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Elements:
    """The elements of some rows: row i begins at `source[starts[i]]`."""

    source: NDArray[Any]
    starts: Rows


@dataclass(frozen=True, kw_only=True)
class _Slots:
    """The buffer of one fetch: `chunks` (ascending) laid end to end in `elements`.

    Of each chunk only the elements from `firsts` to `stops` (counted from the chunk's first) need be there.
    """

    layout: ArrayLayout
    chunks: Rows
    elements: NDArray[Any]
    firsts: Rows
    stops: Rows

    def places(self, chunks: Rows) -> tuple[Rows, Rows, Rows]:
        """Where the slot of each of `chunks` begins, and which of its elements are needed: from, and up to."""
        at = np.searchsorted(self.chunks, chunks)
        return at * self.layout.chunk_elements, self.firsts[at], self.stops[at]

    def of(self, chunks: Rows) -> list[NDArray[Any]]:
        """The slot of each of `chunks`."""
        begins, _, stops = self.places(chunks)
        return [self.elements[a:b] for a, b in zip(begins.tolist(), (begins + stops).tolist(), strict=True)]

    def filled(self, starts: Rows) -> Elements:
        """The elements, with where those that begin at `starts` in the array begin in the buffer."""
        self.elements.flags.writeable = False
        width = self.layout.chunk_elements
        chunk = starts // width
        # An empty row may begin in a chunk that is not here: anywhere will do for it.
        here = np.searchsorted(self.chunks, chunk) * width + (starts - chunk * width)
        return Elements(source=self.elements, starts=here)


class ArrayReader:
    """Loads the elements of rows of one array, each chunk once as long as there is a mirror to keep it."""

    def __init__(self, layout: ArrayLayout, mirror: MirrorArray | None, leases: Leases | None, shop: Resources) -> None:
        """`leases` is the epoch's owner of leases on chunks of the mirror."""
        self._layout = layout
        self._mirror = mirror
        self._owner = leases
        self._shop = shop
        self._decoder = Decoder(layout)
        self._indexes: dict[int, asyncio.Task[NDArray[np.uint64]]] = {}
        # What is corrupt twice is corrupt where it is stored; that does not pass, as a busy server does.
        self._rereads = min(1, shop.options.retries)
        self._run = layout.chunks_in(shop.options.least_read_bytes, shop.object_sizes) if shop.sweeping else 1
        self._gap = int(shop.options.gap_bytes / max(1.0, layout.chunk_bytes(shop.object_sizes)))  # chunks

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self._layout.dtype.itemsize

    def chunks(self, starts: Rows, stops: Rows) -> Rows:
        """The chunks that the elements `[start, stop)` of each row lie in."""
        return chunks_of(starts, stops, self._layout.chunk_elements)

    def _bytes(self, chunks: Rows) -> int:
        return len(chunks) * self._layout.chunk_elements * self._layout.dtype.itemsize

    def buffer_bytes(self, chunks: Rows) -> int:
        """Size of the buffer that `load` needs for these chunks, a multiple of 64; 0 where a mirror takes them."""
        if self._mirror is not None and (self._mirror.writable or self._mirror.holds(chunks)):
            return 0
        return -(-self._bytes(chunks) // 64) * 64

    async def load(self, chunks: Rows, starts: Rows, stops: Rows, buffer: NDArray[np.uint8], *, turn: int) -> Elements:
        """The elements `[start, stop)` of each row, all of them in `chunks`; reads of a smaller `turn` go first."""
        mirror, missing = self._mirror, chunks
        if mirror is not None:
            brought = await self.bring(chunks, turn) if mirror.writable else chunks[:0]
            missing = await self._missing(mirror, chunks)
            self._count_mirrored(chunks[~np.isin(chunks, np.concatenate([brought, missing]))])
            if not len(missing):
                (source, here), _ = await self._shop.run(mirror.rows, starts, stops)
                return Elements(source=source, starts=here)
        if len(buffer) < self._bytes(chunks):
            buffer = np.empty(self._bytes(chunks), np.uint8)  # the mirror's disk is full since a moment ago
        elements = buffer[: self._bytes(chunks)].view(self._layout.dtype)
        firsts, ends = needed(chunks, starts, stops, self._layout.chunk_elements)
        slots = _Slots(layout=self._layout, chunks=chunks, elements=elements, firsts=firsts, stops=ends)
        await self._read_chunks(missing, slots, turn)
        kept = chunks[~np.isin(chunks, missing)]
        if mirror is not None and len(kept):
            await self._shop.run(mirror.copy, kept, slots.of(kept))
        return slots.filled(starts)

    async def bring(self, chunks: Rows, turn: int) -> Rows:
        """Reads into the mirror what it does not hold, and waits for who does the same; gives what was read here."""
        mirror = self._mirror
        assert mirror is not None
        assert self._owner is not None
        if mirror.holds(chunks):
            return chunks[:0]
        # The consumer waits for the first fetch: that takes only what it needs, and what would be read with it.
        wide = closed(self._layout, widened(self._layout, chunks, self._run if turn else 1), self._gap)
        left = await self._missing(mirror, wide)
        brought = [chunks[:0]]
        waited_s = 0.0
        while len(left):
            mine, others = await self._claim(mirror, left, waited_s)
            brought.append(mine)
            try:
                await self._read_chunks(mine, None, turn)
            finally:
                mirror.abandon(mine, self._owner)
            # Of what others bring, this fetch waits for what it needs.
            left = await self._missing(mirror, others[np.isin(others, chunks)])
            if len(left):
                await asyncio.sleep(_LOOK_S)
                waited_s += _LOOK_S
        return np.concatenate(brought)

    async def _claim(self, mirror: MirrorArray, chunks: Rows, waited_s: float) -> tuple[Rows, Rows]:
        """Those of the chunks to read here, and those that others are reading; for a deadline's time at most."""
        if waited_s > self._shop.options.deadline_s:
            return chunks, chunks[:0]
        assert self._owner is not None
        if not mirror.limited:
            return mirror.claim(chunks, self._owner)
        claimed, _ = await self._shop.run(mirror.claim, chunks, self._owner)  # asks the file system for room
        return claimed

    async def _missing(self, mirror: MirrorArray, chunks: Rows) -> Rows:
        """Those that the mirror does not hold; checksums are compared in a thread."""
        if not mirror.unproved(chunks):
            return mirror.missing(chunks)
        missing, _ = await self._shop.run(mirror.missing, chunks)
        return missing

    def _count_mirrored(self, chunks: Rows) -> None:
        first, last = self._layout.chunk_bounds(chunks)
        self._shop.counters.chunks_from_mirror += len(chunks)
        self._shop.counters.bytes_from_mirror += int((last - first).sum()) * self._layout.dtype.itemsize

    async def _read_chunks(self, missing: Rows, slots: _Slots | None, turn: int) -> None:
        """Reads and decodes chunks into their slots, or into the mirror where there are none."""
        if not len(missing):
            return
        shards = distinct(missing // self._layout.chunks_per_shard).tolist()
        indexes = dict(zip(shards, await asyncio.gather(*map(self._index, shards)), strict=True))
        options = self._shop.options
        gap_bytes = options.gap_bytes if slots is not None else PADDING_BYTES
        pieces, absent = chunk_spans(
            self._layout, missing, indexes, gap_bytes=gap_bytes, max_read_bytes=options.max_read_bytes
        )
        self._shop.counters.spans += len(pieces)
        self._fill(absent, slots)
        async with asyncio.TaskGroup() as group:
            stored = min(_BATCH_BYTES, options.in_flight_bytes // _IN_FLIGHT)
            for batch in _batches(pieces, self._bytes(missing[:1]), stored):
                await self._shop.in_flight.acquire(total_bytes(batch), turn)
                group.create_task(self._read_batch(batch, slots))

    async def _read_batch(self, batch: list[ChunkSpan], slots: _Slots | None) -> None:
        """Reads some spans and decodes their chunks; a span that does not match its checksums is read once more."""
        left, attempts = batch, self._rereads + 1
        try:
            for attempt in range(attempts):
                stored = await self._shop.read([piece.span for piece in left])
                corrupt, seconds = await self._shop.run(self._decode, left, stored, slots)
                self._shop.counters.decode_s += seconds
                if not corrupt:
                    break
                left = [piece for piece, _ in corrupt]
                if attempt + 1 == attempts:
                    raise corrupt[0][1]
                self._shop.counters.retries += len(left)
            self._shop.counters.chunks_decoded += sum(len(piece.chunks) for piece in batch)
        finally:
            self._shop.in_flight.release(total_bytes(batch))

    def _decode(
        self, pieces: Sequence[ChunkSpan], stored: Sequence[bytes], slots: _Slots | None
    ) -> list[tuple[ChunkSpan, CorruptChunkError]]:
        """Decodes spans into their slots or the mirror; gives those that are corrupt, with the first error of each."""
        chunks = np.concatenate([piece.chunks for piece in pieces])
        mirrored = slots is None
        slots = self._scratch(chunks) if slots is None else slots
        placed = np.empty(len(chunks), blosc.CHUNK)
        placed["read"] = np.repeat(np.arange(len(pieces)), [len(piece.chunks) for piece in pieces])
        placed["offset"] = np.concatenate([piece.offsets for piece in pieces])
        placed["size"] = np.concatenate([piece.sizes for piece in pieces])
        placed["begin"], placed["first"], placed["stop"] = slots.places(chunks)
        found = self._decoder.decode_all(stored, placed, slots.elements)
        if mirrored:
            self._keep(np.delete(chunks, [position for position, _ in found]), slots)
        corrupt: dict[int, tuple[ChunkSpan, CorruptChunkError]] = {}
        for position, error in found:
            read, start, size = (int(placed[name][position]) for name in ("read", "offset", "size"))
            where = self._where(pieces[read].span, start, start + size, int(chunks[position]))
            corrupt.setdefault(read, (pieces[read], _explained(error, where)))
        return list(corrupt.values())

    def _where(self, span: Span, start: int, stop: int, chunk: int) -> str:
        at = f"bytes {span.start + start}-{span.start + stop - 1} of {span.key}"
        return f"{self._shop.url}: chunk {chunk} of {self._layout.path}, {at}"

    def _fill(self, absent: Rows, slots: _Slots | None) -> None:
        """Puts fill values where chunks were never written, or raises where they should have been."""
        if len(absent) and not self._layout.absent_is_fill:
            raise MissingObjectError(
                f"{self._shop.url}: chunk {absent[0]} of {self._layout.path} was never written: the store is "
                "incomplete. Convert it again"
            )
        for chunk in absent[:, None]:
            filled = self._scratch(chunk) if slots is None else slots
            filled.of(chunk)[0][:] = self._layout.fill_value
            if slots is None:
                self._keep(chunk, filled)

    def _scratch(self, chunks: Rows) -> _Slots:
        """Slots for some chunks on their way to the mirror, in memory that this thread uses again and again."""
        n_bytes, scratch = self._bytes(chunks), self._shop.scratch
        if len(getattr(scratch, "buffer", b"")) < n_bytes:
            scratch.buffer = np.empty(n_bytes, np.uint8)
        chunks = np.sort(chunks)
        elements = scratch.buffer[:n_bytes].view(self._layout.dtype)
        first, last = self._layout.chunk_bounds(chunks)
        return _Slots(layout=self._layout, chunks=chunks, elements=elements, firsts=first - first, stops=last - first)

    def _keep(self, chunks: Rows, slots: _Slots) -> None:
        """Writes decoded chunks to the mirror, those that follow one another at once."""
        assert self._mirror is not None
        chunks = np.sort(chunks)
        for run in np.split(chunks, np.flatnonzero(np.diff(chunks) != 1) + 1):
            if len(run):
                begins, _, lengths = slots.places(run)
                self._mirror.put(int(run[0]), slots.elements[begins[0] : begins[-1] + lengths[-1]])

    async def _index(self, shard: int) -> NDArray[np.uint64]:
        if shard not in self._indexes:
            self._indexes[shard] = asyncio.ensure_future(self._read_index(shard))
        return await self._indexes[shard]

    async def _read_index(self, shard: int) -> NDArray[np.uint64]:
        key = self._layout.shard_key(shard)
        span = self._layout.find_index(shard, self._shop.object_sizes.get(key), self._shop.url)
        if not isinstance(span, Span):
            return span
        size = self._shop.object_sizes[key]
        for attempt in range(self._rereads + 1):
            try:
                (stored,) = await self._shop.read([span])
                return self._layout.parse_index(stored, shard=shard, object_size=size)
            except CorruptChunkError as error:
                if attempt == self._rereads:
                    raise _explained(error, f"{self._shop.url}: {key} bytes {span.start}-{span.stop - 1}") from error
                self._shop.counters.retries += 1
        raise AssertionError("unreachable")


def _explained(error: CorruptChunkError, where: str) -> CorruptChunkError:
    explained = CorruptChunkError(f"{where}: {error}. Restore this object or convert the store again")
    explained.__cause__ = error
    return explained


def _batches(pieces: Sequence[ChunkSpan], chunk_bytes: int, most_stored: int) -> Iterator[list[ChunkSpan]]:
    """The pieces in order, in lists of about `most_stored` bytes, or _BATCH_DECODED decoded."""
    batch: list[ChunkSpan] = []
    stored = decoded = 0
    for piece in pieces:
        batch.append(piece)
        stored += piece.span.size
        decoded += len(piece.chunks) * chunk_bytes
        if stored >= most_stored or decoded >= _BATCH_DECODED:
            yield batch
            batch, stored, decoded = [], 0, 0
    if batch:
        yield batch
