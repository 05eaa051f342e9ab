"""Locks that a forked process can take, whichever thread of its parent holds them."""

from __future__ import annotations

import os
import threading
import weakref

_locks: weakref.WeakSet[threading.Lock] = weakref.WeakSet()


def forkable_lock() -> threading.Lock:
    """A lock that is free in a forked process, which does not have the thread that may have held it.

    DataLoader workers may be forked while another epoch of the dataset runs in threads. What the lock protects must be
    usable wherever its holder was interrupted.
    """
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def _free_all() -> None:
    for lock in list(_locks):
        if lock.locked():
            lock.release()


os.register_at_fork(after_in_child=_free_all)
