"""Opens zarr groups without zarr's warning about the codecs that `convert` uses."""

from __future__ import annotations

import warnings
from typing import Any

import zarr


def open_zarr_group(store: Any, **options: Any) -> Any:
    """`zarr.open_group`, read-only, with these further options.

    Older versions of zarr warn that codecs of numcodecs, such as differences, are not in the Zarr v3 specification.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Numcodecs codecs are not in the Zarr version 3", UserWarning)
        return zarr.open_group(store, mode="r", **options)
