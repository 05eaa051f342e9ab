"""What differs between the kinds of URL, in one table: SCHEMES.

Each entry says how stores are found with fsspec, which errors its libraries raise, and which library reads bytes:
TensorStore (kvstore.py), or obstore where TensorStore has no driver (object_stores.py). The clients take up to half a
second to import, so methods import them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from zloader.access.azure import Azure
from zloader.access.google import Google
from zloader.access.hub import ADVICE, HubAddresses
from zloader.access.object_stores import ObjectStore
from zloader.access.scheme import Scheme

_SCHEMES_IN_URL = re.compile(r"([a-z][a-z0-9]*)://", re.IGNORECASE)


class _S3(Scheme):
    form = "BUCKET/KEY"
    is_source = True
    advice = "the key and secret in storage_options or the AWS_* variables"

    def files(self, location: Any, *, asynchronous: bool) -> Any:
        from zloader.access.credentials import s3_access
        from zloader.access.s3 import S3Files

        options = {"use_listings_cache": False, **s3_access(location.storage_options).options}
        return S3Files(asynchronous=asynchronous, **options)

    def tag(self, location: Any, entry: Mapping[str, Any]) -> str:
        return str(entry.get("ETag") or "")

    def object_store(self, location: Any) -> ObjectStore | None:
        if not location.storage_options.get("requester_pays"):
            return None
        from zloader.access.s3 import paid_bucket

        return paid_bucket(location)

    def errors(self) -> tuple[type[Exception], ...]:
        from aiohttp import ClientPayloadError  # botocore does not translate a body that ends early
        from botocore.exceptions import BotoCoreError, ClientError

        return OSError, BotoCoreError, ClientError, ClientPayloadError

    def is_denial(self, error: BaseException) -> bool:
        from botocore.exceptions import NoCredentialsError, PartialCredentialsError

        return isinstance(error, PermissionError | NoCredentialsError | PartialCredentialsError)

    def credentials(self, location: Any) -> str:
        from zloader.access.credentials import credentials_found

        return credentials_found(location.storage_options)


class _Hub(Scheme):
    form = "datasets/ORG/NAME/PATH"
    is_source = True
    advice = ADVICE
    if_nothing = "check the repository and the path, and HF_TOKEN if the repository is private"
    is_writable = False

    def path(self, location: Any, rest: str) -> str:
        from zloader.access.hub import hub_path

        return hub_path(location.url, rest, location.revision)

    def revision(self, location: Any) -> str:
        from zloader.access.hub import hub_revision

        return hub_revision(location)

    def files(self, location: Any, *, asynchronous: bool) -> Any:
        from zloader.access.hub import hub_files

        return hub_files(location)

    def zarr_store(self, location: Any) -> Any:
        from zloader.access.hub import hub_zarr_store

        return hub_zarr_store(location)

    def tag(self, location: Any, entry: Mapping[str, Any]) -> str:
        from zloader.access.hub import hub_tag

        return hub_tag(location.revision, entry)

    def addresses(self, location: Any) -> HubAddresses | None:
        return HubAddresses(location)

    def errors(self) -> tuple[type[Exception], ...]:
        from zloader.access.hub import hub_errors

        return OSError, *hub_errors()

    def is_denial(self, error: BaseException) -> bool:
        from zloader.access.hub import is_denial

        return isinstance(error, PermissionError) or is_denial(error)

    def credentials(self, location: Any) -> str:
        from zloader.access.hub import credentials_found

        return credentials_found(location)


class _Web(Scheme):
    form = "HOST/PATH"
    advice = "the headers in storage_options"
    is_writable = False
    is_web = True

    def files(self, location: Any, *, asynchronous: bool) -> Any:
        from zloader.access.web import web_files

        return web_files(location.storage_options, asynchronous=asynchronous)

    def credentials(self, location: Any) -> str:
        return f"headers: {', '.join(location.storage_options.get('headers') or ()) or 'none'}"


_AZURE, _WEB = Azure(), _Web()
SCHEMES: dict[str, Scheme] = {
    "file": Scheme(),
    "s3": _S3(),
    "gs": Google(),
    "az": _AZURE,
    "abfs": _AZURE,
    "abfss": _AZURE,
    "hf": _Hub(),
    "http": _WEB,
    "https": _WEB,
}


def _schemes_in(url: str) -> list[Scheme]:
    """Those of a path or URL, which may be chained, such as zip://...::s3://..."""
    named = [name.lower().replace("s3a", "s3") for name in _SCHEMES_IN_URL.findall(url)]
    return [SCHEMES[name] for name in named if name in SCHEMES] or [SCHEMES["file"]]


def access_errors(url: str) -> tuple[type[Exception], ...]:
    """The exceptions for failed operations at a path or URL."""
    return tuple(dict.fromkeys(error for scheme in _schemes_in(url) for error in scheme.errors()))


def is_denial(url: str, error: BaseException) -> bool:
    """Whether an error at a path or URL means that permissions or credentials are missing."""
    return any(scheme.is_denial(error) for scheme in _schemes_in(url))


def advice(url: str) -> str:
    """What to check if access to a path or URL is denied."""
    return _schemes_in(url)[-1].advice
