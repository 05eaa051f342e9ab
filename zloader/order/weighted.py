"""Samplings that draw rows by weight: by row or label, all classes equally often, or groups in given shares. Pure.

The weights of the rows, one after another, make an axis. It is cut into as many equal strata as an epoch has draws, and
each draw is a random point of its stratum. So a row comes with a probability proportional to its weight, and in an
epoch less than two times more or fewer than it should. `block_size` draws that follow each other are a block, and their
points lie at the same random place of their strata. Their rows are neighbours, and blocks come in the order of a
Loader's default sampling.

Where each row is drawn about once, the rows of a block follow each other on disk. Two other orders of the draws keep
that so elsewhere, and keep a row from coming again and again in a block. They are for runs of 64 rows whose heaviest
row is expected `2**k` times an epoch, to the next power of two. Such runs lie together on the axis, as a level:

- If k is above 0, draws come in `2**k` passes over the level, each of which takes every `2**k`-th stratum.
- If k is below 0, a block's draws are taken from a part of `2**k` of their strata, which begins at a random place and
  goes round the end. The blocks at the ends of a level draw from all of their strata.

The order has the same bits on every machine: random words are computed from counters, and sums are added in a fixed
order. The table takes 16 bytes for 64 rows. Planning a fetch takes a binary search per draw.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common import page_cache
from zloader.common.checks import is_number, require_count, require_flag
from zloader.common.compiled import compiled
from zloader.common.errors import OptionError
from zloader.common.records import Rows, windows_of
from zloader.order.permutation import GOLDEN, key_of, mix_word
from zloader.order.sampling import Order, Sampling, Table
from zloader.order.shuffling import DEFAULT_BLOCK_SIZE, stratified
from zloader.selecting.columns import as_numbers
from zloader.selecting.groups import count_codes

Codes = NDArray[np.integer]
_RUN = 64  # rows whose weights are looked up together; divides the rows of a window
_ROUNDING = 1 - 1e-9  # of sums of equal weights
_LEVELS = (-40, 60)
_MIN_TOTAL = 2.0**-960
_STEP = 2.0**-53


class Draws:
    """`total_size` rows per epoch, drawn by weight. Row i weighs `table[i]`, or `table[codes[i]]` (code -1: the last).

    Without `replace`, one random number places all draws in their strata, so that no row is drawn twice.
    Raises OptionError for invalid weights.
    """

    def __init__(
        self, table: NDArray[Any], codes: Codes | None, *, block_size: int, total_size: int | None, replace: bool
    ) -> None:
        self._table, self._codes = table, codes
        self._n_rows = len(table if codes is None else codes)
        self._blocks, self._replace = stratified(block_size), bool(replace)
        n_runs = -(-self._n_rows // _RUN)
        sums, most, self._n_positive = np.empty(n_runs), np.empty(n_runs), 0
        for window in windows_of(n_runs * _RUN):
            of_rows = self._weights(window)
            if len(wrong := np.flatnonzero(~((of_rows >= 0) & np.isfinite(of_rows)))):
                row = window.start + wrong[0]
                raise OptionError(f"weight {row} is {of_rows[wrong[0]]}: weights must be numbers of at least 0")
            weights = of_rows.reshape(-1, _RUN)
            runs = slice(window.start // _RUN, window.stop // _RUN)
            with np.errstate(over="ignore"):  # an overflow raises below
                sums[runs], most[runs] = np.cumsum(weights, axis=1)[:, -1], weights.max(axis=1)
            self._n_positive += int(np.count_nonzero(weights))
        if codes is not None:
            page_cache.release(codes)
        if not self._n_positive:
            raise OptionError("no row has a weight above 0, so there would be no minibatch")
        self._total_size = self._n_positive if total_size is None else int(total_size)
        with np.errstate(over="ignore"):
            total = float(np.cumsum(sums)[-1])
        if not _MIN_TOTAL <= total < np.inf:  # smaller float64 numbers have fewer digits
            raise OptionError(f"the weights add up to {total}: divide them all by their largest")
        expected = most * (self._total_size / total) * _ROUNDING  # how often the heaviest row of a run comes
        if not replace and expected.max() > 1:
            raise OptionError(
                f"with replace=False no row comes twice, but one of them has {most.max() / total:.3g} of the weight, "
                f"and would have to come {expected.max():.1f} times in {self._total_size} draws: lower total_size to "
                f"{int(total / most.max())}, or draw with replace=True"
            )
        self._place_runs(sums, np.clip(np.ceil(np.log2(np.maximum(expected, 2.0**-60))), *_LEVELS) * replace)

    def _place_runs(self, sums: NDArray[np.float64], level: NDArray[np.float64]) -> None:
        """Puts the runs that weigh something on the axis, level by level."""
        weighing = np.flatnonzero(sums)
        self._runs = weighing[np.argsort(level[weighing], kind="stable")]  # in the order of the axis
        self._ends = np.cumsum(sums[self._runs])
        exponents, first = np.unique(level[self._runs], return_index=True)
        last = np.append(first[1:], len(self._runs)) - 1  # the last run of each level
        stops = self._ends[last]
        strata = stops / stops[-1] * self._total_size
        firsts = np.ceil(np.append(0.0, strata[:-1])).astype(np.int64)  # the first stratum in the level
        counts = np.maximum(0, np.floor(strata).astype(np.int64) - firsts)
        self._levels = stops, last, firsts, counts, exponents.astype(np.int64)

    def _weights(self, window: slice) -> NDArray[np.float64]:
        """The weights of some rows. Rows beyond the last weigh nothing."""
        weights = np.zeros(window.stop - window.start)
        known = slice(window.start, min(window.stop, self._n_rows))
        weights[: known.stop - known.start] = (
            self._table[known] if self._codes is None else self._table[self._codes[known]]
        )
        return weights

    def _chosen(self) -> NDArray[np.bool_]:
        """A mask of the rows that weigh something."""
        return np.concatenate([self._weights(window) > 0 for window in windows_of(self._n_rows)])

    def order(self, dataset: Table) -> Order:
        """The draws as an order. Raises OptionError for a dataset of another length."""
        if dataset.n_obs != self._n_rows:
            raise OptionError(f"the weights or labels are for {self._n_rows} rows, but the dataset has {dataset.n_obs}")
        return Order(
            dataset_rows=self._n_rows,
            n_rows=self._total_size,
            draw=self._rows,
            block_size=self._blocks.block_size,
            shuffles_fetch=True,
            repeats=self._replace,
            chosen=None if self._n_positive == self._n_rows else self._chosen,
        )

    def _rows(self, start: int, stop: int, seed: int, epoch: int) -> Rows:
        key = key_of(seed, epoch, 5)
        draws = self._blocks.positions(self._total_size, start, stop, seed, epoch)
        together = self._blocks.block_size if self._replace else self._total_size
        weights = self._table, self._codes, self._n_rows
        _draw(
            draws, (self._total_size, together, np.uint64(key)), self._levels, (self._runs, self._ends), weights, draws
        )
        return draws


@compiled
def _weight(table: NDArray[Any], codes: Codes | None, row: int) -> float:
    return np.float64(table[row] if codes is None else table[codes[row]])


@compiled
def _draw(
    draws: Rows,
    epoch: tuple[int, int, np.uint64],
    levels: tuple[NDArray[Any], ...],
    axis: tuple[Rows, NDArray[np.float64]],
    weights: tuple[NDArray[Any], Codes | None, int],
    out: Rows,
) -> None:
    """Writes the rows of some draws of an epoch to `out`."""
    total_size, together, key = epoch
    stops, last, firsts, counts, exponents = levels
    runs, ends = axis
    stratum = ends[-1] / total_size
    table, codes, n_rows = weights
    of_run, row, found, reached, weight = -1, 0, 0, 0.0, 0.0
    for i in range(len(draws)):
        draw, group = draws[i], draws[i] // together
        jitter = _unit(key, group)
        level = min(np.searchsorted(stops, (draw + jitter) * stratum, side="right"), len(stops) - 1)
        number, n_draws, passes = draw - firsts[level], counts[level], 1 << max(0, exponents[level])
        if passes > 1 and 0 <= number < n_draws // passes * passes:
            length = n_draws // passes
            draw = firsts[level] + number % length * passes + number // length
        point = (draw + jitter) * stratum
        begin, length = group * together, float(together)
        if exponents[level] < 0 and firsts[level] <= begin and begin + together <= firsts[level] + n_draws:
            turned = _unit(~key, group) + (draw - begin + jitter) / length * 2.0 ** exponents[level]
            point = (begin + turned % 1.0 * length) * stratum
        run = min(np.searchsorted(ends, point, side="right"), last[level])
        left = max(0.0, point - (ends[run - 1] if run else 0.0))  # of the running weight in the run
        if run != of_run or left < reached - weight:  # else the search goes on from the row of the last draw
            of_run, row, found = run, runs[run] * _RUN, runs[run] * _RUN
            reached = weight = _weight(table, codes, row)
        while reached <= left and row < min((runs[run] + 1) * _RUN, n_rows) - 1:
            row += 1
            weight = _weight(table, codes, row)
            reached += weight
            if weight > 0:  # rounding may leave no row beyond the point, and the last row weighs nothing
                found = row
        out[i] = found


@compiled
def _unit(key: np.uint64, counter: int) -> float:
    """A random number in [0, 1) for each counter."""
    return (mix_word(key + GOLDEN * np.uint64(counter)) >> np.uint64(11)) * _STEP  # type: ignore[arg-type,return-value]


@dataclass(frozen=True, eq=False)
class _Weighted(Sampling):
    """Base class: the common options. `_weights_in` gives the weights of the rows of a dataset."""

    _: KW_ONLY
    block_size: int = DEFAULT_BLOCK_SIZE
    total_size: int | None = None
    replace: bool = True

    def _require_options(self) -> None:
        require_count(block_size=self.block_size)
        if self.total_size is not None:
            require_count(total_size=self.total_size)
        require_flag(replace=self.replace)

    def order(self, dataset: Table, batch_size: int, fetch_rows: int) -> Order:
        table, codes = self._weights_in(dataset)
        draws = Draws(table, codes, block_size=self.block_size, total_size=self.total_size, replace=self.replace)
        return draws.order(dataset)

    @abstractmethod
    def _weights_in(self, dataset: Table) -> tuple[NDArray[Any], Codes | None]:
        """The table and codes of Draws."""


@dataclass(frozen=True, eq=False)
class BlockWeightedSampling(_Weighted):
    """Draws `total_size` rows per epoch by weight, in blocks.

    A row occurs `total_size * weight / sum of weights` times per epoch on average. A row of weight 0 never occurs.

    Args:
        weights: One number per row of the dataset, at least 0. float32 and float64 arrays are not copied, so do not
            change them afterwards. With `column`, a mapping from labels of that column to the weight of a row with the
            label; labels that are not listed weigh 0.
        column: The obs column of the labels in `weights`.
        block_size: Draws of neighbours, which makes reads longer. 1 draws each row on its own. Default: 64.
        total_size: Rows per epoch. Default: the number of rows with a positive weight.
        replace: Whether a row may occur several times per epoch. With False, weights that ask for that are refused.
            Default: True.

    For the weights of some rows only, give the Loader a view of them.

    Raises OptionError for invalid options; when a Loader is made, also for invalid weights, and for a label that does
    not exist.

    >>> sampling = zl.BlockWeightedSampling([1, 0, 1, 4], block_size=1, total_size=12)
    >>> loader = zl.Loader(dataset[:4], sampling=sampling, batch_size=12)
    >>> sorted(next(iter(loader)).index.tolist())
    [0, 0, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3]
    >>> rare = zl.BlockWeightedSampling({"T": 1, "NK": 10}, column="cell_type", total_size=100)
    >>> loader = zl.Loader(dataset, sampling=rare)

    The name comes from scDataset, where a block is `block_size` neighbours among the sorted draws, too.
    """

    weights: Sequence[float] | NDArray[Any] | Mapping[Any, float] = field(kw_only=False, repr=False)
    column: str | None = None

    def __post_init__(self) -> None:
        self._require_options()
        weights: Any = self.weights
        by_label = isinstance(weights, Mapping)
        if by_label != (self.column is not None) or (not by_label and np.ndim(weights) != 1):
            raise OptionError(
                "weights must be one number per row, or a mapping from labels to weights together with column="
            )

    def _weights_in(self, dataset: Table) -> tuple[NDArray[Any], Codes | None]:
        if self.column is None or not isinstance(self.weights, Mapping):
            table = np.asarray(self.weights)
            if table.dtype.kind not in "biuf":
                raise OptionError(f"weights must be one number per row, not {table.dtype}")
            return (table if table.dtype in (np.float32, np.float64) else table.astype(np.float64)), None
        found = dataset.obs_column(self.column)
        if found.categories is None:
            raise OptionError(
                f"obs column {self.column!r} holds numbers, not labels: give weights as one number per row"
            )
        table = np.zeros(len(found.categories) + 1)  # the last entry is for rows without a label
        for label, weight in self.weights.items():
            if label not in found.categories:
                known = ", ".join(map(repr, found.categories[:20]))
                raise OptionError(
                    f"weights names the label {label!r}, but the labels of obs column {self.column!r} are: {known}"
                )
            table[found.categories.get_loc(label)] = require_weight(label, weight)
        return table, found.values


def require_weight(label: Any, weight: Any) -> float:
    """A weight of a label or group as a float. Raises OptionError unless it is a number of at least 0."""
    if not is_number(weight) or not 0 <= weight < np.inf:
        raise OptionError(f"{label!r} has the weight {weight!r}: give a number of at least 0")
    return float(weight)


@dataclass(frozen=True, eq=False)
class ClassBalancedSampling(_Weighted):
    """Draws every class equally often, and every row of a class equally often.

    It is BlockWeightedSampling with the weight 1 / (rows in the class), and takes the same `block_size`, `total_size`
    and `replace`. `labels` is the name of an obs column (of labels, whole numbers, booleans or dates), or one label per
    row of the dataset. Rows without a label (code -1, None, NaN, NaT) are never drawn. Raises OptionError for a column
    of fractions, and for invalid options.

    >>> loader = zl.Loader(dataset, obs=["cell_type"], sampling=zl.ClassBalancedSampling("cell_type"))
    """

    labels: str | Sequence[Any] | NDArray[Any] = field(kw_only=False)

    def __post_init__(self) -> None:
        self._require_options()
        if np.ndim(self.labels) != (0 if isinstance(self.labels, str) else 1):
            raise OptionError(
                f"labels must be the name of an obs column, or one label per row of the dataset, not "
                f"{self.labels!r:.100}"
            )

    def __repr__(self) -> str:
        labels = repr(self.labels) if isinstance(self.labels, str) else f"{len(self.labels)} labels"
        return f"ClassBalancedSampling({labels}, block_size={self.block_size}, total_size={self.total_size})"

    def _weights_in(self, dataset: Table) -> tuple[NDArray[Any], Codes | None]:
        if isinstance(self.labels, str):
            codes, n_classes = dataset.obs_column(self.labels).classes(f"obs column {self.labels!r}")
        else:
            codes, n_classes = as_numbers("labels", self.labels).classes("labels")
        counts = np.zeros(n_classes + 1, np.int64)
        count_codes(codes, counts)
        counts[-1] = 0  # rows without a label are never drawn
        return np.divide(1.0, counts, out=np.zeros(n_classes + 1), where=counts > 0), codes


class Mixture(Sampling):
    """Mixes groups of rows, such as several atlases, in given shares, in blocks of `block_size` rows.

    Args:
        groups: A mapping from names of your choice to a pair of the group's rows and its weight. The rows are a Dataset
            that was opened from stores of the Loader's dataset, a view, or a condition as `dataset.where` takes it: an
            expression, a mask, or row numbers. Weights need not add up to 1. A group of weight 0 never comes. Groups
            may overlap: a row of two groups comes for each of them. Rows of no group never come.
        epoch_rows: Rows per epoch. Default: as many as the groups with a weight have together.
        block_size: Draws of neighbours, as in BlockWeightedSampling.

    All rows of a group come equally often, to within two times per epoch, so a small group repeats within an epoch. If
    the groups are stretches of the rows, an epoch has the shares, but for rounding, and every fetch nearly so.

    Raises OptionError for unusable groups, weights or counts. When a Loader is made, it raises OptionError for an empty
    group with a weight, and for rows that the Loader's dataset does not have; and MissingColumnError.

    >>> both = zl.open_dataset(["atlas.zarr", "other.zarr"], join="outer")
    >>> atlas, other = zl.open_dataset("atlas.zarr"), zl.open_dataset("other.zarr")
    >>> shares = zl.Mixture({"atlas": (atlas, 0.7), "other": (other, 0.3)}, block_size=10)
    >>> loader = zl.Loader(both, sampling=shares, batch_size=100, fetch_factor=10)
    >>> rows = [row for minibatch in loader for row in minibatch.index.tolist()]
    >>> len(rows), round(sum(row < len(atlas) for row in rows) / len(rows), 1)
    (400, 0.7)

    Groups by obs column, or of a view:

    >>> by_type = zl.Mixture({"T": ("cell_type == 'T'", 2), "B": ("cell_type == 'B'", 1)}, epoch_rows=600)
    >>> some = both.where("donor == 'd1'")
    >>> by_view = zl.Mixture({"some": (some, 0.1), "all": (both, 0.9)}, epoch_rows=1000)
    >>> [len(zl.Loader(both, sampling=sampling, batch_size=50)) for sampling in (by_type, by_view)]
    [12, 20]
    """

    def __init__(
        self,
        groups: Mapping[str, tuple[Any, float]],
        *,
        epoch_rows: int | None = None,
        block_size: int = DEFAULT_BLOCK_SIZE,
    ) -> None:
        require_count(block_size=block_size)
        if epoch_rows is not None:
            require_count(epoch_rows=epoch_rows)
        pairs = groups.items() if isinstance(groups, Mapping) else ()
        if not pairs or not all(
            isinstance(name, str) and isinstance(pair, tuple | list) and len(pair) == 2 for name, pair in pairs
        ):
            raise OptionError(
                "groups must be a mapping from names to pairs of rows and a weight, such as "
                f'{{"a": (dataset_a, 0.7), "b": (dataset_b, 0.3)}}, not {groups!r:.100}'
            )
        self.weights = {name: require_weight(name, weight) for name, (_, weight) in pairs}
        if not any(self.weights.values()):
            raise OptionError(f"every group has the weight 0, so there would be no minibatch: {self.weights}")
        self.groups = {name: rows for name, (rows, _) in pairs}
        self.epoch_rows = None if epoch_rows is None else int(epoch_rows)
        self.block_size = int(block_size)  # NumPy integers overflow

    def __repr__(self) -> str:
        return f"Mixture({self.weights}, epoch_rows={self.epoch_rows}, block_size={self.block_size})"

    def order(self, dataset: Table, batch_size: int, fetch_rows: int) -> Order:
        # Rows of the same groups have the same code.
        codes, table, n_rows = np.zeros(dataset.n_obs, np.uint32), [0.0], 0
        whole = max(self.weights.values())
        for name, rows in self.groups.items():
            mask = dataset.rows_of(rows).mask()
            if not self.weights[name]:
                continue
            size = int(np.count_nonzero(mask))
            if not size:
                raise OptionError(f"the group {name!r} has no row: give it another group of rows, or the weight 0")
            n_rows += size
            before = np.unique(codes[mask])
            new_code = np.zeros(len(table), np.uint32)
            new_code[before] = len(table) + np.arange(len(before))
            table += [table[code] + self.weights[name] / whole / size for code in before.tolist()]
            codes[mask] = new_code[codes[mask]]
        codes = codes.astype(np.min_scalar_type(len(table)))
        total_size = n_rows if self.epoch_rows is None else self.epoch_rows
        draws = Draws(np.array(table), codes, block_size=self.block_size, total_size=total_size, replace=True)
        return draws.order(dataset)
