"""`zloader index`: thousands of stores as one manifest."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated

import typer
from rich.console import Console

from zloader.commands import terminal
from zloader.commands.command import KEYS, app, takes_flags
from zloader.commands.flags import Access, Json


@dataclass(frozen=True, kw_only=True)
class IndexFlags:
    """The flags of `index`."""

    urls: Annotated[
        list[str],
        typer.Argument(metavar="URL...", help="Stores and .h5ad files: paths, URLs or globs.", show_default=False),
    ]
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", metavar="FILE", help="The manifest: a .parquet or .csv file.", show_default=False
        ),
    ]
    genes_by: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="The var column that names the genes.", show_default="var_names"),
    ] = None
    update: Annotated[bool, typer.Option("--update", help="Read only stores that the manifest lacks.")] = False
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the manifest.")] = False
    access: Access = field(default_factory=Access)
    as_json: Json = False


@app.command(epilog=KEYS)
@takes_flags
def index(flags: IndexFlags) -> None:
    """Write a manifest of many stores, which opens them as one dataset without a request."""
    from zloader.dataset.indexing import index as index_stores

    done = index_stores(
        flags.urls,
        flags.output,
        genes_by=flags.genes_by,
        update=flags.update,
        overwrite=flags.overwrite,
        storage_options=flags.access.storage_options,
    )

    def show(console: Console) -> None:
        console.print(
            f"{done.url}: {done.stores:,} stores with {done.rows:,} rows and {done.gene_sets:,} lists of genes"
            + (f"; {done.reused:,} had not changed" if done.reused else "")
        )
        if done.labels:
            console.print(f"labels of stores: {', '.join(done.labels)}")

    terminal.print_result(dataclasses.asdict(done), show, as_json=flags.as_json)
