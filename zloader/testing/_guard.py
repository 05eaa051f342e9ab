"""Runs a server, and ends it on SIGTERM or when the owner process dies for any reason: `python -I -S _guard.py SPEC`.

`zloader.testing.seaweed` runs this file as a script in its own session. After the server has ended, the script removes
the files and directories listed in SPEC.

Why a separate process? PR_SET_PDEATHSIG follows the *thread* that forked, so a server started from a worker thread
would die with that thread. Setting it also runs Python code between fork and exec, which is unsafe in a process with
threads, and macOS does not have it. This process has one thread, and looks for its owner ten times a second. It costs
20 ms and 13 MB. If it is killed itself, the server goes on until the owner stops it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TypedDict

_GRACE_S = 5.0  # time between SIGTERM and SIGKILL
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
        server = subprocess.Popen(spec["command"])
        try:
            while os.getppid() == spec["owner"] and server.poll() is None:
                if select.select([told], [], [], _LOOK_S)[0]:
                    break
        finally:
            _end(server, spec["end_signal"])
        return server.returncode
    finally:
        remove(spec["leftovers"])


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
            shutil.rmtree(path, ignore_errors=True)  # what a child of the server made meanwhile
        else:
            with contextlib.suppress(OSError):
                path.unlink()


if __name__ == "__main__":
    sys.exit(run(json.loads(sys.argv[1])))
