"""Large obs columns and obsm arrays, of which a fetch reads only the chunks that hold its rows.

A billion rows have 1 GB of codes in each column, and a fetch needs those of a few hundred blocks. So with a cache, an
array of more than 32 MiB is read chunk by chunk into its file of the mirror (obs_columns.py), which is complete once
all of its rows have been used, or once something needs all of it, such as a condition or a split. Without a cache,
wherever the mirror takes no such file, and when the dataset has many files open for other columns, it is read whole,
like smaller ones, and like strings, nullable columns and dates.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from zloader.caching.mirror import Mirror, MirrorArray, has_array
from zloader.common.concurrent_calls import concurrently
from zloader.common.deferred import pd
from zloader.common.errors import FormatError
from zloader.common.locks import cached_property
from zloader.common.options import FetchOptions
from zloader.common.records import Rows
from zloader.dataset.obs_columns import StoreColumns
from zloader.dataset.opening import OpenedStores
from zloader.dataset.store import OpenedStore
from zloader.reading.column_rows import PagedColumn
from zloader.reading.matrix_parts import MatrixPart
from zloader.selecting.columns import NUMBERS, as_labels, joined_labels
from zloader.storage.decode import Decoder
from zloader.storage.layout import ArrayLayout, MatrixLayout

_MOST_WHOLE = 32 << 20  # bytes, over all stores
_LEAST_OF_STORE = 1 << 20  # bytes per store on average, because each array of a store takes open files
# Per array of a store: the file, its maps and that of its words. Per epoch, and twice in a producer on Ray: a file of
# leases, and one with the credentials for S3.
_OPEN_FILES = 8
_LARGEST_CHUNK = 8 << 20  # bytes: larger ones would delay the first minibatch as much as whole columns do


class PagedColumns:
    """The large obs columns and obsm arrays of some stores, and their mirrors."""

    def __init__(self, opened: OpenedStores, columns: Sequence[StoreColumns]) -> None:
        self._stores, self._columns, self._directory = opened.stores, columns, opened.mirror_directory
        # The arrays of all stores that are kept chunk by chunk, by path; None for a path whose arrays are read whole.
        self.arrays: dict[str, Sequence[MirrorArray] | None] = {}
        self._labels: dict[str, Labels] = {}

    def obs(self, name: str, options: FetchOptions) -> PagedColumn | None:
        """An obs column whose rows are loaded with each fetch; None if it has to be read whole."""
        labels = self._labels_of(name)
        parts = self._parts(labels.path if labels else self._columns[0].path(name), options, kept_as(name))
        if parts is None or labels is None:
            return None if parts is None else PagedColumn(parts=parts)
        return PagedColumn(parts=parts, recode=labels.recode, prepare=lambda: labels.joined)

    def obsm(self, name: str, path: str, options: FetchOptions) -> PagedColumn | None:
        """The obsm array at a path, whose rows are loaded with each fetch; None if it has to be read whole."""
        parts = self._parts(path, options, f"/obsm/{name}")
        return None if parts is None else PagedColumn(parts=parts, row_shape=self._node(path).shape[1:])

    def labels(self, name: str) -> pd.Index | np.dtype[Any] | None:
        """What `ObsColumn.labels` is for a column that is kept chunk by chunk; None for any other. Reads no rows."""
        labels = self._labels_of(name)
        arrays = self._kept(labels.path if labels else self._columns[0].path(name), kept_as(name))
        if arrays is None:
            return None
        return arrays[0].layout.dtype if labels is None else labels.joined

    @cached_property
    def _n_rows(self) -> int:
        return sum(concurrently(lambda store: store.n_obs, self._stores))

    def _labels_of(self, name: str) -> Labels | None:
        if not self._columns[0].is_categorical(name):
            return None
        return self._labels.setdefault(name, Labels(columns=self._columns, name=name))

    def _node(self, path: str) -> Any:
        return self._stores[0].node(path)

    def _parts(self, path: str, options: FetchOptions, joined: str) -> list[MatrixPart] | None:
        arrays = self._kept(path, joined)
        if arrays is None:
            return None
        return [_part(store, array, options) for store, array in zip(self._stores, arrays, strict=True)]

    def _kept(self, path: str, joined: str) -> Sequence[MirrorArray] | None:
        """The arrays at a path, if they are large and kept chunk by chunk; None if they have to be read whole.

        That also holds if the cache has the rows of all stores in one piece, as `joined`.
        """
        if self._directory is None or has_array(self._directory, joined):
            return None
        if path not in self.arrays:
            self.arrays[path] = self._open(path)
        arrays = self.arrays[path]
        return arrays if arrays is not None and all(map(_takes_chunks, arrays)) else None

    def _open(self, path: str) -> Sequence[MirrorArray] | None:
        first = self._node(path)  # arrays of other dtypes or shapes do not fit it, so its rows tell the size
        least = max(_MOST_WHOLE, _LEAST_OF_STORE * len(self._stores))
        if (
            not isinstance(first, zarr.Array)
            or self._n_rows * math.prod(first.shape[1:]) * first.dtype.itemsize <= least
        ):
            return None
        kinds = "i" if path.endswith("/codes") or "categories" in first.attrs else NUMBERS
        layouts = [_layout(store, path, kinds) for store in self._stores]
        known = [layout for layout in layouts if layout is not None]
        if len(known) < len(layouts) or len({layout.dtype for layout in known}) > 1:
            return None
        n_open = sum(len(arrays) for arrays in self.arrays.values() if arrays is not None)
        if _OPEN_FILES * (n_open + len(known)) > _most_open_files():
            return None
        opened = [store.mirrored(layout) for store, layout in zip(self._stores, known, strict=True)]
        arrays = [array for array in opened if array is not None]
        return arrays if len(arrays) == len(opened) else None


@dataclass(frozen=True, kw_only=True)
class Labels:
    """The labels of a column of codes, read from all stores when they are first needed."""

    columns: Sequence[StoreColumns]
    name: str

    @property
    def path(self) -> str:
        """The path of the codes in each store."""
        return self.columns[0].of_categorical(self.name).codes

    @cached_property
    def joined(self) -> pd.Index:
        """The labels of all stores, as `selecting.columns.joined` joins them."""
        return self._of_stores[0] if len(self.columns) == 1 else self._joint[0]

    def recode(self, number: int, rows: Rows, codes: NDArray[Any]) -> NDArray[Any]:
        """Codes of store `number` as codes of all stores. Raises FormatError for a code without a label."""
        first = sum(columns.store.n_obs for columns in self.columns[:number])
        self.columns[number].require_codes(self.name, len(self._of_stores[number]), codes, rows - first)
        return codes if len(self.columns) == 1 else self._joint[1][number][codes]

    @cached_property
    def _of_stores(self) -> list[pd.Index]:
        return concurrently(lambda columns: as_labels(columns.categories(self.name)), self.columns)

    @cached_property
    def _joint(self) -> tuple[pd.Index, list[NDArray[np.integer]]]:
        return joined_labels([labels.tolist() for labels in self._of_stores], ordered=False)


def kept_as(name: str) -> str:
    """The key in the cache of what is kept of an obs column of all stores. Versions that misread some used `/obs/`."""
    return f"/obs-2/{name}"


def _most_open_files() -> float:
    """How many files the large columns of a dataset may keep open: a quarter of those that a process may have."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if most == resource.RLIM_INFINITY else most / 4


def _takes_chunks(array: MirrorArray) -> bool:
    """Whether the mirror has all chunks of an array or still accepts them."""
    return array.writable or array.n_present == array.layout.n_chunks


def _layout(store: OpenedStore, path: str, kinds: str) -> ArrayLayout | None:
    """The layout of an array with one row per row of a store; None if it cannot be read chunk by chunk."""
    try:
        node = store.node(path)
        if not isinstance(node, zarr.Array) or node.shape[:1] != (store.rows_at(path),) or node.dtype.kind not in kinds:
            return None
        if path.startswith("obs/") and node.ndim > 1:
            return None
        layout = store.array_layout(path)
        Decoder(layout)
    except FormatError:  # reading it whole raises the error, or succeeds
        return None
    fills = not layout.absent_is_fill or isinstance(layout.fill_value, (bool, int, float, np.generic))
    return layout if fills and layout.chunk_elements * layout.dtype.itemsize <= _LARGEST_CHUNK else None


def _part(store: OpenedStore, array: MirrorArray, options: FetchOptions) -> MatrixPart:
    layout = array.layout
    width = int(np.prod(store.node(layout.path).shape[1:]))
    n_rows = store.rows_at(layout.path)
    matrix = MatrixLayout(path=layout.path, n_rows=n_rows, n_genes=width, values=layout, genes=None)
    assert store.mirror_directory is not None
    return MatrixPart(
        url=store.location.url,
        matrix=matrix,
        indptr=None,
        object_sizes=store.object_sizes(),
        source=store.source(options),
        mirror=Mirror(store.mirror_directory, [array]),
        row_of=store.row_of(layout.path),
    )
