"""Mean, variance and non-zeros of each gene, from parts of the rows. Pure.

The values other than zero are summed up in two passes over a part, first their mean and then the squares of their
distances from it. Parts are merged as in Chan, Golub and LeVeque (1983), and the zeros are merged last, all at once. No
step subtracts numbers that are nearly equal, so means that are large compared with the variance lose no digits.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.compiled import compiled
from zloader.common.deferred import pd
from zloader.common.errors import OptionError
from zloader.common.messages import listed, suggestion
from zloader.common.records import CsrArrays

Numbers = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class GeneStatistics:
    """Statistics of each gene over some rows; returned by `Dataset.gene_statistics`.

    >>> statistics = dataset.gene_statistics()
    >>> statistics.n_obs, len(statistics.genes)
    (300, 20)
    >>> statistics.to_frame().columns.tolist()
    ['mean', 'variance', 'std', 'nonzero']

    - `genes`: the names of the genes.
    - `mean`, `variance`: float64. The variance is that of a sample (`ddof=1`), as in scanpy.
    - `nonzero`: the rows in which a gene is not zero (int64).
    - `n_obs`: the number of rows.
    """

    genes: pd.Index
    mean: Numbers = field(repr=False)
    variance: Numbers = field(repr=False)
    nonzero: NDArray[np.int64] = field(repr=False)
    n_obs: int

    @property
    def std(self) -> Numbers:
        """The standard deviation: the root of the variance."""
        return np.sqrt(self.variance)

    def to_frame(self) -> pd.DataFrame:
        """A data frame with one row per gene."""
        columns = {name: getattr(self, name) for name in ("mean", "variance", "std", "nonzero")}
        return pd.DataFrame(columns, index=self.genes)

    def of(self, names: pd.Index, where: str) -> GeneStatistics:
        """The statistics of the genes of these names, in this order.

        Raises OptionError for a name that is missing or repeated. `where` says where the names come from.
        """
        if names.equals(self.genes):
            return self
        wrong = names[~names.isin(self.genes) | names.isin(self.genes[self.genes.duplicated()]) | names.duplicated()]
        if len(wrong):
            raise OptionError(
                f"the statistics lack, or have more than once, {len(wrong)} of {len(names)} genes of {where}: "
                f"{listed(wrong, 3)}: compute them from a dataset with these genes, or give arrays, as in "
                f"Scale(mean=..., std=...){suggestion(wrong[0], self.genes)}"
            )
        return self.at(self.genes.get_indexer_for(names))

    def at(self, positions: NDArray[np.int64]) -> GeneStatistics:
        """The statistics of the genes at these positions."""
        of = {name: getattr(self, name)[positions] for name in ("genes", "mean", "variance", "nonzero")}
        return replace(self, **of)


@compiled
def _accumulate(
    values: NDArray[Any], columns: NDArray[np.integer], nonzero: Numbers, mean: Numbers, squares: Numbers
) -> None:
    for i in range(len(values)):
        nonzero[columns[i]] += values[i] != 0
        mean[columns[i]] += values[i]
    for gene in range(len(mean)):
        if nonzero[gene] > 0:
            mean[gene] = np.divide(mean[gene], nonzero[gene])
    for i in range(len(values)):
        if values[i] != 0:
            distance = values[i] - mean[columns[i]]
            squares[columns[i]] += distance * distance


class Moments:
    """The number, mean and squared distances from the mean of each gene's values other than zero, over some rows."""

    def __init__(self, x: CsrArrays) -> None:
        self.n_obs = len(x.indptr) - 1
        self.nonzero, self.mean, self.squares = np.zeros((3, x.n_genes))
        _accumulate(x.values, x.indices, self.nonzero, self.mean, self.squares)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.nonzero.nbytes + self.mean.nbytes + self.squares.nbytes

    def merge(self, other: Moments) -> None:
        """Adds other rows."""
        self.n_obs += other.n_obs
        self._add(other.nonzero, other.mean, other.squares)

    @np.errstate(invalid="ignore")  # of infinite values, whose mean is infinite or NaN
    def _add(self, nonzero: Numbers, mean: Numbers, squares: Numbers) -> None:
        both = self.nonzero + nonzero
        share = np.divide(nonzero, both, out=np.zeros_like(both), where=both > 0)
        distance = mean - self.mean
        self.squares += squares + distance * distance * share * self.nonzero
        self.mean += distance * share
        self.nonzero = both

    def numbers(self) -> Numbers:
        """The means, variances and non-zeros with the zeros, 3 x genes. Nothing may be merged afterwards."""
        nonzero, n_genes = self.nonzero, len(self.mean)
        self._add(self.n_obs - nonzero, np.zeros(n_genes), np.zeros(n_genes))
        with np.errstate(invalid="ignore", divide="ignore"):  # a single row has no variance
            variance = self.squares / (self.n_obs - 1) if self.n_obs > 1 else np.full(n_genes, np.nan)
        return np.stack([self.mean, variance, nonzero])


def statistics_of(numbers: Numbers, genes: pd.Index, n_obs: int) -> GeneStatistics:
    """The statistics that have the numbers of `Moments.numbers`."""
    mean, variance, nonzero = numbers
    return GeneStatistics(genes=genes, mean=mean, variance=variance, nonzero=nonzero.astype(np.int64), n_obs=n_obs)
