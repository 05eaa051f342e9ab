"""One epoch of a Loader as an iterator, and the record of what it has yielded so far."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

import torch.utils.data

from zloader.common.errors import ConcurrentUseError
from zloader.common.records import MinibatchArrays, Statistics
from zloader.order.epochs import EpochCount
from zloader.order.resume import Position
from zloader.reading.bridge import Bridge
from zloader.reading.resources import Counters
from zloader.training.minibatch import Minibatch

log = logging.getLogger("zloader")


@dataclass
class EpochRecord:
    """The state and figures of one epoch, during and after it.

    The Loader keeps the record. It holds no reference to the iterator's thread, so that the thread ends when the
    iterator is dropped.
    """

    epoch: int
    counters: Counters = field(default_factory=Counters)
    begun_at: Position = field(default_factory=lambda: Position(epoch=0))
    world_size: int = 1
    finished: bool = False
    rows: int = 0
    minibatches: int = 0
    wait_s: float = 0.0
    elapsed_s: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    @property
    def position(self) -> Position:
        """The consumer's position in the epoch."""
        return self.begun_at.later(self.world_size, self.minibatches)

    def statistics(self) -> Statistics:
        """The figures so far."""
        return Statistics(
            epoch=self.epoch,
            rows=self.rows,
            minibatches=self.minibatches,
            wait_s=self.wait_s,
            elapsed_s=self.elapsed_s,
            **vars(self.counters),
        )


class EpochIterator(Iterator[Minibatch]):
    """The iterator over one epoch. Dropping it ends its threads."""

    def __init__(
        self,
        bridge: Bridge[MinibatchArrays],
        record: EpochRecord,
        convert: Callable[[MinibatchArrays], Minibatch],
        epochs: EpochCount,
    ) -> None:
        self._bridge = bridge
        self._record = record
        self._convert = convert
        self._epochs = epochs
        self._closed = False
        self._in_use = threading.Lock()

    def __next__(self) -> Minibatch:
        if not self._in_use.acquire(blocking=False):
            raise ConcurrentUseError(
                "another thread is waiting for this iterator's next minibatch: only one thread at a time may call "
                "next(). Hold a lock around it, or have one thread hand the minibatches to the others"
            )
        try:
            return self._next()
        finally:
            self._in_use.release()

    def _next(self) -> Minibatch:
        if self._closed:
            raise StopIteration
        try:
            minibatch = self._convert(next(self._bridge))
        except StopIteration:
            self._record.finished = not self._closed
            log.debug("epoch ends: %r", self._record.statistics())
            raise
        except BaseException as error:
            self.close()  # a later next() raises StopIteration, but the epoch does not count as finished
            log.debug("epoch ends with %r: %r", error, self._record.statistics())
            raise
        finally:
            self._record.wait_s = self._bridge.wait_s
            self._record.elapsed_s = time.perf_counter() - self._record.started
        self._record.rows += len(minibatch)
        self._record.minibatches += 1
        return minibatch

    def close(self) -> None:
        """Ends the epoch and its threads now, as dropping the iterator does."""
        self._closed = True
        self._bridge.close()

    def state_dict(self) -> dict[str, bool]:
        """The part of the state that torchdata's StatefulDataLoader keeps per iterator."""
        return {"finished": self._record.finished}

    def load_state_dict(self, state: Mapping[str, bool]) -> None:
        """Restores `state_dict`. StatefulDataLoader calls this on an iterator that has just begun.

        If the saved iterator was at its end, this one ends too. It has already taken an epoch from the loader's count,
        so it gives that epoch back, and the loader's state describes the next epoch.
        """
        if state["finished"] and torch.utils.data.get_worker_info() is None:
            self.close()
            self._epochs.restart(self._record.begun_at)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "the iterator of a Loader cannot be copied or pickled, because it owns threads: pickle the Loader, or "
            "save its state_dict()"
        )
