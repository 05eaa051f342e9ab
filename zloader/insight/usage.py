"""What has been used so far: processor time of this process and of the machine, and bytes read from disks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from zloader.common.machine import available_cores, core_quota


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
