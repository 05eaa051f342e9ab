"""Statistics of each gene over the rows of a dataset or view, and the highly variable genes, in one or two passes.

A pass iterates over minibatches in the order of the rows and sums them up as they come, so that the result does not
depend on threads. In memory are a few arrays of one number per gene and batch of rows, and the rows within
FetchOptions.memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from zloader.caching.kept import load_array, save_array
from zloader.common.deferred import pd
from zloader.common.errors import OptionError
from zloader.common.messages import listed, warn_user
from zloader.common.options import FetchOptions
from zloader.common.records import CsrArrays
from zloader.dataset.elements import modality_of
from zloader.dataset.matrices import as_scipy
from zloader.dataset.store import OpenedStore
from zloader.dataset.table import Table
from zloader.order.plan import Plan
from zloader.order.shuffling import Streaming
from zloader.reading.fetch import FetchScheduler
from zloader.reading.forms import Form
from zloader.reading.recipe import Recipe
from zloader.reading.resources import BufferPool
from zloader.selecting.columns import ObsColumn
from zloader.selecting.groups import by_value, groups_of
from zloader.transforms.normalizing import LogNormalize
from zloader.transforms.statistics import GeneStatistics, Moments, Numbers, statistics_of
from zloader.transforms.transform import Transform, transforms_of
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

_VERSION = 3  # of the numbers in the cache
_PART_ROWS = 1024  # rows summed up at once, at least: merging costs a few arrays of n_vars numbers
_PARTS = 16  # per fetch


Sums: TypeAlias = Moments | CountSums  # over rows; parts are merged in the order of the rows
SumUp: TypeAlias = Callable[[CsrArrays, int], Sums]  # of some rows and the number of their batch


class StatisticsPass:
    """A pass over the rows of a dataset or view: a matrix `x` with transforms, by the values of an obs column.

    All genes are summed up, also those that a panel lacks. The cache keeps the result. Raises OptionError for rows
    without a batch and batches of a single row, and the errors of a Loader.
    """

    def __init__(
        self,
        table: Table,
        x: str,
        transforms: Sequence[Transform],
        batch_key: str | None,
        options: FetchOptions | None,
        *,
        progress: bool,
    ) -> None:
        modality = modality_of(x)
        if modality in table.modalities and not (has := table.present(modality)).all():
            raise OptionError(
                f"the modality {modality!r} lacks {np.count_nonzero(~has)} of the {table.n_obs} rows, which would "
                f"count as zeros: take its own with dataset.where(dataset.present({modality!r}))"
            )
        self.table, self.x, self.transforms, self.progress = table, x, transforms, progress
        self.matrices, self.n_obs = table.matrices.of_all_genes, table.n_obs
        self.dataset_rows = table.observations.n_rows
        self.options = options or FetchOptions()
        self.batch_key, self.sizes, self.labels = batch_key, np.array([table.n_obs]), ["these rows"]
        self.batch_of_row: ObsColumn | None = None
        if batch_key is not None:
            self._group_rows(batch_key)

    def _group_rows(self, name: str) -> None:
        """Numbers the batches, which are the values of an obs column, ascending, and those of all rows of the dataset.

        Raises OptionError for rows without a label, and for batches of a single row, which has no variance.
        """
        column = self.table.obs_column
        groups = groups_of([name], column, self.n_obs)
        missing, alone = groups.sizes[~groups.complete].sum(), np.flatnonzero(groups.sizes < 2)
        if missing:
            raise OptionError(
                f"{missing} rows have no batch, because obs column {name!r} has no label there: leave them out, as in "
                f'dataset.where("`{name}`.notna()")'
            )
        if len(alone):
            raise OptionError(
                f"batches of obs column {name!r} that have a single row, and so no variance: "
                f"{groups.listed(alone, column)}. Leave these rows out, or take another column"
            )
        numbers = np.zeros(self.dataset_rows, groups.codes.dtype)
        numbers[self.table._rows_of_whole(np.arange(self.n_obs))] = groups.codes
        self.batch_of_row, self.sizes = ObsColumn(values=numbers), groups.sizes
        self.labels = [f"batch {groups.named(number, column)}" for number in range(len(groups))]

    def statistics(self) -> GeneStatistics:
        """The statistics of all genes over all rows, from the cache if they are there."""
        (numbers,) = self._moments()
        return statistics_of(numbers, self.matrices.gene_names(self.x), self.n_obs)

    def _moments(self) -> Numbers:
        return self._numbers("moments", lambda x, _: Moments(x))

    def _numbers(self, name: str, sum_up: SumUp, title: str = "statistics of genes") -> Numbers:
        """What is summed up in each batch, batches x 3 x genes, from the cache if it is there.

        `name` identifies the result in the cache, and `title` says on a progress bar what is computed.
        """
        recipe, genes = self._recipe(), self.matrices.gene_names(self.x)
        transforms = recipe.transforms[self.x].transforms if recipe.transforms else ()
        directory = self.table.directory
        if directory is None:
            return self._summed(recipe, sum_up, title)
        dependencies = (self.table.fingerprint, self.x, name, self.batch_key, [str(gene) for gene in genes])
        kept, shape = f"gene_statistics/{_key(dependencies, transforms)}", (len(self.sizes), 3, len(genes))
        stored = load_array(directory, kept, shape=shape, dtype=np.dtype(np.float64))
        if stored is not None:
            return np.array(stored)
        found = self._summed(recipe, sum_up, title)
        save_array(directory, kept, [found], shape=shape, dtype=found.dtype)
        return found

    def _recipe(self) -> Recipe:
        x, batches = self.x, {} if self.batch_of_row is None else {str(self.batch_key): self.batch_of_row}
        parts = self.matrices.parts(x, self.options)
        exact = all(np.can_cast(part.matrix.values.dtype, np.float32, "safe") for part in parts)
        dtype = "float32" if exact else "float64"
        listed = transforms_of(self.transforms, [x]).get(x, ())
        transforming = self.matrices.transforming(x, listed, dense=False, dtype=dtype)

        return Recipe(
            x={x: parts},
            form=Form(dense=False, dtype=dtype),
            transforms={x: transforming} if listed else {},
            obs=lambda: batches,
            sweeps=self.n_obs == self.dataset_rows,
        )

    def _summed(self, recipe: Recipe, sum_up: SumUp, title: str) -> Numbers:
        from zloader.common.progress import progress_bars  # imports rich

        order = self.table.ordered(Streaming(), batch_size=_PART_ROWS, fetch_rows=_PART_ROWS * _PARTS)
        plan = Plan(order=order, batch_size=_PART_ROWS, fetch_factor=_PARTS)
        scheduler = FetchScheduler(recipe, self.options, BufferPool())
        merged: dict[int, Any] = {}
        with progress_bars(shown=self.progress, unit="rows") as bars:
            advance = bars.add(title, self.n_obs)
            for minibatch in scheduler.start(plan.fetches(), name="zloader-statistics"):
                (part,) = minibatch.x.values()
                assert isinstance(part, CsrArrays)
                advance(len(minibatch.index))
                parts = [(0, part)]
                if self.batch_of_row is not None:
                    numbers: Any = minibatch.obs[str(self.batch_key)]
                    parts = [(batch, _rows_of(part, rows)) for batch, rows in by_value(numbers)]
                for batch, of_batch in parts:
                    sums = sum_up(of_batch, batch)
                    if merged.setdefault(batch, sums) is not sums:
                        merged[batch].merge(sums)
        none, n_genes = np.zeros(0, np.int32), self.matrices.n_genes(self.x)
        no_rows = CsrArrays(indptr=np.zeros(1, np.int64), indices=none, values=none.astype(np.float32), n_genes=n_genes)
        return np.stack([(merged.get(batch) or sum_up(no_rows, batch)).numbers() for batch in range(len(self.sizes))])

    # ---- highly variable genes

    def variable_genes(self, choosing: Choosing) -> pd.DataFrame:
        """The table of the genes that may be chosen: all, or those of a panel.

        Raises OptionError for fewer than two rows, and the errors of zloader.transforms.variable_genes.
        """
        if self.n_obs < 2:
            raise OptionError(f"highly variable genes need at least 2 rows, and there are {self.n_obs}")
        genes = self.table.matrices.chosen(self.x)
        at: Any = slice(None) if genes is None else genes.positions
        names = self.matrices.gene_names(self.x)[at]
        if choosing.of_counts:
            return self._of_counts(choosing, at, names)
        if choosing.flavor == "seurat":
            base = _base(self.transforms, self.table.stores)
            factor = None if base is None else np.log(base)
            moments = self._numbers(f"moments of expm1 {factor}", partial(_exponentials, factor))[:, :, at]
        else:
            moments = self._moments()[:, :, at]
        self._require_finite(moments, names)
        if self.batch_key is None:
            return dispersions(moments[0], choosing, names)
        return dispersions_of_batches(moments, choosing, names)

    def _require_finite(self, numbers: Numbers, names: pd.Index) -> None:
        wrong = np.flatnonzero(~np.isfinite(numbers[:, 0]).all(axis=0))
        if len(wrong):
            raise OptionError(
                f"{self.x} has values that are NaN or infinite, in {len(wrong)} genes such as {names[wrong[0]]!r}: "
                "correct them, or choose among other genes, as in dataset[:, genes].highly_variable_genes(...)"
            )

    def _of_counts(self, choosing: Choosing, at: Any, names: pd.Index) -> pd.DataFrame:
        load_loess()  # before the pass, which may take long
        sums = self._numbers("sums of counts", lambda x, _: CountSums(x))[:, :, at]
        self._require_finite(sums, names)
        if sums[:, 2].any():
            warn_user("flavor='seurat_v3' expects counts, but some values are negative or no whole numbers")
        of_batches = list(zip(sums, self.sizes.tolist(), strict=True))
        labelled = zip(of_batches, self.labels, strict=True)
        stds = np.stack([expected_std(*each, choosing.span, label) for each, label in labelled])
        limits = np.full((len(stds), self.matrices.n_genes(self.x)), np.inf)  # genes that may not be chosen have none
        limits[:, at] = [clip_limits(*each, std) for each, std in zip(of_batches, stds, strict=True)]
        name = f"clipped counts {hashlib.sha256(limits.tobytes()).hexdigest()}"
        clipped = self._numbers(name, lambda x, batch: CountSums(x, limits[batch]), "clipped counts")[:, :, at]
        table = table_of_counts(sums, clipped, stds, self.sizes, names, choosing)
        return table if self.batch_key is not None else table.drop(columns="highly_variable_nbatches")


def _key(dependencies: Any, transforms: Sequence[Transform]) -> str:
    """Names everything that the statistics depend on, in 32 hexadecimal digits."""
    described = [
        (type(each).__name__, {field.name: _described(getattr(each, field.name)) for field in fields(each)})  # type: ignore[arg-type]
        for each in transforms
    ]
    return hashlib.sha256(repr((_VERSION, dependencies, described)).encode()).hexdigest()[:32]


def _described(value: Any) -> Any:
    if isinstance(value, np.ndarray):  # whose repr leaves numbers out
        return value.dtype.str, value.shape, hashlib.sha256(value.tobytes()).hexdigest()
    return value


def _rows_of(x: CsrArrays, rows: Any) -> CsrArrays:
    chosen = as_scipy(x)[rows]
    return replace(x, indptr=chosen.indptr, indices=chosen.indices, values=chosen.data)


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


def _exponentials(factor: float | None, x: CsrArrays, _: int) -> Moments:
    """Moments of exp(x) - 1, or of exp(factor * x) - 1. Raises OptionError for values too large to be logarithms."""
    values: Any = x.values
    with np.errstate(over="ignore"):
        powers = np.expm1(values if factor is None else values * values.dtype.type(factor))
    powers[~np.isfinite(values)] = np.nan
    if np.isinf(powers).any():
        raise OptionError(
            f"flavor='seurat' takes logarithms, and {np.nanmax(values):g} is none, because its exponential overflows: "
            "for counts, give transforms=[zl.transforms.LogNormalize(1e4)]"
        )
    return Moments(replace(x, values=powers))
