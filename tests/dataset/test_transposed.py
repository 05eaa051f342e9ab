"""CSC matrices that are transposed in memory, wherever a store has one, against anndata and converted stores."""

from __future__ import annotations

import logging
import pickle
import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from helpers import assert_same_minibatches, counts
from torch.utils.data import DataLoader
from typer.testing import CliRunner

import zloader as zl
from zloader.commands.cli import app
from zloader.common import options
from zloader.common.errors import FormatError
from zloader.insight.summary import summarize

LOADER: dict[str, Any] = {"batch_size": 16, "fetch_factor": 4, "sampling": zl.BlockShuffling(7), "obs": ["cell_type"]}


def columns(n_rows: int = 300, n_genes: int = 120, seed: int = 3) -> ad.AnnData:
    """Cells whose X, layer and raw are CSC, beside a CSR layer."""
    adata = counts(n_rows, n_genes, seed=seed)
    adata.raw = adata.copy()
    adata.raw._X = adata.raw.X.tocsc()
    adata.layers["rows"] = counts(n_rows, n_genes, seed=seed + 1).X
    adata.layers["columns"] = counts(n_rows, n_genes, seed=seed + 2).X.tocsc()
    adata.X = adata.X.tocsc()
    return adata


def write(adata: ad.AnnData, path: Path, zarr_format: int = 3) -> Path:
    if path.suffix == ".h5ad":
        adata.write_h5ad(path)
        return path
    with ad.settings.override(zarr_write_format=zarr_format), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adata.write_zarr(path)
    return path


def dense(x: Any) -> Any:
    return x.toarray() if sp.issparse(x) else np.asarray(x)


def assert_rows(path: Any, wanted: Any, *, x: str = "X", **opened: Any) -> None:
    dataset = zl.open_dataset(path, **opened)
    loader = zl.Loader(dataset, batch_size=16, x=x, layout="dense", framework="numpy", dtype="float64")
    seen = []
    for minibatch in loader:
        np.testing.assert_array_equal(minibatch.x, dense(wanted)[minibatch.index])
        seen.extend(minibatch.index.tolist())
    assert sorted(seen) == list(range(len(dataset)))


@pytest.mark.parametrize(("name", "zarr_format"), [("a.h5ad", 0), ("a.zarr", 2), ("a.zarr", 3)])
def test_every_place(tmp_path: Path, name: str, zarr_format: int, caplog: pytest.LogCaptureFixture) -> None:
    path = write(columns(), tmp_path / name, zarr_format)
    stored = (ad.read_h5ad if name == "a.h5ad" else ad.read_zarr)(path)
    assert stored.X.format == stored.raw.X.format == stored.layers["columns"].format == "csc"
    dataset = zl.open_dataset(path)
    assert not caplog.records  # nothing is transposed yet
    wanted = {"X": stored.X, "raw/X": stored.raw.X, "layers/rows": stored.layers["rows"]}
    wanted["layers/columns"] = stored.layers["columns"]
    for minibatch in zl.Loader(dataset, x=list(wanted), batch_size=16, layout="dense"):
        for x, matrix in wanted.items():
            np.testing.assert_array_equal(minibatch.x[x], dense(matrix)[minibatch.index])
    said = [record.getMessage() for record in caplog.records if "stored by columns" in record.getMessage()]
    assert len(said) == 3
    assert "zloader convert" in said[0]
    view = dataset.where("cell_type == 'a'")
    np.testing.assert_array_equal(dense(view.to_adata().X), dense(stored[(stored.obs.cell_type == "a").values].X))
    genes = [7, 3, 90]
    np.testing.assert_array_equal(dense(dataset[:, genes].take([5, 2]).X), dense(stored.X)[[5, 2]][:, genes])


def test_order_and_states_are_those_of_the_converted_store(tmp_path: Path) -> None:
    path = write(columns(), tmp_path / "a.h5ad")
    zl.convert(path, tmp_path / "a.zarr", progress=False)
    loaders = [zl.Loader(zl.open_dataset(each), **LOADER) for each in (path, tmp_path / "a.zarr")]
    for _ in range(2):
        assert_same_minibatches(*(list(loader) for loader in loaders))
    states = [loader.state_dict() for loader in loaders]
    del states[0]["fingerprint"], states[1]["fingerprint"]
    assert states[0] == states[1]
    assert zl.verify(tmp_path / "a.zarr", against=path).ok


@pytest.mark.parametrize("form", ["raw", "compact"])
def test_a_mirror_saves_transposing_again(tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture) -> None:
    adata = columns()
    cache = zl.Cache(tmp_path / "cache", form=form)
    path = write(adata, tmp_path / "a.h5ad")
    zl.warm(zl.open_dataset(path, cache=cache))
    assert "stored by columns" in caplog.text
    caplog.clear()
    for more in ({}, {"offline": True}):
        assert_rows(path, adata.X, cache=cache, **more)
    assert "stored by columns" not in caplog.text


def test_beside_rows_of_other_files(tmp_path: Path) -> None:
    first, second = columns(), counts(100, 90, seed=9)
    paths = [write(first, tmp_path / "a.h5ad"), write(second, tmp_path / "b.zarr")]
    genes = first.var_names.intersection(second.var_names)
    wanted = sp.vstack([first[:, genes].X, second[:, genes].X])
    dataset = zl.open_dataset(paths, join="inner")
    assert list(dataset.var_names) == list(genes)
    for minibatch in zl.Loader(dataset, batch_size=16, layout="dense", transforms=[zl.transforms.Clip(0, 2)]):
        np.testing.assert_array_equal(minibatch.x, dense(wanted)[minibatch.index].clip(0, 2))


def test_workers_and_pickles(tmp_path: Path) -> None:
    adata = columns()
    path = write(adata, tmp_path / "a.h5ad")
    dataset = pickle.loads(pickle.dumps(zl.open_dataset(path)))
    loader = zl.Loader(dataset, **LOADER)
    worker = DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert_same_minibatches(list(worker), zl.Loader(dataset, **LOADER))


@pytest.mark.parametrize("dtype", ["f2", "f8", "u1", "i8", "bool", ">f4"])
@pytest.mark.parametrize("index", ["i4", "i8", "u2"])
def test_any_dtype(tmp_path: Path, dtype: str, index: str) -> None:
    """Repeated, unsorted and explicit zero entries, and arrays that go on after the last column."""
    x = sp.csc_matrix(np.array([[0, 2, 0, 0], [1, 0, 0, 3], [0, 5, 0, 0]], "f4"))
    parts = {"data": [2, 1, 0, 1, 1, 9], "indices": [1, 0, 1, 1, 2, 0], "indptr": [0, 3, 3, 5, 5]}
    write(ad.AnnData(x), tmp_path / "a.h5ad")
    with h5py.File(tmp_path / "a.h5ad", "r+") as file:
        for name, values in parts.items():
            del file[f"X/{name}"]
            file[f"X/{name}"] = np.array(values, dtype if name == "data" else index)
    stored = np.array(parts["data"], dtype).astype("f8")
    wanted = np.zeros((3, 4))
    for column in range(4):
        for at in range(parts["indptr"][column], parts["indptr"][column + 1]):
            wanted[parts["indices"][at], column] += stored[at]
    assert_rows(tmp_path / "a.h5ad", wanted)


@pytest.mark.parametrize("shape", [(5, 4), (0, 4), (5, 0)])
@pytest.mark.parametrize("name", ["a.h5ad", "a.zarr"])
def test_empty(tmp_path: Path, shape: tuple[int, int], name: str) -> None:
    path = write(ad.AnnData(sp.csc_matrix(shape, dtype="f4")), tmp_path / name)
    dataset = zl.open_dataset(path)
    assert dataset.shape == shape
    np.testing.assert_array_equal(dense(dataset.to_adata().X), np.zeros(shape))


@pytest.mark.parametrize(
    ("part", "at", "value"), [("indices", 3, 300), ("indices", 3, -1), ("indptr", 4, 10**6), ("indptr", 4, 0)]
)
def test_damage_is_named(tmp_path: Path, part: str, at: int, value: int) -> None:
    path = write(columns(), tmp_path / "a.zarr")
    zarr.open_group(path, mode="r+")["X"][part][at] = value
    with pytest.raises(FormatError, match=r"cannot read X of \S+a\.zarr"):
        list(zl.Loader(zl.open_dataset(path), batch_size=8))


def test_text_is_refused(tmp_path: Path) -> None:
    path = write(columns(), tmp_path / "a.h5ad")
    with h5py.File(path, "r+") as file:
        n = len(file["X/data"])
        del file["X/data"]
        file["X/data"] = np.full(n, "a", object)
    with pytest.raises(FormatError, match="not real numbers"):
        zl.Loader(zl.open_dataset(path))


def test_more_than_a_quarter_of_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All stores count together, and the command of the error works."""
    monkeypatch.setattr(options, "available_bytes", lambda: 128 << 20)  # a quarter of 16 MiB is left
    x = sp.random(1000, 300, 0.4, "csc", "f4", random_state=0)
    paths = [write(ad.AnnData(x), tmp_path / f"{name}.h5ad") for name in "ab"]
    zl.Loader(zl.open_dataset(paths[0]))
    refused = r"X of \S+a\.h5ad is a csc_matrix.* takes 4\.8 MB of memory.* is 4\.2 MB\. Convert it once: (.*) \(in"
    dataset = zl.open_dataset(paths)
    with pytest.raises(FormatError, match=refused) as error:
        zl.Loader(dataset)
    assert "4.2 MB" in str(summarize(dataset).matrices[0].problem)
    command = str(error.value).partition("Convert it once: zloader ")[2].partition(" (in Python")[0]
    done = CliRunner().invoke(app, command.split())
    assert not done.exit_code, done.output
    assert_rows([tmp_path / "a.zarr", paths[1]], sp.vstack([x, x]))


def test_info_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(columns(), tmp_path / "a.h5ad")
    with caplog.at_level(logging.WARNING):
        done = CliRunner().invoke(app, ["info", str(path)])
    assert not done.exit_code
    assert "transposed in memory when it is first used" in " ".join(done.stdout.split())
    assert not caplog.records


def test_the_example_opens_in_place(tmp_path: Path) -> None:
    path = zl.example_h5ad(tmp_path / "pancreas.h5ad")
    wanted = ad.read_h5ad(path)
    assert wanted.X.format == "csc"
    rows = [2000, 3, 77]
    np.testing.assert_array_equal(dense(zl.open_dataset(path).take(rows).X), dense(wanted.X[rows]))
