"""Inspects and verifies the files of a mirror, without opening its store.

Files are read in pieces, because a memory map would count as memory of this process. Links are never followed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from urllib.parse import unquote

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from zloader.caching.atomic_files import read_checked
from zloader.caching.directory import MirrorEntry, VerifiedMarks, is_of_this_version, is_renamed
from zloader.caching.kept_arrays import array_bytes, is_whole
from zloader.caching.rows_file import RowsIndex, is_present, sizes_in
from zloader.common.errors import CacheError
from zloader.common.records import Held

_PIECE = 4 << 20  # bytes per read
_TASK = 16 << 20  # bytes that a thread verifies between progress reports
_THREADS = 2  # one reads from disk while the other computes checksums
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
    def of(cls, arrays: Mapping[str, Held], *, objects: int, kept_bytes: int) -> MirrorInspection:
        """The content of a mirror with these arrays and objects."""
        sums = {each.name: sum(getattr(array, each.name) for array in arrays.values()) for each in fields(Held)}
        return cls(**sums, arrays=arrays, objects=objects, kept_bytes=kept_bytes)

    @property
    def checked_bytes(self) -> int:
        """Bytes that `verify` compares."""
        return self.bytes_held + self.kept_bytes


def inspect_mirror(entry: MirrorEntry) -> MirrorInspection:
    """The content of a mirror; empty if it has been dropped, or if another version of zloader made it.

    Matrices with a damaged index are left out.
    """
    files = _files(entry.directory) if is_of_this_version(entry.directory) else {kind: [] for kind in _SUFFIXES}
    arrays = {}
    for path in files["index"]:
        with contextlib.suppress(OSError, ValueError), _opened(path, os.O_RDONLY) as file:
            arrays[_name(path)] = _inspect_rows(RowsIndex.read(path, file))
    for path in files["array"]:
        with contextlib.suppress(OSError):
            n_bytes = array_bytes(path)
            arrays[_name(path)] = Held(chunks=1, chunks_held=1, bytes_in_all=n_bytes, bytes_held=n_bytes)
    return MirrorInspection.of(arrays, objects=len(files["kept"]), kept_bytes=sum(map(_size, files["kept"])))


def _inspect_rows(index: RowsIndex) -> Held:
    held = n_bytes = 0
    for _, _, words in index.windows():
        present = words[is_present(words)]
        held, n_bytes = held + len(present), n_bytes + int(sizes_in(present).sum())
    in_all = n_bytes * index.n_blocks // held if held else index.decoded_bytes
    return Held(chunks=index.n_blocks, chunks_held=held, bytes_in_all=in_all, bytes_held=n_bytes)


def verify(directory: Path, on_bytes: Callable[[int], None] | None = None) -> list[str]:
    """Compares the whole content of a mirror with its checksums; returns one message per problem.

    A damaged chunk is marked absent for every process. A damaged object and a damaged file of checksums are deleted.
    All that was dropped will be read from the store again. `on_bytes` is called with the number of bytes verified since
    its last call. A mirror that does not exist has no problems. Raises CacheError if the mirror cannot be read or
    changed.
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
        advice = "Run this as the user who owns the mirror, with write access"
        raise CacheError(f"cannot verify {directory}: {error}. {advice}") from error


@contextlib.contextmanager
def _in_use(directory: Path) -> Iterator[None]:
    """Prevents a mirror from being dropped. Unlike MirrorDirectory, does not change `stale` or the time of last use."""
    with _opened(directory / "users", os.O_RDONLY) as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        yield


class _Check:
    """One verification of a whole mirror."""

    def __init__(self, threads: Executor, on_bytes: Callable[[int], None]) -> None:
        self.problems: list[str] = []
        self._verified: list[Path] = []
        self._threads = threads
        self._on_bytes = on_bytes

    def run(self, directory: Path) -> None:
        if is_renamed(directory):
            self.problems.append(
                "its directory was renamed, so it is not used. Restore the old name, or delete the directory"
            )
            return
        if not is_of_this_version(directory):
            return  # it is not used, and its checksums may be defined differently
        files = _files(directory)
        for path in files["links"]:
            self.problems.append(f"{path.name} is not a regular file, but has the name of a cached one: remove it")
        for path in files["index"]:
            self._check_rows(path)
        self._check_whole(files["array"], is_whole, array_bytes)
        self._verified += files["array"]
        self._check_whole(files["kept"], lambda path: read_checked(path) is not None, _size)
        VerifiedMarks(directory).record(path for path in self._verified if path.exists())

    def _check_rows(self, path: Path) -> None:
        with _opened(path, os.O_RDWR) as index_file:
            try:
                index = RowsIndex.read(path, index_file)
            except ValueError as error:
                self.problems.append(f"{path.name} {error}: all blocks of {_name(path)} count as absent")
                path.unlink(missing_ok=True)  # whoever has mapped it goes on with a file of its own
                return
            content, differing = path.with_suffix(".rows"), [np.empty(0, np.int64)]
            try:
                with _opened(content, os.O_RDONLY) as file:
                    before = os.fstat(file)
                    differing += [self._differing(file, index, *window) for window in index.windows()]
                    if not any(map(len, differing)) and _stamp(os.fstat(file)) == _stamp(before):
                        self._verified += [content, path]
            except OSError as error:
                for first, _, words in index.windows():
                    present = np.flatnonzero(is_present(words))
                    differing.append(first + present)
                    for block in present.tolist():
                        index.mark_absent(first + block, int(words[block]))
                if any(map(len, differing)):
                    self.problems.append(f"{content.name} cannot be read: {error.strerror}")
        self.problems += [f"{_name(path)}: {blocks}" for blocks in _runs(np.concatenate(differing))]

    def _differing(
        self, file: int, index: RowsIndex, first: int, offsets: NDArray[np.int64], words: NDArray[np.uint64]
    ) -> NDArray[np.int64]:
        """The blocks that are present but differ from their checksums, which are marked absent."""
        blocks = np.flatnonzero(is_present(words))
        starts, sizes = offsets[blocks], sizes_in(words[blocks])
        checksums = (words[blocks] & np.uint64(0xFFFFFFFF)).astype(np.int64)
        step = max(1, _TASK * len(blocks) // max(1, int(sizes.sum())))
        tasks = [slice(begin, begin + step) for begin in range(0, len(blocks), step)]

        def compare(task: slice) -> NDArray[np.bool_]:
            return _compare(file, starts[task], sizes[task], checksums[task])

        wrong = [np.zeros(0, bool)]
        for task, found in zip(tasks, self._threads.map(compare, tasks), strict=True):
            wrong.append(found)
            self._on_bytes(int(sizes[task].sum()))
        differing = blocks[np.concatenate(wrong)]
        for block in differing.tolist():
            index.mark_absent(first + block, int(words[block]))
        return np.asarray(first + differing)

    def _check_whole(
        self, paths: Sequence[Path], is_valid: Callable[[Path], bool], size_of: Callable[[Path], int]
    ) -> None:
        """Checks files that are whole or absent, of which so many bytes count as verified; deletes damaged ones."""

        def check(path: Path) -> bool:
            try:
                return is_valid(path)
            except FileNotFoundError:  # another process found it damaged and deleted it
                return True
            except OSError:
                return False

        for path, size, valid in zip(paths, map(size_of, paths), self._threads.map(check, paths), strict=True):
            self._on_bytes(size)
            if not valid:
                path.unlink(missing_ok=True)
                self.problems.append(f"{_name(path)}: {path.name} differed from its checksum and was deleted")


def _compare(
    file: int, offsets: NDArray[np.int64], sizes: NDArray[np.int64], checksums: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Which pieces of a file differ from their crc32c in `checksums`, or cannot be read."""
    buffer = np.empty(min(_PIECE, int(sizes.max())), np.uint8)
    wrong = np.ones(len(checksums), bool)
    pieces = zip(offsets.tolist(), sizes.tolist(), checksums.tolist(), strict=True)
    for i, (offset, size, expected) in enumerate(pieces):
        with contextlib.suppress(OSError):  # a bad sector
            wrong[i] = _crc(file, offset, size, buffer) != expected
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


def _runs(chunks: NDArray[np.int64]) -> Iterator[str]:
    for run in np.split(chunks, np.flatnonzero(np.diff(chunks) != 1) + 1):
        if len(run) == 1:
            yield f"block {run[0]} differs from its checksum"
        elif len(run):
            yield f"blocks {run[0]} to {run[-1]} differ from their checksums"


def _files(directory: Path) -> dict[str, list[Path]]:
    """A mirror's files by suffix, sorted; under "links", items with such a name that are not regular files."""
    files: dict[str, list[Path]] = {kind: [] for kind in (*_SUFFIXES, "links")}
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as found:
        for item in sorted(found, key=lambda item: item.name):
            stem, _, suffix = item.name.rpartition(".")
            if stem and suffix in _SUFFIXES:
                files[suffix if item.is_file(follow_symlinks=False) else "links"].append(Path(item.path))
    return files


def _name(path: Path) -> str:
    """The name of the cached matrix, array or key; the inverse of atomic_files.cached_path."""
    return unquote(path.name.rpartition(".")[0])


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield file
    finally:
        os.close(file)


def _stamp(found: os.stat_result) -> tuple[int, int]:
    return found.st_mtime_ns, found.st_ctime_ns
