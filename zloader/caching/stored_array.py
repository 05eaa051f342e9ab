"""The stored form of a mirrored array: its chunks as they are in the store, encoded.

Each stored object has its bytes in the sparse file NAME.stored, one object after another, so every process knows where
a chunk belongs. NAME.places has the offset and size of each chunk, so that no index of a shard is needed later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.caching.atomic_files import cached_path
from zloader.caching.checksums import bounds_of
from zloader.caching.chunk_file import ChunkFile
from zloader.caching.directory import MirrorDirectory
from zloader.common.records import Rows
from zloader.storage.decode import Decoder
from zloader.storage.layout import ArrayLayout


class StoredArray(ChunkFile):
    """The stored chunks of one array. A chunk that the store lacks, which stands for fill values, has no bytes.

    `content` holds the chunks at `bounds`. Raises OSError if its files cannot be created or opened.
    """

    in_place = False
    needs_places = True

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
        """Sets the offset of each chunk in its object and its size, in bytes."""
        self._places[0][chunks] = self._begins[chunks // self.layout.chunks_per_shard] + offsets
        self._places[1][chunks] = sizes

    def keep(
        self, chunks: Rows, jobs: NDArray[Any], reads: Sequence[bytes | NDArray[np.uint8]], elements: NDArray[Any]
    ) -> None:
        """Writes the stored bytes of chunks that have been placed. After a failure (full disk), writes no more."""
        starts, _ = self.bounds(chunks)
        places = zip(*(jobs[name].tolist() for name in ("read", "offset", "size")), strict=True)
        for chunk, start, (read, offset, size) in zip(chunks.tolist(), starts.tolist(), places, strict=True):
            content = np.frombuffer(reads[read], np.uint8)[offset : offset + size]
            if not self._write(start, content):
                return
            self._mark_present(chunk, content)

    @cached_property
    def _decoder(self) -> Decoder:
        return Decoder(self.layout)

    def take(self, chunks: Rows, jobs: NDArray[Any], elements: NDArray[Any]) -> Rows:
        """Decodes present chunks; returns those that are corrupt, although they match the checksums in the mirror."""
        starts, stops = self.bounds(chunks)
        absent = (starts == stops) & self.layout.absent_is_fill
        for job in jobs[absent]:
            elements[job["begin"] : job["begin"] + job["stop"] - job["first"]] = self.layout.fill_value
        left = jobs[~absent]
        left["read"], left["offset"], left["size"] = 0, starts[~absent], (stops - starts)[~absent]
        self.count_mapped(int(left["size"].sum()))
        errors = self._decoder.decode_all([self.content], left, elements)
        return np.asarray(chunks[~absent][[position for position, _ in errors]])
