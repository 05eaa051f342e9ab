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
# Names that other tools use for options of s3fs.
_ELSEWHERE = {
    **dict.fromkeys(("access_key", "access_key_id", "aws_access_key_id"), "'key'"),
    **dict.fromkeys(("secret_key", "secret_access_key", "aws_secret_access_key"), "'secret'"),
    **dict.fromkeys(("session_token", "aws_session_token"), "'token'"),
    **dict.fromkeys(("endpoint", "endpoint_override", "aws_endpoint_url", "host"), "'endpoint_url'"),
    **dict.fromkeys(("profile_name", "aws_profile"), "'profile'"),
    **dict.fromkeys(("anonymous", "skip_signature", "no_sign_request"), "'anon'"),
    **dict.fromkeys(("region", "region_name", "aws_region"), '"client_kwargs": {"region_name": ...}'),
    "verify": '"client_kwargs": {"verify": ...}',
}
_DENIED = (401, 403, 407)
_LIMIT = re.compile(r";r=0;t=(\d+)")  # none remain, for so many seconds
_STATUS = re.compile(r"status(?: code)?: (\d{3})")


class Scheme:
    """A kind of URL whose objects a file system of fsspec finds. A `location` is a Location, which has a scheme."""

    form = "BUCKET/KEY"  # of what follows ://, for messages
    advice = ""  # what to check if access is denied
    if_nothing = "check the bucket, the key and the endpoint"
    is_writable = False
    is_web = False  # a web server, which cannot be listed

    def path(self, location: Any, rest: str) -> str:
        """What file systems call the object at a URL, of which `rest` follows ://, without slashes at its ends."""
        return rest

    def require_url(self, location: Any, shown: str) -> None:
        """Raises OptionError for a URL that cannot be that of a store; `shown` is the URL without secrets."""
        authority = location.url.partition("://")[2].partition("/")[0]
        if not authority:
            raise OptionError(f"cannot open {shown!r}: the URL must have the form {location.scheme}://{self.form}")
        self.require_authority(authority, shown)
        if "\\" in location.path:
            raise OptionError(f"cannot open {shown!r}: zarr takes a backslash in a key for a slash. Write a slash")
        steps = location.path.split("/")
        if not {".", ".."}.isdisjoint(steps) or (not self.is_web and "" in steps):
            raise OptionError(f"cannot open {shown!r}: no part of an object's key can be '.', '..' or empty")

    def require_authority(self, authority: str, shown: str) -> None:
        """Raises OptionError for a URL that contains user and password before the first slash."""
        if "@" in authority:
            raise OptionError(f"cannot open {shown!r}: a URL cannot contain user and password. Use storage_options")

    def revision(self, location: Any) -> str:
        """The commit that a branch now is; empty for URLs that name no branch."""
        return ""

    def origin(self, location: Any) -> str:
        """What distinguishes stores with equal object stamps, if that is needed (Location.origin)."""
        return ""

    def files(self, location: Any, *, asynchronous: bool) -> Any:
        """The fsspec file system, without a listings cache. Raises OptionError for options that it does not have."""
        raise NotImplementedError

    def listing(self, location: Any) -> Listing:
        """Every object below a location, by relative key. Empty, or a FileNotFoundError, if there is none."""
        found = location.filesystem().find(location.path, detail=True)
        # Consoles create an empty object whose key ends in a slash to represent a folder.
        start = len(location.path) + 1
        return Listing((key[start:], _stored(entry)) for key, entry in found.items() if key[-1] != "/")

    def find_object(self, location: Any, key: str) -> StoredObject:
        """The current state of one object below a location. Raises FileNotFoundError."""
        return _stored(location.filesystem().info(f"{location.path}/{key}"))

    def read_range(self, location: Any) -> ReadRange | None:
        """Opens what obstore reads. None for local files, and for what TensorStore reads."""
        return None

    def credentials(self, location: Any) -> str:
        """Which credentials are found for a location, by name and without secrets. Raises ZloaderError."""
        raise NotImplementedError


def _stored(entry: Mapping[str, Any]) -> StoredObject:
    tag = str(entry.get("ETag") or "")
    return StoredObject(size=int(entry["size"]), tag=tag, stamp=tag)


class LocalFiles(Scheme):
    """Files of this machine."""

    form = "PATH"
    advice = "the permissions of the directory"
    is_writable = True

    def path(self, location: Any, rest: str) -> str:
        """The absolute path. A relative one belongs to the folder of the location."""
        path = unquote(urlsplit(location.url).path) if "://" in location.url else location.url
        return str(absolute_path(path, location.folder))

    def require_url(self, location: Any, shown: str) -> None:
        try:
            self.path(location, "")
        except OptionError:
            raise
        except ValueError as error:  # of an address in brackets
            raise OptionError(f"cannot open {shown!r}: {error}") from error

    def origin(self, location: Any) -> str:
        return str(os.path.realpath(location.path))

    def files(self, location: Any, *, asynchronous: bool) -> Any:
        return fsspec.filesystem("file")

    def listing(self, location: Any) -> Listing:
        return list_files(location.path)

    def find_object(self, location: Any, key: str) -> StoredObject:
        root = location.path
        return stored_file(Path(root, key).stat(), stable_inode=has_stable_inodes(root))

    def credentials(self, location: Any) -> str:
        return f"not needed: files of this machine, read as user {os.geteuid()}"


def require_known(given: Mapping[str, Any], scheme: str, known: Collection[str], option: str = "") -> None:
    """Raises OptionError, which names the nearest option, for a storage option that `scheme` does not have.

    The options may be those in one of the storage options, an `option` that is a dict.
    """
    elsewhere = _ELSEWHERE if scheme == "s3" and not option else {}
    for name in given:
        if name not in known:
            right = elsewhere.get(str(name).lower())
            near = f". Did you mean {right}?" if right else suggestion(name, known)
            near = near or f"; there are: {', '.join(sorted(known))}"
            within = f"{option} of storage_options" if option else f"the storage_options of {scheme}://"
            raise OptionError(f"there is no {name!r:.100} in {within}{near}")


def require_endpoint(endpoint: str, of: str = "S3") -> None:
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
