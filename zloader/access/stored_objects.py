"""What a listing says of each object, and the two hashes of a listing.

`fingerprint` is for whoever asks whether two openings saw the same data, such as a saved state: it is the same on every
machine, and stays when a local store is moved or copied with its times. `mirror_fingerprint` is for whoever keeps
values: it must differ between any two stores that are not the same, bytes included.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

log = logging.getLogger("zloader")

TRUSTED_SINCE = 1451606400  # 2016-01-01; Zarr is younger, so that an earlier time was set to make copies alike


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """One object as listed: its size in bytes, its `tag`, and its `stamp`.

    The tag is the ETag, the GCS generation, or the modification time. The stamp differs whenever the object is not the
    one that it was: of a store in S3 or GCS it is the tag; on a web server too, where the file times behind it can be
    trusted; of a local file it is made of the time of its last change and its inode number. Empty where nothing tells.
    """

    size: int
    tag: str
    stamp: str


def fingerprint(objects: Mapping[str, StoredObject]) -> str:
    """A hash of names, sizes and tags: 32 hexadecimal digits."""
    return _digest(sorted((key, entry.size, entry.tag) for key, entry in objects.items()))


def mirror_fingerprint(url: str, origin: str, objects: Mapping[str, StoredObject]) -> str | None:
    """A hash of what tells a store from all others: its objects' stamps, and Location.origin.

    None, with a warning, where nothing would tell that an object is not the one that it was.
    """
    untold = next((key for key, entry in objects.items() if not entry.stamp), None)
    if untold is not None:
        log.warning(
            "cannot keep a mirror of %s: nothing would tell a change of %s (it has neither an ETag nor a time of its "
            "last change, or one before 2016, which was made up): every epoch will read from the store",
            url,
            untold,
        )
        return None
    return _digest([origin, *sorted((key, entry.size, entry.tag, entry.stamp) for key, entry in objects.items())])


def joint_fingerprint(fingerprints: Iterable[str]) -> str:
    """The fingerprint of several stores in their order; of one, its own."""
    prints = list(fingerprints)
    return prints[0] if len(prints) == 1 else _digest(prints)


def _digest(listed: object) -> str:
    return hashlib.sha256(repr(listed).encode()).hexdigest()[:32]
