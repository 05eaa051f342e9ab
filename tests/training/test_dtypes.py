"""X, layers, obs and obsm of every dtype yield the right values, or an error that says what to do."""

from __future__ import annotations

import json
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import ml_dtypes
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
import zarr
from helpers import SMALL, dense, of_genes

import zloader as zl
from zloader.common.errors import FormatError, OptionError, SourceError
from zloader.insight.summary import summarize
from zloader.selecting.columns import as_numbers

SIZES: dict[str, Any] = {"batch_size": 7, "fetch_factor": 2, "sampling": zl.BlockShuffling(3)}
N_ROWS, N_GENES = 30, 11
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
DTYPES = ["bool", *INTEGERS, "float16", "float32", "float64", ">i2", ">u8", ">f2", ">f4", ">f8"]


def values(dtype: str, *, whole: bool = False) -> np.ndarray:
    """Rows x genes, many of them 0. Integers include the smallest and largest value, floats include fractions."""
    rng = np.random.default_rng(0)
    x = (rng.integers(0, 100, (N_ROWS, N_GENES)) * (rng.random((N_ROWS, N_GENES)) < 0.4)).astype(dtype)
    if x.dtype.kind in "iu":
        x[3, 2], x[4, 5] = np.iinfo(dtype).max, np.iinfo(dtype).min
    elif x.dtype.kind == "f" and not whole:
        x[3, 2], x[4, 5], x[5, 0] = 0.1, -7.25, 6e4
    return x


def sparse(x: np.ndarray) -> scipy.sparse.csr_matrix:
    """The same values and dtype as CSR. SciPy cannot convert float16, so the values are set afterwards."""
    csr = scipy.sparse.csr_matrix(x != 0, dtype="float32")
    csr.data = x[x != 0]
    return csr


def annotated(x: Any, **parts: Any) -> ad.AnnData:
    obs, var = (pd.DataFrame(index=[f"{of}{i}" for i in range(n)]) for of, n in zip("cg", x.shape, strict=True))
    return ad.AnnData(X=x, obs=obs, var=var, **parts)


def both(x: np.ndarray) -> ad.AnnData:
    """An AnnData with the values as CSR in X and dense in a layer."""
    return annotated(sparse(x), layers={"dense": x.copy()})


def write_zarr(adata: ad.AnnData, dest: Path, zarr_format: int) -> Path:
    with ad.settings.override(zarr_write_format=zarr_format), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr warns about float16 and consolidated metadata
        adata.write_zarr(dest)
    return dest


def store_of(adata: ad.AnnData, tmp: Path, writer: str) -> Path:
    """A store written by anndata or by `convert`."""
    dest = tmp / "s.zarr"
    if writer.startswith("anndata"):
        return write_zarr(adata, dest, int(writer[-1]))
    keep = zl.ConvertOptions(chunk_rows=1, shard_size=2048, preserve_dtype=writer == "convert, kept")
    zl.convert(adata, dest, options=keep, progress=False)
    return dest


def epoch_of(loader: zl.Loader) -> np.ndarray:
    """The x of a whole epoch as one dense array, in the dataset's row order."""
    minibatches = list(loader)
    order = np.argsort(np.concatenate([minibatch.index.numpy() for minibatch in minibatches]))
    return np.concatenate([dense(minibatch.x) for minibatch in minibatches])[order]


# ------------------------------------------------------------------------------------------------ matrices


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("writer", ["anndata v2", "anndata v3", "convert", "convert, kept"])
def test_a_matrix_of_any_dtype(tmp_path, dtype, writer):
    x = values(dtype)
    dataset = zl.open_dataset(store_of(both(x), tmp_path, writer))
    if dtype.startswith(">") and writer == "anndata v2":
        with pytest.raises(FormatError, match="X/data is stored in foreign byte order: run 'zloader convert'"):
            zl.Loader(dataset)
        return
    found = epoch_of(zl.Loader(dataset, dtype="float64", **SIZES))
    np.testing.assert_array_equal(found, x.astype("float64"))
    found = epoch_of(zl.Loader(dataset, x="layers/dense", dtype="float64", layout="dense", **SIZES))
    np.testing.assert_array_equal(found, x.astype("float64"))
    taken = dataset.take([5, 3, 29, 3]).X
    np.testing.assert_array_equal(dense(taken), x[[5, 3, 29, 3]])
    native = np.dtype(dtype).newbyteorder("=")
    assert taken.dtype == ("float32" if native == "float16" else native)


@pytest.mark.any_version
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["csr", "dense", "scipy"])
@pytest.mark.parametrize("x", ["X", "layers/dense"])
@pytest.mark.parametrize("mirrored", [False, True], ids=["", "mirror"])
def test_float16_is_widened(tmp_path, layout, x, mirrored):
    wanted = values("float16")
    store = store_of(both(wanted), tmp_path, "convert")
    dataset = zl.open_dataset(store, cache=tmp_path / "cache" if mirrored else None)
    for genes in (None, [4, 0, 2]):
        loader = zl.Loader(of_genes(dataset, genes), x=x, layout=layout, **SIZES)
        for _ in range(2):
            found = epoch_of(loader)
            assert found.dtype == np.float32
            np.testing.assert_array_equal(found, wanted[:, genes or slice(None)].astype("float32"))


@pytest.mark.parametrize("whole", [False, True], ids=["fractions", "whole"])
def test_float16_is_kept_or_narrowed_and_verified(tmp_path, whole):
    x = values("float16", whole=whole)
    store = store_of(both(x), tmp_path, "convert")
    assert zl.open_dataset(store).store.matrix("X").values.dtype == ("uint8" if whole else "float16")
    assert zl.verify(store, against=both(x), progress=False).ok
    np.testing.assert_array_equal(dense(zl.open_dataset(store).take(range(N_ROWS))), x)
    read = ad.io.read_elem(zarr.open_group(store, mode="r")["layers/dense"])
    assert read.dtype == ("uint8" if whole else "float16")
    np.testing.assert_array_equal(read, x)


@pytest.mark.parametrize("layout", ["csr", "csc"])
@pytest.mark.parametrize("dtype", ["float16", ">f2", ">i4"])
def test_genes_of_a_dtype_that_scipy_does_not_slice(tmp_path, dtype, layout):
    x = values(dtype)
    matrix = sparse(x)
    if layout == "csc":
        matrix = sparse(x.T).T
        assert matrix.format == "csc"
    select = zl.Selection(genes=["g5", "g0", "g2"])
    zl.convert(annotated(matrix), tmp_path / "s.zarr", select=select, progress=False)
    np.testing.assert_array_equal(dense(zl.open_dataset(tmp_path / "s.zarr").take(range(N_ROWS))), x[:, [5, 0, 2]])


def test_stores_of_several_dtypes(tmp_path):
    halves, floats = values("float16"), values("float32")
    urls = []
    for number, x in enumerate((halves, floats)):
        urls.append(tmp_path / f"{number}.zarr")
        zl.convert(both(x), urls[-1], options=SMALL, progress=False)
    dataset = zl.open_dataset(urls)
    both_of = np.concatenate([halves.astype("float32"), floats])
    np.testing.assert_array_equal(epoch_of(zl.Loader(dataset, **SIZES)), both_of)
    np.testing.assert_array_equal(dense(dataset.take(range(2 * N_ROWS))), both_of)


# ---------------------------------------------------------------------------------------- dtypes that do not fit


@pytest.mark.parametrize("x", ["X", "layers/dense", "raw/X"])
@pytest.mark.parametrize(
    ("stored", "dtype", "fits"),
    [
        ("float32", "int32", False),  # which may be fractions, negative, NaN or infinite
        ("float16", "int64", False),
        ("int64", "int32", False),
        ("uint64", "int64", False),
        ("uint16", "int32", True),
        ("uint32", "int64", True),
        ("bool", "int32", True),
    ],
)
def test_an_integer_dtype_has_to_hold_every_value_of_the_stored_one(tmp_path, x, stored, dtype, fits):
    matrix = values(stored)
    adata = both(matrix)
    adata.raw = annotated(sparse(matrix))
    dataset = zl.open_dataset(store_of(adata, tmp_path, "convert, kept"))
    if fits:
        found = epoch_of(zl.Loader(dataset, x=x, dtype=dtype, layout="dense", **SIZES))
        np.testing.assert_array_equal(found, matrix.astype(dtype))
        return
    says = f"{x} of .*s.zarr is stored as {stored}, and {dtype} does not hold all .* with .to\\(torch.{dtype}\\)"
    with pytest.raises(OptionError, match=says):
        zl.Loader(dataset, x=x, dtype=dtype)
    converted = next(iter(zl.Loader(dataset, x=x, **SIZES))).x.to(getattr(torch, dtype))
    assert converted.dtype == getattr(torch, dtype)


def test_any_of_several_stores_decides(tmp_path):
    urls = []
    for number, whole in enumerate((True, False)):
        urls.append(tmp_path / f"{number}.zarr")
        zl.convert(both(values("float32", whole=whole)), urls[-1], options=SMALL, progress=False)
    assert next(iter(zl.Loader(zl.open_dataset(urls[0]), dtype="int32", **SIZES))).x.dtype == torch.int32
    with pytest.raises(OptionError, match=rf"X of {re.escape(str(urls[1]))} is stored as float32"):
        zl.Loader(zl.open_dataset(urls), dtype="int32")


@pytest.mark.parametrize("stored", ["int64", "uint64", "float64"])
def test_floats_are_rounded_as_by_numpy(tmp_path, stored):
    """Also beyond what float32 holds exactly, and beyond its range."""
    x = values(stored)
    x[7, :4] = 2**24 + 1, 2**53 + 2**29 + 1, 2**62 + 1, 0
    if stored == "float64":
        x[8, :5] = 1e300, -1e300, np.nan, np.inf, 3.4028235677973362e38
    dataset = zl.open_dataset(store_of(both(x), tmp_path, "convert, kept"))
    with np.errstate(over="ignore"):
        wanted = x.astype(np.float32)
    for name, layout in (("X", "csr"), ("X", "dense"), ("layers/dense", "dense"), ("layers/dense", "csr")):
        found = epoch_of(zl.Loader(dataset, x=name, layout=layout, **SIZES))
        np.testing.assert_array_equal(found, wanted)


# ---------------------------------------------------------------------------------------- names of dtypes


NAMED = [torch.float32, np.float32, np.dtype("float32"), "float32", torch.float64, np.float64, float, np.dtype("<f8")]
NAMED += ["torch.float64", torch.int32, np.int32, torch.int64, np.int64, np.dtype("int64")]


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", NAMED, ids=repr)
def test_dtypes_may_be_objects(tmp_path, dtype):
    dataset = zl.open_dataset(store_of(both(values("uint16")), tmp_path, "convert"))
    loader = zl.Loader(dataset, dtype=dtype, layout="dense", **SIZES)
    dtype = torch.float64 if dtype == "torch.float64" else dtype
    wanted = dtype if isinstance(dtype, torch.dtype) else torch.from_numpy(np.zeros(1, dtype)).dtype
    assert next(iter(loader)).x.dtype == wanted
    assert pickle.loads(pickle.dumps(loader)).dtype == loader.dtype == str(wanted).removeprefix("torch.")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.complex64, np.int8, bool, str, object, np.dtype("float32,int8")])
def test_other_dtypes_are_refused(tmp_path, dtype):
    dataset = zl.open_dataset(store_of(both(values("float32")), tmp_path, "convert"))
    with pytest.raises(OptionError, match="dtype must be one of 'float32', 'float64', 'int32', 'int64', not"):
        zl.Loader(dataset, dtype=dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, np.float16, np.dtype("float16"), ml_dtypes.bfloat16])
def test_half_floats_are_made_on_the_device(tmp_path, dtype):
    dataset = zl.open_dataset(store_of(both(values("float32")), tmp_path, "convert"))
    with pytest.raises(
        OptionError, match=r"leave dtype=.* out, and convert x there, as minibatch.x.to\(torch.bfloat16"
    ):
        zl.Loader(dataset, dtype=dtype)
    for layout in ("csr", "dense"):
        assert next(iter(zl.Loader(dataset, layout=layout))).x.to(torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("x", ["X", "layers/dense"])
def test_packed_rows_of_float16_are_float32(tmp_path, x):
    wanted = values("float16")
    dataset = zl.open_dataset(store_of(both(wanted), tmp_path, "convert"))
    for minibatch in zl.Loader(dataset, x=x, layout="packed", **SIZES):
        assert minibatch.x.values.dtype == torch.float32
        np.testing.assert_array_equal(minibatch.x.dense().numpy(), wanted[minibatch.index].astype(np.float32))


# ----------------------------------------------------------------------------------- complex and long numbers


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_complex_numbers_are_refused(tmp_path, dtype, zarr_format):
    x = values("float32", whole=True).astype(dtype)
    store = write_zarr(both(x), tmp_path / "s.zarr", zarr_format)
    dataset = zl.open_dataset(store)
    for name, path in (("X", "X/data"), ("layers/dense", "layers/dense")):
        with pytest.raises(FormatError, match=rf"{path} holds {dtype}, not real numbers.*float32 for example"):
            zl.Loader(dataset, x=name)
    with pytest.raises(FormatError, match="X/data holds"):
        dataset.take([0])
    for source in (store, both(x)):
        with pytest.raises(SourceError, match=f"X/data holds {dtype}, not real numbers.*float32"):
            zl.convert(source, tmp_path / "out.zarr", progress=False)


@pytest.mark.parametrize("dtype", ["longdouble", "clongdouble"])
def test_what_has_more_than_64_bits_is_refused(tmp_path, dtype):
    x = values("float32").astype(dtype)
    for adata in (both(x), annotated(x)):
        with pytest.raises(SourceError, match=r"X(/data)? holds .*not real numbers of at most 64 bits"):
            zl.convert(adata, tmp_path / "out.zarr", progress=False)


def unknown_dtype(store: Path, *paths: str) -> None:
    """Makes arrays of a store bfloat16, which TensorStore and Zarr extensions write, but zarr-python cannot read."""
    root = json.loads((store / "zarr.json").read_text())
    for path in paths:
        metadata = json.loads((store / path / "zarr.json").read_text())
        (store / path / "zarr.json").write_text(json.dumps(metadata | {"data_type": "bfloat16"}))
        if "consolidated_metadata" in root:
            root["consolidated_metadata"]["metadata"][path]["data_type"] = "bfloat16"
    (store / "zarr.json").write_text(json.dumps(root))


@pytest.mark.every(4)
@pytest.mark.parametrize("consolidated", [True, False], ids=["consolidated", "not consolidated"])
@pytest.mark.parametrize("path", ["X/data", "X/indices", "X/indptr", "layers/dense"])
def test_a_matrix_of_a_dtype_that_zarr_does_not_know(tmp_path, path, consolidated):
    x = values("float32")
    adata = both(x)
    adata.layers["right"] = sparse(x)
    adata.obsm["wrong"], adata.obsm["right"] = x[:, :2], x[:, :3]
    store = write_zarr(adata, tmp_path / "s.zarr", 3)
    if not consolidated:
        root = json.loads((store / "zarr.json").read_text())
        del root["consolidated_metadata"]
        (store / "zarr.json").write_text(json.dumps(root))
    unknown_dtype(store, path, "obsm/wrong")
    dataset = zl.open_dataset(store)
    name = "X" if path.startswith("X") else path
    says = rf"cannot read {path} of .*'bfloat16'.* such as float32"
    with pytest.raises(FormatError, match=says):
        zl.Loader(dataset, x=name)
    with pytest.raises(FormatError, match=r"cannot read obsm/wrong of .*'bfloat16'"):
        zl.Loader(dataset, obsm=["wrong"])
    assert dataset.matrix_names == ["X", "layers/dense", "layers/right"]
    assert dataset.obsm_names == ["right", "wrong"]
    np.testing.assert_array_equal(epoch_of(zl.Loader(dataset, x="layers/right", obsm=["right"], **SIZES)), x)
    problems = {matrix.name: matrix.problem for matrix in summarize(dataset).matrices}
    assert [name for name, problem in problems.items() if problem] == [name]
    assert re.search(says, problems[name] or "")
    if name != "X":
        assert list(dataset.take([1]).obsm) == ["right"]
    assert not zl.verify(store, progress=False).ok
    with pytest.raises(SourceError, match="bfloat16"):
        zl.convert(store, tmp_path / "out.zarr", progress=False)


@pytest.mark.parametrize("part", ["indices", "indptr"])
def test_indices_that_are_no_integers_are_refused(tmp_path, part):
    store = write_zarr(annotated(sparse(values("float32"))), tmp_path / "s.zarr", 2)
    group: Any = zarr.open_group(store, mode="r+", use_consolidated=False)["X"]
    group.create_array(part, data=group[part][:].astype("float64"), overwrite=True)
    (store / ".zmetadata").unlink()
    with pytest.raises(FormatError, match=f"X/{part} of .* holds float64, not integers: the store is damaged"):
        zl.Loader(zl.open_dataset(store))


# ------------------------------------------------------------------------------------------------ obs and obsm

LARGE = 2**53 + 1  # the smallest whole number that float64 cannot hold


@pytest.mark.every(3)
@pytest.mark.parametrize("writer", ["anndata v2", "anndata v3", "convert"])
def test_obs_and_obsm_keep_values_and_dtypes(tmp_path, writer):
    adata = annotated(values("float32"))
    for dtype in ["bool", *INTEGERS, "float16", "float32", "float64"]:
        adata.obs[dtype] = values(dtype)[:, 2]
        adata.obsm[dtype] = values(dtype)[:, :6]
    adata.obs["Int64"] = pd.array([LARGE] * N_ROWS, dtype="Int64")
    dataset = zl.open_dataset(store_of(adata, tmp_path, writer))
    names = list(adata.obsm)
    for minibatch in zl.Loader(dataset, x=None, obs=[*names, "Int64"], obsm=names, **SIZES):
        rows = minibatch.index.numpy()
        for name in names:
            for found, wanted in ((minibatch.obs, adata.obs[name].to_numpy()), (minibatch.obsm, adata.obsm[name])):
                assert found[name].numpy().dtype == wanted.dtype == name
                np.testing.assert_array_equal(found[name].numpy(), wanted[rows])
        assert set(minibatch.obs["Int64"].tolist()) == {LARGE}


@pytest.mark.parametrize(("dtype", "large"), [("Int64", -LARGE), ("Int64", LARGE), ("UInt64", 2**64 - 1)])
def test_missing_values_beside_numbers_that_floats_do_not_hold_are_refused(dtype, large):
    with pytest.raises(OptionError, match=f"'number' holds {large} and missing values.*Fill in the missing values"):
        as_numbers("number", pd.array([1, None, large], dtype=dtype))
    found = as_numbers("number", pd.array([1, None, 2**53], dtype=dtype)).values
    np.testing.assert_array_equal(found, [1, np.nan, 2**53])


OTHERS = {"float64": np.float64(0.5), "uint64": np.uint64(2**64 - 1), "missing": None}


@pytest.mark.every(3)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("cached", [False, True], ids=["", "cache"])
def test_numbers_that_several_stores_cannot_share_are_refused(tmp_path, other, cached):
    column = pd.array([1, None] * 15, "Int64") if other == "missing" else np.full(N_ROWS, OTHERS[other])
    urls = []
    for number, lane in enumerate((np.array([-1] + [LARGE] * (N_ROWS - 1)), column)):
        adata = annotated(values("float32"))
        adata.obs["lane"] = lane
        adata.obs["small"] = np.full(N_ROWS, 2**53) if number else np.full(N_ROWS, 0.5)
        adata.obsm["lane"] = np.asarray(np.full(N_ROWS, 0.5) if other == "missing" and number else lane)[:, None]
        urls.append(tmp_path / f"{number}.zarr")
        zl.convert(adata, urls[-1], options=SMALL, progress=False)
    dataset = zl.open_dataset(urls, cache=tmp_path / "cache" if cached else None)
    with pytest.raises(FormatError, match=f"obs column 'lane' holds {LARGE} in one of the stores.*float64"):
        dataset.obs_column("lane")
    with pytest.raises(FormatError, match=f"obsm/lane holds {LARGE} in one of the stores.*float64"):
        dataset.obsm_array("lane")
    with pytest.raises(FormatError, match="lane"):
        list(zl.Loader(dataset, obs=["lane"], **SIZES))
    assert set(dataset.obs_column("small").values.tolist()) == {0.5, 2**53}


@pytest.mark.parametrize(("first", "dtype"), [(LARGE, "uint64"), (-LARGE, "int64")])
def test_signed_and_unsigned_integers_of_several_stores_stay_exact(tmp_path, first, dtype):
    columns = [np.full(N_ROWS, first), np.full(N_ROWS, LARGE + 2, np.uint64)]
    for number, column in enumerate(columns):
        adata = annotated(values("float32"))
        adata.obs_names = [f"{number}-{name}" for name in adata.obs_names]
        adata.obs["id"] = column
        adata.write_h5ad(tmp_path / f"{number}.h5ad")
    urls = [tmp_path / "0.h5ad", tmp_path / "1.h5ad"]
    zl.convert(urls, tmp_path / "joined.zarr", progress=False)
    for dataset in (zl.open_dataset(urls), zl.open_dataset(tmp_path / "joined.zarr")):
        found = dataset.obs_column("id").values
        assert found.dtype == dtype
        assert [*map(int, found)] == [first] * N_ROWS + [LARGE + 2] * N_ROWS
