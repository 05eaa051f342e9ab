"""Single ranged GETs through obstore: Azure, and gs:// at a stated endpoint."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

from zloader.access.location import Location
from zloader.access.object_stores import ObjectStore, claim_process
from zloader.access.retry import MISSING, RANGE_IGNORED, Answer, ReadFailure, denied, truncated
from zloader.common.locks import cached_property
from zloader.common.messages import reason_of
from zloader.common.records import Span

_STATUS = re.compile(r"status code: (\d{3})")
_PASSING = (408, 425, 429)  # of the statuses below 500


class ObstoreReader:
    """A RangeReader of a bucket or container."""

    def __init__(self, location: Location, bucket: ObjectStore) -> None:
        self._location, self._bucket = location, bucket

    async def start(self, spans: Sequence[Span]) -> list[Any]:
        claim_process("obstore")
        store = self._store  # outside the reads, so that options that cannot be used are not retried
        return [asyncio.ensure_future(self._read(store, span)) for span in spans]

    @cached_property
    def _store(self) -> Any:
        return self._bucket.open()

    async def _read(self, store: Any, span: Span) -> Answer:
        result = await store.get_async(self._bucket.path(span.key), options={"range": (span.start, span.stop)})
        stored = (await result.bytes_async()).to_bytes()
        return Answer(tag=str(result.meta[self._bucket.tag] or "").strip('"').encode(), stored=stored)

    def answer(self, span: Span, read: Any) -> Answer | ReadFailure:
        error = read.exception()
        return read.result() if error is None else self._failure(error)

    def _failure(self, error: BaseException) -> ReadFailure:
        from obstore.exceptions import NotSupportedError

        answer, kind = reason_of(error), self._location.kind
        found = _STATUS.search(answer)
        code = int(found[1]) if found else None  # None if there was no answer
        if kind.is_denial(error):
            return denied(answer, kind.advice)
        if isinstance(error, FileNotFoundError):
            return MISSING
        if isinstance(error, NotSupportedError):
            return RANGE_IGNORED
        if code == 416:
            return truncated(answer)
        if code is None or code >= 500 or code in _PASSING:
            return ReadFailure(answer=answer)
        return ReadFailure(answer=answer, advice="A retry would not help", attempts=1)
