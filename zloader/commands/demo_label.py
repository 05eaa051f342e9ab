"""The obs column that the demo predicts."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

from zloader.common.errors import MissingColumnError, OptionError
from zloader.dataset.dataset import Dataset

BUNDLED_LABEL = "cell_type1"
_FEWEST_CATEGORIES, _MOST_CATEGORIES = 2, 200


def require_label(source: Path, label: str | None) -> None:
    """Raises before the conversion if the file has no such column. `convert` reports other faults of the file."""
    if label is None or not h5py.is_hdf5(source):
        return
    with h5py.File(source) as file:
        columns = file["obs"].attrs.get("column-order") if "obs" in file else None
    if columns is not None and label not in columns:
        known = ", ".join(map(repr, columns)) or "none"
        raise MissingColumnError(f"there is no obs column {label!r} in {source}; its columns are: {known}")


def choose_label(dataset: Dataset, wanted: str | None) -> str:
    """The obs column to predict: `wanted`, else cell_type1, else the first column with 2 to 200 categories."""
    if wanted is not None:
        dataset.observations.require_usable([wanted])
    candidates = [wanted] if wanted else sorted(dataset.obs_columns, key=lambda name: name != BUNDLED_LABEL)
    n_categories = {}
    for name in candidates:
        n_categories[name] = _n_categories(dataset, name)
        if _FEWEST_CATEGORIES <= n_categories[name] <= _MOST_CATEGORIES:
            return name
    if wanted is not None:
        n_categories = {name: _n_categories(dataset, name) for name in dataset.obs_columns}
        problem = f"obs column {wanted!r} cannot be a label"
    else:
        problem = "no obs column can be a label"
    columns = [f"{name} ({f'{n} categories' if n else 'numbers'})" for name, n in n_categories.items()]
    raise OptionError(
        f"{problem}: a label needs {_FEWEST_CATEGORIES} to {_MOST_CATEGORIES} categories. "
        f"Choose one with --label; the columns are: {', '.join(columns) or 'none'}"
    )


def _n_categories(dataset: Dataset, name: str) -> int:
    """The number of categories that occur in a column, or 0 for a column that is not categorical."""
    try:
        column = dataset.obs_column(name)
    except OptionError:
        return 0
    return 0 if column.categories is None else len(np.unique(column.values[column.values >= 0]))
