"""The cache directory: its place, its mirrors, which of them are in use and verified, and how much they may take.

    DIR/zloader-cache           marks DIR as a cache; locked while disk space is allocated
    DIR/CACHEDIR.TAG            excludes DIR from backups; only written if zloader created DIR
    DIR/FINGERPRINT-v6/         the mirror of one store, private to its owner (mode 0700)
        mirror.json             the store's URL, its FINGERPRINT, and when the mirror was created
        users                   locked (shared) by every process that uses the mirror; its mtime is the last use
        owners                  see leases.py
        proved.json             see VerifiedMarks
        NAME.rows, NAME.index   see rows_file.py
        NAME.array, NAME.kept   see kept.py

DIR is the directory that the user names. No other user may be able to write to it, because values that another user
puts there would be trusted. It is not on a file system that several machines share, because each sees late, or not at
all, what the others write there. Of several mirrors of one URL, all but the last used one are stale, as the store has
changed.

FINGERPRINT is computed by stored_objects.mirror_fingerprint. The checksums of all files with values include the names
of the directory and the file (qualified_name), so a moved or renamed file counts as damaged.

zloader only ever deletes files with these names. None of them contains credentials.
"""

from __future__ import annotations

import contextlib
import fcntl
import grp
import json
import logging
import os
import pwd
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

import numpy as np

from zloader.common.errors import CacheError, OptionError
from zloader.common.file_systems import close_with, shared_file_system
from zloader.common.options import Cache

log = logging.getLogger("zloader")

VERSION = "-v6"  # of the file formats; the end of each mirror's name
_MARK = "zloader-cache"
_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# This directory holds mirrors made by zloader.\n"
_MIRROR = re.compile(r"[0-9a-f]{32}-v\d+")
# Of all versions, so that stale mirrors of older ones can be dropped.
_OURS = re.compile(
    r".+\.(flat|sums|stored|places|joined|bounds|rows|index|blocks|array|npy|kept|draft)|mirror\.json|users|stale|owners|turn|proved\.json"
)
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_RESERVE_BYTES = 256 * 1024  # below the limit, for directories and small files

# ---- files


def cached_path(directory: Path, name: str, suffix: str) -> Path:
    """The path of the file that keeps an array, rows or an object called `name`. It is always inside `directory`.

    Capital letters after the first slash are escaped as well (X/data, obs/%44onor), so that two columns or layers whose
    names differ only in case have two files, even where the file system ignores case, as on macOS.
    """
    first, slash, rest = quote(name, safe="/").partition("/")
    escaped = re.sub("%..|[A-Z]", lambda found: found[0] if len(found[0]) > 1 else f"%{ord(found[0]):X}", rest)
    return directory / f"{(first + slash + escaped).replace('/', '%2F')}.{suffix}"


def qualified_name(path: Path) -> bytes:
    """The name of a mirror and of a file in it. Checksums include it, so that a moved or renamed file is detected."""
    return os.fsencode(f"{path.parent.name}/{path.name}\n")


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Opens a file for a while, creating it with mode 0600 if the flags say so. Raises OSError for a link."""
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield file
    finally:
        os.close(file)


@contextlib.contextmanager
def draft_path(path: Path) -> Iterator[Path]:
    """A unique path beside `path`, to write and then rename. Deleted on exit unless renamed."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}.draft")
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a small file, mode 0600, by renaming: it appears complete or not at all."""
    with draft_path(path) as draft:
        draft.write_bytes(content)
        draft.chmod(0o600)
        draft.replace(path)


# ---- a cache


def _make_cache(directory: Path) -> None:
    """Creates and marks a cache, if needed.

    Raises OptionError for a file system that other machines share, PermissionError if other users could rename or
    replace mirrors in the cache, and any other OSError.
    """
    require_local(directory)
    created = not directory.exists()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_safe(directory)
    if not _is_cache(directory):
        (directory / _MARK).touch(mode=0o600)
    if created:
        (directory / "CACHEDIR.TAG").write_text(_TAG)  # https://bford.info/cachedir


def _is_cache(directory: Path) -> bool:
    return os.access(directory / _MARK, os.F_OK)


def require_cache(directory: Path) -> None:
    """Raises CacheError if a directory is not a cache."""
    if not _is_cache(directory):
        raise CacheError(f"{directory} is not a cache of zloader: it contains no file {_MARK}. Check the path")


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
    others = stat.S_IWOTH if _is_own_group(found.st_gid) else stat.S_IWOTH | stat.S_IWGRP
    _require(directory, found, {os.geteuid(), 0}, 0 if found.st_mode & stat.S_ISVTX else others, "go-w")


def _is_own_group(number: int) -> bool:
    """Whether a group is private to this user: it has the user's name, a common convention, and no other member."""
    try:
        user, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(number)
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}


def require_private(directory: Path) -> None:
    """Raises PermissionError if other users have access to a mirror's directory, NotADirectoryError if it is a link."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{directory} is not a directory")
    _require(directory, found, {os.geteuid()}, 0o077, "700")


def _require(directory: Path, found: os.stat_result, owners: set[int], others: int, mode: str) -> None:
    if found.st_uid not in owners:
        raise PermissionError(f"{directory} belongs to user {found.st_uid}, who could change it: use another cache")
    if found.st_mode & others:
        given = oct(stat.S_IMODE(found.st_mode))
        raise PermissionError(f"{directory} has mode {given}, so others could change it. Run chmod {mode} on it")


# ---- mirrors


class MirrorDirectory:
    """The directory of one store's mirror, created if needed, and marked as in use for the life of this object.

    `path` is the directory, `place` the cache that it is in, `form` that of its rows (see Cache). `space` allocates
    disk space, and `verified` records which files match their checksums. `arrays` are the names of those that this
    process keeps or is about to (kept.py). Raises OSError if the directory cannot be created or belongs to another
    store, PermissionError if other users could have written to it, and OptionError if other machines could.
    """

    def __init__(self, cache: Cache, fingerprint: str, url: str) -> None:
        _make_cache(cache.directory)
        self.form, self.place = cache.form, cache.directory
        self.path = self.place / f"{fingerprint}{VERSION}"
        self._begin_use()
        self._describe(fingerprint, url)
        self.space = DiskSpace(cache)
        self.verified = VerifiedMarks(self.path)
        self.arrays: set[str] = set()

    def _begin_use(self) -> None:
        """Opens and locks the file `users`, so that no process drops this mirror while it is in use."""
        while True:
            self.path.mkdir(mode=0o700, exist_ok=True)
            require_private(self.path)
            try:
                users = os.open(self.path / "users", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except FileNotFoundError:
                continue  # another process dropped the directory meanwhile
            close = close_with(self, users)
            fcntl.flock(users, fcntl.LOCK_SH)
            if os.fstat(users).st_nlink:
                with contextlib.suppress(OSError):  # the cache is read-only
                    os.utime(users)
                return
            close()

    def _describe(self, fingerprint: str, url: str) -> None:
        described = described_in(self.path)
        if not described:
            for other in mirrors(self.place):
                if other.url == url and other.directory != self.path and not other.stale:
                    log.warning("%s has changed: its old mirror %s is stale", url, other.directory)
            made = datetime.now(UTC).isoformat(timespec="seconds")
            content = json.dumps({"url": url, "fingerprint": fingerprint, "made": made}).encode()
            write_atomically(self.path / "mirror.json", content)
        elif described["fingerprint"] != fingerprint:
            raise OSError(f"{self.path} was renamed: it is the mirror of {described['url']}. Delete it")


def open_mirror_directory(cache: Cache, fingerprint: str, url: str) -> MirrorDirectory | None:
    """The directory of a store's mirror, or None, with a warning, if it cannot be used."""
    try:
        return MirrorDirectory(cache, fingerprint, url)
    except OSError as error:
        log.warning("cannot keep a mirror in %s (%s): every epoch will read from the store", cache.directory, error)
        return None


def described_in(directory: Path) -> dict[str, str]:
    """The content of a mirror's mirror.json; empty if the file is absent or damaged."""
    try:
        described = json.loads((directory / "mirror.json").read_bytes())
        return {name: str(described[name]) for name in ("url", "fingerprint", "made")}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


@dataclass(frozen=True, kw_only=True)
class MirrorEntry:
    """A mirror in a cache: its store's `url`, when it was `made`, its last use (seconds since 1970), and its size.

    `allocated_bytes` is the disk space that it takes, as the file system counts it. `stale` means that the mirror is
    useless: its store has changed, another version of zloader wrote it, or its directory was renamed.
    """

    directory: Path
    url: str
    fingerprint: str
    made: str
    used_s: float
    allocated_bytes: int
    stale: bool


def mirrors(cache: Path) -> list[MirrorEntry]:
    """The mirrors in a cache directory, in the order in which they are dropped: stale first, then least recently used.

    A mirror without a valid mirror.json, which was only partly created or dropped, counts as stale. Mirrors of other
    users, which cannot be read, are left out.
    """
    found = []
    for directory in _directories(cache):
        described = {"url": "", "fingerprint": "", "made": ""} | described_in(directory)
        with contextlib.suppress(FileNotFoundError, PermissionError):  # it is being dropped, or belongs to another user
            users = directory / "users"
            used_s = (users if users.exists() else directory).stat().st_mtime
            found.append((used_s, directory, described, directory.name == f"{described['fingerprint']}{VERSION}"))
    last_used = {described["url"]: directory for _, directory, described, is_valid in sorted(found) if is_valid}
    entries = [
        MirrorEntry(
            directory=directory,
            **described,
            used_s=used_s,
            allocated_bytes=_allocated_bytes(directory),
            stale=not is_valid or last_used[described["url"]] != directory,
        )
        for used_s, directory, described, is_valid in found
    ]
    return sorted(entries, key=lambda entry: (not entry.stale, entry.used_s))


def _directories(cache: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError), os.scandir(cache) as found:
        return [
            Path(item.path) for item in found if _MIRROR.fullmatch(item.name) and item.is_dir(follow_symlinks=False)
        ]
    return []


def _allocated_bytes(directory: Path) -> int:
    """Disk space of a mirror in bytes: the blocks of its files, without holes, and of the directory itself."""
    total = 0
    with contextlib.suppress(FileNotFoundError, PermissionError):
        total = directory.lstat().st_blocks * 512
        with os.scandir(directory) as found:
            for item in found:
                with contextlib.suppress(FileNotFoundError):
                    total += item.stat(follow_symlinks=False).st_blocks * 512
    return total


def cache_bytes(cache: Path) -> int:
    """Disk space of all mirrors in a cache, in bytes."""
    return sum(map(_allocated_bytes, _directories(cache)))


def drop(directory: Path) -> bool:
    """Deletes a mirror unless it is in use; returns whether it was deleted.

    Files that zloader did not create are kept, and with them the directory.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(FileNotFoundError):
            users = stack.enter_context(opened(directory / "users", os.O_RDONLY))
            try:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        with os.scandir(directory) as found:
            ours = [item for item in found if _OURS.fullmatch(item.name) and item.is_file(follow_symlinks=False)]
        # "users" goes last: a process that waits for its lock then creates the mirror anew.
        for item in sorted(ours, key=lambda item: item.name == "users"):
            Path(item.path).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it contains other files
            directory.rmdir()
        log.info("dropped the mirror %s", directory)
        return True


class DiskSpace:
    """Allocates disk space within a cache's limits, across any number of processes.

    One process at a time adds up the space that the file system has given to all mirrors, and allocates more. No total
    is stored that could become wrong, and the limit holds at every moment. Without limits, nothing is allocated ahead.
    """

    def __init__(self, cache: Cache) -> None:
        self._most, self._least_free, self._place = cache.most, int(cache.min_free_bytes), cache.directory
        self.limited = cache.max_bytes is not None or self._least_free > 0

    def allocate(self, file: int, offset: int, sizes: Sequence[int]) -> int:
        """Allocates pieces of a file that lie one after another, from a byte on; returns how many of them fit.

        Drops mirrors that are not in use to free space. Raises OSError if the file system cannot allocate. On macOS,
        which lacks posix_fallocate, the pieces are only counted, so processes that fill the cache at the same time may
        exceed a limit by the bytes that they have in flight.
        """
        if not self.limited or not len(sizes):
            return len(sizes)
        ends = np.cumsum(sizes)
        with opened(self._place / _MARK, os.O_RDWR | os.O_CREAT) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            while (left := self._bytes_left()) < ends[-1] and self._drop_one():
                pass
            done = int(np.searchsorted(ends, left, side="right"))
            if done and ends[done - 1] and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file, offset, int(ends[done - 1]))
            return done

    def _drop_one(self) -> bool:
        return any(drop(entry.directory) for entry in mirrors(self._place))

    def _bytes_left(self) -> int:
        """What one more piece of a file may take, besides the first and the last block that it lies in."""
        disk = os.statvfs(self._place)
        free = disk.f_bavail * disk.f_frsize - self._least_free
        return min(free, self._most - cache_bytes(self._place) - _RESERVE_BYTES) - 2 * 4096


class VerifiedMarks:
    """Records which files of a mirror match their checksums, so that no other process has to compare them again.

    A process that has verified or written a whole file records the file's identity (inode, size, times), the ID of the
    machine's current boot, and the name of the mirror's directory. While these stay the same, the file is unchanged:
    killing a process does not undo its writes, since the kernel keeps them. After a crash of the machine, a change by
    another program, or the death of a process that was filling the mirror, the identity or boot ID differs. Then every
    block is compared with its checksum on first use. If the record cannot be read or written, no file counts as
    verified.
    """

    def __init__(self, directory: Path) -> None:
        self._mirror = directory.name
        self._path = directory / "proved.json"

    def contains(self, *paths: Path) -> bool:
        """Whether all files are unchanged since they were recorded, in the current boot."""
        try:
            recorded = self._read()
            return all(recorded[path.name] == _identity(path) for path in paths)
        except (OSError, KeyError):
            return False

    def record(self, paths: Iterable[Path]) -> None:
        """Records the current state of files as verified."""
        with contextlib.suppress(OSError):
            files = self._read() | {path.name: _identity(path) for path in paths}
            marks = {"boot": _BOOT.read_text(), "mirror": self._mirror, "files": files}
            write_atomically(self._path, json.dumps(marks).encode())

    def _read(self) -> dict[str, list[int]]:
        try:
            marks = json.loads(self._path.read_bytes())
            return dict(marks["files"]) if (marks["boot"], marks["mirror"]) == (_BOOT.read_text(), self._mirror) else {}
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return {}


def _identity(path: Path) -> list[int]:
    found = path.lstat()
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
