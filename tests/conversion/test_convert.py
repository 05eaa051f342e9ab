"""Conversion keeps every value and narrows dtypes only without loss."""

from __future__ import annotations

import contextlib
import dataclasses
import doctest
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import (
    LAYOUTS,
    SMALL,
    assert_same,
    convert,
    counts,
    dense,
    frame,
    full_anndata,
    layers_of,
    write_csr,
    write_h5ad,
)

import zloader as zl
from zloader.common import errors
from zloader.common.checks import parse_size
from zloader.common.progress import progress_bars
from zloader.conversion.encode import DtypeScan


@pytest.mark.every(3)
@pytest.mark.parametrize("module", ["convert", "verify", "selection", "memory"])
def test_the_examples_in_the_docstrings_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.chdir(tmp_path)
    write_h5ad(tmp_path / "pbmc.h5ad", counts())
    write_h5ad(tmp_path / "more.h5ad", counts(40, seed=1))
    results = doctest.testmod(importlib.import_module(f"zloader.conversion.{module}"))
    assert results.failed == 0
    assert results.attempted >= 3


@pytest.mark.every(8)
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


@pytest.mark.slow
def test_everything_an_anndata_holds_is_kept(tmp_path: Path) -> None:
    adata = full_anndata()
    with ad.settings.override(allow_write_nullable_strings=True):
        adata.write_h5ad(tmp_path / "a.h5ad", convert_strings_to_categoricals=False)
    report = convert(tmp_path / "a.h5ad", tmp_path / "a.zarr")
    wanted, out = ad.read_h5ad(tmp_path / "a.h5ad"), ad.read_zarr(tmp_path / "a.zarr")
    for part in ("obs", "var", "obsm", "varm", "obsp", "varp", "uns"):
        assert_same(getattr(out, part), getattr(wanted, part))
    assert set(layers_of(out)) == {"csr", "csc", "dense"}
    for name, layer in layers_of(wanted).items():
        np.testing.assert_array_equal(dense(out.layers[name]), dense(layer))
    assert out.layers["dense"].dtype == np.float64
    assert out.layers["csc"].format == "csr"
    assert_same(out.raw.var, wanted.raw.var)
    assert_same(out.raw.varm, wanted.raw.varm)
    np.testing.assert_array_equal(dense(out.raw.X), dense(wanted.raw.X))
    assert report.dtypes_changed["raw/X/data"] == "float32 -> uint8"
    assert json.loads(json.dumps(dataclasses.asdict(report)))["rows"] == 60


@pytest.mark.every(10)
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


@pytest.mark.slow
@settings(max_examples=30)
@given(
    x=any_csr(),
    csc=st.booleans(),
    chunk_rows=st.integers(1, 40),
    shard_size=st.integers(500, 20_000),
    window_bytes=st.integers(1000, 20_000),
    codec=st.sampled_from(["lz4", "zstd", "pcodec", "none"]),
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
        if csc:  # transposing sorts the rows, and scipy keeps duplicates
            write_h5ad(source, x.tocsc())
        else:
            write_csr(source, x)
        exact = sp.csr_matrix((x.data.astype(np.int64), x.indices, x.indptr), shape=x.shape)
        exact.sum_duplicates()
        if x.dtype != bool and np.any(exact.data != wanted.data):  # sums that wrapped around
            with pytest.raises(errors.SourceError, match="does not fit in"):
                convert(source, dest, zl.ConvertOptions(**options))
            return
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


@pytest.mark.every(5)
@pytest.mark.parametrize("csc", [False, True])
@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("uint8", 200),
        ("int8", -100),
        ("int16", 2**15 - 1),
        ("uint16", 2**16 - 1),
        ("int32", -(2**31)),
        ("int64", 2**62),
        ("int64", -(2**63)),
        ("uint64", 2**64 - 1),
        ("float32", 3e38),
    ],
)
def test_duplicates_whose_sum_does_not_fit_are_refused(tmp_path: Path, dtype: str, value: float, csc: bool) -> None:
    """Their sum would wrap around, or become infinite."""
    x = sp.csr_matrix((np.array([1, 1, value, 1, value], dtype), [0, 2, 1, 0, 1], [0, 1, 1, 5]), shape=(3, 3))
    source = tmp_path / "a.h5ad"
    if csc:  # scipy keeps duplicates when it transposes
        write_h5ad(source, x.tocsc())
    else:
        write_csr(source, x)
    with pytest.raises(
        errors.SourceError, match=f"X.*: row 2 repeats gene 1, and the sum of its values does not fit in {dtype}"
    ):
        convert(source, tmp_path / "a.zarr")
    assert not (tmp_path / "a.zarr").exists()


@pytest.mark.parametrize(("dtype", "value", "total"), [("int64", 2**62 - 1, 2**63 - 2), ("uint8", 127, 254)])
def test_the_largest_sum_of_duplicates_is_exact(tmp_path: Path, dtype: str, value: int, total: int) -> None:
    x = sp.csr_matrix((np.array([value, value], dtype), [1, 1], [0, 2]), shape=(1, 3))
    convert(write_csr(tmp_path / "a.h5ad", x), tmp_path / "a.zarr")
    assert ad.read_zarr(tmp_path / "a.zarr").X.toarray().tolist() == [[0, total, 0]]


# ---- dtypes


@pytest.mark.parametrize(
    ("values", "dtype", "stored"),
    [
        ([0, 255], "float32", "uint8"),
        ([0, 256], "float32", "uint16"),
        ([-1, 127], "float32", "int8"),
        ([-1, 128], "float32", "int16"),
        ([0, 70_000], "float32", "float32"),  # no smaller integer dtype holds 70 000
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


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("n_genes", "stored"), [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65_536, "uint16"), (65_537, "int32")]
)
def test_chunks_of_indices_have_the_smallest_type_that_holds_the_gene_count(
    tmp_path: Path, n_genes: int, stored: str
) -> None:
    x = sp.csr_matrix(([1.5], ([1], [n_genes - 1])), shape=(2, n_genes))
    convert(write_h5ad(tmp_path / "a.h5ad", x), tmp_path / "a.zarr")
    assert zarr.open_group(tmp_path / "a.zarr", mode="r")["X/indices"].dtype == np.int32
    assert zl.open_dataset(tmp_path / "a.zarr").store.matrix("X").arrays[0].dtype == stored
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
        "layers/dense": "float32 -> uint8",
    }
    report = convert(source, tmp_path / "b.zarr", dataclasses.replace(SMALL, preserve_dtype=True))
    assert report.dtypes_changed == {}
    x = ad.read_zarr(tmp_path / "b.zarr").X
    assert (x.data.dtype, x.indices.dtype, x.indptr.dtype) == (np.float32, np.int32, np.int32)
    np.testing.assert_array_equal(x.tocoo().toarray(), counts().toarray())


# ---- options, progress


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1000, 1000),
        ("1000", 1000),
        ("256MiB", 2**28),
        ("64 MB", 64 * 10**6),
        ("64kB", 64_000),
        ("1.5 gib", 3 * 2**29),
        ("7b", 7),
        ("2G", 2 * 10**9),
        ("512k", 512_000),
        ("3 M", 3 * 10**6),
        ("1.5t", 15 * 10**11),
        ("2Gi", 2**31),
        ("8Ki", 8192),
    ],
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
            drawn = b""
            with contextlib.suppress(BlockingIOError):
                while piece := os.read(reader, 100_000):
                    drawn += piece
            shown[kind] = drawn.decode()
        os.close(reader)
    assert "converting X" in shown["terminal"]
    assert "60 of 60 rows" in shown["terminal"]
    assert shown["file"] == ""


def test_progress_can_be_turned_off(capfd: pytest.CaptureFixture[str]) -> None:
    with progress_bars(shown=False) as bars:
        bars.add("reading X", 10)(5)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("codec", ["lz4", "none"])
def test_scipy_slices_what_anndata_reads(tmp_path: Path, codec: str) -> None:
    """More values than 16 bits count, in which scipy would count them if the array of indices were narrow."""
    x = sp.random(400, 300, density=0.9, format="csr", random_state=0, dtype=np.float32)
    adata = ad.AnnData(x, layers={"narrow": x[:, :200].toarray() @ np.eye(200, 300, dtype=np.float32)})
    adata.layers["narrow"] = sp.csr_matrix(adata.layers["narrow"])
    convert(adata, tmp_path / "a.zarr", dataclasses.replace(SMALL, codec=codec))
    read = ad.read_zarr(tmp_path / "a.zarr")
    genes = np.random.default_rng(0).permutation(300)
    for name, found in (("X", read.X), ("narrow", read.layers["narrow"])):
        assert found.indices.dtype == np.int32
        wanted = adata.X if name == "X" else adata.layers[name]
        for rows in (slice(0, 390), slice(390, None, -2), np.arange(399, 0, -1)):
            assert (found[rows][:, genes] != wanted[rows][:, genes]).nnz == 0
        assert (found.tocoo() != wanted.tocoo()).nnz == 0
