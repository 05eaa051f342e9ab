"""Gathers rows that are scattered over flat arrays into one CSR or dense minibatch. Pure.

The sources are flat read-only arrays, one or two per store: a mirror's file mapped into memory, or the buffer of one
fetch. A row is the elements `[start, start + length)`. The compiled loops are in loops.py. If x has every gene of the
store in other columns, columns are looked up as they are copied. If genes are left out, the values of the others are
first packed in their stored dtypes, and then gathered like all other rows.

Rows of float16 have to be `widened` first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.compiled import compiled
from zloader.common.records import CsrArrays, MinibatchArrays, Rows, X
from zloader.reading.loops import (
    Columns,
    compress_rows,
    copy_rows,
    count_nonzero,
    decode_rows,
    map_rows,
    scatter_coded,
    scatter_rows,
    select_columns,
    select_values,
    sort_rows,
)
from zloader.selecting.genes import ChosenGenes
from zloader.storage.coded_rows import Views
from zloader.transforms.normalizing import sum_of

Empty = Callable[[int, np.dtype[Any]], NDArray[Any]]  # makes an array of a length and a dtype, with any contents
_MOST_INT32 = np.iinfo(np.int32).max


def indptr_of(lengths: Rows) -> Rows:
    indptr = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=indptr[1:])
    return indptr


@dataclass(frozen=True, kw_only=True, eq=False)
class SourceRows:
    """Rows of one matrix in memory, at positions `at` of a fetch or of a minibatch.

    Row i consists of `lengths[i]` elements of `values` from `starts[1][i]` on and, unless the matrix is dense, as many
    elements of `genes` from `starts[0][i]` on. If the rows are `coded` there, row i begins at byte `starts[1][i]`, and
    `genes` and `values` only have the dtypes.

    `columns` has the column of each gene in x; None if the genes are the columns. `unsorted` says that the columns of a
    row may not ascend although its genes do. `chosen` are the genes of x, which `choose` turns into `columns`, and
    `totals` the sums of the rows with all genes, where they are known.
    """

    at: Rows | slice
    genes: NDArray[Any] | None
    values: NDArray[Any]
    starts: tuple[Rows, Rows]
    lengths: Rows
    columns: Columns | None = None
    unsorted: bool = False
    coded: Views | None = None
    chosen: ChosenGenes | None = None
    totals: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        """Marks genes and values as read-only, as those of a mirror or a fetch are. Else numba compiles more loops."""
        for name in ("genes", "values"):
            array = getattr(self, name)
            if array is not None and array.flags.writeable:
                array = array.view()
                array.flags.writeable = False
                object.__setattr__(self, name, array)

    def n_values(self) -> Rows:
        """Values per row in CSR form, which for dense rows are the nonzero values."""
        if self.genes is not None:
            return self.lengths
        found = np.empty_like(self.lengths)
        count_nonzero(self.values, self.starts[1], self.lengths, found)
        return found

    def decoded(self, n_genes: int) -> SourceRows:
        """The same rows, raw, one after another."""
        if self.coded is None:
            return self
        dtype, genes = self.values.dtype, self.coded[1].dtype
        return _of(csr_rows([self], len(self.lengths), n_genes=n_genes, dtype=dtype, genes=genes))

    def with_genes(self, chosen: ChosenGenes, genes: np.dtype[Any] | None) -> SourceRows:
        """Raw rows with the chosen genes as columns, in this dtype and in order, one after another."""
        rows = choose(replace(self, values=as_bits(self.values)), chosen)
        x = csr_rows([rows], len(self.lengths), n_genes=len(chosen), dtype=rows.values.dtype, genes=genes)
        return _of(replace(x, values=x.values.view(self.values.dtype)))


def _of(x: CsrArrays) -> SourceRows:
    starts, lengths = x.indptr[:-1].astype(np.int64), np.diff(x.indptr).astype(np.int64)
    return SourceRows(at=slice(None), genes=x.indices, values=x.values, starts=(starts, starts), lengths=lengths)


def as_bits(values: NDArray[Any]) -> NDArray[Any]:
    """Values that are only moved: float16, which numba does not know, as uint16."""
    return values.view(np.uint16) if values.dtype == np.float16 else values


def totals_of(values: NDArray[Any], starts: Rows, lengths: Rows) -> NDArray[np.float64]:
    """The sum of each row, or a negative value that it has."""
    totals = np.empty(len(lengths))
    _totals(values.astype(np.float32) if values.dtype == np.float16 else values, starts, lengths, totals)
    return totals


@compiled
def _totals(values: NDArray[Any], starts: Rows, lengths: Rows, out: NDArray[np.float64]) -> None:
    for row in range(len(starts)):
        of_row = values[starts[row] : starts[row] + lengths[row]]
        out[row] = sum_of(of_row)
        for i in range(len(of_row)):
            if of_row[i] < 0:
                out[row] = of_row[i]


def choose(rows: SourceRows, genes: ChosenGenes, columns: Columns | None = None) -> SourceRows:
    """The rows with the chosen genes as their columns. Values are copied only if a gene is left out, or if dense.

    `columns` are those of CSR rows of several stores, whose choices differ from `genes` in nothing else.
    """
    n_rows, n_columns = len(rows.lengths), len(genes)
    stored, stored_genes = rows.values, rows.genes
    if stored_genes is None:
        dense = np.empty((n_rows, n_columns), stored.dtype)
        select_columns(stored, rows.starts[1], genes.positions, dense)
        starts = np.arange(n_rows) * n_columns
        lengths = np.full(n_rows, n_columns)
        return replace(rows, values=dense.reshape(-1), starts=(starts, starts), lengths=lengths)
    if columns is None:
        columns = genes.column_of, np.zeros(n_rows, np.int64)
    if genes.takes_all:
        return replace(rows, columns=columns, unsorted=not genes.ascending)
    n_stored = int(rows.lengths.sum())
    chosen, values = np.empty(n_stored, columns[0].dtype), np.empty(n_stored, stored.dtype)
    lengths = np.empty_like(rows.lengths)
    select_values(stored_genes, stored, rows.starts, rows.lengths, columns, n_columns, (chosen, values, lengths))
    starts = indptr_of(lengths)
    return replace(
        rows,
        genes=chosen[: starts[-1]],
        values=values[: starts[-1]],
        starts=(starts[:-1], starts[:-1]),
        lengths=lengths,
        unsorted=not genes.ascending,
    )


def widened(rows: SourceRows) -> SourceRows:
    """The rows, packed and converted to float32 if they are float16, with which numba does not compute."""
    if rows.values.dtype != np.float16:
        return rows
    starts = indptr_of(rows.lengths)
    packed = np.empty(starts[-1], np.uint16)
    copy_rows(rows.values.view(np.uint16), rows.starts[1], rows.lengths, starts[:-1], packed)
    return replace(rows, values=packed.view(np.float16).astype(np.float32), starts=(rows.starts[0], starts[:-1]))


def csr_rows(
    parts: Sequence[SourceRows],
    n_rows: int,
    *,
    n_genes: int,
    dtype: np.dtype[Any] | str,
    genes: np.dtype[Any] | None = None,
    empty: Empty = np.empty,
) -> CsrArrays:
    """A minibatch of `n_rows` rows in CSR form. Rows that no part holds are empty.

    indptr and indices are int32, as in SciPy and torch's own kernels, or int64 from 2**31 values on. `genes` is another
    dtype for the indices. `empty` makes the indices and the values.
    """
    lengths = np.zeros(n_rows, np.int64)
    for part in parts:
        lengths[part.at] = part.n_values()
    indptr = indptr_of(lengths)
    index_dtype = np.int32 if indptr[-1] <= _MOST_INT32 else np.int64
    indices = empty(int(indptr[-1]), genes or np.dtype(index_dtype))
    values = empty(int(indptr[-1]), np.dtype(dtype))
    for part in parts:
        to = indptr[:-1][part.at]
        if part.coded is not None:
            decode_rows(part.coded, part.starts[1], part.lengths, to, (indices, values))
        elif part.genes is None:
            compress_rows(part.values, part.starts[1], part.lengths, to, indices, values)
        elif part.unsorted:
            mapped = (part.genes, part.columns, n_genes)
            sort_rows(mapped, part.values, part.starts, part.lengths, to, (indices, values))
        else:
            if part.columns is None:
                copy_rows(part.genes, part.starts[0], part.lengths, to, indices)
            else:
                map_rows(part.genes, part.starts[0], part.lengths, to, part.columns, indices)
            copy_rows(part.values, part.starts[1], part.lengths, to, values)
    return CsrArrays(indptr=indptr.astype(index_dtype), indices=indices, values=values, n_genes=n_genes)


def dense_rows(
    parts: Sequence[SourceRows], n_rows: int, *, n_genes: int, dtype: str, empty: Empty = np.empty
) -> NDArray[Any]:
    """A dense minibatch (`n_rows` x genes). If a gene occurs twice in a CSR row, its values are summed.

    Rows that no part holds are zeros. `empty` makes its memory.
    """
    out = empty(n_rows * n_genes, np.dtype(dtype)).reshape(n_rows, n_genes)
    if sum(len(part.lengths) for part in parts) < n_rows:
        out.fill(0)
    for part in parts:
        to = np.arange(n_rows)[part.at]
        if part.coded is not None:
            scatter_coded(part.coded, part.starts[1], part.lengths, to, out)
        elif part.genes is None:
            copy_rows(part.values, part.starts[1], part.lengths, to * n_genes, out.reshape(-1))
        else:
            scatter_rows((part.genes, part.columns), part.values, part.starts, part.lengths, to, out)
    return out


def compressed(dense: NDArray[Any], *, genes: np.dtype[Any] | None = None) -> CsrArrays:
    """Dense rows in CSR form, in the same dtype. `genes` is the dtype of the indices, as in `csr_rows`."""
    n_rows, n_genes = dense.shape
    starts, lengths = np.arange(n_rows) * n_genes, np.full(n_rows, n_genes)
    rows = SourceRows(at=slice(None), genes=None, values=dense.reshape(-1), starts=(starts, starts), lengths=lengths)
    return csr_rows([rows], n_rows, n_genes=n_genes, dtype=dense.dtype.name, genes=genes)


def cut_apart(minibatch: MinibatchArrays, cuts: Sequence[int]) -> list[MinibatchArrays]:
    """The minibatches between successive cuts. CSR values and dense rows share its memory."""
    return [cut(minibatch, first, last) for first, last in pairwise(cuts)]


def cut(minibatch: MinibatchArrays, first: int, last: int) -> MinibatchArrays:
    """The rows `[first, last)` of a minibatch as a minibatch. CSR values and dense rows share its memory."""
    x: dict[str, X] = {}
    for name, matrix in minibatch.x.items():
        x[name] = next(csr_cut_apart(matrix, (first, last))) if isinstance(matrix, CsrArrays) else matrix[first:last]
    obs, obsm = ({name: rows[first:last] for name, rows in of.items()} for of in (minibatch.obs, minibatch.obsm))
    present = {name: has[first:last] for name, has in minibatch.present.items()}
    tokens = None if minibatch.tokens is None else minibatch.tokens.cut(first, last)
    sets = None if minibatch.sets is None else minibatch.sets[first:last]
    index = minibatch.index[first:last]
    return MinibatchArrays(x=x, obs=obs, obsm=obsm, index=index, tokens=tokens, sets=sets, present=present)


def csr_cut_apart(x: CsrArrays, cuts: Sequence[int]) -> Iterator[CsrArrays]:
    """The rows between successive cuts, which share the memory of x, but for `indptr`."""
    places = x.indptr[list(cuts)].tolist()
    for first, last, begin, end in zip(cuts, cuts[1:], places, places[1:], strict=False):
        indptr = x.indptr[first : last + 1] - x.indptr[first]
        yield CsrArrays(indptr=indptr, indices=x.indices[begin:end], values=x.values[begin:end], n_genes=x.n_genes)
