"""The codecs of a chunk as numcodecs objects, made from Zarr metadata. Pure.

zarr-python encodes with numcodecs too, so its bytes can be read and repeated here.
"""

from __future__ import annotations

import bz2
import contextlib
import lzma
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numcodecs
import numcodecs.registry
import numpy as np
from numpy.typing import NDArray

from zloader.common.errors import FormatError

PREFIX = "numcodecs."  # of the codecs that zarr-python takes from numcodecs
PCODEC = "pcodec"
INSTALL_PCODEC = 'pip install "zloader[pcodec]"'
_SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")


# Inflating bounds epochs over gzipped files. ISA-L does it two to five times as fast as zlib and releases the GIL.
decompressobj: Any = zlib.decompressobj
with contextlib.suppress(ImportError):  # no wheel for this machine
    from isal.isal_zlib import decompressobj

# Compressors whose objects decompress a stream up to a given size.
_STREAMS: dict[str, Callable[[Any], Any]] = {
    "zlib": lambda coder: decompressobj(),
    "gzip": lambda coder: decompressobj(16 + zlib.MAX_WBITS),
    "bz2": lambda coder: bz2.BZ2Decompressor(),
    "lzma": lambda coder: lzma.LZMADecompressor(coder.format, filters=coder.filters),
}
_COMPRESSORS = {*_STREAMS, "blosc", "zstd", "lz4", PCODEC}
# Filters that decode n bytes to at most 16 n bytes, and checksums.
_FILTERS = {"astype", "base64", "bitround", "delta", "fixedscaleoffset", "packbits", "quantize", "shuffle"}
_FILTERS |= {"adler32", "crc32", "crc32c", "fletcher32", "jenkins_lookup3"}


def decode_within(coder: Any, stored: Any, most: int, out: NDArray[Any] | None = None) -> Any:
    """What `coder` has encoded as `stored`, as an array or bytes: at most `most` bytes, or as many as `out` has.

    A compressor without a stream decodes into `out`. Raises ValueError for more, before more than that is decompressed,
    and the errors of the codec.
    """
    name, most = coder.codec_id, most if out is None else out.nbytes
    if name in _STREAMS:
        return _decompressed(coder, stored, most)
    if name not in _COMPRESSORS:
        return coder.decode(stored)
    size = _size_in_header(name, stored, most)
    if size > most or (out is not None and size != most):
        raise ValueError(f"its header says that it has {size} bytes instead of {most}")
    if name == PCODEC:
        if out is None:
            raise ValueError("a filter before pcodec is not undone")
        _decode_pcodec(stored, out)
        return out
    out = np.empty(size, np.uint8) if out is None else out
    coder.decode(stored, out)  # never writes more than fits
    return out


def _decode_pcodec(stored: Any, out: NDArray[Any]) -> None:
    from pcodec import standalone  # an optional package

    # Not through numcodecs, which would not say whether `out` was filled and nothing was left over.
    done = standalone.simple_decompress_into(bytes(stored), out)
    if done.n_processed != len(out) or not done.finished:
        raise ValueError(f"it does not hold {len(out)} values")


def _decompressed(coder: Any, stored: Any, most: int) -> bytes:
    plain = b""
    while len(stored):  # a file of gzip, bz2 or lzma may have several members
        stream = _STREAMS[coder.codec_id](coder)
        plain += stream.decompress(stored, most + 1 - len(plain))
        if len(plain) > most:
            raise ValueError(f"it would decode to more than {most} bytes")
        if not stream.eof:
            raise ValueError("it was cut short")
        stored = stream.unused_data
    return plain


def number(stored: Any, at: int, size: int) -> int:
    """The little-endian number in `size` bytes from byte `at` on."""
    return int.from_bytes(bytes(stored[at : at + size]), "little")


def is_whole_blosc(stored: Any) -> bool:
    """Whether a Blosc chunk is as long as its header says. Blosc does not check, and would read past a truncated chunk.

    Bytes 4-7 of the header hold the decoded size, bytes 12-15 the stored size.
    """
    return len(stored) >= 16 and number(stored, 12, 4) == len(stored)


def _size_in_header(name: str, stored: Any, default: int) -> int:
    """The decoded size that a compressor has noted, or `default` if it has not. Raises ValueError for truncated blosc.

    RFC 8878, 3.1.1.1, describes the frames of zstd.
    """
    if name == "blosc" and not is_whole_blosc(stored):
        raise ValueError(f"its blosc header does not match {len(stored)} stored bytes")
    if name != "zstd":
        return number(stored, {"blosc": 4, "lz4": 0}[name], 4) if name != PCODEC else default
    described = number(stored, 4, 1)
    single_segment, code = described >> 5 & 1, described >> 6
    size = (single_segment, 2, 4, 8)[code]
    at = 5 + (1 - single_segment) + (0, 1, 2, 4)[described & 3]
    return number(stored, at, size) + 256 * (size == 2) if size else default


def has_pcodec() -> bool:
    """Whether numcodecs found the package pcodec."""
    return PCODEC in numcodecs.registry.codec_registry


def require_packages(names: Iterable[str], path: str) -> None:
    """Raises FormatError if a codec of the array at `path` is pickle, or needs a package that is not installed."""
    plain_names = [name.removeprefix(PREFIX) for name in names]
    if "pickle" in plain_names:
        raise FormatError(f"{path} is encoded with pickle, which is not read because it could run any code")
    if PCODEC in plain_names and not has_pcodec():
        raise FormatError(f"{path} is encoded with pcodec, which is not installed: {INSTALL_PCODEC}")


def chain_of(codecs: Sequence[Mapping[str, Any]], path: str) -> tuple[list[Any], bool]:
    """The coders of a chunk, in the order in which they encode it, and whether the crc32c of the result comes last.

    The `codecs` of the array at `path` describe them (see ArrayLayout).

    Raises FormatError for a codec that cannot be read, and for pcodec if the package is not installed.
    """
    names = [codec["name"] for codec in codecs]
    checked = names[-1:] == ["crc32c"]
    require_packages(names, path)
    if not {"bytes", PREFIX + PCODEC} & {*names}:
        raise _unreadable(path, names, names[-1])
    coders = [_coder(codec, path, names) for codec in (codecs[:-1] if checked else codecs)]
    return [coder for coder in coders if coder is not None], checked


def _coder(codec: Mapping[str, Any], path: str, names: Sequence[str]) -> Any:
    """The coder of a codec; None for bytes in the order of this machine."""
    name, settings = codec["name"], dict(codec.get("configuration") or {})
    if name == "bytes" and settings.get("endian") in ("little", None):
        return None
    if not name.startswith(PREFIX) and name not in ("blosc", "zstd", "gzip"):
        raise _unreadable(path, names, name)
    try:
        if name == "blosc":
            settings = {key: settings[key] for key in ("cname", "clevel", "blocksize", "shuffle") if key in settings}
            settings["shuffle"] = _SHUFFLES.index(settings.get("shuffle", "shuffle"))
        coder = numcodecs.get_codec(settings | {"id": name.removeprefix(PREFIX)})
    except (ValueError, TypeError) as error:
        raise _unreadable(path, names, name, f" ({error})") from error
    if coder.codec_id not in _COMPRESSORS | _FILTERS:  # the size of its output is not limited
        raise _unreadable(path, names, name)
    types = (np.dtype(value) for key, value in coder.get_config().items() if key.endswith("type"))
    if any(dtype.byteorder == ">" for dtype in types):
        raise _unreadable(path, names, name, " in foreign byte order")
    return coder


def _unreadable(path: str, names: Sequence[str], name: str, why: str = "") -> FormatError:
    described = f"{path} is encoded with {', '.join(names)}"
    return FormatError(f"{described}, and {name}{why} cannot be read: run 'zloader convert' on it")
