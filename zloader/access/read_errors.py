"""Classifies failed reads: whether a retry may help, and which error to raise. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from zloader.common.errors import AccessDeniedError, MissingObjectError, ReadError, StoreError, TruncatedObjectError

# TensorStore's statuses for transient failures: 5xx, 429, S3's SlowDown, RequestTimeout and similar, and connection
# errors. It reports them as ABORTED once its own retries are used up, which is at once, since it is told not to retry.
_TRANSIENT = {"ABORTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"}
# S3 rejects invalid credentials with 403, and expired ones with 400 and one of these codes.
_DENIED = re.compile(r"ExpiredToken|InvalidToken|TokenRefreshRequired")
_PREFIX = re.compile(r"([A-Z_]+: )?(All \d+ retry attempts failed: )?")
_DETAILS = re.compile(r" \[(HTTP code|[\w-]+=)")
_CODE = re.compile(r"\[(?:http_response_code='|HTTP code )(\d+)")
_SHORT_ATTEMPTS = 3  # this many answers of the wrong length cannot be due to the connection


@dataclass(frozen=True, kw_only=True)
class ReadFailure:
    """One failed attempt to read a span.

    `answer` is the server's answer or the connection's error. `error` is the exception to raise once no retry is left;
    its message includes `verdict` and `advice`. `attempts` limits the attempts (None: the options' `retries` do).
    """

    answer: str
    error: type[StoreError] = ReadError
    verdict: str = "failed"
    advice: str = (
        "Is the server overloaded, down or unreachable? To retry longer, set FetchOptions(retries=, deadline_s=)"
    )
    attempts: int | None = None


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


def classify_failure(message: str) -> ReadFailure:
    """The ReadFailure for the message of a TensorStore error."""
    status, code = message.partition(":")[0], _CODE.search(message)
    reason = " ".join(_DETAILS.split(_PREFIX.sub("", message, count=1))[0].split())[:300]
    answer = f"{code[1]} {reason}" if code else reason
    if status in ("PERMISSION_DENIED", "UNAUTHENTICATED") or _DENIED.search(reason):
        return ReadFailure(
            answer=answer,
            error=AccessDeniedError,
            verdict="was denied",
            advice="Check the key and secret in storage_options or the AWS_* variables, and whether they have expired",
            attempts=1,
        )
    if status in _TRANSIENT:
        return ReadFailure(answer=answer)
    if status == "OUT_OF_RANGE":
        return truncated(answer)
    if "was ignored by server" in reason:
        advice = "Does a proxy drop the Range header?"
        return ReadFailure(answer=answer, advice=advice, attempts=_SHORT_ATTEMPTS)
    return ReadFailure(answer=answer, advice="A retry would not help", attempts=1)
