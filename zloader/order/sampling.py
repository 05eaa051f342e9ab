"""In which order an epoch takes the rows. Pure.

A sampling maps positions of the epoch's order to rows, given seed and epoch; it holds no state and no generator
(`permutation.py` says how). Samplings that draw rows by weight have a room of their own, `weighted.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zloader.common.checks import require_count
from zloader.common.errors import OptionError
from zloader.common.records import Rows
from zloader.common.sharing import SharesArrays
from zloader.order.permutation import key_of, permute, words_at
from zloader.selecting.columns import Column

DEFAULT_BLOCK_SIZE = 64  # rows; scDataset's and annbatch's figures are quoted for it
# Of 14 plates in a row, minibatches of 64 then have the entropy of random rows to 0.01 bits where a fetch has 128
# blocks or more (to 0.05 without strata, with 256 of them). More strata than a fetch has blocks would do less.
DEFAULT_STRATA = 64


class Sampling(Protocol):
    """The order of an epoch, as a pure function of positions. Write your own by giving these three:

    >>> import numpy as np, zloader.order.plan
    >>> class EverySecondRow:
    ...     shuffles_fetch = False
    ...     def n_rows(self, dataset_rows):
    ...         return dataset_rows // 2
    ...     def rows(self, start, stop, *, dataset_rows, seed, epoch):
    ...         return 2 * np.arange(start, stop) + epoch % 2
    >>> plan = zloader.order.plan.Plan(
    ...     dataset_rows=12, sampling=EverySecondRow(), batch_size=2, fetch_factor=2, epoch=1
    ... )
    >>> [plan.fetch(number).rows.tolist() for number in range(plan.n_fetches)]
    [[1, 3, 5, 7], [9, 11]]

    Four more may be given. `block_size`: a plan whose fetches are smaller is refused. `repeats`: True where a row may
    come more than once an epoch. `bound(column)` and `sized(fetch_rows)`: the sampling to use instead, once the dataset
    and how many rows a fetch has are known (itself, when it is asked again); see the functions of these names.

    The state of a loader is refused by one whose sampling is of another class or differs in a public attribute.
    """

    @property
    def shuffles_fetch(self) -> bool:
        """Whether the rows of a fetch are permuted in memory."""
        ...

    def n_rows(self, dataset_rows: int) -> int:
        """How many rows an epoch has."""
        ...

    def rows(self, start: int, stop: int, *, dataset_rows: int, seed: int, epoch: int) -> Rows:
        """The rows at positions `[start, stop)` of the epoch's order (int64)."""
        ...


def require_sampling(sampling: Any) -> None:
    """Raises OptionError for what is no sampling, such as its class or a number."""
    needed = ("n_rows", "rows", "shuffles_fetch")
    missing = [name for name in needed if not hasattr(sampling, name)]
    if isinstance(sampling, type) or missing:
        why = "which is a class" if isinstance(sampling, type) else f"which has no {' and no '.join(missing)}"
        raise OptionError(f"sampling must be one such as zl.BlockShuffling(64), not {sampling!r:.100}, {why}")


def require_rows(rows: Any, sampling: Sampling, start: int, stop: int, n_rows: int) -> None:
    """Raises OptionError where `rows` is not what `sampling.rows(start, stop)` must give of rows 0 to `n_rows`."""
    asked = f"{type(sampling).__name__}.rows({start}, {stop}) must give {stop - start} row numbers"
    if not isinstance(rows, np.ndarray) or rows.ndim != 1 or not np.issubdtype(rows.dtype, np.integer):
        raise OptionError(f"{asked} as a 1-d array of integers, not {rows!r:.100}")
    if len(rows) != stop - start:
        raise OptionError(f"{asked}, not {len(rows)}")
    if len(rows) and not 0 <= rows.min() <= rows.max() < n_rows:
        bad = rows.min() if rows.min() < 0 else rows.max()
        raise OptionError(f"{asked} from 0 to {n_rows - 1}, but gave {bad}")


def bound(sampling: Sampling, column: Column) -> Sampling:
    """The sampling, told what is in the obs columns that it names; `column` is `Dataset.obs_column`."""
    bind: Callable[[Column], Sampling] | None = getattr(sampling, "bound", None)
    return sampling if bind is None else bind(column)


def sized(sampling: Sampling, fetch_rows: int) -> Sampling:
    """The sampling, told how many rows are loaded and shuffled together."""
    size: Callable[[int], Sampling] | None = getattr(sampling, "sized", None)
    return sampling if size is None else size(fetch_rows)


def as_rows(indices: Sequence[int] | NDArray[np.integer]) -> Rows:
    """A copy of the row numbers as int64. Raises OptionError for what holds none."""
    rows = np.asarray(indices)
    if rows.dtype == bool or rows.ndim != 1 or (rows.size and not np.issubdtype(rows.dtype, np.integer)):
        raise OptionError(f"indices must be a 1-d sequence of row numbers, not {rows.dtype} of shape {rows.shape}")
    return rows.astype(np.int64)


def _checked(indices: Sequence[int] | NDArray[np.integer] | None) -> Rows | None:
    if indices is None:
        return None
    rows = as_rows(indices)
    if not rows.size:
        raise OptionError("indices is empty: there would be no minibatch")
    return rows


def checked_once(indices: Sequence[int] | NDArray[np.integer] | None) -> Rows | None:
    """The indices in ascending order. Raises OptionError for what is no row number, or is there twice."""
    rows = _checked(indices)
    if rows is None:
        return None
    rows = np.sort(rows)
    twice = rows[1:][rows[1:] == rows[:-1]]
    if len(twice):
        raise OptionError(f"indices holds row {twice[0]} more than once; every row comes once an epoch")
    return rows


class _Subset(SharesArrays):
    """What samplings share: an optional list of the rows that take part."""

    _rows: Rows | None
    _least: int
    _most: int

    def _choose(self, rows: Rows | None) -> None:
        object.__setattr__(self, "_rows", rows)
        if rows is not None:  # once: n_rows is asked for with every fetch
            object.__setattr__(self, "_least", int(rows.min()))
            object.__setattr__(self, "_most", int(rows.max()))

    def n_rows(self, dataset_rows: int) -> int:
        """How many rows an epoch has: all, or as many as `indices`."""
        if self._rows is None:
            return dataset_rows
        if self._least < 0 or self._most >= dataset_rows:
            bad = self._least if self._least < 0 else self._most
            raise OptionError(f"indices holds row {bad}, but the dataset has the rows 0 to {dataset_rows - 1}")
        return len(self._rows)

    def _take(self, positions: Rows) -> Rows:
        return positions if self._rows is None else self._rows[positions]


@dataclass(frozen=True, eq=False)
class Streaming(_Subset):
    """Rows in the order of the dataset, or of `indices` (a row as often as it is listed).

    `shuffle=True` permutes the rows of each fetch in memory.
    """

    indices: Sequence[int] | NDArray[np.integer] | None = field(default=None, repr=False)
    shuffle: bool = False
    _repeats: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rows = _checked(self.indices)
        self._choose(rows)
        ordered = np.empty(0, np.int64) if rows is None else np.sort(rows)
        object.__setattr__(self, "_repeats", bool((ordered[1:] == ordered[:-1]).any()))

    @property
    def repeats(self) -> bool:
        """Whether `indices` lists a row twice."""
        return self._repeats

    @property
    def shuffles_fetch(self) -> bool:
        """Whether the rows of a fetch are permuted in memory."""
        return self.shuffle

    def rows(self, start: int, stop: int, *, dataset_rows: int, seed: int, epoch: int) -> Rows:
        """The rows at positions `[start, stop)`."""
        return self._take(np.arange(start, stop, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class BlockShuffling(_Subset):
    """Contiguous blocks of `block_size` rows in random order, the rows of each fetch permuted in memory.

    Every row (or every one of `indices`, which are sorted) comes exactly once an epoch. Where the row count is no
    multiple of `block_size`, one block is shorter: which one changes with the epoch, and it comes last, so that no row
    is always among the last. (scDataset's name and meaning: D'Ascenzo and Cultrera di Montesano 2025.)

    With `n_strata` above 1 the blocks are stratified: the rows are cut into that many equal stretches, and every
    `n_strata` blocks of the order are one random block of each, in random order. So each fetch has rows from everywhere
    alike, where random blocks alone would bring more of one plate and less of another by chance.
    """

    block_size: int = DEFAULT_BLOCK_SIZE
    indices: Sequence[int] | NDArray[np.integer] | None = field(default=None, repr=False)
    n_strata: int = 1

    def __post_init__(self) -> None:
        require_count(block_size=self.block_size, n_strata=self.n_strata)
        for name in ("block_size", "n_strata"):
            object.__setattr__(self, name, int(getattr(self, name)))  # NumPy's integers overflow
        self._choose(checked_once(self.indices))

    @property
    def shuffles_fetch(self) -> bool:
        """Always: the rows of a fetch are permuted in memory."""
        return True

    def rows(self, start: int, stop: int, *, dataset_rows: int, seed: int, epoch: int) -> Rows:
        """The rows at positions `[start, stop)`."""
        n_full, rest = divmod(self.n_rows(dataset_rows), self.block_size)
        key = key_of(seed, epoch)
        position = np.arange(start, stop, dtype=np.int64)
        slot, within = np.divmod(position, self.block_size)
        first, last = start // self.block_size, -(-stop // self.block_size)
        slots = np.arange(first, min(last, n_full), dtype=np.int64)
        block = self._blocks(slots, n_full, key)
        # The short block stands before block number `gap`: all blocks from there on begin `rest` rows later.
        gap = key_of(key, 1) % (n_full + 1)
        begin = block * self.block_size + np.where(block >= gap, rest, 0)
        if last > n_full:
            begin = np.append(begin, gap * self.block_size)
        return self._take(begin[slot - first] + within)

    def _blocks(self, slots: Rows, n_blocks: int, key: int) -> Rows:
        """Which of the full blocks comes at each of `slots` of the order."""
        n_strata = min(self.n_strata, n_blocks)
        if n_strata <= 1:
            return permute(slots, n_blocks, key)
        n_rounds, left = divmod(n_blocks, n_strata)
        # Equal, or one block more: these `left` strata, others in each epoch, have a turn after the last full round.
        bounds = (np.arange(n_strata + 1) * n_blocks + key_of(key, 4) % n_strata) // n_strata
        sizes = np.diff(bounds)
        turn, place = np.divmod(slots, n_strata)
        late = turn == n_rounds
        stratum = permute(place, n_strata, key_of(key, 2), which=turn, sizes=np.where(late, left, n_strata))
        stratum[late] = np.flatnonzero(sizes > n_rounds)[stratum[late]]
        return bounds[stratum] + permute(turn, n_rounds + 1, key_of(key, 3), which=stratum, sizes=sizes[stratum])


def default_block_size(fetch_rows: int) -> int:
    """Rows in a block unless told otherwise: no more than a fetch has."""
    return min(DEFAULT_BLOCK_SIZE, max(1, fetch_rows))


def stratified(block_size: int = DEFAULT_BLOCK_SIZE) -> BlockShuffling:
    """What a Loader takes unless told otherwise."""
    return BlockShuffling(block_size=block_size, n_strata=DEFAULT_STRATA)


@dataclass(frozen=True, eq=False)
class MixtureOfScanners(_Subset):
    """Sequential readers that begin at random places; a random few advance with each fetch, their rows shuffled.

    The rows (or `indices`, sorted) are a ring that is cut, at places that change with the epoch, into `n_scanners`
    equal stretches, one for each scanner. Each turn of a scanner is its next `block_size` rows, and a round is one turn
    of every scanner, in random order. So a fetch advances fetch rows / `block_size` scanners by a block, or, where
    these are more than there are scanners, all of them by several. With `active` a fetch advances about so many of
    them, and `block_size` is what this takes: 4 of 16 have 4 096 rows each in a fetch of 16 384. After the last full
    round come the ends of the stretches, each shorter than a block.

    SLAF's name and idea. SLAF draws the scanners of each step anew, so that some end before others; here they end
    together, and every row comes exactly once an epoch. Planning costs what a fetch has rows, plus `n_scanners`.
    """

    n_scanners: int = 16
    active: int | None = None
    block_size: int = DEFAULT_BLOCK_SIZE
    indices: Sequence[int] | NDArray[np.integer] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        require_count(n_scanners=self.n_scanners, block_size=self.block_size)
        for name in ("n_scanners", "block_size"):
            object.__setattr__(self, name, int(getattr(self, name)))
        if self.active is not None:
            require_count(active=self.active)
            if self.active > self.n_scanners:
                raise OptionError(f"active {self.active} is more than the {self.n_scanners} scanners that there are")
        self._choose(checked_once(self.indices))

    @property
    def shuffles_fetch(self) -> bool:
        """Always: the rows of a fetch are permuted in memory."""
        return True

    def sized(self, fetch_rows: int) -> MixtureOfScanners:
        """The same with the `block_size` that makes a fetch advance `active` scanners."""
        if self.active is None:
            return self
        block_size = max(1, round(fetch_rows / self.active))
        return replace(self, active=None, block_size=block_size, indices=self._rows)

    def rows(self, start: int, stop: int, *, dataset_rows: int, seed: int, epoch: int) -> Rows:
        """The rows at positions `[start, stop)`."""
        if self.active is not None:
            raise OptionError(f"{self} depends on the size of a fetch: call sized(fetch_rows) first")
        n_rows, key = self.n_rows(dataset_rows), key_of(seed, epoch)
        n_scanners = min(self.n_scanners, n_rows)
        length, extra = divmod(n_rows, n_scanners)  # of a stretch; the first `extra` are one row longer
        n_rounds, rest = divmod(length, self.block_size)
        turn, place = np.divmod(np.arange(start, stop, dtype=np.int64), n_scanners * self.block_size)
        slot, within = np.divmod(place, self.block_size)
        first, last = start // (n_scanners * self.block_size), -(-stop // (n_scanners * self.block_size))
        counters = np.arange(first * n_scanners, last * n_scanners, dtype=np.uint64)
        # No two of these words are equal, so that they have one order alone.
        order = np.argsort(words_at(key, counters).reshape(-1, n_scanners), axis=1)
        ends = turn >= n_rounds
        if ends.any():
            sizes = rest + (order[-1] < extra)
            stops = np.cumsum(sizes)
            slot[ends] = np.searchsorted(stops, place[ends], side="right")
            within[ends] = place[ends] - (stops - sizes)[slot[ends]]
        scanner = order[turn - first, slot]
        begin = scanner * length + np.minimum(scanner, extra) + key_of(key, 1) % n_rows
        return self._take((begin + turn * self.block_size + within) % n_rows)
