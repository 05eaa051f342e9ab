"""Functions that run in a child process (zloader.common.child), where their tests import them from."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

_N_CALLS = 0  # in this process


def count(*given: Any) -> bytes:
    """The process, the calls that it has answered with this one, and the arguments."""
    global _N_CALLS
    _N_CALLS += 1
    return json.dumps([os.getpid(), _N_CALLS, *given]).encode()


def crash(folder: Path, crashes: int) -> bytes:
    """Crashes in as many processes as it is told."""
    told = folder / "crashes"
    before = int(told.read_text()) if told.exists() else 0
    if before < crashes:
        told.write_text(str(before + 1))
        print("this is the last line", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    return count()


def index(*_: Any) -> bytes:
    """In the place of hdf5_scan's."""
    os.kill(os.getpid(), signal.SIGSEGV)
    return b""


def leave(status: int) -> bytes:
    os._exit(status)


def fail() -> bytes:
    raise LookupError("nothing is there")


def hang() -> bytes:
    time.sleep(1000)
    return b""


def same(content: bytes) -> bytes:
    """Prints on the way, which is no part of the answer."""
    print("to the standard output")
    os.write(1, b"and to its file" * 10_000)
    return content
