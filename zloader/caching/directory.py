"""The cache directory: its mirrors, which of them are in use and verified, and how much disk space they may take.

    DIR/zloader-cache           see place.py
    DIR/CACHEDIR.TAG            see place.py
    DIR/FINGERPRINT-v6/         the mirror of one store, private to its owner (mode 0700)
        mirror.json             the store's URL, its FINGERPRINT, and when the mirror was created
        users                   locked (shared) by every process that uses the mirror; its mtime is the last use
        stale                   exists once other objects have been found at the store's URL
        owners                  see leases.py
        proved.json             see VerifiedMarks
        NAME.rows, NAME.index   see rows_file.py
        NAME.array              see kept_arrays.py
        NAME.kept               see kept_objects.py

FINGERPRINT is computed by stored_objects.mirror_fingerprint. The checksums of all files with values include the names
of the directory and the file (atomic_files.qualified_name), so a moved or renamed file counts as damaged.

zloader only ever deletes files with these names. None of them contains credentials.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from zloader.caching.atomic_files import write_atomically
from zloader.caching.place import MARK, make_cache, require_private, unmark
from zloader.common.descriptors import close_with
from zloader.common.options import Cache

log = logging.getLogger("zloader")

_VERSION = 6  # of the file formats; part of each mirror's name
_MIRROR = re.compile(r"[0-9a-f]{32}-v\d+")
# Of all versions, so that stale mirrors of older ones can be dropped.
_OURS = re.compile(
    r".+\.(flat|sums|stored|places|joined|bounds|rows|index|blocks|array|npy|kept|draft)|mirror\.json|users|stale|owners|turn|proved\.json"
)
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_RESERVE_BYTES = 256 * 1024  # below the limit, for directories and small files


class MirrorDirectory:
    """The directory of one store's mirror, created if needed, and marked as in use for the life of this object.

    `path` is the directory, `place` the cache that it is in, `form` that of its chunks (see Cache). `space` allocates
    disk space, and `verified` records which files match their checksums. Raises OSError if the directory cannot be
    created or belongs to another store, PermissionError if other users could have written to it, and OptionError if
    other machines could.
    """

    def __init__(self, cache: Cache, fingerprint: str, url: str) -> None:
        self.form = cache.form
        self.place = make_cache(cache.directory)
        self.path = self.place / _name(fingerprint)
        self._begin_use()
        self._describe(fingerprint, url)
        self.space = DiskSpace(cache, self.place)
        self.verified = VerifiedMarks(self.path)
        self.arrays: set[str] = set()  # that this process keeps or is about to (kept_arrays.py)

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
        description = self.path / "mirror.json"
        existed = description.exists()  # checked first: another process may be about to write the file
        described = _described(self.path)
        if described is None:
            if existed:
                log.warning("%s is damaged; replacing it", description)
            made = datetime.now(UTC).isoformat(timespec="seconds")
            write_atomically(description, json.dumps({"url": url, "fingerprint": fingerprint, "made": made}).encode())
        elif described["fingerprint"] != fingerprint:
            raise OSError(f"{self.path} was renamed: it is the mirror of {described['url']}. Delete it")
        else:
            with contextlib.suppress(OSError):
                (self.path / "stale").unlink(missing_ok=True)  # the store has the mirrored objects again
        for other in mirrors(self.place):
            if other.url == url and other.directory != self.path and not other.stale:
                log.warning(
                    "%s has changed: its old mirror %s is stale and will be dropped first", url, other.directory
                )
                with contextlib.suppress(OSError):
                    (other.directory / "stale").touch(mode=0o600)


def _name(fingerprint: str) -> str:
    return f"{fingerprint}-v{_VERSION}"


def _described(directory: Path) -> dict[str, str] | None:
    """The content of a mirror's mirror.json, or None if the file is absent or damaged."""
    try:
        described = json.loads((directory / "mirror.json").read_bytes())
        return {name: str(described[name]) for name in ("url", "fingerprint", "made")}
    except (OSError, ValueError, KeyError, TypeError):
        return None


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
    entries = []
    for directory in _directories(cache):
        described = _described(directory) or {"url": "", "fingerprint": "", "made": ""}
        with contextlib.suppress(FileNotFoundError, PermissionError):  # it is being dropped, or belongs to another user
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
        return [
            Path(item.path) for item in found if _MIRROR.fullmatch(item.name) and item.is_dir(follow_symlinks=False)
        ]
    return []


def is_renamed(directory: Path) -> bool:
    """Whether the fingerprint in a mirror's mirror.json differs from the one in its directory's name."""
    described = _described(directory)
    return described is not None and not directory.name.startswith(f"{described['fingerprint']}-v")


def is_of_this_version(directory: Path) -> bool:
    """Whether a mirror has the file formats of this version of zloader."""
    return directory.name.endswith(_name(""))


def unmark_if_empty(cache: Path) -> None:
    """Once no mirror is left, removes the files that mark a cache, and then the directory itself if it is empty."""
    if not any((mirror / "users").exists() for mirror in _directories(cache)):
        unmark(cache)


def allocated_bytes(directory: Path) -> int:
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
    return sum(map(allocated_bytes, _directories(cache)))


def drop(directory: Path) -> bool:
    """Deletes a mirror unless it is in use; returns whether it was deleted.

    Files that zloader did not create are kept, and with them the directory.
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
            ours = [item for item in found if _OURS.fullmatch(item.name) and item.is_file(follow_symlinks=False)]
        # "users" goes last: a process that waits for its lock then creates the mirror anew.
        for item in sorted(ours, key=lambda item: item.name == "users"):
            with contextlib.suppress(FileNotFoundError):
                Path(item.path).unlink()
        with contextlib.suppress(OSError):  # it contains other files
            directory.rmdir()
        return True
    finally:
        if users is not None:
            os.close(users)


class DiskSpace:
    """Allocates disk space within a cache's limits, across any number of processes.

    One process at a time adds up the space that the file system has given to all mirrors, and allocates more. No total
    is stored that could become wrong, and the limit holds at every moment. Without limits, nothing is allocated ahead.
    """

    def __init__(self, cache: Cache, place: Path) -> None:
        self._most, self._least_free, self._place = cache.most, int(cache.min_free_bytes), place
        self.limited = cache.max_bytes is not None or self._least_free > 0

    def allocate(self, file: int, runs: Sequence[tuple[int, int]]) -> int:
        """Allocates the runs `(offset, bytes)` of a file, in order; returns how many of them fit.

        Drops mirrors that are not in use to free space. Raises OSError if the file system cannot allocate. On macOS,
        which lacks posix_fallocate, the runs are only counted, so processes that fill the cache at the same time may
        exceed a limit by the bytes that they have in flight.
        """
        if not self.limited:
            return len(runs)
        with self._locked():
            left = self._bytes_left()
            for done, (offset, n_bytes) in enumerate(runs):
                if not n_bytes:
                    continue
                needed = n_bytes + 2 * 4096  # the first and last block
                while left < needed:
                    if not self._drop_one():
                        return done
                    left = self._bytes_left()
                if hasattr(os, "posix_fallocate"):
                    before = os.fstat(file).st_blocks
                    os.posix_fallocate(file, offset, n_bytes)
                    left -= (os.fstat(file).st_blocks - before) * 512
                else:
                    left -= n_bytes
        return len(runs)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        file = os.open(self._place / MARK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    def _bytes_left(self) -> int:
        disk = os.statvfs(self._place)
        free = disk.f_bavail * disk.f_frsize - self._least_free
        return min(free, self._most - cache_bytes(self._place) - _RESERVE_BYTES)

    def _drop_one(self) -> bool:
        for entry in mirrors(self._place):
            if drop(entry.directory):
                log.info("dropped the mirror %s of %s to free disk space", entry.directory, entry.url)
                return True
        return False


class VerifiedMarks:
    """Records which files of a mirror match their checksums, so that no other process has to compare them again.

    A process that has verified or written a whole file records the file's identity (inode, size, times), the ID of the
    machine's current boot, and the name of the mirror's directory. While these stay the same, the file is unchanged:
    killing a process does not undo its writes, since the kernel keeps them. After a crash of the machine, a change by
    another program, or the death of a process that was filling the mirror, the identity or boot ID differs. Then every
    chunk is compared with its checksum on first use. If the record cannot be read or written, no file counts as
    verified.
    """

    def __init__(self, directory: Path) -> None:
        self._mirror = directory.name
        self._path = directory / "proved.json"
        self._parsed: tuple[list[int], Any] | None = None  # the record's identity when it was read, and its content

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
            boot = _BOOT.read_text()
            files = {**self._read(), **{path.name: _identity(path) for path in paths}}
            write_atomically(self._path, json.dumps({"boot": boot, "mirror": self._mirror, "files": files}).encode())

    def _read(self) -> dict[str, list[int]]:
        try:
            identity, parsed = _identity(self._path), self._parsed
            document = (
                parsed[1] if parsed is not None and parsed[0] == identity else json.loads(self._path.read_bytes())
            )
            self._parsed = identity, document
            current = (document["boot"], document["mirror"]) == (_BOOT.read_text(), self._mirror)
            return dict(document["files"]) if current else {}
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return {}


def _identity(path: Path) -> list[int]:
    found = path.lstat()
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
