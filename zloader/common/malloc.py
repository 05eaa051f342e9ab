"""Tunes malloc so that freed arrays are reused. `FetchOptions(tune_malloc=False)` turns this off."""

from __future__ import annotations

import ctypes
import functools


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
