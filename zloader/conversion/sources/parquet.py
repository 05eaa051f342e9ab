"""`zl.Parquet`: a row per cell, with its genes and their values in two columns of lists, as on Hugging Face.

The footers of all files are read at once, and the file with the names of genes. `list_rows` reads the rows.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from zloader.common.errors import OptionError, SourceError
from zloader.common.messages import listed
from zloader.conversion.sources.anndata_input import Input
from zloader.conversion.sources.arrow import digest_of, gene_names, named_genes
from zloader.conversion.sources.gene_lookup import GeneIds, GeneLookup, GeneNames, names_in
from zloader.conversion.sources.list_rows import ListRows
from zloader.conversion.sources.locations import SourceLocation, source_locations
from zloader.conversion.sources.nodes import reading
from zloader.conversion.sources.parquet_file import NEEDS, ListFile, read_whole
from zloader.conversion.sources.row_source import RowInput
from zloader.conversion.sources.source_format import Place, SourceFormat, library

_LISTS = (("genes", "expressions"), ("gene_token_id", "gene_expression"))  # Tahoe-100M, X-Atlas/Orion
_IDS = ("token_id", "gene_token_id", "gene_id", "id")  # columns of gene metadata
_PANDAS_INDEX = "__index_level_0__"
_FOOTERS = 8  # read at a time
_BATCH = 1000  # rows, of which the names of genes are collected


@dataclass(frozen=True)
class Parquet(SourceFormat):
    """Cells in Parquet files, as a source of `zl.convert` and `zl.verify`: a row per cell, genes in lists.

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

    endings = (".parquet",)
    marks = ("*.parquet",)

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
        library("pyarrow.parquet", source=str(self.url), extra="parquet")
        given = [self.url] if isinstance(self.url, (str, os.PathLike)) else list(self.url)
        places = [each for url in given for place in source_locations(url, storage_options) for each in _files(place)]
        name = listed((place.name for place in places), 1)
        genes = [] if self.gene_metadata is None else source_locations(self.gene_metadata, storage_options)
        with ThreadPoolExecutor(_FOOTERS, thread_name_prefix="zloader-footers") as threads:
            files = list(threads.map(ListFile.read, places))
        columns = (*_list_columns(files[0], self.lists), _index_column(files[0], self.obs_names))
        objects = [(place.label, size, tag) for place in [*places, *genes] for _, size, tag in place.objects()]
        source = ListRows(files, columns, *_gene_axis(files, columns[0], genes, self.gene_id))
        source.fingerprint = digest_of(objects, columns, self.gene_id)
        label = places[0].label if len(places) == 1 else places[0].path.split("/")[-2]
        return RowInput(source, name, label, objects=objects)


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
        found = names_in(_batches(files, lists), f"{name}: column {lists!r}")
        return pd.DataFrame(index=pd.Index(found, dtype=object)), GeneNames(found, name)
    (place,) = genes
    frame = read_whole(place).to_pandas()
    column = _text_column(frame, files, lists, place, gene_id) if are_names else _id_column(frame, place, gene_id)
    at = f"{place.name}: {column}"
    lookup = GeneNames(frame[column].tolist(), at) if are_names else GeneIds(frame[column].to_numpy(), at)
    return named_genes(frame, place.name), lookup


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
        unique = gene_names(frame, place.name)
        first = names_in(itertools.islice(_batches(files, lists), 1), "")
        return next((name for name in unique if set(first) <= set(frame[name])), unique[0])
    if gene_id not in frame or pd.api.types.infer_dtype(frame[gene_id], skipna=False) != "string":
        raise SourceError(
            f"{place.name} has no column {gene_id!r} of text, the names of genes in {lists!r}: name another one with "
            f"zl.Parquet(..., gene_id=...) (--gene-id NAME). It has {listed(frame)}"
        )
    return gene_id
