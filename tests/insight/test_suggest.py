"""Suggested sizes fit the memory, the store and each other."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from helpers import counts, write_store
from hypothesis import example, given
from hypothesis import strategies as st

import zloader as zl
from zloader.common.errors import FormatError, OptionError
from zloader.insight.suggest import sizes
from zloader.order.plan import Plan
from zloader.storage.layout import chunks_of

pytestmark = pytest.mark.any_version

GiB = 1 << 30


def _sizes(*, memory="2GiB", **given):
    usual = {"n_rows": 100_000_000, "row_bytes": 6_000, "rows_per_chunk": 32, "batch_size": 64}
    return sizes(**usual | given, options=zl.FetchOptions(memory=memory))


@given(
    n_rows=st.integers(1, 10**9),
    row_bytes=st.floats(0, 10**6),
    rows_per_chunk=st.floats(0.01, 10**5),
    batch_size=st.integers(1, 2000),
    memory=st.integers(2**24, 2**38),
)
@example(n_rows=44, row_bytes=111_213, rows_per_chunk=38, batch_size=1, memory=2**24)  # not even one block fits
def test_what_is_suggested_can_be_planned_and_fits(n_rows, row_bytes, rows_per_chunk, batch_size, memory):
    options = zl.FetchOptions(memory=memory)
    suggested = _sizes(
        n_rows=n_rows, row_bytes=row_bytes, rows_per_chunk=rows_per_chunk, batch_size=batch_size, memory=memory
    )
    plan = Plan(
        dataset_rows=n_rows,
        sampling=suggested.sampling,
        batch_size=suggested.batch_size,
        fetch_factor=suggested.fetch_factor,
    )
    # Fetches are equally long, so those of an epoch of several may be smaller than allowed.
    assert len(plan.fetch(0).rows) <= suggested.fetch_rows
    assert plan.n_fetches > 1 or len(plan.fetch(0).rows) == suggested.fetch_rows
    assert plan.fetch_rows < n_rows + batch_size
    if suggested.fetch_factor > 1:  # otherwise a fetch is a single minibatch of any size
        assert suggested.fetch_bytes <= suggested.memory_bytes / (options.prefetch + 1) * (1 + 1e-9) + 1


CASES = {
    "the default store": ({}, 64, 256),
    "small chunks": ({"rows_per_chunk": 8}, 16, 64),
    "little memory: fewer blocks": ({"memory": "256MiB"}, 64, 88),
    "less memory: shorter blocks": ({"memory": "64MiB"}, 16, 11),
    "huge chunks: shorter blocks": ({"rows_per_chunk": 1000}, 512, 355),
    "chunks that no memory has many of: not many times decoded": (
        {"rows_per_chunk": 4000, "row_bytes": 11_680, "memory": "1GiB"},
        2048,
        91,
    ),
    "rows spread thin: fewer of them": ({"spread": 10, "memory": "256MiB"}, 64, 12),
    "a few rows": ({"n_rows": 700}, 64, 11),
    "fewer rows than a minibatch": ({"n_rows": 10}, 64, 1),
    "large minibatches": ({"batch_size": 1024}, 64, 16),
    "a control per row": ({"n_controls": 1}, 16, 30),
    "ten controls per row": ({"n_controls": 10}, 16, 3),
    "a control and nine neighbours per row: as ten controls": ({"n_controls": 1, "n_neighbors": 9}, 16, 3),
    "sets: as many single rows as blocks would have": (
        {"sets": zl.CellSets("drug", 64), "rows_per_chunk": 4},
        1,
        32,
    ),
    "sets: fewer where their chunks do not fit": ({"sets": zl.CellSets("drug", 64)}, 1, 32),
    "sets with controls: half of that": ({"sets": zl.CellSets("drug", 64), "n_controls": 1}, 1, 16),
}


@pytest.mark.parametrize(("options", "block_size", "fetch_factor"), CASES.values(), ids=CASES.keys())
def test_sizes(options, block_size, fetch_factor):
    suggested = _sizes(**options)
    assert (suggested.block_size, suggested.fetch_factor) == (block_size, fetch_factor)


def test_a_store_is_looked_at_and_the_reasons_are_said(tmp_path):
    adata = counts(600, 40)
    zl.convert(adata, tmp_path / "a.zarr", options=zl.ConvertOptions(chunk_rows=16), progress=False)
    zl.convert(adata[:200].copy(), tmp_path / "b.zarr", options=zl.ConvertOptions(chunk_rows=4), progress=False)
    dataset = zl.open_dataset([tmp_path / "a.zarr", tmp_path / "b.zarr"])
    suggested = zl.suggest(dataset, batch_size=8, memory="64MiB")
    matrices = dataset.matrices.layouts("X")
    per_chunk = [m.values.chunk_elements / m.values.n_elements * m.n_rows for m in matrices]
    assert suggested.rows_per_chunk == pytest.approx(max(per_chunk))
    assert suggested.fetch_rows == 800
    assert str(suggested).count("\n") == 0
    assert "a chunk has" in str(suggested)
    assert f"sampling=BlockShuffling(block_size={suggested.block_size}, n_strata=64)" in str(suggested)
    loader = zl.Loader(dataset, batch_size=8, fetch_factor=suggested.fetch_factor, sampling=suggested.sampling)
    assert sum(map(len, loader)) == 800


def test_a_view_takes_the_chunks_that_its_rows_are_in(tmp_path):
    adata = counts(4000, 40, density=1)
    zl.convert(adata, tmp_path / "a.zarr", options=zl.ConvertOptions(chunk_rows=16), progress=False)
    dataset = zl.open_dataset(tmp_path / "a.zarr")
    val = dataset.split([0.9, 0.1])[1]
    suggested = zl.suggest(val, batch_size=8)
    assert (suggested.fetch_rows, suggested.spread) == (400, 10)
    plan = zl.Loader(val, batch_size=8, fetch_factor=suggested.fetch_factor, sampling=suggested.sampling).plan(0)
    decoded = 0
    (matrix,) = dataset.matrices.layouts("X")
    indptr = np.append(0, np.cumsum(np.diff(adata.X.indptr)))
    starts, stops = indptr[plan.fetch(0).rows], indptr[plan.fetch(0).rows + 1]
    for array in matrix.arrays:
        chunks = chunks_of(starts, stops, array)
        decoded += len(chunks) * array.chunk_elements * array.dtype.itemsize
    assert suggested.fetch_bytes == pytest.approx(decoded, rel=0.1)
    with pytest.raises(FormatError, match="no rows to load"):
        zl.suggest(dataset.where("n_counts < 0"))


def test_sets_and_controls_are_counted(tmp_path):
    adata = counts(4000, 40, density=1)
    adata.obs["drug"] = np.tile(["a", "b", "c", "DMSO"], 1000)
    zl.convert(adata, tmp_path / "a.zarr", options=zl.ConvertOptions(chunk_rows=16), progress=False)
    dataset = zl.open_dataset(tmp_path / "a.zarr")
    given = {
        "batch_size": 64,
        "sampling": zl.CellSets("drug", 16),
        "controls": zl.MatchedControls("drug == 'DMSO'", match=[], n=2),
    }
    suggested = zl.suggest(dataset, memory="64MiB", **given)
    assert (suggested.sampling, suggested.n_controls) == (given["sampling"], 2)
    assert f"{suggested.fetch_rows:,} rows and {2 * suggested.fetch_rows:,} controls" in str(suggested)
    loader = zl.Loader(dataset, fetch_factor=suggested.fetch_factor, **given)
    assert len(loader.plan(0).fetch(0).rows) <= 3 * suggested.fetch_rows
    (matrix,) = dataset.matrices.layouts("X")
    assert suggested.fetch_bytes <= sum(a.n_elements * a.dtype.itemsize for a in matrix.arrays)
    assert sum(map(len, loader)) == 4000 - 4 * (1000 % 16)


def test_neighbors_are_counted(tmp_path):
    adata = counts(4000, 40, density=1)
    rows, others = np.repeat(np.arange(4000), 4), np.random.default_rng(0).integers(0, 4000, 16_000)
    adata.obsp["graph"] = sp.csr_matrix((np.ones(16_000, np.float32), (rows, others)), (4000, 4000))
    zl.convert(adata, tmp_path / "a.zarr", options=zl.ConvertOptions(chunk_rows=16), progress=False)
    dataset, neighbors = zl.open_dataset(tmp_path / "a.zarr"), zl.Neighbors("graph", k=3)
    alone, suggested = (zl.suggest(dataset, memory="64MiB", neighbors=each) for each in (None, neighbors))
    assert (alone.n_neighbors, suggested.n_neighbors) == (0, 3)
    assert suggested.fetch_rows < alone.fetch_rows
    assert f"and {3 * suggested.fetch_rows:,} neighbours and takes" in str(suggested)
    loader = zl.Loader(dataset, neighbors=neighbors, fetch_factor=suggested.fetch_factor, sampling=suggested.sampling)
    plan, (matrix,), decoded = loader.plan(0), dataset.matrices.layouts("X"), 0
    indptr = np.append(0, np.cumsum(np.diff(adata.X.indptr)))
    fetched = np.unique(plan.fetch(0).rows)
    for array in matrix.arrays:
        chunks = chunks_of(indptr[fetched], indptr[fetched + 1], array)
        decoded += len(chunks) * array.chunk_elements * array.dtype.itemsize
    assert decoded <= 1.1 * suggested.fetch_bytes
    with pytest.raises(OptionError, match=r"neighbors must be a zl.Neighbors, not 'graph'"):
        zl.suggest(dataset, neighbors="graph")


def test_what_makes_no_sense_is_refused(tmp_path):
    write_store(counts(5, 4), tmp_path / "a.zarr", tmp_path)
    dataset = zl.open_dataset(tmp_path / "a.zarr")
    with pytest.raises(OptionError, match="batch_size"):
        zl.suggest(dataset, batch_size=0)
    with pytest.raises(OptionError, match="memory"):
        zl.suggest(dataset, memory=10)
    with pytest.raises(OptionError, match="batch_size 64 is not a multiple of set_size 5"):
        zl.suggest(dataset, sampling=zl.CellSets("a", 5))
    with pytest.raises(OptionError, match=r"sampling must be a zl.CellSets, not 'random'"):
        zl.suggest(dataset, sampling="random")
    with pytest.raises(OptionError, match=r"controls must be a zl.MatchedControls, not 'a == 1'"):
        zl.suggest(dataset, controls="a == 1")
    with pytest.raises(FormatError, match="layers/none"):
        zl.suggest(dataset, x="layers/none")
