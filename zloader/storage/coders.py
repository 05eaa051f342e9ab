"""The codecs of a chunk as numcodecs objects, made from Zarr metadata. Pure.

zarr-python encodes with numcodecs too, so its bytes can be read and repeated here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numcodecs
import numcodecs.registry
import numpy as np

from zloader.common.errors import FormatError

PREFIX = "numcodecs."  # of the codecs that zarr-python takes from numcodecs
PCODEC = "pcodec"
INSTALL_PCODEC = 'pip install "zloader[pcodec]"'
_SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The codecs of a chunk: `coders` encode it in this order. If `checked`, the crc32c of the result comes last."""

    coders: Sequence[Any]
    checked: bool


def has_pcodec() -> bool:
    """Whether numcodecs found the package pcodec."""
    return PCODEC in numcodecs.registry.codec_registry


def require_packages(names: Iterable[str], path: str) -> None:
    """Raises FormatError if one of the codecs of the array at `path` needs a package that is not installed."""
    if PCODEC in (name.removeprefix(PREFIX) for name in names) and not has_pcodec():
        raise FormatError(f"{path} is encoded with pcodec, which is not installed: {INSTALL_PCODEC}")


def chain_of(codecs: Sequence[Mapping[str, Any]], path: str) -> Chain:
    """The chain that the `codecs` of the array at `path` describe (see ArrayLayout).

    Raises FormatError for a codec that cannot be read, and for pcodec if the package is not installed.
    """
    names = [codec["name"] for codec in codecs]
    checked = names[-1:] == ["crc32c"]
    inner = codecs[:-1] if checked else codecs
    require_packages(names, path)
    if not {"bytes", PREFIX + PCODEC} & {*names}:
        raise _unreadable(path, names, names[-1])
    coders = [_coder(codec, path, names) for codec in inner if not _is_plain_bytes(codec)]
    return Chain(coders=coders, checked=checked)


def _is_plain_bytes(codec: Mapping[str, Any]) -> bool:
    return codec["name"] == "bytes" and _settings(codec).get("endian") in ("little", None)


def _settings(codec: Mapping[str, Any]) -> dict[str, Any]:
    return dict(codec.get("configuration") or {})


def _coder(codec: Mapping[str, Any], path: str, names: Sequence[str]) -> Any:
    name, settings = codec["name"], _settings(codec)
    if name.startswith(PREFIX):
        settings["id"] = name.removeprefix(PREFIX)
    elif name == "blosc":
        shuffle = settings.get("shuffle", "shuffle")
        settings = {key: settings[key] for key in ("cname", "clevel", "blocksize") if key in settings}
        settings |= {"id": name, "shuffle": _SHUFFLES.index(shuffle) if shuffle in _SHUFFLES else shuffle}
    elif name in ("zstd", "gzip"):
        settings["id"] = name
    else:
        raise _unreadable(path, names, name)
    try:
        coder = numcodecs.get_codec(settings)
    except (ValueError, TypeError) as error:
        raise _unreadable(path, names, name, f" ({error})") from error
    types = (np.dtype(value) for key, value in coder.get_config().items() if key.endswith("type"))
    if any(dtype.byteorder == ">" for dtype in types):
        raise _unreadable(path, names, name, " in foreign byte order")
    return coder


def _unreadable(path: str, names: Sequence[str], name: str, why: str = "") -> FormatError:
    described = f"{path} is encoded with {', '.join(names)}"
    return FormatError(f"{described}, and {name}{why} cannot be read: run 'zloader convert' on it")
