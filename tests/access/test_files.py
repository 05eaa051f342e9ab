"""Reads of local files return the bytes that were written, or raise an error that names the cause."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers import counts, digest, fetch_options, write_store
from hypothesis import given
from hypothesis import strategies as st

import zloader as zl
from zloader.access.file_source import FileSource, ReadClock
from zloader.access.location import Location
from zloader.common.errors import (
    AccessDeniedError,
    DeadlineError,
    MissingObjectError,
    ReadError,
    StoreChangedError,
    TruncatedObjectError,
)
from zloader.common.options import FetchOptions
from zloader.common.records import Span
from zloader.reading.gates import ByteBudget
from zloader.reading.resources import Counters, Resources

pytestmark = pytest.mark.any_version

CONTENT = {"a/c/0": bytes(range(256)) * 4, "b": b"0123456789"}


@pytest.fixture
def root(tmp_path):
    for key, content in CONTENT.items():
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_bytes(content)
    return tmp_path


def source_of(root):
    location = Location(url=str(root))
    return FileSource(location, location.listing(), FetchOptions())


def read(source, *spans):
    return asyncio.run(source.read([Span(key=key, start=start, stop=stop) for key, start, stop in spans]))


@given(draw=st.data())
def test_spans_of_several_files_are_returned_in_order(tmp_path_factory, draw):
    root = tmp_path_factory.getbasetemp() / "files"
    for key, content in CONTENT.items():
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        if not (root / key).exists():
            (root / key).write_bytes(content)
    spans = []
    for key in draw.draw(st.lists(st.sampled_from(sorted(CONTENT)), min_size=1)):
        start, stop = sorted(draw.draw(st.lists(st.integers(0, len(CONTENT[key])), min_size=2, max_size=2)))
        spans.append((key, start, stop))
    assert read(source_of(root), *spans) == [CONTENT[key][start:stop] for key, start, stop in spans]


def test_errors_name_the_cause(root):
    source = source_of(root)
    with pytest.raises(TruncatedObjectError, match=r"reading b bytes 5-14 returned 5 of 10 bytes"):
        read(source, ("b", 5, 15))
    (root / "b").write_bytes(b"9876543210")
    os.utime(root / "b", ns=(1, 1))
    with pytest.raises(StoreChangedError, match=r"reading b bytes 0-3: the file, .* changed"):
        read(source, ("a/c/0", 0, 9), ("b", 0, 4))
    (root / "b").unlink()
    with pytest.raises(MissingObjectError, match=r"reading b bytes 0-3: there is no such file"):
        read(source, ("b", 0, 4))
    (root / "b").mkdir()
    with pytest.raises(ReadError, match=r"reading b bytes 0-3 failed"):
        read(source, ("b", 0, 4))
    (root / "b").rmdir()
    (root / "b").symlink_to("b")
    with pytest.raises((ReadError, AccessDeniedError), match=r"reading b bytes 0-3"):
        read(source, ("b", 0, 4))


def pack(path, later_than=0):
    """Sets a file's modification time, as archives do. Returns its change time, which is after `later_than`."""
    os.utime(path, (1, 1))
    while path.stat().st_ctime_ns <= later_than:
        os.utime(path, (1, 1))
    return path.stat().st_ctime_ns


@pytest.mark.parametrize("stable_inodes", [True, False])
def test_a_file_replaced_with_equal_size_and_time(root, stable_inodes, monkeypatch):
    if not stable_inodes:
        monkeypatch.setattr("zloader.common.file_systems._STABLE_INODES", set())
    packed = max(pack(root / key) for key in CONTENT)
    source = source_of(root)
    (root / "b").write_bytes(b"9876543210")
    pack(root / "b", packed)
    with pytest.raises(StoreChangedError, match=r"reading b bytes 0-3: the file, .* changed"):
        read(source, ("a/c/0", 0, 9), ("b", 0, 4))
    (root / "new").write_bytes(CONTENT["a/c/0"][::-1])
    pack(root / "new", packed)
    (root / "new").rename(root / "a/c/0")
    with pytest.raises(StoreChangedError, match=r"reading a/c/0 bytes 0-8: the file, .* changed"):
        read(source, ("a/c/0", 0, 9))
    assert read(source_of(root), ("a/c/0", 0, 4), ("b", 0, 4)) == [CONTENT["a/c/0"][:-5:-1], b"9876"]


def test_a_file_replaced_during_an_epoch(tmp_path):
    write_store(counts(200, 50), tmp_path / "s.zarr", tmp_path)
    options = fetch_options(prefetch=1, ready_bytes=2, buffer_bytes=1)
    loader = zl.Loader(zl.open_dataset(tmp_path / "s.zarr"), batch_size=8, fetch_factor=1, options=options)
    wanted = digest(loader)
    minibatches = iter(loader)
    next(minibatches)
    for shard in (tmp_path / "s.zarr/X/data/c").iterdir():
        shard.write_bytes(shard.read_bytes())  # rewritten with the same bytes
    with pytest.raises(StoreChangedError, match="X/data/c"):
        list(minibatches)
    assert digest(zl.Loader(zl.open_dataset(tmp_path / "s.zarr"), batch_size=8, fetch_factor=1)) == wanted


def test_a_thread_reads_into_its_own_memory(root):
    """`read_now` fills consecutive parts of the buffer and nothing else, whatever is asked to be prefetched."""
    source = source_of(root)
    spans = [Span(key="a/c/0", start=3, stop=9), Span(key="b", start=0, stop=10), Span(key="a/c/0", start=0, stop=2)]
    source.prefetch([*spans, Span(key="missing", start=0, stop=1)])
    buffer = np.full(20, 7, np.uint8)
    found = source.read_now(spans, buffer)
    assert [part.tobytes() for part in found] == [CONTENT["a/c/0"][3:9], CONTENT["b"], CONTENT["a/c/0"][:2]]
    assert all(np.shares_memory(part, buffer) for part in found)
    assert buffer[18:].tolist() == [7, 7]
    with pytest.raises(TruncatedObjectError, match=r"reading b bytes 5-14 returned 5 of 10 bytes"):
        source.read_now([Span(key="b", start=5, stop=15)], buffer)


def test_a_disk_that_does_not_answer_ends_in_an_error(root):
    location = Location(url=str(root))
    source = FileSource(location, location.listing(), FetchOptions(deadline_s=0.01))

    async def wait():
        never = asyncio.get_running_loop().create_future()
        clock = ReadClock(began=time.monotonic())
        await source.within_deadline(never, [Span(key="b", start=0, stop=4)], clock)

    with pytest.raises(DeadlineError, match=r"reading b bytes 0-3 did not finish within deadline_s=0\.01"):
        asyncio.run(wait())


@pytest.mark.parametrize("state", [{}, {"began": 0.0, "ended": True}], ids=["not begun", "decoding"])
def test_only_the_read_counts_towards_the_deadline(root, state):
    """Not the wait for a thread, nor decoding: on a busy machine, compiling its loops takes minutes."""
    location = Location(url=str(root))
    source = FileSource(location, location.listing(), FetchOptions(deadline_s=0.01))
    clock = ReadClock(**state)

    async def wait(then):
        reading = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.1, then, reading)
        return await source.within_deadline(reading, [Span(key="b", start=0, stop=4)], clock)

    assert asyncio.run(wait(lambda reading: reading.set_result("done"))) == "done"

    def begin(_):
        clock.began, clock.ended = time.monotonic(), False

    with pytest.raises(DeadlineError):
        asyncio.run(wait(begin))


@pytest.mark.parametrize("hangs", [False, True])
def test_slow_decoding_is_no_slow_disk(root, hangs):
    location, released = Location(url=str(root)), threading.Event()
    options = FetchOptions(deadline_s=0.05)

    class Disk(FileSource):
        def read_now(self, spans, buffer):
            if hangs:
                released.wait()
            return super().read_now(spans, buffer)

    def decode(stored):
        time.sleep(0.2)
        return bytes(stored[0])

    async def load():
        resources = Resources(
            url=str(root),
            options=options,
            source=Disk(location, location.listing(), options),
            object_sizes={},
            counters=Counters(),
            threads=threads,
            in_flight=ByteBudget(100),
            bands=ByteBudget(100),
            own_buffers=threading.local(),
        )
        try:
            return await resources.decode([Span(key="b", start=0, stop=4)], decode)
        finally:
            released.set()

    with ThreadPoolExecutor(1) as threads:
        if hangs:
            with pytest.raises(DeadlineError):
                asyncio.run(load())
        else:
            assert asyncio.run(load()) == CONTENT["b"][:4]
