"""Leases on the blocks of a mirror: processes that fill it together read each block only once.

A lease is stored in the word of its block, where size and checksum will be later (rows_file.py). It has the number of
its owner. For its whole life, the owner holds a lock on the byte of that number in the file `owners`. The kernel
releases the lock when the owner's process ends for any reason, so its leases expire and others take over. Leases are
acquired under an exclusive flock of the same file, which is independent of locks on its bytes. Leases only save work
and are not needed for correctness: if two owners read a block after all, they write the same bytes.

Owners need locks that belong to an open file and cover one byte of it, which only Linux has (F_OFD_SETLK). Locks of
`lockf` belong to the process, and end when it closes the file anywhere. So on macOS no block is leased.
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

from zloader.common.file_systems import close_with

log = logging.getLogger("zloader")

LEASED = 1 << 63  # set in the word of a leased block; the low 31 bits are the owner's number
_OWNERS = (1 << 31) - 1
_TRIES, _PAUSE_S = 100, 0.0005  # acquiring leases takes about 0.1 ms


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
            self._file = os.open(directory / "owners", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            self._close = close_with(self, self._file)
            if sys.platform == "linux":  # newer macOS has F_OFD_SETLK with another struct flock
                owner = 1 + secrets.randbelow(_OWNERS)
                self._locks(fcntl.F_OFD_SETLK, owner)
                self.word = np.uint64(LEASED | owner)
        except OSError as error:
            log.debug("cannot lease blocks in %s (%s)", directory, error)

    def _locks(self, command: int, owner: int) -> int:
        """Asks for the lock on an owner's byte; returns its kind afterwards."""
        # struct flock of Linux: kind, whence, first byte, length, process
        flock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, owner, 1, 0)
        return int(struct.unpack("hhqqi4x", fcntl.fcntl(self._file, command, flock))[0])

    def alive(self, words: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which words of absent blocks are leases of a live owner, including this one."""
        leases = np.unique(words[words != 0]).tolist()
        return np.isin(words, np.array([word for word in leases if self._is_alive(word)], np.uint64))

    def _is_alive(self, word: int) -> bool:
        with contextlib.suppress(OSError, ValueError):  # closed
            own = word == int(self.word)
            return own or bool(self.word and self._locks(fcntl.F_OFD_GETLK, word & _OWNERS) != fcntl.F_UNLCK)
        return False

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keeps all other owners, in any process, from acquiring leases meanwhile.

        After 50 ms of waiting it goes ahead without the lock, so that a suspended process cannot block the others.
        """
        with self._thread_lock:
            for _ in range(_TRIES):
                try:
                    fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(_PAUSE_S)
                except (OSError, ValueError):  # no locks on this file system, or closed
                    break
            try:
                yield
            finally:
                with contextlib.suppress(OSError, ValueError):
                    fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Ends the owner; its leases expire, and others can acquire the blocks."""
        self._file = -1
        with contextlib.suppress(OSError):
            self._close()
