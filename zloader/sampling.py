"""In which order an epoch takes the rows. Pure.

A sampling maps positions of the epoch's order to rows, given seed and epoch; it holds no state and no generator. The
permutation is computed by index (a Feistel network with cycle walking; Black and Rogaway 2002), in constant memory and
from integer arithmetic alone, so that it is the same on every machine and NumPy version. Samplings that draw rows by
weight have a room of their own, `weighted.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from zloader.columns import ObsColumn
from zloader.compiled import compiled
from zloader.errors import OptionError
from zloader.terms import Rows, require_count

_ROUNDS = 8
_LANES = 1024  # numbers that permute works on at once: they stay in the first-level cache
_U64 = np.uint64
GOLDEN = _U64(0x9E3779B97F4A7C15)  # splitmix64's step from one word to mix to the next


def mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): a bijection of 64-bit words that scatters every bit."""
    words = (words ^ (words >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> _U64(27))) * _U64(0x94D049BB133111EB)
    return words ^ (words >> _U64(31))


def key_of(*parts: int) -> int:
    """A 64-bit key made of whole numbers such as seed and epoch; differs whenever one of them does."""
    key = np.full(1, len(parts), _U64)
    for part in parts:
        key = mix(key + GOLDEN + mix(np.asarray([int(part) & 0xFFFFFFFFFFFFFFFF], _U64) + GOLDEN))
    return int(key[0])


mix_word = compiled(mix)  # the same, of one word, for compiled loops


@compiled
def _feistel(words: NDArray[np.uint64], keys: NDArray[np.uint64], half: np.uint64, mask: np.uint64) -> None:
    """Sends each word below 4**half to another such word, in place. Kept apart: so LLVM vectorises it."""
    for i in range(len(words)):
        left, right = words[i] >> half, words[i] & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (mix_word(right ^ keys[number]) & mask)
        words[i] = (left << half) | right


@compiled
def _permute(index: Rows, n: np.uint64, keys: NDArray[np.uint64], half: np.uint64, out: Rows) -> None:
    """What `permute` gives for each of `index`, into `out`: those still at `n` or beyond walk on beside new ones."""
    mask = (_U64(1) << half) - _U64(1)
    words, places = np.empty(_LANES, np.uint64), np.empty(_LANES, np.int64)
    walking, taken = 0, 0
    while walking or taken < len(index):
        while walking < _LANES and taken < len(index):
            words[walking], places[walking] = index[taken], taken
            walking, taken = walking + 1, taken + 1
        _feistel(words[:walking], keys, half, mask)
        left = 0
        for i in range(walking):
            out[places[i]] = words[i]
            words[left], places[left] = words[i], places[i]
            left += words[i] >= n
        walking = left


def permute(index: Rows, n: int, key: int) -> Rows:
    """Where a keyed permutation of `range(n)` sends each of `index` (int64, each in `range(n)`)."""
    half = max(1, (int(n - 1).bit_length() + 1) // 2)  # the network permutes 4**half >= n numbers
    keys = mix(_U64(key) + GOLDEN * np.arange(1, _ROUNDS + 1, dtype=_U64))
    out = np.empty(len(index), np.int64)
    _permute(np.ascontiguousarray(index, np.int64), _U64(n), keys, _U64(half), out)
    return out


def shuffled(n: int, key: int) -> Rows:
    """A keyed permutation of `range(n)` as an array, for the rows of one buffer (Philox raw words, sorted)."""
    words = np.random.Philox(key=key).random_raw(n)
    low = _U64((1 << n.bit_length()) - 1)
    # Sorting words that end in their own place is ten times as fast as argsort, and gives the same...
    numbered = np.sort((words & ~low) | np.arange(n, dtype=_U64))
    if ((numbered[1:] ^ numbered[:-1]) <= low).any():  # ...unless two of them differed in their last bits alone
        return np.argsort(words, kind="stable").astype(np.int64, copy=False)
    return (numbered & low).astype(np.int64)


class Sampling(Protocol):
    """The order of an epoch, as a pure function of positions. Write your own by giving these three:

    >>> import numpy as np, zloader.plan
    >>> class EverySecondRow:
    ...     shuffles_fetch = False
    ...     def n_rows(self, dataset_rows):
    ...         return dataset_rows // 2
    ...     def rows(self, start, stop, *, dataset_rows, seed, epoch):
    ...         return 2 * np.arange(start, stop) + epoch % 2
    >>> plan = zloader.plan.Plan(
    ...     dataset_rows=12, sampling=EverySecondRow(), batch_size=2, fetch_factor=2, epoch=1
    ... )
    >>> [plan.fetch(number).rows.tolist() for number in range(plan.n_fetches)]
    [[1, 3, 5, 7], [9, 11]]

    Three more may be given. `block_size`: a plan whose fetches are smaller is refused. `repeats`: True where a row may
    come more than once an epoch. `bound(column)`: the sampling to use instead, once the dataset is known; see `bound`.
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


def bound(sampling: Sampling, column: Callable[[str], ObsColumn]) -> Sampling:
    """The sampling, told what is in the obs columns that it names; `column` is `Dataset.obs_column`."""
    bind: Callable[[Callable[[str], ObsColumn]], Sampling] | None = getattr(sampling, "bound", None)
    return sampling if bind is None else bind(column)


def _checked(indices: Sequence[int] | NDArray[np.integer] | None) -> Rows | None:
    if indices is None:
        return None
    rows = np.asarray(indices)
    if rows.dtype == bool or rows.ndim != 1 or (rows.size and not np.issubdtype(rows.dtype, np.integer)):
        raise OptionError(f"indices must be a 1-d sequence of row numbers, not {rows.dtype} of shape {rows.shape}")
    if not rows.size:
        raise OptionError("indices is empty: there would be no minibatch")
    return rows.astype(np.int64)


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


class _Subset:
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
        object.__setattr__(self, "_repeats", rows is not None and len(np.unique(rows)) < len(rows))

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
    """

    block_size: int = 64
    indices: Sequence[int] | NDArray[np.integer] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        require_count(block_size=self.block_size)
        object.__setattr__(self, "block_size", int(self.block_size))  # NumPy's integers overflow
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
        block = permute(slots, n_full, key)
        # The short block stands before block number `gap`: all blocks from there on begin `rest` rows later.
        gap = key_of(key, 1) % (n_full + 1)
        begin = block * self.block_size + np.where(block >= gap, rest, 0)
        if last > n_full:
            begin = np.append(begin, gap * self.block_size)
        return self._take(begin[slot - first] + within)


@dataclass(frozen=True, eq=False)
class MixtureOfScanners(_Subset):
    """Sequential readers that begin at random places; a random few advance with each fetch, their rows shuffled.

    The rows (or `indices`, sorted) are a ring that is cut, at places that change with the epoch, into `n_scanners`
    equal stretches, one for each scanner. Each turn of a scanner is its next `block_size` rows, and a round is one turn
    of every scanner, in random order. So a fetch advances fetch rows / `block_size` scanners by a block, or, where
    these are more than there are scanners, all of them by several: 16 scanners and blocks of 4 096 rows let a fetch of
    16 384 rows advance four. After the last full round come the ends of the stretches, each shorter than a block.

    SLAF's name and idea. SLAF draws the scanners of each step anew, so that some end before others; here they end
    together, and every row comes exactly once an epoch. Planning costs what a fetch has rows, plus `n_scanners`.
    """

    n_scanners: int = 16
    block_size: int = 64
    indices: Sequence[int] | NDArray[np.integer] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        require_count(n_scanners=self.n_scanners, block_size=self.block_size)
        for name in ("n_scanners", "block_size"):
            object.__setattr__(self, name, int(getattr(self, name)))
        self._choose(checked_once(self.indices))

    @property
    def shuffles_fetch(self) -> bool:
        """Always: the rows of a fetch are permuted in memory."""
        return True

    def rows(self, start: int, stop: int, *, dataset_rows: int, seed: int, epoch: int) -> Rows:
        """The rows at positions `[start, stop)`."""
        n_rows, key = self.n_rows(dataset_rows), key_of(seed, epoch)
        n_scanners = min(self.n_scanners, n_rows)
        length, extra = divmod(n_rows, n_scanners)  # of a stretch; the first `extra` are one row longer
        n_rounds, rest = divmod(length, self.block_size)
        turn, place = np.divmod(np.arange(start, stop, dtype=np.int64), n_scanners * self.block_size)
        slot, within = np.divmod(place, self.block_size)
        first, last = start // (n_scanners * self.block_size), -(-stop // (n_scanners * self.block_size))
        counters = np.arange(first * n_scanners, last * n_scanners, dtype=_U64)
        # No two of these words are equal, so that they have one order alone.
        order = np.argsort(mix(_U64(key) + GOLDEN * counters).reshape(-1, n_scanners), axis=1)
        ends = turn >= n_rounds
        if ends.any():
            sizes = rest + (order[-1] < extra)
            stops = np.cumsum(sizes)
            slot[ends] = np.searchsorted(stops, place[ends], side="right")
            within[ends] = place[ends] - (stops - sizes)[slot[ends]]
        scanner = order[turn - first, slot]
        begin = scanner * length + np.minimum(scanner, extra) + key_of(key, 1) % n_rows
        return self._take((begin + turn * self.block_size + within) % n_rows)
