"""The cache directory: the mirrors in it, who uses them, and how much room they may take.

    DIR/zloader-cache           says that DIR is a cache; locked while room is handed out
    DIR/CACHEDIR.TAG            where zloader made DIR: backups leave it out
    DIR/FINGERPRINT-v2/         the mirror of one store, for its owner alone (mode 0700)
        mirror.json             which store that is, its FINGERPRINT again, and when the mirror was begun
        users                   locked (shared) by all who use the mirror; its time is that of the last use
        stale                   there once other objects were found at the store's URL
        owners                  see leases.py
        proved.json             see proof.py
        NAME.flat, NAME.sums    see mirror.py
        NAME.npy, NAME.kept     see kept.py

FINGERPRINT is stored.mirror_fingerprint's. The checksums of the files that hold values include the names of directory
and file (drafts.full_name): what was moved or renamed counts as damaged.

Nothing but files of these names is ever deleted. Credentials are in none of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from zloader.caching.atomic_files import write_whole
from zloader.caching.permissions import require_private, require_safe
from zloader.caching.verified import VerifiedMarks
from zloader.common.errors import CacheError
from zloader.common.options import Cache

log = logging.getLogger("zloader")

_VERSION = 3  # of the files' format; part of a mirror's name
_MARK = "zloader-cache"
_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# This directory holds mirrors made by zloader.\n"
_MIRROR = re.compile(r"[0-9a-f]{32}-v\d+")
_OURS = re.compile(r".+\.(flat|sums|npy|kept|draft)|mirror\.json|users|stale|owners|proved\.json")
_SLACK = 256 * 1024  # bytes below a limit that are left to directories, and to what lies beside the elements


class MirrorDirectory:
    """The directory of one store's mirror, made where it is not there, and in use as long as this object lives.

    Raises OSError where it cannot be made or is another store's, PermissionError where others may have written to it.
    """

    def __init__(self, cache: Cache, fingerprint: str, url: str) -> None:
        self.cache = cache
        _make_cache(cache.directory)
        require_safe(cache.directory)
        self.directory = cache.directory / _name(fingerprint)
        self._users = self._begin_use()
        self._describe(fingerprint, url)
        self.room = Room(cache)
        self.proof = VerifiedMarks(self.directory)

    def _begin_use(self) -> int:
        """The open file `users`, locked: whoever drops mirrors leaves those alone that are in use."""
        while True:
            self.directory.mkdir(mode=0o700, exist_ok=True)
            require_private(self.directory)
            try:
                users = os.open(
                    self.directory / "users", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
                )
            except FileNotFoundError:
                continue  # the directory was dropped in between
            fcntl.flock(users, fcntl.LOCK_SH)
            if os.fstat(users).st_nlink:
                with contextlib.suppress(OSError):  # a cache that is only read
                    os.utime(users)
                return users
            os.close(users)

    def _describe(self, fingerprint: str, url: str) -> None:
        description = self.directory / "mirror.json"
        was_there = description.exists()  # asked first: another process may be about to write it
        described = _described(self.directory)
        if described is None:
            if was_there:
                log.warning("%s is damaged: it is written anew", description)
            made = datetime.now(UTC).isoformat(timespec="seconds")
            write_whole(description, json.dumps({"url": url, "fingerprint": fingerprint, "made": made}).encode())
        elif described["fingerprint"] != fingerprint:
            raise OSError(f"{self.directory} was renamed: it is the mirror of {described['url']}. Delete it")
        else:
            with contextlib.suppress(OSError):
                (self.directory / "stale").unlink(missing_ok=True)  # what it mirrors is there again
        for other in mirrors(self.cache.directory):
            if other.url == url and other.directory != self.directory and not other.stale:
                log.warning("%s has changed: its old mirror %s is stale and will make room first", url, other.directory)
                with contextlib.suppress(OSError):
                    (other.directory / "stale").touch(mode=0o600)

    def __del__(self) -> None:
        if hasattr(self, "_users"):
            os.close(self._users)


def _make_cache(directory: Path) -> None:
    if not directory.exists():
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        (directory / "CACHEDIR.TAG").write_text(_TAG)  # https://bford.info/cachedir
    if not (directory / _MARK).exists():
        (directory / _MARK).touch(mode=0o600)


def _name(fingerprint: str) -> str:
    return f"{fingerprint}-v{_VERSION}"


def _described(directory: Path) -> dict[str, str] | None:
    """What a mirror's mirror.json says; None where it is not there or damaged."""
    try:
        described = json.loads((directory / "mirror.json").read_bytes())
        return {name: str(described[name]) for name in ("url", "fingerprint", "made")}
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True, kw_only=True)
class MirrorEntry:
    """A mirror found in a cache: of which store (`url`), when begun and last used (seconds since 1970), and its size.

    `allocated_bytes` are what the file system has really given it; `stale` says that nothing in it is of use: its store
    has changed since, the mirror is of another version of zloader, or not what its directory is named after.
    """

    directory: Path
    url: str
    fingerprint: str
    made: str
    used_s: float
    allocated_bytes: int
    stale: bool


def mirrors(cache: Path) -> list[MirrorEntry]:
    """The mirrors in a cache directory, in the order in which they make room: stale ones first, then by last use.

    One that does not say what it mirrors, since it was not begun or dropped to the end, counts as stale. Those that may
    not be looked at, since they are other users', are left out.
    """
    entries = []
    for directory in _directories(cache):
        described = _described(directory) or {"url": "", "fingerprint": "", "made": ""}
        with contextlib.suppress(FileNotFoundError, PermissionError):  # it is dropped right now, or another user's
            users = directory / "users"
            entries.append(
                MirrorEntry(
                    directory=directory,
                    url=described["url"],
                    fingerprint=described["fingerprint"],
                    made=described["made"],
                    used_s=(users if users.exists() else directory).stat().st_mtime,
                    allocated_bytes=allocated_bytes(directory),
                    stale=directory.name != _name(described["fingerprint"]) or (directory / "stale").exists(),
                )
            )
    return sorted(entries, key=lambda entry: (not entry.stale, entry.used_s))


def _directories(cache: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError), os.scandir(cache) as found:
        return [Path(one.path) for one in found if _MIRROR.fullmatch(one.name) and one.is_dir(follow_symlinks=False)]
    return []


def misnamed(directory: Path) -> bool:
    """Whether a mirror says that it is another one than its directory is named after."""
    described = _described(directory)
    return described is not None and not directory.name.startswith(f"{described['fingerprint']}-v")


def is_of_this_version(directory: Path) -> bool:
    """Whether a mirror was begun by a zloader that keeps the same files as this one."""
    return directory.name.endswith(_name(""))


def require_cache(directory: Path) -> None:
    """Raises CacheError for a directory that zloader has not marked as a cache."""
    if not (directory / _MARK).is_file():
        raise CacheError(f"{directory} is not a cache of zloader: there is no file {_MARK} in it. Check the path")


def unmark(cache: Path) -> None:
    """Where no mirror is left, removes what marks a directory as a cache, and it where nothing else is in it."""
    if any((mirror / "users").exists() for mirror in _directories(cache)):
        return
    tag = cache / "CACHEDIR.TAG"
    with contextlib.suppress(FileNotFoundError):
        if tag.read_text() == _TAG:
            tag.unlink()
    (cache / _MARK).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # something else is in it, or it is mounted
        cache.rmdir()


def allocated_bytes(directory: Path) -> int:
    """What the file system has given a mirror: the blocks of its files, holes not counted, and of the directory."""
    total = 0
    with contextlib.suppress(FileNotFoundError, PermissionError):
        total = directory.lstat().st_blocks * 512
        with os.scandir(directory) as found:
            for one in found:
                with contextlib.suppress(FileNotFoundError):
                    total += one.stat(follow_symlinks=False).st_blocks * 512
    return total


def cache_bytes(cache: Path) -> int:
    """What all mirrors of a cache take on disk."""
    return sum(map(allocated_bytes, _directories(cache)))


def drop(directory: Path) -> bool:
    """Deletes the mirror in a directory, unless somebody uses it; says whether it did.

    Files that zloader did not make stay, and the directory with them.
    """
    try:
        users = os.open(directory / "users", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        users = None
    try:
        if users is not None:
            try:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        with os.scandir(directory) as found:
            ours = [one for one in found if _OURS.fullmatch(one.name) and one.is_file(follow_symlinks=False)]
        for one in sorted(ours, key=lambda one: one.name == "users"):  # last: who waits for it then begins anew
            with contextlib.suppress(FileNotFoundError):
                Path(one.path).unlink()
        with contextlib.suppress(OSError):  # something else is in it
            directory.rmdir()
        return True
    finally:
        if users is not None:
            os.close(users)


class Room:
    """Hands out room on disk below a cache's limits, to any number of processes; without limits, whatever is asked.

    One at a time looks at what the file system has given to all mirrors, and has it give more: so no size is kept
    anywhere that could be wrong, and the limit holds at every moment.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self.limited = cache.max_bytes is not None or cache.least_free > 0

    def allocate(self, file: int, runs: Sequence[tuple[int, int]]) -> int:
        """Gives `(offset, bytes)` of a file their room, in order; gives how many of them got it.

        Where it is not enough, mirrors that nobody uses are dropped. Raises OSError where the file system refuses.
        """
        if not self.limited:
            return len(runs)
        with self._alone():
            left = self._left()
            for done, (offset, n_bytes) in enumerate(runs):
                asked = n_bytes + 2 * 4096  # the first and last block
                while left < asked:
                    if not self._drop_one():
                        return done
                    left = self._left()
                before = os.fstat(file).st_blocks
                os.posix_fallocate(file, offset, n_bytes)
                left -= (os.fstat(file).st_blocks - before) * 512
        return len(runs)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        file = os.open(self._cache.directory / _MARK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    def _left(self) -> int:
        disk = os.statvfs(self._cache.directory)
        free = disk.f_bavail * disk.f_frsize - self._cache.least_free
        return min(free, self._cache.most - cache_bytes(self._cache.directory) - _SLACK)

    def _drop_one(self) -> bool:
        for entry in mirrors(self._cache.directory):
            if drop(entry.directory):
                log.info("dropped the mirror %s of %s to make room", entry.directory, entry.url)
                return True
        return False
