"""Reads a TileDB-SOMA experiment in a process of its own (common/child.py): tiledbsoma sometimes crashes.

Answers are Arrow tables, the arrays of a CSR matrix, or JSON. An experiment is read as it was at one time, so that a
process that takes the place of a crashed one reads the same.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import scipy.sparse
from numpy.typing import NDArray

from zloader.common.records import Rows

JOINID = "soma_joinid"
_MOST_INT32 = np.iinfo(np.int32).max
_COLUMNS = ("soma_dim_0", "soma_dim_1", "soma_data")


class SomaReader:
    """An experiment. A `path` leads to a part of it, such as `("ms", "RNA", "X", "raw")`."""

    def __init__(self, uri: str, config: Mapping[str, Any], time_ms: int) -> None:
        # tiledbsoma names a type of anndata, whose import would take another second and 60 MB.
        sys.modules.setdefault("anndata", SimpleNamespace(AnnData=None))  # type: ignore[arg-type]
        import tiledbsoma

        context = tiledbsoma.SOMATileDBContext(tiledb_config=dict(config))
        self._experiment = tiledbsoma.Experiment.open(uri, context=context, tiledb_timestamp=time_ms)

    def _at(self, path: tuple[str, ...]) -> Any:
        part: Any = self._experiment
        for name in path:
            part = part[name]
        return part

    def names(self, path: tuple[str, ...]) -> bytes:
        """The members of a collection or the columns of a frame, as JSON."""
        return json.dumps(list(map(str, self._at(path).keys()))).encode()

    def table(
        self,
        path: tuple[str, ...],
        columns: list[str] | None = None,
        where: str | None = None,
        joinids: Rows | None = None,
    ) -> bytes:
        """Columns of a frame by joinid, as a stream of Arrow. A filter or joinids choose rows."""
        wanted = None if columns is None else list(dict.fromkeys([JOINID, *columns]))
        chosen = () if joinids is None else (joinids,)
        table = self._at(path).read(chosen, column_names=wanted, value_filter=where).concat()
        found = table.column(JOINID).to_numpy()
        table = table if columns is None else table.select(columns)
        table = table if (np.diff(found) > 0).all() else table.take(np.argsort(found))
        out = pa.BufferOutputStream()
        with pa.ipc.new_stream(out, table.schema) as stream:
            stream.write_table(table)
        return bytes(out.getvalue())

    def array(self, path: tuple[str, ...]) -> bytes:
        """The number of values and the rows of a tile of a sparse array, and the cells of obs, as JSON."""
        array = self._at(path)
        tile = json.loads(array.schema_config_options().dims)["soma_dim_0"]["tile"]
        return json.dumps([int(array.nnz), int(tile), self._experiment.obs.count]).encode()

    def counts(self, path: tuple[str, ...], joinids: Rows) -> list[NDArray[Any]]:
        """The values of some cells, which ascend, as the arrays of CSR whose columns are the joinids of genes."""
        array, first, last = self._at(path), int(joinids[0]), int(joinids[-1])
        chosen = slice(first, last) if last - first < 2 * len(joinids) else joinids
        kinds = (np.int32, np.int32, array.schema.field(_COLUMNS[2]).type.to_pandas_dtype())
        parts = [[np.empty(0, kind) for kind in kinds]]
        for table in array.read((chosen,)).tables():
            cells, genes, values = (table.column(name).to_numpy() for name in _COLUMNS)
            rows = np.searchsorted(joinids, cells).astype(np.int32)
            kept = slice(None) if last - first < len(joinids) else joinids[rows] == cells
            narrow = genes if genes.max(initial=0) > _MOST_INT32 else genes.astype(np.int32)
            parts.append([rows[kept], narrow[kept], values[kept]])
        rows, genes, values = map(np.concatenate, zip(*parts, strict=True))
        shape = (len(joinids), int(genes.max(initial=0)) + 1)
        found = scipy.sparse.coo_matrix((values, (rows, genes)), shape).tocsr()
        return [found.indptr, found.indices, found.data]
