"""What the footer of a Parquet file tells: columns, row groups and the number of values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zloader.common.errors import SourceError
from zloader.common.options import MiB
from zloader.common.records import Rows
from zloader.conversion.sources.arrow import is_text
from zloader.conversion.sources.locations import BlockCache, SourceLocation
from zloader.conversion.sources.nodes import reading

NEEDS = "it needs a newer pyarrow"


def opened(place: SourceLocation, cache: BlockCache, dictionaries: Sequence[str] = ()) -> Any:
    """A Parquet file. A context manager. Of a row group, which may be large, it reads a MiB per column at a time.

    `dictionaries` are the paths of columns of text that are read as dictionaries.
    """
    import pyarrow.parquet as pq

    with reading(place.name, "cannot be opened as Parquet", needs=NEEDS):
        return pq.ParquetFile(place.file(cache), buffer_size=MiB, read_dictionary=list(dictionaries))


def read_whole(place: SourceLocation) -> Any:
    """All of a small file as a table. Raises SourceError."""
    with opened(place, BlockCache(max_blocks=2)) as file, reading(place.name, needs=NEEDS):
        return file.read()


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
