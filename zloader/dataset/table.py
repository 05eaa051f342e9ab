"""The matrices, genes and values of one or several stores as one table of rows.

The rows of the stores follow one another; their genes are the same. Each store keeps its own indptr and mirror.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse
from numpy.typing import NDArray

from zloader.access.location import Location
from zloader.access.stored_objects import StoredObject
from zloader.caching.directory import cache_bytes
from zloader.caching.mirror import holding
from zloader.common.errors import FormatError, OptionError
from zloader.common.options import FetchOptions
from zloader.common.records import CacheStatistics, CsrArrays, MinibatchArrays, Rows
from zloader.dataset.annotated import Annotated, each
from zloader.dataset.store import OpenedStore
from zloader.order.plan import Fetch
from zloader.order.sampling import as_rows
from zloader.reading.fetch import FetchScheduler, Recipe
from zloader.reading.matrix_parts import MatrixPart
from zloader.reading.resources import BufferPool
from zloader.selecting.genes import ChosenGenes, Genes, choose_genes
from zloader.storage.layout import MatrixLayout

X = CsrArrays | NDArray[np.generic]


class Table(Annotated):
    """What there is of a dataset and of a view of it: shape, var, matrices, and rows by their numbers."""

    _locations: Sequence[Location]

    def __len__(self) -> int:
        return self.n_obs

    @property
    def url(self) -> str:
        """What was opened, for messages."""
        more = f" and {len(self._locations) - 1} more" if len(self._locations) > 1 else ""
        stores = f" ({len(self.stores)} stores)" if len(self.stores) > 1 else ""
        return f"{self._locations[0].url}{more}{stores}"

    @property
    def store(self) -> OpenedStore:
        """The one store of the dataset. Raises OptionError where there are several."""
        if len(self.stores) > 1:
            raise OptionError(
                f"{self.url}: this takes one store. Open one of them, such as {self.stores[0].location.url}"
            )
        return self.stores[0]

    @property
    def location(self) -> Location:
        """Where the one store is."""
        return self.store.location

    @property
    def objects(self) -> dict[str, StoredObject]:
        """The objects of the one store by key, as they were listed."""
        return self.store.objects

    @property
    def root(self) -> Any:
        """The root zarr group of the one store."""
        return self.store.root

    def matrix(self, name: str = "X") -> MatrixLayout:
        """How a matrix of the one store is stored; raises FormatError when it cannot be read."""
        return self.store.matrix(name)

    def indptr(self, matrix: MatrixLayout) -> NDArray[np.integer] | None:
        """First element of every row of a matrix of the one store; None for a dense one."""
        return self.store.indptr(matrix)

    def object_sizes(self) -> dict[str, int]:
        """Bytes of each object of the one store by key."""
        return self.store.object_sizes()

    @cached_property
    def n_vars(self) -> int:
        """Genes."""
        return self.stores[0].n_vars

    @cached_property
    def var_names(self) -> pd.Index:
        """Gene names, in the order of x's columns."""
        return self.stores[0].names("var")

    @cached_property
    def var(self) -> pd.DataFrame:
        """The whole var frame; of several stores, that of the first."""
        return self.stores[0].element("var")

    def var_of(self, x: str, genes: ChosenGenes | None = None) -> pd.DataFrame:
        """The var frame of a matrix: a row for each of its columns, or for those chosen."""
        var = self.stores[0].element("raw/var") if x.startswith("raw/") else self.var
        return var if genes is None else var.iloc[genes.positions]

    def choose_genes(self, genes: Genes, matrix: MatrixLayout) -> ChosenGenes:
        """What `genes` (names, positions or a mask) chooses of the columns of a matrix. Raises OptionError."""
        frame = "raw/var" if matrix.path.startswith("raw/") else "var"
        return choose_genes(
            genes,
            n_stored=matrix.n_genes,
            names=lambda: self.stores[0].names(frame),
            where=f"{frame} of {self.stores[0].location.url}",
        )

    def _require_same_genes(self, frame: str) -> None:
        """Raises FormatError, which names the first difference, where `"var"` or `"raw/var"` of two stores differ."""
        if len(self.stores) == 1:
            return
        first, *others = each(lambda store: store.names(frame), self.stores)
        for store, genes in zip(self.stores[1:], others, strict=True):
            if genes.equals(first):
                continue
            n_both = min(len(first), len(genes))
            at = int(np.argmax(np.append(first[:n_both] != genes[:n_both], True)))
            here, there = (repr(names[at]) if at < len(names) else "missing" for names in (genes, first))
            raise FormatError(
                f"gene {at} of {frame} is {here} in {store.location.url}, but {there} in "
                f"{self.stores[0].location.url}: stores opened together must have the same genes in the same order. "
                "Run 'zloader convert' on all of them: it joins their genes"
            )

    @property
    def matrix_names(self) -> list[str]:
        """What `x` may name: X, raw/X and the layers that every store has."""
        first, *others = (store.matrix_names for store in self.stores)
        return [name for name in first if all(name in names for names in others)]

    def matrices(self, name: str) -> list[MatrixLayout]:
        """How a matrix lies in each store. Raises FormatError when it cannot be read, or does not fit obs and var."""
        matrices = each(lambda store: store.matrix(name), self.stores)
        for store, matrix in zip(self.stores, matrices, strict=True):
            var = "raw/var" if name.startswith("raw/") else "var"
            expected = store.n_obs, store.length(var)
            if (matrix.n_rows, matrix.n_genes) != expected:
                raise FormatError(
                    f"{name} of {store.location.url} has {matrix.n_rows} rows and {matrix.n_genes} genes, but "
                    f"{expected[0]} and {expected[1]} are expected: the store is damaged. Convert it again"
                )
        if name.startswith("raw/"):
            self._require_same_genes("raw/var")
        return matrices

    def parts(self, x: str | None, options: FetchOptions) -> list[MatrixPart]:
        """What a Recipe needs of the matrix `x`; nothing for None."""
        if x is None:
            return []
        matrices = zip(self.stores, self.matrices(x), strict=True)
        return each(lambda pair: pair[0].part(pair[1], options), list(matrices))

    def cache_statistics(self, x: str = "X") -> CacheStatistics:
        """What the cache holds of a matrix, now. Raises OptionError where there is no cache, or none can be used."""
        if self.cache is None:
            raise OptionError("the dataset has no cache: open it with cache=")
        matrices = zip(self.stores, self.matrices(x), strict=True)
        mirrors = each(lambda pair: pair[0].mirror(pair[1]), list(matrices))
        if None in mirrors:
            raise OptionError(f"the mirror of {self.url} in {self.cache.directory} cannot be used (see the warning)")
        held = holding(array for mirror in mirrors if mirror is not None for array in mirror.arrays.values())
        return CacheStatistics(
            directory=self.cache.directory,
            chunks=held.chunks,
            chunks_held=held.chunks_held,
            bytes_in_all=held.bytes_in_all,
            bytes_held=held.bytes_held,
            allocated_bytes=cache_bytes(self.cache.directory),
            max_bytes=None if self.cache.max_bytes is None else self.cache.most,
            full=held.full,
        )

    def take(self, indices: Sequence[int] | NDArray[np.integer]) -> ad.AnnData:
        """Some rows as an AnnData with X, obs, obsm (its arrays) and var, in the order given (repeats allowed)."""
        rows = self._checked_rows(indices)
        x = self.read_rows(rows)
        obs = self.obs().iloc[rows]
        obsm = {name: self.obsm_array(name)[rows] for name in self.obsm_names if self._unfit_obsm(name) is None}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Observation names are not unique")  # a row may be asked for twice
            x = as_scipy(x) if isinstance(x, CsrArrays) else x
            return ad.AnnData(X=x, obs=obs, obsm=obsm, var=self.var.copy())

    def _checked_rows(self, indices: Sequence[int] | NDArray[np.integer]) -> Rows:
        rows = as_rows(indices)
        wrong = rows[(rows < 0) | (rows >= self.n_obs)]
        if len(wrong):
            raise OptionError(f"row {wrong[0]} is not there: the dataset has the rows 0 to {self.n_obs - 1}")
        return rows

    def read_rows(self, rows: Rows, *, x: str = "X", options: FetchOptions | None = None) -> X:
        """The values of some rows in the dtype they were converted from, float16 as float32; the way minibatches go.

        Dense where all stores are, else CSR.
        """
        options = options or FetchOptions()
        parts = self.parts(x, options)
        dtypes = [store.original_dtype(part.matrix) for store, part in zip(self.stores, parts, strict=True)]
        # SciPy's sparse matrices compute with float16 as little as the compiled loops do.
        dtype = "float32" if np.result_type(*dtypes) == np.float16 else np.result_type(*dtypes).name
        recipe = Recipe(
            parts=parts,
            columns=dict,
            dense=all(part.matrix.genes is None for part in parts),
            dtype=dtype,
        )
        scheduler = FetchScheduler(recipe, options, BufferPool())
        fetch = Fetch(number=0, rows=rows, order=np.arange(len(rows)), cuts=np.array([0, len(rows)]))
        (minibatch,) = scheduler.start([fetch], name="zloader-take")
        assert minibatch.x is not None
        return minibatch.x

    def to_anndata(self, minibatch: MinibatchArrays, var: pd.DataFrame) -> ad.AnnData:
        """A minibatch as an AnnData: x, the obs columns it carries (labels, not codes), its obsm, and `var`."""
        obs = pd.DataFrame(index=pd.Index(minibatch.index.astype(str)))
        for name, values in minibatch.obs.items():
            categories = self.obs_column(name).categories
            obs[name] = values if categories is None else pd.Categorical.from_codes(values, categories)
        x = as_scipy(minibatch.x) if isinstance(minibatch.x, CsrArrays) else minibatch.x
        return ad.AnnData(X=x, obs=obs, obsm=minibatch.obsm, var=var)


def as_scipy(x: CsrArrays) -> scipy.sparse.csr_matrix:
    """The same rows as a scipy CSR matrix, without a copy."""
    return scipy.sparse.csr_matrix((x.values, x.indices, x.indptr), shape=(len(x.indptr) - 1, x.n_genes))
