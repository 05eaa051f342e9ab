"""The other tools in the comparison: an environment for each, their conversions, and the code that times them.

    python benchmarks/rivals.py make annbatch [--python python3.12] [--environments DIR]
    python benchmarks/rivals.py write annbatch-shuffled-zarrs FILE.h5ad STORE.zarr
    python benchmarks/rivals.py write slafdb FILE.h5ad STORE.slaf

`make` prints the path of the environment's Python. pip installs the newest version of the rival and of its dependencies
there, as its users would. No constraints apply: neither this repository's constraints.txt nor PIP_CONSTRAINT. annbatch
needs Python 3.12, and does not need torch to write; cell-load does not run on Python 3.13, nor slafdb on 3.14. An
environment is rebuilt when the requirements change, and after a month, to get newer versions.

`write` runs a rival's conversion in the current Python. It prints one line of JSON: the seconds of the call, without
starting Python and importing, and the versions. Each rival uses the defaults of its documentation. Until then this file
imports only the standard library, so it runs in the Python of any environment.
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

_FRESH_S = 30 * 24 * 3600  # after this time an environment is rebuilt with the newest versions
_NEWEST_MINOR = 14  # newest minor version of Python 3 to look for
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
Figures = dict[str, Any]
COLUMNS = ("cells/s", "(range)", "wall s", "call s", "user s", "system s", "peak MB")


@dataclass(frozen=True, kw_only=True)
class Rival:
    """The requirements of a rival, the oldest Python that supports them, and the first one that does not."""

    requirements: tuple[str, ...]
    least_python: tuple[int, int]
    below_python: tuple[int, int] = (3, _NEWEST_MINOR + 1)


RIVALS = {
    "annbatch": Rival(requirements=("annbatch[zarrs]", "numcodecs[pcodec]", "obstore"), least_python=(3, 12)),
    "cell-load": Rival(requirements=("cell-load",), least_python=(3, 10), below_python=(3, 13)),
    "slafdb": Rival(requirements=("slafdb", "torch", "psutil"), least_python=(3, 10), below_python=(3, 14)),
}


# ---- environments


def default_directory() -> Path:
    """The default directory of the environments, in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "zloader-benchmarks"


def environment(name: str, *, python: str | None = None, directory: Path | None = None) -> Path:
    """The Python of a rival's environment, which is created if it does not exist.

    `python` is the interpreter to create it with. By default, the first one on PATH that is new enough is used.
    """
    rival = RIVALS[name]
    home = (directory or default_directory()).expanduser().absolute() / name
    requirements = json.dumps(rival.requirements)
    executable, record = home / "bin" / "python", home / "made_of.json"  # the record is written after installing
    if record.exists() and record.read_text() == requirements and time.time() - record.stat().st_mtime < _FRESH_S:
        return executable
    interpreter = _interpreter(rival, python)
    print(f"installing {', '.join(rival.requirements)} into {home}", file=sys.stderr)
    shutil.rmtree(home, ignore_errors=True)
    home.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([interpreter, "-m", "venv", home], check=True, stdout=sys.stderr)
    install = [executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    unconstrained = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    subprocess.run([*install, *rival.requirements], check=True, stdout=sys.stderr, env=unconstrained)
    record.write_text(requirements)
    return executable


def _interpreter(rival: Rival, wanted: str | None) -> str:
    """An interpreter of a version that suits and that really runs (a version manager's stub on PATH may not)."""
    for candidate in [wanted] if wanted else _candidates(rival):
        if rival.least_python <= _version(candidate) < rival.below_python:
            return candidate
    least, below = (".".join(map(str, version)) for version in (rival.least_python, rival.below_python))
    problem = f"{wanted} is not a working" if wanted else "there is no working"
    sys.exit(f"{problem} Python from {least} to below {below}: give one with --python")


def _candidates(rival: Rival) -> Iterator[str]:
    yield sys.executable
    for minor in range(rival.least_python[1], _NEWEST_MINOR + 1):
        yield f"python3.{minor}"


def _version(candidate: str) -> tuple[int, ...]:
    """Major and minor version, or an empty tuple if the interpreter does not run."""
    command = [candidate, "-c", "import sys; print(*sys.version_info[:2])"]
    try:
        return tuple(map(int, subprocess.run(command, capture_output=True, check=True).stdout.split()))
    except (OSError, subprocess.CalledProcessError):
        return ()


# ---- measuring


def measured(command: Sequence[str | Path], *, work: Path, env: dict[str, str] | None = None) -> Figures:
    """Runs a command and returns its figures. The command prints one JSON document with `seconds` and maybe `versions`.

    Pending writes are synced to disk first. The temporary files of the command go to `work`.
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
    printed = json.loads(output)
    versions = {"versions": printed["versions"]} if "versions" in printed else {}
    return {"wall_s": wall, "call_s": printed["seconds"], **spent(usage), **versions}


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


def write_anndata(source: str, store: str) -> Callable[[], Any]:
    """anndata alone: reads the file into memory and writes it as Zarr v3."""
    import anndata

    anndata.settings.zarr_write_format = 3
    return lambda: anndata.read_h5ad(source).write_zarr(store)


def write_annbatch(source: str, store: str, *, shuffle: bool, zarrs: bool) -> Callable[[], Any]:
    """annbatch's collection of one file. annbatch recommends the zarrs pipeline for local files."""
    import annbatch
    import numpy as np
    import zarr

    if zarrs:
        importlib.import_module("zarrs")  # here, so that the import is not timed
        zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    rng = np.random.default_rng(0)
    return lambda: annbatch.DatasetCollection(store).add_adatas([source], shuffle=shuffle, rng=rng)


def write_slafdb(source: str, store: str) -> Callable[[], Any]:
    """SLAF's converter with its defaults."""
    from slaf.data import SLAFConverter

    return lambda: SLAFConverter().convert(source, store)


def write(conversion: str, source: str, store: str) -> dict[str, Any]:
    """Runs one conversion: `anndata`, `slafdb`, or `annbatch` with optional suffixes `-shuffled` and `-zarrs`."""
    name, *parts = conversion.split("-")
    if name == "anndata" and not parts:
        convert = write_anndata(source, store)
    elif name == "slafdb" and not parts:
        convert = write_slafdb(source, store)
    elif name == "annbatch" and set(parts) <= {"shuffled", "zarrs"}:
        convert = write_annbatch(source, store, shuffle="shuffled" in parts, zarrs="zarrs" in parts)
    else:
        sys.exit(f"unknown conversion {conversion!r}: give anndata, slafdb, or annbatch with -shuffled and -zarrs")
    began = time.perf_counter()
    convert()
    seconds = time.perf_counter() - began
    packages = [name, "anndata", "zarr", *(["zarrs"] if "zarrs" in parts else [])]
    return {"seconds": seconds, "versions": {package: importlib.metadata.version(package) for package in packages}}


def main() -> None:
    """Creates an environment, or converts in the current one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="create an environment and print the path of its Python")
    make.add_argument("name", choices=RIVALS)
    add_options(make)
    conversion = commands.add_parser("write", help="convert with the current Python")
    for argument in ("what", "source", "store"):
        conversion.add_argument(argument)
    options = parser.parse_args()
    if options.command == "make":
        print(environment(options.name, python=options.python, directory=options.environments))
    else:
        print(json.dumps(write(options.what, options.source, options.store)))


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of every benchmark that needs a rival."""
    parser.add_argument("--python", help="Python interpreter for the rivals' environments (default: one on PATH)")
    parser.add_argument(
        "--environments", type=Path, help=f"directory of the environments (default: {default_directory()})"
    )


if __name__ == "__main__":
    main()
