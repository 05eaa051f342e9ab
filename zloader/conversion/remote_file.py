"""A remote file that other libraries read through Python, in blocks that stay in memory for a while."""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from zloader.access.location import Location
from zloader.common.errors import TruncatedObjectError
from zloader.common.options import MiB


class BlockCache:
    """An LRU cache of the blocks of any number of remote files: at most `max_blocks` of `block_bytes` each."""

    # With these defaults the transfer of a block takes about as long as its first byte, and eight keep a link busy.
    def __init__(self, *, block_bytes: int = 4 * MiB, max_blocks: int = 8) -> None:
        self.block_bytes = block_bytes
        self.max_blocks = max_blocks
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def read(self, location: Location, size: int, numbers: range) -> list[bytes]:
        """Reads blocks of a file of `size` bytes. Blocks that are not cached are fetched concurrently.

        If the preceding block is cached, the file is being read sequentially, so the following blocks are read ahead.
        """
        missing = self._missing(location, numbers)
        if missing and not self._missing(location, [numbers[0] - 1]):
            ahead = range(numbers[0], min(numbers[0] + self.max_blocks // 2, -(-size // self.block_bytes)))
            missing = self._missing(location, sorted({*numbers, *ahead}))
        starts = [number * self.block_bytes for number in missing]
        stops = [min(start + self.block_bytes, size) for start in starts]
        fetched: list[bytes] = []
        if missing:
            with location.translated("read"):
                paths = [location.path] * len(missing)
                # Otherwise a file on Hugging Face would read 5 MiB ahead for each block.
                fetched = location.filesystem().cat_ranges(paths, starts, stops, on_error="raise")
        for number, start, stop, block in zip(missing, starts, stops, fetched, strict=True):
            if len(block) != stop - start:
                raise TruncatedObjectError(
                    f"{location.url} returned {len(block)} bytes at {start}, not {stop - start}: was it replaced "
                    "during the read?"
                )
            self._blocks[location.url, number] = block
        for number in numbers:
            self._blocks.move_to_end((location.url, number))
        blocks = [self._blocks[location.url, number] for number in numbers]
        while len(self._blocks) > self.max_blocks:
            self._blocks.popitem(last=False)
        return blocks

    def _missing(self, location: Location, numbers: Iterable[int]) -> list[int]:
        return [number for number in numbers if (location.url, number) not in self._blocks]


class RemoteFile(io.RawIOBase):
    """A seekable remote file for h5py, read in blocks. Raises AccessDeniedError, StoreNotFoundError or ReadError."""

    def __init__(self, location: Location, size: int, cache: BlockCache) -> None:
        self._location, self._size, self._cache, self._at = location, size, cache, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer).cast("B")
        start, stop = self._at, min(self._at + len(wanted), self._size)
        width = self._cache.block_bytes
        while self._at < stop:
            first = self._at // width
            numbers = range(first, min(first + self._cache.max_blocks, -(-stop // width)))
            for number, block in zip(numbers, self._cache.read(self._location, self._size, numbers), strict=True):
                part = memoryview(block)[self._at - number * width : stop - number * width]
                wanted[self._at - start : self._at - start + len(part)] = part
                self._at += len(part)
        return self._at - start
