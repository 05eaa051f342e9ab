"""The gene axis of several sources: which genes come out, what becomes of those of each source, and their var.

Names are joined as `anndata.concat` joins them, and var is what it makes of the frames of the sources, read one at a
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import anndata as ad
import numpy as np
import pandas as pd

from zloader.common.errors import OptionError, SourceError
from zloader.common.records import Rows
from zloader.conversion.joining.problems import Problems, listed
from zloader.conversion.sources.inputs import Input


@dataclass(frozen=True, kw_only=True)
class GeneRule:
    """Which genes come out: `join` is inner, outer or None (all sources must have the same); or `genes`, just these.

    `column` is the var column that names them, None for var_names. With `raw` all is about raw/var.
    """

    join: str | None = None
    genes: Sequence[str] | None = None
    column: str | None = None
    raw: bool = False

    def var_of(self, source: Input) -> pd.DataFrame:
        """The var of a source, with genes named by `column`; their former names are kept as a column. SourceError."""
        var = source.var(raw=self.raw)
        return var if self.column is None else self._renamed(var, self.column, self.at(source))

    def _renamed(self, var: pd.DataFrame, column: str, at: str) -> pd.DataFrame:
        if column not in var:
            raise SourceError(f"{at} has no column {column!r} to name genes by. It has: {listed(var.columns)}")
        names = var[column]
        if names.isna().any():
            raise SourceError(
                f"{at} has {int(names.isna().sum())} genes without a value in {column!r}: they would have no name"
            )
        names = pd.Index(names.astype(str).to_numpy(dtype=object))
        if not names.is_unique:
            raise SourceError(f"{at}: {_repeats(names)} in the column {column!r}, so it cannot name genes")
        former = str(var.index.name or "var_names")
        if former not in var:
            var = var.assign(**{former: var.index})
        return var.set_axis(names)

    def at(self, source: Input) -> str:
        """The var of a source, for messages."""
        return f"{source.name}: {'raw/var' if self.raw else 'var'}"


@dataclass(frozen=True, kw_only=True)
class GeneAxis:
    """The genes that come out, as `var`; for each source how many it has, and the number of each in the result.

    Such a map is int64 with -1 for genes that are dropped, or None where all stay what they are. `dropped` are the var
    columns that are not the same everywhere.
    """

    var: pd.DataFrame
    widths: list[int]
    maps: list[Rows | None]
    dropped: list[str]


def gene_axis(sources: Sequence[Input], rule: GeneRule) -> GeneAxis:
    """The axis of one or many sources. Raises SourceError, with all that is wrong, and OptionError for `genes`."""
    if len(sources) == 1 and rule.genes is None:
        var = rule.var_of(sources[0])
        return GeneAxis(var=var, widths=[len(var)], maps=[None], dropped=[])
    names = _joined_names(sources, rule)
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
        # What concat makes of all at once, two at a time.
        merged = shell if merged is None else ad.concat([merged, shell], merge="same")
    assert merged is not None
    dropped = [column for column in columns if column not in merged.var]
    return GeneAxis(var=merged.var, widths=widths, maps=maps, dropped=dropped)


def _joined_names(sources: Sequence[Input], rule: GeneRule) -> pd.Index:
    first: pd.Index | None = None
    names = pd.Index([], dtype=object)
    missing = set(rule.genes or ())
    with Problems() as problems:
        for source in sources:
            with problems.noting():
                index = _unique_names(source, rule)
                if first is None:
                    first = names = index
                elif rule.genes is None and rule.join is None and len(first.symmetric_difference(index)):
                    problems.add(_difference(rule, (sources[0], first), (source, index)))
                # As anndata does it.
                names = names.union(index) if rule.join == "outer" else names.intersection(index)
                missing.difference_update(index)
    if rule.genes is None:
        if first is not None and len(first) and not len(names):
            raise SourceError(
                f"no gene is in all sources (the first has {listed(first)}): name genes alike with gene_column=... "
                "(--gene-column), or pass join='outer'"
            )
        return names
    if missing:
        lacking = [gene for gene in rule.genes if gene in missing]
        raise OptionError(f"no source has {len(lacking)} of the genes asked for: {listed(lacking)}")
    return pd.Index(rule.genes)


def _unique_names(source: Input, rule: GeneRule) -> pd.Index:
    index = rule.var_of(source).index
    if not index.is_unique:
        raise SourceError(
            f"{rule.at(source)}: {_repeats(index)}, so they cannot be joined: name a column of unique ones with "
            "gene_column=... (--gene-column), or make them unique (var_names_make_unique)"
        )
    return index


def _difference(rule: GeneRule, first: tuple[Input, pd.Index], second: tuple[Input, pd.Index]) -> str:
    (one, names), (other, others) = first, second
    lacks, adds = names.difference(others, sort=False), others.difference(names, sort=False)
    found = [f"lacks {len(lacks)} genes of {one.name} ({listed(lacks, 3)})"] if len(lacks) else []
    found += [f"has {len(adds)} that are not there ({listed(adds, 3)})"] if len(adds) else []
    remedy = "leave raw out with raw=False (--no-raw)" if rule.raw else "pass genes=... (--genes)"
    return f"{rule.at(other)} {' and '.join(found)}: pass join='inner' or 'outer' (--join), or {remedy}"


def _repeats(names: pd.Index) -> str:
    repeated = names[names.duplicated()].unique()
    return f"{len(repeated)} gene names come more than once ({listed(repeated)})"
