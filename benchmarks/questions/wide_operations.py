"""Seconds and memory of everything that looks at all rows, on the store of `wide.py`.

    python -m benchmarks.questions.wide_operations DIRECTORY [--only NAME ...]

DIRECTORY holds wide.zarr and its mirror, as `wide.py DIRECTORY --keep` leaves them. Each operation runs in a process of
its own that has opened the dataset. "peak own MB" is the most memory that the process had of its own (RssAnon and
RssShmem, read every 5 ms) above what it had before, "left MB" is what it has afterwards, and "peak RSS MB" counts
mapped file pages and libraries, too. An operation that refuses shows its message. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import zloader as zl
from benchmarks.harness.measuring import Figures, program, table
from benchmarks.questions.wide import memory

Operation = Callable[[zl.Dataset], Any]


def loaded(dataset: zl.Dataset, **options: Any) -> zl.Loader:
    """A Loader, and the first fetch of its plan."""
    loader = zl.Loader(dataset, obs=["drug"], **options)
    loader.plan(0).fetch(0)
    return loader


def resumed(dataset: zl.Dataset) -> Any:
    """Saves the state after a third of the epoch on 3 ranks and goes on with 8."""
    n = len(loaded(dataset, rank=0, world_size=3)) // 3
    state = zl.Loader(dataset, obs=["drug"], rank=0, world_size=3).state_dict() | {"stretches": [[3, n]]}
    loader = loaded(dataset, rank=5, world_size=8)
    loader.load_state_dict(state)
    loader.set_epoch(7)
    return len(loader)


def first_of(view: zl.Dataset, **options: Any) -> Any:
    """The first minibatch."""
    return next(iter(zl.Loader(view, obs=["drug"], **options))).index[0].item()


def controls_of(dataset: zl.Dataset) -> Any:
    """The controls of one fetch, of which half the rows are."""
    controls = zl.MatchedControls("n_counts > 4000", match=["cell_line", "drug"], fallback=["cell_line"])
    return loaded(dataset, controls=controls)


OPERATIONS: dict[str, Operation] = {
    "obs_column (int16)": lambda dataset: dataset.obs_column("drug"),
    "obs_column (float32)": lambda dataset: dataset.obs_column("n_counts"),
    "where, two columns": lambda dataset: dataset.where(
        "drug != 'drug 0' and cell_line in ('cell_line 3', 'cell_line 7')"
    ),
    "where, numbers": lambda dataset: dataset.where("n_counts > 4000"),
    "where, first minibatch": lambda dataset: first_of(dataset.where("cell_line != 'cell_line 3'")),
    "slice": lambda dataset: dataset[1000:-1000:3],
    "where in a view": lambda dataset: dataset.where("plate == 'plate 3'").where("cell_line == 'cell_line 3'"),
    "split 9:1": lambda dataset: dataset.split([0.9, 0.1]),
    "split by drug": lambda dataset: dataset.split([0.9, 0.1], by="drug"),
    "split stratified": lambda dataset: dataset.split([0.9, 0.1], stratify="cell_line"),
    "pickle of a view": lambda dataset: len(pickle.dumps(dataset.where("plate != 'plate 3'"))),
    "pickle of a Loader, and back": lambda dataset: len(pickle.loads(pickle.dumps(zl.Loader(dataset, obs=["drug"])))),
    "take 3 rows": lambda dataset: dataset.take([5, dataset.n_obs // 2, 3]),
    "obs() of a view of 1000 rows": lambda dataset: dataset[5000:6000].obs(),
    "obs() of a view of half": lambda dataset: dataset[::2].obs(["plate"]),
    "resume, set_epoch, ranks": resumed,
    "ClassBalancedSampling": lambda dataset: loaded(dataset, sampling=zl.ClassBalancedSampling("drug")),
    "weights by label": lambda dataset: loaded(
        dataset, sampling=zl.BlockWeightedSampling({f"plate {n}": n + 1 for n in range(14)}, column="plate")
    ),
    "weights, float32": lambda dataset: loaded(
        dataset, sampling=zl.BlockWeightedSampling(np.ones(dataset.n_obs, np.float32))
    ),
    "weights, block_size 1": lambda dataset: loaded(dataset, sampling=zl.ClassBalancedSampling("drug", block_size=1)),
    "weights, replace=False": lambda dataset: loaded(
        dataset, sampling=zl.ClassBalancedSampling("drug", total_size=10**6, replace=False)
    ),
    "Mixture of 2": lambda dataset: loaded(
        dataset, sampling=zl.Mixture({"a": ("plate == 'plate 1'", 1), "b": ("plate != 'plate 1'", 2)})
    ),
    "CellSets": lambda dataset: loaded(dataset, sampling=zl.CellSets(["cell_line", "drug"], 64)),
    "MatchedControls": lambda dataset: loaded(
        dataset, controls=zl.MatchedControls("drug == 'drug 0'", match="cell_line")
    ),
    "quality": lambda dataset: zl.quality(dataset.obs_column("plate").values, loaded(dataset).plan(0)),
    "obs_names of 1000 rows": lambda dataset: dataset.names_of(np.linspace(0, dataset.n_obs - 1, 1000).astype(int)),
    "obs_names": lambda dataset: dataset.obs_names,
    "obs()": lambda dataset: dataset.obs(["plate"]),
    "without a cache: first minibatch": lambda dataset: first_of(zl.open_dataset(dataset.url)),
    "fetch of 16 384 controls": lambda dataset: controls_of(dataset),
    "zloader cache ls": lambda dataset: command("cache", "ls", str(dataset.cache.directory)),
    "zloader cache verify": lambda dataset: command("cache", "verify", str(dataset.cache.directory)),
    "zloader info": lambda dataset: command("info", dataset.url),
}


def command(*words: str) -> None:
    """Runs a command of zloader in this process, so that its memory is measured."""
    from zloader.commands.cli import app

    sys.stdout, kept = sys.stderr, sys.stdout
    try:
        app([*words], standalone_mode=False)
    finally:
        sys.stdout = kept


class Peak:
    """The most memory of its own that this process has, looked at every 5 ms."""

    def __init__(self) -> None:
        self.before = memory(os.getpid())["own"]
        self.most, self._stopped = self.before, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stopped.wait(0.005):
            self.most = max(self.most, memory(os.getpid())["own"])

    def stop(self) -> None:
        """Ends the looking."""
        self._stopped.set()
        self._thread.join()


def measured(store: str, cache: str, name: str) -> Figures:
    """One operation in this process."""
    dataset = zl.open_dataset(store, cache=cache)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    peak, began, cpu, kept = Peak(), time.perf_counter(), time.process_time(), None
    try:
        kept, refused = OPERATIONS[name](dataset), None
    except zl.ZloaderError as error:
        refused = str(error)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    peak.stop()
    status = Path("/proc/self/status").read_text().splitlines()
    high = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    left = memory(os.getpid())["own"] - peak.before
    del kept
    times = {"s": seconds, "cpu_s": cpu}
    return {"name": name, **times, "own": peak.most - peak.before, "left": left, "rss": high, "refused": refused}


def main() -> None:
    """Measures every operation, prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="directory of wide.zarr and its mirror")
    parser.add_argument("--only", nargs="*", default=list(OPERATIONS), metavar="NAME")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # run one operation in this process
    options = parser.parse_args()
    store, cache = str(options.directory / "wide.zarr"), str(options.directory / "mirror")
    if options.measure:
        print(json.dumps(measured(store, cache, options.measure)))
        return
    lines, figures = [["operation", "s", "CPU s", "peak own MB", "left MB", "peak RSS MB", "refused"]], []
    for name in options.only:
        command = program("questions.wide_operations", options.directory, "--measure", name)
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            lines.append([name, "", "", "", "", "", f"failed with exit status {done.returncode}"])
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        figures.append(found)
        sizes = [f"{found[key] / 1e6:,.0f}" for key in ("own", "left", "rss")]
        lines.append([name, f"{found['s']:.2f}", f"{found['cpu_s']:.2f}", *sizes, (found["refused"] or "")[:100]])
        print(*lines[-1], sep="\t", file=sys.stderr, flush=True)
    table(lines)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
