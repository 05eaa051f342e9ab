"""An HDF5 file as a zarr store: AnnData writes the same groups, arrays and attributes to both.

The store has the metadata that a Zarr v2 store of the same groups and arrays would have, and serves each chunk decoded,
as if it were uncompressed. So zarr and anndata read columns and other small elements as they do from any store. The
large arrays of matrices are not read through it: `layout` gives their ArrayLayout, with a chunk table in place of the
objects of a Zarr array.

What the file says about itself is read once, in a child process (hdf5_scan.py), at the cost of starting Python and of
reading the headers. Strings lie in heaps that only libhdf5 can read; those of large arrays are read by another child,
in windows, when they are needed.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from zarr.abc.store import RangeByteRequest, Store

from zloader.access.listed_store import ListedStore, is_metadata, slice_of
from zloader.access.location import Location
from zloader.access.stored_objects import StoredObject
from zloader.common.child import ChildCrashedError, ChildError, call_in_child
from zloader.common.errors import (
    AccessDeniedError,
    CorruptChunkError,
    DeadlineError,
    FormatError,
    MissingObjectError,
    ReadError,
    StoreChangedError,
    StoreError,
    TruncatedObjectError,
)
from zloader.common.locks import cached_property
from zloader.common.other_formats import why_unreadable
from zloader.storage.decode import Decoder
from zloader.storage.hdf5_filters import filters_codecs
from zloader.storage.layout import ArrayLayout, Grid
from zloader.storage.metadata import number_dtype
from zloader.storage.placement import ABSENT, Placement

if TYPE_CHECKING:
    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype

_DEADLINE_S = 300  # of a child: a file of 30 GB over a link of 30 ms takes less than 10 s
_CHILD = "zloader.reading.hdf5_scan"
_MOST_INLINE = 1 << 17  # strings of an array that are read with the metadata
_STRINGS = 1 << 19  # of a larger array, read by one child
_READ_ERRORS = (
    AccessDeniedError,
    DeadlineError,
    MissingObjectError,
    ReadError,
    StoreChangedError,
    TruncatedObjectError,
)
_CONVERT = "Run 'zloader convert' on the file"


def file_of(location: Location) -> tuple[Location, str]:
    """The directory or prefix that contains a file, and the file's name, which is its key there."""
    path, name = location.path.rpartition("/")[::2]
    if location.scheme == "file":
        return replace(location, url=path or "/"), name
    return replace(location, url=location.url.rstrip("/").rpartition("/")[0]), name


class Hdf5Index:
    """What an HDF5 file says about itself: `nodes` by path, and the chunk tables of arrays."""

    def __init__(self, content: bytes, url: str) -> None:
        """`content` is the result of `read_index`."""
        self.url = url
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            self.nodes: dict[str, dict[str, Any]] = json.loads(arrays["document"].tobytes())["nodes"]
            self._tables = {name: arrays[name] for name in arrays.files if name != "document"}
        self._layouts: dict[str, ArrayLayout] = {}  # those that were asked for; each chunk of a small array asks again

    def refused(self, path: str) -> str | None:
        """Why the element at a path cannot be read in place, or None if it can, or is not there."""
        parts = path.split("/")
        for end in range(len(parts), 0, -1):
            node = self.nodes.get("/".join(parts[:end]), {})
            if "refused" in node:
                return str(node["refused"])
        return None

    def layout(self, path: str, name: str) -> ArrayLayout:
        """The layout of an array of numbers in the file `name`. Raises FormatError if it cannot be read by chunk."""
        node = self._numbers(path)
        shape, chunk = node["shape"], node["chunks"]
        outer = [-(-whole // max(1, size)) * max(1, size) for whole, size in zip(shape, chunk, strict=True)]
        number_dtype(path, node["dtype"])
        grid = Grid.of(path, shape, chunk, outer)
        layout = self.chunk_layout(path, name)
        return layout if grid is None else replace(layout, grid=grid, n_elements=math.prod(shape))

    def chunk_layout(self, path: str, name: str) -> ArrayLayout:
        """The chunks of any array, one after the other in row-major order of its grid."""
        if path not in self._layouts:
            self._layouts[path] = self._chunk_layout(path, name)
        return self._layouts[path]

    def _chunk_layout(self, path: str, name: str) -> ArrayLayout:
        node = self._numbers(path)
        dtype = _dtype(node["dtype"])
        chunk_elements = max(1, math.prod(node["chunks"]))
        table = self._table(node)
        whole = list(node["chunks"][1:]) == list(node["shape"][1:])
        return ArrayLayout(
            path=path,
            dtype=dtype.newbyteorder("="),
            n_elements=math.prod(node["shape"]) if whole else len(table) * chunk_elements,
            chunk_elements=chunk_elements,
            codecs=filters_codecs(node["filters"], dtype, f"{path} of {self.url}"),
            cut="begin" in node,
            placement=Placement(path=name, chunks_per_object=max(1, len(table)), table=table),
            fill_value=np.frombuffer(bytes.fromhex(node["fill"]), dtype)[0],
            absent_is_fill=True,
        )

    def _table(self, node: Mapping[str, Any]) -> NDArray[np.uint64]:
        """Offset and size of each chunk. Those of an array that is stored in one piece follow one another."""
        if "table" in node:
            return np.asarray(self._tables[f"table_{node['table']}"], np.uint64)
        rows, chunk_rows = (node["shape"][0], node["chunks"][0]) if node["shape"] else (1, 1)
        row_bytes = _dtype(node["dtype"]).itemsize * math.prod(node["shape"][1:])
        if node["begin"] is None or not row_bytes:  # nothing was written
            return np.full((-(-rows // chunk_rows), 2), ABSENT, np.uint64)
        bounds = np.minimum(np.arange(0, rows + chunk_rows, chunk_rows), rows).astype(np.uint64) * np.uint64(row_bytes)
        return np.stack([np.uint64(node["begin"]) + bounds[:-1], np.diff(bounds)], axis=1)

    def _numbers(self, path: str) -> Mapping[str, Any]:
        node = self.nodes[path]
        if node.get("strings") or node.get("shape") is None or "inline" in node:
            raise FormatError(f"{path} of {self.url} is too small or holds no numbers. {_CONVERT}")
        return node

    def has_every_chunk(self, path: str) -> bool:
        """Whether no chunk of an array stands for fill values."""
        node = self.nodes[path]
        return not {"table", "begin"} & node.keys() or bool((self._table(node)[:, 0] != ABSENT).all())

    @cached_property
    def documents(self) -> dict[str, bytes]:
        """The metadata of a Zarr v2 store with these nodes, by key."""
        found: dict[str, Any] = {}
        for path, node in self.nodes.items():
            if "refused" in node:
                continue
            prefix = f"{path}/" if path else ""
            found[f"{prefix}.zattrs"] = node["attrs"]
            if "shape" in node:
                found[f"{prefix}.zarray"] = _array_document(node)
            else:
                found[f"{prefix}.zgroup"] = {"zarr_format": 2}
        consolidated = {"zarr_consolidated_format": 1, "metadata": found}
        return {key: json.dumps(document).encode() for key, document in (found | {".zmetadata": consolidated}).items()}


def _dtype(text: Any) -> np.dtype[Any]:
    return np.dtype(text if isinstance(text, str) else [tuple(field) for field in text])


def _array_document(node: Mapping[str, Any]) -> dict[str, Any]:
    common = {"zarr_format": 2, "order": "C", "compressor": None, "dimension_separator": "."}
    shape = node["shape"] or []  # an empty dataspace has none, like a scalar
    if node.get("strings"):
        rows = max(1, shape[0]) if node["inline"] is not None and shape else _STRINGS
        chunks = [rows, *shape[1:]] if shape else []
        filters: Any = [{"id": "vlen-utf8"}]
        return common | {"shape": shape, "chunks": chunks, "dtype": "|O", "fill_value": "", "filters": filters}
    dtype = _dtype(node.get("dtype", "<f8"))
    plain = dtype.newbyteorder("<")
    chunks = [max(1, size) for size in node.get("chunks", [])]
    text = plain.str if plain.names is None else [list(field) for field in plain.descr]
    return common | {"shape": shape, "chunks": chunks, "dtype": text, "fill_value": None, "filters": None}


def read_index(location: Location, listed: StoredObject) -> bytes:
    """The index of an HDF5 file, for Hdf5Index. Raises FormatError, DeadlineError or StoreChangedError."""
    content = _ask(location, listed, "index", _MOST_INLINE)
    directory, name = file_of(location)
    if directory.find_object(name) != listed:
        raise StoreChangedError(f"{location.url} has changed while it was opened: wait until it is complete")
    return content


def _ask(location: Location, listed: StoredObject, function: str, *arguments: Any) -> bytes:
    """What a function of hdf5_scan returns, in a child process."""
    # A local path saves the child from importing file systems.
    file = location.path if location.scheme == "file" else file_of(location)
    try:
        return call_in_child(f"{_CHILD}:{function}", file, listed, *arguments, deadline_s=_DEADLINE_S)
    except TimeoutError as error:
        raise DeadlineError(
            f"{location.url}: its groups and arrays could not be read within {_DEADLINE_S} s. The file may be damaged, "
            "or the disk or network is slow: run 'zloader convert' on a copy of it"
        ) from error
    except ChildCrashedError as error:
        raise FormatError(
            f"{location.url} cannot be read as HDF5: the library stopped ({error}). Is it damaged?"
        ) from error
    except ChildError as error:
        raise _of_child(location, error) from error


def _of_child(location: Location, error: ChildError) -> StoreError:
    """The error to raise for an exception of the child."""
    url, name = location.url, type(error).__name__
    for kind in _READ_ERRORS:
        if kind.__name__ == name:
            return kind(str(error))
    if name == "Refused":
        return FormatError(f"{url}: {error}. {_CONVERT}")
    if why := why_unreadable(location.first_bytes()):
        return FormatError(f"{url} {why}")
    return FormatError(f"{url} cannot be read as HDF5: {error}. It is damaged, truncated, or still being written")


class Hdf5Store(Store):
    """A read-only zarr store over an HDF5 file."""

    supports_writes = supports_deletes = supports_partial_writes = False
    supports_listing = True

    def __init__(self, location: Location, listed: StoredObject, index: Hdf5Index) -> None:
        super().__init__(read_only=True)
        self._location, self._index = location, index
        self._parent, self._name = file_of(location)
        self._listed = listed

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """The bytes of a metadata object or of a decoded chunk, or of a range of them; None if there is no such key."""
        content = self._index.documents.get(key)
        if content is None and not is_metadata(key):
            content = await self.chunk(key, prototype)
        return None if content is None else prototype.buffer.from_bytes(content[slice_of(byte_range, len(content))])

    @cached_property
    def _file(self) -> ListedStore:
        stored = self._parent.zarr_store(read_only=True)
        return ListedStore(stored, self._parent.url, {self._name: self._listed.size}, all_listed=True)

    async def chunk(self, key: str, prototype: BufferPrototype) -> bytes | None:
        """A decoded chunk of an array; None if there is no such array."""
        path, _, numbers = key.rpartition("/")
        node = self._index.nodes.get(path, {})
        if node.get("shape") is None or "refused" in node:
            return None
        place = [int(number) for number in numbers.split(".")] if node["shape"] else []
        if node.get("inline") is not None:
            return bytes.fromhex(node["inline"])
        if node.get("records"):
            return _ask(self._location, self._listed, "records", path)
        if node.get("strings"):
            return _ask(self._location, self._listed, "strings", path, place[0] * _STRINGS, _STRINGS)
        layout = self._index.chunk_layout(path, self._name)
        grid = [-(-size // chunk) for size, chunk in zip(node["shape"], node["chunks"], strict=True)]
        number = int(np.ravel_multi_index(place, grid)) if place else 0
        return await self._decoded(layout, number, prototype)

    async def _decoded(self, layout: ArrayLayout, number: int, prototype: BufferPrototype) -> bytes:
        table = layout.find_index(0, self._listed.size, self._location.url)
        assert isinstance(table, np.ndarray)
        out: NDArray[Any] = np.full(layout.chunk_elements, layout.fill_value, layout.dtype)
        offset, size = (int(each) for each in table[number])
        if offset == ABSENT or not size:
            return out.tobytes()
        stored = await self._file.get(self._name, prototype, RangeByteRequest(offset, offset + size))
        self._require_unchanged()
        assert stored is not None
        try:
            part = out[: size // out.itemsize] if layout.cut else out
            Decoder(layout).decode(np.frombuffer(stored.to_bytes(), np.uint8), part)
        except CorruptChunkError as error:
            where = f"{self._location.url}: chunk {number} of {layout.path}, bytes {offset}-{offset + size - 1}"
            raise CorruptChunkError(f"{where}: {error}. Restore the file") from error
        return out.tobytes()

    def _require_unchanged(self) -> None:
        """Raises StoreChangedError if a local file is no longer the one that was listed."""
        if self._location.scheme == "file" and self._parent.find_object(self._name) != self._listed:
            raise StoreChangedError(f"{self._location.url} has changed since it was opened. Open it again")

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """`get` for each pair of key and range."""
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    async def exists(self, key: str) -> bool:
        """Whether there is such a metadata object. Chunks are asked for with `get`."""
        return key in self._index.documents

    async def list(self) -> AsyncIterator[str]:
        """The keys of all metadata objects."""
        for key in self._index.documents:
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """The keys of metadata objects that begin with `prefix`."""
        for key in self._index.documents:
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """The names directly below a group."""
        above = f"{prefix.rstrip('/')}/" if prefix else ""
        for name in dict.fromkeys(
            key[len(above) :].partition("/")[0] for key in self._index.documents if key.startswith(above)
        ):
            yield name

    async def set(self, key: str, value: Buffer) -> None:
        """Raises ValueError: the store is read-only."""
        self._check_writable()

    async def delete(self, key: str) -> None:
        """Raises ValueError: the store is read-only."""
        self._check_writable()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hdf5Store) and self._location == other._location
