"""How the bytes of chunks are read: TensorStore, one ranged GET a span.

This is the only module that names tensorstore. It is told not to retry: retry.py does, for as long as the deadline.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

import tensorstore as ts

from zloader.access.kvstore import Credentials, kvstore_spec
from zloader.access.location import Location
from zloader.access.read_errors import MISSING, ReadFailure, cut_short, setback_of
from zloader.access.retry import Retrier
from zloader.access.stored_objects import StoredObject
from zloader.common.errors import ForkError, StoreChangedError, StoreError
from zloader.common.options import FetchOptions
from zloader.common.records import Span
from zloader.reading.bridge import aside


class ObjectSource:
    """Reads spans of a location's objects through TensorStore; a Source.

    Nothing is opened before the first `read`, which must happen in the process that iterates.
    """

    def __init__(self, location: Location, objects: Mapping[str, StoredObject], options: FetchOptions) -> None:
        """`objects` are those that were listed when the store was opened: others are not taken for them."""
        self._location, self._objects = location, objects
        self._generations: dict[str, bytes] = {}  # of each object read from, as TensorStore has it
        self._credentials = Credentials()
        self._opening: asyncio.Task[Any] | None = None
        self._retrier = Retrier(self, options)

    @property
    def retries(self) -> int:
        """How many reads were asked for again."""
        return self._retrier.retries

    async def read(self, spans: Sequence[Span]) -> list[bytes]:
        """The bytes of each span, in order.

        Raises a ReadError, AccessDeniedError or StoreChangedError, each with URL, key and range, within `deadline_s`.
        """
        return await self._retrier.read(spans)

    # ---- one attempt each, as the Retrier asks for it

    async def start(self, spans: Sequence[Span]) -> list[Any]:
        """TensorStore's futures of the bytes of each span, all under way."""
        if self._opening is None:  # several fetches may come at once: one of them opens
            self._opening = asyncio.ensure_future(_open_kvstore(self._location, self._credentials))
        kvstore = await self._opening
        return [kvstore.read(span.key, byte_range=slice(span.start, span.stop)) for span in spans]

    async def outcome(self, span: Span, read: Any) -> bytes | ReadFailure:
        """What has come of a read that is done. Raises StoreChangedError."""
        if (error := read.exception()) is not None:
            return setback_of(str(error))
        result = read.result()
        if self._generations.get(span.key) != result.stamp.generation:
            if result.state == "missing":
                return MISSING
            await self._check_unchanged(span, result.stamp.generation)
        stored: bytes = result.value  # makes them: not to be asked for twice
        return stored if len(stored) == span.size else cut_short(f"{len(stored)} of {span.size} bytes")

    def place(self, span: Span) -> str:
        """URL, key and bytes, for messages."""
        return span.read_from(self._location.url)

    # ---- whether it is still the same object

    async def _check_unchanged(self, span: Span, generation: bytes) -> None:
        """Raises StoreChangedError when an object is not the one that was listed, or was read from before."""
        if self._generations.get(span.key, generation) != generation:
            raise self._changed(span)
        # A generation ends in the ETag. Where that is not the one listed, it takes another look.
        listed = self._objects[span.key].tag.encode()
        if not (listed and generation.endswith(listed)):
            await self.check_there(span)
        self._generations[span.key] = generation

    async def check_there(self, span: Span) -> None:
        """Raises StoreChangedError when another object is there now than the one that was listed."""
        if await aside(self._location.find_object, span.key) != self._objects[span.key]:
            raise self._changed(span)

    def _changed(self, span: Span) -> StoreChangedError:
        return StoreChangedError(
            f"{self.place(span)}: the object is not the one that was there when the store was opened. Open it again"
        )


# The process that first used TensorStore. It aborts a process that was forked after that, so we refuse before it does.
_first_user: int | None = None


def _claim_process() -> None:
    global _first_user
    if _first_user is None:
        _first_user = os.getpid()
    elif _first_user != os.getpid():
        raise ForkError(
            f"process {_first_user} had read a store before process {os.getpid()} was forked from it, and TensorStore "
            "cannot be used after that: start DataLoader workers with multiprocessing_context='spawn' or 'forkserver', "
            "or use num_workers=0, which is the fast way"
        )


async def _open_kvstore(location: Location, credentials: Credentials) -> Any:
    _claim_process()
    try:
        return await ts.KvStore.open(kvstore_spec(location, credentials))
    except (ValueError, OSError) as error:
        raise StoreError(f"cannot open {location.url}: {error}") from error
