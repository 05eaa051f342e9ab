"""Stores matrices in one pass: a sample tells the dtypes and the grid, then windows are read and stored front to back.

Each value is compared with what is stored of it, bit for bit. A value that does not fit begins the matrix again, with
the next wider dtype. Several threads encode chunks, and one thread per array stores them in order.

When a shard of each array is complete, a checkpoint keeps the lengths of its rows. An interrupted conversion continues
after the last checkpoint: it knows the row that comes next without reading any before.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.storage import MemoryStore

from zloader.common.errors import SourceError, StoreError
from zloader.common.options import MiB
from zloader.common.progress import Bars
from zloader.common.records import Rows
from zloader.conversion.destination import CHECKPOINT, Destination
from zloader.conversion.encode import (
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
from zloader.conversion.object_writer import ObjectWriter, run_to_completion
from zloader.conversion.port import Matrix, Window
from zloader.storage.metadata import layout_of

_INDPTR_CHUNK = 1 << 16  # entries per chunk: a page of the offsets of a large matrix
_INDPTR_WINDOW = 1 << 20  # entries written at once
_MAX_ENCODING = 16
_JOB_ELEMENTS = 1 << 19  # encoded per job: a few chunks, so that the overhead per job is negligible
_SIDE_CHUNK_BYTES = 1 << 16  # least bytes per chunk of obsm and obsp, whose rows are short
_PIECE = 1 << 17  # elements that fit in a core's cache
_MOST_INT32 = np.iinfo(np.int32).max
_HELD_BYTES = 16 * MiB  # values of a small matrix, which stay in memory, so that it is not read again


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a matrix is stored: the dtypes of values and genes, and the elements (or rows) per chunk and shard."""

    data: str
    indices: str
    chunk: int
    shard: int

    def changes(self, matrix: Matrix) -> dict[str, str]:
        """The dtype of the values of a matrix if it is another one."""
        name, before = matrix.name if matrix.dense else f"{matrix.name}/data", str(matrix.dtype)
        return {} if before == self.data else {name: f"{before} -> {self.data}"}


def keeps_dtype(matrix: Matrix, options: ConvertOptions) -> bool:
    """Whether a matrix keeps its dtypes: with `preserve_dtype`, and for obsm and obsp, which do not hold counts."""
    return options.preserve_dtype or matrix.name.startswith(("obsm/", "obsp/"))


class _TooWideError(Exception):
    """Some values do not fit into the dtype of the plan."""


@dataclass(frozen=True, kw_only=True)
class MatrixWriter:
    """Stores matrices below `root`, with the options and threads. `existing` are the keys that were there before."""

    root: zarr.Group
    destination: Destination
    options: ConvertOptions
    threads: Threads
    bars: Bars
    existing: frozenset[str]

    def store(self, matrix: Matrix) -> Checkpoints:
        """Stores a matrix as CSR or dense, like the source. Raises SourceError if the source is invalid."""
        done = Checkpoints(self.destination, f"{self.root.path}/{matrix.name}".lstrip("/"), self.existing)
        held: list[Window] | None = None
        scan = DtypeScan(matrix.dtype)
        if done.plan is None:
            most = min(_HELD_BYTES, self.options.window) // matrix.dtype.itemsize
            if matrix.n_stored is not None and matrix.n_stored <= most:
                held = list(matrix.windows())
            done.begin(self._first_plan(matrix, scan, matrix.sample() if held is None else iter(held)))
        while done.n_values is None:
            try:
                self._write(matrix, done, held, scan)
            except _TooWideError:
                done.begin(self._plan(matrix, scan, done.plan))
        self._create(matrix, done)
        return done

    # ---- the plan

    def _first_plan(self, matrix: Matrix, scan: DtypeScan, sample: Iterator[Window]) -> Plan:
        n_rows = n_values = 0
        for window in sample:
            n_rows, n_values = n_rows + len(window.lengths), n_values + len(window.values)
            if not keeps_dtype(matrix, self.options):
                scan.add(window.values)
        elements = -(-n_values * matrix.n_rows // max(1, n_rows))
        if matrix.n_stored is not None and (matrix.n_stored < 2 * elements or not n_rows):  # else most are not chosen
            elements = matrix.n_stored
        return self._plan(matrix, scan, None, elements)

    def _plan(self, matrix: Matrix, scan: DtypeScan, before: Plan | None, elements: int = 0) -> Plan:
        options, keep = self.options, keeps_dtype(matrix, self.options)
        data = matrix.dtype if keep else scan.dtype
        narrow = smallest_integer(0, max(0, matrix.n_genes - 1), below=matrix.genes_dtype.itemsize)
        indices = matrix.genes_dtype if keep or narrow is None else narrow
        if before is not None:  # of a matrix that is begun again: as many bytes per shard
            items = [
                max(np.dtype(each).itemsize, 0 if matrix.dense else indices.itemsize) for each in (before.data, data)
            ]
            n_chunks = max(1, before.shard // before.chunk * items[0] // items[1])
            return replace(before, data=str(data), shard=before.chunk * n_chunks)
        if matrix.dense:
            row_bytes = max(1, matrix.n_genes * data.itemsize)
            rows = options.chunk_rows
            if matrix.name.startswith("obsm/"):
                rows = max(rows, _SIDE_CHUNK_BYTES // row_bytes)
            cut = grid(matrix.n_rows, chunk=rows, item_bytes=row_bytes, shard_bytes=options.shard_bytes)
        else:
            item_bytes = max(data.itemsize, indices.itemsize)
            chunk = chunk_elements(options.chunk_rows, elements=elements, rows=matrix.n_rows)
            if matrix.name.startswith("obsp/"):
                chunk = max(chunk, _SIDE_CHUNK_BYTES // item_bytes)
            cut = grid(elements, chunk=chunk, item_bytes=item_bytes, shard_bytes=options.shard_bytes)
        return Plan(data=str(data), indices=str(indices), chunk=cut.chunk, shard=cut.shard)

    # ---- the pass

    def _write(self, matrix: Matrix, done: Checkpoints, held: list[Window] | None, scan: DtypeScan) -> None:
        """Stores the values of the rows after the last checkpoint and, for CSR, their genes.

        Raises _TooWideError for values that do not fit into the plan, after adding them to `scan`.
        """
        plan = done.plan
        assert plan is not None
        names = {matrix.name: plan.data}
        if not matrix.dense:
            names = {f"{matrix.name}/data": plan.data, f"{matrix.name}/indices": plan.indices}
        shard = plan.shard * (max(1, matrix.n_genes) if matrix.dense else 1)
        n_values = done.n_shards * shard
        row, skipped = done.row_at(n_values, matrix)
        advance = self.bars.add(f"converting {matrix.name}", matrix.n_rows)
        advance(row)
        with contextlib.ExitStack() as opened:
            writers = [
                opened.enter_context(self._writer(matrix, name, of, plan, done.n_shards)) for name, of in names.items()
            ]
            for window in matrix.windows(row) if held is None else held:
                values = narrowed(window.values, np.dtype(plan.data))
                if values is None:
                    scan.add(window.values)
                    raise _TooWideError
                done.add(row, window)
                row += len(window.lengths)
                n_values += len(values) - skipped
                for writer, elements in zip(writers, (values, window.genes), strict=False):
                    writer.append(elements[skipped:])
                skipped = 0
                done.keep(min(writer.n_finished for writer in writers), shard)
                advance(len(window.lengths))
        if row != matrix.n_rows:
            raise SourceError(
                f"{matrix.name} has only {row} rows, not {matrix.n_rows}: it has changed, or does not return the same "
                "at every call"
            )
        done.finish(n_values)

    def _writer(self, matrix: Matrix, name: str, dtype: str, plan: Plan, first_shard: int) -> ShardWriter:
        """A writer for an array, whose length is not known yet."""
        shape = (matrix.n_rows, matrix.n_genes) if matrix.dense else (max(1, plan.shard),)
        path = f"{self.root.path}/{name}".lstrip("/")
        array = self._array(zarr.create_group(MemoryStore(), zarr_format=3), path, shape, np.dtype(dtype), plan)
        return ShardWriter(
            array, ChunkEncoder(layout_of(array, absent_is_fill=False)), self.threads, self.destination.create_object,
            first_shard=first_shard,
        )  # fmt: skip

    def _array(
        self,
        root: zarr.Group,
        path: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        cut: Plan | ChunkGrid,
        attributes: dict[str, Any] | None = None,
        outer: np.dtype[Any] | None = None,
    ) -> zarr.Array[Any]:
        """Creates an array split along its first axis, of `outer` if its chunks hold a narrower dtype. Writes only
        metadata."""
        widths = [max(1, size) for size in shape[1:]]
        return root.create_array(
            path,
            shape=shape,
            dtype=outer or dtype,
            chunks=(cut.chunk, *widths),
            shards=(cut.shard, *widths),
            fill_value=dtype.type(0),
            attributes=attributes,
            **zarr_codecs(self.options.codec, dtype, ascending=path.endswith("/indices"), outer=outer),
        )

    # ---- metadata and indptr

    def _create(self, matrix: Matrix, done: Checkpoints) -> None:
        """Makes the group and the arrays, whose shards are there, and stores indptr."""
        plan, n_values, recorded = done.plan, done.n_values, {"data": str(matrix.dtype)}
        assert plan is not None
        assert n_values is not None
        data = np.dtype(plan.data)
        if matrix.dense:
            attributes = {"encoding-type": "array", "encoding-version": "0.2.0", "zloader": {"dtype": recorded}}
            self._array(self.root, matrix.name, (matrix.n_rows, matrix.n_genes), data, plan, attributes)
            return
        self.root.create_group(
            matrix.name,
            attributes={
                "encoding-type": "csr_matrix",
                "encoding-version": "0.1.0",
                "shape": [matrix.n_rows, matrix.n_genes],
                "zloader": {"dtype": recorded | {"indices": str(matrix.genes_dtype)}},
            },
        )
        # SciPy needs indices and indptr of one dtype that can count the values: with others it slices wrong rows.
        keep = keeps_dtype(matrix, self.options) and n_values <= np.iinfo(matrix.genes_dtype).max
        dtype = matrix.genes_dtype if keep else np.dtype(np.int32 if n_values <= _MOST_INT32 else np.int64)
        self._array(self.root, f"{matrix.name}/data", (n_values,), data, plan)
        self._array(self.root, f"{matrix.name}/indices", (n_values,), np.dtype(plan.indices), plan, outer=dtype)
        cut = grid(matrix.n_rows + 1, chunk=_INDPTR_CHUNK, item_bytes=8, shard_bytes=self.options.shard_bytes)
        array = self._array(self.root, f"{matrix.name}/indptr", (matrix.n_rows + 1,), dtype, cut)
        encoder = ChunkEncoder(layout_of(array, absent_is_fill=False))
        with ShardWriter(array, encoder, self.threads, self.destination.create_object) as writer:
            writer.append(np.zeros(1, dtype))
            for _, ends in done.row_ends():
                writer.append(ends)


def narrowed(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """The values in a dtype; None if it does not hold all of them, bit for bit."""
    if values.dtype == dtype:
        return values
    made, bits = np.empty(len(values), dtype), f"u{values.dtype.itemsize}"
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(values), _PIECE):
            piece = values[start : start + _PIECE]
            found = piece.astype(dtype)
            if not np.array_equal(found.astype(values.dtype).view(bits), piece.view(bits)):
                return None
            made[start : start + _PIECE] = found
    return made


class Checkpoints:
    """What was stored of the matrix at a path, shard by shard: the plan, and the lengths of its rows.

    Each is an object with a number, which appears at once. The first has the plan, which also begins the matrix again
    with a wider dtype. The last one has the number of values, and says that the matrix is complete. Lengths of rows
    that were made canonical are negative.
    """

    n_shards: int
    _n_rows: int
    _kept_rows: int  # of which a checkpoint has the lengths, and the number of their values
    _kept_values: int

    def __init__(self, destination: Destination, path: str, existing: frozenset[str]) -> None:
        digest = hashlib.sha256(path.encode()).hexdigest()[:16]
        self._destination, self._prefix, self._next = destination, f"{CHECKPOINT}{digest}-", 0
        self.plan: Plan | None = None
        self.n_values: int | None = None
        self._restart()
        while (key := f"{self._prefix}{self._next}") in existing:
            with np.load(io.BytesIO(destination.read(key))) as found:
                head, lengths = json.loads(found["head"].tobytes()), found["lengths"]
            if head["n_shards"] == 0 and head["n_values"] is None:
                self._restart()
            self.plan, self.n_shards, self.n_values = Plan(**head["plan"]), head["n_shards"], head["n_values"]
            self._add(self._n_rows, lengths)
            self._kept_rows, self._next = self._n_rows, self._next + 1
        self._kept_values = int(np.abs(self._lengths).sum(dtype=np.int64))

    def _restart(self) -> None:
        self.n_shards = self._n_rows = self._kept_rows = self._kept_values = 0
        self._lengths: NDArray[np.int32] = np.zeros(0, np.int32)

    def begin(self, plan: Plan) -> None:
        """Begins the matrix, maybe again."""
        self.plan = plan
        self._restart()
        self._put()

    def add(self, row: int, window: Window) -> None:
        """Adds a window of the rows from `row` on."""
        lengths = window.lengths.astype(np.int32)
        lengths[window.mended] *= -1
        self._add(row, lengths)

    def _add(self, row: int, lengths: NDArray[np.int32]) -> None:
        stop = row + len(lengths)
        if stop > len(self._lengths):
            grown = np.zeros(max(stop, 2 * len(self._lengths)), np.int32)
            grown[: len(self._lengths)] = self._lengths
            self._lengths = grown
        self._lengths[row:stop] = lengths
        self._n_rows = max(self._n_rows, stop)

    @property
    def n_mended(self) -> int:
        """Rows that were made canonical."""
        return int(np.count_nonzero(self._lengths < 0))

    def row_ends(self, first: int = 0, begin: int = 0) -> Iterator[tuple[int, Rows]]:
        """The ends of the rows from `first` on, which begins at `begin`, in pieces: the first row, and the ends."""
        for start in range(first, self._n_rows, _INDPTR_WINDOW):
            piece = self._lengths[start : min(start + _INDPTR_WINDOW, self._n_rows)]
            ends = begin + np.cumsum(np.abs(piece), dtype=np.int64)
            yield start, ends
            begin = int(ends[-1])

    def row_at(self, element: int, matrix: Matrix) -> tuple[int, int]:
        """The row that contains an element, and the number of the row's elements before it."""
        if matrix.dense:
            return divmod(element, max(1, matrix.n_genes)) if element else (0, 0)
        for start, ends in self.row_ends():
            if ends[-1] > element:
                row = int(np.searchsorted(ends, element, side="right"))
                return start + row, element - int(ends[row]) + abs(int(self._lengths[start + row]))
        return self._n_rows, 0

    def keep(self, n_finished: int, shard: int) -> None:
        """Stores a checkpoint if more shards are complete, with the lengths of the rows that begin in them."""
        if n_finished <= self.n_shards:
            return
        self.n_shards, stop, last = n_finished, self._kept_rows, self._kept_values
        for start, ends in self.row_ends(stop, last):
            n = min(int(np.searchsorted(ends, n_finished * shard)) + 1, len(ends)) if last < n_finished * shard else 0
            if n:
                stop, last = start + n, int(ends[n - 1])
        self._put(stop)
        self._kept_values = last

    def finish(self, n_values: int) -> None:
        """Says that the matrix is complete."""
        self.n_values = n_values
        self._put(self._n_rows)

    def _put(self, stop: int = 0) -> None:
        assert self.plan is not None
        head = {"plan": asdict(self.plan), "n_shards": self.n_shards, "n_values": self.n_values}
        stored = io.BytesIO()
        text = np.frombuffer(json.dumps(head).encode(), np.uint8)
        np.savez(stored, head=text, lengths=self._lengths[self._kept_rows : stop])
        self._destination.put(f"{self._prefix}{self._next}", stored.getvalue())
        self._kept_rows, self._next = stop, self._next + 1


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
        self._object: ObjectWriter | None = None
        self._sizes: list[int] = []  # of the chunks in the object, in bytes
        self.n_finished = first_shard
        self._lock = threading.Lock()  # held to write the object, and to drop it
        self._dropped = False

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
                coordinates = (self.n_finished, *[0] * (self._array.ndim - 1))
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
        self.n_finished += 1
