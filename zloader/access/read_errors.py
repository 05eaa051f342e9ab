"""What a read that did not give its bytes amounts to: whether asking again may help, and which error it is. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from zloader.common.errors import AccessDeniedError, MissingObjectError, ReadError, StoreError, TruncatedObjectError

# TensorStore's words for answers that may pass: 5xx, 429, S3's SlowDown, RequestTimeout and such, and whatever befalls
# a connection. ABORTED is what it makes of them when its own retries are spent, and it has none.
_PASSING = {"ABORTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"}
# S3 refuses credentials with 403; those that have expired with 400 and one of these codes.
_REFUSED = re.compile(r"ExpiredToken|InvalidToken|TokenRefreshRequired")
_PREFIX = re.compile(r"([A-Z_]+: )?(All \d+ retry attempts failed: )?")
_DETAILS = re.compile(r" \[(HTTP code|[\w-]+=)")
_CODE = re.compile(r"\[(?:http_response_code='|HTTP code )(\d+)")
_SHORT_ATTEMPTS = 3  # an answer of the wrong length, as often as this in all, is no accident of the connection


@dataclass(frozen=True, kw_only=True)
class ReadFailure:
    """An answer that was not the bytes asked for.

    `answer` is what the server or the connection said; `error` is what to raise, with `verdict` and `advice`, once
    there were as many of the kind as `attempts` (None: as many as the options allow).
    """

    answer: str
    error: type[StoreError] = ReadError
    verdict: str = "failed"
    advice: str = "Is the server overloaded, down or out of reach? FetchOptions(retries=..., deadline_s=...) try longer"
    attempts: int | None = None


MISSING = ReadFailure(
    answer="there is no such object",
    error=MissingObjectError,
    advice="Was the store changed or deleted?",
    attempts=1,
)


def cut_short(answer: str) -> ReadFailure:
    """That an answer had fewer bytes than were asked for."""
    return ReadFailure(
        answer=answer,
        error=TruncatedObjectError,
        advice="The object was cut short. Restore or convert the store again",
        attempts=_SHORT_ATTEMPTS,
    )


def setback_of(failure: str) -> ReadFailure:
    """What a failure of TensorStore's, as it words it, amounts to."""
    status, code = failure.partition(":")[0], _CODE.search(failure)
    reason = " ".join(_DETAILS.split(_PREFIX.sub("", failure, count=1))[0].split())[:300]
    answer = f"{code[1]} {reason}" if code else reason
    if status in ("PERMISSION_DENIED", "UNAUTHENTICATED") or _REFUSED.search(reason):
        return ReadFailure(
            answer=answer,
            error=AccessDeniedError,
            verdict="is not allowed",
            advice="Check the key and secret in storage_options or the AWS_* variables, and whether they have expired",
            attempts=1,
        )
    if status in _PASSING:
        return ReadFailure(answer=answer)
    if status == "OUT_OF_RANGE":
        return cut_short(answer)
    if "was ignored by server" in reason:
        advice = "Does a proxy in between drop the Range header?"
        return ReadFailure(answer=answer, advice=advice, attempts=_SHORT_ATTEMPTS)
    return ReadFailure(answer=answer, advice="It makes no sense to ask again", attempts=1)
