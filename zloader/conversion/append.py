"""More rows at the end of a store that `convert` wrote, without putting it at risk.

First everything is validated, every value of the sources among it. Then shards and small arrays grow on the grids they
have: an object that is replaced still reads as before under the metadata of before. Those are switched last, the
root's, which hold all others (consolidated), at the very end: a reader sees the old store or the new one. What an
interrupted append leaves is never read, and the next one writes over it.
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
from zloader.common.malloc import keep_freed_memory
from zloader.common.progress import Bars, progress_bars
from zloader.conversion.convert import library_settings, refuse_overlap
from zloader.conversion.joining.content import Content
from zloader.conversion.sources.inputs import Source, open_inputs
from zloader.conversion.writing.appended_matrix import FittedMatrix, check_objects, check_room, extend_matrix
from zloader.conversion.writing.appending import AppendPlan
from zloader.conversion.writing.destination import Destination
from zloader.conversion.writing.encode import ConvertOptions
from zloader.conversion.writing.matrices import MatrixScan, Target, scan_matrix
from zloader.conversion.writing.shards import threads
from zloader.dataset.dataset import Dataset

_DEFAULTS = ConvertOptions()


@dataclass(frozen=True, kw_only=True)
class AppendReport:
    """What `append` did. `values` are those stored for X.

    `left_out` names what the sources have and the store does not, `rows_made_canonical` counts, by matrix, the new rows
    whose genes were not ascending or came twice.
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


def append(
    url: str | os.PathLike[str],
    sources: Source | Sequence[Source],
    *,
    storage_options: Mapping[str, Any] | None = None,
    source_options: Mapping[str, Any] | None = None,
    memory: int | str = "1GiB",
    progress: bool = True,
) -> AppendReport:
    """Adds the rows of one or many sources at the end of a store that `convert` wrote; sources are what it takes.

    The sources must have the genes of the store, in any order, and its layers, raw, obsm and obs columns; what else
    they have is left out, and var, varm, varp and uns stay as they are. Values keep the dtypes of the store, new
    categories come after the old ones. The layout stays: a store should be of the size of what is added, or larger.

    Two appends to one store at once spoil it. A Dataset that is open meanwhile must be opened again.
    Raises StoreNotFoundError, AccessDeniedError, SourceError, OptionError or StoreError when something does not fit,
    before a byte is written; and StoreError when writing fails, which leaves the old store. So does Ctrl-C, unless the
    root's metadata were on their way. When this raises, nothing is being written any more.
    """
    location = location_of(url, storage_options)
    return append_to(
        Destination(location),
        sources,
        source_options=storage_options if source_options is None else source_options,
        options=ConvertOptions(memory=memory),
        progress=progress,
    )


def append_to(
    destination: Destination,
    sources: Source | Sequence[Source],
    *,
    source_options: Mapping[str, Any] | None = None,
    options: ConvertOptions = _DEFAULTS,
    progress: bool = False,
) -> AppendReport:
    """`append` to a Destination. Of the options only those count that bound memory."""
    started = time.perf_counter()
    keep_freed_memory()
    growth = AppendPlan(Dataset([destination.location], None))
    with contextlib.ExitStack() as opened:
        inputs = [opened.enter_context(source) for source in open_inputs(sources, storage_options=source_options)]
        refuse_overlap(inputs, destination.location)
        content = growth.content(inputs)
        opened.enter_context(library_settings())
        bars = opened.enter_context(progress_bars(shown=progress))
        store = destination.opened()
        root = zarr.open_group(store, mode="r+", use_consolidated=False)
        matrices = [
            opened.enter_context(FittedMatrix(matrix, root[matrix.name]))
            for matrix in growth.matrices(content, options.window)
        ]
        addition = _Addition(growth, content, root, matrices, bars)
        addition.check()
        with destination.extended(store):
            addition.write(destination)
            root.attrs["zloader"] = growth.provenance(inputs)
            zarr.consolidate_metadata(store)
        return AppendReport(
            sources=[source.name for source in inputs],
            destination=destination.location.url,
            bytes_in=sum(source.bytes_in for source in inputs),
            left_out=growth.left_out(inputs),
            seconds=time.perf_counter() - started,
            **addition.counts(),
        )


class _Addition:
    """Rows on their way to the end of a store: checked first, all of them, and then written."""

    def __init__(
        self, growth: AppendPlan, content: Content, root: zarr.Group, matrices: Sequence[FittedMatrix], bars: Bars
    ) -> None:
        self._growth, self._content, self._matrices, self._bars = growth, content, matrices, bars
        self._root: Any = root
        self._values_before = _n_values(self._root[matrices[0].name])
        self._scans: list[MatrixScan] = []

    def check(self) -> None:
        """The first pass: reads everything. Raises SourceError, StoreError."""
        for path, new in self._growth.obs(self._content):
            check_objects(self._root[path], len(new))
        for matrix in self._matrices:
            advance = self._bars.add(f"reading {matrix.name}", matrix.n_reads)
            scan = scan_matrix(matrix, keep_dtype=True, advance=advance)
            check_room(self._root[matrix.name], scan, matrix.n_rows)
            self._scans.append(scan)

    def write(self, destination: Destination) -> None:
        """The second pass. Raises SourceError when a source has changed, StoreError."""
        for path, new in self._growth.obs(self._content):
            _extend_array(self._root[path], new)
        with threads(destination.location.url) as pool:
            target = Target(
                root=self._root,
                location=destination.location,
                options=ConvertOptions(codec=self._growth.codec),
                threads=pool,
                bars=self._bars,
                create_object=destination.create_object,
                existing=self._growth.dataset.object_sizes(),
            )
            for matrix, scan in zip(self._matrices, self._scans, strict=True):
                extend_matrix(matrix, scan, target)

    def counts(self) -> dict[str, Any]:
        """What the report says of rows and values."""
        n_rows, n_values = self._growth.dataset.n_obs, self._values_before
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
    """Adds to a small array. zarr reads and replaces its last object."""
    try:
        array.append(new)
    except (ValueError, RuntimeError) as error:
        raise StoreError(f"cannot add to {array.path}, whose last object may be damaged: {error}") from error
