"""`zl.Parquet`: a row per cell, with its genes and their values in two columns of lists, as on Hugging Face.

The footers of all files are read at once, and the file with the names of genes. Files are read in order, and each row
group is decoded once per pass, in batches that take about 16 MiB. The lists of Arrow are the arrays of a CSR matrix
already. Only the genes become positions, with one look-up per value. The other columns are copied to a temporary file
first, by the row group, because obs is read one column at a time.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeAlias

import numpy as np
import pandas as pd
import scipy.sparse
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
from zloader.conversion.remote_file import BlockCache, RemoteFile
from zloader.conversion.rows import MOST_BYTES

pa, pc, pq = Deferred("pyarrow"), Deferred("pyarrow.compute"), Deferred("pyarrow.parquet")

_LISTS = (("genes", "expressions"), ("gene_token_id", "gene_expression"))  # Tahoe-100M, X-Atlas/Orion
_IDS = ("token_id", "gene_token_id", "gene_id", "id")  # columns of gene metadata
_GENE_NAMES = ("ensembl_id", "feature_id", "gene_symbol", "gene_name", "feature_name")  # the first of them names genes
_PANDAS_INDEX = "__index_level_0__"
_FOOTERS = 8  # read at a time
_BATCH = 1000  # rows, of which the names of genes are collected
_MOST_ID = 1 << 27  # the look-up table takes 4 bytes per id
_MOST_NAMES = 1 << 22  # of genes; a column with more is another one
_MARKER = (1, -2)  # the gene and the value that begin each row of Tahoe-100M
_VALUE_BYTES = 64  # of a value while Arrow decodes it, measured
_NEEDS = "it needs a newer pyarrow"

Place: TypeAlias = str | os.PathLike[str]
# The positions in var of the genes in an array of Arrow without nulls; -1 for an unknown gene.
GeneLookup: TypeAlias = Callable[[Any], NDArray[np.int32]]


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
      `ensembl_id`, `gene_symbol`, `gene_name` or another column of text that has no repeated values. Where the lists
      hold names instead of ids, it can be left out, and their names in alphabetical order become var.
    - `lists`: the two columns of lists: the ids or names of the genes of a cell, and their values. By default `genes`
      and `expressions`, or `gene_token_id` and `gene_expression`. Other columns become obs.
    - `gene_id`: the column of `gene_metadata` with what the lists hold. For ids by default `token_id`, `gene_token_id`,
      `gene_id` or `id`, and for names the first that has those of the first cells.
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
        given = [self.url] if isinstance(self.url, (str, os.PathLike)) else list(self.url)
        found = [
            each for url in given for place in location_of(url, storage_options).matches() for each in _files(place)
        ]
        places = [place for place, _ in found]
        genes = [] if self.gene_metadata is None else location_of(self.gene_metadata, storage_options).matches()
        with ThreadPoolExecutor(_FOOTERS, thread_name_prefix="zloader-footers") as threads:
            files = list(threads.map(ListFile.read, places, [stored.size for _, stored in found]))
        columns = (*_list_columns(files[0], self.lists), _index_column(files[0], self.obs_names))
        found += [_files(place)[0] for place in genes]
        objects = [(place.url.rpartition("/")[2], each.size, each.tag, each.stamp) for place, each in found]
        source = ListRows(files, columns, *_gene_axis(files, columns[0], genes, self.gene_id))
        source.bytes_in = sum(stored.size for _, stored in found)
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


def _opened(place: Location, cache: BlockCache, size: int, dictionaries: Sequence[str] = ()) -> Any:
    """A Parquet file. A context manager. Of a row group, which may be large, it reads a MiB per column at a time.

    `dictionaries` are the paths of columns of text that are read as dictionaries.
    """
    with reading(place.url, "cannot be opened as Parquet", needs=_NEEDS):
        file = place.path if place.scheme == "file" else RemoteFile(place, size, cache)
        return pq.ParquetFile(file, buffer_size=MiB, read_dictionary=list(dictionaries))


@dataclass(frozen=True, kw_only=True)
class ListFile:
    """The footer of a file: the `types` of its columns by name, the paths to their `leaves`, the rows of row `groups`.

    `n_values` is the most that a column of lists can have.
    """

    place: Location
    n_bytes: int
    types: Mapping[str, Any]
    leaves: Sequence[str]
    groups: Rows
    n_rows: int
    n_values: int

    @classmethod
    def read(cls, place: Location, n_bytes: int) -> ListFile:
        """Reads the footer. Raises SourceError."""
        with _opened(place, BlockCache(max_blocks=2), n_bytes) as file, reading(place.url, needs=_NEEDS):
            schema, footer = file.schema_arrow, file.metadata
            groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
            values = [max(group.column(i).num_values for i in range(group.num_columns)) for group in groups]
            rows = np.array([group.num_rows for group in groups], np.int64)
            types = dict(zip(schema.names, map(_common_type, schema.types), strict=True))
            leaves = [footer.schema.column(number).path for number in range(footer.num_columns)]
        n_rows = int(rows.sum())
        sizes = {"n_bytes": n_bytes, "n_rows": n_rows, "n_values": sum(values)}
        return cls(place=place, types=types, leaves=leaves, groups=rows, **sizes)

    def list_kind(self, name: str) -> str:
        """The kind of numbers or text that the lists of a column hold, as numpy calls it; "" for everything else."""
        found = self.types[name]
        if not pa.types.is_list(found) and not pa.types.is_large_list(found):
            return ""
        if _is_text(found.value_type):
            return "U"
        numbers = pa.types.is_integer(found.value_type) or pa.types.is_floating(found.value_type)
        return str(np.dtype(found.value_type.to_pandas_dtype()).kind) if numbers else ""

    def batches(self, lists: Sequence[str], rows: int, group: int = 0) -> Iterator[Any]:
        """Columns of lists from a row group on, in batches. Text comes as dictionaries."""
        text = [
            leaf for name in lists if self.list_kind(name) == "U" for leaf in self.leaves if leaf.startswith(f"{name}.")
        ]
        groups = range(group, len(self.groups))
        with _opened(self.place, BlockCache(), self.n_bytes, text) as source:
            # pyarrow cannot read dictionaries in lists beyond the end of a row group.
            for part in [[each] for each in groups] if text else [groups]:
                yield from source.iter_batches(rows, row_groups=part, columns=list(lists))


def _common_type(found: Any) -> Any:
    """The type of a column in all files, whose dictionaries may differ. Lists are those of the values themselves."""
    if (pa.types.is_list(found) or pa.types.is_large_list(found)) and pa.types.is_dictionary(found.value_type):
        return pa.list_(found.value_type.value_type)
    is_dictionary = pa.types.is_dictionary(found)
    return pa.dictionary(pa.int32(), found.value_type, found.ordered) if is_dictionary else found


def _is_text(found: Any) -> bool:
    return bool(pa.types.is_string(found) or pa.types.is_large_string(found))


def _list_columns(file: ListFile, given: tuple[str, str] | None) -> tuple[str, str]:
    """The names of the two columns of lists. Raises SourceError if the file lacks them, or if they are no lists."""
    found = next((pair for pair in _LISTS if set(pair) <= set(file.types)), None) if given is None else given
    if found is None or not set(found) <= set(file.types):
        wanted = "genes and expressions" if given is None else listed(given)
        raise SourceError(
            f"{file.place.url} has no columns {wanted}: name the two columns of lists, of genes and of their values, "
            f"with zl.Parquet(..., lists=(GENES, VALUES)) (--lists GENES,VALUES). It has {listed(file.types)}"
        )
    for name, kinds in zip(found, ("iuU", "iuf"), strict=True):
        if file.list_kind(name) not in [*kinds]:
            what = "integers or text, the ids or names of genes" if "U" in kinds else "numbers"
            raise SourceError(f"{file.place.url}: column {name!r} is {file.types[name]}, but must be lists of {what}")
    return found


def _index_column(file: ListFile, given: str | None) -> str | None:
    if given is not None and (given not in file.types or file.list_kind(given)):
        raise SourceError(f"{file.place.url} has no column {given!r} with names of cells: it has {listed(file.types)}")
    return given or (_PANDAS_INDEX if _PANDAS_INDEX in file.types else None)


def _gene_axis(
    files: Sequence[ListFile], lists: str, genes: Sequence[Location], gene_id: str | None
) -> tuple[pd.DataFrame, GeneLookup]:
    """var, and what finds the genes of a column of lists in it. Raises SourceError."""
    are_names, name = files[0].list_kind(lists) == "U", listed((file.place.url for file in files), 1)
    if not genes and not are_names:
        raise SourceError(
            f"{name} has only the ids of genes: name the Parquet file with their names with "
            "zl.Parquet(..., gene_metadata=...) (--gene-metadata FILE)"
        )
    if not genes:
        found = _names_in(_batches(files, lists), f"{name}: column {lists!r}")
        return pd.DataFrame(index=pd.Index(found, dtype=object)), _by_name(found, name)
    (place,) = genes
    size = _files(place)[0][1].size
    with _opened(place, BlockCache(max_blocks=2), size) as file, reading(place.url, needs=_NEEDS):
        frame = file.read().to_pandas()
    column = _text_column(frame, files, lists, place, gene_id) if are_names else _id_column(frame, place, gene_id)
    at = f"{place.url}: {column}"
    lookup = _by_name(frame[column].tolist(), at) if are_names else _by_id(frame[column].to_numpy(), at)
    return frame.set_index(_gene_names(frame, place.url)[0]), lookup


def _gene_names(frame: pd.DataFrame, at: str) -> list[str]:
    """The columns that name each gene of a table differently, the usual ones first. Raises SourceError if none does."""
    text = [name for name in frame if pd.api.types.infer_dtype(frame[name], skipna=False) == "string"]
    unique = [name for name in dict.fromkeys([*_GENE_NAMES, *text]) if name in text and frame[name].is_unique]
    if not unique:
        raise SourceError(f"{at} has no column of text that names each gene uniquely. It has {listed(frame)}")
    return unique


def _batches(files: Sequence[ListFile], lists: str) -> Iterator[Any]:
    for file in files:
        with reading(f"{file.place.url}: column {lists!r}", needs=_NEEDS):
            yield from file.batches([lists], _BATCH)


def _id_column(frame: pd.DataFrame, place: Location, gene_id: str | None) -> str:
    integers = [name for name in frame if frame[name].dtype.kind in "iu"]
    column = next((name for name in _IDS if name in integers), None) if gene_id is None else gene_id
    if column is None or column not in integers:
        raise SourceError(
            f"{place.url} has no column {column or 'token_id'!r} of integers, the ids of genes: name it with "
            f"zl.Parquet(..., gene_id=...) (--gene-id NAME). It has {listed(frame)}"
        )
    return column


def _text_column(
    frame: pd.DataFrame, files: Sequence[ListFile], lists: str, place: Location, gene_id: str | None
) -> str:
    """The column with the names that are in lists: the first that has those of the first cells."""
    if gene_id is None:
        unique = _gene_names(frame, place.url)
        first = _names_in(itertools.islice(_batches(files, lists), 1), "")
        return next((name for name in unique if set(first) <= set(frame[name])), unique[0])
    if gene_id not in frame or pd.api.types.infer_dtype(frame[gene_id], skipna=False) != "string":
        raise SourceError(
            f"{place.url} has no column {gene_id!r} of text, the names of genes in {lists!r}: name another one with "
            f"zl.Parquet(..., gene_id=...) (--gene-id NAME). It has {listed(frame)}"
        )
    return gene_id


def _names_in(batches: Iterable[Any], at: str) -> list[str]:
    """The names in a column of lists, sorted. Raises SourceError if there are too many for genes."""
    names: set[str] = set()
    for batch in batches:
        names.update(pc.unique(batch.column(0).flatten()).drop_null().to_pylist())
        if len(names) > _MOST_NAMES:
            raise SourceError(f"{at} has more than {_MOST_NAMES} names: are they those of genes?")
    return sorted(names)


def _by_id(ids: NDArray[Any], at: str) -> GeneLookup:
    """Finds genes by whole numbers, in a table by id. Raises SourceError for an id that is repeated or too large."""
    wrong = np.flatnonzero((ids < 0) | (ids > _MOST_ID))
    if len(wrong):
        raise SourceError(f"{at} {ids[wrong[0]]} in row {wrong[0]} must be from 0 to {_MOST_ID}")
    _require_unique(ids.tolist(), at)
    table: NDArray[np.int32] = np.full(int(ids.max(initial=-1)) + 2, -1, np.int32)  # the last is for unknown ids
    table[ids] = np.arange(len(ids), dtype=np.int32)

    def positions(genes: Any) -> NDArray[np.int32]:
        found = genes.to_numpy()
        if len(found) and (found.min() < 0 or found.max() >= len(table)):
            found = np.where((found >= 0) & (found < len(table)), found, -1)
        places: NDArray[np.int32] = table[found]
        return places

    return positions


def _by_name(names: Sequence[str], at: str) -> GeneLookup:
    """Finds genes by text. Raises SourceError for a name that is repeated."""
    _require_unique(names, at)
    known = pa.array(names, pa.large_string())

    def positions(genes: Any) -> NDArray[np.int32]:
        found = pc.index_in(genes.dictionary.cast(pa.large_string()), value_set=known)
        places: NDArray[np.int32] = found.fill_null(-1).to_numpy(zero_copy_only=False)[genes.indices.to_numpy()]
        return places

    return positions


def _require_unique(values: Sequence[Any], at: str) -> None:
    """Raises SourceError for a value that comes twice."""
    seen: dict[Any, int] = {}
    for row, value in enumerate(values):
        if seen.setdefault(value, row) != row:
            raise SourceError(f"{at} {value} in row {row} is given to an earlier gene, too")


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
        self.n_rows = sum(file.n_rows for file in files)
        self.n_values = sum(file.n_values for file in files)
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
        return _series(self._obs.read([name]).column(0), name, as_text=_is_text(self._files[0].types[name]))

    @cached_property
    def _obs(self) -> Any:
        """A temporary Parquet file with the columns of obs of all files, opened with text as dictionaries."""
        types = {name: found for name, found in self._files[0].types.items() if name not in self._lists}
        schema, text = pa.schema(list(types.items())), [name for name, found in types.items() if _is_text(found)]
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
            with _opened(file.place, cache, file.n_bytes) as source:
                for number in range(len(file.groups)):
                    with reading(f"{file.place.url}: row group {number}", needs=_NEEDS):
                        table = source.read_row_group(number, columns=names).select(names)
                    yield table

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
            with reading(f"{file.place.url}: row {row} and those after it", needs=_NEEDS):
                batch = next(batches, None)
            if batch is None:
                break
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
