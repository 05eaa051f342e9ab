"""A small store: from the start of a process to its first minibatch, and the first epochs.

    python -m benchmarks.questions.small [--before CHECKOUT] [--turns 7] [--frameworks numpy,torch]

The store has the 2 142 cells that come with zloader. With `--before`, a directory with another version of zloader (such
as one that `git worktree add` makes), processes of both versions take turns, so that changes in the machine's speed
affect both alike. Each process does one of these, with dense minibatches of 64 rows and one obs column:

- first: imports zloader, opens the store without a mirror, makes a loader and takes one minibatch. The time counts from
  the start of the process. "importing" does nothing but import the framework, as the part of it that zloader cannot
  change.
- none, empty: opens the store without a mirror, or with an empty one, makes a loader, and runs two epochs. Their time
  counts from `iter()`. The store is in the page cache.

The figures are medians over the processes, with the range of the wall times, and user + system seconds. Wall times are
worth something on an idle machine only. The ratios are medians of the ratios of the turns, of user + system seconds.
The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import zloader as zl
from benchmarks.harness.measuring import Figures, median, table

_HERE = Path(__file__).parents[2]
# A string, because a version may lack this module, and an import before the clock reads would count.
_PROCESS = """
import json, os, sys, time
store, framework, way, mirror = sys.argv[1:]
if way == "importing":
    __import__(framework)
else:
    import zloader as zl
    dataset = zl.open_dataset(store, cache=mirror or None)
    loader = zl.Loader(dataset, obs=["cell_type1"], layout="dense", framework=framework)
figures = {}
if way == "first":
    next(iter(loader))
figures["at"] = time.perf_counter()
figures["cpu_s"] = sum(os.times()[:2])
for epoch in ("cold", "second") if way in ("none", "empty") else ():
    began, spent, rows = time.perf_counter(), time.process_time(), 0
    for minibatch in loader:
        rows += len(minibatch)
    assert rows == dataset.n_obs
    figures[epoch] = {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - spent}
print(json.dumps(figures), flush=True)
os._exit(0)
"""


def process(version: Path, store: Path, framework: str, way: str, work: Path) -> dict[str, Figures]:
    """The figures of one new process, by what was timed."""
    with tempfile.TemporaryDirectory(dir=work) as mirror:
        arguments = [str(store), framework, way, mirror if way == "empty" else ""]
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", _PROCESS, *arguments],
            env={**os.environ, "PYTHONPATH": str(version)},
            cwd=work,
            stdout=subprocess.PIPE,
            check=True,
        )
    figures = json.loads(done.stdout)
    if way in ("none", "empty"):
        return {f"{epoch} epoch, {way}": figures[epoch] for epoch in ("cold", "second")}
    return {way: {"seconds": figures["at"] - began, "cpu_s": figures["cpu_s"]}}


def measure(versions: Sequence[Path], options: argparse.Namespace, work: Path) -> dict[str, list[list[Figures]]]:
    """The figures of each version, in the order of the turns, by what was timed."""
    store = work / "small.zarr"
    zl.convert(zl.example_h5ad(work / "small.h5ad"), store, progress=False)
    found: dict[str, list[list[Figures]]] = {}
    # In turn 0 compiled loops and bytecode may be written to disk: it is not counted.
    for turn, framework in itertools.product(range(options.turns + 1), options.frameworks):
        for way in ("importing", "first", "none", "empty"):
            order = list(enumerate(versions))
            for number, version in order if turn % 2 else order[::-1]:
                for timed, figures in process(version, store, framework, way, work).items():
                    if turn:
                        of_versions = found.setdefault(f"{framework}, {timed}", [[] for _ in versions])
                        of_versions[number].append(figures)
    return found


def cells(runs: Sequence[Figures]) -> list[str]:
    """The wall time with its range, and the processor time, in milliseconds."""
    wall = [1e3 * run["seconds"] for run in runs]
    return [f"{statistics.median(wall):.0f} ({min(wall):.0f} to {max(wall):.0f})", f"{1e3 * median(runs, 'cpu_s'):.0f}"]


def lines(found: dict[str, list[list[Figures]]], n_versions: int) -> list[list[str]]:
    """A line for each thing that was timed."""
    names = ["before", "now"][-n_versions:]
    heads = [
        "",
        *(f"{name}: {unit}" for name in names for unit in ("ms", "CPU ms")),
        *["CPU, now : before"][: n_versions - 1],
    ]
    made = [heads]
    for timed, of_versions in found.items():
        line = [timed, *itertools.chain.from_iterable(map(cells, of_versions))]
        if n_versions == 2:
            pairs = zip(*of_versions, strict=True)
            line.append(f"{statistics.median(now['cpu_s'] / before['cpu_s'] for before, now in pairs):.2f}")
        made.append(line)
    return made


def main() -> None:
    """Measures, prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="another version of zloader, to compare with")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--frameworks", default="numpy,torch", help="numpy, torch or both")
    options = parser.parse_args()
    options.frameworks = options.frameworks.split(",")
    versions = [*([options.before.absolute()] if options.before else []), _HERE]
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as work:
        found = measure(versions, options, Path(work))
    table(lines(found, len(versions)))
    print(json.dumps({"cores": len(os.sched_getaffinity(0)), "load": [load, os.getloadavg()[0]], "runs": found}))


if __name__ == "__main__":
    main()
