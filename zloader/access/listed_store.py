"""A zarr store whose reads are checked against the listing of its objects.

zarr reads a missing object as fill values. It does the same for an object of 0 bytes, for an empty range of a shard,
and for an object that disappears while its shard is read. Here all of these raise an error: every listed object must
be returned, with as many bytes as the listing says.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest

from zloader.access.scheme import access_errors, is_denial
from zloader.access.stored_objects import StoredObject
from zloader.access.zarr_groups import UNDECODABLE, implied_keys, open_zarr_group
from zloader.common.errors import (
    AccessDeniedError,
    FormatError,
    MissingObjectError,
    ReadError,
    StoreChangedError,
    StoreNotFoundError,
    TruncatedObjectError,
    ZloaderError,
)
from zloader.common.messages import cause, reason_of
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


def is_metadata(key: str) -> bool:
    """Whether a key names a metadata object, as opposed to a chunk or shard."""
    return key.rpartition("/")[2] in METADATA


class ListedStore(Store):
    """A read-only wrapper of a zarr store; every read passes through `get`.

    zarr's WrapperStore would pass what newer versions of zarr add, such as `get_sync`, to the wrapped store unchecked.

    `sizes` maps the key of each listed object to its bytes. If `all_listed`, other keys are treated as absent without a
    request; otherwise, as on a web server, they are requested. An object may be absent but not empty. In a store that
    is `complete`, whose writer left out no chunk, a chunk may not be absent either.
    """

    complete = False

    def __init__(self, store: Store, url: str, sizes: Mapping[str, int], *, all_listed: bool) -> None:
        super().__init__(read_only=True)
        self._store, self._url, self.sizes, self._all_listed = store, url, sizes, all_listed
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
        if size is not None and isinstance(byte_range, SuffixByteRequest | OffsetByteRequest):
            part = slice_of(byte_range, size)  # not all servers know ranges without an end
            byte_range = RangeByteRequest(part.start, part.stop)
        wanted = _length(byte_range, size)
        content = None if self._is_absent(key) else await self._read_translated(key, prototype, byte_range)
        if content is not None and len(content) < (wanted or 0):  # an answer that was cut short is complete next time
            content = await self._read_translated(key, prototype, byte_range)
        if content is None:
            if size is not None:
                raise MissingObjectError(
                    f"{self._url}: {key} ({size} bytes) no longer exists: open the store again, or restore the object "
                    "if it was deleted by mistake"
                )
            if self.complete and not is_metadata(key):
                raise MissingObjectError(f"{self._url}: {key} is missing: the store is incomplete. Convert it again")
            return None
        self._check_length(key, len(content), wanted)
        if byte_range is None:
            (self._check_metadata if is_metadata(key) else self._check_chunk)(key, content)
        return content

    def register_arrays(self, key: str, document: Any) -> None:
        """Records the arrays in a metadata document, so that `get` can check their chunks.

        `get` does this for every metadata object that it returns.
        """
        self._arrays |= codecs_of_arrays(key, document)

    def forget_arrays(self) -> None:
        """Forgets the arrays of metadata that turned out to be stale."""
        self._arrays.clear()

    async def read(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None) -> Buffer | None:
        """Like `get`, but without any checks."""
        return await self._store.get(key, prototype, byte_range)

    async def _read_translated(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None
    ) -> Buffer | None:
        """Like `read`, with errors of a remote store that do not look like those of damaged objects."""
        try:
            return await self.read(key, prototype, byte_range)
        except Exception as error:
            if "://" not in self._url or not isinstance(error, access_errors()):
                raise
            reason = reason_of(error)
            if is_denial(error):
                raise AccessDeniedError(f"not allowed to read {key} of {self._url}: {reason}") from cause(error)
            raise ReadError(f"cannot read {key} of {self._url}: {reason}. Is its server running? Try again") from cause(
                error
            )

    def _is_absent(self, key: str) -> bool:
        return self._all_listed and key not in self.sizes

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

    def _check_metadata(self, key: str, content: Buffer) -> None:
        try:
            self.register_arrays(key, json.loads(content.to_bytes()))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise FormatError(
                f"{self._url}: {key} ({len(content)} bytes) is not the metadata of a group or array ({error!r}). "
                f"{_RESTORE}"
            ) from error

    def _check_chunk(self, key: str, content: Buffer) -> None:
        """Raises an error for a truncated chunk of blosc, which would read past its end."""
        _, names = self._codecs_of(key)
        checked = names[-1:] == ["crc32c"]
        if SHARDING in names or (names[:-1] if checked else names)[-1:] != ["blosc"]:
            return
        stored = content.to_bytes()
        if not is_whole_blosc(stored[:-4] if checked else stored):
            raise TruncatedObjectError(
                f"{self._url}: {key} has {len(stored)} bytes, but its blosc header gives another size: it was "
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
        """Whether the object exists."""
        return key in self.sizes or (not self._all_listed and await self._store.exists(key))

    @property
    def supports_listing(self) -> bool:
        """Whether the wrapped store can be listed."""
        return self._store.supports_listing

    def list(self) -> AsyncIterator[str]:
        """All keys."""
        return self._store.list()

    def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """All keys that begin with `prefix`."""
        return self._store.list_prefix(prefix)

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """The names directly below a group."""
        if not self._all_listed:
            async for name in self._store.list_dir(prefix):
                yield name
            return
        parent = f"{prefix.rstrip('/')}/" if prefix else ""
        for name in dict.fromkeys(key[len(parent) :].partition("/")[0] for key in self.sizes if key.startswith(parent)):
            yield name

    supports_writes = False
    supports_deletes = False

    async def set(self, key: str, value: Buffer) -> None:
        """Raises ValueError: the store is read-only."""
        self._check_writable()

    async def delete(self, key: str) -> None:
        """Raises ValueError: the store is read-only."""
        self._check_writable()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ListedStore) and (self._store, self._url) == (other._store, other._url)


def implied_objects(store: Store, url: str, find: Callable[[Iterable[str]], Listed]) -> Listed:
    """The objects of a store that cannot be listed: those of `find`, which finds which of some keys exist.

    The consolidated metadata implies the keys. If there is no store at `url`, but a file, it has the key "".
    Raises StoreNotFoundError, and FormatError if the metadata is not consolidated.
    """
    roots = find(_ROOTS)
    if not roots.keys() & {"zarr.json", ".zgroup"}:
        if not (file := find([""])):
            raise StoreNotFoundError(f"found no zarr.json or .zgroup at {url}: check the address")
        return file
    sizes = {key: entry.size for key, entry in roots.items()}
    try:
        group = open_zarr_group(ListedStore(store, url, sizes, all_listed=False))
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


def _length(byte_range: ByteRequest | None, size: int | None) -> int | None:
    """The length in bytes of a range of an object of `size` bytes; None if it is not known."""
    if isinstance(byte_range, RangeByteRequest):
        return byte_range.end - byte_range.start
    return size if byte_range is None else getattr(byte_range, "suffix", None)


def slice_of(byte_range: ByteRequest | None, size: int) -> slice:
    """A range as a slice of an object of `size` bytes."""
    if isinstance(byte_range, RangeByteRequest):
        return slice(byte_range.start, byte_range.end)
    if isinstance(byte_range, OffsetByteRequest):
        return slice(byte_range.offset, size)
    if isinstance(byte_range, SuffixByteRequest):
        return slice(max(0, size - byte_range.suffix), size)
    return slice(0, size)
