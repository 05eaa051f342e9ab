"""Compares the reading speed of zloader and annbatch, and measures zloader's own store against its targets.

    python -m benchmarks.questions.read STORE ANNBATCH_STORE [--epochs 5] [--cloud] [--shapes 512x32,64x256,32x512]
    python -m benchmarks.questions.read STORE --own [--epochs 5] [--cloud]

STORE is a zloader store, ANNBATCH_STORE an annbatch collection of the same rows. For example:

    python -m benchmarks.data.synthetic tahoe.h5ad --rows 100000 && zloader convert tahoe.h5ad atlas/tahoe.zarr
    $(python -m benchmarks.compare.rivals make annbatch) -m benchmarks.compare.rivals write annbatch-shuffled-zarrs \\
        tahoe.h5ad atlas/annbatch.zarr

The sides take turns, one epoch at a time. Each side is its own process (readers.py describes its settings and output)
that idles during the turns of the others: annbatch and zloader on annbatch's store, and zloader on its own store,
without a mirror, so that every epoch is cold. The store is read through before each epoch, so that it is in the page
cache. The first epoch is discarded. A shape is annbatch's chunk_size x preload_nchunks; zloader uses blocks of
chunk_size rows and preload_nchunks blocks per fetch. The last columns are speedups: the median of the ratios per turn,
and their range. Memory is the peak resident set. It includes torch for zloader, and not for annbatch.

annbatch allocates new memory for every load, 100 MB at a time. A virtual machine may first have to get that memory from
its host (see measuring.touch), which takes longer when other machines use more of it. zloader keeps freed memory.
"memory kept" is annbatch with glibc set to keep freed memory too, which its documentation does not ask for.

With --cloud, each store is served by its own simulated S3 (cloud.py; --total-mbps is the rate of its link). GETs and MB
are the server's counts per epoch, including all requests, and "server" is the part of one core that it took. A store's
folder serves as the bucket. zloader then also reads annbatch's store into an empty mirror, and that time includes
opening the store.

--own measures STORE, on disk or in the cloud, with blocks of 64 rows in fetches of 16 384 rows:

- decode, cold and filling epochs (see epochs.py) in turns. A filling epoch includes opening the store. Its bytes
  divided by the link's limit give the share of the link that it used. Its GETs and bytes are printed beside those that
  the plan predicts (zloader.insight.cost).
- a filling epoch for a consumer that takes 3 ms per minibatch: how long the consumer waits after the first fetch.
- three epochs of one loader for a consumer that stalls for 3 s, three times per epoch: the peak memory above the
  memory before, beside the limit that FetchOptions set: in_flight_bytes + ready_bytes + (prefetch + 1) decoded fetches,
  counted both as the values of their rows and as the whole chunks that contain those rows.

The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import zloader as zl
from benchmarks.compare import rivals
from benchmarks.harness import measuring
from benchmarks.harness.cloud import LinkSpeed
from benchmarks.harness.decoding import chunk_bytes, decode_seconds
from benchmarks.harness.measuring import Figures, median, ratio, table
from benchmarks.harness.sides import (
    RIVALS,
    StoreLocation,
    filling_epoch,
    in_turns,
    median_and_range,
    reader,
    rows_and_column,
    rows_per_s,
    speedups,
    store_location,
)
from zloader.insight.cost import EpochCost, epoch_costs
from zloader.storage.layout import chunks_of

SHAPES = "512x32,64x256,32x512"
OWN_SHAPE = (64, 256)
WORK_S = 0.003
STALL_S, STALLS = 3.0, (100, 700, 1300)
STALLED_EPOCHS = 3
_TOUCHED = 4 << 30


# ---- comparison with annbatch

COLUMNS = ("rows/s", "(range)", "first s", "user s", "system s", "peak MB", "GETs", "MB", "server")


def side_by_side(options: argparse.Namespace, work: Path) -> Figures:
    """Runs the turns of every shape and prints the table."""
    annbatch = rivals.environment("annbatch", python=options.python, directory=options.environments)
    rows, column = rows_and_column(options.store)
    runs: dict[str, dict[str, list[Figures]]] = {}
    lines = [["", *COLUMNS, *(cell for name in RIVALS for cell in (f"x {name}", "(range)"))]]
    for chunk_size, preload_nchunks in options.shapes:
        asked = {"chunk_size": chunk_size, "preload_nchunks": preload_nchunks, "obs": column}
        with contextlib.ExitStack() as stack:
            theirs = stack.enter_context(store_location(options.annbatch_store, options.speed))
            ours = stack.enter_context(store_location(options.store, options.speed))
            sides: dict[str, tuple[str | Path, StoreLocation]] = dict.fromkeys(RIVALS, (annbatch, theirs))
            sides |= {"zloader": (sys.executable, theirs), "zloader, own store": (sys.executable, ours)}
            readers = {
                name: stack.enter_context(reader(name, python, source, asked, work))
                for name, (python, source) in sides.items()
            }
            epochs: dict[str, Callable[[], Figures]] = {name: one.epoch for name, one in readers.items()}
            if options.cloud:
                epochs["zloader, empty mirror"] = functools.partial(filling_epoch, readers["zloader"], work)
            shape = f"{chunk_size} x {preload_nchunks}"
            runs[shape] = in_turns(epochs, options.epochs, rows=rows, label=shape)
        lines += [[f"{shape}, {name}", *cells(runs[shape], name)] for name in runs[shape]]
    table(lines)
    return {"rows": rows, "runs": runs}


def cells(runs: Mapping[str, Sequence[Figures]], name: str) -> list[str]:
    """The cells of one side: those of COLUMNS, and its speedup over each rival."""
    ours = runs[name]
    counted = "requests" in ours[0]
    found = [
        *median_and_range(list(map(rows_per_s, ours)), "{:,.0f}"),
        *(f"{median(ours, key):.2f}" for key in ("first_minibatch_s", "user_s", "system_s")),
        f"{max(run['peak_bytes'] for run in ours) / 1e6:,.0f}",
        f"{median(ours, 'requests'):,.0f}" if counted else "",
        f"{median(ours, 'served_bytes') / 1e6:,.0f}" if counted else "",
        server_share(ours) if counted else "",
    ]
    for theirs in (runs[rival] for rival in RIVALS if rival in runs):
        found += median_and_range(speedups(ours, theirs), "{:.2f}")
    return found


def server_share(figures: Sequence[Figures]) -> str:
    """The part of one core that the simulated cloud took."""
    return f"{statistics.median(run['server_s'] / run['seconds'] for run in figures):.0%}"


# ---- zloader's own store


def own(options: argparse.Namespace, work: Path) -> Figures:
    """Runs the measurements of --own and prints one line per figure."""
    chunk_size, preload_nchunks = OWN_SHAPE
    rows, column = rows_and_column(options.store)
    asked = {"chunk_size": chunk_size, "preload_nchunks": preload_nchunks, "obs": column}
    loader = zl.Loader(zl.open_dataset(options.store), sampling=zl.BlockShuffling(chunk_size), obs=[column])
    stored = {layout.path: chunk_bytes(options.store, layout) for layout in loader.dataset.store.matrix("X").arrays}
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(store_location(options.store, options.speed))
        start = [sys.executable, source, asked, work]
        plain, filling, stalled = (stack.enter_context(reader("zloader", *start)) for _ in range(3))

        def filled(**request: Any) -> Figures:
            measuring.touch(_TOUCHED)
            return filling_epoch(filling, work, **request)

        sides = {
            "decode": lambda: {"seconds": decode_seconds(loader, stored)},
            "cold": plain.epoch,
            "filling": filled,
            "filling, 3 ms": lambda: filled(work_s=WORK_S),
        }
        runs = in_turns(sides, options.epochs, rows=rows, label="own")
        runs["stalled"] = [stalled.epoch(stalls=STALLS, stall_s=STALL_S) for _ in range(STALLED_EPOCHS)]
    allowed = allowed_bytes(loader)
    speeds(runs, rows, options.speed)
    waits(runs)
    spent = max(run["peak_bytes"] for run in runs["stalled"]) - runs["stalled"][0]["before_bytes"]
    print(
        f"stalled: peak of three epochs {spent / 1e6:,.0f} MB; limit {allowed[0] / 1e6:,.0f} MB, "
        f"counting whole chunks {allowed[1] / 1e6:,.0f} MB"
    )
    for name, which in (("cold", "unmirrored"), ("filling", "first_mirrored")):
        first = runs[name][0]
        reads(name, first, getattr(epoch_costs(loader.dataset, loader.plan(first["epoch"])), which))
    return {"rows": rows, "allowed_bytes": allowed, "runs": runs}


def speeds(runs: Mapping[str, Sequence[Figures]], rows: int, speed: LinkSpeed | None) -> None:
    """Prints rows/s beside the limits that decoding and the link set."""
    for name in ("decode", "cold", "filling"):
        figures = runs[name]
        rate = rows / median(figures, "seconds")
        line = f"{name:8} {rate:9,.0f} rows/s, {ratio(runs['decode'], figures, 'seconds'):.2f} of decode"
        if speed and "requests" in figures[0]:
            rate = speed.total_mbps * 1e6
            share = statistics.median(run["served_bytes"] / run["seconds"] / rate for run in figures)
            line += f", {share:.0%} of the link, server {server_share(figures)} of a core"
        if name != "decode":
            line += f", peak {max(run['peak_bytes'] for run in figures) / 1e6:,.0f} MB"
        print(line)


def waits(runs: Mapping[str, Sequence[Figures]]) -> None:
    """Prints how long the consumer waits for the first minibatch, and after the first fetch."""
    firsts = [run["first_minibatch_s"] for run in runs["filling"]]
    print(
        f"first minibatch: {statistics.median(firsts):.2f} s (at most {max(firsts):.2f}), "
        f"including {median(runs['filling'], 'opened_s'):.2f} s to open the store"
    )
    shares = [run["waited_s"] / run["after_s"] for run in runs["filling, 3 ms"]]
    print(
        f"3 ms per minibatch: waits {statistics.median(shares):.1%} after the first fetch (at most {max(shares):.1%})"
    )


def reads(name: str, run: Figures, planned: EpochCost) -> None:
    """Prints the GETs and bytes of an epoch beside those of its plan and the server's counts."""
    line = f"{name}: {run['gets']:,} GETs, {run['bytes_read'] / 1e6:,.1f} MB"
    line += f"; planned {planned.gets:,}, {planned.bytes_read / 1e6:,.1f} MB"
    if "requests" in run:
        line += f"; counted by the server, including metadata: {run['requests']:,}, {run['served_bytes'] / 1e6:,.1f} MB"
    print(line)


def allowed_bytes(loader: zl.Loader) -> tuple[int, int]:
    """The memory limit from FetchOptions, counting decoded fetches as their rows' values, and as whole chunks."""
    dataset, options = loader.dataset, loader.options
    matrix, plan = dataset.store.matrix("X"), loader.plan(0)
    indptr = dataset.store.offsets(matrix)
    values, chunks = 0, 0
    for number in range(plan.n_fetches):
        starts, stops = matrix.elements_of(plan.fetch(number).rows, indptr)
        values = max(values, sum(int((stops - starts).sum()) * layout.dtype.itemsize for layout in matrix.arrays))
        chunks = max(
            chunks,
            sum(
                len(chunks_of(starts, stops, layout)) * layout.chunk_elements * layout.dtype.itemsize
                for layout in matrix.arrays
            ),
        )
    fixed = options.in_flight_bytes + options.ready_bytes
    return fixed + (options.prefetch + 1) * values, fixed + (options.prefetch + 1) * chunks


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """Parses `512x32,64x256` into pairs."""
    return [(int(a), int(b)) for a, b in (shape.split("x") for shape in text.split(","))]


def main() -> None:
    """Measures, prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("annbatch_store", type=Path, nargs="?")
    parser.add_argument("--own", action="store_true", help="measure zloader's own store against its targets")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--cloud", action="store_true", help="read through simulated clouds")
    parser.add_argument("--total-mbps", type=float, default=400, help="MB/s of each simulated cloud (default: 400)")
    parser.add_argument(
        "--shapes",
        type=parse_shapes,
        default=SHAPES,
        help=f"chunk_size x preload_nchunks of each shape (default: {SHAPES})",
    )
    parser.add_argument("--work", type=Path, help="directory for the mirrors (default: a temporary directory)")
    rivals.add_options(parser)
    options = parser.parse_args()
    options.speed = LinkSpeed(total_mbps=options.total_mbps) if options.cloud else None
    if not options.own and options.annbatch_store is None:
        parser.error("give ANNBATCH_STORE or --own")
    with tempfile.TemporaryDirectory(dir=options.work) as directory:
        figures = (own if options.own else side_by_side)(options, Path(directory))
    print(
        json.dumps({"cores": len(os.sched_getaffinity(0)), "cloud": options.speed and vars(options.speed), **figures})
    )


if __name__ == "__main__":
    main()
