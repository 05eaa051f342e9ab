"""Zarr groups, and the objects that their metadata imply: their keys, whether they exist, which one is damaged.

Nodes are zarr groups and arrays. Keys are relative to the store.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import lzma
import math
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import zarr
import zarr.errors

from zloader.common.errors import ZloaderError
from zloader.common.messages import listed

log = logging.getLogger("zloader")

_MAX_OBJECTS = 10**9  # per array
# The exceptions that zarr and its codecs raise for invalid metadata and for bytes that cannot be decoded.
UNDECODABLE = (
    AttributeError,
    ArithmeticError,
    ValueError,
    RuntimeError,
    TypeError,
    KeyError,
    IndexError,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    zarr.errors.BaseZarrError,
)


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


def without_stale(group: zarr.Group, store: Any, url: str) -> zarr.Group:
    """The group, or without its consolidated metadata, with a warning, if they do not have the nodes that are listed.

    They would hide nodes that were added since, and show fill values for a column that was replaced. `store` is the
    ListedStore of the group.
    """
    consolidated = group.metadata.consolidated_metadata
    if consolidated is None:
        return group
    nodes = {key.rpartition("/")[0] for key in store.sizes if key.endswith(("/zarr.json", "/.zarray", "/.zgroup"))}
    different = consolidated.flattened_metadata.keys() ^ nodes
    if not different:
        return group
    names = listed(sorted(different), 3)
    text = "the consolidated metadata of %s are stale and not used (%s): run zarr.consolidate_metadata(%r)"
    log.warning(text, url, names, url)
    fresh: zarr.Group = open_zarr_group(store, zarr_format=group.metadata.zarr_format, use_consolidated=False)
    store.forget_arrays()
    return fresh


def member_of(group: Any, path: str) -> Any:
    """`group[path]` of a group of zarr or a file. Consolidated metadata need not be read through zarr's thread.

    A look-up through that thread takes half a millisecond, and many when other threads are busy. Raises the errors of
    zarr.
    """
    if not isinstance(group, zarr.Group) or group.metadata.consolidated_metadata is None:
        return group[path]
    finding = group._async_group.getitem(path)
    try:
        finding.send(None)
    except StopIteration as found:  # as it always does, because it does not wait
        return zarr.Array(found.value) if isinstance(found.value, zarr.AsyncArray) else zarr.Group(found.value)
    finding.close()
    return group[path]


def arrays_below(node: Any) -> list[zarr.Array[Any]]:
    """The array itself, or all arrays below a group; an empty list if the node is neither."""
    nodes = node.members(max_depth=None) if isinstance(node, zarr.Group) else [("", node)]
    return [array for _, array in nodes if isinstance(array, zarr.Array)]


def stored_keys(array: Any) -> Iterator[str]:
    """The keys of the chunks (or shards) of an array."""
    return (_key(array, cell) for cell in _cells(array))


def implied_keys(path: str, node: Any) -> Iterator[str]:
    """The keys of the objects of a node: its metadata in Zarr v3, and the chunks of an array.

    Raises the errors of zarr if its shape is invalid.
    """
    metadata = [f"{path}/zarr.json"] if node.metadata.zarr_format == 3 else []
    return itertools.chain(metadata, stored_keys(node) if isinstance(node, zarr.Array) else ())


def undecodable_key(node: Any, start: int = 0, stop: int | None = None) -> str | None:
    """The key of the first object of a node that cannot be decoded, or None. zarr's own errors do not name the key.

    Reads the node's arrays object by object, from `start` to `stop` along the first axis.
    """
    try:
        grids = [(array, _cells(array)) for array in arrays_below(node)]
    except UNDECODABLE:  # the metadata is damaged, not an object
        return None
    for array, cell in ((array, cell) for array, cells in grids for cell in cells):
        region = _region(array, cell, start, stop)
        if all(part.start < part.stop for part in region):
            try:
                array[region]
            except ZloaderError:
                raise
            except (*UNDECODABLE, OSError):  # a broken gzip header is an OSError
                return _key(array, cell)
    return None


def _cells(array: Any) -> Iterator[tuple[int, ...]]:
    """The grid position of each object of an array. Raises OverflowError for an implausible number of objects."""
    grid = [-(-whole // size) for whole, size in zip(array.shape, _object_shape(array), strict=True)]
    if math.prod(grid) > _MAX_OBJECTS:
        raise OverflowError(f"an array of shape {array.shape} would need {math.prod(grid)} objects")
    return np.ndindex(*grid)


def _object_shape(array: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = array.shards or array.chunks
    return shape


def _key(array: Any, cell: tuple[int, ...]) -> str:
    return f"{array.path}/{array.metadata.encode_chunk_key(cell)}"


def _region(array: Any, cell: tuple[int, ...], start: int, stop: int | None) -> tuple[slice, ...]:
    """The part of an array stored in one object, limited to `start` to `stop` along the first axis."""
    begins = [at * size for at, size in zip(cell, _object_shape(array), strict=True)]
    ends = [begin + size for begin, size in zip(begins, _object_shape(array), strict=True)]
    if cell:
        begins[0], ends[0] = max(begins[0], start), ends[0] if stop is None else min(ends[0], stop)
    return tuple(map(slice, begins, ends))
