"""Samplings in which every row comes once, in order, in shuffled blocks or by scanners, and their names. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.checks import require_count, require_flag, require_one_of
from zloader.common.errors import OptionError
from zloader.common.records import Rows
from zloader.order.permutation import blocks_at, key_of, words_at
from zloader.order.sampling import Sampling, require_sampling

DEFAULT_BLOCK_SIZE = 64  # rows; scDataset and annbatch publish their benchmarks for this size
# Measured in fetches of 256 blocks, on rows sorted by 14 labels: minibatches of 64 have 0.004 bits less than random
# rows with 64 strata, 0.003 with 256, and 0.05 without strata. With 56 labels it is 0.04, 0.03 and 0.12. But with 256
# strata the blocks of a fetch are hardly ever neighbours, and 200 000 small rows cost 15 % more bytes. A fetch may have
# fewer blocks than there are strata (see `blocks_at`), so one number suits all fetches.
DEFAULT_STRATA = 64


def as_array(indices: Any) -> NDArray[Any]:
    """The indices or mask as a NumPy array. Raises OptionError for lists of different lengths."""
    try:
        return np.asarray(indices)
    except ValueError as error:
        raise OptionError(f"indices must be a 1-d sequence of row numbers, not {indices!r:.100}") from error


def as_rows(indices: Sequence[int] | NDArray[np.integer]) -> Rows:
    """A copy of the row numbers as int64. Raises OptionError unless they are a 1-d sequence of integers."""
    rows = as_array(indices)
    if rows.dtype == bool or rows.ndim != 1 or (rows.size and not np.issubdtype(rows.dtype, np.integer)):
        raise OptionError(f"indices must be a 1-d sequence of row numbers, not {rows.dtype} of shape {rows.shape}")
    return rows.astype(np.int64)


def _checked(indices: Sequence[int] | NDArray[np.integer] | None) -> Rows | None:
    if indices is None:
        return None
    rows = as_rows(indices)
    if not rows.size:
        raise OptionError("indices is empty, so there would be no minibatch: give at least one row, or None for all")
    return rows


def checked_once(indices: Sequence[int] | NDArray[np.integer] | None) -> Rows | None:
    """The row numbers in ascending order. Raises OptionError for duplicates and for anything but row numbers."""
    rows = _checked(indices)
    if rows is None:
        return None
    rows = np.sort(rows)
    duplicates = rows[1:][rows[1:] == rows[:-1]]
    if len(duplicates):
        raise OptionError(f"indices holds row {duplicates[0]} more than once: list each row once")
    return rows


class Subset(Sampling):
    """Base class: restricts a sampling to optional `indices`."""

    _rows: Rows | None
    _min_row: int
    _max_row: int

    def _choose(self, rows: Rows | None) -> None:
        object.__setattr__(self, "_rows", rows)
        if rows is not None:  # computed once, because every fetch calls n_rows
            object.__setattr__(self, "_min_row", int(rows.min()))
            object.__setattr__(self, "_max_row", int(rows.max()))

    def n_rows(self, dataset_rows: int) -> int:
        """Number of rows per epoch: the length of `indices`, or all rows."""
        if self._rows is None:
            return dataset_rows
        if self._min_row < 0 or self._max_row >= dataset_rows:
            bad = self._min_row if self._min_row < 0 else self._max_row
            raise OptionError(f"indices holds row {bad}, but the rows of the dataset are 0 to {dataset_rows - 1}")
        return len(self._rows)

    def _take(self, positions: Rows) -> Rows:
        return positions if self._rows is None else self._rows[positions]


@dataclass(frozen=True, eq=False)
class Streaming(Subset):
    """Rows in the order of the dataset, or in the order of `indices`. The choice for evaluation.

    `indices` may list a row several times; it then occurs as often per epoch. `shuffle=True` permutes the rows of each
    fetch in memory. Raises OptionError if `indices` are not row numbers or are empty.

    >>> zl.Streaming().rows(0, 5, dataset_rows=100, seed=0, epoch=0).tolist()
    [0, 1, 2, 3, 4]
    >>> loader = zl.Loader(dataset, sampling=zl.Streaming(indices=[7, 3, 7]))
    >>> next(iter(loader)).index.tolist()
    [7, 3, 7]
    """

    indices: Sequence[int] | NDArray[np.integer] | None = field(default=None, repr=False)
    shuffle: bool = False
    _repeats: bool = field(init=False, repr=False)  # whether `indices` lists a row more than once

    shuffles_fetch = property(attrgetter("shuffle"))
    repeats = property(attrgetter("_repeats"))

    def __post_init__(self) -> None:
        rows = _checked(self.indices)
        self._choose(rows)
        ordered = np.empty(0, np.int64) if rows is None else np.sort(rows)
        object.__setattr__(self, "_repeats", bool((ordered[1:] == ordered[:-1]).any()))

    def rows(self, start: int, stop: int, *, dataset_rows: int, seed: int, epoch: int) -> Rows:
        return self._take(np.arange(start, stop, dtype=np.int64))


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

    >>> zl.BlockShuffling(block_size=3).rows(0, 9, dataset_rows=9, seed=0, epoch=0).tolist()
    [3, 4, 5, 6, 7, 8, 0, 1, 2]
    >>> loader = zl.Loader(dataset, sampling=zl.BlockShuffling(block_size=16, n_strata=64))

    The name and the meaning come from scDataset (D'Ascenzo and Cultrera di Montesano 2025).
    """

    block_size: int = DEFAULT_BLOCK_SIZE
    indices: Sequence[int] | NDArray[np.integer] | None = field(default=None, repr=False)
    n_strata: int = 1

    shuffles_fetch = True

    def __post_init__(self) -> None:
        require_count(block_size=self.block_size, n_strata=self.n_strata)
        for name in ("block_size", "n_strata"):
            object.__setattr__(self, name, int(getattr(self, name)))  # NumPy integers overflow
        self._choose(checked_once(self.indices))

    def rows(self, start: int, stop: int, *, dataset_rows: int, seed: int, epoch: int) -> Rows:
        n_full, rest = divmod(self.n_rows(dataset_rows), self.block_size)
        key = key_of(seed, epoch)
        position = np.arange(start, stop, dtype=np.int64)
        slot, within = np.divmod(position, self.block_size)
        first, last = start // self.block_size, -(-stop // self.block_size)
        slots = np.arange(first, min(last, n_full), dtype=np.int64)
        block = blocks_at(slots, n_full, self.n_strata, key)
        # The short block lies before block `gap`, so that block and all later ones begin `rest` rows later.
        gap = key_of(key, 1) % (n_full + 1)
        begin = block * self.block_size + np.where(block >= gap, rest, 0)
        if last > n_full:
            begin = np.append(begin, gap * self.block_size)
        return self._take(begin[slot - first] + within)


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
    in_order = isinstance(found, Streaming) and not found.shuffles_fetch
    if shuffle is not None and (in_order if shuffle else found.shuffles_fetch):
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
