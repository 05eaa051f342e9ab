"""The groups and arrays of a store as its metadata describe them: are all objects there, and do shapes agree?"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import zarr

from zloader.access.zarr_groups import UNDECODABLE, stored_keys
from zloader.common.errors import FormatError
from zloader.conversion.destination import MARKER
from zloader.dataset.elements import is_array, is_outdated, matrix_encoding
from zloader.dataset.h5ad import OpenedFile
from zloader.dataset.store import OpenedStore
from zloader.storage.metadata import matrix_shape

_COMPRESSED = ("csr_matrix", "csc_matrix")
# The parts of group elements that must have equal lengths. The first part gives the length of the element.
_PARTS = {
    "categorical": ("codes",),
    "nullable-integer": ("values", "mask"),
    "nullable-boolean": ("values", "mask"),
    "nullable-string-array": ("values", "mask"),
}
_UNREADABLE = (FormatError, *UNDECODABLE)


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

    def __contains__(self, path: str) -> bool:
        """Whether there is a problem at a path or below it."""
        return any(known == path or known.startswith(f"{path}/") for known in self._found)

    def has(self, *where: str) -> bool:
        """Whether there is a problem at one of these places."""
        return not self._found.keys().isdisjoint(where)

    def problems(self) -> tuple[Problem, ...]:
        """All of them."""
        return tuple(self._found.values())


class Hierarchy:
    """The groups and arrays of a store by path, checked by their metadata."""

    def __init__(self, store: OpenedStore, findings: Findings) -> None:
        self.store, self._findings = store, findings
        self.is_ours = "zloader" in store.root.attrs
        self.arrays: dict[str, Any] = {}
        self._attributes: dict[str, Mapping[str, Any]] = {}
        root, hidden = store.root, set[str]()
        named: Callable[[str], str] = store.named if isinstance(store, OpenedFile) else str
        with self._reporting(store.location.url):
            members = root.members() if isinstance(store, OpenedFile) else root.members(max_depth=None)
            for path, node in [("", root), *members]:
                if hidden.isdisjoint(_parents(path)) and not self._add(named(path), node):
                    hidden.add(path)

    def _add(self, path: str, node: Any) -> bool:
        """Adds a node. False if those below it are not used: it is damaged, or a frame of an early anndata."""
        is_new = True
        try:
            if isinstance(node, FormatError):
                raise node
            if is_outdated(node) and isinstance(frame := self.store.node(path), zarr.Group):
                node, is_new = frame, False
                for name, member in frame.members(max_depth=None):
                    self._add(f"{path}/{name}", member)
            self._attributes[path] = dict(node.attrs)
        except FormatError as error:
            self._findings.add(path or self.store.location.url, error)
            return False
        if is_array(node):
            self.arrays[path] = node
        elif "h5sparse_format" in node.attrs:
            shape = {"encoding-type": matrix_encoding(node), "shape": node.attrs.get("h5sparse_shape")}
            self._attributes[path] = dict(node.attrs) | shape
        return is_new

    def _children(self, path: str) -> list[str]:
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

    def length(self, frame: str) -> int:
        """The number of rows of a frame, 0 if it is not there."""
        return next(iter(self.shape(frame)), 0)

    def compressed(self) -> Iterator[tuple[str, bool, tuple[int, int]]]:
        """The paths of CSR and CSC matrices whose arrays fit together, whether they are CSR, and their shapes."""
        for path in sorted(self._attributes):
            if self.encoding(path) in _COMPRESSED and self._fits(path):
                n_rows, n_genes = self.shape(path)
                yield path, self.encoding(path) == "csr_matrix", (n_rows, n_genes)

    def seen(self) -> dict[str, int]:
        """The fields of a Verification that the metadata tell."""
        grids = [zip(array.shape, array.chunks, strict=True) for array in self.arrays.values()]
        return {
            "rows": self.length("obs"),
            "genes": self.length("var"),
            "arrays": len(grids),
            "chunks": sum(math.prod(-(-size // max(1, chunk)) for size, chunk in grid) for grid in grids),
            "values": sum(math.prod(array.shape) for array in self.arrays.values()),
        }

    def check(self, pool: Executor) -> None:
        """Checks that every object of every array exists, that there are no others, and that shapes agree.

        Other programs may omit objects that hold only fill values.
        """
        if not isinstance(self.store, OpenedFile):
            self._check_metadata(pool)
            self._check_objects()
        for above in ("", *(f"{modality}/" for modality in self._children("mod"))):
            self._check_shapes(above)
        for path in sorted(self._attributes):
            self._check_parts(path)
        for modality in self.store.modalities:
            with self._reporting(f"obsmap/{modality}"):
                self.store.row_of(f"mod/{modality}/X")

    @contextlib.contextmanager
    def _reporting(self, where: str) -> Iterator[None]:
        try:
            yield
        except _UNREADABLE as error:
            self._findings.add(where, error)

    def _check_metadata(self, pool: Executor) -> None:
        """Compares the metadata objects, which `pool` reads, with the copies in the root."""
        location, documents = self.store.location, dict[str, Any]()
        keys = sorted(key for key in self.store.object_sizes() if _is_metadata(key))

        for key, stored in zip(keys, pool.map(location.read, keys), strict=True):
            try:
                documents[key] = dict(json.loads(stored))
            except (ValueError, TypeError) as error:
                self._findings.add(key, f"({len(stored)} bytes) is not the metadata of a group or array: {error}")
        consolidated = documents.get("zarr.json", {}).get("consolidated_metadata")
        if consolidated is None:
            return
        copies = {f"{path}/zarr.json": node for path, node in consolidated["metadata"].items()}
        for key in sorted({*copies, *keys} - {"zarr.json"}):
            own, copy = ({**each.get(key, {}), "consolidated_metadata": None} for each in (documents, copies))
            if key not in copies:
                self._findings.add(key, "is not in the consolidated metadata of the root, so readers do not see it")
            elif key not in keys:
                self._findings.add(key, "is missing, but is in the consolidated metadata of the root")
            elif own != copy:
                self._findings.add(key, "differs from the consolidated metadata of the root")

    def _check_objects(self) -> None:
        unclaimed = {key for key in self.store.object_sizes() if not _is_metadata(key)}
        if MARKER in unclaimed:
            self._findings.add(MARKER, "a conversion did not finish: convert again, or continue with --resume")
            unclaimed.discard(MARKER)
        for path, array in self.arrays.items():
            with self._reporting(f"{path}/zarr.json"):  # its shape may make no sense
                keys = list(stored_keys(array))
                if self.is_ours and (lost := [key for key in keys if key not in unclaimed]):
                    more = f" (the first of {len(lost)})" if len(lost) > 1 else ""
                    what = f"is missing{more}: the store is incomplete. Convert it again"
                    self._findings.add(lost[0], what, of=path)
                unclaimed.difference_update(keys)
        for key in sorted(unclaimed):
            if not any(f"{above}/zarr.json" in self._findings for above in _parents(key)):
                self._findings.add(key, "belongs to no array")

    def _check_shapes(self, above: str) -> None:
        """Checks that elements by row have n_obs rows, and elements by gene n_vars genes."""
        rows, genes, raw_genes = (self.length(f"{above}{frame}") for frame in ("obs", "var", "raw/var"))
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
        matrices = [*wanted, *self._children(f"{above}layers")]
        wanted |= {path: shape for part, shape in elements.items() for path in self._children(f"{above}{part}")}
        for path, shape in wanted.items():
            if (found := self.shape(path))[: len(shape)] != shape:
                required = " x ".join(map(str, shape)) + (" ..." if len(shape) == 1 else "")
                self._findings.add(path, f"has shape {found}, but obs and var require {required}")
        for path in matrices:
            if self.is_ours and self.encoding(path) == "csc_matrix":
                self._findings.add(path, "is a csc_matrix, but 'zloader convert' writes rows")
            if f"{path}/zarr.json" not in self._findings:
                with self._reporting(path):
                    self.store.matrix_at(path)

    def _check_parts(self, path: str) -> None:
        attributes, encoding = self._attributes[path], self.encoding(path)
        parts = _PARTS.get(encoding, ())
        if encoding == "dataframe":
            columns = attributes.get("column-order")
            if not isinstance(columns, list):
                self._findings.add(path, f"its metadata list {columns!r:.100} as its columns")
                return
            parts = (str(attributes.get("_index")), *columns)
        for part in (f"{path}/{part}" for part in parts):
            first = f"{path}/{parts[0]}"
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
        shape = self.shape(path)
        if len(shape) != 2 or not {f"{path}/{part}" for part in ("indptr", "indices", "data")} <= self.arrays.keys():
            return False
        indptr, indices, values = (self.arrays[f"{path}/{part}"] for part in ("indptr", "indices", "data"))
        n_major = shape[0] if self.encoding(path) == "csr_matrix" else shape[1]
        whole_numbers = indptr.dtype.kind in "iu" and indices.dtype.kind in "iu"
        return whole_numbers and indptr.shape == (n_major + 1,) and indices.shape == values.shape == (values.size,)


def _is_metadata(key: str) -> bool:
    return key.rpartition("/")[2] == "zarr.json"


def _parents(key: str) -> Iterator[str]:
    while key := key.rpartition("/")[0]:
        yield key
