"""The arrays that the rows of a fetch are gathered from. Stores whose rows are gathered alike count as one source.

The rows of a minibatch alternate between stores. One loop over all of them writes the minibatch from start to end, and
Python handles one store, however many there are. A loop takes one array, so it gets a view of the memory from the first
array to the last one. Nothing is copied.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.records import Rows
from zloader.reading.matrix_parts import MatrixPart
from zloader.selecting.genes import ChosenGenes


def spanning(arrays: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], list[int]]:
    """A view of the memory from the first to the last of some arrays, and the position in it at which each one begins.

    The arrays are flat and contiguous, have the same dtype and are equally aligned. There may be no memory between
    them, so nothing but their elements may be read, and only as long as they exist.
    """
    if len(arrays) == 1:
        return arrays[0], [0]
    addresses = [array.ctypes.data for array in arrays]
    first, itemsize = min(addresses), arrays[0].itemsize
    n_bytes = max(address + array.nbytes for address, array in zip(addresses, arrays, strict=True)) - first
    lowest = arrays[addresses.index(first)]
    span = np.lib.stride_tricks.as_strided(lowest, (n_bytes // itemsize,), (itemsize,), writeable=False)
    return span, [(address - first) // itemsize for address in addresses]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSource:
    """The arrays of one or several stores. `genes` is None for dense stores, `chosen` where genes are columns of x.

    `columns` has the tables `column_of` of all these stores. `kept` are the arrays themselves, which `genes`, `values`
    and `columns` may only span.
    """

    genes: NDArray[Any] | None
    values: NDArray[Any]
    chosen: ChosenGenes | None
    columns: NDArray[Any] | None
    kept: Sequence[NDArray[Any]]


def alike(part: MatrixPart, arrays: Sequence[NDArray[Any]]) -> Hashable:
    """The same for all stores whose rows can be gathered in one loop. `arrays` has the genes (CSR only) and values."""
    how: Hashable = None
    if part.genes is not None:
        how = (part.genes.takes_all, part.genes.ascending) if len(arrays) == 2 else id(part.genes)
    return how, *((array.dtype, array.ctypes.data % array.itemsize) for array in arrays)


def united(
    parts: Sequence[MatrixPart], arrays: Sequence[Sequence[NDArray[Any]]]
) -> tuple[RowSource, list[tuple[int, ...]]]:
    """The source of parts that are alike, and for each part the shifts of its elements and of its table of columns."""
    of_kinds = list(zip(*arrays, strict=True))  # genes and values, or values alone
    kept = [array for of_kind in of_kinds for array in of_kind]
    spans = [spanning(of_kind) for of_kind in of_kinds]
    chosen, columns, table_starts = parts[0].genes, None, [0] * len(parts)
    if chosen is not None and len(spans) == 2:
        tables = [part.genes.column_of for part in parts if part.genes is not None]
        kept += tables
        columns, table_starts = spanning(tables)
    *genes, values = (span for span, _ in spans)
    source = RowSource(genes=genes[0] if genes else None, values=values, chosen=chosen, columns=columns, kept=kept)
    return source, list(zip(*(starts for _, starts in spans), table_starts, strict=True))


@dataclass(frozen=True, kw_only=True, eq=False)
class SourcedRows:
    """Where the rows of a fetch are: row i is in source `source_of[i]`.

    Its genes and values begin at `starts[0][i]` and `starts[1][i]`, and the columns of its genes at `tables[i]`.
    """

    sources: Sequence[RowSource]
    source_of: NDArray[np.unsignedinteger]
    starts: tuple[Rows, Rows]
    tables: Rows
