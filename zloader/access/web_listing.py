"""Stores on a web server, which cannot be listed: the consolidated metadata implies which objects to look for."""

from __future__ import annotations

from typing import Any

from zloader.access.listed_store import ListedStore
from zloader.access.stored_objects import StoredObject
from zloader.access.web import WebFiles, find
from zloader.access.zarr_groups import UNDECODABLE, implied_keys, members_of, open_zarr_group
from zloader.common.errors import FormatError, StoreNotFoundError, ZloaderError

_ROOTS = ("zarr.json", ".zgroup", ".zattrs", ".zmetadata")


def listing(filesystem: WebFiles, root: str, store: Any) -> dict[str, StoredObject]:
    """The objects of a whole store that exist; `store` is the zarr store at `root`.

    Raises StoreNotFoundError, FormatError if the metadata is not consolidated, and the errors of `find`.
    """
    roots = find(filesystem, root, _ROOTS)
    if not roots.keys() & {"zarr.json", ".zgroup"}:
        raise StoreNotFoundError(f"found no zarr.json or .zgroup at {root}: check the address")
    try:
        sizes = {key: entry.size for key, entry in roots.items()}
        group = open_zarr_group(ListedStore(store, root, sizes, all_listed=False))
    except ZloaderError:
        raise
    except UNDECODABLE as error:
        raise FormatError(f"{root} is not a Zarr group: {error}") from error
    if group.metadata.consolidated_metadata is None:
        raise FormatError(
            f"the metadata of {root} is not consolidated, and a web server cannot be listed: run "
            "zarr.consolidate_metadata on the original store, or convert it with 'zloader convert'"
        )
    return roots | find(filesystem, root, implied_keys(members_of(group, root)))
