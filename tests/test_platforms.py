"""zloader without the calls that only Linux has, as on macOS. These tests take the calls away; none ran on macOS."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from helpers import PATIENCE_S, counts, write_store

from zloader.access.s3 import s3_access
from zloader.caching.directory import cached_path
from zloader.caching.leases import Leases
from zloader.common.machine import available_cores
from zloader.reading.tensorstore_reader import Credentials

# The libraries are imported first, because they have their own ways to find out the platform.
_WITHOUT_LINUX = """
import fcntl, json, os, pathlib, sys
import asyncio, ctypes, multiprocessing.context, numba, numcodecs, pandas, torch.utils.data, zarr
for module, names in {
    os: ["memfd_create", "pidfd_open", "posix_fadvise", "posix_fallocate", "sched_getaffinity", "sendfile", "splice"],
    fcntl: ["F_OFD_SETLK", "F_OFD_SETLKW", "F_OFD_GETLK"],
}.items():
    for name in names:
        delattr(module, name)
for name in [name for name in dir(os) if name.startswith(("RWF_", "POSIX_FADV_", "MFD_"))]:
    delattr(os, name)
os.process_cpu_count = os.cpu_count  # Python 3.13 implements it with sched_getaffinity

class NoLinux:  # a C library without the functions of Linux
    def __getattr__(self, name):
        raise AttributeError(name)

load = ctypes.CDLL
ctypes.CDLL = lambda name, *arguments, **options: NoLinux() if name is None else load(name, *arguments, **options)
read_text = pathlib.Path.read_text

def without_proc(path, *arguments, **options):
    if path.parts[1:2] in (("proc",), ("sys",)):
        raise FileNotFoundError(path)
    return read_text(path, *arguments, **options)

pathlib.Path.read_text = without_proc
sys.platform = "darwin"
"""
_EPOCHS = """
import zloader as zl
store, cache, max_bytes = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
found = []
for _ in range(2):
    dataset = zl.open_dataset(store, cache=zl.Cache(cache, max_bytes=max_bytes))
    loader = zl.Loader(dataset, batch_size=16, obs=["cell_type"], seed=1)
    for _ in range(2):
        sums = {}
        for minibatch in loader:
            for row, total in zip(minibatch.index.tolist(), minibatch.x.to_dense().sum(1).tolist()):
                sums[row] = total
        found.append([sums[row] for row in range(len(sums))])
cached = dataset.cache_statistics()
print(json.dumps([found, loader.statistics().gets, cached.chunks_held, cached.chunks, cached.allocated_bytes]))
"""
ADATA = counts(200, 30)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    write_store(ADATA, folder / "cells.zarr", folder)
    return folder / "cells.zarr"


@pytest.mark.any_version
@pytest.mark.slow
@pytest.mark.parametrize("limit", [pytest.param(None, id="unlimited"), pytest.param(400 * 1024, id="limited")])
def test_a_cached_epoch(store, tmp_path, limit):
    command = [sys.executable, "-c", _WITHOUT_LINUX + _EPOCHS, store, tmp_path / "cache", json.dumps(limit)]
    for _ in range(2):  # the second process finds the mirror of the first
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, done.stderr
        epochs, gets, held, chunks, allocated = json.loads(done.stdout)
        sums = np.asarray(ADATA.X.sum(axis=1)).ravel().tolist()
        assert epochs == 4 * [sums]
        if limit is None:
            assert (gets, held) == (0, chunks)
        else:
            assert allocated <= limit


_CONVERT = """
import zloader as zl
report = zl.convert(sys.argv[1], sys.argv[2], progress=False)
print(json.dumps(zl.verify(sys.argv[2], against=sys.argv[1], progress=False).ok))
"""


@pytest.mark.any_version
@pytest.mark.slow
def test_a_conversion(store, tmp_path):
    command = [sys.executable, "-c", _WITHOUT_LINUX + _CONVERT, store.parent / "source.h5ad", tmp_path / "cells.zarr"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout) == (0, "true\n"), done.stderr


def test_all_cores_count_where_affinity_is_unknown(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    assert available_cores() == os.cpu_count()


def test_no_chunk_is_leased_without_locks_of_open_files(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "darwin")  # whose struct flock differs
    one, other = Leases(tmp_path), Leases(tmp_path)
    words = np.array([1 << 33 | 7, 0], np.uint64)  # the lease of a process on Linux
    for leases in (one, other):
        assert leases.word == 0
        assert not leases.alive(words).any()
        with leases.exclusive():
            pass


@pytest.fixture
def credentials(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return Credentials()


def test_credentials_go_through_a_private_temporary_file(credentials, tmp_path):
    access = s3_access({"key": "k", "secret": "s-77", "endpoint_url": "http://127.0.0.1:9"})
    for _ in range(2):
        path = credentials.spec(access)["credentials_file"]
        (file,) = tmp_path.iterdir()
        assert path == str(file)
        assert file.stat().st_mode & 0o777 == 0o600
        assert "s-77" in file.read_text()
    forked = os.fork()
    if forked == 0:
        credentials._end()
        os._exit(0)
    os.waitpid(forked, 0)
    assert file.exists()
    credentials._end()
    assert not file.exists()


def test_names_that_differ_in_case_have_files_that_differ_in_more(tmp_path):
    """Many disks of macOS and Windows take x.array and X.array for the same file."""
    names = ["layers/a/data", "layers/A/data", "obs/ä", "obs/Ä", "obs/é", "obs/É", "obs/%41", "obs/A", "obs/a%2Fb"]
    files = [cached_path(tmp_path, name, "array").name for name in names]
    assert len({file.lower() for file in files}) == len(names)
    assert cached_path(tmp_path, "X/indptr", "array").name == "X%2Findptr.array"
