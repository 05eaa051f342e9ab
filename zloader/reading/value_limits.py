"""Which stored values fit into the wanted dtype. A gather checks them as it converts. Pure."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zloader.common.compiled import compiled

# The smallest and the largest value that fit, in the stored dtype, and whether the value must be a whole number, which
# rules out fractions, NaN and infinities.
Limits: TypeAlias = tuple[Any, Any, bool]


_BFLOAT16 = SimpleNamespace(max=(2 - 2**-7) * 2.0**127, maxexp=128, nmant=7)  # as in np.finfo


@functools.cache
def limits_of(stored: np.dtype[Any], wanted: str) -> Limits | None:
    """The limits within which a stored value fits into the dtype `wanted`, or None if all values fit.

    Whole numbers are rounded to the nearest float, and floats to a lower precision, but a finite value must not become
    infinite. Only whole numbers within its range fit into an integer.
    """
    if wanted == "bfloat16":
        return _limits_of_float(stored, _BFLOAT16)
    if np.dtype(wanted).kind == "f":
        return _limits_of_float(stored, np.finfo(wanted))
    if np.can_cast(stored, wanted, "safe"):
        return None
    to = np.iinfo(np.dtype(wanted))
    if stored.kind == "f":
        most = stored.type(to.max)
        if float(most) > to.max:
            most = np.nextafter(most, stored.type(0))
        return stored.type(to.min), most, True
    of_stored = np.iinfo(stored)
    return stored.type(max(to.min, of_stored.min)), stored.type(min(to.max, of_stored.max)), False


def _limits_of_float(stored: np.dtype[Any], of: Any) -> Limits | None:
    # Half a step above the largest value is the smallest value that is rounded to infinity.
    infinite = float(of.max) + 2.0 ** (of.maxexp - of.nmant - 2)
    if stored.kind == "b" or float((np.finfo if stored.kind == "f" else np.iinfo)(stored).max) < infinite:
        return None
    if stored.kind == "f":
        most = np.nextafter(stored.type(infinite), stored.type(0))
        return -most, most, False
    most = int(infinite) - 1
    return stored.type(max(np.iinfo(stored).min, -most)), stored.type(most), False


@compiled
def fits(value: Any, limits: Limits | None) -> Any:
    """Whether a value is within limits. If `limits` is None, this compiles to nothing."""
    if limits is None:
        return True
    least, most, whole = limits
    within = (value >= least) & (value <= most)
    if whole:
        return within & (np.floor(value) == value)
    return within | (value - value != 0)  # NaN and infinities stay as they are


@compiled
def all_fit(values: NDArray[Any], limits: Limits | None) -> bool:
    """Whether all values are within limits."""
    fit = True
    for i in range(len(values)):
        fit &= fits(values[i], limits)
    return fit
