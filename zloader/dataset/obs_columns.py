"""The columns of one store: its obs columns, as anndata reads them or as numbers, and its obsm arrays.

An array of numbers, codes or dates is read whole when it is first used. With a mirror it is kept there decoded
(kept.py) and memory-mapped, and nothing else of it is.

Columns of strings and nullable columns are read whole: labels and dtypes depend on all of their values. The mirror
keeps their objects.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from zloader.common import page_cache
from zloader.common.deferred import pd
from zloader.common.errors import FormatError
from zloader.common.locks import cached_property
from zloader.common.records import Rows
from zloader.dataset.elements import CodedColumn
from zloader.dataset.store import OpenedStore
from zloader.selecting.columns import (
    NUMBERS,
    ObsColumn,
    StringCoder,
    as_labels,
    as_numbers,
    kind_of,
    of_strings,
    plain_labels,
)
from zloader.storage.metadata import stored_length

_WINDOW_BYTES = 32 << 20  # read at a time
_WINDOW_ROWS = 1 << 18  # of strings, about 150 MB while they are coded
_TIMES = "mM"


class StoreColumns:
    """The obs columns and obsm arrays of one store, or the obs columns of one of its modalities, in `frame`."""

    def __init__(self, store: OpenedStore, frame: str = "obs") -> None:
        self.store, self._frame = store, frame
        self._checked: set[str] = set()  # columns whose codes this process has checked

    @cached_property
    def _n_rows(self) -> int:
        return self.store.n_obs if self._frame == "obs" else self.store.length(self._frame)

    def path(self, name: str) -> str:
        """The path of a column."""
        return f"{self._frame}/{name}"

    def kind(self, name: str) -> str:
        """The kind of values of an obs column, as `kind_of` names it, from metadata."""
        return kind_of(self._node(name)) if self.coded(name) is None else "categories"

    def shown_kind(self, name: str) -> str:
        """The kind of values as `zloader info` shows it: `categorical`, `string`, or a dtype or encoding."""
        if self.coded(name) is not None:
            return "categorical"
        node = self._node(name)
        encoding = str(node.attrs.get("encoding-type", "array"))
        if "string" in encoding:
            return "string"
        values = node if isinstance(node, zarr.Array) else node.get("values")
        return encoding if values is None else str(values.dtype)

    def n_categories(self, name: str) -> int | None:
        """The number of categories of a categorical column, from metadata; None if that does not say."""
        return stored_length(self.store.node(self.of_categorical(name).categories))

    def is_categorical(self, name: str) -> bool:
        """Whether an obs column has codes and categories, from metadata."""
        return self.coded(name) is not None

    def coded(self, name: str) -> CodedColumn | None:
        """Where the codes and categories of a column are; None for one that is not categorical."""
        return self.store.coded(self._frame, name)

    def of_categorical(self, name: str) -> CodedColumn:
        """As `coded`, of a categorical column."""
        found = self.coded(name)
        assert found is not None
        return found

    def column(self, name: str, rows: Rows | None = None) -> Any:
        """A column as anndata reads it, or some rows of it. Raises FormatError if it has not one value per row.

        Of labels and of plain numbers, only these rows are in memory if the store has a mirror.
        """
        if self.is_categorical(name):
            categories = self.categories(name)
            codes = self._codes(name, len(categories), rows)
            ordered = self.of_categorical(name).ordered
            if ordered is None:
                raise self.store.damaged(self.path(name), "its metadata do not say whether its categories are ordered")
            return pd.Categorical.from_codes(codes, categories, ordered=bool(ordered))
        if (column := self._plain(name)) is None:
            column = self.store.element(self.path(name))
            self._require_shape(name, getattr(column, "shape", None))
        return column if rows is None else column[rows]

    def numbers(self, name: str) -> ObsColumn:
        """A column as numbers, memory-mapped if the store has a mirror and the numbers are stored as such.

        Strings are coded in windows, so that a window of them is in memory at a time.
        """
        if self.kind(name) == "strings":
            return self._coded_strings(name)
        if self.is_categorical(name):
            labels = self._labels(name)
            return ObsColumn(values=self._codes(name, len(labels)), coded=labels)
        if (numbers := self._plain(name)) is not None:
            return ObsColumn(values=numbers)
        return as_numbers(name, self.column(name))

    def categories(self, name: str) -> pd.Index:
        """The categories of a categorical column."""
        path = self.of_categorical(name).categories
        return self._indexed(path, self.store.element(path))

    def _indexed(self, path: str, stored: Any) -> pd.Index:
        try:
            return pd.Categorical.from_codes([], stored).categories
        except (ValueError, TypeError) as error:
            raise self.store.damaged(path, str(error)) from error

    def _labels(self, name: str) -> pd.Index | NDArray[Any]:
        """The categories in the form of `as_labels`: distinct strings and integers as an array, without pandas."""
        path = self.of_categorical(name).categories
        stored = self.store.element(path)
        plain = plain_labels(stored)
        return as_labels(self._indexed(path, stored)) if plain is None else plain

    def require_codes(self, name: str, n_categories: int, codes: NDArray[np.integer], rows: int | Rows) -> None:
        """Raises FormatError for a code of no category. `rows` have the codes, or are the first of a run."""
        wrong = np.flatnonzero((codes < -1) | (codes >= n_categories))
        if len(wrong):
            row = rows + int(wrong[0]) if isinstance(rows, int) else int(rows[wrong[0]])
            raise self.store.damaged(
                self.of_categorical(name).codes,
                f"row {row} has the code {codes[wrong[0]]} of {n_categories} categories",
            )

    def whole(self, path: str) -> NDArray[Any]:
        """A whole array of numbers or dates in the stored dtype; memory-mapped if there is a mirror."""
        node = self.store.node(path)
        read = (self.store.window(path, first, stop) for first, stop in _windows_of(node))
        with self.store.reading(path, node):  # the shape may make no sense
            dtype = node.dtype.newbyteorder("=")
            whole = self.store.kept(path, read, shape=node.shape, dtype=dtype)
            if whole is None:
                whole = np.empty(node.shape, dtype)
                for first, stop in _windows_of(node):
                    whole[first:stop] = self.store.window(path, first, stop)
        return whole

    def _plain(self, name: str) -> NDArray[Any] | None:
        """A column that is stored as an array of numbers or dates; None for any other."""
        node = self._node(name)
        if not isinstance(node, zarr.Array) or node.dtype.kind not in NUMBERS + _TIMES:
            return None
        self._require_shape(name, node.shape)
        return self.whole(self.path(name))

    def _codes(self, name: str, n_categories: int, rows: Rows | None = None) -> NDArray[np.integer]:
        """The codes of a categorical column, or of some rows of it, in the stored dtype.

        Raises FormatError for a code without a category. Of some rows, no others are checked.
        """
        path = self.of_categorical(name).codes
        stored = self.store.node(path)
        self._require_shape(name, getattr(stored, "shape", None))
        if stored.dtype.kind not in "iu":
            raise self.store.damaged(path, f"it holds {stored.dtype}")
        codes = self.whole(path)
        if rows is not None:
            codes = codes[rows]
            self.require_codes(name, n_categories, codes, rows)
        elif name not in self._checked or not page_cache.is_mapped(codes):
            for first, stop in _windows_of(stored):
                self.require_codes(name, n_categories, codes[first:stop], first)
                page_cache.release(codes)
            self._checked.add(name)
        return codes

    def _coded_strings(self, name: str) -> ObsColumn:
        node, values, mask = self._node(name), self.path(name), None
        if not isinstance(node, zarr.Array):
            values, mask = f"{values}/values", f"{values}/mask"
            self._require_shape(name, self.store.node(mask).shape)
        array, n_obs = self.store.node(values), self._n_rows
        self._require_shape(name, array.shape)
        chunk = max(1, array.chunks[0])  # a shard may hold the whole column
        step = max(1, _WINDOW_ROWS // chunk) * chunk
        strings = StringCoder(n_obs)
        for start in range(0, n_obs, step):
            missing = None if mask is None else self.store.window(mask, start, start + step)
            strings.add(self.store.window(values, start, start + step), missing)
        return of_strings(strings)

    def _node(self, name: str) -> Any:
        return self.store.node(self.path(name))

    def _require_shape(self, name: str, shape: tuple[int, ...] | None) -> None:
        if shape != (self._n_rows,):
            raise FormatError(
                f"obs column {name!r} of {self.store.location.url} has shape {shape}, but the store has "
                f"{self._n_rows} rows: the store is damaged"
            )


class WholeColumns(StoreColumns):
    """The obs columns of a store with modalities: those of the whole, and `rna:NAME` of the modality rna.

    A column of a modality has the rows of the whole, and a missing value where the modality lacks the row. It is made
    when it is used, from one that is read whole.
    """

    def __init__(self, store: OpenedStore) -> None:
        super().__init__(store)
        self._of = {name: StoreColumns(store, f"mod/{name}/obs") for name in store.modalities}

    def path(self, name: str) -> str:
        found = self.store.modality_of_column(name)
        return super().path(name) if found is None else self._of[found[0]].path(found[1])

    def coded(self, name: str) -> CodedColumn | None:
        found = self.store.modality_of_column(name)
        return super().coded(name) if found is None else self._of[found[0]].coded(found[1])

    def is_categorical(self, name: str) -> bool:
        return self.store.modality_of_column(name) is None and super().is_categorical(name)

    def column(self, name: str, rows: Rows | None = None) -> Any:
        found = self.store.modality_of_column(name)
        if found is None:
            return super().column(name, rows)
        column, row_of = self._of[found[0]].column(found[1]), self.store.rows_of(found[0])
        if row_of is None:
            return column[slice(None) if rows is None else rows]
        row_of = row_of if rows is None else row_of[rows]
        if isinstance(column, np.ndarray) and (row_of < 0).any() and column.dtype.kind in "iubOT":
            column = pd.array(column)  # which can be missing
        return pd.api.extensions.take(column, row_of, allow_fill=True)

    def numbers(self, name: str) -> ObsColumn:
        if self.store.modality_of_column(name) is None:
            return super().numbers(name)
        numbers = as_numbers(name, self.column(name))
        # A copy, because the cache keeps what is memory-mapped under the path of a column of the whole.
        return replace(numbers, values=np.array(numbers.values))


def columns_of(store: OpenedStore) -> StoreColumns:
    """The obs columns and obsm arrays of a store, with those of its modalities."""
    return WholeColumns(store) if store.modalities else StoreColumns(store)


def _windows_of(node: Any) -> Iterator[tuple[int, int]]:
    """The first row of each window of an array, and the row after its last: whole objects, of about 32 MiB."""
    stored = max(1, (node.shards or node.chunks)[0])
    step = max(1, _WINDOW_BYTES // max(1, stored * node.dtype.itemsize * int(np.prod(node.shape[1:])))) * stored
    for first in range(0, node.shape[0], step):
        yield first, min(first + step, node.shape[0])
