"""The rows of a fetch in one matrix: the elements that they need, their load, and x made of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common import page_cache
from zloader.common.errors import OptionError
from zloader.common.records import Rows, X
from zloader.reading import gather
from zloader.reading.forms import Form
from zloader.reading.matrix_parts import MatrixPart
from zloader.reading.reader import ArrayReader
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
        """Bytes of x for the rows at positions `taken`; an upper bound for CSR from dense stores."""
        n_columns = self.parts[0].n_columns
        value_bytes = form.value_bytes(self.stored)
        if form.dense and not form.narrow:
            return len(taken) * n_columns * value_bytes
        lengths = self.lengths[taken]
        if any(part.genes is not None and not part.genes.takes_all for part in self.parts):
            lengths = np.minimum(lengths, n_columns)
        return int(lengths.sum()) * (form.gene_bytes(n_columns) + value_bytes)


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
        if part.indptr is not None:
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
    """The rows of a fetch in one matrix, in memory.

    Row i is `planned.lengths[i]` of its part's `elements`, from `starts` on. `starts` has the starts in the genes and
    in the values.
    """

    planned: PlannedRows
    elements: dict[int, list[Elements]]
    starts: tuple[Rows, Rows]

    def x(self, taken: Rows, rows: Rows, at: Shares, form: Form) -> X:
        """x for the positions `taken` of the fetch, which are `rows` of the dataset and lie in the stores as in `at`.

        Raises OptionError for a value that the dtype of `form` cannot hold.
        """
        parts = [self._store_rows(number, taken[here], here) for number, here in at.items()]
        n_genes, stored = self.planned.parts[0].n_columns, self.planned.stored
        try:
            return form.gathered(parts, len(taken), n_genes=n_genes, stored=stored)
        except gather.UnfitValue as unfit:
            raise OptionError(
                f"{self._found(unfit.value, unfit.row, rows, at)}, which {form.dtype} cannot hold: choose another "
                "dtype, such as 'float64'"
            ) from None

    def transformed(self, taken: Rows, rows: Rows, at: Shares, transforming: Transforming) -> X:
        """As `x`, with transforms. Raises OptionError for a value that one of them cannot take."""
        form = Form(dense=transforming.gathers_dense, dtype=transforming.gathering_dtype)
        gathered = self.x(taken, rows, at, form)
        try:
            return transforming.x(gathered, rows)
        except RefusedValue as refused:
            raise OptionError(f"{self._found(refused.value, refused.row, rows, at)}: {refused.why}") from None

    def _found(self, value: Any, row: int, rows: Rows, at: Shares) -> str:
        """Says in which row and store a value is. `row` counts the rows of a minibatch."""
        number = next(number for number, here in at.items() if row in np.arange(len(rows))[here])
        part = self.planned.parts[number]
        return f"{part.matrix.path} of {part.url} holds {value!s} in row {rows[row]} of the dataset"

    def _store_rows(self, number: int, taken: Rows, at: Rows | slice) -> gather.StoreRows:
        """The rows at positions `taken` of the fetch, all from one store, which go to `at` in the minibatch."""
        *genes, values = (elements.source for elements in self.elements[number])
        rows = gather.StoreRows(
            at=at,
            genes=genes[0] if genes else None,
            values=values,
            starts=(self.starts[0][taken], self.starts[1][taken]),
            lengths=self.planned.lengths[taken],
        )
        chosen = self.planned.parts[number].genes
        return rows if chosen is None else gather.choose(rows, chosen)


async def load_rows(planned: PlannedRows, buffer: NDArray[np.uint8], *, turn: int) -> LoadedRows:
    """Loads the elements of planned rows into a buffer of `planned.n_bytes`, unless a mirror has them."""
    n_rows, used = len(planned.lengths), 0
    starts = (np.zeros(n_rows, np.int64), np.zeros(n_rows, np.int64))
    loads: dict[int, list[asyncio.Task[Elements]]] = {number: [] for number in planned.wanted}
    async with asyncio.TaskGroup() as group:
        for number, arrays in planned.wanted.items():
            for array in arrays:
                slot = buffer[used : used + array.n_bytes]
                used += array.n_bytes
                load = array.reader.load(array.needed, slot, turn=turn)
                loads[number].append(group.create_task(load))
    elements = {number: [load.result() for load in of_part] for number, of_part in loads.items()}
    for number, at in planned.at.items():
        for into, loaded in zip(starts[-len(elements[number]) :], elements[number], strict=True):
            into[at] = loaded.starts
    return LoadedRows(planned=planned, elements=elements, starts=starts)
