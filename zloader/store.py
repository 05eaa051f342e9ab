"""Where a store lives and how its bytes are read: URLs, listing, TensorStore.

Metadata and listing go through fsspec and zarr; the bytes of chunks go through TensorStore, one
ranged GET a span. Credentials and endpoints are taken from the same `storage_options` and `AWS_*` variables for both.
This is the only module that names tensorstore.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import fsspec
import zarr.abc.store
import zarr.storage

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
        options = {} if self.scheme == "file" else {"use_listings_cache": False, **self.storage_options}
        return fsspec.filesystem(self.scheme, **options)

    def zarr_store(self, *, read_only: bool) -> zarr.abc.store.Store:
        """A zarr store rooted at this URL, for metadata and small arrays."""
        if self.scheme == "file":
            return zarr.storage.LocalStore(self.path, read_only=read_only)
        return zarr.storage.FsspecStore.from_url(
            f"s3://{self.path}",
            storage_options={"use_listings_cache": False, **self.storage_options},
            read_only=read_only,
        )

    def listing(self) -> dict[str, StoredObject]:
        """Every object below the URL by key relative to it, from one listing.

        Raises StoreNotFoundError where there is none, AccessDeniedError where the credentials do not allow to look.
        """
        filesystem = self.filesystem()
        try:
            found = filesystem.find(self.path, detail=True)
        except FileNotFoundError:
            found = {}
        except PermissionError as error:
            raise AccessDeniedError(
                f"not allowed to list {self.url}: {error}. "
                "Check the key and secret in storage_options or the AWS_* variables"
            ) from error
        except OSError as error:
            raise StoreError(
                f"cannot list {self.url}: {error}. Is the endpoint right, and does its server run?"
            ) from error
        if not found:
            raise StoreNotFoundError(f"nothing is stored at {self.url}: check the bucket, the key and the endpoint")
        return {
            key[len(self.path) + 1 :]: StoredObject(size=int(entry["size"]), tag=_tag(entry))
            for key, entry in found.items()
        }


def _tag(entry: Mapping[str, Any]) -> str:
    return str(entry["ETag"]) if "ETag" in entry else repr(entry.get("mtime"))
