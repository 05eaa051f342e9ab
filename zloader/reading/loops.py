"""The compiled loops of a gather: rows are copied, and their genes turned into columns of x. Pure.

The loops release the GIL and run over local slice views, which LLVM vectorises: this is twice as fast as slice
assignment. They convert values to the wanted dtype as they copy them.

Those of a usual epoch are in NumPy, too, for rows so few that loading their compiled code takes longer. These give the
same results bit for bit, and hold the GIL part of the time. Per value they take about as long, if their temporary
arrays stay in the core's cache. For arrays of a million values, NumPy would get fresh memory, page by page.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zloader.common.compiled import compiled, compiled_after, count_bits
from zloader.common.records import Rows
from zloader.storage.coded_rows import Views, take_genes, take_values

# The columns that genes have in x: gene g of row i has column `tables[starts[i] + g]`. Rows may have different tables,
# because they may come from stores with different genes.
Columns: TypeAlias = tuple[NDArray[Any], Rows]

FEW = 1 << 23  # values and rows, of which NumPy gathers an epoch in some 30 ms more than a compiled loop
_MANY = 1 << 16  # rows; whoever copies more of them at once may do so often, and needs the compiler
_ROWS = 16  # scattered at once; 32 take as long, 4 and 512 half as long again

# ---- genes as columns


@compiled
def columns_in(columns: Columns | None, row: int) -> Any:
    """The columns of the genes of a row. If `columns` is None, so is the result: genes are columns."""
    if columns is None:
        return None
    tables, starts = columns
    return tables[starts[row] :]


@compiled
def column_in(column_of: NDArray[Any] | None, gene: Any) -> Any:
    """The column of a gene in x. If `column_of` is None, genes are columns."""
    if column_of is None:
        return gene
    return column_of[gene]


@compiled
def map_rows(genes: NDArray[Any], starts: Rows, lengths: Rows, at: Rows, columns: Columns, out: NDArray[Any]) -> None:
    """Copies rows of genes as the columns that they have in x."""
    for row in range(len(starts)):
        n, column_of = lengths[row], columns_in(columns, row)
        taken = genes[starts[row] : starts[row] + n]
        given = out[at[row] : at[row] + n]
        for i in range(n):
            given[i] = column_of[taken[i]]


@compiled
def select_values(
    genes: NDArray[Any],
    values: NDArray[Any],
    starts: tuple[Rows, Rows],
    lengths: Rows,
    columns: Columns,
    n_columns: int,
    out: tuple[NDArray[Any], NDArray[Any], Rows],
) -> None:
    """Packs the columns and values of chosen genes into `out`, row after row, and counts the values per row.

    `out` needs room for all stored values: every value is written, and the next one overwrites it if its gene is not
    chosen. Without a branch per value this is two to four times as fast when many genes are chosen.
    """
    packed_columns, packed, counts = out
    first = 0
    for row in range(len(lengths)):
        n, column_of = lengths[row], columns_in(columns, row)
        stored = genes[starts[0][row] : starts[0][row] + n]
        taken = values[starts[1][row] : starts[1][row] + n]
        given_columns = packed_columns[first : first + n]
        given_values = packed[first : first + n]
        to = 0
        for i in range(n):
            column = column_of[stored[i]]
            given_columns[to] = column
            given_values[to] = taken[i]
            to += column < n_columns
        counts[row] = to
        first += to


@compiled
def sort_rows(
    mapped: tuple[NDArray[Any], Columns | None, int],
    values: NDArray[Any],
    starts: tuple[Rows, Rows],
    lengths: Rows,
    at: Rows,
    out: tuple[NDArray[Any], NDArray[Any]],
) -> None:
    """Copies rows by ascending column.

    `mapped` has the genes, their columns in x (None if they are the columns) and the number of columns. `out` has the
    columns and values of x. Values of the same column keep their order.

    The rank of a column in its row is the number of bits set before its own, one bit per column. This is faster than a
    radix sort, and a row stays in the cache from its mapping to its copy. Only rows that have a column twice are sorted
    by comparison.
    """
    genes, columns_of, n_columns = mapped
    columns = np.empty(lengths.max() if len(lengths) else 0, np.uint32)
    one, low = np.uint64(1), np.uint64(63)
    present = np.zeros((n_columns + 63) // 64, np.uint64)
    before = np.empty(len(present), np.int64)
    for row in range(len(lengths)):
        n, column_of = lengths[row], columns_in(columns_of, row)
        stored = genes[starts[0][row] : starts[0][row] + n]
        taken = values[starts[1][row] : starts[1][row] + n]
        to_columns, to_values = out[0][at[row] : at[row] + n], out[1][at[row] : at[row] + n]
        for i in range(n):
            column = np.uint64(column_in(column_of, stored[i]))
            columns[i] = column
            present[column >> np.uint64(6)] |= one << (column & low)
        found = np.int64(0)
        for place in range(len(present)):
            before[place] = found
            found += count_bits(present[place])
        if found == n:
            for i in range(n):
                column = np.uint64(columns[i])
                word = column >> np.uint64(6)
                rank = before[word] + count_bits(present[word] & ((one << (column & low)) - one))
                to_columns[rank], to_values[rank] = columns[i], taken[i]
        else:
            order = np.argsort(columns[:n], kind="mergesort")
            for i in range(n):
                to_columns[i], to_values[i] = columns[order[i]], taken[order[i]]
        present[:] = 0


@compiled
def select_columns(source: NDArray[Any], starts: Rows, positions: Rows, out: NDArray[Any]) -> None:
    """Copies some genes of dense rows. A position of -1 gives zeros."""
    for row in range(len(starts)):
        taken = source[starts[row] :]
        given = out[row]
        for i in range(len(positions)):
            given[i] = taken[positions[i]] if positions[i] >= 0 else given.dtype.type(0)


@compiled
def ascend_strictly(indptr: NDArray[Any], columns: NDArray[Any]) -> bool:
    """Whether the columns of each row ascend without repeats."""
    ascend = True
    for row in range(len(indptr) - 1):
        of_row = columns[indptr[row] : indptr[row + 1]]
        for i in range(len(of_row) - 1):
            ascend &= of_row[i] < of_row[i + 1]
    return ascend


# ---- rows


def _copy_rows(source: NDArray[Any], starts: Rows, lengths: Rows, at: Rows, out: NDArray[Any]) -> Any:
    """Copies rows. Many rows are left to the compiled loop: NotImplemented."""
    if len(starts) > _MANY:
        return NotImplemented
    places = zip(starts.tolist(), lengths.tolist(), at.tolist(), strict=True)
    with np.errstate(over="ignore"):  # as compiled loops do, if a value is too large for a float
        for start, n, to in places:
            out[to : to + n] = source[start : start + n]
    return None


@compiled_after(_copy_rows)
def copy_rows(source: NDArray[Any], starts: Rows, lengths: Rows, at: Rows, out: NDArray[Any]) -> None:
    for row in range(len(starts)):
        n = lengths[row]
        taken = source[starts[row] : starts[row] + n]
        given = out[at[row] : at[row] + n]
        for i in range(n):
            given[i] = taken[i]


def _scatter_rows(
    mapped: tuple[NDArray[Any], Columns | None],
    values: NDArray[Any],
    starts: tuple[Rows, Rows],
    lengths: Rows,
    at: Rows,
    out: NDArray[Any],
) -> None:
    """Makes dense rows."""
    genes, columns_of = mapped
    assert out.flags.c_contiguous  # or else this is a copy
    flat = out.reshape(-1)
    for first in range(0, len(lengths), _ROWS):
        few = slice(first, first + _ROWS)
        n, out[at[few]] = lengths[few], 0
        taken = _packed(values, starts[1][few], n, out.dtype)
        columns = _packed(genes, starts[0][few], n, np.int64)
        if columns_of is not None:
            tables, begins = columns_of
            columns = tables[np.repeat(begins[few], n) + columns].astype(np.int64)
        columns += np.repeat(at[few] * out.shape[1], n)
        if (columns[1:] > columns[:-1]).all():
            flat[columns] = taken + out.dtype.type(0)  # as 0 plus a negative 0 is 0
        else:
            with np.errstate(over="ignore", invalid="ignore"):  # as compiled loops do
                np.add.at(flat, columns, taken)  # one after another, as a gene may occur twice


def _packed(source: NDArray[Any], starts: Rows, lengths: Rows, dtype: Any) -> NDArray[Any]:
    """The elements of some rows in a dtype, one row after another."""
    places = zip(starts.tolist(), lengths.tolist(), strict=True)
    with np.errstate(over="ignore"):
        return np.concatenate([source[start : start + n] for start, n in places], dtype=dtype, casting="unsafe")


@compiled_after(_scatter_rows)
def scatter_rows(
    mapped: tuple[NDArray[Any], Columns | None],
    values: NDArray[Any],
    starts: tuple[Rows, Rows],
    lengths: Rows,
    at: Rows,
    out: NDArray[Any],
) -> None:
    """Makes dense rows: each is set to zero just before its values are added, while it is in the core's cache."""
    genes, columns_of = mapped
    for row in range(len(lengths)):
        n, column_of = lengths[row], columns_in(columns_of, row)
        columns = genes[starts[0][row] : starts[0][row] + n]
        taken = values[starts[1][row] : starts[1][row] + n]
        given = out[at[row]]
        given[:] = 0
        for i in range(n):
            given[column_in(column_of, columns[i])] += given.dtype.type(taken[i])


@compiled
def count_nonzero(source: NDArray[Any], starts: Rows, lengths: Rows, out: Rows) -> None:
    for row in range(len(starts)):
        taken = source[starts[row] : starts[row] + lengths[row]]
        found = 0
        for i in range(len(taken)):
            found += taken[i] != 0
        out[row] = found


@compiled
def compress_rows(
    source: NDArray[Any],
    starts: Rows,
    lengths: Rows,
    at: Rows,
    out_indices: NDArray[Any],
    out_values: NDArray[Any],
) -> None:
    for row in range(len(starts)):
        taken = source[starts[row] : starts[row] + lengths[row]]
        to = at[row]
        for i in range(len(taken)):
            if taken[i] != 0:
                out_indices[to] = i
                out_values[to] = taken[i]
                to += 1


# ---- coded rows


@compiled
def decode_rows(rows: Views, heads: Rows, lengths: Rows, at: Rows, out: tuple[NDArray[Any], NDArray[Any]]) -> None:
    genes, values = out
    for row in range(len(heads)):
        n, to = lengths[row], at[row]
        end = take_genes(rows, heads[row], genes[to : to + n])
        take_values(rows, heads[row], end, values[to : to + n])


@compiled
def scatter_coded(rows: Views, heads: Rows, lengths: Rows, at: Rows, out: NDArray[Any]) -> None:
    most = lengths.max() if len(lengths) else 0
    columns, values = np.empty(most, np.uint32), np.empty(most, out.dtype)
    for row in range(len(heads)):
        n = lengths[row]
        end = take_genes(rows, heads[row], columns[:n])
        take_values(rows, heads[row], end, values[:n])
        given = out[at[row]]
        given[:] = 0
        for i in range(n):
            given[columns[i]] += values[i]
