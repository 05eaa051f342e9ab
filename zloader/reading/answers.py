"""How a read of a span ends: with bytes, or with a failure that says whether to retry and which error to raise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from zloader.common.errors import (
    AccessDeniedError,
    MissingObjectError,
    ReadError,
    StoreError,
    TruncatedObjectError,
)


class Answer(NamedTuple):
    """What a server answered: the bytes, maybe too few, and a tag that ends with the object's ETag or version."""

    tag: bytes
    stored: bytes


@dataclass(frozen=True, kw_only=True)
class ReadFailure:
    """One failed attempt to read a span.

    `answer` is the server's answer or the connection's error. `error` is the exception to raise once no retry is left;
    its message includes `verdict` and `advice`. `passes` says whether a retry may help, and `changed` whether the
    object may be another one than was listed. `wait_s` is how long the server asks to wait.
    """

    answer: str
    error: type[StoreError] = ReadError
    verdict: str = "failed"
    advice: str = (
        "Is the server overloaded, down or unreachable? To retry longer, set FetchOptions(retries=, deadline_s=)"
    )
    passes: bool = True
    changed: bool = False
    wait_s: float = 0.0


MISSING = ReadFailure(
    answer="the object does not exist",
    error=MissingObjectError,
    advice="Was the store changed or deleted?",
    passes=False,
)
OTHER_TAG = ReadFailure(
    answer="412: the object has another tag than was listed",
    advice="Does a proxy change the header If-Match?",
    changed=True,
)
RANGE_IGNORED = ReadFailure(answer="the range was ignored by the server", advice="Does a proxy drop the Range header?")


def truncated(answer: str) -> ReadFailure:
    """The failure of a read that returned fewer bytes than requested."""
    advice = "The object is truncated. Restore it or convert the store again"
    return ReadFailure(answer=answer, error=TruncatedObjectError, advice=advice, changed=True)


def denied(answer: str, advice: str) -> ReadFailure:
    """The failure of a read that the server did not permit; `advice` says what to check."""
    advice = f"Check {advice}, and whether they have expired"
    return ReadFailure(answer=answer, error=AccessDeniedError, verdict="was denied", advice=advice, passes=False)


def refused(answer: str) -> ReadFailure:
    """The failure of a read that will be refused again."""
    return ReadFailure(answer=answer, advice="A retry would not help", passes=False)
