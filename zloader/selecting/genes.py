"""Which genes become the columns of x, in which order. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from zloader.common.errors import OptionError
from zloader.common.records import Rows

Genes: TypeAlias = Sequence[str] | Sequence[int] | Sequence[bool] | NDArray[Any] | pd.Index | pd.Series
_SHOWN = 3  # genes that a message names


@dataclass(frozen=True, kw_only=True)
class ChosenGenes:
    """Some genes of a store: column k of x is the gene at `positions[k]` of the `n_stored` in the store."""

    positions: Rows
    n_stored: int

    def __len__(self) -> int:
        return len(self.positions)

    @cached_property
    def column_of(self) -> NDArray[Any]:
        """The column of each gene of the store, `len(self)` for those that are left out.

        In the smallest unsigned dtype, so that the processor's own caches hold it: 125 KB for 62 710 genes.
        """
        columns = np.full(self.n_stored, len(self), np.min_scalar_type(len(self)))
        columns[self.positions] = np.arange(len(self))
        return columns

    @cached_property
    def ascending(self) -> bool:
        """Whether the columns are in the store's order."""
        return bool((np.diff(self.positions) > 0).all())


def choose_genes(genes: Genes, *, n_stored: int, names: Callable[[], pd.Index], where: str) -> ChosenGenes:
    """What `genes` chooses of `n_stored` genes: their names, their positions, or a mask over all, in x's order.

    `names` gives the names of all genes, which lie in `where`; it is called only where `genes` are names.
    Raises OptionError for genes that are not there, stand twice, or are none at all.
    """
    given = _as_index(genes)
    positions: Rows | list[int]
    if len(given) and pd.api.types.is_bool_dtype(given.dtype) and not given.hasnans:
        positions = _of_mask(given.to_numpy(bool), n_stored, where)
    elif len(given) and pd.api.types.is_integer_dtype(given.dtype) and not given.hasnans:
        positions = _of_positions(given, n_stored, where)
    elif all(isinstance(name, str) for name in given):
        positions = _of_names(list(given), names(), where)
    else:
        raise OptionError(f"genes must be names, positions or a mask of booleans, not {given.dtype}: {_first(given)}")
    if not len(positions):
        raise OptionError("genes chooses none: give at least one, or None for all")
    return ChosenGenes(positions=np.asarray(positions, np.int64), n_stored=n_stored)


def _as_index(genes: Genes) -> pd.Index:
    if isinstance(genes, str):
        raise OptionError(f"genes must be a list of genes: write genes=[{genes!r}]")
    if isinstance(genes, Set):
        raise OptionError("genes must be a list, since x's columns have its order: a set has none. Write sorted(...)")
    try:
        return pd.Index(genes)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"genes must be a list of names or positions, or a mask, not a {type(genes).__name__} ({error})"
        ) from error


def _of_mask(mask: NDArray[np.bool_], n_stored: int, where: str) -> Rows:
    if len(mask) != n_stored:
        raise OptionError(f"genes is a mask of {len(mask)}, but {where} has {n_stored} genes: give a value for each")
    return np.flatnonzero(mask)


def _of_positions(positions: pd.Index, n_stored: int, where: str) -> list[int]:
    wrong = positions[(positions < 0) | (positions >= n_stored)]
    if len(wrong):
        raise OptionError(f"gene {_first(wrong)} is not there: {where} has the genes 0 to {n_stored - 1}")
    _refuse_repeats(positions)
    return [int(position) for position in positions]


def _of_names(chosen: list[str], names: pd.Index, where: str) -> list[int]:
    position_of = {name: position for position, name in enumerate(names)}
    unknown = [name for name in chosen if name not in position_of]
    if unknown:
        raise OptionError(
            f"{len(unknown)} of {len(chosen)} genes are not in {where}: {_first(unknown)}. Its genes have names such "
            f"as {_first(names)}: leave out those that are not there, or give positions"
        )
    _refuse_repeats(chosen)
    ambiguous = set(names[names.duplicated()]) & set(chosen) if len(position_of) < len(names) else set()
    if ambiguous:
        raise OptionError(
            f"{len(ambiguous)} of {len(chosen)} genes stand more than once in {where}: {_first(sorted(ambiguous))}. "
            "Choose these by their positions"
        )
    return [position_of[name] for name in chosen]


def _refuse_repeats(chosen: Iterable[Any]) -> None:
    repeated = [gene for gene, times in Counter(chosen).items() if times > 1]
    if repeated:
        raise OptionError(f"genes has {_first(repeated)} more than once: each can be one column of x only")


def _first(genes: Sequence[Any] | pd.Index) -> str:
    """The first few genes, for messages."""
    return ", ".join(map(repr, list(genes[:_SHOWN]))) + (", ..." if len(genes) > _SHOWN else "")
