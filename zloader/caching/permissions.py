"""Who else could have written to a cache. Nobody may: a value that another user has put there would be believed."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path


def require_safe(directory: Path) -> None:
    """Raises PermissionError for a cache directory in which other users could rename or replace mirrors.

    It belongs to this user or to root. Who else may write to it cannot do that where the sticky bit is set, as in /tmp.
    """
    found = directory.stat()
    if found.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"it belongs to user {found.st_uid}, who could replace mirrors. Use one of your own")
    others = stat.S_IWOTH if _is_own_group(found.st_gid) else stat.S_IWOTH | stat.S_IWGRP
    if found.st_mode & others and not found.st_mode & stat.S_ISVTX:
        mode = oct(stat.S_IMODE(found.st_mode))
        raise PermissionError(f"it has mode {mode}: others could replace mirrors. Run chmod go-w on it")


def require_private(directory: Path) -> None:
    """Raises PermissionError for a mirror's directory that is not its user's alone, NotADirectoryError for a link."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{directory} is no directory")
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{directory} belongs to user {found.st_uid}, who could have put anything there")
    if stat.S_IMODE(found.st_mode) & 0o077:
        mode = oct(stat.S_IMODE(found.st_mode))
        raise PermissionError(f"{directory} has mode {mode}: others could have put anything there. Run chmod 700 on it")


def _is_own_group(number: int) -> bool:
    """Whether a group is this user's alone: it has the user's name, as many systems make them, and no other member."""
    try:
        user, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(number)
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}
