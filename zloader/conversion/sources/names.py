"""Check the names of columns, arrays and groups: some cannot be stored in Zarr."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zloader.common.errors import SourceError

_RESERVED = ("", ".", "..", "zarr.json")  # by Zarr or by file systems
_UNSTORABLE = frozenset("/\\\0")  # zarr-python turns a backslash into a slash


def require_text(path: str, names: Iterable[Any]) -> None:
    """Raises SourceError for a name that is not text. `path` locates the names in the message."""
    for name in names:
        if not isinstance(name, str):
            raise SourceError(f"{path} has the name {name!r}, which is not text: rename it")


def require_names(path: str, names: Iterable[Any]) -> None:
    """Raises SourceError for a name that Zarr cannot store, or that is repeated."""
    names = list(names)
    require_text(path, names)
    for name in names:
        if name in _RESERVED or not _UNSTORABLE.isdisjoint(name):
            raise SourceError(f"{path} has the name {name!r}, which Zarr cannot store: rename it")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SourceError(f"{path} has the name {twice!r} more than once: rename one")
