"""A remote HDF5 file as a file object for h5py, which reads the nodes of B-trees ahead.

The nodes of the index of a chunked array (B-trees, version 1) lie far apart, each a request of its own, and libhdf5
asks for one after the other. Of 170 000 chunks they are 2 900, with up to 64 chunks in a node. Here all nodes of one
level are read at once.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

_MOST_LEVELS = 8  # of a tree; a damaged one may be circular


class PrefetchedFile(io.RawIOBase):
    """A remote file in blocks, of which many are read at once: those of all nodes below a node of a B-tree."""

    block_bytes, most_blocks, run_blocks = 16 << 10, 1 << 14, 64

    def __init__(self, read: Callable[[list[tuple[int, int]]], list[bytes]], size: int) -> None:
        self._read, self._size, self._at = read, size, 0
        self._blocks: dict[int, bytes] = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fills the buffer, or what of it lies in the file. Reads the nodes of B-trees ahead."""
        into = memoryview(buffer).cast("B")
        start, stop = self._at, max(self._at, min(self._at + len(into), self._size))
        self._load(self._numbers(start, stop), follow=True)
        into[: stop - start] = self._piece(start, stop)
        self._at = stop
        nodes = [bytes(into[: stop - start])]
        for _ in range(_MOST_LEVELS):
            children = [child for node in nodes for child in _children(node)][: self.most_blocks // 4]
            if not children:
                break
            places = [(at, min(at + len(nodes[0]), self._size)) for at in children if 0 <= at < self._size]
            self._load({number for place in places for number in self._numbers(*place)})
            nodes = [self._piece(*place) for place in places]
        return stop - start

    def _numbers(self, start: int, stop: int) -> range:
        return range(start // self.block_bytes, -(-stop // self.block_bytes))

    def _piece(self, start: int, stop: int) -> bytes:
        """Bytes of loaded blocks."""
        numbers = self._numbers(start, stop)
        whole = b"".join(self._blocks[number] for number in numbers)
        skipped = start - numbers.start * self.block_bytes
        return whole[skipped : skipped + stop - start]

    def _load(self, numbers: Collection[int], *, follow: bool = False) -> None:
        """Loads blocks. With `follow`, also those behind, if the file is read from one block to the next."""
        missing = sorted(set(numbers) - self._blocks.keys())
        if not missing:
            return
        if follow and missing[0] - 1 in self._blocks:
            missing += range(missing[-1] + 1, min(missing[-1] + self.run_blocks, -(-self._size // self.block_bytes)))
        if len(self._blocks) + len(missing) > self.most_blocks:
            self._blocks = {number: block for number, block in self._blocks.items() if number in numbers}
        # Neighbours are one read.
        runs = np.split(np.array(missing), np.flatnonzero(np.diff(missing) > 1) + 1)
        spans = [(int(run[0]) * self.block_bytes, min(int(run[-1] + 1) * self.block_bytes, self._size)) for run in runs]
        for run, stored in zip(runs, self._read(spans), strict=True):
            for at, number in enumerate(run.tolist()):
                self._blocks[number] = stored[at * self.block_bytes : (at + 1) * self.block_bytes]


def _children(node: bytes) -> list[int]:
    """The addresses of the children of an inner node of a B-tree (version 1) of chunks; none of anything else.

    HDF5 File Format Specification, III.A.1. The size of a key follows from the node, which has 2K + 1 keys and 2K
    children of 8 bytes.
    """
    if len(node) < 24 or node[:4] != b"TREE" or node[4] != 1 or node[5] == 0:
        return []
    used = int.from_bytes(node[6:8], "little")
    for n_dims in range(2, 34):  # of the array, and one of the bytes of an element
        key = 8 + 8 * n_dims
        if (len(node) - 24 - key) % (2 * (key + 8)) == 0:
            places = [24 + number * (key + 8) + key for number in range(used)]
            return [int.from_bytes(node[at : at + 8], "little") for at in places if at + 8 <= len(node)]
    return []
