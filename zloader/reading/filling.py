"""Fills a mirror together with other fetches and other processes, so that each chunk is read once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import numpy as np

from zloader.caching.chunk_file import ChunkFile
from zloader.caching.leases import Leases
from zloader.common.records import Rows

# How often a fetch checks whether the chunks that it waits for have arrived. It has to poll: other processes share only
# the mirror's files with this one, so they cannot notify it.
_POLL_S = 0.02

File = TypeVar("File", bound=ChunkFile)
Run = Callable[..., Awaitable[tuple[Any, float]]]  # runs a function in a thread: its result, and the seconds it took


class MirrorFiller(Generic[File]):
    """Fills the file of a mirror. `leases` are the epoch's leases on its chunks.

    Others are waited for up to `deadline_s`.
    """

    def __init__(self, mirror: File, leases: Leases, run: Run, deadline_s: float) -> None:
        self.mirror, self._leases, self._run, self._deadline_s = mirror, leases, run, deadline_s

    async def missing(self, chunks: Rows) -> Rows:
        """The chunks that the mirror lacks; checksums that have to be compared are compared in a thread."""
        if not self.mirror.has_unverified(chunks):
            return self.mirror.missing(chunks)
        missing, _ = await self._run(self.mirror.missing, chunks)
        return np.asarray(missing)

    async def fill(self, chunks: Rows, wanted: Rows, read: Callable[[Rows], Awaitable[None]]) -> Rows:
        """Has `read` read the chunks in `wanted` that are missing and that nobody else is reading.

        Waits for the others if they are among `chunks`, which the fetch needs. Returns the chunks that were read here.
        """
        left = await self.missing(wanted)
        filled = [chunks[:0]]
        waited_s = 0.0
        while len(left):
            mine, others = await self._claim(left, waited_s)
            filled.append(mine)
            try:
                await read(mine)
            finally:
                self.mirror.release(mine, self._leases)
            left = await self.missing(others[np.isin(others, chunks)])
            if len(left):
                await asyncio.sleep(_POLL_S)
                waited_s += _POLL_S
        return np.concatenate(filled)

    async def _claim(self, chunks: Rows, waited_s: float) -> tuple[Rows, Rows]:
        """The chunks to read here and the chunks that others are reading; after the deadline, all are read here."""
        if waited_s > self._deadline_s:
            return chunks, chunks[:0]
        if not self.mirror.limited:
            return self.mirror.acquire(chunks, self._leases)
        (mine, others), _ = await self._run(self.mirror.acquire, chunks, self._leases)  # allocates space on disk
        return mine, others
