"""Rows of Parquet files whose genes and values are in two columns of lists.

Files are read in order, and each row group is decoded once per pass, in batches that take about 16 MiB. The lists of
Arrow are the arrays of a CSR matrix already. Only the genes become positions, with one look-up per value. The other
columns are copied to a temporary file first, by the row group, because obs is read one column at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from zloader.common.errors import SourceError
from zloader.common.locks import cached_property
from zloader.common.messages import warn_user
from zloader.common.options import MiB
from zloader.common.records import Rows
from zloader.conversion.sources.arrow import ArrowObs, is_dictionary, is_text, spilled
from zloader.conversion.sources.gene_lookup import GeneLookup
from zloader.conversion.sources.locations import BlockCache
from zloader.conversion.sources.nodes import reading
from zloader.conversion.sources.parquet_file import NEEDS, ListFile, opened
from zloader.conversion.sources.row_source import MOST_BYTES, csr_of

_MARKER = (1, -2)  # the gene and the value that begin each row of Tahoe-100M
_VALUE_BYTES = 64  # of a value while Arrow decodes it, measured


class ListRows:
    """The rows of files, as a BlockSource. `columns` are those of the genes, the values and the names of cells."""

    def __init__(
        self,
        files: Sequence[ListFile],
        columns: tuple[str, str, str | None],
        var: pd.DataFrame,
        genes: GeneLookup,
    ) -> None:
        self._files, self._lists, self.var = files, columns[:2], var
        self._genes = genes
        for file in files:
            file.require_columns_of(files[0])
        self.n_obs = sum(file.n_rows for file in files)
        self.n_values: int | None = sum(file.n_values for file in files)
        self.fingerprint: str | None = None
        names = [name for name in files[0].types if name not in self._lists]
        self.obs = ArrowObs(self._column, names, n_rows=self.n_obs, index=columns[2])
        self._said = False

    def _column(self, name: str) -> tuple[Any, bool]:
        return self._obs.read([name]).column(0), is_text(self._files[0].types[name])

    @cached_property
    def _obs(self) -> Any:
        """The columns of obs of all files, in a temporary file."""
        types = {name: found for name, found in self._files[0].types.items() if name not in self._lists}
        return spilled(types, self._obs_of_groups(list(types)))

    def _obs_of_groups(self, names: list[str]) -> Iterator[Any]:
        for file in self._files:
            cache = BlockCache(block_bytes=MiB // 8, max_blocks=64)  # the lists lie between the other columns
            with opened(file.place, cache) as source:
                for number in range(len(file.groups)):
                    with reading(f"{file.place.name}: row group {number}", needs=NEEDS):
                        table = source.read_row_group(number, columns=names).select(names)
                    yield table

    def close(self) -> None:
        """Removes the temporary file."""
        if "_obs" in vars(self):
            vars(self).pop("_obs").close(force=True)

    def blocks(self, first_row: int) -> Iterator[Any]:
        """See BlockSource."""
        for file in self._files:
            if first_row < file.n_rows:
                yield from self._blocks_of(file, first_row)
            first_row = max(0, first_row - file.n_rows)

    def _blocks_of(self, file: ListFile, skipped: int) -> Iterator[Any]:
        ends = np.cumsum(file.groups)
        group = int(np.searchsorted(ends, skipped, side="right"))
        row = int(ends[group - 1]) if group else 0
        rows = max(1, MOST_BYTES * file.n_rows // max(1, _VALUE_BYTES * file.n_values))
        batches = file.batches(self._lists, rows, group)
        while True:
            with reading(f"{file.place.name}: row {row} and those after it", needs=NEEDS):
                batch = next(batches, None)
            if batch is None:
                break
            left_out = min(max(0, skipped - row), len(batch))
            if left_out < len(batch):
                yield self._counts(batch.slice(left_out), file.place.name, row + left_out)
            row += len(batch)

    def _counts(self, batch: Any, file: str, row: int) -> Any:
        """The counts of some rows as CSR. Raises SourceError that names the row of the file."""
        columns = [batch.column(name) for name in self._lists]
        for name, column in zip(self._lists, columns, strict=True):
            if column.null_count:
                raise SourceError(f"{file}: row {row + _first_null(column)} has no {name}")
        indptr, others = (np.asarray(column.offsets, np.int64) - column.offsets[0].as_py() for column in columns)
        if not np.array_equal(indptr, others):
            at = int(np.argmax(np.diff(indptr) != np.diff(others)))
            each = [f"{np.diff(ends)[at]} {name}" for name, ends in zip(self._lists, (indptr, others), strict=True)]
            raise SourceError(f"{file}: row {row + at} has {each[0]}, but {each[1]}: there must be as many")
        flat = [column.flatten() for column in columns]
        for name, each_value in zip(self._lists, flat, strict=True):
            if each_value.null_count:
                at = _row_of(_first_null(each_value), indptr)
                raise SourceError(f"{file}: row {row + at} has a missing value in {name}")
        indptr, kept = self._without_markers(indptr, flat, file)
        positions, values = self._genes.positions(flat[0])[kept], flat[1].to_numpy()[kept]
        for wrong, said in (
            (positions < 0, "has gene {gene}, which is not in the gene metadata: are they of the same dataset?"),
            (values < 0, "has the value {value} for gene {gene}, but counts are not negative"),
        ):
            if wrong.any():
                at = int(np.argmax(wrong))
                gene = flat[0][int(np.arange(len(flat[0]))[kept][at])].as_py()
                why = said.format(gene=gene, value=values[at])
                raise SourceError(f"{file}: row {row + _row_of(at, indptr)} {why}")
        return csr_of(values, positions, indptr, len(self.var))

    def _without_markers(self, indptr: Rows, flat: Sequence[Any], file: str) -> tuple[Rows, Any]:
        """indptr without the markers that begin rows, and which values remain."""
        if is_dictionary(flat[0].type):  # names
            return indptr, slice(None)
        genes, values = (each.to_numpy() for each in flat)
        starts = indptr[:-1][np.diff(indptr) > 0]
        marked = starts[(genes[starts] == _MARKER[0]) & (values[starts] == _MARKER[1])]
        if not len(marked):
            return indptr, slice(None)
        if not self._said:
            self._said = True
            warn_user(f"{file}: the marker that begins a row (gene 1, value -2) is left out")
        kept = np.ones(len(genes), bool)
        kept[marked] = False
        return indptr - np.searchsorted(marked, indptr), kept


def _first_null(column: Any) -> int:
    return int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))


def _row_of(value: int, indptr: Rows) -> int:
    return int(np.searchsorted(indptr, value, side="right")) - 1
