"""Rows split into parts: by fractions or sizes, label by label, or with each label's share in every part. Pure.

Nothing draws random numbers: it is a keyed permutation, the same on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice, product

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from zloader.common.errors import OptionError
from zloader.common.records import Rows
from zloader.order.permutation import key_of, permute
from zloader.selecting.columns import Column, ObsColumn
from zloader.selecting.expressions import Mask

Shares = Sequence[float] | Mapping[str, float]
_WINDOW = 1 << 20  # rows that are split together
_ROUNDING = 1e-6  # that fractions which add up to 1 may be off, as float32 are
_TRIES = 20_000  # of exchanges between two parts: well below a second


def split_rows(
    shares: Shares, column: Column, n_rows: int, *, by: str | None, stratify: str | None, seed: int
) -> NDArray[np.integer]:
    """For each of `n_rows` rows the number of the part that it goes to; one that is in no part has the next number.

    Raises OptionError, or MissingColumnError.
    """
    if by is not None and stratify is not None:
        raise OptionError("by and stratify exclude each other: whole groups cannot keep the proportions of labels")
    for option, name in (("by", by), ("stratify", stratify)):
        if not isinstance(name, str | None):
            raise OptionError(f"{option} takes the name of one obs column, such as 'donor', not {name!r}")
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise OptionError(f"seed must be a whole number of at least 0, not {seed!r}")
    try:
        sizes = _sizes(list(shares.values() if isinstance(shares, Mapping) else shares), n_rows)
    except TypeError as error:
        raise OptionError(f"give the parts as a list such as [0.9, 0.1], or a dict by name, not {shares!r}") from error
    if by is not None:
        groups, counts = _classes(by, column(by))
        needed, there = np.count_nonzero(sizes[:-1]), np.count_nonzero(counts)
        if needed > there:
            raise OptionError(
                f"{needed} parts need as many labels, but obs column {by!r} has {there}: give fewer parts"
            )
        parts = _parts_of_groups(counts, sizes, key_of(seed))
        return np.asarray(parts[groups])  # rows without a label, -1, are the last group
    if stratify is not None:
        return _spread(*_classes(stratify, column(stratify)), sizes, seed)
    return _spread(None, np.array([n_rows]), sizes, seed)


def _sizes(shares: Sequence[float], n_rows: int) -> Rows:
    """Rows of each part, and of what is left over."""
    if not shares or any(
        isinstance(share, bool) or not isinstance(share, int | float | np.number) or not share >= 0 for share in shares
    ):
        raise OptionError(f"give each part a fraction or a number of rows, not {list(shares)!r}")
    whole = [isinstance(share, int | np.integer) for share in shares]
    if all(whole):
        sizes = [int(share) for share in shares]
        if sum(sizes) > n_rows:
            raise OptionError(f"parts of {' + '.join(map(str, sizes))} rows are more than the {n_rows} that there are")
        return np.array([*sizes, n_rows - sum(sizes)], np.int64)
    if any(whole):
        raise OptionError(f"give all parts fractions, or all of them numbers of rows, not {list(shares)!r}")
    ends = np.cumsum(np.asarray(shares, np.float64))
    if not ends[-1] <= 1 + _ROUNDING:
        raise OptionError(f"the fractions {list(shares)!r} add up to {ends[-1]:g}, more than 1")
    if ends[-1] >= 1 - _ROUNDING:
        ends[ends >= ends[-1]] = 1
    rows: Rows = np.floor(np.minimum(ends, 1) * n_rows + 0.5).astype(np.int64)
    return np.diff(rows, prepend=0, append=n_rows)


def _classes(name: str, column: ObsColumn) -> tuple[NDArray[np.integer], Rows]:
    """For each row the number of its label, from 0, or -1, and how many rows have each; -1 at the end."""
    codes = column.values
    if column.categories is None:
        # Whole numbers and booleans are held as floats where some are missing, which are NaN and get code -1.
        if codes.dtype.kind not in "biu" and not (np.isnan(codes) | (np.trunc(codes) == codes)).all():
            raise OptionError(f"obs column {name!r} holds {codes.dtype}: labels, whole numbers or booleans are needed")
        codes, labels = pd.factorize(codes, sort=True)
        n_labels = len(labels)
    else:
        n_labels = len(column.categories)
    counts = np.zeros(n_labels + 1, np.int64)
    for start in range(0, len(codes), _WINDOW):
        counts += np.bincount(codes[start : start + _WINDOW].astype(np.int64) % (n_labels + 1), minlength=n_labels + 1)
    return codes, counts


def _parts_of_groups(counts: Rows, sizes: Rows, key: int) -> NDArray[np.integer]:
    """The part that each group goes to: large groups first, in random order where less than twice as large as others.

    Each goes where most rows are missing yet; then no part stays empty that should have rows, and then groups are moved
    and exchanged between two parts while that brings both together nearer to their sizes.
    """
    order = np.lexsort((permute(np.arange(len(counts)), len(counts), key), -np.frexp(counts)[1]))
    dealt = counts[order[counts[order] > 0]]
    missing, parts = sizes.copy(), np.zeros(len(dealt), np.intp)
    for group, count in enumerate(dealt.tolist()):
        part = parts[group] = np.argmax(missing)
        missing[part] -= count
    needed = np.append(sizes[:-1] > 0, False)  # what is left over may be nothing
    _fill(dealt, parts, missing, needed)
    tries, nearer = 0, True
    while nearer and tries < _TRIES:
        before = missing.copy()
        pairs = product(np.flatnonzero(missing < 0).tolist(), np.flatnonzero(missing > 0).tolist())
        for giver, taker in islice(pairs, _TRIES - tries):
            _exchange(dealt, parts, missing, needed, giver, taker)
            tries += 1
        nearer = not np.array_equal(missing, before)
    of_group = np.zeros(len(counts), np.min_scalar_type(len(sizes)))
    of_group[order[: len(dealt)]] = parts
    return of_group


def _fill(dealt: Rows, parts: NDArray[np.intp], missing: Rows, needed: Mask) -> None:
    """Gives each empty part that needs a group the one that costs the others least."""
    for taker in np.flatnonzero(needed & (np.bincount(parts, minlength=len(missing)) == 0)).tolist():
        spare = (np.bincount(parts, minlength=len(missing)) > 1) | ~needed
        groups = np.flatnonzero(spare[parts])
        short = missing[parts[groups]]
        costs = abs(short + dealt[groups]) - abs(short) + abs(missing[taker] - dealt[groups])
        group = groups[np.argmin(costs)]
        missing[parts[group]] += dealt[group]
        missing[taker] -= dealt[group]
        parts[group] = taker


def _exchange(dealt: Rows, parts: NDArray[np.intp], missing: Rows, needed: Mask, giver: int, taker: int) -> None:
    """Moves a group from a part with too many rows to one with too few, for one in return or for none, if that helps.

    What is moved on balance should be what `taker` lacks: of the sorted groups that may return, one of two neighbours
    is the best for each that is given.
    """
    given, returned = np.flatnonzero(parts == giver), np.flatnonzero(parts == taker)
    returned = returned[np.argsort(dealt[returned], kind="stable")]
    if len(given) > 1 or not needed[giver]:
        returned = np.append(-1, returned)  # none
    if not len(given) or not len(returned):
        return
    back = np.where(returned < 0, 0, dealt[returned])
    after = np.searchsorted(back, dealt[given] - missing[taker])
    places = np.clip([after - 1, after], 0, len(back) - 1)
    moved = dealt[given] - back[places]
    apart = abs(missing[giver] + moved) + abs(missing[taker] - moved)
    best = np.unravel_index(np.argmin(apart), apart.shape)
    if apart[best] < abs(missing[giver]) + abs(missing[taker]):
        missing[giver] += moved[best]
        missing[taker] -= moved[best]
        parts[given[best[1]]] = taker
        if returned[places[best]] >= 0:
            parts[returned[places[best]]] = giver


def _spread(codes: NDArray[np.integer] | None, counts: Rows, sizes: Rows, seed: int) -> NDArray[np.integer]:
    """The part of each row: parts have just these sizes, and of each label their share, to a row."""
    ends = np.cumsum(_quotas(counts, sizes), axis=1)
    n_rows, n_labels = int(sizes.sum()), len(counts)
    parts = np.empty(n_rows, np.min_scalar_type(len(sizes)))
    reached = np.zeros(n_labels, np.int64)
    for start in range(0, n_rows, _WINDOW):
        stop = min(start + _WINDOW, n_rows)
        labels = np.zeros(stop - start, np.uint8)
        if codes is not None:  # in the smallest type: the fewer bytes, the faster they are sorted
            labels = (codes[start:stop].astype(np.int64) % n_labels).astype(np.min_scalar_type(n_labels))
        order = np.argsort(labels, kind="stable")
        firsts = np.searchsorted(labels[order], np.arange(n_labels + 1))
        for label in np.flatnonzero(np.diff(firsts)).tolist():
            rows = order[firsts[label] : firsts[label + 1]]
            number = reached[label] + np.arange(len(rows))  # of the row, among those with its label
            place = permute(number, int(counts[label]), key_of(seed, label))
            parts[start + rows] = np.searchsorted(ends[label], place, side="right")
            reached[label] += len(rows)
    return parts


def _quotas(counts: Rows, sizes: Rows) -> Rows:
    """Rows of each label (down) in each part (across): whole numbers that add up to both.

    Part by part, of the rows that are left: what is rounded in running sums adds up.
    """
    left = counts.copy()
    quotas = np.empty((len(counts), len(sizes)), np.int64)
    for part, size in enumerate(sizes.tolist()):
        total = max(1, int(left.sum()))
        running = [(2 * end * size + total) // (2 * total) for end in np.cumsum(left).tolist()]
        quotas[:, part] = np.diff(running, prepend=0)
        left -= quotas[:, part]
    return quotas
