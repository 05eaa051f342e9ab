"""The plan of an epoch: which rows each rank gets, fetch by fetch and minibatch by minibatch. Pure.

The order of an epoch is cut into rounds of one fetch per rank. The fetches of a rank are dealt round-robin to its
workers. A fetch has at most `fetch_factor` minibatches. There are as few rounds as that allows, and they are equally
long, so that the last fetch mixes as many blocks as the others. They differ by at most one minibatch. If a full fetch
holds whole blocks, all fetches do, and then they may differ by a block.

The last round gets the rows that do not fill a minibatch on every rank. Its rows are divided evenly, so that every rank
yields the same number of minibatches:
- `drop_last=False` keeps every row. The exception is `batch_size=1`, which drops fewer than `world_size` rows.
- `drop_last=True` drops fewer than `world_size * batch_size` rows. They are the last rows of the order, so each
  shuffled epoch drops different rows.

A resumed run skips the minibatches that each rank has received (`Plan.fetches`). If the number of ranks has changed,
the rows not yet received form an order of their own, which is dealt to the new ranks like any other order.

An order of sets has units of several rows that no minibatch divides. Then all of this holds with units for rows.

Planning a fetch costs time and memory in proportion to its rows, however many rows the dataset has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from zloader.common.checks import require_count, require_flag, require_natural
from zloader.common.errors import OptionError
from zloader.common.locks import cached_property
from zloader.common.records import Rows
from zloader.order.permutation import key_of, shuffled
from zloader.order.sampling import Order


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """The rows loaded into one buffer, and how they are cut into minibatches.

    `rows` are in read order, block by block. Minibatch k holds `rows[order[cuts[k] : cuts[k + 1]]]`. `sets` has the
    number of the set of each row, if the sampling has sets.
    """

    number: int
    rows: Rows
    order: Rows
    cuts: NDArray[np.int64]
    sets: Rows | None = None

    def after(self, n_minibatches: int) -> Fetch:
        """The fetch without its first `n_minibatches` minibatches, and without the rows that only they use."""
        if not n_minibatches:
            return self
        cuts = self.cuts[n_minibatches:]
        order = self.order[cuts[0] :]
        used = np.sort(order)
        return Fetch(
            number=self.number,
            rows=self.rows[used],
            order=np.searchsorted(used, order),
            cuts=cuts - cuts[0],
            sets=None if self.sets is None else self.sets[used],
        )


class AddsRows(Protocol):
    """Adds companions of the rows to the minibatches of a fetch, such as controls."""

    def added(self, fetch: Fetch, *, seed: int, epoch: int) -> Fetch:
        """The fetch with the companions of each minibatch after its rows."""


class Remaining(NamedTuple):
    """The minibatches of fetch `number` that remain: `size` of them, from the fetch's minibatch `begin` on."""

    number: int
    begin: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One epoch of one rank: maps the options below to an ordered list of fetches. Raises OptionError.

    With `companions`, each minibatch is followed by those of its rows.
    """

    order: Order
    batch_size: int
    fetch_factor: int
    seed: int = 0
    epoch: int = 0
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False
    companions: AddsRows | None = None

    def __post_init__(self) -> None:
        require_count(batch_size=self.batch_size, fetch_factor=self.fetch_factor, world_size=self.world_size)
        require_natural(seed=self.seed, epoch=self.epoch, rank=self.rank)
        require_flag(drop_last=self.drop_last)
        for name in ("batch_size", "fetch_factor", "seed", "epoch", "rank", "world_size"):
            object.__setattr__(self, name, int(getattr(self, name)))  # NumPy integers overflow
        if self.rank >= self.world_size:
            raise OptionError(
                f"rank {self.rank} does not exist in a world of {self.world_size}: ranks are numbered from 0"
            )
        if self.order.block_size > self.fetch_rows:
            raise OptionError(
                f"block_size {self.order.block_size} is larger than a fetch of batch_size {self.batch_size} x "
                f"fetch_factor {self.fetch_factor} = {self.fetch_rows} rows, so nothing would be shuffled across "
                "blocks: raise fetch_factor or lower block_size"
            )
        if self._n_units < self.world_size and not self.order.is_rest:
            if not self.n_rows:
                raise OptionError("there are 0 rows to load: the dataset, view or sampling is empty")
            unit = self.order.unit
            units = f"{self.n_rows} rows" if unit == 1 else f"{self._n_units} units of {unit} rows"
            raise OptionError(f"{units} cannot be divided among {self.world_size} ranks: use fewer ranks")

    @property
    def fetch_rows(self) -> int:
        """The most rows in a fetch."""
        return self.batch_size * self.fetch_factor

    @property
    def n_rows(self) -> int:
        """Rows per epoch over all ranks."""
        return self.order.n_rows

    @property
    def sweeps(self) -> bool:
        """Whether this rank reads all rows of the dataset in an epoch."""
        return self.world_size == 1 and self.n_rows == self.order.dataset_rows and not self.order.repeats

    @property
    def _n_units(self) -> int:
        """Units per epoch over all ranks."""
        return self.n_rows // self.order.unit

    @property
    def _minibatch_units(self) -> int:
        """Units in a full minibatch."""
        return self.batch_size // self.order.unit

    @property
    def _all_full(self) -> bool:
        """Whether every minibatch has `batch_size` rows."""
        return self.drop_last or self._minibatch_units == 1

    @property
    def _round_units(self) -> int:
        """Units in one full minibatch of every rank."""
        return self.world_size * self._minibatch_units

    @cached_property
    def n_minibatches(self) -> int:
        """Minibatches of this rank, which is the same number on every rank."""
        full, left = divmod(self._n_units, self._round_units)
        dropped = self._all_full or self._n_units < self.world_size
        return full + (left > 0 and not dropped)

    @cached_property
    def _n_spread(self) -> int:
        """The minibatches of this rank that are spread over the fetches.

        If fewer units are left for the last minibatches than there are ranks, the last fetch gets them in addition.
        """
        left = self._n_units % self._round_units
        return self.n_minibatches - (not self._all_full and 0 < left < self.world_size < self._n_units)

    @property
    def _step(self) -> int:
        """Fetches begin at multiples of this many minibatches. These are whole blocks if those of a full fetch are."""
        block_size = self.order.block_size
        step = block_size // math.gcd(block_size, self.batch_size)
        return 1 if self.fetch_factor % step else step

    @cached_property
    def n_fetches(self) -> int:
        """Fetches of this rank."""
        return -(-self._n_spread // self.fetch_factor)

    def _first_minibatch(self, number: int) -> int:
        """The number within the rank of the first minibatch of a fetch."""
        if number >= self.n_fetches:
            return self.n_minibatches
        n_steps = -(-self._n_spread // self._step)
        return number * n_steps // self.n_fetches * self._step

    def _fetch_of(self, minibatch: int) -> tuple[int, int]:
        """The number of the fetch that holds a minibatch of this rank, and the minibatch's number within the fetch."""
        if minibatch >= self.n_minibatches:
            return self.n_fetches, 0
        n_steps = -(-self._n_spread // self._step)
        number = min(((minibatch // self._step + 1) * self.n_fetches - 1) // n_steps, self.n_fetches - 1)
        return number, minibatch - self._first_minibatch(number)

    def _size(self, number: int) -> int:
        """Minibatches in a fetch."""
        return self._first_minibatch(number + 1) - self._first_minibatch(number)

    def _span(self, number: int) -> tuple[int, int]:
        """Positions `[start, stop)` of a fetch in the order of the epoch."""
        start, extra = self._first_minibatch(number) * self._round_units, 0
        share = self._size(number) * self._minibatch_units
        if number == self.n_fetches - 1 and not self._all_full:
            share, extra = divmod(self._n_units - start, self.world_size)
        start += self.rank * share + min(self.rank, extra)
        return start * self.order.unit, (start + share + (self.rank < extra)) * self.order.unit

    def _cuts(self, number: int) -> NDArray[np.int64]:
        """The cuts of a fetch into minibatches. Every rank gets the same number of minibatches."""
        start, stop = self._span(number)
        cuts = np.arange(0, stop - start, self.batch_size, dtype=np.int64)
        # If a share is one unit smaller and therefore one minibatch short, its last minibatch is cut in two.
        if len(cuts) < self._size(number):
            cuts = np.append(cuts, stop - start - self.order.unit)
        return np.append(cuts, stop - start)

    def _permutation(self, number: int, n_rows: int) -> Rows:
        """The permutation in which a fetch yields its rows."""
        if not self.order.shuffles_fetch:
            return np.arange(n_rows, dtype=np.int64)
        return shuffled(n_rows, key_of(self.seed, self.epoch, number * self.world_size + self.rank))

    def n_positions(self, number: int) -> int:
        """The rows of a fetch without their companions."""
        start, stop = self._span(number)
        return stop - start

    def fetch(self, number: int) -> Fetch:
        """Fetch `number` of this rank, counted from 0."""
        rows = self.order.rows(*self._span(number), seed=self.seed, epoch=self.epoch)
        set_size = self.order.set_size
        fetch = Fetch(
            number=number,
            rows=rows,
            order=self._permutation(number, len(rows)),
            cuts=self._cuts(number),
            sets=None if set_size is None else np.arange(len(rows)) // set_size,
        )
        return fetch if self.companions is None else self.companions.added(fetch, seed=self.seed, epoch=self.epoch)

    def fetch_numbers(self, *, worker: int = 0, n_workers: int = 1) -> range:
        """The fetches of one of the rank's workers, in order."""
        return range(worker, self.n_fetches, n_workers)

    def remaining(self, *, done: int = 0, worker: int = 0, n_workers: int = 1, skip: int = 0) -> Iterator[Remaining]:
        """What remains of the fetches of one of the rank's workers, in order.

        Skips the first `done` minibatches of the rank, deals the remaining fetches to the workers, and then skips the
        first `skip` minibatches of this worker.
        """
        first, received = self._fetch_of(done)
        for number in range(first, self.n_fetches)[worker::n_workers]:
            begin = received if number == first else 0
            size = self._size(number) - begin
            if skip < size:
                yield Remaining(number, begin + skip, size - skip)
            skip = max(0, skip - size)

    def rest_of(self, remaining: Remaining) -> Fetch:
        """What remains of a fetch, without the rows that only the other minibatches use."""
        return self.fetch(remaining.number).after(remaining.begin)

    def fetches(self, *, done: int = 0, worker: int = 0, n_workers: int = 1, skip: int = 0) -> Iterator[Fetch]:
        """What `remaining` names, as fetches."""
        return map(self.rest_of, self.remaining(done=done, worker=worker, n_workers=n_workers, skip=skip))

    def rest(self, done: int) -> Order:
        """The rows that no rank has received after the first `done` minibatches of each rank, as an order.

        It is valid for the seed and the epoch of this plan.
        """
        number, received = self._fetch_of(done)
        ranks = [replace(self, rank=rank) for rank in range(self.world_size)]
        begin = end = min(ranks[0]._span(number)[0], self.n_rows)
        first = np.empty(0, np.int64)
        if received:
            left = []
            for rank in ranks:
                start, end = rank._span(number)
                left.append(np.sort(start + rank._permutation(number, end - start)[rank._cuts(number)[received] :]))
            rows = self.order.rows(begin, end, seed=self.seed, epoch=self.epoch)
            first = rows[np.concatenate(left) - begin]
        n_rows = len(first) + self.n_rows - end
        return replace(self.order, n_rows=n_rows, draw=partial(_rest, self.order, first, end), is_rest=True)


def _rest(order: Order, first: Rows, begin: int, start: int, stop: int, seed: int, epoch: int) -> Rows:
    """The rows at positions of the rest of an epoch: the rows `first`, and then those of `order` from `begin` on."""
    later = begin - len(first)  # how much later `order` has a position
    if stop + later <= begin:
        return first[start:stop]
    return np.concatenate(
        [first[start:stop], order.rows(max(begin, start + later), stop + later, seed=seed, epoch=epoch)]
    )
