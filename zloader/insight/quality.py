"""How well does a plan mix the rows? Measured from row numbers and one column of labels, without reading values.

The measure is the label entropy of minibatches: `-sum(p * log2(p))` over the shares p of the labels in a minibatch, in
bits (D'Ascenzo and Cultrera di Montesano 2025, scDataset). Even a random minibatch of b rows has about
`(k - 1) / (2 * b * ln 2)` bits less than the whole dataset with its k labels, and a fetch of only b blocks costs as
much again. So the entropy is compared with that of random minibatches. In a long epoch, 16 evenly spaced stretches of
about 256 minibatches are examined.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from zloader.common.errors import OptionError
from zloader.common.keywords import answers
from zloader.common.records import Rows
from zloader.dataset.views import RowSet
from zloader.order.permutation import permute, words_at
from zloader.order.plan import Plan

# 16 * 256 = 4,096 minibatches determine the mean entropy of a poor plan (sd 0.3 bits) to 0.005 bits.
_STRETCHES = 16
_STRETCH_MINIBATCHES = 256
_RANDOM_MINIBATCHES = 1024
_RANDOM_KEY = 0x5EED
LEAST_BITS = 0.01  # below this, the labels hardly vary, and a share of the entropy means nothing
_COLUMNS = (pd.Series, pd.Index, pd.api.extensions.ExtensionArray)


@dataclass(frozen=True, kw_only=True)
class Quality:
    """How well the full minibatches of a plan are mixed; returned by `quality`.

    >>> import zloader as zl
    >>> dataset = zl.open_dataset("atlas.zarr")
    >>> loader = zl.Loader(dataset, batch_size=50, sampling=zl.Streaming())
    >>> zl.quality(dataset.obs_column("donor").values, loader.plan(0)).entropy_bits  # rows in order, sorted by donor
    0.0

    - `minibatches`: the number of minibatches examined, from all over the epoch.
    - `entropy_bits`, `entropy_sd_bits`: mean and standard deviation of the label entropy over minibatches, in bits.
    - `random_entropy_bits`, `random_entropy_sd_bits`: the same for random minibatches, the value to compare with.
    """

    minibatches: int
    entropy_bits: float
    entropy_sd_bits: float
    random_entropy_bits: float
    random_entropy_sd_bits: float

    @property
    def percent(self) -> float:
        """The entropy in percent of that of random minibatches; 100 if hardly any label differs."""
        random = self.random_entropy_bits
        return 100 * self.entropy_bits / random if random > LEAST_BITS else 100.0


@answers
def quality(labels: Sequence[Any] | NDArray[Any] | pd.Series | pd.Categorical, plan: Plan) -> Quality:
    """Measures how well the minibatches of a plan are mixed, without reading values.

    >>> import zloader as zl
    >>> dataset = zl.open_dataset("atlas.zarr")
    >>> loader = zl.Loader(dataset, batch_size=50, fetch_factor=4, sampling=zl.BlockShuffling(10))
    >>> measured = zl.quality(dataset.obs_column("cell_type").values, loader.plan(0))
    >>> measured.minibatches, 0.9 < measured.entropy_bits <= 1
    (20, True)

    - `labels`: one label per row of the dataset: whole numbers such as codes, booleans, strings or categories. Missing
      labels count as one more label. For a plan of a view, give the labels of the whole dataset:
      `view.whole.obs_column(name).values`.
    - `plan`: the plan of an epoch, from `loader.plan(epoch)`.

    For a view, or a sampling with `indices`, random minibatches are drawn from the chosen rows, with replacement if a
    minibatch has more rows than were chosen. They ignore the weights of a sampling, so a class-balanced plan can have
    more entropy than they have.
    Raises OptionError for floats as labels, for the wrong number of labels, and for a plan without a full minibatch.
    """
    if not isinstance(plan, Plan):
        raise OptionError(f"quality measures the plan of an epoch, such as loader.plan(0), not {plan!r:.100}")
    plan = replace(plan, companions=None)
    chosen = None if plan.order.chosen is None else RowSet.of(plan.order.chosen())
    codes = _codes(labels, plan, chosen)
    rows = np.concatenate([_rows(plan, numbers) for numbers in _examined(plan)])
    if not len(rows):
        raise OptionError(f"the plan has no full minibatch of {plan.batch_size} rows: lower batch_size")
    n_rows = plan.order.dataset_rows if chosen is None else len(chosen)
    entropies, random = _entropies(codes[rows]), _entropies(codes[_random(plan, n_rows, chosen)])
    return Quality(
        minibatches=len(rows),
        entropy_bits=float(entropies.mean()),
        entropy_sd_bits=float(entropies.std()),
        random_entropy_bits=float(random.mean()),
        random_entropy_sd_bits=float(random.std()),
    )


def _codes(labels: Any, plan: Plan, chosen: RowSet | None) -> NDArray[Any]:
    """One integer per row, equal for equal labels."""
    column = labels if isinstance(labels, _COLUMNS) else np.asarray(labels)
    n_rows = plan.order.dataset_rows
    if column.shape != (n_rows,):
        if chosen is not None and column.shape == (len(chosen),):
            raise OptionError(
                f"these are the labels of the {len(column)} rows of a view, but the labels of all {n_rows} rows of the "
                "whole dataset are needed: give view.whole.obs_column(NAME).values"
            )
        raise OptionError(f"give one label for each of the {n_rows} rows, not an array of shape {column.shape}")
    if pd.api.types.is_float_dtype(column.dtype):
        raise OptionError(f"labels must be strings, categories or whole numbers, not {column.dtype}")
    if isinstance(column, np.ndarray) and column.dtype.kind in "biu":
        return column
    return np.asarray(pd.factorize(column)[0])


def _examined(plan: Plan) -> Iterator[range]:
    """The fetches to examine: all, or 16 evenly spaced stretches of consecutive fetches."""
    length = -(-_STRETCH_MINIBATCHES // plan.fetch_factor)
    if plan.n_fetches <= _STRETCHES * length:
        yield range(plan.n_fetches)
        return
    for first in np.linspace(0, plan.n_fetches - length, _STRETCHES).astype(int).tolist():
        yield range(first, first + length)


def _rows(plan: Plan, numbers: range) -> Rows:
    """The rows of the full minibatches of some fetches, minibatches x batch_size."""
    rows = [np.empty((0, plan.batch_size), np.int64)]
    for number in numbers:
        fetch = plan.fetch(number)
        full = fetch.cuts[:-1][np.diff(fetch.cuts) == plan.batch_size]
        rows.append(fetch.rows[fetch.order[full[:, None] + np.arange(plan.batch_size)]])
    return np.concatenate(rows)


def _random(plan: Plan, n_rows: int, chosen: RowSet | None) -> Rows:
    """Random minibatches of the chosen rows, without repeats unless a minibatch has more rows than were chosen."""
    if n_rows < plan.batch_size:
        numbers = np.arange(_RANDOM_MINIBATCHES * plan.batch_size, dtype=np.uint64)
        positions = (words_at(_RANDOM_KEY, numbers) % np.uint64(n_rows)).astype(np.int64)
    else:
        n_minibatches = min(_RANDOM_MINIBATCHES, n_rows // plan.batch_size)
        positions = permute(np.arange(n_minibatches * plan.batch_size), n_rows, _RANDOM_KEY)
    rows = positions if chosen is None else chosen.numbers(positions)
    return rows.reshape(-1, plan.batch_size)


def _entropies(labels: NDArray[Any]) -> NDArray[np.float64]:
    """The entropy of each line of b labels in bits: `log2(b) - sum(c * log2(c)) / b` over the label counts c."""
    n, width = labels.shape
    ordered = np.sort(labels, axis=1)
    changes = np.pad(ordered[:, 1:] != ordered[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    starts = np.flatnonzero(changes)  # of the runs of equal labels
    counts = np.diff(starts, append=n * width)
    return np.asarray(np.log2(width) - np.bincount(starts // width, counts * np.log2(counts), n) / width)
