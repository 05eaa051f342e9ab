"""One or many stores as one table of rows: its shape, obs and var, and rows by their numbers.

The rows of the stores follow one another; their genes are the same. Each store keeps its own indptr and mirror.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar, overload

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse
from numpy.typing import NDArray

from zloader.annotated import Annotated, each
from zloader.caches import cache_bytes
from zloader.columns import ObsColumn
from zloader.errors import FormatError, OptionError, StoreChangedError
from zloader.expressions import Mask
from zloader.fetch import FetchScheduler, Recipe
from zloader.genes import ChosenGenes, Genes, choose_genes
from zloader.layout import MatrixLayout
from zloader.location import Location, StoredObject
from zloader.opened import OpenedStore, open_stores
from zloader.parts import Part
from zloader.plan import Fetch
from zloader.sampling import Sampling
from zloader.terms import Cache, CacheStatistics, CsrArrays, FetchOptions, MinibatchArrays, Rows
from zloader.views import Condition, RowSet, Shares, Within, mask_of, split_rows
from zloader.workshop import BufferPool

X = CsrArrays | NDArray[np.generic]
URL = str | os.PathLike[str]
Item = TypeVar("Item")
Result = TypeVar("Result")


def open_dataset(
    url: URL | Sequence[URL],
    *,
    cache: str | os.PathLike[str] | Cache | None = None,
    storage_options: Mapping[str, Any] | None = None,
    offline: bool = False,
) -> Dataset:
    """Opens the AnnData store at a local path or URL; or several, in this order, as one dataset.

    URLs begin with `file://`, `s3://`, `gs://`, `http://` or `https://`.
    A URL may also be that of an annbatch collection. All stores must have the same genes in the same order.
    `cache` is the directory (or zl.Cache) that keeps mirrors, best on a local NVMe disk; None keeps none.
    `storage_options`, for all URLs, are s3fs's (key, secret, token, anon, profile, endpoint_url, client_kwargs); of
    gcsfs's, token and endpoint_url; of a web server's, headers. A pickle of the dataset carries them.
    `offline` opens what the cache holds of it, without a request; a read of what it does not hold raises ReadError.
    Raises StoreNotFoundError, AccessDeniedError or FormatError; CacheError where there is no mirror to open offline.
    """
    urls = [url] if isinstance(url, str | os.PathLike) else url
    if cache is not None and not isinstance(cache, Cache):
        cache = Cache(directory=Path(cache))
    options = dict(storage_options or {})
    return Dataset([Location(url=os.fspath(url), storage_options=options) for url in urls], cache, offline=offline)


def _reopen(
    locations: Sequence[Location], cache: Cache | None, offline: bool, fingerprints: Mapping[str, str]
) -> Dataset:
    dataset = Dataset(locations, cache, offline=offline)
    found = {store.location.url: store.fingerprint for store in dataset.stores}
    for url in [*found, *fingerprints]:
        if found.get(url) != fingerprints.get(url):
            raise StoreChangedError(f"{url} has changed since it was opened: open it again")
    return dataset


class Dataset(Annotated):
    """One or several stores seen as one table of rows. Made by `open_dataset`."""

    def __init__(self, locations: Sequence[Location], cache: Cache | None, *, offline: bool = False) -> None:
        if not locations:
            raise OptionError("there is nothing to open: give at least one URL")
        self._locations = list(locations)
        self._offline = offline
        opened = each(partial(open_stores, cache=cache, offline=offline), self._locations)
        super().__init__([store for stores in opened for store in stores], cache)
        self._require_same_genes("var")

    def __reduce__(self) -> tuple[Callable[..., Dataset], tuple[Any, ...]]:
        fingerprints = {store.location.url: store.fingerprint for store in self.stores}
        return _reopen, (self._locations, self.cache, self._offline, fingerprints)

    def __repr__(self) -> str:
        return f"<Dataset {self.url}: {self.n_obs} rows x {self.n_vars} genes>"

    def __len__(self) -> int:
        return self.n_obs

    @property
    def url(self) -> str:
        """What was opened, for messages."""
        more = f" and {len(self._locations) - 1} more" if len(self._locations) > 1 else ""
        stores = f" ({len(self.stores)} stores)" if len(self.stores) > 1 else ""
        return f"{self._locations[0].url}{more}{stores}"

    @property
    def whole(self) -> Dataset:
        """The dataset that `minibatch.index` counts the rows of: this one, or of a view the one it is a view of."""
        return self

    def where(self, condition: Condition) -> View:
        """The rows that an expression such as `"cell_type == 'T' and n_counts > 500"` holds for, as a view.

        An expression compares obs columns with constants or with each other (==, !=, <, <=, >, >=, in, not in, joined
        by and, or and not); a row without a value is in no comparison. Or `condition` is a boolean mask over the
        rows, or their numbers, each once: a view has them in ascending order.
        Raises OptionError, or MissingColumnError for an obs column that is not there.
        """
        return self._view(mask_of(condition, self.obs_column, self.n_obs))

    @overload
    def split(
        self, parts: Mapping[str, float], *, by: str | None = None, stratify: str | None = None, seed: int = 0
    ) -> dict[str, View]: ...

    @overload
    def split(
        self, parts: Sequence[float], *, by: str | None = None, stratify: str | None = None, seed: int = 0
    ) -> list[View]: ...

    def split(
        self, parts: Shares, *, by: str | None = None, stratify: str | None = None, seed: int = 0
    ) -> list[View] | dict[str, View]:
        """Views of parts that share no row: fractions of the rows, or numbers of them; of a dict, by their names.

        With `by`, an obs column of labels, whole numbers or booleans, all rows of one label are in one part, and the
        parts are as near to their sizes as dealing out the labels allows, large ones first (rows without a label count
        as one). With `stratify`, such a column too, every part has its share of each label's rows, to a row a part.
        Raises OptionError, also for both at once, and MissingColumnError.
        """
        of_rows = split_rows(parts, self.obs_column, self.n_obs, by=by, stratify=stratify, seed=seed)
        views = [self._view(of_rows == number) for number in range(len(parts))]
        return dict(zip(parts, views, strict=True)) if isinstance(parts, Mapping) else views

    def _view(self, mask: Mask) -> View:
        return View(self, RowSet.of(mask))

    def sampled(self, sampling: Sampling) -> Sampling:
        """A sampling of these rows as one of the rows of `whole`."""
        return sampling

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
            if (matrix.n_rows, matrix.n_genes) != (store.n_obs, matrices[0].n_genes):
                raise FormatError(
                    f"{name} of {store.location.url} has {matrix.n_rows} rows and {matrix.n_genes} genes, but "
                    f"{store.n_obs} and {matrices[0].n_genes} are expected: the store is damaged. Convert it again"
                )
        if name.startswith("raw/"):
            self._require_same_genes("raw/var")
        return matrices

    def parts(self, x: str | None, options: FetchOptions) -> list[Part]:
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
        held = [array for mirror in mirrors if mirror is not None for array in mirror.arrays.values()]
        if None in mirrors:
            raise OptionError(f"the mirror of {self.url} in {self.cache.directory} cannot be used (see the warning)")
        return CacheStatistics(
            directory=self.cache.directory,
            chunks=sum(array.layout.n_chunks for array in held),
            chunks_held=sum(array.n_present for array in held),
            bytes_in_all=sum(array.layout.n_elements * array.layout.dtype.itemsize for array in held),
            bytes_held=sum(array.present_bytes for array in held),
            allocated_bytes=cache_bytes(self.cache.directory),
            max_bytes=None if self.cache.max_bytes is None else self.cache.most,
            full=not all(array.writable for array in held),
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
        rows = np.asarray(indices)
        if rows.dtype == bool or rows.ndim != 1 or (rows.size and not np.issubdtype(rows.dtype, np.integer)):
            raise OptionError(f"indices must be a 1-d sequence of row numbers, not {rows.dtype} of shape {rows.shape}")
        wrong = rows[(rows < 0) | (rows >= self.n_obs)]
        if len(wrong):
            raise OptionError(f"row {wrong[0]} is not there: the dataset has the rows 0 to {self.n_obs - 1}")
        return rows.astype(np.int64)

    def read_rows(self, rows: Rows, *, x: str = "X", options: FetchOptions | None = None) -> X:
        """The values of some rows in the dtype they were converted from; by the same way as minibatches.

        Dense where all stores are, else CSR.
        """
        options = options or FetchOptions()
        parts = self.parts(x, options)
        dtypes = [store.original_dtype(part.matrix) for store, part in zip(self.stores, parts, strict=True)]
        recipe = Recipe(
            parts=parts,
            columns=dict,
            dense=all(part.matrix.genes is None for part in parts),
            dtype=np.result_type(*dtypes).name,
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


class View(Dataset):
    """Some rows of a dataset, in ascending order, as a dataset of its own: made by `where` and `split`.

    Its rows count from 0, as do masks, weights, labels and indices given for it; `row_numbers` says which rows of
    `whole` they are, and `minibatch.index` holds those. Nothing is opened or kept twice, but an obs column or obsm
    array of the view is made anew each time. It has a fingerprint of its own.
    """

    def __init__(self, whole: Dataset, chosen: RowSet) -> None:
        self._whole, self._chosen = whole, chosen
        self._locations, self._offline = whole._locations, whole._offline
        self.stores, self.cache, self.place = whole.stores, whole.cache, whole.place
        self.fingerprint = chosen.digest(whole.fingerprint)

    def __reduce__(self) -> tuple[Callable[..., Dataset], tuple[Any, ...]]:
        return View, (self._whole, self._chosen)

    def __repr__(self) -> str:
        return f"<View of {self.url}: {self.n_obs} of {self._whole.n_obs} rows x {self.n_vars} genes>"

    @property
    def whole(self) -> Dataset:
        """The dataset that this is a view of; never a view itself."""
        return self._whole

    @property
    def row_numbers(self) -> Rows:
        """Which rows of `whole` these are, ascending (int64)."""
        return np.flatnonzero(self._chosen.mask())

    @property
    def n_obs(self) -> int:
        """Rows."""
        return len(self._chosen)

    def obs(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """The obs frame, or only some columns of it, of these rows."""
        return self._whole.obs(columns).loc[self._chosen.mask()]

    def obs_column(self, column: str) -> ObsColumn:
        """One obs column of these rows as numbers."""
        whole = self._whole.obs_column(column)
        return replace(whole, values=whole.values[self._chosen.mask()])

    def categories(self, column: str) -> pd.Index:
        """Labels of an obs column: those of all rows, so that codes mean the same in every view."""
        return self._whole.categories(column)

    def obsm_array(self, name: str) -> NDArray[Any]:
        """One obsm array of these rows."""
        whole: NDArray[Any] = self._whole.obsm_array(name)
        return whole[self._chosen.mask()]

    def take(self, indices: Sequence[int] | NDArray[np.integer]) -> ad.AnnData:
        """Some rows of the view, counted from 0, as an AnnData."""
        return self._whole.take(self._chosen.numbers(self._checked_rows(indices)))

    def read_rows(self, rows: Rows, *, x: str = "X", options: FetchOptions | None = None) -> X:
        """The values of some rows of the view, counted from 0."""
        return self._whole.read_rows(self._chosen.numbers(self._checked_rows(rows)), x=x, options=options)

    def to_anndata(self, minibatch: MinibatchArrays, var: pd.DataFrame) -> ad.AnnData:
        """A minibatch of the view as an AnnData."""
        return self._whole.to_anndata(minibatch, var)

    def keep_columns(self) -> None:
        """Brings the obs columns and obsm arrays of all rows into the cache."""
        self._whole.keep_columns()

    def _view(self, mask: Mask) -> View:
        return View(self._whole, self._chosen.narrowed(mask))

    def sampled(self, sampling: Sampling) -> Sampling:
        """A sampling of the view's rows as one of the rows of `whole`."""
        return Within(sampling, self._chosen)


def as_scipy(x: CsrArrays) -> scipy.sparse.csr_matrix:
    """The same rows as a scipy CSR matrix, without a copy."""
    return scipy.sparse.csr_matrix((x.values, x.indices, x.indptr), shape=(len(x.indptr) - 1, x.n_genes))
