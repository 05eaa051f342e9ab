"""One store opened: its root, obs and var, how its matrices lie, and the mirror that belongs to it.

Opening makes one listing and reads one metadata object. Columns are read one by one when asked for, through anndata;
nothing of TensorStore is opened here before rows are taken.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import anndata as ad
import numpy as np
import pandas as pd
import zarr
import zarr.errors
from numpy.typing import NDArray

from zloader.access.file_source import FileSource
from zloader.access.implied_objects import UNDECODABLE, undecodable_key
from zloader.access.listed_store import ListedStore
from zloader.access.location import Location
from zloader.access.stored_objects import StoredObject, fingerprint, mirror_fingerprint
from zloader.access.unconverted import refuse_unconverted
from zloader.caching.cached_files import load_column, save_column
from zloader.caching.cached_metadata import CachedMetadataStore, OfflineSource, keep_listing, kept_listing
from zloader.caching.mirror import Mirror, open_mirror, open_place
from zloader.common.errors import CacheError, FormatError, OptionError, ZloaderError
from zloader.common.options import Cache, FetchOptions
from zloader.common.records import ByteSource
from zloader.reading.matrix_parts import MatrixPart
from zloader.reading.object_source import ObjectSource
from zloader.selecting.columns import as_names
from zloader.storage.layout import ArrayLayout, MatrixLayout
from zloader.storage.metadata import IndptrCheck, layout_of, matrix_shape, stored_length

log = logging.getLogger("zloader")

Check = Callable[[int, NDArray[Any]], None]
_WINDOW_BYTES = 32 << 20  # of a column that is read into the mirror
_COLLECTION = "annbatch-preshuffled"


class OpenedStore:
    """One AnnData store, as it was when it was opened. Raises FormatError for what is none."""

    def __init__(
        self,
        location: Location,
        objects: dict[str, StoredObject],
        *,
        origin: str,
        cache: Cache | None,
        offline: bool = False,
    ) -> None:
        """`origin` is Location.origin, `objects` what it lists; both of when it was last open, where `offline`."""
        self.location = location
        self.objects = objects
        self.offline = offline
        self._sizes = {key: entry.size for key, entry in objects.items()}
        self.fingerprint = fingerprint(objects)
        self.mirror_fingerprint = None if cache is None else mirror_fingerprint(location.url, origin, objects)
        self.place = None
        if cache is not None and self.mirror_fingerprint is not None:
            self.place = open_place(cache, self.mirror_fingerprint, location.address)
        if offline and self.place is None:
            raise CacheError(f"cannot open {location.url} offline: its mirror cannot be used (see the warning)")
        self._opened = (os.getpid(), self._open_group())
        if self.place is not None:
            keep_listing(self.place, origin, objects)
        self._mirrors: dict[str, Mirror | None] = {}
        self._indptrs: dict[str, NDArray[np.integer]] = {}

    @property
    def root(self) -> Any:
        """The root zarr group; opened anew in a forked process, where the parent's connections do not live on."""
        if self._opened[0] != os.getpid():
            self._opened = (os.getpid(), self._open_group())
        return self._opened[1]

    def require_anndata(self) -> None:
        """Raises FormatError where it is something else."""
        encoding = self.root.attrs.get("encoding-type")
        if encoding != "anndata":
            raise FormatError(
                f"{self.location.url} is not an AnnData store: its root says encoding-type {encoding!r}, not 'anndata'"
            )
        for needed in ("obs", "var"):
            if needed not in self:
                raise FormatError(f"{self.location.url} has no {needed}: it is not a whole AnnData store")

    def _open_group(self) -> Any:
        if not self.objects.keys() & {"zarr.json", ".zgroup"}:
            why = "its conversion did not end" if "zloader.partial" in self.objects else "there is no zarr.json in it"
            raise FormatError(f"{self.location.url} is not a complete AnnData Zarr store: {why}")
        known: Literal[2, 3] = 3 if "zarr.json" in self.objects else 2  # else zarr would look for the objects of both
        store = self._zarr_store()
        try:
            try:
                group = zarr.open_group(store, mode="r", zarr_format=known)
            except UNDECODABLE:  # one array that zarr cannot read spoils the consolidated metadata of all
                group = zarr.open_group(store, mode="r", zarr_format=known, use_consolidated=False)
        except ZloaderError:
            raise
        except UNDECODABLE as error:
            raise FormatError(f"{self.location.url} is not a Zarr group: {error}") from error
        store.complete = "zloader" in group.attrs  # `convert` writes all objects, others leave out those of fill values
        return group

    @contextlib.contextmanager
    def _reading(self, path: str, node: Any, start: int = 0, stop: int | None = None) -> Iterator[None]:
        """Raises FormatError for an element that zarr or anndata cannot read, and names the object that is damaged."""
        try:
            yield
        except (ZloaderError, MemoryError):
            raise
        except Exception as error:
            key = undecodable_key(node, start, stop)
            damaged = f", whose object {key} ({self.objects[key].size} bytes) is damaged" if key in self.objects else ""
            raise FormatError(f"cannot read {path} of {self.location.url}{damaged}: {error}") from error

    def node(self, path: str) -> Any:
        """The zarr group or array at a path. Raises FormatError where there is none whose metadata zarr can read."""
        try:
            return self.root[path]
        except ZloaderError:
            raise
        except (KeyError, AttributeError, IndexError, OverflowError) as error:
            raise self._damaged(path, f"it is missing, or its metadata make no sense ({error})") from error
        except (ValueError, TypeError) as error:
            raise FormatError(
                f"cannot read {path} of {self.location.url}: {error}. Write it again with a data type that zarr-python "
                "has, such as float32"
            ) from error

    def _damaged(self, path: str, why: str) -> FormatError:
        return FormatError(f"{path} of {self.location.url} cannot be used: {why}: the store is damaged")

    def keys(self, group: str) -> list[str]:
        """Names of what stands in a group such as `"layers"`, in order; nothing where there is no such group."""
        try:
            return sorted(self.root.get(group, {}))
        except UNDECODABLE:  # zarr cannot read one of them, and so lists none
            inside = (key.split("/") for key in self.objects if key.startswith(f"{group}/"))
            return sorted({parts[1] for parts in inside if len(parts) > 2})

    def _zarr_store(self) -> ListedStore:
        if self.place is None:
            store, location = self.location.zarr_store(read_only=True), self.location
            return ListedStore(store, location.url, self.object_sizes(), all_listed=not location.is_web)
        return CachedMetadataStore(self.location, self.objects, self.place, offline=self.offline)

    @cached_property
    def n_obs(self) -> int:
        """Rows."""
        return self.length("obs")

    @cached_property
    def n_vars(self) -> int:
        """Genes."""
        return self.length("var")

    def length(self, frame: str) -> int:
        """Rows of a frame, such as `"raw/var"`, as its index has them."""
        path = self._index_path(frame)
        node = self.node(path)
        with self._reading(path, node):
            length = stored_length(node)
        if length is None:
            raise self._damaged(path, "it holds no names")
        return length

    def _index_path(self, frame: str) -> str:
        name = self.node(frame).attrs.get("_index")
        if not _is_name(name):
            raise self._damaged(frame, f"its index is said to be {name!r}")
        return f"{frame}/{name}"

    def names(self, frame: str) -> pd.Index:
        """The index of `"obs"`, `"var"` or `"raw/var"`."""
        return as_names(self.element(self._index_path(frame)))

    @cached_property
    def obs_columns(self) -> list[str]:
        """Names of the obs columns."""
        names = self.node("obs").attrs.get("column-order")
        if not isinstance(names, list) or not all(map(_is_name, names)):
            raise self._damaged("obs", f"its columns are said to be {names!r:.100}")
        return names

    def element(self, path: str) -> Any:
        """An element read whole by anndata."""
        node = self.node(path)
        with self._reading(path, node):
            # The parts of a sparse matrix carry no encoding of their own: plain arrays.
            return ad.io.read_elem(node) if "encoding-type" in node.attrs else node[...]

    def column(self, path: str, check: Check | None = None, dtype: str | None = None) -> NDArray[Any]:
        """A whole array of numbers, in its own dtype or another; mapped from the mirror where there is one.

        It is read in windows, each of which is given to `check`, with the number of its first row, before it is kept.
        """
        node = self.node(path)
        kind = np.dtype(dtype or node.dtype).newbyteorder("=")
        column = None if self.place is None else load_column(self.place, path, shape=node.shape, dtype=kind)
        if column is not None:
            return column
        windows = self._windows(path, node, check)
        if self.place is not None:
            column = save_column(self.place, path, windows, shape=node.shape, dtype=kind)
        if column is None:
            with self._reading(path, node):
                column = np.empty(node.shape, kind)
            filled = 0
            for window in self._windows(path, node, check):
                column[filled : filled + len(window)] = window
                filled += len(window)
        return column

    def _windows(self, path: str, node: Any, check: Check | None) -> Iterator[NDArray[Any]]:
        stored = (node.shards or node.chunks)[0]
        step = max(1, _WINDOW_BYTES // max(1, stored * node.dtype.itemsize * int(np.prod(node.shape[1:])))) * stored
        for first in range(0, node.shape[0], step):
            with self._reading(path, node, first, first + step):
                window = np.asarray(node[first : first + step])
            if check is not None:
                check(first, window)
            yield window

    def _array_layout(self, path: str) -> ArrayLayout:
        node = self.node(path)
        try:
            return layout_of(node, absent_is_fill="zloader" not in self.root.attrs)
        except FormatError as error:
            raise FormatError(f"{self.location.url}: {error}") from error

    @property
    def matrix_names(self) -> list[str]:
        """What `x` may name: X, raw/X and the layers that are there."""
        layers = [f"layers/{layer}" for layer in self.keys("layers")]
        return [name for name in ("X", "raw/X") if name in self] + layers

    def __contains__(self, path: str) -> bool:
        try:
            return path in self.root
        except UNDECODABLE:  # it is there, and zarr cannot read it
            return True

    def matrix(self, name: str) -> MatrixLayout:
        """How the matrix `"X"`, `"layers/NAME"` or `"raw/X"` is stored; raises FormatError when it cannot be read."""
        if not isinstance(name, str) or name not in self.matrix_names:
            raise FormatError(
                f"there is no matrix {name!r} in {self.location.url}; there are: {', '.join(self.matrix_names)}"
            )
        node = self.node(name)
        if isinstance(node, zarr.Array):
            n_rows, n_genes = self.shape(name)
            return MatrixLayout(path=name, n_rows=n_rows, n_genes=n_genes, values=self._array_layout(name), genes=None)
        encoding = node.attrs.get("encoding-type")
        if encoding != "csr_matrix":
            raise FormatError(
                f"{name} of {self.location.url} is a {encoding}: rows can only be read from a csr_matrix "
                "or a dense array. Run 'zloader convert' on it"
            )
        n_rows, n_genes = self.shape(name)
        genes = replace(self._array_layout(f"{name}/indices"), below=n_genes)
        for path, dtype in ((genes.path, genes.dtype), (f"{name}/indptr", self.node(f"{name}/indptr").dtype)):
            if dtype.kind not in "iu":
                raise FormatError(f"{path} of {self.location.url} holds {dtype}, not integers: the store is damaged")
        values = self._array_layout(f"{name}/data")
        return MatrixLayout(path=name, n_rows=n_rows, n_genes=n_genes, values=values, genes=genes)

    def shape(self, name: str) -> tuple[int, int]:
        """Rows and genes of a matrix."""
        node = self.node(name)
        shape = node.shape if isinstance(node, zarr.Array) else node.attrs.get("shape")
        found = matrix_shape(shape)
        if found is None:
            raise self._damaged(name, f"its shape is said to be {shape!r:.100}, not rows x genes")
        return found

    def indptr(self, matrix: MatrixLayout) -> NDArray[np.integer] | None:
        """First element of every row of a CSR matrix (rows + 1, int64), kept in the mirror; None for a dense one."""
        if matrix.genes is None:
            return None
        path = f"{matrix.path}/indptr"
        if path not in self._indptrs:
            where, n_entries = f"{path} of {self.location.url}", int(self.node(path).shape[0])
            if n_entries != matrix.n_rows + 1:
                raise FormatError(f"{where} has {n_entries} entries for {matrix.n_rows} rows: the store is damaged")
            check = IndptrCheck(where, min(array.n_elements for array in matrix.arrays))
            self._indptrs[path] = self.column(path, check, "int64")
        return self._indptrs[path]

    def mirror(self, matrix: MatrixLayout) -> Mirror | None:
        """The mirror of a matrix, opened once a process; None without a cache or where it cannot be used."""
        if self.place is None:
            return None
        if matrix.path not in self._mirrors:
            self._mirrors[matrix.path] = open_mirror(self.place, matrix.arrays)
        return self._mirrors[matrix.path]

    def original_dtype(self, matrix: MatrixLayout) -> str:
        """The dtype that the matrix had before `convert` narrowed it, else the one stored."""
        return str(self.recorded_dtypes(matrix.path).get("data", np.dtype(matrix.values.dtype).name))

    def recorded_dtypes(self, path: str) -> dict[str, Any]:
        """The dtypes that `data` and `indices` of a matrix had before `convert` narrowed them, as far as it did."""
        recorded = self.node(path).attrs.get("zloader")
        dtypes = recorded.get("dtype") if isinstance(recorded, dict) else None
        return dtypes if isinstance(dtypes, dict) else {}

    def object_sizes(self) -> dict[str, int]:
        """Bytes of each stored object by key."""
        return self._sizes

    def source(self, options: FetchOptions) -> ByteSource:
        """What reads the store's objects."""
        if self.offline:
            return OfflineSource(self.location.url)
        source = FileSource if self.location.scheme == "file" else ObjectSource
        return source(self.location, self.objects, options)

    def part(self, matrix: MatrixLayout, options: FetchOptions) -> MatrixPart:
        """What a Recipe needs of a matrix."""
        return MatrixPart(
            url=self.location.url,
            matrix=matrix,
            indptr=self.indptr(matrix),
            object_sizes=self.object_sizes(),
            source=self.source(options),
            mirror=self.mirror(matrix),
        )


def open_stores(location: Location, cache: Cache | None, *, offline: bool = False) -> list[OpenedStore]:
    """The store at a location or, where an annbatch collection is, its stores in their order; one listing for all.

    `offline` takes everything from the mirrors in the cache. Raises CacheError where it is not there.
    """
    if offline and cache is None:
        raise OptionError("offline=True opens what is in a cache: give cache= too")
    if offline and cache is not None:
        origin, objects = kept_listing(cache.directory, location)
    else:
        origin, objects = location.origin, location.listing()
        refuse_unconverted(location, objects)
    opened = OpenedStore(location, objects, origin=origin, cache=cache, offline=offline)
    if opened.root.attrs.get("encoding-type") != _COLLECTION:
        opened.require_anndata()
        return [opened]
    children: dict[int, dict[str, StoredObject]] = {}
    for key, stored in objects.items():
        if match := re.fullmatch(r"dataset_(0|[1-9]\d*)/(.+)", key):
            children.setdefault(int(match[1]), {})[match[2]] = stored
    missing = set(range(max(children, default=0) + 1)) - children.keys()
    if missing:
        raise FormatError(
            f"{location.url} is an annbatch collection without dataset_{min(missing)}: it is incomplete. Write it again"
        )
    stores = []
    cache = cache if opened.mirror_fingerprint else None  # it has been said why not
    for number in sorted(children):
        child = replace(location, url=f"{location.url.rstrip('/')}/dataset_{number}")
        below = origin and f"{origin}/dataset_{number}"
        stores.append(OpenedStore(child, children[number], origin=below, cache=cache, offline=offline))
        stores[-1].require_anndata()
    return stores


def _is_name(name: Any) -> bool:
    """Whether it leads to something below a group."""
    return isinstance(name, str) and {"", ".", ".."}.isdisjoint(name.split("/"))
