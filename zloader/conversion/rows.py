"""The matrices of sources as windows of canonical rows: those of a Dataset, and those that a function reads.

A Dataset is read as a Loader reads it, ahead and in threads, but in order and in the stored dtypes. Anything else is
read one window after another. Every error names the source and the row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from zloader.common.errors import SourceError
from zloader.common.options import FetchOptions, MiB
from zloader.common.records import WINDOW_ROWS, CsrArrays, Rows
from zloader.conversion.port import Matrix, Window, joined
from zloader.order.plan import Fetch
from zloader.reading.fetch import FetchScheduler
from zloader.reading.forms import Form
from zloader.reading.gather import indptr_of
from zloader.reading.recipe import MatrixPart, Recipe
from zloader.reading.resources import BufferPool
from zloader.selecting.groups import shares

# Bytes per window. Arrays of this size reuse freed memory; with 64 MiB every window would fault in new pages.
MOST_BYTES = 16 * MiB
_FIRST_ROWS = 256  # of the window that tells how long rows are
_ROW_BYTES = 64  # at least, so that empty rows do not make endless windows
_SAMPLES, _SAMPLE_BYTES = 64, MiB // 16  # windows of a sample, and about the bytes of each


def split_rows(indptr: Rows, max_elements: int) -> Iterator[tuple[int, int]]:
    """Splits rows into runs `[first, last)` of at most `max_elements` values; a longer row is a run by itself."""
    first, n_rows = 0, len(indptr) - 1
    while first < n_rows:
        last = int(np.searchsorted(indptr, indptr[first] + max_elements, side="right")) - 1
        last = min(max(last, first + 1), n_rows)
        yield first, last
        first = last


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
    mended = np.unique(rows[1:][~rises])
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


class ReadMatrix(Matrix):
    """A matrix whose rows `[start, stop)` are what `read` returns: CSR of SciPy in any order, or a dense array.

    With `blocks`, `read(first_row)` returns them from a row on, in blocks. `like` has the genes and dtypes of all of
    them; it is CSR or dense, as they are.
    """

    def __init__(  # noqa: PLR0913 - all but three are keyword-only
        self,
        name: str,
        read: Callable[..., Any],
        like: Any,
        *,
        n_rows: int,
        at: str,
        n_stored: int | None = None,
        together: int = 1,
        blocks: bool = False,
    ) -> None:
        """`at` names the matrix in messages. Dense windows have multiples of `together` rows, if so many fit."""
        super().__init__(name, n_rows=n_rows, n_genes=like.shape[1])
        self._read, self._at, self._together, self._in_blocks = read, at, together, blocks
        self.dense, self.dtype = not scipy.sparse.issparse(like), like.dtype.newbyteorder("=")
        self.genes_dtype = np.dtype(np.int64) if self.dense else like.indices.dtype
        self.n_stored = n_rows * self.n_genes if self.dense else n_stored

    def sample(self) -> Iterator[Window]:
        if self._in_blocks:
            return super().sample()
        n_rows = max(1, _SAMPLE_BYTES // max(1, self.n_genes * self.dtype.itemsize)) if self.dense else _FIRST_ROWS
        return (self.rows(start, stop) for start, stop in _spread(self.n_rows, n_rows))

    def rows(self, start: int, stop: int) -> Window:
        if self._in_blocks:
            return super().rows(start, stop)
        rows, at = self._read(start, stop), f"{self._at}({start}, {stop})"
        if self.dense:
            return self._dense(rows)
        self._require_sound(rows, start, at)
        return canonical(rows.indptr.astype(np.int64), *self._cast(rows), at=self._at, first_row=start)

    def windows(self, first_row: int = 0) -> Iterator[Window]:
        start, n_values = first_row, 0
        for rows in self._read(first_row) if self._in_blocks else self._steps(first_row):
            if self.dense:
                yield self._dense(rows)
                continue
            stop = start + rows.shape[0]
            self._require_sound(rows, start, f"{self._at}({start}, {stop})")
            n_values += int(rows.indptr[-1])
            yield from self._sparse(rows, start)
            start = stop
        if not self.dense and self.n_stored is not None and n_values > self.n_stored:
            raise SourceError(
                f"{self._at} returned {n_values} values in all, but n_values is {self.n_stored}: state their number, "
                "or a larger one"
            )

    def _steps(self, start: int) -> Iterator[Any]:
        """The rows from `start` on, about 16 MiB at a time."""
        step = _FIRST_ROWS
        if self.dense:
            step = max(1, MOST_BYTES // max(1, self.n_genes * self.dtype.itemsize))
            step -= step % self._together if step > self._together else 0
        while start < self.n_rows:
            stop = min(start + step, self.n_rows)
            rows = self._read(start, stop)
            yield rows
            if not self.dense:
                row_bytes = (rows.data.nbytes + rows.indices.nbytes) / (stop - start)
                step = max(1, int(MOST_BYTES / max(_ROW_BYTES, row_bytes)))
            start = stop

    def _dense(self, rows: NDArray[Any]) -> Window:
        values = np.ascontiguousarray(rows, self.dtype)
        lengths = np.full(len(values), self.n_genes, np.int64)
        return Window(lengths=lengths, genes=np.empty(0, np.int64), values=values.reshape(-1))

    def _sparse(self, rows: Any, first_row: int) -> Iterator[Window]:
        indptr = rows.indptr.astype(np.int64)
        for first, last in split_rows(indptr, MOST_BYTES // (self.dtype.itemsize + self.genes_dtype.itemsize)):
            genes, values = self._cast(rows, slice(indptr[first], indptr[last]))
            ends = indptr[first : last + 1] - indptr[first]
            yield canonical(ends, genes, values, at=self._at, first_row=first_row + first)

    def _cast(self, rows: Any, part: slice | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
        part = slice(0, rows.indptr[-1]) if part is None else part
        genes = rows.indices[part].astype(self.genes_dtype, copy=False)
        return genes, rows.data[part].astype(self.dtype, copy=False)

    def _require_sound(self, rows: Any, start: int, at: str) -> None:
        """Raises SourceError unless the rows from `start` on are as they have to be."""
        indptr, genes = rows.indptr, rows.indices
        if indptr[0] or indptr[-1] > min(len(genes), len(rows.data)) or (np.diff(indptr) < 0).any():
            raise SourceError(f"{at} returned a CSR matrix whose indptr does not fit its values")
        genes = genes[: indptr[-1]]
        if len(genes) and (genes.min() < 0 or genes.max() >= self.n_genes):
            wrong = int(np.flatnonzero((genes < 0) | (genes >= self.n_genes))[0])
            row = start + int(np.searchsorted(indptr, wrong, side="right")) - 1
            raise SourceError(
                f"{at}: row {row} has a value for gene {genes[wrong]}, but there are {self.n_genes} genes"
            )
        if rows.dtype.kind not in "buif" or not np.can_cast(rows.dtype, self.dtype, "safe"):
            raise SourceError(
                f"{at} returned {rows.dtype}, but the first cells {self.dtype}: return one dtype of numbers"
            )


class DatasetMatrix(Matrix):
    """A matrix of a Dataset: the rows `numbers(positions)` of its `parts`, one for each store."""

    def __init__(
        self,
        name: str,
        parts: Sequence[MatrixPart],
        genes_dtypes: Sequence[np.dtype[Any]],
        *,
        n_rows: int,
        numbers: Callable[[Rows], Rows],
        options: FetchOptions,
        compiled: bool,
    ) -> None:
        """`compiled` says whether to load numba for its rows."""
        super().__init__(name, n_rows=n_rows, n_genes=parts[0].n_columns)
        self._compiled = compiled
        self._parts, self._numbers, self._options = parts, numbers, options
        self._ends = np.cumsum([part.n_rows for part in parts], dtype=np.int64)
        self._stored = [part.matrix.values.dtype.newbyteorder("=") for part in parts]
        self.dense = all(part.matrix.genes is None for part in parts)
        self.dtype = np.result_type(*self._stored)
        self.genes_dtype = np.dtype(np.int32)
        if genes_dtypes and not any(part.genes is not None for part in parts):
            self.genes_dtype = np.result_type(*genes_dtypes)
        self.n_stored: int = sum(part.matrix.values.n_elements for part in parts)
        self._at = f"{name} of {', '.join(dict.fromkeys(part.url for part in parts[:3]))}"

    def windows(self, first_row: int = 0) -> Iterator[Window]:
        return self._read(self._fetches(first_row, self.n_rows))

    def rows(self, start: int, stop: int) -> Window:
        return joined(list(self._read(self._fetches(start, stop))), self)

    def sample(self) -> Iterator[Window]:
        n_rows = max(1, _SAMPLE_BYTES * self.n_rows // max(1, self.n_stored * self._element_bytes))
        runs = [np.arange(start, stop) for start, stop in _spread(self.n_rows, n_rows)]
        fetches = [_fetch(0, self._numbers(np.concatenate(runs)))] if runs else []
        return self._read(iter(fetches), as_stored=True)

    def _read(self, fetches: Iterator[Fetch], *, as_stored: bool = False) -> Iterator[Window]:
        """The windows of fetches; `as_stored`, not canonical."""
        form = Form(dense=self.dense, dtype=None, narrow=not self.dense)
        recipe = Recipe(x={self.name: self._parts}, form=form, compiled=self._compiled)
        row = 0
        for minibatch in FetchScheduler(recipe, self._options, BufferPool()).start(fetches, name="zloader-convert"):
            x, row = minibatch.x[self.name], int(minibatch.index[0])
            if isinstance(x, CsrArrays) and as_stored:
                yield Window(lengths=np.diff(x.indptr), genes=x.indices, values=x.values)
            elif isinstance(x, CsrArrays):
                yield canonical(x.indptr.astype(np.int64), x.indices, x.values, at=self._at, first_row=row)
            else:
                lengths = np.full(len(x), self.n_genes, np.int64)
                yield Window(lengths=lengths, genes=np.empty(0, np.int64), values=x.reshape(-1))

    @property
    def _element_bytes(self) -> int:
        return self.dtype.itemsize + (0 if self.dense else self.genes_dtype.itemsize)

    def _fetches(self, start: int, stop: int) -> Iterator[Fetch]:
        most = max(1, MOST_BYTES // self._element_bytes)
        number = 0
        for begin in range(start, stop, WINDOW_ROWS):
            rows = self._numbers(np.arange(begin, min(begin + WINDOW_ROWS, stop)))
            for first, last in split_rows(indptr_of(self._lengths(rows)), most):
                yield _fetch(number, rows[first:last])
                number += 1

    def _lengths(self, rows: Rows) -> Rows:
        """The stored values of each of some rows, or the values of a dense row."""
        lengths = np.zeros(len(rows), np.int64)
        for number, at in shares(self._ends, rows):
            part = self._parts[number]
            within, at = part.held(rows[at] - (self._ends[number] - part.n_rows), at)
            starts, stops = part.matrix.elements_of(within, part.indptr)
            lengths[at] = stops - starts
        return lengths


def _fetch(number: int, rows: Rows) -> Fetch:
    """A fetch of rows that become one minibatch in their order."""
    return Fetch(number=number, rows=rows, order=np.arange(len(rows)), cuts=np.array([0, len(rows)]))


def _spread(n_rows: int, together: int) -> list[tuple[int, int]]:
    """The first row of each window of a sample, and the row after its last. They do not overlap."""
    n_windows = max(1, min(_SAMPLES, -(-n_rows // together)))
    bounds = itertools.pairwise(number * n_rows // n_windows for number in range(n_windows + 1))
    return [(start, min(start + together, stop)) for start, stop in bounds if start < stop]
