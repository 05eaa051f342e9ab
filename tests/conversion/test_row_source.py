"""Sources in a format of the user's own, read some rows at a time."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from helpers import counts

import zloader as zl
from zloader.common.errors import OptionError, SourceError, StoreExistsError
from zloader.conversion import rows

pytestmark = pytest.mark.any_version

ADATA = counts(700, 60)


class Rows:
    """The rows of an AnnData. `returned` changes what `rows` returns."""

    def __init__(self, adata: ad.AnnData = ADATA, returned=lambda counts, start: counts, **attributes) -> None:
        self.obs, self.var, self.n_obs = adata.obs, adata.var, adata.n_obs
        self._x, self._returned, self.calls = adata.X, returned, []
        vars(self).update(attributes)

    def rows(self, start, stop):
        self.calls.append((start, stop))
        return self._returned(self._x[start:stop], start)


def assert_equals(store, adata: ad.AnnData) -> None:
    found = ad.read_zarr(store)
    np.testing.assert_array_equal(found.X.toarray(), adata.X.toarray())
    pd.testing.assert_index_equal(found.obs_names, adata.obs_names)
    pd.testing.assert_index_equal(found.var_names, adata.var_names)
    assert set(found.obs.columns) == set(adata.obs.columns)


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"n_values": ADATA.X.nnz}])
def test_a_source_of_ones_own_becomes_what_its_anndata_becomes(tmp_path, monkeypatch, given):
    monkeypatch.setattr(rows, "MOST_BYTES", 20_000)
    source = Rows(**given)
    assert isinstance(source, zl.RowSource)
    report = zl.convert(source, tmp_path / "own.zarr", progress=False)
    zl.convert(ADATA, tmp_path / "same.zarr", progress=False)
    assert (report.rows, report.genes, report.values) == (700, 60, ADATA.X.nnz)
    assert_equals(tmp_path / "own.zarr", ADATA)
    assert zl.open_dataset(tmp_path / "own.zarr").take(range(700)).X.dtype == ADATA.X.dtype
    for one in (tmp_path / "own.zarr" / "X").rglob("c/*"):
        assert one.read_bytes() == (tmp_path / "same.zarr" / one.relative_to(tmp_path / "own.zarr")).read_bytes()
    assert max(stop - start for start, stop in source.calls) < 700
    assert sum(stop == 700 for _, stop in source.calls) == (1 if given else 2)  # for the sample, unless all is kept
    assert zl.verify(tmp_path / "own.zarr", against=source, progress=False).ok
    changed = Rows(returned=lambda counts, start: counts * (1 + (start > 100)))
    assert not zl.verify(tmp_path / "own.zarr", against=changed, progress=False).ok


def test_unsorted_and_repeated_genes(tmp_path):
    def shuffled(x, start):
        x = x.copy()
        for row in range(x.shape[0]):
            of_row = slice(x.indptr[row], x.indptr[row + 1])
            x.indices[of_row], x.data[of_row] = x.indices[of_row][::-1].copy(), x.data[of_row][::-1].copy()
        return x

    report = zl.convert(Rows(returned=shuffled), tmp_path / "own.zarr", progress=False)
    assert_equals(tmp_path / "own.zarr", ADATA)
    assert report.rows_made_canonical["X"] > 500


def test_resumes_only_with_a_fingerprint(tmp_path):
    zl.convert(Rows(fingerprint="one"), tmp_path / "own.zarr", progress=False)
    assert zl.convert(Rows(fingerprint="one"), tmp_path / "own.zarr", resume=True, progress=False).already_complete
    with pytest.raises(StoreExistsError, match="sources differ"):
        zl.convert(Rows(fingerprint="two"), tmp_path / "own.zarr", resume=True, progress=False)
    with pytest.raises(OptionError):
        zl.convert(Rows(), tmp_path / "own.zarr", resume=True, progress=False)


@pytest.mark.parametrize("given", [{}, {"n_values": ADATA.X.nnz + 1000}])
def test_shuffled_with_or_without_a_number_of_values(tmp_path, given):
    shuffled = zl.ConvertOptions(shuffle_seed=1)
    zl.convert(Rows(**given), tmp_path / "own.zarr", options=shuffled, progress=False)
    found = ad.read_zarr(tmp_path / "own.zarr")
    np.testing.assert_array_equal(found.X.toarray(), ADATA.X[found.obs["source_row"].to_numpy()].toarray())


def test_no_rows(tmp_path):
    zl.convert(Rows(ADATA[:0].copy()), tmp_path / "own.zarr", progress=False)
    assert zl.open_dataset(tmp_path / "own.zarr").n_obs == 0


def later(change):
    """Changes what is returned for all but the first rows."""
    return lambda counts, start: change(counts) if start else counts


def wrong_gene(counts):
    counts = counts.copy()
    counts.indices[-1] = 60
    return counts


def wrong_indptr(counts):
    made = scipy.sparse.csr_matrix(counts.shape, dtype=counts.dtype)
    made.indptr = np.full_like(made.indptr, 5)
    return made


def fails(counts):
    raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda counts: counts.toarray(), "a ndarray, not a CSR matrix"),
        (lambda counts: counts.tocsc(), "a csc_matrix, not a CSR matrix"),
        (lambda counts: counts[:-1], r"not \(\d+, 60\): cells x genes"),
        (lambda counts: counts[:, :-1], r"59\), not \(\d+, 60\)"),
        (wrong_gene, r"row 199 has a value for gene 60, but there are 60 genes"),
        (wrong_indptr, "indptr does not fit its values"),
        (lambda counts: counts.astype(np.float64), "returned float64, but the first cells float32"),
        (lambda counts: counts.astype(complex), "returned complex128"),
        (fails, "the disk is gone"),
    ],
)
def test_what_rows_must_not_return(tmp_path, monkeypatch, change, words):
    monkeypatch.setattr(rows, "_FIRST_ROWS", 100)
    with pytest.raises(SourceError, match=words):
        zl.convert(Rows(returned=later(change)), tmp_path / "own.zarr", progress=False)
    assert not (tmp_path / "own.zarr" / "zarr.json").exists()


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"n_values": 5}, "n_values is 5"),
        ({"n_obs": 699}, "n_obs=699, but obs has 700 rows"),
        ({"obs": ["a"]}, "obs of Rows is a list"),
        ({"var": None}, "var of Rows is a NoneType"),
    ],
)
def test_wrong_attributes(tmp_path, attributes, words):
    with pytest.raises(SourceError, match=words):
        zl.convert(Rows(**attributes), tmp_path / "own.zarr", progress=False)
