"""Keeps small objects of a store byte for byte in its mirror: its metadata, small arrays, and what was made of them.

After a store has been opened once, it can be opened again from the mirror alone, without a network. The cached listing
tells which objects exist, so absent objects cause no requests. Arrays that the mirror keeps decoded (kept_arrays.py)
are left out.

Each file ends in four bytes of checksum: the crc32c of the file's qualified name and of its content. Files are written
atomically.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from zarr.storage import MemoryStore

from zloader.access.listed_store import ListedStore, is_metadata, slice_of
from zloader.access.location import Location
from zloader.access.stored_objects import Listing, StoredObject
from zloader.caching.atomic_files import cached_path, checksum_of, draft_path, read_checked
from zloader.caching.directory import MirrorDirectory, mirrors
from zloader.caching.kept_arrays import has_array
from zloader.common.errors import CacheError, ReadError
from zloader.common.records import Span

if TYPE_CHECKING:
    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype

log = logging.getLogger("zloader")

_LISTING = "/listing"  # keys of a store do not begin with a slash
MAX_BYTES = 64 << 20  # larger objects are not cached
_MAY_BE_DECODED = re.compile(r"(^|/)indptr/|^obsm?/")


def load_object(directory: MirrorDirectory, key: str, size: int | None = None) -> bytes | None:
    """The bytes of an object saved by `save_object`, or None if it is not cached, damaged, or not of `size` bytes."""
    path = cached_path(directory.path, key, "kept")
    try:
        content = read_checked(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("cannot use %s (%s); reading it from the store", path, error)
        return None
    if content is None:
        log.warning("%s differs from its checksum, or was moved; reading it from the store", path)
    elif size not in (None, len(content)):
        log.warning("cannot use %s (%d of %d bytes); reading it from the store", path, len(content), size)
        return None
    return content


def save_object(directory: MirrorDirectory, key: str, content: bytes) -> None:
    """Saves the bytes of an object. If that fails, they are read from the store each time."""
    path = cached_path(directory.path, key, "kept")
    try:
        with draft_path(path) as draft:
            with draft.open("wb") as file:
                os.fchmod(file.fileno(), 0o600)
                if not directory.space.allocate(file.fileno(), [(0, len(content) + 4)]):
                    log.info("%s does not fit into the cache; it is read from the store each time", path)
                    return
                file.write(content)
                file.write(checksum_of(path, content))
            draft.replace(path)
    except OSError as error:
        log.warning("cannot save %s in the mirror (%s)", path, error)


class CachedMetadataStore(ListedStore):
    """A zarr store that is read through its mirror."""

    def __init__(self, location: Location, objects: Listing, directory: MirrorDirectory, *, offline: bool) -> None:
        store = MemoryStore(read_only=True) if offline else location.zarr_store(read_only=True)
        super().__init__(store, location.url, objects.sizes, all_listed=offline or not location.is_web)
        self._location, self._directory, self._offline = location, directory, offline

    async def read(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None) -> Buffer | None:
        """Reads from the mirror, else from the store. Raises CacheError if the store is offline."""
        if key not in self.sizes:
            return await super().read(key, prototype, byte_range)
        size = self.sizes[key]
        cacheable = is_metadata(key) or (size <= MAX_BYTES and not may_be_decoded(self._directory, key))
        if not (cacheable or self._offline):
            return await super().read(key, prototype, byte_range)
        content = load_object(self._directory, key, size)
        if content is None and self._offline:
            raise CacheError(
                f"{key} of {self._location.url} is not in the mirror {self._directory.path}: read it once online, or "
                "run 'zloader warm'"
            )
        if content is None:
            whole = await super().read(key, prototype, None)
            if whole is None:
                return None
            content = whole.to_bytes()
            if len(content) == size:
                save_object(self._directory, key, content)
        return prototype.buffer.from_bytes(content[slice_of(byte_range, len(content))])


def may_be_decoded(directory: MirrorDirectory, key: str) -> bool:
    """Whether an object belongs to an array that the mirror keeps decoded, so that it would be there twice."""
    if not _MAY_BE_DECODED.search(key):
        return False
    paths = map(str, PurePosixPath(key).parents)
    return any(path in directory.arrays or has_array(directory, path) for path in paths)


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
            content = None
            with contextlib.suppress(OSError):
                content = read_checked(cached_path(entry.directory, _LISTING, "kept"))
            if content is not None:
                listed: dict[str, Any] = json.loads(content)
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
