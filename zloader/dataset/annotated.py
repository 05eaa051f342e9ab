"""The rows of one or several stores and what is noted of each row: obs columns and obsm arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from zloader.access.stored_objects import joint_fingerprint
from zloader.caching.cached_columns import load_obs, save_obs
from zloader.caching.cached_files import load_column, save_column
from zloader.caching.directory import MirrorDirectory
from zloader.caching.mirror import open_place
from zloader.common.checks import names_of
from zloader.common.errors import FormatError, MissingColumnError, OptionError, ZloaderError
from zloader.common.options import Cache
from zloader.dataset.store import OpenedStore
from zloader.selecting.columns import (
    ObsColumn,
    as_numbers,
    concatenated,
    joined,
    require_alike,
    require_exact,
    unfit_obsm,
)

Item = TypeVar("Item")
Result = TypeVar("Result")
_STORES_AT_ONCE = 16  # that are opened or read; each waits for its server


class Annotated:
    """The rows of some stores, one store after another, with their obs and obsm.

    What is read whole is kept in the cache, where there is one, and mapped from there.
    """

    def __init__(self, stores: Sequence[OpenedStore], cache: Cache | None) -> None:
        self.stores = list(stores)
        self.cache = cache
        self.fingerprint = joint_fingerprint([store.fingerprint for store in self.stores])
        self.place = self._place_of_all()
        self._columns: dict[str, ObsColumn] = {}
        self._obsm: dict[str, NDArray[Any]] = {}

    def _place_of_all(self) -> MirrorDirectory | None:
        """Where columns of all rows are kept: with the one store's mirror, or in a directory of the dataset's own."""
        if len(self.stores) == 1 or self.cache is None:
            return self.stores[0].place
        prints = [store.mirror_fingerprint for store in self.stores if store.mirror_fingerprint is not None]
        if len(prints) < len(self.stores):
            return None
        addresses = [store.location.address for store in self.stores]
        return open_place(self.cache, joint_fingerprint(prints), " + ".join(addresses))

    @cached_property
    def n_obs(self) -> int:
        """Rows."""
        return sum(each(lambda store: store.n_obs, self.stores))

    @cached_property
    def obs_columns(self) -> list[str]:
        """Names of the obs columns, those that every store has."""
        return [name for name in self.stores[0].obs_columns if all(name in store.obs_columns for store in self.stores)]

    def obs(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """The obs frame, or only some columns of it, with the obs names as its index."""
        names = self.obs_columns if columns is None else names_of(columns=columns)
        index = pd.Index(concatenated("index", [store.names("obs").array for store in self.stores]))
        return pd.DataFrame({name: concatenated(name, self._obs_elements(name)) for name in names}, index=index)

    def categories(self, column: str) -> pd.Index:
        """Labels of an obs column: code c of a minibatch stands for `categories(column)[c]`, code -1 for none.

        Of several stores, the labels of all: in order of first appearance, or sorted where all hold strings.
        """
        categories = self.obs_column(column).categories
        if categories is None:
            raise OptionError(f"obs column {column!r} holds numbers, not categories")
        return categories

    def obs_column(self, column: str) -> ObsColumn:
        """One obs column as numbers: codes of a categorical or string column, the values of any other.

        Raises FormatError where it holds numbers in one store and labels in another.
        """
        self.require_obs([column])
        if column not in self._columns:
            kept = None if self.place is None else load_obs(self.place, column, self.n_obs)
            if kept is None:
                kept = joined(column, [as_numbers(column, values) for values in self._obs_elements(column)])
                kept = kept if self.place is None else save_obs(self.place, column, kept)
            self._columns[column] = kept
        return self._columns[column]

    def require_obs(self, columns: Sequence[str]) -> None:
        """Raises MissingColumnError, which lists the columns, for the first that is not there in a store."""
        for column in columns:
            for store in self.stores:
                if not isinstance(column, str) or column not in store.obs_columns:
                    known = ", ".join(map(repr, self.obs_columns)) or "none"
                    raise MissingColumnError(
                        f"there is no obs column {column!r} in {store.location.url}; there are: {known}"
                    )

    def _obs_elements(self, column: str) -> list[Any]:
        """A column of every store, as anndata reads it."""
        self.require_obs([column])
        elements = self._elements(f"obs/{column}")
        for store, element in zip(self.stores, elements, strict=True):
            shape = getattr(element, "shape", None)
            if shape != (store.n_obs,):
                raise FormatError(
                    f"obs column {column!r} of {store.location.url} has shape {shape}, but there are {store.n_obs} "
                    "rows: the store is damaged"
                )
        require_alike(column, elements, self._urls)
        return elements

    @property
    def _urls(self) -> list[str]:
        return [store.location.url for store in self.stores]

    def _elements(self, path: str) -> list[Any]:
        """One obs column or obsm array of every store, whole, as anndata reads it."""
        return each(lambda store: store.element(path), self.stores)

    @cached_property
    def obsm_names(self) -> list[str]:
        """Names of what every store has in obsm."""
        first, *others = (set(store.keys("obsm")) for store in self.stores)
        return sorted(first.intersection(*others))

    def obsm_array(self, name: str) -> NDArray[Any]:
        """One obsm array of all rows, rows x dims, in the dtype stored, or that of all stores promoted.

        Raises MissingColumnError, OptionError for what is no array of numbers, FormatError for stores that differ.
        """
        if name not in self._obsm:
            self.require_obsm([name])
            arrays = each(lambda store: store.column(f"obsm/{name}"), self.stores)
            self._obsm[name] = arrays[0] if len(arrays) == 1 else self._concatenated(f"obsm/{name}", arrays)
        return self._obsm[name]

    def _concatenated(self, name: str, arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """The arrays of all stores as one, mapped where there is a cache."""
        shape, dtype = (sum(map(len, arrays)), *arrays[0].shape[1:]), np.result_type(*arrays)
        kept = None if self.place is None else load_column(self.place, name, shape=shape, dtype=dtype)
        if kept is None:
            require_exact(name, arrays)
        if kept is None and self.place is not None:
            kept = save_column(self.place, name, arrays, shape=shape, dtype=dtype)
        return np.concatenate(arrays) if kept is None else kept

    def keep_columns(self) -> None:
        """Brings all that minibatches may carry beside x into the cache, and what an AnnData of them needs."""
        for column in self.obs_columns:
            with contextlib.suppress(OptionError):  # no tensor can hold it
                self.obs_column(column)
        for name in self.obsm_names:
            if self._unfit_obsm(name) is None:
                self.obsm_array(name)

    def require_obsm(self, names: Sequence[str]) -> None:
        """Raises what `obsm_array` would raise for the first name that minibatches cannot have, without reading it."""
        for name in names:
            for store in self.stores:
                if name not in store.keys("obsm"):
                    known = ", ".join(map(repr, self.obsm_names)) or "none"
                    raise MissingColumnError(f"there is no obsm {name!r} in {store.location.url}; there are: {known}")
            if (unfit := self._unfit_obsm(name)) is not None:
                raise unfit

    def _unfit_obsm(self, name: str) -> ZloaderError | None:
        try:
            nodes = [store.node(f"obsm/{name}") for store in self.stores]
        except FormatError as error:
            return error
        return unfit_obsm(name, nodes, [store.n_obs for store in self.stores], self._urls)


def each(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """What the function gives for each item, in order; of several items, many at once."""
    if len(items) == 1:
        return [function(items[0])]
    with ThreadPoolExecutor(_STORES_AT_ONCE, thread_name_prefix="zloader-open") as threads:
        return list(threads.map(function, items))
