"""Warm epochs of tokens: Geneformer and scGPT compared with zloader's X and with annbatch's.

    python -m benchmarks.questions.tokens STORE ANNBATCH_STORE [--slaf SLAF_STORE] [--epochs 5] [--work DIRECTORY]

The stores, the turns and the processes are those of warm.py (shape `blocks`: minibatches of 64 rows, blocks of 64 rows
in fetches of 16 384). Every gene is in the vocabulary, and rows have up to 2 048 tokens, so nearly all values of the
store become tokens. The loaders of tokens return no X. annbatch returns counts, which would
still have to be tokenized: the required share of its speed is 0.5 for Geneformer and 0.4 for scGPT.

--slaf adds SLAF's loader with its own tokenizers, 2 048 genes per row and 51 bins, on the same rows (`rivals.py write
slafdb` converts them). Its Geneformer ranks raw counts, without medians. The required speed is 10 times SLAF's, and
--slaf-s ends its epochs early, because they take long. Rows are counted all the same.

Ratios are the medians of the ratios per turn, with their range. CPU seconds are per epoch, of all threads. The last
line is one JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.compare import rivals
from benchmarks.harness.measuring import Figures, median, table
from benchmarks.harness.sides import (
    Reader,
    StoreLocation,
    in_turns,
    median_and_range,
    reader,
    rows_and_column,
    rows_per_s,
    speedups,
)

SIZES = {"chunk_size": 64, "preload_nchunks": 256, "batch_size": 64}
SLAF_SIDES = {"SLAF, Geneformer": "Geneformer", "SLAF, scGPT": "scGPT"}
SIDES = ("zloader, X", "Geneformer", "scGPT")
TARGETS = {"Geneformer": 0.5, "scGPT": 0.4}  # of annbatch's speed
SLAF_TARGET = 10  # times SLAF's speed
COLUMNS = ("rows/s", "(range)", "user s", "system s", "peak MB", "x annbatch", "(range)")


@contextlib.contextmanager
def slaf(name: str, work: Path, options: argparse.Namespace) -> Iterator[Callable[[], Figures]]:
    """Yields the epochs of SLAF's loader with one of its tokenizers."""
    python = rivals.environment("slafdb", python=options.slaf_python, directory=options.environments)
    location = StoreLocation(store=options.slaf.absolute(), url=str(options.slaf.absolute()))
    with reader("slafdb", python, location, {"tokens": SLAF_SIDES[name], **SIZES}, work) as started:
        yield partial(started.epoch, **({"most_s": options.slaf_s} if options.slaf_s else {}))


def main() -> None:
    """Measures, prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("annbatch_store", type=Path)
    parser.add_argument("--slaf", type=Path, help="a SLAF store of the same rows")
    parser.add_argument("--slaf-python", help="Python interpreter for SLAF's environment, below 3.14")
    parser.add_argument("--slaf-s", type=float, help="seconds after which an epoch of SLAF ends (default: all rows)")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--work", type=Path, help="directory for the mirror (default: a temporary directory)")
    rivals.add_options(parser)
    options = parser.parse_args()
    rows, column = rows_and_column(options.store)
    annbatch = rivals.environment("annbatch", python=options.python, directory=options.environments)
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.work)))
        mirror = work / "mirror"

        def zloader(name: str) -> Reader:
            location = StoreLocation(store=mirror, url=str(options.store.absolute()))
            tokens = {} if name == SIDES[0] else {"tokens": name}
            given = {"obs": column, "mirror": str(mirror), **SIZES, **tokens}
            return stack.enter_context(reader("zloader", sys.executable, location, given, work))

        theirs = options.annbatch_store.absolute()
        location = StoreLocation(store=theirs, url=str(theirs))
        rival = stack.enter_context(reader("annbatch", annbatch, location, {"obs": column, **SIZES}, work))
        ours = {name: zloader(name) for name in SIDES}
        ours[SIDES[0]].ask()  # fills the mirror
        sides = {"annbatch, X": rival.epoch} | {name: partial(each.epoch) for name, each in ours.items()}
        if options.slaf:
            sides |= {name: stack.enter_context(slaf(name, work, options)) for name in SLAF_SIDES}
        runs = in_turns(sides, options.epochs, rows=None if options.slaf_s else rows, label="tokens")
    lines = [["", *COLUMNS]]
    for name, figures in runs.items():
        cells = [name, *median_and_range(list(map(rows_per_s, figures)), "{:,.0f}")]
        cells += [f"{median(figures, key):.2f}" for key in ("user_s", "system_s")]
        cells.append(f"{max(run['peak_bytes'] for run in figures) / 1e6:,.0f}")
        lines.append(cells + median_and_range(speedups(figures, runs["annbatch, X"]), "{:.2f}"))
    table(lines)
    for name, target in TARGETS.items():
        measured = statistics.median(speedups(runs[name], runs["annbatch, X"]))
        print(f"{name}: {measured:.2f} x annbatch (target {target}): {'met' if measured >= target else 'missed'}")
    for side, name in SLAF_SIDES.items() if options.slaf else ():
        measured = statistics.median(speedups(runs[name], runs[side]))
        print(
            f"{name}: {measured:.1f} x {side} (target {SLAF_TARGET}): {'met' if measured >= SLAF_TARGET else 'missed'}"
        )
    print(json.dumps({"cores": len(os.sched_getaffinity(0)), "rows": rows, "runs": runs}))


if __name__ == "__main__":
    main()
