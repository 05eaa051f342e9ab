"""log1p_normalize equals scanpy's normalize_total and log1p."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
import torch
from helpers import counts

import zloader as zl
from zloader.common.errors import OptionError
from zloader.training.tensors import silence_sparse_warnings

silence_sparse_warnings()
COUNTS = counts(60, 31).X


def tensor(layout: str, dtype: torch.dtype = torch.float32, x: sp.csr_matrix = COUNTS) -> torch.Tensor:
    dense = torch.from_numpy(x.toarray()).to(dtype)
    return dense.to_sparse_csr() if layout == "csr" else dense


def by_numpy(target_sum: float) -> np.ndarray:
    counts, totals = COUNTS.toarray(), COUNTS.sum(axis=1).A1[:, None]
    return np.log1p(counts * np.divide(target_sum, totals, out=np.zeros_like(totals, float), where=totals > 0))


def by_scanpy(target_sum: float) -> np.ndarray:
    import scanpy  # which takes seconds to import

    wanted = ad.AnnData(COUNTS.copy())
    scanpy.pp.normalize_total(wanted, target_sum=target_sum)
    scanpy.pp.log1p(wanted)
    return wanted.X.toarray()


@pytest.mark.filterwarnings("ignore:Some cells have zero counts")
@pytest.mark.parametrize("normalized", [by_numpy, pytest.param(by_scanpy, marks=pytest.mark.slow)])
@pytest.mark.parametrize("target_sum", [1e4, 1, 250.5])
@pytest.mark.parametrize("layout", ["csr", "dense"])
def test_it_equals_scanpy(layout, target_sum, normalized):
    wanted = normalized(target_sum)
    x = tensor(layout)
    before = x.to_dense().clone()
    found = zl.log1p_normalize(x, target_sum)
    assert (found.layout, found.dtype, found.shape) == (x.layout, x.dtype, x.shape)
    np.testing.assert_allclose(found.to_dense().numpy(), wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(x.to_dense(), before)


@pytest.mark.parametrize("layout", ["csr", "dense"])
@pytest.mark.parametrize(
    ("dtype", "becomes"),
    [(torch.int32, torch.float32), (torch.int64, torch.float32), (torch.float64, torch.float64), (torch.float16,) * 2],
    ids=str,
)
def test_dtypes(layout, dtype, becomes):
    found = zl.log1p_normalize(tensor(layout, dtype))
    assert found.dtype == becomes
    np.testing.assert_allclose(
        found.to_dense().double(), zl.log1p_normalize(tensor("dense", torch.float64)), rtol=2e-3, atol=1e-6
    )


@pytest.mark.parametrize("layout", ["csr", "dense"])
@pytest.mark.parametrize("shape", [(0, 5), (3, 5), (4, 0)], ids=str)
def test_nothing_stays_nothing(layout, shape):
    x = sp.csr_matrix(shape, dtype=np.float32)
    found = zl.log1p_normalize(tensor(layout, x=x))
    assert found.shape == shape
    assert not found.to_dense().any()


@pytest.mark.parametrize("layout", ["csr", "dense"])
def test_gradients_pass_through(layout):
    x = tensor("dense").requires_grad_()
    zl.log1p_normalize(x.to_sparse_csr() if layout == "csr" else x).to_dense().sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (COUNTS, "not csr_matrix: load with layout='csr'"),
        (COUNTS.toarray(), "not ndarray"),
        (torch.ones(3), r"not torch.strided of shape \(3,\)"),
        (torch.ones(3, 4).to_sparse_coo(), "not torch.sparse_coo"),
        (-torch.ones(3, 4), "x holds -1.0, but counts are never negative"),
        ((-torch.ones(3, 4)).to_sparse_csr(), "have been normalised or scaled already"),
    ],
    ids=["scipy", "numpy", "1-d", "coo", "negative", "negative csr"],
)
def test_other_inputs_are_refused(x, says):
    with pytest.raises(OptionError, match=says):
        zl.log1p_normalize(x)


@pytest.mark.parametrize("target_sum", [0, -1.0, float("nan"), float("inf"), "1e4", True, None])
def test_a_target_that_is_none_is_refused(target_sum):
    with pytest.raises(OptionError, match="target_sum must be a number above 0"):
        zl.log1p_normalize(torch.ones(2, 2), target_sum)
