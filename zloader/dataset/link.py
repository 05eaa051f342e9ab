"""Measures how fast a store can be read over its link: for two seconds, many reads at once, and nothing is decoded.

The reads are parts of the matrix, in an order that jumps between objects. They have as many bytes in flight as a loader
may have, 64 MiB at least. They grow as long as larger ones come faster, so that a slow link returns many in a few
seconds, and latency does not bound a fast one. The rate is counted from when they have stopped growing. A slow link
gets five seconds. `zloader.dataset.disk` measures the disk of a local store.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from zloader.common.checks import one_or_more
from zloader.common.options import FetchOptions
from zloader.common.records import Span
from zloader.dataset.dataset import Dataset
from zloader.reading.bridge import Bridge, Put

_FIRST_BYTES, _MOST_READ_BYTES = 64 << 10, 2 << 20
_GAIN = 1.3  # times the bytes per second, for which reads of twice the size are worth it
_LEAST_LANES, _MOST_LANES = 32, 256  # reads at once
_ENOUGH_S, _MOST_S = 2.0, 5.0
MOST_BYTES = 1 << 30
_ROUNDS = 2  # reads per lane, without which the rate would be a guess
MOST_PARTS = 4096  # of the matrix, which are read again and again


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
    done: list[tuple[float, int]] = []  # when each read was complete, in order, and its bytes
    growing, grown = set(range(lanes)), 0  # lanes whose reads grow, and how many reads were complete when none did

    def is_enough() -> bool:
        counted = done[grown:]
        if growing or len(counted) < _ROUNDS * lanes:
            return sum(size for _, size in done) >= MOST_BYTES
        return time.perf_counter() - counted[0][0] > enough_s or sum(size for _, size in counted) >= MOST_BYTES

    async def read_on(lane: int) -> None:
        nonlocal grown
        n_bytes, before = _FIRST_BYTES, 0.0
        while not is_enough():
            store, part = next(reads)
            began_s = time.perf_counter()
            (stored,) = await sources[store].read([replace(part, stop=min(part.stop, part.start + n_bytes))])
            done.append((time.perf_counter(), len(stored)))
            if lane not in growing:
                continue
            rate = len(stored) / max(1e-9, done[-1][0] - began_s)
            if rate > _GAIN * before and n_bytes < _MOST_READ_BYTES:
                n_bytes, before = 2 * n_bytes, rate
                continue
            growing.discard(lane)
            grown = grown if growing else len(done)

    async def produce(put: Put[None]) -> None:
        try:
            async with asyncio.timeout(most_s), asyncio.TaskGroup() as group:
                for lane in range(lanes):
                    group.create_task(read_on(lane))
        except TimeoutError:
            pass  # there may be enough reads all the same
        await put([None], 1)

    for _ in Bridge(produce, ready_bytes=1, name="zloader-link"):
        pass
    counted = done[grown:] if not growing and len(done) - grown >= _ROUNDS * lanes else done
    if len(counted) < _ROUNDS * lanes or counted[-1][0] <= counted[0][0]:
        return None
    return sum(size for _, size in counted[1:]) / (counted[-1][0] - counted[0][0])


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
