"""Reads elements of a store: the common columns with zarr alone, everything else with anndata.

Importing anndata takes as long as importing torch, because it imports dask, xarray and awkward where they are
installed. Training on numbers, categories and strings does not need it.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import zarr


def read_element(node: Any) -> Any:
    """An element as `anndata.io.read_elem` reads it. Raises any error of zarr or anndata for a damaged element."""
    kind = node.attrs.get("encoding-type"), node.attrs.get("encoding-version")
    if isinstance(node, zarr.Array) and kind in (("array", "0.2.0"), ("string-array", "0.2.0")):
        return node[()]
    if isinstance(node, zarr.Group) and kind == ("categorical", "0.2.0"):
        codes, categories = read_element(node["codes"]), read_element(node["categories"])
        return pd.Categorical.from_codes(codes, categories, ordered=bool(node.attrs["ordered"]))
    return load_anndata().io.read_elem(node)


def load_anndata() -> Any:
    """The module anndata, imported on the first call."""
    import anndata

    return anndata
