"""The port between what is converted or compared and what does it: an AnnData, read matrix by matrix and in windows.

`convert` stores the parts that `open_parts` of sources.py gives, and `verify` compares those of two sources.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from zloader.common.records import Rows


@dataclass(frozen=True, kw_only=True)
class Window:
    """Consecutive rows of a matrix: `lengths` (values per row), `genes` (ascending and unique in a row) and `values`.

    A dense window has all values of its rows, row after row, and no `genes`. `mended` are the rows of the window whose
    genes were not ascending and unique where they were read.
    """

    lengths: Rows
    genes: NDArray[np.integer]
    values: NDArray[Any]
    mended: Rows = field(default_factory=lambda: np.zeros(0, np.int64))

    def between(self, first: int, last: int) -> Window:
        """The rows from `first` to the one before `last`."""
        begin, end = int(self.lengths[:first].sum()), int(self.lengths[:last].sum())
        mended = self.mended[(self.mended >= first) & (self.mended < last)] - first
        return Window(
            lengths=self.lengths[first:last], genes=self.genes[begin:end], values=self.values[begin:end], mended=mended
        )


class Matrix(ABC):
    """One matrix to be stored. A context manager: on exit it removes its temporary files.

    `name` is its path in the store: "X", "layers/counts", "raw/X", "obsm/X_pca" or "obsp/distances". `dtype` and
    `genes_dtype` are the dtypes in the source. `n_stored` is the number of values stored there or a larger one, or None
    if only reading all of them tells it.
    """

    dense: bool
    n_stored: int | None
    dtype: np.dtype[Any]
    genes_dtype: np.dtype[Any]

    def __init__(self, name: str, *, n_rows: int, n_genes: int) -> None:
        self.name, self.n_rows, self.n_genes = name, n_rows, n_genes

    @abstractmethod
    def windows(self, first_row: int = 0) -> Iterator[Window]:
        """The rows from `first_row` on, in order, in windows of at most about 16 MiB or a single row.

        Raises SourceError that names the row.
        """

    def rows(self, start: int, stop: int) -> Window:
        """Some consecutive rows."""
        found, row = [], start
        for window in self.windows(start) if start < stop else ():
            found.append(window.between(0, stop - row))
            row += len(found[-1].lengths)
            if row >= stop:
                break
        return joined(found, self)

    def sample(self) -> Iterator[Window]:
        """Some rows from all over the matrix, if they can be read without reading all. They need not be canonical."""
        return itertools.islice(self.windows(), 2)

    def close(self) -> None:  # noqa: B027
        """Frees temporary files and memory."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def joined(windows: Sequence[Window], matrix: Matrix) -> Window:
    """Consecutive windows of a matrix as one, without what was mended."""
    empty = {"lengths": np.zeros(0, np.int64), "genes": np.zeros(0, np.int64), "values": np.zeros(0, matrix.dtype)}
    return Window(
        **{name: np.concatenate([getattr(window, name) for window in windows] or [of]) for name, of in empty.items()}
    )


class Content(ABC):
    """One AnnData to be stored: its `n_rows`, `var`, `raw_var` (None without raw) and the names of its `obs_columns`.

    `dropped` lists the elements that several sources cannot be joined on; it is complete once `elements` has been
    exhausted. `groups` are stored even if they are empty, each with attributes of its own. All methods raise
    SourceError, or StoreError if bytes cannot be fetched.
    """

    n_rows: int
    var: pd.DataFrame
    raw_var: pd.DataFrame | None
    obs_columns: list[str]
    dropped: list[str]
    groups: Mapping[str, Mapping[str, Any]]

    @abstractmethod
    def obs_names(self) -> pd.Index:
        """The index of obs, with its name."""

    @abstractmethod
    def obs_column(self, name: str) -> pd.Series:
        """One column of obs with a RangeIndex, in a dtype that can be stored."""

    @abstractmethod
    def matrices(self) -> Iterator[Matrix]:
        """X, the layers, raw/X, the dense arrays of obsm and the CSR matrices of obsp, none of them read yet."""

    @abstractmethod
    def elements(self) -> Iterator[tuple[str, Any]]:
        """The paths and values of everything else but obs, var and raw/var, as anndata writes them."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What is stored in one group, whose `path` is empty for the root, with these `attributes`.

    An AnnData has one part. Of a MuData the root is the first, and each modality is another one, at `mod/NAME`.
    """

    path: str
    content: Content
    attributes: Mapping[str, Any]

    def at(self, path: str) -> str:
        """The path in the store of one of its elements."""
        return f"{self.path}/{path}" if self.path else path


@dataclass(frozen=True, kw_only=True)
class Opened:
    """What the sources of a conversion are, and the `parts` that are stored of them, the root first.

    `names`, `labels` and `n_rows` are those of each source. `bytes_in` is stored bytes. `identity` changes when a
    source changes; None if nothing tells, as of an AnnData in memory.
    """

    names: Sequence[str]
    labels: Sequence[str]
    n_rows: Sequence[int]
    bytes_in: int
    identity: Any
    parts: Sequence[Part]
