"""Columns of Arrow as columns of obs, read one at a time."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from zloader.common.errors import SourceError, StoreError
from zloader.common.messages import listed

_GENE_NAMES = ("ensembl_id", "feature_id", "gene_symbol", "gene_name", "feature_name")  # the first of them names genes


class ArrowObs:
    """obs whose columns `read` gives as chunked arrays of Arrow, and whether dictionaries stand for plain text in them.

    `index` is the column with the names of the cells, which is not among `columns` then. Without it they are numbered.
    """

    def __init__(
        self, read: Callable[[str], tuple[Any, bool]], columns: Sequence[str], *, n_rows: int, index: str | None = None
    ) -> None:
        self.columns = [name for name in columns if name != index]
        self._read, self._index, self._n_rows = read, index, n_rows

    @property
    def index(self) -> pd.Index:
        """The names of the cells, as text."""
        if self._index is None:
            return pd.RangeIndex(self._n_rows).astype(str)
        name = None if self._index.startswith("__") else self._index  # as pandas calls an index without a name
        column = self._read(self._index)[0]
        if column.null_count:
            row = int(np.argmax(column.is_null().to_numpy()))
            raise SourceError(f"column {self._index!r} has no name for cell {row}: take another one, or numbers")
        return pd.Index(column.to_pandas().astype(str).to_numpy(object), name=name)

    def __getitem__(self, name: str) -> pd.Series:
        return _series(*self._read(name), name)


def is_text(found: Any) -> bool:
    """Whether this is a type of Arrow for text."""
    import pyarrow as pa

    return bool(pa.types.is_string(found) or pa.types.is_large_string(found))


def is_dictionary(found: Any) -> bool:
    """Whether this is a type of Arrow for values in a dictionary."""
    import pyarrow as pa

    return bool(pa.types.is_dictionary(found))


def is_list(found: Any) -> bool:
    """Whether this is a type of Arrow for lists."""
    import pyarrow as pa

    return bool(pa.types.is_nested(found))


def _series(column: Any, as_text: bool, name: str) -> pd.Series:
    """A chunked array as a column of obs: text with repeated values as a categorical, as AnnData stores it.

    Numbers and truth values of which some are missing become nullable, so that none of them changes.
    """
    import pyarrow as pa

    if is_text(column.type):
        column, as_text = column.dictionary_encode(), True
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


def spilled(types: Mapping[str, Any], tables: Iterable[Any]) -> Any:
    """Copies tables with columns of these types to a temporary Parquet file, opened with text as dictionaries."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = tempfile.TemporaryFile(prefix="zloader-")  # noqa: SIM115 - the result holds it
    schema = pa.schema(list(types.items()))
    with pq.ParquetWriter(file, schema) as writer:
        for table in tables:
            try:
                writer.write_table(table.cast(schema))
            except OSError as error:
                raise StoreError(
                    f"cannot copy obs: {tempfile.gettempdir()} is too small ({error}): set TMPDIR to a directory on a "
                    "larger disk"
                ) from error
    return pq.ParquetFile(file, read_dictionary=[name for name, found in types.items() if is_text(found)])


def gene_names(frame: pd.DataFrame, at: str) -> list[str]:
    """The columns that name each gene of a table differently, the usual ones first. Raises SourceError if none does."""
    text = [name for name in frame if pd.api.types.infer_dtype(frame[name], skipna=False) == "string"]
    unique = [name for name in dict.fromkeys([*_GENE_NAMES, *text]) if name in text and frame[name].is_unique]
    if not unique:
        raise SourceError(f"{at} has no column of text that names each gene uniquely. It has {listed(frame)}")
    return unique


def named_genes(frame: pd.DataFrame, at: str) -> pd.DataFrame:
    """A table of genes as var: its index is the first of `gene_names`. Raises SourceError."""
    return frame.set_index(gene_names(frame, at)[0])


def digest_of(*parts: Any) -> str:
    """A text that changes with the parts, which are of plain types."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
