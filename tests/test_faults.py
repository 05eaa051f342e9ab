"""Whatever the server does: the epoch is right to the last value, or the loop gets our error in time. Never silence."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import check_minibatch, counts, write_store

import zloader as zl
from zloader.errors import (
    AccessDeniedError,
    CorruptChunkError,
    DeadlineError,
    MissingObjectError,
    ReadError,
    StoreError,
    TruncatedObjectError,
)

ADATA = counts(200, 53, seed=4)
ELEMENTS = "X/(indices|data)/c/"  # the objects that TensorStore reads


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bucket")
    write_store(ADATA, folder / "atlas" / "counts.zarr", folder)
    return folder


def loader_over(server, *, cache=None, **options) -> zl.Loader:
    storage_options = {"key": "any", "secret": "any", "endpoint_url": server.url}
    dataset = zl.open_dataset("s3://atlas/counts.zarr", cache=cache, storage_options=storage_options)
    return zl.Loader(
        dataset,
        batch_size=8,
        fetch_factor=4,
        sampling=zl.BlockShuffling(4),
        options=zl.FetchOptions(**({"deadline_s": 5.0} | options)),
    )


def epoch(loader: zl.Loader) -> list[int]:
    return sorted(np.concatenate([check_minibatch(minibatch, ADATA) for minibatch in loader]))


PASSING = {
    "503 SlowDown": {"kind": "status", "status": 503, "code": "SlowDown", "count": 4},
    "500": {"kind": "status", "status": 500, "code": "InternalError", "count": 3},
    "429": {"kind": "status", "status": 429, "code": "TooManyRequests", "count": 3},
    "reset before the head": {"kind": "reset", "after": -1, "count": 3},
    "reset in the body": {"kind": "reset", "after": 50, "count": 3},
    "truncated body": {"kind": "truncate", "after": 50, "count": 3},
    "flipped byte": {"kind": "flip", "count": 1},
    "a byte too few": {"kind": "short", "by": 1, "count": 1},
    "no Content-Length, cut short": {"kind": "noclen", "after": 40, "count": 1},
    "slow answers": {"kind": "delay", "seconds": 0.3, "count": 10},
}


@pytest.mark.parametrize("cached", [False, True], ids=["no mirror", "mirror"])
@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_what_passes_leaves_the_epoch_right(bucket, sim, tmp_path, fault, cached):
    server = sim(root=bucket)
    loader = loader_over(server, cache=tmp_path / "cache" if cached else None)
    loader.dataset.indptr(loader.dataset.matrix())
    server.faults = [{"match": ELEMENTS, **fault}]
    assert epoch(loader) == list(range(200))
    assert server.stats()[f"fault_{fault['kind']}"] == fault["count"]
    assert epoch(loader) == list(range(200))


LASTING = {
    "500 for ever": ({"kind": "status", "status": 500, "code": "InternalError"}, ReadError, None),
    "403 for ever": ({"kind": "status", "status": 403, "code": "AccessDenied"}, AccessDeniedError, "is not allowed"),
    "404": ({"kind": "status", "status": 404, "code": "NoSuchKey"}, MissingObjectError, "no such object"),
    "flipped bytes": ({"kind": "flip"}, CorruptChunkError, None),
    "never enough bytes": ({"kind": "short", "by": 1}, StoreError, None),
    "range ignored": ({"kind": "ignore_range"}, StoreError, None),
    "a stall": ({"kind": "stall", "after": 10}, DeadlineError, "deadline_s=1.5"),
    "a drip": ({"kind": "slow", "bps": 10}, DeadlineError, "deadline_s=1.5"),
}


@pytest.mark.parametrize("cached", [False, True], ids=["no mirror", "mirror"])
@pytest.mark.parametrize(("fault", "error", "says"), LASTING.values(), ids=LASTING)
def test_what_lasts_is_an_error_that_names_key_and_bytes(bucket, sim, tmp_path, fault, error, says, cached):
    server = sim(root=bucket)
    loader = loader_over(server, cache=tmp_path / "cache" if cached else None, deadline_s=1.5)
    loader.dataset.indptr(loader.dataset.matrix())
    server.faults = [{"match": f"{ELEMENTS}1$", **fault}]
    # The simulator drips by pacing the connection, which may hit the answer after the one meant.
    shard = r"\d" if fault["kind"] == "slow" else "1"
    with pytest.raises(error, match=says) as caught:
        epoch(loader)
    assert re.search(rf"s3://atlas/counts.zarr.*X/(indices|data)/c/{shard}\b", str(caught.value))
    assert re.search(r"bytes \d+-\d+", str(caught.value))
    server.faults = []
    loader.set_epoch(0)
    assert epoch(loader) == list(range(200))  # the loader is none the worse for it


def test_a_server_that_is_gone_is_an_error_cold_and_none_warm(bucket, sim, tmp_path):
    server = sim(root=bucket)
    warm = loader_over(server, cache=tmp_path / "cache")
    cold = loader_over(server, deadline_s=1.5)
    cold.dataset.indptr(cold.dataset.matrix())
    assert epoch(warm) == list(range(200))
    server.stop()
    assert epoch(warm) == list(range(200))
    with pytest.raises(StoreError, match="X/"):
        epoch(cold)


def test_an_object_cut_short_under_a_running_loader(bucket, sim, tmp_path):
    shutil.copytree(bucket, tmp_path / "bucket")
    server = sim(root=tmp_path / "bucket")
    loader = loader_over(server)
    loader.dataset.indptr(loader.dataset.matrix())
    victim = tmp_path / "bucket" / "atlas" / "counts.zarr" / "X" / "data" / "c" / "1"
    victim.write_bytes(victim.read_bytes()[:-30])
    with pytest.raises((TruncatedObjectError, CorruptChunkError, ReadError), match="X/data/c/1"):
        epoch(loader)
