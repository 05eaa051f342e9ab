"""What a mirror holds, and whether it still holds what was written, looked at from outside: no store is opened.

Files are read a piece at a time, since a map of them would count as this process's memory. Links are never followed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from zloader.caching.cached_files import is_right
from zloader.caching.checksums import parse_sums
from zloader.caching.directory import MirrorEntry, is_of_this_version, misnamed
from zloader.caching.verified import VerifiedMarks
from zloader.common.errors import CacheError

_PIECE = 4 << 20  # bytes read at once
_TASK = 16 << 20  # bytes that a thread compares before it says so
_THREADS = 2  # one waits for the disk while the other computes checksums
_SUFFIXES = ("flat", "sums", "npy", "kept")


@dataclass(frozen=True, kw_only=True)
class ArrayInspection:
    """How much of one array is in a mirror; bytes are decoded."""

    chunks: int
    chunks_held: int
    bytes_in_all: int
    bytes_held: int


@dataclass(frozen=True, kw_only=True)
class MirrorInspection:
    """What a mirror holds: its `arrays` by name, so many `columns` and `objects` kept whole, and those files' bytes.

    Arrays of the store that were never used are not known to the mirror.
    """

    arrays: Mapping[str, ArrayInspection]
    columns: int
    objects: int
    kept_bytes: int

    @property
    def chunks(self) -> int:
        """Chunks of all arrays."""
        return sum(array.chunks for array in self.arrays.values())

    @property
    def chunks_held(self) -> int:
        """Chunks that are there."""
        return sum(array.chunks_held for array in self.arrays.values())

    @property
    def bytes_in_all(self) -> int:
        """Decoded bytes of all arrays."""
        return sum(array.bytes_in_all for array in self.arrays.values())

    @property
    def bytes_held(self) -> int:
        """Decoded bytes of the chunks that are there."""
        return sum(array.bytes_held for array in self.arrays.values())


def held(entry: MirrorEntry) -> MirrorInspection:
    """What a mirror holds; nothing where it has been dropped. A damaged .sums file counts for nothing."""
    files = _files(entry.directory)
    arrays = {}
    for path in files["sums"]:
        with contextlib.suppress(OSError, ValueError):
            with _opened(path, os.O_RDONLY) as file:
                n_bytes, chunk_bytes, sums = parse_sums(path, _content(file))
            chunks = np.flatnonzero(sums >= 0)
            arrays[_name(path)] = ArrayInspection(
                chunks=len(sums),
                chunks_held=len(chunks),
                bytes_in_all=n_bytes,
                bytes_held=int(_sizes(chunks, n_bytes, chunk_bytes).sum()),
            )
    kept_bytes = sum(map(_size, [*files["npy"], *files["kept"]]))
    return MirrorInspection(arrays=arrays, columns=len(files["npy"]), objects=len(files["kept"]), kept_bytes=kept_bytes)


def verify(directory: Path, on_bytes: Callable[[int], None] | None = None) -> list[str]:
    """Compares all that a mirror holds with its checksums; gives one message for each thing that differs.

    A chunk that differs is a miss from then on, for every process; a column or object that differs is deleted: they
    will be read from the store again. `on_bytes` takes the number of bytes compared since it was last called. A mirror
    that is not there (any more) has nothing that differs. Raises CacheError where it may not be read or changed.
    """
    try:
        with _in_use(directory), ThreadPoolExecutor(_THREADS, thread_name_prefix="zloader-verify") as threads:
            try:
                check = _Check(threads, on_bytes or (lambda _: None))
                check.run(directory)
                return check.problems
            finally:
                threads.shutdown(cancel_futures=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        advice = "Run this as who fills it, where it can be written"
        raise CacheError(f"cannot verify {directory}: {error}. {advice}") from error


@contextlib.contextmanager
def _in_use(directory: Path) -> Iterator[None]:
    """Keeps a mirror from being dropped; unlike a Place it leaves alone when it was last used and what is stale."""
    with _opened(directory / "users", os.O_RDONLY) as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        yield


class _Check:
    """One look at all of a mirror."""

    def __init__(self, threads: Executor, on_bytes: Callable[[int], None]) -> None:
        self.problems: list[str] = []
        self._right: list[Path] = []
        self._threads = threads
        self._on_bytes = on_bytes

    def run(self, directory: Path) -> None:
        if misnamed(directory):
            self.problems.append(
                "its directory was renamed: nothing in it is used. Give it back its name, or delete it"
            )
            return
        if not is_of_this_version(directory):
            return  # nothing in it is used, and its checksums may mean something else
        files = _files(directory)
        for path in files["links"]:
            self.problems.append(f"{path.name} is no file of zloader's, and in its way: remove it")
        for path in files["sums"]:
            self._check_array(path)
        self._check_kept([*files["npy"], *files["kept"]])
        VerifiedMarks(directory).note(path for path in self._right if path.exists())

    def _check_array(self, path: Path) -> None:
        with _opened(path, os.O_RDWR) as sums_file:
            stored = _content(sums_file)
            try:
                n_bytes, chunk_bytes, sums = parse_sums(path, stored)
            except ValueError as error:
                self.problems.append(f"{path.name} {error}: nothing of {_name(path)} counts as there")
                return
            flat = path.with_suffix(".flat")
            try:
                with _opened(flat, os.O_RDWR) as file:
                    before = os.fstat(file)
                    if before.st_size != n_bytes:
                        self.problems.append(f"{flat.name} has {before.st_size} bytes instead of {n_bytes}")
                        os.ftruncate(file, n_bytes)  # what is cut off is zeros now, and differs
                    differing = self._differing(file, n_bytes, chunk_bytes, sums)
                    if _stamp(os.fstat(file)) == _stamp(before):  # nobody has written to it meanwhile
                        self._right += [flat, path]
            except OSError as error:
                differing = np.flatnonzero(sums >= 0)
                if len(differing):
                    self.problems.append(f"{flat.name} cannot be read: {error.strerror}")
            self._forget(sums_file, stored, differing, len(sums))
        self.problems += [f"{_name(path)}: {chunks}" for chunks in _runs(differing)]

    def _differing(self, file: int, n_bytes: int, chunk_bytes: int, sums: NDArray[np.int64]) -> NDArray[np.int64]:
        """The chunks that are there, and other than their checksums say."""
        chunks = np.flatnonzero(sums >= 0)
        sizes = _sizes(chunks, n_bytes, chunk_bytes)
        step = max(1, _TASK // max(1, chunk_bytes))
        tasks = [slice(first, first + step) for first in range(0, len(chunks), step)]

        def compare(task: slice) -> NDArray[np.bool_]:
            return _compare(file, chunks[task] * chunk_bytes, sizes[task], sums[chunks[task]])

        wrong = [np.zeros(0, bool)]
        for task, found in zip(tasks, self._threads.map(compare, tasks), strict=True):
            wrong.append(found)
            self._on_bytes(int(sizes[task].sum()))
        return np.asarray(chunks[np.concatenate(wrong)])

    @staticmethod
    def _forget(sums_file: int, stored: bytes, chunks: NDArray[np.int64], n_chunks: int) -> None:
        """Sets the words of chunks to 0, unless somebody else has changed them since."""
        for chunk in chunks.tolist():
            place = len(stored) - 8 * (n_chunks - chunk)
            if os.pread(sums_file, 8, place) == stored[place : place + 8]:
                os.pwrite(sums_file, bytes(8), place)

    def _check_kept(self, paths: Sequence[Path]) -> None:
        sizes = map(_size, paths)
        for path, size, right in zip(paths, sizes, self._threads.map(_is_right, paths), strict=True):
            self._on_bytes(size)
            if right:
                self._right.append(path)
            else:
                path.unlink(missing_ok=True)
                self.problems.append(f"{_name(path)}: {path.name} differed from its checksum, and is deleted")


def _compare(
    file: int, offsets: NDArray[np.int64], sizes: NDArray[np.int64], sums: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Which pieces of a file have another crc32c than `sums` say, or cannot be read."""
    buffer = np.empty(min(_PIECE, int(sizes.max())), np.uint8)
    wrong = np.ones(len(sums), bool)
    for i, (offset, size, wanted) in enumerate(zip(offsets.tolist(), sizes.tolist(), sums.tolist(), strict=True)):
        with contextlib.suppress(OSError):  # a bad sector
            wrong[i] = _crc(file, offset, size, buffer) != wanted
    return wrong


def _crc(file: int, offset: int, n_bytes: int, buffer: NDArray[np.uint8]) -> int:
    crc, end = 0, offset + n_bytes
    while offset < end:
        got = os.preadv(file, [buffer[: end - offset].data], offset)
        if not got:
            return -1
        crc, offset = google_crc32c.extend(crc, buffer[:got]), offset + got
    return int(crc)


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.lstat().st_size
    return 0


def _is_right(path: Path) -> bool:
    try:
        return is_right(path)
    except FileNotFoundError:  # another process has found it damaged
        return True
    except OSError:
        return False


def _runs(chunks: NDArray[np.int64]) -> Iterator[str]:
    for run in np.split(chunks, np.flatnonzero(np.diff(chunks) != 1) + 1):
        if len(run) == 1:
            yield f"chunk {run[0]} differs from its checksum"
        elif len(run):
            yield f"chunks {run[0]} to {run[-1]} differ from their checksums"


def _sizes(chunks: NDArray[np.int64], n_bytes: int, chunk_bytes: int) -> NDArray[np.int64]:
    """Bytes of each chunk; the last is cut off at the end of the array."""
    return np.minimum(n_bytes - chunks * chunk_bytes, chunk_bytes)


def _files(directory: Path) -> dict[str, list[Path]]:
    """A mirror's files by suffix, in order; below "links" what has a name of theirs and is no file."""
    files: dict[str, list[Path]] = {kind: [] for kind in (*_SUFFIXES, "links")}
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as found:
        for one in sorted(found, key=lambda one: one.name):
            stem, _, suffix = one.name.rpartition(".")
            if stem and suffix in _SUFFIXES:
                files[suffix if one.is_file(follow_symlinks=False) else "links"].append(Path(one.path))
    return files


def _name(path: Path) -> str:
    """What the file is of, as drafts.file_of was told."""
    return unquote(path.name.rpartition(".")[0])


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield file
    finally:
        os.close(file)


def _content(file: int) -> bytes:
    with open(file, "rb", closefd=False) as whole:
        return whole.read()


def _stamp(found: os.stat_result) -> tuple[int, int]:
    return found.st_mtime_ns, found.st_ctime_ns
