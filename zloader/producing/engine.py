"""The process of an engine: a producer that puts minibatches into memory which it shares with the training process.

Started with `python -c`, so that it imports neither the user's script nor torch. Two sockets lead to it. Commands come
as pickles, with the descriptors of memory that holds what is large. Answers are short records; what they tell of lies
in slots. When the training process ends, in whatever way, the commands end, and so does this process.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from zloader.common.machine import keep_freed_memory
from zloader.order.plan import Remaining
from zloader.producing.producer import CarriedError, Groups, Producer, carried
from zloader.producing.shared_memory import Packed, Slots, value_of

START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from zloader.producing.engine import main; main()"
_HEAD = struct.Struct("<QQ")  # of a command: the length of its pickle, and how many bytes the memory with it has
_MOST_FDS = 1
ANSWER = struct.Struct("<qqq")


class Answer(NamedTuple):
    """What an engine tells of making `making`: a value lies in a `slot` of so many bytes, 0 if it is known already."""

    making: int
    slot: int
    slot_bytes: int


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
        self.asked = threading.Semaphore(0)
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

    def __init__(self, commands: socket.socket, answers: socket.socket) -> None:
        self._commands, self._answers = commands, answers
        self._slots, self._told = Slots(), set[int]()
        self._telling = threading.Lock()
        self._makings: dict[int, _Making] = {}
        self._producer: Producer | None = None
        self._plans: dict[int, Any] = {}

    def run(self) -> None:
        """Carries out commands until there are no more."""
        while True:
            command, fd, n_bytes = self._next()
            if command is None:
                return
            name, *arguments = command
            getattr(self, f"_{name}")(*arguments, *([] if fd is None else [fd, n_bytes]))

    def _next(self) -> tuple[tuple[Any, ...] | None, int | None, int]:
        head, fds, _, _ = socket.recv_fds(self._commands, _HEAD.size, _MOST_FDS)
        head += self._received(_HEAD.size - len(head)) if head else b""
        if len(head) < _HEAD.size:
            return None, None, 0
        length, n_bytes = _HEAD.unpack(head)
        message = self._received(length)
        if len(message) < length:
            return None, None, 0
        return pickle.loads(message), (fds[0] if fds else None), n_bytes

    def _received(self, n_bytes: int) -> bytes:
        parts = []
        while n_bytes and (part := self._commands.recv(n_bytes)):
            parts.append(part)
            n_bytes -= len(part)
        return b"".join(parts)

    def _open(self, making: int, fd: int, n_bytes: int) -> None:
        try:
            recipes = value_of(fd, n_bytes)
            if recipes.options.tune_malloc:
                keep_freed_memory()
            self._producer = Producer(recipes, lambda plan: plan)
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

    def _more(self, number: int) -> None:
        making = self._makings.get(number)
        if making is not None:
            making.asked.release()

    def _cancel(self, number: int) -> None:
        making = self._makings.pop(number, None)
        if making is not None:
            making.cancel()

    def _held(self, number: int, epoch: int, coming: list[Remaining]) -> None:
        producer, plan = self._producer, self._plans[epoch]
        assert producer is not None

        def answer() -> None:
            try:
                self._tell(number, producer.held(epoch, plan, coming))
            except CarriedError as error:
                self._tell(number, Ended(error))

        threading.Thread(target=answer, daemon=True).start()

    def _rest(self) -> None:
        """The epoch has ended."""
        with self._telling:
            self._slots.forget_free()

    def _tell(self, making: int, value: Any) -> None:
        """Puts a value into a slot, and says so."""
        try:
            packed = Packed(value)
        except Exception as error:  # noqa: BLE001 -- of what the user's function has returned
            packed = Packed(Ended(carried(error)))
        with self._telling:
            try:
                number, slot = self._slots.take(packed)
            except Exception as error:  # noqa: BLE001 -- there is no memory
                packed = Packed(Ended(carried(error)))
                number, slot = self._slots.take(packed)
            known = number in self._told
            self._told.add(number)
            record = ANSWER.pack(making, number, 0 if known else slot.n_bytes)
            if known:
                self._answers.send(record)
            else:
                socket.send_fds(self._answers, [record], [slot.fd])
                slot.close()


def main() -> None:
    """Runs an engine between the sockets of these numbers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training process, which ends this one
    commands, answers = (socket.socket(fileno=int(number)) for number in sys.argv[2:4])
    try:
        Engine(commands, answers).run()
    finally:
        sys.stdout.flush()
        os._exit(0)  # threads may be reading
