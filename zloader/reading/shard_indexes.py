"""Where the chunks of some shards are: the index of each shard, read once, and again if it is corrupt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from zloader.common.errors import CorruptChunkError
from zloader.common.records import Span
from zloader.storage.layout import ArrayLayout
from zloader.storage.placement import ObjectIndex

# Reads spans of shards. The number is that of the attempt, from 0.
ReadIndexes = Callable[[Sequence[Span], int], Awaitable[Sequence[bytes]]]
_AT_ONCE = 16  # indexes that one task reads


class ShardIndexes:
    """The indexes of the shards of one array in the store at `url`. `known` has those that were read, by shard."""

    def __init__(
        self,
        layout: ArrayLayout,
        object_sizes: Mapping[str, int],
        url: str,
        *,
        known: dict[int, ObjectIndex] | None = None,
        rereads: int = 0,
    ) -> None:
        """An index that is corrupt is read `rereads` times more."""
        self._layout, self._object_sizes, self._url, self._rereads = layout, object_sizes, url, rereads
        self._known: dict[int, ObjectIndex] = {} if known is None else known
        self._reading: dict[int, asyncio.Task[dict[int, ObjectIndex]]] = {}

    async def of(self, shards: Sequence[int], read: ReadIndexes) -> dict[int, ObjectIndex]:
        """The index of each shard. Costs one read per shard that is not known, or none if the array has no shards.

        Raises MissingObjectError if a required shard is missing, CorruptChunkError, and any ReadError.
        """
        unknown = [shard for shard in shards if shard not in self._known]
        new = [shard for shard in unknown if shard not in self._reading]
        for first in range(0, len(new), _AT_ONCE):
            some = new[first : first + _AT_ONCE]
            self._reading.update(dict.fromkeys(some, asyncio.ensure_future(self._read(some, read))))
        for found in await asyncio.gather(*{self._reading[shard] for shard in unknown}):
            self._known.update(found)
        return {shard: self._known[shard] for shard in shards}

    async def _read(self, shards: Sequence[int], read: ReadIndexes) -> dict[int, ObjectIndex]:
        sizes = {shard: self._object_sizes.get(self._layout.shard_key(shard)) for shard in shards}
        found = {shard: self._layout.find_index(shard, size, self._url) for shard, size in sizes.items()}
        indexes = {shard: ObjectIndex(each) for shard, each in found.items() if not isinstance(each, Span)}
        left = {shard: each for shard, each in found.items() if isinstance(each, Span)}
        for attempt in range(self._rereads + 1):
            if not left:
                break
            for shard, stored in zip(list(left), await read(list(left.values()), attempt), strict=True):
                try:
                    indexes[shard] = ObjectIndex(self._layout.placement.parse(stored, shard, sizes[shard] or 0))
                    del left[shard]
                except CorruptChunkError as error:
                    if attempt == self._rereads:
                        span = left[shard]
                        where = f"{self._url}: {span.key} bytes {span.start}-{span.stop - 1}"
                        raise explained(error, where) from error
        return indexes


def explained(error: CorruptChunkError, where: str) -> CorruptChunkError:
    """The error with the place of the corrupt bytes, and with advice."""
    found = CorruptChunkError(f"{where}: {error}. Restore this object or convert the store again")
    found.__cause__ = error
    return found
