"""Locks that a forked process can take, whichever thread of its parent held them, and `cached_property` without one.

DataLoader workers may be forked while another epoch of the dataset runs in threads, which do not exist in the worker.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

_locks: weakref.WeakSet[threading.Lock] = weakref.WeakSet()


def forkable_lock() -> threading.Lock:
    """A lock that is free in a forked process. What it protects must be usable wherever its holder was interrupted."""
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def _free_all() -> None:
    for lock in list(_locks):
        if lock.locked():
            lock.release()


os.register_at_fork(after_in_child=_free_all)


def hold_at_forks(lock: Any) -> None:
    """Makes forks wait until no other thread holds a reentrant lock, because what it protects must not be cut short."""
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property as cached_property
else:

    class cached_property(functools.cached_property):
        """As since Python 3.12: two threads may both compute the value. Before, all objects of a class share a lock."""

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            if instance is None:
                return self
            values = instance.__dict__
            if self.attrname not in values:
                values[self.attrname] = self.func(instance)
            return values[self.attrname]
