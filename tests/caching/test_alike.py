"""Stores that look alike get separate mirrors, and a mirror that was moved or mixed up is not used."""

from __future__ import annotations

import contextlib
import email.utils
import functools
import http.server
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anndata as ad
import numpy as np
import pytest
from helpers import check_minibatch, counts, web_server

import zloader as zl
from zloader.access.location import Location
from zloader.access.stored_objects import StoredObject, stored_file
from zloader.caching.directory import MirrorEntry, mirrors
from zloader.caching.inspection import inspect_mirror, verify
from zloader.common.errors import CacheError, OptionError, StoreError
from zloader.conversion.encode import ConvertOptions
from zloader.dataset.warm import warm

pytestmark = pytest.mark.any_version

ROWS = 200
ONE = counts(ROWS, 60, seed=1)
ONE.obsm["X_pca"] = np.random.default_rng(0).integers(0, 99, (ROWS, 3)).astype(np.float32)
ONE.layers["twice"] = ONE.X * 2
OTHER = ONE.copy()
OTHER.X.data = 401 - ONE.X.data
OTHER.obs["lane"] = 4 - ONE.obs["lane"]
OTHER.obsm["X_pca"] = 99 - ONE.obsm["X_pca"]
PLAIN = ConvertOptions(codec="none", chunk_rows=1, shard_size=2048)


def write(adata: ad.AnnData, dest: Path) -> Path:
    dest.parent.mkdir(parents=True, exist_ok=True)
    adata.write_h5ad(dest.parent / "source.h5ad", convert_strings_to_categoricals=False)
    zl.convert(dest.parent / "source.h5ad", dest, options=PLAIN, progress=False)
    return dest


def files_in(store: Path) -> list[Path]:
    return sorted(path for path in store.rglob("*") if path.is_file())


def set_equal_times(*stores: Path) -> None:
    """Sets the modification time of all files to a constant, as archives, containers and package managers do."""
    for path in [path for store in stores for path in files_in(store)]:
        os.utime(path, (1, 1))


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    """A directory with the stores one.zarr and other.zarr, which differ only in their values."""
    folder = tmp_path_factory.mktemp("alike") / "bucket"
    one, other = write(ONE, folder / "one.zarr"), write(OTHER, folder / "other.zarr")
    assert zl.open_dataset(one).store.object_sizes() == zl.open_dataset(other).store.object_sizes()
    set_equal_times(one, other)
    return folder


@pytest.fixture
def stores(pair, tmp_path) -> tuple[Path, Path]:
    """Copies of both stores with equal modification times."""
    copies = tuple(Path(shutil.copytree(pair / name, tmp_path / name)) for name in ("one.zarr", "other.zarr"))
    set_equal_times(*copies)
    return copies


def read_epoch(dataset: zl.Dataset, adata: ad.AnnData) -> zl.Statistics:
    """Reads an epoch and compares all its values with the AnnData."""
    loader = zl.Loader(dataset, batch_size=32, fetch_factor=2, obs=["lane", "donor"], obsm=["X_pca"])
    rows = []
    for minibatch in loader:
        rows.append(check_minibatch(minibatch, adata))
        np.testing.assert_array_equal(minibatch.obsm["X_pca"].numpy(), adata.obsm["X_pca"][rows[-1]])
    assert np.sort(np.concatenate(rows)).tolist() == list(range(ROWS))
    return loader.statistics()


def epoch(store: Path, cache: Path, adata: ad.AnnData) -> zl.Statistics:
    return read_epoch(zl.open_dataset(store, cache=cache), adata)


def entry_of(cache: Path, url: Path | str) -> MirrorEntry:
    (entry,) = (entry for entry in mirrors(cache) if entry.url == str(url) and not entry.stale)
    return entry


# ---- local stores


def test_two_stores_with_equal_listings(stores, tmp_path, caplog):
    one, other = stores
    assert zl.open_dataset(one).fingerprint == zl.open_dataset(other).fingerprint
    for store, adata in [(one, ONE), (other, OTHER)]:
        assert epoch(store, tmp_path / "cache", adata).gets
    for store, adata in [(one, ONE), (other, OTHER)]:
        assert epoch(store, tmp_path / "cache", adata).gets == 0
    assert len(mirrors(tmp_path / "cache")) == 2
    both = zl.open_dataset([one, other], cache=tmp_path / "cache")
    np.testing.assert_array_equal(both.obs_column("lane").values, [*ONE.obs["lane"], *OTHER.obs["lane"]])
    swapped = zl.open_dataset([other, one], cache=tmp_path / "cache")
    np.testing.assert_array_equal(swapped.obs_column("lane").values, [*OTHER.obs["lane"], *ONE.obs["lane"]])
    assert not caplog.records


def _in_place(one, other):
    for path in files_in(one):
        path.write_bytes((other / path.relative_to(one)).read_bytes())
    set_equal_times(one)


def _with_new_files(one, other):
    for path in files_in(one):
        os.replace(other / path.relative_to(one), path)  # noqa: PTH105


def _with_another_directory(one, other):
    one.rename(one.with_name("away"))
    other.rename(one)


@pytest.mark.every(2)
@pytest.mark.parametrize("replace", [_in_place, _with_new_files, _with_another_directory])
def test_replacing_a_store_with_equal_sizes_and_times(stores, tmp_path, caplog, replace):
    one, other = stores
    epoch(one, tmp_path / "cache", ONE)
    before = zl.open_dataset(one)
    replace(one, other)
    assert zl.open_dataset(one).fingerprint == before.fingerprint
    assert epoch(one, tmp_path / "cache", OTHER).gets
    assert epoch(one, tmp_path / "cache", OTHER).gets == 0
    assert [entry.stale for entry in mirrors(tmp_path / "cache")] == [True, False]
    assert all("is stale" in record.getMessage() for record in caplog.records)


def test_a_symlink_that_changes_its_target(stores, tmp_path):
    one, other = stores
    current = tmp_path / "current"
    current.symlink_to(one)
    epoch(current, tmp_path / "cache", ONE)
    assert epoch(one, tmp_path / "cache", ONE).gets == 0, "the link and its target are the same store"
    current.unlink()
    current.symlink_to(other)
    epoch(current, tmp_path / "cache", OTHER)
    assert epoch(one, tmp_path / "cache", ONE).gets == 0


def test_equal_relative_paths_in_two_directories(stores, tmp_path, monkeypatch):
    one, other = stores
    for folder, store in [("a", one), ("b", other)]:
        (tmp_path / folder).mkdir()
        store.rename(tmp_path / folder / "counts.zarr")
        monkeypatch.chdir(tmp_path / folder)
        warm(zl.open_dataset("counts.zarr", cache=tmp_path / "cache"))
    for folder, adata in [("a", ONE), ("b", OTHER)]:
        monkeypatch.chdir(tmp_path / folder)
        read_epoch(zl.open_dataset("counts.zarr", cache=tmp_path / "cache", offline=True), adata)
        url = f"file://{tmp_path}/{folder}/counts.zarr/"
        read_epoch(zl.open_dataset(url, cache=tmp_path / "cache", offline=True), adata)


@pytest.mark.parametrize("change", [lambda path: path.chmod(0o640), lambda path: path.touch()], ids=["chmod", "touch"])
def test_a_changed_mode_or_time_only_makes_a_new_mirror(stores, tmp_path, change):
    epoch(stores[0], tmp_path / "cache", ONE)
    change(stores[0] / "zarr.json")
    assert epoch(stores[0], tmp_path / "cache", ONE).gets
    assert epoch(stores[0], tmp_path / "cache", ONE).gets == 0


def _stored(*, since_2016: int = 1, stable_inode: bool = True, **changed: int) -> StoredObject:
    """The StoredObject of a file with these fields in `os.stat`."""
    changed_s = 1_451_606_400 + since_2016
    times = {"st_mtime": 1.0, "st_ctime": float(changed_s), "st_ctime_ns": changed_s * 10**9}
    found: Any = SimpleNamespace(**({"st_ino": 7, "st_dev": 5, "st_size": 3} | times | changed))
    return stored_file(found, stable_inode=stable_inode)


def test_identity_of_files():
    assert _stored(st_dev=6) == _stored(), "device numbers may change after a reboot"
    assert _stored(st_ino=8) != _stored()
    assert _stored(st_ino=8, stable_inode=False) == _stored(stable_inode=False)
    assert _stored(since_2016=2, stable_inode=False) != _stored(stable_inode=False)


def test_artificial_change_times_are_ignored():
    """For example in a file system image, where all times were set when it was built."""
    assert _stored(since_2016=-1).stamp == ""
    assert _stored().stamp != ""


def test_a_state_is_valid_for_a_copy_of_the_store(stores, tmp_path):
    """Change times and inodes differ in copies and on other machines."""
    copy = shutil.copytree(stores[0], tmp_path / "elsewhere" / "copy.zarr")
    loaders = [
        zl.Loader(zl.open_dataset(store, cache=tmp_path / "cache"), batch_size=32) for store in (*stores[:1], copy)
    ]
    next(iter(loaders[0]))
    loaders[1].load_state_dict(loaders[0].state_dict())
    assert sum(map(len, loaders[1])) == ROWS - 32
    assert len(mirrors(tmp_path / "cache")) == 2


def test_links_in_a_store_are_followed(pair, tmp_path):
    """Links to files, as git-annex makes them, and to directories. Cycles and dangling links do no harm."""
    store, away = Path(shutil.copytree(pair / "one.zarr", tmp_path / "s.zarr")), tmp_path / "away"
    away.mkdir()
    shutil.move(store / "X" / "data", away / "data")
    (store / "X" / "data").symlink_to(away / "data")
    (store / "zarr.json").rename(away / "root")
    (store / "zarr.json").symlink_to(away / "root")
    plain = Location(url=str(pair / "one.zarr")).listing()
    assert {key: entry.size for key, entry in Location(url=str(store)).listing().items()} == {
        key: entry.size for key, entry in plain.items()
    }
    epoch(store, tmp_path / "cache", ONE)
    assert epoch(store, tmp_path / "cache", ONE).gets == 0
    (store / "X" / "round").symlink_to(store)
    (store / "X" / "nowhere").symlink_to("nothing")
    assert Location(url=str(store)).listing().keys() == plain.keys() | {"X/nowhere"}
    for name in ("1", "2"):
        shutil.copy(away / "root", away / name)
        os.utime(away / name, (1, 1))
    listed = []
    for name in ("1", "2"):
        (store / "zarr.json").unlink()
        (store / "zarr.json").symlink_to(away / name)
        listed.append(Location(url=str(store)).listing()["zarr.json"])
    assert listed[0] != listed[1]


# ---- web servers


class _Tagged(http.server.SimpleHTTPRequestHandler):
    """Serves ranges of files, with the headers that `tags` returns for a file's status."""

    protocol_version = "HTTP/1.1"

    def __init__(self, *arguments, tags, **options) -> None:
        self._tags = tags
        super().__init__(*arguments, **options)

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        stored = path.read_bytes() if path.is_file() else b""
        first, _, last = self.headers.get("Range", f"bytes=0-{len(stored)}").removeprefix("bytes=").partition("-")
        part = stored[int(first) : int(last or len(stored)) + 1]
        self.send_response(404 if not stored else 206 if "Range" in self.headers else 200)
        for name, value in self._tags(path.stat()).items() if stored else ():
            self.send_header(name, value)
        if "Range" in self.headers:
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(stored)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *_: object) -> None: ...


def served(root: Path, tags) -> contextlib.AbstractContextManager[str]:
    return web_server(functools.partial(_Tagged, directory=str(root), tags=tags))


def _modified(seconds: float) -> dict[str, str]:
    return {"Last-Modified": email.utils.formatdate(seconds, usegmt=True)}


IDENTIFYING = {
    "Last-Modified": lambda status: _modified(1_600_000_000),
    "as nginx": lambda status: _modified(1_600_000_000) | {"ETag": f'"{1_600_000_000:x}-{status.st_size:x}"'},
    "weak ETag": lambda status: {"ETag": f'W/"{status.st_size:x}"'},
}
NOT_IDENTIFYING = {
    "nothing": lambda status: {},
    "times of 1970": lambda status: _modified(status.st_mtime),
    "as nginx, times of 1970": lambda status: _modified(1) | {"ETag": f'"1-{status.st_size:x}"'},
}


@pytest.mark.slow
@pytest.mark.parametrize("tags", IDENTIFYING.values(), ids=IDENTIFYING)
def test_two_stores_with_equal_listings_on_a_web_server(pair, tmp_path, tags, caplog):
    cache = tmp_path / "cache"
    with served(pair, tags) as server:
        for name, adata in [("one", ONE), ("other", OTHER)]:
            assert read_epoch(zl.open_dataset(f"{server}/{name}.zarr", cache=cache), adata).gets
        for name, adata in [("one", ONE), ("other", OTHER)]:
            assert read_epoch(zl.open_dataset(f"{server}/{name}.zarr/", cache=cache), adata).gets == 0
    assert read_epoch(zl.open_dataset(f"{server}/other.zarr", cache=cache, offline=True), OTHER).gets == 0
    assert len(mirrors(cache)) == 2
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.parametrize("tags", NOT_IDENTIFYING.values(), ids=NOT_IDENTIFYING)
def test_no_mirror_for_a_web_server_that_does_not_reveal_changes(stores, tmp_path, tags, caplog):
    one, other = stores
    cache = tmp_path / "cache"
    with served(tmp_path, tags) as server:
        dataset = zl.open_dataset(f"{server}/one.zarr", cache=cache)
        assert read_epoch(dataset, ONE).gets
        (record,) = caplog.records
        assert f"cannot keep a mirror of {server}/one.zarr: a change of " in record.getMessage()
        with pytest.raises(OptionError, match="cannot be used"):
            dataset.cache_statistics()
        with pytest.raises(OptionError, match="cannot be used"):
            warm(dataset)
        _with_another_directory(one, other)
        assert read_epoch(zl.open_dataset(f"{server}/one.zarr", cache=cache), OTHER).gets
    assert mirrors(cache) == []
    with pytest.raises(CacheError, match="no mirror of"):
        zl.open_dataset(f"{server}/one.zarr", cache=cache, offline=True)


def test_a_web_server_with_a_wrong_time(stores, tmp_path):
    reason = pytest.raises(StoreError, match="Invalid last modified 'yesterday'")
    with served(tmp_path, lambda status: {"Last-Modified": "yesterday"}) as server, reason:
        zl.open_dataset(f"{server}/one.zarr")


def test_a_store_in_s3_has_one_mirror_for_all_its_urls(pair, sim, tmp_path):
    server = sim(root=pair.parent)
    copies = [("s3://bucket/one.zarr", server.url), ("s3://bucket/one.zarr/", server.url)]
    copies.append(("s3://bucket/one.zarr", server.url.replace("127.0.0.1", "localhost")))
    gets = []
    for url, endpoint in copies:
        options = {"anon": True, "endpoint_url": endpoint}
        gets.append(read_epoch(zl.open_dataset(url, cache=tmp_path / "cache", storage_options=options), ONE).gets)
    assert gets[0] > 0
    assert gets[1:] == [0, 0]
    assert len(mirrors(tmp_path / "cache")) == 1


# ---- renamed and mixed-up mirrors


@pytest.fixture
def cache(stores, tmp_path) -> Path:
    """A cache with full mirrors of both stores."""
    for store, adata in zip(stores, (ONE, OTHER), strict=True):
        warm(zl.open_dataset(store, cache=tmp_path / "cache"))
        assert epoch(store, tmp_path / "cache", adata).gets == 0
    return tmp_path / "cache"


def swap(one: Path, other: Path) -> None:
    one.rename(one.with_name("away"))
    other.rename(one)
    one.with_name("away").rename(other)


def test_a_mirror_with_the_name_of_another_is_left_alone(stores, cache, caplog):
    directories = [entry_of(cache, store).directory for store in stores]
    swap(*directories)
    content = {path: path.read_bytes() for path in cache.rglob("*.*")}
    for store, adata in zip(stores, (ONE, OTHER), strict=True):
        assert epoch(store, cache, adata).gets
    messages = [record.getMessage() for record in caplog.records]
    assert [f"{directory} was renamed" in message for directory, message in zip(directories, messages, strict=True)]
    assert all(entry.stale for entry in mirrors(cache))
    for directory in directories:
        (problem,) = verify(directory)
        assert "was renamed" in problem
    with pytest.raises(CacheError, match="no mirror of"):
        zl.open_dataset(stores[0], cache=cache, offline=True)
    assert {path: path.read_bytes() for path in cache.rglob("*.*")} == content
    swap(*directories)
    for store, adata in zip(stores, (ONE, OTHER), strict=True):
        assert epoch(store, cache, adata).gets == 0


@pytest.mark.every(3)
@pytest.mark.parametrize("described", ["swapped", "gone", "damaged"])
def test_a_mirror_with_the_name_of_another_and_no_valid_description(stores, cache, described, caplog):
    directories = [entry_of(cache, store).directory for store in stores]
    swap(*directories)
    files = [directory / "mirror.json" for directory in directories]
    if described == "swapped":
        swap(*files)
    for file in files if described != "swapped" else ():
        file.unlink() if described == "gone" else file.write_text("{")
    for store, adata in zip(stores, (ONE, OTHER), strict=True):
        assert epoch(store, cache, adata).gets
        assert epoch(store, cache, adata).gets == 0
    assert any("or was moved" in record.getMessage() for record in caplog.records)
    for store in stores:
        verify(entry_of(cache, store).directory)  # deletes chunks that were not read in the meantime
        assert verify(entry_of(cache, store).directory) == []


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b'{"url": "x"}'])
def test_a_mirror_without_a_valid_description(stores, cache, content):
    file = entry_of(cache, stores[0]).directory / "mirror.json"
    was = json.loads(file.read_bytes())
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    assert epoch(stores[0], cache, ONE).gets == 0
    assert json.loads(file.read_bytes()) | {"made": ""} == was | {"made": ""}


FILES = {
    "rows": ["X.rows"],
    "index": ["X.index"],
    "rows and index": ["X.rows", "X.index"],
    "obs": ["obs%2Flane.array"],
    "obsm": ["obsm%2F%58_pca.array"],
    "listing": ["%2Flisting.kept"],
    "verified marks": ["X.rows", "X.index", "obsm%2F%58_pca.array", "proved.json"],
}


@pytest.mark.slow
@pytest.mark.parametrize("names", FILES.values(), ids=FILES)
@pytest.mark.parametrize("verified", [False, True])
def test_files_swapped_between_mirrors(stores, cache, names, verified):
    directories = [entry_of(cache, store).directory for store in stores]
    for name in names:
        swap(*(directory / name for directory in directories))
    if verified:
        assert all(verify(directory) for directory in directories)
    for store, adata in zip(stores, (ONE, OTHER), strict=True):
        epoch(store, cache, adata)
        assert epoch(store, cache, adata).gets == 0
        assert read_epoch(zl.open_dataset(store, cache=cache, offline=True), adata).gets == 0
    assert all(verify(directory) == [] for directory in directories)


def test_files_swapped_between_arrays(stores, cache, caplog):
    warm(zl.open_dataset(stores[0], cache=cache), x=["X", "layers/twice"])
    directory = entry_of(cache, stores[0]).directory
    for one, other in (("obs%2Flane.array", "obs%2Fn_counts.array"), ("X.rows", "layers%2Ftwice.rows")):
        swap(directory / one, directory / other)
    swap(directory / "X.index", directory / "layers%2Ftwice.index")
    epoch(stores[0], cache, ONE)
    named = {name for name in ("lane", "X.index") for record in caplog.records if name in record.getMessage()}
    assert named == {"lane", "X.index"}
    assert epoch(stores[0], cache, ONE).gets == 0


def test_a_mirror_of_an_older_version_is_stale(stores, cache, caplog):
    one, _ = (entry_of(cache, store) for store in stores)
    older = one.directory.with_name(f"{one.fingerprint}-v3")
    one.directory.rename(older)
    (entry,) = (entry for entry in mirrors(cache) if entry.url == one.url)
    assert (entry.stale, inspect_mirror(entry).chunks_held, verify(older)) == (True, 0, [])
    with pytest.raises(CacheError, match="no mirror of"):
        zl.open_dataset(stores[0], cache=cache, offline=True)
    assert epoch(stores[0], cache, ONE).gets
    assert not caplog.records
