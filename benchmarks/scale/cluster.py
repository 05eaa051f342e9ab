"""Many machines that train on one store, simulated in virtual time: what they read, and what limits them.

    python -m benchmarks.scale.cluster [--rows 100000000] [--output cluster.json] [--figure cluster.svg]

Every machine has eight trainers, which take minibatches as fast as they come. The three ways:

- global: a global order, and on every machine a mirror of what its trainers have read.
- one copy: a global order, and one copy of the stored bytes for all machines. The objects are cut into stretches. Each
  has an owner, by rendezvous hashing. The others ask the owner for the bytes that they need. It reads whole stretches
  from the bucket, each once. Nobody else keeps them, so they are decoded in every epoch.
- parts: `locality="machine"`. Each machine has a mirror, and reads the same part of the rows in every epoch.

sharing.py says how machines are simulated. Measured (LOG.md) are the bytes, the rates of decoding and gathering, the
rate at which Ray's object store takes bytes, and the default of `--call-ms`. Assumed are the speeds of links and disks,
the memory for pages, and a network between the machines that never is the limit. Left out are training itself, which
waits for the slowest machine in each step, and SlowDown: with a limit, GETs wait until the bucket takes them.

Each epoch is a line of a table. Bytes are sums over all machines, except those on the disk of a machine:

- ways: each way by machines, links and limit of GETs, three epochs.
- options: one copy on the most machines, with one thing changed, two epochs.
- failures: one copy on the most machines, first epoch. A machine is killed in the middle of it, or comes then. "asked
  again" are bytes that a dead owner was asked for, and that the bucket gave instead.

The last line is one JSON document. docs/pictures/cluster.py draws the figure from docs/pictures/cluster.json.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.scale.figure import S3_GETS_PER_S, draw_ways
from benchmarks.scale.sharing import PEER_CALL_S, Many, OneCopy, Way
from benchmarks.scale.simulated import Columns, Epoch, Figures, Store, show
from zloader.order.ranks import RankPlacement
from zloader.order.shuffling import stratified

MACHINES = (1, 2, 4, 8, 16, 32, 64)
LIMITS = (None, S3_GETS_PER_S)
LINKS: dict[str, dict[str, float]] = {"25 Gbit/s": {}, "100 Gbit/s": {"bucket_mbps": 4800.0, "nic_mbps": 12_500.0}}
N_EPOCHS = 3


def main() -> None:
    """Simulates, and prints tables and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--machines", type=int, nargs="+", default=list(MACHINES))
    parser.add_argument("--call-ms", type=float, default=1e3 * PEER_CALL_S, help="of each side; default: %(default)s")
    parser.add_argument("--output", type=Path, help="where to write the figures, such as cluster.json")
    parser.add_argument("--figure", type=Path, help="where to draw them, such as cluster.svg")
    options = parser.parse_args()
    if min(*options.machines, options.rows) < 1:
        parser.error("--machines and --rows are numbers of at least 1")
    found = simulated(options.rows, options.machines, peer_call_s=options.call_ms / 1e3)
    if options.output is not None:
        options.output.write_text(json.dumps(found) + "\n")
    if options.figure is not None:
        draw_ways(found).savefig(options.figure, facecolor="white")
    print(json.dumps(found))


def simulated(rows: int, machines: Sequence[int], *, peer_call_s: float = PEER_CALL_S) -> Figures:
    """All tables. `rows` is the size of the store."""
    store, each = Store(rows), Many(peer_call_s=peer_call_s)
    everywhere, most = [Epoch(store, number) for number in range(N_EPOCHS)], replace(each, machines=machines[-1])
    stored = OneCopy(store, each).total
    tables = {
        "ways": _ways(store, each, machines, everywhere),
        "options": _options(store, most, everywhere),
        "failures": _failures(store, most, everywhere[0]),
    }
    found: dict[str, list[Figures]] = {}
    for title, runs in tables.items():
        found[title] = list(runs)
        _show(title, found[title], stored)
    return {"rows": rows, "stored_bytes": stored, **found}


def of_epochs(store: Store, cluster: Many, way: str, made: Sequence[Epoch]) -> Iterator[Figures]:
    """The figures of each epoch, one after another."""
    machines = OneCopy(store, cluster) if way == "one copy" else Way(store, cluster)
    for number, epoch in enumerate(made, 1):
        yield {"way": way, "machines": cluster.machines, "epoch": number, **machines.run(epoch)}


def parts(store: Store, machines: int) -> list[Epoch]:
    """The epochs of the first of some machines that keep to parts."""
    place = RankPlacement(rank=0, world_size=machines, machines=machines, parts=machines)
    dealt = place.keep_to_parts(stratified(), store.rows)
    options = {"world_size": machines, "machines": machines, "sampling": dealt}
    return [Epoch(store, number, **options) for number in range(N_EPOCHS)]


def limited(cluster: Many, gets_per_s: float | None) -> Many:
    """With a bucket that answers this number of GETs per second, or any number."""
    return replace(cluster, gets_per_s=math.inf if gets_per_s is None else gets_per_s)


def _ways(store: Store, each: Many, machines: Sequence[int], everywhere: Sequence[Epoch]) -> Iterator[Figures]:
    for n in machines:
        made = {"global": everywhere, "one copy": everywhere, "parts": parts(store, n)}
        for way, epochs in made.items():
            for link, limit in ((link, limit) for link in LINKS for limit in LIMITS):
                cluster = limited(replace(each, machines=n, **LINKS[link]), limit)
                for figures in of_epochs(store, cluster, way, epochs):
                    yield {"link": link, "limit": limit, **figures}


def _options(store: Store, most: Many, everywhere: Sequence[Epoch]) -> Iterator[Figures]:
    small = [Epoch(store, number, fetch_factor=64) for number in range(N_EPOCHS)]
    changes: dict[str, tuple[Many, Sequence[Epoch]]] = {
        "none": (most, everywhere),
        "call of 0.25 ms": (replace(most, peer_call_s=0.25e-3), everywhere),
        "call of 4 ms": (replace(most, peer_call_s=4e-3), everywhere),
        "4 actors": (replace(most, actors=4), everywhere),
        "fetches of 64 blocks": (most, small),
        "stretches of 1 MiB": (replace(most, stretch_bytes=1 << 20), everywhere),
        "10 Gbit/s": (replace(most, bucket_mbps=480.0, nic_mbps=1250.0), everywhere),
        "5 500 GETs/s": (limited(most, S3_GETS_PER_S), everywhere),
        "5 500 GETs/s, and the deadline covers the bucket": (
            limited(replace(most, deadline_covers_bucket=True), S3_GETS_PER_S),
            everywhere,
        ),
    }
    for change, (cluster, epochs) in changes.items():
        for figures in of_epochs(store, cluster, "one copy", epochs[:2]):
            yield {"change": change, **figures}


def _failures(store: Store, most: Many, epoch: Epoch) -> Iterator[Figures]:
    if most.machines == 1:
        return
    for limit in LIMITS:
        cluster, middle_s = limited(most, limit), 0.0
        for event in ("none", "killed", "late"):
            times = {"kill_s": middle_s} if event == "killed" else {"late_s": middle_s} if event == "late" else {}
            figures = OneCopy(store, cluster).run(epoch, **times)
            middle_s = middle_s or figures["seconds"] / 2
            yield {"limit": limit, "event": event, "machines": cluster.machines, **figures}


def _show(title: str, runs: Sequence[Figures], stored_bytes: int) -> None:
    shown: Columns = {
        "rows/s": lambda run: f"{run['rows_per_s']:,.0f}",
        "seconds": lambda run: f"{run['seconds']:,.1f}",
        "bucket, of the store": lambda run: f"{run['bucket_bytes'] / stored_bytes:.2f}",
        "GETs": lambda run: f"{run['gets']:,.0f}",
        "GETs/s": lambda run: f"{run['gets_per_s']:,.0f}",
        "peers GB": lambda run: f"{run['peer_bytes'] / 1e9:,.0f}",
        "asked again GB": lambda run: f"{run['asked_again_bytes'] / 1e9:,.2f}",
        "disk GB": lambda run: f"{run['disk_bytes'] / 1e9:,.0f}",
        "bound": lambda run: f"{run['bound']} ({run['bound_share']:.0%})",
    }
    kinds = ("change", "event", "way", "machines", "link", "limit", "epoch")
    show(title, runs, [name for name in kinds if runs and name in runs[0]], shown)


if __name__ == "__main__":
    main()
