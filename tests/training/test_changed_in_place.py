"""A training loop may change a minibatch in place: no later minibatch, epoch or process sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from helpers import counts, dense, write_store

import zloader as zl
from zloader.training.recipes import LAYOUTS

ADATA = counts(90, 40)
ADATA.var["score"] = np.arange(40.0)
ADATA.obsm["X_pca"] = np.random.default_rng(0).random((90, 3), np.float32)
TOKENS = {name: number for number, name in enumerate(["<pad>", "<mask>", "<cls>", "<eoc>", *ADATA.var_names])}
PARTS = {
    "obs": ["cell_type", "n_counts"],
    "obsm": ["X_pca"],
    "controls": zl.MatchedControls("passed", match="lane", n=1),
    "tokens": zl.tokenizers.ScGPT(TOKENS, max_length=12),
}
SIZES = {"batch_size": 16, "fetch_factor": 2, "sampling": zl.BlockShuffling(4)}
CACHES = {"no mirror": None, "raw": {}}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("in_place")
    write_store(ADATA, folder / "s.zarr", folder)
    return str(folder / "s.zarr")


def arrays(part: Any) -> Iterator[np.ndarray]:
    """The memory of all parts of a minibatch, of which some may be read-only."""
    if isinstance(part, torch.Tensor) and part.layout == torch.sparse_csr:
        yield from arrays([part.crow_indices(), part.col_indices(), part.values()])
    elif isinstance(part, torch.Tensor):
        yield part.numpy()
    elif isinstance(part, np.ndarray):
        yield part
    elif scipy.sparse.issparse(part):
        yield from (part.indptr, part.indices, part.data)
    elif isinstance(part, zl.Minibatch):
        yield from arrays([part[name] for name in sorted(part.keys())])
    elif isinstance(part, zl.PackedRows):
        yield from arrays([value for _, value in sorted(vars(part).items())])
    elif isinstance(part, dict):
        yield from arrays([value for _, value in sorted(part.items())])
    elif isinstance(part, list):
        for each in part:
            yield from arrays(each)
    elif hasattr(part, "obsm"):  # an AnnData
        columns = [column.to_numpy() for frame in (part.obs, part.var) for _, column in frame.items()]
        yield from arrays([part.X, *columns, dict(part.obsm)])


def content(minibatch: zl.Minibatch) -> list[Any]:
    return [array.tolist() for array in arrays(minibatch)]


def spoil(minibatch: zl.Minibatch) -> int:
    """Overwrites every byte that can be written. Returns how many arrays were."""
    written = 0
    for array in arrays(minibatch):
        if array.flags.writeable:
            array[...] = "spoilt" if array.dtype == object else 1
            written += 1
    return written


@pytest.mark.every(15)  # each layout once, and each cache
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cache", CACHES)
def test_changes_are_not_seen_later(store, tmp_path, layout, cache):
    def loader() -> zl.Loader:
        kept = None if CACHES[cache] is None else zl.Cache(tmp_path / "cache", **CACHES[cache])
        return zl.Loader(zl.open_dataset(store, cache=kept), layout=layout, **PARTS, **SIZES)

    plain = zl.Loader(zl.open_dataset(store), layout=layout, **PARTS, **SIZES)
    wanted = [[content(minibatch) for minibatch in plain] for _ in range(2)]
    changing = loader()
    for epoch in wanted:
        for found, right in zip(changing, epoch, strict=True):
            assert content(found) == right
            assert spoil(found) > 8
            assert content(found) != right
    assert [content(minibatch) for minibatch in loader()] == wanted[0]


def test_changes_of_var_are_not_seen_later(store):
    """With var in another order, an AnnData would name its columns wrongly."""
    dataset = zl.open_dataset(store)
    for adata in (dataset, dataset.take([0])):
        frame = adata.var
        frame["score"] = 0.0
        frame.index = frame.index[::-1]
    for adata in (dataset.take(range(64)), dataset.to_adata()[:64]):
        assert adata.var.equals(ADATA.var)
        np.testing.assert_array_equal(dense(adata.X), ADATA[:64].X.toarray())
    assert dataset.var.equals(ADATA.var)
