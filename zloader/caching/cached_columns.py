"""obs columns in a mirror: codes or values as a mapped column, and the labels that codes stand for."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd

from zloader.caching.cached_files import load_column, load_object, save_column, save_object
from zloader.caching.directory import MirrorDirectory
from zloader.selecting.columns import ObsColumn


def load_obs(place: MirrorDirectory, name: str, n_rows: int) -> ObsColumn | None:
    """A column of so many rows kept by `save_obs`, or None where there is none to trust."""
    described = load_object(place, f"/obs/{name}")
    values = None if described is None else load_column(place, f"/obs/{name}", shape=(n_rows,))
    if described is None or values is None:
        return None
    noted: dict[str, Any] = json.loads(described)
    labels = noted["labels"]
    categories = None if labels is None else pd.Index(labels, dtype=noted["dtype"])
    return ObsColumn(values=values, categories=categories, from_strings=noted["from_strings"])


def save_obs(place: MirrorDirectory, name: str, column: ObsColumn) -> ObsColumn:
    """Keeps a column, and gives it as it is kept; as it was where its labels are of a kind that is not kept."""
    labels = None if column.categories is None else column.categories.tolist()
    if labels is not None and not all(type(label) in (str, int, bool) for label in labels):
        return column
    dtype = None if column.categories is None else str(column.categories.dtype)
    noted = {"labels": labels, "dtype": dtype, "from_strings": column.from_strings}
    values = save_column(place, f"/obs/{name}", [column.values], shape=column.values.shape, dtype=column.values.dtype)
    if values is None:
        return column
    save_object(place, f"/obs/{name}", json.dumps(noted).encode())
    return ObsColumn(values=values, categories=column.categories, from_strings=column.from_strings)
