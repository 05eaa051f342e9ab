"""Local files: which there are below a directory, and what tells each from any other of its name, size and time.

A modification time tells little: archives, containers and package managers set it. The time of the last change (ctime)
is set by the kernel at every write, rename, chmod, touch or new hard link, and no program can set it to a time of its
choice. It counts in ticks of up to 4 ms, within which many small files may change, so that the inode number is taken
too. Device numbers are not: many file systems get another one at each boot or mount.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from zloader.access.stored_objects import TRUSTED_SINCE, StoredObject

# File systems whose inode numbers stay (magic numbers of statfs(2)). Others may number a file anew when it is looked up
# again, as FUSE and exFAT do.
_NUMBERS_STAY = {
    0x0000EF53,  # ext2, ext3, ext4
    0x58465342,  # xfs
    0x9123683E,  # btrfs
    0x2FC12FC1,  # zfs
    0xCA451A4E,  # bcachefs
    0xF2F52010,  # f2fs
    0x01021994,  # tmpfs
    0x794C7630,  # overlayfs
    0x00006969,  # nfs
    0x00C36400,  # ceph
    0x0BD00BD0,  # lustre
    0x47504653,  # gpfs
}


def numbers_stay(path: str) -> bool:
    """Whether the file system of a path is known to give a file the same inode number for as long as it lives."""
    statfs = getattr(ctypes.CDLL(None), "statfs", None)
    found = ctypes.create_string_buffer(256)  # struct statfs takes 120 bytes and begins with the magic number
    if not sys.platform.startswith("linux") or statfs is None or statfs(os.fsencode(path), found):
        return False
    return int.from_bytes(found.raw[:4], sys.byteorder) in _NUMBERS_STAY


def stored_file(found: os.stat_result, *, numbered: bool) -> StoredObject:
    """A file as it is; `numbered` says whether its inode number counts."""
    stamp = f"{found.st_ctime_ns} {found.st_ino}" if numbered else f"{found.st_ctime_ns}"
    trusted = found.st_ctime >= TRUSTED_SINCE  # images of file systems have whatever times they were made with
    return StoredObject(size=found.st_size, tag=repr(found.st_mtime), stamp=stamp if trusted else "")


def listing(root: str) -> dict[str, StoredObject]:
    """Every file below a directory by its path relative to it; of a file that one alone, as "". Follows links.

    Raises OSError where there is nothing, or something cannot be looked at.
    """
    numbered = numbers_stay(root)
    found = Path(root).stat()
    if not stat.S_ISDIR(found.st_mode):
        return {"": stored_file(found, numbered=numbered)}
    files = _files(root, "", [(found.st_dev, found.st_ino)])
    return {key: stored_file(found, numbered=numbered) for key, found in sorted(files)}


def find(root: str, key: str) -> StoredObject:
    """One of these files as it is now. Raises OSError where there is none."""
    return stored_file(Path(root, key).stat(), numbered=numbers_stay(root))


def _files(directory: str, prefix: str, above: list[tuple[int, int]]) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # it was deleted in between
                found = _status(entry)
                here = (found.st_dev, found.st_ino)
                if not entry.is_dir():
                    yield prefix + entry.name, found
                elif here not in above:  # else a link to a directory that it is in
                    yield from _files(entry.path, f"{prefix}{entry.name}/", [*above, here])


def _status(entry: os.DirEntry[str]) -> os.stat_result:
    """Of a link, what it leads to; where that is nothing, the link, so that a read of it fails."""
    try:
        return entry.stat()
    except OSError:
        return entry.stat(follow_symlinks=False)
