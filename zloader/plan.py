"""Which rows each rank gets, fetch by fetch and minibatch by minibatch. Arithmetic without state. Pure.

The order of an epoch is cut into fetches of `batch_size * fetch_factor` rows, dealt round-robin to the ranks, then to
the workers of a rank. What is left after the last full round is shared out evenly, so that every rank yields the same
number of minibatches: with `drop_last=False` no row is lost for that (but for `batch_size=1`, where fewer than
`world_size` are); with `drop_last=True` fewer than `world_size * batch_size` are: those that come last in the order, so
others in each shuffled epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zloader.errors import OptionError
from zloader.sampling import Sampling, key_of, shuffled
from zloader.terms import Rows, require_count


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """The rows loaded together into one buffer, and the minibatches made of them.

    `rows` stand as they are read (block by block); row `i` of the minibatches laid end to end is `rows[order[i]]`, and
    minibatch k takes `order[cuts[k]:cuts[k + 1]]`.
    """

    number: int
    rows: Rows
    order: Rows
    cuts: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One epoch of one rank: a pure function of its fields to an ordered list of fetches."""

    dataset_rows: int
    sampling: Sampling
    batch_size: int
    fetch_factor: int
    seed: int = 0
    epoch: int = 0
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False

    def __post_init__(self) -> None:
        require_count(batch_size=self.batch_size, fetch_factor=self.fetch_factor, world_size=self.world_size)
        for name in ("seed", "epoch", "rank"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
                raise OptionError(f"{name} must be a whole number of at least 0, not {value!r}")
        # NumPy's integers overflow where Python's do not.
        for name in ("dataset_rows", "batch_size", "fetch_factor", "seed", "epoch", "rank", "world_size"):
            object.__setattr__(self, name, int(getattr(self, name)))
        if self.rank >= self.world_size:
            raise OptionError(f"rank {self.rank} does not exist in a world of {self.world_size}: ranks count from 0")
        block_size = getattr(self.sampling, "block_size", 1)
        if block_size > self.fetch_rows:
            raise OptionError(
                f"block_size {block_size} is larger than a fetch of batch_size {self.batch_size} x fetch_factor "
                f"{self.fetch_factor} = {self.fetch_rows} rows, so nothing would be shuffled across blocks: "
                "raise fetch_factor or lower block_size"
            )
        if self.n_rows < self.world_size:
            raise OptionError(f"{self.n_rows} rows cannot be shared out to {self.world_size} ranks")

    @property
    def fetch_rows(self) -> int:
        """Rows in a full fetch."""
        return self.batch_size * self.fetch_factor

    @property
    def sweeps(self) -> bool:
        """Whether this rank takes every row of the dataset in an epoch."""
        repeats = getattr(self.sampling, "repeats", False)
        return self.world_size == 1 and self.n_rows == self.dataset_rows and not repeats

    @property
    def n_rows(self) -> int:
        """Rows in the epoch, over all ranks."""
        return self.sampling.n_rows(self.dataset_rows)

    @property
    def _full_rounds(self) -> int:
        rounds, left = divmod(self.n_rows, self.world_size * self.fetch_rows)
        # A handful of rows too few for every rank to get one: they join the last full round.
        return rounds - (rounds > 0 and 0 < left < self.world_size)

    def _tail(self) -> tuple[int, int]:
        """Positions `[start, stop)` of this rank's share of what is left after the full rounds."""
        begin = self._full_rounds * self.world_size * self.fetch_rows
        share, extra = divmod(self.n_rows - begin, self.world_size)
        if self.drop_last or self.batch_size == 1:
            share, extra = share // self.batch_size * self.batch_size, 0
        start = begin + self.rank * share + min(self.rank, extra)
        return start, start + share + (self.rank < extra)

    def _tail_cuts(self) -> NDArray[np.int64]:
        """Where this rank's tail is cut into minibatches; every rank gets the same number of them."""
        start, stop = self._tail()
        cuts = np.arange(0, stop - start, self.batch_size, dtype=np.int64)
        if not self.drop_last and self.batch_size > 1:
            left = self.n_rows - self._full_rounds * self.world_size * self.fetch_rows
            most = -(-left // self.world_size)  # rows of the rank that has most
            # A rank whose share is one row less, and thereby one minibatch less, cuts its last minibatch in two.
            if -(-most // self.batch_size) > len(cuts):
                cuts = np.append(cuts, stop - start - 1)
        return np.append(cuts, stop - start)

    @property
    def n_fetches(self) -> int:
        """Fetches of this rank."""
        start, stop = self._tail()
        return self._full_rounds + (stop > start)

    @property
    def n_minibatches(self) -> int:
        """Minibatches that this rank yields: the same on every rank."""
        return self._full_rounds * self.fetch_factor + len(self._tail_cuts()) - 1

    def fetch(self, number: int) -> Fetch:
        """Fetch `number` (from 0) of this rank."""
        if number < self._full_rounds:
            dealt = number * self.world_size + self.rank
            start, stop = dealt * self.fetch_rows, (dealt + 1) * self.fetch_rows
            cuts = np.arange(0, self.fetch_rows + 1, self.batch_size, dtype=np.int64)
        else:
            dealt = self._full_rounds * self.world_size + self.rank
            start, stop = self._tail()
            cuts = self._tail_cuts()
        rows = self.sampling.rows(start, stop, dataset_rows=self.dataset_rows, seed=self.seed, epoch=self.epoch)
        if self.sampling.shuffles_fetch:
            order = shuffled(len(rows), key_of(self.seed, self.epoch, dealt))
        else:
            order = np.arange(len(rows), dtype=np.int64)
        return Fetch(number=number, rows=rows, order=order, cuts=cuts)

    def fetch_numbers(self, *, worker: int = 0, n_workers: int = 1) -> range:
        """The fetches of one of the rank's workers, in order."""
        return range(worker, self.n_fetches, n_workers)
