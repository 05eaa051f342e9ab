"""Compiles Python loops to machine code with numba.

numba is imported when the first loop is called, because it takes half a second to a second, and much of zloader runs no
loops. Nor does an epoch of few values: until numba is loaded, NumPy does the work of its loops.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from zloader.common.locks import hold_at_forks

log = logging.getLogger("zloader")

Function = TypeVar("Function", bound=Callable[..., Any])

_loaded = False  # whether numba is


def compiled(function: Function) -> Function:
    """The function as machine code that runs without the GIL. Compiled on the first call and cached on disk.

    It must not assign an array to a slice: numba then compiles for three seconds how the error for another length is
    worded. fastmath stays off: it reorders sums and so changes their last bits, and some row orders depend on those
    sums.
    """
    return cast(Function, _Compiled(function))


def compiled_after(plain: Callable[..., Any]) -> Callable[[Function], Function]:
    """Like `compiled`, but until numba is loaded, calls go to `plain`, which does the same, bit for bit, with NumPy.

    `plain` returns NotImplemented if it is so much slower for its arguments that loading numba pays.
    """

    def decorated(function: Function) -> Function:
        return cast(Function, _Compiled(function, plain))

    return decorated


def compiler_is_loaded() -> bool:
    """Whether zloader has loaded numba in this process."""
    return _loaded


def load_compiler() -> None:
    """Loads numba, which takes half a second the first time. Call it before starting threads that call functions.

    A process that is forked while a thread imports a module can never import that module. Importing numba is not
    enough: its own compiled functions are imported when the first function is called.
    """
    importlib.import_module("numba")
    _call_one()


class _Compiled:
    """A function that is compiled on its first call, by itself or by another compiled function."""

    _dispatcher: Any = None

    def __init__(self, function: Callable[..., Any], plain: Callable[..., Any] | None = None) -> None:
        functools.update_wrapper(self, function)
        self._function, self._plain = function, plain

    def __call__(self, *arguments: Any) -> Any:
        if self._plain is not None and not _loaded:
            made = self._plain(*arguments)
            if made is not NotImplemented:
                return made
        return self._compiled()(*arguments)

    def _compiled(self) -> Any:
        if self._dispatcher is None:  # two threads may both get here; either dispatcher will do
            self._dispatcher = _jit(self._function)
        return self._dispatcher

    @property
    def _numba_type_(self) -> Any:
        """The type of this object in a compiled function that calls it."""
        return self._compiled()._numba_type_


def _jit(function: Callable[..., Any]) -> Any:
    global _loaded
    import numba

    if not _loaded:
        hold_at_forks(numba.core.compiler_lock.global_compiler_lock)  # a process forked meanwhile could never compile
        _loaded = True
    dispatcher: Any = numba.njit(nogil=True)(function)
    try:
        dispatcher._cache = _cache_class()(function)
    except RuntimeError:  # neither the directory of the module nor that of the user can be written
        _say_not_kept()
    return dispatcher


@functools.cache
def _say_not_kept() -> None:
    log.warning("compiled loops cannot be kept on disk: set NUMBA_CACHE_DIR to a directory that can be written")


@functools.cache
def _cache_class() -> Any:
    """numba's cache of compiled functions, in a directory named after the sources of all loops.

    numba compares a kept function with the file of that function alone, although machine code contains the loops of
    other files that it calls. Directories of other sources, such as those of an earlier release, are removed.
    """
    import numba
    from numba.core.caching import CompileResultCacheImpl, FunctionCache

    class OfTheseSources(CompileResultCacheImpl):
        def __init__(self, function: Callable[..., Any]) -> None:
            super().__init__(function)  # type: ignore[no-untyped-call]
            parent = Path(self.locator.get_cache_path())
            key = hashlib.sha256(numba.__version__.encode() + _LOOPS).hexdigest()[:16]
            directory = parent / f"{_DIRECTORY}{key}"
            if not directory.exists():
                for other in parent.glob(f"{_DIRECTORY}*"):
                    shutil.rmtree(other, ignore_errors=True)
            self.locator.get_cache_path = lambda: str(directory)

    return type("LoopCache", (FunctionCache,), {"_impl_class": OfTheseSources})


_DIRECTORY = "zloader-loops-"


def _loops() -> bytes:
    """A digest of all files of zloader that define compiled loops."""
    texts = [path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.py"))]
    return hashlib.sha256(b"".join(text for text in texts if b"\n@compiled" in text)).digest()


_LOOPS = _loops()  # when they are imported: pip may replace the files of a running process before it compiles them


@compiled
def _call_one() -> None:
    pass


class External:
    """A C function, for calls from compiled functions. Types are given by their names in numba.types."""

    def __init__(self, name: str, result: str, *arguments: str) -> None:
        self.name, self._result, self._arguments = name, result, arguments

    def __call__(self, *arguments: Any) -> Any:
        raise TypeError(f"{self.name} can only be called from a compiled function")

    @property
    def _numba_type_(self) -> Any:
        from numba import types

        result, *arguments = (getattr(types, name) for name in (self._result, *self._arguments))
        return types.ExternalFunction(self.name, result(*arguments))


@compiled
def count_bits(word: Any) -> Any:
    """The number of set bits of a uint64, which LLVM compiles to one instruction."""
    word -= (word >> np.uint64(1)) & np.uint64(0x5555555555555555)
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))
