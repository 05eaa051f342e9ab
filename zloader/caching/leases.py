"""Leases on the chunks of a mirror: processes that fill it together download each chunk only once.

A lease is stored in the word of its chunk, where the checksum will be later (checksums.py). It contains the number of
its owner. For its whole life, the owner holds a lock on the byte of that number in the file `owners`. The kernel
releases the lock when the owner's process ends for any reason, so its leases expire and others take over. Leases are
acquired under an exclusive flock of the same file (`exclusive`), which is independent of locks on its bytes. Leases
only save work and are not needed for correctness: if two owners download a chunk after all, they write the same bytes.

Owners need locks that belong to an open file and cover one byte of it, which only Linux has (F_OFD_SETLK). Locks of
`lockf` belong to the process, and end when it closes the file anywhere. So on macOS no chunk is leased.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from zloader.common.descriptors import close_with

log = logging.getLogger("zloader")

LEASED = 1 << 63  # set in the word of a leased chunk; the low 31 bits are the owner's number
_OWNERS = (1 << 31) - 1
_TRIES, _PAUSE_S = 100, 0.0005  # acquiring leases takes about 0.1 ms


def _has_byte_locks() -> bool:
    return sys.platform == "linux" and hasattr(fcntl, "F_OFD_SETLK")  # newer macOS has it with another struct flock


def _lock(kind: int, owner: int) -> bytes:
    """struct flock of Linux: kind, whence, first byte, length, process."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, owner, 1, 0)


def open_lock(directory: Path) -> int:
    """Opens the file of locks of a mirror, and creates it if needed."""
    return os.open(directory / "owners", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


class Leases:
    """One owner of leases, which expire when it is closed.

    Its lock belongs to the open file, not to the process, so one process can have several owners.
    """

    def __init__(self, directory: Path) -> None:
        """Opens the file of locks. Without locks on bytes, as on macOS, leases have no effect."""
        self.word = np.uint64(0)
        self._file = -1
        self._close: Callable[[], object] = lambda: None
        self._thread_lock = threading.Lock()  # threads of this owner share its open file, and so its locks
        try:
            self._file = open_lock(directory)
            self._close = close_with(self, self._file)
            if not _has_byte_locks():
                return
            owner = 1 + secrets.randbelow(_OWNERS)
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK, owner))
            self.word = np.uint64(LEASED | owner)
        except OSError as error:
            log.debug("cannot lease chunks in %s (%s)", directory, error)

    def alive(self, words: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which words of absent chunks are leases of a live owner, including this one."""
        alive: NDArray[np.bool_] = (words == self.word) & (words != 0)
        for word in np.unique(words[(words != 0) & ~alive]).tolist():
            alive |= (words == np.uint64(word)) & self._is_alive(word & _OWNERS)
        return alive

    def _is_alive(self, owner: int) -> bool:
        if not _has_byte_locks():
            return False
        try:
            answer = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK, owner))
        except OSError:
            return False
        return bool(struct.unpack("hhqqi4x", answer)[0] != fcntl.F_UNLCK)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keeps all other owners, in any process, from acquiring leases meanwhile.

        After 50 ms of waiting it goes ahead without the lock, so that a suspended process cannot block the others.
        """
        with self._thread_lock:
            self._try_lock()
            try:
                yield
            finally:
                with contextlib.suppress(OSError, ValueError):
                    fcntl.flock(self._file, fcntl.LOCK_UN)

    def _try_lock(self) -> None:
        for _ in range(_TRIES):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(_PAUSE_S)
            except (OSError, ValueError):  # no locks on this file system, or closed
                return

    def close(self) -> None:
        """Ends the owner; its leases expire, and others can acquire the chunks."""
        self._file = -1
        with contextlib.suppress(OSError):
            self._close()
