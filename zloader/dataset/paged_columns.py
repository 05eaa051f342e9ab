"""Large obs columns and obsm arrays, of which a fetch reads only the chunks that hold its rows.

A billion rows have 1 GB of codes in each column, and a fetch needs those of a few hundred blocks. So with a cache, an
array of more than 32 MiB is kept chunk by chunk in a file of the mirror, and is complete there once all of its rows
have been used, or once something needs all of it, such as a condition or a split. Without a cache, wherever the mirror
takes no such file, and when the dataset has many files open for other columns, it is read whole, like smaller ones.

Columns of strings, nullable columns and dates are read whole, too: labels and dtypes depend on all of their values.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import zarr
from numpy.typing import NDArray

from zloader.caching.cached_files import is_saved
from zloader.caching.mirror import Mirror, MirrorArray, has_array, open_array
from zloader.common.concurrent_calls import concurrently
from zloader.common.errors import FormatError
from zloader.common.options import FetchOptions
from zloader.common.records import Rows
from zloader.dataset.obs_columns import is_categorical, read_categories, require_codes
from zloader.dataset.opening import OpenedStores
from zloader.dataset.store import OpenedStore
from zloader.reading.column_rows import PagedColumn
from zloader.reading.matrix_parts import MatrixPart
from zloader.selecting.columns import NUMBERS, as_labels, joined_labels
from zloader.storage.decode import Decoder
from zloader.storage.layout import ArrayLayout, MatrixLayout

_MOST_WHOLE = 32 << 20  # bytes, over all stores
_WIDEST = 8  # bytes of a value of an obs column
_LEAST_OF_STORE = 1 << 20  # bytes per store on average, because each array of a store takes open files
# Per array of a store: the file, its maps and that of its words. Per epoch, and twice in a producer on Ray: a file of
# leases, and one with the credentials for S3.
_OPEN_FILES = 8
_LARGEST_CHUNK = 8 << 20  # bytes: larger ones would delay the first minibatch as much as whole columns do


class PagedColumns:
    """The large obs columns and obsm arrays of some stores, and their mirrors."""

    def __init__(self, opened: OpenedStores) -> None:
        self._stores, self._directory = opened.stores, opened.mirror_directory
        self._n_arrays = 0  # of all stores, that are open
        self._opened: dict[str, bool] = {}  # whether an array is kept chunk by chunk, by path
        self._labels: dict[str, Labels] = {}

    def obs(self, name: str, options: FetchOptions) -> PagedColumn | None:
        """An obs column whose rows are loaded with each fetch; None if it is cached whole or has to be read whole."""
        path = None if self._is_whole(f"/obs/{name}") else self.keep_obs(name)
        if path is None:
            return None
        labels, parts = self._labels.get(name), self._parts(path, options)
        if labels is None:
            return PagedColumn(parts=parts)
        return PagedColumn(parts=parts, recode=labels.recode, prepare=lambda: labels.joined)

    def obsm(self, name: str, options: FetchOptions) -> PagedColumn | None:
        """An obsm array whose rows are loaded with each fetch; None if it is cached whole or has to be read whole."""
        path = f"obsm/{name}"
        if self._is_whole(path) or not self.keep(path):
            return None
        return PagedColumn(parts=self._parts(path, options), row_shape=self._stores[0].node(path).shape[1:])

    def labels(self, name: str) -> pd.Index | np.dtype[Any] | None:
        """What `ObsColumn.labels` is for a column that is kept chunk by chunk; None for any other. Reads no rows."""
        path = None if self._is_whole(f"/obs/{name}") else self.keep_obs(name)
        if path is None:
            return None
        labels = self._labels.get(name)
        return self._stores[0].paged[path].layout.dtype if labels is None else labels.joined

    def keep_obs(self, name: str) -> str | None:
        """Keeps the codes or numbers of an obs column as `keep` does. Returns their path, or None if it does not."""
        if self._directory is None or (self._n_rows * _WIDEST <= _MOST_WHOLE and not self._offline):
            return None
        if not is_categorical(self._stores[0].node(f"obs/{name}")):
            return f"obs/{name}" if self.keep(f"obs/{name}") else None
        path = f"obs/{name}/codes"
        if not self.keep(path, "i"):
            return None
        self._labels.setdefault(name, Labels(stores=self._stores, name=name))
        return path

    def completed_codes(self, name: str) -> NDArray[Any] | None:
        """The codes of an obs column of a single store, if they are kept chunk by chunk. Does not check them."""
        path = self.keep_obs(name)
        return None if path is None or len(self._stores) > 1 else self._stores[0].completed(path)

    def _is_whole(self, saved: str) -> bool:
        """Whether the cache has an array of all rows in one piece."""
        return self._directory is not None and is_saved(self._directory, saved)

    @property
    def _offline(self) -> bool:
        return self._stores[0].offline

    @cached_property
    def _n_rows(self) -> int:
        return sum(concurrently(lambda store: store.n_obs, self._stores))

    def keep(self, path: str, kinds: str = NUMBERS) -> bool:
        """Keeps a large array chunk by chunk from now on, if its dtype is of these kinds; returns whether it does.

        `OpenedStore.column` then reads only the chunks that are missing.
        """
        if path not in self._opened:
            self._opened[path] = self._open_offline(path, kinds) if self._offline else self._open(path, kinds)
        return self._opened[path] and all(_takes_chunks(store.paged[path]) for store in self._stores)

    def _open(self, path: str, kinds: str) -> bool:
        if self._directory is None or all(_is_saved(store, path) for store in self._stores):
            return False
        layouts = [_layout(store, path, kinds) for store in self._stores]
        known = [layout for layout in layouts if layout is not None]
        least = max(_MOST_WHOLE, _LEAST_OF_STORE * len(layouts))
        if len(known) < len(layouts) or len({layout.dtype for layout in known}) > 1:
            return False
        if sum(layout.n_elements * layout.dtype.itemsize for layout in known) <= least:
            return False
        if _OPEN_FILES * (self._n_arrays + len(known)) > _most_open_files():
            return False
        opened = [_array(store, layout) for store, layout in zip(self._stores, known, strict=True)]
        arrays = [array for array in opened if array is not None]
        if len(arrays) < len(opened):
            return False
        self._n_arrays += len(arrays)
        for store, array in zip(self._stores, arrays, strict=True):
            store.paged[path] = array
        return True

    def _open_offline(self, path: str, kinds: str) -> bool:
        """Opens what the mirrors have, since other stores may have been opened with these when they were filled.

        Returns whether all of them have the array chunk by chunk, in the same dtype.
        """
        arrays = []
        for store in self._stores:
            directory, layout = store.mirror_directory, _layout(store, path, kinds)
            if directory is None or layout is None or is_saved(directory, path) or not has_array(directory, path):
                continue
            array = open_array(directory, layout)
            if array is not None:
                store.paged[path] = array
                arrays.append(array)
        return len(arrays) == len(self._stores) and len({array.layout.dtype for array in arrays}) == 1

    def _parts(self, path: str, options: FetchOptions) -> list[MatrixPart]:
        return [_part(store, path, options) for store in self._stores]


@dataclass(frozen=True, kw_only=True)
class Labels:
    """The labels of a column of codes, read from all stores when they are first needed."""

    stores: Sequence[OpenedStore]
    name: str

    @cached_property
    def joined(self) -> pd.Index:
        """The labels of all stores, as `selecting.columns.joined` joins them."""
        if len(self.stores) == 1:
            return self._of_stores[0]
        return joined_labels([labels.tolist() for labels in self._of_stores], ordered=False)[0]

    def recode(self, number: int, rows: Rows, codes: NDArray[Any]) -> NDArray[Any]:
        """Codes of store `number` as codes of all stores. Raises FormatError for a code without a label."""
        store, n_labels = self.stores[number], len(self._of_stores[number])
        first = sum(store.n_obs for store in self.stores[:number])
        require_codes(store, f"obs/{self.name}/codes", n_labels, codes, rows - first)
        return codes if len(self.stores) == 1 else self._tables[number][codes]

    @cached_property
    def _of_stores(self) -> list[pd.Index]:
        return concurrently(lambda store: as_labels(read_categories(store, self.name)), self.stores)

    @cached_property
    def _tables(self) -> list[NDArray[np.integer]]:
        return joined_labels([labels.tolist() for labels in self._of_stores], ordered=False)[1]


def _most_open_files() -> float:
    """How many files the large columns of a dataset may keep open: a quarter of those that a process may have."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if most == resource.RLIM_INFINITY else most / 4


def _is_saved(store: OpenedStore, path: str) -> bool:
    """Whether the mirror of a store has an array in one piece."""
    return store.mirror_directory is not None and is_saved(store.mirror_directory, path)


def _array(store: OpenedStore, layout: ArrayLayout) -> MirrorArray | None:
    return None if store.mirror_directory is None else open_array(store.mirror_directory, layout)


def _takes_chunks(array: MirrorArray) -> bool:
    """Whether the mirror has all chunks of an array or still accepts them."""
    return array.writable or array.n_present == array.layout.n_chunks


def _layout(store: OpenedStore, path: str, kinds: str) -> ArrayLayout | None:
    """The layout of an array with one row per row of a store; None if it cannot be read chunk by chunk."""
    try:
        node = store.node(path)
        if not isinstance(node, zarr.Array) or node.shape[:1] != (store.n_obs,) or node.dtype.kind not in kinds:
            return None
        if path.startswith("obs/") and node.ndim > 1:
            return None
        layout = store.array_layout(path)
        Decoder(layout)
    except FormatError:  # reading it whole raises the error, or succeeds
        return None
    fills = not layout.absent_is_fill or isinstance(layout.fill_value, (bool, int, float, np.generic))
    return layout if fills and layout.chunk_elements * layout.dtype.itemsize <= _LARGEST_CHUNK else None


def _part(store: OpenedStore, path: str, options: FetchOptions) -> MatrixPart:
    array, width = store.paged[path], int(np.prod(store.node(path).shape[1:]))
    matrix = MatrixLayout(path=path, n_rows=store.n_obs, n_genes=width, values=array.layout, genes=None)
    assert store.mirror_directory is not None
    return MatrixPart(
        url=store.location.url,
        matrix=matrix,
        indptr=None,
        object_sizes=store.object_sizes(),
        source=store.source(options),
        mirror=Mirror(store.mirror_directory, [array]),
    )
