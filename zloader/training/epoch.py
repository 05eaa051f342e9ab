"""One epoch of a Loader as an iterator, the record of what it has yielded so far, and the count of epochs."""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from zloader.common.errors import ConcurrentUseError, OptionError
from zloader.common.records import Rows
from zloader.order.companions import Companions
from zloader.order.epochs import EpochCount
from zloader.order.plan import Plan, Remaining
from zloader.order.resume import Position
from zloader.reading.bridge import Bridge
from zloader.reading.recipe import Recipe
from zloader.reading.resources import Counters
from zloader.training.minibatch import Minibatch

log = logging.getLogger("zloader")


def worker_info() -> Any:
    """The DataLoader worker that this process is, with its `id` and `num_workers`; None outside of workers.

    torch is not imported: in a worker it is loaded.
    """
    return getattr(sys.modules.get("torch.utils.data"), "get_worker_info", lambda: None)()


@dataclass(frozen=True, kw_only=True, repr=False)
class Statistics:
    """Counters of the current epoch of a loader, or of its last one; returned by `Loader.statistics`.

    Attributes:
        epoch: The epoch counted.
        rows, minibatches: Rows, with their controls, and minibatches received by the consumer.
        fallback_controls: Control rows received that agree with their rows in the columns of a fallback only.
        gets: Ranged reads, including reads of shard indexes and retries.
        spans: Coalesced byte ranges of chunks.
        retries: Reads that were repeated after a failure.
        bytes_read: Stored bytes that the reads returned.
        chunks_decoded: Chunks read from the store and decoded.
        chunks_from_mirror, bytes_from_mirror: Blocks of rows, and their bytes, read from the mirror.
        in_flight_bytes, most_in_flight_bytes: Bytes being read now, and the highest value in the epoch.
        decode_s, gather_s: Seconds spent decoding and gathering, summed over threads.
        wait_s: Seconds that the consumer waited for minibatches.
        elapsed_s: Seconds from the first request for a minibatch to the last minibatch received.

    >>> loader = zl.Loader(dataset, batch_size=64)
    >>> for minibatch in loader:
    ...     pass
    >>> statistics = loader.statistics()
    >>> statistics  # doctest: +ELLIPSIS
    <Statistics of epoch 0: 300 rows in 5 minibatches, ... rows/s, waited ...%; ... GETs, ... MB read, ...>
    >>> statistics.bytes_read + statistics.bytes_from_mirror > 0, statistics.retries
    (True, 0)
    >>> statistics.flat("loader/")["loader/minibatches"]
    5
    """

    epoch: int
    rows: int
    minibatches: int
    fallback_controls: int
    gets: int
    spans: int
    retries: int
    bytes_read: int
    chunks_decoded: int
    chunks_from_mirror: int
    bytes_from_mirror: int
    in_flight_bytes: int
    most_in_flight_bytes: int
    decode_s: float
    gather_s: float
    wait_s: float
    elapsed_s: float

    def __repr__(self) -> str:
        return (
            f"<Statistics of epoch {self.epoch}: {self.rows:,} rows in {self.minibatches:,} minibatches, "
            f"{self.rows_per_s:,.0f} rows/s, waited {self.wait_share:.0%}; {self.gets:,} GETs, "
            f"{self.bytes_read / 1e6:,.1f} MB read, at most {self.most_in_flight_bytes / 1e6:,.1f} MB at once, "
            f"{self.retries:,} retries; {self.chunks_decoded:,} chunks decoded, "
            f"{self.chunks_from_mirror:,} from the mirror ({self.bytes_from_mirror / 1e6:,.1f} MB)>"
        )

    @property
    def rows_per_s(self) -> float:
        """Rows received per second of `elapsed_s`."""
        return self.rows / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def wait_share(self) -> float:
        """Share of `elapsed_s` that the consumer spent waiting, from 0 to 1."""
        return self.wait_s / self.elapsed_s if self.elapsed_s else 0.0

    def flat(self, prefix: str = "") -> dict[str, int | float]:
        """All figures by name, for loggers: the attributes, `rows_per_s` and `wait_share`."""
        figures = dataclasses.asdict(self) | {"rows_per_s": self.rows_per_s, "wait_share": self.wait_share}
        return {prefix + name: figure for name, figure in figures.items()}


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
    requests: int = 0  # for a minibatch
    rows: int = 0
    minibatches: int = 0
    companions: Companions | None = None
    fallback_controls: int = 0
    wait_s: float = 0.0
    elapsed_s: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    def received(self, index: Rows) -> None:
        """Counts a minibatch of the rows `index`, which are followed by their companions, if there are any."""
        self.rows += len(index)
        self.minibatches += 1
        if self.companions is not None:
            self.fallback_controls += self.companions.n_from_fallback(index)

    def position(self, unused: int = 0) -> Position:
        """The consumer's position in the epoch, before the last `unused` minibatches that it has received."""
        if not 0 <= unused <= self.minibatches:
            raise OptionError(f"{unused} minibatches cannot be unused of {self.minibatches} received")
        return self.begun_at.later(self.world_size, self.minibatches - unused)

    def statistics(self) -> Statistics:
        """The figures so far."""
        return Statistics(
            epoch=self.epoch,
            rows=self.rows,
            minibatches=self.minibatches,
            fallback_controls=self.fallback_controls,
            wait_s=self.wait_s,
            elapsed_s=self.elapsed_s,
            **vars(self.counters),
        )


class Progress:
    """How far a loader has come: which epoch comes next and where it begins, and the record of the one that began last.

    Copies and pickles of a loader count their epochs for themselves, except `in_workers`, those of DataLoader
    (order/epochs.py).
    """

    def __init__(self, *, in_workers: bool) -> None:
        self.record = EpochRecord(epoch=0)  # of the epoch that statistics describes
        self._epochs = EpochCount(in_workers=in_workers)
        self._worker_position: Position | None = None  # where this DataLoader worker, one of several, begins next
        self._current: EpochRecord | None = None  # of the epoch that a state describes; None before it begins
        self._beginning: Position | None = None  # of an epoch that has been counted, while it has no record yet

    def restart(self, position: Position) -> None:
        """Makes the next iteration start at `position`."""
        self._epochs.restart(position)
        self._worker_position = position if position.of_workers > 1 else None
        self._current = self._beginning = None

    def _next(self) -> Position:
        """The position at which the next iteration starts."""
        return self._worker_position or self._epochs.next()

    def position(self, unused: int) -> Position:
        """The consumer's position, before the last `unused` minibatches that it has received. Raises OptionError."""
        worker = worker_info()
        if worker is None and self._epochs.left_to_workers:
            raise OptionError(
                "DataLoader workers iterate, and this process does not know how many minibatches they have yielded: "
                "use num_workers=0, or torchdata's StatefulDataLoader"
            )
        current = self._current  # read once, because another thread may begin an epoch
        if current is None:
            return self._beginning or self._next()
        if current.finished and worker is None and not unused:
            return Position(epoch=current.epoch + 1)
        return current.position(unused)

    def begin(self, worker: Any) -> tuple[Position, Callable[[], None]]:
        """Counts an epoch. Returns where it starts, and what takes it off the count."""
        self._beginning = self._next()  # before it is counted, because another thread may ask for the state
        restored, self._worker_position = self._worker_position, None
        begun, ticket = self._epochs.begin(worker)
        uncount = functools.partial(self._epochs.give_back, ticket) if worker is None else _nothing
        return restored or begun, uncount

    def follow(self, record: EpochRecord) -> None:
        """States and statistics describe the epoch of this record from now on."""
        self.record = self._current = record


def _nothing() -> None:
    """A DataLoader worker that runs ahead cannot take back that it has begun."""


@dataclass(frozen=True, kw_only=True)
class EpochWork:
    """The part of an epoch that an iteration has to make: some fetches of a plan. `recipe` opens what they need."""

    plan: Plan
    remaining: Iterator[Remaining]  # computed one by one, because there may be millions
    recipe: Callable[..., Recipe]


# Begins the work. The bridge has the items that the recipe makes, in order; the counters grow meanwhile.
StartWork = Callable[[EpochWork], tuple[Bridge[Any], Counters]]


@dataclass(frozen=True, kw_only=True)
class RunningEpoch:
    """An epoch whose threads run.

    `convert` makes a minibatch of an item of `bridge`. `uncount` takes the epoch off the loader's count of epochs.
    """

    bridge: Bridge[Any]
    record: EpochRecord
    convert: Callable[[Any], Minibatch]
    uncount: Callable[[], None]


def _give_back(record: EpochRecord, uncount: Callable[[], None]) -> None:
    """Does not count an epoch of which the consumer has asked for the first minibatch only."""
    if record.requests <= 1 and not record.finished:
        uncount()


class EpochIterator(Iterator[Minibatch]):
    """The iterator over one epoch. The epoch begins with the first `next`. Dropping the iterator ends its threads.

    Taking one minibatch and dropping the iterator does not use up the epoch, so that one can look at a minibatch, and
    libraries can try whether they can iterate.
    """

    def __init__(self, begin: Callable[[], RunningEpoch]) -> None:
        self._begin: Callable[[], RunningEpoch] | None = begin
        self._epoch: RunningEpoch | None = None
        self._record: EpochRecord | None = None
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
        epoch = self._epoch or self._running()
        record = epoch.record
        record.requests += 1
        try:
            arrays = next(epoch.bridge)
            minibatch = epoch.convert(arrays)
        except StopIteration:
            record.finished = not self._closed
            log.debug("epoch ends: %r", record.statistics())
            raise
        except BaseException as error:
            self.close()  # a later next() raises StopIteration, but the epoch does not count as finished
            log.debug("epoch ends with %r: %r", error, record.statistics())
            raise
        finally:
            record.wait_s = epoch.bridge.wait_s
            record.elapsed_s = time.perf_counter() - record.started
        record.received(arrays.index)
        return minibatch

    def _running(self) -> RunningEpoch:
        if self._begin is None:  # another thread has closed it just now
            raise StopIteration
        epoch = self._begin()
        self._begin = None  # it refers to the loader
        self._dropped = weakref.finalize(self, _give_back, epoch.record, epoch.uncount)
        self._dropped.atexit = False
        self._epoch, self._record = epoch, epoch.record
        if self._closed:  # by another thread, meanwhile
            self.close()
        return epoch

    def close(self) -> None:
        """Ends the epoch and its threads now, as dropping the iterator does."""
        self._closed = True
        epoch, self._epoch = self._epoch, None  # minibatches that were made ahead are freed with it
        if epoch is not None:
            epoch.bridge.close()
            self._dropped()

    def state_dict(self) -> dict[str, bool]:
        """The part of the state that torchdata's StatefulDataLoader keeps per iterator."""
        return {"finished": self._record is not None and self._record.finished}

    def load_state_dict(self, state: Mapping[str, bool]) -> None:
        """Restores `state_dict`. StatefulDataLoader calls this on a new iterator.

        If the saved iterator was at its end, this one ends too, and the loader's state describes the next epoch.
        """
        if state["finished"] and worker_info() is None:
            self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "the iterator of a Loader cannot be copied or pickled, because it owns threads: pickle the Loader, or "
            "save its state_dict()"
        )
