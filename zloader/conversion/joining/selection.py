"""The parts of the sources that a conversion stores: the choice, the genes, and what the sources have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd

from zloader.common.errors import OptionError, SourceError
from zloader.common.messages import listed
from zloader.common.records import Rows
from zloader.conversion.sources.inputs import Input, Problems, by_source, refuse_unknown
from zloader.conversion.sources.nodes import Node, require_names
from zloader.conversion.sources.windows import JoinedMatrix, SourceMatrix
from zloader.selecting.gene_names import (
    GenesBy,
    checked_genes_by,
    for_each,
    lost_genes,
    mismatch,
    new_names,
    renamed,
    renamed_by,
    repeats,
)

_JOINS = (None, "inner", "outer")
RENAMED = True  # recorded in place of `genes_by` for genes that were renamed by a mapping or a function


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Chooses the parts and genes of the sources that `convert` stores. By default it takes everything.

    >>> import zloader as zl
    >>> counts = zl.Selection(x="layers/counts", layers=[], obsm=[], raw=False)
    >>> atlas = zl.Selection(join="outer", genes_by="ensembl_id", source_column="donor")

    - `x`: the matrix that becomes X: "X", "layers/NAME" or "raw/X". With "raw/X", raw's var becomes var.
    - `layers`, `obsm`, `obs`: names to store. None stores all, an empty list none.
    - `raw`: False leaves raw out.
    - `join`: how to join the genes of several sources: "inner" keeps the shared genes, "outer" keeps all and fills with
      zeros, None requires every source to have the same genes.
    - `genes`: exactly these genes, in this order, instead of a `join`. A gene that a source lacks is filled with zeros.
    - `genes_by`: what names the genes, also for joining them. With None, var_names. Otherwise the var column of that
      name; or a mapping from names to new ones, such as orthologs; or a function of a name, such as str.upper. A gene
      without a new name keeps its own. A list has one of these for each source. The former names become a var column.
    - `source_column`: the name of an obs column to add, with the label of each row's source.
    - `unique_obs_names`: append -1, -2, ... to repeated obs names.

    Raises OptionError for contradictory or repeated values. `convert` raises it for names that no source has.
    """

    x: str = "X"
    layers: Sequence[str] | None = None
    obsm: Sequence[str] | None = None
    obs: Sequence[str] | None = None
    raw: bool = True
    join: str | None = None
    genes: Sequence[str] | None = None
    genes_by: GenesBy = None
    source_column: str | None = None
    unique_obs_names: bool = False

    def __post_init__(self) -> None:
        for option in ("layers", "obsm", "obs", "genes"):
            names = getattr(self, option)
            if isinstance(names, str):
                raise OptionError(f"{option} must be a list of names, such as [{names!r}], not a single string")
            if names is not None:
                object.__setattr__(self, option, tuple(dict.fromkeys(map(str, names))))
                listed_names = pd.Index(list(map(str, names)))
                repeated = listed_names[listed_names.duplicated()].unique()
                if len(repeated):
                    raise OptionError(f"{option} has repeated names: {listed(repeated)}. List each name once")
        if self.x not in ("X", "raw/X") and not (self.x.startswith("layers/") and len(self.x) > len("layers/")):
            raise OptionError(f"x must be 'X', 'layers/NAME' or 'raw/X', not {self.x!r}")
        if not (self.join is None or isinstance(self.join, str)) or self.join not in _JOINS:
            listing = "" if isinstance(self.join, str) else ". List genes with genes=[...] instead"
            raise OptionError(f"join must be 'inner', 'outer' or None, not {self.join!r:.100}{listing}")
        object.__setattr__(self, "genes_by", checked_genes_by(self.genes_by))
        if self.genes is not None and self.join is not None:
            raise OptionError(f"genes=[...] and join={self.join!r} exclude each other: pass only one")
        if self.genes is not None and not self.genes:
            raise OptionError("genes is empty: list at least one gene, or pass None for all")

    def plain(self, genes_by: Any) -> dict[str, Any]:
        """All options as plain types, with this `genes_by`, because their own may be functions."""
        return dataclasses.asdict(dataclasses.replace(self, genes_by=None)) | {"genes_by": genes_by}

    def recorded(self) -> dict[str, Any]:
        """The options as a store records them: without defaults, and without genes and their new names.

        New names, which may be as many as the genes, are recorded as RENAMED, and var columns by name.
        """
        each = self.genes_by if isinstance(self.genes_by, tuple) else [self.genes_by]
        select = self.plain(self.genes_by if all(by is None or isinstance(by, str) for by in each) else RENAMED)
        select["genes"] = None if self.genes is None else "var_names"
        return {name: value for name, value in select.items() if value != getattr(Selection(), name)}


# ---- the gene axis of several sources: names are joined as in `anndata.concat`, which also makes var, frame by frame


@dataclass(frozen=True, kw_only=True)
class GeneRule:
    """How to join genes: `join` is "inner", "outer" or None (all sources must agree); `genes` lists them instead.

    With `raw` the rule applies to raw/var.
    """

    join: str | None = None
    genes: Sequence[str] | None = None
    raw: bool = False

    def var_of(self, source: Input) -> pd.DataFrame:
        """The var of a source, named as its `genes_by` says; the previous names are kept as a column.

        Raises SourceError if the column is absent, has missing values or repeats a name, and OptionError if two genes
        get the same new name.
        """
        var = source.var(raw=self.raw)
        if isinstance(source.genes_by, dict):
            return renamed(var, renamed_by(source.genes_by, var.index, self.at(source)))
        if source.genes_by is None or source.genes_by == var.index.name:
            return var
        return self._by_column(var, source.genes_by, self.at(source))

    def _by_column(self, var: pd.DataFrame, column: str, at: str) -> pd.DataFrame:
        if column not in var:
            raise SourceError(f"{at} has no column {column!r} to name genes by. It has: {listed(var.columns)}")
        names = var[column]
        if names.isna().any():
            raise SourceError(
                f"{at} has {int(names.isna().sum())} genes without a value in {column!r}, so they would have no name"
            )
        names = pd.Index(names.astype(str).to_numpy(dtype=object))
        if not names.is_unique:
            raise SourceError(f"{at}: {repeats(names)} in the column {column!r}, so it cannot name the genes")
        return renamed(var, names)

    def at(self, source: Input) -> str:
        """Where the genes of a source are, for messages: `a.h5ad: var`."""
        return f"{source.name}: {'raw/var' if self.raw else 'var'}"


def name_genes(sources: Sequence[Input], genes_by: Any) -> None:
    """Says how the genes of each source are named, as `Selection.genes_by` does. Raises OptionError."""
    for source, by in zip(sources, for_each(genes_by, len(sources)), strict=True):
        if callable(by):  # once, because nothing says that it gives the same names again
            names = [*source.var().index, *(source.var(raw=True).index if source.has_raw else [])]
            by = new_names(by, dict.fromkeys(map(str, names)))
        source.genes_by = by


@dataclass(frozen=True, kw_only=True)
class GeneAxis:
    """The joined genes.

    `var` is the merged frame. `widths` holds the gene count of each source. `maps` holds, per source, the new position
    of each gene (int64, -1 for dropped genes), or None if no gene moves. `dropped` lists the var columns that differ
    between sources. `lost` is a warning if few genes of a source match those of the others, or empty.
    """

    var: pd.DataFrame
    widths: list[int]
    maps: list[Rows | None]
    dropped: list[str]
    lost: str = ""


def gene_axis(sources: Sequence[Input], rule: GeneRule) -> GeneAxis:
    """The axis of one or more sources. Raises SourceError with all problems, and OptionError for unknown `genes`."""
    if len(sources) == 1 and rule.genes is None:
        var = rule.var_of(sources[0])
        return GeneAxis(var=var, widths=[len(var)], maps=[None], dropped=[])
    names, of_sources = _joined_names(sources, rule)
    widths: list[int] = []
    maps: list[Rows | None] = []
    columns: dict[str, None] = {}
    merged: ad.AnnData | None = None
    for source in sources:
        var = rule.var_of(source)
        widths.append(len(var))
        maps.append(None if var.index.equals(names) else np.asarray(names.get_indexer(var.index), np.int64))
        columns |= dict.fromkeys(var.columns)
        shell = ad.AnnData(var=var.reindex(names))
        # Two at a time, which gives the result of one concat of all sources without holding every frame.
        merged = shell if merged is None else ad.concat([merged, shell], merge="same")
    assert merged is not None
    dropped = [column for column in columns if column not in merged.var]
    joins = len(sources) > 1 and (rule.join is not None or rule.genes is not None)
    lost = lost_genes(str(rule.join), of_sources, rule.genes) if joins else ""
    return GeneAxis(var=merged.var, widths=widths, maps=maps, dropped=dropped, lost=lost)


def _joined_names(sources: Sequence[Input], rule: GeneRule) -> tuple[pd.Index, list[tuple[str, pd.Index]]]:
    """The joined names, and those of each source."""
    first: pd.Index | None = None
    of_sources: list[tuple[str, pd.Index]] = []
    names = pd.Index([], dtype=object)
    missing = set(rule.genes or ())
    with Problems() as problems:
        for source in sources:
            with problems.noting():
                index = _unique_names(source, rule)
                of_sources.append((source.name, index))
                if first is None:
                    first = names = index
                elif rule.genes is None and rule.join is None and len(first.symmetric_difference(index)):
                    problems.add(_difference(rule, (sources[0], first), (source, index)))
                # Like anndata.concat.
                names = names.union(index) if rule.join == "outer" else names.intersection(index)
                missing.difference_update(index)
    if rule.genes is None:
        if first is not None and len(first) and not len(names):
            raise SourceError(
                f"no gene is in all sources (the first has {listed(first)}): name the genes alike with genes_by=... "
                "(--genes-by), a var column or new names, or pass join='outer' (--join outer)"
                f"{mismatch(of_sources)}"
            )
        return names, of_sources
    if missing:
        lacking = [gene for gene in rule.genes if gene in missing]
        raise OptionError(f"no source has {len(lacking)} of the requested genes: {listed(lacking)}")
    return pd.Index(rule.genes), of_sources


def _unique_names(source: Input, rule: GeneRule) -> pd.Index:
    index = rule.var_of(source).index
    if not index.is_unique:
        raise SourceError(
            f"{rule.at(source)}: {repeats(index)}, so the genes cannot be joined: choose a column of unique names "
            "with genes_by=... (--genes-by), or make them unique with var_names_make_unique"
        )
    return index


def _difference(rule: GeneRule, first: tuple[Input, pd.Index], second: tuple[Input, pd.Index]) -> str:
    (one, names), (other, others) = first, second
    lacks, adds = names.difference(others, sort=False), others.difference(names, sort=False)
    found = [f"lacks {len(lacks)} genes of {one.name} ({listed(lacks, 3)})"] if len(lacks) else []
    found += [f"has {len(adds)} that {one.name} lacks ({listed(adds, 3)})"] if len(adds) else []
    remedy = "leave raw out with select=zl.Selection(raw=False) (--no-raw)"
    if not rule.raw:
        remedy = "list the genes to store with select=zl.Selection(genes=[...]) (--genes FILE)"
    return (
        f"{rule.at(other)} {' and '.join(found)}: pass join='inner' or 'outer' (--join), or {remedy}"
        f"{mismatch([(one.name, names), (other.name, others)])}"
    )


# ---- the parts that were chosen

_CHOOSE = "choose parts that all sources have with select=zl.Selection({0}=[...]) (--{0} a,b), or [] (--{0} none)"


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One matrix of the store: its `path` in the sources, and the `widths` and gene maps of each source."""

    name: str
    path: str
    n_genes: int
    widths: list[int]
    maps: list[Rows | None]

    @classmethod
    def of_genes(cls, name: str, path: str, axis: GeneAxis) -> Stack:
        """A matrix over the genes of `axis`."""
        return cls(name=name, path=path, n_genes=len(axis.var), widths=axis.widths, maps=axis.maps)

    @classmethod
    def of_columns(cls, path: str, width: int, n_sources: int) -> Stack:
        """A matrix with `width` columns in every source."""
        return cls(name=path, path=path, n_genes=width, widths=[width] * n_sources, maps=[None] * n_sources)

    def open(self, sources: Sequence[Input], window_bytes: int) -> SourceMatrix:
        """The joined matrix of all sources. Raises SourceError."""
        above, _, name = self.name.rpartition("/")
        require_names(above, [name])
        parts = [self.open_part(source, number, window_bytes) for number, source in enumerate(sources)]
        if len(parts) == 1 and self.maps[0] is None:
            return parts[0]
        return JoinedMatrix(self.name, list(zip(parts, self.maps, strict=True)), n_genes=self.n_genes)

    def open_part(self, source: Input, number: int, window_bytes: int) -> SourceMatrix:
        """The part in source `number`. Raises SourceError."""
        shape = (source.n_rows, self.widths[number])
        return source.matrix(self.path, self.name, shape=shape, window_bytes=window_bytes)


def keys_of(sources: Sequence[Input], part: str) -> list[str]:
    """The names in `part` (layers, obsm, varm, ...) that any source has."""
    return list(dict.fromkeys(key for source in sources for key in source.keys(part)))


def gene_matrices(sources: Sequence[Input], select: Selection) -> dict[str, str]:
    """Maps X and the layers of the store to their paths in the sources.

    Raises SourceError if only some of the sources have them, and OptionError if none has.
    """
    paths = {"X": select.x} if _has_x(sources, select.x) else {}
    layers = [path for path in shared(sources, "layers", select) if path != select.x]
    if select.x == "raw/X" and layers:
        raise OptionError(
            f"the layers ({listed(layers)}) have other genes than raw/X: leave them out with "
            "select=zl.Selection(layers=[]) (--layers none)"
        )
    return paths | {path: path for path in layers}


def _has_x(sources: Sequence[Input], x: str) -> bool:
    lacking = [source.name for source in sources if x not in source]
    if lacking and len(lacking) < len(sources):
        raise SourceError(
            f"{x} is missing in {listed(lacking)}, but other sources have it: choose the matrix for X with "
            "select=zl.Selection(x=...) (--x)"
        )
    if lacking and x != "X":
        paths = ["X", "raw/X", *(f"layers/{name}" for name in keys_of(sources, "layers"))]
        refuse_unknown("x", [x], [path for path in paths if any(path in source for source in sources)])
    return not lacking


def shared(sources: Sequence[Input], part: str, select: Selection) -> list[str]:
    """The chosen paths in layers or obsm. Raises SourceError unless all sources have them."""
    wanted, available = getattr(select, part), keys_of(sources, part)
    names = available if wanted is None else wanted
    refuse_unknown(part, names, available)
    with Problems() as problems:
        for name in names:
            lacking = [source.name for source in sources if name not in source.keys(part)]
            if lacking and f"{part}/{name}" != select.x:
                choose = _CHOOSE.format(part)
                problems.add(f"{part}/{name} is missing in {listed(lacking)}, but other sources have it: {choose}")
    return [f"{part}/{name}" for name in names]


def common_width(sources: Sequence[Input], path: str) -> int | None:
    """The width of a dense matrix, None for any other element. Raises SourceError if the sources disagree."""
    nodes = {source.name: source.node(path) for source in sources}
    kinds = {name: _kind_by_rows(node) for name, node in nodes.items()}
    found = set(kinds.values())
    if len(found) > 1 and found != {"dense", "sparse"}:
        raise SourceError(f"{path} cannot be joined: it is {by_source(kinds)}. {_CHOOSE.format('obsm').capitalize()}")
    if not found <= {"dense", "sparse", "array"}:
        return None
    shapes = {name: node.shape[1:] for name, node in nodes.items()}
    if len(set(shapes.values())) > 1:
        widths = {name: f"{' x '.join(map(str, shape))} wide" for name, shape in shapes.items()}
        raise SourceError(f"{path} cannot be joined: it is {by_source(widths)}. {_CHOOSE.format('obsm').capitalize()}")
    return next(iter(shapes.values()))[0] if found == {"dense"} else None


def _kind_by_rows(node: Node) -> str:
    if node.encoding != "dense":
        return "sparse" if node.encoding in ("csr", "csc") else node.encoding
    is_numbers = node.dtype.kind in "biuf" and node.dtype.itemsize <= 8
    return "dense" if is_numbers and len(node.shape) == 2 else "array"
