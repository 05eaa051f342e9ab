"""The order in which the rows of sources are stored: shuffled, or along a Hilbert curve through coordinates.

Along the curve, rows that lie near each other in space are stored near each other, so that a fetch of a row and its
spatial neighbours touches few chunks. The curve visits the cells of a grid of 2**16 steps per axis (2**10 in three
dimensions and more), by the algorithm of Skilling (2004), Programming the Hilbert curve. It takes about 100 bytes per
row, and 1 s per million rows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from zloader.common.errors import OptionError, SourceError
from zloader.common.machine import require_memory
from zloader.common.messages import listed
from zloader.common.records import Rows
from zloader.conversion.joining.content import Content
from zloader.order.permutation import key_of, permute

_ROW_BYTES = 100
_MOST_AXES = 6


Positions: TypeAlias = Callable[[Rows], Rows]  # the new positions of rows of the sources


def positions_in(content: Content, *, shuffle_seed: int | None, order: str | None) -> Positions | None:
    """Where to store the rows of a content: shuffled, or in `order`, such as "hilbert:spatial"; None as they are.

    Raises OptionError for coordinates that no source has, SourceError for ones that are not numbers, or missing.
    """
    if shuffle_seed is not None:
        key = key_of(shuffle_seed)
        return lambda rows: permute(rows, content.n_rows, key)
    if order is None:
        return None
    positions = _positions_on_curve(content, order.partition(":")[2])
    return lambda rows: positions[rows]


def _positions_on_curve(content: Content, name: str) -> Rows:
    """The new position of each row. Each source keeps its place, because it has coordinates of its own."""
    require_memory(_ROW_BYTES * content.n_rows, f"the order of {content.n_rows} rows", "convert without order")
    coordinates = _coordinates(content, name)
    keys = np.empty(len(coordinates), np.uint64)
    bounds = content.source_bounds
    for first, stop in pairwise(bounds.tolist()):
        keys[first:stop] = on_curve(coordinates[first:stop])
    sources = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    order = np.lexsort((keys, sources))
    positions = np.empty_like(order)
    positions[order] = np.arange(len(order))
    return positions


def _coordinates(content: Content, name: str) -> NDArray[np.float64]:
    if name not in content.obsm_names:
        raise OptionError(
            f"order='hilbert:{name}': not every source has obsm {name!r}; all of them have: "
            f"{listed(content.obsm_names) or 'none'}"
        )
    values = content.obsm_array(name)
    if values.ndim != 2 or not 2 <= values.shape[1] <= _MOST_AXES or values.dtype.kind not in "iuf":
        raise SourceError(
            f"obsm/{name} holds {values.dtype} {values.shape}: a curve needs from 2 to {_MOST_AXES} coordinates per row"
        )
    values = values.astype(np.float64)
    wrong = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if len(wrong):
        raise SourceError(
            f"obsm/{name} is {values[wrong[0]].tolist()} in row {wrong[0]} ({len(wrong)} such rows): fill in the "
            "coordinates, or leave these rows out"
        )
    return np.asarray(values)


def on_curve(coordinates: NDArray[np.float64]) -> NDArray[np.uint64]:
    """The place of each point, rows x axes, on a Hilbert curve through all of them."""
    n_rows, n_axes = coordinates.shape
    bits = 16 if n_axes == 2 else 10
    low = coordinates.min(axis=0) if n_rows else np.zeros(n_axes)
    span = float((coordinates.max(axis=0) - low).max()) if n_rows else 0.0  # of the widest axis: distances keep ratios
    steps = (coordinates - low) / (span or 1.0) * ((1 << bits) - 1)
    x = [steps[:, axis].astype(np.uint64) for axis in range(n_axes)]
    one = np.uint64(1)
    for bit in range(bits - 1, 0, -1):  # undo excess work, from the highest bit down
        q = one << np.uint64(bit)
        for axis in range(n_axes):
            has = (x[axis] & q).astype(bool)
            exchanged = np.where(has, np.uint64(0), (x[0] ^ x[axis]) & (q - one))
            x[0] = np.where(has, x[0] ^ (q - one), x[0] ^ exchanged)
            x[axis] = x[axis] ^ exchanged if axis else x[0]
    for axis in range(1, n_axes):  # Gray encode
        x[axis] = x[axis] ^ x[axis - 1]
    toggled = np.zeros(n_rows, np.uint64)
    for bit in range(bits - 1, 0, -1):
        q = one << np.uint64(bit)
        toggled = np.where((x[-1] & q).astype(bool), toggled ^ (q - one), toggled)
    found = np.zeros(n_rows, np.uint64)
    for bit in range(bits - 1, -1, -1):  # interleave the bits of the axes
        for axis in range(n_axes):
            found = (found << one) | (((x[axis] ^ toggled) >> np.uint64(bit)) & one)
    return found
