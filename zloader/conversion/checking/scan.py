"""Every stored chunk read once: checksums, decoding, and what its elements must be. Several threads, bounded memory."""

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

Look = Callable[[int, NDArray[Any]], None]  # takes the number of a chunk's first element, and its elements

_UNDER_WAY = 32  # objects that are read, or wait for it: enough that no thread ever does


class ChunkScan:
    """Reads all arrays of a store and counts `n_chunks`, `n_values` and `n_bytes`."""

    def __init__(self, hierarchy: Hierarchy, findings: Findings, pool: Executor, advance: Advance) -> None:
        self._hierarchy, self._findings, self._pool, self._advance = hierarchy, findings, pool, advance
        self._under_way: deque[Future[None]] = deque()
        self._counting = threading.Lock()
        self.n_chunks = self.n_values = self.n_bytes = 0

    def run(self) -> None:
        """Names all that is wrong. Raises StoreError where the store cannot be read, as without a network."""
        hierarchy = self._hierarchy
        arrays = {path: StoredArray(hierarchy, path) for path in hierarchy.arrays}
        orders = []
        for path in hierarchy.compressed:
            if hierarchy.fits(path):
                indptr, indices = (arrays.pop(f"{path}/{part}") for part in ("indptr", "indices"))
                orders.append(self._read_compressed(path, indptr, indices))
        for path, array in arrays.items():
            self._read(array, self._look_at(path))
        self._wait(0)
        for order in orders:
            order.report(self._findings)

    def _read_compressed(self, path: str, indptr: StoredArray, indices: StoredArray) -> GeneOrder:
        shape = self._hierarchy.shape(path)
        by_rows = self._hierarchy.encoding(path) == "csr_matrix"
        axes = ("row", "gene") if by_rows else ("gene", "row")
        check = IndptrScan(indptr, indices.n_elements, axes[0])
        for piece in range(indptr.n_pieces):  # in order, and before its indices, which only make sense with it
            self._read_piece(indptr, piece, check.look)
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
            self._submit(indices, piece, order.piece(first_row, starts).look)
        return order

    def _look_at(self, path: str) -> Look | None:
        """What the elements of an array must be, beside decodable."""
        above, _, name = path.rpartition("/")
        if name != "codes" or self._hierarchy.encoding(above) != "categorical":
            return None
        n_categories = next(iter(self._hierarchy.shape(f"{above}/categories")), 0)

        def look(at: int, codes: NDArray[Any]) -> None:
            wrong = np.flatnonzero((codes < -1) | (codes >= n_categories))
            if len(wrong):
                self._findings.add(
                    above,
                    f"row {at + wrong[0]} (the first of {len(wrong)} in its chunk) has code {codes[wrong[0]]}, "
                    f"but there are {n_categories} categories",
                )

        return look

    def _read(self, array: StoredArray, look: Look | None = None) -> None:
        for piece in range(array.n_pieces):
            self._submit(array, piece, look)

    def _submit(self, array: StoredArray, piece: int, look: Look | None) -> None:
        self._wait(_UNDER_WAY - 1)
        self._under_way.append(self._pool.submit(self._read_piece, array, piece, look))

    def _wait(self, n_left: int) -> None:
        while len(self._under_way) > n_left:
            self._under_way.popleft().result()

    def _read_piece(self, array: StoredArray, piece: int, look: Look | None) -> None:
        with self._counting:
            self.n_bytes += self._hierarchy.sizes.get(array.key(piece), 0)
        for at, elements in self._chunks(array, piece):
            if look is not None:
                look(at, elements)
            with self._counting:
                self.n_chunks += 1
                self.n_values += elements.size
            self._advance(elements.size)

    def _chunks(self, array: StoredArray, piece: int) -> Iterator[tuple[int, NDArray[Any]]]:
        """The chunks that decode, and the first element of each; the others are named."""
        at = array.first_element(piece)
        try:
            for chunk in array.read(piece):
                if isinstance(chunk, CorruptChunkError):
                    self._findings.add(array.key(piece), chunk)
                elif chunk.size:
                    yield at, chunk
                at += array.chunk_elements
        except MissingObjectError:
            pass  # named already, by the listing
        except (CorruptChunkError, TruncatedObjectError) as error:
            self._findings.add(array.key(piece), error)
