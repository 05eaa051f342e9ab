"""Rows in another order, out of core: any permutation, at the cost of temporary files as large as the matrix.

As many windows of the source as memory allows are dealt to buckets of consecutive rows of the result, and written in
one go, a section; bucket after bucket is then gathered from all sections. A matrix of n sections has about n buckets,
so it is read back in n * n pieces, each an n-th of a section: 1 TB in sections of 256 MiB is 16 million pieces of
64 KiB.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.compiled import compiled
from zloader.common.options import MiB
from zloader.common.records import Rows
from zloader.conversion.sources.compressed import split_rows
from zloader.conversion.sources.spill import Spill, behind, rows_a_bucket, smallest_index
from zloader.conversion.sources.windows import Advance, SourceMatrix, Window, skip_rows
from zloader.reading.gather import copy_rows, indptr_of

_BUCKET_SHARE = 0.85  # of a window, so that few buckets take more than one: equally many rows differ in their values
_ROW_BYTES = 64  # that a row takes besides its values while it is dealt or gathered
_BLOCK_ELEMENTS = 1 << 18  # gathered and written at once: they stay in a core's cache

Places = Callable[[Rows], Rows]


class ShuffledMatrix(SourceMatrix):
    """The rows of `inner`, row r as row `places([r])` of the result: any permutation of its rows.

    With `columns`, for a matrix of rows x rows, the columns are permuted alike. Memory is bounded by a few
    `window_bytes`; a window has no more, or one row. Raises StoreError when the temporary directory is full.
    """

    def __init__(
        self, inner: SourceMatrix, places: Places, *, window_bytes: int = 64 * MiB, columns: bool = False
    ) -> None:
        super().__init__(inner.name, n_rows=inner.n_rows, n_genes=inner.n_genes)
        self.encoding = "dense" if inner.encoding == "dense" else "csr"
        self.n_stored, self.dtype = inner.n_stored, inner.dtype
        self.genes_dtype, self.indptr_dtype = inner.genes_dtype, inner.indptr_dtype
        self._inner, self._places, self._columns = inner, places, columns
        # Values are only moved, so any type of their size will do: numba has no float16.
        stored = [np.dtype(f"u{self.dtype.itemsize}"), smallest_index(self.n_genes)]
        self._stored = stored[:1] if self.encoding == "dense" else stored
        self._element_bytes = sum(dtype.itemsize for dtype in self._stored)
        self._window_bytes = window_bytes
        self._bucket_rows = rows_a_bucket(
            n_rows=self.n_rows,
            held_bytes=self.n_stored * self._element_bytes + self.n_rows * _ROW_BYTES,
            bucket_bytes=max(1, int(window_bytes * _BUCKET_SHARE)),
        )
        self._n_buckets = -(-self.n_rows // self._bucket_rows)
        self._spills: tuple[Spill, ...] = ()  # of rows (place, length) and of elements (value, gene)
        self._held: list[Window] = []  # of the section being read
        self._held_bytes = 0
        self._is_dealt = False

    @property
    def n_reads(self) -> int:
        return self._inner.n_reads

    def first_pass(self, advance: Advance) -> Iterator[Window]:
        """Shows every row once, as the source has them, with their places in the result."""
        self._free()
        spill = partial(
            Spill,
            n_buckets=self._n_buckets,
            purpose=f"shuffle {self.name}",
            takes_bytes=self.n_stored * self._element_bytes + self.n_rows * 16,
        )
        self._spills = (spill([np.int64, np.int64]), spill(self._stored))
        yield from behind(self._placed(advance), self._hold)
        self._deal()
        self._is_dealt = True
        self._inner.close()  # what it holds on disk is not needed any more

    def _placed(self, advance: Advance) -> Iterator[Window]:
        n_rows = 0
        for window in self._inner.first_pass(advance):
            rows = np.arange(n_rows, n_rows + len(window.lengths)) if window.places is None else window.places
            n_rows += len(rows)
            if self._columns:
                window = self._with_columns(window)
            yield dataclasses.replace(window, places=self._places(rows))

    def _with_columns(self, window: Window) -> Window:
        genes = self._places(window.genes.astype(np.int64))
        order = np.lexsort((genes, np.repeat(np.arange(len(window.lengths)), window.lengths)))
        return dataclasses.replace(window, genes=genes[order], values=window.values[order])

    def _hold(self, window: Window) -> None:
        self._held.append(window)
        self._held_bytes += window.values.nbytes + window.genes.nbytes + len(window.lengths) * _ROW_BYTES
        if self._held_bytes >= self._window_bytes:
            self._deal()

    def _deal(self) -> None:
        """Writes what is held as one section."""
        if not self._held:
            return
        rows, elements = self._spills
        places, lengths = (np.concatenate([getattr(w, name) for w in self._held]) for name in ("places", "lengths"))
        order = np.argsort(places)
        starts = (np.cumsum(lengths) - lengths)[order]
        places, lengths = places[order], lengths[order]
        indptr = indptr_of(lengths)
        cuts = np.searchsorted(places, np.arange(self._n_buckets + 1) * self._bucket_rows)
        rows.write(0, places)
        rows.write(1, lengths)
        rows.end_section(cuts)
        columns = zip(*(self._moved(window.values, window.genes) for window in self._held), strict=True)
        for column, (dtype, held) in enumerate(zip(self._stored, columns, strict=True)):
            source = np.concatenate(held, dtype=dtype, casting="unsafe")
            block = np.empty(max(min(_BLOCK_ELEMENTS, len(source)), lengths.max(initial=0)), dtype)
            for first, last in split_rows(indptr, _BLOCK_ELEMENTS):
                taken = block[: indptr[last] - indptr[first]]
                copy_rows(source, starts[first:last], lengths[first:last], indptr[first:last] - indptr[first], taken)
                elements.write(column, taken)
        elements.end_section(indptr[cuts])
        self._held, self._held_bytes = [], 0

    def _moved(self, values: NDArray[Any], genes: NDArray[Any]) -> list[NDArray[Any]]:
        """The columns that elements have: `values`, as they are stored, and unless dense `genes`."""
        return [values.view(self._stored[0]), genes][: len(self._stored)]

    def windows(self, first_row: int = 0) -> Iterator[Window]:
        """As SourceMatrix has it; goes through the source where there was no first pass."""
        if not self._is_dealt:
            for _ in self.first_pass(lambda _: None):
                pass
        skipped = first_row // self._bucket_rows
        yield from skip_rows(self._gathered(skipped), first_row - skipped * self._bucket_rows)

    def _gathered(self, skipped: int) -> Iterator[Window]:
        """The windows of all buckets but the first `skipped`."""
        rows, elements = self._spills
        both_cuts = zip(rows.buckets(skipped), elements.buckets(skipped), strict=True)
        for bucket, (row_cuts, cuts) in enumerate(both_cuts, skipped):
            places = rows.read(0, row_cuts) - bucket * self._bucket_rows
            lengths = rows.read(1, row_cuts)
            in_order = np.empty_like(lengths)
            in_order[places] = lengths
            indptr = indptr_of(in_order)
            blocks = list(_blocks(row_cuts, cuts))
            for first, last in split_rows(indptr, self._window_bytes // self._element_bytes):
                yield self._window(in_order[first:last], lengths, indptr[places] - indptr[first], blocks)

    def _window(self, lengths: Rows, stored: Rows, starts: Rows, blocks: list[tuple[slice, Rows]]) -> Window:
        """Rows of a bucket with these `lengths`; `stored` are the lengths of all its rows, `starts` where they go."""
        n = int(lengths.sum())
        values = np.empty(n, self.dtype)
        genes = np.empty(n, self._stored[1]) if self.encoding == "csr" else np.empty(0, np.int64)
        for rows, cuts in blocks:
            for column, out in enumerate(self._moved(values, genes)):
                _place_rows(self._spills[1].read(column, cuts), stored[rows], starts[rows], out)
        return Window(lengths=lengths, genes=genes, values=values)

    def close(self) -> None:
        self._free()
        self._inner.close()

    def _free(self) -> None:
        for spill in self._spills:
            spill.close()
        self._spills, self._is_dealt = (), False
        self._held, self._held_bytes = [], 0


def _blocks(row_cuts: Rows, cuts: Rows) -> Iterator[tuple[slice, Rows]]:
    """A bucket's sections, some at a time: which of its rows, and the cuts of their elements."""
    row_ends, ends = (indptr_of(each[:, 1] - each[:, 0]) for each in (row_cuts, cuts))
    for first, last in split_rows(ends, _BLOCK_ELEMENTS):
        yield slice(row_ends[first], row_ends[last]), cuts[first:last]


@compiled
def _place_rows(rows: NDArray[Any], lengths: Rows, starts: Rows, out: NDArray[Any]) -> None:
    """Copies rows that lie end to end to their `starts` in `out`; leaves out those that do not belong there."""
    at = 0
    for row in range(len(lengths)):
        n, start = lengths[row], starts[row]
        if start >= 0 and start + n <= len(out):
            taken = rows[at : at + n]
            given = out[start : start + n]
            for i in range(n):
                given[i] = taken[i]
        at += n
