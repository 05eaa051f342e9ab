"""Measures how fast the disk of a local store reads: for two seconds, many reads at once, and nothing is decoded.

The system keeps files that were used lately in memory. So each part of the matrix is first dropped from the page cache,
and counts only if it is gone. Other programs that use the store have to read those parts, 1 GiB at most, again.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from zloader.common import machine, page_cache
from zloader.common.checks import one_or_more
from zloader.dataset.dataset import Dataset
from zloader.insight.link import MOST_BYTES, MOST_PARTS, parts_of

_THREADS = 16
_ENOUGH_S, _MOST_S = 2.0, 5.0
_LEAST_BYTES = 1 << 20  # with fewer, the rate would be a guess
_LEAST_COUNTED = 0.5  # of these bytes must be known to the kernel as read from a disk


def disk_bytes_per_s(
    dataset: Dataset, *, x: str | Sequence[str] = "X", enough_s: float = _ENOUGH_S, most_s: float = _MOST_S
) -> float | None:
    """Bytes per second of reading parts of `x` from the disk of local stores, for `enough_s` seconds and 1 GiB at most.

    None if the files stay in memory, if the kernel does not count what this process reads from their file system, if
    there is too little to tell, or if a read takes longer than `most_s`. Raises OSError if a read fails.
    """
    parts = list(itertools.islice(parts_of(dataset, one_or_more(x=x)), MOST_PARTS))
    files = [(Path(dataset.stores[store].location.path, part.key), part.start, part.size) for store, part in parts]
    before = machine.disk_bytes()
    if not files or before is None:
        return None
    reading = _Reading(files, time.perf_counter() + enough_s)
    threads = [threading.Thread(target=reading.run, daemon=True, name="zloader-disk") for _ in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, reading.began_s + most_s - time.perf_counter()))
    if reading.error is not None:
        raise reading.error
    n_bytes, counted = reading.n_bytes, (machine.disk_bytes() or 0) - before
    if any(thread.is_alive() for thread in threads) or n_bytes < _LEAST_BYTES or counted < _LEAST_COUNTED * n_bytes:
        return None
    return n_bytes / (reading.ended_s - reading.began_s)


class _Reading:
    """Reads parts of files again and again in several threads, until a point in time."""

    def __init__(self, files: Sequence[tuple[Path, int, int]], until_s: float) -> None:
        self.n_bytes = 0
        self.error: OSError | None = None
        self.began_s = self.ended_s = time.perf_counter()
        self._files = itertools.cycle(files)
        self._until_s = until_s
        self._lock = threading.Lock()
        self._tried_bytes = 0

    def run(self) -> None:
        """Reads on; one thread's part."""
        while (file := self._next()) is not None:
            try:
                n_bytes = _read_from_disk(*file)
            except OSError as error:
                self.error = error
                return
            with self._lock:
                self.n_bytes += n_bytes
                self.ended_s = time.perf_counter()

    def _next(self) -> tuple[Path, int, int] | None:
        """The next part, unless it is time to end."""
        with self._lock:
            if self.error or time.perf_counter() >= self._until_s or self._tried_bytes >= MOST_BYTES:
                return None
            file = next(self._files)
            self._tried_bytes += file[2]
            return file


def _read_from_disk(path: Path, start: int, n_bytes: int) -> int:
    """The number of bytes that were read, 0 if they are in memory and stay there."""
    with path.open("rb", buffering=0) as file:
        if not page_cache.drop(file.fileno(), start, n_bytes):
            return 0
        page_cache.prefetch(file.fileno(), np.array([start]), np.array([start + n_bytes]))  # as a loader does
        return os.preadv(file.fileno(), [bytearray(n_bytes)], start)
