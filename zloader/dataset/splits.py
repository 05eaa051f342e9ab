"""Splitting rows into parts: by fractions or sizes, by whole labels, stratified by label, or in blocks. Pure.

A keyed permutation takes the place of random numbers, so a seed gives the same split on every machine. The cost per row
is constant. Arrays over all rows have a byte or two per row, and wider numbers are made window by window.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common import page_cache
from zloader.common.checks import is_number, one_or_more, require_count, require_natural
from zloader.common.errors import OptionError
from zloader.common.records import Rows, windows_of
from zloader.order.permutation import key_of, permute, words_at
from zloader.selecting.columns import Column
from zloader.selecting.expressions import Mask
from zloader.selecting.groups import by_value, count_codes, groups_of

Names = str | Sequence[str]
BLOCK_ROWS = 512  # the chunks at the ends of a block are read by two machines, a few percent of 512 rows
# Blocks per part. Minibatches of rows sorted by 14 labels have 0.005 bits less than in the order of all rows with 64
# blocks, and 0.03 less with 32.
_BLOCKS, _LEAST_BLOCK = 64, 64
_TRIES = 20_000  # attempts at an exchange between two parts; takes well below a second
_ROUNDING = 1e-6  # tolerance for fractions that should add up to 1, such as float32 values


def parts_of_rows(
    shares: Sequence[float], column: Column, n_rows: int, *, by: Names | None, stratify: Names | None, seed: int
) -> NDArray[np.integer]:
    """The number of the part of each row. Rows left over get the last number plus one.

    Raises OptionError or MissingColumnError.
    """
    if by is not None and stratify is not None:
        raise OptionError("give either by or stratify, not both: whole groups cannot keep the proportions of labels")
    by_columns, strata = _names(by=by), _names(stratify=stratify)
    require_natural(seed=seed)
    sizes = _sizes(shares, n_rows)
    if not by_columns and not strata:
        return _spread(np.zeros(n_rows, np.uint8), np.array([n_rows]), sizes, seed)
    codes, counts = _classes(by_columns or strata, column, n_rows)
    if strata:
        return _spread(codes, counts, sizes, seed)
    needed, there = np.count_nonzero(sizes[:-1]), np.count_nonzero(counts)
    if needed > there:
        raise OptionError(f"{needed} parts need as many labels, but {_named(by_columns)} has {there}: give fewer parts")
    return _looked_up(_parts_of_groups(counts, sizes, key_of(seed)), codes)


def dealt_in_blocks(n_parts: int, n_rows: int, *, block_size: int, seed: int) -> NDArray[np.integer]:
    """The number of the part of each row, in equal parts. Rows left over get the last number plus one.

    The rows are cut into strata, and each stratum into a block for each part. At random, every stratum deals its blocks
    to the parts. Raises OptionError.
    """
    require_count(parts=n_parts, block_size=block_size)
    require_natural(seed=seed)
    if n_rows < n_parts:
        raise OptionError(f"{n_rows} rows cannot be divided into {n_parts} parts: give fewer parts")
    part_rows = n_rows // n_parts
    n_strata = max(1, part_rows // min(block_size, max(part_rows // _BLOCKS, _LEAST_BLOCK)))
    sizes = np.diff(part_rows * np.arange(n_strata + 1) // n_strata)
    words = words_at(key_of(seed, n_parts, n_strata), np.arange(n_strata * n_parts, dtype=np.uint64))
    dealt = np.argsort(words.reshape(n_strata, n_parts), axis=1, kind="stable").astype(np.min_scalar_type(n_parts))
    found = np.full(n_rows, n_parts, dealt.dtype)
    found[: part_rows * n_parts] = np.repeat(dealt.reshape(-1), np.repeat(sizes, n_parts))
    return found


def listed(shares: Sequence[float]) -> list[float]:
    """The shares as a list. Raises OptionError for anything else, such as a mapping."""
    if isinstance(shares, Mapping) or not isinstance(shares, Iterable):
        raise OptionError(f"give the parts as a list such as [0.9, 0.1], not {shares!r}")
    return list(shares)


def _sizes(shares: Sequence[float], n_rows: int) -> Rows:
    """The number of rows of each part, and at the end of the rows left over."""
    if not shares or any(not is_number(share) or not share >= 0 for share in shares):
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


def _named(names: Sequence[str]) -> str:
    return f"obs column {names[0]!r}" if len(names) == 1 else f"{len(names)} obs columns together ({', '.join(names)})"


def _classes(names: Sequence[str], column: Column, n_rows: int) -> tuple[NDArray[np.integer], Rows]:
    """The label code of each row (-1 for none), and the rows per code, with those of -1 at the end.

    With several columns, a label is one of each, and a row that lacks one of them has none.
    """
    if len(names) > 1:
        groups = groups_of(names, column, n_rows)
        numbers = np.where(groups.complete, np.cumsum(groups.complete) - 1, -1)
        counts = np.append(groups.sizes[groups.complete], groups.sizes[~groups.complete].sum())
        return _looked_up(numbers.astype(np.min_scalar_type(-len(counts))), groups.codes), counts
    codes, n_labels = column(names[0]).classes(f"obs column {names[0]!r}")
    counts = np.zeros(n_labels + 1, np.int64)
    count_codes(codes, counts)
    return codes, counts


def _looked_up(table: NDArray[np.integer], codes: NDArray[np.integer]) -> NDArray[np.integer]:
    """`table[codes]`, without the index of 8 bytes per row that NumPy makes. The code -1 selects the last entry."""
    found = np.empty(len(codes), table.dtype)
    for window in windows_of(len(codes)):
        found[window] = table[codes[window]]
    page_cache.release(codes)
    return found


def _spread(codes: NDArray[np.integer], counts: Rows, sizes: Rows, seed: int) -> NDArray[np.integer]:
    """The part of each row. Parts have these sizes, and their share of each label to within one row.

    With a single label, its code does not matter.
    """
    ends = np.cumsum(_quotas(counts, sizes), axis=1)
    n_labels, reached = len(counts), np.zeros(len(counts), np.int64)
    found = np.empty(len(codes), np.min_scalar_type(len(sizes)))
    for window in windows_of(len(codes)):
        parts = found[window]
        of_labels: Iterable[tuple[int, Any]] = [(0, slice(None))]
        if n_labels > 1:  # the code -1 counts as the last label; small numbers sort fastest
            of_labels = by_value((codes[window].astype(np.int64) % n_labels).astype(np.min_scalar_type(n_labels)))
        for label, rows in of_labels:
            number = reached[label] + np.arange(len(parts[rows]))  # rank of each row among the rows with its label
            position = permute(number, int(counts[label]), key_of(seed, label))
            parts[rows] = np.searchsorted(ends[label], position, side="right")
            reached[label] += len(number)
    page_cache.release(codes)
    return found


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
