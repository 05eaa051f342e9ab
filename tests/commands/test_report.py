"""The demo's page: well-formed, self-contained, accessible to screen readers, and free of paths and credentials."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from zloader.commands.report import DemoRun, EpochFigures, Step, render, size, throughput
from zloader.conversion.convert import ConversionReport

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Collects the tags and text of a page. Fails if tags do not close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def figures(epoch: int, *, gets: int, started_s: float = 0.0) -> EpochFigures:
    return EpochFigures(
        epoch=epoch,
        started_s=started_s,
        seconds=0.5,
        rows=640,
        minibatches=10,
        rows_per_s=1280.0,
        gets=gets,
        bytes_read=gets * 1_000_000,
        wait_share=0.25 / epoch,
        loss=1.0 / epoch,
        held_out_rows=160,
        held_out_gets=0,
        held_out_bytes_read=0,
        held_out_accuracy=0.9,
    )


def demo_run(n_epochs: int = 3, **changes: Any) -> DemoRun:
    epochs = [figures(n, gets=56 if n == 1 else 0, started_s=0.6 * (n - 1)) for n in range(1, n_epochs + 1)]
    steps = [
        Step(epoch=e.epoch, done_s=e.started_s + 0.05 * (k + 1), rows=64, loss=1 / (k + 10 * e.epoch))
        for e in epochs
        for k in range(10)
    ]
    conversion = ConversionReport(
        sources=["cells.h5ad"],
        destination="s3://zloader/cells.zarr",
        rows=900,
        genes=2000,
        values=180_000,
        bytes_in=3_000_000,
        bytes_out=1_000_000,
        dtypes_changed={"X/data": "float32 -> uint8"},
        rows_made_canonical={},
        dropped=[],
        seconds=1.5,
    )
    run = DemoRun(
        source="cells.h5ad",
        bundled=False,
        label="cell_type",
        categories=5,
        seed=0,
        conversion=conversion,
        train_rows=640,
        held_out_rows=160,
        unlabelled=100,
        guess_accuracy=0.3,
        block_size=16,
        batch_size=64,
        fetch_rows=512,
        opening_bytes=12_345,
        machine={"cores": "2", "Python": "3.11.7"},
        epochs=epochs,
        steps=steps,
    )
    return dataclasses.replace(run, **changes)


@pytest.mark.parametrize("n_epochs", [1, 3, 12])
def test_the_page_is_well_formed_and_needs_nothing_else(n_epochs):
    text = render(demo_run(n_epochs))
    page = Page(text)
    assert "{{" not in text
    assert not {"script", "img", "iframe"} & {tag for tag, _ in page.tags}
    links = [value for _, attrs in page.tags for name, value in attrs.items() if name in ("src", "href", "xlink:href")]
    assert links, "the drawings refer to their own parts"
    assert all(link is not None and link.startswith(("#", "data:")) for link in links)
    assert not re.search(r"https?:|@import|url\((?!#)", text)


def test_every_id_is_there_once_and_every_reference_is_met():
    page = Page(render(demo_run()))
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    text = render(demo_run())
    wanted = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
    wanted |= {name for svg in page.all("svg") for name in str(svg["aria-labelledby"]).split()}
    assert wanted <= set(ids)


def test_it_can_be_heard():
    page = Page(render(demo_run()))
    assert page.all("html") == [{"lang": "en"}]
    assert len(page.all("svg")) == len(page.all("title")) - 1 == len(page.all("desc")) == 2
    assert all(svg["role"] == "img" for svg in page.all("svg"))
    assert {"row", "col"} == {header["scope"] for header in page.all("th")}
    assert "epoch 1 (cold, S3) 1,280 cells per second" in page.text


def test_it_says_what_happened():
    text = Page(render(demo_run())).text
    assert (
        "Epoch 1 read 56.0 MB from S3 in 56 GETs. Epochs 2 to 3 made 0 GETs: all 640 training cells came from" in text
    )
    for row in ("1 cold, S3 1,280 56 56.0 MB 25.0% 1.000 90.0%", "3 warm, mirror 1,280 0 0 B 8.3% 0.333 90.0%"):
        assert row in text
    for fact in (
        "900 × 2,000",
        "180,000 (10.0%)",
        "3.0 MB",
        "X/data float32 → uint8",
        "cell_type, 5 categories",
        "majority-class accuracy 30.0%",
        "100 cells without a cell_type",
        "blocks of 16 cells",
        "12.3 kB of metadata",
        "Python 3.11.7",
    ):
        assert fact in text
    assert "Baron" not in text


def test_the_bundled_cells_are_attributed():
    text = Page(render(demo_run(bundled=True))).text
    assert "Baron et al. 2016" in text
    assert "GSE84133" in text
    assert "MIT" in text


def test_names_cannot_break_out_of_the_page():
    page = Page(render(demo_run(source="<script>alert(1)</script>.h5ad", label='a"b<c>&amp;')))
    assert not page.all("script")
    assert 'held-out accuracy of a"b<c>&amp;' in page.text


def test_throughput_counts_every_row():
    run = demo_run()
    for epoch in run.epochs:
        edges, values = throughput(run, epoch)
        assert edges[0] == epoch.started_s
        assert edges[-1] == pytest.approx(epoch.started_s + epoch.seconds)
        assert float((values * np.diff(edges)).sum()) == pytest.approx(epoch.rows)


def test_epochs_that_went_on_reading_are_not_called_warm():
    run = demo_run(epochs=[figures(1, gets=56), figures(2, gets=3, started_s=0.6)])
    assert "warm" not in "".join(epoch.source for epoch in run.epochs)
    assert "0 GETs" not in run.summary
    assert "the mirror was incomplete" in run.summary


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (99_949, "99.9 kB"), (99_951, "100 kB"), (999_600, "1.0 MB"),
     (7_599_670, "7.6 MB"), (412_345_678_901, "412 GB"), (5e12, "5.0 TB"), (1.5e16, "15,000.0 TB")],
)  # fmt: skip
def test_size(n_bytes, text):
    assert size(n_bytes) == text
