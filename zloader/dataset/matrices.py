"""The matrices of one or several stores, and the genes that are their columns.

The rows of the stores follow one another. Their genes are the same, or are mapped to the joined genes while a minibatch
is gathered. Each store keeps its own indptr and mirror, so a row is read from the store that has it.

There are three sets of genes. Each store has genes of its own; the axis has the joined genes; and a panel has some of
the axis. `ChosenGenes` are always positions on the axis, whether they were chosen among all genes or those of a panel.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zloader.caching.directory import cache_bytes
from zloader.caching.rows_file import CacheStatistics, Mirror, contents_of
from zloader.common.concurrent_calls import concurrently
from zloader.common.deferred import pd
from zloader.common.errors import FormatError, OptionError
from zloader.common.messages import listed, size, suggestion
from zloader.common.options import FetchOptions
from zloader.common.records import CsrArrays, Rows, X
from zloader.dataset.elements import frame_of, modality_of, obs_of
from zloader.dataset.gene_axis import GeneAxis, gene_axis, merged_var
from zloader.dataset.h5ad import conversion_of
from zloader.dataset.opening import OpenedStores
from zloader.dataset.store import OpenedStore
from zloader.reading.fetch import read_at_once
from zloader.reading.forms import Form, Transforming, holds
from zloader.reading.loops import FEW
from zloader.reading.recipe import MatrixPart, Recipe
from zloader.selecting.gene_names import GeneJoin
from zloader.selecting.genes import ChosenGenes, Genes, choose_genes
from zloader.storage.decode import decodes_in_numpy
from zloader.storage.layout import MatrixLayout
from zloader.transforms.transform import Transform, require_combinable

if TYPE_CHECKING:
    import scipy.sparse

Panel: TypeAlias = Mapping[str, ChosenGenes]  # by frame, such as "var", or that of a modality


class Matrices:
    """X, raw/X and the layers over the rows of all stores, one store after another.

    `panel` are the genes that they have, by frame; None for all. raw/X has the genes of the names that var has, unless
    the panel has its own. A panel of modalities leaves var of the whole as it is.
    """

    def __init__(self, opened: OpenedStores, rule: GeneJoin) -> None:
        self._opened = opened
        self._stores = opened.stores
        self.rule = rule
        self.panel: Panel | None = None
        self._panels: dict[str, ChosenGenes] = {}  # by frame
        self._axes: dict[str, GeneAxis] = {}
        self._vars: dict[str, pd.DataFrame] = {}
        self._layouts: dict[str, list[MatrixLayout]] = {}  # by matrix

    def with_panel(self, panel: Panel | None) -> Matrices:
        """The same matrices with the genes of a panel, or with all."""
        made = copy.copy(self)
        made.panel, made._panels = panel, dict(panel or {})
        return made

    def with_genes(self, genes: Genes | Mapping[str, Genes]) -> Matrices:
        """The same matrices with the genes that `genes` selects among those of var, in this order.

        A mapping has the genes of matrices by name, such as `rna:X`. All others keep theirs.
        Raises OptionError. Whatever asks for raw/X raises it later, if raw lacks one of the genes of X.
        """
        if not isinstance(genes, Mapping):
            if self.modalities:
                raise OptionError(
                    f"{listed(self.modalities)} have genes of their own: choose those of each matrix, as in "
                    f"dataset[:, {{'{self.modalities[0]}:X': genes}}]"
                )
            return self.with_panel({"var": self._choose(genes, "var")})
        panel, frames = dict(self.panel or {}), [frame_of(name) for name in genes]
        for name, frame in zip(genes, frames, strict=True):
            if name not in self.names:
                raise OptionError(
                    f"genes has a choice for {name!r:.100}, but the matrices are: {listed(self.names)}"
                    f"{suggestion(name, self.names)}"
                )
            if frames.count(frame) > 1:
                raise OptionError(f"genes has two choices for {frame}, whose genes X and its layers share: give one")
            panel[frame] = self._choose(genes[name], frame)
        return self.with_panel(panel)

    @property
    def of_all_genes(self) -> Matrices:
        """The same matrices without a panel."""
        return self if self.panel is None else self.with_panel(None)

    def chosen(self, x: str) -> ChosenGenes | None:
        """The genes of a matrix that the panel has; None for all. Raises OptionError if raw lacks one of them."""
        return self._panel_of(frame_of(x))

    def _panel_of(self, frame: str) -> ChosenGenes | None:
        var = frame.removesuffix("raw/var") + "var" if frame.endswith("raw/var") else frame
        if frame not in self._panels and var in self._panels:
            names = self.axis(var).names[self._panels[var].positions]
            self._panels[frame] = self.of_all_genes._choose(names, frame)
        return self._panels.get(frame)

    @property
    def names(self) -> list[str]:
        """The values that `x` may take: X, raw/X and the layers that every store has."""
        of = [None, *self.modalities]
        return [name for name in self._opened.in_all(lambda store: store.matrix_names) if modality_of(name) in of]

    def axis(self, frame: str) -> GeneAxis:
        """The genes of `"var"` or `"raw/var"`. Raises FormatError if the stores have genes that cannot be joined."""
        if frame not in self._axes:
            self._axes[frame] = gene_axis(self._stores, frame, self.rule)
        return self._axes[frame]

    def n_genes(self, x: str) -> int:
        """The number of columns of a matrix."""
        return self._length(frame_of(x))

    def _length(self, frame: str) -> int:
        if (panel := self._panel_of(frame)) is not None:
            return len(panel)
        if frame == "var" and self.modalities:
            return sum(self.of_all_genes._length(frame_of(f"{each}:X")) for each in self.modalities)
        if not self.rule.as_stored:
            return len(self.axis(frame).names)
        return self._stores[0].length(frame)

    @property
    def modalities(self) -> list[str]:
        """The modalities that every store has; none in an AnnData."""
        return self._opened.in_all(lambda store: store.modalities)

    def present(self, modalities: Iterable[str | None]) -> dict[str, NDArray[np.bool_]]:
        """For each of some modalities, which rows of the dataset it has. None stands for the whole."""
        found = dict.fromkeys(each for each in modalities if each is not None)
        return {each: np.concatenate([_has_rows(store, f"mod/{each}/X") for store in self._stores]) for each in found}

    @property
    def lost(self) -> str:
        """A warning if a join loses most genes of a store, or empty. Raises FormatError for genes that do not join."""
        frames = [frame_of(f"{each}:X") for each in self.modalities] or ["var"]
        return next((lost for frame in frames if (lost := self.axis(frame).lost)), "")

    def var_of(self, x: str) -> pd.DataFrame:
        """The var frame of a matrix: one row per column of the matrix.

        Of several stores, the columns that are the same in all of them; with the genes as stored, those of the first.
        Categories that none of the chosen genes has are left out, as in a subset of an AnnData.
        """
        frame, genes = frame_of(x), self.chosen(x)
        if frame not in self._vars:
            if self.rule.as_stored:
                self._vars[frame] = self._stores[0].element(frame)
            else:
                self._vars[frame] = merged_var(self._stores, frame, self.rule, self.axis(frame).names)
        return self._vars[frame] if genes is None else used_categories(self._vars[frame].iloc[genes.positions])

    def gene_names(self, x: str) -> pd.Index:
        """The names of the columns of a matrix."""
        names, genes = self.axis(frame_of(x)).names, self.chosen(x)
        return names if genes is None else names[genes.positions]

    def transforming(self, x: str, transforms: Sequence[Transform], *, dense: bool, dtype: str) -> Transforming:
        """How a Recipe makes x with transforms, with seed 0 and in epoch 0.

        If it has `genes`, the Recipe takes the parts of x with all genes. Raises OptionError for transforms that cannot
        be combined with each other, or with the other options.
        """
        genes, n_genes, where = self.chosen(x), self.n_genes(x), f"{x} of {self._opened.url}"
        require_combinable(transforms, dense=dense, dtype=dtype, chosen=genes is not None)
        bound = [transform.bound(n_genes, lambda: self.gene_names(x), where) for transform in transforms]
        later = genes if any(transform.whole_rows for transform in bound) else None
        return Transforming(transforms=bound, seed=0, epoch=0, dense=dense, dtype=dtype, genes=later)

    def _choose(self, genes: Genes, frame: str) -> ChosenGenes:
        panel, n_genes = self._panel_of(frame), self._length(frame)
        where = f"{frame} of {self._stores[0].location.url if self.rule.as_stored else self._opened.url}"
        chosen = choose_genes(
            genes,
            n_stored=n_genes,
            names=lambda: self.axis(frame).names[slice(None) if panel is None else panel.positions],
            where=where if panel is None else f"the panel of {n_genes} genes of {where}",
        )
        return chosen if panel is None else chosen.among(panel.positions, panel.n_stored)

    def layouts(self, name: str) -> list[MatrixLayout]:
        """How each store lays out a matrix. Raises FormatError if it cannot be read, or does not fit obs and var."""
        if isinstance(name, str) and name in self._layouts:
            return self._layouts[name]
        layouts = concurrently(lambda store: store.matrix(name), self._stores)
        self._require_few_to_transpose(name, layouts)
        for store, layout in zip(self._stores, layouts, strict=True):
            expected = store.length(obs_of(name)), store.length(frame_of(name))
            if (layout.n_rows, layout.n_genes) != expected:
                raise FormatError(
                    f"{name} of {store.location.url} has {layout.n_rows} rows and {layout.n_genes} genes, but "
                    f"{expected[0]} and {expected[1]} are expected: the store is damaged. Convert it again"
                )
        if frame_of(name).endswith("raw/var") and len(layouts) > 1:
            self.axis(frame_of(name))
        self._layouts[name] = layouts
        return layouts

    def _require_few_to_transpose(self, name: str, layouts: Sequence[MatrixLayout]) -> None:
        takes = list(map(OpenedStore.transposing_bytes, self._stores, layouts))
        if any(takes) and sum(takes) > (most := FetchOptions().memory // 4):
            largest = self._stores[int(np.argmax(takes))]
            raise FormatError(
                f"{name} of {largest.location.url} is a csc_matrix, stored by columns. Transposing it, and others like "
                f"it in this dataset, takes {size(sum(takes))} of memory, but a quarter of what a Loader may take is "
                f"{size(most)}. {conversion_of(largest.location)}"
            )

    def require_dtype(self, name: str, dtype: str | None) -> None:
        """Raises OptionError if x of a matrix cannot have a dtype. None stands for the stored one."""
        for store, layout in zip(self._stores, self.layouts(name), strict=True):
            if dtype is not None and not holds(dtype, layout.values.dtype):
                raise OptionError(
                    f"{name} of {store.location.url} is stored as {layout.values.dtype.name}, and {dtype} does not "
                    f"hold all values of that: leave dtype out, and convert minibatch.x with .to(torch.{dtype}) where "
                    "you know that its values fit"
                )

    def are_few(self, names: Collection[str]) -> bool:
        """Whether NumPy can do the work of the compiled loops of some epochs in less time than it takes to load them.

        It can if there are few values, if their genes are the columns, and if they come in their usual forms.
        """
        of_stores = [of_store for x in names for of_store in self._of_stores(x)]
        n_values = sum(layout.n_rows + layout.values.n_elements for _, layout, _ in of_stores)
        return n_values <= FEW and all(
            genes is None
            and (store.mirror_directory is None or store.mirror_directory.form == "raw")
            and all(map(decodes_in_numpy, layout.arrays))
            for store, layout, genes in of_stores
        )

    def parts(self, x: str, options: FetchOptions) -> list[MatrixPart]:
        """Each store's part of the matrix `x`, as a Recipe takes it."""
        return concurrently(lambda of_store: of_store[0].part(of_store[1], options, of_store[2]), self._of_stores(x))

    def parts_for(
        self, x: str, options: FetchOptions, transforming: Transforming
    ) -> tuple[list[MatrixPart], Transforming]:
        """The parts of x for transforms that look at whole rows, and how x is made of them.

        They have all genes, and those of x are chosen afterwards, unless mirrors keep the totals of whole rows and the
        transforms need no more.
        """
        if transforming.needs_only_totals and self._has_totals_of_stores(x):
            parts = self.parts(x, options)
            if all(part.has_totals(transforming.dtype) for part in parts):
                return parts, replace(transforming, genes=None, by_totals=True)
        return self.of_all_genes.parts(x, options), transforming

    def _has_totals_of_stores(self, x: str) -> bool:
        """Whether a row of a matrix has the total that it has in its store, to the last bit.

        Joined genes may leave out some of a store, and order them otherwise, which changes the rounding of a sum unless
        its numbers are small whole ones.
        """
        if self.rule.as_stored:
            return True
        dtypes = [layout.values.dtype for layout in self.layouts(x)]
        whole = all(genes is None or genes.takes_all for genes in self.axis(frame_of(x)).chosen(None))
        return whole and all(dtype.kind in "iu" and dtype.itemsize <= 4 for dtype in dtypes)

    def _of_stores(self, x: str) -> list[tuple[OpenedStore, MatrixLayout, ChosenGenes | None]]:
        """The stores, each with its layout of a matrix and the columns that it has of it."""
        genes = self.chosen(x)
        chosen = [genes] * len(self._stores) if self.rule.as_stored else self.axis(frame_of(x)).chosen(genes)
        return list(zip(self._stores, self.layouts(x), chosen, strict=True))

    def mirrors(self, x: str) -> list[Mirror | None]:
        """The mirror of each store's part of the matrix `x`; None without a usable cache."""
        return concurrently(lambda of_store: of_store[0].mirror(*of_store[1:]), self._of_stores(x))

    def cache_statistics(self, x: str) -> CacheStatistics:
        """How much of a matrix is in the cache now. Raises OptionError without a usable cache."""
        cache = self._opened.cache
        if cache is None:
            raise OptionError("the dataset has no cache: open it with cache=")
        mirrors = self.mirrors(x)
        if any(
            mirror is None and layout.values.n_elements for mirror, layout in zip(mirrors, self.layouts(x), strict=True)
        ):
            raise OptionError(f"the mirror of {self._opened.url} in {cache.directory} cannot be used (see the warning)")
        held = contents_of([mirror.rows for mirror in mirrors if mirror is not None])
        return CacheStatistics(
            **held,
            directory=cache.directory,
            allocated_bytes=cache_bytes(cache.directory),
            max_bytes=None if cache.max_bytes is None else cache.most,
        )

    def row_bytes(self, x: str) -> float:
        """The bytes that a row of a matrix takes on average in memory, as `read_rows` returns it."""
        layouts = self.layouts(x)
        dtypes = (store.original_dtype(layout) for store, layout in zip(self._stores, layouts, strict=True))
        itemsize = np.result_type(*dtypes).itemsize
        if all(layout.genes is None for layout in layouts):
            return self.n_genes(x) * itemsize
        n_values = sum(layout.values.n_elements for layout in layouts)
        per_row = n_values / max(1, sum(layout.n_rows for layout in layouts))
        return min(per_row, self.n_genes(x)) * (itemsize + 4)  # with int32 indices

    def read_rows(self, rows: Rows, *, x: str, options: FetchOptions) -> X:
        """The values of some rows, in the order given, read as a Loader reads them.

        Dense if the matrix is dense in every store, else CSR. The dtype is the one from before conversion, except that
        float16 becomes float32, because SciPy and the compiled loops do not compute with float16.
        """
        parts = self.parts(x, options)
        dtypes = [store.original_dtype(part.matrix) for store, part in zip(self._stores, parts, strict=True)]
        dtype = "float32" if np.result_type(*dtypes) == np.float16 else np.result_type(*dtypes).name
        recipe = Recipe(x={x: parts}, form=Form(dense=all(part.matrix.genes is None for part in parts), dtype=dtype))
        return read_at_once(recipe, rows, options).x[x]


def _has_rows(store: OpenedStore, path: str) -> NDArray[np.bool_]:
    """Which rows of a store the modality of an element has."""
    row_of = store.row_of(path)
    return np.ones(store.n_obs, bool) if row_of is None else row_of >= 0


def used_categories(frame: pd.DataFrame) -> pd.DataFrame:
    """A shallow copy of a frame of obs or var without the categories that no row has."""
    frame = frame.copy(deep=False)
    for name, column in frame.select_dtypes("category").items():
        frame[name] = column.cat.remove_unused_categories()
    return frame


def as_scipy(x: CsrArrays) -> scipy.sparse.csr_matrix:
    """The rows as a SciPy CSR matrix, without a copy."""
    # Imported here because minibatches of tensors do not need it.
    import scipy.sparse

    return scipy.sparse.csr_matrix((x.values, x.indices, x.indptr), shape=(len(x.indptr) - 1, x.n_genes))
