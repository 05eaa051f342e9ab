"""What is particular to a kind of URL, in a class each. This one is for local files. The others refine it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any

import fsspec
import zarr.storage

from zloader.access.stored_objects import Listing, StoredObject, find_file, list_files
from zloader.common.errors import ForkError, OptionError

# Makes one attempt to read a range of an object: its key, start, stop and listed tag become its present tag and the
# bytes. An empty tag may be any. If the object has another tag, the server may say so instead, with status 412.
ReadRange = Callable[[str, int, int, str], Awaitable[tuple[str, bytes]]]
_first_users: dict[str, int] = {}  # the process that first used each library


class Scheme:
    """Files of this machine. The other schemes override what differs. A `location` is a Location, which has one."""

    form = "PATH"  # of what follows ://, for messages
    advice = "the permissions of the directory"  # what to check if access is denied
    if_nothing = "check the bucket, the key and the endpoint"
    is_writable = True
    is_web = False  # a web server, which cannot be listed
    attempts_if_denied = 1  # to read an object
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

    def origin(self, location: Any) -> str:
        """What distinguishes stores with equal object stamps, if that is needed (Location.origin)."""
        return ""

    def files(self, location: Any, *, asynchronous: bool) -> Any:
        """The fsspec file system, without a listings cache. Raises OptionError for options that it does not have."""
        return fsspec.filesystem("file")

    def listing(self, location: Any) -> Listing:
        """Every object below a location, by relative key. Empty, or a FileNotFoundError, if there is none."""
        return list_files(location.path)

    def find_object(self, location: Any, key: str) -> StoredObject:
        """The current state of one object below a location. Raises FileNotFoundError."""
        return find_file(location.path, key)

    def find(self, location: Any, keys: Iterable[str]) -> dict[str, StoredObject]:
        """Those objects of `keys` below a location that exist, for a kind that cannot be listed."""
        raise NotImplementedError

    def zarr_store(self, location: Any) -> Any:
        """A read-only zarr store for metadata and small arrays."""
        return zarr.storage.LocalStore(location.path, read_only=True)

    def tag(self, entry: Mapping[str, Any]) -> str:
        """What differs between any two versions of an object, from its fsspec entry."""
        return str(entry.get("ETag") or "")

    def read_range(self, location: Any) -> ReadRange | None:
        """Opens what obstore reads. None for local files, and for what TensorStore reads."""
        return None

    def errors(self) -> tuple[type[Exception], ...]:
        """The exceptions for failed operations. Raises OptionError if a library is missing."""
        return (OSError,)

    def is_denial(self, error: BaseException) -> bool:
        """Whether an error means that permissions or credentials are missing."""
        return isinstance(error, PermissionError)

    def wait_s(self, error: BaseException) -> float:
        """The seconds after which a server wants to be asked again; 0 if it does not say."""
        return 0.0

    def credentials(self, location: Any) -> str:
        """Which credentials are found for a location, by name and without secrets. Raises ZloaderError."""
        return f"not needed: files of this machine, read as user {os.geteuid()}"


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
