"""A sampling of sets of rows that agree in some obs columns, such as the cells of one line under one drug. Pure.

The rows of a group come in passes. In each pass every row of the group has a place, by a keyed permutation, and the
places are cut into sets. So a set needs no state: its rows follow from its group, its number in the group, the seed and
the epoch. The order of the sets is computed once an epoch (see `dealt`), and takes 12 bytes per set. The table of
rows by group takes 4 bytes per row.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from zloader.common.checks import is_number, one_or_more, require_count, require_flag, require_one_of
from zloader.common.errors import OptionError
from zloader.common.messages import suggestion
from zloader.common.records import Rows
from zloader.order.permutation import dealt, key_of, permute_each, shared_out
from zloader.order.sampling import Sampling, Table
from zloader.selecting.columns import Column
from zloader.selecting.groups import Groups, groups_of, sorted_rows

log = logging.getLogger("zloader")
BALANCED = "balanced"
_ROW_BYTES = 4  # of the table of rows by group


@dataclass(frozen=True, eq=False)
class CellSets(Sampling):
    """Sets of rows that agree in obs columns. A minibatch consists of whole sets, which stand one after another.

    This is how models of perturbations are trained: a set is some cells of one cell line under one drug. `batch_size`
    has to be a multiple of `set_size`. `minibatch.set_of_row` has the number of each row's set in the minibatch, and
    `minibatch.group` the labels of each set. `zl.MatchedControls` adds control rows.

    Args:
        group: An obs column, or a list of them, of labels, whole numbers, booleans or dates. The rows of a set agree in
            all of them. Rows without a label in one of them never come.
        set_size: Rows per set.
        per_group: Sets of each group per epoch. Default: as many as the rows of the group make, so that every row
            comes once per epoch.
        replace: Whether a group with too few rows for `per_group` or `weights` begins anew within the epoch. With
            False, `per_group` is the most sets of a group, and `weights` that ask for more are refused. Default: True.
        rest: What becomes of the rows that are left over when a group is cut into sets: `"drop"` (the default),
            `"keep"` for a shorter set, or `"fill"` to fill the set up with rows that come a second time.
        least: Groups of fewer rows are left out. Default: `set_size` with `rest="drop"`, else 1.
        weights: How often groups come: `"balanced"` for all equally often, or a mapping from labels to weights, such as
            `{"T": 1, "NK": 3}`. With several columns the keys are tuples of labels. Groups that are not listed never
            come. The number of sets of a group is exact in every epoch, to one set.
        epoch_sets: Sets per epoch, with `weights`. They are rounded up to whole minibatches. Default: as many as
            without weights.
        distinct: Whether a minibatch should have no group twice, as far as that is possible. With `weights` it never
            has. False gives sets in random order.

    The order depends on the seed and the epoch alone. Ranks and workers share out whole sets.

    Raises OptionError for unusable options. When a Loader is made, it also raises OptionError if no group has enough
    rows, for a column of fractions and for unknown labels; and MissingColumnError for unknown columns.

    >>> sampling = zl.CellSets(["cell_type", "donor"], set_size=8)
    >>> loader = zl.Loader(dataset, sampling=sampling, batch_size=16, obs=["cell_type"])
    >>> minibatch = next(iter(loader))
    >>> minibatch.set_of_row.tolist() == 8 * [0] + 8 * [1], len(minibatch.group["donor"])
    (True, 2)
    >>> balanced = zl.CellSets("cell_type", set_size=8, weights="balanced", epoch_sets=50)
    >>> len(zl.Loader(dataset, sampling=balanced, batch_size=16))
    25
    """

    group: str | Sequence[str]
    set_size: int = 64
    _: KW_ONLY
    per_group: int | None = None
    replace: bool = True
    rest: Literal["drop", "keep", "fill"] = "drop"
    least: int | None = None
    weights: Literal["balanced"] | Mapping[Any, float] | None = None
    epoch_sets: int | None = None
    distinct: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "group", one_or_more(group=self.group))
        require_count(set_size=self.set_size)
        for name in ("per_group", "least", "epoch_sets"):
            if getattr(self, name) is not None:
                require_count(**{name: getattr(self, name)})
        require_flag(replace=self.replace, distinct=self.distinct)
        require_one_of(["drop", "keep", "fill"], rest=self.rest)
        if self.weights is not None and self.weights != BALANCED and not isinstance(self.weights, Mapping):
            raise OptionError(f"weights must be 'balanced' or a mapping from labels, not {self.weights!r:.100}")
        if self.weights is not None and self.per_group is not None:
            raise OptionError("per_group gives every group equally many sets, and weights do not: give one of them")
        if self.epoch_sets is not None and self.weights is None:
            raise OptionError("epoch_sets goes with weights=; without them, give per_group=")

    def bound(self, dataset: Table) -> BoundCellSets:
        """The sampling of the groups of a dataset."""
        return BoundCellSets(self, dataset)

    def n_rows(self, dataset_rows: int) -> int:
        """Raises OptionError, because the groups are not known yet."""
        raise OptionError(f"{self} does not know its groups yet: call bound(dataset) first, as the Loader does")

    def rows(self, start: int, stop: int, *, dataset_rows: int, seed: int, epoch: int) -> Rows:
        """Raises OptionError, because the groups are not known yet."""
        raise OptionError(f"{self} does not know its groups yet: call bound(dataset) first, as the Loader does")


@dataclass(frozen=True, kw_only=True)
class SetCounts:
    """How many groups and rows a CellSets has, and how many it leaves out: small groups, and rows without a label."""

    groups: int
    rows: int
    sets: int
    small_groups: int
    small_rows: int
    unlabelled_rows: int


class BoundCellSets(Sampling):
    """The sets of a dataset's groups: a CellSets that knows its rows.

    The unit is a set, or all sets of a minibatch, with weights and `distinct`. With `rest="keep"`, gaps stand at the
    end of a set that is kept short.
    """

    set_size: int

    def __init__(self, options: CellSets, dataset: Table) -> None:
        self.options, self.set_size = options, int(options.set_size)
        self.has_gaps = options.rest == "keep"
        self.repeats = options.rest == "fill" or options.per_group is not None or options.weights is not None
        groups = groups_of(list(options.group), dataset.obs_column, dataset.n_obs, row_bytes=_ROW_BYTES)
        self._dataset_rows, self.unit = dataset.n_obs, self.set_size
        chosen = _chosen(groups, options, dataset.obs_column)
        weights = _weights(groups, chosen, options, dataset.obs_column)
        if weights is not None:
            chosen, weights = chosen[weights > 0], weights[weights > 0]
        self._weights = weights
        self._sizes = groups.sizes[chosen]
        self._rows, self._begins = sorted_rows(groups, chosen)
        self._per_pass = self._sizes // self.set_size if options.rest == "drop" else -(-self._sizes // self.set_size)
        self._n_sets = (
            int(self._counts(0).sum()) if weights is None else int(options.epoch_sets or self._per_pass.sum())
        )
        self._named = [groups.named(group, dataset.obs_column) for group in _heaviest(chosen, weights)]
        self._sets_per_minibatch = 1
        self._ordered: tuple[int, NDArray[np.int32], Rows] | None = None  # the key of an epoch, and its sets
        small = np.flatnonzero(groups.complete & (groups.sizes < _least(options)))
        self.counts = SetCounts(
            groups=len(chosen),
            rows=len(self._rows),
            sets=self._n_sets,
            small_groups=len(small),
            small_rows=int(groups.sizes[small].sum()),
            unlabelled_rows=int(groups.sizes[~groups.complete].sum()),
        )
        self._require_sets_without_replacement()
        log.info("sets of %d rows by %s: %s", self.set_size, ", ".join(options.group), self.counts)

    def __repr__(self) -> str:
        return f"{self.options} of {self.counts.groups} groups"

    @property
    def indices(self) -> Rows | None:  # type: ignore[override]
        """The rows of all groups, ascending; None for all rows of the dataset."""
        if len(self._rows) == self._dataset_rows:
            return None
        rows: Rows = np.sort(self._rows).astype(np.int64)
        return rows

    def batched(self, batch_size: int) -> BoundCellSets:
        """The sampling of minibatches of `batch_size` rows. Raises OptionError for sizes that do not fit together."""
        n_sets = whole_sets(batch_size, self.set_size)
        batched = copy.copy(self)  # even if nothing changes, so that each plan keeps the order of its own epoch
        batched._ordered = None
        if not self.options.distinct:
            return batched
        batched._sets_per_minibatch = n_sets
        if self._weights is not None:
            self._require_distinct(n_sets)
            batched.unit = n_sets * self.set_size
            batched._n_sets = -(-batched._n_sets // n_sets) * n_sets
            batched._require_sets_without_replacement()
        return batched

    def _require_distinct(self, n_sets: int) -> None:
        assert self._weights is not None
        heaviest, whole = int(self._weights.max()), int(self._weights.sum())
        if n_sets * heaviest > whole:
            raise OptionError(
                f"a minibatch has {n_sets} sets of different groups, so no group can be more than 1/{n_sets} of all "
                f"sets, but of {len(self._sizes)} groups {self._named[0]} has {heaviest / whole:.1%} of the weight: "
                "lower batch_size or that weight, or let minibatches repeat groups with distinct=False"
            )

    def _require_sets_without_replacement(self) -> None:
        if self._weights is None or self.options.replace:
            return
        asked = np.ceil(self._weights / self._weights.sum() * self._n_sets)
        short = np.flatnonzero(asked > self._per_pass)
        if len(short):
            worst = short[np.argmax(asked[short] / self._per_pass[short])]
            raise OptionError(
                f"{len(short)} of {len(self._sizes)} groups have fewer sets than weights ask for. One of them is to "
                f"come {asked[worst]:.0f} times per epoch and has {self._per_pass[worst]} sets: lower epoch_sets, or "
                "take replace=True"
            )

    def _counts(self, key: int) -> Rows:
        """The number of sets of each group in an epoch."""
        if self._weights is not None:
            return shared_out(self._weights, self._n_sets, key)
        if self.options.per_group is None:
            return self._per_pass
        if self.options.replace:
            return np.full(len(self._sizes), self.options.per_group, np.int64)
        return np.minimum(self._per_pass, self.options.per_group)

    def _sets(self, key: int) -> tuple[NDArray[np.int32], Rows]:
        """The sets of an epoch in order: the group of each, and its number among the sets of its group."""
        ordered = self._ordered  # read once, because several epochs may be planned at the same time
        if ordered is None or ordered[0] != key:
            groups, numbers = dealt(self._counts(key_of(key, 1)), self._sets_per_minibatch, key_of(key, 2))
            ordered = self._ordered = key, groups, numbers
        return ordered[1], ordered[2]

    def n_rows(self, dataset_rows: int) -> int:
        """Number of rows per epoch, if all sets are full."""
        if dataset_rows != self._dataset_rows:
            raise OptionError(f"the groups are of {self._dataset_rows} rows, but the dataset has {dataset_rows}")
        return self._n_sets * self.set_size

    def rows(self, start: int, stop: int, *, dataset_rows: int, seed: int, epoch: int) -> Rows:
        size, key = self.set_size, key_of(seed, epoch)
        first, last = start // size, -(-stop // size)
        groups, numbers = (each[first:last] for each in self._sets(key))
        turns, within = np.divmod(numbers, self._per_pass[groups])
        places = (within[:, None] * size + np.arange(size)).reshape(-1)
        sizes = np.repeat(self._sizes[groups], size)
        passes = np.repeat(turns * len(self._sizes) + groups, size)
        found = permute_each(places % sizes, sizes, passes, key_of(key, 3))
        rows: Rows = self._rows[np.repeat(self._begins[groups], size) + found].astype(np.int64)
        if self.has_gaps:
            rows[places >= sizes] = -1
        return rows[start - first * size : stop - first * size]


def whole_sets(batch_size: int, set_size: int) -> int:
    """The number of sets in a minibatch. Raises OptionError if `batch_size` is not a multiple of `set_size`."""
    n_sets, left = divmod(int(batch_size), set_size)
    if left or not n_sets:
        below, above = n_sets * set_size, (n_sets + 1) * set_size
        sizes = f"{below} or {above}" if below else str(above)
        raise OptionError(
            f"batch_size {batch_size} is not a multiple of set_size {set_size}, but a minibatch consists of whole "
            f"sets: take {sizes}"
        )
    return n_sets


def _least(options: CellSets) -> int:
    return max(options.least or 1, options.set_size if options.rest == "drop" else 1)


def _chosen(groups: Groups, options: CellSets, column: Column) -> Rows:
    """The groups with enough rows. Raises OptionError if there is none."""
    least = _least(options)
    chosen = np.flatnonzero(groups.complete & (groups.sizes >= least))
    if len(chosen):
        return chosen
    labelled = np.flatnonzero(groups.complete)
    by = ", ".join(groups.columns)
    if not len(labelled):
        raise OptionError(f"none of the {len(groups.codes)} rows has a label in {by}, so there would be no set")
    advice = f"lower set_size {options.set_size}, or keep short sets with rest='keep' or 'fill'"
    raise OptionError(
        f"none of the {len(labelled)} groups by {by} has {least} rows. The largest are "
        f"{groups.listed(labelled, column)}: {advice if options.rest == 'drop' else 'lower least'}"
    )


def _weights(groups: Groups, chosen: Rows, options: CellSets, column: Column) -> Rows | None:
    """The weight of each chosen group as a whole number; None without weights."""
    if options.weights is None:
        return None
    if not isinstance(options.weights, Mapping):
        return np.ones(len(chosen), np.int64)
    labels = [column(name).labels_of(groups.first) for name in groups.columns]
    numbers = {key if len(key) > 1 else key[0]: group for group, key in enumerate(zip(*labels, strict=True))}
    weights, left_out = np.zeros(len(groups)), np.ones(len(groups), bool)
    left_out[chosen] = False
    for label, weight in options.weights.items():
        if label not in numbers:
            near = suggestion(label, [str(known) for known in numbers]) if isinstance(label, str) else ""
            raise OptionError(
                f"weights names {label!r}, but no group by {', '.join(groups.columns)} has these labels. One of the "
                f"{len(groups)} groups is {next(iter(numbers))!r}{near}"
            )
        if not is_number(weight) or not 0 <= weight < math.inf:
            raise OptionError(f"weights has {weight!r} for {label!r}: give a number of at least 0")
        if weight and left_out[numbers[label]]:
            raise OptionError(
                f"weights names {groups.named(numbers[label], column)}, which has only "
                f"{groups.sizes[numbers[label]]} rows, too few for a set of {options.set_size}: leave it out, lower "
                "set_size or least, or take rest='fill'"
            )
        weights[numbers[label]] = weight
    if not weights.any():
        raise OptionError("every group has the weight 0, so there would be no minibatch")
    # Whole numbers, so that the same sets result on every machine.
    scaled: Rows = np.ceil(weights[chosen] / weights.max() * 2**30).astype(np.int64)
    return scaled


def _heaviest(chosen: Rows, weights: Rows | None) -> list[int]:
    """The group with the largest weight."""
    return [] if weights is None else [int(chosen[np.argmax(weights)])]
