"""The entry point of the `zloader` program, with the command `info`.

The other commands register themselves on import: convert and verify in convert.py, bench in bench.py, demo in demo.py,
doctor in doctor.py, warm and cache in cache.py.

Results go to stdout, progress and errors to stderr. With --json, stdout is one JSON document. Each command imports the
modules that take seconds to import, so that `zloader --help` stays fast.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from zloader.commands import bench as cli_bench
from zloader.commands import cache as cli_cache
from zloader.commands import convert as cli_convert
from zloader.commands import demo as cli_demo
from zloader.commands import doctor as cli_doctor
from zloader.commands import output
from zloader.commands.command import KEYS, app, takes_flags
from zloader.commands.flags import Access, Json, LoaderSizes, Matrices, Url, x_of
from zloader.common.errors import FormatError, OptionError
from zloader.common.machine import available_bytes
from zloader.common.messages import size

if TYPE_CHECKING:
    from zloader.dataset.dataset import Dataset
    from zloader.insight.cost import EpochCosts
    from zloader.insight.summary import MatrixSummary, StoreSummary

# Importing these modules registers their commands.
__all__ = [
    "app",
    "cli_bench",
    "cli_cache",
    "cli_convert",
    "cli_demo",
    "cli_doctor",
]

# ---- info


@dataclass(frozen=True, kw_only=True)
class InfoFlags:
    """The flags of `info`."""

    url: Url
    x: Matrices = None
    loader_sizes: LoaderSizes = field(default_factory=LoaderSizes)
    group: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="Sets of rows that agree in this obs column; give it again for several."),
    ] = None
    set_size: Annotated[int, typer.Option(help="Rows per set, with --group.")] = 64
    controls: Annotated[
        str | None, typer.Option(metavar="EXPRESSION", help="A control for each row, such as \"drug == 'DMSO'\".")
    ] = None
    match: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="The obs column in which controls agree with their rows."),
    ] = None
    access: Access = field(default_factory=Access)
    as_json: Json = False

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the loader, by name. A minibatch of sets has one set, unless --batch-size says otherwise."""
        sizes = self.loader_sizes
        if self.group and sizes.batch_size is None:
            sizes = dataclasses.replace(sizes, batch_size=self.set_size)
        return sizes.by_name

    def order(self, block_size: int) -> dict[str, Any]:
        """The sampling and the controls of a Loader."""
        from zloader.order.cell_sets import CellSets
        from zloader.order.companions import MatchedControls
        from zloader.order.shuffling import stratified

        if self.match and self.controls is None:
            raise OptionError("--match goes with --controls")
        return {
            "sampling": CellSets(self.group, self.set_size) if self.group else stratified(block_size),
            "controls": None if self.controls is None else MatchedControls(self.controls, match=self.match or []),
        }


@app.command(epilog=KEYS)
@takes_flags
def info(flags: InfoFlags) -> None:
    """Show what a store contains, and how many GETs and bytes a training epoch takes."""
    from zloader.dataset.dataset import open_dataset
    from zloader.insight.summary import summarize

    sizes, wanted = flags.sizes, x_of(flags.x)
    order = flags.order(sizes["block_size"])
    dataset = open_dataset(flags.url, storage_options=flags.access.storage_options)
    summary = summarize(dataset)
    try:
        costs, problem = _costs(dataset, wanted, sizes, order), None
    except FormatError as error:
        costs, problem = None, str(error)
    named = {"group": flags.group, "set_size": flags.set_size} if flags.group else {}
    named |= {"controls": flags.controls, "match": flags.match} if flags.controls else {}
    epoch = {"x": wanted, **sizes, **named, "problem": problem} | ({} if costs is None else dataclasses.asdict(costs))

    def show(console: Console) -> None:
        _show_store(console, summary)
        if costs is None:
            console.print(f"cannot estimate an epoch: {problem}")
            return
        blocks = f"sets of {flags.set_size:,}" if flags.group else f"blocks of {sizes['block_size']:,}"
        order_of_rows = f"{blocks}, a control for each row" if flags.controls else blocks
        _show_costs(console, costs, ", ".join(flags.x or ["X"]), sizes, order_of_rows)

    output.print_result(dataclasses.asdict(summary) | {"epoch": epoch}, show, as_json=flags.as_json)
    if costs is None and wanted != "X":  # the user named this matrix
        raise typer.Exit(1)


def _costs(dataset: Dataset, x: str | list[str], sizes: dict[str, int], order: dict[str, Any]) -> EpochCosts:
    from zloader.insight.cost import epoch_costs
    from zloader.training.loader import Loader

    if not dataset.n_obs:
        raise FormatError(f"{dataset.url} has no rows to load")
    loader = Loader(
        dataset,
        batch_size=sizes["batch_size"],
        fetch_factor=sizes["fetch_factor"],
        x=x,
        rank=0,
        world_size=1,
        **order,
    )
    return epoch_costs(dataset, loader.plan(0), x=x, options=loader.options)


def _show_store(console: Console, summary: StoreSummary) -> None:
    facts = output.new_table("", "")
    facts.show_header, facts.columns[0].style = False, "bold"
    for name, fact in (
        ("store", summary.url),
        ("rows x genes", f"{summary.rows:,} x {summary.genes:,}"),
        ("objects", f"{summary.objects:,}, {size(summary.stored_bytes)} in all"),
        ("other elements", ", ".join(summary.others)),
        ("fingerprint", summary.fingerprint),
    ):
        if fact:
            facts.add_row(name, fact)
    console.print(facts)
    obs = output.new_table("obs column", "kind", ">categories")
    for column in summary.obs:
        obs.add_row(column.name, column.kind, "" if column.categories is None else f"{column.categories:,}")
    if summary.obs:
        console.print(obs)
    for matrix in summary.matrices:
        _show_matrix(console, matrix)


def _show_matrix(console: Console, matrix: MatrixSummary) -> None:
    console.line()
    console.print(
        f"{matrix.name}: {matrix.encoding}, {matrix.rows:,} x {matrix.genes:,}, "
        f"{matrix.values:,} values ({matrix.density:.2%})"
        + (f", {matrix.bytes_per_value:.2f} bytes per value" if matrix.bytes_per_value else ""),
        style="bold",
    )
    if matrix.problem:
        console.print(matrix.problem)
        return
    table = output.new_table(
        "array", "dtype", ">values per chunk", ">chunks per shard", ">shards", ">stored", ">decoded", "codecs"
    )
    for array in matrix.arrays:
        narrowed = "" if array.dtype == array.original_dtype else f" (was {array.original_dtype})"
        table.add_row(
            array.path,
            array.dtype + narrowed,
            f"{array.chunk_elements:,} (~{array.rows_per_chunk:,.0f} rows)",
            f"{array.chunks_per_shard:,}",
            f"{array.shards:,}",
            size(array.stored_bytes),
            size(array.decoded_bytes),
            array.codecs,
        )
    console.print(table)
    for array in matrix.arrays:
        if array.chunks_per_row > 1:
            stored = int(array.stored_bytes / math.ceil(matrix.rows / array.rows_per_chunk))
            decoded = array.chunks_per_row * array.chunk_elements * array.decoded_bytes // array.elements
            console.print(
                f"A row needs {array.chunks_per_row:,} chunks, which hold parts of ~{array.rows_per_chunk:,.0f} rows: "
                f"{size(stored)} stored, {size(decoded)} decoded. A cache reads each chunk once, and 'zloader convert' "
                "writes chunks of whole rows."
            )
    about = "at most about" if matrix.at_most else "about"
    stored = sum(array.stored_bytes for array in matrix.arrays)
    forms = (f"{size(matrix.decoded_bytes)} raw", f"{about} {size(matrix.compact_bytes)} compact")
    console.print(f"mirror: {', '.join(forms)}, {size(stored)} as stored")
    if matrix.compact_bytes < matrix.decoded_bytes > available_bytes():
        console.print(
            f"Raw rows are more than the {size(available_bytes())} of memory here. Compact rows "
            '(zl.Cache(form="compact")) read less from the disk in every warm epoch.'
        )


def _show_costs(console: Console, costs: EpochCosts, x: str, sizes: dict[str, int], order: str) -> None:
    fetch_rows = sizes["batch_size"] * sizes["fetch_factor"]
    console.line()
    console.print(
        f"Epoch over {x}: minibatches of {sizes['batch_size']:,} rows, fetches of {fetch_rows:,}, {order}",
        style="bold",
    )
    table = output.new_table("", ">GETs", ">bytes")
    first, every = costs.first_mirrored, costs.unmirrored
    about = "" if every.exact else "about "
    table.add_row("without a mirror, every epoch", f"{about}{every.gets:,}", f"{about}{size(every.bytes_read)}")
    table.add_row("with a mirror, the first epoch", f"{about}{first.gets:,}", f"{about}{size(first.bytes_read)}")
    table.add_row("with a mirror, each later epoch", "0", "0 B")
    console.print(table)
    console.print("Excludes metadata, indptr, and the columns of obs and obsm.", style="dim")
