"""Elements -> stored chunks and shards; the grids and dtypes to store them with, and the options that decide. Pure.

A shard is its encoded chunks end to end and then an index of their byte ranges (Zarr v3 sharding codec,
https://zarr-specs.readthedocs.io). zarr-python gives the same bytes, and a test says so, but encodes `indices` and
`data` together at 15 ns a value where this takes 3.6 (two cores), and holds the whole shard decoded where this holds
a few chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numcodecs
import numpy as np
from numpy.typing import NDArray
from zarr.codecs import (
    BloscCodec,
    Crc32cCodec,
)  # zarr also turns off blosc's own threads, whose output is not repeatable

from zloader.common.checks import parse_size, require_count, require_flag, require_one_of, require_whole
from zloader.common.errors import OptionError
from zloader.common.options import MiB
from zloader.storage.layout import ABSENT

CODECS = ("lz4", "zstd", "none")
_BLOSC_LEVEL = 5
# What blosc compresses by itself, and can decompress by itself: of a chunk at the edge of a block of rows, which other
# rows share, only those that are needed. For lz4 1.6 % more bytes; zstd would take half as long again (0: its default).
_BLOSC_BLOCK_BYTES = {"lz4": 16 * 1024, "zstd": 0}
_MAX_CHUNK_BYTES = 1024 * MiB  # blosc takes no more than 2 GiB
_MIN_CHUNK_ELEMENTS = 1024  # below this the cost of a chunk is that of handling it
_SCAN_ELEMENTS = 1 << 17  # what stays in a core's cache
_LIBRARY_BYTES = 256 * MiB  # resident once everything is imported and the compiled kernels are loaded
_LEAST_MEMORY = 384 * MiB


def working_bytes(memory: int | str) -> int:
    """What a bound on resident memory leaves beside interpreter and libraries. Raises OptionError."""
    return parse_size(memory) - _LIBRARY_BYTES


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """How `convert` lays out a store, and what it holds in memory. Raises OptionError."""

    # The unit of decompression. 16, 32 and 64 give blocks of 64 rows alike fast (the table in benchmarks/README.md): 16
    # reads a sixth fewer bytes where there is no mirror, but has twice the chunks to handle; 64 reads a quarter more.
    chunk_rows: int = 32
    # Of the wider of indices and data before compression; the object stored is a third to the whole of it.
    shard_size: int | str = "256MiB"
    # "zstd" stores 27 % fewer bytes, decodes a fifth slower and encodes ten times as slowly: for a bucket that is paid
    # by the byte. "none" stores twice the bytes, checksums among them: for local disks.
    codec: str = "lz4"
    # Keeps the dtypes of data, indices and indptr as they are in the source.
    preserve_dtype: bool = False
    # Bounds the resident memory of the whole process, some 250 MiB of interpreter and libraries among it. More only
    # makes windows and sorted pieces larger, which is faster for CSC and shuffling on slow disks, and for nothing else.
    memory: int | str = "1GiB"
    # Shuffles the rows, by this seed; the obs column `source_row` then says where each was.
    shuffle_seed: int | None = None
    # Bytes of values and indices held at once, by default what `memory` allows. Where nothing is sorted it is 16 MiB.
    window_bytes: int | None = None

    def __post_init__(self) -> None:
        require_count(chunk_rows=self.chunk_rows, shard_size=self.shard_bytes)
        if self.window_bytes is not None:
            require_count(window_bytes=self.window_bytes)
        if self.shuffle_seed is not None:
            require_whole(0, shuffle_seed=self.shuffle_seed)
        if parse_size(self.memory) < _LEAST_MEMORY:
            raise OptionError(f"memory must be at least {_LEAST_MEMORY >> 20}MiB, not {self.memory!r}")
        require_one_of(CODECS, codec=self.codec)
        require_flag(preserve_dtype=self.preserve_dtype)

    @property
    def shard_bytes(self) -> int:
        """`shard_size` in bytes."""
        return parse_size(self.shard_size)

    @property
    def window(self) -> int:
        """Bytes of values and indices that are held to be sorted; with all copies it is some eight times as much."""
        return self.window_bytes or working_bytes(self.memory) // 8


class ChunkEncoder:
    """Encodes the chunks of one array: little-endian bytes, then blosc with shuffle (not for `none`), then crc32c."""

    def __init__(self, codec: str, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype.newbyteorder("<")
        self._codec = codec
        self._blosc = (
            None
            if codec == "none"
            else numcodecs.Blosc(codec, _BLOSC_LEVEL, numcodecs.Blosc.SHUFFLE, _BLOSC_BLOCK_BYTES[codec])
        )

    @property
    def zarr_codecs(self) -> list[Any]:
        """The same for zarr: what follows its `bytes` codec."""
        return zarr_codecs(self._codec, self.dtype.itemsize)

    def encode(self, elements: NDArray[Any], chunk_elements: int) -> bytes:
        """The stored form of one chunk; one with fewer than `chunk_elements` is filled up with zeros."""
        whole = np.ascontiguousarray(elements, self.dtype)
        if len(whole) < chunk_elements:
            whole = np.concatenate([whole, np.zeros(chunk_elements - len(whole), self.dtype)])
        return _checked(whole.tobytes() if self._blosc is None else self._blosc.encode(whole))


def zarr_codecs(codec: str, itemsize: int | None) -> list[Any]:
    """One of CODECS with its checksum, for zarr's `compressors`; zarr finds out an `itemsize` of None itself."""
    if codec == "none":
        return [Crc32cCodec()]
    blosc = BloscCodec(
        typesize=itemsize,
        cname=codec,  # type: ignore[arg-type]
        clevel=_BLOSC_LEVEL,
        shuffle="shuffle",
        blocksize=_BLOSC_BLOCK_BYTES[codec],
    )
    return [blosc, Crc32cCodec()]


def shard_index(sizes: Sequence[int], chunks_per_shard: int) -> bytes:
    """The index that ends a shard whose first chunks have these sizes in bytes; the others are marked absent."""
    table = np.full((chunks_per_shard, 2), ABSENT, "<u8")
    table[: len(sizes), 1] = sizes
    table[: len(sizes), 0] = np.cumsum(sizes) - sizes
    return _checked(table.tobytes())


def _checked(body: bytes) -> bytes:
    return body + int(google_crc32c.value(body)).to_bytes(4, "little")


@dataclass(frozen=True, kw_only=True)
class ChunkGrid:
    """How an array is cut along its first axis: `chunk` and `shard` in elements (1-D) or rows; shard = n x chunk."""

    chunk: int
    shard: int


def grid(length: int, *, chunk: int, item_bytes: int, shard_bytes: int) -> ChunkGrid:
    """The grid of an array of `length` items: chunks of about `chunk` items, shards of up to about `shard_bytes`.

    `item_bytes` is an item decoded. Encoded shards come out at a third to the whole of `shard_bytes`: the grid has to
    be fixed before the first chunk is encoded.
    """
    chunk = max(1, min(chunk, length, min(_MAX_CHUNK_BYTES, shard_bytes) // max(1, item_bytes)))
    chunks = max(1, -(-length // chunk))
    shards = -(-chunks // max(1, shard_bytes // (chunk * max(1, item_bytes))))
    return ChunkGrid(
        chunk=chunk, shard=chunk * -(-chunks // shards)
    )  # shards of equal size, not a last one of leftovers


def chunk_elements(chunk_rows: int, *, elements: int, rows: int) -> int:
    """Elements of `chunk_rows` rows of mean length, in whole KiB of elements."""
    wanted = -(-chunk_rows * elements // max(1, rows))
    return max(1, -(-wanted // _MIN_CHUNK_ELEMENTS)) * _MIN_CHUNK_ELEMENTS


def smallest_integer(low: int, high: int, *, below: int) -> np.dtype[Any] | None:
    """The smallest integer type that holds `low` to `high` in fewer than `below` bytes, unsigned where it can be."""
    for itemsize in (1, 2, 4):
        for kind in "ui":
            limits = np.iinfo(f"{kind}{itemsize}")
            if itemsize < below and limits.min <= low and high <= limits.max:
                return np.dtype(limits.dtype)
    return None


class DtypeScan:
    """Finds the smallest type that holds every value of a matrix bit for bit, looking at each value once.

    -0.0, NaN, infinities and fractions keep the dtype as it is; so does a matrix without values, and bool.
    """

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._range: tuple[int, int] | None = None
        self._narrows = dtype.kind in "iuf" and dtype.itemsize > 1

    def add(self, values: NDArray[Any]) -> None:
        """Takes more values into account."""
        for start in range(0, len(values), _SCAN_ELEMENTS):
            if not self._narrows:
                return
            self._add(values[start : start + _SCAN_ELEMENTS])

    def _add(self, values: NDArray[Any]) -> None:
        least, most = values.min(), values.max()
        self._narrows = bool(np.isfinite(least) and np.isfinite(most))  # NaN is both least and most
        if not self._narrows:
            return
        low, high = self._range or (int(least), int(most))
        self._range = low, high = min(low, int(least)), max(high, int(most))
        narrow = smallest_integer(low, high, below=self._dtype.itemsize)
        self._narrows = narrow is not None and (self._dtype.kind != "f" or _same_bits(values, narrow))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type found."""
        if not self._narrows or self._range is None:
            return self._dtype
        return smallest_integer(*self._range, below=self._dtype.itemsize) or self._dtype


def _same_bits(values: NDArray[Any], narrow: np.dtype[Any]) -> bool:
    bits = f"u{values.dtype.itemsize}"
    return np.array_equal(values.astype(narrow).astype(values.dtype).view(bits), values.view(bits))
