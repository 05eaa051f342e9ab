"""Warm epochs: zloader from its local mirror beside annbatch from its local store, epoch by epoch in turns.

    python benchmarks/warm.py STORE ANNBATCH_STORE [--epochs 5] [--shapes blocks,large,rows,genes,proof]

STORE is zloader's, ANNBATCH_STORE annbatch's collection of the same rows, both on a local disk and read through before
each epoch, to be in the page cache; read.py says how they are made. Each side is a process of its own that idles while
another has its turn (readers.py says how it is set up and what it gives); zloader keeps one loader, whose mirror was
filled and proved before. One epoch of each is thrown away.

annbatch decodes its store again each epoch: its bound is the processor, and with single rows a chunk of 64 rows
decoded for each. zloader gathers from decoded files that are mapped into memory: 3 bytes a value are read, 8 written,
and its bound is memory, whatever the blocks.

- blocks: blocks of 64 rows in fetches of 16 384 (annbatch's chunk_size 64 x preload_nchunks 256), minibatches of 64.
- large: the same, minibatches of 1 024. 64 rows are so little that what a minibatch costs beside its rows shows.
- rows: perfectly random, blocks of 1 row in fetches of 16 384, minibatches of 64. annbatch takes half a minute for
  100 000 rows, so each of its turns is two fetches (32 768 rows), measured from asking for the first to having the
  last row of the second. zloader goes through whole epochs; its own of `blocks` stands beside, in the same turns.
- genes: dense float32 minibatches (64 rows) of 2 000 genes, drawn from all; blocks of 64 rows. zloader alone.
- proof: what the first epoch of a process pays over its second where the mirror is full: once with files that were
  touched before, so that every chunk is compared with its checksum, as after a crash of the machine, and once with
  files that are known to be right. Two new processes each turn, which first go through an epoch without a mirror, to
  compile and to take their memory.

Ratios are medians of the turns' (and their range). "annbatch, memory kept" is annbatch with glibc told not to give
memory back; see read.py. CPU seconds are those of a turn. "mirror MB" is what the rows were taken from, in whole
chunks. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
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
import rivals
from read import RIVALS, Place, Reader, as_quick, described, in_turns, ranged, reader, rows_per_s
from rivals import Figures, median, table

import zloader as zl

FETCH_ROWS = 16_384
N_GENES = 2_000
PART_ROWS = 2 * FETCH_ROWS  # of annbatch's epochs of single rows
COLUMNS = ("rows/s", "(range)", "first s", "user s", "system s", "peak MB", "mirror MB")
OURS, BLOCKS = "zloader", "zloader, blocks of 64"
PROVING, FIRST, SECOND = "zloader, first epoch, proving", "zloader, first epoch", "zloader, second epoch"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is asked of the sides; `targets` say how many times as quick as another zloader should be, and rows/s."""

    block: int = 64
    batch_size: int = 64
    theirs: bool = True
    part_rows: int | None = None
    targets: Mapping[str, float]

    def options(self) -> Figures:
        """For a reader."""
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
    """What the shapes have in common: the two stores, the mirror, and what every side is told."""

    ours: Path
    theirs: Path
    mirror: Path
    work: Path
    annbatch: Path
    common: Figures

    def zloader(self, stack: contextlib.ExitStack, **asked: Any) -> Reader:
        """A process of zloader with the mirror, whose files are those read through before each epoch."""
        place = Place(store=self.mirror, url=str(self.ours), storage_options=None)
        given = {**self.common, "mirror": str(self.mirror), **asked}
        return stack.enter_context(reader("zloader", sys.executable, place, given, self.work))

    def rival(self, stack: contextlib.ExitStack, name: str, **asked: Any) -> Reader:
        """A process of annbatch."""
        place = Place(store=self.theirs, url=str(self.theirs), storage_options=None)
        return stack.enter_context(reader(name, self.annbatch, place, {**self.common, **asked}, self.work))


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
        runs = in_turns(sides, epochs, rows=None, what=name)
    for side, figures in runs.items():
        wanted = rows if side.startswith(OURS) else min(rows, shape.part_rows or rows)
        assert {run["rows"] for run in figures} == {wanted}, f"{side} did not give {wanted} rows"
        assert not any(run.get("gets") for run in figures), f"{side} read from the store"
    return runs


def proof(bench: Bench, shape: Shape) -> dict[str, Callable[[], Figures]]:
    """The epochs of new processes; whichever is asked for first makes all of a turn."""
    made: dict[str, Figures] = {}

    def epoch(which: str) -> Figures:
        if which not in made:
            for path in bench.mirror.rglob("*.flat"):
                path.touch()
            for first in (PROVING, FIRST):
                with contextlib.ExitStack() as stack:
                    fresh = bench.zloader(stack, **shape.options())
                    fresh.epoch(mirror=None)
                    made.update({first: fresh.epoch(), SECOND: fresh.epoch()})
        return made.pop(which)

    return {which: partial(epoch, which) for which in (PROVING, FIRST, SECOND)}


def genes(store: Path) -> list[int]:
    """Positions of the genes to select."""
    n_genes = zl.open_dataset(store).n_vars
    drawn = np.random.default_rng(0).choice(n_genes, min(N_GENES, n_genes), replace=False)
    return sorted(drawn.tolist())


def lines(name: str, runs: Mapping[str, Sequence[Figures]]) -> list[list[str]]:
    """The lines of one shape: its sides, and how many times as quick as each of the others zloader is."""
    found = []
    ours = runs[OURS if OURS in runs else PROVING]
    for side, figures in runs.items():
        cells = [f"{name}: {side}", *ranged(list(map(rows_per_s, figures)), "{:,.0f}")]
        cells += [f"{median(figures, key):.2f}" for key in ("first_minibatch_s", "user_s", "system_s")]
        cells.append(f"{max(run['peak_bytes'] for run in figures) / 1e6:,.0f}")
        mirrored = "bytes_from_mirror" in figures[0]
        cells.append(f"{median(figures, 'bytes_from_mirror') / 1e6:,.0f}" if mirrored else "")
        found.append(cells + (["", ""] if figures is ours else ranged(as_quick(ours, figures), "{:.2f}")))
    return found


def verdicts(name: str, runs: Mapping[str, Sequence[Figures]]) -> list[Figures]:
    """Each target of a shape beside what was measured; prints a line for each."""
    found = []
    for what, target in SHAPES[name].targets.items():
        if what == "rows/s":
            measured = statistics.median(map(rows_per_s, runs[OURS]))
            said = f"{measured:,.0f} rows/s (target {target:,.0f})"
        else:
            measured = statistics.median(as_quick(runs[OURS], runs[what]))
            said = f"{measured:.2f} times as quick as {what} (target {target:.2f})"
        print(f"{name}: {said}: {'met' if measured >= target else 'missed'}")
        found.append({"shape": name, "what": what, "target": target, "measured": measured})
    return found


def takeable(names: Sequence[str]) -> list[str]:
    """Those of the shapes that this zloader can do; says which it cannot."""
    if "genes" in names and "genes" not in inspect.signature(zl.Loader).parameters:
        print("genes: left out, zl.Loader does not take genes yet", file=sys.stderr)
        return [name for name in names if name != "genes"]
    return list(names)


def main() -> None:
    """Measures, prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("annbatch_store", type=Path)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"some of {', '.join(SHAPES)} (default: all)")
    parser.add_argument("--work", type=Path, help="directory for the mirror (default: a temporary one)")
    rivals.add_options(parser)
    options = parser.parse_args()
    names = options.shapes.split(",")
    if unknown := set(names) - SHAPES.keys():
        parser.error(f"there are no shapes {', '.join(unknown)}")
    names = takeable(names)
    rows, column = described(options.store)
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
    table([["", *COLUMNS, "zloader is x", "(range)"], *(line for name in names for line in lines(name, runs[name]))])
    targets = [verdict for name in names for verdict in verdicts(name, runs[name])]
    cores = len(os.sched_getaffinity(0))
    print(json.dumps({"cores": cores, "rows": rows, "genes": N_GENES, "targets": targets, "runs": runs}))


if __name__ == "__main__":
    main()
