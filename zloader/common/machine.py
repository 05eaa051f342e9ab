"""This machine: its cores and memory, how busy it is, what was read from its disks, and its malloc."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from pathlib import Path

from zloader.common.errors import OptionError

_CGROUP = Path("/sys/fs/cgroup")


def available_cores() -> int:
    """The number of cores that this process may run on. macOS does not restrict processes to some of the cores."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_bytes() -> int:
    """Bytes of memory of the machine, or of the container that runs this process."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroup v2, then v1
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            limits.append(int((_CGROUP / limit).read_text()))
    return min(limits)


def processor_s() -> tuple[float, float] | None:
    """Seconds that all cores of the machine were busy, and seconds in all, of all programs. None if it does not tell.

    It does not if this process may only use a part of the cores, as in a container: the rest do not slow it down.
    Time that another virtual machine had is busy, waiting for a disk is not.
    """
    if available_cores() < (os.cpu_count() or 1) or _has_quota():
        return None
    try:
        first, *_ = Path("/proc/stat").read_text().splitlines()
        user, nice, system, idle, io, irq, soft_irq, steal, *_ = (int(each) for each in first.split()[1:])
    except (OSError, ValueError):
        return None
    busy, ticks = user + nice + system + irq + soft_irq + steal, os.sysconf("SC_CLK_TCK")
    return busy / ticks, (busy + idle + io) / ticks


def _has_quota() -> bool:
    """Whether the container of this process limits its processor time."""
    for limit in ("cpu.max", "cpu/cpu.cfs_quota_us"):  # cgroup v2, then v1
        with contextlib.suppress(OSError):
            return (_CGROUP / limit).read_text().split()[0] not in ("max", "-1")
    return False


def disk_bytes() -> int | None:
    """The bytes that this process has made the kernel read from disks so far. None if the system does not tell."""
    try:
        counted = Path("/proc/self/io").read_text()
    except OSError:
        return None
    return int(dict(line.split(": ") for line in counted.splitlines())["read_bytes"])


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
