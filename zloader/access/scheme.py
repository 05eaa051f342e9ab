"""What is particular to a kind of URL. The classes of single kinds are in schemes.py, google.py and azure.py."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import fsspec
import zarr.storage

from zloader.access.hub import HubAddresses
from zloader.access.object_stores import ObjectStore
from zloader.common.errors import OptionError


class Scheme:
    """Files of this machine. The other schemes override what differs. A `location` is a Location, which has one."""

    form = "PATH"  # of what follows ://, for messages
    advice = "the permissions of the directory"  # what to check if access is denied
    if_nothing = "check the bucket, the key and the endpoint"
    is_writable = True
    is_web = False  # a web server, which cannot be listed
    is_source = False  # whether sources of conversions are found as stores are, and not with all options of fsspec

    def path(self, location: Any, rest: str) -> str:
        """What file systems call the object at a URL, of which `rest` follows ://."""
        return rest

    def require_url(self, authority: str, shown: str) -> None:
        """Raises OptionError for a URL that contains user and password."""
        if "@" in authority:
            raise OptionError(f"cannot open {shown!r}: a URL cannot contain user and password. Use storage_options")

    def revision(self, location: Any) -> str:
        """The commit that a branch now is; empty for URLs that name no branch."""
        return ""

    def files(self, location: Any, *, asynchronous: bool) -> Any:
        """The fsspec file system, without a listings cache. Raises OptionError for options that it does not have."""
        return fsspec.filesystem("file")

    def zarr_store(self, location: Any) -> Any:
        """A read-only zarr store for metadata and small arrays."""
        return zarr.storage.FsspecStore(location.filesystem(asynchronous=True), read_only=True, path=location.path)

    def tag(self, location: Any, entry: Mapping[str, Any]) -> str:
        """What differs between any two versions of an object, from its fsspec entry."""
        return str(entry.get("ETag") or entry.get("etag") or entry.get("generation") or "").strip('"')

    def object_store(self, location: Any) -> ObjectStore | None:
        """What obstore reads, or None."""
        return None

    def addresses(self, location: Any) -> HubAddresses | None:
        """Where each object has an address of its own, which TensorStore reads, or None."""
        return None

    def errors(self) -> tuple[type[Exception], ...]:
        """The exceptions for failed operations. Raises OptionError if a library is missing."""
        return (OSError,)

    def is_denial(self, error: BaseException) -> bool:
        """Whether an error means that permissions or credentials are missing."""
        return isinstance(error, PermissionError)

    def credentials(self, location: Any) -> str:
        """Which credentials are found for a location, by name and without secrets. Raises ZloaderError."""
        return f"not needed: files of this machine, read as user {os.geteuid()}"
