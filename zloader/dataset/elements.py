"""The elements of a store: columns of the common kinds read with zarr alone, everything else with anndata.

Importing anndata takes as long as importing torch, because it imports dask, xarray and awkward where they are
installed. Training on numbers, categories and strings does not need it.

MuData keeps each modality as an AnnData of its own in `mod/NAME`. A matrix of a modality is named `NAME:X`,
`NAME:raw/X` or `NAME:layers/LAYER`, and an obs column `NAME:COLUMN`, as muon names them. So are its obsm arrays,
`NAME:X_pca`.

MuData says in `obsmap/NAME`, for each row of the whole, the number of its row in the modality NAME, from 1 on, or 0 if
the modality lacks it. Nothing is aligned in memory: rows are looked up when they are read, in 4 bytes per row and
modality.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.access.location import Location
from zloader.access.stored_objects import Listing
from zloader.access.zarr_groups import UNDECODABLE, member_of, require_fresh, undecodable_key
from zloader.common.concurrent_calls import require_main_thread
from zloader.common.deferred import pd
from zloader.common.errors import FormatError, ZloaderError
from zloader.common.locks import cached_property
from zloader.common.records import Rows
from zloader.selecting.columns import as_names
from zloader.selecting.row_maps import RowMap, checked_map, is_whole, looked_up
from zloader.storage.layout import ArrayLayout
from zloader.storage.metadata import layout_of, stored_length

_ARRAYS = (("array", "0.2.0"), ("string-array", "0.2.0"))
_MASKED = {("nullable-integer", "0.1.0"): "IntegerArray", ("nullable-boolean", "0.1.0"): "BooleanArray"}
_STRINGS = ("nullable-string-array", "0.1.0")
_OLD_FRAME = ("dataframe", "0.1.0")
MUDATA = "MuData"
ROOTS = ("anndata", "AnnData", MUDATA)  # encoding-types of a root; R's MuDataSeurat writes the second
_MATRIX = re.compile(r"([^/]+):(X|raw/X|layers/.+)", re.DOTALL)
_OF_MODALITY = re.compile(r"mod/([^/]+)/.+", re.DOTALL)


# ---- names of the matrices of modalities


def path_of(x: str) -> str:
    """The path of a matrix in its store: `mod/rna/layers/counts` for `rna:layers/counts`."""
    named = _MATRIX.fullmatch(x)
    return x if named is None else f"mod/{named[1]}/{named[2]}"


def modality_of(x: str) -> str | None:
    """The modality that a matrix belongs to, by its name; None in an AnnData."""
    named = _MATRIX.fullmatch(x)
    return None if named is None else named[1]


def frame_of(x: str) -> str:
    """The path of the frame that describes the columns of a matrix."""
    named = _MATRIX.fullmatch(x)
    above, matrix = ("", x) if named is None else (f"mod/{named[1]}/", named[2])
    return f"{above}raw/var" if matrix.startswith("raw/") else f"{above}var"


def obs_of(x: str) -> str:
    """The path of the frame that describes the rows of a matrix."""
    named = _MATRIX.fullmatch(x)
    return "obs" if named is None else f"mod/{named[1]}/obs"


# ---- elements


def read_element(node: Any) -> Any:
    """An element as `anndata.io.read_elem` reads it. Raises any error of zarr or anndata for a damaged element."""
    kind = _encoding(node)
    if is_array(node):
        return node[()] if kind in _ARRAYS else _read_by_anndata(node)
    if kind == ("categorical", "0.2.0"):
        codes, categories = read_element(node["codes"]), read_element(node["categories"])
        return pd.Categorical.from_codes(codes, categories, ordered=bool(node.attrs["ordered"]))
    if kind in _MASKED:
        return getattr(pd.arrays, _MASKED[kind])(read_element(node["values"]), mask=read_element(node["mask"]))
    if kind == _STRINGS and _reads_strings_as_pandas():
        dtype = pd.StringDtype(na_value=np.nan if node.attrs.get("na-value") == "NaN" else pd.NA)
        strings = pd.array(read_element(node["values"]), dtype=dtype)
        strings[read_element(node["mask"])] = pd.NA
        return strings
    return _read_by_anndata(node)


def _read_by_anndata(node: Any) -> Any:
    if (native := getattr(node, "native", None)) is None:
        return load_anndata().io.read_elem(node)
    for _, member in () if is_array(node) else node.members():
        if isinstance(member, FormatError):
            raise member
    return read_hdf5_element(native)


def read_hdf5_element(native: Any) -> Any:
    """An element of h5py as anndata reads it, but text that is UTF-8, whatever other tools call it."""
    try:
        return load_anndata().io.read_elem(native)
    except UnicodeDecodeError:
        return load_anndata().experimental.read_dispatched(native, _text_as_utf8)


def _text_as_utf8(read: Callable[[Any], Any], _name: str, element: Any, **_of_type: Any) -> Any:
    import h5py

    is_text = isinstance(element, h5py.Dataset) and h5py.check_string_dtype(element.dtype) is not None
    return element.asstr("utf-8")[()] if is_text else read(element)


def is_array(node: Any) -> bool:
    """Whether a node is an array, of zarr or of an HDF5 file, and not a group."""
    return hasattr(node, "shape")


def _encoding(node: Any) -> tuple[Any, Any]:
    return node.attrs.get("encoding-type"), node.attrs.get("encoding-version")


def _reads_strings_as_pandas() -> bool:
    """Whether anndata reads nullable strings as below: from pandas 3 on, where it writes strings so by default."""
    return int(pd.__version__.partition(".")[0]) >= 3


def load_anndata() -> Any:
    """The module anndata, imported on the first call."""
    import anndata

    return anndata


@dataclass(frozen=True, kw_only=True)
class CodedColumn:
    """The paths of the codes and categories of a categorical column. `ordered` is None if the metadata do not say."""

    codes: str
    categories: str
    ordered: bool | None


class StoredElements(ABC):
    """The elements of the AnnData or MuData store at `location`, whose `objects` are listed."""

    def __init__(self, location: Location, objects: Listing) -> None:
        self.location, self.objects = location, objects
        self._sizes: Mapping[str, int] = objects.sizes
        self._nodes: tuple[Any, dict[str, Any]] = None, {}  # of a root, by path

    @property
    @abstractmethod
    def root(self) -> Any:
        """The root zarr group."""

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
            require_fresh(node, self.location.url)
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
                kept[path] = member_of(self.root, path)
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

    def damaged(self, path: str, why: str) -> FormatError:
        """The error that says that an element is damaged, and why."""
        return FormatError(f"{path} of {self.location.url} cannot be used because {why}: the store is damaged")

    def keys(self, group: str) -> list[str]:
        """Sorted names of the members of a group such as `"layers"`; empty if there is no such group."""
        kept, members = self._kept, f"{group}/"
        if members not in kept:
            try:
                kept[members] = sorted(self.root.get(group, {}))
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
        try:
            return path in self.root
        except UNDECODABLE:  # the element exists, but zarr cannot read it
            return True

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
        if not _is_name(name):
            raise self.damaged(frame, f"its metadata name {name!r} as its index")
        return str(name)

    def names(self, frame: str) -> pd.Index:
        """The index of `"obs"`, `"var"` or `"raw/var"`."""
        return as_names(self.column(frame, self.index_name(frame)))

    def columns(self, frame: str) -> list[str]:
        """Names of the columns of `"obs"`, `"var"` or `"raw/var"`, in the order of the frame."""
        names = self.node(frame).attrs.get("column-order")
        if not isinstance(names, list) or not all(map(_is_name, names)):
            raise self.damaged(frame, f"its metadata list {names!r:.100} as its columns")
        return names

    def coded(self, frame: str, name: str) -> CodedColumn | None:
        """Where the codes and categories of a column or index of a frame are; None for any that is not categorical.

        A frame of anndata 0.7 has the codes as the column, whose attribute leads to the categories.
        """
        path = f"{frame}/{name}"
        node = self.node(path)
        if not is_array(node):
            if node.attrs.get("encoding-type") != "categorical":
                return None
            ordered: Any = node.attrs.get("ordered")
            return CodedColumn(codes=f"{path}/codes", categories=f"{path}/categories", ordered=ordered)
        found = node.attrs.get("categories")
        if found is None or _encoding(self.node(frame)) != _OLD_FRAME:
            return None
        categories = posixpath.join("/", posixpath.dirname(path), str(found)).removeprefix("/")
        ordered = bool(self.node(categories).attrs.get("ordered", False))
        return CodedColumn(codes=path, categories=categories, ordered=ordered)

    def column(self, frame: str, name: str) -> Any:
        """A column or the index of a frame, as anndata reads it."""
        path, coded = f"{frame}/{name}", self.coded(frame, name)
        if coded is None or coded.codes != path:
            return self.element(path)
        codes, categories = self.element(coded.codes), self.element(coded.categories)
        with self.reading(path, self.node(path)):
            return pd.Categorical.from_codes(codes, categories, ordered=bool(coded.ordered))

    def _old_frame(self, frame: str) -> pd.DataFrame:
        columns, index = self.columns(frame), self.index_name(frame)
        found = {name: self.column(frame, name) for name in columns}
        with self.reading(frame, self.node(frame)):
            made = pd.DataFrame(found, index=self.column(frame, index), columns=columns or None)
        return made if index == "_index" else made.rename_axis(index)

    def element(self, path: str) -> Any:
        """A whole element, as anndata reads it."""
        node = self.node(path)
        if _encoding(node) == _OLD_FRAME:
            return self._old_frame(path)
        with self.reading(path, node):
            # The arrays of a sparse matrix have no encoding-type of their own.
            return read_element(node) if "encoding-type" in node.attrs else node[...]

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
    def obs_columns(self) -> list[str]:
        """Names of the obs columns, in the order of the frame, and then those of the modalities."""
        return [*self.columns("obs"), *self._columns_of_modalities]

    def modality_of_column(self, name: str) -> tuple[str, str] | None:
        """The modality that an obs column belongs to, and its name there; None for a column of the whole."""
        return self._columns_of_modalities.get(name)

    @cached_property
    def _columns_of_modalities(self) -> dict[str, tuple[str, str]]:
        """The modality and the name there of each obs column of a modality. A column of the whole goes before it."""
        found: dict[str, tuple[str, str]] = {}
        for each in self.modalities:
            for column in self.columns(f"mod/{each}/obs"):
                found.setdefault(f"{each}:{column}", (each, column))
        return {name: of for name, of in found.items() if name not in self.columns("obs")}

    @cached_property
    def obsm_paths(self) -> dict[str, str]:
        """The paths of the obsm entries by name: those of the whole, and then `rna:NAME` of the modality rna."""
        found = {name: f"obsm/{name}" for name in self.keys("obsm")}
        for each in self.modalities:
            for name in self.keys(f"mod/{each}/obsm"):
                found.setdefault(f"{each}:{name}", f"mod/{each}/obsm/{name}")
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

        None if they are the same rows, and for an element that belongs to no modality.
        """
        modality = self.modality_at(path)
        return None if modality is None else self.rows_of(modality)

    def rows_in(self, path: str, rows: Rows) -> Rows:
        """The rows of the matrix at a path for some rows of the whole, without those that it lacks."""
        row_of = self.row_of(path)
        return rows if row_of is None else looked_up(row_of, rows)[0]

    def rows_of(self, modality: str) -> RowMap | None:
        """As `row_of`, for a modality by name. Raises FormatError if its rows are not given, or do not exist."""
        if modality not in self._rows:
            self._rows[modality] = self._read_rows(modality)
        return self._rows[modality]

    def has_rows(self, modality: str) -> NDArray[np.bool_]:
        """Which rows of the whole a modality has."""
        row_of = self.rows_of(modality)
        return np.ones(self.n_obs, bool) if row_of is None else row_of >= 0

    @cached_property
    def _rows(self) -> dict[str, RowMap | None]:
        return {}

    def _read_rows(self, modality: str) -> RowMap | None:
        path, n_rows = f"obsmap/{modality}", self.length(f"mod/{modality}/obs")
        if path not in self:
            raise FormatError(
                f"{self.location.url} does not say which rows its modality {modality!r} has ({path}): open it with "
                "mudata 0.2 or later, run mdata.update(), and write it again"
            )
        stored, refused = np.asarray(self.element(path)), partial(self.damaged, path)
        rows = checked_map(stored, n_whole=self.n_obs, n_rows=n_rows, refused=refused)
        return None if is_whole(rows, n_rows) else rows

    def require_axis(self) -> None:
        """Raises FormatError unless the modalities of a MuData describe the same rows."""
        axis: Any = self.root.attrs.get("axis", 0)
        if self.modalities and axis != 0:
            raise FormatError(
                f"the modalities of {self.location.url} share {'genes' if axis == 1 else 'rows and genes'} (axis "
                f"{axis}), and not rows: {'convert' if self.objects.keys() == {''} else 'open'} them one by one, such "
                f"as {self.location.url.rstrip('/')}/mod/{self.modalities[0]}"
            )


def _is_name(name: Any) -> bool:
    """Whether a metadata value is a relative path that stays below its group."""
    return isinstance(name, str) and {"", ".", ".."}.isdisjoint(name.split("/"))
