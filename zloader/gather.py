"""Compiled row gathers: rows scattered over a flat array -> one CSR or dense minibatch. Pure.

The sources are flat read-only arrays (a mirror's file mapped into memory, or the buffer of one fetch); a row is the
elements `[start, stop)`. Every kernel runs without the GIL and loops over local slice views, which LLVM vectorises:
twice as fast as slice assignment. The values are converted to the wanted dtype on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from zloader.terms import CsrArrays, Rows

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    return cast(Function, numba.njit(nogil=True, cache=True)(function))


@compiled
def copy_rows(source: NDArray[Any], starts: Rows, lengths: Rows, out: NDArray[Any]) -> None:
    at = 0
    for row in range(len(starts)):
        n = lengths[row]
        taken = source[starts[row] : starts[row] + n]
        given = out[at : at + n]
        for i in range(n):
            given[i] = taken[i]
        at += n


@compiled
def _scatter_rows(
    genes: NDArray[Any], values: NDArray[Any], starts: tuple[Rows, Rows], lengths: Rows, out: NDArray[Any]
) -> None:
    for row in range(len(lengths)):
        n = lengths[row]
        columns = genes[starts[0][row] : starts[0][row] + n]
        taken = values[starts[1][row] : starts[1][row] + n]
        given = out[row]
        for i in range(n):
            given[columns[i]] += taken[i]


@compiled
def _count_nonzero(source: NDArray[Any], starts: Rows, n_genes: int, out: Rows) -> None:
    for row in range(len(starts)):
        taken = source[starts[row] : starts[row] + n_genes]
        found = 0
        for i in range(n_genes):
            found += taken[i] != 0
        out[row] = found


@compiled
def _compress_rows(
    source: NDArray[Any], starts: Rows, n_genes: int, out_indices: NDArray[Any], out_values: NDArray[Any]
) -> None:
    at = 0
    for row in range(len(starts)):
        taken = source[starts[row] : starts[row] + n_genes]
        for i in range(n_genes):
            if taken[i] != 0:
                out_indices[at] = i
                out_values[at] = taken[i]
                at += 1


def indptr_of(lengths: Rows) -> Rows:
    indptr = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=indptr[1:])
    return indptr


def csr_from_csr(
    genes: NDArray[Any], values: NDArray[Any], starts: tuple[Rows, Rows], lengths: Rows, *, n_genes: int, dtype: str
) -> CsrArrays:
    """CSR rows from CSR elements; `starts` are each row's first element in `genes` and in `values`."""
    indptr = indptr_of(lengths)
    out = CsrArrays(
        indptr=indptr,
        indices=np.empty(indptr[-1], np.int64),
        values=np.empty(indptr[-1], dtype),
        n_genes=n_genes,
    )
    copy_rows(genes, starts[0], lengths, out.indices)
    copy_rows(values, starts[1], lengths, out.values)
    return out


def dense_from_csr(
    genes: NDArray[Any], values: NDArray[Any], starts: tuple[Rows, Rows], lengths: Rows, *, n_genes: int, dtype: str
) -> NDArray[Any]:
    """Dense rows (rows x genes) from CSR elements; values of a gene that stands twice in a row are summed."""
    out = np.zeros((len(lengths), n_genes), dtype)
    _scatter_rows(genes, values, starts, lengths, out)
    return out


def dense_from_dense(values: NDArray[Any], starts: Rows, *, n_genes: int, dtype: str) -> NDArray[Any]:
    """Dense rows (rows x genes) from a dense matrix laid out flat."""
    out = np.empty((len(starts), n_genes), dtype)
    copy_rows(values, starts, np.full(len(starts), n_genes, np.int64), out.reshape(-1))
    return out


def csr_from_dense(values: NDArray[Any], starts: Rows, *, n_genes: int, dtype: str) -> CsrArrays:
    """CSR rows of the values of a flat dense matrix that are not zero."""
    lengths = np.empty(len(starts), np.int64)
    _count_nonzero(values, starts, n_genes, lengths)
    indptr = indptr_of(lengths)
    indices, out = np.empty(indptr[-1], np.int64), np.empty(indptr[-1], dtype)
    _compress_rows(values, starts, n_genes, indices, out)
    return CsrArrays(indptr=indptr, indices=indices, values=out, n_genes=n_genes)
