"""The entry of each object in a listing, and the two hashes of a listing.

`fingerprint` tells whether a store is the one that a saved state refers to. It is the same on every machine, and does
not change when a local store is moved or copied with its times. `mirror_fingerprint` is the key for cached values. It
must differ between any two stores whose bytes differ.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

log = logging.getLogger("zloader")

TRUSTED_SINCE = 1451606400  # 2016-01-01: Zarr is younger, so an earlier time is artificial, set to make copies equal


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """One listed object: its `size` in bytes, its `tag` and its `stamp`.

    The tag is the ETag, the GCS generation or the modification time. The stamp differs whenever the object has changed.
    In S3 and GCS, and on a web server whose file times can be trusted, the stamp is the tag. For a local file it
    consists of the time of the last change and the inode number. It is empty if changes cannot be detected.
    """

    size: int
    tag: str
    stamp: str


def fingerprint(objects: Mapping[str, StoredObject]) -> str:
    """A hash of the keys, sizes and tags of objects: 32 hexadecimal digits."""
    return _digest(sorted((key, entry.size, entry.tag) for key, entry in objects.items()))


def mirror_fingerprint(url: str, origin: str, objects: Mapping[str, StoredObject]) -> str | None:
    """A hash that distinguishes a store from all others, made of `origin` (Location.origin) and the objects' stamps.

    None, with a warning, if a change of some object could not be detected.
    """
    unstamped = next((key for key, entry in objects.items() if not entry.stamp), None)
    if unstamped is not None:
        log.warning(
            "cannot keep a mirror of %s: a change of %s could not be detected, because it has neither an ETag nor a "
            "plausible time of its last change (2016 or later). Every epoch will read from the store",
            url,
            unstamped,
        )
        return None
    return _digest([origin, *sorted((key, entry.size, entry.tag, entry.stamp) for key, entry in objects.items())])


def joint_fingerprint(fingerprints: Iterable[str]) -> str:
    """The fingerprint of several stores in order; for a single store, its own fingerprint."""
    prints = list(fingerprints)
    return prints[0] if len(prints) == 1 else _digest(prints)


def _digest(listed: object) -> str:
    return hashlib.sha256(repr(listed).encode()).hexdigest()[:32]
