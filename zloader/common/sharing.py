"""Shares large arrays with DataLoader workers: all workers map one copy instead of holding their own.

A forked worker shares the memory of its parent. A spawned worker receives a pickle, so 100 million weights would be
copied once per worker. While a process is being spawned, large arrays are therefore written to a file in memory, and
the pickle holds only its path. macOS has no such files: there, each worker gets a copy.
"""

from __future__ import annotations

import copy
import mmap
import os
import weakref
from collections.abc import Callable
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.descriptors import close_with

_LARGE = 1 << 20  # bytes; smaller arrays are pickled
# The files that each spawned process may still open. Kept while the process object lives.
_sent: weakref.WeakKeyDictionary[Any, list[_File]] = weakref.WeakKeyDictionary()
# All files by the id of their array, because several objects may hold the same array, such as weights. A file keeps its
# array alive.
_of_arrays: weakref.WeakValueDictionary[int, _File] = weakref.WeakValueDictionary()


class SharesArrays:
    """Base class for objects with large, immutable arrays: spawned processes share one copy of each array."""

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "_files"}
        popen = get_spawning_popen()
        if popen is None or not hasattr(os, "memfd_create"):
            return state
        files: dict[str, _File] = self.__dict__.setdefault("_files", {})
        for name, value in state.items():
            if type(value) in (np.ndarray, np.memmap) and value.nbytes >= _LARGE and not value.dtype.hasobject:
                files[name] = _of_arrays.get(id(value)) or _File(value)
                _sent.setdefault(popen, []).append(files[name])
                state[name] = files[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy made in this process while another is being spawned gets the arrays themselves.
        values = {name: value.array if isinstance(value, _File) else value for name, value in state.items()}
        self.__dict__.update(values)  # works for frozen dataclasses too


class _File:
    """A file in memory that holds an array. Unpickling it gives the array."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array
        _of_arrays[id(array)] = self
        self._number = os.memfd_create("zloader-array", os.MFD_CLOEXEC)
        close_with(self, self._number)
        with open(self._number, "wb", closefd=False) as out:
            out.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def __reduce__(self) -> tuple[Callable[..., NDArray[Any]], tuple[Any, ...]]:
        status = os.fstat(self._number)
        path = f"/proc/{os.getpid()}/fd/{self._number}"
        return _mapped, (path, (status.st_dev, status.st_ino), self.array.dtype, self.array.shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> NDArray[Any]:
        return copy.deepcopy(self.array, memo)


def _mapped(path: str, identity: tuple[int, int], dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Maps the array from a file of the sending process. Writes to it stay private to this process."""
    with Path(path).open("rb") as file:
        status = os.fstat(file.fileno())
        if (status.st_dev, status.st_ino) != identity:
            raise FileNotFoundError(f"{path} is now a different file: the process that sent the array has released it")
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return np.frombuffer(mapping, dtype).reshape(shape)
