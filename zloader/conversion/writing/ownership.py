"""Which objects at a destination belong to the store there: they may be replaced, and nothing else.

A whole store is an AnnData, and its own metadata say which groups and arrays it has. What an interrupted conversion
left has no metadata yet, or not all of them; its objects are known by their names.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping

import zarr
import zarr.errors

from zloader.access.listed_store import METADATA
from zloader.access.location import Location
from zloader.common.errors import StoreExistsError
from zloader.conversion.writing.object_writer import PARTIAL, translated

MARKER = "zloader.partial"
_ELEMENTS = ("X", "raw", "obs", "var", "obsm", "varm", "obsp", "varp", "layers", "uns")
_CHUNK = re.compile(r"(c[./])?\d+([./]\d+)*|c")  # c/0/1 of Zarr v3, c of its scalars, 0.1 or 0/1 of v2
_UNDER_WAY = re.compile(rf"(.+?)(\.[0-9a-f]{{32}})?{re.escape(PARTIAL)}")  # zarr puts a UUID before it
# Desktops leave such files everywhere. Consoles of S3 make empty objects that end in a slash, to show folders.
_LITTER = re.compile(r"(.*/)?(\.DS_Store|\._[^/]*|Thumbs\.db|desktop\.ini|)")


def is_litter(key: str) -> bool:
    """Whether an object is nobody's: it is no reason to refuse a destination, and is not deleted."""
    return _LITTER.fullmatch(key) is not None


def may_belong(key: str) -> bool:
    """Whether an object is named like one of an AnnData store, or of one that is being written."""
    return _belongs(_finished(key), None)


def is_under_way(key: str) -> bool:
    """Whether an object was still being written for a store, by us or by zarr."""
    return _finished(key) != key and may_belong(key)


def strangers(location: Location, keys: Iterable[str]) -> list[str]:
    """Those of the objects at a location that belong neither to an AnnData store there nor to a conversion of ours.

    Raises StoreExistsError where there is another Zarr hierarchy, AccessDeniedError, StoreError.
    """
    keys = set(keys)
    nodes = _nodes(location) if keys.intersection(METADATA) else None
    return sorted(key for key in keys if not (is_litter(key) or _belongs(_finished(key), nodes)))


def _nodes(location: Location) -> dict[str, bool]:
    """The paths of all groups and arrays of the AnnData store at a location, and which of them are arrays."""
    with translated("read the metadata of", location.url), warnings.catch_warnings():
        warnings.simplefilter("ignore", zarr.errors.ZarrUserWarning)  # of the objects that are no part of it
        try:
            root = zarr.open_group(location.zarr_store(read_only=True), mode="r")
            encoding = root.attrs.get("encoding-type")
            nodes = {path: isinstance(node, zarr.Array) for path, node in root.members(max_depth=None)}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:  # zarr.errors are ValueErrors
            raise _no_anndata(location, f"its metadata cannot be read: {error}") from error
    if encoding != "anndata":
        raise _no_anndata(location, f"its root says encoding-type {encoding!r}")
    return nodes


def _no_anndata(location: Location, why: str) -> StoreExistsError:
    return StoreExistsError(
        f"{location.url} holds something that is no AnnData store ({why}): it is never overwritten. Move it away"
    )


def _finished(key: str) -> str:
    """The key that an object gets once it is whole."""
    match = _UNDER_WAY.fullmatch(key)
    if key == MARKER or not match:
        return key
    is_node = match[2] and match[1].rpartition("/")[2] == "zarr"  # zarr exchanges what follows the last dot
    return f"{match[1]}.json" if is_node else match[1]


def _belongs(key: str, nodes: Mapping[str, bool] | None) -> bool:
    """Whether a whole object is one of these groups and arrays; None: of any that an AnnData may have."""
    *parts, last = key.split("/")
    if not parts:
        return last in (MARKER, *METADATA)
    if parts[0] not in _ELEMENTS:
        return False
    if last in METADATA:
        return nodes is None or "/".join(parts) in nodes
    for depth in range(1, len(parts) + 1):
        is_array = nodes is None or nodes.get("/".join(parts[:depth]), False)
        if is_array and _CHUNK.fullmatch("/".join([*parts[depth:], last])):
            return True
    return False
