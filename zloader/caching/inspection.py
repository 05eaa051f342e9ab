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
from zloader.caching.checksums import Places, Sidecar, word_offset
from zloader.caching.directory import MirrorEntry, VerifiedMarks, is_of_this_version, is_renamed
from zloader.common.errors import CacheError
from zloader.common.records import Held

_PIECE = 4 << 20  # bytes per read
_TASK = 16 << 20  # bytes that a thread verifies between progress reports
_THREADS = 2  # one reads from disk while the other computes checksums
# The file of chunks beside each sidecar file.
_CONTENT = {"sums": "flat", "blocks": "rows"}
_SUFFIXES = (*_CONTENT, *_CONTENT.values(), "kept")


@dataclass(frozen=True, kw_only=True)
class MirrorInspection(Held):
    """The content of a mirror: its `arrays` by name, how many `objects` it keeps as stored, and `kept_bytes` of these.

    The name of coded rows ends with " (rows)". Their bytes are those of the file, and all of them are estimated from
    those that are held. Arrays of the store that have never been used do not appear.
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
    """The content of a mirror; empty if it has been dropped. Arrays with a damaged .sums file are left out."""
    files = _files(entry.directory)
    arrays = {}
    for path in _sidecars(files):
        with contextlib.suppress(OSError, ValueError), _opened(path, os.O_RDONLY) as file:
            arrays[_name(path)] = _inspect_array(Sidecar(path, file))
    return MirrorInspection.of(arrays, objects=len(files["kept"]), kept_bytes=sum(map(_size, files["kept"])))


def _inspect_array(sidecar: Sidecar) -> Held:
    chunks_held = bytes_held = 0
    for places in sidecar.windows():
        present = places.present
        chunks_held += len(present)
        bytes_held += int((places.stops - places.starts)[present].sum())
    return Held(
        chunks=sidecar.n_chunks,
        chunks_held=chunks_held,
        bytes_in_all=sidecar.bytes_in_all(chunks_held, bytes_held),
        bytes_held=bytes_held,
    )


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
        for path in _sidecars(files):
            self._check_array(path)
        self._check_objects(files["kept"])
        VerifiedMarks(directory).record(path for path in self._verified if path.exists())

    def _check_array(self, path: Path) -> None:
        with _opened(path, os.O_RDWR) as sums_file:
            try:
                sidecar = Sidecar(path, sums_file)
            except ValueError as error:
                self.problems.append(f"{path.name} {error}: all chunks of {_name(path)} count as absent")
                path.unlink(missing_ok=True)  # whoever has mapped it goes on with a file of its own
                return
            stem, _, suffix = path.name.rpartition(".")
            content, differing = path.with_name(f"{stem}.{_CONTENT[suffix]}"), [np.empty(0, np.int64)]
            try:
                with _opened(content, os.O_RDWR) as file:
                    before = os.fstat(file)
                    if before.st_size != sidecar.n_bytes:
                        self.problems.append(f"{content.name} has {before.st_size} bytes instead of {sidecar.n_bytes}")
                        os.ftruncate(file, sidecar.n_bytes)  # missing chunks are now zeros, and differ
                    for places in sidecar.windows():
                        differing.append(self._differing(file, places))
                        self._mark_absent(sums_file, places, differing[-1])
                    if _stamp(os.fstat(file)) == _stamp(before):  # no process has written to it meanwhile
                        self._verified += [content, path]
            except OSError as error:
                differing = [np.empty(0, np.int64)]
                for places in sidecar.windows():
                    differing.append(places.first + places.present)
                    self._mark_absent(sums_file, places, differing[-1])
                if any(map(len, differing)):
                    self.problems.append(f"{content.name} cannot be read: {error.strerror}")
        self.problems += [f"{_name(path)}: {chunks}" for chunks in _runs(np.concatenate(differing))]

    def _differing(self, file: int, places: Places) -> NDArray[np.int64]:
        """The chunks that are present but differ from their checksums."""
        chunks = places.present
        checksums = places.checksums(chunks)
        starts, sizes = places.starts[chunks], (places.stops - places.starts)[chunks]
        step = max(1, _TASK * len(chunks) // max(1, int(sizes.sum())))
        tasks = [slice(first, first + step) for first in range(0, len(chunks), step)]

        def compare(task: slice) -> NDArray[np.bool_]:
            return _compare(file, starts[task], sizes[task], checksums[task])

        wrong = [np.zeros(0, bool)]
        for task, found in zip(tasks, self._threads.map(compare, tasks), strict=True):
            wrong.append(found)
            self._on_bytes(int(sizes[task].sum()))
        return np.asarray(places.first + chunks[np.concatenate(wrong)])

    @staticmethod
    def _mark_absent(sums_file: int, places: Places, chunks: NDArray[np.int64]) -> None:
        """Sets the words of chunks to 0, unless another process has changed them since `places` were read."""
        for chunk, word in zip(chunks.tolist(), places.words[chunks - places.first], strict=True):
            offset = word_offset(chunk)
            if os.pread(sums_file, 8, offset) == word.tobytes():
                os.pwrite(sums_file, bytes(8), offset)

    def _check_objects(self, paths: Sequence[Path]) -> None:
        sizes = map(_size, paths)
        for path, size, valid in zip(paths, sizes, self._threads.map(_is_valid, paths), strict=True):
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


def _is_valid(path: Path) -> bool:
    try:
        return read_checked(path) is not None
    except FileNotFoundError:  # another process found it damaged and deleted it
        return True
    except OSError:
        return False


def _runs(chunks: NDArray[np.int64]) -> Iterator[str]:
    for run in np.split(chunks, np.flatnonzero(np.diff(chunks) != 1) + 1):
        if len(run) == 1:
            yield f"chunk {run[0]} differs from its checksum"
        elif len(run):
            yield f"chunks {run[0]} to {run[-1]} differ from their checksums"


def _files(directory: Path) -> dict[str, list[Path]]:
    """A mirror's files by suffix, sorted; under "links", items with such a name that are not regular files."""
    files: dict[str, list[Path]] = {kind: [] for kind in (*_SUFFIXES, "links")}
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as found:
        for item in sorted(found, key=lambda item: item.name):
            stem, _, suffix = item.name.rpartition(".")
            if stem and suffix in _SUFFIXES:
                files[suffix if item.is_file(follow_symlinks=False) else "links"].append(Path(item.path))
    return files


def _sidecars(files: Mapping[str, list[Path]]) -> list[Path]:
    return [path for suffix in _CONTENT for path in files[suffix]]


def _name(path: Path) -> str:
    """The name of the cached array or key; the inverse of atomic_files.cached_path."""
    stem, _, suffix = path.name.rpartition(".")
    return unquote(stem) + (" (rows)" if suffix == "blocks" else "")


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield file
    finally:
        os.close(file)


def _stamp(found: os.stat_result) -> tuple[int, int]:
    return found.st_mtime_ns, found.st_ctime_ns
