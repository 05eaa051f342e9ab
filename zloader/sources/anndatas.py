"""One source of a conversion seen as an AnnData, its parts read when asked for: stored (HDF5, Zarr) or in memory."""

from __future__ import annotations

import hashlib
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from types import TracebackType
from typing import Any, Self

import anndata as ad
import anndata.abc
import h5py
import pandas as pd

from zloader.access.implied import undecodable_key
from zloader.errors import SourceError, ZloaderError
from zloader.metadata import stored_length
from zloader.sources.places import Objects

_PARTS = ("layers", "obsm", "varm", "obsp", "varp", "uns")


class Input(ABC):
    """One source. A context manager: closing closes files, and with them the nodes that were given out.

    `name` is a path or URL without secrets, for messages; `label` is short: "plate1" of plate1.h5ad. Paths of elements
    read like `X`, `layers/counts`, `raw/X`, `obsm/X_pca`, `uns`. All raise SourceError, or a StoreError where bytes
    cannot be had.
    """

    n_rows: int
    n_genes: int
    has_raw: bool
    obs_columns: list[str]

    def __init__(self, name: str, label: str, objects: Objects) -> None:
        self.name = name
        self.label = label
        self._objects = objects

    @property
    def bytes_in(self) -> int:
        """Bytes stored, 0 for an AnnData in memory. A Zarr on a web server is counted without its chunks."""
        return sum(size for _, size, _ in self._objects)

    def identity(self) -> dict[str, Any]:
        """What JSON can hold and what differs when the bytes of the source do; empty for an AnnData in memory."""
        if not self._objects:
            return {}
        digest = hashlib.sha256(repr(self._objects).encode()).hexdigest()[:32]
        return {"name": self.name.rstrip("/").rpartition("/")[2], "bytes": self.bytes_in, "digest": digest}

    @abstractmethod
    def obs_names(self) -> pd.Index:
        """The index of obs, with its name."""

    @abstractmethod
    def obs_column(self, name: str) -> pd.Series:
        """One column of obs, numbered from 0, in the dtype that anndata reads."""

    @abstractmethod
    def var(self, raw: bool = False) -> pd.DataFrame:
        """var, or raw/var."""

    @abstractmethod
    def keys(self, part: str) -> list[str]:
        """The sorted names in `layers`, `obsm`, `varm`, `obsp`, `varp`, `uns` or `raw/varm`; none where it is not."""

    @abstractmethod
    def __contains__(self, path: str) -> bool: ...

    @abstractmethod
    def node(self, path: str) -> Any:
        """An element not yet read: a group, dataset or array; as it is in memory."""

    @abstractmethod
    def element(self, path: str) -> Any:
        """An element read whole."""

    def close(self) -> None:  # noqa: B027
        """Closes files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _none_at(self, path: str, there: list[str]) -> SourceError:
        return SourceError(
            f"{self.name} has no {path}: the file is damaged, or another is meant. "
            f"It holds: {', '.join(there) or 'nothing'}"
        )


class StoredInput(Input):
    """The group of an AnnData in an HDF5 file or a Zarr hierarchy."""

    def __init__(
        self, root: Any, name: str, label: str, *, objects: Objects, close: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(name, label, objects)
        self._root = root
        self._check()
        self.n_rows, self.n_genes = self._length("obs"), self._length("var")
        self.has_raw = "raw" in root and not hasattr(root["raw"], "dtype")  # an array says that there is none
        self.obs_columns = [str(column) for column in root["obs"].attrs["column-order"]]
        # Also at the interpreter's end: HDF5 crashes there when a file that Python reads for it is still open.
        self._close = weakref.finalize(self, close)

    def close(self) -> None:
        self._close()

    def _check(self) -> None:
        missing = [name for name in ("obs", "var", "X") if name not in self._root]
        if {"obs", "var"} & set(missing):  # without X, a layer can still be taken as X
            there = ", ".join(sorted(self._root)) or "nothing"
            raise SourceError(
                f"{self.name} has no {' and no '.join(missing)}: not an AnnData to train on. It holds: {there}"
            )
        if hasattr(self._root["obs"], "dtype") or "raw.X" in self._root:
            raise SourceError(
                f"{self.name} was written by anndata before 0.7: read_h5ad and write_h5ad it with a newer one"
            )
        for frame in ("obs", "var"):
            attributes = self._root[frame].attrs
            if attributes.get("encoding-type") != "dataframe" or not {"_index", "column-order"} <= set(attributes):
                raise self._no_frame(frame)

    def _no_frame(self, path: str) -> SourceError:
        return SourceError(f"{self.name}: {path} is not a data frame, so this is no AnnData")

    def _length(self, frame: str) -> int:
        length = stored_length(self.node(f"{frame}/{self._root[frame].attrs['_index']}"))
        if length is None:
            raise self._no_frame(frame)
        return length

    def obs_names(self) -> pd.Index:
        if self._old_obs is not None:
            return self._old_obs.index
        column = str(self._root["obs"].attrs["_index"])
        return pd.Index(self.element(f"obs/{column}"), name=None if column == "_index" else column)

    def obs_column(self, name: str) -> pd.Series:
        if self._old_obs is not None:
            return self._old_obs[name].reset_index(drop=True)
        return pd.Series(self.element(f"obs/{name}"), name=name)

    @cached_property
    def _old_obs(self) -> pd.DataFrame | None:
        """All of an obs that anndata 0.7 wrote: its columns do not say of themselves that they are categorical."""
        return self._frame("obs") if self._root["obs"].attrs.get("encoding-version") == "0.1.0" else None

    def var(self, raw: bool = False) -> pd.DataFrame:
        return self._frame("raw/var" if raw else "var")

    def _frame(self, path: str) -> pd.DataFrame:
        frame = self.element(path)
        if not isinstance(frame, pd.DataFrame):
            raise self._no_frame(path)
        return frame

    def keys(self, part: str) -> list[str]:
        group = self._root.get(part, ())
        return [] if hasattr(group, "dtype") else sorted(group)

    def __contains__(self, path: str) -> bool:
        return path in self._root and not (path == "X" and self._root["X"].attrs.get("encoding-type") == "null")

    def node(self, path: str) -> Any:
        if path not in self:
            above = path.rpartition("/")[0]
            raise self._none_at(path, self.keys(above) if above else sorted(self._root))
        return self._root[path]

    def element(self, path: str) -> Any:
        node = self.node(path)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ad.OldFormatWarning)  # what is written is in the new one
                return ad.io.read_elem(node)
        except ZloaderError:
            raise
        except Exception as error:
            key = undecodable_key(node)
            damaged = "" if key is None else f", whose object {key} is damaged"
            raise SourceError(f"{self.name}: anndata cannot read {path}{damaged}: {error}") from error


class MemoryInput(Input):
    """An AnnData object; what it keeps in a file (`backed`) is read from there."""

    def __init__(self, adata: ad.AnnData, name: str, label: str, *, objects: Objects | None = None) -> None:
        super().__init__(name, label, objects or [])
        self._adata = adata
        self.n_rows, self.n_genes = adata.shape
        self.has_raw = adata.raw is not None
        self.obs_columns = list(adata.obs.columns)

    @cached_property
    def _x(self) -> Any:
        return self._adata.X  # taken once: that of a view is a copy

    def obs_names(self) -> pd.Index:
        return self._adata.obs_names

    def obs_column(self, name: str) -> pd.Series:
        column = self._adata.obs[name]
        if isinstance(column, pd.DataFrame):
            raise SourceError(f"{self.name} has several obs columns named {name!r}: rename them")
        return column.reset_index(drop=True)

    def var(self, raw: bool = False) -> pd.DataFrame:
        return pd.DataFrame(self._adata.raw.var if raw else self._adata.var)

    def keys(self, part: str) -> list[str]:
        holder, attribute, _ = self._split(part)
        names = getattr(holder, attribute, ()) if attribute in _PARTS else ()
        return sorted((name for name in names if name is not None), key=str)  # anndata 0.13 has X as layer None

    def _split(self, path: str) -> tuple[Any, str, str]:
        """The object that holds an element, the attribute of it, and the key in that."""
        holder = self._adata.raw if path.startswith("raw/") else self._adata
        part, _, key = path.removeprefix("raw/").partition("/")
        return holder, part, key

    def _find(self, path: str) -> Any:
        holder, part, key = self._split(path)
        found = self._x if path == "X" else getattr(holder, part, None)
        return found.get(key) if key and found is not None else found

    def __contains__(self, path: str) -> bool:
        holder, part, key = self._split(path)
        return key in getattr(holder, part, ()) if key else self._find(path) is not None

    def node(self, path: str) -> Any:
        if path not in self:
            above = path.rpartition("/")[0]
            there = self.keys(above) if above else ["obs", "var", *(part for part in _PARTS if self.keys(part))]
            raise self._none_at(path, there)
        found = self._find(path)
        return found.group if isinstance(found, anndata.abc.CSRDataset | anndata.abc.CSCDataset) else found

    def element(self, path: str) -> Any:
        found = self.node(path)
        return ad.io.read_elem(found) if isinstance(found, h5py.Dataset | h5py.Group) else found
