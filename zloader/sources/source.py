"""The matrices of one source: what kind an element is, and CSR and dense ones as windows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import scipy.sparse

from zloader.errors import SourceError
from zloader.sources.compressed import CompressedArrays, SourceArray
from zloader.sources.transpose import CscMatrix
from zloader.sources.windows import SourceMatrix, Window, canonical
from zloader.terms import MiB

# Arrays of such a window come from memory that was freed before; with 64 MiB the kernel gives new pages.
_MOST_READ = 16 * MiB
_ENCODINGS = {"csr_matrix": "csr", "csc_matrix": "csc", "array": "dense"}


def encoding_of(node: Any) -> str:
    """`csr`, `csc` or `dense` for an element of an .h5ad file or AnnData Zarr or in memory; else its encoding-type."""
    if scipy.sparse.issparse(node):
        return str(node.format)
    if isinstance(node, np.ndarray):
        return "dense"
    encoding = str(node.attrs.get("encoding-type", "array" if hasattr(node, "dtype") else "unknown"))
    return _ENCODINGS.get(encoding, encoding)


def shape_of(node: Any, at: str) -> tuple[int, ...]:
    """The shape of such an element. Raises SourceError where it has none."""
    try:
        shape = node.shape if hasattr(node, "shape") else node.attrs["shape"]
        return tuple(int(size) for size in shape)
    except (KeyError, TypeError) as error:
        raise SourceError(f"{at} has no shape: the file is damaged") from error


def open_matrix(node: Any, name: str, *, source: str, shape: tuple[int, int], window_bytes: int) -> SourceMatrix:
    """The matrix `node`, an element of an .h5ad file or AnnData Zarr or in memory, stored under `name` later on.

    `source` names where it comes from in messages, `shape` is what obs and var ask for. `window_bytes` bounds the
    decoded values and indices held at once. Raises SourceError.
    """
    at, encoding = f"{source}: {name}", encoding_of(node)
    if encoding not in _ENCODINGS.values():
        raise SourceError(f"{at} is a {encoding}, not one of {', '.join(_ENCODINGS)}")
    if shape_of(node, at) != shape:
        raise SourceError(f"{at} has shape {shape_of(node, at)}, but its obs and var ask for {shape}")
    if encoding == "dense":
        return DenseMatrix(node, name, at=at, window_bytes=window_bytes)
    kind = CsrMatrix if encoding == "csr" else CscMatrix
    return kind(node, name, at=at, shape=shape, window_bytes=window_bytes)


class DenseMatrix(SourceMatrix):
    """A dense array, read by rows."""

    encoding = "dense"
    genes_dtype = indptr_dtype = np.dtype(np.int64)

    def __init__(self, array: Any, name: str, *, at: str, window_bytes: int) -> None:
        super().__init__(name, n_rows=int(array.shape[0]), n_genes=int(array.shape[1]))
        self._array = SourceArray(stored=array, at=at)
        self.dtype = self._array.dtype
        self.n_stored = self.n_rows * self.n_genes
        rows = max(1, min(window_bytes, _MOST_READ) // max(1, self.n_genes * self.dtype.itemsize))
        chunks = getattr(array, "chunks", None)
        stored_together = chunks[0] if chunks else 1
        # Whole stored chunks where they fit, so that none is decompressed twice.
        self._window_rows = rows - rows % stored_together if rows > stored_together else rows

    def windows(self, first_row: int = 0) -> Iterator[Window]:
        for first in range(first_row, self.n_rows, self._window_rows):
            values = self._array.read(first, min(first + self._window_rows, self.n_rows))
            lengths = np.full(len(values), self.n_genes, np.int64)
            yield Window(lengths=lengths, genes=np.empty(0, np.int64), values=values.reshape(-1))


class CsrMatrix(SourceMatrix):
    """A CSR matrix, read straight through."""

    encoding = "csr"

    def __init__(self, group: Any, name: str, *, at: str, shape: tuple[int, int], window_bytes: int) -> None:
        super().__init__(name, n_rows=shape[0], n_genes=shape[1])
        self._stored = CompressedArrays(group, at=at, axes=("row", "gene"), major=shape[0], minor=shape[1])
        self._window_elements = min(window_bytes, _MOST_READ) // self._stored.element_bytes
        self.n_stored, self.dtype = self._stored.n_values, self._stored.dtype
        self.genes_dtype, self.indptr_dtype = self._stored.indices.dtype, self._stored.indptr.dtype

    def windows(self, first_row: int = 0) -> Iterator[Window]:
        for _, indptr, genes, values in self._stored.windows(self._window_elements, first_row):
            yield canonical(indptr, genes, values)
