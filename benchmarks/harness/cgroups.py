"""Memory cgroups, which limit the memory of processes and of the page cache that they fill. Linux only, as root."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOTS = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")  # of version 1 and 2
_ENDING_S = 5.0  # the kernel may count a process that has ended as a member a little longer


@dataclass(frozen=True, kw_only=True)
class Cgroup:
    """A memory cgroup. A page belongs to the group of the process that first touched it."""

    directory: Path
    limit_file: str
    usage_file: str
    cached: str  # key in memory.stat

    def add(self, pid: int) -> None:
        """Moves a process into the group. Its later children start there."""
        (self.directory / "cgroup.procs").write_text(str(pid))

    def limit(self, n_bytes: int) -> None:
        """Limits the memory of the processes and their page cache together."""
        (self.directory / self.limit_file).write_text(str(n_bytes))


@contextlib.contextmanager
def cgroup() -> Iterator[Cgroup]:
    """A new memory cgroup, whose processes are moved out of it at the end. Raises OSError if none can be made."""
    first, second = _ROOTS
    parent = first if first.is_dir() else second
    directory = parent / f"zloader-benchmark-{os.getpid()}-{time.monotonic_ns()}"
    directory.mkdir()
    try:
        if parent == first:
            names = {"limit_file": "memory.limit_in_bytes", "usage_file": "memory.usage_in_bytes", "cached": "cache"}
        else:
            names = {"limit_file": "memory.max", "usage_file": "memory.current", "cached": "file"}
        if not (directory / names["limit_file"]).exists():
            raise OSError(f"{directory} has no memory controller")
        yield Cgroup(directory=directory, **names)
    finally:
        _remove(directory, parent)


def _remove(directory: Path, parent: Path) -> None:
    """Removes a group once its processes are in `parent`. The last attempt raises OSError."""
    give_up = time.monotonic() + _ENDING_S
    while True:
        for pid in (directory / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # it has just ended
                (parent / "cgroup.procs").write_text(pid)
        try:
            directory.rmdir()
        except OSError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.05)
        else:
            return
