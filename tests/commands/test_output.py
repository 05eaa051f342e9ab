"""The page of bench and demo: it needs nothing else, escapes what it is given, and can be read on a phone."""

from __future__ import annotations

import re

import pytest
from pages import Page as Read
from pages import chromium, laid_out

from zloader.commands.output import Page, Table, Timeline

pytestmark = pytest.mark.any_version

NASTY = '<script>alert(1)</script>"&amp; $x$ 細胞'


def timeline(epoch: int, kind: str, n: int = 200) -> Timeline:
    """An epoch of 2 s, or of a single moment."""
    made = Timeline(epoch=epoch, kind=kind)
    for number in range(n):
        made.add(2.5 * epoch + number / 100, 64 * number, number / 200)
    return made


def page(**changes) -> Page:
    given = {
        "title": f"zloader bench: {NASTY}",
        "sentences": ["Warm epochs are 2 times as fast.", NASTY],
        "tables": {"Kinds": Table(["", "cold", NASTY], [["rows/s", "21 000", "1 s"], [NASTY, "", "2"]])},
        "timelines": [timeline(0, "cold"), timeline(1, "mixed"), timeline(2, "warm"), timeline(3, "warm", 1)],
        "unit": "rows",
        "facts": {"cores": "2", NASTY: NASTY},
    }
    return Page(**given | changes)


def test_it_has_everything_and_needs_nothing_else():
    html = page().html()
    assert html.startswith("<!doctype html>")
    read = Read(html)
    assert not {"script", "img", "iframe", "i"} & {tag for tag, _ in read.tags}
    links = [value for _, attrs in read.tags for name, value in attrs.items() if name in ("src", "href")]
    assert all(link.startswith(("#", "data:")) for link in links)
    assert not re.search(r"@import|url\((?!#)|mathdefault", html)
    ids = [attrs["id"] for _, attrs in read.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for words in ("Warm epochs are 2 times", NASTY, "21 000 1 s", "rows per second", "waiting (%)", "cores 2"):
        assert words in read.text
    assert "<td>21\xa0000</td>" in html
    assert [attrs["lang"] for attrs in read.all("html")] == ["en"]
    assert {"row", "col"} == {attrs["scope"] for attrs in read.all("th")}
    assert html == page().html(), "the same figures make the same page"


def test_a_file_is_replaced_at_once_and_links_are_followed(tmp_path):
    (tmp_path / "old.html").write_text("old")
    (tmp_path / "link.html").symlink_to(tmp_path / "old.html")
    page(title="new").write(tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink()
    assert "<h1>new</h1>" in (tmp_path / "old.html").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"old.html", "link.html"}


@pytest.mark.slow
@pytest.mark.skipif(chromium() is None, reason="there is no Chromium: CONTRIBUTING.md says how to get one")
@pytest.mark.parametrize(("width", "dark"), [(500, True), (1400, False)], ids=["a phone in the dark", "wide"])
def test_a_browser_shows_it(tmp_path, width, dark):
    page().write(tmp_path / "page.html")
    seen = laid_out(tmp_path / "page.html", tmp_path, width=width, dark=dark)
    (figure,) = seen["figures"]
    left, top, right, bottom = figure["box"]
    assert right - left > 0.6 * min(width, 500), "the figure is wide enough to read"
    assert 0 <= left <= right <= seen["width"]
    assert len(figure["texts"]) >= 8
    for text, (x0, y0, x1, y1) in figure["texts"]:
        assert left - 2 <= x0 <= x1 <= right + 2, text
        assert top - 2 <= y0 <= y1 <= bottom + 2, text
    assert seen["scroll_width"] <= seen["width"], "the page does not scroll sideways"
    assert seen["requests"] == seen["console"] == []
    assert (seen["paper"] < 100) == (seen["ink"] > 100) == dark
