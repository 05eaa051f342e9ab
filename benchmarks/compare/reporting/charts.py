"""The charts of all reports: colours, kinds of charts, and a chart as inline SVG or as a file. matplotlib draws them.

Charts are drawn in the light colours. In a page they are inline SVG in which each colour is a CSS variable, so that a
chart follows the reader's light or dark theme. matplotlib is an optional dependency and slow to import, so it is
imported only when something is drawn.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any

LIGHT = {
    "paper": "#fcfcfb", "card": "#ffffff", "ink": "#1c2024", "quiet": "#5b636d", "grid": "#e4e7ea",
    "blue": "#1666c0", "orange": "#c2560c", "green": "#1a7f4b", "purple": "#7b4fc9", "pink": "#b8346f",
    "teal": "#0b7a86",
    # With blue, ink and quiet, these are far apart for readers with any kind of colour blindness too.
    "vermilion": "#e37257", "olive": "#6a5805", "forest": "#225a30", "sky": "#629cb6", "rose": "#f22f97",
}  # fmt: skip
DARK = {
    "paper": "#14171a", "card": "#1b1f23", "ink": "#eceef0", "quiet": "#a0a8b1", "grid": "#30363d",
    "blue": "#6cb2ff", "orange": "#ffa561", "green": "#5fd08f", "purple": "#b79cff", "pink": "#ff8fb8",
    "teal": "#4fd0dd",
    "vermilion": "#e65705", "olive": "#f0c233", "forest": "#69ae82", "sky": "#65e2fe", "rose": "#905b78",
}  # fmt: skip
COLD, WARM = LIGHT["blue"], LIGHT["orange"]
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
OVER = {"facecolor": LIGHT["card"], "edgecolor": "none", "pad": 1}  # hides grid lines behind a label
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
    inches: tuple[float, float] = (5.2, 4.0)

    @property
    def large(self) -> bool:
        """Whether it has a row of its own in a page."""
        return self.inches[0] > _LARGE_INCHES


# ---- as SVG


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """The style of the charts. Characters that matplotlib's font lacks do not cause a warning."""
    import matplotlib as mpl

    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from|Matplotlib currently does not support", UserWarning)
        yield


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


def inline_svg(chart: Chart) -> str:
    """The chart as an element of a page, in the page's colours and font."""
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


def upright(axes: Any) -> None:
    """Grid lines across the x axis only, and no ticks at the names on the y axis."""
    axes.grid(visible=False)
    axes.grid(visible=True, axis="x")
    axes.tick_params(axis="y", length=0)
