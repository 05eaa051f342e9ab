"""The rows of a fetch in one matrix: the elements that they need, their load, and x made of them."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common import page_cache
from zloader.common.errors import OptionError
from zloader.common.records import Rows, X
from zloader.common.shares import by_value
from zloader.reading import gather
from zloader.reading.forms import Form
from zloader.reading.matrix_parts import MatrixPart
from zloader.reading.reader import ArrayReader
from zloader.reading.row_sources import RowSource, SourcedRows, alike, united
from zloader.reading.slots import Elements, Needed
from zloader.reading.transformed import Transforming
from zloader.transforms.transform import RefusedValue

Shares = Mapping[int, Rows | slice]  # the stores that contain some rows, each with the positions of its rows


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """The elements that a fetch needs from one array.

    They need a buffer of `n_bytes`. `ahead_bytes` is the memory that they take until they are gathered, in the buffer
    or in the page cache.
    """

    reader: ArrayReader
    needed: Needed
    n_bytes: int
    ahead_bytes: int


@dataclass(frozen=True, kw_only=True)
class PlannedRows:
    """The rows of a fetch in one matrix, before its reads.

    For each part that the rows touch, `at` has the positions of its rows, and `wanted` the elements needed from each of
    its arrays: genes (CSR only), then values. `lengths` are the elements per row.
    """

    parts: Sequence[MatrixPart]
    at: Shares
    wanted: dict[int, list[_Wanted]]
    lengths: Rows

    @property
    def n_bytes(self) -> int:
        """Buffer bytes for the decoded elements."""
        return sum(array.n_bytes for arrays in self.wanted.values() for array in arrays)

    @property
    def ahead_bytes(self) -> int:
        """Bytes that it takes of `buffer_bytes`.

        Elements from a mirror count, too, because a small page cache would evict them.
        """
        return sum(array.ahead_bytes for arrays in self.wanted.values() for array in arrays)

    @property
    def exact(self) -> Form:
        """CSR form in float32 if it holds every stored value, else in float64."""
        return Form(dense=False, dtype=np.result_type(np.float32, *self.stored).name)

    @property
    def stored(self) -> list[np.dtype[Any]]:
        """The dtypes of the values in the stores."""
        return [part.matrix.values.dtype for part in self.parts]

    def x_bytes(self, taken: Rows, form: Form) -> int:
        """Bytes of x for the rows at positions `taken`, with copies; an upper bound for CSR from dense stores."""
        n_columns = self.parts[0].n_columns
        value_bytes = form.value_bytes(self.stored)
        lengths = self.lengths[taken]
        copied = self._copied_bytes(int(lengths.sum()), len(taken))
        if form.dense and not form.narrow:
            return copied + len(taken) * n_columns * value_bytes
        if any(part.genes is not None and not part.genes.takes_all for part in self.parts):
            lengths = np.minimum(lengths, n_columns)
        return copied + int(lengths.sum()) * (form.gene_bytes(n_columns) + value_bytes)

    def _copied_bytes(self, n_elements: int, n_rows: int) -> int:
        """Bytes of the copies that `gather.choose` and `gather.widened` make, at most."""
        per_element = per_row = 0
        for part in (self.parts[number] for number in self.wanted):
            itemsize = part.matrix.values.dtype.itemsize
            if part.genes is not None and part.indptr is None:
                per_row = max(per_row, itemsize * part.n_columns)
            elif part.genes is not None and not part.genes.takes_all:
                per_element = max(per_element, itemsize + part.genes.column_of.itemsize)
        widened = 6 if any(dtype == np.float16 for dtype in self.stored) else 0  # a copy, and float32
        return n_rows * per_row + n_elements * (per_element + widened)


def plan_rows(
    parts: Sequence[MatrixPart], readers: Sequence[Sequence[ArrayReader]], rows: Rows, at: Shares, ends: Rows
) -> PlannedRows:
    """Plans the reads of some rows. Part k has `readers[k]` and ends before row `ends[k]`."""
    lengths = np.zeros(len(rows), np.int64)
    wanted = {}
    for number, here in at.items():
        part = parts[number]
        of_part = rows[here] - (ends[number] - part.matrix.n_rows)
        starts, stops = part.matrix.elements_of(of_part, part.indptr)
        if isinstance(part.indptr, np.ndarray):
            page_cache.release(part.indptr)
        lengths[here] = stops - starts
        wanted[number] = [_wanted_of(reader, starts, stops) for reader in readers[number]]
    return PlannedRows(parts=parts, at=at, wanted=wanted, lengths=lengths)


def _wanted_of(reader: ArrayReader, starts: Rows, stops: Rows) -> _Wanted:
    needed = reader.needed(starts, stops)
    n_bytes = reader.buffer_bytes(needed)
    ahead_bytes = n_bytes or int((stops - starts).sum()) * reader.itemsize
    return _Wanted(reader=reader, needed=needed, n_bytes=n_bytes, ahead_bytes=ahead_bytes)


@dataclass(frozen=True, kw_only=True)
class LoadedRows:
    """The rows of a fetch in one matrix, in memory. Row i has `planned.lengths[i]` elements."""

    planned: PlannedRows
    loaded: SourcedRows

    def x(self, taken: Rows, rows: Rows, form: Form) -> X:
        """x for the positions `taken` of the fetch, which are `rows` of the dataset.

        Raises OptionError for a value that the dtype of `form` cannot hold.
        """
        parts = [self._rows_of(number, taken[here], here) for number, here in self._sources(taken)]
        n_genes, stored = self.planned.parts[0].n_columns, self.planned.stored
        try:
            return form.gathered(parts, len(taken), n_genes=n_genes, stored=stored)
        except gather.UnfitValue as unfit:
            raise OptionError(
                f"{self._found(unfit.value, unfit.row, taken, rows)}, which {form.dtype} cannot hold: choose another "
                "dtype, such as 'float64'"
            ) from None

    def transformed(self, taken: Rows, rows: Rows, transforming: Transforming) -> X:
        """As `x`, with transforms. Raises OptionError for a value that one of them cannot take."""
        form = Form(dense=transforming.gathers_dense, dtype=transforming.gathering_dtype)
        gathered = self.x(taken, rows, form)
        try:
            return transforming.x(gathered, rows)
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

    def _sources(self, taken: Rows) -> Sequence[tuple[int, Rows | slice]]:
        """The sources of the rows at positions `taken` of the fetch, each with the places of its rows among them."""
        if len(self.loaded.sources) == 1:
            return [(0, slice(None))]
        return by_value(self.loaded.source_of[taken])

    def _rows_of(self, number: int, taken: Rows, at: Rows | slice) -> gather.StoreRows:
        """The rows at positions `taken` of the fetch, all from one source, which go to `at` in the minibatch."""
        loaded = self.loaded
        source = loaded.sources[number]
        rows = gather.StoreRows(
            at=at,
            genes=source.genes,
            values=source.values,
            starts=(loaded.starts[0][taken], loaded.starts[1][taken]),
            lengths=self.planned.lengths[taken],
        )
        if source.chosen is None:
            return rows
        columns = None if source.columns is None else (source.columns, loaded.tables[taken])
        return gather.choose(rows, source.chosen, columns)


async def load_rows(planned: PlannedRows, buffer: NDArray[np.uint8], *, turn: int) -> LoadedRows:
    """Loads the elements of planned rows into a buffer of `planned.n_bytes`, unless a mirror has them."""
    used = 0
    loads: dict[int, list[asyncio.Task[Elements]]] = {number: [] for number in planned.wanted}
    async with asyncio.TaskGroup() as group:
        for number, arrays in planned.wanted.items():
            for array in arrays:
                slot = buffer[used : used + array.n_bytes]
                used += array.n_bytes
                load = array.reader.load(array.needed, slot, turn=turn)
                loads[number].append(group.create_task(load))
    elements = {number: [load.result() for load in of_part] for number, of_part in loads.items()}
    return LoadedRows(planned=planned, loaded=_sourced(planned, elements))


def _sourced(planned: PlannedRows, elements: Mapping[int, Sequence[Elements]]) -> SourcedRows:
    """The sources of loaded rows, and where each row is in them."""
    n_rows = len(planned.lengths)
    starts, tables = (np.zeros(n_rows, np.int64), np.zeros(n_rows, np.int64)), np.zeros(n_rows, np.int64)
    groups: dict[Hashable, list[int]] = {}
    for number, loaded in elements.items():
        key = alike(planned.parts[number], [array.source for array in loaded])
        groups.setdefault(key, []).append(number)
    sources: list[RowSource] = []
    source_of = np.zeros(n_rows, np.min_scalar_type(len(groups)))
    for numbers in groups.values():
        arrays = [[array.source for array in elements[number]] for number in numbers]
        source, shifts = united([planned.parts[number] for number in numbers], arrays)
        for number, (*of_arrays, of_table) in zip(numbers, shifts, strict=True):
            at = planned.at[number]
            source_of[at], tables[at] = len(sources), of_table
            for into, array, shift in zip(starts[-len(of_arrays) :], elements[number], of_arrays, strict=True):
                into[at] = array.starts + shift
        sources.append(source)
    return SourcedRows(sources=sources, source_of=source_of, starts=starts, tables=tables)
