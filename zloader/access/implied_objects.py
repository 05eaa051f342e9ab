"""The objects that the metadata of a Zarr hierarchy imply: their keys, whether they are there, which one is damaged.

Nodes are zarr's groups and arrays; keys are relative to the store.
"""

from __future__ import annotations

import lzma
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import zarr
import zarr.errors

from zloader.common.errors import FormatError, MissingObjectError, ZloaderError
from zloader.storage.layout import require_bytes

_MOST_OBJECTS = 10**9  # of one array
# What zarr and its codecs raise for metadata that make no sense and bytes that do not decode.
UNDECODABLE = (
    AttributeError,
    OverflowError,
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


def members_of(group: zarr.Group, url: str) -> list[tuple[str, Any]]:
    """All groups and arrays below a group, with their paths. Raises FormatError where zarr cannot read one of them."""
    try:
        nodes: list[tuple[str, Any]] = list(group.members(max_depth=None))
        for _, node in nodes:
            if isinstance(node, zarr.Array):
                stored_keys(node)  # which it cannot have where its shape makes no sense
    except ZloaderError:
        raise
    except UNDECODABLE as error:
        raise FormatError(f"the metadata of {url} cannot be read ({error}): restore or convert it again") from error
    return nodes


def arrays_below(node: Any) -> list[zarr.Array[Any]]:
    """The array itself, or all arrays below a group; none where the node is not zarr's."""
    nodes = node.members(max_depth=None) if isinstance(node, zarr.Group) else [("", node)]
    return [array for _, array in nodes if isinstance(array, zarr.Array)]


def stored_keys(array: Any) -> Iterator[str]:
    """The keys of the objects that hold an array."""
    return (_key(array, cell) for cell in _cells(array))


def implied_keys(nodes: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """The keys of the objects of nodes that are given with their paths: metadata (of Zarr v3) and chunks."""
    for path, node in nodes:
        if node.metadata.zarr_format == 3:
            yield f"{path}/zarr.json"
        if isinstance(node, zarr.Array):
            yield from stored_keys(node)


def require_objects(keys: Iterable[str], sizes: Mapping[str, int], url: str, *, absent_is_fill: bool = False) -> None:
    """Raises MissingObjectError for an object that is not listed, and TruncatedObjectError for one of 0 bytes."""
    for key in keys:
        if key in sizes:
            require_bytes(url, key, sizes[key])
        elif not absent_is_fill:
            raise MissingObjectError(f"{url}: {key} is not there: the store is incomplete. Convert it again")


def undecodable_key(node: Any, start: int = 0, stop: int | None = None) -> str | None:
    """The key of the first object of a node that does not decode, which zarr's errors do not say; None for none.

    The arrays are read object by object, each from `start` to `stop` along its first axis.
    """
    try:
        grids = [(array, _cells(array)) for array in arrays_below(node)]
    except UNDECODABLE:  # it is the metadata
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
    """The place of each object in the grid of an array. Raises OverflowError for more than any store has."""
    grid = [-(-whole // size) for whole, size in zip(array.shape, _object_shape(array), strict=True)]
    if math.prod(grid) > _MOST_OBJECTS:
        raise OverflowError(f"the shape {array.shape} takes {math.prod(grid)} objects")
    return np.ndindex(*grid)


def _object_shape(array: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = array.shards or array.chunks
    return shape


def _key(array: Any, cell: tuple[int, ...]) -> str:
    return f"{array.path}/{array.metadata.encode_chunk_key(cell)}"


def _region(array: Any, cell: tuple[int, ...], start: int, stop: int | None) -> tuple[slice, ...]:
    """What an object holds of an array, from `start` to `stop` along the first axis."""
    begins = [at * size for at, size in zip(cell, _object_shape(array), strict=True)]
    ends = [begin + size for begin, size in zip(begins, _object_shape(array), strict=True)]
    if cell:
        begins[0], ends[0] = max(begins[0], start), ends[0] if stop is None else min(ends[0], stop)
    return tuple(map(slice, begins, ends))
