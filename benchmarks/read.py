"""Reading side by side: zloader and annbatch, epoch by epoch in turns; and zloader's own store against its targets.

    python benchmarks/read.py STORE ANNBATCH_STORE [--epochs 5] [--cloud] [--shapes 512x32,64x256,32x512]
    python benchmarks/read.py STORE --own [--epochs 5] [--cloud]

STORE is zloader's, ANNBATCH_STORE annbatch's collection of the same rows; for example

    python benchmarks/synthetic.py tahoe.h5ad --rows 100000 && zloader convert tahoe.h5ad atlas/tahoe.zarr
    $(python benchmarks/rivals.py make annbatch) benchmarks/rivals.py write annbatch-shuffled-zarrs \\
        tahoe.h5ad atlas/annbatch.zarr

Each side is a process of its own (readers.py says how it is set up and what it gives) that idles while another has its
turn: zloader and annbatch from annbatch's store, zloader from its own, without a mirror, so that every epoch is cold.
The store is read through before each, to be in the page cache; one epoch is thrown away. A shape is annbatch's
chunk_size x preload_nchunks; zloader takes blocks of chunk_size rows and as many of them a fetch. The last columns say
how many times as quick a side is: the median of the turns' ratios, and their range. Memory is the peak of the resident
set; zloader's process holds torch, annbatch's not.

annbatch allocates every load anew, 100 MB at a time, and a virtual machine may have to get such memory from its host
first (see rivals.touch), the more so the more others take. zloader keeps freed memory (FetchOptions.tune_malloc);
"memory kept" is annbatch with glibc told to do the same, which its documentation does not ask for.

With --cloud all are behind a simulated S3 (epochs.py has its speed), one a store; GETs and MB are its own count of an
epoch, all requests included. A store's folder serves as the bucket. zloader then also reads annbatch's store into an
empty mirror, from opening it on.

--own measures, from STORE in the cloud or on disk, blocks of 64 rows in fetches of 16 384:

- decode, cold and filling epochs (as epochs.py has them) in turns; the filling one starts with opening the store, and
  its bytes over the link's limit are the share of the link it used, from opening to its end. Its GETs and bytes stand
  beside those that the plan says (zloader.cost).
- a filling epoch for a consumer that takes 3 ms a minibatch: what it waits after the first fetch.
- three epochs of one loader for a consumer that stalls for 3 s, three times each: peak memory above what the process
  held before, beside what FetchOptions allow: in_flight_bytes + ready_bytes + (prefetch + 1) decoded fetches, counted
  as the values of their rows, and as the whole chunks that these lie in.

The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rivals
from epochs import CLOUD, chunk_bytes, decode_seconds, served
from rivals import Figures, median, ratio, table

import zloader as zl
from zloader.dataset.cost import EpochCost, epoch_costs
from zloader.storage.layout import chunks_of

SHAPES = "512x32,64x256,32x512"
OWN_SHAPE = (64, 256)
WORK_S = 0.003
STALL_S, STALLS = 3.0, (100, 700, 1300)
STALLED_EPOCHS = 3
_LINK = float(CLOUD["--total-mbps"]) * 1e6
_TOUCHED = 4 << 30
_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a store is read from: a path, or a simulated S3 of its own."""

    store: Path
    url: str
    storage_options: Figures | None

    def options(self) -> Figures:
        """What a reader is told of it."""
        return {"store": self.url} | ({"storage_options": self.storage_options} if self.storage_options else {})

    def counted(self, epoch: Callable[[], Figures]) -> Figures:
        """The figures of an epoch of a store in the page cache, with what the server counted meanwhile."""
        for path in self.store.rglob("*"):
            if path.is_file():
                rivals.read_through(path)
        if not self.storage_options:
            return epoch()
        self._ask("reset", method="POST")
        figures = epoch()
        counts = self._ask("stats")
        requests = {"requests": counts["requests"], "served_bytes": counts["bytes_out"]}
        return {**figures, **requests, "most_at_once": counts["peak_active"]}

    def _ask(self, what: str, method: str = "GET") -> Figures:
        assert self.storage_options
        request = urllib.request.Request(f"{self.storage_options['endpoint_url']}/__sim/{what}", method=method)
        with urllib.request.urlopen(request) as answer:
            return dict(json.load(answer))


@contextlib.contextmanager
def place(store: Path, *, cloud: bool) -> Iterator[Place]:
    """A store as the readers find it."""
    if not cloud:
        yield Place(store=store, url=str(store.absolute()), storage_options=None)
        return
    with served(store) as (url, storage_options):
        yield Place(store=store, url=url, storage_options=storage_options)


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A process of readers.py that reads one store."""

    place: Place
    process: subprocess.Popen[str]
    errors: Path

    def epoch(self, **request: Any) -> Figures:
        """Has it go through one epoch, with the place's files in the page cache."""
        return self.place.counted(lambda: self.ask(**request))

    def ask(self, **request: Any) -> Figures:
        """Has it go through one epoch, with the page cache as it is."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            self.process.wait()  # it says why last
            sys.exit(f"the process of {self.place.url} ended:\n{self.errors.read_text()[-4000:]}")
        return dict(json.loads(answer))


@contextlib.contextmanager
def reader(name: str, python: str | Path, source: Place, options: Figures, work: Path) -> Iterator[Reader]:
    """Starts one, and ends it; its name begins with what reads."""
    what = name.split(",")[0]
    errors = work / f"{what}.txt"
    env = os.environ | (KEPT if "kept" in name else {})
    command = [python, _HERE / "readers.py", what, json.dumps({**source.options(), **options})]
    with (
        errors.open("a") as stderr,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=work, env=env
        ) as process,
    ):
        try:
            yield Reader(place=source, process=process, errors=errors)
        finally:
            process.terminate()


# ---- side by side

COLUMNS = ("rows/s", "(range)", "first s", "user s", "system s", "peak MB", "GETs", "MB")
RIVALS = ("annbatch", "annbatch, memory kept")
KEPT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TOP_PAD_": str(64 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
}


def side_by_side(options: argparse.Namespace, work: Path) -> Figures:
    """Runs the turns of every shape; prints the table."""
    annbatch = rivals.environment("annbatch", python=options.python, directory=options.environments)
    rows, column = described(options.store)
    runs: dict[str, dict[str, list[Figures]]] = {}
    lines = [["", *COLUMNS, *(cell for name in RIVALS for cell in (f"x {name}", "(range)"))]]
    for chunk_size, preload_nchunks in options.shapes:
        asked = {"chunk_size": chunk_size, "preload_nchunks": preload_nchunks, "obs": column}
        with contextlib.ExitStack() as stack:
            theirs = stack.enter_context(place(options.annbatch_store, cloud=options.cloud))
            ours = stack.enter_context(place(options.store, cloud=options.cloud))
            sides: dict[str, tuple[str | Path, Place]] = dict.fromkeys(RIVALS, (annbatch, theirs))
            sides |= {"zloader": (sys.executable, theirs), "zloader, own store": (sys.executable, ours)}
            readers = {
                name: stack.enter_context(reader(name, python, source, asked, work))
                for name, (python, source) in sides.items()
            }
            epochs: dict[str, Callable[[], Figures]] = {name: one.epoch for name, one in readers.items()}
            if options.cloud:
                epochs["zloader, empty mirror"] = functools.partial(filling_epoch, readers["zloader"], work)
            shape = f"{chunk_size} x {preload_nchunks}"
            runs[shape] = in_turns(epochs, options.epochs, rows=rows, what=shape)
        lines += [[f"{shape}, {name}", *cells(runs[shape], name)] for name in runs[shape]]
    table(lines)
    return {"rows": rows, "runs": runs}


def filling_epoch(reader: Reader, work: Path, **request: Any) -> Figures:
    """An epoch into a mirror that is empty before it, and gone after it."""
    mirror = work / "mirror"
    try:
        return reader.epoch(mirror=str(mirror), **request)
    finally:
        shutil.rmtree(mirror, ignore_errors=True)


def in_turns(
    sides: Mapping[str, Callable[[], Figures]], epochs: int, *, rows: int | None, what: str
) -> dict[str, list[Figures]]:
    """Figures of each side's epochs, one thrown away; every other turn goes backwards.

    `rows` is what each epoch must have, None where they differ.
    """
    for side in sides.values():
        side()
    runs: dict[str, list[Figures]] = {name: [] for name in sides}
    for turn in range(epochs):
        for name in list(sides)[:: -1 if turn % 2 else 1]:
            figures = sides[name]()
            assert rows in (None, figures.get("rows", rows)), f"{name} gave {figures['rows']} rows of {rows}"
            runs[name].append(figures)
        said = ", ".join(f"{name} {runs[name][-1]['seconds']:.2f} s" for name in sides)
        print(f"{what}, turn {turn + 1}: {said}", file=sys.stderr)
    return runs


def cells(runs: Mapping[str, Sequence[Figures]], name: str) -> list[str]:
    """The cells of one side: those below COLUMNS, and how many times as quick as each rival it is."""
    ours = runs[name]
    counted = "requests" in ours[0]
    found = [
        *ranged(list(map(rows_per_s, ours)), "{:,.0f}"),
        *(f"{median(ours, key):.2f}" for key in ("first_minibatch_s", "user_s", "system_s")),
        f"{max(run['peak_bytes'] for run in ours) / 1e6:,.0f}",
        f"{median(ours, 'requests'):,.0f}" if counted else "",
        f"{median(ours, 'served_bytes') / 1e6:,.0f}" if counted else "",
    ]
    for theirs in (runs[rival] for rival in RIVALS if rival in runs):
        found += ranged(as_quick(ours, theirs), "{:.2f}")
    return found


def rows_per_s(run: Figures) -> float:
    """Rows/s."""
    return float(run["rows"] / run["seconds"])


def as_quick(ours: Sequence[Figures], theirs: Sequence[Figures]) -> list[float]:
    """How many times as quick, turn by turn."""
    return [rows_per_s(a) / rows_per_s(b) for a, b in zip(ours, theirs, strict=True)]


def ranged(values: Sequence[float], form: str) -> list[str]:
    """Two cells: the median and the range."""
    return [form.format(statistics.median(values)), f"({form.format(min(values))} to {form.format(max(values))})"]


def described(store: Path) -> tuple[int, str]:
    """Rows, and the obs column that all take: the first."""
    dataset = zl.open_dataset(store)
    return dataset.n_obs, dataset.obs_columns[0]


# ---- the own store


def own(options: argparse.Namespace, work: Path) -> Figures:
    """Runs everything of --own; prints a line for each figure."""
    chunk_size, preload_nchunks = OWN_SHAPE
    rows, column = described(options.store)
    asked = {"chunk_size": chunk_size, "preload_nchunks": preload_nchunks, "obs": column}
    loader = zl.Loader(zl.open_dataset(options.store), sampling=zl.BlockShuffling(chunk_size), obs=[column])
    stored = {layout.path: chunk_bytes(options.store, layout) for layout in loader.dataset.matrix().arrays}
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(place(options.store, cloud=options.cloud))
        start = [sys.executable, source, asked, work]
        plain, filling, stalled = (stack.enter_context(reader("zloader", *start)) for _ in range(3))

        def filled(**request: Any) -> Figures:
            rivals.touch(_TOUCHED)
            return filling_epoch(filling, work, **request)

        sides = {
            "decode": lambda: {"seconds": decode_seconds(loader, stored)},
            "cold": plain.epoch,
            "filling": filled,
            "filling, 3 ms": lambda: filled(work_s=WORK_S),
        }
        runs = in_turns(sides, options.epochs, rows=rows, what="own")
        runs["stalled"] = [stalled.epoch(stalls=STALLS, stall_s=STALL_S) for _ in range(STALLED_EPOCHS)]
    allowed = allowed_bytes(loader)
    speeds(runs, rows)
    waits(runs)
    spent = max(run["peak_bytes"] for run in runs["stalled"]) - runs["stalled"][0]["before_bytes"]
    print(
        f"stalled: {spent / 1e6:,.0f} MB at the peak of three epochs, allowed are {allowed[0] / 1e6:,.0f} MB, "
        f"with whole chunks {allowed[1] / 1e6:,.0f}"
    )
    for name, which in (("cold", "unmirrored"), ("filling", "first_mirrored")):
        first = runs[name][0]
        reads(name, first, getattr(epoch_costs(loader.dataset, loader.plan(first["epoch"])), which))
    return {"rows": rows, "allowed_bytes": allowed, "runs": runs}


def speeds(runs: Mapping[str, Sequence[Figures]], rows: int) -> None:
    """Prints rows/s, beside the limits of decoding and of the link."""
    for name in ("decode", "cold", "filling"):
        figures = runs[name]
        rate = rows / median(figures, "seconds")
        line = f"{name:8} {rate:9,.0f} rows/s, {ratio(runs['decode'], figures, 'seconds'):.2f} of decode"
        if "requests" in figures[0]:
            share = statistics.median(run["served_bytes"] / run["seconds"] / _LINK for run in figures)
            line += f", {share:.0%} of the link"
        if name != "decode":
            line += f", {max(run['peak_bytes'] for run in figures) / 1e6:,.0f} MB at the peak"
        print(line)


def waits(runs: Mapping[str, Sequence[Figures]]) -> None:
    """Prints what the consumer waits: for the first minibatch, and after the first fetch."""
    firsts = [run["first_minibatch_s"] for run in runs["filling"]]
    print(
        f"first minibatch: {statistics.median(firsts):.2f} s after opening began (at most {max(firsts):.2f}), "
        f"of which opening {median(runs['filling'], 'opened_s'):.2f}"
    )
    shares = [run["waited_s"] / run["after_s"] for run in runs["filling, 3 ms"]]
    print(f"3 ms a minibatch: waits {statistics.median(shares):.1%} after the first fetch (at most {max(shares):.1%})")


def reads(name: str, run: Figures, planned: EpochCost) -> None:
    """Prints GETs and bytes of an epoch, beside what its plan says and what the server counted."""
    line = f"{name}: {run['gets']:,} GETs, {run['bytes_read'] / 1e6:,.1f} MB"
    line += f"; planned {planned.gets:,}, {planned.bytes_read / 1e6:,.1f} MB"
    if "requests" in run:
        line += f"; the server's count, metadata included: {run['requests']:,}, {run['served_bytes'] / 1e6:,.1f} MB"
    print(line)


def allowed_bytes(loader: zl.Loader) -> tuple[int, int]:
    """What FetchOptions say the loader may hold, decoded fetches counted as their rows' values and as whole chunks."""
    dataset, options = loader.dataset, loader.options
    matrix, plan = dataset.matrix(), loader.plan(0)
    indptr = dataset.indptr(matrix)
    values, chunks = 0, 0
    for number in range(plan.n_fetches):
        starts, stops = matrix.elements_of(plan.fetch(number).rows, indptr)
        values = max(values, sum(int((stops - starts).sum()) * layout.dtype.itemsize for layout in matrix.arrays))
        chunks = max(
            chunks,
            sum(
                len(chunks_of(starts, stops, layout.chunk_elements)) * layout.chunk_elements * layout.dtype.itemsize
                for layout in matrix.arrays
            ),
        )
    fixed = options.in_flight_bytes + options.ready_bytes
    return fixed + (options.prefetch + 1) * values, fixed + (options.prefetch + 1) * chunks


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """`512x32,64x256` as pairs."""
    return [(int(a), int(b)) for a, b in (shape.split("x") for shape in text.split(","))]


def main() -> None:
    """Measures, prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("annbatch_store", type=Path, nargs="?")
    parser.add_argument("--own", action="store_true", help="the own store against its targets")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--cloud", action="store_true", help="through a simulated S3")
    parser.add_argument("--shapes", type=parse_shapes, default=SHAPES, help=f"default: {SHAPES}")
    parser.add_argument("--work", type=Path, help="directory for the mirrors (default: a temporary one)")
    rivals.add_options(parser)
    options = parser.parse_args()
    if not options.own and options.annbatch_store is None:
        parser.error("give annbatch's store, or --own")
    with tempfile.TemporaryDirectory(dir=options.work) as directory:
        figures = (own if options.own else side_by_side)(options, Path(directory))
    print(json.dumps({"cores": len(os.sched_getaffinity(0)), "cloud": options.cloud, **figures}))


if __name__ == "__main__":
    main()
