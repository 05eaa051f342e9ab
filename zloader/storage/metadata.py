"""Parses the Zarr metadata (v2 or v3) of an array into its ArrayLayout. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from zloader.common.errors import FormatError
from zloader.storage.coders import PREFIX
from zloader.storage.layout import ArrayLayout, Grid, Placement

SHARDING = "sharding_indexed"


def stored_length(node: Any) -> int | None:
    """Number of rows of a column or index stored in Zarr or HDF5; None for any other group.

    The length is that of the array itself, of `values` for nullable columns, or of `codes` for a categorical.
    """
    for part in ("values", "codes"):
        node = node if hasattr(node, "shape") else node.get(part, node)
    shape: tuple[int, ...] = getattr(node, "shape", ())
    return int(shape[0]) if len(shape) == 1 else None


def matrix_shape(stored: Any) -> tuple[int, int] | None:
    """Rows and genes from the shape of an array or the shape attribute of a sparse matrix; None if it is invalid."""
    if not isinstance(stored, list | tuple) or len(stored) != 2:
        return None
    if not all(type(size) in (int, float) and size >= 0 and size % 1 == 0 for size in stored):
        return None
    return int(stored[0]), int(stored[1])


def layout_of(array: Any, *, absent_is_fill: bool) -> ArrayLayout:
    """The layout of an open zarr array. Raises FormatError like `array_layout`."""
    metadata = array.metadata.to_dict() | {"dtype": array.dtype.str}  # zarr omits the dtype for v2
    return array_layout(array.path, metadata, absent_is_fill=absent_is_fill)


def array_layout(path: str, metadata: Mapping[str, Any], *, absent_is_fill: bool) -> ArrayLayout:
    """The layout of an array from its `zarr.json` (v3) or `.zarray` (v2).

    Raises FormatError if the array cannot be read: another Zarr version, elements in column-major order, or big-endian
    bytes.
    """
    version = metadata.get("zarr_format")
    if version not in (2, 3):
        raise FormatError(f"{path} is Zarr v{version}, but only v2 and v3 can be read: run 'zloader convert' on it")
    if version == 2:
        metadata = _as_v3(path, metadata)
    shape = tuple(metadata["shape"])
    outer = tuple(metadata["chunk_grid"]["configuration"]["chunk_shape"])
    codecs = tuple(metadata["codecs"])
    sharding = codecs[0]["configuration"] if codecs and codecs[0]["name"] == SHARDING else None
    inner = tuple(sharding["chunk_shape"]) if sharding else outer
    grid = Grid.of(path, shape, inner, outer)
    of_index = sharding["index_codecs"] if sharding else []
    index_codecs = [codec["name"] for codec in of_index if codec.get("configuration", {}).get("endian") != "big"]
    known_index = len(index_codecs) == len(of_index) and index_codecs in ([], ["bytes"], ["bytes", "crc32c"])
    encoding = metadata.get("chunk_key_encoding", {"name": "default"})
    is_default = encoding["name"] == "default"
    separator = encoding.get("configuration", {}).get("separator", "/" if is_default else ".")
    if encoding["name"] not in ("default", "v2") or not known_index or (sharding and len(codecs) > 1):
        raise FormatError(f"{path} has an unsupported key encoding or shard format: run 'zloader convert' on it")
    fill_value = metadata.get("fill_value")
    dtype, codecs = _narrowed(
        number_dtype(path, metadata["data_type"]), tuple(sharding["codecs"]) if sharding else codecs
    )
    return ArrayLayout(
        path=path,
        dtype=dtype,
        n_elements=math.prod(shape),
        # It would be 0 without genes.
        chunk_elements=max(1, inner[0] * math.prod(shape[1:]) if grid is None else math.prod(inner)),
        codecs=codecs,
        placement=Placement(
            path=path,
            chunks_per_object=max(1, outer[0] // max(1, inner[0])) if grid is None else grid.chunks_per_object,
            sharded=sharding is not None,
            index_checksum="crc32c" in index_codecs,
            index_at_end=not sharding or sharding.get("index_location", "end") == "end",
            prefix=f"c{separator}" if is_default else "",
            separator=separator,
            across=(1,) * (len(shape) - 1) if grid is None else grid.objects[1:],
        ),
        fill_value=0 if fill_value is None else fill_value,
        absent_is_fill=absent_is_fill,
        grid=grid,
    )


def _narrowed(dtype: np.dtype[Any], codecs: tuple[Any, ...]) -> tuple[np.dtype[Any], tuple[Any, ...]]:
    """The dtype of integers in chunks and the other codecs, if the first one only makes them narrower."""
    if not codecs or codecs[0]["name"] != f"{PREFIX}astype":
        return dtype, codecs
    types = codecs[0]["configuration"]
    inner, outer = np.dtype(types["encode_dtype"]), np.dtype(types["decode_dtype"])
    alike = outer == dtype and {inner.kind, outer.kind} <= {*"iu"} and inner.itemsize <= outer.itemsize
    return (inner.newbyteorder("<"), codecs[1:]) if alike else (dtype, codecs)


def _as_v3(path: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a Zarr v2 array, in which each chunk is an object, in the form of v3."""
    by_columns = metadata.get("order", "C") != "C" and len(metadata["shape"]) > 1
    if by_columns or str(metadata["dtype"]).startswith(">"):
        how = "is stored column by column" if by_columns else "is stored in foreign byte order"
        raise FormatError(f"{path} {how}: run 'zloader convert' on it")
    separator = metadata.get("dimension_separator", ".")
    return {
        "shape": metadata["shape"],
        "chunk_grid": {"configuration": {"chunk_shape": metadata["chunks"]}},
        "codecs": _codecs_v2(metadata),
        "chunk_key_encoding": {"name": "v2", "configuration": {"separator": separator}},
        "data_type": metadata["dtype"],
        "fill_value": metadata.get("fill_value"),
    }


def _codecs_v2(metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Filters, bytes and compressor of Zarr v2, named like in v3. zarr gives some as numcodecs objects."""
    filters, compressor = metadata.get("filters") or [], metadata.get("compressor")
    coders = [*filters, *[compressor] * (compressor is not None)]
    found = [dict(coder if isinstance(coder, Mapping) else coder.get_config()) for coder in coders]
    codecs = [{"name": f"{PREFIX}{coder.pop('id')}", "configuration": coder} for coder in found]
    return [*codecs[: len(filters)], {"name": "bytes"}, *codecs[len(filters) :]]


def number_dtype(path: str, data_type: Any) -> np.dtype[Any]:
    """The little-endian dtype of an array of numbers. Raises FormatError for any other array."""
    try:
        dtype: np.dtype[Any] = np.dtype(data_type).newbyteorder("<")
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        name = data_type if dtype.kind == "O" else dtype
        raise FormatError(
            f"{path} holds {name}, not real numbers of at most 64 bits: write it again as numbers, float32 for example"
        )
    return dtype


def codecs_of_arrays(key: str, document: Any) -> dict[str, list[str]]:
    """Maps the path of each array described by a metadata object to the names of its codecs, in encoding order.

    `document` is the object at `key`: a `zarr.json` (consolidated or not), a `.zmetadata` or a `.zarray`. Any other
    object describes no arrays, and an array that is stored as plain bytes has no codecs.
    """
    above, _, name = key.rpartition("/")
    nodes = {"": document} if name in ("zarr.json", ".zarray") else {}
    if name == "zarr.json":
        nodes |= (document.get("consolidated_metadata") or {}).get("metadata", {})
    elif name == ".zmetadata":
        below = {key.rpartition("/"): node for key, node in document.get("metadata", {}).items()}
        nodes = {path: node for (path, _, leaf), node in below.items() if leaf == ".zarray"}
    found = {f"{above}/{path}".strip("/"): list(_codec_names(node)) for path, node in nodes.items()}
    return {path: names for path, names in found.items() if names}


def _codec_names(node: Mapping[str, Any]) -> Iterator[str]:
    """Names of the codecs of an array (v2 or v3) in encoding order, but for bytes; none for a group."""
    for codec in node.get("codecs", []) if node.get("zarr_format") == 3 else _codecs_v2(node):
        name = codec if isinstance(codec, str) else codec["name"]
        if name != "bytes":
            yield name.removeprefix(PREFIX)
        if name == SHARDING:
            yield from _codec_names({"zarr_format": 3, "codecs": codec["configuration"]["codecs"]})
