"""One opened AnnData store: its root group, its listing, its mirror, and how its matrices are laid out.

Opening reads one metadata object; the listing is given. Elements are read one by one, when they are first used, with
zarr and anndata. TensorStore is not used here: only reading rows of a matrix opens it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from zloader.access.file_source import FileSource
from zloader.access.listed_store import ListedStore
from zloader.access.location import Location
from zloader.access.stored_objects import Listing, fingerprint, mirror_fingerprint
from zloader.access.zarr_groups import UNDECODABLE, open_zarr_group, stored_keys, without_stale
from zloader.caching.directory import open_mirror_directory
from zloader.caching.kept import CachedMetadataStore, OfflineSource, load_array, save_array, save_listing
from zloader.caching.mirror import Mirror, open_rows
from zloader.common.errors import CacheError, FormatError, ZloaderError
from zloader.common.messages import suggestion
from zloader.common.options import Cache, FetchOptions
from zloader.common.records import ByteSource
from zloader.dataset.elements import ROOTS, StoredElements, is_array, path_of
from zloader.dataset.transposed import TransposedMatrix
from zloader.reading.matrix_parts import MatrixPart
from zloader.selecting.genes import ChosenGenes
from zloader.storage.layout import ArrayLayout, MatrixLayout
from zloader.storage.metadata import matrix_shape
from zloader.storage.row_blocks import RowForm
from zloader.storage.row_offsets import MOST_WHOLE, Page, RowOffsets

_WINDOW_BYTES = 32 << 20  # of an array that is read whole, at a time


class OpenedStore(StoredElements):
    """One AnnData or MuData store, as it was when it was opened."""

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
        self.offline = offline
        self.fingerprint = fingerprint(objects)
        self.mirror_fingerprint = None if cache is None else mirror_fingerprint(location.url, origin, objects)
        super().__init__(location, objects)
        self.read_from, self._read_objects = location, objects  # of the chunks of matrices
        self.mirror_directory = None
        if cache is not None and self.mirror_fingerprint is not None:
            self.mirror_directory = open_mirror_directory(cache, self.mirror_fingerprint, location.address)
        self._mirrors: dict[str, Mirror | None] = {}
        self._offsets: dict[str, dict[int, Page]] = {}  # pages of row offsets, by path
        self._transposed: dict[str, TransposedMatrix] = {}  # by path
        if offline and self.mirror_directory is None:
            raise CacheError(f"cannot open {location.url} offline: its mirror cannot be used (see the warning)")
        self._opened = (os.getpid(), self._open_group())
        if self.mirror_directory is not None:
            save_listing(self.mirror_directory, origin, objects)

    @property
    def root(self) -> Any:
        """The root zarr group. A forked process opens it again, because it cannot use its parent's connections."""
        if self._opened[0] != os.getpid():
            self._opened = (os.getpid(), self._open_group())
        return self._opened[1]

    def require_anndata(self) -> None:
        """Raises FormatError if the root is not an AnnData or MuData element with obs and var."""
        encoding = self.root.attrs.get("encoding-type")
        if encoding not in ROOTS:
            raise FormatError(
                f"{self.location.url} is not an AnnData store: its root says encoding-type {encoding!r}, not 'anndata'"
            )
        for needed in ("obs", "var"):
            if needed not in self:
                raise FormatError(f"{self.location.url} has no {needed}: it is not a complete AnnData store")
        self.require_axis()

    def _open_group(self) -> Any:
        if not self.objects.keys() & {"zarr.json", ".zgroup"}:
            why = "its conversion did not finish" if "zloader.partial" in self.objects else "it has no zarr.json"
            raise FormatError(f"{self.location.url} is not a complete AnnData Zarr store: {why}")
        known: Literal[2, 3] = 3 if "zarr.json" in self.objects else 2  # saves zarr from probing for both
        store = self._zarr_store()
        try:
            try:
                group = open_zarr_group(store, zarr_format=known)
                group = group if self.location.is_web else without_stale(group, store, self.location.url)
            except UNDECODABLE:  # a single array that zarr cannot read makes the consolidated metadata unusable
                group = open_zarr_group(store, zarr_format=known, use_consolidated=False)
        except ZloaderError:
            raise
        except UNDECODABLE as error:
            raise FormatError(f"{self.location.url} is not a Zarr group: {error}") from error
        store.complete = "zloader" in group.attrs  # `convert` writes every object, others omit chunks of fill values
        return group

    def _zarr_store(self) -> ListedStore:
        if self.mirror_directory is None:
            store, location = self.location.zarr_store(read_only=True), self.location
            return ListedStore(store, location.url, self.object_sizes(), all_listed=not location.is_web)
        return CachedMetadataStore(self.location, self.objects, self.mirror_directory, offline=self.offline)

    def source(self, options: FetchOptions, path: str = "") -> ByteSource:
        """Reads byte ranges of the store's objects, or of those of a transposed matrix at a path.

        With `offline`, raises ReadError for what is stored.
        """
        if path in self._transposed:
            return self._transposed[path]
        if self.offline:
            return OfflineSource(self.location.url)
        if self.read_from.scheme == "file":
            return FileSource(self.read_from, self._read_objects, options)
        # Imported here because it imports TensorStore, which local stores do not need.
        from zloader.reading.object_source import ObjectSource

        return ObjectSource(self.read_from, self._read_objects, options)

    # ---- matrices

    def matrix(self, name: str) -> MatrixLayout:
        """The layout of a matrix, such as `"X"` or `"rna:layers/NAME"`. Raises FormatError if it cannot be read."""
        if not isinstance(name, str) or name not in self.matrix_names:
            raise FormatError(
                f"there is no matrix {name!r} in {self.location.url}; there are: {', '.join(self.matrix_names)}"
                f"{suggestion(name, self.matrix_names)}"
            )
        return self.matrix_at(path_of(name))

    def matrix_at(self, name: str) -> MatrixLayout:
        """As `matrix`, for the path of a matrix, such as `"mod/rna/X"`."""
        node = self.node(name)
        if is_array(node):
            n_rows, n_genes = self.shape(name)
            return MatrixLayout(path=name, n_rows=n_rows, n_genes=n_genes, values=self.array_layout(name), genes=None)
        encoding = node.attrs.get("encoding-type")
        if encoding == "csc_matrix":
            if name not in self._transposed:
                self._transposed[name] = TransposedMatrix(self, name, self.shape(name))
            return self._transposed[name].layout
        if encoding != "csr_matrix":
            raise FormatError(
                f"{name} of {self.location.url} is a {encoding}: rows can only be read from a csr_matrix, a csc_matrix "
                "or a dense array. Run 'zloader convert' on it"
            )
        n_rows, n_genes = self.shape(name)
        genes = self._genes_layout(f"{name}/indices", n_genes)
        for path, dtype in ((genes.path, genes.dtype), (f"{name}/indptr", self.node(f"{name}/indptr").dtype)):
            if dtype.kind not in "iu":
                raise FormatError(f"{path} of {self.location.url} holds {dtype}, not integers: the store is damaged")
        values = self.array_layout(f"{name}/data")
        return MatrixLayout(path=name, n_rows=n_rows, n_genes=n_genes, values=values, genes=genes)

    def transposing_bytes(self, matrix: MatrixLayout) -> int:
        """The memory that transposing a matrix takes; 0 if it is not stored by columns."""
        transposed = self._transposed.get(matrix.path)
        return 0 if transposed is None else transposed.takes_bytes

    def _genes_layout(self, path: str, n_genes: int) -> ArrayLayout:
        """The layout of the gene indices of a CSR matrix."""
        return replace(self.array_layout(path), below=n_genes)

    def shape(self, name: str) -> tuple[int, int]:
        """The numbers of rows and genes of a matrix, from its metadata."""
        node = self.node(path_of(name))
        shape = node.shape if is_array(node) else node.attrs.get("shape")
        found = matrix_shape(shape)
        if found is None:
            raise self.damaged(name, f"its metadata give {shape!r:.100} as its shape, not rows x genes")
        return found

    def offsets(self, matrix: MatrixLayout) -> RowOffsets | None:
        """The indptr of a CSR matrix, read when rows are first looked up; None for a dense matrix."""
        if matrix.genes is None:
            return None
        path = f"{matrix.path}/indptr"
        node, transposed, where = self.node(path), self._transposed.get(matrix.path), f"{path} of {self.location.url}"
        n_entries, chunk = int(node.shape[0]), int(node.chunks[0])
        read: Callable[[int, int], NDArray[np.integer]] = partial(self.window, path)
        if transposed is not None:
            n_entries = chunk = matrix.n_rows + 1
            read = transposed.offsets
        elif n_entries > MOST_WHOLE and not self._has_every_object(path):
            chunk = n_entries
        if n_entries != matrix.n_rows + 1:
            raise FormatError(f"{where} has {n_entries} entries for {matrix.n_rows} rows: the store is damaged")
        n_values, kept = min(array.n_elements for array in matrix.arrays), self._offsets.setdefault(path, {})
        if self.offline and not n_values:  # there is no mirror of no values, which would know where rows are
            read = _zeros
        return RowOffsets(read, n_entries, chunk, n_values=n_values, where=where, kept=kept)

    def _has_every_object(self, path: str) -> bool:
        """Whether all objects of an array are listed, so that none of them is read as fill values.

        A shard may leave out chunks all the same. They are read as 0, or else this is False.
        """
        node = self.node(path)
        with self.reading(path, node):
            return not (node.shards and node.fill_value) and all(key in self._sizes for key in stored_keys(node))

    def whole(self, path: str, codes_below: int | None = None) -> NDArray[Any]:
        """A whole array of numbers or dates in the stored dtype; kept and memory-mapped if there is a mirror with room.

        Codes of so many categories have the least dtype. Raises FormatError for a code without a category.
        """
        node, directory = self.node(path), self.mirror_directory

        def windows() -> Iterator[NDArray[Any]]:
            stored = max(1, (node.shards or node.chunks)[0])  # whole objects
            step = max(1, _WINDOW_BYTES // max(1, stored * node.dtype.itemsize * math.prod(node.shape[1:]))) * stored
            for first in range(0, node.shape[0], step):
                values = self.window(path, first, min(first + step, node.shape[0]))
                if codes_below is not None:
                    wrong = np.flatnonzero((values < -1) | (values >= codes_below))
                    if len(wrong):
                        code = f"row {first + int(wrong[0])} has the code {values[wrong[0]]}"
                        raise self.damaged(path, f"{code} of {codes_below} categories")
                yield values.astype(dtype, copy=False)

        with self.reading(path, node):  # the shape may make no sense
            dtype, found = node.dtype.newbyteorder("="), None
            least = dtype if codes_below is None else np.min_scalar_type(-max(1, codes_below))
            dtype = least if least.itemsize < dtype.itemsize else dtype
            if directory is not None and node.shape[0]:
                found = load_array(directory, path, shape=node.shape, dtype=dtype)
                if found is None and not self.offline:
                    found = save_array(directory, path, windows(), shape=node.shape, dtype=dtype)
            if found is None:
                found, filled = np.empty(node.shape, dtype), 0
                for values in windows():
                    found[filled : filled + len(values)] = values
                    filled += len(values)
        return found

    def mirror(self, matrix: MatrixLayout, genes: ChosenGenes | None = None) -> Mirror | None:
        """The mirror of a matrix, or of these genes of it, opened once per process. None without a usable cache."""
        directory = self.mirror_directory
        if directory is None:
            return None
        panel = None if genes is None or matrix.genes is None else genes.column_of
        name = RowForm.of(matrix, panel, compact=False).name
        if name not in self._mirrors:
            self._mirrors[name] = open_rows(directory, matrix, panel)
        return self._mirrors[name]

    def original_dtype(self, matrix: MatrixLayout) -> str:
        """The dtype of the values before `convert` narrowed it, or else the stored dtype."""
        return str(self.recorded_dtypes(matrix.path).get("data", np.dtype(matrix.values.dtype).name))

    def recorded_dtypes(self, path: str) -> dict[str, Any]:
        """The dtypes of `data` and `indices` before `convert` narrowed them; only the arrays that it narrowed."""
        recorded = self.node(path).attrs.get("zloader")
        dtypes = recorded.get("dtype") if isinstance(recorded, dict) else None
        return dtypes if isinstance(dtypes, dict) else {}

    def part(self, matrix: MatrixLayout, options: FetchOptions, genes: ChosenGenes | None = None) -> MatrixPart:
        """A matrix of this store, or these genes of it, as a Recipe takes it."""
        transposed, offsets, mirror = (
            self._transposed.get(matrix.path),
            self.offsets(matrix),
            self.mirror(matrix, genes),
        )
        if offsets is not None and offsets.is_whole and mirror is None:
            offsets.load()  # now, while those of other stores are read
        # Imports the client, which a process that is forked while another thread imports it could never import.
        self.source(options, matrix.path)
        return MatrixPart(
            url=self.location.url,
            matrix=matrix,
            indptr=offsets,
            object_sizes=self._sizes if transposed is None else transposed.sizes,
            open_source=partial(self.source, options, matrix.path),
            mirror=mirror,
            genes=genes,
            row_of=self.row_of(matrix.path),
        )


def _zeros(start: int, stop: int) -> NDArray[np.int64]:
    return np.zeros(stop - start, np.int64)
