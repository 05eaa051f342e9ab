"""Rows stored in a given order: the same cells as in the source, and orders that are refused. The curve of the docs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse
import zarr
from helpers import counts
from test_readme import doc, fenced

import zloader as zl
from zloader.common.errors import OptionError, StoreError, StoreExistsError


def slide(n_rows: int, seed: int = 0) -> ad.AnnData:
    adata = counts(n_rows, 20, seed=seed)
    adata.obsm["spatial"] = np.random.default_rng(seed).normal(size=(n_rows, 2)) * 100
    adata.obsp["graph"] = adata.X[:, :1] @ adata.X[:, :1].T
    return adata


def ordered(order: Any) -> zl.ConvertOptions:
    return zl.ConvertOptions(chunk_rows=1, shard_size=2048, order=order)


@pytest.fixture(scope="module")
def hilbert() -> Callable[..., np.ndarray]:
    names: dict[str, Any] = {}
    exec(fenced(doc("howto/neighbors"), "hilbert"), names)
    return names["hilbert"]


def test_neighbours_on_the_curve_are_neighbours_in_space(hilbert: Callable[..., np.ndarray]) -> None:
    side = 32
    grid = np.stack(np.meshgrid(*[np.arange(side)] * 2, indexing="ij"), axis=-1).reshape(-1, 2)
    for bits in (5, 16):
        places = hilbert(grid.astype(float), bits)
        assert len(set(places.tolist())) == len(grid)
        assert (np.abs(np.diff(grid[np.argsort(places)], axis=0)).sum(axis=1) == 1).all()
    assert hilbert(np.ones((3, 2))).tolist() == [0, 0, 0]


@pytest.mark.slow
def test_the_same_cells_in_another_order(tmp_path: Path, hilbert: Callable[..., np.ndarray]) -> None:
    adata = slide(200)
    adata.write_h5ad(tmp_path / "a.h5ad")
    rows = np.argsort(hilbert(adata.obsm["spatial"]))
    zl.convert(tmp_path / "a.h5ad", tmp_path / "a.zarr", options=ordered(rows), progress=False)
    stored = ad.read_zarr(tmp_path / "a.zarr")
    assert stored.obs["source_row"].tolist() == rows.tolist()
    assert stored.obs_names.tolist() == adata.obs_names[rows].tolist()
    np.testing.assert_array_equal(stored.X.toarray(), adata.X[rows].toarray())
    np.testing.assert_array_equal(stored.obsm["spatial"], adata.obsm["spatial"][rows])
    np.testing.assert_array_equal(stored.obsp["graph"].toarray(), adata.obsp["graph"][rows][:, rows].toarray())
    steps = np.linalg.norm(np.diff(stored.obsm["spatial"], axis=0), axis=1).mean()
    assert steps < np.linalg.norm(np.diff(adata.obsm["spatial"], axis=0), axis=1).mean() / 2
    assert zl.verify(tmp_path / "a.zarr", against=tmp_path / "a.h5ad", progress=False).ok


def test_over_several_sources_and_what_verify_finds(tmp_path: Path) -> None:
    slides = [slide(60, seed=1), slide(40, seed=2)]
    sources = [tmp_path / f"{number}.h5ad" for number in range(2)]
    for path, adata in zip(sources, slides, strict=True):
        adata.write_h5ad(path)
    rows = np.random.default_rng(3).permutation(100)
    zl.convert(sources, tmp_path / "a.zarr", options=ordered(rows.tolist()), progress=False)
    dataset = zl.open_dataset(tmp_path / "a.zarr")
    assert dataset.obs_column("source_row").values.tolist() == rows.tolist()
    x = scipy.sparse.vstack([adata.X for adata in slides]).tocsr()[rows].toarray()
    np.testing.assert_array_equal(dataset.take(range(100)).X.toarray(), x)
    assert zl.verify(tmp_path / "a.zarr", against=sources, progress=False).ok
    stored = zarr.open_array(tmp_path / "a.zarr" / "obs" / "source_row")
    for change, words in [((rows[1], rows[0]), "2 rows differ"), ((rows[0], rows[0]), "order must have each row once")]:
        stored[:2] = change
        problems = zl.verify(tmp_path / "a.zarr", against=sources, progress=False).problems
        assert any(words in problem.what for problem in problems), problems


def test_it_can_be_resumed_only_in_the_same_order(tmp_path: Path) -> None:
    slide(80).write_h5ad(tmp_path / "a.h5ad")
    rows = np.arange(80)[::-1]

    def convert(options: zl.ConvertOptions) -> bool:
        report = zl.convert(tmp_path / "a.h5ad", tmp_path / "a.zarr", options=options, resume=True, progress=False)
        return report.already_complete

    assert not convert(ordered(rows))
    assert convert(ordered(list(rows)))
    for other in (zl.ConvertOptions(chunk_rows=1, shard_size=2048), ordered(np.roll(rows, 1))):
        with pytest.raises((StoreError, StoreExistsError), match="made by another conversion: options differ"):
            convert(other)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("hilbert:spatial", "order must be a list of row numbers, not 'hilbert:spatial'"),
        (3, "must be a list of row numbers"),
        ([0.0, 1.0], "must be a list of row numbers"),
        ([True, False], "must be a list of row numbers"),
        (np.eye(2, dtype=int), "must be a list of row numbers"),
        ([0, 2, 2], "from 0 to 2, but row 1 comes 0 times"),
        ([0, -1, 1], "from 0 to 2, but row 2 comes 0 times"),
        ([0, 1, 9], "row 2 comes 0 times"),
    ],
)
def test_unknown_orders_are_refused(order: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        zl.ConvertOptions(order=order)


def test_what_cannot_be_ordered(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="give shuffle_seed or order"):
        zl.ConvertOptions(order=[0, 1], shuffle_seed=1)
    adata = slide(30)
    with pytest.raises(OptionError, match="order has 20 row numbers, but the sources have 30 rows"):
        zl.convert(adata, tmp_path / "a.zarr", options=ordered(range(20)), progress=False)
    adata.obs["source_row"] = 1
    with pytest.raises(OptionError, match="already has a column 'source_row'"):
        zl.convert(adata, tmp_path / "a.zarr", options=ordered(range(30)), progress=False)
    assert not (tmp_path / "a.zarr").exists()
    empty = adata[:0, :].copy()
    del empty.obs["source_row"]
    zl.convert(empty, tmp_path / "a.zarr", options=ordered([]), progress=False)
    assert zl.open_dataset(tmp_path / "a.zarr").n_obs == 0
