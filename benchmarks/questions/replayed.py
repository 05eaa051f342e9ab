"""The same rows in the same order: annbatch records those of an epoch, and zloader makes the same minibatches.

    python -m benchmarks.questions.replayed OURS.zarr ANNBATCH.zarr [--turns 5] [--environments DIR]

The two stores have the same cells in the same order: ANNBATCH.zarr was written by `rivals.py write annbatch-zarrs`,
which does not shuffle. Neither tool then has an order that suits it better, and only reading is compared. annbatch
shuffles chunks of 64 and of 512 rows, 16 384 rows at a time. zloader gets the recorded row numbers as a sampling
of its own (a subclass of zl.Sampling), in fetches of as many rows. Sides:

- annbatch: its epochs, in a process that has made one before.
- zloader, no mirror: decodes the store in every epoch, as annbatch does.
- zloader: reads a full mirror.

The files are in the page cache. Sides take turns, every other turn in reverse order. "x annbatch" is the median of the
ratios of the turns, and their range. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.compare import rivals
from benchmarks.harness.measuring import Figures, median, read_through, table
from benchmarks.harness.sides import (
    StoreLocation,
    in_turns,
    median_and_range,
    reader,
    rows_and_column,
    rows_per_s,
    speedups,
)

CHUNKS = (64, 512)
FETCH_ROWS = 16_384
COLUMNS = ("chunks of", "side", "rows/s", "(range)", "x annbatch", "(range)", "user s", "system s")


def compare(ours: Path, theirs: Path, python: Path, chunk: int, turns: int, work: Path) -> dict[str, list[Figures]]:
    """The figures of all sides for one size of chunks."""
    rows, column = rows_and_column(ours)
    recorded = work / f"rows-{chunk}.npy"
    sizes = {"chunk_size": chunk, "preload_nchunks": FETCH_ROWS // chunk, "obs": column}
    replayed = {**sizes, "replayed": str(recorded)}
    of = {"ours": StoreLocation(store=ours, url=str(ours)), "theirs": StoreLocation(store=theirs, url=str(theirs))}
    for path in (*of["ours"].files(), *of["theirs"].files()):
        read_through(path)
    with contextlib.ExitStack() as stack:
        annbatch = stack.enter_context(
            reader("annbatch", python, of["theirs"], {**sizes, "recorded": str(recorded)}, work)
        )
        annbatch.ask(started=True)  # it has recorded its rows
        order = np.load(recorded)
        assert np.array_equal(np.sort(order), np.arange(rows)), "annbatch did not give out every row once"
        first = stack.enter_context(reader("zloader", sys.executable, of["ours"], replayed, work))
        mirrored = {**replayed, "mirror": str(work / "mirror")}
        second = stack.enter_context(reader("zloader", sys.executable, of["ours"], mirrored, work))
        sides = {"annbatch": annbatch.epoch, "zloader, no mirror": first.epoch, "zloader": second.epoch}
        return in_turns(sides, turns, rows=rows, label=f"chunks of {chunk}")


def main() -> None:
    """Measures, prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ours", type=Path)
    parser.add_argument("theirs", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--work", type=Path, help="directory for the mirror (default: a temporary directory)")
    rivals.add_options(parser)
    options = parser.parse_args()
    given = {"python": options.python, "directory": options.environments, "constrain": options.constrain}
    python, runs, lines = rivals.environment("annbatch", **given), {}, [list(COLUMNS)]
    for chunk in CHUNKS:
        with tempfile.TemporaryDirectory(dir=options.work) as work:
            ours, theirs = options.ours.absolute(), options.theirs.absolute()
            runs[chunk] = compare(ours, theirs, python, chunk, options.turns, Path(work))
        for side, found in runs[chunk].items():
            cells = [str(chunk), side, *median_and_range([rows_per_s(each) for each in found], "{:,.0f}")]
            cells += median_and_range(speedups(found, runs[chunk]["annbatch"]), "{:.2f}")
            cells += [f"{median(found, key):.2f}" for key in ("user_s", "system_s")]
            lines.append(cells)
    table(lines)
    print(json.dumps({"runs": runs}))


if __name__ == "__main__":
    main()
