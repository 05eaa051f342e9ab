"""What users of AnnData and notebooks try first: obs["x"], head, to_adata, and how objects are shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from helpers import counts, write_store
from sources import layers_of

import zloader as zl
from zloader.common import machine
from zloader.common.errors import MissingColumnError, OptionError
from zloader.training.recipes import LAYOUTS

ADATA = counts(50, 12)
ADATA.layers["spliced"] = ADATA.X * 2
ADATA.layers["dense"] = ADATA.X.toarray() + 1
ADATA.obsm["X_pca"] = np.arange(100, dtype=np.float32).reshape(50, 2)
OTHER = ADATA[:20, 4:].copy()
OTHER.obs_names = [f"other {row}" for row in range(20)]


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    tmp = tmp_path_factory.mktemp("small")
    for name, adata in {"a": ADATA, "b": OTHER}.items():
        write_store(adata, tmp / f"{name}.zarr", tmp)
    return [tmp / "a.zarr", tmp / "b.zarr"]


@pytest.fixture
def dataset(urls: list[Path]) -> zl.Dataset:
    return zl.open_dataset(urls[0])


def test_obs_is_indexed_like_a_frame(dataset: zl.Dataset) -> None:
    view = dataset[10:20]
    for rows in (dataset, view):
        pd.testing.assert_series_equal(rows.obs["lane"], rows.obs()["lane"])
        pd.testing.assert_frame_equal(rows.obs[["lane", "donor"]], rows.obs(["lane", "donor"]))
        assert list(rows.obs) == rows.obs_columns
        assert "lane" in rows.obs
        assert "nothing" not in rows.obs
    with pytest.raises(MissingColumnError, match="Did you mean 'lane'"):
        dataset.obs["lan"]
    with pytest.raises(AttributeError, match=r"write obs\(\)\.groupby"):
        dataset.obs.groupby("lane")
    assert "obs() reads it" in repr(dataset.obs)


def test_a_small_dataset_as_an_anndata(dataset: zl.Dataset) -> None:
    made = dataset.to_adata()
    assert (made.X != ADATA.X).nnz == 0
    pd.testing.assert_frame_equal(made.obs, dataset.obs())
    assert list(layers_of(made)) == ["dense", "spliced"]
    np.testing.assert_array_equal(made.layers["dense"], ADATA.layers["dense"])
    np.testing.assert_array_equal(made.obsm["X_pca"], ADATA.obsm["X_pca"])
    assert not layers_of(dataset.to_adata(layers=[]))
    view = dataset.where(ADATA.obs["passed"].to_numpy())
    assert list(view.to_adata().obs_names) == list(view.obs_names)
    assert (view.to_adata().X != ADATA[ADATA.obs["passed"].to_numpy()].X).nnz == 0
    assert dataset[:0].to_adata().shape == (0, 12)


@pytest.mark.parametrize("join", ["inner", "outer"])
def test_joined_datasets_as_an_anndata(urls: list[Path], join: Any) -> None:
    made = zl.open_dataset(urls[::-1], join=join).to_adata()
    wanted = ad.concat([OTHER, ADATA], join=join, fill_value=0)
    assert list(made.var_names) == list(wanted.var_names)
    np.testing.assert_array_equal(made.X.toarray(), wanted.X.toarray())
    np.testing.assert_array_equal(made.layers["dense"], wanted.layers["dense"])
    assert list(made.obs_names) == list(wanted.obs_names)


@pytest.mark.parametrize("join", ["inner", "outer"])
def test_rows_that_memory_cannot_hold_are_refused_before_they_are_read(
    urls: list[Path], monkeypatch: pytest.MonkeyPatch, join: Any
) -> None:
    dataset = zl.open_dataset(urls, join=join)
    made = dataset.to_adata()
    least = made.X.data.nbytes + made.layers["dense"].nbytes + made.obsm["X_pca"].nbytes
    monkeypatch.setattr(machine, "available_bytes", lambda: least)
    for act in (dataset.to_adata, lambda: dataset.take(slice(None))):
        with pytest.raises(OptionError, match=r"70 rows as an AnnData .* would take .* GB"):
            act()
    assert dataset.take([3, 1]).n_obs == 2


def test_loaders_and_minibatches_are_shown_briefly(dataset: zl.Dataset) -> None:
    plain = zl.Loader(dataset)
    assert (
        repr(plain)
        == f"<Loader of Dataset with n_obs x n_vars = 50 x 12 of {dataset.url}: batch_size=64, fetch_factor=256>"
    )
    for layout in LAYOUTS:
        loader = zl.Loader(dataset, layout=layout, obs=["lane"], x=["X", "layers/dense"], sampling="streaming")
        shown = repr(next(iter(loader)))
        assert shown.startswith("Minibatch of 50 rows\n    row: torch.int64 50\n    index: torch.int64 50\n    x: X, ")
        assert "\n    obs: lane\n" in shown
        assert len(shown.splitlines()) == 6
    dense = next(iter(zl.Loader(dataset, layout="dense", obsm=["X_pca"])))
    assert "\n    x: torch.float32 50x12\n" in repr(dense)
    many = zl.Loader(dataset, sampling=zl.Streaming(np.arange(50), shuffle=True))
    assert len(repr(many)) < 400


def test_the_report_of_a_conversion_is_one_sentence(tmp_path: Path) -> None:
    report = zl.convert(counts(30, 8), tmp_path / "a.zarr", progress=False)
    assert re.fullmatch(
        r"<ConversionReport of .*a\.zarr: 30 rows x 8 genes, [\d,]+ values from .+; [\d,]+ bytes became [\d,]+ in "
        r"[\d.]+ s; .*X/data float32 -> uint16.*>",
        repr(report),
    )
