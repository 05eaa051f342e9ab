"""Statistics of each gene over the rows of a dataset or view, in one pass through the reading machinery.

The threads that gather rows sum them up, and the sums are merged in the order of the rows, so that the result does not
depend on the threads. In memory are a few arrays of one number per gene, and the rows within FetchOptions.memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pandas as pd

from zloader.caching.directory import MirrorDirectory
from zloader.caching.mirror import load_column, save_column
from zloader.common.options import FetchOptions
from zloader.common.progress import progress_bars
from zloader.common.records import CsrArrays, MinibatchArrays
from zloader.dataset.matrices import Matrices
from zloader.order.plan import Plan
from zloader.order.sampling import Sampling
from zloader.reading.fetch import FetchScheduler
from zloader.reading.forms import Form
from zloader.reading.recipe import Cutting, Recipe
from zloader.reading.resources import BufferPool
from zloader.transforms.statistics import GeneStatistics, Moments
from zloader.transforms.transform import Transform, transforms_of

_VERSION = 1  # of the numbers in the cache
_PART_ROWS = 1024  # rows summed up at once, at least: merging costs a few arrays of n_vars numbers
_PARTS = 16  # per fetch


@dataclass(frozen=True, kw_only=True)
class _Part:
    """The moments of some rows, as an item that a FetchScheduler puts."""

    moments: Moments

    @property
    def nbytes(self) -> int:
        return self.moments.nbytes


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
    directory: MirrorDirectory | None
    options: FetchOptions
    progress: bool

    @property
    def _n_obs(self) -> int:
        return self.sampling.n_rows(self.dataset_rows)

    def statistics(self, x: str, transforms: Sequence[Transform]) -> GeneStatistics:
        """The statistics of all genes of a matrix, from the cache if they are there."""
        parts = self.matrices.parts(x, self.options)
        exact = all(np.can_cast(part.matrix.values.dtype, np.float32, "safe") for part in parts)
        dtype = "float32" if exact else "float64"
        listed = transforms_of(transforms, [x]).get(x, ())
        transforming = self.matrices.transforming(x, listed, dense=False, dtype=dtype)
        genes = self.matrices.gene_names(x)
        name = None
        if all(type(each).__module__.startswith("zloader.transforms.") for each in listed):
            name = f"gene_statistics/{_key(self.fingerprint, x, transforming.transforms, genes)}"
        cached = self._load(name, genes)
        if cached is not None:
            return cached
        recipe = Recipe(
            x={x: parts},
            form=Form(dense=False, dtype=dtype),
            transforms={x: transforming} if listed else {},
            cutting=Cutting(cut=_summed),
            sweeping=self._n_obs == self.dataset_rows,
        )
        found = self._pass(recipe, parts[0].n_columns).statistics(genes)
        self._save(name, found)
        return found

    def _pass(self, recipe: Recipe, n_genes: int) -> Moments:
        plan = Plan(dataset_rows=self.dataset_rows, sampling=self.sampling, batch_size=_PART_ROWS, fetch_factor=_PARTS)
        scheduler, moments = FetchScheduler(recipe, self.options, BufferPool()), Moments(n_genes)
        with progress_bars(shown=self.progress, unit="rows") as bars:
            advance = bars.add("statistics of genes", self._n_obs)
            for part in scheduler.start(plan.fetches(), name="zloader-statistics"):
                moments.merge(part.moments)  # type: ignore[attr-defined]
                advance(part.moments.n_obs)  # type: ignore[attr-defined]
        return moments

    def _load(self, name: str | None, genes: pd.Index) -> GeneStatistics | None:
        if self.directory is None or name is None:
            return None
        stored = load_column(self.directory, name, shape=(3, len(genes)), dtype=np.dtype(np.float64))
        if stored is None:
            return None
        mean, variance, nonzero = np.array(stored)
        n_obs = self._n_obs
        return GeneStatistics(genes=genes, mean=mean, variance=variance, nonzero=nonzero.astype(np.int64), n_obs=n_obs)

    def _save(self, name: str | None, found: GeneStatistics) -> None:
        if self.directory is not None and name is not None:
            stored = np.stack([found.mean, found.variance, found.nonzero.astype(np.float64)])
            save_column(self.directory, name, [stored], shape=stored.shape, dtype=stored.dtype)


def _summed(minibatch: MinibatchArrays, cuts: Sequence[int]) -> list[_Part]:
    (x,) = minibatch.x.values()
    assert isinstance(x, CsrArrays)
    return [_Part(moments=Moments.of(x))]


def _key(fingerprint: str, x: str, transforms: Sequence[Transform], genes: pd.Index) -> str:
    """Names everything that the statistics depend on, in 32 hexadecimal digits."""
    digest = hashlib.sha256(repr((_VERSION, fingerprint, x, [str(gene) for gene in genes])).encode())
    for transform in transforms:
        digest.update(type(transform).__name__.encode())
        for field in fields(transform):  # type: ignore[arg-type]
            value: Any = getattr(transform, field.name)
            digest.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    return digest.hexdigest()[:32]
