"""The footers and rows of Parquet files whose genes and values are in two columns of lists.

Files are read in order, and each row group is decoded once per pass, in batches that take about 16 MiB. The lists of
Arrow are the arrays of a CSR matrix already. Only the genes become positions, with one look-up per value. The other
columns are copied to a temporary file first, by the row group, because obs is read one column at a time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import scipy.sparse
from numpy.typing import NDArray

from zloader.common.errors import SourceError, StoreError
from zloader.common.locks import cached_property
from zloader.common.messages import listed, warn_user
from zloader.common.options import MiB
from zloader.common.records import Rows
from zloader.conversion.sources.locations import BlockCache, Objects, SourceLocation
from zloader.conversion.sources.nodes import reading
from zloader.conversion.sources.row_source import MOST_BYTES, RowInput

NEEDS = "it needs a newer pyarrow"
_MARKER = (1, -2)  # the gene and the value that begin each row of Tahoe-100M
_VALUE_BYTES = 64  # of a value while Arrow decodes it, measured

# The positions in var of the genes in an array of Arrow without nulls; -1 for an unknown gene.
GeneLookup: TypeAlias = Callable[[Any], NDArray[np.int32]]


def opened(place: SourceLocation, cache: BlockCache, dictionaries: Sequence[str] = ()) -> Any:
    """A Parquet file. A context manager. Of a row group, which may be large, it reads a MiB per column at a time.

    `dictionaries` are the paths of columns of text that are read as dictionaries.
    """
    import pyarrow.parquet as pq

    with reading(place.name, "cannot be opened as Parquet", needs=NEEDS):
        return pq.ParquetFile(place.file(cache), buffer_size=MiB, read_dictionary=list(dictionaries))


@dataclass(frozen=True, kw_only=True)
class ListFile:
    """The footer of a file: the `types` of its columns by name, the paths to their `leaves`, and the rows of its
    row groups.

    `n_values` is the most that a column of lists can have.
    """

    place: SourceLocation
    types: Mapping[str, Any]
    leaves: Sequence[str]
    groups: Rows
    n_values: int

    @classmethod
    def read(cls, place: SourceLocation) -> ListFile:
        """Reads the footer. Raises SourceError."""
        with opened(place, BlockCache(max_blocks=2)) as file, reading(place.name, needs=NEEDS):
            schema, footer = file.schema_arrow, file.metadata
            groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
            values = [max(group.column(i).num_values for i in range(group.num_columns)) for group in groups]
            rows = np.array([group.num_rows for group in groups], np.int64)
            types = dict(zip(schema.names, map(_common_type, schema.types), strict=True))
            leaves = [footer.schema.column(number).path for number in range(footer.num_columns)]
        return cls(place=place, types=types, leaves=leaves, groups=rows, n_values=sum(values))

    @property
    def n_rows(self) -> int:
        """The rows of the file."""
        return int(self.groups.sum())

    def list_kind(self, name: str) -> str:
        """The kind of numbers or text that the lists of a column hold, as numpy calls it; "" for everything else."""
        import pyarrow as pa

        found = self.types[name]
        if not pa.types.is_list(found) and not pa.types.is_large_list(found):
            return ""
        if is_text(found.value_type):
            return "U"
        numbers = pa.types.is_integer(found.value_type) or pa.types.is_floating(found.value_type)
        return str(np.dtype(found.value_type.to_pandas_dtype()).kind) if numbers else ""

    def batches(self, lists: Sequence[str], rows: int, group: int = 0) -> Iterator[Any]:
        """Columns of lists from a row group on, in batches. Text comes as dictionaries."""
        text = [
            leaf for name in lists if self.list_kind(name) == "U" for leaf in self.leaves if leaf.startswith(f"{name}.")
        ]
        groups = range(group, len(self.groups))
        with opened(self.place, BlockCache(), text) as source:
            # pyarrow cannot read dictionaries in lists beyond the end of a row group.
            for part in [[each] for each in groups] if text else [groups]:
                yield from source.iter_batches(rows, row_groups=part, columns=list(lists))

    def require_columns_of(self, other: ListFile) -> None:
        """Raises SourceError unless both files have the same columns."""
        for name in {**other.types, **self.types}:
            one, two = (file.types.get(name, "missing") for file in (self, other))
            if one != two:
                raise SourceError(
                    f"{self.place.name}: column {name!r} is {one}, but {two} in {other.place.name}: convert files with "
                    "the same columns together"
                )


def _common_type(found: Any) -> Any:
    """The type of a column in all files: their dictionaries, the categories, may differ in size.

    Lists are those of the values themselves.
    """
    import pyarrow as pa

    if (pa.types.is_list(found) or pa.types.is_large_list(found)) and pa.types.is_dictionary(found.value_type):
        return pa.list_(found.value_type.value_type)
    is_dictionary = pa.types.is_dictionary(found)
    return pa.dictionary(pa.int32(), found.value_type, found.ordered) if is_dictionary else found


def is_text(found: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(found) or pa.types.is_large_string(found))


class ListRows(RowInput):
    """The rows of files. `columns` are those of the genes, of the values and of the names of cells, if there are any.

    obs has all other columns. Names of cells are numbers without a column.
    """

    def __init__(
        self,
        files: Sequence[ListFile],
        columns: tuple[str, str, str | None],
        var: pd.DataFrame,
        positions: GeneLookup,
        *,
        objects: Objects,
    ) -> None:
        for file in files:
            file.require_columns_of(files[0])
        places = [file.place for file in files]
        label = places[0].label if len(places) == 1 else places[0].path.split("/")[-2]
        super().__init__(
            listed((place.name for place in places), 1),
            label,
            var,
            obs_columns=[name for name in files[0].types if name not in columns],
            objects=objects,
        )
        self._files, self._lists, self._index, self._positions = files, columns[:2], columns[2], positions
        self.n_rows = sum(file.n_rows for file in files)
        self.n_values = sum(file.n_values for file in files)
        self._said = False

    def obs_names(self) -> pd.Index:
        if self._index is None:
            return pd.RangeIndex(self.n_rows).astype(str)
        name = None if self._index.startswith("__") else self._index  # as pandas calls an index without a name
        column = self._obs.read([self._index]).column(0)
        if column.null_count:
            row = int(np.argmax(column.is_null().to_numpy()))
            raise SourceError(f"column {self._index!r} has no name for cell {row}: take another one, or numbers")
        return pd.Index(column.to_pandas().astype(str).to_numpy(object), name=name)

    def obs_column(self, name: str) -> pd.Series:
        return _series(self._obs.read([name]).column(0), name, as_text=is_text(self._files[0].types[name]))

    @cached_property
    def _obs(self) -> Any:
        """A temporary Parquet file with the columns of obs of all files, opened with text as dictionaries."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        types = {name: found for name, found in self._files[0].types.items() if name not in self._lists}
        schema, text = pa.schema(list(types.items())), [name for name, found in types.items() if is_text(found)]
        file = tempfile.TemporaryFile(prefix="zloader-")  # noqa: SIM115 - the result holds it
        with pq.ParquetWriter(file, schema) as writer:
            for table in self._obs_of_groups(list(types)):
                try:
                    writer.write_table(table.cast(schema))
                except OSError as error:
                    raise StoreError(
                        f"cannot copy obs: {tempfile.gettempdir()} is too small ({error}): set TMPDIR to a directory "
                        "on a larger disk"
                    ) from error
        return pq.ParquetFile(file, read_dictionary=text)

    def _obs_of_groups(self, names: list[str]) -> Iterator[Any]:
        for file in self._files:
            cache = BlockCache(block_bytes=MiB // 8, max_blocks=64)  # the lists lie between the other columns
            with opened(file.place, cache) as source:
                for number in range(len(file.groups)):
                    with reading(f"{file.place.name}: row group {number}", needs=NEEDS):
                        table = source.read_row_group(number, columns=names).select(names)
                    yield table

    def close(self) -> None:
        if "_obs" in vars(self):
            vars(self).pop("_obs").close(force=True)

    def blocks(self, first_row: int) -> Iterator[Any]:
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
        positions, values = self._positions(flat[0])[kept], flat[1].to_numpy()[kept]
        for wrong, said in (
            (positions < 0, "has gene {gene}, which is not in the gene metadata: are they of the same dataset?"),
            (values < 0, "has the value {value} for gene {gene}, but counts are not negative"),
        ):
            if wrong.any():
                at = int(np.argmax(wrong))
                gene = flat[0][int(np.arange(len(flat[0]))[kept][at])].as_py()
                why = said.format(gene=gene, value=values[at])
                raise SourceError(f"{file}: row {row + _row_of(at, indptr)} {why}")
        values = values.astype(np.float32) if values.dtype == np.float16 else values  # which scipy lacks
        return scipy.sparse.csr_matrix((values, positions, indptr), (len(indptr) - 1, self.n_genes))

    def _without_markers(self, indptr: Rows, flat: Sequence[Any], file: str) -> tuple[Rows, Any]:
        """indptr without the markers that begin rows, and which values remain."""
        if self._files[0].list_kind(self._lists[0]) == "U":
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


def _series(column: Any, name: str, *, as_text: bool) -> pd.Series:
    """A chunked array as a column of obs: text with repeated values as a categorical, as AnnData stores it.

    Numbers and truth values of which some are missing become nullable, so that none of them changes.
    """
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        found = column.unify_dictionaries().to_pandas().rename(name)
        if not as_text:
            return found
        in_order = sorted(found.cat.categories)
        repeats = len(in_order) < len(found)
        return found.cat.reorder_categories(in_order) if repeats else pd.Series(found.astype(object), name=name)
    nullable = {
        pa.bool_(): pd.BooleanDtype(),
        **{getattr(pa, f"{sign}int{bits}")(): getattr(pd, f"{sign.upper()}Int{bits}Dtype")()
           for sign in ("", "u") for bits in (8, 16, 32, 64)},
    }  # fmt: skip
    return column.to_pandas(types_mapper=nullable.get if column.null_count else None).rename(name)


def _first_null(column: Any) -> int:
    return int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))


def _row_of(value: int, indptr: Rows) -> int:
    return int(np.searchsorted(indptr, value, side="right")) - 1
