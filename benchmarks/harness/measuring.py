"""What every benchmark does: commands and functions measured in processes of their own, medians, tables.

It imports only the standard library, so that it runs in the Python of any environment.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import errno
import json
import mmap
import multiprocessing
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG = 1  # of sys/prctl.h
_FOLDERS = re.compile(r"""(?<![\w./:])/(?:[^\s/'":,()]+/)+""")  # absolute ones
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
Figures = dict[str, Any]
COLUMNS = ("cells/s", "(range)", "wall s", "call s", "user s", "system s", "peak MB")


# ---- processes


def program(module: str, *arguments: object, python: str | Path = sys.executable) -> list[str]:
    """The command that runs a module of benchmarks/ in any Python. Its environment must be `importing()`."""
    return [str(python), "-m", f"benchmarks.{module}", *map(str, arguments)]


def importing(**more: str) -> dict[str, str]:
    """This process's environment and `more`, in which every Python can import benchmarks/ from every directory."""
    found = os.environ | more
    return found | {"PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), found.get("PYTHONPATH"))))}


def die_with_parent() -> None:
    """Has the kernel end this process when the process that started it is gone, even if that was killed. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def last_lines(text: str, n_characters: int = 600) -> str:
    """The end of an output, which has the error, without the folders of this machine."""
    return _FOLDERS.sub("…/", text).strip()[-n_characters:]


# ---- measuring


class CommandFailed(SystemExit):
    """A measured command failed. A script that does not catch it ends with the message."""


def measured(
    command: Sequence[str | Path], *, work: Path, env: dict[str, str] | None = None, deadline_s: float | None = None
) -> Figures:
    """Runs a command and returns its figures. The command prints one JSON document with `seconds` and maybe `versions`.

    Pending writes are synced to disk first. The temporary files of the command go to `work`. After `deadline_s` the
    command is killed, with all processes that it has started. Raises CommandFailed.
    """
    os.sync()
    errors = work / "stderr.txt"
    environment = importing(TMPDIR=str(work), **(env or {}))
    began = time.perf_counter()
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, env=environment, text=True, start_new_session=True
        ) as process,
        killing(process.pid, deadline_s),
    ):
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        late = f" after {deadline_s:g} s" if deadline_s and wall >= deadline_s else ""
        reason = last_lines(errors.read_text(), 4000)
        raise CommandFailed(f"{' '.join(map(str, command))} failed{late} ({process.returncode}):\n{reason}")
    printed = json.loads(output)
    versions = {"versions": printed["versions"]} if "versions" in printed else {}
    return {"wall_s": wall, "call_s": printed["seconds"], **spent(usage), **versions}


@contextlib.contextmanager
def killing(group: int, deadline_s: float | None) -> Iterator[None]:
    """Kills a group of processes after `deadline_s`, and what is left of it at the end."""

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)

    timer = threading.Timer(deadline_s or 0, kill)
    if deadline_s:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        kill()


def spent(usage: resource.struct_rusage) -> Figures:
    """CPU seconds in user and kernel mode (the kernel's are mostly page faults of new memory), and peak memory."""
    return {"user_s": usage.ru_utime, "system_s": usage.ru_stime, "peak_bytes": usage.ru_maxrss * _RSS_UNIT}


def touch(n_bytes: int) -> None:
    """Touches `n_bytes` of memory and frees them. Call it `in_new_process` before a measurement.

    A virtual machine may have to get free memory from its host. On one machine this took 12 microseconds per page, or
    3 s per GB, which would count against the first process that needs much memory.
    """
    with mmap.mmap(-1, n_bytes) as memory:
        for at in range(0, n_bytes, mmap.PAGESIZE):
            memory[at] = 1


def in_new_process(function: Callable[..., Any], *args: Any) -> Any:
    """Runs a function in a new process, whose memory is freed when it ends, and returns the result."""
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *args).result()


def stored_bytes(store: Path) -> int:
    """The bytes of all files of a store."""
    return sum(path.stat().st_size for path in store.rglob("*") if path.is_file())


def read_through(path: Path) -> None:
    """Reads a file into the page cache, without its holes, whose empty pages would drive others out of it."""
    with path.open("rb", buffering=0) as file:
        for begin, end in _extents(file.fileno()):
            for at in range(begin, end, 1 << 24):
                os.pread(file.fileno(), min(1 << 24, end - at), at)


def _extents(file: int) -> Iterator[tuple[int, int]]:
    """Where a file has bytes that are stored."""
    end = 0
    while True:
        try:
            begin = os.lseek(file, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return
            raise
        end = os.lseek(file, begin, os.SEEK_HOLE)
        yield begin, end


def median(figures: Sequence[Figures], key: str) -> float:
    """The median of one figure."""
    return float(statistics.median(run[key] for run in figures))


def ratio(slow: Sequence[Figures], quick: Sequence[Figures], key: str) -> float:
    """The speedup: the median of the ratios of the turns."""
    return float(statistics.median(a[key] / b[key] for a, b in zip(slow, quick, strict=True)))


def columns(figures: Sequence[Figures], rows: int) -> list[str]:
    """The cells of COLUMNS: medians, the range, and the highest peak."""
    rates = sorted(rows / run["wall_s"] for run in figures)
    return [
        f"{statistics.median(rates):,.0f}",
        f"({rates[0]:,.0f} to {rates[-1]:,.0f})",
        *(f"{median(figures, key):.2f}" for key in ("wall_s", "call_s", "user_s", "system_s")),
        f"{max(run['peak_bytes'] for run in figures) / 1e6:,.0f}",
    ]


def table(lines: Sequence[Sequence[str]]) -> None:
    """Prints a Markdown table. The first line is the header; all columns but the first are aligned right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    for line in (lines[0], rule, *lines[1:]):
        cells = [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]
        print(f"| {' | '.join(cells)} |")


def pss_bytes(pid: int) -> int:
    """The proportional set size of a process, in bytes: shared pages count by their share."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) * 1024
