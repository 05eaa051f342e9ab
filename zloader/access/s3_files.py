"""The files below s3:// URLs, found with s3fs."""

from __future__ import annotations

from typing import Any

from botocore.exceptions import EndpointConnectionError
from s3fs import S3FileSystem

_ATTEMPTS = 3  # to list, where nothing listens: within 3 s. botocore makes 5, in up to 15 s


class S3Files(S3FileSystem):  # type: ignore[misc]
    """Objects in buckets. Listing gives up early if the connection is refused."""

    async def set_session(self, *given: Any, **options: Any) -> Any:
        client = await super().set_session(*given, **options)
        for operation in ("ListObjectsV2", "ListObjectVersions"):
            client.meta.events.register_first(f"needs-retry.s3.{operation}", _give_up, unique_id=f"zloader-{operation}")
        return client


def _give_up(*, attempts: int, caught_exception: Exception | None, **_: Any) -> None:
    if isinstance(caught_exception, EndpointConnectionError) and attempts >= _ATTEMPTS:
        raise caught_exception
