"""`zl.RowSource`: a format of the user's own as a source of a conversion, read some rows at a time.

`RowInput` is a source whose X is read in blocks of rows: that of a RowSource, or of Parquet files.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse

from zloader.common.errors import SourceError
from zloader.common.locks import cached_property
from zloader.conversion.sources.anndata_input import Input
from zloader.conversion.sources.locations import Objects
from zloader.conversion.sources.nodes import Node, reading, require_text
from zloader.conversion.sources.windows import SourceMatrix, Window, canonical, split_rows

MOST_BYTES = 16 << 20  # of a window, as of other sources
_FIRST_ROWS = 256  # of the window that tells how long rows are
_ROW_BYTES = 64  # at least, so that empty rows do not make endless windows
_NEEDS = "it needs a newer version of the library that reads it"
_CHANGED = "it has changed since, or does not return the same at every call"


@runtime_checkable
class RowSource(Protocol):
    """Cells in a format of your own, as a source of `zl.convert` and `zl.verify`.

    Attributes:
        n_obs: The number of cells.
        obs: A data frame with a row for each cell, whose index has the names of the cells.
        var: A data frame with a row for each gene, whose index has the names of the genes.

    `rows(start, stop)` returns the counts of cells `start` to `stop - 1` as a scipy CSR matrix or array, cells x genes,
    the same at every call. It is called for all cells in order, and more than once: first to check all values, and then
    to store them. Genes of a cell may come in any order, and the values of a repeated gene are added up.

    Two more attributes are optional. `n_values` is the number of stored values, or a somewhat larger one. Without it,
    shuffling on conversion counts them first, which reads all cells once more. `fingerprint` is text that changes when
    the cells change. With it, an interrupted conversion can be resumed.

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


class RowInput(Input):
    """A source with obs, var and X, which is read in blocks of rows. Its var is in memory.

    `n_values` is at least the number of stored values, or None. `fingerprint` changes when the cells change, or what is
    read of them.
    """

    has_raw = False

    def __init__(
        self, name: str, label: str, var: pd.DataFrame, *, obs_columns: Sequence[str], objects: Objects | None = None
    ) -> None:
        super().__init__(name, label, objects or [])
        self._var = ad.AnnData(var=var).var  # names as anndata has them
        self.n_genes = len(var)
        self.n_values: int | None = None
        self.fingerprint: str | None = None
        self.obs_columns = list(obs_columns)
        require_text(f"obs of {name}", self.obs_columns)

    @abstractmethod
    def blocks(self, first_row: int) -> Iterator[Any]:
        """The rows from `first_row` on, as CSR matrices of consecutive rows, all with the dtypes of the first."""

    def identity(self) -> dict[str, Any]:
        name = self.name.rstrip("/").rpartition("/")[2]
        stored = {"name": name, "bytes": self.bytes_in, "digest": str(self.fingerprint)}
        return {} if self.fingerprint is None else stored

    def var(self, raw: bool = False) -> pd.DataFrame:
        return self._var

    def keys(self, part: str) -> list[str]:
        return []

    def __contains__(self, path: str) -> bool:
        return path == "X"

    def node(self, path: str) -> Node:
        part, _, name = path.partition("/")
        if part != "obs" or name not in self.obs_columns:
            raise self._missing(path, ["X", "obs", "var"])
        return Node(self.obs_column(name), self.name, path)

    def element(self, path: str) -> Any:
        return self.node(path).native

    @cached_property
    def _like(self) -> Any:
        """No rows, in the dtypes of all blocks."""
        with reading(self.name, needs=_NEEDS):
            first = next(self.blocks(0), None) if self.n_rows else None
        return scipy.sparse.csr_matrix((0, self.n_genes), dtype=np.float32) if first is None else first[:0]

    def matrix(self, path: str, name: str, *, shape: tuple[int, int], window_bytes: int) -> SourceMatrix:
        if path != "X":
            raise self._missing(path, ["X", "obs", "var"])
        return _RowMatrix(self, name, self._like, window_bytes)


class OwnRows(RowInput):
    """A RowSource: about the same bytes per block."""

    def __init__(self, source: RowSource, name: str) -> None:
        for frame in ("obs", "var"):
            if not isinstance(getattr(source, frame), pd.DataFrame):
                raise SourceError(f"{frame} of {name} is a {type(getattr(source, frame)).__name__}, not a data frame")
        if len(source.obs) != source.n_obs:
            raise SourceError(f"{name} has n_obs={source.n_obs!r}, but obs has {len(source.obs)} rows")
        super().__init__(name, type(source).__name__, source.var, obs_columns=source.obs.columns)
        self._source, self._obs, self.n_rows = source, ad.AnnData(obs=source.obs).obs, source.n_obs
        self.n_values = getattr(source, "n_values", None)
        self.fingerprint = getattr(source, "fingerprint", None)

    def obs_names(self) -> pd.Index:
        return self._obs.index

    def obs_column(self, name: str) -> pd.Series:
        column = self._obs[name]
        if isinstance(column, pd.DataFrame):
            raise SourceError(f"{self.name} has several obs columns named {name!r}: make their names unique")
        return column.reset_index(drop=True)

    def blocks(self, first_row: int) -> Iterator[Any]:
        start, step = first_row, _FIRST_ROWS
        while start < self.n_rows:
            stop = min(start + step, self.n_rows)
            counts, at = self._source.rows(start, stop), f"{self.name}: rows({start}, {stop})"
            if not scipy.sparse.issparse(counts) or counts.format != "csr":
                raise SourceError(f"{at} returned a {type(counts).__name__}, not a CSR matrix of scipy.sparse")
            if counts.shape != (stop - start, self.n_genes):
                raise SourceError(f"{at} returned {counts.shape}, not {(stop - start, self.n_genes)}: cells x genes")
            yield counts
            row_bytes = (counts.data.nbytes + counts.indices.nbytes) / (stop - start)
            start, step = stop, max(1, int(MOST_BYTES / max(_ROW_BYTES, row_bytes)))


class _RowMatrix(SourceMatrix):
    """The X of a source. `like` has the dtypes of its blocks."""

    encoding = "csr"
    indptr_dtype = np.dtype(np.int64)

    def __init__(self, source: RowInput, name: str, like: Any, window_bytes: int) -> None:
        super().__init__(name, n_rows=source.n_rows, n_genes=source.n_genes)
        self._source, self._at, self.n_stored = source, f"{source.name}: rows", source.n_values
        self.dtype, self.genes_dtype = like.dtype, like.indices.dtype
        self._most = max(1, min(window_bytes, MOST_BYTES) // (self.dtype.itemsize + self.genes_dtype.itemsize))

    def windows(self, first_row: int = 0) -> Iterator[Window]:
        row, n_values = first_row, 0
        for counts in self._blocks(first_row):
            if row + counts.shape[0] > self.n_rows:
                raise SourceError(f"{self._at}: there are more than {self.n_rows} rows: {_CHANGED}")
            self._check(counts, row)
            indptr, n_values = counts.indptr.astype(np.int64), n_values + int(counts.indptr[-1])
            for first, last in split_rows(indptr, self._most):
                part = slice(indptr[first], indptr[last])
                genes = counts.indices[part].astype(self.genes_dtype, copy=False)
                values = counts.data[part].astype(self.dtype, copy=False)
                ends = indptr[first : last + 1] - indptr[first]
                yield canonical(ends, genes, values, at=self._at, first_row=row + first)
            row += counts.shape[0]
        if row < self.n_rows:
            raise SourceError(f"{self._at}: there are only {row} rows, not {self.n_rows}: {_CHANGED}")
        if self.n_stored is not None and n_values > self.n_stored:
            raise SourceError(
                f"{self._at} returned {n_values} values in all, but n_values is {self.n_stored}: state their number, "
                "or a larger one"
            )

    def _blocks(self, first_row: int) -> Iterator[Any]:
        """The blocks of the source. Raises SourceError for whatever its reading raises."""
        blocks = self._source.blocks(first_row)
        while True:
            with reading(self._at, needs=_NEEDS):
                block = next(blocks, None)
            if block is None:
                return
            yield block

    def _check(self, counts: Any, row: int) -> None:
        """Raises SourceError unless the rows from `row` on are as they have to be."""
        stop = row + counts.shape[0]
        at = f"{self._at}({row}, {stop})"
        indptr, genes = counts.indptr, counts.indices
        if indptr[0] or indptr[-1] > min(len(genes), len(counts.data)) or (np.diff(indptr) < 0).any():
            raise SourceError(f"{at} returned a CSR matrix whose indptr does not fit its values")
        genes = genes[: indptr[-1]]
        if len(genes) and (genes.min() < 0 or genes.max() >= self.n_genes):
            wrong = int(np.flatnonzero((genes < 0) | (genes >= self.n_genes))[0])
            of_row = row + int(np.searchsorted(indptr, wrong, side="right")) - 1
            raise SourceError(
                f"{at}: row {of_row} has a value for gene {genes[wrong]}, but there are {self.n_genes} genes"
            )
        if counts.dtype.kind not in "buif" or not np.can_cast(counts.dtype, self.dtype, "safe"):
            raise SourceError(
                f"{at} returned {counts.dtype}, but the first cells {self.dtype}: return one dtype of numbers"
            )
