"""Which row of a part each row of the whole is, such as of a modality of a MuData. Pure.

MuData keeps in `obsmap/NAME`, for each row of the whole, the number of its row in the modality, counted from 1, or 0 if
the modality lacks it. Here rows are counted from 0, and -1 stands for a row that is lacking.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.records import Rows

RowMap = NDArray[np.integer]


def checked_map(stored: NDArray[Any], *, n_whole: int, n_rows: int, refused: Callable[[str], Exception]) -> RowMap:
    """The map that an obsmap stores, with 4 bytes per row up to 2**31 rows.

    Raises what `refused` makes of the reason unless each of `n_rows` rows of the part is one of the `n_whole` rows.
    """
    found = stored.reshape(-1) if stored.ndim == 2 else stored  # as versions before 0.2 wrote it
    if found.shape != (n_whole,) or found.dtype.kind not in "iuf":  # numbers of R are floats
        raise refused(f"it has {stored.dtype} {stored.shape}, and not one whole number for each row")
    wrong = np.flatnonzero((found < 0) | (found > n_rows) | (found % 1 != 0))
    if len(wrong):
        raise refused(f"row {wrong[0]} is row {found[wrong[0]]} of {n_rows} rows, counted from 1")
    rows: RowMap = (found.astype(np.int64) - 1).astype(np.int32 if n_rows < 1 << 31 else np.int64)
    counts = np.bincount(rows[rows >= 0], minlength=n_rows)
    wrong = np.flatnonzero(counts != 1)
    if len(wrong):
        raise refused(f"row {wrong[0]} of the modality is {counts[wrong[0]]} rows of the whole")
    return rows


def is_whole(row_of: RowMap, n_rows: int) -> bool:
    """Whether a part has the same rows as the whole, in the same order."""
    return n_rows == len(row_of) and bool((row_of == np.arange(n_rows)).all())


def looked_up(row_of: RowMap, rows: Rows) -> tuple[Rows, NDArray[np.bool_]]:
    """The rows of the part for some rows of the whole, without those that it lacks, and which of them it has."""
    found = row_of[rows].astype(np.int64, copy=False)
    has = found >= 0
    return found[has], has


def in_whole(row_of: RowMap, n_rows: int) -> Rows:
    """The row of the whole of each row of the part: the inverse of a map."""
    rows = np.empty(n_rows, np.int64)
    has = np.flatnonzero(row_of >= 0)
    rows[row_of[has]] = has
    return rows
