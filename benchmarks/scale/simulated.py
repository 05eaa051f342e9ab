"""Nothing by itself: a simulated cluster of producers, in virtual time, for scale.py.

The plan (zloader.order.plan), the reads of each fetch (zloader.reading.read_plan, with the gaps and sizes of
FetchOptions), which blocks of rows a mirror gets (zloader.insight.cost), and everything that decides in `zr.stream`
(zloader.producing) are the code that runs in production. Simulated are the store, whose rows all have 1 840 values, the
machines, and the time that they take:

- A machine reads one fetch after another from the bucket at `bucket_mbps`, and decodes and gathers one after another.
  Its producer makes two fetches at a time, so it reads while it decodes.
- Finished minibatches leave a machine at `nic_mbps`, and arrive at the trainer's at `trainer_mbps`.
- The trainer takes `take_rows_per_s` at most.
- A machine that fails is noticed after `notice_s`, and another one comes after `restart_s`, with an empty mirror.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.measuring import table
from benchmarks.harness.virtual_time import run_in_virtual_time
from zloader.common.options import FetchOptions
from zloader.insight.cost import blocks_to_read
from zloader.order.plan import Plan, Remaining
from zloader.order.shuffling import stratified
from zloader.producing.production import Production
from zloader.producing.window import LostError, MeanBytes, Window
from zloader.reading.read_plan import FillPlanner
from zloader.reading.resources import Counters
from zloader.storage.layout import ArrayLayout, MatrixLayout, chunk_spans, chunks_of, distinct, expand, total_bytes
from zloader.storage.placement import ObjectIndex, Placement
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
GROUP = 128  # minibatches; a producer makes smaller groups, which would only make the simulation slow
SAMPLED = 64  # fetches of an epoch whose reads without a mirror are planned
GROUPS_AHEAD = 2  # as in zloader.ray.crew


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machines of the producers and of the trainer. Rates are in MB/s (10^6 bytes) or rows/s."""

    machines: int = 8
    bucket_mbps: float = 1200.0
    latency_s: float = 0.03
    cold_rows_per_s: float = 231_000.0  # decoded and gathered: 16 cores, LOG.md
    warm_rows_per_s: float = 440_000.0  # gathered only
    nic_mbps: float = 3125.0  # 25 Gbit/s
    trainer_mbps: float = 12_500.0  # 100 Gbit/s
    take_rows_per_s: float = 440_000.0
    row_bytes: float = 8.0 * VALUES  # CSR: int32 and float32
    ahead_bytes: int = 8 << 30
    mirror: bool = False
    locality: str = "any"
    fail_every_s: float = math.inf  # any machine of the cluster
    notice_s: float = 15.0
    restart_s: float = 60.0


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
        spans = [
            chunk_spans(layout, chunks, indexes, gap_bytes=gap_bytes, max_read_bytes=max_read_bytes)[0]
            for layout, indexes in self._arrays
        ]
        return sum(map(len, spans)), sum(map(total_bytes, spans))

    def mirror_reads(self, filling: FillPlanner, blocks: NDArray[np.int64]) -> tuple[int, int, NDArray[np.int64]]:
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
        batch = np.repeat(np.arange(len(blocks)) // filling.few, end - begin)
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
    """The plan of an epoch, and what each of its fetches needs."""

    def __init__(self, store: Store, epoch: int, **place: Any) -> None:
        """`place` are options of the plan, such as the rank. By default, there is one rank."""
        self.store = store
        options = {"sampling": stratified(), "batch_size": BATCH, "fetch_factor": FACTOR, **place}
        self.plan = Plan(dataset_rows=store.rows, epoch=epoch, **options)
        self._blocks: dict[int, NDArray[np.int32]] = {}
        self._shards: dict[int, NDArray[np.int64]] = {}

    def blocks(self, number: int) -> NDArray[np.int32]:
        """The blocks of a mirror that a fetch needs."""
        if number not in self._blocks:
            self._blocks[number] = self.store.blocks(self.plan.fetch(number).rows).astype(np.int32)
        return self._blocks[number]

    def shards(self, number: int) -> NDArray[np.int64]:
        """The shards of a fetch, by the first row of every 16."""
        if number not in self._shards:
            self._shards[number] = np.unique(self.plan.fetch(number).rows[::16] * VALUES // (CHUNK * CHUNKS_PER_SHARD))
        return self._shards[number]

    @cached_property
    def mean_reads(self) -> tuple[int, int]:
        """GETs and bytes of a fetch without a mirror, on average: of some, because they differ little."""
        numbers = np.unique(np.linspace(0, self.plan.n_fetches - 1, SAMPLED).astype(int)).tolist()
        of_each = [self.store.reads(self.store.chunks(self.plan.fetch(number).rows)) for number in numbers]
        gets, n_bytes = np.mean(of_each, axis=0).round().astype(int).tolist()
        return gets, n_bytes


@dataclass(eq=False)
class Machine:
    """A machine with one producer, as often as it is started."""

    name: str
    cluster: Cluster
    store: Store
    free: bool = True

    def __post_init__(self) -> None:
        self.held = np.zeros(self.store.form.n_blocks if self.cluster.mirror else 0, bool)
        self.begin()

    def begin(self) -> None:
        """Begins an epoch: the clock is at 0, and nothing but the mirror is left of the one before."""
        self.free = True
        self.bucket = Pipe(1e6 * self.cluster.bucket_mbps)
        self.cores = Pipe(1.0)
        self.nic = Pipe(1e6 * self.cluster.nic_mbps)
        self.gets = self.bytes_read = 0
        self.forget()

    def forget(self) -> None:
        """Forgets the shard indexes, as a new producer does."""
        self.indexed = np.zeros(self.store.layout.n_shards, bool)

    @property
    def mirror_bytes(self) -> int:
        """The size of its mirror."""
        return int(np.count_nonzero(self.held)) * self.store.form.block_rows * VALUES * DECODED

    def read(self, epoch: Epoch, number: int) -> tuple[int, float]:
        """The bytes that a fetch reads from the bucket, and the rows that it decodes for each one that it needs."""
        if not self.cluster.mirror:
            gets, n_bytes, share = *epoch.mean_reads, 1.0
            shards = epoch.shards(number)
        else:
            missing = blocks_to_read(epoch.filling, epoch.blocks(number).astype(np.int64), self.held)
            self.held[missing] = True
            gets, n_bytes, shards = self.store.mirror_reads(epoch.filling, missing)
            share = len(missing) * self.store.form.block_rows / epoch.plan.n_positions(number)
        n_new = int(np.count_nonzero(~self.indexed[shards])) * len(STORED)
        self.indexed[shards] = True
        n_bytes += n_new * self.store.layout.placement.index_bytes
        self.gets += gets + n_new
        self.bytes_read += n_bytes
        return n_bytes, share


@dataclass(frozen=True)
class Item:
    """A minibatch."""

    nbytes: int
    error: None = None


@dataclass(eq=False)
class Maker:
    """The producer of a machine."""

    at: Machine
    trainer: Pipe
    lost: bool = False
    stopped: bool = False
    makings: list[Making] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.machine = self.at.name
        self.dead = asyncio.Event()

    def make(self, plan: Epoch, remaining: Remaining, ready_bytes: int) -> Making:
        """Begins what remains of a fetch."""
        making = Making(self, plan, remaining)
        self.makings = [each for each in self.makings if not each.task.done()] + [making]
        if self.stopped:
            self.stop()
        return making

    async def held(self, plan: Epoch, coming: Sequence[Remaining]) -> list[float]:
        """The share of each fetch in the machine's mirror."""
        return [float(np.mean(self.at.held[plan.blocks(remaining.number)])) for remaining in coming]

    async def ended(self) -> None:
        """Returns when the machine's failure has been noticed."""
        await self.dead.wait()

    def stop(self) -> None:
        """Stops all work at once, which nobody notices yet."""
        self.stopped = True
        for making in self.makings:
            making.task.cancel()


class Making:
    """A fetch on its way through a machine."""

    def __init__(self, maker: Maker, epoch: Epoch, remaining: Remaining) -> None:
        self._maker, self._epoch, self._remaining = maker, epoch, remaining
        self._groups: asyncio.Queue[int] = asyncio.Queue(GROUPS_AHEAD)
        self.task = asyncio.ensure_future(self._make())

    async def _make(self) -> None:
        at, cluster = self._maker.at, self._maker.at.cluster
        number, _, size = self._remaining
        n_bytes, share = at.read(self._epoch, number)
        if n_bytes:
            await until(at.bucket.begin(n_bytes) + cluster.latency_s)
        decode_s = 1 / cluster.cold_rows_per_s - 1 / cluster.warm_rows_per_s
        await until(at.cores.begin(share * self._epoch.plan.n_positions(number) * decode_s))
        for begin in range(0, size, GROUP):
            n_items = min(GROUP, size - begin)
            await until(at.cores.begin(n_items * BATCH / cluster.warm_rows_per_s))
            await self._groups.put(n_items)
        await self._groups.put(0)

    async def next(self) -> tuple[list[Item], Counters] | None:
        """The next group, when it has arrived at the trainer's machine."""
        maker = self._maker
        got, dead = asyncio.ensure_future(self._groups.get()), asyncio.ensure_future(maker.dead.wait())
        try:
            await asyncio.wait({got, dead}, return_when=asyncio.FIRST_COMPLETED)
            if dead.done():
                raise LostError("the machine failed")
            n_items = got.result()
        finally:
            got.cancel()
            dead.cancel()
        if not n_items:
            return None
        item = Item(round(BATCH * maker.at.cluster.row_bytes))
        n_bytes = n_items * item.nbytes
        await until(maker.at.nic.begin(n_bytes), maker.trainer.begin(n_bytes))
        return [item] * n_items, Counters()

    def cancel(self) -> None:
        """Ends the making."""
        self.task.cancel()


class Crew:
    """The producers of all machines. One fails every `fail_every_s`, on average."""

    def __init__(self, machines: Sequence[Machine], cluster: Cluster) -> None:
        self.size = len(machines)
        self.failures = 0
        self.trainer = Pipe(1e6 * cluster.trainer_mbps)
        self._machines = machines
        self._cluster = cluster
        self._makers: list[Maker] = []
        self._random = random.Random(0)
        self._restarts: set[asyncio.Task[None]] = set()
        self._freed = asyncio.Event()

    async def join(self, others_work: Callable[[], bool]) -> Maker:
        """A producer on a free machine."""
        while not (free := [machine for machine in self._machines if machine.free]):
            self._freed.clear()
            await self._freed.wait()
        free[0].free = False
        free[0].forget()
        self._makers.append(Maker(free[0], self.trainer))
        return self._makers[-1]

    def leave(self, maker: Any) -> None:
        """The producer works again in the next epoch."""
        if maker in self._makers:
            self._makers.remove(maker)
            self._free(maker.at)

    def drop(self, maker: Any) -> None:
        """The producer is dead. Its machine comes back later."""
        maker.lost = True
        maker.dead.set()
        maker.stop()
        if maker in self._makers:
            self._makers.remove(maker)
            self._restarts.add(asyncio.ensure_future(self._restart(maker.at)))

    async def _restart(self, machine: Machine) -> None:
        await asyncio.sleep(self._cluster.restart_s)
        machine.held[:] = False
        self._free(machine)

    def _free(self, machine: Machine) -> None:
        machine.free = True
        self._freed.set()

    async def watch(self) -> None:
        """Lets machines fail."""
        while self._cluster.fail_every_s < math.inf:
            await asyncio.sleep(self._random.expovariate(1 / self._cluster.fail_every_s))
            if self._makers:
                self.failures += 1
                maker = self._random.choice(self._makers)
                maker.stop()
                asyncio.get_running_loop().call_later(self._cluster.notice_s, maker.dead.set)


def epochs(store: Store, cluster: Cluster, made: Sequence[Epoch]) -> Iterator[dict[str, float]]:
    """Runs some epochs, one after the other, on machines that keep their mirrors. Yields the figures of each."""
    machines = [Machine(f"machine {number}", cluster, store) for number in range(cluster.machines)]
    for epoch in made:
        for machine in machines:
            machine.begin()
        figures, seconds = run_in_virtual_time(_epoch(cluster, epoch, machines))
        yield {
            **figures,
            "rows_per_s": store.rows / seconds,
            "seconds": seconds,
            "mirror_bytes": max(machine.mirror_bytes for machine in machines),
        }


async def _epoch(cluster: Cluster, epoch: Epoch, machines: Sequence[Machine]) -> dict[str, float]:
    crew, taking, n_made = Crew(machines, cluster), Pipe(cluster.take_rows_per_s), 0
    mean = MeanBytes(n_bytes=BATCH * cluster.row_bytes)
    window = Window(epoch.plan.remaining(), mean, ahead_bytes=cluster.ahead_bytes, overtake_s=30.0)
    by_mirror = cluster.locality == "machine"
    production = Production(crew, epoch, window, mean, by_mirror=by_mirror, stall_s=300.0)
    handed = 0.0

    async def put(items: Sequence[Any], _: int) -> None:
        nonlocal n_made, handed
        n_made += len(items)
        await until(handed)  # the consumer has the group before
        handed = taking.begin(len(items) * BATCH)

    await production.run(put)
    await until(handed)
    assert n_made == epoch.plan.n_minibatches, "a minibatch is missing, or came twice"
    seconds = asyncio.get_running_loop().time()
    busy = {
        "bucket links": max(machine.bucket.busy_s for machine in machines),
        "cores": max(machine.cores.busy_s for machine in machines),
        "producers' NICs": max(machine.nic.busy_s for machine in machines),
        "trainer's NIC": crew.trainer.busy_s,
        "training process": taking.busy_s,
    }
    bound, share = busiest(busy, seconds)
    return {
        "gets": sum(machine.gets for machine in machines),
        "bytes_read": sum(machine.bytes_read for machine in machines),
        "failures": crew.failures,
        "bound": bound if share > 0.8 else "order",
        "bound_share": share,
    }


def busiest(busy_s: dict[str, float], seconds: float) -> tuple[str, float]:
    """What was busy for longest, and for which share of the time."""
    name = max(busy_s, key=lambda each: busy_s[each])
    return name, busy_s[name] / seconds
