"""Reports as HTML: sections of text, charts and tables, which the templates page.html and page.css lay out.

A report is one file without scripts or external resources. The templates escape all text that they are given. jinja2
is imported only when a report is made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.compare.reporting.charts import DARK, LIGHT, Chart, inline_svg
from zloader.commands.output import unbroken, write_page

if TYPE_CHECKING:
    from jinja2 import Environment


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
        return _environment().get_template("page.html").render(report=self, themes={"light": LIGHT, "dark": DARK})

    def write(self, path: Path) -> None:
        """Writes the page."""
        write_page(path, self.html())


def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["unbroken"] = unbroken
    made.filters["svg"] = lambda chart: Markup(inline_svg(chart))
    return made
