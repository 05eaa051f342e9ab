"""Groups of rows that agree in some obs columns. Pure.

Rows are handled in windows. The groups take one byte per row if there are at most 256 of them, two up to 65,536 and
else four; while they are made by several columns, up to twice as much. Each combination of labels that could occur
takes five bytes meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common import page_cache
from zloader.common.compiled import compiled
from zloader.common.errors import OptionError
from zloader.common.machine import require_memory
from zloader.common.records import Rows, windows_of
from zloader.selecting.columns import Column

_MOST_COMBINATIONS = 1 << 28
_SHOWN = 3


@dataclass(frozen=True, eq=False, kw_only=True)
class Groups:
    """The groups of some rows by the labels in `columns`, in the order of the labels.

    Row i is in the group `codes[i]`. A group has `sizes` rows, and `first` is one of them. A missing label counts as a
    label of its own, and `complete` says which groups have none.
    """

    columns: Sequence[str]
    codes: NDArray[np.unsignedinteger] = field(repr=False)
    sizes: Rows = field(repr=False)
    first: Rows = field(repr=False)
    complete: NDArray[np.bool_] = field(repr=False)

    def __len__(self) -> int:
        return len(self.sizes)

    def named(self, group: int, column: Column) -> str:
        """A group as its columns and labels, for messages."""
        row = self.first[group : group + 1]
        labels = {name: column(name).labels_of(row)[0] for name in self.columns}
        return "/".join(f"{name}={label!s}" for name, label in labels.items()) or "all rows"

    def listed(self, groups: Rows, column: Column, sizes: Rows | None = None) -> str:
        """Some groups with their numbers of rows, for messages: the largest of them, and how many more there are.

        `sizes` counts, for each of all groups, only those rows that the message is about.
        """
        sizes = self.sizes if sizes is None else sizes
        largest = groups[np.argsort(-sizes[groups], kind="stable")][:_SHOWN]
        shown = ", ".join(f"{self.named(group, column)} ({sizes[group]} rows)" for group in largest.tolist())
        return shown + (f" and {len(groups) - _SHOWN} more" if len(groups) > _SHOWN else "")


def groups_of(columns: Sequence[str], column: Column, n_rows: int, *, row_bytes: int = 0) -> Groups:
    """The groups of `n_rows` rows by their labels in `columns`; without columns, a single group.

    `row_bytes` is the memory per row that the caller needs beside the groups. Raises OptionError for columns that hold
    fractions or that have too many labels, for too little memory, and any error of `column`.
    """

    def require(of_groups: int) -> None:
        require_memory(
            (of_groups + row_bytes) * n_rows,
            f"grouping {n_rows} rows by {', '.join(columns)}",
            "open fewer stores at a time, or use a machine with more memory",
        )

    require(1)
    codes: NDArray[np.unsignedinteger] = np.zeros(n_rows, np.uint8)  # takes no memory until it is written
    n_groups, complete = 1, np.ones(1, bool)
    for name in columns:
        classes, n_classes = column(name).classes(f"obs column {name!r}")
        n_classes += 1  # the last is for missing labels
        if n_groups * n_classes > _MOST_COMBINATIONS:
            raise OptionError(
                f"the columns {', '.join(columns)} have too many labels to group rows by: {n_groups} groups x "
                f"{n_classes} labels of {name!r}. Leave out a column with a label for almost every row"
            )
        there = np.zeros(n_groups * n_classes, bool)
        for window in windows_of(n_rows):
            there[_combined(codes[window], classes[window], n_classes)] = True
            page_cache.release(classes)
        found = np.flatnonzero(there)
        dtype = np.min_scalar_type(max(1, len(found)) - 1)
        require(dtype.itemsize + (codes.itemsize if n_groups > 1 else 0))
        numbers, numbered = np.zeros(len(there), dtype), np.empty(n_rows, dtype)
        numbers[found] = np.arange(len(found))
        for window in windows_of(n_rows):
            numbered[window] = numbers[_combined(codes[window], classes[window], n_classes)]
            page_cache.release(classes)
        codes = numbered
        complete = complete[found // n_classes] & (found % n_classes < n_classes - 1)
        n_groups = len(found)
    sizes, first = np.zeros(n_groups, np.int64), np.zeros(n_groups, np.int64)
    _count(codes, sizes, first)
    return Groups(columns=tuple(columns), codes=codes, sizes=sizes, first=first, complete=complete)


def _combined(codes: NDArray[np.unsignedinteger], classes: NDArray[np.integer], n_classes: int) -> Rows:
    """One number for each pair of a group and a class, which is -1 for a missing label."""
    return codes.astype(np.int64) * n_classes + classes.astype(np.int64) % n_classes


@compiled
def count_codes(codes: NDArray[np.integer], counts: Rows) -> None:
    """Adds the number of occurrences of each code to `counts`. The code -1 counts in the last entry."""
    for code in codes:
        counts[code] += 1


@compiled
def _count(codes: NDArray[np.unsignedinteger], sizes: Rows, first: Rows) -> None:
    for row in range(len(codes)):
        if not sizes[codes[row]]:
            first[codes[row]] = row
        sizes[codes[row]] += 1


@compiled
def _sort(codes: NDArray[np.unsignedinteger], into: Rows, ends: Rows, out: NDArray[Any]) -> None:
    for row in range(len(codes)):
        group = into[codes[row]]
        if group >= 0:
            out[ends[group]] = row
            ends[group] += 1


def sorted_rows(groups: Groups, chosen: Rows) -> tuple[NDArray[Any], Rows]:
    """The rows of some groups, group by group and ascending in each, and the place where each group begins."""
    sizes = groups.sizes[chosen]
    into = np.full(len(groups), -1, np.int64)
    into[chosen] = np.arange(len(chosen))
    begins = np.cumsum(sizes) - sizes
    rows = np.empty(int(sizes.sum()), np.uint32 if len(groups.codes) <= 1 << 32 else np.int64)
    _sort(groups.codes, into, begins.copy(), rows)
    return rows, begins


def by_value(values: NDArray[np.integer]) -> list[tuple[int, Rows]]:
    """The distinct values of an array, each with the ascending positions at which it occurs."""
    order = np.argsort(values, kind="stable")
    values = values[order]
    cuts = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)] if len(values) else []
    return [(int(values[a]), order[a:b]) for a, b in pairwise(cuts)]


def shares(ends: Rows, rows: Rows) -> Sequence[tuple[int, Rows | slice]]:
    """The stores that contain `rows`, each with the positions of its rows; store k ends before row `ends[k]`."""
    if len(ends) == 1:
        return [(0, slice(None))]
    # In the smallest dtype, because NumPy sorts one or two bytes by radix, in linear time.
    return by_value(np.searchsorted(ends, rows, side="right").astype(np.min_scalar_type(len(ends))))
