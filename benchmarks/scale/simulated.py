"""Nothing by itself: simulated machines, in virtual time, for cluster.py.

The plan (zloader.order.plan), the reads of each fetch (zloader.reading.read_plan, with the gaps and sizes of
FetchOptions), and which blocks of rows a mirror gets (zloader.insight.cost) are the code that runs in production.
Simulated are the store, whose rows all have 1 840 values, the machines, and the time that they take. A machine reads
one fetch after another from the bucket at `bucket_mbps`, and decodes and gathers one after another.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.measuring import table
from zloader.common.options import FetchOptions
from zloader.insight.cost import blocks_to_read
from zloader.order.plan import Plan
from zloader.order.shuffling import stratified
from zloader.reading.read_plan import FillPlanner
from zloader.storage.layout import (
    ArrayLayout,
    MatrixLayout,
    ObjectIndex,
    Placement,
    chunks_of,
    distinct,
    expand,
    reads_of,
)
from zloader.storage.row_blocks import RowForm

Figures = dict[str, Any]
Columns = dict[str, Callable[[Figures], str]]  # by header: what each shows of a run

VALUES = 1840  # per row
CHUNK = 16 * VALUES
CHUNKS_PER_SHARD = (256 << 20) // (2 * CHUNK)  # 256 MiB of values of 2 bytes
STORED = {"indices": 0.94, "data": 0.478}  # bytes per value; see LOG.md, codecs
STORED_CHUNK = {path: round(CHUNK * stored) for path, stored in STORED.items()}  # bytes
DECODED = 4  # bytes per value in a mirror
BATCH, FACTOR = 64, 256


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Some machines. Rates are in MB/s (10^6 bytes) or rows/s."""

    machines: int = 8
    bucket_mbps: float = 1200.0
    latency_s: float = 0.03
    cold_rows_per_s: float = 231_000.0  # decoded and gathered: 16 cores, LOG.md
    warm_rows_per_s: float = 440_000.0  # gathered only
    nic_mbps: float = 3125.0  # 25 Gbit/s


class Pipe:
    """Passes one thing at a time: a link, or the cores of a machine."""

    def __init__(self, per_s: float) -> None:
        self.busy_s = 0.0
        self._per_s = per_s
        self._free_s = 0.0

    def begin(self, amount: float) -> float:
        """Puts something at the end of the queue. Returns when it will have passed."""
        takes_s = amount / self._per_s
        self.busy_s += takes_s
        self._free_s = max(self._free_s, asyncio.get_running_loop().time()) + takes_s
        return self._free_s


async def until(*times_s: float) -> None:
    """Sleeps until the last of these times."""
    await asyncio.sleep(max(times_s) - asyncio.get_running_loop().time())


class Store:
    """The two arrays of the matrix. Chunks of both begin at the same elements."""

    def __init__(self, rows: int) -> None:
        self.rows, self._options = rows, FetchOptions(memory="1GiB")
        self._arrays: list[tuple[ArrayLayout, defaultdict[int, ObjectIndex]]] = []
        self._sizes: dict[str, int] = {}  # of the first objects, as a sample
        for path in STORED:
            layout = _layout(path, rows)
            size = STORED_CHUNK[path]
            shards = map(layout.shard_key, range(min(16, layout.n_shards)))
            self._sizes |= dict.fromkeys(shards, size * CHUNKS_PER_SHARD)
            offsets = size * np.arange(CHUNKS_PER_SHARD)
            index = ObjectIndex(np.stack([offsets, np.full(CHUNKS_PER_SHARD, size)], axis=1).astype(np.uint64))
            self._arrays.append((layout, defaultdict(lambda index=index: index)))
        genes, values = (layout for layout, _ in self._arrays)
        self._matrix = MatrixLayout(path="X", n_rows=rows, n_genes=1 << 16, genes=genes, values=values)
        self.form = RowForm.of(self._matrix, None, compact=False)

    @cached_property
    def layout(self) -> ArrayLayout:
        """That of either array, for chunks."""
        return self._arrays[0][0]

    @cached_property
    def filling(self) -> FillPlanner:
        """The planner of mirrors, of machines that read some of the rows each."""
        return FillPlanner.of(self._matrix, self.form, self._options, self._sizes, sweeps=False)

    @property
    def stored_bytes(self) -> int:
        """The bytes of all objects of both arrays."""
        layout = self.layout
        index_bytes = len(STORED) * layout.n_shards * layout.placement.index_bytes
        return layout.n_chunks * sum(STORED_CHUNK.values()) + index_bytes

    def chunks(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The chunks of some rows."""
        return chunks_of(self._first_elements(rows), self._first_elements(rows + 1), self.layout)

    def _first_elements(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """They drift, so that blocks of rows do not begin with a chunk."""
        drifting = VALUES * rows + np.round(40 * VALUES * np.sin(rows / 977))
        return np.clip(drifting, 0, VALUES * self.rows).astype(np.int64)

    def blocks(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The blocks of a mirror that have some rows."""
        return distinct(rows // self.form.block_rows)

    def reads(self, chunks: NDArray[np.int64]) -> tuple[int, int]:
        """GETs and bytes of these chunks of both arrays."""
        gap_bytes, max_read_bytes = self._options.gap_bytes, self._options.max_read_bytes
        reads = [
            reads_of(layout, chunks, indexes, gap_bytes=gap_bytes, max_read_bytes=max_read_bytes)
            for layout, indexes in self._arrays
        ]
        return sum(len(of_array.spans) for of_array in reads), sum(of_array.n_bytes for of_array in reads)

    def mirror_reads(self, blocks: NDArray[np.int64]) -> tuple[int, int, NDArray[np.int64]]:
        """GETs, bytes and shards of reading some blocks, in the batches of the planner: fast, because it plans all of
        them at once. No read is as long as the longest one may be.
        """
        if not len(blocks):
            return 0, 0, blocks
        layout, gap = self.layout, self._options.gap_bytes
        firsts = blocks * self.form.block_rows
        stops = np.minimum(firsts + self.form.block_rows, self.rows)
        begin, end = (self._first_elements(rows) for rows in (firsts, stops))
        begin, end = layout.chunk_of(begin), layout.chunk_of(end - 1) + 1
        batch = np.repeat(np.arange(len(blocks)) // self.filling.few, end - begin)
        batch, chunks = np.divmod(distinct(batch * layout.n_chunks + expand(begin, end - begin)), layout.n_chunks)
        shards, skipped = chunks // CHUNKS_PER_SHARD, np.diff(chunks) - 1
        apart, gets, n_bytes = (np.diff(batch) != 0) | (np.diff(shards) != 0), 0, 0
        for size in STORED_CHUNK.values():
            split = apart | (skipped * size > gap)
            gets += 1 + int(np.count_nonzero(split))
            n_bytes += size * (len(chunks) + int(skipped[~split].sum()))
        return gets, n_bytes, distinct(shards)


def _layout(path: str, rows: int) -> ArrayLayout:
    return ArrayLayout(
        path=path,
        dtype=np.dtype("uint16"),
        n_elements=rows * VALUES,
        chunk_elements=CHUNK,
        codecs=({"name": "bytes"},),
        placement=Placement(path=path, chunks_per_object=CHUNKS_PER_SHARD, sharded=True),
    )


def show(title: str, runs: Sequence[Figures], names: Sequence[str], columns: Columns) -> None:
    """Prints a table with a line for each run: what it was, and what came out of it."""
    print(f"\n{title}")
    values = [[*(str(run[name]) for name in names), *(column(run) for column in columns.values())] for run in runs]
    table([[*names, *columns], *values])


class Epoch:
    """The plan of an epoch of all rows or of some, and the blocks of a mirror that each of its fetches needs."""

    def __init__(self, store: Store, epoch: int, part: NDArray[np.int64] | None = None) -> None:
        """`part` has the rows of a view, in ascending order."""
        self.store, self.part = store, part
        n_rows = store.rows if part is None else len(part)
        order = stratified().order(SimpleNamespace(n_obs=n_rows), BATCH, BATCH * FACTOR)
        self.plan = Plan(order=order, epoch=epoch, batch_size=BATCH, fetch_factor=FACTOR)
        self._blocks: dict[int, NDArray[np.int32]] = {}

    def blocks(self, number: int) -> NDArray[np.int32]:
        """The blocks of a mirror that a fetch needs."""
        if number not in self._blocks:
            rows = self.plan.fetch(number).rows
            rows = rows if self.part is None else self.part[rows]
            self._blocks[number] = self.store.blocks(rows).astype(np.int32)
        return self._blocks[number]


@dataclass(eq=False)
class Machine:
    """A machine with a mirror that it keeps from epoch to epoch."""

    cluster: Cluster
    store: Store

    def __post_init__(self) -> None:
        self.held = np.zeros(self.store.form.n_blocks, bool)
        self.begin()

    def begin(self) -> None:
        """Begins an epoch: the clock is at 0, and nothing but the mirror is left of the one before."""
        self.bucket = Pipe(1e6 * self.cluster.bucket_mbps)
        self.cores = Pipe(1.0)
        self.nic = Pipe(1e6 * self.cluster.nic_mbps)
        self.gets = self.bytes_read = 0
        self.indexed = np.zeros(self.store.layout.n_shards, bool)

    @property
    def mirror_bytes(self) -> int:
        """The size of its mirror."""
        return int(np.count_nonzero(self.held)) * self.store.form.block_rows * VALUES * DECODED

    def read(self, epoch: Epoch, number: int) -> tuple[int, float]:
        """The bytes that a fetch reads from the bucket, and the rows that it decodes for each one that it needs."""
        missing = blocks_to_read(self.store.filling, epoch.blocks(number).astype(np.int64), self.held)
        self.held[missing] = True
        gets, n_bytes, shards = self.store.mirror_reads(missing)
        n_new = int(np.count_nonzero(~self.indexed[shards])) * len(STORED)
        self.indexed[shards] = True
        n_bytes += n_new * self.store.layout.placement.index_bytes
        self.gets += gets + n_new
        self.bytes_read += n_bytes
        return n_bytes, len(missing) * self.store.form.block_rows / epoch.plan.n_positions(number)


def busiest(busy_s: dict[str, float], seconds: float) -> tuple[str, float]:
    """What was busy for longest, and for which share of the time."""
    name = max(busy_s, key=lambda each: busy_s[each])
    return name, busy_s[name] / seconds
