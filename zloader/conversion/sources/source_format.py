"""The port of formats that a library of their own reads: how a format is recognised, and what opens it."""

from __future__ import annotations

import fnmatch
import importlib.util
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from zloader.common.errors import SourceError
from zloader.conversion.sources.anndata_input import Input

Place = str | os.PathLike[str]


class SourceFormat(ABC):
    """A source that is given with options of its format. Without options its path or URL is enough.

    A path that ends with one of `endings` or begins with one of `schemes` is in this format, and so is a directory that
    has a file for each of the patterns in `marks`.
    """

    endings: ClassVar[tuple[str, ...]] = ()
    schemes: ClassVar[tuple[str, ...]] = ()
    marks: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def __init__(self, url: Any) -> None:
        """A source with the options that its format has by default."""

    @abstractmethod
    def open(self, storage_options: Mapping[str, Any]) -> Input:
        """Opens the source, with these fsspec options. Reads only metadata, and var."""

    @classmethod
    def is_named(cls, url: str) -> bool:
        """Whether a path, URL or glob names a source in this format."""
        return url.startswith(cls.schemes) or url.endswith(cls.endings)

    @classmethod
    def is_in(cls, names: Collection[str]) -> bool:
        """Whether a directory with files of these names is a source in this format."""
        return bool(cls.marks) and all(fnmatch.filter(names, mark) for mark in cls.marks)


def library(module: str, *, source: str, extra: str) -> Any:
    """Imports the library that reads `source`. Raises SourceError, which names the extra, if it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # raised by libraries during the import
        try:
            return importlib.import_module(module)
        except ImportError as error:
            raise _not_installed(module, source, extra, f" ({error})") from error


def require_library(module: str, *, source: str, extra: str) -> None:
    """Like `library`, without importing it."""
    if importlib.util.find_spec(module) is None:
        raise _not_installed(module, source, extra)


def _not_installed(module: str, source: str, extra: str, reason: str = "") -> SourceError:
    return SourceError(f'{source} is read by {module.partition(".")[0]}: pip install "zloader[{extra}]"{reason}')


def s3_access(storage_options: Mapping[str, Any]) -> dict[str, str]:
    """What options of s3fs say about access, by the names that Lance and TileDB have for it, as text."""
    client = storage_options.get("client_kwargs", {})
    given = {
        "access_key_id": storage_options.get("key"),
        "secret_access_key": storage_options.get("secret"),
        "session_token": storage_options.get("token"),
        "region": client.get("region_name"),
        "endpoint": storage_options.get("endpoint_url") or client.get("endpoint_url"),
        "skip_signature": "true" if storage_options.get("anon") else None,
    }
    return {name: str(value) for name, value in given.items() if value}
