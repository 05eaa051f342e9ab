"""Splitting rows into parts: by fractions or sizes, by whole labels, or stratified by label. Pure.

Rows may be held out, such as those of a cell line: then only these are split, and all others belong to the first part.
Controls are split apart from the other rows and stratified, so that every part has some of its own.

A keyed permutation takes the place of random numbers, so a seed gives the same split on every machine. The cost per row
is constant, and rows are handled in windows, so that no array over all rows is made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common import page_cache
from zloader.common.checks import is_number, one_or_more
from zloader.common.errors import OptionError
from zloader.common.records import Rows, windows_of
from zloader.dataset.group_parts import parts_of_groups
from zloader.dataset.views import RowSet
from zloader.order.permutation import key_of, permute
from zloader.selecting.columns import Column
from zloader.selecting.expressions import Mask
from zloader.selecting.groups import count_codes, groups_of

Names = str | Sequence[str]
Shares = Sequence[float] | Mapping[str, float]
_ROUNDING = 1e-6  # tolerance for fractions that should add up to 1, such as float32 values


def part_windows(
    shares: Shares, column: Column, among: Among, *, by: Names | None, stratify: Names | None, seed: int
) -> Iterator[NDArray[np.integer]]:
    """The number of the part of each row that is split, window by window. Rows left over get the last number plus one.

    Raises OptionError or MissingColumnError.
    """
    if by is not None and stratify is not None:
        raise OptionError("give either by or stratify, not both: whole groups cannot keep the proportions of labels")
    by_columns, strata = _names(by=by), _names(stratify=stratify)
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise OptionError(f"seed must be a whole number of at least 0, not {seed!r}")
    sizes = _sizes(listed(shares), len(among))
    if by_columns:
        codes, counts = _classes(by_columns, column, among)
        needed, there = np.count_nonzero(sizes[:-1]), np.count_nonzero(counts)
        if needed > there:
            raise OptionError(
                f"{needed} parts need as many labels, but {_named(by_columns)} has {there}: give fewer parts"
            )
        parts = parts_of_groups(counts, sizes, key_of(seed))
        for window in codes():
            yield parts[window]  # the code -1 of rows without a label selects the last group
    elif strata:
        codes, counts = _classes(strata, column, among)
        yield from _spread(codes(), counts, sizes, seed)
    else:
        yield from _spread(among.blank(), np.array([len(among)]), sizes, seed)


@dataclass(frozen=True)
class Among:
    """The rows that are split: all `n_all` rows, or those `chosen`."""

    n_all: int
    chosen: RowSet | None = None

    def __len__(self) -> int:
        return self.n_all if self.chosen is None else len(self.chosen)

    def of(self, values: NDArray[Any]) -> Iterator[NDArray[Any]]:
        """The values of these rows in each window, of an array with one entry for each of all rows."""
        for window in windows_of(self.n_all):
            yield values[window] if self.chosen is None else values[window][self.chosen.within(window)]
            page_cache.release(values)

    def cut(self, values: NDArray[Any]) -> Iterator[NDArray[Any]]:
        """The values of these rows in each window, of an array with one entry for each of these rows."""
        first = 0
        for blank in self.blank():
            yield values[first : first + len(blank)]
            first += len(blank)

    def blank(self) -> Iterator[NDArray[Any]]:
        """A zero for each of these rows, window by window."""
        for window in windows_of(self.n_all):
            n_rows = window.stop - window.start
            n_chosen = n_rows if self.chosen is None else int(np.count_nonzero(self.chosen.within(window)))
            yield np.zeros(n_chosen, np.uint8)

    def restrict(self, column: Column) -> Column:
        """Looks up obs columns of these rows only."""
        if self.chosen is None or len(self.chosen) == self.n_all:
            return column
        chosen = self.chosen
        return lambda name: chosen.column(column(name))


def listed(shares: Shares) -> list[float]:
    """The shares as a list. Raises OptionError for anything but a list or a mapping."""
    try:
        return list(shares.values() if isinstance(shares, Mapping) else shares)
    except TypeError as error:
        raise OptionError(f"give the parts as a list such as [0.9, 0.1], or a dict by name, not {shares!r}") from error


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


@dataclass(frozen=True, kw_only=True)
class SplitRule:
    """How rows are split: as by `split_rows`. `held_by` are the columns by which rows are held out."""

    by: Names | None
    stratify: Names | None
    held_by: Sequence[str]
    seed: int

    def parts(
        self, shares: Shares, column: Column, n_rows: int, *, held: RowSet | None, controls: RowSet | None
    ) -> Iterator[NDArray[np.integer]]:
        """The number of the part of each row, window by window. Without rows held out, all rows are split.

        All other rows get the first part. Controls among the rows held out are split apart, stratified by the columns
        of `by` and `held_by`.
        """
        if held is None and controls is None:
            yield from part_windows(shares, column, Among(n_rows), by=self.by, stratify=self.stratify, seed=self.seed)
            return
        if held is not None and not len(held):
            raise OptionError("no row has all of the labels in hold_out, so there is nothing to hold out")
        rest, controls = _apart(n_rows, held, controls)
        sizes = listed(shares)
        if len(controls) and sizes and all(isinstance(size, int | np.integer) for size in sizes):
            raise OptionError(f"give fractions of the rows when there are controls to be split too, not {sizes!r}")
        strata = list(dict.fromkeys([*_names(by=self.by), *self.held_by])) or self.stratify
        splits = [
            (rows, part_windows(shares, column, Among(n_rows, rows), by=by, stratify=within, seed=self.seed))
            for rows, by, within in ((rest, self.by, self.stratify), (controls, None, strata))
            if len(rows)
        ]
        for window in windows_of(n_rows):
            parts = np.zeros(window.stop - window.start, np.min_scalar_type(len(sizes)))
            for rows, part_of_row in splits:
                parts[rows.within(window)] = next(part_of_row)
            yield parts


def _apart(n_rows: int, held: RowSet | None, controls: RowSet | None) -> tuple[RowSet, RowSet]:
    """The rows held out (None: all rows) that are no controls, and those that are."""

    def masks(window: slice) -> tuple[Mask, Mask]:
        n = window.stop - window.start
        is_held = np.ones(n, bool) if held is None else held.within(window)
        return is_held, np.zeros(n, bool) if controls is None else controls.within(window)

    def rest_of(window: slice) -> Mask:
        is_held, is_control = masks(window)
        return np.asarray(is_held & ~is_control)

    def controls_of(window: slice) -> Mask:
        return np.asarray(np.logical_and(*masks(window)))

    return RowSet.of_windows(n_rows, rest_of), RowSet.of_windows(n_rows, controls_of)


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


def _named(names: Sequence[str]) -> str:
    return f"obs column {names[0]!r}" if len(names) == 1 else f"{len(names)} obs columns together ({', '.join(names)})"


def _classes(
    names: Sequence[str], column: Column, among: Among
) -> tuple[Callable[[], Iterator[NDArray[np.integer]]], Rows]:
    """The label codes of the rows (-1 for none) in windows, and the rows per code, with those of -1 at the end.

    With several columns, a label is one of each, and a row that lacks one of them has none.
    """
    if len(names) > 1:
        groups = groups_of(names, among.restrict(column), len(among))
        numbers = np.where(groups.complete, np.cumsum(groups.complete) - 1, -1)
        counts = np.append(groups.sizes[groups.complete], groups.sizes[~groups.complete].sum())
        return lambda: (numbers[window] for window in among.cut(groups.codes)), counts
    found, called = column(names[0]), f"obs column {names[0]!r}"
    if found.categories is None:  # of numbers, only those of these rows are labels
        codes, n_labels = among.restrict(column)(names[0]).classes(called)
        windows = functools.partial(among.cut, codes)
    else:
        codes, n_labels = found.classes(called)
        windows = functools.partial(among.of, codes)
    counts = np.zeros(n_labels + 1, np.int64)
    for window in windows():
        count_codes(window, counts)
    return windows, counts


def _spread(
    codes: Iterable[NDArray[np.integer]], counts: Rows, sizes: Rows, seed: int
) -> Iterator[NDArray[np.integer]]:
    """The part of each row, window by window. Parts have these sizes, and their share of each label to within one row.

    With a single label, its code does not matter.
    """
    ends = np.cumsum(_quotas(counts, sizes), axis=1)
    n_labels, reached = len(counts), np.zeros(len(counts), np.int64)
    for window in codes:
        parts = np.empty(len(window), np.min_scalar_type(len(sizes)))
        for label, rows in _by_label(window, n_labels):
            number = reached[label] + np.arange(len(parts[rows]))  # rank of each row among the rows with its label
            position = permute(number, int(counts[label]), key_of(seed, label))
            parts[rows] = np.searchsorted(ends[label], position, side="right")
            reached[label] += len(number)
        yield parts


def _by_label(codes: NDArray[np.integer], n_labels: int) -> Iterator[tuple[int, Rows | slice]]:
    """The rows of each label in a window, ascending. The code -1 counts as the last label."""
    if n_labels == 1:
        yield 0, slice(None)
        return
    labels = (codes.astype(np.int64) % n_labels).astype(np.min_scalar_type(n_labels))  # small, which sorts fastest
    order = np.argsort(labels, kind="stable")
    firsts = np.searchsorted(labels[order], np.arange(n_labels + 1))
    for label in np.flatnonzero(np.diff(firsts)).tolist():
        yield label, order[firsts[label] : firsts[label + 1]]


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
