"""What a mirror keeps whole under a name: objects of the store byte for byte, and arrays of numbers.

NAME.kept is the bytes of an object. NAME.array is those of an array, and then its dtype and shape in 60 bytes. Both end
in a checksum: the crc32c of the file's qualified name and of what precedes. They are written to a draft and renamed, so
they appear complete or not at all. Arrays are memory-mapped, so that all processes of a machine share them. A process
compares an array with its checksum when it first uses it, unless the file has not changed since another process has
done so (directory.py).

After a store has been opened once, it can be opened again from the mirror alone, without a network. The kept listing
tells which objects exist, so absent objects cause no requests. Objects of arrays that are kept are left out.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from zloader.access.listed_store import ListedStore, is_metadata
from zloader.access.location import Location
from zloader.access.stored_objects import Listing, StoredObject
from zloader.caching.directory import MirrorDirectory, VerifiedMarks, cached_path, draft_path, mirrors, qualified_name
from zloader.caching.rows_file import map_file
from zloader.common.errors import CacheError, ReadError, ZloaderError
from zloader.common.records import Span

log = logging.getLogger("zloader")

_LISTING = "/listing"  # keys of a store do not begin with a slash
MAX_BYTES = 64 << 20  # larger objects are not kept
_PIECE = 16 << 20  # bytes of a file that are compared at a time
_KIND_BYTES, _CHECKSUM_BYTES = 60, 4

# ---- objects and arrays


def load_object(directory: MirrorDirectory, key: str) -> bytes | None:
    """The bytes of an object saved by `save_object`, or None if it is not kept, or damaged."""
    content = _content(cached_path(directory.path, key, "kept"))
    return None if content is None else content.tobytes()


def save_object(directory: MirrorDirectory, key: str, content: bytes) -> None:
    """Saves the bytes of an object. If that fails, they are read from the store each time."""
    _save(directory, key, "kept", [content], len(content))


def has_array(directory: MirrorDirectory, name: str) -> bool:
    """Whether an array is kept by this name."""
    return _array_path(directory, name).exists()


def load_array(
    directory: MirrorDirectory, name: str, *, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> NDArray[Any] | None:
    """An array saved by `save_array`, memory-mapped and read-only; None if it is not kept, or another, or damaged."""
    content, n_bytes = _content(_array_path(directory, name), directory.verified), math.prod(shape) * dtype.itemsize
    if content is None or content[n_bytes:].tobytes() != _kind(shape, dtype):
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
    directory.arrays.add(name)
    pieces = (np.ascontiguousarray(window).reshape(-1).view(np.uint8) for window in windows)
    n_bytes = math.prod(shape) * dtype.itemsize + _KIND_BYTES
    if not _save(directory, name, "array", itertools.chain(pieces, [_kind(shape, dtype)]), n_bytes):
        return None
    directory.verified.record([_array_path(directory, name)])
    return load_array(directory, name, shape=shape, dtype=dtype)


def kept_array(
    directory: MirrorDirectory | None,
    name: str,
    windows: Callable[[], Iterable[NDArray[Any]]],
    *,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
) -> NDArray[Any]:
    """An array that is kept by this name, memory-mapped. If there is none, it is made of windows, and kept if possible.

    The windows are asked for only when there is room for all of them, or when they go to memory.
    """
    found = None
    if directory is not None:
        found = load_array(directory, name, shape=shape, dtype=dtype)
        if found is None:
            found = save_array(directory, name, windows(), shape=shape, dtype=dtype)
    if found is None:
        found, filled = np.empty(shape, dtype), 0
        for values in windows():
            found[filled : filled + len(values)] = values
            filled += len(values)
    return found


def _array_path(directory: MirrorDirectory, name: str) -> Path:
    return cached_path(directory.path, name, "array")


def _kind(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    return f"{dtype.str} {shape}".encode().ljust(_KIND_BYTES)


# ---- their files


def is_whole(path: Path, file: BinaryIO) -> bool:
    """Whether a file with an object or an array, opened for reading, agrees with its checksum. Raises OSError."""
    checksum, left = google_crc32c.value(qualified_name(path)), os.fstat(file.fileno()).st_size - _CHECKSUM_BYTES
    while left > 0 and (piece := file.read(min(_PIECE, left))):
        checksum, left = google_crc32c.extend(checksum, piece), left - len(piece)
    return left == 0 and file.read() == int(checksum).to_bytes(_CHECKSUM_BYTES, "little")


def _content(path: Path, verified: VerifiedMarks | None = None) -> NDArray[np.uint8] | None:
    """What a file contains, memory-mapped; None if it is missing or, with a warning, if it cannot be used."""
    try:
        with path.open("rb") as file:
            memory = map_file(file.fileno(), os.fstat(file.fileno()).st_size, mmap.ACCESS_READ)
            if verified is None or not verified.contains(path):
                if not is_whole(path, file):
                    log.warning("%s differs from its checksum, or was moved; reading it from the store", path)
                    return None
                if verified is not None:
                    verified.record([path])
        return np.frombuffer(memory, np.uint8)[:-_CHECKSUM_BYTES]
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("cannot use %s (%s); reading it from the store", path, error)
        return None


def _save(directory: MirrorDirectory, name: str, kind: str, pieces: Iterable[Any], n_bytes: int) -> bool:
    """Writes pieces of so many bytes together, and their checksum, to a file; returns whether it is there now."""
    path = cached_path(directory.path, name, kind)
    try:
        with draft_path(path) as draft:
            with draft.open("wb") as file:
                os.fchmod(file.fileno(), 0o600)
                if not directory.space.allocate(file.fileno(), 0, [n_bytes + _CHECKSUM_BYTES]):
                    level = logging.WARNING if kind == "array" else logging.INFO  # there are many objects
                    log.log(level, "there is no room for %s in %s: it is read again when needed", name, directory.path)
                    return False
                checksum = google_crc32c.value(qualified_name(path))
                for piece in pieces:
                    file.write(piece)
                    checksum = google_crc32c.extend(checksum, piece)
                file.write(int(checksum).to_bytes(_CHECKSUM_BYTES, "little"))
            draft.replace(path)
        return True
    except ZloaderError:  # of the pieces
        raise
    except OSError as error:
        log.warning("cannot keep %s in %s (%s): it is read again when needed", name, directory.path, error)
        return False


# ---- stores that are read through their mirror


class CachedMetadataStore(ListedStore):
    """A zarr store that is read through its mirror."""

    def __init__(self, location: Location, objects: Listing, directory: MirrorDirectory, *, offline: bool) -> None:
        super().__init__(location, objects.sizes, all_listed=offline or not location.is_web)
        self._directory, self._offline = directory, offline

    async def read(self, key: str, within: slice) -> bytes | None:
        """Reads from the mirror, else from the store. Raises CacheError if the store is offline."""
        if key not in self.sizes:
            return await super().read(key, within)
        size = self.sizes[key]
        content = load_object(self._directory, key)
        if content is None and self._offline:
            raise CacheError(
                f"{key} of {self._location.url} is not in the mirror {self._directory.path}: read it once online, or "
                "run 'zloader warm'"
            )
        if content is None and not (is_metadata(key) or may_keep(self._directory, key, size)):
            return await super().read(key, within)
        if content is None:
            content = await super().read(key, slice(0, None))
            if content is None:
                return None
            if len(content) == size:
                save_object(self._directory, key, content)
        return content[within]


def may_keep(directory: MirrorDirectory, key: str, size: int) -> bool:
    """Whether to keep an object: a small one, unless the mirror has its array already and it would be there twice."""
    paths = map(str, PurePosixPath(key).parents)
    return size <= MAX_BYTES and not any(path in directory.arrays or has_array(directory, path) for path in paths)


def save_listing(directory: MirrorDirectory, origin: str, objects: Listing) -> None:
    """Saves origin and objects of a store for `load_listing`, unless they are saved already."""
    if load_object(directory, _LISTING) is None:
        listed = {key: list(entry) for key, entry in objects.items()}
        save_object(directory, _LISTING, json.dumps({"origin": origin, "objects": listed}).encode())


def load_listing(place: Path, location: Location) -> tuple[str, Listing]:
    """Origin and objects of the store at a location, as of the last time it was opened.

    Raises CacheError if the cache contains no mirror of the store.
    """
    for entry in reversed(mirrors(place)):  # most recently used first
        if entry.url == location.address and not entry.stale:
            content = _content(cached_path(entry.directory, _LISTING, "kept"))
            if content is not None:
                listed: dict[str, Any] = json.loads(content.tobytes())
                objects = ((key, StoredObject(*entry)) for key, entry in listed["objects"].items())
                return listed["origin"], Listing(objects)
    raise CacheError(
        f"there is no mirror of {location.url} in {place} that this user can read: open it once without offline=True, "
        "or run 'zloader warm'"
    )


class OfflineSource:
    """The ByteSource of a store that is opened offline: every read raises."""

    retries = 0

    def __init__(self, url: str) -> None:
        self._url = url

    async def read(self, spans: Sequence[Span]) -> list[bytes]:
        """Raises ReadError; the message names the first span."""
        raise ReadError(
            f"{spans[0].read_from(self._url)}: these bytes are not in the mirror, and the store was opened offline. "
            "Open it online, or fill the mirror with 'zloader warm'"
        )
