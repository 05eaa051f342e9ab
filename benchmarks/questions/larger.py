"""Larger than memory: epochs of zloader and other tools over a store, and mirrors, that do not fit into memory.

    python -m benchmarks.questions.larger FILE.h5ad --work DIRECTORY [--copies 20] [--memory 1.6GB] [--turns 3]

FILE.h5ad, such as one of data/synthetic.py, is converted `--copies` times, one copy after another, into one store of
zloader; annbatch converts it once, and the datasets of its collection are copied. With 20 copies of 100 000 cells the
store has 5 GB, its raw mirror 14 GB, and all together need 35 GB of disk. `--keep` leaves the stores for the next
run; mirrors are always made anew.

Every process runs in a memory cgroup of its own of `--memory` bytes, which count its pages, its workers' and all that
they put into the page cache. This needs root and the memory controller of cgroups; without it the program ends at once.
Before a process starts, all files that it will read are dropped from the page cache. It opens the store and takes one
minibatch. Then it begins an epoch, of which the minibatches that come within `--seconds` after the first one count,
with the time until the last of them. Each case has a new process in each turn, and the sides take turns, every other
turn in reverse order. A side that failed, such as one that needs more memory, is left out of later turns.

The sides:

- zloader, no mirror: every epoch reads the store, as the first one does.
- zloader, raw, compact: a warm epoch, from a full and verified mirror of that form. It is filled by one
  epoch of the whole store under the same limit ("filling"), which is measured, too. Mirrors of one form are deleted
  before the next form is filled.
- annbatch: its own shuffled collection, with chunks as large as the blocks, and with chunks of 512 rows.
- annbatch, scDataset, of zloader's store: the same files that "zloader, no mirror" reads. scDataset has a worker per
  core, as its quick start has it, or none.

All use minibatches of 64, fetches of `--fetch-rows` rows and one obs column. Blocks of 64 rows and single rows
(`--blocks 64,1`) are the two orders.

"read" is what the kernel read from the disk for the process and its ended workers (/proc/self/io), which includes what
was read ahead for minibatches after the last that counts. "disk" is that rate as a share of what the disk gave to
random reads of 256 KiB by eight threads in the same turn. The disk is measured in a cgroup of the same size: reads from
start to end, and random reads of 256 and 8 KiB, of the largest file of the mirror. MB are 10^6 bytes. The last line is
one JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import zloader as zl
from benchmarks.compare import rivals
from benchmarks.harness import ranges
from benchmarks.harness.cgroups import Cgroup, cgroup
from benchmarks.harness.measuring import Figures, importing, last_lines, program, table
from benchmarks.harness.readers import device_bytes
from benchmarks.harness.sides import ReaderFailed, StoreLocation, median_and_range, reader, rows_per_s
from zloader.common.checks import parse_size

_DISK = "disk"
_FORMS = ("raw", "compact")
_DEADLINE_S = 75.0  # for a process that answers nothing
_PROBED = 1 << 30  # bytes, at most, that a probe of the disk reads
_PROBES = {  # name: bytes of a read, whether at random, and threads
    "sequential 1 MiB, 2 threads": (1 << 20, False, 2),
    "random 256 KiB, 2 threads": (256 << 10, True, 2),
    "random 256 KiB, 8 threads": (256 << 10, True, 8),
    "random 8 KiB, 2 threads": (8 << 10, True, 2),
    "random 8 KiB, 8 threads": (8 << 10, True, 8),
}
_REFERENCE = "random 256 KiB, 8 threads"
_COLUMNS = ("cells/s", "(range)", "read MB/s", "disk", "read KB/cell", "CPU s/100k", "peak MB", "first s")


@dataclass(frozen=True, kw_only=True)
class Side:
    """One way of reading the cells. `files` is the directory with what it reads."""

    tool: str
    python: Path
    store: Path
    files: Path
    options: Figures = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all processes share."""

    work: Path
    memory: int
    column: str
    fetch_rows: int
    seconds: float

    @contextlib.contextmanager
    def limited(self) -> Iterator[Cgroup]:
        """A cgroup with the limit. Raises OSError."""
        with cgroup() as group:
            group.limit(self.memory)
            yield group

    def epoch(self, side: Side, block: int, *, whole: bool = False) -> Figures:
        """An epoch of a new process, or the part of it that is ready in time."""
        asked = {"chunk_size": block, "preload_nchunks": self.fetch_rows // block, "obs": self.column}
        options = {**asked, "workers": len(os.sched_getaffinity(0)), **side.options}
        drop(side.files)
        location = StoreLocation(store=side.store, url=str(side.store))
        deadline_s = None if whole else _DEADLINE_S
        with (
            self.limited() as group,
            reader(side.tool, side.python, location, options, self.work, deadline_s=deadline_s) as one,
        ):
            group.add(one.process.pid)
            if whole:
                return one.ask()
            one.ask(rows=1)
            return one.ask(most_s=self.seconds)

    def disk(self, path: Path) -> Figures:
        """MB/s of each probe of the disk, by reading a file."""
        with self.limited() as group:
            command = program("questions.larger", path, "--probe")
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=importing()) as process:
                group.add(process.pid)
                output, _ = process.communicate(b"go\n")
        return dict(json.loads(output))


# ---- the disk


def probe(path: Path) -> Figures:
    """MB/s that the kernel reads from the disk, for each way of reading a file."""
    found, rng = {}, np.random.default_rng()
    for name, (n_bytes, at_random, threads) in [next(iter(_PROBES.items())), *_PROBES.items()]:  # the first compiles
        drop(path)
        n_all = path.stat().st_size // n_bytes
        starts = rng.permutation(n_all) if at_random else np.arange(n_all)
        starts = starts[: min(_PROBED, int(2e4 * n_bytes)) // n_bytes] * n_bytes
        sizes = np.full(len(starts), n_bytes, np.int64)
        fetches = np.append(np.arange(0, len(starts), 32 * threads), len(starts))
        whole = ranges.Ranges(path=path, offsets=starts, sizes=sizes, fetches=fetches)
        with ranges.reading("pread", whole, threads) as read:
            before = device_bytes()
            seconds = read()["seconds"]
            found[name] = (device_bytes() - before) / seconds / 1e6
    return found


def drop(path: Path) -> None:
    """Drops a file, or all files of a directory, from the page cache."""
    for each in [path, *path.rglob("*")]:
        if each.is_file():
            with each.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# ---- stores


def annbatch_store(source: Path, store: Path, copies: int, python: Path, work: Path) -> Path:
    """The collection that annbatch makes of a file, with so many copies of its only dataset."""
    if not store.exists():
        command = program("compare.rivals", "write", "annbatch-shuffled-zarrs", source, store, python=python)
        subprocess.run(command, check=True, env=importing(TMPDIR=str(work)), stdout=sys.stderr)
        (first,) = store.glob("dataset_*")
        for number in range(1, copies):
            shutil.copytree(first, store / f"dataset_{number}")
    return store


def others(options: argparse.Namespace, ours: Path) -> dict[str, Side]:
    """The sides of other tools. One that cannot be installed is named and left out."""
    found = {}
    for tool in ("annbatch", "scdataset"):
        try:
            python = rivals.environment(tool, directory=options.environments, constrain=options.constrain)
        except rivals.EnvironmentFailed as error:
            print(error, file=sys.stderr)
            continue
        if tool == "annbatch":
            own = annbatch_store(
                options.source, options.work / "annbatch.zarr", options.copies, python, work=options.work
            )
            chunks = {"chunk_size": 512, "preload_nchunks": options.fetch_rows // 512}
            found["annbatch"] = Side(tool=tool, python=python, store=own, files=own)
            found["annbatch, chunks of 512"] = Side(tool=tool, python=python, store=own, files=own, options=chunks)
        found[f"{tool}, zloader's store"] = Side(tool=tool, python=python, store=ours, files=ours)
        if tool == "scdataset":
            alone = Side(tool=tool, python=python, store=ours, files=ours, options={"workers": 0})
            found["scdataset, zloader's store, no workers"] = alone
    return found


# ---- turns


def attempt(bench: Bench, side: Side, block: int, label: str) -> Figures | None:
    """The figures of one epoch, or None if it failed."""
    try:
        figures = bench.epoch(side, block)
    except ReaderFailed as error:
        print(f"{label} failed: {last_lines(str(error))}", file=sys.stderr)
        return None
    rates = f"{rows_per_s(figures):,.0f} cells/s, {figures['device_bytes'] / figures['seconds'] / 1e6:,.0f} MB/s"
    print(f"{label}: {rates}", file=sys.stderr)
    return figures


def turns(
    bench: Bench, sides: Mapping[str, Side], probed: Path, options: argparse.Namespace
) -> tuple[dict[str, list[Figures]], list[Figures]]:
    """The figures of every side and block, and those of the disk, with one more for each turn."""
    runs: dict[str, list[Figures]] = {}
    disks, left_out = [], set[str]()
    for turn in range(options.turns):
        disks.append(bench.disk(probed))
        print(f"turn {turn + 1}: {disks[-1]}", file=sys.stderr)
        for block in options.blocks:
            for name in list(sides)[:: -1 if turn % 2 else 1]:
                label = f"blocks of {block}: {name}"
                if label in left_out or (block == 1 and "512" in name):
                    continue
                figures = attempt(bench, sides[name], block, f"turn {turn + 1}, {label}")
                if figures is None:
                    left_out.add(label)
                else:
                    runs.setdefault(label, []).append({**figures, _DISK: disks[-1][_REFERENCE]})
    return runs, disks


def line(name: str, figures: Sequence[Figures]) -> list[str]:
    """The line of the table for one side."""

    def median(of: str) -> float:
        return statistics.median(shown(run)[of] for run in figures)

    numbers = [f"{median('read'):,.0f}", f"{median('share'):.2f}", f"{median('bytes') / 1e3:.1f}"]
    numbers += [f"{median('cpu'):.2f}", f"{median('peak'):,.0f}", f"{median('first'):.1f}"]
    return [name, *median_and_range(list(map(rows_per_s, figures)), "{:,.0f}"), *numbers]


def shown(run: Figures) -> Figures:
    """What the table shows of one epoch."""
    read = run["device_bytes"] / run["seconds"] / 1e6
    return {
        "read": read,
        "share": read / run[_DISK],
        "bytes": run["device_bytes"] / run["rows"],
        "cpu": (run["user_s"] + run["system_s"]) / run["rows"] * 1e5,
        "peak": (run["peak_bytes"] + run["workers_bytes"]) / 1e6,
        "first": run["first_minibatch_s"],
    }


def measure(bench: Bench, options: argparse.Namespace) -> tuple[dict[str, list[Figures]], list[Figures]]:
    """Makes the stores, and then the mirror of one form after another with its turns."""
    ours, runs, disks = options.work / "zloader.zarr", dict[str, list[Figures]](), list[Figures]()
    mirror, python = options.work / "mirror", Path(sys.executable)
    cold = {"zloader, no mirror": Side(tool="zloader", python=python, store=ours, files=ours)}
    rest = cold | others(options, ours)
    for form in options.forms:
        asked = {"mirror": str(mirror), "form": form}
        side = Side(tool="zloader", python=python, store=ours, files=mirror, options=asked)
        try:
            drop(ours)
            filling = bench.epoch(side, options.blocks[0], whole=True)
            print(f"filled {form}: {rows_per_s(filling):,.0f} cells/s", file=sys.stderr)
            probed = max(mirror.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
            found, disk = turns(bench, {f"zloader, {form}": side, **rest}, probed, options)
        finally:
            shutil.rmtree(mirror, ignore_errors=True)
        rest = {}
        reference = statistics.median(one[_REFERENCE] for one in disk)
        runs |= {f"filling {form}": [{**filling, _DISK: reference}], **found}
        disks += disk
    return runs, disks


def main() -> None:
    """Measures, prints tables and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="an uncompressed .h5ad file")
    parser.add_argument("--work", type=Path, help="directory on the disk to measure")
    parser.add_argument("--copies", type=int, default=20)
    parser.add_argument("--memory", type=parse_size, default="1.6GB", help="limit of each process (default: 1.6GB)")
    parser.add_argument("--seconds", type=float, default=12.0, help="of an epoch that count (default: 12)")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--blocks", type=lambda text: [int(n) for n in text.split(",")], default="64,1")
    parser.add_argument("--fetch-rows", type=int, default=16_384)
    parser.add_argument("--forms", type=lambda text: text.split(","), default=",".join(_FORMS))
    parser.add_argument("--keep", action="store_true", help="leave the stores in the directory")
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    rivals.add_options(parser)
    options = parser.parse_args()
    if options.probe:
        sys.stdin.readline()  # the process is in its cgroup
        print(json.dumps(probe(options.source)))
        return
    try:
        with cgroup():
            pass
    except OSError as error:
        sys.exit(f"this needs a memory cgroup, and none can be made here (as root?): {error}")
    options.work.mkdir(parents=True, exist_ok=True)
    options.work = options.work.absolute()
    ours = options.work / "zloader.zarr"
    if not ours.exists():
        zl.convert([options.source] * options.copies, ours, progress=False)
    dataset = zl.open_dataset(ours)
    bench = Bench(
        work=options.work,
        memory=options.memory,
        column=dataset.obs_columns[0],
        fetch_rows=options.fetch_rows,
        seconds=options.seconds,
    )
    runs, disks = measure(bench, options)
    if not options.keep:
        for name in ("zloader.zarr", "annbatch.zarr"):
            shutil.rmtree(options.work / name, ignore_errors=True)
    table([["", *_COLUMNS], *(line(name, figures) for name, figures in runs.items())])
    table([["disk", "MB/s", "(range)"], *([n, *median_and_range([d[n] for d in disks], "{:,.0f}")] for n in _PROBES)])
    settings = {"memory": options.memory, "rows": dataset.n_obs, "fetch_rows": options.fetch_rows}
    print(json.dumps({**settings, "seconds": options.seconds, "disks": disks, "runs": runs}))


if __name__ == "__main__":
    main()
