"""The installation: versions, whether each library can be imported, and what torch knows about GPUs.

Libraries are imported in a child process, because one that does not fit the processor ends the process that imports it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zloader.common.messages import reason_of, size
from zloader.common.version import __version__
from zloader.insight.findings import Finding

_IMPORT_S = 180  # an environment on a network disk may take a minute
_SETTINGS = re.compile("(ZLOADER|NUMBA|TENSORSTORE|CUDA_VISIBLE|OMP_NUM|MKL_NUM|FSSPEC|RANK|WORLD_SIZE|LOCAL_).*")
_CHILD = """
import importlib, json, sys
def say(**found):
    print(json.dumps(found), flush=True)
for name in sys.argv[1:]:
    say(name=name)
    try:
        importlib.import_module(name)
    except BaseException as error:
        say(name=name, error=f"{type(error).__name__}: {error}")
torch = sys.modules.get("torch")
if torch is not None:
    gpus = []
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            of = torch.cuda.get_device_properties(number)
            gpus.append([of.name, of.total_memory])
    mps = getattr(torch.backends, "mps", None)
    say(gpus=gpus, cuda=torch.version.cuda or torch.version.hip, mps=bool(mps and mps.is_available()))
say(done=True)
"""


def about_python() -> Iterator[Finding]:
    """The versions of zloader, of Python and of the system."""
    where = Path(__file__).parents[1]
    yield Finding(part="versions", name="zloader", value=f"{__version__}, in {where}")
    installed = _version("zloader")
    if installed != __version__:
        yield Finding(
            part="versions",
            name="zloader installed",
            value=installed or "not installed: imported from a directory",
            state="advice",
            advice=f"another version than the one that runs: pip install {where.parent}, or unset PYTHONPATH",
        )
    threads = "" if getattr(sys, "_is_gil_enabled", lambda: True)() else ", without the GIL"
    yield Finding(part="versions", name="Python", value=f"{platform.python_version()}{threads}, {sys.executable}")
    libc = " ".join(platform.libc_ver()).strip()
    yield Finding(part="versions", name="system", value=f"{platform.platform()}{f', {libc}' * bool(libc)}")
    names = sorted(name for name in os.environ if _SETTINGS.fullmatch(name))
    yield Finding(part="versions", name="environment variables", value=", ".join(names) or "none that matter")
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        yield Finding(
            part="versions",
            name="NUMBA_DISABLE_JIT",
            value="set",
            state="advice",
            advice="loops are interpreted, some hundred times slower: unset NUMBA_DISABLE_JIT",
        )


def about_libraries() -> Iterator[Finding]:
    """The version of each library that zloader requires, and whether it can be imported. Then those of extras."""
    required, extras = _requirements()
    errors = _imported()["errors"]
    for name, specifier in required.items():
        version, error = _version(name), errors.get(_module(name))
        yield _about_library(name, version, specifier, error)
    found = sorted(f"{name} {version}" for name in extras if (version := _version(name)))
    yield Finding(part="versions", name="of extras", value=", ".join(found) or "none")


def _about_library(name: str, version: str | None, specifier: Any, error: str | None) -> Finding:
    broken = functools.partial(Finding, part="versions", name=name, state="broken")
    if version is None:
        return broken(value="missing", advice=f'pip install "{name}{specifier}"')
    if not specifier.contains(version, prereleases=True):
        return broken(value=version, advice=f'zloader needs {name}{specifier}: pip install "{name}{specifier}"')
    if error is not None:
        return broken(
            value=f"{version}, cannot be imported: {error}",
            advice=f"install it anew: pip install --force-reinstall --no-deps {name}=={version}",
        )
    return Finding(part="versions", name=name, value=version)


def about_gpu() -> Iterator[Finding]:
    """The GPUs that torch sees, and whether there are some that it does not."""
    torch = _imported()["torch"]
    if torch is None:
        yield Finding(part="GPU", name="torch", value="not known, because torch cannot be imported", state="unknown")
        return
    for number, (name, n_bytes) in enumerate(torch["gpus"]):
        yield Finding(part="GPU", name=f"cuda:{number}", value=f"{name}, {size(n_bytes)}")
    if torch["mps"]:
        yield Finding(part="GPU", name="mps", value="available")
    if torch["gpus"] or torch["mps"]:
        return
    drivers = _driver()
    if drivers is None:
        yield Finding(part="GPU", name="GPU", value="none")
    elif torch["cuda"] is None:
        advice = "this torch is built for the processor only: install one for CUDA, as pytorch.org says"
        yield Finding(part="GPU", name="GPU", value=f"{drivers}; torch sees none", state="advice", advice=advice)
    else:
        advice = f"torch is built for CUDA {torch['cuda']}: check the driver's version and CUDA_VISIBLE_DEVICES"
        yield Finding(part="GPU", name="GPU", value=f"{drivers}; torch sees none", state="advice", advice=advice)


def _driver() -> str | None:
    """What nvidia-smi says about GPUs; None without it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi fails: {reason_of(error)}"
    return "; ".join(done.stdout.split("\n")).strip("; ") or f"nvidia-smi fails: {done.stderr.strip():.200}"


def _requirements() -> tuple[dict[str, Any], list[str]]:
    """The specifiers of the libraries that zloader requires here, by name, and the names of those that extras add."""
    from packaging.requirements import Requirement

    every = [Requirement(each) for each in importlib.metadata.requires("zloader") or []]
    optional = [each for each in every if each.marker is not None and "extra" in str(each.marker)]
    required = [each for each in every if each not in optional and (each.marker is None or each.marker.evaluate())]
    extras = {each.name for each in optional} - {each.name for each in required} - {"zloader"}
    return {each.name: each.specifier for each in required}, sorted(extras)


@functools.cache
def _imported() -> dict[str, Any]:
    """What importing the required libraries in a child process has shown: errors by module, and torch's devices.

    Those that require the fewest others come first, so that the one that ends the process is named, and not another one
    that imports it.
    """
    names = [_module(name) for name in sorted(_requirements()[0], key=_n_requirements)]
    errors: dict[str, str] = {}
    torch, last, done = None, "", False
    child = [sys.executable, "-c", _CHILD, *names]
    try:
        ran = subprocess.run(child, capture_output=True, text=True, timeout=_IMPORT_S, check=False)
        output, how = ran.stdout, f"it ends the process with status {ran.returncode}"
    except subprocess.TimeoutExpired as error:
        output, how = _text(error.stdout), f"it takes longer than {_IMPORT_S} s"
    for line in output.splitlines():
        said = _said(line)
        last, done = said.get("name", last), done or "done" in said
        if "error" in said:
            errors[last] = said["error"]
        elif "gpus" in said:
            torch = said
    if not done and last:
        errors.setdefault(last, how)
    return {"errors": errors, "torch": torch}


def _said(line: str) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except ValueError:  # a library printed something
        return {}
    return said if isinstance(said, dict) else {}


def _text(output: Any) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _n_requirements(name: str) -> int:
    try:
        return len(importlib.metadata.requires(name) or [])
    except importlib.metadata.PackageNotFoundError:
        return 0


def _module(name: str) -> str:
    return name.replace("-", "_")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
