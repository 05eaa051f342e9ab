"""The report and the figure of `zloader quality`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from zloader.commands.charts import LIGHT, SERIES, WARM, Chart, draw_heat_map
from zloader.commands.quality_grid import FAIR_PERCENT, GOOD_PERCENT, Cell, QualityGrid
from zloader.commands.report import Report, Section, Table, try_next
from zloader.common.messages import size

_MARKERS = "osD^vP"
_COLUMNS = ("block_size × fetch_factor", "entropy, bits", "% of random", "without strata, bits",
            "row distance within", "row distance across", "longest run", "same-block share", "GETs", "read",
            "rows/s")  # fmt: skip


def charts(grid: QualityGrid) -> list[Chart]:
    """A heat map of the entropy by sizes, and a plot of the entropy against the speed."""
    return [_mixing(grid), _mixing_and_speed(grid)]


def report(grid: QualityGrid, url: str, storage_options: Mapping[str, Any], flags: Sequence[str]) -> Report:
    """The report. `url` and `storage_options` open the store; `flags` are those of the commands that do."""
    default = grid.default
    caption = f"For comparison, {grid.random}. Rows/s are {grid.speed}."
    return Report(
        title=f"{grid.url}: {grid.rows:,} rows by {grid.label}",
        verdict=[grid.verdict],
        text=[
            f"The defaults of zl.Loader are block_size={default.block_size} and fetch_factor={default.fetch_factor}."
        ],
        code=_python(grid, url, storage_options),
        tiles=_tiles(grid),
        sections=[
            Section(title="What entropy is, and what is good", terms=_terms(grid)),
            Section(title="Mixing and speed", charts=charts(grid)),
            Section(
                title="All figures", tables=[Table(caption, _COLUMNS, [_row(grid, cell) for cell in _cells(grid)])]
            ),
            Section(title="What the columns mean", terms=_COLUMN_TERMS),
            try_next(_commands(grid, url, flags)),
        ],
    )


def _tiles(grid: QualityGrid) -> list[tuple[str, str]]:
    default = grid.default
    return [
        (f"{default.percent}%", "of the entropy of random minibatches, in the default order"),
        (f"{default.stratified.entropy_bits:.2f} bits", "entropy of minibatches in the default order"),
        (f"{grid.random_bits:.2f} bits", f"entropy of random minibatches of {grid.batch_size}"),
        (f"{default.rows_per_s:,.0f}", f"rows/s with the default sizes, {grid.speed}"),
    ]


def _terms(grid: QualityGrid) -> Mapping[str, str]:
    return {
        "Entropy": f"How mixed the labels of a minibatch are, in bits. It is 0 if all {grid.batch_size} rows have the "
        f"same {grid.label}. It grows with the number of labels, and is highest if they are equally frequent. A model "
        "learns badly from minibatches whose rows are too much alike.",
        "Random": f"Rows drawn at random are the standard to compare with. Here, {grid.random}. A little over 100% is "
        "possible, because strata spread the rows more evenly than chance does.",
        "What is good": f"{GOOD_PERCENT}% of random or more is good, and {FAIR_PERCENT}% or more is fair. Below that, "
        "take other sizes, or shuffle the rows once when you convert.",
        "Sizes": "A Loader reads blocks of block_size neighbouring rows, and mixes the rows of fetch_factor "
        "minibatches in memory. Smaller blocks and larger fetches mix better. Larger blocks load faster. Larger "
        "fetches take more memory.",
    }


_COLUMN_TERMS = {
    "entropy, bits": "Mean and standard deviation over minibatches, for the stratified blocks that a Loader takes by "
    "default.",
    "without strata": "The same mean for blocks in random order. The columns after it are for such blocks too.",
    "row distance": "How far apart in the store the rows are, within a minibatch and across successive ones: 0 for "
    "rows in order, 1 for random rows.",
    "longest run": "The most neighbouring rows of the store in one minibatch.",
    "same-block share": "The share of the pairs of rows in a minibatch that come from the same block.",
    "GETs, read": "Reads from the store, and the bytes read, per epoch without a mirror. Strata change them little.",
}


def _cells(grid: QualityGrid) -> list[Cell]:
    """The cells, the default among them."""
    return sorted({cell.sizes: cell for cell in [*grid.cells, grid.default]}.values(), key=lambda cell: cell.sizes)


def _row(grid: QualityGrid, cell: Cell) -> list[str]:
    quality, of = cell.quality, cell.stratified
    distances = ["" if score is None else f"{score:.3f}" for score in (quality.l1_within, quality.l1_across)]
    entropies = [f"{of.entropy_bits:.2f} ± {of.entropy_sd_bits:.2f}", f"{cell.percent}%", f"{quality.entropy_bits:.2f}"]
    mixing = [*distances, str(quality.longest_run), f"{quality.same_block_share:.4f}"]
    costs = [f"{cell.gets:,}", size(cell.bytes_read), f"{cell.rows_per_s:,.0f}"]
    marks = [
        name for name, of in (("default", grid.default), ("recommended", grid.recommended)) if of.sizes == cell.sizes
    ]
    sizes = _sizes(cell) + (f" ({', '.join(marks)})" if marks else "")
    return [sizes, *entropies, *mixing, *costs]


# ---- charts


def _mixing(grid: QualityGrid) -> Chart:
    cells = _cells(grid)
    palest = min(FAIR_PERCENT, *(cell.percent for cell in cells))

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        drawn: dict[tuple[float, float], tuple[float, str]] = {}
        for cell in cells:
            strength = min(1.0, (cell.percent - palest) / (100 - palest))
            drawn[cell.sizes] = (strength, f"{cell.stratified.entropy_bits:.2f} bits\n{cell.percent}%")
        draw_heat_map(axes, drawn, {name: (cell.sizes, colour) for cell, name, colour in _marked(grid)})
        axes.set_xlabel("fetch_factor (minibatches per fetch)")
        axes.set_ylabel("block_size (rows per block)")
        figure.legend(handles=axes.get_legend_handles_labels()[0], loc="outside lower left", ncols=2)

    return Chart(
        name="mixing",
        title=f"Entropy of {grid.label}, and percent of random",
        description="; ".join(
            f"block_size {cell.block_size}, fetch_factor {cell.fetch_factor}: {cell.stratified.entropy_bits:.2f} bits, "
            f"{cell.percent}% of random"
            for cell in cells
        ),
        caption="Darker cells mix better. Empty cells have blocks larger than a fetch, or were not asked for.",
        draw=draw,
    )


def _marked(grid: QualityGrid) -> list[tuple[Cell, str, str]]:
    """The default cell and, if it is another one, the recommended cell; with their names and colours."""
    default, best = grid.default, grid.recommended
    marked = [(default, f"default of zl.Loader ({_sizes(default)})", WARM)]
    if best.sizes != default.sizes:
        marked.append((best, f"recommended ({_sizes(best)})", LIGHT["green"]))
    return marked


def _sizes(cell: Cell) -> str:
    return f"{cell.block_size} × {cell.fetch_factor}"


def _mixing_and_speed(grid: QualityGrid) -> Chart:
    cells = [cell for cell in _cells(grid) if not _repeats(grid, cell)]
    random = grid.random_bits
    bits = [random, *(of.entropy_bits for cell in cells for of in (cell.quality, cell.stratified))]
    least = 0.05 * max(random, 0.5)  # so that chance does not look like a difference
    room = max(least, 0.08 * (max(bits) - min(bits)))

    def draw(figure: Any) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.ticker import EngFormatter

        axes = figure.subplots()
        axes.set_ylim(min(bits) - room, max(bits) + room)
        for number, block in enumerate(sorted({cell.block_size for cell in cells})):
            _draw_line(axes, [cell for cell in cells if cell.block_size == block], number)
        axes.axhline(random, color=LIGHT["quiet"], linestyle=":", label=f"random rows, {random:.2f} bits")
        for cell, name, colour in _marked(grid):
            axes.plot([cell.rows_per_s], [cell.stratified.entropy_bits], "o", markersize=12, markerfacecolor="none",
                      markeredgecolor=colour, markeredgewidth=2, label=name.partition(" (")[0])  # fmt: skip
        axes.margins(x=0.08)
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 20M
        axes.set_xlabel(f"speed (rows per second, {grid.speed})")
        axes.set_ylabel(f"entropy of {grid.label} (bits)")
        if random > 0:
            percent = axes.secondary_yaxis("right", functions=(lambda y: 100 * y / random, lambda y: y * random / 100))
            percent.set_ylabel("percent of random (%)")
        dashed = Line2D([], [], color=LIGHT["quiet"], linestyle="--", alpha=0.6, label="dashed: without strata")
        figure.legend(handles=[*axes.get_legend_handles_labels()[0], dashed], loc="outside lower left", ncols=2)

    return Chart(
        name="speed",
        title=f"Entropy of {grid.label} against speed",
        description="; ".join(
            f"block_size {cell.block_size}, fetch_factor {cell.fetch_factor}: {cell.rows_per_s:,.0f} rows per second"
            for cell in cells
        ),
        caption="The upper right is best. Each point is a fetch_factor; larger points are larger fetches."
        + (" A fetch that holds the whole store is shown once." if len(cells) < len(_cells(grid)) else "")
        + (" The axis of the entropy does not begin at 0." if min(bits) > room else ""),
        draw=draw,
    )


def _repeats(grid: QualityGrid, cell: Cell) -> bool:
    """Whether another cell with the same blocks and a smaller fetch holds the whole store already.

    The default cell is always shown.
    """
    smaller = [c.fetch_factor for c in _cells(grid) if c.block_size == cell.block_size and c.sizes < cell.sizes]
    whole = any(factor * grid.batch_size >= grid.rows for factor in smaller)
    return whole and cell.sizes not in (grid.default.sizes, grid.recommended.sizes)


def _draw_line(axes: Any, line: Sequence[Cell], number: int) -> None:
    """The cells of one block_size, with points that grow with the fetch_factor, and dashed without strata."""
    colour, marker = SERIES[number % len(SERIES)], _MARKERS[number % len(_MARKERS)]
    speeds = [cell.rows_per_s for cell in line]
    stratified = [cell.stratified.entropy_bits for cell in line]
    axes.plot(speeds, [cell.quality.entropy_bits for cell in line], "--", color=colour, alpha=0.6, linewidth=1.2)
    axes.plot(speeds, stratified, "-", marker=marker, markersize=4, color=colour,
              label=f"blocks of {line[0].block_size}")  # fmt: skip
    points = [16 + 7 * position**2 for position in range(len(line))]
    axes.scatter(speeds, stratified, points, color=colour, marker=marker)


# ---- text


def _python(grid: QualityGrid, url: str, storage_options: Mapping[str, Any]) -> str:
    options = f", storage_options={dict(storage_options)!r}" if storage_options else ""
    return (
        "import zloader as zl\n\n"
        f"dataset = zl.open_dataset({url!r}{options})  # with cache=DIRECTORY, later epochs read a local mirror\n"
        f"loader = {grid.loader}"
    )


def _commands(grid: QualityGrid, url: str, flags: Sequence[str]) -> Mapping[str, str]:
    """Commands that work where this one did."""
    best = grid.recommended
    sizes = ["--batch-size", str(grid.batch_size), "--x", grid.x]
    own = ["--fetch-factor", str(best.fetch_factor), "--block-size", str(best.block_size)]
    quality = ["zloader", "quality", url, "--label", grid.label, *sizes, *flags]
    commands = {
        "See which obs columns there are, to try another one as --label.": ["zloader", "info", url, *flags],
        "Measure cold and warm epochs with the recommended sizes.": [
            "zloader", "bench", url, *sizes, *own, "--cache", "zloader-cache", *flags
        ],
    }  # fmt: skip
    if grid.link_bytes_per_s is not None:
        commands["Measure the speed of each pair of sizes instead of computing it; 10 s each at most."] = [
            *quality, "--measure", "--html", "zloader-quality-measured.html"
        ]  # fmt: skip
    if best.percent < GOOD_PERCENT:
        shuffled = f"{PurePath(url.rstrip('/')).stem}-shuffled.zarr"
        commands["Shuffle the rows once, into a store on this machine."] = [
            "zloader", "convert", url, shuffled, "--shuffle", "0", *flags
        ]  # fmt: skip
    return {purpose: shlex.join(words) for purpose, words in commands.items()}
