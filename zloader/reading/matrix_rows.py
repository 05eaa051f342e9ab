"""The rows of a fetch in one matrix: the elements that they need, their load, and x made of them.

The rows of a minibatch alternate between stores, and between mirrors and what was read. One loop over all of them
writes the minibatch from start to end, and Python handles one array, however many there are. A loop takes one array, so
it gets all of the memory, in which the places of rows are addresses. Nothing is copied.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.errors import OptionError
from zloader.common.records import Rows, X
from zloader.reading import gather
from zloader.reading.forms import Form, Transforming
from zloader.reading.gather import SourceRows
from zloader.reading.matrix_reader import Needed
from zloader.reading.recipe import MatrixPart
from zloader.selecting.groups import by_value
from zloader.transforms.transform import RefusedValue

_FIRST = 64  # the first byte of `memory`, as there is none at address 0


@functools.cache
def memory(dtype: np.dtype[Any]) -> NDArray[Any]:
    """All memory as a flat array of this dtype. Only what belongs to arrays that exist may be read."""
    shape = ((1 << 62) // dtype.itemsize,)
    interface = {"version": 3, "typestr": dtype.str, "shape": shape, "data": (_FIRST, True)}
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def place_of(array: NDArray[Any]) -> int:
    """The position of the first element of an array in `memory`."""
    address = array.__array_interface__["data"][0] - _FIRST
    assert address % array.itemsize == 0
    return int(address // array.itemsize)


def kind_of(rows: SourceRows) -> Hashable:
    """The same for all rows that are gathered in one loop."""
    genes, chosen, how = None if rows.genes is None else rows.genes.dtype, rows.chosen, None
    if chosen is not None:
        how = id(chosen) if genes is None else (chosen.takes_all, chosen.ascending, chosen.column_of.dtype)
    return rows.coded is not None, genes, rows.values.dtype, how


@dataclass(frozen=True, kw_only=True)
class LoadedRows:
    """The rows of a fetch in one matrix, in memory: what they `needed` of its parts. Row i has `lengths[i]` elements.

    It is gathered like the rows of the source `kinds[kind[i]]`; a row that the matrix lacks has no kind. In `memory`,
    its genes and values begin at `starts[0][i]` and `starts[1][i]`, and the columns of its genes at `tables[i]`. A row
    of a panel has the total of the row with all genes in `totals[i]`.
    """

    parts: Sequence[MatrixPart]
    needed: Sequence[Needed]
    lengths: Rows
    sources: Sequence[SourceRows]  # which keep the memory
    kinds: Sequence[SourceRows]
    kind: NDArray[np.unsignedinteger]
    starts: tuple[Rows, Rows]
    tables: Rows
    totals: NDArray[np.float64]

    @classmethod
    def of(
        cls, parts: Sequence[MatrixPart], needed: Sequence[Needed], sources: Sequence[SourceRows], n_rows: int
    ) -> LoadedRows:
        """The rows of a fetch of `n_rows` that have been loaded, and where each of them is in memory."""
        keys = [kind_of(rows) for rows in sources]
        kinds = dict(zip(keys, sources, strict=True))
        starts, tables = (np.zeros(n_rows, np.int64), np.zeros(n_rows, np.int64)), np.zeros(n_rows, np.int64)
        lengths, totals = np.zeros(n_rows, np.int64), np.zeros(n_rows)
        kind = np.full(n_rows, len(kinds), np.min_scalar_type(len(kinds)))
        numbers = {key: number for number, key in enumerate(kinds)}
        for key, rows in zip(keys, sources, strict=True):
            kind[rows.at], lengths[rows.at] = numbers[key], rows.lengths
            for of_rows, begins, array in zip(starts, rows.starts, (rows.genes, rows.values), strict=True):
                array = array if rows.coded is None else rows.coded[0]
                of_rows[rows.at] = begins + (0 if array is None else place_of(array))
            if rows.chosen is not None and rows.genes is not None:
                tables[rows.at] = place_of(rows.chosen.column_of)
            if rows.totals is not None:
                totals[rows.at] = rows.totals
        return cls(
            parts=parts,
            needed=needed,
            lengths=lengths,
            sources=sources,
            kinds=list(kinds.values()),
            kind=kind,
            starts=starts,
            tables=tables,
            totals=totals,
        )

    @property
    def stored(self) -> list[np.dtype[Any]]:
        """The dtypes of the values in the stores."""
        return [part.matrix.values.dtype for part in self.parts]

    @property
    def exact(self) -> Form:
        """CSR form in float32 if it holds every stored value, else in float64."""
        return Form(dense=False, dtype=np.result_type(np.float32, *self.stored).name)

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
        for part in (rows.reader.part for rows in self.needed if rows.chooses_later):
            itemsize = part.matrix.values.dtype.itemsize
            if part.genes is not None and part.indptr is None:
                per_row = max(per_row, itemsize * part.n_columns)
            elif part.genes is not None and not part.genes.takes_all:
                per_element = max(per_element, itemsize + part.genes.column_of.itemsize)
        widened = 6 if any(dtype == np.float16 for dtype in self.stored) else 0  # a copy, and float32
        return per_row, per_element + widened

    def x(self, taken: Rows, form: Form) -> X:
        """x for the positions `taken` of the fetch."""
        parts = [self._rows_of(self.kinds[number], taken[here], here) for number, here in self._kinds(taken)]
        return form.gathered(parts, len(taken), n_genes=self.parts[0].n_columns, stored=self.stored)

    def transformed(self, taken: Rows, rows: Rows, transforming: Transforming) -> X:
        """As `x`, with transforms, for `rows` of the dataset. Raises OptionError for a value that one cannot take."""
        gathered = self.x(taken, transforming.gathering)
        try:
            return transforming.x(gathered, rows, self.totals[taken])
        except RefusedValue as refused:
            row, positions = refused.row, np.arange(len(self.lengths))
            part = next(of.reader.part for of in self.needed if taken[row] in positions[of.at])
            where = f"{part.matrix.path} of {part.url} holds {refused.value!s} in row {rows[row]} of the dataset"
            raise OptionError(f"{where}: {refused.why}") from None

    def _kinds(self, taken: Rows) -> Sequence[tuple[int, Rows | slice]]:
        """The kinds of the rows at positions `taken` of the fetch, each with the places of its rows among them."""
        if len(self.kinds) == 1 and all(part.row_of is None for part in self.parts):
            return [(0, slice(None))]
        return [(number, at) for number, at in by_value(self.kind[taken]) if number < len(self.kinds)]

    def _rows_of(self, source: SourceRows, taken: Rows, at: Rows | slice) -> SourceRows:
        """The rows at positions `taken` of the fetch, all gathered like those of a source.

        They go to `at` in the minibatch.
        """
        genes = None if source.genes is None else memory(source.genes.dtype)
        values, chosen, bits = memory(source.values.dtype), source.chosen, memory(np.dtype(np.uint8))
        rows = gather.widened(
            SourceRows(
                at=at,
                genes=genes,
                values=values,
                starts=(self.starts[0][taken], self.starts[1][taken]),
                lengths=self.lengths[taken],
                coded=None if source.coded is None or genes is None else (bits, genes, values),
            )
        )
        if chosen is None:
            return rows
        columns = None if genes is None else (memory(chosen.column_of.dtype), self.tables[taken])
        return gather.choose(rows, chosen, columns)
