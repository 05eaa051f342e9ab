"""The cost of many rows per process: opening, the first minibatch and memory, for a store of a billion rows.

    python -m benchmarks.questions.wide DIRECTORY [--rows 1000000000] [--processes 3] [--turns 3] [--keep]

`wide_store.py` writes the store to DIRECTORY/wide.zarr, unless it is there already, and says which of it is real.
Without --keep, the store and its mirror are deleted afterwards. `wide_operations.py` measures views, splits, samplings
and commands on the same store.

The first process begins with an empty mirror. Its first minibatch reads and mirrors the row offsets, the values and the
obs codes of one fetch. Then further processes start one after another, and all stay alive. Each one imports
zloader and torch, opens the store (open_dataset and Loader), takes the first minibatch of an epoch (64 rows, blocks of
64 in fetches of 16 384, three obs columns), checks its values, and idles in that epoch. With --minibatches N, the first
process goes on to the N-th minibatch, and its memory is read again. Everything is in the page cache.

Memory figures are those of /proc. RSS counts every mapped page that a process has touched, including shared pages. PSS
divides shared pages by the number of processes that share them, including any other process on the machine that has
torch loaded; it is read once all processes are running. File pages (RssFile: the mirror and torch's libraries) belong
to the page cache and exist once for all processes. The rest is the memory that a process adds to the machine, "own":
RssAnon, RssShmem and its page tables (VmPTE), which grow with the mapped memory. "imports" is the own memory before the
store is opened: Python, torch, anndata and numba, which separately started processes do not share. "CPU s" is processor
time, which other work on the machine changes less. MB are 10^6 bytes. Linux only.

Targets: opening takes 2 s, the first minibatch 5 s more, 1 GB RSS per process, and every process after the first adds
at most 50 MB to the machine beyond its imports. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data.wide_store import codes_of, lengths, values_of, write
from benchmarks.harness.measuring import Figures, median, program, table

COLUMNS = (
    "open s",
    "CPU s",
    "first minibatch s",
    "CPU s",
    "RSS MB",
    "RssFile",
    "PSS",
    "own",
    "imports",
    "own above imports",
)
TARGETS = {"opened_s": 2.0, "first_s": 5.0, "rss": 1e9, "further": 50e6}
OBS = ["plate", "drug", "cell_line"]


# ---- one process


def process(store: str, cache: str, n_minibatches: int) -> None:
    """Takes the first minibatch, prints the figures and idles until standard input ends."""
    import torch  # noqa: F401, of which zloader would only load what a Loader needs

    import zloader as zl
    from zloader.common.compiled import load_compiler

    load_compiler()
    imported = memory(os.getpid())
    began, cpu = time.perf_counter(), [time.process_time()]
    dataset = zl.open_dataset(store, cache=cache)
    loader = zl.Loader(dataset, batch_size=64, fetch_factor=256, sampling=zl.BlockShuffling(64), obs=OBS)
    opened = time.perf_counter()
    cpu.append(time.process_time())
    minibatches = iter(loader)
    minibatch = next(minibatches)
    first = time.perf_counter()
    cpu.append(time.process_time())
    figures = {"opened_s": opened - began, "first_s": first - opened, "imported": imported, **memory(os.getpid())}
    figures |= {"opened_cpu_s": cpu[1] - cpu[0], "first_cpu_s": cpu[2] - cpu[1]}
    _check(minibatch, dataset.n_obs)
    if n_minibatches > 1:
        *_, last = itertools.islice(minibatches, n_minibatches - 1)
        _check(last, dataset.n_obs)
        later = memory(os.getpid())
        rows_per_s = 64 * (n_minibatches - 1) / (time.perf_counter() - first)
        figures |= {"later": later, "page_tables": later["VmPTE"], "rows_per_s": rows_per_s}
    print(json.dumps(figures), flush=True)
    sys.stdin.read()


def _check(minibatch: Any, n_rows: int) -> None:
    row, of_row = minibatch.index.numpy(), lengths()
    for name, codes in codes_of(row, n_rows).items():
        np.testing.assert_array_equal(minibatch.obs[name].numpy(), codes)
    wanted = [values_of(number, of_row) for number in row.tolist()]
    np.testing.assert_array_equal(minibatch.x.col_indices().numpy(), np.concatenate([genes for genes, _ in wanted]))
    np.testing.assert_array_equal(minibatch.x.values().numpy(), np.concatenate([values for _, values in wanted]))


def memory(pid: int) -> Figures:
    """Resident bytes of a process, by kind."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("VmRSS", "RssAnon", "RssFile", "RssShmem", "VmPTE"):
            found[name] = int(rest.split()[0]) * 1024
    return {**found, "own": found["RssAnon"] + found["RssShmem"] + found["VmPTE"]}


def pss_bytes(pid: int) -> int:
    """PSS of a process, in bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) * 1024


# ---- several processes


def turn(store: Path, cache: Path, processes: int, n_minibatches: int = 1) -> list[Figures]:
    """Starts the processes one after another and keeps them alive. Returns the figures of each."""
    found: list[Figures] = []
    with contextlib.ExitStack() as stack:
        running: list[subprocess.Popen[str]] = []
        for _ in range(processes):
            command = program("questions.wide", store, "--process", cache, "--minibatches", n_minibatches)
            one = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            running.append(stack.enter_context(one))
            assert one.stdout is not None
            line = one.stdout.readline()
            if not line:
                sys.exit("a zloader process failed")
            figures = json.loads(line)
            found.append({**figures, "above": figures["own"] - figures["imported"]["own"]})
        for figures, one in zip(found, running, strict=True):
            figures["pss"] = pss_bytes(one.pid)
    return found  # leaving the context closed their standard input and waited for them


def lines(turns: Sequence[Sequence[Figures]]) -> list[list[str]]:
    """The table: medians over the turns, one line per process in starting order."""
    found = [["process", *COLUMNS]]
    for number, runs in enumerate(zip(*turns, strict=True)):
        imports = statistics.median(run["imported"]["own"] for run in runs)
        sizes = [*(median(runs, name) for name in ("VmRSS", "RssFile", "pss", "own")), imports, median(runs, "above")]
        seconds = (f"{median(runs, name):.2f}" for name in ("opened_s", "opened_cpu_s", "first_s", "first_cpu_s"))
        found.append([str(number + 1), *seconds, *(f"{size / 1e6:,.0f}" for size in sizes)])
    return found


def verdicts(turns: Sequence[Sequence[Figures]]) -> Figures:
    """The worst process of each turn, as the median over the turns. Prints each figure and its target."""
    worst = {
        "opened_s": [max(run["opened_s"] for run in runs) for runs in turns],
        "first_s": [max(run["first_s"] for run in runs) for runs in turns],
        "rss": [max(run["VmRSS"] for run in runs) for runs in turns],
        "further": [max((run["above"] for run in runs[1:]), default=0) for runs in turns],
    }
    measured = {name: float(statistics.median(values)) for name, values in worst.items()}
    for name, value in measured.items():
        scale, unit = (1, "s") if name.endswith("_s") else (1e6, "MB")
        verdict = "met" if value < TARGETS[name] else "missed"
        print(f"{name}: {value / scale:,.2f} {unit} (target {TARGETS[name] / scale:,.0f}): {verdict}")
    return measured


def main() -> None:
    """Measures, prints tables and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="directory for the store and its mirror")
    parser.add_argument("--rows", type=lambda text: int(float(text)), default=1_000_000_000)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--minibatches", type=int, default=1, help="that the first process takes")
    parser.add_argument("--keep", action="store_true", help="keep the store and its mirror")
    parser.add_argument(
        "--process", help=argparse.SUPPRESS
    )  # run as one of the processes: the value is the mirror, DIRECTORY the store
    options = parser.parse_args()
    if options.process:
        process(str(options.directory), options.process, options.minibatches)
        return
    store, cache = options.directory / "wide.zarr", options.directory / "mirror"
    began = time.perf_counter()
    if not store.exists():
        write(store, options.rows)
        print(f"written in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    shutil.rmtree(cache, ignore_errors=True)
    first = turn(store, cache, 1, options.minibatches)
    print("with an empty mirror:")
    table(lines([first]))
    turns = [turn(store, cache, options.processes) for _ in range(options.turns)]
    print("with the mirror:")
    table(lines(turns))
    figures = {"rows": options.rows, "measured": verdicts(turns), "targets": TARGETS, "first": first, "turns": turns}
    print(json.dumps(figures))
    if not options.keep:
        for path in (store, cache):
            shutil.rmtree(path)


if __name__ == "__main__":
    main()
