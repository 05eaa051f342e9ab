"""Windows: a matrix on its way into a store, a run of rows at a time, so that memory does not grow with the matrix.

A SourceMatrix can be gone through twice: its first pass validates all and shows what dtypes are needed, its windows are
then stored. Those that reorder (transpose, shuffle) do so out of core, and those that join wrap others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from zloader.common.records import Rows

Advance = Callable[[int], None]  # takes the number of values done since it was last called


@dataclass(frozen=True, kw_only=True)
class Window:
    """Some rows of a matrix: `lengths` (values a row), `genes` (ascending within a row, each once), `values`.

    A dense window has all values of its rows, row after row, and no `genes`. `places` are the rows' numbers in the
    matrix, None where they follow those of the window before. `mended` counts rows that were not canonical.
    """

    lengths: Rows
    genes: NDArray[np.integer]
    values: NDArray[Any]
    places: Rows | None = None
    mended: int = 0

    def from_row(self, first: int) -> Window:
        """The same without its `first` rows (a window of consecutive rows)."""
        skipped = int(self.lengths[:first].sum())
        return Window(lengths=self.lengths[first:], genes=self.genes[skipped:], values=self.values[skipped:])


class SourceMatrix(ABC):
    """One matrix to be stored. A context manager: what it holds outside the source is freed at the end.

    `dtype`, `genes_dtype` and `indptr_dtype` are those of the source; `n_stored` counts the values in it.
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
        """Values that one run of `first_pass` reads, as `advance` is told of them."""
        return self.n_stored

    def first_pass(self, advance: Advance) -> Iterator[Window]:
        """Shows every row once, in any order, and does what must precede `windows`. Raises as `windows` does."""
        for window in self.windows():
            advance(len(window.values))
            yield window

    @abstractmethod
    def windows(self, first_row: int = 0) -> Iterator[Window]:
        """The rows from `first_row` on, in order; the same at every call. Raises SourceError that names the row."""

    def close(self) -> None:  # noqa: B027
        """Frees what is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def skip_rows(windows: Iterator[Window], first_row: int) -> Iterator[Window]:
    """The windows of consecutive rows without their first `first_row` rows."""
    for window in windows:
        if first_row < len(window.lengths):
            yield window.from_row(first_row) if first_row else window
        first_row = max(0, first_row - len(window.lengths))


def canonical(indptr: Rows, genes: NDArray[np.integer], values: NDArray[Any]) -> Window:
    """The same rows with genes ascending and values of a gene that comes twice summed in their own dtype."""
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
    return Window(
        lengths=np.bincount(rows[kept], minlength=len(lengths)),
        genes=genes[kept],
        values=np.add.reduceat(values, kept, dtype=values.dtype),
        mended=mended,
    )
