"""One or many stores opened as one dataset, and views of it: some of its rows, as datasets of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast, overload

import anndata as ad
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from zloader.access.location import Location, location_of
from zloader.common.errors import OptionError, StoreChangedError
from zloader.common.options import Cache, FetchOptions
from zloader.common.records import MinibatchArrays, Rows
from zloader.dataset.annotated import each
from zloader.dataset.splits import Shares, split_rows
from zloader.dataset.store import open_stores
from zloader.dataset.table import Table, X
from zloader.dataset.views import Condition, RowSet, Within, mask_of
from zloader.order.sampling import Sampling
from zloader.selecting.columns import ObsColumn
from zloader.selecting.expressions import Mask

URL = str | os.PathLike[str]


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
    urls = [url] if isinstance(url, str | bytes) or not isinstance(url, Iterable) else url
    if cache is not None and not isinstance(cache, Cache):
        cache = Cache(directory=cast("Path", cache))  # which looks at what it is
    for each_url in urls:
        if not isinstance(each_url, str | os.PathLike):
            raise OptionError(
                f"a store is opened by its path or URL, not by an object of type {type(each_url).__name__}. An AnnData "
                "in memory becomes a store with zl.convert(adata, 'x.zarr')"
            )
    return Dataset([location_of(each_url, storage_options) for each_url in urls], cache, offline=offline)


def require_dataset(dataset: Any) -> None:
    """Raises OptionError for what `open_dataset` does not give."""
    if not isinstance(dataset, Dataset):
        raise OptionError(f"dataset must be what zl.open_dataset gives, not {dataset!r:.100}")


def _reopen(
    locations: Sequence[Location], cache: Cache | None, offline: bool, fingerprints: Mapping[str, str]
) -> Dataset:
    dataset = Dataset(locations, cache, offline=offline)
    found = {store.location.url: store.fingerprint for store in dataset.stores}
    for url in [*found, *fingerprints]:
        if found.get(url) != fingerprints.get(url):
            raise StoreChangedError(f"{url} has changed since it was opened: open it again")
    return dataset


class Dataset(Table):
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

    def __getitem__(self, index: Any) -> NoReturn:
        """Raises OptionError: rows are read together, by a Loader or `take`, and not one by one."""
        raise OptionError(
            f"{self.url} is not read row by row, as dataset[...] or torch's DataLoader(dataset) would: iterate over "
            "zl.Loader(dataset, ...), or over DataLoader(loader, batch_size=None). dataset.take(rows) gives some rows "
            "as an AnnData, dataset.where(rows) a view of them"
        )

    @property
    def whole(self) -> Dataset:
        """The dataset that `minibatch.index` counts the rows of: this one, or of a view the one it is a view of."""
        return self

    def where(self, condition: Condition) -> View:
        """The rows that an expression such as `"cell_type == 'T' and n_counts > 500"` holds for, as a view.

        An expression compares obs columns with constants or with each other (==, !=, <, <=, >, >=, in, not in, joined
        by and, or and not); a row without a value is in no comparison. A column of booleans may stand by itself where
        none is missing; else compare it with True or False. Back-quotes hold any name: "`cell type` == 'T'". Or
        `condition` is a boolean mask over the rows, or their numbers, each once: a view has them in ascending order.
        Raises OptionError, or MissingColumnError for an obs column that is not there.
        """
        return self._view(mask_of(condition, self.obs_column, self.n_obs, self.obs_columns))

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

        With `by`, an obs column of labels, whole numbers or booleans, all rows of one label are in one part (rows
        without a label count as one). No part is empty that should have rows, and no label moved, nor any two
        exchanged, would bring the parts nearer to their sizes; fewer labels than parts are refused. With `stratify`,
        such a column too, every part has its share of each label's rows, to a row a part.
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
