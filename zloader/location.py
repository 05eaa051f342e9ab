"""Where a store lives: its URL and options, its listing, and the zarr store for its metadata.

All of it goes through fsspec, s3fs and zarr. The bytes of chunks go through store.py, which takes credentials and
endpoints from the same `storage_options` and `AWS_*` variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import fsspec
import zarr.abc.store
import zarr.storage
from botocore.exceptions import BotoCoreError, NoCredentialsError, PartialCredentialsError

from zloader.errors import AccessDeniedError, OptionError, StoreError, StoreNotFoundError

SCHEMES = ("file", "s3")


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """Size in bytes and tag (ETag, or modification time for local files) of one object, as listed."""

    size: int
    tag: str


@dataclass(frozen=True, kw_only=True)
class Location:
    """A URL together with the options that open it.

    `url` is a local path, `file://` or `s3://bucket/prefix`; `storage_options` are s3fs's and are never shown.
    """

    url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
            raise OptionError(f"cannot open {self.url!r}: give a local path or a URL that starts with {known}")
        if self.scheme == "s3" and not urlsplit(self.url).netloc:
            raise OptionError(f"cannot open {self.url!r}: an S3 URL reads s3://BUCKET/KEY")

    @property
    def scheme(self) -> str:
        """`"file"` or `"s3"`."""
        return urlsplit(self.url).scheme if "://" in self.url else "file"

    @property
    def path(self) -> str:
        """The absolute local path, or `bucket/prefix`; never ends in a slash."""
        if self.scheme == "file":
            bare = unquote(urlsplit(self.url).path) if "://" in self.url else self.url
            return str(Path(bare).expanduser().absolute())
        parts = urlsplit(self.url)
        return f"{parts.netloc}/{parts.path.strip('/')}".rstrip("/")

    def filesystem(self) -> Any:
        """The fsspec file system that holds `path`, with nothing cached of its listings."""
        return fsspec.filesystem(self.scheme, **self._fsspec_options())

    def zarr_store(self, *, read_only: bool) -> zarr.abc.store.Store:
        """A zarr store rooted at this URL, for metadata and small arrays."""
        if self.scheme == "file":
            return zarr.storage.LocalStore(self.path, read_only=read_only)
        return zarr.storage.FsspecStore.from_url(
            f"s3://{self.path}", storage_options=self._fsspec_options(), read_only=read_only
        )

    def _fsspec_options(self) -> dict[str, Any]:
        return {} if self.scheme == "file" else {"use_listings_cache": False, **self.s3_options()}

    def s3_options(self) -> dict[str, Any]:
        """`storage_options` with what they leave to the AWS_* variables filled in, for s3fs and TensorStore alike.

        fsspec gives out one client for equal options for ever, so the variables must show in the options: else
        credentials mended in a running process would not be seen.
        """
        options, client = dict(self.storage_options), dict(self.storage_options.get("client_kwargs") or {})
        if not (client.keys() | options.keys()) & {"key", "anon", "profile", "aws_access_key_id"}:
            names = {"key": "AWS_ACCESS_KEY_ID", "secret": "AWS_SECRET_ACCESS_KEY", "token": "AWS_SESSION_TOKEN"}
            if "AWS_PROFILE" in os.environ:
                names = {"profile": "AWS_PROFILE"}
            options |= {option: os.environ[name] for option, name in names.items() if os.environ.get(name)}
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        if endpoint and not (options.get("endpoint_url") or client.get("endpoint_url")):
            options["endpoint_url"] = endpoint
        return options

    def listing(self) -> dict[str, StoredObject]:
        """Every object below the URL by key relative to it, from one listing.

        Raises StoreNotFoundError where there is none, AccessDeniedError where the credentials do not allow to look.
        """
        filesystem = self.filesystem()
        try:
            found = filesystem.find(self.path, detail=True)
        except FileNotFoundError:
            found = {}
        except (PermissionError, NoCredentialsError, PartialCredentialsError) as error:
            raise AccessDeniedError(
                f"not allowed to list {self.url}: {error}. "
                "Check the key and secret in storage_options or the AWS_* variables"
            ) from error
        except (OSError, BotoCoreError) as error:
            raise StoreError(
                f"cannot list {self.url}: {error}. Is the endpoint right, and does its server run?"
            ) from error
        if not found:
            raise StoreNotFoundError(f"nothing is stored at {self.url}: check the bucket, the key and the endpoint")
        return {
            key[len(self.path) + 1 :]: StoredObject(size=int(entry["size"]), tag=_tag(entry))
            for key, entry in found.items()
        }

    def find_object(self, key: str) -> StoredObject | None:
        """One object as it is now; None where it is not. Raises StoreError."""
        try:
            entry = self.filesystem().info(f"{self.path}/{key}")
        except FileNotFoundError:
            return None
        except (OSError, BotoCoreError) as error:
            raise StoreError(f"cannot look at {key} of {self.url}: {error}") from error
        return StoredObject(size=int(entry["size"]), tag=_tag(entry))


def _tag(entry: Mapping[str, Any]) -> str:
    return str(entry["ETag"]) if "ETag" in entry else repr(entry.get("mtime"))
