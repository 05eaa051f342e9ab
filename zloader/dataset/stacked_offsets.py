"""The row offsets (indptr) of the stores of a manifest, as if they were one store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.caching.mirror import MirrorArray
from zloader.common.errors import FormatError
from zloader.common.options import FetchOptions
from zloader.common.records import Rows
from zloader.dataset.manifest import ADVICE
from zloader.dataset.paged_offsets import PagedOffsets
from zloader.reading.column_rows import LoadedColumn, PagedColumn
from zloader.reading.fetch import read_at_once
from zloader.reading.forms import Form
from zloader.reading.matrix_parts import MatrixPart
from zloader.reading.recipe import Recipe, RowColumns
from zloader.storage.layout import ArrayLayout


class _OfStores(PagedColumn):
    """A column whose row k is all that store k has of an array."""

    def taken(self, rows: Rows, loaded: LoadedColumn) -> NDArray[Any]:
        taken, (part,) = np.empty(len(rows), object), self.parts
        assert isinstance(part.indptr, np.ndarray)
        for _, here, elements in loaded:
            stops = elements.starts + (part.indptr[rows[here] + 1] - part.indptr[rows[here]])
            for place, start, stop in zip(np.arange(len(rows))[here].tolist(), elements.starts, stops, strict=True):
                taken[place] = elements.source[start:stop]
        return taken


class StackedOffsets(PagedOffsets):
    """The row offsets of one matrix of all stores, numbered through, and read from the stores that a page covers."""

    def __init__(
        self,
        pages: ArrayLayout,
        part: MatrixPart,
        *,
        row_ends: Rows,
        value_ends: Rows,
        urls: Sequence[str],
        where: str,
        mirror: MirrorArray | None,
    ) -> None:
        """Row k of `part` has all offsets of store k, which ends before row `row_ends[k]` and value `value_ends[k]`."""
        super().__init__(pages, self._entries, n_values=int(value_ends[-1]), where=where, mirror=mirror)
        self._stored, self._row_ends, self._value_ends, self._urls = _OfStores(parts=[part]), row_ends, value_ends, urls

    def _entries(self, start: int, stop: int) -> Rows:
        return self._read_runs([(start, stop)])[0]

    def _read_step(self, pages: Rows) -> list[tuple[int, Rows]]:
        runs = np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1)
        bounds = [(int(run[0]) * self._width, (int(run[-1]) + 1) * self._width) for run in runs if len(run)]
        last = self._pages.n_elements
        found = self._read_runs([(start, min(stop, last)) for start, stop in bounds])
        return [(start // self._width, values) for (start, _), values in zip(bounds, found, strict=True)]

    def _read_runs(self, runs: Sequence[tuple[int, int]]) -> list[Rows]:
        """The entries of each run, from the offsets of all stores that they need, which are read at once."""
        ends = self._row_ends
        bounds = np.searchsorted(ends, [(start, stop - 1) for start, stop in runs], side="right")
        covered = [np.arange(first, last + 1) for first, last in bounds.tolist()]
        stores = np.unique(np.concatenate([each[each < len(ends)] for each in covered]))
        offsets = dict(zip(stores.tolist(), self._of_stores(stores), strict=True))
        found = []
        for (start, stop), run in zip(runs, covered, strict=True):
            entries = [offsets[store] for store in run.tolist() if store < len(ends)]
            first = int(ends[run[0] - 1]) if run[0] else 0
            total = self._value_ends[-1:] if stop > ends[-1] else np.empty(0, np.int64)
            found.append(np.concatenate([*entries, total])[start - first : stop - first])
        return found

    def _of_stores(self, stores: Rows) -> Iterator[Rows]:
        """The offset of each row of some stores, among the values of all stores."""
        n_rows, n_values = (np.diff(ends, prepend=0)[stores] for ends in (self._row_ends, self._value_ends))
        columns = RowColumns(obsm=lambda: {"": self._stored}, paged=[self._stored])
        recipe = Recipe(x={}, form=Form(dense=True, dtype=None), columns=columns)
        stored = read_at_once(recipe, stores, FetchOptions()).obsm[""]
        for number, (store, own) in enumerate(zip(stores.tolist(), stored, strict=True)):
            if len(own) != n_rows[number] + 1 or own[0] or own[-1] != n_values[number]:
                raise FormatError(
                    f"{self._urls[store]} does not have the rows and values that are recorded ({self._where}): the "
                    f"store is damaged. {ADVICE}"
                )
            yield own[:-1].astype(np.int64) + (self._value_ends[store] - n_values[number])
