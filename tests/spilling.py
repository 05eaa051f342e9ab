"""Helpers for the tests of shuffling and transposing: random matrices, checks of windows, and temporary files."""

from __future__ import annotations

import contextlib
import resource
import tempfile
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import scipy.sparse as sp
from hypothesis import strategies as st

from zloader.conversion.nodes import Node
from zloader.conversion.port import Matrix, Window
from zloader.conversion.reorder import CscMatrix
from zloader.conversion.rows import canonical

_TO_COMPARE = {"float16": "float32"}  # scipy does not support float16
LENGTHS = st.lists(st.just(0) | st.integers(0, 30) | st.integers(0, 300), max_size=40)


@st.composite
def any_csr(draw: st.DrawFn) -> sp.csr_matrix:
    """Short, long and empty rows, or no rows. Genes are canonical, or in any order with duplicates."""
    lengths = draw(LENGTHS)
    n_genes = draw(st.sampled_from([1, 7, 256, 257, 70_000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    indices = rng.integers(0, n_genes, sum(lengths)).astype(draw(st.sampled_from([np.int32, np.int64])))
    values = rng.integers(0, 100, sum(lengths)).astype(draw(st.sampled_from([np.float32, np.uint16])))
    x = sp.csr_matrix((values, indices, np.concatenate([[0], np.cumsum(lengths)])), shape=(len(lengths), n_genes))
    if draw(st.booleans()):
        x.sum_duplicates()
    return x


class Rows(Matrix):
    """The rows of a CSR or dense matrix of scipy, NumPy or h5py, in windows of about `window_bytes`."""

    def __init__(self, x: Any, window_bytes: int) -> None:
        shape = x.shape if hasattr(x, "shape") else tuple(x.attrs["shape"].tolist())
        super().__init__("X", n_rows=shape[0], n_genes=shape[1])
        self.dense = isinstance(x, np.ndarray | h5py.Dataset)
        parts = {"data": x[:]} if self.dense else {name: _array(x, name) for name in ("data", "indices", "indptr")}
        self._parts, self.dtype = parts, parts["data"].dtype
        self.genes_dtype = np.dtype(np.int64) if self.dense else parts["indices"].dtype
        self.n_stored, self._window_bytes = parts["data"].size, window_bytes

    def windows(self, first_row: int = 0) -> Iterator[Window]:
        row_bytes = self._parts["data"].nbytes // max(1, self.n_rows)
        step = max(1, self._window_bytes // max(1, row_bytes))
        for start in range(first_row, self.n_rows, step):
            stop = min(start + step, self.n_rows)
            if self.dense:
                lengths, genes = np.full(stop - start, self.n_genes, np.int64), np.empty(0, np.int64)
                yield Window(lengths=lengths, genes=genes, values=self._parts["data"][start:stop].reshape(-1))
                continue
            ends = self._parts["indptr"][start : stop + 1].astype(np.int64)
            part = slice(ends[0], ends[-1])
            genes, values = self._parts["indices"][part], self._parts["data"][part]
            yield canonical(ends - ends[0], genes, values, at="X", first_row=start)


def _array(x: Any, name: str) -> np.ndarray:
    return np.asarray(getattr(x, name) if sp.issparse(x) else x[name][:])


def opened(x: Any, window_bytes: int) -> Matrix:
    """A matrix in memory or in an HDF5 file."""
    node = Node(x, "memory", "X")
    if node.encoding == "csc":
        return CscMatrix(node, "X", shape=(node.shape[0], node.shape[1]), window_bytes=window_bytes)
    return Rows(x, window_bytes)


@contextlib.contextmanager
def stored(x: Any, dtype: str) -> Iterator[Any]:
    """Writes `x` to an HDF5 file in memory, in any dtype, including dtypes that scipy does not support."""
    with h5py.File.in_memory() as file:
        if not sp.issparse(x):
            file["X"] = x.astype(dtype)
        else:
            group = file.create_group("X")
            group.attrs.update({"encoding-type": f"{x.format}_matrix", "shape": x.shape})
            group["data"], group["indices"], group["indptr"] = x.data.astype(dtype), x.indices, x.indptr
        yield file["X"]


def with_values(x: Any, dtype: str) -> Any:
    """The expected result of `matrix_of` for the windows of `stored(x, dtype)`."""
    if not sp.issparse(x):
        return x.astype(dtype)
    return sp.csr_matrix((x.data.astype(_TO_COMPARE.get(dtype, dtype)), x.indices, x.indptr), shape=x.shape)


class CountedArray:
    """An array that counts the items read from it."""

    def __init__(self, array: np.ndarray) -> None:
        self._array, self.n_read = array, 0
        self.shape, self.dtype = array.shape, array.dtype

    def __getitem__(self, items: slice) -> np.ndarray:
        self.n_read += len(self._array[items])
        return self._array[items]


def counted(x: Any) -> dict[str, CountedArray]:
    """The arrays of a compressed matrix as counted arrays, for CompressedArrays."""
    return {name: CountedArray(getattr(x, name)) for name in ("data", "indices", "indptr")}


def matrix_of(windows: Iterable[Window], shape: tuple[int, int], dtype: Any, *, dense: bool = False) -> Any:
    """Assembles the matrix from its windows. Asserts that windows are well formed and every row occurs once."""
    parts = list(windows)
    for window in parts:
        assert (window.lengths.dtype, window.values.dtype, window.values.ndim) == (np.int64, np.dtype(dtype), 1)
        assert len(window.values) == window.lengths.sum()
        assert len(window.genes) == (0 if dense else len(window.values))
    values = np.concatenate([*(window.values for window in parts), np.empty(0, dtype)])
    if dense:
        return values.reshape(sum(len(window.lengths) for window in parts), shape[1])
    lengths = np.concatenate([*(window.lengths for window in parts), np.empty(0, int)])
    genes = np.concatenate([*(window.genes for window in parts), np.empty(0, np.uint8)]).astype(np.int64)
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    values = values.astype(_TO_COMPARE.get(str(values.dtype), values.dtype))
    x = sp.csr_matrix((values, genes, indptr), shape=(len(lengths), shape[1]))
    assert x.has_canonical_format
    return x


def assert_equal(found: Any, wanted: Any) -> None:
    """Asserts equal arrays. For CSR, the stored values and their order must be equal too."""
    assert found.shape == wanted.shape
    if not sp.issparse(wanted):
        np.testing.assert_array_equal(found, wanted)
        return
    for part in ("indptr", "indices", "data"):
        np.testing.assert_array_equal(getattr(found, part), getattr(wanted, part))


def assert_bounded(window: Window, window_bytes: int) -> None:
    assert window.values.nbytes + window.genes.nbytes <= window_bytes or len(window.lengths) == 1


def consumed(windows: Iterable[Window]) -> None:
    """Iterates over windows without keeping them."""
    for _ in windows:
        pass


def peak_bytes(do: Callable[[], None]) -> int:
    """The peak of the bytes allocated during a call."""
    tracemalloc.start()
    try:
        do()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@contextlib.contextmanager
def temporary_directory(path: Path) -> Iterator[None]:
    """Creates temporary files in `path`, so that `open_spills` counts only those."""
    before, tempfile.tempdir = tempfile.tempdir, str(path)
    try:
        yield
    finally:
        tempfile.tempdir = before


def open_spills() -> int:
    """The number of unnamed temporary files in the temporary directory that this process has open."""
    links = [_target(link) for link in Path("/proc/self/fd").iterdir()]
    return sum(link.startswith(tempfile.gettempdir()) and link.endswith("(deleted)") for link in links)


def _target(link: Path) -> str:
    with contextlib.suppress(FileNotFoundError):  # the descriptor that listed the directory
        return str(link.readlink())
    return ""


@contextlib.contextmanager
def files_no_longer_than(n_bytes: int) -> Iterator[None]:
    """Limits the size of files, to simulate a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
