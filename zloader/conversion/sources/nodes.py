"""Groups and arrays of a source, in HDF5, Zarr or memory: the one place where their libraries are asked for anything.

A file that is damaged makes h5py, zarr, anndata, pandas and codecs raise errors of all kinds, some of them for a mere
look at an attribute. Each becomes a SourceError here that names the file and the element.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse
from numpy.typing import NDArray

from zloader.access.implied_objects import undecodable_key
from zloader.common.errors import FormatError, SourceError, ZloaderError
from zloader.conversion.sources.hdf5 import in_threads

_ENCODINGS = {"csr_matrix": "csr", "csc_matrix": "csc", "array": "dense"}


@contextlib.contextmanager
def reading(at: str, doing: str = "cannot be read", damaged: Callable[[], str | None] = lambda: None) -> Iterator[None]:
    """Turns whatever the libraries raise for a damaged source into a SourceError.

    `at` names the source and the place in it; `damaged` finds the stored object to blame, where there is one.
    """
    try:
        yield
    except FormatError as error:
        raise SourceError(str(error)) from error
    except ZloaderError:
        raise  # a remote source that cannot be reached is not damaged
    except Exception as error:
        key = damaged()
        where = "" if key is None else f", in {key}"
        raise SourceError(
            f"{at} {doing}{where} ({type(error).__name__}: {error}): the source is damaged or incomplete, or it needs "
            "a newer anndata or a filter of HDF5 (pip install hdf5plugin)"
        ) from error


class Node:
    """A group or array, or an element in memory. `at` names it in messages, such as `plate1.h5ad: X/data`.

    Everything raises SourceError, or a StoreError where bytes cannot be had.
    """

    def __init__(self, native: Any, source: str, path: str = "") -> None:
        """`native` is what its library has: of h5py, zarr, numpy, scipy, pandas ..."""
        self.native, self.source, self.path = native, source, path
        self.at = f"{source}: {path}" if path else source

    def __contains__(self, name: str) -> bool:
        with reading(self.at):
            return hasattr(self.native, name) if scipy.sparse.issparse(self.native) else name in self.native

    def __getitem__(self, name: str) -> Node:
        """The group or array at a path below. Of a sparse matrix in memory, one of its three arrays."""
        below = f"{self.path}/{name}".lstrip("/")
        if name not in self:
            raise SourceError(f"{self.at} has no {name}: the file is damaged")
        with reading(f"{self.source}: {below}"):
            native = getattr(self.native, name) if scipy.sparse.issparse(self.native) else self.native[name]
        return Node(native, self.source, below)

    def names(self) -> list[str]:
        """What lies directly below a group, sorted."""
        with reading(self.at):
            return sorted(map(str, self.native))  # bytes are not text to h5py

    @property
    def attrs(self) -> Mapping[str, Any]:
        """All attributes."""
        with reading(self.at):
            return dict(getattr(self.native, "attrs", {}))

    @property
    def is_array(self) -> bool:
        """Whether it has values of its own."""
        with reading(self.at):
            return hasattr(self.native, "dtype")

    @property
    def encoding(self) -> str:
        """`csr`, `csc` or `dense`; of what is no matrix, its encoding-type or, in memory, a name of its type."""
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
        """That of an array or matrix."""
        with reading(self.at, "has a shape that cannot be read"):
            shape = self.native.shape if hasattr(self.native, "shape") else self.attrs.get("shape")
            if shape is None:
                raise SourceError(f"{self.at} has no shape: the file is damaged")
            return tuple(int(size) for size in shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """As stored."""
        with reading(self.at):
            dtype: np.dtype[Any] = np.dtype(self.native.dtype)
        return dtype

    @property
    def number_dtype(self) -> np.dtype[Any]:
        """The dtype in native byte order. Raises SourceError when it is not bool, integer or float."""
        dtype = self.dtype
        if dtype.kind not in "biuf" or dtype.itemsize > 8:
            raise SourceError(
                f"{self.at} holds {dtype}, not real numbers of at most 64 bits: store it as such, float32 for example"
            )
        native: np.dtype[Any] = dtype.newbyteorder("=")
        return native

    @property
    def rows_stored_together(self) -> int:
        """The length of a chunk; 1 where there are none."""
        with reading(self.at):
            chunks = getattr(self.native, "chunks", None)
            return int(chunks[0]) if chunks else 1

    def in_threads(self) -> Node:
        """The same, read in several threads where it is a flat gzip dataset."""
        with reading(self.at):
            return Node(in_threads(self.native), self.source, self.path)

    def numbers(self, start: int, stop: int) -> NDArray[Any]:
        """Items `[start, stop)` of an array of numbers along its first axis, in native byte order."""
        dtype = self.number_dtype
        damaged = partial(undecodable_key, self.native, start, stop)
        with reading(self.at, f"cannot be read at {start} to {stop}", damaged):
            return np.asarray(self.native[start:stop], dtype)

    def element(self) -> Any:
        """All of it, as anndata reads it."""
        damaged = partial(undecodable_key, self.native)
        with reading(self.at, "cannot be read by anndata", damaged), warnings.catch_warnings():
            warnings.simplefilter("ignore", ad.OldFormatWarning)  # what is written is in the new one
            return ad.io.read_elem(self.native)
