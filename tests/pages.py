"""Reads HTML pages, checks that the charts of a page are readable, and opens pages in a browser if there is one."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from helpers import PATIENCE_S
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.compare.reporting.charts import Chart, drawing

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Collects the tags and text of a page. Fails if tags do not close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.code: list[str] = []  # the text of each <pre>
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "pre":
            self.code.append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if "pre" in self._open:
            self.code[-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def drawn(chart: Chart) -> Any:
    """The chart as a matplotlib figure that has been laid out."""
    with drawing():
        figure = Figure(figsize=chart.inches)
        chart.draw(figure)
        FigureCanvasAgg(figure).draw()
    return figure


# ---- a browser

_LOOK = """
<script>
addEventListener("load", () => {
  const edges = (r) => [r.left, r.top, r.right, r.bottom].map(Math.round);
  const box = (element) => edges(element.getBoundingClientRect());
  const light = (colour) => Math.max(...colour.match(/[0-9]+/g).slice(0, 3).map(Number));
  const styled = getComputedStyle(document.body);
  const seen = {
    width: innerWidth,
    scroll_width: document.documentElement.scrollWidth,
    paper: light(styled.backgroundColor),
    ink: light(styled.color),
    requests: performance.getEntriesByType("resource").map((each) => each.name),
    tables: document.querySelectorAll("table").length,
    figures: [...document.querySelectorAll("figure")].map((figure) => {
      const svg = figure.querySelector("svg");
      return {
        box: box(svg),
        texts: [...svg.querySelectorAll("text")].map((text) => [text.textContent, box(text)]),
      };
    }),
  };
  document.body.replaceChildren(JSON.stringify(seen));
});
</script>
"""


def chromium() -> str | None:
    """The Chromium that opens pages: $CHROMIUM, or one on PATH."""
    named = (os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "chrome-headless-shell", "google-chrome")
    return next((found for name in named if name and (found := shutil.which(name))), None)


def laid_out(page: Path, folder: Path, *, width: int, dark: bool) -> dict[str, Any]:
    """Where a browser puts the figures of a page and their texts, in pixels, the lightness of its colours, and what
    it writes on its console."""
    looked_at = folder / "page.html"
    looked_at.write_text(page.read_text().replace("</body>", f"{_LOOK}</body>"))
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    flags = (f"--window-size={width},1000", scheme, "--enable-logging=stderr", "--dump-dom")
    done = _run_chromium(folder, *flags, looked_at.as_uri())
    seen = json.loads(html.unescape(re.search(r"<body>(.*)</body>", done.stdout, re.DOTALL)[1]))
    return seen | {"console": [line for line in done.stderr.splitlines() if ":CONSOLE" in line]}


def _run_chromium(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # The sandbox needs rights that root in a container does not have. The pages are our own.
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    command = [chromium(), *flags, f"--user-data-dir={folder / 'profile'}", *arguments]
    return subprocess.run(command, check=True, timeout=PATIENCE_S, capture_output=True, text=True)
