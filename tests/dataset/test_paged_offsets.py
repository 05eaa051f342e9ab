"""Row offsets read page by page: equal to the whole array, and as safe."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse
import zarr
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
        patch.setattr(paged_offsets, "_MOST_KEPT", most)
        offsets = paged(Stored(n_rows), None, chunk)
        for rows in taken:
            check(offsets, np.array(rows, np.int64) % n_rows)
            assert len(offsets._kept) * offsets._width <= max(most, offsets._width)
        np.testing.assert_array_equal(offsets.whole(), ROW_VALUES * np.arange(n_rows + 1))


def test_without_a_cache_only_some_pages_stay_in_memory(monkeypatch, caplog):
    monkeypatch.setattr(paged_offsets, "_PAGE", 4)
    monkeypatch.setattr(paged_offsets, "_MOST_KEPT", 40)
    offsets = paged(Stored(1000), None, 4)
    check(offsets, np.arange(20))
    assert not caplog.text
    for _ in range(2):
        check(offsets, np.arange(999, -1, -10))
        assert len(offsets._kept) == 10
    assert caplog.text.count("X/indptr of store is too large to stay in memory") == 1


def test_pages_of_a_mirror_that_cannot_be_written_are_used_and_others_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(paged_offsets, "_PAGE", 100)
    check(paged(Stored(1000), tmp_path, 100), np.arange(300))
    stored = Stored(1000)
    offsets = paged(stored, tmp_path, 100)
    offsets._mirror.writable = False
    for _ in range(2):
        check(offsets, np.arange(50, 600, 7))
    assert stored.n_read == 200  # the mirror has pages 0 to 3
    offsets.load_all()
    np.testing.assert_array_equal(offsets.whole(), ROW_VALUES * np.arange(1001))


def test_pages_that_several_processes_filled_are_recorded_as_verified(tmp_path, monkeypatch):
    monkeypatch.setattr(paged_offsets, "_PAGE", 100)
    mine = paged(Stored(1000), tmp_path, 100)
    check(mine, np.arange(500))
    check(paged(Stored(1000), tmp_path, 100), np.arange(501, 1000))
    check(mine, np.arange(1000))
    assert not paged(Stored(1000), tmp_path, 100)._mirror._unrecorded


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


def test_a_cache_without_room_leaves_the_offsets_in_memory(tmp_path, caplog):
    pages = pages_of("X/indptr", BILLION + 1, 1 << 16)
    directory = MirrorDirectory(Cache(directory=tmp_path, max_bytes=10_000_000), "f" * 32, "store")
    assert open_array(directory, pages) is None
    assert "there is no room for X/indptr" in caplog.text
    assert sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*")) < 2_000_000


ADATA = counts(300, 41, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("cached", [False, True])
def test_epochs_of_a_store_with_pages(tmp_path, monkeypatch, cached):
    write_store(ADATA, tmp_path / "counts.zarr", tmp_path)
    monkeypatch.setattr(store, "_MOST_WHOLE", 10)
    cache = tmp_path / "cache" if cached else None
    for epoch in range(2):
        dataset = zl.open_dataset(tmp_path / "counts.zarr", cache=cache)
        loader = zl.Loader(dataset, batch_size=8, fetch_factor=4, sampling=zl.BlockShuffling(8), obs=["cell_type"])
        assert isinstance(dataset.store.offsets(dataset.store.matrix("X")), PagedOffsets)
        seen = np.concatenate([check_minibatch(minibatch, ADATA) for minibatch in loader])
        assert sorted(seen) == list(range(300))
        assert bool(loader.statistics().gets) != (cached and epoch > 0)
    np.testing.assert_array_equal(dataset.store.offsets(dataset.store.matrix("X")).whole(), ADATA.X.indptr)
    if cached:
        zl.warm(dataset)
        offline = zl.open_dataset(tmp_path / "counts.zarr", cache=cache, offline=True)
        assert sum(map(len, zl.Loader(offline, batch_size=8))) == 300


FEW = counts(120, 7, seed=4)
LATE = counts(120, 7, seed=4)  # with 45 empty rows at the start
LATE.X = (scipy.sparse.diags(1.0 * (np.arange(120) >= 45)) @ LATE.X).tocsr().astype(np.float32)
LATE.X.eliminate_zeros()
FORMS: dict[str, dict[str, Any]] = {"v2": {}, "v3": {}, "v3 shards": {"shards": (40,)}}


def by_anndata(adata: ad.AnnData, path: Path, form: str, indptr: np.ndarray) -> Path:
    """A store written by anndata, with an indptr in chunks of 10 entries. zarr leaves out chunks of zeros."""
    root = zarr.open_group(path, mode="w", zarr_format=int(form[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of anndata and zarr, about their formats
        ad.io.write_elem(root, "/", adata)
        del root["X/indptr"]
        root["X"].create_array("indptr", data=indptr, chunks=(10,), **FORMS[form])
        zarr.consolidate_metadata(path)
    return path


@pytest.fixture
def small_pages(monkeypatch):
    monkeypatch.setattr(store, "_MOST_WHOLE", 10)
    monkeypatch.setattr(paged_offsets, "_PAGE", 10)
    monkeypatch.setattr(paged_offsets, "_READ_ENTRIES", 20)


def read_all(url: str | Path, adata: ad.AnnData, cache: Path | None) -> None:
    """Checks every row; the last come first, so that no page is read after the one before it."""
    dataset = zl.open_dataset(url, cache=cache)
    for rows in np.array_split(np.arange(adata.n_obs), 6)[::-1]:
        np.testing.assert_array_equal(dataset.take(rows).X.toarray(), adata.X[rows].toarray())


@pytest.mark.every(6)
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("small_pages")
def test_a_missing_object_is_never_read_as_empty_rows(tmp_path, form, cached):
    path = by_anndata(FEW, tmp_path / "a.zarr", form, FEW.X.indptr)
    cache = tmp_path / "cache" if cached else None
    read_all(path, FEW, cache)
    assert isinstance(zl.open_dataset(path).store.offsets(zl.open_dataset(path).store.matrix("X")), PagedOffsets)
    objects = [file for file in path.glob("X/indptr/**/*") if file.is_file() and file.name.isdigit()]
    last = max(int(file.name) for file in objects)
    for file in objects:
        if int(file.name) in (1, 2, last):
            file.rename(tmp_path / "lost")
            with pytest.raises(FormatError, match=r"X/indptr of .* is wrong at row \d+ .*the store is damaged"):
                read_all(path, FEW, cache)
            (tmp_path / "lost").rename(file)


@pytest.mark.slow
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.usefixtures("small_pages")
def test_a_chunk_that_a_shard_lacks_is_never_read_as_empty_rows(tmp_path, cached):
    for first in (10, 100):  # the first chunk of a run of pages, and another
        indptr = FEW.X.indptr.copy()
        indptr[first : first + 10] = 0
        path = by_anndata(FEW, tmp_path / f"{first}.zarr", "v3 shards", indptr)
        with pytest.raises(FormatError, match=r"X/indptr of .* is wrong at row \d+ .*the store is damaged"):
            read_all(path, FEW, tmp_path / "cache" if cached else None)


@pytest.mark.every(4)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("small_pages")
def test_chunks_of_leading_empty_rows_may_be_left_out(tmp_path, form):
    path = by_anndata(LATE, tmp_path / "a.zarr", form, LATE.X.indptr)
    assert not {"X/indptr/0", "X/indptr/c/1"} & zl.open_dataset(path).store.objects.keys() or form == "v3 shards"
    for cache in (None, tmp_path / "cache"):
        read_all(path, LATE, cache)
        np.testing.assert_array_equal(
            zl.open_dataset(path, cache=cache).store.offsets(zl.open_dataset(path).store.matrix("X")), LATE.X.indptr
        )


@pytest.mark.usefixtures("small_pages")
def test_a_missing_object_of_a_web_server(tmp_path, sim):
    path = by_anndata(FEW, tmp_path / "bucket" / "a.zarr", "v3", FEW.X.indptr)
    url = f"{sim().url}/bucket/a.zarr"
    read_all(url, FEW, None)
    (path / "X/indptr/c/7").unlink()
    with pytest.raises(FormatError, match=r"X/indptr of .* is wrong at row 69 .*the store is damaged"):
        read_all(url, FEW, None)


class Swapped(Stored):
    """Offsets of which those of one page are those of another."""

    def read(self, start: int, stop: int) -> np.ndarray:
        return super().read(start, stop) + (ROW_VALUES * 300 if start == 500 else 0)


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("order", [(650, 550), (550, 650)])
def test_a_page_has_to_fit_the_pages_that_are_held(tmp_path, monkeypatch, mirrored, order):
    monkeypatch.setattr(paged_offsets, "_PAGE", 100)
    offsets = paged(Swapped(1000), tmp_path if mirrored else None, 100)
    offsets.bounds(np.array([order[0]]))
    with pytest.raises(FormatError, match="X/indptr of store is wrong at row 599"):
        offsets.bounds(np.array([order[1]]))
