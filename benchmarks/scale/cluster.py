"""Many machines that train on one store, simulated in virtual time: what they read, and what limits them.

    python -m benchmarks.scale.cluster [--rows 100000000] [--output cluster.json] [--figure cluster.svg]

Every machine has eight trainers, which take minibatches as fast as they come, and a mirror. The two ways:

- global: a global order. A mirror has what the trainers of its machine have read.
- parts: `dataset.split(n)[machine]`. Each machine reads the same part of the rows in every epoch.

The plan, the reads of a fetch and the mirrors are those of simulated.py. Machines share nothing but the bucket, so one
of N machines is simulated, with an N-th of the bucket's GETs. Links, disks and cores serve one thing after another, and
a read has all of them work at the same time. A trainer makes two fetches at a time.

Measured (LOG.md) are the bytes, and the rates of decoding and gathering. Assumed are the speeds of links and disks, and
the memory for pages. Left out are training itself, which waits for the slowest machine in each step, and SlowDown: with
a limit, GETs wait until the bucket takes them.

Each way runs by machines, links and limit of GETs, for three epochs. Each epoch is a line of the table. Bytes are sums
over all machines, except those on the disk of a machine. The last line is one JSON document. docs/pictures/cluster.py
draws the figure from docs/pictures/cluster.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.harness.virtual_time import run_in_virtual_time
from benchmarks.scale.figure import S3_GETS_PER_S, draw_ways
from benchmarks.scale.simulated import (
    DECODED,
    VALUES,
    Cluster,
    Columns,
    Epoch,
    Figures,
    Machine,
    Pipe,
    Store,
    busiest,
    show,
    until,
)
from zloader.dataset.splits import BLOCK_ROWS, dealt_in_blocks

MACHINES = (1, 2, 4, 8, 16, 32, 64)
LIMITS = (None, S3_GETS_PER_S)
LINKS: dict[str, dict[str, float]] = {"25 Gbit/s": {}, "100 Gbit/s": {"bucket_mbps": 4800.0, "nic_mbps": 12_500.0}}
N_EPOCHS = 3


def main() -> None:
    """Simulates, and prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--machines", type=int, nargs="+", default=list(MACHINES))
    parser.add_argument("--output", type=Path, help="where to write the figures, such as cluster.json")
    parser.add_argument("--figure", type=Path, help="where to draw them, such as cluster.svg")
    options = parser.parse_args()
    if min(*options.machines, options.rows) < 1:
        parser.error("--machines and --rows are numbers of at least 1")
    found = simulated(options.rows, options.machines)
    if options.output is not None:
        options.output.write_text(json.dumps(found) + "\n")
    if options.figure is not None:
        draw_ways(found).savefig(options.figure, facecolor="white")
    print(json.dumps(found))


@dataclass(frozen=True, kw_only=True)
class Many(Cluster):
    """Machines that train. `bucket_mbps` and `nic_mbps` are those of each machine, `nic_mbps` in each direction."""

    trainers: int = 8
    disk_mbps: float = 3000.0
    page_bytes: float = 128e9  # memory for pages of the mirror
    gets_per_s: float = math.inf


class Node(Machine):
    """A machine with its trainers, one of many. It keeps its mirror from epoch to epoch."""

    def __init__(self, store: Store, cluster: Many) -> None:
        self.many = cluster
        super().__init__(cluster, store)

    def begin(self) -> None:
        """Begins an epoch."""
        super().begin()
        self.disk = Pipe(1e6 * self.many.disk_mbps)
        self.promise = Pipe(self.many.gets_per_s / self.many.machines)

    def run(self, epoch: Epoch) -> Figures:
        """The figures of an epoch on all machines."""
        self.begin()
        rows, seconds = run_in_virtual_time(self._epoch(epoch))
        scale = epoch.store.rows / rows  # of all machines, from the one that is simulated
        gets = round(scale * self.gets)
        parts = {"bucket link": self.bucket, "cores": self.cores, "disk": self.disk, "NIC": self.nic}
        busy = {name: pipe.busy_s for name, pipe in parts.items()}
        bound, bound_share = busiest({**busy, "GETs": gets / self.many.gets_per_s}, seconds)
        return {
            "rows_per_s": epoch.store.rows / seconds,
            "seconds": seconds,
            "rows_made": rows,
            "gets": gets,
            "gets_per_s": gets / seconds,
            "bucket_bytes": round(scale * self.bytes_read),
            "disk_bytes": self.mirror_bytes,
            "bound": bound if bound_share > 0.8 else "waiting",
            "bound_share": bound_share,
        }

    async def _epoch(self, epoch: Epoch) -> int:
        # The fetches of this machine. A plan of one machine has no others.
        numbers = deque(range(0, epoch.plan.n_fetches, self.many.machines if epoch.part is None else 1))
        rows = 0

        async def work() -> None:
            nonlocal rows
            while numbers:
                number = numbers.popleft()
                share = await self._read_now(epoch, number)
                n_rows = epoch.plan.n_positions(number)
                cold_s, warm_s = 1 / self.cluster.cold_rows_per_s, 1 / self.cluster.warm_rows_per_s
                await until(self.cores.begin(n_rows * (warm_s + share * (cold_s - warm_s))))
                rows += n_rows

        async with asyncio.TaskGroup() as group:
            for _ in range(2 * self.many.trainers):
                group.create_task(work())
        return rows

    async def _read_now(self, epoch: Epoch, number: int) -> float:
        """Reads what a fetch needs. Returns the rows that it decodes for each one that it needs."""
        gets = self.gets
        n_bytes, share = self.read(epoch, number)
        gets, arrived = self.gets - gets, 0.0
        if gets:
            arrived = max(self.promise.begin(gets), self.bucket.begin(n_bytes), self.nic.begin(n_bytes))
            arrived += self.cluster.latency_s
        decoded = epoch.plan.n_positions(number) * VALUES * DECODED
        from_disk = max(0.0, 1 - self.many.page_bytes / max(1, self.mirror_bytes))
        await until(self.disk.begin(decoded * (share + max(0.0, 1 - share) * from_disk)), arrived)
        return share


def simulated(rows: int, machines: Sequence[int]) -> Figures:
    """The table. `rows` is the size of the store."""
    store = Store(rows)
    ways = list(_ways(store, machines))
    shown: Columns = {
        "rows/s": lambda run: f"{run['rows_per_s']:,.0f}",
        "seconds": lambda run: f"{run['seconds']:,.1f}",
        "bucket, of the store": lambda run: f"{run['bucket_bytes'] / store.stored_bytes:.2f}",
        "GETs": lambda run: f"{run['gets']:,.0f}",
        "GETs/s": lambda run: f"{run['gets_per_s']:,.0f}",
        "disk GB": lambda run: f"{run['disk_bytes'] / 1e9:,.0f}",
        "bound": lambda run: f"{run['bound']} ({run['bound_share']:.0%})",
    }
    show("ways", ways, ["way", "machines", "link", "limit", "epoch"], shown)
    return {"rows": rows, "stored_bytes": store.stored_bytes, "ways": ways}


def of_epochs(store: Store, cluster: Many, made: Sequence[Epoch]) -> Iterator[Figures]:
    """The figures of each epoch, one after another."""
    node = Node(store, cluster)
    for number, epoch in enumerate(made, 1):
        yield {"machines": cluster.machines, "epoch": number, **node.run(epoch)}


def parts(store: Store, machines: int) -> list[Epoch]:
    """The epochs of the first of some machines that keep to parts."""
    of_row = dealt_in_blocks(machines, store.rows, block_size=BLOCK_ROWS, seed=0)
    return [Epoch(store, number, np.flatnonzero(of_row == 0)) for number in range(N_EPOCHS)]


def limited(cluster: Many, gets_per_s: float | None) -> Many:
    """With a bucket that answers this number of GETs per second, or any number."""
    return replace(cluster, gets_per_s=math.inf if gets_per_s is None else gets_per_s)


def _ways(store: Store, machines: Sequence[int]) -> Iterator[Figures]:
    everywhere = [Epoch(store, number) for number in range(N_EPOCHS)]
    for n in machines:
        for way, epochs in {"global": everywhere, "parts": parts(store, n)}.items():
            for link, limit in ((link, limit) for link in LINKS for limit in LIMITS):
                cluster = limited(Many(machines=n, **LINKS[link]), limit)
                for figures in of_epochs(store, cluster, epochs):
                    yield {"link": link, "limit": limit, "way": way, **figures}


if __name__ == "__main__":
    main()
