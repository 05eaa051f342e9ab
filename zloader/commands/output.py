"""What all commands print: text on a console, tables, one JSON document, and one page of the same tables with a figure.

The page is one file without scripts and external resources. Its template escapes all text. jinja2 and matplotlib are
imported only when a page is written.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

import rich.table
import typer
from rich.console import Console
from rich.text import Text

from zloader.common.errors import OptionError, ZloaderError
from zloader.common.machine import available_cores
from zloader.common.messages import printable

_WIDTH = 120  # columns of output that does not go to a terminal
_COLOURS = {"cold": "#1666c0", "mixed": "#8a5fd6", "warm": "#c2560c"}
_MOST_BINS = 30  # of an epoch in the figure
_UNITS = "[kMGT]?B(?:/s)?|bits?|bytes|cells/s|rows/s|ms|min|s|h|%|×"


class _Console(Console):
    """A console whose output is all given as strings, one for each line or cell."""

    def render_str(self, text: str, **style: Any) -> Text:
        return super().render_str(printable(text), **style)


def console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr; 120 columns wide if that is not a terminal."""
    plain: Any = {"stderr": stderr, "highlight": False, "markup": False, "emoji": False, "soft_wrap": True}
    made = _Console(**plain)
    return made if made.is_terminal else _Console(**plain, width=_WIDTH)


def print_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=2, default=str))


def print_result(document: Any, show: Callable[[Console], None], *, as_json: bool) -> None:
    """Prints the result of a command on stdout: as one JSON document, or as the text that `show` prints."""
    if as_json:
        print_json(document)
    else:
        show(console())


def new_table(*columns: str) -> rich.table.Table:
    """A table with these columns. A name that begins with > marks a right-aligned column."""
    table = rich.table.Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    return table


# ---- a page


@dataclass(frozen=True)
class Table:
    """A table that is printed and stands in a page. The first cell of a row names it; the others are figures."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __rich__(self) -> rich.table.Table:
        first, *others = self.header
        table = new_table(first, *(f">{name}" for name in others))
        for row in self.rows:
            table.add_row(*row)
        return table


@dataclass(kw_only=True)
class Timeline:
    """An epoch over time, in running totals at some moments. Times are in seconds since the first epoch began."""

    epoch: int
    kind: str
    times: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)

    def add(self, at_s: float, rows: int, waited_s: float) -> None:
        """Adds a moment."""
        self.times.append(at_s)
        self.rows.append(rows)
        self.waited_s.append(waited_s)


@dataclass(frozen=True, kw_only=True)
class Page:
    """What a command has measured: the sentences that say it, tables, epochs over time, and the conditions."""

    title: str
    sentences: Sequence[str]
    tables: Mapping[str, Table]
    timelines: Sequence[Timeline]
    unit: str
    facts: Mapping[str, str]

    def html(self) -> str:
        """The page."""
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup

        made = Environment(loader=PackageLoader("zloader", "data"), autoescape=True, undefined=StrictUndefined)
        made.filters["unbroken"] = unbroken
        drawn = Markup(figure(self.timelines, self.unit))  # matplotlib escapes its texts
        return made.get_template("page.html").render(page=self, figure=drawn, kinds=_kinds(self.timelines))

    def write(self, path: Path) -> None:
        """Writes the page."""
        write_page(path, self.html())


def write_page(path: Path, text: str) -> None:
    """Writes a page. An existing file is replaced at once, so that it is never half a page."""
    from zloader.caching.directory import draft_path

    path = path.resolve()  # a link stays a link
    if path.exists() and not path.is_file():  # such as a pipe
        path.write_text(text, encoding="utf-8")
        return
    with draft_path(path) as draft:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)


def _kinds(timelines: Sequence[Timeline]) -> dict[str, str]:
    """The colour of each kind of epoch that there is."""
    return {kind: _COLOURS[kind] for kind in dict.fromkeys(each.kind for each in timelines)}


def figure(timelines: Sequence[Timeline], unit: str) -> str:
    """Speed and waiting over time, one epoch after the other, as inline SVG."""
    import matplotlib as mpl
    import numpy as np
    from matplotlib.figure import Figure

    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "zloader", "font.size": 11, "axes.grid": True,
                  "axes.spines.top": False, "axes.spines.right": False, "grid.alpha": 0.3}  # fmt: skip
    with mpl.rc_context(style):
        drawing = Figure(figsize=(7, 5), layout="constrained")
        speed, waiting = drawing.subplots(2, sharex=True, height_ratios=(2, 1))
        for each in timelines:
            bins = max(1, min(_MOST_BINS, len(each.times) - 1))
            edges = np.linspace(each.times[0], each.times[-1], bins + 1)
            lasted = np.maximum(np.diff(edges), 1e-9)
            for axes, totals in ((speed, each.rows), (waiting, 100 * np.array(each.waited_s))):
                rates = np.diff(np.interp(edges, each.times, totals)) / lasted
                axes.stairs(rates, edges, fill=True, color=_COLOURS[each.kind], alpha=0.7)
        speed.set_ylabel(f"{unit} per second")
        speed.yaxis.set_major_formatter("{x:,.0f}")
        speed.set_ylim(0)
        waiting.set_ylabel("waiting (%)")
        waiting.set_ylim(0, 100)
        waiting.set_xlabel("time since the first epoch began (seconds)")
        drawn = StringIO()
        drawing.savefig(drawn, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = drawn.getvalue()
    box = re.search(r'viewBox="([^"]+)"', svg)
    body = svg[svg.index(">", svg.index("<svg")) + 1 :].replace("xlink:href", "href").replace("#ffffff", "none")
    body = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font: \1 system-ui, sans-serif", body)
    return f'<svg viewBox="{box[1]}" role="img" aria-label="Speed and waiting over time">{body}' if box else ""


def unbroken(text: str) -> str:
    """The text with no-break spaces between the thousands of numbers, and between numbers and units.

    >>> unbroken("21 600 cells/s in 3 s").split(" ")
    ['21\\xa0600\\xa0cells/s', 'in', '3\\xa0s']
    """
    return re.sub(rf"(?<=\d) (?=\d{{3}}(?!\d)|(?:{_UNITS})(?!\w))", "\N{NO-BREAK SPACE}", text)


def require_writable(path: Path | None) -> None:
    """Raises an error if no page can be drawn, or the file not be written; called before a long measurement."""
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise ZloaderError('a page needs matplotlib: pip install "zloader[demo]"')
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK) or path.is_dir():
        raise OptionError(f"cannot write {path}: give the path of a file in an existing directory")


def machine() -> dict[str, str]:
    """Cores, system and versions that the figures depend on; nothing that identifies the machine."""
    return {
        "cores": str(available_cores()),
        "system": f"{platform.system()} {platform.machine()}",
        "Python": platform.python_version(),
        **{name: version(name) for name in ("zloader", "torch", "tensorstore", "zarr", "anndata", "numpy")},
    }
