"""Gathers rows that are scattered over flat arrays into one CSR or dense minibatch. Pure.

The sources are flat read-only arrays, one or two per store: a mirror's file mapped into memory, or the buffer of one
fetch. A row is the elements `[start, start + length)`. The compiled loops are in loops.py. If x has every gene of the
store in other columns, columns are looked up as they are copied. If genes are left out, the values of the others are
first packed in their stored dtypes, and then gathered like all other rows.

float16 and bfloat16, with which numba does not compute, are gathered in a wider dtype and rounded once. NumPy has no
bfloat16, so its arrays hold the bits as uint16, the upper half of a float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.compiled import compiled
from zloader.common.records import CsrArrays, MinibatchArrays, Rows, X
from zloader.reading.few_rows import Columns, Limits
from zloader.reading.loops import (
    compress_rows,
    copy_rows,
    count_nonzero,
    decode_rows,
    fits,
    limits_of,
    map_rows,
    scatter_coded,
    scatter_rows,
    select_columns,
    select_values,
    sort_rows,
    values_of,
)
from zloader.selecting.genes import ChosenGenes
from zloader.storage.coded_rows import Views

Empty = Callable[[int, np.dtype[Any]], NDArray[Any]]  # makes an array of a length and a dtype, with any contents
_MOST_INT32 = np.iinfo(np.int32).max
HALVES = ("float16", "bfloat16")
_ALIGNED = 64  # bytes


def indptr_of(lengths: Rows) -> Rows:
    indptr = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=indptr[1:])
    return indptr


@dataclass(frozen=True, kw_only=True)
class StoreRows:
    """The rows of a minibatch that come from one source (row_sources.py).

    Row i consists of `lengths[i]` elements of `values` from `starts[1][i]` on and, unless the store is dense, as many
    elements of `genes` from `starts[0][i]` on. It becomes the minibatch's row `at[i]`.

    `columns` has the column of each gene in x; None if the genes are the columns. `unsorted` says that the columns of a
    row may not ascend although its genes do. If the rows are `coded` there, row i begins at byte `starts[1][i]`, and
    `genes` and `values` only have the dtypes.
    """

    at: Rows | slice
    genes: NDArray[Any] | None
    values: NDArray[Any]
    starts: tuple[Rows, Rows]
    lengths: Rows
    columns: Columns | None = None
    unsorted: bool = False
    coded: Views | None = None

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


def _bits(values: NDArray[Any]) -> NDArray[Any]:
    """The values in a dtype that the compiled loops can copy: float16, which numba does not support, as uint16."""
    return values.view(np.uint16) if values.dtype == np.float16 else values


def choose(rows: StoreRows, genes: ChosenGenes, columns: Columns | None = None) -> StoreRows:
    """The rows with the chosen genes as their columns. Values are copied only if a gene is left out, or if dense.

    `columns` are those of CSR rows of several stores, whose choices differ from `genes` in nothing else.
    """
    n_rows, n_columns = len(rows.lengths), len(genes)
    stored, dtype = _bits(rows.values), rows.values.dtype
    stored_genes = rows.genes
    if stored_genes is None:
        dense = np.empty((n_rows, n_columns), stored.dtype)
        select_columns(stored, rows.starts[1], genes.positions, dense)
        starts = np.arange(n_rows) * n_columns
        lengths = np.full(n_rows, n_columns)
        return replace(rows, values=dense.reshape(-1).view(dtype), starts=(starts, starts), lengths=lengths)
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
        values=values[: starts[-1]].view(dtype),
        starts=(starts[:-1], starts[:-1]),
        lengths=lengths,
        unsorted=not genes.ascending,
    )


def widened(rows: StoreRows) -> StoreRows:
    """The rows, packed and converted to float32 if they are float16."""
    if rows.values.dtype != np.float16:
        return rows
    starts = indptr_of(rows.lengths)
    packed = np.empty(starts[-1], np.uint16)
    copy_rows(_bits(rows.values), rows.starts[1], rows.lengths, starts[:-1], packed, None)
    return replace(rows, values=packed.view(np.float16).astype(np.float32), starts=(rows.starts[0], starts[:-1]))


class UnfitValue(Exception):
    """A stored value that the wanted dtype cannot hold, and its row in the minibatch."""

    def __init__(self, row: int, value: Any) -> None:
        super().__init__(row, value)
        self.row, self.value = row, value


def _require_fit(part: StoreRows, limits: Limits | None, beyond: int, n_rows: int) -> None:
    """Raises UnfitValue unless `beyond`, which the kernels return, is -1. Otherwise it is a row of the part."""
    if beyond >= 0:
        first = part.starts[1][beyond]
        if part.coded is None:
            values = part.values[first : first + part.lengths[beyond]]
        else:
            values = values_of(part.coded, first, part.lengths[beyond])
        value = next(value for value in values if not fits(value, limits))
        raise UnfitValue(int(np.arange(n_rows)[part.at][beyond]), value)


def csr_rows(
    parts: Sequence[StoreRows],
    n_rows: int,
    *,
    n_genes: int,
    dtype: str,
    genes: np.dtype[Any] | None = None,
    empty: Empty = np.empty,
) -> CsrArrays:
    """A minibatch of `n_rows` rows in CSR form. Rows that no part holds are empty.

    indptr and indices are int32, as in SciPy and torch's own kernels, or int64 from 2**31 values on. `genes` is another
    dtype for the indices. `empty` makes the indices and the values. Raises UnfitValue.
    """
    parts = [widened(part) for part in parts]
    lengths = np.zeros(n_rows, np.int64)
    for part in parts:
        lengths[part.at] = part.n_values()
    indptr = indptr_of(lengths)
    index_dtype = np.int32 if indptr[-1] <= _MOST_INT32 else np.int64
    gathering = gathering_dtype(dtype, [part.values.dtype for part in parts])
    indices = empty(int(indptr[-1]), genes or np.dtype(index_dtype))
    values = (np.empty if dtype in HALVES else empty)(int(indptr[-1]), gathering)  # half floats are narrowed later
    for part in parts:
        to, limits = indptr[:-1][part.at], limits_of(part.values.dtype, dtype)
        if part.coded is not None:
            beyond = decode_rows(part.coded, part.starts[1], part.lengths, to, (indices, values), limits)
        elif part.genes is None:
            beyond = compress_rows(part.values, part.starts[1], part.lengths, to, indices, values, limits)
        elif part.unsorted:
            mapped, out = (part.genes, part.columns, n_genes), (indices, values)
            beyond = sort_rows(mapped, part.values, part.starts, part.lengths, to, out, limits)
        else:
            if part.columns is None:
                copy_rows(part.genes, part.starts[0], part.lengths, to, indices, None)
            else:
                map_rows(part.genes, part.starts[0], part.lengths, to, part.columns, indices)
            beyond = copy_rows(part.values, part.starts[1], part.lengths, to, values, limits)
        _require_fit(part, limits, beyond, n_rows)
    values = narrowed(values, dtype)
    return CsrArrays(indptr=indptr.astype(index_dtype), indices=indices, values=values, n_genes=n_genes)


def aligned(make: Callable[..., NDArray[Any]], shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """An array that `np.empty` or `np.zeros` makes, from a multiple of 64 bytes on, as JAX needs it to share it."""
    n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = make(n_bytes + _ALIGNED, np.dtype(np.uint8))
    first = -memory.ctypes.data % _ALIGNED
    out: NDArray[Any] = memory[first : first + n_bytes].view(dtype).reshape(shape)
    return out


def dense_rows(
    parts: Sequence[StoreRows], n_rows: int, *, n_genes: int, dtype: str, empty: Empty = np.empty
) -> NDArray[Any]:
    """A dense minibatch (`n_rows` x genes). If a gene occurs twice in a CSR row, its values are summed.

    Rows that no part holds are zeros. `empty` makes its memory.
    Raises UnfitValue.
    """
    parts = [widened(part) for part in parts]
    gathering = gathering_dtype(dtype, [part.values.dtype for part in parts])
    filled = all(part.genes is None for part in parts) and sum(len(part.lengths) for part in parts) == n_rows
    out = aligned(np.empty if dtype in HALVES else empty, (n_rows, n_genes), gathering)
    if not filled:
        out.fill(0)
    for part in parts:
        to, limits = np.arange(n_rows)[part.at], limits_of(part.values.dtype, dtype)
        if part.coded is not None:
            beyond = scatter_coded(part.coded, part.starts[1], part.lengths, to, out, limits)
        elif part.genes is None:
            flat = out.reshape(-1)
            beyond = copy_rows(part.values, part.starts[1], part.lengths, to * n_genes, flat, limits)
        else:
            mapped = (part.genes, part.columns)
            beyond = scatter_rows(mapped, part.values, part.starts, part.lengths, to, out, limits)
        _require_fit(part, limits, beyond, n_rows)
    try:
        return narrowed(out, dtype)
    except FloatingPointError:  # the sum of a gene that occurs twice
        largest = np.argmax(np.where(np.isfinite(out), np.abs(out), 0))
        raise UnfitValue(int(largest // n_genes), out.reshape(-1)[largest]) from None


def compressed(dense: NDArray[Any], *, genes: np.dtype[Any] | None = None) -> CsrArrays:
    """Dense rows in CSR form, in the same dtype. `genes` is the dtype of the indices, as in `csr_rows`."""
    n_rows, n_genes = dense.shape
    bits, starts = _bits(dense), np.arange(n_rows) * n_genes
    lengths = np.full(n_rows, n_genes)
    rows = StoreRows(at=slice(None), genes=None, values=bits.reshape(-1), starts=(starts, starts), lengths=lengths)
    found = csr_rows([rows], n_rows, n_genes=n_genes, dtype=bits.dtype.name, genes=genes)
    return replace(found, values=found.values.view(dense.dtype))


def cut_apart(minibatch: MinibatchArrays, cuts: Sequence[int]) -> list[MinibatchArrays]:
    """The minibatches between successive cuts. CSR values and dense rows share its memory."""
    return [cut(minibatch, first, last) for first, last in pairwise(cuts)]


def cut(minibatch: MinibatchArrays, first: int, last: int) -> MinibatchArrays:
    """The rows `[first, last)` of a minibatch as a minibatch. CSR values and dense rows share its memory."""
    x = {name: _cut_x(matrix, first, last) for name, matrix in minibatch.x.items()}
    obs, obsm = ({name: rows[first:last] for name, rows in of.items()} for of in (minibatch.obs, minibatch.obsm))
    present = {name: has[first:last] for name, has in minibatch.present.items()}
    names = None if minibatch.names is None else minibatch.names[first:last]
    tokens = None if minibatch.tokens is None else minibatch.tokens.cut(first, last)
    sets = None if minibatch.sets is None else minibatch.sets[first:last]
    index = minibatch.index[first:last]
    return MinibatchArrays(x=x, obs=obs, obsm=obsm, index=index, names=names, tokens=tokens, sets=sets, present=present)


def _cut_x(x: X, first: int, last: int) -> X:
    return next(csr_cut_apart(x, (first, last))) if isinstance(x, CsrArrays) else x[first:last]


def csr_cut_apart(x: CsrArrays, cuts: Sequence[int]) -> Iterator[CsrArrays]:
    """The rows between successive cuts, which share the memory of x, but for `indptr`."""
    places = x.indptr[list(cuts)].tolist()
    for first, last, begin, end in zip(cuts, cuts[1:], places, places[1:], strict=False):
        indptr = x.indptr[first : last + 1] - x.indptr[first]
        yield CsrArrays(indptr=indptr, indices=x.indices[begin:end], values=x.values[begin:end], n_genes=x.n_genes)


# ---- half floats


def gathering_dtype(dtype: str, stored: Iterable[np.dtype[Any]]) -> np.dtype[Any]:
    """The dtype in which to gather values that become `dtype`.

    For half floats it holds the stored values exactly, because rounding a value twice may change its last bit.
    """
    if dtype not in HALVES:
        return np.dtype(dtype)
    exact = all(np.can_cast(each, np.float32, "safe") for each in stored)
    return np.dtype(np.float32 if exact else np.float64)


def value_bytes(dtype: str, stored: Iterable[np.dtype[Any]]) -> int:
    """Bytes per value while a minibatch is gathered."""
    return gathering_dtype(dtype, stored).itemsize + (2 if dtype in HALVES else 0)


def narrowed(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The gathered values in `dtype`, rounded to nearest, ties to even.

    Raises FloatingPointError if a finite value is infinite as float16, as sums of repeated genes may be.
    """
    if dtype not in HALVES:
        return values
    with np.errstate(over="raise"):
        if dtype == "float16":
            return values.astype(np.float16)
        single = values if values.dtype == np.float32 else _rounded_to_odd(values)
    out = np.empty(values.shape, np.uint16)
    _round_to_bfloat16(single.reshape(-1).view(np.uint32), out.reshape(-1))
    return out


def _rounded_to_odd(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """float64 as float32 such that rounding the result again gives the same as rounding `values` at once.

    Inexact values are rounded towards zero, and their last bit is set, which breaks ties in the right direction
    (Boldo and Melquiond 2008, Emulation of FMA and correctly rounded sums).
    """
    single = values.astype(np.float32)
    bits = single.view(np.uint32)
    bits -= np.abs(single) > np.abs(values)
    bits |= single != values  # compares the truncated value
    return single


@compiled
def _round_to_bfloat16(bits: NDArray[np.uint32], out: NDArray[np.uint16]) -> None:
    for i in range(len(bits)):
        word = bits[i]
        if (word & 0x7FFFFFFF) > 0x7F800000:  # NaN, which rounding up could turn into another value
            out[i] = (word >> 16) | 0x40
        else:
            out[i] = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
