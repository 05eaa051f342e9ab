"""`zl.RowSource`: a format of the user's own as a source of a conversion, read some rows at a time.

Formats that zloader knows are read through the same port, in blocks of rows, see BlockSource.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse
from numpy.typing import NDArray

from zloader.common.errors import SourceError
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


def csr_of(values: NDArray[Any], genes: NDArray[Any], indptr: NDArray[Any], n_genes: int) -> Any:
    """A CSR matrix of these arrays. float16, which scipy lacks, becomes float32."""
    values = values.astype(np.float32) if values.dtype == np.float16 else values
    return scipy.sparse.csr_matrix((values, genes, indptr), (len(indptr) - 1, n_genes))


class ObsTable(Protocol):
    """obs read one column at a time. A data frame is one."""

    @property
    def columns(self) -> Sequence[str]:
        """The names of the columns."""

    @property
    def index(self) -> pd.Index:
        """The names of the cells."""

    def __getitem__(self, name: str) -> pd.Series:
        """A column."""


class Blocks(Protocol):
    """A matrix in blocks of rows, in order, each block once per pass.

    `n_values` is at least the number of stored values, or None.
    """

    n_values: int | None

    def blocks(self, first_row: int) -> Iterator[Any]:
        """The rows from `first_row` on, as CSR matrices of consecutive rows in one dtype."""


class BlockSource(Blocks, Protocol):
    """What RowInput reads: cells whose X is in blocks of rows.

    `fingerprint` changes when the cells change, or what is read of them.
    """

    n_obs: int
    var: pd.DataFrame
    fingerprint: str | None

    @property
    def obs(self) -> ObsTable:
        """obs."""

    def close(self) -> None:
        """Closes files."""


class _RowBlocks:
    """A RowSource as a BlockSource: about the same bytes per block."""

    def __init__(self, source: RowSource, name: str) -> None:
        self._source, self._at = source, f"{name}: rows"
        self.n_obs, self.obs, self.var = source.n_obs, source.obs, source.var
        self.n_values: int | None = getattr(source, "n_values", None)
        self.fingerprint: str | None = getattr(source, "fingerprint", None)
        for frame in ("obs", "var"):
            if not isinstance(getattr(source, frame), pd.DataFrame):
                raise SourceError(f"{frame} of {name} is a {type(getattr(source, frame)).__name__}, not a data frame")
        if len(source.obs) != source.n_obs:
            raise SourceError(f"{name} has n_obs={source.n_obs!r}, but obs has {len(source.obs)} rows")

    def blocks(self, first_row: int) -> Iterator[Any]:
        start, step = first_row, _FIRST_ROWS
        while start < self.n_obs:
            stop = min(start + step, self.n_obs)
            counts = self._source.rows(start, stop)
            if not scipy.sparse.issparse(counts) or counts.format != "csr":
                at = f"{self._at}({start}, {stop})"
                raise SourceError(f"{at} returned a {type(counts).__name__}, not a CSR matrix of scipy.sparse")
            if counts.shape != (stop - start, len(self.var)):
                at = f"{self._at}({start}, {stop})"
                raise SourceError(f"{at} returned {counts.shape}, not {(stop - start, len(self.var))}: cells x genes")
            yield counts
            row_bytes = (counts.data.nbytes + counts.indices.nbytes) / (stop - start)
            start, step = stop, max(1, int(MOST_BYTES / max(_ROW_BYTES, row_bytes)))

    def close(self) -> None:
        """Files that the user has opened are the user's."""


class RowInput(Input):
    """A source that is read in blocks of rows, with `layers` of the same cells and genes. Its var is in memory."""

    has_raw = False

    def __init__(
        self,
        source: BlockSource,
        name: str,
        label: str,
        *,
        objects: Objects | None = None,
        layers: Mapping[str, Blocks] | None = None,
    ) -> None:
        super().__init__(name, label, objects or [])
        self._source = source
        self._matrices: dict[str, Blocks] = {f"layers/{layer}": found for layer, found in (layers or {}).items()}
        self._matrices["X"] = source
        self._first_blocks: dict[str, Any] = {}
        obs = source.obs
        self._obs = ad.AnnData(obs=obs).obs if isinstance(obs, pd.DataFrame) else obs  # names as anndata has them
        self._var = ad.AnnData(var=source.var).var
        self.n_rows, self.n_genes = source.n_obs, len(source.var)
        self.obs_columns = list(obs.columns)
        require_text(f"obs of {name}", self.obs_columns)

    @classmethod
    def of_rows(cls, source: RowSource, name: str) -> RowInput:
        """A source of the user's own."""
        return cls(_RowBlocks(source, name), name, type(source).__name__)

    def identity(self) -> dict[str, Any]:
        fingerprint = self._source.fingerprint
        name = self.name.rstrip("/").rpartition("/")[2]
        return {} if fingerprint is None else {"name": name, "bytes": self.bytes_in, "digest": str(fingerprint)}

    def close(self) -> None:
        self._source.close()

    def obs_names(self) -> pd.Index:
        return self._obs.index

    def obs_column(self, name: str) -> pd.Series:
        column = self._obs[name]
        if isinstance(column, pd.DataFrame):
            raise SourceError(f"{self.name} has several obs columns named {name!r}: make their names unique")
        return column.reset_index(drop=True)

    def var(self, raw: bool = False) -> pd.DataFrame:
        return self._var

    def keys(self, part: str) -> list[str]:
        return sorted(path.partition("/")[2] for path in self._matrices if path.startswith(f"{part}/"))

    def __contains__(self, path: str) -> bool:
        return path in self._matrices

    def node(self, path: str) -> Node:
        part, _, name = path.partition("/")
        if part != "obs" or name not in self.obs_columns:
            raise self._missing(path, [*self._matrices, "obs", "var"])
        return Node(self.obs_column(name), self.name, path)

    def element(self, path: str) -> Any:
        return self.node(path).native

    def _first(self, path: str) -> Any:
        """No rows, in the dtypes of all blocks of a matrix."""
        if path not in self._first_blocks:
            with reading(self.name, needs=_NEEDS):
                first = next(self._matrices[path].blocks(0), None) if self.n_rows else None
            empty = scipy.sparse.csr_matrix((0, self.n_genes), dtype=np.float32)
            self._first_blocks[path] = empty if first is None else first[:0]
        return self._first_blocks[path]

    def matrix(self, path: str, name: str, *, shape: tuple[int, int], window_bytes: int) -> SourceMatrix:
        if path not in self._matrices:
            raise self._missing(path, [*self._matrices, "obs", "var"])
        at = f"{self.name}: {'rows' if path == 'X' else path}"
        like, own_shape = self._first(path), (self.n_rows, self.n_genes)
        return _RowMatrix(self._matrices[path], at, name, like, shape=own_shape, window_bytes=window_bytes)


class _RowMatrix(SourceMatrix):
    """A matrix in blocks. `like` has their dtypes."""

    encoding = "csr"
    indptr_dtype = np.dtype(np.int64)

    def __init__(
        self, blocks: Blocks, at: str, name: str, like: Any, *, shape: tuple[int, int], window_bytes: int
    ) -> None:
        super().__init__(name, n_rows=shape[0], n_genes=shape[1])
        self._source, self._at, self.n_stored = blocks, at, blocks.n_values
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
