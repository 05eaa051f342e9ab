"""`zloader quality`: how well minibatches mix, and how fast they load, by block_size and fetch_factor.

Mixing is computed from the plan alone (dataset/quality.py). The loading speed is computed from the link's speed and the
bytes that an epoch reads (dataset/cost.py), or measured by reading the store. Both are for epochs without a mirror: the
speed of warm epochs depends little on these sizes.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
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
    app,
    print_json,
    storage_options,
)
from zloader.common.errors import OptionError, ZloaderError

if TYPE_CHECKING:
    from zloader.dataset.quality import Quality
    from zloader.training.loader import Loader

# Count the reads of at most this many rows per pair of sizes, which takes a few seconds for short fetches.
_COUNTED_ROWS = 1_000_000
_MEASURED_S = 10.0  # per epoch, at most


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Mixing and cost of one pair of sizes. GETs and bytes are per epoch without a mirror.

    `quality` is for blocks in random order, as in scDataset; `stratified` is for the Loader's default sampling.
    """

    block_size: int
    fetch_factor: int
    rows_per_s: float
    gets: int
    bytes_read: int
    quality: Quality
    stratified: Quality


@dataclass(frozen=True, kw_only=True)
class QualityGrid:
    """One cell per valid pair of sizes. `link_bytes_per_s` is None if the speed was measured."""

    url: str
    label: str
    x: str
    rows: int
    batch_size: int
    link_bytes_per_s: int | None
    cells: Sequence[Cell]

    @property
    def speed(self) -> str:
        """How the cells' `rows_per_s` were obtained."""
        if self.link_bytes_per_s is None:
            return "measured without a mirror"
        return f"at {self.link_bytes_per_s / 1e6:,g} MB/s without a mirror"

    @property
    def random(self) -> str:
        """The entropy of random minibatches."""
        return f"random minibatches of {self.batch_size} have {self.cells[0].quality.random_entropy_bits:.2f} bits"


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
    from zloader.common.checks import parse_size, require_at_least
    from zloader.dataset.dataset import open_dataset
    from zloader.training.loader import Loader

    sizes = [(block, factor) for block in _counts(block_sizes) for factor in _counts(fetch_factors)]
    _require_drawable(html, png)
    link_bytes_per_s = None if measure else parse_size(link_speed)
    if link_bytes_per_s is not None:
        require_at_least(1, link_speed=link_bytes_per_s)
    dataset = open_dataset(url, storage_options=storage_options(endpoint_url, region, profile, anon))
    loader = Loader(
        dataset, batch_size=Loader.batch_size if batch_size is None else batch_size, x=x, rank=0, world_size=1
    )
    console = terminal.console(stderr=as_json)
    with console.status("measuring"):
        grid = measured(loader, label, sizes, link_bytes_per_s)
    if html is not None:
        html.write_text(_page(grid), encoding="utf-8")
    if png is not None:
        _draw(grid, png, format="png", dpi=150)
    if as_json:
        print_json(dataclasses.asdict(grid))
        return
    console.print(f"{url}: {grid.rows:,} rows by {label}; {grid.random}", soft_wrap=True)
    console.print(
        f"Each cell: bits for blocks in random order (for stratified blocks, the default), rows/s {grid.speed}",
        soft_wrap=True,
    )
    console.print(_table(grid))


def _counts(listed: str) -> list[int]:
    try:
        return sorted({int(number) for number in listed.split(",")})
    except ValueError:
        raise OptionError(f"{listed!r} is not a list of whole numbers: write it like 4,16,64") from None


def _require_drawable(*paths: Path | None) -> None:
    """Raises an error before the measurement, not after it."""
    given = [path for path in paths if path is not None]
    if given and importlib.util.find_spec("matplotlib") is None:
        raise ZloaderError('drawing needs matplotlib; install it with: pip install "zloader[demo]"')
    for path in given:
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK) or path.is_dir():
            raise OptionError(f"cannot write {path}: give the path of a file in an existing directory")
    if len({path.resolve() for path in given}) < len(given):
        raise OptionError(f"--html and --png both name {given[0]}: give two paths")


def measured(loader: Loader, label: str, sizes: Sequence[tuple[int, int]], link_bytes_per_s: int | None) -> QualityGrid:
    """One cell per (block_size, fetch_factor) in `sizes`, except where a block is larger than a fetch.

    The speed is the link's limit, or is measured if `link_bytes_per_s` is None. Raises OptionError for a column without
    labels, or if no pair of sizes is valid.
    """
    from zloader.dataset.cost import epoch_costs
    from zloader.dataset.quality import quality
    from zloader.order.sampling import BlockShuffling, Streaming, stratified

    dataset = loader.dataset
    codes = dataset.obs_column(label).values
    if codes.dtype.kind == "f":
        raise OptionError(f"obs column {label!r} holds {codes.dtype}: name a column of labels or whole numbers")
    if link_bytes_per_s is None:  # finishes imports and compilation before measuring
        _rows_per_s(dataclasses.replace(loader, sampling=Streaming(indices=[0])))
    cells = []
    for block_size, fetch_factor in sizes:
        if block_size > loader.batch_size * fetch_factor:
            continue
        each = dataclasses.replace(loader, fetch_factor=fetch_factor, sampling=BlockShuffling(block_size))
        plan = each.plan(0)
        most = max(1, _COUNTED_ROWS // plan.fetch_rows)
        cost = epoch_costs(dataset, plan, x=str(loader.x), options=loader.options, most_fetches=most).unmirrored
        speed = plan.n_rows * link_bytes_per_s / max(1, cost.bytes_read) if link_bytes_per_s else _rows_per_s(each)
        cells.append(
            Cell(
                block_size=block_size,
                fetch_factor=fetch_factor,
                rows_per_s=speed,
                gets=cost.gets,
                bytes_read=cost.bytes_read,
                quality=quality(codes, plan),
                stratified=quality(codes, dataclasses.replace(plan, sampling=stratified(block_size))),
            )
        )
    if not cells:
        raise OptionError("every block is larger than every fetch: raise fetch_factors or lower block_sizes")
    return QualityGrid(
        url=dataset.url,
        label=label,
        x=str(loader.x),
        rows=dataset.n_obs,
        batch_size=loader.batch_size,
        link_bytes_per_s=link_bytes_per_s,
        cells=cells,
    )


def _rows_per_s(loader: Loader) -> float:
    """Rows per second of an epoch, or of its first 10 seconds."""
    began = time.perf_counter()
    for _ in loader:
        if time.perf_counter() - began > _MEASURED_S:
            break
    return loader.statistics().rows_per_s


# ---- output


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


def _figure(grid: QualityGrid) -> Any:
    """A heat map of entropy by sizes, and a plot of entropy against speed with dashed lines for stratified blocks."""
    import numpy as np
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    blocks, factors, by_sizes = _axes_of(grid)
    entropies = np.full((len(blocks), len(factors)), np.nan)
    for (block, factor), cell in by_sizes.items():
        entropies[blocks.index(block), factors.index(factor)] = cell.quality.entropy_bits
    random = grid.cells[0].quality.random_entropy_bits
    most = max(0.1, random, *(of.entropy_bits for cell in grid.cells for of in (cell.quality, cell.stratified)))
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    sizes, speeds = figure.subplots(1, 2)
    darkest = 1.6 * max(random, 0.1)  # cells stay light enough for dark text
    sizes.imshow(entropies, cmap="Blues", vmin=0, vmax=darkest, aspect="auto")
    for row, column in np.ndindex(entropies.shape):
        found = by_sizes.get((blocks[row], factors[column]))
        sizes.text(column, row, _bits(found) if found else "", ha="center", va="center")
    sizes.set_xticks(range(len(factors)), map(str, factors))
    sizes.set_yticks(range(len(blocks)), map(str, blocks))
    sizes.set(xlabel="fetch_factor", ylabel="block_size")
    sizes.set_title(f"entropy of {grid.label}, bits (stratified)", parse_math=False)
    for block in blocks:
        line = [cell for cell in grid.cells if cell.block_size == block]
        x = [cell.rows_per_s for cell in line]
        (drawn,) = speeds.plot(x, [cell.quality.entropy_bits for cell in line], "o-", label=f"blocks of {block}")
        speeds.plot(x, [cell.stratified.entropy_bits for cell in line], "o--", color=drawn.get_color(), alpha=0.5)
    speeds.plot([], [], "o--", color="gray", alpha=0.5, label="dashed: stratified")
    speeds.axhline(random, color="gray", linestyle=":", label="random rows")
    speeds.set(xlabel=f"rows/s {grid.speed}", ylabel="entropy, bits", ylim=(-0.05 * most, 1.05 * most))
    speeds.xaxis.set_major_formatter(EngFormatter(sep=""))  # 20M
    speeds.legend()
    return figure


def _draw(grid: QualityGrid, to: Path | StringIO, **options: Any) -> None:
    """Draws the figure. Characters that the font lacks become boxes, without a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from|Matplotlib currently does not support", UserWarning)
        _figure(grid).savefig(to, **options)


def _page(grid: QualityGrid) -> str:
    """One HTML file without scripts or external resources."""
    import matplotlib as mpl

    drawn = StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "quality"}):
        _draw(grid, drawn, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = drawn.getvalue()
    head = ("block_size", "fetch_factor", "entropy, bits", "entropy, stratified", "row distance within",
            "row distance across", "longest run", "same-block share", "GETs", "MB", "rows/s")  # fmt: skip
    body = (f"<tr>{''.join(f'<td>{value}</td>' for value in _figures(cell))}</tr>" for cell in grid.cells)
    title = escape(f"{grid.url}: {grid.rows:,} rows by {grid.label}")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        "<style>body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#1c2024;"
        "background:#fff}svg{width:100%;height:auto}td,th{text-align:right;padding:.2rem .8rem;font-weight:400}"
        "th{color:#5b636d}</style>"
        f"<h1>{title}</h1><p>For comparison, {escape(grid.random)}. Rows/s are {escape(grid.speed)}. "
        "A Loader uses stratified blocks (dashed lines) by default. The other measures of mixing are for blocks in "
        "random order. A row distance is 0 for rows in order and 1 for random rows. GETs and MB are per epoch.</p>"
        f"{svg[svg.index('<svg') :]}<table><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr>{''.join(body)}"
        "</table></html>\n"
    )


def _figures(cell: Cell) -> list[str]:
    quality = cell.quality
    distances = ["" if score is None else f"{score:.3f}" for score in (quality.l1_within, quality.l1_across)]
    entropies = [f"{of.entropy_bits:.2f} ± {of.entropy_sd_bits:.2f}" for of in (quality, cell.stratified)]
    costs = [f"{cell.gets:,}", f"{cell.bytes_read / 1e6:,.1f}", f"{cell.rows_per_s:,.0f}"]
    mixing = [*distances, str(quality.longest_run), f"{quality.same_block_share:.4f}"]
    return [str(cell.block_size), str(cell.fetch_factor), *entropies, *mixing, *costs]
