"""Samplings in which every row comes once, in order, in shuffled blocks or by scanners, and their names. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.checks import require_count, require_flag, require_one_of
from zloader.common.errors import OptionError
from zloader.common.records import Rows
from zloader.order.permutation import blocks_at, key_of, words_at
from zloader.order.sampling import Order, Sampling, Table, require_sampling

DEFAULT_BLOCK_SIZE = 64  # rows; scDataset and annbatch publish their benchmarks for this size
# Measured in fetches of 256 blocks, on rows sorted by 14 labels: minibatches of 64 have 0.004 bits less than random
# rows with 64 strata, 0.003 with 256, and 0.05 without strata. With 56 labels it is 0.04, 0.03 and 0.12. But with 256
# strata the blocks of a fetch are hardly ever neighbours, and 200 000 small rows cost 15 % more bytes. A fetch may have
# fewer blocks than there are strata (see `blocks_at`), so one number suits all fetches.
DEFAULT_STRATA = 64
Indices = Sequence[int] | NDArray[np.integer]


def as_array(indices: Any) -> NDArray[Any]:
    """The indices or mask as a NumPy array. Raises OptionError for lists of different lengths."""
    try:
        return np.asarray(indices)
    except ValueError as error:
        raise OptionError(f"indices must be a 1-d sequence of row numbers, not {indices!r:.100}") from error


def as_rows(indices: Indices) -> Rows:
    """A copy of the row numbers as int64. Raises OptionError unless they are a 1-d sequence of integers."""
    rows = as_array(indices)
    if rows.dtype == bool or rows.ndim != 1 or (rows.size and not np.issubdtype(rows.dtype, np.integer)):
        raise OptionError(f"indices must be a 1-d sequence of row numbers, not {rows.dtype} of shape {rows.shape}")
    return rows.astype(np.int64)


def checked_once(indices: Indices) -> Rows:
    """The row numbers in ascending order. Raises OptionError for duplicates and for anything but row numbers."""
    rows = np.sort(as_rows(indices))
    duplicates = rows[1:][rows[1:] == rows[:-1]]
    if len(duplicates):
        raise OptionError(f"indices holds row {duplicates[0]} more than once: list each row once")
    return rows


def mask_of(rows: Rows, n_rows: int) -> NDArray[np.bool_]:
    """A mask over all rows of those listed."""
    mask = np.zeros(n_rows, bool)
    mask[rows] = True
    return mask


class Subset(Sampling):
    """Base class of dataclasses: a sampling restricted to optional `indices`."""

    _rows: Rows | None

    def _choose(self, indices: Rows | None) -> None:
        if indices is not None and not indices.size:
            raise OptionError(
                "indices is empty, so there would be no minibatch: give at least one row, or None for all"
            )
        object.__setattr__(self, "_rows", indices)

    def _ordered(self, dataset: Table, draw: Any, *, shuffles_fetch: bool = True, **options: Any) -> Order:
        """The order in which `draw`, given the number of rows first, gives positions among the chosen rows."""
        n_all, rows = int(dataset.n_obs), self._rows
        if rows is None:
            return Order(
                dataset_rows=n_all, n_rows=n_all, draw=partial(draw, n_all), shuffles_fetch=shuffles_fetch, **options
            )
        if rows.min() < 0 or rows.max() >= n_all:
            bad = rows.min() if rows.min() < 0 else rows.max()
            raise OptionError(f"indices holds row {bad}, but the rows of the dataset are 0 to {n_all - 1}")
        return Order(
            dataset_rows=n_all,
            n_rows=len(rows),
            draw=partial(_taken, rows, partial(draw, len(rows))),
            shuffles_fetch=shuffles_fetch,
            chosen=partial(mask_of, rows, n_all),
            **options,
        )


def _taken(rows: Rows, draw: Any, start: int, stop: int, seed: int, epoch: int) -> Rows:
    taken: Rows = rows[draw(start, stop, seed, epoch)]
    return taken


@dataclass(frozen=True, eq=False)
class Streaming(Subset):
    """Rows in the order of the dataset, or in the order of `indices`. The choice for evaluation.

    `indices` may list a row several times; it then occurs as often per epoch. `shuffle=True` permutes the rows of each
    fetch in memory. Raises OptionError if `indices` are not row numbers or are empty.

    >>> loader = zl.Loader(dataset, sampling=zl.Streaming(indices=[7, 3, 7]))
    >>> next(iter(loader)).index.tolist()
    [7, 3, 7]
    """

    indices: Indices | None = field(default=None, repr=False)
    shuffle: bool = False

    def __post_init__(self) -> None:
        self._choose(None if self.indices is None else as_rows(self.indices))

    def order(self, dataset: Table, batch_size: int, fetch_rows: int) -> Order:
        ordered = np.empty(0) if self._rows is None else np.sort(self._rows)
        repeats = bool((ordered[1:] == ordered[:-1]).any())
        return self._ordered(dataset, _in_order, shuffles_fetch=self.shuffle, repeats=repeats)


def _in_order(n_rows: int, start: int, stop: int, seed: int, epoch: int) -> Rows:
    return np.arange(start, stop, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class BlockShuffling(Subset):
    """Contiguous blocks of `block_size` rows in random order, with the rows of each fetch permuted in memory.

    Every row, or every row of `indices`, occurs exactly once per epoch. Larger blocks need fewer reads; smaller blocks
    mix better. `block_size=1` is perfect random shuffling. `indices` are sorted first, so that a block is `block_size`
    neighbours among them.

    `n_strata` above 1 mixes better at no cost: the rows are cut into `n_strata` equal strata, and every `n_strata`
    consecutive blocks of the order hold one random block of each stratum. They alternate between the halves of the
    rows, within each half between its quarters, and so on. So every fetch, however short, takes rows evenly from the
    whole dataset. Purely random blocks would by chance over-represent one plate and under-represent another. If there
    are fewer blocks than strata, the number of strata is the largest power of two that is not above the number of
    blocks. A Loader without `sampling` uses blocks of 64 rows and 64 strata. Planning a fetch costs time in proportion
    to its rows plus `n_strata`.

    If the number of rows is not a multiple of `block_size`, the last block of the order is shorter. The place of the
    short block in the dataset changes with the epoch, so the same rows are not always last.

    Raises OptionError if a count is below 1, or if `indices` are not row numbers, are empty or contain duplicates.

    The order before the rows of each fetch are permuted:

    >>> order = zl.BlockShuffling(block_size=3).order(dataset[:9], batch_size=3, fetch_rows=9)
    >>> order.rows(0, 9, seed=0, epoch=0).tolist()
    [3, 4, 5, 6, 7, 8, 0, 1, 2]
    >>> loader = zl.Loader(dataset, sampling=zl.BlockShuffling(block_size=16, n_strata=64))

    The name and the meaning come from scDataset (D'Ascenzo and Cultrera di Montesano 2025).
    """

    block_size: int = DEFAULT_BLOCK_SIZE
    indices: Indices | None = field(default=None, repr=False)
    n_strata: int = 1

    def __post_init__(self) -> None:
        require_count(block_size=self.block_size, n_strata=self.n_strata)
        for name in ("block_size", "n_strata"):
            object.__setattr__(self, name, int(getattr(self, name)))  # NumPy integers overflow
        self._choose(None if self.indices is None else checked_once(self.indices))

    def order(self, dataset: Table, batch_size: int, fetch_rows: int) -> Order:
        return self._ordered(dataset, self.positions, block_size=self.block_size)

    def positions(self, n_rows: int, start: int, stop: int, seed: int, epoch: int) -> Rows:
        """The numbers from 0 to `n_rows` - 1 at places `[start, stop)` of an epoch."""
        n_full, rest = divmod(n_rows, self.block_size)
        key = key_of(seed, epoch)
        slot, within = np.divmod(np.arange(start, stop, dtype=np.int64), self.block_size)
        first, last = start // self.block_size, -(-stop // self.block_size)
        slots = np.arange(first, min(last, n_full), dtype=np.int64)
        block = blocks_at(slots, n_full, self.n_strata, key)
        # The short block lies before block `gap`, so that block and all later ones begin `rest` rows later.
        gap = key_of(key, 1) % (n_full + 1)
        begin = block * self.block_size + np.where(block >= gap, rest, 0)
        if last > n_full:
            begin = np.append(begin, gap * self.block_size)
        positions: Rows = begin[slot - first] + within
        return positions


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

    >>> order = zl.MixtureOfScanners(2, block_size=3).order(dataset[:12], batch_size=3, fetch_rows=12)
    >>> order.rows(0, 12, seed=0, epoch=0).tolist()
    [6, 7, 8, 0, 1, 2, 9, 10, 11, 3, 4, 5]
    >>> loader = zl.Loader(dataset, sampling=zl.MixtureOfScanners(n_scanners=16, active=4))

    The name and the idea come from SLAF. SLAF draws the scanners of each step independently, so some finish before
    others; here all scanners finish together.
    """

    n_scanners: int = 16
    active: int | None = None
    block_size: int = DEFAULT_BLOCK_SIZE
    indices: Indices | None = field(default=None, repr=False)

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
        self._choose(None if self.indices is None else checked_once(self.indices))

    def order(self, dataset: Table, batch_size: int, fetch_rows: int) -> Order:
        block_size = self.block_size if self.active is None else max(1, round(fetch_rows / self.active))
        return self._ordered(dataset, partial(_scanned, self.n_scanners, block_size), block_size=block_size)


def _scanned(n_scanners: int, block_size: int, n_rows: int, start: int, stop: int, seed: int, epoch: int) -> Rows:
    key, n_scanners = key_of(seed, epoch), min(n_scanners, n_rows)
    length, extra = divmod(n_rows, n_scanners)  # rows per stretch; the first `extra` stretches are one row longer
    n_rounds, rest = divmod(length, block_size)
    turn, in_round = np.divmod(np.arange(start, stop, dtype=np.int64), n_scanners * block_size)
    slot, within = np.divmod(in_round, block_size)
    first, last = start // (n_scanners * block_size), -(-stop // (n_scanners * block_size))
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
    positions: Rows = (begin + turn * block_size + within) % n_rows
    return positions


def default_block_size(fetch_rows: int) -> int:
    """Default rows per block: 64, or the rows of a fetch if that is less."""
    return min(DEFAULT_BLOCK_SIZE, max(1, fetch_rows))


def stratified(block_size: int = DEFAULT_BLOCK_SIZE) -> BlockShuffling:
    """The default sampling of a Loader."""
    return BlockShuffling(block_size=block_size, n_strata=DEFAULT_STRATA)


NAMES = ("block_shuffling", "streaming", "mixture_of_scanners", "random")


def sampling_of(sampling: Sampling | str | None, shuffle: bool | None, fetch_rows: int) -> Sampling:
    """A sampling given as an object or by name, or else as `shuffle` says: rows in order if False, else the default.

    Raises OptionError for an unknown name, and where `sampling` and `shuffle` contradict each other.
    """
    if shuffle is not None:
        require_flag(shuffle=shuffle)
    if sampling is None:
        sampling = "streaming" if shuffle is not None and not shuffle else "block_shuffling"
    found = _named(sampling, fetch_rows) if isinstance(sampling, str) else sampling
    require_sampling(found)
    in_order = isinstance(found, Streaming) and not found.shuffle
    if shuffle is not None and bool(shuffle) is in_order:
        raise OptionError(
            f"shuffle={shuffle} and sampling={sampling!r:.100} contradict each other: give one of them. "
            "shuffle=False is sampling='streaming'"
        )
    return found


def _named(name: str, fetch_rows: int) -> Sampling:
    require_one_of(NAMES, sampling=name)
    if name == "streaming":
        return Streaming()
    if name == "mixture_of_scanners":
        return MixtureOfScanners()
    if name == "random":
        return BlockShuffling(block_size=1)
    return stratified(default_block_size(fetch_rows))
