"""`zl.RowSource`: a format of the user's own as a source of a conversion, read some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse

from zloader.common.errors import SourceError
from zloader.conversion.sources.anndata_input import MemoryInput
from zloader.conversion.sources.nodes import reading
from zloader.conversion.sources.windows import SourceMatrix, Window, canonical

_MOST_BYTES = 16 << 20  # of a window, as of other sources
_FIRST_ROWS = 256  # of the window that tells how long rows are
_ROW_BYTES = 64  # at least, so that empty rows do not make endless windows


@runtime_checkable
class RowSource(Protocol):
    """Cells in a format of your own, as a source of `zl.convert`, `zl.append` and `zl.verify`.

    Attributes:
        n_obs: The number of cells.
        obs: A data frame with a row for each cell, whose index has the names of the cells.
        var: A data frame with a row for each gene, whose index has the names of the genes.

    `rows(start, stop)` returns the counts of cells `start` to `stop - 1` as a scipy CSR matrix or array, cells x genes,
    the same at every call. It is called for all cells in order, and more than once: first to check all values, and then
    to store them. Genes of a cell may come in any order, and the values of a repeated gene are added up.

    Two more attributes are optional. `n_values` is the number of stored values. Without it, they are counted first,
    which reads all cells once more. `fingerprint` is text that changes when the cells change. With it, an interrupted
    conversion can be resumed.

    >>> import numpy as np, pandas as pd, scipy.sparse
    >>> import zloader as zl
    >>> class Counts:
    ...     n_obs, obs, var = 2, pd.DataFrame(index=["cell1", "cell2"]), pd.DataFrame(index=["gene1", "gene2"])
    ...     def rows(self, start, stop):
    ...         return scipy.sparse.csr_matrix(np.array([[0, 3], [1, 2]])[start:stop])
    >>> zl.convert(Counts(), "counts.zarr").values
    3
    """

    n_obs: int
    obs: pd.DataFrame
    var: pd.DataFrame

    def rows(self, start: int, stop: int) -> Any:
        """The counts of cells `start` to `stop - 1`, cells x genes."""


class RowInput(MemoryInput):
    """A RowSource. Its obs and var are in memory, and its X is read in windows."""

    def __init__(self, source: RowSource, name: str) -> None:
        for frame in ("obs", "var"):
            if not isinstance(getattr(source, frame), pd.DataFrame):
                raise SourceError(f"{frame} of {name} is a {type(getattr(source, frame)).__name__}, not a data frame")
        if len(source.obs) != source.n_obs:
            raise SourceError(f"{name} has n_obs={source.n_obs!r}, but obs has {len(source.obs)} rows")
        super().__init__(ad.AnnData(obs=source.obs, var=source.var), name, type(source).__name__)
        self._source = source

    @cached_property
    def _n_values(self) -> int:
        """The number of stored values, as the source states it, or else counted."""
        stated = getattr(self._source, "n_values", None)
        if stated is not None:
            return int(stated)
        shape = (self.n_rows, self.n_genes)
        matrix = _RowMatrix(self._source, self.name, "X", lambda: 0, shape=shape, window_bytes=_MOST_BYTES)
        return sum(counts.nnz for _, counts in matrix.pieces(0))

    def identity(self) -> dict[str, Any]:
        fingerprint = getattr(self._source, "fingerprint", None)
        return {} if fingerprint is None else {"name": self.name, "bytes": 0, "digest": str(fingerprint)}

    def __contains__(self, path: str) -> bool:
        return path == "X" or super().__contains__(path)

    def matrix(self, path: str, name: str, *, shape: tuple[int, int], window_bytes: int) -> SourceMatrix:
        if path != "X":
            return super().matrix(path, name, shape=shape, window_bytes=window_bytes)
        return _RowMatrix(self._source, self.name, name, lambda: self._n_values, shape=shape, window_bytes=window_bytes)


class _RowMatrix(SourceMatrix):
    """The counts of a RowSource."""

    encoding = "csr"

    def __init__(
        self,
        source: RowSource,
        source_name: str,
        name: str,
        n_values: Callable[[], int],
        *,
        shape: tuple[int, int],
        window_bytes: int,
    ) -> None:
        """`n_values` is asked for only if it is needed, because the values may have to be counted."""
        super().__init__(name, n_rows=shape[0], n_genes=shape[1])
        self._source, self._at, self._n_values = source, f"{source_name}: rows", n_values
        self._bytes = min(window_bytes, _MOST_BYTES)
        first = self._read(0, min(1, self.n_rows))
        self.dtype, self.genes_dtype, self.indptr_dtype = first.dtype, first.indices.dtype, np.dtype(np.int64)

    @property
    def n_stored(self) -> int:  # type: ignore[override]
        return self._n_values()

    def windows(self, first_row: int = 0) -> Iterator[Window]:
        n_values = 0
        for start, counts in self.pieces(first_row):
            n_values += counts.nnz
            yield canonical(counts.indptr.astype(np.int64), counts.indices, counts.data, at=self._at, first_row=start)
        if not first_row and n_values != self.n_stored:
            raise SourceError(
                f"{self._at} returned {n_values} values in all, but n_values is {self.n_stored}, or so many were "
                "counted before: return the same at every call"
            )

    def pieces(self, first_row: int) -> Iterator[tuple[int, Any]]:
        """The counts from a row on, in pieces of about the same bytes, each with its first row."""
        start, step = first_row, _FIRST_ROWS
        while start < self.n_rows:
            counts = self._read(start, min(start + step, self.n_rows))
            yield start, counts
            start += step
            row_bytes = (counts.data.nbytes + counts.indices.nbytes) / counts.shape[0]
            step = max(1, int(self._bytes / max(_ROW_BYTES, row_bytes)))

    def _read(self, start: int, stop: int) -> Any:
        """Some rows, as they have to be. Raises SourceError."""
        at = f"{self._at}({start}, {stop})"
        with reading(at):
            counts = self._source.rows(start, stop)
        if not scipy.sparse.issparse(counts) or counts.format != "csr":
            raise SourceError(f"{at} returned a {type(counts).__name__}, not a CSR matrix of scipy.sparse")
        if counts.shape != (stop - start, self.n_genes):
            raise SourceError(f"{at} returned {counts.shape}, not {(stop - start, self.n_genes)}: cells x genes")
        indptr, genes = counts.indptr, counts.indices
        if indptr[0] or indptr[-1] > min(len(genes), len(counts.data)) or (np.diff(indptr) < 0).any():
            raise SourceError(f"{at} returned a CSR matrix whose indptr does not fit its values")
        counts = scipy.sparse.csr_matrix((counts.data[: indptr[-1]], genes[: indptr[-1]], indptr), counts.shape)
        wrong = np.flatnonzero((counts.indices < 0) | (counts.indices >= self.n_genes))
        if len(wrong):
            row = start + int(np.searchsorted(indptr, wrong[0], side="right")) - 1
            raise SourceError(
                f"{at}: row {row} has a value for gene {counts.indices[wrong[0]]}, but there are {self.n_genes} genes"
            )
        return self._in_dtype(counts, at)

    def _in_dtype(self, counts: Any, at: str) -> Any:
        """The counts in the dtype of the first row. Raises SourceError if it cannot hold them."""
        dtype = getattr(self, "dtype", counts.dtype)
        if counts.dtype.kind not in "buif" or not np.can_cast(counts.dtype, dtype, "safe"):
            raise SourceError(f"{at} returned {counts.dtype}, but the first cells {dtype}: return one dtype of numbers")
        return counts.astype(dtype, copy=False)
