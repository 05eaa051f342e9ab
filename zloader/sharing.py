"""Large arrays on their way to DataLoader workers: all of them map one copy, instead of each getting its own.

A forked worker shares what its parent has. A spawned one gets a pickle, with which 100 million weights would be there
once for every worker: so while a process is being spawned, arrays go into a file in memory that the pickle only names.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import weakref
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LARGE = 1 << 20  # bytes; smaller arrays are pickled
_files: dict[int, int] = {}  # of arrays that have been sent, by id, while they live


def packed(state: dict[str, Any]) -> dict[str, Any] | bytes:
    """The state of an object that is pickled, for `unpacked` in the process that is being spawned, if one is."""
    if get_spawning_popen() is None:
        return state
    pickled = io.BytesIO()
    _SharingPickler(pickled, pickle.HIGHEST_PROTOCOL).dump(state)
    return pickled.getvalue()


def unpacked(state: dict[str, Any] | bytes) -> dict[str, Any]:
    """What was given to `packed`."""
    if isinstance(state, dict):
        return state
    found: dict[str, Any] = pickle.loads(state)
    return found


class _SharingPickler(ForkingPickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.nbytes >= _LARGE and not value.dtype.hasobject:
            return _mapped, (DupFd(_file_of(value)), value.dtype, value.shape)
        return NotImplemented


def _file_of(array: NDArray[Any]) -> int:
    """A file in memory that holds the array; it is closed when the array goes."""
    key = id(array)
    if key not in _files:
        file = os.memfd_create("zloader-array", os.MFD_CLOEXEC)
        with open(file, "wb", closefd=False) as out:
            out.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        _files[key] = file
        weakref.finalize(array, _close, key)
    return _files[key]


def _close(key: int) -> None:
    os.close(_files.pop(key))


def _mapped(file: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """The array of a file that was sent. What is written to it stays in this process."""
    descriptor = file.detach()
    try:
        mapping = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    return np.frombuffer(mapping, dtype).reshape(shape)
