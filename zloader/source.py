"""The matrices of an .h5ad file as windows of rows, validated and canonical, in bounded memory.

CSR is read straight through. CSC is transposed out of core: its values are dealt to buckets of rows in one temporary
file (which has no name, so it goes when this process does), and each bucket, small enough for memory, is sorted by
row. Dense is read by rows. Every window can be read again, so a first pass may validate all and decide dtypes before
a second one writes.
"""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import h5py
import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from zloader.errors import SourceError, StoreError
from zloader.hdf5 import CompressedArrays, numeric_dtype, read_items, split_rows
from zloader.terms import Rows

Advance = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class Window:
    """Some rows of a matrix. CSR: `lengths` (values a row), `genes` (ascending within a row, each once), `values`.

    Dense: `values` alone, flat, row after row. `mended` counts rows that were not canonical in the file.
    """

    lengths: Rows
    genes: NDArray[np.integer]
    values: NDArray[Any]
    mended: int = 0


class SourceMatrix(ABC):
    """One matrix of the file. A context manager: what it holds outside the file is freed at the end."""

    encoding: str
    n_stored: int  # values in the file
    dtype: np.dtype[Any]
    genes_dtype: np.dtype[Any]
    indptr_dtype: np.dtype[Any]

    def __init__(self, name: str, *, n_rows: int, n_genes: int) -> None:
        self.name = name
        self.n_rows = n_rows
        self.n_genes = n_genes

    @property
    def n_reads(self) -> int:
        """Values read by `prepare` and one run of `windows` together."""
        return self.n_stored

    def prepare(self, advance: Advance) -> None:  # noqa: B027
        """Does what must precede `windows`, telling `advance` of values as they are read."""

    @abstractmethod
    def windows(self) -> Iterator[Window]:
        """All rows in order; the same at every call. Raises SourceError that names file and row."""

    def close(self) -> None:  # noqa: B027
        """Frees what is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_matrix(file: h5py.File, name: str, *, n_rows: int, n_genes: int, window_bytes: int) -> SourceMatrix:
    """The matrix at `name` (`X`, `layers/NAME`, `raw/X`), checked against the shape that obs and var ask for.

    `window_bytes` bounds the decoded values and indices held at once. Raises SourceError.
    """
    node = file[name]
    encoding = str(node.attrs.get("encoding-type", "array" if isinstance(node, h5py.Dataset) else "unknown"))
    kinds = {"csr_matrix": CsrMatrix, "csc_matrix": CscMatrix, "array": DenseMatrix}
    if encoding not in kinds:
        raise SourceError(f"{file.filename}: {name} is a {encoding}, not one of {', '.join(kinds)}")
    try:
        shape = tuple(int(size) for size in (node.shape if encoding == "array" else node.attrs["shape"]))
    except (KeyError, TypeError) as error:
        raise SourceError(f"{file.filename}: {name} has no shape: the file is damaged") from error
    if shape != (n_rows, n_genes):
        raise SourceError(f"{file.filename}: {name} has shape {shape}, but its obs and var ask for {(n_rows, n_genes)}")
    if encoding == "array":
        return DenseMatrix(node, name, window_bytes)
    return CsrMatrix(node, name, window_bytes) if encoding == "csr_matrix" else CscMatrix(node, name, window_bytes)


class DenseMatrix(SourceMatrix):
    """A dense dataset, read by rows."""

    encoding = "dense"
    genes_dtype = indptr_dtype = np.dtype(np.int64)

    def __init__(self, dataset: h5py.Dataset, name: str, window_bytes: int) -> None:
        super().__init__(name, n_rows=dataset.shape[0], n_genes=dataset.shape[1])
        self._dataset = dataset
        self.dtype = numeric_dtype(dataset)
        self.n_stored = self.n_rows * self.n_genes
        rows = max(1, window_bytes // max(1, self.n_genes * self.dtype.itemsize))
        stored_together = dataset.chunks[0] if dataset.chunks else 1
        # Whole HDF5 chunks where they fit, so that none is decompressed twice.
        self._window_rows = rows - rows % stored_together if rows > stored_together else rows

    def windows(self) -> Iterator[Window]:
        for first in range(0, self.n_rows, self._window_rows):
            values = read_items(self._dataset, first, min(first + self._window_rows, self.n_rows))
            yield Window(lengths=np.empty(0, np.int64), genes=np.empty(0, np.int64), values=values.reshape(-1))


class CsrMatrix(SourceMatrix):
    """A CSR group, read straight through."""

    encoding = "csr"

    def __init__(self, group: h5py.Group, name: str, window_bytes: int) -> None:
        n_rows, n_genes = (int(size) for size in group.attrs["shape"])
        super().__init__(name, n_rows=n_rows, n_genes=n_genes)
        self._stored = CompressedArrays(group, axes=("row", "gene"), major=n_rows, minor=n_genes)
        self._window_elements = window_bytes // self._stored.element_bytes
        self.n_stored, self.dtype = self._stored.n_values, self._stored.dtype
        self.genes_dtype, self.indptr_dtype = self._stored.indices.dtype, self._stored.indptr.dtype

    def windows(self) -> Iterator[Window]:
        for _, indptr, genes, values in self._stored.windows(self._window_elements):
            yield canonical(indptr, genes, values)


class CscMatrix(SourceMatrix):
    """A CSC group, transposed through a temporary file as large as its values with two 4-byte numbers each."""

    encoding = "csc"

    def __init__(self, group: h5py.Group, name: str, window_bytes: int) -> None:
        n_rows, n_genes = (int(size) for size in group.attrs["shape"])
        super().__init__(name, n_rows=n_rows, n_genes=n_genes)
        self._stored = CompressedArrays(group, axes=("gene", "row"), major=n_genes, minor=n_rows)
        self.n_stored, self.dtype = self._stored.n_values, self._stored.dtype
        self.genes_dtype, self.indptr_dtype = self._stored.indices.dtype, self._stored.indptr.dtype
        self._record = np.dtype([("row", "<u4"), ("gene", "<u4"), ("value", self.dtype)])
        # Sorting and converting a bucket takes about three times its records.
        self._window_elements = max(1, window_bytes // (3 * self._record.itemsize))
        self._spill: Any = None

    @property
    def n_reads(self) -> int:
        return 3 * self.n_stored

    def prepare(self, advance: Advance) -> None:
        counts = np.zeros(self.n_rows, np.int64)
        for _, _, rows, _ in self._stored.windows(self._window_elements):
            counts += np.bincount(rows.astype(np.int64, copy=False), minlength=self.n_rows)
            advance(len(rows))
        self._indptr = np.concatenate([[0], np.cumsum(counts)])
        self._buckets = list(split_rows(self._indptr, self._window_elements))
        self._spill = tempfile.TemporaryFile(prefix="zloader-")  # noqa: SIM115
        try:
            self._deal(advance)
        except OSError as error:
            raise StoreError(
                f"no room to transpose {self.name} in {tempfile.gettempdir()} ({error.strerror}): it takes "
                f"{self.n_stored * self._record.itemsize} bytes. Set TMPDIR to a larger disk"
            ) from error

    def _deal(self, advance: Advance) -> None:
        """Appends each value to the part of the file that belongs to its bucket; genes stay in order within it."""
        starts = np.array([first for first, _ in self._buckets], np.int64)
        ends = self._indptr[starts].copy()  # where the next record of each bucket goes
        descriptor = self._spill.fileno()
        for first_gene, indptr, minor, values in self._stored.windows(self._window_elements):
            rows = minor.astype(np.int64, copy=False)
            buckets = np.searchsorted(starts, rows, side="right") - 1
            order = np.argsort(buckets, kind="stable")
            records = np.empty(len(rows), self._record)
            records["row"] = (rows - starts[buckets])[order]
            records["gene"] = np.repeat(np.arange(first_gene, first_gene + len(indptr) - 1), np.diff(indptr))[order]
            records["value"] = values[order]
            cuts = np.concatenate([[0], np.cumsum(np.bincount(buckets, minlength=len(starts)))])
            for bucket in np.flatnonzero(np.diff(cuts)):
                part = records[cuts[bucket] : cuts[bucket + 1]]
                _write_at(descriptor, part.view(np.uint8), int(ends[bucket]) * self._record.itemsize)
                ends[bucket] += len(part)
            advance(len(rows))

    def windows(self) -> Iterator[Window]:
        for first, last in self._buckets:
            begin, end = int(self._indptr[first]), int(self._indptr[last])
            records = np.empty(end - begin, self._record)
            self._spill.seek(begin * self._record.itemsize)
            self._spill.readinto(records.view(np.uint8))
            yield self._window(records, last - first)

    def _window(self, records: NDArray[Any], n_rows: int) -> Window:
        bits = f"u{self.dtype.itemsize}"  # only moved, so any type will do: scipy has no float16
        by_gene = scipy.sparse.csc_array(
            (
                np.ascontiguousarray(records["value"]).view(bits),
                records["row"].astype(np.int64),
                np.concatenate([[0], np.cumsum(np.bincount(records["gene"], minlength=self.n_genes))]),
            ),
            shape=(n_rows, self.n_genes),
        )
        by_row = by_gene.tocsr()  # keeps the order of genes, and duplicates
        return canonical(by_row.indptr.astype(np.int64), by_row.indices, by_row.data.view(self.dtype))

    def close(self) -> None:
        if self._spill is not None:
            self._spill.close()


def canonical(indptr: Rows, genes: NDArray[np.integer], values: NDArray[Any]) -> Window:
    """The same rows with genes ascending and values of a gene that comes twice summed in their own dtype."""
    lengths = np.diff(indptr)
    rises = genes[1:] > genes[:-1]
    starts = indptr[1:-1]
    rises[starts[(starts > 0) & (starts < len(genes))] - 1] = True
    if rises.all():
        return Window(lengths=lengths, genes=genes, values=values)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    mended = len(np.unique(rows[1:][~rises]))
    order = np.lexsort((genes, rows))
    rows, genes, values = rows[order], genes[order], values[order]
    new = np.ones(len(genes), bool)
    new[1:] = (genes[1:] != genes[:-1]) | (rows[1:] != rows[:-1])
    kept = np.flatnonzero(new)
    return Window(
        lengths=np.bincount(rows[kept], minlength=len(lengths)),
        genes=genes[kept],
        values=np.add.reduceat(values, kept, dtype=values.dtype),
        mended=mended,
    )


def _write_at(descriptor: int, stored: NDArray[np.uint8], offset: int) -> None:
    left = memoryview(stored)  # type: ignore[arg-type]
    while left:
        written = os.pwrite(descriptor, left, offset)
        left, offset = left[written:], offset + written
