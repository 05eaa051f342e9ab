"""File descriptors that are closed with their owner.

A `__del__` may run while the interpreter ends, when modules have already lost their names, `os` among them. IPython,
for one, keeps objects until then. A finalizer does nothing at that time: the kernel closes what is still open.
"""

from __future__ import annotations

import os
import weakref
from typing import Any


def close_with(owner: Any, number: int) -> weakref.finalize[[int], Any]:
    """Closes a file descriptor when its owner is gone, or when the result is called. Does it once."""
    closing = weakref.finalize(owner, os.close, number)
    closing.atexit = False  # threads may use it until the end
    return closing
