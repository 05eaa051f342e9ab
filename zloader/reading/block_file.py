"""An HDF5 file in blocks, as a file object for h5py, which reads the nodes of B-trees ahead.

The nodes of the index of a chunked array (B-trees, version 1) lie far apart, each a request of its own, and libhdf5
asks for one after the other. Of 170 000 chunks they are 2 900, with up to 64 chunks in a node. Here all nodes of one
level are read at once.

With a mirror, what is read is kept there. So a file that was read once can be read without a network.
"""

from __future__ import annotations

import copy
import gc
import io
import itertools
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from zarr.abc.store import RangeByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.core.common import concurrent_map
from zarr.core.sync import sync

from zloader.access.file_source import FileSource
from zloader.access.listed_store import ListedStore
from zloader.access.location import Location
from zloader.access.stored_objects import Listing
from zloader.caching.directory import MirrorDirectory
from zloader.caching.kept import load_object, save_object
from zloader.common.errors import CacheError, DeadlineError
from zloader.common.options import FetchOptions
from zloader.common.records import Span

Piece = tuple[int, int]  # the first byte, and that after the last
Read = Callable[[list[Piece]], list[bytes]]

_MOST_LEVELS = 8  # of a tree; a damaged one may be circular
_AT_ONCE = 64  # requests
_FIRST, _LAST = 16, 48  # blocks that are read when a remote file is opened: anndata writes obs and var last
_MOST_SETTLED = 256  # blocks, 4 MiB, that stay in memory between uses


def reader_of(location: Location, objects: Listing, name: str) -> Read:
    """Reads pieces of the file `name` in a folder, as it was listed. Raises StoreError.

    A file on a server is read by zarr's thread with the library that reads the metadata of stores, so that the process
    can still be forked.
    """
    if location.scheme == "file":
        source = FileSource(location, objects, FetchOptions())

        def read_file(pieces: list[Piece]) -> list[bytes]:
            spans = [Span(key=name, start=start, stop=stop) for start, stop in pieces]
            buffer = np.empty(sum(span.size for span in spans), np.uint8)
            return [content.tobytes() for content in source.read_now(spans, buffer)]

        return read_file
    store = ListedStore(location, objects.sizes, all_listed=True)
    prototype = default_buffer_prototype()

    async def get(start: int, stop: int) -> bytes:
        content = await store.get(name, prototype, RangeByteRequest(start, stop))
        assert content is not None
        return content.to_bytes()

    def read_object(pieces: list[Piece]) -> list[bytes]:
        deadline_s = FetchOptions().deadline_s
        try:
            return sync(concurrent_map(pieces, get, _AT_ONCE), timeout=deadline_s)
        except TimeoutError as error:
            raise DeadlineError(
                f"{name} of {location.url} could not be read within {deadline_s} s. Is the server overloaded, down "
                "or unreachable?"
            ) from error

    return read_object


class BlockFile(io.RawIOBase):
    """A file of `size` bytes, of which many blocks are read at once: those of all nodes below a node of a B-tree.

    Where one block is read after the other, `ahead` blocks are read together. `where` names the file in messages.
    """

    block_bytes, most_blocks, _keeps = 16 << 10, 1 << 12, True

    def __init__(
        self,
        read: Read,
        size: int,
        *,
        where: str,
        ahead: int = 64,
        directory: MirrorDirectory | None = None,
        offline: bool = False,
    ) -> None:
        self._read, self._size, self._where, self._at, self._ahead = read, size, where, 0, ahead
        self._directory, self._offline = directory, offline
        self._blocks: dict[int, bytes] = {}
        self._new: dict[Piece, bytes] = {}  # to be kept
        self.has_news = False  # bytes of the file that were not compared with the listing yet

    def passing(self) -> BlockFile:
        """The same file, for h5py to open it once more. Nothing is kept of what is read from it."""
        made = copy.copy(self)
        made._blocks, made._new, made._keeps = dict(self._blocks), {}, False
        return made

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def load_ends(self) -> None:
        """Loads the first and the last blocks: at once, and before h5py takes its lock."""
        n_blocks = -(-self._size // self.block_bytes)
        self._load({*range(min(_FIRST, n_blocks)), *range(max(0, n_blocks - _LAST), n_blocks)})

    def settle(self) -> None:
        """Keeps what was read, and drops all but the last of it from memory. Any thread may call this."""
        if (n_more := len(self._blocks) - _MOST_SETTLED) > 0:
            self._blocks = dict(itertools.islice(self._blocks.copy().items(), n_more, None))
        while self._new and self._directory is not None:
            (start, stop), content = self._new.popitem()
            save_object(self._directory, _key(start, stop), content)

    def readinto(self, buffer: Any) -> int:
        """Fills the buffer, or what of it lies in the file. Reads the nodes of B-trees ahead."""
        # h5py holds its lock meanwhile. Garbage with files of h5py, collected by a thread that is waited for here,
        # would wait for that lock.
        collects = gc.isenabled()
        gc.disable()
        try:
            return self._fill(memoryview(buffer).cast("B"))
        finally:
            if collects:
                gc.enable()

    def _fill(self, into: memoryview) -> int:
        start, stop = self._at, max(self._at, min(self._at + len(into), self._size))
        self._at = stop
        if stop - start > self._ahead * self.block_bytes:
            into[: stop - start] = self.read_pieces([(start, stop)], keep=self._keeps)[0]
            return stop - start
        blocks = self._load(self._numbers(start, stop), follow=True)
        into[: stop - start] = self._piece(blocks, start, stop)
        nodes = [bytes(into[: stop - start])]
        for _ in range(_MOST_LEVELS):
            children = [child for node in nodes for child in _children(node)][: self.most_blocks]
            if not children:
                break
            places = [(at, min(at + len(nodes[0]), self._size)) for at in children if 0 <= at < self._size]
            blocks = self._load({number for place in places for number in self._numbers(*place)})
            nodes = [self._piece(blocks, *place) for place in places]
        return stop - start

    def _numbers(self, start: int, stop: int) -> range:
        return range(start // self.block_bytes, -(-stop // self.block_bytes))

    def _piece(self, blocks: dict[int, bytes], start: int, stop: int) -> bytes:
        """Bytes of loaded blocks."""
        numbers = self._numbers(start, stop)
        skipped = start - numbers.start * self.block_bytes
        return b"".join(blocks[number] for number in numbers)[skipped : skipped + stop - start]

    def _load(self, numbers: Collection[int], *, follow: bool = False) -> dict[int, bytes]:
        """Loaded blocks, with these. With `follow`, also those behind, if the file is read block by block."""
        blocks = self._blocks
        missing = sorted(set(numbers) - blocks.keys())
        if not missing:
            return blocks
        if follow and (missing[0] == 0 or missing[0] - 1 in blocks):
            missing += range(missing[-1] + 1, min(missing[-1] + self._ahead, -(-self._size // self.block_bytes)))
        if len(blocks) + len(missing) > self.most_blocks:
            blocks = self._blocks = {number: block for number, block in blocks.items() if number in numbers}
        pieces = [(at * self.block_bytes, min((at + 1) * self.block_bytes, self._size)) for at in missing]
        blocks |= zip(missing, self.read_pieces(pieces, keep=self._keeps), strict=True)
        return blocks

    def read_pieces(self, pieces: list[Piece], *, keep: bool = False) -> list[bytes]:
        """Pieces from the mirror, or else from the file. Neighbours are one read."""
        found, directory = dict[Piece, bytes](), self._directory
        for start, stop in pieces if directory is not None else ():
            if directory and (content := load_object(directory, _key(start, stop))) is not None:
                found[start, stop] = content
        runs: list[list[Piece]] = []
        for piece in (piece for piece in pieces if piece not in found):
            if runs and runs[-1][-1][1] == piece[0]:
                runs[-1].append(piece)
            else:
                runs.append([piece])
        if runs and self._offline:
            start, stop = runs[0][0]
            raise CacheError(f"bytes {start}-{stop - 1} of {self._where} are not in the cache: read it once online")
        if runs:
            self.has_news = True
            stored = self._read([(run[0][0], run[-1][1]) for run in runs])
            new = {
                (start, stop): content[start - run[0][0] : stop - run[0][0]]
                for run, content in zip(runs, stored, strict=True)
                for start, stop in run
            }
            found |= new
            if keep and self._directory is not None:
                self._new |= new
        return [found[piece] for piece in pieces]


def _key(start: int, stop: int) -> str:
    return f"/bytes/{start}-{stop}"  # keys of a store do not begin with a slash


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
