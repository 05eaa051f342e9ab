"""Some rows of a dataset: which they are, and how samplings see them. Pure.

The rows of a view are one bit each, and a count for every 512 of them finds the k-th: 14 MB for 100 million rows,
whichever are chosen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from zloader.common.compiled import compiled
from zloader.common.errors import OptionError
from zloader.common.records import Rows
from zloader.common.sharing import SharesArrays
from zloader.order.sampling import Sampling, checked_once, require_rows
from zloader.selecting.columns import Column
from zloader.selecting.expressions import Mask, matching

Condition: TypeAlias = str | Sequence[int] | Sequence[bool] | NDArray[Any] | pd.Series
_STRIDE = 64  # bytes of bits that are counted together
_POPULATION = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)


@compiled
def _select(bits: NDArray[np.uint8], before: Rows, population: NDArray[np.uint8], positions: Rows, out: Rows) -> None:
    """The places of the set bits number `positions`; `before` counts those before every _STRIDE bytes."""
    for i in range(len(positions)):
        stride = np.searchsorted(before, positions[i], side="right") - 1
        byte, left = stride * _STRIDE, positions[i] - before[stride]
        while left >= population[bits[byte]]:
            left -= population[bits[byte]]
            byte += 1
        word, place = bits[byte], 0
        while left or not word & 1:
            left -= word & 1
            word >>= 1
            place += 1
        out[i] = 8 * byte + place


@dataclass(frozen=True, eq=False)
class RowSet(SharesArrays):
    """Some of `n_all` rows in ascending order, as bits; made by `of`."""

    n_all: int
    bits: NDArray[np.uint8] = field(repr=False)
    before: Rows = field(repr=False)

    @classmethod
    def of(cls, mask: Mask) -> RowSet:
        """Those rows at which the mask is True."""
        bits = np.packbits(mask, bitorder="little")
        counts = np.add.reduceat(np.bitwise_count(bits), np.arange(0, len(bits), _STRIDE), dtype=np.int64)
        return cls(n_all=len(mask), bits=bits, before=np.append(0, np.cumsum(counts)))

    def __len__(self) -> int:
        return int(self.before[-1])

    def mask(self) -> Mask:
        """A boolean for each of `n_all` rows."""
        return np.unpackbits(self.bits, count=self.n_all, bitorder="little").view(bool)

    def numbers(self, positions: Rows) -> Rows:
        """The row numbers at some positions in the set, each at least 0 and below its length."""
        out = np.empty(len(positions), np.int64)
        _select(self.bits, self.before, _POPULATION, np.ascontiguousarray(positions, np.int64), out)
        return out

    def positions(self, numbers: Rows) -> Rows:
        """Where some rows of the set stand in it: the inverse of `numbers`."""
        byte, bit = np.divmod(numbers, 8)
        up_to = np.cumsum(np.bitwise_count(self.bits), dtype=np.int64)
        return np.asarray(up_to[byte] - np.bitwise_count(self.bits[byte] >> bit.astype(np.uint8)))

    def narrowed(self, mask: Mask) -> RowSet:
        """Those rows of the set at which a mask over the set is True."""
        wide = self.mask()
        wide[wide] = mask
        return RowSet.of(wide)

    def digest(self, fingerprint: str) -> str:
        """A fingerprint of these rows of what has that fingerprint: 32 hexadecimal digits."""
        return hashlib.sha256(f"{fingerprint} {self.n_all} ".encode() + self.bits.tobytes()).hexdigest()[:32]


@dataclass(frozen=True, eq=False)
class Within:
    """A sampling of the rows of a view: `sampling` counts them from 0, and the rows given are those of the dataset."""

    sampling: Sampling
    chosen: RowSet

    @property
    def shuffles_fetch(self) -> bool:
        """As the sampling says."""
        return self.sampling.shuffles_fetch

    @property
    def block_size(self) -> int:
        """Consecutive rows of the view; 1 where the sampling has no blocks."""
        return getattr(self.sampling, "block_size", 1)

    @property
    def repeats(self) -> bool:
        """Whether a row may come more than once an epoch."""
        return getattr(self.sampling, "repeats", False)

    @property
    def indices(self) -> Rows:
        """The rows of the dataset that take part, as other samplings name them."""
        positions = getattr(self.sampling, "indices", None)
        if positions is None:
            return np.flatnonzero(self.chosen.mask())
        return self.chosen.numbers(np.asarray(positions))

    def n_rows(self, dataset_rows: int) -> int:
        """How many rows an epoch has."""
        return self.sampling.n_rows(len(self.chosen))

    def rows(self, start: int, stop: int, *, dataset_rows: int, seed: int, epoch: int) -> Rows:
        """The rows at positions `[start, stop)`, numbered as in the dataset."""
        n_rows = len(self.chosen)
        positions = self.sampling.rows(start, stop, dataset_rows=n_rows, seed=seed, epoch=epoch)
        require_rows(positions, self.sampling, start, stop, n_rows)
        return self.chosen.numbers(positions)


def mask_of(condition: Condition, column: Column, n_rows: int, names: Sequence[str] = ()) -> Mask:
    """Which of `n_rows` rows an expression, a mask or row numbers (each once, in any order) choose.

    Raises OptionError, or MissingColumnError for an expression.
    """
    if isinstance(condition, str):
        return matching(condition, column, n_rows, names)
    chosen = np.asarray(condition)
    if chosen.dtype == bool:
        if chosen.shape != (n_rows,):
            raise OptionError(f"a mask over {n_rows} rows is needed, not one of shape {chosen.shape}")
        return chosen
    mask = np.zeros(n_rows, bool)
    if chosen.shape != (0,):
        rows = checked_once(chosen)
        assert rows is not None
        if rows[0] < 0 or rows[-1] >= n_rows:
            bad = rows[0] if rows[0] < 0 else rows[-1]
            raise OptionError(f"row {bad} is not there: there are the rows 0 to {n_rows - 1}")
        mask[rows] = True
    return mask
