"""Runs a coroutine on a thread of its own and hands what it makes to synchronous code.

The producer puts groups of items; it is held back once `ready_bytes` of them wait to be taken. Closing (also by leaving
a loop, garbage collection or interpreter exit) cancels the coroutine and joins the thread. An error in the coroutine is
raised where the items are taken, after those made before it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import heapq
import itertools
import os
import queue
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from zloader.common.errors import ForkError

Item = TypeVar("Item")
Result = TypeVar("Result")


class ByteBudget:
    """A bound on bytes held, for coroutines of one loop: the smallest `turn` first, and in a turn first come.

    One request larger than the whole bound waits until nothing else is held, and then goes ahead.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._held = 0
        self._arrivals = itertools.count()
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []  # a heap: turn, arrival, bytes, go-ahead

    def _fits(self, n_bytes: int) -> bool:
        return self._held == 0 or self._held + n_bytes <= self._limit

    async def acquire(self, n_bytes: int, turn: int = 0) -> None:
        """Waits until `n_bytes` more may be held, and holds them."""
        if not self._waiting and self._fits(n_bytes):
            self._held += n_bytes
            return
        go: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (turn, next(self._arrivals), n_bytes, go))
        try:
            await go
        except asyncio.CancelledError:
            granted = go.done() and not go.cancelled()  # in the same moment
            go.cancel()
            self.release(n_bytes if granted else 0)  # also lets those go ahead who stood behind
            raise

    def release(self, n_bytes: int) -> None:
        """Gives bytes back."""
        self._held -= n_bytes
        while self._waiting and (self._waiting[0][3].cancelled() or self._fits(self._waiting[0][2])):
            _, _, granted, go = heapq.heappop(self._waiting)
            if not go.cancelled():
                self._held += granted
                go.set_result(None)


def fulfil(future: concurrent.futures.Future[Result], function: Callable[..., Result], *args: Any) -> None:
    """Runs a function and gives a future its result, or the exception that it raises."""
    try:
        future.set_result(function(*args))
    except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
        future.set_exception(error)


async def aside(function: Callable[..., Result], *args: Any) -> Result:
    """Runs a function in a thread that nobody waits for any more, the loop included, once this is cancelled."""
    future: concurrent.futures.Future[Result] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()
    threading.Thread(target=fulfil, args=(future, function, *args), daemon=True, name="zloader-aside").start()
    return await asyncio.wrap_future(future)


class _Channel(Generic[Item]):
    """What the two threads share; knows nothing of the Bridge, so that a dropped Bridge can be collected."""

    def __init__(self, ready_bytes: int) -> None:
        self.ready_bytes = ready_bytes
        self.taken: queue.SimpleQueue[tuple[Sequence[Item], int] | BaseException | None] = queue.SimpleQueue()
        # Reentrant, since garbage is collected at any moment: also a dropped Bridge by a thread that holds its lock.
        self.lock = threading.RLock()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.task: asyncio.Task[None] | None = None
        self.budget: ByteBudget | None = None
        self.closed = False

    def give_back(self, n_bytes: int) -> None:
        """Called by the consumer's thread when it has taken a group."""
        with self.lock:
            if self.loop is not None and self.budget is not None:
                self.loop.call_soon_threadsafe(self.budget.release, n_bytes)

    def cancel(self) -> None:
        """Called by the consumer's thread; safe at any time, more than once."""
        with self.lock:
            self.closed = True
            if self.loop is not None and self.task is not None:
                self.loop.call_soon_threadsafe(self.task.cancel)

    async def run(self, produce: Producer[Item]) -> None:
        """The life of the producer's loop."""
        budget = ByteBudget(self.ready_bytes)

        async def put(items: Sequence[Item], n_bytes: int) -> None:
            await budget.acquire(n_bytes)
            self.taken.put((items, n_bytes))

        task = asyncio.ensure_future(produce(put))
        with self.lock:
            self.loop, self.task, self.budget = asyncio.get_running_loop(), task, budget
            if self.closed:
                task.cancel()
        try:
            await task
        finally:
            with self.lock:
                self.loop = None


Put = Callable[[Sequence[Item], int], Awaitable[None]]
Producer = Callable[[Put[Item]], Awaitable[None]]


def _first_cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _thread_main(channel: _Channel[Item], produce: Producer[Item]) -> None:
    try:
        asyncio.run(channel.run(produce))
    except asyncio.CancelledError as error:
        channel.taken.put(None if channel.closed else error)
    except BaseException as error:  # noqa: BLE001 - raised again in the consumer's thread
        channel.taken.put(_first_cause(error))
    else:
        channel.taken.put(None)


def _close(channel: _Channel[Item], thread: threading.Thread, owner: threading.Thread, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child has a copy of all this, but not the thread
    channel.cancel()
    # Garbage may be collected on any thread, also on one that the loop is waiting for: only those wait here that it
    # is not likely to be waiting for, and not for ever. A thread that has not begun yet will end when it does.
    if threading.current_thread() in (owner, threading.main_thread()) and thread.is_alive():
        thread.join(timeout=2.0)


class Bridge(Generic[Item], Iterator[Item]):
    """Iterates over the items that the coroutine `produce(put)` puts, on the thread that calls `next`.

    Any thread may call it, but only one at a time; `close` may be called meanwhile, and ends that call.
    An exception in `next`, KeyboardInterrupt included, ends the iteration, as it ends a generator.
    Raises ForkError in a forked child, where nothing would ever come.
    """

    def __init__(self, produce: Producer[Item], *, ready_bytes: int, name: str) -> None:
        self.wait_s = 0.0
        self._channel: _Channel[Item] = _Channel(ready_bytes)
        self._ready: Iterator[Item] = iter(())
        self._pid = os.getpid()
        thread = threading.Thread(target=_thread_main, args=(self._channel, produce), name=name, daemon=True)
        # Before the thread starts, since an interrupt may come while it does.
        self.close = weakref.finalize(self, _close, self._channel, thread, threading.current_thread(), self._pid)
        try:
            thread.start()
        except BaseException:
            self.close()
            raise

    def __next__(self) -> Item:
        while True:
            for item in self._ready:
                return item
            if not self.close.alive:
                raise StopIteration
            try:
                self._take_group()
            except BaseException:  # whoever keeps it, as notebooks keep the last one, keeps this object alive
                self.close()
                raise

    def _take_group(self) -> None:
        if os.getpid() != self._pid:
            raise ForkError(
                f"process {self._pid} began this iteration before the fork: begin a new one in this process"
            )
        before = time.perf_counter()
        try:
            group = self._channel.taken.get()
        finally:
            self.wait_s += time.perf_counter() - before
        if isinstance(group, tuple):
            items, n_bytes = group
            self._channel.give_back(n_bytes)
            self._ready = iter(items)
            return
        self.close()
        if group is not None:
            raise group
