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

_SHORT_ATTEMPTS = 3  # this many answers of the wrong length cannot be due to the connection


class Answer(NamedTuple):
    """What a server answered: the bytes, maybe too few, and a tag that ends with the object's ETag or version."""

    tag: bytes
    stored: bytes


@dataclass(frozen=True, kw_only=True)
class ReadFailure:
    """One failed attempt to read a span.

    `answer` is the server's answer or the connection's error. `error` is the exception to raise once no retry is left;
    its message includes `verdict` and `advice`. `attempts` limits the attempts (None: the options' `retries` do).
    `wait_s` is how long the server asks to wait.
    """

    answer: str
    error: type[StoreError] = ReadError
    verdict: str = "failed"
    advice: str = (
        "Is the server overloaded, down or unreachable? To retry longer, set FetchOptions(retries=, deadline_s=)"
    )
    attempts: int | None = None
    wait_s: float = 0.0


MISSING = ReadFailure(
    answer="the object does not exist",
    error=MissingObjectError,
    advice="Was the store changed or deleted?",
    attempts=1,
)


def truncated(answer: str) -> ReadFailure:
    """The failure of a read that returned fewer bytes than requested."""
    return ReadFailure(
        answer=answer,
        error=TruncatedObjectError,
        advice="The object is truncated. Restore it or convert the store again",
        attempts=_SHORT_ATTEMPTS,
    )


def denied(answer: str, advice: str) -> ReadFailure:
    """The failure of a read that the server did not permit; `advice` says what to check."""
    return ReadFailure(
        answer=answer,
        error=AccessDeniedError,
        verdict="was denied",
        advice=f"Check {advice}, and whether they have expired",
        attempts=1,
    )


OTHER_TAG = ReadFailure(
    answer="412: the object has another tag than was listed",
    advice="Does a proxy change the header If-Match?",
    attempts=_SHORT_ATTEMPTS,
)
RANGE_IGNORED = ReadFailure(
    answer="the range was ignored by the server", advice="Does a proxy drop the Range header?", attempts=_SHORT_ATTEMPTS
)
