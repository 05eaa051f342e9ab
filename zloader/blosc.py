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

from zloader.gather import compiled
from zloader.terms import Rows


def _load() -> bool:
    """Makes the C functions known to numba; False where one of them is missing."""
    for library in ("numcodecs.blosc", "google_crc32c._crc32c"):
        found = importlib.util.find_spec(library)
        if found is None or found.origin is None:
            return False
        llvmlite.binding.load_library_permanently(found.origin)
    names = ("blosc_decompress_ctx", "blosc_cbuffer_validate", "crc32c_value")
    return all(llvmlite.binding.address_of_symbol(name) is not None for name in names)


AVAILABLE = _load()

# Addresses are passed as integers, which C takes in the same registers as pointers.
_crc32c: Any = types.ExternalFunction("crc32c_value", types.uint32(types.intp, types.uintp))
_validate: Any = types.ExternalFunction("blosc_cbuffer_validate", types.int32(types.intp, types.uintp, types.intp))
_decompress: Any = types.ExternalFunction(
    "blosc_decompress_ctx", types.int32(types.intp, types.intp, types.uintp, types.int32)
)
# What the crc32c of any bytes followed by their own crc32c (little endian) is.
_RESIDUE = np.uint32(0x48674BC7)


@compiled
def decompress(
    addresses: Rows, sizes: Rows, checked: bool, out: NDArray[np.uint8], begins: Rows, chunk_bytes: int
) -> NDArray[np.bool_]:
    """Decompresses the chunks at `addresses` to `out[begins[i] : begins[i] + chunk_bytes]`; whether each was right.

    `checked` chunks are followed by their crc32c, which `sizes` (bytes) includes. `out` must have room for them all.
    """
    right = np.zeros(len(addresses), np.bool_)
    announced = np.zeros(1, np.int64)
    target = out.ctypes.data
    for i in range(len(addresses)):
        n = sizes[i]
        if checked:
            if n < 4 or _crc32c(addresses[i], n) != _RESIDUE:
                continue
            n -= 4
        # Blosc trusts its header, and would read past a chunk that is shorter than it says.
        if _validate(addresses[i], n, announced.ctypes.data) != 0 or announced[0] != chunk_bytes:
            continue
        right[i] = _decompress(addresses[i], target + begins[i], chunk_bytes, 1) == chunk_bytes
    return right


@compiled
def within(elements: NDArray[np.integer], begins: Rows, lengths: Rows, below: int) -> NDArray[np.bool_]:
    """Whether all of `elements[begins[i] : begins[i] + lengths[i]]` are at least 0 and below `below`."""
    right = np.ones(len(begins), np.bool_)
    for i in range(len(begins)):
        chunk = elements[begins[i] : begins[i] + lengths[i]]
        least, most = 0, 0
        for k in range(len(chunk)):
            least = min(least, chunk[k])
            most = max(most, chunk[k])
        right[i] = least >= 0 and most < below
    return right
