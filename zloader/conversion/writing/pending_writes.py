"""Waits for writes in progress, so that no write continues after a conversion has raised an error.

A thread cannot be stopped, and a request cannot be recalled. So both are waited for before an error is raised, even if
more signals arrive.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from zloader.common.concurrent_calls import fulfil
from zloader.common.errors import StoreError

DEADLINE_S = 120.0  # for writes in progress; one part of an upload (16 MiB) takes this long at 140 kB/s

Result = TypeVar("Result")


def _despite_interrupts(waiting: Callable[[], Result]) -> Result:
    """The result of `waiting`. If a signal interrupts it, it is called again and the interrupt is raised later."""
    interrupt: BaseException | None = None
    while True:
        try:
            result = waiting()
        except BaseException as error:  # noqa: BLE001 - raised below
            interrupt = error
            continue
        if interrupt is not None:
            raise interrupt
        return result


def run_to_completion(write: Callable[[], Result], at: str, *, deadline_s: float = DEADLINE_S) -> Result:
    """The result of `write`, which runs to its end even if a signal interrupts the caller.

    It runs in its own thread, because s3fs leaves its request running when it is interrupted. Raises the errors of
    `write`, and StoreError if it is still running `deadline_s` seconds after an interrupt.
    """
    ended: Future[Result] = Future()
    try:
        threading.Thread(target=fulfil, args=(ended, write), daemon=True, name="zloader-write").start()
        return ended.result()
    except BaseException as error:
        if not _despite_interrupts(lambda: _has_ended(ended, deadline_s)):
            raise _still_writing(at, deadline_s) from error
        raise


def _has_ended(writing: Future[Any], deadline_s: float) -> bool:
    try:
        writing.exception(deadline_s)
    except TimeoutError:
        return False
    return True


class PendingWrites:
    """Tracks the writes in progress in event loops, until `end` is called."""

    def __init__(self, at: str) -> None:
        self._at = at
        self._changed = threading.Condition()
        self._n_running = 0
        self._refusing = False

    async def run(self, write: Coroutine[Any, Any, None]) -> None:
        """Awaits a write. Cancelling the caller does not cancel the write, whose thread or request would run on.

        Raises StoreError after `end`.
        """
        with self._changed:
            if self._refusing:
                write.close()
                raise StoreError(f"writing to {self._at} was interrupted: run it again (convert: with --resume)")
            self._n_running += 1
        writing = asyncio.ensure_future(write)
        writing.add_done_callback(self._count_ended)
        await asyncio.wait([writing])
        writing.result()

    def _count_ended(self, writing: asyncio.Future[None]) -> None:
        if not writing.cancelled():
            writing.exception()  # marks the error as retrieved: the caller may have been cancelled
        with self._changed:
            self._n_running -= 1
            self._changed.notify_all()

    def end(self, *, deadline_s: float = DEADLINE_S) -> None:
        """Refuses further writes and waits for those in progress. Raises StoreError after `deadline_s` seconds."""

        def none_running() -> bool:
            with self._changed:
                self._refusing = True
                return self._changed.wait_for(lambda: not self._n_running, deadline_s)

        if not _despite_interrupts(none_running):
            raise _still_writing(self._at, deadline_s)


def _still_writing(at: str, deadline_s: float) -> StoreError:
    return StoreError(
        f"a write to {at} is still running after {deadline_s:.0f} s: end this process before writing there again"
    )
