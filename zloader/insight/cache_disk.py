"""The disk of a cache: whether mirrors can be kept there, whether they can be trusted, and how fast it is."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zloader.caching.place import place_of, require_local, require_private, require_safe
from zloader.common.errors import OptionError
from zloader.common.file_systems import has_stable_inodes
from zloader.common.messages import reason_of, size
from zloader.insight.findings import Finding

_WRITTEN_BYTES, _PIECE_BYTES = 64 << 20, 4 << 20
_MOST_WRITE_S = 2.0
_SLOW_BYTES_PER_S = 100e6
_LEAST_FREE = 0.05  # of the disk


def about_cache(directory: Path) -> Iterator[Finding]:
    """Whether the cache of a directory can be kept, and what its disk is like. Creates no cache."""
    try:
        directory = directory.expanduser().absolute()
        place = place_of(directory)
        require_local(place)
        nearest = next(each for each in (place, *place.parents) if each.is_dir())
    except (OptionError, OSError, RuntimeError) as error:
        yield _broken("place", str(directory), reason_of(error))
        return
    yield Finding(part="cache", name="place", value=f"{place}{'' if nearest == place else ', not made yet'}")
    yield _about_trust(directory, place)
    yield from _about_disk(nearest)
    yield from _about_writing(nearest)


def _about_trust(directory: Path, place: Path) -> Finding:
    """Whether others could change mirrors, by the rules by which a cache is made."""
    checks = [(require_private, place), (require_safe, directory)] if place != directory else []
    for check, path in (*checks, (require_safe, place)):
        try:
            if path.exists():
                check(path)
        except OSError as error:
            return _broken("trust", "others could change mirrors", f"{path}: {reason_of(error)}")
    return Finding(part="cache", name="trust", value="only you and root can change mirrors")


def _about_disk(nearest: Path) -> Iterator[Finding]:
    space = shutil.disk_usage(nearest)
    few = space.free < _LEAST_FREE * space.total
    yield Finding(
        part="cache",
        name="space",
        value=f"{size(space.free)} free of {size(space.total)}",
        state="advice" if few else "good",
        advice="a mirror takes about 4 bytes per value: free some space, or use another disk" * few,
    )
    stable = "" if has_stable_inodes(nearest) else ", without stable inode numbers"
    yield Finding(part="cache", name="file system", value=f"local{stable}")


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
    slow = speed < _SLOW_BYTES_PER_S
    yield Finding(
        part="cache",
        name="writing",
        value=f"{size(speed)}/s, and locks work",
        state="advice" if slow else "good",
        advice="the first epoch cannot be faster than this: a local NVMe disk writes 1 GB/s and more" * slow,
    )


def _write_bytes_per_s(file: Any) -> float:
    piece, written, began_s = os.urandom(_PIECE_BYTES), 0, time.perf_counter()
    while written < _WRITTEN_BYTES and time.perf_counter() - began_s < _MOST_WRITE_S:
        written += os.write(file.fileno(), piece)
        os.fdatasync(file.fileno()) if hasattr(os, "fdatasync") else os.fsync(file.fileno())
    return written / max(1e-9, time.perf_counter() - began_s)


def _broken(name: str, value: str, advice: str) -> Finding:
    return Finding(part="cache", name=name, value=value, state="broken", advice=advice)
