"""Where a cache is: in the directory that the user names, or in a subdirectory if that has other contents."""

from __future__ import annotations

import os
import pickle
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers import PATIENCE_S, counts, write_store

import zloader as zl
from zloader.caching.directory import MirrorDirectory, mirrors, open_mirror_directory, place_of
from zloader.common import file_systems
from zloader.common.errors import CacheError, OptionError
from zloader.common.file_systems import has_stable_inodes, shared_file_system
from zloader.common.options import Cache
from zloader.insight.doctor import about_cache

pytestmark = pytest.mark.any_version

PRINT = "f" * 32


def _missing(directory):
    directory.rmdir()


def _empty(directory):
    pass


def _a_cache(directory):
    MirrorDirectory(Cache(directory), PRINT, "store")


def _a_cache_with_other_things(directory):
    _a_cache(directory)
    (directory / "notes.txt").touch()


def _with_other_things(directory):
    (directory / "notes.txt").touch()


def _with_another_directory(directory):
    (directory / "other").mkdir()


@pytest.mark.parametrize(
    ("before", "subdirectory"),
    [
        (_missing, ""),
        (_empty, ""),
        (_a_cache, ""),
        (_a_cache_with_other_things, ""),
        (_with_other_things, "zloader"),
        (_with_another_directory, "zloader"),
    ],
)
def test_a_directory_with_other_contents_gets_a_subdirectory(tmp_path, before, subdirectory):
    directory = tmp_path / "cache"
    directory.mkdir()
    before(directory)
    contents = set(directory.iterdir()) if directory.exists() else set()
    place = directory / subdirectory
    for _ in range(2):
        assert place_of(directory) == place
        assert MirrorDirectory(Cache(directory), PRINT, "store").path.parent == place
    assert [entry.directory.parent for entry in mirrors(place)] == [place]
    if subdirectory:
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
        assert set(directory.iterdir()) == contents | {place}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    write_store(counts(100, 20), folder / "cells.zarr", folder)
    return folder / "cells.zarr"


def test_a_dataset_uses_the_subdirectory(store, tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CacheError, match=f"there is no mirror of .* in {tmp_path / 'zloader'}"):
        zl.open_dataset(store, cache=tmp_path, offline=True)
    zl.warm(zl.open_dataset(store, cache=tmp_path))
    dataset = zl.open_dataset(store, cache=tmp_path, offline=True)
    dataset.read_rows(np.array([5, 3]))
    cached = pickle.loads(pickle.dumps(dataset)).cache_statistics()
    assert cached.directory == tmp_path / "zloader"
    assert cached.chunks_held == cached.chunks > 0


@pytest.mark.parametrize("offline", [False, True])
def test_a_file_is_refused(store, tmp_path, offline):
    (tmp_path / "file").touch()
    for cache in (tmp_path / "file", zl.Cache(tmp_path / "file")):
        with pytest.raises(OptionError, match=r"the cache .*file is a file: give the path of a directory"):
            zl.open_dataset(store, cache=cache, offline=offline)


def _a_link(directory):
    (directory / "elsewhere").mkdir(mode=0o700)
    (directory / "zloader").symlink_to(directory / "elsewhere")


def _a_broken_link(directory):
    (directory / "zloader").symlink_to(directory / "elsewhere")


def _open_to_others(directory):
    (directory / "zloader").mkdir()
    (directory / "zloader").chmod(0o755)


def _of_another_user(directory):
    if os.geteuid():
        pytest.skip("only root can give files away")
    (directory / "zloader").mkdir(mode=0o700)
    os.chown(directory / "zloader", 12345, 12345)


def _not_a_directory(directory):
    (directory / "zloader").touch()


def _where_all_may_rename(directory):
    directory.chmod(0o777)


@pytest.mark.parametrize(
    "prepare", [_a_link, _a_broken_link, _open_to_others, _of_another_user, _not_a_directory, _where_all_may_rename]
)
def test_a_subdirectory_that_others_could_have_made_is_not_used(tmp_path, caplog, prepare):
    (tmp_path / "notes.txt").touch()
    prepare(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert open_mirror_directory(Cache(tmp_path), PRINT, "store") is None
    (record,) = caplog.records
    assert f"cannot keep a mirror in {tmp_path}" in record.getMessage()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_subdirectory_of_a_directory_like_tmp_is_used(tmp_path, caplog):
    (tmp_path / "notes.txt").touch()
    tmp_path.chmod(0o1777)
    assert open_mirror_directory(Cache(tmp_path), PRINT, "store").place == tmp_path / "zloader"
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.parametrize("others", [False, True])
def test_processes_that_start_at_once_agree(tmp_path, others):
    n_threads = 8
    barrier = threading.Barrier(n_threads)

    def make(directory: Path) -> Path:
        barrier.wait(timeout=PATIENCE_S)
        return MirrorDirectory(Cache(directory), PRINT, "store").path

    with ThreadPoolExecutor(n_threads) as threads:
        for attempt in range(50):
            directory = tmp_path / str(attempt)
            if others:
                (directory / "other").mkdir(parents=True)
            (path,) = set(threads.map(make, [directory] * n_threads))
            assert path.parent == (directory / "zloader" if others else directory)


# ---- which file systems


@pytest.mark.parametrize(
    ("magic", "name", "stable"),
    [
        (0xEF53, None, True),  # ext4
        (0x01021994, None, True),  # tmpfs
        (0x794C7630, None, True),  # overlayfs
        (0x2011BAB0, None, False),  # exfat
        (0x6969, "NFS", True),
        (0x0BD00BD0, "Lustre", True),
        (0x65735546, "FUSE", False),
        (0x12345678, None, False),
        (None, None, False),
    ],
)
def test_file_systems(monkeypatch, tmp_path, magic, name, stable):
    monkeypatch.setattr(file_systems, "_magic", lambda _: magic)
    assert (shared_file_system(tmp_path), has_stable_inodes(tmp_path)) == (name, stable)


def test_there_is_no_cache_on_a_file_system_that_machines_share(tmp_path, monkeypatch):
    write_store(counts(20, 5), tmp_path / "a.zarr", tmp_path)
    shared = tmp_path / "shared"
    monkeypatch.setattr(file_systems, "_magic", lambda path: 0x6969 if Path(path) == tmp_path else 0xEF53)
    with pytest.raises(OptionError, match=r"shared/cache is on NFS, .* a directory on a local disk, or no cache"):
        zl.open_dataset(tmp_path / "a.zarr", cache=shared / "cache")
    (found,) = about_cache(shared / "cache")
    assert (found.name, found.state) == ("place", "broken")
    assert "is on NFS" in found.advice
    assert not shared.exists()
    assert sum(map(len, zl.Loader(zl.open_dataset(tmp_path / "a.zarr"), batch_size=8))) == 20
    (tmp_path / "local").mkdir()
    assert zl.open_dataset(tmp_path / "a.zarr", cache=tmp_path / "local").cache_statistics().chunks_held == 0
