"""Rows in another order, out of core: a CSC matrix is transposed to rows, and the rows of any matrix are permuted.

Both partition windows of the source into buckets of consecutive rows of the result, and write them sequentially, as
sections of temporary files (`Spill`). Each bucket fits in memory, and is then put in order. The source is read once.

- Transposing writes pairs of a value and a key, which packs the row within the bucket and the gene. A bucket is sorted
  by row with a counting sort.
- Permuting collects windows until they fill a section, and gathers each bucket from all sections. A matrix of n
  sections has about n buckets, so it is read back in n * n pieces of 1/n section each. For example, 1 TB in sections of
  256 MiB is read back in 16 million pieces of 64 KiB.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from zloader.common.compiled import compiled, load_compiler
from zloader.common.errors import StoreError
from zloader.common.options import MiB
from zloader.common.records import Rows
from zloader.conversion.compressed import CompressedArrays, skip_rows
from zloader.conversion.nodes import Node
from zloader.conversion.port import Matrix, Window
from zloader.conversion.rows import canonical, split_rows
from zloader.reading.gather import indptr_of
from zloader.reading.loops import copy_rows

_CUTS_IN_MEMORY = 1 << 20  # 8 MiB
_TRANSPOSED_ROW_BYTES = 32  # memory per row, besides its values, while its bucket is sorted
_BUCKET_SHARE = 0.85  # of a window: row lengths vary, and this way few buckets need a second window
_ROW_BYTES = 64  # memory per row, besides its values, while it is partitioned or gathered
_BLOCK_ELEMENTS = 1 << 18  # gathered and written at a time: fits in the cache of a core

Permutation: TypeAlias = Callable[[Rows], Rows]  # maps source rows to rows of the result

Item = TypeVar("Item")


class Spill:
    """`n_buckets` buckets of items that have one column per dtype in `dtypes`.

    A spill has one file per column. Items are written in sections: a section holds the items that were in memory
    together, sorted by bucket. To read a bucket, its part of every section is read. The boundaries of the buckets are
    in another file, because there are sections times buckets of them. The files are unlinked, so the kernel removes
    them when the process ends.

    If the disk is full, StoreError reports the `purpose` and the `takes_bytes` needed in all.
    """

    def __init__(self, dtypes: Sequence[Any], *, n_buckets: int, purpose: str, takes_bytes: int) -> None:
        self._dtypes = [np.dtype(dtype) for dtype in dtypes]
        self._n_buckets, self._purpose, self._takes_bytes = n_buckets, purpose, takes_bytes
        self._columns = [_file() for _ in dtypes]
        self._cuts = _file()
        self._n_sections = self._n_items = 0

    def write(self, column: int, items: NDArray[Any]) -> None:
        """Appends items, which have the dtype of the column, to a column of the current section."""
        assert items.dtype == self._dtypes[column]
        self._append(self._columns[column], items)

    def end_section(self, cuts: Rows) -> None:
        """Ends the current section. Bucket b is its items `[cuts[b], cuts[b + 1])`."""
        self._append(self._cuts, cuts + self._n_items)
        self._n_sections += 1
        self._n_items += int(cuts[-1])

    def _append(self, file: Any, items: NDArray[Any]) -> None:
        left = memoryview(np.ascontiguousarray(items).reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        try:
            while left:
                left = left[file.write(left) :]
        except OSError as error:
            raise StoreError(
                f"cannot {self._purpose}: {tempfile.gettempdir()} is too small ({error.strerror}). It takes "
                f"{self._takes_bytes} bytes: set TMPDIR to a directory on a larger disk"
            ) from error

    def buckets(self, first: int = 0) -> Iterator[Rows]:
        """Yields, for each bucket from `first` on, its items `[start, stop)` in each section, of shape sections x 2."""
        at_once = max(1, _CUTS_IN_MEMORY // max(1, self._n_sections))
        for begin in range(first, self._n_buckets, at_once):
            end = min(begin + at_once, self._n_buckets)
            cuts = np.empty((self._n_sections, end - begin + 1), np.int64)
            for section in range(self._n_sections):
                _read(self._cuts, section * (self._n_buckets + 1) + begin, cuts[section])
            for bucket in range(end - begin):
                yield cuts[:, bucket : bucket + 2]

    def read(self, column: int, cuts: Rows) -> NDArray[Any]:
        """The items of a column between the two `cuts` of each section, concatenated."""
        items = np.empty(int((cuts[:, 1] - cuts[:, 0]).sum()), self._dtypes[column])
        at = 0
        for start, stop in cuts.tolist():
            _read(self._columns[column], start, items[at : at + stop - start])
            at += stop - start
        return items

    def close(self) -> None:
        """Frees the disk space."""
        for file in (*self._columns, self._cuts):
            file.close()


def _file() -> Any:
    return tempfile.TemporaryFile(prefix="zloader-", buffering=0)


def _read(file: Any, start: int, items: NDArray[Any]) -> None:
    left, offset = memoryview(items.view(np.uint8)), start * items.itemsize  # type: ignore[arg-type]
    while left:
        n_read = os.preadv(file.fileno(), [left], offset)
        if n_read == 0:
            raise StoreError(f"a temporary file in {tempfile.gettempdir()} was truncated: run convert again")
        left, offset = left[n_read:], offset + n_read


def rows_per_bucket(*, n_rows: int, total_bytes: int, bucket_bytes: int) -> int:
    """The number of rows in a bucket of `bucket_bytes` if all rows take `total_bytes`; at least one."""
    return max(1, -(-n_rows // max(1, -(-total_bytes // bucket_bytes))))


def smallest_index(n: int) -> np.dtype[Any]:
    """The smallest unsigned dtype that holds every number below `n`."""
    return np.min_scalar_type(max(0, n - 1))


def applied_in_background(items: Iterator[Item], do: Callable[[Item], None]) -> Iterator[Item]:
    """Yields `items` while a thread applies `do` to each of them. Passes on the exceptions of `do`."""
    with ThreadPoolExecutor(1, thread_name_prefix="zloader-spill") as thread:
        job = None
        for item in items:
            if job is not None:
                job.result()
            job = thread.submit(do, item)
            yield item
        if job is not None:
            job.result()


class CscMatrix(Matrix):
    """A CSC matrix, transposed through temporary files that take the values and 4 (or 8) more bytes per value.

    Memory is bounded by a few `window_bytes`. A window has at most `window_bytes`, or a single row.
    """

    dense = False

    def __init__(self, node: Node, name: str, *, shape: tuple[int, int], window_bytes: int) -> None:
        super().__init__(name, n_rows=shape[0], n_genes=shape[1])
        self._stored = CompressedArrays(node, axes=("gene", "row"), major=shape[1], minor=shape[0])
        self.n_stored: int = self._stored.n_values
        self.dtype = self._stored.dtype
        self.genes_dtype = self._stored.genes_dtype
        self._bits = np.dtype(f"u{self.dtype.itemsize}")  # values are only moved, and numba has no float16
        self._genes = smallest_index(self.n_genes)
        element_bytes = self.dtype.itemsize + self._genes.itemsize
        self._window_elements = window_bytes // element_bytes
        self._read_elements = window_bytes // self._stored.element_bytes
        bucket_rows = rows_per_bucket(
            n_rows=self.n_rows,
            total_bytes=self.n_stored * element_bytes + self.n_rows * _TRANSPOSED_ROW_BYTES,
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


class ShuffledMatrix(Matrix):
    """The rows of `inner`, permuted: row r becomes row `permutation([r])` of the result.

    With `columns`, the columns of a square matrix are permuted in the same way. Memory is bounded by a few
    `window_bytes`. A window has at most `window_bytes`, or a single row. Raises StoreError if the temporary directory
    is full.
    """

    def __init__(
        self, inner: Matrix, permutation: Permutation, *, window_bytes: int = 64 * MiB, columns: bool = False
    ) -> None:
        super().__init__(inner.name, n_rows=inner.n_rows, n_genes=inner.n_genes)
        self.dense = inner.dense
        self.n_stored: int = _counted(inner) if inner.n_stored is None else inner.n_stored
        self.dtype = inner.dtype
        self.genes_dtype = inner.genes_dtype
        self._inner, self._permutation, self._columns = inner, permutation, columns
        # Values are only moved, so any type of their size works: numba has no float16.
        stored = [np.dtype(f"u{self.dtype.itemsize}"), smallest_index(self.n_genes)]
        self._stored = stored[:1] if self.dense else stored
        self._element_bytes = sum(dtype.itemsize for dtype in self._stored)
        self._window_bytes = window_bytes
        self._bucket_rows = rows_per_bucket(
            n_rows=self.n_rows,
            total_bytes=self.n_stored * self._element_bytes + self.n_rows * _ROW_BYTES,
            bucket_bytes=max(1, int(window_bytes * _BUCKET_SHARE)),
        )
        self._n_buckets = -(-self.n_rows // self._bucket_rows)
        self._spills: tuple[Spill, ...] = ()  # rows (position, length) and elements (value, gene)
        self._section: list[tuple[Rows, Window]] = []  # positions and windows of the section being read
        self._section_bytes = 0
        self._is_complete = False

    def _partition(self) -> None:
        """Writes the temporary files."""
        self._free()
        spill = partial(
            Spill,
            n_buckets=self._n_buckets,
            purpose=f"shuffle {self.name}",
            takes_bytes=self.n_stored * self._element_bytes + self.n_rows * 16,
        )
        self._spills = (spill([np.int64, np.int64]), spill(self._stored))
        for _ in applied_in_background(self._permuted(), self._add):
            pass
        self._write_section()
        self._is_complete = True
        self._inner.close()  # its temporary files are no longer needed

    def _permuted(self) -> Iterator[tuple[Rows, Window]]:
        n_rows = 0
        for window in self._inner.windows():
            rows = np.arange(n_rows, n_rows + len(window.lengths))
            n_rows += len(rows)
            if self._columns:
                genes = self._permutation(window.genes.astype(np.int64))
                order = np.lexsort((genes, np.repeat(np.arange(len(window.lengths)), window.lengths)))
                window = dataclasses.replace(window, genes=genes[order], values=window.values[order])
            yield self._permutation(rows), window

    def _add(self, placed: tuple[Rows, Window]) -> None:
        """Adds a window to the section, and writes the section once it is full."""
        _, window = placed
        self._section.append(placed)
        self._section_bytes += window.values.nbytes + window.genes.nbytes + len(window.lengths) * _ROW_BYTES
        if self._section_bytes >= self._window_bytes:
            self._write_section()

    def _write_section(self) -> None:
        """Writes the collected windows as one section, sorted by position."""
        if not self._section:
            return
        rows, elements = self._spills
        positions = np.concatenate([at for at, _ in self._section])
        lengths = np.concatenate([window.lengths for _, window in self._section])
        order = np.argsort(positions)
        starts = (np.cumsum(lengths) - lengths)[order]
        positions, lengths = positions[order], lengths[order]
        indptr = indptr_of(lengths)
        cuts = np.searchsorted(positions, np.arange(self._n_buckets + 1) * self._bucket_rows)
        rows.write(0, positions)
        rows.write(1, lengths)
        rows.end_section(cuts)
        load_compiler()  # for all sections together, there are many rows
        columns = zip(*(self._as_stored(window.values, window.genes) for _, window in self._section), strict=True)
        for column, (dtype, parts) in enumerate(zip(self._stored, columns, strict=True)):
            source = np.concatenate(parts, dtype=dtype, casting="unsafe")
            block = np.empty(max(min(_BLOCK_ELEMENTS, len(source)), lengths.max(initial=0)), dtype)
            for first, last in split_rows(indptr, _BLOCK_ELEMENTS):
                out = block[: indptr[last] - indptr[first]]
                copy_rows(source, starts[first:last], lengths[first:last], indptr[first:last] - indptr[first], out)
                elements.write(column, out)
        elements.end_section(indptr[cuts])
        self._section, self._section_bytes = [], 0

    def _as_stored(self, values: NDArray[Any], genes: NDArray[Any]) -> list[NDArray[Any]]:
        """The columns to spill: the bits of `values` and, for a sparse matrix, `genes`."""
        return [values.view(self._stored[0]), genes][: len(self._stored)]

    def windows(self, first_row: int = 0) -> Iterator[Window]:
        """See Matrix. Reads the source first."""
        if not self._is_complete:
            self._partition()
        skipped = first_row // self._bucket_rows
        yield from skip_rows(self._gathered(skipped), first_row - skipped * self._bucket_rows)

    def _gathered(self, skipped: int) -> Iterator[Window]:
        """The windows of the buckets from number `skipped` on."""
        rows, elements = self._spills
        both_cuts = zip(rows.buckets(skipped), elements.buckets(skipped), strict=True)
        for bucket, (row_cuts, cuts) in enumerate(both_cuts, skipped):
            positions = rows.read(0, row_cuts) - bucket * self._bucket_rows
            lengths = rows.read(1, row_cuts)
            in_order = np.empty_like(lengths)
            in_order[positions] = lengths
            indptr = indptr_of(in_order)
            blocks = list(_blocks(row_cuts, cuts))
            for first, last in split_rows(indptr, self._window_bytes // self._element_bytes):
                yield self._window(in_order[first:last], lengths, indptr[positions] - indptr[first], blocks)

    def _window(self, lengths: Rows, stored: Rows, starts: Rows, blocks: list[tuple[slice, Rows]]) -> Window:
        """A window of consecutive rows of a bucket, with these `lengths`.

        `stored` are the lengths of all rows of the bucket in stored order, `starts` their offsets in the window.
        """
        n = int(lengths.sum())
        values = np.empty(n, self.dtype)
        genes = np.empty(n, self._stored[1]) if not self.dense else np.empty(0, np.int64)
        for rows, cuts in blocks:
            for column, out in enumerate(self._as_stored(values, genes)):
                _scatter_rows(self._spills[1].read(column, cuts), stored[rows], starts[rows], out)
        return Window(lengths=lengths, genes=genes, values=values)

    def close(self) -> None:
        self._free()
        self._inner.close()

    def _free(self) -> None:
        for spill in self._spills:
            spill.close()
        self._spills, self._is_complete = (), False
        self._section, self._section_bytes = [], 0


def _counted(matrix: Matrix) -> int:
    """The number of values of a matrix that does not tell it, without which rows cannot be dealt to buckets."""
    return sum(len(window.values) for window in matrix.windows())


def _blocks(row_cuts: Rows, cuts: Rows) -> Iterator[tuple[slice, Rows]]:
    """Splits a bucket into groups of sections: a slice of its rows, and the cuts of the elements of these rows."""
    row_ends, ends = (indptr_of(each[:, 1] - each[:, 0]) for each in (row_cuts, cuts))
    for first, last in split_rows(ends, _BLOCK_ELEMENTS):
        yield slice(row_ends[first], row_ends[last]), cuts[first:last]


@compiled
def _scatter_rows(rows: NDArray[Any], lengths: Rows, starts: Rows, out: NDArray[Any]) -> None:
    """Copies contiguous rows to their `starts` in `out`; skips the rows that lie outside."""
    at = 0
    for row in range(len(lengths)):
        n, start = lengths[row], starts[row]
        if start >= 0 and start + n <= len(out):
            source = rows[at : at + n]
            target = out[start : start + n]
            for i in range(n):
                target[i] = source[i]
        at += n
