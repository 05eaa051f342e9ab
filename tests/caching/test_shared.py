"""A mirror on a file system that several machines share: what one of them writes, the others see late or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from helpers import PATIENCE_S, check_minibatch, counts, digest
from rich.console import Console

import zloader as zl
from zloader.caching import checksums
from zloader.caching.atomic_files import cached_path
from zloader.caching.checksums import word_offset
from zloader.caching.directory import MirrorDirectory, drop, mirrors
from zloader.caching.leases import Leases
from zloader.caching.mirror import MirrorArray, load_column, save_column
from zloader.commands.terminal import show_mirrors
from zloader.common import file_systems
from zloader.common.file_systems import has_stable_inodes, shared_file_system
from zloader.conversion.writing.encode import ConvertOptions
from zloader.storage.layout import ArrayLayout

pytestmark = pytest.mark.any_version

ROWS = 2000
ADATA = counts(ROWS, 300, density=0.5, seed=5)
FORMS = ["decoded", "compact", "stored"]
LAYOUT = ArrayLayout.plain("X/data", "<u2", n_elements=1000, chunk_elements=10, chunks_per_shard=100)
VALUES = np.arange(1000, dtype="<u2")


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    dest = tmp_path_factory.mktemp("shared") / "counts.zarr"
    ADATA.write_h5ad(dest.with_suffix(".h5ad"), convert_strings_to_categoricals=False)
    options = ConvertOptions(chunk_rows=16, shard_size="64KiB")
    zl.convert(dest.with_suffix(".h5ad"), dest, options=options, progress=False)
    return dest


@pytest.fixture
def shared(monkeypatch) -> None:
    """Every file system counts as NFS."""
    monkeypatch.setattr("zloader.caching.directory.shared_file_system", lambda _: "nfs")


@pytest.fixture
def fuse(monkeypatch) -> None:
    """Every file system counts as FUSE."""
    monkeypatch.setattr("zloader.caching.directory.shared_file_system", lambda _: "fuse")


@pytest.fixture
def nfs_locks(monkeypatch) -> None:
    """As on NFS, flock locks all bytes of a file, and so conflicts with locks on single bytes."""

    def flock(file: int, operation: int) -> None:
        kinds = {fcntl.LOCK_SH: fcntl.F_RDLCK, fcntl.LOCK_EX: fcntl.F_WRLCK, fcntl.LOCK_UN: fcntl.F_UNLCK}
        kind = kinds[operation & ~fcntl.LOCK_NB]
        command = fcntl.F_OFD_SETLK if operation & fcntl.LOCK_NB else fcntl.F_OFD_SETLKW
        fcntl.fcntl(file, command, struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0))

    monkeypatch.setattr(fcntl, "flock", flock)


def _directory(cache: Path, **limits: str) -> MirrorDirectory:
    return MirrorDirectory(zl.Cache(cache, **limits), "f" * 32, "store")


def _loader(store: Path, cache: Path | zl.Cache | None, form: str = "decoded") -> zl.Loader:
    if isinstance(cache, Path):
        cache = zl.Cache(cache, form=form)
    dataset = zl.open_dataset(store, cache=cache)
    return zl.Loader(dataset, batch_size=32, fetch_factor=8, sampling=zl.BlockShuffling(8), obs=["cell_type"])


def _epoch(loader: zl.Loader) -> zl.Statistics:
    rows = np.concatenate([check_minibatch(minibatch, ADATA) for minibatch in loader])
    assert np.sort(rows).tolist() == list(range(ROWS))
    return loader.statistics()


# ---- which file systems


@pytest.mark.parametrize(
    ("magic", "name", "stable"),
    [
        (0xEF53, None, True),
        (0x01021994, None, True),
        (0x2011BAB0, None, False),
        (0x6969, "nfs", True),
        (0x0BD00BD0, "lustre", True),
        (0x65735546, "fuse", False),
        (0x12345678, "number 0x12345678", False),
        (None, None, False),
    ],
)
def test_file_systems(monkeypatch, tmp_path, magic, name, stable):
    monkeypatch.setattr(file_systems, "_magic", lambda _: magic)
    assert (shared_file_system(tmp_path), has_stable_inodes(tmp_path)) == (name, stable)


def test_a_missing_path_counts_as_local(tmp_path):
    assert shared_file_system(tmp_path / "missing") is None


@pytest.mark.parametrize(("shared", "said"), [("nfs", True), (None, False)])
def test_the_list_of_mirrors_says_that_other_machines_may_use_them(shared, said):
    text = io.StringIO()
    show_mirrors(Console(file=text, width=100), [], shared=shared)
    assert ("on a shared file system (nfs): no mirror is evicted" in text.getvalue()) is said


# ---- locks


def test_leases_are_acquired_in_turn_although_other_owners_live(tmp_path, nfs_locks):
    path = _directory(tmp_path).path
    living = [Leases(path) for _ in range(3)]
    assert all(leases.word for leases in living)
    with living[0].exclusive(), (path / "turn").open("r+b") as turn, pytest.raises(BlockingIOError):
        fcntl.flock(turn.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (path / "turn").open("r+b") as turn:
        fcntl.flock(turn.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.every(2)
@pytest.mark.parametrize("form", FORMS)
def test_epochs_with_the_locks_of_nfs(store, tmp_path, shared, nfs_locks, form):
    loader = _loader(store, tmp_path / "cache", form)
    _epoch(loader)
    assert _epoch(loader).gets == 0
    (entry,) = mirrors(tmp_path / "cache")
    assert not drop(entry.directory)


def test_a_mirror_is_dropped_with_the_locks_of_nfs(tmp_path, nfs_locks):
    directory = _directory(tmp_path)
    Leases(directory.path).close()
    path = directory.path
    assert not drop(path)
    del directory
    assert drop(path)
    assert not path.exists()


# ---- writing


def test_chunks_are_written_through(tmp_path, shared):
    array = MirrorArray(_directory(tmp_path), LAYOUT)
    assert fcntl.fcntl(array._file, fcntl.F_GETFL) & os.O_DSYNC == os.O_DSYNC
    assert not array._words.flags.writeable


def test_fuse_need_not_write_each_piece_through(tmp_path, fuse):
    array = MirrorArray(_directory(tmp_path), LAYOUT)
    assert not fcntl.fcntl(array._file, fcntl.F_GETFL) & os.O_DSYNC
    assert not array._words.flags.writeable


def test_nothing_is_allocated_but_the_limit_holds(store, tmp_path, shared, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate")
    cache = zl.Cache(tmp_path / "cache", max_bytes="1MB")
    loader = _loader(store, cache)
    for _ in range(2):
        assert _epoch(loader).rows == ROWS
    (entry,) = mirrors(tmp_path / "cache")
    assert entry.allocated_bytes < 1_000_000 + 500_000  # which were in flight when the limit was reached
    assert 0 < loader.dataset.cache_statistics().chunks_held < loader.dataset.cache_statistics().chunks


def test_no_other_mirror_is_evicted(store, tmp_path, shared):
    other = shutil.copytree(store, tmp_path / "other.zarr")
    _epoch(_loader(other, tmp_path / "cache"))
    (before,) = mirrors(tmp_path / "cache")
    full = zl.Cache(tmp_path / "cache", max_bytes=before.allocated_bytes + 500_000)
    assert _epoch(_loader(store, full)).rows == ROWS
    assert before.directory in {entry.directory for entry in mirrors(tmp_path / "cache")}


@pytest.mark.parametrize("window", [1, 7, 10, 1000])
def test_a_column_is_compared_with_what_was_written(tmp_path, shared, window):
    directory = _directory(tmp_path)
    values = np.arange(300_000, dtype=np.int64)
    windows = np.split(values, range(window * 1000, len(values), window * 1000))
    kept = save_column(directory, "x", windows, shape=values.shape, dtype=values.dtype)
    np.testing.assert_array_equal(kept, values)
    np.testing.assert_array_equal(load_column(directory, "x", shape=values.shape, dtype=values.dtype), values)


def test_words_of_a_machine_that_was_faster_stay(tmp_path, shared):
    faster = MirrorArray(_directory(tmp_path), LAYOUT)
    faster.put(0, VALUES)
    words = cached_path(faster._directory.path, "X/data", "sums")
    header = checksums._header(words, LAYOUT, faster._n_bytes)
    checksums._write_words_in_place(faster._directory, words, header, words.stat().st_size)
    assert MirrorArray(_directory(tmp_path), LAYOUT).n_present == 100


def test_a_damaged_header_is_replaced_in_place(tmp_path, shared, caplog):
    MirrorArray(_directory(tmp_path), LAYOUT).put(0, VALUES)
    words = cached_path(_directory(tmp_path).path, "X/data", "sums")
    number = words.stat().st_ino
    with words.open("r+b") as file:
        file.write(b"other")
    assert MirrorArray(_directory(tmp_path), LAYOUT).n_present == 0
    assert "damaged" in caplog.text
    assert words.stat().st_ino == number


# ---- bytes that another machine left


def test_a_chunk_that_differs_is_missing_here_only_and_written_again(tmp_path, shared, caplog):
    directory = _directory(tmp_path)
    here, there = MirrorArray(directory, LAYOUT), MirrorArray(directory, LAYOUT)
    here.put(0, VALUES)
    flat = cached_path(directory.path, "X/data", "flat")
    with flat.open("r+b") as file:
        file.seek(20 * 3)
        file.write(bytes(20))
    assert here.missing(np.arange(5)).tolist() == [3]  # although it had written the chunk
    assert here.n_present == there.n_present == 100
    mine, others = here.acquire(np.array([3]), Leases(directory.path))
    assert (mine.tolist(), others.tolist()) == ([3], [])
    here.put(3, VALUES[30:40])
    assert not len(here.missing(np.arange(100)))
    assert not len(there.missing(np.arange(100)))
    assert not caplog.records


def _zero(cache: Path, form: str, what: str) -> None:
    """Writes zeros over the chunks of X, or over where they are, as another machine with stale pages might do."""
    content, sidecar = {"decoded": ("flat", "sums"), "compact": ("rows", "blocks"), "stored": ("stored", "places")}[
        form
    ]
    (entry,) = mirrors(cache)
    for path in entry.directory.glob(f"X*.{content if what == 'chunks' else sidecar}"):
        if "indptr" in path.name:  # mapped once per process, and compared then
            continue
        first = 0
        if what == "places":
            first = word_offset((path.stat().st_size - word_offset(0)) // 24)
        elif what == "words":
            first = word_offset(0)
        with path.open("r+b") as file:
            file.seek(first)
            size = path.stat().st_size - first
            file.write(bytes(size // 3 if what == "words" and form != "decoded" else size))


@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("form", "what"),
    [(form, what) for form in FORMS for what in ("chunks", "words", "places") if (form, what) != ("decoded", "places")],
)
def test_stale_pages_are_no_wrong_values(store, tmp_path, shared, form, what, caplog):
    loader = _loader(store, tmp_path / "cache", form)
    _epoch(loader)
    assert _epoch(loader).gets == 0
    _zero(tmp_path / "cache", form, what)
    assert _epoch(loader).gets > 0
    assert _epoch(loader).gets == 0
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


# ---- two mounts


@pytest.fixture
def mounts(tmp_path) -> list[Path]:
    """Two FUSE mounts of one directory. Neither sees at once what is written through the other."""
    if shutil.which("bindfs") is None or not os.access("/dev/fuse", os.W_OK):
        pytest.skip("needs bindfs and /dev/fuse")
    (tmp_path / "disk").mkdir()
    with contextlib.ExitStack() as stack:
        places = []
        for name in ("one", "other"):
            place = tmp_path / name
            place.mkdir()
            done = subprocess.run(["bindfs", tmp_path / "disk", place], capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"cannot mount: {done.stderr.strip()}")
            stack.callback(subprocess.run, ["umount", "--lazy", place], check=True)
            places.append(place)
        yield places


_MACHINE = """
import json, os, sys
import zloader as zl
store, cache, form, seed, epochs, tests = json.loads(sys.argv[1])
sys.path.insert(0, tests)
from helpers import digest
dataset = zl.open_dataset(store, cache=zl.Cache(cache, form=form))
fetching = zl.FetchOptions(least_read_bytes=16_000, prefetch=1)
loader = zl.Loader(
    dataset, batch_size=32, fetch_factor=4, sampling=zl.BlockShuffling(8), seed=seed, obs=["cell_type"],
    options=fetching,
)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(epochs):
    print(json.dumps([digest(loader), loader.statistics().chunks_from_mirror]), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_two_machines_fill_and_read_one_mirror(interpreter, store, tmp_path, mounts, form):
    assert [shared_file_system(mount) for mount in mounts] == ["fuse", "fuse"]
    epochs, tests = 4, str(Path(__file__).parents[1])
    machines = [(mounts[0], 1), (mounts[1], 2), (mounts[0], 3), (mounts[1], 4)]  # the last one is killed
    with contextlib.ExitStack() as stack:
        running = []
        for mount, seed in machines:
            request = json.dumps([str(store), str(mount / "cache"), form, seed, epochs, tests])
            running.append(stack.enter_context(interpreter.running(_MACHINE, request)))
            assert running[-1].stdout.readline() == "ready\n"
        for process in running:
            process.stdin.write("go\n")
            process.stdin.flush()
        running[-1].stdout.readline()
        running[-1].kill()
        said = [[json.loads(process.stdout.readline()) for _ in range(epochs)] for process in running[:-1]]
    for (_, seed), epochs_of in zip(machines, said, strict=False):
        dataset = zl.open_dataset(store)
        loader = zl.Loader(
            dataset, batch_size=32, fetch_factor=4, sampling=zl.BlockShuffling(8), seed=seed, obs=["cell_type"]
        )
        assert [found for found, _ in epochs_of] == [digest(loader) for _ in range(epochs)]
    for mount in mounts:
        loader = _loader(store, mount / "cache", form)
        _epoch(loader)
        statistics = _epoch(loader)
        assert (statistics.gets, statistics.elapsed_s < PATIENCE_S) == (0, True)
