"""Obs columns, kept whole in the mirror, and large obsm arrays, kept row by row: right, and read once."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import zarr
from helpers import PATIENCE_S, check_minibatch, counts, fetch_options, write_store

import zloader as zl
from zloader.caching.rows_file import RowsFile
from zloader.common import page_cache
from zloader.common.errors import CacheError, FormatError, MissingObjectError, ReadError
from zloader.conversion import elements
from zloader.dataset import obsm_arrays
from zloader.reading.fetch import read_at_once
from zloader.storage import row_blocks

pytestmark = pytest.mark.any_version

N_ROWS = 300
SIZES: dict[str, Any] = {"batch_size": 8, "fetch_factor": 2, "sampling": zl.BlockShuffling(8)}
NARROW = fetch_options(gap_bytes=0, least_read_bytes=0, prefetch=1)  # reads only what a fetch needs
OBS = ["cell_type", "donor", "n_counts", "passed", "lane", "maybe"]
OBSM = ["pca", "cube"]
KEPT = ["obs/cell_type/codes", "obs/lane", "obs/n_counts", "obs/passed"]
PAGED = ["obsm/cube", "obsm/pca"]
FORMS: dict[str, dict[str, Any]] = {"v2": {}, "v3": {}, "v3 shards": {"shards": (40,)}}


def table(n_rows: int = N_ROWS, seed: int = 3) -> ad.AnnData:
    adata = counts(n_rows, 41, seed=seed)
    rng = np.random.default_rng(seed)
    adata.obs["maybe"] = pd.array([None if row % 5 == 3 else row for row in range(n_rows)], dtype="Int64")
    adata.obsm["pca"] = rng.standard_normal((n_rows, 5)).astype(np.float32)
    adata.obsm["cube"] = rng.integers(0, 99, (n_rows, 2, 3)).astype(np.int16)
    return adata


ADATA = table()


def by_anndata(adata: ad.AnnData, path: Path, form: str) -> Path:
    """A store written by anndata, with chunks of 10 rows in obs and obsm. zarr leaves out chunks of zeros."""
    root = zarr.open_group(path, mode="w", zarr_format=int(form[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of anndata and zarr, about their formats
        ad.io.write_elem(root, "/", adata)
        for name in KEPT + PAGED:
            values, attributes, (above, _, last) = root[name][...], dict(root[name].attrs), name.rpartition("/")
            shards = {key: (*rows, *values.shape[1:]) for key, rows in FORMS[form].items()}
            del root[name]
            array = root[above].create_array(last, data=values, chunks=(10, *values.shape[1:]), **shards)
            array.attrs.update(attributes)
        zarr.consolidate_metadata(path)
    return path


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store written by `convert`, with many chunks in each column."""
    folder = tmp_path_factory.mktemp("converted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elements, "_CHUNK_BYTES", 64)
        write_store(ADATA, folder / "a.zarr", folder)
    return folder / "a.zarr"


@pytest.fixture(autouse=True)
def _everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obsm_arrays, "_MOST_WHOLE", 8)
    monkeypatch.setattr(row_blocks, "_DENSE_BYTES", 100)


def loader_of(dataset: zl.Dataset, obs: Any = OBS, obsm: Any = OBSM, **options: Any) -> zl.Loader:
    return zl.Loader(dataset, obs=obs, obsm=obsm, **(SIZES | options))


def check(minibatch: zl.Minibatch, adata: ad.AnnData) -> np.ndarray:
    """Compares a minibatch with the AnnData. Returns its rows."""
    maybe = minibatch.obs["maybe"].numpy() if "maybe" in minibatch.obs else None
    rows = minibatch.index.numpy()
    if maybe is not None:
        np.testing.assert_array_equal(maybe, adata.obs["maybe"].iloc[rows].to_numpy("float64", na_value=np.nan))
    others = {name: values for name, values in minibatch.obs.items() if name != "maybe"}
    check_minibatch(zl.Minibatch(**{**minibatch, "obs": others}), adata)
    for name, values in minibatch.obsm.items():
        wanted = adata.obsm[name][rows]
        assert values.numpy().dtype == wanted.dtype
        np.testing.assert_array_equal(values.numpy(), wanted)
    return rows


def check_epoch(minibatches: Iterable[zl.Minibatch], adata: ad.AnnData) -> None:
    seen = [check(minibatch, adata) for minibatch in minibatches]
    assert sorted(np.concatenate(seen)) == list(range(adata.n_obs))


def paged_of(dataset: zl.Dataset) -> list[str]:
    """The obsm arrays of which a fetch reads its rows."""
    return sorted(dataset.observations.arrays.all_paged(OBSM, zl.FetchOptions()))


def rows_files(dataset: zl.Dataset) -> dict[str, RowsFile]:
    """The mirrors of these arrays of the first store."""
    paged = dataset.observations.arrays.all_paged(OBSM, zl.FetchOptions())
    return {name: paged[name].parts[0].mirror.rows for name in sorted(paged)}


def files_of(cache: Path, name: str) -> list[str]:
    """What the mirrors of a cache have of an array."""
    (encoded, suffixes) = (name.replace("/", "%2F"), ("array", "rows", "index", "kept"))
    return sorted(path.suffix for path in cache.glob("*/*") if path.name in [f"{encoded}.{each}" for each in suffixes])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["converted", *FORMS])
def test_epochs_read_columns_once_and_then_from_the_mirror(tmp_path, store, form):
    path = store if form == "converted" else by_anndata(ADATA, tmp_path / "a.zarr", form)
    for epoch in range(2):
        dataset = zl.open_dataset(path, cache=tmp_path / "cache")
        loader, whole = loader_of(dataset), next(iter(loader_of(zl.open_dataset(path))))
        minibatches = list(loader)
        assert list(minibatches[0].obs) == OBS
        assert {name: values.dtype for name, values in minibatches[0].obs.items()} == {
            name: values.dtype for name, values in whole.obs.items()
        }
        check_epoch(minibatches, ADATA)
        assert paged_of(dataset) == sorted(OBSM)
        assert [files_of(tmp_path / "cache", name) for name in KEPT] == [[".array"]] * len(KEPT)
        assert [files_of(tmp_path / "cache", name) for name in PAGED] == [[".index", ".rows"]] * len(PAGED)
        assert bool(loader.statistics().gets) == (epoch == 0)


def test_a_fetch_reads_its_rows_of_an_array_only(tmp_path, store):
    dataset = zl.open_dataset(store, cache=tmp_path)
    rows = np.arange(50, 90)
    assert sum(map(len, loader_of(dataset[rows], obs=[], obsm=["pca"], options=NARROW))) == 40
    found = rows_files(dataset)["pca"]
    assert not len(found.missing(found.blocks(rows)))
    assert found.held.chunks_held < found.form.n_blocks
    without = loader_of(zl.open_dataset(store, cache=tmp_path / "b"), obs=[], obsm=[])
    counted = loader_of(zl.open_dataset(store, cache=tmp_path / "c"), obs=[], obsm=["pca"])
    check_epoch(without, ADATA)
    check_epoch(counted, ADATA)
    assert counted.statistics().gets > without.statistics().gets
    assert counted.statistics().bytes_read > without.statistics().bytes_read


def test_taken_rows_of_an_array_are_read_without_the_others(tmp_path, store):
    rows = [123, 1, 123, 2]
    dataset = zl.open_dataset(store, cache=tmp_path)
    taken = dataset.take(rows)
    for name in OBSM:
        np.testing.assert_array_equal(taken.obsm[name], ADATA.obsm[name][rows])
        assert 0 < rows_files(dataset)[name].held.chunks_held < rows_files(dataset)[name].form.n_blocks
    without_cache = zl.open_dataset(store).take(rows)
    np.testing.assert_array_equal(without_cache.obsm["pca"], ADATA.obsm["pca"][rows])


@pytest.mark.slow
def test_whole_columns_after_a_part_of_an_epoch(tmp_path, store):
    dataset = zl.open_dataset(store, cache=tmp_path)
    next(iter(loader_of(dataset, options=NARROW)))
    whole = zl.open_dataset(store)
    for name in OBS:
        found, wanted = dataset.obs_column(name), whole.obs_column(name)
        np.testing.assert_array_equal(found.values, wanted.values)
        assert found.values.dtype == wanted.values.dtype
        assert (found.categories is None) == (wanted.categories is None)
        if wanted.categories is not None:
            pd.testing.assert_index_equal(found.categories, wanted.categories)
    for name in OBSM:
        np.testing.assert_array_equal(dataset.obsm_array(name), ADATA.obsm[name])
    assert paged_of(dataset) == [], "they have been read whole"
    assert dataset.where("lane == 3").n_obs == (ADATA.obs["lane"] == 3).sum()
    pd.testing.assert_frame_equal(dataset.obs(), whole.obs())
    check_epoch(loader_of(dataset), ADATA)
    again = zl.open_dataset(store, cache=tmp_path)
    wanted = (ADATA.obs["lane"] != 3) & (ADATA.obs["cell_type"] == "a")
    assert again.where("lane != 3 and cell_type == 'a'").n_obs == wanted.sum()
    np.testing.assert_array_equal(again.obs_column("n_counts").values, ADATA.obs["n_counts"])
    directory = again.store.mirror_directory
    assert directory.verified.contains(directory.path / "obs%2Fn_counts.array")


def test_warming_fills_columns_for_reading_offline(tmp_path, store):
    zl.warm(zl.open_dataset(store, cache=tmp_path))
    offline = zl.open_dataset(store, cache=tmp_path, offline=True)
    check_epoch(loader_of(offline), ADATA)
    assert list(offline.categories("cell_type")) == ["a", "b", "c", "never used"]


def test_columns_that_are_not_in_the_mirror_cannot_be_read_offline(tmp_path, store):
    dataset = zl.open_dataset(store, cache=tmp_path)
    check_epoch(loader_of(dataset, obs=[], obsm=[]), ADATA)
    list(loader_of(dataset[:40], obs=[], obsm=["pca"], options=NARROW))
    offline = zl.open_dataset(store, cache=tmp_path, offline=True)
    with pytest.raises(ReadError, match=r"obsm/pca/c/\d+.*the store was opened offline"):
        check_epoch(loader_of(offline, obs=[], obsm=["pca"]), ADATA)


@pytest.mark.slow
@pytest.mark.parametrize("unlike", [False, True])
def test_several_stores(tmp_path, unlike):
    """Labels of all stores are joined, and numbers get a dtype for those of all stores."""
    first, second = table(150, seed=1), table(120, seed=2)
    second.obs["cell_type"] = second.obs["cell_type"].cat.rename_categories({"a": "z", "c": "a"})
    if unlike:
        second.obs["lane"] = second.obs["lane"].astype(np.int64)
    urls = [by_anndata(each, tmp_path / f"{number}.zarr", "v3 shards") for number, each in enumerate((first, second))]
    dataset, whole = zl.open_dataset(urls, cache=tmp_path / "cache"), zl.open_dataset(urls)
    loader = loader_of(dataset)
    rows = []
    wanted = {name: whole.obs_column(name) for name in OBS}
    for minibatch in loader:
        rows.append(minibatch.index.numpy())
        for name, column in wanted.items():
            assert minibatch.obs[name].numpy().dtype == column.minibatch_dtype
            np.testing.assert_array_equal(minibatch.obs[name].numpy(), column.taken(rows[-1]))
        for name in OBSM:
            np.testing.assert_array_equal(minibatch.obsm[name].numpy(), whole.obsm_array(name)[rows[-1]])
    assert sorted(np.concatenate(rows)) == list(range(270))
    assert paged_of(dataset) == sorted(OBSM)
    pd.testing.assert_index_equal(dataset.categories("cell_type"), wanted["cell_type"].categories)
    np.testing.assert_array_equal(dataset.obs_column("cell_type").values, wanted["cell_type"].values)
    again = loader_of(zl.open_dataset(urls, cache=tmp_path / "cache"))
    assert sum(map(len, again)) == 270
    assert again.statistics().gets == 0


@pytest.mark.every(4)
@pytest.mark.parametrize("name", ["obs/lane", "obs/n_counts", "obs/cell_type/codes"])
def test_a_column_with_several_values_per_row_is_an_error(tmp_path, name):
    path = by_anndata(ADATA, tmp_path / "a.zarr", "v3")
    root, (above, _, last) = zarr.open_group(path), name.rpartition("/")
    attributes, values = dict(root[name].attrs), np.repeat(root[name][...][:, None], 2, 1)
    del root[name]
    root[above].create_array(last, data=values, chunks=(10, 2)).attrs.update(attributes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zarr.consolidate_metadata(path)
    dataset = zl.open_dataset(path, cache=tmp_path / "cache")
    column = name.split("/")[1]
    with pytest.raises(FormatError, match=rf"obs column '{column}' .* has shape \(300, 2\)"):
        next(iter(loader_of(dataset, obs=[column], obsm=[])))


def test_obs_frames_are_read_from_the_mirror_offline(tmp_path, store):
    dataset = zl.open_dataset(store, cache=tmp_path)
    assert list(dataset.obs([]).index) == list(ADATA.obs_names)  # a loader does not read them
    check_epoch(loader_of(dataset, obs=["n_counts", "cell_type"], obsm=[]), ADATA)
    offline = zl.open_dataset(store, cache=tmp_path, offline=True)
    found = offline.obs(["n_counts", "cell_type"])
    pd.testing.assert_frame_equal(found, zl.open_dataset(store).obs(["n_counts", "cell_type"]))
    found.loc["cell 3", "n_counts"] = 7  # the frame is the caller's own


def test_codes_are_kept_in_the_least_dtype(tmp_path):
    """Also those that another tool wrote in eight bytes. They are checked before they are kept, and not again."""
    path = by_anndata(ADATA, tmp_path / "a.zarr", "v2")
    codes = zarr.open_group(path)["obs/cell_type/codes"][:].astype(np.int64)
    zarr.open_group(path)["obs/cell_type"].create_array("codes", data=codes, overwrite=True)
    zarr.consolidate_metadata(path)
    wanted = ADATA.obs["cell_type"]
    for _ in range(2):
        dataset = zl.open_dataset(path, cache=tmp_path / "cache")
        assert dataset.take([5, 3, 5]).obs["cell_type"].tolist() == wanted.iloc[[5, 3, 5]].tolist()
        assert dataset.obs(["cell_type"])["cell_type"].tolist() == wanted.tolist()
        column = dataset.obs_column("cell_type")
        assert (column.values.dtype, page_cache.is_mapped(column.values)) == (np.int8, True)
        np.testing.assert_array_equal(column.values, codes)
    (kept,) = (tmp_path / "cache").glob("*/obs%2Fcell_type%2Fcodes.array")
    assert kept.stat().st_size == N_ROWS + 64


@pytest.mark.slow
def test_a_wrong_code_is_refused_whichever_rows_are_taken(tmp_path):
    path = by_anndata(ADATA, tmp_path / "a.zarr", "v3")
    zarr.open_group(path)["obs/cell_type/codes"][123] = 4
    dataset = zl.open_dataset(path, cache=tmp_path / "cache")
    for use in (lambda: dataset.take([122, 124]), lambda: dataset.obs(["cell_type"])):
        with pytest.raises(FormatError, match="row 123 has the code 4 of 4 categories"):
            use()


def test_a_column_has_one_open_file_and_an_array_a_few(tmp_path, store):
    def open_during(**columns: Any) -> int:
        iterator = iter(loader_of(dataset, **columns))
        next(iterator)
        found = len(list(Path("/dev/fd").iterdir()))
        assert list(iterator)
        return found

    dataset = zl.open_dataset(store, cache=tmp_path)
    before = open_during(obs=[], obsm=[])
    with_columns = open_during(obs=OBS, obsm=[])
    assert before < with_columns <= before + len(OBS)
    during = open_during(obs=[], obsm=OBSM)
    # Of each: its rows, the maps of these and of the index, its leases, and objects of the store that are being read.
    assert with_columns < during <= with_columns + 6 * len(OBSM)


def check_columns(loader: zl.Loader, whole: zl.Dataset) -> None:
    """Compares the columns of an epoch with those that a dataset without a cache reads whole."""
    for minibatch in loader:
        rows = minibatch.index.numpy()
        for name in OBSM:
            np.testing.assert_array_equal(minibatch.obsm[name].numpy(), whole.obsm_array(name)[rows])
        for name in OBS:
            np.testing.assert_array_equal(minibatch.obs[name].numpy(), whole.obs_column(name).taken(rows))


def two_stores(folder: Path) -> list[Path]:
    return [by_anndata(table(150, seed=seed), folder / f"{seed}.zarr", "v3") for seed in (1, 2)]


def test_arrays_of_many_stores_are_read_whole_if_each_is_small(tmp_path, monkeypatch):
    urls, n_bytes = two_stores(tmp_path), 150 * 5 * 4  # of pca in one store; cube is smaller
    monkeypatch.setattr(obsm_arrays, "_MOST_WHOLE", n_bytes)
    assert paged_of(zl.open_dataset(urls, cache=tmp_path / "cache")) == ["cube", "pca"]
    monkeypatch.setattr(obsm_arrays, "_STORES", 1)
    assert paged_of(zl.open_dataset(urls, cache=tmp_path / "cache")) == []


@pytest.mark.slow
def test_warming_several_stores_fills_their_columns_for_reading_offline(tmp_path):
    urls = two_stores(tmp_path)
    zl.warm(zl.open_dataset(urls, cache=tmp_path / "cache"))
    whole = zl.open_dataset(urls)
    for use in range(2):
        offline = zl.open_dataset(urls, cache=tmp_path / "cache", offline=True)
        if use:  # in another order
            pd.testing.assert_frame_equal(offline.obs(), whole.obs())
            found, wanted = offline.take([1, 200, 3]), whole.take([1, 200, 3])
            pd.testing.assert_frame_equal(found.obs, wanted.obs)
            for name in OBSM:
                np.testing.assert_array_equal(found.obsm[name], wanted.obsm[name])
        check_columns(loader_of(offline), whole)
        assert list(offline.categories("cell_type")) == list(whole.categories("cell_type"))
        assert paged_of(offline) == []


@pytest.mark.slow
@pytest.mark.parametrize("warmed", ["together", "one by one", "one of them whole"])
def test_stores_that_were_warmed_in_one_way_are_opened_offline_in_another(tmp_path, monkeypatch, warmed):
    urls, cache = two_stores(tmp_path), tmp_path / "cache"
    zl.warm(zl.open_dataset(urls, cache=cache))
    if warmed != "together":
        shutil.rmtree(cache)
        zl.warm(zl.open_dataset(urls[1], cache=cache))
        if warmed == "one of them whole":
            monkeypatch.setattr(obsm_arrays, "_MOST_WHOLE", 1 << 30)
        zl.warm(zl.open_dataset(urls[0], cache=cache))
    for chosen in (urls, urls[::-1], urls[:1], urls[1:]):
        offline, whole = zl.open_dataset(chosen, cache=cache, offline=True), zl.open_dataset(chosen)
        check_columns(loader_of(offline), whole)
        pd.testing.assert_frame_equal(offline.obs(), whole.obs())


def test_offline_a_column_that_was_never_read_is_an_error_and_leaves_no_files(tmp_path, store):
    dataset = zl.open_dataset(store, cache=tmp_path)
    check_epoch(loader_of(dataset, obs=["maybe"], obsm=[]), ADATA)
    before = sorted(tmp_path.rglob("*"))
    offline = zl.open_dataset(store, cache=tmp_path, offline=True)
    for use in (lambda: next(iter(loader_of(offline, obs=["lane"], obsm=[]))), lambda: offline.obsm_array("pca")):
        with pytest.raises((CacheError, ReadError), match="not in the mirror"):
            use()
    assert sorted(tmp_path.rglob("*")) == before


def test_offline_columns_of_objects_that_are_too_large_to_keep(tmp_path, store, monkeypatch):
    monkeypatch.setattr("zloader.caching.kept.MAX_BYTES", 8)
    dataset = zl.open_dataset(store, cache=tmp_path)
    zl.warm(dataset)
    offline = zl.open_dataset(store, cache=tmp_path, offline=True)
    for column in ("lane", "n_counts", "cell_type"):
        np.testing.assert_array_equal(offline.obs_column(column).values, dataset.obs_column(column).values)
    with pytest.raises(CacheError, match=r"obs/_index/.* is not in the mirror"):
        offline.names_of(np.array([3]))


@pytest.mark.slow
def test_several_stores_are_read_once(tmp_path, sim):
    server = sim()
    two_stores(tmp_path / "bucket")
    storage_options = {"key": "any", "secret": "any", "endpoint_url": server.url}
    urls = [f"s3://bucket/{seed}.zarr" for seed in (1, 2)]
    zl.warm(zl.open_dataset(urls, cache=tmp_path / "cache", storage_options=storage_options))
    again = zl.open_dataset(urls, cache=tmp_path / "cache", storage_options=storage_options)
    before = len(server.log)
    again.obsm_array("pca")
    again.obs()
    again.take([1, 200])
    assert not [entry["path"] for entry in server.log[before:] if "/obs" in entry["path"]]


@pytest.mark.every(4)
@pytest.mark.parametrize("name", KEPT + PAGED)
def test_a_lost_object_of_a_converted_store_is_never_read_as_zeros(tmp_path, store, name):
    path = tmp_path / "a.zarr"
    shutil.copytree(store, path)
    objects = [file for file in path.glob(f"{name}/c/**/*") if file.is_file()]
    objects[len(objects) // 2].unlink()
    kind, column = name.split("/")[:2]
    options: dict[str, Any] = {"obs": [], "obsm": []} | {kind: [column]}
    for cache in (tmp_path / "cache", None):
        with pytest.raises(MissingObjectError, match=f"{name}/c/.* is not there|{name}/c/.* is missing"):
            check_epoch(loader_of(zl.open_dataset(path, cache=cache), **options), ADATA)
    dataset = zl.open_dataset(path, cache=tmp_path / "cache")
    with pytest.raises(MissingObjectError, match=f"{name}/c/.* is missing"):
        dataset.obs_column(column) if kind == "obs" else dataset.obsm_array(column)


def test_an_object_that_is_lost_while_the_store_is_open(tmp_path, store):
    path = tmp_path / "a.zarr"
    shutil.copytree(store, path)
    dataset = zl.open_dataset(path, cache=tmp_path / "cache")
    loader = loader_of(dataset, obs=["lane"], obsm=[])
    (path / "obs/lane/c/0").unlink()
    with pytest.raises(ReadError, match="obs/lane/c/0"):
        check_epoch(loader, ADATA)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_chunks_that_other_writers_leave_out_are_fill_values(tmp_path, form):
    adata = table()
    adata.obs["lane"] = np.where(np.arange(N_ROWS) % 100 < 60, 0, adata.obs["lane"]).astype(np.int32)
    path = by_anndata(adata, tmp_path / "a.zarr", form)
    check_epoch(loader_of(zl.open_dataset(path, cache=tmp_path / "cache")), adata)
    np.testing.assert_array_equal(
        zl.open_dataset(path, cache=tmp_path / "other").obs_column("lane").values, adata.obs["lane"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("code", [-2, 4])
def test_a_code_without_a_label_is_an_error(tmp_path, code):
    path = by_anndata(ADATA, tmp_path / "a.zarr", "v3")
    zarr.open_group(path)["obs/cell_type/codes"][123] = code
    message = f"obs/cell_type/codes of .*row 123 has the code {code} of 4 categories"
    with pytest.raises(FormatError, match=message):
        check_epoch(loader_of(zl.open_dataset(path, cache=tmp_path / "cache")), ADATA)
    with pytest.raises(FormatError, match=message):
        zl.open_dataset(path, cache=tmp_path / "cache").obs_column("cell_type")


def test_a_damaged_chunk_of_the_store_is_an_error(tmp_path, store):
    path = tmp_path / "a.zarr"
    shutil.copytree(store, path)
    target = path / "obs/n_counts/c/0"
    content = bytearray(target.read_bytes())
    content[5] ^= 1
    target.write_bytes(content)
    with pytest.raises(FormatError, match=r"object obs/n_counts/c/0 \(.*\) is damaged"):
        check_epoch(loader_of(zl.open_dataset(path, cache=tmp_path / "cache"), obsm=[]), ADATA)


@pytest.mark.parametrize("name", ["obs/n_counts.array", "obs/cell_type/codes.array", "obsm/pca.rows", "obsm/cube.rows"])
@pytest.mark.parametrize("how", ["flipped", "cut off"])
def test_what_is_damaged_in_the_mirror_is_read_again(tmp_path, store, caplog, name, how):
    check_epoch(loader_of(zl.open_dataset(store, cache=tmp_path)), ADATA)
    (path,) = tmp_path.glob(f"*/{name.replace('/', '%2F')}")
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content if how == "flipped" else content[: len(content) // 3])
    again = loader_of(zl.open_dataset(store, cache=tmp_path))
    check_epoch(again, ADATA)
    assert "differs from its checksum" in caplog.text
    caplog.clear()
    third = loader_of(zl.open_dataset(store, cache=tmp_path))
    check_epoch(third, ADATA)
    assert third.statistics().gets == 0
    assert "checksum" not in caplog.text


@pytest.mark.slow
def test_two_loaders_fill_one_mirror(tmp_path, store):
    loaders = [loader_of(zl.open_dataset(store, cache=tmp_path), seed=seed) for seed in (1, 2)]
    seen = []
    for pair in zip(*loaders, strict=True):
        seen += [check(minibatch, ADATA) for minibatch in pair]
    assert sorted(np.concatenate(seen)) == np.repeat(np.arange(N_ROWS), 2).tolist()
    third = loader_of(zl.open_dataset(store, cache=tmp_path))
    check_epoch(third, ADATA)
    assert third.statistics().gets == 0


def test_a_cache_without_room_for_columns(tmp_path, store, caplog):
    dataset = zl.open_dataset(store, cache=zl.Cache(tmp_path, max_bytes="40KB"))
    check_epoch(loader_of(dataset), ADATA)
    assert "there is no room for obs/n_counts" in caplog.text
    np.testing.assert_array_equal(dataset.obs_column("n_counts").values, ADATA.obs["n_counts"])


def test_a_disk_that_fills_up_in_mid_epoch(tmp_path, store):
    dataset = zl.open_dataset(store, cache=tmp_path)
    loader = loader_of(dataset, options=NARROW)
    seen = []
    for number, minibatch in enumerate(loader):
        seen.append(check(minibatch, ADATA))
        if number == 3:
            for found in rows_files(dataset).values():
                found._stop_writing(OSError("no space left"))
    assert sorted(np.concatenate(seen)) == list(range(N_ROWS))
    assert any(found.held.chunks_held < found.form.n_blocks for found in rows_files(dataset).values())
    check_epoch(loader_of(dataset), ADATA)


def test_without_a_cache_arrays_are_read_whole(store):
    dataset = zl.open_dataset(store)
    check_epoch(loader_of(dataset), ADATA)
    assert paged_of(dataset) == []


def test_an_array_that_was_kept_whole_is_not_read_again(tmp_path, store, monkeypatch):
    monkeypatch.setattr(obsm_arrays, "_MOST_WHOLE", 1 << 30)
    check_epoch(loader_of(zl.open_dataset(store, cache=tmp_path)), ADATA)
    monkeypatch.setattr(obsm_arrays, "_MOST_WHOLE", 8)
    dataset = zl.open_dataset(store, cache=tmp_path)
    loader = loader_of(dataset)
    check_epoch(loader, ADATA)
    assert paged_of(dataset) == []
    assert loader.statistics().gets == 0


@pytest.mark.every(6)
@pytest.mark.parametrize("least", [8, 1 << 30])
@pytest.mark.parametrize("n_stores", [1, 2])
def test_a_mirror_keeps_each_column_once(tmp_path, monkeypatch, least, n_stores):
    """Numbers, codes and dates are kept decoded, and no object of them as it is stored."""
    monkeypatch.setattr(obsm_arrays, "_MOST_WHOLE", least)
    urls = [tmp_path / f"{number}.zarr" for number in range(n_stores)]
    for number, url in enumerate(urls):
        adata = table(80 + number, seed=number)
        adata.obs["day"] = pd.date_range("2024-02-27", periods=adata.n_obs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # zarr has no format of dates
            zl.convert(adata, url, progress=False)
    dataset = zl.open_dataset(urls, cache=tmp_path / "cache")
    list(loader_of(dataset, obs=[*OBS, "day"]))
    dataset.obs()
    zl.warm(dataset)
    for store in dataset.stores:
        kept = [path.name for path in store.mirror_directory.path.iterdir()]
        for name in [*KEPT, "obs/day", *PAGED]:
            file = name.replace("/", "%2F")
            assert kept.count(f"{file}.array") == 1
            assert not [each for each in kept if each.startswith((f"{file}%2Fc%2F", f"%2F{file}"))]


@pytest.mark.slow
def test_arrays_whose_chunks_or_bands_are_too_large_are_read_whole(tmp_path, monkeypatch):
    path = by_anndata(ADATA, tmp_path / "a.zarr", "v3")
    root = zarr.open_group(path)
    attributes = dict(root["obsm/pca"].attrs)
    del root["obsm/pca"]
    root["obsm"].create_array("pca", data=ADATA.obsm["pca"], chunks=(10, 2)).attrs.update(attributes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zarr.consolidate_metadata(path)
    monkeypatch.setattr(obsm_arrays, "_LARGEST_CHUNK", 119)
    dataset = zl.open_dataset(path, cache=tmp_path / "cache")
    check_epoch(loader_of(dataset), ADATA)
    assert paged_of(dataset) == []
    monkeypatch.setattr(obsm_arrays, "_LARGEST_CHUNK", 120)
    assert paged_of(zl.open_dataset(path, cache=tmp_path / "other")) == ["cube"]
    monkeypatch.setattr(obsm_arrays, "_LARGEST_CHUNK", 200)  # 10 rows of 5 numbers, in chunks of 2 columns
    dataset = zl.open_dataset(path, cache=tmp_path / "third")
    assert paged_of(dataset) == ["cube", "pca"]
    for _ in range(2):
        check_epoch(loader_of(dataset), ADATA)


def test_failing_reads_raise_in_the_training_loop(tmp_path, store, sim):
    shutil.copytree(store, tmp_path / "bucket" / "a.zarr")
    server = sim()
    storage_options = {"key": "any", "secret": "any", "endpoint_url": server.url}
    url = "s3://bucket/a.zarr"
    dataset = zl.open_dataset(url, cache=tmp_path / "cache", storage_options=storage_options)
    check_epoch(loader_of(dataset, obs=["lane"], obsm=["cube"]), ADATA)
    dataset = zl.open_dataset(url, cache=tmp_path / "cache", storage_options=storage_options)
    options = zl.FetchOptions(retries=1, deadline_s=PATIENCE_S)
    server.faults = [{"kind": "status", "match": "obsm/pca/c/"}]
    with pytest.raises(ReadError, match=r"obsm/pca/c/\d"):
        check_epoch(loader_of(dataset, obs=[], obsm=["pca"], options=options), ADATA)
    server.faults = [{"kind": "status", "match": "obsm/pca/c/", "count": 1}]
    check_epoch(loader_of(dataset, obs=[], obsm=["pca"], options=options), ADATA)


def test_a_loader_in_another_process(tmp_path, store):
    import torch.utils.data

    dataset = zl.open_dataset(store, cache=tmp_path)
    workers = torch.utils.data.DataLoader(loader_of(dataset), batch_size=None, num_workers=2)
    seen = [check(minibatch, ADATA) for minibatch in workers]
    assert sorted(np.concatenate(seen)) == list(range(N_ROWS))


def test_no_rows_have_dtypes_too(tmp_path, store):
    dataset, none = zl.open_dataset(store, cache=tmp_path), np.empty(0, np.int64)
    recipe = loader_of(dataset).recipes.recipe(0)
    assert "pca" in recipe.paged
    assert {name: column.taken(none).dtype.name for name, column in recipe.obs().items()} == {
        "cell_type": "int64",
        "donor": "int64",
        "n_counts": "float32",
        "passed": "bool",
        "lane": "int32",
        "maybe": "float64",
    }
    obsm = read_at_once(recipe, none, zl.FetchOptions()).obsm
    assert [obsm[name].shape for name in OBSM] == [(0, 5), (0, 2, 3)]
    assert [obsm[name].dtype for name in OBSM] == [ADATA.obsm[name].dtype for name in OBSM]


@pytest.mark.slow
def test_convert_writes_large_columns_in_small_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(elements, "_LARGE_BYTES", 1000)
    monkeypatch.setattr(elements, "_CHUNK_BYTES_OF_LARGE", 100)
    write_store(ADATA, tmp_path / "a.zarr", tmp_path)
    root = zarr.open_group(tmp_path / "a.zarr", mode="r")
    chunks = {name: root[name].chunks[0] for name in KEPT + PAGED}
    assert chunks == {
        "obs/cell_type/codes": N_ROWS,  # 300 bytes are not large
        "obs/lane": 25,
        "obs/n_counts": 25,
        "obs/passed": N_ROWS,
        "obsm/cube": 8,
        "obsm/pca": 102,  # matrices have chunks of a few rows
    }
    check_epoch(loader_of(zl.open_dataset(tmp_path / "a.zarr", cache=tmp_path / "cache")), ADATA)
