"""How freed memory is kept for the next minibatch; a switch of FetchOptions (`tune_malloc`)."""

from __future__ import annotations

import ctypes
import functools


@functools.cache
def keep_freed_memory() -> None:
    """Lets glibc keep freed arrays for the next ones; once a process. Does nothing on another libc.

    Without it, memory above 128 KiB goes back to the kernel and comes again page by page, at about half the speed. All
    threads share one arena: else what one of them freed is kept for it alone, and the process grows with each epoch.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        m_trim_threshold, m_mmap_threshold, m_arena_max = -1, -3, -8  # malloc.h
        mallopt(m_mmap_threshold, 32 << 20)
        mallopt(m_trim_threshold, (2 << 30) - 1)
        mallopt(m_arena_max, 1)
