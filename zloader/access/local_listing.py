"""Lists local files, with a stamp that changes whenever a file does, even if its name, size and mtime stay the same.

The modification time (mtime) is not enough, because archives, containers and package managers set it. The time of the
last change (ctime) is set by the kernel at every write, rename, chmod, touch or new hard link, and no program can set
it to a value of its choice. It advances in ticks of up to 4 ms, and many small files can change within one tick, so the
stamp includes the inode number too. It leaves out the device number, which on many file systems changes at each boot or
mount.
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from zloader.access.stored_objects import TRUSTED_SINCE, Listing, StoredObject

# File systems with stable inode numbers, by the magic number in statfs(2). Others, such as FUSE and exFAT, may give a
# file a new number each time it is looked up.
_STABLE_INODES = {
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


def has_stable_inodes(path: str) -> bool:
    """Whether the file system of a path is known to keep a file's inode number for the life of the file."""
    statfs = getattr(ctypes.CDLL(None), "statfs", None)
    found = ctypes.create_string_buffer(256)  # struct statfs has 120 bytes, the magic number first
    if not sys.platform.startswith("linux") or statfs is None or statfs(os.fsencode(path), found):
        return False
    return int.from_bytes(found.raw[:4], sys.byteorder) in _STABLE_INODES


def stored_file(status: os.stat_result, *, stable_inode: bool) -> StoredObject:
    """The StoredObject of a file; `stable_inode` says whether the inode number is part of its stamp."""
    stamp = f"{status.st_ctime_ns} {status.st_ino}" if stable_inode else f"{status.st_ctime_ns}"
    trusted = status.st_ctime >= TRUSTED_SINCE  # a file system image may set any times
    return StoredObject(size=status.st_size, tag=repr(status.st_mtime), stamp=stamp if trusted else "")


def listing(root: str) -> Listing:
    """Every file below a directory, by relative path. If `root` is a file, that file under the key "". Follows links.

    Raises OSError if `root` does not exist or a directory below it cannot be read.
    """
    stable_inode = has_stable_inodes(root)
    status = Path(root).stat()
    if not stat.S_ISDIR(status.st_mode):
        return Listing([("", stored_file(status, stable_inode=stable_inode))])
    files = _files(root, "", [(status.st_dev, status.st_ino)])
    return Listing((key, stored_file(status, stable_inode=stable_inode)) for key, status in files)


def find(root: str, key: str) -> StoredObject:
    """The current state of one file. Raises OSError if it does not exist."""
    return stored_file(Path(root, key).stat(), stable_inode=has_stable_inodes(root))


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
