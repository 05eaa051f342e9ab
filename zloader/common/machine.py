"""This machine: its cores and memory, and its malloc."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from pathlib import Path

from zloader.common.errors import OptionError

_CGROUP = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_PERIOD_US = 100_000  # of quotas; version 2 states it


def available_cores() -> int:
    """The number of cores that this process may run on. macOS does not restrict processes to some of the cores."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def physical_bytes() -> int:
    """Bytes of memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_bytes() -> int:
    """Bytes of memory of the machine, or of the container or batch job that runs this process."""
    limits = [physical_bytes()]
    for file in _control_files("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            limits.append(int(file.read_text()))
    return min(limits)


def core_quota() -> float | None:
    """The cores whose time the container or batch job of this process may use; None without a limit."""
    quotas = []
    for file in _control_files("cpu.max"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max 100000"
            most, period = map(int, file.read_text().split())
            quotas.append(most / period)
    for file in _control_files("cpu/cpu.cfs_quota_us"):
        with contextlib.suppress(OSError, ValueError):
            quotas.append(int(file.read_text()) / _PERIOD_US)
    return min((quota for quota in quotas if quota > 0), default=None)


def _control_files(*names: str) -> Iterator[Path]:
    """Files of version 2 and 1 that may limit the cgroup of this process, and those above it.

    In most containers the topmost is that of the container. Elsewhere, as in a job of SLURM, it is that of the machine.
    """
    listed = ""
    with contextlib.suppress(OSError):
        listed = _OWN.read_text()
    paths = {Path(line.split(":", 2)[-1].strip("/")) for line in listed.splitlines()}
    for path in sorted({above for own in paths for above in (own, *own.parents)} | {Path()}):
        for name in names:
            controller, _, file = name.rpartition("/")
            yield _CGROUP / controller / path / file


def require_memory(n_bytes: int, what: str, advice: str) -> None:
    """Raises OptionError, before any memory is used, if `what` needs more than half of the memory of the machine."""
    there = available_bytes()
    if 2 * n_bytes > there:
        raise OptionError(
            f"{what} would take {n_bytes / 1e9:,.1f} GB, more than half of the {there / 1e9:,.1f} GB of memory here: "
            f"{advice}"
        )


@functools.cache
def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for later arrays. Takes effect once per process; does nothing on another libc.

    By default glibc returns allocations above 128 KiB to the kernel, so each new array pays for its page faults again,
    at about half the speed. All threads share one arena, because memory freed in an arena is reused only by the threads
    of that arena, and the process would grow with every epoch.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        m_trim_threshold, m_mmap_threshold, m_arena_max = -1, -3, -8  # malloc.h
        mallopt(m_mmap_threshold, 32 << 20)
        mallopt(m_trim_threshold, (2 << 30) - 1)
        mallopt(m_arena_max, 1)
