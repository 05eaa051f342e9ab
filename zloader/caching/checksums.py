"""The sidecar file of a mirrored array: the array's layout, and the state and checksum of each chunk.

The file begins with a header of eight 64-bit words: the layout of the array, a hash of the file's qualified name, and a
checksum of the header. Then comes one word per chunk. It is 0 if the chunk is absent, a lease (leases.py) while some
process is downloading the chunk, and otherwise the chunk's crc32c with the PRESENT bit set.

NAME.sums, beside decoded chunks, ends there. In NAME.blocks, beside the coded rows of NAME.rows, a chunk is a block of
rows. The offsets of all blocks in NAME.rows follow, and then their sizes. They are set before the block's word.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from zloader.caching.atomic_files import draft_path, qualified_name
from zloader.caching.directory import MirrorDirectory
from zloader.caching.leases import open_lock
from zloader.common.records import Rows
from zloader.storage.decode import checksum
from zloader.storage.layout import ArrayLayout

log = logging.getLogger("zloader")

PRESENT = 1 << 32  # set in the word of every present chunk, since a checksum can be 0
_NAMES = {"sums": b"zloader3", "blocks": b"zblocks1"}
_MAGIC = {suffix: int.from_bytes(name, "little") for suffix, name in _NAMES.items()}
_WORDS = {"sums": 1, "blocks": 3}  # per chunk
_HEADER = 8  # words
_WINDOW = 1 << 20  # chunks read at a time


def open_file(path: Path) -> int:
    """Opens a file for reading and writing, and creates it if needed; read-only if it cannot be opened for writing."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
    except OSError:
        if not path.is_file():
            raise
        return os.open(path, os.O_RDONLY | flags)


def map_file(file: int, n_bytes: int, access: int, advice: int = mmap.MADV_NORMAL) -> mmap.mmap | bytes:
    """Memory-maps a file. An empty file, which cannot be mapped, gives b""."""
    if not n_bytes:
        return b""
    memory = mmap.mmap(file, n_bytes, access=access)
    memory.madvise(advice)
    return memory


def _suffix(path: Path) -> str:
    return path.name.rpartition(".")[2]


def _header(path: Path, layout: ArrayLayout, n_bytes: int) -> NDArray[np.uint64]:
    """The header of a sidecar file: its version, the array's layout, the qualified name, and a checksum of these.

    The fifth word is the dtype of decoded chunks, or the size of the file of rows.
    """
    kind = int.from_bytes(layout.dtype.str.encode()[:8], "little") if _suffix(path) == "sums" else n_bytes
    layout_words = [layout.n_elements, layout.chunk_elements, layout.dtype.itemsize, kind]
    words = np.array([_MAGIC[_suffix(path)], *layout_words, 0, 0, 0], "<u8")
    words[5:7] = _name_words(path)
    words[-1] = checksum(words[:-1])
    return words


def _name_words(path: Path) -> NDArray[np.uint64]:
    return np.frombuffer(hashlib.sha256(qualified_name(path)).digest(), "<u8", 2)


def bounds_of(places: NDArray[np.uint64], n_bytes: int) -> tuple[Rows, Rows]:
    """The first byte of chunks in a file of `n_bytes`, and the byte after their last, from their offsets and sizes.

    They are inside the file even if the places are damaged. A chunk at a wrong place differs from its checksum.
    """
    starts, sizes = (np.minimum(words, np.uint64(n_bytes)).astype(np.int64) for words in places)
    return starts, np.minimum(starts + sizes, n_bytes)


@dataclass(frozen=True, kw_only=True)
class Places:
    """Consecutive chunks of a sidecar file, of which `first` is the first. `words` are their words.

    Chunk `first + i` is bytes `[starts[i], stops[i])` of its array's file.
    """

    first: int
    words: NDArray[np.uint64]
    starts: Rows
    stops: Rows

    @property
    def present(self) -> Rows:
        """The indices here of the chunks that are present."""
        return np.flatnonzero(self.words & np.uint64(PRESENT))

    def checksums(self, at: Rows) -> NDArray[np.int64]:
        """The crc32c of present chunks, by their indices here."""
        return (self.words[at] & np.uint64(PRESENT - 1)).astype(np.int64)


class Sidecar:
    """A sidecar file, read in windows: the words of 60 million chunks take 500 MB.

    `n_chunks` and `decoded_bytes` describe the array, and `n_bytes` is the size of the file with its chunks. Raises
    ValueError with the reason if the file is not valid.
    """

    def __init__(self, path: Path, file: int) -> None:
        content = os.pread(file, 8 * _HEADER, 0)
        header = np.frombuffer(content[: len(content) // 8 * 8], "<u8")
        if not len(header) or header[0] != _MAGIC[_suffix(path)]:
            raise ValueError("is from another version of zloader")
        if len(header) < _HEADER or header[-1] != checksum(header[:-1]):
            raise ValueError("differs from its checksum")
        if (header[5:7] != _name_words(path)).any():
            raise ValueError("belongs to another array or mirror")
        n_elements, chunk_elements, itemsize, kind = (int(word) for word in header[1:5])
        self._file, self._of_rows = file, _suffix(path) == "blocks"
        self.n_chunks, self.decoded_bytes = -(-n_elements // chunk_elements), n_elements * itemsize
        self.n_bytes, self._chunk_bytes = kind if self._of_rows else self.decoded_bytes, chunk_elements * itemsize
        size, found = 8 * (_HEADER + _WORDS[_suffix(path)] * self.n_chunks), os.fstat(file).st_size
        if found != size:
            raise ValueError(f"has {found} bytes instead of {size}")

    def bytes_in_all(self, chunks_held: int, bytes_held: int) -> int:
        """Decoded bytes of all chunks; of coded rows the bytes in the file, estimated from the blocks that are held."""
        if not self._of_rows:
            return self.n_bytes
        return bytes_held * self.n_chunks // chunks_held if chunks_held else self.n_bytes

    def windows(self) -> Iterator[Places]:
        """All chunks, in windows."""
        for first in range(0, self.n_chunks, _WINDOW):
            last = min(first + _WINDOW, self.n_chunks)
            starts = np.arange(first, last) * self._chunk_bytes
            stops = np.minimum(starts + self._chunk_bytes, self.decoded_bytes)
            words = self._words(0, first, last)
            if self._of_rows:
                places = np.stack([self._words(row, first, last) for row in (1, 2)])
                starts, stops = bounds_of(places, self.n_bytes)
            yield Places(first=first, words=words, starts=starts, stops=stops)

    def _words(self, row: int, first: int, last: int) -> NDArray[np.uint64]:
        content = os.pread(self._file, 8 * (last - first), word_offset(row * self.n_chunks + first))
        if len(content) < 8 * (last - first):
            raise OSError("a file of the mirror was truncated while it was read")
        return np.frombuffer(content, "<u8")


def word_offset(chunk: int) -> int:
    """Where the word of a chunk is in a sidecar file, in bytes."""
    return 8 * (_HEADER + chunk)


def map_words(directory: MirrorDirectory, path: Path, layout: ArrayLayout, n_bytes: int) -> NDArray[np.uint64]:
    """The words of all chunks in the first row, in memory shared with every process that maps them.

    For blocks, in a file of `n_bytes`, their offsets and sizes are in two more rows. A file that is damaged or belongs
    to another array is replaced.
    """
    header = _header(path, layout, n_bytes)
    size = 8 * (_HEADER + _WORDS[_suffix(path)] * layout.n_chunks)
    if _read_header(path, size) != header.tobytes():
        with _locked(directory.path):
            if _read_header(path, size) != header.tobytes():  # no other process has written it meanwhile
                _write_words(directory, path, header, size)
    file_number = open_file(path)
    try:
        access = mmap.ACCESS_WRITE if os.access(path, os.W_OK) else mmap.ACCESS_READ
        words = np.frombuffer(map_file(file_number, size, access), "<u8")
    finally:
        os.close(file_number)
    return words[_HEADER:].reshape(_WORDS[_suffix(path)], layout.n_chunks)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Locks out other processes, so that no process maps a file that another one is about to replace."""
    file = open_lock(directory)
    try:
        with contextlib.suppress(OSError):  # this file system has no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _write_words(directory: MirrorDirectory, path: Path, header: NDArray[np.uint64], size: int) -> None:
    """Writes a file in which all chunks are absent. Replaces an invalid file."""
    if path.exists():
        log.warning("%s is damaged or of another array: discarding all its chunks", path)
    with draft_path(path) as draft:
        with draft.open("wb") as file:
            os.fchmod(file.fileno(), 0o600)
            if not directory.space.allocate(file.fileno(), [(0, size)]):
                raise OSError(f"{path} does not fit into the cache")
            file.write(header.tobytes())
            # A store to a hole on a full disk raises SIGBUS, so all blocks are allocated.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.write(bytes(size - header.nbytes))
        draft.replace(path)


def _read_header(path: Path, size: int) -> bytes:
    """The header of a file; b"" if it does not exist or does not have `size` bytes."""
    try:
        with path.open("rb") as file:
            return file.read(8 * _HEADER) if os.fstat(file.fileno()).st_size == size else b""
    except FileNotFoundError:
        return b""
