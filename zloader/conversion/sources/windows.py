"""Windows: read a matrix as runs of rows, so that memory does not grow with the size of the matrix.

A SourceMatrix is read twice: the first pass validates every value and finds the dtypes, the second pass (`windows`)
stores them. Matrices that reorder rows (transpose, shuffle) do so out of core; a joined matrix wraps its parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from zloader.common.errors import SourceError
from zloader.common.records import Rows

Advance = Callable[[int], None]  # progress callback: the number of values read since the last call


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
    there.
    """

    encoding: str  # "csr", "csc" or "dense"
    n_stored: int
    dtype: np.dtype[Any]
    genes_dtype: np.dtype[Any]
    indptr_dtype: np.dtype[Any]

    def __init__(self, name: str, *, n_rows: int, n_genes: int) -> None:
        self.name = name
        self.n_rows = n_rows
        self.n_genes = n_genes

    @property
    def n_reads(self) -> int:
        """The number of values that `first_pass` reports to `advance` in total."""
        return self.n_stored

    def first_pass(self, advance: Advance) -> Iterator[Window]:
        """Yields every row once, in any order, and prepares `windows`. Raises the same errors as `windows`."""
        for window in self.windows():
            advance(len(window.values))
            yield window

    @abstractmethod
    def windows(self, first_row: int = 0) -> Iterator[Window]:
        """The rows from `first_row` on, in order, identical at every call. Raises SourceError that names the row."""

    def close(self) -> None:  # noqa: B027
        """Frees temporary files and memory."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
