"""Turns a column of strings that comes in windows into codes. Pure.

Neither the strings nor their positions are kept: only one byte per row (more if there are more than 128 distinct
strings) and each distinct string once. 100 million strings of 60 bytes become 100 MB of codes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

_WINDOW = 1 << 20  # rows per pass of `sorted_codes`


class StringCoder:
    """Codes of the distinct strings among `n_rows` values, in the narrowest dtype; -1 for a missing value."""

    def __init__(self, n_rows: int) -> None:
        self._codes: NDArray[np.signedinteger] = np.empty(n_rows, np.int8)
        self._code_of: dict[str, int] = {}
        self._filled = 0

    def add(self, values: NDArray[Any], missing: NDArray[np.bool_] | None = None) -> None:
        """Codes the next values. Those that are None, NaN or `missing` get the code -1."""
        strings = pd.array(values, dtype="string")
        if missing is not None:
            strings[np.asarray(missing, bool)] = pd.NA
        codes, distinct = pd.factorize(strings)
        numbers = [self._code_of.setdefault(string, len(self._code_of)) for string in distinct.tolist()]
        dtype = np.min_scalar_type(-max(1, len(self._code_of)))
        self._codes = self._codes.astype(np.promote_types(self._codes.dtype, dtype), copy=False)
        end = self._filled + len(codes)
        self._codes[self._filled : end] = np.array([*numbers, -1], self._codes.dtype)[codes]  # -1 selects the last
        self._filled = end

    def sorted_codes(self) -> tuple[NDArray[np.signedinteger], pd.Index]:
        """The codes of all values, numbered in the order of the sorted strings, and these strings (dtype object)."""
        labels = sorted(self._code_of)
        renumbered = np.full(len(labels) + 1, -1, self._codes.dtype)
        renumbered[[self._code_of[label] for label in labels]] = np.arange(len(labels))
        for start in range(0, self._filled, _WINDOW):
            window = self._codes[start : start + _WINDOW]
            window[:] = renumbered[window]
        return self._codes, pd.Index(labels, dtype=object)
