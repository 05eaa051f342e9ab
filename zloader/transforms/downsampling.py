"""Draws some of the counts of each row. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.checks import require_count
from zloader.common.compiled import compiled
from zloader.common.records import Rows
from zloader.order.permutation import GOLDEN, key_of, mix_word
from zloader.transforms.normalizing import sum_of
from zloader.transforms.transform import RefusedValue, RowValues, Transform

_U64 = np.uint64
_STEP = 2.0**-53
_MOST = 2.0**52  # counts per row: a random number of 53 bits reaches each of them


@compiled
def _is_count(value: Any) -> Any:
    return (value >= 0) & (value <= _MOST) & (np.floor(value) == value)


@compiled
def _downsample(values: NDArray[Any], starts: Rows, counts: int, rows: Rows, key: Any) -> int:
    """Downsamples each row. Returns a row that has values other than counts, or too many, or -1."""
    longest = np.int64(0)
    for row in range(len(starts) - 1):
        longest = max(longest, starts[row + 1] - starts[row])
    at, bounds = np.empty(longest, np.int64), np.empty(longest + 1, np.int64)
    drawn, guide = np.empty(longest, np.int64), np.empty(4 * longest + 2, np.int32)
    for row in range(len(starts) - 1):
        of_row = values[starts[row] : starts[row + 1]]
        fit = True
        for i in range(len(of_row)):
            fit &= _is_count(of_row[i])
        total = sum_of(of_row) if fit else 0.0
        if not fit or total > _MOST:
            return row
        if total <= counts:
            continue
        found, end = 0, np.int64(0)
        for i in range(len(of_row)):  # every value is written, and the next one overwrites it if it is 0
            at[found], bounds[found] = i, end
            end += np.int64(of_row[i])
            found += of_row[i] != 0
        bounds[found] = end
        word = mix_word(key + mix_word(GOLDEN * _U64(rows[row] + 1)))  # type: ignore[arg-type]
        removes = counts > end - counts  # then it is quicker to draw the counts that are removed
        _draw(bounds[: found + 1], end - counts if removes else counts, word, drawn[:found], guide)
        for gene in range(found):
            left = bounds[gene + 1] - bounds[gene] - drawn[gene] if removes else drawn[gene]
            of_row[at[gene]] = left
    return -1


@compiled
def _draw(bounds: Rows, n: Any, word: Any, drawn: Rows, guide: NDArray[np.int32]) -> None:
    """Draws `n` of the counts, at most half of them, without replacement, and writes how many of each gene.

    Count k belongs to the gene with `bounds[gene] <= k < bounds[gene + 1]`. A count that has been drawn is drawn again
    until it is another one. It does not matter which counts of a gene have been drawn, so the first ones stand for
    them. `guide` finds the gene of a count: all counts with the same upper bits begin their search at the same gene.
    """
    n_genes, total = len(bounds) - 1, bounds[-1]
    shift = 0
    while (total >> shift) >= 4 * n_genes:
        shift += 1
    n_upper = (total >> shift) + 1
    guide[: n_upper + 1] = 0
    for gene in range(n_genes):  # marked where a gene begins, or at the next upper bits if it begins between two
        guide[(bounds[gene] + (1 << shift) - 1) >> shift] = gene
    last = np.int32(0)
    for upper in range(n_upper):
        last = max(last, guide[upper])
        guide[upper] = last
    drawn[:] = 0
    left = n
    while left > 0:
        word += GOLDEN
        k = np.int64((mix_word(word) >> _U64(11)) * _STEP * total)
        gene = guide[k >> shift]
        while bounds[gene + 1] <= k:
            gene += 1
        is_new = k - bounds[gene] >= drawn[gene]
        drawn[gene] += is_new
        left -= is_new


@dataclass(frozen=True)
class Downsample(Transform):
    """Draws `counts` of the counts of each row, exactly and without replacement, so that rows have equal totals.

    >>> loader = zl.Loader(dataset, transforms=[zl.transforms.Downsample(100)], layout="dense")
    >>> next(iter(loader)).x.sum(dim=1).max()
    tensor(100.)

    Every choice of `counts` of a row's counts is equally likely, as in scanpy's
    `downsample_counts(counts_per_cell=..., replace=False)`. A row with at most `counts` stays as it is.

    The draws depend on the loader's seed, the epoch, the row of the whole dataset, and the place of the transform in
    its list. They do not depend on batch_size, order, ranks, workers, layout or the chosen genes. Each epoch draws
    anew. Counts are drawn from all genes of the dataset, also those that a panel lacks.

    A fraction, NaN or a negative value raises OptionError in the training loop.
    """

    counts: int

    whole_rows = needs_counts = makes_zeros = True

    def __post_init__(self) -> None:
        require_count(counts=self.counts)
        object.__setattr__(self, "counts", int(self.counts))

    def apply(self, x: RowValues) -> None:
        """Changes the values in place. Raises RefusedValue for values other than counts."""
        row = _downsample(x.values, x.starts, self.counts, x.rows, _U64(key_of(x.seed, x.epoch, x.number)))
        if row >= 0:
            of_row = x.values[x.starts[row] : x.starts[row + 1]].astype(np.float64)
            unfit = of_row[~((of_row >= 0) & (of_row <= _MOST) & (np.floor(of_row) == of_row))]
            raise RefusedValue(
                row,
                unfit[0] if len(unfit) else of_row.sum(),
                "Downsample draws from counts, which are whole numbers of at least 0, up to 2**52 per row: name the "
                "matrix of counts, such as x='layers/counts' or x='raw/X'",
            )
