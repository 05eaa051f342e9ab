"""Opens the stores behind one or several URLs, up to 16 at once.

A URL leads to one AnnData store or .h5ad file, or to an annbatch collection, whose `dataset_0`, `dataset_1`, ... are
AnnData stores. Opening costs one listing per URL and one metadata object per store, and reads no values. A source that
must be converted first, such as a 10x directory, is refused with how to convert it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from zloader.access.location import Location
from zloader.access.stored_objects import Listing, StoredObject, joint_fingerprint
from zloader.access.zarr_groups import no_codec_warnings
from zloader.caching.directory import MirrorDirectory, open_mirror_directory
from zloader.caching.kept import load_listing
from zloader.common.concurrent_calls import concurrently
from zloader.common.errors import FormatError, MissingColumnError, OptionError, StoreChangedError
from zloader.common.messages import suggestion
from zloader.common.options import Cache
from zloader.common.other_formats import conversion_of_folder, why_unreadable
from zloader.dataset.h5ad import OpenedFile
from zloader.dataset.store import OpenedStore

_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_STORE_OBJECTS = {"zarr.json", ".zgroup", "zloader.partial"}


def refuse_unconverted(location: Location, keys: Collection[str]) -> None:
    """Raises FormatError for a single file, a directory in another format, or one that contains only .h5ad files.

    `keys` are the keys of the location's listing. The message says how the source is converted.
    """
    url, present = location.url.rstrip("/"), set(keys)
    if present == {""}:
        if location.is_named_hdf5:  # its first bytes are looked at if it cannot be read
            return
        if (first := location.read("", 0, 256)).startswith(_HDF5_SIGNATURE):
            return
        if why := why_unreadable(first):
            raise FormatError(f"{url} {why}")
        if url.endswith((".parquet", ".csv")):
            raise FormatError(
                f"{url} is a table, not a store. To open many stores as one, give a list of their URLs, or convert "
                "them into one. A Parquet file with a row per cell has to be converted, too"
            )
        raise FormatError(f"{url} is a single file, but a Zarr store is a directory: if it is an archive, unpack it")
    if not present & _STORE_OBJECTS and (
        advice := conversion_of_folder(url, {key.partition("/")[0] for key in present})
    ):
        raise FormatError(advice)
    if all(re.fullmatch(r"[^/]+\.h5ad", key) for key in keys):
        raise FormatError(f"{url} contains .h5ad files, not a Zarr store: open them with the glob '{url}/*.h5ad'")


_COLLECTION = "annbatch-preshuffled"


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenedStores:
    """The stores found at some locations, in order. Their rows follow one another.

    `mirror_directory` is where columns over all rows are cached, or None without a usable cache.
    """

    locations: Sequence[Location]
    cache: Cache | None
    offline: bool
    stores: Sequence[OpenedStore]
    mirror_directory: MirrorDirectory | None

    @property
    def url(self) -> str:
        """The first URL and the number of further URLs and stores, for messages."""
        more = f" and {len(self.locations) - 1} more" if len(self.locations) > 1 else ""
        stores = f" ({len(self.stores)} stores)" if len(self.stores) > 1 else ""
        return f"{self.locations[0].url}{more}{stores}"

    @property
    def urls(self) -> list[str]:
        """The URL of each store."""
        return [store.location.url for store in self.stores]

    @property
    def fingerprint(self) -> str:
        """One fingerprint for all stores; it changes when an object of any store changes."""
        return joint_fingerprint([store.fingerprint for store in self.stores])

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened_again, (self.locations, self.cache, self.offline, self._fingerprints)

    @property
    def _fingerprints(self) -> list[tuple[str, str]]:
        return [(store.location.url, store.fingerprint) for store in self.stores]

    def in_all(self, names: Callable[[OpenedStore], Collection[str]]) -> list[str]:
        """Those names that every store has, in the order of the first."""
        first, *others = map(names, self.stores)
        return [name for name in first if all(name in known for known in others)]

    def require_in_all(self, what: str, name: str, names: Callable[[OpenedStore], Collection[str]]) -> None:
        """Raises MissingColumnError unless `name` is among the names that each store has."""
        for store in self.stores:
            if not isinstance(name, str) or name not in names(store):
                known = self.in_all(names)
                raise MissingColumnError(
                    f"there is no {what} in {store.location.url}; there are: {', '.join(map(repr, known)) or 'none'}"
                    f"{suggestion(name, known)}"
                )


def open_all(
    locations: Sequence[Location], cache: Cache | None, *, offline: bool = False, by_rows: bool = True
) -> OpenedStores:
    """Opens the stores at all locations. Raises OptionError for an empty list, and the errors of `open_stores`."""
    if not locations:
        raise OptionError("there is nothing to open: give at least one URL")
    with no_codec_warnings():
        opened = concurrently(partial(open_stores, cache=cache, offline=offline, by_rows=by_rows), locations)
    stores = [store for found in opened for store in found]
    return OpenedStores(
        locations=list(locations),
        cache=cache,
        offline=offline,
        stores=stores,
        mirror_directory=_mirror_directory(stores, cache),
    )


def _opened_again(
    locations: Sequence[Location], cache: Cache | None, offline: bool, fingerprints: Sequence[tuple[str, str]]
) -> OpenedStores:
    """Unpickles opened stores. Raises StoreChangedError if one of them has changed since."""
    opened = open_all(locations, cache, offline=offline)
    for before, found in itertools.zip_longest(fingerprints, opened._fingerprints):
        if before != found:
            raise StoreChangedError(f"{(before or found)[0]} has changed since it was opened: open it again")
    return opened


def _mirror_directory(stores: Sequence[OpenedStore], cache: Cache | None) -> MirrorDirectory | None:
    """The mirror directory of a single store; for several stores, a directory of their own beside their mirrors."""
    if len(stores) == 1 or cache is None:
        return stores[0].mirror_directory
    fingerprints = [store.mirror_fingerprint for store in stores if store.mirror_fingerprint is not None]
    if len(fingerprints) < len(stores):
        return None
    addresses = [store.location.address for store in stores]
    return open_mirror_directory(cache, joint_fingerprint(fingerprints), " + ".join(addresses))


def open_stores(
    location: Location, cache: Cache | None, *, offline: bool = False, by_rows: bool = True
) -> list[OpenedStore]:
    """Opens the AnnData store at a location, or the stores of the annbatch collection there, with a single listing.

    With `offline`, the listing and metadata come from the mirrors in the cache; raises CacheError if they are missing.
    With `by_rows`, the modalities of a MuData must share rows.
    Raises FormatError for anything that is neither an AnnData store nor a complete collection.
    """
    if offline and cache is None:
        raise OptionError("offline=True opens a dataset from a cache: give cache= too")
    if offline and cache is not None:
        origin, objects = load_listing(cache.directory, location)
    else:
        origin, objects = location.origin, location.listing()
        refuse_unconverted(location, objects)
    opens = OpenedFile if objects.keys() == {""} else OpenedStore
    opened = opens(location, objects, origin=origin, cache=cache, offline=offline)
    if opened.root.attrs.get("encoding-type") != _COLLECTION:
        opened.require_anndata()
        if by_rows:
            opened.require_shared_rows()
        return [opened]
    cache = cache if opened.mirror_fingerprint else None  # opening the collection has logged the reason
    return list(_members(location, objects, origin=origin, cache=cache, offline=offline))


def _members(
    location: Location, objects: Listing, *, origin: str, cache: Cache | None, offline: bool
) -> Iterator[OpenedStore]:
    """The stores of an annbatch collection, in the order of their numbers."""
    members: dict[int, list[tuple[str, StoredObject]]] = {}
    for key, stored in objects.items():
        if match := re.fullmatch(r"(?s)dataset_(0|[1-9]\d*)/(.+)", key):
            members.setdefault(int(match[1]), []).append((match[2], stored))
    missing = set(range(max(members, default=0) + 1)) - members.keys()
    if missing:
        raise FormatError(
            f"{location.url} is an annbatch collection without dataset_{min(missing)}: it is incomplete. Write it again"
        )
    for number in sorted(members):
        member = replace(location, url=f"{location.url.rstrip('/')}/dataset_{number}")
        member_origin = origin and f"{origin}/dataset_{number}"
        store = OpenedStore(member, Listing(members[number]), origin=member_origin, cache=cache, offline=offline)
        store.require_anndata()
        store.require_shared_rows()
        yield store
