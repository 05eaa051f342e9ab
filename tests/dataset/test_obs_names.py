"""obs names: of every encoding, from every place, of datasets, views, rows and minibatches."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import zarr
from helpers import counts, write_store

import zloader as zl
from zloader.common.errors import FormatError

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have a Zarr V3 specification")

N_ROWS, N_GENES = 60, 9
CHUNK_ROWS = 8
SIZES: dict[str, Any] = {"batch_size": 7, "fetch_factor": 2, "sampling": zl.BlockShuffling(3)}
NAMES = [f"cell-{row}" for row in range(N_ROWS)]
NAMES[3], NAMES[30], NAMES[59] = "Zelle Ä 3", "", "細胞"
ADATA = counts(N_ROWS, N_GENES)
ADATA.obs_names = NAMES


def plain(obs: zarr.Group) -> None:
    array = obs.create_array("_index", shape=(N_ROWS,), chunks=(CHUNK_ROWS,), dtype="str")
    array[:] = np.array(NAMES, object)
    array.attrs.update({"encoding-type": "string-array", "encoding-version": "0.2.0"})


def sharded(obs: zarr.Group) -> None:
    obs.create_array("_index", shape=(N_ROWS,), chunks=(CHUNK_ROWS,), shards=(4 * CHUNK_ROWS,), dtype="str")
    obs["_index"][:] = np.array(NAMES, object)


def fixed_width(obs: zarr.Group) -> None:
    obs.create_array("_index", data=np.array(NAMES), chunks=(CHUNK_ROWS,))


def categorical(obs: zarr.Group) -> None:
    ad.io.write_elem(obs, "_index", pd.Categorical(NAMES), dataset_kwargs={"chunks": (CHUNK_ROWS,)})


def nullable(obs: zarr.Group) -> None:
    with ad.settings.override(allow_write_nullable_strings=True):
        ad.io.write_elem(obs, "_index", pd.array(NAMES, dtype="string"), dataset_kwargs={"chunks": (CHUNK_ROWS,)})


ENCODINGS = {
    "string-array": (3, plain),
    "string-array, v2": (2, plain),
    "string-array, sharded": (3, sharded),
    "fixed width": (3, fixed_width),
    "fixed width, v2": (2, fixed_width),
    "categorical": (3, categorical),
    "categorical, v2": (2, categorical),
    "nullable": (3, nullable),
    "nullable, v2": (2, nullable),
}


def store_with(dest: Path, write: Callable[[zarr.Group], None], zarr_format: int = 3) -> Path:
    """A store written by anndata, with its obs names replaced."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr and anndata warn about formats
        with ad.settings.override(zarr_write_format=zarr_format):
            ADATA.write_zarr(dest)
        root = zarr.open_group(dest, mode="r+", use_consolidated=False)
        del root["obs/_index"]
        write(root["obs"])
        zarr.consolidate_metadata(dest)
    return dest


def check(dataset: zl.Dataset, wanted: pd.Index) -> None:
    """Every way to see obs names, against those of an AnnData of the same rows."""
    assert dataset.obs_names.tolist() == wanted.tolist()
    assert isinstance(dataset.obs_names, pd.Index)
    assert all(isinstance(name, str) for name in dataset.obs_names)
    some = [len(wanted) - 1, 3, 0, 3]
    assert dataset.take(some).obs_names.tolist() == wanted[some].tolist()
    assert dataset[2:7].obs_names.tolist() == wanted[2:7].tolist()
    seen = 0
    for minibatch in zl.Loader(dataset, x=None, **SIZES):
        names = dataset.names_of(minibatch.row)
        assert names.tolist() == wanted[minibatch.row.numpy()].tolist()
        assert names.tolist() == dataset.whole.names_of(minibatch.index).tolist()
        assert {type(name) for name in names} == {str}
        seen += len(minibatch)
    assert seen == len(wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("zarr_format", "write"), ENCODINGS.values(), ids=ENCODINGS)
@pytest.mark.parametrize("mirrored", [False, True], ids=["", "mirror"])
def test_names_of_every_encoding(
    tmp_path: Path, zarr_format: int, write: Callable[[zarr.Group], None], mirrored: bool
) -> None:
    store = store_with(tmp_path / "a.zarr", write, zarr_format)
    for _ in range(1 + mirrored):  # read, then mapped
        dataset = zl.open_dataset(store, cache=tmp_path / "cache" if mirrored else None)
        check(dataset, ADATA.obs_names)
        passed = dataset.obs()["passed"].to_numpy()
        check(dataset.where(passed), ADATA.obs_names[passed])


@pytest.mark.slow
def test_names_that_are_numbers_or_missing_become_text(tmp_path: Path) -> None:
    numbers = store_with(tmp_path / "a.zarr", lambda obs: ad.io.write_elem(obs, "_index", np.arange(N_ROWS)))
    assert zl.open_dataset(numbers).obs_names.tolist() == [str(row) for row in range(N_ROWS)]
    codes = pd.Categorical.from_codes([-1, *range(N_ROWS - 1)], NAMES)
    missing = store_with(tmp_path / "b.zarr", lambda obs: ad.io.write_elem(obs, "_index", codes))
    assert zl.open_dataset(missing).obs_names.tolist() == ["nan", *NAMES[:-1]]
    masked = pd.array([pd.NA, *NAMES[1:]], dtype="string")
    with ad.settings.override(allow_write_nullable_strings=True):
        missing = store_with(tmp_path / "c.zarr", lambda obs: ad.io.write_elem(obs, "_index", masked))
    assert zl.open_dataset(missing).obs_names.tolist() == ["nan", *NAMES[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("mirrored", [False, True], ids=["", "mirror"])
def test_names_of_several_stores_on_s3(s3: Any, tmp_path: Path, mirrored: bool) -> None:
    parts = [ADATA[:20].copy(), ADATA[20:21].copy(), ADATA[21:].copy()]
    urls = [s3.url(f"{number}.zarr") for number in range(3)]
    for url, part in zip(urls, parts, strict=True):
        write_store(part, url, tmp_path, storage_options=s3.storage_options)
    cache = tmp_path / "cache" if mirrored else None
    dataset = zl.open_dataset(urls, storage_options=s3.storage_options, cache=cache)
    check(dataset, ADATA.obs_names)
    check(dataset[::3], ADATA.obs_names[::3])


def test_names_from_the_cache_alone(tmp_path: Path) -> None:
    write_store(ADATA, tmp_path / "a.zarr", tmp_path)
    zl.warm(zl.open_dataset(tmp_path / "a.zarr", cache=tmp_path / "cache"))
    (tmp_path / "a.zarr").rename(tmp_path / "gone.zarr")
    check(zl.open_dataset(tmp_path / "a.zarr", cache=tmp_path / "cache", offline=True), ADATA.obs_names)


def test_only_the_chunks_of_the_rows_are_read(tmp_path: Path) -> None:
    store = store_with(tmp_path / "a.zarr", plain)
    dataset = zl.open_dataset(store, cache=tmp_path / "cache")

    def chunks() -> list[int]:
        return [number for number in range(8) if list(tmp_path.glob(f"cache/*/*obs%2F_index%2Fc%2F{number}*"))]

    assert dataset.take([59, 17, 20]).obs_names.tolist() == [NAMES[59], NAMES[17], NAMES[20]]
    assert chunks() == [2, 7]
    assert dataset[:3].obs_names.tolist() == NAMES[:3]
    assert chunks() == [0, 2, 7]


@pytest.mark.every(2)
@pytest.mark.parametrize("seed", range(3))
def test_names_of_rows_in_any_order_and_with_repeats(tmp_path: Path, seed: int) -> None:
    dataset = zl.open_dataset(store_with(tmp_path / "a.zarr", plain))
    rows = np.random.default_rng(seed).integers(0, N_ROWS, 100)
    assert dataset.names_of(rows).tolist() == [NAMES[row] for row in rows]
    assert dataset.names_of(rows[:0]).tolist() == []


def _codes_beyond(root: zarr.Group) -> None:
    root["obs/_index/codes"][5] = N_ROWS


def _codes_below(root: zarr.Group) -> None:
    root["obs/_index/codes"][5] = -2


def _short_mask(root: zarr.Group) -> None:
    del root["obs/_index/mask"]
    root["obs/_index"].create_array("mask", data=np.zeros(5, bool))


def _no_mask(root: zarr.Group) -> None:
    del root["obs/_index/mask"]


DAMAGES = {
    "codes beyond": (categorical, _codes_beyond),
    "codes below": (categorical, _codes_below),
    "short mask": (nullable, _short_mask),
    "no mask": (nullable, _no_mask),
}


@pytest.mark.every(4)
@pytest.mark.parametrize(("write", "damage"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_names_are_refused(tmp_path: Path, write: Callable[..., None], damage: Callable[..., None]) -> None:
    store = store_with(tmp_path / "a.zarr", write)
    damage(zarr.open_group(store, mode="r+", use_consolidated=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr warns about consolidated metadata
        zarr.consolidate_metadata(store)
    dataset = zl.open_dataset(store)
    with pytest.raises(FormatError, match=r"obs/_index"):
        _ = dataset.obs_names
    with pytest.raises(FormatError, match=r"obs/_index"):
        dataset.take([5])


@pytest.mark.slow
@pytest.mark.parametrize("warmed", [False, True])
def test_the_frame_of_a_categorical_index_is_available_offline(tmp_path, warmed):
    path = store_with(tmp_path / "a.zarr", categorical)
    online = zl.open_dataset(path, cache=tmp_path / "cache")
    if warmed:
        zl.warm(online)
    else:
        online.obs()
    frame = zl.open_dataset(path, cache=tmp_path / "cache", offline=True).obs()
    assert frame.index.tolist() == NAMES
