"""A sampling by sequential scanners that take turns. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from zloader.common.checks import require_count
from zloader.common.errors import OptionError
from zloader.common.records import Rows
from zloader.order.permutation import key_of, words_at
from zloader.order.sampling import DEFAULT_BLOCK_SIZE, Subset, checked_once


@dataclass(frozen=True, eq=False)
class MixtureOfScanners(Subset):
    """Sequential scanners that start at random places. Each fetch advances a few of them and shuffles their rows.

    Each scanner reads its rows in sequence, and every row occurs exactly once per epoch. The rows (or `indices`,
    sorted) form a ring, which is cut into `n_scanners` equal stretches, one per scanner. The cuts change with the
    epoch. In each round every scanner has one turn, in random order, and reads its next `block_size` rows. After the
    last full round come the ends of the stretches, each shorter than a block.

    A fetch of n rows therefore advances n / `block_size` scanners by one block each, or all scanners by several blocks.
    Set `active` to advance about that many scanners per fetch instead; `block_size` is then derived from the fetch. For
    example, with 4 active scanners of 16 and fetches of 16 384 rows, each advances by 4 096 rows.

    Planning a fetch costs time in proportion to its rows plus `n_scanners`. Raises OptionError if a count is below 1,
    if `active` exceeds `n_scanners`, or if `indices` are not row numbers, are empty or contain duplicates.

    The order before the rows of each fetch are permuted:

    >>> zl.MixtureOfScanners(n_scanners=2, block_size=3).rows(0, 12, dataset_rows=12, seed=0, epoch=0).tolist()
    [6, 7, 8, 0, 1, 2, 9, 10, 11, 3, 4, 5]
    >>> loader = zl.Loader(dataset, sampling=zl.MixtureOfScanners(n_scanners=16, active=4))

    The name and the idea come from SLAF. SLAF draws the scanners of each step independently, so some finish before
    others; here all scanners finish together.
    """

    n_scanners: int = 16
    active: int | None = None
    block_size: int = DEFAULT_BLOCK_SIZE
    indices: Sequence[int] | NDArray[np.integer] | None = field(default=None, repr=False)

    shuffles_fetch = True

    def __post_init__(self) -> None:
        require_count(n_scanners=self.n_scanners, block_size=self.block_size)
        for name in ("n_scanners", "block_size"):
            object.__setattr__(self, name, int(getattr(self, name)))
        if self.active is not None:
            require_count(active=self.active)
            if self.active > self.n_scanners:
                raise OptionError(
                    f"active {self.active} is more than the {self.n_scanners} scanners: lower active or raise "
                    "n_scanners"
                )
        self._choose(checked_once(self.indices))

    def sized(self, fetch_rows: int) -> MixtureOfScanners:
        """A copy with the `block_size` with which a fetch of `fetch_rows` rows advances `active` scanners."""
        if self.active is None:
            return self
        block_size = max(1, round(fetch_rows / self.active))
        return replace(self, active=None, block_size=block_size, indices=self._rows)

    def rows(self, start: int, stop: int, *, dataset_rows: int, seed: int, epoch: int) -> Rows:
        """The rows (int64) at positions `[start, stop)` in the order of the epoch."""
        if self.active is not None:
            raise OptionError(f"{self} depends on the size of a fetch: call sized(fetch_rows) first")
        n_rows, key = self.n_rows(dataset_rows), key_of(seed, epoch)
        n_scanners = min(self.n_scanners, n_rows)
        length, extra = divmod(n_rows, n_scanners)  # rows per stretch; the first `extra` stretches are one row longer
        n_rounds, rest = divmod(length, self.block_size)
        turn, in_round = np.divmod(np.arange(start, stop, dtype=np.int64), n_scanners * self.block_size)
        slot, within = np.divmod(in_round, self.block_size)
        first, last = start // (n_scanners * self.block_size), -(-stop // (n_scanners * self.block_size))
        counters = np.arange(first * n_scanners, last * n_scanners, dtype=np.uint64)
        # All words of a key differ, so their order is unique.
        order = np.argsort(words_at(key, counters).reshape(-1, n_scanners), axis=1)
        ends = turn >= n_rounds
        if ends.any():
            sizes = rest + (order[-1] < extra)
            stops = np.cumsum(sizes)
            slot[ends] = np.searchsorted(stops, in_round[ends], side="right")
            within[ends] = in_round[ends] - (stops - sizes)[slot[ends]]
        scanner = order[turn - first, slot]
        begin = scanner * length + np.minimum(scanner, extra) + key_of(key, 1) % n_rows
        return self._take((begin + turn * self.block_size + within) % n_rows)
