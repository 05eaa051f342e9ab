"""The local mirror: decoded arrays as flat files, filled chunk by chunk.

Element i of an array stands at byte i * itemsize of a sparse file NAME.flat. Beside it NAME.sums holds a word a chunk
(checksums.py): nothing while the chunk is not there, a claim (leases.py) while somebody brings it, else its checksum. The
word is stored after the chunk's bytes, in one aligned write, so a process killed at any moment leaves a chunk either
whole or not there.

A process compares a chunk with its checksum when it first uses it, unless proof.py knows the files to be as they were
when all of them was right: after power loss, truncation or a flipped byte the chunk is a miss, to be read again.

The directory is named after the fingerprint of the store: changed objects have another mirror. Any number of processes
fill and read one mirror at once, since all write the same bytes.
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
from zloader.caching.atomic_files import file_of
from zloader.caching.checksums import PRESENT, mapped, mapped_words, opened
from zloader.caching.directory import MirrorDirectory
from zloader.caching.leases import Leases
from zloader.common.options import Cache
from zloader.common.records import Rows
from zloader.storage.decode import checksum
from zloader.storage.layout import ArrayLayout

log = logging.getLogger("zloader")

_SHORT_BYTES = 1024  # of a run of rows, on average, below which reading is better than mapping
_PIECE_BYTES = 256 * 1024  # of room on disk that is asked for at once


class MirrorArray:
    """The mirror of one array. Raises OSError when its files cannot be made or opened."""

    def __init__(self, place: MirrorDirectory, layout: ArrayLayout) -> None:
        self.layout = layout
        self._place = place
        self._path = file_of(place.directory, layout.path, "flat")
        self._sums = file_of(place.directory, layout.path, "sums")
        n_bytes = layout.n_elements * layout.dtype.itemsize
        self._file = opened(self._path)
        if os.fstat(self._file).st_size != n_bytes:
            os.truncate(self._file, n_bytes)
        self.elements = np.frombuffer(mapped(self._file, n_bytes, mmap.ACCESS_READ, mmap.MADV_RANDOM), layout.dtype)
        self._words = mapped_words(place, self._sums, layout)
        # Chunks whose checksum this process has compared or written itself, or that were right all along.
        proved = place.proof.holds(self._path, self._sums)
        self._trusted = self._present(slice(None)) if proved else np.zeros(layout.n_chunks, bool)
        self._unnoted = not proved
        self.writable = self._words.flags.writeable

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    @property
    def limited(self) -> bool:
        """Whether claiming chunks asks the file system for room."""
        return self._place.room.limited

    def _present(self, chunks: Rows | slice) -> NDArray[np.bool_]:
        return np.asarray((self._words[chunks] & np.uint64(PRESENT)) != 0)

    def holds(self, chunks: Rows) -> bool:
        """Whether all chunks are there and known to be right, without looking at their bytes."""
        return bool((self._trusted[chunks] & self._present(chunks)).all())  # somebody may have found one damaged

    def unproved(self, chunks: Rows) -> bool:
        """Whether there are chunks among them whose bytes `missing` would have to look at."""
        return bool((self._present(chunks) & ~self._trusted[chunks]).any())

    def missing(self, chunks: Rows) -> Rows:
        """Those of `chunks` that are not there or not what was written; compares checksums on first use."""
        missing = ~self._present(chunks)
        for position in np.flatnonzero(~missing & ~self._trusted[chunks]).tolist():
            chunk = int(chunks[position])
            if self._words[chunk] == PRESENT | checksum(self._chunk(chunk)):
                self._trusted[chunk] = True
            else:
                log.warning("a chunk in %s differs from its checksum: it is read again from the store", self._path)
                missing[position] = True
                if self.writable:
                    self._words[chunk] = 0
        return np.asarray(chunks[missing])

    def _chunk(self, chunk: int) -> NDArray[Any]:
        first = chunk * self.layout.chunk_elements
        return self.elements[first : first + self.layout.chunk_elements]

    def copy(self, chunks: Rows, slots: Sequence[NDArray[Any]]) -> None:
        """Copies chunks that are there, or the first elements of each, to where each belongs."""
        for chunk, slot in zip(chunks.tolist(), slots, strict=True):
            slot[:] = self._chunk(chunk)[: len(slot)]

    def ask_for(self, starts: Rows, stops: Rows) -> None:
        """Has the elements `[start, stop)` of rows brought into memory, where they are not."""
        itemsize = self.layout.dtype.itemsize
        page_cache.ask_for(self._file, starts * itemsize, stops * itemsize)

    def rows(self, starts: Rows, stops: Rows) -> tuple[NDArray[Any], Rows]:
        """An array in which the elements `[start, stop)` of rows are, and where each row begins there.

        It is the map, unless the rows are so short and scattered that most of what is mapped would not be theirs.
        """
        self.ask_for(starts, stops)
        itemsize, lengths = self.layout.dtype.itemsize, stops - starts
        runs = 1 + int(np.count_nonzero(starts[1:] != stops[:-1]))
        if int(lengths.sum()) * itemsize >= runs * _SHORT_BYTES:
            return self.elements, starts
        read = page_cache.read(self._file, starts * itemsize, stops * itemsize).view(self.layout.dtype)
        return read, np.cumsum(lengths) - lengths

    def claim(self, chunks: Rows, leases: Leases) -> tuple[Rows, Rows]:
        """Of chunks (ascending) that are not there: those that are now the owner's to bring, and those that others are.

        Chunks for which there is no room on disk are in neither; then the mirror takes no more.
        """
        with leases.alone():
            words = self._words[chunks]
            absent = (words & np.uint64(PRESENT)) == 0
            alive = absent & leases.alive(np.where(absent, words, np.uint64(0)))
            mine = self._with_room(chunks[absent & ~alive])
            self._words[mine] = leases.word
        return mine, np.asarray(chunks[alive])

    def _with_room(self, chunks: Rows) -> Rows:
        """The first of the chunks, as many as have room on disk."""
        if not self.writable or not len(chunks) or not self._place.room.limited:
            return chunks if self.writable else chunks[:0]
        itemsize = self.layout.dtype.itemsize
        piece = max(1, _PIECE_BYTES // (self.layout.chunk_elements * itemsize))
        begins = np.flatnonzero((np.diff(chunks, prepend=chunks[0] - 2) != 1) | (chunks % piece == 0))
        ends = np.append(begins[1:], len(chunks))
        first, _ = self.layout.chunk_bounds(chunks[begins])
        _, last = self.layout.chunk_bounds(chunks[ends - 1])
        runs = zip((first * itemsize).tolist(), ((last - first) * itemsize).tolist(), strict=True)
        try:
            done = self._place.room.allocate(self._file, list(runs))
        except OSError as error:
            self._stop_writing(error)
            return chunks[:0]
        if done < len(begins):
            self.writable = False
            log.info("the mirror %s is as full as it may be: what is not in it is read through", self._path)
        return chunks[: ends[done - 1]] if done else chunks[:0]

    def abandon(self, chunks: Rows, leases: Leases) -> None:
        """Gives up the owner's leases on chunks; those that were brought stay."""
        if leases.word:
            self._words[chunks[self._words[chunks] == leases.word]] = 0

    def put(self, first: int, elements: NDArray[Any]) -> None:
        """Writes decoded chunks, `first` and those that follow it; after a failure (a full disk, say) keeps no more."""
        width = self.layout.chunk_elements
        try:
            _write_all(self._file, elements, first * width * self.layout.dtype.itemsize)
        except OSError as error:
            self._stop_writing(error)
            return
        self._unnoted = True
        for chunk, begin in enumerate(range(0, len(elements), width), first):
            self._words[chunk] = PRESENT | checksum(elements[begin : begin + width])
            self._trusted[chunk] = True

    def _stop_writing(self, error: OSError) -> None:
        if self.writable:
            self.writable = False
            log.warning("cannot write the mirror %s (%s): reading goes on without filling it", self._path, error)

    def note(self) -> None:
        """Notes that all that is there is right, where this process knows it."""
        if self._unnoted and self._trusted[self._present(slice(None))].all():
            self._place.proof.note([self._path, self._sums])
            self._unnoted = False

    @property
    def n_present(self) -> int:
        """Chunks that are there."""
        return int(self._present(slice(None)).sum())

    @property
    def present_bytes(self) -> int:
        """Decoded bytes of the chunks that are there."""
        first, last = self.layout.chunk_bounds(np.flatnonzero(self._present(slice(None))))
        return int((last - first).sum()) * self.layout.dtype.itemsize


def _write_all(file: int, elements: NDArray[Any], offset: int) -> None:
    left = elements.view(np.uint8).data
    while left:
        written = os.pwrite(file, left, offset)
        left, offset = left[written:], offset + written


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What mirrored arrays hold, of what there is: chunks, and decoded bytes; `full` if one of them takes no more."""

    chunks: int
    chunks_held: int
    bytes_in_all: int
    bytes_held: int
    full: bool


def holding(arrays: Iterable[MirrorArray]) -> Holding:
    """What arrays hold together, now."""
    arrays = list(arrays)
    return Holding(
        chunks=sum(array.layout.n_chunks for array in arrays),
        chunks_held=sum(array.n_present for array in arrays),
        bytes_in_all=sum(array.layout.n_elements * array.layout.dtype.itemsize for array in arrays),
        bytes_held=sum(array.present_bytes for array in arrays),
        full=not all(array.writable for array in arrays),
    )


class Mirror:
    """The mirror of some arrays of one store."""

    def __init__(self, place: MirrorDirectory, arrays: Sequence[ArrayLayout]) -> None:
        self.place = place
        self.arrays = {layout.path: MirrorArray(place, layout) for layout in arrays}

    def leases(self) -> Leases:
        """A new owner of leases."""
        return Leases(self.place.directory)

    def note(self) -> None:
        """Notes what is known to be right, so that no process has to compare it again."""
        for array in self.arrays.values():
            array.note()


def open_place(cache: Cache, fingerprint: str, url: str) -> MirrorDirectory | None:
    """Where the mirror of a store is kept, or None, with a warning, where the directory cannot be used."""
    try:
        return MirrorDirectory(cache, fingerprint, url)
    except OSError as error:
        log.warning("cannot keep a mirror in %s (%s): every epoch will read from the store", cache.directory, error)
        return None


def open_mirror(place: MirrorDirectory, arrays: Sequence[ArrayLayout]) -> Mirror | None:
    """The mirror of some arrays of a store, or None, with a warning, where its files cannot be made."""
    try:
        return Mirror(place, arrays)
    except OSError as error:
        log.warning("cannot keep a mirror in %s (%s): every epoch will read from the store", place.directory, error)
        return None
