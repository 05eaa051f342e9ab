"""Compiled loops that both tokenizers need: the known genes of a row, and their order by value. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.compiled import compiled

_U64 = np.uint64
_HALF = _U64(32)
_DIGIT = _U64(11)  # bits that one pass of the sort looks at; the 2 048 counters of two passes fit into the L1 cache
_N_DIGITS = 1 << 11
_LAST_DIGIT = _U64(_N_DIGITS - 1)
_KEYS = _U64(1) << (_DIGIT + _DIGIT)
_LONG = 64  # places that insertion may move a value; it takes quadratic time


@compiled
def known_genes(
    genes: NDArray[Any],
    counts: NDArray[Any],
    slot_of: NDArray[np.int32],
    slots: NDArray[np.int32],
    amounts: NDArray[np.float64],
) -> Any:
    """Writes the slots of a row's nonzero genes, ascending, and their counts. Genes of the same slot are summed.

    `slot_of` has the slot of each gene, or -1 for genes to leave out. Returns how many slots there are, and the total
    of all genes. Returns -1 slots if a count is negative, infinite or NaN.
    """
    kept, total, ascending, last = 0, 0.0, True, -1
    for i in range(len(genes)):
        amount = np.float64(counts[i])
        if not (amount >= 0.0 and amount < np.inf):
            return -1, total
        total += amount
        slot = slot_of[genes[i]]
        slots[kept], amounts[kept] = slot, amount
        keep = (slot >= 0) & (amount != 0.0)  # without a branch, because either case is common
        ascending &= (slot > last) | (not keep)
        last = slot if keep else last
        kept += keep
    if not ascending:
        kept = _merge(slots[:kept], amounts[:kept])
    return kept, total


@compiled
def _merge(slots: NDArray[np.int32], amounts: NDArray[np.float64]) -> int:
    """Sorts the slots of a row, and sums the amounts of those that occur twice. Returns how many are left."""
    n, last, most = len(slots), 0, np.int32(0)  # with loops alone, which numba compiles in a third of the time
    order, words, keys = np.empty(n, np.int64), np.empty((2, n), np.uint64), np.empty(n, np.float64)
    from_slots, from_amounts = np.empty(n, np.int32), np.empty(n, np.float64)
    for i in range(n):
        most = max(most, slots[i])
        from_slots[i], from_amounts[i] = slots[i], amounts[i]
    for i in range(n):
        keys[i] = most + 1 - slots[i]
    sort_down(keys, words, order)
    for i in range(n):
        slots[i], amounts[i] = from_slots[order[i]], from_amounts[order[i]]
    for i in range(1, n):
        if slots[i] == slots[last]:
            amounts[last] += amounts[i]
        else:
            last += 1
            slots[last], amounts[last] = slots[i], amounts[i]
    return last + 1


@compiled
def sort_down(values: NDArray[np.float64], words: NDArray[np.uint64], order: NDArray[np.int64]) -> None:
    """Writes the positions of positive values to `order`: values descending, and positions of equal values ascending.

    The bits of positive floats ascend like the floats. The highest 22 bits in which values of the row differ are sorted
    by radix in two passes. The few values that are equal in these are then compared. `words` is scratch memory of twice
    as many words as values.
    """
    n = len(values)
    if n == 0:
        return
    bits = values.view(np.uint64)
    top = bits.max()
    span, shift = top - bits.min(), _U64(0)
    while span >> shift >= _KEYS:
        shift += _U64(1)
    for i in range(n):
        order[i] = i
    _sort_keys(bits, top, shift, words, order)
    if shift and not _settle(bits, words[0], order):
        for i in range(n):
            order[i] = i
        for number in range(3):  # of 22 bits each, from the lowest on
            _sort_keys(bits, top, _U64(number) * (_DIGIT + _DIGIT), words, order)


@compiled
def _sort_keys(
    bits: NDArray[np.uint64], top: np.uint64, shift: np.uint64, words: NDArray[np.uint64], order: NDArray[np.int64]
) -> None:
    """Sorts positions by 22 bits of `top - bits`, from `shift` on. Equal ones keep their order."""
    n = len(bits)
    low, high = np.zeros(_N_DIGITS, np.int32), np.zeros(_N_DIGITS, np.int32)
    from_words, to_words = words[0], words[1]
    for i in range(n):
        key = ((top - bits[order[i]]) >> shift) & (_KEYS - _U64(1))
        low[key & _LAST_DIGIT] += 1
        high[key >> _DIGIT] += 1
        from_words[i] = (key << _HALF) | _U64(order[i])
    _add_up(low)
    _add_up(high)
    for i in range(n):
        digit = (from_words[i] >> _HALF) & _LAST_DIGIT
        to_words[low[digit]] = from_words[i]
        low[digit] += 1
    for i in range(n):
        digit = to_words[i] >> (_HALF + _DIGIT)
        from_words[high[digit]] = to_words[i]
        high[digit] += 1
    for i in range(n):
        order[i] = np.int64(from_words[i] & _U64(0xFFFFFFFF))


@compiled
def _add_up(counts: NDArray[np.int32]) -> None:
    """Turns the number of each digit into the position of its first word."""
    before = np.int32(0)
    for digit in range(len(counts)):
        here = counts[digit]
        counts[digit] = before
        before += here


@compiled
def _settle(bits: NDArray[np.uint64], words: NDArray[np.uint64], order: NDArray[np.int64]) -> bool:
    """Sorts runs of words with equal keys by all bits. Returns False if a run is too long for that."""
    n, first = len(order), 0
    for i in range(1, n + 1):
        if i < n and words[i] >> _HALF == words[i - 1] >> _HALF:
            continue
        for j in range(first + 1, i):
            position, k = order[j], j
            while k > first and bits[order[k - 1]] < bits[position]:
                order[k] = order[k - 1]
                k -= 1
            order[k] = position
            if j - k > _LONG:
                return False
        first = i
    return True
