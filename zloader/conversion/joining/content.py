"""The content of the store: one or more sources and a selection, presented as the one AnnData to be stored.

The result of several sources equals that of `anndata.concat`, but is built piece by piece: matrices in windows, obs one
column at a time, and everything else one element at a time, by `concat` itself.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import anndata as ad
import anndata.utils
import numpy as np
import pandas as pd
import scipy.sparse

from zloader.common.errors import OptionError, SourceError
from zloader.common.locks import cached_property
from zloader.common.records import Rows
from zloader.conversion.joining.selection import (
    GeneRule,
    Selection,
    Stack,
    common_width,
    gene_axis,
    gene_matrices,
    keys_of,
    name_genes,
    shared,
)
from zloader.conversion.joining.union import NOTHING, is_storable, kind_of, storable, stored_kind, unite
from zloader.conversion.sources.inputs import Input, Problems, by_source, refuse_unknown
from zloader.conversion.sources.reorder import Permutation, ShuffledMatrix
from zloader.conversion.sources.windows import SourceMatrix

_GROUPS = ("layers", "obsm", "varm", "obsp", "varp")
SOURCE_ROW = "source_row"  # the obs column with the original row number of each row of shuffled content


class Content:
    """One or more sources as one AnnData: `n_rows` rows, `var`, `raw_var` (None without raw) and `obs_columns`.

    The constructor validates the sources: it reads the metadata, var, and the obs columns whose metadata do not tell
    their kind. It raises OptionError, or one SourceError with all problems. `dropped` lists the elements that cannot be
    joined over several sources; it is complete once `elements` has been exhausted. `lost_genes` is a warning if few
    genes of a source match those of the others, or empty. `groups` are those that there are even if they are empty,
    each with attributes of its own. `names` gives the obs names of a modality if the whole MuData makes them unique.
    """

    names: Callable[[], pd.Index] | None = None

    def __init__(self, inputs: Sequence[Input], selection: Selection) -> None:
        if not inputs:
            raise OptionError("the list of sources is empty: pass at least one source")
        self._sources, self._selection = list(inputs), selection
        self._single = self._sources[0] if len(self._sources) == 1 else None
        name_genes(inputs, selection.genes_by)
        self.n_rows = sum(source.n_rows for source in inputs)
        self.raw_var: pd.DataFrame | None = None
        self.dropped: list[str] = []
        self.groups: dict[str, dict[str, Any]] = {name: {} for name in _GROUPS}
        self._stacks: list[Stack] = []
        self.obs_columns = self._chosen_columns()
        with Problems() as problems:
            for check in (self._join_genes, self._join_raw, self._join_rows):
                with problems.noting():
                    check()
            for name in self.obs_columns:
                if name != selection.source_column:
                    with problems.noting():
                        self._check_column(name)
            for stack in self._stacks:
                for number, source in enumerate(self._sources):
                    with problems.noting():
                        stack.open_part(source, number, window_bytes=1)

    def _chosen_columns(self) -> list[str]:
        available = list(dict.fromkeys(column for source in self._sources for column in source.obs_columns))
        chosen = available if self._selection.obs is None else list(self._selection.obs)
        refuse_unknown("obs", chosen, available)
        added = self._selection.source_column
        if added is None:
            return chosen
        if added in chosen:
            raise OptionError(f"obs already has a column {added!r}: choose another source_column (--source-column)")
        return [*chosen, added]

    def _join_genes(self) -> None:
        select = self._selection
        self._rule = GeneRule(join=select.join, genes=select.genes, raw=select.x == "raw/X")
        with Problems() as problems:
            with problems.noting():
                paths = gene_matrices(self._sources, select)
            if not self._rule.raw or all(source.has_raw for source in self._sources):
                with problems.noting():
                    self._axis = gene_axis(self._sources, self._rule)
        self.var, self.lost_genes = self._axis.var, self._axis.lost
        self.dropped += [f"var/{column}" for column in self._axis.dropped]
        self._stacks += [Stack.of_genes(name, path, self._axis) for name, path in paths.items()]

    def _join_raw(self) -> None:
        select, lacking = self._selection, [source.name for source in self._sources if not source.has_raw]
        if not select.raw or select.x == "raw/X" or len(lacking) == len(self._sources):
            return
        if lacking:
            raise SourceError(
                f"raw is missing in {', '.join(lacking)}, but other sources have it: leave it out with "
                "select=zl.Selection(raw=False) (--no-raw)"
            )
        axis = gene_axis(self._sources, GeneRule(join=select.join, raw=True))
        self._stacks.append(Stack.of_genes("raw/X", "raw/X", axis))
        self.raw_var = axis.var
        if self._single is None:  # anndata joins raw without a merge strategy, so only the names remain
            self.raw_var = axis.var[[]]
            self.dropped += [f"raw/var/{name}" for name in [*axis.var.columns, *axis.dropped]]
            self.dropped += [f"raw/varm/{name}" for name in keys_of(self._sources, "raw/varm")]

    def _join_rows(self) -> None:
        self._by_rows: list[str] = []
        with Problems() as problems:
            for path in shared(self._sources, "obsm", self._selection):
                with problems.noting():
                    width = common_width(self._sources, path)
                    if width is None:
                        self._by_rows.append(path)
                    else:
                        self._stacks.append(Stack.of_columns(path, width, len(self._sources)))
        for path in (f"obsp/{name}" for name in keys_of(self._sources, "obsp")):
            if self._single is None:
                self.dropped.append(path)
            elif self._single.node(path).encoding == "csr":
                self._stacks.append(Stack.of_columns(path, self.n_rows, 1))
            else:
                self._by_rows.append(path)

    def _check_column(self, name: str) -> None:
        having = [source for source in self._sources if name in source.obs_columns]
        kinds = {
            source.name: stored_kind(source.node(f"obs/{name}")) or kind_of(source.obs_column(name))
            for source in having
        }
        if len(set(kinds.values()) - {NOTHING}) > 1:
            kinds = {one.name: kinds[one.name] for one in having if one.obs_column(name).notna().any()}
        several = len(set(kinds.values()) - {NOTHING}) > 1
        if several or not all(map(is_storable, kinds.values())):
            raise SourceError(
                f"obs column {name!r} cannot be {'joined' if several else 'stored'}: it holds {by_source(kinds)}. "
                "Convert it to one type, or list the columns to store with "
                "select=zl.Selection(obs=[...]) (--obs a,b)"
            )

    def obs_names(self) -> pd.Index:
        """The names of all rows. The index keeps its name if all sources agree on it."""
        if self.names is not None:
            return self.names()
        parts = [source.obs_names() for source in self._sources]
        names = parts[0]
        if self._single is None:
            names = pd.Index(pd.concat([part.to_series() for part in parts], ignore_index=True))
        added = [] if self._selection.source_column is None else [self._selection.source_column]
        if names.name in (added if self._single is not None else self.obs_columns):
            names = names.rename(None)  # a column has the same name, but other values
        if not self._selection.unique_obs_names:
            return names
        with _quiet():
            return anndata.utils.make_index_unique(names)

    def obs_column(self, name: str) -> pd.Series:
        """One column of obs, with a RangeIndex, in a dtype that can be stored. Raises SourceError."""
        lengths = [source.n_rows for source in self._sources]
        if name == self._selection.source_column:
            codes = np.repeat(np.arange(len(lengths)), lengths)
            return pd.Series(pd.Categorical.from_codes(codes, [source.label for source in self._sources]), name=name)
        with_dtypes = f"obs column {name!r}"
        try:
            if self._single is not None:
                return storable(self._single.obs_column(name))
            columns = [source.obs_column(name) if name in source.obs_columns else None for source in self._sources]
            held = {
                one.name: str(found.dtype)
                for one, found in zip(self._sources, columns, strict=True)
                if found is not None
            }
            with_dtypes = f"obs column {name!r} ({by_source(held)})"
            return unite(columns, lengths).rename(name)
        except SourceError as error:
            raise SourceError(f"{with_dtypes}: {error}") from error

    def matrices(self, window_bytes: int) -> Iterator[SourceMatrix]:
        """Opens X, the layers, raw/X, then the matrices of obsm and obsp, without reading them. Raises SourceError."""
        for stack in self._stacks:
            yield stack.open(self._sources, window_bytes)

    def elements(self) -> Iterator[tuple[str, Any]]:
        """The paths and values of all elements except matrices, obs, var and raw/var, as anndata writes them."""
        for part in ("varm",) if self._rule.raw else ("varm", "varp"):
            yield from self._gene_elements(part)
        yield "uns", self._uns()
        for path in self._by_rows:
            element = self._single.element(path) if self._single is not None else self._stacked(path)
            yield path, element.set_axis(self.obs_names()) if isinstance(element, pd.DataFrame) else element
        if self._single is not None and self.raw_var is not None:
            for path in (f"raw/varm/{name}" for name in self._single.keys("raw/varm")):
                element = self._single.element(path)
                yield path, element.set_axis(self.raw_var.index) if isinstance(element, pd.DataFrame) else element

    def _drop(self, paths: list[str]) -> None:
        """Records elements that cannot be joined; each only once, even if `elements` is called again."""
        self.dropped += [path for path in paths if path not in self.dropped]

    def _gene_elements(self, part: str) -> Iterator[tuple[str, Any]]:
        within = f"raw/{part}" if self._rule.raw else part
        for name in keys_of(self._sources, within):
            if self._single is not None and self._axis.maps[0] is None and self._single.genes_by is None:
                yield f"{part}/{name}", self._single.element(f"{within}/{name}")
                continue
            in_all = all(name in source.keys(within) for source in self._sources)
            merged = self._merged(part, f"{within}/{name}") if in_all else None
            if merged is None:
                self._drop([f"{part}/{name}"])
            else:
                yield f"{part}/{name}", merged

    def _merged(self, part: str, path: str) -> Any:
        """An element of varm or varp over the joined genes if it agrees in all sources, else None."""
        names, key = self.var.index, path.rpartition("/")[2]
        shells = []
        with _quiet():
            for source, genes in zip(self._sources, self._axis.maps, strict=True):
                var = source.var(raw=self._rule.raw)[[]]
                kept = np.arange(len(names)) if genes is None else np.flatnonzero(genes >= 0)
                shell = ad.AnnData(var=var, **{part: {key: source.element(path)}})[:, kept].copy()
                shell.var_names = names if genes is None else names[genes[kept]]
                shells.append(shell)
            merged = ad.concat(shells, join="outer", merge="same")[:, names].copy()
        return getattr(merged, part).get(key)

    def _uns(self) -> dict[str, Any]:
        def of(source: Input) -> dict[str, Any]:
            return dict(source.element("uns")) if "uns" in source else {}

        def same(one: dict[str, Any], other: Input) -> dict[str, Any]:
            merged: dict[str, Any] = ad.concat([ad.AnnData(uns=one), ad.AnnData(uns=of(other))], uns_merge="same").uns
            return merged

        with _quiet():
            shared = reduce(same, self._sources[1:], of(self._sources[0]))
        self._drop([f"uns/{key}" for key in keys_of(self._sources, "uns") if key not in shared])
        return dict(shared)

    def _stacked(self, path: str) -> Any:
        """An element of obsm, concatenated over the sources."""
        key = path.rpartition("/")[2]
        with _quiet():
            shells = [
                ad.AnnData(obs=pd.DataFrame(index=source.obs_names()), obsm={key: source.element(path)})
                for source in self._sources
            ]
            join = "inner" if self._selection.join == "inner" else "outer"
            return ad.concat(shells, join=join, fill_value=0).obsm[key]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides anndata's warnings about repeated names and pandas' warnings about empty columns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


class RearrangedContent:
    """A Content with its rows in another order.

    Raises OptionError if obs already has a column `source_row`.
    """

    def __init__(self, content: Content, positions: Permutation, *, bucket_bytes: int) -> None:
        """`positions` gives the new positions of source rows. `bucket_bytes` bounds the memory for sorting rows."""
        if SOURCE_ROW in content.obs_columns:
            raise OptionError(
                f"obs already has a column {SOURCE_ROW!r}: choose other columns with "
                "select=zl.Selection(obs=[...]) (--obs)"
            )
        self._content, self._positions, self._bucket_bytes = content, positions, bucket_bytes
        self.n_rows, self.var, self.raw_var = content.n_rows, content.var, content.raw_var
        self.dropped, self.groups, self.lost_genes = content.dropped, content.groups, content.lost_genes
        self.obs_columns = [*content.obs_columns, SOURCE_ROW]

    @cached_property
    def order(self) -> Rows:
        """The source row of each row, in the new order."""
        rows = np.arange(self.n_rows, dtype=np.int64)
        order = np.empty_like(rows)
        order[self._positions(rows)] = rows
        return order

    def obs_names(self) -> pd.Index:
        """The obs names in the new order."""
        return self._content.obs_names()[self.order]

    def obs_column(self, name: str) -> pd.Series:
        """An obs column in the new order, or `source_row`."""
        if name == SOURCE_ROW:
            return pd.Series(self.order)
        return self._content.obs_column(name).iloc[self.order]

    def matrices(self, window_bytes: int) -> Iterator[SourceMatrix]:
        """The matrices of `Content.matrices`, each rearranged out of core."""
        for matrix in self._content.matrices(window_bytes):
            square = matrix.name.startswith("obsp/")
            yield ShuffledMatrix(matrix, self._positions, window_bytes=self._bucket_bytes, columns=square)

    def elements(self) -> Iterator[tuple[str, Any]]:
        """The elements of `Content.elements`. Those by row are in the new order, and so are the rows of modalities."""
        for path, element in self._content.elements():
            if path.startswith(("obsm/", "obsp/")):
                rows = element.tocsr() if scipy.sparse.issparse(element) else element
                element = rows.iloc[self.order] if isinstance(rows, pd.DataFrame) else rows[self.order]
                if path.startswith("obsp/"):
                    element = element[:, self.order]
            elif path.startswith("obsmap/"):
                has = np.asarray(element).reshape(-1)[self.order] > 0
                element = np.where(has, np.cumsum(has), 0).astype(element.dtype)
            yield path, element
