"""Measures how fast a store can be read over its link: many reads at once, and nothing is decoded.

The reads are parts of the matrix, in an order that jumps between objects. They have as many bytes in flight as a loader
may have, 64 MiB at least. They grow as long as larger ones come faster, so that a slow link returns many in a few
seconds, and latency does not bound a fast one. The rate is counted from when they have stopped growing.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zloader.common.checks import one_or_more
from zloader.common.options import FetchOptions
from zloader.common.records import Span
from zloader.dataset.dataset import Dataset
from zloader.reading.bridge import Bridge, Channel

_FIRST_BYTES, _MOST_READ_BYTES = 64 << 10, 2 << 20
_GAIN = 1.3  # times the bytes per second, for which reads of twice the size are worth it
_LEAST_LANES, _MOST_LANES = 32, 256  # reads at once
_ENOUGH_S, _MOST_S = 2.0, 5.0
_MOST_BYTES = 1 << 30
_ROUNDS = 2  # reads per lane, without which the rate would be a guess
_MOST_PARTS = 4096  # of the matrix, which are read again and again


@dataclass
class _Reads:
    """Reads that were complete one after another, as running totals."""

    n: int = 0
    n_bytes: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    first_bytes: int = 0

    def add(self, at_s: float, n_bytes: int) -> None:
        """Counts a read that was complete at a time."""
        if not self.n:
            self.first_s, self.first_bytes = at_s, n_bytes
        self.n, self.n_bytes, self.last_s = self.n + 1, self.n_bytes + n_bytes, at_s

    @property
    def bytes_per_s(self) -> float | None:
        """The rate from when the first read was complete; None if no time has passed since."""
        lasted_s = self.last_s - self.first_s
        return (self.n_bytes - self.first_bytes) / lasted_s if lasted_s > 0 else None


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
    parts = list(itertools.islice(_parts(dataset, one_or_more(x=x)), _MOST_PARTS))
    if not parts:
        return None
    sources = [store.source(options) for store in dataset.stores]
    lanes = min(max(_LEAST_LANES, options.in_flight_bytes // _MOST_READ_BYTES), _MOST_LANES)
    reads = itertools.cycle(parts)
    growing = set(range(lanes))  # lanes whose reads grow
    every, grown = _Reads(), _Reads()  # all reads, and those since none grows

    def is_enough() -> bool:
        if grown.n < _ROUNDS * lanes:
            return every.n_bytes >= _MOST_BYTES
        return time.perf_counter() - grown.first_s > enough_s or grown.n_bytes >= _MOST_BYTES

    async def read_on(lane: int) -> None:
        n_bytes, before = _FIRST_BYTES, 0.0
        while not is_enough():
            store, part = next(reads)
            asked_s = time.perf_counter()
            (stored,) = await sources[store].read([replace(part, stop=min(part.stop, part.start + n_bytes))])
            now_s = time.perf_counter()
            every.add(now_s, len(stored))
            if not growing:
                grown.add(now_s, len(stored))
            rate = len(stored) / max(1e-9, now_s - asked_s)
            if lane in growing and rate > _GAIN * before and n_bytes < _MOST_READ_BYTES:
                n_bytes, before = 2 * n_bytes, rate
            else:
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


def _parts(dataset: Dataset, names: Sequence[str]) -> Iterator[tuple[int, Span]]:
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
            for shard in range(min(array.n_shards, _MOST_PARTS))
        ]
        objects += [(number, key, sizes[key]) for key in keys if sizes.get(key)]
    longest = max((size for _, _, size in objects), default=0)
    for start in range(0, longest, _MOST_READ_BYTES):
        for number, key, size in objects:
            if start < size:
                yield number, Span(key=key, start=start, stop=min(start + _MOST_READ_BYTES, size))
