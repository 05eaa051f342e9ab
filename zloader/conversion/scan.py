"""Reads all arrays of a store back, chunk by chunk in a few threads, and verifies checksums, rows and codes.

Pieces of `indices` are read in any order, each with the starts of its rows. Their results are taken in order, so that
the last gene of a piece meets the first of the next. The cost is 1 ns per value. The memory in use is that of one read
and one chunk per thread.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.access.location import Location
from zloader.common.compiled import load_compiler
from zloader.common.errors import CorruptChunkError, FormatError, TruncatedObjectError
from zloader.common.options import MiB
from zloader.common.progress import Bars
from zloader.common.records import Rows, Span
from zloader.conversion.comparison import DAMAGED
from zloader.conversion.hierarchy import Findings, Hierarchy
from zloader.dataset.store import OpenedStore
from zloader.reading.loops import FEW
from zloader.storage.decode import Decoder
from zloader.storage.layout import ABSENT, ArrayLayout, Index

_MAX_PENDING = 32  # pieces being read or queued: enough to keep all threads busy
_IN_ORDER = re.compile(r"(mod/[^/]+/)?(X|raw|layers|obsm|obsp)(/|$)")  # matrices whose genes ascend within rows
_READ_BYTES = 8 * MiB  # per read
_WINDOW_BYTES = 4 * MiB  # decoded

Chunks = Iterator[tuple[int, NDArray[Any]]]  # the number of the first element, and the elements


class StoredArray:
    """An array of numbers that zloader decodes. Piece i is its stored object i. `sizes` has the bytes of objects."""

    def __init__(
        self, location: Location, layout: ArrayLayout, sizes: Mapping[str, int], *, read_bytes: int = _READ_BYTES
    ) -> None:
        self.path, self.n_elements = layout.path, layout.n_elements
        self._location, self._layout, self._sizes, self._read_bytes = location, layout, sizes, read_bytes
        self.n_pieces = -(-layout.n_chunks // layout.chunks_per_shard)

    def first_element(self, piece: int) -> int:
        """The first element of a piece."""
        return min(piece * self._layout.chunks_per_shard * self._layout.chunk_elements, self.n_elements)

    def key(self, piece: int) -> str:
        """The key of a piece in the store."""
        return self._layout.shard_key(piece)

    def chunks(self, piece: int) -> Chunks:
        """The chunks of a piece.

        Raises MissingObjectError, CorruptChunkError or TruncatedObjectError for what cannot be decoded, or translated
        file system errors.
        """
        layout, decoder, key = self._layout, Decoder(self._layout), self.key(piece)
        first = self.first_element(piece)
        for number, run in _runs(self._read_index(piece), self._read_bytes):
            (start, _), (last, size) = run[0], run[-1]
            stored = np.empty(0, np.uint8)
            if start >= 0:
                stored = np.frombuffer(self._read(Span(key=key, start=start, stop=last + size)), np.uint8)
            for chunk, (offset, size) in enumerate(run, number):
                at = first + chunk * layout.chunk_elements
                out = np.empty(min(layout.chunk_elements, layout.n_elements - at), layout.dtype)
                try:
                    if offset >= 0:
                        decoder.decode(stored[offset - start : offset - start + size], out)
                    else:
                        out[:] = layout.fill_value
                except CorruptChunkError as error:
                    raise CorruptChunkError(f"{self._location.url}: chunk {chunk} of {key}: {error}") from error
                yield at, out

    def _read_index(self, piece: int) -> Index:
        """The offset and size of each chunk of a piece. All chunks must exist, in order, unless they may be absent."""
        layout, url, key = self._layout, self._location.url, self.key(piece)
        size = self._sizes.get(key)
        try:
            table = layout.find_index(piece, size, url)
            if isinstance(table, Span):
                assert size is not None
                table = layout.placement.parse(self._read(table), piece, size)
        except CorruptChunkError as error:
            raise CorruptChunkError(f"{url}: {error}") from error
        table = table[: layout.n_chunks - piece * layout.chunks_per_shard]
        offsets = table[:, 0].astype(np.int64)
        if not layout.absent_is_fill and ((table == ABSENT).any() or (np.diff(offsets) <= 0).any()):
            raise CorruptChunkError(
                f"{url}: {key} lacks chunks, or has them out of order: the object was not written completely"
            )
        return table

    def _read(self, span: Span) -> bytes:
        stored = self._location.read(span.key, span.start, span.stop)
        if len(stored) != span.size:
            raise TruncatedObjectError(f"{span.read_from(self._location.url)} returned {len(stored)} bytes")
        return stored


def _runs(table: Index, most_bytes: int) -> Iterator[tuple[int, list[list[int]]]]:
    """Chunks that lie one after another and are read together: the number of the first, and where they lie.

    An absent chunk is alone, at -1.
    """
    run: list[list[int]] = []
    start = end = 0
    for number, (offset, size) in enumerate(table.astype(np.int64).tolist()):
        if run and (offset != end or offset < 0 or offset + size - start > most_bytes):
            yield number - len(run), run
            run = []
        start, end = start if run else offset, offset + size
        run.append([offset, size])
    if run:
        yield len(table) - len(run), run


class ReadArray:
    """Any other array, in windows of whole rows of about 4 MiB, which zarr or h5py reads.

    HDF5 keeps no checksums unless an array was written with fletcher32. Of other arrays, chunks that do not decode, and
    genes and codes out of range are found. A flipped bit in a value is not.
    """

    def __init__(self, store: OpenedStore, path: str, array: Any) -> None:
        self._store, self._array = store, array
        self.path, self.n_elements = path, int(array.size)
        self._n_rows: int = (*array.shape, 1)[0]
        self._row: int = math.prod(array.shape[1:])
        stored: int = max(1, (*(array.shards or array.chunks), 1)[0])
        self._window: int = max(1, _WINDOW_BYTES // max(1, stored * self._row * array.dtype.itemsize)) * stored
        self.n_pieces = -(-self._n_rows // self._window) if self.n_elements else 0

    def first_element(self, piece: int) -> int:
        """The first element of a window."""
        return min(piece * self._window * self._row, self.n_elements)

    def key(self, piece: int) -> str:
        """The path of the array: errors name the object."""
        return self.path

    def chunks(self, piece: int) -> Chunks:
        """A window. Raises FormatError or CorruptChunkError."""
        start = piece * self._window
        if self._array.shape:
            window = self._store.window(self.path, start, min(start + self._window, self._n_rows))
        else:
            with self._store.reading(self.path, self._array):
                window = np.asarray(self._array[()])
        yield self.first_element(piece), window.reshape(-1)


def stored_array(store: OpenedStore, path: str, array: Any) -> StoredArray | ReadArray:
    """An array of a store, read as fast as its form allows."""
    if array.ndim and array.size and array.dtype.kind in "biuf":
        with contextlib.suppress(FormatError):
            layout = store.array_layout(path)
            Decoder(layout)
            if layout.grid is None and layout.placement.table is None:
                return StoredArray(store.location, layout, store.object_sizes())
    return ReadArray(store, path, array)


# ---- what is checked


class _WrongError(Exception):
    """The first problem of a piece: the place, the description, and the array or element that has it."""

    def __init__(self, where: str, what: object, of: str) -> None:
        super().__init__(where, what, of)


Check = Callable[[int, NDArray[Any]], None]  # of the number of a chunk's first element, and its elements


@dataclass(kw_only=True)
class _GenesOfPiece:
    """Checks the chunks of one piece of `indices`, in order, where the rows from `first_row` on have these `starts`.

    `head` is the first gene if it continues a row, which `row` names, and `tail` the last gene.
    """

    path: str
    axes: tuple[str, str]
    n_minor: int
    ascending: bool
    first_row: int
    starts: Rows
    head: int | None = None
    row: int = 0
    tail: int | None = None

    def __call__(self, at: int, genes: NDArray[Any]) -> None:
        """Checks the next chunk, whose first element is element `at`."""
        major, minor = self.axes
        if genes.min() < 0 or genes.max() >= self.n_minor:
            first = int(np.flatnonzero((genes < 0) | (genes >= self.n_minor))[0])
            what = f"has a value for {minor} {genes[first]}, but there are {self.n_minor} {minor}s"
            raise _WrongError(self.path, f"{major} {self._row_of(at + first)} {what}", self.path)
        if not self.ascending:
            return
        begin, end = np.searchsorted(self.starts, [at, at + len(genes)])
        begun = self.starts[begin:end] - at
        rises = np.ones(len(genes), bool)
        np.greater(genes[1:], genes[:-1], out=rises[1:])
        if self.tail is not None:
            rises[0] = genes[0] > self.tail
        elif not len(begun) or begun[0]:
            self.head, self.row = int(genes[0]), self._row_of(at)
        rises[begun] = True
        if not rises.all():
            raise _WrongError(self.path, self.disordered(self._row_of(at + int(rises.argmin()))), self.path)
        self.tail = int(genes[-1])

    def disordered(self, row: int) -> str:
        """The problem that the genes of a row do not ascend."""
        major, minor = self.axes
        return (
            f"is not canonical: the {minor}s of {major} {row} are repeated or not in ascending order. Convert it again"
        )

    def _row_of(self, element: int) -> int:
        return self.first_row + int(np.searchsorted(self.starts, element, side="right")) - 1


Stored = StoredArray | ReadArray


class Scan:
    """Reads all arrays of a store."""

    def __init__(self, hierarchy: Hierarchy, findings: Findings, pool: Executor, bars: Bars) -> None:
        self._hierarchy, self._findings, self._pool, self._bars = hierarchy, findings, pool, bars
        self._pending: deque[Future[_GenesOfPiece | None]] = deque()
        self._tail: int | None = None  # the last gene of the piece before

    def run(self, known: Collection[str]) -> None:
        """Reports all problems but those of the matrices that are known to be sound.

        Raises StoreError if the store cannot be read, for example without a network.
        """
        hierarchy = self._hierarchy
        unknown = {
            path: array
            for path, array in hierarchy.arrays.items()
            # Only the first problem of an array is reported. One whose shape makes no sense may have no end.
            if not {path, path.rpartition("/")[0]} & {*known} and not self._findings.has(path, f"{path}/zarr.json")
        }
        n_values = sum(math.prod(array.shape) for array in unknown.values())
        if n_values > FEW:
            load_compiler()  # for differences of genes
        self._advance = self._bars.add("verifying", n_values)
        arrays = {path: stored_array(hierarchy.store, path, array) for path, array in unknown.items()}
        for path, by_rows, shape in hierarchy.compressed():
            if path in known or not {f"{path}/indptr", f"{path}/indices"} <= arrays.keys():
                continue
            indptr, indices = (arrays.pop(f"{path}/{part}") for part in ("indptr", "indices"))
            axes, n_minor = (("row", "gene"), shape[1]) if by_rows else (("gene", "row"), shape[0])
            # Other programs may write rows in any order, as scanpy's neighbors does, and repeat a gene.
            ascending = hierarchy.is_ours and by_rows and _IN_ORDER.match(path) is not None
            pieces = iter(range(indices.n_pieces))
            try:
                for first_row, starts in self._starts_by_piece(indptr, indices, axes[0]):
                    genes = _GenesOfPiece(
                        path=path, axes=axes, n_minor=n_minor, ascending=ascending, first_row=first_row, starts=starts
                    )
                    self._submit(indices, next(pieces), genes)
            except _WrongError as wrong:
                self._findings.add(*wrong.args)
            for piece in pieces:
                self._submit(indices, piece, None)
        for path, array in arrays.items():
            above, _, name = path.rpartition("/")
            is_coded = name == "codes" and hierarchy.encoding(above) == "categorical"
            check = functools.partial(_check_codes, above, hierarchy.length(f"{above}/categories"))
            for piece in range(array.n_pieces):
                self._submit(array, piece, check if is_coded else None)
        self._wait(0)

    def _starts_by_piece(self, indptr: Stored, indices: Stored, axis: str) -> Iterator[tuple[int, Rows]]:
        """For each piece of `indices`, the first row that begins in it, and the starts of all rows that begin in it."""
        entries = self._checked_entries(indptr, indices.n_elements, axis)
        first_row, starts = 0, np.empty(0, np.int64)
        for piece in range(indices.n_pieces):
            stop, parts = indices.first_element(piece + 1), [starts]
            while not len(parts[-1]) or parts[-1][-1] < stop:
                if (chunk := next(entries, None)) is None:
                    break
                parts.append(chunk)
            starts = np.concatenate(parts)
            n_here = int(np.searchsorted(starts, stop))
            yield first_row, starts[:n_here]
            first_row, starts = first_row + n_here, starts[n_here:]
        for _ in entries:
            pass

    def _checked_entries(self, indptr: Stored, n_values: int, axis: str) -> Iterator[Rows]:
        last = at = 0
        for piece in range(indptr.n_pieces):
            for at, chunk in self._chunks(indptr, piece):
                entries, wrong = chunk.astype(np.int64), ""
                falls = np.flatnonzero(np.diff(entries, prepend=last) < 0)
                if at == 0 and entries[0]:
                    wrong = f"begins with {entries[0]}, not 0"
                elif len(falls):
                    wrong = f"decreases at {axis} {at + falls[0] - 1}"
                elif at + len(entries) == indptr.n_elements and entries[-1] != n_values:
                    wrong = f"ends with {entries[-1]}, but {n_values} values are stored"
                if wrong:
                    raise _WrongError(indptr.path, wrong, indptr.path)
                last = int(entries[-1])
                yield entries

    def _submit(self, array: Stored, piece: int, check: Check | None) -> None:
        self._wait(_MAX_PENDING - 1)
        self._pending.append(self._pool.submit(self._read, array, piece, check))

    def _wait(self, n_left: int) -> None:
        """Takes results, which are in the order of the pieces, until only so many pieces are being read."""
        while len(self._pending) > n_left:
            before, self._tail = self._tail, None
            try:
                genes = self._pending.popleft().result()
            except _WrongError as wrong:
                self._findings.add(*wrong.args)
                continue
            if genes is not None:
                self._tail = genes.tail
                if genes.head is not None and before is not None and genes.head <= before:
                    self._findings.add(genes.path, genes.disordered(genes.row))

    def _read(self, array: Stored, piece: int, check: Check | None) -> _GenesOfPiece | None:
        for at, elements in self._chunks(array, piece):
            if check is not None and elements.size:
                check(at, elements)
        return check if isinstance(check, _GenesOfPiece) else None

    def _chunks(self, array: Stored, piece: int) -> Iterator[tuple[int, NDArray[Any]]]:
        """The number of the first element, and the elements, of every chunk of a piece. Raises _WrongError."""
        try:
            for at, chunk in array.chunks(piece):
                yield at, chunk
                self._advance(chunk.size)
        except DAMAGED as error:  # if it is missing, Hierarchy.check has said so
            raise _WrongError(array.key(piece), error, array.path) from error


def _check_codes(path: str, n_categories: int, at: int, codes: NDArray[Any]) -> None:
    wrong = np.flatnonzero((codes < -1) | (codes >= n_categories))
    if len(wrong):
        what = f"row {at + wrong[0]} has code {codes[wrong[0]]}, but there are {n_categories} categories"
        raise _WrongError(path, what, path)
