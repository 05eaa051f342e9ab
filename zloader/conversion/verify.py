"""Whether a store is whole and sound, and whether it holds what its sources hold: everything wrong is named."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from zloader.access.location import Location, location_of
from zloader.common.errors import FormatError, TruncatedObjectError
from zloader.common.options import MiB
from zloader.common.progress import Bars, progress_bars
from zloader.conversion.checking.compare import Comparison
from zloader.conversion.checking.findings import Findings, Problem
from zloader.conversion.checking.hierarchy import Hierarchy
from zloader.conversion.checking.scan import ChunkScan
from zloader.conversion.convert import library_settings
from zloader.conversion.sources.inputs import Input, Source, open_inputs
from zloader.conversion.writing.encode import working_bytes
from zloader.conversion.writing.ownership import MARKER
from zloader.dataset.dataset import Dataset, open_dataset

_THREADS = 8  # enough for the latency of S3; on few cores they cost nothing
_THREAD_BYTES = 24 * MiB  # that a thread holds: stored bytes, and a few chunks decoded


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What `verify` has seen of a store, and the `problems` that it found: at most 100, then how many more there are.

    `values` counts the elements of all `arrays`, `bytes_read` are those of the `objects`. `against` names the sources
    that the store was compared with.
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
        """Whether nothing is wrong."""
        return not self.problems


def verify(
    url: str | os.PathLike[str],
    *,
    against: Source | Sequence[Source] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    source_options: Mapping[str, Any] | None = None,
    memory: int | str = "1GiB",
    progress: bool = True,
) -> Verification:
    """Reads all of the store at a local path or `s3://` URL, and says what is wrong with it.

    Every object must be there and belong to an array, every checksum match, every chunk decode; shapes must fit, X,
    layers and raw/X be canonical CSR (or dense). With `against`, sources as `convert` takes them, every value is
    compared with what `convert` would store. `storage_options` are s3fs's, for the store and, unless there are
    `source_options`, for the sources; `memory` bounds what is held, `progress` is shown on
    stderr if that is a terminal.
    Raises StoreNotFoundError and AccessDeniedError; SourceError and OptionError for sources that cannot be opened;
    StoreError for reads that fail for other reasons than damage.
    """
    started = time.perf_counter()
    location = location_of(url, storage_options)
    findings = Findings(location.url)
    with contextlib.ExitStack() as opened:
        opened.enter_context(library_settings())
        bars = opened.enter_context(progress_bars(shown=progress))
        inputs: list[Input] = []
        if against is not None:
            options = storage_options if source_options is None else source_options
            inputs = [opened.enter_context(source) for source in open_inputs(against, storage_options=options)]
        seen = _Seen(objects=len(location.listing()))
        dataset = _opened(location, findings)
        if dataset is not None and dataset.root.metadata.zarr_format != 3:
            findings.add(".zgroup", "is Zarr v2, which has no checksums to verify: run 'zloader convert' on it")
            seen = dataclasses.replace(seen, rows=dataset.n_obs, genes=dataset.n_vars)
        elif dataset is not None:
            with _threads(memory) as pool:
                hierarchy = Hierarchy(dataset, pool, findings)
                seen = _check(hierarchy, findings, pool, bars)
            if inputs:
                Comparison(dataset, hierarchy, findings, bars).run(inputs, memory)
    return Verification(
        url=location.url,
        **dataclasses.asdict(seen),
        problems=findings.problems(),
        against=tuple(source.name for source in inputs),
        seconds=time.perf_counter() - started,
    )


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """How much was looked at."""

    objects: int
    rows: int = 0
    genes: int = 0
    arrays: int = 0
    chunks: int = 0
    values: int = 0
    bytes_read: int = 0


def _opened(location: Location, findings: Findings) -> Dataset | None:
    """The store, unless it is so damaged that nothing else can be said."""
    try:
        return open_dataset(location.url, storage_options=location.storage_options)
    except (FormatError, TruncatedObjectError) as error:
        there = location.listing()
        if MARKER in there and "zarr.json" not in there:
            findings.add(MARKER, "its conversion did not end: convert --resume, or convert again")
        else:
            findings.add("zarr.json", error)
        return None


@contextlib.contextmanager
def _threads(memory: int | str) -> Iterator[Executor]:
    """Threads that read; an error or Ctrl-C drops what they had not begun."""
    n_threads = max(1, min(_THREADS, working_bytes(memory) // _THREAD_BYTES))
    with ThreadPoolExecutor(n_threads, thread_name_prefix="zloader-verify") as pool:
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)


def _check(hierarchy: Hierarchy, findings: Findings, pool: Executor, bars: Bars) -> _Seen:
    """All that a store says about itself."""
    hierarchy.check_objects()
    hierarchy.check_shapes()
    advance = bars.add("verifying", sum(array.size for array in hierarchy.arrays.values()))
    scan = ChunkScan(hierarchy, findings, pool, advance)
    scan.run()
    return _Seen(
        objects=len(hierarchy.sizes),
        rows=hierarchy.length("obs"),
        genes=hierarchy.length("var"),
        arrays=len(hierarchy.arrays),
        chunks=scan.n_chunks,
        values=scan.n_values,
        bytes_read=hierarchy.metadata_bytes + scan.n_bytes,
    )
