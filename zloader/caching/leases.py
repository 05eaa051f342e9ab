"""Who is bringing which chunks into a mirror, so that processes which fill it together read each chunk once.

A claim is a word in the place where a chunk's checksum will stand (mirror.py), and names its owner: a number that the
owner holds a lock on in the file `owners`, for as long as it lives. The kernel releases the lock when the owner ends,
however it ends; its claims then count for nothing. Owners look and claim one after another (`alone`). Leases only save
work: where two bring a chunk after all, they write the same bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger("zloader")

CLAIMED = 1 << 33  # set in the word of a chunk that somebody is bringing; below it stands the owner's number
_OWNERS = (1 << 31) - 1
_TRIES, _PAUSE_S = 100, 0.0005  # looking and claiming takes a tenth of a millisecond


def _lock(kind: int, owner: int) -> bytes:
    """struct flock of <fcntl.h>: kind, whence, first byte, length, process."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, owner, 1, 0)


class Leases:
    """One owner of claims, alive until closed. Its locks belong to the open file, so that threads have their own."""

    def __init__(self, directory: Path) -> None:
        """Without locks (some network file systems have none) nobody's claims count."""
        self.word = np.uint64(0)
        self._file = -1
        self._turn = threading.Lock()  # of this owner's threads, which share its open file and thereby its locks
        try:
            self._file = os.open(directory / "owners", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            owner = 1 + secrets.randbelow(_OWNERS)
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK, owner))
            self.word = np.uint64(CLAIMED | owner)
        except OSError as error:
            log.debug("cannot claim chunks in %s (%s)", directory, error)

    def alive(self, words: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which of these words, none of a chunk that is there, are claims of owners that live; this one's are."""
        alive: NDArray[np.bool_] = (words == self.word) & (words != 0)
        for word in np.unique(words[(words != 0) & ~alive]).tolist():
            alive |= (words == np.uint64(word)) & self._lives(word & _OWNERS)
        return alive

    def _lives(self, owner: int) -> bool:
        try:
            answer = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK, owner))
        except OSError:
            return False
        return bool(struct.unpack("hhqqi4x", answer)[0] != fcntl.F_UNLCK)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """No other owner, in whichever process, looks for what to claim meanwhile.

        Not for ever: a process that was stopped in the midst of it would stop all others.
        """
        with self._turn:
            self._take_turn()
            try:
                yield
            finally:
                with contextlib.suppress(OSError, ValueError):
                    fcntl.flock(self._file, fcntl.LOCK_UN)

    def _take_turn(self) -> None:
        for _ in range(_TRIES):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(_PAUSE_S)
            except (OSError, ValueError):  # no locks here, or closed
                return

    def close(self) -> None:
        """Ends the owner: what it has claimed and not brought, others bring."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.close()
