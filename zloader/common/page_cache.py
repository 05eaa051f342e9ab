"""Prefetches ranges of a file into the page cache, reads scattered ranges, and releases mapped pages.

Without prefetching, each page fault on a file that is not in memory reads a few MiB around the page, one after another
(measured for blocks of 64 rows: 101 MB/s, and ten times the bytes needed). If the kernel is told the ranges first, it
reads all of them at once and nothing else: 1 300 MB/s, compared to 670 MB/s with one pread per range. If the file is in
the page cache already, that would waste about 1 us per range, so a few ranges are checked first.

A page fault maps up to 2 MiB of surrounding pages as well. All statistics count them as memory of the process, although
they belong to the page cache. So maps of which little is used are released afterwards, and short ranges are read
instead of mapped.

macOS can neither be told ranges (posix_fadvise) nor asked for them (RWF_NOWAIT), so nothing is prefetched there.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.compiled import External, compiled_after
from zloader.common.records import Rows

_SAMPLES = 16  # ranges checked before a prefetch
_advise = External("posix_fadvise", "int32", "int32", "int64", "int64", "int32")
_pread = External("pread", "intp", "int32", "uintp", "uintp", "int64")
_WILLNEED = getattr(os, "POSIX_FADV_WILLNEED", 0)
_TELLS = hasattr(os, "posix_fadvise") and hasattr(os, "RWF_NOWAIT")  # what is in memory


def _runs(starts: Rows, stops: Rows) -> list[tuple[int, int]]:
    """The first byte of each run of adjacent rows, and the byte after its last."""
    first = np.append(True, starts[1:] != stops[:-1])[: len(starts)]  # rows of a block are adjacent
    return list(zip(starts[first].tolist(), stops[np.append(first[1:], True)[: len(stops)]].tolist(), strict=True))


def _prefetch_few(file: int, starts: Rows, stops: Rows) -> None:
    for start, stop in _runs(starts, stops):
        if stop > start:
            os.posix_fadvise(file, start, stop - start, _WILLNEED)


@compiled_after(_prefetch_few)
def _prefetch(file: int, starts: NDArray[Any], stops: NDArray[Any]) -> None:
    row = 0
    while row < len(starts):
        last = row
        while last + 1 < len(starts) and starts[last + 1] == stops[last]:
            last += 1
        if stops[last] > starts[row]:
            _advise(file, starts[row], stops[last] - starts[row], _WILLNEED)
        row = last + 1


def prefetch(file: int, starts: Rows, stops: Rows) -> None:
    """Tells the kernel to read the bytes `[start, stop)` of each row, unless a sample of them is all in memory."""
    if not _TELLS:
        return
    samples = np.linspace(0, len(starts) - 1, min(_SAMPLES, len(starts))).astype(np.int64)
    if not all(_in_memory(file, offset) for offset in starts[samples].tolist()):
        _prefetch(file, starts, stops)


def drop(file: int, start: int, n_bytes: int) -> bool:
    """Drops some bytes of a file from the page cache. Whether a sample of them is really not in memory any more.

    They stay, for example, on a file system in memory, or if they have just been written, or are mapped.
    """
    if not _TELLS:
        return False
    os.posix_fadvise(file, start, n_bytes, os.POSIX_FADV_DONTNEED)
    samples = np.linspace(start, start + n_bytes - 1, _SAMPLES).astype(np.int64)
    return not any(_in_memory(file, offset) for offset in samples.tolist())


def _in_memory(file: int, offset: int) -> bool:
    try:
        os.preadv(file, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:  # the file system cannot tell
        return True
    return True


def _read_few(file: int, starts: Rows, stops: Rows, out: NDArray[np.uint8]) -> int:
    filled = 0
    for start, stop in _runs(starts, stops):
        while start < stop:
            try:
                n = os.preadv(file, [out[filled : filled + stop - start].data], start)
            except OSError:
                return filled
            if not n:
                return filled
            filled += n
            start += n
    return filled


@compiled_after(_read_few)
def _read(file: int, starts: NDArray[Any], stops: NDArray[Any], out: NDArray[np.uint8]) -> int:
    """Fills `out` with the bytes of all rows; returns how many bytes were read before a read failed, if one did."""
    filled, row = 0, 0
    while row < len(starts):
        last = row
        while last + 1 < len(starts) and starts[last + 1] == stops[last]:
            last += 1
        offset = starts[row]
        while offset < stops[last]:
            n = _pread(file, out[filled:].ctypes.data, stops[last] - offset, offset)
            if n <= 0:
                return filled
            filled += n
            offset += n
        row = last + 1
    return filled


def read(file: int, starts: Rows, stops: Rows) -> NDArray[np.uint8]:
    """The bytes `[start, stop)` of each row, concatenated. Raises OSError if the file is too short or a read fails."""
    out = np.empty(int((stops - starts).sum()), np.uint8)
    if _read(file, starts, stops, out) != len(out):
        raise OSError("a file of the mirror could not be read, or is truncated")
    return out


def release(array: NDArray[Any]) -> None:
    """Drops the pages of a memory-mapped array from this process's memory; they stay in the page cache."""
    memory = _map_of(array)
    if memory is not None:
        memory.madvise(mmap.MADV_DONTNEED)


def is_mapped(array: NDArray[Any]) -> bool:
    """Whether an array is a memory-mapped file, so that it takes no memory of this process."""
    return _map_of(array) is not None


def _map_of(array: NDArray[Any]) -> mmap.mmap | None:
    base: Any = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.obj if isinstance(base, memoryview) else base.base
    return base if isinstance(base, mmap.mmap) else None
