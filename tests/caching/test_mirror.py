"""A mirror stores blocks of rows, and whatever happens to its files, each block is either correct or missing."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import random
import re
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import PATIENCE_S, vector_layout
from hypothesis import given
from hypothesis import strategies as st

import zloader
from zloader.caching import rows_file
from zloader.caching.directory import MirrorDirectory, open_mirror_directory
from zloader.caching.kept import load_array as load_checked
from zloader.caching.kept import load_object, save_object
from zloader.caching.kept import save_array as save_windows
from zloader.caching.rows_file import RowsFile, open_rows
from zloader.common import page_cache
from zloader.common.options import Cache
from zloader.storage.layout import MatrixLayout
from zloader.storage.row_blocks import RowForm

pytestmark = pytest.mark.any_version


def _form(name="X", *, n_rows=95, block_rows=10, width=4):
    """Rows of so many uint16."""
    values = np.dtype("<u2")
    return RowForm(
        name=name,
        n_rows=n_rows,
        block_rows=block_rows,
        genes=None,
        values=values,
        width=width,
        coded=False,
        decoded_bytes=n_rows * width * 2,
    )


PRINT = "f" * 32


def _directory(cache, fingerprint=PRINT):
    """The directory of the mirror in a cache."""
    return MirrorDirectory(Cache(directory=cache), fingerprint, "store")


def save_array(directory, name, column):
    return save_windows(directory, name, [column], shape=column.shape, dtype=column.dtype)


def load_array(directory, name, like):
    return load_checked(directory, name, shape=like.shape, dtype=like.dtype)


FORM = _form()
N_BLOCKS = FORM.n_blocks
_VALUES = vector_layout("X", "<u2", n_elements=95 * 4, chunk_elements=40)
MATRIX = MatrixLayout(path="X", n_rows=95, n_genes=4, values=_VALUES, genes=None)
ALL = np.arange(N_BLOCKS)


def _truth(form, seed=0):
    """Rows without zero bytes, so that every lost byte is noticed."""
    found = np.random.default_rng(seed).integers(1, 256, form.n_rows * form.row_bytes, np.uint8)
    return found.view(form.values).reshape(form.n_rows, form.width)


TRUTH = _truth(FORM)


def _block(block, form=FORM, truth=TRUTH):
    return truth[block * form.block_rows : (block + 1) * form.block_rows]


def _open(cache, form=FORM):
    return RowsFile(_directory(cache), form)


def _put(mirror, block, rows):
    content = rows.reshape(-1).view(np.uint8)
    mirror.put(np.array([block]), np.array([len(content)]), content)


def _fill(directory, blocks=ALL, form=FORM, truth=TRUTH):
    mirror = _open(directory, form)
    for block in blocks:
        _put(mirror, int(block), _block(block, form, truth))
    return mirror


def _rows(mirror, rows):
    """Some rows as they are in a mirror."""
    kept = mirror.rows(rows)
    return kept.values[kept.starts[1][:, None] + np.arange(mirror.form.width)]


def _check_present_blocks(directory, form=FORM, truth=TRUTH):
    """Opens the mirror again and compares every present block with the truth; returns the missing blocks."""
    mirror = _open(directory, form)
    blocks = np.arange(form.n_blocks)
    missing = mirror.missing(blocks)
    rows = form.rows_of(np.setdiff1d(blocks, missing))
    if len(rows):
        np.testing.assert_array_equal(_rows(mirror, rows), truth[rows])
    return missing.tolist()


# ---- writing and reading blocks


def test_exactly_the_written_blocks_are_present(tmp_path):
    mirror = _open(tmp_path)
    assert mirror.missing(ALL).tolist() == ALL.tolist()
    for block in (7, 0, 9):  # the last block is a short one
        _put(mirror, block, _block(block))
    assert mirror.contains(np.array([0, 9, 7]))
    assert not mirror.contains(np.array([0, 1]))
    assert mirror.missing(ALL).tolist() == [1, 2, 3, 4, 5, 6, 8]
    assert mirror.missing(np.array([9, 3, 0, 1])).tolist() == [3, 1]  # in the order given
    rows = np.array([94, 70, 3, 70])
    np.testing.assert_array_equal(_rows(mirror, rows), TRUTH[rows])
    assert not mirror.rows(rows).values.flags.writeable


def test_several_blocks_are_written_at_once(tmp_path):
    mirror, blocks = _open(tmp_path), np.array([2, 3, 9])
    content = np.concatenate([_block(block) for block in blocks]).reshape(-1).view(np.uint8)
    mirror.put(blocks, np.array([80, 160, 200]), content)
    assert _check_present_blocks(tmp_path) == [0, 1, 4, 5, 6, 7, 8]


def test_another_process_verifies_blocks_on_first_use(tmp_path):
    """Two RowsFiles share no more than two processes do."""
    other = _open(tmp_path)
    _fill(tmp_path, [2, 3])
    assert not other.contains(np.array([2]))
    assert other.missing(np.array([2, 3, 4])).tolist() == [4]
    assert other.contains(np.array([2, 3]))
    np.testing.assert_array_equal(_rows(other, np.arange(20, 40)), TRUTH[20:40])


def test_a_block_of_zeros_differs_from_an_absent_one(tmp_path):
    zeros = np.zeros_like(TRUTH)
    _fill(tmp_path, [1, 5], truth=zeros)
    assert _check_present_blocks(tmp_path, truth=zeros) == [0, 2, 3, 4, 6, 7, 8, 9]


@given(rows=st.lists(st.integers(0, 94), max_size=40))
def test_rows_anywhere_and_in_any_order(tmp_path_factory, rows):
    mirror = _open(tmp_path_factory.getbasetemp() / "rows")
    for block in mirror.missing(ALL).tolist():
        _put(mirror, block, _block(block))
    if rows:
        np.testing.assert_array_equal(_rows(mirror, np.array(rows)), TRUTH[rows])


def test_releasing_a_mapped_column_frees_memory_and_keeps_the_values(tmp_path):
    directory = _directory(tmp_path)
    column = save_array(directory, "x", np.arange(1_000_000))
    for _ in range(2):
        assert int(column.sum()) == 499_999_500_000
        before = _resident_files()
        page_cache.release(column)
        assert _resident_files() <= before - 7_000_000
    page_cache.release(np.arange(3))  # not a memory map: no effect


def _resident_files():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile"))
    return int(line.split()[1]) * 1024


def test_the_file_is_as_large_as_what_is_in_it(tmp_path):
    form = _form(n_rows=1_000_000, block_rows=1000)
    _put(_open(tmp_path, form), 500, np.full((1000, 4), 7, "<u2"))
    assert _damaged(tmp_path, "rows").stat().st_size == 8000
    assert _check_present_blocks(tmp_path, form, np.full((1_000_000, 4), 7, "<u2")) == [*range(500), *range(501, 1000)]


# ---- damaged files


def _damaged(tmp_path, suffix):
    (file,) = tmp_path.glob(f"*/*.{suffix}")
    return file


@dataclass(frozen=True)
class Full:
    """The files of a full mirror: that of the blocks, their index, and the others."""

    content: Path
    words: Path
    others: list[Path]


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    cache = tmp_path_factory.mktemp("full")
    _fill(cache).record_verified()
    files = {file.suffix: file for file in _directory(cache).path.iterdir()}
    return Full(files.pop(".rows"), files.pop(".index"), list(files.values()))


@contextlib.contextmanager
def _copy_of(full):
    """Copies the files of a full mirror, for each example; yields the cache and the directory of its mirror."""
    cache = full.content.parent.parent / "copy"
    directory = _directory(cache).path
    for file in (full.content, full.words, *full.others):
        (directory / file.name).write_bytes(file.read_bytes())
    mirror = _open(cache)
    assert mirror.missing(ALL).tolist() == []
    mirror.record_verified()
    assert _open(cache).contains(ALL)  # without reading the chunks
    yield cache, directory
    for file in directory.iterdir():
        file.unlink()


HEADER = 8 * 11  # bytes of an index
N_BYTES = 95 * 8


@pytest.mark.slow
@given(at=st.integers(0, N_BYTES - 1), change=st.integers(1, 255))
def test_a_flipped_byte_of_the_rows_is_a_miss(full, at, change):
    with _copy_of(full) as (cache, directory):
        file = directory / full.content.name
        stored, block = bytearray(file.read_bytes()), at // 80  # bytes between blocks belong to none
        stored[_starts(directory)[block] + at % 80] ^= change
        file.write_bytes(stored)
        assert _check_present_blocks(cache) == [block]


def _starts(directory):
    return np.fromfile(directory / "X.index", "<u8")[HEADER // 8 :: 2].tolist()


@pytest.mark.slow
@given(offset=st.integers(0, HEADER + 16 * N_BLOCKS - 1), change=st.integers(1, 255))
def test_a_flipped_byte_of_the_index_is_a_miss(full, offset, change):
    with _copy_of(full) as (cache, directory):
        file = directory / full.words.name
        stored = bytearray(file.read_bytes())
        assert len(stored) == HEADER + 16 * N_BLOCKS
        stored[offset] ^= change
        file.write_bytes(stored)
        assert _check_present_blocks(cache) == (ALL.tolist() if offset < HEADER else [(offset - HEADER) // 16])


@pytest.mark.slow
@given(length=st.integers(0, N_BYTES - 1))
def test_truncated_rows_are_misses(full, length):
    with _copy_of(full) as (cache, directory):
        starts = np.array(_starts(directory))
        os.truncate(directory / full.content.name, length)
        ends = starts + np.append(np.full(9, 80), 40)
        assert _check_present_blocks(cache) == np.flatnonzero(ends > length // 8 * 8).tolist()


@pytest.mark.slow
@given(length=st.integers(0, HEADER + 16 * N_BLOCKS - 1))
def test_a_truncated_index_is_a_miss(full, length):
    with _copy_of(full) as (cache, directory):
        os.truncate(directory / full.words.name, length)
        assert _check_present_blocks(cache) == ALL.tolist()


@pytest.mark.parametrize("which", ["content", "words"])
def test_a_deleted_file_is_a_miss(full, which):
    with _copy_of(full) as (cache, directory):
        (directory / getattr(full, which).name).unlink()
        assert _check_present_blocks(cache) == ALL.tolist()


@pytest.mark.parametrize("which", ["content", "words"])
def test_a_file_that_is_too_long_gives_no_wrong_values(full, which):
    with _copy_of(full) as (cache, directory):
        file = directory / getattr(full, which).name
        file.write_bytes(file.read_bytes() + b"\x07" * 100)
        _check_present_blocks(cache)


def test_an_index_of_other_rows_is_ignored(full):
    for other in (_form(block_rows=19), _form(width=2)):
        with _copy_of(full) as (cache, _):
            assert _check_present_blocks(cache, other, _truth(other)) == list(range(other.n_blocks))


def test_a_change_with_an_unchanged_modification_time_is_noticed(full):
    """As after the clock was set back: the size and the modification time are the same, the bytes differ."""
    with _copy_of(full) as (cache, directory):
        file = directory / full.content.name
        before = file.stat()
        stored = bytearray(file.read_bytes())
        stored[_starts(directory)[2]] ^= 1
        file.write_bytes(stored)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert _check_present_blocks(cache) == [2]


def test_a_file_is_recorded_as_verified_only_if_all_of_it_was_compared(full):
    with _copy_of(full) as (cache, directory):
        file = directory / full.content.name
        stored = bytearray(file.read_bytes())
        stored[-1] ^= 1
        file.write_bytes(stored)
        mirror = _open(cache)
        assert mirror.missing(ALL[:-1]).tolist() == []
        mirror.record_verified()
        assert _check_present_blocks(cache) == [9]


def test_verified_marks_of_another_boot_are_ignored(full):
    """After power loss, files may have lost writes although their times are unchanged."""
    with _copy_of(full) as (cache, directory):
        marks = directory / "proved.json"
        marks.write_text(json.dumps(json.loads(marks.read_text()) | {"boot": "another"}))
        assert not _open(cache).contains(ALL)
        for torn in ("", "[]", "{", '{"boot": 1}', "null"):
            marks.write_text(torn)
            assert not _open(cache).contains(ALL)
        assert _check_present_blocks(cache) == []


def test_a_chunk_that_another_process_found_damaged_is_not_contained(full):
    """Also by one that verified it before: its bytes may have changed since."""
    with _copy_of(full) as (cache, directory):
        mirror = _open(cache)
        assert mirror.missing(ALL).tolist() == []
        assert mirror.contains(ALL)
        file = directory / full.content.name
        file.write_bytes(b"\x00" + file.read_bytes()[1:])
        assert _open(cache).missing(ALL).tolist() == [0]
        assert not mirror.contains(ALL)
        assert mirror.contains(ALL[1:])


def test_a_damaged_chunk_is_reported_and_can_be_written_again(full, caplog):
    with _copy_of(full) as (cache, directory):
        file = directory / full.content.name
        file.write_bytes(b"\x00" + file.read_bytes()[1:])
        mirror = _open(cache)
        assert mirror.missing(ALL).tolist() == mirror.missing(ALL).tolist() == [0]
        assert [record.levelname for record in caplog.records] == ["WARNING"]  # once
        _put(mirror, 0, _block(0))
        assert mirror.missing(ALL).tolist() == []
        assert _check_present_blocks(cache) == []


# ---- several processes, and killed ones

# Fills mirrors in forked children, since starting a new interpreter would take a second. Reads one command per line:
# `start DIRECTORY SEED` prints the child's process ID, and a dot before each chunk; `kill PID` and `wait PID` print the
# status from waitpid; `limit DIRECTORY BYTES` fills with a limit on the size of each file.
# The package is set up without its __init__, which would import torch.
_NURSERY = """
import json, logging, os, pickle, resource, sys, traceback, types
from pathlib import Path

package = types.ModuleType("zloader")
package.__path__ = [sys.argv[1]]
sys.modules["zloader"] = package
import numpy as np
from zloader.caching.directory import MirrorDirectory
from zloader.caching.rows_file import RowsFile
from zloader.common.options import Cache

form = pickle.loads(bytes.fromhex(sys.argv[2]))
truth = np.load(sys.argv[3])

def mirror_directory(directory):
    return MirrorDirectory(Cache(directory=directory), "f" * 32, "store")

def put_all(mirror, order, before_each):
    for block in order:
        before_each()
        rows = truth[block * form.block_rows : (block + 1) * form.block_rows].reshape(-1).view("u1")
        mirror.put(np.array([block]), np.array([len(rows)]), rows)

def fill(directory, seed):
    order = np.random.default_rng(int(seed)).permutation(form.n_blocks).tolist()
    os.write(1, b"%d\\n" % os.getpid())
    put_all(RowsFile(mirror_directory(directory), form), order, lambda: os.write(1, b"."))

def fill_with_limit(directory, n_bytes):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("zloader").addHandler(handler)
    mirror = RowsFile(mirror_directory(directory), form)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(n_bytes), resource.RLIM_INFINITY))
    put_all(mirror, range(form.n_blocks), lambda: None)
    missing = mirror.missing(np.arange(form.n_blocks)).tolist()
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
BIG = _form(n_rows=64 * 5_000 - 7, block_rows=5_000)
BIG_TRUTH = _truth(BIG)


class _Nursery:
    def __init__(self, process):
        self._process = process

    def say(self, *words):
        self._process.stdin.write(" ".join(map(str, words)).encode() + b"\n")

    def start(self, directory, seed):
        """Starts a process that fills the mirror; returns its ID."""
        self.say("start", directory, seed)
        return int(self.line())

    def line(self):
        return self._process.stdout.readline()

    def after(self, n_chunks):
        """Waits until the processes have started `n_chunks` chunks."""
        while n_chunks:
            read = self._process.stdout.read(n_chunks)
            assert read.strip(b".") == b""
            n_chunks -= len(read)

    def end(self, how, pid):
        """Kills a process, or waits for it; returns the status from waitpid."""
        self.say(how, pid)
        self.line()  # dots
        return int(self.line())


@pytest.fixture(scope="module")
def nursery(tmp_path_factory):
    truth = tmp_path_factory.mktemp("truth") / "truth.npy"
    np.save(truth, BIG_TRUTH)
    package = str(Path(zloader.__file__).parent)
    command = [sys.executable, "-c", _NURSERY, package, pickle.dumps(BIG).hex(), str(truth)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        yield _Nursery(process)
        process.stdin.close()
        assert process.wait(timeout=PATIENCE_S) == 0


@pytest.mark.slow
def test_a_process_killed_at_any_moment_leaves_no_wrong_values(nursery, tmp_path):
    chance = random.Random(5)
    n_missing = []
    for attempt in range(200):
        directory = tmp_path / str(attempt)
        directory.mkdir()
        pid = nursery.start(directory, attempt)
        nursery.after(chance.randrange(BIG.n_blocks))
        assert nursery.end("kill", pid) in (9, 0)  # 0: it had finished
        missing = _check_present_blocks(directory, BIG, BIG_TRUTH)
        n_missing.append(len(missing))
        _fill(directory, missing, BIG, BIG_TRUTH)
        assert _check_present_blocks(directory, BIG, BIG_TRUTH) == []
    assert sum(0 < n < BIG.n_blocks for n in n_missing) > 100  # most were killed while filling


@pytest.mark.slow
def test_processes_killed_repeatedly_fill_the_mirror_in_the_end(nursery, tmp_path):
    """Two processes fill one mirror; the first is killed, then the second."""
    chance = random.Random(6)
    for attempt in range(8):
        first, second = nursery.start(tmp_path, attempt), None
        nursery.after(chance.randrange(8))
        nursery.say("start", tmp_path, 100 + attempt)
        # The first process's dots come before the second's process ID.
        second = int(re.sub(rb"^\.*", b"", nursery.line()))
        assert nursery.end("kill", first) in (9, 0)
        _check_present_blocks(tmp_path, BIG, BIG_TRUTH)
        assert nursery.end("kill", second) in (9, 0)
        _check_present_blocks(tmp_path, BIG, BIG_TRUTH)
    assert nursery.end("wait", nursery.start(tmp_path, 0)) == 0
    assert _check_present_blocks(tmp_path, BIG, BIG_TRUTH) == []


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
        assert _check_present_blocks(directory, BIG, BIG_TRUTH) == []


def test_a_write_that_fails_warns_once_and_stays_correct(nursery, tmp_path):
    """As on a full disk: the file cannot grow further, in the middle of chunk 10."""
    nursery.say("limit", tmp_path, 10 * 40_000 + 12_345)
    found = json.loads(nursery.line())
    assert found["missing"] == list(range(10, BIG.n_blocks))
    assert found["writable"] is False
    assert len(found["warnings"]) == 1
    assert "cannot write the mirror" in found["warnings"][0]
    assert _check_present_blocks(tmp_path, BIG, BIG_TRUTH) == list(range(10, BIG.n_blocks))
    _fill(tmp_path, range(10, BIG.n_blocks), BIG, BIG_TRUTH)  # once there is space again
    assert _check_present_blocks(tmp_path, BIG, BIG_TRUTH) == []


@pytest.mark.slow
def test_threads_that_open_a_new_cache_at_once_share_its_mirror(tmp_path, caplog):
    """The ranks of one machine do this."""
    n_threads = 8
    barrier = threading.Barrier(n_threads)

    def open_one(cache):
        barrier.wait(timeout=PATIENCE_S)
        directory = open_mirror_directory(Cache(directory=cache), PRINT, "store")
        return None if directory is None else open_rows(directory, MATRIX, None)

    with ThreadPoolExecutor(n_threads) as threads:
        for attempt in range(100):
            cache = tmp_path / f"new {attempt}" / "cache"
            mirrors = list(threads.map(open_one, [cache] * n_threads))
            assert [record.getMessage() for record in caplog.records] == []
            assert None not in mirrors
            _put(mirrors[attempt % n_threads].rows, 0, TRUTH)  # small dense rows are one block
            assert [mirror.rows.held.chunks_held for mirror in mirrors] == [1] * n_threads  # all map the same file


# ---- the directory


def test_the_directory_belongs_to_the_fingerprint_and_to_its_owner(tmp_path):
    before = os.umask(0)
    try:
        cache = tmp_path / "some" / "cache"
        first, second = _directory(cache, "a" * 32), _directory(cache, "b" * 32)
        assert _directory(cache, "a" * 32).path == first.path
        RowsFile(first, FORM).record_verified()
        save_array(first, "indptr", np.arange(3))
        first.verified.record([])
    finally:
        os.umask(before)
    assert first.path != second.path
    for directory in (cache, first.path, second.path):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for file in first.path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert (cache / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55")


def test_a_cache_that_was_there_before_keeps_its_mode(tmp_path):
    tmp_path.chmod(0o755)
    directory = _directory(tmp_path).path
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert not (tmp_path / "CACHEDIR.TAG").exists()  # backups still include its other files


def _below_a_file(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    return tmp_path / "file" / "cache"


def _where_nothing_can_be_created(tmp_path):
    return Path("/proc/self/zloader")  # permission bits would not stop root


def _with_a_directory_where_a_file_belongs(tmp_path):
    directory = _directory(tmp_path).path
    (directory / "X.rows").mkdir()
    return tmp_path


def _open_to_others(tmp_path):
    _directory(tmp_path).path.chmod(0o770)
    return tmp_path


def _of_another_user(tmp_path):
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(_directory(tmp_path).path, 12345, 12345)
    return tmp_path


def _a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "zloader-cache").touch()
    (tmp_path / f"{PRINT}-v6").symlink_to(tmp_path / "elsewhere")
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
    (_directory(tmp_path).path / "X.rows").symlink_to(tmp_path / "precious")
    return tmp_path


@pytest.mark.parametrize(
    "damage",
    [
        _below_a_file,
        _where_nothing_can_be_created,
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
def test_an_unusable_cache_gives_none_and_one_warning(tmp_path, caplog, damage):
    cache = damage(tmp_path)
    directory = open_mirror_directory(Cache(directory=cache), PRINT, "store")
    assert directory is None or open_rows(directory, MATRIX, None) is None
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("zloader", logging.WARNING)
    assert str(cache) in record.getMessage()


@pytest.mark.parametrize("mode", [0o1777, 0o1770, 0o755])
def test_a_cache_in_which_others_cannot_rename_files_is_used(tmp_path, caplog, mode):
    """For example /tmp, which contains other users' mirrors."""
    (tmp_path / "zloader-cache").touch()
    (tmp_path / f"{'a' * 32}-v6").mkdir(mode=0)
    tmp_path.chmod(mode)
    assert open_rows(_directory(tmp_path), MATRIX, None) is not None
    assert not caplog.records


def test_a_cache_that_is_writable_by_a_private_group_is_used(tmp_path, monkeypatch):
    """Many systems give each user a private group, with write access by default."""
    tmp_path.chmod(0o775)
    group = SimpleNamespace(gr_name="me", gr_mem=[])
    monkeypatch.setattr("pwd.getpwuid", lambda _: SimpleNamespace(pw_name="me"))
    monkeypatch.setattr("grp.getgrgid", lambda _: group)
    _directory(tmp_path)
    group.gr_mem = ["me"]
    _directory(tmp_path)
    group.gr_mem = ["me", "you"]
    with pytest.raises(PermissionError, match="mode 0o775"):
        _directory(tmp_path)
    group.gr_mem, group.gr_name = [], "lab"
    with pytest.raises(PermissionError, match="mode 0o775"):
        _directory(tmp_path)


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


def test_files_of_odd_names_stay_inside_and_distinct(tmp_path):
    directory = _directory(tmp_path / "cache")
    files = {name: RowsFile(directory, _form(name)) for name in NAMES}
    path = directory.path
    before = len(list(path.iterdir()))
    for number, name in enumerate(NAMES):
        _put(files[name], 0, np.full((10, 4), number, "<u2"))
        save_object(directory, name, bytes([number]))
        save_array(directory, name, np.full(3, number))
    for number, name in enumerate(NAMES):
        assert _rows(files[name], np.arange(10)).tolist() == [[number] * 4] * 10
        assert load_object(directory, name) == bytes([number])
        assert load_array(directory, name, np.zeros(3, np.int64)).tolist() == [number] * 3
    assert all(file.is_file() for file in path.iterdir())
    assert len(list(path.iterdir())) == before + 2 * len(NAMES) + 1  # and proved.json
    outside = {found for found in tmp_path.rglob("*") if path not in found.parents and found != path}
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
def test_a_column_is_cached(tmp_path, name, caplog):
    directory = _directory(tmp_path)
    assert load_array(directory, name, COLUMNS[name]) is None
    save_array(directory, name, COLUMNS[name])
    column = load_array(directory, name, COLUMNS[name])
    assert _equal(column, COLUMNS[name])
    assert not column.flags.writeable
    assert not caplog.records
    files = {"users", "mirror.json", f"{name}.array", "proved.json"}
    assert {file.name for file in directory.path.iterdir()} == files


def test_a_column_is_saved_in_windows_of_any_size(tmp_path):
    directory, rows = _directory(tmp_path), np.arange(66, dtype=np.int64).reshape(33, 2)
    windows = [rows[:1], rows[1:8], rows[8:8], rows[8:31], rows[31:]]
    saved = save_windows(directory, "x", windows, shape=rows.shape, dtype=rows.dtype)
    for found in (saved, load_array(directory, "x", rows), load_array(_directory(tmp_path), "x", rows)):
        assert _equal(found, rows)
        assert page_cache.is_mapped(found)


def _loaded_after(directory, suffix, damages):
    """The column `indptr` of COLUMNS as it is loaded after each damage to one of its files, in a mirror of its own."""
    save_array(directory, "x", COLUMNS["indptr"])
    file = directory.path / f"x.{suffix}"
    whole = file.read_bytes()
    for damage in damages(whole):
        file.write_bytes(damage)
        yield load_array(directory, "x", COLUMNS["indptr"])
        save_array(directory, "x", COLUMNS["indptr"])
        assert _equal(load_array(directory, "x", COLUMNS["indptr"]), COLUMNS["indptr"])
        assert file.read_bytes() == whole


def test_a_truncated_column_is_not_used(tmp_path):
    cut = _loaded_after(
        _directory(tmp_path), "array", lambda whole: (whole[:length] for length in range(0, len(whole), 5))
    )
    assert all(column is None or _equal(column, COLUMNS["indptr"]) for column in cut)


def test_a_column_with_a_flipped_bit_is_not_used(tmp_path):
    """In the values, in the checksum, or in the header with the layout."""

    def flipped(whole):
        for at in range(8 * len(whole)):
            if at % 5 == 0:
                changed = bytearray(whole)
                changed[at // 8] ^= 1 << at % 8
                yield changed

    loaded = list(_loaded_after(_directory(tmp_path), "array", flipped))
    assert loaded.count(None) == len(loaded)


def test_leftover_drafts_are_ignored(tmp_path):
    directory = _directory(tmp_path)
    own, others = (directory.path / f"x.kept.{name}.draft" for name in (f"{os.getpid()}.{threading.get_ident()}", "1"))
    own.write_bytes(b"half a file" * 1000)
    others.write_bytes(b"half a file")
    assert load_object(directory, "x") is None
    save_object(directory, "x", b"whole")
    assert load_object(directory, "x") == b"whole"


@pytest.mark.parametrize("form", ["column", "object"])
def test_what_cannot_be_cached_causes_a_warning(tmp_path, caplog, form):
    directory = _directory(tmp_path)
    (directory.path / ("x.array" if form == "column" else "x.kept")).mkdir()
    if form == "column":
        assert save_array(directory, "x", COLUMNS["indptr"]) is None
    else:
        save_object(directory, "x", b"12345")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert not list(directory.path.glob("*.draft"))


@pytest.mark.parametrize("other", [np.zeros(3, np.int64), np.zeros(4, np.float64)])
def test_a_column_of_another_length_or_dtype_is_not_used(tmp_path, caplog, other):
    directory = _directory(tmp_path)
    save_array(directory, "x", COLUMNS["indptr"])
    assert load_array(directory, "x", other) is None
    assert not caplog.records
    save_array(directory, "x", other)
    assert _equal(load_array(directory, "x", other), other)


def test_only_blocks_that_have_disk_space_are_written(tmp_path):
    form = _form(n_rows=64 * 512, block_rows=512)  # blocks of 4 KiB
    directory = MirrorDirectory(Cache(tmp_path, max_bytes="400kB"), PRINT, "store")
    file, content = RowsFile(directory, form), np.ones(64 * 4096, np.uint8)
    file.put(np.arange(64), np.arange(1, 65) * 4096, content)
    assert 0 < file.held.chunks_held < 64
    assert not file.writable
    assert file.missing(np.arange(64)).tolist() == list(range(file.held.chunks_held, 64))


# ------------------------------------------------------------------------------------------------ many blocks


def test_words_are_looked_at_in_windows(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_file, "_WINDOW", 8)
    form = _form(n_rows=395)
    file, held = RowsFile(_directory(tmp_path), form), [0, 7, 8, 39]
    for block in held:
        _put(file, block, np.ones((5 if block == 39 else 10, 4), "<u2"))
    assert (file.held.chunks_held, file.held.bytes_held) == (4, 8 * (30 + 5))
    file.record_verified()
    again = RowsFile(_directory(tmp_path), form)
    assert again.contains(np.array(held))
    assert again.missing(np.arange(40)).tolist() == [block for block in range(40) if block not in held]


def test_a_large_file_is_mapped_anew_once_much_of_it_was_read(tmp_path, monkeypatch):
    file = _fill(tmp_path)
    before = file.rows(np.arange(95)).values
    assert file.rows(np.arange(95)).values.ctypes.data == before.ctypes.data
    monkeypatch.setattr(rows_file, "_LARGE_FILE", 500)
    monkeypatch.setattr(rows_file, "_MOST_MAPPED", 100)
    file.rows(np.arange(95))
    after = file.rows(np.arange(95)).values
    assert after.ctypes.data != before.ctypes.data
    np.testing.assert_array_equal(before, after)  # the old map lasts for those who hold it
