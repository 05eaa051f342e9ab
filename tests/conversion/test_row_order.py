"""Rows stored along a Hilbert curve: the same cells as in the source, near each other, and what cannot be ordered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
from helpers import SMALL, counts
from typer.testing import CliRunner

import zloader as zl
from zloader.commands.cli import app
from zloader.common.errors import OptionError, SourceError, StoreError
from zloader.conversion.joining.row_order import on_curve

HILBERT = zl.ConvertOptions(chunk_rows=1, shard_size=2048, order="hilbert:spatial")


def slide(n_rows: int, seed: int = 0, n_axes: int = 2) -> ad.AnnData:
    adata = counts(n_rows, 20, seed=seed)
    adata.obsm["spatial"] = np.random.default_rng(seed).normal(size=(n_rows, n_axes)) * 100
    adata.obsp["graph"] = adata.X[:, :1] @ adata.X[:, :1].T
    return adata


@pytest.mark.parametrize(("n_axes", "side"), [(2, 16), (3, 8), (4, 4)])
def test_neighbours_on_the_curve_are_neighbours_in_space(n_axes: int, side: int) -> None:
    grid = np.stack(np.meshgrid(*[np.arange(side)] * n_axes, indexing="ij"), axis=-1).reshape(-1, n_axes)
    places = on_curve(grid.astype(float))
    assert len(set(places.tolist())) == len(grid)
    assert (np.abs(np.diff(grid[np.argsort(places)], axis=0)).sum(axis=1) == 1).all()


def test_points_at_one_place_and_none_at_all() -> None:
    assert on_curve(np.ones((3, 2))).tolist() == [0, 0, 0]
    assert on_curve(np.ones((0, 2))).tolist() == []


@pytest.mark.slow
@pytest.mark.parametrize("n_axes", [2, 3])
def test_the_same_cells_in_another_order(tmp_path: Path, n_axes: int) -> None:
    adata = slide(200, n_axes=n_axes)
    adata.write_h5ad(tmp_path / "a.h5ad")
    zl.convert(tmp_path / "a.h5ad", tmp_path / "a.zarr", options=HILBERT, progress=False)
    stored = ad.read_zarr(tmp_path / "a.zarr")
    rows = stored.obs["source_row"].to_numpy()
    assert sorted(rows) == list(range(200))
    assert rows.tolist() == np.argsort(on_curve(adata.obsm["spatial"]), kind="stable").tolist()
    assert stored.obs_names.tolist() == adata.obs_names[rows].tolist()
    np.testing.assert_array_equal(stored.X.toarray(), adata.X[rows].toarray())
    np.testing.assert_array_equal(stored.obsm["spatial"], adata.obsm["spatial"][rows])
    np.testing.assert_array_equal(stored.obsp["graph"].toarray(), adata.obsp["graph"][rows][:, rows].toarray())
    steps = np.linalg.norm(np.diff(stored.obsm["spatial"], axis=0), axis=1).mean()
    assert steps < np.linalg.norm(np.diff(adata.obsm["spatial"], axis=0), axis=1).mean() / 2
    assert zl.verify(tmp_path / "a.zarr", against=tmp_path / "a.h5ad", progress=False).ok


def test_each_source_keeps_its_place(tmp_path: Path) -> None:
    sources = [slide(60, seed=1), slide(40, seed=2)]
    zl.convert(sources, tmp_path / "a.zarr", options=HILBERT, progress=False)
    rows = zl.open_dataset(tmp_path / "a.zarr").obs_column("source_row").values
    assert set(rows[:60]) == set(range(60))
    wanted = [np.argsort(on_curve(source.obsm["spatial"]), kind="stable") for source in sources]
    assert rows.tolist() == [*wanted[0], *(60 + wanted[1])]


def test_on_the_command_line_and_resumed(tmp_path: Path) -> None:
    slide(80).write_h5ad(tmp_path / "a.h5ad")
    flags = [str(tmp_path / "a.h5ad"), str(tmp_path / "a.zarr"), "--order", "hilbert:spatial"]
    assert CliRunner().invoke(app, ["convert", *flags]).exit_code == 0
    again = CliRunner().invoke(app, ["convert", *flags, "--resume"])
    assert "already complete" in again.output, again.output
    plain = CliRunner().invoke(app, ["convert", *flags[:2], "--resume"])
    assert plain.exit_code
    assert "made by another conversion: options differ" in " ".join(plain.output.split())


def test_append_is_refused(tmp_path: Path) -> None:
    zl.convert(slide(30), tmp_path / "a.zarr", options=HILBERT, progress=False)
    with pytest.raises(StoreError, match="lie along a curve"):
        zl.append(tmp_path / "a.zarr", slide(5), progress=False)


def _missing(adata: ad.AnnData) -> None:
    adata.obsm["spatial"][7, 1] = np.nan


def _flat(adata: ad.AnnData) -> None:
    adata.obsm["spatial"] = adata.obsm["spatial"][:, :1]


def _absent(adata: ad.AnnData) -> None:
    adata.obsm["place"] = adata.obsm.pop("spatial")


def _taken(adata: ad.AnnData) -> None:
    adata.obs["source_row"] = 1


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (_missing, SourceError, "obsm/spatial is .*nan.* in row 7"),
        (_flat, SourceError, r"\(30, 1\): a curve needs from 2"),
        (_absent, OptionError, "not every source has obsm 'spatial'; all of them have: .*place"),
        (_taken, OptionError, "already has a column 'source_row'"),
    ],
)
def test_what_cannot_be_ordered(tmp_path: Path, change: Any, error: type[Exception], says: str) -> None:
    adata = slide(30)
    change(adata)
    with pytest.raises(error, match=says):
        zl.convert(adata, tmp_path / "a.zarr", options=HILBERT, progress=False)
    assert not (tmp_path / "a.zarr").exists()


@pytest.mark.parametrize("order", ["", "hilbert", "hilbert:", "spatial", 3])
def test_unknown_orders_are_refused(order: Any) -> None:
    with pytest.raises(OptionError, match="order must be 'hilbert:NAME'"):
        zl.ConvertOptions(order=order)
    with pytest.raises(OptionError, match="give shuffle_seed or order"):
        zl.ConvertOptions(order="hilbert:spatial", shuffle_seed=1)


def test_sources_whose_coordinates_differ_in_number(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="spatial"):
        zl.convert([slide(9), slide(9, n_axes=3)], tmp_path / "a.zarr", options=HILBERT, progress=False)
    assert SMALL.order is None
