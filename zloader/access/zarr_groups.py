"""Opens zarr groups without zarr's warning about the codecs that `convert` uses."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import zarr


@contextlib.contextmanager
def no_codec_warnings() -> Iterator[None]:
    """While the context lasts, zarr gives no warning about codecs of numcodecs.

    Older versions of zarr warn that they, such as differences, are not in the Zarr v3 specification. Filters belong to
    the process, not to a thread: before several threads open groups, enter this context outside them.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Numcodecs codecs are not in the Zarr version 3", UserWarning)
        yield


def open_zarr_group(store: Any, **options: Any) -> Any:
    """`zarr.open_group`, read-only, with these further options."""
    with no_codec_warnings():
        return zarr.open_group(store, mode="r", **options)
