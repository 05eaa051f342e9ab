"""Decompress gzip HDF5 datasets in several threads.

Most .h5ad files are compressed with gzip, and the HDF5 library decompresses in a single thread while it holds a lock.
Here the compressed chunks are read as stored and inflated by zlib, which releases Python's global interpreter lock.
"""

from __future__ import annotations

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import h5py
import numcodecs
import numpy as np
from numpy.typing import NDArray

_DEFLATE, _SHUFFLE = 1, 2  # https://docs.hdfgroup.org: identifiers of filters
_MAX_THREADS = 16


def in_threads(array: Any) -> Any:
    """Wraps a one-dimensional gzip dataset so that it decompresses in several threads; returns other arrays as is."""
    if not isinstance(array, h5py.Dataset) or array.chunks is None or array.ndim != 1:
        return array
    filters = array.id.get_create_plist()
    kinds = [filters.get_filter(number)[0] for number in range(filters.get_nfilters())]
    return GzipDataset(array, shuffled=_SHUFFLE in kinds) if kinds in ([_DEFLATE], [_SHUFFLE, _DEFLATE]) else array


class GzipDataset:
    """A one-dimensional gzip dataset with the slices of h5py's. Raises OSError for a chunk that does not inflate."""

    def __init__(self, dataset: h5py.Dataset, *, shuffled: bool) -> None:
        self._dataset = dataset
        self.shape, self.dtype, self.chunks = dataset.shape, dataset.dtype, dataset.chunks
        self._unshuffle = numcodecs.Shuffle(dataset.dtype.itemsize).decode if shuffled else None

    def __getitem__(self, items: slice) -> NDArray[Any]:
        start, stop, _ = items.indices(self.shape[0])
        length = self.chunks[0]
        chunks = range(start // length, -(-stop // length))
        out = np.empty(max(0, stop - start), self.dtype)

        def inflate(chunk: int, stored: bytes | None) -> None:
            first = chunk * length
            begin, end = max(start, first), min(stop, first + length)
            if stored is None:
                out[begin - start : end - start] = self._dataset.fillvalue
            else:
                out[begin - start : end - start] = self._inflated(stored)[begin - first : end - first]

        with ThreadPoolExecutor(
            min(os.cpu_count() or 1, _MAX_THREADS), thread_name_prefix="zloader-inflate"
        ) as threads:
            jobs = [threads.submit(inflate, chunk, self._stored(chunk * length)) for chunk in chunks]
            for job in jobs:
                job.result()
        return out

    def _stored(self, first: int) -> bytes | None:
        """The compressed bytes of the chunk that starts at element `first`; None if it was never written."""
        identifier = self._dataset.id
        if identifier.get_chunk_info_by_coord((first,)).byte_offset is None:
            return None
        skipped_filters, stored = identifier.read_direct_chunk((first,))
        if skipped_filters:
            raise OSError(f"the chunk at {first} was stored without some of its filters")
        return bytes(stored)

    def _inflated(self, stored: bytes) -> NDArray[Any]:
        size = self.chunks[0] * self.dtype.itemsize
        stream = zlib.decompressobj()
        try:
            plain: Any = stream.decompress(stored, size + 1)
        except zlib.error as error:
            raise OSError(f"a chunk does not inflate: {error}") from error
        if len(plain) != size or not stream.eof:
            raise OSError(f"a chunk does not inflate to {size} bytes, but to at least {len(plain)}")
        return np.frombuffer(plain if self._unshuffle is None else self._unshuffle(plain), self.dtype)
