"""The bytes of a store's objects in stretches of equal length, and the mirror of stretches that a machine keeps.

Machines that share a cache (zloader.reading.peers) divide a store among them by stretches. All objects, in the order of
their keys, are one sequence of bytes, and a stretch may begin in one object and end in another. So stretches have the
same numbers on all machines, whatever the arrays in the objects are, and the mirror of the sequence is that of an array
of bytes.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from zloader.caching.leases import Leases
from zloader.caching.mirror import MirrorArray
from zloader.common.records import Rows, Span
from zloader.reading.filling import MirrorFiller, Run
from zloader.storage.layout import ArrayLayout, distinct, expand

# As long as other reads that fill a mirror (FetchOptions.least_read_bytes). A longer one delays the first minibatch.
STRETCH_BYTES = 512 << 10
_MOST_BYTES = 8 << 20  # of consecutive stretches that are read together

ReadStore = Callable[[Sequence[Span]], Awaitable[list[bytes]]]
# Which of some stretches other machines hold, and the bytes of these.
AskElders = Callable[[Rows], Awaitable[tuple[Rows, list[bytes]]]]


class Stretches:
    """Positions in the sequence of all bytes of a store, given the sizes of its objects, in stretches of `size`."""

    def __init__(self, object_sizes: Mapping[str, int], size: int = STRETCH_BYTES) -> None:
        self.size = size
        self._keys = sorted(object_sizes)
        self._ends = np.cumsum([object_sizes[key] for key in self._keys], dtype=np.int64)

    @property
    def n_bytes(self) -> int:
        """The length of the sequence."""
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def layout(self) -> ArrayLayout:
        """The layout of the sequence as an array of bytes, whose chunks are the stretches."""
        return ArrayLayout.plain("stretches", "u1", n_elements=self.n_bytes, chunk_elements=self.size)

    def of(self, starts: Rows) -> Rows:
        """The distinct stretches that have these bytes, in ascending order."""
        return distinct(starts // self.size)

    def pieces(self, spans: Sequence[Span]) -> tuple[Rows, Rows, Rows]:
        """The spans, cut where stretches end: of each piece its span, its first byte, and the byte after its last."""
        objects = np.array([bisect_left(self._keys, span.key) for span in spans], np.int64)
        sizes = np.array([span.size for span in spans], np.int64)
        begins = np.append(0, self._ends)[objects] + np.array([span.start for span in spans], np.int64)
        first = begins // self.size
        counts = np.maximum((begins + sizes - 1) // self.size + 1 - first, 1)
        of_span = np.repeat(np.arange(len(spans)), counts)
        numbers = expand(first, counts)
        starts = np.maximum(begins[of_span], numbers * self.size)
        return of_span, starts, np.minimum((begins + sizes)[of_span], (numbers + 1) * self.size)

    def spans(self, start: int, stop: int) -> list[Span]:
        """The bytes `[start, stop)` as spans of objects."""
        found = []
        number = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            begin, end = int(self._ends[number - 1]) if number else 0, int(self._ends[number])
            if end > start:
                found.append(Span(key=self._keys[number], start=start - begin, stop=min(stop, end) - begin))
                start = min(stop, end)
            number += 1
        return found


class KeptStretches:
    """Reads ranges of a store's bytes from the mirror of stretches, after reading those that it lacks from the store.

    `read_store` reads spans of the store. `ask_elders` asks the machines that owned stretches before this one came;
    None if nobody shares them. Any number of processes may fill a mirror at once: leases say who reads what.
    """

    def __init__(
        self,
        stretches: Stretches,
        mirror: MirrorArray,
        leases: Leases,
        *,
        read_store: ReadStore,
        run: Run,
        deadline_s: float,
    ) -> None:
        self._stretches, self._mirror, self._run = stretches, mirror, run
        self._filler = MirrorFiller(mirror, leases, run, deadline_s)
        self._read_store = read_store
        self.ask_elders: AskElders | None = None

    async def read(self, starts: Rows, stops: Rows) -> tuple[NDArray[np.uint8], int]:
        """The bytes `[start, stop)` of the store, one after another, and how many of them were in the mirror.

        None of these ranges crosses the end of a stretch.
        """
        chunks = self._stretches.of(starts)
        filled = await self._filler.fill(chunks, chunks, self._fill)
        missing = await self._filler.missing(chunks)  # those for which the mirror has no room
        lacking = np.isin(starts // self._stretches.size, missing)
        content, _ = await self._run(self._taken, starts, stops)
        ends = np.cumsum(stops - starts)
        for position in np.flatnonzero(lacking).tolist():
            start, stop = int(starts[position]), int(stops[position])
            parts = await self._read_store(self._stretches.spans(start, stop))
            content[ends[position] - (stop - start) : ends[position]] = np.frombuffer(b"".join(parts), np.uint8)
        held = ~np.isin(starts // self._stretches.size, np.concatenate([filled, missing]))
        return content, int((stops - starts)[held].sum())

    def _taken(self, starts: Rows, stops: Rows) -> NDArray[np.uint8]:
        """A copy of what the mirror has at these places, which may be anything where a stretch is missing."""
        self._mirror.prefetch(self._stretches.of(starts))
        self._mirror.count_mapped(int((stops - starts).sum()))
        content = self._mirror.content
        ranges = [content[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
        return np.concatenate(ranges) if ranges else np.empty(0, np.uint8)

    async def held(self, starts: Rows) -> NDArray[np.bool_]:
        """Whether the stretch of each of these bytes is in the mirror."""
        chunks = self._stretches.of(starts)
        return ~np.isin(starts // self._stretches.size, await self._filler.missing(chunks))

    def discard(self, starts: Rows) -> None:
        """Forgets the stretches of these bytes, which have turned out to be wrong."""
        self._mirror.discard(self._stretches.of(starts))

    async def _fill(self, stretches: Rows) -> None:
        if self.ask_elders is not None and len(stretches):
            held, contents = await self.ask_elders(stretches)
            for stretch, content in zip(held.tolist(), contents, strict=True):
                await self._run(self._mirror.put, stretch, np.frombuffer(content, np.uint8))
            stretches = stretches[~np.isin(stretches, held)]
        most = _MOST_BYTES // self._stretches.size
        async with asyncio.TaskGroup() as group:
            for run in np.split(stretches, np.flatnonzero(np.diff(stretches) != 1) + 1):
                for begin in range(0, len(run), most):
                    group.create_task(self._fill_run(run[begin : begin + most]))

    async def _fill_run(self, stretches: Rows) -> None:
        start, stop = int(stretches[0]) * self._stretches.size, (int(stretches[-1]) + 1) * self._stretches.size
        parts = await self._read_store(self._stretches.spans(start, min(stop, self._stretches.n_bytes)))
        await self._run(self._mirror.put, int(stretches[0]), np.frombuffer(b"".join(parts), np.uint8))
