"""Normalisation of counts to the same total per row, and their logarithm. Pure.

The logarithm of float32 is a polynomial without branches, which LLVM vectorises: log1p of the C library takes five
times as long. Its error is below 1 unit in the last place, and the result has the same bits on every machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.checks import is_number
from zloader.common.compiled import compiled
from zloader.common.errors import OptionError
from zloader.common.records import Rows
from zloader.transforms.transform import RefusedValue, RowValues, Transform

_MOST = 1e30  # the polynomial holds up to 2**126
_F32, _I32 = np.float32, np.int32
# Coefficients of logf in the Cephes library (Moshier 1989), for log(1 + f) with 1 + f from sqrt(1/2) to sqrt(2).
_P8, _P7, _P6 = _F32(7.0376836292e-2), _F32(-1.1514610310e-1), _F32(1.1676998740e-1)
_P5, _P4, _P3 = _F32(-1.2420140846e-1), _F32(1.4249322787e-1), _F32(-1.6668057665e-1)
_P2, _P1, _P0 = _F32(2.0000714765e-1), _F32(-2.4999993993e-1), _F32(3.3333331174e-1)
_LN2_HIGH, _LN2_LOW = _F32(0.693359375), _F32(-2.12194440e-4)
_ONE, _HALF, _STEP = _F32(1), _F32(0.5), _F32(2.0**-23)
_SQRT_HALF = _I32(0x3F3504F3)  # the bits of sqrt(1/2)
_BITS_OF_ONE = _I32(0x3F800000)
_EXPONENT = _I32(-(1 << 23))  # the bits of a float32 that hold its sign and its exponent


@compiled
def _log1p(x: Any) -> Any:
    """log(1 + x) of a float32 from 0 to 2**126."""
    u = _ONE + x
    bits = np.float32(u).view(np.int32)
    exponent = np.int32((bits - _SQRT_HALF) & _EXPONENT)  # log2(u), rounded, in the place of the exponent's bits
    down = np.int32(_BITS_OF_ONE - exponent).view(np.float32)  # 2**-log2(u)
    f = (u * down - _ONE) + (x - (u - _ONE)) * down  # the second term is what rounding 1 + x has lost
    p = ((((((((_P8 * f + _P7) * f + _P6) * f + _P5) * f + _P4) * f + _P3) * f + _P2) * f + _P1) * f) + _P0
    powers = np.float32(exponent) * _STEP
    square = f * f
    return (f + (p * f * square + powers * _LN2_LOW - _HALF * square)) + powers * _LN2_HIGH


@compiled
def sum_of(values: NDArray[Any]) -> float:
    """The sum in four chains, because one chain of additions would wait for each of them."""
    n = len(values) // 4
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    for i in range(n):
        a += values[4 * i]
        b += values[4 * i + 1]
        c += values[4 * i + 2]
        d += values[4 * i + 3]
    for i in range(4 * n, len(values)):
        a += values[i]
    return (a + b) + (c + d)


@compiled
def _factor(values: NDArray[Any], totals: NDArray[np.float64] | None, row: int, target_sum: float) -> float:
    """The factor that makes the total of a row `target_sum`, or -1 if there is a negative value."""
    if totals is None:
        negative = False
        for i in range(len(values)):
            negative |= values[i] < 0
        total = -1.0 if negative else sum_of(values)
    else:
        total = totals[row]
    return -1.0 if total < 0 else target_sum / total if total != 0 else 0.0


@compiled
def _normalize(values: NDArray[Any], starts: Rows, totals: NDArray[np.float64] | None, target_sum: float) -> int:
    """Scales each row to a total of `target_sum`. Returns a row with a negative value, or -1."""
    for row in range(len(starts) - 1):
        of_row = values[starts[row] : starts[row + 1]]
        factor = _factor(of_row, totals, row, target_sum)
        if factor < 0:
            return row
        for i in range(len(of_row)):
            of_row[i] = of_row[i] * factor
    return -1


@compiled
def _log_normalize(
    values: NDArray[np.float32], starts: Rows, totals: NDArray[np.float64] | None, target_sum: float, unit: Any
) -> int:
    """As `_normalize`, and then the logarithm times `unit`, or the natural logarithm if that is None."""
    for row in range(len(starts) - 1):
        of_row = values[starts[row] : starts[row + 1]]
        factor = _factor(of_row, totals, row, target_sum)
        if factor < 0:
            return row
        if factor > _MOST:  # float32 may not hold it
            for i in range(len(of_row)):
                of_row[i] = of_row[i] * factor
            factor = 1.0
        single = np.float32(factor)
        for i in range(len(of_row)):
            logarithm = _log1p(of_row[i] * single)
            of_row[i] = logarithm if unit is None else logarithm * unit
    return -1


@compiled
def _log(values: NDArray[np.float64], unit: float) -> None:
    for i in range(len(values)):
        values[i] = math.log1p(values[i]) * unit


@dataclass(frozen=True)
class Normalize(Transform):
    """Scales each row to a total of `target_sum`, as scanpy's `normalize_total(target_sum=...)`.

    >>> loader = zl.Loader(dataset, transforms=[zl.transforms.Normalize(1e4)], layout="dense")
    >>> round(float(next(iter(loader)).x[1].sum()))
    10000

    The total is that of all genes of the dataset, also if the loader has `genes`. Rows without counts stay 0. x needs a
    dtype of floats. A negative value raises OptionError in the training loop, because counts have none.
    """

    target_sum: float

    whole_rows = row_totals = needs_floats = True

    def __post_init__(self) -> None:
        number = self.target_sum
        if not is_number(number) or not 0 < number <= _MOST:
            raise OptionError(f"target_sum must be a number above 0 and up to {_MOST:g}, not {number!r:.100}")
        object.__setattr__(self, "target_sum", float(number))

    def apply(self, x: RowValues) -> None:
        """Changes the values in place. Raises RefusedValue for a negative value."""
        self._refuse(x, _normalize(x.values, x.starts, x.totals, self.target_sum))

    def _refuse(self, x: RowValues, row: int) -> None:
        """Raises RefusedValue for a row with a negative value; -1 stands for none."""
        if row >= 0:
            of_row = x.values[x.starts[row] : x.starts[row + 1]]
            negative = of_row[of_row < 0][0] if x.totals is None else x.values.dtype.type(x.totals[row])
            raise RefusedValue(
                row,
                negative,
                f"{type(self).__name__} takes no negative values, because counts have none: these data are normalised "
                "or scaled already. Name the matrix of counts, such as x='raw/X', or load them as they are",
            )


@dataclass(frozen=True)
class LogNormalize(Normalize):
    """log(1 + counts per `target_sum`), as scanpy's `normalize_total(target_sum=...)` followed by `log1p(base=...)`.

    >>> loader = zl.Loader(dataset, transforms=[zl.transforms.LogNormalize(1e4)], layout="dense")
    >>> round(float(next(iter(loader)).x[1].expm1().sum()))
    10000

    `base` is the base of the logarithm; None for the natural one. The rest is as in Normalize.
    """

    base: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base is not None and not (is_number(self.base) and self.base > 1):
            raise OptionError(f"base must be a number above 1, or None for the natural logarithm, not {self.base!r}")

    def apply(self, x: RowValues) -> None:
        unit = None if self.base is None else 1.0 / math.log(self.base)
        if x.values.dtype == np.float32:
            single = None if unit is None else np.float32(unit)
            self._refuse(x, _log_normalize(x.values, x.starts, x.totals, self.target_sum, single))
        else:
            super().apply(x)
            _log(x.values, unit or 1.0)
