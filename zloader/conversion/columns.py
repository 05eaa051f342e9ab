"""Concatenate obs columns of several sources: which columns can be combined, and the result, as anndata combines them.

A column has a kind (numbers, text, true or false, dates ...); a categorical has the kind of its categories. Columns of
the same kind are combined. A column without any value can be combined with every kind.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas.api import types

from zloader.common.errors import SourceError
from zloader.selecting.columns import beyond_float64, common_integers

NOTHING = "no values"
_TEXT, _TRUTH, _NUMBERS = "text", "true or false", "numbers"
_BY_LETTER = {"b": _TRUTH, "i": _NUMBERS, "u": _NUMBERS, "f": _NUMBERS, "c": _NUMBERS, "m": "durations", "M": "dates"}
# By what pandas infers for an object column that has no plain dtype: its kind, and the dtype to store it in.
_BY_OBJECTS = {
    "string": (_TEXT, "string"),
    "boolean": (_TRUTH, "boolean"),
    "integer": (_NUMBERS, "Int64"),
    "empty": (NOTHING, "string"),
}


def kind_of(column: pd.Series | pd.Index) -> str:
    """The kind of a column in memory. Objects that are mixed or cannot be stored get a descriptive name."""
    dtype = column.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        return kind_of(dtype.categories) if len(dtype.categories) else NOTHING
    if types.is_object_dtype(dtype):
        found = column.infer_objects()
        if not types.is_object_dtype(found.dtype):
            return kind_of(found)
        inferred = types.infer_dtype(found, skipna=True)
        return _BY_OBJECTS[inferred][0] if inferred in _BY_OBJECTS else f"objects ({inferred})"
    if isinstance(dtype, pd.StringDtype):
        return _TEXT
    letter = dtype.kind if isinstance(dtype, np.dtype) or hasattr(dtype, "numpy_dtype") else ""
    return _BY_LETTER.get(letter, str(dtype))


def is_storable(kind: str) -> bool:
    """Whether a column of this kind can be written and read back unchanged."""
    return kind in (NOTHING, _TEXT, *_BY_LETTER.values())


def unite(columns: Sequence[pd.Series | None], lengths: Sequence[int]) -> pd.Series:
    """Concatenates the columns of sources with `lengths` rows into one with a RangeIndex; None marks a missing column.

    The result equals that of `anndata.concat(join="outer")`: categories are merged and sorted, bools with missing
    values become nullable, integers with missing values become floats. It differs in three points: objects get a dtype
    that can be stored, a column without any value does not affect the dtype, and integers that a float would round stay
    integers. Raises SourceError for mixed kinds, and for such integers next to floats.
    """
    columns = _exact(columns, lengths)
    if len({kind_of(column) for column in columns if column is not None} - {NOTHING}) > 1:
        columns = [None if column is None or column.isna().all() else column for column in columns]
        kinds = dict.fromkeys(kind_of(column) for column in columns if column is not None)
        if len(kinds) > 1:
            raise SourceError(f"it holds {' and '.join(kinds)}")
    present = [column for column in columns if column is not None]
    if not present:
        return pd.Series(pd.NA, index=range(sum(lengths)), dtype="string")
    target = _agreed(present, with_missing=len(present) < len(columns))
    frames = [
        pd.DataFrame(index=range(length)) if column is None else _as_frame(column, target)
        for column, length in zip(columns, lengths, strict=True)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about empty columns and the resulting dtype
        united = pd.concat(frames, ignore_index=True)["column"]
    return storable(united)


def _exact(columns: Sequence[pd.Series | None], lengths: Sequence[int]) -> Sequence[pd.Series | None]:
    """The columns, cast to one dtype of integers if a float, which anndata may make of them, would round one.

    Raises SourceError if there is no such dtype.
    """
    having = [column for column in columns if column is not None and column.notna().any()]
    integers = [found for found in map(_integers, having) if found is not None]
    if all(beyond_float64(found) is None for found in integers):
        return columns
    common = common_integers(integers) if len(integers) == len(having) else None
    if common is None:
        most = max(
            (value for found in integers for value in (found.min(), found.max())), key=lambda value: abs(int(value))
        )
        raise SourceError(
            f"no dtype holds {most} and the other values exactly. Store the column with the "
            "same dtype in all sources, or list the columns to store with select=zl.Selection(obs=[...]) (--obs a,b)"
        )
    if all(isinstance(column.dtype, pd.CategoricalDtype) for column in having):
        cast = [column.cat.rename_categories(column.cat.categories.astype(common)) for column in having]
    else:
        missing = len(having) < len(columns) or any(column.isna().any() for column in having)
        plain = all(isinstance(_dtype_of(column), np.dtype) for column in having)
        target: Any = (
            common if plain and not missing else f"{'U' if common.kind == 'u' else ''}Int{8 * common.itemsize}"
        )
        cast = [pd.Series(pd.array(column.array, dtype=target)) for column in having]
    exact = iter(cast)
    made = [next(exact) if any(column is each for each in having) else None for column in columns]
    nothing = pd.Series(dtype=cast[0].dtype)
    return [nothing.reindex(range(n)) if column is None else column for column, n in zip(made, lengths, strict=True)]


def _dtype_of(column: pd.Series) -> Any:
    """The dtype of the values of a column; of a categorical, that of its categories."""
    return column.cat.categories.dtype if isinstance(column.dtype, pd.CategoricalDtype) else column.dtype


def _integers(column: pd.Series) -> NDArray[np.integer] | None:
    """The integers, or categories of integers, of a column that has values; None for any other."""
    values = pd.Series(column.cat.categories) if isinstance(column.dtype, pd.CategoricalDtype) else column.dropna()
    if types.is_object_dtype(values.dtype):
        values = values.infer_objects()
    return values.to_numpy(getattr(values.dtype, "numpy_dtype", None)) if types.is_integer_dtype(values.dtype) else None


def _as_frame(column: pd.Series, dtype: Any) -> pd.DataFrame:
    return pd.DataFrame({"column": column.array if dtype is None else column.astype(dtype).array})


def _agreed(columns: list[pd.Series], *, with_missing: bool) -> Any:
    """The dtype to which anndata casts categoricals and bools before concatenating; None for no cast."""
    alike = all(isinstance(column.dtype, pd.CategoricalDtype) for column in columns)
    if not alike and not all(types.is_bool_dtype(column.dtype) for column in columns):
        return None
    shells = [ad.AnnData(obs=_as_frame(column.iloc[:0], None).set_axis(pd.Index([], dtype=str))) for column in columns]
    if with_missing:
        shells.append(ad.AnnData(obs=pd.DataFrame(index=pd.Index([], dtype=str))))
    return ad.concat(shells, join="outer").obs["column"].dtype


def storable(column: pd.Series) -> pd.Series:
    """The column in a dtype that anndata stores without loss: only objects and nullable floats are cast.

    Text is unchanged unless values are missing. Raises SourceError for objects of mixed or unknown kinds.
    """
    if types.is_float_dtype(column.dtype) and hasattr(column.dtype, "numpy_dtype"):
        return pd.Series(column.to_numpy(column.dtype.numpy_dtype, na_value=np.nan), name=column.name)
    if isinstance(column.dtype, pd.CategoricalDtype):
        categories = column.cat.categories
        found = categories.infer_objects()
        return column if found.dtype == categories.dtype else column.cat.rename_categories(found)
    if not types.is_object_dtype(column.dtype):
        return column
    integers = _integers(column)
    rounded = integers is not None and beyond_float64(integers) is not None and column.isna().any()
    found = column if rounded else column.infer_objects()
    if not types.is_object_dtype(found.dtype):
        return found
    inferred = types.infer_dtype(found, skipna=True)
    if len(found) == 0 or (inferred == "string" and not found.isna().any()):
        return found
    if inferred not in _BY_OBJECTS:
        raise SourceError(f"it holds {kind_of(found)}, which cannot be stored: convert it to a single type")
    try:
        return found.astype(_BY_OBJECTS[inferred][1])
    except (OverflowError, TypeError, ValueError) as error:
        raise SourceError(f"it holds {kind_of(found)} that cannot be stored ({error})") from error
