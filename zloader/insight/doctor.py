"""What `zloader doctor` finds: single facts, whether they are a fault, and what to do about them.

A part of zloader that imports libraries is imported by the check that needs it, because a library may be broken. The
libraries themselves are imported in a child process, because one that does not fit the processor ends the process that
imports it. A store is read in a thread that is left behind after a deadline, because some clients try for minutes to
connect.
"""

from __future__ import annotations

import fcntl
import functools
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from zloader.caching.directory import require_local, require_safe
from zloader.common import machine
from zloader.common.errors import OptionError, ZloaderError
from zloader.common.file_systems import has_stable_inodes
from zloader.common.messages import reason_of, size, without_users
from zloader.common.version import __version__

_SECRET_NAME = re.compile("SECRET|TOKEN|PASSWORD|ACCESS_KEY|ACCOUNT_KEY|CONNECTION_STRING", re.IGNORECASE)
_LEAST_SECRET = 6  # characters
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
_LEAST_BYTES = 4 << 30
_LEAST_FILES = 1024
_LEAST_FREE_BYTES = 1 << 30
_SHARED = Path("/dev/shm")
_WRITTEN_BYTES, _PIECE_BYTES = 64 << 20, 4 << 20
_MOST_WRITE_S = 2.0
_SLOW_WRITE_BYTES_PER_S = 100e6
_LEAST_FREE = 0.05  # of the disk
_OPEN_S, _READ_S = 60.0, 20.0
_MEASURED_S = 2.0
_SLOW_READ_BYTES_PER_S = 50e6
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fact about this installation. `part` is the part that it is about, which `gathered` sets.

    `state` is "good", "advice" (it works, but could be better), "broken" (something will fail), or "unknown" (the
    system does not tell). `advice` says what to do, and is empty for good facts.
    """

    name: str
    value: str
    state: Literal["good", "advice", "broken", "unknown"] = "good"
    advice: str = ""
    part: str = ""


Check = Callable[[], Iterable[Finding]]


def gathered(part: str, checks: Mapping[str, Check]) -> Iterator[Finding]:
    """The findings of checks, one after another, without secrets.

    A check that fails becomes a finding of an unknown state.
    """
    for name, check in checks.items():
        try:
            for finding in check():
                value, advice = without_secrets(finding.value), without_secrets(finding.advice)
                yield replace(finding, part=part, value=value, advice=advice)
        except Exception as error:  # noqa: BLE001 - on a broken machine anything may fail, and the rest is of use
            why = without_secrets(f"not known: {type(error).__name__}: {reason_of(error)}")
            yield Finding(part=part, name=name, value=why, state="unknown")


def _advised(name: str, value: str, advice: str) -> Finding:
    """A fact that is good if there is no advice."""
    return Finding(name=name, value=value, state="advice" if advice else "good", advice=advice)


def _broken(name: str, value: str, advice: str) -> Finding:
    return Finding(name=name, value=value, state="broken", advice=reason_of(ZloaderError(advice)))


def without_secrets(text: str) -> str:
    """A text without passwords in URLs, and without the values of environment variables that are named as secrets.

    Messages of other libraries may quote them.
    """
    secrets = [value for name, value in os.environ.items() if _SECRET_NAME.search(name) and len(value) >= _LEAST_SECRET]
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return without_users(text)


# ---- the installation


def about_python() -> Iterator[Finding]:
    """The versions of zloader, of Python and of the system."""
    where = Path(__file__).parents[1]
    yield Finding(name="zloader", value=f"{__version__}, in {where}")
    installed = _version("zloader")
    if installed != __version__:
        yield _advised(
            "zloader installed",
            installed or "not installed: imported from a directory",
            f"another version than the one that runs: pip install {where.parent}, or unset PYTHONPATH",
        )
    threads = "" if getattr(sys, "_is_gil_enabled", lambda: True)() else ", without the GIL"
    yield Finding(name="Python", value=f"{platform.python_version()}{threads}, {sys.executable}")
    libc = " ".join(platform.libc_ver()).strip()
    yield Finding(name="system", value=f"{platform.platform()}{f', {libc}' * bool(libc)}")
    names = sorted(name for name in os.environ if _SETTINGS.fullmatch(name))
    yield Finding(name="environment variables", value=", ".join(names) or "none that matter")
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        yield _advised(
            "NUMBA_DISABLE_JIT", "set", "loops are interpreted, some hundred times slower: unset NUMBA_DISABLE_JIT"
        )


def about_libraries() -> Iterator[Finding]:
    """The version of each library that zloader requires, and whether it can be imported. Then those of extras."""
    required, extras = _requirements()
    errors = _imported()["errors"]
    for name, least in required.items():
        yield _about_library(name, _version(name), least, errors.get(_module(name)))
    found = sorted(f"{name} {version}" for name in extras if (version := _version(name)))
    yield Finding(name="of extras", value=", ".join(found) or "none")


def _about_library(name: str, version: str | None, least: str, error: str | None) -> Finding:
    wanted = f"{name}>={least}"
    if version is None:
        return _broken(name, "missing", f'pip install "{wanted}"')
    if _numbers(version) < _numbers(least):
        return _broken(name, version, f'zloader needs {wanted}: pip install "{wanted}"')
    if error is not None:
        anew = f"install it anew: pip install --force-reinstall --no-deps {name}=={version}"
        return _broken(name, f"{version}, cannot be imported: {error}", anew)
    return Finding(name=name, value=version)


def _numbers(version: str) -> list[int]:
    """The first three numbers of a version, which decide whether it is new enough."""
    return [int(number) for number in [*re.findall(r"\d+", version), 0, 0, 0][:3]]


def about_gpu() -> Iterator[Finding]:
    """The GPUs that torch sees, and whether there are some that it does not."""
    torch = _imported()["torch"]
    if torch is None:
        yield Finding(name="torch", value="not known, because torch cannot be imported", state="unknown")
        return
    for number, (name, n_bytes) in enumerate(torch["gpus"]):
        yield Finding(name=f"cuda:{number}", value=f"{name}, {size(n_bytes)}")
    if torch["mps"]:
        yield Finding(name="mps", value="available")
    if torch["gpus"] or torch["mps"]:
        return
    drivers = _driver()
    if drivers is None:
        yield Finding(name="GPU", value="none")
        return
    advice = f"torch is built for CUDA {torch['cuda']}: check the driver's version and CUDA_VISIBLE_DEVICES"
    if torch["cuda"] is None:
        advice = "this torch is built for the processor only: install one for CUDA, as pytorch.org says"
    yield _advised("GPU", f"{drivers}; torch sees none", advice)


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


def _requirements() -> tuple[dict[str, str], list[str]]:
    """The least versions of the libraries that zloader requires here, by name, and the names that extras add.

    A requirement is like `isal>=1.6; platform_machine in 'x86_64 arm64'`, or `ray>=2.60; extra == 'ray'`.
    """
    required, extras = {}, set()
    for each in importlib.metadata.requires("zloader") or []:
        wanted, _, marker = each.partition(";")
        name, least = re.split(r"\[.*\]|>=", f"{wanted.strip()}>=0")[:2]
        if "extra ==" in marker:
            extras.add(name)
        elif "platform_machine" not in marker or platform.machine() in marker:
            required[name] = least
    return required, sorted(extras - {*required, "zloader"})


@functools.cache
def _imported() -> dict[str, Any]:
    """What importing the required libraries in a child process has shown: errors by module, and torch's devices.

    Those that require the fewest others come first, so that the one that ends the process is named, and not another one
    that imports it.
    """
    needs = {name: len(importlib.metadata.requires(name) or []) if _version(name) else 0 for name in _requirements()[0]}
    names = [_module(name) for name in sorted(needs, key=needs.__getitem__)]
    errors: dict[str, str] = {}
    torch, last, done = None, "", False
    child = [sys.executable, "-c", _CHILD, *names]
    try:
        ran = subprocess.run(child, capture_output=True, timeout=_IMPORT_S, check=False)
        output, how = ran.stdout, f"it ends the process with status {ran.returncode}"
    except subprocess.TimeoutExpired as error:
        output, how = error.stdout or b"", f"it takes longer than {_IMPORT_S} s"
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


def _said(line: bytes) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except ValueError:  # a library printed something
        return {}
    return said if isinstance(said, dict) else {}


def _module(name: str) -> str:
    return name.replace("-", "_")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# ---- the machine


def about_cores() -> Iterator[Finding]:
    """Cores that the process may use, and a quota of their time."""
    usable, there = machine.available_cores(), os.cpu_count() or 1
    quota = machine.core_quota()
    value, advice = f"{usable}" + (f" of {there}" if usable < there else ""), ""
    if quota is not None and quota < usable:
        value += f", with a quota of {quota:g}"
        advice = f"the container has the time of {quota:g} cores: set zl.FetchOptions(threads={max(1, round(quota))})"
    yield _advised("cores", value, advice)


def about_memory() -> Iterator[Finding]:
    """Memory of the machine, the least limit above the process, and what a Loader takes of it."""
    from zloader.common.options import FetchOptions

    there, usable = machine.physical_bytes(), machine.available_bytes()
    limited = f", limited to {size(usable)}" if usable < there else ""
    few = usable < _LEAST_BYTES
    yield _advised(
        "memory",
        f"{size(there)}{limited}; a Loader takes up to {size(FetchOptions().memory)}",
        f"less than {size(_LEAST_BYTES)}, of which the libraries take 0.4 GB: give less to other programs" * few,
    )
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        yield _advised(
            "address space",
            f"limited to {size(limit)}",
            "mirrors are mapped into it, and may not fit: ulimit -v unlimited",
        )


def about_files() -> Iterator[Finding]:
    """Open files, shared memory for DataLoader workers, and the directory of temporary files."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= files < _LEAST_FILES
    raisable = most > files or most == resource.RLIM_INFINITY
    remedy = f"ulimit -n {_LEAST_FILES if most < 0 else most}" if raisable else "ask for a higher hard limit"
    yield _advised("open files", f"{files:,}, at most {most:,}", f"mirrors of large stores need more: {remedy}" * few)
    if _SHARED.is_dir():
        advice = "DataLoader workers send minibatches through it: start the container with --shm-size=8g"
        yield _about_space("shared memory", _SHARED, advice)
    temporary = Path(tempfile.gettempdir())  # raises an error if there is none that can be written
    yield _about_space("temporary files", temporary, "shuffling needs more: set TMPDIR to a larger disk")


def _about_space(name: str, directory: Path, advice: str) -> Finding:
    free = shutil.disk_usage(directory).free
    return _advised(name, f"{size(free)} free in {directory}", advice * (free < _LEAST_FREE_BYTES))


def about_compiled() -> Iterator[Finding]:
    """Whether compiled loops are kept on disk. Otherwise every process compiles them anew, for a minute."""
    beside, chosen = Path(__file__).parent, os.environ.get("NUMBA_CACHE_DIR")
    own = Path(chosen) if chosen else beside / "__pycache__"
    candidates = [own] if chosen else [own, Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba"]
    kept = next((each for each in candidates if _can_be_written(each)), None)
    yield _advised(
        "compiled loops",
        "compiled anew by every process" if kept is None else f"kept in {kept}",
        "set NUMBA_CACHE_DIR to a directory that can be written" if kept is None else "",
    )


def _can_be_written(path: Path) -> bool:
    """Whether files can be made in a directory, or in the nearest one above it that exists."""
    nearest = next((each for each in (path, *path.parents) if os.path.exists(each)), Path("/"))  # noqa: PTH110
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return True
    except OSError:
        return False


# ---- a cache


def about_cache(directory: Path) -> Iterator[Finding]:
    """Whether the cache of a directory can be kept, and what its disk is like. Creates no cache."""
    try:
        place = directory.expanduser().absolute()
        require_local(place)
        nearest = next(each for each in (place, *place.parents) if each.is_dir())
    except (OptionError, OSError, RuntimeError) as error:
        yield _broken("place", str(directory), reason_of(error))
        return
    yield Finding(name="place", value=f"{place}{'' if nearest == place else ', not made yet'}")
    yield _about_trust(place)
    yield from _about_disk(nearest)
    yield from _about_writing(nearest)


def _about_trust(place: Path) -> Finding:
    """Whether others could change mirrors, by the rules by which a cache is made."""
    try:
        if place.exists():
            require_safe(place)
    except OSError as error:
        return _broken("trust", "others could change mirrors", reason_of(error))
    return Finding(name="trust", value="only you and root can change mirrors")


def _about_disk(nearest: Path) -> Iterator[Finding]:
    space = shutil.disk_usage(nearest)
    few = space.free < _LEAST_FREE * space.total
    yield _advised(
        "space",
        f"{size(space.free)} free of {size(space.total)}",
        "a mirror takes about 4 bytes per value: free some space, or use another disk" * few,
    )
    stable = "" if has_stable_inodes(nearest) else ", without stable inode numbers"
    yield Finding(name="file system", value=f"local{stable}")


def _about_writing(nearest: Path) -> Iterator[Finding]:
    """Writes a file of 64 MiB, takes the locks of a mirror on it, and deletes it."""
    try:
        with tempfile.TemporaryFile(dir=nearest) as file:
            for lock in (fcntl.flock, fcntl.lockf):
                lock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            speed = _write_bytes_per_s(file)
    except OSError as error:
        advice = "mirrors cannot be kept here: use a local directory that you may write to"
        yield _broken("writing", reason_of(error), advice)
        return
    slow = speed < _SLOW_WRITE_BYTES_PER_S
    yield _advised(
        "writing",
        f"{size(speed)}/s, and locks work",
        "the first epoch cannot be faster than this: a local NVMe disk writes 1 GB/s and more" * slow,
    )


def _write_bytes_per_s(file: Any) -> float:
    piece, written, began_s = os.urandom(_PIECE_BYTES), 0, time.perf_counter()
    while written < _WRITTEN_BYTES and time.perf_counter() - began_s < _MOST_WRITE_S:
        written += os.write(file.fileno(), piece)
        os.fdatasync(file.fileno()) if hasattr(os, "fdatasync") else os.fsync(file.fileno())
    return written / max(1e-9, time.perf_counter() - began_s)


# ---- a store


def about_store(url: str, storage_options: Mapping[str, Any]) -> Iterator[Finding]:
    """The findings for the store at a URL, which is opened and read for two seconds. Its rows are not checked."""
    from zloader.access.location import location_of

    try:
        location = location_of(url, storage_options)
    except ZloaderError as error:
        yield _broken("URL", "not usable", str(error))
        return
    yield Finding(name="URL", value=location.url)
    try:
        found = _within(_OPEN_S, lambda: location.kind.credentials(location))
        yield Finding(name="credentials", value=found)
    except Exception as error:  # noqa: BLE001 - clients raise errors of their own
        yield _broken("credentials", "none", str(error) or type(error).__name__)
        return
    proxies = [name for name in os.environ if name.lower() in _PROXIES and os.environ[name]]
    if proxies and location.scheme != "file":
        yield Finding(name="proxies", value=", ".join(sorted(proxies)))
    yield from _about_reading(url, storage_options, is_local=location.scheme == "file")


def _about_reading(url: str, storage_options: Mapping[str, Any], *, is_local: bool) -> Iterator[Finding]:
    from zloader.common.options import FetchOptions
    from zloader.dataset.open_dataset import open_dataset
    from zloader.insight.link import disk_bytes_per_s, link_bytes_per_s

    measure = disk_bytes_per_s if is_local else functools.partial(link_bytes_per_s, options=FetchOptions())
    began_s = time.perf_counter()
    try:
        dataset = _within(_OPEN_S, lambda: open_dataset(url, storage_options=storage_options))
        opened_s = time.perf_counter() - began_s
        content = f"{dataset.n_obs:,} rows x {dataset.n_vars:,} genes, opened in {opened_s:.1f} s"
        yield Finding(name="content", value=content)
        names = dataset.matrices.names
        speed = _within(_READ_S, lambda: measure(dataset, x=names[0], enough_s=_MEASURED_S)) if names else None
    except Exception as error:  # noqa: BLE001 - whatever a client raises, the store cannot be read
        yield _broken("reading", "failed", str(error) or type(error).__name__)
        return
    yield _about_speed(speed, is_local=is_local)


def _about_speed(speed: float | None, *, is_local: bool) -> Finding:
    if speed is None:
        why = f"not measured: too little to read{', or it stays in memory' * is_local}"
        return Finding(name="speed", value=why, state="good" if is_local else "unknown")
    slow = speed < _SLOW_READ_BYTES_PER_S and not is_local
    return _advised(
        "speed",
        f"{size(speed)}/s",
        "the first epoch reads at this speed: train in the region of the bucket, and keep a cache" * slow,
    )


def _within(seconds: float, function: Callable[[], Result]) -> Result:
    """The result of a function. Raises TimeoutError if it takes longer, and leaves its thread behind."""
    from zloader.common.concurrent_calls import fulfil

    future: Future[Result] = Future()
    threading.Thread(target=fulfil, args=(future, function), daemon=True, name="zloader-doctor").start()
    if not wait([future], timeout=seconds).done:
        raise TimeoutError(f"no answer within {seconds:.0f} s: check the endpoint, the network, proxies and firewalls")
    return future.result()
