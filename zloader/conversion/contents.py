"""What is stored of an AnnData, and of a Dataset: an AnnData, or the whole of a MuData and each of its modalities.

Rows and genes are those of the Dataset, which may be a view; the genes of several stores are joined as it joins them.
An obs column has missing values in the rows of stores that lack it. What several stores, or other genes, cannot be
joined on is listed as dropped.

The whole of a MuData has no matrix: its obs, obsm and obsp are by row, its var lists the genes of all modalities, and
`obsmap/NAME` has the row of each row in a modality.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import anndata as ad
import anndata.utils
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from zloader.common.errors import SourceError
from zloader.common.locks import cached_property
from zloader.common.messages import listed
from zloader.common.records import Rows
from zloader.conversion.chosen import ChosenContent, Reading, quiet, refuse_unknown
from zloader.conversion.columns import storable, unite
from zloader.conversion.nodes import Node, require_names
from zloader.conversion.port import Matrix
from zloader.conversion.reorder import CscMatrix
from zloader.conversion.rows import DatasetMatrix, ReadMatrix
from zloader.conversion.selection import Selection
from zloader.dataset.dataset import Dataset
from zloader.dataset.elements import frame_of, is_array, path_of
from zloader.dataset.gene_axis import merged_var
from zloader.dataset.store import OpenedStore
from zloader.reading.loops import FEW
from zloader.reading.recipe import MatrixPart
from zloader.selecting.columns import as_names
from zloader.selecting.groups import shares
from zloader.selecting.row_maps import in_whole

_MANY = 8 * FEW  # values and rows: loading numba takes as long as NumPy needs more to copy so many rows in order


class DatasetContent(ChosenContent):
    """The rows and genes of a Dataset, or of one modality of it, with the parts that `select` chooses.

    `labels` are short names of its stores. `names` are the obs names, if the whole of a MuData makes them unique.
    """

    names: pd.Index | None = None

    def __init__(
        self,
        dataset: Dataset,
        select: Selection,
        labels: Sequence[str],
        how: Reading,
        *,
        modality: str = "",
        alone: bool = False,
    ) -> None:
        """With `alone`, a modality has the obs columns of the whole that it lacks, as `mudata.push_obs` gives them."""
        self._dataset, self._labels, self._how, self._stores = dataset, labels, how, dataset.stores
        self._modality, self._above = modality, f"mod/{modality}/" if modality else ""
        self._single = self._stores[0] if len(self._stores) == 1 else None
        self._joins = self._single is None
        self._n_rows = [store.length(f"{self._above}obs") for store in self._stores]
        self.n_rows = sum(self._n_rows) if self.rows is None else len(self.rows)
        available = self._in_any(lambda store: store.columns(f"{self._above}obs"))
        copies = tuple(f"{each}:" for each in dataset.modalities)
        of_whole = self._in_any(lambda store: store.columns("obs")) if alone else []
        self._of_whole = [name for name in of_whole if name not in available and not name.startswith(copies)]
        super().__init__(select, available + self._of_whole)
        self._choose()

    def _in_any(self, names_of: Callable[[OpenedStore], Iterable[str]]) -> list[str]:
        """The names that any store has."""
        return list(dict.fromkeys(name for store in self._stores for name in names_of(store)))

    def _keys(self, part: str) -> list[str]:
        return self._in_any(lambda store: store.keys(f"{self._above}{part}"))

    # ---- rows

    @cached_property
    def rows(self) -> Rows | None:  # type: ignore[override]
        """The rows of all stores, one after another, that are stored; None for all of them."""
        chosen = self._dataset._chosen
        if chosen is None:
            return None
        if not self._modality:
            return chosen.all_numbers()
        return np.flatnonzero(chosen.positions(self.in_whole) >= 0)

    @cached_property
    def in_whole(self) -> Rows:
        """For each row of a modality in all stores, its row in the whole of the dataset."""
        found, begin = [], 0
        for store, n_rows in zip(self._stores, self._n_rows, strict=True):
            row_of = store.row_of(f"mod/{self._modality}/X")
            found.append((np.arange(n_rows) if row_of is None else in_whole(row_of, n_rows)) + begin)
            begin += store.n_obs
        return np.concatenate(found)

    def _numbers(self, positions: Rows) -> Rows:
        """The rows of the whole dataset at some positions."""
        rows = positions if self.rows is None else self.rows[positions]
        return self.in_whole[rows] if self._modality else rows

    def _stacked(self, path: str, start: int, stop: int) -> NDArray[Any]:
        """The rows from `start` to `stop` of an array that is in all stores."""
        rows = np.arange(start, stop) if self.rows is None else self.rows[start:stop]
        ends, found = np.cumsum(self._n_rows), []
        for number, at in shares(ends, rows):
            within = rows[at] - (ends[number] - self._n_rows[number])
            first, last = (int(within.min()), int(within.max())) if len(within) else (0, -1)
            values = self._stores[number].window(path, first, last + 1)[within - first]
            found.append((at, values))
        dtype = np.result_type(*(values.dtype for _, values in found)) if found else np.dtype(np.float32)
        made = np.empty((len(rows), *(found[0][1].shape[1:] if found else ())), dtype)
        for at, values in found:
            made[at] = values
        return made

    # ---- obs

    def obs_names(self) -> pd.Index:
        if self.names is not None:
            return self.names
        parts = []
        for store in self._stores:
            name = store.index_name(f"{self._above}obs")
            column = _column(store, f"{self._above}obs", name)
            is_bytes = isinstance(column, np.ndarray) and column.dtype.kind == "S"
            names = as_names(column) if is_bytes else pd.Index(column)
            parts.append(names.rename(None if name == "_index" else name))
        names = parts[0] if len(parts) == 1 else parts[0].append(parts[1:])
        if self.rows is not None:
            names = names[self.rows]
        added = [] if self._select.source_column is None else [self._select.source_column]
        if names.name in (added if self._single is not None else self.obs_columns):
            names = names.rename(None)  # a column has the same name, but other values
        return self._unique(names)

    def obs_column(self, name: str) -> pd.Series:
        if name == self._select.source_column:
            codes = np.repeat(np.arange(len(self._n_rows)), self._n_rows)
            column = pd.Series(pd.Categorical.from_codes(codes, self._labels), name=name)
        else:
            column = self._stored_column(name)
        return column if self.rows is None else column.iloc[self.rows].reset_index(drop=True)

    def _stored_column(self, name: str) -> pd.Series:
        held: dict[str, str] = {}
        columns: list[pd.Series | None] = []
        with self._naming(name, lambda: f"({', '.join(f'{dtype} in {url}' for dtype, url in held.items())})"):
            for store in self._stores:
                frame = "obs" if name in self._of_whole else f"{self._above}obs"
                found = None
                if name in store.columns(frame):
                    found = pd.Series(_column(store, frame, name), name=name)
                    if name in self._of_whole and (row_of := store.row_of(f"mod/{self._modality}/X")) is not None:
                        rows = in_whole(row_of, store.length(f"{self._above}obs"))
                        found = found.iloc[rows].reset_index(drop=True)
                    held.setdefault(str(found.dtype), store.location.url)
                columns.append(found)
            if len(columns) == 1 and columns[0] is not None:
                return storable(columns[0])
            return unite(columns, self._n_rows).rename(name)

    # ---- matrices and genes

    def _of_dataset(self, name: str) -> str:
        """What the dataset calls a matrix."""
        return f"{self._modality}:{name}" if self._modality else name

    def _choose(self) -> None:
        """Chooses matrices and genes."""
        select, prefix = self._select, f"{self._modality}:" if self._modality else ""
        known = [name.removeprefix(prefix) for name in self._dataset.matrix_names if name.startswith(prefix)]
        known = [name for name in known if ":" not in name.partition("/")[0]]
        in_any = self._in_any(lambda store: store._matrices_in(self._above))
        self.dropped += [name for name in in_any if name not in known and name != select.x and name != "X"]
        if select.x == "X" and "X" in in_any and "X" not in known:
            lacking = [store.location.url for store in self._stores if "X" not in store._matrices_in(self._above)]
            raise SourceError(
                f"X is missing in {listed(lacking)}, but other sources have it: choose the matrix for X with "
                "select=zl.Selection(x=...) (--x)"
            )
        self._choose_matrices(known)
        raw, x = self._of_dataset("raw/X"), self._of_dataset("raw/X" if select.x == "raw/X" else "X")
        self.var, self._genes = self._var_of(x), self._positions(x)
        frames = [("raw/var" if select.x == "raw/X" else "var", self.var)]
        if "raw/X" in self.matrix_names:
            self.raw_var, self._raw_genes = self._var_of(raw), self._positions(raw)
            frames.append(("raw/var", self.raw_var))
        for frame, var in frames if self._joins else ():
            path = f"{self._above}{frame}"
            columns = self._in_any(lambda store, path=path: store.columns(path))  # type: ignore[misc]
            self.dropped += [f"{frame}/{name}" for name in columns if name not in var]

    def _var_of(self, x: str) -> pd.DataFrame:
        """The var of a matrix: of several stores, the columns that are the same in all of them."""
        matrices = self._dataset.matrices
        if self._single is not None or not matrices.rule.as_stored:
            return matrices.var_of(x)
        chosen, names = matrices.chosen(x), matrices.of_all_genes.gene_names(x)
        merged = merged_var(self._stores, frame_of(x), matrices.rule, names)
        return merged if chosen is None else merged.iloc[chosen.positions]

    def _positions(self, x: str) -> Rows | None:
        """The positions of the genes of x in a single store, or -1; None for all in their order."""
        matrices = self._dataset.matrices
        chosen, stored = matrices.chosen(x), None
        if not matrices.rule.as_stored:
            stored = matrices.axis(f"{self._above}{'raw/' if x.endswith('raw/X') else ''}var").stored[0]
        if chosen is None:
            return stored
        return chosen.positions if stored is None else stored[chosen.positions]

    def _graph(self, path: str) -> Matrix:
        assert self._single is not None
        layout = self._single.matrix_at(f"{self._above}{path}")
        return self._read_as_dataset(path, [self._single.part(layout, self._how.options)], [self._single])

    def _matrix(self, name: str, of_source: str) -> Matrix:
        found = self._of_dataset(of_source)
        if self._single is not None and self.rows is None and self._positions(found) is None:
            store, path = self._single, path_of(found)
            node, shape = store.node(path), (self.n_rows, self._dataset.matrices.n_genes(found))
            if node.attrs.get("encoding-type") == "csc_matrix":
                if store.shape(path) != shape:
                    raise store.damaged(path, f"its shape is {store.shape(path)}, not {shape}")
                arrays = {name: _Stored(store, f"{path}/{name}") for name in ("indptr", "indices", "data")}
                native = Node(arrays, store.location.url, path)
                return CscMatrix(native, name, shape=shape, window_bytes=self._how.window_bytes)
        return self._read_as_dataset(name, self._dataset.matrices.parts(found, self._how.options), self._stores)

    def _read_as_dataset(self, name: str, parts: Sequence[MatrixPart], stores: Sequence[OpenedStore]) -> Matrix:
        pairs = zip(stores, parts, strict=True)
        dtypes = [store.node(f"{part.matrix.path}/indices").dtype for store, part in pairs if part.matrix.genes]
        few = sum(part.matrix.n_rows + part.matrix.values.n_elements for part in parts)
        return DatasetMatrix(
            name,
            parts,
            [dtype.newbyteorder("=") for dtype in dtypes],
            n_rows=self.n_rows,
            numbers=self._numbers,
            options=self._how.options,
            compiled=few > (FEW if any(part.genes is not None for part in parts) else _MANY),
        )

    def _array(self, path: str) -> Matrix:
        at = f"{self._above}{path}"
        nodes = [store.node(at) for store in self._stores]
        dtype = np.result_type(*(node.dtype.newbyteorder("=") for node in nodes))
        return ReadMatrix(
            path,
            lambda start, stop: self._stacked(at, start, stop),
            np.empty((0, nodes[0].shape[1]), dtype),
            n_rows=self.n_rows,
            at=f"{path} of {self._stores[0].location.url}",
            together=nodes[0].chunks[0] if getattr(nodes[0], "chunks", None) else 1,
        )

    # ---- everything else

    @cached_property
    def _obsm(self) -> list[str]:  # type: ignore[override]
        return [f"obsm/{name}" for name in refuse_unknown("obsm", self._select.obsm, self._keys("obsm"))]

    @cached_property
    def _arrays(self) -> list[str]:  # type: ignore[override]
        """The arrays of numbers in obsm that all stores have with the same width."""
        found = []
        for path in self._obsm:
            require_names("obsm", [path.removeprefix("obsm/")])
            widths: set[int | None] = set()
            for store in self._stores:
                at = f"{self._above}{path}"
                node = store.node(at) if at in store else None
                if node is None or not is_array(node) or len(node.shape) != 2 or not _is_number(node.dtype):
                    widths.add(None)
                    continue
                widths.add(node.shape[1])
                if node.shape[0] != store.length(f"{self._above}obs"):
                    raise store.damaged(at, f"it has {node.shape[0]} rows")
            if widths != {None} and len(widths) == 1:
                found.append(path)
        return found

    @cached_property
    def _graphs(self) -> list[str]:  # type: ignore[override]
        """The CSR matrices in obsp, of all rows of a single store."""
        if self._single is None or self.rows is not None:
            return []
        names = self._single.keys(f"{self._above}obsp")
        paths = [f"obsp/{name}" for name in names]
        csr = [p for p in paths if self._single.node(f"{self._above}{p}").attrs.get("encoding-type") == "csr_matrix"]
        for path in csr:
            require_names("obsp", [path.removeprefix("obsp/")])
            if self._single.shape(f"{self._above}{path}") != (self.n_rows, self.n_rows):
                raise self._single.damaged(f"{self._above}{path}", "its shape is not that of obs")
        return csr

    def _element(self, path: str, frame: str) -> Any:
        assert self._single is not None
        element, wanted = self._single.element(f"{self._above}{path}"), self._single.length(f"{self._above}{frame}")
        n_rows = element.shape[0] if getattr(element, "shape", None) else len(element)
        if n_rows != wanted:
            raise self._single.damaged(f"{self._above}{path}", f"it has {n_rows} rows for {wanted}")
        return element

    def _uns(self) -> dict[str, Any]:
        def of(store: OpenedStore) -> dict[str, Any]:
            path = f"{self._above}uns"
            return dict(store.element(path)) if path in store else {}

        def same(one: dict[str, Any], other: OpenedStore) -> dict[str, Any]:
            with quiet():
                merged = ad.concat([ad.AnnData(uns=one), ad.AnnData(uns=of(other))], uns_merge="same").uns
            return dict(merged)

        shared = reduce(same, self._stores[1:], of(self._stores[0]))
        if self._joins:
            self._drop([f"uns/{key}" for key in self._keys("uns") if key not in shared])
        return shared


def _column(store: OpenedStore, frame: str, name: str) -> Any:
    """A column or the index of a frame, as anndata reads it."""
    path = f"{frame}/{name}"
    column, n_rows = store.element(path), store.length(frame)
    if getattr(column, "shape", None) != (n_rows,):
        raise store.damaged(path, f"it has the shape {getattr(column, 'shape', None)} for {n_rows} rows")
    return column


class _Stored:
    """An array of a store, of which slices can be read."""

    def __init__(self, store: OpenedStore, path: str) -> None:
        node = store.node(path)
        self.shape, self.dtype, self._store, self._path = node.shape, node.dtype, store, path

    def __getitem__(self, items: slice) -> NDArray[Any]:
        return self._store.window(self._path, items.start, items.stop)


def _is_number(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biuf" and dtype.itemsize <= 8


class WholeContent(DatasetContent):
    """The elements of the root of a MuData, over the genes of all `modalities`.

    Several are joined like `mudata.concat` joins them, except that var has names only, and obs the columns of all.
    """

    def __init__(
        self,
        dataset: Dataset,
        select: Selection,
        labels: Sequence[str],
        how: Reading,
        modalities: Mapping[str, DatasetContent],
    ) -> None:
        self._modalities = modalities
        super().__init__(dataset, select, labels, how)
        self.groups = {part: {} for part in ("obsm", "varm", "obsp", "varp", "obsmap", "varmap")}
        self.groups["mod"] = {"mod-order": list(modalities)}
        names = self.obs_names()
        if self._joins and not names.is_unique:
            repeated = names[names.duplicated()].unique()
            raise SourceError(
                f"{len(repeated)} obs names occur in several sources, such as {listed(repeated, 3)}, but a MuData "
                "aligns its modalities by them: make them unique with select=zl.Selection(unique_obs_names=True) "
                "(--unique-obs-names)"
            )
        if select.unique_obs_names:
            for name, content in modalities.items():
                content.names = names[in_whole(self.row_of(name), content.n_rows)]

    def row_of(self, modality: str) -> Rows:
        """For each row that is stored, its row in a modality, or -1."""
        content = self._modalities[modality]
        row_of = np.full(sum(self._n_rows), -1)
        row_of[content._numbers(np.arange(content.n_rows))] = np.arange(content.n_rows)
        return row_of if self.rows is None else row_of[self.rows]

    @property
    def _is_as_stored(self) -> bool:
        """Whether nothing is left out or joined, so that everything is as it is in the only store."""
        same_genes = all(content._genes is None for content in self._modalities.values())
        return self._single is not None and self.rows is None and same_genes

    def _choose(self) -> None:
        self.matrix_names = {}
        for name in self._modalities:
            for store in self._stores:
                store.row_of(f"mod/{name}/X")
        if self._is_as_stored:
            assert self._single is not None
            self.var = self._single.element("var")
            return
        names = [content.var.index for content in self._modalities.values()]
        self.var = pd.DataFrame(index=pd.Index(np.concatenate([np.asarray(each, object) for each in names])))
        self._drop([f"var/{name}" for name in self._in_any(lambda store: store.columns("var"))])

    @cached_property
    def _obsm(self) -> list[str]:  # type: ignore[override]
        """Those of the whole. `obsm/NAME` of modalities, which says where they have rows, is made with obsmap."""
        chosen = [key for key in self._keys("obsm") if key not in self._modalities]
        return [f"obsm/{name}" for name in chosen if self._select.obsm is None or name in self._select.obsm]

    def _gene_elements(self, part: str, raw: str) -> Iterator[tuple[str, Any]]:
        for name in self._keys(part):
            if self._is_as_stored:
                yield f"{part}/{name}", self._element(f"{part}/{name}", "var")
            elif part != "varm" or name not in self._modalities:
                self._drop([f"{part}/{name}"])

    def elements(self) -> Iterator[tuple[str, Any]]:
        """Those of a DatasetContent, the maps of rows and genes, and where modalities have rows and genes."""
        yield from super().elements()
        if self._is_as_stored:
            assert self._single is not None
            masks = [f"obsm/{name}" for name in self._modalities if f"obsm/{name}" in self._single]
            yield from ((path, self._element(path, "obs")) for path in masks)
            for part, frame in (("obsmap", "obs"), ("varmap", "var")):
                for name in self._single.keys(part):
                    yield f"{part}/{name}", self._element(f"{part}/{name}", frame)
            return
        begin = 0
        for name, content in self._modalities.items():
            genes = np.arange(len(self.var)) - begin
            genes[(genes < 0) | (genes >= len(content.var))] = -1
            for axis, places in (("obs", self.row_of(name)), ("var", genes)):
                yield f"{axis}m/{name}", places >= 0
                yield f"{axis}map/{name}", (places + 1).astype(np.min_scalar_type(len(places)))
            begin += len(content.var)
