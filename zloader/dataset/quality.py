"""How well a plan mixes rows: arithmetic on its row numbers and a column of labels. No values are read.

Four measures of its full minibatches, for one alone misleads: 16 runs of consecutive rows in a minibatch already have
0.94 of the row distance of a random one.

- Label entropy, `-sum(p * log2(p))` over the shares p of the labels in a minibatch, in bits (D'Ascenzo and Cultrera di
  Montesano 2025, scDataset). Minibatches of b rows have about `(k - 1) / (2 * b * ln 2)` bits less than all rows of k
  labels, and so much again with b blocks in a fetch; so it is held against that of random minibatches, which are drawn.
- Row distance, the mean of `|i - j|` over pairs of rows, of one minibatch or of one and the next (SLAF's L1; there of
  a hundred drawn pairs, here of all), scaled to 0 for rows in order and 1 for random ones. Of n rows and minibatches
  of b, rows in order have `(b + 1) / 3` within and `b` across, random ones `(n + 1) / 3` both.
- The longest run: the most consecutive rows that one minibatch has.
- The same-block share: of the pairs of a minibatch, those read as part of one stretch of consecutive rows. With m
  blocks in a fetch it is about `1 / m`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from zloader.common.errors import OptionError
from zloader.common.records import Rows
from zloader.dataset.views import RowSet, Within
from zloader.order.permutation import permute, words_at
from zloader.order.plan import Fetch, Plan

# Of a longer epoch, so many stretches of so many minibatches are looked at: 4 096 know the mean entropy of a poor plan
# (sd 0.3 bits) to 0.005.
_STRETCHES = 16
_STRETCH_MINIBATCHES = 256
_RANDOM_MINIBATCHES = 1024
_RANDOM_KEY = 0x5EED
_COLUMNS = (pd.Series, pd.Index, pd.api.extensions.ExtensionArray)


@dataclass(frozen=True, kw_only=True)
class Quality:
    """How well the full minibatches of a plan are mixed; the module says what is measured.

    Entropies are means and standard deviations over minibatches, in bits; `random_` of as many random rows each, drawn
    with replacement where a minibatch has more rows than take part. The row distances are 0 for rows in order, 1 for
    random ones, and None where too few rows tell these apart. `minibatches` were looked at, from all over the epoch.
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


def quality(labels: Sequence[Any] | NDArray[Any] | pd.Series | pd.Categorical, plan: Plan) -> Quality:
    """Measures a plan, given the label of each row of the dataset; of the whole one, where the plan is of a view.

    Labels are whole numbers (codes, such as `dataset.obs_column` has), booleans, strings or categories; what is missing
    among them is one more label. A sampling's `indices` are all the rows there are: distances and runs are counted
    among them, and random rows drawn from them. Weights play no part in that, so that balanced classes may have more
    entropy than random rows.
    Raises OptionError for labels that are not one a row or are floats, or a plan without a full minibatch.
    """
    codes = _codes(labels, plan)
    taking_part = _taking_part(plan)
    stretches = [_stretch(plan, numbers) for numbers in _walked(plan)]
    rows = np.concatenate([rows for rows, _ in stretches])
    if not len(rows):
        raise OptionError(f"no minibatch of the plan has {plan.batch_size} rows: lower batch_size")
    n_rows = plan.dataset_rows if taking_part is None else len(taking_part)
    places = rows if taking_part is None else taking_part.positions(rows)
    of_stretches = np.split(places, np.cumsum([len(rows) for rows, _ in stretches])[:-1])
    entropies = _entropies(codes[rows])
    random = _entropies(codes[_random(plan, n_rows, taking_part)])
    return Quality(
        minibatches=len(rows),
        entropy_bits=float(entropies.mean()),
        entropy_sd_bits=float(entropies.std()),
        random_entropy_bits=float(random.mean()),
        random_entropy_sd_bits=float(random.std()),
        l1_within=_scaled(_within(places), (plan.batch_size + 1) / 3, (n_rows + 1) / 3),
        l1_across=_scaled(_across(of_stretches), plan.batch_size, (n_rows + 1) / 3),
        longest_run=_longest_run(places),
        same_block_share=_same_share(np.concatenate([blocks for _, blocks in stretches])),
    )


def _codes(labels: Any, plan: Plan) -> NDArray[Any]:
    """A whole number for each row, which differs where the labels do."""
    column = labels if isinstance(labels, _COLUMNS) else np.asarray(labels)
    if column.shape != (plan.dataset_rows,):
        if isinstance(plan.sampling, Within) and column.shape == (len(plan.sampling.chosen),):
            raise OptionError(
                f"these are labels of the {len(column)} rows of a view, but those of all {plan.dataset_rows} rows of "
                "the whole dataset are wanted: give view.whole.obs_column(NAME).values"
            )
        raise OptionError(f"labels must be one for each of {plan.dataset_rows} rows, not of shape {column.shape}")
    if pd.api.types.is_float_dtype(column.dtype):
        raise OptionError(f"labels are {column.dtype}: minibatches are mixed by labels or whole numbers")
    if isinstance(column, np.ndarray) and column.dtype.kind in "biu":
        return column
    return np.asarray(pd.factorize(column)[0])


def _taking_part(plan: Plan) -> RowSet | None:
    """The rows that there are, as bits: those of a large view are no list of numbers. None for all."""
    if isinstance(plan.sampling, Within) and getattr(plan.sampling.sampling, "indices", None) is None:
        return plan.sampling.chosen
    indices = getattr(plan.sampling, "indices", None)
    if indices is None:
        return None
    mask = np.zeros(plan.dataset_rows, bool)
    mask[np.asarray(indices)] = True
    return RowSet.of(mask)


def _walked(plan: Plan) -> Iterator[range]:
    """Fetches to look at: all, or stretches of consecutive ones that are spread evenly."""
    length = -(-_STRETCH_MINIBATCHES // plan.fetch_factor)
    if plan.n_fetches <= _STRETCHES * length:
        yield range(plan.n_fetches)
        return
    for first in np.linspace(0, plan.n_fetches - length, _STRETCHES).astype(int).tolist():
        yield range(first, first + length)


def _stretch(plan: Plan, numbers: range) -> tuple[Rows, Rows]:
    """Rows of the full minibatches of some fetches, and which block each was read in; both minibatches x batch_size."""
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
    """For each row of a fetch, as read, how many times before it the rows were not consecutive."""
    return np.cumsum(np.diff(fetch.rows, prepend=fetch.rows[:1] - 1) != 1)


def _random(plan: Plan, n_rows: int, taking_part: RowSet | None) -> Rows:
    """Random minibatches of the rows that take part: no row twice, unless a minibatch has more rows than there are."""
    if n_rows < plan.batch_size:
        numbers = np.arange(_RANDOM_MINIBATCHES * plan.batch_size, dtype=np.uint64)
        places = (words_at(_RANDOM_KEY, numbers) % np.uint64(n_rows)).astype(np.int64)
    else:
        n_minibatches = min(_RANDOM_MINIBATCHES, n_rows // plan.batch_size)
        places = permute(np.arange(n_minibatches * plan.batch_size), n_rows, _RANDOM_KEY)
    rows = places if taking_part is None else taking_part.numbers(places)
    return rows.reshape(-1, plan.batch_size)


def _runs(alike: NDArray[np.bool_]) -> tuple[Rows, Rows]:
    """Runs in each line of a table: how long each is, and its line. `alike` says which places go on with a run."""
    starts = np.flatnonzero(np.pad(~alike, ((0, 0), (1, 0)), constant_values=True))
    width = alike.shape[1] + 1
    return np.diff(starts, append=len(alike) * width), starts // width


def _entropies(labels: NDArray[Any]) -> NDArray[np.float64]:
    """Entropy of each line of labels, in bits: `log2(b) - sum(c * log2(c)) / b` for labels that come c times."""
    width = labels.shape[1]
    ordered = np.sort(labels, axis=1)
    counts, lines = _runs(ordered[:, 1:] == ordered[:, :-1])
    return np.asarray(np.log2(width) - np.bincount(lines, counts * np.log2(counts), len(labels)) / width)


def _longest_run(rows: Rows) -> int:
    ordered = np.sort(rows, axis=1)
    return int(_runs(np.diff(ordered, axis=1) == 1)[0].max())


def _same_share(blocks: Rows) -> float:
    """Share of the pairs of a line that are equal; 0 where there are no pairs."""
    ordered = np.sort(blocks, axis=1)
    counts, _ = _runs(ordered[:, 1:] == ordered[:, :-1])
    return float((counts * (counts - 1)).sum() / max(1, len(blocks) * blocks.shape[1] * (blocks.shape[1] - 1)))


def _sums(rows: Rows) -> NDArray[np.float64]:
    """Sum of `|i - j|` over the pairs of each line: once sorted, number k of b is the larger one of k of its pairs."""
    width = rows.shape[1]
    return np.asarray(np.sort(rows, axis=1) @ (2.0 * np.arange(width) - (width - 1)))


def _within(rows: Rows) -> float | None:
    """Mean distance of two rows of a minibatch; None where minibatches have one row."""
    pairs = rows.shape[1] * (rows.shape[1] - 1) / 2
    return float(_sums(rows).mean() / pairs) if pairs else None


def _across(stretches: list[Rows]) -> float | None:
    """Mean distance of a row and one of the next minibatch; None where no minibatch follows another."""
    both = np.concatenate([np.concatenate([rows[:-1], rows[1:]], axis=1) for rows in stretches])
    if not len(both):
        return None
    b = both.shape[1] // 2
    return float((_sums(both) - _sums(both[:, :b]) - _sums(both[:, b:])).mean() / b**2)


def _scaled(distance: float | None, in_order: float, random: float) -> float | None:
    return None if distance is None or random <= in_order else (distance - in_order) / (random - in_order)
