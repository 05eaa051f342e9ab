"""Records which files of a mirror match their checksums, so that no other process has to compare them again.

A process that has verified or written a whole file records the file's identity (inode, size, times), the ID of the
machine's current boot, and the name of the mirror's directory. While these stay the same, the file is unchanged:
killing a process does not undo its writes, since the kernel keeps them. After a crash of the machine, a change by
another program, or the death of a process that was filling the mirror, the identity or boot ID differs. Then every
chunk is compared with its checksum on first use.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zloader.caching.atomic_files import write_atomically

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class VerifiedMarks:
    """The record of verified files of one mirror. If it cannot be read or written, no file counts as verified."""

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
