"""The genes of all stores as the columns of one matrix, and their var.

Stores with the same genes share their names and positions in memory, because a dataset may have a thousand stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from zloader.common.concurrent_calls import concurrently
from zloader.common.deferred import pd
from zloader.common.errors import FormatError, MissingColumnError
from zloader.common.locks import cached_property
from zloader.common.messages import listed, suggestion
from zloader.common.records import Rows
from zloader.dataset.elements import load_anndata
from zloader.dataset.store import OpenedStore
from zloader.selecting.gene_names import (
    GeneJoin,
    for_each,
    joined_names,
    lost_genes,
    mismatch,
    new_names,
    renamed,
    renamed_by,
    repeats,
    stored_positions,
)
from zloader.selecting.genes import ChosenGenes

_FRAMES = 16  # var frames in memory at a time, while they are merged


@dataclass(frozen=True, kw_only=True, eq=False)
class GeneAxis:
    """The columns of a matrix over all stores.

    For each store, `stored` has the position of each gene of the axis among the genes of the store, or -1 if the store
    lacks it; it is None if the store has exactly these genes in this order. `n_stored` are the genes per store. `lost`
    is a warning if few genes of a store match those of the others, or empty.
    """

    names: pd.Index
    stored: Sequence[Rows | None]
    n_stored: Sequence[int]
    lost: str

    def chosen(self, genes: ChosenGenes | None) -> list[ChosenGenes | None]:
        """The columns of x in each store, for a choice among the genes of the axis; None for the store's own genes."""
        if genes is None:
            return self._whole
        made: dict[int, ChosenGenes | None] = {}
        for stored, n_stored in zip(self.stored, self.n_stored, strict=True):
            if id(stored) not in made:
                made[id(stored)] = genes if stored is None else genes.among(stored, n_stored)
        return [made[id(stored)] for stored in self.stored]

    @cached_property
    def _whole(self) -> list[ChosenGenes | None]:
        if all(stored is None for stored in self.stored):
            return [None] * len(self.stored)
        n_genes = len(self.names)
        chosen = self.chosen(ChosenGenes(positions=np.arange(n_genes), n_stored=n_genes))
        return [None if stored is None else genes for stored, genes in zip(self.stored, chosen, strict=True)]


def gene_axis(stores: Sequence[OpenedStore], frame: str, rule: GeneJoin) -> GeneAxis:
    """The joined genes of `"var"` or `"raw/var"`.

    Raises FormatError if the genes cannot be joined, and MissingColumnError if a store lacks the column with the names.
    """
    distinct: dict[tuple[str, ...], pd.Index] = {}

    def read(named: tuple[OpenedStore, Any]) -> pd.Index:
        names = named[0].names(frame) if rule.as_stored else gene_names(*named, frame)
        return distinct.setdefault(tuple(names), names)

    of_stores = concurrently(read, _named(stores, rule))
    if rule.join is None:
        _require_same(stores, of_stores, frame)
    # A repeated join with the same names changes nothing. `distinct` has the order in which threads read them.
    joined = joined_names({id(names): names for names in of_stores}.values(), rule)
    if rule.join != "outer":
        _require_shared(stores, of_stores, frame, joined, listing=rule.genes is not None)
    positions = {id(names): stored_positions(joined, names) for names in distinct.values()}
    located = _located(stores, of_stores)
    is_joined = rule.join is not None and len(stores) > 1
    lost = lost_genes(str(rule.join), located, rule.genes) if is_joined else ""
    return GeneAxis(
        names=joined,
        stored=[positions[id(names)] for names in of_stores],
        n_stored=[len(names) for names in of_stores],
        lost=lost,
    )


def without_functions(stores: Sequence[OpenedStore], rule: GeneJoin) -> GeneJoin:
    """The rule with the names that its functions give, because a Dataset is pickled and a lambda cannot be."""
    each = for_each(rule.genes_by, len(stores))
    functions = {id(by): by for by in each if callable(by)}
    if not functions:
        return rule

    def read(store: OpenedStore) -> list[str]:
        frames = ["var", "raw/var"] if "raw/X" in store.matrix_names else ["var"]
        return [str(name) for frame in frames for name in store.names(frame)]

    names: dict[int, dict[str, None]] = {}
    for by, found in zip(each, concurrently(read, stores), strict=True):
        names.setdefault(id(by), {}).update(dict.fromkeys(found))
    tables = {key: new_names(function, names[key]) for key, function in functions.items()}
    named = tuple(tables.get(id(by), by) for by in each)
    return replace(rule, genes_by=named if isinstance(rule.genes_by, tuple) else named[0])


def _named(stores: Sequence[OpenedStore], rule: GeneJoin) -> list[tuple[OpenedStore, Any]]:
    return list(zip(stores, for_each(rule.genes_by, len(stores)), strict=True))


def _located(stores: Sequence[OpenedStore], of_stores: Sequence[pd.Index]) -> list[tuple[str, pd.Index]]:
    """The distinct lists of genes, each with the URL of the first store that has it."""
    found: dict[int, tuple[str, pd.Index]] = {}
    for store, names in zip(stores, of_stores, strict=True):
        found.setdefault(id(names), (store.location.url, names))
    return list(found.values())


def gene_names(store: OpenedStore, by: Any, frame: str) -> pd.Index:
    """The names by which the genes of a store are joined: unique strings."""
    at = f"{frame} of {store.location.url}"
    column = by if isinstance(by, str) and by != store.index_name(frame) else None
    stored = store.names(frame) if column is None else _column(store, frame, column)
    names = renamed_by(by if isinstance(by, dict) else {}, stored, at)
    if repeated := repeats(names):
        where = "" if column is None else f" in the column {column!r}"
        raise FormatError(
            f"{at} has {repeated}{where}, so they cannot name the columns of x: choose a var column of unique names "
            "with genes_by=..., or write the store again with unique names"
        )
    return names


def _column(store: OpenedStore, frame: str, column: str) -> pd.Series:
    """The var column that names the genes."""
    at, known = f"{frame} of {store.location.url}", store.columns(frame)
    if column not in known:
        raise MissingColumnError(
            f"{at} has no column {column!r} to name genes by; it has: {listed(known)}{suggestion(column, known)}"
        )
    names = pd.Series(store.element(f"{frame}/{column}"))
    if len(names) != store.length(frame):
        raise store.damaged(f"{frame}/{column}", f"it has {len(names)} values for {store.length(frame)} genes")
    if names.isna().any():
        raise FormatError(
            f"{at} has {int(names.isna().sum())} genes without a value in {column!r}, so they would have no name"
        )
    return names


def _require_same(stores: Sequence[OpenedStore], of_stores: Sequence[pd.Index], frame: str) -> None:
    first = of_stores[0]
    for store, genes in zip(stores[1:], of_stores[1:], strict=True):
        if genes is first or genes.equals(first):
            continue
        n_both = min(len(first), len(genes))
        at = int(np.argmax(np.append(first[:n_both] != genes[:n_both], True)))
        why = mismatch([(stores[0].location.url, first), (store.location.url, genes)])
        here, there = (repr(names[at]) if at < len(names) else "missing" for names in (genes, first))
        raise FormatError(
            f"gene {at} of {frame} is {here} in {store.location.url}, but {there} in {stores[0].location.url}: stores "
            "must have the same genes in the same order, unless they are joined: give join='inner', join='outer' or "
            f"join=[genes]{why}"
        )


def _require_shared(
    stores: Sequence[OpenedStore], of_stores: Sequence[pd.Index], frame: str, joined: pd.Index, *, listing: bool
) -> None:
    """Raises FormatError for an empty intersection, and for a store that has none of the genes that `join` lists."""
    name_by = "name the genes alike with genes_by=..., a var column or a mapping or function of names"
    if not listing and not len(joined) and any(map(len, of_stores)):
        raise FormatError(
            f"no gene is in {frame} of all stores (the first has {listed(of_stores[0], 3)}): {name_by}, or open them "
            f"with join='outer'{mismatch(_located(stores, of_stores))}"
        )
    checked: set[int] = set()
    for store, names in zip(stores, of_stores, strict=True):
        if listing and id(names) not in checked and not names.isin(joined).any():
            raise FormatError(
                f"{frame} of {store.location.url} has none of the {len(joined)} genes that join lists "
                f"({listed(joined, 3)}), but genes such as {listed(names, 3)}: {name_by}, or leave this store out"
                f"{mismatch([(store.location.url, names)], list(joined))}"
            )
        checked.add(id(names))


def merged_var(stores: Sequence[OpenedStore], frame: str, rule: GeneJoin, names: pd.Index) -> pd.DataFrame:
    """The var of the joined genes `names`: of several stores, the columns that are the same in all of them.

    This is the var of `anndata.concat(..., merge="same")`. Genes that a store lacks have missing values there.
    """
    merged: pd.DataFrame | None = None
    named = _named(stores, rule)
    for first in range(0, len(named), _FRAMES):
        for var in concurrently(lambda one: _var_of(*one, frame), named[first : first + _FRAMES]):
            var = var if var.index.equals(names) else var.reindex(names)
            merged = var if merged is None else _same_columns(merged, var)
    assert merged is not None
    return merged


def _var_of(store: OpenedStore, by: Any, frame: str) -> pd.DataFrame:
    var, names = store.element(frame), gene_names(store, by, frame)
    return var.set_axis(names) if by is None or by == store.index_name(frame) else renamed(var, names)


def _same_columns(one: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    anndata = load_anndata()
    return anndata.concat([anndata.AnnData(var=one), anndata.AnnData(var=other)], merge="same").var
