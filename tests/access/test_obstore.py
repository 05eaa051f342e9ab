"""What obstore's single reads make of servers that misbehave, behind the same retries as TensorStore's."""

from __future__ import annotations

import contextlib
import functools
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import NEVER_S, PATIENCE_S, counts, web_server, write_store

import zloader as zl
from zloader.access import object_files
from zloader.access.buckets import Azure
from zloader.access.location import Location
from zloader.access.object_files import kept_store, read_once
from zloader.access.stored_objects import StoredObject
from zloader.common.errors import (
    AccessDeniedError,
    DeadlineError,
    MissingObjectError,
    ReadError,
    StoreChangedError,
    StoreError,
    TruncatedObjectError,
)
from zloader.common.records import Span
from zloader.reading.object_source import ObjectSource

CONTENT = np.random.default_rng(0).bytes(100_000)
SECRET = "hush"


class _Faulty(http.server.BaseHTTPRequestHandler):
    """An object, sent as the next fault says; as it should be if none is left."""

    protocol_version = "HTTP/1.1"

    def __init__(self, *given: Any, faults: list[str], over: threading.Event, conditions: list[str | None]) -> None:
        self.faults, self.over, self.conditions = faults, over, conditions
        super().__init__(*given)

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        fault = self.faults.pop(0) if self.faults else ""
        self.conditions.append(self.headers["If-Match"])
        if fault == "changed" and self.headers["If-Match"]:
            fault = "412"
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        part = CONTENT[first : last + 1]
        status = int(fault) if fault.isdigit() else 200 if fault == "whole" else 206
        body = part[:-1] if fault == "short" else CONTENT if fault == "whole" else b"no" if fault.isdigit() else part
        self.send_response(status)
        self.send_header("Last-Modified", "Wed, 25 Nov 2026 12:00:00 GMT")
        self.send_header("ETag", '"changed"' if fault == "changed" else '"tag"')
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(CONTENT)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if fault in ("drop", "stall") else body)
        if fault == "stall":
            self.over.wait()
        self.close_connection = fault in ("drop", "stall")


@pytest.fixture
def faults() -> list[str]:
    return []


@pytest.fixture
def conditions() -> list[str | None]:
    """The header If-Match of each request."""
    return []


@pytest.fixture
def source(faults: list[str], conditions: list[str | None], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes an ObjectSource of the server, with these FetchOptions."""
    over = threading.Event()
    with contextlib.ExitStack() as running:
        running.callback(over.set)
        serving = functools.partial(_Faulty, faults=faults, over=over, conditions=conditions)
        address = running.enter_context(web_server(serving))
        signed = f"{address}/?signature={SECRET}"
        store = kept_store("HTTPStore", signed, retries=False)
        monkeypatch.setattr(Azure, "read_range", lambda _: functools.partial(read_once, store))
        monkeypatch.setattr(Location, "find_object", lambda *_: StoredObject(size=1, tag="changed", stamp="changed"))

        def make(tag: str = "tag", **options: Any) -> ObjectSource:
            listed = {"key": StoredObject(size=len(CONTENT), tag=tag, stamp=tag)}
            return ObjectSource(Location(url="az://cells/a.zarr"), listed, zl.FetchOptions(**options))

        yield make


SPANS = [Span(key="key", start=start, stop=start + 1000) for start in range(0, 64_000, 1000)]


def read(source: ObjectSource, spans: list[Span] = SPANS) -> list[bytes]:
    import asyncio

    return asyncio.run(source.read(spans))


@pytest.mark.every(3)
@pytest.mark.parametrize("fault", ["", "500", "503", "429", "408", "drop", "short", "whole"])
def test_a_passing_fault(source: Any, faults: list[str], fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = StoredObject(size=len(CONTENT), tag="tag", stamp="tag")
    monkeypatch.setattr(
        Location, "find_object", lambda *_: listed
    )  # an answer that is too short may be due to a change
    reader = source(deadline_s=NEVER_S)
    faults += [fault] * 2 if fault else []
    assert b"".join(read(reader)) == CONTENT[:64_000]
    assert reader.retries == len(fault and "22")
    assert not faults


LASTING: dict[str, tuple[str, type[StoreError], str]] = {
    "403": ("403", AccessDeniedError, r"was denied.*403.*account_key"),
    "401": ("401", AccessDeniedError, r"was denied.*401.*account_key"),
    "404": ("404", MissingObjectError, "the object does not exist"),
    "400": ("400", ReadError, "A retry would not help"),
    "range ignored": ("whole", ReadError, "Does a proxy drop the Range header"),
    "short": ("short", StoreError, "999 of 1000 bytes|has changed"),
    "beyond the end": ("416", StoreError, "416|has changed"),
    "changed": ("changed", StoreChangedError, "the object has changed"),
    "stall": ("stall", DeadlineError, r"deadline_s=0\.6"),
    "503": ("503", DeadlineError, r"deadline_s=0\.6.*503"),
}


@pytest.mark.every(2)
@pytest.mark.parametrize(("fault", "error", "says"), LASTING.values(), ids=LASTING)
def test_a_lasting_fault(source: Any, faults: list[str], fault: str, error: type[StoreError], says: str) -> None:
    reader = source(deadline_s=0.6 if error is DeadlineError else NEVER_S)
    faults += [fault] * 999
    with pytest.raises(error, match=says) as caught:
        read(reader, SPANS[:3])
    assert "az://cells/a.zarr: reading key bytes" in str(caught.value)
    assert SECRET not in str(caught.value)


def test_an_object_that_shrank_is_truncated(source: Any, faults: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    same = StoredObject(size=len(CONTENT), tag="tag", stamp="tag")
    monkeypatch.setattr(Location, "find_object", lambda *_: same)
    faults += ["short"] * 999
    with pytest.raises(TruncatedObjectError, match="999 of 1000 bytes"):
        read(source(deadline_s=NEVER_S), SPANS[:1])


def test_only_an_object_with_the_listed_tag_is_asked_for(source: Any, conditions: list[str | None]) -> None:
    read(source(deadline_s=NEVER_S))
    assert conditions == ['"tag"'] * len(SPANS)


@pytest.mark.parametrize("tag", ['W/"weak', "Wed, 25 Nov 2026 12:00:00 GMT", "", "größe"])
def test_what_is_no_strong_etag_is_not_asked_for(
    source: Any, conditions: list[str | None], monkeypatch: pytest.MonkeyPatch, tag: str
) -> None:
    same = StoredObject(size=len(CONTENT), tag=tag, stamp=tag)
    monkeypatch.setattr(Location, "find_object", lambda *_: same)
    assert read(source(tag, deadline_s=NEVER_S), SPANS[:3]) == [CONTENT[:3000][i : i + 1000] for i in (0, 1000, 2000)]
    assert conditions == [None] * 3


def test_a_server_that_refuses_a_tag_that_it_has_listed(
    source: Any, faults: list[str], conditions: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    same = StoredObject(size=len(CONTENT), tag="tag", stamp="tag")
    monkeypatch.setattr(Location, "find_object", lambda *_: same)
    faults += ["412"] * 3
    reader = source(deadline_s=NEVER_S)
    assert b"".join(read(reader, SPANS[:3])) == CONTENT[:3000]
    read(reader)
    assert (conditions[:3], set(conditions[3:])) == (['"tag"'] * 3, {None})


def test_credentials_that_cannot_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """DefaultAzureCredential finds nothing: an error at once, and not after the deadline."""
    ClientAuthenticationError = pytest.importorskip("azure.core.exceptions").ClientAuthenticationError

    def nothing() -> Any:
        raise ClientAuthenticationError("found no credentials")

    address = "http://127.0.0.1:9"
    access = {"account_name": "a", "endpoint": address, "credential_provider": nothing}
    store = kept_store("AzureStore", "cells", retries=False, **access)
    location = Location(url="az://cells/a.zarr")
    monkeypatch.setattr(Azure, "read_range", lambda _: functools.partial(read_once, store))
    listed = {"key": StoredObject(size=len(CONTENT), tag="tag", stamp="tag")}
    source = ObjectSource(location, listed, zl.FetchOptions(deadline_s=NEVER_S))
    with pytest.raises(AccessDeniedError, match="found no credentials"):
        read(source, SPANS[:1])


def test_reads_that_are_cancelled_are_over_before_the_process_ends(source: Any, faults: list[str]) -> None:
    faults += ["stall"] * 999
    with pytest.raises(DeadlineError):
        read(source(deadline_s=0.3), SPANS[:8])
    object_files._finish_reads()
    assert not object_files._AWAITED


EXIT = """
import sys, zloader as zl
dataset = zl.open_dataset(sys.argv[1])
minibatches = iter(zl.Loader(dataset, batch_size=8, fetch_factor=1, framework="numpy"))
for _ in range(int(sys.argv[2])):
    next(minibatches)
print("end", flush=True)
"""


@pytest.mark.slow
def test_a_process_that_ends_in_the_middle_of_an_epoch_does_not_abort(tmp_path: Path, sim: Any) -> None:
    """Without waiting for obstore's threads, 1 process in 50 does."""
    write_store(counts(2000, 100), tmp_path / "bucket" / "a.zarr", tmp_path)
    url = f"{sim(ttfb_ms=3).url}/bucket/a.zarr"
    for n_minibatches in range(6):
        command = [sys.executable, "-c", EXIT, url, str(n_minibatches)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
