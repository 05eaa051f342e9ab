"""The first epochs of new processes, compared with later epochs of the same processes.

    python -m benchmarks.questions.first [STORE ...] [--processes 5] [--epochs 5] [--ways none,filling,full]

Each STORE is an AnnData Zarr store on a local disk. The cells that come with zloader (2 142 rows, converted to a
temporary directory) are always measured too, because start-up counts most there. Every process opens one store, makes
one loader and runs --epochs epochs. The ways are:

- none: no mirror, so that every epoch reads and decodes the store.
- filling: the mirror is empty before the first epoch, and full from then on.
- full: an earlier process has filled the mirror.

Processes of all ways take turns, so that changes in the machine's speed affect all of them alike. The store and the
mirror are read through before each epoch, so that they are in the page cache. Each line of the table is one epoch of
its process, for example the second one. Its figures are medians over the processes: rows/s, seconds from `iter()` to
the first minibatch, CPU seconds and page faults of the process during the epoch, and the highest resident set so far.
"CPU s per 100 000" is user and system time for 100 000 rows. "of steady" is the speed of the epoch divided by that of
a steady epoch of its process: the median of all epochs but the first. Importing zloader and torch, opening the store
and making the loader count separately, as the line "start": wall time, CPU seconds and page faults until the process
waits for its first epoch.

readers.py describes the settings: minibatches of 64 rows, blocks of 64, fetches of 16 384. The last line is one JSON
document.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import zloader as zl
from benchmarks.harness.measuring import Figures, median, table
from benchmarks.harness.sides import StoreLocation, reader, rows_and_column, rows_per_s

WAYS = ("none", "filling", "full")
COLUMNS = (
    "rows/s",
    "(range)",
    "of steady",
    "first s",
    "(range)",
    "user s",
    "system s",
    "CPU s per 100 000",
    "faults",
    "major",
    "peak MB",
)


def process_epochs(store: Path, way: str, mirror: Path, epochs: int, work: Path) -> list[Figures]:
    """The figures of a new process: its start, then its epochs."""
    rows, column = rows_and_column(store)
    options = {"chunk_size": 64, "preload_nchunks": 256, "obs": column}
    if way != "none":
        options["mirror"] = str(mirror)
    location = StoreLocation(store=store, url=str(store.absolute()))
    kept = StoreLocation(store=mirror, url=str(mirror))
    began = time.perf_counter()
    with reader("zloader", sys.executable, location, options, work) as one:
        start = one.ask(started=True)
        start["seconds"] = time.perf_counter() - began
        figures = [kept.counted(one.epoch) for _ in range(epochs)]
    assert {run["rows"] for run in figures} == {rows}, f"an epoch did not return {rows} rows"
    if way == "full":
        assert not any(run["gets"] for run in figures), "an epoch read from the store"
    return [start, *figures]


def measure(store: Path, options: argparse.Namespace, work: Path) -> dict[str, list[list[Figures]]]:
    """The figures of every process by way: its start and its epochs."""
    runs: dict[str, list[list[Figures]]] = {way: [] for way in options.ways}
    full = work / "full"
    if "full" in options.ways:
        process_epochs(store, "filling", full, 1, work)
    for turn in range(options.processes):
        for way in options.ways:
            with tempfile.TemporaryDirectory(dir=work) as empty:
                mirror = full if way == "full" else Path(empty)
                runs[way].append(process_epochs(store, way, mirror, options.epochs, work))
            seconds = ", ".join(f"{run['seconds']:.2f}" for run in runs[way][-1][1:])
            print(f"{store.name}, turn {turn + 1}, {way}: {seconds} s", file=sys.stderr)
    return runs


def lines(label: str, processes: Sequence[Sequence[Figures]]) -> list[list[str]]:
    """The lines of one store and way: the start and every epoch."""
    starts, *epochs = zip(*processes, strict=True)
    steady = list(map(steady_rows_per_s, processes))
    start = ["", "", "", *spread([run["seconds"] for run in starts], "{:.3f}"), *spent(starts), "", *faults(starts)]
    found = [[f"{label}, start", *start]]
    for number, runs in enumerate(epochs, start=1):
        shares = [rows_per_s(run) / rate for run, rate in zip(runs, steady, strict=True)]
        used = statistics.median((run["user_s"] + run["system_s"]) / run["rows"] for run in runs)
        cells = [
            *spread(list(map(rows_per_s, runs)), "{:,.0f}"),
            f"{statistics.median(shares):.2f}",
            *spread([run["first_minibatch_s"] for run in runs], "{:.3f}"),
            *spent(runs),
            f"{1e5 * used:.2f}",
            *faults(runs),
        ]
        found.append([f"{label}, epoch {number}", *cells])
    return found


def steady_rows_per_s(process: Sequence[Figures]) -> float:
    """Rows/s of a process after its first epoch: the median over its epochs."""
    return statistics.median(map(rows_per_s, process[2:]))


def spread(values: Sequence[float], form: str) -> list[str]:
    """Two cells: the median and the range."""
    return [form.format(statistics.median(values)), f"({form.format(min(values))} to {form.format(max(values))})"]


def spent(runs: Sequence[Figures]) -> list[str]:
    """Two cells: user and system seconds."""
    return [f"{median(runs, key):.3f}" for key in ("user_s", "system_s")]


def faults(runs: Sequence[Figures]) -> list[str]:
    """Three cells: all page faults, those that waited for a disk, and the peak of the resident set."""
    counted = [f"{median(runs, key):,.0f}" for key in ("faults", "major_faults")]
    return [*counted, f"{max(run['peak_bytes'] for run in runs) / 1e6:,.0f}"]


def summary(runs: Mapping[str, Sequence[Sequence[Figures]]]) -> dict[str, Figures]:
    """The figures of each way for the JSON document: medians of first and steady epochs."""
    return {
        way: {
            "first_epoch_rows_per_s": statistics.median(rows_per_s(process[1]) for process in processes),
            "steady_rows_per_s": statistics.median(map(steady_rows_per_s, processes)),
            "first_minibatch_s": statistics.median(process[1]["first_minibatch_s"] for process in processes),
            "processes": processes,
        }
        for way, processes in runs.items()
    }


def main() -> None:
    """Measures, prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stores", type=Path, nargs="*", metavar="STORE")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=5, help="epochs per process, at least 2")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"some of {', '.join(WAYS)} (default: all)")
    parser.add_argument("--work", type=Path, help="directory for the mirrors (default: a temporary directory)")
    options = parser.parse_args()
    options.ways = options.ways.split(",")
    if unknown := set(options.ways) - set(WAYS):
        parser.error(f"unknown ways: {', '.join(unknown)}")
    found = [["", *COLUMNS]]
    stores: dict[str, dict[str, Figures]] = {}
    load = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.work)))
        example = work / "example.zarr"
        zl.convert(zl.example_h5ad(work / "example.h5ad"), example)
        for number, store in enumerate([example, *options.stores]):
            own = work / str(number)
            own.mkdir()
            runs = measure(store, options, own)
            stores[str(store.name)] = summary(runs)
            for way, processes in runs.items():
                found += lines(f"{store.name}, {way}", processes)
    table(found)
    print(json.dumps({"cores": len(os.sched_getaffinity(0)), "load": [load, os.getloadavg()[0]], "stores": stores}))


if __name__ == "__main__":
    main()
