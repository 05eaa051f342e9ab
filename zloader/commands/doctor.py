"""`zloader doctor`: what a maintainer asks for first, in one command. It changes nothing and prints no secrets.

Each check yields findings. It imports what it needs itself, because a library may be broken, and what it raises becomes
a finding, so that it hides no other. A store is read in a thread that is left behind after a deadline, because some
clients try for minutes to connect.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import importlib.metadata
import itertools
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.text import Text

from zloader.commands import output
from zloader.commands.command import KEYS, app, takes_flags
from zloader.commands.flags import Access, Json
from zloader.common import machine
from zloader.common.errors import ZloaderError
from zloader.common.messages import reason_of, size, without_users
from zloader.common.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"good": ("ok", "green"), "advice": ("!", "yellow"), "broken": ("FAULT", "bold red"), "unknown": ("?", "dim")}
_SECRET_NAME = re.compile("SECRET|TOKEN|PASSWORD|ACCESS_KEY|ACCOUNT_KEY|CONNECTION_STRING", re.IGNORECASE)
_LEAST_SECRET = 6  # characters
_SETTINGS = re.compile("(ZLOADER|NUMBA|TENSORSTORE|CUDA_VISIBLE|OMP_NUM|MKL_NUM|FSSPEC|RANK|WORLD_SIZE|LOCAL_).*")
_LEAST_BYTES, _LEAST_FILES, _LEAST_FREE_BYTES = 4 << 30, 1024, 1 << 30
_WRITTEN_BYTES, _SLOW_WRITE, _SLOW_READ = 64 << 20, 100e6, 50e6  # bytes, bytes/s
_OPEN_S, _READ_S = 60.0, 20.0

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class DoctorFlags:
    """The flags of `doctor`."""

    url: Annotated[
        str | None,
        typer.Argument(metavar="[URL]", help="Store that you cannot open, or that is slow.", show_default=False),
    ] = None
    cache: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Cache directory. None is made.", show_default="none")
    ] = None
    access: Access = field(default_factory=Access)
    as_json: Json = False


@dataclass(frozen=True)
class Finding:
    """One fact about this installation.

    `advice` says what to do, and is empty for good facts. `state` is "good", "advice" (it works, but could be better),
    "broken" (something will fail), or "unknown".
    """

    name: str
    value: str
    advice: str = ""
    state: str = ""
    part: str = ""


Check = Callable[[], Iterator[Finding]]


@app.command(epilog=KEYS)
@takes_flags
def doctor(flags: DoctorFlags) -> None:
    """Check versions, the machine, the GPU, a cache directory and the way to a store, and say what to change.

    Reads the store for two seconds. Copy the output into a bug report: it has the names of credentials, but no secrets.
    Exits with status 1 if something is broken.
    """
    checks: dict[str, Sequence[Check]] = {
        "versions": (about_python, about_libraries),
        "machine": (about_cores, about_memory, about_files, about_compiled),
        "GPU": (about_gpu,),
    }
    if (directory := flags.cache) is not None:
        checks["cache"] = (lambda: about_cache(directory),)
    if (url := flags.url) is not None:
        checks["store"] = (lambda: about_store(url, flags.access.storage_options),)
    with output.console(stderr=True).status("looking"):
        found = [finding for part, of_part in checks.items() for finding in gathered(part, of_part)]
    broken = [finding for finding in found if finding.state == "broken"]
    document: dict[str, Any] = {"ok": not broken, "findings": [asdict(finding) for finding in found]}
    output.print_result(document, lambda console: _show(console, found), as_json=flags.as_json)
    if broken:
        raise typer.Exit(1)


def gathered(part: str, checks: Sequence[Check]) -> Iterator[Finding]:
    """The findings of checks, one after another, without secrets. A check that fails is a finding, too."""
    for check in checks:
        try:
            for each in check():
                state = each.state or ("advice" if each.advice else "good")
                yield Finding(each.name, without_secrets(each.value), without_secrets(each.advice), state, part)
        except Exception as error:  # noqa: BLE001 - on a broken machine anything may fail, and the rest is of use
            why = without_secrets(f"not known: {type(error).__name__}: {reason_of(error)}")
            yield Finding(getattr(check, "__name__", "").removeprefix("about_"), why, state="unknown", part=part)


def _show(console: Console, found: Sequence[Finding]) -> None:
    for part, findings in itertools.groupby(found, lambda finding: finding.part):
        table = output.new_table("", part, "")
        table.columns[2].overflow = "fold"
        for finding in findings:
            mark, style = _STYLES[finding.state]
            table.add_row(Text(mark, style=style), finding.name, finding.value)
        console.print(table)
    advised = [finding for finding in found if finding.advice]
    console.print("what to change:" if advised else "nothing to change", style="bold")
    for finding in advised:
        console.print(f"- {finding.part}, {finding.name}: {finding.advice}")


def _broken(name: str, value: str, advice: str) -> Finding:
    return Finding(name, value, reason_of(ZloaderError(advice)), "broken")


def without_secrets(text: str) -> str:
    """A text without passwords in URLs, and without the values of environment variables that are named as secrets.

    Messages of other libraries may quote them.
    """
    secrets = [value for name, value in os.environ.items() if _SECRET_NAME.search(name) and len(value) >= _LEAST_SECRET]
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return without_users(text)


# ---- the installation and the machine


def about_python() -> Iterator[Finding]:
    """The versions of zloader, of Python and of the system."""
    yield Finding("zloader", f"{__version__}, in {Path(__file__).parents[1]}")
    yield Finding("Python", f"{platform.python_version()}, {sys.executable}")
    yield Finding("system", f"{platform.platform()}, {' '.join(platform.libc_ver()).strip()}")
    names = sorted(name for name in os.environ if _SETTINGS.fullmatch(name))
    slow = "unset NUMBA_DISABLE_JIT: loops are interpreted, some hundred times slower"
    interpreted = os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")
    yield Finding("environment variables", ", ".join(names) or "none that matter", slow * interpreted)


def about_libraries() -> Iterator[Finding]:
    """The version of each library that zloader requires, and whether it can be imported."""
    for requirement in importlib.metadata.requires("zloader") or []:
        wanted, _, marker = requirement.partition(";")
        if "extra ==" in marker or ("platform_machine" in marker and platform.machine() not in marker):
            continue
        name, least = re.split(r"\[.*\]|>=", f"{wanted.strip()}>=0")[:2]
        yield _about_library(name, least.split(",")[0])


def _about_library(name: str, least: str) -> Finding:
    install = f'pip install "{name}>={least}"'
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return _broken(name, "missing", install)
    if _numbers(version) < _numbers(least):
        return _broken(name, version, f"zloader needs {least} or newer: {install}")
    try:
        importlib.import_module(name.replace("-", "_"))
    except BaseException as error:  # noqa: BLE001 - a library that cannot be loaded may raise anything
        anew = f"install it anew: pip install --force-reinstall --no-deps {name}=={version}"
        return _broken(name, f"{version}, cannot be imported: {type(error).__name__}: {error}", anew)
    return Finding(name, version)


def _numbers(version: str) -> list[int]:
    """The first three numbers of a version, which decide whether it is new enough."""
    return [int(number) for number in [*re.findall(r"\d+", version), 0, 0, 0][:3]]


def about_gpu() -> Iterator[Finding]:
    """The GPUs that torch sees, or why it sees none."""
    import torch

    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        of = torch.cuda.get_device_properties(number)
        yield Finding(f"cuda:{number}", f"{of.name}, {size(of.total_memory)}")
    if torch.backends.mps.is_available():
        yield Finding("mps", "available")
    elif not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}: check nvidia-smi and CUDA_VISIBLE_DEVICES"
        alone = "this torch is built for the processor only: install one for CUDA, as pytorch.org says"
        there = shutil.which("nvidia-smi") is not None
        yield Finding("GPU", "none that torch sees", (built if torch.version.cuda else alone) * there)


def about_cores() -> Iterator[Finding]:
    """Cores that the process may use, and a quota of their time."""
    usable, quota = machine.available_cores(), machine.core_quota()
    few = quota is not None and quota < usable
    advice = f"the container has the time of {quota:g} cores: start it with more, or with fewer threads" if few else ""
    yield Finding("cores", f"{usable} of {os.cpu_count()}{f', with a quota of {quota:g}' * few}", advice)


def about_memory() -> Iterator[Finding]:
    """Memory of the machine, and the least limit above the process."""
    there, usable = machine.physical_bytes(), machine.available_bytes()
    limited = f", limited to {size(usable)}" * (usable < there)
    few = f"less than {size(_LEAST_BYTES)}, of which the libraries take 0.4 GB: give less to other programs"
    yield Finding("memory", f"{size(there)}{limited}", few * (usable < _LEAST_BYTES))
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        advice = "mirrors are mapped into it, and may not fit: ulimit -v unlimited"
        yield Finding("address space", f"limited to {size(limit)}", advice)


def about_files() -> Iterator[Finding]:
    """Open files, shared memory for DataLoader workers, and the directory of temporary files."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = f"mirrors of large stores need more: ulimit -n {_LEAST_FILES}, or ask for a higher hard limit"
    yield Finding("open files", f"{files:,}, at most {most:,}", remedy * (0 <= files < _LEAST_FILES))
    places = {
        "shared memory": ("/dev/shm", "DataLoader workers need more: start the container with --shm-size=8g"),
        "temporary files": (tempfile.gettempdir(), "shuffling needs more: set TMPDIR to a larger disk"),
    }
    for name, (directory, advice) in places.items():
        if Path(directory).is_dir():
            free = shutil.disk_usage(directory).free
            yield Finding(name, f"{size(free)} free in {directory}", advice * (free < _LEAST_FREE_BYTES))


def about_compiled() -> Iterator[Finding]:
    """Whether compiled loops are kept on disk. Otherwise every process compiles them anew, for a minute."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    own = [Path(__file__).parent / "__pycache__", Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")]
    for directory in [Path(chosen)] if chosen else own:
        with contextlib.suppress(OSError):
            nearest = next(each for each in (directory, *directory.parents) if each.exists())
            tempfile.TemporaryFile(dir=nearest).close()
            yield Finding("compiled loops", f"kept in {directory}")
            return
    advice = "set NUMBA_CACHE_DIR to a directory that can be written"
    yield Finding("compiled loops", "compiled anew by every process", advice)


# ---- a cache and a store


def about_cache(directory: Path) -> Iterator[Finding]:
    """Whether a cache can be kept in a directory, and how fast its disk is. Creates no cache."""
    from zloader.caching.directory import require_local, require_safe

    try:
        place = directory.expanduser().absolute()
        require_local(place)
        nearest = next(each for each in (place, *place.parents) if each.is_dir())
        yield Finding("place", f"{place}{', not made yet' * (nearest != place)}")
        if place.exists():
            require_safe(place)
            if not place.is_dir():
                raise NotADirectoryError(f"{place} is a file")
    except (ZloaderError, OSError, RuntimeError) as error:
        yield _broken("place", str(directory), reason_of(error))
        return
    space = shutil.disk_usage(nearest)
    few = "a mirror takes about 4 bytes per value: free some space, or use another disk"
    yield Finding("space", f"{size(space.free)} free of {size(space.total)}", few * (space.free < space.total / 20))
    try:
        speed = _write_bytes_per_s(nearest)
    except OSError as error:
        yield _broken("writing", reason_of(error), "use a local directory that you may write to")
        return
    slow = "the first epoch cannot be faster than this: a local NVMe disk writes 1 GB/s and more"
    yield Finding("writing", f"{size(speed)}/s, and locks work", slow * (speed < _SLOW_WRITE))


def _write_bytes_per_s(directory: Path) -> float:
    """Writes a file of 64 MiB, takes the locks of a mirror on it, and deletes it."""
    with tempfile.TemporaryFile(dir=directory) as file:
        for lock in (fcntl.flock, fcntl.lockf):
            lock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        began_s = time.perf_counter()
        file.write(os.urandom(_WRITTEN_BYTES))
        file.flush()
        os.fsync(file.fileno())
        return _WRITTEN_BYTES / max(1e-9, time.perf_counter() - began_s)


def about_store(url: str, storage_options: Mapping[str, Any]) -> Iterator[Finding]:
    """The findings for the store at a URL, which is opened and read for two seconds. Its rows are not checked."""
    from zloader.access.location import location_of
    from zloader.common.options import FetchOptions
    from zloader.dataset.dataset import open_dataset
    from zloader.insight.link import link_bytes_per_s

    step = "URL"
    try:
        location = location_of(url, storage_options)
        yield Finding(step, location.url)
        step = "credentials"
        yield Finding(step, _within(_OPEN_S, lambda: location.kind.credentials()))
        proxies = sorted(name for name in os.environ if name.lower().endswith("_proxy") and os.environ[name])
        if proxies and location.scheme != "file":
            yield Finding("proxies", ", ".join(proxies))
        step, began_s = "reading", time.perf_counter()
        dataset = _within(_OPEN_S, lambda: open_dataset(url, storage_options=storage_options))
        opened = f"opened in {time.perf_counter() - began_s:.1f} s"
        yield Finding("content", f"{dataset.n_obs:,} rows x {dataset.n_vars:,} genes, {opened}")
        if location.scheme == "file" or not dataset.matrices.names:
            return
        x = dataset.matrices.names[0]
        speed = _within(_READ_S, lambda: link_bytes_per_s(dataset, x=x, options=FetchOptions()))
    except Exception as error:  # noqa: BLE001 - whatever a client raises, the store cannot be read
        yield _broken(step, "failed", str(error) or type(error).__name__)
        return
    slow = "the first epoch reads at this speed: train in the region of the bucket, and keep a cache"
    if speed is None:
        yield Finding("speed", "not measured: too little to read", state="unknown")
    else:
        yield Finding("speed", f"{size(speed)}/s", slow * (speed < _SLOW_READ))


def _within(seconds: float, function: Callable[[], Result]) -> Result:
    """The result of a function. Raises TimeoutError if it takes longer, and leaves its thread behind."""
    from zloader.common.concurrent_calls import fulfil

    future: Future[Result] = Future()
    threading.Thread(target=fulfil, args=(future, function), daemon=True, name="zloader-doctor").start()
    if not wait([future], timeout=seconds).done:
        raise TimeoutError(f"no answer within {seconds:.0f} s: check the endpoint, the network, proxies and firewalls")
    return future.result()
