"""The look that all HTML pages of the commands share: the template, the colours, and charts drawn by matplotlib.

A page is one file without scripts or external resources. Charts are drawn in the light colours. In a page they become
inline SVG, and each colour becomes a CSS variable, so that a chart follows the reader's light or dark theme.
matplotlib is an optional dependency, so it is imported only when something is drawn. The last part of the module is
what charts share: speeds on an axis, rates over time, labels of epochs.

The helpers escape the text that they are given. Arguments named `html` are used as they are.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import platform
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.metadata import version
from importlib.resources import files
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zloader.caching.atomic_files import draft_path
from zloader.common.errors import OptionError, ZloaderError
from zloader.common.machine import available_cores

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


LIGHT = {
    "paper": "#fcfcfb", "card": "#ffffff", "ink": "#1c2024", "quiet": "#5b636d", "grid": "#e4e7ea",
    "blue": "#1666c0", "orange": "#c2560c", "green": "#1a7f4b", "purple": "#7b4fc9", "pink": "#b8346f",
    "teal": "#0b7a86",
    # With blue, ink and quiet, these are far apart for readers with any kind of colour blindness too.
    "vermilion": "#e37257", "olive": "#6a5805", "forest": "#225a30", "sky": "#629cb6", "rose": "#f22f97",
}  # fmt: skip
_DARK = {
    "paper": "#14171a", "card": "#1b1f23", "ink": "#eceef0", "quiet": "#a0a8b1", "grid": "#30363d",
    "blue": "#6cb2ff", "orange": "#ffa561", "green": "#5fd08f", "purple": "#b79cff", "pink": "#ff8fb8",
    "teal": "#4fd0dd",
    "vermilion": "#e65705", "olive": "#f0c233", "forest": "#69ae82", "sky": "#65e2fe", "rose": "#905b78",
}  # fmt: skip
COLD, WARM = LIGHT["blue"], LIGHT["orange"]
SERIES = [LIGHT[name] for name in ("blue", "orange", "green", "purple", "pink", "teal")]
_STYLE: dict[Any, Any] = {
    "figure.constrained_layout.use": True,
    "figure.facecolor": LIGHT["card"],
    "axes.facecolor": LIGHT["card"],
    "axes.edgecolor": LIGHT["quiet"],
    "axes.labelcolor": LIGHT["quiet"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": LIGHT["grid"],
    "grid.linewidth": 0.8,
    "text.color": LIGHT["ink"],
    "text.parse_math": False,  # a label may contain $
    "xtick.color": LIGHT["quiet"],
    "ytick.color": LIGHT["quiet"],
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",
}
_CHART_INCHES = (5.2, 4.0)
_MOST_TILES = 5  # in a row
_LARGE_INCHES = 6.5  # a wider chart has a row of its own


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart. `draw` draws it on a matplotlib figure or subfigure; `description` is for screen readers.

    `inches` are the width and height at which the text has its usual size.
    """

    name: str
    title: str
    description: str
    caption: str
    draw: Callable[[Any], None]
    inches: tuple[float, float] = _CHART_INCHES


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """The style of the charts. Characters that matplotlib's font lacks do not cause a warning."""
    import matplotlib as mpl

    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from|Matplotlib currently does not support", UserWarning)
        yield


def figure_of(charts: Sequence[Chart]) -> Any:
    """The charts side by side, with their titles. Call it, and draw the figure, within `drawing`."""
    from matplotlib.figure import Figure

    widths, heights = zip(*(chart.inches for chart in charts), strict=True)
    figure = Figure(figsize=(sum(widths), max(heights) + 0.3))
    parts = figure.subfigures(1, len(charts), squeeze=False, width_ratios=widths)[0]
    for chart, part in zip(charts, parts, strict=True):
        chart.draw(part)
        part.suptitle(chart.title)
    return figure


def save_png(charts: Sequence[Chart], path: Path) -> None:
    with drawing():
        figure_of(charts).savefig(path, format="png", dpi=150)


def save_svg(chart: Chart, path: Path) -> None:
    """Writes a chart as a file of its own, in the light colours. Its title is not drawn."""
    path.write_text(_drawn(chart), encoding="utf-8")


def _drawn(chart: Chart) -> str:
    """The chart as SVG in the light colours. The same chart gives the same text."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    drawn = StringIO()
    with drawing(), mpl.rc_context({"svg.hashsalt": chart.name}):
        figure = Figure(figsize=chart.inches)
        chart.draw(figure)
        figure.savefig(drawn, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return drawn.getvalue()


def _svg(chart: Chart) -> str:
    """The chart as inline SVG in the page's colours and font."""
    svg = _drawn(chart)
    body = svg[svg.index(">", svg.index("<svg")) + 1 :]
    box = re.search(r'viewBox="([^"]+)"', svg)
    assert box is not None
    for colour, value in LIGHT.items():
        body = body.replace(f": {value}", f": var(--{colour})")
    body = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font: \1 system-ui, sans-serif", body)
    body = re.sub(r'(id="|href="#|url\(#)', rf"\1{chart.name}-", body)  # ids must be unique within the page
    body = body.replace("xlink:href", "href")
    return (
        f'<svg viewBox="{box[1]}" role="img" aria-labelledby="{chart.name}-title {chart.name}-desc">'
        f'<title id="{chart.name}-title">{escape(chart.title)}</title>'
        f'<desc id="{chart.name}-desc">{escape(chart.description)}</desc>{body}'
    )


# ---- files


def require_drawable(*paths: Path | None) -> None:
    """Raises an error if nothing can be drawn, or a file not be written, to be called before a long measurement."""
    given = [path for path in paths if path is not None]
    if given and importlib.util.find_spec("matplotlib") is None:
        raise ZloaderError('drawing needs matplotlib: pip install "zloader[demo]"')
    for path in given:
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK) or path.is_dir():
            raise OptionError(f"cannot write {path}: give the path of a file in an existing directory")


def write(text: str, path: Path) -> None:
    """Writes a page. An existing file is replaced at once, so that it is never half a page, whenever that is ended."""
    path = path.resolve()  # a link stays a link
    if path.exists() and not path.is_file():  # such as a pipe
        path.write_text(text, encoding="utf-8")
        return
    with draft_path(path) as draft:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)


def machine() -> dict[str, str]:
    """Cores, system and versions that the figures depend on; nothing that identifies the machine."""
    return {
        "cores": str(available_cores()),
        "system": f"{platform.system()} {platform.machine()}",
        "Python": platform.python_version(),
        **{name: version(name) for name in ("zloader", "torch", "tensorstore", "zarr", "anndata", "numpy")},
    }


# ---- parts of a page

_UNITS = "[kMGT]?B(?:/s)?|bits?|bytes|cells/s|rows/s|ms|min|s|h|%|×"


def unbroken(text: str) -> str:
    """The text with no-break spaces between the thousands of numbers, and between numbers and units.

    >>> unbroken("21 600 cells/s in 3 s").split(" ")
    ['21\\xa0600\\xa0cells/s', 'in', '3\\xa0s']
    """
    return re.sub(rf"(?<=\d) (?=\d{{3}}(?!\d)|(?:{_UNITS})(?!\w))", "\N{NO-BREAK SPACE}", text)


def _shown(text: str) -> str:
    """Text that is read, and not copied."""
    return escape(unbroken(text))


def page(title: str, *html: str) -> str:
    """The whole page."""
    parts = {"title": escape(title), "light": _variables(LIGHT), "dark": _variables(_DARK), "body": "\n".join(html)}
    template = (files("zloader") / "data" / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def _variables(colours: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


def section(title: str, *html: str, name: str = "") -> str:
    """A section. Links lead to it by its `name`."""
    target = f' id="{escape(name)}"' if name else ""
    return f"<section{target}><h2>{_shown(title)}</h2>\n" + "\n".join(html) + "</section>"


def contents(titles: Mapping[str, str]) -> str:
    """Links to sections, given as their names and titles."""
    links = "".join(f'<li><a href="#{escape(name)}">{_shown(title)}</a></li>' for name, title in titles.items())
    return f'<nav aria-label="Contents"><ul>{links}</ul></nav>'


def verdict(text: str) -> str:
    return f'<p class="verdict">{_shown(text)}</p>'


def note(text: str) -> str:
    return f'<p class="quiet">{_shown(text)}</p>'


def tiles(figures: Iterable[tuple[str, str]]) -> str:
    """Large figures, each with the words that explain it. Every row has about equally many."""
    drawn = [f"<div><strong>{_shown(figure)}</strong><span>{_shown(words)}</span></div>" for figure, words in figures]
    rows = max(1, math.ceil(len(drawn) / _MOST_TILES))
    columns = max(1, math.ceil(len(drawn) / rows))
    return f'<div class="tiles" style="--columns: {columns}">{"".join(drawn)}</div>'


def charts(*drawn: Chart) -> str:
    """The charts side by side, or one below the other on a narrow screen. Large ones have a row of their own."""
    return f'<div class="charts">{"".join(map(_figure, drawn))}</div>'


def _figure(chart: Chart) -> str:
    """A large chart scrolls on a narrow screen, so it can have the focus of the keyboard."""
    large = ' class="large" tabindex="0"' if chart.inches[0] > _LARGE_INCHES else ""
    caption = f"<figcaption>{_shown(chart.caption)}</figcaption>"
    return f"<figure{large}><h3>{escape(chart.title)}</h3>{_svg(chart)}{caption}</figure>"


def code(text: str) -> str:
    """Lines to copy. One click selects all of them."""
    return f"<pre><code>{escape(text)}</code></pre>"


def points(texts: Iterable[str]) -> str:
    """A list of sentences."""
    return f"<ul>{''.join(f'<li>{_shown(text)}</li>' for text in texts)}</ul>"


def table(caption: str, header: Iterable[str], rows: Iterable[Sequence[str]], *, words: bool = False) -> str:
    """Figures in columns, or words, whose lines break. The first cell of a row is its header.

    A wide table scrolls, so it can have the focus of the keyboard.
    """
    head = "".join(f'<th scope="col">{_shown(name)}</th>' for name in header)
    body = "".join(
        f'<tr><th scope="row">{_shown(first)}</th>' + "".join(f"<td>{_shown(cell)}</td>" for cell in cells) + "</tr>"
        for first, *cells in rows
    )
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{escape(caption)}">'
        f'<table class="{"words" if words else "figures"}"><caption>{_shown(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def facts(known: Mapping[str, str]) -> str:
    rows = (f'<tr><th scope="row">{escape(name)}</th><td>{_shown(fact)}</td></tr>' for name, fact in known.items())
    return f'<table class="facts"><tbody>{"".join(rows)}</tbody></table>'


def terms(explained: Mapping[str, str]) -> str:
    """Terms and their explanations."""
    each = (f"<div><dt>{escape(term)}</dt><dd>{_shown(words)}</dd></div>" for term, words in explained.items())
    return f"<dl>{''.join(each)}</dl>"


def try_next(commands: Mapping[str, str]) -> str:
    """A section of commands to copy, by what they are for."""
    each = (f"<p>{escape(purpose)}</p>{code(command)}" for purpose, command in commands.items())
    return section("What to try next", *each)


OVER = {"facecolor": LIGHT["card"], "edgecolor": "none", "pad": 1}  # hides grid lines behind a label
MOST_LABELLED_EPOCHS = 6  # more labels do not fit side by side
_LOG_RATIO = 8  # speeds that differ by more are drawn on a logarithmic axis


def scale_speeds(axes: Any, values: Sequence[float], what: str = "cells per second") -> None:
    """Makes the x axis logarithmic if the speeds differ much, otherwise one from 0."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

    logarithmic = max(values) > _LOG_RATIO * min(values) > 0
    if logarithmic:
        axes.set_xscale("log")
        axes.set_xlim(min(values) / 1.8, max(values) * 1.8)
        decades = max(values) / min(values) > 100
        axes.xaxis.set_major_locator(LogLocator(subs=(1,) if decades else (1, 2, 5)))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_xlim(0, 1.15 * max(values))
        axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 20k
    axes.set_xlabel(what + (" (log scale)" if logarithmic else ""))


def rates(
    times: Sequence[float], totals: Sequence[float], most_bins: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The rate at which a total grew, in time bins of equal width: the edges in seconds, and the values per second."""
    import numpy as np

    edges = np.linspace(times[0], times[-1], 1 + max(1, most_bins))
    return edges, np.diff(np.interp(edges, times, totals)) / np.diff(edges)


def draw_rates(axes: Any, edges: NDArray[np.float64], values: NDArray[np.float64], colour: str) -> None:
    """Draws rates over time as a filled line of steps."""
    axes.stairs(values, edges, fill=True, color=colour, alpha=0.25, linewidth=0)
    axes.stairs(values, edges, color=colour, linewidth=1.8)


def label_epoch(axes: Any, n_epochs: int, epoch: int, x: float) -> None:
    """Writes the number of the epoch above the axes, where there are no grid lines, unless there are too many."""
    if n_epochs <= MOST_LABELLED_EPOCHS:
        axes.text(x, 1.02, f"epoch {epoch}", transform=axes.get_xaxis_transform(), ha="center", va="bottom")


def name_colours(figure: Any, names: Mapping[str, str]) -> None:
    """A legend of the names of colours, below the axes."""
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=name) for name, colour in names.items()]
    figure.legend(handles=handles, loc="outside lower left", ncols=2)
