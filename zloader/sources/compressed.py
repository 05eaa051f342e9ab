"""The arrays of a source, read in windows and checked: nothing of them is believed.

They are h5py datasets, zarr arrays or NumPy arrays: whatever has a shape, a dtype and slices. Every error says source,
array and row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.access.implied import UNDECODABLE, undecodable_key
from zloader.errors import SourceError, ZloaderError
from zloader.sources.hdf5 import in_threads
from zloader.terms import Rows

_INDPTR_ROWS = 1 << 20  # entries of indptr held at once


@dataclass(frozen=True, kw_only=True)
class SourceArray:
    """One array of a source; `at` names it in messages, such as `plate1.h5ad: X/data`."""

    stored: Any
    at: str

    @property
    def shape(self) -> tuple[int, ...]:
        """As stored."""
        return tuple(int(size) for size in self.stored.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype in native byte order. Raises SourceError when it is not bool, integer or float."""
        dtype = np.dtype(self.stored.dtype)
        if dtype.kind not in "biuf" or dtype.itemsize > 8:
            raise SourceError(f"{self.at} holds {dtype}, not numbers")
        native: np.dtype[Any] = dtype.newbyteorder("=")
        return native

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Items `[start, stop)` along the first axis, in native byte order. Raises SourceError."""
        try:
            items = self.stored[start:stop]
        except ZloaderError:
            raise  # a remote source that cannot be reached is not damaged
        except (*UNDECODABLE, OSError) as error:
            key = undecodable_key(self.stored, start, stop)
            where = "" if key is None else f", in {key}"
            raise SourceError(
                f"{self.at} cannot be read at {start} to {stop}{where} ({error}): the file is damaged, or compressed "
                "with a filter that needs a plugin (pip install hdf5plugin)"
            ) from error
        return np.asarray(items, self.dtype)


class CompressedArrays:
    """The three arrays of a CSR or CSC matrix, read in windows along the compressed (`major`) axis.

    `axes` names the major and the minor axis in messages; `element_bytes` is what an element costs in memory.
    """

    def __init__(self, group: Any, *, at: str, axes: tuple[str, str], major: int, minor: int) -> None:
        """`group` has indptr, indices and data as items (HDF5, Zarr) or as attributes (scipy)."""
        self._at, self._axes, self._major, self._minor = at, axes, major, minor
        self.indptr, self.indices, self.data = (self._part(group, name) for name in ("indptr", "indices", "data"))
        self.dtype = self.data.dtype
        if self.indices.dtype.kind not in "iu" or self.indptr.dtype.kind not in "iu":
            raise SourceError(f"{self._at}/indices and indptr must hold whole numbers: the file is damaged")
        self.n_values = self.data.shape[0]
        self.element_bytes = self.dtype.itemsize + self.indices.dtype.itemsize
        self._check_ends()

    def _part(self, group: Any, name: str) -> SourceArray:
        if hasattr(group, name):
            return SourceArray(stored=getattr(group, name), at=f"{self._at}/{name}")
        if name not in group:
            raise SourceError(f"{self._at} has no {name}: the file is damaged")
        return SourceArray(stored=in_threads(group[name]), at=f"{self._at}/{name}")

    def _check_ends(self) -> None:
        if self.indptr.shape != (self._major + 1,) or self.indices.shape != self.data.shape:
            raise SourceError(
                f"{self._at} has {self._major} {self._axes[0]}s, but {self.indptr.shape[0]} entries in indptr, "
                f"{self.indices.shape[0]} in indices and {self.data.shape[0]} in data: the file is damaged"
            )
        first, last = (int(self.indptr.read(at, at + 1)[0]) for at in (0, self._major))
        if first != 0:
            raise SourceError(f"{self._at}/indptr starts at {first}, not 0, at {self._axes[0]} 0: the file is damaged")
        if last != self.n_values:
            raise SourceError(
                f"{self._at}/indptr ends at {last} after {self._axes[0]} {self._major - 1}, but {self.n_values} values "
                "are stored: the file is damaged"
            )

    def windows(
        self, max_elements: int, first: int = 0, *, whole: bool = True
    ) -> Iterator[tuple[int, Rows, NDArray[np.integer], NDArray[Any]]]:
        """First major number, relative indptr, minor numbers and values of successive windows, from `first` on.

        A major line with more than `max_elements` is a window of its own or, unless `whole`, several in turn.
        """
        for start in range(first, self._major, _INDPTR_ROWS):
            indptr = self._checked_indptr(start, min(start + _INDPTR_ROWS, self._major))
            for first_line, last_line in split_rows(indptr, max_elements):
                ends = indptr[first_line : last_line + 1]
                begin, end = int(ends[0]), int(ends[-1])
                step = max(1, end - begin if whole else max_elements)
                for piece in range(begin, end, step) or [begin]:
                    piece_end = min(piece + step, end)
                    relative = np.clip(ends, piece, piece_end) - piece
                    minor = self.indices.read(piece, piece_end)
                    self._check_minor(minor, relative, start + first_line)
                    yield start + first_line, relative, minor, self.data.read(piece, piece_end)

    def _checked_indptr(self, start: int, stop: int) -> Rows:
        indptr = self.indptr.read(start, stop + 1).astype(np.int64)
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
