"""The memory that a loader takes at most, against FetchOptions(memory=...), for each kind of minibatch.

    python -m benchmarks.questions.memory DIRECTORY [--memory 256MiB] [--rows 40000] [--names csr "join, not sorted"]

Stores of `rows` rows with about 1 800 values each (those of joined.py, with a layer) are written to DIRECTORY and
deleted afterwards. Each case runs one epoch in a process of its own, and is strained on purpose: two fetches fill the
budget for fetches, and the consumer pauses five times, from the first minibatch on, until the loader has done nothing
for a while. By then everything that it may make ahead is in memory.

The figure is the peak of anonymous memory (RssAnon in /proc, so Linux only) beyond that before the epoch, when the same
loader has run over a few rows and freed memory was given back to the system. Mapped files of a mirror are no part of
it, because the kernel can drop their pages. `rows` should be enough for two fetches: 5.5 KB per row are then more than
three quarters of the budget. A budget of less than 256 MiB is too small for the larger minibatches. The last line is
one JSON document. The exit status is 1 if a case took more than its budget.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import zloader as zl
from benchmarks.compare.peers.zloader import tokenizer
from benchmarks.harness.measuring import program, table
from benchmarks.questions.joined import N_GENES, N_SHARED, VALUES_PER_ROW, counts

LAYER = "layers/again"
BATCH_SIZE = 64
PAUSES = 5
STEP_S = 0.05  # while the consumer pauses
QUIET_STEPS = 4  # without work of the loader, after which the consumer goes on
QUIET_S = 0.004  # processor time per step: that of the thread that samples the memory
ROW_BYTES = 3 * VALUES_PER_ROW + 60  # of one matrix, decoded: genes of two bytes, values of one; with a margin
LOG = zl.transforms.LogNormalize(1e4)


def nothing(dataset: zl.Dataset) -> dict[str, Any]:
    """No options."""
    return {}


def given(**options: Any) -> Callable[[zl.Dataset], dict[str, Any]]:
    """The same options for every dataset."""
    return lambda dataset: options


def some_genes(n_genes: int, **options: Any) -> Callable[[zl.Dataset], dict[str, Any]]:
    """Options with genes from all over the matrix, as a dense x."""
    return lambda dataset: (
        {"genes": np.linspace(0, dataset.n_vars - 1, n_genes).astype(int), "layout": "dense"} | options
    )


def tokens(name: str, x: str | None = None) -> Callable[[zl.Dataset], dict[str, Any]]:
    """Options with a tokenizer that knows every gene."""
    return lambda dataset: {"tokens": tokenizer(name, dataset), "x": x}


def changed(minibatch: zl.Minibatch) -> torch.Tensor:
    """A function of the user's own that makes a dense x."""
    return minibatch.x.to_dense()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A loader: its options, the stores that it reads, its join, and the form of its cache, which is full if `warm`."""

    options: Callable[[zl.Dataset], dict[str, Any]] = field(default=nothing)
    stores: Sequence[str] = ("one",)
    join: str | None = None
    form: str | None = None
    warm: bool = False


def all_of_these(form: str) -> Case:
    """Two matrices, tokens, names and transforms of a join, while a mirror of this form is filled."""

    def options(dataset: zl.Dataset) -> dict[str, Any]:
        words = tokenizer("scGPT", dataset)
        return {"x": BOTH, "tokens": words, "transforms": {LAYER: [LOG]}}

    return Case(stores=UNSORTED, join="outer", form=form, options=options)


SORTED, UNSORTED = ("sorted 0", "sorted 1"), ("not sorted 0", "not sorted 1")
BOTH = ["X", LAYER]
CASES = {
    "csr": Case(),
    "dense": Case(options=given(layout="dense")),
    "packed": Case(options=given(layout="packed")),
    "csr, minibatches of 256": Case(options=given(batch_size=256)),
    "packed, minibatches of 512": Case(options=given(layout="packed", batch_size=512)),
    "2 000 genes, dense": Case(options=some_genes(2000)),
    "20 genes, dense, minibatches of 1 024": Case(options=some_genes(20, batch_size=1024)),
    "LogNormalize": Case(options=given(transforms=[LOG])),
    "LogNormalize, dense": Case(options=given(transforms=[LOG], layout="dense")),
    "LogNormalize, 2 000 genes, dense": Case(options=some_genes(2000, transforms=[LOG])),
    "Downsample": Case(options=given(transforms=[zl.transforms.Downsample(500)])),
    "batch_transform": Case(options=given(batch_transform=changed)),
    "Geneformer": Case(options=tokens("Geneformer")),
    "Geneformer and X": Case(options=tokens("Geneformer", x="X")),
    "scGPT": Case(options=tokens("scGPT")),
    "two matrices": Case(options=given(x=BOTH)),
    "two matrices, dense": Case(options=given(x=BOTH, layout="dense")),
    "two matrices, packed": Case(options=given(x=BOTH, layout="packed")),
    "join, sorted": Case(stores=SORTED, join="outer"),
    "join, not sorted": Case(stores=UNSORTED, join="outer"),
    "inner join": Case(stores=UNSORTED, join="inner"),
    "join, dense": Case(stores=UNSORTED, join="outer", options=given(layout="dense")),
    "filling a mirror": Case(form="raw"),
    "warm mirror": Case(form="raw", warm=True),
    "filling a mirror, compact form": Case(form="compact"),
    "warm mirror, compact form": Case(form="compact", warm=True),
    "2 000 genes, dense, filling a compact mirror": Case(form="compact", options=some_genes(2000)),
    "join, not sorted, filling a compact mirror": Case(stores=UNSORTED, join="outer", form="compact"),
    "all of these, filling a mirror": all_of_these("raw"),
    "all of these, filling a compact mirror": all_of_these("compact"),
}  # fmt: skip


def write_stores(folder: Path, n_rows: int) -> None:
    """Writes the stores of all cases: one of all rows, and pairs of half of them, whose genes differ."""
    names = np.array([f"gene{number:05}" for number in range(2 * N_GENES - N_SHARED)])
    shuffled = np.random.default_rng(0).permutation(names)
    of_stores = {"one": (np.sort(shuffled[:N_GENES]), n_rows)}
    for number, chosen in enumerate((shuffled[:N_GENES], shuffled[-N_GENES:])):
        of_stores[SORTED[number]] = (np.sort(chosen), n_rows // 2)
        of_stores[UNSORTED[number]] = (chosen, n_rows // 2)
    for name, (genes, rows) in of_stores.items():
        pieces = [counts(min(5000, rows - first), genes, seed=first) for first in range(0, rows, 5000)]
        for piece in pieces:
            piece.layers["again"] = piece.X
        zl.convert(pieces, folder / f"{name}.zarr", progress=False)


def loader_of(case: Case, folder: Path, mirror: Path, memory: str) -> tuple[zl.Loader, zl.Loader]:
    """A loader of some rows, and the one to measure."""
    cache = zl.Cache(mirror, form=case.form) if case.form is not None and case.warm else None
    paths = [folder / f"{name}.zarr" for name in case.stores]
    dataset = zl.open_dataset(paths, join=case.join, cache=cache)
    wanted = {"batch_size": BATCH_SIZE} | case.options(dataset)
    budget = zl.FetchOptions(memory=memory)
    matrices = {"X", *wanted["x"]} if isinstance(wanted.get("x"), list) else {"X"}
    fetch_factor = max(1, budget.buffer_bytes // (2 * ROW_BYTES * len(matrices) * wanted["batch_size"]))
    wanted |= {"fetch_factor": fetch_factor, "options": budget}
    fetch_rows = fetch_factor * wanted["batch_size"]
    n_rows = max(1, dataset.n_obs // fetch_rows) * fetch_rows  # the fetches of an epoch are equally long
    few = zl.Loader(dataset[: min(dataset.n_obs, 512)], **wanted)
    if case.warm:
        zl.warm(dataset, x=sorted(matrices))
    if case.form is not None:
        dataset = zl.open_dataset(paths, join=case.join, cache=zl.Cache(mirror, form=case.form))
    return few, zl.Loader(dataset[: min(dataset.n_obs, n_rows)], **wanted)


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@contextlib.contextmanager
def sampled() -> Iterator[list[int]]:
    """A list with the peak of anonymous memory so far, which a thread keeps up to date."""
    most, ended = [anonymous_bytes()], threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            most[0] = max(most[0], anonymous_bytes())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield most
    finally:
        ended.set()
        watching.join()


def pause() -> None:
    """Waits until the loader has made all that it may make ahead: until its threads use no processor time."""
    quiet = 0
    while quiet < QUIET_STEPS:
        before = time.process_time()
        time.sleep(STEP_S)
        quiet = quiet + 1 if time.process_time() - before < QUIET_S else 0


def peak(folder: Path, name: str, memory: str) -> int:
    """The peak of anonymous memory during an epoch, beyond that before it."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=folder) as mirror:
        few, loader = loader_of(CASES[name], folder, Path(mirror), memory)
        for _ in few:
            pass
        del few
        with contextlib.suppress(AttributeError):  # a C library other than glibc
            ctypes.CDLL(None).malloc_trim(0)
        before, step = anonymous_bytes(), max(1, len(loader) // PAUSES)
        with sampled() as most:
            for number, minibatch in enumerate(loader):
                del minibatch  # it is the consumer's, and would be held while the next one is taken
                if number % step == 0:
                    pause()
        return most[0] - before


def measured_peak(folder: Path, name: str, memory: str) -> int:
    """`peak` in a new process."""
    command = program("questions.memory", folder, "--memory", memory, "--peak", name)
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def report(peaks: dict[str, int], memory: str) -> int:
    """Prints a table and one line of JSON. Returns the exit status."""
    budget = zl.FetchOptions(memory=memory).memory
    shares = {name: most / budget for name, most in peaks.items()}
    lines = [
        [name, f"{budget / 1e6:,.0f}", f"{most / 1e6:,.0f}", f"{shares[name]:.2f}"] for name, most in peaks.items()
    ]
    table([["", "budget MB", "peak MB", "share"], *lines])
    above = [name for name, share in shares.items() if share > 1]
    print(f"above the budget: {'; '.join(above)}" if above else "no case is above the budget")
    print(json.dumps({"memory": budget, "peaks": peaks, "above": above}))
    return int(bool(above))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, and prints the report. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--memory", default="256MiB")
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--names", nargs="+", choices=CASES, default=list(CASES), help="cases (default: all)")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.peak:
        print(peak(options.directory, options.peak, options.memory))
        return 0
    options.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        write_stores(Path(folder), options.rows)
        peaks = {}
        for name in options.names:
            peaks[name] = measured_peak(Path(folder), name, options.memory)
            print(f"{name}: {peaks[name] / 1e6:,.0f} MB", file=sys.stderr)
    return report(peaks, options.memory)


if __name__ == "__main__":
    sys.exit(main())
