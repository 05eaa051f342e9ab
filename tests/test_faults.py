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
    StoreChangedError,
    StoreError,
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


@pytest.fixture(params=["disk", "simulated S3", "S3"])
def running(request, bucket, tmp_path):
    """A loader over a store of which the first epoch is over, and what changes one of its objects."""
    if request.param == "S3":
        s3 = request.getfixturevalue("s3")
        write_store(ADATA, s3.url("counts.zarr"), tmp_path, storage_options=s3.storage_options)
        dataset = zl.open_dataset(s3.url("counts.zarr"), storage_options=s3.storage_options)
        filesystem, root = dataset.location.filesystem(), dataset.location.path

        def change(key, edit):
            filesystem.pipe_file(f"{root}/{key}", edit(filesystem.cat_file(f"{root}/{key}")))
    else:
        store = tmp_path / "bucket" / "atlas" / "counts.zarr"
        shutil.copytree(bucket, tmp_path / "bucket")

        def change(key, edit):
            (store / key).write_bytes(edit((store / key).read_bytes()))

        if request.param == "disk":
            dataset = zl.open_dataset(store)
        else:
            dataset = loader_over(request.getfixturevalue("sim")(root=tmp_path / "bucket")).dataset
    loader = zl.Loader(dataset, batch_size=8, fetch_factor=2, sampling=zl.BlockShuffling(2))
    assert epoch(loader) == list(range(200))
    return loader, change


@pytest.mark.parametrize("edit", [lambda old: old[:-30], lambda old: old[::-1]], ids=["shorter", "other bytes"])
def test_an_object_overwritten_between_epochs(running, edit):
    loader, change = running
    change("X/data/c/1", edit)
    with pytest.raises(StoreChangedError, match=r"X/data/c/1 bytes .*Open it again"):
        epoch(loader)


def test_an_object_overwritten_in_mid_epoch(running):
    loader, change = running
    minibatches = iter(loader)
    next(minibatches)
    for shard in range(3):
        change(f"X/data/c/{shard}", lambda old: old[::-1])
    with pytest.raises(StoreChangedError, match=r"X/data/c/\d bytes .*Open it again"):
        epoch(minibatches)


def test_an_object_whose_tag_changes_with_every_answer(bucket, sim):
    server = sim(root=bucket)
    loader = loader_over(server)
    loader.dataset.indptr(loader.dataset.matrix())
    server.faults = [{"kind": "etag", "match": f"{ELEMENTS}1$", "value": '"another"', "count": 1, "skip": 1}]
    with pytest.raises(StoreChangedError, match="X/"):
        epoch(loader)
