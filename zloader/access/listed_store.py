"""A zarr store whose reads are checked against the listing of its objects.

zarr reads a missing object as fill values. It does the same for an object of 0 bytes, for an empty range of a shard,
and for an object that disappears while its shard is read. Here all of these raise an error: every listed object must
be returned, with as many bytes as the listing says.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest

from zloader.access.stored_objects import StoredObject
from zloader.access.zarr_groups import UNDECODABLE, implied_keys, open_zarr_group
from zloader.common.errors import (
    FormatError,
    MissingObjectError,
    StoreChangedError,
    StoreNotFoundError,
    TruncatedObjectError,
    ZloaderError,
)
from zloader.storage.coders import is_whole_blosc, require_packages
from zloader.storage.layout import require_bytes
from zloader.storage.metadata import SHARDING, codecs_of_arrays

if TYPE_CHECKING:
    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype

Listed = dict[str, StoredObject]
METADATA = ("zarr.json", ".zgroup", ".zarray", ".zattrs", ".zmetadata")
_ROOTS = ("zarr.json", ".zgroup", ".zattrs", ".zmetadata")
_RESTORE = "Restore it or convert the store again"
_ABSENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


def is_metadata(key: str) -> bool:
    """Whether a key names a metadata object, as opposed to a chunk or shard."""
    return key.rpartition("/")[2] in METADATA


class ListedStore(Store):
    """The objects of a location as a read-only zarr store; every read passes through `get`.

    `sizes` maps the key of each listed object to its bytes. If `all_listed`, other keys are treated as absent without a
    request; otherwise, as on a web server, they are requested. An object may be absent but not empty. In a store that
    is `complete`, whose writer left out no chunk, a chunk may not be absent either.
    """

    complete = False
    supports_writes = False
    supports_deletes = False
    supports_listing = True

    def __init__(self, location: Any, sizes: Mapping[str, int], *, all_listed: bool) -> None:
        """`location` is a Location."""
        super().__init__(read_only=True)
        self._location, self._url, self.sizes, self._all_listed = location, location.url, sizes, all_listed
        self._objects = location.kind
        self._arrays: dict[str, list[str]] = {}  # the names of the codecs of each known array, by path

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """The bytes of an object or of a range of it; None if the object is absent.

        Raises TruncatedObjectError, MissingObjectError, StoreChangedError, and FormatError for metadata that is not
        valid JSON, or chunks whose codec is not installed.
        """
        size = self.sizes.get(key)
        if size is not None:
            require_bytes(self._url, key, size, _end(byte_range))
        path, names = self._codecs_of(key)
        require_packages(names, f"{path} of {self._url}")
        content = None
        if size is not None or not self._all_listed:
            # A range has an end, because not all servers know others. A whole object has none, to notice that it grew.
            within = slice(0, None) if byte_range is None or size is None else slice_of(byte_range, size)
            wanted = size if within.stop is None else within.stop - within.start
            content = await self.read(key, within)
            if content is not None and len(content) < (wanted or 0):  # one that was cut short is complete next time
                content = await self.read(key, within)
            if content is not None:
                self._check_length(key, len(content), wanted)
        if content is None:
            if size is not None:
                raise MissingObjectError(
                    f"{self._url}: {key} ({size} bytes) no longer exists: open the store again, or restore the object "
                    "if it was deleted by mistake"
                )
            if self.complete and not is_metadata(key):
                raise MissingObjectError(f"{self._url}: {key} is missing: the store is incomplete. Convert it again")
            return None
        if byte_range is None:
            (self._check_metadata if is_metadata(key) else self._check_chunk)(key, content)
        elif size is None:
            content = content[slice_of(byte_range, len(content))]
        return prototype.buffer.from_bytes(content)

    async def read(self, key: str, within: slice) -> bytes | None:
        """Some bytes of an object, without any checks; None if it is absent."""
        with self._location.translated(f"read {key} of"):
            try:
                return bytes(await asyncio.to_thread(self._objects.read, key, within.start, within.stop))
            except _ABSENT:
                return None

    def register_arrays(self, key: str, document: Any) -> None:
        """Records the arrays in a metadata document, so that `get` can check their chunks.

        `get` does this for every metadata object that it returns.
        """
        self._arrays |= codecs_of_arrays(key, document)

    def forget_arrays(self) -> None:
        """Forgets the arrays of metadata that turned out to be stale."""
        self._arrays.clear()

    def _check_length(self, key: str, length: int, wanted: int | None) -> None:
        if wanted is not None and length > wanted:
            raise StoreChangedError(
                f"{self._url}: {key} returned {length} bytes, but should have {wanted}: it has changed since the "
                "store was opened. Open the store again"
            )
        if length == 0 or length < (wanted or 0):
            expected = f" instead of {wanted}" if wanted else ""
            raise TruncatedObjectError(
                f"{self._url}: {key} returned {length} bytes{expected}: it is truncated or being replaced. {_RESTORE}"
            )

    def _check_metadata(self, key: str, content: bytes) -> None:
        try:
            self.register_arrays(key, json.loads(content))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise FormatError(
                f"{self._url}: {key} ({len(content)} bytes) is not the metadata of a group or array ({error!r}). "
                f"{_RESTORE}"
            ) from error

    def _check_chunk(self, key: str, content: bytes) -> None:
        """Raises an error for a truncated chunk of blosc, which would read past its end."""
        _, names = self._codecs_of(key)
        checked = names[-1:] == ["crc32c"]
        if SHARDING in names or (names[:-1] if checked else names)[-1:] != ["blosc"]:
            return
        if not is_whole_blosc(content[:-4] if checked else content):
            raise TruncatedObjectError(
                f"{self._url}: {key} has {len(content)} bytes, but its blosc header gives another size: it was "
                f"truncated when it was written or copied. {_RESTORE}"
            )

    def _codecs_of(self, key: str) -> tuple[str, list[str]]:
        """The array that an object belongs to, and the names of its codecs; none for an array that is not known."""
        path = next((path for path in _parents(key) if path in self._arrays), "")
        return path, self._arrays.get(path, [])

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """`get` for each pair of key and range."""
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    async def get_ranges(
        self, key: str, byte_ranges: Sequence[ByteRequest | None], **options: Any
    ) -> AsyncIterator[Sequence[tuple[int, Buffer | None]]]:
        """Like zarr's, with which newer versions read shards, but raises the first error, not an ExceptionGroup."""
        try:
            async for group in Store.get_ranges(self, key, byte_ranges, **options):  # type: ignore[attr-defined]
                yield group
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def exists(self, key: str) -> bool:
        """Whether the object is listed."""
        return key in self.sizes

    async def list(self) -> AsyncIterator[str]:
        """All listed keys."""
        for key in self.sizes:
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """All listed keys that begin with `prefix`."""
        for key in self.sizes:
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """The names directly below a group."""
        parent = f"{prefix.rstrip('/')}/" if prefix else ""
        for name in dict.fromkeys(key[len(parent) :].partition("/")[0] for key in self.sizes if key.startswith(parent)):
            yield name

    async def set(self, key: str, value: Buffer) -> None:
        """Raises ValueError: the store is read-only."""
        self._check_writable()

    async def delete(self, key: str) -> None:
        """Raises ValueError: the store is read-only."""
        self._check_writable()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ListedStore) and self._location == other._location


def implied_objects(location: Any, find: Callable[[Iterable[str]], Listed]) -> Listed:
    """The objects of a store that cannot be listed: those of `find`, which finds which of some keys exist.

    The consolidated metadata implies the keys. If there is no store at the location, but a file, it has the key "".
    Raises StoreNotFoundError, and FormatError if the metadata is not consolidated.
    """
    url, roots = location.url, find(_ROOTS)
    if not roots.keys() & {"zarr.json", ".zgroup"}:
        if not (file := find([""])):
            raise StoreNotFoundError(f"found no zarr.json or .zgroup at {location.path}: check the address")
        return file
    try:
        sizes = {key: entry.size for key, entry in roots.items()}
        group = open_zarr_group(ListedStore(location, sizes, all_listed=False))
        if group.metadata.consolidated_metadata is None:
            raise FormatError(
                f"the metadata of {url} is not consolidated, and a web server cannot be listed: run "
                "zarr.consolidate_metadata on the original store, or convert it with 'zloader convert'"
            )
        keys = [implied_keys(path, node) for path, node in group.members(max_depth=None)]
    except ZloaderError:
        raise
    except UNDECODABLE as error:
        raise FormatError(
            f"the metadata of {url} are not those of a Zarr group ({error}): restore the store or convert it again"
        ) from error
    return roots | find(itertools.chain.from_iterable(keys))


def _parents(key: str) -> Iterator[str]:
    while key := key.rpartition("/")[0]:
        yield key


def _end(byte_range: ByteRequest | None) -> int:
    """The least size in bytes of an object that contains the range."""
    if isinstance(byte_range, RangeByteRequest):
        return byte_range.end
    if isinstance(byte_range, SuffixByteRequest):
        return byte_range.suffix
    return byte_range.offset + 1 if isinstance(byte_range, OffsetByteRequest) else 1


def slice_of(byte_range: ByteRequest, size: int) -> slice:
    """A range as a slice of an object of `size` bytes."""
    if isinstance(byte_range, RangeByteRequest):
        return slice(byte_range.start, byte_range.end)
    if isinstance(byte_range, OffsetByteRequest):
        return slice(byte_range.offset, size)
    return slice(size - byte_range.suffix, size)
