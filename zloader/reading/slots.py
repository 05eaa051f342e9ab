"""The buffer that chunks are decoded into, and where the elements of rows are in it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.records import Rows
from zloader.storage import blosc
from zloader.storage.layout import ArrayLayout, needed_bounds


@dataclass(frozen=True, kw_only=True)
class Elements:
    """The elements of some rows: row i begins at `source[starts[i]]`."""

    source: NDArray[Any]
    starts: Rows


@dataclass(frozen=True, kw_only=True)
class Needed:
    """The elements that some rows need from one array: `[start, stop)` of each row, contained in `chunks`."""

    layout: ArrayLayout
    starts: Rows
    stops: Rows
    chunks: Rows

    @cached_property
    def bounds(self) -> tuple[Rows, Rows]:
        """The first needed element of each chunk and the element after its last, counted from its first element."""
        return needed_bounds(self.chunks, self.starts, self.stops, self.layout.chunk_elements)

    @property
    def n_bytes(self) -> int:
        """Bytes of the needed elements and of those between them in the same chunk."""
        firsts, stops = self.bounds
        return int((stops - firsts).sum()) * self.layout.dtype.itemsize

    def slots(self, buffer: NDArray[np.uint8]) -> Slots:
        """Slots for the chunks in a buffer of at least `n_bytes`."""
        firsts, stops = self.bounds
        elements = buffer[: self.n_bytes].view(self.layout.dtype)
        return Slots(layout=self.layout, chunks=self.chunks, elements=elements, firsts=firsts, stops=stops)


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
        width = self.layout.chunk_elements
        # An empty row may begin in a chunk that is not in the buffer. Its position is never used.
        shifts = np.append(self._begins - self.firsts, 0)
        return Elements(
            source=self.elements, starts=shifts[np.searchsorted(self.chunks, starts // width)] + starts % width
        )

    def jobs(self, chunks: Rows, reads: Rows | int = 0, offsets: Rows | int = 0, sizes: Rows | int = 0) -> NDArray[Any]:
        """How to decode chunks into their slots (dtype blosc.CHUNK), from these places in some reads, if any."""
        jobs = np.empty(len(chunks), blosc.CHUNK)
        jobs["read"], jobs["offset"], jobs["size"] = reads, offsets, sizes
        jobs["begin"], jobs["first"], jobs["stop"] = self.locate(chunks)
        return jobs
