"""Which objects at a destination belong to the store there? Only these objects may be replaced.

The metadata of a complete AnnData store lists its groups and arrays. An interrupted conversion has incomplete metadata
or none, so its objects are recognised by their names.
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
_ELEMENTS = ("X", "raw", "obs", "var", "obsm", "varm", "obsp", "varp", "layers", "uns", "mod", "obsmap", "varmap")
_CHUNK = re.compile(r"(c[./])?\d+([./]\d+)*|c")  # c/0/1 of Zarr v3, c of its scalars, 0.1 or 0/1 of v2
_PARTIAL = re.compile(rf"(.+?)(\.[0-9a-f]{{32}})?{re.escape(PARTIAL)}")  # zarr inserts a UUID
# Files that desktops create in every folder, and the empty objects ending in a slash by which S3 consoles show folders.
_LITTER = re.compile(r"(.*/)?(\.DS_Store|\._[^/]*|Thumbs\.db|desktop\.ini|)")


def is_litter(key: str) -> bool:
    """Whether a desktop or S3 console made an object: it neither blocks a destination nor is deleted."""
    return _LITTER.fullmatch(key) is not None


def may_belong(key: str) -> bool:
    """Whether the name of an object fits a complete or partial object of an AnnData store."""
    return _belongs(_finished(key), None)


def is_partial(key: str) -> bool:
    """Whether an object is a partial object of a store, written by zloader or by zarr."""
    return _finished(key) != key and may_belong(key)


def foreign_objects(location: Location, keys: Iterable[str]) -> list[str]:
    """The objects that belong neither to the AnnData store at a location nor to a zloader conversion.

    Raises StoreExistsError if there is another kind of Zarr hierarchy, AccessDeniedError, StoreError.
    """
    keys = set(keys)
    nodes = _nodes(location) if keys.intersection(METADATA) else None
    return sorted(key for key in keys if not (is_litter(key) or _belongs(_finished(key), nodes)))


def _nodes(location: Location) -> dict[str, bool]:
    """The paths of all groups and arrays of the AnnData store at a location, each with whether it is an array."""
    with translated("read the metadata of", location.url), warnings.catch_warnings():
        warnings.simplefilter("ignore", zarr.errors.ZarrUserWarning)  # about foreign objects
        try:
            root = zarr.open_group(location.zarr_store(read_only=True), mode="r")
            encoding = root.attrs.get("encoding-type")
            nodes = {path: isinstance(node, zarr.Array) for path, node in root.members(max_depth=None)}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:  # zarr.errors are ValueErrors
            raise _not_anndata(location, f"its metadata cannot be read: {error}") from error
    if encoding not in ("anndata", "MuData"):
        raise _not_anndata(location, f"the encoding-type of its root is {encoding!r}")
    return nodes


def _not_anndata(location: Location, why: str) -> StoreExistsError:
    return StoreExistsError(
        f"{location.url} is not an AnnData store ({why}): move its files away, or choose another destination"
    )


def _finished(key: str) -> str:
    """The final key of a partial object; other keys are returned unchanged."""
    match = _PARTIAL.fullmatch(key)
    if key == MARKER or not match:
        return key
    is_node = match[2] and match[1].rpartition("/")[2] == "zarr"  # zarr replaces the suffix .json
    return f"{match[1]}.json" if is_node else match[1]


def _belongs(key: str, nodes: Mapping[str, bool] | None) -> bool:
    """Whether a complete object belongs to these groups and arrays; None stands for any that an AnnData may have."""
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
