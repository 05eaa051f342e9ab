"""Decodes stored chunks to elements and verifies their checksums. Pure.

numcodecs releases the GIL and decompresses directly into the buffer if the codec allows it. Blosc chunks, the format
that `convert` writes, are decoded many per call.
"""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import google_crc32c
import numcodecs
import numcodecs.blosc
import numpy as np
from numpy.typing import NDArray

from zloader.common.errors import CorruptChunkError, FormatError
from zloader.storage import blosc
from zloader.storage.layout import ArrayLayout

Bytes = NDArray[np.uint8]


def checksum(stored: NDArray[Any]) -> int:
    """The crc32c (Castagnoli, RFC 3720) of the bytes of a contiguous array."""
    return int(google_crc32c.value(stored.view(np.uint8)))


class Decoder:
    """Decodes the chunks of one array with the codecs in `layout`. Raises FormatError for unsupported codecs."""

    def __init__(self, layout: ArrayLayout) -> None:
        names = [codec["name"] for codec in layout.codecs]
        self._checked = names[-1] == "crc32c"
        compressors = [codec for codec in layout.codecs[1:] if codec["name"] != "crc32c"]
        endian = layout.codecs[0].get("configuration", {}).get("endian", "little")
        too_many = len(compressors) > 1 and not all(codec["name"] == "numcodecs" for codec in compressors)
        if names[0] != "bytes" or endian != "little" or too_many or "crc32c" in names[:-1]:
            raise FormatError(
                f"{layout.path} is encoded with {names}, which cannot be read: run 'zloader convert' on it"
            )
        self._decompress = _decompressor(compressors, layout.path) if compressors else _copy
        self._many_at_once = self._decompress is _blosc and blosc.available()
        self._layout = layout
        self._dtype = layout.dtype
        self._chunk_elements = layout.chunk_elements

    def decode_all(
        self, reads: Sequence[bytes], chunks: NDArray[Any], out: NDArray[Any]
    ) -> list[tuple[int, CorruptChunkError]]:
        """Fills `out`, which has room for whole chunks, with the needed elements of `chunks` (dtype blosc.CHUNK).

        Returns the position and the error of each chunk that is corrupt or violates the layout's bound `below`.
        """
        views = [np.frombuffer(read, np.uint8) for read in reads]
        corrupt = []
        for i in np.flatnonzero(~self._decode_at_once(views, chunks, out)).tolist():
            read, offset, size, begin, first, stop = (int(field) for field in chunks[i])
            elements = out[begin : begin + stop]
            try:
                self.decode(views[read][offset : offset + size], elements)
                self._layout.check_bounds(elements[first:])
            except CorruptChunkError as error:
                corrupt.append((i, error))
        return corrupt

    def _decode_at_once(self, views: Sequence[Bytes], chunks: NDArray[Any], out: NDArray[Any]) -> NDArray[np.bool_]:
        """Decodes chunks in one call and returns which are valid. The rest are decoded again singly, for errors."""
        if not self._many_at_once:
            return np.zeros(len(chunks), bool)
        addresses, itemsize = np.array([view.ctypes.data for view in views]), self._dtype.itemsize
        chunk_bytes = self._chunk_elements * itemsize
        valid = blosc.decompress(addresses, chunks, self._checked, out.view(np.uint8), chunk_bytes, itemsize)
        if self._layout.below is not None:
            valid &= blosc.within(out, chunks, self._layout.below)
        return valid

    def decode(self, stored: Bytes, out: NDArray[Any]) -> None:
        """Fills `out` with the first elements of a chunk. `out` is shorter than the chunk at the end of an array.

        Raises CorruptChunkError if the checksum differs or the bytes do not decode to a whole chunk.
        """
        if self._checked:
            if len(stored) < 4 or google_crc32c.value(stored[:-4]) != _uint32(stored, len(stored) - 4):
                raise CorruptChunkError("its crc32c differs from the stored crc32c")
            stored = stored[:-4]
        whole = out if len(out) == self._chunk_elements else np.empty(self._chunk_elements, self._dtype)
        try:
            self._decompress(stored, whole)
        except (RuntimeError, ValueError, EOFError, OSError, MemoryError, zlib.error, lzma.LZMAError) as error:
            raise CorruptChunkError(f"it cannot be decoded: {error}") from error
        if whole is not out:
            out[:] = whole[: len(out)]


def _uint32(stored: Bytes | bytes, at: int) -> int:
    value: int = int.from_bytes(bytes(stored[at : at + 4]), "little")
    return value


def _copy(stored: Bytes, out: NDArray[Any]) -> None:
    target = out.view(np.uint8)
    if len(stored) != len(target):
        raise ValueError(f"{len(stored)} bytes instead of {len(target)}")
    target[:] = stored


def is_whole_blosc(stored: Bytes | bytes) -> bool:
    """Whether a Blosc chunk is as long as its header says. Blosc does not check, and would read past a truncated chunk.

    Bytes 4-7 of the header hold the decoded size, bytes 12-15 the stored size.
    """
    return len(stored) >= 16 and _uint32(stored, 12) == len(stored)


def _blosc(stored: Bytes, out: NDArray[Any]) -> None:
    if not is_whole_blosc(stored) or _uint32(stored, 4) != out.nbytes:
        raise ValueError(f"its blosc header does not match {out.nbytes} decoded and {len(stored)} stored bytes")
    numcodecs.blosc.decompress(stored, out)


def _decompressor(codecs: Sequence[Mapping[str, Any]], path: str) -> Callable[[Bytes, NDArray[Any]], None]:
    """A function that undoes the codecs in reverse: one codec of Zarr v3, or the filters and compressor of Zarr v2."""
    configurations = [
        codec["configuration"] if codec["name"] == "numcodecs" else {"id": codec["name"]} for codec in codecs
    ]
    if [each["id"] for each in configurations] == ["blosc"]:
        return _blosc
    if codecs[0]["name"] not in ("numcodecs", "zstd", "gzip"):
        raise FormatError(
            f"{path} is compressed with {codecs[0]['name']!r}, which cannot be read: run 'zloader convert' on it"
        )
    try:
        coders = [numcodecs.get_codec(dict(each)) for each in reversed(configurations)]
    except ValueError as error:
        raise FormatError(f"{path} cannot be read ({error}): run 'zloader convert' on it") from error

    def through_bytes(stored: Bytes, out: NDArray[Any]) -> None:
        plain: Any = stored
        for coder in coders:
            if isinstance(coder, numcodecs.Blosc) and not is_whole_blosc(plain):
                raise ValueError(f"its blosc header does not match {len(plain)} stored bytes")
            plain = coder.decode(plain)
        _copy(np.ascontiguousarray(np.frombuffer(plain, np.uint8)), out)

    return through_bytes
