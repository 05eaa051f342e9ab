"""Epochs from a mirror that is not in the page cache, beside plain reads of the same bytes from the same files.

    python benchmarks/disk.py STORE [--epochs 3] [--blocks 64,1] [--fetch-rows 16384] [--cached 0.5]

An atlas' mirror is larger than memory (Tahoe-100M: 450 GB), and then the disk is the limit. Two ways to have that with
a small one:

- dropped: before each epoch all files of the mirror are written out and dropped from the page cache
  (POSIX_FADV_DONTNEED; that they are gone is checked). Each byte then comes from the disk once, and stays: what is read
  beside the rows of a fetch is of use to a later one, which flatters a reader that reads more than it was asked for.
- limited: the process is in a memory cgroup that leaves the page cache a share of the mirror's bytes (`--cached`) above
  the memory that it holds itself, and goes through epoch after epoch, one of them thrown away. What is read and not
  used soon is read again: as with an atlas. An epoch of zloader's is left after half a minute, and its rows counted
  until then. It takes root, and cgroup v1's memory controller or v2's (which has not been tried), else it is skipped.
  zloader reads some fetches ahead into the page cache. Where the share is not much more than these four, they are gone
  before they are used, which says nothing of an atlas and its machine: of 100 000 rows a fetch of 16 384 is a sixth.
  Take a store of a million rows for it, or `--fetch-rows 4096`.

Sides, each a process of its own (readers.py), in turns where files are dropped, one after the other where memory is
limited:

- zloader: torch CSR minibatches of 64 rows in fetches of 16 384, one obs column; the mirror is full and was proved in
  an epoch before.
- pread: the ranges that the epoch takes, in its order: of each block the bytes of its genes, and those of its values
  (blocks that follow one another are one range). As many threads as zloader's, each reads one range at a time.
- pread, advised: each thread first asks for its next fetch's (see ways.py, which compares ways of reading).
- sequential: the same files from end to end, 1 MiB at a time.

"useful" are the bytes of the rows' genes and values, each once an epoch: the whole mirror; "device" what the kernel had
read for the process (/proc/self/io). The target is 0.7 of pread's useful MB/s with blocks of 64. Rows of a block of 1
lie on 4 KiB pages: with an atlas 2.5 times their bytes. MB are 10^6 bytes. The last line is one JSON document.
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

from read import Place, Reader, as_quick, described, in_turns, ranged, reader, rows_per_s
from rivals import Figures, table

import zloader as zl

TARGET = 0.7
TARGET_BLOCK = 64
MOST_S = 30.0  # of an epoch with limited memory
OURS, RANDOM = "zloader", "pread"
WAYS = {RANDOM: "pread", "pread, advised": "pread, advised", "sequential": "sequential"}
COLUMNS = ("rows/s", "(range)", "useful MB/s", "device MB/s", "device/useful", "cpu s/100k rows", "x pread", "(range)")


# ---- memory cgroups


@dataclass(frozen=True, kw_only=True)
class Cgroup:
    """A memory cgroup made for one process."""

    directory: Path
    limit: str  # the names of its files
    usage: str
    cached: str  # in memory.stat

    def limit_cache(self, n_bytes: int) -> int:
        """Leaves the page cache so much above what the processes hold themselves; gives the limit."""
        stat = dict(line.split() for line in (self.directory / "memory.stat").read_text().splitlines())
        held = int((self.directory / self.usage).read_text()) - int(stat[self.cached])
        limit = held + n_bytes
        (self.directory / self.limit).write_text(str(limit))
        return limit


@contextlib.contextmanager
def cgroup(pid: int) -> Iterator[Cgroup]:
    """A cgroup that holds a process; the process must have ended before it is left. Raises OSError."""
    v1 = Path("/sys/fs/cgroup/memory")
    parent = v1 if v1.is_dir() else Path("/sys/fs/cgroup")
    directory = parent / f"zloader-disk-{os.getpid()}-{pid}"
    directory.mkdir()
    try:
        (directory / "cgroup.procs").write_text(str(pid))
        if v1.is_dir():
            names = {"limit": "memory.limit_in_bytes", "usage": "memory.usage_in_bytes", "cached": "cache"}
        else:
            names = {"limit": "memory.max", "usage": "memory.current", "cached": "file"}
        if not (directory / names["limit"]).exists():
            raise OSError(f"{directory} has no memory controller")
        yield Cgroup(directory=directory, **names)
        (parent / "cgroup.procs").write_text(str(pid))
    finally:
        with contextlib.suppress(OSError):
            (parent / "cgroup.procs").write_text(str(pid))
        directory.rmdir()


# ---- epochs


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The store, its mirror, and what every process is told."""

    store: Path
    mirror: Path
    work: Path
    column: str
    rows: int
    fetch_rows: int
    useful_bytes: int

    @contextlib.contextmanager
    def side(self, name: str, block: int) -> Iterator[Reader]:
        """Starts a side's process."""
        place = Place(store=self.mirror, url=str(self.store), storage_options=None)
        asked: Figures = {"chunk_size": block, "preload_nchunks": self.fetch_rows // block, "mirror": str(self.mirror)}
        asked |= {"obs": self.column} if name == OURS else {"way": WAYS[name]}
        with reader("zloader" if name == OURS else "plain", sys.executable, place, asked, self.work) as one:
            yield one

    def dropped(self, block: int, epochs: int) -> dict[str, list[Figures]]:
        """Epochs of all sides in turns, with nothing of the mirror in the page cache."""
        with contextlib.ExitStack() as stack:
            sides = {name: stack.enter_context(self.side(name, block)) for name in (OURS, *WAYS)}
            for side in sides.values():
                side.ask(drop=str(self.mirror))  # compiles; proves the mirror
            asks = {name: partial(side.ask, drop=str(self.mirror)) for name, side in sides.items()}
            return in_turns(asks, epochs, rows=self.rows, what=f"dropped, blocks of {block}")

    def limited(self, block: int, epochs: int, *, cached: float) -> dict[str, list[Figures]]:
        """Epochs of one side after the other, with a share of the mirror in the page cache."""
        runs = {}
        for name in (OURS, *WAYS):
            with self.side(name, block) as side, cgroup(side.process.pid) as group:
                side.ask(drop=str(self.mirror))
                limit = group.limit_cache(int(cached * self.useful_bytes))
                print(f"limited, blocks of {block}, {name}: {limit / 1e6:,.0f} MB in all", file=sys.stderr)
                epoch = partial(side.ask, most_s=MOST_S)
                runs |= in_turns({name: epoch}, epochs, rows=None, what=f"limited, blocks of {block}")
        return runs


def lines(what: str, runs: Mapping[str, Sequence[Figures]], row_bytes: float) -> list[list[str]]:
    """The lines of one table: a side each."""
    found = []
    for name, figures in runs.items():
        device = statistics.median(run["device_bytes"] / run["seconds"] for run in figures)
        cells = [f"{what}: {name}", *ranged(list(map(rows_per_s, figures)), "{:,.0f}")]
        cells += [f"{statistics.median(map(rows_per_s, figures)) * row_bytes / 1e6:,.0f}", f"{device / 1e6:,.0f}"]
        cells.append(f"{statistics.median(run['device_bytes'] / (run['rows'] * row_bytes) for run in figures):.2f}")
        cells.append(
            f"{statistics.median((run['user_s'] + run['system_s']) / run['rows'] for run in figures) * 1e5:.2f}"
        )
        found.append(cells + (["", ""] if name == RANDOM else ranged(as_quick(figures, runs[RANDOM]), "{:.2f}")))
    return found


def main() -> None:
    """Measures, prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--blocks", default="64,1", help="rows in a block (default: 64,1)")
    parser.add_argument("--fetch-rows", type=int, default=16_384, help="default: 16384")
    parser.add_argument(
        "--cached",
        type=float,
        default=0.5,
        help="share of the mirror that a limit leaves; 0: no limit (default: 0.5)",
    )
    parser.add_argument(
        "--work", type=Path, help="directory for the mirror, on the disk to measure (default: a temporary one)"
    )
    options = parser.parse_args()
    rows, column = described(options.store)
    matrix = zl.open_dataset(options.store).matrix()
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
                        f"limited, blocks of {block}: left out, for want of a memory cgroup: {error}", file=sys.stderr
                    )
    table([["", *COLUMNS], *(line for what, of in runs.items() for line in lines(what, of, useful_bytes / rows))])
    for what, of in runs.items():
        if what.endswith(f" {TARGET_BLOCK}"):
            share = statistics.median(as_quick(of[OURS], of[RANDOM]))
            print(f"{what}: {share:.2f} of pread (target {TARGET}): {'met' if share >= TARGET else 'missed'}")
    cores = len(os.sched_getaffinity(0))
    print(json.dumps({"cores": cores, "rows": rows, "useful_bytes": useful_bytes, "runs": runs}))


if __name__ == "__main__":
    main()
