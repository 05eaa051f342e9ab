"""The speed of the link: what it delivers in bounded time, without decoding."""

from __future__ import annotations

import pytest
from helpers import counts, write_store

import zloader as zl
from zloader.insight.link import link_bytes_per_s

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
