"""`zloader quality`: how well minibatches mix, and how fast they load, by block_size and fetch_factor."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from zloader.commands import terminal
from zloader.commands.command import KEYS, app, takes_flags
from zloader.commands.flags import Access, Json, Url, speed_of
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
    link_speed: Annotated[str, typer.Option(metavar="SIZE", help="Bytes per second of the link to the store.")] = (
        "400MB"
    )
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


@app.command("quality", epilog=KEYS)
@takes_flags
def quality_command(flags: QualityFlags) -> None:
    """Show how well minibatches mix the labels of a column, and how fast they load, by block_size and fetch_factor."""
    from zloader.commands.charts import save_png
    from zloader.commands.quality_grid import measured
    from zloader.commands.quality_report import charts, report
    from zloader.commands.report import require_drawable
    from zloader.dataset.open_dataset import open_dataset
    from zloader.training.loader import Loader

    sizes = flags.sizes
    require_drawable(flags.html, flags.png)
    _require_two_files(flags.html, flags.png)
    link_bytes_per_s = None if flags.measure else speed_of(link_speed=flags.link_speed)
    access = flags.access.storage_options
    dataset = open_dataset(flags.url, storage_options=access)
    batch_size = Loader.batch_size if flags.batch_size is None else flags.batch_size
    loader = Loader(dataset, batch_size=batch_size, x=flags.x, rank=0, world_size=1)
    with terminal.console(stderr=flags.as_json).status("measuring"):
        grid = measured(loader, flags.label, sizes, link_bytes_per_s)
    if flags.html is not None:
        report(grid, flags.url, access, flags.access.words).write(flags.html)
    if flags.png is not None:
        save_png(charts(grid), flags.png)
    terminal.print_result(_document(grid), lambda console: _show(console, grid, flags.url), as_json=flags.as_json)


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


def _show(console: Console, grid: QualityGrid, url: str) -> None:
    console.print(f"{url}: {grid.rows:,} rows by {grid.label}; {grid.random}")
    console.print(
        f"Each cell: bits for blocks in random order (for stratified blocks, the default), rows/s {grid.speed}"
    )
    by_sizes = {cell.sizes: cell for cell in grid.cells}
    blocks, factors = (sorted({sizes[axis] for sizes in by_sizes}) for axis in (0, 1))
    table = terminal.new_table(">block_size", *(f">fetch_factor {factor}" for factor in factors))
    for block in blocks:
        cells = [by_sizes.get((block, factor)) for factor in factors]
        table.add_row(str(block), *(f"{_bits(cell)}, {cell.rows_per_s:,.0f}" if cell else "" for cell in cells))
    console.print(table)
    console.print(grid.verdict)
    console.print(f"loader = {grid.loader}")


def _bits(cell: Cell) -> str:
    return f"{cell.quality.entropy_bits:.2f} ({cell.stratified.entropy_bits:.2f})"
