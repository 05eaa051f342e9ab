"""Engines: producers in processes of this machine, as the training process sees them.

`Engines` is a crew of them (window.py says what a crew does). A member belongs to one epoch at a time, whose event loop
reads its answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from zloader.common.errors import ProducerError
from zloader.common.records import MinibatchArrays
from zloader.order.plan import Plan, Remaining
from zloader.producing.engine import ANSWER, MORE, START, Ended, Uncut, send_command
from zloader.producing.producer import Recipes, received
from zloader.producing.shared_memory import Memory, range_for_slots, read
from zloader.producing.window import FailedError, LostError
from zloader.reading.resources import Counters

_MOST_READ = 1 << 14  # bytes of answers at a time
_OPENING = 0  # the making that answers `open`
_MOST_FAILED_STARTS = 3  # in a row


Cut = Callable[[MinibatchArrays, Sequence[int]], Sequence[Any]]


class EpochPlan:
    """The plan of an epoch in shared memory, and the number of the epoch among those that these engines make.

    `cut` makes the minibatches of a group of arrays.
    """

    def __init__(self, number: int, plan: Plan, cut: Cut) -> None:
        self.number, self.cut = number, cut
        self.memory = Memory.of_value(plan)


class Member:
    """An engine."""

    machine = ""  # all are on this one

    def __init__(self, recipes: Memory) -> None:
        self.lost = False
        self.pid = 0
        self._commands, commands = socket.socketpair()
        self._answers, answers = socket.socketpair()
        self._memory = range_for_slots()
        with commands, answers:
            fds = [commands.fileno(), answers.fileno(), self._memory.fd]
            self._process = subprocess.Popen(
                [sys.executable, "-c", START, json.dumps(sys.path), *map(str, [*fds, self._memory.n_bytes])],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
            )
        self.end = weakref.finalize(self, _end, os.getpid(), self._process, self._commands, self._answers)
        self._answers.setblocking(False)
        self._unread = b""  # the beginning of an answer
        self._memory.close()
        self._makings: dict[int, asyncio.Queue[Any]] = {}
        self._numbers = itertools.count(_OPENING + 1)
        self._knows = -1  # the number of the plan that it has
        self._loop: asyncio.AbstractEventLoop | None = None
        self._gone = asyncio.Event()
        self._sending = threading.Lock()
        self._send(("open", _OPENING), recipes)

    def attach(self) -> None:
        """Lets the running event loop read the answers."""
        self._loop, self._gone = asyncio.get_running_loop(), asyncio.Event()
        for making in list(self._makings):
            self._forget(making)
        self._loop.add_reader(self._answers, self._read)
        self._loop.add_reader(self._commands, self._lose)  # an engine sends nothing there

    def detach(self) -> None:
        """Ends what `attach` began."""
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            with contextlib.suppress(OSError, ValueError):
                loop.remove_reader(self._answers)
                loop.remove_reader(self._commands)

    async def opened(self) -> None:
        """Returns when the engine has opened the stores. Raises the error that it met, and LostError."""
        if not self.pid:
            try:
                self.pid = await self._answer(_OPENING)
            except FailedError as failure:
                raise failure.__cause__ or failure from None

    def make(self, plan: EpochPlan, remaining: Remaining, ready_bytes: int) -> Making:
        """Begins what remains of a fetch."""
        number = self._asked(plan)
        self._send(("make", number, plan.number, remaining, ready_bytes))
        return Making(self, number, plan.cut)

    async def held(self, plan: EpochPlan, coming: Sequence[Remaining]) -> list[float]:
        """As much as any other engine: all read the same mirrors."""
        return [1.0] * len(coming)

    async def ended(self) -> None:
        """Returns when the engine is dead."""
        await self._gone.wait()

    def rest(self) -> None:
        """Gives memory back that was for an epoch."""
        with contextlib.suppress(LostError):
            self._send(("rest",))

    def more(self, making: int) -> None:
        """Asks for another group."""
        with contextlib.suppress(OSError):  # `_read` will find that it is dead
            self._answers.send(MORE.pack(making))

    def cancel(self, making: int) -> None:
        """Ends a making, whose further answers are dropped."""
        self._forget(making)
        with contextlib.suppress(LostError):
            self._send(("cancel", making))

    def _forget(self, making: int) -> None:
        """Drops the answers to a making, those that have come and those that may come."""
        answers = self._makings.pop(making, None)
        while answers is not None and not answers.empty():
            place = answers.get_nowait()
            if place is not None:
                read(self._memory, *place)  # and drops it

    async def next(self, making: int) -> Any:
        """The next answer to a making. Raises LostError or FailedError."""
        answers = self._makings.setdefault(making, asyncio.Queue())
        place = await answers.get()
        if place is None:
            answers.put_nowait(None)  # for all who ask
            raise LostError(f"engine {self.pid} has ended")
        value = read(self._memory, *place)
        if isinstance(value, Ended) and value.error is not None:
            raise FailedError from value.error.opened(self.where)
        return value

    @property
    def where(self) -> str:
        """The words that name it in errors."""
        return f", engine process {self.pid}" if self.pid else ""

    async def _answer(self, making: int) -> Any:
        try:
            return await self.next(making)
        finally:
            self._forget(making)

    def _asked(self, plan: EpochPlan) -> int:
        """The number of a new making, of a plan that the engine has."""
        if self._knows != plan.number:
            self._send(("plan", plan.number), plan.memory)
            self._knows = plan.number
        number = next(self._numbers)
        self._makings[number] = asyncio.Queue()
        return number

    def _send(self, command: tuple[Any, ...], memory: Memory | None = None) -> None:
        try:
            with self._sending:
                if memory is None:
                    send_command(self._commands, command)
                else:
                    send_command(self._commands, command, memory.fd, memory.n_bytes)
        except OSError as error:
            raise LostError(f"engine {self.pid} has ended: {error}") from error

    def _read(self) -> None:
        """Hands over the answers that have come."""
        while True:
            try:
                records = self._answers.recv(_MOST_READ)
            except BlockingIOError:
                return
            except OSError:
                records = b""
            if not records:
                self._lose()
                return
            records = self._unread + records
            whole = len(records) // ANSWER.size * ANSWER.size
            self._unread = records[whole:]
            for making, *place in ANSWER.iter_unpack(records[:whole]):
                answers = self._makings.get(making)
                if answers is None and making != _OPENING:
                    read(self._memory, *place)  # of a making that was cancelled, and drops it
                else:
                    self._makings.setdefault(making, asyncio.Queue()).put_nowait(place)

    def _lose(self) -> None:
        """The engine has ended. What it has told before counts."""
        if self._loop is None:
            return
        self.detach()
        self._read()
        self._gone.set()
        for answers in self._makings.values():
            answers.put_nowait(None)


class Making:
    """A fetch that an engine makes, group by group."""

    def __init__(self, member: Member, number: int, cut: Cut) -> None:
        self._member, self._number, self._cut = member, number, cut
        self._done = False

    async def next(self) -> tuple[Sequence[Any], Counters] | None:
        """The next group; None at the end."""
        value = await self._member.next(self._number)
        if isinstance(value, Ended):
            self._done = True
            return None
        self._member.more(self._number)
        items, counted = value
        if isinstance(items[0], Uncut):
            return self._cut(*items[0]), counted
        return [received(item, self._member.where) for item in items], counted

    def cancel(self) -> None:
        """Ends the making, if it has not ended."""
        if not self._done:
            self._done = True
            self._member.cancel(self._number)


class Engines:
    """A crew of up to `size` engines, which are kept from epoch to epoch. Thread-safe."""

    def __init__(self, recipes: Recipes, size: int, *, start_s: float) -> None:
        self.size, self._start_s = size, start_s
        self._recipes = Memory.of_value(recipes)  # raises what pickling raises
        self._members: set[Member] = set()
        self._free: list[Member] = []
        self._plans: Iterator[int] = itertools.count()
        self._failed_starts = 0
        self._lock = threading.Lock()
        self._pid = os.getpid()

    @property
    def here(self) -> bool:
        """Whether this process has made them, and not one that it was forked from."""
        return os.getpid() == self._pid

    def share(self, plan: Plan, cut: Cut) -> EpochPlan:
        """Puts the plan of an epoch where engines find it."""
        return EpochPlan(next(self._plans), plan, cut)

    async def watch(self) -> None:
        """Waits: engines that die are replaced."""
        await asyncio.Event().wait()

    async def join(self, others_work: Callable[[], bool]) -> Member:
        """An engine that is ready to work. Raises ProducerError if none starts, and any error in opening the stores."""
        while True:
            with self._lock:
                member = self._free.pop() if self._free else None
            if member is None:
                member = Member(self._recipes)
                with self._lock:
                    self._members.add(member)
            member.attach()
            try:
                async with asyncio.timeout(self._start_s):
                    await member.opened()
            except (LostError, TimeoutError) as error:
                self.drop(member)
                self._failed_starts += 1
                if self._failed_starts >= _MOST_FAILED_STARTS:
                    raise ProducerError(
                        f"engines cannot start ({error}): what they printed says why. processes=0 works without them"
                    ) from error
            except BaseException:
                self.drop(member)
                raise
            else:
                self._failed_starts = 0
                return member

    def leave(self, member: Member) -> None:
        """Keeps an engine for the next epoch."""
        if member.lost:
            return
        member.detach()
        member.rest()
        with self._lock:
            kept = len(self._members) <= self.size  # epochs that ran at the same time had engines of their own
            if kept:
                self._free.append(member)
        if not kept:
            self.drop(member)

    def drop(self, member: Member) -> None:
        """Ends an engine."""
        member.lost = True
        member.detach()
        member.end()
        with self._lock:
            self._members.discard(member)

    def close(self) -> None:
        """Ends all engines."""
        for member in list(self._members):
            self.drop(member)


def _end(pid: int, process: subprocess.Popen[bytes], *sockets: socket.socket) -> None:
    for each in sockets:
        each.close()
    if os.getpid() == pid:  # a forked child has copies of these objects
        process.kill()
        process.wait()
