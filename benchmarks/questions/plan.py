"""The time and memory that planning a fetch takes, for every sampling.

    python -m benchmarks.questions.plan [--rows 100000000] [--turns 30]

A fetch has 16 384 rows. A warm epoch on two cores runs at 500 000 rows/s, so it needs a fetch every 33 ms. A plan is
arithmetic, so its cost must not grow with the dataset. Only the tables of weighted samplings grow with the dataset, and
searching one takes about ten cache misses per draw. The labels are 20 classes in random order; class k is 1/k as
frequent as the first. "made" is the time to construct the sampling. "peak" is the most memory that Python and NumPy
allocate while planning a fetch, not counting the sampling itself. A sampling that would need more than half of the
memory is refused, and named below the table. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

import zloader as zl
from benchmarks.harness.measuring import table
from zloader.dataset.views import RowSet
from zloader.order.plan import Plan
from zloader.order.sampling import Sampling
from zloader.order.shuffling import stratified
from zloader.selecting.columns import ObsColumn

Figures = dict[str, Any]
_WINDOW = 1 << 22  # rows made at a time
GROUPS = {"most": (0.9, 0.5), "some": (0.099, 0.3), "few": (0.001, 0.2)}  # their shares of the rows, and their weights


@dataclass(frozen=True)
class Rows:
    """A dataset with a single obs column, in which the rows of a group are a share of all rows."""

    codes: NDArray[np.int8]

    @property
    def n_obs(self) -> int:
        return len(self.codes)

    def obs_column(self, column: str) -> ObsColumn:
        return ObsColumn(values=self.codes, coded=pd.Index([f"class {k}" for k in range(20)]))

    def rows_of(self, group: float) -> RowSet:
        return RowSet.of_range(self.n_obs, range(int(group * self.n_obs)))


MAKERS: dict[str, Callable[[Any], Sampling]] = {
    "Streaming(shuffle=True)": lambda weights: zl.Streaming(shuffle=True),
    "BlockShuffling(64)": lambda weights: zl.BlockShuffling(64),
    "BlockShuffling(1)": lambda weights: zl.BlockShuffling(1),
    "the default, 64 strata": lambda weights: stratified(),
    "BlockShuffling(1), 64 strata": lambda weights: stratified(1),
    "MixtureOfScanners(16, 64)": lambda weights: zl.MixtureOfScanners(16),
    "MixtureOfScanners(1024, 1)": lambda weights: zl.MixtureOfScanners(1024, block_size=1),
    "ClassBalancedSampling, 64": lambda weights: zl.ClassBalancedSampling("class"),
    "Mixture of 3, 64": lambda weights: zl.Mixture(GROUPS),
    "BlockWeightedSampling, 64": lambda weights: zl.BlockWeightedSampling(weights),
    "BlockWeightedSampling, 1": lambda weights: zl.BlockWeightedSampling(weights, block_size=1),
}


def measured(name: str, make: Callable[[], Sampling], rows: Rows, turns: int) -> Figures:
    """The figures of one sampling. Everything must have been compiled before."""
    begun = time.perf_counter()
    order = make().order(rows, 64, 64 * 256)
    made_s = time.perf_counter() - begun
    plan = Plan(order=order, batch_size=64, fetch_factor=256)
    numbers = itertools.cycle(range(0, plan.n_fetches, max(1, plan.n_fetches // 61)))
    plan.fetch(next(numbers))
    milliseconds = []
    for _ in range(turns):
        begun = time.perf_counter()
        plan.fetch(next(numbers))
        milliseconds.append(1e3 * (time.perf_counter() - begun))
    tracemalloc.start()
    plan.fetch(next(numbers))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "sampling": name,
        "ms a fetch": round(statistics.median(milliseconds), 2),
        "fastest": round(min(milliseconds), 2),
        "peak MB": round(peak / 1e6, 1),
        "made s": round(made_s, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--turns", type=int, default=30)
    options = parser.parse_args()

    rng = np.random.default_rng(0)
    shares = 1 / np.arange(1, 21)
    of_class = np.repeat(np.arange(20, dtype=np.int8), np.round(1000 * shares / shares.sum()).astype(int))
    codes, weights = np.empty(options.rows, np.int8), np.empty(options.rows, np.float32)
    for first in range(0, options.rows, _WINDOW):  # drawing all at once takes 8 bytes per row
        window = slice(first, first + _WINDOW)
        codes[window] = rng.choice(of_class, len(codes[window]))
        weights[window] = rng.random(len(codes[window]), np.float32)
    figures, refused = [], []
    for name, make in MAKERS.items():
        measured(name, lambda make=make: make(weights[:10_000]), Rows(codes[:10_000]), 1)  # compiles
        try:
            figures.append(measured(name, lambda make=make: make(weights), Rows(codes), options.turns))
        except zl.ZloaderError as error:
            refused.append(f"{name}: {error}")
    table([list(figures[0]), *(list(map(str, each.values())) for each in figures)])
    print(*refused, sep="\n")
    print(json.dumps({"rows": options.rows, "figures": figures, "refused": refused}))


if __name__ == "__main__":
    main()
