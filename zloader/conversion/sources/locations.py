"""Locate the sources of a conversion (local paths, URLs of any fsspec scheme, globs) and read their bytes.

Credentials may be in `storage_options`, or in the user and query parts of a URL. They are never shown.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import fsspec
import zarr.storage
from zarr.abc.buffer import Buffer, BufferPrototype
from zarr.abc.store import ByteRequest, Store
from zarr.storage import WrapperStore

from zloader.access.location import Location
from zloader.access.scheme import is_denial
from zloader.access.schemes import SCHEMES, advice
from zloader.access.stored_objects import list_files
from zloader.common.checks import absolute_path
from zloader.common.errors import (
    AccessDeniedError,
    OptionError,
    ReadError,
    StoreNotFoundError,
    TruncatedObjectError,
    ZloaderError,
)
from zloader.common.messages import without_secrets
from zloader.common.options import MiB

Objects = list[tuple[str, int, str]]  # relative name, size in bytes, and a tag that changes with the content

# The names that file systems use for a tag that changes with the content; the first one present is used.
_TAGS = ("ETag", "etag", "mtime", "Last-Modified", "LastModified", "last_modified", "updated", "created", "blob_id")
_SUFFIXES = (".h5ad", ".h5mu", ".zarr", ".h5", ".hdf5", ".parquet")


@dataclass(frozen=True, kw_only=True)
class SourceLocation:
    """The location of one source: a `path` on an fsspec `filesystem`. `name` is the URL without secrets.

    `bucket` is the same as a Location, if sources of this scheme are found as stores are.

    All methods raise AccessDeniedError, StoreNotFoundError or ReadError.
    """

    url: str = field(repr=False)  # may contain secrets
    name: str
    path: str
    filesystem: Any
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    bucket: Location | None = None

    @property
    def is_local(self) -> bool:
        """Whether `path` is a local path, which other libraries can open."""
        return "://" not in self.url

    @property
    def can_be_listed(self) -> bool:
        """Whether the file system can list objects; a web server cannot."""
        return not self.url.startswith(("http://", "https://"))

    @property
    def label(self) -> str:
        """The last part of the name, without the suffix of a known format: `plate1` for `plate1.h5ad`."""
        last = self.name.rstrip("/").rpartition("/")[2]
        return Path(last).stem if last.endswith(_SUFFIXES) else last

    def has(self, *names: str) -> bool:
        """Whether any of these objects exists below. A web address with a query names one object, not a directory."""
        if not self.can_be_listed and "?" in self.path:
            return False
        with _translated(self):
            return any(self.filesystem.exists(f"{self.path}/{name}") for name in names)

    def names(self) -> list[str]:
        """The sorted names of the files and directories directly below; [] if they cannot be listed."""
        if not self.can_be_listed:
            return []
        with _translated(self):
            return sorted(path.rstrip("/").rpartition("/")[2] for path in self.filesystem.ls(self.path, detail=False))

    def below(self, name: str) -> SourceLocation:
        """The location of an object below this one."""
        url, shown, path = (f"{part.rstrip('/')}/{name}" for part in (self.url, self.name, self.path))
        return replace(self, url=url, name=shown, path=path)

    def entry(self) -> Mapping[str, Any]:
        """The entry of the file system: type, size, ..."""
        with _translated(self):
            found: Mapping[str, Any] = self.filesystem.info(self.path)
            if self.is_local and found["type"] == "file":
                with Path(self.path).open("rb"):
                    pass
            return found

    def objects(self) -> Objects:
        """All files of the source; for a Zarr that cannot be listed, only the metadata files of its root."""
        with _translated(self):
            if self.is_local:  # with the time of the last change, because programs set mtimes
                files = list_files(self.path).items()
                return [(key, each.size, f"{each.tag} {each.stamp}") for key, each in files]
            if not self.can_be_listed:
                names = [self.path, *(f"{self.path}/{name}" for name in ("zarr.json", ".zmetadata"))]
                found = {name: self.filesystem.info(name) for name in names if self.filesystem.exists(name)}
            elif (entry := self.filesystem.info(self.path))["type"] == "file":
                found = {self.path: entry}
            else:
                found = self.filesystem.find(self.path, detail=True)
        return sorted(
            (key.removeprefix(self.path).lstrip("/"), int(entry["size"]), self._tag(entry))
            for key, entry in found.items()
        )

    def _tag(self, entry: Mapping[str, Any]) -> str:
        return next((str(entry[name]) for name in _TAGS if entry.get(name)), "")

    def zarr_store(self) -> Store:
        """A read-only zarr store rooted here. Its reads raise the errors of this class."""
        if self.is_local:
            return zarr.storage.LocalStore(self.path, read_only=True)
        if self.bucket is not None:
            return _RemoteStore(self.bucket.zarr_store(read_only=True), self)
        options = dict(self.storage_options)
        return _RemoteStore(zarr.storage.FsspecStore.from_url(self.url, storage_options=options, read_only=True), self)

    def file(self, cache: BlockCache) -> str | RemoteFile:
        """A path or file object for h5py."""
        if self.is_local:
            return self.path
        size = self.entry()["size"]
        if not self.can_be_listed:
            with _translated(self), self.filesystem.open(self.path, cache_type="none") as probe:
                probe.seek(1)
                probe.read(1)  # fails if the server ignores ranges and always sends the whole file
        return RemoteFile(self, size, cache)


def source_locations(source: str | os.PathLike[str], storage_options: Mapping[str, Any]) -> list[SourceLocation]:
    """The location that a path or URL names, or the sorted locations that a glob matches.

    Raises StoreNotFoundError if a glob matches nothing, and OptionError for an unknown scheme.
    """
    text = os.fspath(source)
    if text.startswith("file://"):
        text = Location(url=text).path
    location = _source_location(text, storage_options)
    wildcards = "*[" if not location.can_be_listed else "*?["  # `?` starts the query of a web address
    if not any(wildcard in text for wildcard in wildcards):
        return [location]
    if location.bucket is not None:
        return [_in_bucket(match) for match in location.bucket.matches()]
    with _translated(location):
        if location.filesystem.exists(location.path):
            return [location]
        found = sorted(location.filesystem.glob(location.path))
        if not location.is_local:
            found = [location.filesystem.unstrip_protocol(path) for path in found]
    if not found:
        raise StoreNotFoundError(f"nothing matches {location.name}: check the directory and the pattern")
    return [_source_location(match, storage_options) for match in found]


def _source_location(text: str, storage_options: Mapping[str, Any]) -> SourceLocation:
    if "://" not in text:
        path = str(absolute_path(text))
        return SourceLocation(url=text, name=text, path=path, filesystem=Location(url=text).filesystem())
    known = SCHEMES.get(text.partition("://")[0])
    if known is not None and not known.is_web and "::" not in text:
        return _in_bucket(Location(url=text, storage_options=storage_options).pinned())
    name = without_secrets(text)
    options = dict(storage_options)
    if known is SCHEMES["https"]:  # after a redirect, a signature is valid only as it is written
        options["client_kwargs"] = {"requote_redirect_url": False, **options.get("client_kwargs", {})}
    try:
        filesystem, path = fsspec.core.url_to_fs(text, **options)
    except (ImportError, ValueError, TypeError) as error:
        raise OptionError(f"cannot open {name}: {error}") from error
    filesystem.invalidate_cache()
    return SourceLocation(url=text, name=name, path=path, filesystem=filesystem, storage_options=options)


def _in_bucket(bucket: Location) -> SourceLocation:
    return SourceLocation(
        url=bucket.url,
        name=bucket.url,
        path=bucket.path,
        filesystem=bucket.filesystem(),
        storage_options=bucket.storage_options,
        bucket=bucket,
    )


@contextlib.contextmanager
def _translated(location: SourceLocation) -> Iterator[None]:
    """Translates the exceptions of file systems and their clients to ours."""
    try:
        yield
    except ZloaderError:
        raise
    except FileNotFoundError as error:
        what = f"file {location.name}" if location.is_local else f"object at {location.name}"
        answer = getattr(error.__cause__, "status", None) or type(error.__cause__).__name__
        if answer in (401, 403, 407):
            check = SCHEMES["https"].advice
            raise AccessDeniedError(f"not allowed to read {location.name} (status {answer}). Check {check}") from error
        raise StoreNotFoundError(f"there is no {what}" + f" ({answer})" * (not location.can_be_listed)) from error
    except Exception as error:  # aiohttp, botocore and others have their own exception classes
        said = str(error).partition("\n\nDebug source")[0]  # obstore says more than is of use
        if is_denial(error):
            check = "" if location.is_local else f". Check {advice(location.url)}"
            reason = error.strerror if isinstance(error, PermissionError) and error.strerror else said
            raise AccessDeniedError(f"not allowed to read {location.name}: {reason}{check}") from error
        reason = said.replace(location.url, location.name)
        raise ReadError(f"cannot read {location.name}: {type(error).__name__}: {reason}") from error


class _RemoteStore(WrapperStore[Store]):
    """A zarr store whose reads raise our errors."""

    def __init__(self, store: Store, location: SourceLocation) -> None:
        super().__init__(store)
        self._location = location

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        with _translated(replace(self._location, name=f"{self._location.name}/{key}")):
            return await self._store.get(key, prototype, byte_range)


class BlockCache:
    """An LRU cache of the blocks of any number of remote files: at most `max_blocks` of `block_bytes` each."""

    # With these defaults the transfer of a block takes about as long as its first byte, and eight keep a link busy.
    def __init__(self, *, block_bytes: int = 4 * MiB, max_blocks: int = 8) -> None:
        self.block_bytes = block_bytes
        self.max_blocks = max_blocks
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def read(self, location: SourceLocation, size: int, numbers: range) -> list[bytes]:
        """Reads blocks of a file of `size` bytes. Blocks that are not cached are fetched concurrently.

        If the preceding block is cached, the file is being read sequentially, so the following blocks are read ahead.
        """
        missing = self._missing(location, numbers)
        if missing and not self._missing(location, [numbers[0] - 1]):
            ahead = range(numbers[0], min(numbers[0] + self.max_blocks // 2, -(-size // self.block_bytes)))
            missing = self._missing(location, sorted({*numbers, *ahead}))
        starts = [number * self.block_bytes for number in missing]
        stops = [min(start + self.block_bytes, size) for start in starts]
        fetched: list[bytes] = []
        if missing:
            with _translated(location):
                paths = [location.path] * len(missing)
                # Otherwise a file on Hugging Face would read 5 MiB ahead for each block.
                fetched = location.filesystem.cat_ranges(paths, starts, stops, on_error="raise")
        for number, start, stop, block in zip(missing, starts, stops, fetched, strict=True):
            if len(block) != stop - start:
                raise TruncatedObjectError(
                    f"{location.name} returned {len(block)} bytes at {start}, not {stop - start}: was it replaced "
                    "during the read?"
                )
            self._blocks[location.url, number] = block
        for number in numbers:
            self._blocks.move_to_end((location.url, number))
        blocks = [self._blocks[location.url, number] for number in numbers]
        while len(self._blocks) > self.max_blocks:
            self._blocks.popitem(last=False)
        return blocks

    def _missing(self, location: SourceLocation, numbers: Iterable[int]) -> list[int]:
        return [number for number in numbers if (location.url, number) not in self._blocks]


class RemoteFile(io.RawIOBase):
    """A seekable remote file for h5py, read in blocks. Raises AccessDeniedError, StoreNotFoundError or ReadError."""

    def __init__(self, location: SourceLocation, size: int, cache: BlockCache) -> None:
        self._location, self._size, self._cache, self._at = location, size, cache, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer).cast("B")
        start, stop = self._at, min(self._at + len(wanted), self._size)
        width = self._cache.block_bytes
        while self._at < stop:
            first = self._at // width
            numbers = range(first, min(first + self._cache.max_blocks, -(-stop // width)))
            for number, block in zip(numbers, self._cache.read(self._location, self._size, numbers), strict=True):
                part = memoryview(block)[self._at - number * width : stop - number * width]
                wanted[self._at - start : self._at - start + len(part)] = part
                self._at += len(part)
        return self._at - start
