"""What all reports share: they need nothing else, can be heard, escape what they are given, and open in a browser."""

from __future__ import annotations

import dataclasses
import re

import pytest
from pages import Page, chromium, laid_out, printed
from reported import ACCESS, FLAGS, MIXING, bench_run, demo_run, epoch, said, to_copy

from zloader.commands import bench_report, demo_report
from zloader.commands.report import Report, Section, Table

pytestmark = pytest.mark.any_version

NASTY = '<script>alert(1)</script>"&amp; $x$ 細胞'
SHORT = dataclasses.replace(epoch(0, elapsed_s=1e-4), samples=epoch(0, elapsed_s=1e-4).samples[-1:])
REPORTS = {
    "demo": lambda: demo_report.report(demo_run(label=NASTY, source=NASTY, bundled=True)),
    "bench": lambda: bench_report.report(bench_run(quality=MIXING, urls=[NASTY]), ACCESS, FLAGS),
    "of one epoch": lambda: demo_report.report(demo_run(1)),
    "of many epochs": lambda: demo_report.report(demo_run(40)),
    "of a short run": lambda: bench_report.report(bench_run([SHORT], step_s=0.001), {}, []),
}


@pytest.fixture(scope="module", params=REPORTS)
def report(request):
    return REPORTS[request.param]()


@pytest.fixture(scope="module")
def html(report):
    return report.html()


def test_a_report_needs_nothing_else(html):
    assert html.startswith("<!doctype html>")
    page = Page(html)
    assert not {"script", "img", "iframe", "i"} & {tag for tag, _ in page.tags}
    links = [value for _, attrs in page.tags for name, value in attrs.items() if name in ("src", "href", "xlink:href")]
    assert links, "the drawings refer to their own parts"
    assert all(link is not None and link.startswith(("#", "data:")) for link in links)
    assert not re.search(r"@import|url\((?!#)|mathdefault", html)
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    wanted = set(re.findall(r'(?:href="|url\()#([^")]+)', html))
    assert wanted | {name for svg in page.all("svg") for name in str(svg["aria-labelledby"]).split()} <= set(ids)


def test_a_report_can_be_heard(report, html):
    page = Page(html)
    charts = [chart for section in report.sections for chart in section.charts]
    assert page.all("html") == [{"lang": "en"}]
    assert [svg["aria-labelledby"] for svg in page.all("svg")] == [f"{c.name}-title {c.name}-desc" for c in charts]
    assert all(svg["role"] == "img" for svg in page.all("svg"))
    assert {"row", "col"} == {header["scope"] for header in page.all("th")}


def test_everything_in_a_report_is_shown(report, html):
    page = Page(html)
    assert [words for words in said(report) if words not in page.text] == []
    assert page.code == to_copy(report)
    for table in (table for section in report.sections for table in section.tables):
        assert all(len(row) == len(table.header) for row in table.rows)


def test_parts_of_a_section_and_links_to_it():
    table = Table("c < d", ["", "x"], [["a", "1 000 s"], ["b", ""]], words=True)
    section = Section(title="One & two", points=["a point"], tables=[table], commands={"to do": "zloader 1 000 s"})
    html = Report(title="1 < 2", verdict=["so"], sections=[section], contents=True).html()
    page = Page(html)
    assert page.text.endswith("1 < 2 so One & two One & two a point c < d x a 1 000 s b to do zloader 1 000 s")
    assert "<td>1\xa0000\xa0s</td>" in html
    assert page.all("a") == [{"href": "#one-two"}]
    assert page.code == ["zloader 1 000 s"], "commands are copied"
    assert "words" in [attrs.get("class") for attrs in page.all("table")]


def test_a_file_is_replaced_at_once_and_links_are_followed(tmp_path):
    (tmp_path / "old.html").write_text("old")
    (tmp_path / "link.html").symlink_to(tmp_path / "old.html")
    Report(title="new", verdict=[], sections=[]).write(tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink()
    assert "<h1>new</h1>" in (tmp_path / "old.html").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"old.html", "link.html"}


# ---- in a browser

browser = pytest.mark.skipif(
    chromium() is None, reason="there is no Chromium: CONTRIBUTING.md says how to get one, and $CHROMIUM names it"
)


@pytest.mark.slow
@browser
@pytest.mark.parametrize(
    ("name", "width", "dark"),
    [("demo", 1400, False), ("bench", 500, True), ("bench", 800, False)],
    ids=["wide", "narrow and dark", "half a screen"],
)
def test_a_browser_shows_every_figure(tmp_path, name, width, dark):
    made = REPORTS[name]()
    made.write(tmp_path / "report.html")
    seen = laid_out(tmp_path / "report.html", tmp_path, width=width, dark=dark)
    assert [figure["title"] for figure in seen["figures"]] == [c.title for s in made.sections for c in s.charts]
    for figure in seen["figures"]:
        left, top, right, bottom = figure["box"]
        assert right - left > 0.6 * min(width, 500), "a figure is wide enough to read"
        assert bottom - top > 0.6 * (right - left)
        assert 0 <= left <= right <= seen["width"]
        assert len(figure["texts"]) >= 4
        for text, (x0, y0, x1, y1) in figure["texts"]:
            assert left - 2 <= x0 <= x1 <= right + 2, text
            assert top - 2 <= y0 <= y1 <= bottom + 2, text
    assert seen["scroll_width"] <= seen["width"], "the page does not scroll sideways"
    assert seen["requests"] == seen["console"] == []
    assert (seen["paper"] < 100) == (seen["ink"] > 100) == dark


@browser
@pytest.mark.slow
def test_what_a_browser_complains_about_is_noticed(tmp_path):
    html = Report(title="t", verdict=[], sections=[]).html().replace("</body>", "<script>oops()</script></body>")
    (tmp_path / "report.html").write_text(html)
    (line,) = laid_out(tmp_path / "report.html", tmp_path, width=500, dark=False)["console"]
    assert "oops is not defined" in line


@pytest.mark.slow
@browser
def test_it_can_be_printed(tmp_path):
    REPORTS["bench"]().write(tmp_path / "report.html")
    pdf = printed(tmp_path / "report.html", tmp_path)
    assert pdf.startswith(b"%PDF")
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 8
