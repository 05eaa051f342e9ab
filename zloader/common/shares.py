"""Positions by the value, or by the store, that each belongs to. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from zloader.common.records import Rows


def by_value(values: NDArray[np.integer]) -> list[tuple[int, Rows]]:
    """The distinct values of an array, each with the ascending positions at which it occurs."""
    order = np.argsort(values, kind="stable")
    values = values[order]
    cuts = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)] if len(values) else []
    return [(int(values[a]), order[a:b]) for a, b in pairwise(cuts)]


def shares(ends: Rows, rows: Rows) -> Sequence[tuple[int, Rows | slice]]:
    """The stores that contain `rows`, each with the positions of its rows; store k ends before row `ends[k]`."""
    if len(ends) == 1:
        return [(0, slice(None))]
    # In the smallest dtype, because NumPy sorts one or two bytes by radix, in linear time.
    return by_value(np.searchsorted(ends, rows, side="right").astype(np.min_scalar_type(len(ends))))
