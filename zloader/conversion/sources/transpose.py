"""Transpose a CSC matrix to rows, out of core.

Each window of the source is partitioned into buckets of consecutive rows and written sequentially, as pairs of a value
and a key. The key packs the row within the bucket and the gene. Each bucket fits in memory and is then sorted by row
with a counting sort. The source is read once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.compiled import compiled
from zloader.common.records import Rows
from zloader.conversion.sources.nodes import Node
from zloader.conversion.sources.spill import Spill, applied_in_background, rows_per_bucket, smallest_index
from zloader.conversion.sources.windows import (
    CompressedArrays,
    SourceMatrix,
    Window,
    canonical,
    skip_rows,
    split_rows,
)
from zloader.reading.gather import indptr_of

_BLOCK_ELEMENTS = 1 << 18  # read back at a time: fits in the cache of a core
_ROW_BYTES = 32  # memory per row, besides its values, while its bucket is sorted


class CscMatrix(SourceMatrix):
    """A CSC matrix, transposed through temporary files that take the values and 4 (or 8) more bytes per value.

    Memory is bounded by a few `window_bytes`. A window has at most `window_bytes`, or a single row.
    """

    encoding = "csc"

    def __init__(self, node: Node, name: str, *, shape: tuple[int, int], window_bytes: int) -> None:
        super().__init__(name, n_rows=shape[0], n_genes=shape[1])
        self._stored = CompressedArrays(node, axes=("gene", "row"), major=shape[1], minor=shape[0])
        self.n_stored: int = self._stored.n_values
        self.dtype = self._stored.dtype
        self.genes_dtype, self.indptr_dtype = self._stored.genes_dtype, self._stored.indptr_dtype
        self._bits = np.dtype(f"u{self.dtype.itemsize}")  # values are only moved, and numba has no float16
        self._genes = smallest_index(self.n_genes)
        element_bytes = self.dtype.itemsize + self._genes.itemsize
        self._window_elements = window_bytes // element_bytes
        self._read_elements = window_bytes // self._stored.element_bytes
        bucket_rows = rows_per_bucket(
            n_rows=self.n_rows,
            total_bytes=self.n_stored * element_bytes + self.n_rows * _ROW_BYTES,
            bucket_bytes=window_bytes,
        )
        self._row_bits = bucket_rows.bit_length() - 1  # a power of two, so a shift finds the bucket
        self._gene_bits = max(0, self.n_genes - 1).bit_length()
        self._keys = np.dtype(np.uint32 if self._row_bits + self._gene_bits <= 32 else np.uint64)
        self._n_buckets = -(-self.n_rows // (1 << self._row_bits))
        self._spill: Spill | None = None
        self._is_complete = False

    def _transpose(self) -> None:
        self.close()
        self._spill = Spill(
            [self._keys, self._bits],
            n_buckets=self._n_buckets,
            purpose=f"transpose {self.name}",
            takes_bytes=self.n_stored * (self._keys.itemsize + self.dtype.itemsize),
        )
        windows = self._stored.windows(self._read_elements, whole=False)
        for _ in applied_in_background(windows, self._write_section):
            pass
        self._is_complete = True

    def _write_section(self, window: tuple[int, Rows, NDArray[np.integer], NDArray[Any]]) -> None:
        """Writes a window of genes as one section. Genes stay in order within each bucket."""
        assert self._spill is not None
        first_gene, indptr, rows, values = window
        sizes = np.zeros(self._n_buckets, np.int64)
        _count_buckets(rows, self._row_bits, sizes)
        cuts = indptr_of(sizes)
        keys, partitioned = np.empty(len(rows), self._keys), np.empty(len(rows), self._bits)
        bits = (self._row_bits, self._gene_bits)
        columns = (indptr, rows, values.view(self._bits))
        _partition_elements(columns, first_gene, bits, cuts[:-1].copy(), (keys, partitioned))
        self._spill.write(0, keys)
        self._spill.write(1, partitioned)
        self._spill.end_section(cuts)

    def windows(self, first_row: int = 0) -> Iterator[Window]:
        if not self._is_complete:
            self._transpose()
        skipped = first_row >> self._row_bits
        yield from skip_rows(self._sorted(skipped), first_row - (skipped << self._row_bits))

    def _sorted(self, skipped: int) -> Iterator[Window]:
        """The windows of the buckets from number `skipped` on."""
        assert self._spill is not None
        for bucket, cuts in enumerate(self._spill.buckets(skipped), skipped):
            n_rows = min(1 << self._row_bits, self.n_rows - (bucket << self._row_bits))
            lengths = np.zeros(n_rows, np.int64)
            sections = split_rows(indptr_of(cuts[:, 1] - cuts[:, 0]), _BLOCK_ELEMENTS)
            blocks = [cuts[first:last] for first, last in sections]
            for block in blocks:
                _count_rows(self._spill.read(0, block), self._gene_bits, lengths)
            for first, last in split_rows(indptr_of(lengths), self._window_elements):
                yield self._window(lengths[first:last], first, blocks, bucket << self._row_bits)

    def _window(self, lengths: Rows, first: int, blocks: list[Rows], bucket_row: int) -> Window:
        """A window of the rows of a bucket from its row `first` on. `bucket_row` is the row at which it begins."""
        assert self._spill is not None
        indptr = indptr_of(lengths)
        genes, values = np.empty(indptr[-1], self._genes), np.empty(indptr[-1], self.dtype)
        next_of_row = indptr[:-1].copy()
        for block in blocks:
            stored = self._spill.read(0, block), self._spill.read(1, block)
            _scatter_elements(stored, self._gene_bits, first, next_of_row, (genes, values.view(self._bits)))
        return canonical(indptr, genes, values, at=self._stored.at, first_row=bucket_row + first)

    def close(self) -> None:
        if self._spill is not None:
            self._spill.close()
        self._spill, self._is_complete = None, False


@compiled
def _count_buckets(rows: NDArray[np.integer], row_bits: int, sizes: Rows) -> None:
    for i in range(len(rows)):
        sizes[np.int64(rows[i]) >> row_bits] += 1


@compiled
def _partition_elements(
    window: tuple[Rows, NDArray[Any], NDArray[Any]],
    first_gene: int,
    bits: tuple[int, int],
    next_of_bucket: Rows,
    out: tuple[NDArray[Any], NDArray[Any]],
) -> None:
    """Appends the key and value of each element to its bucket. `next_of_bucket` holds the write positions."""
    indptr, rows, values = window
    row_bits, gene_bits = bits
    out_keys, out_values = out
    for gene in range(len(indptr) - 1):
        for i in range(indptr[gene], indptr[gene + 1]):
            row = np.int64(rows[i])
            bucket = row >> row_bits
            at = next_of_bucket[bucket]
            next_of_bucket[bucket] = at + 1
            out_keys[at] = ((row - (bucket << row_bits)) << gene_bits) | (first_gene + gene)
            out_values[at] = values[i]


@compiled
def _count_rows(keys: NDArray[Any], gene_bits: int, lengths: Rows) -> None:
    for i in range(len(keys)):
        lengths[np.int64(keys[i]) >> gene_bits] += 1


@compiled
def _scatter_elements(
    stored: tuple[NDArray[Any], NDArray[Any]],
    gene_bits: int,
    first: int,
    next_of_row: Rows,
    out: tuple[NDArray[Any], NDArray[Any]],
) -> None:
    """Appends the gene and value of each element to its row. Skips rows outside `next_of_row`, the write positions."""
    keys, values = stored
    out_genes, out_values = out
    for i in range(len(keys)):
        key = np.int64(keys[i])
        row = (key >> gene_bits) - first
        if row >= 0 and row < len(next_of_row):
            at = next_of_row[row]
            next_of_row[row] = at + 1
            out_genes[at] = key & ((1 << gene_bits) - 1)
            out_values[at] = values[i]
