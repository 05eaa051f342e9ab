"""Samplings that draw rows by weight, or all classes equally often. Pure.

`draws.py` explains how rows are drawn. A sampling that names an obs column is bound to it once, by the Loader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.checks import is_number, require_count
from zloader.common.errors import OptionError
from zloader.common.records import Rows
from zloader.order.draws import Codes, Draws, require_within
from zloader.order.sampling import Sampling, Table
from zloader.order.shuffling import DEFAULT_BLOCK_SIZE, checked_once
from zloader.selecting.columns import ObsColumn, as_numbers
from zloader.selecting.groups import count_codes


@dataclass(frozen=True, eq=False)
class _Weighted(Sampling):
    """Base class: the common options, and the draws once the weights are known."""

    _: KW_ONLY
    block_size: int = DEFAULT_BLOCK_SIZE
    total_size: int | None = None
    replace: bool = True
    indices: Sequence[int] | NDArray[np.integer] | None = field(default=None, repr=False)
    _chosen: Rows | None = field(default=None, init=False, repr=False)  # `indices` in ascending order
    _draws: Draws | None = field(default=None, init=False, repr=False)

    shuffles_fetch = True
    repeats = property(attrgetter("replace"))

    def n_rows(self, dataset_rows: int) -> int:
        """Number of rows per epoch: `total_size`, or the number of rows with a weight above 0."""
        return self._resolved().n_rows(dataset_rows)

    def rows(self, start: int, stop: int, *, dataset_rows: int, seed: int, epoch: int) -> Rows:
        return self._resolved().rows(start, stop, dataset_rows=dataset_rows, seed=seed, epoch=epoch)

    def _resolved(self) -> Draws:
        if self._draws is None:
            raise OptionError(f"{self} names an obs column: call bound(dataset) first, as the Loader does")
        return self._draws

    def _draw(self, table: NDArray[Any], codes: Codes | None) -> Draws:
        return Draws(
            table,
            codes,
            indices=self._chosen,
            block_size=self.block_size,
            total_size=self.total_size,
            replace=self.replace,
        )


@dataclass(frozen=True, eq=False)
class BlockWeightedSampling(_Weighted):
    """Draws `total_size` rows per epoch by weight, in blocks.

    A row occurs `total_size * weight / sum of weights` times per epoch on average. A row of weight 0 never occurs.

    Args:
        weights: One number per row of the dataset, at least 0. float32 and float64 arrays are not copied, so do not
            change them afterwards. With `column`, a mapping from labels of that column to the weight of a row with the
            label; labels that are not listed weigh 0.
        column: The obs column of the labels in `weights`.
        block_size: Rows drawn together, which makes reads longer. A block is `block_size` consecutive rows of positive
            weight, so it is contiguous on disk unless rows of weight 0 lie between. If a few rows dominate the weight
            of a block, fewer of its rows are taken per draw, so that no row occurs twice in a draw. 1 draws each row on
            its own. Default: 64.
        total_size: Rows per epoch. Default: the number of rows with a positive weight.
        replace: Whether a row may occur several times per epoch. With False, rows are drawn one after the other from
            the rows that remain, and come in shuffled blocks of consecutive drawn rows. Default: True.
        indices: The rows that take part. Default: all.

    Raises OptionError for invalid weights or options; when a Loader is made, also for a label that does not exist.

    >>> sampling = zl.BlockWeightedSampling([1, 0, 1, 4], block_size=1, total_size=10)
    >>> sampling.rows(0, 10, dataset_rows=4, seed=0, epoch=0).tolist()
    [0, 3, 3, 3, 3, 3, 3, 0, 3, 3]
    >>> rare = zl.BlockWeightedSampling({"T": 1, "NK": 10}, column="cell_type", total_size=100)
    >>> loader = zl.Loader(dataset, sampling=rare)

    The name comes from scDataset, where a block is `block_size` neighbours among the sorted draws.
    """

    weights: Sequence[float] | NDArray[Any] | Mapping[Any, float] = field(kw_only=False, repr=False)
    column: str | None = None

    def __post_init__(self) -> None:
        _require_options(self)
        if isinstance(self.weights, Mapping) != (self.column is not None):
            raise OptionError(
                "weights must be one number per row, or a mapping from labels to weights together with column="
            )
        if not isinstance(self.weights, Mapping):
            table = np.asarray(self.weights)
            if table.ndim != 1 or table.dtype.kind not in "biuf":
                raise OptionError(f"weights must be one number per row, not {table.dtype} of shape {table.shape}")
            if table.dtype not in (np.float32, np.float64):
                table = table.astype(np.float64)
            object.__setattr__(self, "_draws", self._draw(table, None))

    def bound(self, dataset: Table) -> _Weighted | Draws:
        """The sampling with the weights of all rows looked up by label. Raises OptionError for an unknown label."""
        if self.column is None or not isinstance(self.weights, Mapping):
            return self
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
            if not is_number(weight) or not 0 <= weight < np.inf:
                raise OptionError(f"weights has {weight!r} for {label!r}: give a number of at least 0")
            table[found.categories.get_loc(label)] = weight
        return self._draw(table, found.values)


@dataclass(frozen=True, eq=False)
class ClassBalancedSampling(_Weighted):
    """Draws every class equally often, and every row of a class equally often.

    It is BlockWeightedSampling with the weight 1 / (rows in the class), and takes the same `block_size`, `total_size`,
    `replace` and `indices`. `labels` is the name of an obs column (of labels, whole numbers, booleans or dates), or one
    label per row of the dataset. Rows without a label (code -1, None, NaN, NaT) are never drawn. With `indices`,
    classes are counted among these rows only. Raises OptionError for a column of fractions, and for invalid options.

    >>> sampling = zl.ClassBalancedSampling(["T", "T", "T", "NK"], block_size=1, total_size=10)
    >>> sampling.rows(0, 10, dataset_rows=4, seed=0, epoch=0).tolist()
    [0, 2, 3, 3, 2, 3, 2, 0, 3, 2]
    >>> loader = zl.Loader(dataset, obs=["cell_type"], sampling=zl.ClassBalancedSampling("cell_type"))
    """

    labels: str | Sequence[Any] | NDArray[Any] = field(kw_only=False)

    def __post_init__(self) -> None:
        _require_options(self)
        if np.ndim(self.labels) != (0 if isinstance(self.labels, str) else 1):
            raise OptionError(
                f"labels must be the name of an obs column, or one label per row of the dataset, not "
                f"{self.labels!r:.100}"
            )
        if not isinstance(self.labels, str):
            object.__setattr__(self, "_draws", self._balanced("labels", as_numbers("labels", self.labels)))

    def __repr__(self) -> str:
        labels = repr(self.labels) if isinstance(self.labels, str) else f"{len(self.labels)} labels"
        return f"ClassBalancedSampling({labels}, block_size={self.block_size}, total_size={self.total_size})"

    def bound(self, dataset: Table) -> _Weighted | Draws:
        """The sampling with the classes of the column counted."""
        if not isinstance(self.labels, str):
            return self
        return self._balanced(f"obs column {self.labels!r}", dataset.obs_column(self.labels))

    def _balanced(self, name: str, column: ObsColumn) -> Draws:
        codes, n_classes = column.classes(name)
        if self._chosen is not None:
            require_within(self._chosen, len(codes))
        counts = np.zeros(n_classes + 1, np.int64)
        count_codes(codes if self._chosen is None else codes[self._chosen], counts)
        counts[-1] = 0  # rows without a label are never drawn
        return self._draw(np.divide(1.0, counts, out=np.zeros(n_classes + 1), where=counts > 0), codes)


def _require_options(sampling: _Weighted) -> None:
    require_count(block_size=sampling.block_size)
    if sampling.total_size is not None:
        require_count(total_size=sampling.total_size)
    if not isinstance(sampling.replace, bool):
        raise OptionError(f"replace must be True or False, not {sampling.replace!r}")
    object.__setattr__(sampling, "_chosen", checked_once(sampling.indices))
