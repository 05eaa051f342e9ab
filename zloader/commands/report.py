"""Reports as HTML: sections of text, charts and tables, which the templates report.html and report.css lay out.

A report is one file without scripts or external resources. The templates escape all text that they are given. jinja2
is imported only when a report is made.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from zloader.commands.charts import DARK, LIGHT, Chart, inline_svg
from zloader.common.errors import OptionError, ZloaderError
from zloader.common.machine import available_cores

if TYPE_CHECKING:
    from jinja2 import Environment

_UNITS = "[kMGT]?B(?:/s)?|bits?|bytes|cells/s|rows/s|ms|min|s|h|%|×"


@dataclass(frozen=True)
class Table:
    """A table of figures or, if `words` is set, of longer texts. The first cell of each row names it."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: bool = False


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of a report. It has these parts in this order, as far as they are given.

    `text` are paragraphs, `code` is to be copied, and `commands` too, by what they are for. `facts` are by name.
    """

    title: str
    text: Sequence[str] = ()
    points: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    terms: Mapping[str, str] = field(default_factory=dict)
    code: str = ""
    commands: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The target of links to it."""
        return slug(self.title)


def slug(*words: str) -> str:
    """A name of words, for ids and files.

    >>> slug("Warm epoch", "annbatch, chunks of 512")
    'warm-epoch-annbatch-chunks-of-512'
    """
    return re.sub(r"\W+", "-", "-".join(words).lower()).strip("-")


def try_next(commands: Mapping[str, str]) -> Section:
    """The section of commands to copy, by what they are for."""
    return Section(title="What to try next", commands=commands)


@dataclass(frozen=True, kw_only=True)
class Report:
    """A report: sentences that say what was found, large figures with the words that explain them, and sections."""

    title: str
    verdict: Sequence[str]
    text: Sequence[str] = ()
    code: str = ""
    tiles: Sequence[tuple[str, str]] = ()
    sections: Sequence[Section]
    contents: bool = False

    def html(self) -> str:
        """The report as a page."""
        return _environment().get_template("report.html").render(report=self, themes={"light": LIGHT, "dark": DARK})

    def write(self, path: Path) -> None:
        """Writes the page. An existing file is replaced at once, so that it is never half a page."""
        from zloader.caching.directory import draft_path

        path, text = path.resolve(), self.html()  # a link stays a link
        if path.exists() and not path.is_file():  # such as a pipe
            path.write_text(text, encoding="utf-8")
            return
        with draft_path(path) as draft:
            draft.write_text(text, encoding="utf-8")
            draft.replace(path)


def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    made = Environment(
        loader=PackageLoader("zloader", "data"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["unbroken"] = unbroken
    made.filters["svg"] = lambda chart: Markup(inline_svg(chart))
    return made


def unbroken(text: str) -> str:
    """The text with no-break spaces between the thousands of numbers, and between numbers and units.

    >>> unbroken("21 600 cells/s in 3 s").split(" ")
    ['21\\xa0600\\xa0cells/s', 'in', '3\\xa0s']
    """
    return re.sub(rf"(?<=\d) (?=\d{{3}}(?!\d)|(?:{_UNITS})(?!\w))", "\N{NO-BREAK SPACE}", text)


def require_drawable(*paths: Path | None) -> None:
    """Raises an error if nothing can be drawn, or a file not be written, to be called before a long measurement."""
    given = [path for path in paths if path is not None]
    if given and importlib.util.find_spec("matplotlib") is None:
        raise ZloaderError('drawing needs matplotlib: pip install "zloader[demo]"')
    for path in given:
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
