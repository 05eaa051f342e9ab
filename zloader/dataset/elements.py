"""Reads elements of a store: columns of the common kinds with zarr alone, everything else with anndata.

Importing anndata takes as long as importing torch, because it imports dask, xarray and awkward where they are
installed. Training on numbers, categories and strings does not need it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import zarr

_ARRAYS = (("array", "0.2.0"), ("string-array", "0.2.0"))
_MASKED = {
    ("nullable-integer", "0.1.0"): pd.arrays.IntegerArray,
    ("nullable-boolean", "0.1.0"): pd.arrays.BooleanArray,
}
# anndata reads nullable strings differently before pandas 3, where it does not write strings in this way by default.
_STRINGS = ("nullable-string-array", "0.1.0") if int(pd.__version__.partition(".")[0]) >= 3 else None


def read_element(node: Any) -> Any:
    """An element as `anndata.io.read_elem` reads it. Raises any error of zarr or anndata for a damaged element."""
    kind = node.attrs.get("encoding-type"), node.attrs.get("encoding-version")
    if isinstance(node, zarr.Array) and kind in _ARRAYS:
        return node[()]
    if isinstance(node, zarr.Group) and kind == ("categorical", "0.2.0"):
        codes, categories = read_element(node["codes"]), read_element(node["categories"])
        return pd.Categorical.from_codes(codes, categories, ordered=bool(node.attrs["ordered"]))
    if isinstance(node, zarr.Group) and kind in _MASKED:
        return _MASKED[kind](read_element(node["values"]), mask=read_element(node["mask"]))
    if isinstance(node, zarr.Group) and kind == _STRINGS:
        dtype = pd.StringDtype(na_value=np.nan if node.attrs.get("na-value") == "NaN" else pd.NA)
        strings = pd.array(read_element(node["values"]), dtype=dtype)
        strings[read_element(node["mask"])] = pd.NA
        return strings
    return load_anndata().io.read_elem(node)


def load_anndata() -> Any:
    """The module anndata, imported on the first call."""
    import anndata

    return anndata
