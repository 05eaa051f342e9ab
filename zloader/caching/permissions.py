"""Checks that no other user can write to a cache, because values that another user puts there would be trusted."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path


def require_safe(directory: Path) -> None:
    """Raises PermissionError if other users could rename or replace mirrors in a cache directory.

    The directory must belong to this user or to root. Other users may have write access only if the sticky bit is set,
    as for /tmp, which keeps them from renaming files that they do not own.
    """
    found = directory.stat()
    if found.st_uid not in (os.geteuid(), 0):
        raise PermissionError(
            f"it belongs to user {found.st_uid}, who could replace mirrors. Use a directory of your own"
        )
    others = stat.S_IWOTH if _is_own_group(found.st_gid) else stat.S_IWOTH | stat.S_IWGRP
    if found.st_mode & others and not found.st_mode & stat.S_ISVTX:
        mode = oct(stat.S_IMODE(found.st_mode))
        raise PermissionError(f"it has mode {mode}, so other users could replace mirrors. Run chmod go-w on it")


def require_private(directory: Path) -> None:
    """Raises PermissionError if other users have access to a mirror's directory, NotADirectoryError if it is a link."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{directory} is not a directory")
    if found.st_uid != os.geteuid():
        raise PermissionError(
            f"{directory} belongs to user {found.st_uid}, who could have changed it. Use another cache"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        mode = oct(stat.S_IMODE(found.st_mode))
        raise PermissionError(f"{directory} has mode {mode}, so others could have changed it. Run chmod 700 on it")


def _is_own_group(number: int) -> bool:
    """Whether a group is private to this user: it has the user's name, a common convention, and no other member."""
    try:
        user, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(number)
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}
