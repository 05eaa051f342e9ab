"""zloader in benchmarks that others have written: NVIDIA's bionemo-scspeedtest, and the one of scDataset.

    python -m benchmarks.questions.harnesses FILE.h5ad [--scspeedtest DIR] [--scdataset DIR] [--turns 3]

DIR is `sub-packages/bionemo-scspeedtest/src` of a checkout of NVIDIA's bionemo-framework, and `benchmarks` of one of
scDataset's repository, which needs `src` beside it. Neither is part of this repository, nor on PyPI. Both measure
whatever can be iterated over, and get every tool in the same form: epochs without end, each as the tool's module of
peers/ has it, with 64 rows per minibatch, and blocks and fetches as in compare/. zloader reads a full mirror on the
local disk. The harnesses decide what is counted, and how:

- scspeedtest: `benchmark_single_dataloader`, which gives rows per second after a warm-up, and the most memory (PSS of
  all processes) above that before the loader was made.
- scDataset: `evaluate_loader`, which gives rows per second after a warm-up, and the mean entropy of the labels.

The tools need the environments of compare/rivals.py, into which the packages that the harnesses import are installed.
Each turn starts new processes, in a random order. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.compare import peers, rivals
from benchmarks.compare.peers import Epochs
from benchmarks.harness.measuring import Figures, die_with_parent, importing, last_lines, program, table

SIDES = ("zloader", "cellstream", "annbatch, chunks of 512", "scDataset, h5ad", "BioNeMo-SCDL", "AnnLoader")
COLUMNS = ("harness", "tool", "rows/s", "(range)", "x zloader", "entropy", "MB")
PACKAGES = ("tqdm", "psutil", "pandas", "scipy", "pyyaml")  # of the harnesses; that of scDataset imports torch, too
SIZES = {"chunk_size": 64, "preload_nchunks": 256, "batch_size": 64}


# ---- in the process of a tool


class Endless:
    """The epochs of a tool, one after the other. Minibatches have an X with a shape, and labels if asked for."""

    num_workers = 1  # so that scspeedtest adds the memory of all processes

    def __init__(self, epochs: Epochs, *, labelled: bool) -> None:
        self._epochs, self._labelled = epochs, labelled

    def __iter__(self) -> Iterator[Any]:
        while True:
            epoch = self._epochs({})
            for minibatch in epoch.minibatches:
                x, obs = SimpleNamespace(shape=(epoch.size(minibatch),)), {}
                if self._labelled and epoch.labels is not None:
                    obs["plate"] = np.asarray(epoch.labels(minibatch))
                yield SimpleNamespace(X=x, obs=obs)


def by_scspeedtest(checkout: Path, loader: Callable[[], Endless], store: str, warm_s: float, most_s: float) -> Figures:
    """What NVIDIA's harness says."""
    sys.path.insert(0, str(checkout))
    from bionemo.scspeedtest.benchmark import benchmark_single_dataloader

    found = benchmark_single_dataloader(
        dataloader_factory=loader, data_path=store, max_time_seconds=most_s, warmup_time_seconds=warm_s
    )
    return {"rows_per_s": found.samples_per_second, "peak_mb": found.peak_memory_mb}


def by_scdataset(checkout: Path, loader: Callable[[], Endless], _: str, warm_s: float, most_s: float) -> Figures:
    """What scDataset's harness says."""
    found = importlib.util.spec_from_file_location("scdataset_utils", checkout / "utils.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    said = module.evaluate_loader(loader(), test_time_seconds=most_s, warm_up_seconds=warm_s)
    entropy = float(said["avg_batch_entropy"])  # 0 without labels
    return {"rows_per_s": said["samples_per_second"], **({"entropy": entropy} if entropy else {})}


HARNESSES = {"scspeedtest": by_scspeedtest, "scDataset": by_scdataset}


def measure(request: dict[str, Any]) -> Figures:
    """The figures of one tool in one harness."""
    options = request["options"]
    epochs = peers.module(request["tool"]).epochs

    def loader() -> Endless:
        return Endless(epochs(options), labelled=request["harness"] == "scDataset")

    if "mirror" in options:  # it is full when the harness begins
        for _ in epochs(options)({}).minibatches:
            pass
    by = HARNESSES[request["harness"]]
    return by(Path(request["checkout"]), loader, options["store"], request["warm_s"], request["most_s"])


# ---- all tools


def tool_of(side: str) -> str:
    """The tool that a side belongs to."""
    return next(name for name in peers.MODULES if side in peers.peer(name).sides)


def python_of(tool: str, directory: Path | None) -> str:
    """The Python of a tool, with the packages of the harnesses. Raises EnvironmentFailed."""
    if tool == "zloader":
        return sys.executable
    python = str(rivals.installed(tool, directory))
    subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *PACKAGES], check=True)
    return python


def stored(side: str, python: str, source: Path, work: Path) -> str:
    """The store of a side, written by its own conversion, or the file itself."""
    what = peers.peer(tool_of(side)).sides[side].store
    if what is None:
        return str(source)
    store = work / what
    if not store.exists():
        command = program("compare.rivals", "write", what, source, store, python=python)
        subprocess.run(command, check=True, stdout=sys.stderr, env=importing())
    return str(store)


def in_harness(request: dict[str, Any], python: str, work: Path) -> Figures:
    """The figures of `measure` in a new process."""
    command = program("questions.harnesses", "--measure", json.dumps(request), python=python)
    done = subprocess.run(command, capture_output=True, text=True, cwd=work, env=importing(), check=False)
    if done.returncode:
        raise RuntimeError(last_lines(done.stderr))
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


def lines(harness: str, runs: dict[str, list[Figures]]) -> Iterator[list[str]]:
    """The lines of the table of one harness."""
    for side, found in runs.items():
        speeds = [each["rows_per_s"] for each in found]
        ratios = [own["rows_per_s"] / ours["rows_per_s"] for own, ours in zip(found, runs["zloader"], strict=False)]
        cells = [harness, side, f"{statistics.median(speeds):,.0f}", f"({min(speeds):,.0f} to {max(speeds):,.0f})"]
        cells.append(f"{statistics.median(ratios):.3f}")
        for key, form in (("entropy", "{:.2f}"), ("peak_mb", "{:,.0f}")):
            cells.append(form.format(statistics.median(each[key] for each in found)) if key in found[0] else "")
        yield cells


def main() -> None:
    """Measures, prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, nargs="?", metavar="FILE.h5ad")
    parser.add_argument("--scspeedtest", type=Path, metavar="DIR")
    parser.add_argument("--scdataset", type=Path, metavar="DIR")
    parser.add_argument("--obs", default="cell_type", help="column of labels")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--warm-s", type=float, default=5.0)
    parser.add_argument("--most-s", type=float, default=10.0)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--environments", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        die_with_parent()
        with contextlib.redirect_stdout(sys.stderr):
            found = measure(json.loads(options.measure))
        print(json.dumps(found), flush=True)
        os._exit(0)  # an epoch is under way
    checkouts = {"scspeedtest": options.scspeedtest, "scDataset": options.scdataset}
    given = {name: checkout.absolute() for name, checkout in checkouts.items() if checkout is not None}
    if options.source is None or not given:
        parser.error("give FILE.h5ad, and --scspeedtest or --scdataset")
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        compare(options, {name: str(checkout) for name, checkout in given.items()}, Path(folder))


def compare(options: argparse.Namespace, checkouts: dict[str, str], work: Path) -> None:
    """All tools in turns, in each harness."""
    pythons, requests, runs, failed = {}, {}, dict[str, dict[str, list[Figures]]](), dict[str, str]()
    for side in SIDES:
        tool = tool_of(side)
        try:
            pythons[side] = python_of(tool, options.environments)
            store = stored(side, pythons[side], options.source.absolute(), work)
        except (rivals.EnvironmentFailed, subprocess.CalledProcessError) as error:
            failed[side] = str(error)
            continue
        reading = {**SIZES, "obs": options.obs, "workers": len(os.sched_getaffinity(0)), "store": store}
        reading |= peers.peer(tool).sides[side].options
        reading |= {"mirror": str(work / "mirror")} if tool == "zloader" else {}
        requests[side] = {"tool": tool, "options": reading, "warm_s": options.warm_s, "most_s": options.most_s}
    for harness, checkout in checkouts.items():
        of_sides = runs.setdefault(harness, {})
        for turn in range(options.turns):
            for side in shuffled(list(requests), f"{harness} {turn}"):
                if f"{harness}, {side}" in failed:
                    continue
                try:
                    found = in_harness(
                        {**requests[side], "harness": harness, "checkout": checkout}, pythons[side], work
                    )
                except RuntimeError as error:
                    failed[f"{harness}, {side}"] = str(error)
                    continue
                of_sides.setdefault(side, []).append(found)
                print(f"{harness}, turn {turn + 1}, {side}: {found['rows_per_s']:,.0f} rows/s", file=sys.stderr)
    in_order = {name: {side: found[side] for side in SIDES if side in found} for name, found in runs.items()}
    table([COLUMNS, *(line for harness, found in in_order.items() for line in lines(harness, found))])
    for where, reason in failed.items():
        print(f"{where}: {reason}")
    print(json.dumps({"cores": len(os.sched_getaffinity(0)), "runs": in_order, "failed": failed}))


def shuffled(sides: Sequence[str], seed: str) -> list[str]:
    """The sides in an order that is random and the same in every run."""
    return random.Random(seed).sample(sides, len(sides))


if __name__ == "__main__":
    main()
