"""Measures how fast a store can be read, over its link or from its disk: many reads at once, and nothing is decoded.

The reads of a link are parts of the matrix, in an order that jumps between objects. They have as many bytes in flight
as a loader may have, 64 MiB at least. They grow as long as larger ones come faster, so that a slow link returns many in
a few seconds, and latency does not bound a fast one. The rate is counted from when they have stopped growing, for two
seconds; a slow link gets five.

The system keeps files that were used lately in memory. So each part of a local store is first dropped from the page
cache, and counts only if it is gone. Other programs that use the store have to read those parts, 1 GiB at most, again.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from zloader.common import page_cache
from zloader.common.checks import one_or_more
from zloader.common.options import FetchOptions
from zloader.common.records import Span
from zloader.dataset.dataset import Dataset
from zloader.insight.usage import disk_bytes
from zloader.reading.bridge import Bridge, Channel

_FIRST_BYTES, _MOST_READ_BYTES = 64 << 10, 2 << 20
_GAIN = 1.3  # times the bytes per second, for which reads of twice the size are worth it
_LEAST_LANES, _MOST_LANES = 32, 256  # reads at once
_ENOUGH_S, _MOST_S = 2.0, 5.0
MOST_BYTES = 1 << 30
_ROUNDS = 2  # reads per lane, without which the rate would be a guess
MOST_PARTS = 4096  # of the matrix, which are read again and again
_DISK_THREADS = 16
_LEAST_DISK_BYTES = 1 << 20  # with fewer, the rate would be a guess
_LEAST_COUNTED = 0.5  # of these bytes must be known to the kernel as read from a disk


@dataclass
class Reads:
    """Reads that were complete one after another, as running totals."""

    n: int = 0
    n_bytes: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    _first_bytes: int = 0

    def add(self, at_s: float, n_bytes: int) -> None:
        """Counts a read that was complete at a time."""
        if not self.n:
            self.first_s, self._first_bytes = at_s, n_bytes
        self.n, self.n_bytes, self.last_s = self.n + 1, self.n_bytes + n_bytes, at_s

    @property
    def bytes_per_s(self) -> float | None:
        """The rate from when the first read was complete; None if no time has passed since."""
        lasted_s = self.last_s - self.first_s
        return (self.n_bytes - self._first_bytes) / lasted_s if lasted_s > 0 else None


def link_bytes_per_s(
    dataset: Dataset,
    *,
    x: str | Sequence[str] = "X",
    options: FetchOptions,
    enough_s: float = _ENOUGH_S,
    most_s: float = _MOST_S,
) -> float | None:
    """Bytes per second of reading parts of `x` without decoding them; None if it is too slow or too little to tell.

    Reads for `enough_s` seconds, or up to `most_s` on a slow link, and 1 GiB at most. Raises any ReadError.
    """
    parts = list(itertools.islice(parts_of(dataset, one_or_more(x=x)), MOST_PARTS))
    if not parts:
        return None
    sources = [store.source(options) for store in dataset.stores]
    lanes = min(max(_LEAST_LANES, options.in_flight_bytes // _MOST_READ_BYTES), _MOST_LANES)
    reads = itertools.cycle(parts)
    growing = set(range(lanes))  # lanes whose reads grow
    every, grown = Reads(), Reads()  # all reads, and those since none grows

    def is_enough() -> bool:
        if grown.n < _ROUNDS * lanes:
            return every.n_bytes >= MOST_BYTES
        return time.perf_counter() - grown.first_s > enough_s or grown.n_bytes >= MOST_BYTES

    async def read_on(lane: int) -> None:
        n_bytes, before = _FIRST_BYTES, 0.0
        while not is_enough():
            store, part = next(reads)
            began_s = time.perf_counter()
            (stored,) = await sources[store].read([replace(part, stop=min(part.stop, part.start + n_bytes))])
            now_s = time.perf_counter()
            every.add(now_s, len(stored))
            if not growing:
                grown.add(now_s, len(stored))
            if lane not in growing:
                continue
            rate = len(stored) / max(1e-9, now_s - began_s)
            if rate > _GAIN * before and n_bytes < _MOST_READ_BYTES:
                n_bytes, before = 2 * n_bytes, rate
                continue
            growing.discard(lane)

    async def produce(put: Channel[None]) -> None:
        try:
            async with asyncio.timeout(most_s), asyncio.TaskGroup() as group:
                for lane in range(lanes):
                    group.create_task(read_on(lane))
        except TimeoutError:
            pass  # there may be enough reads all the same
        await put([None], 1)

    for _ in Bridge(produce, ready_bytes=1, name="zloader-link"):
        pass
    counted = grown if grown.n >= _ROUNDS * lanes else every
    return counted.bytes_per_s if counted.n >= _ROUNDS * lanes else None


def parts_of(dataset: Dataset, names: Sequence[str]) -> Iterator[tuple[int, Span]]:
    """Parts of the stored objects of some matrices, with the numbers of their stores.

    Successive parts are of different objects, if there are several.
    """
    objects = []
    for number, store in enumerate(dataset.stores):
        sizes = store.object_sizes()
        keys = [
            array.shard_key(shard)
            for name in names
            for array in store.matrix(name).arrays
            for shard in range(min(array.n_shards, MOST_PARTS))
        ]
        objects += [(number, key, sizes[key]) for key in keys if sizes.get(key)]
    longest = max((size for _, _, size in objects), default=0)
    for start in range(0, longest, _MOST_READ_BYTES):
        for number, key, size in objects:
            if start < size:
                yield number, Span(key=key, start=start, stop=min(start + _MOST_READ_BYTES, size))


def disk_bytes_per_s(
    dataset: Dataset, *, x: str | Sequence[str] = "X", enough_s: float = _ENOUGH_S, most_s: float = _MOST_S
) -> float | None:
    """Bytes per second of reading parts of `x` from the disk of local stores, for `enough_s` seconds and 1 GiB at most.

    None if the files stay in memory, if the kernel does not count what this process reads from their file system, if
    there is too little to tell, or if a read takes longer than `most_s`. Raises OSError if a read fails.
    """
    parts = list(itertools.islice(parts_of(dataset, one_or_more(x=x)), MOST_PARTS))
    files = [(Path(dataset.stores[store].read_from.path, part.key), part.start, part.size) for store, part in parts]
    before = disk_bytes()
    if not files or before is None:
        return None
    reading = _Reading(files, time.perf_counter() + enough_s)
    threads = [threading.Thread(target=reading.run, daemon=True, name="zloader-disk") for _ in range(_DISK_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, reading.began_s + most_s - time.perf_counter()))
    if reading.error is not None:
        raise reading.error
    n_bytes, counted = reading.n_bytes, (disk_bytes() or 0) - before
    if (
        any(thread.is_alive() for thread in threads)
        or n_bytes < _LEAST_DISK_BYTES
        or counted < _LEAST_COUNTED * n_bytes
    ):
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
