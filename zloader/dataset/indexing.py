"""`zl.index`: many stores as one manifest, which opens them without a request."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zloader.access.location import Location, location_of
from zloader.access.stored_objects import mirror_fingerprint
from zloader.access.zarr_groups import no_codec_warnings
from zloader.caching.atomic_files import draft_path
from zloader.common.child import children_kept
from zloader.common.deferred import pd
from zloader.common.errors import FormatError, OptionError
from zloader.common.keywords import answers
from zloader.common.messages import listed
from zloader.common.progress import progress_bars
from zloader.dataset.gene_axis import gene_names
from zloader.dataset.h5ad import OpenedFile
from zloader.dataset.manifest import (
    COLUMNS,
    VERSION,
    absolute,
    is_manifest,
    labels_of,
    names_by_set,
    parsed,
    read_manifest,
    relative,
    url_of,
    written,
)
from zloader.dataset.modalities import path_of
from zloader.dataset.opening import open_stores
from zloader.dataset.stack_columns import columns_of
from zloader.dataset.store import OpenedStore
from zloader.selecting.columns import NUMBERS
from zloader.storage.layout import ArrayLayout
from zloader.storage.recorded import record_of

_SHARED = ("gene_names", "layout", "obs")  # columns that are the same for many stores
URL = str | os.PathLike[str]
_THREADS = 16  # each waits for a server, or for the process that reads an HDF5 file


@dataclass(frozen=True, kw_only=True)
class Indexed:
    """What `index` has written: a manifest at `url` of so many `stores`, `rows` and different `gene_sets`.

    >>> import zloader as zl
    >>> zl.index("atlas.zarr", "one.csv", progress=False).stores
    1

    `reused` stores had not changed since the manifest was written before. `labels` are the obs columns that have one
    label for each store.
    """

    url: str
    stores: int
    rows: int
    gene_sets: int
    reused: int
    labels: Sequence[str]


@answers
def index(
    urls: URL | Iterable[URL],
    manifest: URL,
    *,
    genes_by: str | None = None,
    update: bool = False,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> Indexed:
    """Writes a manifest of stores and .h5ad files: a table that opens thousands of them as one dataset, at once.

    >>> import zloader as zl
    >>> done = zl.index(["atlas.zarr", "atlas.zarr"], "both.parquet", progress=False)
    >>> done.stores, done.rows, done.gene_sets
    (2, 2000, 1)
    >>> zl.open_dataset("both.parquet", cache="cache").n_obs
    2000

    - `urls`: paths, URLs or globs of stores, .h5ad files and annbatch collections.
    - `manifest`: the file to write, ending in .parquet (with the extra `parquet`) or .csv, best beside the stores: what
      is beside it or below is recorded relative to it, so that all can be moved or copied together.
    - `genes_by`: the var column that names the genes, instead of var_names.
    - `update`: the manifest may exist. Stores that it has and that have not changed are not read again, and its columns
      of labels stay. Stores that are not among `urls` are left out.
    - `overwrite`: the manifest may exist, and is replaced.
    - `storage_options`: as in `open_dataset`, for all URLs.

    An obs column with the same label in all rows of a store, for every store, becomes a column of the manifest. Others
    may be added with pandas: one value per store. `dataset.where("tissue == 'lung'")` then opens nothing.

    Stores that are written alike and have the same genes follow one another, in the order of `urls`; these groups are
    in the order of their first stores. That is the order of the rows of the dataset.

    Opens each store once, and reads its metadata, names of genes and obs columns. Returns what was indexed. Raises the
    errors of `open_dataset`; OptionError for stores with modalities, and if the manifest exists. Nothing is written
    then.
    """
    destination = location_of(manifest, storage_options)
    if not is_manifest(destination):
        raise OptionError(f"a manifest is a .parquet or .csv file, not {destination.url!r}")
    destination.require_writable()
    before = _before(destination, update=update, overwrite=overwrite)
    several = [urls] if isinstance(urls, str | os.PathLike) else list(urls)
    locations = [found for url in several for found in location_of(url, storage_options).matches()]
    if not locations:
        raise OptionError("there is nothing to index: give at least one URL")
    indexer = _Indexer(destination, genes_by, before)
    with progress_bars(shown=progress, unit="stores") as bars, ThreadPoolExecutor(_THREADS) as threads:
        bar = bars.add("indexing", len(locations))
        rows: list[dict[str, Any]] = []
        try:
            with no_codec_warnings(), children_kept():
                for found in threads.map(indexer.rows_of, locations):
                    rows += found
                    bar(1)
        finally:
            threads.shutdown(cancel_futures=True)
    table = _table(rows, before)
    _write(destination, written(table, destination.path))
    return Indexed(
        url=destination.url,
        stores=len(table),
        rows=int(table["rows"].sum()),
        gene_sets=table["gene_set"].nunique(),
        reused=indexer.n_reused,
        labels=labels_of(table),
    )


def _before(destination: Location, *, update: bool, overwrite: bool) -> pd.DataFrame | None:
    """The manifest that is there, if it is to be updated. Raises OptionError if it must not be replaced."""
    filesystem = destination.filesystem()
    with destination.translated("look up"):
        exists = filesystem.exists(destination.path)
    if not exists:
        return None
    if not update and not overwrite:
        raise OptionError(
            f"{destination.url} exists: give update=True (--update) to read only what has changed, or overwrite=True "
            "(--overwrite)"
        )
    return read_manifest(destination) if update else None


class _Indexer:
    """Makes the rows of a manifest."""

    def __init__(self, manifest: Location, genes_by: str | None, before: pd.DataFrame | None) -> None:
        self._manifest, self._genes_by = manifest, genes_by
        self.n_reused = 0
        self._texts: dict[str, str] = {}  # each once: many stores have the same genes and layout
        self._before: dict[tuple[str, str], dict[str, Any]] = {}
        if before is not None:
            names = {each: text for each, text in names_by_set(before).items() if _named_by(text) == genes_by}
            for row in before.to_dict("records"):
                known = row | {"gene_names": names.get(row["gene_set"], "")}
                self._before[absolute(manifest, row["url"]), row["fingerprint"]] = known

    def rows_of(self, location: Location) -> list[dict[str, Any]]:
        """The rows of the stores at a location."""
        return [self._row(store) for store in open_stores(location, None)]

    def _row(self, store: OpenedStore) -> dict[str, Any]:
        location = store.location
        known = self._before.get((url_of(location), store.fingerprint))
        stamp = mirror_fingerprint(location.url, location.origin, store.objects) or ""
        if known is not None and known["stamp"] == stamp and known["gene_names"]:
            self.n_reused += 1
            return {name: known[name] for name in COLUMNS} | {"labels": {}, "reused": known}
        recorded = _recorded(store, self._genes_by)
        shared = {name: self._texts.setdefault(recorded[name], recorded[name]) for name in _SHARED}
        return (
            recorded
            | shared
            | {
                "url": relative(self._manifest, location),
                "rows": store.n_obs,
                "fingerprint": store.fingerprint,
                "stamp": stamp,
            }
        )


def _named_by(gene_names: str) -> str | None:
    """The var column that the names of a gene set were taken from; None for var_names."""
    try:
        return parsed(gene_names, "gene_names").get("by")  # type: ignore[no-any-return]
    except FormatError:
        return ""  # none that `index` takes


def _recorded(store: OpenedStore, genes_by: str | None) -> dict[str, Any]:
    if store.modalities:
        raise OptionError(
            f"{store.location.url} has the modalities {listed(store.modalities)}, and a manifest has stores with one "
            "matrix X: convert one of them, as in zloader convert cite.h5mu/rna rna.zarr"
        )
    matrices: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for name in _readable(store):
        matrix = store.matrix(name)
        layouts = [*matrix.arrays, *([] if matrix.genes is None else [store.array_layout(f"{name}/indptr")])]
        common = []
        for layout in layouts:
            of_array, arrays[layout.path] = record_of(layout)
            common.append(of_array)
            objects |= _objects(store, layout)
        matrices[name] = {
            "arrays": common[: len(matrix.arrays)],
            "indptr": common[-1] if matrix.genes is not None else None,
            "dtypes": store.recorded_dtypes(path_of(name)),
        }
    frames = ["var", "raw/var"] if "raw/X" in matrices else ["var"]
    genes = {frame: gene_names(store, genes_by, frame).tolist() for frame in frames}
    names = json.dumps({"version": VERSION, **({} if genes_by is None else {"by": genes_by}), **genes})
    layout_document = {
        "version": VERSION,
        "kind": "hdf5" if isinstance(store, OpenedFile) else "zarr",
        "n_genes": {frame: len(names) for frame, names in genes.items()},
        "matrices": matrices,
    }
    columns = columns_of(store)
    kinds = {name: [columns.kind(name), columns.shown_kind(name)] for name in store.obs_columns}
    return {
        "gene_set": hashlib.sha256(names.encode()).hexdigest()[:16],
        "gene_names": names,
        "layout": json.dumps(layout_document, sort_keys=True, default=_plain),
        "stored": json.dumps({"arrays": arrays, "objects": objects}),
        "obs": json.dumps({"version": VERSION, "columns": kinds, "obsm": _obsm(store)}),
        "labels": dict(_labels(store)),
    }


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)


def _readable(store: OpenedStore) -> Iterator[str]:
    """The matrices whose rows can be read. Raises FormatError if X cannot."""
    for name in store.matrix_names:
        try:
            store.matrix(name)
        except FormatError:
            if name == "X":
                raise
        else:
            yield name


def _objects(store: OpenedStore, layout: ArrayLayout) -> dict[str, Any]:
    """The objects of an array: of a file, the file itself, under the key ""."""
    if isinstance(store, OpenedFile):
        return {"": list(store.objects[""])}
    keys = map(layout.shard_key, range(layout.n_shards))
    return {key: list(store.objects[key]) for key in keys if key in store.objects}


def _obsm(store: OpenedStore) -> dict[str, Any]:
    nodes = {name: store.node(f"obsm/{name}") for name in store.keys("obsm")}
    return {
        name: [list(node.shape[1:]), node.dtype.newbyteorder("=").str]
        for name, node in nodes.items()
        if hasattr(node, "shape") and node.dtype.kind in NUMBERS and node.shape[:1] == (store.n_obs,)
    }


def _labels(store: OpenedStore) -> Iterator[tuple[str, str]]:
    """The obs columns of labels that are the same in all rows of a store."""
    columns = columns_of(store)
    for name in store.obs_columns:
        if name in COLUMNS or columns.kind(name) not in ("categories", "strings") or not store.n_obs:
            continue
        numbers = columns.numbers(name)
        first = int(numbers.values[0])
        if numbers.categories is not None and first >= 0 and (numbers.values == first).all():
            yield name, str(numbers.categories[first])


def _table(rows: list[dict[str, Any]], before: pd.DataFrame | None) -> pd.DataFrame:
    """The manifest. Stores that can be read as one follow one another."""
    known = [] if before is None else labels_of(before)
    automatic = [set(row["labels"]) for row in rows if "reused" not in row and row["rows"]]
    found = dict.fromkeys(name for row in rows for name in row["labels"])
    shared = [name for name in found if all(name in of_store for of_store in automatic)]
    table = pd.DataFrame([{name: row[name] for name in COLUMNS} for row in rows])
    for name in [*known, *(each for each in shared if each not in known and before is None)]:
        table[name] = [row.get("reused", {}).get(name, row["labels"].get(name)) for row in rows]
    kinds = table.groupby(["layout", "gene_set", "obs"], sort=False).ngroup()
    table = table.iloc[kinds.argsort(kind="stable")].reset_index(drop=True)
    table.loc[table["gene_set"].duplicated(), "gene_names"] = ""
    return table


def _write(destination: Location, content: bytes) -> None:
    """Writes a file that appears whole or not at all."""
    with destination.translated("write"):
        if destination.scheme != "file":
            destination.filesystem().pipe_file(destination.path, content)
            return
        path = Path(destination.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft_path(path) as draft:
            draft.write_bytes(content)
            draft.replace(path)
