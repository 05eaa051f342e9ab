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
import math
import os
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import scipy.sparse
from numpy.typing import NDArray

from zloader.common.compiled import compiled, load_compiler
from zloader.common.errors import OptionError, SourceError, StoreError
from zloader.common.locks import cached_property
from zloader.common.options import MiB
from zloader.common.records import Rows
from zloader.conversion.nodes import Node
from zloader.conversion.port import Content, Matrix, Window
from zloader.conversion.rows import canonical, split_rows
from zloader.reading.gather import indptr_of
from zloader.reading.loops import copy_rows

_CUTS_IN_MEMORY = 1 << 20  # 8 MiB
_TRANSPOSED_ROW_BYTES = 32  # memory per row, besides its values, while its bucket is sorted
_BUCKET_SHARE = 0.85  # of a window: row lengths vary, and this way few buckets need a second window
_ROW_BYTES = 64  # memory per row, besides its values, while it is partitioned or gathered
_BLOCK_ELEMENTS = 1 << 18  # gathered and written at a time: fits in the cache of a core

SOURCE_ROW = "source_row"  # the obs column with the original row number of each row

Permutation: TypeAlias = Callable[[Rows], Rows]  # maps source rows to rows of the result


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
        *self._columns, self._cuts = (_file() for _ in (*dtypes, "cuts"))
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

    def buckets(self, first: int) -> Iterator[Rows]:
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


class _SpilledMatrix(Matrix):
    """A matrix whose rows are put in order through temporary files, in buckets of `_bucket_rows` rows.

    Memory is bounded by a few `window_bytes`. A window has at most `window_bytes`, or a single row. Raises StoreError
    if the temporary directory is full.
    """

    _bucket_rows: int
    _spills: tuple[Spill, ...] = ()
    _is_complete = False

    def windows(self, first_row: int = 0) -> Iterator[Window]:
        """See Matrix. Reads the source first."""
        if not self._is_complete:
            _SpilledMatrix.close(self)
            self._spill()
            self._is_complete = True
        first = first_row // self._bucket_rows
        skipped = first_row - first * self._bucket_rows
        cuts = zip(*(spill.buckets(first) for spill in self._spills), strict=True)
        for bucket, of_bucket in enumerate(cuts, first):
            for window in self._in_bucket(bucket, *of_bucket):
                n_rows = len(window.lengths)
                if skipped < n_rows:
                    yield window.between(skipped, n_rows) if skipped else window
                skipped = max(0, skipped - n_rows)

    def _rows_of(self, bucket_bytes: int, total_bytes: int) -> int:
        """The number of rows in a bucket of `bucket_bytes` if all rows take `total_bytes`; at least one."""
        return max(1, -(-self.n_rows // max(1, -(-total_bytes // max(1, bucket_bytes)))))

    @abstractmethod
    def _spill(self) -> None:
        """Reads the source, and writes it to new temporary files."""

    @abstractmethod
    def _in_bucket(self, bucket: int, *cuts: Rows) -> Iterator[Window]:
        """The windows of a bucket, given its items in each section of each spill."""

    def _new_spill(self, dtypes: Sequence[Any], purpose: str, takes_bytes: int) -> Spill:
        n_buckets = -(-self.n_rows // self._bucket_rows)
        return Spill(dtypes, n_buckets=n_buckets, purpose=f"{purpose} {self.name}", takes_bytes=takes_bytes)

    def close(self) -> None:
        for spill in self._spills:
            spill.close()
        self._spills, self._is_complete = (), False


def _in_background(items: Iterator[Any], write: Callable[[Any], None]) -> None:
    """Calls `write` with each of some items in a thread, while the next is read. Raises its exceptions."""
    with ThreadPoolExecutor(1, thread_name_prefix="zloader-spill") as thread:
        job = None
        for item in items:
            if job is not None:
                job.result()
            job = thread.submit(write, item)
        if job is not None:
            job.result()


# ---- transposing


class CscMatrix(_SpilledMatrix):
    """A CSC matrix, transposed through temporary files that take the values and 4 (or 8) more bytes per value.

    Raises SourceError for arrays that do not fit together, and in `windows` for rows that are out of range.
    """

    dense = False

    def __init__(self, node: Node, name: str, *, shape: tuple[int, int], window_bytes: int) -> None:
        super().__init__(name, n_rows=shape[0], n_genes=shape[1])
        self._at, indptr = node.at, node["indptr"]
        self._rows, self._values = node["indices"], node["data"]
        self.dtype, self.genes_dtype = self._values.number_dtype, self._rows.number_dtype
        if self.genes_dtype.kind not in "iu" or indptr.number_dtype.kind not in "iu":
            raise SourceError(f"{self._at}/indices and indptr must hold integers: the file is damaged")
        self.n_stored: int = math.prod(self._values.shape)
        if indptr.shape != (self.n_genes + 1,) or self._rows.shape != (self.n_stored,) != self._values.shape:
            raise SourceError(
                f"{self._at} has {self.n_genes} genes, but {indptr.shape} entries in indptr, {self._rows.shape} in "
                f"indices and {self._values.shape} in data: the file is damaged"
            )
        self._ends = indptr.numbers(0, self.n_genes + 1).astype(np.int64)
        steps = np.diff(self._ends, prepend=0, append=self.n_stored)
        steps[[0, -1]] = -np.abs(steps[[0, -1]])  # it begins with 0, and ends with the number of values
        if (steps < 0).any():
            raise SourceError(
                f"{self._at}/indptr does not ascend from 0 to the {self.n_stored} values, it is wrong at gene "
                f"{max(0, int((steps < 0).argmax()) - 1)}: the file is damaged"
            )
        self._bits = np.dtype(f"u{self.dtype.itemsize}")  # values are only moved, and numba has no float16
        self._genes = np.min_scalar_type(max(0, self.n_genes - 1))
        element_bytes = self.dtype.itemsize + self._genes.itemsize
        self._window_elements = window_bytes // element_bytes
        self._read_elements = max(1, window_bytes // (self.dtype.itemsize + self.genes_dtype.itemsize))
        total_bytes = self.n_stored * element_bytes + self.n_rows * _TRANSPOSED_ROW_BYTES
        n_rows = self._rows_of(window_bytes, total_bytes)
        self._row_bits = n_rows.bit_length() - 1  # a power of two, so a shift finds the bucket
        self._bucket_rows = 1 << self._row_bits
        self._gene_bits = max(0, self.n_genes - 1).bit_length()
        self._keys = np.dtype(np.uint32 if self._row_bits + self._gene_bits <= 32 else np.uint64)

    def _spill(self) -> None:
        takes_bytes = self.n_stored * (self._keys.itemsize + self.dtype.itemsize)
        self._spills = (self._new_spill([self._keys, self._bits], "transpose", takes_bytes),)
        _in_background(self._read(), self._write_section)

    def _read(self) -> Iterator[tuple[int, Rows, NDArray[np.integer], NDArray[Any]]]:
        """Windows of genes: the first gene, the ends of its genes, and their rows and values."""
        for first, last in split_rows(self._ends, self._read_elements):
            ends = self._ends[first : last + 1]
            for begin in range(ends[0], ends[-1], self._read_elements):  # a long gene is in several windows
                end = min(begin + self._read_elements, int(ends[-1]))
                rows, within = self._rows.numbers(begin, end), np.clip(ends, begin, end) - begin
                if rows.min() < 0 or rows.max() >= self.n_rows:
                    wrong = int(np.flatnonzero((rows < 0) | (rows >= self.n_rows))[0])
                    gene = first + int(np.searchsorted(within, wrong, side="right")) - 1
                    raise SourceError(
                        f"{self._at}: gene {gene} has a value for row {rows[wrong]}, but rows range from 0 to "
                        f"{self.n_rows - 1}: the file is damaged"
                    )
                yield first, within, rows, self._values.numbers(begin, end)

    def _write_section(self, window: tuple[int, Rows, NDArray[np.integer], NDArray[Any]]) -> None:
        """Writes a window of genes as one section. Genes stay in order within each bucket."""
        first_gene, ends, rows, values = window
        sizes = np.zeros(-(-self.n_rows // self._bucket_rows), np.int64)
        _count(rows, self._row_bits, sizes)
        cuts = indptr_of(sizes)
        keys, partitioned = np.empty(len(rows), self._keys), np.empty(len(rows), self._bits)
        columns, bits = (ends, rows, values.view(self._bits)), (self._row_bits, self._gene_bits)
        _partition_elements(columns, first_gene, bits, cuts[:-1].copy(), (keys, partitioned))
        self._spills[0].write(0, keys)
        self._spills[0].write(1, partitioned)
        self._spills[0].end_section(cuts)

    def _in_bucket(self, bucket: int, *cuts: Rows) -> Iterator[Window]:
        (spill,), (of_bucket,) = self._spills, cuts
        bucket_row = bucket * self._bucket_rows
        lengths = np.zeros(min(self._bucket_rows, self.n_rows - bucket_row), np.int64)
        sections = split_rows(indptr_of(of_bucket[:, 1] - of_bucket[:, 0]), _BLOCK_ELEMENTS)
        blocks = [of_bucket[first:last] for first, last in sections]
        for block in blocks:
            _count(spill.read(0, block), self._gene_bits, lengths)
        for first, last in split_rows(indptr_of(lengths), self._window_elements):
            indptr = indptr_of(lengths[first:last])
            genes, values = np.empty(indptr[-1], self._genes), np.empty(indptr[-1], self.dtype)
            next_of_row, out = indptr[:-1].copy(), (genes, values.view(self._bits))
            for block in blocks:
                stored = spill.read(0, block), spill.read(1, block)
                _scatter_elements(stored, self._gene_bits, first, next_of_row, out)
            yield canonical(indptr, genes, values, at=self._at, first_row=bucket_row + first)


@compiled
def _count(numbers: NDArray[np.integer], bits: int, sizes: Rows) -> None:
    """Counts numbers by their bits above the lowest `bits`."""
    for i in range(len(numbers)):
        sizes[np.int64(numbers[i]) >> bits] += 1


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


# ---- permuting


class ShuffledMatrix(_SpilledMatrix):
    """The rows of `inner`, permuted: row r becomes row `permutation([r])` of the result.

    With `columns`, the columns of a square matrix are permuted in the same way.
    """

    def __init__(
        self, inner: Matrix, permutation: Permutation, *, window_bytes: int = 64 * MiB, columns: bool = False
    ) -> None:
        super().__init__(inner.name, n_rows=inner.n_rows, n_genes=inner.n_genes)
        self.dense, self.dtype, self.genes_dtype = inner.dense, inner.dtype, inner.genes_dtype
        # Without the number of values, rows cannot be dealt to buckets.
        n_stored = inner.n_stored if inner.n_stored is not None else sum(len(each.values) for each in inner.windows())
        self.n_stored: int = n_stored
        self._inner, self._permutation, self._columns = inner, permutation, columns
        # Values are only moved, so any type of their size works: numba has no float16.
        stored = [np.dtype(f"u{self.dtype.itemsize}"), np.min_scalar_type(max(0, self.n_genes - 1))]
        self._stored = stored[:1] if self.dense else stored
        self._element_bytes = sum(dtype.itemsize for dtype in self._stored)
        self._window_bytes = window_bytes
        total_bytes = self.n_stored * self._element_bytes + self.n_rows * _ROW_BYTES
        self._bucket_rows = self._rows_of(int(window_bytes * _BUCKET_SHARE), total_bytes)
        self._section: list[tuple[Rows, Window]] = []  # positions and windows of the section being read
        self._section_bytes = 0

    def _spill(self) -> None:
        """Writes the rows (position, length) and the elements (value, gene)."""
        takes_bytes = self.n_stored * self._element_bytes + self.n_rows * 16
        columns: Sequence[Any] = ([np.int64, np.int64], self._stored)
        self._spills = tuple(self._new_spill(dtypes, "shuffle", takes_bytes) for dtypes in columns)
        self._section, self._section_bytes = [], 0
        _in_background(self._permuted(), self._add)
        if self._section:
            self._write_section()
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
        rows, elements = self._spills
        positions = np.concatenate([at for at, _ in self._section])
        lengths = np.concatenate([window.lengths for _, window in self._section])
        order = np.argsort(positions)
        starts = (np.cumsum(lengths) - lengths)[order]
        positions, lengths = positions[order], lengths[order]
        indptr = indptr_of(lengths)
        cuts = np.searchsorted(positions, np.arange(-(-self.n_rows // self._bucket_rows) + 1) * self._bucket_rows)
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

    def _in_bucket(self, bucket: int, *cuts: Rows) -> Iterator[Window]:
        (rows, elements), (row_cuts, of_bucket) = self._spills, cuts
        positions, stored = rows.read(0, row_cuts) - bucket * self._bucket_rows, rows.read(1, row_cuts)
        lengths = np.empty_like(stored)
        lengths[positions] = stored
        indptr = indptr_of(lengths)
        row_ends, ends = (indptr_of(each[:, 1] - each[:, 0]) for each in (row_cuts, of_bucket))
        for first, last in split_rows(indptr, self._window_bytes // self._element_bytes):
            n = int(indptr[last] - indptr[first])
            values = np.empty(n, self.dtype)
            genes = np.empty(0, np.int64) if self.dense else np.empty(n, self._stored[1])
            for begin, end in split_rows(ends, _BLOCK_ELEMENTS):  # groups of sections
                of_block = slice(row_ends[begin], row_ends[end])
                within = (positions[of_block] >= first) & (positions[of_block] < last)
                n_values = stored[of_block]
                starts = (np.cumsum(n_values) - n_values)[within]
                at = indptr[positions[of_block][within]] - indptr[first]
                for column, out in enumerate(self._as_stored(values, genes)):
                    block = elements.read(column, of_bucket[begin:end])
                    copy_rows(block, starts, n_values[within], at, out)
            yield Window(lengths=lengths[first:last], genes=genes, values=values)

    def close(self) -> None:
        super().close()
        self._section = []
        self._inner.close()


class ArrangedContent(Content):
    """A Content with its rows in another order. Raises OptionError if obs already has a column `source_row`."""

    def __init__(self, content: Content, positions: Permutation, *, bucket_bytes: int) -> None:
        """`positions` gives the new positions of source rows. `bucket_bytes` bounds the memory for sorting rows."""
        if SOURCE_ROW in content.obs_columns:
            raise OptionError(
                f"obs already has a column {SOURCE_ROW!r}: choose other columns with "
                "select=zl.Selection(obs=[...]) (--obs)"
            )
        self._content, self._positions, self._bucket_bytes = content, positions, bucket_bytes
        self.n_rows, self.var, self.raw_var = content.n_rows, content.var, content.raw_var
        self.dropped, self.groups = content.dropped, content.groups
        self.obs_columns = [*content.obs_columns, SOURCE_ROW]

    @cached_property
    def order(self) -> Rows:
        """The source row of each row, in the new order."""
        rows = np.arange(self.n_rows, dtype=np.int64)
        order = np.empty_like(rows)
        order[self._positions(rows)] = rows
        return order

    def obs_names(self) -> pd.Index:
        return self._content.obs_names()[self.order]

    def obs_column(self, name: str) -> pd.Series:
        if name == SOURCE_ROW:
            return pd.Series(self.order)
        return self._content.obs_column(name).iloc[self.order].reset_index(drop=True)

    def matrices(self) -> Iterator[Matrix]:
        """Each is rearranged out of core."""
        for matrix in self._content.matrices():
            square = matrix.name.startswith("obsp/")
            yield ShuffledMatrix(matrix, self._positions, window_bytes=self._bucket_bytes, columns=square)

    def elements(self) -> Iterator[tuple[str, Any]]:
        """Those by row are in the new order, and so are the rows of modalities."""
        for path, element in self._content.elements():
            if path.startswith(("obsm/", "obsp/")):
                rows = element.tocsr() if scipy.sparse.issparse(element) else element
                element = rows.iloc[self.order] if isinstance(rows, pd.DataFrame) else rows[self.order]
                if path.startswith("obsp/"):
                    element = element[:, self.order]
            elif path.startswith("obsmap/"):
                has = np.asarray(element).reshape(-1)[self.order] > 0
                element = np.where(has, np.cumsum(has), 0).astype(element.dtype)
            yield path, element
