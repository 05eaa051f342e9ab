"""The stored form of a mirrored array: its chunks as they are in the store, encoded.

Each stored object has its bytes in the sparse file NAME.stored, one object after another, so every process knows where
a chunk belongs. NAME.places has the offset and size of each chunk, so that no index of a shard is needed later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from zloader.caching.atomic_files import cached_path
from zloader.caching.checksums import bounds_of
from zloader.caching.chunk_file import ChunkFile
from zloader.caching.directory import MirrorDirectory
from zloader.common import page_cache
from zloader.common.records import Rows
from zloader.storage.layout import ArrayLayout


class StoredArray(ChunkFile):
    """The stored chunks of one array. A chunk that the store lacks, which stands for fill values, has no bytes.

    `content` holds the chunks at `bounds`. Raises OSError if its files cannot be created or opened.
    """

    def __init__(self, directory: MirrorDirectory, layout: ArrayLayout, object_sizes: Mapping[str, int]) -> None:
        path, words_path = (cached_path(directory.path, layout.path, suffix) for suffix in ("stored", "places"))
        sizes = np.array([object_sizes.get(layout.shard_key(shard), 0) for shard in range(layout.n_shards)], np.int64)
        self._begins = np.cumsum(sizes) - sizes
        super().__init__(directory, layout, path, words_path, int(sizes.sum()))

    def bounds(self, chunks: Rows) -> tuple[Rows, Rows]:
        """The first byte of each chunk in the file, and the byte after its last. Known only for placed chunks."""
        offsets, sizes = self._places
        return bounds_of(np.stack([offsets[chunks], sizes[chunks]]), len(self.content))

    def place(self, chunks: Rows, offsets: Rows | int, sizes: Rows | int) -> None:
        """Sets the offset in its object and the size of each chunk. Needed before chunks are acquired or put."""
        self._places[0][chunks] = self._begins[chunks // self.layout.chunks_per_shard] + offsets
        self._places[1][chunks] = sizes

    def put(self, chunks: Rows, stored: Sequence[NDArray[np.uint8]]) -> None:
        """Writes the stored bytes of chunks that have been placed. After a failure (full disk), writes no more."""
        starts, _ = self.bounds(chunks)
        for chunk, start, content in zip(chunks.tolist(), starts.tolist(), stored, strict=True):
            if not self._write(start, content):
                return
            self._mark_present(chunk, content)

    def prefetch(self, chunks: Rows) -> None:
        """Makes the kernel load chunks into the page cache, if needed."""
        page_cache.prefetch(self._file, *self.bounds(chunks))
