"""Permute the rows of a matrix out of core, with temporary files as large as the matrix.

Windows of the source are collected until they fill a section, sorted into buckets of consecutive rows of the result,
and written sequentially. Then each bucket is gathered from all sections. A matrix of n sections has about n buckets,
so it is read back in n * n pieces of 1/n section each. For example, 1 TB in sections of 256 MiB is read back in 16
million pieces of 64 KiB.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zloader.common.compiled import compiled, load_compiler
from zloader.common.options import MiB
from zloader.common.records import Rows
from zloader.conversion.sources.spill import Spill, applied_in_background, rows_per_bucket, smallest_index
from zloader.conversion.sources.windows import SourceMatrix, Window, skip_rows, split_rows
from zloader.reading.gather import indptr_of
from zloader.reading.loops import copy_rows

_BUCKET_SHARE = 0.85  # of a window: row lengths vary, and this way few buckets need a second window
_ROW_BYTES = 64  # memory per row, besides its values, while it is partitioned or gathered
_BLOCK_ELEMENTS = 1 << 18  # gathered and written at a time: fits in the cache of a core

Permutation: TypeAlias = Callable[[Rows], Rows]  # maps source rows to rows of the result


class ShuffledMatrix(SourceMatrix):
    """The rows of `inner`, permuted: row r becomes row `permutation([r])` of the result.

    With `columns`, the columns of a square matrix are permuted in the same way. Memory is bounded by a few
    `window_bytes`. A window has at most `window_bytes`, or a single row. Raises StoreError if the temporary directory
    is full.
    """

    def __init__(
        self, inner: SourceMatrix, permutation: Permutation, *, window_bytes: int = 64 * MiB, columns: bool = False
    ) -> None:
        super().__init__(inner.name, n_rows=inner.n_rows, n_genes=inner.n_genes)
        self.encoding = "dense" if inner.encoding == "dense" else "csr"
        self.n_stored: int = _counted(inner) if inner.n_stored is None else inner.n_stored
        self.dtype = inner.dtype
        self.genes_dtype, self.indptr_dtype = inner.genes_dtype, inner.indptr_dtype
        self._inner, self._permutation, self._columns = inner, permutation, columns
        # Values are only moved, so any type of their size works: numba has no float16.
        stored = [np.dtype(f"u{self.dtype.itemsize}"), smallest_index(self.n_genes)]
        self._stored = stored[:1] if self.encoding == "dense" else stored
        self._element_bytes = sum(dtype.itemsize for dtype in self._stored)
        self._window_bytes = window_bytes
        self._bucket_rows = rows_per_bucket(
            n_rows=self.n_rows,
            total_bytes=self.n_stored * self._element_bytes + self.n_rows * _ROW_BYTES,
            bucket_bytes=max(1, int(window_bytes * _BUCKET_SHARE)),
        )
        self._n_buckets = -(-self.n_rows // self._bucket_rows)
        self._spills: tuple[Spill, ...] = ()  # rows (position, length) and elements (value, gene)
        self._section: list[Window] = []  # windows of the section being read
        self._section_bytes = 0
        self._is_complete = False

    def first_pass(self) -> Iterator[Window]:
        """Yields the rows in source order, with their positions in the result, and writes the temporary files."""
        self._free()
        spill = partial(
            Spill,
            n_buckets=self._n_buckets,
            purpose=f"shuffle {self.name}",
            takes_bytes=self.n_stored * self._element_bytes + self.n_rows * 16,
        )
        self._spills = (spill([np.int64, np.int64]), spill(self._stored))
        yield from applied_in_background(self._permuted(), self._add)
        self._write_section()
        self._is_complete = True
        self._inner.close()  # its temporary files are no longer needed

    def _permuted(self) -> Iterator[Window]:
        n_rows = 0
        for window in self._inner.windows():
            rows = np.arange(n_rows, n_rows + len(window.lengths))
            n_rows += len(rows)
            if self._columns:
                window = self._with_columns(window)
            yield dataclasses.replace(window, positions=self._permutation(rows))

    def _with_columns(self, window: Window) -> Window:
        genes = self._permutation(window.genes.astype(np.int64))
        order = np.lexsort((genes, np.repeat(np.arange(len(window.lengths)), window.lengths)))
        return dataclasses.replace(window, genes=genes[order], values=window.values[order])

    def _add(self, window: Window) -> None:
        """Adds a window to the section, and writes the section once it is full."""
        self._section.append(window)
        self._section_bytes += window.values.nbytes + window.genes.nbytes + len(window.lengths) * _ROW_BYTES
        if self._section_bytes >= self._window_bytes:
            self._write_section()

    def _write_section(self) -> None:
        """Writes the collected windows as one section, sorted by position."""
        if not self._section:
            return
        rows, elements = self._spills
        positions = np.concatenate([window.positions for window in self._section if window.positions is not None])
        lengths = np.concatenate([window.lengths for window in self._section])
        order = np.argsort(positions)
        starts = (np.cumsum(lengths) - lengths)[order]
        positions, lengths = positions[order], lengths[order]
        indptr = indptr_of(lengths)
        cuts = np.searchsorted(positions, np.arange(self._n_buckets + 1) * self._bucket_rows)
        rows.write(0, positions)
        rows.write(1, lengths)
        rows.end_section(cuts)
        load_compiler()  # for all sections together, there are many rows
        columns = zip(*(self._as_stored(window.values, window.genes) for window in self._section), strict=True)
        for column, (dtype, parts) in enumerate(zip(self._stored, columns, strict=True)):
            source = np.concatenate(parts, dtype=dtype, casting="unsafe")
            block = np.empty(max(min(_BLOCK_ELEMENTS, len(source)), lengths.max(initial=0)), dtype)
            for first, last in split_rows(indptr, _BLOCK_ELEMENTS):
                out = block[: indptr[last] - indptr[first]]
                copy_rows(source, starts[first:last], lengths[first:last], indptr[first:last] - indptr[first], out)
                elements.write(column, out)
        elements.end_section(indptr[cuts])
        self._section, self._section_bytes = [], 0

    def _as_stored(self, values: NDArray[Any], genes: NDArray[Any]) -> list[NDArray[Any]]:
        """The columns to spill: the bits of `values` and, for a sparse matrix, `genes`."""
        return [values.view(self._stored[0]), genes][: len(self._stored)]

    def windows(self, first_row: int = 0) -> Iterator[Window]:
        """See SourceMatrix. Reads the source first if the first pass has not been completed."""
        if not self._is_complete:
            for _ in self.first_pass():
                pass
        skipped = first_row // self._bucket_rows
        yield from skip_rows(self._gathered(skipped), first_row - skipped * self._bucket_rows)

    def _gathered(self, skipped: int) -> Iterator[Window]:
        """The windows of the buckets from number `skipped` on."""
        rows, elements = self._spills
        both_cuts = zip(rows.buckets(skipped), elements.buckets(skipped), strict=True)
        for bucket, (row_cuts, cuts) in enumerate(both_cuts, skipped):
            positions = rows.read(0, row_cuts) - bucket * self._bucket_rows
            lengths = rows.read(1, row_cuts)
            in_order = np.empty_like(lengths)
            in_order[positions] = lengths
            indptr = indptr_of(in_order)
            blocks = list(_blocks(row_cuts, cuts))
            for first, last in split_rows(indptr, self._window_bytes // self._element_bytes):
                yield self._window(in_order[first:last], lengths, indptr[positions] - indptr[first], blocks)

    def _window(self, lengths: Rows, stored: Rows, starts: Rows, blocks: list[tuple[slice, Rows]]) -> Window:
        """A window of consecutive rows of a bucket, with these `lengths`.

        `stored` are the lengths of all rows of the bucket in stored order, `starts` their offsets in the window.
        """
        n = int(lengths.sum())
        values = np.empty(n, self.dtype)
        genes = np.empty(n, self._stored[1]) if self.encoding == "csr" else np.empty(0, np.int64)
        for rows, cuts in blocks:
            for column, out in enumerate(self._as_stored(values, genes)):
                _scatter_rows(self._spills[1].read(column, cuts), stored[rows], starts[rows], out)
        return Window(lengths=lengths, genes=genes, values=values)

    def close(self) -> None:
        self._free()
        self._inner.close()

    def _free(self) -> None:
        for spill in self._spills:
            spill.close()
        self._spills, self._is_complete = (), False
        self._section, self._section_bytes = [], 0


def _counted(matrix: SourceMatrix) -> int:
    """The number of values of a matrix that does not tell it, without which rows cannot be dealt to buckets."""
    return sum(len(window.values) for window in matrix.windows())


def _blocks(row_cuts: Rows, cuts: Rows) -> Iterator[tuple[slice, Rows]]:
    """Splits a bucket into groups of sections: a slice of its rows, and the cuts of the elements of these rows."""
    row_ends, ends = (indptr_of(each[:, 1] - each[:, 0]) for each in (row_cuts, cuts))
    for first, last in split_rows(ends, _BLOCK_ELEMENTS):
        yield slice(row_ends[first], row_ends[last]), cuts[first:last]


@compiled
def _scatter_rows(rows: NDArray[Any], lengths: Rows, starts: Rows, out: NDArray[Any]) -> None:
    """Copies contiguous rows to their `starts` in `out`; skips the rows that lie outside."""
    at = 0
    for row in range(len(lengths)):
        n, start = lengths[row], starts[row]
        if start >= 0 and start + n <= len(out):
            source = rows[at : at + n]
            target = out[start : start + n]
            for i in range(n):
                target[i] = source[i]
        at += n
