"""Which files of a mirror are known to hold what their checksums say, so that nobody has to compare them again.

A process that has compared or written all of a file notes the file's identity (inode, size, times), the machine's boot
and the name of the mirror's directory. As long as these are the same, the file is as it was: a killed process leaves
none half written, since the kernel keeps what it was given. After a crash of the machine, a change by somebody else, or
a process that was killed while it filled, identity or boot differ, and every chunk is compared with its checksum where
it is first used.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path

from zloader.caching.atomic_files import write_whole

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class VerifiedMarks:
    """The notes on the files of one directory. What cannot be read or written counts as not known."""

    def __init__(self, directory: Path) -> None:
        self._mirror = directory.name
        self._path = directory / "proved.json"

    def holds(self, *paths: Path) -> bool:
        """Whether all these files are as they were when they were last noted, in this boot."""
        try:
            known = self._read()
            return all(known[path.name] == _identity(path) for path in paths)
        except (OSError, KeyError):
            return False

    def note(self, paths: Iterable[Path]) -> None:
        """Notes that files are right as they are."""
        with contextlib.suppress(OSError):
            boot = _BOOT.read_text()
            files = {**self._read(), **{path.name: _identity(path) for path in paths}}
            write_whole(self._path, json.dumps({"boot": boot, "mirror": self._mirror, "files": files}).encode())

    def _read(self) -> dict[str, list[int]]:
        try:
            noted = json.loads(self._path.read_bytes())
            known = (noted["boot"], noted["mirror"]) == (_BOOT.read_text(), self._mirror)
            return dict(noted["files"]) if known else {}
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return {}


def _identity(path: Path) -> list[int]:
    found = path.lstat()
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
