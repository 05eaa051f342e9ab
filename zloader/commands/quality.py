"""`zloader quality`: how well minibatches mix, and how fast they load, by block_size and fetch_factor."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from zloader.commands import terminal
from zloader.commands.command import (
    KEYS,
    Anonymous,
    Debug,
    Endpoint,
    Json,
    Profile,
    Region,
    Url,
    access_flags,
    app,
    print_json,
    storage_options,
)
from zloader.common.errors import OptionError

if TYPE_CHECKING:
    from zloader.commands.quality_grid import Cell, QualityGrid


@app.command("quality", epilog=KEYS)
def quality_command(  # noqa: PLR0913 - one parameter a flag
    url: Url,
    label: Annotated[
        str, typer.Option(metavar="COLUMN", help="obs column whose labels should be mixed.", show_default=False)
    ],
    batch_size: Annotated[int | None, typer.Option(help="Rows per minibatch.", show_default="64")] = None,
    block_sizes: Annotated[str, typer.Option(metavar="A,B", help="Rows per shuffled block.")] = "4,16,64,256",
    fetch_factors: Annotated[str, typer.Option(metavar="A,B", help="Minibatches per fetch.")] = "1,16,64,256",
    x: Annotated[str, typer.Option("--x", metavar="NAME", help="Matrix: X, layers/NAME or raw/X.")] = "X",
    link_speed: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes per second of the link to the store.")
    ] = "400MB",
    measure: Annotated[
        bool, typer.Option("--measure", help="Read the store to measure rows/s, up to 10 s per pair of sizes.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write an HTML page with the figure and the table.")
    ] = None,
    png: Annotated[Path | None, typer.Option(metavar="PATH", help="Write the figure as PNG.")] = None,
    endpoint_url: Endpoint = None,
    region: Region = None,
    profile: Profile = None,
    anon: Anonymous = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show how well minibatches mix the labels of a column, and how fast they load, by block_size and fetch_factor."""
    from zloader.commands import quality_page
    from zloader.commands.page import require_drawable, save_png, write
    from zloader.commands.quality_grid import measured
    from zloader.common.checks import parse_size, require_at_least
    from zloader.dataset.dataset import open_dataset
    from zloader.training.loader import Loader

    sizes = [(block, factor) for block in _counts(block_sizes) for factor in _counts(fetch_factors)]
    require_drawable(html, png)
    _require_two_files(html, png)
    link_bytes_per_s = None if measure else parse_size(link_speed)
    if link_bytes_per_s is not None:
        require_at_least(1, link_speed=link_bytes_per_s)
    access = storage_options(endpoint_url, region, profile, anon)
    dataset = open_dataset(url, storage_options=access)
    loader = Loader(
        dataset, batch_size=Loader.batch_size if batch_size is None else batch_size, x=x, rank=0, world_size=1
    )
    console = terminal.console(stderr=as_json)
    with console.status("measuring"):
        grid = measured(loader, label, sizes, link_bytes_per_s)
    if html is not None:
        flags = access_flags(endpoint_url, region, profile, anon)
        write(quality_page.render(grid, url, access, flags), html)
    if png is not None:
        save_png(quality_page.charts(grid), png)
    if as_json:
        print_json(_document(grid))
    else:
        _show(console, grid, url)


def _document(grid: QualityGrid) -> dict[str, Any]:
    """`default` and `recommended` are cells; `loader` is a line of Python with the recommended sizes."""
    recommended = dataclasses.asdict(grid.recommended)
    return dataclasses.asdict(grid) | {"recommended": recommended, "verdict": grid.verdict, "loader": grid.loader}


def _counts(listed: str) -> list[int]:
    try:
        return sorted({int(number) for number in listed.split(",")})
    except ValueError:
        raise OptionError(f"{listed!r} is not a list of whole numbers: write it like 4,16,64") from None


def _require_two_files(html: Path | None, png: Path | None) -> None:
    if html is not None and png is not None and html.resolve() == png.resolve():
        raise OptionError(f"--html and --png both name {html}: give two paths")


# ---- output


def _show(console: Console, grid: QualityGrid, url: str) -> None:
    console.print(f"{url}: {grid.rows:,} rows by {grid.label}; {grid.random}", soft_wrap=True)
    console.print(
        f"Each cell: bits for blocks in random order (for stratified blocks, the default), rows/s {grid.speed}",
        soft_wrap=True,
    )
    console.print(_table(grid))
    console.print(grid.verdict, soft_wrap=True)
    console.print(f"loader = {grid.loader}", soft_wrap=True)


def _axes_of(grid: QualityGrid) -> tuple[list[int], list[int], dict[tuple[int, int], Cell]]:
    by_sizes = {(cell.block_size, cell.fetch_factor): cell for cell in grid.cells}
    return sorted({block for block, _ in by_sizes}), sorted({factor for _, factor in by_sizes}), by_sizes


def _table(grid: QualityGrid) -> Table:
    """One line per block_size, one column per fetch_factor."""
    blocks, factors, by_sizes = _axes_of(grid)
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("block_size", justify="right")
    for factor in factors:
        table.add_column(f"fetch_factor {factor}", justify="right")
    for block in blocks:
        cells = [by_sizes.get((block, factor)) for factor in factors]
        table.add_row(str(block), *(f"{_bits(cell)}, {cell.rows_per_s:,.0f}" if cell else "" for cell in cells))
    return table


def _bits(cell: Cell) -> str:
    return f"{cell.quality.entropy_bits:.2f} ({cell.stratified.entropy_bits:.2f})"
