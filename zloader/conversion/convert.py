"""Convert AnnData to sharded Zarr v3, in one pass over windows of rows.

A mark of the unfinished store comes first. Then the small elements (obs, var, obsm, varm, obsp, varp, uns) are written
by anndata, one at a time, and the matrices are read and stored front to back, with a checkpoint at each shard. The
metadata come last. So an interrupted conversion can be resumed: reading starts at the first row that is not stored.

An existing store is replaced only after the sources have been read once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from zloader.access.location import Location, location_of
from zloader.common.errors import OptionError, StoreError, StoreExistsError
from zloader.common.keywords import answers
from zloader.common.machine import keep_freed_memory
from zloader.common.messages import listed, printable
from zloader.common.progress import Bars, progress_bars
from zloader.common.version import __version__
from zloader.conversion.chosen import Reading
from zloader.conversion.destination import Destination
from zloader.conversion.elements import ElementWriter, MetadataStore, library_settings
from zloader.conversion.encode import CHUNK_FORM, ConvertOptions, working_bytes
from zloader.conversion.matrix import MatrixWriter, threads
from zloader.conversion.opening import Sources, damage_of_sources, open_parts
from zloader.conversion.port import Opened
from zloader.conversion.reorder import SOURCE_ROW
from zloader.conversion.selection import Selection
from zloader.selecting.gene_names import GenesBy

_DEFAULTS = ConvertOptions()
_EVERYTHING = Selection()


@dataclass(frozen=True, kw_only=True, repr=False)
class ConversionReport:
    """The result of `convert`: what was read, what was stored, and what changed on the way.

    >>> import zloader as zl
    >>> zl.convert("pbmc.h5ad", "reported.zarr").rows_made_canonical
    {}

    - `sources`, `destination`: names and URL, without secrets.
    - `rows`, `genes`, `values`: the shape of X and the number of values stored for it.
    - `bytes_in`, `bytes_out`: stored bytes of the sources and of the store.
    - `dtypes_changed`: the narrowed arrays, for example `{"X/data": "float32 -> uint8"}`.
    - `rows_made_canonical`: per matrix, the number of rows whose genes were unsorted or repeated.
    - `dropped`: elements that cannot be joined over several sources, for example `["uns/neighbors"]`.
    - `seconds`: wall-clock time.
    - `already_complete`: with `resume`, whether this conversion had finished before, so that nothing was written.
    """

    sources: Sequence[str]
    destination: str
    rows: int
    genes: int
    values: int
    bytes_in: int
    bytes_out: int
    dtypes_changed: Mapping[str, str]
    rows_made_canonical: Mapping[str, int]
    dropped: Sequence[str]
    seconds: float
    already_complete: bool = False

    def __repr__(self) -> str:
        changed = [f"{path} {dtypes}" for path, dtypes in self.dtypes_changed.items()]
        changed += [f"{rows:,} rows of {name} made canonical" for name, rows in self.rows_made_canonical.items()]
        changed += [f"dropped {listed(self.dropped)}"] if self.dropped else []
        return printable(
            f"<ConversionReport of {self.destination}: {self.rows:,} rows x {self.genes:,} genes, {self.values:,} "
            f"values from {listed(self.sources)}; {self.bytes_in:,} bytes became {self.bytes_out:,} "
            f"in {self.seconds:,.1f} s{', already complete' * self.already_complete}{'; '.join(['', *changed])}>"
        )


@answers
def convert(  # noqa: PLR0913 - all but two are keyword-only
    sources: Sources,
    dest: str | os.PathLike[str],
    *,
    join: str | None = None,
    genes_by: GenesBy = None,
    select: Selection = _EVERYTHING,
    options: ConvertOptions = _DEFAULTS,
    storage_options: Mapping[str, Any] | None = None,
    source_options: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    resume: bool = False,
    progress: bool = True,
) -> ConversionReport:
    """Converts one or more AnnData or MuData into a single sharded Zarr v3 store at a local path or `s3://` URL.

    A source is an .h5ad file, an AnnData Zarr (v2 or v3), an annbatch collection, a MuData such as `cite.h5mu` or one
    of its modalities, `cite.h5mu/rna`, `zl.Parquet`, an AnnData in memory, or a `zl.RowSource`, which reads a format of
    your own. Files are given as local paths, fsspec URLs or globs. Several are joined like `anndata.concat` joins them,
    and MuData by modality; `select` chooses the parts and genes to store (see `Selection`). A mapping such as
    `{"human": a, "mouse": b}` gives the sources labels, which `Selection(source_column=...)` stores.

    >>> import zloader as zl
    >>> report = zl.convert("pbmc.h5ad", "pbmc.zarr")
    >>> report.rows, report.genes
    (60, 300)
    >>> report.dtypes_changed["X/data"]
    'float32 -> uint8'

    - `join`, `genes_by`: those of `select`, for short: `join="inner"` stands for `select=zl.Selection(join="inner")`.
    - `storage_options`: s3fs options for the destination, and for the sources unless `source_options` is given.
    - `overwrite`: replace an existing store. It is replaced only after every source has been read once.
    - `resume`: continue an interrupted conversion after its last complete shard. One that has finished, with the same
      sources and options, is left as it is. Without `resume` the remains of an interrupted one are replaced, which does
      not need `overwrite`.
    - `progress`: show progress on stderr if stderr is a terminal.

    Nothing else is ever deleted: a destination inside a Zarr hierarchy, or one with objects that do not belong to an
    AnnData store, is refused. After an exception, including Ctrl-C, nothing is written in the background.
    Raises StoreNotFoundError, StoreExistsError, AccessDeniedError, SourceError, OptionError or StoreError. Warns of a
    join in which more than half of the genes of a source match no gene of the others, with the likely reason.
    """
    location = location_of(dest, storage_options)
    given: dict[str, Any] = {"join": join, "genes_by": genes_by}
    select = dataclasses.replace(select, **{name: value for name, value in given.items() if value is not None})
    return convert_to(
        Destination(location),
        sources,
        select=select,
        options=options,
        source_options=storage_options if source_options is None else source_options,
        overwrite=overwrite,
        resume=resume,
        progress=progress,
    )


def convert_to(  # noqa: PLR0913 - all but two are keyword-only
    destination: Destination,
    sources: Sources,
    *,
    select: Selection = _EVERYTHING,
    options: ConvertOptions = _DEFAULTS,
    source_options: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    resume: bool = False,
    progress: bool = False,
) -> ConversionReport:
    """Like `convert`, with a Destination instead of a URL."""
    started = time.perf_counter()
    keep_freed_memory()
    how = Reading(
        window_bytes=options.window,
        memory=working_bytes(options.memory) // 2,
        shuffle_seed=options.shuffle_seed,
        order=options.order,
    )
    with contextlib.ExitStack() as opened:
        found = opened.enter_context(open_parts(sources, select, storage_options=source_options, how=how))
        refuse_overlap(found.names, destination.location)
        opened.enter_context(library_settings())
        bars = opened.enter_context(progress_bars(shown=progress, unit="rows"))
        conversion = _Conversion(found, select, options, bars)
        if resume and found.identity is None:
            raise OptionError("converting an AnnData in memory cannot be resumed: run it again without resume")
        results = conversion.results_at(destination) if resume and not overwrite else None
        already_complete = results is not None
        if results is None:
            resuming = resume and conversion.is_unfinished_at(destination)
            replaces = destination.check(overwrite=overwrite or resuming)
            if replaces and not resuming:
                conversion.rehearse()
            results = conversion.carry_out(destination, resuming=resuming)
        return ConversionReport(
            sources=found.names,
            destination=destination.location.url,
            rows=found.parts[0].content.n_rows,
            genes=len(found.parts[0].content.var),
            bytes_in=found.bytes_in,
            bytes_out=sum(destination.objects().values()),
            seconds=time.perf_counter() - started,
            already_complete=already_complete,
            **results,
        )


def refuse_overlap(sources: Sequence[str], location: Location) -> None:
    """Raises OptionError if a source and the destination are the same, or if one contains the other."""
    for source in sources:
        if ("://" in source or source.startswith("/") or Path(source).exists()) and not _is_apart(source, location):
            raise OptionError(
                f"cannot convert {source} to {location.url}: one lies within the other. Choose another destination"
            )


def _is_apart(source: str, location: Location) -> bool:
    if "://" in source or location.scheme != "file":
        one, other = (f"{url.rstrip('/')}/" for url in (source, location.url))
        return not one.startswith(other) and not other.startswith(one)
    path, destination = Path(source).resolve(), Path(location.path).resolve()
    return path != destination and path not in destination.parents and destination not in path.parents


class _Conversion:
    """The pass over what was opened, and what identifies the conversion."""

    def __init__(self, opened: Opened, select: Selection, options: ConvertOptions, bars: Bars) -> None:
        self._opened, self._parts, self._select = opened, opened.parts, select
        self._options, self._bars = options, bars
        self._of = listed(opened.names, 3)

    def rehearse(self) -> None:
        """Reads everything once. Raises the errors of the sources, before an old store is deleted."""
        for part in self._parts:
            root = zarr.create_group(MetadataStore(), zarr_format=3)
            ElementWriter(root, self._options, of=self._of).write_content(part.content)
            for matrix in part.content.matrices():
                advance = self._bars.add(f"reading {part.at(matrix.name)}", matrix.n_rows)
                with matrix:
                    for window in matrix.windows():
                        advance(len(window.lengths))

    def carry_out(self, destination: Destination, *, resuming: bool) -> dict[str, Any]:
        """Converts, from the beginning or from where another run stopped. Returns fields of the report."""
        with (
            destination.replaced({"identity": self._identity()}, resuming=resuming) as store,
            damage_of_sources(),
        ):
            existing, groups = frozenset(destination.objects()) if resuming else frozenset(), {}
            for part in self._parts:
                group = zarr.create_group(store, path=part.path, zarr_format=3, attributes=dict(part.attributes))
                ElementWriter(group, self._options, of=self._of, flush=store.flush).write_content(part.content)
                groups[part.path] = group
            results: dict[str, Any] = {"values": 0, "dtypes_changed": {}, "rows_made_canonical": {}}
            with threads(destination.location.url) as pool:
                for part in self._parts:
                    writer = MatrixWriter(
                        root=groups[part.path],
                        destination=destination,
                        options=self._options,
                        threads=pool,
                        bars=self._bars,
                        existing=existing,
                    )
                    for matrix in part.content.matrices():
                        with matrix:
                            stored = writer.store(matrix)
                        results["values"] += stored.n_values if matrix.name == "X" else 0
                        changes = stored.plan.changes(matrix) if stored.plan is not None else {}
                        results["dtypes_changed"] |= {part.at(name): change for name, change in changes.items()}
                        if stored.n_mended:
                            results["rows_made_canonical"][part.at(matrix.name)] = stored.n_mended
            results["dropped"] = [part.at(path) for part in self._parts for path in part.content.dropped]
            groups[""].attrs["zloader"] = {
                "version": __version__,
                "sources": [
                    {"label": label, "rows": n_rows}
                    for label, n_rows in zip(self._opened.labels, self._opened.n_rows, strict=False)
                ],
                "select": self._select.recorded(),
                "shuffle_seed": self._options.shuffle_seed,
                **({} if self._options.order is None else {"order": SOURCE_ROW}),
                "conversion": {"record": self._record(), "results": results},
            }
            zarr.consolidate_metadata(store)
        return results

    # --- What it was made from

    def _identity(self) -> dict[str, Any]:
        """Everything that determines the bytes of the store, as plain JSON types."""
        options = dataclasses.asdict(dataclasses.replace(self._options, order=None))
        del options["memory"], options["window_bytes"], options["order"]
        if self._options.order is not None:
            options["order"] = hashlib.sha256(np.asarray(self._options.order).tobytes()).hexdigest()[:32]
        genes_by = None
        if self._select.genes_by is not None:  # which may be a function
            genes_by = [_digest(json.dumps(list(map(str, part.content.var.index)))) for part in self._parts]
        whole = {
            "version": __version__,
            "chunk_form": CHUNK_FORM,
            "sources": [self._opened.identity, list(self._opened.labels)],
            "select": self._select.plain(genes_by),
            "options": options,
        }
        plain: dict[str, Any] = json.loads(json.dumps(whole, default=list))
        return plain

    def _record(self) -> dict[str, str]:
        """A hash of each part of the identity that does not depend on the version of zloader."""
        identity = self._identity()
        return {part: _digest(json.dumps(identity[part])) for part in ("sources", "select", "options")}

    def results_at(self, destination: Destination) -> dict[str, Any] | None:
        """The results of this conversion if it has finished at the destination, None if there is no finished one.

        Raises StoreExistsError if it was another one.
        """
        finished = destination.finished()
        if not finished:
            return None
        differing = [part for part, digest in self._record().items() if finished.get("record", {}).get(part) != digest]
        if differing and destination.journal() is not None:  # an old store that was about to be replaced
            return None
        if differing:
            raise StoreExistsError(
                f"there is already a store at {destination.location.url}, made by another conversion: "
                f"{', '.join(differing)} differ. Pass overwrite=True (--overwrite) to replace it"
            )
        destination.settle()
        results: dict[str, Any] = finished["results"]
        return results

    def is_unfinished_at(self, destination: Destination) -> bool:
        """Whether an interrupted run of this conversion is there. Raises StoreError if it was another one."""
        journal = destination.journal()
        if journal is None:
            return False
        before, now = journal["identity"], self._identity()
        differing = [part for part in now if before.get(part) != now[part]]
        if differing:
            raise StoreError(
                f"cannot resume at {destination.location.url}, because a different conversion was interrupted there: "
                f"{', '.join(differing)} differ ({_difference(before.get(differing[0]), now[differing[0]])}). Repeat "
                "the original arguments, or convert again without --resume"
            )
        return True


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _difference(before: Any, now: Any) -> str:
    """Describes the first difference between two JSON documents."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in now:
            if before.get(key) != now[key]:
                return f"{key}: {_difference(before.get(key), now[key])}"
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return next(_difference(a, b) for a, b in zip(before, now, strict=True) if a != b)
    return f"was {before!r}, now {now!r}"
