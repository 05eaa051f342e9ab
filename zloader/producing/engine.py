"""The process of an engine: a producer that puts minibatches into memory which it shares with the training process.

Started with `python -c`, so that it imports neither the user's script nor torch. Two sockets lead to it. Commands come
as pickles, with the descriptors of memory that holds what is large. Answers, and requests for more of them, are short
records; what answers tell of lies in slots. When the training process ends, in whatever way, the commands end, and so
does this process.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from zloader.common.machine import keep_freed_memory
from zloader.common.options import FetchOptions
from zloader.common.records import MinibatchArrays
from zloader.order.plan import Remaining
from zloader.producing.producer import CarriedError, Groups, Producer, carried
from zloader.producing.shared_memory import Memory, Packed, Slots, value_of
from zloader.reading.recipe import Cutting, Recipe

START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from zloader.producing.engine import main; main()"
_HEAD = struct.Struct("<QQ")  # of a command: the length of its pickle, and how many bytes the memory with it has
_MOST_FDS = 1
MORE = struct.Struct("<q")  # asks for another group of a making
ANSWER = struct.Struct("<qqqq")  # what was asked, and where the value lies: a slot, its first byte, and how many


_AHEAD = 2  # groups of a fetch that are sent before they are asked for
_MOST = 32  # minibatches of a group: to hand one over takes as long as to cut several minibatches
_GROUPS = 4  # of minibatches that fit into the memory for those that are ready: slots fit them well


class Uncut(NamedTuple):
    """Minibatches as they were gathered, and the rows at which they are cut."""

    arrays: MinibatchArrays
    cuts: Sequence[int]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.arrays.nbytes


class Ended(NamedTuple):
    """A value instead of a group: there is no other. With an error, it is the reason."""

    error: CarriedError | None


def send_command(pipe: socket.socket, command: tuple[Any, ...], fd: int | None = None, n_bytes: int = 0) -> None:
    """Sends a command, with the descriptor of memory of `n_bytes`. Raises OSError if the engine is dead."""
    message = pickle.dumps(command)
    head = _HEAD.pack(len(message), n_bytes)
    if fd is None:
        pipe.sendall(head + message)
    else:
        socket.send_fds(pipe, [head], [fd])
        pipe.sendall(message)


class _Making:
    """A fetch that is being made, in a thread of its own, a few groups ahead of those that were asked for."""

    def __init__(self) -> None:
        self.asked = threading.Semaphore(_AHEAD)
        self._groups: Groups | None = None
        self._cancelled = False
        self._lock = threading.Lock()

    def begin(self, groups: Callable[[], Groups]) -> Groups | None:
        with self._lock:
            if self._cancelled:
                return None
            self._groups = groups()
            return self._groups

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._groups is not None:
                self._groups.close()
        self.asked.release()


class Engine:
    """Carries out commands."""

    def __init__(self, commands: socket.socket, answers: socket.socket, slots: Slots) -> None:
        self._commands, self._answers, self._slots = commands, answers, slots
        self._answering = threading.Lock()
        self._makings: dict[int, _Making] = {}
        self._producer: Producer | None = None
        self._plans: dict[int, Any] = {}

    def run(self) -> None:
        """Carries out commands until there are no more."""
        threading.Thread(target=self._read_asked, daemon=True).start()
        while True:
            command, fd, n_bytes = self._next()
            if command is None:
                return
            name, *arguments = command
            getattr(self, f"_{name}")(*arguments, *([] if fd is None else [fd, n_bytes]))

    def _next(self) -> tuple[tuple[Any, ...] | None, int | None, int]:
        try:
            head, fds, _, _ = socket.recv_fds(self._commands, _HEAD.size, _MOST_FDS)
        except ConnectionError:
            return None, None, 0
        head += _received(self._commands, _HEAD.size - len(head)) if head else b""
        if len(head) < _HEAD.size:
            return None, None, 0
        length, n_bytes = _HEAD.unpack(head)
        message = _received(self._commands, length)
        if len(message) < length:
            return None, None, 0
        return pickle.loads(message), (fds[0] if fds else None), n_bytes

    def _open(self, making: int, fd: int, n_bytes: int) -> None:
        try:
            recipes = value_of(fd, n_bytes)
            if recipes.options.tune_malloc:
                keep_freed_memory()
            self._producer = Producer(_InSlots(recipes, self._slots), lambda plan: plan)
        except Exception as error:  # noqa: BLE001 -- raised by the training process
            self._tell(making, Ended(carried(error)))
        else:
            self._tell(making, os.getpid())

    def _plan(self, number: int, fd: int, n_bytes: int) -> None:
        self._plans = {number: value_of(fd, n_bytes)}  # of the epoch before, nothing is made any more

    def _make(self, number: int, epoch: int, remaining: Remaining, ready_bytes: int) -> None:
        making = self._makings[number] = _Making()
        arguments = (number, making, epoch, self._plans[epoch], remaining, ready_bytes)
        threading.Thread(target=self._made, args=arguments, name="zloader-engine", daemon=True).start()

    def _made(
        self, number: int, making: _Making, epoch: int, plan: Any, remaining: Remaining, ready_bytes: int
    ) -> None:
        assert self._producer is not None
        producer, error = self._producer, None
        try:
            groups = making.begin(lambda: producer.groups(epoch, plan, remaining, ready_bytes))
            for items, counted in groups or ():
                making.asked.acquire()
                if making.cancelled:
                    return
                self._tell(number, (items, counted))
            making.asked.acquire()
        except CarriedError as failure:
            error = failure
        except Exception as failure:  # noqa: BLE001 -- raised by the training process
            error = carried(failure)
        finally:
            making.cancel()
            self._makings.pop(number, None)
        self._tell(number, Ended(error))

    def _read_asked(self) -> None:
        """Lets makings go on, as they are asked for more groups. Not by commands, which take longer."""
        while len(number := _received(self._answers, MORE.size)) == MORE.size:
            making = self._makings.get(*MORE.unpack(number))
            if making is not None:
                making.asked.release()

    def _cancel(self, number: int) -> None:
        making = self._makings.pop(number, None)
        if making is not None:
            making.cancel()

    def _rest(self) -> None:
        """The epoch has ended. Slots for as many bytes stay as wait in an epoch, here and in the training process."""
        if self._producer is not None:
            self._slots.forget_free(2 * self._producer.ready_bytes)

    def _tell(self, making: int, value: Any) -> None:
        """Puts a value into a slot, and says so."""
        try:
            place = self._slots.put(Packed(value, self._slots))
        except Exception as error:  # noqa: BLE001 -- what the user's function has returned, or there is no memory
            place = self._slots.put(Packed(Ended(carried(error))))
        with self._answering, contextlib.suppress(ConnectionError):  # the commands end, too
            self._answers.sendall(ANSWER.pack(making, *place))


@dataclass(frozen=True)
class _InSlots:
    """The recipes of a loader, with x gathered straight into slots, unless a function of the user's gets it."""

    recipes: Any
    slots: Slots

    @property
    def options(self) -> FetchOptions:
        """Memory and threads of this engine."""
        options: FetchOptions = self.recipes.options
        return options

    def recipe(self, epoch: int) -> Recipe:
        """How the minibatches of an epoch are made: a group is sent before it is cut."""
        recipe: Recipe = self.recipes.recipe(epoch)
        if recipe.cutting != Cutting():
            return recipe
        recipe = self.recipes.recipe(epoch, self.slots)
        cutting = Cutting(cut=lambda together, cuts: [Uncut(together, cuts)], most=_MOST, groups=_GROUPS)
        return replace(recipe, cutting=cutting)


def _received(pipe: socket.socket, n_bytes: int) -> bytes:
    """So many bytes, or fewer at the end."""
    parts = []
    with contextlib.suppress(ConnectionError):  # the other end was closed with answers that it had not read
        while n_bytes and (part := pipe.recv(n_bytes)):
            parts.append(part)
            n_bytes -= len(part)
    return b"".join(parts)


def main() -> None:
    """Runs an engine between the sockets of these numbers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training process, which ends this one
    commands, answers = (socket.socket(fileno=int(number)) for number in sys.argv[2:4])
    memory = Memory(int(sys.argv[4]), int(sys.argv[5]))
    try:
        Engine(commands, answers, Slots(memory)).run()
    finally:
        sys.stdout.flush()
        os._exit(0)  # threads may be reading
