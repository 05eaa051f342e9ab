"""The examples in the docstrings of `zloader.dataset` run, in a directory with a small store."""

from __future__ import annotations

import doctest
import importlib

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse

import zloader as zl

N_ROWS, N_GENES = 1000, 50


@pytest.fixture
def atlas(tmp_path, monkeypatch):
    """`atlas.zarr` and `other.zarr` in the current directory.

    In the atlas, B and T cells alternate, and there are ten donors of 100 cells each. The other store has 40 of its
    genes and ten more.
    """
    rows = np.arange(N_ROWS)
    x = scipy.sparse.random(N_ROWS, N_GENES, density=0.2, format="csr", dtype=np.float32, random_state=0)
    obs = pd.DataFrame(
        {
            "cell_type": pd.Categorical(np.where(rows % 2, "T", "B")),
            "donor": pd.Categorical([f"d{number}" for number in rows // 100]),
            "n_counts": rows + 1,
        },
        index=[f"cell{row}" for row in rows],
    )
    monkeypatch.chdir(tmp_path)
    adata = ad.AnnData(x, obs, layers={"spliced": x})
    zl.convert(adata, "atlas.zarr", progress=False)
    other = adata[:100].copy()
    other.var_names = [*adata.var_names[10:], *(f"gene{number}" for number in range(10))]
    zl.convert(other, "other.zarr", progress=False)


@pytest.mark.parametrize("name", ["dataset.dataset", "insight.quality", "dataset.warm"])
def test_the_examples_run(name, atlas):
    failed, attempted = doctest.testmod(importlib.import_module(f"zloader.{name}"))
    assert attempted
    assert not failed
