"""obsm arrays are aligned with x row by row and keep their values, from one store and from several."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import zarr
from helpers import check_minibatch, counts, dense, write_store
from torch.utils.data import DataLoader

import zloader as zl
from zloader.common.errors import FormatError, MissingColumnError, MissingObjectError, OptionError
from zloader.common.records import MinibatchArrays

SIZES = {"batch_size": 16, "fetch_factor": 3, "sampling": zl.BlockShuffling(4)}


def embedded(n_rows: int, *, width: int = 6, dtype: str = "float32", seed: int = 0) -> ad.AnnData:
    """Counts with obsm arrays of several dtypes. The last array has three dimensions."""
    adata = counts(n_rows, 31, seed=seed)
    rng = np.random.default_rng(seed)
    adata.obsm["X_pca"] = rng.standard_normal((n_rows, width)).astype(dtype)
    adata.obsm["spatial"] = rng.integers(-1000, 1000, (n_rows, 2)).astype("int32")
    adata.obsm["one"] = rng.random((n_rows, 1))
    adata.obsm["flags"] = rng.random((n_rows, 3)) < 0.5
    adata.obsm["image"] = rng.integers(0, 256, (n_rows, 4, 5)).astype("uint8")
    return adata


ADATA = embedded(150)
NAMES = ["X_pca", "flags", "image", "one", "spatial"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    write_store(ADATA, folder / "counts.zarr", folder)
    return folder / "counts.zarr"


def check_epoch(loader, wanted: ad.AnnData) -> None:
    seen = []
    for minibatch in loader:
        rows = minibatch.index.numpy()
        seen += check_minibatch(minibatch, wanted).tolist()
        assert list(minibatch.obsm) == list(loader.obsm)
        for name, array in minibatch.obsm.items():
            np.testing.assert_array_equal(array.numpy(), wanted.obsm[name][rows])
            assert array.numpy().dtype == wanted.obsm[name].dtype
    assert sorted(seen) == list(range(wanted.n_obs))


@pytest.mark.parametrize("layout", ["csr", "dense", "scipy"])
def test_every_row_has_its_own(store, layout):
    check_epoch(zl.Loader(zl.open_dataset(store), obsm=NAMES, obs=["lane"], layout=layout, **SIZES), ADATA)


def test_alone_and_from_a_mirror(store, tmp_path):
    dataset = zl.open_dataset(store, cache=tmp_path / "cache")
    assert dataset.obsm_names == NAMES
    for _ in range(2):
        check_epoch(zl.Loader(dataset, x=None, obsm=["X_pca"], **SIZES), ADATA)
        check_epoch(zl.Loader(dataset, obsm=["X_pca"], **SIZES), ADATA)


def test_take_carries_it(store):
    rows = [5, 3, 99, 3]
    taken = zl.open_dataset(store).take(rows)
    assert sorted(taken.obsm) == NAMES
    for name in NAMES:
        np.testing.assert_array_equal(taken.obsm[name], ADATA.obsm[name][rows])


@pytest.mark.slow
def test_ranks_and_a_worker_process(store):
    dataset = zl.open_dataset(store)[:, ["gene 4", "gene 2"]]
    options = {"obsm": ["X_pca"], "world_size": 2}
    for rank in range(2):
        loader = zl.Loader(dataset, rank=rank, **options, **SIZES)
        wanted = list(loader)
        for minibatch in wanted:
            rows = minibatch.index.numpy()
            np.testing.assert_array_equal(dense(minibatch.x), ADATA.X[rows][:, [4, 2]].toarray())
            np.testing.assert_array_equal(minibatch.obsm["X_pca"].numpy(), ADATA.obsm["X_pca"][rows])
    loader.set_epoch(0)
    worker = DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    for found, expected in zip(worker, wanted, strict=True):
        assert found.index.tolist() == expected.index.tolist()
        assert dense(found.x).tolist() == dense(expected.x).tolist()
        assert found.obsm["X_pca"].tolist() == expected.obsm["X_pca"].tolist()


def test_a_minibatch_moves_as_a_whole(store):
    minibatch = next(iter(zl.Loader(zl.open_dataset(store), obsm=NAMES, obs=["lane"], layout="dense", **SIZES)))
    moved = minibatch.to("meta")
    assert {tensor.device.type for tensor in (moved.x, moved.index, *moved.obs.values(), *moved.obsm.values())} == {
        "meta"
    }
    assert list(moved.obsm) == NAMES


def test_its_bytes_are_counted():
    index, array = np.arange(3), np.zeros((3, 5), np.float32)
    assert MinibatchArrays(x={}, obs={"a": index}, obsm={"b": array}, index=index).nbytes == 24 + 24 + 60


# ------------------------------------------------------------------------------------------------ several stores


def write_all(adatas, folder: Path) -> list[Path]:
    urls = [folder / f"{number}.zarr" for number in range(len(adatas))]
    for adata, url in zip(adatas, urls, strict=True):
        write_store(adata, url, folder)
    return urls


@pytest.mark.slow
def test_stores_promote_their_dtypes(tmp_path):
    adatas = [embedded(40, seed=0), embedded(1, dtype="float64", seed=1), embedded(30, dtype="float16", seed=2)]
    for number, adata in enumerate(adatas):
        adata.obs_names = [f"{number} {name}" for name in adata.obs_names]
    dataset = zl.open_dataset(write_all(adatas, tmp_path))
    both = ad.concat(adatas)
    both.obsm["X_pca"] = np.concatenate([adata.obsm["X_pca"] for adata in adatas])
    assert both.obsm["X_pca"].dtype == np.float64
    check_epoch(zl.Loader(dataset, obsm=NAMES, **SIZES), both)
    np.testing.assert_array_equal(dataset.take([69, 40, 41]).obsm["X_pca"], both.obsm["X_pca"][[69, 40, 41]])


def test_stores_that_differ_are_refused_where_that_matters(tmp_path):
    first, second = embedded(20), embedded(20, width=7)
    del second.obsm["one"]
    urls = write_all([first, second], tmp_path)
    dataset = zl.open_dataset(urls)
    assert dataset.obsm_names == ["X_pca", "flags", "image", "spatial"]
    with pytest.raises(FormatError, match=rf"'X_pca' has 6 dims in .*{urls[0]}, but 7 in .*{urls[1]}: leave it out"):
        zl.Loader(dataset, obsm=["X_pca"])
    with pytest.raises(MissingColumnError, match=rf"no obsm 'one' in .*{urls[1]}; there are: 'X_pca', 'flags'"):
        zl.Loader(dataset, obsm=["one"])
    assert sorted(dataset.take([0, 30]).obsm) == ["flags", "image", "spatial"]


# ------------------------------------------------------------------------------------------------ errors


def test_names_that_are_not_there(store, tmp_path):
    dataset = zl.open_dataset(store)
    with pytest.raises(MissingColumnError, match=r"no obsm 'X_umap' in .*; there are: 'X_pca', 'flags', "):
        zl.Loader(dataset, obsm=["X_umap"])
    with pytest.raises(MissingColumnError, match="X_umap"):
        dataset.obsm_array("X_umap")
    with pytest.raises(OptionError, match=r"write obsm=\['X_pca'\]"):
        zl.Loader(dataset, obsm="X_pca")
    write_store(counts(9, 5), tmp_path / "none.zarr", tmp_path)
    bare = zl.open_dataset(tmp_path / "none.zarr")
    assert bare.obsm_names == []
    with pytest.raises(MissingColumnError, match="there are: none"):
        zl.Loader(bare, obsm=["X_pca"])


def test_what_is_no_array_of_numbers(tmp_path):
    adata = embedded(20)
    adata.obsm["frame"] = pd.DataFrame({"a": range(20)}, index=adata.obs_names)
    adata.obsm["sparse"] = scipy.sparse.random(20, 4, 0.5, "csr", random_state=0)
    adata.obsm["words"] = np.array([["a", "b"]] * 20, dtype=object)
    write_store(adata, tmp_path / "s.zarr", tmp_path)
    dataset = zl.open_dataset(tmp_path / "s.zarr")
    for name, kind in (("frame", "dataframe"), ("sparse", "csr_matrix"), ("words", "array of ")):
        assert name in dataset.obsm_names
        with pytest.raises(OptionError, match=f"obsm '{name}' is a {kind}.*only arrays of numbers become tensors"):
            zl.Loader(dataset, obsm=[name])
        with pytest.raises(OptionError, match=name):
            dataset.obsm_array(name)
    assert sorted(dataset.take([3, 2]).obsm) == NAMES


def test_damage_is_found(store, tmp_path):
    copy = shutil.copytree(store, tmp_path / "copy.zarr")
    (copy / "obsm" / "X_pca" / "c" / "0" / "0").unlink()
    loader = zl.Loader(zl.open_dataset(copy), obsm=["X_pca"], **SIZES)
    with pytest.raises(MissingObjectError, match="obsm/X_pca/c/0/0 is missing"):
        list(loader)
    other = shutil.copytree(store, tmp_path / "other.zarr")
    root = zarr.open_group(other, mode="a", use_consolidated=False)
    root["obsm"].create_array("short", data=np.zeros((7, 2)), attributes={"encoding-type": "array"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr warns about consolidated metadata
        zarr.consolidate_metadata(root.store, zarr_format=3)
    with pytest.raises(FormatError, match=r"'short' of .* has shape \(7, 2\) for 150 rows"):
        zl.Loader(zl.open_dataset(other), obsm=["short"])


def test_either_byte_order(tmp_path):
    adata = counts(20, 5)
    root = zarr.open_group(tmp_path / "v2.zarr", mode="w", zarr_format=2)
    ad.io.write_elem(root, "/", adata)
    wanted = np.arange(40, dtype=">f4").reshape(20, 2)
    root["obsm"].create_array("big", data=wanted, attributes={"encoding-type": "array", "encoding-version": "0.2.0"})
    del root["obs"]["lane"]
    lane = adata.obs["lane"].to_numpy(">i4")
    root["obs"].create_array("lane", data=lane, attributes={"encoding-type": "array", "encoding-version": "0.2.0"})
    for minibatch in zl.Loader(zl.open_dataset(tmp_path / "v2.zarr"), obsm=["big"], obs=["lane"], **SIZES):
        check_minibatch(minibatch, adata)
        np.testing.assert_array_equal(minibatch.obsm["big"].numpy(), wanted[minibatch.index.numpy()])
