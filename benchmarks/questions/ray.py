"""What the object store of Ray costs: streams on this machine, beside the Loader on the same cores.

    python -m benchmarks.questions.ray STORE [--epochs 3]

STORE is an AnnData Zarr store on a local disk. Epochs of a Loader in this process take turns with epochs of `zr.stream`
with 2 and 4 tasks on this machine, which share its cores. Nothing can be gained here, because the tasks have the cores
that the Loader would have. "CPU" is the processor time of this process and all its children, Ray's too, per 100 000
rows. "put" and "get" are MB/s of groups of minibatches into the object store and out of it. The last line is one JSON
document. Needs Ray: pip install ".[ray]".
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

import zloader as zl
from benchmarks.harness.measuring import table

Figures = dict[str, Any]


def main() -> None:
    """Measures, and prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    print(json.dumps(measured(options.store, options.epochs)))


def measured(store: Path, n_epochs: int) -> Figures:
    """The Loader and streams on this machine, in turns. The first epoch of each is discarded."""
    import ray

    import zloader.ray as zr

    cores = len(os.sched_getaffinity(0))
    ray.init(num_cpus=cores, include_dashboard=False, log_to_driver=False, object_store_memory=2 << 30)
    loader = zl.Loader(zl.open_dataset(store))
    sides: dict[str, Any] = {"Loader": loader}
    for n in (2, 4):
        sides[f"stream, {n}"] = zr.stream(zl.Loader(loader.dataset), tasks=n, ahead_bytes="1GiB")
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


if __name__ == "__main__":
    main()
