"""The obsm arrays of one or several stores, and of their modalities, over all rows.

An array of the modality rna is named `rna:NAME`. Rows that the modality lacks are zeros in it, as they are in x, and
`present` tells them apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.caching.kept import has_array, kept_array
from zloader.common.concurrent_calls import concurrently
from zloader.common.errors import FormatError, ZloaderError
from zloader.common.locks import cached_property
from zloader.common.options import FetchOptions
from zloader.common.records import Rows
from zloader.dataset.opening import OpenedStores
from zloader.dataset.store import OpenedStore
from zloader.reading.fetch import read_at_once
from zloader.reading.forms import Form
from zloader.reading.recipe import PagedColumn, Recipe
from zloader.selecting.columns import require_exact, unfit_obsm
from zloader.storage.decode import Decoder
from zloader.storage.layout import MatrixLayout

# Read whole, in bytes over all stores. More than 32 stores may have 1 MiB each, because each array of a store takes
# open files.
_MOST_WHOLE, _STORES = 32 << 20, 32
_LARGEST_CHUNK = 8 << 20  # bytes: larger ones would delay the first minibatch as much as the whole array does


class ObsmArrays:
    """The obsm entries that every store has."""

    def __init__(self, opened: OpenedStores) -> None:
        self._opened, self._stores, self._directory = opened, opened.stores, opened.mirror_directory
        self._arrays: dict[str, NDArray[Any]] = {}

    @cached_property
    def names(self) -> list[str]:
        """Their names: sorted, and then those of modalities."""
        return self._opened.in_all(lambda store: store.obsm_paths)

    def modality_of(self, name: str) -> str | None:
        """The modality that an entry belongs to; None for one of the whole."""
        return self._stores[0].modality_at(self._path(name))

    def _path(self, name: str) -> str:
        return self._stores[0].obsm_paths[name]

    def whole(self, name: str) -> NDArray[Any]:
        """One array of all rows, rows x dims, in the stored dtype; over several stores, in their common dtype.

        Raises MissingColumnError, OptionError for an entry that is not an array of numbers, and FormatError if the
        arrays of the stores do not fit together.
        """
        if not isinstance(name, str) or name not in self._arrays:
            self.require([name])
            self._arrays[name] = self._read(name)
            self._arrays[name].flags.writeable = False  # as with a cache: later minibatches are made of it
        return self._arrays[name]

    def rows(self, name: str, rows: Rows) -> NDArray[Any]:
        """Some rows of an array, in the order given. Of a large one, no others are read."""
        paged = self.paged(name, FetchOptions())
        if paged is None:
            return self.whole(name)[rows]
        recipe = Recipe(x={}, form=Form(dense=True, dtype=None), paged={name: paged})
        return read_at_once(recipe, rows, FetchOptions()).obsm[name]

    def paged(self, name: str, options: FetchOptions) -> PagedColumn | None:
        """A large array whose rows are loaded with each fetch. None for any other, and if it was read whole."""
        if name in self._arrays:
            return None
        self.require([name])
        path, nodes = self._path(name), [store.node(self._path(name)) for store in self._stores]
        most = _MOST_WHOLE * max(1, len(nodes) / _STORES)
        is_small = sum(math.prod(node.shape) * node.dtype.itemsize for node in nodes) <= most
        if self._directory is None or is_small or has_array(self._directory, f"/obsm/{name}"):
            return None
        matrices = [_matrix(store, path) for store in self._stores]
        known = [matrix for matrix in matrices if matrix is not None]
        if len(known) < len(matrices) or len({matrix.values.dtype for matrix in known}) > 1:
            return None
        parts = [store.part(matrix, options) for store, matrix in zip(self._stores, known, strict=True)]
        return PagedColumn(parts=parts, row_shape=nodes[0].shape[1:])

    def all_paged(self, names: Sequence[str], options: FetchOptions) -> dict[str, PagedColumn]:
        """Those of some arrays whose rows are loaded with each fetch."""
        return {name: paged for name in names if (paged := self.paged(name, options)) is not None}

    def _read(self, name: str) -> NDArray[Any]:
        """The arrays of all stores as one array, memory-mapped if there is a cache."""
        path = self._path(name)
        if len(self._stores) == 1 and self._stores[0].row_of(path) is None:
            return self._stores[0].whole(path)
        nodes = [store.node(path) for store in self._stores]

        def of_stores() -> Iterator[NDArray[Any]]:
            arrays = concurrently(lambda store: _over_all_rows(store, path), self._stores)
            require_exact(f"obsm/{name}", arrays)
            yield from arrays

        return kept_array(
            self._directory,
            f"/obsm/{name}",
            of_stores,
            shape=(sum(store.n_obs for store in self._stores), *nodes[0].shape[1:]),
            dtype=np.result_type(*(node.dtype.newbyteorder("=") for node in nodes)),
        )

    def require(self, names: Sequence[str]) -> None:
        """Raises the error that `whole` would raise for the first unusable name, from metadata alone."""
        for name in names:
            self._opened.require_in_all(f"obsm {name!r}", name, lambda store: store.obsm_paths)
            if (unfit := self._unfit(name)) is not None:
                raise unfit

    def row_bytes(self) -> int:
        """The bytes per row of `usable` together."""
        nodes = (self._stores[0].node(self._path(name)) for name in self.usable)
        return sum(math.prod(node.shape[1:]) * node.dtype.itemsize for node in nodes)

    @property
    def usable(self) -> list[str]:
        """The names that minibatches can carry: arrays of numbers, alike in all stores."""
        return [name for name in self.names if self._unfit(name) is None]

    def _unfit(self, name: str) -> ZloaderError | None:
        path = self._path(name)
        try:
            nodes = [store.node(path) for store in self._stores]
            n_rows = [store.rows_at(path) for store in self._stores]
        except FormatError as error:
            return error
        return unfit_obsm(name, nodes, n_rows, self._opened.urls)


def _matrix(store: OpenedStore, path: str) -> MatrixLayout | None:
    """An array as a dense matrix; None if the rows that a fetch needs cannot be read alone, or are in its mirror."""
    directory = store.mirror_directory
    if directory is None or has_array(directory, path):
        return None
    try:
        layout, shape = store.array_layout(path), store.node(path).shape
        Decoder(layout)
    except FormatError:  # reading it whole raises the error, or succeeds
        return None
    if layout.band_elements * layout.dtype.itemsize > _LARGEST_CHUNK:
        return None
    n_genes = math.prod(shape[1:])
    return MatrixLayout(path=path, n_rows=store.rows_at(path), n_genes=n_genes, values=layout, genes=None)


def _over_all_rows(store: OpenedStore, path: str) -> NDArray[Any]:
    """An array of a store, with zeros in the rows that its modality lacks."""
    array, row_of = store.whole(path), store.row_of(path)
    if row_of is None:
        return array
    found = np.zeros((len(row_of), *array.shape[1:]), array.dtype)
    has = row_of >= 0
    found[has] = array[row_of[has]]
    return found
