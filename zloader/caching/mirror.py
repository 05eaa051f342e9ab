"""The local mirror: decoded arrays as flat files, filled chunk by chunk.

Element i of an array is at byte i * itemsize of a sparse file NAME.flat. Beside it, NAME.sums has one word per chunk
(checksums.py): 0 if the chunk is absent, a lease (leases.py) while a process downloads it, and otherwise its checksum.
The checksum is stored after the chunk's bytes, in one aligned write. So a process killed at any moment leaves each
chunk either complete or absent.

A process compares a chunk with its checksum when it first uses the chunk, unless the files have not changed since all
chunks were verified (verified.py). After power loss, truncation or a flipped byte, the chunk is a miss and is read from
the store again.

The directory is named after the fingerprint of the store, so changed objects get another mirror. Any number of
processes can fill and read a mirror at once, because they all write the same bytes.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.caching import page_cache
from zloader.caching.atomic_files import cached_path
from zloader.caching.checksums import PRESENT, map_file, map_words, open_file
from zloader.caching.directory import MirrorDirectory
from zloader.caching.leases import Leases
from zloader.common.options import Cache
from zloader.common.records import Rows
from zloader.storage.decode import checksum
from zloader.storage.layout import ArrayLayout

log = logging.getLogger("zloader")

_SHORT_BYTES = 1024  # runs of rows that are shorter than this on average are read instead of mapped
_PIECE_BYTES = 256 * 1024  # disk space per allocation


class MirrorArray:
    """The mirror of one array. Raises OSError if its files cannot be created or opened."""

    def __init__(self, directory: MirrorDirectory, layout: ArrayLayout) -> None:
        self.layout = layout
        self._directory = directory
        self._path = cached_path(directory.path, layout.path, "flat")
        self._checksums_path = cached_path(directory.path, layout.path, "sums")
        n_bytes = layout.n_elements * layout.dtype.itemsize
        self._file = open_file(self._path)
        if os.fstat(self._file).st_size != n_bytes:
            os.truncate(self._file, n_bytes)
        self.elements = np.frombuffer(map_file(self._file, n_bytes, mmap.ACCESS_READ, mmap.MADV_RANDOM), layout.dtype)
        self._words = map_words(directory, self._checksums_path, layout)
        verified = directory.verified.contains(self._path, self._checksums_path)
        # Chunks that this process has verified or written, or that were recorded as verified.
        self._verified = self._present(slice(None)) if verified else np.zeros(layout.n_chunks, bool)
        self._unrecorded = not verified
        self.writable = self._words.flags.writeable

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    @property
    def limited(self) -> bool:
        """Whether the cache has limits, so that acquiring chunks allocates disk space."""
        return self._directory.space.limited

    def _present(self, chunks: Rows | slice) -> NDArray[np.bool_]:
        return np.asarray((self._words[chunks] & np.uint64(PRESENT)) != 0)

    def contains(self, chunks: Rows) -> bool:
        """Whether all chunks are present and verified already. Does not read their bytes."""
        return bool((self._verified[chunks] & self._present(chunks)).all())  # another process may have discarded one

    def has_unverified(self, chunks: Rows) -> bool:
        """Whether any chunk is present but not verified yet, so that `missing` would read its bytes."""
        return bool((self._present(chunks) & ~self._verified[chunks]).any())

    def missing(self, chunks: Rows) -> Rows:
        """The chunks that are absent or damaged, in the order given; verifies checksums on first use."""
        missing = ~self._present(chunks)
        for position in np.flatnonzero(~missing & ~self._verified[chunks]).tolist():
            chunk = int(chunks[position])
            if self._words[chunk] == PRESENT | checksum(self._chunk(chunk)):
                self._verified[chunk] = True
            else:
                log.warning("a chunk in %s differs from its checksum; reading it from the store", self._path)
                missing[position] = True
                if self.writable:
                    self._words[chunk] = 0
        return np.asarray(chunks[missing])

    def _chunk(self, chunk: int) -> NDArray[Any]:
        first = chunk * self.layout.chunk_elements
        return self.elements[first : first + self.layout.chunk_elements]

    def copy(self, chunks: Rows, slots: Sequence[NDArray[Any]]) -> None:
        """Copies present chunks to their slots; a slot shorter than its chunk gets the first elements."""
        for chunk, slot in zip(chunks.tolist(), slots, strict=True):
            slot[:] = self._chunk(chunk)[: len(slot)]

    def prefetch(self, starts: Rows, stops: Rows) -> None:
        """Makes the kernel load the elements `[start, stop)` of each row into the page cache, if needed."""
        itemsize = self.layout.dtype.itemsize
        page_cache.prefetch(self._file, starts * itemsize, stops * itemsize)

    def rows(self, starts: Rows, stops: Rows) -> tuple[NDArray[Any], Rows]:
        """An array with the elements `[start, stop)` of each row, and where each row begins in it.

        The array is the memory map, unless the rows are so short and scattered that most of each mapped page would be
        unused. Then they are read into a new array.
        """
        self.prefetch(starts, stops)
        itemsize, lengths = self.layout.dtype.itemsize, stops - starts
        runs = 1 + int(np.count_nonzero(starts[1:] != stops[:-1]))
        if int(lengths.sum()) * itemsize >= runs * _SHORT_BYTES:
            return self.elements, starts
        read = page_cache.read(self._file, starts * itemsize, stops * itemsize).view(self.layout.dtype)
        return read, np.cumsum(lengths) - lengths

    def acquire(self, chunks: Rows, leases: Leases) -> tuple[Rows, Rows]:
        """Leases absent chunks (given in ascending order); returns those leased now, and those leased already.

        Chunks that do not fit on disk are in neither. From then on the mirror accepts no more chunks.
        """
        with leases.exclusive():
            words = self._words[chunks]
            absent = (words & np.uint64(PRESENT)) == 0
            alive = absent & leases.alive(np.where(absent, words, np.uint64(0)))
            mine = self._allocated(chunks[absent & ~alive])
            self._words[mine] = leases.word
        return mine, np.asarray(chunks[alive])

    def _allocated(self, chunks: Rows) -> Rows:
        """Allocates disk space for chunks; returns the leading ones that fit."""
        if not self.writable or not len(chunks) or not self._directory.space.limited:
            return chunks if self.writable else chunks[:0]
        itemsize = self.layout.dtype.itemsize
        piece = max(1, _PIECE_BYTES // (self.layout.chunk_elements * itemsize))
        begins = np.flatnonzero((np.diff(chunks, prepend=chunks[0] - 2) != 1) | (chunks % piece == 0))
        ends = np.append(begins[1:], len(chunks))
        first, _ = self.layout.chunk_bounds(chunks[begins])
        _, last = self.layout.chunk_bounds(chunks[ends - 1])
        runs = zip((first * itemsize).tolist(), ((last - first) * itemsize).tolist(), strict=True)
        try:
            done = self._directory.space.allocate(self._file, list(runs))
        except OSError as error:
            self._stop_writing(error)
            return chunks[:0]
        if done < len(begins):
            self.writable = False
            log.info(
                "the mirror %s has reached the limits of its cache; other chunks are read from the store", self._path
            )
        return chunks[: ends[done - 1]] if done else chunks[:0]

    def release(self, chunks: Rows, leases: Leases) -> None:
        """Releases the owner's leases on chunks. Chunks that have been written meanwhile stay present."""
        if leases.word:
            self._words[chunks[self._words[chunks] == leases.word]] = 0

    def put(self, first: int, elements: NDArray[Any]) -> None:
        """Writes consecutive decoded chunks from chunk `first` on. After a failure (full disk), writes no more."""
        width = self.layout.chunk_elements
        try:
            _write_all(self._file, elements, first * width * self.layout.dtype.itemsize)
        except OSError as error:
            self._stop_writing(error)
            return
        self._unrecorded = True
        for chunk, begin in enumerate(range(0, len(elements), width), first):
            self._words[chunk] = PRESENT | checksum(elements[begin : begin + width])
            self._verified[chunk] = True

    def _stop_writing(self, error: OSError) -> None:
        if self.writable:
            self.writable = False
            log.warning("cannot write the mirror %s (%s); reading continues without filling it", self._path, error)

    def record_verified(self) -> None:
        """Records the files as verified, if this process has verified or written every present chunk."""
        if self._unrecorded and self._verified[self._present(slice(None))].all():
            self._directory.verified.record([self._path, self._checksums_path])
            self._unrecorded = False

    @property
    def n_present(self) -> int:
        """The number of present chunks."""
        return int(self._present(slice(None)).sum())

    @property
    def present_bytes(self) -> int:
        """Decoded bytes of the present chunks."""
        first, last = self.layout.chunk_bounds(np.flatnonzero(self._present(slice(None))))
        return int((last - first).sum()) * self.layout.dtype.itemsize


def _write_all(file: int, elements: NDArray[Any], offset: int) -> None:
    left = elements.view(np.uint8).data
    while left:
        written = os.pwrite(file, left, offset)
        left, offset = left[written:], offset + written


@dataclass(frozen=True, kw_only=True)
class MirrorContents:
    """How much of some arrays is mirrored, in chunks and decoded bytes; `full` if one of them accepts no more."""

    chunks: int
    chunks_held: int
    bytes_in_all: int
    bytes_held: int
    full: bool


def contents_of(arrays: Iterable[MirrorArray]) -> MirrorContents:
    """The current contents of some arrays together."""
    arrays = list(arrays)
    return MirrorContents(
        chunks=sum(array.layout.n_chunks for array in arrays),
        chunks_held=sum(array.n_present for array in arrays),
        bytes_in_all=sum(array.layout.n_elements * array.layout.dtype.itemsize for array in arrays),
        bytes_held=sum(array.present_bytes for array in arrays),
        full=not all(array.writable for array in arrays),
    )


class Mirror:
    """The mirror of some arrays of one store."""

    def __init__(self, directory: MirrorDirectory, arrays: Sequence[ArrayLayout]) -> None:
        self._directory = directory
        self.arrays = {layout.path: MirrorArray(directory, layout) for layout in arrays}

    def leases(self) -> Leases:
        """A new owner of leases."""
        return Leases(self._directory.path)

    def record_verified(self) -> None:
        """Records the verified files, so that no process has to compare their checksums again."""
        for array in self.arrays.values():
            array.record_verified()


def open_mirror_directory(cache: Cache, fingerprint: str, url: str) -> MirrorDirectory | None:
    """The directory of a store's mirror, or None, with a warning, if it cannot be used."""
    try:
        return MirrorDirectory(cache, fingerprint, url)
    except OSError as error:
        log.warning("cannot keep a mirror in %s (%s): every epoch will read from the store", cache.directory, error)
        return None


def open_mirror(directory: MirrorDirectory, arrays: Sequence[ArrayLayout]) -> Mirror | None:
    """The mirror of some arrays of a store, or None, with a warning, if its files cannot be created."""
    try:
        return Mirror(directory, arrays)
    except OSError as error:
        log.warning("cannot keep a mirror in %s (%s): every epoch will read from the store", directory.path, error)
        return None
