"""Row offsets read page by page: equal to the whole array, and as safe."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from helpers import check_minibatch, counts, write_store
from hypothesis import given
from hypothesis import strategies as st

import zloader as zl
from zloader.caching.directory import MirrorDirectory
from zloader.caching.mirror import open_array
from zloader.common.errors import FormatError
from zloader.common.options import Cache
from zloader.dataset import paged_offsets, store
from zloader.dataset.paged_offsets import PagedOffsets, pages_of

pytestmark = pytest.mark.any_version

BILLION = 10**9
ROW_VALUES = 2048  # so that the offsets are far beyond 2**32


class Stored:
    """The offsets of rows of equal length, as a store of `n_rows`. Counts the entries that are read."""

    def __init__(self, n_rows: int) -> None:
        self.n_entries, self.n_read = n_rows + 1, 0

    def read(self, start: int, stop: int) -> np.ndarray:
        self.n_read += stop - start
        return ROW_VALUES * np.arange(start, stop)


def paged(stored, cache: Path | None, chunk: int = 1 << 16) -> PagedOffsets:
    pages = pages_of("X/indptr", stored.n_entries, chunk)
    mirror = None if cache is None else open_array(MirrorDirectory(Cache(directory=cache), "f" * 32, "store"), pages)
    n_values = ROW_VALUES * (stored.n_entries - 1)
    return PagedOffsets(pages, stored.read, n_values=n_values, where="X/indptr of store", mirror=mirror)


def check(offsets: PagedOffsets, rows: np.ndarray) -> None:
    starts, stops = offsets.bounds(rows)
    np.testing.assert_array_equal(starts, ROW_VALUES * rows)
    np.testing.assert_array_equal(stops, ROW_VALUES * (rows + 1))
    assert starts.dtype == stops.dtype == np.int64


@pytest.mark.parametrize("mirrored", [False, True])
def test_a_few_of_a_billion_rows_need_a_few_pages(tmp_path, mirrored):
    stored = Stored(BILLION)
    offsets = paged(stored, tmp_path if mirrored else None)
    rows = np.array([BILLION - 1, 0, 1, 5, 65_535, 65_536, 500_000_000, 65_535])
    for _ in range(2):
        check(offsets, rows)
    assert stored.n_read < 5 * 65_536
    if mirrored:
        again = Stored(BILLION)
        check(paged(again, tmp_path), rows)
        assert not again.n_read, "another process finds the pages in the mirror"
        assert sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*")) < 8 << 20


@given(
    n_rows=st.integers(1, 200),
    chunk=st.integers(1, 50),
    taken=st.lists(st.lists(st.integers(0, 199), max_size=20), max_size=5),
    most=st.integers(40, 300),
)
def test_offsets_equal_the_whole_array(n_rows, chunk, taken, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_offsets, "_PAGE", 7)
        patch.setattr(paged_offsets, "_MOST_PAGES", most)
        offsets = paged(Stored(n_rows), None, chunk)
        for rows in taken:
            check(offsets, np.array(rows, np.int64) % n_rows)
            assert len(offsets._kept) <= most
        np.testing.assert_array_equal(offsets.whole(), ROW_VALUES * np.arange(n_rows + 1))


def test_without_a_cache_only_some_pages_stay_in_memory(monkeypatch, caplog):
    monkeypatch.setattr(paged_offsets, "_PAGE", 4)
    monkeypatch.setattr(paged_offsets, "_MOST_PAGES", 10)
    offsets = paged(Stored(1000), None, 4)
    check(offsets, np.arange(20))
    assert not caplog.text
    for _ in range(2):
        check(offsets, np.arange(999, -1, -10))
        assert len(offsets._kept) == 10
    assert caplog.text.count("X/indptr of store is too large to stay in memory") == 1


class Wrong(Stored):
    """Stored offsets of which one entry, or all from it on, is too small or too large."""

    def __init__(self, n_rows: int, entry: int, by: int, *, on: bool) -> None:
        super().__init__(n_rows)
        self._entry, self._by, self._on = entry, by, on

    def read(self, start: int, stop: int) -> np.ndarray:
        entries = np.arange(start, stop)
        return super().read(start, stop) + self._by * ((entries >= self._entry) if self._on else entries == self._entry)


@pytest.mark.parametrize(
    ("entry", "by", "on"),
    [(0, 1, False), (50, -9999, False), (100, -9999, True), (100, 10**9, True), (150, 10**9, False), (1000, 1, False)],
)
@pytest.mark.parametrize("mirrored", [False, True])
def test_offsets_that_do_not_ascend_are_an_error(tmp_path, monkeypatch, mirrored, entry, by, on):
    monkeypatch.setattr(paged_offsets, "_PAGE", 100)
    offsets = paged(Wrong(1000, entry, by, on=on), tmp_path if mirrored else None, 100)
    with pytest.raises(FormatError, match=r"X/indptr of store is wrong at row \d+ .*the store is damaged"):
        offsets.bounds(np.arange(1000))


def test_a_damaged_page_of_the_mirror_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(paged_offsets, "_PAGE", 100)
    stored = Stored(1000)
    check(paged(stored, tmp_path, 100), np.arange(1000))
    (path,) = tmp_path.glob("*/X%2Findptr.flat")
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), b"\1", 4321)
    again = Stored(1000)
    check(paged(again, tmp_path, 100), np.arange(1000))
    assert 0 < again.n_read <= 100


def test_a_cache_without_room_leaves_the_offsets_in_memory(tmp_path):
    pages = pages_of("X/indptr", BILLION + 1, 1 << 16)
    directory = MirrorDirectory(Cache(directory=tmp_path, max_bytes=10_000_000), "f" * 32, "store")
    assert open_array(directory, pages) is None
    assert sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*")) < 2_000_000


ADATA = counts(300, 41, seed=3)


@pytest.mark.parametrize("cached", [False, True])
def test_epochs_of_a_store_with_pages(tmp_path, monkeypatch, cached):
    write_store(ADATA, tmp_path / "counts.zarr", tmp_path)
    monkeypatch.setattr(store, "_MOST_WHOLE", 10)
    cache = tmp_path / "cache" if cached else None
    for epoch in range(2):
        dataset = zl.open_dataset(tmp_path / "counts.zarr", cache=cache)
        loader = zl.Loader(dataset, batch_size=8, fetch_factor=4, sampling=zl.BlockShuffling(8), obs=["cell_type"])
        assert isinstance(dataset.store.offsets(dataset.matrix()), PagedOffsets)
        seen = np.concatenate([check_minibatch(minibatch, ADATA) for minibatch in loader])
        assert sorted(seen) == list(range(300))
        assert bool(loader.statistics().gets) != (cached and epoch > 0)
    np.testing.assert_array_equal(dataset.indptr(dataset.matrix()), ADATA.X.indptr)
    if cached:
        zl.warm(dataset)
        offline = zl.open_dataset(tmp_path / "counts.zarr", cache=cache, offline=True)
        assert sum(map(len, zl.Loader(offline, batch_size=8))) == 300
