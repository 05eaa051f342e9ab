"""Calls an object that lives in a Python process of its own, because a library there may crash or hang its process.

The child imports the class, makes the object at the first call, and answers one call after the other. Calls are pickles
of their parent. Answers are NumPy arrays and never unpickled, because a hostile file may have taken over the child.

The cost is a start of Python with the imports of the class, and two copies of each answer by the kernel. Within
`children_kept`, a process that has answered well serves the next object that may share one, which saves most starts.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import IO, Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from zloader.common.machine import available_cores

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from zloader.common.child import main; main()"
_TAIL_BYTES = 2000  # of what the child printed
_LENGTH = np.dtype("<u8")  # of a message, which precedes it
_numbers = itertools.count()  # tell the objects of a process apart


class ChildError(Exception):
    """The base of what a call raises: an exception of the child has a type of the same name, derived from this one."""


class ChildCrashedError(ChildError):
    """The child ended during the call. The message says how often and by which signal."""


class Child:
    """An object of the class `target` (`module:Class`), made with `arguments`, in a process that lives until `close`.

    Calls must be repeatable: after a crash, a new child repeats the call, up to `attempts` times in all. `environment`
    is added to that of this process. A call raises TimeoutError if nothing comes for longer than `deadline_s`.

    A child that is `shared` is closed by the thread that uses it before that thread uses another one, because the first
    call may wait for the process of another child (see `children_kept`).
    """

    def __init__(
        self,
        target: str,
        *arguments: Any,
        attempts: int = 1,
        deadline_s: float | None = None,
        environment: Mapping[str, str] | None = None,
        shared: bool = False,
    ) -> None:
        self._object = pickle.dumps((next(_numbers), target, arguments))
        self._processes = _shared if shared else _Processes()
        self._attempts, self._deadline_s, self._environment = attempts, deadline_s, environment or {}
        self._running: _Running | None = None
        self._has_failed = False  # with an exception; who knows what it has left behind
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The id of the process while it runs."""
        return self._running.process.pid if self._running else None

    def call(self, method: str, *arguments: Any) -> list[NDArray[Any]]:
        """The one-dimensional arrays that the method of the object returns; bytes are an array of them.

        Raises ChildError, or TimeoutError.
        """
        request, crashes, failure = pickle.dumps((self._object, method, arguments)), 0, None
        with self._lock:
            while crashes < self._attempts:
                self._running = self._running or self._processes.take(self._environment)
                try:
                    failure, answer = self._running.answer(request, self._deadline_s)
                    break
                except EOFError:
                    crash = self._running.crash()
                    crashes += not self._running.has_served  # else another object may be the cause
                    self._end()
                except BaseException:  # the answer to this call must not be taken for that to the next
                    self._end()
                    raise
            else:
                times = f", {self._attempts} times in a row" if self._attempts > 1 else ""
                raise ChildCrashedError(f"the process that reads it ended with {crash}{times}")
        if failure is not None:
            self._has_failed = True
            raise type(failure[0], (ChildError,), {})(failure[1])
        return answer

    def close(self) -> None:
        """Ends the process, or leaves it to another child. The next call takes another."""
        self._end(keep=not self._has_failed)

    def _end(self, *, keep: bool = False) -> None:
        running, self._running = self._running, None
        if running is not None:
            self._processes.give_back(running, keep=keep)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class _Running:
    """A process, the pipe to it, and what it has printed."""

    process: subprocess.Popen[bytes]
    pipe: socket.socket
    log: IO[bytes]
    begun_with: tuple[dict[str, str], list[str]]  # the environment, and where modules are found
    has_served: bool = False  # another object

    @classmethod
    def started(cls, environment: dict[str, str], path: list[str]) -> _Running:
        ours, theirs = socket.socketpair()
        log = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(path), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        return cls(process, ours, log, (environment, path))

    def answer(self, request: bytes, deadline_s: float | None) -> tuple[tuple[str, str] | None, list[NDArray[Any]]]:
        """The name and text of an exception, or None, and the answer. Raises EOFError if the process has ended."""
        self.pipe.settimeout(deadline_s)
        try:
            _send(self.pipe, request)
            failure, described = json.loads(_received(self.pipe))
            return failure, [_filled(self.pipe, np.empty(size, dtype)) for dtype, size in described]
        except (ConnectionError, ValueError) as error:  # ValueError: no answer of ours
            raise EOFError from error

    def crash(self) -> str:
        """How the process ended, with the last line that it printed."""
        self.process.kill()  # does nothing if it has ended
        status = self.process.wait()
        self.log.seek(max(0, self.log.seek(0, os.SEEK_END) - _TAIL_BYTES))
        said = self.log.read().decode(errors="replace").strip().rpartition("\n")[2]
        ended = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return f"{ended} ({said})" if said else ended

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.pipe.close()
        self.log.close()


class _Processes:
    """The processes of children. While somebody keeps them, they are few, and those without a child wait for the next.

    `changed` guards the rest. Whoever waits for it, waits for a process to be given back.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.n_keepers = self.n_taken = 0
        self.idle: list[_Running] = []

    def take(self, environment: Mapping[str, str]) -> _Running:
        """A process that began with this addition to the present environment. The caller gives it back."""
        begun_with = {**os.environ, **environment}, list(sys.path)
        with self.changed:
            self.changed.wait_for(lambda: not self.n_keepers or self.n_taken < _most_shared())
            self.n_taken += 1
            fitting = next((running for running in self.idle if running.begun_with == begun_with), None)
            if fitting is not None:
                self.idle.remove(fitting)
                return fitting
        try:
            return _Running.started(*begun_with)
        except BaseException:
            self._freed()
            raise

    def give_back(self, running: _Running, *, keep: bool) -> None:
        """Ends a process, or keeps it if that is wished and somebody keeps processes."""
        kept = self._freed(running if keep else None)
        if not kept:
            running.end()

    def _freed(self, running: _Running | None = None) -> bool:
        with self.changed:
            self.n_taken -= 1
            kept = running is not None and self.n_keepers > 0
            if running is not None and kept:
                self.idle.append(replace(running, has_served=True))
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
            for running in ended:
                running.end()


_shared = _Processes()
_of_parents: list[_Processes] = []  # which are not ours to end


def children_kept() -> contextlib.AbstractContextManager[None]:
    """Meanwhile, shared children use few processes, one child after the other.

    A process that has crashed, hung or raised is not used again. At most as many run as there are cores, but four at
    least, because what they do may be waiting for a server.
    """
    return _shared.kept()


def _most_shared() -> int:
    return max(4, available_cores())


def _after_fork() -> None:
    global _shared
    _of_parents.append(_shared)
    _shared = _Processes()


os.register_at_fork(after_in_child=_after_fork)


def _send(pipe: socket.socket, message: bytes) -> None:
    pipe.sendall(np.array(len(message), _LENGTH).tobytes() + message)


def _received(pipe: socket.socket) -> bytes:
    size = int(_filled(pipe, np.empty(1, _LENGTH))[0])
    return _filled(pipe, np.empty(size, np.uint8)).tobytes()


def _filled(pipe: socket.socket, array: NDArray[Any]) -> NDArray[Any]:
    """The array, whose bytes come next. Raises EOFError."""
    left = array.view(np.uint8).data
    while left:
        n_bytes = pipe.recv_into(left)
        if not n_bytes:
            raise EOFError
        left = left[n_bytes:]
    return array


# ---- in the child

_pipe: socket.socket  # to the parent


def main() -> None:
    """Answers the calls that come through the socket of this number."""
    global _pipe
    _pipe, made, made_from = socket.socket(fileno=int(sys.argv[2])), None, b""
    while True:
        try:
            request = _received(_pipe)
        except EOFError:
            return
        try:
            described, method, arguments = pickle.loads(request)
            if described != made_from:
                _, target, given = pickle.loads(described)
                made, made_from = _named(target)(*given), described
            answer = getattr(made, method)(*arguments)
        except Exception as error:  # noqa: BLE001 - the parent raises it
            _fail(error)
        else:
            _succeed([np.frombuffer(answer, np.uint8)] if isinstance(answer, bytes) else answer)


def _named(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _succeed(arrays: list[NDArray[Any]]) -> None:
    _send(_pipe, json.dumps([None, [(array.dtype.str, len(array)) for array in arrays]]).encode())
    for array in arrays:
        _pipe.sendall(np.ascontiguousarray(array).view(np.uint8).data)


def _fail(error: Exception) -> None:
    _send(_pipe, json.dumps([[type(error).__name__, str(error)], []]).encode())


def give_up(error: Exception) -> NoReturn:
    """Answers a call with an exception and ends the process: for code whose caller would swallow the exception."""
    _fail(error)
    os._exit(0)
