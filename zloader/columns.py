"""obs columns as numbers: codes and categories, or plain values. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from zloader.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class ObsColumn:
    """One obs column: a value for every row, and the labels that the values are codes of (None for plain numbers)."""

    values: NDArray[Any]
    categories: pd.Index | None

    @property
    def minibatch_dtype(self) -> np.dtype[Any]:
        """int64 for codes (what torch indexes and computes losses with), else the stored dtype."""
        return np.dtype(np.int64) if self.categories is not None else self.values.dtype


def as_numbers(name: str, column: Any) -> ObsColumn:
    """A column as anndata reads it, as numbers; strings become codes of their sorted labels.

    Raises OptionError for what no tensor can hold, such as dates.
    """
    if isinstance(column, pd.Categorical):
        return ObsColumn(values=np.asarray(column.codes), categories=pd.Index(column.categories))
    values = np.asarray(column)
    if isinstance(column, pd.api.extensions.ExtensionArray) and pd.api.types.is_numeric_dtype(column.dtype):
        return ObsColumn(values=_nullable(column), categories=None)
    if values.dtype.kind in "biuf":
        return ObsColumn(values=values, categories=None)
    if values.dtype.kind in "OUST":
        codes, categories = pd.factorize(pd.Series(values, dtype="string"), sort=True)
        return ObsColumn(values=codes, categories=pd.Index(categories, dtype=object))
    raise OptionError(f"obs column {name!r} holds {values.dtype}: only numbers, categories and strings become tensors")


def _nullable(column: Any) -> NDArray[Any]:
    """A pandas nullable column as plain numbers; floats with NaN where there is a missing value."""
    if column.isna().any():
        return np.asarray(column.to_numpy(dtype="float64", na_value=np.nan))
    return np.asarray(column.to_numpy(dtype=column.dtype.numpy_dtype))
