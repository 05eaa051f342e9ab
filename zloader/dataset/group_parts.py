"""Deals whole groups of rows, such as those of a donor, to the parts of a split. Pure.

It takes one pass over the groups, largest first, and then at most 20,000 attempts to improve the sizes.
"""

from __future__ import annotations

from itertools import islice, product

import numpy as np
from numpy.typing import NDArray

from zloader.common.records import Rows
from zloader.order.permutation import permute
from zloader.selecting.expressions import Mask

_TRIES = 20_000  # attempts at an exchange between two parts; takes well below a second


def parts_of_groups(counts: Rows, sizes: Rows, key: int) -> NDArray[np.integer]:
    """The part of each group of rows with the same label.

    First a greedy pass: groups go, largest first, to the part that lacks most rows; groups whose sizes have the same
    power of two are in random order. Then every empty part that should have rows gets a group. Finally groups are moved
    or exchanged between two parts for as long as that brings the sizes of both, taken together, closer to the target.
    """
    order = np.lexsort((permute(np.arange(len(counts)), len(counts), key), -np.frexp(counts)[1]))
    dealt = counts[order[counts[order] > 0]]
    deficit, parts = sizes.copy(), np.zeros(len(dealt), np.intp)
    for group, count in enumerate(dealt.tolist()):
        part = parts[group] = np.argmax(deficit)
        deficit[part] -= count
    needed = np.append(sizes[:-1] > 0, False)  # the rows left over may be empty
    _fill(dealt, parts, deficit, needed)
    tries, nearer = 0, True
    while nearer and tries < _TRIES:
        before = deficit.copy()
        pairs = product(np.flatnonzero(deficit < 0).tolist(), np.flatnonzero(deficit > 0).tolist())
        for giver, taker in islice(pairs, _TRIES - tries):
            _exchange(dealt, parts, deficit, needed, giver, taker)
            tries += 1
        nearer = not np.array_equal(deficit, before)
    of_group = np.zeros(len(counts), np.min_scalar_type(len(sizes)))
    of_group[order[: len(dealt)]] = parts
    return of_group


def _fill(dealt: Rows, parts: NDArray[np.intp], deficit: Rows, needed: Mask) -> None:
    """Gives each empty part that needs a group the group whose move costs least in total deviation."""
    for taker in np.flatnonzero(needed & (np.bincount(parts, minlength=len(deficit)) == 0)).tolist():
        spare = (np.bincount(parts, minlength=len(deficit)) > 1) | ~needed
        groups = np.flatnonzero(spare[parts])
        short = deficit[parts[groups]]
        costs = abs(short + dealt[groups]) - abs(short) + abs(deficit[taker] - dealt[groups])
        group = groups[np.argmin(costs)]
        deficit[parts[group]] += dealt[group]
        deficit[taker] -= dealt[group]
        parts[group] = taker


def _exchange(dealt: Rows, parts: NDArray[np.intp], deficit: Rows, needed: Mask, giver: int, taker: int) -> None:
    """Moves a group from a part with too many rows to one with too few, perhaps in exchange for another, if that helps.

    The net number of rows moved should be the number that `taker` lacks. So for each group given, the best group to
    return is one of two neighbours among the groups of `taker` sorted by size, found by binary search.
    """
    given, returned = np.flatnonzero(parts == giver), np.flatnonzero(parts == taker)
    returned = returned[np.argsort(dealt[returned], kind="stable")]
    if len(given) > 1 or not needed[giver]:
        returned = np.append(-1, returned)  # -1: return no group
    if not len(given) or not len(returned):
        return
    back = np.where(returned < 0, 0, dealt[returned])
    after = np.searchsorted(back, dealt[given] - deficit[taker])
    positions = np.clip([after - 1, after], 0, len(back) - 1)
    moved = dealt[given] - back[positions]
    apart = abs(deficit[giver] + moved) + abs(deficit[taker] - moved)
    best = np.unravel_index(np.argmin(apart), apart.shape)
    if apart[best] < abs(deficit[giver]) + abs(deficit[taker]):
        deficit[giver] += moved[best]
        deficit[taker] -= moved[best]
        parts[given[best[1]]] = taker
        if returned[positions[best]] >= 0:
            parts[returned[positions[best]]] = giver
