"""Draws rows by weight, block by block, for the samplings of `weighted.py`. Pure.

With replacement, the order of an epoch is a sequence of slots of `block_size` positions. A block is `block_size`
consecutive rows of positive weight, and its weight is the sum over its rows. A block is drawn with a probability
proportional to its weight. Its rows are then taken at equal steps of the running weight from a random start (systematic
sampling; Madow 1949). At every position, row i therefore occurs with probability exactly weight i / sum of weights, and
a block of equal weights is taken whole.

A row with half the weight of its block would fill half a slot. From such a block fewer rows are taken per draw: the
largest of `block_size`, `block_size` / 2, / 4 ... with which no row occurs twice. Blocks with the same number of rows
per draw form a level, and each slot is filled with draws from one level. The reads then follow the weights: whole
blocks where the weights are equal, and a few scattered rows where a few rows weigh as much as all others together.

The result has the same bits on every machine, because random words are computed from counters, and loops without
fastmath add in a fixed order. The table takes 8 bytes per block, or 16 if there are several levels. Planning a fetch
takes one binary search per draw.

Without replacement, the rows of an epoch are chosen once per epoch (Efraimidis and Spirakis 2006) and then shuffled in
blocks of consecutive chosen rows. Choosing takes 16 bytes per row; the result takes 8 bytes per chosen row, and is kept
until another epoch is planned.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common import page_cache
from zloader.common.checks import require_count
from zloader.common.compiled import compiled
from zloader.common.errors import OptionError
from zloader.common.machine import require_memory
from zloader.common.records import WINDOW_ROWS, Rows, windows_of
from zloader.order.permutation import GOLDEN, key_of, mix, mix_word, words_at
from zloader.order.sampling import Sampling
from zloader.order.shuffling import BlockShuffling

_U64 = np.uint64
_ROUNDING = 1 + 1e-9  # larger than the rounding error in sums of equal weights
_STEP = 2.0**-53
_MIN_TOTAL = 2.0**-960
Codes = NDArray[np.integer]


@compiled
def _weight(table: NDArray[Any], codes: Codes | None, row: int) -> float:
    return np.float64(table[row] if codes is None else table[codes[row]])


@compiled
def _weigh(
    table: NDArray[Any], codes: Codes | None, n: int, block_size: int, sums: NDArray[Any], levels: NDArray[Any]
) -> None:
    """Computes the weight and the level of each block. At level k, a draw takes `block_size >> k` rows."""
    for block in range(len(sums)):
        total, most = 0.0, 0.0
        for row in range(block * block_size, min((block + 1) * block_size, n)):
            weight = _weight(table, codes, row)
            total, most = total + weight, max(most, weight)
        level = 0
        while (block_size >> level) > 1 and (block_size >> level) * most > total * _ROUNDING:
            level += 1
        sums[block], levels[block] = total, level


@compiled
def _take(
    table: NDArray[Any],
    codes: Codes | None,
    n: int,
    block_size: int,
    draws: tuple[Rows, Rows, NDArray[np.uint64]],
    out: Rows,
) -> None:
    """Fills `out` with the rows of consecutive draws. A draw is a block, a number of rows and a random word.

    Draws fill slots of `block_size` positions. Rows of the last draw that do not fit into its slot are dropped.
    """
    at = 0
    for block, taken, word in zip(*draws):  # noqa: B905 (numba does not support strict)
        first, last = block * block_size, min((block + 1) * block_size, n)
        total = 0.0
        for row in range(first, last):
            total += _weight(table, codes, row)
        start = (word >> _U64(11)) * _STEP
        row, reached, before = first, _weight(table, codes, first), 0.0
        for number in range(min(taken, block_size - at % block_size)):
            share = start + number / taken
            share -= share >= 1.0
            if share < before:  # at most once: wraps from the end of the block to its beginning
                row, reached = first, _weight(table, codes, first)
            before = share
            while reached <= share * total and row < last - 1:
                row += 1
                reached += _weight(table, codes, row)
            out[at] = row
            at += 1


@compiled
def _waits(table: NDArray[Any], codes: Codes | None, key: Any, out: NDArray[np.float64]) -> None:
    """Computes an exponential waiting time for each row, with its weight as the rate. The shortest waits are drawn.

    It compares random words (von Neumann 1951), because the last bit of a logarithm differs between machines.
    """
    for row in range(len(out)):
        word = mix_word(key + GOLDEN * _U64(row))
        whole = 0.0
        while True:
            word = mix_word(word + GOLDEN)
            first, falls = word, 0
            while True:
                last, word = word, mix_word(word + GOLDEN)
                if word > last:
                    break
                falls += 1
            if falls % 2 == 0:
                break
            whole += 1.0
        out[row] = (whole + first * 2.0**-64) / _weight(table, codes, row)


def _unit(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Random words as numbers in [0, 1)."""
    return np.asarray((words >> _U64(11)) * _STEP)


def _search(ends: NDArray[np.float64], points: NDArray[np.float64]) -> Rows:
    """Number of `ends` at or below each point. Searches in ascending order, which avoids cache misses."""
    order = np.argsort(points)
    found = np.empty(len(points), np.int64)
    found[order] = np.searchsorted(ends, points[order], side="right")
    return found


class Draws(Sampling):
    """A sampling of `total_size` rows per epoch, drawn by weight in blocks of `block_size`.

    The weight of row i is `table[i]`, or `table[codes[i]]` if there are codes; code -1 selects the last entry. With
    `indices` (ascending, stored without a copy) only these rows take part. Raises OptionError for invalid weights.
    """

    shuffles_fetch = True

    def __init__(
        self,
        table: NDArray[Any],
        codes: Codes | None = None,
        *,
        indices: Rows | None,
        block_size: int,
        total_size: int | None,
        replace: bool,
    ) -> None:
        require_count(block_size=block_size)
        _require_weights(table)
        self.block_size, self.repeats = int(block_size), bool(replace)
        self.indices = indices
        self._dataset_rows = len(table if codes is None else codes)
        self._rows, self._table, self._codes = _positive(table, codes, indices)
        self._n = len(self._table if self._codes is None else self._codes)
        if not self._n:
            raise OptionError("no row has a weight above 0, so there would be no minibatch")
        if total_size is not None:
            require_count(total_size=total_size)
            if total_size > self._n and not replace:
                raise OptionError(
                    f"total_size {total_size} is more than the {self._n} rows of positive weight: lower it, or draw "
                    "with replace=True"
                )
        self._total_size = self._n if total_size is None else int(total_size)
        self._chosen: tuple[int, Rows] | None = None  # (key, rows) of the last epoch planned
        if replace:
            self._build()

    def _build(self) -> None:
        """Builds the table: the running weight of the blocks, level by level."""
        n_blocks = -(-self._n // self.block_size)
        require_memory(
            18 * n_blocks, f"the table of {n_blocks} weighted blocks of {self.block_size} rows", "take larger blocks"
        )
        sums, levels = np.empty(n_blocks), np.empty(n_blocks, np.uint8)
        _weigh(self._table, self._codes, self._n, self.block_size, sums, levels)
        counts = [np.count_nonzero(levels == level) for level in range(self.block_size.bit_length())]
        self._order = None if max(counts) == n_blocks else np.argsort(levels, kind="stable")
        self._ends = sums if self._order is None else sums[self._order]
        with np.errstate(over="ignore"):  # an overflow raises below
            np.cumsum(self._ends, out=self._ends)
        if not _MIN_TOTAL <= self._ends[-1] < np.inf:  # smaller float64 numbers have fewer digits
            raise OptionError(f"the weights add up to {self._ends[-1]}: divide them all by their largest")
        self._stops = np.cumsum(counts)  # end of each level in the table
        self._bounds = np.append(0.0, np.where(self._stops > 0, self._ends[self._stops - 1], 0.0))

    def n_rows(self, dataset_rows: int) -> int:
        if dataset_rows != self._dataset_rows:
            raise OptionError(
                f"the weights or labels are for {self._dataset_rows} rows, but the dataset has {dataset_rows}"
            )
        return self._total_size

    def rows(self, start: int, stop: int, *, dataset_rows: int, seed: int, epoch: int) -> Rows:
        if self.repeats:
            rows = self._drawn(start, stop, key_of(seed, epoch))
        else:
            chosen = self._choose(key_of(seed, epoch))
            blocks = BlockShuffling(block_size=self.block_size)
            rows = chosen[blocks.rows(start, stop, dataset_rows=len(chosen), seed=seed, epoch=epoch)]
        return rows if self._rows is None else self._rows[rows]

    def _drawn(self, start: int, stop: int, key: int) -> Rows:
        size = self.block_size
        first, last = start // size, -(-stop // size)
        slots = np.arange(first, last, dtype=_U64)
        weight = _unit(words_at(key, slots)) * self._ends[-1]
        level = np.searchsorted(self._bounds[1:], weight, side="right")
        taken = size >> level
        n_draws = -(-size // taken)
        slot = np.repeat(np.arange(last - first), n_draws)
        number = np.arange(len(slot)) - (np.cumsum(n_draws) - n_draws)[slot]
        level, taken = level[slot], taken[slot]
        words = words_at(key_of(key, 1), slots[slot] * _U64(size) + number.astype(_U64))
        begin, end = self._bounds[level], self._bounds[level + 1]
        entry = _search(self._ends, begin + _unit(words) * (end - begin))
        entry = np.minimum(entry, self._stops[level] - 1)  # rounding may reach the end of the level
        block = entry if self._order is None else self._order[entry]
        out = np.empty((last - first) * size, np.int64)
        _take(self._table, self._codes, self._n, size, (block, taken, mix(words + GOLDEN)), out)
        return out[start - first * size : stop - first * size]

    def _choose(self, key: int) -> Rows:
        """The rows of an epoch without replacement, in ascending order."""
        found = self._chosen  # read once, because several epochs may be planned at the same time
        if found is None or found[0] != key:
            require_memory(
                16 * self._n, f"choosing among {self._n} rows by weight without replacement", "draw with replace=True"
            )
            waits = np.empty(self._n)
            _waits(self._table, self._codes, _U64(key), waits)
            longest = np.partition(waits, self._total_size - 1)[self._total_size - 1]
            chosen = np.flatnonzero(waits <= longest)
            ties = np.flatnonzero(waits[chosen] == longest)[::-1][: len(chosen) - self._total_size]
            found = self._chosen = key, np.delete(chosen, ties)
        return found[1]


def _require_weights(table: NDArray[Any]) -> None:
    for window in windows_of(len(table)):
        weights = table[window]
        wrong = window.start + np.flatnonzero(~((weights >= 0) & np.isfinite(weights)))
        if len(wrong):
            raise OptionError(f"weight {wrong[0]} is {table[wrong[0]]}: weights must be numbers of at least 0")


def require_within(indices: Rows, n_rows: int) -> None:
    """Raises OptionError if one of `indices` (ascending) has no weight or label."""
    if indices[0] < 0 or indices[-1] >= n_rows:
        bad = indices[0] if indices[0] < 0 else indices[-1]
        raise OptionError(
            f"indices holds row {bad}, but the weights or labels are for {n_rows} rows: give one per row of the "
            "dataset, not per row of indices"
        )


def _positive(
    table: NDArray[Any], codes: Codes | None, indices: Rows | None
) -> tuple[Rows | None, NDArray[Any], Codes | None]:
    """The rows that can be drawn (None for all rows), with their table and codes."""
    n_rows = len(table if codes is None else codes)
    if indices is not None:
        require_within(indices, n_rows)
        positive = np.concatenate([np.empty(0, bool), *_are_positive(table, codes, indices)])
        rows = indices if positive.all() else indices[positive]  # one array serves both
    else:
        n_positive = sum(int(np.count_nonzero(window)) for window in _are_positive(table, codes, n_rows))
        if n_positive == n_rows:
            return None, table, codes
        require_memory(
            16 * n_positive,
            "the row numbers of a weighted sampling in which some rows have no weight",
            "take a view of the rows that have one, or give every row a weight above 0",
        )
        rows, filled = np.empty(n_positive, np.int64), 0
        for number, window in enumerate(_are_positive(table, codes, n_rows)):
            found = np.flatnonzero(window)
            rows[filled : filled + len(found)] = number * WINDOW_ROWS + found
            filled += len(found)
    return (rows, table[rows], None) if codes is None else (rows, table, codes[rows])


def _are_positive(table: NDArray[Any], codes: Codes | None, rows: Rows | int) -> Iterator[NDArray[np.bool_]]:
    """Whether the weight of each of some rows, or of the first `rows` rows, is above 0, in windows.

    A mask over all rows would take a byte per row, and NumPy makes an index of 8 bytes per row.
    """
    positive = table > 0 if codes is not None else None
    for window in windows_of(rows if isinstance(rows, int) else len(rows)):
        chosen = window if isinstance(rows, int) else rows[window]
        yield np.asarray(table[chosen] > 0 if codes is None or positive is None else positive[codes[chosen]])
        if codes is not None:
            page_cache.release(codes)
