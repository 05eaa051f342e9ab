"""A file with the chunks of one array, and the words beside it that say which chunks are present (checksums.py).

Both forms of a mirror are such files: mirror.py has the decoded one, stored_array.py the stored one. A form says where
in the file each chunk is.
"""

from __future__ import annotations

import logging
import mmap
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.caching.checksums import PRESENT, map_file, map_words, open_file
from zloader.caching.directory import MirrorDirectory
from zloader.caching.leases import Leases
from zloader.common.records import Rows
from zloader.storage.decode import checksum
from zloader.storage.layout import ArrayLayout

log = logging.getLogger("zloader")

_PIECE_BYTES = 256 * 1024  # disk space per allocation


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
        if os.fstat(self._file).st_size != n_bytes:
            os.truncate(self._file, n_bytes)
        memory = map_file(self._file, n_bytes, mmap.ACCESS_READ, mmap.MADV_RANDOM)
        self.content = np.frombuffer(memory, np.uint8)
        self._words, *self._places = map_words(directory, words_path, layout, n_bytes)
        verified = directory.verified.contains(path, words_path)
        # Chunks that this process has verified or written, or that were recorded as verified.
        self._verified = self._present(slice(None)) if verified else np.zeros(layout.n_chunks, bool)
        self._unrecorded = not verified
        self.writable = self._words.flags.writeable

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    @abstractmethod
    def bounds(self, chunks: Rows) -> tuple[Rows, Rows]:
        """The first byte of each chunk in the file, and the byte after its last."""

    @property
    def limited(self) -> bool:
        """Whether the cache has limits, so that acquiring chunks allocates disk space."""
        return self._directory.space.limited

    def _present(self, chunks: Rows | slice) -> NDArray[np.bool_]:
        return np.asarray((self._words[chunks] & np.uint64(PRESENT)) != 0)

    def contains(self, chunks: Rows) -> bool:
        """Whether all chunks are present and verified already. Does not read their bytes."""
        return bool((self._verified[chunks] & self._present(chunks)).all())  # another process may have discarded one

    def n_held(self, chunks: Rows) -> int:
        """How many of some chunks are present. Verifies nothing."""
        return int(np.count_nonzero(self._present(chunks)))

    def has_unverified(self, chunks: Rows) -> bool:
        """Whether any chunk is present but not verified yet, so that `missing` would read its bytes."""
        return bool((self._present(chunks) & ~self._verified[chunks]).any())

    def missing(self, chunks: Rows) -> Rows:
        """The chunks that are absent or damaged, in the order given; verifies checksums on first use."""
        missing = ~self._present(chunks)
        unverified = np.flatnonzero(~missing & ~self._verified[chunks])
        starts, stops = self.bounds(chunks[unverified])
        for position, start, stop in zip(unverified.tolist(), starts.tolist(), stops.tolist(), strict=True):
            chunk = int(chunks[position])
            if self._words[chunk] == PRESENT | checksum(self.content[start:stop]):
                self._verified[chunk] = True
            else:
                log.warning("a chunk in %s differs from its checksum; reading it from the store", self._path)
                missing[position] = True
                self.discard(chunks[position : position + 1])
        return np.asarray(chunks[missing])

    def discard(self, chunks: Rows) -> None:
        """Marks chunks as absent, for every process."""
        self._verified[chunks] = False
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
        if not self.writable or not len(chunks) or not self._directory.space.limited:
            return chunks if self.writable else chunks[:0]
        piece = max(1, _PIECE_BYTES * self.layout.n_chunks // max(1, len(self.content)))
        first, last = self.bounds(chunks)
        begins = np.flatnonzero((first != np.append(-1, last[:-1])) | (chunks % piece == 0))
        ends = np.append(begins[1:], len(chunks))
        runs = zip(first[begins].tolist(), (last[ends - 1] - first[begins]).tolist(), strict=True)
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

    def _mark_present(self, chunk: int, content: NDArray[Any]) -> None:
        """Makes a chunk visible to every process, once its bytes have been written."""
        self._words[chunk] = PRESENT | checksum(content)
        self._verified[chunk] = True

    def _stop_writing(self, error: OSError) -> None:
        if self.writable:
            self.writable = False
            log.warning("cannot write the mirror %s (%s); reading continues without filling it", self._path, error)

    def record_verified(self) -> None:
        """Records the files as verified, if this process has verified or written every present chunk."""
        if self._unrecorded and self._verified[self._present(slice(None))].all():
            self._directory.verified.record([self._path, self._words_path])
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
