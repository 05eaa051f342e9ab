"""The rows of a TileDB-SOMA experiment, read in one pass by joinid. `soma_reader` reads them in a process of its own.

X is read by the tile of rows of the array, each once per pass: blocks that cut tiles take five times as long. A filter
leaves gaps between joinids. Where they are small, whole stretches are read and the others dropped.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from zloader.common.child import Child, ChildCrashedError
from zloader.common.errors import SourceError
from zloader.common.messages import listed
from zloader.common.options import MiB
from zloader.common.records import Rows
from zloader.conversion.sources.arrow import ArrowObs
from zloader.conversion.sources.nodes import reading
from zloader.conversion.sources.row_source import csr_of

NEEDS = "it needs a newer tiledbsoma"
_JOINID = "soma_joinid"
_NO_NAMES = "__joinid"  # stands for the joinids as names of cells
_NAMES = ("obs_id", "var_id", "feature_id")  # what AnnData writes, and the Census
_VALUE_BYTES = 40  # of a value with its two joinids, while it becomes CSR
_BLOCK_BYTES = 192 * MiB


class SomaRows:
    """The rows of an experiment as a BlockSource. `x` is the path to an array: `("ms", measurement, "X", layer)`."""

    def __init__(self, reader: Child, name: str, where: str | None, x: tuple[str, ...]) -> None:
        self._reader, self._name, self._where, self._x = reader, name, where, x
        self.fingerprint: str | None = None
        columns = names_in(reader, ("obs",), name)
        self._joinids = self._selected(columns)
        self.n_obs = len(self._joinids)
        index = next((column for column in _NAMES if column in columns), _NO_NAMES)
        self.obs = ArrowObs(lambda column: (self._column(column), False), columns, n_rows=self.n_obs, index=index)
        with reading(f"{name}: {'/'.join(x[:2])}", needs=NEEDS):
            var = self._table((*x[:2], "var")).to_pandas()
            n_values, tile, n_all = json.loads(reader.call("array", x)[0].tobytes())
        self.n_values = n_values if where is None else None
        self._genes = np.full(int(var[_JOINID].max()) + 2 if len(var) else 1, -1, np.int32)  # the last is for others
        self._genes[var[_JOINID]] = np.arange(len(var), dtype=np.int32)
        named = next((column for column in _NAMES if column in var), None)
        self.var = var.set_index(var[_JOINID].astype(str).rename(None)) if named is None else var.set_index(named)
        self._tile = tile
        while self._tile > 1 and self._tile * _VALUE_BYTES * n_values > _BLOCK_BYTES * max(1, n_all):
            self._tile //= 2

    def _table(self, path: tuple[str, ...], *given: Any) -> Any:
        import pyarrow as pa

        return pa.ipc.open_stream(self._reader.call("table", path, *given)[0]).read_all()

    def _selected(self, columns: list[str]) -> Rows:
        """The joinids of the cells, ascending. Raises SourceError if the filter is wrong, or selects no cell."""
        try:
            joinids: Rows = self._column(_JOINID).to_numpy()
        except SourceError as error:
            if self._where is None or isinstance(error.__cause__, ChildCrashedError):
                raise
            reason = str(error.__cause__).partition("\n")[0]
            raise SourceError(
                f"{self._name}: where={self._where!r} is not a filter of obs ({reason}). Its columns are "
                f"{listed(columns, 100)}"
            ) from error
        if self._where is not None and not len(joinids):
            raise SourceError(f"{self._name}: no cell matches where={self._where!r}")
        return joinids

    def _column(self, column: str) -> Any:
        """A column of obs of the selected cells, by joinid."""
        column = _JOINID if column == _NO_NAMES else column
        chosen = getattr(self, "_joinids", None) if self._where is not None else None  # filtered only once
        where = self._where if chosen is None else None
        with reading(f"{self._name}: obs/{column}", needs=NEEDS):
            return self._table(("obs",), [column], where, chosen).column(0)

    def blocks(self, first_row: int) -> Iterator[Any]:
        """See BlockSource. The next block is read meanwhile."""
        pieces = self._pieces(first_row)
        yield from map(self._counts, itertools.islice(pieces, 1))  # whoever wants to know the dtypes asks for no more
        with ThreadPoolExecutor(1, thread_name_prefix="zloader-soma") as ahead:
            waiting: deque[Any] = deque()
            for joinids in pieces:
                waiting.append(ahead.submit(self._counts, joinids))
                if len(waiting) > 1:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def _pieces(self, row: int) -> Iterator[Rows]:
        """The joinids of the cells from a row on, by the tile of X."""
        while row < self.n_obs:
            stop = min(row + self._tile, self.n_obs)
            if stop < self.n_obs:
                cut = self._joinids[stop] // self._tile * self._tile
                at_tile = int(np.searchsorted(self._joinids, cut))
                stop = at_tile if at_tile > row else stop
            yield self._joinids[row:stop]
            row = stop

    def _counts(self, joinids: Rows) -> Any:
        """The counts of these cells as CSR. Raises SourceError."""
        with reading(f"{self._name}: X at {_JOINID} {joinids[0]} to {joinids[-1]}", needs=NEEDS):
            indptr, genes, values = self._reader.call("counts", self._x, joinids)
        positions = self._genes[np.minimum(genes, len(self._genes) - 1)]
        if len(positions) and positions.min() < 0:
            unknown = int(np.argmin(positions))
            cell = joinids[np.searchsorted(indptr, unknown, side="right") - 1]
            said = f"cell {cell} has a value for gene {genes[unknown]}"
            raise SourceError(f"{self._name}: {said}, but var has no gene with this {_JOINID}")
        return csr_of(values, positions, indptr, len(self.var))

    def close(self) -> None:
        """Ends the process that reads."""
        self._reader.close()


def names_in(reader: Child, path: tuple[str, ...], name: str, doing: str = "cannot be read") -> list[str]:
    """The names in a collection or frame of an experiment. Raises SourceError."""
    with reading(": ".join([name, *filter(None, ["/".join(path)])]), doing, needs=NEEDS):
        return list(json.loads(reader.call("names", path)[0].tobytes()))
