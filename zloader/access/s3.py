"""s3://: files that s3fs finds, and buckets whose requester pays, which obstore reads.

TensorStore 0.1.86 names the header x-amz-requester-payer, which AWS ignores, instead of x-amz-request-payer. Listings
and metadata go through s3fs, which names it correctly. Both clients get the credentials that credentials.py resolves.
"""

from __future__ import annotations

import functools
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from botocore.exceptions import EndpointConnectionError
from s3fs import S3FileSystem

from zloader.access.credentials import S3Access, s3_access
from zloader.access.object_stores import ObjectStore, client_options, libraries
from zloader.common.errors import StoreError

_ATTEMPTS = 3  # to list, where nothing listens: within 3 s. botocore makes 5, in up to 15 s
_AWS = "https://s3.amazonaws.com"
_DEADLINE_S = 20.0
_KEPT = timedelta(minutes=5)  # then botocore is asked again; it renews what expires in less than 10 minutes


def paid_bucket(location: Any) -> ObjectStore:
    """The bucket of a location for obstore."""
    bucket, _, prefix = location.path.partition("/")
    return ObjectStore(open=functools.partial(_open, location, bucket), prefix=prefix)


def _open(location: Any, bucket: str) -> Any:
    with location.translated("open"), libraries("s3", "obstore to read with requester_pays", "requester_pays"):
        from obstore.store import S3Store

        access = s3_access(location.storage_options)
        options = client_options(endpoint=access.endpoint or "")
        where: dict[str, Any] = {"endpoint": access.endpoint} if access.endpoint else {}
        region = access.region or bucket_region(bucket)
        return S3Store(bucket, region=region, request_payer=True, **where, **_credentials(access), **options)


def _credentials(access: S3Access) -> dict[str, Any]:
    if access.provider == "anonymous":
        return {"skip_signature": True}
    if access.options.get("key"):
        names = {"key": "access_key_id", "secret": "secret_access_key", "token": "session_token"}
        return {names[name]: secret for name, secret in access.secrets.items()}
    return {"credential_provider": _renewed(access.profile)}


def _renewed(profile: str | None) -> Callable[[], dict[str, Any]]:
    """What botocore finds, such as the credentials of a role, which it renews."""
    import botocore.session

    found = botocore.session.Session(profile=profile).get_credentials()

    def provide() -> dict[str, Any]:
        now = found.get_frozen_credentials()
        keys = {"access_key_id": now.access_key, "secret_access_key": now.secret_key, "token": now.token}
        return {**keys, "expires_at": datetime.now(UTC) + _KEPT}

    return provide


def bucket_region(bucket: str) -> str:
    """The region of a bucket at AWS, which says it even to those who may not read the bucket. Raises StoreError."""
    request = urllib.request.Request(f"{_AWS}/{bucket}", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=_DEADLINE_S) as answer:
            headers = answer.headers
    except urllib.error.HTTPError as error:
        headers = error.headers
        error.close()
    except OSError as error:
        raise StoreError(f"cannot look up the region of bucket {bucket}: {error}. Is AWS reachable?") from error
    region = headers.get("x-amz-bucket-region")
    if not region:
        raise StoreError(f'the region of bucket {bucket} is unknown: pass "client_kwargs": {{"region_name": ...}}')
    return str(region)


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
