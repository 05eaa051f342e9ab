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

# The smallest and the largest value that fit, in the stored dtype, and whether the value must be a whole number, which
# rules out fractions, NaN and infinities.
Limits: TypeAlias = tuple[Any, Any, bool]
# The columns that genes have in x: gene g of row i has column `tables[starts[i] + g]`. Rows may have different tables,
# because they may come from stores with different genes.
Columns: TypeAlias = tuple[NDArray[Any], Rows]

_MANY = 1 << 16  # rows; whoever copies more of them at once may do so often, and needs the compiler
_ROWS = 16  # scattered at once; 32 take as long, 4 and 512 half as long again


def fits(values: Any, limits: Limits | None) -> Any:
    """Whether values are within limits, each by itself."""
    if limits is None:
        return np.ones_like(values, bool)
    least, most, whole = limits
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        within = (values >= least) & (values <= most)
        return within & (np.floor(values) == values) if whole else within | (values - values != 0)


def copy_rows(
    source: NDArray[Any], starts: Rows, lengths: Rows, at: Rows, out: NDArray[Any], limits: Limits | None
) -> Any:
    """Copies rows until one has a value beyond the limits. Returns that row, or -1 if all values fit.

    Many rows are left to the compiled loop: NotImplemented.
    """
    if len(starts) > _MANY:
        return NotImplemented
    places = zip(starts.tolist(), lengths.tolist(), at.tolist(), strict=True)
    for row, (start, n, to) in enumerate(places):
        taken = source[start : start + n]
        if limits is not None and not fits(taken, limits).all():
            return row
        out[to : to + n] = taken
    return -1


def scatter_rows(
    mapped: tuple[NDArray[Any], Columns | None],
    values: NDArray[Any],
    starts: tuple[Rows, Rows],
    lengths: Rows,
    at: Rows,
    out: NDArray[Any],
    limits: Limits | None,
) -> int:
    """Adds rows to zeros until one has a value beyond the limits. Returns that row, or -1 if all values fit."""
    genes, columns_of = mapped
    assert out.flags.c_contiguous  # or else this is a copy
    flat = out.reshape(-1)
    for first in range(0, len(lengths), _ROWS):
        few = slice(first, first + _ROWS)
        n = lengths[few]
        if limits is not None:
            fit = fits(_packed(values, starts[1][few], n, values.dtype), limits)
            if not fit.all():
                return first + int(np.repeat(np.arange(len(n)), n)[np.argmin(fit)])
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
    return -1


def _packed(source: NDArray[Any], starts: Rows, lengths: Rows, dtype: Any) -> NDArray[Any]:
    """The elements of some rows in a dtype, one row after another."""
    places = zip(starts.tolist(), lengths.tolist(), strict=True)
    return np.concatenate([source[start : start + n] for start, n in places], dtype=dtype, casting="unsafe")
