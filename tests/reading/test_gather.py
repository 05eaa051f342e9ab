"""The compiled gathers against SciPy and NumPy."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from zloader.common.records import MinibatchArrays
from zloader.reading import gather

# Stored dtypes of genes and values, and the wanted dtype. Not all triples are tested, because each is compiled.
CSR_DTYPES = [
    ("uint8", "uint8", "float32"),
    ("uint16", "uint8", "float32"),
    ("uint16", "uint16", "int64"),
    ("uint32", "uint32", "int64"),
    ("int32", "int32", "float64"),
    ("int64", "int64", "int64"),
    ("int32", "float32", "float32"),
    ("int64", "float64", "float64"),
    ("uint16", "bool", "float32"),
]
DENSE_DTYPES = [
    ("uint8", "float32"),
    ("uint16", "int32"),
    ("uint32", "int64"),
    ("int32", "float64"),
    ("int64", "int64"),
    ("float32", "float32"),
    ("float64", "float32"),
    ("float64", "float64"),
    ("bool", "float32"),
]
N_GENES = 12


def _numbers(dtype):
    """Numbers of a stored dtype, often zero, that every wanted dtype above can hold, if rounded."""
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return st.booleans()
    if kind.kind == "f":
        width = 8 * kind.itemsize
        special = st.sampled_from([0.0, -0.0, 1.0, np.nan, np.inf, -np.inf, 1e-30])
        return special | st.floats(width=width, min_value=-(2.0**100), max_value=2.0**100)
    limits = np.iinfo(dtype)
    return st.just(0) | st.integers(int(limits.min), int(limits.max))


@st.composite
def csr_rows(draw, genes, values):
    """A canonical CSR matrix, some of whose rows are empty, and rows to take from it, some repeated."""
    n_rows = draw(st.integers(1, 8))
    rows = [sorted(draw(st.sets(st.integers(0, N_GENES - 1), max_size=draw(st.sampled_from([0, N_GENES])))))]
    rows += [sorted(draw(st.sets(st.integers(0, N_GENES - 1)))) for _ in range(n_rows - 1)]
    indptr = np.cumsum([0, *map(len, rows)])
    stored = draw(hnp.arrays(values, int(indptr[-1]), elements=_numbers(values)))
    taken = draw(st.lists(st.integers(0, n_rows - 1), max_size=10))
    columns = np.array([gene for row in rows for gene in row], genes)
    return columns, stored, indptr, np.array(taken, np.int64)


def _scattered(elements, starts, lengths, before):
    """The same rows of elements, read-only, with a gap of `before` elements in front of each row."""
    room = np.full(len(elements) + before * (len(starts) + 1), 99, elements.dtype)
    moved = starts + before * np.arange(1, len(starts) + 1)
    for start, to, n in zip(starts, moved, lengths, strict=True):
        room[to : to + n] = elements[start : start + n]
    room.flags.writeable = False
    return room, moved


def sparse(genes, values, starts, lengths, at=slice(None)):
    return gather.SourceRows(at=at, genes=genes, values=values, starts=starts, lengths=lengths)


def dense(values, starts, n_genes, at=slice(None)):
    lengths = np.full(len(starts), n_genes)
    return gather.SourceRows(at=at, genes=None, values=values, starts=(starts, starts), lengths=lengths)


def _same(found, wanted):
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    np.testing.assert_array_equal(found, wanted)  # NaN equals NaN


def _check_csr(found, wanted, dtype):
    """Compares with a SciPy matrix that stores the same values."""
    assert found.n_genes == wanted.shape[1]
    assert found.indptr.dtype == found.indices.dtype == np.int32
    _same(found.indptr, wanted.indptr.astype(np.int32))
    _same(found.indices, wanted.indices.astype(np.int32))
    _same(found.values, wanted.data.astype(dtype))
    for array in (found.indptr, found.indices, found.values):
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert array.flags.owndata


@pytest.mark.every(9)
@pytest.mark.parametrize(("genes", "values", "dtype"), CSR_DTYPES)
@given(draw=st.data())
def test_csr_from_csr(genes, values, dtype, draw):
    columns, stored, indptr, taken = draw.draw(csr_rows(genes, values))
    lengths = np.diff(indptr)
    in_genes, gene_starts = _scattered(columns, indptr[:-1], lengths, draw.draw(st.integers(0, 3)))
    in_values, value_starts = _scattered(stored, indptr[:-1], lengths, draw.draw(st.integers(0, 3)))
    starts = (gene_starts[taken], value_starts[taken])
    rows = sparse(in_genes, in_values, starts, lengths[taken])
    found = gather.csr_rows([rows], len(taken), n_genes=N_GENES, dtype=dtype)
    wanted = scipy.sparse.csr_matrix((stored, columns.astype(np.int64), indptr), shape=(len(lengths), N_GENES))[taken]
    _check_csr(found, wanted, dtype)
    for row in range(len(taken)):  # canonical: strictly ascending
        assert (np.diff(found.indices[found.indptr[row] : found.indptr[row + 1]]) > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize(("genes", "values", "dtype"), CSR_DTYPES)
@given(draw=st.data())
def test_dense_from_csr(genes, values, dtype, draw):
    columns, stored, indptr, taken = draw.draw(csr_rows(genes, values))
    lengths = np.diff(indptr)
    in_genes, gene_starts = _scattered(columns, indptr[:-1], lengths, draw.draw(st.integers(0, 3)))
    in_values, value_starts = _scattered(stored, indptr[:-1], lengths, draw.draw(st.integers(0, 3)))
    starts = (gene_starts[taken], value_starts[taken])
    rows = sparse(in_genes, in_values, starts, lengths[taken])
    found = gather.dense_rows([rows], len(taken), n_genes=N_GENES, dtype=dtype)
    wanted = np.zeros((len(lengths), N_GENES), dtype)
    for row in range(len(lengths)):
        at = slice(indptr[row], indptr[row + 1])
        wanted[row, columns[at]] = stored[at].astype(dtype)
    _same(found, wanted[taken])


@given(
    genes=st.lists(st.integers(0, 4), max_size=30),
    draw=st.data(),
)
def test_dense_from_csr_sums_a_gene_that_stands_twice(genes, draw):
    stored = draw.draw(hnp.arrays("int32", len(genes), elements=st.integers(-1000, 1000)))
    first = np.zeros(1, np.int64)
    rows = sparse(np.array(genes, np.int32), stored, (first, first), np.array([len(genes)]))
    found = gather.dense_rows([rows], 1, n_genes=5, dtype="int64")
    _same(found, np.bincount(np.array(genes, np.int64), stored, minlength=5)[None].astype(np.int64))


@st.composite
def dense_rows(draw, values):
    """A dense matrix with many zeros, flattened behind a few other elements, and rows to take from it."""
    n_rows, n_genes, before = draw(st.integers(1, 8)), draw(st.integers(1, 6)), draw(st.integers(0, 3))
    matrix = draw(hnp.arrays(values, (n_rows, n_genes), elements=_numbers(values), fill=st.just(0)))
    flat = np.concatenate([np.ones(before, values), matrix.ravel()])
    flat.flags.writeable = False
    taken = np.array(draw(st.lists(st.integers(0, n_rows - 1), max_size=10)), np.int64)
    return matrix, flat, before + taken * n_genes, taken


@pytest.mark.every(3)
@pytest.mark.parametrize(("values", "dtype"), DENSE_DTYPES)
@given(draw=st.data())
def test_dense_from_dense(values, dtype, draw):
    matrix, flat, starts, taken = draw.draw(dense_rows(values))
    n_genes = matrix.shape[1]
    found = gather.dense_rows([dense(flat, starts, n_genes)], len(taken), n_genes=n_genes, dtype=dtype)
    _same(found, matrix[taken].astype(dtype))
    assert found.flags.writeable


@pytest.mark.slow
@pytest.mark.parametrize(("values", "dtype"), DENSE_DTYPES)
@given(draw=st.data())
def test_csr_from_dense(values, dtype, draw):
    matrix, flat, starts, taken = draw.draw(dense_rows(values))
    n_genes = matrix.shape[1]
    found = gather.csr_rows([dense(flat, starts, n_genes)], len(taken), n_genes=n_genes, dtype=dtype)
    _check_csr(found, scipy.sparse.csr_matrix(matrix[taken]), dtype)


@given(draw=st.data(), n_rows=st.integers(0, 12))
def test_rows_of_several_stores_in_one_minibatch(draw, n_rows):
    """CSR and dense stores of different dtypes each hold some of the rows, or none, in any order."""
    kinds = [("uint8", "uint8"), ("int32", "float32"), (None, "uint8"), (None, "float64")]
    wanted = draw.draw(hnp.arrays("uint8", (n_rows, N_GENES), elements=st.just(0) | st.integers(0, 255)))
    of = draw.draw(hnp.arrays("int8", n_rows, elements=st.integers(0, len(kinds) - 1)))
    parts = []
    for number, (genes, values) in enumerate(kinds):
        at = np.array(draw.draw(st.permutations(np.flatnonzero(of == number).tolist())), np.int64)
        if genes is None:
            parts.append(dense(wanted[at].ravel().astype(values), np.arange(len(at)) * N_GENES, N_GENES, at))
        else:
            csr = scipy.sparse.csr_matrix(wanted[at])
            starts = csr.indptr[:-1].astype(np.int64)
            lengths = np.diff(csr.indptr).astype(np.int64)
            parts.append(sparse(csr.indices.astype(genes), csr.data.astype(values), (starts, starts), lengths, at))
    _check_csr(gather.csr_rows(parts, n_rows, n_genes=N_GENES, dtype="float32"), scipy.sparse.csr_matrix(wanted), "f4")
    _same(gather.dense_rows(parts, n_rows, n_genes=N_GENES, dtype="float32"), wanted.astype("float32"))


@given(draw=st.data(), cuts=st.lists(st.integers(0, 9), min_size=2, max_size=6))
def test_a_minibatch_is_cut_into_parts_that_share_its_memory(draw, cuts):
    wanted = draw.draw(hnp.arrays("uint8", (9, N_GENES), elements=st.just(0) | st.integers(0, 255)))
    rows = [dense(wanted.ravel(), np.arange(9) * N_GENES, N_GENES)]
    index = np.arange(100, 109)
    for gathered in (gather.csr_rows, gather.dense_rows):
        x = gathered(rows, 9, n_genes=N_GENES, dtype="float32")
        obsm = {"X_pca": np.stack([index, -index], 1)}
        whole = MinibatchArrays(x={"X": x}, obs={"lane": index * 2}, obsm=obsm, index=index)
        for first, last in pairwise(sorted(cuts)):
            part = gather.cut(whole, first, last)
            assert part.index.tolist() == index[first:last].tolist()
            assert part.obs["lane"].tolist() == (index[first:last] * 2).tolist()
            if isinstance(x, np.ndarray):
                _same(part.x["X"], wanted[first:last].astype("float32"))
                continue
            csr = scipy.sparse.csr_matrix(wanted[first:last])
            found_x = part.x["X"]
            assert found_x.n_genes == N_GENES
            for found, expected in (
                (found_x.indptr, csr.indptr),
                (found_x.indices, csr.indices),
                (found_x.values, csr.data),
            ):
                np.testing.assert_array_equal(found, expected)
                assert found.flags.writeable
            assert found_x.values.size == 0 or np.shares_memory(found_x.values, x.values)


# ------------------------------------------------------------------------------------------------ odd values and rows


def test_signed_zeros_and_nan_survive():
    flat = np.array([np.nan, -0.0, 0.0, np.inf], np.float32)
    rows = [dense(flat, np.array([0]), 4)]
    assert gather.dense_rows(rows, 1, n_genes=4, dtype="float32").tobytes() == flat.tobytes()
    csr = gather.csr_rows(rows, 1, n_genes=4, dtype="float32")
    assert csr.indices.tolist() == [0, 3]  # -0.0 counts as zero, and NaN is a value


def test_no_rows():
    nothing, none = np.empty(0, np.int64), np.empty(0, np.uint16)
    for parts in ([], [sparse(none, none, (nothing, nothing), nothing)]):
        csr = gather.csr_rows(parts, 0, n_genes=7, dtype="float32")
        assert (csr.indptr.tolist(), len(csr.indices), len(csr.values), csr.n_genes) == ([0], 0, 0, 7)
        assert gather.dense_rows(parts, 0, n_genes=7, dtype="float32").shape == (0, 7)


def test_nothing_but_empty_rows():
    """Empty rows may start anywhere, even beyond the loaded elements."""
    starts, none = np.array([0, 50, 2**40]), np.empty(0, np.uint16)
    rows = [sparse(none, none, (starts, starts), np.zeros(3, np.int64))]
    csr = gather.csr_rows(rows, 3, n_genes=7, dtype="float32")
    assert (csr.indptr.tolist(), len(csr.indices)) == ([0, 0, 0, 0], 0)
    _same(gather.dense_rows(rows, 3, n_genes=7, dtype="int64"), np.zeros((3, 7), np.int64))


def test_the_gathers_read_a_file_in_memory(tmp_path):
    """The file is mapped read-only, as a mirror's files are, and the rows are far apart."""
    file = tmp_path / "x.flat"
    np.arange(100_000, dtype=np.uint16).tofile(file)
    mapped = np.memmap(file, np.uint16, mode="r")
    starts, lengths = np.array([99_990, 0, 50_000]), np.array([10, 3, 0])
    rows = sparse(mapped, mapped, (starts, starts), lengths)
    csr = gather.csr_rows([rows], 3, n_genes=2**16, dtype="float32")
    assert csr.values.tolist() == [*(value % 2**16 for value in range(99_990, 100_000)), 0, 1, 2]
