"""Decodes many Blosc chunks in one compiled call that releases the GIL. Pure.

A chunk of 16 rows takes 30 µs to decode. Calling Python per chunk adds a third to that, and threads that take the GIL
for every chunk wait for one another. So a numba loop calls the C functions in numcodecs and google-crc32c directly. If
their libraries do not export these functions, `available()` is False and decode.py decodes chunk by chunk.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.compiled import External, compiled
from zloader.common.records import Rows

# Addresses are passed as integers, which the C calling convention puts into the same registers as pointers.
_crc32c = External("crc32c_value", "uint32", "intp", "uintp")
_validate = External("blosc_cbuffer_validate", "int32", "intp", "uintp", "intp")
_sizes = External("blosc_cbuffer_sizes", "void", "intp", "intp", "intp", "intp")
_metainfo = External("blosc_cbuffer_metainfo", "void", "intp", "intp", "intp")
_decompress = External("blosc_decompress_ctx", "int32", "intp", "intp", "uintp", "int32")
_getitem = External("blosc_getitem", "int32", "intp", "int32", "int32", "intp")


@functools.cache
def available() -> bool:
    """Loads the C functions for `decompress`. Returns False if any is missing. Call this before `decompress`."""
    # Imported here because it is a part of numba, which is imported when the first loop is called (compiled.py).
    import llvmlite.binding

    for library in ("numcodecs.blosc", "google_crc32c._crc32c"):
        found = importlib.util.find_spec(library)
        if found is None or found.origin is None:
            return False
        llvmlite.binding.load_library_permanently(found.origin)
    functions = (_crc32c, _validate, _sizes, _metainfo, _decompress, _getitem)
    return all(llvmlite.binding.address_of_symbol(function.name) is not None for function in functions)


# The crc32c of any bytes followed by their own crc32c (little endian) is this constant.
_RESIDUE = np.uint32(0x48674BC7)

# The source and the target of a chunk: it is bytes `[offset, offset + size)` of read number `read`. Only its elements
# `[first, stop)` are needed, counted from its first element. They go into an array, from `begin` on.
CHUNK = np.dtype([(name, np.int64) for name in ("read", "offset", "size", "begin", "first", "stop")])


@compiled
def decompress(
    addresses: Rows,
    chunks: NDArray[Any],
    checked: bool,
    out: NDArray[np.unsignedinteger],
    chunk_elements: int,
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
    scratch = np.empty(chunk_elements, out.dtype)  # stays in the core's cache
    for i in range(len(chunks)):
        chunk = chunks[i]
        stored, n = addresses[chunk.read] + chunk.offset, chunk.size
        if checked:
            if n < 4 or _crc32c(stored, n) != _RESIDUE:
                continue
            n -= 4
        needed = out[chunk.begin : chunk.begin + chunk.stop - chunk.first]
        decoded = needed if len(needed) == chunk_elements else scratch
        first = 0 if differences else chunk.first
        if not _decompress_part(stored, n, decoded.ctypes.data, chunk_elements, out.itemsize, first, chunk.stop):
            continue
        if differences:
            accumulate(decoded[: chunk.first], decoded[chunk.first : chunk.stop], needed)
        elif len(needed) < chunk_elements:
            needed[:] = decoded[chunk.first : chunk.stop]
        valid[i] = below < 0 or largest(needed) < np.uint64(below)
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


@compiled
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
