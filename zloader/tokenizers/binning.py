"""Compiled loops that put the counts of a row into bins of equal size, as np.quantile and np.digitize do. Pure.

Bins are found for the distinct counts of a row. Whole numbers, of which there are few, are counted in a table; others
are sorted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.compiled import compiled
from zloader.common.records import Rows
from zloader.tokenizers.counts import known_genes, part_of, sort_down, word_at

_U64 = np.uint64
_TABLE = 4096  # smaller whole numbers are counted; the table fits into the L1 cache


@compiled
def bin_rows(
    x: tuple[NDArray[Any], NDArray[Any], NDArray[Any]],
    random: tuple[Rows, NDArray[np.uint64]],
    axis: tuple[NDArray[np.int32], NDArray[np.int32]],
    how: tuple[NDArray[np.float64], float, bool, bool, bool],
    special: tuple[int, int, int],
    out: tuple[NDArray[np.int32], NDArray[np.float32], Rows, Rows],
) -> int:
    """Writes the tokens of rows. Returns the first row with a value that is no count, or -1.

    `random` has the rows' numbers and the keys of two streams of words: which genes are sampled, and their bins. `how`
    is the quantiles at the edges of the bins (none for values as they are), the total to scale to (0 for none), and
    whether to take log1p, to sample, and to draw bins at random.
    """
    indptr, indices, counts = x
    numbers, keys = random
    slot_of, token_of = axis
    quantiles, target, log1p, sample, both = how
    cls, eos, max_length = special
    ids, values, starts, lengths = out
    longest = 1
    for row in range(len(lengths)):
        longest = max(longest, indptr[row + 1] - indptr[row])
    slots, amounts = np.empty(longest, np.int32), np.empty(longest, np.float64)
    which, distinct, upto = np.empty(longest, np.int32), np.empty(longest, np.float64), np.empty(longest, np.int64)
    first_bin, last_bin = np.empty(longest, np.int64), np.empty(longest, np.int64)
    words, order, table = np.empty((2, longest), np.uint64), np.empty(longest, np.int64), np.zeros(_TABLE, np.int32)
    edges = np.empty(len(quantiles), np.float64)
    most = max_length - (cls >= 0) - (eos >= 0)
    for row in range(len(lengths)):
        first, last = indptr[row], indptr[row + 1]
        kept, _ = known_genes(indices[first:last], counts[first:last], slot_of, slots, amounts)
        if kept < 0:
            return row
        total = 0.0
        for k in range(kept):
            total += amounts[k]
        scale = total / target if target > 0 else 1.0
        if len(quantiles):
            n_distinct = _distinct(amounts[:kept], which, (distinct, upto), (words, order), table)
            for j in range(n_distinct):
                distinct[j] = _scaled(distinct[j], scale, log1p)
            _edges(distinct[:n_distinct], upto[:n_distinct], quantiles, edges)
            _digits(distinct[:n_distinct], edges, first_bin, last_bin)
        to = starts[row]
        if cls >= 0:
            ids[to], values[to] = cls, 0
            to += 1
        left = min(kept, most)
        choosing, binning = word_at(keys[0], numbers[row]), word_at(keys[1], numbers[row])
        for k in range(kept):
            if left == 0:
                break
            # Each of the genes that are left is chosen with the same probability (Knuth's algorithm S).
            if sample and left < kept - k and part_of(word_at(choosing, k), kept - k) >= left:
                continue
            left -= 1
            ids[to] = token_of[slots[k]]
            if len(quantiles):
                bins = last_bin[which[k]] - first_bin[which[k]]
                back = part_of(word_at(binning, k), bins) if both and bins > 1 else 0
                values[to] = last_bin[which[k]] - back
            else:
                values[to] = _scaled(amounts[k], scale, log1p)
            to += 1
        if eos >= 0:
            ids[to], values[to] = eos, 0
            to += 1
        lengths[row] = to - starts[row]
    return -1


@compiled
def _scaled(amount: Any, scale: Any, log1p: Any) -> Any:
    scaled = amount / scale
    return np.log1p(scaled) if log1p else scaled


@compiled
def _distinct(
    amounts: NDArray[np.float64],
    which: NDArray[np.int32],
    out: tuple[NDArray[np.float64], Rows],
    scratch: tuple[NDArray[np.uint64], Rows],
    table: NDArray[np.int32],
) -> int:
    """Writes the distinct amounts, ascending, and how many amounts are not greater. Returns how many there are.

    `which` gets the number of each amount among them. `table` is zeros, before and after.
    """
    distinct, upto = out
    words, order = scratch
    n, most = 0, 0
    for i in range(len(amounts)):
        whole = amounts[i] < _TABLE and amounts[i] == np.floor(amounts[i])
        most = max(most, int(amounts[i])) if whole and most >= 0 else -1
    if most >= 0:
        for i in range(len(amounts)):
            table[np.int64(amounts[i])] += 1
        seen = 0
        for count in range(1, most + 1):
            if table[count]:
                seen += table[count]
                distinct[n], upto[n], table[count] = count, seen, n
                n += 1
        for i in range(len(amounts)):
            which[i] = table[np.int64(amounts[i])]
        table[: most + 1] = 0
        return n
    sort_down(amounts, words, order[: len(amounts)])
    for i in range(len(amounts)):
        at = order[len(amounts) - 1 - i]
        if i == 0 or amounts[at] != distinct[n - 1]:
            distinct[n] = amounts[at]
            n += 1
        which[at], upto[n - 1] = n - 1, i + 1
    return n


@compiled
def _edges(
    distinct: NDArray[np.float64], upto: Rows, quantiles: NDArray[np.float64], edges: NDArray[np.float64]
) -> None:
    """np.quantile of the amounts, with its interpolation to the last bit."""
    if len(distinct) == 0:
        return
    last, j = upto[-1] - 1, 0
    for q in range(len(quantiles)):
        place = last * quantiles[q]
        below = min(np.int64(np.floor(place)), last)
        while upto[j] <= below:
            j += 1
        share = place - below
        low, high = distinct[j], distinct[j]
        if below < last and upto[j] <= below + 1:
            high = distinct[j + 1]
        step = high - low
        edges[q] = low + step * share if share < 0.5 else high - step * (1 - share)


@compiled
def _digits(distinct: NDArray[np.float64], edges: NDArray[np.float64], first_bin: Rows, last_bin: Rows) -> None:
    """The number of edges below each amount, and of those that are not above it: its bins are between the two."""
    below, upto = 0, 0
    for j in range(len(distinct)):
        while below < len(edges) and edges[below] < distinct[j]:
            below += 1
        while upto < len(edges) and edges[upto] <= distinct[j]:
            upto += 1
        first_bin[j], last_bin[j] = below, upto
