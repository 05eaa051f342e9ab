"""Runs a coroutine on its own thread and hands its items to synchronous code.

The coroutine puts groups of items, and waits once `ready_bytes` of them are queued. A coroutine that makes items in
several threads claims their bytes before it makes them. Closing the bridge cancels the coroutine and joins the thread;
leaving a loop, garbage collection and interpreter exit close it, too. An error in the coroutine is raised in the
consumer, after the items that were put before it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from zloader.common.concurrent_calls import require_main_thread
from zloader.common.errors import ForkError
from zloader.reading.gates import ByteBudget

Item = TypeVar("Item")


class Channel(Generic[Item]):
    """What a producer puts groups of items into, whose bytes are held until the consumer takes them.

    It has the state shared by the two threads, and does not refer to the Bridge, so a dropped Bridge is collected.
    """

    def __init__(self, ready_bytes: int) -> None:
        self.taken: queue.SimpleQueue[tuple[Sequence[Item], int] | BaseException | None] = queue.SimpleQueue()
        self.closed = False
        self._budget = ByteBudget(ready_bytes)
        # Reentrant, because garbage collection may close a dropped Bridge on a thread that already holds its lock.
        self._lock = threading.RLock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, items: Sequence[Item], n_bytes: int) -> None:
        """Puts items, once they fit beside those that wait."""
        await self.claim(n_bytes)
        self.claimed(items, n_bytes, n_bytes)

    async def claim(self, n_bytes: int) -> None:
        """Waits until so many bytes fit, and holds them for items that will be made. Claims are granted in order."""
        await self._budget.acquire(n_bytes)

    def claimed(self, items: Sequence[Item], n_bytes: int, claim: int) -> None:
        """Puts items that take `n_bytes`, for which `claim` bytes are held."""
        self._budget.release(claim - n_bytes)
        self.taken.put((items, n_bytes))

    def give_back(self, n_bytes: int) -> None:
        """Returns bytes to the budget. The consumer's thread calls this when it has taken a group."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._budget.release, n_bytes)

    def cancel(self) -> None:
        """Cancels the producer. Safe on any thread, at any time, and more than once."""
        with self._lock:
            self.closed = True
            if self._loop is not None and self._task is not None:
                self._loop.call_soon_threadsafe(self._task.cancel)

    async def run(self, produce: Producer[Item]) -> None:
        """Runs the producer on its own loop, from start to end."""
        task = asyncio.ensure_future(produce(self))
        with self._lock:
            self._loop, self._task = asyncio.get_running_loop(), task
            if self.closed:
                task.cancel()
        try:
            await task
        finally:
            with self._lock:
                self._loop = None


Producer = Callable[[Channel[Item]], Awaitable[None]]


def _first_cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _thread_main(channel: Channel[Item], produce: Producer[Item]) -> None:
    try:
        asyncio.run(channel.run(produce))
    except asyncio.CancelledError as error:
        channel.taken.put(None if channel.closed else error)
    except BaseException as error:  # noqa: BLE001 - raised again in the consumer's thread
        channel.taken.put(_first_cause(error))
    else:
        channel.taken.put(None)


def _close(
    channel: Channel[Item],
    thread: threading.Thread,
    owner: threading.Thread,
    pid: int,
    source: Bridge[Any] | None,
) -> None:
    if os.getpid() != pid:
        return  # a forked child has a copy of these objects, but not the thread
    if source is not None:
        source.close()  # first, because the producer may be waiting for it
    channel.cancel()
    # Garbage may be collected on any thread, even on one that the loop is waiting for, so joining could deadlock. Only
    # the owner and the main thread join, and with a timeout. A thread that has not started yet ends when it starts.
    if threading.current_thread() in (owner, threading.main_thread()) and thread.is_alive():
        thread.join(timeout=2.0)


class Bridge(Generic[Item], Iterator[Item]):
    """Iterates over the items that the coroutine `produce(put)` puts.

    Any thread may call `next`, but only one at a time. `close` may be called meanwhile, and ends a waiting `next`.
    Any exception in `next`, including KeyboardInterrupt, ends the iteration, as in a generator.
    Raises ForkError in a forked child, because the producer's thread exists only in the parent.

    A producer may iterate over another bridge, its `source`, which is closed with this one.
    """

    def __init__(
        self, produce: Producer[Item], *, ready_bytes: int, name: str, source: Bridge[Any] | None = None
    ) -> None:
        require_main_thread()
        self.wait_s = 0.0
        self._channel: Channel[Item] = Channel(ready_bytes)
        self._ready: deque[Item] = deque()  # it drops each item, which may be large, as it is taken
        self._pid = os.getpid()
        thread = threading.Thread(target=_thread_main, args=(self._channel, produce), name=name, daemon=True)
        # Registered before the thread starts, because an interrupt may arrive during the start.
        self.close: weakref.finalize[Any, Bridge[Any]] = weakref.finalize(
            self, _close, self._channel, thread, threading.current_thread(), self._pid, source
        )
        try:
            thread.start()
        except BaseException:
            self.close()
            raise

    def __next__(self) -> Item:
        while True:
            if self._ready:
                return self._ready.popleft()
            if not self.close.alive:
                raise StopIteration
            try:
                self._take_group()
            except BaseException:  # a kept exception (notebooks keep the last one) would keep this bridge alive
                self.close()
                raise

    def next_group(self) -> list[Item]:
        """The next items that were put together; none at the end."""
        items = [*itertools.islice(self, 1), *self._ready]
        self._ready.clear()
        return items

    def _take_group(self) -> None:
        if os.getpid() != self._pid:
            raise ForkError(
                f"this iteration belongs to process {self._pid}, before the fork: begin a new one in this process"
            )
        before = time.perf_counter()
        try:
            group = self._channel.taken.get()
        finally:
            self.wait_s += time.perf_counter() - before
        if isinstance(group, tuple):
            items, n_bytes = group
            self._channel.give_back(n_bytes)
            self._ready.extend(items)
            return
        self.close()
        if isinstance(group, RuntimeError):
            require_main_thread()
        if group is not None:
            raise group
