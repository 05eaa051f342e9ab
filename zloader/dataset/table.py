"""Rows x genes that are read: what a dataset or a view says about its stores, obs, obsm, genes and matrices.

A Table consists of the opened stores, their Observations (obs and obsm) and their Matrices (X, layers, genes), and of
the rows of them that it has. `dataset.py` adds which rows these are: selecting and splitting them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from zloader.caching.rows_file import CacheStatistics
from zloader.common.checks import names_of, require_one_of
from zloader.common.deferred import pd
from zloader.common.errors import OptionError
from zloader.common.locks import cached_property
from zloader.common.machine import require_memory
from zloader.common.messages import listed, suggestion
from zloader.common.options import FetchOptions
from zloader.common.records import CsrArrays, Rows, X
from zloader.dataset.elements import load_anndata, matrix_encoding
from zloader.dataset.matrices import Matrices, as_scipy, used_categories
from zloader.dataset.obs import NAME_BYTES, Observations, ObsFrame
from zloader.dataset.opening import OpenedStores
from zloader.dataset.store import OpenedStore
from zloader.dataset.views import AllRows, RowSet
from zloader.order.companions import GraphWindow
from zloader.order.sampling import Order, Sampling
from zloader.order.shuffling import as_rows
from zloader.selecting.columns import ObsColumn
from zloader.selecting.rows import RowChoice, positions_of

if TYPE_CHECKING:
    import anndata as ad

_DEFAULTS = FetchOptions()
_WINDOW = 1 << 21  # entries of a graph, 24 MB with indices of 8 bytes


class Table:
    """Opened stores with their obs, obsm and matrices, and all rows of them or those `chosen`.

    `fingerprint` identifies the stored bytes and the rows: it changes when an object of a store changes. The parts
    `observations` and `matrices` answer for all rows of the stores.
    """

    def __init__(
        self, opened: OpenedStores, observations: Observations, matrices: Matrices, chosen: RowSet | None = None
    ) -> None:
        self._opened, self.observations, self.matrices, self._chosen = opened, observations, matrices, chosen
        self.stores = opened.stores
        self.cache, self.directory = opened.cache, opened.mirror_directory
        self.fingerprint = opened.fingerprint if chosen is None else chosen.digest(opened.fingerprint)

    @cached_property
    def _rows(self) -> AllRows | RowSet:
        """Which rows of the stores these are."""
        return AllRows(self.observations.n_rows) if self._chosen is None else self._chosen

    @property
    def store(self) -> OpenedStore:
        """The store, with its location, listing and arrays. Raises OptionError for a dataset of several stores."""
        if len(self.stores) > 1:
            raise OptionError(
                f"{self.url}: this works on a single store. Open one of them, such as {self.stores[0].location.url}"
            )
        return self.stores[0]

    @property
    def url(self) -> str:
        """The URL that was opened, for messages. Of several, the first, and how many more there are."""
        return self._opened.url

    @property
    def n_obs(self) -> int:
        """The number of rows."""
        return self._rows.n_rows

    @property
    def n_vars(self) -> int:
        """The number of genes."""
        return self.matrices.n_genes("X")

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and genes."""
        return self.n_obs, self.n_vars

    @property
    def var_names(self) -> pd.Index:
        """Gene names, in the order of the columns of X."""
        return self.matrices.gene_names("X")

    @property
    def var(self) -> pd.DataFrame:
        """The var frame, as a copy. Of several stores opened without `join`, that of the first.

        With `join`, the columns that are the same in all stores, as in `anndata.concat(..., merge="same")`; a gene that
        a store lacks has a missing value there, which differs from any other.
        """
        return self.matrices.var_of("X").copy()

    @property
    def obs_columns(self) -> list[str]:
        """Names of the obs columns that every store has."""
        return self.observations.column_names

    @property
    def obs(self) -> ObsFrame:
        """The obs frame, which `obs()` reads, with the obs names as the index.

        `obs(["cell_type"])` is a frame of some columns, and `obs["cell_type"]` one column, a Series. Each call and
        index reads again. Raises MissingColumnError for a column that some store lacks.
        """
        return ObsFrame(self._read_obs, lambda: self.obs_columns)

    @property
    def _row_numbers(self) -> Rows | None:
        """The rows of the stores that these are; None for all of them."""
        return None if self._chosen is None else self._chosen.all_numbers()

    def _read_obs(self, columns: Sequence[str] | None) -> pd.DataFrame:
        return self.observations.frame(columns, self._row_numbers)

    def obs_column(self, column: str) -> ObsColumn:
        """One obs column as numbers: the codes of a categorical or string column, the values of any other.

        Raises MissingColumnError, OptionError for a column that no tensor can hold, such as complex numbers, and
        FormatError if one store has numbers and another has labels.
        """
        return self._rows.column(self.observations.column(column))

    def categories(self, column: str) -> pd.Index:
        """The labels of an obs column: code c in a minibatch stands for `categories(column)[c]`, and -1 for no label.

        `categories(column)[codes]` are the labels of an array of codes without -1.

        With several stores, the labels of all stores: sorted if the column holds strings in every store, otherwise in
        order of first appearance. A view has the labels of the whole dataset.
        Raises OptionError for a column of numbers or dates, and the errors of `obs_column`.
        """
        labels = self.labels(column)
        if not isinstance(labels, pd.Index):
            raise OptionError(f"obs column {column!r} holds numbers or dates, not categories")
        return labels

    def labels(self, column: str) -> pd.Index | np.dtype[Any]:
        """The meaning of the numbers of an obs column in minibatches: the labels of its codes, or the stored dtype."""
        return self.observations.column(column).labels

    @property
    def obsm_names(self) -> list[str]:
        """Names of the obsm entries that every store has, sorted; then those of modalities, such as `rna:X_pca`."""
        return self.observations.arrays.names

    def obsm_array(self, name: str) -> NDArray[Any]:
        """One obsm array of all rows, rows x dims, in the stored dtype; over several stores, in their common dtype.

        Raises MissingColumnError, OptionError for an entry that is not an array of numbers, and FormatError if the
        arrays of the stores do not fit together. Rows that a modality lacks are zeros in its arrays; see `present`.
        """
        return self._rows.taken(self.observations.arrays.whole(name))

    @property
    def matrix_names(self) -> list[str]:
        """The values that `x` may take: X, raw/X and the layers that every store has."""
        return self.matrices.names

    @property
    def modalities(self) -> list[str]:
        """The names of the modalities that every store has; none in an AnnData."""
        return self.matrices.modalities

    def present(self, modality: str) -> NDArray[np.bool_]:
        """Which rows a modality has, one bool per row. Raises OptionError for a modality that is not there.

        `dataset.where(dataset.present("prot"))` is a view of these rows.
        """
        require_one_of(self.modalities, modality=modality)
        return self._rows.taken(self.matrices.present([modality])[modality])

    def graph(self, name: str) -> Iterator[GraphWindow]:
        """The graph `obsp/NAME` of the whole dataset, in windows of rows; see zl.Neighbors.

        Raises OptionError if a store lacks it or has no CSR matrix there, and FormatError if it is damaged.
        """
        begin = 0
        for store in self.stores:
            for window in _graph_windows(store, f"obsp/{name.removeprefix('obsp/')}"):
                yield window._replace(first=window.first + begin, others=window.others + begin)
            begin += store.n_obs

    def cache_statistics(self, x: str = "X") -> CacheStatistics:
        """How much of a matrix is in the cache now. Raises OptionError without a usable cache."""
        return self.matrices.cache_statistics(x)

    @property
    def obs_names(self) -> pd.Index:
        """The names of the rows, in their order. They are strings, as in an AnnData, and are read on each call.

        Raises OptionError if they would take more than half of the machine's memory, at 100 bytes per row.
        """
        return pd.Index(self.observations.names(self._row_numbers))

    def names_of(self, rows: Rows) -> NDArray[np.object_]:
        """The obs names of some rows, as Python strings. Only the chunks with these names are read."""
        return self.observations.names(self._rows_of_whole(rows))

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

        Raises OptionError for a row that does not exist, for rows that would take more than half of the machine's
        memory, and for a dataset with modalities; FormatError if X or a layer cannot be read, and any ReadError.
        """
        if self.modalities:
            raise OptionError(
                f"an AnnData has no modalities, and {self.url} has {listed(self.modalities)}: read them in minibatches "
                f"with a zl.Loader, or open one of a Zarr store by itself, as in zl.open_dataset('URL/mod/"
                f"{self.modalities[0]}')"
            )
        chosen = self._rows_of_whole(positions_of(rows, self.n_obs, lambda: self.obs_names))
        paths = [f"layers/{name.removeprefix('layers/')}" for name in names_of(layers=layers)]
        paths += [name for name in ("X",) if name in self.matrix_names]
        per_row = NAME_BYTES + self.observations.arrays.row_bytes() + sum(map(self.matrices.row_bytes, paths))
        require_memory(
            int(len(chosen) * per_row), f"{len(chosen)} rows as an AnnData ({self.url})", "take fewer, or use a Loader"
        )
        matrices = {path: self.matrices.read_rows(chosen, x=path, options=_DEFAULTS) for path in paths}
        obs = self.observations.frame(rows=chosen)
        if len(np.unique(chosen)) < self.observations.n_rows:
            obs = used_categories(obs)
        of_anndata = {path: as_scipy(x) if isinstance(x, CsrArrays) else x for path, x in matrices.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Observation names are not unique")  # if rows are repeated
            return load_anndata().AnnData(
                X=of_anndata.pop("X", None),
                obs=obs,
                obsm={name: self.observations.arrays.rows(name, chosen) for name in self.observations.arrays.usable},
                var=self.var,
                layers={path.removeprefix("layers/"): values for path, values in of_anndata.items()},
            )

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

    def read_rows(self, rows: Rows, *, x: str = "X", options: FetchOptions | None = None) -> X:
        """The values of some rows, in the order given: dense if the matrix is dense in every store, else CSR.

        The dtype is the one from before conversion, except that float16 becomes float32.
        """
        return self.matrices.read_rows(self._rows_of_whole(rows), x=x, options=options or _DEFAULTS)

    def ordered(self, sampling: Sampling, *, batch_size: int, fetch_rows: int) -> Order:
        """The order that a sampling gives these rows, as an order of the rows of `whole`."""
        dataset: Any = self  # its subclass Dataset also chooses groups of rows
        order = sampling.order(dataset, batch_size, fetch_rows)
        if not isinstance(order, Order):
            raise OptionError(f"order of {sampling} must return a zl.Order, not {order!r:.100}")
        return self._rows.ordered(order)

    def _rows_of_whole(self, indices: Sequence[int] | NDArray[np.integer]) -> Rows:
        """Row numbers of `whole` for rows of this dataset. Raises OptionError for a row that does not exist."""
        rows = as_rows(indices)
        wrong = rows[(rows < 0) | (rows >= self.n_obs)]
        if len(wrong):
            raise OptionError(f"row {wrong[0]} does not exist: the dataset has rows 0 to {self.n_obs - 1}")
        return self._rows.numbers(rows)


def _graph_windows(store: OpenedStore, path: str) -> Iterator[GraphWindow]:
    where, known = f"{path} of {store.location.url}", store.keys("obsp")
    if path.removeprefix("obsp/") not in known:
        raise OptionError(
            f"there is no {where}; in obsp there are: {', '.join(map(repr, known)) or 'none'}"
            f"{suggestion(path.removeprefix('obsp/'), known)}"
        )
    if (encoding := matrix_encoding(store.node(path))) != "csr_matrix":
        raise OptionError(f"{where} is {encoding}, but a graph has to be a csr_matrix: write it again with .tocsr()")
    n_rows = store.n_obs
    if store.shape(path) != (n_rows, n_rows):
        raise store.damaged(path, f"it has the shape {store.shape(path)}, and the store has {n_rows} rows")
    indptr = np.asarray(store.window(f"{path}/indptr", 0, n_rows + 1)).astype(np.int64)
    n_entries = min(store.node(f"{path}/{part}").shape[0] for part in ("indices", "data"))
    if len(indptr) != n_rows + 1 or indptr[0] or indptr[-1] > n_entries or (np.diff(indptr) < 0).any():
        raise store.damaged(f"{path}/indptr", "it does not fit the entries of the graph")
    first = 0
    while first < n_rows:
        stop = max(first + 1, int(np.searchsorted(indptr, indptr[first] + _WINDOW, side="right")) - 1)
        begin, end = int(indptr[first]), int(indptr[stop])
        others = store.window(f"{path}/indices", begin, end).astype(np.int64)
        wrong = np.flatnonzero((others < 0) | (others >= n_rows))
        if len(wrong):
            row = first + int(np.searchsorted(indptr[first:] - begin, wrong[0], side="right")) - 1
            raise store.damaged(path, f"row {row} has the neighbour {others[wrong[0]]} of {n_rows} rows")
        weights = store.window(f"{path}/data", begin, end)
        yield GraphWindow(first, indptr[first : stop + 1] - begin, others, weights, where)
        first = stop
