"""Keeps whole arrays of numbers in a mirror: obs columns, row offsets, names, statistics.

The file NAME.array is the bytes of an array, its dtype and shape in 60 bytes, and a checksum: the crc32c of the file's
qualified name and of what precedes. It is written to a draft and renamed, so it appears complete or not at all. Arrays
are memory-mapped, so that all processes of a machine share them. A process compares an array with its checksum when it
first uses it, unless the file has not changed since another process has done so (directory.py).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from zloader.caching.atomic_files import cached_path, draft_path, qualified_name
from zloader.caching.directory import MirrorDirectory
from zloader.caching.rows_file import map_file
from zloader.common.errors import ZloaderError

log = logging.getLogger("zloader")

_PIECE = 16 << 20  # bytes that are compared before their pages are released
_KIND_BYTES, _CHECKSUM_BYTES = 60, 4
_END_BYTES = _KIND_BYTES + _CHECKSUM_BYTES


def has_array(directory: MirrorDirectory, name: str) -> bool:
    """Whether an array is kept by this name."""
    return cached_path(directory.path, name, "array").exists()


def load_array(
    directory: MirrorDirectory, name: str, *, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> NDArray[Any] | None:
    """An array saved by `save_array`, memory-mapped and read-only; None if it is not kept, or another, or damaged."""
    path, n_bytes = cached_path(directory.path, name, "array"), math.prod(shape) * dtype.itemsize
    try:
        with path.open("rb") as file:
            memory = map_file(file.fileno(), os.fstat(file.fileno()).st_size, mmap.ACCESS_READ)
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("cannot use %s (%s); reading it from the store", path, error)
        return None
    content = np.frombuffer(memory, np.uint8)
    if not directory.verified.contains(path):
        if not is_whole(path):
            log.warning("%s differs from its checksum, or was moved; reading it from the store", path)
            return None
        directory.verified.record([path])
    if content[n_bytes:-_CHECKSUM_BYTES].tobytes() != _kind(shape, dtype):
        return None
    return content[:n_bytes].view(dtype).reshape(shape)


def save_array(
    directory: MirrorDirectory,
    name: str,
    windows: Iterable[NDArray[Any]],
    *,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
) -> NDArray[Any] | None:
    """Saves an array given in windows along its first axis. Returns it memory-mapped, or None if it cannot be saved."""
    path, n_bytes = cached_path(directory.path, name, "array"), math.prod(shape) * dtype.itemsize
    directory.arrays.add(name)
    try:
        with draft_path(path) as draft:
            with draft.open("wb") as file:
                os.fchmod(file.fileno(), 0o600)
                if not directory.space.allocate(file.fileno(), [(0, n_bytes + _END_BYTES)]):
                    log.warning("there is no room for %s in %s: it is read again when needed", name, directory.path)
                    return None
                checksum = int(google_crc32c.value(qualified_name(path)))
                for window in itertools.chain(windows, [np.frombuffer(_kind(shape, dtype), np.uint8)]):
                    content = np.ascontiguousarray(window).reshape(-1).view(np.uint8)
                    file.write(content.data)
                    checksum = int(google_crc32c.extend(checksum, content))
                file.write(checksum.to_bytes(_CHECKSUM_BYTES, "little"))
            draft.replace(path)
    except ZloaderError:  # of the windows
        raise
    except OSError as error:
        log.warning("cannot keep %s in %s (%s): it is read again when needed", name, directory.path, error)
        return None
    with contextlib.suppress(OSError):
        directory.verified.record([path])
    return load_array(directory, name, shape=shape, dtype=dtype)


def _kind(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    return f"{dtype.str} {shape}".encode().ljust(_KIND_BYTES)


def is_whole(path: Path) -> bool:
    """Whether a kept array agrees with its checksum. Raises OSError."""
    with path.open("rb") as file:
        checksum, left = (
            int(google_crc32c.value(qualified_name(path))),
            os.fstat(file.fileno()).st_size - _CHECKSUM_BYTES,
        )
        while left > 0 and (piece := file.read(min(_PIECE, left))):
            checksum, left = int(google_crc32c.extend(checksum, piece)), left - len(piece)
        return left == 0 and file.read() == checksum.to_bytes(_CHECKSUM_BYTES, "little")


def array_bytes(path: Path) -> int:
    """The bytes of a kept array. Raises OSError."""
    return max(0, path.stat().st_size - _END_BYTES)
