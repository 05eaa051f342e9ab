"""Environments with zloader installed from a wheel, away from this checkout.

Nothing is downloaded: an environment gets links to the files of the distributions that the wheel requires, as they are
installed here, and to no others. So a requirement that the wheel does not name is missing in it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers import PATIENCE_S
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Installed:
    """A virtual environment in a directory."""

    path: Path

    def run(self, *words: Any, cwd: Path) -> str:
        """What a program of the environment prints. It sees neither this checkout nor this environment."""
        program, *arguments = map(str, words)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))}
        environment["PATH"] = f"{self.path / 'bin'}{os.pathsep}{environment['PATH']}"
        command = [str(self.path / "bin" / program), *arguments]
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    @property
    def site_packages(self) -> Path:
        paths = sysconfig.get_paths(vars={"base": str(self.path), "platbase": str(self.path)})
        return Path(paths["purelib"])


def install(wheel: Path, extras: Iterable[str], path: Path) -> Installed:
    """Makes an environment with pip, the wheel, and what its metadata require with these extras."""
    venv.create(path, with_pip=True)
    made = Installed(path)
    (found,) = importlib.metadata.distributions(path=[str(wheel)])
    for name in sorted(required(found, extras)):
        _link(importlib.metadata.distribution(name), made.site_packages)
    made.run("python", "-m", "pip", "install", "--no-index", "--no-build-isolation", wheel, cwd=path)
    return made


def required(wheel: importlib.metadata.Distribution, extras: Iterable[str]) -> set[str]:
    """The names of all distributions that are installed here and that the wheel requires, directly or not."""
    found: set[str] = set()
    ahead = [(wheel, frozenset(extras))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while ahead:
        distribution, wanted = ahead.pop()
        for each in _requirements(distribution, wanted):
            name, inner = _plain(each.name), frozenset(each.extras)
            if (name, inner) in seen:
                continue
            seen.add((name, inner))
            if name == "zloader":
                ahead.append((wheel, inner))
            elif (there := _installed(name)) is not None:
                found.add(name)
                ahead.append((there, inner))
    return found


def _requirements(distribution: importlib.metadata.Distribution, extras: frozenset[str]) -> Iterator[Requirement]:
    for text in distribution.requires or []:
        each = Requirement(text)
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield each


@functools.cache
def _installed(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _plain(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def _link(distribution: importlib.metadata.Distribution, site_packages: Path) -> None:
    for file in distribution.files or []:
        if "__pycache__" in file.parts:
            continue
        source, there = Path(str(file.locate())).resolve(), site_packages / file
        there = Path(os.path.normpath(there))  # of programs: ../../../bin/NAME
        if not source.is_file() or there.exists():
            continue
        there.parent.mkdir(parents=True, exist_ok=True)
        if there.is_relative_to(site_packages):
            there.symlink_to(source)
        else:
            there.write_bytes(_of_this_interpreter(source.read_bytes(), site_packages))
            there.chmod(0o755)


def _of_this_interpreter(program: bytes, site_packages: Path) -> bytes:
    """A program of this environment, to be run by another one."""
    first, line, rest = program.partition(b"\n")
    if not first.startswith(b"#!") or b"python" not in first:
        return program
    return b"#!" + os.fsencode(site_packages.parents[2] / "bin" / Path(sys.executable).name) + line + rest
