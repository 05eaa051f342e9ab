"""Single ranged GETs through TensorStore. This is the only module that imports it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import tensorstore as ts

from zloader.access.kvstore import Credentials, kvstore_spec
from zloader.access.location import Location
from zloader.access.retry import MISSING, Answer, ReadFailure, classify_failure
from zloader.access.scheme import claim_process
from zloader.common.errors import StoreError
from zloader.common.records import Span


class TensorStoreReader:
    """A RangeReader of S3. TensorStore's own retries are off."""

    def __init__(self, location: Location) -> None:
        self._location, self._credentials = location, Credentials()
        self._opening: asyncio.Task[Any] | None = None

    async def start(self, spans: Sequence[Span]) -> list[Any]:
        if self._opening is None:  # of several fetches that begin at once, only the first opens the store
            self._opening = asyncio.ensure_future(_open_kvstore(self._location, self._credentials))
        kvstore = await self._opening
        return [kvstore.read(span.key, byte_range=slice(span.start, span.stop)) for span in spans]

    def answer(self, span: Span, read: Any) -> Answer | ReadFailure:
        if (error := read.exception()) is not None:
            return classify_failure(str(error), self._location.kind.advice)
        result = read.result()
        if result.state == "missing":
            return MISSING
        return Answer(tag=result.stamp.generation, stored=result.value)  # copies the bytes, so ask only once


async def _open_kvstore(location: Location, credentials: Credentials) -> Any:
    claim_process("TensorStore")
    try:
        return await ts.KvStore.open(kvstore_spec(location, credentials))
    except (ValueError, OSError) as error:
        raise StoreError(f"cannot open {location.url}: {error}") from error
