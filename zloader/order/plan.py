"""The plan of an epoch: which rows each rank gets, fetch by fetch and minibatch by minibatch. Pure.

The order of an epoch is cut into fetches of `batch_size * fetch_factor` rows. Fetches are dealt round-robin to the
ranks, then to the workers of each rank. The rows after the last full round are divided evenly, so that every rank
yields the same number of minibatches:
- `drop_last=False` keeps every row. The exception is `batch_size=1`, which drops fewer than `world_size` rows.
- `drop_last=True` drops fewer than `world_size * batch_size` rows. They are the last rows of the order, so each
  shuffled epoch drops different rows.
- `remainder="pad"` fills every minibatch of every rank by repeating the first rows of the order.

A resumed run skips the minibatches that each rank has received (`Plan.fetches`). If the number of ranks has changed,
the rows not yet received form an order of their own (`Unseen`), which is dealt to the new ranks like any other order.

Planning a fetch costs time and memory in proportion to its rows, however many rows the dataset has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from zloader.common.checks import require_count, require_flag, require_one_of
from zloader.common.errors import OptionError
from zloader.common.records import Rows
from zloader.order.permutation import key_of, shuffled
from zloader.order.sampling import Sampling, require_rows, require_sampling, sized


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """The rows loaded into one buffer, and how they are cut into minibatches.

    `rows` are in read order, block by block. Minibatch k holds `rows[order[cuts[k] : cuts[k + 1]]]`.
    """

    number: int
    rows: Rows
    order: Rows
    cuts: NDArray[np.int64]

    def after(self, n_minibatches: int) -> Fetch:
        """The fetch without its first `n_minibatches` minibatches, and without the rows that only they use."""
        if not n_minibatches:
            return self
        cuts = self.cuts[n_minibatches:]
        order = self.order[cuts[0] :]
        used = np.sort(order)
        return Fetch(number=self.number, rows=self.rows[used], order=np.searchsorted(used, order), cuts=cuts - cuts[0])


@dataclass(frozen=True, kw_only=True, eq=False)
class Unseen:
    """The rest of an epoch as a sampling: the rows `first`, then the order of `sampling` from position `begin` on.

    It is valid only for the seed and the epoch from which `first` was computed.
    """

    sampling: Sampling
    first: Rows
    begin: int

    @property
    def shuffles_fetch(self) -> bool:
        """Whether the underlying sampling permutes the rows of each fetch."""
        return self.sampling.shuffles_fetch

    @property
    def block_size(self) -> int:
        """Block size of the underlying sampling. The rows `first` may begin and end within a block."""
        return int(getattr(self.sampling, "block_size", 1))

    def n_rows(self, dataset_rows: int) -> int:
        """Number of rows left in the epoch."""
        return len(self.first) + self.sampling.n_rows(dataset_rows) - self.begin

    def rows(self, start: int, stop: int, *, dataset_rows: int, seed: int, epoch: int) -> Rows:
        """The rows (int64) at positions `[start, stop)` in the rest of the epoch."""
        shift = self.begin - len(self.first)
        begin, end = max(start + shift, self.begin), stop + shift
        if begin >= end:
            return self.first[start:stop]
        rest = self.sampling.rows(begin, end, dataset_rows=dataset_rows, seed=seed, epoch=epoch)
        return np.concatenate([self.first[start:stop], rest])


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One epoch of one rank: maps the options below to an ordered list of fetches. Raises OptionError."""

    dataset_rows: int
    sampling: Sampling
    batch_size: int
    fetch_factor: int
    seed: int = 0
    epoch: int = 0
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False
    remainder: Literal["drop", "pad"] = "drop"

    def __post_init__(self) -> None:
        require_count(batch_size=self.batch_size, fetch_factor=self.fetch_factor, world_size=self.world_size)
        for name in ("seed", "epoch", "rank"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
                raise OptionError(f"{name} must be a whole number of at least 0, not {value!r}")
        # NumPy integers overflow; Python integers do not.
        for name in ("dataset_rows", "batch_size", "fetch_factor", "seed", "epoch", "rank", "world_size"):
            object.__setattr__(self, name, int(getattr(self, name)))
        require_sampling(self.sampling)
        object.__setattr__(self, "sampling", sized(self.sampling, self.fetch_rows))
        if self.rank >= self.world_size:
            raise OptionError(
                f"rank {self.rank} does not exist in a world of {self.world_size}: ranks are numbered from 0"
            )
        block_size = getattr(self.sampling, "block_size", 1)
        if block_size > self.fetch_rows:
            raise OptionError(
                f"block_size {block_size} is larger than a fetch of batch_size {self.batch_size} x fetch_factor "
                f"{self.fetch_factor} = {self.fetch_rows} rows, so nothing would be shuffled across blocks: "
                "raise fetch_factor or lower block_size"
            )
        require_one_of(["drop", "pad"], remainder=self.remainder)
        require_flag(drop_last=self.drop_last)
        if self.pads and self.drop_last:
            raise OptionError(
                "remainder='pad' and drop_last=True exclude each other, because padding leaves no smaller minibatch: "
                "set one of them"
            )
        rest = isinstance(self.sampling, Unseen)  # may have fewer rows than ranks, which are then left out
        if self.n_rows < (1 if self.pads else self.world_size) and not rest:
            if not self.n_rows:
                raise OptionError("there are 0 rows to load: the dataset, view or sampling is empty")
            raise OptionError(
                f"{self.n_rows} rows cannot be divided among {self.world_size} ranks: use fewer ranks or "
                "remainder='pad'"
            )

    @property
    def fetch_rows(self) -> int:
        """Rows in a full fetch."""
        return self.batch_size * self.fetch_factor

    @property
    def pads(self) -> bool:
        """Whether rows are repeated so that every minibatch is full."""
        return self.remainder == "pad"

    @property
    def sweeps(self) -> bool:
        """Whether this rank reads every row of the dataset in an epoch."""
        repeats = getattr(self.sampling, "repeats", False)
        return self.world_size == 1 and self.n_rows == self.dataset_rows and not repeats

    @property
    def n_rows(self) -> int:
        """Rows per epoch over all ranks."""
        return self.sampling.n_rows(self.dataset_rows)

    @property
    def _full_rounds(self) -> int:
        rounds, left = divmod(self.n_rows, self.world_size * self.fetch_rows)
        # If fewer rows are left than there are ranks, the tail includes the last full round.
        return rounds - (rounds > 0 and 0 < left < self.world_size and not self.pads)

    def _tail(self) -> tuple[int, int]:
        """Positions `[start, stop)` of this rank's share of the rows after the full rounds.

        With padding, positions from `n_rows` on stand for the first rows again.
        """
        begin = self._full_rounds * self.world_size * self.fetch_rows
        left = self.n_rows - begin
        share, extra = divmod(left, self.world_size)
        if self.pads:
            share, extra = -(-left // (self.world_size * self.batch_size)) * self.batch_size, 0
        elif self.drop_last or self.batch_size == 1 or left < self.world_size:
            share, extra = share // self.batch_size * self.batch_size, 0
        start = begin + self.rank * share + min(self.rank, extra)
        return start, start + share + (self.rank < extra)

    def _tail_cuts(self) -> NDArray[np.int64]:
        """The cuts of this rank's tail into minibatches. Every rank gets the same number of minibatches."""
        start, stop = self._tail()
        cuts = np.arange(0, stop - start, self.batch_size, dtype=np.int64)
        if not self.drop_last and not self.pads and self.batch_size > 1 and stop > start:
            left = self.n_rows - self._full_rounds * self.world_size * self.fetch_rows
            largest = -(-left // self.world_size)  # rows of the rank with the largest share
            # If a share is one row smaller and therefore one minibatch short, its last minibatch is cut in two.
            if -(-largest // self.batch_size) > len(cuts):
                cuts = np.append(cuts, stop - start - 1)
        return np.append(cuts, stop - start)

    @property
    def n_fetches(self) -> int:
        """Fetches of this rank."""
        start, stop = self._tail()
        return self._full_rounds + (stop > start)

    @property
    def n_minibatches(self) -> int:
        """Minibatches of this rank, which is the same number on every rank."""
        return self._full_rounds * self.fetch_factor + len(self._tail_cuts()) - 1

    def _span(self, number: int) -> tuple[int, int]:
        """Positions `[start, stop)` of a fetch."""
        if number >= self._full_rounds:
            return self._tail()
        start = (number * self.world_size + self.rank) * self.fetch_rows
        return start, start + self.fetch_rows

    def _cuts(self, number: int) -> NDArray[np.int64]:
        if number >= self._full_rounds:
            return self._tail_cuts()
        return np.arange(0, self.fetch_rows + 1, self.batch_size, dtype=np.int64)

    def _order(self, number: int, n_rows: int) -> Rows:
        """The permutation in which a fetch yields its rows."""
        if not self.sampling.shuffles_fetch:
            return np.arange(n_rows, dtype=np.int64)
        dealt = min(number, self._full_rounds) * self.world_size + self.rank
        return shuffled(n_rows, key_of(self.seed, self.epoch, dealt))

    def _rows(self, start: int, stop: int) -> Rows:
        """The rows at positions `[start, stop)`. With padding, positions wrap around after the last row."""
        pieces: list[Rows] = []
        n_rows = self.n_rows
        while start < stop or not pieces:
            first = start % n_rows if self.pads else start
            size = min(stop - start, n_rows - first)
            rows = self.sampling.rows(
                first, first + size, dataset_rows=self.dataset_rows, seed=self.seed, epoch=self.epoch
            )
            require_rows(rows, self.sampling, first, first + size, self.dataset_rows)
            pieces.append(rows)
            start += size
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def fetch(self, number: int) -> Fetch:
        """Fetch `number` of this rank, counted from 0."""
        rows = self._rows(*self._span(number))
        return Fetch(number=number, rows=rows, order=self._order(number, len(rows)), cuts=self._cuts(number))

    def fetch_numbers(self, *, worker: int = 0, n_workers: int = 1) -> range:
        """The fetches of one of the rank's workers, in order."""
        return range(worker, self.n_fetches, n_workers)

    def fetches(self, *, done: int = 0, worker: int = 0, n_workers: int = 1, skip: int = 0) -> Iterator[Fetch]:
        """The fetches of one of the rank's workers that remain, in order.

        Skips the first `done` minibatches of the rank, deals the remaining fetches to the workers, and then skips the
        first `skip` minibatches of this worker. Rows that only skipped minibatches use are left out.
        """
        first, received = self._fetch_of(done)
        for number in range(first, self.n_fetches)[worker::n_workers]:
            begin = received if number == first else 0
            size = len(self._cuts(number)) - 1 - begin
            if skip < size:
                yield self.fetch(number).after(begin + skip)
            skip = max(0, skip - size)

    def _fetch_of(self, minibatch: int) -> tuple[int, int]:
        """The number of the fetch that holds a minibatch of this rank, and the minibatch's number within the fetch."""
        number = min(minibatch // self.fetch_factor, self._full_rounds)
        return number, minibatch - number * self.fetch_factor

    def unseen(self, done: int) -> Unseen:
        """The rows that no rank has received after the first `done` minibatches of each rank."""
        number, received = self._fetch_of(done)
        ranks = [replace(self, rank=rank) for rank in range(self.world_size)]
        begin = ranks[0]._span(number)[0]
        if not received:
            return Unseen(sampling=self.sampling, first=np.empty(0, np.int64), begin=begin)
        left, repeated = [], []
        for rank in ranks:
            start, stop = rank._span(number)
            positions, cut = start + rank._order(number, stop - start), rank._cuts(number)[received]
            repeated.append(positions[:cut][positions[:cut] >= self.n_rows] % self.n_rows)
            left.append(np.sort(positions[cut:][positions[cut:] < self.n_rows]))  # later positions are padding
        end = min(stop, self.n_rows)
        unseen = np.concatenate(left)
        unseen = unseen[~np.isin(unseen, np.concatenate(repeated))]  # if one fetch is longer than the epoch
        first = self._rows(begin, end)[unseen - begin]
        return Unseen(sampling=self.sampling, first=first, begin=end)
