"""SLAF: Lance tables of cells, of genes, and of values in the order of cells, which pylance reads in one pass.

The table of values has a row per value. That of layers has a column per layer, with nulls where a layer has no value,
and is read once per layer. Both are read in batches of about 16 MiB, of which the last cell waits for the
rest of its values. A pass that starts at a later cell finds it by a binary search, with some 30 reads of one row.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from zloader.common.errors import SourceError
from zloader.common.messages import listed
from zloader.common.records import Rows
from zloader.conversion.sources.anndata_input import Input
from zloader.conversion.sources.arrow import ArrowObs, digest_of, is_list
from zloader.conversion.sources.locations import source_locations
from zloader.conversion.sources.nodes import reading
from zloader.conversion.sources.row_source import MOST_BYTES, RowInput, csr_of
from zloader.conversion.sources.source_format import Place, SourceFormat, library, s3_access

_OWN = {"cell_id", "cell_integer_id", "cell_start_index", "gene_id", "gene_integer_id", "gene_start_index"}
_IDS = ("cell_integer_id", "gene_integer_id")
_VALUE_BYTES = 16
_NEEDS = "it needs a newer pylance"


@dataclass(frozen=True)
class Slaf(SourceFormat):
    """A SLAF directory."""

    endings = (".slaf",)
    marks = ("expression.lance", "config.json")

    url: Place

    def open(self, storage_options: Mapping[str, Any]) -> Input:
        lance = library("lance", source=os.fspath(self.url), extra="lance")
        (place,) = source_locations(self.url, storage_options)
        objects = place.objects()
        with reading(place.name, "cannot be opened as SLAF", needs=_NEEDS):
            config = json.loads(place.filesystem.cat_file(f"{place.path}/config.json"))
            tables = {name: config["tables"][name] for name in ("cells", "genes", "expression")}
            tables |= {"layers": config["tables"]["layers"]} if "layers" in config["tables"] else {}
            if any("/" in table or table.startswith(".") for table in tables.values()):
                raise SourceError(f"{place.name}: config.json names tables in other places: {listed(tables.values())}")
            uri = place.path if place.is_local else place.url.rstrip("/")
            options = _lance_options(storage_options)
            opened = {key: lance.dataset(f"{uri}/{table}", storage_options=options) for key, table in tables.items()}
            unfinished = "checkpoint" in config or config.get("metadata", {}).get("conversion_in_progress")
            named = config.get("layers", {}).get("available") if "layers" in opened else []
        if unfinished:
            raise SourceError(f"{place.name}: its conversion to SLAF did not finish, so cells are missing. Repeat it")
        source = _SlafRows(place.name, opened["cells"], opened["genes"], opened["expression"])
        source.fingerprint = digest_of(objects)
        names = [name for name in opened["layers"].schema.names if name not in _OWN] if named is None else named
        layers = {layer: source.matrix(opened["layers"], layer, f"layers/{layer}") for layer in names}
        return RowInput(source, place.name, place.label, objects=objects, layers=layers)


def _lance_options(storage_options: Mapping[str, Any]) -> dict[str, str]:
    """The options of Lance for these options of s3fs."""
    given = s3_access(storage_options)
    if given.get("endpoint", "").startswith("http://"):
        given["allow_http"] = "true"
    return {name if name == "allow_http" else f"aws_{name}": value for name, value in given.items()}


class _SlafRows:
    """The rows of a SLAF as a BlockSource."""

    def __init__(self, name: str, cells: Any, genes: Any, expression: Any) -> None:
        self._name, self._cells = name, cells
        with reading(name, needs=_NEEDS):
            self.n_obs = int(cells.count_rows())
            var = genes.to_table().to_pandas()
        for table, ids in ((cells, "cell_integer_id"), (genes, "gene_integer_id")):
            if ids in table.schema.names:
                with reading(f"{name}: {ids}", needs=_NEEDS):
                    found = table.to_table(columns=[ids]).column(ids).to_numpy()
                if not np.array_equal(found, np.arange(len(found))):
                    at = int(np.argmin(found == np.arange(len(found))))
                    raise SourceError(f"{name}: {ids} is {found[at]} in row {at}: the tables are not in order")
        for table, ids in ((cells, "cell_id"), (genes, "gene_id")):
            if ids not in table.schema.names:
                raise SourceError(f"{name}: no column {ids} names the rows. There are {listed(table.schema.names)}")
        self.var = var.set_index("gene_id").drop(columns=_OWN.intersection(var) - {"gene_id"})
        self._x = self.matrix(expression, "value", "the table of values", may_lack=False)
        self.n_values: int | None = self._x.n_stored
        self.fingerprint: str | None = None
        columns = [each.name for each in cells.schema if each.name not in _OWN and not is_list(each.type)]
        self.obs = ArrowObs(self._column, ["cell_id", *columns], n_rows=self.n_obs, index="cell_id")

    def _column(self, name: str) -> tuple[Any, bool]:
        with reading(f"{self._name}: cells, {name}", needs=_NEEDS):
            return self._cells.to_table(columns=[name]).column(name), False

    def matrix(self, table: Any, column: str, at: str, *, may_lack: bool = True) -> _SlafMatrix:
        """A column of a table of values. If it `may_lack` values, nulls stand for them."""
        at = f"{self._name}: {at}"
        with reading(at, needs=_NEEDS):
            return _SlafMatrix(table, column, at, shape=(self.n_obs, len(self.var)), may_lack=may_lack)

    def close(self) -> None:
        """Nothing is open."""

    def blocks(self, first_row: int) -> Iterator[Any]:
        """See BlockSource."""
        return self._x.blocks(first_row)


class _SlafMatrix:
    """A column of values as Blocks."""

    n_values: int | None = None

    def __init__(self, table: Any, column: str, at: str, *, shape: tuple[int, int], may_lack: bool) -> None:
        self._table, self._columns, self._at, self._may_lack = table, (*_IDS, column), at, may_lack
        self.n_obs, self._n_genes = shape
        self.n_stored = int(table.count_rows())
        self._kind = table.schema.field(column).type.to_pandas_dtype()

    def blocks(self, first_row: int) -> Iterator[Any]:
        """See Blocks."""
        row = first_row
        left: list[Any] = [np.empty(0, kind) for kind in (np.int64, np.int64, self._kind)]
        for batch in self._batches(self._start_of(first_row)):
            cells, genes, values = (
                np.concatenate([old.astype(new.dtype), new]) if len(old) else new
                for old, new in zip(left, batch, strict=True)
            )
            self._check(cells, row)
            ready = int(np.searchsorted(cells, cells[-1]))
            yield self._counts(cells[:ready], genes[:ready], values[:ready], row, int(cells[-1]))
            row, left = int(cells[-1]), [each[ready:] for each in (cells, genes, values)]
        if row < self.n_obs:
            yield self._counts(left[0], left[1], left[2], row, self.n_obs)

    def _batches(self, offset: int) -> Iterator[list[Any]]:
        rows = MOST_BYTES // _VALUE_BYTES
        if offset >= self.n_stored:
            return
        for batch in self._table.to_batches(
            columns=list(self._columns), offset=offset, batch_size=rows, batch_readahead=2, scan_in_order=True
        ):
            batch = batch.filter(batch.column(self._columns[2]).is_valid()) if self._may_lack else batch
            columns = [batch.column(name) for name in self._columns]
            if any(column.null_count for column in columns):
                raise SourceError(f"{self._at}: a value or its cell or gene is missing")
            if len(batch):
                yield [column.to_numpy() for column in columns]

    def _start_of(self, row: int) -> int:
        """The first value of a row, or of the first row after it that has values."""
        low, high = 0, self.n_stored if row else 0
        while low < high:
            middle = (low + high) // 2
            cell = self._table.take([middle], columns=[_IDS[0]]).column(0)[0].as_py()
            low, high = (middle + 1, high) if cell < row else (low, middle)
        return low

    def _check(self, cells: Rows, row: int) -> None:
        if cells[0] < row or (cells[1:] < cells[:-1]).any():
            raise SourceError(f"{self._at}: the values after cell {row} are not in the order of cells: write it again")
        if cells[-1] >= self.n_obs:
            raise SourceError(f"{self._at}: there is a value for cell {cells[-1]}, but there are {self.n_obs} cells")

    def _counts(self, cells: Any, genes: Any, values: Any, first: int, stop: int) -> Any:
        indptr = np.searchsorted(cells, np.arange(first, stop + 1))
        return csr_of(values, genes.astype(np.int64), indptr, self._n_genes)
