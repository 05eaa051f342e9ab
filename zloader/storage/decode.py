"""Decodes stored chunks to elements and verifies their checksums. Pure.

numcodecs releases the GIL and decompresses directly into the buffer if the codec allows it. Blosc chunks, the format
that `convert` writes, are decoded many per call, and the differences of gene indices are added up in the same call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import google_crc32c
import numcodecs
import numcodecs.blosc
import numpy as np
from numpy.typing import NDArray

from zloader.common.errors import CorruptChunkError
from zloader.storage import blosc
from zloader.storage.coders import PCODEC, chain_of, decode_within, is_whole_blosc, sizes_before
from zloader.storage.layout import ArrayLayout

Bytes = NDArray[np.uint8]
_MOST = np.iinfo(np.int64).max


def checksum(stored: NDArray[Any]) -> int:
    """The crc32c (Castagnoli, RFC 3720) of the bytes of a contiguous array."""
    return int(google_crc32c.value(stored.view(np.uint8)))


class Decoder:
    """Decodes the chunks of one array with the codecs in `layout`. Raises FormatError for unsupported codecs."""

    def __init__(self, layout: ArrayLayout) -> None:
        chain = chain_of(layout.codecs, layout.path)
        coders = list(chain.coders)
        self._checked = chain.checked
        self._layout = layout
        self._dtype = layout.dtype
        self._unsigned = np.dtype(f"u{layout.dtype.itemsize}")
        self._chunk_elements = layout.chunk_elements
        # Other differences, such as those of floats, are left to numcodecs.
        self._differences = bool(coders) and _is_whole_delta(coders[0], layout.dtype)
        self._decompress = _decompressor(
            coders[1:] if self._differences else coders, layout.dtype, layout.chunk_elements
        )
        self._many_at_once = self._decompress is _blosc and blosc.available()

    def decode_all(
        self, reads: Sequence[bytes | Bytes], chunks: NDArray[Any], out: NDArray[Any]
    ) -> list[tuple[int, CorruptChunkError]]:
        """Fills `out` with the needed elements of `chunks` (dtype blosc.CHUNK).

        Returns the position and the error of each chunk that is corrupt or violates the layout's bound `below`.
        """
        views = [np.frombuffer(read, np.uint8) for read in reads]
        corrupt = []
        for i in np.flatnonzero(~self._decode_at_once(views, chunks, out, self._below)).tolist():
            read, offset, size, begin, first, stop = (int(field) for field in chunks[i])
            elements = np.empty(stop, self._dtype)
            try:
                self._decode_singly(views[read][offset : offset + size], elements)
                self._layout.check_bounds(elements[first:])
            except CorruptChunkError as error:
                corrupt.append((i, error))
            else:
                out[begin : begin + stop - first] = elements[first:]
        return corrupt

    @property
    def _below(self) -> int:
        """The bound of elements seen as unsigned, in which negative ones are large; -1 without a bound."""
        if self._layout.below is None:
            return -1
        return min(self._layout.below, np.iinfo(self._dtype).max + 1 if self._dtype.kind == "i" else _MOST)

    def _decode_at_once(
        self, views: Sequence[Bytes], chunks: NDArray[Any], out: NDArray[Any], below: int
    ) -> NDArray[np.bool_]:
        """Decodes chunks in one call and returns which are valid. The rest are decoded again singly, for errors."""
        if not self._many_at_once:
            return np.zeros(len(chunks), bool)
        addresses, elements = np.array([view.ctypes.data for view in views]), out.view(self._unsigned)
        return blosc.decompress(
            addresses, chunks, self._checked, elements, self._chunk_elements, self._differences, below
        )

    def decode(self, stored: Bytes, out: NDArray[Any]) -> None:
        """Fills `out` with the first elements of a chunk. `out` is shorter than the chunk at the end of an array.

        Raises CorruptChunkError if the checksum differs or the bytes do not decode to a whole chunk.
        """
        if len(out) == self._chunk_elements:
            chunk = np.array([(0, 0, len(stored), 0, 0, len(out))], blosc.CHUNK)
            if self._decode_at_once([stored], chunk, out, -1)[0]:
                return
        self._decode_singly(stored, out)

    def _decode_singly(self, stored: Bytes, out: NDArray[Any]) -> None:
        """Like `decode`, with an error that says what is wrong."""
        if self._checked:
            if len(stored) < 4 or google_crc32c.value(stored[:-4]) != _uint32(stored, len(stored) - 4):
                raise CorruptChunkError("its crc32c differs from the stored crc32c")
            stored = stored[:-4]
        whole = out if len(out) == self._chunk_elements else np.empty(self._chunk_elements, self._dtype)
        try:
            self._decompress(stored, whole)
        except BaseException as error:
            # A panic of a decoder written in Rust is not an Exception.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise CorruptChunkError(f"it cannot be decoded: {error}") from error
        if self._differences:
            unsigned = whole.view(self._unsigned)
            blosc.accumulate(unsigned[:0], unsigned, unsigned)
        if whole is not out:
            out[:] = whole[: len(out)]


def _is_whole_delta(coder: Any, dtype: np.dtype[Any]) -> bool:
    """Whether a coder stores differences of integers in the dtype of the array."""
    return isinstance(coder, numcodecs.Delta) and dtype.kind in "iu" and coder.dtype == coder.astype == dtype


def _uint32(stored: Bytes | bytes, at: int) -> int:
    value: int = int.from_bytes(bytes(stored[at : at + 4]), "little")
    return value


def _copy(stored: Bytes, out: NDArray[Any]) -> None:
    target = out.view(np.uint8)
    if len(stored) != len(target):
        raise ValueError(f"{len(stored)} bytes instead of {len(target)}")
    target[:] = stored


def _blosc(stored: Bytes, out: NDArray[Any]) -> None:
    if not is_whole_blosc(stored) or _uint32(stored, 4) != out.nbytes:
        raise ValueError(f"its blosc header does not match {out.nbytes} decoded and {len(stored)} stored bytes")
    numcodecs.blosc.decompress(stored, out)


def _pcodec(stored: Bytes, out: NDArray[Any]) -> None:
    from pcodec import standalone  # an optional package

    # Not through numcodecs, which would not say whether `out` was filled and nothing was left over.
    done = standalone.simple_decompress_into(stored.tobytes(), out)
    if done.n_processed != len(out) or not done.finished:
        raise ValueError(f"it does not hold {len(out)} values")


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
