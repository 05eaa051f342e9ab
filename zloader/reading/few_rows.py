"""The loops of a usual epoch in NumPy, for rows so few that loading their compiled code takes longer. Pure.

They take the arguments of the loops in loops.py, give the same results bit for bit, and hold the GIL part of the time.
Per value they take about as long, if their temporary arrays stay in the core's cache. For arrays of a million values,
NumPy would get fresh memory, page by page.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zloader.common.records import Rows

# The columns that genes have in x: gene g of row i has column `tables[starts[i] + g]`. Rows may have different tables,
# because they may come from stores with different genes.
Columns: TypeAlias = tuple[NDArray[Any], Rows]

_MANY = 1 << 16  # rows; whoever copies more of them at once may do so often, and needs the compiler
_ROWS = 16  # scattered at once; 32 take as long, 4 and 512 half as long again


def copy_rows(source: NDArray[Any], starts: Rows, lengths: Rows, at: Rows, out: NDArray[Any]) -> Any:
    """Copies rows. Many rows are left to the compiled loop: NotImplemented."""
    if len(starts) > _MANY:
        return NotImplemented
    places = zip(starts.tolist(), lengths.tolist(), at.tolist(), strict=True)
    with np.errstate(over="ignore"):  # as compiled loops do, if a value is too large for a float
        for start, n, to in places:
            out[to : to + n] = source[start : start + n]
    return None


def scatter_rows(
    mapped: tuple[NDArray[Any], Columns | None],
    values: NDArray[Any],
    starts: tuple[Rows, Rows],
    lengths: Rows,
    at: Rows,
    out: NDArray[Any],
) -> None:
    """Adds rows to zeros."""
    genes, columns_of = mapped
    assert out.flags.c_contiguous  # or else this is a copy
    flat = out.reshape(-1)
    for first in range(0, len(lengths), _ROWS):
        few = slice(first, first + _ROWS)
        n = lengths[few]
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
