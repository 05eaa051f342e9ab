"""Where a store lives: its URL and options, its listing, and the zarr store for its metadata.

All of it goes through fsspec and zarr. The bytes of chunks go through store.py, which is told of credentials and
endpoints what is told here.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

import fsspec
import zarr.abc.store
import zarr.storage
from botocore.exceptions import BotoCoreError, NoCredentialsError, PartialCredentialsError

from zloader.access import local_listing, web
from zloader.access.credentials import s3_access
from zloader.access.google import google_errors, google_files, is_refusal
from zloader.access.stored_objects import StoredObject
from zloader.common.errors import AccessDeniedError, OptionError, StoreError, StoreNotFoundError, ZloaderError

SCHEMES = ("file", "s3", "gs", "http", "https")
_WRITABLE = ("file", "s3")
_WEB = ("http", "https")
_HDF5_SUFFIXES = (".h5ad", ".h5", ".hdf5")
_REFUSALS = (PermissionError, NoCredentialsError, PartialCredentialsError)
_NOT_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
_FILESYSTEMS: dict[int, Any] = {}
_ADVICE = {
    "s3": "the key and secret in storage_options or the AWS_* variables",
    "gs": 'GOOGLE_APPLICATION_CREDENTIALS, or give {"token": "anon"} for a public bucket',
}


@dataclass(frozen=True, kw_only=True)
class Location:
    """A URL together with the options that open it.

    `url` is a local path, `file://`, `s3://bucket/prefix`, or for reading alone `gs://bucket/prefix` or `http(s)://`.
    `storage_options` are s3fs's or gcsfs's, or `headers` for http(s). They are never shown, but pickled: a worker
    process needs them, and whoever keeps the pickle keeps the secrets.
    """

    url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.url, str) or not self.url or "\0" in self.url:
            raise OptionError(f"a store is given by its path or URL, not by {self.url!r:.100}")
        if not isinstance(self.storage_options, Mapping):
            raise OptionError(
                f'storage_options are a dict such as {{"key": ...}}, not of type {type(self.storage_options).__name__}'
            )
        scheme, authority = self.scheme, self.url.partition("://")[2].partition("/")[0]
        shown = re.split("[?#]", self.url.replace(authority, authority.rpartition("@")[2]))[0]  # without secrets
        if scheme not in SCHEMES:
            known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
            raise OptionError(f"cannot open {shown!r}: give a local path or a URL that starts with {known}")
        if scheme != "file" and not authority:
            raise OptionError(f"cannot open {shown!r}: a URL reads {scheme}://{_shape(scheme)}")
        if scheme != "file" and "@" in authority:
            raise OptionError(f"cannot open {shown!r}: a URL cannot hold user and password. Use storage_options")
        self._require_address(shown)
        steps = self.path.split("/") if scheme != "file" else []
        if not {".", ".."}.isdisjoint(steps) or (not self.is_web and "" in steps):
            raise OptionError(f"cannot open {shown!r}: an object's key cannot have a part that is '.', '..' or empty")
        if scheme in _WEB and ("?" in self.url or "#" in self.url):
            raise OptionError(
                f"cannot open {shown!r}: the address of a store cannot have a query or fragment. Give what it says as "
                "headers in storage_options; write ? and # that belong to the path as %3F and %23"
            )

    def _require_address(self, shown: str) -> None:
        try:
            port = urlsplit(self.url).port if self.is_web or self.url.startswith("file://") else None
        except ValueError as error:
            raise OptionError(f"cannot open {shown!r}: {error}") from error
        if port == 0:
            raise OptionError(f"cannot open {shown!r}: there is no port 0")

    @property
    def scheme(self) -> str:
        """`"file"`, `"s3"`, `"gs"`, `"http"` or `"https"`."""
        return self.url.partition("://")[0].lower() if "://" in self.url else "file"

    @property
    def path(self) -> str:
        """The absolute local path, `bucket/prefix`, or the whole address in plain text; never ends in a slash."""
        if self.scheme == "file":
            bare = unquote(urlsplit(self.url).path) if "://" in self.url else self.url
            return str(Path(bare).expanduser().absolute())
        rest = self.url.partition("://")[2].strip("/")
        return f"{self.scheme}://{unquote(rest)}" if self.is_web else rest

    @property
    def address(self) -> str:
        """The same for every way to write a place: an absolute path, or a URL in plain text that ends in no slash."""
        return self.path if self.scheme == "file" or self.is_web else f"{self.scheme}://{self.path}"

    @property
    def origin(self) -> str:
        """Where a store is, links followed, if its objects' stamps do not tell it from stores elsewhere; else empty.

        Tags in S3 and GCS do: they are made of the content, or of the moment of writing.
        """
        if self.scheme == "file":
            return os.path.realpath(self.path)
        return self.path if self.is_web else ""

    @property
    def is_web(self) -> bool:
        """Whether it is on a web server, which cannot be listed."""
        return self.scheme in _WEB

    @property
    def is_named_hdf5(self) -> bool:
        """Whether it is named as HDF5 files are."""
        return self.path.endswith(_HDF5_SUFFIXES)

    @property
    def is_writable(self) -> bool:
        """Whether stores can be written there, and not only read."""
        return self.scheme in _WRITABLE

    def require_writable(self) -> None:
        """Raises OptionError where stores can only be read."""
        if not self.is_writable:
            raise OptionError(
                f"cannot write to {self.url}: stores are written to a local path or s3:// alone. Write there, and copy "
                "the store with a tool of the cloud"
            )

    def filesystem(self, *, asynchronous: bool = False) -> Any:
        """The fsspec file system that holds `path`, with nothing cached of its listings."""
        with self._translated("open"):
            if self.is_web:
                return _never_closed(web.web_files(self.storage_options, asynchronous=asynchronous))
            if self.scheme == "gs":
                return _never_closed(google_files(self.storage_options, asynchronous=asynchronous))
            if self.scheme == "file":
                return fsspec.filesystem("file")
            options = {"use_listings_cache": False, **s3_access(self.storage_options).options}
            return _never_closed(fsspec.filesystem("s3", asynchronous=asynchronous, **options))

    def zarr_store(self, *, read_only: bool) -> zarr.abc.store.Store:
        """A zarr store rooted at this URL, for metadata and small arrays."""
        if not read_only:
            self.require_writable()
        if self.scheme == "file":
            return zarr.storage.LocalStore(self.path, read_only=read_only)
        return zarr.storage.FsspecStore(self.filesystem(asynchronous=True), read_only=read_only, path=self.path)

    def listing(self) -> dict[str, StoredObject]:
        """Every object below the URL by key relative to it, from one listing; "" is the key of an object at the URL.

        On a web server they are those that the consolidated metadata imply and that are there, one request each.
        Raises StoreNotFoundError where there is none, AccessDeniedError where the credentials do not allow to look.
        """
        if self.is_web:
            filesystem = self.filesystem()
            try:
                return web.listing(filesystem, self.path, self.zarr_store(read_only=True))
            except StoreNotFoundError:
                there = self._hdf5_file(filesystem)
                if not there:
                    raise
                return there
        with self._translated("list"):
            try:
                found = self._found()
            except (FileNotFoundError, NotADirectoryError):
                found = {}
        if not found:
            raise StoreNotFoundError(f"nothing is stored at {self.url}: check the bucket, the key and the endpoint")
        return found

    def _found(self) -> dict[str, StoredObject]:
        if self.scheme == "file":
            return local_listing.listing(self.path)
        found = self.filesystem().find(self.path, detail=True)
        # An empty object whose key ends in a slash stands for a folder in consoles of S3.
        return {key[len(self.path) + 1 :]: _stored_object(entry) for key, entry in found.items() if key[-1] != "/"}

    def names(self) -> set[str]:
        """The first part of every key of `listing`, without going through all that lies there; none for nothing.

        Of a location that is an object itself, the whole path.
        """
        filesystem = self.filesystem()
        with self._translated("list"):
            try:
                found = filesystem.ls(self.path, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                found = []
        return {path.removeprefix(f"{self.path.rstrip('/')}/").rstrip("/") for path in found} - {""}

    def enclosing(self, names: Sequence[str]) -> str | None:
        """The path of an object with one of these names in a directory that this location lies in; None without one.

        Those that the credentials do not allow to look at count as absent.
        """
        filesystem, own = self.filesystem(), PurePosixPath(self.path)
        # Of a symbolic link, the directories that it leads to as well.
        led_to = Path(self.path).resolve().parents if self.scheme == "file" else ()
        above = {PurePosixPath(parent) for parent in (*own.parents, *led_to)} - {PurePosixPath()}
        paths = [str(parent / name) for parent in sorted(above) for name in names]
        with self._translated("look above"):
            found = filesystem.cat_ranges(paths, [0] * len(paths), [1] * len(paths), on_error="return")
            for path, first_byte in zip(paths, found, strict=True):
                if isinstance(first_byte, bytes):
                    return path
                if not isinstance(first_byte, _NOT_THERE):
                    raise first_byte
        return None

    def _hdf5_file(self, filesystem: web.WebFiles) -> dict[str, StoredObject]:
        """The one object that is at an address named as HDF5 files are, if there is one."""
        above, _, name = self.path.rpartition("/")
        there = web.find(filesystem, above, [name]) if self.is_named_hdf5 else {}
        return {"": there[name]} if there else {}

    def find_object(self, key: str) -> StoredObject | None:
        """One object as it is now; None where it is not. Raises StoreError."""
        if self.is_web:
            return web.find(self.filesystem(), self.path, [key]).get(key)
        with self._translated(f"look at {key} of"):
            try:
                if self.scheme == "file":
                    return local_listing.find(self.path, key)
                return _stored_object(self.filesystem().info(f"{self.path}/{key}"))
            except (FileNotFoundError, NotADirectoryError):
                return None

    @contextlib.contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        """Turns the errors of file systems and their clients into ours."""
        foreign = google_errors() if self.scheme == "gs" else ()
        try:
            yield
        except ZloaderError:
            raise
        except (OSError, BotoCoreError, *foreign) as error:
            if isinstance(error, _REFUSALS) or (self.scheme == "gs" and is_refusal(error)):
                advice = _ADVICE.get(self.scheme, "the rights of the directory")
                raise AccessDeniedError(f"not allowed to {doing} {self.url}: {error}. Check {advice}") from error
            raise StoreError(
                f"cannot {doing} {self.url}: {error}. Is the endpoint right, and does its server run?"
            ) from error
        except (TypeError, ValueError) as error:
            raise OptionError(f"cannot {doing} {self.url} with these storage_options: {error}") from error


def location_of(url: Any, storage_options: Mapping[str, Any] | None) -> Location:
    """The location that whoever calls us gives: a string or a path, and options or none. Raises OptionError."""
    text = os.fspath(url) if isinstance(url, os.PathLike) else url
    return Location(url=text, storage_options={} if storage_options is None else storage_options)


def _never_closed(filesystem: Any) -> Any:
    """The same file system, kept alive for as long as the process.

    In a forked process fsspec drops its file systems. One that nobody else holds then closes its connections, and as
    both processes share one epoll, the parent waits for answers on them that it never sees.
    """
    _FILESYSTEMS[id(filesystem)] = filesystem
    return filesystem


def _shape(scheme: str) -> str:
    return "HOST/PATH" if scheme in _WEB else "BUCKET/KEY"


def _stored_object(entry: Mapping[str, Any]) -> StoredObject:
    """An object in S3 or GCS."""
    tag = str(entry.get("ETag") or entry.get("generation") or "")
    return StoredObject(size=int(entry["size"]), tag=tag, stamp=tag)
