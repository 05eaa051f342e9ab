"""One store opened as a table of rows: its shape, obs and var, matrices, and the mirror that belongs to it.

Opening makes one listing and reads one metadata object. Columns are read one by one when asked for, through anndata;
nothing of TensorStore is opened here before rows are taken.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse
import zarr
import zarr.errors
from numpy.typing import NDArray

from zloader.bridge import Bridge, Put
from zloader.columns import ObsColumn, as_numbers
from zloader.errors import FormatError, MissingColumnError, MissingObjectError, OptionError, StoreChangedError
from zloader.fetch import FetchScheduler, Recipe
from zloader.layout import ArrayLayout, MatrixLayout
from zloader.location import Location, StoredObject
from zloader.metadata import layout_of
from zloader.mirror import Mirror, load_column, mirror_directory, open_mirror, save_column
from zloader.plan import Fetch
from zloader.reader import BufferPool
from zloader.store import ObjectSource
from zloader.terms import Cache, CsrArrays, FetchOptions, MinibatchArrays, Rows

X = CsrArrays | NDArray[np.generic]


def open_dataset(
    url: str | os.PathLike[str],
    *,
    cache: str | os.PathLike[str] | Cache | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Dataset:
    """Opens the AnnData store at a local path, `file://` or `s3://` URL.

    `cache` is the directory (or zl.Cache) that keeps mirrors, best on a local NVMe disk; None keeps none.
    `storage_options` are s3fs's (key, secret, token, anon, profile, endpoint_url, client_kwargs).
    Raises StoreNotFoundError, AccessDeniedError or FormatError.
    """
    location = Location(url=os.fspath(url), storage_options=dict(storage_options or {}))
    if cache is not None and not isinstance(cache, Cache):
        cache = Cache(directory=Path(cache).expanduser().absolute())
    return Dataset(location, cache)


def _reopen(location: Location, cache: Cache | None, fingerprint: str) -> Dataset:
    dataset = Dataset(location, cache)
    if dataset.fingerprint != fingerprint:
        raise StoreChangedError(f"{location.url} has changed since it was opened: open it again")
    return dataset


class Dataset:
    """A store seen as one table of rows. Made by `open_dataset`."""

    def __init__(self, location: Location, cache: Cache | None) -> None:
        self.location = location
        self.cache = cache
        self.objects: dict[str, StoredObject] = location.listing()
        self._opened = (os.getpid(), _open_root(location, self.objects))
        self._inherited: list[Any] = [location.filesystem()]
        listed = sorted((key, entry.size, entry.tag) for key, entry in self.objects.items())
        self.fingerprint = hashlib.sha256(repr(listed).encode()).hexdigest()[:32]
        self._mirrors: dict[str, Mirror | None] = {}
        self._columns: dict[str, ObsColumn] = {}
        self._indptrs: dict[str, NDArray[np.integer]] = {}

    def __reduce__(self) -> tuple[Callable[..., Dataset], tuple[Any, ...]]:
        return _reopen, (self.location, self.cache, self.fingerprint)

    @property
    def root(self) -> Any:
        """The root zarr group; opened anew in a forked process, where the parent's connections do not live on."""
        if self._opened[0] != os.getpid():
            self._inherited.append(self._opened)  # dropping them here would make aiohttp complain about the parent's
            self._opened = (os.getpid(), _open_root(self.location, self.objects))
        return self._opened[1]

    def __repr__(self) -> str:
        return f"<Dataset {self.location.url}: {self.n_obs} rows x {self.n_vars} genes>"

    def __len__(self) -> int:
        return self.n_obs

    @cached_property
    def n_obs(self) -> int:
        """Rows."""
        return self._length("obs")

    @cached_property
    def n_vars(self) -> int:
        """Genes."""
        return self._length("var")

    def _length(self, frame: str) -> int:
        return int(self.root[frame][self.root[frame].attrs["_index"]].shape[0])

    @cached_property
    def var_names(self) -> pd.Index:
        """Gene names, in the order of x's columns."""
        return pd.Index(self._elem(f"var/{self.root['var'].attrs['_index']}"))

    @cached_property
    def var(self) -> pd.DataFrame:
        """The whole var frame."""
        return self._elem("var")

    @cached_property
    def obs_columns(self) -> list[str]:
        """Names of the obs columns."""
        return [str(column) for column in self.root["obs"].attrs["column-order"]]

    def obs(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """The obs frame, or only some columns of it, with the obs names as its index."""
        names = self.obs_columns if columns is None else list(columns)
        index = pd.Index(self._elem(f"obs/{self.root['obs'].attrs['_index']}"))
        return pd.DataFrame({name: self._obs_elem(name) for name in names}, index=index)

    def categories(self, column: str) -> pd.Index:
        """Labels of an obs column: code c of a minibatch stands for `categories(column)[c]`, code -1 for none."""
        categories = self.obs_column(column).categories
        if categories is None:
            raise OptionError(f"obs column {column!r} holds numbers, not categories")
        return categories

    def obs_column(self, column: str) -> ObsColumn:
        """One obs column as numbers: codes of a categorical or string column, the values of any other."""
        if column not in self._columns:
            self._columns[column] = as_numbers(column, self._obs_elem(column))
        return self._columns[column]

    def require_obs(self, columns: Sequence[str]) -> None:
        """Raises MissingColumnError, which lists the columns, for the first that is not there."""
        for column in columns:
            if column not in self.obs_columns:
                known = ", ".join(map(repr, self.obs_columns)) or "none"
                raise MissingColumnError(
                    f"there is no obs column {column!r} in {self.location.url}; there are: {known}"
                )

    def _obs_elem(self, column: str) -> Any:
        self.require_obs([column])
        return self._elem(f"obs/{column}")

    def _elem(self, path: str) -> Any:
        """An element read whole by anndata, after checking that its objects are there: zarr would read zeros."""
        node = self.root[path]
        arrays = [node] if isinstance(node, zarr.Array) else [array for _, array in arrays_below(node)]
        keys = (key for array in arrays for key in stored_keys(array)) if self._written_by_us else ()
        for key in keys:
            if key not in self.objects:
                raise MissingObjectError(
                    f"{self.location.url}: {key} is not there: the store is incomplete. Convert it again"
                )
        try:
            # The parts of a sparse matrix carry no encoding of their own: plain arrays.
            return ad.io.read_elem(node) if "encoding-type" in node.attrs else node[...]
        except (ValueError, OSError, RuntimeError) as error:
            raise FormatError(f"cannot read {path} of {self.location.url}: {error}") from error

    @property
    def _written_by_us(self) -> bool:
        """Whether every object must be there: `convert` writes all, other writers leave out those of fill values."""
        return "zloader" in self.root.attrs

    def _array_layout(self, path: str) -> ArrayLayout:
        return layout_of(self.root[path], absent_is_fill=not self._written_by_us)

    @property
    def matrix_names(self) -> list[str]:
        """What `x` may name: X, raw/X and the layers that are there."""
        layers = [f"layers/{layer}" for layer in sorted(self.root.get("layers", {}))]
        return [name for name in ("X", "raw/X") if name in self.root] + layers

    def matrix(self, name: str = "X") -> MatrixLayout:
        """How the matrix `"X"`, `"layers/NAME"` or `"raw/X"` is stored; raises FormatError when it cannot be read."""
        if name not in self.root:
            raise FormatError(
                f"there is no matrix {name!r} in {self.location.url}; there are: {', '.join(self.matrix_names)}"
            )
        node = self.root[name]
        if isinstance(node, zarr.Array):
            n_rows, n_genes = (int(size) for size in node.shape)
            return MatrixLayout(path=name, n_rows=n_rows, n_genes=n_genes, values=self._array_layout(name), genes=None)
        encoding = node.attrs.get("encoding-type")
        if encoding != "csr_matrix":
            raise FormatError(
                f"{name} of {self.location.url} is a {encoding}: rows can only be read from a csr_matrix "
                "or a dense array. Run 'zloader convert' on it"
            )
        n_rows, n_genes = (int(size) for size in node.attrs["shape"])
        return MatrixLayout(
            path=name,
            n_rows=n_rows,
            n_genes=n_genes,
            values=self._array_layout(f"{name}/data"),
            genes=replace(self._array_layout(f"{name}/indices"), below=n_genes),
        )

    def indptr(self, matrix: MatrixLayout) -> NDArray[np.integer] | None:
        """First element of every row of a CSR matrix (rows + 1, int64), kept in the mirror; None for a dense one."""
        if matrix.genes is None:
            return None
        path = f"{matrix.path}/indptr"
        if path in self._indptrs:
            return self._indptrs[path]
        directory = self._mirror_directory()
        indptr = None if directory is None else load_column(directory, path)
        if indptr is None:
            indptr = np.ascontiguousarray(self._elem(path), np.int64)
            if directory is not None:
                save_column(directory, path, indptr)
        self._check_indptr(indptr, matrix)
        self._indptrs[path] = indptr
        return indptr

    def _check_indptr(self, indptr: NDArray[np.integer], matrix: MatrixLayout) -> None:
        where = f"{matrix.path}/indptr of {self.location.url}"
        n_elements = min(array.n_elements for array in matrix.arrays)
        if len(indptr) != matrix.n_rows + 1:
            raise FormatError(f"{where} has {len(indptr)} entries for {matrix.n_rows} rows: the store is damaged")
        falls = np.flatnonzero(indptr[1:] < indptr[:-1])
        if indptr[0] != 0 or len(falls) or indptr[-1] > n_elements:
            row = int(falls[0]) if len(falls) else (0 if indptr[0] else matrix.n_rows - 1)
            raise FormatError(f"{where} is wrong at row {row} ({n_elements} values are stored): the store is damaged")

    def _mirror_directory(self) -> Path | None:
        try:
            return None if self.cache is None else mirror_directory(self.cache.directory, self.fingerprint)
        except OSError:
            return None  # open_mirror warns

    def mirror(self, matrix: MatrixLayout) -> Mirror | None:
        """The mirror of a matrix, opened once a process; None without a cache or where it cannot be used."""
        if self.cache is None:
            return None
        if matrix.path not in self._mirrors:
            self._mirrors[matrix.path] = open_mirror(self.cache.directory, self.fingerprint, matrix.arrays)
        return self._mirrors[matrix.path]

    def original_dtype(self, matrix: MatrixLayout) -> str:
        """The dtype that the matrix had before `convert` narrowed it, else the one stored."""
        recorded = self.root[matrix.path].attrs.get("zloader", {}).get("dtype", {})
        return str(recorded.get("data", np.dtype(matrix.values.dtype).name))

    def take(self, indices: Sequence[int] | NDArray[np.integer]) -> ad.AnnData:
        """Some rows as an AnnData with X, obs and var, in the order given (repeats allowed)."""
        rows = self._checked_rows(indices)
        x = self.read_rows(rows)
        obs = self.obs().iloc[rows]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Observation names are not unique")  # a row may be asked for twice
            return ad.AnnData(X=as_scipy(x) if isinstance(x, CsrArrays) else x, obs=obs, var=self.var.copy())

    def _checked_rows(self, indices: Sequence[int] | NDArray[np.integer]) -> Rows:
        rows = np.asarray(indices)
        if rows.dtype == bool or rows.ndim != 1 or (rows.size and not np.issubdtype(rows.dtype, np.integer)):
            raise OptionError(f"indices must be a 1-d sequence of row numbers, not {rows.dtype} of shape {rows.shape}")
        wrong = rows[(rows < 0) | (rows >= self.n_obs)]
        if len(wrong):
            raise OptionError(f"row {wrong[0]} is not there: the dataset has the rows 0 to {self.n_obs - 1}")
        return rows.astype(np.int64)

    def read_rows(self, rows: Rows, *, x: str = "X", options: FetchOptions | None = None) -> X:
        """The values of some rows in the dtype they were converted from; by the same way as minibatches."""
        matrix = self.matrix(x)
        options = options or FetchOptions()
        recipe = Recipe(
            url=self.location.url,
            matrix=matrix,
            indptr=self.indptr(matrix),
            obs={},
            obs_dtypes={},
            object_sizes=self.object_sizes(),
            dense=matrix.genes is None,
            dtype=self.original_dtype(matrix),
        )
        source = ObjectSource(self.location, self.objects, options)
        scheduler = FetchScheduler(recipe, source, self.mirror(matrix), options, BufferPool())
        fetch = Fetch(number=0, rows=rows, order=np.arange(len(rows)), cuts=np.array([0, len(rows)]))

        async def produce(put: Put[MinibatchArrays]) -> None:
            await scheduler.run([fetch], put)

        (minibatch,) = Bridge(produce, ready_bytes=options.ready_bytes, name="zloader-take")
        assert minibatch.x is not None
        return minibatch.x

    def object_sizes(self) -> dict[str, int]:
        """Bytes of each stored object by key."""
        return {key: entry.size for key, entry in self.objects.items()}

    def to_anndata(self, minibatch: MinibatchArrays) -> ad.AnnData:
        """A minibatch as an AnnData: x, the obs columns it carries (labels, not codes) and var."""
        obs = pd.DataFrame(index=pd.Index(minibatch.index.astype(str)))
        for name, values in minibatch.obs.items():
            categories = self.obs_column(name).categories
            obs[name] = values if categories is None else pd.Categorical.from_codes(values, categories)
        x = as_scipy(minibatch.x) if isinstance(minibatch.x, CsrArrays) else minibatch.x
        return ad.AnnData(X=x, obs=obs, var=self.var)


def as_scipy(x: CsrArrays) -> scipy.sparse.csr_matrix:
    """The same rows as a scipy CSR matrix, without a copy."""
    return scipy.sparse.csr_matrix((x.values, x.indices, x.indptr), shape=(len(x.indptr) - 1, x.n_genes))


def arrays_below(group: zarr.Group) -> list[tuple[str, zarr.Array[Any]]]:
    return [(name, node) for name, node in group.members(max_depth=None) if isinstance(node, zarr.Array)]


def stored_keys(array: Any) -> Iterator[str]:
    """The keys of the objects that hold an array, relative to the store."""
    sizes = array.shards or array.chunks
    for cell in np.ndindex(*(-(-whole // size) for whole, size in zip(array.shape, sizes, strict=True))):
        yield f"{array.path}/{array.metadata.encode_chunk_key(cell)}"


def _open_root(location: Location, objects: Mapping[str, StoredObject]) -> Any:
    if not objects.keys() & {"zarr.json", ".zgroup"}:
        why = "its conversion did not end" if "zloader.partial" in objects else "there is no zarr.json in it"
        raise FormatError(f"{location.url} is not a complete AnnData Zarr store: {why}")
    try:
        root: Any = zarr.open_group(location.zarr_store(read_only=True), mode="r")
    except (zarr.errors.BaseZarrError, ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{location.url} is not a Zarr group: {error}") from error
    encoding = root.attrs.get("encoding-type")
    if encoding != "anndata":
        raise FormatError(
            f"{location.url} is not an AnnData store: its root says encoding-type {encoding!r}, not 'anndata'"
        )
    for needed in ("obs", "var"):
        if needed not in root:
            raise FormatError(f"{location.url} has no {needed}: it is not a whole AnnData store")
    return root
