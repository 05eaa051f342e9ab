"""An .h5ad file opened as a store, where it lies.

AnnData has the same elements in HDF5 and in Zarr, so only this differs from a store: nodes are those of h5py
(reading/hdf5.py), the chunks of an array of numbers are at the places that its chunk table names, and all of them are
in one object. Columns and row offsets are decoded from their chunks, too. With a cache, the bytes of other elements are
kept in the mirror, and large chunk tables.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr
from numpy.typing import NDArray

from zloader.access.location import Location
from zloader.access.stored_objects import Listing
from zloader.caching.kept import kept_array
from zloader.common.errors import CorruptChunkError, FormatError, StoreChangedError, ZloaderError
from zloader.common.options import Cache
from zloader.common.other_formats import conversion_of_10x, conversion_of_hdf5, why_unreadable
from zloader.dataset.elements import ROOTS
from zloader.dataset.store import OpenedStore
from zloader.storage.decode import Decoder
from zloader.storage.layout import ABSENT, ArrayLayout

if TYPE_CHECKING:
    from zloader.reading.block_file import BlockFile

_FEW_CHUNKS = 1 << 10  # whose table is read from the file each time


def conversion_of(location: Location) -> str:
    """The command that converts a source to a store beside it, or in the working directory if it is read-only."""
    source = location.url.rstrip("/")
    store = re.sub(r"\.(h5ad|h5mu|h5|hdf5)$", "", source) + ".zarr"
    if not location.kind.is_writable:
        store = store.rpartition("/")[2]
    command = shlex.join(["zloader", "convert", source, store])
    return f"Convert it once: {command} (in Python: zl.convert({source!r}, {store!r}))"


def file_of(location: Location) -> tuple[Location, str]:
    """The directory or prefix that contains a file, and the file's name, which is its key there."""
    path, name = location.path.rpartition("/")[::2]
    if location.scheme == "file":
        return replace(location, url=path or "/"), name
    return replace(location, url=location.url.rstrip("/").rpartition("/")[0]), name


class OpenedFile(OpenedStore):
    """One .h5ad file, as it was when it was opened."""

    _file: BlockFile

    def __init__(
        self, location: Location, objects: Listing, *, origin: str, cache: Cache | None, offline: bool = False
    ) -> None:
        """Like OpenedStore. `objects` has one object, under the key "". Raises DeadlineError and StoreChangedError."""
        self._folder, self.name = file_of(location)
        self._listed = Listing([(self.name, objects[""])])
        self._layouts: dict[str, ArrayLayout] = {}  # by path
        self._is_compared = False
        super().__init__(location, objects, origin=origin, cache=cache, offline=offline)
        self.read_from, self._read_objects, self._sizes = self._folder, self._listed, self._listed.sizes
        self._settle()

    def _open_group(self) -> Any:
        # Imported here because this imports h5py, which stores do not need.
        from zloader.reading.block_file import BlockFile, reader_of
        from zloader.reading.hdf5 import DAMAGE, open_hdf5

        is_local = self.location.scheme == "file"
        self._file = BlockFile(
            reader_of(self._folder, self._listed, self.name),
            self.objects[""].size,
            where=self.location.url,
            ahead=1 if is_local else 64,
            directory=self.mirror_directory,
            offline=self.offline,
        )
        try:
            if not (is_local or self.offline):
                self._file.load_ends()
            return open_hdf5(self._file, self.location.url, conversion_of(self.location))
        except ZloaderError:
            raise
        except DAMAGE as error:
            url = self.location.url
            if not self.offline and (why := why_unreadable(self.location.read("", 0, 256))):
                raise FormatError(f"{url} {why}") from error
            raise FormatError(
                f"{url} cannot be read as HDF5: {error}. It is damaged, truncated, or still being written"
            ) from error

    def _settle(self) -> None:
        """Keeps what was read of the file. Raises StoreChangedError if that is no longer the one that was listed.

        A local file is compared at each read, one on a server when it is opened, and before anything of it is kept.
        """
        is_due = self.mirror_directory is not None or not self._is_compared
        if self._file.has_news and is_due and self.location.scheme != "file":
            if self._folder.find_object(self.name) != self._listed[self.name]:
                raise StoreChangedError(
                    f"{self.location.url} has changed since it was opened. Open it again, once it is complete"
                )
            self._file.has_news, self._is_compared = False, True
        self._file.settle()

    def _passing(self, path: str) -> Any:
        """An array, opened once more to read what is kept decoded or not at all. Its bytes are not kept."""
        from zloader.reading.hdf5 import open_hdf5

        return open_hdf5(self._file.passing(), self.location.url, conversion_of(self.location))[path]

    def require_anndata(self) -> None:
        """Raises FormatError if the file is not one of AnnData or MuData."""
        root, url = self.root, self.location.url
        if root.attrs.get("encoding-type") in ROOTS or {"obs", "var"} <= set(root):
            super().require_anndata()
            return
        if any({"barcodes", "indptr"} <= set(self.keys(name)) for name in root):
            raise FormatError(f"{url} is a 10x file. {conversion_of_10x(url, 'read_10x_h5')}")
        raise FormatError(f"{url} is an HDF5 file, but not an .h5ad file. {conversion_of_hdf5(url, list(root))}")

    def __contains__(self, path: str) -> bool:
        return super().__contains__(self._stored(path))

    def _found(self, path: str) -> Any:
        return super()._found(self._stored(path))

    def _stored(self, path: str) -> str:
        """Where an element is stored: anndata before 0.7 wrote raw/X as raw.X."""
        return path.replace("raw/", "raw.", 1) if path.startswith("raw/") and "raw" not in self.root else path

    def named(self, path: str) -> str:
        """The path of an element, given where it is stored."""
        return path.replace("raw.", "raw/", 1) if path.startswith("raw.") and "raw" not in self.root else path

    @contextlib.contextmanager
    def reading(self, path: str, node: Any, start: int = 0, stop: int | None = None) -> Iterator[None]:
        """As for a store, and keeps what is read."""
        with super().reading(path, node, start, stop):
            yield
            self._settle()

    def window(self, path: str, start: int, stop: int) -> NDArray[Any]:
        """The rows `[start, stop)` of an array. Raises FormatError if they cannot be read."""
        node = self.node(path)
        if isinstance(node, zarr.Array):  # of a frame that was renewed
            return super().window(path, start, stop)
        try:
            layout = self.array_layout(path)
        except FormatError:  # such as text
            layout = None
        with self.reading(path, node):
            if layout is None or layout.grid is not None:
                return np.asarray(self._passing(path)[start:stop])
            return self._decoded(layout, node.shape, start, stop)

    def _decoded(self, layout: ArrayLayout, shape: tuple[int, ...], start: int, stop: int) -> NDArray[Any]:
        """The rows `[start, stop)` of an array of numbers, decoded from its chunks."""
        row = int(np.prod(shape[1:]))
        begin, end = (min(max(0, at), shape[0]) * row for at in (start, stop))
        first, last = begin // layout.chunk_elements, -(-end // layout.chunk_elements)
        table = layout.find_index(0, self._sizes[self.name], self.location.url)
        assert isinstance(table, np.ndarray)
        pieces = [(int(at), int(at + size)) for at, size in table[first:last] if at != ABSENT and size]
        stored = iter(self._file.read_pieces(pieces))
        out = np.full((last - first) * layout.chunk_elements, layout.fill_value, layout.dtype)
        decoder = Decoder(layout)
        for number, (offset, size) in enumerate(table[first:last].tolist()):
            if offset == ABSENT or not size:
                continue
            chunk = out[number * layout.chunk_elements :][
                : size // out.itemsize if layout.cut else layout.chunk_elements
            ]
            try:
                decoder.decode(np.frombuffer(next(stored), np.uint8), chunk)
            except CorruptChunkError as error:
                where = (
                    f"{self.location.url}: chunk {first + number} of {layout.path}, bytes {offset}-{offset + size - 1}"
                )
                raise CorruptChunkError(f"{where}: {error}. Restore the file") from error
        begin -= first * layout.chunk_elements
        return out[begin : end - first * layout.chunk_elements].reshape(-1, *shape[1:])

    def array_layout(self, path: str) -> ArrayLayout:
        """The layout of an array of numbers. Raises FormatError if it cannot be read chunk by chunk."""
        if path not in self._layouts:
            array = self.node(path)
            if isinstance(array, zarr.Array | zarr.Group):
                raise FormatError(f"{path} of {self.location.url} was written by an early version of anndata")
            array.require_numbers()
            try:
                self._layouts[path] = array.layout(self.name, self._chunk_table(path, array))
            except FormatError as error:
                raise type(error)(f"{self.location.url}: {error}") from error
            self._settle()
        return self._layouts[path]

    def _chunk_table(self, path: str, array: Any) -> Any:
        if array.native.chunks is None or array.n_chunks <= _FEW_CHUNKS:
            return array.chunk_table()

        def tables() -> Iterator[NDArray[np.uint64]]:
            yield self._passing(path).chunk_table()

        name, shape = f"/chunks/{path}", (array.n_chunks, 3)
        return kept_array(self.mirror_directory, name, tables, shape=shape, dtype=np.dtype(np.uint64))

    def _genes_layout(self, path: str, n_genes: int) -> ArrayLayout:
        """In the smallest dtype, as 'zloader convert' writes them: a quarter less in memory and in the mirror."""
        return self.array_layout(path).narrowed(n_genes)

    def _has_every_object(self, path: str) -> bool:
        table = self.array_layout(path).placement.table
        return table is not None and bool((table[:, 0] != ABSENT).all())
