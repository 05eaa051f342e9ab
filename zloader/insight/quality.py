"""How well does a plan mix the rows? Measured from row numbers and one column of labels, without reading values.

There are four measures over the full minibatches of an epoch, because a single measure can mislead: minibatches made of
16 runs of consecutive rows already have 0.94 of the row distance of random minibatches. In a long epoch, 16 evenly
spaced stretches of about 256 minibatches are examined.

- Label entropy: `-sum(p * log2(p))` over the shares p of the labels in a minibatch, in bits (D'Ascenzo and Cultrera di
  Montesano 2025, scDataset). Even a random minibatch of b rows has about `(k - 1) / (2 * b * ln 2)` bits less than the
  whole dataset with its k labels, and a fetch of only b blocks costs as much again. So the entropy is compared with the
  entropy of random minibatches.
- Row distance: the mean of `|i - j|` over pairs of rows, within a minibatch or between one minibatch and the next. It
  is scaled to 0 for rows in order and 1 for random rows. (SLAF's L1, over all pairs in place of a hundred random
  pairs.) For n rows in minibatches of b, rows in order have a distance of `(b + 1) / 3` within a minibatch and `b`
  between two; random rows have `(n + 1) / 3` in both cases.
- Longest run: the largest number of consecutive rows in one minibatch.
- Same-block share: the share of the pairs of a minibatch that were read in the same stretch of consecutive rows. With m
  blocks per fetch it is about `1 / m`.
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
from zloader.order.plan import Fetch, Plan

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
    >>> measured = zl.quality(dataset.obs_column("donor").values, loader.plan(0))
    >>> measured.entropy_bits, measured.l1_within, measured.longest_run  # rows in order, sorted by donor
    (0.0, 0.0, 50)

    - `minibatches`: the number of minibatches examined, from all over the epoch.
    - `entropy_bits`, `entropy_sd_bits`: mean and standard deviation of the label entropy over minibatches, in bits.
    - `random_entropy_bits`, `random_entropy_sd_bits`: the same for random minibatches, the value to compare with.
    - `l1_within`, `l1_across`: distance of rows in one minibatch and in successive ones, 0 for rows in order and 1 for
      random rows. None if there are too few rows to tell the two apart.
    - `longest_run`: the most consecutive rows in a minibatch.
    - `same_block_share`: the share of the pairs of rows in a minibatch that come from the same block.
    """

    minibatches: int
    entropy_bits: float
    entropy_sd_bits: float
    random_entropy_bits: float
    random_entropy_sd_bits: float
    l1_within: float | None
    l1_across: float | None
    longest_run: int
    same_block_share: float

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

    For a view, or a sampling with `indices`, row distances and runs are computed among the chosen rows only, and random
    minibatches are drawn from them, with replacement if a minibatch has more rows than were chosen. Random minibatches
    ignore the weights of a sampling, so a class-balanced plan can have more entropy than they have.
    Raises OptionError for floats as labels, for the wrong number of labels, and for a plan without a full minibatch.
    """
    if not isinstance(plan, Plan):
        raise OptionError(f"quality measures the plan of an epoch, such as loader.plan(0), not {plan!r:.100}")
    plan = replace(plan, companions=None)
    chosen = None if plan.order.chosen is None else RowSet.of(plan.order.chosen())
    codes = _codes(labels, plan, chosen)
    stretches = [_stretch(plan, numbers) for numbers in _examined(plan)]
    rows = np.concatenate([rows for rows, _ in stretches])
    if not len(rows):
        raise OptionError(f"the plan has no full minibatch of {plan.batch_size} rows: lower batch_size")
    n_rows = plan.order.dataset_rows if chosen is None else len(chosen)
    positions = rows if chosen is None else chosen.positions(rows)
    of_stretches = np.split(positions, np.cumsum([len(rows) for rows, _ in stretches])[:-1])
    entropies = _entropies(codes[rows])
    random = _entropies(codes[_random(plan, n_rows, chosen)])
    return Quality(
        minibatches=len(rows),
        entropy_bits=float(entropies.mean()),
        entropy_sd_bits=float(entropies.std()),
        random_entropy_bits=float(random.mean()),
        random_entropy_sd_bits=float(random.std()),
        l1_within=_scaled(_within(positions), (plan.batch_size + 1) / 3, (n_rows + 1) / 3),
        l1_across=_scaled(_across(of_stretches), plan.batch_size, (n_rows + 1) / 3),
        longest_run=int(_runs(np.diff(np.sort(positions, axis=1), axis=1) == 1)[0].max()),
        same_block_share=_same_share(np.concatenate([blocks for _, blocks in stretches])),
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


def _stretch(plan: Plan, numbers: range) -> tuple[Rows, Rows]:
    """The rows of the full minibatches of some fetches, and the block of each row; both minibatches x batch_size."""
    rows, blocks, seen = [np.empty((0, plan.batch_size), np.int64)], [np.empty((0, plan.batch_size), np.int64)], 0
    for number in numbers:
        fetch = plan.fetch(number)
        block = seen + _blocks(fetch)
        seen = int(block[-1]) + 1
        full = fetch.cuts[:-1][np.diff(fetch.cuts) == plan.batch_size]
        taken = fetch.order[full[:, None] + np.arange(plan.batch_size)]
        rows.append(fetch.rows[taken])
        blocks.append(block[taken])
    return np.concatenate(rows), np.concatenate(blocks)


def _blocks(fetch: Fetch) -> Rows:
    """The block of each row of a fetch, in reading order; a new block begins where rows are not consecutive."""
    return np.cumsum(np.diff(fetch.rows, prepend=fetch.rows[:1] - 1) != 1)


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


def _runs(alike: NDArray[np.bool_]) -> tuple[Rows, Rows]:
    """Lengths and line numbers of the runs in each line of a table; `alike[i, k]` joins entries k and k + 1."""
    starts = np.flatnonzero(np.pad(~alike, ((0, 0), (1, 0)), constant_values=True))
    width = alike.shape[1] + 1
    return np.diff(starts, append=len(alike) * width), starts // width


def _entropies(labels: NDArray[Any]) -> NDArray[np.float64]:
    """The entropy of each line of b labels in bits: `log2(b) - sum(c * log2(c)) / b` over the label counts c."""
    width = labels.shape[1]
    ordered = np.sort(labels, axis=1)
    counts, lines = _runs(ordered[:, 1:] == ordered[:, :-1])
    return np.asarray(np.log2(width) - np.bincount(lines, counts * np.log2(counts), len(labels)) / width)


def _same_share(blocks: Rows) -> float:
    """The share of equal pairs within lines; 0 if there are no pairs."""
    ordered = np.sort(blocks, axis=1)
    counts, _ = _runs(ordered[:, 1:] == ordered[:, :-1])
    return float((counts * (counts - 1)).sum() / max(1, len(blocks) * blocks.shape[1] * (blocks.shape[1] - 1)))


def _sums(rows: Rows) -> NDArray[np.float64]:
    """The sum of `|i - j|` over the pairs of each line. In a sorted line, entry k is the larger in k of its pairs."""
    width = rows.shape[1]
    return np.asarray(np.sort(rows, axis=1) @ (2.0 * np.arange(width) - (width - 1)))


def _within(rows: Rows) -> float | None:
    """The mean distance of two rows of a minibatch; None for minibatches of a single row."""
    pairs = rows.shape[1] * (rows.shape[1] - 1) / 2
    return float(_sums(rows).mean() / pairs) if pairs else None


def _across(stretches: list[Rows]) -> float | None:
    """The mean distance between rows of successive minibatches; None if no two minibatches are successive."""
    both = np.concatenate([np.concatenate([rows[:-1], rows[1:]], axis=1) for rows in stretches])
    if not len(both):
        return None
    b = both.shape[1] // 2
    return float((_sums(both) - _sums(both[:, :b]) - _sums(both[:, b:])).mean() / b**2)


def _scaled(distance: float | None, in_order: float, random: float) -> float | None:
    return None if distance is None or random <= in_order else (distance - in_order) / (random - in_order)
