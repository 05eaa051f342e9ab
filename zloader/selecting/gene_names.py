"""The names by which genes are joined (`genes_by`), and why the names of several sources do not match. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

import numpy as np

from zloader.common.checks import names_of
from zloader.common.deferred import pd
from zloader.common.errors import OptionError
from zloader.common.messages import listed
from zloader.common.records import Rows

# One for all sources, or a list with one for each: only the sources of one species need its orthologs.
NamedBy: TypeAlias = "str | Mapping[str, str] | pd.Series[str] | Callable[[str], str | None] | None"
GenesBy: TypeAlias = "NamedBy | Sequence[NamedBy]"

_MOST_COMPARED = 50  # sources whose names are compared to find out why they do not match
_ENSEMBL = re.compile(r"(ENS[A-Z]*?G\d+)\.\d+")
_FOLDS: Sequence[tuple[Callable[[str], str], str]] = (
    (str.upper, "if upper and lower case were the same (genes_by=str.upper, or --genes-by with a file of new names)"),
    (lambda name: _ENSEMBL.sub(r"\1", name), "without the version suffixes of Ensembl IDs"),
)


def checked_genes_by(genes_by: Any) -> Any:
    """`genes_by` with every mapping as a dict of new names, and a list as a tuple. Raises OptionError."""
    return tuple(map(_checked, genes_by)) if isinstance(genes_by, list | tuple) else _checked(genes_by)


def _checked(by: Any) -> Any:
    if by is None or isinstance(by, str):
        return by
    if isinstance(by, pd.Series):
        if repeated := repeats(by.index):
            raise OptionError(f"genes_by has {repeated} in its index: give each gene one new name")
        by = by.to_dict()
    if isinstance(by, Mapping):
        return new_names(by.get, by)
    if callable(by):
        return by
    raise OptionError(
        "genes_by must be the name of a var column, a mapping or a function from names to new names, None, or a list "
        f"of these, not {by!r:.100}"
    )


def for_each(genes_by: Any, n_sources: int) -> Sequence[Any]:
    """What names the genes of each source. Raises OptionError for a list of another length."""
    if not isinstance(genes_by, tuple):
        return [genes_by] * n_sources
    if len(genes_by) != n_sources:
        raise OptionError(
            f"genes_by lists {len(genes_by)} ways to name genes for {n_sources} sources: list one for each, None for "
            "names that stay. Each file of a glob and each dataset of a collection counts"
        )
    return genes_by


def new_names(function: Callable[[str], Any], names: Iterable[Any]) -> dict[str, str]:
    """The new name of each gene that gets one. None and NaN stand for no new name. Raises OptionError."""
    found: dict[str, str] = {}
    for name in names:
        new = function(name)
        if not isinstance(name, str) or not (_is_missing(new) or (isinstance(new, str) and new)):
            raise OptionError(f"genes_by names the gene {name!r:.100} {new!r:.100}: both names must be text")
        if not _is_missing(new):
            found[name] = str(new)
    return found


def _is_missing(value: Any) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and value != value)


def renamed_by(new: Mapping[str, str], names: Iterable[Any], at: str) -> pd.Index:
    """The names of genes, with new ones for those that have one. Raises OptionError if two become the same."""
    if not new:
        return pd.Index(list(map(str, names)))
    first: dict[str, str] = {}
    alike: list[str] = []
    made: list[str] = []
    for name in map(str, names):
        made.append(new.get(name, name))
        if (other := first.setdefault(made[-1], name)) != name:
            alike.append(f"{other} and {name} as {made[-1]}")
    if alike:
        raise OptionError(
            f"genes_by names several genes of {at} alike: {listed(alike, 3)}. Leave all but one of them out of it, so "
            "that they keep their names"
        )
    return pd.Index(made)


def renamed(var: pd.DataFrame, names: pd.Index) -> pd.DataFrame:
    """A var frame with the genes named anew; the previous names are kept as a column."""
    former = str(var.index.name or "var_names")
    if former not in var:
        var = var.assign(**{former: var.index})
    return var.set_axis(names)


def repeats(names: pd.Index) -> str:
    """The repeated names among some names of genes, for messages; empty if there are none."""
    repeated: Sequence[Any] = names[names.duplicated()].unique()
    return f"{len(repeated)} repeated gene name{'s' * (len(repeated) > 1)} ({listed(repeated)})" * bool(len(repeated))


def lost_genes(join: str, sources: Sequence[tuple[str, Sequence[str]]], genes: Sequence[str] | None = None) -> str:
    """A warning if fewer than half of the genes of a source match those of the others, or the listed `genes`; else "".

    Only an inner join drops them. Any other join is warned about if there is a likely reason, because many genes that
    are in a single source, or lists of which a source has little, may be meant.
    """
    sources = sources[:_MOST_COMPARED]
    poor = [
        f"{found} of {n_genes} of {at}"
        for (at, _), (found, n_genes) in zip(sources, _matches(sources, genes, str), strict=True)
        if 2 * found < n_genes
    ]
    why = mismatch(sources, genes) if poor else ""
    if not poor or not (why or join == "inner"):
        return ""
    what = "few of the listed genes were found" if genes is not None else f"join={join!r} finds few genes in common"
    what = "join='inner' drops most genes, and keeps" if join == "inner" else f"{what}:"
    return f"{what} {listed(poor, 3)}{why}. If they are the same genes, name them alike with genes_by=... (--genes-by)"


def mismatch(sources: Sequence[tuple[str, Sequence[str]]], genes: Sequence[str] | None = None) -> str:
    """Why genes of some sources match neither one another nor the listed `genes`, after a full stop; "" if unknown."""
    sources = sources[:_MOST_COMPARED]
    before = _matches(sources, genes, str)
    for fold, how in _FOLDS:
        for (found, n_genes), (folded, _) in zip(before, _matches(sources, genes, fold), strict=True):
            if 2 * (folded - found) > n_genes - found:
                return f". {folded} would match {how}"
    named = sources if genes is None else [*sources, ("the list", genes)]
    kinds = {kind: f"{at} has {kind} ({example})" for at, names in reversed(named) for kind, example in [_kind(names)]}
    return f". {', but '.join(reversed(kinds.values()))}" if len(kinds) > 1 else ""


def _matches(
    sources: Sequence[tuple[str, Sequence[str]]], genes: Sequence[str] | None, fold: Callable[[str], str]
) -> list[tuple[int, int]]:
    """Per source, how many of its genes all sources have, of how many; or how many of the listed genes it has."""
    of_sources = [set(map(fold, names)) for _, names in sources]
    if genes is not None:
        wanted = set(map(fold, genes))
        return [(len(wanted & found), len(wanted)) for found in of_sources]
    common = len(set.intersection(*of_sources))
    return [(common, len(names)) for _, names in sources]


def _kind(names: Sequence[str]) -> tuple[str, str]:
    """Whether most of the names are Ensembl IDs, and of which species, with an example."""
    prefixes = Counter(found[1] for name in names if (found := re.match(r"(ENS[A-Z]*?G)\d", name)))
    ((prefix, count),) = prefixes.most_common(1) or [("", 0)]
    if 2 * count > len(names):
        return f"Ensembl IDs {prefix}", next(name for name in names if name.startswith(prefix))
    return "other names", next((name for name in names if not prefix or not name.startswith(prefix)), "")


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
