"""Windows: read a matrix as runs of rows, so that memory does not grow with the size of the matrix.

A SourceMatrix is read twice: the first pass validates every value and finds the dtypes, the second pass (`windows`)
stores them. CSR and dense matrices are read directly. Matrices that reorder rows do so out of core, see
reorder.py; a joined matrix wraps its parts.

All values of indptr and indices of a sparse matrix are checked. Every error names the source, the array and the row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from zloader.common.compiled import compiled, count_bits
from zloader.common.errors import SourceError
from zloader.common.options import MiB
from zloader.common.records import Rows
from zloader.conversion.sources.nodes import Node

Advance = Callable[[int], None]  # progress callback: the number of rows or values read since the last call
_INDPTR_ROWS = 1 << 20  # entries of indptr in memory at a time
# Bytes per window. Arrays of this size reuse freed memory; with 64 MiB every window would fault in new pages.
_MOST_READ = 16 * MiB


@dataclass(frozen=True, kw_only=True)
class Window:
    """Some rows of a matrix: `lengths` (values per row), `genes` (ascending and unique within a row) and `values`.

    A dense window has all values of its rows, row after row, and no `genes`. `positions` are the row numbers in the
    matrix, or None if the rows follow those of the previous window. `mended` counts the rows that were not canonical.
    """

    lengths: Rows
    genes: NDArray[np.integer]
    values: NDArray[Any]
    positions: Rows | None = None
    mended: int = 0

    def from_row(self, first: int) -> Window:
        """The rows from row `first` of this window on. Only for a window of consecutive rows."""
        skipped = int(self.lengths[:first].sum())
        return Window(lengths=self.lengths[first:], genes=self.genes[skipped:], values=self.values[skipped:])


class SourceMatrix(ABC):
    """One matrix to be stored. A context manager: on exit it removes its temporary files.

    `dtype`, `genes_dtype` and `indptr_dtype` are the dtypes in the source. `n_stored` is the number of values stored
    there or a larger one, or None if only reading all of them tells it.
    """

    encoding: str  # "csr", "csc" or "dense"
    n_stored: int | None
    dtype: np.dtype[Any]
    genes_dtype: np.dtype[Any]
    indptr_dtype: np.dtype[Any]

    def __init__(self, name: str, *, n_rows: int, n_genes: int) -> None:
        self.name = name
        self.n_rows = n_rows
        self.n_genes = n_genes

    def first_pass(self) -> Iterator[Window]:
        """Yields every row once, in any order, and prepares `windows`. Raises the same errors as `windows`."""
        return self.windows()

    @abstractmethod
    def windows(self, first_row: int = 0) -> Iterator[Window]:
        """The rows from `first_row` on, in order, identical at every call. Raises SourceError that names the row."""

    def close(self) -> None:  # noqa: B027
        """Frees temporary files and memory."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def skip_rows(windows: Iterator[Window], first_row: int) -> Iterator[Window]:
    """Drops the first `first_row` rows of windows of consecutive rows."""
    for window in windows:
        if first_row < len(window.lengths):
            yield window.from_row(first_row) if first_row else window
        first_row = max(0, first_row - len(window.lengths))


def canonical(indptr: Rows, genes: NDArray[np.integer], values: NDArray[Any], *, at: str, first_row: int) -> Window:
    """Sorts the genes of each row and sums the values of repeated genes, in the dtype of the values.

    `at` and `first_row` say in messages where the rows come from. Raises SourceError if the dtype cannot hold a sum.
    """
    lengths = np.diff(indptr)
    rises = genes[1:] > genes[:-1]
    starts = indptr[1:-1]
    rises[starts[(starts > 0) & (starts < len(genes))] - 1] = True
    if rises.all():
        return Window(lengths=lengths, genes=genes, values=values)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    mended = len(np.unique(rows[1:][~rises]))
    order = np.lexsort((genes, rows))
    rows, genes, values = rows[order], genes[order], values[order]
    new = np.ones(len(genes), bool)
    new[1:] = (genes[1:] != genes[:-1]) | (rows[1:] != rows[:-1])
    kept = np.flatnonzero(new)
    with np.errstate(over="ignore"):
        sums = np.add.reduceat(values, kept, dtype=values.dtype)
    wrong = _not_exact(sums, np.add.reduceat(values, kept, dtype=np.float64))
    if len(wrong):
        element = kept[wrong[0]]
        raise SourceError(
            f"{at}: row {first_row + rows[element]} repeats gene {genes[element]}, and the sum of its values does not "
            f"fit in {sums.dtype}: write the matrix with a wider dtype"
        )
    return Window(
        lengths=np.bincount(rows[kept], minlength=len(lengths)), genes=genes[kept], values=sums, mended=mended
    )


def _not_exact(sums: NDArray[Any], exact: NDArray[np.float64]) -> Rows:
    """The positions of sums that wrapped around or became infinite. `exact` are the same sums as float64."""
    if sums.dtype.kind == "f":
        return np.flatnonzero(np.isinf(sums) & np.isfinite(exact))
    if sums.dtype.kind == "b":  # a sum of booleans is their "or"
        return np.empty(0, np.int64)
    # A sum that wrapped around is off by 2**bits or more. Rounding to float64 costs far less.
    return np.flatnonzero(np.abs(sums - exact) >= 2.0 ** (8 * sums.itemsize - 1))


class CompressedArrays:
    """The three arrays of a CSR or CSC matrix, read in windows along the compressed (`major`) axis.

    `axes` names the major and minor axis in messages. `element_bytes` is the memory per element.
    """

    def __init__(self, matrix: Node, *, axes: tuple[str, str], major: int, minor: int) -> None:
        self.at, self._axes, self._major, self._minor = matrix.at, axes, major, minor
        self.indptr, self.indices, self.data = (matrix[name].in_threads() for name in ("indptr", "indices", "data"))
        self.dtype, self.genes_dtype, self.indptr_dtype = (
            part.number_dtype for part in (self.data, self.indices, self.indptr)
        )
        if self.genes_dtype.kind not in "iu" or self.indptr_dtype.kind not in "iu":
            raise SourceError(f"{self.at}/indices and indptr must hold integers: the file is damaged")
        self.n_values = math.prod(self.data.shape)
        self.element_bytes = self.dtype.itemsize + self.genes_dtype.itemsize
        self._check_ends()

    def _check_ends(self) -> None:
        entries, *of_values = (part.shape for part in (self.indptr, self.indices, self.data))
        if entries != (self._major + 1,) or of_values != [(self.n_values,)] * 2:
            found = [" x ".join(map(str, shape)) or "no" for shape in (entries, *of_values)]
            raise SourceError(
                f"{self.at} has {self._major} {self._axes[0]}s, but {found[0]} entries in indptr, {found[1]} in "
                f"indices and {found[2]} in data: the file is damaged"
            )
        first, last = (int(self.indptr.numbers(at, at + 1)[0]) for at in (0, self._major))
        if first != 0:
            raise SourceError(f"{self.at}/indptr starts at {first}, not 0, at {self._axes[0]} 0: the file is damaged")
        if last != self.n_values:
            raise SourceError(
                f"{self.at}/indptr ends at {last} after {self._axes[0]} {self._major - 1}, but {self.n_values} values "
                "are stored: the file is damaged"
            )

    def windows(
        self, max_elements: int, first: int = 0, *, whole: bool = True, indptr_rows: int = _INDPTR_ROWS
    ) -> Iterator[tuple[int, Rows, NDArray[np.integer], NDArray[Any]]]:
        """Yields windows from major number `first` on: first major number, relative indptr, minor numbers and values.

        A row of the major axis with more than `max_elements` values becomes one window, or several unless `whole`.
        """
        for start in range(first, self._major, indptr_rows):
            indptr = self._checked_indptr(start, min(start + indptr_rows, self._major))
            for first_line, last_line in split_rows(indptr, max_elements):
                ends = indptr[first_line : last_line + 1]
                begin, end = int(ends[0]), int(ends[-1])
                step = max(1, end - begin if whole else max_elements)
                for piece in range(begin, end, step) or [begin]:
                    piece_end = min(piece + step, end)
                    relative = np.clip(ends, piece, piece_end) - piece
                    minor = self.indices.numbers(piece, piece_end)
                    self._check_minor(minor, relative, start + first_line)
                    yield start + first_line, relative, minor, self.data.numbers(piece, piece_end)

    def _checked_indptr(self, start: int, stop: int) -> Rows:
        indptr = self.indptr.numbers(start, stop + 1).astype(np.int64)
        wrong = np.flatnonzero((indptr[1:] < indptr[:-1]) | (indptr[1:] > self.n_values))
        if len(wrong):
            row = int(wrong[0])
            raise SourceError(
                f"{self.at}/indptr goes from {indptr[row]} to {indptr[row + 1]} at {self._axes[0]} {start + row} "
                f"({self.n_values} values are stored): the file is damaged"
            )
        return indptr

    def _check_minor(self, minor: NDArray[np.integer], indptr: Rows, first: int) -> None:
        if len(minor) == 0 or (minor.min() >= 0 and minor.max() < self._minor):
            return
        at = int(np.flatnonzero((minor < 0) | (minor >= self._minor))[0])
        major = first + int(np.searchsorted(indptr, at, side="right")) - 1
        raise SourceError(
            f"{self.at}: {self._axes[0]} {major} has a value for {self._axes[1]} {minor[at]}, but {self._axes[1]}s "
            f"range from 0 to {self._minor - 1}: the file is damaged"
        )


def split_rows(indptr: Rows, max_elements: int) -> Iterator[tuple[int, int]]:
    """Splits rows into runs `[first, last)` of at most `max_elements` values; a longer row is a run by itself."""
    first, n_rows = 0, len(indptr) - 1
    while first < n_rows:
        last = int(np.searchsorted(indptr, indptr[first] + max_elements, side="right")) - 1
        last = min(max(last, first + 1), n_rows)
        yield first, last
        first = last


class DenseMatrix(SourceMatrix):
    """A dense array, read in runs of rows."""

    encoding = "dense"
    genes_dtype = indptr_dtype = np.dtype(np.int64)

    def __init__(self, node: Node, name: str, *, shape: tuple[int, int], window_bytes: int) -> None:
        super().__init__(name, n_rows=shape[0], n_genes=shape[1])
        self._array = node
        self.dtype = node.number_dtype
        self.n_stored = self.n_rows * self.n_genes
        rows = max(1, min(window_bytes, _MOST_READ) // max(1, self.n_genes * self.dtype.itemsize))
        stored_together = node.rows_stored_together
        # Whole stored chunks if they fit, so that none is decompressed twice.
        self._window_rows = rows - rows % stored_together if rows > stored_together else rows

    def windows(self, first_row: int = 0) -> Iterator[Window]:
        for first in range(first_row, self.n_rows, self._window_rows):
            values = self._array.numbers(first, min(first + self._window_rows, self.n_rows))
            lengths = np.full(len(values), self.n_genes, np.int64)
            yield Window(lengths=lengths, genes=np.empty(0, np.int64), values=values.reshape(-1))


class CsrMatrix(SourceMatrix):
    """A CSR matrix, read sequentially."""

    encoding = "csr"

    def __init__(self, node: Node, name: str, *, shape: tuple[int, int], window_bytes: int) -> None:
        super().__init__(name, n_rows=shape[0], n_genes=shape[1])
        self._stored = CompressedArrays(node, axes=("row", "gene"), major=shape[0], minor=shape[1])
        self._window_elements = min(window_bytes, _MOST_READ) // self._stored.element_bytes
        self.n_stored, self.dtype = self._stored.n_values, self._stored.dtype
        self.genes_dtype, self.indptr_dtype = self._stored.genes_dtype, self._stored.indptr_dtype

    def windows(self, first_row: int = 0) -> Iterator[Window]:
        for row, indptr, genes, values in self._stored.windows(self._window_elements, first_row):
            yield canonical(indptr, genes, values, at=self._stored.at, first_row=row)


# ---- the matrices of several sources as one
#
# Each window of a source becomes one window of the joined matrix. Genes are renumbered or dropped, then sorted again if
# the new numbers are not ascending. Sorting takes linear time with one bit per gene: 5 to 8 ns per value, where a
# comparison sort takes 40.


@compiled
def _sort_genes(
    lengths: Rows, n_genes: int, source: tuple[NDArray[Any], NDArray[Any]], out: tuple[NDArray[Any], NDArray[Any]]
) -> Rows:
    """Sorts the genes and values of each row from `source` into `out` and returns the new lengths.

    Negative genes are dropped. The rank of a gene in its row is the number of bits set before its own.
    """
    (genes, values), (out_genes, out_values) = source, out
    one = np.uint64(1)
    present = np.zeros((n_genes + 63) // 64, np.uint64)
    before = np.zeros(len(present), np.int64)
    kept = np.empty(lengths.max() + 1, np.int64) if len(lengths) else np.empty(0, np.int64)
    out_lengths = np.zeros_like(lengths)
    at = start = 0
    for row in range(len(lengths)):
        n_kept = 0
        for i in range(start, start + lengths[row]):
            kept[n_kept] = i
            n_kept += genes[i] >= 0  # without a branch, which would be mispredicted half the time
        for i in kept[:n_kept]:
            present[genes[i] >> 6] |= one << np.uint64(genes[i] & 63)
        for word in range(len(present)):
            before[word] = at
            at += count_bits(present[word])
        for i in kept[:n_kept]:
            lower = present[genes[i] >> 6] & ((one << np.uint64(genes[i] & 63)) - one)
            position = before[genes[i] >> 6] + count_bits(lower)
            out_genes[position], out_values[position] = genes[i], values[i]
        present[:] = 0
        out_lengths[row] = n_kept
        start += lengths[row]
    return out_lengths


class JoinedMatrix(SourceMatrix):
    """The rows of `parts`, one part after the other, over `n_genes` genes.

    Each part comes with the new numbers of its genes: unique, and -1 for genes to drop. None leaves all genes as they
    are. Genes that a part lacks are zeros. The result is dense if all parts are dense, else CSR. In a CSR result, dense
    rows keep their nonzero values (including NaN), as in `anndata.concat`.
    """

    genes_dtype = indptr_dtype = np.dtype(np.int64)

    def __init__(self, name: str, parts: Sequence[tuple[SourceMatrix, Rows | None]], *, n_genes: int) -> None:
        matrices = [matrix for matrix, _ in parts]
        super().__init__(name, n_rows=sum(matrix.n_rows for matrix in matrices), n_genes=n_genes)
        self.encoding = "dense" if all(matrix.encoding == "dense" for matrix in matrices) else "csr"
        counts = [matrix.n_stored for matrix in matrices if matrix.n_stored is not None]
        self.n_stored = sum(counts) if len(counts) == len(matrices) else None
        if self.encoding == "dense":
            self.n_stored = self.n_rows * n_genes
        self.dtype = np.result_type(*(matrix.dtype for matrix in matrices))
        if n_genes <= np.iinfo(np.int32).max:
            self.genes_dtype = np.dtype(np.int32)
        self._parts = [(matrix, None if genes is None else genes.astype(self.genes_dtype)) for matrix, genes in parts]

    def windows(self, first_row: int = 0) -> Iterator[Window]:
        for matrix, genes in self._parts:
            if first_row < matrix.n_rows:
                for window in matrix.windows(first_row):
                    yield self._joined(window, matrix, genes)
            first_row = max(0, first_row - matrix.n_rows)

    def _joined(self, window: Window, matrix: SourceMatrix, genes: NDArray[Any] | None) -> Window:
        if self.encoding == "dense":
            return self._dense(window, matrix.n_genes, genes)
        if matrix.encoding == "dense":
            window = without_zeros(window, matrix.n_genes)
        return self._sparse(window, genes)

    def _dense(self, window: Window, n_genes: int, genes: NDArray[Any] | None) -> Window:
        if genes is None:
            return replace(window, values=window.values.astype(self.dtype, copy=False))
        rows = window.values.reshape(len(window.lengths), n_genes)
        kept = np.flatnonzero(genes >= 0)
        values = np.zeros((len(rows), self.n_genes), self.dtype)
        values[:, genes[kept]] = rows[:, kept]
        return replace(window, lengths=np.full(len(rows), self.n_genes, np.int64), values=values.reshape(-1))

    def _sparse(self, window: Window, genes: NDArray[Any] | None) -> Window:
        values = window.values.astype(self.dtype, copy=False)
        if genes is None:
            return replace(window, genes=window.genes.astype(self.genes_dtype, copy=False), values=values)
        mapped = genes[window.genes]
        if genes.min(initial=0) == 0 and (genes[1:] > genes[:-1]).all():
            return replace(window, genes=mapped, values=values)
        # Values are only moved, so any type of their size works: numba has no float16.
        bits = values.view(f"u{values.itemsize}")
        out = np.empty_like(mapped), np.empty_like(bits)
        lengths = _sort_genes(window.lengths, self.n_genes, (mapped, bits), out)
        n_kept = int(lengths.sum())
        return replace(window, lengths=lengths, genes=out[0][:n_kept], values=out[1][:n_kept].view(values.dtype))

    def close(self) -> None:
        for matrix, _ in self._parts:
            matrix.close()


def without_zeros(window: Window, n_genes: int) -> Window:
    """Converts a dense window to CSR by dropping its zeros."""
    values = window.values.reshape(len(window.lengths), n_genes)
    rows, genes = np.nonzero(values)
    return replace(window, lengths=np.bincount(rows, minlength=len(values)), genes=genes, values=values[rows, genes])
