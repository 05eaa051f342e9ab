"""One opened AnnData store: its metadata, elements and columns, the layout of its matrices, and its mirrors.

Opening reads one metadata object; the listing is given. Elements are read one by one, when they are first used, with
zarr and anndata. TensorStore is not used here: only reading rows of a matrix opens it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import pandas as pd
import zarr
import zarr.errors
from numpy.typing import NDArray

from zloader.access.file_source import FileSource
from zloader.access.implied_objects import UNDECODABLE, stored_keys, undecodable_key
from zloader.access.listed_store import ListedStore
from zloader.access.location import Location
from zloader.access.stored_objects import Listing, fingerprint, mirror_fingerprint
from zloader.access.zarr_groups import open_zarr_group
from zloader.caching.cached_files import load_column, save_column
from zloader.caching.cached_metadata import CachedMetadataStore, OfflineSource, save_listing
from zloader.caching.mirror import Mirror, MirrorArray, open_array, open_mirror, open_mirror_directory
from zloader.common import page_cache
from zloader.common.errors import CacheError, FormatError, ZloaderError
from zloader.common.messages import suggestion
from zloader.common.options import Cache, FetchOptions
from zloader.common.records import ByteSource
from zloader.dataset.elements import read_element
from zloader.dataset.paged_offsets import PagedOffsets, pages_of
from zloader.reading.matrix_parts import MatrixPart
from zloader.selecting.columns import as_names
from zloader.storage.layout import ArrayLayout, MatrixLayout
from zloader.storage.metadata import IndptrCheck, layout_of, matrix_shape, stored_length

log = logging.getLogger("zloader")

Check = Callable[[int, NDArray[Any]], None]
_WINDOW_BYTES = 32 << 20  # read at a time when a column is copied into the mirror
_MOST_WHOLE = 4 << 20  # rows whose offsets are read at once: 32 MiB


class OpenedStore:
    """One AnnData store, as it was when it was opened."""

    def __init__(
        self,
        location: Location,
        objects: Listing,
        *,
        origin: str,
        cache: Cache | None,
        offline: bool = False,
    ) -> None:
        """`objects` is the listing of the location, `origin` its Location.origin; with `offline`, both from the cache.

        Raises FormatError if there is no Zarr group, and CacheError if `offline` has no usable mirror.
        """
        self.location = location
        self.objects = objects
        self.offline = offline
        self._sizes = objects.sizes
        self.fingerprint = fingerprint(objects)
        self.mirror_fingerprint = None if cache is None else mirror_fingerprint(location.url, origin, objects)
        self.mirror_directory = None
        if cache is not None and self.mirror_fingerprint is not None:
            self.mirror_directory = open_mirror_directory(cache, self.mirror_fingerprint, location.address)
        if offline and self.mirror_directory is None:
            raise CacheError(f"cannot open {location.url} offline: its mirror cannot be used (see the warning)")
        self._opened = (os.getpid(), self._open_group())
        if self.mirror_directory is not None:
            save_listing(self.mirror_directory, origin, objects)
        self._mirrors: dict[str, Mirror | None] = {}
        self._offsets: dict[str, NDArray[np.integer] | PagedOffsets] = {}
        self.paged: dict[str, MirrorArray] = {}  # the large columns that are kept chunk by chunk (paged_columns.py)
        self._checked: set[str] = set()  # those of them that were checked by this process

    @property
    def root(self) -> Any:
        """The root zarr group. A forked process opens it again, because it cannot use its parent's connections."""
        if self._opened[0] != os.getpid():
            self._opened = (os.getpid(), self._open_group())
        return self._opened[1]

    @property
    def opened_root(self) -> Any:
        """The root group as it was opened, with its consolidated metadata, even in a forked process."""
        return self._opened[1]

    def require_anndata(self) -> None:
        """Raises FormatError if the root is not an AnnData element with obs and var."""
        encoding = self.root.attrs.get("encoding-type")
        if encoding != "anndata":
            raise FormatError(
                f"{self.location.url} is not an AnnData store: its root says encoding-type {encoding!r}, not 'anndata'"
            )
        for needed in ("obs", "var"):
            if needed not in self:
                raise FormatError(f"{self.location.url} has no {needed}: it is not a complete AnnData store")

    def _open_group(self) -> Any:
        if not self.objects.keys() & {"zarr.json", ".zgroup"}:
            why = "its conversion did not finish" if "zloader.partial" in self.objects else "it has no zarr.json"
            raise FormatError(f"{self.location.url} is not a complete AnnData Zarr store: {why}")
        known: Literal[2, 3] = 3 if "zarr.json" in self.objects else 2  # saves zarr from probing for both
        store = self._zarr_store()
        try:
            try:
                group = open_zarr_group(store, zarr_format=known)
            except UNDECODABLE:  # a single array that zarr cannot read makes the consolidated metadata unusable
                group = open_zarr_group(store, zarr_format=known, use_consolidated=False)
        except ZloaderError:
            raise
        except UNDECODABLE as error:
            raise FormatError(f"{self.location.url} is not a Zarr group: {error}") from error
        store.complete = "zloader" in group.attrs  # `convert` writes every object, others omit chunks of fill values
        return group

    @contextlib.contextmanager
    def _reading(self, path: str, node: Any, start: int = 0, stop: int | None = None) -> Iterator[None]:
        """Raises FormatError for errors of zarr or anndata inside the block, and names the damaged object."""
        try:
            yield
        except (ZloaderError, MemoryError):
            raise
        except Exception as error:
            key = undecodable_key(node, start, stop)
            damaged = (
                f", whose object {key} ({self._sizes[key]} bytes) is damaged"
                if key is not None and key in self._sizes
                else ""
            )
            raise FormatError(f"cannot read {path} of {self.location.url}{damaged}: {error}") from error

    def node(self, path: str) -> Any:
        """The zarr group or array at a path. Raises FormatError if it is missing or zarr cannot read its metadata."""
        try:
            return self.root[path]
        except ZloaderError:
            raise
        except (KeyError, AttributeError, IndexError, OverflowError) as error:
            raise self.damaged(path, f"it is missing, or its metadata are invalid ({error})") from error
        except (ValueError, TypeError) as error:
            raise FormatError(
                f"cannot read {path} of {self.location.url}: {error}. Write it again with a data type that zarr-python "
                "supports, such as float32"
            ) from error

    def damaged(self, path: str, why: str) -> FormatError:
        """The error that says that an element is damaged, and why."""
        return FormatError(f"{path} of {self.location.url} cannot be used because {why}: the store is damaged")

    def keys(self, group: str) -> list[str]:
        """Sorted names of the members of a group such as `"layers"`; empty if there is no such group."""
        try:
            return sorted(self.root.get(group, {}))
        except UNDECODABLE:  # zarr lists no members if it cannot read one of them
            inside = (key.split("/") for key in self.objects if key.startswith(f"{group}/"))
            return sorted({parts[1] for parts in inside if len(parts) > 2})

    def _zarr_store(self) -> ListedStore:
        if self.mirror_directory is None:
            store, location = self.location.zarr_store(read_only=True), self.location
            return ListedStore(store, location.url, self.object_sizes(), all_listed=not location.is_web)
        return CachedMetadataStore(self.location, self.objects, self.mirror_directory, offline=self.offline)

    @cached_property
    def n_obs(self) -> int:
        """The number of rows."""
        return self.length("obs")

    @cached_property
    def n_vars(self) -> int:
        """The number of genes."""
        return self.length("var")

    def length(self, frame: str) -> int:
        """The number of rows of a frame such as `"raw/var"`, from the shape of its index."""
        path = self.index_path(frame)
        node = self.node(path)
        with self._reading(path, node):
            length = stored_length(node)
        if length is None:
            raise self.damaged(path, "it does not hold names")
        return length

    def index_path(self, frame: str) -> str:
        """The path of the index of a frame such as `"obs"`: an array, or a group for a categorical or nullable one."""
        name = self.node(frame).attrs.get("_index")
        if not _is_name(name):
            raise self.damaged(frame, f"its metadata name {name!r} as its index")
        return f"{frame}/{name}"

    def names(self, frame: str) -> pd.Index:
        """The index of `"obs"`, `"var"` or `"raw/var"`."""
        return as_names(self.element(self.index_path(frame)))

    @cached_property
    def obs_columns(self) -> list[str]:
        """Names of the obs columns, in the order of the frame."""
        return self.columns("obs")

    def columns(self, frame: str) -> list[str]:
        """Names of the columns of `"obs"`, `"var"` or `"raw/var"`, in the order of the frame."""
        names = self.node(frame).attrs.get("column-order")
        if not isinstance(names, list) or not all(map(_is_name, names)):
            raise self.damaged(frame, f"its metadata list {names!r:.100} as its columns")
        return names

    def element(self, path: str) -> Any:
        """A whole element, as anndata reads it."""
        node = self.node(path)
        with self._reading(path, node):
            # The arrays of a sparse matrix have no encoding-type of their own.
            return read_element(node) if "encoding-type" in node.attrs else node[...]

    def column(self, path: str, check: Check | None = None, dtype: str | None = None) -> NDArray[Any]:
        """A whole array of numbers, in the stored dtype or in `dtype`; memory-mapped if there is a mirror.

        It is read in windows of about 32 MiB. `check(first_row, window)` is called on each window before it is cached.
        An array that is kept chunk by chunk stays in its stored dtype, and each process checks it once.
        """
        node = self.node(path)
        if (whole := self.completed(path)) is not None:
            if check is not None and path not in self._checked:
                for first, stop in self.windows_of(node):
                    check(first, whole[first:stop])
                    page_cache.release(whole)
                self._checked.add(path)
            return whole
        kind = np.dtype(dtype or node.dtype).newbyteorder("=")
        directory, column = self.mirror_directory, None
        if directory is not None:
            column = load_column(directory, path, shape=node.shape, dtype=kind)
            if column is None:
                column = save_column(directory, path, self._windows(path, node, check), shape=node.shape, dtype=kind)
        if column is None:
            with self._reading(path, node):
                column = np.empty(node.shape, kind)
            filled = 0
            for window in self._windows(path, node, check):
                column[filled : filled + len(window)] = window
                filled += len(window)
        return column

    def completed(self, path: str) -> NDArray[Any] | None:
        """The whole of an array that is kept chunk by chunk, memory-mapped, after reading the chunks that are missing.

        None for any other array, and if the mirror does not take the chunks. The values are not checked.
        """
        if path not in self.paged:
            return None
        array, node = self.paged[path], self.node(path)
        chunk_rows = array.layout.chunk_elements // int(np.prod(node.shape[1:]))
        for first, stop in self.windows_of(node):
            if len(array.missing(np.arange(first // chunk_rows, -(-stop // chunk_rows)))):
                if not array.writable:
                    return None
                window = self.window(path, first, stop)
                array.put(first // chunk_rows, np.ascontiguousarray(window, array.layout.dtype).reshape(-1))
            page_cache.release(array.content)  # which was compared with its checksums
        if not array.contains(np.arange(array.layout.n_chunks)):
            return None
        array.record_verified()
        return array.whole().reshape(node.shape)

    def window(self, path: str, start: int, stop: int) -> NDArray[Any]:
        """The rows `[start, stop)` of an array. Raises FormatError if they cannot be read."""
        node = self.node(path)
        with self._reading(path, node, start, stop):
            return np.asarray(node[start:stop])

    def windows_of(self, node: Any) -> Iterator[tuple[int, int]]:
        """The first row of each window of an array, and the row after its last: whole objects, of about 32 MiB."""
        stored = (node.shards or node.chunks)[0]
        step = max(1, _WINDOW_BYTES // max(1, stored * node.dtype.itemsize * int(np.prod(node.shape[1:])))) * stored
        for first in range(0, node.shape[0], step):
            yield first, min(first + step, node.shape[0])

    def _windows(self, path: str, node: Any, check: Check | None) -> Iterator[NDArray[Any]]:
        for first, stop in self.windows_of(node):
            window = self.window(path, first, stop)
            if check is not None:
                check(first, window)
            yield window

    def array_layout(self, path: str) -> ArrayLayout:
        """The layout of an array of numbers. Raises FormatError if it cannot be read chunk by chunk."""
        node = self.node(path)
        try:
            return layout_of(node, absent_is_fill="zloader" not in self.root.attrs)
        except FormatError as error:
            raise FormatError(f"{self.location.url}: {error}") from error

    @property
    def matrix_names(self) -> list[str]:
        """The values that `x` may take: X, raw/X and the layers of this store."""
        layers = [f"layers/{layer}" for layer in self.keys("layers")]
        return [name for name in ("X", "raw/X") if name in self] + layers

    def __contains__(self, path: str) -> bool:
        try:
            return path in self.root
        except UNDECODABLE:  # the element exists, but zarr cannot read it
            return True

    def matrix(self, name: str) -> MatrixLayout:
        """The layout of the matrix `"X"`, `"layers/NAME"` or `"raw/X"`. Raises FormatError if it cannot be read."""
        if not isinstance(name, str) or name not in self.matrix_names:
            raise FormatError(
                f"there is no matrix {name!r} in {self.location.url}; there are: {', '.join(self.matrix_names)}"
                f"{suggestion(name, self.matrix_names)}"
            )
        node = self.node(name)
        if isinstance(node, zarr.Array):
            n_rows, n_genes = self.shape(name)
            return MatrixLayout(path=name, n_rows=n_rows, n_genes=n_genes, values=self.array_layout(name), genes=None)
        encoding = node.attrs.get("encoding-type")
        if encoding != "csr_matrix":
            raise FormatError(
                f"{name} of {self.location.url} is a {encoding}: rows can only be read from a csr_matrix "
                "or a dense array. Run 'zloader convert' on it"
            )
        n_rows, n_genes = self.shape(name)
        genes = replace(self.array_layout(f"{name}/indices"), below=n_genes)
        for path, dtype in ((genes.path, genes.dtype), (f"{name}/indptr", self.node(f"{name}/indptr").dtype)):
            if dtype.kind not in "iu":
                raise FormatError(f"{path} of {self.location.url} holds {dtype}, not integers: the store is damaged")
        values = self.array_layout(f"{name}/data")
        return MatrixLayout(path=name, n_rows=n_rows, n_genes=n_genes, values=values, genes=genes)

    def shape(self, name: str) -> tuple[int, int]:
        """The numbers of rows and genes of a matrix, from its metadata."""
        node = self.node(name)
        shape = node.shape if isinstance(node, zarr.Array) else node.attrs.get("shape")
        found = matrix_shape(shape)
        if found is None:
            raise self.damaged(name, f"its metadata give {shape!r:.100} as its shape, not rows x genes")
        return found

    def indptr(self, matrix: MatrixLayout) -> NDArray[np.integer] | None:
        """The whole indptr of a CSR matrix (rows + 1, int64), cached in the mirror; None for a dense matrix."""
        offsets = self.offsets(matrix)
        return offsets.whole() if isinstance(offsets, PagedOffsets) else offsets

    def offsets(self, matrix: MatrixLayout) -> NDArray[np.integer] | PagedOffsets | None:
        """The indptr of a CSR matrix: a whole array, or read page by page if it is large; None for a dense matrix."""
        if matrix.genes is None:
            return None
        path = f"{matrix.path}/indptr"
        if path not in self._offsets:
            node, where = self.node(path), f"{path} of {self.location.url}"
            n_entries, n_values = int(node.shape[0]), min(array.n_elements for array in matrix.arrays)
            if n_entries != matrix.n_rows + 1:
                raise FormatError(f"{where} has {n_entries} entries for {matrix.n_rows} rows: the store is damaged")
            if n_entries <= _MOST_WHOLE or not self._has_every_object(path):
                self._offsets[path] = self.column(path, IndptrCheck(where, n_values), "int64")
            else:
                pages = pages_of(path, n_entries, int(node.chunks[0]))
                mirror = None if self.mirror_directory is None else open_array(self.mirror_directory, pages)
                read = partial(self.window, path)
                self._offsets[path] = PagedOffsets(pages, read, n_values=n_values, where=where, mirror=mirror)
        return self._offsets[path]

    def _has_every_object(self, path: str) -> bool:
        """Whether all objects of an array are listed, so that none of them is read as fill values.

        A shard may leave out chunks all the same. They are read as 0, or else this is False.
        """
        node = self.node(path)
        with self._reading(path, node):
            return not (node.shards and node.fill_value) and all(key in self._sizes for key in stored_keys(node))

    def mirror(self, matrix: MatrixLayout) -> Mirror | None:
        """The mirror of a matrix, opened once per process. None without a usable cache."""
        if self.mirror_directory is None:
            return None
        if matrix.path not in self._mirrors:
            self._mirrors[matrix.path] = open_mirror(self.mirror_directory, matrix.arrays, self._sizes)
        return self._mirrors[matrix.path]

    def original_dtype(self, matrix: MatrixLayout) -> str:
        """The dtype of the values before `convert` narrowed it, or else the stored dtype."""
        return str(self.recorded_dtypes(matrix.path).get("data", np.dtype(matrix.values.dtype).name))

    def recorded_dtypes(self, path: str) -> dict[str, Any]:
        """The dtypes of `data` and `indices` before `convert` narrowed them; only the arrays that it narrowed."""
        recorded = self.node(path).attrs.get("zloader")
        dtypes = recorded.get("dtype") if isinstance(recorded, dict) else None
        return dtypes if isinstance(dtypes, dict) else {}

    def object_sizes(self) -> Mapping[str, int]:
        """The size in bytes of each stored object, by key."""
        return self._sizes

    def source(self, options: FetchOptions) -> ByteSource:
        """Reads byte ranges of the store's objects; with `offline`, raises ReadError instead."""
        if self.offline:
            return OfflineSource(self.location.url)
        if self.location.scheme == "file":
            return FileSource(self.location, self.objects, options)
        # Imported here because it imports TensorStore, which local stores do not need.
        from zloader.reading.object_source import ObjectSource

        return ObjectSource(self.location, self.objects, options)

    def part(self, matrix: MatrixLayout, options: FetchOptions) -> MatrixPart:
        """A matrix of this store, as a Recipe takes it."""
        return MatrixPart(
            url=self.location.url,
            matrix=matrix,
            indptr=self.offsets(matrix),
            object_sizes=self.object_sizes(),
            source=self.source(options),
            mirror=self.mirror(matrix),
        )


def _is_name(name: Any) -> bool:
    """Whether a metadata value is a relative path that stays below its group."""
    return isinstance(name, str) and {"", ".", ".."}.isdisjoint(name.split("/"))
