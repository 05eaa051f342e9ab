"""The recipes of docs/howto/own_format.md run as they stand, and give the cells of the AnnData that made the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from sources import SMALL, counts
from test_readme import doc, fenced

import zloader as zl

pytestmark = [pytest.mark.any_version, pytest.mark.slow]

N_ROWS, N_GENES = 700, 60


def cells() -> ad.AnnData:
    obs = pd.DataFrame(
        {
            "tissue": pd.Categorical(np.random.default_rng(2).choice(["lung", "blood", "liver"], N_ROWS)),
            "note": [f"note {i} ä" for i in range(N_ROWS)],
            "dose": np.arange(N_ROWS) / 4,
            "primary": [i % 3 != 0 for i in range(N_ROWS)],
        },
        index=[f"c{i}" for i in range(N_ROWS)],
    )
    var = pd.DataFrame({"symbol": [f"s{i}" for i in range(N_GENES)]}, index=[f"g{i}" for i in range(N_GENES)])
    return ad.AnnData(counts(N_ROWS, N_GENES), obs=obs, var=var)


def recipe(name: str) -> dict[str, Any]:
    """The names that the code of the page defines."""
    names: dict[str, Any] = {}
    exec(fenced(doc("howto/own_format"), name), names)
    return names


def assert_becomes(source: zl.RowSource, wanted: ad.AnnData, store: Path) -> None:
    assert isinstance(source, zl.RowSource)
    zl.convert(source, store, options=SMALL, progress=False)
    found = ad.read_zarr(store)
    np.testing.assert_array_equal(found.X.toarray(), wanted.X.toarray())
    assert found.obs_names.tolist() == wanted.obs_names.tolist()
    assert found.var_names.tolist() == wanted.var_names.tolist()
    for name in wanted.obs:
        assert found.obs[name].astype(object).tolist() == wanted.obs[name].astype(object).tolist(), name
    for name in wanted.var:
        assert found.var[name].astype(object).tolist() == wanted.var[name].astype(object).tolist(), name
    assert zl.verify(store, against=source, progress=False).ok


@pytest.mark.parametrize("where", [None, "tissue == 'lung' and dose > 20", "dose < 5 or dose >= 164.5"])
def test_soma(tmp_path: Path, where: str | None) -> None:
    io = pytest.importorskip("tiledbsoma.io")
    adata = cells()
    io.from_anndata(str(tmp_path / "soma"), adata, measurement_name="RNA", X_layer_name="raw")
    wanted = adata if where is None else adata[adata.obs.eval(where)].copy()
    source = recipe("soma")["Soma"](str(tmp_path / "soma"), where=where)
    assert_becomes(source, wanted, tmp_path / "a.zarr")
    assert zl.convert(source, tmp_path / "a.zarr", options=SMALL, resume=True, progress=False).already_complete


@pytest.mark.parametrize("dtype", ["float32", "uint16"])
def test_scdl(tmp_path: Path, dtype: str) -> None:
    datasets = pytest.importorskip("bionemo.scdl.io.single_cell_memmap_dataset")
    adata = cells()
    adata.var.insert(0, "feature_id", adata.var_names)
    adata.write_h5ad(tmp_path / "a.h5ad")
    folder, written = str(tmp_path / "scdl"), str(tmp_path / "a.h5ad")
    datasets.SingleCellMemMapDataset(folder, h5ad_path=written, use_X_not_raw=True, data_dtype=dtype).save()
    wanted = ad.AnnData(adata.X.astype(dtype), obs=adata.obs.set_index(pd.RangeIndex(N_ROWS).astype(str)))
    wanted.var = adata.var.drop(columns="feature_id")
    assert_becomes(recipe("scdl")["Scdl"](folder), wanted, tmp_path / "a.zarr")
