"""The file of words beside a mirrored array: what the array is, and of each chunk whether it is there.

NAME.sums begins with a header of eight 64-bit words: the layout of the array, a hash of the file's full_name, and a
checksum. Then comes one word a chunk: 0 while it is not there, a claim (leases.py) while somebody brings it, else its
crc32c with a bit above it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from zloader.caching.atomic_files import draft_of, full_name
from zloader.caching.directory import MirrorDirectory
from zloader.storage.decode import checksum
from zloader.storage.layout import ArrayLayout

log = logging.getLogger("zloader")

PRESENT = 1 << 32  # set in every word of a chunk that is there, so that a checksum of 0 is told from absence
_MAGIC = int.from_bytes(b"zloader3", "little")
_HEADER = 8  # words


def opened(path: Path) -> int:
    """The file for reading and writing, made where it is not there; for reading alone where that is all one may."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
    except OSError:
        if not path.is_file():
            raise
        return os.open(path, os.O_RDONLY | flags)


def mapped(file: int, n_bytes: int, access: int, advice: int = mmap.MADV_NORMAL) -> mmap.mmap | bytes:
    """A file as memory; nothing where it is empty, which cannot be mapped."""
    if not n_bytes:
        return b""
    memory = mmap.mmap(file, n_bytes, access=access)
    memory.madvise(advice)
    return memory


def _header(path: Path, layout: ArrayLayout) -> NDArray[np.uint64]:
    """What a file of words begins with: of which version, array and mirror it is, and a checksum of that."""
    dtype = int.from_bytes(layout.dtype.str.encode()[:8], "little")
    words = np.array([_MAGIC, layout.n_elements, layout.chunk_elements, layout.dtype.itemsize, dtype, 0, 0, 0], "<u8")
    words[5:7] = _name_words(path)
    words[-1] = checksum(words[:-1])
    return words


def _name_words(path: Path) -> NDArray[np.uint64]:
    return np.frombuffer(hashlib.sha256(full_name(path)).digest(), "<u8", 2)


def parse_sums(path: Path, stored: bytes) -> tuple[int, int, NDArray[np.int64]]:
    """What a whole .sums file says: bytes of the array, of a chunk, and each chunk's crc32c, -1 where it is not there.

    The words of the chunks are the last that the file holds. Raises ValueError, which says why nothing in it counts.
    """
    header = np.frombuffer(stored[: len(stored) // 8 * 8], "<u8", min(len(stored) // 8, _HEADER))
    if not len(header) or header[0] != _MAGIC:
        raise ValueError("is not of this version of zloader")
    if len(header) < _HEADER or header[-1] != checksum(header[:-1]):
        raise ValueError("differs from its checksum")
    if (header[5:7] != _name_words(path)).any():
        raise ValueError("is of another array or mirror")
    n_elements, chunk_elements, itemsize = (int(word) for word in header[1:4])
    n_chunks = -(-n_elements // chunk_elements)
    if len(stored) != 8 * (_HEADER + n_chunks):
        raise ValueError(f"has {len(stored)} bytes instead of {8 * (_HEADER + n_chunks)}")
    words = np.frombuffer(stored, "<u8")[_HEADER:]
    sums = np.where((words & np.uint64(PRESENT)) != 0, words & np.uint64(PRESENT - 1), np.uint64(2**64 - 1))
    return n_elements * itemsize, chunk_elements * itemsize, sums.view(np.int64)


def mapped_words(place: MirrorDirectory, path: Path, layout: ArrayLayout) -> NDArray[np.uint64]:
    """The words of all chunks, shared with all who map them; a file for another array counts for nothing."""
    header = _header(path, layout)
    size = 8 * (_HEADER + layout.n_chunks)
    if _read_header(path, size) != header.tobytes():
        with _one_at_a_time(place.directory):
            if _read_header(path, size) != header.tobytes():  # nobody was first
                if path.exists():
                    log.warning("%s is damaged, or of another array: nothing of %s counts as there", path, layout.path)
                _write_words(place, path, header, size)
    file_number = opened(path)
    try:
        writable = os.access(path, os.W_OK)
        words = np.frombuffer(mapped(file_number, size, mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ), "<u8")
    finally:
        os.close(file_number)
    return words[_HEADER:]


@contextlib.contextmanager
def _one_at_a_time(directory: Path) -> Iterator[None]:
    """Else who begins a mirror at the same moment would go on with a file that another has replaced."""
    file = os.open(directory / "owners", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with contextlib.suppress(OSError):  # no locks on this file system
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _write_words(place: MirrorDirectory, path: Path, header: NDArray[np.uint64], size: int) -> None:
    """A file of words that are all 0; one that was there for something else goes, since nothing in it counts."""
    with draft_of(path) as draft:
        with draft.open("wb") as file:
            os.fchmod(file.fileno(), 0o600)
            if not place.room.allocate(file.fileno(), [(0, size)]):
                raise OSError(f"{path} does not fit into the cache")
            os.posix_fallocate(file.fileno(), 0, size)  # storing to a hole of a full disk kills a process
            file.write(header.tobytes())
        draft.replace(path)


def _read_header(path: Path, size: int) -> bytes:
    """How a file of `size` bytes begins; nothing where there is none of that size."""
    try:
        with path.open("rb") as file:
            return file.read(8 * _HEADER) if os.fstat(file.fileno()).st_size == size else b""
    except FileNotFoundError:
        return b""
