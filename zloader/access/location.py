"""Where a store is: its URL and options, its listing, and its objects.

What differs between schemes is in the classes of SCHEMES. TensorStore and s3fs serve s3://. obstore serves all the
others, and local files need no library. Clients take half a second to import, so functions import them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from zloader.access.buckets import Azure, Google, Web
from zloader.access.hub import Hub
from zloader.access.s3 import S3
from zloader.access.scheme import LocalFiles, Scheme, access_errors, is_denial
from zloader.access.stored_objects import Listing, StoredObject
from zloader.common.checks import absolute_path
from zloader.common.errors import AccessDeniedError, OptionError, ReadError, StoreNotFoundError, ZloaderError
from zloader.common.messages import cause, reason_of, suggestion, without_secrets

SCHEMES: dict[str, type[Scheme]] = {
    "file": LocalFiles,
    "s3": S3,
    "gs": Google,
    "az": Azure,
    "abfs": Azure,
    "abfss": Azure,
    "hf": Hub,
    "http": Web,
    "https": Web,
}
_HDF5_SUFFIXES = (".h5ad", ".h5mu", ".h5", ".hdf5")
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
_WITH_QUERY = re.compile(r"https?://[^?#]*\?[^#]*", re.IGNORECASE | re.DOTALL)
_SLASH_MISSING = re.compile(rf"({'|'.join(SCHEMES)}):(?!//)(.*)", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Location:
    """A URL and the options that open it.

    `url` is a local path or begins with one of SCHEMES. `storage_options` are those of the scheme's fsspec file system,
    or `headers` and `query` for http(s). They never appear in the repr, but they are pickled, since worker processes
    need them: a stored pickle contains the secrets. `revision` is the commit of a repository, of which the URL may name
    a branch.
    """

    url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    revision: str = ""
    folder: str = field(default="", repr=False)  # to which a relative path belongs: that of the process when it is made

    def __post_init__(self) -> None:
        if not isinstance(self.url, str) or not self.url or "\0" in self.url:
            raise OptionError(f"a store's path or URL must be a non-empty string without NUL, not {self.url!r:.100}")
        if not isinstance(self.storage_options, Mapping):
            raise OptionError(
                f'storage_options must be a dict such as {{"key": ...}}, not {type(self.storage_options).__name__}'
            )
        shown = without_secrets(self.url)
        if missing := _SLASH_MISSING.match(self.url):
            rest = missing[2] if missing[1].lower() == "file" else missing[2].lstrip("/")
            meant = without_secrets(f"{missing[1]}://{rest}")
            raise OptionError(f"a slash is missing in a URL: write {meant!r}")
        if self.scheme not in SCHEMES:
            known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
            raise OptionError(f"cannot open {shown!r}: pass a local path or a URL that starts with {known}")
        if self.scheme == "file":
            object.__setattr__(self, "folder", self.folder or str(absolute_path(".")))
        self.kind.require_url(shown)

    @property
    def scheme(self) -> str:
        """`"file"`, or what precedes `://`."""
        return self.url.partition("://")[0].lower() if "://" in self.url else "file"

    @property
    def kind(self) -> Scheme:
        """The objects of the location, as a new object. It opens a client once, so keep it for several reads."""
        return SCHEMES[self.scheme](self)

    @property
    def path(self) -> str:
        """The absolute local path, what file systems call the object, or the whole web address, unquoted.

        It has no trailing slash.
        """
        return self.kind.path

    @property
    def address(self) -> str:
        """The normalized location: an absolute path, or an unquoted URL without a trailing slash."""
        return self.path if self.scheme == "file" or self.is_web else f"{self.scheme}://{self.kind.rest}"

    @property
    def origin(self) -> str:
        """The resolved location, if it is needed to distinguish stores with equal object stamps; otherwise empty.

        It is empty for object storage, where tags derive from the content or the time of writing and suffice.
        """
        return self.kind.origin()

    @property
    def is_web(self) -> bool:
        """Whether the store is on a web server, which cannot be listed."""
        return self.kind.is_web

    @property
    def is_named_hdf5(self) -> bool:
        """Whether the path ends like the name of an HDF5 file."""
        return self.path.endswith(_HDF5_SUFFIXES)

    def require_writable(self) -> None:
        """Raises OptionError if the location is read-only."""
        if not self.kind.is_writable:
            raise OptionError(
                f"cannot write to {self.url}: stores can only be written to a local path or s3://. Write the store "
                "there, then copy it with the cloud provider's tools"
            )

    def filesystem(self) -> Any:
        """The fsspec file system that contains `path`, without a listings cache. That of obstore only lists."""
        with self.translated("open"):
            return self.kind.files

    def pinned(self) -> Location:
        """The location as it is now, if its URL names what may later be another store, such as a branch."""
        return replace(self, revision=self.kind.revision())

    def listing(self) -> Listing:
        """Every object below the URL, by relative key, from one listing. An object at the URL itself has the key "".

        On a web server, the objects that the consolidated metadata implies and that exist, at one request per object.
        Raises StoreNotFoundError if there are none, and AccessDeniedError if the credentials do not permit listing.
        """
        with self.translated("list"):
            try:
                if listed := self.kind.listing():
                    return listed
            except ZloaderError:  # a StoreNotFoundError is a FileNotFoundError
                raise
            except (FileNotFoundError, NotADirectoryError):
                pass
        raise StoreNotFoundError(self._why_nothing())

    def matches(self, *, offline: bool = False) -> list[Location]:
        """The locations that a glob matches, sorted by URL. Anything else, or what exists under that name, is itself.

        Raises StoreNotFoundError if there are none, and OptionError if nothing can be listed.
        """
        self = self if offline else self.pinned()
        if not re.search("[*[]" if self.is_web else "[*?[]", self.path):
            return [self]
        if self.is_web or (offline and self.scheme != "file"):
            why = "a web server cannot be listed" if self.is_web else "a bucket cannot be listed offline"
            raise OptionError(f"{self.url} is a glob, but {why}: pass a list of URLs")
        filesystem = self.filesystem()
        with self.translated("list"):
            if filesystem.exists(self.path):
                return [self]
            found = sorted(filesystem.glob(self.path))
        if not found:
            raise StoreNotFoundError(f"nothing matches {self.url}: check the directory and the pattern")
        if self.scheme == "file":
            return [replace(self, url=path) for path in found]
        root = "/".join(self.url.split("/", 3)[:3])  # the first part of the path, maybe with an account
        return [replace(self, url=f"{root}/{path.partition('/')[2]}") for path in found]

    def _why_nothing(self) -> str:
        """Why nothing is found at the location, and what to do."""
        path = Path(self.path)
        if self.scheme != "file":
            return f"nothing is stored at {self.url}: {self.kind.if_nothing}"
        if path.exists():
            return f"nothing is stored at {self.url}: the directory is empty"
        beside: list[str] = []
        with contextlib.suppress(OSError):
            beside = [entry.name for entry in path.parent.iterdir()]
        return f"no such directory: {path}{suggestion(path.name, beside) or '. Check the path'}"

    def names(self) -> set[str]:
        """The first part of every key of `listing`, from one non-recursive listing; empty if nothing exists here.

        For a location that is itself an object, the set contains the object's whole path.
        """
        filesystem = self.filesystem()
        with self.translated("list"):
            try:
                found = filesystem.ls(self.path, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                found = []
        return {path.removeprefix(f"{self.path.rstrip('/')}/").rstrip("/") for path in found} - {""}

    def enclosing(self, names: Sequence[str]) -> str | None:
        """The path of an object with one of these names in a directory above this location, or None.

        Directories that the credentials do not permit to read count as empty.
        """
        filesystem, own = self.filesystem(), PurePosixPath(self.path)
        # For a symbolic link, also the directories above its target.
        resolved = Path(self.path).resolve().parents if self.scheme == "file" else ()
        parents = {PurePosixPath(parent) for parent in (*own.parents, *resolved)} - {PurePosixPath()}
        paths = [str(parent / name) for parent in sorted(parents) for name in names]
        with self.translated("read the directories above"):
            found = filesystem.cat_ranges(paths, [0] * len(paths), [1] * len(paths), on_error="return")
            for path, first_byte in zip(paths, found, strict=True):
                if isinstance(first_byte, bytes):
                    return path
                if not isinstance(first_byte, _ABSENT):
                    raise first_byte
        return None

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes of an object, or of a range of it. Raises StoreNotFoundError and other StoreErrors."""
        doing = f"read {key} of" if key else "read"
        with self.translated(doing):
            try:
                return self.kind.read(key, start, stop)
            except FileNotFoundError as error:
                raise StoreNotFoundError(f"cannot {doing} {self.url}: it does not exist") from cause(error)

    def find_object(self, key: str) -> StoredObject | None:
        """The current state of one object; None if it does not exist. Raises StoreError."""
        with self.translated(f"look up {key} of"):
            try:
                return self.kind.find(key)
            except (FileNotFoundError, NotADirectoryError):
                return None

    @contextlib.contextmanager
    def translated(self, doing: str) -> Iterator[None]:
        """Translates errors of file systems and their clients into zloader's."""
        try:
            yield
        except ZloaderError:
            raise
        except Exception as error:
            if isinstance(error, access_errors()):
                reason = reason_of(error).rstrip(".")
                if is_denial(error):
                    raise AccessDeniedError(
                        f"not allowed to {doing} {self.url}: {reason}. Check {self.kind.advice}"
                    ) from cause(error)
                raise ReadError(
                    f"cannot {doing} {self.url}: {reason}. Is the endpoint correct, and is its server running?"
                ) from cause(error)
            if isinstance(error, TypeError | ValueError | AttributeError | KeyError):
                raise OptionError(
                    f"cannot {doing} {self.url} with these storage_options: {reason_of(error)}"
                ) from cause(error)
            raise


def location_of(url: Any, storage_options: Mapping[str, Any] | None) -> Location:
    """The Location for a URL or path (str or os.PathLike) and its storage options, if any. Raises OptionError.

    The query of a web address becomes an option, because it may sign the address and must not be shown.
    """
    text = os.fspath(url) if isinstance(url, os.PathLike) else url
    options = {} if storage_options is None else storage_options
    if isinstance(text, str) and _WITH_QUERY.fullmatch(text) and isinstance(options, Mapping):
        text, _, query = text.partition("?")
        options = {**options, "query": query}
    return Location(url=text, storage_options=options)
