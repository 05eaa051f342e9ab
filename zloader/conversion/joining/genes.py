"""The gene axis of several sources: the joined genes, the mapping from each source to them, and the merged var.

Names are joined as in `anndata.concat`. var is the result of `anndata.concat` on the sources' var frames, which are
read one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd

from zloader.common.errors import OptionError, SourceError
from zloader.common.messages import listed
from zloader.common.records import Rows
from zloader.conversion.sources.inputs import Input, Problems
from zloader.selecting.gene_names import (
    for_each,
    lost_genes,
    mismatch,
    new_names,
    renamed,
    renamed_by,
    repeats,
)


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
