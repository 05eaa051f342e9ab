"""Read groups and arrays of a source in HDF5, Zarr or memory. All calls to their libraries are in this module.

Some names of columns, arrays and groups cannot be stored in Zarr; they are refused.

A damaged file makes h5py, zarr, anndata, pandas and the codecs raise exceptions of many types, some even when an
attribute is read. Each of them becomes a SourceError here that names the file and the element.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse
from numpy.typing import NDArray

from zloader.common.errors import FormatError, SourceError, ZloaderError

_RESERVED = ("", ".", "..", "zarr.json")  # by Zarr or by file systems
_UNSTORABLE = frozenset("/\\\0")  # zarr-python turns a backslash into a slash


_ENCODINGS = {"csr_matrix": "csr", "csc_matrix": "csc", "array": "dense"}


@contextlib.contextmanager
def reading(
    at: str,
    doing: str = "cannot be read",
    *,
    needs: str = 'it needs a newer anndata or an HDF5 filter: pip install "zloader[hdf5]"',
) -> Iterator[None]:
    """Turns any exception that a library raises for a damaged source into a SourceError.

    `at` names the source and the element. `needs` says which other library may read it.
    """
    try:
        yield
    except FormatError as error:
        raise SourceError(str(error)) from error
    except ZloaderError:
        raise  # an unreachable remote source is not damaged
    except Exception as error:
        raise SourceError(
            f"{at} {doing} ({type(error).__name__}: {error}): the source is damaged or incomplete, or " + needs
        ) from error


class Node:
    """A group, array, or element in memory. `at` names it in messages, such as `plate1.h5ad: X/data`.

    All methods raise SourceError, or StoreError if the bytes cannot be fetched.
    """

    def __init__(self, native: Any, source: str, path: str = "") -> None:
        """`native` is the object of the library: h5py, zarr, numpy, scipy, pandas, ..."""
        self.native, self.source, self.path = native, source, path
        self.at = f"{source}: {path}" if path else source

    def __contains__(self, name: str) -> bool:
        with reading(self.at):
            return hasattr(self.native, name) if scipy.sparse.issparse(self.native) else name in self.native

    def __getitem__(self, name: str) -> Node:
        """The group or array at a relative path, or one of the three arrays of a sparse matrix in memory."""
        below = f"{self.path}/{name}".lstrip("/")
        if name not in self:
            raise SourceError(f"{self.at} has no {name}: the file is damaged")
        with reading(f"{self.source}: {below}"):
            native = getattr(self.native, name) if scipy.sparse.issparse(self.native) else self.native[name]
        return Node(native, self.source, below)

    @property
    def encoding(self) -> str:
        """`csr`, `csc` or `dense`; for other elements the encoding-type or, in memory, the name of the type."""
        if scipy.sparse.issparse(self.native):
            return str(self.native.format)
        if isinstance(self.native, pd.DataFrame):
            return "dataframe"
        if isinstance(self.native, np.ndarray):
            return "masked array" if np.ma.is_masked(self.native) else "dense"
        if not hasattr(self.native, "attrs"):
            return f"{type(self.native).__module__.partition('.')[0]} {type(self.native).__name__}"  # "dask Array"
        with reading(self.at):
            encoding = self.native.attrs.get("encoding-type", "array" if hasattr(self.native, "dtype") else "unknown")
        encoding = encoding.decode(errors="replace") if isinstance(encoding, bytes) else str(encoding)  # as R writes it
        return _ENCODINGS.get(encoding, encoding)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an array or matrix."""
        with reading(self.at, "has a shape that cannot be read"):
            shape = self.native.shape if hasattr(self.native, "shape") else self.native.attrs.get("shape")
            if shape is None:
                raise SourceError(f"{self.at} has no shape: the file is damaged")
            return tuple(int(size) for size in shape)

    @property
    def number_dtype(self) -> np.dtype[Any]:
        """The dtype in native byte order. Raises SourceError unless it is bool, integer or float of at most 64 bits."""
        with reading(self.at):
            dtype: np.dtype[Any] = np.dtype(self.native.dtype)
        if dtype.kind not in "biuf" or dtype.itemsize > 8:
            raise SourceError(
                f"{self.at} holds {dtype}, not real numbers of at most 64 bits: convert it, for example to float32"
            )
        native: np.dtype[Any] = dtype.newbyteorder("=")
        return native

    def numbers(self, start: int, stop: int) -> NDArray[Any]:
        """Items `[start, stop)` of an array of numbers along its first axis, in native byte order."""
        dtype = self.number_dtype
        with reading(self.at, f"cannot be read at {start} to {stop}"):
            return np.asarray(self.native[start:stop], dtype)


def require_text(path: str, names: Iterable[Any]) -> None:
    """Raises SourceError for a name that is not text. `path` locates the names in the message."""
    for name in names:
        if not isinstance(name, str):
            raise SourceError(f"{path} has the name {name!r}, which is not text: rename it")


def require_names(path: str, names: Iterable[Any]) -> None:
    """Raises SourceError for a name that Zarr cannot store, or that is repeated."""
    names = list(names)
    require_text(path, names)
    for name in names:
        if name in _RESERVED or not _UNSTORABLE.isdisjoint(name):
            raise SourceError(f"{path} has the name {name!r}, which Zarr cannot store: rename it")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SourceError(f"{path} has the name {twice!r} more than once: rename one")
