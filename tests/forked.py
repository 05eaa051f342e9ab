"""Starts processes in milliseconds by forking an interpreter that has already imported the slow modules."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Self

from helpers import PATIENCE_S

CLI = "from zloader.commands.cli import app; app()"
_IMPORTED = [
    "zloader.conversion.convert",
    "zloader.commands.cli",
    "zloader.commands.demo_run",
    "zloader.training.loader",
    "zloader.testing",
    "zloader.conversion.verify",
    "zloader.dataset.warm",
    "zloader.access.s3",
    "zloader.reading.object_source",
    "matplotlib.figure",
    "numba",
    "pandas",
    "rich.progress",
    "s3fs",
    "torch.multiprocessing",
]
# The parent opens no files and starts no threads, so that a fork of it is as good as a new process.
_PARENT = """
import faulthandler, gc, importlib, json, os, socket, sys
requests = socket.socket(fileno=int(sys.argv[1]))
for name in sys.argv[2:]:
    importlib.import_module(name)
gc.freeze()  # otherwise every child spends seconds on freeing the imported modules
while True:
    message, files, *_ = socket.recv_fds(requests, 1 << 20, 3)
    if not message:
        sys.exit()
    order = json.loads(message)
    if "start" in order:
        answer = os.fork()
        if answer == 0:
            break
        for file in files:
            os.close(file)
    else:
        pid, status = os.waitpid(order["wait"], 0 if order["block"] else os.WNOHANG)
        answer = os.waitstatus_to_exitcode(status) if pid else None
    requests.send(json.dumps(answer).encode())
requests.close()
os.setsid()  # its own workers can be ended with it
for number, file in enumerate(files):
    os.dup2(file, number)
    os.close(file)
faulthandler.enable(2)
os.environ.clear()
os.environ.update(order["environment"])
os.chdir(order["directory"])
sys.argv[1:] = order["arguments"]
exec(order["start"])
"""


class Interpreter:
    """Runs scripts in forked processes. It ends with the process that created it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # Python 3.12 warns about every fork of a process with threads, such as those of a linear algebra library.
            command = [
                sys.executable,
                "-W",
                "ignore::DeprecationWarning",
                "-c",
                _PARENT,
                str(theirs.fileno()),
                *_IMPORTED,
            ]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.close()
        self._process.wait(PATIENCE_S)

    def order(self, files: tuple[int, ...] = (), **order: Any) -> Any:
        """Tells the parent to start a process or to wait for one. Returns its answer."""
        with self._lock:
            socket.send_fds(self._requests, [json.dumps(order).encode()], files)
            return json.loads(self._requests.recv(100))

    @contextlib.contextmanager
    def running(self, script: str, *arguments: Any, stdin: int | None = None, **variables: str) -> Iterator[Forked]:
        """Runs a script in a process that ends with the context. `variables` are added to its environment."""
        theirs, ours = zip(os.pipe(), os.pipe()[::-1], os.pipe()[::-1], strict=True)
        process = None
        try:
            files = theirs if stdin is None else (stdin, *theirs[1:])
            setting = {"environment": dict(os.environ) | variables, "directory": str(Path.cwd())}
            pid = self.order(files, start=script, arguments=[str(each) for each in arguments], **setting)
            process = Forked(self, pid, *ours)
        finally:
            for file in theirs if process else (*theirs, *ours):
                os.close(file)
        with process:
            yield process

    def run(self, script: str, *arguments: Any, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs a script until it ends."""
        with self.running(script, *arguments, **variables) as process:
            out, err = process.communicate()
            return subprocess.CompletedProcess([script, *arguments], process.wait(), out, err)


class Forked:
    """A process with pipes, with an interface like subprocess.Popen."""

    def __init__(self, interpreter: Interpreter, pid: int, stdin: int, stdout: int, stderr: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin: IO[str] = os.fdopen(stdin, "w")
        self.stdout: IO[str] = os.fdopen(stdout)
        self.stderr: IO[str] = os.fdopen(stderr)
        self._interpreter = interpreter

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()
        self._signal_all(signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self.stdout.close()
        self.stderr.close()

    def poll(self) -> int | None:
        """The exit status, or None while the process runs."""
        return self._ended(wait=False)

    def wait(self) -> int:
        """Waits for the end. Returns the exit status, negative for a signal."""
        with self._killed_after(PATIENCE_S):
            status = self._ended(wait=True)
        assert status is not None
        return status

    def _ended(self, *, wait: bool) -> int | None:
        if self.returncode is None:
            self.returncode = self._interpreter.order(wait=self.pid, block=wait)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal, if the process is alive."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills the process."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, within_s: float = PATIENCE_S) -> tuple[str, str]:
        """Returns the remaining output on stdout and stderr. Ends the process after `within_s`."""
        with self._killed_after(within_s):
            self.stdin.close()
            with ThreadPoolExecutor(1) as reader:
                err = reader.submit(self.stderr.read)
                out = self.stdout.read()
            self.wait()
            return out, err.result()

    @contextlib.contextmanager
    def _killed_after(self, seconds: float) -> Iterator[None]:
        watchdog = threading.Timer(seconds, self._signal_all, (signal.SIGABRT,))  # says where each of them was
        watchdog.start()
        try:
            yield
        finally:
            watchdog.cancel()

    def _signal_all(self, number: int) -> None:
        """Sends a signal to the process and to those that it started, any of which may hold a pipe open."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)
