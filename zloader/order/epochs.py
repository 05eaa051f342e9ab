"""How the iterations of one loader are counted, in whichever processes they run."""

from __future__ import annotations

import os
import zlib
from typing import Any

import torch

from zloader.common.errors import OptionError
from zloader.order.resume import MOST_STRETCHES, Position

_MOST_WORKERS = 1024
_WORD = 1 << 24  # epochs that a loader can count


class EpochCount:
    """Which epoch an iteration is: one more than the last, whichever processes took part in that.

    Kept in shared memory, so that this process and DataLoader workers, of this iteration and of others, agree.
    """

    def __init__(self) -> None:
        # The epoch that the count began at; then for this process and each worker number a word and a process id. A
        # word holds the epochs begun so far in its low bits and above them a key that all workers of an iteration
        # share: stored at once, so that those who begin together find the same.
        self._first = torch.zeros(1, dtype=torch.int64)
        self._words = torch.zeros(1 + _MOST_WORKERS, dtype=torch.int64)
        self._pids = torch.zeros(1 + _MOST_WORKERS, dtype=torch.int64)
        # What of that first epoch has been received: a world size and minibatches of each rank, one after the other.
        self._stretches = torch.zeros(2 * MOST_STRETCHES, dtype=torch.int64)
        self._iterations = 0  # of this process
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._share()

    def _share(self) -> None:
        """Of a copy or an ordinary pickle too, which counts for itself; what is shared already stays as it is."""
        for tensor in (self._first, self._words, self._pids, self._stretches):
            tensor.share_memory_()  # type: ignore[no-untyped-call]

    def restart(self, position: Position) -> None:
        """Makes the next iteration the epoch of `position`, from there on."""
        if position.epoch >= 1 << 62:
            raise OptionError(f"epoch {position.epoch} is more than a loader can count to")
        flat = [number for stretch in position.stretches for number in stretch]
        # At once: workers that are told the same one after the other read meanwhile.
        self._stretches.copy_(torch.tensor(flat + [0] * (2 * MOST_STRETCHES - len(flat))))
        self._first[0] = position.epoch
        self._words.zero_()

    def next(self) -> Position:
        """Where an iteration would begin now."""
        return self._position(self._begun() + 1)

    @property
    def left_to_workers(self) -> bool:
        """Whether the last iteration was one of DataLoader workers, not of this process."""
        return self._begun() > int(self._words[0]) % _WORD

    def _begun(self) -> int:
        return max(int(word) % _WORD for word in self._words.tolist())

    def _position(self, begun: int) -> Position:
        epoch = int(self._first[0]) + begun - 1
        if begun > 1:
            return Position(epoch=epoch)
        stretches = [(size, done) for size, done in self._stretches.view(-1, 2).tolist() if size]
        return Position(epoch=epoch, stretches=tuple(stretches))

    def begin(self, worker: Any) -> Position:
        """Where an iteration begins that does so now, in this process or in a DataLoader `worker`."""
        slot, key = (0, 0) if worker is None else (worker.id + 1, self._key(worker))
        if slot > _MOST_WORKERS:
            raise OptionError(f"at most {_MOST_WORKERS} workers can share a loader; use fewer, best none")
        self._iterations += 1
        words = [divmod(word, _WORD) for word in self._words.tolist()]
        begun: int = 1 + max(count for _, count in words)
        for other, (others_key, count) in enumerate(words):
            # Who seeds torch alike before each epoch gives the same key again: then those who left it are gone.
            if key and others_key == key and other != slot and _is_alive(int(self._pids[other])):
                begun = count
        self._pids[slot] = os.getpid()
        self._words[slot] = key * _WORD + begun
        return self._position(begun)

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
