"""Finds the rows that a slice, a mask, row numbers or obs names stand for, with NumPy's meaning. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zloader.common.deferred import pd
from zloader.common.errors import OptionError
from zloader.common.messages import suggestion
from zloader.common.records import Rows
from zloader.selecting.expressions import Mask

RowChoice: TypeAlias = (
    "int | str | slice | Sequence[int] | Sequence[bool] | Sequence[str] | NDArray[Any] | pd.Index | pd.Series"
)


def positions_of(rows: RowChoice, n_rows: int, names: Callable[[], pd.Index]) -> Rows:
    """The row numbers that `rows` stands for, from 0 to `n_rows` - 1, in the order given.

    `rows` is a row number or an obs name, a list of them, a mask over all rows or a slice. Negative row numbers count
    from the end. `names` returns all obs names, and is called only if `rows` holds names. Raises OptionError.
    """
    if isinstance(rows, slice):
        found = range_of(rows, n_rows)
        return np.arange(found.start, found.stop, found.step, dtype=np.int64)
    single = isinstance(rows, int | np.integer | str)
    try:
        given = pd.Index([rows] if single else rows)
        usable = given.nlevels == 1 and not given.hasnans and not isinstance(rows, Set | Mapping)
    except (TypeError, ValueError) as error:
        raise _unusable(rows) from error
    if usable and not len(given):
        return np.empty(0, np.int64)
    if usable and pd.api.types.is_bool_dtype(given.dtype) and not single:
        return _of_mask(given.to_numpy(bool), n_rows)
    if usable and pd.api.types.is_integer_dtype(given.dtype):
        return _of_numbers(given, n_rows)
    if usable and all(isinstance(name, str) for name in given):
        return _of_names(given, names())
    raise _unusable(rows)


def _unusable(rows: Any) -> OptionError:
    return OptionError(f"rows must be a slice, a mask, row numbers or obs names, in one dimension, not {rows!r:.100}")


def range_of(chosen: slice, n_all: int, of: str = "rows") -> range:
    """The row numbers, or positions of genes, that a slice stands for. Raises OptionError."""
    try:
        return range(*chosen.indices(n_all))
    except (TypeError, ValueError) as error:
        raise OptionError(f"a slice of {of} must hold whole numbers, not {chosen!r:.100}: {error}") from error


def _of_mask(mask: Mask, n_rows: int) -> Rows:
    if len(mask) != n_rows:
        raise OptionError(f"give a mask over all {n_rows} rows, not one of shape {mask.shape}")
    return np.flatnonzero(mask)


def _of_numbers(given: pd.Index, n_rows: int) -> Rows:
    wrong = given[(given < -n_rows) | (given >= n_rows)]
    if len(wrong):
        raise OptionError(f"row {wrong[0]} does not exist: the dataset has rows 0 to {n_rows - 1}")
    rows: Rows = np.array(given, np.int64)
    rows[rows < 0] += n_rows
    return rows


def _of_names(given: pd.Index, names: pd.Index) -> Rows:
    wanted = names[names.isin(given)]
    if wanted.has_duplicates:
        repeated = wanted[wanted.duplicated()][0]
        raise OptionError(f"the obs name {repeated!r} occurs more than once: choose the rows by number")
    rows = names.get_indexer_for(given)
    if (rows < 0).any():
        first = str(given[rows < 0][0])
        like = suggestion(first, names) or f": the obs names are like {', '.join(map(repr, names[:3]))}"
        raise OptionError(f"there is no row with the obs name {first!r}{like}")
    return np.asarray(rows, np.int64)
