"""Warm epochs: zloader from its local mirror compared with annbatch from its local store.

    python -m benchmarks.questions.warm STORE ANNBATCH_STORE [--epochs 5] [--shapes blocks,large,rows,genes,proof]

STORE is a zloader store and ANNBATCH_STORE an annbatch collection of the same rows, both on a local disk (read.py says
how to make them). Both are read through before each epoch, so that they are in the page cache. The sides take turns,
one epoch at a time. Each side is its own process (readers.py describes its settings and output) that idles during the
turns of the others. zloader keeps one loader, whose mirror was filled and verified before. The first epoch of each side
is discarded.

annbatch decodes its store in every epoch, so the processor is its limit; with single rows, it decodes a chunk of 64
rows for each. zloader gathers rows from memory-mapped files of raw rows: it reads 3 bytes per value and writes 8.
Memory bandwidth is its limit, for every block size.

- blocks: blocks of 64 rows in fetches of 16 384 (annbatch's chunk_size 64 x preload_nchunks 256), minibatches of 64.
- large: the same with minibatches of 1 024. With 64 rows, the fixed cost per minibatch is visible.
- rows: perfectly random, blocks of 1 row in fetches of 16 384, minibatches of 64. annbatch takes half a minute for 100
  000 rows, so each of its turns is two fetches (32 768 rows), from the request for the first row to the last row of the
  second fetch. zloader runs whole epochs. Its epochs with `blocks` run in the same turns, for comparison.
- genes: dense float32 minibatches (64 rows) of 2 000 genes drawn from all genes; blocks of 64 rows. zloader only.
- proof: the extra time that the first epoch of a process takes with a full mirror, compared with its second. In one
  case the files were touched before, so that every block is compared with its checksum, as after a crash of the
  machine. In the other the files are known to be intact. Each turn starts two new processes, which first run an epoch
  without a mirror, to compile and to allocate their memory.

Speedups are the medians of the ratios per turn, with their range. "annbatch, memory kept" is annbatch with glibc set to
keep freed memory; see read.py. CPU seconds are per turn. "mirror MB" counts the bytes that were read from the mirror,
in whole chunks. The last line is one JSON document.
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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import zloader as zl
from benchmarks.compare import rivals
from benchmarks.harness.measuring import Figures, median, table
from benchmarks.harness.sides import (
    RIVALS,
    Reader,
    StoreLocation,
    in_turns,
    median_and_range,
    reader,
    rows_and_column,
    rows_per_s,
    speedups,
)

FETCH_ROWS = 16_384
N_GENES = 2_000
PART_ROWS = 2 * FETCH_ROWS  # rows per turn of annbatch with single rows
COLUMNS = ("rows/s", "(range)", "first s", "user s", "system s", "peak MB", "mirror MB")
OURS, BLOCKS = "zloader", "zloader, blocks of 64"
PROVING, FIRST, SECOND = "zloader, first epoch, proving", "zloader, first epoch", "zloader, second epoch"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The settings of the sides. `targets` are zloader's required speedup over another side, or rows/s."""

    block: int = 64
    batch_size: int = 64
    theirs: bool = True
    part_rows: int | None = None
    targets: Mapping[str, float]

    def options(self) -> Figures:
        """The options of a reader."""
        return {
            "chunk_size": self.block,
            "preload_nchunks": FETCH_ROWS // self.block,
            "batch_size": self.batch_size,
        }


SHAPES = {
    "blocks": Shape(targets={"annbatch": 6, "rows/s": 400_000}),
    "large": Shape(batch_size=1024, targets={"annbatch": 8}),
    "rows": Shape(block=1, part_rows=PART_ROWS, targets={"annbatch": 60, BLOCKS: 1 / 1.5}),
    "genes": Shape(theirs=False, targets={"rows/s": 150_000}),
    "proof": Shape(theirs=False, targets={}),
}


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The settings that the shapes share: the two stores, the mirror, and the options of every side."""

    ours: Path
    theirs: Path
    mirror: Path
    work: Path
    annbatch: Path
    common: Figures

    def zloader(self, stack: contextlib.ExitStack, **asked: Any) -> Reader:
        """A process of zloader with the mirror. The mirror's files are read through before each epoch."""
        location = StoreLocation(store=self.mirror, url=str(self.ours))
        given = {**self.common, "mirror": str(self.mirror), **asked}
        return stack.enter_context(reader("zloader", sys.executable, location, given, self.work))

    def rival(self, stack: contextlib.ExitStack, name: str, **asked: Any) -> Reader:
        """A process of annbatch."""
        location = StoreLocation(store=self.theirs, url=str(self.theirs))
        return stack.enter_context(reader(name, self.annbatch, location, {**self.common, **asked}, self.work))


def turns(bench: Bench, name: str, epochs: int, *, rows: int) -> dict[str, list[Figures]]:
    """Runs the turns of one shape."""
    shape = SHAPES[name]
    with contextlib.ExitStack() as stack:
        sides: dict[str, Callable[[], Figures]] = {}
        if shape.theirs:
            part = {"rows": shape.part_rows} if shape.part_rows else {}
            for rival in RIVALS:
                sides[rival] = partial(bench.rival(stack, rival, **shape.options()).epoch, **part)
        asked = {"layout": "dense", "genes": genes(bench.ours)} if name == "genes" else {}
        if name == "proof":
            sides |= proof(bench, shape)
        else:
            sides[OURS] = bench.zloader(stack, **shape.options(), **asked).epoch
        if BLOCKS in shape.targets:
            sides[BLOCKS] = bench.zloader(stack, **SHAPES["blocks"].options()).epoch
        runs = in_turns(sides, epochs, rows=None, label=name)
    for side, figures in runs.items():
        wanted = rows if side.startswith(OURS) else min(rows, shape.part_rows or rows)
        assert {run["rows"] for run in figures} == {wanted}, f"{side} did not return {wanted} rows"
        assert not any(run.get("gets") for run in figures), f"{side} read from the store"
    return runs


def proof(bench: Bench, shape: Shape) -> dict[str, Callable[[], Figures]]:
    """The epochs of new processes. The first function called in a turn runs all epochs of the turn."""
    measured: dict[str, Figures] = {}

    def epoch(which: str) -> Figures:
        if which not in measured:
            for path in bench.mirror.rglob("*.rows"):
                path.touch()
            for first in (PROVING, FIRST):
                with contextlib.ExitStack() as stack:
                    fresh = bench.zloader(stack, **shape.options())
                    fresh.epoch(mirror=None)
                    measured.update({first: fresh.epoch(), SECOND: fresh.epoch()})
        return measured.pop(which)

    return {which: partial(epoch, which) for which in (PROVING, FIRST, SECOND)}


def genes(store: Path) -> list[int]:
    """The positions of the genes to select."""
    n_genes = zl.open_dataset(store).n_vars
    drawn = np.random.default_rng(0).choice(n_genes, min(N_GENES, n_genes), replace=False)
    return sorted(drawn.tolist())


def lines(name: str, runs: Mapping[str, Sequence[Figures]]) -> list[list[str]]:
    """The lines of one shape, one per side, with zloader's speedup over each other side."""
    found = []
    ours = runs[OURS if OURS in runs else PROVING]
    for side, figures in runs.items():
        cells = [f"{name}: {side}", *median_and_range(list(map(rows_per_s, figures)), "{:,.0f}")]
        cells += [f"{median(figures, key):.2f}" for key in ("first_minibatch_s", "user_s", "system_s")]
        cells.append(f"{max(run['peak_bytes'] for run in figures) / 1e6:,.0f}")
        mirrored = "bytes_from_mirror" in figures[0]
        cells.append(f"{median(figures, 'bytes_from_mirror') / 1e6:,.0f}" if mirrored else "")
        found.append(cells + (["", ""] if figures is ours else median_and_range(speedups(ours, figures), "{:.2f}")))
    return found


def verdicts(name: str, runs: Mapping[str, Sequence[Figures]]) -> list[Figures]:
    """Compares the measurements of a shape with its targets. Prints one line per target."""
    found = []
    for what, target in SHAPES[name].targets.items():
        if what == "rows/s":
            measured = statistics.median(map(rows_per_s, runs[OURS]))
            comparison = f"{measured:,.0f} rows/s (target {target:,.0f})"
        else:
            measured = statistics.median(speedups(runs[OURS], runs[what]))
            comparison = f"{measured:.2f} times as fast as {what} (target {target:.2f})"
        print(f"{name}: {comparison}: {'met' if measured >= target else 'missed'}")
        found.append({"shape": name, "what": what, "target": target, "measured": measured})
    return found


def main() -> None:
    """Measures, prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("annbatch_store", type=Path)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--shapes", default=",".join(SHAPES), help=f"comma-separated, some of {', '.join(SHAPES)} (default: all)"
    )
    parser.add_argument("--work", type=Path, help="directory for the mirror (default: a temporary directory)")
    rivals.add_options(parser)
    options = parser.parse_args()
    names = options.shapes.split(",")
    if unknown := set(names) - SHAPES.keys():
        parser.error(f"unknown shapes: {', '.join(unknown)}")
    rows, column = rows_and_column(options.store)
    with tempfile.TemporaryDirectory(dir=options.work) as directory:
        bench = Bench(
            ours=options.store.absolute(),
            theirs=options.annbatch_store.absolute(),
            mirror=Path(directory) / "mirror",
            work=Path(directory),
            annbatch=rivals.environment("annbatch", python=options.python, directory=options.environments),
            common={"obs": column},
        )
        with contextlib.ExitStack() as stack:
            bench.zloader(stack, **SHAPES["blocks"].options()).ask()  # fills the mirror
        runs = {name: turns(bench, name, options.epochs, rows=rows) for name in names}
    table([["", *COLUMNS, "zloader speedup", "(range)"], *(line for name in names for line in lines(name, runs[name]))])
    targets = [verdict for name in names for verdict in verdicts(name, runs[name])]
    cores = len(os.sched_getaffinity(0))
    print(json.dumps({"cores": cores, "rows": rows, "genes": N_GENES, "targets": targets, "runs": runs}))


if __name__ == "__main__":
    main()
