"""Control rows for each row of a minibatch, such as untreated cells of the same cell line. Pure.

Controls are drawn among the rows that meet a condition and agree with the row in some obs columns. The draws for a row
depend on the seed, the epoch and the row alone. The table takes 1 byte per row of the dataset, or 2 or 4 if there are
many groups, and 8 per control.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zloader.common.checks import one_or_more, require_count
from zloader.common.errors import OptionError
from zloader.common.machine import require_memory
from zloader.common.records import Rows, windows_of
from zloader.order.permutation import key_of, words_at
from zloader.order.sampling import Sampling, Table
from zloader.selecting.columns import Column
from zloader.selecting.groups import Groups, groups_of

log = logging.getLogger("zloader")
_CONTROL_BYTES = 25  # per control while the table is made
_DRAWS = 0xC0  # tells the keys of these draws from those of samplings


@dataclass(frozen=True, eq=False)
class MatchedControls:
    """Control rows for every minibatch of a Loader, as `minibatch.control`.

    `minibatch.control` is a Minibatch of its own with the same fields. It has `n` rows for each row, one after another:
    the controls of row i are its rows from `i * n` to `(i + 1) * n - 1`.

    Args:
        where: The rows that are controls, among those of the Loader's dataset: a condition as `dataset.where` takes it,
            such as `"drug == 'DMSO'"`. To take controls from elsewhere, give a view that has them.
        match: The obs columns, one or a list, in which a control agrees with its row: labels, whole numbers, booleans
            or dates. An empty list matches every control.
        n: Controls per row. Those of one row differ if there are enough.
        fallback: Some of the columns in `match`, for rows that no control matches in all of them; or several such
            lists, which are tried in turn. `statistics().fallback_controls` counts the controls found in this way.

    Every control of a row is equally likely, and a row that is a control itself may draw itself.

    Raises OptionError for unusable options. When a Loader is made, it also raises OptionError if no row meets the
    condition or if rows have no control; and MissingColumnError for unknown columns.

    >>> controls = zl.MatchedControls("cell_type == 'T'", match="donor")
    >>> loader = zl.Loader(dataset, controls=controls, obs=["donor"], batch_size=16)
    >>> minibatch = next(iter(loader))
    >>> minibatch.control.x.shape == minibatch.x.shape
    True
    >>> bool((minibatch.control.obs["donor"] == minibatch.obs["donor"]).all())
    True
    """

    where: Any
    match: str | Sequence[str]
    n: int = 1
    fallback: Sequence[str] | Sequence[Sequence[str]] | None = None

    def __post_init__(self) -> None:
        require_count(n=self.n)
        match = list(self.match) if not isinstance(self.match, str) and not len(self.match) else None
        object.__setattr__(self, "match", one_or_more(match=self.match) if match is None else match)
        for columns in self.levels[1:]:
            if not {*columns} < {*self.match}:
                raise OptionError(
                    f"fallback {columns} must be fewer columns than match {self.match}, and some of them: controls are "
                    "looked for in match first"
                )

    @property
    def levels(self) -> list[list[str]]:
        """The columns that are tried in turn."""
        if self.fallback is None:
            return [list(self.match)]
        if isinstance(self.fallback, str) or all(isinstance(each, str) for each in self.fallback):
            given = [self.fallback] if isinstance(self.fallback, str) else list(self.fallback)
            return [list(self.match), [str(each) for each in given]]
        lists = [[each] if isinstance(each, str) else list(each) for each in self.fallback]
        return [list(self.match), *lists]

    def bound(self, dataset: Table, sampling: Sampling) -> BoundControls:
        """The controls of the rows of `dataset` that `sampling` yields."""
        return BoundControls(self, dataset, sampling)


class BoundControls:
    """The controls of the rows of a dataset, numbered as rows of the whole dataset."""

    def __init__(self, options: MatchedControls, dataset: Table, sampling: Sampling) -> None:
        self.n = int(options.n)
        whole = dataset.whole
        chosen = dataset.in_whole(options.where)
        if not len(chosen):
            outside, why = len(whole.in_whole(options.where)), ""
            if outside:
                of = f"dataset.where({options.where!r})" if isinstance(options.where, str) else "a view"
                why = (
                    f" among those of the view, but {outside} of the whole dataset do: give controls as a view of it, "
                    f"MatchedControls({of}, ...)"
                )
            raise OptionError(f"no row can be a control: none meets the condition {options.where!r:.100}{why}")
        require_memory(
            _CONTROL_BYTES * len(chosen),
            f"the table of {len(chosen)} controls",
            "give a condition that fewer rows meet",
        )
        pool = chosen.all_numbers()
        groups = groups_of(options.levels[0], whole.obs_column, whole.n_obs)
        self._groups = groups.codes
        self._begins, self._sizes = np.zeros(len(groups), np.int64), np.zeros(len(groups), np.int64)
        self._levels = np.zeros(len(groups), np.int64)
        pools: list[Rows] = []
        for level, columns in enumerate(options.levels):
            of_level = groups if not level else groups_of(columns, whole.obs_column, whole.n_obs)
            self._look_up(level, groups, of_level, pool, pools)
            if self._sizes.all():
                break
        self._pool = np.concatenate(pools)
        self._require_controls(options, groups, _came(groups, dataset, sampling), whole.obs_column)

    def _look_up(self, level: int, groups: Groups, of_level: Groups, pool: Rows, pools: list[Rows]) -> None:
        """Gives groups without controls those that agree with them in the columns of a level."""
        codes = of_level.codes[pool]
        counts = np.bincount(codes, minlength=len(of_level))
        begins = np.cumsum(counts) - counts
        own = of_level.codes[groups.first]  # a group agrees in all columns of its fallback
        found = np.flatnonzero((self._sizes == 0) & of_level.complete[own] & (counts[own] > 0))
        self._begins[found] = begins[own[found]] + sum(map(len, pools))
        self._sizes[found] = counts[own[found]]
        self._levels[found] = level
        pools.append(pool[np.argsort(codes, kind="stable")])

    def _require_controls(self, options: MatchedControls, groups: Groups, came: Rows, column: Column) -> None:
        """Raises OptionError for rows without controls, and logs how many need a fallback."""
        without = np.flatnonzero((self._sizes == 0) & (came > 0))
        condition = f"{options.where!r:.100}"
        if len(without):
            columns = ", ".join(options.levels[-1]) or "nothing"
            raise OptionError(
                f"{int(came[without].sum())} rows of {len(without)} groups have no control, because no row that meets "
                f"{condition} agrees with them in {columns}: {groups.listed(without, column, came)}. Leave these rows "
                "out, or give a fallback of fewer columns"
            )
        fell_back = np.flatnonzero((self._levels > 0) & (came > 0))
        if len(fell_back):
            log.warning(
                "controls: %d rows of %d groups agree with no control in %s and take those of a fallback: %s",
                int(came[fell_back].sum()),
                len(fell_back),
                ", ".join(options.levels[0]),
                groups.listed(fell_back, column, came),
            )

    def drawn(self, rows: Rows, *, seed: int, epoch: int) -> Rows:
        """The controls of some rows, `n` for each, one row after another."""
        groups = self._groups[rows]
        sizes = self._sizes[groups]
        if not sizes.all():
            raise OptionError(
                f"row {rows[np.argmin(sizes)]} has no control, and its sampling does not list it in indices"
            )
        words = words_at(key_of(seed, epoch, _DRAWS), rows.astype(np.uint64))
        starts = (words % sizes.astype(np.uint64)).astype(np.int64)
        steps = np.arange(self.n) * np.maximum(1, sizes // self.n)[:, None]
        places = (starts[:, None] + steps) % sizes[:, None]
        drawn: Rows = self._pool[self._begins[groups][:, None] + places].reshape(-1)
        return drawn

    def n_from_fallback(self, rows: Rows) -> int:
        """How many controls of some rows agree with them in the columns of a fallback only."""
        return int(np.count_nonzero(self._levels[self._groups[rows]])) * self.n


def _came(groups: Groups, dataset: Table, sampling: Sampling) -> Rows:
    """The number of rows of each group that the sampling may yield."""
    rows, chosen = dataset.in_whole(dataset), sampling.indices
    if chosen is not None:
        positions = np.asarray(chosen, np.int64)
        wrong = positions[(positions < 0) | (positions >= len(rows))]
        if len(wrong):
            raise OptionError(f"indices holds row {wrong[0]}, but the rows of the dataset are 0 to {len(rows) - 1}")
        return np.bincount(groups.codes[rows.numbers(positions)], minlength=len(groups))
    counts, mask = np.zeros(len(groups), np.int64), rows.mask()
    for window in windows_of(len(groups.codes)):
        counts += np.bincount(groups.codes[window][mask[window]], minlength=len(groups))
    return counts
