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
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import google_crc32c
import numcodecs
import numpy as np
from numpy.typing import NDArray

from zloader.common.compiled import External, compiled, compiled_after, compiler_is_loaded
from zloader.common.errors import CorruptChunkError
from zloader.common.options import MiB
from zloader.common.records import Rows
from zloader.storage import hdf5_filters
from zloader.storage.coders import chain_of, decode_within, number
from zloader.storage.layout import ArrayLayout, Grid

Bytes = NDArray[np.uint8]
_MOST_ENCODED = 16  # times the bytes of a chunk: what filters make of it, before it is compressed


def checksum(stored: NDArray[Any]) -> int:
    """The crc32c (Castagnoli, RFC 3720) of the bytes of a contiguous array."""
    return int(google_crc32c.value(stored.view(np.uint8)))


class Decoder:
    """Decodes the chunks of one array with the codecs in `layout`. Raises FormatError for unsupported codecs.

    Until numba is loaded, chunks are decoded one by one, because loading it takes longer if they are few.
    """

    def __init__(self, layout: ArrayLayout) -> None:
        self._layout = layout
        self._dtype = layout.stored_dtype or layout.dtype
        self._narrows = layout.stored_dtype is not None
        self._checked, self._differences, self._compressed, self._decompress = _decompressor_of(layout)
        # The compiled loops do not move some elements, such as complex numbers.
        self._can_be_at_once = self._compressed is not None and self._dtype.itemsize in (1, 2, 4, 8)
        below = -1 if layout.below is None else min(layout.below, np.iinfo(np.int64).max)
        # Elements are compared as unsigned numbers, in which negative ones are large.
        self._below = min(below, np.iinfo(self._dtype).max + 1) if self._dtype.kind == "i" else below

    def decode_all(
        self, reads: Sequence[bytes | Bytes], chunks: NDArray[Any], out: NDArray[Any]
    ) -> list[tuple[int, CorruptChunkError]]:
        """Fills `out` with the needed elements of `chunks` (dtype CHUNK, or PART in a grid).

        Returns the position and the error of each that is corrupt or violates the layout's bound `below`.
        """
        views, corrupt = [np.frombuffer(read, np.uint8) for read in reads], []
        if self._layout.grid is not None:
            return self._decode_parts(self._layout.grid, views, chunks, out)
        # Used again, as fresh memory costs page faults.
        scratch = np.empty(self._layout.chunk_elements if len(chunks) else 0, self._dtype)
        at, whole = (-1, -1), scratch  # what was decoded last
        left = np.flatnonzero(~self._decode_at_once(views, chunks, out, scratch))
        for i, fields in zip(left.tolist(), chunks[left].tolist(), strict=True):
            read, offset, size, begin, first, stop, n_elements = fields
            needed = out[begin : begin + stop - first]
            try:
                if at != (read, offset):
                    at = (-1, -1)
                    whole = scratch[:n_elements] if self._narrows or len(needed) < n_elements else needed
                    self._decode_whole(views[read][offset : offset + size], whole)
                    at = read, offset
                self._layout.check_bounds(whole[first:stop])
            except CorruptChunkError as error:
                corrupt.append((i, error))
            else:
                if whole is not needed:
                    needed[:] = whole[first:stop]
        return corrupt

    def _decode_parts(
        self, grid: Grid, views: Sequence[Bytes], parts: NDArray[Any], out: NDArray[Any]
    ) -> list[tuple[int, CorruptChunkError]]:
        whole = np.empty(self._layout.chunk_elements if len(parts) else 0, self._dtype)
        bits, to = whole.view(f"u{whole.itemsize}"), out.view(f"u{out.itemsize}")
        corrupt: list[tuple[int, CorruptChunkError]] = []
        same = (parts["read"][1:] == parts["read"][:-1]) & (parts["offset"][1:] == parts["offset"][:-1])
        opens = np.flatnonzero(np.append(True, ~same)[: len(parts)]).tolist()
        for begin, end in itertools.pairwise([*opens, len(parts)]):
            read, offset, size = (int(parts[name][begin]) for name in ("read", "offset", "size"))
            try:
                self._decode_whole(views[read][offset : offset + size], whole)
            except CorruptChunkError as error:
                corrupt.append((begin, error))
            else:
                copy_parts(parts[begin:end], bits, to, grid.part_elements, grid.row_elements)
        return corrupt

    def _decode_at_once(
        self, views: Sequence[Bytes], chunks: NDArray[Any], out: NDArray[Any], scratch: NDArray[Any]
    ) -> NDArray[np.bool_]:
        """Decodes chunks in one call and returns which are valid. The rest are decoded again singly, for errors."""
        if not (self._can_be_at_once and compiler_is_loaded() and decompresses_many()):
            return np.zeros(len(chunks), bool)
        addresses = np.array([view.ctypes.data for view in views], np.int64)
        elements, scratch = (array.view(f"u{array.itemsize}") for array in (out, scratch))
        how = self._checked, bool(self._compressed), self._differences
        return decompress(addresses, chunks, how, elements, scratch, self._below)

    def decode(self, stored: Bytes, out: NDArray[Any]) -> None:
        """Fills `out` with the first elements of a chunk. `out` is shorter than the chunk at the end of an array.

        Raises CorruptChunkError if the checksum differs, if the bytes do not decode to a whole chunk, or for elements
        out of bounds.
        """
        n_elements = len(out) if self._layout.cut else self._layout.chunk_elements
        chunk = np.array([(0, 0, len(stored), 0, 0, len(out), n_elements)], CHUNK)
        for _, error in self.decode_all([stored], chunk, out):
            raise error

    def _decode_whole(self, stored: Bytes, whole: NDArray[Any]) -> None:
        """Decodes all elements of a chunk, with an error that says what is wrong."""
        if self._checked:
            if len(stored) < 4 or google_crc32c.value(stored[:-4]) != number(stored, len(stored) - 4, 4):
                raise CorruptChunkError("its crc32c differs from the stored crc32c")
            stored = stored[:-4]
        try:
            self._decompress(stored, whole)
        except BaseException as error:
            # A panic of a decoder written in Rust is not an Exception.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise CorruptChunkError(f"it cannot be decoded: {error}") from error
        if self._differences:
            accumulate(whole.view(f"u{whole.itemsize}"))


def decodes_in_numpy(layout: ArrayLayout) -> bool:
    """Whether few chunks are decoded without compiled loops."""
    return not layout.codecs or layout.codecs[0]["name"] != hdf5_filters.NAME


def _decompressor_of(layout: ArrayLayout) -> tuple[bool, bool, bool | None, Callable[[Bytes, NDArray[Any]], None]]:
    """Whether a chunk ends with its checksum, whether it holds differences, and a function that decompresses it.

    In between is whether it is compressed in the one way that `decompress` knows; None if it is in another.
    """
    if layout.codecs and layout.codecs[0]["name"] == hdf5_filters.NAME:
        filters, swapped = (layout.codecs[0]["configuration"][name] for name in ("filters", "swapped"))
        return False, False, None, functools.partial(hdf5_filters.undo_filters, filters, swapped)
    coders, checked = chain_of(layout.codecs, layout.path)
    delta, dtype = coders[0] if coders else None, layout.stored_dtype or layout.dtype
    # Other differences, such as those of floats, are left to numcodecs.
    differences = isinstance(delta, numcodecs.Delta) and dtype.kind in "iu" and delta.dtype == delta.astype == dtype
    coders = coders[differences:]
    compressed = {(): False, ("blosc",): True}.get(tuple(coder.codec_id for coder in coders))
    steps = [*enumerate(coders)][::-1]
    most = _MOST_ENCODED * layout.chunk_elements * dtype.itemsize + MiB

    def decompress(stored: Bytes, out: NDArray[Any]) -> None:
        plain: Any = stored
        for left, coder in steps:
            plain = decode_within(coder, plain, most, None if left else out)
        if plain is not out:
            plain, target = np.frombuffer(plain, np.uint8), out.view(np.uint8)
            if len(plain) != len(target):
                raise ValueError(f"{len(plain)} bytes instead of {len(target)}")
            target[:] = plain

    return checked, differences, compressed, decompress


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
# Decoded it has so many `elements`. A chunk of which several pieces are needed is given once for each, one after
# another, and is decoded once.
CHUNK = np.dtype([(name, np.int64) for name in ("read", "offset", "size", "begin", "first", "stop", "elements")])
# The same for a chunk of a grid, of which so many `rows` are needed, one after another in the chunk, too. `first` and
# `stop` are those of the first row. From `begin` on there are whole rows, and the elements belong to `column` of each.
PART = np.dtype([*CHUNK.descr, ("rows", np.int64), ("column", np.int64)])
_MANY_PARTS = 1 << 14  # of one chunk; whoever copies more of them at once may do so often, and needs the compiler


def _copy_parts(parts: NDArray[Any], whole: NDArray[Any], out: NDArray[Any], part_elements: int, n: int) -> Any:
    if len(parts) > _MANY_PARTS:
        return NotImplemented
    from_rows = whole.reshape(-1, part_elements)
    for _, _, _, begin, first, stop, _, rows, column in parts.tolist():
        row, place = divmod(first, part_elements)
        part = from_rows[row : row + rows, place : place + stop - first]
        columns_of(out, begin, rows, n)[:, column : column + stop - first] = part
    return None


@compiled_after(_copy_parts)
def copy_parts(parts: NDArray[Any], whole: NDArray[Any], out: NDArray[Any], part_elements: int, n: int) -> Any:
    """Copies `parts` (dtype PART) of a decoded chunk, which has `part_elements` of a row, to rows of `n` elements."""
    for part in parts:
        for row in range(part.rows):
            to, first = part.begin + row * n + part.column, part.first + row * part_elements
            for k in range(part.stop - part.first):
                out[to + k] = whole[first + k]


def columns_of(out: NDArray[Any], begin: int, rows: int, n: int) -> NDArray[Any]:
    """Rows of an array of rows of `n` elements, from the element `begin` on, as rows x columns."""
    return out[begin : begin + rows * n].reshape(rows, n)


@compiled
def decompress(
    addresses: Rows,
    chunks: NDArray[Any],
    how: tuple[bool, bool, bool],
    out: NDArray[np.unsignedinteger],
    scratch: NDArray[np.unsignedinteger],
    below: int,
) -> NDArray[np.bool_]:
    """Decodes `chunks` (dtype CHUNK) from the reads at `addresses` into `out`. Returns which are valid.

    `how` says whether each chunk ends with its crc32c, which its size includes; whether it is compressed; and whether
    it holds differences of elements, which are needed from its first element on. `scratch` has room for a chunk, in the
    stored dtype; that of `out` is the same, or narrower. Both are unsigned, whatever the elements are. A chunk may
    consist of several Blosc blocks, and only the needed blocks are decompressed. Unless `below` is negative, a chunk
    with a needed element that is not less is invalid.
    """
    checked, compressed, differences = how
    valid = np.zeros(len(chunks), np.bool_)
    itemsize, narrows = scratch.itemsize, scratch.itemsize != out.itemsize
    as_stored, last = not (compressed or differences or narrows), 0
    while last < len(chunks):
        begin, chunk = last, chunks[last]
        first, stop = chunk.first, chunk.stop
        while last < len(chunks) and _is_same(chunks[last], chunk):
            first, stop = min(first, chunks[last].first), max(stop, chunks[last].stop)
            last += 1
        stored, n = addresses[chunk.read] + chunk.offset, chunk.size
        if checked:
            if n < 4 or _crc32c(stored, n) != _RESIDUE:
                continue
            n -= 4
        direct = last == begin + 1 and chunk.stop - chunk.first == chunk.elements and not (narrows or as_stored)
        target: Any = np.intp(out[chunk.begin :].ctypes.data) if direct else np.intp(scratch.ctypes.data)
        first = 0 if differences else first
        if compressed:
            if not _decompress_part(stored, n, target, chunk.elements, itemsize, first, stop):
                continue
        elif n != chunk.elements * itemsize:
            continue
        elif as_stored:
            target = stored
        else:
            _memcpy(target + first * itemsize, stored + first * itemsize, (stop - first) * itemsize)
        if differences and direct:
            accumulate(out[chunk.begin : chunk.begin + chunk.elements])
        elif differences:
            accumulate(scratch[:stop])
        for i in range(begin, last):
            piece = chunks[i]
            needed = out[piece.begin : piece.begin + piece.stop - piece.first]
            if narrows:
                taken = scratch[piece.first : piece.stop]
                if below >= 0 and largest(taken) >= np.uint64(below):
                    continue
                for k in range(len(needed)):
                    needed[k] = taken[k]
            elif not direct:
                _memcpy(needed.ctypes.data, target + piece.first * itemsize, len(needed) * itemsize)
            valid[i] = below < 0 or largest(needed) < np.uint64(below)
    return valid


@compiled
def _is_same(chunk: Any, other: Any) -> bool:
    return bool(chunk.read == other.read and chunk.offset == other.offset)


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


def _accumulate(differences: NDArray[Any]) -> None:
    np.cumsum(differences, dtype=differences.dtype, out=differences)


@compiled_after(_accumulate)
def accumulate(differences: NDArray[Any]) -> None:
    """Replaces unsigned differences by their running sums, which wrap around: differences may be negative."""
    total = differences.dtype.type(0)
    # Fewer additions would do in vector registers, but the compiler's attempt at that took twice as long.
    for k in range(len(differences)):
        total = differences.dtype.type(total + differences[k])
        differences[k] = total


@compiled
def largest(elements: NDArray[np.unsignedinteger]) -> np.uint64:
    """The largest element; 0 if there are none. As a loop of its own it becomes vector instructions."""
    most = elements.dtype.type(0)
    for k in range(len(elements)):
        most = max(most, elements[k])
    return np.uint64(most)
