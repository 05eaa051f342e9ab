"""The elements of some rows of one array: from the mirror, or read, decoded and mirrored.

Rows become chunks, and those that the mirror does not hold become coalesced reads; each read is decoded in a thread,
into the buffer of the fetch and into the mirror, as soon as it arrives. A chunk that an earlier fetch is still reading
into the mirror is waited for, not read twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from zloader.bridge import ByteBudget
from zloader.decode import Decoder
from zloader.errors import CorruptChunkError, MissingObjectError
from zloader.layout import ABSENT, ArrayLayout, ChunkSpan, chunk_spans, chunks_of
from zloader.mirror import MirrorArray
from zloader.terms import FetchOptions, Rows, Source, Span

Result = TypeVar("Result")


@dataclass(kw_only=True)
class Counters:
    """What one epoch has done; written by the scheduler's thread alone."""

    gets: int = 0
    bytes_read: int = 0
    chunks_decoded: int = 0
    chunks_from_mirror: int = 0
    rereads: int = 0
    decode_s: float = 0.0
    gather_s: float = 0.0


class BufferPool:
    """Memory for decoded fetches, used again: fresh memory costs a page fault every 4 KiB."""

    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []

    def take(self, n_bytes: int) -> NDArray[np.uint8]:
        """A buffer of at least `n_bytes`; its content is arbitrary."""
        for position, buffer in enumerate(self._free):
            if len(buffer) >= n_bytes:
                return self._free.pop(position)
        if self._free:
            self._free.pop()  # too small for what is asked now: let it go rather than keep both
        return np.empty(n_bytes + n_bytes // 8, np.uint8)

    def give_back(self, buffer: NDArray[np.uint8]) -> None:
        """Says that nobody reads this buffer any more."""
        self._free.append(buffer)


@dataclass(frozen=True, kw_only=True)
class Elements:
    """The elements of some rows: row i begins at `source[starts[i]]`. `buffer` is what to give back afterwards."""

    source: NDArray[Any]
    starts: Rows
    buffer: NDArray[np.uint8] | None


@dataclass
class Workshop:
    """What all loads of one epoch share: options, threads, budget, buffers and counters."""

    options: FetchOptions
    source: Source
    object_sizes: Mapping[str, int]
    counters: Counters
    threads: ThreadPoolExecutor
    buffers: BufferPool = field(default_factory=BufferPool)

    def __post_init__(self) -> None:
        self.in_flight = ByteBudget(self.options.in_flight_bytes)

    async def run(self, function: Callable[..., Result], *args: Any) -> tuple[Result, float]:
        """Runs a function in a thread; gives its result and the seconds it took there."""

        def timed() -> tuple[Result, float]:
            before = time.perf_counter()
            result = function(*args)
            return result, time.perf_counter() - before

        return await asyncio.get_running_loop().run_in_executor(self.threads, timed)

    async def read(self, span: Span) -> bytes:
        """One ranged GET, counted."""
        (stored,) = await self.source.read([span])
        self.counters.gets += 1
        self.counters.bytes_read += span.size
        return stored


@dataclass(frozen=True, eq=False)
class _Claim:
    """Chunks that one fetch is bringing into the mirror; `done` is set when it has."""

    chunks: Rows
    done: asyncio.Event = field(default_factory=asyncio.Event)


class ArrayReader:
    """Loads the elements of rows of one array, each chunk once as long as there is a mirror to keep it."""

    def __init__(self, layout: ArrayLayout, mirror: MirrorArray | None, shop: Workshop) -> None:
        self._layout = layout
        self._mirror = mirror
        self._shop = shop
        self._decoder = Decoder(layout)
        self._indexes: dict[int, asyncio.Task[NDArray[np.uint64]]] = {}
        self._claims: list[_Claim] = []

    async def load(self, starts: Rows, stops: Rows) -> Elements:
        """The elements `[start, stop)` of each row."""
        chunks = chunks_of(starts, stops, self._layout.chunk_elements)
        mirror = self._mirror
        if mirror is None:
            return await self._buffered(chunks, chunks, starts)
        if mirror.holds(chunks):
            return self._mirrored(mirror, chunks, starts)
        others = [claim for claim in self._claims if np.isin(chunks, claim.chunks).any()]
        claimed = np.concatenate([claim.chunks for claim in others]) if others else chunks[:0]
        claim = _Claim(chunks[~np.isin(chunks, claimed)])
        self._claims.append(claim)
        try:
            missing, _ = await self._shop.run(mirror.missing, claim.chunks)
            if not len(missing) and not others:
                return self._mirrored(mirror, chunks, starts)
            return await self._buffered(chunks, missing, starts, claim=claim, others=others)
        finally:
            claim.done.set()
            self._claims.remove(claim)

    def _mirrored(self, mirror: MirrorArray, chunks: Rows, starts: Rows) -> Elements:
        self._shop.counters.chunks_from_mirror += len(chunks)
        return Elements(source=mirror.elements, starts=starts, buffer=None)

    async def _buffered(
        self,
        chunks: Rows,
        missing: Rows,
        starts: Rows,
        *,
        claim: _Claim | None = None,
        others: Sequence[_Claim] = (),
    ) -> Elements:
        """A buffer of all `chunks`, one after another: `missing` are read, the others copied from the mirror."""
        width = self._layout.chunk_elements
        buffer = self._shop.buffers.take(len(chunks) * width * self._layout.dtype.itemsize)
        elements = buffer[: len(chunks) * width * self._layout.dtype.itemsize].view(self._layout.dtype)
        await self._read_chunks(missing, chunks, elements)
        if claim is not None:
            claim.done.set()
        kept = chunks[~np.isin(chunks, missing)]
        if len(kept) and self._mirror is not None:
            for other in others:
                await other.done.wait()
            lost, _ = await self._shop.run(self._mirror.missing, kept)
            await self._read_chunks(lost, chunks, elements)  # where the other fetch could not keep what it read
            kept = kept[~np.isin(kept, lost)]
            await self._shop.run(self._copy_from_mirror, kept, chunks, elements)
            self._shop.counters.chunks_from_mirror += len(kept)
        elements.flags.writeable = False
        at = np.searchsorted(chunks, starts // width) * width + starts % width
        return Elements(source=elements, starts=at, buffer=buffer)

    def _slot(self, chunk: int, chunks: Rows, elements: NDArray[Any]) -> NDArray[Any]:
        """Where a chunk goes in the buffer of `chunks`; shorter than a chunk at the end of the array."""
        width = self._layout.chunk_elements
        at = int(np.searchsorted(chunks, chunk)) * width
        return elements[at : at + min(width, self._layout.n_elements - chunk * width)]

    def _copy_from_mirror(self, kept: Rows, chunks: Rows, elements: NDArray[Any]) -> None:
        assert self._mirror is not None
        for chunk in kept.tolist():
            slot = self._slot(chunk, chunks, elements)
            first = chunk * self._layout.chunk_elements
            slot[:] = self._mirror.elements[first : first + len(slot)]

    async def _read_chunks(self, missing: Rows, chunks: Rows, elements: NDArray[Any]) -> None:
        if not len(missing):
            return
        shards = np.unique(missing // self._layout.chunks_per_shard).tolist()
        indexes = dict(zip(shards, await asyncio.gather(*map(self._index, shards)), strict=True))
        options = self._shop.options
        pieces, absent = chunk_spans(
            self._layout, missing, indexes, gap_bytes=options.gap_bytes, max_read_bytes=options.max_read_bytes
        )
        for chunk in absent.tolist():
            self._fill(chunk, self._slot(chunk, chunks, elements))
        async with asyncio.TaskGroup() as group:
            for piece in pieces:
                await self._shop.in_flight.acquire(piece.span.size)
                group.create_task(self._read_piece(piece, chunks, elements))

    async def _read_piece(self, piece: ChunkSpan, chunks: Rows, elements: NDArray[Any]) -> None:
        """Reads one span and decodes its chunks; bytes that do not match their checksum are read once more."""
        attempts = self._shop.options.retries + 1
        try:
            for attempt in range(attempts):
                stored = await self._shop.read(piece.span)
                corrupt, seconds = await self._shop.run(self._decode, piece, stored, chunks, elements)
                self._shop.counters.decode_s += seconds
                if corrupt is None:
                    break
                if attempt + 1 == attempts:
                    raise corrupt
                self._shop.counters.rereads += 1
            self._shop.counters.chunks_decoded += len(piece.chunks)
        finally:
            self._shop.in_flight.release(piece.span.size)

    def _decode(
        self, piece: ChunkSpan, stored: bytes, chunks: Rows, elements: NDArray[Any]
    ) -> CorruptChunkError | None:
        view = np.frombuffer(stored, np.uint8)
        placed = zip(piece.chunks.tolist(), piece.offsets.tolist(), piece.sizes.tolist(), strict=True)
        for chunk, offset, size in placed:
            slot = self._slot(chunk, chunks, elements)
            try:
                self._decoder.decode(view[offset : offset + size], slot)
            except CorruptChunkError as error:
                start = piece.span.start + offset
                return CorruptChunkError(
                    f"chunk {chunk} of {self._layout.path}, bytes {start}-{start + size - 1} of "
                    f"{piece.span.key}: {error}. Restore this object or convert the store again"
                )
            if self._mirror is not None:
                self._mirror.put(chunk, slot)
        return None

    def _fill(self, chunk: int, slot: NDArray[Any]) -> None:
        if not self._layout.absent_is_fill:
            raise MissingObjectError(
                f"chunk {chunk} of {self._layout.path} is not in {self._layout.shard_key(0)[:-1]}…: "
                "the store is incomplete. Convert it again"
            )
        slot[:] = self._layout.fill_value
        if self._mirror is not None:
            self._mirror.put(chunk, slot)

    async def _index(self, shard: int) -> NDArray[np.uint64]:
        if shard not in self._indexes:
            self._indexes[shard] = asyncio.ensure_future(self._read_index(shard))
        return await self._indexes[shard]

    async def _read_index(self, shard: int) -> NDArray[np.uint64]:
        key = self._layout.shard_key(shard)
        size = self._shop.object_sizes.get(key)
        if size is None:
            if self._layout.absent_is_fill:
                return np.full((self._layout.chunks_per_shard, 2), ABSENT, np.uint64)
            raise MissingObjectError(f"{key} is not in the store: it is incomplete. Convert it again")
        if not self._layout.sharded:
            return np.array([[0, size]], np.uint64)
        span = self._layout.index_span(shard, size)
        for attempt in range(self._shop.options.retries + 1):
            try:
                return self._layout.parse_index(await self._shop.read(span), shard=shard, object_size=size)
            except CorruptChunkError:
                if attempt == self._shop.options.retries:
                    raise
                self._shop.counters.rereads += 1
        raise AssertionError("unreachable")
