"""Finds the rows or genes that a slice, a mask, positions or names stand for, with NumPy's meaning. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zloader.common.deferred import pd
from zloader.common.errors import OptionError
from zloader.common.messages import suggestion
from zloader.common.records import Rows

RowChoice: TypeAlias = (
    "int | str | slice | Sequence[int] | Sequence[bool] | Sequence[str] | NDArray[Any] | pd.Index | pd.Series"
)
_SHOWN = 3  # names in a message


def positions_of(
    chosen: RowChoice, n_all: int, names: Callable[[], pd.Index], *, of: str = "row", where: str = "the dataset"
) -> Rows:
    """The positions that `chosen` stands for, from 0 to `n_all` - 1, in the order given.

    `chosen` is a position or a name, a list of them, a mask over all or a slice. Negative positions count from the end.
    `names` returns all names, and is called only if `chosen` holds names. Raises OptionError, which calls what is
    chosen `of`, and says `where` it is.
    """
    if isinstance(chosen, slice):
        found = range_of(chosen, n_all, of)
        return np.arange(found.start, found.stop, found.step, dtype=np.int64)
    single = isinstance(chosen, int | np.integer | str)
    try:
        given = pd.Index([chosen] if single else chosen)
        usable = given.nlevels == 1 and not given.hasnans and not isinstance(chosen, Set | Mapping)
    except (TypeError, ValueError):
        usable = False
    if usable and not len(given):
        return np.empty(0, np.int64)
    if usable and pd.api.types.is_bool_dtype(given.dtype) and not single:
        if len(given) != n_all:
            raise OptionError(f"give a mask over all {n_all} {of}s of {where}, not one of shape ({len(given)},)")
        return np.flatnonzero(given.to_numpy(bool))
    if usable and pd.api.types.is_integer_dtype(given.dtype):
        wrong = given[(given < -n_all) | (given >= n_all)]
        if len(wrong):
            raise OptionError(f"{of} {wrong[0]} does not exist: {where} has {of}s 0 to {n_all - 1}")
        positions: Rows = np.array(given, np.int64)
        positions[positions < 0] += n_all
        return positions
    if usable and all(isinstance(name, str) for name in given):
        return _of_names(given, names(), of, where)
    raise OptionError(
        f"{of}s must be a slice, a mask, a list of positions or of names, in one dimension, not {chosen!r:.100}"
    )


def range_of(chosen: slice, n_all: int, of: str = "row") -> range:
    """The positions that a slice stands for. Raises OptionError."""
    try:
        return range(*chosen.indices(n_all))
    except (TypeError, ValueError) as error:
        raise OptionError(f"a slice of {of}s must hold whole numbers, not {chosen!r:.100}: {error}") from error


def _of_names(given: pd.Index, names: pd.Index, of: str, where: str) -> Rows:
    wanted = names[names.isin(given)]
    if wanted.has_duplicates:
        raise OptionError(
            f"the {of} {wanted[wanted.duplicated()][0]!r} occurs more than once in {where}: choose it by position"
        )
    positions = names.get_indexer_for(given)
    if (positions < 0).any():
        unknown = given[positions < 0]
        raise OptionError(
            f"{len(unknown)} of {len(given)} {of}s are not in {where}: {first_of(unknown)}. Its {of}s have names such "
            f"as {first_of(names)}{suggestion(str(unknown[0]), names)}"
        )
    return np.asarray(positions, np.int64)


def first_of(chosen: Sequence[Any] | pd.Index) -> str:
    """The first few names or positions, for messages."""
    return ", ".join(map(repr, list(chosen[:_SHOWN]))) + (", ..." if len(chosen) > _SHOWN else "")
