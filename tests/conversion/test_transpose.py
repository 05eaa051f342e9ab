"""Transposing out of core, compared with scipy."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import counts
from spilling import (
    any_csr,
    assert_bounded,
    assert_equal,
    consumed,
    counted,
    files_no_longer_than,
    matrix_of,
    open_spills,
    opened,
    peak_bytes,
    stored,
    temporary_directory,
    with_values,
)

from zloader.common import errors
from zloader.conversion.nodes import Node
from zloader.conversion.port import Matrix
from zloader.conversion.reorder import CscMatrix

pytestmark = pytest.mark.any_version


@pytest.fixture(autouse=True, scope="module")
def _spills_apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with temporary_directory(tmp_path_factory.mktemp("spills")):
        yield


def canonical(x: Any) -> sp.csr_matrix:
    x = sp.csr_matrix(x)
    x.sum_duplicates()
    return x


@pytest.mark.slow
@settings(max_examples=25)
@given(
    x=any_csr(),
    window_bytes=st.integers(1, 500) | st.integers(500, 20_000),
    first_row=st.integers(0, 41),
)
def test_any_matrix_in_any_windows(x: sp.csr_matrix, window_bytes: int, first_row: int) -> None:
    wanted, n_twice = canonical(x.copy()), int(np.sum(np.diff(x.indptr) != np.diff(canonical(x.copy()).indptr)))
    with opened(x.tocsc(), window_bytes) as matrix:
        assert (matrix.dense, matrix.dtype, matrix.n_stored) == (False, x.dtype, x.nnz)
        assert sum(len(window.mended) for window in matrix.windows()) == n_twice
        for first in (first_row, 0):
            windows = list(matrix.windows(first))
            assert_equal(matrix_of(windows, x.shape, x.dtype), wanted[first:])
            for window in windows:
                assert_bounded(window, window_bytes)
    assert open_spills() == 0


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", ["float16", "float64", "bool", "int8", "uint16", "int64"])
def test_every_dtype(dtype: str) -> None:
    x = counts()
    with stored(x.tocsc(), dtype) as element, opened(element, 4096) as matrix:
        assert_equal(matrix_of(matrix.windows(), x.shape, dtype), with_values(x, dtype))


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32", "int64", "uint64"])
def test_every_dtype_of_row_numbers(dtype: str) -> None:
    x = counts().tocsc()
    parts = SimpleNamespace(data=x.data, indices=x.indices.astype(dtype), indptr=x.indptr)
    with CscMatrix(Node(vars(parts), "X"), "X", shape=x.shape, window_bytes=4096) as matrix:
        assert_equal(matrix_of(matrix.windows(), x.shape, x.dtype), canonical(x))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (1, 5), (1, 1), (2, 3)], ids=str)
def test_small_shapes(shape: tuple[int, int]) -> None:
    x = sp.csc_matrix(np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape))
    with opened(x, 1000) as matrix:
        assert_equal(matrix_of(matrix.windows(), shape, np.float32), canonical(x))


def test_rows_and_genes_that_take_more_than_32_bits_together() -> None:
    n_rows, n_genes = 1 << 17, 1 << 18
    at = np.array([0, 5, n_rows // 2, n_rows - 1]), np.array([n_genes - 1, 0, n_genes // 2, n_genes - 1])
    x = sp.csc_matrix((np.arange(1, 5, dtype=np.float32), at), shape=(n_rows, n_genes))
    with opened(x, 1 << 26) as matrix:
        assert_equal(matrix_of(matrix.windows(), x.shape, x.dtype), canonical(x))


def test_rows_that_are_not_alike() -> None:
    """All values are in adjacent rows: one bucket has many windows of values, the others none."""
    x = sp.csr_matrix(np.arange(400 * 500, dtype=np.float32).reshape(400, 500))
    x.data[: x.indptr[200]] = 0
    x.data[x.indptr[230] :] = 0
    x.eliminate_zeros()
    with opened(x.tocsc(), 9000) as matrix:
        windows = list(matrix.windows())
        assert_equal(matrix_of(windows, x.shape, x.dtype), x)
        for window in windows:
            assert_bounded(window, 9000)
        for first_row in (10, 210, 300, 400):
            assert_equal(matrix_of(matrix.windows(first_row), x.shape, x.dtype), x[first_row:])


def test_the_source_is_read_once() -> None:
    x = counts().tocsc()
    parts = counted(x)
    with CscMatrix(Node(parts, "X"), "X", shape=x.shape, window_bytes=4096) as matrix:
        consumed(matrix.windows())
        for _ in range(2):
            consumed(matrix.windows())
    assert parts["data"].n_read == parts["indices"].n_read == x.nnz


def test_a_pass_that_was_not_finished_does_not_count() -> None:
    x = counts().tocsc()
    x.indices[x.indptr[290]] = 60
    with opened(x, 4096) as matrix:
        for _ in range(2):
            with pytest.raises(
                errors.SourceError, match=r"X: gene 290 has a value for row 60, but rows range from 0 to 59"
            ):
                consumed(matrix.windows())
    assert open_spills() == 0


def test_no_room() -> None:
    with (
        files_no_longer_than(5000),
        opened(counts().tocsc(), 4096) as matrix,
        pytest.raises(errors.StoreError, match=r"cannot transpose X: /.* \(File too large\).* \d{5} bytes.*TMPDIR"),
    ):
        consumed(matrix.windows())
    assert open_spills() == 0


def both_passes(matrix: Matrix) -> None:
    consumed(matrix.windows())
    consumed(matrix.windows())


@pytest.mark.slow
def test_memory_does_not_grow_with_the_matrix() -> None:
    """A matrix of 16 MB takes as much memory as one of 4 MB: a few windows."""
    window_bytes = 1 << 18
    held = []
    for n_rows in (2500, 10_000):
        x = sp.random(n_rows, 1000, 0.2, "csc", np.float32, random_state=0)
        with opened(x, window_bytes) as matrix:
            consumed(matrix.windows())  # compiles the kernels
            held.append(peak_bytes(partial(both_passes, matrix)))
    assert max(held) < 8 * window_bytes
    assert held[1] < 1.2 * held[0]
