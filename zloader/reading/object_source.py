"""Reads the bytes of chunks through TensorStore, one ranged GET per span.

This is the only module that imports tensorstore. TensorStore's own retries are off: `zloader.access.retry` retries
until the deadline.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

import tensorstore as ts

from zloader.access.kvstore import Credentials, kvstore_spec
from zloader.access.location import Location
from zloader.access.retry import MISSING, ReadFailure, Retrier, classify_failure, truncated
from zloader.access.stored_objects import StoredObject
from zloader.common.concurrent_calls import aside
from zloader.common.errors import ForkError, StoreChangedError, StoreError
from zloader.common.options import FetchOptions
from zloader.common.records import Span


class ObjectSource:
    """A ByteSource that reads a location's objects through TensorStore.

    Nothing is opened before the first `read`, which has to happen in the process that iterates.
    """

    def __init__(self, location: Location, objects: Mapping[str, StoredObject], options: FetchOptions) -> None:
        """`objects` were listed when the store was opened. An object that has changed since then raises an error."""
        self._location, self._objects = location, objects
        self._generations: dict[str, bytes] = {}  # TensorStore's generation of each object that was read
        self._credentials = Credentials()
        self._opening: asyncio.Task[Any] | None = None
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
        """Begins all reads; returns TensorStore's future for each span."""
        if self._opening is None:  # of several fetches that begin at once, only the first opens the store
            self._opening = asyncio.ensure_future(_open_kvstore(self._location, self._credentials))
        kvstore = await self._opening
        return [kvstore.read(span.key, byte_range=slice(span.start, span.stop)) for span in spans]

    async def outcome(self, span: Span, read: Any) -> bytes | ReadFailure:
        """The bytes of a completed read, or its failure. Raises StoreChangedError."""
        if (error := read.exception()) is not None:
            return classify_failure(str(error))
        result = read.result()
        if self._generations.get(span.key) != result.stamp.generation:
            if result.state == "missing":
                return MISSING
            await self._check_unchanged(span, result.stamp.generation)
        stored: bytes = result.value  # copies the bytes, so ask only once
        return stored if len(stored) == span.size else truncated(f"{len(stored)} of {span.size} bytes")

    def describe(self, span: Span) -> str:
        """URL, key and byte range, for messages."""
        return span.read_from(self._location.url)

    # ---- has the object changed?

    async def _check_unchanged(self, span: Span, generation: bytes) -> None:
        """Raises StoreChangedError if the object has changed since it was listed, or since an earlier read."""
        if self._generations.get(span.key, generation) != generation:
            raise self._changed(span)
        # A generation ends in the ETag. If that is not the listed ETag, ask the server again.
        listed = self._objects[span.key].tag.encode()
        if not (listed and generation.endswith(listed)):
            await self.check_listed(span)
        self._generations[span.key] = generation

    async def check_listed(self, span: Span) -> None:
        """Raises StoreChangedError if the object on the server is no longer the one that was listed."""
        if await aside(self._location.find_object, span.key) != self._objects[span.key]:
            raise self._changed(span)

    def _changed(self, span: Span) -> StoreChangedError:
        return StoreChangedError(
            f"{self.describe(span)}: the object has changed since the store was opened. Open the store again"
        )


# The process that first used TensorStore. TensorStore aborts in a process forked from it, so we raise an error first.
_first_user: int | None = None


def _claim_process() -> None:
    global _first_user
    if _first_user is None:
        _first_user = os.getpid()
    elif _first_user != os.getpid():
        raise ForkError(
            f"process {_first_user} had already read a store when process {os.getpid()} was forked from it, and "
            "TensorStore does not survive a fork: start DataLoader workers with multiprocessing_context='spawn' or "
            "'forkserver', or use num_workers=0, which is faster"
        )


async def _open_kvstore(location: Location, credentials: Credentials) -> Any:
    _claim_process()
    try:
        return await ts.KvStore.open(kvstore_spec(location, credentials))
    except (ValueError, OSError) as error:
        raise StoreError(f"cannot open {location.url}: {error}") from error
