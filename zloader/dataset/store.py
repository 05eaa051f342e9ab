"""One opened AnnData store: its root group, its listing, its mirror, its elements, and how its matrices are laid out.

Opening reads one metadata object; the listing is given. Elements are read one by one, when they are first used, with
zarr and anndata. TensorStore is not used here: only reading rows of a matrix opens it.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from zloader.access.file_source import FileSource
from zloader.access.listed_store import ListedStore
from zloader.access.location import Location
from zloader.access.stored_objects import Listing, fingerprint, mirror_fingerprint
from zloader.access.zarr_groups import (
    UNDECODABLE,
    member_of,
    open_zarr_group,
    stored_keys,
    undecodable_key,
    without_stale,
)
from zloader.caching.directory import open_mirror_directory
from zloader.caching.kept import CachedMetadataStore, OfflineSource, kept_array, save_listing
from zloader.caching.rows_file import Mirror, open_rows
from zloader.common.concurrent_calls import require_main_thread
from zloader.common.deferred import pd
from zloader.common.errors import CacheError, FormatError, ZloaderError
from zloader.common.locks import cached_property
from zloader.common.messages import suggestion
from zloader.common.options import Cache, FetchOptions
from zloader.common.records import ByteSource, Rows
from zloader.dataset.elements import (
    MUDATA,
    ROOTS,
    is_array,
    is_name,
    is_outdated,
    matrix_encoding,
    path_of,
    read_element,
    renewed,
)
from zloader.dataset.transposed import TransposedMatrix
from zloader.reading.recipe import MatrixPart
from zloader.selecting.columns import as_names
from zloader.selecting.genes import ChosenGenes
from zloader.selecting.row_maps import RowMap, checked_map, is_whole, looked_up
from zloader.storage.layout import ArrayLayout, MatrixLayout
from zloader.storage.metadata import layout_of, matrix_shape, stored_length
from zloader.storage.row_blocks import RowForm
from zloader.storage.row_offsets import MOST_WHOLE, Page, RowOffsets

_WINDOW_BYTES = 32 << 20  # of an array that is read whole, at a time
_OF_SPARSE = ("data", "indices", "indptr")
_OF_MODALITY = re.compile(r"mod/([^/]+)/.+", re.DOTALL)
_FRAME = re.compile(r"((?:mod/[^/]+/)?(?:obsm|(?:raw[/.])?(?:obs|varm?)))(?:/(.+))?", re.DOTALL)


class OpenedStore:
    """One AnnData or MuData store, as it was when it was opened.

    MuData says in `obsmap/NAME`, for each row of the whole, the number of its row in the modality NAME, from 1 on, or 0
    if the modality lacks it. Nothing is aligned in memory: rows are looked up when they are read, in 4 bytes per row
    and modality.
    """

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
        self.location, self.objects = location, objects
        self._sizes: Mapping[str, int] = objects.sizes
        self._nodes: tuple[Any, dict[str, Any]] = None, {}  # of a root, by path
        self._rows: dict[str, RowMap | None] = {}  # by modality
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
        if encoding not in ROOTS and not (encoding is None and "obs" in self and "var" in self):  # before 0.8
            raise FormatError(
                f"{self.location.url} is not an AnnData store: its root says encoding-type {encoding!r}, not 'anndata'"
            )
        for needed in ("obs", "var"):
            if needed not in self:
                raise FormatError(f"{self.location.url} has no {needed}: it is not a complete AnnData store")

    def require_shared_rows(self) -> None:
        """Raises FormatError for a MuData whose modalities share genes."""
        axis: Any = self.root.attrs.get("axis", 0)
        if self.modalities and axis != 0:
            raise FormatError(
                f"the modalities of {self.location.url} share {'genes' if axis == 1 else 'rows and genes'} (axis "
                f"{axis}), and not rows: {'convert' if self.objects.keys() == {''} else 'open'} them one by one, such "
                f"as {self.location.url.rstrip('/')}/mod/{self.modalities[0]}"
            )

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
            return ListedStore(self.location, self.object_sizes(), all_listed=not self.location.is_web)
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

    # ---- elements

    def object_sizes(self) -> Mapping[str, int]:
        """The size in bytes of each stored object, by key."""
        return self._sizes

    @contextlib.contextmanager
    def reading(self, path: str, node: Any, start: int = 0, stop: int | None = None) -> Iterator[None]:
        """Raises FormatError for errors of zarr or anndata inside the block, and names the damaged object."""
        try:
            yield
        except (ZloaderError, MemoryError):
            raise
        except Exception as error:
            require_main_thread()
            key = undecodable_key(node, start, stop)
            damaged = (
                f", whose object {key} ({self._sizes[key]} bytes) is damaged"
                if key is not None and key in self._sizes
                else ""
            )
            raise FormatError(f"cannot read {path} of {self.location.url}{damaged}: {error}") from error

    def node(self, path: str) -> Any:
        """The zarr group or array at a path. Raises FormatError if it is missing or zarr cannot read its metadata.

        It is kept, because metadata that are not consolidated would be read again each time.
        """
        kept = self._kept
        try:
            if path not in kept:
                kept[path] = self._found(path)
            return kept[path]
        except ZloaderError:
            raise
        except (KeyError, AttributeError, IndexError, OverflowError) as error:
            raise self.damaged(path, f"it is missing, or its metadata are invalid ({error})") from error
        except (ValueError, TypeError) as error:
            raise FormatError(
                f"cannot read {path} of {self.location.url}: {error}. Write it again with a data type that zarr-python "
                "supports, such as float32"
            ) from error

    def _found(self, path: str) -> Any:
        named = _FRAME.fullmatch(path)
        if named is None:
            return member_of(self.root, path)
        if named[2]:
            return member_of(self.node(named[1]), named[2])
        node = member_of(self.root, path)
        if not is_outdated(node):
            return node
        with self.reading(path, node):
            return renewed(path, node, lambda labels: self.element(labels) if labels in self else None)

    def damaged(self, path: str, why: str) -> FormatError:
        """The error that says that an element is damaged, and why."""
        return FormatError(f"{path} of {self.location.url} cannot be used because {why}: the store is damaged")

    def keys(self, group: str) -> list[str]:
        """Sorted names of the members of a group such as `"layers"`; empty if there is no such group.

        Raises FormatError for a group of a file that cannot be read.
        """
        kept, members = self._kept, f"{group}/"
        if members not in kept:
            try:
                found = self.root.get(group, {})
                kept[members] = sorted(self.node(group) if is_array(found) else found)
            except ZloaderError:
                raise
            except UNDECODABLE:  # zarr lists no members if it cannot read one of them
                inside = (key.split("/") for key in self.objects if key.startswith(members))
                kept[members] = sorted({parts[1] for parts in inside if len(parts) > 2})
        return list(kept[members])

    @property
    def _kept(self) -> dict[str, Any]:
        """Nodes by path, and the names of their members by path and a slash, of the root as it is now."""
        if self._nodes[0] is not (root := self.root):
            self._nodes = root, {}
        return self._nodes[1]

    def __contains__(self, path: str) -> bool:
        named = _FRAME.fullmatch(path)
        try:
            if named is None or not named[2]:
                return path in self.root
            return named[1] in self and not is_array(node := self.node(named[1])) and named[2] in node
        except (FormatError, *UNDECODABLE):  # the element exists, but zarr cannot read it
            return True

    @cached_property
    def n_obs(self) -> int:
        """The number of rows."""
        return self.length("obs")

    def length(self, frame: str) -> int:
        """The number of rows of a frame such as `"raw/var"`, from the shape of its index."""
        path = self.index_path(frame)
        node = self.node(path)
        with self.reading(path, node):
            length = stored_length(node)
        if length is None:
            raise self.damaged(path, "it does not hold names")
        return length

    def index_path(self, frame: str) -> str:
        """The path of the index of a frame such as `"obs"`: an array, or a group for a categorical or nullable one."""
        return f"{frame}/{self.index_name(frame)}"

    def index_name(self, frame: str) -> str:
        """The name of the index of a frame within it."""
        name = self.node(frame).attrs.get("_index")
        if not is_name(name):
            raise self.damaged(frame, f"its metadata name {name!r} as its index")
        return str(name)

    def names(self, frame: str) -> pd.Index:
        """The index of `"obs"`, `"var"` or `"raw/var"`."""
        return as_names(self.element(self.index_path(frame)))

    def columns(self, frame: str) -> list[str]:
        """Names of the columns of `"obs"`, `"var"` or `"raw/var"`, in the order of the frame."""
        names = self.node(frame).attrs.get("column-order")
        if not isinstance(names, list) or not all(map(is_name, names)):
            raise self.damaged(frame, f"its metadata list {names!r:.100} as its columns")
        return names

    def is_coded(self, path: str) -> bool:
        """Whether a column or index of a frame has codes and categories."""
        node = self.node(path)
        return not is_array(node) and node.attrs.get("encoding-type") == "categorical"

    def element(self, path: str) -> Any:
        """A whole element, as anndata reads it."""
        node = self.node(path)
        with self.reading(path, node):
            # The arrays of a sparse matrix have no encoding-type of their own.
            return node[...] if is_array(node) and "encoding-type" not in node.attrs else read_element(node)

    def window(self, path: str, start: int, stop: int) -> NDArray[Any]:
        """The rows `[start, stop)` of an array. Raises FormatError if they cannot be read."""
        node = self.node(path)
        with self.reading(path, node, start, stop):
            return np.asarray(node[start:stop])

    def array_layout(self, path: str) -> ArrayLayout:
        """The layout of an array of numbers. Raises FormatError if it cannot be read chunk by chunk."""
        node = self.node(path)
        try:
            return layout_of(node, absent_is_fill="zloader" not in self.root.attrs)
        except FormatError as error:
            raise FormatError(f"{self.location.url}: {error}") from error

    # ---- modalities

    @cached_property
    def modalities(self) -> list[str]:
        """The names of the modalities, in their order; none in an AnnData."""
        if self.root.attrs.get("encoding-type") != MUDATA:
            return []
        names = self.keys("mod")
        order = self.node("mod").attrs.get("mod-order", names)
        return [str(name) for name in order] if sorted(map(str, order)) == names else names

    @cached_property
    def matrix_names(self) -> list[str]:
        """The values that `x` may take: X, raw/X and the layers of this store, or those of its modalities."""
        if not self.modalities:
            return self._matrices_in("")
        return [f"{each}:{name}" for each in self.modalities for name in self._matrices_in(f"mod/{each}/")]

    def _matrices_in(self, above: str) -> list[str]:
        layers = [f"layers/{layer}" for layer in self.keys(f"{above}layers")]
        return [name for name in ("X", "raw/X") if self._has_matrix(f"{above}{name}")] + layers

    def _has_matrix(self, path: str) -> bool:
        try:
            return path in self and self.node(path).attrs.get("encoding-type") != "null"  # X may be None
        except FormatError:  # as reading it says
            return True

    @cached_property
    def obs_paths(self) -> dict[str, str]:
        """The paths of the obs columns by name: those of the whole, and then `rna:NAME` of the modality rna."""
        return self._with_modalities("obs", self.columns)

    @cached_property
    def obsm_paths(self) -> dict[str, str]:
        """The same of the obsm entries."""
        return self._with_modalities("obsm", self.keys)

    def _with_modalities(self, group: str, names: Callable[[str], list[str]]) -> dict[str, str]:
        found = {name: f"{group}/{name}" for name in names(group)}
        for each in self.modalities:
            for name in names(f"mod/{each}/{group}"):  # an entry of the whole goes before
                found.setdefault(f"{each}:{name}", f"mod/{each}/{group}/{name}")
        return found

    def modality_at(self, path: str) -> str | None:
        """The modality that an element at a path belongs to; None for one of the whole, and in an AnnData."""
        named = _OF_MODALITY.fullmatch(path) if self.modalities else None
        return None if named is None else named[1]

    def rows_at(self, path: str) -> int:
        """The number of rows of the whole or of the modality that an element at a path belongs to."""
        modality = self.modality_at(path)
        return self.n_obs if modality is None else self.length(f"mod/{modality}/obs")

    def row_of(self, path: str) -> RowMap | None:
        """For each row of the whole, its row in the modality whose element is at a path, or -1.

        None if they are the same rows, and for an element that belongs to no modality. Raises FormatError if the rows
        of the modality are not given, or do not exist.
        """
        modality = self.modality_at(path)
        if modality is None or modality in self._rows:
            return None if modality is None else self._rows[modality]
        at, n_rows = f"obsmap/{modality}", self.rows_at(path)
        if at not in self:
            raise FormatError(
                f"{self.location.url} does not say which rows its modality {modality!r} has ({at}): open it with "
                "mudata 0.2 or later, run mdata.update(), and write it again"
            )
        stored, refused = np.asarray(self.element(at)), partial(self.damaged, at)
        rows = checked_map(stored, n_whole=self.n_obs, n_rows=n_rows, refused=refused)
        self._rows[modality] = None if is_whole(rows, n_rows) else rows
        return self._rows[modality]

    def rows_in(self, path: str, rows: Rows) -> Rows:
        """The rows of the matrix at a path for some rows of the whole, without those that it lacks."""
        row_of = self.row_of(path)
        return rows if row_of is None else looked_up(row_of, rows)[0]

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
        encoding = matrix_encoding(self.node(name))
        if encoding == "dense":
            n_rows, n_genes = self.shape(name)
            return MatrixLayout(path=name, n_rows=n_rows, n_genes=n_genes, values=self.array_layout(name), genes=None)
        if encoding == "csc_matrix":
            if name not in self._transposed:
                arrays = [self.node(f"{name}/{part}") for part in _OF_SPARSE]
                read = partial(self._made_of, name)
                self._transposed[name] = TransposedMatrix(name, self.shape(name), self.location.url, arrays, read)
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

    def _made_of(self, name: str, make: Callable[..., Any]) -> Any:
        with self.reading(name, self.node(name)):
            return make(*(self.element(f"{name}/{part}") for part in _OF_SPARSE))

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
        shape = node.shape if is_array(node) else node.attrs.get("shape", node.attrs.get("h5sparse_shape"))
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
            dtype = node.dtype.newbyteorder("=")
            least = dtype if codes_below is None else np.min_scalar_type(-max(1, codes_below))
            dtype = least if least.itemsize < dtype.itemsize else dtype
            return kept_array(directory if node.shape[0] else None, path, windows, shape=node.shape, dtype=dtype)

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
