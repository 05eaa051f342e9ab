"""Chooses the genes that become the columns of x, and their order. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zloader.common.deferred import pd
from zloader.common.errors import OptionError
from zloader.common.locks import cached_property
from zloader.common.messages import suggestion
from zloader.common.records import Rows
from zloader.selecting.rows import range_of

Genes: TypeAlias = "Sequence[str] | Sequence[int] | Sequence[bool] | NDArray[Any] | pd.Index | pd.Series | slice"
GeneChoice: TypeAlias = "Genes | Mapping[str, Genes] | int | str"  # as an index, where one gene needs no list
_SHOWN = 3  # genes named in a message


@dataclass(frozen=True, kw_only=True)
class ChosenGenes:
    """A choice of genes: column k of x is gene `positions[k]` of the `n_stored` genes of a store.

    A position of -1 is a gene that the store does not have. Its column is zeros.
    """

    positions: Rows
    n_stored: int

    def __len__(self) -> int:
        return len(self.positions)

    @cached_property
    def column_of(self) -> NDArray[Any]:
        """The column of each gene of the store, or `len(self)` for a gene that is not chosen.

        It has the smallest unsigned dtype, to fit into the L2 cache: 125 KB for 62 710 genes.
        """
        columns = np.full(self.n_stored, len(self), np.min_scalar_type(len(self)))
        present = np.flatnonzero(self.positions >= 0)
        columns[self.positions[present]] = present
        return columns

    @cached_property
    def ascending(self) -> bool:
        """Whether the columns of the store's genes are in the order of the store."""
        return bool((np.diff(self.positions[self.positions >= 0]) > 0).all())

    @cached_property
    def takes_all(self) -> bool:
        """Whether every gene of the store is chosen, so that no value is left out."""
        return int(np.count_nonzero(self.positions >= 0)) == self.n_stored

    def among(self, stored: Rows, n_stored: int) -> ChosenGenes:
        """The same columns from a store whose gene `stored[i]`, or none if that is -1, is the one at position i."""
        return ChosenGenes(positions=stored[self.positions], n_stored=n_stored)


def choose_genes(genes: Genes, *, n_stored: int, names: Callable[[], pd.Index], where: str) -> ChosenGenes:
    """Resolves `genes` (names, positions, a mask over all genes, a slice) among `n_stored` genes, in the given order.

    `names` returns the names of all genes and is called only if `genes` are names, or a mask that has names. `where`
    names their place in messages. Raises OptionError for genes that do not exist, are listed more than once, or are
    ambiguous, for a mask of other genes, and for an empty choice.
    """
    given = pd.Index(range_of(genes, n_stored, "genes") if isinstance(genes, slice) else _as_index(genes))
    positions: Rows | list[int]
    if len(given) and pd.api.types.is_bool_dtype(given.dtype) and not given.hasnans:
        positions = _of_mask(given.to_numpy(bool), n_stored, where)
        if isinstance(genes, pd.Series) and isinstance(genes.index[0], str):
            _require_names(genes.index, names(), where)
    elif len(given) and pd.api.types.is_integer_dtype(given.dtype) and not given.hasnans:
        positions = _of_positions(given, n_stored, where)
    elif all(isinstance(name, str) for name in given):
        positions = _of_names(list(given), names(), where)
    else:
        raise OptionError(f"genes must be names, positions or a mask of booleans, not {given.dtype}: {_first(given)}")
    if not len(positions):
        raise OptionError("genes selects no gene: choose at least one")
    return ChosenGenes(positions=np.asarray(positions, np.int64), n_stored=n_stored)


def _as_index(genes: Genes) -> pd.Index:
    if isinstance(genes, str):
        raise OptionError(f"genes must be a list of genes: write [{genes!r}]")
    if isinstance(genes, Set):
        raise OptionError(
            "genes must be a list, because it orders the columns of x, and a set has no order: write sorted(...)"
        )
    try:
        return pd.Index(genes)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"genes must be a list of names or positions, or a mask that says which genes, not {genes!r:.100}"
        ) from error


def _of_mask(mask: NDArray[np.bool_], n_stored: int, where: str) -> Rows:
    if len(mask) != n_stored:
        raise OptionError(
            f"genes is a mask of {len(mask)} values, but {where} has {n_stored} genes: give one value per gene"
        )
    return np.flatnonzero(mask)


def _require_names(of_mask: pd.Index, names: pd.Index, where: str) -> None:
    """Raises OptionError for a mask of other genes, or of these in another order."""
    differs = next((at for at, pair in enumerate(zip(of_mask, names, strict=True)) if pair[0] != pair[1]), None)
    if differs is not None:
        raise OptionError(
            f"genes is a mask of other genes than {where}, or of these in another order: value {differs} is that of "
            f"{of_mask[differs]!r}, but the gene is {names[differs]!r}. Write mask.reindex(dataset.var_names)"
        )


def _of_positions(positions: pd.Index, n_stored: int, where: str) -> list[int]:
    wrong = positions[(positions < 0) | (positions >= n_stored)]
    if len(wrong):
        raise OptionError(f"gene {_first(wrong)} does not exist: {where} has genes 0 to {n_stored - 1}")
    _refuse_repeats(positions)
    return [int(position) for position in positions]


def _of_names(chosen: list[str], names: pd.Index, where: str) -> list[int]:
    position_of = {name: position for position, name in enumerate(names)}
    unknown = [name for name in chosen if name not in position_of]
    if unknown:
        raise OptionError(
            f"{len(unknown)} of {len(chosen)} genes are not in {where}: {_first(unknown)}. Its genes have names such "
            f"as {_first(names)}: leave out the missing genes, or give positions{suggestion(unknown[0], position_of)}"
        )
    _refuse_repeats(chosen)
    ambiguous = set(names[names.duplicated()]) & set(chosen) if len(position_of) < len(names) else set()
    if ambiguous:
        raise OptionError(
            f"{len(ambiguous)} of {len(chosen)} genes occur more than once in {where}: {_first(sorted(ambiguous))}. "
            "Choose them by position"
        )
    return [position_of[name] for name in chosen]


def _refuse_repeats(chosen: Iterable[Any]) -> None:
    repeated = [gene for gene, times in Counter(chosen).items() if times > 1]
    if repeated:
        raise OptionError(f"genes lists {_first(repeated)} more than once: list each gene once")


def _first(genes: Sequence[Any] | pd.Index) -> str:
    """The first few genes, for messages."""
    return ", ".join(map(repr, list(genes[:_SHOWN]))) + (", ..." if len(genes) > _SHOWN else "")
