"""Inspection of mirrors; and any damage to their files is found by verify and repaired by an epoch."""

from __future__ import annotations

import mmap
import os
import re
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from helpers import PATIENCE_S, check_minibatch, counts, fetch_options, write_store
from hypothesis import given, settings
from hypothesis import strategies as st

import zloader as zl
from zloader.caching.directory import MirrorDirectory, MirrorEntry, drop, mirrors
from zloader.caching.inspection import MirrorInspection, inspect_mirror, verify
from zloader.caching.leases import Leases
from zloader.caching.rows_file import Held, RowsFile, mapped_index, sizes_in
from zloader.common.options import Cache
from zloader.storage.row_blocks import RowForm

pytestmark = pytest.mark.any_version

ROWS = 400
ADATA = counts(ROWS, 150, seed=4)
CODES = "obs%2Fcell_type%2Fcodes.array"
HEADER = 8 * 11  # bytes of an index
ONE_DIFFERS = ["X: 1 of 13 blocks differ from their checksums"]
OTHERS = {"obs/cell_type/codes"}  # arrays beside the matrix


def loader_of(store: Path, cache: Path, **options: int) -> zl.Loader:
    dataset = zl.open_dataset(store, cache=cache)
    options = fetch_options(**options)
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


def places_of(copy: Copy) -> list[tuple[int, int]]:
    """The first byte of each block of X, and the byte after its last."""
    with copy.file("X.index").open("rb") as file:
        starts, words = mapped_index(copy.file("X.index"), file.fileno(), mmap.ACCESS_READ)[1].T
    return list(zip(starts.tolist(), (starts.astype(np.int64) + sizes_in(words)).tolist(), strict=True))


def dense_rows(directory: MirrorDirectory, *, n_rows: int, block_rows: int, width: int) -> RowsFile:
    form = RowForm(
        name="X",
        n_rows=n_rows,
        block_rows=block_rows,
        genes=None,
        values=np.dtype(np.uint8),
        width=width,
        coded=False,
        decoded_bytes=n_rows * width,
    )
    return RowsFile(directory, form)


def put(file: RowsFile, block: int, n_bytes: int) -> None:
    file.put(np.array([block]), np.array([n_bytes]), np.resize(np.arange(251, dtype=np.uint8), n_bytes))


# ---- inspection


@pytest.mark.parametrize("fetches", [0, 1, 2, None])
def test_the_inspection_agrees_with_the_mirror(store, tmp_path, fetches):
    loader = loader_of(store, tmp_path, ready_bytes=1, prefetch=1, gap_bytes=0, least_read_bytes=1)  # not far ahead
    for number, _ in enumerate(loader):
        if fetches is not None and number + 1 >= 2 * fetches:
            break
    (entry,) = mirrors(tmp_path)
    seen = inspect_mirror(entry)
    mirror = loader.dataset.store.mirror(loader.dataset.store.matrix("X")).rows
    if fetches != 0:
        assert seen.arrays.keys() == {"X", *OTHERS}
    x = seen.arrays["X"]
    assert (x.chunks, x.chunks_held) == (mirror.form.n_blocks, mirror.held.chunks_held)
    assert (x.bytes_in_all, x.bytes_held) == (mirror.held.bytes_in_all, mirror.held.bytes_held)
    if fetches is None:
        assert (seen.chunks_held, seen.bytes_held) == (seen.chunks, seen.bytes_in_all)
    else:
        assert seen.chunks_held < seen.chunks


def test_a_partial_mirror_with_a_short_last_block(tmp_path):
    directory = MirrorDirectory(Cache(directory=tmp_path), "f" * 32, "store")
    file = dense_rows(directory, n_rows=95, block_rows=10, width=8)
    (entry,) = mirrors(tmp_path)
    assert inspect_mirror(entry).bytes_held == 0
    for block in (2, 3, 9):
        put(file, block, 40 if block == 9 else 80)
        seen = inspect_mirror(entry).arrays["X"]
        assert (seen.chunks_held, seen.bytes_held) == (file.held.chunks_held, file.held.bytes_held)
    assert (seen.chunks, seen.chunks_held, seen.bytes_held) == (10, 3, 200)
    file.acquire(np.arange(2), owner := Leases(directory.path))
    assert inspect_mirror(entry).chunks_held == 3, "a leased block is not present yet"
    assert verify(entry.directory) == []
    owner.close()


def test_columns_and_objects_are_counted(copy):
    seen = inspect_mirror(copy.entry)
    cached = list(copy.directory.glob("*.kept"))
    assert seen.objects == len(cached) > 1
    assert len(seen.arrays) == 1 + len(list(copy.directory.glob("*.array"))) == 2
    assert seen.kept_bytes == sum(path.stat().st_size for path in cached)


def test_a_mirror_that_does_not_exist_is_empty(copy):
    entry = copy.entry
    shutil.rmtree(copy.directory)
    assert inspect_mirror(entry) == MirrorInspection(**Held.sums([]), arrays={}, objects=0, kept_bytes=0)
    assert verify(entry.directory) == []


# ---- intact mirrors


def test_an_intact_mirror_is_compared_completely_and_left_unchanged(copy):
    os.utime(copy.file("users"), (1000, 1000))
    before, described = copy.entry, copy.file("mirror.json").read_bytes()
    compared = []
    assert verify(copy.directory, compared.append) == []
    assert sum(compared) == inspect_mirror(before).bytes_held + inspect_mirror(before).kept_bytes
    assert copy.entry.used_s == 1000
    assert copy.file("mirror.json").read_bytes() == described


# ---- damaged mirrors


@pytest.mark.slow
@settings(max_examples=15)
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), block=st.integers(0, 12))
def test_a_flipped_bit_is_found_and_only_its_block_is_read_again(whole, store, tmp_path_factory, where, bit, block):
    copy = Copy(tmp_path_factory.mktemp("flipped") / "cache", store)
    shutil.copytree(whole, copy.cache)
    begin, end = places_of(copy)[block]
    copy.flip("X.rows", begin + int(where * (end - begin)), bit)
    mirror = zl.open_dataset(store, cache=copy.cache).store
    other = mirror.mirror(mirror.matrix("X")).rows
    assert verify(copy.directory) == ONE_DIFFERS
    assert other.held.chunks_held == other.form.n_blocks - 1, "every process that maps the file sees it at once"
    del other
    assert verify(copy.directory) == [], "it is a miss now"
    copy.heals()


DAMAGES = {
    **{f"bit {bit} of a word": ("flip", HEADER + 88 + bit // 8, bit % 8) for bit in (0, 31, 40, 62)},
    **{f"byte {at} of the header": ("flip", at) for at in (0, 5, 17, 45, 63, 87)},
    **{f"an index of {n_bytes} bytes": ("resize", n_bytes) for n_bytes in (0, 8, 63, 88, 100, 10_000)},
    "truncated rows": (),
    "no rows": (),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_rows_count_as_absent(copy, damage):
    how, *where = DAMAGES[damage] or ("",)
    if how:
        getattr(copy, how)("X.index", *where)
    elif damage == "no rows":
        copy.file("X.rows").unlink()
    else:
        copy.resize("X.rows", places_of(copy)[3][0] + 1)
    (problem,) = verify(copy.directory)
    if "header" in damage or "an index" in damage:
        assert problem.startswith("X.index ")
        assert problem.endswith(": all blocks of X count as absent")
        assert inspect_mirror(copy.entry).arrays.keys() == OTHERS
    else:
        assert re.fullmatch(r"X: \d+ of 13 blocks differ from their checksums", problem)
    assert verify(copy.directory) == []
    copy.heals()


@pytest.mark.parametrize("name", ["zarr.json.kept", "%2Flisting.kept", CODES])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_object_or_array_is_deleted(copy, name, damage):
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
    for name in ("thesis.txt", "X", "index", "rows.txt"):
        copy.file(name).write_text("precious")
    copy.file("folder").mkdir()
    before = inspect_mirror(copy.entry)
    assert verify(copy.directory) == []
    assert inspect_mirror(copy.entry) == before
    assert all(copy.file(name).read_text() == "precious" for name in ("thesis.txt", "X", "index", "rows.txt"))
    assert copy.file("folder").is_dir()


@pytest.mark.parametrize("name", ["X.rows", "X.index", CODES, "zarr.json.kept", "more.index"])
def test_a_link_is_never_followed(copy, name, tmp_path):
    """The target is not read, truncated or deleted."""
    precious = tmp_path / "precious"
    precious.write_bytes((copy.file(name).read_bytes() if copy.file(name).exists() else b"") + b"precious")
    copy_of = precious.read_bytes()
    copy.file(name).unlink(missing_ok=True)
    copy.file(name).symlink_to(precious)
    verify(copy.directory)
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
