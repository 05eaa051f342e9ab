"""Datasets, and views of some of their rows or genes; `zl.open_dataset`.

A Dataset is a Table whose rows and genes can be chosen: by conditions, slices, splits and statistics. A View shares the
stores of its dataset. It adds a set of rows, at one bit per row of the dataset, or a panel of genes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from zloader.access.location import location_of
from zloader.common.deferred import pd
from zloader.common.errors import OptionError
from zloader.common.keywords import answers
from zloader.common.messages import printable, warn_user
from zloader.common.options import Cache, FetchOptions
from zloader.common.records import Rows
from zloader.dataset.gene_axis import without_functions
from zloader.dataset.gene_statistics import StatisticsPass
from zloader.dataset.matrices import Matrices, Panel
from zloader.dataset.obs import Observations
from zloader.dataset.opening import OpenedStores, open_all
from zloader.dataset.splits import BLOCK_ROWS, Names, dealt_in_blocks, listed, parts_of_rows
from zloader.dataset.store import OpenedStore
from zloader.dataset.table import Table
from zloader.dataset.views import Condition, RowSet, moved, rows_matching
from zloader.selecting.gene_names import GeneJoin, GenesBy
from zloader.selecting.genes import GeneChoice
from zloader.selecting.rows import RowChoice, positions_of, range_of
from zloader.transforms.statistics import GeneStatistics
from zloader.transforms.transform import Transform
from zloader.transforms.variable_genes import Choosing

URL = str | os.PathLike[str]
_AS_STORED = GeneJoin()


def require_dataset(dataset: Any) -> None:
    """Raises OptionError unless `dataset` is a Dataset, which includes views."""
    if not isinstance(dataset, Dataset):
        raise OptionError(f"dataset must be a Dataset from zl.open_dataset, not {dataset!r:.100}")


def _is_all(chosen: Any) -> bool:
    """Whether an index is a mere `:`."""
    return isinstance(chosen, slice) and chosen == slice(None)


def _reopen_view(whole: Dataset, chosen: RowSet | None, panel: Panel | None) -> View:
    """Unpickles a View."""
    return View(whole, chosen, whole.matrices if panel is None else whole.matrices.with_panel(panel))


# What an AnnData has and a Dataset has not, with the way to it. scvi-tools asks an AnnData for uns first.
_OF_ANNDATA = {
    "X": "a zl.Loader reads X in minibatches; dataset.take(rows) and dataset.to_adata() give an AnnData",
    "layers": "zl.Loader(dataset, x='layers/NAME') reads one in minibatches, dataset.take(rows, layers=[...]) at once",
    "obsm": "zl.Loader(dataset, obsm=[...]) reads arrays in minibatches, dataset.obsm_array(name) reads one whole",
    "raw": "zl.Loader(dataset, x='raw/X') reads its X in minibatches",
    "to_memory": "dataset.to_adata() gives an AnnData in memory, dataset.take(rows) one of some rows",
    "copy": "it never changes, so there is nothing to copy; dataset.to_adata() gives an AnnData in memory",
    "uns": (
        "for scvi-tools, make adata = zloader.integrations.scvi.as_anndata(dataset), then model = attach(SCVI(adata)) "
        "after SCVI.setup_anndata(adata); for TOTALVI and MULTIVI, setup_mudata"
    ),
}


@answers
class Dataset(Table):
    """One or several AnnData stores as one table of rows x genes. Made by `zl.open_dataset`.

    >>> import zloader as zl
    >>> dataset = zl.open_dataset("atlas.zarr")
    >>> dataset
    Dataset with n_obs x n_vars = 1000 x 50 of atlas.zarr
        obs: 'cell_type', 'donor', 'n_counts'
        layers: 'spliced'
    >>> dataset.obs(["cell_type"])["cell_type"].value_counts().to_dict()
    {'B': 500, 'T': 500}
    >>> dataset.take([5, 3, 99]).shape
    (3, 50)
    >>> len(dataset.where("cell_type == 'T' and n_counts > 100")), len(dataset[10:20])
    (450, 10)
    >>> dataset[:, dataset.var_names[:20]].shape
    (1000, 20)
    >>> train, test = dataset.split([0.8, 0.2], by="donor")
    >>> len(train), len(test)
    (800, 200)

    The rows of several stores follow one another. A pickled dataset holds URLs and options, but no values.
    Unpickling opens the stores again, and raises StoreChangedError if one of them has changed.
    """

    def __init__(self, opened: OpenedStores, rule: GeneJoin = _AS_STORED) -> None:
        """Raises FormatError if the genes of the stores cannot be joined."""
        super().__init__(opened, Observations(opened), Matrices(opened, without_functions(opened.stores, rule)))

    def __reduce__(self) -> tuple[Callable[..., Dataset], tuple[Any, ...]]:
        return type(self), (self._opened, self.matrices.rule)

    def __repr__(self) -> str:
        head, groups = self._described()
        return "\n".join([head, *(f"    {group}: {', '.join(map(repr, names))}" for group, names in groups.items())])

    def _described(self) -> tuple[str, dict[str, list[str]]]:
        """The first line of the repr, in the form of AnnData's, and the names in obs, var, obsm and layers.

        It reads metadata only. Columns of a joined var are left out, because they are not known before var is read.
        """
        stores, of, in_all = self.stores, "", self._opened.in_all
        try:
            if self.whole is not self:
                has_panel, (n_rows, n_genes) = "var" in (self.matrices.panel or {}), self.whole.shape
                of = f"the {n_rows} x {n_genes} of " if has_panel else f"the {n_rows} rows of "
            head = f"{type(self).__name__} with n_obs x n_vars = {self.n_obs} x {self.n_vars} of {of}{self.url}"
            groups = {"obs": in_all(lambda store: store.columns("obs"))}
            groups["var"] = stores[0].columns("var") if self.matrices.rule.as_stored else []
            groups |= {group: in_all(partial(OpenedStore.keys, group=group)) for group in ("obsm", "mod", "layers")}
        except Exception:  # noqa: BLE001 - a repr must not raise, whatever the metadata hold
            return printable(f"{type(self).__name__} of {self.url}"), {}
        return printable(head), {group: names for group, names in groups.items() if names}

    def __len__(self) -> int:
        return self.n_obs

    def __getitem__(self, chosen: RowChoice | tuple[RowChoice, GeneChoice]) -> View:
        """A view of some rows, `dataset[rows]`, of some genes, `dataset[:, genes]`, or of both, `dataset[rows, genes]`.

        - `rows`: a slice, a mask, or a list of row numbers or obs names, in ascending order.
        - `genes`: a gene name, a list of names or positions in any order, a mask such as a boolean column of `var`, or
          a slice. The view has these genes in this order: a panel. A mapping has those of single matrices, such as
          `{"rna:X": ["CD3E"]}` of a modality or `{"raw/X": ["CD3E"]}`; the others keep theirs.

        >>> import zloader as zl
        >>> dataset = zl.open_dataset("atlas.zarr")
        >>> panel = dataset[:, ["7", "3"]]
        >>> panel.var_names.tolist(), panel.where("cell_type == 'T'").shape
        (['7', '3'], (500, 2))
        >>> next(iter(zl.Loader(panel, batch_size=64))).x.shape
        torch.Size([64, 2])

        Transforms of a Loader see all genes, and the order of the rows is that of the dataset. Layers have the genes of
        X, and `raw/X` has those of the same names, unless a mapping gives it others. Genes of modalities leave `var`,
        `var_names` and `n_vars` as they are.

        Raises OptionError for rows in another order and for a single row: use `take`, or a Loader, which reads many
        rows at once. Raises it for unknown, repeated and ambiguous genes, and for none.
        """
        if not isinstance(chosen, tuple):
            return self._of_rows(chosen)
        if len(chosen) != 2:
            raise OptionError(f"{self.url} has rows and genes: write dataset[rows, genes], not {chosen!r:.100} in []")
        rows, genes = chosen
        view, matrices = self if _is_all(rows) else self._of_rows(rows), self.matrices
        if not _is_all(genes):
            matrices = matrices.with_genes([genes] if isinstance(genes, int | np.integer | str) else genes)
        return View(self.whole, view._chosen, matrices)

    def _of_rows(self, rows: RowChoice) -> View:
        if isinstance(rows, int | np.integer | str):
            raise OptionError(
                f"{self.url} cannot be indexed by {rows!r:.100}, or row by row, as torch's DataLoader(dataset) does: "
                "iterate over zl.Loader(dataset, ...), or over DataLoader(loader, batch_size=None). dataset.take(rows) "
                "returns some rows as an AnnData; dataset[10:20], dataset[mask], dataset[:, genes] and "
                "dataset.where(...) return a view"
            )
        if isinstance(rows, slice) and (numbers := range_of(rows, self.n_obs)).step > 0:
            return self._view(RowSet.of_range(self.n_obs, numbers))
        positions = positions_of(rows, self.n_obs, lambda: self.obs_names)
        if (np.diff(positions) <= 0).any():
            raise OptionError(
                "the rows of a view are ascending and do not repeat: give them in that order, or read them with "
                "dataset.take(rows), which keeps any order"
            )
        return self.where(positions)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_ANNDATA:
            what = type(self).__name__
            raise AttributeError(f"a {what} of zloader is no AnnData, and has no {name}: {_OF_ANNDATA[name]}")
        return object.__getattribute__(self, name)  # raises Python's own error

    @property
    def whole(self) -> Dataset:
        """The dataset whose rows `minibatch.index` counts: the dataset itself, or the dataset that a view is of."""
        return self

    def where(self, condition: Condition) -> View:
        """A view of the rows that satisfy an expression, a boolean mask, or a list of row numbers.

        >>> import zloader as zl
        >>> dataset = zl.open_dataset("atlas.zarr")
        >>> len(dataset.where("cell_type in ('B', 'T') and n_counts > 100"))
        900
        >>> len(dataset.where(dataset.obs()["n_counts"] > 500))
        500
        >>> dataset.where([7, 3]).row_numbers
        array([3, 7])

        An expression compares obs columns with constants or with each other, using `==`, `!=`, `<`, `<=`, `>`, `>=`,
        `in` and `not in`. Comparisons are combined with `and`, `or` and `not`. A row whose value is missing satisfies
        no comparison. Write names that are not identifiers in back-quotes, as in "`cell type` == 'T'". Dates are
        compared with text: "collected >= '2024-03-31'".

        A mask has one entry per row. Row numbers may be in any order, without repeats; the view is in ascending order.
        Raises OptionError for a condition that cannot be used, and MissingColumnError for an unknown obs column.
        """
        return self._view(self._matching(condition))

    def split(
        self,
        parts: Sequence[float] | int,
        *,
        by: Names | None = None,
        stratify: Names | None = None,
        block_size: int | None = None,
        seed: int = 0,
    ) -> list[View]:
        """Random, disjoint views.

        >>> import zloader as zl
        >>> dataset = zl.open_dataset("atlas.zarr")
        >>> train, test = dataset.split([0.8, 0.2], by="donor")
        >>> train, test = dataset.split([800, 100], stratify="cell_type", seed=1)
        >>> test.obs()["cell_type"].value_counts().to_dict()
        {'B': 50, 'T': 50}

        - `parts`: either fractions of the rows or numbers of rows, one per view. They need not add up to all rows. A
          whole number n gives n views of equally many rows for n machines, in blocks of neighbours from all over the
          rows. Each machine then reads its part of the store only: `dataset.split(8)[machine]`. Fewer than n rows are
          left out.
        - `block_size`: the rows of a block, if `parts` is a whole number; fewer if a part would have less than 64
          blocks. Default: 512.
        - `by`: an obs column of labels, whole numbers, booleans or dates, such as the donor, or a list of columns. All
          rows with the same label go to the same view. Rows without a label count as one more label. No view that
          should have rows is empty.
        - `stratify`: an obs column of the same kinds, or a list of them. Every view gets its share of the rows of each
          label, to within one row.
        - `seed`: the same seed gives the same views on every machine.

        Raises OptionError for unusable parts, for fewer labels than views, or if both `by` and `stratify` are given;
        MissingColumnError for an unknown obs column.
        """
        if isinstance(parts, int | np.integer):
            if by is not None or stratify is not None:
                raise OptionError(f"{parts} equal parts are of blocks: leave by and stratify out, or give fractions")
            n_parts, size = int(parts), BLOCK_ROWS if block_size is None else block_size
            part_of_row = dealt_in_blocks(n_parts, self.n_obs, block_size=size, seed=seed)
        elif block_size is not None:
            raise OptionError("block_size goes with a number of parts, as in split(8, block_size=512)")
        else:
            shares = listed(parts)
            n_parts = len(shares)
            part_of_row = parts_of_rows(shares, self.obs_column, self.n_obs, by=by, stratify=stratify, seed=seed)
        return [self._view(RowSet.of(part_of_row == number)) for number in range(n_parts)]

    def _view(self, rows: RowSet) -> View:
        return View(self.whole, self._rows.narrowed(rows), self.matrices)

    def _matching(self, condition: Condition) -> RowSet:
        return rows_matching(condition, self.obs_column, self.n_obs)

    def in_whole(self, group: Dataset | Condition) -> RowSet:
        """Which rows of `whole` are in a group as in `rows_of`, which may also have rows that this dataset lacks."""
        if not isinstance(group, Dataset):
            return self._rows.narrowed(self._matching(group))
        found = group._rows.as_set()
        return found if group.stores is self.stores else RowSet.of(moved(found.mask(), group.stores, self.stores))

    def rows_of(self, group: Dataset | Condition) -> RowSet:
        """The rows in a group: a dataset of some of its stores, a view of it or of them, or a condition as in `where`.

        Raises OptionError for rows that this dataset does not have, and for an unusable condition.
        """
        if not isinstance(group, Dataset):
            return self._matching(group)
        if self._chosen is None:
            return self.in_whole(group)
        wanted, own = self.in_whole(group).mask(), self._rows.as_set().mask()
        outside = np.flatnonzero(wanted & ~own)
        if len(outside):
            raise OptionError(
                f"a group has {len(outside)} rows that are not among the {self.n_obs} rows of the view, such as row "
                f"{outside[0]} of the whole dataset: give groups of the view itself, as in view.where(...)"
            )
        return RowSet.of(wanted[own])

    def positions(self, numbers: Rows) -> Rows:
        """The positions in this dataset of some rows of `whole`; -1 for rows that it does not have."""
        return self._rows.positions(numbers)

    # ---- statistics of genes

    def gene_statistics(
        self,
        x: str = "X",
        *,
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
        - `transforms`: applied before, as by a Loader with seed 0 in epoch 0; those that keep zeros zero. They see all
          genes, also those that a panel `dataset[:, genes]` lacks.
        - `options`: the options of a Loader for reading.
        - `progress`: whether to draw a progress bar if stderr is a terminal.

        Sums are in float64. The cache keeps the result for these rows, this matrix and these transforms. Raises the
        errors of a Loader with the same arguments.
        """
        chosen = self.matrices.chosen(x)
        found = StatisticsPass(self, x, transforms, None, options, progress=progress).statistics()
        return found if chosen is None else found.at(chosen.positions)

    def highly_variable_genes(  # noqa: PLR0913 - all but one are keyword-only, and those of scanpy
        self,
        n_top_genes: int | None = Choosing.n_top_genes,
        *,
        flavor: str = Choosing.flavor,
        batch_key: str | None = None,
        x: str = "X",
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

        Of a panel, the genes are chosen among its own, and the table has no others.

        >>> import zloader as zl
        >>> dataset = zl.open_dataset("atlas.zarr")
        >>> log = zl.transforms.LogNormalize(1e4)
        >>> table = dataset.highly_variable_genes(10, flavor="seurat", transforms=[log], batch_key="donor")
        >>> loader = zl.Loader(dataset[:, table["highly_variable"]], transforms=[log])
        >>> next(iter(loader)).x.shape[1]
        10

        - `n_top_genes`: how many genes to choose. None chooses by the limits of mean and dispersion instead, which
          `"seurat_v3"` does not have.
        - `flavor`: `"seurat_v3"` takes counts and makes two passes; it needs the extra `genes`. `"seurat"` and
          `"cell_ranger"` take logarithms and make one.
        - `batch_key`: an obs column. Genes are chosen in the rows of each of its values, and the choices are merged.
        - `x`, `transforms`, `options` and `progress`: as in `gene_statistics`. Without transforms, x is taken as it is,
          so give LogNormalize if it has counts and the flavor takes logarithms.
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
        return StatisticsPass(self, x, transforms, batch_key, options, progress=progress).variable_genes(choosing)


@answers
class View(Dataset):
    """Some rows of a dataset, in ascending order, or some of its genes. Made by `where`, `split` and an index.

    >>> import zloader as zl
    >>> view = zl.open_dataset("atlas.zarr").where("cell_type == 'T'")
    >>> view
    View with n_obs x n_vars = 500 x 50 of the 1000 rows of atlas.zarr
        obs: 'cell_type', 'donor', 'n_counts'
        layers: 'spliced'
    >>> view.row_numbers[:3]
    array([1, 3, 5])
    >>> for minibatch in zl.Loader(view, batch_size=100):
    ...     assert set(minibatch.index.tolist()) <= set(view.row_numbers.tolist())

    Rows of a view count from 0, and so do the masks, weights, labels and indices given for a view. `row_numbers` gives
    the rows of `whole` that they are, and `minibatch.index` holds rows of `whole`.

    A view opens and caches nothing of its own and costs one bit per row of `whole`. Its obs columns and obsm arrays are
    copied on each call. Its `fingerprint` is that of its rows, and does not depend on its genes.
    """

    def __init__(self, whole: Dataset, chosen: RowSet | None, matrices: Matrices) -> None:
        Table.__init__(self, whole._opened, whole.observations, matrices, chosen)
        self._whole = whole

    def __reduce__(self) -> tuple[Callable[..., Dataset], tuple[Any, ...]]:
        return _reopen_view, (self._whole, self._chosen, self.matrices.panel)

    @property
    def whole(self) -> Dataset:
        """The dataset that this is a view of, with all its rows and genes. It is never a view itself."""
        return self._whole

    @property
    def row_numbers(self) -> Rows:
        """The row numbers in `whole`, ascending (int64)."""
        return self._rows.as_set().all_numbers()


@answers
def open_dataset(
    url: URL | Sequence[URL],
    *,
    cache: str | os.PathLike[str] | Cache | None = None,
    storage_options: Mapping[str, Any] | None = None,
    offline: bool = False,
    join: Literal["inner", "outer"] | Sequence[str] | None = None,
    genes_by: GenesBy = None,
) -> Dataset:
    """Opens an AnnData Zarr store, or several stores in the given order, as one Dataset.

    >>> import zloader as zl
    >>> dataset = zl.open_dataset("atlas.zarr", cache="cache")
    >>> dataset.n_obs, dataset.n_vars, dataset.obs_columns
    (1000, 50, ['cell_type', 'donor', 'n_counts'])

    - `url`: a local path, or a URL that begins with `file://`, `s3://`, `gs://`, `az://`, `abfs://`, `hf://`, `http://`
      or `https://`; or a list of them. Each is an AnnData or MuData store, an .h5ad or .h5mu file, or an annbatch
      collection.
    - `cache`: the directory, or zl.Cache, that keeps mirrors of the stores, best on a local NVMe disk. With None, every
      epoch reads from the stores.
    - `storage_options`: options for all URLs. For S3 those of s3fs (key, secret, token, anon, profile, endpoint_url,
      requester_pays, client_kwargs); for GCS token, requester_pays and endpoint_url; for Azure account_name,
      account_key, sas_token, connection_string and others; for the Hub token and endpoint; for web servers headers, and
      query for that of a signed address, which a URL may have itself. They are part of a pickled dataset.
    - `offline`: open from the cache alone, without any network request. Reading values that are not in the cache then
      raises ReadError.
    - `join`: the genes of several stores. With None, all stores need the same genes in the same order. "inner" takes
      the genes that every store has and "outer" all genes, in the order of `anndata.concat`. A list takes exactly
      these genes in this order, also those that no store has. Genes that a store lacks are zeros.
    - `genes_by`: what names the genes, also for joining them. With None, var_names. Otherwise the var column of that
      name, such as "ensembl_id"; or a mapping from names to new ones, such as orthologs; or a function of a name, such
      as str.upper. A gene without a new name keeps its own. A list has one of these for each store.

    Genes are mapped while minibatches are gathered, so no store is rewritten. The mirrors are those of the stores, and
    the order of the rows does not depend on `join`.

    >>> merged = zl.open_dataset(["atlas.zarr", "other.zarr"], join="outer")
    >>> merged.n_obs, merged.n_vars, merged.var_names[-1]
    (1100, 60, 'gene9')

    Opening reads metadata only, and the names of genes to join. Raises StoreNotFoundError, AccessDeniedError or
    FormatError if a store cannot be opened or has genes that cannot be joined, MissingColumnError if a store lacks the
    column `genes_by`, OptionError for unusable arguments, and CacheError if there is no mirror to open offline. Warns
    of a join in which more than half of the genes of a store match no gene of the others, with the likely reason.
    """
    if cache is not None and not isinstance(cache, Cache):
        cache = Cache(directory=cast("Path", cache))  # Cache checks the type
    rule = GeneJoin(join=join, genes_by=genes_by)
    given = [location_of(each_url, storage_options) for each_url in _urls_of(url)]
    locations = [found for each in given for found in each.matches(offline=offline)]
    dataset = Dataset(open_all(locations, cache, offline=offline), rule)
    lost = dataset.matrices.lost if len(dataset.stores) > 1 or not rule.as_stored else ""
    if lost:
        warn_user(lost)
    return dataset


def _urls_of(url: Any) -> list[URL]:
    """One URL or many as a list. Raises OptionError for anything else."""
    urls = [url] if isinstance(url, str | bytes) or not isinstance(url, Iterable) else url
    if isinstance(urls, Mapping):
        raise OptionError("a dataset has no labels for its stores: pass a list of paths or URLs instead of a mapping")
    listed: list[Any] = list(urls)
    for each in listed:
        if not isinstance(each, str | os.PathLike):
            raise OptionError(
                f"a store is opened by its path or URL, not by an object of type {type(each).__name__}. To make a "
                "store of an AnnData in memory, run zl.convert(adata, 'x.zarr')"
            )
    return listed
