"""The narrow form holds the same values as the usual one, and transforms take no more memory than they say."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

from zloader.common.records import CsrArrays
from zloader.reading.forms import Form, Transforming, holds
from zloader.reading.gather import SourceRows, compressed
from zloader.selecting.genes import ChosenGenes
from zloader.transforms import Clip, Downsample, LogNormalize, Scale

pytestmark = pytest.mark.any_version

N_GENES = 300
DTYPES = ["float32", "float64", "int32", "int64"]
STORED = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float32", "float64"]


def rows_of(matrix: scipy.sparse.csr_matrix, at: slice | np.ndarray = slice(None)) -> SourceRows:
    starts = matrix.indptr[:-1].astype(np.int64)
    lengths = np.diff(matrix.indptr).astype(np.int64)
    return SourceRows(at=at, genes=matrix.indices, values=matrix.data, starts=(starts, starts), lengths=lengths)


def random(dtype: str, n_rows: int = 20, seed: int = 0) -> scipy.sparse.csr_matrix:
    found = scipy.sparse.random(n_rows, N_GENES, 0.2, "csr", np.float64, random_state=seed)
    found.data = np.floor(found.data * 100 + 1).astype(dtype)
    found.sort_indices()
    return found


@pytest.mark.parametrize(
    ("stored", "wanted", "narrow"),
    [
        ("uint8", "float32", "uint8"),
        ("uint16", "float32", "uint16"),
        ("bool", "float32", "bool"),
        ("int16", "int64", "int16"),
        ("int32", "float32", "float32"),
        ("int32", "float64", "float64"),  # exact, but at most as many bytes are saved as in a rare dtype
        ("float32", "float32", "float32"),
        ("float64", "float32", "float32"),
    ],
)
def test_values_are_carried_in_the_narrowest_dtype_that_is_exact(stored, wanted, narrow):
    dtypes = [np.dtype(stored)]
    assert Form(dense=False, dtype=wanted, narrow=True).value_dtype(dtypes) == narrow
    assert Form(dense=False, dtype=wanted).value_dtype(dtypes) == wanted
    assert Form(dense=False, dtype=None, narrow=True).value_dtype(dtypes) == stored


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("wanted", DTYPES)
def test_a_float_holds_every_number_and_an_integer_only_dtypes_that_it_holds_whole(stored, wanted):
    """Which the smallest and the largest value of an integer dtype show, and a fraction of a float."""
    stored, wanted = np.dtype(stored), np.dtype(wanted)
    if wanted.kind == "f":
        assert holds(wanted.name, stored)
    elif stored.kind == "f":
        assert not holds(wanted.name, stored)
    else:
        ends = [0, 1] if stored.kind == "b" else [np.iinfo(stored).min, np.iinfo(stored).max]
        limits = np.iinfo(wanted)
        assert holds(wanted.name, stored) == all(limits.min <= int(end) <= limits.max for end in ends)


@pytest.mark.every(6)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("wanted", DTYPES)
def test_every_value_of_a_carried_dtype_fits_exactly(stored, wanted):
    """So that converting it later neither rounds it nor has to refuse it."""
    carried = Form(dense=False, dtype=wanted, narrow=True).value_dtype([np.dtype(stored)])
    if carried == wanted:
        return
    bits = {"float32": 24, "float64": 53}.get(wanted, 31)
    limits = (0, 1) if stored == "bool" else (np.iinfo(stored).min, np.iinfo(stored).max)
    assert all(abs(int(limit)) <= 2**bits for limit in limits)
    assert carried == stored


@pytest.mark.every(5)
@pytest.mark.parametrize("stored", ["uint8", "uint16", "int16", "int32", "float32"])
@pytest.mark.parametrize("wanted", ["float32", "float64", "int64"])
@pytest.mark.parametrize("dense", [False, True], ids=["csr", "dense"])
def test_narrow_values_are_the_usual_ones(stored, wanted, dense):
    matrices = [random(stored, 20), random("uint8", 10, seed=1)]
    parts = [rows_of(matrices[0], np.arange(20) + 10), rows_of(matrices[1], np.arange(10))]
    stored_dtypes = [matrix.dtype for matrix in matrices]
    narrow, usual = (
        Form(dense=dense, dtype=wanted, narrow=each).gathered(parts, 30, n_genes=N_GENES, stored=stored_dtypes)
        for each in (True, False)
    )
    assert narrow.indices.dtype == np.uint16
    assert narrow.values.dtype == Form(dense=dense, dtype=wanted, narrow=True).value_dtype(stored_dtypes)
    as_dense = scipy.sparse.csr_matrix(
        (narrow.values.astype(wanted), narrow.indices.astype(np.int32), narrow.indptr), shape=(30, N_GENES)
    ).toarray()
    wanted_rows = usual
    if not dense:
        wanted_rows = scipy.sparse.csr_matrix(
            (usual.values, usual.indices, usual.indptr), shape=(30, N_GENES)
        ).toarray()
    np.testing.assert_array_equal(as_dense, wanted_rows)


def test_stored_dense_and_wanted_dense_stays_dense_and_narrow():
    values = np.arange(12, dtype=np.uint8)
    starts = np.arange(3) * 4
    rows = SourceRows(at=slice(None), genes=None, values=values, starts=(starts, starts), lengths=np.full(3, 4))
    form = Form(dense=True, dtype="float32", narrow=True)
    found = form.gathered([rows], 3, n_genes=4, stored=[values.dtype])
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, values.reshape(3, 4))


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_repeated_genes_are_summed_before_they_are_narrow(dtype):
    matrix = random("uint8")
    matrix.data[:] = 255
    matrix.indices[matrix.indptr[3] + 1] = matrix.indices[matrix.indptr[3]]
    form = Form(dense=True, dtype=dtype, narrow=True)
    found = form.gathered([rows_of(matrix)], 20, n_genes=N_GENES, stored=[matrix.dtype])
    usual = Form(dense=True, dtype=dtype).gathered([rows_of(matrix)], 20, n_genes=N_GENES, stored=[matrix.dtype])
    dense = np.zeros_like(usual)
    for row in range(20):
        of_row = slice(found.indptr[row], found.indptr[row + 1])
        assert (np.diff(found.indices[of_row].astype(int)) > 0).all()
        dense[row, found.indices[of_row]] = found.values[of_row]
    assert dense.tobytes() == usual.tobytes()


@given(
    dense=st.integers(0, 4).flatmap(
        lambda n: st.lists(
            st.lists(st.sampled_from([0.0, 1.5, np.nan, -2.0]), min_size=5, max_size=5), min_size=n, max_size=n
        )
    ),
    dtype=st.sampled_from(["float32", "float64"]),
)
def test_compressing_dense_rows_loses_nothing(dense, dtype):
    rows = np.array(dense, dtype).reshape(-1, 5)
    found = compressed(rows, genes=np.dtype(np.uint8))
    again = np.zeros_like(rows)
    for row in range(len(rows)):
        of_row = slice(found.indptr[row], found.indptr[row + 1])
        again[row, found.indices[of_row]] = found.values[of_row]
    assert found.indices.dtype == np.uint8
    assert again.tobytes() == rows.tobytes()


# ---- the memory that transforms take beside gathered rows

N_COUNTED, N_WIDE = 300, 2000
COUNTS = scipy.sparse.random(N_COUNTED, N_WIDE, 0.2, "csr", np.float32, random_state=np.random.default_rng(0))
COUNTS.data[:] = np.random.default_rng(1).integers(1, 5, COUNTS.nnz)
CHOSEN = ChosenGenes(positions=np.arange(0, N_WIDE, 2), n_stored=N_WIDE)
SCALE = Scale(np.ones(N_WIDE), np.ones(N_WIDE))
CASES = {
    "log": ([LogNormalize(1e4)], False, "float32", None),
    "log, dense": ([LogNormalize(1e4), SCALE], True, "float32", None),
    "downsampled": ([Downsample(20)], False, "float32", None),
    "clipped": ([Clip(0, 2), Clip(0, 1)], False, "int32", None),
    "genes": ([Downsample(400), LogNormalize(1e4)], False, "float32", CHOSEN),
    "genes, dense": ([LogNormalize(1e4)], True, "float32", CHOSEN),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", CASES)
def test_making_x_takes_no_more_memory_than_it_says(name):
    transforms, dense, dtype, genes = CASES[name]
    transforming = Transforming(transforms=transforms, seed=0, epoch=0, dense=dense, dtype=dtype, genes=genes)
    for measured in (False, True):  # the first call compiles
        values = COUNTS.data.astype(dtype)
        indptr, indices = COUNTS.indptr.astype(np.int32), COUNTS.indices.astype(np.int32)
        gathered = CsrArrays(indptr=indptr, indices=indices, values=values, n_genes=N_WIDE)
        if transforming.gathers_dense:
            gathered = COUNTS.toarray().astype(dtype)
        if measured:
            tracemalloc.start()
        transforming.x(gathered, np.arange(N_COUNTED))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most <= transforming.more_bytes(N_COUNTED, gathered.nbytes) + 64 * N_COUNTED + 100_000
