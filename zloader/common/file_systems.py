"""What statfs(2) tells about a file system: whether it is shared with other machines, and has stable inode numbers.

Also file descriptors that are closed with their owner. A `__del__` may run while the interpreter ends, when modules
have already lost their names, `os` among them. IPython, for one, keeps objects until then. A finalizer does nothing at
that time: the kernel closes what is still open.
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from pathlib import Path
from typing import Any

_SHARED = {
    0x00006969: "NFS",
    0x00C36400: "Ceph",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0x01161970: "GFS2",
    0x7461636F: "OCFS2",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB",
    0x01021997: "9P",
    0x65735546: "FUSE",
}
_STABLE_INODES = {
    0x00006969,  # NFS
    0x00C36400,  # Ceph
    0x0BD00BD0,  # Lustre
    0x47504653,  # GPFS
    0x0000EF53,  # ext2, ext3, ext4
    0x58465342,  # xfs
    0x9123683E,  # btrfs
    0x2FC12FC1,  # zfs
    0xCA451A4E,  # bcachefs
    0xF2F52010,  # f2fs
    0x01021994,  # tmpfs
    0x794C7630,  # overlayfs
}


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
    """The name of a path's file system if other machines may have it mounted as well; None for a local one.

    One that is not known counts as local, and so does every one on macOS, which does not tell.
    """
    magic = _magic(path)
    return None if magic is None else _SHARED.get(magic)


def close_with(owner: Any, number: int) -> weakref.finalize[[int], Any]:
    """Closes a file descriptor when its owner is gone, or when the result is called. Does it once."""
    closing = weakref.finalize(owner, os.close, number)
    closing.atexit = False  # threads may use it until the end
    return closing
