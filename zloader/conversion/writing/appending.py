"""Plans an append: checks that a store can be appended to, and selects the matching content of the sources."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import anndata.utils
import numpy as np
import pandas as pd
import zarr
from numpy.typing import NDArray

from zloader.access.zarr_groups import implied_keys, members_of, require_objects
from zloader.common.errors import FormatError, SourceError, StoreError
from zloader.common.messages import listed
from zloader.common.records import Rows
from zloader.conversion.joining.content import Content
from zloader.conversion.joining.genes import GeneRule, name_genes
from zloader.conversion.joining.selection import Selection, genes_by_of
from zloader.conversion.sources.inputs import Input, Problems, make_labels_unique
from zloader.conversion.sources.join import JoinedMatrix
from zloader.conversion.sources.windows import SourceMatrix
from zloader.conversion.writing.fitting import new_elements
from zloader.conversion.writing.stored import stored_layout
from zloader.dataset.dataset import Dataset
from zloader.selecting.gene_names import GenesBy, checked_genes_by, mismatch
from zloader.storage.coders import chain_of
from zloader.storage.layout import ArrayLayout
from zloader.storage.placement import ZarrPlacement

TOGETHER = "convert all sources together"


class AppendPlan:
    """The store to append to, and its content before the append. Raises FormatError or StoreError if it cannot grow."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self._root, self._url, self._node = dataset.store.root, dataset.store.location.url, dataset.stores[0].node
        if "zloader" not in self._root.attrs:
            raise FormatError(f"{self._url} was not written by zloader: convert it first")
        nodes, recorded = members_of(self._root, self._url), self._root.attrs["zloader"]
        if not isinstance(recorded, dict) or not isinstance(recorded.get("select", {}), dict):
            raise FormatError(f"cannot read the record of its conversion in {self._url}: convert it again")
        if dataset.modalities or "part_of" in recorded:
            what = "a MuData" if dataset.modalities else "a modality of a MuData"
            raise StoreError(
                f"{self._url} is {what}, whose modalities would no longer have the rows that it says: {TOGETHER}, or "
                "open several stores as one with zl.open_dataset([...])"
            )
        self._recorded, self._select = dict(recorded), dict(recorded.get("select", {}))
        if self._recorded.get("shuffle_seed") is not None:
            raise StoreError(f"the rows of {self._url} are shuffled, but appended rows would not be: {TOGETHER}")
        if self._recorded.get("order") is not None:
            raise StoreError(f"the rows of {self._url} lie along a curve, but appended rows would not: {TOGETHER}")
        self._parts = {part: sorted(self._root[part]) for part in ("layers", "obsm", "obsp") if part in self._root}
        self._names = [*dataset.matrix_names, *(f"obsm/{name}" for name in self._parts.get("obsm", []))]
        self._columns = dataset.obs_columns
        # zarr would silently replace a missing or empty object by zeros.
        require_objects(implied_keys(nodes), dataset.store.object_sizes(), self._url)
        self._refuse_fixed()
        self._require_writable()

    def _refuse_fixed(self) -> None:
        """Raises StoreError for elements along the rows that cannot be appended to."""
        fixed = [f"obsp/{name}" for name in self._parts.get("obsp", [])]
        for name in self._parts.get("obsm", []):
            node = self._node(f"obsm/{name}")
            if not (isinstance(node, zarr.Array) and node.ndim == 2 and node.dtype.kind in "biuf"):
                fixed.append(f"obsm/{name}")
        if fixed:
            raise StoreError(f"cannot append rows to {listed(fixed)} of {self._url}: {TOGETHER}, or leave them out")

    def _matrix_arrays(self) -> list[zarr.Array[Any]]:
        found = []
        for name in self._names:
            is_dense = isinstance(self._node(name), zarr.Array)
            found += [name] if is_dense else [f"{name}/{part}" for part in ("data", "indices", "indptr")]
        return [self._node(path) for path in found]

    def _require_writable(self) -> None:
        """Raises StoreError for a matrix that is not in checked shards, FormatError for codecs that are not supported.

        New chunks get the codecs of the array, so a store of an earlier version keeps its own.
        """
        layouts = [stored_layout(array) for array in self._matrix_arrays()]
        if not all(_is_checked_shards(layout) for layout in layouts):
            raise StoreError(
                f"{self._url} has codecs or shards that this version of zloader does not write: {TOGETHER}"
            )

    def content(self, inputs: Sequence[Input], genes_by: GenesBy = None) -> Content:
        """The content to append. Raises SourceError listing all problems if sources lack anything the store has."""
        make_labels_unique(inputs, {source["label"] for source in self._recorded.get("sources", [])})
        if genes_by is None and isinstance(recorded := genes_by_of(self._select), str):
            genes_by = recorded  # lists and new names were for the sources of the store
        genes_by = checked_genes_by(genes_by)
        name_genes(inputs, genes_by)
        genes = self._names_of("var")
        with Problems() as problems:
            for source in inputs:
                self._check_parts(source, problems)
                with problems.noting():
                    _positions(self._rule().var_of(source).index, genes, self._rule().at(source))
                if source.has_raw and "raw" in self._root:
                    rule = self._rule(raw=True)
                    with problems.noting():
                        _positions(rule.var_of(source).index, self._names_of("raw/var"), rule.at(source))
        return Content(inputs, self._selection(genes, genes_by))

    def _rule(self, *, raw: bool = False) -> GeneRule:
        return GeneRule(raw=raw or self._select.get("x") == "raw/X")

    def _selection(self, genes: pd.Index, genes_by: GenesBy) -> Selection:
        source_column = self._select.get("source_column")
        return Selection(
            x=self._select.get("x", "X"),
            layers=self._parts.get("layers", []),
            obsm=self._parts.get("obsm", []),
            obs=[name for name in self._columns if name != source_column],
            raw="raw" in self._root,
            genes=list(genes) if genes.is_unique else None,
            genes_by=genes_by,
            source_column=source_column,
        )

    def _names_of(self, frame: str) -> pd.Index:
        return self.dataset.store.names(frame)

    def _check_parts(self, source: Input, problems: Problems) -> None:
        x, source_column = self._select.get("x", "X"), self._select.get("source_column")
        wanted = [x if name == "X" else name for name in self._names]
        lacking = [path for path in wanted if path not in source]
        lacking += [f"obs/{name}" for name in self._columns if name not in [*source.obs_columns, source_column]]
        if lacking:
            problems.add(f"{source.name} lacks {listed(lacking)}, which {self._url} has: add it, or {TOGETHER}")

    def left_out(self, inputs: Sequence[Input]) -> list[str]:
        """The elements along the rows of the sources that the store does not have."""
        found: dict[str, None] = {}
        for source in inputs:
            found |= dict.fromkeys(f"obs/{name}" for name in source.obs_columns if name not in self._columns)
            for part in ("layers", "obsm", "obsp"):
                found |= dict.fromkeys(f"{part}/{name}" for name in source.keys(part))
            found |= dict.fromkeys(["raw"] if source.has_raw else [])
        taken = {self._select.get("x"), *self._names, *(["raw"] if "raw" in self._root else [])}
        return [name for name in found if name not in taken]

    def obs(self, content: Content) -> Iterator[tuple[str, NDArray[Any]]]:
        """The path of each array of obs, and the elements to append to it. Raises SourceError."""
        names, index = self._new_names(content), str(self._root["obs"].attrs["_index"])
        columns = {name: lambda name=name: content.obs_column(name) for name in self._columns}
        if index in columns and not columns[index]().astype(object).equals(names):
            raise SourceError(
                f"obs column {index!r} is the index of {self._url}, but differs from the obs names of the sources: "
                "make them equal"
            )
        for name, values in ({index: lambda: names} | columns).items():
            node = self._node(f"obs/{name}")
            try:
                parts = new_elements(node, values())
            except SourceError as error:
                raise SourceError(
                    f"obs column {name!r} does not fit {self._url}: {error}. {TOGETHER.capitalize()}"
                ) from error
            yield from ((f"obs/{name}/{part}".rstrip("/"), new) for part, new in parts.items() if len(new))

    def _new_names(self, content: Content) -> pd.Series:
        names = content.obs_names()
        if self._select.get("unique_obs_names"):
            old = self._names_of("obs")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                names = anndata.utils.make_index_unique(old.append(names))[len(old) :]
        return pd.Series(names, dtype=object)

    def matrices(self, content: Content, window_bytes: int) -> Iterator[SourceMatrix]:
        """The new rows of each matrix of the store, in the order of `matrix_names`. Raises SourceError."""
        found = {matrix.name: matrix for matrix in content.matrices(window_bytes)}
        for name in self._names:
            if name not in found:
                raise SourceError(f"{name} of the sources is not stored in the same form as in {self._url}: {TOGETHER}")
            yield self._in_order(found[name], content)

    def _in_order(self, matrix: SourceMatrix, content: Content) -> SourceMatrix:
        if matrix.name != "raw/X" or content.raw_var is None:
            return matrix
        genes = self._names_of("raw/var")
        positions = _positions(content.raw_var.index, genes, "raw/var")
        return matrix if positions is None else JoinedMatrix(matrix.name, [(matrix, positions)], n_genes=len(genes))

    def provenance(self, inputs: Sequence[Input]) -> dict[str, Any]:
        """The root's attribute `zloader`, with the new sources."""
        new = [{"label": source.label, "rows": source.n_rows} for source in inputs]
        recorded = {
            name: value for name, value in self._recorded.items() if name != "conversion"
        }  # no longer its result
        return recorded | {"sources": [*recorded.get("sources", []), *new]}


def _is_checked_shards(layout: ArrayLayout) -> bool:
    chain = chain_of(layout.codecs, layout.path)
    placement = layout.placement
    assert isinstance(placement, ZarrPlacement)
    return placement.sharded and placement.index_checksum and placement.index_at_end and chain.checked


def _positions(names: pd.Index, genes: pd.Index, at: str) -> Rows | None:
    """The position of each of `names` in `genes`, or None if the order is equal. Raises SourceError if names differ."""
    if list(names) == list(genes):
        return None
    lacks, adds = genes.difference(names, sort=False), names.difference(genes, sort=False)
    if len(lacks) or len(adds):
        found = [f"lacks {len(lacks)} genes of the store ({listed(lacks)})"] if len(lacks) else []
        found += [f"has {len(adds)} genes that the store lacks ({listed(adds)})"] if len(adds) else []
        raise SourceError(
            f"{at} {' and '.join(found)}: name genes as in the store with genes_by=... (--genes-by), or {TOGETHER}, "
            f"with join='inner' or 'outer' (--join){mismatch([('the store', genes), (at, names)])}"
        )
    if not (names.is_unique and genes.is_unique):
        raise SourceError(f"{at}: gene names are repeated and in a different order than in the store: {TOGETHER}")
    return np.asarray(genes.get_indexer(names), np.int64)
