"""The local mirror of a store: the decoded chunks of its arrays in files, filled chunk by chunk.

Element i of an array is at byte i * itemsize of a sparse file NAME.flat. In the compact form, rows of matrices are kept
instead (row_blocks.py), and a mirror may have both. checksums.py describes the words that say which chunks are present.
A word is stored after the chunk's bytes, in one aligned write, so a process killed at any moment leaves each chunk
either complete or absent.

A process compares a chunk with its checksum when it first uses the chunk, unless the files have not changed since all
chunks were verified (directory.py). After power loss, truncation or a flipped byte, the chunk is a miss and is read
from the store again.

The directory is named after the fingerprint of the store, so changed objects get another mirror. Any number of
processes can fill and read a mirror at once, because they all write the same bytes.
"""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from zloader.caching.atomic_files import cached_path, has_files
from zloader.caching.checksums import map_file
from zloader.caching.chunk_file import ChunkFile
from zloader.caching.directory import MirrorDirectory
from zloader.caching.leases import Leases
from zloader.caching.rows_file import RowsFile
from zloader.common import page_cache
from zloader.common.options import Cache
from zloader.common.records import Held, Rows
from zloader.storage.decode import checksum
from zloader.storage.layout import ArrayLayout, MatrixLayout
from zloader.storage.row_blocks import PANEL, RowForm

log = logging.getLogger("zloader")

_CHUNK_BYTES = 1 << 20  # of an array that is made by zloader
_WINDOW_BYTES = 32 << 20  # compared with its checksums before its pages are released
_SHORT_BYTES = 1024  # runs of rows that are shorter than this on average are read instead of mapped


class MirrorArray(ChunkFile):
    """The decoded chunks of one array. Raises OSError if its files cannot be created or opened.

    `jobs` (dtype CHUNK) say where the elements of each chunk are in an array.
    """

    def __init__(self, directory: MirrorDirectory, layout: ArrayLayout) -> None:
        path, words_path = (cached_path(directory.path, layout.path, suffix) for suffix in ("flat", "sums"))
        super().__init__(directory, layout, path, words_path, layout.n_elements * layout.dtype.itemsize)

    @property
    def elements(self) -> NDArray[Any]:
        """The file as elements. Only those of present chunks are valid."""
        return self.content.view(self.layout.dtype)

    def bounds(self, chunks: Rows) -> tuple[Rows, Rows]:
        first, last = self.layout.chunk_bounds(chunks)
        return first * self.layout.dtype.itemsize, last * self.layout.dtype.itemsize

    def rows(self, starts: Rows, stops: Rows) -> tuple[NDArray[Any], Rows]:
        """An array with the elements `[start, stop)` of each row, and where each row begins in it.

        The array is the memory map, unless the rows are so short and scattered that most of each mapped page would be
        unused. Then they are read into a new array.
        """
        itemsize, lengths = self.layout.dtype.itemsize, stops - starts
        page_cache.prefetch(self._file, starts * itemsize, stops * itemsize)
        runs = 1 + int(np.count_nonzero(starts[1:] != stops[:-1]))
        n_bytes = int(lengths.sum()) * itemsize
        if n_bytes >= runs * _SHORT_BYTES:
            self.count_mapped(n_bytes)
            return self.elements, starts
        read = page_cache.read(self._file, starts * itemsize, stops * itemsize).view(self.layout.dtype)
        return read, np.cumsum(lengths) - lengths

    def complete(self) -> NDArray[Any] | None:
        """All elements, in a memory map of their own that is made for reading from start to end.

        None if a chunk is missing. Chunks that this process has not verified yet are compared with their checksums.
        """
        step = max(1, _WINDOW_BYTES // (self.layout.chunk_elements * self.layout.dtype.itemsize))
        for first in range(0, self.layout.n_chunks, step):
            chunks = np.arange(first, min(first + step, self.layout.n_chunks))
            if not self.contains(chunks):
                if len(self.missing(chunks)):
                    return None
                page_cache.release(self.content)
        self.record_verified()
        return np.frombuffer(map_file(self._file, self._n_bytes, mmap.ACCESS_READ), np.uint8).view(self.layout.dtype)

    def allocate(self) -> bool:
        """Allocates the disk space of the whole file, if the cache has limits; returns whether it fits."""
        if not self.limited or self.is_allocated or self.n_present == self.layout.n_chunks:
            return True
        return bool(self._directory.space.allocate(self._file, [(0, len(self.content))]))

    def put(self, first: int, elements: NDArray[Any]) -> None:
        """Writes consecutive decoded chunks from chunk `first` on. After a failure (full disk), writes no more."""
        (begin,), _ = self.layout.chunk_bounds(np.array([first]))
        if not len(elements) or not self._write(int(begin) * self.layout.dtype.itemsize, elements):
            return
        chunks = np.arange(first, int(self.layout.chunk_of(begin + len(elements) - 1)) + 1)
        starts, stops = (bounds - begin for bounds in self.layout.chunk_bounds(chunks))
        pieces = zip(starts.tolist(), stops.tolist(), strict=True)
        self._mark_present(first, np.array([checksum(elements[a:b]) for a, b in pieces], np.uint64))

    def fill(self, windows: Iterable[NDArray[Any]]) -> NDArray[Any] | None:
        """Writes all elements, given in windows of any size, and then marks all chunks as present.

        Returns all elements as `complete` does, or None after a failure (full disk).
        """
        offset, checksums = 0, np.zeros(self.layout.n_chunks, np.uint64)
        for window in windows:
            content = np.ascontiguousarray(window, self.layout.dtype).reshape(-1).view(np.uint8)
            if not self.writable or not self._write(offset, content):
                return None
            for chunk, piece in _pieces(content, offset, self.decoded_chunk_bytes):
                checksums[chunk] = google_crc32c.extend(int(checksums[chunk]), piece)
            offset += len(content)
        self._mark_present(0, checksums)
        return self.complete()


def _pieces(content: NDArray[np.uint8], offset: int, step: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """The parts of bytes from `offset` on that are in each chunk of `step` bytes, with the number of the chunk."""
    for chunk in range(offset // step, -(-(offset + len(content)) // step)):
        yield chunk, content[max(0, chunk * step - offset) : (chunk + 1) * step - offset]


@dataclass(frozen=True, kw_only=True)
class MirrorContents(Held):
    """The same, and whether one of the matrices accepts no more rows."""

    full: bool


def contents_of(files: Iterable[RowsFile]) -> MirrorContents:
    """The current contents of some matrices together."""
    files = list(files)
    return MirrorContents(
        chunks=sum(file.layout.n_chunks for file in files),
        chunks_held=sum(file.n_present for file in files),
        bytes_in_all=sum(file.bytes_in_all for file in files),
        bytes_held=sum(file.present_bytes for file in files),
        full=not all(file.writable for file in files),
    )


class Mirror:
    """The mirror of the rows of one matrix, or of some of its genes.

    Rows with all genes, if there are any beside these, are in `whole`. They are read, but not filled any more.
    """

    def __init__(self, directory: MirrorDirectory, rows: RowsFile, whole: RowsFile | None = None) -> None:
        self._directory, self.rows, self.whole = directory, rows, whole
        if whole is not None:
            whole.writable = False

    def leases(self) -> Leases:
        """A new owner of leases."""
        return Leases(self._directory.path)

    def record_verified(self) -> None:
        """Records the verified files, so that no process has to compare their checksums again."""
        self.rows.record_verified()
        if self.whole is not None:
            self.whole.record_verified()


def open_mirror_directory(cache: Cache, fingerprint: str, url: str) -> MirrorDirectory | None:
    """The directory of a store's mirror, or None, with a warning, if it cannot be used."""
    try:
        return MirrorDirectory(cache, fingerprint, url)
    except OSError as error:
        log.warning("cannot keep a mirror in %s (%s): every epoch will read from the store", cache.directory, error)
        return None


def open_rows(directory: MirrorDirectory, matrix: MatrixLayout, panel: NDArray[Any] | None) -> Mirror | None:
    """The mirror of a matrix, or of a panel of its genes, given as the column of each gene.

    None if there is nothing to keep, or, with a warning, if its files cannot be created.
    """
    if not matrix.values.n_elements:
        return None
    try:
        form, whole = (RowForm.of(matrix, each, compact=directory.form == "compact") for each in (panel, None))
        is_another = not has_rows(directory, form) and has_panels(directory, matrix)
        has_whole = whole.name != form.name and has_rows(directory, whole)
        rows = RowsFile(directory, form)
        if is_another and not has_whole:
            log.warning(
                "%s has %s with other genes, and not with these: the store is read again. A mirror of all genes, as "
                "zl.warm of the whole dataset makes, serves every choice of genes",
                directory.path,
                matrix.path,
            )
        return Mirror(directory, rows, RowsFile(directory, whole) if has_whole else None)
    except OSError as error:
        log.warning("cannot keep a mirror in %s (%s): every epoch will read from the store", directory.path, error)
        return None


def has_rows(directory: MirrorDirectory, form: RowForm) -> bool:
    """Whether the mirror has files of these rows, with some of their blocks or none."""
    return has_files(directory.path, form.name, "rows", "index")


def has_panels(directory: MirrorDirectory, matrix: MatrixLayout) -> bool:
    """Whether the mirror has rows of the matrix with some of its genes."""
    first = cached_path(directory.path, f"{matrix.path}{PANEL}", "rows").stem
    return any(path.name.startswith(first) for path in directory.path.glob("*.rows"))


def has_array(directory: MirrorDirectory, path: str) -> bool:
    """Whether the mirror has files of a decoded array, with some of its chunks or none."""
    return has_files(directory.path, path, "flat", "sums")


def open_array(directory: MirrorDirectory, layout: ArrayLayout) -> MirrorArray | None:
    """A single decoded array, which gets all of its disk space now if the cache has limits.

    Returns None, with a message in the log, if its files cannot be created or it does not fit.
    """
    try:
        array = MirrorArray(directory, layout)
        if array.allocate():
            return array
        log.warning("there is no room for %s in %s: it is read again when needed", layout.path, directory.path)
        return None
    except OSError as error:
        log.warning("cannot keep %s in %s (%s): it is read again when needed", layout.path, directory.path, error)
        return None


def load_column(
    directory: MirrorDirectory, name: str, *, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> NDArray[Any] | None:
    """An array saved by `save_column`, memory-mapped and read-only, or None if it is not cached or damaged."""
    array = open_array(directory, _whole(name, shape, dtype)) if has_array(directory, name) else None
    column = None if array is None else array.complete()
    return None if column is None else column.reshape(shape)


def save_column(
    directory: MirrorDirectory,
    name: str,
    windows: Iterable[NDArray[Any]],
    *,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
) -> NDArray[Any] | None:
    """Saves an array given in windows along its first axis. Returns it memory-mapped, or None if it cannot be saved."""
    array = open_array(directory, _whole(name, shape, dtype))
    column = None if array is None else array.fill(windows)
    return None if column is None else column.reshape(shape)


def _whole(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ArrayLayout:
    """The layout of an array that is no array of the store, but made from them."""
    chunk_elements = max(1, _CHUNK_BYTES // dtype.itemsize)
    return ArrayLayout.plain(name, dtype, n_elements=math.prod(shape), chunk_elements=chunk_elements)
