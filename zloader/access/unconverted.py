"""Detects sources that must be converted before they can be opened, such as .h5ad files, and gives the command."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Collection
from pathlib import Path

from zloader.access.location import Location
from zloader.common.errors import FormatError

_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_MATRIX_FILES = {"matrix.mtx", "matrix.mtx.gz"}  # of a 10x directory
_STORE_OBJECTS = {"zarr.json", ".zgroup", "zloader.partial"}


def refuse_unconverted(location: Location, keys: Collection[str]) -> None:
    """Raises FormatError for a single file, a 10x directory, or a directory that contains only .h5ad files.

    `keys` are the keys of the location's listing. The message includes the command that converts the source, if any.
    """
    url, present = location.url.rstrip("/"), set(keys)
    if present == {""}:
        if not _is_hdf5(location):
            raise FormatError(
                f"{url} is a single file, but a Zarr store is a directory: if it is an archive, unpack it"
            )
        kind = "an .h5ad file" if url.endswith(".h5ad") else "an HDF5 file"
        raise FormatError(f"{url} is {kind}, not a Zarr store. {_advice(location, url)}")
    if present & _MATRIX_FILES and not present & _STORE_OBJECTS:
        raise FormatError(f"{url} is a 10x directory, not a Zarr store. {_advice(location, url)}")
    if all(re.fullmatch(r"[^/]+\.h5ad", key) for key in keys):
        raise FormatError(f"{url} contains .h5ad files, not a Zarr store. {_advice(location, f'{url}/*.h5ad')}")


def _is_hdf5(location: Location) -> bool:
    """Whether a location is an HDF5 file, by its name or, on a local disk, by its first bytes."""
    if location.is_named_hdf5 or location.scheme != "file":
        return location.is_named_hdf5
    with contextlib.suppress(OSError), Path(location.path).open("rb") as file:
        return file.read(len(_HDF5_SIGNATURE)) == _HDF5_SIGNATURE
    return False


def _advice(location: Location, source: str) -> str:
    """The command that converts a source to a store beside it, or in the working directory if it is read-only."""
    store = re.sub(r"(/\*)?\.(h5ad|h5|hdf5)$", "", source) + ".zarr"
    if not location.is_writable:
        store = store.rpartition("/")[2]
    command = shlex.join(["zloader", "convert", source, store])
    return f"Convert it once: {command} (in Python: zl.convert({source!r}, {store!r}))"
