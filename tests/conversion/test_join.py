"""Joined matrices of several sources: values, order, dtypes and windows, compared with anndata.concat and NumPy."""

from __future__ import annotations

import itertools
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from sources import LAYOUTS, counts, dense

from zloader.common.errors import SourceError
from zloader.conversion.sources.anndata_input import open_matrix
from zloader.conversion.sources.nodes import Node
from zloader.conversion.sources.windows import JoinedMatrix

pytestmark = pytest.mark.any_version

DTYPES = ("bool", "int8", "uint8", "int32", "uint64", "float32", "float64")


def opened(x, window_bytes=4096):
    return open_matrix(Node(x, "memory", "X"), "X", shape=x.shape, window_bytes=window_bytes)


def joined(parts, n_genes, window_bytes=4096):
    """`parts` are matrices of any layout, each with its gene map or None."""
    return JoinedMatrix("X", [(opened(x, window_bytes), genes) for x, genes in parts], n_genes=n_genes)


def csr_of(windows, n_genes):
    """The rows of windows, as concatenated CSR arrays."""
    windows = list(windows)
    lengths = np.concatenate([window.lengths for window in windows])
    genes = np.concatenate([window.genes for window in windows])
    values = np.concatenate([window.values for window in windows])
    return sp.csr_matrix((values, genes, np.concatenate([[0], np.cumsum(lengths)])), shape=(len(lengths), n_genes))


def rows_of(matrix, windows):
    """The rows of windows as a dense matrix. Checks that each window is well formed."""
    blocks = [np.empty((0, matrix.n_genes), matrix.dtype)]
    for window in windows:
        assert window.positions is None
        assert window.values.dtype == matrix.dtype
        if matrix.encoding == "dense":
            assert (window.lengths == matrix.n_genes).all()
            blocks.append(window.values.reshape(len(window.lengths), matrix.n_genes))
            continue
        assert window.genes.dtype == matrix.genes_dtype
        indptr = np.concatenate([[0], np.cumsum(window.lengths)])
        assert len(window.genes) == len(window.values) == indptr[-1]
        block = np.zeros((len(window.lengths), matrix.n_genes), matrix.dtype)
        for row, (start, stop) in enumerate(itertools.pairwise(indptr)):
            assert (np.diff(window.genes[start:stop]) > 0).all()
            block[row, window.genes[start:stop]] = window.values[start:stop]
        blocks.append(block)
    return np.concatenate(blocks)


def mapped(x, genes, n_genes):
    """The slow reference implementation."""
    x = dense(x)
    if genes is None:
        return x
    out = np.zeros((len(x), n_genes), x.dtype)
    for gene, new in enumerate(genes):
        if new >= 0:
            out[:, new] = x[:, gene]
    return out


def assert_joined(parts, n_genes):
    wanted = np.concatenate([mapped(x, genes, n_genes) for x, genes in parts])
    with joined(parts, n_genes) as matrix:
        for first_row in {0, 1, len(wanted) // 2, max(0, len(wanted) - 1), len(wanted)}:
            np.testing.assert_array_equal(rows_of(matrix, matrix.windows(first_row)), wanted[first_row:])
        assert (matrix.n_rows, matrix.dtype) == (len(wanted), wanted.dtype)


@st.composite
def gene_maps(draw, n_source: int, n_genes: int):
    """None, or distinct new numbers for some genes, ascending or not."""
    most = min(n_source, n_genes)
    kept = draw(st.one_of(st.just(most), st.integers(0, most)))
    if n_source == n_genes and draw(st.booleans()):
        return None
    numbers = draw(st.permutations(range(n_genes)))[:kept]
    if draw(st.booleans()):
        numbers = sorted(numbers)
    places = sorted(draw(st.permutations(range(n_source)))[:kept])
    genes = np.full(n_source, -1, np.int64)
    genes[places] = numbers
    return genes


@st.composite
def all_parts(draw):
    n_genes = draw(st.sampled_from([1, 5, 63, 64, 65, 130]))
    parts = []
    for seed in range(draw(st.integers(1, 3))):
        n_source = draw(st.one_of(st.just(n_genes), st.integers(1, 140)))
        x = counts(draw(st.integers(1, 12)), n_source, seed, draw(st.sampled_from(DTYPES)))
        layout = draw(st.sampled_from(sorted(LAYOUTS)))
        parts.append((LAYOUTS[layout](x), draw(gene_maps(n_source, n_genes))))
    return parts, n_genes


@pytest.mark.slow
@given(all_parts())
def test_rows_come_one_part_after_the_other_with_their_genes_renumbered(case):
    assert_joined(*case)


@pytest.mark.parametrize("genes", [[-1, 0, 1, 2], [0, 1, -1, 2], [-1, 2, -1, 0], [0, 1, 2, -1]], ids=str)
def test_dropped_genes_beside_ascending_ones(genes):
    """Genes that keep their order take a shorter way, on which none may be dropped."""
    x = sp.csr_matrix(np.arange(1, 21, dtype=np.float32).reshape(5, 4))
    for layout in LAYOUTS.values():
        assert_joined([(layout(x), np.array(genes))], 3)


def test_more_rows_and_genes_than_a_window_holds():
    rng = np.random.default_rng(0)
    drops = rng.permutation(np.concatenate([np.full(100, -1), np.arange(200)]))
    ascending = np.full(300, -1)
    ascending[::2] = np.arange(150) + 7
    parts = [(counts(50, 300, 1), drops), (counts(70, 200, 2).tocsc(), None), (counts(40, 300, 3), ascending)]
    assert_joined(parts, 200)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gene_no_part_has_and_a_part_without_any_gene_of_the_result(layout):
    x = LAYOUTS[layout](counts(6, 9))
    nowhere = np.full(9, -1)
    assert_joined([(x, nowhere), (x, np.arange(9) + 3)], 14)
    assert_joined([(x, nowhere)], 5)


class Compressed(dict[str, np.ndarray]):
    """A CSR or CSC matrix in float16, stored in a file."""

    def __init__(self, x):
        super().__init__(indptr=x.indptr, indices=x.indices, data=x.data.astype(np.float16))
        self.shape, self.attrs = x.shape, {"encoding-type": f"{x.format}_matrix"}


@pytest.mark.every(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_float16_moves_too(layout):
    # anndata and scipy cannot create a float16 CSR or CSC matrix, but a file can contain one.
    x = LAYOUTS[layout](counts(6, 9))
    half = x.astype(np.float16) if layout == "dense" else Compressed(x)
    genes = np.array([8, -1, 7, 6, 5, 4, 3, 2, 1])
    with joined([(half, genes)], 9) as matrix:
        assert matrix.dtype == np.float16
        np.testing.assert_array_equal(rows_of(matrix, matrix.windows()), mapped(x, genes, 9))


@pytest.mark.every(4)
@pytest.mark.parametrize("other", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_dtype_and_kind_are_those_of_anndata_concat(layout, other, dtype):
    def adata(x, first):
        return ad.AnnData(
            x, pd.DataFrame(index=[f"{first}-{i}" for i in range(5)]), pd.DataFrame(index=list("abcdefg"))
        )

    for mixed in DTYPES:
        a, b = LAYOUTS[layout](counts(5, 7, 0, dtype)), LAYOUTS[other](counts(5, 7, 1, mixed))
        wanted = ad.concat([adata(a, 0), adata(b, 1)]).X
        matrix = joined([(a, None), (b, None)], 7)
        assert matrix.dtype == wanted.dtype
        assert matrix.encoding == ("csr" if sp.issparse(wanted) else "dense")


def test_dense_rows_among_sparse_ones_keep_nan_and_lose_both_zeros():
    x = np.array([[0.0, -0.0, np.nan, np.inf], [1.0, -0.0, -1.0, 0.0]])
    other = sp.csr_matrix(np.eye(4))
    out = csr_of(joined([(x, None), (other, None)], 4).windows(), 4)
    wanted = sp.vstack([sp.csr_matrix(x), other], format="csr")
    for part in ("data", "indices", "indptr"):
        np.testing.assert_array_equal(getattr(out, part), getattr(wanted, part))
    assert out.nnz == 4 + 4


def test_zeros_that_a_sparse_source_stores_stay():
    x = sp.csr_matrix((np.array([0.0, 2.0, np.nan]), np.array([0, 2, 3]), np.array([0, 2, 3])), shape=(2, 4))
    out = csr_of(joined([(x, np.array([3, 2, 1, 0]))], 4).windows(), 4)
    assert out.nnz == 3
    np.testing.assert_array_equal(out.toarray(), x.toarray()[:, ::-1])


def test_rows_mended_are_counted_but_not_those_put_in_order_for_their_new_numbers():
    genes = np.array([1, 0, 2, 2, 0, 1])
    x = sp.csr_matrix((np.ones(6), genes, np.array([0, 2, 4, 6])), shape=(3, 3))
    matrix = joined([(x, np.array([2, 1, 0])), (counts(4, 3), None)], 3)
    assert sum(window.mended for window in matrix.windows()) == 2
    assert sum(window.mended for window in matrix.first_pass()) == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_from_a_row_open_no_source_before_it(layout):
    class Unreadable(np.ndarray):
        def __getitem__(self, key):
            raise OSError("must not be read")

    unreadable = np.zeros((50, 9)).view(Unreadable)
    x = LAYOUTS[layout](counts(20, 9))
    with joined([(unreadable, None), (x, None), (x, None)], 9) as matrix:
        np.testing.assert_array_equal(rows_of(matrix, matrix.windows(65)), np.concatenate([dense(x)[15:], dense(x)]))
        with pytest.raises(SourceError, match="must not be read"):
            next(matrix.windows(49))


def test_what_the_parts_hold_is_freed():
    def open_files():
        return len(list(Path("/proc/self/fd").iterdir()))

    before = open_files()
    with joined([(counts(20, 9).tocsc(), None), (counts(20, 9).tocsc(), None)], 9) as matrix:
        list(matrix.first_pass())
        assert open_files() >= before + 2
    assert open_files() == before
