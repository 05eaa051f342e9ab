"""The objects of a Zarr hierarchy as zarr reads them, held against their listing.

To zarr an object that is not there stands for fill values. It takes one of 0 bytes, a range of a shard that gives
nothing, and an object that goes away while the shard is read for the same. Here these are errors: what is listed must
come, and as many bytes of it as the listing says.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest

from zloader.common.errors import FormatError, MissingObjectError, StoreChangedError, TruncatedObjectError
from zloader.storage.decode import is_whole_blosc
from zloader.storage.layout import require_bytes
from zloader.storage.metadata import last_codecs

if TYPE_CHECKING:
    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype

METADATA = ("zarr.json", ".zgroup", ".zarray", ".zattrs", ".zmetadata")
_RESTORE = "Restore it, or convert the store again"


def is_metadata(key: str) -> bool:
    """Whether this is the key of a metadata object, else it is that of a chunk or shard."""
    return key.rpartition("/")[2] in METADATA


class ListedStore(Store):
    """Another zarr store, to be read only; every read passes through `get`.

    `sizes` has the bytes of the objects that are listed. Where they are `all_listed` no other is asked for; else, as of
    a web server, others may be there. An object may be absent, but not empty; in a store that is `complete`, of whose
    chunks none was left out, no chunk may be absent.
    """

    complete = False

    def __init__(self, store: Store, url: str, sizes: Mapping[str, int], *, all_listed: bool) -> None:
        super().__init__(read_only=True)
        self._store, self._url, self.sizes, self._all_listed = store, url, sizes, all_listed
        self._codecs: dict[str, str] = {}  # the last codec of each array known, by its path

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """The bytes of an object, or a range of them; None where there is none.

        Raises TruncatedObjectError, MissingObjectError, StoreChangedError, and FormatError for metadata that is no
        JSON.
        """
        size = self.sizes.get(key)
        if size is not None:
            require_bytes(self._url, key, size, _end(byte_range))
        content = None if self._is_absent(key) else await self.read(key, prototype, byte_range)
        if content is None:
            if size is not None:
                raise MissingObjectError(
                    f"{self._url}: {key} ({size} bytes) is not there any more: open the store again, and restore it if "
                    "nobody replaced it"
                )
            if self.complete and not is_metadata(key):
                raise MissingObjectError(f"{self._url}: {key} is not there: the store is incomplete. Convert it again")
            return None
        self._check_length(key, len(content), _length(byte_range, size))
        if byte_range is None:
            (self._check_metadata if is_metadata(key) else self._check_whole)(key, content)
        return content

    def learn(self, key: str, document: Any) -> None:
        """Takes note of the arrays that a metadata object describes, as `get` does: their objects are then checked."""
        self._codecs |= last_codecs(key, document)

    async def read(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None) -> Buffer | None:
        """As `get`, but nothing is checked."""
        return await self._store.get(key, prototype, byte_range)

    def _is_absent(self, key: str) -> bool:
        return self._all_listed and key not in self.sizes

    def _check_length(self, key: str, length: int, wanted: int | None) -> None:
        if wanted is not None and length > wanted:
            raise StoreChangedError(
                f"{self._url}: {key} gave {length} bytes, but {wanted} when the store was opened: open it again"
            )
        if length == 0 or length < (wanted or 0):
            asked = f" instead of {wanted}" if wanted else ""
            raise TruncatedObjectError(
                f"{self._url}: {key} gave {length} bytes{asked}: it was cut short, or is being replaced. {_RESTORE}"
            )

    def _check_metadata(self, key: str, content: Buffer) -> None:
        try:
            self.learn(key, json.loads(content.to_bytes()))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise FormatError(
                f"{self._url}: {key} ({len(content)} bytes) is not the metadata of a group or array ({error!r}). "
                f"{_RESTORE}"
            ) from error

    def _check_whole(self, key: str, content: Buffer) -> None:
        """zarr gives blosc whatever there is, and blosc reads past the end of what was cut short."""
        path = next((path for path in _parents(key) if path in self._codecs), "")
        if self._codecs.get(path) == "blosc" and not is_whole_blosc(content.to_bytes()):
            raise TruncatedObjectError(
                f"{self._url}: {key} has {len(content)} bytes, but its blosc header announces another size: it was cut "
                f"short when it was written or copied. {_RESTORE}"
            )

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """As `get`, of several."""
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    async def get_ranges(
        self, key: str, byte_ranges: Sequence[ByteRequest | None], **options: Any
    ) -> AsyncIterator[Sequence[tuple[int, Buffer | None]]]:
        """As zarr's, which newer versions read shards with; but an error comes as it is, not in a group."""
        try:
            async for group in super().get_ranges(key, byte_ranges, **options):  # type: ignore[misc]
                yield group
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def exists(self, key: str) -> bool:
        """Whether there is such an object."""
        return key in self.sizes or (not self._all_listed and await self._store.exists(key))

    @property
    def supports_listing(self) -> bool:
        """Whether it can say what there is."""
        return self._store.supports_listing

    def list(self) -> AsyncIterator[str]:
        """All keys."""
        return self._store.list()

    def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """All keys that begin so."""
        return self._store.list_prefix(prefix)

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """The names directly below a group."""
        if not self._all_listed:
            async for name in self._store.list_dir(prefix):
                yield name
            return
        above = f"{prefix.rstrip('/')}/" if prefix else ""
        for name in dict.fromkeys(key[len(above) :].partition("/")[0] for key in self.sizes if key.startswith(above)):
            yield name

    supports_writes = False
    supports_deletes = False

    async def set(self, key: str, value: Buffer) -> None:
        """Raises ValueError."""
        self._check_writable()

    async def delete(self, key: str) -> None:
        """Raises ValueError."""
        self._check_writable()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ListedStore) and (self._store, self._url) == (other._store, other._url)


def _parents(key: str) -> Iterator[str]:
    while key := key.rpartition("/")[0]:
        yield key


def _end(byte_range: ByteRequest | None) -> int:
    """Bytes that an object has at least which such a range is asked of."""
    if isinstance(byte_range, RangeByteRequest):
        return byte_range.end
    if isinstance(byte_range, SuffixByteRequest):
        return byte_range.suffix
    return byte_range.offset + 1 if isinstance(byte_range, OffsetByteRequest) else 1


def _length(byte_range: ByteRequest | None, size: int | None) -> int | None:
    """Bytes that a range has, of an object of `size` bytes; None where that is not known."""
    if isinstance(byte_range, RangeByteRequest):
        return byte_range.end - byte_range.start
    if isinstance(byte_range, SuffixByteRequest):
        return byte_range.suffix
    return size - byte_range.offset if size is not None and isinstance(byte_range, OffsetByteRequest) else size
