"""Checks the metadata of a store: are all objects present, none left over, and all shapes consistent?

`Findings` collects the problems of a store.
"""

from __future__ import annotations

import copy
import json
import math
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import zarr
from zarr.storage import StorePath

from zloader.access.listed_store import ListedStore
from zloader.access.zarr_groups import UNDECODABLE, stored_keys
from zloader.common.errors import CorruptChunkError, FormatError, ZloaderError
from zloader.conversion.writing.destination import MARKER
from zloader.conversion.writing.object_writer import translated
from zloader.conversion.writing.stored import Chunk, StoredArray
from zloader.dataset.dataset import Dataset
from zloader.dataset.elements import is_array
from zloader.dataset.h5ad import OpenedFile
from zloader.storage.decode import Decoder
from zloader.storage.metadata import matrix_shape
from zloader.storage.placement import ABSENT

_METADATA = "zarr.json"
_MAX_NAMED = 100  # problems
_PIECE_BYTES = 4 << 20  # of an .h5ad file, decoded
_COMPRESSED = ("csr_matrix", "csc_matrix")
# The parts of group elements that must have equal lengths. The first part gives the length of the element.
_PARTS = {
    "categorical": ("codes",),
    "nullable-integer": ("values", "mask"),
    "nullable-boolean": ("values", "mask"),
    "nullable-string-array": ("values", "mask"),
}
_UNREADABLE = (*UNDECODABLE, ZeroDivisionError)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem. `where` is a key or path in the store; `what` describes the problem and its remedy."""

    where: str
    what: str


class Findings:
    """The problems that several threads have found so far. Keeps the first 100, and the paths of the others."""

    def __init__(self, url: str) -> None:
        self._url, self._above = url, ""
        self._lock = threading.Lock()
        self._named: list[Problem] = []
        self._paths: Counter[str] = Counter()

    def add(self, where: str, what: object) -> None:
        """Adds a problem, given as text or as an error."""
        problem = Problem(where=self._above + where, what=str(what).removeprefix(f"{self._url}: "))
        with self._lock:
            self._paths[problem.where] += 1
            if len(self._named) < _MAX_NAMED:
                self._named.append(problem)

    def below(self, group: str) -> Findings:
        """The same findings, whose paths are given from a group on."""
        below = copy.copy(self)
        below._above = f"{group}/" if group else ""
        return below

    def any_in(self, path: str) -> bool:
        """Whether there is a problem at a path or below it."""
        path = self._above + path
        with self._lock:
            return any(known == path or known.startswith(f"{path}/") for known in self._paths)

    def problems(self) -> tuple[Problem, ...]:
        """The first 100 problems. If there are more, a last entry gives their number."""
        with self._lock:
            more = self._paths.total() - len(self._named)
            rest = [Problem(where=self._url, what=f"{more} more problems")] if more else []
            return (*self._named, *rest)


class Hierarchy:
    """The groups and arrays of a store, by path, from the metadata object of each."""

    def __init__(self, dataset: Dataset, pool: Executor, findings: Findings) -> None:
        """`pool` reads the objects, many at once."""
        self._dataset, self._findings, self._group = dataset, findings, ""
        self.location = dataset.store.location
        self.sizes = dataset.store.object_sizes()
        self.written_by_us = "zloader" in dataset.store.root.attrs
        self._nodes = self._read_nodes(pool)
        self.arrays = dict(self._open_arrays())

    # --- Nodes

    def _read_nodes(self, pool: Executor) -> dict[str, Mapping[str, Any]]:
        keys = sorted(key for key in self.sizes if key.rpartition("/")[2] == _METADATA)
        filesystem = self.location.filesystem()

        def read(key: str) -> bytes:
            with translated(f"read {key} from", self.location.url):
                stored: bytes = filesystem.cat_file(f"{self.location.path}/{key}")
            return stored

        nodes: dict[str, Mapping[str, Any]] = {}
        for key, stored in zip(keys, pool.map(read, keys), strict=True):
            try:
                nodes[key.removesuffix(_METADATA).rstrip("/")] = dict(json.loads(stored))
            except (ValueError, TypeError) as error:
                self._findings.add(key, f"({len(stored)} bytes) is not the metadata of a group or array: {error}")
        consolidated = nodes.get("", {}).get("consolidated_metadata")
        return nodes if consolidated is None else self._consolidated(consolidated["metadata"], nodes)

    def _consolidated(
        self, copies: Mapping[str, Mapping[str, Any]], nodes: dict[str, Mapping[str, Any]]
    ) -> dict[str, Mapping[str, Any]]:
        """All nodes, after comparing their metadata with the consolidated copies in the root."""
        for path in sorted(copies.keys() | nodes.keys() - {""}):
            key = f"{path}/{_METADATA}"
            if path not in copies:
                self._findings.add(key, "is not in the consolidated metadata of the root, so readers do not see it")
            elif key not in self.sizes:
                self._findings.add(key, "is missing, but is in the consolidated metadata of the root")
            elif path in nodes and _own(copies[path]) != _own(nodes[path]):
                self._findings.add(key, "differs from the consolidated metadata of the root")
        return {**nodes, **copies}  # readers use the root's copies

    def _open_arrays(self) -> Iterator[tuple[str, zarr.Array[Any]]]:
        inner, all_listed = self.location.zarr_store(read_only=True), not self.location.is_web
        store = ListedStore(inner, self.location.url, self.sizes, all_listed=all_listed)
        store.complete = self.written_by_us
        for path, node in sorted(self._nodes.items()):
            if node.get("node_type") != "array":
                continue
            try:
                store.register_arrays(f"{path}/{_METADATA}", node)
                array = zarr.Array.from_dict(StorePath(store, path), dict(node))
                stored_keys(array)  # raises an error for an invalid shape
            except _UNREADABLE as error:
                self._findings.add(f"{path}/{_METADATA}", f"does not describe an array: {error}")
            else:
                yield path, array

    def stored(self, path: str) -> StoredArray:
        """An array, to read it."""
        return StoredArray(self.location, self.arrays[path], self.sizes, absent_is_fill=not self.written_by_us)

    def below(self, group: str) -> Self:
        """The nodes of a group, whose paths are given from it on."""
        if not group:
            return self
        made, above = copy.copy(self), f"{group}/"
        made._group, made._findings = group, self._findings.below(group)
        made._nodes = {path.removeprefix(above): node for path, node in self._nodes.items() if path.startswith(above)}
        made.arrays = {path.removeprefix(above): array for path, array in self.arrays.items() if path.startswith(above)}
        return made

    def children(self, path: str) -> list[str]:
        """The paths directly below a group."""
        above = f"{path}/" if path else ""
        names = (node[len(above) :] for node in self._nodes if node.startswith(above) and node != path)
        return sorted(above + name for name in names if "/" not in name)

    def attributes(self, path: str) -> Mapping[str, Any]:
        """The attributes of a node, empty if there is no such node."""
        attributes = self._nodes.get(path, {}).get("attributes")
        return attributes if isinstance(attributes, dict) else {}

    def encoding(self, path: str) -> str:
        """The encoding-type of a node, empty if there is no such node."""
        return str(self.attributes(path).get("encoding-type", "array" if path in self.arrays else ""))

    @property
    def compressed(self) -> list[str]:
        """The paths of CSR and CSC matrices."""
        return sorted(path for path in self._nodes if self.encoding(path) in _COMPRESSED)

    @property
    def matrices(self) -> list[str]:
        """The paths of X, raw/X and all layers that exist."""
        x = [path for path in ("X", "raw/X") if self.encoding(path) not in ("", "null")]
        return x + self.children("layers")

    # --- Objects

    @property
    def metadata_bytes(self) -> int:
        """Bytes of all metadata objects."""
        return sum(size for key, size in self.sizes.items() if key.rpartition("/")[2] == _METADATA)

    def check_objects(self) -> None:
        """Checks that every object of every array exists, and that there are no other objects.

        Other programs may omit objects that hold only fill values.
        """
        unclaimed = {key for key in self.sizes if key.rpartition("/")[2] != _METADATA}
        if MARKER in unclaimed:
            self._findings.add(MARKER, "a conversion did not finish: convert again, or continue with --resume")
            unclaimed.discard(MARKER)
        for array in self.arrays.values():
            for key in stored_keys(array):
                if key in unclaimed:
                    unclaimed.discard(key)
                elif self.written_by_us:
                    self._findings.add(key, "is missing: the store is incomplete. Convert it again")
        for key in sorted(unclaimed):
            self._findings.add(key, "belongs to no array")

    # --- Shapes

    def shape(self, path: str) -> tuple[int, ...]:
        """The shape of an element, or its length alone if it has no shape. Empty if unknown."""
        attributes, encoding = self.attributes(path), self.encoding(path)
        if path in self.arrays:
            return tuple(self.arrays[path].shape)
        if encoding in _COMPRESSED:
            return matrix_shape(attributes.get("shape")) or ()
        if encoding == "dataframe":
            return self.shape(f"{path}/{attributes.get('_index')}")[:1]
        if encoding in _PARTS:
            return self.shape(f"{path}/{_PARTS[encoding][0]}")[:1]
        return (int(attributes["length"]),) if encoding == "awkward-array" else ()

    def length(self, frame: str) -> int:
        """The number of rows of obs or genes of var, or 0 if unknown."""
        return next(iter(self.shape(frame)), 0)

    def check_shapes(self) -> None:
        """Checks that elements by row have n_obs rows, elements by gene n_vars genes, and that lengths agree."""
        rows, genes, raw_genes = (self.length(frame) for frame in ("obs", "var", "raw/var"))
        elements = {
            "layers": (rows, genes),
            "obsm": (rows,),
            "obsp": (rows, rows),
            "varm": (genes,),
            "varp": (genes, genes),
            "raw/varm": (raw_genes,),
            "obsmap": (rows,),
            "varmap": (genes,),
        }
        for part, shape in elements.items():
            for path in self.children(part):
                self._check_shape(path, shape)
        for path, wanted in {"X": (rows, genes), "raw/X": (rows, raw_genes)}.items():
            if path in self.matrices:
                self._check_shape(path, wanted)
        for path in self.matrices:
            if self._findings.any_in(f"{path}/{_METADATA}"):
                continue
            if self.written_by_us and self.encoding(path) == "csc_matrix":
                self._findings.add(path, "is a csc_matrix, but 'zloader convert' writes rows")
            try:
                self._dataset.store.matrix_at(f"{self._group}/{path}".lstrip("/"))
            except (FormatError, *_UNREADABLE) as error:
                self._findings.add(path, error)
        for path in sorted(self._nodes):
            if not path.startswith("mod/"):
                self._check_parts(path)
        for modality in self.children("mod"):
            self.below(modality).check_shapes()
            name = modality.removeprefix("mod/")
            try:
                self._dataset.store.row_of(f"mod/{name}/X")
            except (FormatError, *_UNREADABLE) as error:
                self._findings.add(f"obsmap/{name}", error)

    def _check_shape(self, path: str, wanted: tuple[int, ...]) -> None:
        shape = self.shape(path)
        if shape[: len(wanted)] != wanted:
            required = " x ".join(map(str, wanted)) + (" ..." if len(wanted) == 1 else "")
            self._findings.add(path, f"has shape {shape}, but obs and var require {required}")

    def _check_parts(self, path: str) -> None:
        attributes, encoding = self.attributes(path), self.encoding(path)
        if encoding == "dataframe":
            columns = attributes.get("column-order")
            if not isinstance(columns, list):
                self._findings.add(path, f"its metadata list {columns!r:.100} as its columns")
                return
            self._check_equal(path, [f"{path}/{name}" for name in (attributes.get("_index"), *columns)])
        elif encoding in _PARTS:
            self._check_equal(path, [f"{path}/{part}" for part in _PARTS[encoding]])
            if encoding == "categorical" and not self.shape(f"{path}/categories"):
                self._findings.add(path, "has no categories")
        elif encoding in _COMPRESSED and not self.fits(path):
            lengths = [f"{part} {self.shape(f'{path}/{part}')}" for part in ("indptr", "indices", "data")]
            self._findings.add(path, f"has shape {self.shape(path)}, but {', '.join(lengths)}: these do not match")

    def _check_equal(self, path: str, parts: list[str]) -> None:
        for part in parts:
            if part not in self._nodes:
                self._findings.add(part, f"is missing, but {path} needs it")
            elif self.shape(part)[:1] != self.shape(parts[0])[:1]:
                self._findings.add(part, f"has shape {self.shape(part)}, but {parts[0]} has {self.shape(parts[0])}")

    def fits(self, path: str) -> bool:
        """Whether the three arrays of a CSR or CSC matrix exist, with lengths that match each other and its shape."""
        shape, parts = self.shape(path), [self.arrays.get(f"{path}/{part}") for part in ("indptr", "indices", "data")]
        if len(shape) != 2 or None in parts:
            return False
        indptr, indices, values = (array for array in parts if array is not None)
        n_major = shape[0] if self.encoding(path) == "csr_matrix" else shape[1]
        whole_numbers = indptr.dtype.kind in "iu" and indices.dtype.kind in "iu"
        return whole_numbers and indptr.shape == (n_major + 1,) and indices.shape == values.shape == (values.size,)


def _own(node: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a node without the consolidated metadata."""
    return {name: value for name, value in node.items() if name != "consolidated_metadata"}


# ---- an .h5ad file, checked where it lies
#
# HDF5 keeps no checksums unless an array was written with fletcher32. Of other arrays, chunks that do not decode, gene
# indices and codes out of range, and shapes that disagree are found. A flipped bit in a value is not.


class FileHierarchy(Hierarchy):
    """The groups and arrays of an .h5ad file."""

    @property
    def _file(self) -> OpenedFile:
        store = self._dataset.store
        assert isinstance(store, OpenedFile)
        return store

    def _read_nodes(self, pool: Executor) -> dict[str, Mapping[str, Any]]:
        root = self._file.root
        nodes: dict[str, Mapping[str, Any]] = {"": {"node_type": "group", "attributes": dict(root.attrs)}}
        for path, node in root.members():
            if isinstance(node, FormatError):
                self._findings.add(path, node)
            else:
                nodes[path] = {"node_type": "array" if is_array(node) else "group", "attributes": dict(node.attrs)}
        return nodes

    def _open_arrays(self) -> Iterator[tuple[str, zarr.Array[Any]]]:
        for path, node in sorted(self._nodes.items()):
            if node["node_type"] == "array":
                yield path, self._file.root[path]

    def stored(self, path: str) -> StoredArray:
        """An array, to read it."""
        return _FileArray(self._file, f"{self._group}/{path}".lstrip("/"))

    def check_objects(self) -> None:
        """Nothing: all arrays are in the one object."""


class _FileArray(StoredArray):
    """An array of a file, in pieces of about 4 MiB: chunks if they hold whole rows of numbers, else windows of rows."""

    def __init__(self, file: OpenedFile, path: str) -> None:
        array = file.root[path]
        super().__init__(file.read_from, array, file.object_sizes(), absent_is_fill=True)
        self._layout = None
        try:
            layout = file.array_layout(path)
            if not array.size or layout.grid is not None:
                raise FormatError(f"{path} is empty, or its chunks hold parts of rows")
            Decoder(layout)
        except FormatError:  # such as strings
            row_bytes = max(1, array.dtype.itemsize * math.prod(array.shape[1:]))
            rows = array.chunks[:1] and max(1, _PIECE_BYTES // row_bytes // array.chunks[0]) * array.chunks[0]
            self._shard = (int(rows), *array.shape[1:]) if array.ndim else ()
        else:
            at_once = max(1, _PIECE_BYTES // (layout.chunk_elements * layout.dtype.itemsize))
            self._layout = replace(layout, placement=replace(layout.placement, chunks_per_object=at_once))
            self._shard = (layout.chunk_elements * at_once,)

    @property
    def n_pieces(self) -> int:
        """Groups of chunks, or windows of rows."""
        if self._layout is not None:
            return self._layout.n_shards
        return -(-self._array.shape[0] // self._shard[0]) if self._shard else 1

    @property
    def chunk_elements(self) -> int:
        """Elements of a chunk, or of a window."""
        return math.prod(self._shard) if self._layout is None else self._layout.chunk_elements

    def key(self, piece: int) -> str:
        """The path of the array: all pieces are in the one object."""
        return self.path

    def stored_bytes(self, piece: int) -> int:
        """Stored bytes of a piece, as far as the file says."""
        if self._layout is None:
            return 0
        table = self._layout.find_index(piece, sum(self._sizes.values()), self.path)
        assert isinstance(table, np.ndarray)
        return int(table[table[:, 0] != ABSENT, 1].sum())

    def _read_through_zarr(self, piece: int) -> Iterator[Chunk]:
        begin, rows = piece * self._shard[0] if self._shard else 0, self._shard[:1]
        try:
            found = self._array[begin : begin + rows[0]] if rows else self._array[()]
        except ZloaderError as error:
            if not isinstance(error, CorruptChunkError):
                raise
            yield error
        except (*UNDECODABLE, OSError) as error:
            yield CorruptChunkError(f"{self.path} does not decode at row {begin}: {error}")
        else:
            yield np.asarray(found).reshape(-1)
