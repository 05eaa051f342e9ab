"""The two passes over a matrix: `scan_matrix` reads it all, `store_matrix` reads it again and stores it by shards.

One thread reads a window while others encode the chunks of the one before; a full shard is stored meanwhile, as one
object.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.abc.store import Store
from zarr.buffer import cpu
from zarr.core.sync import sync

from zloader.encode import (
    ChunkEncoder,
    ConvertOptions,
    DtypeScan,
    Grid,
    chunk_elements,
    grid,
    shard_index,
    smallest_integer,
)
from zloader.errors import SourceError
from zloader.source import Advance, SourceMatrix

_INDPTR_CHUNK = 1 << 16  # entries; it is read whole: chunks enough for several threads, each worth its call


@dataclass(frozen=True, kw_only=True)
class MatrixScan:
    """What the first pass found: `n_values` once rows are canonical, rows `mended` for that, dtypes to store."""

    n_values: int
    mended: int
    data: np.dtype[Any]
    indices: np.dtype[Any]


def scan_matrix(matrix: SourceMatrix, *, preserve_dtype: bool, advance: Advance) -> MatrixScan:
    """Reads every window once. Raises SourceError for anything in the file that is not as it must be."""
    scan = DtypeScan(matrix.dtype)
    n_values = mended = 0
    matrix.prepare(advance)
    for window in matrix.windows():
        n_values += len(window.values)
        mended += window.mended
        if not preserve_dtype:
            scan.add(window.values)
        advance(len(window.values))
    indices = smallest_integer(0, max(0, matrix.n_genes - 1), below=matrix.genes_dtype.itemsize)
    return MatrixScan(
        n_values=n_values,
        mended=mended,
        data=matrix.dtype if preserve_dtype else scan.dtype,
        indices=matrix.genes_dtype if preserve_dtype or indices is None else indices,
    )


@dataclass(frozen=True, kw_only=True)
class Threads:
    """The threads of one conversion; at most two shards are stored at once, since indices and data fill up together."""

    encoding: ThreadPoolExecutor
    storing: ThreadPoolExecutor


@contextmanager
def threads(n_encoding: int) -> Iterator[Threads]:
    """Threads that are gone when the context ends; what they had not begun is dropped."""
    with (
        ThreadPoolExecutor(n_encoding, thread_name_prefix="zloader-encode") as encoding,
        ThreadPoolExecutor(2, thread_name_prefix="zloader-store") as storing,
    ):
        try:
            yield Threads(encoding=encoding, storing=storing)
        finally:
            encoding.shutdown(cancel_futures=True)
            storing.shutdown(cancel_futures=True)


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where matrices are stored (below `root`, by their names), how, and with which threads."""

    root: zarr.Group
    options: ConvertOptions
    threads: Threads


def store_matrix(matrix: SourceMatrix, scan: MatrixScan, target: Target, advance: Advance) -> None:
    """Stores every window, as CSR or dense as the source is. Raises SourceError when it is not what was scanned."""
    write = _store_dense if matrix.encoding == "dense" else _store_sparse
    if write(matrix, scan, target, advance) != scan.n_values:
        raise SourceError(f"{matrix.name} changed while it was being converted: run convert again")


def _store_dense(matrix: SourceMatrix, scan: MatrixScan, target: Target, advance: Advance) -> int:
    row_bytes = matrix.n_genes * scan.data.itemsize
    cut = grid(
        matrix.n_rows,
        chunk=target.options.chunk_rows,
        item_bytes=row_bytes,
        shard_bytes=target.options.shard_bytes,
    )
    attributes = {
        "encoding-type": "array",
        "encoding-version": "0.2.0",
        "zloader": {"dtype": {"data": str(matrix.dtype)}},
    }
    shape = (matrix.n_rows, matrix.n_genes)
    writer = _writer(target, matrix.name, shape, scan.data, cut, attributes)
    for window in matrix.windows():
        writer.append(window.values)
        advance(len(window.values))
    writer.close()
    return writer.n_elements


def _store_sparse(matrix: SourceMatrix, scan: MatrixScan, target: Target, advance: Advance) -> int:
    options, n = target.options, scan.n_values
    target.root.create_group(
        matrix.name,
        attributes={
            "encoding-type": "csr_matrix",
            "encoding-version": "0.1.0",
            "shape": [matrix.n_rows, matrix.n_genes],
            "zloader": {"dtype": {"data": str(matrix.dtype), "indices": str(matrix.genes_dtype)}},
        },
    )
    cut = grid(
        n,
        chunk=chunk_elements(options.chunk_rows, elements=n, rows=matrix.n_rows),
        item_bytes=max(scan.data.itemsize, scan.indices.itemsize),
        shard_bytes=options.shard_bytes,
    )
    ends = matrix.indptr_dtype if options.preserve_dtype else np.dtype(np.int64)
    ends_cut = grid(matrix.n_rows + 1, chunk=_INDPTR_CHUNK, item_bytes=8, shard_bytes=options.shard_bytes)
    data = _writer(target, f"{matrix.name}/data", (n,), scan.data, cut)
    indices = _writer(target, f"{matrix.name}/indices", (n,), scan.indices, cut)
    indptr = _writer(target, f"{matrix.name}/indptr", (matrix.n_rows + 1,), ends, ends_cut)
    indptr.append(np.zeros(1, ends))
    for window in matrix.windows():
        indptr.append(data.n_elements + np.cumsum(window.lengths))
        data.append(window.values)
        indices.append(window.genes)
        advance(len(window.values))
    for writer in (data, indices, indptr):
        writer.close()
    return data.n_elements


def _writer(
    target: Target,
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    cut: Grid,
    attributes: dict[str, Any] | None = None,
) -> ShardWriter:
    encoder = ChunkEncoder(target.options.codec, dtype)
    widths = [max(1, size) for size in shape[1:]]
    array = target.root.create_array(
        name,
        shape=shape,
        dtype=dtype,
        chunks=(cut.chunk, *widths),
        shards=(cut.shard, *widths),
        compressors=encoder.zarr_codecs,
        fill_value=dtype.type(0),
        attributes=attributes,
    )
    return ShardWriter(array, encoder, target.threads)


class ShardWriter:
    """Fills one sharded zarr array from front to back with elements; every shard is stored once, whole.

    Holds the elements of the last two `append`s, one shard being encoded and one being stored.
    """

    def __init__(self, array: zarr.Array[Any], encoder: ChunkEncoder, pool: Threads) -> None:
        assert array.shards is not None
        self._array, self._encoder, self._threads = array, encoder, pool
        self._chunk = math.prod(array.chunks)
        self._chunks_per_shard = array.shards[0] // array.chunks[0]
        self._tail = np.empty(0, encoder.dtype)  # elements that do not fill a chunk yet
        self._encoding: list[Future[bytes]] = []
        self._shard: list[bytes] = []
        self._n_shards = 0
        self._storing: Future[None] | None = None
        self.n_elements = 0

    def append(self, elements: NDArray[Any]) -> None:
        """Takes the next elements, a flat array, which must not be changed afterwards."""
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
        for start in range(0, whole, self._chunk):
            self._encode(elements[start : start + self._chunk])
        self._tail = elements[whole:].astype(self._encoder.dtype)

    def close(self) -> None:
        """Stores what is left, and returns when all is stored."""
        if len(self._tail):
            self._encode(self._tail)
        self._collect()
        if self._shard:
            self._store_shard()
        if self._storing is not None:
            self._storing.result()

    def _encode(self, elements: NDArray[Any]) -> None:
        self._encoding.append(self._threads.encoding.submit(self._encoder.encode, elements, self._chunk))

    def _collect(self) -> None:
        """Waits for the chunks being encoded and adds them to the shard."""
        encoding, self._encoding = self._encoding, []
        for chunk in encoding:
            self._shard.append(chunk.result())
            if len(self._shard) == self._chunks_per_shard:
                self._store_shard()

    def _store_shard(self) -> None:
        if self._storing is not None:
            self._storing.result()
        self._shard.append(shard_index([len(chunk) for chunk in self._shard], self._chunks_per_shard))
        coordinates = (self._n_shards, *[0] * (self._array.ndim - 1))
        key = f"{self._array.path}/{self._array.metadata.encode_chunk_key(coordinates)}"
        self._storing = self._threads.storing.submit(_put, self._array.store, key, self._shard)
        self._shard = []
        self._n_shards += 1


def _put(store: Store, key: str, parts: list[bytes]) -> None:
    whole = cpu.Buffer.from_bytes(b"".join(parts))
    parts.clear()  # before the object travels
    sync(store.set(key, whole))
