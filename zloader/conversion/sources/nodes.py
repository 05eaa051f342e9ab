"""Read groups and arrays of a source in HDF5, Zarr or memory. All calls to their libraries are in this module.

Some names of columns, arrays and groups cannot be stored in Zarr; they are refused.

A damaged file makes h5py, zarr, anndata, pandas and the codecs raise exceptions of many types, some even when an
attribute is read. Each of them becomes a SourceError here that names the file and the element.

Most .h5ad files are compressed with gzip, and the HDF5 library decompresses in a single thread while it holds a lock.
Here the compressed chunks are read as stored and inflated by zlib, in several threads, without Python's lock.
"""

from __future__ import annotations

import contextlib
import os
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import anndata as ad
import h5py
import numcodecs
import numpy as np
import pandas as pd
import scipy.sparse
from numpy.typing import NDArray

from zloader.access.zarr_groups import require_fresh, undecodable_key
from zloader.common.errors import FormatError, SourceError, ZloaderError
from zloader.dataset.elements import read_hdf5_element
from zloader.reading.hdf5 import is_of_numpy

_DEFLATE, _SHUFFLE = 1, 2  # https://docs.hdfgroup.org: identifiers of filters
_MAX_THREADS = 16
_RESERVED = ("", ".", "..", "zarr.json")  # by Zarr or by file systems
_UNSTORABLE = frozenset("/\\\0")  # zarr-python turns a backslash into a slash


def in_threads(array: Any) -> Any:
    """Wraps a one-dimensional gzip dataset so that it decompresses in several threads; returns other arrays as is."""
    if not isinstance(array, h5py.Dataset) or array.chunks is None or array.ndim != 1 or not is_of_numpy(array):
        return array
    filters = array.id.get_create_plist()
    kinds = [filters.get_filter(number)[0] for number in range(filters.get_nfilters())]
    return GzipDataset(array, shuffled=_SHUFFLE in kinds) if kinds in ([_DEFLATE], [_SHUFFLE, _DEFLATE]) else array


class GzipDataset:
    """A one-dimensional gzip dataset with the slices of h5py's. Raises OSError for a chunk that does not inflate."""

    def __init__(self, dataset: h5py.Dataset, *, shuffled: bool) -> None:
        self._dataset = dataset
        self.shape, self.dtype, self.chunks = dataset.shape, dataset.dtype, dataset.chunks
        self._unshuffle = numcodecs.Shuffle(dataset.dtype.itemsize).decode if shuffled else None

    def __getitem__(self, items: slice) -> NDArray[Any]:
        start, stop, _ = items.indices(self.shape[0])
        length = self.chunks[0]
        chunks = range(start // length, -(-stop // length))
        out = np.empty(max(0, stop - start), self.dtype)

        def inflate(chunk: int, stored: bytes | None) -> None:
            first = chunk * length
            begin, end = max(start, first), min(stop, first + length)
            if stored is None:
                out[begin - start : end - start] = self._dataset.fillvalue
            else:
                out[begin - start : end - start] = self._inflated(stored)[begin - first : end - first]

        with ThreadPoolExecutor(
            min(os.cpu_count() or 1, _MAX_THREADS), thread_name_prefix="zloader-inflate"
        ) as threads:
            jobs = [threads.submit(inflate, chunk, self._stored(chunk * length)) for chunk in chunks]
            for job in jobs:
                job.result()
        return out

    def _stored(self, first: int) -> bytes | None:
        """The compressed bytes of the chunk that starts at element `first`; None if it was never written."""
        identifier = self._dataset.id
        if identifier.get_chunk_info_by_coord((first,)).byte_offset is None:
            return None
        skipped_filters, stored = identifier.read_direct_chunk((first,))
        if skipped_filters:
            raise OSError(f"the chunk at {first} was stored without some of its filters")
        return bytes(stored)

    def _inflated(self, stored: bytes) -> NDArray[Any]:
        size = self.chunks[0] * self.dtype.itemsize
        stream = zlib.decompressobj()
        try:
            plain: Any = stream.decompress(stored, size + 1)
        except zlib.error as error:
            raise OSError(f"a chunk does not inflate: {error}") from error
        if len(plain) != size or not stream.eof:
            raise OSError(f"a chunk does not inflate to {size} bytes, but to at least {len(plain)}")
        return np.frombuffer(plain if self._unshuffle is None else self._unshuffle(plain), self.dtype)


_ENCODINGS = {"csr_matrix": "csr", "csc_matrix": "csc", "array": "dense"}


@contextlib.contextmanager
def reading(
    at: str,
    doing: str = "cannot be read",
    damaged: Callable[[], str | None] = lambda: None,
    *,
    needs: str = 'it needs a newer anndata or an HDF5 filter: pip install "zloader[hdf5]"',
) -> Iterator[None]:
    """Turns any exception that a library raises for a damaged source into a SourceError.

    `at` names the source and the element. `damaged` returns the key of the damaged object, or None. `needs` says which
    other library may read it.
    """
    try:
        yield
    except FormatError as error:
        raise SourceError(str(error)) from error
    except ZloaderError:
        raise  # an unreachable remote source is not damaged
    except Exception as error:
        try:
            key = damaged()
        except FormatError as stale:
            raise SourceError(str(stale)) from error
        where = "" if key is None else f", in {key}"
        raise SourceError(
            f"{at} {doing}{where} ({type(error).__name__}: {error}): the source is damaged or incomplete, or " + needs
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

    def names(self) -> list[str]:
        """The sorted names of the direct members of a group."""
        with reading(self.at):
            return sorted(map(str, self.native))  # h5py returns bytes for names that are not UTF-8

    @property
    def attrs(self) -> Mapping[str, Any]:
        """All attributes. HDF5 may have text in them of a fixed length, which h5py returns as bytes."""
        with reading(self.at):
            return {name: _decoded(value) for name, value in getattr(self.native, "attrs", {}).items()}

    @property
    def is_array(self) -> bool:
        """Whether this is an array, not a group."""
        with reading(self.at):
            return hasattr(self.native, "dtype")

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
        encoding = str(self.attrs.get("encoding-type", "array" if self.is_array else "unknown"))
        return _ENCODINGS.get(encoding, encoding)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an array or matrix."""
        with reading(self.at, "has a shape that cannot be read"):
            shape = self.native.shape if hasattr(self.native, "shape") else self.attrs.get("shape")
            if shape is None:
                raise SourceError(f"{self.at} has no shape: the file is damaged")
            return tuple(int(size) for size in shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype as stored."""
        with reading(self.at):
            dtype: np.dtype[Any] = np.dtype(self.native.dtype)
        return dtype

    @property
    def number_dtype(self) -> np.dtype[Any]:
        """The dtype in native byte order. Raises SourceError unless it is bool, integer or float of at most 64 bits."""
        dtype = self.dtype
        if dtype.kind not in "biuf" or dtype.itemsize > 8:
            raise SourceError(
                f"{self.at} holds {dtype}, not real numbers of at most 64 bits: convert it, for example to float32"
            )
        native: np.dtype[Any] = dtype.newbyteorder("=")
        return native

    @property
    def rows_stored_together(self) -> int:
        """The chunk length along the first axis; 1 if the array is not chunked."""
        with reading(self.at):
            chunks = getattr(self.native, "chunks", None)
            return int(chunks[0]) if chunks else 1

    def in_threads(self) -> Node:
        """This node, read in several threads if it is a one-dimensional gzip dataset."""
        with reading(self.at):
            return Node(in_threads(self.native), self.source, self.path)

    def numbers(self, start: int, stop: int) -> NDArray[Any]:
        """Items `[start, stop)` of an array of numbers along its first axis, in native byte order."""
        dtype = self.number_dtype
        damaged = partial(self._damaged_key, start, stop)
        with reading(self.at, f"cannot be read at {start} to {stop}", damaged):
            return np.asarray(self.native[start:stop], dtype)

    def _damaged_key(self, start: int = 0, stop: int | None = None) -> str | None:
        require_fresh(self.native, self.source)
        return undecodable_key(self.native, start, stop)

    def element(self) -> Any:
        """The whole element, as anndata reads it."""
        damaged = self._damaged_key
        with reading(self.at, "cannot be read by anndata", damaged), warnings.catch_warnings():
            warnings.simplefilter("ignore", ad.OldFormatWarning)  # convert writes the new format
            return read_hdf5_element(self.native)


def _decoded(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    is_bytes = isinstance(value, np.ndarray) and value.dtype.kind == "S"
    return np.char.decode(value, "utf-8", "replace") if is_bytes else value


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
