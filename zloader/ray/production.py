"""One epoch made by a crew of producers: a coroutine that hands out fetches, and puts their minibatches in order."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Coroutine
from typing import Any

import numpy as np
import ray
import ray.exceptions
from numpy.typing import NDArray

from zloader.common.errors import ProducerError
from zloader.order.plan import Remaining
from zloader.ray.producers import LANES, LOST, Crew, Member, cause_of, pickled
from zloader.ray.window import LOOK_AHEAD, MeanBytes, OpenFetch, Window
from zloader.reading.bridge import Put
from zloader.reading.resources import Counters
from zloader.training.epoch import EpochWork

_MOST_LOSSES = 16  # of producers that make the same fetch, without any progress
_GROUPS_AHEAD = 2  # groups of a fetch that a producer makes before the consumer's machine has the earlier ones


class _OvertakenError(Exception):
    """Another producer has completed the fetch."""


class Production:
    """The minibatches of an epoch, in order. `run` is the coroutine of a Bridge."""

    def __init__(
        self, work: EpochWork, crew: Crew, mean: MeanBytes, *, number: int, window: Window, by_mirror: bool
    ) -> None:
        self.counters = Counters()
        self._number = number
        self._plan = ray.put(pickled(work.plan))
        self._crew = crew
        self._mean = mean
        self._window = window
        self._by_mirror = by_mirror
        self._at_work: set[Member] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()

    def resized(self) -> None:
        """Starts or ends producers, as the size of the crew says. Any thread may call this."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the epoch has just ended, and its loop with it
                self._loop.call_soon_threadsafe(self._change)

    def _change(self) -> None:
        """Wakes all coroutines that wait for a change."""
        self._changed.set()
        self._changed.clear()

    async def run(self, put: Put[Any]) -> None:
        """Puts all minibatches. Raises the first error in their order."""
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            others = [group.create_task(self._staff())]
            if self._by_mirror:
                others.append(group.create_task(self._find_homes()))
            await self._put_in_order(put)
            for task in others:
                task.cancel()

    async def _put_in_order(self, put: Put[Any]) -> None:
        window = self._window
        while not window.done:
            fetch = window.head
            if fetch is not None and fetch.groups:
                items, n_bytes = fetch.groups.popleft()
                await put(items, 1)  # waits until the consumer has the group before
                fetch.taken_bytes += n_bytes
                self._change()
            elif fetch is not None and fetch.error is not None:
                raise fetch.error
            elif fetch is not None and fetch.complete:
                window.open.popleft()
                self._change()
            else:
                await self._changed.wait()

    async def _find_homes(self) -> None:
        """Asks one producer of each machine how much of the coming fetches its mirrors hold."""
        asked = -1
        while True:
            coming = [remaining for remaining in self._window.coming(LOOK_AHEAD) if remaining.number > asked]
            machines = {member.machine: member for member in self._at_work}
            if not coming or len(machines) < 2:
                await self._changed.wait()
                continue
            answers = await asyncio.gather(*(self._held(member, coming) for member in machines.values()))
            asked = coming[-1].number
            for remaining, shares in zip(coming, zip(*answers, strict=True), strict=True):
                self._window.set_home(remaining.number, dict(zip(machines, shares, strict=True)))

    async def _held(self, member: Member, coming: list[Remaining]) -> list[float]:
        try:
            shares: list[float] = await member.actor.held.remote(self._number, self._plan, coming)
        except (*LOST, ray.exceptions.RayTaskError):  # which `make` will raise, too
            return [0.0] * len(coming)
        return shares

    async def _staff(self) -> None:
        """Keeps as many producers at work as the crew should have."""
        async with asyncio.TaskGroup() as group:
            posts: list[asyncio.Task[None]] = []
            while True:
                while len(posts) > self._crew.size:
                    posts.pop().cancel()
                posts += [group.create_task(self._post()) for _ in range(self._crew.size - len(posts))]
                await self._changed.wait()

    async def _post(self) -> None:
        """Keeps one producer at work, and replaces it when it is lost."""
        while True:
            member = await self._crew.join(lambda: bool(self._at_work))
            self._at_work.add(member)
            try:
                async with asyncio.TaskGroup() as lanes:
                    for _ in range(LANES):
                        lanes.create_task(self._lane(member))
            finally:
                self._at_work.discard(member)
                self._crew.leave(member)

    async def _lane(self, member: Member) -> None:
        """Lets a producer make one fetch after another, until it is lost."""
        while (fetch := await self._next(member)) is not None:
            try:
                await self._make(member, fetch)
            except (*LOST, _OvertakenError) as error:
                self._crew.drop(member)
                fetch.losses += 1
                if fetch.losses > _MOST_LOSSES:
                    fetch.error = _given_up(fetch, error)
            except ray.exceptions.RayTaskError as error:
                fetch.error = cause_of(error, member)
            finally:
                fetch.makers.discard(member)
                self._change()

    async def _next(self, member: Member) -> OpenFetch | None:
        """The next fetch for a producer, as soon as there is one; None if the producer is lost."""
        while not member.lost:
            now_s = time.monotonic()
            fetch = self._window.next(member, now_s, member.machine)
            if fetch is not None:
                return fetch
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._window.next_change_s(member, now_s)):
                    await self._changed.wait()
        return None

    async def _make(self, member: Member, fetch: OpenFetch) -> None:
        """Lets a producer make what is left of a fetch."""
        at, ended, before = fetch.n_made, False, Counters()
        made = member.actor.make.options(
            num_returns="streaming", _generator_backpressure_num_objects=_GROUPS_AHEAD
        ).remote(self._number, self._plan, fetch.rest())
        try:
            while (group := await self._unless_overtaken(fetch, at, _next_of(made))) is not None:
                items, counted = group
                self._count(counted, before)
                self._mean.add(sum(item.nbytes for item in items), len(items))
                fetch.add(at, [writable(item) for item in items], time.monotonic())
                at, before = at + len(items), counted
                self._change()
            ended = True
            if not fetch.complete:
                raise ProducerError(f"fetch {fetch.number} ended after {fetch.n_made} of {fetch.size} minibatches")
        finally:
            if not ended and not member.lost and ray.is_initialized():
                ray.cancel(made)

    async def _unless_overtaken(self, fetch: OpenFetch, at: int, step: Coroutine[Any, Any, Any]) -> Any:
        """The result of a step. Raises _OvertakenError if others complete the fetch, of which `at` come from here."""
        stepping = asyncio.ensure_future(step)
        try:
            while not stepping.done():
                if fetch.complete and at < fetch.size and fetch.error is None:
                    raise _OvertakenError
                changed = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait({stepping, changed}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
            return stepping.result()
        finally:
            stepping.cancel()

    def _count(self, counted: Counters, before: Counters) -> None:
        """Adds what a producer has counted since `before`."""
        most = max(self.counters.most_in_flight_bytes, counted.most_in_flight_bytes)
        for name, value in vars(counted).items():
            setattr(self.counters, name, getattr(self.counters, name) + value - getattr(before, name))
        self.counters.most_in_flight_bytes = most


async def _next_of(made: Any) -> Any:
    """The next object of a streaming generator; None at its end."""
    try:
        reference = await anext(made)
    except StopAsyncIteration:
        return None
    return await reference


def _given_up(fetch: OpenFetch, error: Exception) -> ProducerError:
    given_up = ProducerError(
        f"{fetch.losses} producers in a row were lost with fetch {fetch.number}, the last one because: {error}. "
        "If they ran out of memory, lower fetch_factor or FetchOptions.memory, or give resources={'memory': ...}"
    )
    given_up.__cause__ = error
    return given_up


class _Writable:
    """The memory of an array that is marked read-only, as the base of a writable one."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array  # keeps the memory
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def writable(value: Any) -> Any:
    """A minibatch whose arrays are writable, as a Loader's are.

    Ray marks the arrays of its objects as read-only, because processes may share them. Nobody else reads an object
    with minibatches. The memory is that of the object, and is freed with the last array or tensor in it.
    """
    if isinstance(value, np.ndarray):
        return value if value.flags.writeable else np.asarray(_Writable(value))
    if isinstance(value, dict):
        return {name: writable(each) for name, each in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {each.name: writable(getattr(value, each.name)) for each in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    return value
