"""An .h5ad file opened as a store, where it lies.

AnnData has the same elements in HDF5 and in Zarr, so only this differs from a store: the metadata and small arrays come
from the file's index (dataset/hdf5_store.py), the chunks of a matrix are at the places that its chunk table names, and
all of them are in one object. With a cache, the index and small arrays are kept in the mirror.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from zloader.access.location import Location
from zloader.access.stored_objects import Listing
from zloader.access.zarr_groups import UNDECODABLE, open_zarr_group
from zloader.caching.directory import MirrorDirectory
from zloader.caching.kept import load_object, may_keep, save_object
from zloader.common.errors import CacheError, FormatError, ZloaderError
from zloader.common.locks import cached_property
from zloader.common.options import Cache
from zloader.common.other_formats import conversion_of_10x, conversion_of_hdf5
from zloader.dataset.hdf5_store import Hdf5Index, Hdf5Store, file_of, read_index
from zloader.dataset.modalities import ROOTS
from zloader.dataset.store import OpenedStore
from zloader.storage.layout import ArrayLayout

if TYPE_CHECKING:
    from zarr.core.buffer import BufferPrototype

_INDEX = "/hdf5-3"  # keys of a store do not begin with a slash; the number is that of its format


def conversion_of(location: Location) -> str:
    """The command that converts a source to a store beside it, or in the working directory if it is read-only."""
    source = location.url.rstrip("/")
    store = re.sub(r"\.(h5ad|h5mu|h5|hdf5)$", "", source) + ".zarr"
    if not location.kind.is_writable:
        store = store.rpartition("/")[2]
    command = shlex.join(["zloader", "convert", source, store])
    return f"Convert it once: {command} (in Python: zl.convert({source!r}, {store!r}))"


class OpenedFile(OpenedStore):
    """One .h5ad file, as it was when it was opened."""

    def __init__(
        self, location: Location, objects: Listing, *, origin: str, cache: Cache | None, offline: bool = False
    ) -> None:
        """Like OpenedStore. `objects` has one object, under the key "". Raises DeadlineError and StoreChangedError."""
        super().__init__(location, objects, origin=origin, cache=cache, offline=offline)
        self.read_from, self.name = file_of(location)
        self._read_objects, self._sizes = Listing([(self.name, objects[""])]), {self.name: objects[""].size}

    @cached_property
    def index(self) -> Hdf5Index:
        """What the file says about itself. Reading it starts a process, unless the mirror has it."""
        directory = self.mirror_directory
        content = None if directory is None else load_object(directory, _INDEX)
        if content is None:
            if self.offline:
                raise CacheError(f"the index of {self.location.url} is not in the cache: open the file once online")
            content = read_index(self.location, self.objects[""])
            if directory is not None:
                save_object(directory, _INDEX, content)
        return Hdf5Index(content, self.location.url)

    def require_anndata(self) -> None:
        """Raises FormatError if the file is not an AnnData of version 0.8 or later."""
        encoding, url, nodes = self.root.attrs.get("encoding-type"), self.location.url, self.index.nodes
        if any(path.endswith("/barcodes") and path.replace("/barcodes", "/indptr") in nodes for path in nodes):
            raise FormatError(f"{url} is a 10x file. {conversion_of_10x(url, 'read_10x_h5')}")
        if encoding not in ROOTS:
            raise FormatError(
                f"{url} is an HDF5 file, but not an .h5ad file of AnnData 0.8 or later: its root has encoding-type "
                f"{encoding!r}, not 'anndata'. "
                + (conversion_of(self.location) if {"obs", "var"} <= nodes.keys() else conversion_of_hdf5(url, nodes))
            )
        super().require_anndata()

    def _open_group(self) -> Any:
        store = _KeptFile(self.location, self.objects[""], self.index, self.mirror_directory, offline=self.offline)
        try:
            return open_zarr_group(store, zarr_format=2)
        except ZloaderError:
            raise
        except UNDECODABLE as error:
            raise FormatError(
                f"{self.location.url} cannot be read: {error}. Is it damaged? {conversion_of(self.location)}"
            ) from error

    def node(self, path: str) -> Any:
        """Like that of a store. Raises FormatError for what cannot be read in place, such as links."""
        if (why := self.index.refused(path)) is not None:
            raise FormatError(
                f"{path} of {self.location.url} cannot be read in place: {why}. {conversion_of(self.location)}"
            )
        return super().node(path)

    def __contains__(self, path: str) -> bool:
        return self.index.refused(path) is not None or super().__contains__(path)

    @property
    def _known_keys(self) -> Iterable[str]:
        return self.index.documents

    def array_layout(self, path: str) -> ArrayLayout:
        """The layout of an array of numbers. Raises FormatError if it cannot be read chunk by chunk."""
        self.node(path)
        try:
            return self.index.layout(path, self.name)
        except FormatError as error:
            raise FormatError(f"{self.location.url}: {error}") from error

    def _genes_layout(self, path: str, n_genes: int) -> ArrayLayout:
        """In the smallest dtype, as 'zloader convert' writes them: a quarter less in memory and in the mirror."""
        return self.array_layout(path).narrowed(n_genes)

    def _has_every_object(self, path: str) -> bool:
        return self.index.has_every_chunk(path)


class _KeptFile(Hdf5Store):
    """The zarr store of a file, whose small chunks are kept in its mirror."""

    def __init__(
        self, location: Location, listed: Any, index: Hdf5Index, directory: MirrorDirectory | None, *, offline: bool
    ) -> None:
        super().__init__(location, listed, index)
        self._kept_in, self._offline = directory, offline

    async def chunk(self, key: str, prototype: BufferPrototype) -> bytes | None:
        directory = self._kept_in
        if directory is None:
            return await super().chunk(key, prototype)
        content = load_object(directory, key)
        if content is None and self._offline:
            raise CacheError(f"{key} of {self._location.url} is not in the mirror: read it once online")
        if content is None:
            content = await super().chunk(key, prototype)
            if content is not None and may_keep(directory, key, len(content)):
                save_object(directory, key, content)
        return content
