"""Cold, filling and warm epochs of one store, from a local disk or through a simulated cloud, against their limits.

    python -m benchmarks.questions.epochs STORE [--epochs 5] [--batch-size 64 --block-size 64 --fetch-factor 256]
    python -m benchmarks.questions.epochs STORE --cloud [--total-mbps 400,1200] [--epochs 5]

STORE is an AnnData Zarr store on a local disk. With a million rows, the first requests and the last minibatches do not
count any more:

    python -m benchmarks.data.synthetic /tmp/tahoe.h5ad --rows 100000 --store /tmp/atlas/million.zarr --copies 10

- decode (without --cloud): numcodecs alone over the chunks of one epoch, from memory, with as many threads as the
  loader. This is an upper limit for every reader of this store without a mirror.
- cold: an epoch without a mirror. Blocks of different fetches share edge chunks, which are decoded once per fetch. With
  blocks of 64 rows and chunks of 16, that is 1.25 times the store.
- filling: an epoch into an empty mirror. Every chunk is read and decoded once, and also checksummed and written.
- warm: an epoch from the full mirror. Nothing is decoded. The limit is memory bandwidth: 3 bytes per value are read and
  8 are written.

The measurements take turns, so that changes in the machine's speed affect all of them alike. Each is a process of its
own (readers.py), which idles during the turns of the others. The store is read through before each epoch, so that it is
in the page cache. The first epoch of each process is discarded (first.py measures it). An epoch lasts from the first
byte of a chunk that is asked for to the last minibatch; the time for opening the store is not part of it. The consumer
takes every minibatch (torch CSR, one obs column, the index) and does nothing with it.

With --cloud, cloud.py serves the store over loopback in its own process: 30 ms to the first byte (log-normal with sigma
0.3), 80 MB/s per connection, and in turn each of --total-mbps in total. The store's folder serves as the bucket.
"limit" is rows/s at which the link could deliver the bytes that the plan reads (zloader.insight.cost). From disk it is
the speed of decode. "of limit" is the part of it that was reached. "CPU s per 100 000" is user and system time of the
client for 100 000 rows. "server" is the part of one core that the server took, which the client did not have, and
"server s/GB" its CPU time per GB served. A real cloud would leave all cores to the client.

The last line is one JSON document with all figures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import zloader as zl
from benchmarks.harness import measuring
from benchmarks.harness.cloud import LinkSpeed
from benchmarks.harness.decoding import chunk_bytes, decode_seconds
from benchmarks.harness.measuring import Figures, median, table
from benchmarks.harness.sides import (
    StoreLocation,
    filling_epoch,
    in_turns,
    median_and_range,
    reader,
    rows_and_column,
    store_location,
)
from zloader.insight.cost import epoch_costs

_TOUCHED = 4 << 30  # bytes, before filling epochs, whose mirrors need new pages; see measuring.touch
COLUMNS = ("rows/s", "(range)", "limit", "of limit", "first s", "user s", "system s", "CPU s per 100 000", "peak MB")
SERVED = ("MB", "GETs", "server", "server s/GB")


def measure(location: StoreLocation, options: argparse.Namespace, work: Path, label: str) -> dict[str, list[Figures]]:
    """Runs the turns of one location."""
    rows, column = rows_and_column(location.store)
    settings = {"batch_size": options.batch_size, "chunk_size": options.block_size, "obs": column}
    settings["preload_nchunks"] = options.batch_size * options.fetch_factor // options.block_size
    mirror = work / f"warm, {label}"
    with contextlib.ExitStack() as stack:
        start = [sys.executable, location]
        cold = stack.enter_context(reader("zloader", *start, settings, work))
        filling = stack.enter_context(reader("zloader", *start, settings, work))
        warm = stack.enter_context(reader("zloader", *start, {**settings, "mirror": str(mirror)}, work))

        def filled() -> Figures:
            measuring.touch(_TOUCHED)
            return filling_epoch(filling, work)

        sides: dict[str, Callable[[], Figures]] = {"cold": cold.epoch, "filling": filled, "warm": warm.epoch}
        if not location.cloud:
            loader = loader_of(location.store, settings)
            stored = {
                layout.path: chunk_bytes(location.store, layout) for layout in loader.dataset.store.matrix("X").arrays
            }
            sides = {"decode": lambda: {"seconds": decode_seconds(loader, stored), "rows": rows}} | sides
        runs = in_turns(sides, options.epochs, rows=rows, label=label)
    assert not any(run["gets"] for run in runs["warm"]), "a warm epoch read from the store"
    for run in runs["filling"]:
        for name in ("seconds", "first_minibatch_s"):
            run[name] -= run["opened_s"]
    return runs


def loader_of(store: Path, settings: Figures) -> zl.Loader:
    """A loader with the settings of the readers, to plan its epochs."""
    return zl.Loader(
        zl.open_dataset(store),
        batch_size=settings["batch_size"],
        fetch_factor=settings["preload_nchunks"] * settings["chunk_size"] // settings["batch_size"],
        sampling=zl.BlockShuffling(settings["chunk_size"]),
    )


def limits(store: Path, options: argparse.Namespace, speed: LinkSpeed) -> dict[str, float]:
    """Rows/s at which the link could deliver the planned bytes of an epoch."""
    settings = {"batch_size": options.batch_size, "chunk_size": options.block_size}
    settings["preload_nchunks"] = options.batch_size * options.fetch_factor // options.block_size
    loader = loader_of(store, settings)
    costs = epoch_costs(loader.dataset, loader.plan(1))
    planned = {"cold": costs.unmirrored.bytes_read, "filling": costs.first_mirrored.bytes_read}
    return {name: loader.dataset.n_obs * speed.total_mbps * 1e6 / n_bytes for name, n_bytes in planned.items()}


def lines(label: str, runs: Mapping[str, Sequence[Figures]], limit: Mapping[str, float]) -> list[list[str]]:
    """The lines of the table for one location."""
    found = []
    for name, figures in runs.items():
        rates = [run["rows"] / run["seconds"] for run in figures]
        cells = [f"{label}, {name}", *median_and_range(rates, "{:,.0f}")]
        if name in limit:
            cells += [f"{limit[name]:,.0f}", f"{statistics.median(rates) / limit[name]:.2f}"]
        else:
            cells += ["", ""]
        if name != "decode":
            used = statistics.median((run["user_s"] + run["system_s"]) / run["rows"] for run in figures)
            cells += [f"{median(figures, key):.2f}" for key in ("first_minibatch_s", "user_s", "system_s")]
            cells += [f"{1e5 * used:.2f}", f"{max(run['peak_bytes'] for run in figures) / 1e6:,.0f}"]
        if "server_s" in figures[0]:
            cells += [f"{median(figures, 'served_bytes') / 1e6:,.0f}", f"{median(figures, 'requests'):,.0f}"]
            cells.append(f"{statistics.median(run['server_s'] / run['seconds'] for run in figures):.0%}")
            large = [1e9 * run["server_s"] / run["served_bytes"] for run in figures if run["served_bytes"] > 1e8]
            cells.append(f"{statistics.median(large):.2f}" if large else "")
        found.append(cells)
    return found


def main() -> None:
    """Measures, prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--fetch-factor", type=int, default=256)
    parser.add_argument("--cloud", action="store_true", help="read through a simulated cloud")
    parser.add_argument(
        "--total-mbps", default="400,1200", help="MB/s of the simulated clouds, in turn (default: %(default)s)"
    )
    parser.add_argument("--work", type=Path, help="directory for the mirrors (default: a temporary directory)")
    options = parser.parse_args()
    totals = map(float, options.total_mbps.split(","))
    speeds = [LinkSpeed(total_mbps=total) for total in totals] if options.cloud else [None]
    found, load = [["", *COLUMNS, *(SERVED if options.cloud else ())]], os.getloadavg()[0]
    runs: dict[str, dict[str, list[Figures]]] = {}
    with tempfile.TemporaryDirectory(dir=options.work) as directory:
        for speed in speeds:
            label = f"{speed.total_mbps:g} MB/s" if speed else "disk"
            with store_location(options.store, speed) as location:
                turns = measure(location, options, Path(directory), label)
            limit = limits(options.store, options, speed) if speed else {}
            if not speed:
                rows = turns["decode"][0]["rows"]
                limit = {name: rows / median(turns["decode"], "seconds") for name in ("cold", "filling")}
            runs[label] = turns
            found += lines(label, turns, limit)
    table([[*cells, *[""] * (len(found[0]) - len(cells))] for cells in found])
    settings = {name: getattr(options, name) for name in ("batch_size", "block_size", "fetch_factor")}
    machine = {"cores": len(os.sched_getaffinity(0)), "load": [load, os.getloadavg()[0]]}
    print(json.dumps({**machine, **settings, "runs": runs}))


if __name__ == "__main__":
    main()
