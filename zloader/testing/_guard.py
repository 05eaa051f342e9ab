"""Runs a server, and ends it on SIGTERM or when the owner process dies for any reason: `python -I -S _guard.py SPEC`.

`zloader.testing.server` runs this file as a script in its own session. After the server has ended, the script removes
the files and directories listed in SPEC.

Why a separate process? PR_SET_PDEATHSIG alone follows the *thread* that forked, so a server started from a worker
thread would die with that thread. Setting it also runs Python code between fork and exec, which is unsafe in a process
with threads. This process has one thread, and watches the whole owner process with a pidfd. It costs 20 ms and 13 MB.

macOS has neither pidfds nor PR_SET_PDEATHSIG. There this process looks for its owner ten times a second, and if it is
killed itself, the server goes on.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

_GRACE_S = 5.0  # time between SIGTERM and SIGKILL
_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.1


class Spec(TypedDict):
    """The script's only argument, as JSON."""

    owner: int  # pid
    command: list[str]
    end_signal: int  # SIGKILL, or SIGTERM to let the server flush its files
    leftovers: list[str]  # files and directories to remove once the server has ended


def run(spec: Spec) -> int:
    """Runs the command until it ends, SIGTERM arrives or the owner dies. Returns the command's exit status."""
    told, tell = os.pipe()
    # An exception instead could come while the server is started, and leave it alive and its files behind.
    signal.signal(signal.SIGTERM, lambda *_: os.write(tell, b"."))
    try:
        return _run_elsewhere(spec, told) if sys.platform != "linux" else _run_on_linux(spec, told)
    finally:
        remove(spec["leftovers"])


def _run_on_linux(spec: Spec, told: int) -> int:
    try:
        owner = os.pidfd_open(spec["owner"])
    except ProcessLookupError:
        return 0
    if os.getppid() != spec["owner"]:  # the owner died before pidfd_open, and its pid may have been reused
        return 0
    guard, prctl = os.getpid(), ctypes.CDLL(None).prctl

    def die_with_the_guard() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)

    def wait(server: subprocess.Popen[bytes]) -> None:
        poll = select.poll()
        poll.register(owner, select.POLLIN)
        poll.register(told, select.POLLIN)
        poll.register(os.pidfd_open(server.pid), select.POLLIN)
        poll.poll()

    return _run(spec, subprocess.Popen(spec["command"], preexec_fn=die_with_the_guard), wait)


def _run_elsewhere(spec: Spec, told: int) -> int:
    def wait(server: subprocess.Popen[bytes]) -> None:
        while os.getppid() == spec["owner"] and server.poll() is None:
            if select.select([told], [], [], _LOOK_S)[0]:
                return

    return _run(spec, subprocess.Popen(spec["command"]), wait)


def _run(spec: Spec, server: subprocess.Popen[bytes], wait: Callable[[subprocess.Popen[bytes]], None]) -> int:
    try:
        wait(server)
    finally:
        _end(server, spec["end_signal"])
    return server.returncode


def _end(server: subprocess.Popen[bytes], end_signal: int) -> None:
    server.send_signal(end_signal)  # does nothing if it has ended
    try:
        server.wait(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def remove(leftovers: list[str]) -> None:
    """Removes these files and directories if they exist."""
    for path in map(Path, leftovers):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


if __name__ == "__main__":
    sys.exit(run(json.loads(sys.argv[1])))
