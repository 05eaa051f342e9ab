"""SCDL: the memory maps of BioNeMo's SingleCellMemMapDataset, whose three arrays are those of a CSR matrix.

Runs of rows are copied out of the maps, about 16 MiB at a time, so only the page cache has more. The header, which
bionemo-scdl reads, tells the dtypes. obs and var are Parquet files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloader.common.errors import SourceError
from zloader.common.messages import listed
from zloader.conversion.sources.anndata_input import Input
from zloader.conversion.sources.arrow import ArrowObs, digest_of, named_genes
from zloader.conversion.sources.locations import SourceLocation, source_locations
from zloader.conversion.sources.nodes import reading
from zloader.conversion.sources.row_source import MOST_BYTES, RowInput, csr_of
from zloader.conversion.sources.source_format import Place, SourceFormat, library
from zloader.conversion.sources.windows import split_rows

_ARRAYS = {"ROWPTR": "row_ptr.npy", "COLPTR": "col_ptr.npy", "DATA": "data.npy"}
_VAR, _OBS = "var_features", "obs_features"
_OBS_NAMES = "obs_feature_id"  # the only column of obs if the AnnData had none
_INDPTR_ROWS = 1 << 20
_NEEDS = "it needs a newer bionemo-scdl"


@dataclass(frozen=True)
class Scdl(SourceFormat):
    """A directory of SCDL."""

    marks = ("header.sch", "row_ptr.npy", "col_ptr.npy")

    url: Place

    def open(self, storage_options: Mapping[str, Any]) -> Input:
        (place,) = source_locations(self.url, storage_options)
        if not place.is_local:
            raise SourceError(f"{place.name} holds memory maps, which can only be read from a local disk: download it")
        header = library("bionemo.scdl.schema.header", source=os.fspath(self.url), extra="scdl").SCDLHeader
        objects = place.objects()
        source = _ScdlRows(place, header)
        source.fingerprint = digest_of(objects)
        return RowInput(source, place.name, place.label, objects=objects)


class _ScdlRows:
    """The rows of a directory of SCDL as a BlockSource. `header` is the class that reads the header."""

    def __init__(self, place: SourceLocation, header: Any) -> None:
        self._name, self._path = place.name, Path(place.path)
        with reading(f"{self._name}: header.sch", needs=_NEEDS):
            found = header.load(str(self._path / "header.sch")).arrays
            arrays = {each.name: each.dtype.numpy_dtype_string for each in found}
        with reading(self._name, needs=_NEEDS):
            self.n_obs = int(json.loads((self._path / "metadata.json").read_text())["num_rows"])
            maps = [np.memmap(self._path / _ARRAYS[name], arrays[name], mode="r") for name in _ARRAYS]
        self._indptr, self._genes, self._values = maps
        self._check_lengths()
        self.n_values: int | None = len(self._values)
        self.fingerprint: str | None = None
        var, obs = (self._features(part) for part in (_VAR, _OBS))
        self.var = named_genes(var.read().to_pandas(), f"{self._name}/{_VAR}")
        names = obs.schema_arrow.names
        index = _OBS_NAMES if names == [_OBS_NAMES] else None
        self.obs = ArrowObs(lambda name: (obs.read([name]).column(0), False), names, n_rows=self.n_obs, index=index)

    def _check_lengths(self) -> None:
        lengths = [len(each) for each in (self._indptr, self._genes, self._values)]
        end = int(self._indptr[-1])
        if lengths != [self.n_obs + 1, end, end]:
            raise SourceError(
                f"{self._name} has {self.n_obs} cells, whose values end at {end}, but {lengths[0]} entries in row_ptr, "
                f"{lengths[1]} in col_ptr and {lengths[2]} in data: it is damaged or incomplete"
            )

    def _features(self, part: str) -> Any:
        """The Parquet file of obs or var. Raises SourceError if cells of several kinds were concatenated."""
        import pyarrow.parquet as pq

        folder = self._path / part
        with reading(f"{self._name}/{part}", needs=_NEEDS):
            blocks = sorted(folder.glob("*.parquet"))
            cells = int(np.load(folder / "cumulative_sum_index.npy")[-1])
            if len(blocks) == 1 and cells == self.n_obs:
                return pq.ParquetFile(blocks[0])
        if cells != self.n_obs:
            raise SourceError(f"{self._name} has {self.n_obs} cells, but {part} {cells}: it is damaged or incomplete")
        what = "genes" if part == _VAR else "obs columns"
        raise SourceError(
            f"{self._name} has cells with different {what} ({listed(path.name for path in blocks)} in {part}): convert "
            "the files that it was made of, with join"
        )

    def close(self) -> None:
        """The maps are closed when they are no longer used."""

    def blocks(self, first_row: int) -> Iterator[Any]:
        """See BlockSource."""
        most = max(1, MOST_BYTES // (self._genes.itemsize + self._values.itemsize))
        for start in range(first_row, self.n_obs, _INDPTR_ROWS):
            stop = min(start + _INDPTR_ROWS, self.n_obs)
            ends = self._indptr[start : stop + 1].astype(np.int64)
            wrong = np.flatnonzero((np.diff(ends) < 0) | (ends[1:] > len(self._values)))
            if len(wrong):
                row = int(wrong[0])
                raise SourceError(
                    f"{self._name}: row_ptr goes from {ends[row]} to {ends[row + 1]} at row {start + row}"
                )
            for first, last in split_rows(ends, most):
                yield self._counts(ends[first : last + 1])

    def _counts(self, ends: NDArray[np.int64]) -> Any:
        part = slice(ends[0], ends[-1])
        genes, values = self._genes[part].astype(np.int64), np.array(self._values[part])
        return csr_of(values, genes, ends - ends[0], len(self.var))
