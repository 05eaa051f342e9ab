"""Which values of one dtype another one holds: what a gather has to look at before it converts them. Pure."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

# The least and the greatest value, in the stored dtype, and whether fractions, NaN and infinities are beyond them too.
Limits: TypeAlias = tuple[Any, Any, bool]


def limits_of(stored: np.dtype[Any], wanted: np.dtype[Any]) -> Limits | None:
    """The limits between which stored values can become `wanted`; None where all of them can.

    A whole number may become the nearest float, and a float one of lower precision, but no finite one an infinity. Only
    whole numbers that it has become an integer.
    """
    if wanted.kind == "f":
        if stored.kind != "f" or stored.itemsize <= wanted.itemsize:
            return None
        of = np.finfo(wanted)
        # Half a step above the largest of `wanted` is the least that is rounded to infinity.
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
