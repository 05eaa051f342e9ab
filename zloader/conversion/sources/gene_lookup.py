"""The genes of lists, found in var by their ids or by their names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zloader.common.errors import SourceError

_MOST_ID = 1 << 27  # the look-up table takes 4 bytes per id
_MOST_NAMES = 1 << 22  # of genes; a column with more is another one


class GeneLookup(Protocol):
    """The positions of genes in var."""

    def positions(self, genes: Any) -> NDArray[np.int32]:
        """The position of each element of an array of Arrow without nulls; -1 for an unknown gene."""


class GeneIds:
    """Genes by whole numbers, in a table by id. Raises SourceError for an id that is repeated or too large."""

    def __init__(self, ids: NDArray[Any], at: str) -> None:
        wrong = np.flatnonzero((ids < 0) | (ids > _MOST_ID))
        if len(wrong):
            raise SourceError(f"{at} {ids[wrong[0]]} in row {wrong[0]} must be from 0 to {_MOST_ID}")
        _require_unique(ids.tolist(), at)
        self._table = np.full(int(ids.max(initial=-1)) + 2, -1, np.int32)  # the last is for unknown ids
        self._table[ids] = np.arange(len(ids), dtype=np.int32)

    def positions(self, genes: Any) -> NDArray[np.int32]:
        ids = genes.to_numpy()
        if len(ids) and (ids.min() < 0 or ids.max() >= len(self._table)):
            ids = np.where((ids >= 0) & (ids < len(self._table)), ids, -1)
        positions: NDArray[np.int32] = self._table[ids]
        return positions


class GeneNames:
    """Genes by text. Raises SourceError for a name that is repeated."""

    def __init__(self, names: Sequence[str], at: str) -> None:
        import pyarrow as pa

        _require_unique(names, at)
        self._names = pa.array(names, pa.large_string())

    def positions(self, genes: Any) -> NDArray[np.int32]:
        import pyarrow as pa
        import pyarrow.compute as pc

        found = pc.index_in(genes.dictionary.cast(pa.large_string()), value_set=self._names)
        positions: NDArray[np.int32] = found.fill_null(-1).to_numpy(zero_copy_only=False)[genes.indices.to_numpy()]
        return positions


def _require_unique(values: Sequence[Any], at: str) -> None:
    """Raises SourceError for a value that comes twice."""
    seen: dict[Any, int] = {}
    for row, value in enumerate(values):
        if seen.setdefault(value, row) != row:
            raise SourceError(f"{at} {value} in row {row} is given to an earlier gene, too")


def names_in(batches: Iterable[Any], at: str) -> list[str]:
    """The names in a column of lists, sorted. Raises SourceError if there are too many for genes."""
    import pyarrow.compute as pc

    names: set[str] = set()
    for batch in batches:
        names.update(pc.unique(batch.column(0).flatten()).drop_null().to_pylist())
        if len(names) > _MOST_NAMES:
            raise SourceError(f"{at} has more than {_MOST_NAMES} names: are they those of genes?")
    return sorted(names)
