"""What a store holds: rows, columns and how each matrix is laid out, from its listing and metadata alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import zarr

from zloader.dataset import Dataset
from zloader.errors import FormatError
from zloader.layout import ArrayLayout

_OTHERS = ("obsm", "varm", "obsp", "varp", "uns")


@dataclass(frozen=True, kw_only=True)
class ArraySummary:
    """One array of a matrix. `stored_bytes` are its objects', `decoded_bytes` what a mirror of it takes."""

    path: str
    dtype: str
    original_dtype: str
    elements: int
    chunk_elements: int
    rows_per_chunk: float
    chunks_per_shard: int
    shards: int
    stored_bytes: int
    decoded_bytes: int
    codecs: str


@dataclass(frozen=True, kw_only=True)
class MatrixSummary:
    """One matrix: X, a layer or raw/X. `values` are those stored; `problem` says why it cannot be read, if so."""

    name: str
    encoding: str
    rows: int
    genes: int
    values: int
    density: float
    arrays: Sequence[ArraySummary]
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class ColumnSummary:
    """One obs column: `kind` is `categorical`, `string` or a dtype; `categories` is None where it has none."""

    name: str
    kind: str
    categories: int | None


@dataclass(frozen=True, kw_only=True)
class StoreSummary:
    """What a store holds. `others` names obsm, varm and the like as `obsm/X_pca`."""

    url: str
    fingerprint: str
    rows: int
    genes: int
    objects: int
    stored_bytes: int
    obs: Sequence[ColumnSummary]
    matrices: Sequence[MatrixSummary]
    others: Sequence[str]


def summarize(dataset: Dataset) -> StoreSummary:
    """What the store holds, from its metadata alone."""
    root = dataset.root
    sizes = dataset.object_sizes()
    return StoreSummary(
        url=dataset.location.url,
        fingerprint=dataset.fingerprint,
        rows=dataset.n_obs,
        genes=dataset.n_vars,
        objects=len(sizes),
        stored_bytes=sum(sizes.values()),
        obs=[_column(name, root[f"obs/{name}"]) for name in dataset.obs_columns],
        matrices=[_matrix(dataset, name, root[name]) for name in dataset.matrix_names],
        others=[f"{group}/{key}" for group in _OTHERS for key in sorted(root.get(group, {}))],
    )


def _column(name: str, node: Any) -> ColumnSummary:
    encoding = str(node.attrs.get("encoding-type", "array"))
    if encoding == "categorical":
        return ColumnSummary(name=name, kind="categorical", categories=int(node["categories"].shape[0]))
    if "string" in encoding:
        return ColumnSummary(name=name, kind="string", categories=None)
    values = node if isinstance(node, zarr.Array) else node.get("values")
    kind = encoding if values is None else str(values.dtype)
    return ColumnSummary(name=name, kind=kind, categories=None)


def _matrix(dataset: Dataset, name: str, node: Any) -> MatrixSummary:
    encoding = "dense" if isinstance(node, zarr.Array) else str(node.attrs.get("encoding-type"))
    rows, genes = (int(size) for size in (node.shape if encoding == "dense" else node.attrs["shape"]))
    arrays: list[ArraySummary] = []
    problem = None
    values = rows * genes if encoding == "dense" else int(node["data"].shape[0])
    try:
        layout = dataset.matrix(name)
    except FormatError as error:
        problem = str(error)
    else:
        recorded = node.attrs.get("zloader", {}).get("dtype", {})
        arrays = [_array(dataset, array, rows, recorded) for array in layout.arrays]
    return MatrixSummary(
        name=name,
        encoding=encoding,
        rows=rows,
        genes=genes,
        values=values,
        density=values / (rows * genes) if rows * genes else 0.0,
        arrays=arrays,
        problem=problem,
    )


def _array(dataset: Dataset, array: ArrayLayout, rows: int, recorded: Mapping[str, str]) -> ArraySummary:
    part = "indices" if array.path.endswith("/indices") else "data"
    return ArraySummary(
        path=array.path,
        dtype=array.dtype.name,
        original_dtype=str(recorded.get(part, array.dtype.name)),
        elements=array.n_elements,
        chunk_elements=array.chunk_elements,
        rows_per_chunk=array.chunk_elements * rows / array.n_elements if array.n_elements else 0.0,
        chunks_per_shard=array.chunks_per_shard,
        shards=array.n_shards,
        stored_bytes=stored_bytes(dataset, array),
        decoded_bytes=array.n_elements * array.dtype.itemsize,
        codecs=", ".join(map(_codec, array.codecs)),
    )


def _codec(codec: Mapping[str, Any]) -> str:
    """`blosc(lz4, shuffle)` or the codec's bare name."""
    settings = codec.get("configuration") or {}
    if codec["name"] == "blosc":
        return f"blosc({settings['cname']}, {settings['shuffle']})"
    return str(codec["name"])


def stored_bytes(dataset: Dataset, array: ArrayLayout) -> int:
    """Bytes of the objects that hold an array."""
    keys = map(array.shard_key, range(array.n_shards))
    return sum(dataset.objects[key].size for key in keys if key in dataset.objects)
