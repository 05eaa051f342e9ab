"""What of a store a mirror keeps whole: columns as .npy files that are mapped into memory, small objects as they are.

Behind either stand four bytes, the crc32c of the file's full_name and of all before them; a file appears at once or not
at all. Processes share the memory of a mapped column, so that what a rank needs does not grow with the number of rows.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from zloader.caching.atomic_files import draft_of, file_of, full_name
from zloader.caching.directory import MirrorDirectory
from zloader.common.errors import ZloaderError

log = logging.getLogger("zloader")

_PIECE = 4 << 20  # bytes read at once to compare a checksum: through a map they would count as this process's memory


def load_column(
    place: MirrorDirectory, name: str, *, shape: tuple[int, ...], dtype: np.dtype[Any] | None = None
) -> NDArray[Any] | None:
    """An array kept by `save_column`, mapped and read-only, or None where there is none to trust.

    One of another shape or dtype (None: any) than asked for is not trusted.
    """
    path = file_of(place.directory, name, "npy")
    if not _is_whole(place, path):
        return None
    try:
        column = np.asarray(np.load(path, mmap_mode="r"))
        if column.shape != shape or (dtype is not None and column.dtype != dtype):
            raise ValueError(f"it holds {column.dtype} of shape {column.shape}, not {dtype} of shape {shape}")
    except (OSError, ValueError) as error:
        log.warning("cannot use %s (%s): it is read again from the store", path, error)
        return None
    return column


def save_column(
    place: MirrorDirectory, name: str, windows: Iterable[NDArray[Any]], *, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> NDArray[Any] | None:
    """Keeps an array that comes in windows of its first axis; gives it mapped, or None where it cannot be kept."""

    def write(file: BinaryIO) -> None:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for window in windows:
            file.write(np.ascontiguousarray(window, dtype).data)

    n_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize + 256
    kept = _keep(place, file_of(place.directory, name, "npy"), n_bytes, write)
    return load_column(place, name, shape=shape, dtype=dtype) if kept else None


def load_object(place: MirrorDirectory, key: str, size: int | None = None) -> bytes | None:
    """The bytes of an object kept by `save_object`, or None where there are none to trust, or not `size` of them."""
    path = file_of(place.directory, key, "kept")
    if not _is_whole(place, path):
        return None
    try:
        content = path.read_bytes()[:-4]
    except OSError as error:
        log.warning("cannot use %s (%s): it is read again from the store", path, error)
        return None
    if size not in (None, len(content)):
        log.warning("cannot use %s (%d of %d bytes): it is read again from the store", path, len(content), size)
        return None
    return content


def read_object(directory: Path, key: str) -> bytes | None:
    """The same of a mirror that is not in use here; always compared with its checksum."""
    path = file_of(directory, key, "kept")
    try:
        return path.read_bytes()[:-4] if is_right(path) else None
    except OSError:
        return None


def save_object(place: MirrorDirectory, key: str, content: bytes) -> None:
    """Keeps the bytes of an object."""

    def write(file: BinaryIO) -> None:
        file.write(content)

    _keep(place, file_of(place.directory, key, "kept"), len(content) + 4, write)


def _keep(place: MirrorDirectory, path: Path, n_bytes: int, write: Callable[[BinaryIO], None]) -> bool:
    """Keeps what `write` writes, at most `n_bytes` with its checksum; says whether it could."""
    try:
        with draft_of(path) as draft:
            with draft.open("wb") as file:
                os.fchmod(file.fileno(), 0o600)
                if not place.room.allocate(file.fileno(), [(0, n_bytes)]):
                    log.info("%s would not fit into the cache: it is read from the store each time", path)
                    return False
                write(file)
                file.truncate()
                file.flush()
                file.write(_checksum(draft, file.tell(), full_name(path)).to_bytes(4, "little"))
            draft.replace(path)
        place.proof.note([path])
    except ZloaderError:
        raise  # of a window that cannot be read
    except OSError as error:
        log.warning("cannot keep %s in the mirror (%s)", path, error)
        return False
    return True


def _checksum(path: Path, n_bytes: int, before: bytes) -> int:
    """crc32c of some bytes and, after them, of the first bytes of a file."""
    crc, left = google_crc32c.value(before), n_bytes
    with path.open("rb", buffering=0) as file:
        while left > 0 and (piece := file.read(min(left, _PIECE))):
            crc, left = google_crc32c.extend(crc, piece), left - len(piece)
    return int(crc)


def is_right(path: Path) -> bool:
    """Whether a file ends in the checksum of its place and all before. Raises OSError where it cannot be read."""
    size = path.stat().st_size
    if size < 4:
        return False
    with path.open("rb") as file:
        file.seek(size - 4)
        return _checksum(path, size - 4, full_name(path)) == int.from_bytes(file.read(4), "little")


def _is_whole(place: MirrorDirectory, path: Path) -> bool:
    """Whether a file is there and right; looked at only where nobody has since it last changed."""
    try:
        if place.proof.holds(path):
            return True
        if is_right(path):
            place.proof.note([path])
            return True
        log.warning("%s differs from its checksum, or was moved: it is read again from the store", path)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("cannot use %s (%s): it is read again from the store", path, error)
    return False
