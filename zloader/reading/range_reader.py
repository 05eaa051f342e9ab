"""The port through which a library makes single ranged GETs. Retries and changed objects are not its business.

TensorStore (tensorstore_reader.py) reads S3, Google Cloud Storage, web servers and the Hugging Face Hub, and obstore
(obstore_reader.py) the rest.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from zloader.access.retry import ReadFailure
from zloader.common.errors import ForkError
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


# The process that first read remote bytes. TensorStore aborts in a process forked from it, and obstore's threads do not
# exist there, so we raise an error first.
_first_user: int | None = None


def claim_process(library: str) -> None:
    """Raises ForkError in a process that was forked from one that has read."""
    global _first_user
    if _first_user is None:
        _first_user = os.getpid()
    elif _first_user != os.getpid():
        raise ForkError(
            f"process {_first_user} had already read a store when process {os.getpid()} was forked from it, and "
            f"{library} does not survive a fork: start DataLoader workers with multiprocessing_context='spawn' or "
            "'forkserver', or use num_workers=0, which is faster"
        )
