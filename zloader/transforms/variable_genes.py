"""Highly variable genes from sums over the rows of each batch, as `scanpy.pp.highly_variable_genes` finds them. Pure.

`seurat_v3` (Stuart et al. 2019) fits the variance of counts by their mean, clips counts at what the fit expects, and
ranks genes by the variance of the clipped and scaled counts. The clipped counts are summed up in a second pass. Sums of
counts are exact, so genes with the same counts are tied here as they are in scanpy. `seurat` (Satija et al. 2015) and
`cell_ranger` (Zheng et al. 2017) compare the dispersion, variance by mean, of genes whose means are in the same bin.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.checks import is_number, require_at_least, require_count, require_one_of
from zloader.common.compiled import compiled
from zloader.common.deferred import pd
from zloader.common.errors import OptionError
from zloader.common.records import CsrArrays
from zloader.transforms.statistics import Numbers

FLAVORS = ("seurat_v3", "seurat", "cell_ranger")
_LEAST = 3  # genes in a local fit of a parabola: with fewer than one, scikit-misc crashes
_MAD = 0.6744897501960817  # median of the absolute values of the standard normal distribution


@dataclass(frozen=True, kw_only=True)
class Choosing:
    """Which genes are highly variable: the parameters of scanpy, with their defaults. Raises OptionError."""

    n_top_genes: int | None = 2000
    flavor: str = "seurat_v3"
    span: float = 0.3
    n_bins: int = 20
    min_mean: float = 0.0125
    max_mean: float = 3
    min_disp: float = 0.5
    max_disp: float = math.inf

    def __post_init__(self) -> None:
        require_one_of(FLAVORS, flavor=self.flavor)
        require_count(n_bins=self.n_bins)
        names = ("min_mean", "max_mean", "min_disp", "max_disp")
        require_at_least(-math.inf, **{name: getattr(self, name) for name in names})
        if not is_number(self.span) or not 0 < self.span <= 1:
            raise OptionError(f"span is a share of the genes, above 0 and at most 1, not {self.span!r}")
        if self.n_top_genes is not None:
            require_count(n_top_genes=self.n_top_genes)
        elif self.of_counts:
            raise OptionError("flavor='seurat_v3' ranks genes: say how many to choose, as in n_top_genes=2000")

    @property
    def of_counts(self) -> bool:
        """Whether it takes counts rather than their logarithms."""
        return self.flavor == "seurat_v3"


# ---- seurat_v3


@compiled
def _add(values: NDArray[Any], columns: NDArray[np.integer], limits: Numbers, sums: Numbers) -> None:
    for i in range(len(values)):
        value = min(np.float64(values[i]), limits[columns[i]])
        sums[0, columns[i]] += value
        sums[1, columns[i]] += value * value
        sums[2, columns[i]] += value < 0 or value != np.floor(value)


class CountSums:
    """The sums of each gene's values and of their squares, and the number of values that are no counts."""

    def __init__(self, x: CsrArrays, limits: Numbers | None = None) -> None:
        """Of some rows, with values above the limit of their gene taken as the limit."""
        self.n_obs = len(x.indptr) - 1
        self._sums = np.zeros((3, x.n_genes))
        _add(x.values, x.indices, np.full(x.n_genes, np.inf) if limits is None else limits, self._sums)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self._sums.nbytes

    def merge(self, other: CountSums) -> None:
        """Adds other rows."""
        self.n_obs += other.n_obs
        self._sums += other._sums

    def numbers(self) -> Numbers:
        """The three arrays, 3 x genes."""
        return self._sums


def means_and_variances(sums: Numbers, n_obs: int) -> tuple[Numbers, Numbers]:
    """Those of each gene from CountSums over `n_obs` rows."""
    mean = sums[0] / n_obs
    return mean, (sums[1] / n_obs - mean**2) * (n_obs / (n_obs - 1))


def load_loess() -> Any:
    """The local regression of scikit-misc. Raises OptionError if it is not installed."""
    try:
        from skmisc.loess import loess
    except ImportError as error:
        raise OptionError("flavor='seurat_v3' needs scikit-misc: run: pip install \"zloader[genes]\"") from error
    return loess


def expected_std(sums: Numbers, n_obs: int, span: float, where: str) -> Numbers:
    """The standard deviation that a gene of this mean should have, by a local regression (loess) over all genes.

    Raises OptionError if the regression fails; `where` names the rows.
    """
    mean, variance = means_and_variances(sums, n_obs)
    varies = variance > 0
    fitted = np.zeros(len(mean))
    try:
        if span * varies.sum() < _LEAST:
            raise ValueError("there are too few genes for a local fit")
        model = load_loess()(np.log10(mean[varies]), np.log10(variance[varies]), span=span, degree=2)
        model.fit()
    except ValueError as error:
        why = error.args[0].decode() if isinstance(error.args[0], bytes) else error  # C code says it in bytes
        raise OptionError(
            f"the loess of flavor='seurat_v3' fails for {where}, in which {varies.sum()} genes vary ({why}): give a "
            f"span above {span:g}, leave these rows out, or take another flavor"
        ) from error
    fitted[varies] = model.outputs.fitted_values
    return np.asarray(np.sqrt(10**fitted))


def clip_limits(sums: Numbers, n_obs: int, std: Numbers) -> Numbers:
    """The count at which each gene is clipped."""
    return np.asarray(std * np.sqrt(n_obs) + sums[0] / n_obs)


def _scaled_variance(sums: Numbers, clipped: Numbers, n_obs: int, std: Numbers) -> Numbers:
    mean = sums[0] / n_obs
    squares = n_obs * np.square(mean) + clipped[1] - 2 * clipped[0] * mean
    return np.asarray((1 / ((n_obs - 1) * np.square(std))) * squares)


def table_of_counts(
    sums: Numbers, clipped: Numbers, stds: Numbers, n_obs: NDArray[np.int64], genes: pd.Index, choosing: Choosing
) -> pd.DataFrame:
    """The table of seurat_v3, from sums with and without clipping and the expected deviations of each batch."""
    n_top = choosing.n_top_genes
    assert n_top is not None
    scaled = np.stack([_scaled_variance(*each) for each in zip(sums, clipped, n_obs.tolist(), stds, strict=True)])
    # Ranks of ties are those of scanpy only if they are sorted with the same algorithm.
    ranks = np.argsort(np.argsort(-scaled, axis=1), axis=1).astype(np.float32)
    among_top = ranks < n_top
    rank = np.ma.median(np.ma.masked_array(ranks, ~among_top), axis=0).filled(np.nan)  # type: ignore[no-untyped-call]
    n_batches = among_top.sum(axis=0)
    means, variances = means_and_variances(sums.sum(axis=0), int(n_obs.sum()))
    table = {"means": means, "variances": variances, "gene_name": genes, "highly_variable_nbatches": n_batches}
    table |= {"highly_variable_rank": rank, "variances_norm": scaled.mean(axis=0)}
    return pd.DataFrame(table | {"highly_variable": _first(np.lexsort((-n_batches, rank)), n_top)}, index=genes)


def _first(order: NDArray[np.int64], n: int) -> NDArray[np.bool_]:
    """Which genes are among the first `n` of an order."""
    chosen = np.zeros(len(order), bool)
    chosen[order[:n]] = True
    return chosen


# ---- seurat and cell_ranger


def dispersions(moments: Numbers, choosing: Choosing, genes: pd.Index) -> pd.DataFrame:
    """The table of the dispersion flavors, from the numbers of Moments over the rows of one batch.

    Raises OptionError for means that are too alike to be put into bins.
    """
    mean, variance, _ = moments
    mean = np.where(mean == 0, 1e-12, mean)
    dispersion = variance / mean
    if choosing.flavor == "seurat":
        with np.errstate(divide="ignore", invalid="ignore"):
            dispersion = np.log(np.where(dispersion == 0, np.nan, dispersion))
            mean = np.log1p(mean)
    table = pd.DataFrame({"means": mean, "dispersions": dispersion})
    table["mean_bin"] = _bins(table["means"], choosing)
    table["dispersions_norm"] = _scaled_dispersions(table["dispersions"], table["mean_bin"].cat.codes, choosing.flavor)
    table["highly_variable"] = _chosen(table, choosing)
    return table.set_axis(genes)


def _bins(means: pd.Series, choosing: Choosing) -> pd.Series:
    if choosing.flavor == "seurat":
        return pd.cut(means, choosing.n_bins).cat.rename_categories(str)
    edges = np.r_[-np.inf, np.percentile(means, np.arange(10, 105, 5)), np.inf]
    if len(np.unique(edges)) < len(edges):
        raise OptionError(
            "flavor='cell_ranger' puts genes into 20 bins by their means, but too many means are the same: choose "
            "among genes that more rows have, as in dataset[:, dataset.gene_statistics().nonzero >= 10]"
        )
    return pd.cut(means, edges).cat.rename_categories(str)


def _scaled_dispersions(found: pd.Series, bins: pd.Series, flavor: str) -> pd.Series:
    """Distances from the average of their bin in units of its spread."""
    if flavor == "cell_ranger":
        distance = found - found.groupby(bins).transform("median")
        return distance / (distance.abs().groupby(bins).transform("median") / _MAD)
    average, spread = (found.groupby(bins).transform(name) for name in ("mean", "std"))
    alone = spread.isna()  # a single gene in a bin gets 1
    return (found - average.where(~alone, 0)) / spread.where(~alone, average)


def _chosen(table: pd.DataFrame, choosing: Choosing) -> NDArray[np.bool_]:
    scaled = table["dispersions_norm"].to_numpy()
    if choosing.n_top_genes is None:
        return _within(table["means"].to_numpy(), np.nan_to_num(scaled), choosing)
    known = np.sort(scaled[~np.isnan(scaled)])[::-1][: choosing.n_top_genes]
    return np.asarray(np.nan_to_num(scaled, nan=-np.inf) >= (known[-1] if len(known) else np.inf))


def _within(mean: Numbers, scaled: Numbers, choosing: Choosing) -> NDArray[np.bool_]:
    above = (mean > choosing.min_mean) & (scaled > choosing.min_disp)
    return np.asarray(above & (mean < choosing.max_mean) & (scaled < choosing.max_disp))


def dispersions_of_batches(moments: Numbers, choosing: Choosing, genes: pd.Index) -> pd.DataFrame:
    """The same from several batches: each has its own table, of the genes that it expresses, and they are averaged.

    The first genes are those chosen in most batches, then those of the largest scaled dispersion, then by name.
    """
    tables = [_of_expressed(each, choosing, genes) for each in moments]
    table = pd.DataFrame(index=genes)
    for name in ("means", "dispersions", "dispersions_norm"):
        table[name] = _average([each[name].to_numpy() for each in tables])
    n_batches = np.sum([each["highly_variable"].to_numpy() for each in tables], axis=0)
    if choosing.n_top_genes is None:
        table["dispersions_norm"] = table["dispersions_norm"].fillna(0)
        chosen = _within(table["means"].to_numpy(), table["dispersions_norm"].to_numpy(), choosing)
    else:
        names = pd.factorize(genes, sort=True)[0]
        chosen = _first(np.lexsort((names, -table["dispersions_norm"], -n_batches)), choosing.n_top_genes)
    table["highly_variable"], table["highly_variable_nbatches"] = chosen, n_batches
    table["highly_variable_intersection"] = n_batches == len(tables)
    return table


def _of_expressed(moments: Numbers, choosing: Choosing, genes: pd.Index) -> pd.DataFrame:
    expressed = np.flatnonzero(moments[2])
    numbers = np.zeros((len(genes), 3))
    table = pd.DataFrame(numbers, columns=["means", "dispersions", "dispersions_norm"])
    table["highly_variable"] = False
    if len(expressed):
        found = dispersions(moments[:, expressed], choosing, genes[expressed])
        for name in table:
            table.iloc[expressed, table.columns.get_loc(name)] = found[name].to_numpy()
    return table


def _average(columns: Sequence[Numbers]) -> Numbers:
    """The average of each gene's numbers that are not missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # all of them are missing
        return np.asarray(np.nanmean(columns, axis=0))
