"""What the turns of a run say: medians, ratios turn by turn, and how far a ratio can be trusted.

Other work on a machine slows down every peer of the same turn. So two peers are compared by the ratio of their figures
in each turn, and the ratios are summed up by their median and range.

`interval` estimates a ratio and its 95 % confidence interval from the ratios of the turns. Ratios multiply, so it works
with their logarithms: the estimate is the geometric mean. The interval is a bootstrap-t interval (Efron and Tibshirani,
An Introduction to the Bootstrap, 1993, section 12.5): turns are drawn with replacement, and each draw gives the
distance of its mean from the observed one in units of its own standard error. The usual percentile interval cannot be
wider than the range of the turns, and so covers the true ratio much too rarely when there are few.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.compare.reporting.records import Measurement, Turns

LEAST_TURNS = 5  # with fewer, most draws repeat the same turn, and the interval is Student's
RESAMPLES = 20_000
_TAILS = (0.025, 0.975)
_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182}  # the 97.5 % points of Student's t for this number of turns
Figure = Callable[[Measurement], float | None]


@dataclass(frozen=True)
class Spread:
    """The median and the range of a figure over turns."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread | None:
    """The spread of the values, None if there are none."""
    return Spread(statistics.median(values), min(values), max(values)) if values else None


def figures(turns: Turns, figure: Figure) -> list[float]:
    """A figure in the turns that have it."""
    return [value for each in turns.values() if (value := figure(each)) is not None]


def ratios(over: Turns, under: Turns, figure: Figure) -> dict[int, float]:
    """The ratio of a figure in each turn in which both peers have it, where it is not 0."""
    found = {}
    for turn in sorted(over.keys() & under.keys()):
        a, b = figure(over[turn]), figure(under[turn])
        if a and b:
            found[turn] = a / b
    return found


@dataclass(frozen=True)
class Interval:
    """A ratio with its 95 % interval, from `turns` turns. With one turn, the interval has no end."""

    ratio: float
    low: float
    high: float
    turns: int

    @property
    def beyond_noise(self) -> bool:
        return not self.low <= 1 <= self.high


def interval(ratios: Sequence[float], *, seed: int = 0) -> Interval:
    """The geometric mean of the ratios of all turns, and its 95 % interval.

    The interval is a bootstrap-t interval with `seed` from LEAST_TURNS turns, and Student's with fewer.
    """
    logs = np.log(np.asarray(ratios, np.float64))
    n, mean = len(logs), float(logs.mean())
    if n == 1:
        return Interval(math.exp(mean), 0.0, math.inf, n)
    error = float(logs.std(ddof=1)) / math.sqrt(n)
    t_low, t_high = _bootstrap_t(logs, seed) if n >= LEAST_TURNS and error > 0 else _student(n)
    with np.errstate(over="ignore"):
        ratio, low, high = np.exp([mean, mean - t_high * error, mean - t_low * error]).tolist()
    return Interval(ratio, low, high, n)


def _student(n: int) -> tuple[float, float]:
    point = _STUDENT.get(n, 0.0)
    return -point, point


def _bootstrap_t(logs: np.ndarray, seed: int) -> tuple[float, float]:
    """The points between which 95 % of the distances lie. Draws of a single value are infinitely far from the mean."""
    draws = np.random.default_rng(seed).choice(logs, (RESAMPLES, len(logs)))
    errors = draws.std(axis=1, ddof=1) / math.sqrt(len(logs))
    with np.errstate(divide="ignore", invalid="ignore"):
        distances = np.nan_to_num((draws.mean(axis=1) - logs.mean()) / errors, nan=0.0, posinf=np.inf, neginf=-np.inf)
    low, high = np.quantile(distances, _TAILS, method="inverted_cdf")
    return float(low), float(high)
