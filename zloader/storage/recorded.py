"""Layouts of arrays as JSON, as a manifest of many stores records them.

A record has two parts. Stores that are written alike have the first in common: dtype, codecs, and how objects are
named. The second is the array's own: its elements, those of a chunk, and where the chunks are.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import numpy as np

from zloader.common.errors import FormatError
from zloader.storage.joined import JoinedGrid, JoinedPlacement
from zloader.storage.layout import ArrayLayout
from zloader.storage.placement import Index, Placement, TablePlacement, ZarrPlacement

Common: TypeAlias = Mapping[str, Any]
Own: TypeAlias = Sequence[Any]  # elements, elements of a chunk, and chunks of an object or the text of a table

_PLAIN = ("path", "codecs", "absent_is_fill", "cut", "below")
_MOST_ELEMENTS = 1 << 50  # of one array: more would overflow when thousands of arrays are joined
_MOST_CHUNK = 1 << 32
_MOST_CHUNKS = 1 << 34


def record_of(layout: ArrayLayout) -> tuple[Common, Own]:
    """The record of an array."""
    common = {name: getattr(layout, name) for name in _PLAIN}
    common |= {
        "codecs": [dict(codec) for codec in layout.codecs],
        "dtype": layout.dtype.str,
        "stored_dtype": None if layout.stored_dtype is None else layout.stored_dtype.str,
        "fill_value": layout.fill_value.item() if isinstance(layout.fill_value, np.generic) else layout.fill_value,
        "zarr": None,
    }
    placement = layout.placement
    if isinstance(placement, ZarrPlacement):
        zarr = asdict(placement)
        place: Any = zarr.pop("chunks_per_object")
        common["zarr"] = zarr
    else:
        assert isinstance(placement, TablePlacement)
        place = base64.b64encode(zlib.compress(placement.table.astype("<u8").tobytes())).decode()
    return common, [layout.n_elements, layout.chunk_elements, place]


def joined_layout(common: Common, own: Sequence[Own], prefixes: Sequence[str]) -> ArrayLayout:
    """The arrays of some stores, which have one record in `common`, as one array.

    The objects of store k are below `prefixes[k]`, which is the key of an HDF5 file. Raises FormatError.
    """
    path = common["path"]
    try:
        sizes, widths = (np.array([each[at] for each in own], np.int64).reshape(-1) for at in (0, 1))
        inside = (sizes >= 0) & (sizes < _MOST_ELEMENTS) & (widths > 0) & (widths < _MOST_CHUNK)
        if not inside.all():
            raise ValueError(f"{prefixes[int(np.argmin(inside))]} has impossible sizes")
        grid = JoinedGrid(ends=np.cumsum(sizes), widths=widths)
        if grid.n_chunks.sum() > _MOST_CHUNKS:
            raise ValueError(f"there are {grid.n_chunks.sum()} chunks")
        parts = [_placement(common, each[2], n) for each, n in zip(own, grid.n_chunks.tolist(), strict=True)]
        dtype = np.dtype(common["dtype"])
        return ArrayLayout(
            **{name: common[name] for name in _PLAIN if name != "codecs"},
            dtype=dtype,
            stored_dtype=None if common["stored_dtype"] is None else np.dtype(common["stored_dtype"]),
            codecs=tuple(common["codecs"]),
            fill_value=common["fill_value"],
            n_elements=int(sizes.sum()),
            chunk_elements=int(widths.max(initial=1)),
            placement=JoinedPlacement(prefixes=prefixes, parts=parts, n_chunks=grid.n_chunks),
            joined=grid,
        )
    except (ValueError, TypeError, KeyError, OverflowError, binascii.Error, zlib.error) as error:
        raise FormatError(f"the record of {path} cannot be used ({error}): index the stores again") from error


def _placement(common: Common, place: Any, n_chunks: int) -> Placement:
    if common["zarr"] is not None:
        if not isinstance(place, int) or not 0 < place < _MOST_CHUNK:
            raise ValueError(f"an object cannot hold {place!r} chunks")
        return ZarrPlacement(**common["zarr"], chunks_per_object=place)
    content = zlib.decompressobj().decompress(base64.b64decode(place), 16 * n_chunks + 1)
    if len(content) != 16 * n_chunks:
        raise ValueError(f"a table does not have {n_chunks} chunks")
    table: Index = np.frombuffer(content, "<u8").reshape(-1, 2)
    return TablePlacement(name="", table=table)
