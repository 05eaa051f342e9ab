"""Reads and decodes the chunks of one array: into the buffer of a fetch, or on their way to a mirror.

The rows become chunks, and these become coalesced reads (`zloader.reading.read_plan`). Each read is decoded in a thread
as soon as it arrives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from zloader.common.errors import CorruptChunkError, FormatError, MissingObjectError
from zloader.common.records import Rows, Span
from zloader.reading.read_plan import batches
from zloader.reading.resources import Counters, Resources
from zloader.storage.decode import PART, Decoder, columns_of
from zloader.storage.layout import ArrayLayout, ObjectIndex, Reads, distinct, reads_of, runs_of

# One task reads and decodes spans of up to this many stored bytes, or an eighth of `in_flight_bytes` if that is less.
# A task costs about 0.3 ms of interpreter time, which is then small beside decoding, and eight tasks at once keep the
# link and the threads busy.
_BATCH_BYTES = 8 << 20
_BATCHES_IN_FLIGHT = 8

Stored = Sequence[bytes | NDArray[np.uint8]]
Corrupt = dict[int, CorruptChunkError]  # of spans that do not match their checksums, by number
Work = TypeVar("Work")
ReadWork = Callable[[Work], Awaitable[tuple[Work, Sequence[CorruptChunkError]]]]
ReadSpans = Callable[[Sequence[Span]], Awaitable[Sequence[bytes]]]
_AT_ONCE = 16  # indexes that one task reads


def located(chunks: Rows, jobs: NDArray[Any], reads: Reads) -> NDArray[Any]:
    """The jobs with the places of their chunks. The read of a chunk that is in none is -1."""
    at = np.searchsorted(reads.chunks, chunks)
    here = np.append(reads.chunks, -1)[at] == chunks
    jobs = jobs.copy()
    of_chunks = (reads.numbers, reads.offsets, reads.sizes)
    jobs["read"], jobs["offset"], jobs["size"] = (np.append(of_chunk, -1)[at] for of_chunk in of_chunks)
    jobs["read"][~here] = -1
    return jobs


class ArrayReader:
    """Reads chunks of one array."""

    def __init__(self, layout: ArrayLayout, resources: Resources) -> None:
        self.layout = layout
        self._resources = resources
        self._decoder = Decoder(layout)
        # If a chunk is corrupt twice, the stored object is corrupt. Unlike a busy server, that does not pass.
        self.rereads = min(1, resources.options.retries)
        known = resources.indexes.setdefault(layout.path, {})
        self._indexes = ShardIndexes(
            layout,
            resources.object_sizes,
            resources.url,
            known=known,
            counters=resources.counters,
            rereads=self.rereads,
        )
        # A chunk that holds parts of rows is decoded as a whole, wherever its parts go.
        self._scratch_bytes = 0 if layout.grid is None else layout.chunk_elements * layout.dtype.itemsize

    def require_room(self, starts: Rows, stops: Rows) -> None:
        """Raises FormatError if rows are cut into so many parts that their places take half of the memory."""
        grid, memory = self.layout.grid, self._resources.options.memory
        if grid is None or not len(starts):
            return
        n_columns, (firsts, lasts, _) = len(grid.pieces[0]), runs_of(starts, stops)
        if 2 * len(grid.bands(firsts, lasts)[0]) * n_columns * PART.itemsize > memory // 2:
            raise FormatError(
                f"{self._resources.url}: chunks of {grid.chunk} cut each row of {self.layout.path} into {n_columns} "
                f"parts, which is too many for a fetch of {len(starts)} rows with FetchOptions(memory={memory}): run "
                "'zloader convert' on it, or open it with a cache"
            )

    async def load(self, chunks: Rows, jobs: NDArray[Any], out: NDArray[Any], *, turn: int) -> None:
        """Does the jobs of `chunks` (ascending). Reads with a smaller `turn` go first."""
        resources = self._resources
        if self._scratch_bytes > resources.options.memory // 2:
            raise FormatError(
                f"{resources.url}: each chunk of {self.layout.path} takes {self._scratch_bytes} bytes when it is "
                f"decoded, more than half of FetchOptions(memory={resources.options.memory}): run 'zloader convert' on "
                f"it, which writes small chunks, or give memory={2 * self._scratch_bytes} or more"
            )
        reads = await self.reads(distinct(chunks), turn)
        if len(reads.absent):
            self._fill(jobs[np.isin(chunks, reads.absent)], out)
        stored_bytes = min(_BATCH_BYTES, resources.options.in_flight_bytes // _BATCHES_IN_FLIGHT)
        chunk_bytes = self.layout.chunk_elements * self.layout.dtype.itemsize
        async with asyncio.TaskGroup() as group:
            for numbers in batches(reads, chunk_bytes=chunk_bytes, stored_bytes=stored_bytes):
                batch = reads.some(numbers)
                await resources.in_flight.acquire(batch.n_bytes + self._scratch_bytes, turn)
                group.create_task(self._read_batch(batch, chunks, jobs, out))

    async def reads(self, chunks: Rows, turn: int) -> Reads:
        """The reads for some chunks (ascending). Raises if the store should have one that was never written."""
        indexes, options = await self._indexes.of(chunks, partial(self._read_spans, turn)), self._resources.options
        gap_bytes, max_read_bytes = options.gap_bytes, options.max_read_bytes
        reads = reads_of(self.layout, chunks, indexes, gap_bytes=gap_bytes, max_read_bytes=max_read_bytes)
        self._resources.counters.spans += len(reads.spans)
        if len(reads.absent) and not self.layout.absent_is_fill:
            raise MissingObjectError(
                f"{self._resources.url}: chunk {reads.absent[0]} of {self.layout.path} was never written: the store is "
                "incomplete. Convert it again"
            )
        return reads

    async def _read_batch(self, batch: Reads, chunks: Rows, jobs: NDArray[Any], out: NDArray[Any]) -> None:
        """Reads some spans and decodes their chunks; a span that fails its checksum is read once more."""
        resources, n_bytes = self._resources, batch.n_bytes + self._scratch_bytes

        async def read(reads: Reads) -> tuple[Reads, Sequence[CorruptChunkError]]:
            some = slice(*np.searchsorted(chunks, reads.chunks[[0, -1]] + [0, 1]))
            here = located(chunks[some], jobs[some], reads)
            decode = partial(self.decode, reads, here[here["read"] >= 0], out)
            corrupt = await resources.decode(reads.spans, decode)
            return reads.some(np.array(sorted(corrupt))) if corrupt else reads, list(corrupt.values())

        try:
            await read_again(batch, self.rereads, resources.counters, read)
            resources.counters.chunks_decoded += len(batch.chunks)
        finally:
            resources.in_flight.release(n_bytes)

    def decode(self, reads: Reads, jobs: NDArray[Any], out: NDArray[Any], stored: Stored) -> Corrupt:
        """Does jobs; returns the first error of each span that is corrupt.

        Chunks that are in no read were never written: they are the fill value.
        """
        absent = jobs["read"] < 0
        if absent.any():
            self._fill(jobs[absent], out)
            jobs = jobs[~absent]
        corrupt: Corrupt = {}
        for job, error in self._decoder.decode_all(stored, jobs, out):
            read, start, size = (int(jobs[name][job]) for name in ("read", "offset", "size"))
            chunk = int(reads.chunks[(reads.numbers == read) & (reads.offsets == start)][0])
            where = self._describe(reads.spans[read], start, start + size, chunk)
            corrupt.setdefault(read, explained(error, where))
        return corrupt

    def _fill(self, jobs: NDArray[Any], out: NDArray[Any]) -> None:
        self.layout.check_bounds(np.atleast_1d(self.layout.fill_value))
        if (grid := self.layout.grid) is not None:
            for _, _, _, begin, first, stop, _, rows, column in jobs.tolist():
                columns_of(out, begin, rows, grid.row_elements)[:, column : column + stop - first] = (
                    self.layout.fill_value
                )
            return
        for begin, n in zip(jobs["begin"].tolist(), (jobs["stop"] - jobs["first"]).tolist(), strict=True):
            out[begin : begin + n] = self.layout.fill_value

    def _describe(self, span: Span, start: int, stop: int, chunk: int) -> str:
        at = f"bytes {span.start + start}-{span.start + stop - 1} of {span.key}"
        return f"{self._resources.url}: chunk {chunk} of {self.layout.path}, {at}"

    async def _read_spans(self, turn: int, spans: Sequence[Span]) -> Sequence[bytes]:
        """The bytes of some indexes, within the bound of those in flight."""
        resources, n_bytes = self._resources, sum(span.size for span in spans)
        await resources.in_flight.acquire(n_bytes, turn)
        try:
            return await resources.read(spans)
        finally:
            resources.in_flight.release(n_bytes)


async def read_again(work: Work, rereads: int, counters: Counters, read: ReadWork[Work]) -> None:
    """Has `read` read and decode something, and what of it was corrupt once more, which it returns with its errors.

    Raises the first error of the last time.
    """
    for attempt in range(rereads + 1):
        work, errors = await read(work)
        if not errors:
            return
        if attempt == rereads:
            raise errors[0]
        counters.retries += len(errors)


# ---- indexes of shards


class ShardIndexes:
    """The indexes of the shards of one array in the store at `url`. `known` has those that were read, by shard."""

    def __init__(
        self,
        layout: ArrayLayout,
        object_sizes: Mapping[str, int],
        url: str,
        *,
        known: dict[int, ObjectIndex] | None = None,
        counters: Counters | None = None,
        rereads: int = 0,
    ) -> None:
        """An index that is corrupt is read `rereads` times more."""
        self._layout, self._object_sizes, self._url = layout, object_sizes, url
        self._counters, self._rereads = counters or Counters(), rereads
        self._known: dict[int, ObjectIndex] = {} if known is None else known
        self._reading: dict[int, asyncio.Task[dict[int, ObjectIndex]]] = {}

    async def of(self, chunks: Rows, read: ReadSpans) -> dict[int, ObjectIndex]:
        """The index of each shard of some chunks. Costs one read per shard that is not known, or none without shards.

        Raises MissingObjectError if a required shard is missing, CorruptChunkError, and any ReadError.
        """
        shards: list[int] = distinct(chunks // self._layout.chunks_per_shard).tolist()
        unknown = [shard for shard in shards if shard not in self._known]
        new = [shard for shard in unknown if shard not in self._reading]
        for first in range(0, len(new), _AT_ONCE):
            some = new[first : first + _AT_ONCE]
            self._reading.update(dict.fromkeys(some, asyncio.ensure_future(self._read(some, read))))
        for found in await asyncio.gather(*{self._reading[shard] for shard in unknown}):
            self._known.update(found)
        return {shard: self._known[shard] for shard in shards}

    async def _read(self, shards: Sequence[int], read: ReadSpans) -> dict[int, ObjectIndex]:
        sizes = {shard: self._object_sizes.get(self._layout.shard_key(shard)) for shard in shards}
        found = {shard: self._layout.find_index(shard, size, self._url) for shard, size in sizes.items()}
        indexes = {shard: ObjectIndex(each) for shard, each in found.items() if not isinstance(each, Span)}
        spans = {shard: each for shard, each in found.items() if isinstance(each, Span)}

        async def parse(left: dict[int, Span]) -> tuple[dict[int, Span], list[CorruptChunkError]]:
            errors: dict[int, CorruptChunkError] = {}
            for (shard, span), stored in zip(left.items(), await read(list(left.values())), strict=True):
                try:
                    indexes[shard] = ObjectIndex(self._layout.placement.parse(stored, shard, sizes[shard] or 0))
                except CorruptChunkError as error:
                    where = f"{self._url}: {span.key} bytes {span.start}-{span.stop - 1}"
                    errors[shard] = explained(error, where)
            return {shard: left[shard] for shard in errors}, list(errors.values())

        if spans:
            await read_again(spans, self._rereads, self._counters, parse)
        return indexes


def explained(error: CorruptChunkError, where: str) -> CorruptChunkError:
    """The error with the place of the corrupt bytes, and with advice."""
    found = CorruptChunkError(f"{where}: {error}. Restore this object or convert the store again")
    found.__cause__ = error
    return found
