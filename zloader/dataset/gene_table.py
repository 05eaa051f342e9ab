"""The genes of a table: their means and variances over all rows, and the highly variable ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from zloader.common.deferred import pd
from zloader.common.errors import OptionError
from zloader.common.options import FetchOptions
from zloader.dataset.gene_statistics import Batches, StatisticsPass
from zloader.dataset.modalities import modality_of
from zloader.dataset.table import Table
from zloader.dataset.variable_genes import VariableGenes, batches_of
from zloader.order.shuffling import Streaming
from zloader.selecting.genes import Genes
from zloader.transforms.statistics import GeneStatistics
from zloader.transforms.transform import Transform
from zloader.transforms.variable_genes import Choosing

_DEFAULTS = FetchOptions()


class GeneTable(Table):
    """A Table with statistics of its genes."""

    def gene_statistics(
        self,
        x: str = "X",
        *,
        genes: Genes | None = None,
        transforms: Sequence[Transform] = (),
        options: FetchOptions | None = None,
        progress: bool = True,
    ) -> GeneStatistics:
        """Mean, variance and non-zeros of each gene over all rows, in one pass. For zl.transforms.Scale.

        >>> import zloader as zl
        >>> dataset = zl.open_dataset("atlas.zarr")
        >>> statistics = dataset.gene_statistics(transforms=[zl.transforms.LogNormalize(1e4)])
        >>> statistics.n_obs, statistics.mean.shape
        (1000, (50,))

        - `x`: the matrix, `"X"`, `"layers/NAME"` or `"raw/X"`.
        - `genes`: the genes to return, as a Loader takes them.
        - `transforms`: applied before, as by a Loader with seed 0 in epoch 0; those that keep zeros zero. They see all
          genes, also those that a panel `dataset[:, genes]` lacks.
        - `options`: the options of a Loader for reading.
        - `progress`: whether to draw a progress bar if stderr is a terminal.

        Sums are in float64. The cache keeps the result for these rows, this matrix and these transforms. Raises the
        errors of a Loader with the same arguments.
        """
        chosen = self.matrices.choose_genes(genes, [x]).get(x)
        found = self._pass(x, None, options, progress).statistics(x, transforms)
        return found if chosen is None else found.at(chosen.positions)

    def highly_variable_genes(  # noqa: PLR0913 - all but one are keyword-only, and those of scanpy
        self,
        n_top_genes: int | None = Choosing.n_top_genes,
        *,
        flavor: str = Choosing.flavor,
        batch_key: str | None = None,
        x: str = "X",
        genes: Genes | None = None,
        transforms: Sequence[Transform] = (),
        span: float = Choosing.span,
        n_bins: int = Choosing.n_bins,
        min_mean: float = Choosing.min_mean,
        max_mean: float = Choosing.max_mean,
        min_disp: float = Choosing.min_disp,
        max_disp: float = Choosing.max_disp,
        options: FetchOptions | None = None,
        progress: bool = True,
    ) -> pd.DataFrame:
        """The table of `scanpy.pp.highly_variable_genes(inplace=False)`, with a row per gene, without x in memory.

        >>> import zloader as zl
        >>> dataset = zl.open_dataset("atlas.zarr")
        >>> log = zl.transforms.LogNormalize(1e4)
        >>> table = dataset.highly_variable_genes(10, flavor="seurat", transforms=[log], batch_key="donor")
        >>> loader = zl.Loader(dataset, genes=table["highly_variable"], transforms=[log])
        >>> next(iter(loader)).x.shape[1]
        10

        - `n_top_genes`: how many genes to choose. None chooses by the limits of mean and dispersion instead, which
          `"seurat_v3"` does not have.
        - `flavor`: `"seurat_v3"` takes counts and makes two passes; it needs the extra `genes`. `"seurat"` and
          `"cell_ranger"` take logarithms and make one.
        - `batch_key`: an obs column. Genes are chosen in the rows of each of its values, and the choices are merged.
        - `x`, `transforms`, `options` and `progress`: as in `gene_statistics`. Without transforms, x is taken as it is,
          so give LogNormalize if it has counts and the flavor takes logarithms.
        - `genes`: the genes among which to choose, as a Loader takes them. The table has no others.
        - `span`: the share of the genes in each local regression of `"seurat_v3"`.
        - `n_bins`: the number of bins of `"seurat"`, in which genes of similar means are compared.
        - `min_mean`, `max_mean`, `min_disp`, `max_disp`: limits of the mean and of the scaled dispersion, exclusive.

        The cache keeps the sums of each pass, so another choice from the same rows reads nothing. Warns of values that
        are no counts, as scanpy does. Raises OptionError for rows whose batch is missing and batches of a single row,
        and the errors of `gene_statistics`.
        """
        choosing = Choosing(
            n_top_genes=n_top_genes,
            flavor=flavor,
            span=span,
            n_bins=n_bins,
            min_mean=min_mean,
            max_mean=max_mean,
            min_disp=min_disp,
            max_disp=max_disp,
        )
        chosen = self.matrices.choose_genes(genes, [x]).get(x)
        rows = self._pass(x, batch_key, options, progress)
        found = VariableGenes(rows=rows, x=x, transforms=transforms, genes=chosen, stores=self.stores)
        return found.table(choosing)

    def _pass(self, x: str, batch_key: str | None, options: FetchOptions | None, progress: bool) -> StatisticsPass:
        """A pass over all rows, by the values of an obs column if one is named."""
        modality = modality_of(x)
        if modality in self.modalities and not (has := self.present(modality)).all():
            raise OptionError(
                f"the modality {modality!r} lacks {np.count_nonzero(~has)} of the {self.n_obs} rows, which would count "
                f"as zeros: take its own with dataset.where(dataset.present({modality!r}))"
            )
        batches = Batches(n_obs=np.array([self.n_obs]))
        if batch_key is not None:
            find_column = partial(self.observations.column, batch_key)
            batches = batches_of(batch_key, self.obs_column(batch_key), find_column)
        return StatisticsPass(
            matrices=self.matrices.of_all_genes,
            fingerprint=self.fingerprint,
            dataset_rows=self.observations.n_rows,
            sampling=self._rows.sampled(Streaming()),
            batches=batches,
            directory=self._opened.mirror_directory,
            options=options or _DEFAULTS,
            progress=progress,
        )
