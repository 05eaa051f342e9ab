"""The figures of the benchmark report: bars and lines for every scenario. mixing.py has those of `order`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.compare.reporting import mixing
from benchmarks.compare.reporting.charts import LIGHT, Chart
from benchmarks.compare.reporting.looks import FARTHEST, OVER, Look, draw_limits, looks, plain_ticks, slug
from benchmarks.compare.reporting.records import Key, Limit
from benchmarks.compare.reporting.results import Results
from benchmarks.compare.reporting.turns import Spread
from benchmarks.compare.reporting.words import (
    CELLS,
    OURS,
    PEAK,
    Figure,
    axis_name,
    case_text,
    is_ours,
    scenario,
    value_text,
)

_WIDE_INCHES = 10.4
_LOG_RATIO = 8  # values that differ by more are drawn on a logarithmic axis
_HATCHES = ("///", "...", "xxx", "---")


def charts(results: Results, name: str, data: str) -> list[Chart]:
    """The figures of a scenario with one data set."""
    if name == "order":
        return mixing.charts(results, name, data)
    axis = _numeric_axis(results.keys(name, data))
    figures = [scenario(name).figure, *([PEAK] if name == "scaling" else [])]
    drawn = [_lines(results, (name, data, axis), of) if axis else _bars(results, (name, data), of) for of in figures]
    return [chart for chart in drawn if chart is not None]


def _numeric_axis(keys: Sequence[Key]) -> str:
    """The axis of lines: the only axis of the cases, if it has several numbers. Otherwise an empty string."""
    axes = {axis for key in keys for axis, _ in key.case}
    numeric = all(isinstance(value, int | float) for key in keys for _, value in key.case)
    return axes.pop() if len(axes) == 1 and len(keys) > 1 and numeric else ""


def _title(name: str, data: str, figure: Figure) -> str:
    title = scenario(name).title
    return f"{title}: {figure.name} ({data})" if name == "scaling" else f"{title} ({data})"


def _described(results: Results, keys: Sequence[Key], figure: Figure) -> str:
    """The medians of a chart as text."""
    cases = [
        f"{case_text(key) or 'all'}: " + ", ".join(f"{e.peer} {figure.text(e.figure.median)}" for e in entries)
        for key in keys
        if (entries := results.entries(key, figure))
    ]
    return f"{figure.axis}. {'; '.join(cases)}."


def _limits(results: Results, name: str, data: str, figure: Figure) -> list[Limit]:
    """The limits in cells/s that bound a scenario. A limit without a data set is for the first one of the run."""
    first = results.first_data
    limits = results.records.limits if figure is CELLS else []
    return [
        limit for limit in limits
        if limit.rows_per_s and limit.name in scenario(name).limits and (limit.data or first) == data
    ]  # fmt: skip


# ---- bars


def _bars(results: Results, what: tuple[str, str], figure: Figure) -> Chart | None:
    """A bar per peer and case, the best peer at the top, and the limits as lines."""
    name, data = what
    keys = results.keys(name, data)
    entries = [results.entries(key, figure) for key in keys]
    found = [(key, {entry.peer: entry.figure for entry in of}) for key, of in zip(keys, entries, strict=True)]
    at_least = {(place, entry.peer) for place, of in enumerate(entries) for entry in of if entry.at_least}
    peers = _best_first([of for _, of in found], figure)
    bars = [(peer, place, of[peer]) for peer in peers for place, (_, of) in enumerate(found) if peer in of]
    if not bars:
        return None
    limits = _limits(results, name, data, figure)
    most = max(measured.high for *_, measured in bars)
    look = looks(results.peers)

    def draw(drawing: Any) -> None:
        axes = drawing.subplots()
        axes.grid(visible=False)
        axes.grid(visible=True, axis="x")
        at = 0.0
        ticks: dict[str, list[float]] = {}
        for peer, place, measured in bars:
            at += 1.0 if peer in ticks else 1.5
            ticks.setdefault(peer, []).append(at)
            _bar(axes, (at, measured), look[peer], _fill(place, len(keys)))
            weight = "bold" if is_ours(peer) else "normal"
            text = ("≥ " if (place, peer) in at_least else "") + figure.text(measured.median)
            axes.annotate(text, (measured.high, at), (4, 0), textcoords="offset points",
                          va="center", bbox=OVER, zorder=5, fontweight=weight)  # fmt: skip
        axes.set_ylim(at + 1, 0.5)
        _name_bars(axes, ticks)
        handles = [_patch(case_text(key), _fill(place, len(keys))) for place, key in enumerate(keys) if len(keys) > 1]
        handles += draw_limits(axes, limits, most, upright=True)
        shown = [speed for limit in limits if (speed := limit.rows_per_s or 0) < FARTHEST * most]
        axes.set_xlim(0, max([1.12 * most, *(1.02 * speed for speed in shown)]) or 1)
        plain_ticks(axes.xaxis, figure)
        axes.set_xlabel(figure.axis)
        if handles:
            drawing.legend(handles=handles, loc="outside lower left", ncols=2)

    direction = "Longer bars are better." if figure.higher_is_better else "Shorter bars are better."
    return Chart(
        name=slug(name, figure.name, data),
        title=_title(name, data, figure),
        description=_described(results, keys, figure),
        caption=f"{direction} Medians over turns; the thin lines show the range of the turns.",
        draw=draw,
        inches=(_WIDE_INCHES, 1.5 + 0.24 * len(bars) + 0.12 * len(peers)),
    )


def _best_first(found: Sequence[dict[str, Spread]], figure: Figure) -> list[str]:
    """The peers by the best median of their cases."""
    best = max if figure.higher_is_better else min
    medians: dict[str, float] = {}
    for of in found:
        for peer, measured in of.items():
            medians[peer] = best(medians.get(peer, measured.median), measured.median)
    return sorted(medians, key=lambda peer: medians[peer], reverse=figure.higher_is_better)


_Fill = tuple[float, str]  # opacity and hatch


def _fill(place: int, cases: int) -> _Fill:
    """The first case, such as cold, is pale and hatched; the last one is solid."""
    return (0.9, "") if place == cases - 1 else (0.25 + 0.4 * place / cases, _HATCHES[place % len(_HATCHES)])


def _bar(axes: Any, bar: tuple[float, Spread], look: Look, fill: _Fill) -> None:
    (at, measured), (opacity, hatch) = bar, fill
    axes.barh(at, measured.median, 0.9, color=look.colour, alpha=opacity, linewidth=0)
    axes.barh(at, measured.median, 0.9, fill=False, edgecolor=look.colour, hatch=hatch, linewidth=1)
    if measured.high > measured.low:
        axes.plot([measured.low, measured.high], [at, at], color=LIGHT["ink"], linewidth=1.2, solid_capstyle="butt")


def _name_bars(axes: Any, ticks: dict[str, list[float]]) -> None:
    axes.set_yticks([sum(places) / len(places) for places in ticks.values()], list(ticks))
    for label in axes.get_yticklabels():
        label.set_fontweight("bold" if is_ours(label.get_text()) else "normal")
        label.set_color(LIGHT["ink"])
    axes.tick_params(axis="y", length=0)


def _patch(label: str, fill: _Fill) -> Any:
    from matplotlib.patches import Patch

    opacity, hatch = fill
    quiet = tuple(int(LIGHT["quiet"][at : at + 2], 16) / 255 for at in (1, 3, 5))
    return Patch(facecolor=(*quiet, opacity), edgecolor=LIGHT["quiet"], hatch=hatch, label=label)


# ---- lines


def _lines(results: Results, what: tuple[str, str, str], figure: Figure) -> Chart | None:
    """A line per peer over the numbers of an axis, such as minibatch sizes."""
    name, data, axis = what
    keys = results.keys(name, data)
    series = {
        peer: [(float(key.case[0][1]), measured) for key in keys if (measured := results.spread(key, peer, figure))]
        for peer in results.peers
    }
    series = {peer: points for peer, points in series.items() if points}
    if not series:
        return None
    limits = _limits(results, name, data, figure)
    medians = [measured.median for points in series.values() for _, measured in points]
    xs = [x for points in series.values() for x, _ in points]
    wide = _wide(xs), _wide(medians)
    look = looks(results.peers)

    def draw(drawing: Any) -> None:
        axes = drawing.subplots()
        for peer, points in series.items():
            _line(axes, points, peer, look[peer])
        if name == "processes" and OURS in series:
            start, first = series[OURS][0]
            ends = [min(xs), max(xs)]
            axes.plot(ends, [first.median * x / start for x in ends], ":", color=LIGHT["quiet"],
                      label=f"{OURS} if speed grew with the processes")  # fmt: skip
        draw_limits(axes, limits, max(medians), upright=False)
        _scale(axes, wide, xs)
        plain_ticks(axes.yaxis, figure)
        axes.set_xlabel(axis_name(axis) + (" (log scale)" if wide[0] else ""))
        axes.set_ylabel(figure.axis + (" (log scale)" if wide[1] else ""))
        drawing.legend(handles=axes.get_legend_handles_labels()[0], loc="outside lower left", ncols=3)

    better = "Higher" if figure.higher_is_better else "Lower"
    return Chart(
        name=slug(name, figure.name, data),
        title=_title(name, data, figure),
        description=_described(results, keys, figure),
        caption=f"{better} is better. Medians over turns; the thin lines show the range of the turns.",
        draw=draw,
        inches=(_WIDE_INCHES, 4.2 + 0.22 * (len(series) // 3)),
    )


def _wide(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) > _LOG_RATIO * min(values)


def _line(axes: Any, points: Sequence[tuple[float, Spread]], peer: str, look: Look) -> None:
    x, medians = [at for at, _ in points], [measured.median for _, measured in points]
    ends = [[m.median - m.low for _, m in points], [m.high - m.median for _, m in points]]
    axes.errorbar(
        x, medians, ends, label=peer, color=look.colour, marker=look.marker, markersize=look.size, linestyle=look.line,
        linewidth=look.width, elinewidth=1, capsize=2, zorder=4 if is_ours(peer) else 3,
    )  # fmt: skip


def _scale(axes: Any, wide: tuple[bool, bool], xs: Sequence[float]) -> None:
    """Logarithmic axes where the values differ much. The ticks of x are the values that were measured."""
    from matplotlib.ticker import NullLocator

    if wide[0]:
        axes.set_xscale("log")
    if wide[1]:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    ticks = sorted({*xs})
    axes.set_xticks(ticks, [value_text(int(x)) if x == int(x) else f"{x:g}" for x in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
