"""Convert AnnData to sharded Zarr v3, in two passes over windows of rows.

The first pass reads every value once. It validates the sources, finds the smallest lossless dtypes, and counts the
values that remain once the rows are canonical. Nothing at the destination is replaced before it has finished. The
second pass reads the same windows again and stores them. The small elements (obs, var, obsm, varm, obsp, varp, uns) are
written by anndata, one at a time.

The results of the first pass are saved in a journal at the destination, so an interrupted conversion can be resumed:
existing shards are checked and kept, and reading starts at the first missing row.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr

from zloader.access.location import location_of
from zloader.common.errors import OptionError, SourceError, StoreError, StoreExistsError
from zloader.common.keywords import answers
from zloader.common.machine import keep_freed_memory
from zloader.common.messages import listed, printable, warn_user
from zloader.common.progress import Bars, progress_bars
from zloader.conversion.joining.content import SOURCE_ROW
from zloader.conversion.joining.modalities import Part, parts_of
from zloader.conversion.joining.selection import Selection
from zloader.conversion.sources.inputs import Input, Sources, open_inputs, refuse_overlap
from zloader.conversion.sources.windows import SourceMatrix
from zloader.conversion.writing.destination import Destination, PendingStore
from zloader.conversion.writing.elements import DryRunWriter, ElementWriter, library_settings
from zloader.conversion.writing.encode import CHUNK_FORM, ConvertOptions
from zloader.conversion.writing.passes import MatrixScan, MatrixWriter, keeps_dtype, scan_matrix, threads
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
    with contextlib.ExitStack() as opened:
        inputs = [opened.enter_context(source) for source in open_inputs(sources, storage_options=source_options)]
        refuse_overlap(inputs, destination.location)
        parts = parts_of(
            inputs,
            select,
            shuffle_seed=options.shuffle_seed,
            order=options.order,
            bucket_bytes=options.window,
        )
        for lost in dict.fromkeys(part.content.lost_genes for part in parts if part.content.lost_genes):
            warn_user(lost)
        opened.enter_context(library_settings())
        bars = opened.enter_context(progress_bars(shown=progress))
        conversion = _Conversion(inputs, parts, select, options, bars)
        if resume and not all(source.identity() for source in inputs):
            raise OptionError("converting an AnnData in memory cannot be resumed: run it again without resume")
        results = conversion.results_at(destination) if resume and not overwrite else None
        already_complete = results is not None
        if results is None:
            journal = conversion.journal_to_resume(destination) if resume else None
            destination.check(overwrite=overwrite or journal is not None)
            matrices = [
                (part, opened.enter_context(matrix))
                for part in parts
                for matrix in part.content.matrices(options.window)
            ]
            results = conversion.carry_out(destination, matrices, journal)
        return ConversionReport(
            sources=[source.name for source in inputs],
            destination=destination.location.url,
            rows=parts[0].content.n_rows,
            genes=len(parts[0].content.var),
            bytes_in=sum(source.bytes_in for source in inputs),
            bytes_out=sum(destination.objects().values()),
            seconds=time.perf_counter() - started,
            already_complete=already_complete,
            **results,
        )


def _changes(matrix: SourceMatrix, scan: MatrixScan) -> dict[str, str]:
    """The dtypes of the arrays of a matrix that get another one."""
    found = {
        f"{matrix.name}/data": (matrix.dtype, scan.data),
        f"{matrix.name}/indices": (matrix.genes_dtype, scan.indices),
    }
    if matrix.encoding == "dense":
        found = {matrix.name: (matrix.dtype, scan.data)}
    return {name: f"{before} -> {after}" for name, (before, after) in found.items() if before != after}


class _Conversion:
    """The two passes over the content of the sources, which is stored in parts, and what identifies the conversion."""

    def __init__(
        self, inputs: Sequence[Input], parts: Sequence[Part], select: Selection, options: ConvertOptions, bars: Bars
    ) -> None:
        self._inputs, self._parts, self._select = inputs, parts, select
        self._options, self._bars = options, bars
        self._of = listed((source.name for source in inputs), 3)

    def carry_out(
        self, destination: Destination, matrices: Sequence[tuple[Part, SourceMatrix]], journal: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Converts, from the beginning or from where the run of `journal` stopped. Returns fields of the report."""
        self._require_x(matrices)
        scans: list[MatrixScan] = []
        if journal is None:
            for part in self._parts:
                DryRunWriter(self._options, of=self._of).write_content(part.content)
            with destination.claimed():
                for part, matrix in matrices:
                    advance = self._bars.add(f"reading {part.at(matrix.name)}", matrix.n_rows)
                    keep = keeps_dtype(matrix, self._options)
                    scans.append(scan_matrix(matrix, keep_dtype=keep, advance=advance))
        else:
            scans = [MatrixScan.of_record(journal["scans"][part.at(matrix.name)]) for part, matrix in matrices]
        scanned = [(part, matrix, scan) for (part, matrix), scan in zip(matrices, scans, strict=True)]
        new_journal = {
            "identity": self._identity(),
            "scans": {part.at(matrix.name): scan.record() for part, matrix, scan in scanned},
        }
        with destination.replaced(new_journal, resuming=journal is not None) as store:
            root = self.write(destination, store, scanned)
            results = self._results(scanned)
            root.attrs["zloader"] = {
                "version": importlib.metadata.version("zloader"),
                "sources": [{"label": source.label, "rows": source.n_rows} for source in self._inputs],
                "select": self._select.recorded(),
                "shuffle_seed": self._options.shuffle_seed,
                **({} if self._options.order is None else {"order": SOURCE_ROW}),
                "conversion": {"record": self._record(), "results": results},
            }
            zarr.consolidate_metadata(store)
        return results

    def _require_x(self, matrices: Sequence[tuple[Part, SourceMatrix]]) -> None:
        """Raises SourceError for an AnnData without X."""
        if len(self._parts) > 1 or (matrices and matrices[0][1].name == "X"):
            return
        source = self._inputs[0]
        layers = ", ".join(f"layers/{layer}" for layer in source.keys("layers")) or "no layers either"
        raise SourceError(
            f"{source.name} has no X, so there is nothing to train on. It holds: {layers}. Choose another "
            "matrix as X with select=zl.Selection(x=...) (--x)"
        )

    def _results(self, scanned: Sequence[tuple[Part, SourceMatrix, MatrixScan]]) -> dict[str, Any]:
        changes = {
            part.at(name): dtypes for part, matrix, scan in scanned for name, dtypes in _changes(matrix, scan).items()
        }
        return {
            "values": sum(scan.n_values for _, matrix, scan in scanned if matrix.name == "X"),
            "dtypes_changed": changes,
            "rows_made_canonical": {part.at(matrix.name): scan.mended for part, matrix, scan in scanned if scan.mended},
            "dropped": [part.at(path) for part in self._parts for path in part.content.dropped],
        }

    def write(
        self, destination: Destination, store: PendingStore, scanned: Sequence[tuple[Part, SourceMatrix, MatrixScan]]
    ) -> zarr.Group:
        """The second pass: writes the small elements, then every matrix. Returns the root."""
        existing, groups = destination.objects(), {}
        for part in self._parts:
            group = zarr.create_group(store, path=part.path, zarr_format=3, attributes=dict(part.attributes))
            ElementWriter(group, self._options, of=self._of).write_content(part.content)
            groups[part.path] = group
        with threads(destination.location.url) as pool:
            for part, matrix, scan in scanned:
                writer = MatrixWriter(
                    root=groups[part.path],
                    location=destination.location,
                    options=self._options,
                    threads=pool,
                    bars=self._bars,
                    create_object=destination.create_object,
                    existing=existing,
                )
                writer.store(matrix, scan)
        return groups[""]

    # --- What it was made from

    def _identity(self) -> dict[str, Any]:
        """Everything that determines the bytes of the store, as plain JSON types."""
        options = dataclasses.asdict(dataclasses.replace(self._options, order=None))
        del options["memory"], options["window_bytes"], options["order"]
        if self._options.order is not None:
            options["order"] = hashlib.sha256(np.asarray(self._options.order).tobytes()).hexdigest()[:32]
        renamed = [json.dumps(source.genes_by, sort_keys=True) for source in self._inputs]
        whole = {
            "version": importlib.metadata.version("zloader"),
            "chunk_form": CHUNK_FORM,
            "sources": [source.identity() | {"label": source.label} for source in self._inputs],
            "select": self._select.plain([_digest(by) for by in renamed] if set(renamed) != {"null"} else None),
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
        if differing:
            raise StoreExistsError(
                f"there is already a store at {destination.location.url}, made by another conversion: "
                f"{', '.join(differing)} differ. Pass overwrite=True (--overwrite) to replace it"
            )
        results: dict[str, Any] = finished["results"]
        return results

    def journal_to_resume(self, destination: Destination) -> dict[str, Any] | None:
        """The journal of an interrupted run of this conversion, or None. Raises StoreError if it was another one."""
        journal = destination.journal()
        if journal is None:
            return None
        before, now = journal["identity"], self._identity()
        differing = [part for part in now if before.get(part) != now[part]]
        if differing:
            raise StoreError(
                f"cannot resume at {destination.location.url}, because a different conversion was interrupted there: "
                f"{', '.join(differing)} differ ({_difference(before.get(differing[0]), now[differing[0]])}). Repeat "
                "the original arguments, or convert again without --resume"
            )
        return journal


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
