"""Inspects and verifies the files of a mirror, without opening its store. Links are never followed."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import numpy as np

from zloader.caching.directory import VERSION, MirrorEntry, described_in, opened
from zloader.caching.kept import is_whole
from zloader.caching.rows_file import Held, is_present, mapped_index, sizes_in, windows, word_of
from zloader.common.errors import CacheError


@dataclass(frozen=True, kw_only=True)
class MirrorInspection(Held):
    """The content of a mirror: its `arrays` by name, how many `objects` it keeps as stored, and `kept_bytes` of these.

    The chunks of a matrix are blocks of rows, and the bytes of all of them are estimated from those that are held. An
    array beside the matrices is one chunk. Those that have never been used do not appear.
    """

    arrays: Mapping[str, Held]
    objects: int
    kept_bytes: int


def inspect_mirror(entry: MirrorEntry) -> MirrorInspection:
    """The content of a mirror; empty if it has been dropped, or if another version of zloader made it.

    Matrices with a damaged index are left out.
    """
    arrays = {}
    for path in _files(entry.directory, "index"):
        with contextlib.suppress(OSError, ValueError), opened(path, os.O_RDONLY) as file:
            header, blocks = mapped_index(path, file, mmap.ACCESS_READ)
            arrays[_name(path)] = Held.of(blocks, int(header[9]))
    for path in _files(entry.directory, "array"):
        n_bytes = _size(path)
        arrays[_name(path)] = Held(chunks=1, chunks_held=1, bytes_in_all=n_bytes, bytes_held=n_bytes)
    sizes = [_size(path) for path in _files(entry.directory, "kept")]
    return MirrorInspection(**Held.sums(arrays.values()), arrays=arrays, objects=len(sizes), kept_bytes=sum(sizes))


def verify(directory: Path, on_bytes: Callable[[int], None] = lambda _: None) -> list[str]:
    """Compares the whole content of a mirror with its checksums; returns one message per problem.

    A damaged block is marked absent for every process. Damaged objects, arrays and indexes are deleted. All that was
    dropped will be read from the store again. `on_bytes` is called with the number of bytes verified since its last
    call. A mirror that does not exist has no problems. Raises CacheError if the mirror cannot be read or changed.
    """
    try:
        with opened(directory / "users", os.O_RDONLY) as users:
            fcntl.flock(users, fcntl.LOCK_SH)  # it is not dropped meanwhile; the last use does not change
            if not directory.name.startswith(described_in(directory).get("fingerprint", "")):
                return ["its directory was renamed, so it is not used. Restore the old name, or delete the directory"]
            problems = [problem for path in _files(directory, "index") for problem in _check_rows(path, on_bytes)]
            for path in _files(directory, "array") + _files(directory, "kept"):
                on_bytes(_size(path))
                if not _is_whole(path):
                    path.unlink(missing_ok=True)
                    problems.append(f"{_name(path)}: {path.name} differed from its checksum and was deleted")
            return problems
    except FileNotFoundError:
        return []
    except OSError as error:
        advice = "Run this as the user who owns the mirror, with write access"
        raise CacheError(f"cannot verify {directory}: {error}. {advice}") from error


def _is_whole(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return is_whole(path, file)
    except FileNotFoundError:  # another process found it damaged and deleted it
        return True
    except OSError:
        return False


def _check_rows(path: Path, on_bytes: Callable[[int], None]) -> Iterator[str]:
    """Compares the blocks of a matrix, given its index; yields the problems."""
    file, differing = -1, 0
    with contextlib.ExitStack() as stack:
        try:
            _, index = mapped_index(path, stack.enter_context(opened(path, os.O_RDWR)), mmap.ACCESS_WRITE)
        except ValueError as error:
            path.unlink(missing_ok=True)  # whoever has mapped it goes on with a file of its own
            yield f"{path.name} {error}: all blocks of {_name(path)} count as absent"
            return
        with contextlib.suppress(OSError):  # then no block is there
            file = stack.enter_context(opened(path.with_suffix(".rows"), os.O_RDONLY))
        for first, words in windows(index):
            for block in (first + np.flatnonzero(is_present(words))).tolist():
                offset, word = index[block].tolist()
                size = int(sizes_in(index[block, 1:])[0])
                if _word_at(file, offset, size) != word:
                    if index[block, 1] == word:  # no other process has changed it since
                        index[block, 1] = 0
                    differing += 1
                on_bytes(size)
        if differing:
            yield f"{_name(path)}: {differing} of {len(index)} blocks differ from their checksums"


def _word_at(file: int, offset: int, size: int) -> int:
    """The word of the block that is there; 0 if it cannot be read."""
    with contextlib.suppress(OSError, OverflowError):  # a bad sector, or a damaged place
        size = min(size, os.fstat(file).st_size)  # a damaged word may say many GB
        return word_of(np.frombuffer(os.pread(file, size, offset), np.uint8))
    return 0


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.lstat().st_size
    return 0


def _files(directory: Path, suffix: str) -> list[Path]:
    """The files of a mirror of this version with a suffix, sorted. The checksums of others may be defined otherwise."""
    found = directory.glob(f"*.{suffix}") if directory.name.endswith(VERSION) else ()
    return sorted(path for path in found if path.is_file() and not path.is_symlink())


def _name(path: Path) -> str:
    """The name of the matrix, array or object in a file; the inverse of directory.cached_path."""
    return unquote(path.stem)
