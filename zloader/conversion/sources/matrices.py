"""Read the matrices of one source as windows: CSR and dense matrices directly, CSC through transpose.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from zloader.common.errors import SourceError
from zloader.common.options import MiB
from zloader.conversion.sources.compressed import CompressedArrays
from zloader.conversion.sources.nodes import Node
from zloader.conversion.sources.transpose import CscMatrix
from zloader.conversion.sources.windows import SourceMatrix, Window, canonical

# Bytes per window. Arrays of this size reuse freed memory; with 64 MiB every window would fault in new pages.
_MOST_READ = 16 * MiB


def open_matrix(node: Node, name: str, *, shape: tuple[int, int], window_bytes: int) -> SourceMatrix:
    """Opens the matrix `node`, which will be stored as `name`.

    `shape` is the shape expected from obs and var. `window_bytes` bounds the decoded values and indices in memory.
    Raises SourceError.
    """
    if node.encoding not in _KINDS:
        raise SourceError(
            f"{node.at} is a {node.encoding}, which cannot be stored: convert it to csr_matrix, csc_matrix or array"
        )
    if node.shape != shape:
        raise SourceError(f"{node.at} has shape {node.shape}, but obs and var require {shape}: the source is damaged")
    return _KINDS[node.encoding](node, name, shape=shape, window_bytes=window_bytes)


class DenseMatrix(SourceMatrix):
    """A dense array, read in runs of rows."""

    encoding = "dense"
    genes_dtype = indptr_dtype = np.dtype(np.int64)

    def __init__(self, node: Node, name: str, *, shape: tuple[int, int], window_bytes: int) -> None:
        super().__init__(name, n_rows=shape[0], n_genes=shape[1])
        self._array = node
        self.dtype = node.number_dtype
        self.n_stored = self.n_rows * self.n_genes
        rows = max(1, min(window_bytes, _MOST_READ) // max(1, self.n_genes * self.dtype.itemsize))
        stored_together = node.rows_stored_together
        # Whole stored chunks if they fit, so that none is decompressed twice.
        self._window_rows = rows - rows % stored_together if rows > stored_together else rows

    def windows(self, first_row: int = 0) -> Iterator[Window]:
        for first in range(first_row, self.n_rows, self._window_rows):
            values = self._array.numbers(first, min(first + self._window_rows, self.n_rows))
            lengths = np.full(len(values), self.n_genes, np.int64)
            yield Window(lengths=lengths, genes=np.empty(0, np.int64), values=values.reshape(-1))


class CsrMatrix(SourceMatrix):
    """A CSR matrix, read sequentially."""

    encoding = "csr"

    def __init__(self, node: Node, name: str, *, shape: tuple[int, int], window_bytes: int) -> None:
        super().__init__(name, n_rows=shape[0], n_genes=shape[1])
        self._stored = CompressedArrays(node, axes=("row", "gene"), major=shape[0], minor=shape[1])
        self._window_elements = min(window_bytes, _MOST_READ) // self._stored.element_bytes
        self.n_stored, self.dtype = self._stored.n_values, self._stored.dtype
        self.genes_dtype, self.indptr_dtype = self._stored.genes_dtype, self._stored.indptr_dtype

    def windows(self, first_row: int = 0) -> Iterator[Window]:
        for row, indptr, genes, values in self._stored.windows(self._window_elements, first_row):
            yield canonical(indptr, genes, values, at=self._stored.at, first_row=row)


_KINDS: dict[str, Callable[..., SourceMatrix]] = {"csr": CsrMatrix, "csc": CscMatrix, "dense": DenseMatrix}
