"""Undoes the filters of HDF5 chunks. Pure.

A chunk passes through the filters of its array in their order, for example shuffle, gzip, fletcher32 (HDF5 File Format
Specification, IV.A.2.l). A compressor that cannot make a chunk smaller is left out for this chunk, whose size is then
that of the decoded chunk; `zloader.reading.hdf5` refuses files in which this could be mistaken. Every step returns
at most the bytes that a chunk may hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numcodecs
import numpy as np
from numpy.typing import NDArray

from zloader.common.compiled import compiled
from zloader.common.errors import FormatError
from zloader.storage.coders import decode_within

NAME = "hdf5"  # of the codec in ArrayLayout.codecs
Bytes = NDArray[np.uint8]


class NotInPlaceError(FormatError):
    """Something of a file cannot be read where it lies, although libhdf5 may read it."""


def filters_codecs(
    filters: Sequence[Mapping[str, Any]], dtype: np.dtype[Any], path: str
) -> tuple[Mapping[str, Any], ...]:
    """The codecs of an array with these filters, in the form of ArrayLayout.codecs. Raises FormatError."""
    names = [each["name"] for each in filters]
    known = {"shuffle", "fletcher32", *_DECOMPRESSORS}
    unknown = [name for name in names if name not in known]
    if unknown or sum(name in _DECOMPRESSORS for name in names) > 1:
        raise NotInPlaceError(
            f"{path} is compressed with {' and '.join(unknown or names)}, which is not read in place: run "
            "'zloader convert' on the file"
        )
    swapped = dtype.itemsize > 1 and dtype.newbyteorder("=") != dtype
    if not filters and not swapped:
        return ({"name": "bytes"},)
    return ({"name": NAME, "configuration": {"filters": [dict(each) for each in filters], "swapped": swapped}},)


def undo_filters(filters: Sequence[Mapping[str, Any]], swapped: bool, stored: Bytes, out: NDArray[Any]) -> None:
    """Fills `out` with a whole chunk. `swapped` says that its elements are big-endian.

    A filter that `skips` chunks has left those as they are that have the size of a plain chunk. Raises ValueError, or
    the error of a compressor, for any other size.
    """
    chunk, most = stored, out.nbytes
    for each in reversed(filters):
        name = each["name"]
        if name == "fletcher32":
            chunk = np.frombuffer(numcodecs.Fletcher32().decode(chunk), np.uint8)
        elif name == "shuffle":
            chunk = _unshuffled(chunk, each["item"])
        elif len(chunk) != most or not each.get("skips", True):
            chunk = np.frombuffer(_DECOMPRESSORS[name](chunk, most), np.uint8)
    if len(chunk) != most:
        raise ValueError(f"it has {len(chunk)} bytes instead of {most}")
    out.view(np.uint8)[:] = chunk
    if swapped:
        out.byteswap(inplace=True)


def _by_numcodecs(name: str, stored: Any, most: int) -> Any:
    return decode_within(numcodecs.get_codec({"id": name}), stored, most)


def _lzf(stored: Bytes, most: int) -> Bytes:
    out = np.empty(most, np.uint8)
    if _lzf_loop(np.ascontiguousarray(stored), out) != most:
        raise ValueError(f"it does not decode to {most} bytes")
    return out


@compiled
def _lzf_loop(stored: Bytes, out: Bytes) -> int:
    """LibLZF's format: runs of literal bytes, and copies of earlier output. Returns the bytes written; -1: damaged."""
    at, end = 0, 0
    while at < len(stored):
        control = int(stored[at])
        at += 1
        if control < 32:
            length = control + 1
            if at + length > len(stored) or end + length > len(out):
                return -1
            for _ in range(length):
                out[end] = stored[at]
                at, end = at + 1, end + 1
            continue
        length = control >> 5
        if length == 7:
            if at >= len(stored):
                return -1
            length += int(stored[at])
            at += 1
        if at >= len(stored):
            return -1
        begin = end - ((control & 31) << 8) - int(stored[at]) - 1
        at, length = at + 1, length + 2
        if begin < 0 or end + length > len(out):
            return -1
        for _ in range(length):
            out[end] = out[begin]
            begin, end = begin + 1, end + 1
    return end


def _unshuffled(chunk: Bytes, item: int) -> Bytes:
    """First bytes of all elements, then second bytes, ...; bytes that fill no element are last, as they are."""
    n = len(chunk) // item
    if item < 2 or n < 2:
        return chunk
    out = np.empty(len(chunk), np.uint8)
    if item == 4:
        _unshuffle_4(chunk, out[: 4 * n].view(np.uint32))
    else:
        numcodecs.Shuffle(item).decode(np.ascontiguousarray(chunk[: n * item]), out=out[: n * item])
    out[n * item :] = chunk[n * item :]
    return out


@compiled
def _unshuffle_4(chunk: Bytes, out: NDArray[np.uint32]) -> None:
    """Ten times as fast as a transposition, because it becomes vector instructions."""
    n = len(out)
    for i in range(n):
        low = np.uint32(chunk[i]) | np.uint32(chunk[n + i]) << np.uint32(8)
        out[i] = low | np.uint32(chunk[2 * n + i]) << np.uint32(16) | np.uint32(chunk[3 * n + i]) << np.uint32(24)


_DECOMPRESSORS: dict[str, Callable[[Bytes, int], Any]] = {
    "gzip": partial(_by_numcodecs, "zlib"),
    "lzf": _lzf,
    "zstd": partial(_by_numcodecs, "zstd"),
    "blosc": partial(_by_numcodecs, "blosc"),
}
