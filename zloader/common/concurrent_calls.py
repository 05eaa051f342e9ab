"""Calls functions in other threads: for several items at once, or aside from an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from zloader.common.errors import ZloaderError

Item = TypeVar("Item")
Result = TypeVar("Result")


def concurrently(function: Callable[[Item], Result], items: Sequence[Item], *, most: int = 16) -> list[Result]:
    """The results of `function` for each item, in order. Several run in `most` threads, which wait for a server."""
    if len(items) == 1:
        return [function(items[0])]
    with ThreadPoolExecutor(most, thread_name_prefix="zloader-open") as threads:
        return list(threads.map(function, items))


def require_main_thread() -> None:
    """Raises ZloaderError once the main thread has ended, because Python then starts no more work in threads."""
    if not threading.main_thread().is_alive():
        raise ZloaderError(
            "the main thread has ended, and Python then starts no more work in threads: let the main thread wait for "
            "this one with join()"
        )


def fulfil(future: Future[Result], function: Callable[..., Result], *args: Any) -> None:
    """Runs a function and sets the future to its result or exception."""
    try:
        future.set_result(function(*args))
    except BaseException as error:  # noqa: BLE001 - raised again by future.result()
        future.set_exception(error)


async def aside(function: Callable[..., Result], *args: Any) -> Result:
    """Runs a function in a daemon thread. Once this is cancelled, nothing waits for the thread, not even the loop."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()
    threading.Thread(target=fulfil, args=(future, function, *args), daemon=True, name="zloader-aside").start()
    return await asyncio.wrap_future(future)
