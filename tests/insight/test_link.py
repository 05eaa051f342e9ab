"""The speed of the link and of the disk: what they deliver in bounded time, without decoding."""

from __future__ import annotations

import os
import threading

import pytest
from helpers import counts, write_store

import zloader as zl
from zloader.common import page_cache
from zloader.insight import link
from zloader.insight.link import disk_bytes_per_s, link_bytes_per_s

pytestmark = pytest.mark.any_version

ACCESS = {"key": "any", "secret": "any"}


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    folder = tmp_path_factory.mktemp("link")
    write_store(counts(503, 97), folder / "atlas" / "counts.zarr", folder)
    return folder


def opened(server):
    client = {"endpoint_url": server.url, "region_name": "us-east-1"}
    return zl.open_dataset("s3://atlas/counts.zarr", storage_options={**ACCESS, "client_kwargs": client})


def test_it_is_at_most_what_the_server_sends(bucket, sim):
    with_limit = opened(sim(root=bucket, total_mbps=2))
    speed = link_bytes_per_s(with_limit, options=zl.FetchOptions(), enough_s=0.2)
    assert speed is not None
    assert 0 < speed < 4e6, "a machine that is busy can only be slower; the server may send a burst first"


def test_a_local_store_and_one_without_values(bucket, tmp_path):
    speed = link_bytes_per_s(zl.open_dataset(bucket / "atlas" / "counts.zarr"), options=zl.FetchOptions(), enough_s=0)
    assert speed is not None
    assert speed > 0
    empty = counts(20, 5)
    empty.X = empty.X * 0
    empty.X.eliminate_zeros()
    write_store(empty, tmp_path / "empty.zarr", tmp_path)
    assert link_bytes_per_s(zl.open_dataset(tmp_path / "empty.zarr"), options=zl.FetchOptions(), enough_s=0) is None


def test_a_server_that_stalls_is_given_up(bucket, sim):
    server = sim(root=bucket)
    dataset = opened(server)
    dataset.matrices.layouts("X")
    server.faults = [{"match": "X/(indices|data)/c/", "kind": "stall"}]
    assert link_bytes_per_s(dataset, options=zl.FetchOptions(), enough_s=0, most_s=0.2) is None


def test_a_read_that_fails_is_raised(bucket, sim):
    server = sim(root=bucket)
    dataset = opened(server)
    dataset.matrices.layouts("X")
    server.faults = [{"match": "X/(indices|data)/c/", "kind": "status", "status": 403}]
    with pytest.raises(zl.ZloaderError, match=r"403|denied|not allowed"):
        link_bytes_per_s(dataset, options=zl.FetchOptions(retries=0), enough_s=0)


# ---- the disk


@pytest.fixture
def local(bucket):
    """A local store that is on its disk, and not only in memory."""
    for path in (bucket / "atlas").rglob("c/*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return zl.open_dataset(bucket / "atlas" / "counts.zarr")


def assumes_disk(monkeypatch, *, dropped: bool, counted: bool) -> None:
    """A kernel that drops pages or not, and counts 64 MiB of reads a call or none, whatever the disk of the tests."""
    totals = iter(range(0, 1 << 40, 1 << 26) if counted else [0] * 9)
    monkeypatch.setattr(page_cache, "drop", lambda *_: dropped)
    monkeypatch.setattr(link, "disk_bytes", lambda: next(totals))


def test_the_disk_counts_only_what_was_read_from_it(local, monkeypatch):
    monkeypatch.setattr(link, "_LEAST_DISK_BYTES", 1)
    monkeypatch.setattr(link, "MOST_BYTES", 1 << 20)
    assumes_disk(monkeypatch, dropped=True, counted=True)
    assert disk_bytes_per_s(local, enough_s=60) > 0
    assumes_disk(monkeypatch, dropped=False, counted=True)
    assert disk_bytes_per_s(local, enough_s=60) is None, "the files stay in memory"
    assumes_disk(monkeypatch, dropped=True, counted=False)
    assert disk_bytes_per_s(local, enough_s=60) is None, "the kernel does not count reads of this file system"
    monkeypatch.setattr(link, "disk_bytes", lambda: None)
    assert disk_bytes_per_s(local, enough_s=60) is None, "the system does not tell"


def test_a_disk_that_hangs_is_given_up(local, monkeypatch):
    assumes_disk(monkeypatch, dropped=True, counted=True)
    go_on = threading.Event()
    monkeypatch.setattr(page_cache, "drop", lambda *_: go_on.wait())
    try:
        assert disk_bytes_per_s(local, most_s=0.1) is None
    finally:
        go_on.set()


def test_a_disk_that_fails_is_an_error(local, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    assumes_disk(monkeypatch, dropped=True, counted=True)
    monkeypatch.setattr(page_cache, "drop", fail)
    with pytest.raises(OSError, match="Input/output error"):
        disk_bytes_per_s(local)


@pytest.mark.skipif(link.disk_bytes() is None, reason="needs Linux")
def test_bytes_that_are_dropped_are_read_from_the_disk_again(local, bucket):
    (path, *_) = sorted((bucket / "atlas").rglob("X/data/c/*"))
    size = path.stat().st_size
    with path.open("rb") as file:
        assert len(file.read()) == size
        assert page_cache._in_memory(file.fileno(), 0)
        if not page_cache.drop(file.fileno(), 0, size):
            pytest.skip("files of this directory stay in memory")
        assert not page_cache._in_memory(file.fileno(), 0)
        before = link.disk_bytes()
        os.pread(file.fileno(), size, 0)
        assert page_cache._in_memory(file.fileno(), 0)
        assert link.disk_bytes() >= before
