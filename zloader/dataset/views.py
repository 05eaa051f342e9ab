"""Sets of rows, for views, and samplings within them. Pure.

A RowSet costs one bit per row of the dataset and one count per 512 rows: 14 MB for 100 million rows, however many are
chosen. Looking up the k-th row is a binary search among the counts and a scan of at most 64 bytes; looking up the
position of a row is such a scan alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from zloader.common import page_cache
from zloader.common.compiled import compiled
from zloader.common.deferred import pd
from zloader.common.errors import OptionError
from zloader.common.messages import suggestion
from zloader.common.records import Rows, windows_of
from zloader.dataset.store import OpenedStore
from zloader.order.sampling import Order
from zloader.order.shuffling import as_array, checked_once
from zloader.selecting.columns import Column, ObsColumn
from zloader.selecting.expressions import Mask, RowTest

Given = TypeVar("Given")
Condition: TypeAlias = "str | Sequence[int] | Sequence[bool] | NDArray[Any] | pd.Series"
_STRIDE = 64  # bytes of the bit set per running count: 512 rows
_BITS_SET = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)


@compiled
def _select(bits: NDArray[np.uint8], before: Rows, bits_set: NDArray[np.uint8], positions: Rows, out: Rows) -> None:
    """The indices of the `positions`-th set bits. `before` has the number of set bits before every _STRIDE-th byte."""
    for i in range(len(positions)):
        stride = np.searchsorted(before, positions[i], side="right") - 1
        byte, left = stride * _STRIDE, positions[i] - before[stride]
        while left >= bits_set[bits[byte]]:
            left -= bits_set[bits[byte]]
            byte += 1
        word, bit = bits[byte], 0
        while left or not word & 1:
            left -= word & 1
            word >>= 1
            bit += 1
        out[i] = 8 * byte + bit


@compiled
def _rank(bits: NDArray[np.uint8], before: Rows, bits_set: NDArray[np.uint8], numbers: Rows, out: Rows) -> None:
    """The number of set bits before each of some indices: the inverse of `_select`. -1 if its own bit is not set."""
    for i in range(len(numbers)):
        last, bit = numbers[i] // 8, numbers[i] % 8
        stride = last // _STRIDE
        count = before[stride]
        for byte in range(stride * _STRIDE, last):
            count += bits_set[bits[byte]]
        out[i] = count + bits_set[bits[last] & ((1 << bit) - 1)] if (bits[last] >> bit) & 1 else -1


@dataclass(frozen=True, eq=False)
class RowSet:
    """Some of `n_all` rows in ascending order, at one bit per row. Made by `of`."""

    n_all: int
    bits: NDArray[np.uint8] = field(repr=False)
    before: Rows = field(repr=False)

    @classmethod
    def of(cls, mask: Mask) -> RowSet:
        """The rows at which a mask is True."""
        bits = np.packbits(mask, bitorder="little")
        counts = np.add.reduceat(np.bitwise_count(bits), np.arange(0, len(bits), _STRIDE), dtype=np.int64)
        return cls(n_all=len(mask), bits=bits, before=np.append(0, np.cumsum(counts)))

    @classmethod
    def of_range(cls, n_all: int, rows: range) -> RowSet:
        """The rows of an ascending range."""
        mask = np.zeros(n_all, bool)
        mask[rows.start : rows.stop : rows.step] = True
        return cls.of(mask)

    @property
    def n_rows(self) -> int:
        """The number of rows in the set."""
        return int(self.before[-1])

    def __len__(self) -> int:
        return self.n_rows

    def mask(self) -> Mask:
        """A boolean mask over the `n_all` rows."""
        return np.unpackbits(self.bits, count=self.n_all, bitorder="little").view(bool)

    def as_set(self) -> RowSet:
        """The set itself."""
        return self

    def column(self, of_all: ObsColumn) -> ObsColumn:
        """These rows of an obs column of all rows. Its categories stay those of all rows."""
        return replace(of_all, values=self.taken(of_all.values))

    def ordered(self, order: Order) -> Order:
        """An order of these rows as an order of all rows."""
        return replace(
            order, dataset_rows=self.n_all, draw=partial(self._drawn, order), chosen=partial(self._may_come, order)
        )

    def _drawn(self, order: Order, start: int, stop: int, seed: int, epoch: int) -> Rows:
        return self.numbers(order.rows(start, stop, seed=seed, epoch=epoch))

    def _may_come(self, order: Order) -> Mask:
        mask = self.mask()
        if order.chosen is not None:
            mask[mask] = order.chosen()
        return mask

    def taken(self, values: NDArray[Any]) -> NDArray[Any]:
        """`values[self.mask()]` of an array with one entry per row."""
        found = values[self.mask()]
        page_cache.release(values)
        return found

    def all_numbers(self) -> Rows:
        """The rows, ascending (int64)."""
        return np.flatnonzero(self.mask())

    def numbers(self, positions: Rows) -> Rows:
        """The rows at some positions in the set, each from 0 to its length - 1, as in `array_of_rows[positions]`."""
        out = np.empty(len(positions), np.int64)
        _select(self.bits, self.before, _BITS_SET, np.ascontiguousarray(positions, np.int64), out)
        return out

    def positions(self, numbers: Rows) -> Rows:
        """The positions of some rows in the set, in an array of any shape, -1 for others: the inverse of `numbers`."""
        out = np.empty(numbers.size, np.int64)
        _rank(self.bits, self.before, _BITS_SET, np.ascontiguousarray(numbers, np.int64).reshape(-1), out)
        return out.reshape(numbers.shape)

    def narrowed(self, rows: RowSet) -> RowSet:
        """The rows of the set that `rows` has, which numbers them from 0."""
        mask = self.mask()
        mask[mask] = rows.mask()
        return RowSet.of(mask)

    def digest(self, fingerprint: str) -> str:
        """The fingerprint of these rows of a dataset with that fingerprint: 32 hexadecimal digits."""
        hashed = hashlib.sha256(f"{fingerprint} {self.n_all} ".encode())
        hashed.update(np.ascontiguousarray(self.bits).data)
        return hashed.hexdigest()[:32]


@dataclass(frozen=True)
class AllRows:
    """All `n_all` rows of a dataset. It answers what a RowSet answers, without bits and without copies."""

    n_all: int

    @property
    def n_rows(self) -> int:
        """The number of rows. Damaged metadata may name more than `len` can return."""
        return self.n_all

    def __len__(self) -> int:
        return self.n_rows

    def as_set(self) -> RowSet:
        """The rows as a RowSet."""
        return RowSet.of_range(self.n_all, range(self.n_all))

    def _itself(self, given: Given) -> Given:
        """What is asked for in all rows is what was given."""
        return given

    column = ordered = taken = numbers = positions = narrowed = _itself


def rows_matching(condition: Condition, column: Column, n_rows: int) -> RowSet:
    """Those of `n_rows` rows that an expression, a mask, or row numbers in any order and without repeats choose.

    Raises OptionError; and MissingColumnError for an expression with an unknown obs column.
    """
    mask = np.zeros(n_rows, bool)
    if isinstance(condition, str):
        test = RowTest(condition, column)
        for window in windows_of(n_rows):
            mask[window] = test(window)
        return RowSet.of(mask)
    chosen = as_array(condition)
    if chosen.dtype == bool:
        if chosen.shape != (n_rows,):
            raise OptionError(f"give a mask over all {n_rows} rows, not one of shape {chosen.shape}")
        return RowSet.of(chosen)
    if chosen.shape != (0,):
        rows = checked_once(chosen)
        if rows[0] < 0 or rows[-1] >= n_rows:
            bad = rows[0] if rows[0] < 0 else rows[-1]
            raise OptionError(f"row {bad} does not exist: the rows are 0 to {n_rows - 1}")
        mask[rows] = True
    return RowSet.of(mask)


def moved(mask: Mask, stores: Sequence[OpenedStore], to: Sequence[OpenedStore]) -> Mask:
    """A mask over the rows of some stores as a mask over the rows of the stores `to`, which must include them.

    Raises OptionError for a store with chosen rows that is not among them.
    """
    begins = np.cumsum([0, *(store.n_obs for store in to)])
    found, first, unused = np.zeros(begins[-1], bool), 0, list(range(len(to)))
    for store in stores:
        of_store = mask[first : first + store.n_obs]
        first += store.n_obs
        number = next((number for number in unused if to[number].fingerprint == store.fingerprint), None)
        if number is not None:
            unused.remove(number)  # a store may have been opened several times in one dataset
            found[begins[number] : begins[number + 1]] = of_store
        elif of_store.any():
            near = suggestion(store.location.url, [each.location.url for each in to])
            raise OptionError(
                f"a group has rows of {store.location.url}, which is not a store of the dataset, or has changed since "
                f"the dataset was opened: give rows of the dataset's own stores{near}"
            )
    return found
