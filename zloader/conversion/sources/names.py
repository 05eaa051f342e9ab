"""Names that columns, arrays and groups of an AnnData cannot have where it is stored as Zarr."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zloader.common.errors import SourceError

_TAKEN = ("", ".", "..", "zarr.json")  # by Zarr, and by file systems


def require_text(path: str, names: Iterable[Any]) -> None:
    """Raises SourceError for a name that is not text. `path` says where the names are."""
    for name in names:
        if not isinstance(name, str):
            raise SourceError(f"{path} has the name {name!r}, which is not text: rename it")


def require_names(path: str, names: Iterable[Any]) -> None:
    """Raises SourceError unless each name can be that of an array or group of Zarr, and comes once."""
    names = list(names)
    require_text(path, names)
    for name in names:
        if name in _TAKEN or "/" in name or "\0" in name:
            raise SourceError(f"{path} has the name {name!r}, under which Zarr cannot store anything: rename it")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SourceError(f"{path} has the name {twice!r} more than once: rename one")
