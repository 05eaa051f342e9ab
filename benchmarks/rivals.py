"""The other tools in the comparison: an environment for each, their conversions, and the code that times them.

    python benchmarks/rivals.py make annbatch [--python python3.12] [--environments DIR]
    python benchmarks/rivals.py write annbatch-shuffled-zarrs FILE.h5ad STORE.zarr
    python benchmarks/rivals.py write slafdb FILE.h5ad STORE.slaf

`make` prints the path of the environment's Python. pip installs the newest version of the rival and of its dependencies
there, as its users would. No constraints apply: neither this repository's constraints.txt nor PIP_CONSTRAINT.
`--constrain torch==2.13.0` limits a version wherever it is needed, for example to one that is small to download. peers/
has what each rival needs. Python interpreters are looked for on PATH and among those of pyenv, and tried. An
environment is rebuilt when the requirements change, and after a month, to get newer versions.

`write` runs a rival's conversion in the current Python. It prints one line of JSON: the seconds of the call, without
starting Python and importing, and the versions. Each rival uses the defaults of its documentation. Until then this file
imports only the standard library, so it runs in the Python of any environment.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import ctypes
import importlib.metadata
import json
import mmap
import multiprocessing
import os
import platform
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import peers
from peers import Peer

_FRESH_S = 30 * 24 * 3600  # after this time an environment is rebuilt with the newest versions
_PR_SET_PDEATHSIG = 1  # of sys/prctl.h
_FOLDERS = re.compile(r"""(?<![\w./:])/(?:[^\s/'":,()]+/)+""")  # absolute ones
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
Figures = dict[str, Any]
COLUMNS = ("cells/s", "(range)", "wall s", "call s", "user s", "system s", "peak MB")


# ---- environments


def default_directory() -> Path:
    """The default directory of the environments, in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "zloader-benchmarks"


def environment(
    name: str, *, python: str | None = None, directory: Path | None = None, constrain: Sequence[str] = ()
) -> Path:
    """The Python of a rival's environment, which is created if it does not exist.

    `python` is the interpreter to create it with. By default, the first one that is new enough is used. `constrain`
    is given to pip as constraints if the environment is made now. Raises EnvironmentFailed.
    """
    rival = peers.peer(name)
    home = (directory or default_directory()).expanduser().absolute() / name
    requirements = json.dumps(rival.requirements)
    executable, record = home / "bin" / "python", home / "made_of.json"  # the record is written after installing
    if record.exists() and record.read_text() == requirements and time.time() - record.stat().st_mtime < _FRESH_S:
        return executable
    interpreter = _interpreter(rival, python)
    print(f"installing {', '.join(rival.requirements)} into {home}", file=sys.stderr)
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    constraints = home / "constraints.txt"
    constraints.write_text("\n".join(constrain))
    own = {**os.environ, "PIP_CONSTRAINT": str(constraints)}
    install = [executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", *rival.requirements]
    for command in ([interpreter, "-m", "venv", home], install):
        done = subprocess.run(command, capture_output=True, text=True, env=own, check=False)
        if done.returncode:
            shutil.rmtree(home, ignore_errors=True)
            raise EnvironmentFailed(f"{name} could not be installed: {last_lines(done.stderr or done.stdout)}")
    record.write_text(requirements)
    return executable


class EnvironmentFailed(SystemExit):
    """An environment could not be made. A script that does not catch it ends with the message."""


def last_lines(text: str, n_characters: int = 600) -> str:
    """The end of an output, which has the error, without the folders of this machine."""
    return _FOLDERS.sub("…/", text).strip()[-n_characters:]


def _interpreter(rival: Peer, wanted: str | None) -> str:
    """An interpreter of a version that suits and that really runs (a version manager's stub on PATH may not)."""
    for candidate in [wanted] if wanted else _candidates(rival):
        if rival.least_python <= _version(candidate) < rival.below_python:
            return candidate
    least, below = (".".join(map(str, version)) for version in (rival.least_python, rival.below_python))
    problem = f"{wanted} is not a working" if wanted else "there is no working"
    raise EnvironmentFailed(f"{problem} Python from {least} to below {below}: give one with --python")


def _candidates(rival: Peer) -> Iterator[str]:
    yield sys.executable
    for minor in range(rival.least_python[1], peers.NEWEST_MINOR + 1):
        yield f"python3.{minor}"
        yield from map(str, sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python")))


def _version(candidate: str) -> tuple[int, ...]:
    """Major and minor version, or an empty tuple if the interpreter does not run."""
    command = [candidate, "-c", "import sys; print(*sys.version_info[:2])"]
    try:
        return tuple(map(int, subprocess.run(command, capture_output=True, check=True).stdout.split()))
    except (OSError, subprocess.CalledProcessError):
        return ()


def die_with_parent() -> None:
    """Has the kernel end this process when the process that started it is gone, even if that was killed. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


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
    environment = {**os.environ, "TMPDIR": str(work), **(env or {})}
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
    """Reads a file into the page cache."""
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass


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


# ---- conversions, each run by the Python of its environment


def write(conversion: str, sources: list[str], store: str) -> dict[str, Any]:
    """Runs one conversion: the name of a rival, for annbatch with the optional suffixes -shuffled and -zarrs."""
    name = conversion if conversion in peers.MODULES else conversion.split("-")[0]
    if name not in peers.MODULES or not hasattr(peers.module(name), "write"):
        known = ", ".join(name for name in peers.MODULES if hasattr(peers.module(name), "write"))
        sys.exit(f"unknown conversion {conversion!r}: give one of {known}, or annbatch with -shuffled and -zarrs")
    convert = peers.module(name).write(conversion, sources, store)
    began = time.perf_counter()
    convert()
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "versions": versions(peers.peer(name).packages)}


def versions(packages: Sequence[str]) -> dict[str, str]:
    """The versions of those packages that are installed in this Python."""
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def main() -> None:
    """Creates an environment, or converts in the current one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="create an environment and print the path of its Python")
    make.add_argument("name", choices=[name for name in peers.MODULES if peers.peer(name).requirements])
    add_options(make)
    conversion = commands.add_parser("write", help="convert with the current Python")
    for argument in ("what", "source", "store"):
        conversion.add_argument(argument)
    conversion.add_argument("--copies", type=int, default=1, help="copies of the source, one after the other")
    commands.add_parser("versions", help="print the versions of Python and of packages").add_argument("name")
    options = parser.parse_args()
    if options.command == "make":
        given = {"python": options.python, "directory": options.environments, "constrain": options.constrain}
        print(environment(options.name, **given))
    elif options.command == "versions":
        found = {"python": platform.python_version(), "packages": versions(peers.peer(options.name).packages)}
        print(json.dumps(found))
    else:
        with os.fdopen(os.dup(1), "w") as answer:
            os.dup2(2, 1)  # output of libraries goes to stderr
            die_with_parent()
            with copied(options.source, options.copies, beside=options.store) as sources:
                print(json.dumps(write(options.what, sources, options.store)), file=answer)


@contextlib.contextmanager
def copied(source: str, copies: int, *, beside: str) -> Iterator[list[str]]:
    """The source and copies of it, in files of their own: annbatch cannot join a file with itself."""
    with tempfile.TemporaryDirectory(dir=Path(beside).parent) as folder:
        others = [shutil.copyfile(source, Path(folder) / f"{number}.h5ad") for number in range(2, copies + 1)]
        yield [source, *map(str, others)]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of every benchmark that needs a rival."""
    parser.add_argument("--python", help="Python interpreter for the rivals' environments (default: one on PATH)")
    parser.add_argument(
        "--environments", type=Path, help=f"directory of the environments (default: {default_directory()})"
    )
    parser.add_argument(
        "--constrain",
        action="append",
        default=[],
        metavar="REQUIREMENT",
        help="limit the version of a package in new environments, such as torch==2.13.0",
    )


if __name__ == "__main__":
    main()
