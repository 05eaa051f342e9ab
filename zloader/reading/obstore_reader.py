"""Single ranged GETs through obstore: Azure, the Hugging Face Hub, and gs:// at a stated endpoint."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

from zloader.access.location import Location
from zloader.access.object_stores import ObjectStores
from zloader.access.retry import MISSING, RANGE_IGNORED, ReadFailure, denied, truncated
from zloader.common.errors import ZloaderError
from zloader.common.messages import reason_of
from zloader.common.records import Span
from zloader.reading.range_reader import Answer, claim_process

_STATUS = re.compile(r"status code: (\d{3})")
_REFUSED = ("MissingLastModified", "UnknownConfigurationKey", "InvalidPath")  # no retry changes these answers


class ObstoreReader:
    """A RangeReader of the objects whose places an ObjectStores knows."""

    def __init__(self, location: Location, stores: ObjectStores) -> None:
        self._location, self._stores = location, stores

    async def start(self, spans: Sequence[Span]) -> list[Any]:
        claim_process("obstore")
        return [asyncio.ensure_future(self._read(span)) for span in spans]

    async def _read(self, span: Span) -> Answer:
        place = await self._stores.place(span.key)
        result = await place.store.get_async(place.path, options={"range": (span.start, span.stop)})
        stored = (await result.bytes_async()).to_bytes()
        tag = place.tag if place.tag is not None else str(result.meta[self._stores.tag_name] or "").strip('"')
        return Answer(tag=tag.encode(), stored=stored)

    def answer(self, span: Span, read: Any) -> Answer | ReadFailure:
        error = read.exception()
        if isinstance(error, ZloaderError):
            raise error
        return read.result() if error is None else self._failure(span, error)

    def _failure(self, span: Span, error: BaseException) -> ReadFailure:
        from obstore.exceptions import BaseError, NotSupportedError

        answer = reason_of(error)
        kind = self._location.kind
        if not isinstance(error, kind.errors()):
            return ReadFailure(answer=f"{type(error).__name__}: {answer}", advice="A retry would not help", attempts=1)
        if kind.is_denial(error):
            return denied(answer, kind.advice, attempts=2 if self._stores.is_outdated(span.key) else 1)
        code = _code(error, answer)
        if isinstance(error, FileNotFoundError) or code == 404:
            return MISSING
        if isinstance(error, NotSupportedError):
            return RANGE_IGNORED
        if code == 416:
            return truncated(answer)
        final = code is not None and code < 500 and code not in (408, 425, 429)
        if final or (isinstance(error, BaseError) and any(name in str(error) for name in _REFUSED)):
            return ReadFailure(answer=answer, advice="A retry would not help", attempts=1)
        return ReadFailure(answer=answer, wait_s=kind.wait_s(error))


def _code(error: BaseException, answer: str) -> int | None:
    """The HTTP status of an error, if the server has answered."""
    known = getattr(getattr(error, "response", None), "status_code", None)
    found = _STATUS.search(answer)
    return int(known) if known else int(found[1]) if found else None
