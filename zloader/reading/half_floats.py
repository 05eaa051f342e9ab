"""float16 and bfloat16, which numba does not compute with: values are gathered in a wider dtype and rounded once. Pure.

NumPy has no bfloat16, so its arrays hold the bits as uint16, the upper half of a float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.compiled import compiled

HALVES = ("float16", "bfloat16")


def gathering_dtype(dtype: str, stored: Iterable[np.dtype[Any]]) -> np.dtype[Any]:
    """The dtype in which to gather values that become `dtype`.

    For half floats it holds the stored values exactly, because rounding a value twice may change its last bit.
    """
    if dtype not in HALVES:
        return np.dtype(dtype)
    exact = all(np.can_cast(each, np.float32, "safe") for each in stored)
    return np.dtype(np.float32 if exact else np.float64)


def value_bytes(dtype: str, stored: Iterable[np.dtype[Any]]) -> int:
    """Bytes per value while a minibatch is gathered."""
    return gathering_dtype(dtype, stored).itemsize + (2 if dtype in HALVES else 0)


def narrowed(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The gathered values in `dtype`, rounded to nearest, ties to even.

    Raises FloatingPointError if a finite value is infinite as float16, as sums of repeated genes may be.
    """
    if dtype not in HALVES:
        return values
    with np.errstate(over="raise"):
        if dtype == "float16":
            return values.astype(np.float16)
        single = values if values.dtype == np.float32 else _rounded_to_odd(values)
    out = np.empty(values.shape, np.uint16)
    _round_to_bfloat16(single.reshape(-1).view(np.uint32), out.reshape(-1))
    return out


def _rounded_to_odd(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """float64 as float32 such that rounding the result again gives the same as rounding `values` at once.

    Inexact values are rounded towards zero, and their last bit is set, which breaks ties in the right direction
    (Boldo and Melquiond 2008, Emulation of FMA and correctly rounded sums).
    """
    single = values.astype(np.float32)
    bits = single.view(np.uint32)
    bits -= np.abs(single) > np.abs(values)
    bits |= single != values  # compares the truncated value
    return single


@compiled
def _round_to_bfloat16(bits: NDArray[np.uint32], out: NDArray[np.uint16]) -> None:
    for i in range(len(bits)):
        word = bits[i]
        if (word & 0x7FFFFFFF) > 0x7F800000:  # NaN, which rounding up could turn into another value
            out[i] = (word >> 16) | 0x40
        else:
            out[i] = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
