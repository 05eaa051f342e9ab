"""Verify that a store is complete and intact and, on request, that it holds the values of its sources.

The objects that the metadata imply are compared with the listing. Every chunk of every array is decoded with its
checksum, in a few threads. On the way, indptr is checked to ascend from 0 to the number of values, and the genes of
each row to be in range and, in stores of `convert`, to ascend. Pieces of `indices` are read in any order, each with the
starts of its rows. Their results are taken in order, so that the last gene of a piece meets the first of the next. The
cost is 1 ns per value. Problems are collected instead of raised, the first one of each array.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.access.location import Location, location_of
from zloader.common.compiled import load_compiler
from zloader.common.keywords import answers
from zloader.common.options import MiB
from zloader.common.progress import Bars, progress_bars
from zloader.common.records import Rows
from zloader.conversion.comparison import AGAINST, DAMAGED, arrangement, compare, reporting
from zloader.conversion.destination import MARKER
from zloader.conversion.elements import library_settings
from zloader.conversion.encode import ConvertOptions, working_bytes
from zloader.conversion.hierarchy import Findings, Hierarchy, Problem, quotient
from zloader.conversion.opening import Reading, Sources, open_parts
from zloader.conversion.port import Opened
from zloader.conversion.selection import Selection
from zloader.conversion.stored import StoredArray
from zloader.dataset.dataset import Dataset
from zloader.dataset.h5ad import OpenedFile
from zloader.dataset.open_dataset import open_dataset
from zloader.reading.rehearsal import FEW
from zloader.selecting.gene_names import GenesBy

_THREADS = 8  # enough to hide the latency of S3; on a machine with few cores they cost nothing
_THREAD_BYTES = 24 * MiB  # memory per thread: stored bytes and a few decoded chunks
_MAX_PENDING = 32  # pieces being read or queued: enough to keep all threads busy
_WINDOW_BYTES = 4 * MiB  # of an .h5ad file, decoded
_IN_ORDER = re.compile(r"(mod/[^/]+/)?(X|raw|layers|obsm|obsp)(/|$)")  # matrices whose genes ascend within rows


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of `verify`: `ok`, the `problems` found, and how much was read.

    >>> import zloader as zl
    >>> _ = zl.convert("pbmc.h5ad", "checked.zarr")
    >>> zl.verify("checked.zarr").problems
    ()

    - `problems`: the first one of each array or element, with a place (`where`) and a description (`what`).
    - `rows`, `genes`: the shape of X.
    - `objects`, `arrays`, `chunks`, `values`: stored objects, arrays, chunks, and elements of all arrays.
    - `bytes_read`: stored bytes of the objects.
    - `against`: the names of the sources that the store was compared with.
    - `seconds`: wall-clock time.
    """

    url: str
    rows: int
    genes: int
    objects: int
    arrays: int
    chunks: int
    values: int
    bytes_read: int
    problems: tuple[Problem, ...]
    against: tuple[str, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """True if no problem was found."""
        return not self.problems


@answers
def verify(
    url: str | os.PathLike[str],
    *,
    against: Sources | None = None,
    genes_by: GenesBy = None,
    storage_options: Mapping[str, Any] | None = None,
    source_options: Mapping[str, Any] | None = None,
    memory: int | str = "1GiB",
    progress: bool = True,
) -> Verification:
    """Reads the whole store at a local path or `s3://` URL and reports what is wrong with each of its arrays.

    >>> import zloader as zl
    >>> _ = zl.convert("pbmc.h5ad", "verified.zarr")
    >>> zl.verify("verified.zarr", against="pbmc.h5ad").ok
    True

    Every object must exist and belong to an array, every checksum must match, and every chunk must decode. Shapes must
    agree. In a store that `convert` wrote, X, layers and raw/X must be canonical CSR or dense; in files and stores of
    other programs, rows may be unsorted, and a matrix CSC.

    - `against`: sources, as for `convert`. Every value is compared with the value that `convert` would store. Both are
      read by zloader; an AnnData that anndata has read is independent of it:
      `against=anndata.read_h5ad("pbmc.h5ad", backed="r")`.
    - `genes_by`: what names the genes of the sources. Needed if `convert` was given new names, which no store keeps.
    - `storage_options`: s3fs options for the store, and for the sources unless `source_options` is given.
    - `memory`: bound on the resident memory of the process, in bytes or as text such as "1GiB".
    - `progress`: show progress on stderr if stderr is a terminal.

    Raises StoreNotFoundError and AccessDeniedError, and StoreError if a read fails for a reason other than damage.
    """
    started = time.perf_counter()
    location = location_of(url, storage_options).pinned()
    findings, compared = Findings(location.url), None
    seen = dict.fromkeys(("rows", "genes", "arrays", "chunks", "values"), 0)
    with contextlib.ExitStack() as opened:
        opened.enter_context(library_settings())
        bars = opened.enter_context(progress_bars(shown=progress))
        dataset, sizes = _opened(location, findings), location.listing().sizes
        if dataset is not None and ".zgroup" in sizes and "zarr.json" not in sizes:
            findings.add(".zgroup", "is Zarr v2, which has no checksums to verify: run 'zloader convert' on it")
            seen |= {"rows": dataset.n_obs, "genes": dataset.n_vars}
        elif dataset is not None:
            store = dataset.store
            n_threads = max(1, min(_THREADS, working_bytes(memory) // _THREAD_BYTES))
            pool = opened.enter_context(ThreadPoolExecutor(n_threads, thread_name_prefix="zloader-verify"))
            opened.callback(pool.shutdown, cancel_futures=True)  # after Ctrl-C, of the reads that have not started
            # Reports what leaves nothing to check, such as a damaged list of groups.
            with reporting(findings, location.url, ""):
                hierarchy = Hierarchy(store, findings, pool)
                hierarchy.check()
                seen |= hierarchy.seen()
                if against is not None:
                    with reporting(findings, AGAINST):
                        options = storage_options if source_options is None else source_options
                        compared = _both_opened(dataset, against, genes_by, options, memory, opened)
                equal = set[str]()  # matrices whose chunks have all been read
                if compared is not None:
                    equal = compare(store, *compared, findings, bars)
                _Scan(hierarchy, findings, pool, bars).run(equal)
    return Verification(
        url=location.url,
        **seen,
        objects=len(sizes),
        bytes_read=sum(sizes.values()),
        problems=findings.problems(),
        against=() if compared is None else tuple(compared[1].names),
        seconds=time.perf_counter() - started,
    )


def _both_opened(
    dataset: Dataset,
    against: Sources,
    genes_by: GenesBy,
    storage_options: Mapping[str, Any] | None,
    memory: int | str,
    until: contextlib.ExitStack,
) -> tuple[Opened, Opened]:
    """The store and its sources, arranged as `convert` stored them, until the stack is closed."""
    how: dict[str, Any] = {"window_bytes": ConvertOptions(memory=memory).window}
    how["memory"] = working_bytes(memory) // 8  # of each side
    stored = until.enter_context(open_parts(dataset, Selection(), how=Reading(**how)))
    select, order = arrangement(dataset.store, stored, genes_by)
    sources = open_parts(against, select, storage_options=storage_options, how=Reading(**how, **order))
    return stored, until.enter_context(sources)


def _opened(location: Location, findings: Findings) -> Dataset | None:
    """The store; None, after adding the finding, if it is too damaged to open."""
    try:
        return open_dataset(location.url, storage_options=location.storage_options)
    except DAMAGED as error:
        keys = location.listing()
        if MARKER in keys and "zarr.json" not in keys:
            findings.add(MARKER, "its conversion did not finish: run convert with --resume, or convert again")
        else:
            findings.add("zarr.json", error)
        return None


class _WrongError(Exception):
    """The first problem of a piece: the place, the description, and the array or element that has it."""

    def __init__(self, where: str, what: object, of: str) -> None:
        super().__init__(where, what, of)


class _FileArray:
    """An array of an .h5ad file, in windows of whole rows of about 4 MiB, with the methods of StoredArray.

    HDF5 keeps no checksums unless an array was written with fletcher32. Of other arrays, chunks that do not decode, and
    genes and codes out of range are found. A flipped bit in a value is not.
    """

    def __init__(self, file: OpenedFile, array: Any) -> None:
        self._file, self._array = file, array
        self.path, self.n_elements = str(array.path), int(array.size)
        self._n_rows: int = (*array.shape, 1)[0]
        self._row: int = math.prod(array.shape[1:])
        stored: int = max(1, (*array.chunks, 1)[0])
        self._window: int = max(1, _WINDOW_BYTES // max(1, stored * self._row * array.dtype.itemsize)) * stored
        self.n_pieces = quotient(self._n_rows, self._window)
        self.chunk_elements: int = self._window * self._row

    def first_element(self, piece: int) -> int:
        """The first element of a window."""
        return min(piece * self.chunk_elements, self.n_elements)

    def key(self, piece: int) -> str:
        """The path of the array: all windows are in the one object."""
        return self.path

    def chunks_of(self, piece: int) -> Iterator[NDArray[Any]]:
        """The elements of a window. Raises FormatError or CorruptChunkError."""
        start = piece * self._window
        if self._array.shape:
            yield self._file.window(self.path, start, min(start + self._window, self._n_rows)).reshape(-1)
        else:
            with self._file.reading(self.path, self._array):
                yield np.asarray(self._array[()]).reshape(-1)


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

    def check(self, at: int, genes: NDArray[Any]) -> None:
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


class _Scan:
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
            path: array for path, array in hierarchy.arrays.items() if not {path, path.rpartition("/")[0]} & {*known}
        }
        n_values = sum(array.size for array in unknown.values())
        if n_values > FEW:
            load_compiler()  # for differences of genes
        self._advance = self._bars.add("verifying", n_values)
        arrays = {path: self._stored(array) for path, array in unknown.items()}
        for path, by_rows, shape in hierarchy.compressed():
            if path in known:
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
                    self._submit(indices, next(pieces), genes.check, genes)
            except _WrongError as wrong:
                self._findings.add(*wrong.args)
            for piece in pieces:
                self._submit(indices, piece)
        for path, array in arrays.items():
            for piece in range(array.n_pieces):
                self._submit(array, piece, self._check_of(path))
        self._wait(0)

    def _stored(self, array: Any) -> StoredArray | _FileArray:
        store = self._hierarchy.store
        if isinstance(store, OpenedFile):
            return _FileArray(store, array)
        return StoredArray(store.location, array, self._hierarchy.sizes, absent_is_fill=not self._hierarchy.is_ours)

    def _check_of(self, path: str) -> Check | None:
        """The check of an array's elements, or None if they only have to decode."""
        above, _, name = path.rpartition("/")
        if name != "codes" or self._hierarchy.encoding(above) != "categorical":
            return None
        n_categories = next(iter(self._hierarchy.shape(f"{above}/categories")), 0)

        def check(at: int, codes: NDArray[Any]) -> None:
            wrong = np.flatnonzero((codes < -1) | (codes >= n_categories))
            if len(wrong):
                what = f"row {at + wrong[0]} has code {codes[wrong[0]]}, but there are {n_categories} categories"
                raise _WrongError(above, what, above)

        return check

    def _starts_by_piece(self, indptr: Any, indices: Any, axis: str) -> Iterator[tuple[int, Rows]]:
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

    def _checked_entries(self, indptr: Any, n_values: int, axis: str) -> Iterator[Rows]:
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

    def _submit(self, array: Any, piece: int, check: Check | None = None, genes: _GenesOfPiece | None = None) -> None:
        self._wait(_MAX_PENDING - 1)
        self._pending.append(self._pool.submit(self._read, array, piece, check, genes))

    def _wait(self, n_left: int) -> None:
        """Takes results, which are in the order of the pieces, until only so many pieces are being read."""
        while len(self._pending) > n_left:
            try:
                genes = self._pending.popleft().result()
            except _WrongError as wrong:
                self._findings.add(*wrong.args)
                genes = None
            if genes is not None and genes.head is not None and self._tail is not None and genes.head <= self._tail:
                self._findings.add(genes.path, genes.disordered(genes.row))
            self._tail = None if genes is None else genes.tail

    def _read(self, array: Any, piece: int, check: Check | None, genes: _GenesOfPiece | None) -> _GenesOfPiece | None:
        for at, elements in self._chunks(array, piece):
            if check is not None and elements.size:
                check(at, elements)
        return genes

    def _chunks(self, array: Any, piece: int) -> Iterator[tuple[int, NDArray[Any]]]:
        """The number of the first element, and the elements, of every chunk of a piece. Raises _WrongError."""
        at = array.first_element(piece)
        try:
            for chunk in array.chunks_of(piece):
                yield at, chunk
                at += array.chunk_elements
                self._advance(chunk.size)
        except DAMAGED as error:  # if it is missing, Hierarchy.check has said so
            raise _WrongError(array.key(piece), error, array.path) from error
