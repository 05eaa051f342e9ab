"""h5ad -> sharded Zarr v3, in two passes over windows of rows.

The first pass reads every value once: it validates the file, finds the smallest lossless dtypes, and counts the values
that are left when rows are canonical. Only then is anything at the destination replaced. The second pass reads the
same windows again and stores them. Everything small (obs, var, obsm, varm, obsp, varp, uns) goes through anndata, one
element at a time.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anndata as ad
import anndata.experimental
import h5py
import numpy as np
import pandas as pd
import scipy.sparse
import zarr
import zarr.errors

from zloader.destination import Destination, PendingStore
from zloader.encode import ConvertOptions, grid, zarr_codecs
from zloader.errors import OptionError, SourceError, StoreError, ZloaderError
from zloader.hdf5 import open_h5ad
from zloader.matrices import MatrixScan, Target, scan_matrix, store_matrix, threads
from zloader.progress import Bars, progress_bars
from zloader.source import SourceMatrix, open_matrix
from zloader.store import Location
from zloader.terms import MiB

_DEFAULTS = ConvertOptions()
_SMALL = ("obsm", "varm", "obsp", "varp", "uns")  # beside obs and var
_SMALL_CHUNK_BYTES = MiB  # such arrays are read whole: few chunks, but enough to decode in several threads
_MAX_ENCODING_THREADS = 16  # what one reading thread can keep busy


@dataclass(frozen=True, kw_only=True)
class ConversionReport:
    """What `convert` did. `values` are those stored for X; `dtypes_changed` reads `{"X/data": "float32 -> uint8"}`.

    `rows_made_canonical` counts, by matrix, the rows whose genes were not ascending or came twice.
    """

    source: str
    destination: str
    rows: int
    genes: int
    values: int
    bytes_in: int
    bytes_out: int
    dtypes_changed: Mapping[str, str]
    rows_made_canonical: Mapping[str, int]
    seconds: float


def convert(
    source: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    options: ConvertOptions = _DEFAULTS,
    progress: bool = True,
) -> ConversionReport:
    """Writes a local .h5ad file as a sharded AnnData Zarr v3 store to a local path or `s3://` URL.

    `storage_options` are s3fs's. CSC becomes CSR, dense stays dense, dtypes shrink where that loses nothing.
    A store that is there is replaced only with `overwrite`, and not before the whole source has been read once; what
    an interrupted conversion left is replaced without. `progress` is shown on stderr if that is a terminal.
    Raises StoreNotFoundError, StoreExistsError, AccessDeniedError, SourceError, OptionError, StoreError.
    """
    location = Location(url=os.fspath(dest), storage_options=dict(storage_options or {}))
    return convert_to(Destination(location), source, overwrite=overwrite, options=options, progress=progress)


def convert_to(
    destination: Destination,
    source: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    options: ConvertOptions = _DEFAULTS,
    progress: bool = False,
) -> ConversionReport:
    """`convert` to a Destination."""
    started = time.perf_counter()
    path = Path(source).expanduser()
    _refuse_overlap(path, destination.location)
    with contextlib.ExitStack() as opened:
        file = opened.enter_context(open_h5ad(path))
        destination.check(overwrite=overwrite)
        opened.enter_context(_library_settings())
        conversion = _Conversion(file, options, opened.enter_context(progress_bars(shown=progress)))
        matrices = [opened.enter_context(matrix) for matrix in conversion.open_matrices()]
        with destination.claimed():
            scans = [conversion.scan(matrix) for matrix in matrices]
        with destination.replaced() as store:
            conversion.write(store, list(zip(matrices, scans, strict=True)))
    changes = [change for matrix, scan in zip(matrices, scans, strict=True) for change in _changes(matrix, scan)]
    return ConversionReport(
        source=str(path),
        destination=destination.location.url,
        rows=matrices[0].n_rows,
        genes=matrices[0].n_genes,
        values=scans[0].n_values,
        bytes_in=path.stat().st_size,
        bytes_out=sum(store.sizes.values()),
        dtypes_changed={name: f"{before} -> {after}" for name, before, after in changes if before != after},
        rows_made_canonical={m.name: scan.mended for m, scan in zip(matrices, scans, strict=True) if scan.mended},
        seconds=time.perf_counter() - started,
    )


def _refuse_overlap(path: Path, location: Location) -> None:
    if location.scheme != "file":
        return
    source, destination = path.resolve(), Path(location.path).resolve()
    if source == destination or source in destination.parents or destination in source.parents:
        raise OptionError(f"cannot convert {path} to {location.url}: one lies within the other. Choose another place")


def _changes(matrix: SourceMatrix, scan: MatrixScan) -> list[tuple[str, np.dtype[Any], np.dtype[Any]]]:
    """Name, original and stored dtype of each array."""
    if matrix.encoding == "dense":
        return [(matrix.name, matrix.dtype, scan.data)]
    return [
        (f"{matrix.name}/data", matrix.dtype, scan.data),
        (f"{matrix.name}/indices", matrix.genes_dtype, scan.indices),
    ]


@contextlib.contextmanager
def _library_settings() -> Iterator[None]:
    """zarr stores chunks of zeros too, so that a missing one is an error; anndata writes what it can read."""
    with (
        warnings.catch_warnings(),
        zarr.config.set({"array.write_empty_chunks": True}),
        ad.settings.override(allow_write_nullable_strings=True, auto_shard_zarr_v3=False),
    ):
        # That consolidated metadata, fixed-length strings and records are not in the Zarr v3 specification yet:
        # AnnData needs them.
        warnings.simplefilter("ignore", zarr.errors.ZarrUserWarning)
        warnings.simplefilter("ignore", zarr.errors.UnstableSpecificationWarning)
        yield


class _Conversion:
    """The two passes over one open file."""

    def __init__(self, file: h5py.File, options: ConvertOptions, bars: Bars) -> None:
        self._file, self._options, self._bars = file, options, bars
        self._obs, self._var = self._frame("obs"), self._frame("var")

    def open_matrices(self) -> Iterator[SourceMatrix]:
        """X, then the layers, then raw/X."""
        n_genes = dict.fromkeys(["X", *(f"layers/{layer}" for layer in self._file.get("layers", ()))], len(self._var))
        if self._has_raw:
            n_genes["raw/X"] = len(self._frame("raw/var"))
        for name, genes in n_genes.items():
            yield open_matrix(
                self._file,
                name,
                n_rows=len(self._obs),
                n_genes=genes,
                window_bytes=self._options.window_bytes,
            )

    @property
    def _has_raw(self) -> bool:
        return isinstance(self._file.get("raw"), h5py.Group)  # a null dataset says that there is none

    def scan(self, matrix: SourceMatrix) -> MatrixScan:
        """The first pass over a matrix."""
        advance = self._bars.add(f"reading {matrix.name}", matrix.n_reads)
        return scan_matrix(matrix, preserve_dtype=self._options.preserve_dtype, advance=advance)

    def write(self, store: PendingStore, matrices: list[tuple[SourceMatrix, MatrixScan]]) -> None:
        """The second pass, and all the rest."""
        provenance = {"version": importlib.metadata.version("zloader"), "source": Path(self._file.filename).name}
        attributes = _encoding("anndata", "0.1.0") | {"zloader": provenance}
        root = zarr.create_group(store, zarr_format=3, attributes=attributes)
        self._write_small(root, "obs", self._obs)
        self._write_small(root, "var", self._var)
        for name in _SMALL:
            if name in self._file:
                self._write_small(root, name, self._read(name))
        if self._has_raw:
            raw = root.create_group("raw", attributes=_encoding("raw", "0.1.0"))
            self._write_small(raw, "var", self._read("raw/var"))
            self._write_small(raw, "varm", self._read("raw/varm") if "raw/varm" in self._file else {})
        root.create_group("layers", attributes=_encoding("dict", "0.1.0"))
        with threads(min(os.cpu_count() or 1, _MAX_ENCODING_THREADS)) as pool:
            target = Target(root=root, options=self._options, threads=pool)
            for matrix, scan in matrices:
                store_matrix(matrix, scan, target, self._bars.add(f"writing {matrix.name}", scan.n_values))
        zarr.consolidate_metadata(store)

    def _frame(self, name: str) -> pd.DataFrame:
        frame = self._read(name) if name in self._file else None
        if not isinstance(frame, pd.DataFrame):
            raise SourceError(f"{self._file.filename}: {name} is not a data frame, so this is no AnnData")
        return frame

    def _read(self, name: str) -> Any:
        try:
            return ad.io.read_elem(self._file[name])
        except Exception as error:
            raise SourceError(f"{self._file.filename}: anndata cannot read {name}: {error}") from error

    def _write_small(self, group: zarr.Group, name: str, element: Any) -> None:
        def write(function: Any, into: zarr.Group, key: str, leaf: Any, *, dataset_kwargs: Any, iospec: Any) -> None:
            function(into, key, leaf, dataset_kwargs={**dataset_kwargs, **self._storage(leaf)})
            if leaf is None:  # anndata leaves the one chunk away that stands for None
                array: Any = into[key]
                array[...] = False

        path = f"{group.path}/{name}".strip("/")
        try:
            anndata.experimental.write_dispatched(group, name, element, callback=write)
        except ZloaderError:
            raise
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error}") from error
        except Exception as error:
            raise SourceError(f"{self._file.filename}: {path} cannot be written as Zarr: {error}") from error

    def _storage(self, leaf: Any) -> dict[str, Any]:
        """Grid and codecs for an array that anndata writes; nothing for scalars, nor for what is made of arrays."""
        if scipy.sparse.issparse(leaf):
            length, widths, item_bytes = leaf.nnz, [], 8
        elif isinstance(leaf, np.ndarray) and leaf.ndim:
            length, widths = len(leaf), [max(1, size) for size in leaf.shape[1:]]
            item_bytes = leaf.dtype.itemsize * int(np.prod(widths, dtype=np.int64))
        else:
            return {}
        chunk = _SMALL_CHUNK_BYTES // max(1, item_bytes)
        cut = grid(length, chunk=chunk, item_bytes=item_bytes, shard_bytes=self._options.shard_bytes)
        shards = {"shards": (cut.shard, *widths)} if length > cut.chunk else {}
        return {"chunks": (cut.chunk, *widths), "compressors": zarr_codecs(self._options.codec, None), **shards}


def _encoding(kind: str, version: str) -> dict[str, Any]:
    return {"encoding-type": kind, "encoding-version": version}
