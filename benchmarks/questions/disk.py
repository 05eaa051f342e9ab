"""Epochs from a mirror that is not in the page cache, compared with plain reads of the same bytes from the same files.

    python -m benchmarks.questions.disk STORE [--epochs 3] [--blocks 64,1] [--fetch-rows 16384] [--cached 0.5]

The mirror of an atlas is larger than memory (Tahoe-100M: 450 GB), so the disk is the limit. Two ways to reproduce that
with a small mirror:

- dropped: before each epoch, all files of the mirror are synced and dropped from the page cache (POSIX_FADV_DONTNEED;
  the script checks that they are gone). During the epoch, each byte is read from the disk once and then stays cached.
  Bytes read in excess of one fetch serve a later fetch, which flatters readers that read more than they need.
- limited: the process runs in a memory cgroup that leaves the page cache a share (`--cached`) of the mirror's bytes
  above the process's own memory. It runs several epochs, the first of which is discarded. Bytes that are read and not
  used soon are read again, as with an atlas. An epoch of zloader is stopped after half a minute, and the rows until
  then count. This needs root and the memory controller of cgroup v1 (or v2, which is untested); otherwise it is
  skipped. zloader reads some fetches ahead into the page cache. If the share is not much larger than four fetches,
  those pages are evicted before they are used. An atlas on its usual machine does not have this problem, but a store of
  100 000 rows does: a fetch of 16 384 rows is a sixth of it. Use a store of a million rows, or `--fetch-rows 4096`.

The sides, each in its own process (readers.py), take turns when files are dropped and run one after another when memory
is limited:

- zloader: torch CSR minibatches of 64 rows in fetches of 16 384, one obs column. The mirror is full and was verified in
  an earlier epoch.
- pread: the byte ranges of the epoch, in its order: for each block the bytes of its genes and of its values (adjacent
  blocks form one range). It uses as many threads as zloader, and each thread reads one range at a time.
- pread, advised: each thread first advises the kernel of its next fetch (ways.py compares ways of reading).
- sequential: the same files from start to end, 1 MiB at a time.

"useful" counts the bytes of the rows' genes and values, each once per epoch: the whole mirror. "device" counts the
bytes that the kernel read from the disk for the process (/proc/self/io). The target is 0.7 of pread's useful MB/s with
blocks of 64. Single rows (blocks of 1) touch 4 KiB pages: for an atlas, 2.5 times the bytes of the rows. MB are 10^6
bytes. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import zloader as zl
from benchmarks.harness.cgroups import cgroup
from benchmarks.harness.measuring import Figures, table
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

TARGET = 0.7
TARGET_BLOCK = 64
MOST_S = 30.0  # per epoch with limited memory
OURS, RANDOM = "zloader", "pread"
WAYS = {RANDOM: "pread", "pread, advised": "pread, advised", "sequential": "sequential"}
COLUMNS = ("rows/s", "(range)", "useful MB/s", "device MB/s", "device/useful", "cpu s/100k rows", "x pread", "(range)")


# ---- epochs


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The store, its mirror, and the settings that every process shares."""

    store: Path
    mirror: Path
    work: Path
    column: str
    rows: int
    fetch_rows: int
    useful_bytes: int

    @contextlib.contextmanager
    def side(self, name: str, block: int) -> Iterator[Reader]:
        """Starts the process of one side."""
        location = StoreLocation(store=self.mirror, url=str(self.store))
        asked: Figures = {"chunk_size": block, "preload_nchunks": self.fetch_rows // block, "mirror": str(self.mirror)}
        asked |= {"obs": self.column} if name == OURS else {"way": WAYS[name]}
        with reader("zloader" if name == OURS else "plain", sys.executable, location, asked, self.work) as one:
            yield one

    def dropped(self, block: int, epochs: int) -> dict[str, list[Figures]]:
        """Epochs of all sides in turns, with the mirror dropped from the page cache."""
        with contextlib.ExitStack() as stack:
            sides = {name: stack.enter_context(self.side(name, block)) for name in (OURS, *WAYS)}
            for side in sides.values():
                side.ask(drop=str(self.mirror))  # compiles and verifies the mirror
            asks = {name: partial(side.ask, drop=str(self.mirror)) for name, side in sides.items()}
            return in_turns(asks, epochs, rows=self.rows, label=f"dropped, blocks of {block}")

    def limited(self, block: int, epochs: int, *, cached: float) -> dict[str, list[Figures]]:
        """Epochs of each side in sequence, with room for a share of the mirror in the page cache."""
        runs = {}
        for name in (OURS, *WAYS):
            with self.side(name, block) as side, cgroup() as group:
                group.add(side.process.pid)
                side.ask(drop=str(self.mirror))
                limit = group.limit_cache(int(cached * self.useful_bytes))
                print(f"limited, blocks of {block}, {name}: {limit / 1e6:,.0f} MB limit", file=sys.stderr)
                epoch = partial(side.ask, most_s=MOST_S)
                runs |= in_turns({name: epoch}, epochs, rows=None, label=f"limited, blocks of {block}")
        return runs


def lines(what: str, runs: Mapping[str, Sequence[Figures]], row_bytes: float) -> list[list[str]]:
    """The lines of the table for one case, one per side."""
    found = []
    for name, figures in runs.items():
        device = statistics.median(run["device_bytes"] / run["seconds"] for run in figures)
        cells = [f"{what}: {name}", *median_and_range(list(map(rows_per_s, figures)), "{:,.0f}")]
        cells += [f"{statistics.median(map(rows_per_s, figures)) * row_bytes / 1e6:,.0f}", f"{device / 1e6:,.0f}"]
        cells.append(f"{statistics.median(run['device_bytes'] / (run['rows'] * row_bytes) for run in figures):.2f}")
        cells.append(
            f"{statistics.median((run['user_s'] + run['system_s']) / run['rows'] for run in figures) * 1e5:.2f}"
        )
        found.append(
            cells + (["", ""] if name == RANDOM else median_and_range(speedups(figures, runs[RANDOM]), "{:.2f}"))
        )
    return found


def main() -> None:
    """Measures, prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--blocks", default="64,1", help="rows per block (default: 64,1)")
    parser.add_argument("--fetch-rows", type=int, default=16_384, help="rows per fetch (default: 16384)")
    parser.add_argument(
        "--cached",
        type=float,
        default=0.5,
        help="share of the mirror that fits into the limited page cache; 0 skips that case (default: 0.5)",
    )
    parser.add_argument(
        "--work", type=Path, help="directory for the mirror, on the disk to measure (default: a temporary directory)"
    )
    options = parser.parse_args()
    rows, column = rows_and_column(options.store)
    matrix = zl.open_dataset(options.store).store.matrix("X")
    useful_bytes = sum(array.n_elements * array.dtype.itemsize for array in matrix.arrays)
    runs: dict[str, dict[str, list[Figures]]] = {}
    with tempfile.TemporaryDirectory(dir=options.work) as directory:
        bench = Bench(
            store=options.store.absolute(),
            mirror=Path(directory) / "mirror",
            work=Path(directory),
            column=column,
            rows=rows,
            fetch_rows=options.fetch_rows,
            useful_bytes=useful_bytes,
        )
        with bench.side(OURS, TARGET_BLOCK) as side:
            side.ask()  # fills the mirror
        for block in map(int, options.blocks.split(",")):
            runs[f"dropped, blocks of {block}"] = bench.dropped(block, options.epochs)
            if options.cached:
                try:
                    limited = bench.limited(block, options.epochs, cached=options.cached)
                    runs[f"limited, blocks of {block}"] = limited
                except OSError as error:
                    print(
                        f"limited, blocks of {block}: skipped, because there is no memory cgroup: {error}",
                        file=sys.stderr,
                    )
    table([["", *COLUMNS], *(line for what, of in runs.items() for line in lines(what, of, useful_bytes / rows))])
    for what, of in runs.items():
        if what.endswith(f" {TARGET_BLOCK}"):
            share = statistics.median(speedups(of[OURS], of[RANDOM]))
            print(f"{what}: {share:.2f} of pread (target {TARGET}): {'met' if share >= TARGET else 'missed'}")
    cores = len(os.sched_getaffinity(0))
    print(json.dumps({"cores": cores, "rows": rows, "useful_bytes": useful_bytes, "runs": runs}))


if __name__ == "__main__":
    main()
