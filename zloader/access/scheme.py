"""What is particular to a kind of URL, in a class each, and what all share: options, processes, libraries, errors."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import fsspec

from zloader.access.stored_objects import Listing, StoredObject, list_files, stored_file
from zloader.common.checks import absolute_path
from zloader.common.errors import ForkError, OptionError
from zloader.common.file_systems import has_stable_inodes
from zloader.common.locks import cached_property
from zloader.common.messages import suggestion

# Makes one attempt to read a range of an object: its key, start, stop and listed tag become its present tag and the
# bytes. An empty tag may be any. If the object has another tag, the server may say so instead, with status 412.
ReadRange = Callable[[str, int, int, str], Awaitable[tuple[str, bytes]]]
_first_users: dict[str, int] = {}  # the process that first used each library
_ERRORS = (
    ("aiohttp", "ClientPayloadError"),  # of a body that ends early, which botocore does not translate
    ("azure.core.exceptions", "AzureError"),
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("httpx", "HTTPError"),  # of huggingface_hub, depending on its version
    ("httpx2", "HTTPError"),
    ("huggingface_hub.errors", "EntryNotFoundError"),
    ("obstore.exceptions", "BaseError"),
)
_DENIALS = (
    ("azure.core.exceptions", "ClientAuthenticationError"),
    ("botocore.exceptions", "NoCredentialsError"),
    ("botocore.exceptions", "PartialCredentialsError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("obstore.exceptions", "PermissionDeniedError"),
    ("obstore.exceptions", "UnauthenticatedError"),
)
_DENIED = (401, 403, 407)
_LIMIT = re.compile(r";r=0;t=(\d+)")  # none remain, for so many seconds
_STATUS = re.compile(r"status(?: code)?: (\d{3})")


class Scheme:
    """A kind of URL, and the objects at and below a location of this kind. Its client is opened when it is first used.

    Keys are relative to the location. The key of the object at the location itself is empty.
    """

    form = "BUCKET/KEY"  # of what follows ://, for messages
    advice = ""  # what to check if access is denied
    if_nothing = "check the bucket, the key and the endpoint"
    is_writable = False
    is_web = False  # a web server, which cannot be listed

    def __init__(self, location: Any) -> None:
        """`location` is a Location."""
        self.location, self.url, self.options = location, str(location.url), location.storage_options

    @property
    def rest(self) -> str:
        """What follows :// in the URL, without slashes at its ends."""
        return self.url.partition("://")[2].strip("/")

    @property
    def path(self) -> str:
        """What file systems call the object at the URL."""
        return self.rest

    def require_url(self, shown: str) -> None:
        """Raises OptionError for a URL that cannot be that of a store; `shown` is the URL without secrets."""
        authority = self.url.partition("://")[2].partition("/")[0]
        if not authority:
            raise OptionError(f"cannot open {shown!r}: the URL must have the form {self.location.scheme}://{self.form}")
        if "@" in authority and not self.is_authority(authority):
            raise OptionError(f"cannot open {shown!r}: a URL cannot contain user and password. Use storage_options")
        if "\\" in self.path:
            raise OptionError(f"cannot open {shown!r}: zarr takes a backslash in a key for a slash. Write a slash")
        steps = self.path.split("/")
        if not {".", ".."}.isdisjoint(steps) or (not self.is_web and "" in steps):
            raise OptionError(f"cannot open {shown!r}: no part of an object's key can be '.', '..' or empty")

    def is_authority(self, authority: str) -> bool:
        """Whether what precedes the path of a URL may contain an @."""
        return False

    def revision(self) -> str:
        """The commit that a branch now is; empty for URLs that name no branch."""
        return ""

    def origin(self) -> str:
        """What distinguishes stores with equal object stamps, if that is needed (Location.origin)."""
        return ""

    def credentials(self) -> str:
        """Which credentials are found, by name and without secrets. Raises ZloaderError."""
        raise NotImplementedError

    @cached_property
    def files(self) -> Any:
        """The fsspec file system, without a listings cache. Raises OptionError for options that it does not have."""
        raise NotImplementedError

    def listing(self) -> Listing:
        """Every object. Empty, or a FileNotFoundError, if there is none."""
        found = self.files.find(self.path, detail=True)
        # Consoles create an empty object whose key ends in a slash to represent a folder.
        start = len(self.path) + 1
        return Listing((key[start:], _stored(entry)) for key, entry in found.items() if key[-1] != "/")

    def find(self, key: str) -> StoredObject:
        """The current state of one object. Raises FileNotFoundError."""
        return _stored(self.files.info(f"{self.path}/{key}"))

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes of an object, or of a range of it. Raises FileNotFoundError, and the errors of the client."""
        stored: bytes = self.files.cat_file(f"{self.path}/{key}" if key else self.path, start=start, end=stop)
        return stored

    def read_range(self) -> ReadRange | None:
        """Opens what obstore reads. None for local files, and for what TensorStore reads."""
        return None


def _stored(entry: Mapping[str, Any]) -> StoredObject:
    tag = str(entry.get("ETag") or "")
    return StoredObject(size=int(entry["size"]), tag=tag, stamp=tag)


class LocalFiles(Scheme):
    """Files of this machine."""

    form = "PATH"
    advice = "the permissions of the directory"
    is_writable = True

    @property
    def path(self) -> str:
        """The absolute path. A relative one belongs to the folder of the location."""
        path = unquote(urlsplit(self.url).path) if "://" in self.url else self.url
        return str(absolute_path(path, self.location.folder))

    def require_url(self, shown: str) -> None:
        try:
            _ = self.path
        except OptionError:
            raise
        except ValueError as error:  # of an address in brackets
            raise OptionError(f"cannot open {shown!r}: {error}") from error

    def origin(self) -> str:
        return str(os.path.realpath(self.path))

    def credentials(self) -> str:
        return f"not needed: files of this machine, read as user {os.geteuid()}"

    @cached_property
    def files(self) -> Any:
        return fsspec.filesystem("file")

    def listing(self) -> Listing:
        return list_files(self.path)

    def find(self, key: str) -> StoredObject:
        return stored_file(Path(self.path, key).stat(), stable_inode=has_stable_inodes(self.path))


def require_known(given: Mapping[str, Any], scheme: str, known: Collection[str]) -> None:
    """Raises OptionError, which names the nearest option, for a storage option that `scheme` does not have."""
    for name in given:
        if name not in known:
            near = suggestion(name, known) or f"; there are: {', '.join(sorted(known))}"
            raise OptionError(f"there is no {name!r:.100} in the storage_options of {scheme}://{near}")


def require_endpoint(endpoint: str, of: str) -> None:
    """Raises OptionError unless `endpoint`, of a kind of storage, is the address of a web server."""
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port or IPv6 address
        usable = False
    if not usable:
        shown = endpoint.rpartition("@")[2]
        raise OptionError(
            f"the endpoint_url of {of} must have the form http://HOST:PORT or https://HOST, not {shown!r:.100}"
        )


@contextlib.contextmanager
def libraries(scheme: str, needed: str, extra: str) -> Iterator[None]:
    """Raises OptionError with the extra that installs them if libraries cannot be imported."""
    try:
        yield
    except ImportError as error:
        raise OptionError(
            f'{scheme}:// needs {needed}, which cannot be imported ({error}): pip install "zloader[{extra}]"'
        ) from error


def uses(library: str) -> bool:
    """Whether this process is the one that first used a library."""
    return _first_users.get(library) == os.getpid()


def claim_process(library: str) -> None:
    """Raises ForkError in a process that was forked from one that has used this library.

    TensorStore aborts there, and obstore waits for threads that do not exist.
    """
    user = _first_users.setdefault(library, os.getpid())
    if user != os.getpid():
        raise ForkError(
            f"process {user} had already read a store when process {os.getpid()} was forked from it, and {library} "
            "does not survive a fork: start DataLoader workers with multiprocessing_context='spawn' or 'forkserver', "
            "or use num_workers=0, which is faster"
        )


def access_errors() -> tuple[type[Exception], ...]:
    """The exceptions for failed operations on files, and of those clients that have been imported."""
    return OSError, *_imported(_ERRORS)


def is_denial(error: BaseException) -> bool:
    """Whether an error means that permissions or credentials are missing."""
    return isinstance(error, (PermissionError, *_imported(_DENIALS))) or status_of(error) in _DENIED


def status_of(error: BaseException) -> int | None:
    """The status with which a server has answered; None if it has not answered."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else getattr(getattr(error, "response", None), "status_code", None)


def wait_s(error: BaseException) -> float:
    """The seconds after which a server wants to be asked again; 0 if the client does not keep what it says."""
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    limit = _LIMIT.search(headers.get("RateLimit", ""))
    after = limit[1] if limit else headers.get("Retry-After", "")
    return float(after) if after.isdigit() else 0.0


def _imported(names: tuple[tuple[str, str], ...]) -> Iterator[type[Exception]]:
    for module, name in names:
        if error := getattr(sys.modules.get(module), name, None):
            yield error
