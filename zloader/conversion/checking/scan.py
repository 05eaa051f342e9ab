"""Reads every stored chunk once, and checks its checksum, its decoding and its elements. Memory use is bounded."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.errors import CorruptChunkError, MissingObjectError, TruncatedObjectError
from zloader.conversion.checking.canonical import GeneOrder, IndptrScan, starts_by_piece
from zloader.conversion.checking.findings import Findings
from zloader.conversion.checking.hierarchy import Hierarchy
from zloader.conversion.checking.stored import StoredArray
from zloader.conversion.sources.windows import Advance

ChunkCheck = Callable[[int, NDArray[Any]], None]  # called with the number of a chunk's first element, and its elements

_MAX_PENDING = 32  # objects being read or queued: enough to keep all threads busy


class ChunkScan:
    """Reads all arrays of a store and counts `n_chunks`, `n_values` and `n_bytes`."""

    def __init__(self, hierarchy: Hierarchy, findings: Findings, pool: Executor, advance: Advance) -> None:
        self._hierarchy, self._findings, self._pool, self._advance = hierarchy, findings, pool, advance
        self._pending: deque[Future[None]] = deque()
        self._counting = threading.Lock()
        self.n_chunks = self.n_values = self.n_bytes = 0

    def run(self) -> None:
        """Reports all problems. Raises StoreError if the store cannot be read, for example without a network."""
        hierarchy = self._hierarchy
        arrays = {path: StoredArray(hierarchy, path) for path in hierarchy.arrays}
        orders = []
        for path in hierarchy.compressed:
            if hierarchy.fits(path):
                indptr, indices = (arrays.pop(f"{path}/{part}") for part in ("indptr", "indices"))
                orders.append(self._read_compressed(path, indptr, indices))
        for path, array in arrays.items():
            self._read(array, self._element_check(path))
        self._wait(0)
        for order in orders:
            order.report(self._findings)

    def _read_compressed(self, path: str, indptr: StoredArray, indices: StoredArray) -> GeneOrder:
        shape = self._hierarchy.shape(path)
        by_rows = self._hierarchy.encoding(path) == "csr_matrix"
        axes = ("row", "gene") if by_rows else ("gene", "row")
        check = IndptrScan(indptr, indices.n_elements, axes[0])
        for piece in range(indptr.n_pieces):  # in order, and before `indices`, whose check needs a valid indptr
            self._read_piece(indptr, piece, check.check)
        check.report(self._findings)
        order = GeneOrder(
            path,
            axes=axes,
            n_minor=shape[1] if by_rows else shape[0],
            ascending=by_rows and path.split("/")[0] in ("X", "raw", "layers", "obsm", "obsp"),
        )
        if self._findings.any_in(indptr.path):
            self._read(indices)
            return order
        for piece, (first_row, starts) in enumerate(starts_by_piece(indptr, indices)):
            self._submit(indices, piece, order.piece(first_row, starts).check)
        return order

    def _element_check(self, path: str) -> ChunkCheck | None:
        """The check of an array's elements, or None if they only have to decode."""
        above, _, name = path.rpartition("/")
        if name != "codes" or self._hierarchy.encoding(above) != "categorical":
            return None
        n_categories = next(iter(self._hierarchy.shape(f"{above}/categories")), 0)

        def check(at: int, codes: NDArray[Any]) -> None:
            wrong = np.flatnonzero((codes < -1) | (codes >= n_categories))
            if len(wrong):
                self._findings.add(
                    above,
                    f"row {at + wrong[0]} (the first of {len(wrong)} in its chunk) has code {codes[wrong[0]]}, "
                    f"but there are {n_categories} categories",
                )

        return check

    def _read(self, array: StoredArray, check: ChunkCheck | None = None) -> None:
        for piece in range(array.n_pieces):
            self._submit(array, piece, check)

    def _submit(self, array: StoredArray, piece: int, check: ChunkCheck | None) -> None:
        self._wait(_MAX_PENDING - 1)
        self._pending.append(self._pool.submit(self._read_piece, array, piece, check))

    def _wait(self, n_left: int) -> None:
        while len(self._pending) > n_left:
            self._pending.popleft().result()

    def _read_piece(self, array: StoredArray, piece: int, check: ChunkCheck | None) -> None:
        with self._counting:
            self.n_bytes += self._hierarchy.sizes.get(array.key(piece), 0)
        for at, elements in self._chunks(array, piece):
            if check is not None:
                check(at, elements)
            with self._counting:
                self.n_chunks += 1
                self.n_values += elements.size
            self._advance(elements.size)

    def _chunks(self, array: StoredArray, piece: int) -> Iterator[tuple[int, NDArray[Any]]]:
        """The number of the first element, and the elements, of every chunk that decodes. Reports the others."""
        at = array.first_element(piece)
        try:
            for chunk in array.read(piece):
                if isinstance(chunk, CorruptChunkError):
                    self._findings.add(array.key(piece), chunk)
                elif chunk.size:
                    yield at, chunk
                at += array.chunk_elements
        except MissingObjectError:
            pass  # already reported by Hierarchy.check_objects
        except (CorruptChunkError, TruncatedObjectError) as error:
            self._findings.add(array.key(piece), error)
