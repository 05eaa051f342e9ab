"""The place of a cache: the directory DIR that the user names, or `DIR/zloader` if DIR holds other things.

DIR/zloader-cache           marks DIR as a cache; locked while disk space is allocated
DIR/CACHEDIR.TAG            excludes DIR from backups; only written if zloader created DIR

No other user may be able to write to it, because values that another user puts there would be trusted. It is not on a
file system that several machines share, because each sees late, or not at all, what the others write there.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from pathlib import Path

from zloader.common.errors import CacheError, OptionError
from zloader.common.file_systems import shared_file_system

MARK = "zloader-cache"
_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# This directory holds mirrors made by zloader.\n"


def place_of(directory: Path) -> Path:
    """The directory itself if it is missing, empty or already a cache; otherwise its subdirectory `zloader`.

    Creates nothing. Raises OptionError for a file.
    """
    with contextlib.suppress(OSError):
        if not stat.S_ISDIR(directory.stat().st_mode):
            raise OptionError(f"the cache {directory} is a file: give the path of a directory")
    # The mark is the first thing that zloader creates in a cache. If this listing finds anything else of a cache, the
    # look for the mark, which comes later, finds the mark. So processes that start at the same time agree on the place.
    return directory if not _has_contents(directory) or _is_marked(directory) else directory / "zloader"


def _has_contents(directory: Path) -> bool:
    try:
        return any(True for _ in directory.iterdir())
    except FileNotFoundError:
        return False
    except OSError:  # it cannot be listed
        return True


def _is_marked(place: Path) -> bool:
    with contextlib.suppress(OSError):
        return (place / MARK).is_file()
    return False


def make_cache(directory: Path) -> Path:
    """Creates and marks the cache of a directory, if needed. Returns its place.

    Raises OptionError for a file system that other machines share, PermissionError if other users could rename or
    replace mirrors in the cache, and any other OSError.
    """
    place = place_of(directory)
    require_local(place)
    if place != directory:
        require_safe(directory)
    created = not place.exists()
    if created:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if place != directory:
        require_private(place)  # another user may have created it, or a link with its name
    require_safe(place)
    if not _is_marked(place):
        (place / MARK).touch(mode=0o600)
    if created:
        (place / "CACHEDIR.TAG").write_text(_TAG)  # https://bford.info/cachedir
    return place


def require_cache(directory: Path) -> Path:
    """The place of the cache of a directory. Raises CacheError if there is none."""
    place = place_of(directory)
    if not _is_marked(place):
        inside = "" if place == directory else f", and neither does {place}"
        raise CacheError(f"{directory} is not a cache of zloader: it contains no file {MARK}{inside}. Check the path")
    return place


def unmark(place: Path) -> None:
    """Removes the files that mark a cache, and then the directory itself if it is empty."""
    tag = place / "CACHEDIR.TAG"
    with contextlib.suppress(FileNotFoundError):
        if tag.read_text() == _TAG:
            tag.unlink()
    (place / MARK).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it contains other files, or is a mount point
        place.rmdir()


def require_local(place: Path) -> None:
    """Raises OptionError if a cache would be on a file system that several machines share."""
    nearest = next(each for each in (place, *place.parents) if each.exists())
    if (shared := shared_file_system(nearest)) is not None:
        raise OptionError(
            f"the cache {place} is on {shared}, which other machines may share: no mirror is kept there. Give a "
            "directory on a local disk, or no cache: a store that is on such a file system is read well from there"
        )


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
