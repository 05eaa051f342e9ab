"""The other tools that benchmarks compare with: an environment for each, made once, what they do, and how it is timed.

    python benchmarks/rivals.py make annbatch [--python python3.12] [--environments DIR]
    python benchmarks/rivals.py write annbatch-shuffled-zarrs FILE.h5ad STORE.zarr

`make` prints the path of the environment's Python. pip installs the newest version of each rival and its dependencies
there, as its users have them; this repository's constraints.txt has no say. annbatch needs Python 3.12 and, to write,
no torch. An environment is made anew when the requirements change, and after a month, since newer versions may be out.

`write` does a rival's conversion in the Python that runs it and prints one JSON line: the seconds of the call, without
starting Python and importing, and the versions used. Defaults are left alone, as each one's documentation has it.
This file imports nothing but the standard library before that, so any environment's Python can run it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib
import importlib.metadata
import json
import mmap
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FRESH_S = 30 * 24 * 3600  # for so long an environment is taken to hold the newest versions
_NEWEST_MINOR = 14  # of Python 3, to look for
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
Figures = dict[str, Any]
COLUMNS = ("cells/s", "(range)", "wall s", "call s", "user s", "system s", "peak MB")


@dataclass(frozen=True, kw_only=True)
class Rival:
    """What pip installs, and the least Python that takes it."""

    requirements: tuple[str, ...]
    least_python: tuple[int, int]


RIVALS = {"annbatch": Rival(requirements=("annbatch[zarrs]", "obstore"), least_python=(3, 12))}


# ---- environments


def default_directory() -> Path:
    """Where environments are kept: in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "zloader-benchmarks"


def environment(name: str, *, python: str | None = None, directory: Path | None = None) -> Path:
    """The Python of a rival's environment, which is made where it is not there.

    `python` is the interpreter to make it with; without it, one that is new enough is looked for on PATH.
    """
    rival = RIVALS[name]
    home = (directory or default_directory()).expanduser().absolute() / name
    made_of = json.dumps(rival.requirements)
    executable, note = home / "bin" / "python", home / "made_of.json"  # the note is written last: all was installed
    if note.exists() and note.read_text() == made_of and time.time() - note.stat().st_mtime < _FRESH_S:
        return executable
    interpreter = _interpreter(rival, python)
    print(f"installing {', '.join(rival.requirements)} into {home}", file=sys.stderr)
    shutil.rmtree(home, ignore_errors=True)
    home.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([interpreter, "-m", "venv", home], check=True, stdout=sys.stderr)
    install = [executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*install, *rival.requirements], check=True, stdout=sys.stderr)
    note.write_text(made_of)
    return executable


def _interpreter(rival: Rival, wanted: str | None) -> str:
    """An interpreter that really runs and is new enough (a version manager's stub may be on PATH and not run)."""
    for candidate in [wanted] if wanted else _candidates(rival):
        if _version(candidate) >= rival.least_python:
            return candidate
    least = ".".join(map(str, rival.least_python))
    what = f"{wanted} is not" if wanted else "there is no"
    sys.exit(f"{what} Python {least} or newer that runs: give one with --python")


def _candidates(rival: Rival) -> Iterator[str]:
    yield sys.executable
    for minor in range(rival.least_python[1], _NEWEST_MINOR + 1):
        yield f"python3.{minor}"


def _version(candidate: str) -> tuple[int, ...]:
    """Major and minor; nothing for what does not run."""
    command = [candidate, "-c", "import sys; print(*sys.version_info[:2])"]
    try:
        return tuple(map(int, subprocess.run(command, capture_output=True, check=True).stdout.split()))
    except (OSError, subprocess.CalledProcessError):
        return ()


# ---- measuring


def measured(command: Sequence[str | Path], *, work: Path, env: dict[str, str] | None = None) -> Figures:
    """Runs a command and returns its figures; it prints one JSON document with `seconds`, and may print `versions`.

    What was written before is on the disk when it starts. Its temporary files go to `work`.
    """
    os.sync()
    errors = work / "stderr.txt"
    environment = {**os.environ, "TMPDIR": str(work), **(env or {})}
    began = time.perf_counter()
    with (
        errors.open("w") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, env=environment, text=True) as process,
    ):
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{errors.read_text()[-4000:]}")
    said = json.loads(output)
    versions = {"versions": said["versions"]} if "versions" in said else {}
    return {"wall_s": wall, "call_s": said["seconds"], **spent(usage), **versions}


def spent(usage: resource.struct_rusage) -> Figures:
    """CPU seconds in and outside the kernel (there above all for fresh memory), and memory."""
    return {"user_s": usage.ru_utime, "system_s": usage.ru_stime, "peak_bytes": usage.ru_maxrss * _RSS_UNIT}


def touch(n_bytes: int) -> None:
    """Takes so much memory, and gives it back: best done `apart`, before something is measured.

    A virtual machine may have to get free memory from its host first, at 12 microseconds a page where this was found:
    3 s a GB, for him who happens to come first and needs most.
    """
    with mmap.mmap(-1, n_bytes) as memory:
        for at in range(0, n_bytes, mmap.PAGESIZE):
            memory[at] = 1


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """The result of a function in a process of its own, which takes its memory along when it ends."""
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *args).result()


def stored_bytes(store: Path) -> int:
    """Bytes of all its files."""
    return sum(path.stat().st_size for path in store.rglob("*") if path.is_file())


def read_through(path: Path) -> None:
    """Brings a file into the page cache."""
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass


def median(figures: Sequence[Figures], key: str) -> float:
    """The median of one figure."""
    return float(statistics.median(run[key] for run in figures))


def ratio(slow: Sequence[Figures], quick: Sequence[Figures], key: str) -> float:
    """How many times as quick: the median over the turns."""
    return float(statistics.median(a[key] / b[key] for a, b in zip(slow, quick, strict=True)))


def columns(figures: Sequence[Figures], rows: int) -> list[str]:
    """The cells below COLUMNS: medians, the range, and the highest peak."""
    rates = sorted(rows / run["wall_s"] for run in figures)
    return [
        f"{statistics.median(rates):,.0f}",
        f"({rates[0]:,.0f} to {rates[-1]:,.0f})",
        *(f"{median(figures, key):.2f}" for key in ("wall_s", "call_s", "user_s", "system_s")),
        f"{max(run['peak_bytes'] for run in figures) / 1e6:,.0f}",
    ]


def table(lines: Sequence[Sequence[str]]) -> None:
    """Prints a Markdown table; the first line is its header, figures are to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    for line in (lines[0], rule, *lines[1:]):
        cells = [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]
        print(f"| {' | '.join(cells)} |")


# ---- conversions, each in a Python that has what it imports


def write_anndata(source: str, store: str) -> Callable[[], Any]:
    """anndata alone: the file into memory, then out as Zarr v3."""
    import anndata

    anndata.settings.zarr_write_format = 3
    return lambda: anndata.read_h5ad(source).write_zarr(store)


def write_annbatch(source: str, store: str, *, shuffle: bool, zarrs: bool) -> Callable[[], Any]:
    """annbatch's collection of one file; the zarrs pipeline is what it recommends for local files."""
    import annbatch
    import numpy as np
    import zarr

    if zarrs:
        importlib.import_module("zarrs")  # now, so that it is not timed
        zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    rng = np.random.default_rng(0)
    return lambda: annbatch.DatasetCollection(store).add_adatas([source], shuffle=shuffle, rng=rng)


def write(what: str, source: str, store: str) -> dict[str, Any]:
    """Does one conversion: `anndata`, or `annbatch` with `-shuffled` and `-zarrs` behind it as wanted."""
    name, *parts = what.split("-")
    if name == "anndata" and not parts:
        conversion = write_anndata(source, store)
    elif name == "annbatch" and set(parts) <= {"shuffled", "zarrs"}:
        conversion = write_annbatch(source, store, shuffle="shuffled" in parts, zarrs="zarrs" in parts)
    else:
        sys.exit(f"there is no conversion {what!r}")
    began = time.perf_counter()
    conversion()
    seconds = time.perf_counter() - began
    packages = [name, "anndata", "zarr", *(["zarrs"] if "zarrs" in parts else [])]
    return {"seconds": seconds, "versions": {package: importlib.metadata.version(package) for package in packages}}


def main() -> None:
    """Makes an environment, or converts in this one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="make an environment and print the path of its Python")
    make.add_argument("name", choices=RIVALS)
    add_options(make)
    conversion = commands.add_parser("write", help="convert in this environment")
    for argument in ("what", "source", "store"):
        conversion.add_argument(argument)
    options = parser.parse_args()
    if options.command == "make":
        print(environment(options.name, python=options.python, directory=options.environments))
    else:
        print(json.dumps(write(options.what, options.source, options.store)))


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of every benchmark that needs a rival."""
    parser.add_argument("--python", help="interpreter for the rivals' environments (default: one on PATH)")
    parser.add_argument("--environments", type=Path, help=f"where they are kept (default: {default_directory()})")


if __name__ == "__main__":
    main()
