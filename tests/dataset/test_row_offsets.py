"""Row offsets, read page by page: equal to those of the store, and as safe."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
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
from zloader.common.errors import FormatError
from zloader.dataset import store
from zloader.storage import row_offsets
from zloader.storage.row_offsets import RowOffsets

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


def paged(stored, chunk: int = 1 << 16) -> RowOffsets:
    n_values = ROW_VALUES * (stored.n_entries - 1)
    return RowOffsets(stored.read, stored.n_entries, chunk, n_values=n_values, where="X/indptr of store")


def whole(offsets: RowOffsets) -> np.ndarray:
    starts, stops = offsets.bounds(np.arange(offsets.n_entries - 1))
    np.testing.assert_array_equal(starts[1:], stops[:-1])
    return np.append(starts, stops[-1])


def check(offsets: RowOffsets, rows: np.ndarray) -> None:
    starts, stops = offsets.bounds(rows)
    np.testing.assert_array_equal(starts, ROW_VALUES * rows)
    np.testing.assert_array_equal(stops, ROW_VALUES * (rows + 1))
    assert starts.dtype == stops.dtype == np.int64


def test_what_is_read_whole_is_read_once_by_threads_that_need_it_at_once():
    stored, together = Stored(1000), threading.Barrier(8)
    offsets = paged(stored)

    def use(_: int) -> None:
        together.wait()
        check(offsets, np.arange(1000))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(8)))
    assert stored.n_read == 1001


def test_a_few_of_a_billion_rows_need_a_few_pages():
    stored = Stored(BILLION)
    offsets = paged(stored)
    rows = np.array([BILLION - 1, 0, 1, 5, 65_535, 65_536, 500_000_000, 65_535])
    for _ in range(2):
        check(offsets, rows)
    assert stored.n_read < 5 * 65_536


@given(
    n_rows=st.integers(1, 200),
    chunk=st.integers(1, 50),
    taken=st.lists(st.lists(st.integers(0, 199), max_size=20), max_size=5),
    most=st.integers(40, 300),
)
def test_offsets_equal_the_whole_array(n_rows, chunk, taken, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_offsets, "MOST_WHOLE", 50)
        patch.setattr(row_offsets, "_PAGE", 7)
        patch.setattr(row_offsets, "_STEP", 30)
        patch.setattr(row_offsets, "_MOST_KEPT", most)
        offsets = paged(Stored(n_rows), chunk)
        for rows in taken:
            check(offsets, np.array(rows, np.int64) % n_rows)
            assert offsets.is_whole or len(offsets._kept) * offsets._width <= max(most, offsets._width)
        np.testing.assert_array_equal(whole(offsets), ROW_VALUES * np.arange(n_rows + 1))


def test_only_some_pages_stay_in_memory(monkeypatch):
    monkeypatch.setattr(row_offsets, "MOST_WHOLE", 10)
    monkeypatch.setattr(row_offsets, "_PAGE", 4)
    monkeypatch.setattr(row_offsets, "_MOST_KEPT", 40)
    offsets = paged(Stored(1000), 4)
    check(offsets, np.arange(20))
    for _ in range(2):
        check(offsets, np.arange(999, -1, -10))
        assert len(offsets._kept) == 10


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
@pytest.mark.parametrize("use", [lambda offsets: offsets.bounds(np.arange(1000)), whole], ids=["rows", "whole"])
@pytest.mark.parametrize("most_whole", [100, 10_000])
def test_offsets_that_do_not_ascend_are_an_error(monkeypatch, use, entry, by, on, most_whole):
    monkeypatch.setattr(row_offsets, "MOST_WHOLE", most_whole)
    monkeypatch.setattr(row_offsets, "_PAGE", 100)
    offsets = paged(Wrong(1000, entry, by, on=on), 100)
    with pytest.raises(FormatError, match=r"X/indptr of store is wrong at row \d+ .*the store is damaged"):
        use(offsets)


ADATA = counts(300, 41, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("cached", [False, True])
def test_epochs_of_a_store_with_pages(tmp_path, monkeypatch, cached):
    write_store(ADATA, tmp_path / "counts.zarr", tmp_path)
    most_whole(monkeypatch, 10)
    cache = tmp_path / "cache" if cached else None
    for epoch in range(2):
        dataset = zl.open_dataset(tmp_path / "counts.zarr", cache=cache)
        loader = zl.Loader(dataset, batch_size=8, fetch_factor=4, sampling=zl.BlockShuffling(8), obs=["cell_type"])
        seen = np.concatenate([check_minibatch(minibatch, ADATA) for minibatch in loader])
        assert sorted(seen) == list(range(300))
        assert bool(loader.statistics().gets) != (cached and epoch > 0)
    if not cached:
        np.testing.assert_array_equal(whole(dataset.store.offsets(dataset.store.matrix("X"))), ADATA.X.indptr)
    else:
        zl.warm(dataset)
        offline = zl.open_dataset(tmp_path / "counts.zarr", cache=cache, offline=True)
        assert sum(map(len, zl.Loader(offline, batch_size=8))) == 300


def test_a_warm_epoch_needs_no_offsets(tmp_path, monkeypatch):
    write_store(ADATA, tmp_path / "counts.zarr", tmp_path)
    read: list[str] = []
    window = store.OpenedStore.window

    def counted(self, path, first, stop):
        read.append(path)
        return window(self, path, first, stop)

    monkeypatch.setattr(store.OpenedStore, "window", counted)
    for epoch in range(2):
        dataset = zl.open_dataset(tmp_path / "counts.zarr", cache=tmp_path / "cache")
        seen = np.concatenate(
            [check_minibatch(each, ADATA) for each in zl.Loader(dataset, batch_size=8, obs=["cell_type"])]
        )
        assert sorted(seen) == list(range(300))
        assert ("X/indptr" in read) == (not epoch)
        read.clear()


FEW = counts(120, 7, seed=4)
LATE = counts(120, 7, seed=4)  # with 45 empty rows at the start
LATE.X = (scipy.sparse.diags(1.0 * (np.arange(120) >= 45)) @ LATE.X).tocsr().astype(np.float32)
LATE.X.eliminate_zeros()
FORMS: dict[str, dict[str, Any]] = {"v2": {}, "v3": {}, "v3 shards": {"shards": (40,)}}


def most_whole(monkeypatch, n_entries: int) -> None:
    for module in (store, row_offsets):
        monkeypatch.setattr(module, "MOST_WHOLE", n_entries)


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
    most_whole(monkeypatch, 10)
    monkeypatch.setattr(row_offsets, "_PAGE", 10)
    monkeypatch.setattr(row_offsets, "_STEP", 30)


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
    offsets = zl.open_dataset(path).store.offsets(zl.open_dataset(path).store.matrix("X"))
    assert not offsets.is_whole
    np.testing.assert_array_equal(whole(offsets), FEW.X.indptr)
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
        opened = zl.open_dataset(path, cache=cache).store
        np.testing.assert_array_equal(whole(opened.offsets(opened.matrix("X"))), LATE.X.indptr)


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


@pytest.mark.parametrize("order", [(650, 550), (550, 650)])
def test_a_page_has_to_fit_the_pages_that_are_held(monkeypatch, order):
    monkeypatch.setattr(row_offsets, "MOST_WHOLE", 100)
    monkeypatch.setattr(row_offsets, "_PAGE", 100)
    offsets = paged(Swapped(1000), 100)
    offsets.bounds(np.array([order[0]]))
    with pytest.raises(FormatError, match="X/indptr of store is wrong at row 599"):
        offsets.bounds(np.array([order[1]]))
