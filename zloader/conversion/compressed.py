"""The three arrays of a CSC matrix, read in windows of columns. All values of indptr and indices are checked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.errors import SourceError
from zloader.common.records import Rows
from zloader.conversion.nodes import Node
from zloader.conversion.port import Window
from zloader.conversion.rows import split_rows

_INDPTR_ROWS = 1 << 20  # entries of indptr in memory at a time


def skip_rows(windows: Iterator[Window], first_row: int) -> Iterator[Window]:
    """Drops the first `first_row` rows of windows of consecutive rows."""
    for window in windows:
        if first_row < len(window.lengths):
            yield window.between(first_row, len(window.lengths)) if first_row else window
        first_row = max(0, first_row - len(window.lengths))


class CompressedArrays:
    """The three arrays of a CSR or CSC matrix, read in windows along the compressed (`major`) axis.

    `axes` names the major and minor axis in messages. `element_bytes` is the memory per element.
    """

    def __init__(self, matrix: Node, *, axes: tuple[str, str], major: int, minor: int) -> None:
        self.at, self._axes, self._major, self._minor = matrix.at, axes, major, minor
        self.indptr, self.indices, self.data = (matrix[name] for name in ("indptr", "indices", "data"))
        self.dtype, self.genes_dtype, self.indptr_dtype = (
            part.number_dtype for part in (self.data, self.indices, self.indptr)
        )
        if self.genes_dtype.kind not in "iu" or self.indptr_dtype.kind not in "iu":
            raise SourceError(f"{self.at}/indices and indptr must hold integers: the file is damaged")
        self.n_values = math.prod(self.data.shape)
        self.element_bytes = self.dtype.itemsize + self.genes_dtype.itemsize
        self._check_ends()

    def _check_ends(self) -> None:
        entries, *of_values = (part.shape for part in (self.indptr, self.indices, self.data))
        if entries != (self._major + 1,) or of_values != [(self.n_values,)] * 2:
            found = [" x ".join(map(str, shape)) or "no" for shape in (entries, *of_values)]
            raise SourceError(
                f"{self.at} has {self._major} {self._axes[0]}s, but {found[0]} entries in indptr, {found[1]} in "
                f"indices and {found[2]} in data: the file is damaged"
            )
        first, last = (int(self.indptr.numbers(at, at + 1)[0]) for at in (0, self._major))
        if first != 0:
            raise SourceError(f"{self.at}/indptr starts at {first}, not 0, at {self._axes[0]} 0: the file is damaged")
        if last != self.n_values:
            raise SourceError(
                f"{self.at}/indptr ends at {last} after {self._axes[0]} {self._major - 1}, but {self.n_values} values "
                "are stored: the file is damaged"
            )

    def windows(
        self, max_elements: int, first: int = 0, *, whole: bool = True, indptr_rows: int = _INDPTR_ROWS
    ) -> Iterator[tuple[int, Rows, NDArray[np.integer], NDArray[Any]]]:
        """Yields windows from major number `first` on: first major number, relative indptr, minor numbers and values.

        A row of the major axis with more than `max_elements` values becomes one window, or several unless `whole`.
        """
        for start in range(first, self._major, indptr_rows):
            indptr = self._checked_indptr(start, min(start + indptr_rows, self._major))
            for first_line, last_line in split_rows(indptr, max_elements):
                ends = indptr[first_line : last_line + 1]
                begin, end = int(ends[0]), int(ends[-1])
                step = max(1, end - begin if whole else max_elements)
                for piece in range(begin, end, step) or [begin]:
                    piece_end = min(piece + step, end)
                    relative = np.clip(ends, piece, piece_end) - piece
                    minor = self.indices.numbers(piece, piece_end)
                    self._check_minor(minor, relative, start + first_line)
                    yield start + first_line, relative, minor, self.data.numbers(piece, piece_end)

    def _checked_indptr(self, start: int, stop: int) -> Rows:
        indptr = self.indptr.numbers(start, stop + 1).astype(np.int64)
        wrong = np.flatnonzero((indptr[1:] < indptr[:-1]) | (indptr[1:] > self.n_values))
        if len(wrong):
            row = int(wrong[0])
            raise SourceError(
                f"{self.at}/indptr goes from {indptr[row]} to {indptr[row + 1]} at {self._axes[0]} {start + row} "
                f"({self.n_values} values are stored): the file is damaged"
            )
        return indptr

    def _check_minor(self, minor: NDArray[np.integer], indptr: Rows, first: int) -> None:
        if len(minor) == 0 or (minor.min() >= 0 and minor.max() < self._minor):
            return
        at = int(np.flatnonzero((minor < 0) | (minor >= self._minor))[0])
        major = first + int(np.searchsorted(indptr, at, side="right")) - 1
        raise SourceError(
            f"{self.at}: {self._axes[0]} {major} has a value for {self._axes[1]} {minor[at]}, but {self._axes[1]}s "
            f"range from 0 to {self._minor - 1}: the file is damaged"
        )
