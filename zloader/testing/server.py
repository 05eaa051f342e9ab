"""A server program on loopback for tests and the demo: started under a guard, awaited, and ended."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from zloader.common.errors import ZloaderError
from zloader.testing import _guard

_START_ATTEMPTS = 5  # another program may take a port between the check and the start
_POLL_S = 0.01
_STOP_DEADLINE_S = 25.0  # longer than the guard waits for the server
_LOG_TAIL = 2_000
_PORT_TAKEN = ("Port allocation failed", "address already in use", "EADDRINUSE")


class ServerStartError(ZloaderError, RuntimeError):
    """A server could not be started. The message contains the end of its log."""


class _PortTakenError(ServerStartError):
    pass


class Server(ABC):
    """A server from `start` to `stop` (or `with`). It ends with this process, even if the process is killed.

    Its output is in a file of `directory`.
    """

    program: ClassVar[str]
    log: ClassVar[str]
    not_inherited: ClassVar[tuple[str, ...]] = ()  # beginnings of environment variables

    def __init__(self, directory: str | os.PathLike[str], *, start_deadline_s: float) -> None:
        self.directory = Path(directory).absolute()
        self.start_deadline_s = start_deadline_s
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._leftovers: list[str] = []

    @abstractmethod
    def _command(self) -> tuple[list[str], signal.Signals, list[str]]:
        """Chooses ports and writes what the server needs.

        Returns its command, the signal that ends it, and the files to remove then. Raises ServerStartError if it is not
        installed.
        """

    def _await_ready(self, pause: Callable[[str], None]) -> None:
        """Returns once the server is ready. `pause` waits a moment, and is told what is not ready."""
        while not self._answers():
            pause("it does not respond to requests")

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=1)
        try:
            connection.request("GET", "/")
            return connection.getresponse().status < http.HTTPStatus.INTERNAL_SERVER_ERROR  # unsigned
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    @property
    def pid(self) -> int | None:
        """The id of the server's process group and of its guard process, or None if it is not running."""
        return self._process.pid if self._process else None

    def start(self) -> Self:
        """Starts the server and returns once it is ready."""
        if self._process:
            raise RuntimeError(f"{self!r} is already running")
        self.directory.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + self.start_deadline_s
        for attempt in range(_START_ATTEMPTS):
            try:
                self._launch()
                self._await_ready(lambda state: self._pause(deadline, state))
                break
            except BaseException as error:
                self.stop()
                if not isinstance(error, _PortTakenError) or attempt == _START_ATTEMPTS - 1:
                    raise
        return self

    def stop(self) -> None:
        """Stops the server. Does nothing if it is not running."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(timeout=_STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the process group that the guard leads
            process.wait()
        if process.returncode < 0:  # the guard was killed before it could remove them
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            _guard.remove(self._leftovers)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _launch(self) -> None:
        command, end_signal, self._leftovers = self._command()
        spec: _guard.Spec = {
            "owner": os.getpid(),
            "command": command,
            "end_signal": end_signal,
            "leftovers": self._leftovers,
        }
        # In a thread of its own: handlers of signals run in the main thread, and an exception of theirs between the
        # fork and the assignment would leave a server that `stop` knows nothing of.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(self._start_guard, spec).result()

    def _start_guard(self, spec: _guard.Spec) -> None:
        with (self.directory / self.log).open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", _guard.__file__, json.dumps(spec)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                env={name: value for name, value in os.environ.items() if not name.startswith(self.not_inherited)},
                start_new_session=True,  # the terminal's Ctrl-C reaches only this process
            )

    def _pause(self, deadline: float, state: str) -> None:
        """Waits a moment. Raises ServerStartError if the server has ended or the deadline has passed."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status, log = self._process.wait(timeout=_POLL_S), self._said()
            taken = any(words in log for words in _PORT_TAKEN)
            raise (_PortTakenError if taken else ServerStartError)(
                f"{self.program} ended with status {status} while starting in {self.directory}; "
                f"its log ends with:\n{log[-_LOG_TAIL:]}"
            )
        if time.monotonic() > deadline:
            raise ServerStartError(
                f"{self.program} in {self.directory} was not ready within {self.start_deadline_s} s ({state}). Is the "
                f"disk full or the machine busy? If not, raise start_deadline_s. "
                f"Its log ends with:\n{self._said()[-_LOG_TAIL:]}"
            )

    def _said(self) -> str:
        return (self.directory / self.log).read_text(errors="replace")
