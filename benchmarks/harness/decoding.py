"""Decoding alone: the speed that no reader of a store can exceed without a mirror."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import zloader as zl
from zloader.storage.decode import Decoder
from zloader.storage.layout import ArrayLayout, ObjectIndex, chunks_of, reads_of


def chunk_bytes(store: Path, layout: ArrayLayout) -> list[np.ndarray]:
    """The stored bytes of every chunk of an array, in memory."""
    chunks = []
    for shard in range(layout.n_shards):
        content = (store / layout.shard_key(shard)).read_bytes()
        span = layout.placement.index(shard, len(content))
        table = layout.placement.parse(content[span.start : span.stop], shard, len(content))
        view = np.frombuffer(content, np.uint8)
        here = np.arange(shard * layout.chunks_per_shard, min((shard + 1) * layout.chunks_per_shard, layout.n_chunks))
        reads = reads_of(layout, here, {shard: ObjectIndex(table)}, gap_bytes=0, max_read_bytes=1 << 40)
        starts = np.array([span.start for span in reads.spans])[reads.numbers] + reads.offsets
        chunks += [view[a:b] for a, b in zip(starts.tolist(), (starts + reads.sizes).tolist(), strict=True)]
    return chunks


def decode_seconds(loader: zl.Loader, stored: dict[str, list[np.ndarray]]) -> float:
    """Seconds for decoding alone, of the chunks that one epoch of `loader` decodes without a mirror."""
    dataset, plan = loader.dataset, loader.plan(0)
    matrix = dataset.store.matrix("X")
    indptr = dataset.store.offsets(matrix)
    jobs = []
    for number in range(plan.n_fetches):
        starts, stops = matrix.elements_of(plan.fetch(number).rows, indptr)
        for layout in matrix.arrays:
            chunks = chunks_of(starts, stops, layout)
            jobs += [(layout, part) for part in np.array_split(chunks, max(1, len(chunks) // 16))]
    decoders = {layout.path: Decoder(layout) for layout in matrix.arrays}

    def decode(job: tuple[ArrayLayout, np.ndarray]) -> None:
        layout, chunks = job
        out = scratch[layout.path]
        for chunk in chunks.tolist():
            n = min(layout.chunk_elements, layout.n_elements - chunk * layout.chunk_elements)
            decoders[layout.path].decode(stored[layout.path][chunk], out.get()[:n])

    scratch = {layout.path: _PerThread(layout) for layout in matrix.arrays}
    with ThreadPoolExecutor(loader.options.threads) as threads:
        before = time.perf_counter()
        for _ in threads.map(decode, jobs):
            pass
        return time.perf_counter() - before


class _PerThread:
    """A buffer of one chunk per thread."""

    def __init__(self, layout: ArrayLayout) -> None:
        self._layout, self._own = layout, {}

    def get(self) -> np.ndarray:
        own = threading.get_ident()
        if own not in self._own:
            self._own[own] = np.empty(self._layout.chunk_elements, self._layout.dtype)
        return self._own[own]
