"""The rows of a TileDB-SOMA experiment, read in one pass by joinid.

X is read by the tile of rows of the array, each once per pass: blocks that cut tiles take five times as long. A filter
leaves gaps between joinids. Where they are small, whole stretches are read and the others dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from zloader.common.errors import SourceError
from zloader.common.messages import listed
from zloader.common.options import MiB
from zloader.common.records import Rows
from zloader.conversion.sources.arrow import ArrowObs
from zloader.conversion.sources.nodes import reading

NEEDS = "it needs a newer tiledbsoma"
_JOINID = "soma_joinid"
_NO_NAMES = "__joinid"  # stands for the joinids as names of cells
_NAMES = ("obs_id", "var_id", "feature_id")  # what AnnData writes, and the Census
_COLUMNS = ("soma_dim_0", "soma_dim_1", "soma_data")
_VALUE_BYTES = 40  # of a value with its two joinids, while it becomes CSR
_BLOCK_BYTES = 192 * MiB


class SomaRows:
    """The rows of an experiment as a BlockSource. `names` are those of the measurement and of the array in its X."""

    def __init__(self, experiment: Any, name: str, where: str | None, names: tuple[str, str]) -> None:
        self._name, self._obs, self._where = name, experiment.obs, where
        measurement = experiment.ms[names[0]]
        self._x = measurement.X[names[1]]
        self.fingerprint: str | None = None
        self._joinids = self._selected()
        self.n_obs = len(self._joinids)
        columns = list(experiment.obs.keys())
        index = next((column for column in _NAMES if column in columns), _NO_NAMES)
        self.obs = ArrowObs(lambda column: (self._read(column), False), columns, n_rows=self.n_obs, index=index)
        with reading(f"{name}: ms/{names[0]}", needs=NEEDS):
            var = measurement.var.read().concat().to_pandas().sort_values(_JOINID)
            n_values, self._kind = int(self._x.nnz), self._x.schema.field("soma_data").type.to_pandas_dtype()
            tile = int(json.loads(self._x.schema_config_options().dims)["soma_dim_0"]["tile"])
            n_all = experiment.obs.count
        self.n_values = n_values if where is None else None
        self._genes = np.full(int(var[_JOINID].max()) + 2 if len(var) else 1, -1, np.int32)  # the last is for others
        self._genes[var[_JOINID]] = np.arange(len(var), dtype=np.int32)
        named = next((column for column in _NAMES if column in var), None)
        self.var = var.set_index(var[_JOINID].astype(str).rename(None)) if named is None else var.set_index(named)
        self._tile = tile
        while self._tile > 1 and self._tile * _VALUE_BYTES * n_values > _BLOCK_BYTES * max(1, n_all):
            self._tile //= 2

    def _selected(self) -> Rows:
        """The joinids of the cells, ascending. Raises SourceError if the filter is wrong, or selects no cell."""
        try:
            joinids: Rows = self._read(_JOINID).to_numpy()
        except SourceError as error:
            if self._where is None:
                raise
            reason = str(error.__cause__).partition("\n")[0]
            raise SourceError(
                f"{self._name}: where={self._where!r} is not a filter of obs ({reason}). Its columns are "
                f"{listed(self._obs.keys(), 100)}"
            ) from error
        if self._where is not None and not len(joinids):
            raise SourceError(f"{self._name}: no cell matches where={self._where!r}")
        return joinids

    def _read(self, column: str) -> Any:
        """A column of obs of the selected cells, by joinid."""
        column = _JOINID if column == _NO_NAMES else column
        with reading(f"{self._name}: obs/{column}", needs=NEEDS):
            wanted = list(dict.fromkeys([_JOINID, column]))
            chosen = getattr(self, "_joinids", None) if self._where is not None else None  # filtered only once
            if chosen is None:
                table = self._obs.read(column_names=wanted, value_filter=self._where).concat()
            else:
                table = self._obs.read((chosen,), column_names=wanted).concat()
            joinids = table.column(_JOINID).to_numpy()
            in_order = (np.diff(joinids) > 0).all()
            return (table if in_order else table.take(np.argsort(joinids))).column(column)

    def blocks(self, first_row: int) -> Iterator[Any]:
        """See BlockSource."""
        while first_row < self.n_obs:
            stop = min(first_row + self._tile, self.n_obs)
            if stop < self.n_obs:
                cut = self._joinids[stop] // self._tile * self._tile
                at_tile = int(np.searchsorted(self._joinids, cut))
                stop = at_tile if at_tile > first_row else stop
            yield self._counts(self._joinids[first_row:stop])
            first_row = stop

    def close(self) -> None:
        """Closes the experiment, once `Soma.open` has said how."""

    def _counts(self, joinids: Rows) -> Any:
        """The counts of these cells as CSR. Raises SourceError."""
        first, last = int(joinids[0]), int(joinids[-1])
        at = f"{self._name}: X at {_JOINID} {first} to {last}"
        coordinates = slice(first, last) if last - first < 2 * len(joinids) else joinids
        parts: list[tuple[NDArray[Any], ...]] = [tuple(np.empty(0, kind) for kind in (np.int32, np.int32, self._kind))]
        with reading(at, needs=NEEDS):
            for table in self._x.read((coordinates,)).tables():
                parts += [self._placed(joinids, *(table.column(name).to_numpy() for name in _COLUMNS))]
        rows, genes, values = (np.concatenate(column) for column in zip(*parts, strict=True))
        return scipy.sparse.coo_matrix((values, (rows, genes)), (len(joinids), len(self.var))).tocsr()

    def _placed(self, joinids: Rows, cells: Rows, genes: Rows, values: NDArray[Any]) -> tuple[NDArray[Any], ...]:
        """The rows, the positions in var and the values of those values that are of these cells."""
        rows = np.searchsorted(joinids, cells).astype(np.int32)
        if joinids[-1] - joinids[0] >= len(joinids):
            kept = joinids[np.minimum(rows, len(joinids) - 1)] == cells
            rows, genes, values, cells = rows[kept], genes[kept], values[kept], cells[kept]
        positions = self._genes[np.minimum(genes, len(self._genes) - 1)]
        if len(genes) and positions.min() < 0:
            unknown = int(np.argmin(positions))
            raise SourceError(
                f"{self._name}: cell {cells[unknown]} has a value for gene {genes[unknown]}, but var has no gene with "
                f"this {_JOINID}"
            )
        return rows, positions, values
