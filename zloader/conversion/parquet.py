"""`zl.Parquet`: a row per cell, with its genes and their values in two columns of lists, as on Hugging Face.

pyarrow reads the footers of all files first, in threads, then row group after row group, in batches of about 16 MiB.
The lists of Arrow are the arrays of a CSR matrix already; only the genes become positions. The other columns are copied
to a temporary file first, because obs is read one column at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeAlias

import numpy as np
import pandas as pd
import scipy.sparse
from fsspec.spec import AbstractBufferedFile
from numpy.typing import NDArray

from zloader.access.location import Location, location_of
from zloader.access.stored_objects import StoredObject
from zloader.common.deferred import Deferred
from zloader.common.errors import OptionError, SourceError, StoreError
from zloader.common.locks import cached_property
from zloader.common.messages import listed, warn_user
from zloader.common.options import MiB
from zloader.common.records import Rows
from zloader.conversion.nodes import reading, require_text
from zloader.conversion.rows import MOST_BYTES

pa, pc, pq = Deferred("pyarrow"), Deferred("pyarrow.compute"), Deferred("pyarrow.parquet")

_LISTS = (("genes", "expressions"), ("gene_token_id", "gene_expression"))  # Tahoe-100M, X-Atlas/Orion
_IDS = ("token_id", "gene_token_id", "gene_id", "id")  # columns of gene metadata
_GENE_NAMES = ("ensembl_id", "feature_id", "gene_symbol", "gene_name", "feature_name")  # the first of them names genes
_PANDAS_INDEX = "__index_level_0__"
_FOOTERS = 8  # read at a time
_BLOCKS = 8  # of a remote file in memory: two columns of lists are read at a time
_MOST_ID = 1 << 27  # the look-up table takes 4 bytes per id
_MARKER = (1, -2)  # the gene and the value that begin each row of Tahoe-100M
_VALUE_BYTES = 64  # of a value while Arrow decodes it, measured
_NEEDS = "it needs a newer pyarrow"

Place: TypeAlias = str | os.PathLike[str]
# The positions in var of the genes in an array of Arrow without nulls; -1 for an unknown gene.
GeneLookup: TypeAlias = Callable[[Any], NDArray[np.integer]]


@dataclass(frozen=True)
class Parquet:
    """Cells in Parquet files, as a source of `zl.convert` and `zl.verify`: a row per cell, with its genes in lists.

    >>> import pyarrow as pa, pyarrow.parquet as pq
    >>> import zloader as zl
    >>> pq.write_table(pa.table({"genes": [[3, 4], [4]], "expressions": [[1.0, 2.0], [5.0]]}), "cells.parquet")
    >>> pq.write_table(pa.table({"token_id": [3, 4], "gene_symbol": ["A", "B"]}), "genes.parquet")
    >>> zl.convert(zl.Parquet("cells.parquet", gene_metadata="genes.parquet"), "cells_of_lists.zarr").values
    3

    - `url`: a file, a directory of files, a glob, or a list of them. URLs of any fsspec scheme, also `hf://datasets/...`.
    - `gene_metadata`: a Parquet file with a row for each gene. It becomes var. Its names of genes are the first of
      `ensembl_id`, `gene_symbol`, `gene_name` or another column of text that has no repeated values.
    - `lists`: the two columns of lists: the ids or names of the genes of a cell, and their values. By default `genes`
      and `expressions`, or `gene_token_id` and `gene_expression`. Other columns become obs.
    - `gene_id`: the column of `gene_metadata` with what the lists hold. For ids by default `token_id`, `gene_token_id`,
      `gene_id` or `id`, and for names the column that names the genes of var.
    - `obs_names`: the column with the names of cells. By default they are numbered.

    The marker (gene 1, value -2) that begins each row of Tahoe-100M is left out, with a warning.
    """

    url: Place | Sequence[Place]
    gene_metadata: Place | None = field(default=None, kw_only=True)
    lists: tuple[str, str] | None = field(default=None, kw_only=True)
    gene_id: str | None = field(default=None, kw_only=True)
    obs_names: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.lists is not None and (
            isinstance(self.lists, str) or len(self.lists) != 2 or len(set(self.lists)) != 2
        ):
            raise OptionError(f"lists must be two names of columns, such as {_LISTS[0]}, not {self.lists!r}")
        if not isinstance(self.url, (str, os.PathLike)) and not self.url:
            raise OptionError("the list of Parquet files is empty: pass at least one")

    def open(self, storage_options: Mapping[str, Any]) -> ListRows:
        """Opens the files with these options. Reads only footers and the genes. Raises SourceError."""
        try:
            importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise SourceError(f'{self.url} is read by pyarrow: pip install "zloader[parquet]" ({error})') from error

        def of(urls: Iterable[Place]) -> list[tuple[Location, StoredObject]]:
            return [
                file for url in urls for place in location_of(url, storage_options).matches() for file in _files(place)
            ]

        found = of([self.url] if isinstance(self.url, (str, os.PathLike)) else self.url)
        genes = of([] if self.gene_metadata is None else [self.gene_metadata])
        with ThreadPoolExecutor(_FOOTERS, thread_name_prefix="zloader-footers") as threads:
            files = list(threads.map(ListFile.read, found))
        columns = (*_list_columns(files[0], self.lists), _index_column(files[0], self.obs_names))
        if not genes:
            raise SourceError(
                f"{listed((place.url for place, _ in found), 1)} has only the ids of genes: name the Parquet file with "
                "their names with zl.Parquet(..., gene_metadata=...) (--gene-metadata FILE)"
            )
        source = ListRows(files, columns, *_gene_axis(genes, _list_kind(files[0].types[columns[0]]), self.gene_id))
        objects = [(place.url.rpartition("/")[2], each.size, each.tag, each.stamp) for place, each in found + genes[:1]]
        source.bytes_in = sum(size for _, size, *_ in objects)
        source.fingerprint = hashlib.sha256(repr((objects, columns, self.gene_id)).encode()).hexdigest()[:32]
        return source


def _files(place: Location) -> list[tuple[Location, StoredObject]]:
    """A file, or the Parquet files of a directory in the order of their names."""
    objects = place.listing()
    if objects.keys() == {""}:
        return [(place, objects[""])]
    names = sorted(key for key in objects if key.endswith(".parquet") and "/" not in key)
    if not names:
        raise SourceError(f"{place.url} has no .parquet file: name the directory that has them, or a glob")
    return [(replace(place, url=f"{place.url.rstrip('/')}/{name}"), objects[name]) for name in names]


class _RemoteFile(AbstractBufferedFile):  # type: ignore[misc]
    """A remote file that pyarrow reads, in blocks that stay in memory for a while. Raises StoreError."""

    def __init__(self, place: Location, size: int, *, blocks: int) -> None:
        """Without `blocks`, it reads exactly what it is asked for."""
        kept = (
            {"cache_type": "background", "cache_options": {"maxblocks": blocks}} if blocks else {"cache_type": "none"}
        )
        super().__init__(place.filesystem(), place.path, block_size=4 * MiB, size=size, **kept)
        self._place, self._objects = place, place.kind

    def _fetch_range(self, start: int, end: int) -> bytes:
        with self._place.translated("read"):
            return self._objects.read("", start, end)


@contextlib.contextmanager
def _opened(place: Location, size: int, *, blocks: int = 0, **options: Any) -> Iterator[Any]:
    """A Parquet file. Raises SourceError for what pyarrow raises, also while it is open."""
    with (
        reading(place.url, "cannot be read as Parquet", needs=_NEEDS),
        pq.ParquetFile(
            place.path if place.scheme == "file" else _RemoteFile(place, size, blocks=blocks), **options
        ) as file,
    ):
        yield file


@dataclass(frozen=True, kw_only=True)
class ListFile:
    """The footer of a file: the `types` of its columns by name, and the rows of its row `groups`.

    `n_values` is the most that a column of lists can have.
    """

    place: Location
    n_bytes: int
    types: Mapping[str, Any]
    groups: Sequence[int]
    n_values: int

    @classmethod
    def read(cls, found: tuple[Location, StoredObject]) -> ListFile:
        """Reads the footer. Raises SourceError."""
        place, stored = found
        with _opened(place, stored.size) as file:
            schema, groups = file.schema_arrow, [file.metadata.row_group(i) for i in range(file.num_row_groups)]
            values = [max(group.column(i).num_values for i in range(group.num_columns)) for group in groups]
            return cls(
                place=place,
                n_bytes=stored.size,
                types=dict(zip(schema.names, map(_common_type, schema.types), strict=True)),
                groups=[group.num_rows for group in groups],
                n_values=sum(values),
            )


def _common_type(found: Any) -> Any:
    """The type of a column in all files, whose dictionaries may differ."""
    is_dictionary = pa.types.is_dictionary(found)
    return pa.dictionary(pa.int32(), found.value_type, found.ordered) if is_dictionary else found


def _is_text(found: Any) -> bool:
    return bool(pa.types.is_string(found) or pa.types.is_large_string(found))


def _list_kind(found: Any) -> str:
    """The kind of numbers or text that a column of lists holds, as numpy calls it; "" for everything else."""
    if not pa.types.is_list(found) and not pa.types.is_large_list(found):
        return ""
    if _is_text(found.value_type):
        return "U"
    numbers = pa.types.is_integer(found.value_type) or pa.types.is_floating(found.value_type)
    return str(np.dtype(found.value_type.to_pandas_dtype()).kind) if numbers else ""


def _list_columns(file: ListFile, given: tuple[str, str] | None) -> tuple[str, str]:
    """The names of the two columns of lists. Raises SourceError if the file lacks them, or if they are no lists."""
    found = given or next((pair for pair in _LISTS if set(pair) <= set(file.types)), _LISTS[0])
    if not set(found) <= set(file.types):
        raise SourceError(
            f"{file.place.url} has no columns {listed(found)}: name the two columns of lists, of genes and of their "
            f"values, with zl.Parquet(..., lists=(GENES, VALUES)) (--lists GENES,VALUES). It has {listed(file.types)}"
        )
    for name, kinds in zip(found, ("iuU", "iuf"), strict=True):
        if _list_kind(file.types[name]) not in [*kinds]:
            what = "integers or text, the ids or names of genes" if "U" in kinds else "numbers"
            raise SourceError(f"{file.place.url}: column {name!r} is {file.types[name]}, but must be lists of {what}")
    return found


def _index_column(file: ListFile, given: str | None) -> str | None:
    if given is not None and (given not in file.types or _list_kind(file.types[given])):
        raise SourceError(f"{file.place.url} has no column {given!r} with names of cells: it has {listed(file.types)}")
    return given or (_PANDAS_INDEX if _PANDAS_INDEX in file.types else None)


def _gene_axis(
    genes: Sequence[tuple[Location, StoredObject]], kind: str, gene_id: str | None
) -> tuple[pd.DataFrame, GeneLookup]:
    """var, and what finds the genes of lists of a kind in it. Raises SourceError."""
    (place, stored), *_ = genes
    with _opened(place, stored.size) as file:
        frame = file.read().to_pandas()
    text = [name for name in frame if pd.api.types.infer_dtype(frame[name], skipna=False) == "string"]
    named = [name for name in dict.fromkeys([*_GENE_NAMES, *text]) if name in text and frame[name].is_unique]
    if not named:
        raise SourceError(f"{place.url} has no column of text that names each gene uniquely. It has {listed(frame)}")
    fit = text if kind == "U" else [name for name in frame if frame[name].dtype.kind in "iu"]
    column = gene_id or next((name for name in (named if kind == "U" else _IDS) if name in fit), _IDS[0])
    if column not in fit:
        raise SourceError(
            f"{place.url} has no column {column!r} of {'text' if kind == 'U' else 'integers'}, as in the lists of "
            f"genes: name it with zl.Parquet(..., gene_id=...) (--gene-id NAME). It has {listed(frame)}"
        )
    if (repeated := frame[column].duplicated()).any():
        row = int(np.argmax(repeated))
        raise SourceError(f"{place.url}: {column} {frame[column][row]} in row {row} is given to an earlier gene, too")
    return frame.set_index(named[0]), _lookup(frame[column].to_numpy())


def _lookup(known: NDArray[Any]) -> GeneLookup:
    """Finds positions by value; small whole numbers, which all datasets have, in a table, in a tenth of the time."""
    if known.dtype.kind in "iu" and len(known) and known.min() >= 0 and known.max() < _MOST_ID:
        table = np.full(int(known.max()) + 3, -1, np.int32)  # the first and the last are for unknown ids
        table[known.astype(np.int64) + 1] = np.arange(len(known), dtype=np.int32)
        return lambda genes: table.take(genes.to_numpy().astype(np.int64, copy=False) + 1, mode="clip")
    values = pa.array(known, pa.large_string()) if known.dtype.kind == "O" else pa.array(known)
    return lambda genes: (
        pc.index_in(genes.cast(values.type), value_set=values).fill_null(-1).to_numpy(zero_copy_only=False)
    )


class ListRows:
    """The rows of files. `columns` are those of genes, values and names of cells (None: numbers). The rest is obs.

    A context manager: on exit it frees the temporary file of obs.
    """

    bytes_in = 0
    fingerprint = ""

    def __init__(
        self,
        files: Sequence[ListFile],
        columns: tuple[str, str, str | None],
        var: pd.DataFrame,
        positions: GeneLookup,
    ) -> None:
        places, first = [file.place for file in files], files[0].types
        for file in files:
            for name in {**first, **file.types}:
                if (one := file.types.get(name, "missing")) != (two := first.get(name, "missing")):
                    raise SourceError(
                        f"{file.place.url}: column {name!r} is {one}, but {two} in {places[0].url}: convert files "
                        "with the same columns together"
                    )
        *above, last = places[0].url.split("/")
        self.name = listed((place.url for place in places), 1)
        self.label = last.removesuffix(".parquet") if len(places) == 1 else above[-1]
        self.var, self.n_genes = var, len(var)
        self.obs_columns = [name for name in first if name not in columns]
        require_text(f"obs of {self.name}", self.obs_columns)
        self._files, self._lists, self._index, self._positions = files, columns[:2], columns[2], positions
        self._types = {name: found for name, found in first.items() if name not in self._lists}
        self.n_rows = sum(sum(file.groups) for file in files)
        self.n_values = sum(file.n_values for file in files)
        values = np.dtype(first[columns[1]].value_type.to_pandas_dtype())
        self.dtype = np.dtype(np.float32) if values == np.float16 else values  # which scipy lacks
        self._said = False

    def obs_names(self) -> pd.Index:
        if self._index is None:
            return pd.RangeIndex(self.n_rows).astype(str)
        column = self._obs.read([self._index]).column(0)
        if column.null_count:
            row = int(np.argmax(column.is_null().to_numpy()))
            raise SourceError(f"column {self._index!r} has no name for cell {row}: take another one, or numbers")
        names = column.to_pandas().astype(str).to_numpy(object)
        return pd.Index(names, name=None if self._index == _PANDAS_INDEX else self._index)

    def obs_column(self, name: str) -> pd.Series:
        return _series(self._obs.read([name]).column(0), name, as_text=_is_text(self._types[name]))

    @cached_property
    def _obs(self) -> Any:
        """A temporary Parquet file with the columns of obs of all files, opened with text as dictionaries."""
        schema, names = pa.schema(list(self._types.items())), list(self._types)
        copy = tempfile.TemporaryFile(prefix="zloader-")  # noqa: SIM115 - the result holds it
        with pq.ParquetWriter(copy, schema) as writer:
            for file in self._files:
                with _opened(file.place, file.n_bytes, pre_buffer=True) as source:
                    for number in range(len(file.groups)):
                        table = source.read_row_group(number, columns=names).select(names)
                        try:
                            writer.write_table(table.cast(schema))
                        except OSError as error:
                            raise StoreError(
                                f"cannot copy obs: {tempfile.gettempdir()} is too small ({error}): set TMPDIR to a "
                                "directory on a larger disk"
                            ) from error
        return pq.ParquetFile(copy, read_dictionary=[name for name, found in self._types.items() if _is_text(found)])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if "_obs" in vars(self):
            vars(self).pop("_obs").close(force=True)

    def blocks(self, first_row: int) -> Iterator[Any]:
        """The counts from a row on, as CSR matrices of consecutive rows."""
        for file in self._files:
            if first_row < sum(file.groups):
                yield from self._blocks_of(file, first_row)
            first_row = max(0, first_row - sum(file.groups))

    def _blocks_of(self, file: ListFile, skipped: int) -> Iterator[Any]:
        ends = np.cumsum(file.groups)
        group = int(np.searchsorted(ends, skipped, side="right"))
        row = int(ends[group - 1]) if group else 0
        rows = max(1, MOST_BYTES * int(ends[-1]) // max(1, _VALUE_BYTES * file.n_values))
        with _opened(file.place, file.n_bytes, blocks=_BLOCKS, buffer_size=MiB) as source:
            groups = range(group, len(file.groups))
            for batch in source.iter_batches(rows, row_groups=groups, columns=list(self._lists)):
                left_out = min(max(0, skipped - row), len(batch))
                if left_out < len(batch):
                    yield self._counts(batch.slice(left_out), file.place.url, row + left_out)
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
        values, positions = values.astype(self.dtype, copy=False), positions.astype(np.int32, copy=False)
        return scipy.sparse.csr_matrix((values, positions, indptr), (len(indptr) - 1, self.n_genes))

    def _without_markers(self, indptr: Rows, flat: Sequence[Any], file: str) -> tuple[Rows, Any]:
        """indptr without the markers that begin rows, and which values remain."""
        if not pa.types.is_integer(flat[0].type):
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
