"""Samplings that draw rows by weight, and classes alike. Pure.

`draws.py` says how rows are drawn. What names an obs column is `bound` to it by the Loader, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from zloader.common.checks import require_count
from zloader.common.compiled import compiled
from zloader.common.errors import OptionError
from zloader.common.records import Rows
from zloader.common.sharing import SharesArrays
from zloader.order.draws import Codes, Draws, require_within
from zloader.order.sampling import DEFAULT_BLOCK_SIZE, checked_once
from zloader.selecting.columns import Column, ObsColumn, as_numbers


@dataclass(frozen=True, eq=False)
class _Weighted(SharesArrays):
    """What both have: options, and the draws once what they are made of is known."""

    _: KW_ONLY
    block_size: int = DEFAULT_BLOCK_SIZE
    total_size: int | None = None
    replace: bool = True
    indices: Sequence[int] | NDArray[np.integer] | None = field(default=None, repr=False)
    _chosen: Rows | None = field(default=None, init=False, repr=False)  # `indices`, in ascending order
    _draws: Draws | None = field(default=None, init=False, repr=False)

    @property
    def shuffles_fetch(self) -> bool:
        """Always: the rows of a fetch are permuted in memory."""
        return True

    @property
    def repeats(self) -> bool:
        """Whether a row may come more than once an epoch."""
        return self.replace

    def n_rows(self, dataset_rows: int) -> int:
        """How many rows an epoch has: `total_size`, or as many as have a weight above 0."""
        return self._resolved().n_rows(dataset_rows)

    def rows(self, start: int, stop: int, *, dataset_rows: int, seed: int, epoch: int) -> Rows:
        """The rows at positions `[start, stop)`."""
        return self._resolved().rows(start, stop, dataset_rows=dataset_rows, seed=seed, epoch=epoch)

    def _resolved(self) -> Draws:
        if self._draws is None:
            raise OptionError(f"{self} names an obs column: bind it to the dataset with bound(dataset.obs_column)")
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
    """Rows drawn by weight, as many as `total_size` (or as there are rows of positive weight), in blocks.

    `weights` are one number a row of the dataset (float32 or float64 are kept as they are: do not change them); or with
    `column` a mapping from its labels to the weight of a row that has it, where other labels weigh nothing. `indices`
    are the rows that take part. Every row comes `total_size * weight / weight of all` times an epoch on average, one of
    weight 0 never.

    A block is `block_size` consecutive rows of positive weight: on disk, one run where no row between weighs 0. Of
    blocks in which a few rows weigh most, fewer rows are taken at a time, so that none comes twice in a draw.
    `block_size=1` draws every row by itself. With `replace=False` no row comes twice in an epoch: `total_size` rows
    are drawn one after the other from those that are left, and come in blocks of consecutive ones.

    scDataset's name; there a block is `block_size` neighbours of the sorted draws.
    """

    weights: Sequence[float] | NDArray[Any] | Mapping[Any, float] = field(kw_only=False, repr=False)
    column: str | None = None

    def __post_init__(self) -> None:
        _require_options(self)
        if isinstance(self.weights, Mapping) != (self.column is not None):
            raise OptionError(
                "weights must be one number a row, or a mapping from the labels of the obs column `column`"
            )
        if not isinstance(self.weights, Mapping):
            table = np.asarray(self.weights)
            if table.ndim != 1 or table.dtype.kind not in "biuf":
                raise OptionError(f"weights must be one number a row, not {table.dtype} of shape {table.shape}")
            if table.dtype not in (np.float32, np.float64):
                table = table.astype(np.float64)
            object.__setattr__(self, "_draws", self._draw(table, None))

    def bound(self, column: Column) -> _Weighted | Draws:
        """The same with the weights of a column's labels looked up. Raises OptionError for a label it does not have."""
        if self.column is None or not isinstance(self.weights, Mapping):
            return self
        found = column(self.column)
        if found.categories is None:
            raise OptionError(f"obs column {self.column!r} holds numbers, not labels: give weights as one number a row")
        table = np.zeros(len(found.categories) + 1)  # the last one for rows without a label
        for label, weight in self.weights.items():
            if label not in found.categories:
                known = ", ".join(map(repr, found.categories[:20]))
                raise OptionError(f"weights has {label!r}, which obs column {self.column!r} has not; it has: {known}")
            if not isinstance(weight, int | float | np.number) or not 0 <= weight < np.inf:
                raise OptionError(f"weights has {weight!r} for {label!r}: a weight is a number of at least 0")
            table[found.categories.get_loc(label)] = weight
        return self._draw(table, found.values)


@dataclass(frozen=True, eq=False)
class ClassBalancedSampling(_Weighted):
    """Rows drawn so that every class is equally likely, and within it every row.

    `labels` is the name of an obs column (labels, whole numbers or booleans), or one label a row of the dataset. Rows
    without one (code -1, None) are never drawn, nor, with `indices`, others than those, which alone are counted.
    The rest is as for BlockWeightedSampling with the weight 1 / rows of the class.
    """

    labels: str | Sequence[Any] | NDArray[Any] = field(kw_only=False)

    def __post_init__(self) -> None:
        _require_options(self)
        if np.ndim(self.labels) != (0 if isinstance(self.labels, str) else 1):
            raise OptionError(
                f"labels must be the name of an obs column, or one label a row of the dataset, not {self.labels!r:.100}"
            )
        if not isinstance(self.labels, str):
            object.__setattr__(self, "_draws", self._balanced("labels", as_numbers("labels", self.labels)))

    def __repr__(self) -> str:
        labels = repr(self.labels) if isinstance(self.labels, str) else f"{len(self.labels)} labels"
        return f"ClassBalancedSampling({labels}, block_size={self.block_size}, total_size={self.total_size})"

    def bound(self, column: Column) -> _Weighted | Draws:
        """The same with the classes of the column counted."""
        if not isinstance(self.labels, str):
            return self
        return self._balanced(f"obs column {self.labels!r}", column(self.labels))

    def _balanced(self, name: str, column: ObsColumn) -> Draws:
        codes: Codes = column.values
        if column.categories is not None:
            n_classes = len(column.categories)
        elif codes.dtype.kind in "biu":
            codes, classes = pd.factorize(codes)
            n_classes = len(classes)
        else:
            raise OptionError(f"{name} holds {codes.dtype}: classes are labels, whole numbers or booleans")
        if self._chosen is not None:
            require_within(self._chosen, len(codes))
        counts = np.zeros(n_classes + 1, np.int64)
        _count(codes if self._chosen is None else codes[self._chosen], counts)
        counts[-1] = 0  # rows without a label
        return self._draw(np.divide(1.0, counts, out=np.zeros(n_classes + 1), where=counts > 0), codes)


@compiled
def _count(codes: Codes, counts: Rows) -> None:
    """Adds to `counts` how often each code is there; -1 counts at the end."""
    for code in codes:
        counts[code] += 1


def _require_options(sampling: _Weighted) -> None:
    require_count(block_size=sampling.block_size)
    if sampling.total_size is not None:
        require_count(total_size=sampling.total_size)
    if not isinstance(sampling.replace, bool):
        raise OptionError(f"replace must be True or False, not {sampling.replace!r}")
    object.__setattr__(sampling, "_chosen", checked_once(sampling.indices))
