"""For every fault of the server, the epoch is exactly right, or the training loop gets a zloader error in time."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import NEVER_S, PATIENCE_S, assert_threads_end, check_minibatch, counts, fetch_options, write_store
from hypothesis import given
from hypothesis import strategies as st

import zloader as zl
from benchmarks.harness.s3 import Sim
from zloader.common.errors import (
    AccessDeniedError,
    CorruptChunkError,
    DeadlineError,
    MissingObjectError,
    ReadError,
    StoreChangedError,
    StoreError,
    TruncatedObjectError,
)
from zloader.reading import object_source
from zloader.reading.tensorstore_reader import classify_failure

pytestmark = pytest.mark.any_version

ADATA = counts(200, 53, seed=4)
ROWS = list(range(200))
ELEMENTS = "X/(indices|data)/c/"  # the objects read through TensorStore: each shard's index first, then its chunks
SECRET = "not-to-be-shown"
PLACE = r"^s3://atlas/counts.zarr: .*\bX/(indices|data)/c/\d\b"


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bucket")
    write_store(ADATA, folder / "atlas" / "counts.zarr", folder)
    return folder


PATIENT = {"deadline_s": PATIENCE_S}


def loader_over(server, *, cache=None, **options) -> zl.Loader:
    """A loader that has not yet read any elements of X."""
    storage_options = {"key": "any", "secret": SECRET, "endpoint_url": server.url}
    dataset = zl.open_dataset("s3://atlas/counts.zarr", cache=cache, storage_options=storage_options)
    dataset.store.offsets(dataset.store.matrix("X")).load()
    return zl.Loader(
        dataset,
        batch_size=8,
        fetch_factor=4,
        sampling=zl.BlockShuffling(4),
        options=fetch_options(**(PATIENT | options)),
    )


def epoch(loader: zl.Loader) -> list[int]:
    return sorted(np.concatenate([check_minibatch(minibatch, ADATA) for minibatch in loader]))


# ---- the table


@dataclass(frozen=True, kw_only=True)
class Row:
    """A fault and its consequences.

    An epoch survives `passing` occurrences of it (None: not even one). If it persists, it raises `error` (None:
    nothing) with a message that matches `says`.
    """

    fault: dict[str, Any]
    passing: int | None
    error: type[StoreError] | None
    says: str = ""
    options: dict[str, Any] = field(default_factory=lambda: {"retries": 3})  # if the fault persists


def status(number: int, code: str, **row: Any) -> Row:
    fault = {"kind": "status", "status": number, "code": code}
    says = rf"failed \(last answer: {number} {code}: .*; attempt 4, after \d+\.\d s\)\. Is the server"
    return Row(**({"fault": fault, "passing": 3, "error": ReadError, "says": says} | row))


def broken(kind: str, after: int, says: str) -> Row:
    says = rf"failed \(last answer: CURL error .*{says}.*; attempt 4, "
    return Row(fault={"kind": kind, "after": after}, passing=3, error=ReadError, says=says)


def refused(number: int, code: str) -> Row:
    says = rf"was denied \(last answer: {number} {code}: .*; attempt 1, .*Check the key and secret.*expired"
    return status(number, code, passing=None, error=AccessDeniedError, says=says)


IN_TIME = {"deadline_s": 1.5}
LATE = r"did not finish within deadline_s=1\.5 \(last answer: none; attempt \d, after \d+\.\d s\)\. Is the server"
CUT = r"failed \(last answer: .*; attempt 4, .*The object is truncated\. Restore"
FAULTS = {
    "500": status(500, "InternalError"),
    "503": status(503, "ServiceUnavailable"),
    "429": status(429, "TooManyRequests"),
    "503 SlowDown, past the deadline": status(
        503,
        "SlowDown",
        passing=None,
        error=DeadlineError,
        says=r"deadline_s=3\.0 \(last answer: 503 SlowDown: .*; attempt \d, after \d+\.\d s\)",
        options={"deadline_s": 3.0},
    ),
    "502 of a load balancer": status(
        502, "", passing=None, fault={"kind": "status", "status": 502, "body": "<html>"}, says="502 "
    ),
    "reset before the head": broken("reset", -1, "Failure when receiving"),
    "reset in the body": broken("reset", 50, "Failure when receiving"),
    "truncated body": broken("truncate", 10, "bytes missing"),
    "no Content-Length, cut short": Row(
        fault={"kind": "noclen", "after": 10}, passing=1, error=TruncatedObjectError, says=CUT
    ),
    "a byte too few": Row(fault={"kind": "short", "by": 1}, passing=2, error=TruncatedObjectError, says=CUT),
    "range ignored": Row(
        fault={"kind": "ignore_range"}, passing=2, error=ReadError, says=r"ignored by server; attempt 4, .*proxy"
    ),
    "stall": Row(fault={"kind": "stall", "after": 10}, passing=None, error=DeadlineError, says=LATE, options=IN_TIME),
    "stall before the head": Row(
        fault={"kind": "delay", "seconds": NEVER_S}, passing=None, error=DeadlineError, says=LATE, options=IN_TIME
    ),
    "drip": Row(fault={"kind": "slow", "bps": 10}, passing=None, error=DeadlineError, says=LATE, options=IN_TIME),
    "slow answers": Row(fault={"kind": "delay", "seconds": 0.1}, passing=10, error=None),
    "flipped byte in a shard index": Row(
        fault={"kind": "flip", "skip": 0}, passing=1, error=CorruptChunkError, says=r"c/1 bytes \d+-\d+: .*Restore"
    ),
    "flipped byte in a chunk": Row(
        fault={"kind": "flip"},
        passing=1,
        error=CorruptChunkError,
        says=r"chunk \d+ of X/.*, bytes \d+-\d+ of X/.*Restore",
    ),
    "changed ETag": Row(
        fault={"kind": "etag"},
        passing=None,
        error=StoreChangedError,
        says="has changed since the store was opened. Open the store again",
    ),
    "404": Row(
        fault={"kind": "status", "status": 404, "code": "NoSuchKey"},
        passing=None,
        error=MissingObjectError,
        says="failed .*the object does not exist; attempt 1, .*changed or deleted",
    ),
    "403": refused(403, "AccessDenied"),
    "expired credentials, as S3 says it": refused(400, "ExpiredToken"),
    "expired credentials, as others say it": refused(403, "ExpiredToken"),
    "400": status(400, "InvalidRequest", passing=None, says="400 InvalidRequest: .*attempt 1, .*would not help"),
}


def start_fault(server: Sim, row: Row, *, count: int | None) -> None:
    """Starts the fault in mid-epoch: a shard's index is still read correctly, unless the fault sets another `skip`."""
    server.faults = [{"match": "X/data/c/1$", "skip": 1, "count": count, **row.fault}]


@pytest.mark.slow
@pytest.mark.parametrize("row", [pytest.param(row, id=name) for name, row in FAULTS.items() if row.passing])
def test_what_passes_leaves_the_epoch_right_and_the_mirror(bucket, sim, tmp_path, row):
    server = sim(root=bucket)
    loader = loader_over(server, cache=tmp_path / "cache")
    start_fault(server, row, count=row.passing)
    assert epoch(loader) == ROWS
    assert server.stats()[f"fault_{row.fault['kind']}"] >= 1
    server.stop()
    assert epoch(loader) == ROWS


@pytest.mark.slow
@pytest.mark.parametrize("row", [pytest.param(row, id=name) for name, row in FAULTS.items() if row.error])
def test_what_lasts_raises_in_time_and_leaves_nothing_behind(bucket, sim, tmp_path, row, caplog):
    caplog.set_level("DEBUG", "zloader")
    server = sim(root=bucket)
    loader = loader_over(server, cache=tmp_path / "cache", **row.options)
    start_fault(server, row, count=None)
    with pytest.raises(row.error, match=row.says) as caught:
        epoch(loader)
    assert type(caught.value) is row.error
    assert re.search(PLACE, str(caught.value))
    assert re.search(r"\bbytes \d+-\d+\b", str(caught.value))
    assert SECRET not in str(caught.value) + caplog.text
    assert_threads_end()
    server.faults = []
    loader.options = fetch_options(**PATIENT)
    loader.set_epoch(0)
    assert epoch(loader) == ROWS  # the loader and the mirror still work


# ---- faults that last for a while


@contextlib.contextmanager
def doing(act: Callable[[], object], *, when: Callable[[], object]) -> Iterator[None]:
    """Calls `act` on a thread as soon as `when` is true, which it must be before the block ends."""
    done = threading.Event()

    def wait() -> None:
        while not (now := bool(when())) and not done.wait(0.01):
            pass
        if now:
            act()
        acted.append(now)

    acted: list[bool] = []
    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    assert acted == [True]


@pytest.mark.slow
def test_a_storm_of_slow_downs(bucket, sim, caplog, monkeypatch):
    monkeypatch.setattr(object_source, "_WARN_S", 0.5)
    caplog.set_level("DEBUG", "zloader")
    server = sim(root=bucket)
    loader = loader_over(server)
    server.faults = [{"kind": "status", "match": ELEMENTS}]

    def warnings() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.levelname == "WARNING"]

    began = time.monotonic()
    with doing(lambda: setattr(server, "faults", []), when=lambda: warnings() and server.stats()["status_503"] > 20):
        assert epoch(loader) == ROWS
    warned = warnings()
    assert len(warned) < (time.monotonic() - began) / 0.5  # although eight reads keep failing
    assert re.search(rf"{PLACE} bytes .*last answer: 503 SlowDown.*attempt \d.*retrying in", warned[0].getMessage())
    again = [record for record in caplog.records if "retrying in" in record.getMessage()]
    assert len(again) == server.stats()["status_503"] == loader.statistics().retries


@pytest.mark.slow
def test_a_server_that_is_gone_and_comes_back(bucket, sim, caplog):
    caplog.set_level("DEBUG", "zloader")
    server = sim(root=bucket)
    loader = loader_over(server)
    server.stop()
    with doing(lambda: sim(root=bucket, port=server.port), when=lambda: "attempt 4" in caplog.text):
        assert epoch(loader) == ROWS


@pytest.mark.slow
def test_a_server_that_is_gone_is_an_error_cold_and_none_warm(bucket, sim, tmp_path):
    server = sim(root=bucket)
    warm = loader_over(server, cache=tmp_path / "cache")
    cold = loader_over(server, retries=3)
    assert epoch(warm) == ROWS
    server.stop()
    assert epoch(warm) == ROWS
    with pytest.raises(ReadError, match=f"{PLACE} bytes .*Could not connect.*attempt 4"):
        epoch(cold)
    assert_threads_end()
    sim(root=bucket, port=server.port)
    assert epoch(cold) == ROWS


@pytest.mark.slow
def test_a_server_whose_every_answer_stalls(bucket, sim):
    """The check whether the object has changed, which does not go through TensorStore, must not block either."""
    server = sim(root=bucket)
    loader = loader_over(server, deadline_s=1.5)
    short = {"kind": "short", "by": 1, "match": ELEMENTS}
    server.faults = [short, {"kind": "delay", "seconds": NEVER_S, "method": "HEAD"}]
    with pytest.raises(DeadlineError, match=f"{PLACE} bytes .*deadline_s"):
        epoch(loader)
    server.faults = []
    loader.options = fetch_options(**PATIENT)
    assert epoch(loader) == ROWS


_STALLS = """
import json, sys
import zloader as zl
dataset = zl.open_dataset("s3://atlas/counts.zarr", storage_options=json.loads(sys.argv[1]))
loader = zl.Loader(dataset, batch_size=8, fetch_factor=4, sampling=zl.BlockShuffling(4))
print(sum(map(len, loader)), loader.statistics().retries)
"""


@pytest.mark.slow
@pytest.mark.parametrize("fault", [{"kind": "stall", "after": 10}, {"kind": "delay", "seconds": NEVER_S}])
def test_a_connection_that_stalls_is_closed_and_its_read_is_made_again(bucket, sim, interpreter, fault):
    server = sim(root=bucket)
    server.faults = [{"match": "X/data/c/1$", "skip": 1, "count": 1, **fault}]
    options = {"key": "any", "secret": SECRET, "endpoint_url": server.url}
    done = interpreter.run(_STALLS, json.dumps(options), TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS="1")  # instead of 20
    assert done.stdout.split() == ["200", "1"], done.stderr


@pytest.mark.slow
def test_where_every_read_is_slow_none_is_asked_for_twice(bucket, sim, tmp_path):
    """A second read of each span would only take bandwidth from the first."""
    server = sim(root=bucket)
    loader = loader_over(server, cache=tmp_path / "cache")
    loader.fetch_factor = 25  # all rows, because two fetches would read the chunk between their rows twice
    server.tally.clear()
    server.faults = [{"kind": "delay", "seconds": 1.0}]
    assert epoch(loader) == ROWS
    asked = [(entry["path"], entry["range"]) for entry in server.log]
    assert len(asked) == len(set(asked)) == 16  # two arrays x four shards x (index, chunks)


# ---- objects that change


@pytest.fixture(params=["disk", "simulated S3", "S3"])
def running(request, bucket, tmp_path):
    """A loader after its first epoch, and a function that changes one of the store's objects."""
    if request.param == "S3":
        s3 = request.getfixturevalue("s3")
        write_store(ADATA, s3.url("counts.zarr"), tmp_path, storage_options=s3.storage_options)
        dataset = zl.open_dataset(s3.url("counts.zarr"), storage_options=s3.storage_options)
        filesystem, root = dataset.store.location.filesystem(), dataset.store.location.path

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
    options = fetch_options(ready_bytes=1)  # so that the epoch is not over before the object is changed
    loader = zl.Loader(dataset, batch_size=8, fetch_factor=2, sampling=zl.BlockShuffling(2), options=options)
    assert epoch(loader) == list(range(200))
    return loader, change


@pytest.mark.every(3)
@pytest.mark.parametrize("edit", [lambda old: old[:-30], lambda old: old[::-1]], ids=["shorter", "other bytes"])
def test_an_object_overwritten_between_epochs(running, edit):
    loader, change = running
    change("X/data/c/1", edit)
    with pytest.raises(StoreChangedError, match=r"X/data/c/1 bytes .*Open the store again"):
        epoch(loader)


def test_an_object_overwritten_in_mid_epoch(running):
    loader, change = running
    minibatches = iter(loader)
    next(minibatches)
    for shard in range(3):
        change(f"X/data/c/{shard}", lambda old: old[::-1])
    with pytest.raises(StoreChangedError, match=r"X/data/c/\d bytes .*Open the store again"):
        epoch(minibatches)


def test_an_object_whose_tag_changes_with_every_answer(bucket, sim):
    server = sim(root=bucket)
    loader = loader_over(server)
    loader.dataset.store.offsets(loader.dataset.store.matrix("X")).load()
    server.faults = [{"kind": "etag", "match": f"{ELEMENTS}1$", "value": '"another"', "count": 1, "skip": 1}]
    with pytest.raises(StoreChangedError, match="X/"):
        epoch(loader)


# ---- classification of answers, and pauses between retries


BODY = "[http_response_code='{}'] [x-amzn-requestid='SIM'] [http_response_body='<Error><AWSAccessKeyId>{}']"
SPENT = "ABORTED: All 0 retry attempts failed:"
ANSWERS: dict[str, tuple[type[StoreError], bool, str]] = {
    f"{SPENT} SlowDown: Please reduce. {BODY.format(503, SECRET)}": (ReadError, True, "503 SlowDown: Please reduce."),
    f"{SPENT} CURL error Could not connect [curl_code='7']": (ReadError, True, "CURL error Could not connect"),
    "UNAVAILABLE: Bad Gateway [HTTP code 502] [http_response_body='x']": (ReadError, True, "502 Bad Gateway"),
    "UNAVAILABLE: no [http_response_code='503'] [source='x']": (ReadError, True, "503 no"),
    "DEADLINE_EXCEEDED: busy": (ReadError, True, "busy"),
    "RESOURCE_EXHAUSTED: All 1 retry attempts failed: SlowDown": (ReadError, True, "SlowDown"),
    f"PERMISSION_DENIED: AccessDenied: No. {BODY.format(403, SECRET)}": (
        AccessDeniedError,
        False,
        "403 AccessDenied: No.",
    ),
    "UNAUTHENTICATED: who": (AccessDeniedError, False, "who"),
    f"ExpiredToken: It has expired. {BODY.format(400, SECRET)}": (
        AccessDeniedError,
        False,
        "400 ExpiredToken: It has expired.",
    ),
    f"InvalidRequest: No\nway {BODY.format(400, SECRET)}": (ReadError, False, "400 InvalidRequest: No way"),
    "INVALID_ARGUMENT: no such option": (ReadError, False, "no such option"),
    "OUT_OF_RANGE: Range [1, 2) is not valid": (TruncatedObjectError, True, "Range [1, 2) is not valid"),
    "FAILED_PRECONDITION: Range [1, 2) was ignored by server": (ReadError, True, "Range [1, 2) was ignored by server"),
    "": (ReadError, False, ""),
}


@pytest.mark.parametrize(("failure", "wanted"), ANSWERS.items(), ids=[str(n) for n in range(len(ANSWERS))])
def test_what_an_answer_amounts_to(failure, wanted):
    found = classify_failure(failure, "the key")
    assert (found.error, found.passes, found.answer) == wanted


@given(st.integers(1, 1000), st.floats(0, 1))
def test_pauses(failures, chance):
    assert 0.07 < object_source.pause_s(failures, chance) <= 5.0


@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_the_pauses_of_all_retries_outlast_a_storm_of_30_s_and_end_before_the_deadline(chance):
    options = zl.FetchOptions()
    total = sum(object_source.pause_s(failures, chance) for failures in range(1, options.retries + 1))
    assert 30 < total < options.deadline_s


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["truncate", "reset"])
def test_an_obs_column_whose_answers_end_early_is_not_called_damaged(sim, bucket, kind) -> None:
    server = sim(root=bucket)
    loader = zl.Loader(loader_over(server).dataset, obs=["cell_type"], batch_size=8)
    server.faults = [{"kind": kind, "match": "obs/cell_type/"}]
    with pytest.raises(ReadError, match=r"^cannot read obs/cell_type/\S+ of s3://atlas/counts.zarr: "):
        next(iter(loader))
