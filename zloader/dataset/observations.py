"""The rows of one or several stores: their obs columns and obsm arrays.

A column is read when it is first used, from all stores at once, and then stays in memory. With a cache it is written
there once and memory-mapped, so that the processes of a machine share one copy.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from zloader.caching.kept import load_array, load_object, save_array, save_object
from zloader.common import page_cache
from zloader.common.checks import names_of
from zloader.common.concurrent_calls import concurrently
from zloader.common.deferred import pd
from zloader.common.errors import MissingColumnError, OptionError
from zloader.common.locks import cached_property
from zloader.common.machine import require_memory
from zloader.common.messages import listed, suggestion
from zloader.common.records import Rows
from zloader.dataset.names import ObsNames
from zloader.dataset.obs_columns import columns_of
from zloader.dataset.obsm_arrays import ObsmArrays
from zloader.dataset.opening import OpenedStores
from zloader.selecting.columns import ObsColumn, concatenated, joined, labels_as, unalike, unfit_obs
from zloader.selecting.groups import shares

NAME_BYTES = 100  # of an obs name as a Python string, with its place in an Index


def kept_as(name: str) -> str:
    """The key in the cache of what is kept of an obs column of all stores. Versions that misread some used `/obs/`."""
    return f"/obs-2/{name}"


def require_frame(n_rows: int) -> None:
    """Raises OptionError if an obs frame of so many rows would take more than half of the memory."""
    require_memory(
        NAME_BYTES * n_rows,
        f"the obs frame of {n_rows} rows with their names",
        "read single columns with obs_column(name), which needs no names",
    )


class ObsFrame:
    """obs, read when it is called or indexed: `obs()` and `obs(names)` are frames, `obs[name]` is a column.

    Iteration yields the names of the columns, as that of a frame does.
    """

    def __init__(self, read: Callable[[Sequence[str] | None], pd.DataFrame], columns: Callable[[], list[str]]) -> None:
        self._read, self._columns = read, columns

    def __call__(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        return self._read(columns)

    def __getitem__(self, columns: Any) -> Any:
        return self._read([columns])[columns] if isinstance(columns, str) else self._read(columns)

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns())

    def __repr__(self) -> str:
        return f"<obs with the columns {listed(self)}: obs() reads it, and obs[name] one column>"

    def __getattr__(self, name: str) -> NoReturn:
        advice = "" if name.startswith("_") else f": write obs().{name}"
        raise AttributeError(f"obs is read when it is called or indexed, and has no {name!r} of its own{advice}")


class Observations:
    """obs and obsm over the rows of all stores, one store after another."""

    def __init__(self, opened: OpenedStores) -> None:
        self._opened = opened
        self._stores = opened.stores
        self._directory = opened.mirror_directory
        self._names = [ObsNames(store) for store in opened.stores]
        self._of_stores = [columns_of(store) for store in opened.stores]
        self._columns: dict[str, ObsColumn] = {}
        self.arrays = ObsmArrays(opened, self._of_stores)

    @cached_property
    def n_rows(self) -> int:
        """The number of rows."""
        return sum(concurrently(lambda store: store.n_obs, self._stores))

    @cached_property
    def column_names(self) -> list[str]:
        """Names of the obs columns that every store has, in the order of the first store."""
        return [
            name for name in self._stores[0].obs_columns if all(name in store.obs_columns for store in self._stores)
        ]

    @cached_property
    def _ends(self) -> Rows:
        """The row at which each store ends."""
        return np.cumsum([store.n_obs for store in self._stores], dtype=np.int64)

    def names(self, rows: Rows, *, keep: bool = True) -> NDArray[np.object_]:
        """The obs names of some rows, as Python strings. `keep` as in ObsNames. Raises FormatError or a ReadError."""
        found = np.empty(len(rows), object)

        def fill(share: tuple[int, Rows | slice]) -> None:
            number, at = share
            first = self._ends[number] - self._stores[number].n_obs
            found[at] = self._names[number].of(rows[at] - first, keep=keep)

        concurrently(fill, shares(self._ends, rows))
        return found

    def frame(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """All obs columns, or some of them, with the obs names as the index."""
        names = self.column_names if columns is None else names_of(columns=columns)
        require_frame(self.n_rows)
        index = pd.Index(concatenated("index", concurrently(lambda names: names.whole(), self._names)))
        return pd.DataFrame({name: concatenated(name, self._read_column(name)) for name in names}, index=index)

    def frame_of(self, rows: Rows, columns: Sequence[str] | None = None, *, keep: bool = True) -> pd.DataFrame:
        """All obs columns of some rows, or some of the columns, with the obs names of the rows as the index.

        `keep` is as in `names`.
        """
        names = self.column_names if columns is None else names_of(columns=columns)
        found = {name: self._column_of(name, rows) for name in names}
        return pd.DataFrame(found, index=pd.Index(self.names(rows, keep=keep)))

    def _column_of(self, name: str, rows: Rows) -> Any:
        """A column of some rows, as anndata reads it."""
        if len(self._stores) > 1:  # the labels are joined over all rows
            return concatenated(name, self._read_column(name))[rows]
        self.require_columns([name])
        return self._of_stores[0].column(name, rows)

    def column(self, name: str) -> ObsColumn:
        """One obs column as numbers: the codes of a categorical or string column, the values of any other.

        Raises the errors of `require_usable`, and FormatError for a damaged column.
        """
        self.require_columns([name])
        if name not in self._columns:
            self.require_usable([name])
            column = self._kept(name)
            if column is None:
                columns = concurrently(lambda columns: columns.numbers(name), self._of_stores)
                column = self._keep(name, joined(name, columns))
            column.values.flags.writeable = False  # as with a cache: later minibatches are made of them
            if isinstance(column.coded, np.ndarray):
                column.coded.flags.writeable = False
            self._columns[name] = column
        return self._columns[name]

    def _kept(self, name: str) -> ObsColumn | None:
        """A column that `_keep` has kept, or None if the cache does not have it."""
        document = None if self._directory is None else load_object(self._directory, kept_as(name))
        if self._directory is None or document is None:
            return None
        kept = json.loads(document)
        if kept["codes"]:
            values: NDArray[Any] | None = self._of_stores[0].whole(kept["codes"])
        else:
            values = load_array(self._directory, kept_as(name), shape=(self.n_rows,), dtype=np.dtype(kept["values"]))
        if values is None:
            return None
        labels = None if kept["labels"] is None else labels_as(kept["labels"], kept["dtype"])
        return ObsColumn(values=values, coded=labels, from_strings=kept["from_strings"])

    def _keep(self, name: str, column: ObsColumn) -> ObsColumn:
        """Keeps in the cache all of a column that the mirrors of its stores do not have, so that processes share it.

        These are the labels, and the values if they were made from several stores or from strings. Labels other than
        str, int and bool are not kept. Returns the column, with memory-mapped values if possible.
        """
        labels = None if column.coded is None else column.coded.tolist()
        if self._directory is None or not all(type(label) in (str, int, bool) for label in labels or []):
            return column
        stored = page_cache.is_mapped(column.values)
        if stored and labels is None:
            return column
        values = column.values
        if not stored:
            kept = save_array(self._directory, kept_as(name), [values], shape=values.shape, dtype=values.dtype)
            if kept is None:
                return column
            column = replace(column, values=kept)
        document = {
            "labels": labels,
            "dtype": None if column.coded is None else str(column.coded.dtype),
            "from_strings": column.from_strings,
            "codes": self._of_stores[0].of_categorical(name).codes if stored else None,  # which were checked
            "values": values.dtype.str,
        }
        save_object(self._directory, kept_as(name), json.dumps(document).encode())
        return column

    def require_columns(self, names: Sequence[str]) -> None:
        """Raises MissingColumnError for the first name that some store lacks."""
        for name in names:
            for store in self._stores:
                if not isinstance(name, str) or name not in store.obs_columns:
                    known = ", ".join(map(repr, self.column_names)) or "none"
                    raise MissingColumnError(
                        f"there is no obs column {name!r} in {store.location.url}; there are: {known}"
                        f"{suggestion(name, self.column_names)}"
                    )

    def require_usable(self, names: Sequence[str]) -> None:
        """Raises the error for the first column that some store lacks or that is no tensor, from metadata alone.

        That is MissingColumnError, OptionError for values such as complex numbers, or FormatError if one store has
        numbers and another has labels.
        """
        for name in names:
            self.require_columns([name])
            kinds = [columns.kind(name) for columns in self._of_stores]
            if (unfit := unfit_obs(name, kinds, self._opened.urls)) is not None:
                raise unfit

    def _read_column(self, name: str) -> list[Any]:
        """A column of each store, as anndata reads it."""
        self.require_columns([name])
        kinds = [columns.kind(name) for columns in self._of_stores]
        if (differ := unalike(name, kinds, self._opened.urls)) is not None:
            raise differ
        return concurrently(lambda columns: columns.column(name), self._of_stores)

    def cache_all(self) -> None:
        """Reads the obs names and every obs column and obsm array that minibatches carry, which fills the cache."""
        concurrently(lambda names: names.load_all(), self._names)
        for name in self.column_names:
            with contextlib.suppress(OptionError):  # no tensor can hold it, such as a column of complex numbers
                self.column(name)
        for name in self.arrays.usable:
            self.arrays.whole(name)
