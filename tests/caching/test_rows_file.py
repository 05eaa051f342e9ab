"""A cache, raw or compact, gives what the store gives: cold, warm, offline, damaged, full, shared and killed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from helpers import assert_same_minibatches, check_minibatch, counts, fetch_options, of_genes, write_store
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.utils.data import DataLoader

import zloader as zl
from zloader.caching.directory import cache_bytes, mirrors
from zloader.caching.inspection import inspect_mirror, verify
from zloader.common import page_cache
from zloader.common.errors import CorruptChunkError
from zloader.storage.row_blocks import RowForm

pytestmark = pytest.mark.any_version

HEADER = 11  # words of an index

N_ROWS, N_GENES = 300, 60
SIZES: dict[str, Any] = {"batch_size": 16, "fetch_factor": 4, "sampling": zl.BlockShuffling(4), "seed": 3}
SOME = ["gene 50", "gene 3", "gene 59", "gene 4", "gene 0"]
REVERSED = [f"gene {gene}" for gene in reversed(range(N_GENES))]


def source() -> ad.AnnData:
    adata = counts(N_ROWS, N_GENES, seed=1)
    adata.layers["halves"] = adata.X / 2
    adata.layers["dense"] = adata.X.toarray()
    return adata


def other() -> ad.AnnData:
    """Lacks genes, and has them in another order."""
    other = counts(N_ROWS // 3, 40, seed=2)[:, ::-1].copy()
    other.obs_names = [f"other {row}" for row in range(other.n_obs)]
    other.layers["halves"] = other.X / 2
    return other


ADATA, OTHER = source(), other()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    write_store(ADATA, folder / "a.zarr", folder)
    write_store(OTHER, folder / "b.zarr", folder / "of b")
    return folder


@pytest.fixture(scope="module")
def store(folder) -> Path:
    return folder / "a.zarr"


FORM = ["raw"]


@pytest.fixture(autouse=True, scope="module", params=["raw", "compact"])
def form(request) -> str:
    FORM[0] = request.param
    return str(request.param)


def compact(directory: Path, **options: Any) -> zl.Cache:
    return zl.Cache(directory, form=FORM[0], **options)


def opened(url, cache=None, **options: Any) -> zl.Dataset:
    return zl.open_dataset(url, cache=cache, **options)


def loader_of(dataset: zl.Dataset, *, genes: Any = None, **options: Any) -> zl.Loader:
    return zl.Loader(of_genes(dataset, genes), **SIZES | options)


def check_epochs(plain: zl.Dataset, cached: zl.Dataset, **options: Any) -> zl.Loader:
    """Compares two epochs with those without a cache. The second has to come from the cache alone."""
    wanted, loader = (loader_of(dataset, **options) for dataset in (plain, cached))
    assert_same_minibatches(loader, wanted)
    assert_same_minibatches(loader, wanted)
    assert loader.statistics().gets == 0
    return loader


def files_of(cache: Path, suffix: str) -> list[Path]:
    return sorted(cache.glob(f"*/*.{suffix}"))


# ---- the same values as without a cache

CHOICES: dict[str, dict[str, Any]] = {
    "whole rows": {},
    "dense": {"layout": "dense"},
    "packed": {"layout": "packed"},
    "all genes reversed": {"genes": REVERSED},
    "some genes": {"genes": SOME},
    "some genes, dense": {"genes": SOME, "layout": "dense"},
    "some genes, packed": {"genes": SOME, "layout": "packed"},
    "one gene": {"genes": ["gene 7"]},
    "genes that most cells lack": {"genes": ["gene 7", "gene 8"], "layout": "packed"},
    "float64": {"dtype": "float64"},
    "int64": {"dtype": "int64", "genes": SOME},
    "fractions": {"x": "layers/halves"},
    "fractions of some genes": {"x": "layers/halves", "genes": SOME, "layout": "dense"},
    "two matrices": {"x": ["X", "layers/halves"]},
    "a dense matrix": {"x": "layers/dense", "layout": "dense"},
    "genes of a dense matrix": {"x": "layers/dense", "genes": SOME},
    "normalized": {"transforms": [zl.transforms.LogNormalize(50)]},
    "normalized genes": {"transforms": [zl.transforms.LogNormalize(50)], "genes": SOME, "layout": "dense"},
    "obs": {"obs": ["cell_type", "donor", "lane"]},
}


@pytest.fixture(scope="module")
def shared_cache(form, tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.mark.every(12)
@pytest.mark.parametrize("choice", CHOICES)
def test_epochs_are_those_without_a_cache(store, tmp_path, choice):
    check_epochs(opened(store), opened(store, compact(tmp_path)), **CHOICES[choice])
    files = files_of(tmp_path, "rows")
    assert len(files) == (2 if choice == "two matrices" else 1)


@pytest.mark.slow
def test_one_cache_takes_all_choices(store, shared_cache):
    for choice in ("whole rows", "some genes", "all genes reversed", "one gene", "some genes, dense", "fractions"):
        check_epochs(opened(store), opened(store, compact(shared_cache)), **CHOICES[choice])
    assert len(files_of(shared_cache, "rows")) == 5


@pytest.mark.slow
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    genes=st.lists(st.integers(0, N_GENES - 1), min_size=1, unique=True),
    rows=st.lists(st.integers(0, N_ROWS - 1), min_size=1, max_size=40),
)
def test_any_rows_of_any_panel(store, shared_cache, genes, rows):
    dataset = opened(store, compact(shared_cache))
    for _ in range(2):
        x = dataset[:, genes].read_rows(np.array(rows))
        found = scipy.sparse.csr_matrix((x.values, x.indices, x.indptr), (len(rows), len(genes)))
        np.testing.assert_array_equal(found.toarray(), ADATA.X[rows][:, genes].toarray())


def test_a_panel_is_cached_like_the_genes_of_a_loader(store, tmp_path):
    dataset = opened(store, compact(tmp_path))
    check_epochs(opened(store)[:, SOME], dataset[:, SOME])
    loader = loader_of(dataset, genes=SOME)
    assert_same_minibatches(loader, loader_of(opened(store), genes=SOME))
    assert loader.statistics().gets == 0
    assert len(files_of(tmp_path, "rows")) == 1


@pytest.mark.every(4)
@pytest.mark.parametrize("join", ["outer", "inner"])
@pytest.mark.parametrize("choice", ["whole rows", "dense", "some genes, packed"])
def test_joined_stores(folder, tmp_path, join, choice):
    urls = [folder / "a.zarr", folder / "b.zarr"]
    plain, cached = (opened(urls, cache, join=join) for cache in (None, compact(tmp_path)))
    options = CHOICES[choice]
    if "genes" in options:
        options = options | {"genes": ["gene 30", "gene 2", "gene 5"]}
    check_epochs(plain, cached, **options)
    assert len(files_of(tmp_path, "rows")) == 2


NORMALIZED: dict[str, Any] = {"transforms": [zl.transforms.Normalize(50)], "dtype": "float64", "layout": "dense"}


@pytest.mark.slow
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(genes=st.lists(st.integers(0, 39), min_size=1, unique=True), join=st.sampled_from(["outer", "inner"]))
def test_any_normalized_panel_of_joined_stores(folder, shared_cache, genes, join):
    urls, names = [folder / "a.zarr", folder / "b.zarr"], [f"gene {gene}" for gene in genes]
    plain, cached = (opened(urls, cache, join=join) for cache in (None, compact(shared_cache)))
    check_epochs(plain, cached, genes=names, **NORMALIZED)
    joined = ad.concat([ad.AnnData(each.X, each.obs[[]], each.var[[]]) for each in (ADATA, OTHER)], join=join)
    totals = np.asarray(joined.X.sum(axis=1), np.float64)
    wanted = joined[:, names].X.toarray() * np.divide(50, totals, out=np.zeros_like(totals), where=totals > 0)
    loader = zl.Loader(cached[:, names], shuffle=False, **NORMALIZED)
    found = np.concatenate([minibatch.x.numpy() for minibatch in loader])
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


@pytest.mark.every(3)
@pytest.mark.parametrize(("join", "x", "enough"), [("outer", "X", 1), ("inner", "X", 0), ("outer", "layers/halves", 0)])
def test_totals_of_stores_are_enough_if_a_join_keeps_them(folder, tmp_path, join, x, enough):
    """An inner join leaves out genes of the first store, and sums of fractions depend on the order of genes."""
    urls, names = [folder / "a.zarr", folder / "b.zarr"], ["gene 7", "gene 2"]
    plain, cached = (opened(urls, cache, join=join) for cache in (None, compact(tmp_path)))
    check_epochs(plain, cached, genes=names, x=x, **NORMALIZED)
    assert cached[:, names].cache_statistics(x).share == enough


@pytest.mark.slow
@pytest.mark.every(4)
@pytest.mark.parametrize("dtype", ["float64", "int64", ">f4", "uint8", "float16", "bool"])
def test_h5ad_files_in_place(tmp_path, dtype):
    adata = counts(70, 30, seed=5)
    adata.X = adata.X.astype("float32")
    adata.X.data = np.minimum(adata.X.data, 200)
    adata.write_h5ad(tmp_path / "a.h5ad", convert_strings_to_categoricals=False)
    with h5py.File(tmp_path / "a.h5ad", "r+") as file:
        values = file["X/data"][:].astype(dtype)
        del file["X/data"]
        file["X"].create_dataset("data", data=values, chunks=(50,))
    for options in ({}, {"genes": ["gene 9", "gene 2"]}, {"dtype": "float64", "layout": "dense"}):
        cached = opened(tmp_path / "a.h5ad", compact(tmp_path / "cache"))
        check_epochs(opened(tmp_path / "a.h5ad"), cached, **options)


def unsorted(path: Path) -> Path:
    """An .h5ad file of which rows have genes in any order, and twice."""
    x = scipy.sparse.csr_matrix(
        (
            np.array([1e-3, 0.1, 7, 0.7, 2, 3, 1e9, 1e-9, 5], np.float64),
            np.array([5, 2, 5, 2, 2, 0, 3, 3, 1], np.int32),
            np.array([0, 4, 4, 8, 9]),
        ),
        shape=(4, 6),
    )
    ad.AnnData(scipy.sparse.csr_matrix((4, 6), dtype=np.float64)).write_h5ad(path)
    with h5py.File(path, "r+") as file:
        del file["X"]
        ad.io.write_elem(file, "X", scipy.sparse.csr_matrix((4, 6), dtype=np.float64))
        for name, values in (("data", x.data), ("indices", x.indices), ("indptr", x.indptr)):
            del file["X"][name]
            file["X"].create_dataset(name, data=values)
    return path


@pytest.mark.every(6)
@pytest.mark.parametrize("options", [{}, {"layout": "dense"}, {"genes": ["3", "2", "5"]}, {"dtype": "float64"}])
def test_genes_in_any_order_and_repeated_ones(tmp_path, options):
    path = unsorted(tmp_path / "a.h5ad")
    check_epochs(opened(path), opened(path, compact(tmp_path / "cache")), **options)


@pytest.mark.every(3)
@pytest.mark.parametrize("n_rows", [1, 2, 33])
@pytest.mark.parametrize("empty", [False, True])
def test_few_rows_and_empty_ones(tmp_path, n_rows, empty):
    adata = counts(n_rows, 20, seed=7)
    if empty:
        adata.X = scipy.sparse.csr_matrix((n_rows, 20), dtype=np.float32)
    write_store(adata, tmp_path / "a.zarr", tmp_path)
    for genes in (None, ["gene 9", "gene 1"]):
        wanted = adata if genes is None else adata[:, genes]
        loader = loader_of(opened(tmp_path / "a.zarr", compact(tmp_path / "cache")), genes=genes)
        for _ in range(2):
            assert sum(len(check_minibatch(minibatch, wanted)) for minibatch in loader) == n_rows
        assert loader.statistics().gets == 0


# ---- warm, offline, resumed, in other processes


@pytest.mark.parametrize("genes", [None, SOME])
def test_a_warm_cache_needs_no_store(store, tmp_path, genes):
    moved = tmp_path / "moved.zarr"
    shutil.copytree(store, moved)
    cache, wanted = compact(tmp_path / "cache"), list(loader_of(opened(store), genes=genes, obs=["lane"]))
    dataset = opened(moved, cache)
    panel = dataset if genes is None else dataset[:, genes]
    before = panel.cache_statistics()
    assert (before.chunks_held, before.bytes_held, before.share) == (0, 0, 0.0)
    warmed = zl.warm(panel)
    assert (warmed.chunks_held, warmed.bytes_held, warmed.full) == (warmed.chunks, warmed.bytes_in_all, False)
    assert warmed.gets
    assert zl.warm(panel).gets == 0
    after = panel.cache_statistics()
    assert (after.chunks_held, after.share) == (after.chunks, 1.0)
    assert 0 < after.bytes_held < 4 * ADATA.X.nnz + 60 * N_ROWS
    loader = zl.Loader(panel, **SIZES, obs=["lane"])
    assert_same_minibatches(loader, wanted)
    assert loader.statistics().gets == 0
    shutil.rmtree(moved)
    offline = opened(moved, cache, offline=True)
    offline = pickle.loads(pickle.dumps(offline if genes is None else offline[:, genes]))
    loader = zl.Loader(offline, **SIZES, obs=["lane"])
    assert_same_minibatches(loader, wanted)
    assert loader.statistics().gets == 0


@pytest.mark.parametrize("room", [0, 4_000, 30_000])
def test_whole_rows_serve_a_panel_for_which_a_cache_has_no_room(store, tmp_path, room):
    zl.warm(opened(store, compact(tmp_path)))
    full = compact(tmp_path, max_bytes=cache_bytes(tmp_path) + 262_144 + room)
    for options in ({}, NORMALIZED):
        wanted = loader_of(opened(store), genes=REVERSED, **options)
        for offline in (False, True):
            loader = loader_of(opened(store, full, offline=offline), genes=REVERSED, **options)
            assert_same_minibatches(loader, wanted)
            assert loader.statistics().gets == 0
            wanted = loader_of(opened(store), genes=REVERSED, **options)


def test_rows_without_values_need_no_store(tmp_path):
    adata = counts(96, 10)
    adata.X = scipy.sparse.vstack([scipy.sparse.csr_matrix((32, 10), dtype=np.float32), adata.X[32:]], "csr")
    write_store(adata, tmp_path / "a.zarr", tmp_path)
    dataset = opened(tmp_path / "a.zarr", compact(tmp_path / "cache"))
    zl.warm(dataset)
    (index,) = files_of(tmp_path / "cache", "index")
    np.memmap(index, "<u8")[HEADER + 1] = 0  # the word of the first block, which is absent then
    assert dataset.cache_statistics().chunks_held == 2
    offline = opened(tmp_path / "a.zarr", compact(tmp_path / "cache"), offline=True)
    np.testing.assert_array_equal(offline.take(np.arange(96)).X.toarray(), adata.X.toarray())


@pytest.mark.parametrize("genes", [None, SOME])
def test_a_loader_resumes_as_without_a_cache(store, tmp_path, genes):
    wanted, loader = (loader_of(opened(store, cache), genes=genes) for cache in (None, compact(tmp_path)))
    for each in (wanted, loader):
        iterator = iter(each)
        for _ in range(5):
            next(iterator)
        iterator.close()
    state = loader.state_dict()
    assert state == wanted.state_dict()
    resumed = [loader_of(opened(store, cache), genes=genes) for cache in (None, compact(tmp_path))]
    for each in resumed:
        each.load_state_dict(state)
    assert_same_minibatches(resumed[1], resumed[0])


@pytest.mark.slow
def test_workers_share_the_cache(store, tmp_path):
    loader = loader_of(opened(store, compact(tmp_path)), genes=SOME)
    for _ in range(2):
        rows = [
            check_minibatch(minibatch, ADATA[:, SOME])
            for minibatch in DataLoader(loader, batch_size=None, num_workers=2)
        ]
        assert np.sort(np.concatenate(rows)).tolist() == list(range(N_ROWS))
    loader = loader_of(opened(store, compact(tmp_path)), genes=SOME)
    list(loader)
    assert loader.statistics().gets == 0


def test_loaders_of_two_panels_at_once(store, tmp_path):
    dataset, barrier = opened(store, compact(tmp_path)), threading.Barrier(4)

    def epoch(genes):
        barrier.wait()
        loader = loader_of(dataset, genes=genes)
        return [check_minibatch(minibatch, ADATA[:, genes]) for minibatch in loader]

    with ThreadPoolExecutor(4) as threads:
        for rows in threads.map(epoch, [SOME, REVERSED, SOME, REVERSED]):
            assert np.sort(np.concatenate(rows)).tolist() == list(range(N_ROWS))
    assert len(files_of(tmp_path, "rows")) == 2
    assert zl.warm(dataset[:, SOME]).gets == 0


def test_little_memory_and_one_thread_are_enough(store, tmp_path):
    options = fetch_options(memory="16MiB", threads=1, in_flight_bytes=1, buffer_bytes=1, ready_bytes=1)
    for genes in (None, SOME):
        check_epochs(opened(store), opened(store, compact(tmp_path)), genes=genes, options=options)


def test_of_single_rows_the_table_of_their_block_and_their_own_bytes_are_prefetched(store, tmp_path, monkeypatch, form):
    dataset, told = opened(store, compact(tmp_path)), []
    list(loader_of(dataset))
    mirror = dataset.store.mirror(dataset.store.matrix("X")).rows
    monkeypatch.setattr(page_cache, "prefetch", lambda file, starts, stops: told.append((starts, stops)))
    kept = mirror.rows(np.array([5, 100, 101, N_ROWS - 2]))
    assert kept.lengths.all()
    (tables, after_tables), (begins, ends) = told
    assert (after_tables - tables == mirror.form.table_bytes).all()
    assert len(tables) == 3
    if form == "compact":
        np.testing.assert_array_equal(begins, kept.starts[0])
        assert (ends - begins < 8 * kept.lengths).all()
    else:
        genes, values = kept.starts[0] * kept.genes.itemsize, kept.starts[1] * kept.values.itemsize
        after = values + kept.lengths * kept.values.itemsize
        assert ((genes - begins >= 4) & (genes - begins < 12)).all()
        assert ((ends >= after) & (ends < after + 8)).all()
    told.clear()
    mirror.rows(np.arange(N_ROWS))
    ((begins, ends),) = told
    assert int((ends - begins).sum()) == mirror.bytes_of(np.arange(mirror.form.n_blocks))


def test_rows_of_the_other_form_are_used(store, tmp_path, form):
    other = zl.Cache(tmp_path, form="raw" if form == "compact" else "compact")
    list(zl.Loader(opened(store, other)[: N_ROWS // 2], **SIZES))
    for genes in (None, SOME):
        check_epochs(opened(store), opened(store, compact(tmp_path)), genes=genes)
    assert len(files_of(tmp_path, "rows")) == 2


_FILLS = """
import json, os, sys
import zloader as zl
store, cache, genes, form = json.loads(sys.argv[1])
dataset = zl.open_dataset(store, cache=zl.Cache(cache, form=form))
options = zl.FetchOptions()
vars(options).update(least_read_bytes=1, prefetch=1, gap_bytes=0)
dataset = dataset if genes is None else dataset[:, genes]
loader = zl.Loader(dataset, batch_size=8, fetch_factor=1, sampling=zl.BlockShuffling(4), options=options)
for minibatch in loader:
    os.write(1, b".")
    sys.stdin.read(1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("minibatches", "genes"), [(3, None), (1, SOME)])
def test_a_process_killed_while_filling_leaves_right_values_and_blocks_nobody(
    interpreter, store, tmp_path, minibatches, genes
):
    with interpreter.running(_FILLS, json.dumps([str(store), str(tmp_path), genes, FORM[0]])) as process:
        for _ in range(minibatches):
            assert process.stdout.read(1) == "."
            process.stdin.write("x")
            process.stdin.flush()
        process.kill()
        process.wait()
    (mirror,) = mirrors(tmp_path)
    assert inspect_mirror(mirror).chunks_held
    assert verify(mirror.directory) == []
    check_epochs(opened(store), opened(store, compact(tmp_path)), genes=genes)


# ---- damage


@pytest.fixture(scope="module", params=[None, SOME], ids=["whole rows", "panel"])
def full(request, form, store, tmp_path_factory):
    """A full cache, and the genes that it has."""
    cache = tmp_path_factory.mktemp("full")
    dataset = opened(store, compact(cache))
    zl.warm(dataset if request.param is None else dataset[:, request.param])
    return cache, request.param


@pytest.fixture
def copied(full, tmp_path):
    shutil.copytree(full[0], tmp_path / "copy", symlinks=True, dirs_exist_ok=True)
    return tmp_path / "copy", full[1]


def present_blocks(cache: Path) -> list[tuple[int, int]]:
    """The first byte of each block, and the byte after its last."""
    (path,) = files_of(cache, "index")
    offsets, words = np.fromfile(path, "<u8")[HEADER:].reshape(-1, 2).T
    return list(zip(offsets.tolist(), (offsets + (words >> 32) * 8).tolist(), strict=True))


def flip(path: Path, at: int, change: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= change
    path.write_bytes(content)


def check_after_damage(store: Path, cache: Path, genes: Any, *, gets: int | None = None) -> None:
    loader = loader_of(opened(store, compact(cache)), genes=genes)
    wanted = loader_of(opened(store), genes=genes)
    assert_same_minibatches(loader, wanted)
    assert loader.statistics().gets == gets if gets is not None else loader.statistics().gets
    assert_same_minibatches(loader, wanted)
    assert loader.statistics().gets == 0
    (mirror,) = mirrors(cache)
    assert verify(mirror.directory) == []


@pytest.mark.every(2)
@pytest.mark.parametrize("where", ["first", "last"])
def test_a_flipped_byte_of_any_block_is_noticed(store, copied, where, caplog):
    cache, genes = copied
    (rows,) = files_of(cache, "rows")
    blocks = present_blocks(cache)
    assert len(blocks) == (10 if genes is None else 3)
    for begin, end in blocks:
        flip(rows, begin if where == "first" else end - 1)
    check_after_damage(store, cache, genes)
    assert caplog.text.count("differs from its checksum") >= len(blocks)  # two fetches may find the same one


@pytest.mark.every(5)
@pytest.mark.parametrize("share", [0, 0.3, 0.99])
@pytest.mark.parametrize("suffix", ["rows", "index"])
def test_truncated_files(store, copied, suffix, share):
    cache, genes = copied
    (path,) = files_of(cache, suffix)
    end = path.stat().st_size if suffix == "index" else max(end for _, end in present_blocks(cache))
    os.truncate(path, int(share * end))
    check_after_damage(store, cache, genes)


@pytest.mark.every(2)
@pytest.mark.parametrize("suffix", ["rows", "index"])
def test_deleted_files(store, copied, suffix):
    cache, genes = copied
    files_of(cache, suffix)[0].unlink()
    check_after_damage(store, cache, genes)


@pytest.mark.every(2)
@pytest.mark.parametrize("suffixes", [["rows"], ["index"], ["rows", "index"]])
def test_a_file_that_is_deleted_while_in_use_does_no_harm(store, copied, suffixes):
    """Others fill new files then. Rows lie at other places there, as they are written in the order of being read."""
    cache, genes = copied
    user, wanted = (loader_of(opened(store, each), genes=genes) for each in (compact(cache), None))
    assert_same_minibatches(user, wanted)
    for suffix in suffixes:
        files_of(cache, suffix)[0].unlink()
    other = loader_of(opened(store, compact(cache)), genes=genes, seed=4)
    list(other)
    assert_same_minibatches(user, wanted)
    assert user.statistics().gets == 0
    check_after_damage(store, cache, genes, gets=0)


@pytest.mark.every(6)
@pytest.mark.parametrize("word", [0, HEADER - 1, HEADER, HEADER + 1])
def test_a_damaged_index(store, copied, word):
    """In the header, the first byte of a block, which may then be anywhere, or its size and checksum."""
    cache, genes = copied
    (path,) = files_of(cache, "index")
    for byte in (0, 4, 7):
        flip(path, 8 * word + byte, 0x81)
    (mirror,) = mirrors(cache)
    inspect_mirror(mirror)
    check_after_damage(store, cache, genes)


def test_blocks_of_another_panel_are_not_taken(store, copied):
    """A renamed file belongs to another array."""
    cache, genes = copied
    (rows,), (blocks,) = files_of(cache, "rows"), files_of(cache, "index")
    loader = loader_of(opened(store, compact(cache)), genes=REVERSED)
    next(iter(loader))
    for path, suffix in ((rows, "rows"), (blocks, "index")):
        (other,) = set(files_of(cache, suffix)) - {path}
        other.write_bytes(path.read_bytes())
    check = loader_of(opened(store, compact(cache)), genes=REVERSED)
    assert_same_minibatches(check, loader_of(opened(store), genes=REVERSED))
    assert bool(check.statistics().gets) == (genes is not None)  # whole rows have all values of a panel


def test_a_damaged_store_causes_the_same_error_as_without_a_cache(store, tmp_path):
    broken = tmp_path / "broken.zarr"
    shutil.copytree(store, broken)
    for shard in (broken / "X" / "data").rglob("c/*"):
        content = bytearray(shard.read_bytes())
        content[: len(content) // 2] = bytes(len(content) // 2)
        shard.write_bytes(content)
    said = []
    for cache in (None, compact(tmp_path / "cache")):
        for genes in (None, SOME):
            with pytest.raises(CorruptChunkError) as error:
                list(loader_of(opened(broken, cache), genes=genes))
            said.append(type(error.value))
    assert len(set(said)) == 1


# ---- limits


@pytest.mark.every(6)
@pytest.mark.parametrize("genes", [None, SOME])
@pytest.mark.parametrize("most", [1_000, 330_000, 355_000, 400_000])
def test_a_small_cache_keeps_its_limit_and_values_are_right(store, tmp_path, most, genes):
    cache = compact(tmp_path, max_bytes=most)
    for _ in range(2):
        loader = loader_of(opened(store, cache), genes=genes)
        assert_same_minibatches(loader, loader_of(opened(store), genes=genes))
        assert cache_bytes(tmp_path) <= max(most, 40_000)


_SHARES = """
import json, sys
import zloader as zl
store, cache, genes, most, form = json.loads(sys.argv[1])
dataset = zl.open_dataset(store, cache=zl.Cache(cache, form=form, max_bytes=most))
for _ in range(2):
    rows, loader = {}, zl.Loader(dataset[:, genes], batch_size=16, fetch_factor=4, layout="dense")
    for minibatch in loader:
        rows |= dict(zip(minibatch.index.tolist(), minibatch.x.tolist(), strict=True))
print(json.dumps([rows[row] for row in sorted(rows)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("most", [340_000, 10_000_000])
def test_processes_with_two_panels_share_one_limit(interpreter, store, tmp_path, most):
    panels = [SOME, REVERSED[::2]]
    arguments = [json.dumps([str(store), str(tmp_path), genes, most, FORM[0]]) for genes in panels]
    with interpreter.running(_SHARES, arguments[0]) as one, interpreter.running(_SHARES, arguments[1]) as other:
        for genes, process in zip(panels, (one, other), strict=True):
            out, errors = process.communicate()
            assert not process.wait(), errors
            np.testing.assert_array_equal(json.loads(out), ADATA[:, genes].X.toarray())
    assert cache_bytes(tmp_path) <= most
    (mirror,) = mirrors(tmp_path)
    assert verify(mirror.directory) == []


def test_a_cache_that_is_partly_full_serves_what_it_has(store, tmp_path, monkeypatch):
    """Rows of a fetch that are kept, and others that are not, in one array."""
    dataset = opened(store, compact(tmp_path))
    for _ in range(2):
        list(zl.Loader(dataset[: N_ROWS // 2], **SIZES))
    part = opened(store, compact(tmp_path))
    mirror = part.store.mirror(part.store.matrix("X"))
    mirror.rows.writable = False
    n_present = mirror.rows.held.chunks_held
    assert 0 < n_present < mirror.rows.form.n_blocks
    for options in ({}, {"layout": "dense", "dtype": "float64"}):
        loader = zl.Loader(part, **SIZES | options)
        assert_same_minibatches(loader, zl.Loader(opened(store), **SIZES | options))
        statistics = loader.statistics()
        assert statistics.gets
        assert statistics.chunks_from_mirror
    assert mirror.rows.held.chunks_held == n_present


# ---- inspected and dropped


def test_a_mirror_is_inspected_and_verified(full):
    cache, genes = full
    (mirror,) = mirrors(cache)
    inspected = inspect_mirror(mirror)
    ((name, rows),) = (
        (name, array) for name, array in inspected.arrays.items() if name.startswith("X") and "indptr" not in name
    )
    assert name == "X" if genes is None else name.startswith("X/panel ")
    assert rows.chunks_held == rows.chunks == len(present_blocks(cache))
    assert rows.bytes_held == rows.bytes_in_all
    seen = []
    assert verify(mirror.directory, seen.append) == []
    assert sum(seen) == inspected.bytes_held + inspected.kept_bytes


def test_only_sparse_matrices_are_coded(store):
    dataset = opened(store).store
    forms = [RowForm.of(dataset.matrix(name), None, compact=True) for name in ("X", "layers/halves", "layers/dense")]
    assert [form.coded for form in forms] == [True, True, False]


# ---- any matrix, against AnnData

LONG = 70_000  # genes, and the values of the longest rows: too many to be coded
STORED = [
    "csr_matrix .zarr",
    "csr_matrix .h5ad",
    "csr_matrix converted",
    "csc_matrix .zarr",
    "array .zarr",
    "array .h5ad",
]


@st.composite
def matrices(draw: Any, dtype: np.dtype[Any], how: str) -> scipy.sparse.csr_matrix:
    """A matrix. In rows of a CSR matrix that is not converted, genes may be repeated and in any order."""
    n_genes = draw(st.sampled_from([1, 17, 300, LONG] if "csr" in how else [1, 17, 300]))
    lengths = draw(st.lists(st.sampled_from([0, 1, 2, 33, n_genes]), min_size=1, max_size=140 if n_genes < LONG else 5))
    lengths = np.minimum(lengths, n_genes)
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    repeats = how in STORED[:2] and draw(st.booleans())
    genes = [rng.integers(n_genes, size=n) if repeats else np.sort(rng.permutation(n_genes)[:n]) for n in lengths]
    most = (
        1 if repeats else 2**11 if dtype.kind == "f" else min(2**53, np.iinfo(dtype).max)
    )  # their sums are exact, too
    values = rng.integers(draw(st.sampled_from([0, 1, -most])) if dtype.kind != "u" else 0, most + 1, lengths.sum() + 1)
    small = rng.random(len(values)) < draw(st.sampled_from([0, 0.9]))
    values = (np.where(small, values % 8, values) / draw(st.sampled_from([1, 4]))).astype(dtype)
    indptr = np.append(0, np.cumsum(lengths))
    return scipy.sparse.csr_matrix((values[:-1], np.concatenate(genes), indptr), (len(lengths), n_genes))


def written(x: scipy.sparse.csr_matrix, how: str, folder: Path) -> tuple[Path, Any]:
    """The path of a store of a matrix, and X as AnnData reads it."""
    layout, kind = how.split()
    genes = pd.DataFrame(index=[f"gene {gene}" for gene in range(x.shape[1])])
    adata = ad.AnnData({"csr_matrix": lambda: x, "csc_matrix": x.tocsc, "array": x.toarray}[layout](), var=genes)
    path = folder / f"a{kind if kind != 'converted' else '.zarr'}"
    if kind == "converted":
        write_store(adata, path, folder)
        return path, ad.read_h5ad(folder / "source.h5ad").X
    write = adata.write_h5ad if kind == ".h5ad" else adata.write_zarr
    with ad.settings.override(zarr_write_format=3, auto_shard_zarr_v3=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write(path)
    return path, (ad.read_h5ad if kind == ".h5ad" else ad.read_zarr)(path).X


def plain(x: Any) -> list[list[Any]]:
    """The rows, genes and values of a matrix without its zeros."""
    x = scipy.sparse.csr_matrix(x) if isinstance(x, np.ndarray) else x.tocsr(copy=True)
    x.sum_duplicates()
    x.eliminate_zeros()
    return [x.indptr.tolist(), x.indices.tolist(), x.data.tolist()]


DTYPES = ["float32", *(pytest.param(each, marks=pytest.mark.slow) for each in ("int8", "uint16", "float64", "int64"))]


@pytest.mark.every(5)
@pytest.mark.parametrize("how", STORED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_matrix(how, dtype, form, tmp_path_factory):
    """In fetches of any rows: of an empty mirror, while several users fill it, of a full one, and offline."""

    @settings(max_examples=2, phases=[Phase.generate])
    @given(x=matrices(np.dtype(dtype), how), data=st.data())
    def run(x: scipy.sparse.csr_matrix, data: st.DataObject) -> None:
        folder = tmp_path_factory.mktemp("any")
        path, wanted = written(x, how, folder)
        some_rows = st.lists(st.integers(0, x.shape[0] - 1), min_size=1, max_size=40).map(np.array)
        some_genes = st.none() | st.lists(st.integers(0, x.shape[1] - 1), min_size=1, max_size=20, unique=True)

        def check(dataset: zl.Dataset, rows: NDArray[Any], genes: list[int] | None) -> None:
            x = of_genes(dataset, genes).read_rows(rows)
            if not isinstance(x, np.ndarray):
                x = scipy.sparse.csr_matrix((x.values, x.indices, x.indptr), (len(rows), x.n_genes))
            assert plain(x) == plain(wanted[rows] if genes is None else wanted[rows][:, genes])

        for phase in ("cold", "filling", "warm", "offline"):
            fetches = data.draw(st.lists(st.tuples(some_rows, some_genes), min_size=1, max_size=3))
            users = [opened(path, compact(folder / "cache"), offline=phase == "offline") for _ in fetches]
            with ThreadPoolExecutor(3) as threads:
                for done in [threads.submit(check, user, *each) for user, each in zip(users, fetches, strict=True)]:
                    done.result()
            if phase == "filling":
                zl.warm(users[0])
        for mirror in mirrors(folder / "cache"):
            assert verify(mirror.directory) == []

    run()
