"""Samplings: the order of the rows in an epoch. Pure.

A sampling maps positions in the order of an epoch to rows. The order depends on the seed and the epoch alone: a
sampling has no state and no random generator (see `permutation.py`). Finding n rows costs time and memory in proportion
to n, however many rows the dataset has. More samplings are in `scanners.py` and `weighted.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zloader.common.checks import require_count
from zloader.common.errors import OptionError
from zloader.common.records import Rows
from zloader.common.sharing import SharesArrays
from zloader.order.permutation import key_of
from zloader.order.strata import blocks_at
from zloader.selecting.columns import ObsColumn

DEFAULT_BLOCK_SIZE = 64  # rows; scDataset and annbatch publish their benchmarks for this size
# Measured in fetches of 256 blocks, on rows sorted by 14 labels: minibatches of 64 have 0.004 bits less than random
# rows with 64 strata, 0.003 with 256, and 0.05 without strata. With 56 labels it is 0.04, 0.03 and 0.12. But with 256
# strata the blocks of a fetch are hardly ever neighbours, and 200 000 small rows cost 15 % more bytes. A fetch may have
# fewer blocks than there are strata (see `strata.py`), so one number suits all fetches.
DEFAULT_STRATA = 64


class ChosenRows(Protocol):
    """Some rows of a dataset, in ascending order."""

    def __len__(self) -> int: ...

    def numbers(self, positions: Rows) -> Rows:
        """The rows at some positions in the set."""
        ...

    def mask(self) -> NDArray[np.bool_]:
        """A mask over all rows of the dataset."""
        ...


class Table(Protocol):
    """What a sampling may look up in a dataset or view."""

    @property
    def n_obs(self) -> int:
        """The number of rows."""
        ...

    def obs_column(self, column: str) -> ObsColumn:
        """One obs column as numbers."""
        ...

    def rows_of(self, group: Any) -> ChosenRows:
        """The rows in a group: a dataset, a view, or a condition."""
        ...


class Sampling(ABC):
    """Base class of samplings: the order of the rows in an epoch, as a pure function of positions.

    For an order of your own, subclass it and write these two methods:

    >>> import numpy as np, zloader.order.plan
    >>> class EverySecondRow(zl.Sampling):
    ...     def n_rows(self, dataset_rows):
    ...         return dataset_rows // 2
    ...     def rows(self, start, stop, *, dataset_rows, seed, epoch):
    ...         return 2 * np.arange(start, stop) + epoch % 2
    >>> plan = zloader.order.plan.Plan(
    ...     dataset_rows=12, sampling=EverySecondRow(), batch_size=2, fetch_factor=2, epoch=1
    ... )
    >>> [plan.fetch(number).rows.tolist() for number in range(plan.n_fetches)]
    [[1, 3], [5, 7, 9, 11]]

    All else has a default. `bound`, `sized` and `batched` may be called again on their own result and must then return
    it, or an equal one. These attributes may be set in the class or in `__init__`, or be properties:

    - `shuffles_fetch`: whether the rows of each fetch are permuted in memory. Default: False.
    - `block_size`: rows per contiguous block. A loader with smaller fetches raises OptionError. Default: 1.
    - `repeats`: whether a row may occur more than once per epoch. Default: False.
    - `indices`: the rows that it is restricted to, or None. Default: None.

    A loader refuses the saved state of another loader if the samplings differ in class or in a public attribute. So
    begin the names of attributes that change, such as a cache, with an underscore.
    """

    shuffles_fetch: bool = False
    block_size: int = 1
    repeats: bool = False
    indices: Sequence[int] | NDArray[np.integer] | None = None
    set_size: int | None = None  # rows per set, if the sampling has sets
    unit: int = 1  # the rows that no minibatch divides: a set, or all sets of a minibatch
    has_gaps: bool = False  # whether row -1 stands for no row

    def __repr__(self) -> str:  # for errors; a dataclass has its own
        return f"{type(self).__name__}(...)"

    @abstractmethod
    def n_rows(self, dataset_rows: int) -> int:
        """Number of rows per epoch."""

    @abstractmethod
    def rows(self, start: int, stop: int, *, dataset_rows: int, seed: int, epoch: int) -> Rows:
        """The rows (int64) at positions `[start, stop)` in the order of the epoch."""

    def bound(self, dataset: Table) -> Sampling:
        """The sampling to use for a dataset or view, with its obs columns or rows looked up. Default: itself."""
        return self

    def sized(self, fetch_rows: int) -> Sampling:
        """The sampling to use for fetches of `fetch_rows` rows. Default: itself."""
        return self

    def batched(self, batch_size: int) -> Sampling:
        """The sampling to use for minibatches of `batch_size` rows. Default: itself."""
        return self


@dataclass(frozen=True, eq=False)
class WrappedSampling(Sampling):
    """Base class: an order made from that of `sampling`, which is bound already, with all of its attributes."""

    sampling: Sampling

    def sized(self, fetch_rows: int) -> Sampling:
        """The same around `sampling.sized(fetch_rows)`."""
        return self._around(self.sampling.sized(fetch_rows))

    def batched(self, batch_size: int) -> Sampling:
        """The same around `sampling.batched(batch_size)`."""
        return self._around(self.sampling.batched(batch_size))

    def _around(self, sampling: Sampling) -> Sampling:
        return self if sampling is self.sampling else replace(self, sampling=sampling)

    def _renumbered(self, rows_of: Callable[[Rows], Rows], start: int, stop: int, **of: int) -> Rows:
        """The rows that `rows_of` gives for rows of `sampling`. Gaps remain. Raises OptionError for invalid rows."""
        rows = require_rows(self.sampling.rows(start, stop, **of), self.sampling, start, stop, of["dataset_rows"])
        if not self.has_gaps:
            return rows_of(rows)
        return np.where(rows < 0, -1, rows_of(np.maximum(rows, 0)))


for _name in Sampling.__annotations__:
    setattr(WrappedSampling, _name, property(attrgetter(f"sampling.{_name}")))


def require_sampling(sampling: Any) -> None:
    """Raises OptionError unless `sampling` is a Sampling. A class is refused too."""
    if not isinstance(sampling, Sampling):
        why = "which is a class" if isinstance(sampling, type) else "whose class has to be a subclass of zl.Sampling"
        raise OptionError(f"sampling must be a sampling such as zl.BlockShuffling(64), not {sampling!r:.100}, {why}")


def fitted(sampling: Sampling, *, dataset: Table | None = None, fetch_rows: int, batch_size: int) -> Sampling:
    """The sampling for a dataset, if one is given, and these sizes. Raises OptionError unless it is a sampling."""
    require_sampling(sampling)
    for name, fit in (("bound", dataset), ("sized", fetch_rows), ("batched", batch_size)):
        if fit is not None:
            made = getattr(sampling, name)(fit)
            if not isinstance(made, Sampling):
                raise OptionError(f"{name} of {sampling} must return a sampling, such as itself, not {made!r:.100}")
            sampling = made
    return sampling


def require_rows(rows: Any, sampling: Sampling, start: int, stop: int, n_rows: int) -> Rows:
    """`rows`, the result of `sampling.rows(start, stop)`, as int64. OptionError unless they are rows below `n_rows`."""
    expected = f"{type(sampling).__name__}.rows({start}, {stop}) must give {stop - start} row numbers"
    if not isinstance(rows, np.ndarray) or rows.ndim != 1 or not np.issubdtype(rows.dtype, np.integer):
        raise OptionError(f"{expected} as a 1-d array of integers, not {rows!r:.100}")
    if len(rows) != stop - start:
        raise OptionError(f"{expected}, not {len(rows)}")
    least = -1 if sampling.has_gaps else 0
    if len(rows) and not least <= rows.min() <= rows.max() < n_rows:
        bad = rows.min() if rows.min() < least else rows.max()
        raise OptionError(f"{expected} from 0 to {n_rows - 1}, but gave {bad}")
    return rows.astype(np.int64, copy=False)


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


class Subset(SharesArrays, Sampling):
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
        """The rows (int64) at positions `[start, stop)` in the order of the epoch."""
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
        """The rows (int64) at positions `[start, stop)` in the order of the epoch."""
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


def default_block_size(fetch_rows: int) -> int:
    """Default rows per block: 64, or the rows of a fetch if that is less."""
    return min(DEFAULT_BLOCK_SIZE, max(1, fetch_rows))


def stratified(block_size: int = DEFAULT_BLOCK_SIZE) -> BlockShuffling:
    """The default sampling of a Loader."""
    return BlockShuffling(block_size=block_size, n_strata=DEFAULT_STRATA)
