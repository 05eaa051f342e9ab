"""Summaries of datasets for `zloader info`: rows, columns and matrix layouts, from listings and metadata alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zloader.common.errors import FormatError, MissingColumnError
from zloader.common.messages import size
from zloader.dataset.dataset import Dataset
from zloader.dataset.elements import is_array, matrix_encoding, obs_of, path_of
from zloader.dataset.obs import StoreColumns
from zloader.dataset.store import OpenedStore
from zloader.storage import hdf5_filters
from zloader.storage.coded_rows import likely_bytes
from zloader.storage.coders import PREFIX
from zloader.storage.layout import ArrayLayout, MatrixLayout, distinct
from zloader.storage.row_blocks import RowForm

_OTHERS = ("obsm", "varm", "obsp", "varp", "uns")


@dataclass(frozen=True, kw_only=True)
class ArraySummary:
    """One array of a matrix. `stored_bytes` is the size of its objects, `decoded_bytes` that of its elements.

    `chunks_per_row` is 1 unless chunks hold parts of rows.

    With several stores, sizes are summed, all dtypes and codecs are listed, and chunks and shards are the largest.
    """

    path: str
    dtype: str
    original_dtype: str
    elements: int
    chunk_elements: int
    rows_per_chunk: float
    chunks_per_row: int
    chunks_per_shard: int
    shards: int
    stored_bytes: int
    decoded_bytes: int
    codecs: str


@dataclass(frozen=True, kw_only=True)
class MatrixSummary:
    """One matrix: X, a layer or raw/X. `values` counts the stored values; `problem` says why it cannot be read.

    `bytes_per_value` is the stored size of `arrays` per value, so for CSR that of an index and a value together.
    `compact_bytes` is the size of a compact mirror, about; `at_most` says that it is smaller if floats are counts.
    """

    name: str
    encoding: str
    rows: int
    genes: int
    values: int
    density: float
    bytes_per_value: float
    arrays: Sequence[ArraySummary]
    compact_bytes: int = 0
    at_most: bool = False
    problem: str | None = None

    @property
    def decoded_bytes(self) -> int:
        """The size of a raw mirror, without 40 bytes per row."""
        return sum(array.decoded_bytes for array in self.arrays)


@dataclass(frozen=True, kw_only=True)
class ColumnSummary:
    """One obs column. `kind` is `categorical`, `string`, `unreadable` or a dtype, or several joined by slashes.

    `categories` is the number of categories. It is None for other kinds of columns, and with several stores.
    """

    name: str
    kind: str
    categories: int | None


@dataclass(frozen=True, kw_only=True)
class StoreSummary:
    """The contents of a dataset. `others` lists entries of obsm, varm, obsp, varp and uns, such as `obsm/X_pca`."""

    url: str
    stores: int
    fingerprint: str
    rows: int
    genes: int
    objects: int
    stored_bytes: int
    obs: Sequence[ColumnSummary]
    matrices: Sequence[MatrixSummary]
    others: Sequence[str]


def summarize(dataset: Dataset) -> StoreSummary:
    """Summarizes a dataset from its metadata alone."""
    stores = dataset.stores
    return StoreSummary(
        url=dataset.url,
        stores=len(stores),
        fingerprint=dataset.fingerprint,
        rows=dataset.n_obs,
        genes=dataset.n_vars,
        objects=sum(len(store.objects) for store in stores),
        stored_bytes=sum(sum(store.objects.sizes.values()) for store in stores),
        obs=[_column(stores, name) for name in dataset.obs_columns],
        matrices=[_matrix(dataset, name) for name in dataset.matrix_names],
        others=[
            f"{group}/{key}"
            for group in _OTHERS
            for key in sorted(set.intersection(*(_names_in(store, group) for store in stores)))
        ],
    )


def _names_in(store: OpenedStore, group: str) -> set[str]:
    return set(store.obsm_paths if group == "obsm" else store.keys(group))


def _column(stores: Sequence[OpenedStore], name: str) -> ColumnSummary:
    try:
        columns = [StoreColumns(store) for store in stores]
        kinds = [each.shown_kind(name) for each in columns]
    except FormatError:
        return ColumnSummary(name=name, kind="unreadable", categories=None)
    n_categories = columns[0].n_categories(name) if kinds == ["categorical"] else None
    return ColumnSummary(name=name, kind=_all(kinds), categories=n_categories)


def _all(names: Iterable[str]) -> str:
    """The distinct names, joined by slashes."""
    return " / ".join(dict.fromkeys(names))


def _matrix(dataset: Dataset, name: str) -> MatrixSummary:
    stores = dataset.stores
    try:
        nodes = [store.node(path_of(name)) for store in stores]
        values = sum(_values(store, name).size for store in stores)
        shapes = [store.shape(name) for store in stores]
        genes = dataset.matrices.n_genes(name)
    except (FormatError, MissingColumnError) as error:
        return MatrixSummary(
            name=name,
            encoding="unknown",
            rows=0,
            genes=0,
            values=0,
            density=0.0,
            bytes_per_value=0.0,
            arrays=[],
            problem=str(error),
        )
    encodings = list(map(matrix_encoding, nodes))
    rows = sum(n_rows for n_rows, _ in shapes)
    arrays: dict[str, list[tuple[OpenedStore, ArrayLayout]]] = {}
    problem = None
    try:
        layouts = dataset.matrices.layouts(name)
        for store, layout in zip(stores, layouts, strict=True):
            for array in layout.arrays:
                arrays.setdefault(array.path, []).append((store, array))
        if takes := sum(map(OpenedStore.transposing_bytes, stores, layouts)):
            problem = (
                f"stored by columns: it is transposed in memory when it is first used, which takes {size(takes)}. "
                "'zloader convert' writes it by rows"
            )
    except FormatError as error:
        problem = str(error)
    summaries = [] if problem else [_array(name, alike) for alike in arrays.values()]
    compact = [] if problem else [_compact(layout) for layout in layouts]
    return MatrixSummary(
        name=name,
        encoding=_all(encodings),
        rows=rows,
        genes=genes,
        values=values,
        density=values / (rows * genes) if rows * genes else 0.0,
        bytes_per_value=sum(array.stored_bytes for array in summaries) / values if values else 0.0,
        arrays=summaries,
        compact_bytes=sum(n_bytes for n_bytes, _ in compact),
        at_most=any(at_most for _, at_most in compact),
        problem=problem,
    )


def _compact(matrix: MatrixLayout) -> tuple[int, bool]:
    """The bytes of a compact mirror, about, and whether they may be much fewer."""
    form = RowForm.of(matrix, None, compact=True)
    if not form.coded:
        return form.decoded_bytes, False
    return likely_bytes(matrix.n_rows, matrix.values.n_elements, matrix.n_genes, (matrix.arrays[0].dtype, form.values))


def _values(store: OpenedStore, matrix: str) -> Any:
    """The array with the values of a matrix."""
    path = path_of(matrix)
    node = store.node(path)
    return node if is_array(node) else store.node(f"{path}/data")


def _array(matrix: str, stored: Sequence[tuple[OpenedStore, ArrayLayout]]) -> ArraySummary:
    arrays = [array for _, array in stored]
    path = arrays[0].path
    part = "indices" if path.endswith("/indices") else "data"
    recorded = [store.recorded_dtypes(path_of(matrix)) for store, _ in stored]
    elements, chunk_elements = sum(array.n_elements for array in arrays), max(array.chunk_elements for array in arrays)
    rows = sum(store.length(obs_of(matrix)) for store, _ in stored)
    return ArraySummary(
        path=path,
        dtype=_all(array.dtype.name for array in arrays),
        original_dtype=_all(
            str(was.get(part, (array.stored_dtype or array.dtype).name))
            for was, array in zip(recorded, arrays, strict=True)
        ),
        elements=elements,
        chunk_elements=chunk_elements,
        rows_per_chunk=max(array.band_elements for array in arrays) * rows / elements if elements else 0.0,
        chunks_per_row=max(1 if array.grid is None else len(distinct(array.grid.pieces[2])) for array in arrays),
        chunks_per_shard=max(array.chunks_per_shard for array in arrays),
        shards=sum(array.n_shards for array in arrays),
        stored_bytes=sum(_stored_bytes(store, array) for store, array in stored),
        decoded_bytes=sum(array.n_elements * array.dtype.itemsize for array in arrays),
        codecs=_all(", ".join(map(_codec, array.codecs)) for array in arrays),
    )


def _codec(codec: Mapping[str, Any]) -> str:
    """The name of a codec, as in `delta`, `blosc(lz4, bitshuffle)` or `crc32c`."""
    settings = codec.get("configuration") or {}
    if codec["name"] == "blosc":
        return f"blosc({settings['cname']}, {settings['shuffle']})"
    if codec["name"] == hdf5_filters.NAME:
        return ", ".join(each["name"] for each in settings["filters"]) or "bytes"
    return str(codec["name"]).removeprefix(PREFIX)


def _stored_bytes(store: OpenedStore, array: ArrayLayout) -> int:
    """The size in bytes of the objects that hold an array."""
    return array.placement.stored_bytes(range(array.n_shards), store.object_sizes())[0]
