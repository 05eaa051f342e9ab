"""Formats that zloader does not read by itself: how a folder is recognised, and how its cells become a store."""

from __future__ import annotations

from collections.abc import Collection

_MARKS = {
    "matrix.mtx": "10x",
    "matrix.mtx.gz": "10x",
    "__tiledb_group.tdb": "SOMA",
    "expression.lance": "SLAF",
    "header.sch": "SCDL",
}


def conversion_of_folder(url: str, names: Collection[str]) -> str:
    """What a folder with these names in it is, and how it is converted; "" if it is in none of these formats."""
    found = next((format_name for mark, format_name in _MARKS.items() if mark in names), None)
    if found is None:
        return ""
    if found == "10x":
        return f"{url} is a 10x directory. {conversion_of_10x(url, 'read_10x_mtx')}"
    return (
        f"{url} is in the format {found}. It is read by a zl.RowSource of yours: copy it from docs/howto/own_format.md"
    )


def conversion_of_10x(url: str, reader: str) -> str:
    """How cells in a format of 10x are converted, which this `reader` of scanpy reads."""
    path = url.rpartition("/")[2] if "://" in url else url  # scanpy reads local paths
    call = f"zl.convert(sc.{reader}({path!r}), {path.removesuffix('.h5') + '.zarr'!r})"
    return f"{'Download it, and convert' if path != url else 'Convert'} what scanpy (sc) reads in Python: {call}"
