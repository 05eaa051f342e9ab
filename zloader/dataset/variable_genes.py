"""`dataset.highly_variable_genes`: one or two passes over the rows, and the table that they give."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from zloader.common.deferred import pd
from zloader.common.errors import OptionError
from zloader.common.messages import listed, warn_user
from zloader.common.records import CsrArrays
from zloader.dataset.gene_statistics import MOMENTS, Batches, StatisticsPass, Summing
from zloader.dataset.store import OpenedStore
from zloader.selecting.columns import ObsColumn
from zloader.selecting.genes import ChosenGenes
from zloader.transforms.normalizing import LogNormalize
from zloader.transforms.statistics import Moments, Numbers
from zloader.transforms.transform import Transform
from zloader.transforms.variable_genes import (
    Choosing,
    CountSums,
    clip_limits,
    dispersions,
    dispersions_of_batches,
    expected_std,
    load_loess,
    table_of_counts,
)


def batches_of(name: str, of_rows: ObsColumn, find_column: Callable[[], ObsColumn]) -> Batches:
    """The batches of some rows by an obs column.

    Raises OptionError for rows without a label, and for batches of a single row, which has no variance.
    """
    values, n_obs = np.unique(of_rows.values, return_counts=True)
    missing = values == -1 if of_rows.categories is not None else pd.isna(values)
    if missing.any():
        raise OptionError(
            f"{n_obs[missing].sum()} rows have no batch, because obs column {name!r} has no label there: leave them "
            f"out, as in dataset[dataset.obs[{name!r}].notna()]"
        )
    labels = values if of_rows.categories is None else of_rows.categories[values]
    if (n_obs < 2).any():
        alone = labels[n_obs < 2]
        raise OptionError(
            f"batches of obs column {name!r} that have a single row, and so no variance: {listed(alone, 3)}. Leave "
            "these rows out, or take another column"
        )
    return Batches(n_obs=n_obs, name=name, values=values, labels=list(labels), find_column=find_column)


@dataclass(frozen=True, kw_only=True)
class VariableGenes:
    """A pass over rows, of a matrix with transforms, and those of its genes that may be chosen (None for all).

    `stores` say of which base the logarithms are.
    """

    rows: StatisticsPass
    x: str
    transforms: Sequence[Transform]
    genes: ChosenGenes | None
    stores: Iterable[OpenedStore]

    def table(self, choosing: Choosing) -> pd.DataFrame:
        """The table of these genes.

        Raises OptionError for fewer than two rows, and the errors of the pass and of zloader.transforms.variable_genes.
        """
        if self.rows.n_obs < 2:
            raise OptionError(f"highly variable genes need at least 2 rows, and there are {self.rows.n_obs}")
        if choosing.of_counts:
            return self._of_counts(choosing)
        of_log = choosing.flavor == "seurat"
        moments = self._numbers(_exponentials(_base(self.transforms, self.stores)) if of_log else MOMENTS)
        if self.rows.batches.name is None:
            return dispersions(moments[0], choosing, self._names)
        return dispersions_of_batches(moments, choosing, self._names)

    def _of_counts(self, choosing: Choosing) -> pd.DataFrame:
        load_loess()  # before the pass, which may take long
        batches = self.rows.batches
        sums = self._numbers(Summing(name="sums of counts", of=lambda x, _: CountSums(x)))
        if sums[:, 2].any():
            warn_user("flavor='seurat_v3' expects counts, but some values are negative or no whole numbers")
        of_batches = list(zip(sums, batches.n_obs.tolist(), strict=True))
        where = [f"batch {label}" for label in batches.labels] or ["these rows"]
        stds = np.stack([expected_std(*each, choosing.span, at) for each, at in zip(of_batches, where, strict=True)])
        limits = np.stack([clip_limits(*each, std) for each, std in zip(of_batches, stds, strict=True)])
        clipped = self._numbers(_clipping(self._spread(limits)))
        table = table_of_counts(sums, clipped, stds, batches.n_obs, self._names, choosing)
        return table if batches.name is not None else table.drop(columns="highly_variable_nbatches")

    @property
    def _names(self) -> pd.Index:
        return self.rows.matrices.gene_names(self.x, self.genes)

    @property
    def _at(self) -> Any:
        return slice(None) if self.genes is None else self.genes.positions

    def _numbers(self, summing: Summing) -> Numbers:
        return self.rows.numbers(self.x, self.transforms, summing)[:, :, self._at]

    def _spread(self, limits: Numbers) -> Numbers:
        """The limits of all genes of the matrix. Genes that may not be chosen have none."""
        of_all = np.full((len(limits), self.rows.matrices.n_genes(self.x)), np.inf)
        of_all[:, self._at] = limits
        return of_all


def _clipping(limits: Numbers) -> Summing:
    """Sums of counts that are clipped at limits, batches x genes."""
    name = f"clipped counts {hashlib.sha256(limits.tobytes()).hexdigest()}"
    return Summing(name=name, of=lambda x, batch: CountSums(x, limits[batch]), title="clipped counts")


def _base(transforms: Sequence[Transform], stores: Iterable[OpenedStore]) -> float | None:
    """The base of the logarithms: that of the last LogNormalize, or else what scanpy has noted in uns. None is e."""
    for transform in reversed(transforms):
        if isinstance(transform, LogNormalize):
            return transform.base
    path = "uns/log1p/base"
    bases = {store.element(path) if path in store else None for store in stores}
    if len(bases) > 1:
        raise OptionError(f"the logarithms of the stores have different bases ({listed(bases)}): convert them anew")
    return next((None if base is None else float(base) for base in bases), None)


def _exponentials(base: float | None) -> Summing:
    """Moments of exp(x) - 1, or of base**x - 1. Raises OptionError for values too large to be logarithms."""
    factor = None if base is None else np.log(base)

    def of(x: CsrArrays, _: int) -> Moments:
        values: Any = x.values
        with np.errstate(over="ignore"):
            powers = np.expm1(values if factor is None else values * values.dtype.type(factor))
        if np.isinf(powers).any():
            raise OptionError(
                f"flavor='seurat' takes logarithms, and {values.max():g} is none, because its exponential overflows: "
                "for counts, give transforms=[zl.transforms.LogNormalize(1e4)], or --log-normalize 1e4"
            )
        return Moments.of(replace(x, values=powers))

    return Summing(name=f"moments of expm1 {factor}", of=of)
