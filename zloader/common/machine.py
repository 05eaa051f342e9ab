"""This machine: its cores and memory, how busy it is, what was read from its disks, and its malloc."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import time
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


def processor_s() -> tuple[float, float] | None:
    """Seconds that all cores of the machine were busy, and seconds in all, of all programs. None if it does not tell.

    It does not if this process may only use a part of the cores, as in a container: the rest do not slow it down.
    Time that another virtual machine had is busy, waiting for a disk is not.
    """
    if available_cores() < (os.cpu_count() or 1) or core_quota() is not None:
        return None
    try:
        first, *_ = Path("/proc/stat").read_text().splitlines()
        user, nice, system, idle, io, irq, soft_irq, steal, *_ = (int(each) for each in first.split()[1:])
    except (OSError, ValueError):
        return None
    busy, ticks = user + nice + system + irq + soft_irq + steal, os.sysconf("SC_CLK_TCK")
    return busy / ticks, (busy + idle + io) / ticks


def disk_bytes() -> int | None:
    """The bytes that this process and its children have made the kernel read from disks so far. None if unknown."""
    n_bytes = None
    for process in [Path("/proc/self"), *_children()]:
        with contextlib.suppress(OSError):  # another system, or a child that has just ended
            counted = dict(line.split(": ") for line in (process / "io").read_text().splitlines())
            n_bytes = (n_bytes or 0) + int(counted["read_bytes"])
    return n_bytes


def cpu_s() -> float:
    """Seconds of processor time of this process and its children so far. Only Linux tells of children that run."""
    ticks = 0
    for process in _children():
        with contextlib.suppress(OSError):
            ticks += sum(map(int, _fields(process)[11:13]))
    ended = os.times()
    return time.process_time() + ended.children_user + ended.children_system + ticks / os.sysconf("SC_CLK_TCK")


def _children() -> Iterator[Path]:
    """Linux's directories of the processes that this one has started, and that have not been waited for.

    All processes are asked for their parent: a list of the children of each thread misses those of a thread that ends
    while the lists are read.
    """
    for process in Path("/proc").glob("[0-9]*"):
        parent = 0
        with contextlib.suppress(OSError):  # it has just ended
            parent = int(_fields(process)[1])
        if parent == os.getpid():
            yield process


def _fields(process: Path) -> list[str]:
    """The fields of a process in Linux's `stat` from the third on, which is its state."""
    return (process / "stat").read_text().rpartition(")")[2].split()


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
