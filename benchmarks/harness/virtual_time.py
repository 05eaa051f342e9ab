"""Coroutines in virtual time: when all of them sleep, the clock jumps to the next one that is due."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Jumping(selectors.SelectSelector):
    """Never waits for a file. The time that it should have waited is added to `now_s`."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("all coroutines wait for each other, and none for the clock")
        self.now_s += max(0.0, timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time()` is virtual, and begins at 0. It has no files, no threads and no processes."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._jumping.now_s


def run_in_virtual_time(coroutine: Coroutine[Any, Any, Result]) -> tuple[Result, float]:
    """The result of a coroutine, and the virtual seconds that it took.

    Raises RuntimeError if it can never end, because everything waits for something else.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        loop = runner.get_loop()
        return runner.run(coroutine), loop.time()
