"""`zloader quality`: how well minibatches mix, and how fast they load, by block_size and fetch_factor."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from zloader.commands import terminal
from zloader.commands.command import KEYS, app, print_json, takes_flags
from zloader.commands.flags import Access, Json, Url
from zloader.common.errors import OptionError

if TYPE_CHECKING:
    from zloader.commands.quality_grid import Cell, QualityGrid


@dataclass(frozen=True, kw_only=True)
class QualityFlags:
    """The flags of `quality`."""

    url: Url
    label: Annotated[
        str, typer.Option(metavar="COLUMN", help="obs column whose labels should be mixed.", show_default=False)
    ]
    batch_size: Annotated[int | None, typer.Option(help="Rows per minibatch.", show_default="64")] = None
    block_sizes: Annotated[str, typer.Option(metavar="A,B", help="Rows per shuffled block.")] = "4,16,64,256"
    fetch_factors: Annotated[str, typer.Option(metavar="A,B", help="Minibatches per fetch.")] = "1,16,64,256"
    x: Annotated[str, typer.Option("--x", metavar="NAME", help="Matrix: X, layers/NAME or raw/X.")] = "X"
    link_speed: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Bytes per second of the link to the store."),
    ] = "400MB"
    measure: Annotated[
        bool, typer.Option("--measure", help="Read the store to measure rows/s, up to 10 s per pair of sizes.")
    ] = False
    html: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write an HTML page with the figure and the table.")
    ] = None
    png: Annotated[Path | None, typer.Option(metavar="PATH", help="Write the figure as PNG.")] = None
    access: Access = field(default_factory=Access)
    as_json: Json = False

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Pairs of block_size and fetch_factor. Raises OptionError unless they are whole numbers."""
        return [(block, factor) for block in _counts(self.block_sizes) for factor in _counts(self.fetch_factors)]

    @property
    def link_bytes_per_s(self) -> int | None:
        """The speed of the link; None to measure. Raises OptionError for one that cannot be."""
        from zloader.common.checks import parse_size, require_at_least

        if self.measure:
            return None
        n_bytes = parse_size(self.link_speed)
        require_at_least(1, link_speed=n_bytes)
        return n_bytes


@app.command("quality", epilog=KEYS)
@takes_flags
def quality_command(flags: QualityFlags) -> None:
    """Show how well minibatches mix the labels of a column, and how fast they load, by block_size and fetch_factor."""
    from zloader.commands import quality_page
    from zloader.commands.page import require_drawable, save_png, write
    from zloader.commands.quality_grid import measured
    from zloader.dataset.open_dataset import open_dataset
    from zloader.training.loader import Loader

    sizes = flags.sizes
    require_drawable(flags.html, flags.png)
    _require_two_files(flags.html, flags.png)
    link_bytes_per_s, access = flags.link_bytes_per_s, flags.access.storage_options
    dataset = open_dataset(flags.url, storage_options=access)
    batch_size = Loader.batch_size if flags.batch_size is None else flags.batch_size
    loader = Loader(dataset, batch_size=batch_size, x=flags.x, rank=0, world_size=1)
    console = terminal.console(stderr=flags.as_json)
    with console.status("measuring"):
        grid = measured(loader, flags.label, sizes, link_bytes_per_s)
    if flags.html is not None:
        write(quality_page.render(grid, flags.url, access, flags.access.words), flags.html)
    if flags.png is not None:
        save_png(quality_page.charts(grid), flags.png)
    if flags.as_json:
        print_json(_document(grid))
    else:
        _show(console, grid, flags.url)


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
