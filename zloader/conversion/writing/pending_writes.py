"""How writing ends: once an error has left a conversion, nothing of it is still being written.

A thread cannot be stopped, and a request that was sent cannot be taken back. So both are waited for before an error is
passed on, also while further signals ask to end.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from zloader.common.errors import StoreError
from zloader.reading.bridge import fulfil

ENDING_S = 120.0  # for what is under way to end; a part of an upload (16 MiB) takes this long at 140 kB/s

Result = TypeVar("Result")


def _to_the_end(waiting: Callable[[], Result]) -> Result:
    """The result of `waiting`, which is called again when a signal interrupts it: that is raised afterwards."""
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


def in_full(write: Callable[[], Result], at: str, *, deadline_s: float = ENDING_S) -> Result:
    """The result of `write`, which has ended also when a signal interrupts this.

    It runs on a thread of its own: s3fs, interrupted, leaves a request to go on unseen.
    Raises what `write` raises, and StoreError when it goes on for `deadline_s` after an interrupt.
    """
    ended: Future[Result] = Future()
    try:
        threading.Thread(target=fulfil, args=(ended, write), daemon=True, name="zloader-write").start()
        return ended.result()
    except BaseException as error:
        if not _to_the_end(lambda: _has_ended(ended, deadline_s)):
            raise _still_writing(at, deadline_s) from error
        raise


def _has_ended(writing: Future[Any], deadline_s: float) -> bool:
    try:
        writing.exception(deadline_s)
    except TimeoutError:
        return False
    return True


class Writes:
    """The writes that are under way in event loops, until it is ended."""

    def __init__(self, at: str) -> None:
        self._at = at
        self._changed = threading.Condition()
        self._n_under_way = 0
        self._refusing = False

    async def run(self, write: Coroutine[Any, Any, None]) -> None:
        """Awaits a write, which is not cancelled with this: its thread or request would go on, and not be counted.

        Raises StoreError once writing was ended.
        """
        with self._changed:
            if self._refusing:
                write.close()
                raise StoreError(f"writing to {self._at} was interrupted: run it again (a conversion: with --resume)")
            self._n_under_way += 1
        writing = asyncio.ensure_future(write)
        writing.add_done_callback(self._count_ended)
        await asyncio.wait([writing])
        writing.result()

    def _count_ended(self, writing: asyncio.Future[None]) -> None:
        if not writing.cancelled():
            writing.exception()  # whoever awaited it may be gone
        with self._changed:
            self._n_under_way -= 1
            self._changed.notify_all()

    def end(self, *, deadline_s: float = ENDING_S) -> None:
        """Refuses further writes and waits for those under way. Raises StoreError when that takes too long."""

        def none_under_way() -> bool:
            with self._changed:
                self._refusing = True
                return self._changed.wait_for(lambda: not self._n_under_way, deadline_s)

        if not _to_the_end(none_under_way):
            raise _still_writing(self._at, deadline_s)


def _still_writing(at: str, deadline_s: float) -> StoreError:
    return StoreError(
        f"a write to {at} has not ended within {deadline_s:.0f} s: end this process before you write there again"
    )
