"""The cost of sets and matched controls: warm epochs with them, in turns with epochs of plain minibatches.

    python -m benchmarks.questions.sets STORE [--group drug] [--set-size 64] [--match cell_line] \\
        [--epochs 5] [--work DIRECTORY]

STORE is a zloader store of synthetic.py on a local disk: 14 plates, 379 drugs and a control, 50 cell lines. The loaders
take turns, one epoch at a time, in one process. They read a full mirror, and their first epochs are discarded. All rows
given are counted, controls included. "plain" is a Loader's default order in minibatches of 64, and "single rows" are
rows in random order, as the rows of sets are: that is what sets can reach at most. "CPU" compares user and system
seconds per row, which other work on the machine shakes less.

100 000 rows have five rows of each drug and cell line, so sets are of drugs by default. For `--group cell_line drug`
take a store of a million rows (`synthetic.py --store --copies 10`) and `--set-size 32`.

The target is 0.6 of the rows/s of plain minibatches. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import zloader as zl
from benchmarks.harness.measuring import table

TARGET = 0.6
CONTROL = "drug == 'DMSO'"


def loaders(dataset: zl.Dataset, options: argparse.Namespace) -> dict[str, zl.Loader]:
    """The loader of each side."""
    sets = zl.CellSets(options.group, options.set_size)
    controls = zl.MatchedControls(CONTROL, match=options.match, fallback=[])
    batch_size = options.set_size * options.sets
    sides: dict[str, dict[str, Any]] = {
        "plain": {"batch_size": 64},
        "single rows": {"batch_size": 64, "sampling": "random"},
        "sets": {"batch_size": batch_size, "sampling": sets},
        "sets and controls": {"batch_size": batch_size, "sampling": sets, "controls": controls},
    }
    fetch_rows = 64 * 256
    return {
        name: zl.Loader(dataset, obs=options.group, fetch_factor=max(1, fetch_rows // side["batch_size"]), **side)
        for name, side in sides.items()
    }


def epoch(loader: zl.Loader) -> dict[str, float]:
    """Rows, controls included, and seconds of one epoch."""
    began, cpu = time.perf_counter(), time.process_time()
    for _ in loader:
        pass
    figures = {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
    counted = loader.statistics()
    assert not counted.gets, "the mirror is not full"
    return figures | {"rows": counted.rows, "minibatches": counted.minibatches}


def speed(run: dict[str, float]) -> float:
    """Rows/s."""
    return run["rows"] / run["seconds"]


def per_cpu_s(run: dict[str, float]) -> float:
    """Rows per CPU second."""
    return run["rows"] / run["cpu_s"]


def lines(runs: dict[str, list[dict[str, float]]]) -> list[list[str]]:
    """A line per side: rows/s, and medians of the ratios to plain minibatches with their ranges."""
    found = []
    for name, own in runs.items():
        cells = [name, f"{own[0]['rows']:,.0f}", f"{statistics.median(map(speed, own)):,.0f}"]
        for measure in (speed, per_cpu_s):
            ratios = [measure(a) / measure(b) for a, b in zip(own, runs["plain"], strict=True)]
            cells += [f"{statistics.median(ratios):.2f}", f"({min(ratios):.2f} to {max(ratios):.2f})"]
        found.append(cells)
    return found


def main() -> None:
    """Measures, prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--group", nargs="+", default=["drug"])
    parser.add_argument("--match", nargs="+", default=["cell_line"])
    parser.add_argument("--set-size", type=int, default=64)
    parser.add_argument("--sets", type=int, default=1, help="sets per minibatch")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--work", type=Path, help="directory for the mirror (default: a temporary directory)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.work) as directory:
        dataset = zl.open_dataset(options.store, cache=directory)
        began = time.perf_counter()
        sides = loaders(dataset, options)
        made_s = time.perf_counter() - began
        for loader in sides.values():  # the first fills the mirror
            for _ in loader:
                pass
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for turn in range(options.epochs):
            for name, loader in sides.items():
                runs[name].append(epoch(loader))
                print(f"turn {turn + 1}, {name}: {speed(runs[name][-1]):,.0f} rows/s", file=sys.stderr)
    table([["", "rows", "rows/s", "of plain", "(range)", "CPU, of plain", "(range)"], *lines(runs)])
    sought = statistics.median(
        speed(a) / speed(b) for a, b in zip(runs["sets and controls"], runs["plain"], strict=True)
    )
    print(f"sets and controls: {sought:.2f} of plain (target {TARGET}): {'met' if sought >= TARGET else 'missed'}")
    cores = len(os.sched_getaffinity(0))
    print(json.dumps({"cores": cores, "made_s": round(made_s, 2), "ratio": sought, "target": TARGET, "runs": runs}))


if __name__ == "__main__":
    main()
