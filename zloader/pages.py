"""The page cache below a mapped file: whether something is in it, and asking the kernel to read what is not.

A map whose pages are not in memory reads one page after another, each with some MiB around it (measured: 101 MB/s for
blocks of 64 rows, ten times their bytes read). Told of the ranges before, the kernel reads them all at once, and
nothing else: 1 300 MB/s, where reading each with pread gave 670. In the page cache that costs about a microsecond a
range, so that a few of them are tried first.
"""

from __future__ import annotations

import os
from typing import Any

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from zloader.terms import Rows

_TRIED = 16  # ranges
_advise: Any = types.ExternalFunction("posix_fadvise", types.int32(types.int32, types.int64, types.int64, types.int32))
_WILLNEED = os.POSIX_FADV_WILLNEED


@numba.njit(nogil=True, cache=True)
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
