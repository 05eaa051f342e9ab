"""Decodes many Blosc chunks in one compiled call that releases the GIL. Pure.

A chunk of 32 rows takes 40 µs to decode. Calling Python per chunk adds a quarter to that, and threads that take the GIL
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

# The source and the target of a chunk: bytes `[offset, offset + size)` of read number `read` become elements of an
# array from `begin` on. Only elements `[first, stop)` of the chunk are needed, counted from its first element.
CHUNK = np.dtype([(name, np.int64) for name in ("read", "offset", "size", "begin", "first", "stop")])


@compiled
def decompress(
    addresses: Rows, chunks: NDArray[Any], checked: bool, out: NDArray[np.uint8], chunk_bytes: int, itemsize: int
) -> NDArray[np.bool_]:
    """Decompresses `chunks` (dtype CHUNK) from the reads at `addresses` into `out`. Returns which are valid.

    With `checked`, each chunk ends with its crc32c, and its size includes those 4 bytes. `out` must have room for whole
    chunks. A chunk may consist of several Blosc blocks, and only the needed blocks are decompressed.
    """
    valid = np.zeros(len(chunks), np.bool_)
    sizes = np.zeros(3, np.int64)
    for i in range(len(chunks)):
        chunk = chunks[i]
        stored, n = addresses[chunk.read] + chunk.offset, chunk.size
        if checked:
            if n < 4 or _crc32c(stored, n) != _RESIDUE:
                continue
            n -= 4
        # Blosc trusts the size in its header and would read past the end of a truncated chunk.
        if _validate(stored, n, sizes.ctypes.data) != 0 or sizes[0] != chunk_bytes:
            continue
        _sizes(stored, sizes.ctypes.data, sizes[1:].ctypes.data, sizes[2:].ctypes.data)
        target, block = out.ctypes.data + chunk.begin * itemsize, max(sizes[2], 1)
        first, last = chunk.first * itemsize // block, (chunk.stop * itemsize - 1) // block
        # blosc_getitem counts in the item size of the compressor, which may differ from that of the elements.
        _metainfo(stored, sizes.ctypes.data, sizes[1:].ctypes.data)
        if sizes[0] == itemsize and last - first + 1 < (chunk_bytes + block - 1) // block:
            wanted = chunk.stop - chunk.first
            n_bytes = _getitem(stored, chunk.first, wanted, target + chunk.first * itemsize)
            valid[i] = n_bytes == wanted * itemsize
        else:
            valid[i] = _decompress(stored, target, chunk_bytes, 1) == chunk_bytes
    return valid


@compiled
def within(elements: NDArray[np.integer], chunks: NDArray[Any], below: int) -> NDArray[np.bool_]:
    """Whether the needed elements of each of `chunks` (dtype CHUNK) are all in `range(below)`."""
    valid = np.ones(len(chunks), np.bool_)
    for i in range(len(chunks)):
        chunk = elements[chunks[i].begin + chunks[i].first : chunks[i].begin + chunks[i].stop]
        least, most = 0, 0
        for k in range(len(chunk)):
            least = min(least, chunk[k])
            most = max(most, chunk[k])
        valid[i] = least >= 0 and most < below
    return valid
