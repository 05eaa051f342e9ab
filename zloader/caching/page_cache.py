"""The page cache below a mapped file: whether something is in it, asking the kernel to read what is not, letting go.

A map whose pages are not in memory reads one page after another, each with some MiB around it (measured: 101 MB/s for
blocks of 64 rows, ten times their bytes read). Told of the ranges before, the kernel reads them all at once, and
nothing else: 1 300 MB/s, where reading each with pread gave 670. In the page cache that costs about a microsecond a
range, so that a few of them are tried first.

Whoever touches a page of a map is given those around it, up to 2 MiB, as memory of his own in all statistics, though it
is the page cache's. So maps of which little is touched are let go of again, and small ranges are read, not mapped.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from zloader.common.compiled import compiled
from zloader.common.records import Rows

_TRIED = 16  # ranges
_advise: Any = types.ExternalFunction("posix_fadvise", types.int32(types.int32, types.int64, types.int64, types.int32))
_pread: Any = types.ExternalFunction("pread", types.intp(types.int32, types.uintp, types.uintp, types.int64))
_WILLNEED = os.POSIX_FADV_WILLNEED


@compiled
def _ask_for(file: int, starts: NDArray[Any], stops: NDArray[Any]) -> None:
    row = 0
    while row < len(starts):
        last = row
        while last + 1 < len(starts) and starts[last + 1] == stops[last]:  # rows of a block follow one another
            last += 1
        if stops[last] > starts[row]:
            _advise(file, starts[row], stops[last] - starts[row], _WILLNEED)
        row = last + 1


def ask_for(file: int, starts: Rows, stops: Rows) -> None:
    """Has the kernel begin to read the bytes `[start, stop)` of each row, unless they seem to be in memory."""
    tried = np.linspace(0, len(starts) - 1, min(_TRIED, len(starts))).astype(np.int64)
    if not all(_in_memory(file, place) for place in starts[tried].tolist()):
        _ask_for(file, starts, stops)


def _in_memory(file: int, offset: int) -> bool:
    try:
        os.preadv(file, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:  # a file system that cannot say
        return True
    return True


@compiled
def _read(file: int, starts: NDArray[Any], stops: NDArray[Any], out: NDArray[np.uint8]) -> int:
    """How many bytes of `out` were filled, short of all where a read fails."""
    filled, row = 0, 0
    while row < len(starts):
        last = row
        while last + 1 < len(starts) and starts[last + 1] == stops[last]:
            last += 1
        place = starts[row]
        while place < stops[last]:
            n = _pread(file, out[filled:].ctypes.data, stops[last] - place, place)
            if n <= 0:
                return filled
            filled += n
            place += n
        row = last + 1
    return filled


def read(file: int, starts: Rows, stops: Rows) -> NDArray[np.uint8]:
    """The bytes `[start, stop)` of each row, laid end to end. Raises OSError where the file has fewer or is damaged."""
    out = np.empty(int((stops - starts).sum()), np.uint8)
    if _read(file, starts, stops, out) != len(out):
        raise OSError("a read of a file in the mirror failed, or it was cut short")
    return out


def let_go(array: NDArray[Any]) -> None:
    """Gives up the pages of a mapped array that this process has touched; they stay in the page cache."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap):
        base.madvise(mmap.MADV_DONTNEED)
