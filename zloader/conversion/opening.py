"""Opens the sources of a conversion: whatever `zl.open_dataset` opens, and what else can be read as an AnnData."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse

from zloader.access.location import Location, location_of
from zloader.common.errors import (
    CorruptChunkError,
    FormatError,
    MissingColumnError,
    MissingObjectError,
    OptionError,
    SourceError,
    TruncatedObjectError,
)
from zloader.common.messages import listed, warn_user
from zloader.conversion.chosen import Reading, refuse_unknown, unique
from zloader.conversion.contents import DatasetContent, WholeContent
from zloader.conversion.memory import MemoryContent, RowSource, rows_content
from zloader.conversion.parquet import Parquet
from zloader.conversion.port import Content, Opened, Part
from zloader.conversion.reorder import ArrangedContent, Permutation
from zloader.conversion.selection import Selection
from zloader.dataset.dataset import Dataset
from zloader.dataset.elements import MUDATA
from zloader.dataset.opening import OpenedStores, open_all
from zloader.dataset.store import OpenedStore
from zloader.order.permutation import key_of, permute
from zloader.selecting.gene_names import GeneJoin
from zloader.storage.hdf5_filters import NotInPlaceError

Source: TypeAlias = str | os.PathLike[str] | ad.AnnData | RowSource | Parquet | Dataset
Sources: TypeAlias = Source | Sequence[str | os.PathLike[str]] | Mapping[str, str | os.PathLike[str]]

_AS_STORED = Reading()
_ONE = (str, os.PathLike, ad.AnnData, Dataset, Parquet, RowSource)
_NOT_A_LIST = (str, bytes, os.PathLike, pd.DataFrame, scipy.sparse.spmatrix, scipy.sparse.sparray)
_ANNDATA = {"encoding-type": "anndata", "encoding-version": "0.1.0"}
_MODALITY = _ANNDATA | {"zloader": {"part_of": "MuData"}}  # opened by itself, it is a store whose objects all exist
_MUDATA = {"encoding-type": "MuData", "encoding-version": "0.1.0", "axis": 0}
_OF_ANNDATA = ("x", "genes", "genes_by")  # options whose meaning differs from modality to modality
_IN_FILE = re.compile(r"(?s)(.+\.h5mu)(?:/mod)?/([^/]+)/?")
_IN_ZARR = re.compile(r"(?s)(.+)/mod/([^/]+)/?")
_SUFFIXES = (".h5ad", ".h5mu", ".zarr", ".h5", ".hdf5", ".parquet")
_DAMAGED = (FormatError, MissingColumnError, CorruptChunkError, TruncatedObjectError, MissingObjectError)


@contextlib.contextmanager
def open_parts(
    sources: Sources,
    select: Selection,
    *,
    storage_options: Mapping[str, Any] | None = None,
    how: Reading = _AS_STORED,
) -> Iterator[Opened]:
    """Opens sources, and what is stored of them. Only metadata, names and var are read.

    Raises StoreNotFoundError, AccessDeniedError, SourceError, OptionError or ReadError. Damage that is found while the
    context lasts is raised as SourceError, too.
    """
    with damage_of_sources(), contextlib.ExitStack() as stack:
        opened = _opened(sources, select, storage_options, how, stack)
        yield dataclasses.replace(opened, parts=_arranged(opened, how))


@contextlib.contextmanager
def damage_of_sources() -> Iterator[None]:
    """Raises SourceError for what the readers of stores raise for damage."""
    try:
        yield
    except _DAMAGED as error:
        raise SourceError(error.args[0] if error.args else str(error)) from error


def _opened(
    sources: Any,
    select: Selection,
    storage_options: Mapping[str, Any] | None,
    how: Reading,
    stack: contextlib.ExitStack,
) -> Opened:
    if isinstance(sources, Sequence) and len(sources) == 1 and isinstance(sources[0], _ONE):
        (sources,) = sources
    if isinstance(sources, str | os.PathLike) and os.fspath(sources).endswith(".parquet"):
        sources = Parquet(sources)
    if isinstance(sources, Dataset):
        return _of_dataset(sources, select, [_label(store.location) for store in sources.stores], how)
    if isinstance(sources, ad.AnnData):
        name = "the AnnData in memory"
        content: Content = MemoryContent(sources, select, how, name=name, label="adata")
        return _alone(content, name, "adata")
    if isinstance(sources, Parquet):
        return _of_parquet(stack.enter_context(sources.open(storage_options or {})), select, how)
    if isinstance(sources, RowSource):
        name = type(sources).__name__
        content = rows_content(sources, select, how)
        return _alone(content, name, name, identity=getattr(sources, "fingerprint", None))
    return _of_paths(sources, select, storage_options, how, stack)


def _of_parquet(source: Any, select: Selection, how: Reading) -> Opened:
    adata = ad.AnnData(var=source.var)
    content = MemoryContent(adata, select, how, name=source.name, label=source.label, lists=source)
    return _alone(content, source.name, source.label, bytes_in=source.bytes_in, identity=source.fingerprint)


def _alone(content: Content, name: str, label: str, *, bytes_in: int = 0, identity: Any = None) -> Opened:
    part = Part(path="", content=content, attributes=_ANNDATA)
    return Opened(
        names=[name], labels=[label], n_rows=[content.n_rows], bytes_in=bytes_in, identity=identity, parts=[part]
    )


# ---- paths and URLs


def _of_paths(
    sources: Any,
    select: Selection,
    storage_options: Mapping[str, Any] | None,
    how: Reading,
    stack: contextlib.ExitStack,
) -> Opened:
    given = [sources]
    if isinstance(sources, Iterable) and not isinstance(sources, _NOT_A_LIST):
        given = list(sources.values() if isinstance(sources, Mapping) else sources)
    labels: list[Any] = list(sources) if isinstance(sources, Mapping) else [None] * len(given)
    if isinstance(sources, Mapping) and not all(isinstance(label, str) and label for label in labels):
        raise OptionError(f"the labels of sources must be text, not {listed(map(repr, labels))}")
    if not given:
        raise OptionError("the list of sources is empty: pass at least one source")
    if others := [source for source in given if not isinstance(source, str | os.PathLike)]:
        unknown = [source for source in others if not isinstance(source, _ONE)]
        kind = type((unknown or others)[0]).__name__
        if unknown:
            raise OptionError(
                f"sources must be paths, URLs, AnnData in memory, zl.Dataset, zl.Parquet or a zl.RowSource, not {kind}"
            )
        raise OptionError(
            f"several sources must be paths or URLs, in a list or a mapping from labels to them, not {kind}: "
            "concatenate AnnData in memory with anndata.concat, and convert the result"
        )
    parted = [_modality_of(os.fspath(source), storage_options) for source in given]
    modalities = {modality for _, modality in parted}
    if len(modalities) > 1:
        raise OptionError(f"convert the same modality of all sources together, not {listed(map(repr, modalities))}")
    locations: list[Location] = []
    of_given: list[Any] = []
    for label, (source, _) in zip(labels, parted, strict=True):
        matches = location_of(source, storage_options).matches()
        locations += matches
        of_given += [label] * len(matches)
    try:
        modality = next(iter(modalities))
        opened = open_all(locations, None, by_rows=not modality)
        dataset = _joined(opened, select, whole=not modality)
        labels = _labels(opened.stores, locations, of_given)
        result = _of_dataset(dataset, select, labels, how, modality=modality)
        for part in result.parts:
            for _ in part.content.matrices():  # which looks at their metadata
                pass
        return result
    except FormatError as error:
        path = Path(locations[0].path)
        may_read = any(isinstance(each, NotInPlaceError) for each in (error, error.__cause__))
        if not may_read or len(locations) > 1 or locations[0].scheme != "file" or path.suffix == ".h5mu":
            raise
        adata = _read_by_anndata(locations[0].path, error)
        stack.callback(adata.file.close)
        name, label = locations[0].url, of_given[0] or _label(locations[0])
        content = MemoryContent(adata, select, how, name=name, label=label)
        status = Path(locations[0].path).stat()
        identity = [label, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        return _alone(content, name, label, bytes_in=status.st_size, identity=identity)


def _joined(opened: OpenedStores, select: Selection, *, whole: bool) -> Dataset:
    """The stores as one dataset, with the genes joined as `select` says."""
    modalities = max((store.modalities for store in opened.stores), key=len) if whole else []
    if modalities:
        for store in opened.stores:
            if differing := sorted(set(modalities) ^ set(store.modalities)):
                raise SourceError(
                    f"{store.location.url} has the modalities {listed(store.modalities) or 'none'}, and another source "
                    f"has {listed(modalities)}: {listed(differing)} would be lacking. Convert modalities one by one, "
                    f"such as FILE.h5mu/{modalities[0]}"
                )
    rule = GeneJoin(join=select.genes if select.genes is not None else select.join, genes_by=select.genes_by)
    rule = GeneJoin(join=select.join) if modalities else rule
    dataset = Dataset(opened, rule)
    if (len(opened.stores) > 1 or not rule.as_stored) and (lost := dataset.matrices.lost):
        warn_user(lost)
    return dataset


def _modality_of(source: str, storage_options: Mapping[str, Any] | None) -> tuple[str, str]:
    """The MuData and the name of the modality that `FILE.h5mu/NAME` or `STORE/mod/NAME` names, or "" for any other."""
    if found := _IN_FILE.fullmatch(source):
        return found[1], found[2]
    found = _IN_ZARR.fullmatch(source)
    if (
        found
        and not source.startswith("http")
        and {"zarr.json", ".zgroup"} & location_of(found[1], storage_options).names()
    ):
        return found[1], found[2]
    return source, ""


def _read_by_anndata(path: str, refused: FormatError) -> ad.AnnData:
    """A local file that is not opened in place, as anndata reads it. Raises what opening it said, if that fails."""
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the file is old
        return ad.read_h5ad(path, backed="r")
    raise refused


def _labels(stores: Sequence[OpenedStore], locations: Sequence[Location], given: Sequence[str | None]) -> list[str]:
    """A label for each store: that of its location, before its own if there are several, or its own."""
    found, left = [], list(stores)
    for location, label in zip(locations, given, strict=True):
        members = [store for store in left if store.location.url.startswith(f"{location.url.rstrip('/')}/dataset_")]
        for store in members or left[:1]:
            several = len(members) > 1 or given.count(label) > 1
            own = _label(store.location)
            found.append(own if label is None else f"{label}/{own}" if several else label)
        left = left[max(1, len(members)) :]
    return found


def _label(location: Location) -> str:
    """The last part of the name, without the suffix of a known format: `plate1` for `plate1.h5ad`."""
    *above, last = location.url.rstrip("/").split("/")
    if re.fullmatch(r"dataset_\d+", last) and above:
        return f"{_stem(above[-1])}/{last}"
    return _stem(last)


def _stem(name: str) -> str:
    return Path(name).stem if name.endswith(_SUFFIXES) else name


# ---- datasets


def _of_dataset(
    dataset: Dataset, select: Selection, labels: Sequence[str], how: Reading, *, modality: str = ""
) -> Opened:
    labels, stores = list(unique(pd.Index(labels, dtype=object))), dataset.stores
    for store in stores if not modality else ():
        _require_modalities(store)
    if modality:
        if modality not in dataset.modalities:
            raise SourceError(
                f"{dataset.url} has no modality {modality!r}: name one of its modalities "
                f"({listed(dataset.modalities)}), such as {dataset.url}/{(dataset.modalities or ['rna'])[0]}"
            )
        content: Content = DatasetContent(dataset, select, labels, how, modality=modality, alone=True)
        parts = [Part(path="", content=content, attributes=_ANNDATA)]
    elif dataset.modalities:
        parts = _of_mudata(dataset, select, labels, how)
    else:
        content = DatasetContent(dataset, select, labels, how)
        parts = [Part(path="", content=content, attributes=_ANNDATA)]
    first = parts[0].content
    if len(parts) == 1 and isinstance(first, DatasetContent) and "X" not in first.matrix_names:
        layers = ", ".join(name for name in first.known if name.startswith("layers/")) or "no layers either"
        raise SourceError(
            f"{dataset.url} has no X, so there is nothing to train on. It holds: {layers}. Choose another matrix as X "
            "with select=zl.Selection(x=...) (--x)"
        )
    panel = [(frame, genes.positions.tolist()) for frame, genes in (dataset.matrices.panel or {}).items()]
    return Opened(
        names=[store.location.url for store in stores],
        labels=labels,
        n_rows=[store.n_obs for store in stores] if first.n_rows == sum(s.n_obs for s in stores) else [first.n_rows],
        bytes_in=sum(stored.size for store in stores for stored in store.objects.values()),
        identity=[
            *map(_identity, stores),
            None if dataset._chosen is None else dataset._chosen.digest(""),
            panel,
            modality,
        ],
        parts=parts,
    )


def _require_modalities(store: OpenedStore) -> None:
    """Raises SourceError for a MuData without modalities, or with one that is a MuData."""
    url = store.location.url
    if store.root.attrs.get("encoding-type") == MUDATA and not store.modalities:
        raise SourceError(f"{url} is a MuData without modalities: there is nothing to convert")
    for name in store.modalities:
        if store.node(f"mod/{name}").attrs.get("encoding-type") == MUDATA:
            raise SourceError(
                f"the modality {name!r} of {url} is a MuData itself: convert its modalities one by one, or make them "
                "modalities of the whole"
            )


def _identity(store: OpenedStore) -> list[str]:
    """The name of a store, and a digest that changes with its bytes.

    Programs set the times at which files changed, so those that the file system keeps itself count for local files.
    """
    stamped = store.location.scheme == "file"
    found = [(key, each.size, each.tag, each.stamp if stamped else "") for key, each in sorted(store.objects.items())]
    return [store.location.url.rstrip("/").rpartition("/")[2], hashlib.sha256(repr(found).encode()).hexdigest()[:32]]


def _of_mudata(dataset: Dataset, select: Selection, labels: Sequence[str], how: Reading) -> list[Part]:
    for option in _OF_ANNDATA:
        if getattr(select, option) != getattr(Selection(), option):
            raise OptionError(
                f"{option} is for one AnnData, but {dataset.url} is a MuData with {listed(dataset.modalities)}: leave "
                f"it out, or convert its modalities one by one, such as {dataset.url}/{dataset.modalities[0]}"
            )
    modalities = {}
    for name in dataset.modalities:
        own = _of_part(dataset, select, f"mod/{name}/")
        modalities[name] = DatasetContent(dataset, own, labels, how, modality=name)
    if not any(content.matrix_names for content in modalities.values()):
        raise SourceError(f"no modality of {dataset.url} has X or layers, so there is nothing to train on")
    own = dataclasses.replace(_of_part(dataset, select, ""), source_column=select.source_column)
    whole = WholeContent(dataset, own, labels, how, modalities)
    of_modalities = [
        Part(path=f"mod/{name}", content=content, attributes=_MODALITY) for name, content in modalities.items()
    ]
    return [Part(path="", content=whole, attributes=_MUDATA), *of_modalities]


def _of_part(dataset: Dataset, select: Selection, above: str) -> Selection:
    """The selection of one part: those of the chosen names that it has. Raises OptionError for names that none has."""
    chosen: dict[str, Any] = {"source_column": None, "unique_obs_names": select.unique_obs_names and not above}
    for option in ("layers", "obsm", "obs"):
        if (names := getattr(select, option)) is None:
            continue
        of_parts = {
            each: _names(dataset, option, each) for each in ["", *(f"mod/{name}/" for name in dataset.modalities)]
        }
        refuse_unknown(option, names, list(dict.fromkeys(name for found in of_parts.values() for name in found)))
        chosen[option] = [name for name in names if name in of_parts[above]]
    return dataclasses.replace(select, **chosen)


def _names(dataset: Dataset, option: str, above: str) -> list[str]:
    if option == "obs":
        return [name for store in dataset.stores for name in store.columns(f"{above}obs")]
    return [name for store in dataset.stores for name in store.keys(f"{above}{option}")]


# ---- the order of the rows


def _arranged(opened: Opened, how: Reading) -> Sequence[Part]:
    """The parts with their rows shuffled, or in an order that is given."""
    whole, *parts = opened.parts
    positions: Permutation
    n_rows = whole.content.n_rows
    if how.shuffle_seed is not None:
        key = key_of(how.shuffle_seed)
        positions = partial(permute, n=n_rows, key=key)
    elif how.order is not None:
        if len(how.order) != n_rows:
            raise OptionError(f"order has {len(how.order)} row numbers, but the sources have {n_rows} rows")
        in_order = np.empty(n_rows, np.int64)
        in_order[np.asarray(how.order)] = np.arange(n_rows)
        positions = in_order.__getitem__
    else:
        return opened.parts
    arranged = ArrangedContent(whole.content, positions, bucket_bytes=how.window_bytes)
    found = [dataclasses.replace(whole, content=arranged)]
    for part in parts:
        assert isinstance(whole.content, WholeContent)
        rows = whole.content.row_of(part.path.removeprefix("mod/"))[arranged.order]
        ranks = np.empty(part.content.n_rows, np.int64)
        ranks[rows[rows >= 0]] = np.arange(part.content.n_rows)
        of_part = ArrangedContent(part.content, ranks.__getitem__, bucket_bytes=how.window_bytes)
        found.append(dataclasses.replace(part, content=of_part))
    return found
