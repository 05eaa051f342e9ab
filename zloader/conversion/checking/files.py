"""Checks an .h5ad file where it lies, as hierarchy.py checks a store: its groups, and the chunks of its arrays.

HDF5 keeps no checksums unless an array was written with fletcher32. Of other arrays, chunks that do not decode, gene
indices and codes out of range, and shapes that disagree are found. A flipped bit in a value is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

import numpy as np
import zarr

from zloader.access.zarr_groups import UNDECODABLE
from zloader.common.errors import CorruptChunkError, FormatError, ZloaderError
from zloader.conversion.checking.hierarchy import Hierarchy
from zloader.conversion.writing.stored import Chunk, StoredArray
from zloader.dataset.h5ad import OpenedFile
from zloader.storage.decode import Decoder
from zloader.storage.placement import ABSENT

_PIECE_BYTES = 4 << 20  # decoded


class FileHierarchy(Hierarchy):
    """The groups and arrays of an .h5ad file."""

    @property
    def _file(self) -> OpenedFile:
        store = self._dataset.store
        assert isinstance(store, OpenedFile)
        return store

    def _read_nodes(self, pool: Executor) -> dict[str, Mapping[str, Any]]:
        nodes: dict[str, Mapping[str, Any]] = {}
        for path, node in self._file.index.nodes.items():
            if "refused" in node:
                self._findings.add(path, f"cannot be read in place: {node['refused']}")
            else:
                nodes[path] = {"node_type": "array" if "shape" in node else "group", "attributes": node["attrs"]}
        return nodes

    def _open_arrays(self) -> Iterator[tuple[str, zarr.Array[Any]]]:
        for path, node in sorted(self._nodes.items()):
            if node["node_type"] == "array":
                yield path, self._file.node(path)

    def stored(self, path: str) -> StoredArray:
        """An array, to read it."""
        return _FileArray(self._file, f"{self._group}/{path}".lstrip("/"))

    @property
    def metadata_bytes(self) -> int:
        """None that can be told from the rest of the file."""
        return 0

    def check_objects(self) -> None:
        """Nothing: all arrays are in the one object."""


class _FileArray(StoredArray):
    """An array of a file, in pieces of about 4 MiB: chunks if they hold whole rows of numbers, else windows of rows."""

    def __init__(self, file: OpenedFile, path: str) -> None:
        array = file.node(path)
        super().__init__(file.read_from, array, file.object_sizes(), absent_is_fill=True)
        self._layout = None
        try:
            layout = file.array_layout(path)
            if not array.size:
                raise FormatError(f"{path} is empty")
            Decoder(layout)
        except FormatError:  # such as strings
            row_bytes = max(1, array.dtype.itemsize * math.prod(array.shape[1:]))
            rows = array.chunks[:1] and max(1, _PIECE_BYTES // row_bytes // array.chunks[0]) * array.chunks[0]
            self._shard = (int(rows), *array.shape[1:]) if array.ndim else ()
        else:
            at_once = max(1, _PIECE_BYTES // (layout.chunk_elements * layout.dtype.itemsize))
            self._layout = replace(layout, placement=replace(layout.placement, chunks_per_object=at_once))
            self._shard = (layout.chunk_elements * at_once,)

    @property
    def n_pieces(self) -> int:
        """Groups of chunks, or windows of rows."""
        if self._layout is not None:
            return self._layout.n_shards
        return -(-self._array.shape[0] // self._shard[0]) if self._shard else 1

    @property
    def chunk_elements(self) -> int:
        """Elements of a chunk, or of a window."""
        return math.prod(self._shard) if self._layout is None else self._layout.chunk_elements

    def key(self, piece: int) -> str:
        """The path of the array: all pieces are in the one object."""
        return self.path

    def stored_bytes(self, piece: int) -> int:
        """Stored bytes of a piece, as far as the file says."""
        if self._layout is None:
            return 0
        table = self._layout.find_index(piece, sum(self._sizes.values()), self.path)
        assert isinstance(table, np.ndarray)
        return int(table[table[:, 0] != ABSENT, 1].sum())

    def _read_through_zarr(self, piece: int) -> Iterator[Chunk]:
        begin, rows = piece * self._shard[0] if self._shard else 0, self._shard[:1]
        try:
            found = self._array[begin : begin + rows[0]] if rows else self._array[()]
        except ZloaderError as error:
            if not isinstance(error, CorruptChunkError):
                raise
            yield error
        except UNDECODABLE as error:
            yield CorruptChunkError(f"{self.path} does not decode at row {begin}: {error}")
        else:
            yield np.asarray(found).reshape(-1)
