"""Caches obs columns in a mirror: the codes or values as a memory-mapped array, and the categories of the codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pandas as pd
from numpy.typing import NDArray

from zloader.caching.cached_files import load_column, load_object, save_column, save_object
from zloader.caching.directory import MirrorDirectory
from zloader.selecting.columns import ObsColumn


def load_obs(
    directory: MirrorDirectory, name: str, n_rows: int, completed: Callable[[], NDArray[Any] | None]
) -> ObsColumn | None:
    """A column of `n_rows` rows saved by `save_obs` or `save_labels`, or None if it is not cached or damaged.

    `completed` returns the values of a column of labels if the mirror keeps them chunk by chunk, or else None.
    """
    document = load_object(directory, f"/obs/{name}")
    if document is None:
        return None
    description: dict[str, Any] = json.loads(document)
    values = completed() if "values" in description else None
    if values is None:
        values = load_column(directory, description.get("values", f"/obs/{name}"), shape=(n_rows,))
    if values is None:
        return None
    labels = description["labels"]
    categories = None if labels is None else pd.Index(labels, dtype=description["dtype"])
    return ObsColumn(values=values, categories=categories, from_strings=description["from_strings"])


def save_obs(directory: MirrorDirectory, name: str, column: ObsColumn) -> ObsColumn:
    """Saves a column and returns it with memory-mapped values. Returns the original if it cannot be cached.

    Labels other than str, int and bool are not cached.
    """
    description = _description(column)
    if description is None:
        return column
    shape, kind = column.values.shape, column.values.dtype
    values = save_column(directory, f"/obs/{name}", [column.values], shape=shape, dtype=kind)
    if values is None:
        return column
    save_object(directory, f"/obs/{name}", json.dumps(description).encode())
    return ObsColumn(values=values, categories=column.categories, from_strings=column.from_strings)


def save_labels(directory: MirrorDirectory, name: str, column: ObsColumn, *, values: str) -> None:
    """Saves the labels of a column whose codes are cached as `values` and were checked. Does nothing without labels."""
    description = None if column.categories is None else _description(column)
    if description is not None:
        save_object(directory, f"/obs/{name}", json.dumps(description | {"values": values}).encode())


def _description(column: ObsColumn) -> dict[str, Any] | None:
    """All of a column but its values, or None if its labels cannot be cached."""
    labels = None if column.categories is None else column.categories.tolist()
    if labels is not None and not all(type(label) in (str, int, bool) for label in labels):
        return None
    dtype = None if column.categories is None else str(column.categories.dtype)
    return {"labels": labels, "dtype": dtype, "from_strings": column.from_strings}
