"""Whatever can be converted, opened: h5ad, AnnData Zarr, annbatch collections, 10x matrices, AnnData in memory."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import anndata as ad
import h5py
import pandas as pd
import scipy.sparse
import zarr

from zloader.access.implied_objects import arrays_below, require_objects, stored_keys
from zloader.access.listed_store import ListedStore
from zloader.common.errors import OptionError, SourceError, ZloaderError
from zloader.conversion.sources.anndata_input import Input, MemoryInput, StoredInput
from zloader.conversion.sources.locations import BlockCache, SourceLocation, places
from zloader.conversion.sources.nodes import Node, reading
from zloader.conversion.sources.tenx import MATRIX_FILES, is_10x, read_10x

__all__ = ["Input", "Source", "open_inputs"]

Source: TypeAlias = str | os.PathLike[str] | ad.AnnData

_COLLECTION = "annbatch-preshuffled"
_NO_LISTS = (str, bytes, os.PathLike, Mapping, ad.AnnData, pd.DataFrame, scipy.sparse.spmatrix, scipy.sparse.sparray)


def open_inputs(sources: Source | Sequence[Source], *, storage_options: Mapping[str, Any] | None = None) -> list[Input]:
    """Opens sources, in order: paths, URLs of any scheme that fsspec knows, globs of these, and AnnData objects.

    A glob gives one Input a match, sorted; an annbatch collection one a dataset. `storage_options` are fsspec's, for
    all that is remote. Only metadata is read, but 10x matrices are read whole. Raises StoreNotFoundError,
    AccessDeniedError, SourceError, OptionError, ReadError.
    """
    alone = isinstance(sources, (str, os.PathLike, ad.AnnData))
    given: list[Any] = [sources]
    if isinstance(sources, Iterable) and not isinstance(sources, _NO_LISTS):
        given = list(sources)
    if not given:
        raise OptionError("there is nothing to convert: the list of sources is empty")
    for source in given:
        if not isinstance(source, (str, os.PathLike, ad.AnnData)):
            raise OptionError(
                f"a source is a path, a URL or an AnnData in memory, or a list of these, not {type(source).__name__}"
            )
    cache = BlockCache()
    with contextlib.ExitStack() as opened:
        inputs: list[Input] = []
        for number, source in enumerate(given):
            if isinstance(source, ad.AnnData):
                name = "the AnnData in memory" if alone else f"the AnnData in memory (source {number})"
                inputs.append(MemoryInput(source, name, "adata"))
                continue
            for place in places(source, storage_options or {}):
                inputs.extend(map(opened.enter_context, _open(place, cache)))
        opened.pop_all()
    _tell_apart(inputs)
    return inputs


def _tell_apart(inputs: list[Input]) -> None:
    taken: set[str] = set()
    for one in inputs:
        label, repeats = one.label, 0
        while one.label in taken:
            repeats += 1
            one.label = f"{label}-{repeats}"
        taken.add(one.label)


def _open(place: SourceLocation, cache: BlockCache) -> Iterator[Input]:
    if place.has("zarr.json", ".zgroup"):
        yield from _open_zarr(place)
    elif place.entry()["type"] != "directory":
        yield _open_hdf5(place, cache)
    elif place.has(*MATRIX_FILES):
        yield _in_memory(place, "read_10x_mtx")
    else:
        raise SourceError(
            f"{place.name} is a directory, but no Zarr group (there is no zarr.json or .zgroup: perhaps its conversion "
            f"did not end) and no 10x matrix ({' or '.join(MATRIX_FILES)})"
        )


def _in_memory(place: SourceLocation, reader: str) -> Input:
    return MemoryInput(read_10x(place, reader), place.name, place.label, objects=place.objects())


def _open_hdf5(place: SourceLocation, cache: BlockCache) -> Input:
    with contextlib.suppress(ImportError):
        importlib.import_module("hdf5plugin")  # makes blosc and other filters known to HDF5
    with reading(place.name, "cannot be opened"):
        try:
            file = h5py.File(place.file(cache), "r")
        except OSError as error:
            if isinstance(error, ZloaderError):
                raise
            if "signature not found" in str(error):
                raise SourceError(f"{place.name} is not an HDF5 file, so not an .h5ad either") from error
            raise SourceError(
                f"{place.name} cannot be opened ({error}): was it cut short while it was copied?"
            ) from error
    with contextlib.ExitStack() as opened:
        opened.enter_context(file)
        if is_10x(Node(file, place.name)):
            return _in_memory(place, "read_10x_h5")
        found = StoredInput(file, place.name, place.label, objects=place.objects(), close=file.close)
        opened.pop_all()
    return found


def _open_zarr(place: SourceLocation) -> list[Input]:
    objects = place.objects()
    sizes = {key: size for key, size, _ in objects} if place.can_be_listed else {}
    store = ListedStore(place.zarr_store(), place.name, sizes, all_listed=place.can_be_listed)
    with reading(place.name, "is not a Zarr group"):
        root = zarr.open_group(store, mode="r")
        attributes = dict(root.attrs)
        store.complete = "zloader" in attributes
        if place.can_be_listed:
            arrays = arrays_below(root)  # what zarr cannot read is found here, not in the middle of a conversion
            if store.complete or 0 in sizes.values():
                keys = (key for array in arrays for key in stored_keys(array))
                require_objects(keys, sizes, place.name, absent_is_fill=not store.complete)
    if not place.can_be_listed and root.metadata.consolidated_metadata is None:
        raise SourceError(
            f"the metadata of {place.name} is not consolidated, and a web server does not list what there is: "
            "zarr.consolidate_metadata it"
        )
    if attributes.get("encoding-type") != _COLLECTION:
        return [StoredInput(root, place.name, place.label, objects=objects)]
    datasets = [name for name in Node(root, place.name).names() if name.startswith("dataset_")]
    if not datasets:
        raise SourceError(f"{place.name} is an annbatch collection without a dataset_0")
    inputs: list[Input] = []
    for dataset in sorted(datasets, key=lambda name: (len(name), name)):
        own = [stored for stored in objects if stored[0].startswith(f"{dataset}/")] or objects
        with reading(f"{place.name}/{dataset}", "is not a Zarr group"):
            group = root[dataset]
        inputs.append(StoredInput(group, f"{place.name}/{dataset}", f"{place.label}/{dataset}", objects=own))
    return inputs
