"""A Minibatch is a dict of its parts, as libraries read and rebuild it, with attributes and a number of rows."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from helpers import counts, write_store
from torch.utils.data import DataLoader, default_convert

import zloader as zl
from zloader.common.errors import MissingColumnError

ADATA = counts(40, 12)
ADATA.obsm["X_pca"] = np.arange(80, dtype=np.float32).reshape(40, 2)
FIELDS = ["row", "index", "x", "obs", "obsm"]
# What the loader is asked for, and the names that its minibatches have.
KINDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "csr": ({}, FIELDS),
    "dense": ({"layout": "dense"}, FIELDS),
    "scipy": ({"layout": "scipy"}, FIELDS),
    "no x": ({"x": None}, ["row", "index", "obs", "obsm"]),
    "two x": ({"x": ["X", "raw/X"], "layout": "dense"}, FIELDS),
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> zl.Dataset:
    folder = tmp_path_factory.mktemp("minibatch")
    ADATA.raw = ADATA
    write_store(ADATA, folder / "counts.zarr", folder)
    return zl.open_dataset(folder / "counts.zarr")


def load(dataset: zl.Dataset, **options: Any) -> zl.Minibatch:
    return next(iter(zl.Loader(dataset, batch_size=8, obs=["cell_type", "lane"], obsm=["X_pca"], **options)))


@pytest.fixture(params=KINDS)
def minibatch(request: pytest.FixtureRequest, dataset: zl.Dataset) -> zl.Minibatch:
    return load(dataset, **KINDS[request.param][0])


def by_hand(minibatch: zl.Minibatch) -> Any:
    """As accelerate's `recursively_apply` and the Trainer of transformers do."""
    return type(minibatch)({name: value for name, value in minibatch.items()})  # noqa: C416


REBUILT: dict[str, Callable[[zl.Minibatch], Any]] = {
    "as a Mapping": by_hand,
    "by torch": default_convert,
    "copied": copy.copy,
}


@pytest.mark.parametrize("name", KINDS)
def test_a_minibatch_is_a_mapping_of_its_fields(dataset: zl.Dataset, name: str) -> None:
    options, names = KINDS[name]
    minibatch = load(dataset, **options)
    assert isinstance(minibatch, Mapping)
    assert list(minibatch) == list(minibatch.keys()) == list(dict(minibatch)) == list({**minibatch}) == names
    assert len(minibatch.keys()) == len(minibatch.items()) == len(minibatch.values()) == len(names)
    assert minibatch.keys() == set(names)
    for key, value in minibatch.items():
        assert minibatch[key] is minibatch.get(key) is value is getattr(minibatch, key)
        assert key in minibatch
    assert len(minibatch) == 8
    assert len(next(iter(minibatch.values()))) == 8  # accelerate takes the size of the batch from the first value


@pytest.mark.parametrize("how", REBUILT)
def test_a_minibatch_can_be_built_of_its_parts(minibatch: zl.Minibatch, how: str) -> None:
    again = REBUILT[how](minibatch)
    assert type(again) is zl.Minibatch
    assert again.keys() == minibatch.keys()
    assert again.row is minibatch.row
    assert all(again.obs[name] is minibatch.obs[name] for name in ("cell_type", "lane"))


def test_a_minibatch_keeps_its_parts_when_pickled(minibatch: zl.Minibatch) -> None:
    again = pickle.loads(pickle.dumps(minibatch))
    assert again.keys() == minibatch.keys()
    assert torch.equal(again.index, minibatch.index)
    assert again.obs["lane"].tolist() == minibatch.obs["lane"].tolist()


@pytest.mark.parametrize("how", ["to", "pin_memory"])
def test_a_moved_minibatch_keeps_its_parts(dataset: zl.Dataset, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)  # there may be no GPU
    minibatch = load(dataset)
    moved = minibatch.to("cpu") if how == "to" else minibatch.pin_memory()
    assert list(moved) == list(minibatch)
    assert moved.row is moved.index


def test_dataloader_passes_minibatches_on(dataset: zl.Dataset) -> None:
    loader = zl.Loader(dataset, batch_size=8)
    minibatches = list(DataLoader(loader, batch_size=None))
    assert [type(minibatch) for minibatch in minibatches] == [zl.Minibatch] * 5
    assert sorted(row for minibatch in minibatches for row in minibatch.index.tolist()) == list(range(40))


def test_entries_can_be_set_by_either_name(dataset: zl.Dataset) -> None:
    minibatch = load(dataset)
    minibatch.x = minibatch.x.to_dense()
    minibatch["mine"] = [1]
    assert minibatch["x"].layout == torch.strided
    assert minibatch.mine == [1]
    assert minibatch.to("cpu").mine == [1]
    assert copy.deepcopy(minibatch).keys() == minibatch.keys()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lane", r"no 'lane' here, only: .* A Loader loads minibatch\.obs\[...\] and minibatch\.obsm\[...\]"),
        ("indx", r"has no 'indx' here, only: row, index, x, obs, obsm\. Did you mean 'index'\?"),
        (0, "has no 0 here, only: row, index, x, obs, obsm"),
    ],
    ids=str,
)
def test_other_names_are_refused(dataset: zl.Dataset, name: Any, message: str) -> None:
    minibatch = load(dataset)
    with pytest.raises(MissingColumnError, match=message):
        minibatch[name]
    assert name not in minibatch
    assert minibatch.get(name, "nothing") == "nothing"


def test_a_minibatch_is_equal_to_itself_only(dataset: zl.Dataset) -> None:
    one, other = load(dataset), load(dataset)
    assert one == one
    assert one != other
    assert len({one, other, one}) == 2


def test_a_model_takes_a_minibatch_as_keywords(dataset: zl.Dataset) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, obs: dict[str, torch.Tensor], **rest: Any) -> float:
            assert set(rest) == {"row", "index", "obsm"}
            return float(x.sum() + obs["lane"].sum())

    minibatch = load(dataset, layout="dense")
    assert Model()(**minibatch) == float(minibatch.x.sum() + minibatch.obs["lane"].sum())


def test_columns_that_were_not_loaded_are_named(dataset: zl.Dataset) -> None:
    minibatch = load(dataset)
    for each in (minibatch, pickle.loads(pickle.dumps(minibatch)), minibatch.each(torch.clone)):
        with pytest.raises(MissingColumnError, match=r"only: cell_type, lane. Did you mean 'cell_type'\?"):
            each.obs["cell_typ"]
        with pytest.raises(KeyError, match=r"no 'X_umap' here, only: X_pca.*obsm=\[\.\.\.\]"):
            each.obsm["X_umap"]
        assert each.obs.get("cell_typ") is None
