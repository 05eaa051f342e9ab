"""The elements of a store: columns of the common kinds read with zarr alone, everything else with anndata.

Importing anndata takes as long as importing torch, because it imports dask, xarray and awkward where they are
installed. Training on numbers, categories and strings does not need it.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from zloader.access.location import Location
from zloader.access.stored_objects import Listing
from zloader.access.zarr_groups import UNDECODABLE, member_of, undecodable_key
from zloader.common.concurrent_calls import require_main_thread
from zloader.common.deferred import pd
from zloader.common.errors import FormatError, ZloaderError
from zloader.common.locks import cached_property
from zloader.selecting.columns import as_names
from zloader.storage.layout import ArrayLayout
from zloader.storage.metadata import layout_of, stored_length

_ARRAYS = (("array", "0.2.0"), ("string-array", "0.2.0"))
_MASKED = {("nullable-integer", "0.1.0"): "IntegerArray", ("nullable-boolean", "0.1.0"): "BooleanArray"}
_STRINGS = ("nullable-string-array", "0.1.0")


def read_element(node: Any) -> Any:
    """An element as `anndata.io.read_elem` reads it. Raises any error of zarr or anndata for a damaged element."""
    kind = node.attrs.get("encoding-type"), node.attrs.get("encoding-version")
    if isinstance(node, zarr.Array) and kind in _ARRAYS:
        return node[()]
    if isinstance(node, zarr.Group) and kind == ("categorical", "0.2.0"):
        codes, categories = read_element(node["codes"]), read_element(node["categories"])
        return pd.Categorical.from_codes(codes, categories, ordered=bool(node.attrs["ordered"]))
    if isinstance(node, zarr.Group) and kind in _MASKED:
        return getattr(pd.arrays, _MASKED[kind])(read_element(node["values"]), mask=read_element(node["mask"]))
    if isinstance(node, zarr.Group) and kind == _STRINGS and _reads_strings_as_pandas():
        dtype = pd.StringDtype(na_value=np.nan if node.attrs.get("na-value") == "NaN" else pd.NA)
        strings = pd.array(read_element(node["values"]), dtype=dtype)
        strings[read_element(node["mask"])] = pd.NA
        return strings
    return load_anndata().io.read_elem(node)


def _reads_strings_as_pandas() -> bool:
    """Whether anndata reads nullable strings as below: from pandas 3 on, where it writes strings so by default."""
    return int(pd.__version__.partition(".")[0]) >= 3


def load_anndata() -> Any:
    """The module anndata, imported on the first call."""
    import anndata

    return anndata


class StoredElements(ABC):
    """The elements of the AnnData store at `location`, whose `objects` are listed."""

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
        root = self.root
        if self._nodes[0] is not root:
            self._nodes = root, {}
        try:
            if path not in self._nodes[1]:
                self._nodes[1][path] = member_of(root, path)
            return self._nodes[1][path]
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


def _is_name(name: Any) -> bool:
    """Whether a metadata value is a relative path that stays below its group."""
    return isinstance(name, str) and {"", ".", ".."}.isdisjoint(name.split("/"))
