"""How well the parts of machines mix, and how much of the store all machines read together.

    python -m benchmarks.questions.parts [--rows 100000 1000000] [--machines 1 2 4 8 16 32 64] [--store STORE]

Rows are sorted by 14 plates. For each number of machines, the entropy of the plates in minibatches of 64 (bits, the
mean over four machines) in a global order, in parts as `locality="machine"` deals them, and in stretches of the rows,
which is what it dealt before. With `--store`, a loader for each machine runs two epochs over that store, each with a
mirror of its own and half of a fetch of 16 384 rows, and `read` is what all of them read in the first epoch, in bytes
of a single machine's first epoch; `again` is what they read in the second, and `GETs` are those of the first. The last
line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import zloader as zl
from benchmarks.harness.measuring import table
from zloader.order.plan import Plan
from zloader.order.ranks import RankPlacement

PLATES, BATCH_SIZE, FETCH_FACTOR = 14, 64, 128
ORDER = zl.BlockShuffling(64, n_strata=64)


def entropy(plan: Plan, labels: Any) -> float:
    """Bits."""
    return float(zl.quality(labels, plan).entropy_bits)


def plan_of(n_rows: int, **place: Any) -> Plan:
    """The plan of a rank of an epoch over some rows."""
    sampling = place.pop("sampling", ORDER)
    return Plan(dataset_rows=n_rows, sampling=sampling, batch_size=BATCH_SIZE, fetch_factor=FETCH_FACTOR, **place)


def entropies(n_rows: int, machines: int) -> dict[str, float]:
    """The entropy by the way in which rows are divided."""
    labels, found = np.arange(n_rows) * PLATES // n_rows, {"global": [], "parts": [], "stretches": []}
    for machine in np.linspace(0, machines - 1, min(4, machines)).astype(int).tolist():
        place = {"rank": machine, "world_size": machines}
        dealt = RankPlacement(**place, machines=machines).keep_to_parts(ORDER, n_rows)
        begin, end = n_rows * machine // machines, n_rows * (machine + 1) // machines
        found["global"].append(entropy(plan_of(n_rows, **place), labels))
        found["parts"].append(entropy(plan_of(n_rows, **place, machines=machines, sampling=dealt), labels))
        found["stretches"].append(entropy(plan_of(end - begin), labels[begin:end]))
    return {name: round(statistics.mean(each), 3) for name, each in found.items()}


def bytes_read(store: Path, machines: int) -> tuple[int, int, int]:
    """The bytes that all machines read in the first epoch and in the second, and the GETs of the first."""
    read, gets = [0, 0], 0
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(machines):
            dataset = zl.open_dataset(store, cache=Path(folder) / str(rank))
            place = {"rank": rank, "world_size": machines, "local_world_size": 1, "locality": "machine"}
            loader = zl.Loader(dataset, fetch_factor=FETCH_FACTOR, **place)
            for epoch in range(2):
                for _ in loader:
                    pass
                read[epoch] += loader.statistics().bytes_read
                gets += 0 if epoch else loader.statistics().gets
    return read[0], read[1], gets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[100_000, 1_000_000])
    parser.add_argument("--machines", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--store", type=Path)
    options = parser.parse_args()
    figures: list[dict[str, Any]] = [
        {"rows": n_rows, "machines": machines, **entropies(n_rows, machines)}
        for n_rows in options.rows
        for machines in options.machines
    ]
    table([list(figures[0]), *(list(map(str, figure.values())) for figure in figures)])
    reads: list[dict[str, Any]] = []
    if options.store:
        alone, *_ = bytes_read(options.store, 1)
        for machines in options.machines:
            first, again, gets = bytes_read(options.store, machines)
            shares = {"read": round(first / alone, 3), "again": round(again / alone, 3)}
            reads.append({"machines": machines, **shares, "GETs": gets})
        table([list(reads[0]), *(list(map(str, each.values())) for each in reads)])
    print(json.dumps({"entropy": figures, "reads": reads}))


if __name__ == "__main__":
    main()
