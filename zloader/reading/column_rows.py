"""Large obsm arrays: each fetch loads its rows, like those of x.

An array has one row per row of its store, so it is a dense matrix, and has the reader of one: its rows are kept in a
mirror, reads are coalesced and retried, and bytes in flight are bounded together with those of x.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zloader.common import page_cache
from zloader.common.records import Rows
from zloader.reading.gather import SourceRows, as_bits
from zloader.reading.loops import copy_rows
from zloader.reading.matrix_parts import MatrixPart
from zloader.reading.matrix_rows import PlannedRows, load_sources


@dataclass(frozen=True, kw_only=True, eq=False)
class PagedColumn:
    """An obsm array whose rows are loaded with each fetch.

    `parts` has the array in each store, as a dense matrix of the same dtype. A row has the shape `row_shape`.
    """

    parts: Sequence[MatrixPart]
    row_shape: tuple[int, ...] = ()

    def taken(self, n_rows: int, loaded: LoadedColumn) -> NDArray[Any]:
        """The values of the rows of a fetch, which were loaded. Rows that the array lacks are zeros."""
        taken = np.zeros((n_rows, *self.row_shape), self.parts[0].matrix.values.dtype)
        width, out = math.prod(self.row_shape), as_bits(taken.reshape(-1))
        for rows in loaded:
            at = np.arange(n_rows)[rows.at] * width
            copy_rows(as_bits(rows.values), rows.starts[1], rows.lengths, at, out)
        return taken


LoadedColumn: TypeAlias = Sequence[SourceRows]


async def load_column(planned: PlannedRows, turn: int) -> LoadedColumn:
    """Loads the rows of a column. Reads with a smaller `turn` go first."""
    return await load_sources(planned, np.empty(planned.n_bytes, np.uint8), turn=turn)


def rows_of(column: NDArray[Any] | PagedColumn, rows: Rows, loaded: Mapping[PagedColumn, LoadedColumn]) -> NDArray[Any]:
    """Some rows of an obsm array; those of a paged one have been loaded."""
    if isinstance(column, PagedColumn):
        return column.taken(len(rows), loaded[column] if len(rows) else [])
    taken = column[rows]
    page_cache.release(column)
    return taken
