"""Compares every value of a store with the sources it was made from, in stored order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import anndata as ad
import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.storage import MemoryStore

from zloader.common.errors import OptionError, SourceError
from zloader.common.progress import Bars
from zloader.conversion.checking.differences import (
    Sparse,
    bits_differ,
    column_difference,
    element_differences,
    frame_differences,
    in_both,
    name_differences,
)
from zloader.conversion.checking.hierarchy import Findings, Hierarchy
from zloader.conversion.joining.content import SOURCE_ROW, Content, RearrangedContent
from zloader.conversion.joining.modalities import Part, parts_of
from zloader.conversion.joining.selection import RENAMED, Selection
from zloader.conversion.sources.anndata_input import StoredInput
from zloader.conversion.sources.inputs import Input
from zloader.conversion.sources.windows import Advance, SourceMatrix
from zloader.conversion.writing.elements import ElementWriter
from zloader.conversion.writing.encode import ConvertOptions
from zloader.conversion.writing.stored import ElementStream
from zloader.dataset.dataset import Dataset
from zloader.selecting.gene_names import GenesBy

AGAINST = "against"  # the `where` of problems that concern the sources


@contextlib.contextmanager
def reporting(findings: Findings, where: str) -> Iterator[None]:
    """Reports an error of the sources or the stored elements as a problem."""
    try:
        yield
    except (SourceError, OptionError) as error:
        findings.add(where, f"cannot be compared: {error}")


class Comparison:
    """Compares the content of a store with the content that its sources give."""

    def __init__(self, dataset: Dataset, hierarchy: Hierarchy, findings: Findings, bars: Bars) -> None:
        self._hierarchy, self._findings, self._bars = hierarchy, findings, bars
        self._dataset = dataset
        self._provenance: Mapping[str, Any] = dataset.store.root.attrs.get("zloader", {})

    def run(self, inputs: Sequence[Input], memory: int | str, genes_by: GenesBy = None) -> None:
        """Reports the first difference of every element. Genes are named by `genes_by`, or as the store records."""
        self._check_sources(inputs)
        options = ConvertOptions(memory=memory)
        with reporting(self._findings, AGAINST):
            parts = parts_of(
                inputs,
                self._selection(genes_by),
                shuffle_seed=self._provenance.get("shuffle_seed"),
                order=self._order(),
                bucket_bytes=options.window,
            )
            in_sources = [part.path for part in parts]
            for path in ["", *self._hierarchy.children("mod")]:
                if path not in in_sources:
                    self._findings.add(path, "is in the store, but not in the sources")
            for part in parts:
                kind = part.attributes["encoding-type"]
                if self._hierarchy.encoding(part.path).lower() == kind.lower():  # R's MuDataSeurat writes "AnnData"
                    self._compare(part, options)
                else:
                    self._findings.add(part.path or AGAINST, f"is no {kind} in the store, but one in the sources")

    def _order(self) -> Any:
        """The source row of each row, if the rows were stored in an order that was given, else None."""
        if self._provenance.get("order") is None:
            return None
        return ConvertOptions(order=self._stored("").obs_column(SOURCE_ROW).to_numpy()).order  # each row once

    def _stored(self, path: str) -> StoredInput:
        root, url = self._dataset.store.root, self._dataset.store.location.url
        root = getattr(root, "native", root)  # of a file, that of h5py
        return StoredInput(root[path] if path else root, f"{url}/{path}".rstrip("/"), "", objects=[])

    def _compare(self, part: Part, options: ConvertOptions) -> None:
        hierarchy, findings = self._hierarchy.below(part.path), self._findings.below(part.path)
        PartComparison(part.content, self._stored(part.path), hierarchy, findings, self._bars).run(options)

    def _selection(self, genes_by: GenesBy) -> Selection:
        """The selection that the store was made with. Raises OptionError if `genes_by` is lacking."""
        chosen = dict(self._provenance.get("select") or {})
        recorded = chosen.get("genes_by", chosen.pop("gene_column", None))  # its name in stores of earlier versions
        if genes_by is None and recorded == RENAMED:
            raise OptionError("genes were given new names, which the store does not keep: repeat genes_by (--genes-by)")
        chosen["genes_by"] = recorded if genes_by is None else genes_by
        if "genes" in chosen:
            chosen["genes"] = list(self._dataset.var_names)
        return Selection(**chosen)

    def _check_sources(self, inputs: Sequence[Input]) -> None:
        recorded = self._provenance.get("sources")
        if recorded is None:
            return
        if len(recorded) != len(inputs):
            labels = ", ".join(str(source["label"]) for source in recorded)
            self._findings.add(
                AGAINST, f"the store was made from {len(recorded)} sources ({labels}), not {len(inputs)}"
            )
        for before, source in zip(recorded, inputs, strict=False):
            if before["rows"] != source.n_rows:
                self._findings.add(
                    AGAINST,
                    f"{source.name} has {source.n_rows} rows, but {before['label']} had {before['rows']} when the "
                    "store was made",
                )


class PartComparison:
    """Compares one part of a store, `store`, with the content that it should have."""

    def __init__(
        self,
        content: Content | RearrangedContent,
        store: StoredInput,
        hierarchy: Hierarchy,
        findings: Findings,
        bars: Bars,
    ) -> None:
        self._content, self._store = content, store
        self._hierarchy, self._findings, self._bars = hierarchy, findings, bars

    def run(self, options: ConvertOptions) -> None:
        """Reports the first difference of every element."""
        self._compare_obs()
        self._compare_var(options)
        in_sources = [*self._compare_matrices(options), *self._compare_elements(options)]
        for path in self._stored_paths():
            if path not in in_sources:
                self._findings.add(path, "is in the store, but not in the sources")

    # --- obs and var

    def _compare_obs(self) -> None:
        wanted = self._content.obs_names()
        with reporting(self._findings, "obs"):
            found = self._store.obs_names()
            n_both = min(len(found), len(wanted))
            if len(found) != len(wanted):
                self._findings.add("obs", f"has {len(found)} rows, but {len(wanted)} in the sources")
            if len(found) == len(wanted) or not isinstance(self._content, RearrangedContent):
                what = column_difference(wanted[:n_both], found[:n_both], "row")
                self._add_all([("obs", f"names: {what}")] if what else [])
            names = self._content.obs_columns
            self._add_all(name_differences("obs", names, self._store.obs_columns, in_order=True))
            for name in names:
                if name in self._store.obs_columns and len(found) == len(wanted):
                    self._compare_column(name)

    def _compare_column(self, name: str) -> None:
        path = f"obs/{name}"
        with reporting(self._findings, path):
            if not self._is_comparable(path):
                return
            what = column_difference(self._content.obs_column(name), self._store.obs_column(name), "row")
            self._add_all([(path, what)] if what else [])

    def _compare_var(self, options: ConvertOptions) -> None:
        with reporting(self._findings, "var"):
            wanted = _as_stored(self._content.var, options)
            self._add_all(frame_differences("var", wanted, self._store.var(), "gene"))
        if self._content.raw_var is not None and self._store.has_raw:
            with reporting(self._findings, "raw/var"):
                wanted = _as_stored(self._content.raw_var, options)
                self._add_all(frame_differences("raw/var", wanted, self._store.var(raw=True), "gene"))

    def _add_all(self, differences: Iterator[tuple[str, str]] | list[tuple[str, str]]) -> None:
        for where, what in differences:
            self._findings.add(where, what)

    # --- Matrices and elements

    def _stored_paths(self) -> list[str]:
        """All elements of the store except obs, var, raw/var and uns, whose entries are compared one by one."""
        parts = ("layers", "obsm", "obsp", "varm", "varp", "raw/varm", "obsmap", "varmap")
        below = [path for part in parts for path in self._hierarchy.children(part)]
        return [path for path in self._hierarchy.matrices if not path.startswith("layers/")] + below

    def _is_comparable(self, path: str) -> bool:
        if not self._hierarchy.encoding(path):
            self._findings.add(path, "is in the sources, but not in the store")
            return False
        if self._findings.any_in(path):
            self._findings.add(path, "is damaged, so it was not compared with the sources")
            return False
        return True

    def _compare_matrices(self, options: ConvertOptions) -> Iterator[str]:
        for matrix in self._content.matrices(options.window):
            yield matrix.name
            with matrix, reporting(self._findings, matrix.name):
                if self._is_comparable(matrix.name) and self._has_its_form(matrix):
                    self._compare_matrix(matrix)

    def _has_its_form(self, matrix: SourceMatrix) -> bool:
        path, hierarchy = matrix.name, self._hierarchy
        values = f"{path}/data" if f"{path}/data" in hierarchy.arrays else path
        stored = hierarchy.arrays[values].dtype if values in hierarchy.arrays else None
        original = (hierarchy.attributes(path).get("zloader") or {}).get("dtype", {}).get("data", str(stored))
        encoding = "array" if matrix.encoding == "dense" else "csr_matrix"
        wanted = {"encoding": encoding, "shape": (matrix.n_rows, matrix.n_genes), "dtype": str(matrix.dtype)}
        # Of other programs, a CSC matrix is sound, too.
        is_sound = hierarchy.encoding(path) == "csc_matrix" and not hierarchy.written_by_us
        stored_as = "csr_matrix" if is_sound else hierarchy.encoding(path)
        found = {"encoding": stored_as, "shape": hierarchy.shape(path), "dtype": original}
        for part, value in wanted.items():
            if found[part] != value:
                self._findings.add(path, f"has {part} {found[part]}, but {value} in the sources")
        return all(found[part] == wanted[part] for part in ("encoding", "shape"))

    def _compare_matrix(self, matrix: SourceMatrix) -> None:
        advance = self._bars.add(f"comparing {matrix.name}", matrix.n_stored)
        with ThreadPoolExecutor(1, thread_name_prefix="zloader-decode") as thread:
            if matrix.encoding == "dense":
                difference = _compare_dense(matrix, self._hierarchy, thread, advance)
            else:
                difference = _compare_sparse(matrix, self._streams(matrix.name, thread), advance)
        if difference.n_rows:
            self._findings.add(matrix.name, difference.described(self._column_name(matrix.name, difference.column)))

    def _streams(self, path: str, thread: Executor) -> Sequence[Stream]:
        """The indptr, indices and data of the rows of a stored sparse matrix. A CSC matrix is read into memory."""
        parts = ("indptr", "indices", "data")
        if self._hierarchy.encoding(path) == "csc_matrix":
            rows = self._store.element(path).tocsr()
            return [_MemoryStream(getattr(rows, part)) for part in parts]
        return [ElementStream(self._hierarchy.stored(f"{path}/{part}"), thread) for part in parts]

    def _column_name(self, matrix: str, column: int) -> str:
        content = self._content
        if matrix.startswith("obsm/"):
            return f"column {column}"
        if matrix.startswith("obsp/"):
            return f"column {column} ({content.obs_names()[column]!r})"
        genes = content.raw_var if matrix == "raw/X" and content.raw_var is not None else content.var
        return f"gene {genes.index[column]!r} ({column})"

    def _compare_elements(self, options: ConvertOptions) -> Iterator[str]:
        for path, element in self._content.elements():
            yield path
            with reporting(self._findings, path):
                if path == "uns" and path not in self._store:
                    self._add_all(element_differences(path, element, {}))
                elif self._is_comparable(path):
                    wanted = _as_stored(element, options)
                    self._add_all(element_differences(path, wanted, self._store.element(path)))


def _as_stored(element: Any, options: ConvertOptions) -> Any:
    """An element as it reads back after being written: a list becomes an array, for example."""
    root = zarr.create_group(MemoryStore(), zarr_format=3)
    ElementWriter(root, options, of="the sources").write("element", element)
    return ad.io.read_elem(root["element"])


@dataclass
class _Difference:
    """The first difference of a matrix, and the number of rows that differ."""

    n_rows: int = 0
    row: int = 0
    column: int = 0
    wanted: Any = None
    found: Any = None

    def add(self, row: int, column: int, wanted: Any, found: Any, n_rows: int) -> None:
        """Adds rows that follow the earlier ones."""
        if not self.n_rows:
            self.row, self.column, self.wanted, self.found = row, column, wanted, found
        self.n_rows += n_rows

    def described(self, column: str) -> str:
        """The difference as text."""
        rows = "1 row differs" if self.n_rows == 1 else f"{self.n_rows} rows differ"
        return f"row {self.row}, {column}: {in_both(self.found, self.wanted)}; {rows}"


def _compare_dense(matrix: SourceMatrix, hierarchy: Hierarchy, thread: Executor, advance: Advance) -> _Difference:
    difference, row = _Difference(), 0
    stored = hierarchy.stored(matrix.name)
    common = np.result_type(stored.dtype, matrix.dtype)
    stream = ElementStream(stored, thread)
    for window in matrix.windows():
        wanted = window.values.astype(common, copy=False)
        found = stream.take(len(wanted)).astype(common, copy=False)
        at = np.flatnonzero(bits_differ(wanted, found))
        if len(at):
            first, column = divmod(int(at[0]), matrix.n_genes)
            n_rows = len(np.unique(at // matrix.n_genes))
            difference.add(row + first, column, wanted[at[0]], found[at[0]], n_rows)
        row += len(window.lengths)
        advance(len(wanted))
    return difference


class _MemoryStream:
    """An array in memory, with the interface of an ElementStream."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._left = array

    def take(self, n: int) -> NDArray[Any]:
        taken, self._left = self._left[:n], self._left[n:]
        return taken


Stream = ElementStream | _MemoryStream


def _compare_sparse(matrix: SourceMatrix, streams: Sequence[Stream], advance: Advance) -> _Difference:
    difference, row, end = _Difference(), 0, 0
    indptr, indices, data = streams
    common = np.result_type(data.take(0).dtype, matrix.dtype)
    indptr.take(1)
    for window in matrix.windows():
        ends = indptr.take(len(window.lengths)).astype(np.int64)
        lengths = np.diff(ends, prepend=end)
        n = int(lengths.sum())
        wanted, genes = window.values.astype(common, copy=False), indices.take(n)
        found = data.take(n).astype(common, copy=False)
        same = np.array_equal(lengths, window.lengths) and np.array_equal(genes, window.genes)
        if not same or bits_differ(wanted, found).any():
            in_sources = Sparse.of(window.lengths, window.genes, wanted, matrix.n_genes)
            in_store = Sparse.of(lengths, genes, found, matrix.n_genes)
            keys = in_sources.differing(in_store)
            if len(keys):  # otherwise the store has the same values in another order
                first, column = divmod(int(keys[0]), matrix.n_genes)
                n_rows = len(np.unique(keys // matrix.n_genes))
                difference.add(row + first, column, in_sources.at(keys[0]), in_store.at(keys[0]), n_rows)
        row, end = row + len(ends), end + n
        advance(len(wanted))
    return difference
