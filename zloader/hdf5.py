"""An .h5ad file's datasets, read in windows and checked: nothing of it is believed.

Every error says file, dataset and row.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from zloader.errors import AccessDeniedError, SourceError, StoreNotFoundError
from zloader.terms import Rows

_INDPTR_ROWS = 1 << 20  # entries of indptr held at once


def open_h5ad(path: Path) -> h5py.File:
    """Opens an AnnData file for reading; raises StoreNotFoundError, AccessDeniedError or SourceError."""
    if not path.exists():
        raise StoreNotFoundError(f"there is no file {path}")
    if path.is_dir():
        raise SourceError(f"{path} is a directory: convert reads .h5ad files")
    try:
        with path.open("rb"):
            pass
    except PermissionError as error:
        raise AccessDeniedError(f"not allowed to read {path}: {error.strerror}") from error
    if not h5py.is_hdf5(path):
        raise SourceError(f"{path} is not an HDF5 file, so not an .h5ad either")
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise SourceError(f"{path} cannot be opened ({error}): was it cut short while it was copied?") from error
    missing = [key for key in ("obs", "var", "X") if key not in file]
    if missing:
        there = ", ".join(sorted(file)) or "nothing"
        file.close()
        raise SourceError(f"{path} has no {' and no '.join(missing)}: not an AnnData to train on. It holds: {there}")
    if isinstance(file["obs"], h5py.Dataset):
        file.close()
        raise SourceError(f"{path} was written by anndata before 0.7: read_h5ad and write_h5ad it with a newer one")
    return file


class CompressedArrays:
    """The three datasets of a CSR or CSC group, read in windows along the compressed (`major`) axis.

    `axes` names the major and the minor axis in messages; `element_bytes` is what an element costs in memory.
    """

    def __init__(self, group: h5py.Group, *, axes: tuple[str, str], major: int, minor: int) -> None:
        missing = [name for name in ("indptr", "indices", "data") if name not in group]
        self._at = f"{group.file.filename}: {group.name.strip('/')}"
        if missing:
            raise SourceError(f"{self._at} has no {missing[0]}: the file is damaged")
        self.indptr, self.indices, self.data = (group[name] for name in ("indptr", "indices", "data"))
        self._axes, self._major, self._minor = axes, major, minor
        self.dtype = numeric_dtype(self.data)
        if self.indices.dtype.kind not in "iu" or self.indptr.dtype.kind not in "iu":
            raise SourceError(f"{self._at}/indices and indptr must hold whole numbers: the file is damaged")
        self.n_values = int(self.data.shape[0])
        self.element_bytes = int(self.dtype.itemsize + self.indices.dtype.itemsize)
        self._check_ends()

    def _check_ends(self) -> None:
        if self.indptr.shape != (self._major + 1,) or self.indices.shape != self.data.shape:
            raise SourceError(
                f"{self._at} has {self._major} {self._axes[0]}s, but {self.indptr.shape[0]} entries in indptr, "
                f"{self.indices.shape[0]} in indices and {self.data.shape[0]} in data: the file is damaged"
            )
        first, last = (int(read_items(self.indptr, at, at + 1)[0]) for at in (0, self._major))
        if first != 0:
            raise SourceError(f"{self._at}/indptr starts at {first}, not 0, at {self._axes[0]} 0: the file is damaged")
        if last != self.n_values:
            raise SourceError(
                f"{self._at}/indptr ends at {last} after {self._axes[0]} {self._major - 1}, but {self.n_values} values "
                "are stored: the file is damaged"
            )

    def windows(self, max_elements: int) -> Iterator[tuple[int, Rows, NDArray[np.integer], NDArray[Any]]]:
        """First major number, relative indptr, minor numbers and values of successive windows."""
        for start in range(0, self._major, _INDPTR_ROWS):
            indptr = self._checked_indptr(start, min(start + _INDPTR_ROWS, self._major))
            for first, last in split_rows(indptr, max_elements):
                begin, end = int(indptr[first]), int(indptr[last])
                relative = indptr[first : last + 1] - begin
                minor = read_items(self.indices, begin, end)
                self._check_minor(minor, relative, start + first)
                yield start + first, relative, minor, read_items(self.data, begin, end)

    def _checked_indptr(self, start: int, stop: int) -> Rows:
        indptr = read_items(self.indptr, start, stop + 1).astype(np.int64)
        wrong = np.flatnonzero((indptr[1:] < indptr[:-1]) | (indptr[1:] > self.n_values))
        if len(wrong):
            row = int(wrong[0])
            raise SourceError(
                f"{self._at}/indptr goes from {indptr[row]} to {indptr[row + 1]} at {self._axes[0]} {start + row} "
                f"({self.n_values} values are stored): the file is damaged"
            )
        return indptr

    def _check_minor(self, minor: NDArray[np.integer], indptr: Rows, first: int) -> None:
        if len(minor) == 0 or (minor.min() >= 0 and minor.max() < self._minor):
            return
        at = int(np.flatnonzero((minor < 0) | (minor >= self._minor))[0])
        major = first + int(np.searchsorted(indptr, at, side="right")) - 1
        raise SourceError(
            f"{self._at}: {self._axes[0]} {major} has a value for {self._axes[1]} {minor[at]}, but there are only the "
            f"{self._axes[1]}s 0 to {self._minor - 1}: the file is damaged"
        )


def split_rows(indptr: Rows, max_elements: int) -> Iterator[tuple[int, int]]:
    """Cuts rows into runs `[first, last)` of at most `max_elements` values, or of one row that has more."""
    first, n_rows = 0, len(indptr) - 1
    while first < n_rows:
        last = int(np.searchsorted(indptr, indptr[first] + max_elements, side="right")) - 1
        last = min(max(last, first + 1), n_rows)
        yield first, last
        first = last


def numeric_dtype(dataset: h5py.Dataset) -> np.dtype[Any]:
    """Its dtype in native byte order. Raises SourceError when it is not bool, integer or float."""
    dtype = np.dtype(dataset.dtype)
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise SourceError(f"{dataset.file.filename}: {dataset.name.strip('/')} holds {dtype}, not numbers")
    native: np.dtype[Any] = dtype.newbyteorder("=")
    return native


def read_items(dataset: h5py.Dataset, start: int, stop: int) -> NDArray[Any]:
    """Items `[start, stop)` along the first axis, in native byte order. Raises SourceError."""
    try:
        stored = dataset[start:stop]
    except (OSError, RuntimeError) as error:
        raise SourceError(
            f"{dataset.file.filename}: {dataset.name.strip('/')} cannot be read at {start} to {stop} ({error}): "
            "the file is damaged, or compressed with a filter that needs a plugin (pip install hdf5plugin)"
        ) from error
    return np.asarray(stored, dataset.dtype.newbyteorder("="))
