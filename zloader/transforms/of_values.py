"""Transforms of each value by itself: clipped, or scaled by its gene. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.checks import is_number
from zloader.common.compiled import compiled
from zloader.common.deferred import pd
from zloader.common.errors import OptionError
from zloader.common.records import Rows
from zloader.transforms.statistics import GeneStatistics
from zloader.transforms.transform import RowValues, Transform


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
        low, high = self._limits
        if not (is_number(low) and is_number(high) and low <= high):
            raise OptionError(f"Clip needs numbers low <= high, or None for no limit, not {self.low!r}, {self.high!r}")

    @property
    def _limits(self) -> tuple[float, float]:
        return -math.inf if self.low is None else self.low, math.inf if self.high is None else self.high

    @property
    def needs_floats(self) -> bool:  # type: ignore[override]
        given = [limit for limit in (self.low, self.high) if limit is not None]
        return any(abs(limit) >= 2**31 or limit != math.floor(limit) for limit in given)

    @property
    def makes_zeros(self) -> bool:  # type: ignore[override]
        return 0 in self._limits

    @property
    def fills_zeros(self) -> bool:  # type: ignore[override]
        return not self._limits[0] <= 0 <= self._limits[1]

    def apply(self, x: RowValues) -> None:
        _clip(x.values, *map(float, self._limits))


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

    by_gene = needs_floats = True

    def __post_init__(self) -> None:
        if isinstance(self.mean, GeneStatistics) and self.std is None:
            object.__setattr__(self, "std", self.mean)
        if self.mean is None and self.std is None:
            raise OptionError("Scale needs a mean or a std: write Scale(dataset.gene_statistics(...))")
        for name in ("mean", "std"):
            if not isinstance(given := getattr(self, name), GeneStatistics | None):
                object.__setattr__(self, name, _numbers(name, given))

    def __repr__(self) -> str:
        return f"Scale({', '.join(f'{name}=...' for name, value in vars(self).items() if value is not None)})"

    @property
    def fills_zeros(self) -> bool:  # type: ignore[override]
        return self.mean is not None

    def bound(self, n_genes: int, names: Callable[[], pd.Index], where: str) -> Transform:
        """With arrays for these columns. Raises OptionError if a gene is missing, or the arrays are of another size."""

        def of_columns(name: str) -> NDArray[Any] | None:
            given = getattr(self, name)
            if isinstance(given, GeneStatistics):
                return _numbers(name, getattr(given.of(names(), where), name))
            if given is not None and len(given) != n_genes:
                raise OptionError(
                    f"{name} of Scale has {len(given)} numbers, but {where} has {n_genes} columns: give one number per "
                    "column of x, or what dataset.gene_statistics() returned"
                )
            return given  # type: ignore[no-any-return]

        return replace(self, mean=of_columns("mean"), std=of_columns("std"))

    def apply(self, x: RowValues) -> None:
        mean, std = self.mean, self.std
        assert not isinstance(mean, GeneStatistics) and not isinstance(std, GeneStatistics)  # it is bound  # noqa: PT018
        _scale(x.values, x.starts, x.columns, mean, None if std is None else 1 / std)


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
    unfit = np.flatnonzero(~np.isfinite(numbers) | ((name == "std") & (numbers < 0)))
    if len(unfit):
        raise OptionError(f"{name} is {numbers[unfit[0]]} for gene {unfit[0]}: give a finite number for each gene")
    if name == "std":
        numbers[numbers == 0] = 1
    return numbers
