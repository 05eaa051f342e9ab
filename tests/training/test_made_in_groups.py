"""Minibatches that threads make a group at a time: the same as one after another, with memory of their own size."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from helpers import counts, write_store

import zloader as zl
from zloader.reading import gather
from zloader.reading.fetch import FetchScheduler, bytes_between, read_at_once
from zloader.reading.resources import BufferPool
from zloader.training.minibatch import Made

N_ROWS, N_GENES = 150, 60
IDS = [f"gene {number}" for number in range(N_GENES)]
TOKENS = {"<pad>": 0, "<mask>": 1, "<cls>": 2, "<eos>": 3} | {name: 4 + number for number, name in enumerate(IDS)}
GENEFORMER = zl.tokenizers.Geneformer(TOKENS, dict.fromkeys(IDS, 1.0), max_length=20)
OPTIONS: dict[str, dict[str, Any]] = {
    "csr": {},
    "dense": {"layout": "dense", "dtype": "float64"},
    "packed": {"layout": "packed"},
    "scipy": {"layout": "scipy"},
    "two x": {"x": ["X", "layers/dense"]},
    "no x": {"x": None},
    "tokens": {"tokens": GENEFORMER},
    "controls": {"controls": zl.MatchedControls("lane == 0", match="line", n=2)},
}
ADATA = counts(N_ROWS, N_GENES)
ADATA.obsm["place"] = np.arange(2.0 * N_ROWS).reshape(N_ROWS, 2).astype(np.float32)
ADATA.layers["dense"] = ADATA.X.toarray()
ADATA.layers["halves"] = ADATA.X / 2
ADATA.obs["lane"] = np.arange(N_ROWS) % 2
ADATA.obs["line"] = np.arange(N_ROWS) // 2 % 2


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> zl.Dataset:
    folder = tmp_path_factory.mktemp("groups")
    write_store(ADATA, folder / "counts.zarr", folder)
    return zl.open_dataset(folder / "counts.zarr")


def loader_of(dataset: zl.Dataset, **options: Any) -> zl.Loader:
    return zl.Loader(dataset, batch_size=16, obs=["cell_type", "lane"], obsm=["place"], **options)


def parts(value: Any) -> list[Any]:
    """The arrays of a minibatch."""
    if value is None:
        return []
    if isinstance(value, dict):
        return [part for each in value.values() for part in parts(each)]
    if isinstance(value, zl.PackedRows):
        return [part for each in fields(value) for part in parts(getattr(value, each.name))]
    if scipy.sparse.issparse(value):
        return [value.indptr, value.indices, value.data]
    if isinstance(value, torch.Tensor) and value.layout == torch.sparse_csr:
        return [value.crow_indices(), value.col_indices(), value.values()]
    return [value]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return bool(one.equals(other) if hasattr(one, "equals") else one == other)  # frames, shapes


@pytest.mark.every(3)
@pytest.mark.parametrize("framework", ["torch", "numpy"])
@pytest.mark.parametrize("view", [False, True], ids=["whole", "view"])
@pytest.mark.parametrize("name", OPTIONS)
def test_groups_are_made_like_single_minibatches(dataset, name, view, framework):
    options = OPTIONS[name]
    rows = dataset.where(np.arange(N_ROWS) % 3 > 0) if view else dataset
    loader = loader_of(rows, framework=framework, **options)
    plan, recipe, convert = loader.plan(0), loader.recipes.recipe(0), loader.recipes.minibatches
    alone = []
    for fetch in plan.fetches():
        arrays = read_at_once(recipe, fetch.rows[fetch.order], loader.options)
        for piece in gather.cut_apart(arrays, fetch.cuts.tolist()):
            alone += convert(piece, (0, len(piece.index)))
    made = list(loader)
    assert len(made) == len(alone) == len(loader)
    for one, other in zip(made, alone, strict=True):
        assert list(one) == list(other)
        of_one, of_other = parts(one), parts(other)
        assert len(of_one) == len(of_other) > 3
        assert all(map(same, of_one, of_other))


@pytest.mark.parametrize("name", ["csr", "dense", "packed", "tokens"])
def test_a_minibatch_is_writable_and_pickles_without_the_rest_of_its_group(dataset, name):
    made = list(loader_of(dataset, **OPTIONS[name]))
    whole = [pickle.dumps(minibatch) for minibatch in made]
    tensors = [part for part in parts(made[1]) if isinstance(part, torch.Tensor)]
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in tensors)
    for tensor in tensors:
        tensor.fill_(1)
        tensor.add_(torch.ones((), dtype=tensor.dtype)) if tensor.dtype not in (torch.bool, torch.uint16) else None
    assert [pickle.dumps(each) for each in (made[0], *made[2:])] == [whole[0], *whole[2:]]


def test_tensors_can_be_changed_in_place_by_what_needs_a_gradient(dataset):
    first = next(iter(loader_of(dataset, layout="dense"))).x
    weight = torch.ones(N_GENES, requires_grad=True)
    first.mul_(weight).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("name", ["csr", "scipy"])
def test_threads_that_gather_make_minibatches(dataset, name):
    loader = loader_of(dataset, **OPTIONS[name])
    (fetch,) = loader.plan(0).fetches()
    items = list(
        FetchScheduler(loader.recipes.recipe(0, ready=True), loader.options, BufferPool()).start([fetch], name="test")
    )
    assert [isinstance(item, Made) for item in items] == [True] * len(loader)
    assert [item.index.tolist() for item in items] == [each.index.tolist() for each in loader]
    assert all(item.nbytes > 0 for item in items)
    assert loader.recipes.recipe(0).cut is gather.cut_apart  # arrays for another process


def test_errors_of_groups_come_after_the_minibatches_before_them(dataset, caplog):
    """Several groups fail, and the consumer hears of the first."""

    def fail(minibatch: zl.Minibatch) -> zl.Minibatch:
        if int(minibatch.row[0]) >= 48:
            raise OSError(f"row {int(minibatch.row[0])}")
        return minibatch

    loader = loader_of(dataset, shuffle=False, batch_transform=fail)
    iterator = iter(loader)
    assert [int(next(iterator).row[0]) for _ in range(3)] == [0, 16, 32]
    with pytest.raises(OSError, match="row 48"):
        next(iterator)
    assert not [each for each in caplog.records if "have no label" not in each.message]


@pytest.mark.parametrize("name", ["csr", "dense", "packed", "two x", "tokens"])
def test_bytes_of_groups_are_those_of_their_rows(dataset, name):
    """A group takes at most what was counted for it, and counts add up."""
    loader = loader_of(dataset, **OPTIONS[name])
    (fetch,) = loader.plan(0).fetches()
    counted = []

    class Counting(FetchScheduler):
        def _make(self, loaded, without_x, cuts):
            n_bytes = bytes_between(self._recipe, fetch, loaded.arrays)
            (all_of_it,) = [
                replace(without_x, obs={}, obsm={}, x=self._x(loaded, fetch.order, fetch.rows[fetch.order]))
            ]
            counted.append((n_bytes, sum(x.nbytes for x in all_of_it.x.values())))
            return super()._make(loaded, without_x, cuts)

    list(Counting(loader.recipes.recipe(0), loader.options, BufferPool()).start([fetch], name="test"))
    n_bytes, taken = counted[0]
    assert taken <= n_bytes(fetch.cuts) + 8 * (N_ROWS + 1)
    if name != "tokens":  # which are padded to the longest of a group
        assert n_bytes(fetch.cuts) == sum(n_bytes(fetch.cuts[at : at + 2]) for at in range(len(loader)))
