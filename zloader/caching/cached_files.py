"""Caches whole columns as memory-mapped .npy files, and small objects of the store byte for byte.

Each file ends in four bytes of checksum: the crc32c of the file's qualified name and of its content. Files are written
atomically. Processes share the memory of a mapped column, so the memory per rank does not grow with the number of rows.
An obs column is kept as its codes or values, and the categories of the codes.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from zloader.caching.atomic_files import cached_path, draft_path, qualified_name
from zloader.caching.directory import MirrorDirectory
from zloader.common.errors import ZloaderError
from zloader.selecting.columns import ObsColumn

log = logging.getLogger("zloader")

_PIECE = 4 << 20  # bytes per read when verifying; reading through a map would count as memory of this process


def load_column(
    directory: MirrorDirectory, name: str, *, shape: tuple[int, ...], dtype: np.dtype[Any] | None = None
) -> NDArray[Any] | None:
    """An array saved by `save_column`, memory-mapped and read-only, or None if it is not cached or damaged.

    An array of another shape or dtype (None: any dtype) than requested counts as damaged.
    """
    path = cached_path(directory.path, name, "npy")
    if not _is_valid(directory, path):
        return None
    try:
        column = np.asarray(np.load(path, mmap_mode="r"))
        if column.shape != shape or (dtype is not None and column.dtype != dtype):
            raise ValueError(f"it contains {column.dtype} of shape {column.shape}, not {dtype} of shape {shape}")
    except (OSError, ValueError) as error:
        log.warning("cannot use %s (%s); reading it from the store", path, error)
        return None
    return column


def is_saved(directory: MirrorDirectory, name: str) -> bool:
    """Whether `save_column` has saved an array. Does not verify it."""
    return cached_path(directory.path, name, "npy").exists()


def save_column(
    directory: MirrorDirectory,
    name: str,
    windows: Iterable[NDArray[Any]],
    *,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
) -> NDArray[Any] | None:
    """Saves an array given in windows along its first axis. Returns it memory-mapped, or None if it cannot be saved."""

    def write(file: BinaryIO) -> None:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for window in windows:
            file.write(np.ascontiguousarray(window, dtype).reshape(-1).view(np.uint8).data)  # dates have no buffer

    n_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize + 256
    saved = _save(directory, cached_path(directory.path, name, "npy"), n_bytes, write)
    return load_column(directory, name, shape=shape, dtype=dtype) if saved else None


def has_object(directory: MirrorDirectory, key: str) -> bool:
    """Whether an object saved by `save_object` is there and undamaged. Does not load it."""
    return _is_valid(directory, cached_path(directory.path, key, "kept"))


def load_object(directory: MirrorDirectory, key: str, size: int | None = None) -> bytes | None:
    """The bytes of an object saved by `save_object`, or None if it is not cached, damaged, or not of `size` bytes."""
    path = cached_path(directory.path, key, "kept")
    if not _is_valid(directory, path):
        return None
    try:
        content = path.read_bytes()[:-4]
    except OSError as error:
        log.warning("cannot use %s (%s); reading it from the store", path, error)
        return None
    if size not in (None, len(content)):
        log.warning("cannot use %s (%d of %d bytes); reading it from the store", path, len(content), size)
        return None
    return content


def read_object(directory: Path, key: str) -> bytes | None:
    """Like `load_object`, for a mirror that this process has not opened; always verifies the checksum."""
    path = cached_path(directory, key, "kept")
    try:
        return path.read_bytes()[:-4] if matches_checksum(path) else None
    except OSError:
        return None


def save_object(directory: MirrorDirectory, key: str, content: bytes) -> None:
    """Saves the bytes of an object."""

    def write(file: BinaryIO) -> None:
        file.write(content)

    _save(directory, cached_path(directory.path, key, "kept"), len(content) + 4, write)


def _save(directory: MirrorDirectory, path: Path, n_bytes: int, write: Callable[[BinaryIO], None]) -> bool:
    """Saves the output of `write` and its checksum, at most `n_bytes` in all; returns whether that succeeded."""
    try:
        with draft_path(path) as draft:
            with draft.open("wb") as file:
                os.fchmod(file.fileno(), 0o600)
                if not directory.space.allocate(file.fileno(), [(0, n_bytes)]):
                    log.info("%s does not fit into the cache; it is read from the store each time", path)
                    return False
                write(file)
                file.truncate()
                file.flush()
                file.write(_checksum(draft, file.tell(), qualified_name(path)).to_bytes(4, "little"))
            draft.replace(path)
        directory.verified.record([path])
    except ZloaderError:
        raise  # reading a window failed; some of these errors are OSErrors
    except OSError as error:
        log.warning("cannot save %s in the mirror (%s)", path, error)
        return False
    return True


def _checksum(path: Path, n_bytes: int, prefix: bytes) -> int:
    """The crc32c of `prefix` followed by the first `n_bytes` of a file."""
    crc, left = google_crc32c.value(prefix), n_bytes
    with path.open("rb", buffering=0) as file:
        while left > 0 and (piece := file.read(min(left, _PIECE))):
            crc, left = google_crc32c.extend(crc, piece), left - len(piece)
    return int(crc)


def matches_checksum(path: Path) -> bool:
    """Whether a file ends in the checksum of its qualified name and content. Raises OSError if it cannot be read."""
    size = path.stat().st_size
    if size < 4:
        return False
    with path.open("rb") as file:
        file.seek(size - 4)
        return _checksum(path, size - 4, qualified_name(path)) == int.from_bytes(file.read(4), "little")


def _is_valid(directory: MirrorDirectory, path: Path) -> bool:
    """Whether a file exists and matches its checksum, which is compared only if the file may have changed."""
    try:
        if directory.verified.contains(path):
            return True
        if matches_checksum(path):
            directory.verified.record([path])
            return True
        log.warning("%s differs from its checksum, or was moved; reading it from the store", path)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("cannot use %s (%s); reading it from the store", path, error)
    return False


def load_obs(
    directory: MirrorDirectory, name: str, n_rows: int, completed: Callable[[], NDArray[Any] | None]
) -> ObsColumn | None:
    """A column of `n_rows` rows saved by `save_obs` or `save_labels`, or None if it is not cached or damaged.

    `completed` returns the values of a column of labels if the mirror keeps them chunk by chunk, or else None.
    """
    document = load_object(directory, f"/obs/{name}")
    if document is None:
        return None
    description: dict[str, Any] = json.loads(document)
    values = completed() if "values" in description else None
    if values is None:
        values = load_column(directory, description.get("values", f"/obs/{name}"), shape=(n_rows,))
    if values is None:
        return None
    labels = description["labels"]
    categories = None if labels is None else pd.Index(labels, dtype=description["dtype"])
    return ObsColumn(values=values, categories=categories, from_strings=description["from_strings"])


def save_obs(directory: MirrorDirectory, name: str, column: ObsColumn) -> ObsColumn:
    """Saves a column and returns it with memory-mapped values. Returns the original if it cannot be cached.

    Labels other than str, int and bool are not cached.
    """
    description = _description(column)
    if description is None:
        return column
    shape, kind = column.values.shape, column.values.dtype
    values = save_column(directory, f"/obs/{name}", [column.values], shape=shape, dtype=kind)
    if values is None:
        return column
    save_object(directory, f"/obs/{name}", json.dumps(description).encode())
    return ObsColumn(values=values, categories=column.categories, from_strings=column.from_strings)


def save_labels(directory: MirrorDirectory, name: str, column: ObsColumn, *, values: str) -> None:
    """Saves the labels of a column whose codes are cached as `values` and were checked. Does nothing without labels."""
    description = None if column.categories is None else _description(column)
    if description is not None:
        save_object(directory, f"/obs/{name}", json.dumps(description | {"values": values}).encode())


def _description(column: ObsColumn) -> dict[str, Any] | None:
    """All of a column but its values, or None if its labels cannot be cached."""
    labels = None if column.categories is None else column.categories.tolist()
    if labels is not None and not all(type(label) in (str, int, bool) for label in labels):
        return None
    dtype = None if column.categories is None else str(column.categories.dtype)
    return {"labels": labels, "dtype": dtype, "from_strings": column.from_strings}
