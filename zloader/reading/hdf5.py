"""An HDF5 file opened by h5py: groups and arrays in the form in which zarr gives them, and where their chunks lie.

libhdf5 reads groups, attributes and text, and finds the chunks of arrays. The values of matrices are not read through
it: `layout_of` says which bytes of the file they are. What lies in other files is refused.

h5py gets the bytes of all files from a BlockFile. So files are neither locked nor held open, and errors of reading
them pass through h5py.
"""

from __future__ import annotations

import array
import contextlib
import io
import math
import struct
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from zloader.common.errors import FormatError, ZloaderError
from zloader.storage.hdf5_filters import NotInPlaceError, filters_codecs
from zloader.storage.layout import ABSENT, ArrayLayout, Grid, Placement
from zloader.storage.metadata import number_dtype

_MOST_LINKS = 16
_MOST_CHUNKS = 1 << 26
_BLOCK_BYTES = 32 << 10  # of arrays without chunks, which are cut into chunks of about so many bytes
_FILTERS = {1: "gzip", 2: "shuffle", 3: "fletcher32", 4: "szip", 5: "nbit", 6: "scaleoffset", 32000: "lzf"}
_FILTERS |= {32001: "blosc", 32004: "lz4", 32008: "bitshuffle", 32013: "zfp", 32015: "zstd", 32026: "blosc2"}
# What h5py raises for damaged files.
DAMAGE = (OSError, AttributeError, RuntimeError, ValueError, TypeError, KeyError, OverflowError, struct.error)


def open_hdf5(file: io.RawIOBase, url: str, advice: str) -> Group:
    """The root group of a file. `url` and `advice`, which says what else can be done, are for messages."""
    root = h5py.File(file, "r")
    opened = _Opened(url, advice)
    # At the end of the interpreter, libhdf5 would close the file when no code of Python can be called any more.
    weakref.finalize(opened, root.close)
    return Group(root, "", opened)


class _Opened:
    """An open file. All of its nodes hold it."""

    def __init__(self, url: str, advice: str) -> None:
        self._url, self._advice = url, advice

    def refused(self, path: str, why: str) -> FormatError:
        return NotInPlaceError(f"{path} of {self._url} cannot be read in place: {why}. {self._advice}")

    @contextlib.contextmanager
    def describing(self, path: str) -> Iterator[None]:
        """Raises FormatError for what h5py raises inside the block."""
        try:
            yield
        except ZloaderError:
            raise
        except DAMAGE as error:
            raise self.refused(path, f"its description in the file is damaged ({error})") from error


class Group:
    """A group of a file. `native` is that of h5py, and `attrs` are its attributes."""

    def __init__(self, native: h5py.Group, path: str, opened: _Opened) -> None:
        self.native, self.path, self._opened = native, path, opened
        self.attrs = self.attributes = Attributes(native, path, opened)

    def __contains__(self, path: str) -> bool:
        """Whether there is a link of this name, whether or not it leads to something that can be read."""
        first, _, rest = path.partition("/")
        with self._opened.describing(self._below(first)):
            if not self.native.id.links.exists(first.encode(errors="surrogateescape")):
                return False
        member = self[first] if rest else self
        return not rest or (isinstance(member, Group) and rest in member)

    def __getitem__(self, path: str) -> Group | Array:
        """The group or array at a path. Raises KeyError if there is none, and FormatError if it cannot be read."""
        first, _, rest = path.partition("/")
        if first not in self:
            raise KeyError(f"there is no {first!r} in {self.path!r}")
        member = self._member(first)
        if not rest:
            return member
        if isinstance(member, Array):
            raise KeyError(f"{member.path!r} is an array")
        return member[rest]

    def _member(self, name: str) -> Group | Array:
        path = self._below(name)
        with self._opened.describing(path):
            native = self._followed(self.native, name, path)
            if isinstance(native, h5py.Group):
                return Group(native, path, self._opened)
            if isinstance(native, h5py.Dataset):
                return Array(native, path, self._opened)
            raise self._opened.refused(path, "it is neither a group nor an array")

    def _followed(self, group: h5py.Group, name: str, path: str, n_links: int = 0) -> Any:
        """The member of a group. Links are followed here, because libhdf5 would open other files, or mistake them."""
        link = group.get(name, getlink=True)
        if isinstance(link, h5py.ExternalLink):
            raise self._opened.refused(path, f"it is a link to another file, {link.filename!r}")
        if not isinstance(link, h5py.SoftLink):
            return group[name]
        if n_links == _MOST_LINKS:
            raise self._opened.refused(path, f"it is a link to {link.path!r}, which leads to itself")
        found = group.file if link.path.startswith("/") else group
        for part in link.path.split("/"):
            if part not in ("", "."):
                found = self._followed(found, part, path, n_links + 1)
        return found

    def _below(self, name: str) -> str:
        return f"{self.path}/{name}".lstrip("/")

    def get(self, path: str, default: Any = None) -> Any:
        """The group or array at a path, or the default if there is none."""
        if path not in self:
            return default
        return self[path]

    def __iter__(self) -> Iterator[str]:
        with self._opened.describing(self.path):
            return iter(list(map(str, self.native)))

    def members(self, above: tuple[int, ...] = ()) -> Iterator[tuple[str, Group | Array | FormatError]]:
        """All groups and arrays below, with their paths, or why one is not read. A group comes before its members.

        `above` has the addresses of the groups above this one.
        """
        above = (*above, self._address)
        for name in self:
            path = self._below(name)
            try:
                member = self._member(name)
                if isinstance(member, Group) and member._address in above:
                    raise self._opened.refused(path, "it contains itself")
            except FormatError as error:
                yield path, error
                continue
            yield path, member
            if isinstance(member, Group):
                yield from member.members(above)

    @property
    def _address(self) -> int:
        with self._opened.describing(self.path):
            return int(h5py.h5o.get_info(self.native.id).addr)


class Array:
    """An array of a file. Text is str, and `chunks` are whole rows if it is stored in one piece."""

    shards = None

    def __init__(self, native: h5py.Dataset, path: str, opened: _Opened) -> None:
        """Raises FormatError for what is not read in place."""
        self.native, self.path, self._opened = native, path, opened
        with opened.describing(path):
            self.attrs = self.attributes = Attributes(native, path, opened)
            if native.is_virtual:
                raise opened.refused(path, "it is a virtual dataset, whose values lie in other files")
            if native.external is not None:
                raise opened.refused(path, "its values lie in other files (external storage)")
            dtype = native.dtype
            self.shape: tuple[int, ...] = native.shape or ()  # an empty dataspace has none, like a scalar
            is_text = h5py.check_string_dtype(dtype) is not None
            # anndata reads text of a fixed length as bytes if it is a plain `array`.
            self._is_text = is_text and (dtype.kind == "O" or self.attrs.get("encoding-type") != "array")
            most_bytes = {"f": 8, "c": 16}.get(dtype.kind, dtype.itemsize)
            if not is_text and (dtype.kind not in "biufcSUV" or dtype.itemsize > most_bytes):
                raise opened.refused(path, f"it holds {dtype}")
            self.dtype: np.dtype[Any] = np.dtype(object) if self._is_text else dtype
            self.chunks: tuple[int, ...] = native.chunks or _blocks(self.shape, self.dtype)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def __getitem__(self, items: Any) -> Any:
        """Some elements, as h5py reads them. R marks its text as ASCII, whatever it holds."""
        return self.native.asstr("utf-8")[items] if self._is_text else self.native[items]

    # ---- where its chunks lie

    @property
    def _grid(self) -> list[int]:
        return [-(-size // chunk) for size, chunk in zip(self.shape, self.chunks, strict=True)]

    @property
    def n_chunks(self) -> int:
        """The number of chunks in the grid."""
        return math.prod(self._grid)

    def chunk_table(self) -> NDArray[np.uint64]:
        """Offset and size of each chunk of the grid, in row-major order, and whether its compressor was left out."""
        with self._opened.describing(self.path):
            if self.n_chunks > _MOST_CHUNKS:
                raise self._opened.refused(self.path, f"it has {self.n_chunks} chunks, more than {_MOST_CHUNKS}")
            table = np.full((self.n_chunks, 3), ABSENT, np.uint64)
            table[:, 2] = 0
            if self.native.chunks is None:
                self._fill_in_one_piece(table)
            elif len(table):
                self._fill_from_index(table)
        return table

    def _fill_in_one_piece(self, table: NDArray[np.uint64]) -> None:
        n_rows, chunk_rows = (self.shape[0], self.chunks[0]) if self.shape else (1, 1)
        begin, row_bytes = self.native.id.get_offset(), self.dtype.itemsize * math.prod(self.shape[1:])
        if begin is not None and row_bytes:  # something was written
            rows = np.minimum(np.arange(len(table) + 1, dtype=np.uint64) * np.uint64(chunk_rows), np.uint64(n_rows))
            bounds = rows * np.uint64(row_bytes)
            table[:, 0], table[:, 1] = np.uint64(begin) + bounds[:-1], np.diff(bounds)

    def _fill_from_index(self, table: NDArray[np.uint64]) -> None:
        numbers, filters = array.array("Q"), [each["name"] for each in self._filters]
        self.native.id.chunk_iter(
            lambda info: numbers.extend((*info.chunk_offset, info.filter_mask, info.byte_offset, info.size))
        )
        fields = np.array(numbers, np.uint64).reshape(-1, self.ndim + 3)
        places, (masks, offsets, sizes) = fields[:, : self.ndim], fields[:, self.ndim :].T
        cells, grid = places // np.array(self.chunks, np.uint64), self._grid
        compressors = [number for number, name in enumerate(filters) if name not in ("shuffle", "fletcher32")]
        skipped = (masks == sum(1 << number for number in compressors)) & bool(compressors)
        plain = sizes == math.prod(self.chunks) * self.dtype.itemsize + 4 * filters.count("fletcher32")
        # A filter may leave out a chunk that it cannot make smaller. Its size says so, or else the file is refused.
        for wrong, why in (
            ((cells >= np.array(grid, np.uint64)).any(axis=1), "lies outside of the shape"),
            ((masks != 0) & ~(skipped & plain), "was written with some of its filters only"),
            (plain & ~skipped & (plain & skipped).any(), "is as large compressed as it is plain"),
        ):
            if wrong.any():
                raise self._opened.refused(self.path, f"its chunk at {places[np.argmax(wrong)].tolist()} {why}")
        of_chunk = np.stack([offsets + np.uint64(_base_address(self.native.file)), sizes, skipped], axis=1)
        table[np.ravel_multi_index(tuple(cells.astype(np.int64).T), grid)] = of_chunk

    @property
    def _filters(self) -> list[dict[str, Any]]:
        """The filters that chunks pass, in their order: their names, and the bytes of the items that one shuffles."""
        plist, found = self.native.id.get_create_plist(), []
        for number, _, values, described in map(plist.get_filter, range(plist.get_nfilters())):
            name = _FILTERS.get(number) or described.decode(errors="replace") or f"filter {number}"
            found.append({"name": name, "item": values[0] if name == "shuffle" and values else self.dtype.itemsize})
        return found

    def require_numbers(self) -> None:
        """Raises FormatError for an array that is not read chunk by chunk."""
        if self._is_text or self.dtype.names:
            raise self._opened.refused(self.path, "it holds no numbers")
        if self.native.id.get_create_plist().get_layout() == h5py.h5d.COMPACT:
            raise self._opened.refused(self.path, "it is stored in its description, because it is small")
        if not is_of_numpy(self.native):
            raise self._opened.refused(self.path, "its numbers are of an HDF5 type that NumPy lacks, such as bfloat16")

    def layout(self, key: str, table: NDArray[np.uint64]) -> ArrayLayout:
        """The layout of an array of numbers, whose chunk table is given, in the file `key`.

        Raises FormatError if it cannot be read chunk by chunk.
        """
        outer = [-(-whole // max(1, size)) * max(1, size) for whole, size in zip(self.shape, self.chunks, strict=True)]
        skips = bool(table[:, 2].any())
        return ArrayLayout(
            path=self.path,
            dtype=number_dtype(self.path, self.dtype.str).newbyteorder("="),
            n_elements=self.size,
            chunk_elements=max(1, math.prod(self.chunks)),
            codecs=filters_codecs([each | {"skips": skips} for each in self._filters], self.dtype, self.path),
            cut=self.native.chunks is None,
            placement=Placement(path=key, chunks_per_object=max(1, len(table)), table=table[:, :2]),
            fill_value=self.native.fillvalue,
            absent_is_fill=True,
            grid=Grid.of(self.path, self.shape, self.chunks, outer),
        )


def _blocks(shape: Sequence[int], dtype: np.dtype[Any]) -> tuple[int, ...]:
    """Whole rows as the chunks of an array that is stored in one piece."""
    if not shape:
        return ()
    row_bytes = max(1, dtype.itemsize * math.prod(shape[1:]))
    return max(1, min(shape[0], _BLOCK_BYTES // row_bytes)), *(max(1, size) for size in shape[1:])


def is_of_numpy(native: h5py.Dataset) -> bool:
    """Whether the stored bits are those of the dtype of h5py, into which libhdf5 converts many other types."""
    stored = native.id.get_type()
    if isinstance(stored, h5py.h5t.TypeEnumID):
        stored = stored.get_super()
    if isinstance(stored, h5py.h5t.TypeFloatID):
        usual = h5py.h5t.py_create(native.dtype)
        return (stored.get_fields(), stored.get_ebias()) == (usual.get_fields(), usual.get_ebias())
    whole = not isinstance(stored, h5py.h5t.TypeIntegerID) or stored.get_precision() == 8 * stored.get_size()
    if not whole and stored.get_offset() == 0 and stored.get_sign() == h5py.h5t.SGN_NONE:
        whole = stored.get_pad()[1] == h5py.h5t.PAD_ZERO  # such as booleans of hdf5r, which have a precision of 1 bit
    return whole and stored.get_size() == native.dtype.itemsize and native.dtype.subdtype is None


def _base_address(file: h5py.File) -> int:
    """What is to be added to offsets of chunks: the size of the user block, if this version of HDF5 leaves it out.

    Files of MuData begin with one.
    """
    if not file.userblock_size:
        return 0
    name = f"probe-{threading.get_ident()}"
    with h5py.File(name, "w", driver="core", backing_store=False, userblock_size=512) as probe:
        probe.create_dataset("x", data=np.arange(97, dtype=np.int32), chunks=(97,))
        probe.flush()
        found = probe["x"].id.get_chunk_info(0).byte_offset
        image = bytes(probe.id.get_file_image())  # with or without the user block
        place = image.find(np.arange(97, dtype=np.int32).tobytes()) + (512 if image[:4] == b"\x89HDF" else 0)
    return 0 if place == found else int(file.userblock_size)


# ---- attributes


class Attributes(Mapping[str, Any]):
    """The attributes of a node as plain values, each read when it is asked for: libhdf5 may crash on a damaged one.

    Those that have no such form are absent. References are paths.
    """

    def __init__(self, native: Any, path: str, opened: _Opened) -> None:
        self._native, self._path, self._opened = native, path, opened
        self._found: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._found:
            with self._opened.describing(self._path):
                if name in self._native.attrs:
                    with contextlib.suppress(TypeError):
                        value = self._native.attrs[name]
                        is_path = isinstance(value, h5py.Reference)
                        self._found[name] = _path_of(value, self._native) if is_path else _plain(value)
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        with self._opened.describing(self._path):
            return iter([str(name) for name in self._native.attrs])

    def __len__(self) -> int:
        return len(self._native.attrs)


def _path_of(reference: h5py.Reference, native: Any) -> Any:
    """The path of an object of the file, from the group of `native` on if the object lies below it."""
    path = native.file[reference].name
    return None if path is None else path.removeprefix(f"{native.parent.name.rstrip('/')}/")


def _plain(value: Any) -> Any:
    if isinstance(value, h5py.Empty):
        return None
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, np.ndarray):
        single = not value.ndim or (value.size == 1 and value.dtype.kind in "biuf")  # R writes a number as an array
        return _plain(value.item()) if single else [_plain(each) for each in value.tolist()]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if not isinstance(value, str | int | float | bool | None):
        raise TypeError
    return value
