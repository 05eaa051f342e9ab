"""Statistics of genes equal NumPy's over all rows, in one pass that is safe for large means."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from helpers import counts, dense, write_store
from hypothesis import given
from hypothesis import strategies as st

import zloader as zl
from zloader.common.errors import OptionError, ZloaderError
from zloader.common.records import CsrArrays
from zloader.transforms import Clip, Downsample, GeneStatistics, LogNormalize, Normalize, Scale
from zloader.transforms.statistics import Moments, statistics_of

ADATA = counts(250, 30)
ADATA.layers["dense"] = ADATA.X.toarray()
ADATA.layers["large"] = sp.csr_matrix(ADATA.X.astype(np.float64) * 1e6 + (ADATA.X > 0) * 1e12)
ADATA.raw = counts(250, 40, seed=3)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("statistics")
    write_store(ADATA, folder / "store.zarr", folder)
    return str(folder / "store.zarr")


def check(found: GeneStatistics, x: np.ndarray, rtol: float = 1e-12) -> None:
    assert found.n_obs == len(x)
    np.testing.assert_array_equal(found.nonzero, np.count_nonzero(x, axis=0))
    np.testing.assert_allclose(found.mean, x.mean(axis=0), rtol=rtol)
    np.testing.assert_allclose(found.variance, x.var(axis=0, ddof=1), rtol=rtol)
    np.testing.assert_array_equal(found.std, np.sqrt(found.variance))


@pytest.mark.parametrize("x", ["X", "layers/dense", "layers/large", "raw/X"])
def test_it_equals_numpy(store, x):
    matrix = {"X": ADATA.X, "raw/X": ADATA.raw.X}.get(x)
    matrix = dense(ADATA.layers[x.removeprefix("layers/")] if matrix is None else matrix).astype(np.float64)
    dataset = zl.open_dataset(store)
    found = dataset.gene_statistics(x)
    check(found, matrix)
    assert found.genes.tolist() == [f"gene {gene}" for gene in range(matrix.shape[1])]
    rows = np.arange(3, 240, 5)
    check(dataset[rows].gene_statistics(x), matrix[rows])
    chosen = dataset[:, {x: ["gene 7", "gene 2"]}].gene_statistics(x)
    assert chosen.genes.tolist() == ["gene 7", "gene 2"]
    check(chosen, matrix[:, [7, 2]])


def test_transforms_come_first(store):
    dataset = zl.open_dataset(store)
    x = dense(ADATA.X).astype(np.float64)
    scaled = x / np.maximum(x.sum(axis=1, keepdims=True), 1) * 1e4
    check(dataset.gene_statistics(transforms=[Normalize(1e4)]), scaled, rtol=1e-6)
    log = dataset[:, [4, 1]].gene_statistics(transforms=[LogNormalize(1e4)])
    check(log, np.log1p(scaled)[:, [4, 1]], rtol=1e-6)
    drawn = dataset.gene_statistics(transforms=[Downsample(50)])
    rows = [dense(minibatch.x) for minibatch in zl.Loader(dataset, transforms=[Downsample(50)], shuffle=False)]
    check(drawn, np.concatenate(rows).astype(np.float64))
    with pytest.raises(OptionError, match="only layout='dense' can hold"):
        dataset.gene_statistics(transforms=[Scale(drawn)])
    with pytest.raises(OptionError, match="must be a list of objects"):
        dataset.gene_statistics(transforms=["LogNormalise"])
    with pytest.raises(ZloaderError, match="Did you mean 'layers/dense'"):
        dataset.gene_statistics("dense")


def test_the_cache_keeps_them(store, tmp_path, monkeypatch):
    dataset = zl.open_dataset(store, cache=tmp_path)
    log = [LogNormalize(1e4)]
    calls = {
        "all": lambda of: of.gene_statistics(),
        "log": lambda of: of.gene_statistics(transforms=log),
        "log of another": lambda of: of.gene_statistics(transforms=[LogNormalize(1e3)]),
        "scaled": lambda of: of.gene_statistics(transforms=[*log, Scale(std=np.arange(30.0))]),
        "scaled by others": lambda of: of.gene_statistics(transforms=[*log, Scale(std=np.full(30, 2))]),
        "clipped": lambda of: of.gene_statistics(transforms=[Clip(-1, 12)]),
        "clipped, with the same digits": lambda of: of.gene_statistics(transforms=[Clip(-11, 2)]),
        "layer": lambda of: of.gene_statistics("layers/large"),
        "view": lambda of: of[:100].gene_statistics(),
        "another view": lambda of: of[100:200].gene_statistics(),
    }
    first = {name: call(dataset) for name, call in calls.items()}
    assert len({found.mean.tobytes() for found in first.values()}) == len(calls)
    monkeypatch.setattr("zloader.dataset.gene_statistics.Moments", None)  # nothing may be summed up again
    again = zl.open_dataset(store, cache=tmp_path, offline=True)
    for name, call in calls.items():
        found = call(again)
        for field in ("mean", "variance", "nonzero"):
            np.testing.assert_array_equal(getattr(found, field), getattr(first[name], field), err_msg=name)
        assert (found.n_obs, found.genes.tolist()) == (first[name].n_obs, first[name].genes.tolist())
    chosen = again[:, [3]].gene_statistics()
    assert chosen.mean.tolist() == first["all"].mean[[3]].tolist()


def test_the_result_does_not_depend_on_threads_or_memory(store):
    dataset = zl.open_dataset(store)
    wanted = dataset.gene_statistics("layers/large")
    for options in (zl.FetchOptions(threads=1), zl.FetchOptions(threads=3, memory="16MiB")):
        found = dataset.gene_statistics("layers/large", options=options)
        assert found.variance.tobytes() == wanted.variance.tobytes()


def test_of_several_stores(store, tmp_path):
    other = counts(60, 30, seed=9)[:, 10:]
    write_store(other, tmp_path / "other.zarr", tmp_path)
    joined = zl.open_dataset([store, tmp_path / "other.zarr"], join="outer")
    both = ad.concat([ad.AnnData(ADATA.X, var=ADATA.var), other], join="outer", index_unique="-")[:, joined.var_names]
    check(joined.gene_statistics(), dense(both.X).astype(np.float64))


def moments(x: np.ndarray) -> Moments:
    csr = sp.csr_matrix(x)
    return Moments(CsrArrays(indptr=csr.indptr, indices=csr.indices, values=csr.data, n_genes=x.shape[1]))


@given(
    st.lists(st.sampled_from([0.0, 1.0, -2.5, 3e8, 1e-8]), min_size=4, max_size=24),
    st.lists(st.integers(0, 12), max_size=3),
)
def test_parts_merge_into_the_whole(numbers, cuts):
    x = np.array(numbers[: len(numbers) // 2 * 2]).reshape(-1, 2)
    merged = moments(np.zeros((0, 2)))
    for part in np.split(x, sorted(min(cut, len(x)) for cut in cuts)):
        merged.merge(moments(part))
    found = statistics_of(merged.numbers(), pd.Index(["a", "b"]), merged.n_obs)
    np.testing.assert_allclose(found.mean, x.mean(axis=0), rtol=1e-12, atol=1e-7)
    np.testing.assert_allclose(found.variance, x.var(axis=0, ddof=1), rtol=1e-9, atol=1e-30)


def test_large_means_lose_no_digits():
    """The sum of squares minus the square of the sum would have no correct digit here."""
    rng = np.random.default_rng(0)
    x = 1e9 + rng.integers(0, 3, (4000, 1)).astype(np.float64)
    merged = moments(np.zeros((0, 1)))
    for part in np.split(x, 40):
        for _ in range(25):  # as if of 100 000 rows
            merged.merge(moments(part))
    found = statistics_of(merged.numbers(), pd.Index(["a"]), merged.n_obs)
    whole = np.repeat(x, 25)
    np.testing.assert_allclose(found.variance, (whole - 1e9).var(ddof=1), rtol=1e-6)
    np.testing.assert_allclose(found.mean - 1e9, (whole - 1e9).mean(), rtol=1e-6)


def test_a_hundred_million_rows():
    """Merged moments of 2**27 rows have the variance of the part that they repeat."""
    x = np.array([[0.0], [1.0], [1001.0], [1002.0]])
    merged = moments(x)
    for _ in range(25):
        twin = moments(np.zeros((0, 1)))
        twin.merge(merged)
        merged.merge(twin)
    found = statistics_of(merged.numbers(), pd.Index(["a"]), merged.n_obs)
    assert (found.n_obs, found.nonzero.tolist()) == (2**27, [3 * 2**25])
    np.testing.assert_allclose(found.mean, x.mean(axis=0), rtol=1e-14)
    np.testing.assert_allclose(found.variance, x.var(axis=0) * 2**27 / (2**27 - 1), rtol=1e-13)


def test_one_row_has_no_variance(store):
    found = zl.open_dataset(store)[7:8].gene_statistics()
    np.testing.assert_array_equal(found.mean, dense(ADATA.X)[7])
    assert np.isnan(found.variance).all()
    with pytest.raises(OptionError, match="std is nan for gene 0: give a finite number"):
        zl.Loader(zl.open_dataset(store), transforms=[Scale(std=found)])


def test_repeated_names_cannot_be_matched(store):
    names = pd.Index(["a", "b", "a"])
    numbers = np.arange(3.0)
    statistics = GeneStatistics(genes=names, mean=numbers, variance=numbers, nonzero=numbers.astype(int), n_obs=9)
    assert statistics.of(names, "X") is statistics
    assert statistics.of(pd.Index(["b"]), "X").mean.tolist() == [1.0]
    with pytest.raises(OptionError, match=r"lack, or have more than once, 1 of \d genes of X: a"):
        statistics.of(pd.Index(["b", "a"]), "X")
