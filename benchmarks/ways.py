"""Ways of reading byte ranges of a file that is not in the page cache: mapped, advised, or with pread.

    python benchmarks/ways.py DIRECTORY [--size 4GiB] [--take 384MiB] [--threads 2,8] [--turns 3]

A file of `size` is written to DIRECTORY (and removed again), and ranges from all over it, `take` bytes of them, are
read in random order: those of a block of 64 rows (236 KB of genes, 118 KB of values) and of single rows (a 64th of
that), not aligned to anything, as a mirror has them. The file is larger than what is taken, as an atlas is larger than
a few fetches: what a way reads beside the ranges is lost, and shows as device bytes over useful ones. Pages have 4 KiB,
so single rows cost 2.5 times their bytes in every way.

- sequential pread: all of the file, 1 MiB after 1 MiB.
- pread: into a buffer of a fetch, rows copied out of it. The kernel reads the pages of the range in one go, and each
  thread has one range on its way: many small ones wait for the disk one after another.
- pread, advised: each thread first asks for the ranges of its next fetch (POSIX_FADV_WILLNEED), so that the disk's
  queue is full while those of this one are copied.
- map: rows copied from the mapped file. A fault reads around itself, as far as the device's read-ahead goes
  (/sys/block/*/queue/read_ahead_kb: 128 by default, 8192 where this was measured first); after a hundred misses the
  kernel gives that up, and reads page by page.
- map, random: with MADV_RANDOM, page by page from the start.
- map, advised; map, random, advised: the ranges are asked for as above, then copied from the map.

All copy every range into a small buffer in the end, which stands for the minibatch; "cached" is the same at once
again, with all in the page cache and mapped: what the way costs where it was not needed. A fetch is a sixth of what is
taken. Before each pass the file is dropped from the page cache; that it is gone is checked. MB are 10^6 bytes. Linux
only.

The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
from ranges import WAYS, Ranges, drop, sequential, taking
from readers import device_bytes
from rivals import Figures, median, table

from zloader.common.checks import parse_size

_BLOCK_BYTES = (64 * 1843 * 2, 64 * 1843)  # genes, values
_FETCHES = 6


def _scattered(path: Path, *, take: int, blocks: bool) -> Ranges:
    """Ranges from all over a file, at places that are not aligned; none overlap."""
    rng = np.random.default_rng(0)
    parts = 1 if blocks else 64
    pair = np.array(_BLOCK_BYTES) // parts
    n = 2 * (take // int(pair.sum()))
    slot = path.stat().st_size // n
    sizes = np.tile(pair, n // 2)
    offsets = np.arange(n) * slot + rng.integers(0, slot - sizes)
    order = rng.permutation(n)
    fetches = np.linspace(0, n, _FETCHES + 1).astype(np.int64)
    return Ranges(path=path, offsets=offsets[order], sizes=sizes[order], fetches=fetches)


def _fill(path: Path, size: int) -> None:
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        for _ in range(0, size, 64 << 20):
            file.write(rng.bytes(64 << 20))
            file.flush()
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _pass(way: str, ranges: Ranges, threads: int) -> Figures:
    """One pass with nothing in the page cache, and one more with everything there."""
    drop([ranges.path])
    with taking(way, ranges, threads) as take:
        before, device = resource.getrusage(resource.RUSAGE_SELF), device_bytes()
        figures = take()
        after = resource.getrusage(resource.RUSAGE_SELF)
        return {
            **figures,
            "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            "device_bytes": device_bytes() - device,
            "useful_bytes": ranges.n_bytes,
            "cached_s": take()["seconds"],
        }


def measure(path: Path, options: argparse.Namespace) -> dict[str, list[Figures]]:
    """All ways in turns, for blocks and rows and every number of threads."""
    runs: dict[str, list[Figures]] = {}
    for turn in range(options.turns + 1):
        for threads in options.threads:
            whole = sequential(path, threads)
            cases = {f"sequential pread, {threads}": ("pread", whole)}
            for what, blocks in (("blocks", True), ("rows", False)):
                ranges = _scattered(path, take=options.take, blocks=blocks)
                cases |= {f"{what}: {way}, {threads}": (way, ranges) for way in WAYS}
            for name, (way, ranges) in cases.items():
                if turn:  # the first compiles, and takes the memory
                    figures = _pass(way, ranges, threads)
                    runs.setdefault(name, []).append(figures)
                    print(f"turn {turn}, {name}: {figures['seconds']:.2f} s", file=sys.stderr)
                elif ranges.n_bytes < options.take * 2:
                    _pass(way, _scattered(path, take=4 << 20, blocks=False), threads)
    for what in ("blocks", "rows"):
        totals = {run["total"] for name, of in runs.items() if name.startswith(what) for run in of}
        assert len(totals) == 1, f"the ways gave different bytes: {totals}"
    return runs


def lines(runs: dict[str, list[Figures]]) -> list[list[str]]:
    """The table."""
    found = [
        ["what: way, threads", "useful MB/s", "(range)", "device MB/s", "device/useful", "cpu s/GB", "cached MB/s"]
    ]
    for name, figures in runs.items():
        useful = figures[0]["useful_bytes"]
        rates = sorted(useful / run["seconds"] / 1e6 for run in figures)
        device = statistics.median(run["device_bytes"] / run["seconds"] for run in figures)
        found.append(
            [
                name,
                f"{statistics.median(rates):,.0f}",
                f"({rates[0]:,.0f} to {rates[-1]:,.0f})",
                f"{device / 1e6:,.0f}",
                f"{median(figures, 'device_bytes') / useful:.2f}",
                f"{median(figures, 'cpu_s') / useful * 1e9:.2f}",
                f"{useful / median(figures, 'cached_s') / 1e6:,.0f}",
            ]
        )
    return found


def main() -> None:
    """Measures, prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="on the disk to measure")
    parser.add_argument("--size", type=parse_size, default="4GiB", help="of the file (default: 4GiB)")
    parser.add_argument("--take", type=parse_size, default="384MiB", help="of it, in ranges (default: 384MiB)")
    parser.add_argument(
        "--threads", type=lambda text: [int(n) for n in text.split(",")], default="2,8", help="default: 2,8"
    )
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        path = Path(directory) / "ranges"
        _fill(path, options.size)
        runs = measure(path, options)
    table(lines(runs))
    print(json.dumps({"size": options.size, "take": options.take, "turns": options.turns, "runs": runs}))


if __name__ == "__main__":
    main()
