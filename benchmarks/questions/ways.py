"""Ways to read byte ranges of a file that is not in the page cache: memory-mapped, advised, or with pread.

    python -m benchmarks.questions.ways DIRECTORY [--size 4GiB] [--take 384MiB] [--threads 2,8] [--turns 3]

The script writes a file of `size` to DIRECTORY (and deletes it afterwards), and reads `take` bytes of ranges from all
over it, in random order. The ranges are those of a block of 64 rows (236 KB of genes, 118 KB of values) and of single
rows (a 64th of that), unaligned as in a mirror. The file is larger than the ranges, as an atlas is larger than a few
fetches. So bytes that are read beside the ranges are wasted, and show in the ratio of device bytes to useful bytes.
Pages have 4 KiB, so single rows cost at least 2.5 times their bytes in every way.

- sequential pread: the whole file in steps of 1 MiB.
- pread: reads into a buffer for one fetch, then copies the rows out. The kernel reads the pages of a range in one go.
  Each thread has one range in flight, so many small ranges wait for the disk one after another.
- pread, advised: each thread first requests the ranges of its next fetch (POSIX_FADV_WILLNEED), so that the disk's
  queue is full while the current ranges are copied.
- map: copies rows from the mapped file. A page fault reads its neighbourhood, up to the read-ahead of the device
  (/sys/block/*/queue/read_ahead_kb: 128 by default, 8192 on the machine of the first measurements). After a hundred
  misses, the kernel stops doing that and reads page by page.
- map, random: with MADV_RANDOM, the kernel reads page by page from the start.
- map, advised; map, random, advised: the ranges are requested as above and then copied from the map.

Every way copies each range into a small buffer in the end, which stands for the minibatch. "cached" is the speed of a
second pass, with everything in the page cache and mapped: the overhead of the way when the data is already there. A
fetch is a sixth of the ranges. Before each pass, the file is dropped from the page cache, and the script checks that it
is gone. MB are 10^6 bytes. Linux only.

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

from benchmarks.harness.measuring import Figures, median, table
from benchmarks.harness.ranges import WAYS, Ranges, drop, reading, sequential
from benchmarks.harness.readers import device_bytes
from zloader.common.checks import parse_size

_BLOCK_BYTES = (64 * 1843 * 2, 64 * 1843)  # genes, values
_FETCHES = 6


def _scattered(path: Path, *, take: int, blocks: bool) -> Ranges:
    """Unaligned ranges from all over a file, without overlap."""
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
    """Runs one pass with an empty page cache, and another with everything cached."""
    drop([ranges.path])
    with reading(way, ranges, threads) as read:
        before, device = resource.getrusage(resource.RUSAGE_SELF), device_bytes()
        figures = read()
        after = resource.getrusage(resource.RUSAGE_SELF)
        return {
            **figures,
            "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            "device_bytes": device_bytes() - device,
            "useful_bytes": ranges.n_bytes,
            "cached_s": read()["seconds"],
        }


def measure(path: Path, options: argparse.Namespace) -> dict[str, list[Figures]]:
    """Runs all ways in turns, for blocks and rows, with each number of threads."""
    runs: dict[str, list[Figures]] = {}
    for turn in range(options.turns + 1):
        for threads in options.threads:
            whole = sequential(path, threads)
            cases = {f"sequential pread, {threads}": ("pread", whole)}
            for what, blocks in (("blocks", True), ("rows", False)):
                ranges = _scattered(path, take=options.take, blocks=blocks)
                cases |= {f"{what}: {way}, {threads}": (way, ranges) for way in WAYS}
            for name, (way, ranges) in cases.items():
                if turn:  # turn 0 compiles and allocates the memory
                    figures = _pass(way, ranges, threads)
                    runs.setdefault(name, []).append(figures)
                    print(f"turn {turn}, {name}: {figures['seconds']:.2f} s", file=sys.stderr)
                elif ranges.n_bytes < options.take * 2:
                    _pass(way, _scattered(path, take=4 << 20, blocks=False), threads)
    for what in ("blocks", "rows"):
        totals = {run["total"] for name, of in runs.items() if name.startswith(what) for run in of}
        assert len(totals) == 1, f"the ways read different bytes: {totals}"
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
    parser.add_argument("directory", type=Path, help="directory on the disk to measure")
    parser.add_argument("--size", type=parse_size, default="4GiB", help="size of the file (default: 4GiB)")
    parser.add_argument("--take", type=parse_size, default="384MiB", help="bytes to read in ranges (default: 384MiB)")
    parser.add_argument(
        "--threads",
        type=lambda text: [int(n) for n in text.split(",")],
        default="2,8",
        help="numbers of threads (default: 2,8)",
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
