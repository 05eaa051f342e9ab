"""The obs columns, obsm arrays and obs names of the stores of a manifest.

A label of the manifest is known for all rows without a request. Anything with a value per row is read from the stores,
which are opened for it; with a cache it is kept, as the columns of several stores are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from zloader.common.concurrent_calls import concurrently
from zloader.common.deferred import pd
from zloader.common.records import Rows
from zloader.dataset.names import ObsNames, Text
from zloader.dataset.obs_columns import StoreColumns, WholeColumns
from zloader.dataset.store import OpenedStore
from zloader.dataset.store_stack import StoreStack
from zloader.selecting.columns import ObsColumn, as_numbers, concatenated, joined, kind_of
from zloader.selecting.groups import shares

Result = TypeVar("Result")
_SEGMENT_ROWS = 1 << 16


def columns_of(store: OpenedStore) -> StoreColumns:
    """The obs columns and obsm arrays of a store, with those of its modalities."""
    if isinstance(store, StoreStack):
        return StackColumns(store)
    return WholeColumns(store) if store.modalities else StoreColumns(store)


def obs_names_of(store: OpenedStore) -> ObsNames:
    """The obs names of a store."""
    return StackNames(store) if isinstance(store, StoreStack) else ObsNames(store)


def column_of_rows(name: str, stores: Sequence[StoreColumns], ends: Rows, rows: Rows) -> Any:
    """A column of some rows, as anndata reads it, from the stores that have these rows. Store k ends before `ends[k]`.

    Its categories are those of these stores.
    """
    parts, firsts = shares(ends, rows), np.append(0, ends)

    def read(part: tuple[int, Rows | slice]) -> Any:
        store, here = part
        return stores[store].column(name, rows[here] - firsts[store])

    if not len(rows):
        return stores[0].column(name, rows)
    taken = concatenated(name, concurrently(read, parts))
    return taken[np.argsort(np.concatenate([np.arange(len(rows))[here] for _, here in parts]))]


class _Members(Sequence[StoreColumns]):
    """The columns of the stores of a stack, each of which is opened when it is asked for."""

    def __init__(self, stack: StoreStack) -> None:
        self._stack = stack

    def __len__(self) -> int:
        return self._stack.n_stores

    def __getitem__(self, store: Any) -> Any:
        return columns_of(self._stack.member(store))


class StackColumns(StoreColumns):
    """The obs columns and obsm arrays of some stores of a manifest."""

    def __init__(self, store: StoreStack) -> None:
        super().__init__(store)
        self._stack = store

    def kind(self, name: str) -> str:
        label = self._label(name)
        if label is None:
            return self._stack.kinds(name)[0]
        return "categories" if isinstance(label, pd.Categorical) else kind_of(label)

    def shown_kind(self, name: str) -> str:
        label = self._label(name)
        return self._stack.kinds(name)[1] if label is None else str(label.dtype)

    def n_categories(self, name: str) -> int | None:
        return None

    def is_categorical(self, name: str) -> bool:
        return False  # as far as reading its codes chunk by chunk goes

    def column(self, name: str, rows: Rows | None = None) -> Any:
        label = self._label(name)
        if label is not None:
            return label[self._store_of if rows is None else np.searchsorted(self._stack.ends, rows, side="right")]
        if rows is None:
            return concatenated(name, self._of_each(lambda columns: columns.column(name)))
        return column_of_rows(name, _Members(self._stack), self._stack.ends, rows)

    def numbers(self, name: str) -> ObsColumn:
        label = self._label(name)
        if label is None:
            return joined(name, self._of_each(lambda columns: columns.numbers(name)))
        numbers = as_numbers(name, label)
        return ObsColumn(values=np.asarray(numbers.values)[self._store_of], coded=numbers.coded)

    def whole(self, path: str) -> NDArray[Any]:
        return np.concatenate(self._of_each(lambda columns: columns.whole(path)))

    @property
    def _store_of(self) -> NDArray[np.integer]:
        """The store of each row."""
        return np.repeat(np.arange(len(self._stack.ends)), np.diff(self._stack.ends, prepend=0))

    def _label(self, name: str) -> Any:
        """The labels or numbers that the manifest has for each store; None for a column of the stores."""
        labels = self._stack.labels
        if name not in labels:
            return None
        return labels[name].array if isinstance(labels[name].dtype, pd.CategoricalDtype) else labels[name].to_numpy()

    def _of_each(self, read: Callable[[StoreColumns], Result]) -> list[Result]:
        """What is read of each store, some stores at once."""
        members = _Members(self._stack)
        return concurrently(lambda number: read(members[number]), range(len(members)))


class StackNames(ObsNames):
    """The obs names of some stores of a manifest, in segments of many stores."""

    _segment_rows = _SEGMENT_ROWS

    def whole(self) -> Any:
        return self.of(np.arange(self._store.n_obs), keep=False)

    def _read(self, first: int, n_rows: int) -> Text:
        assert isinstance(self._store, StoreStack)
        stack, rows = self._store, np.arange(first, first + n_rows)
        begins = np.append(0, stack.ends)
        found = concurrently(
            lambda part: ObsNames(stack.member(part[0])).of(rows[part[1]] - begins[part[0]]).tolist(),
            shares(stack.ends, rows),
        )
        return Text.of(name for names in found for name in names)
