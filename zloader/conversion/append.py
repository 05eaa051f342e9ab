"""Append rows to a store that `convert` wrote, so that the store stays readable at every moment.

First everything is validated, including every value of the sources. Then shards and small arrays are extended on their
existing grids. A replaced object still reads correctly under the old metadata. The metadata are switched last, and the
root's consolidated metadata at the very end, so a reader sees either the old store or the new one. The remains of an
interrupted append are never read, and the next append overwrites them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import zarr
from numpy.typing import NDArray

from zloader.access.location import location_of
from zloader.common.errors import StoreError
from zloader.common.keywords import answers
from zloader.common.machine import keep_freed_memory
from zloader.common.progress import Bars, progress_bars
from zloader.conversion.joining.content import Content
from zloader.conversion.sources.inputs import Sources, open_inputs, refuse_overlap
from zloader.conversion.sources.modality import require_anndata
from zloader.conversion.writing.appending import AppendPlan
from zloader.conversion.writing.destination import Destination
from zloader.conversion.writing.elements import library_settings
from zloader.conversion.writing.encode import ConvertOptions
from zloader.conversion.writing.fitting import FittedMatrix, check_capacity, check_object_count
from zloader.conversion.writing.passes import MatrixScan, Target, append_matrix, scan_matrix
from zloader.conversion.writing.shards import threads
from zloader.dataset.dataset import open_locations
from zloader.selecting.gene_names import GenesBy

_DEFAULTS = ConvertOptions()


@dataclass(frozen=True, kw_only=True)
class AppendReport:
    """The result of `append`: the size of the store before and after, and what was changed or left out.

    >>> import zloader as zl
    >>> _ = zl.convert("pbmc.h5ad", "grown.zarr")
    >>> zl.append("grown.zarr", "more.h5ad").rows_made_canonical
    {}

    - `sources`, `destination`: names and URL, without secrets.
    - `rows_before`, `rows`: rows of the store before and after.
    - `values_before`, `values`: values stored for X before and after.
    - `bytes_in`: stored bytes of the sources.
    - `rows_made_canonical`: per matrix, the number of new rows whose genes were unsorted or repeated.
    - `left_out`: elements that the sources have and the store does not, for example `["obs/batch"]`.
    - `seconds`: wall-clock time.
    """

    sources: Sequence[str]
    destination: str
    rows_before: int
    rows: int
    values_before: int
    values: int
    bytes_in: int
    rows_made_canonical: Mapping[str, int]
    left_out: Sequence[str]
    seconds: float


@answers
def append(
    url: str | os.PathLike[str],
    sources: Sources,
    *,
    genes_by: GenesBy = None,
    storage_options: Mapping[str, Any] | None = None,
    source_options: Mapping[str, Any] | None = None,
    memory: int | str = "1GiB",
    progress: bool = True,
) -> AppendReport:
    """Appends the rows of one or more sources to a store that `convert` wrote. It takes the same sources as `convert`.

    >>> import zloader as zl
    >>> _ = zl.convert("pbmc.h5ad", "atlas.zarr")
    >>> report = zl.append("atlas.zarr", "more.h5ad")
    >>> report.rows_before, report.rows
    (60, 100)

    The sources must have the genes of the store, in any order, and its layers, raw, obsm and obs columns. Anything else
    they have is left out. var, varm, varp and uns stay unchanged, values keep the dtypes of the store, and new
    categories are added after the existing ones. Chunks and shards keep the sizes chosen by `convert`, so append to
    stores that are at least as large as the rows to add.

    - `genes_by`: what names the genes of the new sources, as for `convert`. With None, the var column that
      named those of the store, if there is one, else var_names.
    - `storage_options`: s3fs options for the store, and for the sources unless `source_options` is given.
    - `memory`: bound on the resident memory of the process, in bytes or as text such as "1GiB".
    - `progress`: show progress on stderr if stderr is a terminal.

    Do not run two appends to the same store at once: they corrupt it. A Dataset that was open during an append must be
    reopened.

    Everything is checked before the first byte is written: StoreNotFoundError, AccessDeniedError, SourceError,
    OptionError or StoreError is raised if the sources or the store do not fit. StoreError is also raised when a write
    fails. The store is then unchanged, as it is after Ctrl-C, unless the root's metadata were already being written.
    After an exception nothing is written in the background.
    """
    location = location_of(url, storage_options)
    location.require_writable()
    return append_to(
        Destination(location),
        sources,
        genes_by=genes_by,
        source_options=storage_options if source_options is None else source_options,
        options=ConvertOptions(memory=memory),
        progress=progress,
    )


def append_to(
    destination: Destination,
    sources: Sources,
    *,
    genes_by: GenesBy = None,
    source_options: Mapping[str, Any] | None = None,
    options: ConvertOptions = _DEFAULTS,
    progress: bool = False,
) -> AppendReport:
    """Like `append`, with a Destination instead of a URL. Of `options`, only the memory bounds are used."""
    started = time.perf_counter()
    keep_freed_memory()
    plan = AppendPlan(open_locations([destination.location], None))
    with contextlib.ExitStack() as opened:
        inputs = [opened.enter_context(source) for source in open_inputs(sources, storage_options=source_options)]
        refuse_overlap(inputs, destination.location)
        require_anndata(inputs)
        content = plan.content(inputs, genes_by)
        opened.enter_context(library_settings())
        bars = opened.enter_context(progress_bars(shown=progress))
        store = destination.opened()
        root = zarr.open_group(store, mode="r+", use_consolidated=False)
        matrices = [
            opened.enter_context(FittedMatrix(matrix, root[matrix.name]))
            for matrix in plan.matrices(content, options.window)
        ]
        addition = _Addition(plan, content, root, matrices, bars)
        addition.check()
        with destination.extended(store):
            addition.write(destination)
            root.attrs["zloader"] = plan.provenance(inputs)
            zarr.consolidate_metadata(store)
        return AppendReport(
            sources=[source.name for source in inputs],
            destination=destination.location.url,
            bytes_in=sum(source.bytes_in for source in inputs),
            left_out=plan.left_out(inputs),
            seconds=time.perf_counter() - started,
            **addition.counts(),
        )


class _Addition:
    """The rows to append: all of them are checked before the first is written."""

    def __init__(
        self, plan: AppendPlan, content: Content, root: zarr.Group, matrices: Sequence[FittedMatrix], bars: Bars
    ) -> None:
        self._plan, self._content, self._matrices, self._bars = plan, content, matrices, bars
        self._root: Any = root
        self._values_before = _n_values(self._root[matrices[0].name])
        self._scans: list[MatrixScan] = []

    def check(self) -> None:
        """The first pass: reads and validates everything. Raises SourceError or StoreError."""
        for path, new in self._plan.obs(self._content):
            check_object_count(self._root[path], len(new))
        for matrix in self._matrices:
            advance = self._bars.add(f"reading {matrix.name}", matrix.n_reads)
            scan = scan_matrix(matrix, keep_dtype=True, advance=advance)
            check_capacity(self._root[matrix.name], scan, matrix.n_rows)
            self._scans.append(scan)

    def write(self, destination: Destination) -> None:
        """The second pass: writes. Raises SourceError if a source has changed since the first pass, and StoreError."""
        for path, new in self._plan.obs(self._content):
            _extend_array(self._root[path], new)
        with threads(destination.location.url) as pool:
            target = Target(
                command="append",
                root=self._root,
                location=destination.location,
                options=_DEFAULTS,
                threads=pool,
                bars=self._bars,
                create_object=destination.create_object,
                existing=self._plan.dataset.store.object_sizes(),
            )
            for matrix, scan in zip(self._matrices, self._scans, strict=True):
                append_matrix(matrix, scan, target)

    def counts(self) -> dict[str, Any]:
        """The row and value counts of the report."""
        n_rows, n_values = self._plan.dataset.n_obs, self._values_before
        mended = {matrix.name: scan.mended for matrix, scan in zip(self._matrices, self._scans, strict=True)}
        return {
            "rows_before": n_rows,
            "rows": n_rows + self._content.n_rows,
            "values_before": n_values,
            "values": n_values + self._scans[0].n_values,
            "rows_made_canonical": {name: rows for name, rows in mended.items() if rows},
        }


def _n_values(stored: Any) -> int:
    return int(stored.size if isinstance(stored, zarr.Array) else stored["data"].size)


def _extend_array(array: Any, new: NDArray[Any]) -> None:
    """Appends to a small array: zarr reads, extends and replaces its last object."""
    try:
        array.append(new)
    except (ValueError, RuntimeError) as error:
        raise StoreError(f"cannot append to {array.path}, its last object may be damaged: {error}") from error
