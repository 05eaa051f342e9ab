"""What differs between the kinds of URL, in one table: SCHEMES.

Each entry says how stores are found with fsspec, which errors its libraries raise, and which library reads bytes:
TensorStore (kvstore.py), or obstore where TensorStore has no driver (object_stores.py). The clients take up to half a
second to import, so methods import them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import fsspec
import zarr.storage

from zloader.access.address import Address
from zloader.access.hub import ADVICE, HubAddresses
from zloader.access.object_stores import ObjectStore
from zloader.common.errors import OptionError

_SCHEMES_IN_URL = re.compile(r"([a-z][a-z0-9]*)://", re.IGNORECASE)


class Scheme:
    """Files of this machine. The other schemes override what differs."""

    form = "PATH"  # of what follows ://, for messages
    advice = "the permissions of the directory"  # what to check if access is denied
    if_nothing = "check the bucket, the key and the endpoint"
    is_writable = True
    is_web = False  # a web server, which cannot be listed
    is_source = False  # whether sources of conversions are found as stores are, and not with all options of fsspec

    def path(self, location: Address, rest: str) -> str:
        """What file systems call the object at a URL, of which `rest` follows ://."""
        return rest

    def require_url(self, authority: str, shown: str) -> None:
        """Raises OptionError for a URL that contains user and password."""
        if "@" in authority:
            raise OptionError(f"cannot open {shown!r}: a URL cannot contain user and password. Use storage_options")

    def revision(self, location: Address) -> str:
        """The commit that a branch now is; empty for URLs that name no branch."""
        return ""

    def files(self, location: Address, *, asynchronous: bool) -> Any:
        """The fsspec file system, without a listings cache. Raises OptionError for options that it does not have."""
        return fsspec.filesystem("file")

    def zarr_store(self, location: Address) -> Any:
        """A read-only zarr store for metadata and small arrays."""
        return zarr.storage.FsspecStore(location.filesystem(asynchronous=True), read_only=True, path=location.path)

    def tag(self, location: Address, entry: Mapping[str, Any]) -> str:
        """What differs between any two versions of an object, from its fsspec entry."""
        return str(entry.get("ETag") or entry.get("etag") or entry.get("generation") or "").strip('"')

    def object_store(self, location: Address) -> ObjectStore | None:
        """What obstore reads, or None."""
        return None

    def addresses(self, location: Address) -> HubAddresses | None:
        """Where each object has an address of its own, which TensorStore reads, or None."""
        return None

    def errors(self) -> tuple[type[Exception], ...]:
        """The exceptions for failed operations. Raises OptionError if a library is missing."""
        return (OSError,)

    def is_denial(self, error: BaseException) -> bool:
        """Whether an error means that permissions or credentials are missing."""
        return isinstance(error, PermissionError)

    def credentials(self, location: Address) -> str:
        """Which credentials are found for a location, by name and without secrets. Raises ZloaderError."""
        return f"not needed: files of this machine, read as user {os.geteuid()}"


class _S3(Scheme):
    form = "BUCKET/KEY"
    is_source = True
    advice = "the key and secret in storage_options or the AWS_* variables"

    def files(self, location: Address, *, asynchronous: bool) -> Any:
        from zloader.access.credentials import s3_access
        from zloader.access.s3_files import S3Files

        options = {"use_listings_cache": False, **s3_access(location.storage_options).options}
        return S3Files(asynchronous=asynchronous, **options)

    def tag(self, location: Address, entry: Mapping[str, Any]) -> str:
        return str(entry.get("ETag") or "")

    def object_store(self, location: Address) -> ObjectStore | None:
        if not location.storage_options.get("requester_pays"):
            return None
        from zloader.access.paid_s3 import paid_bucket

        return paid_bucket(location)

    def errors(self) -> tuple[type[Exception], ...]:
        from aiohttp import ClientPayloadError  # botocore does not translate a body that ends early
        from botocore.exceptions import BotoCoreError, ClientError

        return OSError, BotoCoreError, ClientError, ClientPayloadError

    def is_denial(self, error: BaseException) -> bool:
        from botocore.exceptions import NoCredentialsError, PartialCredentialsError

        return isinstance(error, PermissionError | NoCredentialsError | PartialCredentialsError)

    def credentials(self, location: Address) -> str:
        from zloader.access.credentials import credentials_found

        return credentials_found(location.storage_options)


class _Google(Scheme):
    form = "BUCKET/KEY"
    advice = 'GOOGLE_APPLICATION_CREDENTIALS, or pass {"token": "anon"} for a public bucket'
    is_writable = False

    def files(self, location: Address, *, asynchronous: bool) -> Any:
        from zloader.access.google import google_files

        return google_files(location.storage_options, asynchronous=asynchronous)

    def tag(self, location: Address, entry: Mapping[str, Any]) -> str:
        return str(entry.get("generation") or "")

    def object_store(self, location: Address) -> ObjectStore | None:
        from zloader.access.google import google_store

        return google_store(location)

    def errors(self) -> tuple[type[Exception], ...]:
        from zloader.access.google import google_errors

        return OSError, *google_errors()

    def is_denial(self, error: BaseException) -> bool:
        from zloader.access.google import is_denial

        return isinstance(error, PermissionError) or is_denial(error)

    def credentials(self, location: Address) -> str:
        from zloader.access.google import credentials_found

        return credentials_found(location)


class _Azure(Scheme):
    form = "CONTAINER/KEY"
    is_source = True
    advice = (
        "account_name with account_key, sas_token or connection_string in storage_options or the AZURE_STORAGE_* "
        "variables, or the identity that DefaultAzureCredential finds; anon=True is for a public container"
    )
    if_nothing = "check the account, the container and the key"
    is_writable = False

    def path(self, location: Address, rest: str) -> str:
        return re.sub("^([^/@]*)@[^/]*", r"\1", rest)

    def require_url(self, authority: str, shown: str) -> None:
        from zloader.access.azure import require_account

        require_account(authority, shown)

    def files(self, location: Address, *, asynchronous: bool) -> Any:
        from zloader.access.azure import azure_files

        return azure_files(location, asynchronous=asynchronous)

    def zarr_store(self, location: Address) -> Any:
        from zloader.access.azure import azure_zarr_store

        return azure_zarr_store(location)

    def object_store(self, location: Address) -> ObjectStore | None:
        from zloader.access.azure import azure_store

        return azure_store(location)

    def errors(self) -> tuple[type[Exception], ...]:
        from zloader.access.azure import azure_errors

        return OSError, *azure_errors()

    def is_denial(self, error: BaseException) -> bool:
        from zloader.access.azure import is_denial

        return isinstance(error, PermissionError) or is_denial(error)

    def credentials(self, location: Address) -> str:
        from zloader.access.azure import credentials_found

        return credentials_found(location)


class _Hub(Scheme):
    form = "datasets/ORG/NAME/PATH"
    is_source = True
    advice = ADVICE
    if_nothing = "check the repository and the path, and HF_TOKEN if the repository is private"
    is_writable = False

    def path(self, location: Address, rest: str) -> str:
        from zloader.access.hub import hub_path

        return hub_path(location.url, rest, location.revision)

    def revision(self, location: Address) -> str:
        from zloader.access.hub import hub_revision

        return hub_revision(location)

    def files(self, location: Address, *, asynchronous: bool) -> Any:
        from zloader.access.hub import hub_files

        return hub_files(location)

    def zarr_store(self, location: Address) -> Any:
        from zloader.access.hub import hub_zarr_store

        return hub_zarr_store(location)

    def tag(self, location: Address, entry: Mapping[str, Any]) -> str:
        from zloader.access.hub import hub_tag

        return hub_tag(location.revision, entry)

    def addresses(self, location: Address) -> HubAddresses | None:
        return HubAddresses(location)

    def errors(self) -> tuple[type[Exception], ...]:
        from zloader.access.hub import hub_errors

        return OSError, *hub_errors()

    def is_denial(self, error: BaseException) -> bool:
        from zloader.access.hub import is_denial

        return isinstance(error, PermissionError) or is_denial(error)

    def credentials(self, location: Address) -> str:
        from zloader.access.hub import credentials_found

        return credentials_found(location)


class _Web(Scheme):
    form = "HOST/PATH"
    advice = "the headers in storage_options"
    is_writable = False
    is_web = True

    def files(self, location: Address, *, asynchronous: bool) -> Any:
        from zloader.access.web import web_files

        return web_files(location.storage_options, asynchronous=asynchronous)

    def credentials(self, location: Address) -> str:
        return f"headers: {', '.join(location.storage_options.get('headers') or ()) or 'none'}"


_AZURE, _WEB = _Azure(), _Web()
SCHEMES: dict[str, Scheme] = {
    "file": Scheme(),
    "s3": _S3(),
    "gs": _Google(),
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
