"""Highly variable genes are those that scanpy finds in memory."""

from __future__ import annotations

import warnings

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from helpers import write_store

import zloader as zl
from zloader.common.errors import OptionError
from zloader.transforms import LogNormalize

COUNTS, LOG = "layers/counts", "X"
MATRIX = {"seurat_v3": COUNTS, "seurat": LOG, "cell_ranger": LOG}
LIMITS = {"n_top_genes": None, "min_mean": 0.05, "max_mean": 2.5, "min_disp": 0.2}
CHOICES = [
    pytest.param(flavor, {"n_top_genes": 40, **options}, id=f"{flavor} {', '.join(options)}")
    for flavor in MATRIX
    for options in ({}, {"batch_key": "batch"}, LIMITS, {**LIMITS, "batch_key": "batch"})
    if flavor != "seurat_v3" or "min_mean" not in options
] + [
    pytest.param("seurat_v3", {"n_top_genes": 30, "span": 0.6, "batch_key": "number"}, id="span"),
    pytest.param("seurat", {"n_top_genes": 500, "n_bins": 7, "batch_key": "number"}, id="bins, too many wanted"),
]


def table_of_scanpy(adata: ad.AnnData, flavor: str, **options: object) -> pd.DataFrame:
    """The table of scanpy, with the rows in the order of the genes."""
    sc = pytest.importorskip("scanpy")
    layer = MATRIX[flavor].removeprefix("layers/") if flavor == "seurat_v3" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = sc.pp.highly_variable_genes(adata.copy(), flavor=flavor, layer=layer, inplace=False, **options)
    return found.loc[adata.var_names]


def random_cells(n_rows: int = 700, n_genes: int = 160, seed: int = 0) -> ad.AnnData:
    """Counts with overdispersed genes, a gene without counts, a constant one, and one that a batch lacks."""
    rng = np.random.default_rng(seed)
    means = rng.gamma(0.6, 1.5, n_genes) + 0.02
    x = rng.poisson(means * rng.gamma(1 / rng.gamma(2, 0.4, n_genes).clip(0.05), size=(n_rows, n_genes)).clip(0, 40))
    batch = rng.choice(["b", "a", "c"], n_rows, p=[0.5, 0.3, 0.2])
    x[:, 3], x[:, 5], x[batch == "a", 7] = 0, 2, 0
    obs = pd.DataFrame({"batch": pd.Categorical(batch), "number": rng.integers(0, 2, n_rows)})
    obs.index = [f"cell {row}" for row in range(n_rows)]
    var = pd.DataFrame(index=[f"gene {gene}" for gene in rng.permutation(n_genes)])
    counts = sp.csr_matrix(x.astype(np.float32))
    scaled = x / np.maximum(x.sum(axis=1, keepdims=True), 1) * 1e3
    log = sp.csr_matrix(np.log1p(scaled))
    return ad.AnnData(log, obs=obs, var=var, layers={"counts": counts})


CELLS = random_cells()


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("variable_genes")
    write_store(CELLS, folder / "store.zarr", folder)
    return str(folder / "store.zarr")


def check(dataset: zl.Dataset, adata: ad.AnnData, flavor: str, **options: object) -> None:
    adata = adata.copy()
    if options.get("batch_key") == "number" and flavor != "seurat_v3":
        adata.obs["number"] = adata.obs["number"].astype("category")  # scanpy takes numbers for seurat_v3 only
    wanted = table_of_scanpy(adata, flavor, **options)
    found = dataset.highly_variable_genes(flavor=flavor, x=MATRIX[flavor], **options, progress=False)
    assert found["highly_variable"].sum() > 0
    pd.testing.assert_frame_equal(found, wanted, rtol=1e-8, check_names=False)


@pytest.mark.parametrize(("flavor", "options"), CHOICES)
def test_it_equals_scanpy(store, flavor, options):
    check(zl.open_dataset(store), CELLS, flavor, **options)
