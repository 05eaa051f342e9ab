"""`zl.Parquet`: a row per cell, with its genes and their values in two columns of lists, as on Hugging Face.

The footers of all files are read at once, and the file with the names of genes. `list_rows` reads the rows.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from zloader.common.errors import OptionError, SourceError
from zloader.common.messages import listed
from zloader.conversion.sources.anndata_input import Input
from zloader.conversion.sources.list_rows import NEEDS, GeneLookup, ListFile, ListRows, opened
from zloader.conversion.sources.locations import BlockCache, SourceLocation, source_locations
from zloader.conversion.sources.nodes import reading

_LISTS = (("genes", "expressions"), ("gene_token_id", "gene_expression"))  # Tahoe-100M, X-Atlas/Orion
_IDS = ("token_id", "gene_token_id", "gene_id", "id")  # columns of gene metadata
_GENE_NAMES = ("ensembl_id", "feature_id", "gene_symbol", "gene_name", "feature_name")  # the first of them names genes
_PANDAS_INDEX = "__index_level_0__"
_FOOTERS = 8  # read at a time
_BATCH = 1000  # rows, of which the names of genes are collected
_MOST_ID = 1 << 27  # the look-up table takes 4 bytes per id
_MOST_NAMES = 1 << 22  # of genes; a column with more is another one

Place: TypeAlias = str | os.PathLike[str]


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

    def open(self, storage_options: Mapping[str, Any]) -> Input:
        """Opens the files with these fsspec options. Reads only footers and the genes. Raises SourceError."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # raised during the import
                import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            raise SourceError(f'{self.url} is read by pyarrow: pip install "zloader[parquet]" ({error})') from error
        given = [self.url] if isinstance(self.url, (str, os.PathLike)) else list(self.url)
        places = [each for url in given for place in source_locations(url, storage_options) for each in _files(place)]
        genes = [] if self.gene_metadata is None else source_locations(self.gene_metadata, storage_options)
        with ThreadPoolExecutor(_FOOTERS, thread_name_prefix="zloader-footers") as threads:
            files = list(threads.map(ListFile.read, places))
        columns = (*_list_columns(files[0], self.lists), _index_column(files[0], self.obs_names))
        objects = [(place.label, size, tag) for place in [*places, *genes] for _, size, tag in place.objects()]
        source = ListRows(files, columns, *_gene_axis(files, columns[0], genes, self.gene_id), objects=objects)
        source.fingerprint = hashlib.sha256(repr((objects, columns, self.gene_id)).encode()).hexdigest()[:32]
        return source


def _files(place: SourceLocation) -> list[SourceLocation]:
    """A file, or the Parquet files of a directory in the order of their names."""
    if place.entry()["type"] != "directory":
        return [place]
    files = [place.below(name) for name in place.names() if name.endswith(".parquet")]
    if not files:
        raise SourceError(f"{place.name} has no .parquet file: name the directory that has them, or a glob")
    return files


def _list_columns(file: ListFile, given: tuple[str, str] | None) -> tuple[str, str]:
    """The names of the two columns of lists. Raises SourceError if the file lacks them, or if they are no lists."""
    found = next((pair for pair in _LISTS if set(pair) <= set(file.types)), None) if given is None else given
    if found is None or not set(found) <= set(file.types):
        wanted = "genes and expressions" if given is None else listed(given)
        raise SourceError(
            f"{file.place.name} has no columns {wanted}: name the two columns of lists, of genes and of their values, "
            f"with zl.Parquet(..., lists=(GENES, VALUES)) (--lists GENES,VALUES). It has {listed(file.types)}"
        )
    for name, kinds in zip(found, ("iuU", "iuf"), strict=True):
        if file.list_kind(name) not in [*kinds]:
            what = "integers or text, the ids or names of genes" if "U" in kinds else "numbers"
            raise SourceError(f"{file.place.name}: column {name!r} is {file.types[name]}, but must be lists of {what}")
    return found


def _index_column(file: ListFile, given: str | None) -> str | None:
    if given is not None and (given not in file.types or file.list_kind(given)):
        raise SourceError(f"{file.place.name} has no column {given!r} with names of cells: it has {listed(file.types)}")
    return given or (_PANDAS_INDEX if _PANDAS_INDEX in file.types else None)


def _gene_axis(
    files: Sequence[ListFile], lists: str, genes: Sequence[SourceLocation], gene_id: str | None
) -> tuple[pd.DataFrame, GeneLookup]:
    """var, and what finds the genes of a column of lists in it. Raises SourceError."""
    are_names, name = files[0].list_kind(lists) == "U", listed((file.place.name for file in files), 1)
    if not genes and not are_names:
        raise SourceError(
            f"{name} has only the ids of genes: name the Parquet file with their names with "
            "zl.Parquet(..., gene_metadata=...) (--gene-metadata FILE)"
        )
    if not genes:
        found = _names_in(_batches(files, lists), f"{name}: column {lists!r}")
        return pd.DataFrame(index=pd.Index(found, dtype=object)), _by_name(found, name)
    (place,) = genes
    with opened(place, BlockCache(max_blocks=2)) as file, reading(place.name, needs=NEEDS):
        frame = file.read().to_pandas()
    column = _text_column(frame, files, lists, place, gene_id) if are_names else _id_column(frame, place, gene_id)
    at = f"{place.name}: {column}"
    lookup = _by_name(frame[column].tolist(), at) if are_names else _by_id(frame[column].to_numpy(), at)
    return frame.set_index(_gene_names(frame, place.name)[0]), lookup


def _gene_names(frame: pd.DataFrame, at: str) -> list[str]:
    """The columns that name each gene of a table differently, the usual ones first. Raises SourceError if none does."""
    text = [name for name in frame if pd.api.types.infer_dtype(frame[name], skipna=False) == "string"]
    unique = [name for name in dict.fromkeys([*_GENE_NAMES, *text]) if name in text and frame[name].is_unique]
    if not unique:
        raise SourceError(f"{at} has no column of text that names each gene uniquely. It has {listed(frame)}")
    return unique


def _batches(files: Sequence[ListFile], lists: str) -> Iterator[Any]:
    for file in files:
        with reading(f"{file.place.name}: column {lists!r}", needs=NEEDS):
            yield from file.batches([lists], _BATCH)


def _id_column(frame: pd.DataFrame, place: SourceLocation, gene_id: str | None) -> str:
    integers = [name for name in frame if frame[name].dtype.kind in "iu"]
    column = next((name for name in _IDS if name in integers), None) if gene_id is None else gene_id
    if column is None or column not in integers:
        raise SourceError(
            f"{place.name} has no column {column or 'token_id'!r} of integers, the ids of genes: name it with "
            f"zl.Parquet(..., gene_id=...) (--gene-id NAME). It has {listed(frame)}"
        )
    return column


def _text_column(
    frame: pd.DataFrame, files: Sequence[ListFile], lists: str, place: SourceLocation, gene_id: str | None
) -> str:
    """The column with the names that are in lists: the first that has those of the first cells."""
    if gene_id is None:
        unique = _gene_names(frame, place.name)
        first = _names_in(itertools.islice(_batches(files, lists), 1), "")
        return next((name for name in unique if set(first) <= set(frame[name])), unique[0])
    if gene_id not in frame or pd.api.types.infer_dtype(frame[gene_id], skipna=False) != "string":
        raise SourceError(
            f"{place.name} has no column {gene_id!r} of text, the names of genes in {lists!r}: name another one with "
            f"zl.Parquet(..., gene_id=...) (--gene-id NAME). It has {listed(frame)}"
        )
    return gene_id


def _names_in(batches: Iterable[Any], at: str) -> list[str]:
    """The names in a column of lists, sorted. Raises SourceError if there are too many for genes."""
    import pyarrow.compute as pc

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
    import pyarrow as pa
    import pyarrow.compute as pc

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
