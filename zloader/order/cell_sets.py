"""A sampling of sets of rows that agree in some obs columns, such as the cells of one line under one drug. Pure.

The rows of a group come in passes. In each pass every row of the group has a place, by a keyed permutation, and the
places are cut into sets. So a set needs no state: its rows follow from its group, its number in the group, the seed and
the epoch. The order of the sets is computed once an epoch (see `dealt`), and takes 12 bytes per set. The table of
rows by group takes 4 bytes per row.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from zloader.common.checks import one_or_more, require_count, require_flag, require_one_of
from zloader.common.errors import OptionError
from zloader.common.messages import suggestion
from zloader.common.records import Rows
from zloader.order.permutation import dealt, key_of, permute_each, shared_out
from zloader.order.sampling import Order, Sampling, Table
from zloader.order.shuffling import mask_of
from zloader.order.weighted import require_weight
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
        rest: What becomes of the rows that are left over when a group is cut into sets: `"drop"` (the default), or
            `"fill"` to fill the set up with rows that come a second time.
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
    rest: Literal["drop", "fill"] = "drop"
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
        require_one_of(["drop", "fill"], rest=self.rest)
        if self.weights is not None and self.weights != BALANCED and not isinstance(self.weights, Mapping):
            raise OptionError(f"weights must be 'balanced' or a mapping from labels, not {self.weights!r:.100}")
        if self.weights is not None and self.per_group is not None:
            raise OptionError("per_group gives every group equally many sets, and weights do not: give one of them")
        if self.epoch_sets is not None and self.weights is None:
            raise OptionError("epoch_sets goes with weights=; without them, give per_group=")

    def order(self, dataset: Table, batch_size: int, fetch_rows: int) -> SetOrder:
        per_minibatch = whole_sets(batch_size, int(self.set_size))
        sets = _Sets(self, dataset, per_minibatch if self.distinct else 1)
        log.info("sets of %d rows by %s: %s", self.set_size, ", ".join(self.group), sets.counts)
        return SetOrder(
            dataset_rows=dataset.n_obs,
            n_rows=sets.n_sets * sets.size,
            draw=sets.drawn,
            repeats=self.rest == "fill" or self.per_group is not None or self.weights is not None,
            unit=sets.size * (1 if self.weights is None else sets.per_minibatch),
            set_size=sets.size,
            chosen=None if sets.counts.rows == dataset.n_obs else partial(mask_of, sets.rows, dataset.n_obs),
            group=list(self.group),
            counts=sets.counts,
        )


@dataclass(frozen=True, kw_only=True)
class SetCounts:
    """How many groups and rows a CellSets has, and how many it leaves out: small groups, and rows without a label."""

    groups: int
    rows: int
    sets: int
    small_groups: int
    small_rows: int
    unlabelled_rows: int


@dataclass(frozen=True, kw_only=True, eq=False)
class SetOrder(Order):
    """An order of sets, with the obs columns in which the rows of a set agree."""

    group: Sequence[str]
    counts: SetCounts


class _Sets:
    """The sets of a dataset's groups, with `per_minibatch` sets of different groups in a minibatch, if possible."""

    def __init__(self, options: CellSets, dataset: Table, per_minibatch: int) -> None:
        self._options, self.size, self.per_minibatch = options, int(options.set_size), per_minibatch
        groups = groups_of(list(options.group), dataset.obs_column, dataset.n_obs, row_bytes=_ROW_BYTES)
        chosen = _chosen(groups, options, dataset.obs_column)
        weights = _weights(groups, chosen, options, dataset.obs_column)
        if weights is not None:
            chosen, weights = chosen[weights > 0], weights[weights > 0]
        self._weights, self._sizes = weights, groups.sizes[chosen]
        self.rows, self._begins = sorted_rows(groups, chosen)
        self._per_pass = self._sizes // self.size if options.rest == "drop" else -(-self._sizes // self.size)
        self._ordered: tuple[int, NDArray[np.int32], Rows] | None = None  # the key of an epoch, and its sets
        if weights is None:
            self.n_sets = int(self._counts(0).sum())
        else:
            wanted = int(options.epoch_sets or self._per_pass.sum())
            self.n_sets = -(-wanted // per_minibatch) * per_minibatch
            self._require_distinct(weights, groups.named(int(chosen[np.argmax(weights)]), dataset.obs_column))
        small = np.flatnonzero(groups.complete & (groups.sizes < _least(options)))
        self.counts = SetCounts(
            groups=len(chosen),
            rows=len(self.rows),
            sets=self.n_sets,
            small_groups=len(small),
            small_rows=int(groups.sizes[small].sum()),
            unlabelled_rows=int(groups.sizes[~groups.complete].sum()),
        )

    def _require_distinct(self, weights: Rows, heaviest: str) -> None:
        """Raises OptionError if weights ask for a group twice in a minibatch, or for more sets than it may have."""
        share, n_sets = int(weights.max()) / int(weights.sum()), self.per_minibatch
        if n_sets * int(weights.max()) > int(weights.sum()):
            raise OptionError(
                f"a minibatch has {n_sets} sets of different groups, so no group can be more than 1/{n_sets} of all "
                f"sets, but of {len(weights)} groups {heaviest} has {share:.1%} of the weight: lower batch_size or "
                "that weight, or let minibatches repeat groups with distinct=False"
            )
        asked = np.ceil(weights / weights.sum() * self.n_sets)
        short = np.flatnonzero(asked > self._per_pass)
        if len(short) and not self._options.replace:
            worst = short[np.argmax(asked[short] / self._per_pass[short])]
            raise OptionError(
                f"{len(short)} of {len(weights)} groups have fewer sets than weights ask for. One of them is to "
                f"come {asked[worst]:.0f} times per epoch and has {self._per_pass[worst]} sets: lower epoch_sets, or "
                "take replace=True"
            )

    def _counts(self, key: int) -> Rows:
        """The number of sets of each group in an epoch."""
        if self._weights is not None:
            return shared_out(self._weights, self.n_sets, key)
        if self._options.per_group is None:
            return self._per_pass
        wanted = np.full(len(self._sizes), self._options.per_group, np.int64)
        return wanted if self._options.replace else np.minimum(self._per_pass, wanted)

    def _sets(self, key: int) -> tuple[NDArray[np.int32], Rows]:
        """The sets of an epoch in order: the group of each, and its number among the sets of its group."""
        ordered = self._ordered  # read once, because several epochs may be planned at the same time
        if ordered is None or ordered[0] != key:
            groups, numbers = dealt(self._counts(key_of(key, 1)), self.per_minibatch, key_of(key, 2))
            ordered = self._ordered = key, groups, numbers
        return ordered[1], ordered[2]

    def drawn(self, start: int, stop: int, seed: int, epoch: int) -> Rows:
        """The rows at positions of an epoch."""
        size, key = self.size, key_of(seed, epoch)
        first, last = start // size, -(-stop // size)
        groups, numbers = (each[first:last] for each in self._sets(key))
        turns, within = np.divmod(numbers, self._per_pass[groups])
        places = (within[:, None] * size + np.arange(size)).reshape(-1)
        sizes = np.repeat(self._sizes[groups], size)
        passes = np.repeat(turns * len(self._sizes) + groups, size)
        found = permute_each(places % sizes, sizes, passes, key_of(key, 3))
        rows: Rows = self.rows[np.repeat(self._begins[groups], size) + found].astype(np.int64)
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
    advice = f"lower set_size {options.set_size}, or fill short sets up with rest='fill'"
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
        if require_weight(label, weight) and left_out[numbers[label]]:
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
