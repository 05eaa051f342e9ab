"""The groups and arrays of a store as its metadata describe them: are all objects there, and do shapes agree?"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import zarr
from zarr.storage import StorePath

from zloader.access.listed_store import ListedStore
from zloader.access.zarr_groups import UNDECODABLE, stored_keys
from zloader.common.errors import FormatError, StoreError
from zloader.conversion.destination import MARKER
from zloader.conversion.object_writer import translated
from zloader.dataset.elements import is_array, is_outdated, matrix_encoding
from zloader.dataset.h5ad import OpenedFile
from zloader.dataset.store import OpenedStore
from zloader.storage.coders import missing_package
from zloader.storage.metadata import codecs_of_arrays, matrix_shape

_METADATA = "zarr.json"
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
    """The problems found so far, in the order in which they were found."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._found: dict[str, Problem] = {}

    def add(self, where: str, what: object, of: str | None = None) -> None:
        """Adds a problem, given as text or as an error, unless the array or element `of`, or else `where`, has one."""
        problem = Problem(where=where, what=str(what).removeprefix(f"{self._url}: "))
        self._found.setdefault(where if of is None else of, problem)

    def any_in(self, path: str) -> bool:
        """Whether there is a problem at a path or below it."""
        return any(known == path or known.startswith(f"{path}/") for known in self._found)

    def problems(self) -> tuple[Problem, ...]:
        """All of them."""
        return tuple(self._found.values())


class Hierarchy:
    """The groups and arrays of a store, by path: their attributes, and the arrays."""

    def __init__(self, store: OpenedStore, findings: Findings, pool: Executor) -> None:
        """`pool` reads the metadata objects, many at once."""
        self.store, self._findings = store, findings
        self.sizes = store.object_sizes()
        self.is_ours = "zloader" in store.root.attrs
        self.arrays: dict[str, Any] = {}
        self._attributes: dict[str, Any] = {}
        if isinstance(store, OpenedFile):
            self._read_file(store)
        else:
            self._read_metadata(pool)

    def _read_file(self, store: OpenedFile) -> None:
        """Earlier versions of anndata wrote frames in other forms, which are read whole, and raw/X as raw.X."""
        whole: tuple[str, ...] = ()
        for path, node in itertools.chain([("", store.root)], store.root.members()):
            if path.startswith(whole):
                continue
            at = store.named(path)
            try:
                if isinstance(node, FormatError):
                    raise node
                self._add_node(at, node)
                if is_outdated(node) and isinstance(frame := store.node(at), zarr.Group):
                    whole += (f"{path}/",)
                    self._add_node(at, frame)
                    for name, member in frame.members(max_depth=None):
                        self._add_node(f"{at}/{name}", member)
            except FormatError as error:
                self._findings.add(at or store.location.url, error)
                whole += (f"{path}/",)
                self._attributes.pop(at, None)

    def _add_node(self, path: str, node: Any) -> None:
        self._attributes[path] = dict(node.attrs)
        self.arrays.pop(path, None)
        if is_array(node):
            self.arrays[path] = node
        elif "h5sparse_format" in node.attrs:
            shape = node.attrs.get("h5sparse_shape")
            self._attributes[path] |= {"encoding-type": matrix_encoding(node), "shape": shape}

    def _read_metadata(self, pool: Executor) -> None:
        location, findings, nodes = self.store.location, self._findings, dict[str, Any]()
        keys = sorted(key for key in self.sizes if key.rpartition("/")[2] == _METADATA)
        filesystem = location.filesystem()

        def read(key: str) -> bytes:
            with translated(f"read {key} from", location.url):
                stored: bytes = filesystem.cat_file(f"{location.path}/{key}")
            return stored

        for key, stored in zip(keys, pool.map(read, keys), strict=True):
            try:
                nodes[key.removesuffix(_METADATA).rstrip("/")] = dict(json.loads(stored))
            except (ValueError, TypeError) as error:
                findings.add(key, f"({len(stored)} bytes) is not the metadata of a group or array: {error}")
        if (consolidated := nodes.get("", {}).get("consolidated_metadata")) is not None:
            copies = consolidated["metadata"]
            for path in sorted(copies.keys() | nodes.keys() - {""}):
                key = f"{path}/{_METADATA}"
                if path not in copies:
                    findings.add(key, "is not in the consolidated metadata of the root, so readers do not see it")
                elif key not in self.sizes:
                    findings.add(key, "is missing, but is in the consolidated metadata of the root")
                elif path in nodes and _own(copies[path]) != _own(nodes[path]):
                    findings.add(key, "differs from the consolidated metadata of the root")
            nodes |= copies  # readers use the root's copies
        inner, all_listed = location.zarr_store(read_only=True), not location.is_web
        store = ListedStore(inner, location.url, self.sizes, all_listed=all_listed)
        store.complete = self.is_ours
        for path, node in sorted(nodes.items()):
            attributes = node.get("attributes")
            self._attributes[path] = attributes if isinstance(attributes, dict) else {}
            if node.get("node_type") != "array":
                continue
            try:
                store.register_arrays(f"{path}/{_METADATA}", node)
                array = zarr.Array.from_dict(StorePath(store, path), dict(node))
                stored_keys(array)  # raises an error for an invalid shape
            except _UNREADABLE as error:
                findings.add(f"{path}/{_METADATA}", f"does not describe an array: {error}")
            else:
                self.arrays[path] = array
                for names in codecs_of_arrays(f"{path}/{_METADATA}", node).values():
                    if missing := missing_package(names):
                        raise StoreError(f"{path} of {location.url} {missing}")

    def children(self, path: str) -> list[str]:
        """The paths directly below a group."""
        return sorted(node for node in self._attributes if node.rpartition("/")[0] == path and node)

    def encoding(self, path: str) -> str:
        """The encoding-type of a node, empty if there is no such node."""
        default = "array" if path in self.arrays else ""
        return str(self._attributes.get(path, {}).get("encoding-type", default))

    def shape(self, path: str) -> tuple[int, ...]:
        """The shape of an element, or its length alone if it has no shape. Empty if unknown."""
        if path in self.arrays:
            return tuple(self.arrays[path].shape)
        attributes, encoding = self._attributes.get(path, {}), self.encoding(path)
        if encoding in _COMPRESSED:
            return matrix_shape(attributes.get("shape")) or ()
        if encoding == "dataframe" or encoding in _PARTS:
            part = _PARTS[encoding][0] if encoding in _PARTS else attributes.get("_index")
            return self.shape(f"{path}/{part}")[:1]
        return (int(attributes["length"]),) if encoding == "awkward-array" else ()

    def compressed(self) -> Iterator[tuple[str, bool, tuple[int, int]]]:
        """The paths of CSR and CSC matrices whose arrays fit together, whether they are CSR, and their shapes."""
        for path in sorted(self._attributes):
            if self.encoding(path) in _COMPRESSED and self._fits(path):
                n_rows, n_genes = self.shape(path)
                yield path, self.encoding(path) == "csr_matrix", (n_rows, n_genes)

    def seen(self) -> dict[str, int]:
        """The fields of a Verification that the metadata tell."""
        arrays = self.arrays.values()
        return {
            "rows": next(iter(self.shape("obs")), 0),
            "genes": next(iter(self.shape("var")), 0),
            "arrays": len(arrays),
            "chunks": sum(math.prod(map(quotient, array.shape, array.chunks)) for array in arrays),
            "values": sum(array.size for array in arrays),
        }

    def check(self) -> None:
        """Checks that every object of every array exists, that there are no others, and that shapes agree.

        Other programs may omit objects that hold only fill values.
        """
        if not isinstance(self.store, OpenedFile):
            self._check_objects()
        for above in ("", *(f"{modality}/" for modality in self.children("mod"))):
            self._check_shapes(above)
        for path in sorted(self._attributes):
            self._check_parts(path)
        for modality in self.store.modalities:
            try:
                self.store.row_of(f"mod/{modality}/X")
            except (FormatError, *_UNREADABLE) as error:
                self._findings.add(f"obsmap/{modality}", error)

    def _check_objects(self) -> None:
        unclaimed = {key for key in self.sizes if key.rpartition("/")[2] != _METADATA}
        if MARKER in unclaimed:
            self._findings.add(MARKER, "a conversion did not finish: convert again, or continue with --resume")
            unclaimed.discard(MARKER)
        for path, array in self.arrays.items():
            keys = list(stored_keys(array))
            if self.is_ours and (lost := [key for key in keys if key not in unclaimed]):
                more = f" (the first of {len(lost)})" if len(lost) > 1 else ""
                self._findings.add(lost[0], f"is missing{more}: the store is incomplete. Convert it again", of=path)
            unclaimed.difference_update(keys)
        for key in sorted(unclaimed):
            self._findings.add(key, "belongs to no array")

    def _check_shapes(self, above: str) -> None:
        """Checks that elements by row have n_obs rows, and elements by gene n_vars genes."""
        rows, genes, raw_genes = (next(iter(self.shape(f"{above}{frame}")), 0) for frame in ("obs", "var", "raw/var"))
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
        wanted: dict[str, tuple[int, ...]] = {f"{above}X": (rows, genes), f"{above}raw/X": (rows, raw_genes)}
        wanted = {path: shape for path, shape in wanted.items() if self.encoding(path) not in ("", "null")}
        matrices = [*wanted, *self.children(f"{above}layers")]
        wanted |= {path: shape for part, shape in elements.items() for path in self.children(f"{above}{part}")}
        for path, shape in wanted.items():
            if (found := self.shape(path))[: len(shape)] != shape:
                required = " x ".join(map(str, shape)) + (" ..." if len(shape) == 1 else "")
                self._findings.add(path, f"has shape {found}, but obs and var require {required}")
        for path in matrices:
            if self.is_ours and self.encoding(path) == "csc_matrix":
                self._findings.add(path, "is a csc_matrix, but 'zloader convert' writes rows")
            if not self._findings.any_in(f"{path}/{_METADATA}"):
                try:
                    self.store.matrix_at(path)
                except (FormatError, *_UNREADABLE) as error:
                    self._findings.add(path, error)

    def _check_parts(self, path: str) -> None:
        attributes, encoding = self._attributes[path], self.encoding(path)
        parts = _PARTS.get(encoding, ())
        if encoding == "dataframe":
            columns = attributes.get("column-order")
            if not isinstance(columns, list):
                self._findings.add(path, f"its metadata list {columns!r:.100} as its columns")
                return
            parts = (attributes.get("_index"), *columns)
        first, *others = [f"{path}/{part}" for part in parts] or [""]
        for part in (first, *others) if first else ():
            if part not in self._attributes:
                self._findings.add(part, f"is missing, but {path} needs it")
            elif self.shape(part)[:1] != self.shape(first)[:1]:
                self._findings.add(part, f"has shape {self.shape(part)}, but {first} has {self.shape(first)}")
        if encoding == "categorical" and not self.shape(f"{path}/categories"):
            self._findings.add(path, "has no categories")
        if encoding in _COMPRESSED and not self._fits(path):
            lengths = [f"{part} {self.shape(f'{path}/{part}')}" for part in ("indptr", "indices", "data")]
            self._findings.add(path, f"has shape {self.shape(path)}, but {', '.join(lengths)}: these do not match")

    def _fits(self, path: str) -> bool:
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


def quotient(size: int, chunk: int) -> int:
    """How many chunks hold this many elements."""
    return -(-size // max(1, chunk))
