"""Stores a matrix in two passes: `scan_matrix` reads all of it, `MatrixWriter` reads it again and stores the shards.

The result of the first pass (a MatrixScan) fixes every grid and dtype. So the second pass always writes the same bytes,
and an interrupted conversion can continue after the last intact shard. Several threads encode chunks, and one
thread per array stores them in order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np
import zarr
from numpy.typing import NDArray

from zloader.access.location import Location
from zloader.common.errors import FormatError, ReadError, SourceError, StoreError
from zloader.common.progress import Bars
from zloader.common.records import Rows
from zloader.conversion.sources.windows import Advance, SourceMatrix
from zloader.conversion.writing.encode import (
    ChunkEncoder,
    ChunkGrid,
    ConvertOptions,
    DtypeScan,
    chunk_elements,
    grid,
    shard_index,
    smallest_integer,
    zarr_codecs,
)
from zloader.conversion.writing.object_writer import ObjectWriter, run_to_completion
from zloader.conversion.writing.stored import StoredArray
from zloader.storage.metadata import layout_of

_INDPTR_CHUNK = 1 << 16  # entries per chunk: a page of the offsets of a large matrix
_INDPTR_WINDOW = 1 << 20  # entries written at once
_MAX_ENCODING = 16
_JOB_ELEMENTS = 1 << 19  # encoded per job: a few chunks, so that the overhead per job is negligible
_SIDE_CHUNK_BYTES = 1 << 16  # least bytes per chunk of obsm and obsp, whose rows are short


@dataclass(frozen=True, kw_only=True)
class MatrixScan:
    """The result of the first pass.

    `n_values` counts values after rows are made canonical, `mended` the rows that were not canonical. `data` and
    `indices` are the dtypes to store. `lengths` (uint32) is the number of values per row: empty for a dense matrix,
    None if the scan comes from the journal.
    """

    n_values: int
    mended: int
    data: np.dtype[Any]
    indices: np.dtype[Any]
    lengths: NDArray[np.uint32] | None

    def record(self) -> dict[str, Any]:
        """The scan without `lengths`, for the journal."""
        dtypes = {"data": str(self.data), "indices": str(self.indices)}
        return {"n_values": self.n_values, "mended": self.mended, **dtypes}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> MatrixScan:
        """Restores a scan from the journal."""
        dtypes = {name: np.dtype(record[name]) for name in ("data", "indices")}
        return cls(n_values=record["n_values"], mended=record["mended"], lengths=None, **dtypes)


def keeps_dtype(matrix: SourceMatrix, options: ConvertOptions) -> bool:
    """Whether a matrix keeps its dtypes: with `preserve_dtype`, and for obsm and obsp, which do not hold counts."""
    return options.preserve_dtype or matrix.name.startswith(("obsm/", "obsp/"))


def scan_matrix(matrix: SourceMatrix, *, keep_dtype: bool, advance: Advance) -> MatrixScan:
    """Reads every row once, and calls `advance` with their numbers. Raises SourceError if the source is invalid."""
    scan = DtypeScan(matrix.dtype)
    n_values = mended = row = 0
    lengths = np.zeros(0 if matrix.encoding == "dense" else matrix.n_rows, np.uint32)
    for window in matrix.first_pass():
        n_values += len(window.values)
        mended += window.mended
        if not keep_dtype:
            scan.add(window.values)
        if len(lengths):
            rows = slice(row, row + len(window.lengths)) if window.positions is None else window.positions
            lengths[rows] = window.lengths
        row += len(window.lengths)
        advance(len(window.lengths))
    indices = smallest_integer(0, max(0, matrix.n_genes - 1), below=matrix.genes_dtype.itemsize)
    return MatrixScan(
        n_values=n_values,
        mended=mended,
        data=matrix.dtype if keep_dtype else scan.dtype,
        indices=matrix.genes_dtype if keep_dtype or indices is None else indices,
        lengths=lengths,
    )


@dataclass(frozen=True, kw_only=True)
class MatrixWriter:
    """Stores matrices below `root`, with the options and threads.

    `existing` gives the sizes in bytes of the objects that are there: what an interrupted conversion left.
    """

    root: zarr.Group
    location: Location
    options: ConvertOptions
    threads: Threads
    bars: Bars
    create_object: Callable[[str], ObjectWriter]
    existing: Mapping[str, int]

    def store(self, matrix: SourceMatrix, scan: MatrixScan) -> None:
        """Stores a matrix as CSR or dense, like the source. Raises SourceError if it has changed since the scan."""
        skipped = 0
        if matrix.encoding == "dense":
            arrays, cut = self._dense_array(matrix, scan)
            done = self.finished_shards(*arrays)
            row = done * cut.shard
        else:
            arrays, cut, lengths = self._sparse_arrays(matrix, scan)
            scan = dataclasses.replace(scan, lengths=lengths)
            done = self.finished_shards(*arrays)
            row, skipped = _row_at(lengths, done * cut.shard)
        self._write_rows(matrix, scan, [self._writer(array, done) for array in arrays], row=row, skipped=skipped)

    def _dense_array(self, matrix: SourceMatrix, scan: MatrixScan) -> tuple[list[zarr.Array[Any]], ChunkGrid]:
        row_bytes = max(1, matrix.n_genes * scan.data.itemsize)
        rows = self.options.chunk_rows
        if matrix.name.startswith("obsm/"):
            rows = max(rows, _SIDE_CHUNK_BYTES // row_bytes)
        cut = grid(matrix.n_rows, chunk=rows, item_bytes=row_bytes, shard_bytes=self.options.shard_bytes)
        attributes = {
            "encoding-type": "array",
            "encoding-version": "0.2.0",
            "zloader": {"dtype": {"data": str(matrix.dtype)}},
        }
        return [self._create(matrix.name, (matrix.n_rows, matrix.n_genes), scan.data, cut, attributes)], cut

    def _sparse_arrays(
        self, matrix: SourceMatrix, scan: MatrixScan
    ) -> tuple[list[zarr.Array[Any]], ChunkGrid, NDArray[np.uint32]]:
        """The arrays of values and genes, their grid, and the number of values per row. Stores indptr."""
        options, n = self.options, scan.n_values
        self.root.create_group(
            matrix.name,
            attributes={
                "encoding-type": "csr_matrix",
                "encoding-version": "0.1.0",
                "shape": [matrix.n_rows, matrix.n_genes],
                "zloader": {"dtype": {"data": str(matrix.dtype), "indices": str(matrix.genes_dtype)}},
            },
        )
        item_bytes = max(scan.data.itemsize, scan.indices.itemsize)
        chunk = chunk_elements(options.chunk_rows, elements=n, rows=matrix.n_rows)
        if matrix.name.startswith("obsp/"):
            chunk = max(chunk, _SIDE_CHUNK_BYTES // item_bytes)
        cut = grid(n, chunk=chunk, item_bytes=item_bytes, shard_bytes=options.shard_bytes)
        lengths = self._store_indptr(matrix, scan)
        dtypes = {"data": scan.data, "indices": scan.indices}
        return [self._create(f"{matrix.name}/{name}", (n,), dtypes[name], cut) for name in dtypes], cut, lengths

    def _write_rows(
        self,
        matrix: SourceMatrix,
        scan: MatrixScan,
        writers: Sequence[ShardWriter],
        *,
        row: int,
        skipped: int,
    ) -> None:
        """The second pass: writes the values of the rows from `row` on and, for CSR, their genes.

        The first `skipped` values of `row` are stored already. Raises SourceError if the matrix has changed since then.
        """
        lengths = np.zeros(0, np.uint32) if scan.lengths is None else scan.lengths
        changed = SourceError(f"{matrix.name} changed while it was being converted: run convert again")
        advance = self.bars.add(f"writing {matrix.name}", scan.n_values)
        with contextlib.ExitStack() as opened:
            values, *genes = [opened.enter_context(writer) for writer in writers]
            advance(values.n_elements)
            for window in matrix.windows(row):
                n_rows = len(window.lengths)
                if genes and not np.array_equal(window.lengths, lengths[row : row + n_rows]):
                    raise changed
                row += n_rows
                values.append(window.values[skipped:])
                for writer in genes:
                    writer.append(window.genes[skipped:])
                advance(len(window.values) - min(skipped, len(window.values)))
                skipped -= min(skipped, len(window.values))
        if values.n_elements != scan.n_values:
            raise changed

    def _store_indptr(self, matrix: SourceMatrix, scan: MatrixScan) -> NDArray[np.uint32]:
        """Stores indptr unless it is already complete. Returns the number of values per row."""
        dtype = matrix.indptr_dtype if keeps_dtype(matrix, self.options) else np.dtype(np.int64)
        cut = grid(matrix.n_rows + 1, chunk=_INDPTR_CHUNK, item_bytes=8, shard_bytes=self.options.shard_bytes)
        array = self._create(f"{matrix.name}/indptr", (matrix.n_rows + 1,), dtype, cut)
        lengths = scan.lengths
        if lengths is None:
            stored = self._stored(array)
            if self.finished_shards(array) == stored.n_pieces:
                return _stored_lengths(stored)
            advance = self.bars.add(f"reading {matrix.name}", matrix.n_rows)
            second_scan = scan_matrix(matrix, keep_dtype=True, advance=advance)
            assert second_scan.lengths is not None
            lengths = second_scan.lengths
        with self._writer(array) as writer:
            writer.append(np.zeros(1, dtype))
            for _, ends in _row_ends(lengths):
                writer.append(ends)
        return lengths

    def _writer(self, array: zarr.Array[Any], first_shard: int = 0) -> ShardWriter:
        """A writer for an array made by `_create`, starting at a shard."""
        encoder = ChunkEncoder(layout_of(array, absent_is_fill=False))
        return ShardWriter(array, encoder, self.threads, self.create_object, first_shard=first_shard)

    def _create(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        cut: ChunkGrid,
        attributes: dict[str, Any] | None = None,
    ) -> zarr.Array[Any]:
        """Creates an array split along its first axis. Writes only metadata."""
        widths = [max(1, size) for size in shape[1:]]
        return self.root.create_array(
            name,
            shape=shape,
            dtype=dtype,
            chunks=(cut.chunk, *widths),
            shards=(cut.shard, *widths),
            fill_value=dtype.type(0),
            attributes=attributes,
            **zarr_codecs(self.options.codec, dtype, ascending=name.endswith("/indices")),
        )

    def _stored(self, array: zarr.Array[Any]) -> StoredArray:
        """What an interrupted conversion left of an array."""
        return StoredArray(self.location, array, self.existing)

    def finished_shards(self, *arrays: zarr.Array[Any]) -> int:
        """The number of leading shards that are intact in all of the arrays. Reads them back to verify checksums."""
        stored = [self._stored(array) for array in arrays]
        present = itertools.takewhile(
            lambda shard: all(array.key(shard) in self.existing for array in stored), range(stored[0].n_pieces)
        )
        jobs = [(shard, array) for shard in present for array in stored]
        if not jobs:
            return 0
        advance = self.bars.add(f"checking {stored[0].path.rpartition('/')[0]}", sum(array.size for array in arrays))

        def is_intact(job: tuple[int, StoredArray]) -> bool:
            shard, array = job
            try:
                for elements in array.chunks_of(shard):
                    if self.threads.ended.is_set():
                        return False
                    advance(len(elements))
            except (ReadError, FormatError):
                return False
            return True

        intact = list(itertools.takewhile(bool, self.threads.encoding.map(is_intact, jobs)))
        return len(intact) // len(stored)


def _row_ends(lengths: NDArray[np.uint32]) -> Iterator[tuple[int, Rows]]:
    """The ends of rows of these lengths, in pieces: the first row, and the ends."""
    begin = 0
    for start in range(0, len(lengths), _INDPTR_WINDOW):
        ends = begin + np.cumsum(lengths[start : start + _INDPTR_WINDOW], dtype=np.int64)
        yield start, ends
        begin = int(ends[-1])


def _stored_lengths(indptr: StoredArray) -> NDArray[np.uint32]:
    lengths = np.empty(indptr.n_elements - 1, np.uint32)
    at, last = 0, np.zeros(0, np.int64)
    for elements in indptr.chunks():
        steps = np.diff(np.concatenate([last, elements.astype(np.int64)]))
        lengths[at : at + len(steps)] = steps
        at, last = at + len(steps), elements[-1:].astype(np.int64)
    return lengths


def _row_at(lengths: NDArray[np.uint32], element: int) -> tuple[int, int]:
    """The row that contains an element, and the number of the row's elements before it."""
    for start, ends in _row_ends(lengths):
        if ends[-1] > element:
            row = int(np.searchsorted(ends, element, side="right"))
            return start + row, element - int(ends[row] - lengths[start + row])
    return len(lengths), 0


# ---- the shards of one array, one after another: no whole shard is ever in memory, neither decoded nor encoded


@dataclass(frozen=True, kw_only=True)
class Threads:
    """The threads of one conversion. Indices, data and indptr may be stored at the same time.

    `ended` is set when the results of long jobs are no longer needed.
    """

    encoding: ThreadPoolExecutor
    storing: ThreadPoolExecutor
    ended: threading.Event


@contextlib.contextmanager
def threads(at: str) -> Iterator[Threads]:
    """As many threads as a single reader keeps busy. When the context ends, they stop and pending jobs are dropped.

    `at` names the destination in errors.
    """
    encoding = ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_ENCODING), thread_name_prefix="zloader-encode")
    storing = ThreadPoolExecutor(3, thread_name_prefix="zloader-store")
    ended = threading.Event()
    try:
        yield Threads(encoding=encoding, storing=storing, ended=ended)
    finally:
        ended.set()
        for pool in (encoding, storing):
            run_to_completion(partial(pool.shutdown, cancel_futures=True), at)


class ShardWriter:
    """Fills a sharded zarr array sequentially, starting at `first_shard`. Each shard is stored once, complete.

    A context manager. If it is left by an error, an incomplete shard is dropped. It keeps the elements of the last two
    `append` calls in memory, and their encoded chunks.
    """

    def __init__(
        self,
        array: zarr.Array[Any],
        encoder: ChunkEncoder,
        pool: Threads,
        create_object: Callable[[str], ObjectWriter],
        *,
        first_shard: int = 0,
    ) -> None:
        assert array.shards is not None
        self._array, self._encoder, self._threads, self._create_object = array, encoder, pool, create_object
        self._chunk = math.prod(array.chunks)
        self._chunks_per_shard = array.shards[0] // array.chunks[0]
        self._tail = np.empty(0, encoder.dtype)  # elements of an incomplete chunk
        self._encoding: list[Future[list[bytes]]] = []
        self._storing: Future[None] | None = None
        self._shard = first_shard
        self._object: ObjectWriter | None = None
        self._sizes: list[int] = []  # of the chunks in the object, in bytes
        self._lock = threading.Lock()  # held to write the object, and to drop it
        self._dropped = False
        self.n_elements = min(first_shard * self._chunks_per_shard * self._chunk, math.prod(array.shape))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._close()
        finally:
            run_to_completion(self._drop, self._array.path)

    def append(self, elements: NDArray[Any]) -> None:
        """Appends elements, a flat array that must not be changed afterwards."""
        self._collect()
        self.n_elements += len(elements)
        missing = self._chunk - len(self._tail)
        if len(elements) < missing:
            self._tail = np.concatenate([self._tail, elements.astype(self._encoder.dtype)])
            return
        if len(self._tail):
            self._encode(np.concatenate([self._tail, elements[:missing].astype(self._encoder.dtype)]))
            elements = elements[missing:]
        whole = len(elements) - len(elements) % self._chunk
        together = max(1, _JOB_ELEMENTS // self._chunk) * self._chunk
        for start in range(0, whole, together):
            self._encode(elements[start : min(start + together, whole)])
        self._tail = elements[whole:].astype(self._encoder.dtype)

    def _close(self) -> None:
        if len(self._tail):
            self._encode(self._tail)
        self._collect(last=True)
        if self._storing is not None:
            self._storing.result()

    def _encode(self, elements: NDArray[Any]) -> None:
        self._encoding.append(self._threads.encoding.submit(self._encoded, elements))

    def _encoded(self, elements: NDArray[Any]) -> list[bytes]:
        starts = range(0, len(elements), self._chunk)
        return [self._encoder.encode(elements[start : start + self._chunk], self._chunk) for start in starts]

    def _collect(self, *, last: bool = False) -> None:
        """Waits for the chunks being encoded, and submits them to be stored while the next chunks are encoded."""
        chunks = [chunk for job in self._encoding for chunk in job.result()]
        self._encoding = []
        if self._storing is not None:
            self._storing.result()
        self._storing = self._threads.storing.submit(self._store, chunks, last)

    def _drop(self) -> None:
        """Stops storing after the current chunk, and drops an incomplete shard."""
        self._dropped = True
        with self._lock, contextlib.suppress(StoreError):  # the original error matters more
            if self._object is not None:
                self._object.abort()

    def _store(self, chunks: list[bytes], last: bool) -> None:
        with self._lock:
            self._store_chunks(chunks)
            if last and self._object is not None and not self._dropped:
                self._finish_shard(self._object)

    def _store_chunks(self, chunks: list[bytes]) -> None:
        for chunk in chunks:
            if self._dropped:
                return
            if self._object is None:
                coordinates = (self._shard, *[0] * (self._array.ndim - 1))
                key = f"{self._array.path}/{self._array.metadata.encode_chunk_key(coordinates)}"
                self._object = self._create_object(key)
            self._object.write(chunk)
            self._sizes.append(len(chunk))
            if len(self._sizes) == self._chunks_per_shard:
                self._finish_shard(self._object)

    def _finish_shard(self, shard: ObjectWriter) -> None:
        shard.write(shard_index(self._sizes, self._chunks_per_shard))
        shard.commit()
        self._object, self._sizes = None, []
        self._shard += 1
