"""What is stored of an AnnData in memory or backed by a file, of a `zl.RowSource`, and of Parquet files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
from zloader.conversion.columns import storable
from zloader.conversion.contents import GROUPS, refuse_unknown, taken, unique
from zloader.conversion.nodes import Node, reading, require_names, require_text
from zloader.conversion.port import Content, Matrix
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


class MemoryContent(Content):
    """The parts of an AnnData that `select` chooses. Parts of a backed AnnData are read from its file.

    `read_x` reads rows of X in its place, if X is in some other format, and so does `frame` with obs: it has `n_rows`,
    `obs_columns`, `obs_names()` and `obs_column(name)`.
    """

    def __init__(  # noqa: PLR0913 - all but two are keyword-only
        self,
        adata: ad.AnnData,
        select: Selection,
        *,
        name: str,
        label: str,
        window_bytes: int,
        read_x: Callable[[int, int], Any] | None = None,
        n_values: int | None = None,
        frame: Any = None,
    ) -> None:
        self._adata, self._select, self._name, self._label = adata, select, name, label
        self._read_x, self._n_values, self._window_bytes = read_x, n_values, window_bytes
        frames = {"obs": adata.obs, "var": adata.var, "raw/var": getattr(adata.raw, "var", adata.var)}
        for path, of_adata in frames.items():
            if not isinstance(of_adata, pd.DataFrame):
                raise SourceError(
                    f"{path} of {name} is a {type(of_adata).__name__}, not a data frame: if the AnnData was opened "
                    "lazily, pass its path or URL, or adata.to_memory()"
                )
        require_text(f"obs of {name}", adata.obs.columns)
        self._frame = frame
        self.n_rows = adata.n_obs if frame is None else frame.n_rows
        self.dropped: list[str] = []
        self.groups: Mapping[str, Mapping[str, Any]] = {part: {} for part in GROUPS}
        self.obs_columns = refuse_unknown(
            "obs", select.obs, list(adata.obs.columns) if frame is None else frame.obs_columns
        )
        if select.source_column is not None:
            if select.source_column in self.obs_columns:
                raise OptionError(
                    f"obs already has a column {select.source_column!r}: choose another source_column (--source-column)"
                )
            self.obs_columns = [*self.obs_columns, select.source_column]
        self._choose_matrices()
        self._choose_genes()

    def _keys(self, part: str) -> list[str]:
        holder = self._adata.raw if part.startswith("raw/") else self._adata
        names = list(getattr(holder, part.removeprefix("raw/"), ()))
        if part == "layers":
            names = [name for name in names if name is not None]  # anndata 0.13 stores X as layer None
        require_names(f"{part} of {self._name}", names)
        return sorted(names)

    def _choose_matrices(self) -> None:
        select, adata = self._select, self._adata
        has_x = self._read_x is not None or self._find("X") is not None
        self.known = [name for name, there in (("X", has_x), ("raw/X", adata.raw is not None)) if there]
        layers = self._keys("layers")
        self.known += [f"layers/{name}" for name in layers]
        if select.x != "X":
            refuse_unknown("x", [select.x], self.known)
        chosen = refuse_unknown("layers", select.layers, layers)
        self._matrices = {"X": select.x} if select.x in self.known else {}
        self._matrices |= {f"layers/{name}": f"layers/{name}" for name in chosen if f"layers/{name}" != select.x}
        if select.x == "raw/X" and len(self._matrices) > 1:
            raise OptionError(
                f"the layers ({listed(chosen)}) have other genes than raw/X: leave them out with "
                "select=zl.Selection(layers=[]) (--layers none)"
            )
        if select.raw and select.x != "raw/X" and adata.raw is not None:
            self._matrices["raw/X"] = "raw/X"
        self._obsm = [f"obsm/{name}" for name in refuse_unknown("obsm", select.obsm, self._keys("obsm"))]

    def _choose_genes(self) -> None:
        select, raw = self._select, self._select.x == "raw/X"
        at = f"{self._name}: {'raw/var' if raw else 'var'}"
        by = select.genes_by
        if isinstance(by, tuple):
            if len(by) != 1:
                raise OptionError(f"genes_by lists {len(by)} ways to name genes for 1 source: list one")
            (by,) = by
        var = pd.DataFrame(self._adata.raw.var if raw else self._adata.var)
        self.var, self._genes = _named(var, by, at), None
        self.raw_var = None
        if "raw/X" in self._matrices and not raw:
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
        names = self._adata.obs_names if self._frame is None else self._frame.obs_names()
        if names.name is not None and names.name == self._select.source_column:
            names = names.rename(None)
        return unique(names) if self._select.unique_obs_names else names

    def obs_column(self, name: str) -> pd.Series:
        if name == self._select.source_column:
            return pd.Series(pd.Categorical.from_codes(np.zeros(self.n_rows, int), [self._label]), name=name)
        column = self._adata.obs[name] if self._frame is None else self._frame.obs_column(name)
        if isinstance(column, pd.DataFrame):
            raise SourceError(f"{self._name} has several obs columns named {name!r}: make their names unique")
        try:
            return storable(column.reset_index(drop=True))
        except SourceError as error:
            raise SourceError(
                f"obs column {name!r} of {self._name}: {error}, or list the columns to store with "
                "select=zl.Selection(obs=[...]) (--obs a,b)"
            ) from error

    # ---- matrices

    def _find(self, path: str) -> Any:
        holder = self._adata.raw if path.startswith("raw/") else self._adata
        part, _, key = path.removeprefix("raw/").partition("/")
        with reading(f"{self._name}: {path}"):  # a backed AnnData reads its file here
            found = getattr(holder, part, None)
            return found[key] if key and found is not None else found

    def matrices(self) -> Iterator[Matrix]:
        for name, of_source in self._matrices.items():
            genes = self._genes if name != "raw/X" else None
            n_genes = len(self._adata.raw.var if of_source == "raw/X" else self._adata.var)
            if of_source == "X" and self._read_x is not None:
                yield self._read(name, self._read_x, None, n_genes, genes, f"{self._name}: rows")
            else:
                yield self._opened(name, of_source, self._find(of_source), n_genes, genes)
        for path in self._obsm:
            if self._is_array(path):
                array = self._find(path)
                yield self._opened(path, path, array, array.shape[1], None)
        for path in self._graphs:
            yield self._opened(path, path, self._find(path), self.n_rows, None)

    def _is_array(self, path: str) -> bool:
        array = self._find(path)
        is_plain = isinstance(array, np.ndarray) and not np.ma.is_masked(array)
        return is_plain and array.ndim == 2 and array.dtype.kind in "biuf" and array.dtype.itemsize <= 8

    @property
    def _graphs(self) -> list[str]:
        paths = [f"obsp/{name}" for name in self._keys("obsp")]
        return [path for path in paths if getattr(self._find(path), "format", None) == "csr"]

    def _opened(self, name: str, path: str, x: Any, n_genes: int, genes: Rows | None) -> Matrix:
        at = f"{self._name}: {path}"
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
        if node.encoding == "csc":
            if genes is not None:
                with reading(at):
                    node = Node(x[:, genes] if is_backed else _of_genes(x, genes), self._name, path)
            return CscMatrix(node, name, shape=(node.shape[0], node.shape[1]), window_bytes=self._window_bytes)
        (node["data"] if node.encoding == "csr" else node).number_dtype  # noqa: B018 - raises SourceError
        if node.encoding == "dense":
            return self._read(name, lambda start, stop: x[start:stop], x, n_genes, genes, at)
        n_values, indptr = node["data"].shape[0], node["indptr"]
        if node["indices"].number_dtype.kind not in "iu" or indptr.number_dtype.kind not in "iu":
            raise SourceError(f"{at}/indices and indptr must hold integers: the source is damaged")
        if indptr.numbers(0, 1)[0] != 0 or indptr.numbers(self.n_rows, self.n_rows + 1)[0] > n_values:
            raise SourceError(f"{at}/indptr does not fit the {n_values} values: the source is damaged")
        return self._read(name, _rows_of(node), x, n_genes, genes, at)

    def _read(
        self, name: str, read: Callable[[int, int], Any], x: Any, n_genes: int, genes: Rows | None, at: str
    ) -> Matrix:
        def rows(start: int, stop: int) -> Any:
            with reading(at, needs=_NEEDS):
                found = read(start, stop)
                if x is not None:
                    return found if genes is None else _of_genes(found, genes)
            called = f"{at}({start}, {stop})"
            if not scipy.sparse.issparse(found) or found.format != "csr":
                raise SourceError(f"{called} returned a {type(found).__name__}, not a CSR matrix of scipy.sparse")
            if found.shape != (stop - start, n_genes):
                raise SourceError(f"{called} returned {found.shape}, not {(stop - start, n_genes)}: cells x genes")
            with reading(at, needs=_NEEDS):
                return found if genes is None else _of_genes(found, genes)

        is_known = x is not None or self.n_rows
        like = rows(0, min(1, self.n_rows)) if is_known else scipy.sparse.csr_matrix((0, n_genes), dtype=np.float32)
        n_stored = self._n_values if x is None else None if not scipy.sparse.issparse(x) else x.nnz
        return ReadMatrix(
            name,
            rows,
            like,
            n_rows=self.n_rows,
            n_genes=n_genes if genes is None else len(genes),
            at=at,
            n_stored=n_stored,
            any_rows=self._frame is None,
        )

    # ---- everything else

    def elements(self) -> Iterator[tuple[str, Any]]:
        raw = "raw/" if self._select.x == "raw/X" else ""
        for part in ("varm",) if raw else ("varm", "varp"):
            for name in self._keys(f"{raw}{part}"):
                element = taken(self._element(f"{raw}{part}/{name}"), self._genes, columns=part == "varp")
                yield f"{part}/{name}", _with_names(element, self.var.index)
        yield "uns", dict(self._adata.uns)
        for path in self._obsm:
            if not self._is_array(path):
                yield path, _with_names(self._element(path), self.obs_names())
        for path in (f"obsp/{name}" for name in self._keys("obsp")):
            if path not in self._graphs:
                yield path, self._element(path)
        if self.raw_var is not None:
            for name in self._keys("raw/varm"):
                yield f"raw/varm/{name}", _with_names(self._element(f"raw/varm/{name}"), self.raw_var.index)

    def _element(self, path: str) -> Any:
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


def _of_genes(x: Any, genes: Rows) -> Any:
    """Some columns of a matrix. Of a sparse one SciPy moves the positions of the values, which may be float16."""
    if not scipy.sparse.issparse(x):
        return x[:, genes]
    positions = type(x)((np.arange(len(x.indices)), x.indices, x.indptr), x.shape)
    positions.check_format(full_check=True)
    found = positions[:, genes]
    found.data = x.data[found.data]
    return found


def _with_names(element: Any, names: pd.Index) -> Any:
    return element.set_axis(names) if isinstance(element, pd.DataFrame) else element


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


def rows_content(source: RowSource, select: Selection, *, window_bytes: int) -> MemoryContent:
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
        name=name,
        label=name,
        window_bytes=window_bytes,
        read_x=source.rows,
        n_values=getattr(source, "n_values", None),
    )


class InOrder:
    """Rows that come in `blocks(first_row)`, CSR matrices of consecutive rows, by their numbers.

    Rows that follow those that were read last are read on; any others begin again.
    """

    def __init__(self, blocks: Callable[[int], Iterator[Any]], n_genes: int) -> None:
        self._blocks, self._reading, self._next = blocks, iter(()), -1
        self._left: Any = None
        self._n_genes = n_genes

    def __call__(self, start: int, stop: int) -> Any:
        if start != self._next:
            self._reading, self._next, self._left = self._blocks(start), start, None
        parts: list[Any] = []
        lacking = stop - start
        while lacking:
            block = self._left if self._left is not None else next(self._reading, None)
            if block is None:
                break
            parts.append(block[:lacking])
            self._left = block[lacking:] if block.shape[0] > lacking else None
            lacking -= parts[-1].shape[0]
        self._next = stop
        return scipy.sparse.vstack(parts, format="csr") if len(parts) > 1 else parts[0]
