"""Reads every stored chunk once, and checks its checksum, its decoding and its elements. Memory use is bounded.

In CSR and CSC matrices, indptr ascends from 0 to the number of values, and genes ascend within rows. Several threads
check pieces of `indices` in any order, each with the starts of the rows in its piece. The seams between pieces are
checked at the end. The cost is 1 ns per value.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.errors import CorruptChunkError, MissingObjectError, TruncatedObjectError
from zloader.common.records import Rows
from zloader.conversion.checking.hierarchy import Findings, Hierarchy
from zloader.conversion.sources.windows import Advance
from zloader.conversion.writing.stored import StoredArray

_IN_ORDER = re.compile(r"(mod/[^/]+/)?(X|raw|layers|obsm|obsp)(/|$)")  # matrices whose genes ascend within rows


@dataclass(slots=True)
class _Tally:
    """The first, last and number of bad rows. Rows are added in order; only the last row may be added again."""

    first: int = -1
    last: int = -1
    n: int = 0

    def add(self, rows: Rows) -> None:
        """Adds ascending rows, none before the last row."""
        if len(rows):
            self._merge(int(rows[0]), int(rows[-1]), len(np.unique(rows)))

    def merge(self, other: _Tally) -> None:
        """Adds the rows of a tally that follows this one."""
        if other.n:
            self._merge(other.first, other.last, other.n)

    def _merge(self, first: int, last: int, n: int) -> None:
        self.n += n - (self.n > 0 and first == self.last)
        self.first, self.last = (self.first if self.first >= 0 else first), last

    def __str__(self) -> str:
        return f"{self.first} (the first of {self.n})" if self.n > 1 else str(self.first)


class IndptrScan:
    """Checks the chunks of an indptr, in order."""

    def __init__(self, array: StoredArray, n_values: int, axis: str) -> None:
        self._path, self._n_entries, self._n_values, self._axis = array.path, array.n_elements, n_values, axis
        self._falls = _Tally()
        self._n_seen, self._last = 0, 0
        self._first: int | None = None

    def check(self, at: int, chunk: NDArray[Any]) -> None:
        """Checks the next chunk, whose first entry is entry `at`."""
        entries = chunk.astype(np.int64)
        if at == 0:
            self._first = self._last = int(entries[0])
        elif at > self._n_seen:  # a damaged chunk lies between
            self._last = int(entries[0])
        falls = np.flatnonzero(np.diff(entries, prepend=self._last) < 0)
        self._falls.add(at + falls - 1)
        self._n_seen, self._last = at + len(entries), int(entries[-1])

    def report(self, findings: Findings) -> None:
        """Reports the problems."""
        if self._first:
            findings.add(self._path, f"begins with {self._first}, not 0")
        if self._falls.n:
            findings.add(self._path, f"decreases at {self._axis} {self._falls}")
        if self._n_seen == self._n_entries and self._last != self._n_values:
            findings.add(self._path, f"ends with {self._last}, but {self._n_values} values are stored")


def starts_by_piece(indptr: StoredArray, indices: StoredArray) -> Iterator[tuple[int, Rows]]:
    """For each piece of `indices`, the first row that begins in it, and the starts of all rows that begin in it.

    indptr must be valid. Raises the errors of `StoredArray.chunks`.
    """
    chunks = indptr.chunks()
    first_row, starts = 0, np.empty(0, np.int64)
    for piece in range(indices.n_pieces):
        stop, parts = indices.first_element(piece + 1), [starts]
        while not len(parts[-1]) or parts[-1][-1] < stop:
            chunk = next(chunks, None)
            if chunk is None:
                break
            parts.append(chunk.astype(np.int64))
        starts = np.concatenate(parts)
        n_here = int(np.searchsorted(starts, stop))
        yield first_row, starts[:n_here]
        first_row, starts = first_row + n_here, starts[n_here:]


@dataclass(slots=True)
class _PieceSummary:
    """The result for one piece: unordered rows, rows with genes out of range, and the elements at the piece's ends."""

    disordered: _Tally
    outside: _Tally
    outside_gene: int = 0
    head: int | None = None
    head_gene: int = 0
    head_row: int = 0
    head_begins_row: bool = False
    tail: int = -1
    tail_gene: int = 0


class GeneOrder:
    """Checks the pieces of a matrix's `indices`, in any order. With `ascending`, genes must ascend within rows."""

    def __init__(self, path: str, *, axes: tuple[str, str], n_minor: int, ascending: bool) -> None:
        self._path, self._axes, self._n_minor, self._ascending = path, axes, n_minor, ascending
        self._pieces: list[_PieceSummary] = []

    def piece(self, first_row: int, starts: Rows) -> PieceOrder:
        """A check of the next piece, where the rows from `first_row` on have these starts."""
        self._pieces.append(_PieceSummary(_Tally(), _Tally()))
        return PieceOrder(self._pieces[-1], first_row, starts, self._n_minor)

    def report(self, findings: Findings) -> None:
        """Reports the problems, once all pieces have been checked."""
        major, minor = self._axes
        disordered, outside, outside_gene = _Tally(), _Tally(), 0
        before = _PieceSummary(_Tally(), _Tally())
        for piece in self._pieces:
            follows = before.tail >= 0 and before.tail + 1 == piece.head
            if follows and not piece.head_begins_row and before.tail_gene >= piece.head_gene:
                disordered.add(np.array([piece.head_row]))
            disordered.merge(piece.disordered)
            outside_gene = outside_gene if outside.n else piece.outside_gene
            outside.merge(piece.outside)
            before = piece
        if outside.n:
            findings.add(
                self._path,
                f"{major} {outside} has a value for {minor} {outside_gene}, but there are {self._n_minor} {minor}s",
            )
        if disordered.n and self._ascending:
            findings.add(
                self._path,
                f"is not canonical: the {minor}s of {major} {disordered} are repeated or not in ascending order. "
                "Convert it again",
            )


class PieceOrder:
    """Checks the chunks of one piece, in order."""

    def __init__(self, summary: _PieceSummary, first_row: int, starts: Rows, n_minor: int) -> None:
        self._summary, self._first_row, self._starts, self._n_minor = summary, first_row, starts, n_minor

    def check(self, at: int, genes: NDArray[Any]) -> None:
        """Checks the next chunk, whose first element is element `at`."""
        summary = self._summary
        if genes.min() < 0 or genes.max() >= self._n_minor:
            wrong = np.flatnonzero((genes < 0) | (genes >= self._n_minor))
            summary.outside_gene = summary.outside_gene if summary.outside.n else int(genes[wrong[0]])
            summary.outside.add(self._rows_of(at + wrong))
        begin, end = np.searchsorted(self._starts, [at, at + len(genes)])
        begun = self._starts[begin:end] - at
        rises = np.ones(len(genes), bool)
        np.greater(genes[1:], genes[:-1], out=rises[1:])
        if summary.tail >= 0 and summary.tail + 1 == at:
            rises[0] = genes[0] > summary.tail_gene
        rises[begun] = True
        if not rises.all():
            summary.disordered.add(self._rows_of(at + np.flatnonzero(~rises)))
        if summary.head is None:
            summary.head, summary.head_gene = at, int(genes[0])
            summary.head_row = int(self._rows_of(np.array([at]))[0])
            summary.head_begins_row = len(begun) > 0 and begun[0] == 0
        summary.tail, summary.tail_gene = at + len(genes) - 1, int(genes[-1])

    def _rows_of(self, elements: Rows) -> Rows:
        return self._first_row + np.searchsorted(self._starts, elements, side="right") - 1


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
        arrays = {path: hierarchy.stored(path) for path in hierarchy.arrays}
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
            # Other programs may write rows in any order, as scanpy's neighbors does, and repeat a gene.
            ascending=self._hierarchy.written_by_us and by_rows and _IN_ORDER.match(path) is not None,
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
            self.n_bytes += array.stored_bytes(piece)
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
