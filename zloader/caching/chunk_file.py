"""A file with the chunks of one array, and the words beside it that say which chunks are present (checksums.py).

Both forms of a mirror are such files: the decoded chunks of an array (mirror.py), and blocks of coded rows of a matrix
(row_blocks.py).
"""

from __future__ import annotations

import logging
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.caching.checksums import PRESENT, map_file, map_words, open_file
from zloader.caching.directory import MirrorDirectory
from zloader.caching.leases import Leases
from zloader.common import page_cache
from zloader.common.descriptors import close_with
from zloader.common.locks import forkable_lock
from zloader.common.records import Rows
from zloader.storage.decode import checksum
from zloader.storage.layout import ArrayLayout

log = logging.getLogger("zloader")

_PIECE_BYTES = 256 * 1024  # disk space per allocation
_WINDOW = 1 << 17  # chunks looked at at a time
_MANY_CHUNKS = 1 << 21  # their words take 16 MiB
# A smaller file stays mapped from epoch to epoch, because mapping its pages again costs a warm epoch a few percent.
_LARGE_FILE, _MOST_MAPPED = 8 << 30, 256 << 20


class ChunkSet:
    """Some of an array's chunks, at one bit per chunk. Thread-safe."""

    def __init__(self, n_chunks: int) -> None:
        self._bits = np.zeros(-(-n_chunks // 8), np.uint8)  # takes no memory until a chunk is added
        self._bytes = self._bits.data  # ten times as fast as NumPy for a single chunk
        self._lock = forkable_lock()  # threads may change bits of the same byte

    def contains(self, chunks: Rows) -> NDArray[np.bool_]:
        """Whether each of some chunks is in the set."""
        return np.asarray((self._bits[chunks >> 3] >> (chunks & 7).astype(np.uint8)) & 1, bool)

    def add(self, chunk: int) -> None:
        """Adds a chunk."""
        with self._lock:
            self._bytes[chunk >> 3] |= 1 << (chunk & 7)

    def remove(self, chunks: Rows) -> None:
        """Removes some chunks."""
        with self._lock:
            for chunk in chunks.tolist():
                self._bytes[chunk >> 3] &= 0xFF ^ (1 << (chunk & 7))

    def assign(self, first: int, chosen: NDArray[np.bool_]) -> None:
        """Sets which chunks from `first`, a multiple of 8, are in the set."""
        bits = np.packbits(chosen, bitorder="little")
        with self._lock:
            self._bits[first // 8 : first // 8 + len(bits)] = bits

    def covers(self, first: int, chosen: NDArray[np.bool_]) -> bool:
        """Whether all chosen chunks from `first`, a multiple of 8, are in the set."""
        bits = np.packbits(chosen, bitorder="little")
        return not (bits & ~self._bits[first // 8 : first // 8 + len(bits)]).any()


class ChunkFile(ABC):
    """The chunks of one array in the file `path` of `n_bytes`, and their words in the sidecar file `words_path`.

    Raises OSError if the files cannot be created or opened.
    """

    def __init__(
        self, directory: MirrorDirectory, layout: ArrayLayout, path: Path, words_path: Path, n_bytes: int
    ) -> None:
        self.layout = layout
        self._directory = directory
        self._path = path
        self._words_path = words_path
        self._file = open_file(path)
        close_with(self, self._file)
        if os.fstat(self._file).st_size != n_bytes:
            os.truncate(self._file, n_bytes)
        self._n_bytes, self._mapped_bytes = n_bytes, 0
        self.content = self._map()
        self._words, *self._places = map_words(directory, words_path, layout, n_bytes)
        verified = directory.verified.contains(path, words_path)
        # Chunks that this process has verified or written, or that were recorded as verified.
        self._verified = ChunkSet(layout.n_chunks)
        if verified:
            for first, present in self._present_windows():
                self._verified.assign(first, present)
        self._unrecorded = not verified
        self.writable = self._words.flags.writeable

    def _map(self) -> NDArray[np.uint8]:
        return np.frombuffer(map_file(self._file, self._n_bytes, mmap.ACCESS_READ, mmap.MADV_RANDOM), np.uint8)

    def count_mapped(self, n_bytes: int) -> None:
        """Counts bytes to be read through the map, `content`. Maps a large file anew when they have become many.

        Pages that have been read stay mapped, and each 2 MiB of the file that they lie in take 4 KiB for page tables,
        which are only given back with the map: 12 GB for a file of 6 TB. Arrays made before keep the old map.
        """
        self._mapped_bytes += n_bytes
        if self._mapped_bytes > _MOST_MAPPED and self._n_bytes > _LARGE_FILE:
            self._mapped_bytes, self.content = 0, self._map()

    @abstractmethod
    def bounds(self, chunks: Rows) -> tuple[Rows, Rows]:
        """The first byte of each chunk in the file, and the byte after its last."""

    def prefetch(self, chunks: Rows) -> None:
        """Makes the kernel load chunks into the page cache, if needed."""
        page_cache.prefetch(self._file, *self.bounds(chunks))

    @property
    def limited(self) -> bool:
        """Whether the cache has limits, so that acquiring chunks allocates disk space."""
        return self._directory.space.limited

    @property
    def is_allocated(self) -> bool:
        """Whether the whole file has its disk space."""
        return os.fstat(self._file).st_blocks * 512 >= self._n_bytes

    def _present(self, chunks: Rows | slice) -> NDArray[np.bool_]:
        return np.asarray((self._words[chunks] & np.uint64(PRESENT)) != 0)

    def _present_windows(self) -> Iterator[tuple[int, NDArray[np.bool_]]]:
        """Which chunks are present, in windows, each with its first chunk. There may be 60 million chunks.

        Windows without any are left out. So an almost empty mirror takes hardly any memory here: neither bits of chunks
        that were never touched, nor masks.
        """
        for first in range(0, self.layout.n_chunks, _WINDOW):
            if self._words[first : first + _WINDOW].any():
                yield first, self._present(slice(first, first + _WINDOW))
            page_cache.release(self._words)

    def contains(self, chunks: Rows) -> bool:
        """Whether all chunks are present and verified already. Does not read their bytes."""
        # Another process may have discarded a chunk.
        return bool((self._verified.contains(chunks) & self._present(chunks)).all())

    def n_held(self, chunks: Rows) -> int:
        """How many of some chunks are present. Verifies nothing."""
        return int(np.count_nonzero(self._present(chunks)))

    def has_unverified(self, chunks: Rows) -> bool:
        """Whether any chunk is present but not verified yet, so that `missing` would read its bytes."""
        return bool((self._present(chunks) & ~self._verified.contains(chunks)).any())

    def missing(self, chunks: Rows) -> Rows:
        """The chunks that are absent or damaged, in the order given; verifies checksums on first use."""
        missing = ~self._present(chunks)
        unverified = np.flatnonzero(~missing & ~self._verified.contains(chunks))
        starts, stops = self.bounds(chunks[unverified])
        self.count_mapped(int((stops - starts).sum()))
        for position, start, stop in zip(unverified.tolist(), starts.tolist(), stops.tolist(), strict=True):
            chunk = int(chunks[position])
            if self._words[chunk] == PRESENT | checksum(self.content[start:stop]):
                self._verified.add(chunk)
            else:
                log.warning("a chunk in %s differs from its checksum; reading it from the store", self._path)
                missing[position] = True
                self.discard(chunks[position : position + 1])
        if self.layout.n_chunks > _MANY_CHUNKS:  # a fetch uses words all over the file
            page_cache.release(self._words)
        return np.asarray(chunks[missing])

    def discard(self, chunks: Rows) -> None:
        """Marks chunks as absent, for every process."""
        self._verified.remove(chunks)
        if self.writable:
            self._words[chunks] = 0

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
        if not self.writable or not len(chunks) or not self.limited or self.is_allocated:
            return chunks if self.writable else chunks[:0]
        piece = max(1, _PIECE_BYTES * self.layout.n_chunks // max(1, len(self.content)))
        first, last = self.bounds(chunks)
        begins = np.flatnonzero((first != np.append(-1, last[:-1])) | (chunks % piece == 0))
        ends = np.append(begins[1:], len(chunks))
        runs = zip(first[begins].tolist(), (last[ends - 1] - first[begins]).tolist(), strict=True)
        done = self._allocate(list(runs))
        return chunks[: ends[done - 1]] if done else chunks[:0]

    def _allocate(self, runs: Sequence[tuple[int, int]]) -> int:
        """Allocates runs `(offset, bytes)` of the file; returns how many of them fit. Unless all do, writing stops."""
        try:
            done = self._directory.space.allocate(self._file, runs)
        except OSError as error:
            self._stop_writing(error)
            return 0
        if done < len(runs):
            self.writable = False
            log.info("the mirror %s has reached the limits of its cache; the rest is read from the store", self._path)
        return done

    def release(self, chunks: Rows, leases: Leases) -> None:
        """Releases the owner's leases on chunks. Chunks that have been written meanwhile stay present."""
        if leases.word:
            self._words[chunks[self._words[chunks] == leases.word]] = 0

    def _write(self, offset: int, content: NDArray[Any]) -> bool:
        """Writes bytes to the file; returns whether that succeeded. After a failure (full disk), nothing is written."""
        left = content.view(np.uint8).data
        try:
            while left:
                written = os.pwrite(self._file, left, offset)
                left, offset = left[written:], offset + written
        except OSError as error:
            self._stop_writing(error)
            return False
        self._unrecorded = True
        return True

    def _mark_present(self, first: int, checksums: NDArray[np.uint64]) -> None:
        """Makes consecutive chunks from `first` on visible to every process, once their bytes have been written."""
        last = first + len(checksums)
        self._words[first:last] = checksums | np.uint64(PRESENT)
        for chunk in range(first, last):
            self._verified.add(chunk)

    def _stop_writing(self, error: OSError) -> None:
        if self.writable:
            self.writable = False
            log.warning("cannot write the mirror %s (%s); reading continues without filling it", self._path, error)

    def record_verified(self) -> None:
        """Records the files as verified, if this process has verified or written every present chunk."""
        if self._unrecorded and all(self._verified.covers(*window) for window in self._present_windows()):
            self._directory.verified.record([self._path, self._words_path])
            self._unrecorded = False

    @property
    def n_present(self) -> int:
        """The number of present chunks."""
        return sum(int(np.count_nonzero(present)) for _, present in self._present_windows())

    @property
    def decoded_chunk_bytes(self) -> int:
        """Decoded bytes of a chunk."""
        return self.layout.chunk_elements * self.layout.dtype.itemsize

    @property
    def bytes_in_all(self) -> int:
        """Decoded bytes of all chunks."""
        return self.layout.n_elements * self.layout.dtype.itemsize

    @property
    def present_bytes(self) -> int:
        """Decoded bytes of the present chunks."""
        n_elements = 0
        for number, present in self._present_windows():
            first, last = self.layout.chunk_bounds(number + np.flatnonzero(present))
            n_elements += int((last - first).sum())
        return n_elements * self.layout.dtype.itemsize
