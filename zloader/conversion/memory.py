"""What is stored of an AnnData in memory or backed by a file, of a `zl.RowSource`, and of Parquet files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import anndata as ad
import anndata.abc
import anndata.utils
import numpy as np
import pandas as pd
import scipy.sparse

from zloader.common.errors import OptionError, SourceError
from zloader.common.messages import listed
from zloader.common.records import Rows
from zloader.conversion.chosen import ChosenContent, Reading, refuse_unknown
from zloader.conversion.columns import storable
from zloader.conversion.nodes import Node, reading, require_names, require_text
from zloader.conversion.parquet import ListRows
from zloader.conversion.port import Matrix
from zloader.conversion.reorder import CscMatrix
from zloader.conversion.rows import ReadMatrix
from zloader.conversion.selection import Selection
from zloader.selecting.gene_names import new_names, renamed, renamed_by, repeats

_NEEDS = "it needs a newer version of the library that reads it"


@runtime_checkable
class RowSource(Protocol):
    """Cells in a format of your own, as a source of `zl.convert` and `zl.verify`.

    Attributes:
        n_obs: The number of cells.
        obs: A data frame with a row for each cell, whose index has the names of the cells.
        var: A data frame with a row for each gene, whose index has the names of the genes.

    `rows(start, stop)` returns the counts of cells `start` to `stop - 1` as a scipy CSR matrix or array, cells x genes,
    the same at every call. It is called for all cells in order, and for some of them before. Genes of a cell may come
    in any order, and the values of a repeated gene are added up.

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


class MemoryContent(ChosenContent):
    """The parts of an AnnData that `select` chooses. Parts of a backed AnnData are read from its file.

    `rows` has X in its place, or `lists` X and obs, if they are in some other format.
    """

    def __init__(
        self,
        adata: ad.AnnData,
        select: Selection,
        how: Reading,
        *,
        name: str,
        label: str,
        rows: RowSource | None = None,
        lists: ListRows | None = None,
    ) -> None:
        self._adata, self._name, self._label = adata, name, label
        self._source, self._lists, self._window_bytes = rows, lists, how.window_bytes
        frames = {"obs": adata.obs, "var": adata.var, "raw/var": getattr(adata.raw, "var", adata.var)}
        for path, of_adata in frames.items():
            if not isinstance(of_adata, pd.DataFrame):
                raise SourceError(
                    f"{path} of {name} is a {type(of_adata).__name__}, not a data frame: if the AnnData was opened "
                    "lazily, pass its path or URL, or adata.to_memory()"
                )
        require_text(f"obs of {name}", adata.obs.columns)
        self.n_rows = adata.n_obs if lists is None else lists.n_rows
        super().__init__(select, list(adata.obs.columns if lists is None else lists.obs_columns))
        has_x = rows is not None or lists is not None or self._find("X") is not None
        known = [each for each, there in (("X", has_x), ("raw/X", adata.raw is not None)) if there]
        self._choose_matrices(known + [f"layers/{each}" for each in self._keys("layers")])
        self._obsm = [f"obsm/{each}" for each in refuse_unknown("obsm", select.obsm, self._keys("obsm"))]
        self._choose_genes()

    def _keys(self, part: str) -> list[str]:
        holder = self._adata.raw if part.startswith("raw/") else self._adata
        names = list(getattr(holder, part.removeprefix("raw/"), ()))
        if part == "layers":  # of which anndata 0.13 calls X None
            names = [name for name in names if name is not None]
        require_names(f"{part} of {self._name}", names)
        return sorted(names)

    def _choose_genes(self) -> None:
        select, raw = self._select, self._select.x == "raw/X"
        at = f"{self._name}: {'raw/var' if raw else 'var'}"
        by = select.genes_by
        if isinstance(by, tuple):
            if len(by) != 1:
                raise OptionError(f"genes_by lists {len(by)} ways to name genes for 1 source: list one")
            (by,) = by
        self.var = _named(pd.DataFrame(self._adata.raw.var if raw else self._adata.var), by, at)
        if "raw/X" in self.matrix_names and not raw:
            self.raw_var = _named(pd.DataFrame(self._adata.raw.var), by, f"{self._name}: raw/var")
        if select.genes is None:
            return
        if repeated := repeats(self.var.index):
            raise SourceError(f"{at}: {repeated}, so genes cannot be chosen: name them by a var column with genes_by")
        positions = self.var.index.get_indexer(pd.Index(select.genes))
        if lacking := [gene for gene, position in zip(select.genes, positions, strict=True) if position < 0]:
            raise OptionError(f"no source has {len(lacking)} of the requested genes: {listed(lacking)}")
        self._genes, self.var = positions, self.var.iloc[positions]

    # ---- obs

    def obs_names(self) -> pd.Index:
        names = self._adata.obs_names if self._lists is None else self._lists.obs_names()
        if names.name is not None and names.name == self._select.source_column:
            names = names.rename(None)
        return self._unique(names)

    def obs_column(self, name: str) -> pd.Series:
        if name == self._select.source_column:
            return pd.Series(pd.Categorical.from_codes(np.zeros(self.n_rows, int), [self._label]), name=name)
        column = self._adata.obs[name] if self._lists is None else self._lists.obs_column(name)
        if isinstance(column, pd.DataFrame):
            raise SourceError(f"{self._name} has several obs columns named {name!r}: make their names unique")
        with self._naming(name, lambda: f"of {self._name}"):
            return storable(column.reset_index(drop=True))

    # ---- matrices

    def _find(self, path: str) -> Any:
        holder = self._adata.raw if path.startswith("raw/") else self._adata
        part, _, key = path.removeprefix("raw/").partition("/")
        with reading(f"{self._name}: {path}"):  # a backed AnnData reads its file here
            found = getattr(holder, part, None)
            return found[key] if key and found is not None else found

    def _matrix(self, name: str, of_source: str) -> Matrix:
        genes = self._genes if name != "raw/X" else None
        if of_source == "X" and self._lists is not None:
            return self._in_blocks(name, self._lists, genes)
        if of_source == "X" and self._source is not None:
            return self._in_rows(name, self._source, genes)
        n_genes = len(self._adata.raw.var if of_source == "raw/X" else self._adata.var)
        return self._opened(name, of_source, n_genes, genes)

    def _array(self, path: str) -> Matrix:
        return self._opened(path, path, self._find(path).shape[1], None)

    def _graph(self, path: str) -> Matrix:
        return self._opened(path, path, self.n_rows, None)

    @property
    def _arrays(self) -> list[str]:  # type: ignore[override]
        return [path for path in self._obsm if self._is_array(path)]

    def _is_array(self, path: str) -> bool:
        array = self._find(path)
        is_plain = isinstance(array, np.ndarray) and not np.ma.is_masked(array)
        return is_plain and array.ndim == 2 and array.dtype.kind in "biuf" and array.dtype.itemsize <= 8

    @property
    def _graphs(self) -> list[str]:  # type: ignore[override]
        paths = [f"obsp/{name}" for name in self._keys("obsp")]
        return [path for path in paths if getattr(self._find(path), "format", None) == "csr"]

    def _opened(self, name: str, path: str, n_genes: int, genes: Rows | None) -> Matrix:
        x, at = self._find(path), f"{self._name}: {path}"
        is_backed = isinstance(x, anndata.abc.CSRDataset | anndata.abc.CSCDataset)
        node = Node(x.group if is_backed else x, self._name, path)
        if node.encoding not in ("csr", "csc", "dense"):
            raise SourceError(
                f"{at} is a {node.encoding}, which cannot be stored: convert it to csr_matrix, csc_matrix or array"
            )
        if node.shape != (self.n_rows, n_genes):
            raise SourceError(
                f"{at} has shape {node.shape}, but obs and var require {(self.n_rows, n_genes)}: the source is damaged"
            )
        (node if node.encoding == "dense" else node["data"]).number_dtype  # noqa: B018 - raises SourceError
        if node.encoding == "dense":
            return self._read(name, lambda start, stop: x[start:stop], x, genes, at)
        n_values, indptr = node["data"].shape[0], node["indptr"]
        if node["indices"].number_dtype.kind not in "iu" or indptr.number_dtype.kind not in "iu":
            raise SourceError(f"{at}/indices and indptr must hold integers: the source is damaged")
        if node.encoding == "csc":
            with reading(at):
                node = node if genes is None else Node(_of_genes(x, genes), self._name, path)
            return CscMatrix(node, name, shape=(node.shape[0], node.shape[1]), window_bytes=self._window_bytes)
        if indptr.numbers(0, 1)[0] != 0 or indptr.numbers(self.n_rows, self.n_rows + 1)[0] > n_values:
            raise SourceError(f"{at}/indptr does not fit the {n_values} values: the source is damaged")
        return self._read(name, _rows_of(node), x, genes, at)

    def _read(self, name: str, read: Callable[[int, int], Any], x: Any, genes: Rows | None, at: str) -> Matrix:
        """A matrix in memory or in a file."""

        def rows(start: int, stop: int) -> Any:
            with reading(at, needs=_NEEDS):
                return _of_genes(read(start, stop), genes)

        like, n_stored = rows(0, min(1, self.n_rows)), x.nnz if scipy.sparse.issparse(x) else None
        return ReadMatrix(name, rows, like, n_rows=self.n_rows, at=at, n_stored=n_stored)

    def _in_blocks(self, name: str, lists: ListRows, genes: Rows | None) -> Matrix:
        like = _of_genes(scipy.sparse.csr_matrix((0, lists.n_genes), dtype=lists.dtype), genes)
        return ReadMatrix(
            name,
            lambda first_row: (_of_genes(block, genes) for block in lists.blocks(first_row)),
            like,
            n_rows=self.n_rows,
            at=self._name,
            n_stored=lists.n_values,
            blocks=True,
        )

    def _in_rows(self, name: str, source: RowSource, genes: Rows | None) -> Matrix:
        at, n_genes = f"{self._name}: rows", len(self._adata.var)

        def rows(start: int, stop: int) -> Any:
            called = f"{at}({start}, {stop})"
            with reading(at, needs=_NEEDS):
                found = source.rows(start, stop)
                if not scipy.sparse.issparse(found) or found.format != "csr":
                    raise SourceError(f"{called} returned a {type(found).__name__}, not a CSR matrix of scipy.sparse")
                if found.shape != (stop - start, n_genes):
                    raise SourceError(f"{called} returned {found.shape}, not {(stop - start, n_genes)}: cells x genes")
                return _of_genes(found, genes)

        empty = scipy.sparse.csr_matrix((0, n_genes), dtype=np.float32)
        like = rows(0, 1) if self.n_rows else _of_genes(empty, genes)
        n_values = getattr(source, "n_values", None)
        return ReadMatrix(name, rows, like, n_rows=self.n_rows, at=at, n_stored=n_values)

    # ---- everything else

    def _uns(self) -> dict[str, Any]:
        return dict(self._adata.uns)

    def _element(self, path: str, frame: str) -> Any:
        found = self._find(path)
        with reading(f"{self._name}: {path}", "cannot be computed"):
            if hasattr(found, "compute"):  # a dask array
                return found.compute()
            return found.to_memory() if hasattr(found, "to_memory") else found  # a lazy data frame of xarray


def _rows_of(node: Node) -> Callable[[int, int], Any]:
    """Reads rows of a CSR matrix. Its values may be float16, which SciPy holds but does not slice."""
    data, indices, indptr = (node[name] for name in ("data", "indices", "indptr"))

    def read(start: int, stop: int) -> Any:
        ends = indptr.numbers(start, stop + 1).astype(np.int64)
        begin, end = int(ends[0]), int(ends[-1])
        rows = scipy.sparse.csr_matrix((stop - start, node.shape[1]), dtype=bool)
        rows.data, rows.indices = data.numbers(begin, end), indices.numbers(begin, end)
        rows.indptr = ends - begin
        return rows

    return read


def _of_genes(x: Any, genes: Rows | None) -> Any:
    """Some columns of a matrix. Of a sparse one SciPy moves the positions of the values, which may be float16."""
    if genes is None or not scipy.sparse.issparse(x):
        return x if genes is None else x[:, genes]
    positions = type(x)((np.arange(len(x.indices)), x.indices, x.indptr), x.shape)
    positions.check_format(full_check=True)
    found = positions[:, genes]
    found.data = x.data[found.data]
    return found


def _named(var: pd.DataFrame, by: Any, at: str) -> pd.DataFrame:
    """A var frame with the genes named as `genes_by` says; the previous names are kept as a column."""
    if by is None or (isinstance(by, str) and by == var.index.name):
        return var
    if isinstance(by, str):
        if by not in var:
            raise SourceError(f"{at} has no column {by!r} to name genes by. It has: {listed(var.columns)}")
        if var[by].isna().any():
            raise SourceError(
                f"{at} has {int(var[by].isna().sum())} genes without a value in {by!r}, so they would have no name"
            )
        names = pd.Index(var[by].astype(str).to_numpy(dtype=object))
        if repeated := repeats(names):
            raise SourceError(f"{at}: {repeated} in the column {by!r}, so it cannot name the genes")
        return renamed(var, names)
    new = by if isinstance(by, dict) else new_names(by, dict.fromkeys(map(str, var.index)))
    return renamed(var, renamed_by(new, var.index, at))


def rows_content(source: RowSource, select: Selection, how: Reading) -> MemoryContent:
    """What is stored of a RowSource. Raises SourceError if it is not as it has to be."""
    name = type(source).__name__
    for frame in ("obs", "var"):
        if not isinstance(getattr(source, frame), pd.DataFrame):
            raise SourceError(f"{frame} of {name} is a {type(getattr(source, frame)).__name__}, not a data frame")
    if len(source.obs) != source.n_obs:
        raise SourceError(f"{name} has n_obs={source.n_obs!r}, but obs has {len(source.obs)} rows")
    return MemoryContent(
        ad.AnnData(obs=source.obs, var=source.var),
        select,
        how,
        name=name,
        label=name,
        rows=source,
    )
