"""Verify that a store is complete and intact and, on request, that it holds the values of its sources.

The objects that the metadata imply are compared with the listing, and shapes with obs and var. Every chunk of every
array is decoded with its checksum, in a few threads. On the way, indptr is checked to ascend from 0 to the number of
values, and the genes of each row to be in range and, in stores of `convert`, to ascend. The first problem of each array
is collected.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from zloader.access.location import Location, location_of
from zloader.common.keywords import answers
from zloader.common.options import MiB
from zloader.common.progress import progress_bars
from zloader.conversion.chosen import Reading
from zloader.conversion.comparison import AGAINST, DAMAGED, arrangement, compare, reporting
from zloader.conversion.destination import MARKER
from zloader.conversion.elements import library_settings
from zloader.conversion.encode import ConvertOptions, working_bytes
from zloader.conversion.hierarchy import Findings, Hierarchy, Problem
from zloader.conversion.opening import Sources, open_parts
from zloader.conversion.port import Opened
from zloader.conversion.scan import Scan
from zloader.conversion.selection import Selection
from zloader.dataset.dataset import Dataset, open_dataset
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

    - `problems`: the first one of each array or element, with a place (`where`) and a description (`what`).
    - `rows`, `genes`: the shape of X.
    - `objects`, `arrays`, `chunks`, `values`: stored objects, arrays, chunks, and elements of all arrays.
    - `bytes_read`: stored bytes of the objects.
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
    """Reads the whole store at a local path or `s3://` URL and reports what is wrong with each of its arrays.

    >>> import zloader as zl
    >>> _ = zl.convert("pbmc.h5ad", "verified.zarr")
    >>> zl.verify("verified.zarr", against="pbmc.h5ad").ok
    True

    Every object must exist and belong to an array, every checksum must match, and every chunk must decode. Shapes must
    agree. In a store that `convert` wrote, X, layers and raw/X must be canonical CSR or dense; in files and stores of
    other programs, rows may be unsorted, and a matrix CSC.

    - `against`: sources, as for `convert`. Every value is compared with the value that `convert` would store. Both are
      read by zloader; an AnnData that anndata has read is independent of it:
      `against=anndata.read_h5ad("pbmc.h5ad", backed="r")`.
    - `genes_by`: what names the genes of the sources. Needed if `convert` was given new names, which no store keeps.
    - `storage_options`: s3fs options for the store, and for the sources unless `source_options` is given.
    - `memory`: bound on the resident memory of the process, in bytes or as text such as "1GiB".
    - `progress`: show progress on stderr if stderr is a terminal.

    Raises StoreNotFoundError and AccessDeniedError, and StoreError if a read fails for a reason other than damage.
    """
    started = time.perf_counter()
    location = location_of(url, storage_options).pinned()
    findings, compared = Findings(location.url), None
    seen = dict.fromkeys(("rows", "genes", "arrays", "chunks", "values"), 0)
    with contextlib.ExitStack() as opened:
        opened.enter_context(library_settings())
        bars = opened.enter_context(progress_bars(shown=progress))
        dataset, sizes = _opened(location, findings), location.listing().sizes
        if dataset is not None and ".zgroup" in sizes and "zarr.json" not in sizes:
            findings.add(".zgroup", "is Zarr v2, which has no checksums to verify: run 'zloader convert' on it")
            seen |= {"rows": dataset.n_obs, "genes": dataset.n_vars}
        elif dataset is not None:
            store = dataset.store
            n_threads = max(1, min(_THREADS, working_bytes(memory) // _THREAD_BYTES))
            pool = opened.enter_context(ThreadPoolExecutor(n_threads, thread_name_prefix="zloader-verify"))
            opened.callback(pool.shutdown, cancel_futures=True)  # after Ctrl-C, of the reads that have not started
            # Reports what leaves nothing to check, such as a damaged list of groups.
            with reporting(findings, location.url, ""):
                hierarchy = Hierarchy(store, findings)
                hierarchy.check(pool)
                seen |= hierarchy.seen()
                if against is not None:
                    with reporting(findings, AGAINST):
                        options = storage_options if source_options is None else source_options
                        compared = _both_opened(dataset, against, genes_by, options, memory, opened)
                equal = set[str]()  # matrices whose chunks have all been read
                if compared is not None:
                    equal = compare(store, *compared, findings, bars)
                Scan(hierarchy, findings, pool, bars).run(equal)
    return Verification(
        url=location.url,
        **seen,
        objects=len(sizes),
        bytes_read=sum(sizes.values()),
        problems=findings.problems(),
        against=() if compared is None else tuple(compared[1].names),
        seconds=time.perf_counter() - started,
    )


def _both_opened(
    dataset: Dataset,
    against: Sources,
    genes_by: GenesBy,
    storage_options: Mapping[str, Any] | None,
    memory: int | str,
    until: contextlib.ExitStack,
) -> tuple[Opened, Opened]:
    """The store and its sources, arranged as `convert` stored them, until the stack is closed."""
    how: dict[str, Any] = {"window_bytes": ConvertOptions(memory=memory).window}
    how["memory"] = working_bytes(memory) // 8  # of each side
    stored = until.enter_context(open_parts(dataset, Selection(), how=Reading(**how)))
    select, order = arrangement(dataset.store, stored, genes_by)
    sources = open_parts(against, select, storage_options=storage_options, how=Reading(**how, **order))
    return stored, until.enter_context(sources)


def _opened(location: Location, findings: Findings) -> Dataset | None:
    """The store; None, after adding the finding, if it is too damaged to open."""
    try:
        return open_dataset(location.url, storage_options=location.storage_options)
    except DAMAGED as error:
        keys = location.listing()
        if MARKER in keys and "zarr.json" not in keys:
            findings.add(MARKER, "its conversion did not finish: run convert with --resume, or convert again")
        else:
            findings.add("zarr.json", error)
        return None
