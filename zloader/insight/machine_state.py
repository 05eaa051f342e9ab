"""The machine: cores, memory, and the limits of the container or the batch job that the process runs in."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from zloader.common import machine
from zloader.common.messages import size
from zloader.common.options import FetchOptions
from zloader.insight.findings import Finding

_LEAST_BYTES = 4 << 30
_LEAST_FILES = 1024
_LEAST_SHARED_BYTES = 1 << 30
_LEAST_TEMPORARY_BYTES = 1 << 30
_SHARED = Path("/dev/shm")


def about_cores() -> Iterator[Finding]:
    """Cores that the process may use, and a quota of their time."""
    usable, there = machine.available_cores(), os.cpu_count() or 1
    quota = machine.core_quota()
    value = f"{usable}" + (f" of {there}" if usable < there else "")
    if quota is None or quota >= usable:
        yield Finding(part="machine", name="cores", value=value)
        return
    yield Finding(
        part="machine",
        name="cores",
        value=f"{value}, with a quota of {quota:g}",
        state="advice",
        advice=f"the container has the time of {quota:g} cores: set zl.FetchOptions(threads={max(1, round(quota))})",
    )


def about_memory() -> Iterator[Finding]:
    """Memory of the machine, the least limit above the process, and what a Loader takes of it."""
    there, usable = machine.physical_bytes(), machine.available_bytes()
    limited = f", limited to {size(usable)}" if usable < there else ""
    few = usable < _LEAST_BYTES
    yield Finding(
        part="machine",
        name="memory",
        value=f"{size(there)}{limited}; a Loader takes up to {size(FetchOptions().memory)}",
        state="advice" if few else "good",
        advice=f"less than {size(_LEAST_BYTES)}, of which the libraries take 0.4 GB: give less to other programs" * few,
    )
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        yield Finding(
            part="machine",
            name="address space",
            value=f"limited to {size(limit)}",
            state="advice",
            advice="mirrors are mapped into it, and may not fit: ulimit -v unlimited",
        )


def about_files() -> Iterator[Finding]:
    """Open files, shared memory for DataLoader workers, and the directory of temporary files."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= files < _LEAST_FILES
    raisable = most > files or most == resource.RLIM_INFINITY
    remedy = f"ulimit -n {_LEAST_FILES if most < 0 else most}" if raisable else "ask for a higher hard limit"
    yield Finding(
        part="machine",
        name="open files",
        value=f"{files:,}, at most {most:,}",
        state="advice" if few else "good",
        advice=f"mirrors of large stores need more: {remedy}" * few,
    )
    if _SHARED.is_dir():
        yield _about_space("shared memory", _SHARED, _LEAST_SHARED_BYTES, "start the container with --shm-size=8g")
    temporary = Path(tempfile.gettempdir())  # raises an error if there is none that can be written
    yield _about_space("temporary files", temporary, _LEAST_TEMPORARY_BYTES, "set TMPDIR to a larger disk")


def _about_space(name: str, directory: Path, least: int, remedy: str) -> Finding:
    free = shutil.disk_usage(directory).free
    few = free < least
    what = "DataLoader workers send minibatches through it" if directory == _SHARED else "shuffling needs more"
    return Finding(
        part="machine",
        name=name,
        value=f"{size(free)} free in {directory}",
        state="advice" if few else "good",
        advice=f"{what}: {remedy}" * few,
    )


def about_compiled() -> Iterator[Finding]:
    """Whether compiled loops are kept on disk. Otherwise every process compiles them anew, for a minute."""
    beside, chosen = Path(__file__).parent, os.environ.get("NUMBA_CACHE_DIR")
    own = Path(chosen) if chosen else beside / "__pycache__"
    candidates = [own] if chosen else [own, Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba"]
    kept = next((each for each in candidates if _can_be_written(each)), None)
    yield Finding(
        part="machine",
        name="compiled loops",
        value="compiled anew by every process" if kept is None else f"kept in {kept}",
        state="advice" if kept is None else "good",
        advice="set NUMBA_CACHE_DIR to a directory that can be written" if kept is None else "",
    )


def _can_be_written(path: Path) -> bool:
    """Whether files can be made in a directory, or in the nearest one above it that exists."""
    nearest = next((each for each in (path, *path.parents) if os.path.exists(each)), Path("/"))  # noqa: PTH110
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return True
    except OSError:
        return False
