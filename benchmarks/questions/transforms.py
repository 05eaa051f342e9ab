"""The cost of each transform: warm epochs with and without it, in turns. memory.py measures the memory that they take.

    python -m benchmarks.questions.transforms STORE [--epochs 5] [--work DIRECTORY] \\
        [--names LogNormalize "Downsample 500"]

STORE is a zloader store on a local disk. Epochs read a full mirror, with minibatches of 64 and blocks of 64 rows. The
loaders take turns, one epoch at a time, in one process, and their first epochs are discarded. A ratio compares the
rows/s with those of the loader without transforms of the same layout and genes in the same turn, and "CPU" does so with
user and system seconds, which other work on the machine shakes less. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import zloader as zl
from benchmarks.harness.measuring import table

N_GENES = 2_000
T = zl.transforms


def unchanged(minibatch: zl.Minibatch) -> zl.Minibatch:
    """A function of the user's own that costs nothing."""
    return minibatch


def configurations(dataset: zl.Dataset) -> dict[str, tuple[str, dict[str, Any]]]:
    """The options of each loader, and the name of the one to compare it with."""
    genes = np.sort(np.random.default_rng(0).choice(dataset.n_vars, min(N_GENES, dataset.n_vars), replace=False))
    std = np.linspace(0.5, 2, dataset.n_vars)
    chosen = {"genes": genes, "layout": "dense"}
    log = T.LogNormalize(1e4)
    return {
        "nothing": ("nothing", {}),
        "Normalize": ("nothing", {"transforms": [T.Normalize(1e4)]}),
        "LogNormalize": ("nothing", {"transforms": [log]}),
        "Clip": ("nothing", {"transforms": [T.Clip(0, 10)]}),
        "Scale(std)": ("nothing", {"transforms": [T.Scale(std=std)]}),
        "Downsample 500": ("nothing", {"transforms": [T.Downsample(500)]}),
        "Downsample 2000": ("nothing", {"transforms": [T.Downsample(2000)]}),
        "batch_transform": ("nothing", {"batch_transform": unchanged}),
        "genes": ("genes", chosen),
        "genes, LogNormalize": ("genes", {**chosen, "transforms": [log]}),
        "genes, LogNormalize and Scale": ("genes", {**chosen, "transforms": [log, T.Scale(std[genes], std[genes])]}),
    }


def epoch(loader: zl.Loader) -> dict[str, float]:
    """Rows/s and CPU seconds of one epoch."""
    began, cpu = time.perf_counter(), time.process_time()
    for _ in loader:
        pass
    return {"rows_per_s": loader.statistics().rows / (time.perf_counter() - began), "cpu_s": time.process_time() - cpu}


def turns(dataset: zl.Dataset, made: Mapping[str, Any], epochs: int) -> dict[str, list[dict[str, float]]]:
    """The figures of every loader's epochs, in turns."""
    loaders = {
        name: zl.Loader(dataset[:, options.pop("genes", slice(None))], **options)
        for name, options in ((name, dict(options)) for name, (_, options) in made.items())
    }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in loaders}
    for number in range(epochs + 1):
        for name, loader in loaders.items():
            figures = epoch(loader)
            if number:
                runs[name].append(figures)
        print(f"turn {number} of {epochs}", file=sys.stderr)
    return runs


def summary(made: Mapping[str, Any], runs: Mapping[str, Sequence[Mapping[str, float]]]) -> list[dict[str, Any]]:
    """Medians of the ratios with the loader to compare with, turn by turn."""
    found = []
    for name, (other, _) in made.items():
        pairs = list(zip(runs[name], runs[other], strict=True))
        found.append(
            {
                "name": name,
                "rows_per_s": statistics.median(mine["rows_per_s"] for mine, _ in pairs),
                "speed_ratio": statistics.median(mine["rows_per_s"] / its["rows_per_s"] for mine, its in pairs),
                "cpu_ratio": statistics.median(mine["cpu_s"] / its["cpu_s"] for mine, its in pairs),
            }
        )
    return found


def main() -> None:
    """Measures, prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--work", type=Path, help="directory for the mirror (default: a temporary directory)")
    parser.add_argument("--names", nargs="+", help="lines of the table (default: all)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.work) as mirror:
        dataset = zl.open_dataset(options.store, cache=mirror)
        torch.set_num_threads(1)
        made = configurations(dataset)
        if options.names:
            asked = {*options.names, *(made[name][0] for name in options.names)}
            made = {name: each for name, each in made.items() if name in asked}
        zl.warm(dataset)
        runs = turns(dataset, made, options.epochs)
        found = summary(made, runs)
    lines = [
        [
            each["name"],
            f"{each['rows_per_s']:,.0f}",
            f"{each['speed_ratio']:.2f}",
            f"{each['cpu_ratio']:.2f}",
        ]
        for each in found
    ]
    table([["", "rows/s", "speed", "CPU"], *lines])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
