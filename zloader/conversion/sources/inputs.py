"""Open sources: .h5ad, AnnData Zarr, annbatch collections, Parquet files, a RowSource, and AnnData in memory.

`Problems` collects what is wrong with them, so that one error reports it all.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import anndata as ad
import h5py
import pandas as pd
import scipy.sparse

from zloader.access.listed_store import ListedStore
from zloader.access.location import Location
from zloader.access.zarr_groups import arrays_below, open_zarr_group, require_objects, stored_keys, without_stale
from zloader.common.errors import OptionError, SourceError, ZloaderError
from zloader.common.messages import listed
from zloader.common.other_formats import conversion_of_10x, conversion_of_folder, why_unreadable
from zloader.conversion.sources.anndata_input import Input, MemoryInput, StoredInput
from zloader.conversion.sources.locations import BlockCache, SourceLocation, _translated, source_locations
from zloader.conversion.sources.modality import ModalityInput, MuDataInput, is_mudata, split_modality, whole_of
from zloader.conversion.sources.nodes import Node, reading
from zloader.conversion.sources.parquet import Parquet
from zloader.conversion.sources.row_source import OwnRows, RowSource

__all__ = ["Input", "Source", "Sources", "open_inputs"]

Source: TypeAlias = str | os.PathLike[str] | ad.AnnData | RowSource | Parquet
Sources: TypeAlias = Source | Sequence[Source] | Mapping[str, Source]  # a mapping has the labels of the sources

_ONE = (str, os.PathLike, ad.AnnData, RowSource, Parquet)
_COLLECTION = "annbatch-preshuffled"
_NOT_A_LIST = (str, bytes, os.PathLike, ad.AnnData, pd.DataFrame, scipy.sparse.spmatrix, scipy.sparse.sparray)


def open_inputs(sources: Sources, *, storage_options: Mapping[str, Any] | None = None) -> list[Input]:
    """Opens sources, in order: paths, URLs of any fsspec scheme, globs, and AnnData objects, or a mapping by label.

    A glob gives one Input per match, sorted; an annbatch collection gives one Input per dataset. If a label stands for
    several, it comes before their own labels: `human/plate1`. `storage_options` are the fsspec options for remote
    sources. Only metadata are read.
    Raises StoreNotFoundError, AccessDeniedError, SourceError, OptionError or ReadError.
    """
    alone = isinstance(sources, _ONE)
    given: list[Any] = [sources]
    if isinstance(sources, Iterable) and not alone and not isinstance(sources, _NOT_A_LIST):
        given = list(sources.values() if isinstance(sources, Mapping) else sources)
    labels: list[Any] = list(sources) if isinstance(sources, Mapping) else [None] * len(given)
    if isinstance(sources, Mapping) and not all(isinstance(label, str) and label for label in labels):
        raise OptionError(f"the labels of sources must be text, not {listed(map(repr, labels))}")
    if not given:
        raise OptionError("the list of sources is empty: pass at least one source")
    for source in given:
        if not isinstance(source, _ONE):
            raise OptionError(
                "sources must be paths, URLs, AnnData in memory, zl.Parquet or a zl.RowSource, a list of them, or "
                f"a mapping from labels to them, not {type(source).__name__}"
            )
    cache = BlockCache()
    with contextlib.ExitStack() as opened:
        inputs: list[Input] = []
        for number, (label, source) in enumerate(zip(labels, given, strict=True)):
            first = len(inputs)
            if isinstance(source, ad.AnnData):
                which = f"source {number}" if label is None else repr(label)
                inputs.append(MemoryInput(source, "the AnnData in memory" + f" ({which})" * (not alone), "adata"))
            elif isinstance(source, RowSource):
                inputs.append(OwnRows(source, type(source).__name__ + f" (source {number})" * (not alone)))
            else:
                inputs.extend(map(opened.enter_context, _located(source, storage_options or {}, cache)))
            for one in inputs[first:] if label is not None else []:
                one.label = label if len(inputs) == first + 1 else f"{label}/{one.label}"
        opened.pop_all()
    _make_labels_unique(inputs)
    return inputs


def refuse_overlap(inputs: Sequence[Input], location: Location) -> None:
    """Raises OptionError if a source and the destination are the same, or if one contains the other."""
    for source in inputs:
        if source.identity() and not _is_apart(source.name, location):  # an AnnData in memory has no location
            raise OptionError(
                f"cannot convert {source.name} to {location.url}: one lies within the other. Choose another destination"
            )


def _is_apart(source: str, location: Location) -> bool:
    if "://" in source or location.scheme != "file":
        one, other = (f"{url.rstrip('/')}/" for url in (source, location.url))
        return one not in other and other not in one  # `in` also covers chained URLs, such as zip://...::s3://...
    path, destination = Path(source).resolve(), Path(location.path).resolve()
    return path != destination and path not in destination.parents and destination not in path.parents


def _make_labels_unique(inputs: Iterable[Input]) -> None:
    """Appends -1, -2, ... to labels that another source has."""
    taken: set[str] = set()
    for source in inputs:
        label, repeats = source.label, 0
        while source.label in taken:
            repeats += 1
            source.label = f"{label}-{repeats}"
        taken.add(source.label)


def _located(source: Any, storage_options: Mapping[str, Any], cache: BlockCache) -> Iterator[Input]:
    """The sources that a Parquet, a path, a URL or a glob names."""
    if not isinstance(source, Parquet) and os.fspath(source).endswith(".parquet"):
        source = Parquet(source)
    if isinstance(source, Parquet):
        yield source.open(storage_options)
        return
    file, modality = split_modality(os.fspath(source))
    for location in source_locations(file, storage_options):
        yield from _open(location, cache, modality)


def _open(location: SourceLocation, cache: BlockCache, modality: str | None) -> Iterator[Input]:
    if location.has("zarr.json", ".zgroup"):
        within = whole_of(location)  # the MuData Zarr that it is in, and its modality
        if within is not None and within[0].has("zarr.json", ".zgroup"):
            location, modality = within
        yield from _open_zarr(location, modality)
        return
    if location.entry()["type"] != "directory":
        yield _open_hdf5(location, cache, modality)
        return
    names = location.names()
    if not any(name.endswith(".parquet") for name in names):
        raise SourceError(
            conversion_of_folder(location.name, names)
            or f"{location.name} is a directory, but not a Zarr group (there is no zarr.json or .zgroup: perhaps its "
            "conversion did not finish), and has no .parquet files. Other formats are read by a zl.RowSource of yours, "
            "see docs/howto/own_format.md"
        )
    yield Parquet(location.url).open(location.storage_options)


def _open_hdf5(location: SourceLocation, cache: BlockCache, modality: str | None) -> Input:
    with contextlib.suppress(ImportError):
        importlib.import_module("hdf5plugin")  # registers blosc and other filters with HDF5
    with reading(location.name, "cannot be opened"):
        try:
            file = h5py.File(location.file(cache), "r")
        except OSError as error:
            if isinstance(error, ZloaderError):
                raise
            with _translated(location):
                first = location.filesystem.cat_file(location.path, 0, 256)
            if why := why_unreadable(first):
                raise SourceError(f"{location.name} {why}") from error
            if "signature not found" in str(error):
                raise SourceError(f"{location.name} is not an HDF5 file, so it cannot be read as .h5ad") from error
            raise SourceError(f"{location.name} cannot be opened ({error}): was it truncated during a copy?") from error
    with contextlib.ExitStack() as opened:
        opened.enter_context(file)
        root = Node(file, location.name)
        groups = (root[name] for name in root.names())  # Cell Ranger before version 3 wrote one per genome
        if any(not group.is_array and "barcodes" in group and "indptr" in group for group in groups):
            raise SourceError(f"{location.name} is a 10x file. {conversion_of_10x(location.name, 'read_10x_h5')}")
        found: Input
        if modality is not None:
            found = ModalityInput(file, location, modality, objects=location.objects(), close=file.close)
        elif _is_old(root):
            with reading(location.name, "cannot be read by anndata"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the file is old
                adata = ad.read_h5ad(location.file(cache))
            found = MemoryInput(adata, location.name, location.label, location.objects())
            file.close()
        elif is_mudata(root):
            found = MuDataInput(file, location, objects=location.objects(), close=file.close)
        else:
            found = StoredInput(file, location.name, location.label, objects=location.objects(), close=file.close)
        opened.pop_all()
    return found


def _is_old(root: Node) -> bool:
    """Whether anndata before 0.7 wrote a file, which can only be read as a whole."""
    return "raw.X" in root or ("obs" in root and root["obs"].is_array)


def _open_zarr(location: SourceLocation, modality: str | None) -> list[Input]:
    objects = location.objects()
    sizes = {key: size for key, size, _ in objects} if location.can_be_listed else {}
    store = ListedStore(location.zarr_store(), location.name, sizes, all_listed=location.can_be_listed)
    with reading(location.name, "is not a Zarr group"):
        root = open_zarr_group(store)
        attributes = dict(root.attrs)
        store.complete = "zloader" in attributes
        if location.can_be_listed:
            root = without_stale(root, store, location.name)
            arrays = arrays_below(root)  # finds unreadable metadata now instead of during the conversion
            if store.complete or 0 in sizes.values():
                keys = (key for array in arrays for key in stored_keys(array))
                require_objects(keys, sizes, location.name, absent_is_fill=not store.complete)
    if not location.can_be_listed and root.metadata.consolidated_metadata is None:
        raise SourceError(
            f"{location.name} has no consolidated metadata, and a web server cannot list objects: run "
            "zarr.consolidate_metadata on it"
        )
    if modality is not None:
        return [ModalityInput(root, location, modality, objects=objects)]
    if is_mudata(Node(root, location.name)):
        return [MuDataInput(root, location, objects=objects)]
    if attributes.get("encoding-type") != _COLLECTION:
        return [StoredInput(root, location.name, location.label, objects=objects)]
    datasets = [name for name in Node(root, location.name).names() if name.startswith("dataset_")]
    if not datasets:
        raise SourceError(f"{location.name} is an annbatch collection, but has no dataset_0: it is incomplete")
    inputs: list[Input] = []
    for dataset in sorted(datasets, key=lambda name: (len(name), name)):
        own = [stored for stored in objects if stored[0].startswith(f"{dataset}/")] or objects
        with reading(f"{location.name}/{dataset}", "is not a Zarr group"):
            group = root[dataset]
        inputs.append(StoredInput(group, f"{location.name}/{dataset}", f"{location.label}/{dataset}", objects=own))
    return inputs


class Problems:
    """Collects problems. A context manager: on exit it raises one SourceError with one line per problem."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def add(self, problem: str) -> None:
        """Adds a problem."""
        self._found.append(problem)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Adds the SourceError that the block raises, if any, instead of passing it on."""
        try:
            yield
        except SourceError as error:
            self._found += error.args

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._found:
            raise SourceError(*self._found)


def by_source(found: Mapping[str, str]) -> str:
    """Groups findings by source, for a message: `numbers in a.h5ad, b.h5ad, text in c.h5ad`."""
    sources: dict[str, list[str]] = {}
    for source, what in found.items():
        sources.setdefault(what, []).append(source)
    return ", ".join(f"{what} in {listed(names)}" for what, names in sources.items())


def refuse_unknown(option: str, names: Iterable[str], available: Iterable[str]) -> None:
    """Raises OptionError, which lists the `available` names, if any of `names` is not among them."""
    available = list(available)
    unknown = [name for name in names if name not in available]
    if unknown:
        raise OptionError(f"{option}: no source has {listed(unknown)}. Available: {listed(available, 100)}")
