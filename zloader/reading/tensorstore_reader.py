"""Single ranged GETs of s3:// through TensorStore. This is the only module that imports it.

Options, environment variables and profiles have the same meaning here as for s3fs.
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tensorstore as ts

from zloader.access.location import Location
from zloader.access.s3 import S3Access, s3_access
from zloader.access.scheme import claim_process
from zloader.common.errors import StoreError
from zloader.common.file_systems import close_with
from zloader.common.records import Span
from zloader.reading.answers import MISSING, RANGE_IGNORED, Answer, ReadFailure, denied, refused, truncated

# TensorStore's statuses for transient failures: 5xx, 429, S3's SlowDown, RequestTimeout and similar, and connection
# errors. It reports them as ABORTED once its own retries are used up, which is at once, since it is told not to retry.
_TRANSIENT = {"ABORTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"}
# S3 rejects invalid credentials with 403, and expired ones with 400 and one of these codes.
_DENIED = re.compile(r"ExpiredToken|InvalidToken|TokenRefreshRequired")
_PREFIX = re.compile(r"([A-Z_]+: )?(All \d+ retry attempts failed: )?")
_DETAILS = re.compile(r" \[(HTTP code|[\w-]+=)")
_CODE = re.compile(r"\[(?:http_response_code='|HTTP code )(\d+)")


class TensorStoreReader:
    """A RangeReader of S3. TensorStore's own retries are off."""

    def __init__(self, location: Location) -> None:
        self._location, self._credentials = location, Credentials()
        self._opening: asyncio.Task[Any] | None = None

    async def start(self, spans: Sequence[Span]) -> list[Any]:
        if self._opening is None:  # of several fetches that begin at once, only the first opens the store
            self._opening = asyncio.ensure_future(_open_kvstore(self._location, self._credentials))
        kvstore = await self._opening
        return [kvstore.read(span.key, byte_range=slice(span.start, span.stop)) for span in spans]

    def answer(self, read: Any) -> Answer | ReadFailure:
        if (error := read.exception()) is not None:
            return classify_failure(str(error), self._location.kind.advice)
        result = read.result()
        if result.state == "missing":
            return MISSING
        return Answer(tag=result.stamp.generation, stored=result.value)  # copies the bytes, so ask only once


async def _open_kvstore(location: Location, credentials: Credentials) -> Any:
    claim_process("TensorStore")
    try:
        return await ts.KvStore.open(kvstore_spec(location, credentials))
    except (ValueError, OSError) as error:
        raise StoreError(f"cannot open {location.url}: {error}") from error


def kvstore_spec(location: Location, credentials: Credentials) -> dict[str, Any]:
    """TensorStore's spec of the key-value store at a remote `location`. Raises AccessDeniedError and OptionError."""
    set_curl_timeouts()
    trust_bundle()
    access, (bucket, _, prefix) = s3_access(location.storage_options), location.path.partition("/")
    optional = {"endpoint": access.endpoint, "aws_region": access.region}
    return {
        "driver": "s3",
        "bucket": bucket,
        "path": prefix + "/" if prefix else "",
        "aws_credentials": credentials.spec(access),
        # The fetch bounds the bytes in flight. This limit only has to be high enough not to interfere.
        "s3_request_concurrency": {"limit": 256},
        # object_source.py retries, within a deadline. TensorStore's own retries would go on for 15 minutes.
        "s3_request_retries": {"max_retries": 0},
        **{name: value for name, value in optional.items() if value},
    }


def set_curl_timeouts() -> None:
    """Sets when TensorStore's curl gives up. It reads these variables once per process."""
    # curl drops a connection that stalls for this long. The deadline of FetchOptions bounds the whole read.
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "20")
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")
    os.environ.setdefault("TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS", "10")  # default: 30 s, too long for retries


def trust_bundle() -> None:
    """Has TensorStore trust the certificate authorities that botocore trusts. It reads this once per process."""
    if bundle := os.environ.get("AWS_CA_BUNDLE"):
        os.environ.setdefault("TENSORSTORE_CA_BUNDLE", bundle)


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
    return refused(answer)


class Credentials:
    """Passes S3 credentials to TensorStore.

    TensorStore reads a key and a secret only from a file or the environment. They are passed in an anonymous in-memory
    file that exists as long as this object; on macOS, which has no such files, in a temporary file that only its owner
    can read.
    """

    _end: weakref.finalize[..., Any] | None = None

    def spec(self, access: S3Access) -> dict[str, str]:
        """TensorStore's `aws_credentials`."""
        if access.secrets:
            return self._in_memory(**access.secrets)
        if access.provider == "default" and (profile := access.options.get("profile")):
            return {"type": "default", "profile": profile}
        return {"type": access.provider}

    def _in_memory(self, *, key: str, secret: str = "", token: str = "") -> dict[str, str]:
        secrets = {"aws_access_key_id": key, "aws_secret_access_key": secret, "aws_session_token": token}
        lines = [f"{name} = {value}" for name, value in secrets.items() if value]
        if self._end is not None:
            self._end()
        if hasattr(os, "memfd_create"):
            file = os.memfd_create("zloader-credentials", os.MFD_CLOEXEC)
            path = f"/proc/self/fd/{file}"
            self._end = close_with(self, file)
        else:
            file, path = tempfile.mkstemp(prefix="zloader-credentials-")  # mode 0600
            self._end = weakref.finalize(self, _end_temporary, file, path, os.getpid())
        os.write(file, "\n".join(["[zloader]", *lines, ""]).encode())
        return {"type": "profile", "profile": "zloader", "credentials_file": path, "config_file": os.devnull}


def _end_temporary(file: int, path: str, pid: int) -> None:
    os.close(file)
    if pid == os.getpid():  # not a copy in a forked process
        Path(path).unlink(missing_ok=True)
