"""gs:// URLs, found with the optional gcsfs: either with Google's default credentials or anonymously.

TensorStore finds the default credentials in the same places as gcsfs: GOOGLE_APPLICATION_CREDENTIALS, the file written
by gcloud, and the metadata service of Google's machines. It does not accept any other credentials, and no endpoint.
With both an endpoint and credentials, obstore reads instead.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
from collections.abc import Mapping
from typing import Any

from zloader.access.object_stores import ObjectStore, ReadOnly, client_options, libraries
from zloader.access.scheme import Scheme
from zloader.access.storage_options import parameters, require_endpoint, require_known
from zloader.common.errors import OptionError

_REFUSALS = 3  # attempts to connect, a second apart, where nothing listens


def google_token(storage_options: Mapping[str, Any]) -> str:
    """The kind of credentials: `"google_default"` or `"anon"`. Raises OptionError for any other token."""
    token = storage_options.get("token") or ("anon" if storage_options.get("anon") else "google_default")
    if token not in ("google_default", "anon"):
        raise OptionError(
            'the token for gs:// can only be "anon", for public buckets. To use credentials, leave it out and set '
            "GOOGLE_APPLICATION_CREDENTIALS to the path of a key file or run 'gcloud auth application-default login'"
        )
    return str(token)


def paying_project(storage_options: Mapping[str, Any]) -> str:
    """The Google Cloud project that pays for requests; empty if the bucket's owner does. Raises OptionError."""
    pays = storage_options.get("requester_pays")
    if not pays:
        return ""
    project = pays if isinstance(pays, str) else storage_options.get("project")
    if not project:
        raise OptionError('name the project that pays for gs://: {"requester_pays": "PROJECT"}')
    if google_token(storage_options) == "anon":
        raise OptionError("requester_pays for gs:// needs credentials: leave out anon and token")
    return str(project)


def google_endpoint(storage_options: Mapping[str, Any]) -> str:
    """The stated endpoint; empty if there is none. Raises OptionError if it is not the address of a web server."""
    endpoint = str(storage_options.get("endpoint_url") or "")
    if endpoint:
        require_endpoint(endpoint, "gs://")
    return endpoint.rstrip("/")


def _store(location: Any, bucket: str) -> Any:
    options = location.storage_options
    with location.translated("open"), libraries("gs", "obstore for an endpoint_url with credentials", "gs"):
        from obstore.auth.google import GoogleCredentialProvider
        from obstore.store import GCSStore

        project, endpoint = paying_project(options), google_endpoint(options)
        headers = {"x-goog-user-project": project} if project else {}
        client = client_options(endpoint=endpoint, headers=headers)
        return GCSStore(bucket, base_url=endpoint, credential_provider=GoogleCredentialProvider(), **client)


class Google(Scheme):
    """gs:// URLs."""

    form = "BUCKET/KEY"
    advice = 'GOOGLE_APPLICATION_CREDENTIALS, or pass {"token": "anon"} for a public bucket'
    is_writable = False

    def files(self, location: Any, *, asynchronous: bool) -> Any:
        given = location.storage_options
        options = {"use_listings_cache": False, **given, "token": google_token(given)}
        files = _read_only_class()
        require_known(given, "gs", (parameters(files.__init__) - {"access"}) | {"anon"})
        google_endpoint(options)
        options["requester_pays"] = paying_project(given) or False
        options.pop("anon", None)
        return files(access="read_only", asynchronous=asynchronous, **options)

    def tag(self, location: Any, entry: Mapping[str, Any]) -> str:
        return str(entry.get("generation") or "")

    def object_store(self, location: Any) -> ObjectStore | None:
        options = location.storage_options
        if not google_endpoint(options) or google_token(options) == "anon":
            return None
        bucket, _, prefix = location.path.partition("/")
        return ObjectStore(open=functools.partial(_store, location, bucket), prefix=prefix, tag="version")

    def errors(self) -> tuple[type[Exception], ...]:
        _read_only_class()
        from gcsfs.retry import HttpError
        from google.auth.exceptions import GoogleAuthError

        return OSError, HttpError, GoogleAuthError

    def credentials(self, location: Any) -> str:
        _read_only_class()
        if google_token(location.storage_options) == "anon":
            return "anonymous"
        import google.auth

        with location.translated("find credentials for"):
            credentials, _ = google.auth.default()
        named = "GOOGLE_APPLICATION_CREDENTIALS, " * ("GOOGLE_APPLICATION_CREDENTIALS" in os.environ)
        return f"{named}{type(credentials).__module__}.{type(credentials).__name__}"

    def is_denial(self, error: BaseException) -> bool:
        from google.auth.exceptions import GoogleAuthError

        denied = str(getattr(error, "code", "")) in ("401", "403") or str(error).startswith("Forbidden")
        return denied or isinstance(error, PermissionError | GoogleAuthError)


@functools.cache
def _read_only_class() -> Any:
    with libraries("gs", "gcsfs", "gs"):
        from aiohttp import ClientConnectorError
        from gcsfs.core import GCSFileSystem
        from gcsfs.retry import retry_request

    # gcsfs logs the traceback of an error and also raises the error; the log entry would be a duplicate.
    logging.getLogger("gcsfs").addFilter(lambda record: not (record.module == "retry" and record.exc_info))

    class GoogleFiles(ReadOnly, GCSFileSystem):  # type: ignore[misc]
        """Objects below gs:// URLs."""

        async def _once_or_refused(self, *given: Any, **options: Any) -> Any:  # noqa: RET503 - the loop has no end
            for attempt in itertools.count(1):
                try:
                    return await GCSFileSystem._request.__wrapped__(self, *given, **options)
                except ClientConnectorError as error:
                    if attempt == _REFUSALS:  # gcsfs repeats errors of aiohttp, but not this one
                        raise ConnectionError(str(error)) from error
                    await asyncio.sleep(1)

        # 4 attempts, after 0, 1.5, 2.5 and 4.5 s. gcsfs's default, 6, takes half a minute.
        _request = retry_request(_once_or_refused, retries=4)

        @staticmethod
        def close_session(loop: Any, session: Any, asynchronous: bool = False) -> None:
            # An asynchronous session belongs to zarr's loop. At exit gcsfs would await it on fsspec's loop and fail.
            if not asynchronous:
                GCSFileSystem.close_session(loop, session)

    return GoogleFiles
