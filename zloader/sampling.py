"""In which order an epoch takes the rows. Pure.

A sampling maps positions of the epoch's order to rows, given seed and epoch; it holds no state and no generator. The
permutation is computed by index (a Feistel network with cycle walking; Black and Rogaway 2002), in constant memory and
from integer arithmetic alone, so that it is the same on every machine and NumPy version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from zloader.errors import OptionError
from zloader.terms import Rows, require_count

_ROUNDS = 8
_U64 = np.uint64
_GOLDEN = _U64(0x9E3779B97F4A7C15)


def mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): a bijection of 64-bit words that scatters every bit."""
    words = (words ^ (words >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> _U64(27))) * _U64(0x94D049BB133111EB)
    return words ^ (words >> _U64(31))


def key_of(*parts: int) -> int:
    """A 64-bit key made of whole numbers such as seed and epoch; differs whenever one of them does."""
    key = np.full(1, len(parts), _U64)
    for part in parts:
        key = mix(key + _GOLDEN + mix(np.asarray([int(part) & 0xFFFFFFFFFFFFFFFF], _U64) + _GOLDEN))
    return int(key[0])


def permute(index: Rows, n: int, key: int) -> Rows:
    """Where a keyed permutation of `range(n)` sends each of `index` (int64, each in `range(n)`)."""
    half = _U64(max(1, (int(n - 1).bit_length() + 1) // 2))
    mask = _U64((1 << int(half)) - 1)
    keys = mix(_U64(key) + _GOLDEN * np.arange(1, _ROUNDS + 1, dtype=_U64))
    out = index.astype(_U64)
    walking = np.arange(len(out))
    while len(walking):  # the network permutes 4**half >= n numbers: walk on until below n
        word = out[walking]
        left, right = word >> half, word & mask
        for round_key in keys:
            left, right = right, left ^ (mix(right ^ round_key) & mask)
        word = (left << half) | right
        out[walking] = word
        walking = walking[word >= _U64(n)]
    return out.astype(np.int64)


def shuffled(n: int, key: int) -> Rows:
    """A keyed permutation of `range(n)` as an array, for the rows of one buffer (Philox raw words, sorted)."""
    words = np.random.Philox(key=key).random_raw(n)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


class Sampling(Protocol):
    """The order of an epoch. Write your own by giving these three."""

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


def _checked(indices: Sequence[int] | NDArray[np.integer] | None) -> Rows | None:
    if indices is None:
        return None
    rows = np.asarray(indices)
    if rows.dtype == bool or rows.ndim != 1 or (rows.size and not np.issubdtype(rows.dtype, np.integer)):
        raise OptionError(f"indices must be a 1-d sequence of row numbers, not {rows.dtype} of shape {rows.shape}")
    if not rows.size:
        raise OptionError("indices is empty: there would be no minibatch")
    return rows.astype(np.int64)


class _Subset:
    """What both samplings below share: an optional list of the rows that take part."""

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

    def __post_init__(self) -> None:
        self._choose(_checked(self.indices))

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
        rows = _checked(self.indices)
        if rows is not None:
            rows = np.sort(rows)
            twice = rows[1:][rows[1:] == rows[:-1]]
            if len(twice):
                raise OptionError(f"indices holds row {twice[0]} more than once; every row comes once an epoch")
        self._choose(rows)

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
