"""Calls functions in a Python process of its own, because a library there may crash or hang its process.

A child imports the module of a function at the first call, and answers one call after the other. Calls are pickles of
their parent. Answers are bytes and never unpickled, because a hostile file may have taken over the child.

The cost is a start of Python with the imports of the module, and two copies of each answer by the kernel. Within
`children_kept`, a process that has answered well serves the next call, which saves most starts.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

from zloader.common.machine import available_cores

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from zloader.common.child import main; main()"
_TAIL_BYTES = 2000  # of what the child printed
_LENGTH_BYTES = 8  # of the length of a message, which precedes it


class ChildError(Exception):
    """The base of what a call raises: an exception of the child has a type of the same name, derived from this one."""


class ChildCrashedError(ChildError):
    """The child ended during the call. The message says by which signal."""


def call_in_child(target: str, *arguments: Any, deadline_s: float) -> bytes:
    """The bytes that the function `target` (`module:name`) returns in a child.

    The call must be repeatable: if a process ends that has served before, an earlier call may be the cause. Raises
    ChildError, or TimeoutError if nothing comes for longer than `deadline_s`.
    """
    children, request = _children, pickle.dumps((target, arguments))
    while True:
        child = children.take()
        try:
            return child.answer(request, deadline_s)
        except EOFError as error:
            if not child.has_served:
                raise ChildCrashedError(f"the process that reads it ended with {child.crash()}") from error
        finally:
            children.give_back(child)


class _Child:
    """A process, the pipe to it, and what it has printed.

    It `is_sound` if its last call went well: who knows what an exception, a crash or an interrupt has left behind.
    """

    def __init__(self) -> None:
        self._pipe, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        self.is_sound = self.has_served = False
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(sys.path), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
            )

    def answer(self, request: bytes, deadline_s: float) -> bytes:
        """The answer to a call. Raises ChildError or TimeoutError, and EOFError if the process has ended."""
        self.is_sound = False
        self._pipe.settimeout(deadline_s)
        try:
            _send(self._pipe, request)
            failure, answer = json.loads(_received(self._pipe)), _received(self._pipe)
        except (ConnectionError, ValueError) as error:  # ValueError: no answer of ours
            raise EOFError from error
        if failure is not None:
            raise type(failure[0], (ChildError,), {})(failure[1])
        self.is_sound = self.has_served = True
        return answer

    def crash(self) -> str:
        """How the process ended, with the last line that it printed."""
        self.process.kill()  # does nothing if it has ended
        status = self.process.wait()
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - _TAIL_BYTES))
        said = self._log.read().decode(errors="replace").strip().rpartition("\n")[2]
        ended = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return f"{ended} ({said})" if said else ended

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._pipe.close()
        self._log.close()


class _Children:
    """The children. While somebody keeps them, they are few, and those without a call wait for the next.

    `changed` guards the rest. Whoever waits for it, waits for a child to be given back.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.n_keepers = self.n_taken = 0
        self.idle: list[_Child] = []

    def take(self) -> _Child:
        """A child, which the caller gives back."""
        with self.changed:
            self.changed.wait_for(lambda: not self.n_keepers or self.n_taken < _most_kept())
            self.n_taken += 1
            if self.idle:
                return self.idle.pop()
        try:
            return _Child()
        except BaseException:
            self._freed(None)
            raise

    def give_back(self, child: _Child) -> None:
        """Keeps a sound child if somebody keeps them, and ends any other."""
        if not self._freed(child):
            child.end()

    def _freed(self, child: _Child | None) -> bool:
        with self.changed:
            self.n_taken -= 1
            kept = child is not None and child.is_sound and self.n_keepers > 0
            if child is not None and kept:
                self.idle.append(child)
            self.changed.notify()
        return kept

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        with self.changed:
            self.n_keepers += 1
        try:
            yield
        finally:
            with self.changed:
                self.n_keepers -= 1
                ended, self.idle = ([], self.idle) if self.n_keepers else (self.idle, [])
                self.changed.notify_all()
            for child in ended:
                child.end()


_children = _Children()
_of_parents: list[_Children] = []  # which are not ours to end


def children_kept() -> contextlib.AbstractContextManager[None]:
    """Meanwhile, calls use few processes, one call after the other.

    A process that has crashed, hung or raised is not used again. At most as many run as there are cores, but four at
    least, because what they do may be waiting for a server.
    """
    return _children.kept()


def _most_kept() -> int:
    return max(4, available_cores())


def _after_fork() -> None:
    global _children
    _of_parents.append(_children)
    _children = _Children()


os.register_at_fork(after_in_child=_after_fork)


def _send(pipe: socket.socket, message: bytes) -> None:
    pipe.sendall(len(message).to_bytes(_LENGTH_BYTES, "little"))
    pipe.sendall(message)


def _received(pipe: socket.socket) -> bytes:
    return _read(pipe, int.from_bytes(_read(pipe, _LENGTH_BYTES), "little"))


def _read(pipe: socket.socket, n_bytes: int) -> bytes:
    """The next bytes. Raises EOFError."""
    content = bytearray(n_bytes)
    left = memoryview(content)
    while left:
        n_read = pipe.recv_into(left)
        if not n_read:
            raise EOFError
        left = left[n_read:]
    return bytes(content)


# ---- in the child

_pipe: socket.socket  # to the parent


def main() -> None:
    """Answers the calls that come through the socket of this number."""
    global _pipe
    _pipe = socket.socket(fileno=int(sys.argv[2]))
    with contextlib.suppress(EOFError):
        while True:
            request = _received(_pipe)
            try:
                target, arguments = pickle.loads(request)
                module, _, name = target.partition(":")
                answer = getattr(importlib.import_module(module), name)(*arguments)
            except Exception as error:  # noqa: BLE001 - the parent raises it
                _fail(error)
            else:
                _send(_pipe, b"null")
                _send(_pipe, answer)


def _fail(error: Exception) -> None:
    _send(_pipe, json.dumps([type(error).__name__, str(error)]).encode())
    _send(_pipe, b"")


def give_up(error: Exception) -> NoReturn:
    """Answers a call with an exception and ends the process: for code whose caller would swallow the exception."""
    _fail(error)
    os._exit(0)
