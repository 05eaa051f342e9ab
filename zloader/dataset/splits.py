"""Splitting rows into parts: by fractions or sizes, by whole labels, or stratified by label. Pure.

Rows may be held out, such as those of a cell line: then only these are split, and all others belong to the first part.
Controls are split apart from the other rows and stratified, so that every part has some of its own.

A keyed permutation takes the place of random numbers, so a seed gives the same split on every machine. The cost per row
is constant. Splitting by whole labels takes one pass over the labels, largest first, and then at most 20,000 attempts
to improve the sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.checks import one_or_more
from zloader.common.errors import OptionError
from zloader.common.records import Rows
from zloader.order.permutation import key_of, permute
from zloader.selecting.columns import Column, ObsColumn
from zloader.selecting.expressions import Mask
from zloader.selecting.groups import groups_of

Names = str | Sequence[str]
Shares = Sequence[float] | Mapping[str, float]
_WINDOW = 1 << 20  # rows handled at a time
_ROUNDING = 1e-6  # tolerance for fractions that should add up to 1, such as float32 values
_TRIES = 20_000  # attempts at an exchange between two parts; takes well below a second


def split_rows(
    shares: Shares, column: Column, n_rows: int, *, by: Names | None, stratify: Names | None, seed: int
) -> NDArray[np.integer]:
    """The number of the part of each of `n_rows` rows. Rows left over get the number after the last part.

    Raises OptionError or MissingColumnError.
    """
    if by is not None and stratify is not None:
        raise OptionError("give either by or stratify, not both: whole groups cannot keep the proportions of labels")
    by_columns, strata = _names(by=by), _names(stratify=stratify)
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise OptionError(f"seed must be a whole number of at least 0, not {seed!r}")
    sizes = _sizes(_listed(shares), n_rows)
    if by_columns:
        groups, counts = _classes(by_columns, column, n_rows)
        needed, there = np.count_nonzero(sizes[:-1]), np.count_nonzero(counts)
        if needed > there:
            raise OptionError(
                f"{needed} parts need as many labels, but {_named(by_columns)} has {there}: give fewer parts"
            )
        parts = _parts_of_groups(counts, sizes, key_of(seed))
        found = np.empty(n_rows, parts.dtype)
        for start in range(0, n_rows, _WINDOW):  # NumPy makes an index of 8 bytes per row
            window = slice(start, min(start + _WINDOW, n_rows))
            found[window] = parts[groups[window]]  # the code -1 of rows without a label selects the last group
        return found
    if strata:
        return _spread(*_classes(strata, column, n_rows), sizes, seed)
    return _spread(None, np.array([n_rows]), sizes, seed)


def _listed(shares: Shares) -> list[float]:
    try:
        return list(shares.values() if isinstance(shares, Mapping) else shares)
    except TypeError as error:
        raise OptionError(f"give the parts as a list such as [0.9, 0.1], or a dict by name, not {shares!r}") from error


def _sizes(shares: Sequence[float], n_rows: int) -> Rows:
    """The number of rows of each part, and at the end of the rows left over."""
    if not shares or any(
        isinstance(share, bool) or not isinstance(share, int | float | np.number) or not share >= 0 for share in shares
    ):
        raise OptionError(f"give each part a fraction or a number of rows, not {list(shares)!r}")
    whole = [isinstance(share, int | np.integer) for share in shares]
    if all(whole):
        sizes = [int(share) for share in shares]
        if sum(sizes) > n_rows:
            raise OptionError(f"parts of {' + '.join(map(str, sizes))} rows need more than the {n_rows} rows there are")
        return np.array([*sizes, n_rows - sum(sizes)], np.int64)
    if any(whole):
        raise OptionError(f"give fractions for all parts or numbers of rows for all parts, not {list(shares)!r}")
    ends = np.cumsum(np.asarray(shares, np.float64))
    if not ends[-1] <= 1 + _ROUNDING:
        raise OptionError(f"the fractions {list(shares)!r} add up to {ends[-1]:g}, more than 1")
    if ends[-1] >= 1 - _ROUNDING:
        ends[ends >= ends[-1]] = 1
    rows: Rows = np.floor(np.minimum(ends, 1) * n_rows + 0.5).astype(np.int64)
    return np.diff(rows, prepend=0, append=n_rows)


@dataclass(frozen=True, kw_only=True)
class SplitRule:
    """How rows are split: as by `split_rows`. `held_by` are the columns by which rows are held out."""

    by: Names | None
    stratify: Names | None
    held_by: Sequence[str]
    seed: int

    def parts(
        self, shares: Shares, column: Column, n_rows: int, *, held: Mask | None, controls: Mask | None
    ) -> NDArray[np.integer]:
        """The number of the part of each row. Without a mask of rows held out, all rows are split.

        All other rows get the first part. Controls among the rows held out are split apart, stratified by the columns
        of `by` and `held_by`.
        """
        if held is None and controls is None:
            return split_rows(shares, column, n_rows, by=self.by, stratify=self.stratify, seed=self.seed)
        held = np.ones(n_rows, bool) if held is None else held
        controls = np.zeros(n_rows, bool) if controls is None else controls & held
        if not held.any():
            raise OptionError("no row has all of the labels in hold_out, so there is nothing to hold out")
        sizes = _listed(shares)
        if controls.any() and sizes and all(isinstance(size, int | np.integer) for size in sizes):
            raise OptionError(f"give fractions of the rows when there are controls to be split too, not {sizes!r}")
        strata = list(dict.fromkeys([*_names(by=self.by), *self.held_by])) or self.stratify
        parts = np.zeros(n_rows, np.min_scalar_type(len(sizes)))
        for chosen, by, within in ((held & ~controls, self.by, self.stratify), (controls, None, strata)):
            if chosen.any():
                among, n_chosen = functools.partial(_among, column, chosen), int(np.count_nonzero(chosen))
                parts[chosen] = split_rows(shares, among, n_chosen, by=by, stratify=within, seed=self.seed)
        return parts


def condition_of(hold_out: Mapping[str, Any] | None) -> str | None:
    """The rows that have one of the labels in every column, as an expression. Raises OptionError."""
    if hold_out is None:
        return None
    if not isinstance(hold_out, Mapping) or not hold_out:
        raise OptionError(f'hold_out must be labels by obs column, such as {{"cell_line": ["K562"]}}, not {hold_out!r}')
    lists = {
        name: [labels] if isinstance(labels, str) or not isinstance(labels, Iterable) else list(labels)
        for name, labels in hold_out.items()
    }
    for name, labels in lists.items():
        if not labels:
            raise OptionError(f"hold_out lists no label of {name!r}")
    plain = {
        name: [label.item() if isinstance(label, np.generic) else label for label in labels]
        for name, labels in lists.items()
    }
    return " and ".join(f"`{name}` in {labels!r}" for name, labels in plain.items())


def _names(**given: Names | None) -> list[str]:
    """The names that an option gives, one or a list. Raises OptionError for anything else."""
    ((option, names),) = given.items()
    if names is None:
        return []
    found = one_or_more(**{option: names})
    for name in found:
        if not isinstance(name, str):
            raise OptionError(f"{option} must be the name of an obs column, such as 'donor', or a list, not {name!r}")
    return found


def _among(column: Column, chosen: Mask, name: str) -> ObsColumn:
    """A column of the chosen rows only."""
    of_all = column(name)
    return of_all if chosen.all() else replace(of_all, values=of_all.values[chosen])


def _named(names: Sequence[str]) -> str:
    return f"obs column {names[0]!r}" if len(names) == 1 else f"{len(names)} obs columns together ({', '.join(names)})"


def _classes(names: Sequence[str], column: Column, n_rows: int) -> tuple[NDArray[np.integer], Rows]:
    """The label code of each row (-1 for none), and the number of rows per code, with that of -1 at the end.

    With several columns, a label is one of each, and a row that lacks one of them has none.
    """
    if len(names) > 1:
        groups = groups_of(names, column, n_rows)
        numbers = np.where(groups.complete, np.cumsum(groups.complete) - 1, -1)
        counts = np.append(groups.sizes[groups.complete], groups.sizes[~groups.complete].sum())
        return numbers[groups.codes], counts
    codes, n_labels = column(names[0]).classes(f"obs column {names[0]!r}")
    counts = np.zeros(n_labels + 1, np.int64)
    for start in range(0, len(codes), _WINDOW):
        counts += np.bincount(codes[start : start + _WINDOW].astype(np.int64) % (n_labels + 1), minlength=n_labels + 1)
    return codes, counts


def _parts_of_groups(counts: Rows, sizes: Rows, key: int) -> NDArray[np.integer]:
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


def _spread(codes: NDArray[np.integer] | None, counts: Rows, sizes: Rows, seed: int) -> NDArray[np.integer]:
    """The part of each row. Parts have exactly these sizes, and their share of each label to within one row."""
    ends = np.cumsum(_quotas(counts, sizes), axis=1)
    n_rows, n_labels = int(sizes.sum()), len(counts)
    parts = np.empty(n_rows, np.min_scalar_type(len(sizes)))
    reached = np.zeros(n_labels, np.int64)
    for start in range(0, n_rows, _WINDOW):
        stop = min(start + _WINDOW, n_rows)
        labels = np.zeros(stop - start, np.uint8)
        if codes is not None:  # in the smallest dtype, which sorts fastest
            labels = (codes[start:stop].astype(np.int64) % n_labels).astype(np.min_scalar_type(n_labels))
        order = np.argsort(labels, kind="stable")
        firsts = np.searchsorted(labels[order], np.arange(n_labels + 1))
        for label in np.flatnonzero(np.diff(firsts)).tolist():
            rows = order[firsts[label] : firsts[label + 1]]
            number = reached[label] + np.arange(len(rows))  # rank of each row among the rows with its label
            position = permute(number, int(counts[label]), key_of(seed, label))
            parts[start + rows] = np.searchsorted(ends[label], position, side="right")
            reached[label] += len(rows)
    return parts


def _quotas(counts: Rows, sizes: Rows) -> Rows:
    """The number of rows of each label (down) in each part (across), adding up to both `counts` and `sizes`.

    The parts are filled in turn from the rows still left. Rounding the running sums keeps every total exact.
    """
    left = counts.copy()
    quotas = np.empty((len(counts), len(sizes)), np.int64)
    for part, size in enumerate(sizes.tolist()):
        total = max(1, int(left.sum()))
        running = [(2 * end * size + total) // (2 * total) for end in np.cumsum(left).tolist()]
        quotas[:, part] = np.diff(running, prepend=0)
        left -= quotas[:, part]
    return quotas
