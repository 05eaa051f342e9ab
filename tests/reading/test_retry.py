"""Which failed reads are tried again, and which error they end in."""

from __future__ import annotations

import pytest

from zloader.common.errors import AccessDeniedError, ReadError, TruncatedObjectError
from zloader.reading.tensorstore_reader import classify_failure

pytestmark = pytest.mark.any_version


@pytest.mark.parametrize(
    ("message", "error", "attempts", "answer"),
    [
        *((f"{status}: busy", ReadError, None, "busy") for status in ("ABORTED", "UNAVAILABLE", "DEADLINE_EXCEEDED")),
        ("RESOURCE_EXHAUSTED: All 1 retry attempts failed: SlowDown", ReadError, None, "SlowDown"),
        ("UNAVAILABLE: no [http_response_code='503'] [source='x']", ReadError, None, "503 no"),
        ("OUT_OF_RANGE: Requested byte range", TruncatedObjectError, 3, "Requested byte range"),
        ("FAILED_PRECONDITION: range was ignored by server", ReadError, 3, "range was ignored by server"),
        ("PERMISSION_DENIED: AccessDenied", AccessDeniedError, 1, "AccessDenied"),
        ("UNAUTHENTICATED: who", AccessDeniedError, 1, "who"),
        ("INVALID_ARGUMENT: ExpiredToken [HTTP code 400]", AccessDeniedError, 1, "400 ExpiredToken"),
        ("INVALID_ARGUMENT: no such option", ReadError, 1, "no such option"),
    ],
)
def test_failures_are_told_apart(message: str, error: type[Exception], attempts: int | None, answer: str) -> None:
    failure = classify_failure(message, "the key")
    assert (failure.error, failure.attempts, failure.answer) == (error, attempts, answer)
