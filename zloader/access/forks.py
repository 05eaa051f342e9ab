"""Refuses a library of native threads in a process that was forked from one that has used it.

TensorStore aborts there, and obstore waits for threads that do not exist.
"""

from __future__ import annotations

import os

from zloader.common.errors import ForkError

_first_users: dict[str, int] = {}  # the process that first used each library


def claim_process(library: str) -> None:
    """Raises ForkError in a process that was forked from one that has read with this library."""
    user = _first_users.setdefault(library, os.getpid())
    if user != os.getpid():
        raise ForkError(
            f"process {user} had already read a store when process {os.getpid()} was forked from it, and {library} "
            "does not survive a fork: start DataLoader workers with multiprocessing_context='spawn' or 'forkserver', "
            "or use num_workers=0, which is faster"
        )
