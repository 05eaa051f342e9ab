"""Matrices of several sources below one another as one, each with its genes put in the places that they have there.

A window of a source becomes one window of the whole. Genes are renumbered, dropped, and put in order again where the
new numbers do not ascend: in linear time, by way of a bit for each gene (5 to 8 ns a value; sorting takes 40).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.compiled import compiled
from zloader.common.records import Rows
from zloader.conversion.sources.windows import Advance, SourceMatrix, Window


@compiled
def _count_bits(word: Any) -> Any:
    word -= (word >> np.uint64(1)) & np.uint64(0x5555555555555555)
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@compiled
def _place(
    lengths: Rows, n_genes: int, taken: tuple[NDArray[Any], NDArray[Any]], given: tuple[NDArray[Any], NDArray[Any]]
) -> Rows:
    """Moves `taken` genes (those below 0 are dropped) and values to `given`, ascending in each row: its new lengths.

    A gene's place in its row is the number of bits set before its own.
    """
    (genes, values), (out_genes, out_values) = taken, given
    one = np.uint64(1)
    present = np.zeros((n_genes + 63) // 64, np.uint64)
    before = np.zeros(len(present), np.int64)
    kept = np.empty(lengths.max() + 1, np.int64) if len(lengths) else np.empty(0, np.int64)
    out_lengths = np.zeros_like(lengths)
    at = start = 0
    for row in range(len(lengths)):
        n_kept = 0
        for i in range(start, start + lengths[row]):
            kept[n_kept] = i
            n_kept += genes[i] >= 0  # no branch: that would be guessed wrong half the time
        for i in kept[:n_kept]:
            present[genes[i] >> 6] |= one << np.uint64(genes[i] & 63)
        for word in range(len(present)):
            before[word] = at
            at += _count_bits(present[word])
        for i in kept[:n_kept]:
            lower = present[genes[i] >> 6] & ((one << np.uint64(genes[i] & 63)) - one)
            place = before[genes[i] >> 6] + _count_bits(lower)
            out_genes[place], out_values[place] = genes[i], values[i]
        present[:] = 0
        out_lengths[row] = n_kept
        start += lengths[row]
    return out_lengths


class JoinedMatrix(SourceMatrix):
    """The rows of `parts`, one part after the other, over `n_genes` genes.

    With each part come the new numbers of its genes, each at most once and -1 for those to drop; None leaves all as
    they are. Genes that a part does not have are zeros. Dense parts stay dense when all are; else the whole is CSR, and
    of dense rows the values that are not 0 (NaN among them) are kept, as `anndata.concat` does.
    """

    genes_dtype = indptr_dtype = np.dtype(np.int64)

    def __init__(self, name: str, parts: Sequence[tuple[SourceMatrix, Rows | None]], *, n_genes: int) -> None:
        matrices = [matrix for matrix, _ in parts]
        super().__init__(name, n_rows=sum(matrix.n_rows for matrix in matrices), n_genes=n_genes)
        self.encoding = "dense" if all(matrix.encoding == "dense" for matrix in matrices) else "csr"
        stored = sum(matrix.n_stored for matrix in matrices)
        self.n_stored = self.n_rows * n_genes if self.encoding == "dense" else stored
        self.dtype = np.result_type(*(matrix.dtype for matrix in matrices))
        if n_genes <= np.iinfo(np.int32).max:
            self.genes_dtype = np.dtype(np.int32)
        self._parts = [(matrix, None if genes is None else genes.astype(self.genes_dtype)) for matrix, genes in parts]

    @property
    def n_reads(self) -> int:
        return sum(matrix.n_reads for matrix, _ in self._parts)

    def first_pass(self, advance: Advance) -> Iterator[Window]:
        for matrix, genes in self._parts:
            for window in matrix.first_pass(advance):
                yield self._joined(window, matrix, genes)

    def windows(self, first_row: int = 0) -> Iterator[Window]:
        for matrix, genes in self._parts:
            if first_row < matrix.n_rows:
                for window in matrix.windows(first_row):
                    yield self._joined(window, matrix, genes)
            first_row = max(0, first_row - matrix.n_rows)

    def _joined(self, window: Window, matrix: SourceMatrix, genes: NDArray[Any] | None) -> Window:
        if self.encoding == "dense":
            return self._dense(window, matrix.n_genes, genes)
        if matrix.encoding == "dense":
            window = without_zeros(window, matrix.n_genes)
        return self._sparse(window, genes)

    def _dense(self, window: Window, n_genes: int, genes: NDArray[Any] | None) -> Window:
        if genes is None:
            return _replaced(window, window.lengths, window.genes, window.values.astype(self.dtype, copy=False))
        rows = window.values.reshape(len(window.lengths), n_genes)
        kept = np.flatnonzero(genes >= 0)
        values = np.zeros((len(rows), self.n_genes), self.dtype)
        values[:, genes[kept]] = rows[:, kept]
        return _replaced(window, np.full(len(rows), self.n_genes, np.int64), window.genes, values.reshape(-1))

    def _sparse(self, window: Window, genes: NDArray[Any] | None) -> Window:
        values = window.values.astype(self.dtype, copy=False)
        if genes is None:
            return _replaced(window, window.lengths, window.genes.astype(self.genes_dtype, copy=False), values)
        mapped = genes[window.genes]
        if genes.min(initial=0) == 0 and (genes[1:] > genes[:-1]).all():
            return _replaced(window, window.lengths, mapped, values)
        bits = values.view(f"u{values.itemsize}")  # only moved, so any type will do: numba has no float16
        placed = np.empty_like(mapped), np.empty_like(bits)
        lengths = _place(window.lengths, self.n_genes, (mapped, bits), placed)
        n_kept = int(lengths.sum())
        return _replaced(window, lengths, placed[0][:n_kept], placed[1][:n_kept].view(values.dtype))

    def close(self) -> None:
        for matrix, _ in self._parts:
            matrix.close()


def without_zeros(window: Window, n_genes: int) -> Window:
    """A dense window as CSR, without its zeros."""
    values = window.values.reshape(len(window.lengths), n_genes)
    rows, genes = np.nonzero(values)
    return _replaced(window, np.bincount(rows, minlength=len(values)), genes, values[rows, genes])


def _replaced(window: Window, lengths: Rows, genes: NDArray[Any], values: NDArray[Any]) -> Window:
    return Window(lengths=lengths, genes=genes, values=values, places=window.places, mended=window.mended)
