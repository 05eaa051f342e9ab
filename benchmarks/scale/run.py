"""How far producers on a Ray cluster scale: real ones on this machine, and simulated ones on up to 32 machines.

    python -m benchmarks.scale.run STORE [--epochs 3]
    python -m benchmarks.scale.run --simulate [--rows 100000000] [--output scaling.json] [--figure scaling.svg]

With STORE, an AnnData Zarr store on a local disk, it measures what the object store costs: epochs of a Loader in this
process, in turns with epochs of `zr.stream` with 1, 2 and 3 producers on this machine, which share its cores. Nothing
can be gained here, because the producers have the cores that the Loader would have. "CPU" is the processor time of this
process and all its children, Ray's included, per 100 000 rows. "put" and "get" are MB/s of groups of minibatches into
the object store and out of it. Needs Ray: pip install ".[ray]".

With --simulate, the plan, the reads and the scheduling of `zr.stream` run in virtual time, on machines that are
simulated (simulated.py). An epoch of 100 million rows has 6 104 fetches, and takes seconds. The constants are
those that LOG.md has measured. The tables:

- scale: machines x networks, an epoch without mirrors. "bound" is whatever was busy for more than 80 % of the epoch,
  and "order" if nothing was: then minibatches that were ready waited for those that come before them.
- ahead: the same with less memory for minibatches that wait.
- mirrors: three epochs of a twentieth of the rows with mirrors on the machines of the producers.
- failures: a machine fails every minute, on average. It is noticed after 15 s, as by Ray's health checks, and another
  one comes after a minute. "lost" is the time that the epoch took longer, per failure.

The lines in the figure are rates that others have published, SLAF with 32 producer nodes and protoplast's epochs of
Tahoe-100M in 14.5 minutes, and the rate at which the GETs reach what S3 promises for one prefix. The simulated bucket
answers any number of GETs: that is the assumption that breaks first. The last line is one JSON document.
docs/pictures/scaling.py draws the same figure for docs/ray.md, from the document in docs/pictures/scaling.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import zloader as zl
from benchmarks.harness.measuring import table
from benchmarks.scale.figure import draw
from benchmarks.scale.simulated import Cluster, Columns, Epoch, Figures, Store, epochs, show

MACHINES = (1, 2, 4, 8, 16, 32)
CSR, PACKED = 8.0 * 1840, 3.5 * 1840  # bytes of a row: int32 and float32; uint16 and one or two bytes
SMALL = Cluster(bucket_mbps=400, nic_mbps=1250, trainer_mbps=3125, cold_rows_per_s=103e3, warm_rows_per_s=242e3)
LARGE = Cluster()
NETWORKS = {
    "2 cores, 10 Gbit/s; trainer 25 Gbit/s": SMALL,
    "16 cores, 25 Gbit/s; trainer 25 Gbit/s": replace(LARGE, trainer_mbps=3125),
    "16 cores, 25 Gbit/s; trainer 100 Gbit/s": LARGE,
    "the same, layout packed": replace(LARGE, row_bytes=PACKED, take_rows_per_s=2e6),
}


def main() -> None:
    """Measures or simulates, and prints tables and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, nargs="?")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--machines", default=",".join(map(str, MACHINES)), help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="where to write the simulated figures, such as scaling.json")
    parser.add_argument("--figure", type=Path, help="where to draw the simulated rates, such as scaling.svg")
    options = parser.parse_args()
    if (options.store is None) == (not options.simulate):
        parser.error("give a store, or --simulate")
    machines = [int(each) if each.isdecimal() else 0 for each in options.machines.split(",")]
    if min(machines) < 1 or options.rows < 1 or options.epochs < 1:
        parser.error("--machines, --rows and --epochs are numbers of at least 1")
    if options.store is not None:
        print(json.dumps(measured(options.store, options.epochs)))
        return
    found = simulated(options.rows, machines)
    if options.output is not None:
        options.output.write_text(json.dumps(found) + "\n")
    if options.figure is not None:
        draw(found).savefig(options.figure, facecolor="white")
    print(json.dumps(found))


# ---- real


def measured(store: Path, n_epochs: int) -> Figures:
    """The Loader and streams on this machine, in turns. The first epoch of each is discarded."""
    import ray

    import zloader.ray as zr

    cores = len(os.sched_getaffinity(0))
    # Each stream may use all cores, because the others have nothing to do meanwhile.
    ray.init(num_cpus=3 * cores, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 30)
    loader = zl.Loader(zl.open_dataset(store))
    sides: dict[str, Any] = {"Loader": loader}
    for n in (1, 2, 3):
        resources = {"num_cpus": cores / n}
        sides[f"stream, {n}"] = zr.stream(
            zl.Loader(loader.dataset), producers=n, ahead_bytes="512MiB", resources=resources
        )
    runs: dict[str, list[Figures]] = {name: [] for name in sides}
    for turn in range(n_epochs + 1):
        for name, side in sides.items():
            figures = _real_epoch(side, loader.dataset.n_obs)
            if turn:
                runs[name].append(figures)
    lines = [["", "rows/s", "(range)", "CPU s per 100 000", "first s", "waited"]]
    for name, of_side in runs.items():
        rates = [run["rows_per_s"] for run in of_side]
        shown = [f"{statistics.median(run[key] for run in of_side):.2f}" for key in ("cpu_s", "first_s", "wait_share")]
        lines.append([name, f"{statistics.median(rates):,.0f}", f"{min(rates):,.0f} to {max(rates):,.0f}", *shown])
    table(lines)
    copies = _copies(ray)
    print("object store: " + ", ".join(f"{name} {mbps:,.0f} MB/s" for name, mbps in copies.items()))
    ray.shutdown()
    return {"cores": cores, "load": os.getloadavg()[0], "runs": runs, "copies": copies}


def _real_epoch(side: Any, n_rows: int) -> Figures:
    began_s, cpu_s, first_s, rows = time.perf_counter(), _cpu_s(), 0.0, 0
    for minibatch in side:
        first_s = first_s or time.perf_counter() - began_s
        rows += len(minibatch)
    assert rows == n_rows
    seconds = time.perf_counter() - began_s
    return {
        "rows_per_s": rows / seconds,
        "cpu_s": 1e5 * (_cpu_s() - cpu_s) / rows,
        "first_s": first_s,
        "wait_share": side.statistics().wait_s / seconds,
    }


def _cpu_s() -> float:
    """Processor time of this process and all its descendants that live."""
    parents, used = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:  # it has just ended
            continue
        fields = text.rpartition(")")[2].split()
        parents[int(stat.parent.name)] = int(fields[1])
        used[int(stat.parent.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def is_ours(pid: int) -> bool:
        while pid not in (0, os.getpid()):
            pid = parents.get(pid, 0)
        return pid != 0

    return sum(seconds for pid, seconds in used.items() if is_ours(pid))


def _copies(ray: Any) -> dict[str, float]:
    """MB/s of putting groups of minibatches into the object store, and of getting them and reading each byte."""
    group = [np.ones(1 << 20, np.uint8) for _ in range(8)]
    n_bytes, putting, getting = sum(map(len, group)), [], []
    for _ in range(40):
        began_s = time.perf_counter()
        reference = ray.put(group)
        put_s = time.perf_counter()
        for array in ray.get(reference):
            array.max()
        putting.append(n_bytes / (put_s - began_s) / 1e6)
        getting.append(n_bytes / (time.perf_counter() - put_s) / 1e6)
        del reference, array
    return {"put": statistics.median(putting), "get": statistics.median(getting)}


# ---- simulated


def simulated(rows: int, machines: Sequence[int]) -> Figures:
    """All tables. `rows` is the size of the store."""
    store = Store(rows)
    epoch, most = Epoch(store, 0), machines[-1]
    scale = [
        _run(store, [epoch], replace(cluster, machines=n), {"network": name, "machines": n})[0]
        for name, cluster in NETWORKS.items()
        for n in machines
    ]
    _show("scale", scale, ["network", "machines"])
    ahead = [
        _run(store, [epoch], replace(LARGE, machines=most, ahead_bytes=gib << 30), {"ahead GiB": gib})[0]
        for gib in (1, 4, 16)
    ]
    _show("ahead", ahead, ["ahead GiB"])
    small = Store(max(rows // 20, 1))
    three = [Epoch(small, number) for number in range(3)]
    mirrors = []
    for n, locality in ((1, "any"), (4, "any"), (most, "any"), (most, "machine")):
        cluster = replace(LARGE, machines=n, mirror=True, locality=locality)
        runs = _run(small, three, cluster, {"machines": n, "locality": locality})
        mirrors += [{**run, "epoch": number} for number, run in enumerate(runs)]
    _show("mirrors", mirrors, ["machines", "locality", "epoch"])
    failures = []
    for take in (30e3, 115e3):
        cluster = replace(LARGE, machines=most, take_rows_per_s=take)
        whole = _run(store, [epoch], cluster, {"trainer takes": f"{take:,.0f}"})[0]
        broken = _run(store, [epoch], replace(cluster, fail_every_s=60), {"trainer takes": f"{take:,.0f}"})[0]
        broken["lost_s"] = (broken["seconds"] - whole["seconds"]) / max(1, broken["failures"])
        failures += [whole, broken]
    _show("failures", failures, ["trainer takes", "failures"])
    return {"rows": rows, "scale": scale, "ahead": ahead, "mirrors": mirrors, "failures": failures}


def _run(store: Store, made: Sequence[Epoch], cluster: Cluster, names: Figures) -> list[Figures]:
    return [{**names, **figures} for figures in epochs(store, cluster, made)]


def _show(title: str, runs: Sequence[Figures], names: Sequence[str]) -> None:
    shown: Columns = {
        "rows/s": lambda run: f"{run['rows_per_s']:,.0f}",
        "seconds": lambda run: f"{run['seconds']:,.0f}",
        "GETs": lambda run: f"{run['gets']:,.0f}",
        "GB": lambda run: f"{run['bytes_read'] / 1e9:,.0f}",
        "mirror GB": lambda run: f"{run['mirror_bytes'] / 1e9:,.1f}",
        "bound": lambda run: f"{run['bound']} ({run['bound_share']:.0%})",
        "lost s": lambda run: f"{run['lost_s']:.1f}" if "lost_s" in run else "",
    }
    show(title, runs, names, shown)


if __name__ == "__main__":
    main()
