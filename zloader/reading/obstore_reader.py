"""Single ranged GETs through obstore: all schemes but s3://, and buckets of S3 whose requester pays."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from zloader.access.location import Location
from zloader.access.object_files import status_of
from zloader.access.retry import MISSING, RANGE_IGNORED, Answer, ReadFailure, denied, truncated
from zloader.access.scheme import ReadRange
from zloader.common.messages import reason_of
from zloader.common.records import Span

_PASSING = (408, 425, 429)  # of the statuses below 500


class ObstoreReader:
    """A RangeReader of what `read_range` reads."""

    def __init__(self, location: Location, read_range: ReadRange) -> None:
        self._location, self._read_range = location, read_range

    async def start(self, spans: Sequence[Span]) -> list[Any]:
        return [asyncio.ensure_future(self._read_range(span.key, span.start, span.stop)) for span in spans]

    def answer(self, span: Span, read: Any) -> Answer | ReadFailure:
        if (error := read.exception()) is not None:
            return self._failure(error)
        tag, stored = read.result()
        return Answer(tag=tag.encode(), stored=stored)

    def _failure(self, error: BaseException) -> ReadFailure:
        from obstore.exceptions import NotSupportedError

        answer, kind, status = reason_of(error), self._location.kind, status_of(error)
        if kind.is_denial(error):
            return denied(answer, kind.advice, attempts=kind.attempts_if_denied)
        if isinstance(error, FileNotFoundError):
            return MISSING
        if isinstance(error, NotSupportedError):
            return RANGE_IGNORED
        if status == 416:
            return truncated(answer)
        if "redirect" not in answer and (status is None or status >= 500 or status in _PASSING):
            return ReadFailure(answer=answer, wait_s=kind.wait_s(error))
        return ReadFailure(answer=answer, advice="A retry would not help", attempts=1)
