"""Minibatches as float16 and bfloat16, and dtypes given as objects of torch and NumPy."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
import zarr
from hypothesis import example, given
from hypothesis import strategies as st

import zloader as zl
from zloader.common.errors import OptionError
from zloader.reading.gather import narrowed

SIZES: dict[str, Any] = {"batch_size": 7, "fetch_factor": 2, "sampling": zl.BlockShuffling(3)}
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
N_ROWS, N_GENES = 30, 11


def values(dtype: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 60_000, (N_ROWS, N_GENES)) * (rng.random((N_ROWS, N_GENES)) < 0.4)
    return (x / 7).astype(dtype) if dtype.startswith("float") else x.astype(dtype)


def store_of(x: np.ndarray, tmp: Path, *, by_anndata: bool = False) -> Path:
    """A store with the values as CSR in X and dense in a layer."""
    csr = scipy.sparse.csr_matrix(x)
    obs, var = (pd.DataFrame(index=[f"{of}{i}" for i in range(n)]) for of, n in zip("cg", x.shape, strict=True))
    adata, dest = ad.AnnData(csr, obs=obs, var=var, layers={"dense": x}), tmp / "s.zarr"
    if by_anndata:
        with ad.settings.override(zarr_write_format=3), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # zarr warns about consolidated metadata
            adata.write_zarr(dest)
    else:
        zl.convert(adata, dest, options=zl.ConvertOptions(chunk_rows=4), progress=False)
    return dest


def epoch_of(loader: zl.Loader) -> torch.Tensor:
    """The x of an epoch as one dense tensor, in the dataset's row order."""
    minibatches = list(loader)
    order = torch.argsort(torch.cat([minibatch.index for minibatch in minibatches]))
    return torch.cat([minibatch.x.to_dense() for minibatch in minibatches])[order]


@pytest.mark.slow
@pytest.mark.parametrize(
    "stored", ["uint16", *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("int32", "float32", "float64"))]
)
@pytest.mark.parametrize("dtype", HALVES)
def test_minibatches_of_half_floats(tmp_path: Path, stored: str, dtype: str) -> None:
    x = values(stored)
    dataset = zl.open_dataset(store_of(x, tmp_path), cache=tmp_path / "cache")
    wanted = torch.from_numpy(x.astype(np.float64)).to(HALVES[dtype])
    for matrix in ("X", "layers/dense"):
        for layout, torch_layout in (("csr", torch.sparse_csr), ("dense", torch.strided)):
            for genes in (None, [4, 0, 2]):
                options = {"x": matrix, "layout": layout, "dtype": HALVES[dtype], **SIZES}
                loader = zl.Loader(dataset if genes is None else dataset[:, genes], **options)
                found = epoch_of(loader)
                assert found.dtype == next(iter(loader)).x.dtype == HALVES[dtype]
                assert next(iter(loader)).x.layout == torch_layout
                assert torch.equal(found, wanted[:, genes or slice(None)])


# Halfway between two values of the dtype, and a little to either side of it. Rounding to float32 first would lose that.
TIES = {
    "float16": [2049.0, 2049.0000001, 2048.9999999, 65519.999, -65519.999, 1e-9],
    "bfloat16": [257.0, 257.0000001, 256.9999999, 3.39617752e38, -1e-300, 9.2e-41],
}
ROUNDED = {
    "float16": [2048.0, 2050.0, 2048.0, 65504.0, -65504.0, 0.0],
    "bfloat16": [256.0, 258.0, 256.0, 3.3895313892515355e38, 0.0, 9.183549615799121e-41],
}


@pytest.mark.every(2)
@pytest.mark.parametrize("layout", ["csr", "dense"])
@pytest.mark.parametrize("dtype", HALVES)
def test_values_are_rounded_once(tmp_path: Path, dtype: str, layout: str) -> None:
    x = np.array([TIES[dtype]])
    dataset = zl.open_dataset(store_of(x, tmp_path, by_anndata=True))
    found = epoch_of(zl.Loader(dataset, dtype=dtype, layout=layout)).double()
    assert found[0].tolist() == ROUNDED[dtype]


@given(st.lists(st.floats(width=32), max_size=50))
@example([float("nan"), float("inf"), -float("inf"), -0.0, 3.4028234663852886e38, 1e-45])
def test_bfloat16_is_that_of_torch(numbers: list[float]) -> None:
    single = np.array(numbers, np.float32)
    wanted = torch.from_numpy(single).bfloat16()
    for given_as in (single, single.astype(np.float64)):
        found = torch.from_numpy(narrowed(given_as, "bfloat16").view(np.int16)).view(torch.bfloat16)
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
        assert torch.equal(found.signbit() | found.isnan(), wanted.signbit() | wanted.isnan())


TOO_LARGE = {
    "float16, float": (65520.0, "float64", "float16"),
    "float16, whole": (65520, "int32", "float16"),
    "float16, unsigned": (65535, "uint16", "float16"),
    "float16, negative": (-70000, "int32", "float16"),
    "bfloat16": (3.4e38, "float32", "bfloat16"),
}


@pytest.mark.every(6)
@pytest.mark.parametrize(("value", "stored", "dtype"), TOO_LARGE.values(), ids=TOO_LARGE)
@pytest.mark.parametrize("layout", ["csr", "dense"])
@pytest.mark.parametrize("x", ["X", "layers/dense"])
def test_values_beyond_the_range_are_refused(
    tmp_path: Path, value: float, stored: str, dtype: str, layout: str, x: str
) -> None:
    stored_values = np.zeros((9, N_GENES), stored)
    stored_values[5, 3] = value
    dataset = zl.open_dataset(store_of(stored_values, tmp_path))
    with pytest.raises(OptionError, match=rf"in row 5 of the dataset, which {dtype} cannot hold"):
        list(zl.Loader(dataset, x=x, dtype=dtype, layout=layout, **SIZES))


def test_infinite_and_missing_values_stay_as_they_are(tmp_path: Path) -> None:
    x = np.array([[np.inf, -np.inf, np.nan, 1.5]])
    dataset = zl.open_dataset(store_of(x, tmp_path, by_anndata=True))
    for dtype in HALVES:
        found = epoch_of(zl.Loader(dataset, dtype=dtype, layout="dense")).float().numpy()
        np.testing.assert_array_equal(found, x)


def test_a_sum_of_a_repeated_gene_beyond_the_range_is_refused(tmp_path: Path) -> None:
    store = store_of(np.array([[0.0, 0.0], [40000.0, 39000.0]]), tmp_path, by_anndata=True)
    zarr.open_array(store / "X/indices", mode="r+")[:] = 1
    with pytest.raises(OptionError, match=r"79000.0 in row 1 of the dataset, which float16 cannot hold"):
        list(zl.Loader(zl.open_dataset(store), dtype="float16", layout="dense"))


@pytest.mark.parametrize("layout", ["scipy", "anndata"])
@pytest.mark.parametrize("dtype", HALVES)
def test_layouts_that_cannot_hold_half_floats(tmp_path: Path, layout: str, dtype: str) -> None:
    dataset = zl.open_dataset(store_of(values("uint16"), tmp_path))
    with pytest.raises(OptionError, match=f"layout='{layout}' cannot hold {dtype}.*layout='csr' or 'dense'"):
        zl.Loader(dataset, layout=layout, dtype=HALVES[dtype])


DTYPES = [torch.float32, np.float32, np.dtype("float32"), "float32", torch.float64, np.float64, float, np.dtype("<f8")]
DTYPES += ["torch.float64", torch.int32, np.int32, torch.int64, np.int64, np.dtype("int64"), torch.float16, np.float16]


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=repr)
def test_dtypes_may_be_objects(tmp_path: Path, dtype: Any) -> None:
    dataset = zl.open_dataset(store_of(values("uint16") // 2, tmp_path))
    loader = zl.Loader(dataset, dtype=dtype, layout="dense", **SIZES)
    dtype = torch.float64 if dtype == "torch.float64" else dtype
    wanted = dtype if isinstance(dtype, torch.dtype) else torch.from_numpy(np.zeros(1, dtype)).dtype
    assert next(iter(loader)).x.dtype == wanted
    assert pickle.loads(pickle.dumps(loader)).dtype == loader.dtype == str(wanted).removeprefix("torch.")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.complex64, np.int8, bool, str, object, np.dtype("float32,int8")])
def test_other_dtypes_are_refused(tmp_path: Path, dtype: Any) -> None:
    dataset = zl.open_dataset(store_of(values("uint16"), tmp_path))
    with pytest.raises(OptionError, match="dtype must be one of 'float16', 'bfloat16', 'float32'"):
        zl.Loader(dataset, dtype=dtype)
