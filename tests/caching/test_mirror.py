"""A mirror keeps chunks, and whatever happens to its files, a chunk is right or missing."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import re
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import PATIENCE_S
from hypothesis import given
from hypothesis import strategies as st

import zloader.caching.mirror
from zloader.caching import page_cache
from zloader.caching.cached_files import load_column as load_checked
from zloader.caching.cached_files import load_object, save_object
from zloader.caching.cached_files import save_column as save_windows
from zloader.caching.directory import MirrorDirectory
from zloader.caching.mirror import MirrorArray, open_mirror, open_place
from zloader.common.options import Cache
from zloader.storage.decode import checksum
from zloader.storage.layout import ArrayLayout

pytestmark = pytest.mark.any_version


def _layout(path="X/data", *, n_elements=95, chunk_elements=10, dtype="<u2"):
    return ArrayLayout(
        path=path,
        dtype=np.dtype(dtype),
        n_elements=n_elements,
        chunk_elements=chunk_elements,
        chunks_per_shard=4,
        codecs=({"name": "bytes"},),
        sharded=True,
        index_checksum=True,
        index_at_end=True,
        key_prefix="c/",
        separator="/",
        n_dims=1,
        fill_value=0,
        absent_is_fill=False,
    )


PRINT = "f" * 32


def _place(cache, fingerprint=PRINT):
    """The mirror's place in a cache directory."""
    return MirrorDirectory(Cache(directory=cache), fingerprint, "store")


def save_column(place, name, column):
    return save_windows(place, name, [column], shape=column.shape, dtype=column.dtype)


def load_column(place, name, like):
    return load_checked(place, name, shape=like.shape, dtype=like.dtype)


LAYOUT = _layout()
ALL = np.arange(LAYOUT.n_chunks)


def _truth(layout, seed=0):
    """Elements without a single zero byte, so that no loss of bytes goes unseen."""
    n_bytes = layout.n_elements * layout.dtype.itemsize
    return np.random.default_rng(seed).integers(1, 256, n_bytes, np.uint8).view(layout.dtype)


TRUTH = _truth(LAYOUT)


def _chunk(chunk, layout=LAYOUT, truth=TRUTH):
    return truth[chunk * layout.chunk_elements : (chunk + 1) * layout.chunk_elements]


def _fill(directory, chunks=ALL, layout=LAYOUT, truth=TRUTH):
    mirror = MirrorArray(_place(directory), layout)
    for chunk in chunks:
        mirror.put(int(chunk), _chunk(chunk, layout, truth))
    return mirror


def _check_what_is_there(directory, layout=LAYOUT, truth=TRUTH):
    """Opens the mirror anew and holds every chunk that it says is there against the truth; gives the others."""
    mirror = MirrorArray(_place(directory), layout)
    chunks = np.arange(layout.n_chunks)
    missing = mirror.missing(chunks)
    for chunk in np.setdiff1d(chunks, missing).tolist():
        slot = np.zeros(len(_chunk(chunk, layout, truth)), layout.dtype)
        mirror.copy(np.array([chunk]), [slot])
        np.testing.assert_array_equal(slot, _chunk(chunk, layout, truth))
    return missing.tolist()


# ---- what is put is there


def test_what_is_put_is_there_and_nothing_else(tmp_path):
    mirror = MirrorArray(_place(tmp_path), LAYOUT)
    assert mirror.missing(ALL).tolist() == ALL.tolist()
    for chunk in (7, 0, 9):  # the last chunk is a short one
        mirror.put(chunk, _chunk(chunk))
    assert mirror.holds(np.array([0, 9, 7]))
    assert not mirror.holds(np.array([0, 1]))
    assert mirror.missing(ALL).tolist() == [1, 2, 3, 4, 5, 6, 8]
    assert mirror.missing(np.array([9, 3, 0, 1])).tolist() == [3, 1]  # in the order asked for
    slots = [np.zeros(5, "<u2"), np.zeros(10, "<u2")]
    mirror.copy(np.array([9, 7]), slots)
    np.testing.assert_array_equal(np.concatenate(slots), np.concatenate([_chunk(9), _chunk(7)]))
    np.testing.assert_array_equal(mirror.elements[70:80], TRUTH[70:80])
    assert not mirror.elements.flags.writeable


def test_another_process_sees_it_once_it_has_compared_it(tmp_path):
    """Another MirrorArray knows as little of this one as one in another process."""
    other = MirrorArray(_place(tmp_path), LAYOUT)
    _fill(tmp_path, [2, 3])
    assert not other.holds(np.array([2]))
    assert other.missing(np.array([2, 3, 4])).tolist() == [4]
    assert other.holds(np.array([2, 3]))
    np.testing.assert_array_equal(other.elements[20:40], TRUTH[20:40])


@pytest.mark.parametrize("dtype", ["bool", "uint8", "<u2", "<i4", "<i8", "<f4", "<f8"])
def test_every_dtype_is_kept(tmp_path, dtype):
    layout = _layout(dtype=dtype)
    values = np.resize(np.array([0, 1, 5, 200], np.float64), 95).astype(dtype)
    _fill(tmp_path, layout=layout, truth=values)
    assert _check_what_is_there(tmp_path, layout, values) == []
    assert MirrorArray(_place(tmp_path), layout).elements.dtype == np.dtype(dtype)


def test_a_chunk_of_zeros_is_told_from_one_that_is_not_there(tmp_path):
    zeros = np.zeros(95, "<u2")
    _fill(tmp_path, [1, 5], truth=zeros)
    assert _check_what_is_there(tmp_path, truth=zeros) == [0, 2, 3, 4, 6, 7, 8, 9]


def test_a_chunk_whose_checksum_is_zero_is_there(tmp_path):
    layout = _layout(n_elements=8, chunk_elements=4, dtype="uint8")
    values = np.frombuffer(b"\xab\x9b\xe0\x9b" * 2, np.uint8)
    assert checksum(values[:4]) == 0
    _fill(tmp_path, [1], layout, values)
    assert _check_what_is_there(tmp_path, layout, values) == [0]


def test_an_array_without_elements_has_a_mirror(tmp_path):
    mirror = MirrorArray(_place(tmp_path), _layout(n_elements=0))
    assert mirror.missing(np.empty(0, np.int64)).tolist() == []
    assert mirror.holds(np.empty(0, np.int64))
    assert len(mirror.elements) == 0


@given(
    rows=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 900)), max_size=40),
    joined=st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_rows_are_where_it_says_whether_read_or_mapped(tmp_path_factory, rows, joined):
    """Rows anywhere, in any order, also empty ones and such that follow one another."""
    layout = _layout(n_elements=5000, chunk_elements=1000)
    truth = _truth(layout)
    place = _place(tmp_path_factory.getbasetemp() / "rows")
    mirror = MirrorArray(place, layout)
    if mirror.missing(np.arange(5)).size:
        mirror.put(0, truth)
    starts, stops = [], []
    for (start, length), follows in zip(rows, joined, strict=False):
        starts.append(stops[-1] if follows and stops and stops[-1] + length <= 5000 else start)
        stops.append(starts[-1] + length)
    starts, stops = np.array(starts, np.int64), np.array(stops, np.int64)
    source, here = mirror.rows(starts, stops)
    for begin, start, stop in zip(here, starts, stops, strict=True):
        np.testing.assert_array_equal(source[begin : begin + stop - start], truth[start:stop])


def test_a_file_cut_short_while_it_is_read_raises(tmp_path):
    mirror = _fill(tmp_path)
    os.truncate(_damaged(tmp_path, "flat"), 100)
    with pytest.raises(OSError, match="cut short"):
        mirror.rows(np.array([60]), np.array([70]))


def test_letting_go_of_a_mapped_column_changes_nothing(tmp_path):
    place = _place(tmp_path)
    column = save_column(place, "x", np.arange(1_000_000))
    for _ in range(2):
        assert int(column.sum()) == 499_999_500_000
        before = _resident_files()
        page_cache.let_go(column)
        assert _resident_files() <= before - 7_000_000
    page_cache.let_go(np.arange(3))  # nothing to let go of


def _resident_files():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile"))
    return int(line.split()[1]) * 1024


def test_the_file_is_flat_and_sparse(tmp_path):
    layout = _layout(n_elements=10_000_000, chunk_elements=1000)
    mirror = MirrorArray(_place(tmp_path), layout)
    mirror.put(5000, np.full(1000, 7, "<u2"))
    file = _damaged(tmp_path, "flat")
    assert file.stat().st_size == 20_000_000
    assert file.stat().st_blocks * 512 < 200_000
    stored = np.fromfile(file, "<u2")
    assert np.flatnonzero(stored).tolist() == list(range(5_000_000, 5_001_000))


# ---- files that were damaged since


def _damaged(tmp_path, suffix):
    (file,) = tmp_path.glob(f"*/*.{suffix}")
    return file


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """The files of a mirror that holds every chunk."""
    cache = tmp_path_factory.mktemp("full")
    _fill(cache).note()
    return {file.suffix: file for file in _place(cache).directory.iterdir()}


@contextlib.contextmanager
def _copy_of(full):
    """Writes the files of a full mirror anew, for each example; gives the cache, and its mirror's directory."""
    cache = full[".flat"].parent.parent / "copy"
    directory = _place(cache).directory
    for file in full.values():
        (directory / file.name).write_bytes(file.read_bytes())
    mirror = MirrorArray(_place(cache), LAYOUT)
    assert mirror.missing(ALL).tolist() == []
    mirror.note()
    assert MirrorArray(_place(cache), LAYOUT).holds(ALL)  # without being looked at
    yield cache, directory
    for file in directory.iterdir():
        file.unlink()


@given(place=st.integers(0, 2 * 95 - 1), change=st.integers(1, 255))
def test_a_flipped_byte_of_the_elements_is_a_miss(full, place, change):
    with _copy_of(full) as (cache, directory):
        file = directory / full[".flat"].name
        stored = bytearray(file.read_bytes())
        stored[place] ^= change
        file.write_bytes(stored)
        assert _check_what_is_there(cache) == [place // 20]


@given(place=st.integers(0, 64 + 8 * 10 - 1), change=st.integers(1, 255))
def test_a_flipped_byte_of_the_checksums_is_a_miss(full, place, change):
    with _copy_of(full) as (cache, directory):
        file = directory / full[".sums"].name
        stored = bytearray(file.read_bytes())
        assert len(stored) == 64 + 80
        stored[place] ^= change
        file.write_bytes(stored)
        assert _check_what_is_there(cache) == (ALL.tolist() if place < 64 else [(place - 64) // 8])


@given(length=st.integers(0, 2 * 95 - 1))
def test_elements_that_were_cut_short_are_misses(full, length):
    with _copy_of(full) as (cache, directory):
        os.truncate(directory / full[".flat"].name, length)
        assert _check_what_is_there(cache) == list(range(length // 20, 10))


@given(length=st.integers(0, 64 + 8 * 10 - 1))
def test_checksums_that_were_cut_short_are_misses(full, length):
    with _copy_of(full) as (cache, directory):
        os.truncate(directory / full[".sums"].name, length)
        assert _check_what_is_there(cache) == ALL.tolist()


@pytest.mark.parametrize("suffix", [".flat", ".sums"])
def test_a_file_that_is_gone_is_a_miss(full, suffix):
    with _copy_of(full) as (cache, directory):
        (directory / full[suffix].name).unlink()
        assert _check_what_is_there(cache) == ALL.tolist()


@pytest.mark.parametrize("suffix", [".flat", ".sums"])
def test_a_file_that_is_too_long_gives_nothing_wrong(full, suffix):
    with _copy_of(full) as (cache, directory):
        file = directory / full[suffix].name
        file.write_bytes(file.read_bytes() + b"\x07" * 100)
        _check_what_is_there(cache)
        assert file.stat().st_size == len(full[suffix].read_bytes())


def test_a_sidecar_of_another_array_or_version_counts_for_nothing(full):
    for other in (_layout(chunk_elements=19), _layout(dtype="<i2")):
        with _copy_of(full) as (cache, _):
            truth = _truth(other)
            assert _check_what_is_there(cache, other, truth) == list(range(other.n_chunks))


def test_a_clock_gone_back_proves_nothing(full):
    """Another file with the same size and an older, or the same, time of change."""
    with _copy_of(full) as (cache, directory):
        file = directory / full[".flat"].name
        before = file.stat()
        stored = bytearray(file.read_bytes())
        stored[50] ^= 1
        file.write_bytes(stored)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert _check_what_is_there(cache) == [2]


def test_proof_of_another_boot_counts_for_nothing(full):
    """After power loss the files may hold less than their times say."""
    with _copy_of(full) as (cache, directory):
        proved = directory / "proved.json"
        proved.write_text(json.dumps(json.loads(proved.read_text()) | {"boot": "another"}))
        assert not MirrorArray(_place(cache), LAYOUT).holds(ALL)
        for torn in ("", "[]", "{", '{"boot": 1}', "null"):
            proved.write_text(torn)
            assert not MirrorArray(_place(cache), LAYOUT).holds(ALL)
        assert _check_what_is_there(cache) == []


def test_a_damaged_chunk_is_reported_and_can_be_put_again(full, caplog):
    with _copy_of(full) as (cache, directory):
        file = directory / full[".flat"].name
        file.write_bytes(b"\x00" + file.read_bytes()[1:])
        mirror = MirrorArray(_place(cache), LAYOUT)
        assert mirror.missing(ALL).tolist() == mirror.missing(ALL).tolist() == [0]
        assert [record.levelname for record in caplog.records] == ["WARNING"]  # once
        mirror.put(0, _chunk(0))
        assert mirror.missing(ALL).tolist() == []
        assert _check_what_is_there(cache) == []


# ---- several processes, and those that are killed

# Fills mirrors in children of its own, which it forks at once where a new interpreter would take a second to start.
# One command a line: `start DIRECTORY SEED`, answered by the child's process id and a dot before each chunk; `kill PID`
# and `wait PID`, answered by what waitpid says; `limit DIRECTORY BYTES`, where no file may grow beyond so many bytes.
# The package is put in place without its __init__, which would import torch.
_NURSERY = """
import json, logging, os, resource, sys, traceback, types
from pathlib import Path

package = types.ModuleType("zloader")
package.__path__ = [sys.argv[1]]
sys.modules["zloader"] = package
import numpy as np
from zloader.caching.directory import MirrorDirectory
from zloader.storage.layout import ArrayLayout
from zloader.caching.mirror import MirrorArray
from zloader.common.options import Cache

options = json.loads(sys.argv[2])
layout = ArrayLayout(**options | {"dtype": np.dtype(options["dtype"])})
truth = np.load(sys.argv[3])

def place(directory):
    return MirrorDirectory(Cache(directory=directory), "f" * 32, "store")

def put_all(mirror, order, before_each):
    for chunk in order:
        before_each()
        first = chunk * layout.chunk_elements
        mirror.put(chunk, truth[first : first + layout.chunk_elements])

def fill(directory, seed):
    order = np.random.default_rng(int(seed)).permutation(layout.n_chunks).tolist()
    os.write(1, b"%d\\n" % os.getpid())
    put_all(MirrorArray(place(directory), layout), order, lambda: os.write(1, b"."))

def fill_with_limit(directory, n_bytes):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("zloader").addHandler(handler)
    mirror = MirrorArray(place(directory), layout)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(n_bytes), resource.RLIM_INFINITY))
    put_all(mirror, range(layout.n_chunks), lambda: None)
    missing = mirror.missing(np.arange(layout.n_chunks)).tolist()
    os.write(1, json.dumps({"warnings": records, "missing": missing, "writable": mirror.writable}).encode() + b"\\n")

for line in sys.stdin:
    command, *arguments = line.split()
    if command in ("start", "limit"):
        if os.fork() == 0:
            try:
                (fill if command == "start" else fill_with_limit)(*arguments)
                os._exit(0)
            finally:
                traceback.print_exc()
                os._exit(1)
    else:
        pid = int(arguments[0])
        if command == "kill":
            os.kill(pid, 9)
        os.write(1, b"\\n%d\\n" % os.waitpid(pid, 0)[1])
"""
BIG = _layout(n_elements=64 * 20_000 - 7, chunk_elements=20_000)
BIG_TRUTH = _truth(BIG)


class _Nursery:
    def __init__(self, process):
        self._process = process

    def say(self, *words):
        self._process.stdin.write(" ".join(map(str, words)).encode() + b"\n")

    def start(self, directory, seed):
        """Starts a process that fills; gives its id."""
        self.say("start", directory, seed)
        return int(self.line())

    def line(self):
        return self._process.stdout.readline()

    def after(self, n_chunks):
        """Returns when the processes have begun on so many chunks."""
        while n_chunks:
            read = self._process.stdout.read(n_chunks)
            assert read.strip(b".") == b""
            n_chunks -= len(read)

    def end(self, how, pid):
        """Kills a process, or waits for it; gives the status that waitpid says."""
        self.say(how, pid)
        self.line()  # dots
        return int(self.line())


@pytest.fixture(scope="module")
def nursery(tmp_path_factory):
    truth = tmp_path_factory.mktemp("truth") / "truth.npy"
    np.save(truth, BIG_TRUTH)
    layout = {name: value.str if name == "dtype" else value for name, value in vars(BIG).items()}
    package = str(Path(zloader.__file__).parent)
    command = [sys.executable, "-c", _NURSERY, package, json.dumps(layout), str(truth)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        yield _Nursery(process)
        process.stdin.close()
        assert process.wait(timeout=PATIENCE_S) == 0


@pytest.mark.slow
def test_a_process_killed_at_any_moment_leaves_nothing_wrong(nursery, tmp_path):
    chance = random.Random(5)
    n_missing = []
    for attempt in range(200):
        directory = tmp_path / str(attempt)
        directory.mkdir()
        pid = nursery.start(directory, attempt)
        nursery.after(chance.randrange(BIG.n_chunks))
        assert nursery.end("kill", pid) in (9, 0)  # 0: it was faster
        missing = _check_what_is_there(directory, BIG, BIG_TRUTH)
        n_missing.append(len(missing))
        _fill(directory, missing, BIG, BIG_TRUTH)
        assert _check_what_is_there(directory, BIG, BIG_TRUTH) == []
    assert sum(0 < n < BIG.n_chunks for n in n_missing) > 100  # so they were killed in the middle of it


def test_processes_killed_over_and_over_fill_it_in_the_end(nursery, tmp_path):
    """The same mirror, now with another process that goes on filling it."""
    chance = random.Random(6)
    for attempt in range(8):
        first, second = nursery.start(tmp_path, attempt), None
        nursery.after(chance.randrange(8))
        nursery.say("start", tmp_path, 100 + attempt)
        # Dots of the first stand before the second's process id.
        second = int(re.sub(rb"^\.*", b"", nursery.line()))
        assert nursery.end("kill", first) in (9, 0)
        _check_what_is_there(tmp_path, BIG, BIG_TRUTH)
        assert nursery.end("kill", second) in (9, 0)
        _check_what_is_there(tmp_path, BIG, BIG_TRUTH)
    assert nursery.end("wait", nursery.start(tmp_path, 0)) == 0
    assert _check_what_is_there(tmp_path, BIG, BIG_TRUTH) == []


def test_two_processes_fill_one_mirror_at_once(nursery, tmp_path):
    for attempt in range(10):
        directory = tmp_path / str(attempt)
        directory.mkdir()
        nursery.say("start", directory, 1)
        nursery.say("start", directory, 2)
        pids = []
        while len(pids) < 2:
            pids += [int(word) for word in re.findall(rb"\d+", nursery.line())]
        statuses = [nursery.end("wait", pid) for pid in pids]
        assert statuses == [0, 0]
        assert _check_what_is_there(directory, BIG, BIG_TRUTH) == []


def test_a_write_that_fails_warns_once_and_stays_correct(nursery, tmp_path):
    """As on a full disk: the system refuses to let the file grow, in the middle of chunk 10."""
    nursery.say("limit", tmp_path, 10 * 40_000 + 12_345)
    found = json.loads(nursery.line())
    assert found["missing"] == list(range(10, BIG.n_chunks))
    assert found["writable"] is False
    assert len(found["warnings"]) == 1
    assert "cannot write the mirror" in found["warnings"][0]
    assert _check_what_is_there(tmp_path, BIG, BIG_TRUTH) == list(range(10, BIG.n_chunks))
    _fill(tmp_path, range(10, BIG.n_chunks), BIG, BIG_TRUTH)  # once there is room again
    assert _check_what_is_there(tmp_path, BIG, BIG_TRUTH) == []


def test_all_that_open_a_new_cache_at_once_get_their_mirror(tmp_path, caplog):
    """As the ranks of one machine do."""
    n_threads = 8
    barrier = threading.Barrier(n_threads)

    def open_one(cache):
        barrier.wait(timeout=PATIENCE_S)
        place = open_place(Cache(directory=cache), PRINT, "store")
        return None if place is None else open_mirror(place, [LAYOUT])

    with ThreadPoolExecutor(n_threads) as threads:
        for attempt in range(100):
            cache = tmp_path / f"new {attempt}" / "cache"
            mirrors = list(threads.map(open_one, [cache] * n_threads))
            assert [record.getMessage() for record in caplog.records] == []
            assert None not in mirrors
            arrays = [mirror.arrays[LAYOUT.path] for mirror in mirrors]
            arrays[attempt % n_threads].put(3, _chunk(3))
            assert [array.n_present for array in arrays] == [1] * n_threads  # all look at the same file


# ---- the directory


def test_the_directory_belongs_to_the_fingerprint_and_to_its_owner(tmp_path):
    before = os.umask(0)
    try:
        cache = tmp_path / "some" / "cache"
        first, second = _place(cache, "a" * 32), _place(cache, "b" * 32)
        assert _place(cache, "a" * 32).directory == first.directory
        MirrorArray(first, LAYOUT).note()
        save_column(first, "indptr", np.arange(3))
        first.proof.note([])
    finally:
        os.umask(before)
    assert first.directory != second.directory
    for directory in (cache, first.directory, second.directory):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for file in first.directory.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert (cache / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55")


def test_a_cache_that_was_there_before_keeps_its_mode(tmp_path):
    tmp_path.chmod(0o755)
    directory = _place(tmp_path).directory
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert not (tmp_path / "CACHEDIR.TAG").exists()  # backups go on with what else is in it


def _below_a_file(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    return tmp_path / "file" / "cache"


def _a_file(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    return tmp_path / "file"


def _where_nothing_can_be_made(tmp_path):
    return Path("/proc/self/zloader")  # no permission bits: root may do anything with those


def _with_a_directory_where_a_file_belongs(tmp_path):
    directory = _place(tmp_path).directory
    (directory / "X%2Fdata.flat").mkdir()
    return tmp_path


def _open_to_others(tmp_path):
    _place(tmp_path).directory.chmod(0o770)
    return tmp_path


def _of_another_user(tmp_path):
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(_place(tmp_path).directory, 12345, 12345)
    return tmp_path


def _a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / f"{PRINT}-v3").symlink_to(tmp_path / "elsewhere")
    return tmp_path


def _in_a_cache_that_all_may_write_to(tmp_path):
    tmp_path.chmod(0o777)
    return tmp_path


def _in_a_cache_that_a_group_may_write_to(tmp_path):
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(tmp_path, 0, 12345)
    tmp_path.chmod(0o770)
    return tmp_path


def _in_a_cache_of_another_user(tmp_path):
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(tmp_path, 12345, 12345)
    return tmp_path


def _with_a_link_where_a_file_belongs(tmp_path):
    (tmp_path / "precious").write_bytes(b"1")
    (_place(tmp_path).directory / "X%2Fdata.flat").symlink_to(tmp_path / "precious")
    return tmp_path


@pytest.mark.parametrize(
    "place",
    [
        _below_a_file,
        _a_file,
        _where_nothing_can_be_made,
        _with_a_directory_where_a_file_belongs,
        _open_to_others,
        _of_another_user,
        _in_a_cache_that_all_may_write_to,
        _in_a_cache_that_a_group_may_write_to,
        _in_a_cache_of_another_user,
        _a_link,
        _with_a_link_where_a_file_belongs,
    ],
)
def test_a_cache_that_cannot_be_used_gives_none_and_one_warning(tmp_path, caplog, place):
    cache = place(tmp_path)
    place = open_place(Cache(directory=cache), PRINT, "store")
    assert place is None or open_mirror(place, [LAYOUT]) is None
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("zloader", logging.WARNING)
    assert str(cache) in record.getMessage()


@pytest.mark.parametrize("mode", [0o1777, 0o1770, 0o755])
def test_a_cache_in_which_others_can_rename_nothing_is_used(tmp_path, caplog, mode):
    """Such as /tmp itself, with other users' mirrors in it."""
    (tmp_path / f"{'a' * 32}-v3").mkdir(mode=0)
    tmp_path.chmod(mode)
    assert open_mirror(_place(tmp_path), [LAYOUT]) is not None
    assert not caplog.records


def test_a_cache_that_the_group_of_its_user_alone_may_write_to_is_used(tmp_path, monkeypatch):
    """Many systems give each user such a group, and let it write by default."""
    tmp_path.chmod(0o775)
    group = SimpleNamespace(gr_name="me", gr_mem=[])
    monkeypatch.setattr("pwd.getpwuid", lambda _: SimpleNamespace(pw_name="me"))
    monkeypatch.setattr("grp.getgrgid", lambda _: group)
    _place(tmp_path)
    group.gr_mem = ["me"]
    _place(tmp_path)
    group.gr_mem = ["me", "you"]
    with pytest.raises(PermissionError, match="mode 0o775"):
        _place(tmp_path)
    group.gr_mem, group.gr_name = [], "lab"
    with pytest.raises(PermissionError, match="mode 0o775"):
        _place(tmp_path)


NAMES = [
    "X/data",
    "X%2Fdata",
    "..",
    ".",
    "../../escaped",
    "/etc/escaped",
    "%",
    "%2e%2e/x",
    "a\nb",
    "é",
    "layers/a.b",
    "",
]


def test_odd_names_stay_inside_and_apart(tmp_path):
    place = _place(tmp_path / "cache")
    mirror = open_mirror(place, [_layout(name) for name in NAMES])
    assert list(mirror.arrays) == NAMES
    directory = place.directory
    before = len(list(directory.iterdir()))
    for number, name in enumerate(NAMES):
        mirror.arrays[name].put(0, np.full(10, number, "<u2"))
        save_column(place, name, np.array([number]))
    for number, name in enumerate(NAMES):
        assert mirror.arrays[name].elements[:10].tolist() == [number] * 10
        assert load_column(place, name, np.array([0])).tolist() == [number]
    assert all(file.is_file() for file in directory.iterdir())
    assert len(list(directory.iterdir())) == before + len(NAMES) + 1  # and proved.json
    outside = {path for path in tmp_path.rglob("*") if directory not in path.parents and path != directory}
    assert outside == {tmp_path / "cache", *(tmp_path / "cache" / name for name in ("CACHEDIR.TAG", "zloader-cache"))}


# ---- whole columns

COLUMNS = {
    "indptr": np.array([0, 3, 3, 2**40], np.int64),
    "codes": np.array([-1, 0, 5], np.int8),
    "floats": np.array([np.nan, -0.0, 1e300]),
    "flags": np.array([True, False, True]),
    "obsm": np.arange(12, dtype=np.float32).reshape(3, 4),
    "nothing": np.empty(0, np.int64),
}


def _equal(found, wanted):
    return found.dtype == wanted.dtype and found.shape == wanted.shape and found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_is_kept(tmp_path, name, caplog):
    place = _place(tmp_path)
    assert load_column(place, name, COLUMNS[name]) is None
    save_column(place, name, COLUMNS[name])
    column = load_column(place, name, COLUMNS[name])
    assert _equal(column, COLUMNS[name])
    assert not column.flags.writeable
    assert not caplog.records
    assert {file.name for file in place.directory.iterdir()} == {"users", "mirror.json", f"{name}.npy", "proved.json"}


def test_a_column_is_mapped_and_outlives_its_replacement(tmp_path):
    place = _place(tmp_path)
    save_column(place, "x", np.arange(1000))
    column = load_column(place, "x", np.arange(1000))
    assert isinstance(column.base, np.memmap)
    save_column(place, "x", np.zeros(1000))
    np.testing.assert_array_equal(column, np.arange(1000))
    np.testing.assert_array_equal(load_column(place, "x", np.zeros(1000)), np.zeros(1000))


def test_a_torn_column_is_not_used(tmp_path, caplog):
    place = _place(tmp_path)
    save_column(place, "x", COLUMNS["indptr"])
    file = place.directory / "x.npy"
    whole = file.read_bytes()
    for length in range(len(whole)):
        caplog.clear()
        file.write_bytes(whole[:length])
        assert load_column(place, "x", COLUMNS["indptr"]) is None, f"{length} of {len(whole)} bytes"
        assert len(caplog.records) == 1
    file.write_bytes(whole)
    assert _equal(load_column(place, "x", COLUMNS["indptr"]), COLUMNS["indptr"])


def test_a_column_with_a_flipped_bit_is_not_used(tmp_path):
    """In the values, in the checksum, and in the header, which says how the values are to be understood."""
    place = _place(tmp_path)
    save_column(place, "x", COLUMNS["indptr"])
    file = place.directory / "x.npy"
    whole = file.read_bytes()
    wrong = []
    for at in range(len(whole)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[at] ^= 1 << bit
            file.write_bytes(flipped)
            column = load_column(place, "x", COLUMNS["indptr"])
            if column is not None and not _equal(column, COLUMNS["indptr"]):
                wrong.append((at, bit, column.dtype.str))
    assert wrong == []


def test_drafts_left_behind_do_not_disturb(tmp_path):
    place = _place(tmp_path)
    own, others = (
        place.directory / f"x.npy.{name}.draft" for name in (f"{os.getpid()}.{threading.get_ident()}", "1.1")
    )
    own.write_bytes(b"half a file" * 1000)
    others.write_bytes(b"half a file")
    assert load_column(place, "x", COLUMNS["indptr"]) is None
    save_column(place, "x", COLUMNS["indptr"])
    assert _equal(load_column(place, "x", COLUMNS["indptr"]), COLUMNS["indptr"])


def test_a_column_that_cannot_be_kept_is_a_warning(tmp_path, caplog):
    place = _place(tmp_path)
    (place.directory / "x.npy").mkdir()
    save_column(place, "x", COLUMNS["indptr"])
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert not list(place.directory.glob("*.draft"))
    assert load_column(place, "x", COLUMNS["indptr"]) is None


@pytest.mark.parametrize("other", [np.zeros(3, np.int64), np.zeros((4, 1), np.int64), np.zeros(4, np.float64)])
def test_a_column_of_another_shape_or_dtype_is_not_used(tmp_path, caplog, other):
    place = _place(tmp_path)
    save_column(place, "x", COLUMNS["indptr"])
    assert load_column(place, "x", other) is None
    (record,) = caplog.records
    assert "int64 of shape (4,)" in record.getMessage()
    assert load_column(place, "x", COLUMNS["indptr"]) is not None


def test_an_object_of_another_size_is_not_used(tmp_path, caplog):
    place = _place(tmp_path)
    save_object(place, "zarr.json", b"12345")
    assert load_object(place, "zarr.json", 5) == load_object(place, "zarr.json") == b"12345"
    assert not caplog.records
    assert load_object(place, "zarr.json", 6) is None
    (record,) = caplog.records
    assert "5 of 6 bytes" in record.getMessage()
