"""Which stored values fit into the wanted dtype. A gather checks them as it converts. Pure."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

# The smallest and the largest value that fit, in the stored dtype, and whether the value must be a whole number, which
# rules out fractions, NaN and infinities.
Limits: TypeAlias = tuple[Any, Any, bool]


def limits_of(stored: np.dtype[Any], wanted: np.dtype[Any]) -> Limits | None:
    """The limits within which a stored value fits into `wanted`, or None if all values fit.

    Whole numbers are rounded to the nearest float, and floats to a lower precision, but a finite value must not become
    infinite. Only whole numbers within its range fit into an integer.
    """
    if wanted.kind == "f":
        if stored.kind != "f" or stored.itemsize <= wanted.itemsize:
            return None
        of = np.finfo(wanted)
        # Half a step above the largest value of `wanted` is the smallest value that is rounded to infinity.
        infinite = stored.type(of.max) + stored.type(2.0) ** (of.maxexp - of.nmant - 2)
        most = np.nextafter(infinite, stored.type(0))
        return -most, most, False
    if np.can_cast(stored, wanted, "safe"):
        return None
    to = np.iinfo(wanted)
    if stored.kind == "f":
        most = stored.type(to.max)
        if float(most) > to.max:
            most = np.nextafter(most, stored.type(0))
        return stored.type(to.min), most, True
    of_stored = np.iinfo(stored)
    return stored.type(max(to.min, of_stored.min)), stored.type(min(to.max, of_stored.max)), False
