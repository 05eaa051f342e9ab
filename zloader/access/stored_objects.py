"""The listing of a store: an entry for each object, kept compactly, and the two hashes of all entries.

`fingerprint` tells whether a store is the one that a saved state refers to. It is the same on every machine, and does
not change when a local store is moved or copied with its times. `mirror_fingerprint` is the key for cached values. It
must differ between any two stores whose bytes differ.

Local files have a stamp that changes whenever a file does, even if its name, size and mtime stay the same. The
modification time (mtime) is not enough, because archives, containers and package managers set it. The time of the last
change (ctime) is set by the kernel at every write, rename, chmod, touch or new hard link, and no program can set it to
a value of its choice. It advances in ticks of up to 4 ms, and many small files can change within one tick, so the stamp
includes the inode number too. It leaves out the device number, which on many file systems changes at each boot or
mount.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from zloader.common.file_systems import has_stable_inodes

log = logging.getLogger("zloader")

TRUSTED_SINCE = 1451606400  # 2016-01-01: Zarr is younger, so an earlier time is artificial, set to make copies equal


class StoredObject(NamedTuple):
    """One listed object: its `size` in bytes, its `tag` and its `stamp`.

    The tag is the ETag, the GCS generation or the modification time. The stamp differs whenever the object has changed.
    In S3 and GCS, and on a web server whose file times can be trusted, the stamp is the tag. For a local file it
    consists of the time of the last change and the inode number. It is empty if changes cannot be detected.
    """

    size: int
    tag: str
    stamp: str


class Listing(dict[str, StoredObject]):
    """The objects of a store by key, in the order of their keys."""

    def __init__(self, objects: Iterable[tuple[str, StoredObject]]) -> None:
        """`objects` are pairs of a key and its object, in any order and each key once."""
        super().__init__(sorted(objects))

    @property
    def sizes(self) -> Sizes:
        """The size in bytes of each object, by key. It takes no memory of its own."""
        return Sizes(self)


class Sizes(Mapping[str, int]):
    """The size in bytes of each object of a listing, by key."""

    def __init__(self, listing: Listing) -> None:
        self._listing = listing

    def __len__(self) -> int:
        return len(self._listing)

    def __iter__(self) -> Iterator[str]:
        return iter(self._listing)

    def __contains__(self, key: object) -> bool:
        return key in self._listing

    def __getitem__(self, key: str) -> int:
        return self._listing[key].size


def fingerprint(listing: Listing) -> str:
    """A hash of the keys, sizes and tags of objects: 32 hexadecimal digits."""
    return _digest((key, entry.size, entry.tag) for key, entry in listing.items())


def mirror_fingerprint(url: str, origin: str, listing: Listing) -> str | None:
    """A hash that distinguishes a store from all others, made of `origin` (Location.origin) and the objects' stamps.

    None, with a warning, if a change of some object could not be detected.
    """
    unstamped = next((key for key, entry in listing.items() if not entry.stamp), None)
    if unstamped is not None:
        log.warning(
            "cannot keep a mirror of %s: a change of %s could not be detected, because it has neither an ETag nor a "
            "plausible time of its last change (2016 or later). Every epoch will read from the store",
            url,
            repr(unstamped) if unstamped else "the file",
        )
        return None
    return _digest(itertools.chain([origin], ((key, *entry) for key, entry in listing.items())))


def joint_fingerprint(fingerprints: Iterable[str]) -> str:
    """The fingerprint of several stores in order; for a single store, its own fingerprint."""
    prints = list(fingerprints)
    return prints[0] if len(prints) == 1 else _digest(prints)


def _digest(listed: Iterable[object]) -> str:
    """A hash of the repr of a list, of which only one entry is made at a time."""
    hashed, separator = hashlib.sha256(b"["), ""
    for each in listed:
        hashed.update(f"{separator}{each!r}".encode())
        separator = ", "
    hashed.update(b"]")
    return hashed.hexdigest()[:32]


def stored_file(status: os.stat_result, *, stable_inode: bool) -> StoredObject:
    """The StoredObject of a file; `stable_inode` says whether the inode number is part of its stamp."""
    stamp = f"{status.st_ctime_ns} {status.st_ino}" if stable_inode else f"{status.st_ctime_ns}"
    trusted = status.st_ctime >= TRUSTED_SINCE  # a file system image may set any times
    return StoredObject(size=status.st_size, tag=repr(status.st_mtime), stamp=stamp if trusted else "")


def list_files(root: str) -> Listing:
    """Every file below a directory, by relative path. If `root` is a file, that file under the key "". Follows links.

    Raises OSError if `root` does not exist or a directory below it cannot be read.
    """
    stable_inode = has_stable_inodes(root)
    status = Path(root).stat()
    if not stat.S_ISDIR(status.st_mode):
        return Listing([("", stored_file(status, stable_inode=stable_inode))])
    files = _files(root, "", [(status.st_dev, status.st_ino)])
    return Listing((key, stored_file(status, stable_inode=stable_inode)) for key, status in files)


def _files(directory: str, prefix: str, ancestors: list[tuple[int, int]]) -> Iterator[tuple[str, os.stat_result]]:
    """Every file below a directory. `ancestors` are the device and inode of the directories that lead to it."""
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                status = _status(entry)
            except FileNotFoundError:  # deleted since the scan
                continue
            if not stat.S_ISDIR(status.st_mode):
                yield prefix + entry.name, status
                continue
            identity = (status.st_dev, status.st_ino)
            if identity not in ancestors:  # otherwise a link to a directory that contains it
                try:
                    yield from _files(entry.path, f"{prefix}{entry.name}/", [*ancestors, identity])
                except FileNotFoundError:  # deleted since the scan
                    continue


def _status(entry: os.DirEntry[str]) -> os.stat_result:
    """The status of a file or of a link's target. A broken link gives its own status, so that reading it fails."""
    try:
        return entry.stat()
    except OSError:
        return entry.stat(follow_symlinks=False)
