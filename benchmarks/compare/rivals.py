"""The other tools in the comparison: an environment for each, their conversions, and the code that times them.

    python -m benchmarks.compare.rivals make annbatch [--python python3.12] [--environments DIR]
    python -m benchmarks.compare.rivals write annbatch-shuffled-zarrs FILE.h5ad STORE.zarr
    python -m benchmarks.compare.rivals write slafdb FILE.h5ad STORE.slaf

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
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare import peers
from benchmarks.compare.peers import Peer
from benchmarks.harness.measuring import die_with_parent, last_lines

_FRESH_S = 30 * 24 * 3600  # after this time an environment is rebuilt with the newest versions


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


def installed(name: str, directory: Path | None = None) -> Path:
    """A Python in which a rival is installed: of an environment that was made before, or this one.

    Raises EnvironmentFailed if there is none; nothing is installed.
    """
    rival = peers.peer(name)
    home = (directory or default_directory()).expanduser().absolute() / name
    if (home / "made_of.json").exists():
        return home / "bin" / "python"
    needed = [re.split(r"[^\w.-]", requirement)[0] for requirement in rival.requirements]
    if missing := sorted(set(needed) - set(versions(needed))):
        raise EnvironmentFailed(
            f"{', '.join(missing)} not installed. To install: pip install {shlex.join(rival.requirements)}. Or, for an "
            f"environment of its own: python -m benchmarks.compare.rivals make {name}"
        )
    return Path(sys.executable)


class EnvironmentFailed(SystemExit):
    """An environment could not be made. A script that does not catch it ends with the message."""


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
