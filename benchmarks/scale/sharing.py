"""Nothing by itself: machines that train on one store, in virtual time, for cluster.py.

The plan, the chunks of a fetch and the mirrors are those of simulated.py. With mirrors of their own, machines share
nothing but the bucket, so one machine of N is simulated (Way), with an N-th of the bucket's GETs. With one copy of the
stored bytes for all machines, all are (OneCopy). Links, disks, cores and actors serve one thing after another, and a
read has all of them work at the same time. A trainer makes two fetches at a time.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.virtual_time import run_in_virtual_time
from benchmarks.scale.simulated import (
    CHUNKS_PER_SHARD,
    DECODED,
    STORED_CHUNK,
    VALUES,
    Cluster,
    Epoch,
    Figures,
    Machine,
    Pipe,
    Store,
    busiest,
    until,
)
from zloader.order.permutation import key_of, words_at
from zloader.reading.stretches import STRETCH_BYTES

Ids = NDArray[np.int64]
PEER_CALL_S = 2e-3  # processor time of a call between machines, on each side; measured on two cores
MOST_READ = 8 << 20  # bytes of a read of stretches that lie side by side, and of the answer to a call


@dataclass(frozen=True, kw_only=True)
class Many(Cluster):
    """Machines that train. `bucket_mbps` and `nic_mbps` are those of each machine, `nic_mbps` in each direction."""

    mirror: bool = True
    cores: int = 16
    trainers: int = 8
    disk_mbps: float = 3000.0
    page_bytes: float = 128e9  # memory for pages of the mirror
    put_mbps: float = 2100.0  # Ray's object store takes that from one process
    actors: int = 1
    peer_call_s: float = PEER_CALL_S
    stretch_bytes: int = STRETCH_BYTES
    gets_per_s: float = math.inf
    deadline_s: float = 10.0  # of an answer of another machine; then the bucket is read
    deadline_covers_bucket: bool = False  # whether an owner that waits for the bucket is late, too


class Node(Machine):
    """A machine with its trainers."""

    alive = True
    died_s = math.inf

    def begin(self) -> None:
        """Begins an epoch."""
        super().begin()
        self.nic_in = Pipe(1e6 * self.cluster.nic_mbps)
        self.disk = Pipe(1e6 * self.cluster.disk_mbps)
        self.actor = Pipe(self.cluster.actors)
        self.sent = self.asked_again = 0
        self.at_work: set[int] = set()

    @property
    def busy_s(self) -> dict[str, float]:
        """How long each of its parts worked."""
        nic = max(self.nic.busy_s, self.nic_in.busy_s)
        parts = {"bucket link": self.bucket, "cores": self.cores, "disk": self.disk, "actor": self.actor}
        return {**{name: pipe.busy_s for name, pipe in parts.items()}, "NIC": nic}

    def fetch_from_bucket(self, gets: int, n_bytes: int, promise: Pipe) -> float:
        """Begins reads. Returns when the bytes will be here."""
        self.gets += gets
        self.bytes_read += n_bytes
        arrived = max(promise.begin(gets), self.bucket.begin(n_bytes), self.nic_in.begin(n_bytes))
        return arrived + self.cluster.latency_s


class Way:
    """The machines of a run. They keep their mirrors from epoch to epoch. Here, one of N with a mirror of its own."""

    def __init__(self, store: Store, cluster: Many) -> None:
        self.store, self.cluster = store, cluster
        self.nodes = [Node("machine 0", cluster, store)]
        self.share = cluster.machines  # of each that is simulated

    def numbers(self, epoch: Epoch) -> range:
        """The fetches that the simulated machines make. A plan of one machine has no others."""
        return range(0, epoch.plan.n_fetches, self.share if epoch.plan.machines == 1 else 1)

    def run(self, epoch: Epoch, kill_s: float = math.inf, late_s: float = 0.0) -> Figures:
        """The figures of an epoch on all machines. At `kill_s` the last machine ends; at `late_s` it begins."""
        for node in self.nodes:
            node.begin()
        rows, seconds = run_in_virtual_time(self._epoch(epoch, kill_s, late_s))
        busy = [node.busy_s for node in self.nodes]
        scale = epoch.plan.n_rows / rows  # of all machines, from those that are simulated
        gets = round(scale * sum(node.gets for node in self.nodes))
        most = {name: max(each[name] for each in busy) for name in busy[0]}
        bound, bound_share = busiest({**most, "GETs": gets / self.cluster.gets_per_s}, seconds)
        return {
            "rows_per_s": epoch.plan.n_rows / seconds,
            "seconds": seconds,
            "rows_made": rows,
            "gets": gets,
            "gets_per_s": gets / seconds,
            "bucket_bytes": round(scale * sum(node.bytes_read for node in self.nodes)),
            "peer_bytes": sum(node.sent for node in self.nodes),
            "asked_again_bytes": sum(node.asked_again for node in self.nodes),
            "disk_bytes": max(map(self.disk_bytes, self.nodes)),
            "bound": bound if bound_share > 0.8 else "waiting",
            "bound_share": bound_share,
        }

    async def _epoch(self, epoch: Epoch, kill_s: float, late_s: float) -> int:
        self.promise = Pipe(self.cluster.gets_per_s / self.share)
        pending, loop, rows = deque(self.numbers(epoch)), asyncio.get_running_loop(), 0
        *_, last = self.nodes
        working: dict[asyncio.Task[None], Node] = {}

        async def work(node: Node) -> None:
            nonlocal rows
            while pending:
                number = pending.popleft()
                node.at_work.add(number)
                share = await self.read(node, epoch, number)
                n_rows = epoch.plan.n_positions(number)
                cold_s, warm_s = 1 / self.cluster.cold_rows_per_s, 1 / self.cluster.warm_rows_per_s
                await until(node.cores.begin(n_rows * (warm_s + share * (cold_s - warm_s))))
                node.at_work.remove(number)
                rows += n_rows

        def begin(node: Node) -> None:
            working.update({loop.create_task(work(node)): node for _ in range(2 * self.cluster.trainers)})

        def kill() -> None:
            last.alive, last.died_s = False, loop.time()
            for task in [task for task, node in working.items() if node is last]:
                task.cancel()
            pending.extend(last.at_work)  # the others make what it had begun
            loop.call_later(self.cluster.deadline_s, self.members_changed)

        def join() -> None:
            last.alive = True
            self.members_changed()
            begin(last)

        last.alive = not late_s
        self.members_changed()
        for node in self.nodes:
            if node.alive:
                begin(node)
        calls = [loop.call_at(when, act) for when, act in ((kill_s, kill), (late_s, join)) if 0 < when < math.inf]
        while unfinished := [task for task in working if not task.done()]:
            await asyncio.wait(unfinished)
        for call in calls:
            call.cancel()
        for task in working:
            if not task.cancelled():
                task.result()
        return rows

    def members_changed(self) -> None:
        """Another machine is alive, or one less."""

    def disk_bytes(self, node: Node) -> int:
        """What a machine keeps on its disk."""
        return node.mirror_bytes

    def from_disk(self, node: Node) -> float:
        """The share of reads from the mirror that are not in memory."""
        return max(0.0, 1 - self.cluster.page_bytes / max(1, self.disk_bytes(node)))

    async def read(self, node: Node, epoch: Epoch, number: int) -> float:
        """Reads what a fetch needs. Returns the share of it that must be decoded."""
        gets, n_bytes = node.gets, node.bytes_read
        _, share = node.read(epoch, number)
        gets, n_bytes = node.gets - gets, node.bytes_read - n_bytes
        node.gets, node.bytes_read = node.gets - gets, node.bytes_read - n_bytes  # counted in fetch_from_bucket
        decoded = epoch.plan.n_positions(number) * VALUES * DECODED
        on_disk = node.disk.begin(decoded * (share + (1 - share) * self.from_disk(node)))
        await until(on_disk, node.fetch_from_bucket(gets, n_bytes, self.promise) if gets else 0.0)
        return share


class OneCopy(Way):
    """All machines, which have one copy of the stored bytes."""

    def __init__(self, store: Store, cluster: Many) -> None:
        super().__init__(store, cluster)
        self.nodes = [
            Node(f"machine {number}", replace(cluster, mirror=False), store) for number in range(cluster.machines)
        ]
        self.share = 1
        layout, length = store.planner.layout, cluster.stretch_bytes
        self.index_bytes = layout.placement.index_bytes
        chunks = np.full(layout.n_shards, CHUNKS_PER_SHARD)
        chunks[-1] = layout.n_chunks - CHUNKS_PER_SHARD * (layout.n_shards - 1)
        objects = [chunks * size + self.index_bytes for size in STORED_CHUNK.values()]
        self.per_object = [-(-int(each.max()) // length) for each in objects]
        self.bases = [0, layout.n_shards * self.per_object[0]]  # the first stretch of each array
        self.index_at = [(each - 1) // length for each in objects]  # the last stretch of each object
        begins = [length * np.arange(each) for each in self.per_object]
        sizes = [np.clip(each[:, None] - begin, 0, length) for each, begin in zip(objects, begins, strict=True)]
        self.sizes = np.concatenate([each.ravel() for each in sizes])
        n_stretches, self.total = len(self.sizes), int(self.sizes.sum())
        self.arrives_s = np.full(n_stretches, math.inf)  # at its owner
        self.owner = np.full(n_stretches, -1)
        self.kept_by = np.full(n_stretches, -1)  # another machine that has it, because it was the owner before
        numbers = np.arange(n_stretches, dtype=np.uint64)
        self._words = [words_at(key_of(0, number), numbers) for number in range(cluster.machines)]

    def run(self, epoch: Epoch, kill_s: float = math.inf, late_s: float = 0.0) -> Figures:
        """The clock begins at 0 in each epoch, so what has arrived is there from the beginning."""
        self.arrives_s[self.arrives_s < math.inf] = 0.0
        return super().run(epoch, kill_s, late_s)

    def members_changed(self) -> None:
        """Finds the owners. What a living machine has for another one can be asked from it."""
        owner, best = np.full(len(self.sizes), -1), np.zeros(len(self.sizes), np.uint64)
        for number, node in enumerate(self.nodes):
            if node.alive:
                better = self._words[number] >= best
                owner[better], best[better] = number, self._words[number][better]
        moved = (owner != self.owner) & (self.arrives_s < math.inf)
        alive = np.array([node.alive for node in self.nodes])
        self.kept_by[moved] = np.where(alive[self.owner[moved]], self.owner[moved], -1)
        self.arrives_s[moved] = math.inf
        self.owner = owner

    def disk_bytes(self, node: Node) -> int:
        """The stretches that it owns."""
        return int(self.sizes[(self.owner == self.nodes.index(node)) & (self.arrives_s < math.inf)].sum())

    def from_disk(self, node: Node) -> float:
        """By the stretches that each machine owns in the end."""
        return max(0.0, 1 - self.cluster.page_bytes * self.cluster.machines / self.total)

    def needed(self, node: Node, epoch: Epoch, number: int) -> tuple[Ids, NDArray[np.float64]]:
        """The stretches of a fetch, with the bytes that it needs of each: those of chunks, and of new shard indexes."""
        chunks, length = epoch.chunks(number).astype(np.int64), self.cluster.stretch_bytes
        shards, within = np.divmod(chunks, CHUNKS_PER_SHARD)
        new = np.unique(shards[~node.indexed[shards]])
        node.indexed[new] = True
        ids, n_bytes = [], []
        arrays = zip(self.bases, self.per_object, self.index_at, STORED_CHUNK.values(), strict=True)
        for base, per_object, index_at, size in arrays:
            begins, first = within * size, base + shards * per_object
            here = np.minimum(size, length - begins % length)
            ids += [
                first + begins // length,
                first + (begins + size - 1) // length,
                base + new * per_object + index_at[new],
            ]
            n_bytes += [here, size - here, np.full(len(new), self.index_bytes)]
        found, inverse = np.unique(np.concatenate(ids), return_inverse=True)
        return found, np.bincount(inverse, np.concatenate(n_bytes))

    def bring(self, missing: Ids) -> None:
        """Lets the owners get these stretches: from the owner before them, or else from the bucket."""
        owners = self.owner[missing]
        for number in np.unique(owners):
            owner, ids = self.nodes[number], missing[owners == number]
            owner.disk.begin(float(self.sizes[ids].sum()))
            keepers = self.kept_by[ids]
            for keeper in np.unique(keepers[keepers >= 0]):
                moved = ids[keepers == keeper]
                self.arrives_s[moved] = self.send(self.nodes[keeper], owner, float(self.sizes[moved].sum()))
            if len(ids := ids[keepers < 0]):
                runs = np.split(ids, np.flatnonzero(np.diff(ids) != 1) + 1)
                gets = sum(-(-len(run) * self.cluster.stretch_bytes // MOST_READ) for run in runs)
                self.arrives_s[ids] = owner.fetch_from_bucket(gets, int(self.sizes[ids].sum()), self.promise)

    def send(self, owner: Node, node: Node, size: float) -> float:
        """Begins to send bytes from one machine to another. Returns when they will be there."""
        owner.sent += int(size)
        call_s = self.cluster.peer_call_s * math.ceil(size / MOST_READ)
        node.cores.begin(call_s / self.cluster.cores)
        acted = owner.actor.begin(call_s + size / (1e6 * self.cluster.put_mbps))
        return max(
            acted, owner.disk.begin(size * self.from_disk(owner)), owner.nic.begin(size), node.nic_in.begin(size)
        )

    async def read(self, node: Node, epoch: Epoch, number: int) -> float:
        """Reads what a fetch needs from the owners, or from the bucket if they do not answer. All is decoded."""
        began_s = asyncio.get_running_loop().time()
        stretches, n_bytes = self.needed(node, epoch, number)
        owners = self.owner[stretches]
        self.bring(stretches[np.isinf(self.arrives_s[stretches])])
        ready_s, sizes = np.zeros(len(self.nodes)), np.bincount(owners, n_bytes, len(self.nodes)).tolist()
        np.maximum.at(ready_s, owners, self.arrives_s[stretches])
        ends_s = {}
        for other in np.unique(owners).tolist():
            owner = self.nodes[other]
            if owner is node:
                answered = node.disk.begin(sizes[other] * self.from_disk(node))
            else:
                answered = self.send(owner, node, sizes[other]) if owner.alive else math.inf
            ends_s[other] = max(answered, float(ready_s[other]))
        most = began_s + self.cluster.deadline_s if self.cluster.deadline_covers_bucket else math.inf
        late = {other for other, end_s in ends_s.items() if end_s > most or end_s == math.inf}
        await until(began_s, *(end_s for other, end_s in ends_s.items() if other not in late))
        late |= {other for other, end_s in ends_s.items() if self.nodes[other].died_s < end_s}
        late -= {self.nodes.index(node)}
        if late:
            again = int(sum(sizes[other] for other in late))
            node.asked_again += again
            await until(began_s, began_s + self.cluster.deadline_s)
            gets = int(np.isin(owners, list(late)).sum())
            await until(node.fetch_from_bucket(gets, again, self.promise))
        return 1.0
