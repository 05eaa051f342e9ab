"""The parts of a dataset, and the properties and methods that come directly from a part.

`dataset.py` adds what concerns rows: selecting, splitting and reading them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from zloader.access.location import Location
from zloader.access.stored_objects import Listing
from zloader.common.errors import OptionError
from zloader.common.options import FetchOptions
from zloader.common.records import CacheStatistics
from zloader.dataset.matrices import Matrices
from zloader.dataset.observations import Observations, ObsFrame
from zloader.dataset.opening import OpenedStores
from zloader.dataset.store import OpenedStore
from zloader.reading.column_rows import PagedColumn
from zloader.reading.forms import Transforming, computing_dtype
from zloader.reading.matrix_parts import MatrixPart
from zloader.selecting.columns import ObsColumn
from zloader.selecting.genes import ChosenGenes, Genes
from zloader.storage.layout import MatrixLayout
from zloader.transforms.transform import Columns, Transform, bound_transforms


class BaseDataset:
    """Opened stores with their obs, obsm and matrices.

    `fingerprint` identifies the stored bytes: it changes when an object of a store changes.
    """

    def __init__(self, opened: OpenedStores, observations: Observations, matrices: Matrices) -> None:
        self._opened, self._observations, self._matrices = opened, observations, matrices
        self.stores = opened.stores
        self.cache = opened.cache
        self.fingerprint = opened.fingerprint

    @property
    def url(self) -> str:
        """The URL that was opened, for messages. Of several, the first, and how many more there are."""
        return self._opened.url

    @property
    def n_obs(self) -> int:
        """The number of rows."""
        return self._observations.n_rows

    @property
    def n_vars(self) -> int:
        """The number of genes."""
        return self._matrices.n_genes("X")

    def n_genes(self, x: str) -> int:
        """The number of columns of the matrix `x`. Only raw/X may have other genes than X."""
        return self._matrices.n_genes(x)

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and genes."""
        return self.n_obs, self.n_vars

    @property
    def var_names(self) -> pd.Index:
        """Gene names, in the order of the columns of X."""
        return self._matrices.axis("var").names

    @property
    def var(self) -> pd.DataFrame:
        """The var frame, as a copy. Of several stores opened without `join`, that of the first.

        With `join`, the columns that are the same in all stores, as in `anndata.concat(..., merge="same")`; a gene that
        a store lacks has a missing value there, which differs from any other.
        """
        return self._matrices.var_of("X").copy()

    def var_of(self, x: str, genes: ChosenGenes | None = None) -> pd.DataFrame:
        """The var frame of the matrix `x`: one row per column of the matrix, or per chosen gene."""
        return self._matrices.var_of(x, genes)

    def columns_of(self, x: str, genes: ChosenGenes | None = None) -> Columns:
        """The genes that are the columns of the matrix `x`, or those chosen, as transforms take them."""
        return Columns(
            n_genes=self.n_genes(x) if genes is None else len(genes),
            find_names=lambda: self._matrices.gene_names(x, genes),
            where=f"{x} of {self.url}",
        )

    def transforming(
        self,
        x: str,
        transforms: Sequence[Transform],
        genes: ChosenGenes | None = None,
        *,
        dense: bool,
        dtype: str,
    ) -> Transforming:
        """How a Recipe makes x with transforms, with seed 0 and in epoch 0.

        If it has `genes`, the Recipe takes the parts of x with all genes. Raises OptionError for transforms that cannot
        be combined with each other, or with the other options.
        """
        columns, computing = self.columns_of(x, genes), computing_dtype(dtype)
        bound = bound_transforms(transforms, columns, dense=dense, dtype=computing, chosen=genes is not None)
        later = genes if any(transform.whole_rows for transform in bound) else None
        return Transforming(transforms=bound, seed=0, epoch=0, dense=dense, dtype=dtype, genes=later)

    def choose_genes(self, genes: Genes, names: Sequence[str]) -> dict[str, ChosenGenes]:
        """The columns that `genes` (names, positions or a mask) selects in each of the matrices `names`.

        If raw/X is one of several matrices, genes are chosen in var, and raw/var must have genes of these names.
        Raises OptionError.
        """
        return self._matrices.choose_genes(genes, names)

    @property
    def obs_columns(self) -> list[str]:
        """Names of the obs columns that every store has."""
        return self._observations.column_names

    @property
    def obs(self) -> ObsFrame:
        """The obs frame, which `obs()` reads, with the obs names as the index.

        `obs(["cell_type"])` is a frame of some columns, and `obs["cell_type"]` one column, a Series. Each call and
        index reads again. Raises MissingColumnError for a column that some store lacks.
        """
        return ObsFrame(self._read_obs, lambda: self.obs_columns)

    def _read_obs(self, columns: Sequence[str] | None) -> pd.DataFrame:
        return self._observations.frame(columns)

    def obs_column(self, column: str) -> ObsColumn:
        """One obs column as numbers: the codes of a categorical or string column, the values of any other.

        Raises MissingColumnError, OptionError for a column that no tensor can hold, such as complex numbers, and
        FormatError if one store has numbers and another has labels.
        """
        return self._observations.column(column)

    def categories(self, column: str) -> pd.Index:
        """The labels of an obs column: code c in a minibatch stands for `categories(column)[c]`, and -1 for no label.

        `categories(column)[codes]` are the labels of an array of codes without -1.

        With several stores, the labels of all stores: sorted if the column holds strings in every store, otherwise in
        order of first appearance. A view has the labels of the whole dataset.
        Raises OptionError for a column of numbers or dates, and the errors of `obs_column`.
        """
        labels = self.labels(column)
        if not isinstance(labels, pd.Index):
            raise OptionError(f"obs column {column!r} holds numbers or dates, not categories")
        return labels

    def labels(self, column: str) -> pd.Index | np.dtype[Any]:
        """The meaning of the numbers of an obs column in minibatches: the labels of its codes, or the stored dtype."""
        return self._observations.labels(column)

    def paged_obs(self, columns: Sequence[str], options: FetchOptions) -> dict[str, PagedColumn]:
        """Those of some obs columns whose rows are loaded with each fetch, because the columns are large."""
        paged = {name: self._observations.paged_column(name, options) for name in columns}
        return {name: column for name, column in paged.items() if column is not None}

    def paged_obsm(self, names: Sequence[str], options: FetchOptions) -> dict[str, PagedColumn]:
        """Those of some obsm arrays whose rows are loaded with each fetch, because the arrays are large."""
        paged = {name: self._observations.paged_array(name, options) for name in names}
        return {name: array for name, array in paged.items() if array is not None}

    def require_obs(self, columns: Sequence[str]) -> None:
        """Raises the error that `obs_column` would raise for the first unusable column, from metadata alone."""
        self._observations.require_usable(columns)

    @property
    def obsm_names(self) -> list[str]:
        """Sorted names of the obsm entries that every store has."""
        return self._observations.array_names

    def obsm_array(self, name: str) -> NDArray[Any]:
        """One obsm array of all rows, rows x dims, in the stored dtype; over several stores, in their common dtype.

        Raises MissingColumnError, OptionError for an entry that is not an array of numbers, and FormatError if the
        arrays of the stores do not fit together.
        """
        return self._observations.array(name)

    def require_obsm(self, names: Sequence[str]) -> None:
        """Raises the error that `obsm_array` would raise for the first unusable name, from metadata alone."""
        self._observations.require_arrays(names)

    def keep_columns(self) -> None:
        """Writes the obs names and every obs column and obsm array that minibatches can carry to the cache."""
        self._observations.cache_all()

    @property
    def matrix_names(self) -> list[str]:
        """The values that `x` may take: X, raw/X and the layers that every store has."""
        return self._matrices.names

    def matrices(self, name: str) -> list[MatrixLayout]:
        """How each store lays out a matrix. Raises FormatError if it cannot be read, or does not fit obs and var."""
        return self._matrices.layouts(name)

    def parts(self, x: str, options: FetchOptions, genes: ChosenGenes | None = None) -> list[MatrixPart]:
        """Each store's part of the matrix `x`, as a Recipe takes it."""
        return self._matrices.parts(x, options, genes)

    def cache_statistics(self, x: str = "X") -> CacheStatistics:
        """How much of a matrix is in the cache now. Raises OptionError without a usable cache."""
        return self._matrices.cache_statistics(x)

    # ---- Only for a dataset of a single store. With several stores, each of these raises OptionError.

    @property
    def store(self) -> OpenedStore:
        """The store."""
        return self._opened.only_store

    @property
    def location(self) -> Location:
        """The location of the store."""
        return self.store.location

    @property
    def objects(self) -> Listing:
        """The stored objects by key, as listed when the store was opened."""
        return self.store.objects

    @property
    def root(self) -> Any:
        """The root zarr group."""
        return self.store.root

    def matrix(self, name: str = "X") -> MatrixLayout:
        """The layout of a matrix. Raises FormatError if it cannot be read."""
        return self.store.matrix(name)

    def indptr(self, matrix: MatrixLayout) -> NDArray[np.integer] | None:
        """The indptr of a CSR matrix (rows + 1, int64); None for a dense matrix."""
        return self.store.indptr(matrix)

    def object_sizes(self) -> Mapping[str, int]:
        """The size in bytes of each stored object, by key."""
        return self.store.object_sizes()
