"""The buffer that chunks are decoded into, and where the elements of rows are in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.records import Rows
from zloader.storage import blosc
from zloader.storage.layout import ArrayLayout


@dataclass(frozen=True, kw_only=True)
class Elements:
    """The elements of some rows: row i begins at `source[starts[i]]`."""

    source: NDArray[Any]
    starts: Rows


@dataclass(frozen=True, kw_only=True)
class Slots:
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

    def jobs(self, chunks: Rows, reads: Rows | int, offsets: Rows, sizes: Rows) -> NDArray[Any]:
        """How to decode chunks into their slots (dtype blosc.CHUNK), from these places in some reads."""
        jobs = np.empty(len(chunks), blosc.CHUNK)
        jobs["read"], jobs["offset"], jobs["size"] = reads, offsets, sizes
        jobs["begin"], jobs["first"], jobs["stop"] = self.locate(chunks)
        return jobs
