"""Conversion: what goes in comes out, laid out as promised, and nothing unfinished ever opens."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.abc.buffer import Buffer
from zarr.abc.store import Store
from zarr.storage import WrapperStore

import zloader as zl
from zloader import errors
from zloader.convert import convert_to
from zloader.destination import MARKER, Destination, PendingStore
from zloader.encode import ChunkEncoder, DtypeScan, grid, parse_size, shard_index
from zloader.progress import progress_bars
from zloader.store import Location

# Chunks of 1 024 elements, shards of two of them or fewer, windows of a few rows.
SMALL = zl.ConvertOptions(chunk_rows=1, shard_size="4KiB", window_bytes=4096)
LAYOUTS: dict[str, Callable[[sp.csr_matrix], Any]] = {
    "csr": lambda x: x,
    "csc": lambda x: x.tocsc(),
    "dense": lambda x: x.toarray(),
}


def counts(n_rows: int = 60, n_genes: int = 300, seed: int = 0, dtype: Any = np.float32) -> sp.csr_matrix:
    """Counts with some empty rows, about 5 000 values."""
    x = sp.random(n_rows, n_genes, 0.3, "csr", random_state=seed)
    x.data = np.random.default_rng(seed).integers(1, 100, x.nnz).astype(dtype)
    x.data[np.repeat(np.arange(n_rows) % 7 == 3, np.diff(x.indptr))] = 0
    x.eliminate_zeros()
    return x


def frame(length: int, prefix: str) -> pd.DataFrame:
    return pd.DataFrame(index=[f"{prefix}{i}" for i in range(length)])


def write_h5ad(path: Path, x: Any, **parts: Any) -> Path:
    n_rows, n_genes = x.shape
    parts = {"obs": frame(n_rows, "cell"), "var": frame(n_genes, "gene")} | parts
    with ad.settings.override(allow_write_nullable_strings=True):
        ad.AnnData(X=x, **parts).write_h5ad(path, convert_strings_to_categoricals=False)
    return path


def write_csr(path: Path, x: sp.csr_matrix, **parts: Any) -> Path:
    """As `write_h5ad`, with the arrays of X exactly as they are: no canonical form, any dtype, any lie."""
    empty = sp.csr_matrix(x.shape, dtype=np.float32)
    write_h5ad(path, empty, **parts)
    with h5py.File(path, "r+") as file:
        for name in ("data", "indices", "indptr"):
            del file["X"][name]
            file["X"][name] = getattr(x, name)
    return path


def convert(source: Path, dest: str | Path, options: zl.ConvertOptions = SMALL, **more: Any) -> zl.ConversionReport:
    return zl.convert(source, dest, options=options, progress=False, **more)


def dense(x: Any) -> np.ndarray:
    return x.toarray() if sp.issparse(x) else np.asarray(x)


def assert_same(out: Any, wanted: Any) -> None:
    """Equal in kind, dtype and value, all the way down."""
    if isinstance(wanted, Mapping):
        assert set(out) == set(wanted)
        for key in wanted:
            assert_same(out[key], wanted[key])
    elif isinstance(wanted, pd.DataFrame):
        pd.testing.assert_frame_equal(out, wanted)
    elif sp.issparse(wanted):
        assert (out.format, out.dtype) == (wanted.format, wanted.dtype)
        np.testing.assert_array_equal(out.toarray(), wanted.toarray())
    elif isinstance(wanted, np.ndarray):
        assert out.dtype == wanted.dtype or (out.dtype.kind, wanted.dtype.kind) == ("T", "O")  # strings
        np.testing.assert_array_equal(out, wanted)
    else:
        assert type(out) is type(wanted)
        assert out == wanted


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def assert_not_a_store(dest: Path) -> None:
    with pytest.raises((FileNotFoundError, KeyError)):
        zarr.open_group(dest, mode="r")
    with pytest.raises((FileNotFoundError, KeyError)):
        ad.read_zarr(dest)


# ---- what goes in comes out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bool", "int8", "uint16", "int64"])
def test_values_come_out_as_they_went_in(tmp_path: Path, layout: str, dtype: str) -> None:
    x = counts(dtype=dtype)
    if dtype == "float64":
        x.data /= 3
    if dtype == "int8":
        x.data[::2] *= -1
    source = write_h5ad(tmp_path / "a.h5ad", LAYOUTS[layout](x))
    report = convert(source, tmp_path / "a.zarr")
    out = ad.read_zarr(tmp_path / "a.zarr")
    assert_same(out.obs, ad.read_h5ad(source).obs)
    np.testing.assert_array_equal(dense(out.X), x.toarray())
    assert sp.issparse(out.X) == (layout != "dense")
    assert (report.rows, report.genes, report.rows_made_canonical) == (60, 300, {})
    assert report.values == (60 * 300 if layout == "dense" else x.nnz)


def full_anndata() -> ad.AnnData:
    rng = np.random.default_rng(0)
    n_rows, n_genes = 60, 300
    obs = pd.DataFrame(
        {
            "kind": pd.Categorical.from_codes(rng.integers(-1, 3, n_rows), ["a", "b", "c", "unused"]),
            "ordered": pd.Categorical(rng.choice(["lo", "hi"], n_rows), categories=["lo", "hi"], ordered=True),
            "numbered": pd.Categorical(rng.integers(0, 3, n_rows)),
            "string": [f"name {i % 9} ä" for i in range(n_rows)],
            "flag": rng.random(n_rows) > 0.5,
            "maybe": pd.array([True, None] * 30, dtype="boolean"),
            "count": pd.array([None, 3] * 30, dtype="Int32"),
            "nullable string": pd.array(["x", None] * 30, dtype="string"),
            "float": rng.random(n_rows),
            "zero": np.zeros(n_rows, np.int16),
        },
        index=pd.Index([f"cell{i}" for i in range(n_rows)], name="barcode"),
    )
    var = pd.DataFrame({"symbol": [f"s{i}" for i in range(n_genes)]}, index=[f"g{i}" for i in range(n_genes)])
    adata = ad.AnnData(
        X=counts(),
        obs=obs,
        var=var,
        layers={"csr": counts(seed=1), "csc": counts(seed=2).tocsc(), "dense": rng.random((n_rows, n_genes))},
        obsm={"X_pca": rng.random((n_rows, 5), np.float32), "frame": obs[["float"]], "sparse": counts(n_rows, 4)},
        varm={"PCs": rng.random((n_genes, 5))},
        obsp={"graph": sp.random(n_rows, n_rows, 0.1, "csr", random_state=0)},
        varp={"pairs": rng.random((n_genes, n_genes)).astype(np.float32)},
        uns={
            "text": "hello",
            "number": 3.5,
            "none": None,
            "flag": True,
            "list": np.array(["a", "b"]),
            "nested": {"array": np.arange(6).reshape(2, 3), "frame": var.head(3), "empty": {}},
            "records": np.array([(1, 0.5), (2, 0.25)], dtype=[("n", "i4"), ("p", "f8")]),
        },
    )
    adata.raw = ad.AnnData(
        X=counts(n_rows, 400, seed=3),
        obs=obs,
        var=frame(400, "raw"),
        varm={"loadings": rng.random((400, 2))},
    )
    return adata


def test_everything_an_anndata_holds_is_kept(tmp_path: Path) -> None:
    adata = full_anndata()
    with ad.settings.override(allow_write_nullable_strings=True):
        adata.write_h5ad(tmp_path / "a.h5ad", convert_strings_to_categoricals=False)
    report = convert(tmp_path / "a.h5ad", tmp_path / "a.zarr")
    wanted, out = ad.read_h5ad(tmp_path / "a.h5ad"), ad.read_zarr(tmp_path / "a.zarr")
    for part in ("obs", "var", "obsm", "varm", "obsp", "varp", "uns"):
        assert_same(getattr(out, part), getattr(wanted, part))
    assert set(out.layers) == {"csr", "csc", "dense"}
    for name, layer in wanted.layers.items():
        np.testing.assert_array_equal(dense(out.layers[name]), dense(layer))
    assert out.layers["dense"].dtype == np.float64
    assert out.layers["csc"].format == "csr"
    assert_same(out.raw.var, wanted.raw.var)
    assert_same(out.raw.varm, wanted.raw.varm)
    np.testing.assert_array_equal(dense(out.raw.X), dense(wanted.raw.X))
    assert report.dtypes_changed["raw/X/data"] == "float32 -> uint8"
    assert json.loads(json.dumps(dataclasses.asdict(report)))["rows"] == 60


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 5), (5, 1), (1, 1), (0, 5), (5, 0), (3, 4)], ids=str)
@pytest.mark.parametrize("filled", [True, False], ids=["ones", "no-values"])
def test_small_shapes(tmp_path: Path, layout: str, shape: tuple[int, int], filled: bool) -> None:
    x = sp.csr_matrix(np.full(shape, float(filled), np.float32))
    source = write_h5ad(tmp_path / "a.h5ad", LAYOUTS[layout](x))
    convert(source, tmp_path / "a.zarr")
    out = ad.read_zarr(tmp_path / "a.zarr")
    assert out.shape == shape
    np.testing.assert_array_equal(dense(out.X), x.toarray())


def test_big_endian_and_compressed_files(tmp_path: Path) -> None:
    x = counts()
    adata = ad.AnnData(X=x, obs=frame(60, "c"), var=frame(300, "g"))
    adata.write_h5ad(tmp_path / "gzip.h5ad", compression="gzip")
    with h5py.File(tmp_path / "gzip.h5ad", "r+") as file:
        for name, dtype in (("data", ">f4"), ("indices", ">i4"), ("indptr", ">i8")):
            stored = file["X"][name][:].astype(dtype)
            del file["X"][name]
            file["X"].create_dataset(name, data=stored, compression="lzf")
    for keep in (True, False):
        convert(
            tmp_path / "gzip.h5ad", tmp_path / "a.zarr", dataclasses.replace(SMALL, preserve_dtype=keep), overwrite=True
        )
        np.testing.assert_array_equal(dense(ad.read_zarr(tmp_path / "a.zarr").X), x.toarray())


@st.composite
def any_csr(draw: st.DrawFn) -> sp.csr_matrix:
    """Rows of up to a few hundred values, unsorted and with duplicates, or canonical."""
    n_genes = draw(st.sampled_from([1, 7, 255, 256, 257, 70_000]))
    lengths = draw(st.lists(st.integers(0, 400), min_size=1, max_size=20))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    indices = rng.integers(0, n_genes, sum(lengths)).astype(draw(st.sampled_from([np.int32, np.int64])))
    dtype = draw(st.sampled_from([np.float32, np.float64, np.int16, np.uint8, np.bool_]))
    high = draw(st.sampled_from([2, 100, 300]))
    data = (rng.integers(0, high, sum(lengths)) - (high // 2 if draw(st.booleans()) else 0)).astype(dtype)
    x = sp.csr_matrix((data, indices, np.concatenate([[0], np.cumsum(lengths)])), shape=(len(lengths), n_genes))
    if draw(st.booleans()):
        x.sum_duplicates()
    return x


@settings(max_examples=30)
@given(
    x=any_csr(),
    csc=st.booleans(),
    chunk_rows=st.integers(1, 40),
    shard_size=st.integers(500, 20_000),
    window_bytes=st.integers(1000, 20_000),
    codec=st.sampled_from(["lz4", "zstd", "none"]),
    preserve_dtype=st.booleans(),
)
def test_any_rows_in_any_grid_against_scipy(x: sp.csr_matrix, csc: bool, **options: Any) -> None:
    wanted = x.copy()
    wanted.sum_duplicates()
    not_canonical = sum(
        bool(np.any(np.diff(x.indices[a:b].astype(np.int64)) <= 0))
        for a, b in zip(x.indptr[:-1], x.indptr[1:], strict=True)
    )
    with tempfile.TemporaryDirectory() as directory:
        source, dest = Path(directory) / "a.h5ad", Path(directory) / "a.zarr"
        if csc:  # transposing sorts, and scipy keeps duplicates
            write_h5ad(source, x.tocsc())
        else:
            write_csr(source, x)
        report = convert(source, dest, zl.ConvertOptions(**options))
        out = ad.read_zarr(dest).X
    np.testing.assert_array_equal(out.indptr, wanted.indptr)
    np.testing.assert_array_equal(out.indices, wanted.indices)
    np.testing.assert_array_equal(out.data, wanted.data)
    assert report.values == wanted.nnz
    if not csc:
        assert report.rows_made_canonical == ({"X": not_canonical} if not_canonical else {})


def test_duplicates_whose_sum_needs_a_wider_dtype_than_any_value(tmp_path: Path) -> None:
    x = sp.csr_matrix((np.full(4, 200, np.float32), [1, 1, 0, 2], [0, 3, 4]), shape=(2, 3))
    report = convert(write_csr(tmp_path / "a.h5ad", x), tmp_path / "a.zarr")
    out = ad.read_zarr(tmp_path / "a.zarr").X
    assert out.toarray().tolist() == [[200, 400, 0], [0, 0, 200]]
    assert (report.values, report.rows_made_canonical) == (3, {"X": 1})
    assert report.dtypes_changed["X/data"] == "float32 -> uint16"


# ---- dtypes


@pytest.mark.parametrize(
    ("values", "dtype", "stored"),
    [
        ([0, 255], "float32", "uint8"),
        ([0, 256], "float32", "uint16"),
        ([-1, 127], "float32", "int8"),
        ([-1, 128], "float32", "int16"),
        ([0, 70_000], "float32", "float32"),  # no integer type of fewer bytes holds it
        ([0, 70_000], "float64", "uint32"),
        ([0, 2.0**33], "float64", "float64"),
        ([0, 3e38], "float32", "float32"),
        ([1, 0.5], "float32", "float32"),
        ([1, -0.0], "float32", "float32"),
        ([1, np.nan], "float32", "float32"),
        ([1, np.inf], "float64", "float64"),
        ([1, -np.inf], "float16", "float16"),
        ([1, 2], "float16", "uint8"),
        ([1, 2], "int64", "uint8"),
        ([-300, 2], "int64", "int16"),
        ([1, 2**63], "uint64", "uint64"),
        ([1, 2**31], "int64", "uint32"),
        ([1, 200], "int8", "int8"),
        ([1, 0], "bool", "bool"),
        ([], "float32", "float32"),
    ],
)
def test_smallest_dtype_that_loses_nothing(values: list[float], dtype: str, stored: str) -> None:
    with np.errstate(over="ignore"):
        array = np.array(values).astype(dtype)
    scan = DtypeScan(array.dtype)
    scan.add(array[:1])
    scan.add(array[1:])
    assert scan.dtype == np.dtype(stored)
    kept = array.astype(scan.dtype).astype(array.dtype)
    assert kept.tobytes() == array.tobytes()


@given(st.lists(st.floats(width=32) | st.integers(-70_000, 70_000).map(float), max_size=20))
def test_no_dtype_loses_a_bit(values: list[float]) -> None:
    array = np.array(values, np.float32)
    scan = DtypeScan(array.dtype)
    scan.add(array)
    with np.errstate(invalid="ignore"):
        assert array.astype(scan.dtype).astype(np.float32).tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("n_genes", "stored"), [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65_536, "uint16"), (65_537, "int32")]
)
def test_indices_take_the_smallest_type_that_holds_the_gene_count(tmp_path: Path, n_genes: int, stored: str) -> None:
    x = sp.csr_matrix(([1.5], ([1], [n_genes - 1])), shape=(2, n_genes))
    convert(write_h5ad(tmp_path / "a.h5ad", x), tmp_path / "a.zarr")
    assert zarr.open_group(tmp_path / "a.zarr", mode="r")["X/indices"].dtype == stored
    out = ad.read_zarr(tmp_path / "a.zarr")
    assert out[1, n_genes - 1].X.toarray() == [[1.5]]
    assert (out.X @ np.ones(n_genes)).tolist() == [0, 1.5]


def test_original_dtypes_are_recorded_and_can_be_kept(tmp_path: Path) -> None:
    source = write_h5ad(tmp_path / "a.h5ad", counts(), layers={"dense": counts().toarray()})
    report = convert(source, tmp_path / "a.zarr")
    root = zarr.open_group(tmp_path / "a.zarr", mode="r")
    assert root["X"].attrs["zloader"] == {"dtype": {"data": "float32", "indices": "int32"}}
    assert root["layers/dense"].attrs["zloader"] == {"dtype": {"data": "float32"}}
    assert (root["X/data"].dtype, root["layers/dense"].dtype) == (np.uint8, np.uint8)
    assert report.dtypes_changed == {
        "X/data": "float32 -> uint8",
        "X/indices": "int32 -> uint16",
        "layers/dense": "float32 -> uint8",
    }
    report = convert(source, tmp_path / "b.zarr", dataclasses.replace(SMALL, preserve_dtype=True))
    assert report.dtypes_changed == {}
    x = ad.read_zarr(tmp_path / "b.zarr").X
    assert (x.data.dtype, x.indices.dtype, x.indptr.dtype) == (np.float32, np.int32, np.int32)
    np.testing.assert_array_equal(x.tocoo().toarray(), counts().toarray())


# ---- the layout


def codec_names(metadata: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Names of a sharded array's inner and index codecs."""
    (sharding,) = metadata["codecs"]
    assert sharding["name"] == "sharding_indexed"
    inner, index = (sharding["configuration"][key] for key in ("codecs", "index_codecs"))
    return [codec["name"] for codec in inner], [codec["name"] for codec in index]


@pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")  # of the record array in uns
def test_layout_is_the_one_promised(tmp_path: Path) -> None:
    with ad.settings.override(allow_write_nullable_strings=True):
        full_anndata().write_h5ad(tmp_path / "a.h5ad")
    convert(tmp_path / "a.h5ad", tmp_path / "a.zarr")
    root = zarr.open_group(tmp_path / "a.zarr", mode="r")
    assert root.metadata.zarr_format == 3
    assert {key: root.attrs[key] for key in ("encoding-type", "encoding-version")} == {
        "encoding-type": "anndata",
        "encoding-version": "0.1.0",
    }
    assert root.attrs["zloader"] == {"version": zl.__version__, "source": "a.h5ad"}
    x = root["X"]
    assert x.attrs["encoding-type"] == "csr_matrix"
    assert list(x.attrs["shape"]) == [60, 300]
    assert x["data"].chunks == x["indices"].chunks == (1024,)
    assert x["data"].shards == x["indices"].shards == (2048,)
    assert x["indptr"].dtype == np.int64
    for name in ("data", "indices", "indptr"):
        assert codec_names(x[name].metadata.to_dict()) == (["bytes", "blosc", "crc32c"], ["bytes", "crc32c"])
        blosc = x[name].metadata.to_dict()["codecs"][0]["configuration"]["codecs"][1]["configuration"]
        assert (blosc["cname"], blosc["shuffle"]) == ("lz4", "shuffle")
        assert blosc["typesize"] == x[name].dtype.itemsize
    assert root["layers/dense"].chunks == (1, 300)
    for path, node in root.members(max_depth=None):  # checksums everywhere, and every object there: none means zeros
        if isinstance(node, zarr.Array):
            assert node.nchunks_initialized >= node.nchunks, path
            assert node.ndim == 0 or "crc32c" in json.dumps(node.metadata.to_dict()["codecs"]), path
    listed = {key.rsplit("/", 1)[0] for key in files(tmp_path / "a.zarr") if key.endswith("/zarr.json")}
    assert set(root.metadata.consolidated_metadata.flattened_metadata) == listed
    assert MARKER not in files(tmp_path / "a.zarr")


@pytest.mark.parametrize("codec", ["lz4", "zstd", "none"])
def test_codecs(tmp_path: Path, codec: str) -> None:
    source = write_h5ad(tmp_path / "a.h5ad", counts(), obsm={"X_pca": np.ones((60, 3))})
    convert(source, tmp_path / "a.zarr", zl.ConvertOptions(codec=codec))
    root = zarr.open_group(tmp_path / "a.zarr", mode="r")
    names, _ = codec_names(root["X/data"].metadata.to_dict())
    assert names == (["bytes", "crc32c"] if codec == "none" else ["bytes", "blosc", "crc32c"])
    np.testing.assert_array_equal(root["X/data"][:], counts().data)
    np.testing.assert_array_equal(root["obsm/X_pca"][:], np.ones((60, 3)))


@pytest.mark.parametrize("array", ["X/indices", "X/data", "obs/kind/codes", "obs/_index", "obsm/X_pca"])
def test_a_flipped_bit_is_noticed(tmp_path: Path, array: str) -> None:
    parts = {
        "obs": frame(60, "cell").assign(kind=pd.Categorical(list("abc") * 20)),
        "obsm": {"X_pca": np.random.default_rng(0).random((60, 3))},
    }
    convert(write_h5ad(tmp_path / "a.h5ad", counts(), **parts), tmp_path / "a.zarr")
    root = zarr.open_group(tmp_path / "a.zarr", mode="r")
    root[array][...]
    (stored,) = [path for path in (tmp_path / "a.zarr" / array / "c").rglob("*") if path.is_file()][:1]
    content = bytearray(stored.read_bytes())
    content[20] ^= 1
    stored.write_bytes(content)
    with pytest.raises(ValueError, match="checksum"):
        root[array][...]


@given(
    length=st.integers(1, 5000),
    dtype=st.sampled_from(["uint8", "uint16", "float32", "int64", "bool"]),
    codec=st.sampled_from(["lz4", "zstd", "none"]),
)
def test_shards_have_the_bytes_that_zarr_would_write(length: int, dtype: str, codec: str) -> None:
    chunk, per_shard = 700, 3
    shards = -(-length // (chunk * per_shard))
    elements = np.random.default_rng(length).integers(0, 9, length).astype(dtype)
    encoder = ChunkEncoder(codec, np.dtype(dtype))
    store = zarr.storage.MemoryStore()
    array = zarr.create_array(
        store,
        name="a",
        shape=(length,),
        dtype=dtype,
        chunks=(chunk,),
        shards=(chunk * per_shard,),
        compressors=encoder.zarr_codecs,
        config={"write_empty_chunks": True},
    )
    array[:] = elements
    for shard in range(shards):
        here = elements[shard * chunk * per_shard : (shard + 1) * chunk * per_shard]
        chunks = [encoder.encode(here[at : at + chunk], chunk) for at in range(0, len(here), chunk)]
        stored = b"".join(chunks) + shard_index([len(chunk) for chunk in chunks], per_shard)
        wanted = store._store_dict[f"a/c/{shard}"].to_bytes()
        if len(chunks) == per_shard:
            assert stored == wanted
        else:  # zarr also writes chunks that lie beyond the end
            assert wanted.startswith(b"".join(chunks))


@given(
    length=st.integers(0, 10**10),
    chunk=st.integers(1, 10**8),
    item_bytes=st.integers(0, 10**6),
    shard_bytes=st.integers(1, 10**10),
)
def test_grids_keep_their_bounds(length: int, chunk: int, item_bytes: int, shard_bytes: int) -> None:
    cut = grid(length, chunk=chunk, item_bytes=item_bytes, shard_bytes=shard_bytes)
    assert 1 <= cut.chunk <= max(1, min(chunk, length))
    assert cut.shard % cut.chunk == 0
    assert cut.chunk == 1 or cut.chunk * item_bytes <= 2**30
    assert cut.shard == cut.chunk or cut.shard * item_bytes <= shard_bytes
    assert cut.shard - cut.chunk < max(1, length)


def test_default_grid_of_an_atlas() -> None:
    chunk = zl.encode.chunk_elements(32, elements=147_000_000_000, rows=100_000_000)
    cut = grid(147_000_000_000, chunk=chunk, item_bytes=2, shard_bytes=zl.ConvertOptions().shard_bytes)
    assert cut.chunk == 47_104  # 32 rows of 1 470 values, in whole multiples of 1 024
    assert 250 * 2**20 < cut.shard * 2 <= 256 * 2**20


def test_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    with ad.settings.override(allow_write_nullable_strings=True):
        full_anndata().write_h5ad(tmp_path / "a.h5ad")
    for name in ("1", "2"):
        convert(tmp_path / "a.h5ad", tmp_path / name)
    assert files(tmp_path / "1") == files(tmp_path / "2")


def test_window_size_does_not_show_in_the_store(tmp_path: Path) -> None:
    for layout, form in LAYOUTS.items():
        source = write_h5ad(tmp_path / f"{layout}.h5ad", form(counts()))
        stores = []
        for window_bytes in (1, 5000, 10**9):
            dest = tmp_path / f"{layout}{window_bytes}"
            convert(source, dest, dataclasses.replace(SMALL, window_bytes=window_bytes))
            stores.append(files(dest))
        assert stores[0] == stores[1] == stores[2]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_does_not_grow_with_the_matrix(tmp_path: Path, layout: str) -> None:
    x = sp.random(4000, 1000, 0.5, "csr", np.float32, random_state=0)  # 16 MB as CSR
    source = write_h5ad(tmp_path / "a.h5ad", LAYOUTS[layout](x))
    del x
    options = zl.ConvertOptions(window_bytes=2**19, shard_size=2**19)
    tracemalloc.start()
    convert(source, tmp_path / "a.zarr", options)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 7e6


# ---- interruption


class FailingStore(WrapperStore[Store]):
    """Calls `fail` instead of storing object number `survives` and all that follow."""

    def __init__(self, store: Store, survives: int = 0, fail: Callable[[], None] = lambda: None) -> None:
        super().__init__(store)
        self._left, self._fail = survives, fail

    async def set(self, key: str, value: Buffer) -> None:
        self._left -= 1
        if self._left < 0:
            self._fail()
        await self._store.set(key, value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailingLocation(Location):
    survives: int = 0
    fail: Callable[[], None] = lambda: None

    def zarr_store(self, *, read_only: bool) -> Store:
        return FailingStore(super().zarr_store(read_only=read_only), self.survives, self.fail)


def disk_full() -> None:
    raise OSError(28, "No space left on device")


def test_whatever_write_fails_nothing_opens_and_running_again_works(tmp_path: Path) -> None:
    source = write_h5ad(tmp_path / "a.h5ad", counts(), layers={"dense": counts().toarray()})
    convert(source, tmp_path / "whole.zarr")
    whole = files(tmp_path / "whole.zarr")
    dest = tmp_path / "a.zarr"
    for survives in range(10_000):
        location = FailingLocation(url=str(dest), survives=survives, fail=disk_full)
        with contextlib.suppress(errors.StoreError):
            convert_to(Destination(location), source, options=SMALL)
            break
        assert MARKER in files(dest)
        assert_not_a_store(dest)
    assert survives >= len(whole)
    assert files(dest) == whole
    (dest / MARKER).touch()  # as if interrupted at the end
    (dest / "zarr.json").unlink()
    convert(source, dest)
    assert files(dest) == whole


def test_ctrl_c_leaves_nothing_that_opens(tmp_path: Path) -> None:
    source, dest = write_h5ad(tmp_path / "a.h5ad", counts()), tmp_path / "a.zarr"
    once = iter([None])

    def interrupt() -> None:
        for _ in once:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        convert_to(Destination(FailingLocation(url=str(dest), survives=6, fail=interrupt)), source, options=SMALL)
    assert_not_a_store(dest)
    convert(source, dest)
    np.testing.assert_array_equal(dense(ad.read_zarr(dest).X), counts().toarray())


@pytest.mark.parametrize("survives", [6, 20], ids=["among shards", "among metadata"])
def test_kill_leaves_nothing_that_opens(tmp_path: Path, survives: int) -> None:
    source, dest = write_h5ad(tmp_path / "a.h5ad", counts()), tmp_path / "a.zarr"
    script = (
        "import os, signal\n"
        "from test_convert import *\n"
        "def kill(): os.kill(os.getpid(), signal.SIGKILL)\n"
        "location = FailingLocation(url=sys.argv[2], survives=int(sys.argv[3]), fail=kill)\n"
        "convert_to(Destination(location), sys.argv[1], options=SMALL)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    killed = subprocess.run(
        [sys.executable, "-c", script, str(source), str(dest), str(survives)],
        env=environment,
        capture_output=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert any(key.startswith("X/data/c/") for key in files(dest))
    assert_not_a_store(dest)
    convert(source, dest)
    np.testing.assert_array_equal(dense(ad.read_zarr(dest).X), counts().toarray())


def test_root_metadata_comes_last(tmp_path: Path) -> None:
    order: list[str] = []

    class Recording(WrapperStore[Store]):
        async def set(self, key: str, value: Buffer) -> None:
            order.append(key)
            await self._store.set(key, value)

    class RecordingLocation(Location):
        def zarr_store(self, *, read_only: bool) -> Store:
            return Recording(super().zarr_store(read_only=read_only))

    source = write_h5ad(tmp_path / "a.h5ad", counts())
    convert_to(Destination(RecordingLocation(url=str(tmp_path / "a.zarr"))), source, options=SMALL)
    assert order[-1] == "zarr.json"
    assert order.count("zarr.json") == 1
    shards = [key for key in order if key.startswith("X/data/c/")]
    assert len(shards) == len(set(shards)) == 3  # each shard is stored once


def test_pending_store_holds_metadata_back() -> None:
    async def check() -> None:
        memory = zarr.storage.MemoryStore()
        store = PendingStore(memory)
        buffer, other = (zarr.buffer.cpu.Buffer.from_bytes(content) for content in (b"{}", b"other"))
        prototype = zarr.buffer.default_buffer_prototype()
        await store._set_many(
            [("zarr.json", buffer), ("a/zarr.json", buffer), ("a/b/zarr.json", buffer), ("c/0", other)]
        )
        for key in ("zarr.json", "c/0"):
            await store.set_if_not_exists(key, zarr.buffer.cpu.Buffer.from_bytes(b"late"))
            assert await store.exists(key)
        assert [key async for key in memory.list()] == ["c/0"]
        assert (await store.get("zarr.json", prototype)).to_bytes() == b"{}"
        assert (await store.get("c/0", prototype)).to_bytes() == b"other"
        assert [name async for name in store.list_dir("")] == ["a", "zarr.json"]
        assert [name async for name in store.list_dir("a")] == ["b", "zarr.json"]
        await store.delete("a/b/zarr.json")
        assert not await store.exists("a/b/zarr.json")
        store.abandon()  # what is still under way in zarr's thread must not land in a later conversion
        with pytest.raises(errors.StoreError, match="interrupted"):
            await store.set("c/1", other)

    asyncio.run(check())


# ---- what is there already


def test_a_store_is_replaced_only_when_asked(tmp_path: Path) -> None:
    dest = tmp_path / "a.zarr"
    convert(write_h5ad(tmp_path / "a.h5ad", counts(), layers={"old": counts()}), dest)
    before = files(dest)
    source = write_h5ad(tmp_path / "b.h5ad", counts(seed=5))
    with pytest.raises(errors.StoreExistsError, match="overwrite=True"):
        convert(source, dest)
    assert files(dest) == before
    convert(source, dest, overwrite=True)
    out = ad.read_zarr(dest)
    np.testing.assert_array_equal(dense(out.X), counts(seed=5).toarray())
    assert "old" not in out.layers
    assert not (dest / "layers" / "old").exists()


def test_a_store_survives_a_source_that_cannot_be_converted(tmp_path: Path) -> None:
    dest = tmp_path / "a.zarr"
    convert(write_h5ad(tmp_path / "a.h5ad", counts()), dest)
    before = files(dest)
    x = counts()
    x.indices[x.indptr[40]] = 300
    with pytest.raises(errors.SourceError, match="row 40"):
        convert(write_csr(tmp_path / "b.h5ad", x), dest, overwrite=True)
    assert files(dest) == before


@pytest.mark.parametrize("overwrite", [True, False])
def test_what_is_no_store_is_never_touched(tmp_path: Path, overwrite: bool) -> None:
    source = write_h5ad(tmp_path / "a.h5ad", counts())
    thesis = tmp_path / "work" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("years")
    for dest in (thesis, thesis.parent):
        with pytest.raises(errors.StoreExistsError, match="never overwritten"):
            convert(source, dest, overwrite=overwrite)
    assert files(tmp_path / "work") == {"thesis.txt": b"years"}
    (tmp_path / "empty").mkdir()
    convert(source, tmp_path / "empty")
    assert ad.read_zarr(tmp_path / "empty").shape == (60, 300)


@pytest.mark.parametrize("dest", ["a.h5ad", "a.h5ad/x.zarr", ".", "link.h5ad"])
def test_source_and_destination_must_lie_apart(tmp_path: Path, dest: str) -> None:
    source = write_h5ad(tmp_path / "a.h5ad", counts())
    (tmp_path / "link.h5ad").symlink_to(source)
    before = source.read_bytes()
    with pytest.raises(errors.OptionError, match="within the other"):
        convert(source, tmp_path / dest, overwrite=True)
    assert source.read_bytes() == before


# ---- bad input


def broken(change: Callable[[sp.csr_matrix], None]) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        x = counts()
        change(x)
        return write_csr(path, x)

    return write


def edited(change: Callable[[h5py.File], None], layout: str = "csr") -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        write_h5ad(path, LAYOUTS[layout](counts()))
        with h5py.File(path, "r+") as file:
            change(file)
        return path

    return write


def set_item(name: str, at: Any, value: Any) -> Callable[[Any], None]:
    def change(holder: Any) -> None:
        (holder[name] if isinstance(holder, h5py.File) else getattr(holder, name))[at] = value

    return change


def replace(name: str, value: Any) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file[name]
        if value is not None:
            file[name] = value

    return change


def truncated(path: Path) -> Path:
    write_h5ad(path, counts())
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return path


def damaged_gzip(path: Path) -> Path:
    ad.AnnData(X=counts(), obs=frame(60, "c"), var=frame(300, "g")).write_h5ad(path, compression="gzip")
    with h5py.File(path) as file:
        chunk = file["X/data"].id.get_chunk_info(0)
    content = bytearray(path.read_bytes())
    content[chunk.byte_offset : chunk.byte_offset + chunk.size] = b"x" * chunk.size
    path.write_bytes(content)
    return path


def text(path: Path) -> Path:
    path.write_text("gene,count\n")
    return path


def plain_hdf5(path: Path) -> Path:
    with h5py.File(path, "w") as file:
        file["matrix"] = np.ones(3)
    return path


def directory(path: Path) -> Path:
    path.mkdir()
    return path


def old_anndata(file: h5py.File) -> None:
    del file["obs"]
    file["obs"] = np.zeros(60, dtype=[("index", "S8"), ("n", "i4")])


INDPTR = counts().indptr
BAD = {
    "missing file": (lambda path: path, errors.StoreNotFoundError, "there is no file"),
    "directory": (directory, errors.SourceError, "is a directory"),
    "text": (text, errors.SourceError, "not an HDF5 file"),
    "plain hdf5": (plain_hdf5, errors.SourceError, "no obs and no var and no X.*It holds: matrix"),
    "truncated": (truncated, errors.SourceError, "cut short"),
    "damaged chunk": (damaged_gzip, errors.SourceError, "X/data cannot be read"),
    "no X": (edited(replace("X", None)), errors.SourceError, "has no X: .*It holds: layers, obs"),
    "no obs": (edited(replace("obs", None)), errors.SourceError, "has no obs"),
    "old anndata": (edited(old_anndata), errors.SourceError, "before 0.7"),
    "obs no frame": (edited(lambda f: f["obs"].attrs.__delitem__("encoding-type")), errors.SourceError, "obs"),
    "no indices": (edited(replace("X/indices", None)), errors.SourceError, "X has no indices"),
    "no shape": (edited(lambda f: f["X"].attrs.__delitem__("shape")), errors.SourceError, "X has no shape"),
    "X of text": (edited(replace("X", np.array([b"a"]))), errors.SourceError, "X has shape"),
    "X 1-d": (edited(replace("X", np.ones(60))), errors.SourceError, r"X has shape \(60,\)"),
    "data of text": (edited(replace("X/data", np.array([b"a"] * counts().nnz))), errors.SourceError, "not numbers"),
    "float indices": (edited(replace("X/indices", np.ones(counts().nnz))), errors.SourceError, "whole numbers"),
    "other shape": (edited(lambda f: f["X"].attrs.__setitem__("shape", [59, 300])), errors.SourceError, "shape"),
    "unknown X": (edited(lambda f: f["X"].attrs.__setitem__("encoding-type", "awk")), errors.SourceError, "is a awk"),
    "data too short": (edited(replace("X/data", np.ones(3))), errors.SourceError, "3 in data"),
    "indptr too short": (
        broken(lambda x: setattr(x, "indptr", x.indptr[:-1])),
        errors.SourceError,
        "60 rows, but 60 entries in indptr",
    ),
    "indptr starts at 1": (broken(set_item("indptr", 0, 1)), errors.SourceError, "starts at 1, not 0, at row 0"),
    "indptr ends early": (broken(set_item("indptr", 60, INDPTR[-1] - 1)), errors.SourceError, "ends at .* row 59"),
    "indptr falls": (broken(set_item("indptr", 30, INDPTR[28])), errors.SourceError, "at row 29"),
    "indptr too high": (broken(set_item("indptr", 30, 10**6)), errors.SourceError, "to 1000000 at row 29"),
    "index too high": (broken(set_item("indices", INDPTR[40], 300)), errors.SourceError, "row 40 .*gene 300.*0 to 299"),
    "index negative": (broken(set_item("indices", INDPTR[40] - 1, -1)), errors.SourceError, "row 39 .*gene -1"),
    "csc index": (
        edited(set_item("X/indices", int(counts().tocsc().indptr[7]), 60), "csc"),
        errors.SourceError,
        "gene 7 .*row 60.*0 to 59",
    ),
    "csc indptr": (edited(set_item("X/indptr", 7, 10**6), "csc"), errors.SourceError, "gene 6"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named_and_leaves_nothing(tmp_path: Path, case: str) -> None:
    make, kind, message = BAD[case]
    source, dest = make(tmp_path / "a.h5ad"), tmp_path / "a.zarr"
    with pytest.raises(kind, match=message) as caught:
        convert(source, dest)
    assert str(source) in str(caught.value)
    assert files(dest) == {}


def test_uns_that_zarr_cannot_hold_is_named(tmp_path: Path) -> None:
    source = write_h5ad(tmp_path / "a.h5ad", counts())
    with h5py.File(source, "r+") as file:
        file["uns"].create_dataset("when", data=np.zeros(3, np.int64)).attrs["encoding-type"] = "martian"
    with pytest.raises(errors.SourceError, match="cannot read uns"):
        convert(source, tmp_path / "a.zarr")
    assert_not_a_store(tmp_path / "a.zarr")


def test_source_that_may_not_be_read(tmp_path: Path) -> None:
    source = write_h5ad(tmp_path / "a.h5ad", counts())
    source.chmod(0)
    if os.access(source, os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(errors.AccessDeniedError, match="not allowed to read"):
        convert(source, tmp_path / "a.zarr")


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs a directory in which not even root may write")
def test_directory_that_may_not_be_written(tmp_path: Path) -> None:
    with pytest.raises(errors.AccessDeniedError, match="not allowed to write to /sys/zloader"):
        convert(write_h5ad(tmp_path / "a.h5ad", counts()), "/sys/zloader")


def test_no_file_is_left_of_a_transposition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    source = write_h5ad(tmp_path / "a.h5ad", counts().tocsc())
    convert(source, tmp_path / "a.zarr")
    location = FailingLocation(url=str(tmp_path / "b.zarr"), survives=20, fail=disk_full)
    with pytest.raises(errors.StoreError, match="No space left"):
        convert_to(Destination(location), source, options=SMALL)
    assert list(scratch.iterdir()) == []


# ---- options, progress


@pytest.mark.parametrize(
    ("text", "size"),
    [(1000, 1000), ("1000", 1000), ("256MiB", 2**28), ("64 MB", 64 * 10**6), ("1.5 gib", 3 * 2**29), ("7b", 7)],
)
def test_sizes(text: int | str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "options",
    [
        {"chunk_rows": 0},
        {"chunk_rows": 1.5},
        {"shard_size": "many"},
        {"shard_size": "0"},
        {"shard_size": -1},
        {"shard_size": True},
        {"shard_size": "3 XB"},
        {"codec": "lz5"},
        {"window_bytes": 0},
    ],
    ids=str,
)
def test_options_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(errors.OptionError, match=r"must be|is not a size"):
        zl.ConvertOptions(**options)


def test_progress_is_drawn_on_a_terminal_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_h5ad(tmp_path / "a.h5ad", counts())
    shown = {}
    for kind in ("terminal", "file"):
        reader, writer = os.openpty() if kind == "terminal" else os.pipe()
        with os.fdopen(writer, "w") as stderr, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stderr)
            patch.setenv("COLUMNS", "120")
            patch.setenv("TERM", "xterm")
            zl.convert(source, tmp_path / kind, progress=True)
            stderr.flush()
            os.set_blocking(reader, False)
            try:
                shown[kind] = os.read(reader, 100_000).decode()
            except BlockingIOError:
                shown[kind] = ""
        os.close(reader)
    assert "writing X" in shown["terminal"]
    assert f"{counts().nnz:,} of {counts().nnz:,} values" in shown["terminal"]
    assert shown["file"] == ""


def test_progress_can_be_turned_off(capfd: pytest.CaptureFixture[str]) -> None:
    with progress_bars(shown=False) as bars:
        bars.add("reading X", 10)(5)
    assert capfd.readouterr() == ("", "")


# ---- S3


def test_straight_to_s3(tmp_path: Path, s3: Any) -> None:
    with ad.settings.override(allow_write_nullable_strings=True):
        full_anndata().write_h5ad(tmp_path / "a.h5ad")
    url, options = s3.url("a.zarr"), {"storage_options": s3.storage_options}
    report = convert(tmp_path / "a.h5ad", url, **options)
    convert(tmp_path / "a.h5ad", tmp_path / "a.zarr")
    location = Location(url=url, storage_options=s3.storage_options)
    filesystem = location.filesystem()
    there = {key: filesystem.cat_file(f"{location.path}/{key}") for key in location.listing()}
    assert there == files(tmp_path / "a.zarr")
    assert report.bytes_out == sum(map(len, there.values()))
    with pytest.raises(errors.StoreExistsError, match="overwrite=True"):
        convert(tmp_path / "a.h5ad", url, **options)
    convert(write_h5ad(tmp_path / "b.h5ad", counts(seed=5)), url, overwrite=True, **options)
    out = ad.read_zarr(zarr.open_group(location.zarr_store(read_only=True), mode="r"))
    np.testing.assert_array_equal(dense(out.X), counts(seed=5).toarray())


def test_interrupted_on_s3(tmp_path: Path, s3: Any) -> None:
    source = write_h5ad(tmp_path / "a.h5ad", counts())
    where = {"url": s3.url("a.zarr"), "storage_options": s3.storage_options}
    with pytest.raises(errors.StoreError, match="No space left"):
        convert_to(Destination(FailingLocation(**where, survives=20, fail=disk_full)), source, options=SMALL)
    location = Location(**where)
    assert MARKER in location.listing()
    with pytest.raises(FileNotFoundError):
        zarr.open_group(location.zarr_store(read_only=True), mode="r")
    convert(source, s3.url("a.zarr"), storage_options=s3.storage_options)
    assert MARKER not in location.listing()


def test_s3_says_no(tmp_path: Path, s3: Any) -> None:
    source = write_h5ad(tmp_path / "a.h5ad", counts())
    wrong = s3.storage_options | {"secret": "not-the-secret"}
    nobody = {key: value for key, value in s3.storage_options.items() if key not in ("key", "secret")}
    for options in (s3.read_only_storage_options, wrong, nobody):
        with pytest.raises(errors.AccessDeniedError, match="storage_options") as caught:
            convert(source, s3.url("a.zarr"), storage_options=options)
        for secret in (s3.storage_options["secret"], s3.read_only_storage_options["secret"], "not-the-secret"):
            assert secret not in str(caught.value)
    with pytest.raises(errors.StoreNotFoundError, match="does the bucket exist"):
        convert(source, "s3://no-such-bucket/a.zarr", storage_options=s3.storage_options)
