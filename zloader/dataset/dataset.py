"""Datasets, as `open_dataset` returns them, and views of some of their rows.

A Dataset consists of the opened stores, their Observations (obs and obsm) and their Matrices (X, layers, genes). A View
shares these three with its dataset and adds a set of rows, at one bit per row of the dataset.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from zloader.access.location import Location
from zloader.common.checks import names_of, require_whole
from zloader.common.errors import OptionError, StoreChangedError
from zloader.common.keywords import answers
from zloader.common.machine import require_memory
from zloader.common.messages import warn_user
from zloader.common.options import Cache, FetchOptions
from zloader.common.records import CsrArrays, MinibatchArrays, Rows, X
from zloader.dataset.base import BaseDataset
from zloader.dataset.description import described, described_html
from zloader.dataset.elements import load_anndata
from zloader.dataset.gene_axis import without_functions
from zloader.dataset.gene_statistics import StatisticsPass
from zloader.dataset.matrices import Matrices, as_scipy
from zloader.dataset.observations import NAME_BYTES, Observations, require_frame
from zloader.dataset.opening import open_all
from zloader.dataset.splits import Names, Shares, SplitRule, condition_of, listed
from zloader.dataset.views import Condition, RowSet, Within, moved, rows_matching
from zloader.order.sampling import Sampling
from zloader.order.shuffling import Streaming, as_rows
from zloader.selecting.columns import ObsColumn
from zloader.selecting.gene_names import GeneJoin
from zloader.selecting.genes import Genes
from zloader.selecting.rows import RowChoice, positions_of, range_of
from zloader.transforms.statistics import GeneStatistics
from zloader.transforms.transform import Transform

if TYPE_CHECKING:
    import anndata as ad

_DEFAULTS = FetchOptions()
_AS_STORED = GeneJoin()


def open_locations(
    locations: Sequence[Location],
    cache: Cache | None,
    *,
    offline: bool = False,
    rule: GeneJoin = _AS_STORED,
    warn: bool = False,
) -> Dataset:
    """Opens the stores at some locations as one Dataset. Raises FormatError if their genes cannot be joined.

    With `warn`, joins that lose most genes are warned about.
    """
    opened = open_all(locations, cache, offline=offline)
    matrices = Matrices(opened, without_functions(opened.stores, rule))
    if len(opened.stores) > 1 or not rule.as_stored:
        lost = matrices.axis("var").lost
        if warn and lost:
            warn_user(lost)
    return Dataset(opened, Observations(opened), matrices)


def require_dataset(dataset: Any) -> None:
    """Raises OptionError unless `dataset` is a Dataset, which includes views."""
    if not isinstance(dataset, Dataset):
        raise OptionError(f"dataset must be a Dataset from zl.open_dataset, not {dataset!r:.100}")


def _reopen(
    locations: Sequence[Location],
    cache: Cache | None,
    offline: bool,
    fingerprints: Mapping[str, str],
    rule: GeneJoin,
) -> Dataset:
    """Unpickles a Dataset. Raises StoreChangedError if a store has changed since."""
    dataset = open_locations(locations, cache, offline=offline, rule=rule)
    found = {store.location.url: store.fingerprint for store in dataset.stores}
    for url in [*found, *fingerprints]:
        if found.get(url) != fingerprints.get(url):
            raise StoreChangedError(f"{url} has changed since it was opened: open it again")
    return dataset


# What an AnnData has and a Dataset has not, with the way to it. scvi-tools asks an AnnData for uns first.
_OF_ANNDATA = {
    "X": "a zl.Loader reads X in minibatches; dataset.take(rows) and dataset.to_adata() give an AnnData",
    "layers": "zl.Loader(dataset, x='layers/NAME') reads one in minibatches, dataset.take(rows, layers=[...]) at once",
    "obsm": "zl.Loader(dataset, obsm=[...]) reads arrays in minibatches, dataset.obsm_array(name) reads one whole",
    "raw": "zl.Loader(dataset, x='raw/X') reads its X in minibatches",
    "to_memory": "dataset.to_adata() gives an AnnData in memory, dataset.take(rows) one of some rows",
    "copy": "it never changes, so there is nothing to copy; dataset.to_adata() gives an AnnData in memory",
    "uns": (
        "for scvi-tools, make dm = zloader.integrations.scvi.DataModule(dataset, batch_key=...), then "
        "SCVI(registry=dm.registry) in place of setup_anndata, or "
        "load_query_data(reference_model=..., registry=dm.registry)"
    ),
}


@answers
class Dataset(BaseDataset):
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
    >>> train, test = dataset.split([0.8, 0.2], by="donor")
    >>> len(train), len(test)
    (800, 200)

    The rows of several stores follow one another. A pickled dataset holds URLs and options, but no values.
    Unpickling opens the stores again, and raises StoreChangedError if one of them has changed.
    """

    def __reduce__(self) -> tuple[Callable[..., Dataset], tuple[Any, ...]]:
        fingerprints = {store.location.url: store.fingerprint for store in self.stores}
        rule = self._matrices.rule
        return _reopen, (self._opened.locations, self.cache, self._opened.offline, fingerprints, rule)

    def __repr__(self) -> str:
        return self._described(described)

    def _repr_html_(self) -> str:
        return self._described(described_html)

    def _described(self, form: Callable[..., str]) -> str:
        n_vars = None if self._matrices.rule.as_stored else self.n_vars
        chosen = None if self.whole is self else self.n_obs
        return form("Dataset" if chosen is None else "View", self.stores, self.url, n_vars=n_vars, chosen=chosen)

    def __len__(self) -> int:
        return self.n_obs

    def __getitem__(self, rows: RowChoice) -> View:
        """A view of the rows in a slice, a mask, or a list of row numbers or obs names, in ascending order.

        Raises OptionError for any other order, and for a single row: use `take`, or a Loader, which reads many rows at
        once.
        """
        if isinstance(rows, tuple):
            raise OptionError(
                f"{self.url} cannot be indexed by rows and genes, as in {list(rows)!r:.100}: "
                "zl.Loader(dataset[rows], genes=...) loads some genes, and dataset.take(rows)[:, genes] is an AnnData"
            )
        if isinstance(rows, int | np.integer | str):
            raise OptionError(
                f"{self.url} cannot be indexed by {rows!r:.100}, or row by row, as torch's DataLoader(dataset) does: "
                "iterate over zl.Loader(dataset, ...), or over DataLoader(loader, batch_size=None). dataset.take(rows) "
                "returns some rows as an AnnData; dataset[10:20], dataset[mask] and dataset.where(...) return a view"
            )
        if isinstance(rows, slice) and (numbers := range_of(rows, self.n_obs)).step > 0:
            return self._view(RowSet.of_range(self.n_obs, numbers))
        positions = positions_of(rows, self.n_obs, lambda: self.obs_names)
        if (np.diff(positions) <= 0).any():
            raise OptionError(
                "the rows of a view are ascending and do not repeat: give them in that order, or read them with "
                "dataset.take(rows), which keeps any order"
            )
        mask = np.zeros(self.n_obs, bool)
        mask[positions] = True
        return self._view(RowSet.of(mask))

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
        no comparison. A boolean column without missing values may stand alone; otherwise compare it with True or False.
        Write names that are not identifiers in back-quotes, as in "`cell type` == 'T'". A label that the column does
        not have is an error. Dates are compared with text: "collected >= '2024-03-31'".

        A mask has one entry per row. Row numbers may be in any order, without repeats; the view is in ascending order.
        Raises OptionError for a condition that cannot be used, and MissingColumnError for an unknown obs column.
        """
        return self._view(self._matching(condition))

    @overload
    def split(
        self,
        parts: Mapping[str, float] | None = None,
        *,
        by: Names | None = None,
        stratify: Names | None = None,
        hold_out: Mapping[str, Any] | None = None,
        controls: Condition | None = None,
        seed: int = 0,
    ) -> dict[str, View]: ...

    @overload
    def split(
        self,
        parts: Sequence[float],
        *,
        by: Names | None = None,
        stratify: Names | None = None,
        hold_out: Mapping[str, Any] | None = None,
        controls: Condition | None = None,
        seed: int = 0,
    ) -> list[View]: ...

    def split(
        self,
        parts: Shares | None = None,
        *,
        by: Names | None = None,
        stratify: Names | None = None,
        hold_out: Mapping[str, Any] | None = None,
        controls: Condition | None = None,
        seed: int = 0,
    ) -> list[View] | dict[str, View]:
        """Random, disjoint views: a list of them, or a dict if `parts` is a dict.

        >>> import zloader as zl
        >>> dataset = zl.open_dataset("atlas.zarr")
        >>> train, test = dataset.split([0.8, 0.2], by="donor")
        >>> views = dataset.split({"train": 800, "test": 100}, stratify="cell_type", seed=1)
        >>> views["test"].obs()["cell_type"].value_counts().to_dict()
        {'B': 50, 'T': 50}

        - `parts`: either fractions of the rows or numbers of rows, one per view. They need not add up to all rows.
        - `by`: an obs column of labels, whole numbers, booleans or dates, such as the donor, or a list of columns. All
          rows with the same label go to the same view. Rows without a label count as one more label. No view that
          should have rows is empty. Moving one label or exchanging two between views would not bring their sizes closer
          to `parts`.
        - `stratify`: an obs column of the same kinds, or a list of them. Every view gets its share of the rows of each
          label, to within one row.
        - `hold_out`: labels of obs columns, such as `{"cell_line": ["K562"]}`. Only rows that have one of the labels in
          every column are split; all others belong to the first view. Default of `parts`: `{"train": 0.0, "test":
          1.0}`, so that the first view has none of the rows held out (zero-shot). With `{"train": 0.3, "test": 0.7}`
          and `by="drug"` it has three tenths of the drugs for this cell line (few-shot).
        - `controls`: a condition as in `where`, such as `"drug == 'DMSO'"`. These rows are split at random, with the
          same shares for every label of `by` and `hold_out`. So every view has controls, and no control is in two.
        - `seed`: the same seed gives the same views on every machine.

        >>> dataset.split(hold_out={"donor": ["d1"]})["test"].obs()["donor"].unique().tolist()
        ['d1']

        Raises OptionError for unusable parts, for fewer labels than views, or if both `by` and `stratify` are given;
        MissingColumnError for an unknown obs column.
        """
        if parts is None:
            if hold_out is None:
                raise OptionError("give the parts as a list such as [0.9, 0.1], or a dict by name")
            parts = {"train": 0.0, "test": 1.0}
        held, chosen = (None if each is None else self.rows_of(each) for each in (condition_of(hold_out), controls))
        rule = SplitRule(by=by, stratify=stratify, held_by=list(hold_out or ()), seed=seed)
        part_of_row = rule.parts(parts, self.obs_column, self.n_obs, held=held, controls=chosen)
        views = [self._view(rows) for rows in RowSet.of_parts(self.n_obs, len(listed(parts)), part_of_row)]
        return dict(zip(parts, views, strict=True)) if isinstance(parts, Mapping) else views

    def _view(self, rows: RowSet) -> View:
        return View(self, rows)

    def _matching(self, condition: Condition) -> RowSet:
        return rows_matching(condition, self.obs_column, self.n_obs, self.obs_columns)

    @property
    def _row_set(self) -> RowSet:
        """Which rows of `whole` these are."""
        return RowSet.of_range(self.n_obs, range(self.n_obs))

    def in_whole(self, group: Dataset | Condition) -> RowSet:
        """Which rows of `whole` are in a group as in `rows_of`, which may also have rows that this dataset lacks."""
        if not isinstance(group, Dataset):
            return self._matching(group)
        if group.whole.stores is self.whole.stores:
            return group._row_set
        return RowSet.of(moved(group._row_set.mask(), group.whole.stores, self.whole.stores))

    def rows_of(self, group: Dataset | Condition) -> RowSet:
        """The rows in a group: a dataset of some of its stores, a view of it or of them, or a condition as in `where`.

        Raises OptionError for rows that this dataset does not have, and for an unusable condition.
        """
        if not isinstance(group, Dataset):
            return self._matching(group)
        if self.whole is self:
            return self.in_whole(group)
        wanted, own = self.in_whole(group).mask(), self._row_set.mask()
        outside = np.flatnonzero(wanted & ~own)
        if len(outside):
            raise OptionError(
                f"a group has {len(outside)} rows that are not among the {self.n_obs} rows of the view, such as row "
                f"{outside[0]} of the whole dataset: give groups of the view itself, as in view.where(...)"
            )
        return RowSet.of(wanted[own])

    def sampled(self, sampling: Sampling) -> Sampling:
        """A sampling of these rows as a sampling of the rows of `whole`."""
        return sampling

    def positions(self, numbers: Rows) -> Rows:
        """The positions in this dataset of some rows of `whole`; -1 for rows that it does not have."""
        return numbers

    @property
    def obs_names(self) -> pd.Index:
        """The names of the rows, in their order. They are strings, as in an AnnData, and are read on each call.

        Raises OptionError if they would take more than half of the machine's memory, at 100 bytes per row.
        """
        require_memory(NAME_BYTES * self.n_obs, f"the obs names of {self.n_obs} rows", "read some with names_of(rows)")
        return pd.Index(self.names_of(np.arange(self.n_obs)))

    def names_of(self, rows: Rows) -> NDArray[np.object_]:
        """The obs names of some rows, as Python strings. Only the names near these rows are read."""
        return self._observations.names(self._rows_of_whole(rows))

    def take(self, rows: RowChoice, *, layers: Sequence[str] = ()) -> ad.AnnData:
        """Some rows as an AnnData with X, obs, var, the arrays of obsm and the layers that are named.

        >>> import zloader as zl
        >>> dataset = zl.open_dataset("atlas.zarr")
        >>> dataset.take([-1, 3, 3]).obs_names.tolist()
        ['cell999', 'cell3', 'cell3']
        >>> dataset.take(slice(10, 20), layers=["spliced"]).layers["spliced"].shape
        (10, 50)

        - `rows`: a row number, a list of them in any order and with repeats, a slice, a mask over all rows, or obs
          names. Negative row numbers count from the end.
        - `layers`: names of layers, as in `["spliced"]`.

        Categories of obs that none of these rows has are left out, as in a subset of an AnnData. All are kept if all
        rows of the whole dataset are taken.

        Raises OptionError for a row that does not exist, and for rows that would take more than half of the machine's
        memory; FormatError if X or a layer cannot be read, and any ReadError.
        """
        chosen = self._rows_of_whole(positions_of(rows, self.n_obs, lambda: self.obs_names))
        paths = [f"layers/{name.removeprefix('layers/')}" for name in names_of(layers=layers)]
        paths += ["X"] if "X" in self.matrix_names else []
        per_row = NAME_BYTES + self._observations.array_bytes() + sum(map(self._matrices.row_bytes, paths))
        require_memory(
            int(len(chosen) * per_row), f"{len(chosen)} rows as an AnnData ({self.url})", "take fewer, or use a Loader"
        )
        matrices = {path: self._matrices.read_rows(chosen, x=path, options=_DEFAULTS) for path in paths}
        obs = self._observations.frame_of(chosen)
        if len(np.unique(chosen)) < self.whole.n_obs:
            for name, column in obs.select_dtypes("category").items():
                obs[name] = column.cat.remove_unused_categories()
        return _as_anndata(
            matrices.pop("X", None),
            obs=obs,
            obsm={name: self._observations.array_rows(name, chosen) for name in self._observations.usable_arrays},
            var=self.var,
            layers={path.removeprefix("layers/"): values for path, values in matrices.items()},
        )

    def head(self, n: int = 5) -> pd.DataFrame:
        """The obs columns of the first `n` rows. `take(range(n))` has their values too.

        >>> import zloader as zl
        >>> zl.open_dataset("atlas.zarr").head(2)
              cell_type donor  n_counts
        cell0         B    d0         1
        cell1         T    d0         2
        """
        require_whole(0, n=n)
        return self._observations.frame_of(self._rows_of_whole(np.arange(min(n, self.n_obs))))

    def to_adata(self, *, layers: Sequence[str] | None = None) -> ad.AnnData:
        """All rows as an AnnData in memory, as `take` returns them. For datasets and views that are small enough.

        >>> import zloader as zl
        >>> zl.open_dataset("atlas.zarr").where("donor == 'd1'").to_adata().shape
        (100, 50)

        `layers` are names of layers; by default all that every store has. raw, varm, obsp, varp and uns are left out.
        Raises OptionError, before anything is read, if they would take more than half of the machine's memory, and the
        errors of `take`.
        """
        all_layers = [name for name in self.matrix_names if name.startswith("layers/")]
        return self.take(slice(None), layers=all_layers if layers is None else layers)

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
          genes.
        - `options`: the options of a Loader for reading.
        - `progress`: whether to draw a progress bar if stderr is a terminal.

        Sums are in float64. The cache keeps the result for these rows, this matrix and these transforms. Raises the
        errors of a Loader with the same arguments.
        """
        chosen = None if genes is None else self.choose_genes(genes, [x])[x]
        found = StatisticsPass(
            dataset=self,
            dataset_rows=self.whole.n_obs,
            sampling=self.sampled(Streaming()),
            directory=self._opened.mirror_directory,
            options=options or _DEFAULTS,
            progress=progress,
        ).statistics(x, transforms)
        return found if chosen is None else found.at(chosen.positions)

    def read_rows(self, rows: Rows, *, x: str = "X", options: FetchOptions | None = None) -> X:
        """The values of some rows, in the order given: dense if the matrix is dense in every store, else CSR.

        The dtype is the one from before conversion, except that float16 becomes float32.
        """
        return self._matrices.read_rows(self._rows_of_whole(rows), x=x, options=options or _DEFAULTS)

    def _rows_of_whole(self, indices: Sequence[int] | NDArray[np.integer]) -> Rows:
        """Row numbers of `whole` for rows of this dataset. Raises OptionError for a row that does not exist."""
        rows = as_rows(indices)
        wrong = rows[(rows < 0) | (rows >= self.n_obs)]
        if len(wrong):
            raise OptionError(f"row {wrong[0]} does not exist: the dataset has rows 0 to {self.n_obs - 1}")
        return rows

    def to_anndata(self, minibatch: MinibatchArrays, x: str, var: pd.DataFrame) -> ad.AnnData:
        """A minibatch as an AnnData with the matrix `x`, its obs columns (labels, not codes), its obsm, and `var`."""
        obs = pd.DataFrame(index=pd.Index(minibatch.names))
        for name, values in minibatch.obs.items():
            labels = self._observations.labels(name)
            if isinstance(labels, pd.Index):
                obs[name] = pd.Categorical.from_codes(values, labels)
            else:
                obs[name] = values.view(labels)  # the dtype of dates, or their own
        # A copy of var, because later minibatches get the same frame.
        return _as_anndata(minibatch.x[x], obs=obs, obsm=minibatch.obsm, var=var.copy())


def _as_anndata(x: X | None, *, obs: pd.DataFrame, layers: Mapping[str, X] | None = None, **parts: Any) -> ad.AnnData:
    """An AnnData of rows, which may have the same name if rows are repeated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Observation names are not unique")
        return load_anndata().AnnData(
            X=_in_anndata(x),
            obs=obs,
            layers={name: _in_anndata(values) for name, values in (layers or {}).items()},
            **parts,
        )


def _in_anndata(x: X | None) -> Any:
    return as_scipy(x) if isinstance(x, CsrArrays) else x


@answers
class View(Dataset):
    """Some rows of a dataset, in ascending order, as a dataset of their own. Made by `where` and `split`.

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
    copied on each call. Its `fingerprint` differs from that of the whole dataset and of other views.
    """

    def __init__(self, whole: Dataset, chosen: RowSet) -> None:
        super().__init__(whole._opened, whole._observations, whole._matrices)
        self._whole, self._chosen = whole, chosen
        self.fingerprint = chosen.digest(whole.fingerprint)

    def __reduce__(self) -> tuple[Callable[..., Dataset], tuple[Any, ...]]:
        return View, (self._whole, self._chosen)

    @property
    def whole(self) -> Dataset:
        """The dataset that this is a view of. It is never a view itself."""
        return self._whole

    @property
    def row_numbers(self) -> Rows:
        """The row numbers in `whole`, ascending (int64)."""
        return self._chosen.all_numbers()

    @property
    def n_obs(self) -> int:
        """The number of rows in the view."""
        return len(self._chosen)

    def _read_obs(self, columns: Sequence[str] | None) -> pd.DataFrame:
        require_frame(self.n_obs)
        return self._observations.frame_of(self.row_numbers, columns, keep=False)

    def obs_column(self, column: str) -> ObsColumn:
        """One obs column of the view as numbers. Its categories are those of the whole dataset."""
        of_all = super().obs_column(column)
        return replace(of_all, values=self._chosen.taken(of_all.values))

    def obsm_array(self, name: str) -> NDArray[Any]:
        """One obsm array of the view."""
        return self._chosen.taken(super().obsm_array(name))

    @property
    def _row_set(self) -> RowSet:
        return self._chosen

    def in_whole(self, group: Dataset | Condition) -> RowSet:
        """Which rows of `whole` are in a group."""
        rows = super().in_whole(group)
        return rows if isinstance(group, Dataset) else self._chosen.narrowed(rows)

    def _view(self, rows: RowSet) -> View:
        return View(self._whole, self._chosen.narrowed(rows))

    def _rows_of_whole(self, indices: Sequence[int] | NDArray[np.integer]) -> Rows:
        return self._chosen.numbers(super()._rows_of_whole(indices))

    def sampled(self, sampling: Sampling) -> Sampling:
        """A sampling of the rows of the view as a sampling of the rows of `whole`."""
        return Within(sampling, self._chosen)

    def positions(self, numbers: Rows) -> Rows:
        """The positions in the view of some rows of `whole`; -1 for rows that it does not have."""
        return self._chosen.positions(numbers)
