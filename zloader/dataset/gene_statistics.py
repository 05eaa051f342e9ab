"""Statistics of each gene over the rows of a dataset or view, in one pass through the reading machinery.

Highly variable genes are chosen by the sums of one or two passes.

The threads that gather rows sum them up, and the sums are merged in the order of the rows, so that the result does not
depend on the threads. In memory are a few arrays of one number per gene and batch of rows, and the rows within
FetchOptions.memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zloader.caching.directory import MirrorDirectory
from zloader.caching.mirror import load_column, save_column
from zloader.common.deferred import pd
from zloader.common.errors import OptionError
from zloader.common.messages import listed, warn_user
from zloader.common.options import FetchOptions
from zloader.common.records import CsrArrays, MinibatchArrays
from zloader.dataset.in_memory import as_scipy
from zloader.dataset.matrices import Matrices
from zloader.dataset.store import OpenedStore
from zloader.order.plan import Plan
from zloader.order.sampling import Sampling
from zloader.reading.fetch import FetchScheduler
from zloader.reading.forms import Form
from zloader.reading.recipe import Cutting, Recipe, RowColumns
from zloader.reading.resources import BufferPool
from zloader.selecting.columns import ObsColumn, is_time
from zloader.selecting.genes import ChosenGenes
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

_VERSION = 2  # of the numbers in the cache
_PART_ROWS = 1024  # rows summed up at once, at least: merging costs a few arrays of n_vars numbers
_PARTS = 16  # per fetch


class Sums(Protocol):
    """What is summed up over rows. Parts are merged in the order of the rows."""

    n_obs: int

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""

    def merge(self, other: Any) -> None:
        """Adds other rows."""

    def numbers(self) -> Numbers:
        """The result, 3 x genes. Nothing may be merged afterwards."""


@dataclass(frozen=True, kw_only=True)
class Summing:
    """How rows are summed up: `of` takes some rows and the number of their batch.

    `name` identifies the result in the cache, and `title` says on a progress bar what is computed.
    """

    name: str
    of: Callable[[CsrArrays, int], Sums]
    title: str = "statistics of genes"


MOMENTS = Summing(name="moments", of=lambda x, _: Moments.of(x))


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The rows by the values of an obs column, or all rows as one batch.

    `values` are those of the batches, ascending, `labels` what they stand for, and `n_obs` the numbers of their rows.
    `find_column` returns the column of all rows of the dataset.
    """

    n_obs: NDArray[np.int64]
    name: str | None = None
    values: NDArray[Any] | None = None
    labels: Sequence[Any] = ()
    find_column: Callable[[], ObsColumn] | None = None

    @property
    def numbers(self) -> range:
        """The numbers of the batches."""
        return range(len(self.n_obs))

    @property
    def columns(self) -> RowColumns:
        """The column as a Recipe takes it."""
        find = self.find_column
        return RowColumns() if find is None else RowColumns(obs=lambda: {str(self.name): find()})

    def split(self, minibatch: MinibatchArrays) -> Iterator[tuple[int, CsrArrays]]:
        """The number of each batch that has some of these rows, and its rows."""
        (x,) = minibatch.x.values()
        assert isinstance(x, CsrArrays)
        found = {0: slice(None)} if self.values is None else _places(self.values, minibatch.obs[str(self.name)])
        if len(found) == 1:
            yield next(iter(found)), x
            return
        for number, rows in found.items():
            chosen = as_scipy(x)[rows]
            yield number, replace(x, indptr=chosen.indptr, indices=chosen.indices, values=chosen.data)


def _places(values: NDArray[Any], of_rows: NDArray[Any]) -> dict[int, Any]:
    """The rows that have each of some ascending values, by the number of the value. Dates of rows are int64."""
    numbers = np.searchsorted(values.view(np.int64) if is_time(values.dtype) else values, of_rows)
    return {int(number): np.flatnonzero(numbers == number) for number in np.unique(numbers)}


@dataclass(frozen=True, kw_only=True)
class _Part:
    """The sums of some rows by the number of their batch, as an item that a FetchScheduler puts."""

    sums: Mapping[int, Sums]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.sums.values())


@dataclass(frozen=True, kw_only=True)
class StatisticsPass:
    """A pass over the rows of a dataset or view in a sampling of all `dataset_rows` rows that yields them in order.

    `fingerprint` is that of the dataset or view. `directory` is where the cache keeps the result, or None. It keeps
    none with transforms of the user's own, because nothing tells when their code changes. Raises OptionError for
    transforms that do not fit.
    """

    matrices: Matrices
    fingerprint: str
    dataset_rows: int
    sampling: Sampling
    batches: Batches
    directory: MirrorDirectory | None
    options: FetchOptions
    progress: bool

    @property
    def n_obs(self) -> int:
        """The number of rows."""
        return self.sampling.n_rows(self.dataset_rows)

    def statistics(self, x: str, transforms: Sequence[Transform]) -> GeneStatistics:
        """The statistics of all genes of a matrix over all rows, from the cache if they are there."""
        (numbers,) = self.numbers(x, transforms, MOMENTS)
        return statistics_of(numbers, self.matrices.gene_names(x), self.n_obs)

    def numbers(self, x: str, transforms: Sequence[Transform], summing: Summing) -> Numbers:
        """What is summed up of a matrix in each batch, batches x 3 x genes, from the cache if it is there."""
        recipe, n_genes = self._recipe(x, transforms, summing), self.matrices.n_genes(x)
        shape, kept = (len(self.batches.n_obs), 3, n_genes), self._kept(x, recipe, summing)
        stored = None if kept is None else load_column(*kept, shape=shape, dtype=np.dtype(np.float64))
        if stored is not None:
            return np.array(stored)
        found = self._summed(recipe, summing, n_genes)
        if kept is not None:
            save_column(*kept, [found], shape=shape, dtype=found.dtype)
        return found

    def _kept(self, x: str, recipe: Recipe, summing: Summing) -> tuple[MirrorDirectory, str] | None:
        """The directory in which the cache keeps the result, and its name there; None if it keeps none."""
        transforms = recipe.transforms[x].transforms if x in recipe.transforms else ()
        own = not all(type(each).__module__.startswith("zloader.transforms.") for each in transforms)
        if self.directory is None or own:
            return None
        genes = [str(gene) for gene in self.matrices.gene_names(x)]
        dependencies = (self.fingerprint, x, summing.name, self.batches.name, genes)
        return self.directory, f"gene_statistics/{_key(dependencies, transforms)}"

    def _recipe(self, x: str, transforms: Sequence[Transform], summing: Summing) -> Recipe:
        parts = self.matrices.parts(x, self.options)
        exact = all(np.can_cast(part.matrix.values.dtype, np.float32, "safe") for part in parts)
        dtype = "float32" if exact else "float64"
        listed = transforms_of(transforms, [x]).get(x, ())
        transforming = self.matrices.transforming(x, listed, dense=False, dtype=dtype)

        def cut(minibatch: MinibatchArrays, cuts: Sequence[int]) -> list[_Part]:
            return [_Part(sums={batch: summing.of(rows, batch) for batch, rows in self.batches.split(minibatch)})]

        return Recipe(
            x={x: parts},
            form=Form(dense=False, dtype=dtype),
            transforms={x: transforming} if listed else {},
            columns=self.batches.columns,
            cutting=Cutting(cut=cut, grows=len(self.batches.n_obs) > 1),
            sweeping=self.n_obs if self.n_obs == self.dataset_rows else 0,
        )

    def _summed(self, recipe: Recipe, summing: Summing, n_genes: int) -> Numbers:
        from zloader.common.progress import progress_bars  # imports rich

        plan = Plan(dataset_rows=self.dataset_rows, sampling=self.sampling, batch_size=_PART_ROWS, fetch_factor=_PARTS)
        scheduler = FetchScheduler(recipe, self.options, BufferPool())
        merged: dict[int, Sums] = {}
        with progress_bars(shown=self.progress, unit="rows") as bars:
            advance = bars.add(summing.title, self.n_obs)
            for part in scheduler.start(plan.fetches(), name="zloader-statistics"):
                for batch, sums in part.sums.items():  # type: ignore[attr-defined]
                    advance(sums.n_obs)
                    if merged.setdefault(batch, sums) is not sums:
                        merged[batch].merge(sums)
        of_batches = (merged.get(batch) or summing.of(_no_rows(n_genes), batch) for batch in self.batches.numbers)
        return np.stack([sums.numbers() for sums in of_batches])


def _no_rows(n_genes: int) -> CsrArrays:
    none = np.zeros(0, np.int32)
    return CsrArrays(indptr=np.zeros(1, np.int64), indices=none, values=none.astype(np.float32), n_genes=n_genes)


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


# ---- highly variable genes


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
        return self.rows.matrices.gene_names(self.x)[self._at]

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
                "for counts, give transforms=[zl.transforms.LogNormalize(1e4)]"
            )
        return Moments.of(replace(x, values=powers))

    return Summing(name=f"moments of expm1 {factor}", of=of)
