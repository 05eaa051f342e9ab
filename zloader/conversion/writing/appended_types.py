"""Whether values can go behind those that a store has, and as what: dtypes, kinds of columns, categories.

What is stored keeps its dtype, for under the metadata of before it must read as before.
"""

from __future__ import annotations

from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import zarr
from numpy.typing import NDArray

from zloader.common.errors import SourceError, StoreError
from zloader.conversion.joining.problems import listed
from zloader.conversion.joining.union import NOTHING, kind_of, stored_kind

_CHECKED = 1 << 17  # values at once: what stays in a core's cache
_NULLABLE = ("nullable-integer", "nullable-boolean", "nullable-string-array")
_NO_VALUE = {"f": np.nan, "c": np.nan, "m": "NaT", "M": "NaT"}  # of dtypes that have one


def unfit(values: NDArray[Any], dtype: np.dtype[Any]) -> int | None:
    """The place of the first value that another dtype does not hold bit for bit; None if all fit."""
    if np.can_cast(values.dtype, dtype, "safe"):
        return None
    if values.itemsize > 8:  # complex numbers, long doubles
        return 0 if len(values) else None
    for start in range(0, len(values), _CHECKED):
        some = np.ascontiguousarray(values[start : start + _CHECKED])
        with np.errstate(invalid="ignore", over="ignore"):
            cast = some.astype(dtype)
            again = cast.astype(some.dtype)
        bits = f"u{some.itemsize}"
        same = again.view(bits) == some.view(bits)
        if some.dtype.kind in "iu" and dtype.kind in "iu":
            same &= (cast < 0) == (some < 0)  # -1 is 2**64 - 1 and back
        if not same.all():
            return start + int(np.argmin(same))
    return None


def addition(node: Any, column: pd.Series) -> dict[str, NDArray[Any]]:
    """What goes to the end of each array of a stored obs column, so that `column` follows it.

    `node` is its zarr array or group; keys are the arrays' paths below it ("" is the node itself). New categories
    follow the old ones. Raises SourceError, which does not name the column, and StoreError.
    """
    encoding = node.attrs.get("encoding-type")
    if encoding == "categorical":
        return _categorical(node, column)
    kind = stored_kind(node)
    if kind is None:
        raise SourceError(f"it is stored as {encoding}, which cannot be added to")
    missing = column.isna().to_numpy(bool)
    found = NOTHING if missing.all() else kind_of(column)
    if found not in (kind, NOTHING):
        raise SourceError(f"it holds {found}, and the store's {kind}")
    if encoding in _NULLABLE:
        return {"values": _values(node["values"], column, missing), "mask": missing}
    if missing.any() and node.dtype.kind not in _NO_VALUE:
        raise SourceError(
            f"{int(missing.sum())} values are missing, and the store has {node.dtype} without missing ones"
        )
    return {"": _values(node, column, missing)}


def _values(array: zarr.Array[Any], column: pd.Series, missing: NDArray[np.bool_]) -> NDArray[Any]:
    """The values in the dtype of an array, those that are missing as what stands for none."""
    dtype = np.dtype(array.dtype)
    present = column[~missing]
    if isinstance(present.dtype, pd.CategoricalDtype):
        present = present.astype(present.cat.categories.dtype)
    if dtype.kind not in "biufcmM":  # text
        out = np.full(len(column), "", object)
        out[~missing] = present.to_numpy(object)
        return out
    found = present.to_numpy(getattr(present.dtype, "numpy_dtype", None) or present.infer_objects().dtype)
    bad = unfit(found, dtype)
    if bad is not None:
        raise SourceError(f"it holds {found[bad]} ({found.dtype}), which is none of the {dtype} of the store")
    out = np.full(len(column), _NO_VALUE.get(dtype.kind, 0), dtype)
    out[~missing] = found.astype(dtype)
    return out


def _categorical(group: Any, column: pd.Series) -> dict[str, NDArray[Any]]:
    ordered = bool(group.attrs["ordered"])
    if not isinstance(column.dtype, pd.CategoricalDtype):
        column = column.astype("category")
    new = column.cat.categories
    old = _categories(group)
    added = new[~new.isin(old)]
    places = old.append(added).get_indexer(new)
    if (ordered or column.cat.ordered) and (ordered != column.cat.ordered or len(added) or (np.diff(places) < 0).any()):
        raise SourceError(
            f"its categories are {_order(new, column.cat.ordered)}, and in the store {_order(old, ordered)}: ordered "
            "ones must be among those of the store, in their order"
        )
    parts = addition(group["categories"], pd.Series(added))
    dtype = np.dtype(group["codes"].dtype)
    if len(old) + len(added) > np.iinfo(dtype).max:
        raise SourceError(
            f"with {len(added)} new categories there are {len(old) + len(added)}, and the store has room for "
            f"{np.iinfo(dtype).max} ({dtype})"
        )
    codes = np.append(places, -1)[np.asarray(column.cat.codes)].astype(dtype)  # code -1 takes the last
    return {"codes": codes} | {f"categories/{part}".rstrip("/"): parts[part] for part in parts}


def _categories(group: Any) -> pd.Index:
    try:
        return pd.Index(ad.io.read_elem(group["categories"]))
    except (ValueError, OSError, RuntimeError) as error:
        raise StoreError(f"cannot read {group.path}/categories of the store: {error}") from error


def _order(categories: pd.Index, ordered: bool) -> str:
    return f"{listed(categories)} ({'ordered' if ordered else 'not ordered'})"
