"""Where the chunks of some shards are: the index of each shard, read once, and again if it is corrupt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from zloader.common.errors import CorruptChunkError
from zloader.common.records import Span
from zloader.storage.layout import ArrayLayout
from zloader.storage.placement import ObjectIndex

# Reads a span of a shard. The number is that of the attempt, from 0.
ReadIndex = Callable[[Span, int], Awaitable[bytes]]


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
        self._reading: dict[int, asyncio.Task[ObjectIndex]] = {}

    async def of(self, shards: Sequence[int], read: ReadIndex) -> dict[int, ObjectIndex]:
        """The index of each shard. Costs one read per shard that is not known, or none if the array has no shards.

        Raises MissingObjectError if a required shard is missing, CorruptChunkError, and any ReadError.
        """
        await asyncio.gather(*(self._learn(shard, read) for shard in shards if shard not in self._known))
        return {shard: self._known[shard] for shard in shards}

    async def _learn(self, shard: int, read: ReadIndex) -> None:
        if shard not in self._reading:
            self._reading[shard] = asyncio.ensure_future(self._read(shard, read))
        self._known[shard] = await self._reading[shard]

    async def _read(self, shard: int, read: ReadIndex) -> ObjectIndex:
        size = self._object_sizes.get(self._layout.shard_key(shard))
        found = self._layout.find_index(shard, size, self._url)
        if not isinstance(found, Span):
            return ObjectIndex(found)
        assert size is not None
        attempt = 0
        while True:
            stored = await read(found, attempt)
            try:
                return ObjectIndex(self._layout.placement.parse(stored, shard, size))
            except CorruptChunkError as error:
                if attempt == self._rereads:
                    where = f"{self._url}: {found.key} bytes {found.start}-{found.stop - 1}"
                    raise explained(error, where) from error
            attempt += 1


def explained(error: CorruptChunkError, where: str) -> CorruptChunkError:
    """The error with the place of the corrupt bytes, and with advice."""
    found = CorruptChunkError(f"{where}: {error}. Restore this object or convert the store again")
    found.__cause__ = error
    return found
