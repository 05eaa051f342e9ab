"""What statfs(2) tells about a file system: whether other machines may use it, and whether inode numbers are stable."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_LOCAL = {
    0x0000EF53,  # ext2, ext3, ext4
    0x58465342,  # xfs
    0x9123683E,  # btrfs
    0x2FC12FC1,  # zfs
    0xCA451A4E,  # bcachefs
    0xF2F52010,  # f2fs
    0x01021994,  # tmpfs
    0x794C7630,  # overlayfs
}
_LOCAL_WITHOUT_INODES = {  # or not known to keep their numbers
    0x858458F6,  # ramfs
    0x3153464A,  # jfs
    0x52654973,  # reiserfs
    0x61756673,  # aufs
    0x2011BAB0,  # exfat
    0x00004D44,  # fat
    0x7366746E,  # ntfs3
    0x0000482B,  # hfs+
}
_SHARED = {
    0x00006969: "nfs",
    0x00C36400: "ceph",
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0x19830326: "beegfs",
    0x01161970: "gfs2",
    0x7461636F: "ocfs2",
    0xFF534D42: "cifs",
    0xFE534D42: "smb",
    0x01021997: "9p",
    0x65735546: "fuse",
}
_STABLE_INODES = _LOCAL | {magic for magic, name in _SHARED.items() if name in ("nfs", "ceph", "lustre", "gpfs")}


def _magic(path: str | Path) -> int | None:
    """The magic number of a path's file system; None where the system does not tell, as on macOS."""
    statfs = getattr(ctypes.CDLL(None), "statfs", None)
    found = ctypes.create_string_buffer(256)  # struct statfs has 120 bytes, the magic number first
    if not sys.platform.startswith("linux") or statfs is None or statfs(os.fsencode(path), found):
        return None
    return int.from_bytes(found.raw[:4], sys.byteorder)


def has_stable_inodes(path: str | Path) -> bool:
    """Whether the file system of a path is known to keep a file's inode number for the life of the file.

    Others, such as FUSE and exFAT, may give a file a new number each time it is looked up.
    """
    return _magic(path) in _STABLE_INODES


def shared_file_system(path: str | Path) -> str | None:
    """The name of a path's file system if other machines may have it mounted as well; None for a local disk.

    An unknown file system counts as shared, and has its number as name. Where the system does not tell, as on macOS, it
    counts as local.
    """
    magic = _magic(path)
    if magic is None or magic in _LOCAL or magic in _LOCAL_WITHOUT_INODES:
        return None
    return _SHARED.get(magic, f"number {magic:#x}")
