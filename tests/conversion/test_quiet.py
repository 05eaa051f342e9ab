"""After convert has raised, no object appears, changes or disappears: all writes have ended."""

from __future__ import annotations

import contextlib
import re
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from sources import SMALL, convert, counts, disk_full, files, frame, write_h5ad
from zarr.storage import MemoryStore

from zloader.access.location import Location
from zloader.common import errors
from zloader.conversion.convert import convert_to
from zloader.conversion.destination import MARKER, Destination
from zloader.conversion.encode import ChunkEncoder, zarr_codecs
from zloader.conversion.matrix import ShardWriter, threads
from zloader.conversion.object_writer import (
    ObjectWriter,
    run_to_completion,
    translated,
)
from zloader.storage.metadata import layout_of

DEADLINE_S = 60


class BusyDestination(Destination):
    """A disk that blocks while it writes keys matching `slow`, until it is `freed`.

    Writes of keys matching `fails` fail as soon as the disk blocks. `under_way` lists the keys being written.
    """

    def __init__(self, path: Path, *, slow: str, fails: str = "$.") -> None:
        super().__init__(Location(url=str(path)))
        self._slow, self._fails = re.compile(slow), re.compile(fails)
        self.busy, self.freed = threading.Event(), threading.Event()
        self.changed = threading.Condition()
        self.under_way: list[str] = []

    @contextlib.contextmanager
    def writing(self, key: str) -> Iterator[None]:
        with self.changed:
            self.under_way.append(key)
        try:
            if self._fails.search(key):
                assert self.busy.wait(DEADLINE_S)
                threading.Timer(0.3, self.freed.set).start()  # a conversion that did not wait would raise sooner
                disk_full()
            if self._slow.search(key):
                self.busy.set()
                assert self.freed.wait(DEADLINE_S)
            yield
        finally:
            with self.changed:
                self.under_way.remove(key)
                self.changed.notify_all()

    def create_object(self, key: str) -> ObjectWriter:
        return _BusyObject(super().create_object(key), key, self)


class _BusyObject(ObjectWriter):
    def __init__(self, inner: ObjectWriter, key: str, destination: BusyDestination) -> None:
        self._inner, self._key, self._destination = inner, key, destination

    def write(self, piece: bytes) -> None:
        with translated(f"write {self._key} to", "here"), self._destination.writing(self._key):
            self._inner.write(piece)

    def commit(self, *, durable: bool = True) -> None:
        self._inner.commit(durable=durable)

    def abort(self) -> None:
        self._inner.abort()


def assert_quiet(destination: BusyDestination) -> dict[str, bytes]:
    """Asserts that no write is in progress, and that the files do not change afterwards. Returns the files."""
    under_way, present = list(destination.under_way), files(Path(destination.location.path))
    destination.freed.set()
    with destination.changed:
        assert destination.changed.wait_for(lambda: not destination.under_way, DEADLINE_S)
    assert under_way == []
    assert files(Path(destination.location.path)) == present
    assert [key for key in present if key.endswith(".partial")] in ([], [MARKER])
    return present


class Interrupts:
    """Sends Ctrl-C once `begun` returns True, and again while writes are waited for, `times` in all; then calls `then`.

    Each signal is sent while the main thread waits, after the previous one has been raised.
    """

    def __init__(self, begun: Callable[[], bool], then: Callable[[], None] = lambda: None, *, times: int = 3) -> None:
        self._begun, self._then, self._times = begun, then, times
        self._raised, self._left = threading.Event(), threading.Event()
        self._sender = threading.Thread(target=self._send)
        self._before: Any = None

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGINT, self._interrupt)
        self._sender.start()

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._sender.join(DEADLINE_S)
        signal.signal(signal.SIGINT, self._before)

    def _interrupt(self, *_: object) -> None:
        if not self._raised.is_set():
            self._raised.set()
            raise KeyboardInterrupt

    def _send(self) -> None:
        for number in range(self._times):
            self._until(_main_waits_to_end if number else lambda: self._begun() and _main_waits())
            self._raised.clear()
            self._until(self._sent)
        if self._times > 1:
            self._until(_main_waits_to_end)
        if not self._left.is_set():
            self._then()

    def _sent(self) -> bool:
        """Sends the signal, possibly again, because a thread that is about to wait may not notice it."""
        if not self._left.is_set():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return self._raised.wait(0.1)

    def _until(self, condition: Callable[[], bool]) -> None:
        give_up = time.monotonic() + DEADLINE_S
        while not self._left.is_set() and time.monotonic() < give_up and not condition():
            time.sleep(0.001)


def _main_waits(*functions: str) -> bool:
    """Whether the main thread is waiting for another thread, in one of these functions if any are named."""
    stack = traceback.walk_stack(sys._current_frames()[threading.main_thread().ident])
    names = [frame.f_code.co_name for frame, _ in stack]
    return names[0] == "wait" and (not functions or any(name in names for name in functions))


def _main_waits_to_end() -> bool:
    return _main_waits("run_to_completion")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    obs = frame(60, "cell").assign(n=range(60))
    path = tmp_path_factory.mktemp("source") / "a.h5ad"
    return write_h5ad(path, counts(), obs=obs, uns={"large": np.arange(600_000)})


# ---- a write that fails while another is in progress

PAIRS = {  # the slow key, and the key that fails
    "metadata": ("^obs/n/zarr.json", "^var/_index/zarr.json"),
    "chunks of an element": ("^uns/large/c/1", "^uns/large/c/0"),
    "shards of genes": ("^X/indices/c/", "^X/data/c/"),
    "shards of values": ("^X/data/c/", "^X/indices/c/"),
}


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS)
def test_convert_fails_when_all_has_ended(tmp_path: Path, source: Path, pair: str) -> None:
    slow, fails = PAIRS[pair]
    destination = BusyDestination(tmp_path / "a.zarr", slow=slow, fails=fails)
    if pair.startswith("shards"):  # stored at once while more windows come: many by genes, one of this size by rows
        source = write_h5ad(tmp_path / "by_genes.h5ad", counts().tocsc())
    with pytest.raises(errors.StoreError, match="No space left"):
        convert_to(destination, source, options=SMALL)
    assert MARKER in assert_quiet(destination)


# ---- Ctrl-C while a write is in progress


@pytest.mark.any_version
@pytest.mark.slow
@pytest.mark.parametrize("slow", ["^obs/n/c/0", "^uns/large/c/1", "^X/data/c/1", "^obs/n/zarr.json"])
def test_ctrl_c_is_raised_when_all_has_ended(tmp_path: Path, source: Path, slow: str) -> None:
    destination = BusyDestination(tmp_path / "a.zarr", slow=slow)
    with Interrupts(destination.busy.is_set, destination.freed.set), pytest.raises(KeyboardInterrupt):
        convert_to(destination, source, options=SMALL)
    there = assert_quiet(destination)
    assert "zarr.json" not in there
    assert MARKER in there


REQUESTS = {
    "mark": {"method": "PUT"},
    "clear": {"method": "POST"},
    "journal": {"method": "PUT", "skip": 1},
    "root": {"method": "PUT", "match": "zarr.json"},
    "end": {"method": "DELETE"},
}


@pytest.mark.any_version
@pytest.mark.slow
@pytest.mark.parametrize("slow", REQUESTS)
def test_ctrl_c_is_raised_when_a_request_has_ended(s3: Any, sim: Any, slow: str) -> None:
    """s3fs sends requests from another thread, which continues after Ctrl-C."""
    direct = Location(url=s3.url("a.zarr"), storage_options=s3.storage_options)
    root = zarr.create_group(direct.url, storage_options=s3.storage_options, attributes={"encoding-type": "anndata"})
    root.create_group("X")

    def objects() -> dict[str, bytes]:
        return {key: direct.filesystem().cat_file(f"{direct.path}/{key}") for key in direct.listing()}

    before = objects()
    server = sim(upstream=s3.endpoint_url)
    server.faults = [{"kind": "delay", "count": 1, **REQUESTS[slow]}]
    through = {**s3.storage_options, "client_kwargs": {"endpoint_url": server.url, "region_name": "us-east-1"}}
    destination = Destination(Location(url=direct.url, storage_options=through))

    def write() -> None:
        with destination.replaced({}) as store:
            zarr.create_group(store)

    with Interrupts(lambda: "fault_delay" in server.stats(), times=1), pytest.raises(KeyboardInterrupt):
        write()
    after = objects()
    assert server.tally.wait_idle(DEADLINE_S)
    assert objects() == after
    if slow == "mark":
        assert after.pop(MARKER)  # with the metadata of a root, it does not say that anything is replaced
        assert after == before


@dataclass
class SlowFiles:
    """A file system with slow reads and part uploads. `log` records the start and end of these requests."""

    filesystem: Any
    freed: threading.Event = field(default_factory=threading.Event)
    log: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.filesystem, name)

    def call_s3(self, method: str, **arguments: Any) -> Any:
        self.log.append(f"{method} begins")
        if method == "upload_part":
            assert self.freed.wait(DEADLINE_S)
        answer = self.filesystem.call_s3(method, **arguments)
        self.log.append(f"{method} ends")
        return answer

    def cat_file(self, path: str, **arguments: Any) -> bytes:
        self.log.append("read begins")
        assert self.freed.wait(DEADLINE_S)
        return self.filesystem.cat_file(path, **arguments)


def large_array() -> tuple[zarr.Array[Any], Any]:
    """An array of one shard, uploaded in four parts and read back in eight pieces, and its values."""
    values = np.random.default_rng(0).integers(0, 256, 64 << 20, np.uint8)
    array = zarr.create_array(
        MemoryStore(),
        name="X",
        shape=values.shape,
        chunks=(8 << 20,),
        shards=(64 << 20,),
        dtype="u1",
        **zarr_codecs("none", values.dtype),
    )
    return array, values


@pytest.mark.slow
def test_an_upload_is_aborted_when_its_parts_have_ended(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part uploaded after the abort would be billed, but invisible."""
    location = Location(url=s3.url("a.zarr"), storage_options=s3.storage_options)
    slow = SlowFiles(location.filesystem())
    monkeypatch.setattr(Location, "filesystem", lambda self: slow)
    array, values = large_array()
    encoder = ChunkEncoder(layout_of(array, absent_is_fill=False))
    interrupts = Interrupts(lambda: slow.log.count("upload_part begins") == 2, slow.freed.set)

    def write() -> None:
        with (
            threads(location.url) as pool,
            ShardWriter(array, encoder, pool, lambda key: ObjectWriter(location, key)) as writer,
        ):
            writer.append(values)

    with interrupts, pytest.raises(KeyboardInterrupt):
        write()
    assert slow.log.count("upload_part begins") == slow.log.count("upload_part ends") > 1
    assert slow.log[-2:] == ["abort_multipart_upload begins", "abort_multipart_upload ends"]
    bucket, prefix, _ = slow.split_path(location.path)
    assert not slow.filesystem.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/").get("Uploads")


# ---- writes that fail or do not end


def test_a_journal_that_does_not_fit_leaves_nothing_open(tmp_path: Path, source: Path) -> None:
    """A file that stayed open would be written to when it is garbage-collected."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))  # the marker fits
    try:
        with pytest.raises(errors.StoreError, match=r"cannot write zloader\.partial"):
            convert(source, tmp_path / "a.zarr")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not files(tmp_path / "a.zarr")


def test_a_write_that_does_not_end_is_said() -> None:
    freed, begun = threading.Event(), threading.Event()

    def write() -> None:
        begun.set()
        assert freed.wait(DEADLINE_S)

    with Interrupts(begun.is_set, times=1), pytest.raises(errors.StoreError, match="to X is still running after 0 s"):
        run_to_completion(write, "X", deadline_s=0.01)
    freed.set()
