"""The rows of a fetch in one matrix: the elements that they need, their load, and x made of them.

The rows of a minibatch alternate between stores. One loop over all of them writes the minibatch from start to end, and
Python handles one store, however many there are. So stores whose rows are gathered alike are united. A loop takes one
array, so it gets a view of the memory from the first array of these stores to the last one. Nothing is copied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.errors import OptionError
from zloader.common.records import Rows, X
from zloader.reading import gather
from zloader.reading.forms import Form, Transforming
from zloader.reading.gather import SourceRows
from zloader.reading.matrix_parts import MatrixPart
from zloader.reading.matrix_reader import MatrixReader, NeededRows
from zloader.selecting.genes import ChosenGenes
from zloader.selecting.groups import by_value, shares
from zloader.storage.coded_rows import Views, views_of
from zloader.storage.layout import chunks_of
from zloader.transforms.transform import RefusedValue

Shares = Mapping[int, Rows | slice]  # the stores that contain some rows, each with the positions of its rows


@dataclass(frozen=True, kw_only=True)
class PlannedRows:
    """The rows of a fetch in one matrix, before its reads.

    For each part that the rows touch, `needed` has its rows. `lengths` are the elements per row, once they are loaded.
    """

    parts: Sequence[MatrixPart]
    needed: Mapping[int, NeededRows]
    lengths: Rows

    @property
    def n_bytes(self) -> int:
        """Buffer bytes for the decoded elements."""
        return sum(needed.buffer_bytes for needed in self.needed.values())

    @property
    def ahead_bytes(self) -> int:
        """Bytes that it takes of `buffer_bytes`.

        Elements from a mirror count, too, because a small page cache would evict them.
        """
        return sum(needed.ahead_bytes for needed in self.needed.values())

    @property
    def lacks_rows(self) -> bool:
        """Whether the matrix may lack some of the rows."""
        return any(part.row_of is not None for part in self.parts)

    @property
    def exact(self) -> Form:
        """CSR form in float32 if it holds every stored value, else in float64."""
        return Form(dense=False, dtype=np.result_type(np.float32, *self.stored).name)

    @property
    def stored(self) -> list[np.dtype[Any]]:
        """The dtypes of the values in the stores."""
        return [part.matrix.values.dtype for part in self.parts]

    def row_bytes(self, form: Form) -> Rows:
        """Bytes of each row of x, with copies; an upper bound for CSR from dense stores."""
        n_columns = self.parts[0].n_columns
        value_bytes = form.value_bytes(self.stored)
        per_row, per_element = self._copied_bytes()
        if form.dense and not form.narrow:
            return self.lengths * per_element + (per_row + n_columns * value_bytes)
        chosen = any(part.genes is not None and not part.genes.takes_all for part in self.parts)
        lengths = np.minimum(self.lengths, n_columns) if chosen else self.lengths
        return self.lengths * per_element + per_row + lengths * (form.gene_bytes(n_columns) + value_bytes)

    def _copied_bytes(self) -> tuple[int, int]:
        """Bytes per row and per element of the copies that `gather.choose` and `gather.widened` make, at most."""
        per_element = per_row = 0
        for part in (self.parts[number] for number, needed in self.needed.items() if needed.chooses_later):
            itemsize = part.matrix.values.dtype.itemsize
            if part.genes is not None and part.indptr is None:
                per_row = max(per_row, itemsize * part.n_columns)
            elif part.genes is not None and not part.genes.takes_all:
                per_element = max(per_element, itemsize + part.genes.column_of.itemsize)
        widened = 6 if any(dtype == np.float16 for dtype in self.stored) else 0  # a copy, and float32
        return per_row, per_element + widened


def plan_rows(
    parts: Sequence[MatrixPart],
    readers: Sequence[MatrixReader],
    rows: Rows,
    at: Shares,
    ends: Rows,
) -> PlannedRows:
    """Plans the reads of some rows. Part k has `readers[k]` and ends before row `ends[k]`."""
    lengths = np.zeros(len(rows), np.int64)
    needed = {}
    for number, of_store in at.items():
        part = parts[number]
        of_part, here = part.held(rows[of_store] - (ends[number] - part.n_rows), of_store)
        if not len(of_part):
            continue
        needed[number] = readers[number].needed(here, of_part)
    return PlannedRows(parts=parts, needed=needed, lengths=lengths)


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
class UnitedStores:
    """The arrays of one or several stores whose rows are gathered alike.

    `genes` is None for dense stores, `chosen` where genes are columns of x. `columns` has the tables `column_of` of all
    these stores. `coded` are coded rows of mirrors; then `genes` and `values` only have their dtypes. `kept` are the
    arrays themselves, which `genes`, `values` and `columns` may only span.
    """

    genes: NDArray[Any] | None
    values: NDArray[Any]
    chosen: ChosenGenes | None
    columns: NDArray[Any] | None
    kept: Sequence[NDArray[Any]]
    coded: Views | None = None


def alike(rows: SourceRows) -> Hashable:
    """The same for all sources whose rows can be gathered in one loop."""
    how: Hashable = None
    if rows.coded is not None:
        return tuple(array.dtype for array in rows.coded)
    if rows.chosen is not None:
        chosen = rows.chosen
        how = id(chosen) if rows.genes is None else (chosen.takes_all, chosen.ascending)
    arrays = [rows.values] if rows.genes is None else [rows.genes, rows.values]
    return how, *((array.dtype, array.ctypes.data % array.itemsize) for array in arrays)


def united(sources: Sequence[SourceRows]) -> tuple[UnitedStores, list[tuple[int, int, int]]]:
    """Sources that are alike, and for each the shifts of its genes, of its values and of its table of columns."""
    none, first = [0] * len(sources), sources[0]
    kept = [array for rows in sources for array in (rows.genes, rows.values) if array is not None]
    if first.coded is not None:
        span, starts = spanning([rows.coded[0] for rows in sources if rows.coded is not None])
        views = views_of(span, first.coded[1].dtype, first.coded[2].dtype)
        coded = UnitedStores(genes=views[1], values=views[2], chosen=None, columns=None, kept=kept, coded=views)
        return coded, list(zip(starts, starts, none, strict=True))
    values, value_starts = spanning([rows.values for rows in sources])
    genes, gene_starts, columns, table_starts = None, none, None, none
    if first.genes is not None:
        genes, gene_starts = spanning([rows.genes for rows in sources if rows.genes is not None])
        tables = [rows.chosen.column_of for rows in sources if rows.chosen is not None]
        if tables:
            kept += tables
            columns, table_starts = spanning(tables)
    stores = UnitedStores(genes=genes, values=values, chosen=first.chosen, columns=columns, kept=kept)
    return stores, list(zip(gene_starts, value_starts, table_starts, strict=True))


@dataclass(frozen=True, kw_only=True)
class LoadedRows:
    """The rows of a fetch in one matrix, in memory. Row i has `planned.lengths[i]` elements in store `store_of[i]`,
    which is none of the stores for a row that the matrix lacks.

    Its genes and values begin at `starts[0][i]` and `starts[1][i]` there, and the columns of its genes at `tables[i]`.
    Coded rows have the total of the row with all genes in `totals[i]`.
    """

    planned: PlannedRows
    stores: Sequence[UnitedStores]
    store_of: NDArray[np.unsignedinteger]
    starts: tuple[Rows, Rows]
    tables: Rows
    totals: NDArray[np.float64]

    def x(self, taken: Rows, form: Form) -> X:
        """x for the positions `taken` of the fetch."""
        parts = [self._rows_of(number, taken[here], here) for number, here in self._stores(taken)]
        n_genes, stored = self.planned.parts[0].n_columns, self.planned.stored
        return form.gathered(parts, len(taken), n_genes=n_genes, stored=stored)

    def transformed(self, taken: Rows, rows: Rows, transforming: Transforming) -> X:
        """As `x`, with transforms, for `rows` of the dataset. Raises OptionError for a value that one cannot take."""
        gathered = self.x(taken, transforming.gathering)
        try:
            return transforming.x(gathered, rows, self.totals[taken])
        except RefusedValue as refused:
            if not 0 <= refused.row < len(rows):
                raise OptionError(
                    f"row {refused.row!r:.100} of a RefusedValue must be from 0 to {len(rows) - 1}, counted in x"
                ) from refused
            raise OptionError(f"{self._found(refused.value, refused.row, taken, rows)}: {refused.why}") from None

    def _found(self, value: Any, row: int, taken: Rows, rows: Rows) -> str:
        """Says in which row and store a value is. `row` counts the rows of a minibatch."""
        positions = np.arange(len(self.planned.lengths))
        needed = self.planned.needed.items()
        number = next(number for number, of_part in needed if taken[row] in positions[of_part.at])
        part = self.planned.parts[number]
        return f"{part.matrix.path} of {part.url} holds {value!s} in row {rows[row]} of the dataset"

    def _stores(self, taken: Rows) -> Sequence[tuple[int, Rows | slice]]:
        """The stores of the rows at positions `taken` of the fetch, each with the places of its rows among them."""
        if len(self.stores) == 1 and not self.planned.lacks_rows:
            return [(0, slice(None))]
        return [(number, at) for number, at in by_value(self.store_of[taken]) if number < len(self.stores)]

    def _rows_of(self, number: int, taken: Rows, at: Rows | slice) -> gather.StoreRows:
        """The rows at positions `taken` of the fetch, all from united stores, which go to `at` in the minibatch."""
        stores = self.stores[number]
        rows = gather.widened(
            gather.StoreRows(
                at=at,
                genes=stores.genes,
                values=stores.values,
                starts=(self.starts[0][taken], self.starts[1][taken]),
                lengths=self.planned.lengths[taken],
                coded=stores.coded,
            )
        )
        if stores.chosen is None:
            return rows
        columns = None if stores.columns is None else (stores.columns, self.tables[taken])
        return gather.choose(rows, stores.chosen, columns)


async def load_rows(planned: PlannedRows, buffer: NDArray[np.uint8], *, turn: int) -> LoadedRows:
    """Loads planned rows into a buffer of `n_bytes`, unless a mirror has them."""
    return _loaded(planned, await load_sources(planned, buffer, turn=turn))


async def load_sources(planned: PlannedRows, buffer: NDArray[np.uint8], *, turn: int) -> list[SourceRows]:
    """Loads planned rows as `load_rows` does."""
    used, loads = 0, []
    async with asyncio.TaskGroup() as group:
        for needed in planned.needed.values():
            slot = buffer[used : used + needed.buffer_bytes]
            used += needed.buffer_bytes
            loads.append(group.create_task(needed.load(slot, turn=turn)))
    return [rows for load in loads for rows in load.result()]


def _loaded(planned: PlannedRows, sources: Sequence[SourceRows]) -> LoadedRows:
    """The rows that have been loaded, with their sources united, and where each row is in them."""
    n_rows = len(planned.lengths)
    starts, tables = (np.zeros(n_rows, np.int64), np.zeros(n_rows, np.int64)), np.zeros(n_rows, np.int64)
    lengths, totals = planned.lengths.copy(), np.zeros(n_rows)
    groups: dict[Hashable, list[SourceRows]] = {}
    for rows in sources:
        groups.setdefault(alike(rows), []).append(rows)
    stores: list[UnitedStores] = []
    store_of = np.full(n_rows, len(groups), np.min_scalar_type(len(groups)))  # of rows that no store has
    for of_group in groups.values():
        store, shifts = united(of_group)
        for rows, (of_genes, of_values, of_table) in zip(of_group, shifts, strict=True):
            store_of[rows.at], tables[rows.at] = len(stores), of_table
            starts[0][rows.at], starts[1][rows.at] = rows.starts[0] + of_genes, rows.starts[1] + of_values
            lengths[rows.at] = rows.lengths  # a mirror of a panel has fewer elements than the store
            if rows.totals is not None:
                totals[rows.at] = rows.totals
        stores.append(store)
    planned = replace(planned, lengths=lengths)
    return LoadedRows(planned=planned, stores=stores, store_of=store_of, starts=starts, tables=tables, totals=totals)


def held_share(matrices: Iterable[Sequence[MatrixPart]], ends: Rows, rows: Rows) -> float:
    """The share of the chunks of some rows that the mirrors of this machine hold, in all of the matrices.

    Part k of each matrix ends before row `ends[k]`.
    """
    needed, held = 0, 0
    for number, at in shares(ends, rows):
        for parts in matrices:
            part = parts[number]
            of_part, _ = part.held(rows[at] - (ends[number] - part.n_rows), at)
            if part.mirror is not None:
                blocks = part.mirror.rows.blocks(of_part)
                needed, held = needed + len(blocks), held + len(blocks) - len(part.mirror.rows.absent(blocks))
                continue
            starts, stops = part.matrix.elements_of(of_part, part.indptr)
            needed += sum(len(chunks_of(starts, stops, array)) for array in part.matrix.arrays)
    return held / needed if needed else 0.0
