"""Present one source of a conversion as an AnnData whose elements are read on demand, from HDF5, Zarr or memory."""

from __future__ import annotations

import hashlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

import anndata as ad
import anndata.abc
import h5py
import pandas as pd

from zloader.common.errors import SourceError
from zloader.common.locks import cached_property
from zloader.common.other_formats import conversion_of_hdf5
from zloader.conversion.sources.locations import Objects
from zloader.conversion.sources.nodes import Node, reading, require_names, require_text
from zloader.conversion.sources.reorder import CscMatrix
from zloader.conversion.sources.windows import CsrMatrix, DenseMatrix, SourceMatrix
from zloader.storage.metadata import stored_length

_MATRICES: dict[str, Callable[..., SourceMatrix]] = {"csr": CsrMatrix, "csc": CscMatrix, "dense": DenseMatrix}
_PARTS = ("layers", "obsm", "varm", "obsp", "varp", "uns")


class Input(ABC):
    """One source. A context manager: on exit it closes its files, which invalidates the nodes it has returned.

    `name` is the path or URL without secrets, for messages. `label` is short: "plate1" for plate1.h5ad. `genes_by`
    names the genes: a var column, a dict of new names, or None for var_names. Paths of elements look like `X`,
    `layers/counts`, `raw/X`, `obsm/X_pca` and `uns`. All methods raise SourceError, or StoreError if the bytes cannot
    be fetched.
    """

    n_rows: int
    n_genes: int
    has_raw: bool
    obs_columns: list[str]
    genes_by: str | dict[str, str] | None = None

    def __init__(self, name: str, label: str, objects: Objects) -> None:
        self.name = name
        self.label = label
        self._objects = objects

    @property
    def bytes_in(self) -> int:
        """Stored bytes; 0 for an AnnData in memory. For a Zarr on a web server, the chunks are not counted."""
        return sum(size for _, size, _ in self._objects)

    def identity(self) -> dict[str, Any]:
        """A JSON object that changes when the bytes of the source change; empty for an AnnData in memory."""
        if not self._objects:
            return {}
        digest = hashlib.sha256(repr(self._objects).encode()).hexdigest()[:32]
        return {"name": self.name.rstrip("/").rpartition("/")[2], "bytes": self.bytes_in, "digest": digest}

    @abstractmethod
    def obs_names(self) -> pd.Index:
        """The index of obs, with its name."""

    @abstractmethod
    def obs_column(self, name: str) -> pd.Series:
        """One column of obs with a RangeIndex, in the dtype that anndata reads."""

    @abstractmethod
    def var(self, raw: bool = False) -> pd.DataFrame:
        """var, or raw/var."""

    @abstractmethod
    def keys(self, part: str) -> list[str]:
        """The sorted names in `layers`, `obsm`, `varm`, `obsp`, `varp`, `uns` or `raw/varm`; [] if it is absent."""

    @abstractmethod
    def __contains__(self, path: str) -> bool: ...

    @abstractmethod
    def node(self, path: str) -> Node:
        """An element that has not been read yet."""

    def matrix(self, path: str, name: str, *, shape: tuple[int, int], window_bytes: int) -> SourceMatrix:
        """The matrix at a path as windows of rows, see `open_matrix`.

        X, layers and raw/X are read in no other way, so a source that has windows of its own overrides only this.
        """
        return open_matrix(self.node(path), name, shape=shape, window_bytes=window_bytes)

    @abstractmethod
    def element(self, path: str) -> Any:
        """A whole element, read into memory."""

    def close(self) -> None:  # noqa: B027
        """Closes the files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _missing(self, path: str, available: list[str]) -> SourceError:
        return SourceError(
            f"{self.name} has no {path}: the file is damaged, or it is the wrong file. "
            f"It holds: {', '.join(available) or 'nothing'}"
        )


class StoredInput(Input):
    """The group of an AnnData in an HDF5 file or a Zarr hierarchy."""

    def __init__(
        self, root: Any, name: str, label: str, *, objects: Objects, close: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(name, label, objects)
        self._root = Node(root, name)
        self._check()
        self._index = {frame: str(self._root[frame].attrs["_index"]) for frame in ("obs", "var")}
        self.n_rows, self.n_genes = self._length("obs"), self._length("var")
        self.has_raw = "raw" in self._root and not self._root["raw"].is_array  # an array marks an absent raw
        with reading(f"{name}: column-order of obs"):
            self.obs_columns = [str(column) for column in self._root["obs"].attrs["column-order"]]
        # finalize also runs at interpreter exit: HDF5 crashes there if a file that it reads through Python is open.
        self._close = weakref.finalize(self, close)

    def close(self) -> None:
        self._close()

    def _check(self) -> None:
        missing = [name for name in ("obs", "var", "X") if name not in self._root]
        if {"obs", "var"} & set(missing):  # if only X is missing, a layer can be chosen as X
            available = ", ".join(self._root.names()) or "nothing"
            tables = self._root["tables"].names() if "tables" in self._root else []  # of a SpatialData
            advice = f". Its tables are AnnData: convert {self.name}/tables/{tables[0]}, for example" if tables else ""
            if isinstance(self._root.native, h5py.Group):
                advice = f". {conversion_of_hdf5(self.name, self._root.names())}"
            raise SourceError(
                f"{self.name} has no {' and no '.join(missing)}, so it is not an AnnData. It holds: {available}{advice}"
            )
        for frame in ("obs", "var"):
            attributes = self._root[frame].attrs
            if str(attributes.get("encoding-type")) != "dataframe" or not {"_index", "column-order"} <= set(attributes):
                raise self._no_frame(frame)

    def _no_frame(self, path: str) -> SourceError:
        return SourceError(f"{self.name}: {path} is not a data frame, so this is not an AnnData")

    def _length(self, frame: str) -> int:
        index = self.node(f"{frame}/{self._index[frame]}")
        with reading(index.at):
            length = stored_length(index.native)
        if length is None:
            raise self._no_frame(frame)
        return length

    def obs_names(self) -> pd.Index:
        column = self._index["obs"]
        return pd.Index(self._column(column), name=None if column == "_index" else column)

    def obs_column(self, name: str) -> pd.Series:
        column = self._column(name)
        with reading(f"{self.name}: obs/{name}"):
            return pd.Series(column, name=name)

    def _column(self, name: str) -> Any:
        """The values of a column of obs, whose length has been checked."""
        column = column_of(self._root["obs"], self.node(f"obs/{name}"))
        self._require_shape(f"obs/{name}", getattr(column, "shape", ()), (self.n_rows,))
        return column

    def var(self, raw: bool = False) -> pd.DataFrame:
        return self._frame("raw/var" if raw else "var")

    def _frame(self, path: str) -> pd.DataFrame:
        frame = self.element(path)
        if not isinstance(frame, pd.DataFrame):
            raise self._no_frame(path)
        if path in ("obs", "var"):
            self._require_shape(path, frame.shape[:1], (self.n_rows if path == "obs" else self.n_genes,))
        return frame

    def _require_shape(self, path: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if found != wanted:
            raise SourceError(f"{self.name}: {path} has shape {found}, not {wanted}: the file is damaged")

    def keys(self, part: str) -> list[str]:
        if part not in self._root or self._root[part].is_array:
            return []
        return self._root[part].names()

    def __contains__(self, path: str) -> bool:
        return path in self._root and not (path == "X" and self._root["X"].encoding == "null")

    def node(self, path: str) -> Node:
        if path not in self:
            above = path.rpartition("/")[0]
            raise self._missing(path, self.keys(above) if above else self._root.names())
        return self._root[path]

    def element(self, path: str) -> Any:
        element = self.node(path).element()
        length = dict.fromkeys(("obsm", "obsp", "obsmap"), self.n_rows)
        length |= dict.fromkeys(("varm", "varp", "varmap"), self.n_genes)
        part, _, name = path.partition("/")
        if name and part in length:
            with reading(f"{self.name}: {path}", "has no length"):
                shape = element.shape if hasattr(element, "shape") else (len(element),)
            self._require_shape(path, shape[:1], (length[part],))
        return element


class MemoryInput(Input):
    """An AnnData object in memory. The parts of a backed AnnData are read from its file.

    `objects` are those of the file that it was read from, if there is one.
    """

    def __init__(self, adata: ad.AnnData, name: str, label: str, objects: Objects | None = None) -> None:
        super().__init__(name, label, objects or [])
        frames = {"obs": adata.obs, "var": adata.var, "raw/var": getattr(adata.raw, "var", adata.var)}
        for path, frame in frames.items():
            if not isinstance(frame, pd.DataFrame):
                raise SourceError(
                    f"{path} of {name} is a {type(frame).__name__}, not a data frame: if the AnnData was opened "
                    "lazily, pass its path or URL, or adata.to_memory()"
                )
        self._adata = adata
        self.n_rows, self.n_genes = adata.shape
        self.has_raw = adata.raw is not None
        self.obs_columns = list(adata.obs.columns)
        require_text(f"obs of {name}", self.obs_columns)

    @cached_property
    def _x(self) -> Any:
        return self._adata.X  # cached, because the X of a view is a new copy at every access

    def obs_names(self) -> pd.Index:
        return self._adata.obs_names

    def obs_column(self, name: str) -> pd.Series:
        column = self._adata.obs[name]
        if isinstance(column, pd.DataFrame):
            raise SourceError(f"{self.name} has several obs columns named {name!r}: make their names unique")
        return column.reset_index(drop=True)

    def var(self, raw: bool = False) -> pd.DataFrame:
        return pd.DataFrame(self._adata.raw.var if raw else self._adata.var)

    def keys(self, part: str) -> list[str]:
        holder, attribute, _ = self._split(part)
        names = list(getattr(holder, attribute, ())) if attribute in _PARTS else []
        if attribute == "layers":
            names = [name for name in names if name is not None]  # anndata 0.13 stores X as layer None
        require_names(f"{part} of {self.name}", names)
        return sorted(names)

    def _split(self, path: str) -> tuple[Any, str, str]:
        """Splits a path into the holder (the AnnData or its raw), the attribute and the key."""
        holder = self._adata.raw if path.startswith("raw/") else self._adata
        part, _, key = path.removeprefix("raw/").partition("/")
        return holder, part, key

    def _find(self, path: str) -> Any:
        holder, part, key = self._split(path)
        with reading(f"{self.name}: {path}"):  # a backed AnnData reads its file here
            found = self._x if path == "X" else getattr(holder, part, None)
            return found.get(key) if key and found is not None else found

    def __contains__(self, path: str) -> bool:
        holder, part, key = self._split(path)
        return key in getattr(holder, part, ()) if key else self._find(path) is not None

    def node(self, path: str) -> Node:
        if path not in self:
            above = path.rpartition("/")[0]
            available = self.keys(above) if above else ["obs", "var", *(part for part in _PARTS if self.keys(part))]
            raise self._missing(path, available)
        found = self._find(path)
        is_backed = isinstance(found, anndata.abc.CSRDataset | anndata.abc.CSCDataset)
        return Node(found.group if is_backed else found, self.name, path)

    def element(self, path: str) -> Any:
        node = self.node(path)
        found = node.native
        if isinstance(found, h5py.Dataset | h5py.Group):
            return node.element()
        with reading(node.at, "cannot be computed"):
            if hasattr(found, "compute"):  # a dask array
                return found.compute()
            return found.to_memory() if hasattr(found, "to_memory") else found  # to_memory: a lazy data frame of xarray


def column_of(frame: Node, column: Node) -> Any:
    """A column of a frame, as anndata reads it. In a frame of anndata 0.7, an attribute leads to the categories."""
    found = column.attrs.get("categories")
    if found is None or str(frame.attrs.get("encoding-version")) != "0.1.0":
        return column.element()
    with reading(column.at):
        categories = Node(frame.native[found], column.source, f"{column.path}, its categories")
        ordered = bool(categories.attrs.get("ordered", False))
        return pd.Categorical.from_codes(column.element(), categories.element(), ordered=ordered)


def open_matrix(node: Node, name: str, *, shape: tuple[int, int], window_bytes: int) -> SourceMatrix:
    """Opens the matrix `node`, which will be stored as `name`.

    `shape` is the shape expected from obs and var. `window_bytes` bounds the decoded values and indices in memory.
    Raises SourceError.
    """
    if node.encoding not in _MATRICES:
        raise SourceError(
            f"{node.at} is a {node.encoding}, which cannot be stored: convert it to csr_matrix, csc_matrix or array"
        )
    if node.shape != shape:
        raise SourceError(f"{node.at} has shape {node.shape}, but obs and var require {shape}: the source is damaged")
    return _MATRICES[node.encoding](node, name, shape=shape, window_bytes=window_bytes)
