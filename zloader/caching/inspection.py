"""Inspects and verifies the files of a mirror, without opening its store.

Links are never followed.
"""

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

from zloader.caching.directory import VERSION, MirrorEntry, VerifiedMarks, described_in, opened
from zloader.caching.kept import is_whole
from zloader.caching.rows_file import Held, is_present, mapped_index, sizes_in, windows, word_of
from zloader.common.errors import CacheError

_SUFFIXES = ("index", "rows", "array", "kept")


@dataclass(frozen=True, kw_only=True)
class MirrorInspection(Held):
    """The content of a mirror: its `arrays` by name, how many `objects` it keeps as stored, and `kept_bytes` of these.

    The chunks of a matrix are blocks of rows, and the bytes of all of them are estimated from those that are held. An
    array beside the matrices is one chunk. Those that have never been used do not appear.
    """

    arrays: Mapping[str, Held]
    objects: int
    kept_bytes: int

    @classmethod
    def of_all(cls, arrays: Mapping[str, Held], *, objects: int, kept_bytes: int) -> MirrorInspection:
        """The content of a mirror with these arrays and objects."""
        return cls(**Held.sums(arrays.values()), arrays=arrays, objects=objects, kept_bytes=kept_bytes)

    @property
    def checked_bytes(self) -> int:
        """Bytes that `verify` compares."""
        return self.bytes_held + self.kept_bytes


def inspect_mirror(entry: MirrorEntry) -> MirrorInspection:
    """The content of a mirror; empty if it has been dropped, or if another version of zloader made it.

    Matrices with a damaged index are left out.
    """
    files = _files(entry.directory)
    arrays = {}
    for path in files["index"]:
        with contextlib.suppress(OSError, ValueError), opened(path, os.O_RDONLY) as file:
            header, blocks = mapped_index(path, file, mmap.ACCESS_READ)
            arrays[_name(path)] = Held.of(blocks, int(header[9]))
    for path in files["array"]:
        n_bytes = _size(path)
        arrays[_name(path)] = Held(chunks=1, chunks_held=1, bytes_in_all=n_bytes, bytes_held=n_bytes)
    return MirrorInspection.of_all(arrays, objects=len(files["kept"]), kept_bytes=sum(map(_size, files["kept"])))


def verify(directory: Path, on_bytes: Callable[[int], None] = lambda _: None) -> list[str]:
    """Compares the whole content of a mirror with its checksums; returns one message per problem.

    A damaged block is marked absent for every process. Damaged objects, arrays and indexes are deleted. All that was
    dropped will be read from the store again. `on_bytes` is called with the number of bytes verified since its last
    call. A mirror that does not exist has no problems. Raises CacheError if the mirror cannot be read or changed.
    """
    try:
        with opened(directory / "users", os.O_RDONLY) as users:
            fcntl.flock(users, fcntl.LOCK_SH)  # it is not dropped meanwhile; `stale` and the last use do not change
            if not directory.name.startswith(described_in(directory).get("fingerprint", "")):
                return ["its directory was renamed, so it is not used. Restore the old name, or delete the directory"]
            files, verified = _files(directory), list[Path]()
            wrong = "is not a regular file, but has the name of a cached one: remove it"
            problems = [f"{path.name} {wrong}" for path in files["links"]]
            for path in files["index"]:
                found, is_intact = _check_rows(path, on_bytes)
                problems += found
                verified += [path, path.with_suffix(".rows")] if is_intact else []
            for path in files["array"] + files["kept"]:
                on_bytes(_size(path))
                if not _is_whole(path):
                    path.unlink(missing_ok=True)
                    problems.append(f"{_name(path)}: {path.name} differed from its checksum and was deleted")
            VerifiedMarks(directory).record(path for path in (*verified, *files["array"]) if path.exists())
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


def _check_rows(path: Path, on_bytes: Callable[[int], None]) -> tuple[list[str], bool]:
    """Compares the blocks of a matrix, given its index; returns the problems, and whether all is as it was written."""
    content, file, problems, differing = path.with_suffix(".rows"), -1, [], []
    with contextlib.ExitStack() as stack:
        try:
            _, index = mapped_index(path, stack.enter_context(opened(path, os.O_RDWR)), mmap.ACCESS_WRITE)
        except ValueError as error:
            path.unlink(missing_ok=True)  # whoever has mapped it goes on with a file of its own
            return [f"{path.name} {error}: all blocks of {_name(path)} count as absent"], False
        try:
            file = stack.enter_context(opened(content, os.O_RDONLY))
        except OSError as error:
            problems.append(f"{content.name} cannot be read: {error.strerror}")
        before = None if file < 0 else _stamp(file)
        for first, words in windows(index):
            for block in (first + np.flatnonzero(is_present(words))).tolist():
                offset, word = index[block].tolist()
                size = int(sizes_in(index[block, 1:])[0])
                if _word_at(file, offset, size) != word:
                    if index[block, 1] == word:  # no other process has changed it since
                        index[block, 1] = 0
                    differing.append(block)
                on_bytes(size)
        if differing:
            return problems + [f"{_name(path)}: {blocks}" for blocks in _runs(differing)], False
        return [], before is not None and _stamp(file) == before


def _word_at(file: int, offset: int, size: int) -> int:
    """The word of the block that is there; 0 if it cannot be read."""
    with contextlib.suppress(OSError):  # a bad sector
        size = min(size, os.fstat(file).st_size)  # a damaged word may say many GB
        return word_of(np.frombuffer(os.pread(file, size, offset), np.uint8))
    return 0


def _stamp(file: int) -> tuple[int, int]:
    found = os.fstat(file)
    return found.st_mtime_ns, found.st_ctime_ns


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.lstat().st_size
    return 0


def _runs(blocks: list[int]) -> Iterator[str]:
    for run in np.split(blocks, np.flatnonzero(np.diff(blocks) != 1) + 1):
        if len(run) == 1:
            yield f"block {run[0]} differs from its checksum"
        else:
            yield f"blocks {run[0]} to {run[-1]} differ from their checksums"


def _files(directory: Path) -> dict[str, list[Path]]:
    """The files of a mirror of this version by suffix, sorted; under "links", what has such a name but is no file."""
    files: dict[str, list[Path]] = {kind: [] for kind in (*_SUFFIXES, "links")}
    if directory.name.endswith(VERSION):  # the checksums of others may be defined differently
        with contextlib.suppress(FileNotFoundError), os.scandir(directory) as found:
            for item in sorted(found, key=lambda item: item.name):
                stem, _, suffix = item.name.rpartition(".")
                if stem and suffix in _SUFFIXES:
                    files[suffix if item.is_file(follow_symlinks=False) else "links"].append(Path(item.path))
    return files


def _name(path: Path) -> str:
    """The name of the matrix, array or object in a file; the inverse of directory.cached_path."""
    return unquote(path.stem)
