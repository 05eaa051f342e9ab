"""Batches have the names, shapes, dtypes and meaning of those of cell-load 0.10."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import counts, write_store

import zloader as zl
from zloader.common.errors import OptionError
from zloader.integrations.cell_load import CellLoadBatch

pytestmark = pytest.mark.any_version

RNG = np.random.default_rng(3)
ADATA = counts(400, 12)
ADATA.obs["drug"] = pd.Categorical(RNG.choice(["DMSO", "x", "y"], 400))
ADATA.obs["line"] = pd.Categorical(RNG.choice(["A", "B"], 400))
ADATA.obs["plate"] = RNG.choice(["p1", "p2"], 400)
ADATA.obsm["X_pca"] = RNG.random((400, 5))
COLUMNS = {"perturbation": "drug", "cell_type": "line", "batch": "plate"}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> zl.Dataset:
    folder = tmp_path_factory.mktemp("cells")
    write_store(ADATA, folder / "cells.zarr", folder)
    return zl.open_dataset(folder / "cells.zarr")


def loader_of(dataset, **options) -> zl.Loader:
    usual = {
        "batch_size": 32,
        "sampling": zl.CellSets(["line", "drug"], set_size=16),
        "controls": zl.MatchedControls("drug == 'DMSO'", match="line"),
        "obs": ["drug", "line", "plate"],
        "obsm": ["X_pca"],
        "layout": "dense",
    }
    return zl.Loader(dataset, **usual | options)


def test_batches_have_what_state_trains_on(dataset):
    batches = loader_of(dataset, batch_transform=CellLoadBatch(dataset, **COLUMNS))
    minibatches = loader_of(dataset)
    assert len(batches) == len(minibatches)
    for batch, minibatch in zip(batches, minibatches, strict=True):
        rows, controls = minibatch.index.numpy(), minibatch.control.index.numpy()
        shapes = {name: tuple(each.shape) for name, each in batch.items() if isinstance(each, torch.Tensor)}
        emb = {"pert_cell_emb": (len(rows), 12), "ctrl_cell_emb": (len(rows), 12), "pert_emb": (len(rows), 3)}
        assert shapes == emb | {"cell_type_onehot": (len(rows), 2), "batch": (len(rows), 2)}
        assert {batch[name].dtype for name in shapes} == {torch.float32}
        np.testing.assert_array_equal(batch["pert_cell_emb"].numpy(), ADATA.X[rows].toarray())
        np.testing.assert_array_equal(batch["ctrl_cell_emb"].numpy(), ADATA.X[controls].toarray())
        for names, vectors, column in (
            ("pert_name", "pert_emb", "drug"),
            ("cell_type", "cell_type_onehot", "line"),
            ("batch_name", "batch", "plate"),
        ):
            assert batch[names] == ADATA.obs[column].iloc[rows].tolist()
            np.testing.assert_array_equal(
                batch[vectors].numpy(), pd.get_dummies(ADATA.obs[column]).to_numpy(np.float32)[rows]
            )
        sets = batch["pert_cell_emb"].view(-1, 16, 12)  # as STATE reshapes them
        assert len(sets) == len(minibatch.group["drug"])


def test_embeddings_and_features_take_the_place_of_counts_and_one_hot_vectors(dataset):
    features = {"x": torch.tensor([1.0, 2.0]), "DMSO": torch.tensor([3.0, 4.0])}
    transform = CellLoadBatch(dataset, **COLUMNS, embedding="X_pca", features=features)
    for batch in loader_of(dataset, x=None, layout="csr", batch_transform=transform):
        assert batch["pert_cell_emb"].dtype == batch["ctrl_cell_emb"].dtype == torch.float32
        assert batch["pert_cell_emb"].shape == (len(batch["pert_name"]), 5)
        for name, vector in zip(batch["pert_name"], batch["pert_emb"].tolist(), strict=True):
            assert vector == features.get(name, torch.zeros(2)).tolist()


def test_a_loader_without_controls_is_refused(dataset):
    transform = CellLoadBatch(dataset, **COLUMNS)
    with pytest.raises(OptionError, match="pairs each row with a control"):
        next(iter(loader_of(dataset, controls=None, batch_transform=transform)))
    with pytest.raises(OptionError, match="holds numbers or dates, not categories"):
        CellLoadBatch(dataset, **COLUMNS | {"batch": "lane"})
