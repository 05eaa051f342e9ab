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

from zloader.caching.row_blocks import CodedRows
from zloader.common import page_cache
from zloader.common.errors import OptionError
from zloader.common.records import Rows, X
from zloader.reading import gather
from zloader.reading.forms import Form, Transforming
from zloader.reading.matrix_parts import MatrixPart
from zloader.reading.read_plan import Elements
from zloader.reading.reader import ArrayReader, Needed
from zloader.reading.row_reader import NeededRows, RowReader
from zloader.selecting.genes import ChosenGenes
from zloader.selecting.groups import by_value, shares
from zloader.storage.coded_rows import Views, views_of
from zloader.storage.layout import chunks_of
from zloader.transforms.transform import RefusedValue

Shares = Mapping[int, Rows | slice]  # the stores that contain some rows, each with the positions of its rows


@dataclass(frozen=True, kw_only=True)
class PlannedRows:
    """The rows of a fetch in one matrix, before its reads.

    For each part that the rows touch, `at` has the positions of its rows, and `needed` the elements needed from each of
    its arrays: genes (CSR only), then values; or the rows of a mirror of coded rows. `lengths` are the elements per
    row.
    """

    parts: Sequence[MatrixPart]
    at: Shares
    needed: dict[int, list[Needed | NeededRows]]
    lengths: Rows

    @property
    def n_bytes(self) -> int:
        """Buffer bytes for the decoded elements."""
        return sum(needed.buffer_bytes for arrays in self.needed.values() for needed in arrays)

    @property
    def ahead_bytes(self) -> int:
        """Bytes that it takes of `buffer_bytes`.

        Elements from a mirror count, too, because a small page cache would evict them.
        """
        return sum(needed.ahead_bytes for arrays in self.needed.values() for needed in arrays)

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
        for part in (self.parts[number] for number, needed in self.needed.items() if not _are_coded(needed)):
            itemsize = part.matrix.values.dtype.itemsize
            if part.genes is not None and part.indptr is None:
                per_row = max(per_row, itemsize * part.n_columns)
            elif part.genes is not None and not part.genes.takes_all:
                per_element = max(per_element, itemsize + part.genes.column_of.itemsize)
        widened = 6 if any(dtype == np.float16 for dtype in self.stored) else 0  # a copy, and float32
        return per_row, per_element + widened


def _are_coded(needed: Sequence[Needed | NeededRows]) -> bool:
    """Whether the rows come from a mirror of coded rows, whose genes are the columns of x."""
    return any(isinstance(each, NeededRows) for each in needed)


def plan_rows(
    parts: Sequence[MatrixPart],
    readers: Sequence[Sequence[ArrayReader | RowReader]],
    rows: Rows,
    at: Shares,
    ends: Rows,
) -> PlannedRows:
    """Plans the reads of some rows. Part k has `readers[k]` and ends before row `ends[k]`."""
    lengths = np.zeros(len(rows), np.int64)
    needed, held = {}, {}
    for number, of_store in at.items():
        part = parts[number]
        of_part, here = part.held(rows[of_store] - (ends[number] - part.n_rows), of_store)
        if not len(of_part):
            continue
        held[number] = here
        starts, stops = part.matrix.elements_of(of_part, part.indptr)
        if isinstance(part.indptr, np.ndarray):
            page_cache.release(part.indptr)
        lengths[here] = stops - starts
        needed[number] = [reader.needed(of_part, starts, stops) for reader in readers[number]]
    return PlannedRows(parts=parts, at=held, needed=needed, lengths=lengths)


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


def alike(part: MatrixPart, loaded: Sequence[Elements | CodedRows]) -> Hashable:
    """The same for all stores whose rows can be gathered in one loop. `loaded` are the genes (CSR only) and values."""
    how: Hashable = None
    arrays = [each.source for each in loaded]
    if isinstance(loaded[0], CodedRows):
        return loaded[0].dtypes
    if part.genes is not None:
        how = (part.genes.takes_all, part.genes.ascending) if len(arrays) == 2 else id(part.genes)
    return how, *((array.dtype, array.ctypes.data % array.itemsize) for array in arrays)


def united(
    parts: Sequence[MatrixPart], loaded: Sequence[Sequence[Elements | CodedRows]]
) -> tuple[UnitedStores, list[tuple[int, ...]]]:
    """The stores of parts that are alike, and for each part the shifts of its elements and of its table of columns."""
    arrays = [[each.source for each in of_part] for of_part in loaded]
    of_kinds = list(zip(*arrays, strict=True))  # genes and values, or values or coded rows alone
    kept = [array for of_kind in of_kinds for array in of_kind]
    spans = [spanning(of_kind) for of_kind in of_kinds]
    first = loaded[0][0]
    if isinstance(first, CodedRows):
        ((span, starts),) = spans
        views = views_of(span, *first.dtypes)
        coded = UnitedStores(genes=views[1], values=views[2], chosen=None, columns=None, kept=kept, coded=views)
        return coded, [(start, 0) for start in starts]
    chosen, columns, table_starts = parts[0].genes, None, [0] * len(parts)
    if chosen is not None and len(spans) == 2:
        tables = [part.genes.column_of for part in parts if part.genes is not None]
        kept += tables
        columns, table_starts = spanning(tables)
    *genes, values = (span for span, _ in spans)
    stores = UnitedStores(genes=genes[0] if genes else None, values=values, chosen=chosen, columns=columns, kept=kept)
    return stores, list(zip(*(starts for _, starts in spans), table_starts, strict=True))


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
        number = next(number for number, here in self.planned.at.items() if taken[row] in positions[here])
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


async def load_elements(
    planned: PlannedRows, buffer: NDArray[np.uint8], *, turn: int
) -> Mapping[int, list[Elements | CodedRows]]:
    """Loads the elements of planned rows, by part and array, into a buffer of `n_bytes`, unless a mirror has them."""
    used = 0
    loads: dict[int, list[asyncio.Task[Elements | CodedRows]]] = {number: [] for number in planned.needed}
    async with asyncio.TaskGroup() as group:
        for number, arrays in planned.needed.items():
            for needed in arrays:
                slot = buffer[used : used + needed.buffer_bytes]
                used += needed.buffer_bytes
                loads[number].append(group.create_task(needed.load(slot, turn=turn)))
    return {number: [load.result() for load in of_part] for number, of_part in loads.items()}


async def load_rows(planned: PlannedRows, buffer: NDArray[np.uint8], *, turn: int) -> LoadedRows:
    """Loads planned rows as `load_elements` does."""
    return _loaded(planned, await load_elements(planned, buffer, turn=turn))


def _loaded(planned: PlannedRows, elements: Mapping[int, Sequence[Elements | CodedRows]]) -> LoadedRows:
    """The rows whose elements have been loaded, with stores united, and where each row is in them."""
    n_rows = len(planned.lengths)
    starts, tables = (np.zeros(n_rows, np.int64), np.zeros(n_rows, np.int64)), np.zeros(n_rows, np.int64)
    lengths, totals = planned.lengths.copy(), np.zeros(n_rows)
    groups: dict[Hashable, list[int]] = {}
    for number, loaded in elements.items():
        key = alike(planned.parts[number], loaded)
        groups.setdefault(key, []).append(number)
    stores: list[UnitedStores] = []
    store_of = np.full(n_rows, len(groups), np.min_scalar_type(len(groups)))  # of rows that no store has
    for numbers in groups.values():
        store, shifts = united([planned.parts[number] for number in numbers], [elements[number] for number in numbers])
        for number, (*of_arrays, of_table) in zip(numbers, shifts, strict=True):
            at = planned.at[number]
            store_of[at], tables[at] = len(stores), of_table
            for into, array, shift in zip(starts[-len(of_arrays) :], elements[number], of_arrays, strict=True):
                into[at] = array.starts + shift
                if isinstance(array, CodedRows):
                    lengths[at], totals[at] = array.lengths, array.entries["whole_sum"]
        stores.append(store)
    planned = replace(planned, lengths=lengths)  # a panel has fewer elements than the store
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
            if part.mirror is not None and part.mirror.rows is not None:
                blocks = part.mirror.rows.blocks(of_part)
                needed, held = needed + len(blocks), held + part.mirror.rows.n_held(blocks)
                continue
            starts, stops = part.matrix.elements_of(of_part, part.indptr)
            for array in part.matrix.arrays:
                chunks = chunks_of(starts, stops, array)
                needed += len(chunks)
                if part.mirror is not None and array.path in part.mirror.arrays:
                    held += part.mirror.arrays[array.path].n_held(chunks)
    return held / needed if needed else 0.0
