"""Verify that a store is complete and intact and, on request, that it holds the values of its sources.

Every stored byte is read once, in a few threads. Problems are collected instead of raised, so one run reports them all.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from zloader.access.location import Location, location_of
from zloader.common.errors import FormatError, TruncatedObjectError
from zloader.common.keywords import answers
from zloader.common.options import MiB
from zloader.common.progress import Bars, progress_bars
from zloader.conversion.checking.compare import Comparison
from zloader.conversion.checking.hierarchy import FileHierarchy, Findings, Hierarchy, Problem
from zloader.conversion.checking.scan import ChunkScan
from zloader.conversion.sources.inputs import Input, Sources, open_inputs
from zloader.conversion.writing.destination import MARKER
from zloader.conversion.writing.elements import library_settings
from zloader.conversion.writing.encode import working_bytes
from zloader.dataset.dataset import Dataset
from zloader.dataset.h5ad import OpenedFile
from zloader.dataset.open_dataset import open_dataset
from zloader.selecting.gene_names import GenesBy

_THREADS = 8  # enough to hide the latency of S3; on a machine with few cores they cost nothing
_THREAD_BYTES = 24 * MiB  # memory per thread: stored bytes and a few decoded chunks


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of `verify`: `ok`, the `problems` found, and how much was read.

    >>> import zloader as zl
    >>> _ = zl.convert("pbmc.h5ad", "checked.zarr")
    >>> zl.verify("checked.zarr").problems
    ()

    - `problems`: at most 100, each with a place (`where`) and a description (`what`), then the number of further ones.
    - `rows`, `genes`: the shape of X.
    - `objects`, `arrays`, `chunks`, `values`: stored objects, arrays, chunks, and elements of all arrays.
    - `bytes_read`: stored bytes read from the objects.
    - `against`: the names of the sources that the store was compared with.
    - `seconds`: wall-clock time.
    """

    url: str
    rows: int
    genes: int
    objects: int
    arrays: int
    chunks: int
    values: int
    bytes_read: int
    problems: tuple[Problem, ...]
    against: tuple[str, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """True if no problem was found."""
        return not self.problems


@answers
def verify(
    url: str | os.PathLike[str],
    *,
    against: Sources | None = None,
    genes_by: GenesBy = None,
    storage_options: Mapping[str, Any] | None = None,
    source_options: Mapping[str, Any] | None = None,
    memory: int | str = "1GiB",
    progress: bool = True,
) -> Verification:
    """Reads the whole store at a local path or `s3://` URL and reports everything that is wrong with it.

    >>> import zloader as zl
    >>> _ = zl.convert("pbmc.h5ad", "verified.zarr")
    >>> zl.verify("verified.zarr", against="pbmc.h5ad").ok
    True

    Every object must exist and belong to an array, every checksum must match, and every chunk must decode. Shapes must
    agree. In a store that `convert` wrote, X, layers and raw/X must be canonical CSR or dense; in files and stores of
    other programs, rows may be unsorted, and a matrix CSC.

    - `against`: sources, as for `convert`. Every value is compared with the value that `convert` would store.
    - `genes_by`: what names the genes of the sources. Needed if `convert` was given new names, which no store keeps.
    - `storage_options`: s3fs options for the store, and for the sources unless `source_options` is given.
    - `memory`: bound on the resident memory of the process, in bytes or as text such as "1GiB".
    - `progress`: show progress on stderr if stderr is a terminal.

    Raises StoreNotFoundError and AccessDeniedError, SourceError and OptionError if a source cannot be opened, and
    StoreError if a read fails for a reason other than damage.
    """
    started = time.perf_counter()
    location = location_of(url, storage_options).pinned()
    findings = Findings(location.url)
    with contextlib.ExitStack() as opened:
        opened.enter_context(library_settings())
        bars = opened.enter_context(progress_bars(shown=progress))
        inputs: list[Input] = []
        if against is not None:
            options = storage_options if source_options is None else source_options
            inputs = [opened.enter_context(source) for source in open_inputs(against, storage_options=options)]
        seen: dict[str, Any] = dict.fromkeys(("rows", "genes", "arrays", "chunks", "values", "bytes_read"), 0)
        seen["objects"] = len(location.listing())
        dataset = _opened(location, findings)
        of_file = dataset is not None and isinstance(dataset.store, OpenedFile)
        if dataset is not None and not of_file and dataset.store.root.metadata.zarr_format != 3:
            findings.add(".zgroup", "is Zarr v2, which has no checksums to verify: run 'zloader convert' on it")
            seen |= {"rows": dataset.n_obs, "genes": dataset.n_vars}
        elif dataset is not None:
            n_threads = max(1, min(_THREADS, working_bytes(memory) // _THREAD_BYTES))
            pool = opened.enter_context(ThreadPoolExecutor(n_threads, thread_name_prefix="zloader-verify"))
            opened.callback(pool.shutdown, cancel_futures=True)  # after Ctrl-C, of the reads that have not started
            hierarchy = (FileHierarchy if of_file else Hierarchy)(dataset, pool, findings)
            seen |= _check(hierarchy, findings, pool, bars)
            if inputs:
                Comparison(dataset, hierarchy, findings, bars).run(inputs, memory, genes_by)
    return Verification(
        url=location.url,
        **seen,
        problems=findings.problems(),
        against=tuple(source.name for source in inputs),
        seconds=time.perf_counter() - started,
    )


def _opened(location: Location, findings: Findings) -> Dataset | None:
    """The store; None, after adding the finding, if it is too damaged to open."""
    try:
        return open_dataset(location.url, storage_options=location.storage_options)
    except (FormatError, TruncatedObjectError) as error:
        keys = location.listing()
        if MARKER in keys and "zarr.json" not in keys:
            findings.add(MARKER, "its conversion did not finish: run convert with --resume, or convert again")
        else:
            findings.add("zarr.json", error)
        return None


def _check(hierarchy: Hierarchy, findings: Findings, pool: Executor, bars: Bars) -> dict[str, int]:
    """Checks the objects, shapes and chunks of a store, without its sources. Returns how much was checked."""
    hierarchy.check_objects()
    hierarchy.check_shapes()
    advance = bars.add("verifying", sum(array.size for array in hierarchy.arrays.values()))
    scan = ChunkScan(hierarchy, findings, pool, advance)
    scan.run()
    return {
        "objects": len(hierarchy.sizes),
        "rows": hierarchy.length("obs"),
        "genes": hierarchy.length("var"),
        "arrays": len(hierarchy.arrays),
        "chunks": scan.n_chunks,
        "values": scan.n_values,
        "bytes_read": hierarchy.metadata_bytes + scan.n_bytes,
    }
