"""Runs one server and ends it when told to, or when its owner dies in whatever way: `python -I -S _guard.py SPEC`.

`zloader.testing.seaweed` starts this file as a script of its own, in a session of its own. SIGTERM, or the death of the
owner, ends the server and removes what it leaves behind.

Why a process in between: PR_SET_PDEATHSIG alone follows the *thread* that forked, so a server started from a worker
thread would die with that thread, and setting it needs Python code between fork and exec, which is not safe where
there are threads. Here there is one thread, and a pidfd speaks for the owner as a whole. It costs 20 ms and 13 MB.
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
from pathlib import Path
from typing import TypedDict

_GRACE_S = 5.0  # a server that has not ended this long after SIGTERM is killed
_PR_SET_PDEATHSIG = 1


class Spec(TypedDict):
    """What to run: the one argument, as JSON."""

    owner: int  # pid
    command: list[str]
    end_signal: int  # SIGKILL, or SIGTERM for a server that shall put its files in order
    leftovers: list[str]  # files and directories to remove once the server has ended


def run(spec: Spec) -> int:
    """Runs the command until it ends, SIGTERM comes or the owner dies; returns the command's exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        owner = os.pidfd_open(spec["owner"])
    except ProcessLookupError:
        return 0
    if os.getppid() != spec["owner"]:  # it died before the line above, and the pid may be someone else's by now
        return 0
    guard, prctl = os.getpid(), ctypes.CDLL(None).prctl

    def die_with_the_guard() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)

    server = subprocess.Popen(spec["command"], preexec_fn=die_with_the_guard)
    try:
        poll = select.poll()
        poll.register(owner, select.POLLIN)
        poll.register(os.pidfd_open(server.pid), select.POLLIN)
        poll.poll()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end(server, spec["end_signal"])
        remove(spec["leftovers"])
    return server.returncode


def _end(server: subprocess.Popen[bytes], end_signal: int) -> None:
    server.send_signal(end_signal)  # does nothing when it has ended
    try:
        server.wait(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def remove(leftovers: list[str]) -> None:
    """Removes these files and directories as far as they are there."""
    for path in map(Path, leftovers):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


if __name__ == "__main__":
    sys.exit(run(json.loads(sys.argv[1])))
