"""Reads the bytes of chunks of remote stores, one ranged GET per span.

A RangeReader makes single attempts through TensorStore or obstore. Here they are retried until the deadline, and each
answer is compared with the object that was listed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zloader.access.location import Location
from zloader.access.retry import ReadFailure, Retrier, truncated
from zloader.access.stored_objects import StoredObject
from zloader.common.concurrent_calls import aside
from zloader.common.errors import StoreChangedError
from zloader.common.options import FetchOptions
from zloader.common.records import Span
from zloader.reading.range_reader import RangeReader


class ObjectSource:
    """A ByteSource that reads a remote location's objects.

    Nothing is opened before the first `read`, which has to happen in the process that iterates.
    """

    def __init__(
        self,
        location: Location,
        objects: Mapping[str, StoredObject],
        options: FetchOptions,
    ) -> None:
        """`objects` were listed when the store was opened. An object that has changed since then raises an error."""
        self._location, self._objects = location, objects
        self._tags: dict[str, bytes] = {}  # the answers' tag of each object that was read
        self._reader = _reader(location)
        self._retrier = Retrier(self, options)

    @property
    def retries(self) -> int:
        """Retries so far, over all reads."""
        return self._retrier.retries

    async def read(self, spans: Sequence[Span]) -> list[bytes]:
        """The bytes of each span, in order.

        Raises ReadError, AccessDeniedError or StoreChangedError within `deadline_s`, with URL, key and byte range.
        """
        return await self._retrier.read(spans)

    # ---- single attempts, for the Retrier

    async def start(self, spans: Sequence[Span]) -> list[Any]:
        """Begins all reads; returns a future for each span."""
        return await self._reader.start(spans)

    async def outcome(self, span: Span, read: Any) -> bytes | ReadFailure:
        """The bytes of a completed read, or its failure. Raises StoreChangedError."""
        answer = self._reader.answer(span, read)
        if isinstance(answer, ReadFailure):
            return answer
        if self._tags.get(span.key) != answer.tag:
            await self._check_unchanged(span, answer.tag)
        return (
            answer.stored
            if len(answer.stored) == span.size
            else truncated(f"{len(answer.stored)} of {span.size} bytes")
        )

    def describe(self, span: Span) -> str:
        """URL, key and byte range, for messages."""
        return span.read_from(self._location.url)

    # ---- has the object changed?

    async def _check_unchanged(self, span: Span, tag: bytes) -> None:
        """Raises StoreChangedError if the object has changed since it was listed, or since an earlier read."""
        if self._tags.get(span.key, tag) != tag:
            raise self._changed(span)
        # A tag ends in the ETag. If that is not the listed ETag, ask the server again.
        listed = self._objects[span.key].tag.encode()
        if not (listed and tag.endswith(listed)):
            await self.check_listed(span)
        self._tags[span.key] = tag

    async def check_listed(self, span: Span) -> None:
        """Raises StoreChangedError if the object on the server is no longer the one that was listed."""
        if await aside(self._location.find_object, span.key) != self._objects[span.key]:
            raise self._changed(span)

    def _changed(self, span: Span) -> StoreChangedError:
        return StoreChangedError(
            f"{self.describe(span)}: the object has changed since the store was opened. Open the store again"
        )


def _reader(location: Location) -> RangeReader:
    """The library that reads a location is imported here, so that a process loads only that one."""
    if (bucket := location.kind.object_store(location)) is not None:
        from zloader.reading.obstore_reader import ObstoreReader

        return ObstoreReader(location, bucket)
    from zloader.reading import tensorstore_reader

    if (addresses := location.kind.addresses(location)) is not None:
        return tensorstore_reader.AddressReader(location, addresses)
    return tensorstore_reader.TensorStoreReader(location)
