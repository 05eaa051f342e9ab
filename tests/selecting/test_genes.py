"""Choosing genes gives the same result as slicing with SciPy and anndata."""

from __future__ import annotations

import re

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from helpers import counts, dense, write_store
from hypothesis import given
from hypothesis import strategies as st

import zloader as zl
from zloader.common.errors import OptionError
from zloader.reading import gather
from zloader.selecting.genes import ChosenGenes, choose_genes

pytestmark = pytest.mark.any_version

N_ROWS, N_GENES = 150, 41
UNSORTED = [7, 40, 0, 39, 12, 3, 20]
ASCENDING = sorted(UNSORTED)


# ------------------------------------------------------------------------------------------------ kernels


@st.composite
def chosen_genes(draw, n_stored):
    """Some genes or all, in their order or another, among genes that the store does not have."""
    positions = draw(st.lists(st.integers(0, n_stored - 1), min_size=1, unique=True) | st.permutations(range(n_stored)))
    if draw(st.booleans()):
        positions.sort()
    for place in draw(st.lists(st.integers(0, len(positions)), max_size=3)):
        positions.insert(place, -1)
    return ChosenGenes(positions=np.array(positions), n_stored=n_stored)


def with_zeros(matrix):
    """The matrix with one more column of zeros, which position -1 selects."""
    if scipy.sparse.issparse(matrix):
        return scipy.sparse.hstack([matrix, scipy.sparse.csr_matrix((matrix.shape[0], 1), dtype=matrix.dtype)], "csr")
    return np.pad(matrix, ((0, 0), (0, 1)))


@st.composite
def sparse_rows(draw, n_genes, genes, values):
    """A random CSR matrix with stored zeros and empty rows, and rows to take from it, possibly repeated."""
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    n_rows, density = draw(st.integers(1, 8)), draw(st.sampled_from([0, 0.05, 0.5, 1]))
    stored = rng.random((n_rows, n_genes)) < density * rng.integers(0, 2, (n_rows, 1))
    csr = scipy.sparse.csr_matrix(stored)
    csr = scipy.sparse.csr_matrix((rng.integers(0, 4, csr.nnz).astype(values), csr.indices, csr.indptr), csr.shape)
    taken = np.array(draw(st.lists(st.integers(0, n_rows - 1), max_size=10)), np.int64)
    starts, lengths = csr.indptr[:-1].astype(np.int64)[taken], np.diff(csr.indptr).astype(np.int64)[taken]
    rows = gather.SourceRows(
        at=slice(None), genes=csr.indices.astype(genes), values=csr.data, starts=(starts, starts), lengths=lengths
    )
    return rows, csr[taken]


def check_csr(found, wanted):
    """Compares with a slice by SciPy, including stored zeros. Indices must ascend in each row."""
    wanted.sort_indices()
    np.testing.assert_array_equal(found.indptr, wanted.indptr)
    np.testing.assert_array_equal(found.indices, wanted.indices)
    np.testing.assert_array_equal(found.values, wanted.data)
    assert found.n_genes == wanted.shape[1]
    assert found.indices.dtype == np.int32


# Up to 255 columns and the value for "not chosen" fit into a byte.
@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("n_genes", "genes", "values", "dtype"),
    [
        (5, "uint16", "uint8", "float32"),
        (256, "int32", "int64", "int64"),
        (256, "uint8", "float32", "float64"),
        (300, "uint16", "uint8", "float32"),
    ],
)
@given(draw=st.data())
def test_from_csr(n_genes, genes, values, dtype, draw):
    rows, csr = draw.draw(sparse_rows(n_genes, genes, values))
    chosen = draw.draw(
        chosen_genes(n_genes) | st.just(ChosenGenes(positions=np.arange(n_genes)[::-1], n_stored=n_genes))
    )
    n_rows, wanted = csr.shape[0], with_zeros(csr)[:, chosen.positions].astype(dtype)
    part = gather.choose(rows, chosen)
    check_csr(gather.csr_rows([part], n_rows, n_genes=len(chosen), dtype=dtype), wanted)
    part = gather.choose(rows, chosen)
    found = gather.dense_rows([part], n_rows, n_genes=len(chosen), dtype=dtype)
    np.testing.assert_array_equal(found, wanted.toarray())
    assert found.dtype == dtype


@pytest.mark.parametrize("values", ["uint8", "float32"])
@given(draw=st.data())
def test_from_dense(values, draw):
    rng = np.random.default_rng(draw.draw(st.integers(0, 1000)))
    n_rows, n_genes = draw.draw(st.integers(1, 6)), draw.draw(st.integers(1, 9))
    matrix = rng.integers(0, 3, (n_rows, n_genes)).astype(values)
    taken = np.array(draw.draw(st.lists(st.integers(0, n_rows - 1), max_size=10)), np.int64)
    chosen = draw.draw(chosen_genes(n_genes))
    starts, lengths = taken * n_genes + 3, np.full(len(taken), n_genes)
    flat = np.concatenate([np.ones(3, values), matrix.ravel()])
    rows = gather.SourceRows(at=slice(None), genes=None, values=flat, starts=(starts, starts), lengths=lengths)
    part, wanted = gather.choose(rows, chosen), with_zeros(matrix[taken])[:, chosen.positions].astype("float32")
    check_csr(
        gather.csr_rows([part], len(taken), n_genes=len(chosen), dtype="float32"), scipy.sparse.csr_matrix(wanted)
    )
    np.testing.assert_array_equal(gather.dense_rows([part], len(taken), n_genes=len(chosen), dtype="float32"), wanted)


@pytest.mark.parametrize("n_chosen", [60_000, 66_000])  # column numbers of two bytes, and of more
def test_many_genes_in_another_order(n_chosen):
    rng = np.random.default_rng(0)
    csr = scipy.sparse.random(20, 70_000, 0.02, "csr", np.float32, random_state=rng)
    csr.sort_indices()
    starts, lengths = csr.indptr[:-1].astype(np.int64), np.diff(csr.indptr).astype(np.int64)
    rows = gather.SourceRows(
        at=slice(None), genes=csr.indices.astype("uint32"), values=csr.data, starts=(starts, starts), lengths=lengths
    )
    chosen = ChosenGenes(positions=rng.permutation(70_000)[:n_chosen], n_stored=70_000)
    assert chosen.column_of.dtype == (np.uint16 if n_chosen < 2**16 else np.uint32)
    found = gather.csr_rows([gather.choose(rows, chosen)], 20, n_genes=n_chosen, dtype="float32")
    check_csr(found, csr[:, chosen.positions])


def test_a_gene_that_stands_twice_in_a_row_stays_so_and_is_summed_when_dense():
    """As without `genes`. Stores from other writers may have such rows, even with more values than genes."""
    genes, values = np.array([1, 0, 1, 1, 2, 1], np.uint16), np.array([1, 2, 3, 4, 5, 6], np.uint8)
    starts, lengths = np.array([0, 2]), np.array([2, 4])
    rows = gather.SourceRows(at=slice(None), genes=genes, values=values, starts=(starts, starts), lengths=lengths)
    part = gather.choose(rows, ChosenGenes(positions=np.array([2, 1]), n_stored=3))
    csr = gather.csr_rows([part], 2, n_genes=2, dtype="float32")
    assert (csr.indptr.tolist(), csr.indices.tolist()) == ([0, 1, 5], [1, 0, 1, 1, 1])
    assert csr.values.tolist() == [1, 5, 3, 4, 6]
    assert gather.dense_rows([part], 2, n_genes=2, dtype="float32").tolist() == [[0, 1], [5, 13]]


# ------------------------------------------------------------------------------------------------ valid and invalid
# choices

NAMES = pd.Index(["A", "B", "C", "B", "D"])


def choose(genes):
    return choose_genes(genes, n_stored=5, names=lambda: NAMES, where="var of STORE")


@pytest.mark.parametrize(
    ("genes", "positions"),
    [
        (["D", "A"], [4, 0]),
        (np.array(["C", "A"]), [2, 0]),
        (pd.Index(["A"]), [0]),
        (pd.Categorical(["D", "C"]), [4, 2]),
        ([3, 1, 0], [3, 1, 0]),
        (range(5), [0, 1, 2, 3, 4]),
        (np.array([4, 2], np.uint8), [4, 2]),
        ([True, False, False, True, True], [0, 3, 4]),
        (pd.Series([False, True, False, False, False], index=NAMES), [1]),
        (pd.array([False, True, True, False, False], dtype="boolean"), [1, 2]),
    ],
)
def test_names_positions_and_masks(genes, positions):
    chosen = choose(genes)
    assert chosen.positions.tolist() == positions
    assert chosen.positions.dtype == np.int64
    assert chosen.ascending == (positions == sorted(positions))
    assert [chosen.column_of[position] for position in positions] == list(range(len(positions)))
    assert (np.delete(chosen.column_of, positions) == len(positions)).all()


@pytest.mark.parametrize(
    ("genes", "says"),
    [
        (["A", "X", "Y", "Z", "W"], "4 of 5 genes are not in var of STORE: 'X', 'Y', 'Z', .... Its genes have names "),
        (["A", "B"], "the gene 'B' occurs more than once in var of STORE: choose it by position"),
        (["A", "C", "A"], "genes lists 'A' more than once"),
        ([], "genes selects no gene: choose at least one"),
        ([True] * 4, "a mask over all 5 genes of var of STORE, not one of shape (4,)"),
        ([0, 5], "gene 5 does not exist: var of STORE has genes 0 to 4"),
        ("A", "genes must be a list, because it orders the columns of x: write [...], not 'A'"),
        ({"A", "C"}, "genes must be a list, because it orders"),
        (["A", 1], "genes must be a slice, a mask, a list of positions or of names, in one dimension, not ['A', 1]"),
        (pd.array([True, None, True, True, True], dtype="boolean"), "genes must be a slice, a mask"),
        (7, "genes must be a list"),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),
)
def test_what_chooses_nothing_sensible_is_refused(genes, says):
    with pytest.raises(OptionError, match=re.escape(says)):
        choose(genes)


# ------------------------------------------------------------------------------------------------ the loader


def with_everything(n_rows=N_ROWS, seed=3) -> ad.AnnData:
    """Counts with a layer and with more genes in raw. Genes 20 and 39 are zero in every row."""
    adata = counts(n_rows, N_GENES + 9, seed=seed)
    zero = np.ones(N_GENES + 9, np.float32)
    zero[[20, 39]] = 0
    adata.X = scipy.sparse.csr_matrix(adata.X.multiply(zero))
    adata.X.eliminate_zeros()
    adata.var["symbol"] = [f"s{gene}" for gene in range(adata.n_vars)]
    whole = adata.copy()
    adata = adata[:, :N_GENES].copy()
    adata.raw = whole
    adata.layers["doubled"] = adata.X * 2
    return adata


ADATA = with_everything()
WANTED = {"X": ADATA.X, "layers/doubled": ADATA.layers["doubled"], "raw/X": ADATA.raw.X}


@pytest.fixture(scope="module", params=["csr", "dense"])
def store(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    stored = ADATA.copy()
    if request.param == "dense":
        stored.X, stored.layers["doubled"] = stored.X.toarray(), stored.layers["doubled"].toarray()
    write_store(stored, folder / "counts.zarr", folder)
    return folder / "counts.zarr"


def check_epoch(loader, wanted, genes):
    """Checks that every row comes once, with the chosen genes of `wanted` in order and in canonical form."""
    seen = []
    for minibatch in loader:
        rows = minibatch.index.numpy()
        seen += rows.tolist()
        expected = wanted[rows][:, genes]
        np.testing.assert_array_equal(dense(minibatch.x), expected.toarray())
        if loader.layout == "csr":
            for row in range(len(rows)):
                begin, end = minibatch.x.crow_indices()[row : row + 2].tolist()
                assert (np.diff(minibatch.x.col_indices()[begin:end]) > 0).all()
            assert minibatch.x._nnz() == expected.nnz
    assert sorted(seen) == list(range(wanted.shape[0]))


SIZES = {"batch_size": 16, "fetch_factor": 3, "sampling": zl.BlockShuffling(4)}


@pytest.mark.every(5)
@pytest.mark.parametrize("genes", [ASCENDING, UNSORTED], ids=["ascending", "unsorted"])
@pytest.mark.parametrize("x", WANTED)
@pytest.mark.parametrize("layout", ["csr", "dense", "scipy"])
def test_layouts_matrices_and_orders(store, layout, x, genes):
    names = list(ADATA.var_names[genes])
    loader = zl.Loader(zl.open_dataset(store)[:, names], x=x, layout=layout, **SIZES)
    check_epoch(loader, WANTED[x], genes)


@pytest.mark.every(6)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("layout", ["csr", "dense"])
def test_dtypes_mirror_and_ranks(store, tmp_path, layout, dtype):
    dataset = zl.open_dataset(store, cache=tmp_path / "cache")
    mask = np.isin(np.arange(N_GENES), ASCENDING)
    for _ in range(2):
        loader = zl.Loader(dataset[:, mask], layout=layout, dtype=dtype, **SIZES)
        check_epoch(loader, ADATA.X, ASCENDING)
        assert str(next(iter(loader)).x.dtype) == f"torch.{dtype}"
    ranks = [zl.Loader(dataset[:, UNSORTED], **SIZES, rank=rank, world_size=2) for rank in range(2)]
    rows = []
    for loader in ranks:
        for minibatch in loader:
            rows += minibatch.index.tolist()
            np.testing.assert_array_equal(dense(minibatch.x), ADATA.X[minibatch.index.numpy()][:, UNSORTED].toarray())
    assert sorted(rows) == list(range(N_ROWS))


def test_raw_has_genes_of_its_own(store):
    """Genes 41 to 49 exist only in raw/var, and a mask must have its length."""
    dataset = zl.open_dataset(store)
    check_epoch(zl.Loader(dataset[:, {"raw/X": ["gene 49", "gene 2"]}], x="raw/X", **SIZES), ADATA.raw.X, [49, 2])
    of_mask = dataset[:, {"raw/X": np.arange(50) > 44}]
    check_epoch(zl.Loader(of_mask, x="raw/X", **SIZES), ADATA.raw.X, [45, 46, 47, 48, 49])
    check_epoch(zl.Loader(of_mask[:, {"X": [4]}], x="X", **SIZES), ADATA.X, [4])
    check_epoch(zl.Loader(of_mask[:, {"layers/doubled": [4]}], x="raw/X", **SIZES), ADATA.raw.X, [45, 46, 47, 48, 49])
    check_epoch(zl.Loader(dataset, x="raw/X", layout="scipy", **SIZES), ADATA.raw.X, list(range(50)))
    with pytest.raises(OptionError, match="'gene 49'"):
        dataset[:, ["gene 49"]]
    with pytest.raises(OptionError, match=r"a mask over all 50 genes of raw/var of .*, not one of shape \(41,\)"):
        dataset[:, {"raw/X": np.ones(41, bool)}]
    with pytest.raises(OptionError, match="two choices for var, whose genes X and its layers share"):
        dataset[:, {"X": [1], "layers/doubled": [2]}]
    with pytest.raises(OptionError, match="a choice for 'rna:X', but the matrices are"):
        dataset[:, {"rna:X": [1]}]


@pytest.mark.parametrize("layout", ["csr", "dense", "scipy"])
def test_genes_that_no_row_has(store, layout):
    check_epoch(zl.Loader(zl.open_dataset(store)[:, [39, 20]], layout=layout, **SIZES), ADATA.X, [39, 20])


def test_all_genes_chosen_are_all_genes(store):
    dataset = zl.open_dataset(store)
    for plain, chosen in zip(zl.Loader(dataset, **SIZES), zl.Loader(dataset[:, range(41)], **SIZES), strict=True):
        assert plain.index.tolist() == chosen.index.tolist()
        for part in ("crow_indices", "col_indices", "values"):
            assert getattr(plain.x, part)().tolist() == getattr(chosen.x, part)().tolist()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["csr", "dense", "scipy"])
def test_several_stores(tmp_path, layout):
    """One minibatch combines CSR and dense stores of different dtypes."""
    adatas = [with_everything(60, seed) for seed in (0, 1, 2)]
    stored = [adata.copy() for adata in adatas]
    stored[1].X = stored[1].X.toarray()
    stored[2].X.data += 0.5
    adatas[2].X = stored[2].X
    urls = [tmp_path / f"{number}.zarr" for number in range(3)]
    for adata, url in zip(stored, urls, strict=True):
        del adata.raw
        write_store(adata, url, tmp_path)
    dataset = zl.open_dataset(urls, cache=tmp_path / "cache")
    wanted = scipy.sparse.vstack([adata.X for adata in adatas], "csr")
    for genes in (ASCENDING, UNSORTED):
        check_epoch(zl.Loader(dataset[:, genes], layout=layout, **SIZES), wanted, genes)
