"""Compiles Python loops to machine code with numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """The function as machine code that runs without the GIL. Compiled on the first call and cached on disk.

    fastmath stays off: it reorders sums and so changes their last bits, and some row orders depend on those sums.
    """
    return cast(Function, numba.njit(nogil=True, cache=True)(function))
