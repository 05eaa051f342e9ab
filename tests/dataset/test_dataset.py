"""Opening stores: what a dataset says about itself, `take`, and every way in which a store can be unusable."""

from __future__ import annotations

import logging
import pickle
import shutil
import warnings
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import zarr
from helpers import SMALL, check_minibatch, counts, write_store

import zloader as zl
from zloader.common.errors import (
    AccessDeniedError,
    CorruptChunkError,
    FormatError,
    MissingColumnError,
    MissingObjectError,
    OptionError,
    StoreChangedError,
    StoreError,
    StoreNotFoundError,
    ZloaderError,
)

ADATA = counts(120, 41, seed=7)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    write_store(ADATA, folder / "counts.zarr", folder)
    return folder / "counts.zarr"


@pytest.fixture
def store(pristine: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(pristine, tmp_path / "copy.zarr"))


def write_plain(adata: ad.AnnData, dest: Path, *, zarr_format: int = 3) -> None:
    """Writes a store with anndata."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about future defaults and consolidated metadata
        root = zarr.create_group(dest, zarr_format=zarr_format)
        ad.io.write_elem(root, "/", adata.copy())
        zarr.consolidate_metadata(root.store)


def epoch(dataset: zl.Dataset, **options) -> np.ndarray:
    loader = zl.Loader(dataset, batch_size=8, fetch_factor=4, sampling=zl.BlockShuffling(8), **options)
    return np.concatenate([check_minibatch(minibatch, ADATA) for minibatch in loader])


# ------------------------------------------------------------------------------------------------ description


@pytest.mark.every(2)
@pytest.mark.parametrize("place", ["path", "str", "file URL", "s3"])
def test_a_dataset_describes_itself(pristine, place, request, tmp_path):
    storage_options = None
    url = {"path": pristine, "str": str(pristine), "file URL": pristine.as_uri()}.get(place)
    if url is None:
        s3 = request.getfixturevalue("s3")
        url, storage_options = s3.url("counts.zarr"), s3.storage_options
        write_store(ADATA, url, tmp_path, storage_options=storage_options)
    dataset = zl.open_dataset(url, storage_options=storage_options)
    assert (dataset.n_obs, dataset.n_vars, len(dataset)) == (120, 41, 120)
    assert dataset.var_names.equals(ADATA.var_names)
    assert dataset.obs_columns == list(ADATA.obs.columns)
    pd.testing.assert_frame_equal(dataset.obs(), ADATA.obs, check_dtype=False)
    pd.testing.assert_frame_equal(dataset.obs(["lane", "donor"]), ADATA.obs[["lane", "donor"]], check_dtype=False)
    assert dataset.categories("cell_type").tolist() == ["a", "b", "c", "never used"]
    assert dataset.categories("donor").tolist() == ["d1", "d10", "d2"]
    with pytest.raises(OptionError, match="'n_counts' holds numbers"):
        dataset.categories("n_counts")
    with pytest.raises(MissingColumnError, match=r"no obs column 'nothing'.*'cell_type', 'donor', 'n_counts'"):
        dataset.obs(["nothing"])
    taken = dataset.take([5, 3, 99, 3, 0])
    wanted = ADATA[[5, 3, 99, 3, 0]]
    np.testing.assert_array_equal(taken.X.toarray(), wanted.X.toarray())
    assert taken.X.dtype == np.float32
    assert taken.obs_names.tolist() == wanted.obs_names.tolist()
    assert taken.obs["cell_type"].astype(str).tolist() == wanted.obs["cell_type"].astype(str).tolist()
    assert taken.var_names.equals(ADATA.var_names)


@pytest.mark.parametrize("rows", [[120], [-121], 120, [True], [1.5], [[1]], "3"])
def test_take_refuses_rows_that_are_not_there(pristine, rows):
    with pytest.raises(OptionError, match="row"):
        zl.open_dataset(pristine).take(rows)


def test_take_of_nothing_is_empty(pristine):
    assert zl.open_dataset(pristine).take([]).shape == (0, 41)


def test_nullable_and_odd_obs_columns(tmp_path):
    adata = counts(30, 11)
    adata.obs["whole"] = pd.array([1, None] * 15, dtype="Int32")
    adata.obs["full"] = pd.array(range(30), dtype="Int16")
    adata.obs["flag"] = pd.array([True, None] * 15, dtype="boolean")
    adata.obs["ordered"] = pd.Categorical(["lo", "hi", "lo"] * 10, ["lo", "mid", "hi"], ordered=True)
    write_store(adata, tmp_path / "s.zarr", tmp_path)
    dataset = zl.open_dataset(tmp_path / "s.zarr")
    columns = ["whole", "full", "flag", "ordered"]
    for minibatch in zl.Loader(dataset, obs=columns, batch_size=30):
        rows = minibatch.index.numpy()
        for name in ("whole", "flag"):
            wanted = adata.obs[name].iloc[rows].to_numpy(dtype=float, na_value=np.nan)
            np.testing.assert_array_equal(minibatch.obs[name].numpy(), wanted)
        assert minibatch.obs["full"].numpy().dtype == np.int16
        np.testing.assert_array_equal(minibatch.obs["full"].numpy(), rows)
        assert minibatch.obs["ordered"].tolist() == adata.obs["ordered"].cat.codes.iloc[rows].tolist()


def test_a_plain_anndata_store_opens_too(tmp_path):
    """anndata uses other chunks and codecs, writes no checksums, and omits chunks of zeros."""
    write_plain(ADATA, tmp_path / "plain.zarr")
    dataset = zl.open_dataset(tmp_path / "plain.zarr", cache=tmp_path / "cache")
    for _ in range(2):
        assert sorted(epoch(dataset, obs=["cell_type", "lane"])) == list(range(120))


# ------------------------------------------------------------------------------------------------ the mirror


def test_a_warm_epoch_needs_no_store(store, tmp_path):
    dataset = zl.open_dataset(store, cache=tmp_path / "cache")
    first = epoch(dataset, obs=["cell_type"], seed=1)
    shutil.rmtree(store)
    assert epoch(dataset, obs=["cell_type"], seed=1).tolist() == first.tolist()


def test_another_process_finds_what_the_first_one_mirrored(store, tmp_path):
    epoch(zl.open_dataset(store, cache=tmp_path / "cache"))
    loader = zl.Loader(zl.open_dataset(store, cache=zl.Cache(directory=tmp_path / "cache")), batch_size=8)
    assert sum(map(len, loader)) == 120
    assert loader.statistics().gets == 0


def test_changed_objects_have_another_mirror(store, tmp_path):
    dataset = zl.open_dataset(store, cache=tmp_path / "cache")
    epoch(dataset)
    other = ADATA.copy()
    other.X.data += 1
    write_store(other, store, tmp_path, overwrite=True)
    changed = zl.open_dataset(store, cache=tmp_path / "cache")
    assert changed.fingerprint != dataset.fingerprint
    for minibatch in zl.Loader(changed, batch_size=8):
        check_minibatch(minibatch, other)


def test_damage_in_the_mirror_is_mended_from_the_store(store, tmp_path, caplog):
    epoch(zl.open_dataset(store, cache=tmp_path / "cache"), obs=["n_counts"])
    (rows,) = tmp_path.glob("cache/*/X.rows")
    content = bytearray(rows.read_bytes())
    content[len(content) // 2] ^= 1
    rows.write_bytes(content)
    (counts_kept,) = tmp_path.glob("cache/*/obs%2Fn_counts.array")
    counts_kept.write_bytes(counts_kept.read_bytes()[:-9])
    with caplog.at_level(logging.WARNING, "zloader"):
        dataset = zl.open_dataset(store, cache=tmp_path / "cache")
        assert sorted(epoch(dataset, obs=["n_counts"])) == list(range(120))
    assert "differs from its checksum" in caplog.text
    assert counts_kept.name in caplog.text
    caplog.clear()
    assert sorted(epoch(zl.open_dataset(store, cache=tmp_path / "cache"), obs=["n_counts"])) == list(range(120))
    assert caplog.text == ""


def test_a_cache_that_cannot_be_written_is_done_without(store, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING, "zloader"):
        dataset = zl.open_dataset(store, cache=tmp_path / "file" / "cache")
        assert sorted(epoch(dataset)) == list(range(120))
        assert sorted(epoch(dataset)) == list(range(120))
    assert caplog.text.count("every epoch will read from the store") == 1


# ------------------------------------------------------------------------------------------------ unusable stores


def test_nothing_there(tmp_path, s3):
    with pytest.raises(StoreNotFoundError, match=rf"no such directory: {tmp_path}/nothing\.zarr. Check the path"):
        zl.open_dataset(tmp_path / "nothing.zarr")
    with pytest.raises(StoreNotFoundError, match="no such directory"):
        zl.open_dataset(tmp_path / "none" / "nothing.zarr")
    (tmp_path / "counts.zarr").mkdir()
    with pytest.raises(StoreNotFoundError, match=r"no such directory: .*Did you mean 'counts\.zarr'\?"):
        zl.open_dataset(tmp_path / "count.zarr")
    with pytest.raises(StoreNotFoundError, match="the directory is empty"):
        zl.open_dataset(tmp_path / "counts.zarr")
    with pytest.raises(StoreNotFoundError, match="check the bucket, the key and the endpoint"):
        zl.open_dataset(s3.url("nothing.zarr"), storage_options=s3.storage_options)
    with pytest.raises(StoreNotFoundError, match="no-such-bucket"):
        zl.open_dataset("s3://no-such-bucket/counts.zarr", storage_options=s3.storage_options)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [{"secret": "not the secret"}, {"key": "nobody", "secret": "nothing"}])
def test_wrong_credentials(s3, tmp_path, wrong):
    write_store(ADATA, s3.url("counts.zarr"), tmp_path, storage_options=s3.storage_options)
    with pytest.raises(AccessDeniedError, match="Check the key and secret") as caught:
        zl.open_dataset(s3.url("counts.zarr"), storage_options=s3.storage_options | wrong)
    assert wrong["secret"] not in str(caught.value)


def test_credentials_that_stop_working_before_the_first_read(s3, tmp_path):
    write_store(ADATA, s3.url("counts.zarr"), tmp_path, storage_options=s3.storage_options)
    dataset = zl.open_dataset(s3.url("counts.zarr"), storage_options=s3.storage_options)
    dataset.store.offsets(dataset.store.matrix("X")).load()
    dataset.store.location.storage_options["secret"] = "changed meanwhile"
    with pytest.raises(AccessDeniedError, match=r"reading X/\w+/c/\d+ bytes \d+-\d+ was denied") as caught:
        epoch(dataset)
    assert "changed meanwhile" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["environment", "file", "profile variable", "profile option"])
def test_credentials_from_the_surroundings_serve_listing_and_reads_alike(s3, tmp_path, monkeypatch, where):
    write_store(ADATA, s3.url("counts.zarr"), tmp_path, storage_options=s3.storage_options)
    key, secret = s3.storage_options["key"], s3.storage_options["secret"]
    options = {"endpoint_url": s3.endpoint_url}
    if where == "environment":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        monkeypatch.setenv("AWS_ENDPOINT_URL", options.pop("endpoint_url"))
    else:
        name = "default" if where == "file" else "lab"
        lines = f"[{name}]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"
        (tmp_path / "credentials").write_text(lines)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no such file"))
        if where == "profile variable":
            monkeypatch.setenv("AWS_PROFILE", "lab")
        if where == "profile option":
            options["profile"] = "lab"
    assert sorted(epoch(zl.open_dataset(s3.url("counts.zarr"), storage_options=options))) == list(range(120))


@pytest.mark.slow
def test_credentials_may_be_mended_in_a_running_process(s3, tmp_path, monkeypatch):
    write_store(ADATA, s3.url("counts.zarr"), tmp_path, storage_options=s3.storage_options)
    # A unique option, because fsspec may still cache a client with the same options and other credentials.
    options = {"endpoint_url": s3.endpoint_url, "listings_expiry_time": 77}
    with pytest.raises(AccessDeniedError, match="key and secret"):
        zl.open_dataset(s3.url("counts.zarr"), storage_options=options)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.storage_options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.storage_options["secret"])
    assert zl.open_dataset(s3.url("counts.zarr"), storage_options=options).n_obs == 120


@pytest.mark.slow
def test_secrets_are_not_shown(s3, tmp_path):
    write_store(ADATA, s3.url("counts.zarr"), tmp_path, storage_options=s3.storage_options)
    dataset = zl.open_dataset(s3.url("counts.zarr"), storage_options=s3.storage_options)
    shown = (
        repr(dataset) + repr(dataset.store.location) + repr(zl.Loader(dataset)) + repr(zl.Loader(dataset).statistics())
    )
    assert s3.storage_options["secret"] not in shown
    assert s3.storage_options["key"] not in shown


def test_no_server_at_the_endpoint():
    options = {
        "key": "k",
        "secret": "s",
        "endpoint_url": "http://127.0.0.1:9",
        "config_kwargs": {"retries": {"max_attempts": 0}},
    }
    with pytest.raises(StoreError, match="Is the endpoint correct"):
        zl.open_dataset("s3://bucket/counts.zarr", storage_options=options)


@pytest.mark.parametrize("url", ["gopher://host/x", "s3://"])
def test_urls_that_make_no_sense(url):
    with pytest.raises(OptionError, match="cannot open"):
        zl.open_dataset(url)


def _convert_into(url: str) -> None:
    zl.convert(ad.AnnData(np.eye(2)), url, progress=False)


def _convert_from(path: str) -> None:
    zl.convert(path, "never.zarr", progress=False)


@pytest.mark.parametrize(
    ("use", "url", "says"),
    [
        (zl.open_dataset, "s3://bucket/back\\slash/o.zarr", "takes a backslash in a key for a slash"),
        (_convert_into, "s3://bucket/back\\slash/o.zarr", "takes a backslash in a key for a slash"),
        (zl.open_dataset, "~nobody-here/x.zarr", "Give an absolute path"),
        (_convert_into, "~nobody-here/x.zarr", "Give an absolute path"),
        (_convert_from, "~nobody-here/x.h5ad", "Give an absolute path"),
        (zl.Cache, "~nobody-here/cache", "Give an absolute path"),
    ],
)
def test_places_that_cannot_be(use, url, says):
    with pytest.raises(OptionError, match=says):
        use(url)


@pytest.mark.parametrize("form", ["zarr", "h5ad"])
def test_a_relative_path_stays_that_of_the_working_directory_in_which_it_was_opened(store, tmp_path, monkeypatch, form):
    source = store if form == "zarr" else tmp_path / "cells.h5ad"
    if form == "h5ad":
        ad.read_zarr(store).write_h5ad(source)
    monkeypatch.chdir(source.parent)
    dataset = zl.open_dataset(source.name, cache="cache")
    pickled = pickle.dumps(dataset)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for opened in (dataset, pickle.loads(pickled)):
        assert sum(len(minibatch) for minibatch in zl.Loader(opened, obs=["cell_type"])) == dataset.n_obs
        assert opened.take([0]).n_obs == 1
    assert not [*Path.cwd().iterdir()]


def test_directories_that_are_no_anndata_store(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(FormatError, match=r"no zarr\.json"):
        zl.open_dataset(tmp_path)
    zarr.create_group(tmp_path / "group.zarr")
    with pytest.raises(FormatError, match="encoding-type None"):
        zl.open_dataset(tmp_path / "group.zarr")
    zarr.create_array(tmp_path / "array.zarr", shape=(3,), dtype="i4")
    with pytest.raises(FormatError, match="not a Zarr group"):
        zl.open_dataset(tmp_path / "array.zarr")
    (tmp_path / "text.zarr").mkdir()
    (tmp_path / "text.zarr" / "zarr.json").write_text("not JSON")
    with pytest.raises(FormatError, match=r"zarr\.json .* is not the metadata"):
        zl.open_dataset(tmp_path / "text.zarr")


def test_no_x(tmp_path):
    write_plain(ad.AnnData(obs=ADATA.obs, var=ADATA.var), tmp_path / "s.zarr")
    dataset = zl.open_dataset(tmp_path / "s.zarr")
    with pytest.raises(FormatError, match="no matrix 'X'"):
        zl.Loader(dataset)


def test_a_corrupt_chunk_is_named(store):
    victim = store / "X" / "data" / "c" / "1"
    content = bytearray(victim.read_bytes())
    content[5] ^= 0xFF
    victim.write_bytes(content)
    with pytest.raises(CorruptChunkError, match=r"bytes 0-\d+ of X/data/c/1: its crc32c differs"):
        epoch(zl.open_dataset(store))


def test_a_truncated_object_is_named_when_it_is_found_so(store):
    victim = store / "X" / "indices" / "c" / "1"
    victim.write_bytes(victim.read_bytes()[:-50])
    with pytest.raises(ZloaderError, match="X/indices/c/1"):
        epoch(zl.open_dataset(store))


def test_an_object_that_shrinks_later_has_changed(store):
    dataset = zl.open_dataset(store)
    victim = store / "X" / "indices" / "c" / "1"
    victim.write_bytes(victim.read_bytes()[:-50])
    with pytest.raises(StoreChangedError, match=r"X/indices/c/1 bytes \d+-\d+"):
        epoch(dataset)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_deleted_object_is_named(store, when):
    dataset = zl.open_dataset(store)
    (store / "X" / "data" / "c" / "1").unlink()
    if when == "before":
        dataset = zl.open_dataset(store)
    with pytest.raises(MissingObjectError, match="X/data/c/1"):
        epoch(dataset)


@pytest.mark.parametrize("victim", ["X/indptr", "obs/cell_type/codes", "obs/lane"])
def test_a_deleted_column_is_named_and_not_read_as_zeros(store, victim):
    shutil.rmtree(store / victim / "c")
    with pytest.raises(MissingObjectError, match=victim):
        epoch(zl.open_dataset(store), obs=["cell_type", "lane"])


@pytest.mark.every(3)
@pytest.mark.parametrize("change", [lambda p: np.roll(p, 1), lambda p: p + 1, lambda p: p[:-1]])
def test_a_wrong_indptr_is_refused(pristine, tmp_path, change):
    """In a store that anndata wrote; ours has checksums that would fail first."""
    write_plain(ADATA, tmp_path / "s.zarr")
    root = zarr.open_group(tmp_path / "s.zarr", mode="r+", use_consolidated=False)
    indptr = change(root["X/indptr"][:])
    del root["X/indptr"]
    root["X"].create_array("indptr", data=indptr)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zarr.consolidate_metadata(root.store)
    with pytest.raises(FormatError, match="indptr"):
        epoch(zl.open_dataset(tmp_path / "s.zarr"))


def test_a_gene_that_does_not_exist_is_an_error_and_not_a_wild_write(tmp_path):
    """In a store without checksums, where the index would be used as a memory address."""
    write_plain(ADATA, tmp_path / "s.zarr")
    indices = zarr.open_group(tmp_path / "s.zarr", mode="r+")["X/indices"]
    indices[7] = 41
    for layout in ("csr", "dense"):
        with pytest.raises(CorruptChunkError, match=r"X/indices.*gene 41, but there are 41 genes"):
            epoch(zl.open_dataset(tmp_path / "s.zarr"), layout=layout)


def test_an_interrupted_conversion_says_so(store):
    (store / "zarr.json").rename(store / "zloader.partial")
    with pytest.raises(FormatError, match="its conversion did not finish"):
        zl.open_dataset(store)


def test_small_options_are_what_the_tests_mean(pristine):
    matrix = zl.open_dataset(pristine).store.matrix("X")
    assert SMALL.chunk_rows == 1
    assert all(array.n_shards >= 2 for array in matrix.arrays)
