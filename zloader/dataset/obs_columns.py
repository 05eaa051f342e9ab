"""Reads one obs column of one store: as anndata reads it, or as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import zarr
from numpy.typing import NDArray

from zloader.common.errors import FormatError
from zloader.common.records import Rows
from zloader.dataset.store import OpenedStore
from zloader.selecting.columns import NUMBERS, ObsColumn, StringCoder, as_labels, as_numbers, kind_of, of_strings

_WINDOW_ROWS = 1 << 18  # about 150 MB while they are coded


def kinds_in(stores: Sequence[OpenedStore], name: str) -> list[str]:
    """The kind of values of a column in each store, as `kind_of` names it, from metadata."""
    return [kind_of(store.node(_path(name))) for store in stores]


def read_column(store: OpenedStore, name: str, rows: Rows | None = None) -> Any:
    """A column as anndata reads it, or some rows of it. Raises FormatError if it has not one value per row.

    Of labels and of plain numbers, only these rows are in memory if the store has a mirror.
    """
    node = store.node(_path(name))
    if is_categorical(node):
        codes, categories = _codes(store, name, rows)
        ordered = node.attrs.get("ordered")
        if ordered is None:
            raise store.damaged(_path(name), "its metadata do not say whether its categories are ordered")
        return pd.Categorical.from_codes(codes, categories, ordered=bool(ordered))
    if (column := _numbers(store, name)) is None:
        column = store.element(_path(name))
        _require_shape(store, name, getattr(column, "shape", None))
    return column if rows is None else column[rows]


def read_numbers(store: OpenedStore, name: str) -> ObsColumn:
    """A column as numbers, memory-mapped if the store has a mirror and the numbers are stored as such.

    Strings are coded in windows, so that a window of them is in memory at a time.
    """
    node = store.node(_path(name))
    if kind_of(node) == "strings":
        return _coded(store, name, node)
    if is_categorical(node):
        codes, categories = _codes(store, name)
        return ObsColumn(values=codes, categories=as_labels(categories))
    if (numbers := _numbers(store, name)) is not None:
        return ObsColumn(values=numbers, categories=None)
    return as_numbers(name, read_column(store, name))


def is_categorical(node: Any) -> bool:
    return isinstance(node, zarr.Group) and node.attrs.get("encoding-type") == "categorical"


def _numbers(store: OpenedStore, name: str) -> NDArray[Any] | None:
    """A column that is stored as an array of numbers; None for any other."""
    node = store.node(_path(name))
    if not isinstance(node, zarr.Array) or node.dtype.kind not in NUMBERS:
        return None
    _require_shape(store, name, node.shape)
    return store.column(_path(name))


def _codes(store: OpenedStore, name: str, rows: Rows | None = None) -> tuple[NDArray[np.integer], pd.Index]:
    """The codes of a categorical column, or of some rows of it, and its categories.

    The codes have the narrowest dtype, or the stored one if the column is kept chunk by chunk.
    Raises FormatError for a code without a category. Of such a column, only these rows are checked.
    """
    path, categories = _path(name), read_categories(store, name)
    stored = store.node(f"{path}/codes")
    _require_shape(store, name, getattr(stored, "shape", None))
    if stored.dtype.kind not in "iu":
        raise store.damaged(f"{path}/codes", f"it holds {stored.dtype}")

    if rows is not None and (whole := store.completed(f"{path}/codes")) is not None:
        chosen = whole[rows]
        require_codes(store, f"{path}/codes", len(categories), chosen, rows)
        return chosen, categories

    def check(first: int, window: NDArray[Any]) -> None:
        require_codes(store, f"{path}/codes", len(categories), window, first)

    dtype = np.min_scalar_type(-max(1, len(categories)))
    codes = store.column(f"{path}/codes", check, dtype.name)
    return codes if rows is None else codes[rows], categories


def read_categories(store: OpenedStore, name: str) -> pd.Index:
    """The categories of a categorical column."""
    path = f"{_path(name)}/categories"
    stored = store.element(path)
    try:
        return pd.Categorical.from_codes([], stored).categories
    except (ValueError, TypeError) as error:
        raise store.damaged(path, str(error)) from error


def require_codes(
    store: OpenedStore, path: str, n_categories: int, codes: NDArray[np.integer], rows: int | Rows
) -> None:
    """Raises FormatError for a code of no category. `rows` are the rows that have the codes, or the first of a run."""
    wrong = np.flatnonzero((codes < -1) | (codes >= n_categories))
    if len(wrong):
        row = rows + int(wrong[0]) if isinstance(rows, int) else int(rows[wrong[0]])
        raise store.damaged(path, f"row {row} has the code {codes[wrong[0]]} of {n_categories} categories")


def _coded(store: OpenedStore, name: str, node: Any) -> ObsColumn:
    path = _path(name)
    if isinstance(node, zarr.Array):
        values, mask = path, None
    else:
        values, mask = f"{path}/values", f"{path}/mask"
        _require_shape(store, name, store.node(mask).shape)
    array = store.node(values)
    _require_shape(store, name, array.shape)
    chunk = max(1, array.chunks[0])  # a shard may hold the whole column
    step = max(1, _WINDOW_ROWS // chunk) * chunk
    strings = StringCoder(store.n_obs)
    for start in range(0, store.n_obs, step):
        missing = None if mask is None else store.window(mask, start, start + step)
        strings.add(store.window(values, start, start + step), missing)
    return of_strings(strings)


def _path(name: str) -> str:
    return f"obs/{name}"


def _require_shape(store: OpenedStore, name: str, shape: tuple[int, ...] | None) -> None:
    if shape != (store.n_obs,):
        raise FormatError(
            f"obs column {name!r} of {store.location.url} has shape {shape}, but the store has {store.n_obs} rows: "
            "the store is damaged"
        )
