"""Shuffling out of core, compared with indexing the rows of the whole matrix."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import LAYOUTS, counts
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
from zloader.conversion import reorder
from zloader.conversion.nodes import Node
from zloader.conversion.reorder import CscMatrix, ShuffledMatrix
from zloader.order.permutation import permute

pytestmark = pytest.mark.any_version


@pytest.fixture(autouse=True, scope="module")
def _spills_apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with temporary_directory(tmp_path_factory.mktemp("spills")):
        yield


def positions(n_rows: int, seed: int = 0) -> np.ndarray:
    return permute(np.arange(n_rows), n_rows, seed)


def shuffled(x: Any, window_bytes: int, read_bytes: int | None = None, **more: Any) -> ShuffledMatrix:
    """`x`, permuted by `positions`, which are computed window by window as in the converter."""
    inner = opened(x, read_bytes or window_bytes)
    return ShuffledMatrix(inner, lambda rows: permute(rows, inner.n_rows, 0), window_bytes=window_bytes, **more)


def oracle(x: Any) -> Any:
    """The reference in memory: CSC becomes CSR, and rows become canonical."""
    wanted = x.tocsr()[np.argsort(positions(x.shape[0]))] if sp.issparse(x) else x[np.argsort(positions(x.shape[0]))]
    if sp.issparse(wanted):
        wanted.sum_duplicates()
    return wanted


def both_passes(matrix: ShuffledMatrix) -> None:
    consumed(matrix.windows())
    consumed(matrix.windows())


@settings(max_examples=25)
@given(
    x=any_csr(),
    layout=st.sampled_from(list(LAYOUTS)),
    window_bytes=st.integers(1, 500) | st.integers(500, 20_000),
    read_bytes=st.integers(100, 20_000),
    first_row=st.integers(0, 41),
)
def test_any_rows_in_any_windows(
    x: sp.csr_matrix, layout: str, window_bytes: int, read_bytes: int, first_row: int
) -> None:
    if layout == "dense":
        x = x[:, :200]
    source = LAYOUTS[layout](x)
    wanted, dense = oracle(source), layout == "dense"
    with shuffled(source, window_bytes, read_bytes) as matrix:
        assert (matrix.dense, matrix.dtype) == (dense, x.dtype)
        for first in (first_row, 0):
            windows = list(matrix.windows(first))
            assert_equal(matrix_of(windows, x.shape, x.dtype, dense=dense), wanted[first:])
            for window in windows:
                assert_bounded(window, window_bytes)
    assert open_spills() == 0


@pytest.mark.every(5)
@pytest.mark.parametrize("dtype", ["float16", "float64", "bool", "int8", "uint16", "int64"])
@pytest.mark.parametrize("layout", ["csr", "dense"])
def test_every_dtype(dtype: str, layout: str) -> None:
    x = LAYOUTS[layout](counts())
    with stored(x, dtype) as element, shuffled(element, 4096) as matrix:
        found = matrix_of(matrix.windows(), x.shape, dtype, dense=layout == "dense")
    assert_equal(found, with_values(oracle(x), dtype))


@pytest.mark.every(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (1, 5), (1, 1), (2, 3)], ids=str)
def test_small_shapes(layout: str, shape: tuple[int, int]) -> None:
    x = LAYOUTS[layout](sp.csr_matrix(np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)))
    with shuffled(x, 1000) as matrix:
        assert_equal(matrix_of(matrix.windows(), shape, np.float32, dense=layout == "dense"), oracle(x))


def test_columns_follow_rows() -> None:
    """As for obsp: the value for a pair of rows stays with that pair."""
    x = counts(200, 200)
    order = np.argsort(positions(200))
    wanted = x[order][:, order]
    wanted.sort_indices()
    with shuffled(x, 2000, columns=True) as matrix:
        assert_equal(matrix_of(matrix.windows(), x.shape, x.dtype), wanted)
        assert_equal(matrix_of(matrix.windows(), x.shape, x.dtype), wanted)


def test_rows_that_are_not_alike() -> None:
    """All values are in adjacent rows of the result: some buckets have many windows of values, others none."""
    x = sp.csr_matrix(np.arange(400 * 500, dtype=np.float32).reshape(400, 500) * (positions(400) < 30)[:, None])
    x.eliminate_zeros()
    with shuffled(x, 9000) as matrix:
        windows = list(matrix.windows())
        assert_equal(matrix_of(windows, x.shape, x.dtype), oracle(x))
        for window in windows:
            assert_bounded(window, 9000)
        for first_row in (10, 30, 200, 400):
            assert_equal(matrix_of(matrix.windows(first_row), x.shape, x.dtype), oracle(x)[first_row:])


def test_a_shuffled_matrix_can_be_shuffled() -> None:
    x = counts()
    inner = shuffled(x, 4096, 1000)
    with ShuffledMatrix(inner, lambda rows: permute(rows, 60, 1), window_bytes=3000) as matrix:
        wanted = oracle(x)[np.argsort(positions(60, 1))]
        assert_equal(matrix_of(matrix.windows(), x.shape, x.dtype), wanted)
        assert_equal(matrix_of(matrix.windows(), x.shape, x.dtype), wanted)


def test_windows_that_were_not_finished_do_not_count() -> None:
    x = counts()
    with shuffled(x, 4096) as matrix:
        first = next(iter(matrix.windows()))
        assert len(first.lengths) < 60
        assert_equal(matrix_of(matrix.windows(), x.shape, x.dtype), oracle(x))
    assert open_spills() == 0


def test_the_source_is_read_once_and_what_it_holds_freed() -> None:
    x = counts().tocsc()
    parts = counted(x)
    inner = CscMatrix(Node(parts, "X"), "X", shape=x.shape, window_bytes=4096)
    with ShuffledMatrix(inner, lambda rows: permute(rows, 60, 0), window_bytes=4096) as matrix:
        next(iter(matrix.windows()))
        assert open_spills() == 6  # its own spills; those of the transposition are closed
        for _ in range(2):
            assert_equal(matrix_of(matrix.windows(), x.shape, x.dtype), oracle(x))
    assert parts["data"].n_read == x.nnz
    assert open_spills() == 0


def test_many_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket boundaries exceed the part that is kept in memory."""
    monkeypatch.setattr(reorder, "_CUTS_IN_MEMORY", 100)
    x = counts()
    with shuffled(x, 1000) as matrix:
        assert_equal(matrix_of(matrix.windows(7), x.shape, x.dtype), oracle(x)[7:])


def test_no_room() -> None:
    x = counts()
    with (
        files_no_longer_than(5000),
        shuffled(x, 4096) as matrix,
        pytest.raises(errors.StoreError, match=r"cannot shuffle X: /.*File too large.* \d{5} bytes.*TMPDIR"),
    ):
        list(matrix.windows())
    assert open_spills() == 0


@pytest.mark.slow
def test_memory_does_not_grow_with_the_matrix() -> None:
    """A matrix of 16 MB takes as much memory as one of 4 MB: a few windows."""
    window_bytes = 1 << 18
    held = []
    for n_rows in (2500, 10_000):
        x = sp.random(n_rows, 1000, 0.2, "csr", np.float32, random_state=0)
        with shuffled(x, window_bytes) as matrix:
            consumed(matrix.windows())  # compiles the kernels
            held.append(peak_bytes(partial(both_passes, matrix)))
    assert max(held) < 8 * window_bytes
    assert held[1] < 1.2 * held[0]
