"""How Python loops become machine code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """The same function as machine code that runs without the GIL; compiled at its first call and kept on disk.

    Never with fastmath: sums in another order would be other sums, and orders of rows hang on some of them.
    """
    return cast(Function, numba.njit(nogil=True, cache=True)(function))
