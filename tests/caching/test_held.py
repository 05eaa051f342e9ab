"""Inspection of mirrors; and any damage to their files is found by verify and repaired by an epoch."""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from helpers import PATIENCE_S, check_minibatch, counts, write_store
from hypothesis import given, settings
from hypothesis import strategies as st
from test_mirror import _layout, _truth

import zloader as zl
from zloader.caching.checksums import Sidecar
from zloader.caching.directory import MirrorDirectory, MirrorEntry, VerifiedMarks, drop, mirrors
from zloader.caching.inspection import MirrorInspection, inspect_mirror, verify
from zloader.caching.leases import Leases
from zloader.caching.mirror import MirrorArray, save_column
from zloader.common.options import Cache

pytestmark = pytest.mark.any_version

ROWS = 400
ADATA = counts(ROWS, 150, seed=4)
VALUES, GENES = "X%2Fdata", "X%2Findices"


def loader_of(store: Path, cache: Path, **options: int) -> zl.Loader:
    dataset = zl.open_dataset(store, cache=cache)
    options = zl.FetchOptions(**options)
    return zl.Loader(dataset, batch_size=32, fetch_factor=2, obs=["cell_type"], options=options)


def epoch(store: Path, cache: Path) -> zl.Statistics:
    """Reads one epoch and compares every minibatch with the AnnData."""
    loader = loader_of(store, cache)
    rows = np.concatenate([check_minibatch(minibatch, ADATA) for minibatch in loader])
    assert np.sort(rows).tolist() == list(range(ROWS))
    return loader.statistics()


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("held")
    write_store(ADATA, folder / "counts.zarr", folder)
    return folder / "counts.zarr"


@pytest.fixture(scope="module")
def whole(store, tmp_path_factory) -> Path:
    """A cache with one full mirror."""
    cache = tmp_path_factory.mktemp("whole") / "cache"
    epoch(store, cache)
    return cache


@dataclass(frozen=True)
class Copy:
    """A copy of the full cache, for damaging."""

    cache: Path
    store: Path

    @property
    def entry(self) -> MirrorEntry:
        (entry,) = mirrors(self.cache)
        return entry

    @property
    def directory(self) -> Path:
        return self.entry.directory

    def file(self, name: str) -> Path:
        return self.directory / name

    def flip(self, name: str, at: int, bit: int = 0) -> None:
        with self.file(name).open("r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1 << bit]))

    def resize(self, name: str, n_bytes: int) -> None:
        os.truncate(self.file(name), n_bytes)

    def heals(self) -> zl.Statistics:
        """Repairs the mirror with an epoch, checks that it is intact, and returns the statistics of that epoch."""
        filled = epoch(self.store, self.cache)
        assert verify(self.directory) == []
        assert inspect_mirror(self.entry).chunks_held == inspect_mirror(self.entry).chunks
        assert epoch(self.store, self.cache).gets == 0
        return filled


@pytest.fixture
def copy(whole, store, tmp_path) -> Copy:
    shutil.copytree(whole, tmp_path / "cache")
    return Copy(tmp_path / "cache", store)


def chunk_bytes(copy: Copy, name: str) -> int:
    file = copy.file(f"{name}.sums")
    with file.open("rb") as opened:
        return int(next(Sidecar(file, opened.fileno()).windows()).stops[0])


# ---- inspection


@pytest.mark.parametrize("fetches", [0, 1, 2, None])
def test_the_inspection_agrees_with_the_mirror(store, tmp_path, fetches):
    loader = loader_of(store, tmp_path, ready_bytes=1, prefetch=1)  # so that it cannot run far ahead
    for number, _ in enumerate(loader):
        if fetches is not None and number + 1 >= 2 * fetches:
            break
    (entry,) = mirrors(tmp_path)
    seen = inspect_mirror(entry)
    mirror = loader.dataset.store.mirror(loader.dataset.store.matrix("X"))
    assert mirror.arrays.keys() == {"X/data", "X/indices"}
    assert seen.arrays.keys() == {*mirror.arrays, "X/indptr", "obs/cell_type/codes"}
    for name, array in mirror.arrays.items():
        assert seen.arrays[name].chunks == array.layout.n_chunks
        assert seen.arrays[name].bytes_in_all == array.elements.nbytes
    if fetches is None:
        assert (seen.chunks_held, seen.bytes_held) == (seen.chunks, seen.bytes_in_all)
    else:
        assert seen.chunks_held < seen.chunks


def test_a_partial_mirror_with_a_short_last_chunk(tmp_path):
    directory = MirrorDirectory(Cache(directory=tmp_path), "f" * 32, "store")
    array, truth = MirrorArray(directory, _layout()), _truth(_layout())
    (entry,) = mirrors(tmp_path)
    assert inspect_mirror(entry).bytes_held == 0
    for chunk in (2, 3, 9):
        array.put(chunk, truth[chunk * 10 : (chunk + 1) * 10])
        seen = inspect_mirror(entry).arrays["X/data"]
        assert (seen.chunks_held, seen.bytes_held) == (array.n_present, array.present_bytes)
    assert (seen.chunks, seen.chunks_held, seen.bytes_in_all, seen.bytes_held) == (10, 3, 190, 50)
    array.acquire(np.arange(2), owner := Leases(directory.path))
    assert inspect_mirror(entry).chunks_held == 3, "a leased chunk is not present yet"
    assert verify(entry.directory) == []
    owner.close()


def test_columns_and_objects_are_counted(copy):
    seen = inspect_mirror(copy.entry)
    cached = list(copy.directory.glob("*.kept"))
    assert seen.objects == len(cached) > 1
    assert len(seen.arrays) == len(list(copy.directory.glob("*.flat"))) > 3
    assert seen.kept_bytes == sum(path.stat().st_size for path in cached)


def test_a_mirror_that_does_not_exist_is_empty(copy):
    entry = copy.entry
    shutil.rmtree(copy.directory)
    assert inspect_mirror(entry) == MirrorInspection.of({}, objects=0, kept_bytes=0)
    assert verify(entry.directory) == []


# ---- intact mirrors


def test_an_intact_mirror_is_compared_completely_recorded_and_left_unchanged(copy):
    (copy.directory / "stale").touch()
    os.utime(copy.file("users"), (1000, 1000))
    before, described = copy.entry, copy.file("mirror.json").read_bytes()
    files = [path for path in copy.directory.iterdir() if path.suffix in (".flat", ".sums")]
    verified = VerifiedMarks(copy.directory)
    assert not any(verified.contains(path) for path in files), "the copies have other inodes"
    compared = []
    assert verify(copy.directory, compared.append) == []
    assert sum(compared) == inspect_mirror(before).bytes_held + inspect_mirror(before).kept_bytes
    assert all(verified.contains(path) for path in files)
    assert (copy.entry.used_s, copy.entry.stale) == (1000, True)
    assert copy.file("mirror.json").read_bytes() == described


def test_chunks_larger_than_one_read(tmp_path):
    layout = _layout(n_elements=40 << 20, chunk_elements=17 << 20, dtype="uint8")
    directory = MirrorDirectory(Cache(directory=tmp_path), "f" * 32, "store")
    array, truth = MirrorArray(directory, layout), np.resize(np.arange(251, dtype=np.uint8), 40 << 20)
    for chunk in range(3):
        array.put(chunk, truth[chunk * (17 << 20) : (chunk + 1) * (17 << 20)])
    compared = []
    assert verify(directory.path, compared.append) == []
    assert compared == [17 << 20, 17 << 20, 6 << 20]
    with (directory.path / "X%2Fdata.flat").open("r+b") as file:
        file.seek((40 << 20) - 1)
        file.write(b"\xff")
    assert verify(directory.path) == ["X/data: chunk 2 differs from its checksum"]


# ---- damaged mirrors


def test_the_windows_of_an_inspection_do_not_show(copy, monkeypatch):
    seen, size = inspect_mirror(copy.entry), chunk_bytes(copy, "X%2Fdata")
    monkeypatch.setattr("zloader.caching.checksums._WINDOW", 2)
    assert inspect_mirror(copy.entry) == seen
    assert verify(copy.directory) == []
    copy.flip("X%2Fdata.flat", 3 * size)
    assert verify(copy.directory) == ["X/data: chunk 3 differs from its checksum"]
    assert inspect_mirror(copy.entry).chunks_held == seen.chunks_held - 1
    copy.heals()


@pytest.mark.slow
@settings(max_examples=15)
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), name=st.sampled_from([VALUES, GENES]))
def test_a_flipped_bit_is_found_and_only_its_chunk_is_read_again(whole, store, tmp_path_factory, where, bit, name):
    copy = Copy(tmp_path_factory.mktemp("flipped") / "cache", store)
    shutil.copytree(whole, copy.cache)
    at = int(where * copy.file(f"{name}.flat").stat().st_size)
    copy.flip(f"{name}.flat", at, bit)
    array, chunk = name.replace("%2F", "/"), at // chunk_bytes(copy, name)
    other = MirrorArray(
        MirrorDirectory(Cache(directory=copy.cache), copy.entry.fingerprint, copy.entry.url), layout(store, array)
    )
    assert verify(copy.directory) == [f"{array}: chunk {chunk} differs from its checksum"]
    assert other.n_present == other.layout.n_chunks - 1, "every process that maps the file sees it at once"
    del other
    assert verify(copy.directory) == [], "it is a miss now"
    assert copy.heals().chunks_decoded == 1


def layout(store: Path, array: str):
    (found,) = (one for one in zl.open_dataset(store).store.matrix("X").arrays if one.path == array)
    return found


def test_adjacent_chunks_are_reported_together(copy):
    size = chunk_bytes(copy, VALUES)
    for chunk in (1, 2, 3, 7):
        copy.flip(f"{VALUES}.flat", chunk * size)
    assert verify(copy.directory) == [
        "X/data: chunks 1 to 3 differ from their checksums",
        "X/data: chunk 7 differs from its checksum",
    ]
    assert copy.heals().chunks_decoded == 4


@pytest.mark.parametrize("bit", range(0, 40, 7))
def test_a_flipped_bit_in_a_word(copy, bit):
    """Bits below 32 are the checksum. Flipping bit 32 (PRESENT) only marks the chunk as absent, which is no problem."""
    copy.flip(f"{VALUES}.sums", 64 + 8 * 5 + bit // 8, bit % 8)
    found = verify(copy.directory)
    assert found == (["X/data: chunk 5 differs from its checksum"] if bit < 32 else [])
    assert copy.heals().chunks_decoded <= 1


@pytest.mark.every(2)
@pytest.mark.parametrize("at", [0, 5, 8, 17, 24, 33, 45, 63])
def test_a_damaged_header_discards_all_chunks(copy, at):
    copy.flip(f"{GENES}.sums", at)
    (problem,) = verify(copy.directory)
    assert problem.startswith("X%2Findices.sums ")
    assert problem.endswith(": all chunks of X/indices count as absent")
    assert inspect_mirror(copy.entry).arrays.keys() == {"X/data", "X/indptr", "obs/cell_type/codes"}
    assert verify(copy.directory) == []
    assert copy.heals().chunks_decoded == inspect_mirror(copy.entry).arrays["X/indices"].chunks


@pytest.mark.every(2)
@pytest.mark.parametrize("n_bytes", [0, 1, 8, 63, 64, 100, 10_000])
def test_a_sums_file_of_another_size_discards_all_chunks(copy, n_bytes):
    copy.resize(f"{VALUES}.sums", n_bytes)
    (problem,) = verify(copy.directory)
    assert "all chunks of X/data count as absent" in problem
    assert copy.heals().chunks_decoded == inspect_mirror(copy.entry).arrays["X/data"].chunks


def test_a_truncated_flat_file(copy):
    size, whole_bytes = chunk_bytes(copy, VALUES), copy.file(f"{VALUES}.flat").stat().st_size
    copy.resize(f"{VALUES}.flat", 3 * size + 1)
    last = inspect_mirror(copy.entry).arrays["X/data"].chunks - 1
    assert verify(copy.directory) == [
        f"X%2Fdata.flat has {3 * size + 1} bytes instead of {whole_bytes}",
        f"X/data: chunks 3 to {last} differ from their checksums",
    ]
    assert verify(copy.directory) == []
    assert copy.heals().chunks_decoded == last - 2


def test_a_flat_file_that_has_grown_is_truncated(copy):
    whole_bytes = copy.file(f"{VALUES}.flat").stat().st_size
    copy.resize(f"{VALUES}.flat", whole_bytes + 5)
    assert verify(copy.directory) == [f"X%2Fdata.flat has {whole_bytes + 5} bytes instead of {whole_bytes}"]
    assert verify(copy.directory) == []
    assert copy.heals().chunks_decoded == 0


def test_a_deleted_flat_file(copy):
    copy.file(f"{VALUES}.flat").unlink()
    last = inspect_mirror(copy.entry).arrays["X/data"].chunks - 1
    assert verify(copy.directory) == [
        "X%2Fdata.flat cannot be read: No such file or directory",
        f"X/data: chunks 0 to {last} differ from their checksums",
    ]
    assert verify(copy.directory) == []
    assert copy.heals().chunks_decoded == last + 1


@pytest.mark.parametrize("name", ["zarr.json.kept", "%2Flisting.kept"])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_object_is_deleted(copy, name, damage):
    file = copy.file(name)
    size = file.stat().st_size
    if damage == "flip":
        copy.flip(name, size // 2)
    else:
        copy.resize(name, size - 1 if damage == "cut" else 0)
    (problem,) = verify(copy.directory)
    assert problem.endswith(f"{name} differed from its checksum and was deleted")
    assert not file.exists()
    assert copy.heals().chunks_decoded == 0
    assert file.stat().st_size == size


# ---- foreign files


def test_files_that_zloader_did_not_create_are_left_alone(copy):
    for name in ("thesis.txt", "X", "sums", "flat.txt"):
        copy.file(name).write_text("precious")
    copy.file("folder").mkdir()
    before = inspect_mirror(copy.entry)
    assert verify(copy.directory) == []
    assert inspect_mirror(copy.entry) == before
    assert all(copy.file(name).read_text() == "precious" for name in ("thesis.txt", "X", "sums", "flat.txt"))
    assert copy.file("folder").is_dir()


@pytest.mark.parametrize("name", ["X%2Fdata.flat", "X%2Fdata.sums", "X%2Findptr.flat", "zarr.json.kept", "more.sums"])
def test_a_link_is_never_followed(copy, name, tmp_path):
    """The target is not read, truncated or deleted."""
    precious = tmp_path / "precious"
    precious.write_bytes((copy.file(name).read_bytes() if copy.file(name).exists() else b"") + b"precious")
    copy_of = precious.read_bytes()
    copy.file(name).unlink(missing_ok=True)
    copy.file(name).symlink_to(precious)
    problems = verify(copy.directory)
    assert problems[0] == f"{name} is not a regular file, but has the name of a cached one: remove it"
    assert precious.read_bytes() == copy_of
    assert copy.file(name).is_symlink()
    assert "more" not in inspect_mirror(copy.entry).arrays
    copy.file(name).unlink()
    copy.heals()


# ---- concurrent use


def test_a_mirror_is_not_dropped_while_it_is_verified(copy):
    dropped = []
    assert verify(copy.directory, lambda _: dropped.append(drop(copy.directory))) == []
    assert set(dropped) == {False}
    assert drop(copy.directory)


def test_a_mirror_that_is_being_filled_is_intact_at_every_moment(store, tmp_path):
    loader = loader_of(store, tmp_path)
    (entry,) = mirrors(tmp_path)
    found: list[str] = []
    begun, ended = threading.Event(), threading.Event()

    def look() -> None:
        while not ended.is_set():
            found.extend(verify(entry.directory))
            begun.set()

    looking = threading.Thread(target=look)
    looking.start()
    try:
        assert begun.wait(PATIENCE_S)
        rows = np.concatenate([check_minibatch(minibatch, ADATA) for minibatch in loader])
    finally:
        ended.set()
        looking.join()
    assert found == []
    assert np.sort(rows).tolist() == list(range(ROWS))
    assert inspect_mirror(entry).chunks_held == inspect_mirror(entry).chunks
    assert epoch(store, tmp_path).gets == 0


def test_a_replaced_column_is_intact(copy):
    directory = MirrorDirectory(Cache(directory=copy.cache), copy.entry.fingerprint, copy.entry.url)
    save_column(directory, "mine", [np.arange(5)], shape=(5,), dtype=np.dtype(np.int64))
    assert verify(copy.directory) == []
    assert copy.file("mine.flat").exists()
