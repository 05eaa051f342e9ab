"""Byte ranges of files, ways to read them (listed in ways.py), and the state of the page cache.

The threads run compiled code that calls the C library without the GIL, so that the disk is measured and not Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

import zloader as zl
from benchmarks.harness.measuring import Figures

SEQUENTIAL_BYTES = 1 << 20
Share = list[tuple[NDArray[np.int64], NDArray[np.int64]]]  # offsets and sizes of ranges, per fetch
WAYS = ("pread", "pread, advised", "map", "map, random", "map, advised", "map, random, advised")

_libc = ctypes.CDLL(None, use_errno=True)
_pread = _libc.pread
_pread.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
_pread.restype = ctypes.c_ssize_t
_fadvise = _libc.posix_fadvise
_fadvise.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int)
_fadvise.restype = ctypes.c_int
_mincore = _libc.mincore
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_WILLNEED = os.POSIX_FADV_WILLNEED


# ---- compiled code of a thread, without the GIL


@numba.njit(nogil=True)
def _read(file: int, offsets: NDArray[Any], sizes: NDArray[Any], at: NDArray[Any], buffer: NDArray[Any]) -> bool:
    """Reads range i to `buffer[at[i]:]`. Returns False if a range could not be read in full."""
    for i in range(len(offsets)):
        done = 0
        while done < sizes[i]:
            n = _pread(file, buffer.ctypes.data + at[i] + done, sizes[i] - done, offsets[i] + done)
            if n <= 0:
                return False
            done += n
    return True


@numba.njit(nogil=True)
def _advise(file: int, offsets: NDArray[Any], sizes: NDArray[Any]) -> None:
    for i in range(len(offsets)):
        _fadvise(file, offsets[i], sizes[i], _WILLNEED)


@numba.njit(nogil=True)
def _copy(source: NDArray[Any], offsets: NDArray[Any], sizes: NDArray[Any], out: NDArray[Any]) -> int:
    """Copies each range to `out`. Returns the sum of their last bytes, as a checksum to compare the ways."""
    total = 0
    for i in range(len(offsets)):
        found = source[offsets[i] : offsets[i] + sizes[i]]
        for j in range(len(found)):
            out[j] = found[j]
        total += out[len(found) - 1]
    return total


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """Byte ranges of one file in reading order. Fetch i has the ranges `fetches[i]` to `fetches[i + 1]`."""

    path: Path
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    fetches: NDArray[np.int64]

    @property
    def n_bytes(self) -> int:
        return int(self.sizes.sum())

    def share(self, thread: int, n_threads: int) -> Share:
        """The ranges of each fetch that thread number `thread` reads."""
        pairs = zip(self.fetches[:-1].tolist(), self.fetches[1:].tolist(), strict=True)
        cuts = [slice(first + thread, last, n_threads) for first, last in pairs]
        return [(self.offsets[cut], self.sizes[cut]) for cut in cuts]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY)
    try:
        yield file
    finally:
        os.close(file)


def _per_fetch(file: int, share: Share, *, advised: bool) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yields the ranges of each fetch. With `advised`, the kernel has been advised of the next fetch by then."""
    if advised and share:
        _advise(file, *share[0])
    for number, here in enumerate(share):
        if advised and number + 1 < len(share):
            _advise(file, *share[number + 1])
        yield here


def _copy_mapped(file: int, source: NDArray[Any], share: Share, *, advised: bool) -> int:
    out = np.empty(max(int(sizes.max(initial=1)) for _, sizes in share), np.uint8)
    return sum(_copy(source, *ranges, out) for ranges in _per_fetch(file, share, advised=advised))


def _read_and_copy(file: int, buffer: NDArray[Any], share: Share, *, advised: bool) -> int:
    out = np.empty(max(int(sizes.max(initial=1)) for _, sizes in share), np.uint8)
    total = 0
    for offsets, sizes in _per_fetch(file, share, advised=advised):
        at = np.cumsum(sizes) - sizes
        if not _read(file, offsets, sizes, at, buffer):
            raise OSError("a range could not be read")
        total += _copy(buffer, at, sizes, out)
    return total


@contextlib.contextmanager
def reading(way: str, ranges: Ranges, threads: int) -> Iterator[Callable[[], Figures]]:
    """Yields a function that reads all ranges in one of WAYS and returns its seconds and the checksum."""
    shares = [ranges.share(thread, threads) for thread in range(threads)]
    advised = "advised" in way
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_opened(ranges.path))
        pool = stack.enter_context(ThreadPoolExecutor(threads))
        if way.startswith("map"):
            mapping = mmap.mmap(file, 0, access=mmap.ACCESS_READ)  # closed by garbage collection
            if "random" in way:
                mapping.madvise(mmap.MADV_RANDOM)
            sources = [np.frombuffer(mapping, np.uint8)] * threads
        else:
            sources = [np.ones(max(int(sizes.sum()) for _, sizes in share), np.uint8) for share in shares]
        function = functools.partial(_copy_mapped if way.startswith("map") else _read_and_copy, file, advised=advised)

        def read() -> Figures:
            began = time.perf_counter()
            total = sum(pool.map(function, sources, shares))
            return {"seconds": time.perf_counter() - began, "total": total}

        yield read


def sequential(path: Path, threads: int) -> Ranges:
    """The whole file in steps of 1 MiB, dealt to the threads in turns."""
    size = path.stat().st_size
    offsets = np.arange(0, size, SEQUENTIAL_BYTES, dtype=np.int64)
    sizes = np.minimum(SEQUENTIAL_BYTES, size - offsets)
    cuts = np.append(np.arange(0, len(offsets), 32 * threads), len(offsets))
    return Ranges(path=path, offsets=offsets, sizes=sizes, fetches=cuts)


def mirrored(loader: zl.Loader, mirror: Path, *, epoch: int) -> Ranges:
    """The ranges that an epoch reads from a full mirror of raw rows. Rows one after another form one range."""
    store, plan = loader.dataset.store, loader.plan(epoch)
    kept = store.mirror(store.matrix("X"))
    assert kept is not None
    pieces = []
    for number in range(plan.n_fetches):
        found = kept.rows.rows(plan.fetch(number).rows)
        form, starts = found.form, found.starts
        stops = starts + form.row_bytes if form.genes is None else form.places_in_rows(starts, found.lengths)[2]
        first = np.append(True, starts[1:] != stops[:-1])
        pieces.append((starts[first], stops[np.append(first[1:], True)]))
    starts, stops = (np.concatenate(side) for side in zip(*pieces, strict=True))
    fetches = np.cumsum([0, *(len(piece) for piece, _ in pieces)])
    (path,) = mirror.rglob("X.rows")
    return Ranges(path=path, offsets=starts, sizes=stops - starts, fetches=fetches)


# ---- the page cache


def drop(paths: Sequence[Path]) -> None:
    """Drops files from the page cache. Raises RuntimeError if pages remain, for example of a mapped file."""
    for path in paths:
        with _opened(path) as file:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    left = sum(map(cached_bytes, paths))
    if left > 0.01 * sum(path.stat().st_size for path in paths) + (1 << 20):
        raise RuntimeError(f"{left / 1e6:.0f} MB remain in the page cache: does another process have the files mapped?")


def cached_bytes(path: Path) -> int:
    """The bytes of a file that are in the page cache."""
    size = path.stat().st_size
    if not size:
        return 0
    pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    with _opened(path) as file, mmap.mmap(file, 0, access=mmap.ACCESS_READ) as mapping:
        view = np.frombuffer(mapping, np.uint8)
        if _mincore(view.ctypes.data, size, pages.ctypes.data):
            raise OSError(ctypes.get_errno(), "mincore failed")
        del view
    return int((pages & 1).sum()) * mmap.PAGESIZE


def unmap_pages(below: Path) -> None:
    """Unmaps the touched pages of mapped files below a directory, so that `drop` can evict them."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, path = line.split(maxsplit=5)
        if path.startswith(f"{below}{os.sep}"):
            start, stop = (int(word, 16) for word in span.split("-"))
            _madvise(start, stop - start, mmap.MADV_DONTNEED)
