"""Writes a store with as many rows as one likes, of which nearly all values are hard links to one shard.

X has 62 710 genes and 2 048 values per row on average: 2e12 values for a billion rows. Rows repeat every SHARD_ROWS
rows, and their values fill exactly one shard, so one shard of `indices` and one of `data` are written as `zloader
convert` writes them, and all others are links to them. indptr is real, and so are the codes of the obs columns plate
(sorted), drug (runs of 3 000 rows) and cell_line (random), in chunks of 64 KiB as `zloader convert` writes them.
n_counts and the obs names repeat, and their chunks are links, too. A billion rows take 4 GB of disk, and would take 2
TB without links. Everything in it opens with anndata.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from zloader.conversion.encode import ChunkEncoder, shard_index, zarr_codecs
from zloader.storage.layout import ArrayLayout
from zloader.storage.metadata import layout_of

N_GENES = 62_710
SHARD_ROWS = 1 << 16
ROW_VALUES = 2048  # on average
CHUNK = 16 * ROW_VALUES  # values
LABELS = {"plate": 14, "drug": 1100, "cell_line": 50}
_MOST_APART = 38  # genes of a row, which is 19 on average
_CODES, _SHARD_CODES = 1 << 16, 1 << 24  # bytes per chunk, and rows per shard, of columns of codes
_CHUNK_ROWS = 1 << 20  # of n_counts
_CHUNK_NAMES = 1 << 17
_OFFSETS, _SHARD_OFFSETS = 1 << 16, 1 << 25  # entries of indptr per chunk and per shard
_PIECE_ROWS = 1 << 12


def lengths() -> NDArray[np.int64]:
    """The number of values of each of SHARD_ROWS rows: 1 000 to 3 100, and ROW_VALUES on average."""
    drawn = np.random.default_rng(0).integers(1000, 3097, SHARD_ROWS)
    drawn += np.arange(SHARD_ROWS) < (ROW_VALUES * SHARD_ROWS - drawn.sum()) % SHARD_ROWS
    short = (ROW_VALUES * SHARD_ROWS - int(drawn.sum())) // SHARD_ROWS
    return np.asarray(drawn + short, np.int64)


def values_of(row: int, of_row: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The genes and the values of a row; `of_row` is `lengths()`. They compress about as well as real counts."""
    rng, length = np.random.default_rng(row % SHARD_ROWS), int(of_row[row % SHARD_ROWS])
    return np.cumsum(rng.integers(1, _MOST_APART, length)), np.minimum(rng.geometric(0.78, length), 255)


def codes_of(rows: NDArray[np.int64], n_rows: int) -> dict[str, NDArray[np.int64]]:
    """The codes of some rows in each obs column of labels."""
    scattered = (rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)
    return {
        "plate": rows * LABELS["plate"] // n_rows,
        "drug": rows // 3000 % LABELS["drug"],
        "cell_line": (scattered % np.uint64(LABELS["cell_line"])).astype(np.int64),
    }


def write(store: Path, n_rows: int) -> None:
    """Writes an AnnData store of `n_rows` rows to a directory on a file system with hard links."""
    root = zarr.create_group(store, zarr_format=3, attributes=_encoding("anndata", "0.1.0"))
    _write_x(store, root, n_rows)
    _write_obs(store, root, n_rows)
    _frame(root, "var", [], np.array([f"gene {gene}" for gene in range(N_GENES)]))
    zarr.consolidate_metadata(store)


def _encoding(kind: str, version: str) -> dict[str, Any]:
    return {"encoding-type": kind, "encoding-version": version}


def _write_x(store: Path, root: zarr.Group, n_rows: int) -> None:
    of_row = lengths()
    ends = np.concatenate([[0], np.cumsum(of_row)])
    full, rest = divmod(n_rows, SHARD_ROWS)
    n_values = full * int(ends[-1]) + int(ends[rest])
    x = root.create_group("X", attributes={**_encoding("csr_matrix", "0.1.0"), "shape": [n_rows, N_GENES]})
    for name, dtype in (("indices", np.dtype("u2")), ("data", np.dtype("u1"))):
        codecs = zarr_codecs("lz4", dtype, ascending=name == "indices")
        sharded = {"chunks": (CHUNK,), "shards": (SHARD_ROWS * ROW_VALUES,)}
        array = x.create_array(name, shape=(n_values,), dtype=dtype, **sharded, **codecs)
        layout = layout_of(array, absent_is_fill=False)
        _write_shard(store, layout, of_row, 0 if name == "indices" else 1)
        _link(store / "X" / name, layout.n_shards)
    codecs, n_entries = zarr_codecs("lz4", np.dtype("i8")), n_rows + 1
    sharded = {"chunks": (_OFFSETS,), "shards": (min(_SHARD_OFFSETS, -(-n_entries // _OFFSETS) * _OFFSETS),)}
    indptr = x.create_array("indptr", shape=(n_entries,), dtype="i8", **sharded, **codecs)
    for first in range(0, n_entries, _SHARD_OFFSETS):
        rows = np.arange(first, min(n_entries, first + _SHARD_OFFSETS))
        indptr[first : first + len(rows)] = rows // SHARD_ROWS * ends[-1] + ends[rows % SHARD_ROWS]


def _write_shard(store: Path, layout: ArrayLayout, of_row: NDArray[np.int64], which: int) -> None:
    """Writes the first shard of `indices` (which 0) or `data` (which 1)."""
    encoder, sizes, left = ChunkEncoder(layout), [], np.empty(0, layout.dtype)
    path = store / layout.shard_key(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for piece in _pieces(of_row, which):
            left = np.concatenate([left, piece.astype(layout.dtype)])
            chunks = (left[first : first + CHUNK] for first in range(0, len(left) // CHUNK * CHUNK, CHUNK))
            sizes.extend(file.write(encoder.encode(chunk, CHUNK)) for chunk in chunks)
            left = left[len(left) // CHUNK * CHUNK :]
        file.write(shard_index(sizes, layout.chunks_per_shard))


def _pieces(of_row: NDArray[np.int64], which: int) -> Iterator[NDArray[np.int64]]:
    for first in range(0, SHARD_ROWS, _PIECE_ROWS):
        rows = range(first, first + _PIECE_ROWS)
        yield np.concatenate([values_of(row, of_row)[which] for row in rows])


def _write_obs(store: Path, root: zarr.Group, n_rows: int) -> None:
    names = np.array([f"AAACCTGAG{number:06d}-1" for number in range(min(n_rows, _CHUNK_NAMES))])
    obs = _frame(root, "obs", [*LABELS, "n_counts"], names, n_rows)
    _link(store / "obs" / "_index", -(-n_rows // _CHUNK_NAMES))
    codes = {}
    for name, n_labels in LABELS.items():
        column = obs.create_group(name, attributes={**_encoding("categorical", "0.2.0"), "ordered": False})
        _strings(column, "categories", np.array([f"{name} {number}" for number in range(n_labels)]))
        dtype = np.min_scalar_type(-n_labels)
        shards = (min(_SHARD_CODES, -(-n_rows // _CODES) * _CODES),)
        codes[name] = _column(column, "codes", n_rows, dtype, chunks=(_CODES // dtype.itemsize,), shards=shards)
    for first in range(0, n_rows, _SHARD_CODES):
        rows = np.arange(first, min(n_rows, first + _SHARD_CODES))
        for name, values in codes_of(rows, n_rows).items():
            codes[name][first : first + len(rows)] = values.astype(codes[name].dtype)
    counts = _column(obs, "n_counts", n_rows, np.dtype("f4"), chunks=(min(n_rows, _CHUNK_ROWS),))
    first = np.resize(lengths(), min(n_rows, _CHUNK_ROWS))
    counts[: len(first)] = 2.0 * first
    _link(store / "obs" / "n_counts", -(-n_rows // _CHUNK_ROWS))


def _column(group: zarr.Group, name: str, n_rows: int, dtype: np.dtype[Any], **grid: Any) -> zarr.Array[Any]:
    attributes = _encoding("array", "0.2.0")
    codecs = zarr_codecs("lz4", dtype)
    return group.create_array(name, shape=(n_rows,), dtype=dtype, attributes=attributes, **grid, **codecs)


def _frame(root: zarr.Group, name: str, columns: list[str], names: Any, n_rows: int | None = None) -> zarr.Group:
    attributes = {**_encoding("dataframe", "0.2.0"), "_index": "_index", "column-order": columns}
    group = root.create_group(name, attributes=attributes)
    _strings(group, "_index", names, n_rows)
    return group


def _strings(group: zarr.Group, name: str, values: Any, n_rows: int | None = None) -> None:
    """An array of strings, or only its first chunk if it has `n_rows`."""
    attributes, shape = _encoding("string-array", "0.2.0"), (n_rows or len(values),)
    array = group.create_array(name, shape=shape, dtype=str, chunks=(len(values),), attributes=attributes)
    array[: len(values)] = values


def _link(array: Path, n_objects: int) -> None:
    """Makes all objects of an array links to its first."""
    for number in range(1, n_objects):
        os.link(array / "c" / "0", array / "c" / str(number))
