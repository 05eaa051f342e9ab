"""Decodes stored chunks to elements and verifies their checksums. Pure.

numcodecs releases the GIL and decompresses directly into the buffer if the codec allows it. Blosc chunks, the format
that `convert` writes, are decoded many per call, and the differences of gene indices are added up in the same call.

A chunk of 16 rows takes 30 µs to decode. Calling Python per chunk adds a third to that, and threads that take the GIL
for every chunk wait for one another. So a numba loop calls the C functions in numcodecs and google-crc32c directly. If
their libraries do not export these functions, chunks are decoded one by one.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import google_crc32c
import numcodecs
import numcodecs.blosc
import numpy as np
from numpy.typing import NDArray

from zloader.common.compiled import External, compiled, compiled_after, compiler_is_loaded
from zloader.common.errors import CorruptChunkError
from zloader.common.locks import cached_property
from zloader.common.records import Rows
from zloader.storage import hdf5_filters
from zloader.storage.coders import PCODEC, chain_of, decode_within, is_whole_blosc, number, sizes_before
from zloader.storage.layout import ArrayLayout

Bytes = NDArray[np.uint8]
_MOST = np.iinfo(np.int64).max


def checksum(stored: NDArray[Any]) -> int:
    """The crc32c (Castagnoli, RFC 3720) of the bytes of a contiguous array."""
    return int(google_crc32c.value(stored.view(np.uint8)))


class Decoder:
    """Decodes the chunks of one array with the codecs in `layout`. Raises FormatError for unsupported codecs.

    If there are `few`, they are decoded one by one until numba is loaded, which takes longer.
    """

    def __init__(self, layout: ArrayLayout, *, few: bool = False) -> None:
        self._layout = layout
        self._dtype = layout.stored_dtype or layout.dtype
        self._narrows = layout.stored_dtype is not None
        # None for elements that the compiled loops do not move, such as complex numbers
        self._unsigned = np.dtype(f"u{self._dtype.itemsize}") if self._dtype.itemsize in (1, 2, 4, 8) else None
        self._chunk_elements = layout.chunk_elements
        self._checked, self._differences, self._decompress = _decompressor_of(layout)
        self._few = few

    def decode_all(
        self, reads: Sequence[bytes | Bytes], chunks: NDArray[Any], out: NDArray[Any]
    ) -> list[tuple[int, CorruptChunkError]]:
        """Fills `out` with the needed elements of `chunks` (dtype CHUNK).

        Returns the position and the error of each chunk that is corrupt or violates the layout's bound `below`.
        """
        views = [np.frombuffer(read, np.uint8) for read in reads]
        corrupt = []
        scratch: NDArray[Any] | None = None  # as fresh memory costs page faults
        left = np.flatnonzero(~self._decode_at_once(views, chunks, out, self._below))
        for i, fields in zip(left.tolist(), chunks[left].tolist(), strict=True):
            read, offset, size, begin, first, stop, n_elements = fields
            needed = whole = out[begin : begin + stop - first]
            if len(needed) < (n_elements or self._chunk_elements) or self._narrows:
                scratch = np.empty(self._chunk_elements, self._dtype) if scratch is None else scratch
                whole = scratch[: n_elements or None]
            try:
                self._decode_whole(views[read][offset : offset + size], whole)
                self._layout.check_bounds(whole[first:stop])
            except CorruptChunkError as error:
                corrupt.append((i, error))
            else:
                if whole is not needed:
                    needed[:] = whole[first:stop]
        return corrupt

    @property
    def _below(self) -> int:
        """The bound of elements seen as unsigned, in which negative ones are large; -1 without a bound."""
        if self._layout.below is None:
            return -1
        return min(self._layout.below, np.iinfo(self._dtype).max + 1 if self._dtype.kind == "i" else _MOST)

    @cached_property
    def _many_at_once(self) -> bool:
        known = (_copy,) if self._narrows else (_blosc, _copy)
        return self._unsigned is not None and self._decompress in known and decompresses_many()

    def _decode_at_once(
        self, views: Sequence[Bytes], chunks: NDArray[Any], out: NDArray[Any], below: int
    ) -> NDArray[np.bool_]:
        """Decodes chunks in one call and returns which are valid. The rest are decoded again singly, for errors."""
        if (self._few and not compiler_is_loaded()) or not self._many_at_once:
            return np.zeros(len(chunks), bool)
        addresses, elements = np.array([view.ctypes.data for view in views], np.int64), out.view(f"u{out.itemsize}")
        if self._decompress is _copy and not self._differences:
            scratch = np.empty(self._chunk_elements if self._narrows else 0, self._unsigned)
            return copy(addresses, chunks, self._checked, elements, scratch, below)
        return decompress(addresses, chunks, self._checked, elements, self._chunk_elements, self._differences, below)

    def decode(self, stored: Bytes, out: NDArray[Any]) -> None:
        """Fills `out` with the first elements of a chunk. `out` is shorter than the chunk at the end of an array.

        Raises CorruptChunkError if the checksum differs or the bytes do not decode to a whole chunk.
        """
        if len(out) == self._chunk_elements and not self._narrows:
            n_elements = 0 if self._layout.cut else len(out)
            chunk = np.array([(0, 0, len(stored), 0, 0, len(out), n_elements)], CHUNK)
            if self._decode_at_once([stored], chunk, out, -1)[0]:
                return
        whole = out
        if len(out) < self._chunk_elements or self._narrows:
            whole = np.empty(self._chunk_elements, self._dtype)
        self._decode_whole(stored, whole)
        if self._narrows:
            self._layout.check_bounds(whole[: len(out)])
        if whole is not out:
            out[:] = whole[: len(out)]

    def _decode_whole(self, stored: Bytes, whole: NDArray[Any]) -> None:
        """Decodes all elements of a chunk, with an error that says what is wrong."""
        if self._checked:
            if len(stored) < 4 or google_crc32c.value(stored[:-4]) != number(stored, len(stored) - 4, 4):
                raise CorruptChunkError("its crc32c differs from the stored crc32c")
            stored = stored[:-4]
        if self._layout.cut:
            whole = whole[: len(stored) // self._dtype.itemsize]
        try:
            self._decompress(stored, whole)
        except BaseException as error:
            # A panic of a decoder written in Rust is not an Exception.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise CorruptChunkError(f"it cannot be decoded: {error}") from error
        if self._differences:
            unsigned = whole.view(f"u{whole.itemsize}")
            accumulate(unsigned[:0], unsigned, unsigned)


def decodes_in_numpy(layout: ArrayLayout) -> bool:
    """Whether few chunks are decoded without compiled loops."""
    return not layout.codecs or layout.codecs[0]["name"] != hdf5_filters.NAME


def _copy(stored: Bytes, out: NDArray[Any]) -> None:
    target = out.view(np.uint8)
    if len(stored) != len(target):
        raise ValueError(f"{len(stored)} bytes instead of {len(target)}")
    target[:] = stored


def _blosc(stored: Bytes, out: NDArray[Any]) -> None:
    if not is_whole_blosc(stored) or number(stored, 4, 4) != out.nbytes:
        raise ValueError(f"its blosc header does not match {out.nbytes} decoded and {len(stored)} stored bytes")
    numcodecs.blosc.decompress(stored, out)


def _pcodec(stored: Bytes, out: NDArray[Any]) -> None:
    from pcodec import standalone  # an optional package

    # Not through numcodecs, which would not say whether `out` was filled and nothing was left over.
    done = standalone.simple_decompress_into(stored.tobytes(), out)
    if done.n_processed != len(out) or not done.finished:
        raise ValueError(f"it does not hold {len(out)} values")


def _decompressor_of(layout: ArrayLayout) -> tuple[bool, bool, Callable[[Bytes, NDArray[Any]], None]]:
    """Whether a chunk ends with its checksum, whether it holds differences, and a function that decompresses it."""
    if layout.codecs and layout.codecs[0]["name"] == hdf5_filters.NAME:
        return False, False, hdf5_filters.Hdf5Filters(**layout.codecs[0]["configuration"]).decompress
    coders, checked = chain_of(layout.codecs, layout.path)
    delta, dtype = coders[0] if coders else None, layout.dtype
    # Other differences, such as those of floats, are left to numcodecs.
    differences = isinstance(delta, numcodecs.Delta) and dtype.kind in "iu" and delta.dtype == delta.astype == dtype
    return checked, differences, _decompressor(coders[differences:], dtype, layout.chunk_elements)


def _decompressor(coders: Sequence[Any], dtype: np.dtype[Any], n: int) -> Callable[[Bytes, NDArray[Any]], None]:
    """A function that undoes the coders, last first, for chunks of n elements."""
    ids = [coder.codec_id for coder in coders]
    if not coders:
        return _copy
    if ids == ["blosc"]:
        return _blosc
    if ids == [PCODEC]:
        return _pcodec
    steps = list(zip(coders, sizes_before(coders, dtype, n), strict=True))[::-1]

    def through_bytes(stored: Bytes, out: NDArray[Any]) -> None:
        plain: Any = stored
        for coder, (dtype, most) in steps:
            if coder.codec_id == PCODEC and coder is coders[0]:
                _pcodec(np.frombuffer(plain, np.uint8), out)
                return
            plain = decode_within(coder, plain, dtype, most)
        _copy(np.frombuffer(plain, np.uint8), out)

    return through_bytes


# Addresses are passed as integers, which the C calling convention puts into the same registers as pointers.
_crc32c = External("crc32c_value", "uint32", "intp", "uintp")
_validate = External("blosc_cbuffer_validate", "int32", "intp", "uintp", "intp")
_sizes = External("blosc_cbuffer_sizes", "void", "intp", "intp", "intp", "intp")
_metainfo = External("blosc_cbuffer_metainfo", "void", "intp", "intp", "intp")
_decompress = External("blosc_decompress_ctx", "int32", "intp", "intp", "uintp", "int32")
_getitem = External("blosc_getitem", "int32", "intp", "int32", "int32", "intp")
_memcpy = External("memcpy", "intp", "intp", "intp", "uintp")


@functools.cache
def decompresses_many() -> bool:
    """Loads the C functions for `decompress`. Returns False if any is missing. Call this before `decompress`.

    Compiled loops find the functions of a library that the whole process can see (RTLD_GLOBAL).
    """
    libraries = []
    for name in ("numcodecs.blosc", "google_crc32c._crc32c"):
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:
            return False
        libraries.append(ctypes.CDLL(found.origin, ctypes.RTLD_GLOBAL))
    functions = (_crc32c, _validate, _sizes, _metainfo, _decompress, _getitem, _memcpy)
    return all(any(hasattr(library, function.name) for library in libraries) for function in functions)


# The crc32c of any bytes followed by their own crc32c (little endian) is this constant.
_RESIDUE = np.uint32(0x48674BC7)

# The source and the target of a chunk: it is bytes `[offset, offset + size)` of read number `read`. Only its elements
# `[first, stop)` are needed, counted from its first element. They go into an array, from `begin` on.
# Decoded it has so many `elements`, or if that is 0, any number.
CHUNK = np.dtype([(name, np.int64) for name in ("read", "offset", "size", "begin", "first", "stop", "elements")])


@compiled
def decompress(
    addresses: Rows,
    chunks: NDArray[Any],
    checked: bool,
    out: NDArray[np.unsignedinteger],
    most_elements: int,
    differences: bool,
    below: int,
) -> NDArray[np.bool_]:
    """Decompresses `chunks` (dtype CHUNK) from the reads at `addresses` into `out`. Returns which are valid.

    With `checked`, each chunk ends with its crc32c, and its size includes those 4 bytes. The dtype of `out` has the
    size of an element, and is unsigned whatever the elements are. A chunk may consist of several Blosc blocks, and only
    the needed blocks are decompressed. With `differences`, the chunk holds differences of elements, so they are needed
    from its first element on. Unless `below` is negative, a chunk with a needed element that is not less is invalid.
    """
    valid = np.zeros(len(chunks), np.bool_)
    scratch = np.empty(most_elements, out.dtype)  # stays in the core's cache
    for i in range(len(chunks)):
        chunk = chunks[i]
        stored = addresses[chunk.read] + chunk.offset
        n = _body_bytes(stored, chunk.size, checked)
        if n < 0:
            continue
        needed = out[chunk.begin : chunk.begin + chunk.stop - chunk.first]
        decoded = needed if len(needed) == chunk.elements else scratch
        first = 0 if differences else chunk.first
        if not _decompress_part(stored, n, decoded.ctypes.data, chunk.elements, out.itemsize, first, chunk.stop):
            continue
        if differences:
            accumulate(decoded[: chunk.first], decoded[chunk.first : chunk.stop], needed)
        elif len(needed) < chunk.elements:
            _memcpy(needed.ctypes.data, decoded.ctypes.data + chunk.first * out.itemsize, len(needed) * out.itemsize)
        valid[i] = below < 0 or largest(needed) < np.uint64(below)
    return valid


@compiled
def _body_bytes(stored: int, n: int, checked: bool) -> int:
    """The bytes of a chunk without its checksum, if it has one; -1 if that differs."""
    if not checked:
        return n
    return n - 4 if n >= 4 and _crc32c(stored, n) == _RESIDUE else -1


@compiled
def copy(
    addresses: Rows,
    chunks: NDArray[Any],
    checked: bool,
    out: NDArray[np.unsignedinteger],
    scratch: NDArray[np.unsignedinteger],
    below: int,
) -> NDArray[np.bool_]:
    """Like `decompress`, of chunks that are not compressed.

    If `out` is narrower than the stored elements, `scratch` has their dtype and room for a chunk; otherwise it is
    empty.
    """
    valid = np.zeros(len(chunks), np.bool_)
    itemsize = scratch.itemsize
    for i in range(len(chunks)):
        chunk = chunks[i]
        stored = addresses[chunk.read] + chunk.offset
        n = _body_bytes(stored, chunk.size, checked)
        if n < 0 or n < chunk.stop * itemsize or chunk.elements not in (0, n // itemsize) or n % itemsize:
            continue
        needed = out[chunk.begin : chunk.begin + chunk.stop - chunk.first]
        if len(scratch) == 0:
            _memcpy(needed.ctypes.data, stored + chunk.first * itemsize, len(needed) * itemsize)
            valid[i] = below < 0 or largest(needed) < np.uint64(below)
            continue
        whole = scratch[: len(needed)]
        _memcpy(whole.ctypes.data, stored + chunk.first * itemsize, len(needed) * itemsize)
        valid[i] = largest(whole) < np.uint64(below)
        for k in range(len(needed)):
            needed[k] = whole[k]
    return valid


@compiled
def _decompress_part(
    stored: int, n: int, target: int, chunk_elements: int, itemsize: int, first: int, stop: int
) -> bool:
    """Decompresses elements `[first, stop)` of the chunk in the `n` bytes at `stored` to their places after `target`.

    More elements may be decompressed too. Returns whether the chunk is valid.
    """
    sizes = np.zeros(3, np.int64)
    chunk_bytes = chunk_elements * itemsize
    # Blosc trusts the size in its header and would read past the end of a truncated chunk.
    if _validate(stored, n, sizes.ctypes.data) != 0 or sizes[0] != chunk_bytes:
        return False
    _sizes(stored, sizes.ctypes.data, sizes[1:].ctypes.data, sizes[2:].ctypes.data)
    block = max(sizes[2], 1)
    n_blocks = (stop * itemsize - 1) // block - first * itemsize // block + 1
    # blosc_getitem counts in the item size of the compressor, which may differ from that of the elements.
    _metainfo(stored, sizes.ctypes.data, sizes[1:].ctypes.data)
    if sizes[0] == itemsize and n_blocks < (chunk_bytes + block - 1) // block:
        n_bytes = _getitem(stored, first, stop - first, target + first * itemsize)
        return bool(n_bytes == (stop - first) * itemsize)
    return bool(_decompress(stored, target, chunk_bytes, 1) == chunk_bytes)


def _accumulate(before: NDArray[Any], differences: NDArray[Any], out: NDArray[Any]) -> None:
    np.cumsum(differences, dtype=out.dtype, out=out)
    if len(before):
        out += before.sum(dtype=out.dtype)


@compiled_after(_accumulate)
def accumulate(before: NDArray[Any], differences: NDArray[Any], out: NDArray[Any]) -> None:
    """Fills `out` with the running sums of unsigned `differences`, which may be `out`, on top of the sum of `before`.

    Sums wrap around, so that differences may be negative.
    """
    total = out.dtype.type(0)
    for k in range(len(before)):
        total = out.dtype.type(total + before[k])
    # Fewer additions would do in vector registers, but the compiler's attempt at that took twice as long.
    for k in range(len(out)):
        total = out.dtype.type(total + differences[k])
        out[k] = total


@compiled
def largest(elements: NDArray[np.unsignedinteger]) -> np.uint64:
    """The largest element; 0 if there are none. As a loop of its own it becomes vector instructions."""
    most = elements.dtype.type(0)
    for k in range(len(elements)):
        most = max(most, elements[k])
    return np.uint64(most)
