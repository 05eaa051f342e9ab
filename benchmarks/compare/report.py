"""Reports on a benchmark run: one HTML page, the Benchmarks page of the documentation, and README's section.

    python -m benchmarks.compare.report RUN.jsonl [--output report.html]
    python -m benchmarks.compare.report benchmarks/full.jsonl --markdown docs/benchmarks.md --readme README.md

RUN.jsonl is a file of run.py; reporting/records.py describes it. The page has a section per scenario, with figures and
a table; the limits of the machine; all tools with their versions and settings; those that are missing or failed, with
the reason; and the method and its unfairness. It is one file without scripts, and prints.

`--figures DIR` also writes each figure as an SVG file. `--markdown` writes the same sections as Markdown, with two of
the figures, which go to `figures/` beside it. `--readme` replaces the lines between the markers `<!-- benchmarks -->`
and `<!-- end of benchmarks -->` of that file with a table and a figure; it needs `--markdown`, to which they link.
Nothing is written if RUN.jsonl or the markers are bad.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.compare.reporting.charts import Chart, save_svg
from benchmarks.compare.reporting.looks import slug
from benchmarks.compare.reporting.page import Report, Table, unbroken
from benchmarks.compare.reporting.records import RecordsError, read
from benchmarks.compare.reporting.results import Results
from benchmarks.compare.reporting.tables import at_a_glance, machine, sections, verdict
from benchmarks.compare.reporting.words import CEILING, OURS, is_ours, value_text

BEGIN, END = "<!-- benchmarks -->", "<!-- end of benchmarks -->"
_WIDTH = 120
_IN_DOCS = ("cold_warm_local", "order", "cold_warm_cloud", "minibatch")  # the figures of the Markdown, by preference
_N_IN_DOCS = 2
_IN_HTML = ("turns", "load", "checked", "how it is set up", "with", "Python", "waiting", "s to the first minibatch")


class MarkerError(Exception):
    """A README that lacks the markers."""


# ---- HTML


def html(results: Results) -> str:
    """The report as one HTML page."""
    return Report(
        title="zloader and other loaders: benchmarks",
        verdict=[verdict(results)],
        text=[f"{_origin(results)}. Machine and command are at the end."],
        tiles=list(_tiles(results)),
        sections=sections(results),
        contents=True,
    ).html()


def _tiles(results: Results) -> Iterable[tuple[str, str]]:
    for found in results.headlines():
        peer = "" if found.ours.peer == OURS else f" ({found.ours.peer})"
        yield (
            found.figure.text(found.ours.figure.median),
            f"{found.figure.unit}: {found.label}{peer}".strip(),
        )


def _origin(results: Results) -> str:
    """Which run this is, in a line."""
    run, facts = results.records.run, machine(results.records)
    began = f"Run of {run.began[:16].replace('T', ' ')}" if run.began else "A run at an unknown time"
    commit = f"commit {run.commit[:12] or 'unknown'}" + (" with uncommitted changes" if run.dirty else "")
    return f"{began}, {facts.get('processor', 'unknown processor')}, {commit}"


# ---- Markdown


def markdown(results: Results, figures: str) -> str:
    """The report as Markdown. `figures` is the folder of its figures, relative to the page."""
    shown = {chart.name for chart in docs_charts(results)}
    facts = machine(results.records)
    intro = (
        f"This page is made by `benchmarks/compare/report.py` from the run `{results.records.path.name}`, which began "
        f"{facts['began']} on {facts.get('processor', 'a machine')} at commit {facts['commit']}. Do not edit it. "
        "[benchmarks/README.md](../benchmarks/README.md) says how to repeat the run, and how to make the whole report "
        "of it, which also has all variants of the tools, and how each was set up and checked. "
        "[Performance](performance.md) says how to compare the tools on your own data."
    )
    found = sections(results)
    parts = ["# Benchmarks", _wrapped(intro), _wrapped(_text(verdict(results)))]
    parts.append("\n".join(f"- [{_text(section.title)}](#{section.name})" for section in found))
    for section in found:
        parts.append(f"## {section.title}")
        parts += [_wrapped(_text(text)) for text in section.text]
        if section.points:
            parts.append("\n".join(textwrap.fill(_text(point), _WIDTH, initial_indent="- ", subsequent_indent="  ",
                                                 break_long_words=False) for point in section.points))  # fmt: skip
        parts += [_image(chart, figures) for chart in section.charts if chart.name in shown]
        parts += [_table(_short(table)) for table in section.tables]
        if section.terms:
            parts.append(_table(Table("", ["word", "meaning"], list(section.terms.items()), words=True)))
        if section.facts:
            parts.append(_table(Table("", ["", ""], list(section.facts.items()), words=True)))
    return "\n\n".join(parts) + "\n"


def docs_charts(results: Results) -> list[Chart]:
    """The figures of the Markdown: the first of each of some scenarios."""
    by_name = {chart.name: chart for section in sections(results) for chart in section.charts}
    first = {
        scenario: name for name in reversed(by_name) for scenario in _IN_DOCS if name.startswith(slug(scenario, ""))
    }
    return [by_name[first[scenario]] for scenario in _IN_DOCS if scenario in first][:_N_IN_DOCS]


def _image(chart: Chart, folder: str) -> str:
    alt = _text(f"{chart.title}. {chart.caption} The table has the figures.").replace("[", "(").replace("]", ")")
    return f"![{alt}]({folder}/{chart.name}.svg)"


def _short(table: Table) -> Table:
    """The table without what only the HTML page has: some columns, and all but the best variant of another tool."""
    kept = [column for column, name in enumerate(table.header) if name not in _IN_HTML]
    axes = range(1, table.header.index("range") - 1) if "range" in table.header else range(0)
    seen, rows = set(), []
    for row in table.rows:  # the best one of each case first
        case = (row[0].partition(",")[0], *(row[axis] for axis in axes))
        if table.header[0] != "tool" or is_ours(row[0]) or case not in seen:
            rows.append([row[column] for column in kept])
        seen.add(case)
    return replace(table, header=[table.header[column] for column in kept], rows=rows)


def _table(table: Table) -> str:
    lines = [table.header, [":--", *(":--" if table.words else "--:" for _ in table.header[1:])], *table.rows]
    written = "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)
    return f"{_wrapped(_text(table.caption))}\n\n{written}" if table.caption else written


def _cell(text: str) -> str:
    return _text(text).replace("|", "\\|")


def _text(text: str) -> str:
    """One line that Markdown shows as it is."""
    return unbroken(re.sub(r"([\\<*_`\[\]])", r"\\\1", " ".join(text.split())))


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


# ---- README


def readme_section(results: Results, link: str, figures: str) -> str:
    """The lines between the markers: a table, a figure, and where they come from. `link` leads to the whole page."""
    data = [each for each in results.records.run.data if each.name == results.first_data]
    of = "".join(f" over {value_text(each.rows)} cells × {value_text(each.genes or 0)} genes" for each in data)
    said = (
        f"Medians of one run of all tools in turns{of}. [{link}]({link}) has the rest, and where other tools are "
        f"better. {CEILING} is no loader. {_origin(results)}."
    )
    glance = at_a_glance(results)
    tables = [_table(Table("", table.header, table.rows)) for table in glance.tables]
    images = [_image(chart, figures) for chart in docs_charts(results)[:1]]
    return "\n\n".join([f"{BEGIN}\n{_wrapped(said)}", *tables, *images]) + f"\n{END}"


def with_section(readme: str, section: str) -> str:
    """The text of a README with a new section between its markers. Raises MarkerError if it lacks them."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise MarkerError(f"it must have the lines {BEGIN} and {END} once, in this order")
    return readme[: readme.index(BEGIN)] + section + readme[readme.index(END) + len(END) :]


# ---- files


def write_all(results: Results, options: argparse.Namespace) -> list[Path]:
    """Writes the files that the options name, and returns them. Text is made before the first file is written."""
    written: dict[Path, str] = {options.output: html(results)} if options.output else {}
    saved: dict[str, Chart] = {}
    folder = options.figures
    if folder:
        saved = {chart.name: chart for section in sections(results) for chart in section.charts}
    if options.markdown:
        folder = folder or options.markdown.parent / "figures"
        saved |= {chart.name: chart for chart in docs_charts(results)}
        written[options.markdown] = markdown(results, _relative(folder, options.markdown))
    if options.readme:
        link = _relative(options.markdown, options.readme)
        section = readme_section(results, link, _relative(folder, options.readme))
        written[options.readme] = with_section(options.readme.read_text(encoding="utf-8"), section)
    for path, text in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="backslashreplace")  # JSON may have half a character
    for name, chart in saved.items():
        folder.mkdir(parents=True, exist_ok=True)
        save_svg(chart, folder / f"{name}.svg")
    return [*written, *(folder / f"{name}.svg" for name in saved)]


def _relative(path: Path, beside: Path) -> str:
    """The path as a link in the file `beside`."""
    return Path(os.path.relpath(path, beside.parent)).as_posix()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the JSONL file of run.py")
    parser.add_argument("--output", type=Path, help="the HTML page (default: RUN.html, unless --markdown is given)")
    parser.add_argument("--markdown", type=Path, help="write the report as Markdown to this file")
    parser.add_argument("--figures", type=Path, help="write all figures as SVG to this directory")
    parser.add_argument("--readme", type=Path, help="write a table and a figure between the markers of this file")
    options = parser.parse_args(arguments)
    if options.readme and not options.markdown:
        parser.error("--readme needs --markdown, the page that it links to")
    if not options.output and not options.markdown:
        options.output = options.run.with_suffix(".html")
    outputs = [path.resolve() for path in (options.output, options.markdown, options.readme) if path]
    if len({*outputs}) < len(outputs):
        parser.error("give --output, --markdown and --readme different files")
    if options.run.resolve() in outputs:
        parser.error(f"{options.run} is the run; write the report to another file")
    try:
        written = write_all(Results(read(options.run)), options)
    except RecordsError as error:
        sys.exit(str(error))
    except MarkerError as error:
        sys.exit(f"{options.readme} cannot be changed: {error}")
    except OSError as error:
        sys.exit(f"cannot write the report: {error}")
    with contextlib.suppress(BrokenPipeError):
        print(*written, sep="\n")


if __name__ == "__main__":
    main()
