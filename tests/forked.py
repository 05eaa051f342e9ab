"""Processes that begin in milliseconds: forks of an interpreter that has imported what takes seconds."""

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
    "zloader.conversion.append",
    "zloader.commands.cli",
    "zloader.commands.demo",
    "zloader.training.loader",
    "zloader.testing",
    "zloader.conversion.verify",
    "zloader.dataset.warm",
    "matplotlib.figure",
    "s3fs",
    "torch.multiprocessing",
]
# It has opened nothing and started no thread, so that whatever it forks is as good as new.
_PARENT = """
import gc, importlib, json, os, socket, sys
asked = socket.socket(fileno=int(sys.argv[1]))
for name in sys.argv[2:]:
    importlib.import_module(name)
gc.freeze()  # else every child spends seconds on taking down what was imported
while True:
    message, files, *_ = socket.recv_fds(asked, 1 << 20, 3)
    if not message:
        sys.exit()
    order = json.loads(message)
    if "begin" in order:
        answer = os.fork()
        if answer == 0:
            break
        for file in files:
            os.close(file)
    else:
        pid, status = os.waitpid(order["wait"], 0 if order["until it ends"] else os.WNOHANG)
        answer = os.waitstatus_to_exitcode(status) if pid else None
    asked.send(json.dumps(answer).encode())
asked.close()
for place, file in enumerate(files):
    os.dup2(file, place)
    os.close(file)
os.environ.clear()
os.environ.update(order["environment"])
os.chdir(order["directory"])
sys.argv[1:] = order["arguments"]
exec(order["begin"])
"""


class Interpreter:
    """Runs scripts; it ends with the process that made it."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # Python 3.12 warns of every fork of a process with threads, such as those of a library for linear algebra.
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
        self._orders.close()
        self._process.wait(PATIENCE_S)

    def order(self, files: tuple[int, ...] = (), **order: Any) -> Any:
        """Tells the parent to begin a process or to wait for one; gives its answer."""
        with self._turn:
            socket.send_fds(self._orders, [json.dumps(order).encode()], files)
            return json.loads(self._orders.recv(100))

    @contextlib.contextmanager
    def running(self, script: str, *arguments: Any, stdin: int | None = None, **variables: str) -> Iterator[Forked]:
        """A process that runs a script; it does not outlive the context. `variables` are of its environment."""
        theirs, ours = zip(os.pipe(), os.pipe()[::-1], os.pipe()[::-1], strict=True)
        process = None
        try:
            files = theirs if stdin is None else (stdin, *theirs[1:])
            place = {"environment": dict(os.environ) | variables, "directory": str(Path.cwd())}
            pid = self.order(files, begin=script, arguments=[str(each) for each in arguments], **place)
            process = Forked(self, pid, *ours)
        finally:
            for file in theirs if process else (*theirs, *ours):
                os.close(file)
        with process:
            yield process

    def run(self, script: str, *arguments: Any, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs a script to its end."""
        with self.running(script, *arguments, **variables) as process:
            out, err = process.communicate()
            return subprocess.CompletedProcess([script, *arguments], process.wait(), out, err)


class Forked:
    """A process with pipes, in what it does like subprocess.Popen."""

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
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self.stdout.close()
        self.stderr.close()

    def poll(self) -> int | None:
        """The status if it has ended."""
        return self._ended(wait=False)

    def wait(self) -> int:
        """Waits for the end; gives the status, or minus the signal that killed it."""
        status = self._ended(wait=True)
        assert status is not None
        return status

    def _ended(self, *, wait: bool) -> int | None:
        if self.returncode is None:
            self.returncode = self._interpreter.order(wait=self.pid, **{"until it ends": wait})
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends it a signal, if it lives."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it at once."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, within_s: float = PATIENCE_S) -> tuple[str, str]:
        """What else it writes, to stdout and stderr, until it ends; one that does not is killed."""
        late = threading.Timer(within_s, os.kill, (self.pid, signal.SIGKILL))
        late.start()
        try:
            self.stdin.close()
            with ThreadPoolExecutor(1) as reader:
                err = reader.submit(self.stderr.read)
                out = self.stdout.read()
            self.wait()
            return out, err.result()
        finally:
            late.cancel()
