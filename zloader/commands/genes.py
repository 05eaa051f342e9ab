"""`zloader genes`: the names of highly variable genes, for `genes=` of a Loader or for other programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from zloader.commands import terminal
from zloader.commands.command import KEYS, app, takes_flags
from zloader.commands.flags import Access, Json, Url
from zloader.common.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class GenesFlags:
    """The flags of `genes`."""

    url: Url
    top: Annotated[int, typer.Option(metavar="N", help="How many genes to choose.")] = 2000
    flavor: Annotated[
        str, typer.Option(help="seurat_v3, which takes counts, or seurat or cell_ranger, which take logarithms.")
    ] = "seurat_v3"
    batch_key: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN", help="obs column: choose genes in the rows of each of its values, and merge the choices."
        ),
    ] = None
    x: Annotated[str, typer.Option("--x", metavar="NAME", help="Matrix: X, layers/NAME or raw/X.")] = "X"
    log_normalize: Annotated[
        float | None,
        typer.Option(
            metavar="TOTAL",
            help="Take logarithms of counts first, scaled to this total per row, such as 1e4.",
            show_default="the matrix as it is",
        ),
    ] = None
    min_cells: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Choose among genes that at least N rows have.", min=1, show_default="all genes"
        ),
    ] = None
    cache: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Cache directory, which also keeps the sums of each gene.")
    ] = None
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the names to a file.", show_default="stdout"),
    ] = None
    access: Access = field(default_factory=Access)
    as_json: Json = False


@app.command(epilog=KEYS)
@takes_flags
def genes(flags: GenesFlags) -> None:
    """Choose highly variable genes as scanpy does, and write their names, one a line, in the order of the store."""
    from zloader.dataset.open_dataset import open_dataset
    from zloader.transforms.normalizing import LogNormalize

    _require_directory(flags.output)
    log = [] if flags.log_normalize is None else [LogNormalize(flags.log_normalize)]
    dataset = open_dataset(flags.url, cache=flags.cache, storage_options=flags.access.storage_options)
    among = None if flags.min_cells is None else dataset.gene_statistics(flags.x).nonzero >= flags.min_cells
    table = dataset.highly_variable_genes(
        flags.top, flavor=flags.flavor, batch_key=flags.batch_key, x=flags.x, genes=among, transforms=log
    )
    names = [str(name) for name in table.index[table["highly_variable"]]]
    document: dict[str, Any] = {"url": flags.url, "rows": dataset.n_obs, "flavor": flags.flavor, "genes": names}

    def show(console: Console) -> None:
        if flags.output is None:
            typer.echo("\n".join(names))
        else:
            console.print(f"{flags.url}: wrote {len(names):,} of {len(table):,} genes to {flags.output}")

    if flags.output is not None:
        _write(flags.output, names)
    terminal.print_result(document, show, as_json=flags.as_json)


def _require_directory(path: Path | None) -> None:
    """Raises OptionError, before rows are read, for a file in a directory that does not exist."""
    if path is not None and not path.parent.is_dir():
        raise OptionError(f"cannot write {path}: there is no directory {path.parent}")


def _write(path: Path, names: list[str]) -> None:
    try:
        path.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error}") from error
