"""The matrices of one or several stores, and the genes that are their columns.

The rows of the stores follow one another, and their genes are the same. Each store keeps its own indptr and mirror, so
a row is read from the store that has it.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from zloader.caching.directory import cache_bytes
from zloader.caching.mirror import contents_of
from zloader.caching.place import place_of
from zloader.common.errors import FormatError, OptionError
from zloader.common.options import FetchOptions
from zloader.common.records import CacheStatistics, CsrArrays, Rows
from zloader.dataset.opening import OpenedStores, concurrently
from zloader.order.plan import Fetch
from zloader.reading.fetch import FetchScheduler, Recipe
from zloader.reading.matrix_parts import MatrixPart
from zloader.reading.resources import BufferPool
from zloader.selecting.genes import ChosenGenes, Genes, choose_genes
from zloader.storage.layout import MatrixLayout

if TYPE_CHECKING:
    import scipy.sparse

X = CsrArrays | NDArray[np.generic]


class Matrices:
    """X, raw/X and the layers over the rows of all stores, one store after another."""

    def __init__(self, opened: OpenedStores) -> None:
        self._opened = opened
        self._stores = opened.stores

    @property
    def names(self) -> list[str]:
        """The values that `x` may take: X, raw/X and the layers that every store has."""
        first, *others = (store.matrix_names for store in self._stores)
        return [name for name in first if all(name in names for names in others)]

    @cached_property
    def var_names(self) -> pd.Index:
        """Gene names, in the order of the columns."""
        return self._stores[0].names("var")

    @cached_property
    def var(self) -> pd.DataFrame:
        """The var frame; of several stores, that of the first."""
        return self._stores[0].element("var")

    def var_of(self, x: str, genes: ChosenGenes | None = None) -> pd.DataFrame:
        """The var frame of a matrix: one row per column of the matrix, or per chosen gene."""
        var = self._stores[0].element("raw/var") if x.startswith("raw/") else self.var
        return var if genes is None else var.iloc[genes.positions]

    def choose_genes(self, genes: Genes, matrix: MatrixLayout) -> ChosenGenes:
        """The columns of a matrix that `genes` (names, positions or a mask) selects. Raises OptionError."""
        frame = "raw/var" if matrix.path.startswith("raw/") else "var"
        return choose_genes(
            genes,
            n_stored=matrix.n_genes,
            names=lambda: self._stores[0].names(frame),
            where=f"{frame} of {self._stores[0].location.url}",
        )

    def require_same_genes(self, frame: str) -> None:
        """Raises FormatError, which names the first difference, if `"var"` or `"raw/var"` differs between stores."""
        if len(self._stores) == 1:
            return
        first, *others = concurrently(lambda store: store.names(frame), self._stores)
        for store, genes in zip(self._stores[1:], others, strict=True):
            if genes.equals(first):
                continue
            n_both = min(len(first), len(genes))
            at = int(np.argmax(np.append(first[:n_both] != genes[:n_both], True)))
            here, there = (repr(names[at]) if at < len(names) else "missing" for names in (genes, first))
            raise FormatError(
                f"gene {at} of {frame} is {here} in {store.location.url}, but {there} in "
                f"{self._stores[0].location.url}: stores opened together must have the same genes in the same order. "
                "Run 'zloader convert' on all of them: it joins their genes"
            )

    def layouts(self, name: str) -> list[MatrixLayout]:
        """How each store lays out a matrix. Raises FormatError if it cannot be read, or does not fit obs and var."""
        layouts = concurrently(lambda store: store.matrix(name), self._stores)
        for store, layout in zip(self._stores, layouts, strict=True):
            var = "raw/var" if name.startswith("raw/") else "var"
            expected = store.n_obs, store.length(var)
            if (layout.n_rows, layout.n_genes) != expected:
                raise FormatError(
                    f"{name} of {store.location.url} has {layout.n_rows} rows and {layout.n_genes} genes, but "
                    f"{expected[0]} and {expected[1]} are expected: the store is damaged. Convert it again"
                )
        if name.startswith("raw/"):
            self.require_same_genes("raw/var")
        return layouts

    def parts(self, x: str | None, options: FetchOptions) -> list[MatrixPart]:
        """Each store's part of the matrix `x`, as a Recipe takes it. An empty list for None."""
        if x is None:
            return []
        pairs = list(zip(self._stores, self.layouts(x), strict=True))
        return concurrently(lambda pair: pair[0].part(pair[1], options), pairs)

    def cache_statistics(self, x: str) -> CacheStatistics:
        """How much of a matrix is in the cache now. Raises OptionError without a usable cache."""
        cache = self._opened.cache
        if cache is None:
            raise OptionError("the dataset has no cache: open it with cache=")
        pairs = list(zip(self._stores, self.layouts(x), strict=True))
        mirrors = concurrently(lambda pair: pair[0].mirror(pair[1]), pairs)
        if None in mirrors:
            raise OptionError(f"the mirror of {self._opened.url} in {cache.directory} cannot be used (see the warning)")
        cached = contents_of(array for mirror in mirrors if mirror is not None for array in mirror.arrays.values())
        place = place_of(cache.directory)
        return CacheStatistics(
            directory=place,
            chunks=cached.chunks,
            chunks_held=cached.chunks_held,
            bytes_in_all=cached.bytes_in_all,
            bytes_held=cached.bytes_held,
            allocated_bytes=cache_bytes(place),
            max_bytes=None if cache.max_bytes is None else cache.most,
            full=cached.full,
        )

    def read_rows(self, rows: Rows, *, x: str, options: FetchOptions) -> X:
        """The values of some rows, in the order given, read as a Loader reads them.

        Dense if the matrix is dense in every store, else CSR. The dtype is the one from before conversion, except that
        float16 becomes float32, because SciPy and the compiled loops do not compute with float16.
        """
        parts = self.parts(x, options)
        dtypes = [store.original_dtype(part.matrix) for store, part in zip(self._stores, parts, strict=True)]
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


def as_scipy(x: CsrArrays) -> scipy.sparse.csr_matrix:
    """The rows as a SciPy CSR matrix, without a copy."""
    # Imported here because minibatches of tensors do not need it.
    import scipy.sparse

    return scipy.sparse.csr_matrix((x.values, x.indices, x.indptr), shape=(len(x.indptr) - 1, x.n_genes))
