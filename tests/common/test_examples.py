"""The examples in the docstrings of the lower folders run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from helpers import counts

import zloader as zl

PACKAGES = ("common", "order", "selecting", "storage", "tokenizers", "transforms")
MODULES = [
    module.name
    for package in PACKAGES
    for module in pkgutil.walk_packages([str(Path(zl.__file__).parent / package)], f"zloader.{package}.")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with cells.h5ad and atlas.zarr, 300 cells of three types, and other.zarr, 100 cells of other genes.

    spatial.zarr has the latter with a graph.
    """
    adata = counts(300, 20)
    adata.obs["cell_type"] = pd.Categorical(np.tile(["T", "B", "NK"], 100))
    folder = tmp_path_factory.mktemp("examples")
    adata.write_h5ad(folder / "cells.h5ad")
    zl.convert(adata, folder / "atlas.zarr", progress=False)
    other = adata[:100].copy()
    other.var_names = [*adata.var_names[5:], *(f"other {number}" for number in range(5))]
    zl.convert(other, folder / "other.zarr", progress=False)
    other.obsp["connectivities"] = scipy.sparse.random(100, 100, 0.1, "csr", random_state=0)
    zl.convert(other, folder / "spatial.zarr", progress=False)
    return folder


@pytest.fixture(scope="module")
def dataset(folder: Path) -> zl.Dataset:
    zl.convert(folder / "cells.h5ad", folder / "stored.zarr", progress=False)
    return zl.open_dataset(folder / "stored.zarr", cache=folder / "cache")


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["zloader", "zloader.transforms", *MODULES])
def test_examples_run(name, folder, dataset, monkeypatch):
    monkeypatch.chdir(folder)
    found = doctest.testmod(importlib.import_module(name), extraglobs={"zl": zl, "dataset": dataset})
    assert found.failed == 0
