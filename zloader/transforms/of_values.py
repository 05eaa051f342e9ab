"""Transforms of each value by itself: clipped, or scaled by its gene. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.checks import is_number
from zloader.common.compiled import compiled
from zloader.common.errors import OptionError
from zloader.common.records import Rows
from zloader.transforms.statistics import GeneStatistics
from zloader.transforms.transform import Columns, RowValues, Transform


@compiled
def _clip(values: NDArray[Any], low: float, high: float) -> None:
    for i in range(len(values)):
        value = values[i]
        value = values.dtype.type(low) if value < low else value
        values[i] = values.dtype.type(high) if value > high else value


@compiled
def _scale(
    values: NDArray[Any],
    starts: Rows,
    columns: NDArray[np.integer] | None,
    mean: NDArray[np.float64] | None,
    inverse: NDArray[np.float64] | None,
) -> None:
    for row in range(len(starts) - 1):
        of_row = values[starts[row] : starts[row + 1]]
        for i in range(len(of_row)):
            column = i if columns is None else columns[starts[row] + i]
            value = np.float64(of_row[i])
            if mean is not None:
                value -= mean[column]
            if inverse is not None:
                value *= inverse[column]
            of_row[i] = value


@dataclass(frozen=True)
class Clip(Transform):
    """Limits values to the range from `low` to `high`, like `numpy.clip`. None is no limit.

    >>> loader = zl.Loader(dataset, transforms=[zl.transforms.Clip(0, 3)], layout="dense")
    >>> next(iter(loader)).x.max()
    tensor(3.)

    After Scale with a mean, `Clip(-10, 10)` is the `max_value=10` of scanpy's `scale`; without a mean it is
    `Clip(None, 10)`. NaN stays NaN. Zeros stay zeros in CSR, so `low` above 0 and `high` below 0 need layout="dense".
    """

    low: float | None
    high: float | None

    def __post_init__(self) -> None:
        for name, limit in (("low", self.low), ("high", self.high)):
            if limit is None:
                continue
            if not is_number(limit) or math.isnan(limit):
                raise OptionError(f"{name} must be a number, or None for no limit, not {limit!r:.100}")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise OptionError(f"low must be at most high, but {self.low!r} is above {self.high!r}")
        if self.low is None and self.high is None:
            raise OptionError("Clip(None, None) limits nothing: give low or high")

    @property
    def _limits(self) -> tuple[float, float]:
        return -math.inf if self.low is None else float(self.low), math.inf if self.high is None else float(self.high)

    @property
    def makes_fractions(self) -> bool:
        return any(math.isfinite(limit) and limit != math.floor(limit) for limit in self._limits)

    @property
    def makes_zeros(self) -> bool:
        return 0 in self._limits

    @property
    def fills_zeros(self) -> str:
        """How to avoid that zeros become other values; empty if they stay zero."""
        low, high = self._limits
        return "" if low <= 0 <= high else "let the range contain 0"

    def require_dtype(self, dtype: np.dtype[Any]) -> None:
        """Raises OptionError if x of this dtype cannot hold a limit."""
        for limit in self._limits:
            whole = dtype.kind in "iu" and math.isfinite(limit)
            if whole and not np.iinfo(dtype).min <= limit <= np.iinfo(dtype).max:
                raise OptionError(f"{self} limits values to {limit!r}, which {dtype} cannot hold: choose another dtype")

    def apply(self, x: RowValues) -> None:
        _clip(x.values, *self._limits)


@dataclass(frozen=True, eq=False)
class Scale(Transform):
    """Subtracts the mean of each gene and divides by its standard deviation, as scanpy's `scale`.

    >>> statistics = dataset.gene_statistics(transforms=[zl.transforms.LogNormalize(1e4)])
    >>> scale = zl.transforms.Scale(statistics)
    >>> transforms = [zl.transforms.LogNormalize(1e4), scale, zl.transforms.Clip(-10, 10)]
    >>> loader = zl.Loader(dataset, transforms=transforms, layout="dense", batch_size=len(dataset))
    >>> bool(next(iter(loader)).x.mean(dim=0).abs().max() < 1e-5)
    True

    `mean` and `std` are arrays with one number per column of x, or what `dataset.gene_statistics()` returned, whose
    genes are matched with the columns by name. `Scale(statistics)` takes both from it, and `Scale(std=statistics)` only
    the standard deviation, which keeps zeros zero, so that it works in every layout. A mean needs layout="dense". A
    standard deviation of 0 counts as 1.
    """

    mean: GeneStatistics | NDArray[Any] | None = None
    std: GeneStatistics | NDArray[Any] | None = None

    by_gene = makes_fractions = True

    def __post_init__(self) -> None:
        if isinstance(self.mean, GeneStatistics) and self.std is None:
            object.__setattr__(self, "std", self.mean)
        if self.mean is None and self.std is None:
            raise OptionError("Scale needs a mean or a std: write Scale(dataset.gene_statistics(...))")
        for name in ("mean", "std"):
            given = getattr(self, name)
            if given is not None and not isinstance(given, GeneStatistics):
                object.__setattr__(self, name, _numbers(name, given))

    def __repr__(self) -> str:
        parts = [f"{name}=..." for name in ("mean", "std") if getattr(self, name) is not None]
        return f"Scale({', '.join(parts)})"

    @property
    def fills_zeros(self) -> str:
        """How to avoid that zeros become other values; empty if they stay zero."""
        return "" if self.mean is None else "leave out the mean, as in Scale(std=...)"

    def bound(self, columns: Columns) -> Transform:
        """With arrays for these columns. Raises OptionError if a gene is missing, or the arrays are of another size."""
        return replace(self, mean=_of_columns("mean", self.mean, columns), std=_of_columns("std", self.std, columns))

    def apply(self, x: RowValues) -> None:
        assert not isinstance(self.mean, GeneStatistics)  # it is bound
        assert not isinstance(self.std, GeneStatistics)
        inverse = None if self.std is None else 1 / self.std
        _scale(x.values, x.starts, x.columns, self.mean, inverse)


def _numbers(name: str, given: Any) -> NDArray[np.float64]:
    """The numbers of an option as float64. A standard deviation of 0 becomes 1."""
    try:
        numbers = np.array(given, np.float64)
    except (TypeError, ValueError):
        numbers = np.empty(0)
    if numbers.ndim != 1 or not len(numbers):
        raise OptionError(
            f"{name} must be an array of one number per gene, or what dataset.gene_statistics() returned, not "
            f"{given!r:.100}"
        )
    unfit = ~np.isfinite(numbers) if name == "mean" else ~((numbers >= 0) & np.isfinite(numbers))
    if unfit.any():
        gene = int(np.flatnonzero(unfit)[0])
        raise OptionError(f"{name} is {numbers[gene]} for gene {gene}: give a finite number for each gene")
    if name == "std":
        numbers[numbers == 0] = 1
    return numbers


def _of_columns(name: str, given: GeneStatistics | NDArray[Any] | None, columns: Columns) -> NDArray[np.float64] | None:
    if given is None:
        return None
    if isinstance(given, GeneStatistics):
        return _numbers(name, getattr(given.of(columns.names, columns.where), name))
    if len(given) != columns.n_genes:
        raise OptionError(
            f"{name} of Scale has {len(given)} numbers, but {columns.where} has {columns.n_genes} columns: give one "
            "number per column of x, or what dataset.gene_statistics() returned"
        )
    return given
