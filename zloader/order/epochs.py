"""Counts the iterations of a loader across this process and its DataLoader workers."""

from __future__ import annotations

import os
import threading
import zlib
from typing import Any, TypeAlias

import numpy as np

from zloader.common.errors import OptionError
from zloader.order.resume import MAX_STRETCHES, Position, Stretch

_MAX_WORKERS = 1024
_NUMBERS = len(Stretch._fields)
_WORD = 1 << 24  # maximum number of epochs counted
Ticket: TypeAlias = tuple[int, int]  # of an iteration: its process, and its number there


class EpochCount:
    """Gives each iteration its epoch: one more than the last iteration in any process.

    The count is in shared memory if there may be iterations `in_workers`, so that this process and the DataLoader
    workers of all iterations agree.
    """

    def __init__(self, *, in_workers: bool) -> None:
        length = 1 + 2 * (1 + _MAX_WORKERS) + _NUMBERS * MAX_STRETCHES
        if in_workers:
            import torch

            self._memory: Any = torch.zeros(length, dtype=torch.int64)  # whose pickles in other processes share it
        else:
            self._memory = np.zeros(length, np.int64)
        self._iterations = 0  # in this process
        self._share()

    def __getstate__(self) -> dict[str, Any]:
        return {"_memory": self._memory, "_iterations": self._iterations}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._share()

    def _share(self) -> None:
        """Moves a tensor to shared memory. Copies and ordinary pickles get memory of their own and count separately."""
        # Reentrant, because garbage collection may drop an iterator on a thread that is just beginning another.
        self._lock = threading.RLock()
        self._last: Ticket | None = None  # of the iteration that began last; None after a restart
        numbers = self._memory
        if not isinstance(numbers, np.ndarray):
            numbers = numbers.share_memory_().numpy()
        # The epoch of the first iteration counted; then one word and one process id for this process and for each
        # worker number. The low bits of a word hold the number of epochs started so far. Its high bits hold a key that
        # all workers of an iteration share. Both are stored in one write, so workers that start together agree. Then
        # the part of the first epoch already received: the numbers of each Stretch, flattened.
        ends = np.cumsum([1, 1 + _MAX_WORKERS, 1 + _MAX_WORKERS])
        self._first, self._words, self._pids, self._stretches = np.split(numbers, ends)

    def restart(self, position: Position) -> None:
        """Makes the next iteration start at `position`."""
        if position.epoch >= 1 << 62:
            raise OptionError(f"epoch {position.epoch} is too large: it must be below 2**62")
        flat = [number for stretch in position.stretches for number in stretch]
        with self._lock:
            # One write, because workers that get the same position later may already be reading.
            self._stretches[:] = flat + [0] * (_NUMBERS * MAX_STRETCHES - len(flat))
            self._first[0] = position.epoch
            self._words[:] = 0
            self._last = None

    def give_back(self, ticket: Ticket) -> None:
        """Uncounts an iteration of this process, unless another one has begun since, here or in a worker.

        Does nothing in a forked child that has inherited the ticket.
        """
        with self._lock:
            if ticket == self._last and ticket[0] == os.getpid() and int(self._words[0]) == self._begun():
                self._words[0] -= 1
                self._last = None

    def next(self) -> Position:
        """The position at which the next iteration starts."""
        return self._position(self._begun() + 1)

    @property
    def left_to_workers(self) -> bool:
        """Whether the last iteration ran in DataLoader workers rather than in this process."""
        return self._begun() > int(self._words[0]) % _WORD

    def _begun(self) -> int:
        return max(int(word) % _WORD for word in self._words.tolist())

    def _position(self, begun: int) -> Position:
        epoch = int(self._first[0]) + begun - 1
        if begun > 1:
            return Position(epoch=epoch)
        stretches = [Stretch(*each) for each in self._stretches.reshape(-1, _NUMBERS).tolist() if each[0]]
        return Position(epoch=epoch, stretches=tuple(stretches))

    def begin(self, worker: Any) -> tuple[Position, Ticket]:
        """Starts an iteration in this process or in a DataLoader `worker`. Returns its position and its ticket."""
        with self._lock:
            slot, key = (0, 0) if worker is None else (worker.id + 1, self._key(worker))
            if slot > _MAX_WORKERS:
                raise OptionError(
                    f"at most {_MAX_WORKERS} workers can share a loader: lower num_workers. Loaders are fastest with 0"
                )
            self._iterations += 1
            begun = self._turn(slot, key)
            self._pids[slot] = os.getpid()
            self._words[slot] = key * _WORD + begun
            self._last = os.getpid(), self._iterations
            return self._position(begun), self._last

    def _turn(self, slot: int, key: int) -> int:
        """The number, from 1, of the iteration that `slot` begins: its fellow workers' if they have begun it."""
        words = [divmod(int(word), _WORD) for word in self._words.tolist()]
        for other, (others_key, count) in enumerate(words):
            # The key repeats if torch is seeded identically before each epoch. The workers that stored it before have
            # then exited, so only the words of live processes count.
            if key and others_key == key and other != slot and _is_alive(int(self._pids[other])):
                return count
        return 1 + max(count for _, count in words)

    def _key(self, worker: Any) -> int:
        return 1 + zlib.crc32(f"{worker.seed - worker.id} {self._iterations}".encode())


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
