"""How a single read of a span ends, and what a failed one amounts to: whether to retry, and which error to raise.

zloader/reading/object_source.py retries by these rules. No other module retries reads of spans.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from zloader.common.errors import (
    AccessDeniedError,
    MissingObjectError,
    ReadError,
    StoreError,
    TruncatedObjectError,
)

# TensorStore's statuses for transient failures: 5xx, 429, S3's SlowDown, RequestTimeout and similar, and connection
# errors. It reports them as ABORTED once its own retries are used up, which is at once, since it is told not to retry.
_TRANSIENT = {"ABORTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"}
# S3 rejects invalid credentials with 403, and expired ones with 400 and one of these codes.
_DENIED = re.compile(r"ExpiredToken|InvalidToken|TokenRefreshRequired")
_PREFIX = re.compile(r"([A-Z_]+: )?(All \d+ retry attempts failed: )?")
_DETAILS = re.compile(r" \[(HTTP code|[\w-]+=)")
_CODE = re.compile(r"\[(?:http_response_code='|HTTP code )(\d+)")
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


OTHER_TAG = ReadFailure(answer="412: the object does not have the tag that was listed")
RANGE_IGNORED = ReadFailure(
    answer="the range was ignored by the server", advice="Does a proxy drop the Range header?", attempts=_SHORT_ATTEMPTS
)


def classify_failure(message: str, advice: str) -> ReadFailure:
    """The ReadFailure for the message of a TensorStore error; `advice` is what to check if access is denied."""
    status, code = message.partition(":")[0], _CODE.search(message)
    reason = " ".join(_DETAILS.split(_PREFIX.sub("", message, count=1))[0].split())[:300]
    answer = f"{code[1]} {reason}" if code else reason
    if status in ("PERMISSION_DENIED", "UNAUTHENTICATED") or _DENIED.search(reason):
        return denied(answer, advice)
    if status in _TRANSIENT:
        return ReadFailure(answer=answer)
    if status == "OUT_OF_RANGE":
        return truncated(answer)
    if "was ignored by server" in reason:
        return replace(RANGE_IGNORED, answer=answer)
    return ReadFailure(answer=answer, advice="A retry would not help", attempts=1)


def pause_s(failures: int, jitter: float) -> float:
    """Seconds to wait after `failures` failures: 0.1 s doubling to 4 s, plus or minus a quarter by `jitter` (0 to 1).

    The first 16 pauses take 46 s in total, plus or minus 5 s: enough to outlast half a minute of SlowDown.
    """
    return float(min(4.0, 0.1 * 2 ** min(failures - 1, 10)) * (0.75 + jitter / 2))


async def settled(reads: Sequence[Any]) -> None:
    """Waits until all reads are done, or one has failed.

    Uses callbacks instead of `await read`, with which TensorStore prints an error to stderr if a cancelled read ends
    after the loop is closed.
    """
    loop = asyncio.get_running_loop()
    settled = loop.create_future()
    counter = itertools.count(1)  # next() is atomic; reads may finish on any thread

    def settle() -> None:
        if not settled.done():
            settled.set_result(None)

    def on_done(read: Any) -> None:
        if next(counter) == len(reads) or read.cancelled() or read.exception() is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the epoch has ended and nothing is waiting
                loop.call_soon_threadsafe(settle)

    for read in reads:
        read.add_done_callback(on_done)
    if reads:
        await settled
