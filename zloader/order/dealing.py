"""How many sets each group has in an epoch, and in which order they come. Pure.

The sets are dealt like cards: sorted by group, with the groups in random order, one set to each minibatch in turn, and
the minibatches in random order. So a group that has no more sets than there are minibatches never comes twice in one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zloader.common.records import Rows
from zloader.order.permutation import key_of, shuffled


def shared_out(weights: Rows, total: int, key: int) -> Rows:
    """`total` divided by weight (whole numbers). Each share is rounded up or down, at random, to a whole number.

    On average over keys a share is exactly `total * weight / sum of weights`.
    """
    order = shuffled(len(weights), key_of(key, 1))
    ends = np.cumsum(weights[order]).tolist()  # Python's integers do not overflow
    offset = key_of(key, 2) % ends[-1]
    counts = np.empty(len(weights), np.int64)
    counts[order] = np.diff([(total * end + offset) // ends[-1] for end in ends], prepend=0)
    return counts


def dealt(counts: Rows, per_minibatch: int, key: int) -> tuple[NDArray[np.int32], Rows]:
    """The order of the sets of groups that have `counts` sets: the group of each set, and its number in the group."""
    total = int(counts.sum())
    order = shuffled(len(counts), key_of(key, 1))
    taken = counts[order]
    group = np.repeat(order, taken)
    number = np.arange(total) - np.repeat(np.cumsum(taken) - taken, taken)
    minibatches = shuffled(-(-total // per_minibatch), key_of(key, 2))
    places = (minibatches * per_minibatch + np.arange(per_minibatch)[:, None]).reshape(-1)
    places = places[places < total]  # the last minibatch may have fewer sets
    groups, numbers = np.empty(total, np.int32), np.empty(total, np.int64)
    groups[places], numbers[places] = group, number
    return groups, numbers
