"""s3:// URLs: s3fs lists and writes, TensorStore reads, and obstore reads buckets whose requester pays.

TensorStore 0.1.86 names the header x-amz-requester-payer, which AWS ignores, instead of x-amz-request-payer. s3fs names
it correctly. All clients get the credentials that credentials.py resolves. They take half a second to import, so
functions import them.
"""

from __future__ import annotations

import functools
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from zloader.access.object_files import is_refusal, kept_store, obstore_errors, read_once
from zloader.access.scheme import ReadRange, Scheme
from zloader.access.stored_objects import Listing, StoredObject
from zloader.common.errors import StoreError

if TYPE_CHECKING:
    from zloader.access.credentials import S3Access

_ATTEMPTS = 3  # to list, where nothing listens: within 3 s. botocore makes 5, in up to 15 s
_AWS = "https://s3.amazonaws.com"
_DEADLINE_S = 20.0
_KEPT = timedelta(minutes=5)  # then botocore is asked again; it renews what expires in less than 10 minutes


class S3(Scheme):
    """s3:// URLs."""

    form = "BUCKET/KEY"
    is_source = True
    advice = "the key and secret in storage_options or the AWS_* variables"

    def files(self, location: Any, *, asynchronous: bool) -> Any:
        from zloader.access.credentials import s3_access

        options = {"use_listings_cache": False, **s3_access(location.storage_options).options}
        return _files_class()(asynchronous=asynchronous, **options)

    def listing(self, location: Any) -> Listing:
        found = location.filesystem().find(location.path, detail=True)
        # Consoles create an empty object whose key ends in a slash to represent a folder.
        return Listing(
            (key[len(location.path) + 1 :], self._stored(entry)) for key, entry in found.items() if key[-1] != "/"
        )

    def find_object(self, location: Any, key: str) -> StoredObject:
        return self._stored(location.filesystem().info(f"{location.path}/{key}"))

    def _stored(self, entry: Any) -> StoredObject:
        return StoredObject(size=int(entry["size"]), tag=self.tag(entry), stamp=self.tag(entry))

    def zarr_store(self, location: Any) -> Any:
        from zarr.storage import FsspecStore

        return FsspecStore(location.filesystem(asynchronous=True), read_only=True, path=location.path)

    def read_range(self, location: Any) -> ReadRange | None:
        if not location.storage_options.get("requester_pays"):
            return None
        with location.translated("open"):
            return functools.partial(read_once, _paid_bucket(location))

    def errors(self) -> tuple[type[Exception], ...]:
        from aiohttp import ClientPayloadError  # botocore does not translate a body that ends early
        from botocore.exceptions import BotoCoreError, ClientError

        return OSError, BotoCoreError, ClientError, ClientPayloadError, *obstore_errors()

    def is_denial(self, error: BaseException) -> bool:
        from botocore.exceptions import NoCredentialsError, PartialCredentialsError

        denied = PermissionError | NoCredentialsError | PartialCredentialsError
        return isinstance(error, denied) or (isinstance(error, obstore_errors()) and is_refusal(error))

    def credentials(self, location: Any) -> str:
        from zloader.access.credentials import credentials_found

        return credentials_found(location.storage_options)


def _paid_bucket(location: Any) -> Any:
    """The store of obstore for a location whose requester pays."""
    from zloader.access.credentials import s3_access

    bucket, _, prefix = location.path.partition("/")
    access = s3_access(location.storage_options)
    endpoint, region = access.endpoint, access.region or bucket_region(bucket)
    options = {**_signed(access), "region": region, "request_payer": True}
    if endpoint:
        options["endpoint"] = endpoint
    return kept_store("S3Store", bucket, endpoint_url=endpoint or _AWS, prefix=prefix or None, retries=False, **options)


def _signed(access: S3Access) -> dict[str, Any]:
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


@functools.cache
def _files_class() -> Any:
    from botocore.exceptions import EndpointConnectionError
    from s3fs import S3FileSystem

    def give_up(*, attempts: int, caught_exception: Exception | None, **_: Any) -> None:
        if isinstance(caught_exception, EndpointConnectionError) and attempts >= _ATTEMPTS:
            raise caught_exception

    class S3Files(S3FileSystem):  # type: ignore[misc]
        """Objects in buckets. Listing gives up early if the connection is refused."""

        async def set_session(self, *given: Any, **options: Any) -> Any:
            client = await super().set_session(*given, **options)
            for operation in ("ListObjectsV2", "ListObjectVersions"):
                event = f"needs-retry.s3.{operation}"
                client.meta.events.register_first(event, give_up, unique_id=f"zloader-{operation}")
            return client

    return S3Files
