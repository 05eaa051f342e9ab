"""Single ranged GETs through TensorStore. This is the only module that imports it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorstore as ts

from zloader.access.hub import HubAddresses, WebAddresses, unfound
from zloader.access.kvstore import Credentials, http_spec, kvstore_spec, set_curl_timeouts
from zloader.access.location import Location
from zloader.access.object_stores import claim_process
from zloader.access.retry import MISSING, REDIRECTED, Answer, ReadFailure, classify_failure, settled
from zloader.common.errors import AccessDeniedError, StoreError
from zloader.common.messages import reason_of
from zloader.common.records import Span

_REDIRECT = re.compile(r"\[HTTP code 30[12378]\]")


class TensorStoreReader:
    """A RangeReader of S3, Google Cloud Storage and web servers. TensorStore's own retries are off."""

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


class AddressReader:
    """A RangeReader of objects that each have an address of their own, as at a CDN."""

    def __init__(self, location: Location, addresses: HubAddresses) -> None:
        self._location, self._addresses = location, addresses

    async def start(self, spans: Sequence[Span]) -> list[Any]:
        claim_process("TensorStore")
        set_curl_timeouts()
        return [asyncio.ensure_future(self._read(span)) for span in spans]

    async def _read(self, span: Span) -> Answer | ReadFailure:
        advice = self._location.kind.advice
        try:
            found = await self._addresses.find(span.key)
        except self._location.kind.errors() as error:
            return unfound(error, advice)
        kvstore = await ts.KvStore.open(http_spec(found.url, found.headers))  # takes less than 0.1 ms
        read = kvstore.read("", byte_range=slice(span.start, span.stop))
        try:
            await settled([read])
        finally:
            read.cancel()  # does nothing to a read that has ended
        if (failed := read.exception()) is not None:
            failure = classify_failure(reason_of(failed), advice)
            if failure.error is AccessDeniedError:  # maybe the address has expired
                self._addresses.forget(span.key)
                return replace(failure, attempts=2)
            return failure
        result = read.result()
        return (
            MISSING
            if result.state == "missing"
            else Answer(tag=result.stamp.generation if found.tag is None else found.tag.encode(), stored=result.value)
        )

    def answer(self, span: Span, read: Any) -> Answer | ReadFailure:
        found: Answer | ReadFailure = read.result()
        return found


class WebReader(TensorStoreReader):
    """A RangeReader of web servers. The first answer that is a redirect makes it an AddressReader."""

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self._redirected: AddressReader | None = None

    async def start(self, spans: Sequence[Span]) -> list[Any]:
        return await (super().start(spans) if self._redirected is None else self._redirected.start(spans))

    def answer(self, span: Span, read: Any) -> Answer | ReadFailure:
        if self._redirected is not None and isinstance(read, asyncio.Future):
            return self._redirected.answer(span, read)
        if read.exception() is not None and _REDIRECT.search(str(read.exception())):
            self._redirected = self._redirected or AddressReader(self._location, WebAddresses(self._location))
            return REDIRECTED
        return super().answer(span, read)


async def _open_kvstore(location: Location, credentials: Credentials) -> Any:
    claim_process("TensorStore")
    try:
        return await ts.KvStore.open(kvstore_spec(location, credentials))
    except (ValueError, OSError) as error:
        raise StoreError(f"cannot open {location.url}: {error}") from error
