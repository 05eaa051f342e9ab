"""Obs columns and obsm arrays of many rows: each fetch loads the chunks that hold its rows, like those of x.

An array has one row per row of its store, so it is a dense matrix, and has the readers of one: its chunks are kept in a
mirror, reads are coalesced and retried, and bytes in flight are bounded together with those of x.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zloader.common import page_cache
from zloader.common.records import Rows
from zloader.reading.matrix_parts import MatrixPart
from zloader.reading.matrix_rows import PlannedRows, load_elements
from zloader.reading.read_plan import Elements
from zloader.selecting.columns import ObsColumn

# Turns codes of labels in one store, given its number and the rows that have them, into codes of the dataset.
Recode: TypeAlias = Callable[[int, Rows, NDArray[Any]], NDArray[Any]]


@dataclass(frozen=True, kw_only=True, eq=False)
class PagedColumn:
    """An obs column or obsm array whose rows are loaded with each fetch.

    `parts` has the array in each store, as a dense matrix. A row has the shape `row_shape`. `recode` is None for
    numbers, which have the same dtype in all stores. `prepare` reads what `recode` needs, such as labels.
    """

    parts: Sequence[MatrixPart]
    row_shape: tuple[int, ...] = ()
    recode: Recode | None = None
    prepare: Callable[[], object] = dict

    def prepared(self) -> PagedColumn:
        """The column itself, once it has read all that it needs besides its rows."""
        self.prepare()
        return self

    def taken(self, rows: Rows, loaded: LoadedColumn) -> NDArray[Any]:
        """The values of rows that were loaded, in the dtype of minibatches. Raises FormatError for a wrong code."""
        dtype = self.parts[0].matrix.values.dtype if self.recode is None else np.dtype(np.int64)
        lacks_rows = any(part.row_of is not None for part in self.parts)  # which are zeros
        taken = (np.zeros if lacks_rows else np.empty)((len(rows), *self.row_shape), dtype)
        width = math.prod(self.row_shape)
        for number, here, elements in loaded:  # chunks, and with them all parts of them, hold whole rows
            values = elements.source.reshape(-1, *self.row_shape)[elements.starts // width]
            taken[here] = values if self.recode is None else self.recode(number, rows[here], values)
        return taken

    def release(self) -> None:
        """Drops the pages of the mirror's files from this process's memory."""
        for part in self.parts:
            for array in () if part.mirror is None else part.mirror.arrays.values():
                page_cache.release(array.content)


# The elements of the rows in each store, with the number of the store and the positions of these rows.
LoadedColumn: TypeAlias = Sequence[tuple[int, Rows | slice, Elements]]


async def load_column(planned: PlannedRows, turn: int) -> LoadedColumn:
    """Loads the rows of a column. Reads with a smaller `turn` go first."""
    elements = await load_elements(planned, np.empty(planned.n_bytes, np.uint8), turn=turn)
    loaded = [(number, planned.at[number], of_rows) for number, (of_rows,) in elements.items()]
    return [(number, at, of_rows) for number, at, of_rows in loaded if isinstance(of_rows, Elements)]


def rows_of(
    column: ObsColumn | NDArray[Any] | PagedColumn, rows: Rows, loaded: Mapping[PagedColumn, LoadedColumn]
) -> NDArray[Any]:
    """The values of some rows in the dtype of minibatches; those of a paged column have been loaded."""
    if isinstance(column, PagedColumn):
        return column.taken(rows, loaded[column] if len(rows) else [])
    return column.taken(rows) if isinstance(column, ObsColumn) else column[rows]


def release(column: ObsColumn | NDArray[Any] | PagedColumn) -> None:
    """Drops the pages of a memory-mapped column from this process's memory."""
    if isinstance(column, PagedColumn):
        column.release()
    else:
        page_cache.release(column.values if isinstance(column, ObsColumn) else column)
