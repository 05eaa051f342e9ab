"""Caches the metadata and small arrays of a store in its mirror: each object is read from the store only once.

After a store has been opened once, it can be opened again from the mirror alone, without a network. The cached listing
tells which objects exist, so absent objects cause no requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.storage import MemoryStore

from zloader.access.listed_store import ListedStore, is_metadata
from zloader.access.location import Location
from zloader.access.stored_objects import Listing, StoredObject
from zloader.caching.cached_files import has_object, load_object, read_object, save_object
from zloader.caching.directory import MirrorDirectory, mirrors
from zloader.common.errors import CacheError, ReadError
from zloader.common.records import Span

if TYPE_CHECKING:
    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype

_LISTING = "/listing"  # keys of a store do not begin with a slash
_MAX_BYTES = 64 << 20  # larger objects are not cached
_CACHED_AS_COLUMNS = re.compile(r"(^|/)indptr/|^obsm/|^obs/[^/]+/codes/")


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
        cacheable = is_metadata(key) or (size <= _MAX_BYTES and not _CACHED_AS_COLUMNS.search(key))
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
        return prototype.buffer.from_bytes(content[_slice(byte_range, len(content))])


def _slice(byte_range: ByteRequest | None, size: int) -> slice:
    if isinstance(byte_range, RangeByteRequest):
        return slice(byte_range.start, byte_range.end)
    if isinstance(byte_range, OffsetByteRequest):
        return slice(byte_range.offset, size)
    if isinstance(byte_range, SuffixByteRequest):
        return slice(max(0, size - byte_range.suffix), size)
    return slice(0, size)


def save_listing(directory: MirrorDirectory, origin: str, objects: Listing) -> None:
    """Saves origin and objects of a store for `load_listing`, unless they are saved already."""
    if not has_object(directory, _LISTING):
        listed = {key: list(entry) for key, entry in objects.entries()}
        save_object(directory, _LISTING, json.dumps({"origin": origin, "objects": listed}).encode())


def load_listing(place: Path, location: Location) -> tuple[str, Listing]:
    """Origin and objects of the store at a location, as of the last time it was opened.

    Raises CacheError if the cache contains no mirror of the store.
    """
    for entry in reversed(mirrors(place)):  # most recently used first
        if entry.url == location.address and not entry.stale:
            content = read_object(entry.directory, _LISTING)
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
