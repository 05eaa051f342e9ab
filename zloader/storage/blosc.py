"""Many Blosc chunks decoded by one compiled call, without the interpreter and its lock. Pure.

A chunk of 32 rows decodes in 40 µs; going through Python for each costs a quarter of that again, and threads that ask
for the interpreter's lock at every chunk wait for one another. So the C functions inside numcodecs and google-crc32c
are called from a numba loop. Where their libraries do not show these functions, `AVAILABLE` is False, and decode.py
goes chunk by chunk instead.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import llvmlite.binding
import numpy as np
from numba import types
from numpy.typing import NDArray

from zloader.common.compiled import compiled
from zloader.common.records import Rows


def _load() -> bool:
    """Makes the C functions known to numba; False where one of them is missing."""
    for library in ("numcodecs.blosc", "google_crc32c._crc32c"):
        found = importlib.util.find_spec(library)
        if found is None or found.origin is None:
            return False
        llvmlite.binding.load_library_permanently(found.origin)
    names = (
        "blosc_decompress_ctx",
        "blosc_getitem",
        "blosc_cbuffer_validate",
        "blosc_cbuffer_sizes",
        "blosc_cbuffer_metainfo",
        "crc32c_value",
    )
    return all(llvmlite.binding.address_of_symbol(name) is not None for name in names)


AVAILABLE = _load()

# Addresses are passed as integers, which C takes in the same registers as pointers.
_crc32c: Any = types.ExternalFunction("crc32c_value", types.uint32(types.intp, types.uintp))
_validate: Any = types.ExternalFunction("blosc_cbuffer_validate", types.int32(types.intp, types.uintp, types.intp))
_sizes: Any = types.ExternalFunction("blosc_cbuffer_sizes", types.void(types.intp, types.intp, types.intp, types.intp))
_metainfo: Any = types.ExternalFunction("blosc_cbuffer_metainfo", types.void(types.intp, types.intp, types.intp))
_decompress: Any = types.ExternalFunction(
    "blosc_decompress_ctx", types.int32(types.intp, types.intp, types.uintp, types.int32)
)
_getitem: Any = types.ExternalFunction("blosc_getitem", types.int32(types.intp, types.int32, types.int32, types.intp))
# What the crc32c of any bytes followed by their own crc32c (little endian) is.
_RESIDUE = np.uint32(0x48674BC7)

# Where a chunk lies, and where it goes: bytes `[offset, offset + size)` of a read become elements from `begin` on of an
# array. Only its elements `[first, stop)` are needed, counted from the chunk's own first.
CHUNK = np.dtype([(name, np.int64) for name in ("read", "offset", "size", "begin", "first", "stop")])


@compiled
def decompress(
    addresses: Rows, chunks: NDArray[Any], checked: bool, out: NDArray[np.uint8], chunk_bytes: int, itemsize: int
) -> NDArray[np.bool_]:
    """Decompresses `chunks` (of CHUNK) from the reads at `addresses` into `out`; gives whether each was right.

    `checked` chunks are followed by their crc32c, which their size includes. `out` must have room for whole chunks;
    blosc's own blocks, of which a chunk may have several, are only decompressed where they are needed.
    """
    right = np.zeros(len(chunks), np.bool_)
    sizes = np.zeros(3, np.int64)
    for i in range(len(chunks)):
        chunk = chunks[i]
        stored, n = addresses[chunk.read] + chunk.offset, chunk.size
        if checked:
            if n < 4 or _crc32c(stored, n) != _RESIDUE:
                continue
            n -= 4
        # Blosc trusts its header, and would read past a chunk that is shorter than it says.
        if _validate(stored, n, sizes.ctypes.data) != 0 or sizes[0] != chunk_bytes:
            continue
        _sizes(stored, sizes.ctypes.data, sizes[1:].ctypes.data, sizes[2:].ctypes.data)
        target, block = out.ctypes.data + chunk.begin * itemsize, max(sizes[2], 1)
        first, last = chunk.first * itemsize // block, (chunk.stop * itemsize - 1) // block
        # Items are counted in the size that the chunk was compressed with, which need not be that of the elements.
        _metainfo(stored, sizes.ctypes.data, sizes[1:].ctypes.data)
        if sizes[0] == itemsize and last - first + 1 < (chunk_bytes + block - 1) // block:
            wanted = chunk.stop - chunk.first
            given = _getitem(stored, chunk.first, wanted, target + chunk.first * itemsize)
            right[i] = given == wanted * itemsize
        else:
            right[i] = _decompress(stored, target, chunk_bytes, 1) == chunk_bytes
    return right


@compiled
def within(elements: NDArray[np.integer], chunks: NDArray[Any], below: int) -> NDArray[np.bool_]:
    """Whether all elements that are needed of each of `chunks` (of CHUNK) are at least 0 and below `below`."""
    right = np.ones(len(chunks), np.bool_)
    for i in range(len(chunks)):
        chunk = elements[chunks[i].begin + chunks[i].first : chunks[i].begin + chunks[i].stop]
        least, most = 0, 0
        for k in range(len(chunk)):
            least = min(least, chunk[k])
            most = max(most, chunk[k])
        right[i] = least >= 0 and most < below
    return right
