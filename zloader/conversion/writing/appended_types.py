"""Converts appended values to the dtypes, column kinds and categories of a store, or refuses them.

Stored arrays keep their dtype, because they must still read correctly under the old metadata.
"""

from __future__ import annotations

from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import zarr
from numpy.typing import NDArray

from zloader.common.errors import SourceError, StoreError
from zloader.common.messages import listed
from zloader.conversion.joining.union import NOTHING, kind_of, stored_kind

_CHECKED = 1 << 17  # values checked at once; fits in a core's cache
_NULLABLE = ("nullable-integer", "nullable-boolean", "nullable-string-array")
_MISSING = {"f": np.nan, "c": np.nan, "m": "NaT", "M": "NaT"}  # by dtype kind


def first_unrepresentable(values: NDArray[Any], dtype: np.dtype[Any]) -> int | None:
    """The position of the first value that `dtype` cannot hold exactly, or None if all values fit."""
    if np.can_cast(values.dtype, dtype, "safe"):
        return None
    if values.itemsize > 8:  # complex numbers, long doubles
        return 0 if len(values) else None
    for start in range(0, len(values), _CHECKED):
        some = np.ascontiguousarray(values[start : start + _CHECKED])
        with np.errstate(invalid="ignore", over="ignore"):
            cast = some.astype(dtype)
            round_trip = cast.astype(some.dtype)
        bits = f"u{some.itemsize}"
        same = round_trip.view(bits) == some.view(bits)
        if some.dtype.kind in "iu" and dtype.kind in "iu":
            same &= (cast < 0) == (some < 0)  # -1 survives a round trip through 2**64 - 1
        if not same.all():
            return start + int(np.argmin(same))
    return None


def new_elements(node: Any, column: pd.Series) -> dict[str, NDArray[Any]]:
    """The elements to append to each array of a stored obs column, so that `column` follows it.

    `node` is the column's zarr array or group. The keys are the arrays' paths below it ("" for the node itself). New
    categories follow the stored ones. Raises SourceError without the column's name, and StoreError.
    """
    encoding = node.attrs.get("encoding-type")
    if encoding == "categorical":
        return _categorical(node, column)
    kind = stored_kind(node)
    if kind is None:
        raise SourceError(f"it is stored as {encoding}, which cannot be appended to")
    missing = column.isna().to_numpy(bool)
    found = NOTHING if missing.all() else kind_of(column)
    if found not in (kind, NOTHING):
        raise SourceError(f"it holds {found}, but the store's column holds {kind}")
    if encoding in _NULLABLE:
        return {"values": _values(node["values"], column, missing), "mask": missing}
    if missing.any() and node.dtype.kind not in _MISSING:
        raise SourceError(
            f"{int(missing.sum())} values are missing, but the store's {node.dtype} has no missing values"
        )
    return {"": _values(node, column, missing)}


def _values(array: zarr.Array[Any], column: pd.Series, missing: NDArray[np.bool_]) -> NDArray[Any]:
    """The values in the dtype of a stored array; missing values become NaN, NaT, 0 or empty text."""
    dtype = np.dtype(array.dtype)
    present = column[~missing]
    if isinstance(present.dtype, pd.CategoricalDtype):
        present = present.astype(present.cat.categories.dtype)
    if dtype.kind not in "biufcmM":  # text
        out = np.full(len(column), "", object)
        out[~missing] = present.to_numpy(object)
        return out
    found = present.to_numpy(getattr(present.dtype, "numpy_dtype", None) or present.infer_objects().dtype)
    bad = first_unrepresentable(found, dtype)
    if bad is not None:
        raise SourceError(f"it holds {found[bad]} ({found.dtype}), which the store's {dtype} cannot hold")
    out = np.full(len(column), _MISSING.get(dtype.kind, 0), dtype)
    out[~missing] = found.astype(dtype)
    return out


def _categorical(group: Any, column: pd.Series) -> dict[str, NDArray[Any]]:
    ordered = bool(group.attrs["ordered"])
    if not isinstance(column.dtype, pd.CategoricalDtype):
        column = column.astype("category")
    new = column.cat.categories
    old = _categories(group)
    added = new[~new.isin(old)]
    new_codes = old.append(added).get_indexer(new)
    disordered = ordered != column.cat.ordered or len(added) or (np.diff(new_codes) < 0).any()
    if (ordered or column.cat.ordered) and disordered:
        raise SourceError(
            f"its categories are {_order(new, column.cat.ordered)}, but in the store {_order(old, ordered)}: ordered "
            "categories must all be in the store, in the same order"
        )
    parts = new_elements(group["categories"], pd.Series(added))
    dtype = np.dtype(group["codes"].dtype)
    if len(old) + len(added) > np.iinfo(dtype).max:
        raise SourceError(
            f"its {len(added)} new categories make {len(old) + len(added)}, but the store has room for "
            f"{np.iinfo(dtype).max} ({dtype} codes)"
        )
    codes = np.append(new_codes, -1)[np.asarray(column.cat.codes)].astype(dtype)  # code -1 (missing) selects the last
    return {"codes": codes} | {f"categories/{part}".rstrip("/"): parts[part] for part in parts}


def _categories(group: Any) -> pd.Index:
    try:
        return pd.Index(ad.io.read_elem(group["categories"]))
    except (ValueError, OSError, RuntimeError) as error:
        raise StoreError(f"cannot read {group.path}/categories of the store: {error}") from error


def _order(categories: pd.Index, ordered: bool) -> str:
    return f"{listed(categories)} ({'ordered' if ordered else 'not ordered'})"
