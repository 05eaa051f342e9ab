"""Encodes elements as chunks and shards, and chooses chunk grids and dtypes. Pure functions; also `ConvertOptions`.

A shard is its encoded chunks end to end, followed by an index of their byte ranges (Zarr v3 sharding codec,
https://zarr-specs.readthedocs.io). zarr-python writes the same bytes, which a test checks. It takes 15 ns per value to
encode `indices` and `data` together on two cores, compared with 3.6 ns here, and it keeps the whole decoded shard in
memory, compared with a few chunks here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import google_crc32c
import numpy as np
from numcodecs.compat import ensure_bytes
from numpy.typing import NDArray
from zarr.codecs import (
    BloscCodec,
    Crc32cCodec,
)  # importing zarr also turns off blosc's own threads, whose output varies between runs

from zloader.common.checks import parse_size, require_count, require_flag, require_one_of, require_whole
from zloader.common.errors import OptionError
from zloader.common.options import MiB
from zloader.common.records import Rows
from zloader.storage.coders import INSTALL_PCODEC, PCODEC, PREFIX, chain_of, has_pcodec
from zloader.storage.layout import ABSENT, ArrayLayout

CODECS = ("lz4", "zstd", PCODEC, "none")
# Counts the forms in which chunks have been encoded. A conversion cannot be resumed in another form.
CHUNK_FORM = 2
_BLOSC_LEVEL = 5
# A blosc block is the smallest part of a chunk that can be decompressed alone, so that the chunks at the edges of a
# block of rows are decompressed only in part. For lz4 this adds 0.3 % to the size. zstd would take half as long again
# with small blocks, so it keeps blosc's default block size (0).
_BLOSC_BLOCK_BYTES = {"lz4": 16 * 1024, "zstd": 0}
# lz4 makes integers a tenth to a quarter smaller if their bits are sorted, not their bytes, but normalised values a
# fifth larger. int64, such as indptr, gains nothing. zstd does worse with sorted bits.
_MOST_BIT_SHUFFLED = 4  # bytes of an integer
_PCODEC = {
    "level": 8,
    "mode_spec": "auto",
    "delta_spec": "auto",
    "paging_spec": "equal_pages_up_to",
    "delta_encoding_order": None,
    "equal_pages_up_to": 262144,
}
_MAX_CHUNK_BYTES = 1024 * MiB  # blosc's own limit is 2 GiB
_MIN_CHUNK_ELEMENTS = 1024  # the overhead per chunk dominates below this size
_SCAN_ELEMENTS = 1 << 17  # fits in a core's cache
_LIBRARY_BYTES = 256 * MiB  # resident once all libraries are imported and the compiled kernels are loaded
_LEAST_MEMORY = 384 * MiB


def working_bytes(memory: int | str) -> int:
    """Bytes left for conversion within a memory limit, after the interpreter and libraries. Raises OptionError."""
    return parse_size(memory) - _LIBRARY_BYTES


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """How `convert` lays out a store, and how much memory it uses.

    - `chunk_rows`: approximate rows per chunk, the smallest unit of decompression.
    - `shard_size`: largest shard (stored object) in bytes before compression, as a number or text such as "256MiB" or
      "256M". It applies to the wider of `indices` and `data`; the stored object is a tenth to the whole of it.
    - `codec`: "lz4"; "zstd", which stores a quarter fewer bytes; "pcodec", which stores a third fewer and needs
      the extra `pcodec`, also to read the store; or "none", which stores three times as many but still adds
      checksums. zstd decodes a third slower than lz4, pcodec at half the speed, and both encode ten times slower.
    - `preserve_dtype`: keep the source dtypes of `data`, `indices` and `indptr`. By default, values and indices get the
      smallest integer dtype that holds every value exactly.
    - `memory`: limit on the resident memory of the whole process, including about 250 MiB for the interpreter and the
      libraries; at least "384MiB". A higher limit speeds up only CSC sources and shuffling on slow disks.
    - `shuffle_seed`: shuffle the rows with this seed; the obs column `source_row` records their original positions.
    - `order`: the row numbers of the sources, one after the other, in the order in which to store the rows, each once;
      `source_row` as with `shuffle_seed`. It is for cells that are read together, such as neighbours.
    - `window_bytes`: bytes of values and indices to sort at once; derived from `memory` by default. Matrices that need
      no sorting are read 16 MiB at a time.

    Raises OptionError for an invalid value.

    >>> ConvertOptions(codec="zstd", shard_size="64MiB").shard_bytes
    67108864
    """

    # Chunks of 8 to 32 rows load blocks of 64 rows equally fast (see the table in benchmarks/README.md). Without a
    # mirror, 32 reads a fifth more bytes; 8 reads a tenth fewer, but encodes at half the speed.
    chunk_rows: int = 16
    shard_size: int | str = "256MiB"
    codec: str = "lz4"  # zstd suits buckets billed by the byte, none suits local disks
    preserve_dtype: bool = False
    memory: int | str = "1GiB"  # it bounds the size of windows and sorted pieces
    shuffle_seed: int | None = None
    order: NDArray[np.integer] | Sequence[int] | None = field(default=None, compare=False)
    window_bytes: int | None = None

    def __post_init__(self) -> None:
        require_count(chunk_rows=self.chunk_rows, shard_size=self.shard_bytes)
        if self.window_bytes is not None:
            require_count(window_bytes=self.window_bytes)
        if self.shuffle_seed is not None:
            require_whole(0, shuffle_seed=self.shuffle_seed)
        if self.order is not None:
            object.__setattr__(self, "order", _permutation(self.order))
            if self.shuffle_seed is not None:
                raise OptionError("the rows are shuffled, or stored in a given order: give shuffle_seed or order")
        if parse_size(self.memory, "memory") < _LEAST_MEMORY:
            raise OptionError(f"memory must be at least {_LEAST_MEMORY >> 20}MiB, not {self.memory!r}")
        require_one_of(CODECS, codec=self.codec)
        if self.codec == PCODEC and not has_pcodec():
            raise OptionError(f"codec='pcodec' needs the package pcodec, which is not installed: {INSTALL_PCODEC}")
        require_flag(preserve_dtype=self.preserve_dtype)

    @property
    def shard_bytes(self) -> int:
        """`shard_size` as a number of bytes."""
        return parse_size(self.shard_size, "shard_size")

    @property
    def window(self) -> int:
        """Bytes of values and indices to sort at once. With all copies, sorting takes about eight times as much."""
        return self.window_bytes or working_bytes(self.memory) // 8


def _permutation(order: Any) -> Rows:
    """Row numbers that must have each row once. Raises OptionError."""
    rows = np.asarray(order)
    if rows.ndim != 1 or (rows.dtype.kind not in "iu" and rows.size):
        raise OptionError(f"order must be a list of row numbers, not {order!r:.100}")
    rows = rows.astype(np.int64)
    counted = np.bincount(rows[(rows >= 0) & (rows < len(rows))], minlength=len(rows))
    if (counted != 1).any():
        row = int(np.argmax(counted != 1))
        raise OptionError(
            f"order must have each row once, from 0 to {len(rows) - 1}, but row {row} comes {counted[row]} times"
        )
    return rows


class ChunkEncoder:
    """Encodes the chunks of one array with the codecs in its layout. Raises FormatError for unsupported codecs."""

    def __init__(self, layout: ArrayLayout) -> None:
        self.dtype = layout.dtype.newbyteorder("<")
        self._coders, self._checked = chain_of(layout.codecs, layout.path)

    def encode(self, elements: NDArray[Any], chunk_elements: int) -> bytes:
        """The stored bytes of one chunk, padded with zeros to `chunk_elements`."""
        encoded: Any = np.ascontiguousarray(elements, self.dtype)
        if len(encoded) < chunk_elements:
            encoded = np.concatenate([encoded, np.zeros(chunk_elements - len(encoded), self.dtype)])
        for coder in self._coders:
            encoded = coder.encode(encoded)
        body: bytes = ensure_bytes(encoded)
        return _with_checksum(body) if self._checked else body


def zarr_codecs(
    codec: str, dtype: np.dtype[Any], *, ascending: bool = False, outer: np.dtype[Any] | None = None
) -> dict[str, Any]:
    """The codecs of an array of numbers for a codec of CODECS, as keyword arguments of zarr's `create_array`.

    Chunks hold elements of `dtype`, those of the array are of `outer`, which is the same by default. Elements that are
    mostly `ascending`, such as gene indices, are stored as differences. pcodec takes differences by itself, but has no
    form for bytes and bools: they are stored with zstd.
    """
    little = dtype.newbyteorder("<").str
    filters = []
    if outer is not None and outer != dtype:
        narrowed = {"encode_dtype": little, "decode_dtype": outer.newbyteorder("<").str}
        filters.append(_numcodec("astype", narrowed))
    if codec == "none":
        return {"filters": filters, "compressors": small_codecs(codec)}
    if codec == PCODEC and dtype.itemsize > 1:
        return {"filters": filters, "serializer": _numcodec(PCODEC, _PCODEC), "compressors": small_codecs("none")}
    is_narrow = dtype.kind in "iub" and dtype.itemsize <= _MOST_BIT_SHUFFLED
    shuffle = "bitshuffle" if codec == "lz4" and is_narrow else "shuffle"
    filters += [_numcodec("delta", {"dtype": little})] * ascending
    return {"filters": filters, "compressors": _blosc(codec, shuffle, dtype.itemsize)}


def small_codecs(codec: str) -> list[Any]:
    """The `compressors` of an array of anything that is stored beside the matrices, for a codec of CODECS."""
    return [Crc32cCodec()] if codec == "none" else _blosc(codec, "shuffle", None)


def _blosc(codec: str, shuffle: str, itemsize: int | None) -> list[Any]:
    """The compressors of a codec other than "none". zarr fills in an `itemsize` of None."""
    name = "zstd" if codec == PCODEC else codec
    blosc = BloscCodec(
        typesize=itemsize,
        cname=name,  # type: ignore[arg-type]
        clevel=_BLOSC_LEVEL,
        shuffle=shuffle,  # type: ignore[arg-type]
        blocksize=_BLOSC_BLOCK_BYTES[name],
    )
    return [blosc, Crc32cCodec()]


def _numcodec(name: str, configuration: dict[str, Any]) -> dict[str, Any]:
    """The Zarr metadata of a codec of numcodecs."""
    return {"name": f"{PREFIX}{name}", "configuration": configuration}


def shard_index(sizes: Sequence[int], chunks_per_shard: int) -> bytes:
    """The index at the end of a shard, given the sizes in bytes of its leading chunks. Other chunks are absent."""
    table = np.full((chunks_per_shard, 2), ABSENT, "<u8")
    table[: len(sizes), 1] = sizes
    table[: len(sizes), 0] = np.cumsum(sizes) - sizes
    return _with_checksum(table.tobytes())


def _with_checksum(body: bytes) -> bytes:
    return body + int(google_crc32c.value(body)).to_bytes(4, "little")


@dataclass(frozen=True, kw_only=True)
class ChunkGrid:
    """The chunk and shard lengths of an array along its first axis, in elements (1-D) or rows. shard = n x chunk."""

    chunk: int
    shard: int


def grid(length: int, *, chunk: int, item_bytes: int, shard_bytes: int) -> ChunkGrid:
    """The grid of an array of `length` items, with chunks of about `chunk` items and shards of about `shard_bytes`.

    `item_bytes` is the size of a decoded item. Sizes are before compression, because the grid must be fixed before the
    first chunk is encoded; stored shards have a tenth to the whole of `shard_bytes`.
    """
    chunk = max(1, min(chunk, length, min(_MAX_CHUNK_BYTES, shard_bytes) // max(1, item_bytes)))
    chunks = max(1, -(-length // chunk))
    shards = -(-chunks // max(1, shard_bytes // (chunk * max(1, item_bytes))))
    # Shards of equal size, rather than a small last shard.
    return ChunkGrid(chunk=chunk, shard=chunk * -(-chunks // shards))


def chunk_elements(chunk_rows: int, *, elements: int, rows: int) -> int:
    """Elements in `chunk_rows` rows of mean length, rounded up to a multiple of 1,024."""
    wanted = -(-chunk_rows * elements // max(1, rows))
    return max(1, -(-wanted // _MIN_CHUNK_ELEMENTS)) * _MIN_CHUNK_ELEMENTS


def smallest_integer(low: int, high: int, *, below: int) -> np.dtype[Any] | None:
    """The smallest integer dtype that holds `low` to `high` in fewer than `below` bytes, preferring unsigned dtypes.

    None if there is no such dtype.
    """
    for itemsize in (1, 2, 4):
        for kind in "ui":
            limits = np.iinfo(f"{kind}{itemsize}")
            if itemsize < below and limits.min <= low and high <= limits.max:
                return np.dtype(limits.dtype)
    return None


class DtypeScan:
    """Finds the smallest dtype that holds every value of a matrix exactly, in one pass over the values.

    A matrix with -0.0, NaN, infinities or fractions keeps its dtype, and so does a bool matrix or one without values.
    """

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._range: tuple[int, int] | None = None
        self._narrows = dtype.kind in "iuf" and dtype.itemsize > 1

    def add(self, values: NDArray[Any]) -> None:
        """Adds values to the scan."""
        for start in range(0, len(values), _SCAN_ELEMENTS):
            if not self._narrows:
                return
            self._add(values[start : start + _SCAN_ELEMENTS])

    def _add(self, values: NDArray[Any]) -> None:
        least, most = values.min(), values.max()
        self._narrows = bool(np.isfinite(least) and np.isfinite(most))  # if there is a NaN, both are NaN
        if not self._narrows:
            return
        low, high = self._range or (int(least), int(most))
        self._range = low, high = min(low, int(least)), max(high, int(most))
        narrow = smallest_integer(low, high, below=self._dtype.itemsize)
        self._narrows = narrow is not None
        if narrow is not None and self._dtype.kind == "f":
            bits = f"u{values.dtype.itemsize}"
            self._narrows = np.array_equal(values.astype(narrow).astype(values.dtype).view(bits), values.view(bits))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest dtype for the values added so far."""
        if not self._narrows or self._range is None:
            return self._dtype
        return smallest_integer(*self._range, below=self._dtype.itemsize) or self._dtype
