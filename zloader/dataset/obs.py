"""The rows of one or several stores: their obs columns and obsm arrays.

A column or array is read whole when it is first used, from all stores at once, and then stays in memory. With a cache
it is kept there decoded (kept.py), codes of categories in the least dtype, and memory-mapped, so that the processes of
a machine share one copy. Only large obsm arrays are read with each fetch, like x. Obs names are read each time, only
those in the chunks of the rows that are asked for.

Strings and nullable columns are made into numbers of all their values. The mirror keeps their objects, and the cache
their numbers.
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
from zloader.common.errors import FormatError, OptionError
from zloader.common.locks import cached_property
from zloader.common.machine import require_memory
from zloader.common.messages import listed
from zloader.common.records import Rows, windows_of
from zloader.dataset.elements import is_array
from zloader.dataset.obsm_arrays import ObsmArrays
from zloader.dataset.opening import OpenedStores
from zloader.dataset.store import OpenedStore
from zloader.selecting.columns import (
    NUMBERS,
    ObsColumn,
    StringCoder,
    as_labels,
    as_numbers,
    concatenated,
    joined,
    kind_of,
    labels_as,
    of_strings,
    plain_labels,
    unalike,
    unfit_obs,
)
from zloader.selecting.groups import shares
from zloader.selecting.row_maps import RowMap
from zloader.storage.metadata import stored_length

NAME_BYTES = 100  # of an obs name as a Python string, with its place in an Index
_WINDOW_ROWS = 1 << 18  # of strings, about 150 MB while they are coded
_TIMES = "mM"


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


# ---- one store


class StoreColumns:
    """The obs columns of one store: those of the whole, and `rna:NAME` of the modality rna.

    A column of a modality has the rows of the whole, and a missing value where the modality lacks the row.
    """

    def __init__(self, store: OpenedStore) -> None:
        self.store = store

    def path(self, name: str) -> str:
        """The path of a column."""
        return self.store.obs_paths[name]

    def is_coded(self, name: str) -> bool:
        """Whether a column has codes and categories, from metadata."""
        return self.store.is_coded(self.path(name))

    def kind(self, name: str) -> str:
        """The kind of values of an obs column, as `kind_of` names it, from metadata."""
        return kind_of(self.store.node(self.path(name)))

    def shown_kind(self, name: str) -> str:
        """The kind of values as `zloader info` shows it: `categorical`, `string`, or a dtype or encoding."""
        node = self.store.node(self.path(name))
        encoding = str(node.attrs.get("encoding-type", "array"))
        if "string" in encoding or is_array(node):
            return "string" if "string" in encoding else str(node.dtype)
        values = None if encoding == "categorical" else node.get("values")
        return encoding if values is None else str(values.dtype)

    def n_categories(self, name: str) -> int | None:
        """The number of categories of a column, from metadata; None if that does not say, or there are none."""
        return stored_length(self.store.node(f"{self.path(name)}/categories")) if self.is_coded(name) else None

    def column(self, name: str, rows: Rows | None = None) -> Any:
        """A column as anndata reads it, or some rows of it. Raises FormatError if it has not one value per row.

        Of labels and of plain numbers, only these rows are in memory if the store has a mirror.
        """
        path = self.path(name)
        if (row_of := self.store.row_of(path)) is not None:
            return _over_all_rows(self._column(name, None), row_of if rows is None else row_of[rows])
        return self._column(name, rows)

    def _column(self, name: str, rows: Rows | None) -> Any:
        path = self.path(name)
        if self.is_coded(name):
            categories = self._categories(path, self.store.element(f"{path}/categories"))
            codes, ordered = self._codes(name, len(categories)), self.store.node(path).attrs.get("ordered")
            if ordered is None:
                raise self.store.damaged(path, "its metadata do not say whether its categories are ordered")
            return pd.Categorical.from_codes(codes if rows is None else codes[rows], categories, ordered=bool(ordered))
        if (column := self._plain(name)) is None:
            column = self.store.element(path)
            self._require_shape(name, getattr(column, "shape", None))
        return column if rows is None else column[rows]

    def numbers(self, name: str) -> ObsColumn:
        """A column as numbers, memory-mapped if the store has a mirror and the numbers are stored as such.

        Strings are coded in windows, so that a window of them is in memory at a time.
        """
        path = self.path(name)
        if self.store.row_of(path) is not None:
            return as_numbers(name, self.column(name))
        if self.is_coded(name):  # distinct strings and integers are labels without pandas
            stored = self.store.element(f"{path}/categories")
            plain = plain_labels(stored)
            labels = as_labels(self._categories(path, stored)) if plain is None else plain
            return ObsColumn(values=self._codes(name, len(labels)), coded=labels)
        if self.kind(name) == "strings":
            return self._coded_strings(name)
        if (numbers := self._plain(name)) is not None:
            return ObsColumn(values=numbers)
        return as_numbers(name, self.column(name))

    def _categories(self, path: str, stored: Any) -> pd.Index:
        try:
            return pd.Categorical.from_codes([], stored).categories
        except (ValueError, TypeError) as error:
            raise self.store.damaged(f"{path}/categories", str(error)) from error

    def _codes(self, name: str, n_categories: int) -> NDArray[np.integer]:
        path = f"{self.path(name)}/codes"
        stored = self.store.node(path)
        self._require_shape(name, getattr(stored, "shape", None))
        if stored.dtype.kind not in "iu":
            raise self.store.damaged(path, f"it holds {stored.dtype}")
        return self.store.whole(path, n_categories)

    def _plain(self, name: str) -> NDArray[Any] | None:
        """A column that is stored as an array of numbers or dates; None for any other."""
        node = self.store.node(self.path(name))
        if not is_array(node) or node.dtype.kind not in NUMBERS + _TIMES:
            return None
        self._require_shape(name, node.shape)
        return self.store.whole(self.path(name))

    def _coded_strings(self, name: str) -> ObsColumn:
        values, mask = self.path(name), None
        if not is_array(self.store.node(values)):
            values, mask = f"{values}/values", f"{values}/mask"
            self._require_shape(name, self.store.node(mask).shape)
        array = self.store.node(values)
        self._require_shape(name, array.shape)
        chunk = max(1, array.chunks[0])  # a shard may hold the whole column
        step = max(1, _WINDOW_ROWS // chunk) * chunk
        strings = StringCoder(array.shape[0])
        for start in range(0, array.shape[0], step):
            missing = None if mask is None else self.store.window(mask, start, start + step)
            strings.add(self.store.window(values, start, start + step), missing)
        return of_strings(strings)

    def _require_shape(self, name: str, shape: tuple[int, ...] | None) -> None:
        if shape != (n_rows := self.store.rows_at(self.path(name)),):
            raise FormatError(
                f"obs column {name!r} of {self.store.location.url} has shape {shape}, but the store has {n_rows} rows: "
                "the store is damaged"
            )


def _over_all_rows(column: Any, row_of: RowMap) -> Any:
    """A column of a modality, with missing values in the rows that it lacks."""
    if isinstance(column, np.ndarray) and (row_of < 0).any() and column.dtype.kind in "iubOT":
        column = pd.array(column)  # which can be missing
    return pd.api.extensions.take(column, row_of, allow_fill=True)


def _names_of(store: OpenedStore, rows: Rows) -> NDArray[np.object_]:
    """The names of some rows of a store as anndata shows them: strings as they are, others as text."""
    path, found = store.index_path("obs"), np.empty(len(rows), object)
    node = store.node(path)
    if not is_array(node):  # categories or nullable strings
        found[:] = _as_strings(store.names("obs").to_numpy(object)[rows])
        return found
    order = np.argsort(rows, kind="stable")
    chunks = rows[order] // max(1, node.chunks[0])
    runs = np.split(order, np.flatnonzero(np.diff(chunks) > 1) + 1) if len(rows) else []

    def fill(run: Rows) -> None:
        first, stop = int(rows[run[0]]), int(rows[run[-1]]) + 1
        with store.reading(path, node, first, stop):  # keeps what is read
            found[run] = _as_strings(np.asarray(node[first:stop])[rows[run] - first])

    concurrently(fill, runs)
    return found


def _pass_over_names(store: OpenedStore) -> None:
    for window in windows_of(store.n_obs):
        _names_of(store, np.arange(window.start, window.stop))


def _as_strings(names: NDArray[Any]) -> list[str]:
    if names.dtype.kind == "S":
        return [name.decode(errors="replace") for name in names.tolist()]
    return [name if isinstance(name, str) else "nan" if pd.isna(name) else str(name) for name in names.tolist()]


# ---- all stores


class Observations:
    """obs and obsm over the rows of all stores, one store after another."""

    def __init__(self, opened: OpenedStores) -> None:
        self._opened = opened
        self._stores = opened.stores
        self._directory = opened.mirror_directory
        self._of_stores = [StoreColumns(store) for store in opened.stores]
        self._columns: dict[str, ObsColumn] = {}
        self.arrays = ObsmArrays(opened)

    @cached_property
    def n_rows(self) -> int:
        """The number of rows."""
        return sum(concurrently(lambda store: store.n_obs, self._stores))

    @cached_property
    def column_names(self) -> list[str]:
        """Names of the obs columns that every store has, in the order of the first store."""
        return self._opened.in_all(lambda store: store.obs_paths)

    @cached_property
    def _ends(self) -> Rows:
        """The row at which each store ends."""
        return np.cumsum([store.n_obs for store in self._stores], dtype=np.int64)

    def names(self, rows: Rows | None = None) -> NDArray[np.object_]:
        """The obs names of some rows or all, as Python strings. Raises FormatError or a ReadError.

        Raises OptionError if they would take more than half of the machine's memory.
        """
        n_rows = self.n_rows if rows is None else len(rows)
        advice = "read those of some rows with names_of(rows), or single columns with obs_column(name)"
        require_memory(NAME_BYTES * n_rows, f"the obs names of {n_rows} rows", advice)
        rows = np.arange(n_rows) if rows is None else rows
        found = np.empty(n_rows, object)

        def fill(share: tuple[int, Rows | slice]) -> None:
            number, at = share
            store = self._stores[number]
            found[at] = _names_of(store, rows[at] - (self._ends[number] - store.n_obs))

        concurrently(fill, shares(self._ends, rows))
        return found

    def frame(self, columns: Sequence[str] | None = None, rows: Rows | None = None) -> pd.DataFrame:
        """All obs columns, or some of them, of all rows or some, with their obs names as the index."""
        names = self.column_names if columns is None else names_of(columns=columns)
        index = pd.Index(self.names(rows))
        return pd.DataFrame({name: self._column_of(name, rows) for name in names}, index=index)

    def _column_of(self, name: str, rows: Rows | None) -> Any:
        """A column as anndata reads it."""
        self.require_columns([name])
        if len(self._stores) == 1:
            return self._of_stores[0].column(name, rows)
        kinds = [columns.kind(name) for columns in self._of_stores]
        if (differ := unalike(name, kinds, self._opened.urls)) is not None:
            raise differ
        column = concatenated(name, concurrently(lambda columns: columns.column(name), self._of_stores))
        return column if rows is None else column[rows]  # the labels are joined over all rows

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
        document = None if self._directory is None else load_object(self._directory, f"/obs-3/{name}")
        if self._directory is None or document is None:
            return None
        kept = json.loads(document)
        values = load_array(self._directory, kept["array"], shape=(self.n_rows,), dtype=np.dtype(kept["values"]))
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
        key, columns = f"/obs-3/{name}", self._of_stores[0]
        if page_cache.is_mapped(column.values):
            if not columns.is_coded(name) or labels is None:
                return column
            key = f"{columns.path(name)}/codes"
        else:
            values = column.values
            kept = save_array(self._directory, key, [values], shape=values.shape, dtype=values.dtype)
            if kept is None:
                return column
            column = replace(column, values=kept)
        document = {
            "labels": labels,
            "dtype": None if column.coded is None else str(column.coded.dtype),
            "from_strings": column.from_strings,
            "array": key,
            "values": column.values.dtype.str,
        }
        save_object(self._directory, f"/obs-3/{name}", json.dumps(document).encode())
        return column

    def require_columns(self, names: Sequence[str]) -> None:
        """Raises MissingColumnError for the first name that some store lacks."""
        for name in names:
            self._opened.require_in_all(f"obs column {name!r}", name, lambda store: store.obs_paths)

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

    def cache_all(self) -> None:
        """Reads the obs names and every obs column and obsm array that minibatches carry, which fills the cache."""
        concurrently(_pass_over_names, self._stores)
        for name in self.column_names:
            with contextlib.suppress(OptionError):  # no tensor can hold it, such as a column of complex numbers
                self.column(name)
        for name in self.arrays.usable:
            self.arrays.whole(name)
