"""The port through which a library makes single ranged GETs. Retries and changed objects are not its business.

TensorStore (tensorstore_reader.py) reads S3, Google Cloud Storage, web servers and the Hugging Face Hub, and obstore
(obstore_reader.py) the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from zloader.access.retry import ReadFailure
from zloader.common.records import Span


class Answer(NamedTuple):
    """What a server answered: the bytes, maybe too few, and a tag that ends with the object's ETag or version."""

    tag: bytes
    stored: bytes


class RangeReader(Protocol):
    """Starts single reads and reports how they ended. It opens nothing before the first `start`."""

    async def start(self, spans: Sequence[Span]) -> list[Any]:
        """Begins all reads; returns a future for each span."""

    def answer(self, span: Span, read: Any) -> Answer | ReadFailure:
        """How a completed read ended."""
