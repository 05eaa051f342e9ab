"""Caches obs columns in a mirror: the codes or values as a memory-mapped array, and the categories of the codes."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd

from zloader.caching.cached_files import load_column, load_object, save_column, save_object
from zloader.caching.directory import MirrorDirectory
from zloader.selecting.columns import ObsColumn


def load_obs(directory: MirrorDirectory, name: str, n_rows: int) -> ObsColumn | None:
    """A column of `n_rows` rows saved by `save_obs`, or None if it is not cached or damaged."""
    document = load_object(directory, f"/obs/{name}")
    values = None if document is None else load_column(directory, f"/obs/{name}", shape=(n_rows,))
    if document is None or values is None:
        return None
    description: dict[str, Any] = json.loads(document)
    labels = description["labels"]
    categories = None if labels is None else pd.Index(labels, dtype=description["dtype"])
    return ObsColumn(values=values, categories=categories, from_strings=description["from_strings"])


def save_obs(directory: MirrorDirectory, name: str, column: ObsColumn) -> ObsColumn:
    """Saves a column and returns it with memory-mapped values. Returns the original if it cannot be cached.

    Labels other than str, int and bool are not cached.
    """
    labels = None if column.categories is None else column.categories.tolist()
    if labels is not None and not all(type(label) in (str, int, bool) for label in labels):
        return column
    dtype = None if column.categories is None else str(column.categories.dtype)
    description = {"labels": labels, "dtype": dtype, "from_strings": column.from_strings}
    shape, kind = column.values.shape, column.values.dtype
    values = save_column(directory, f"/obs/{name}", [column.values], shape=shape, dtype=kind)
    if values is None:
        return column
    save_object(directory, f"/obs/{name}", json.dumps(description).encode())
    return ObsColumn(values=values, categories=column.categories, from_strings=column.from_strings)
