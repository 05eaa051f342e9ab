"""One opened AnnData store: its root group, its listing and its mirror.

Opening reads one metadata object; the listing is given. Elements are read one by one, when they are first used, with
zarr and anndata. TensorStore is not used here: only reading rows of a matrix opens it.
"""

from __future__ import annotations

import os
from typing import Any, Literal

from zloader.access.file_source import FileSource
from zloader.access.listed_store import ListedStore
from zloader.access.location import Location
from zloader.access.stored_objects import Listing, fingerprint, mirror_fingerprint
from zloader.access.zarr_groups import UNDECODABLE, open_zarr_group
from zloader.caching.kept_objects import CachedMetadataStore, OfflineSource, save_listing
from zloader.caching.mirror import open_mirror_directory
from zloader.common.errors import CacheError, FormatError, ZloaderError
from zloader.common.options import Cache, FetchOptions
from zloader.common.records import ByteSource
from zloader.dataset.stored_matrices import StoredMatrices


class OpenedStore(StoredMatrices):
    """One AnnData store, as it was when it was opened."""

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
        directory = None
        if cache is not None and self.mirror_fingerprint is not None:
            directory = open_mirror_directory(cache, self.mirror_fingerprint, location.address)
        super().__init__(location, objects, directory)
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

    @property
    def opened_root(self) -> Any:
        """The root group as it was opened, with its consolidated metadata, even in a forked process."""
        return self._opened[1]

    def require_anndata(self) -> None:
        """Raises FormatError if the root is not an AnnData element with obs and var."""
        encoding = self.root.attrs.get("encoding-type")
        if encoding != "anndata":
            raise FormatError(
                f"{self.location.url} is not an AnnData store: its root says encoding-type {encoding!r}, not 'anndata'"
            )
        for needed in ("obs", "var"):
            if needed not in self:
                raise FormatError(f"{self.location.url} has no {needed}: it is not a complete AnnData store")

    def _open_group(self) -> Any:
        if not self.objects.keys() & {"zarr.json", ".zgroup"}:
            why = "its conversion did not finish" if "zloader.partial" in self.objects else "it has no zarr.json"
            raise FormatError(f"{self.location.url} is not a complete AnnData Zarr store: {why}")
        known: Literal[2, 3] = 3 if "zarr.json" in self.objects else 2  # saves zarr from probing for both
        store = self._zarr_store()
        try:
            try:
                group = open_zarr_group(store, zarr_format=known)
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
            store, location = self.location.zarr_store(read_only=True), self.location
            return ListedStore(store, location.url, self.object_sizes(), all_listed=not location.is_web)
        return CachedMetadataStore(self.location, self.objects, self.mirror_directory, offline=self.offline)

    def source(self, options: FetchOptions) -> ByteSource:
        """Reads byte ranges of the store's objects; with `offline`, raises ReadError instead."""
        if self.offline:
            return OfflineSource(self.location.url)
        if self.location.scheme == "file":
            return FileSource(self.location, self.objects, options)
        # Imported here because it imports TensorStore, which local stores do not need.
        from zloader.reading.object_source import ObjectSource

        return ObjectSource(self.location, self.objects, options)
