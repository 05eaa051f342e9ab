"""Joins the genes of several stores into the columns of one matrix, in the order of `anndata.concat`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import pandas as pd

from zloader.common.checks import names_of
from zloader.common.errors import OptionError
from zloader.common.records import Rows
from zloader.selecting.gene_names import GenesBy, checked_genes_by, repeats


@dataclass(frozen=True, kw_only=True)
class GeneJoin:
    """How the genes of several stores become the columns of one dataset. The arguments of `open_dataset`.

    `join` is "inner", "outer", a list of genes, or None if all stores must have the same genes in the same order.
    `genes_by` says how the genes are named, for all stores or as a tuple with one for each store: a var column, a dict
    of new names, a function from a name to a new one, or None for var_names.
    """

    join: str | Sequence[str] | None = None
    genes_by: GenesBy = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "genes_by", checked_genes_by(self.genes_by))
        if self.join is None or (isinstance(self.join, str) and self.join in ("inner", "outer")):
            return
        if isinstance(self.join, str | bytes) or not isinstance(self.join, Iterable):
            raise OptionError(f"join must be 'inner', 'outer', None or a list of genes, not {self.join!r:.100}")
        genes = names_of(join=self.join)
        if not genes:
            raise OptionError("join lists no gene: list at least one, or pass 'inner', 'outer' or None")
        if repeated := repeats(pd.Index(genes)):
            raise OptionError(f"join has {repeated}: list each gene once")
        object.__setattr__(self, "join", tuple(genes))

    @property
    def genes(self) -> Sequence[str] | None:
        """The genes that `join` lists, or None."""
        return None if isinstance(self.join, str) else self.join

    @property
    def as_stored(self) -> bool:
        """Whether the genes are those of the stores, by their own names."""
        return self.join is None and self.genes_by is None


def joined_names(of_stores: Iterable[pd.Index], rule: GeneJoin) -> pd.Index:
    """The joined genes of some stores, each with unique names. With `join=None`, those of the first."""
    if rule.genes is not None:
        return pd.Index(rule.genes)
    if rule.join is None:
        return next(iter(of_stores))
    # Pairwise, like anndata.concat: the order of a union or intersection depends on it.
    if rule.join == "outer":
        return reduce(lambda joined, names: joined.union(names), of_stores)
    return reduce(lambda joined, names: joined.intersection(names), of_stores)


def stored_positions(joined: pd.Index, names: pd.Index) -> Rows | None:
    """The position of each joined gene among the genes of a store, or -1; None if they are the same, in order."""
    return None if names.equals(joined) else np.asarray(names.get_indexer(joined), np.int64)
