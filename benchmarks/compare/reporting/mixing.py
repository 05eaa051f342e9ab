"""The figures of speed and mixing: entropy against cells/s for all peers, and a heat map of both for each peer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.compare.reporting.charts import LIGHT, Chart
from benchmarks.compare.reporting.looks import Look, looks, plain_ticks, slug
from benchmarks.compare.reporting.records import Key
from benchmarks.compare.reporting.results import Results
from benchmarks.compare.reporting.words import CELLS, ENTROPY, number

_FAINTEST, _STRONGEST = 0.06, 0.5  # opacity of a heat map, light enough for text in both themes
_INCHES = (5.2, 3.6)
_WIDE_INCHES = 10.4
_LOG_RATIO = 8

_Sizes = tuple[float, float]  # rows of a block, and fetch factor
_Grid = dict[_Sizes, tuple[float, float | None]]  # cells/s and entropy


def charts(results: Results, name: str, data: str) -> list[Chart]:
    """A plot of the entropy against the speed, and a heat map for each peer with several pairs of sizes."""
    keys = results.keys(name, data)
    grids = {peer: grid for peer in results.peers if (grid := _grid(results, keys, peer))}
    mixed = {peer: grid for peer, grid in grids.items() if any(bits is not None for _, bits in grid.values())}
    drawn = [_entropy_and_speed(mixed, data, looks(results.peers), _random_bits(results, data))] if mixed else []
    speeds = [speed for grid in grids.values() for speed, _ in grid.values()]
    between = (min(speeds), max(speeds)) if speeds else (0.0, 0.0)
    names = {peer: slug("order-map", str(place), peer, data) for place, peer in enumerate(results.peers)}
    return drawn + [_heat_map((names[peer], f"{peer} ({data})"), grid, between) for peer, grid in grids.items()]


def _grid(results: Results, keys: Sequence[Key], peer: str) -> _Grid:
    found: _Grid = {}
    for key in keys:
        case, speed = dict(key.case), results.spread(key, peer, CELLS)
        if speed and {"block_rows", "fetch_factor"} <= case.keys():
            bits = results.spread(key, peer, ENTROPY)
            found[float(case["block_rows"]), float(case["fetch_factor"])] = (
                speed.median,
                bits.median if bits else None,
            )
    return found


def _random_bits(results: Results, data: str) -> float | None:
    """The entropy of random cells, from the scenario of that name."""
    bits = [
        measured.median
        for key in results.keys("random", data)
        for peer in results.turns(key)
        if (measured := results.spread(key, peer, ENTROPY))
    ]
    return max(bits) if bits else None


def _described(grid: _Grid) -> str:
    return "; ".join(
        f"blocks of {block:g} cells, fetches of {factor:g} minibatches: {number(speed)} cells/s"
        + ("" if bits is None else f", {bits:.2f} bits")
        for (block, factor), (speed, bits) in sorted(grid.items())
    )


def _heat_map(names: tuple[str, str], grid: _Grid, speeds: tuple[float, float]) -> Chart:
    """The pairs of sizes, darker where they are faster, with the entropy written in each."""
    blocks, factors = (sorted({sizes[axis] for sizes in grid}) for axis in (0, 1))
    slowest, fastest = (math.log(max(speed, 1e-9)) for speed in speeds)

    def draw(figure: Any) -> None:
        from matplotlib.patches import Rectangle

        axes = figure.subplots()
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        for (block, factor), (speed, bits) in grid.items():
            column, row = factors.index(factor), blocks.index(block)
            strength = (math.log(max(speed, 1e-9)) - slowest) / ((fastest - slowest) or 1)
            opacity = _FAINTEST + (_STRONGEST - _FAINTEST) * strength
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, color=LIGHT["blue"], alpha=opacity, linewidth=0))
            words = f"{number(speed)}/s" + ("" if bits is None else f"\n{bits:.2f} bits")
            axes.text(column, row, words, ha="center", va="center", fontsize=9 if len(factors) < 5 else 7.5)
        axes.set_xlim(-0.5, len(factors) - 0.5)
        axes.set_ylim(len(blocks) - 0.5, -0.5)
        axes.set_xticks(range(len(factors)), [f"{factor:g}" for factor in factors])
        axes.set_yticks(range(len(blocks)), [f"{block:g}" for block in blocks])
        axes.tick_params(length=0)
        axes.set_xlabel("fetch_factor (minibatches per fetch)")
        axes.set_ylabel("block_rows (cells per block)")

    return Chart(
        name=names[0],
        title=f"{names[1]}: cells/s and entropy",
        description=_described(grid),
        caption="Darker is faster, on one scale for all tools. More bits mix better.",
        draw=draw,
        inches=_INCHES,
    )


def _entropy_and_speed(
    grids: Mapping[str, _Grid], data: str, look: Mapping[str, Look], random_bits: float | None
) -> Chart:
    points = {
        peer: [(speed, bits) for speed, bits in grid.values() if bits is not None] for peer, grid in grids.items()
    }
    speeds = [speed for each in points.values() for speed, _ in each]
    logarithmic = max(speeds) > _LOG_RATIO * min(speeds) > 0

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for peer, each in points.items():
            style = look[peer]
            axes.plot(*zip(*each, strict=True), style.marker, color=style.colour, markersize=style.size, label=peer,
                      alpha=0.85)  # fmt: skip
        if random_bits is not None:
            axes.axhline(random_bits, color=LIGHT["ink"], linestyle=":", label=f"random cells, {random_bits:.2f} bits")
        if logarithmic:
            axes.set_xscale("log")
        axes.margins(x=0.08, y=0.1)
        plain_ticks(axes.xaxis, CELLS)
        axes.set_xlabel(CELLS.axis + (" (log scale)" if logarithmic else ""))
        axes.set_ylabel("entropy of a minibatch (bits)")
        figure.legend(handles=axes.get_legend_handles_labels()[0], loc="outside lower left", ncols=3)

    return Chart(
        name=slug("order-entropy", data),
        title=f"Entropy against speed ({data})",
        description="; ".join(f"{peer}: {_described(grid)}" for peer, grid in grids.items()),
        caption="The upper right is best. Each point is a pair of sizes.",
        draw=draw,
        inches=(_WIDE_INCHES, 4.2 + 0.22 * (len(points) // 3)),
    )
