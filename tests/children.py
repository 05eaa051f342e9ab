"""Objects that live in a child process (zloader.common.child), where their tests import them from."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


class Crashing:
    """Whatever is asked, a signal ends the process."""

    def __init__(self, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class Clumsy:
    """Counts its calls, and fails as it is told. `folder` is where it counts its starts."""

    def __init__(self, folder: Path, crashes: int = 0) -> None:
        self.calls = 0
        self._crashes = crashes
        self._starts = folder / "starts"
        self._starts.write_text(str(self.starts + 1))

    @property
    def starts(self) -> int:
        return int(self._starts.read_text()) if self._starts.exists() else 0

    def count(self, *given: Any) -> bytes:
        self.calls += 1
        return json.dumps([self.starts, self.calls, *given]).encode()

    def crash(self, *given: Any) -> bytes:
        """Crashes in as many processes as it is told, the first time that it is asked there."""
        if self.starts <= self._crashes:
            print("this is the last line", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        return self.count(*given)

    def leave(self, status: int) -> bytes:
        os._exit(status)

    def fail(self) -> bytes:
        raise LookupError("nothing is there")

    def hang(self) -> bytes:
        time.sleep(1000)
        return b""

    def same(self, *arrays: Any) -> Any:
        return list(arrays)

    def print(self) -> bytes:
        print("to the standard output")
        os.write(1, b"and to its file" * 10_000)
        return b""
