"""The demo's page: well-formed, self-contained, readable, accessible to screen readers, and free of paths."""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import typer.main
from helpers import PATIENCE_S
from pages import Page, drawn, labels_through_which_a_line_passes, overlapping_ticks
from test_cli import zloader

import zloader as zl
from zloader.commands.cli import app
from zloader.commands.demo_charts import accuracy_chart, loss_chart, speed_chart, throughput, throughput_chart
from zloader.commands.demo_label import BUNDLED_LABEL
from zloader.commands.demo_page import render
from zloader.commands.demo_results import DemoRun, EpochFigures, LoadingFigures, Step
from zloader.commands.page import LIGHT
from zloader.common.messages import size
from zloader.conversion.convert import ConversionReport
from zloader.conversion.example import NAME as BUNDLED


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


def loading(rows_per_s: float, gets: int = 0) -> LoadingFigures:
    seconds = 640 / rows_per_s
    return LoadingFigures(rows=640, seconds=seconds, rows_per_s=rows_per_s, gets=gets, bytes_read=gets * 1000)


@pytest.fixture(scope="module")
def default_page() -> str:
    return render(demo_run())


CHARTS = [speed_chart, throughput_chart, accuracy_chart, loss_chart]


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
        loading=[loading(4000, gets=56), loading(64_000)],
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


def test_every_id_is_there_once_and_every_reference_is_met(default_page):
    page = Page(default_page)
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    text = default_page
    wanted = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
    wanted |= {name for svg in page.all("svg") for name in str(svg["aria-labelledby"]).split()}
    assert wanted <= set(ids)


def test_it_can_be_heard(default_page):
    page = Page(default_page)
    assert page.all("html") == [{"lang": "en"}]
    assert len(page.all("svg")) == len(page.all("title")) - 1 == len(page.all("desc")) == len(CHARTS)
    assert all(svg["role"] == "img" for svg in page.all("svg"))
    assert {"row", "col"} == {header["scope"] for header in page.all("th")}
    assert "epoch 1 (cold, S3) 1,280 cells per second" in page.text


def test_it_says_what_happened(default_page):
    text = Page(default_page).text
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


def test_the_verdict_compares_accuracy_and_speed():
    assert demo_run().verdict == (
        "The model predicts cell_type correctly for 90.0% of the held-out cells; the majority-class accuracy is 30.0%. "
        "Loading alone runs at 4,000 cells/s from S3 and 64,000 cells/s from the mirror, 16.0 times as many. "
        "In epoch 3 training waited for cells 8% of the time: the model sets the pace."
    )
    assert "majority-class accuracy is 95.0%, which is no worse." in demo_run(guess_accuracy=0.95).verdict
    full = demo_run(loading=[loading(4000, gets=56), loading(4000, gets=7)])
    assert "mirror" not in full.verdict, "a pass that read from S3 is not one from the mirror"
    slow = dataclasses.replace(figures(1, gets=1), wait_share=0.8)
    assert "waited for cells 80% of the time: loading sets the pace" in demo_run(1, epochs=[slow]).verdict


def test_loading_and_training_are_apart_and_so_are_cold_and_warm(default_page):
    text = Page(default_page).text
    assert "4,000 cells/s, loading alone (cold, S3)" in text
    assert "64,000 cells/s, loading alone (warm, mirror)" in text
    assert "1,280 cells/s, training, epoch 3 (warm, mirror)" in text
    assert speed_chart(demo_run()).description == (
        "loading alone, cold, S3: 4,000 cells per second; training, epoch 1, cold, S3: 1,280 cells per second; "
        "loading alone, warm, mirror: 64,000 cells per second; training, epoch 3, warm, mirror: 1,280 cells per second"
    )


def test_the_accuracy_of_every_epoch_is_drawn_beside_the_majority_class():
    epochs = [dataclasses.replace(figures(n, gets=0), held_out_accuracy=0.95 + n / 100) for n in (1, 2, 3)]
    words = Page(render(demo_run(epochs=epochs))).words
    assert {"96.0%", "97.0%", "98.0%", "majority-class accuracy 30.0% (below this axis)"} <= set(words)
    chart = accuracy_chart(demo_run(epochs=epochs))
    assert chart.description.endswith("accuracy after epoch 3 98.0%")
    low, high = drawn(chart).axes[0].get_ylim()
    assert (high - low) / 4 < 0.98 - 0.96, "the axis shows the differences"
    low, high = drawn(accuracy_chart(demo_run(epochs=epochs, guess_accuracy=0.94))).axes[0].get_ylim()
    assert low < 0.94 < high


@pytest.mark.every(3)
@pytest.mark.parametrize("n_epochs", [1, 3, 6, 40])
@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.__name__)
def test_charts_are_readable(chart, n_epochs):
    figure = drawn(chart(demo_run(n_epochs)))
    assert labels_through_which_a_line_passes(figure) == []
    (axes,) = figure.axes
    assert axes.get_xlabel()
    assert axes.get_ylabel()
    assert overlapping_ticks(axes) == []


@pytest.mark.parametrize("speeds", [(5, 6), (900, 1000), (1000, 9000), (300, 90_000), (1, 10**7)])
def test_speeds_that_differ_much_or_little_get_a_few_ticks(speeds):
    axes = drawn(speed_chart(demo_run(loading=[loading(speeds[0], gets=1), loading(speeds[1])]))).axes[0]
    low, high = axes.get_xlim()
    assert sum(low <= tick <= high for tick in axes.get_xticks()) >= 2
    assert overlapping_ticks(axes) == []


def test_the_colours_are_those_of_the_theme(default_page):
    text = default_page
    style, svgs = re.search(r"<style>.*?</style>", text, re.DOTALL)[0], re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(svgs) == len(CHARTS)
    used = set(re.findall(r"var\(--([\w-]+)\)", text)) - {"columns"}
    assert {"blue", "orange", "green", "grid", "ink"} <= used <= LIGHT.keys()
    assert all(style.count(f"--{name}: #") == 2 for name in used), "one for the light theme and one for the dark"
    assert not re.findall(r": #[0-9a-f]{6}", "".join(svgs)), "a colour that does not follow the theme"


def commands(page: Page) -> list[list[str]]:
    """The words of the command lines on the page."""
    lines = [line for block in page.code for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith(("zloader ", "python "))]


@pytest.mark.parametrize("source", [BUNDLED, "my cells' copy.h5ad"])
def test_commands_to_try_next_are_valid(source):
    found = commands(Page(render(demo_run(source=source, bundled=source == BUNDLED, label="cell type"))))
    assert [words[1] for words in found if words[0] == "zloader"] == ["convert", "quality", "bench", "demo", "demo"]
    for program, name, *arguments in found:
        if program == "zloader":
            command = typer.main.get_command(app).commands[name]
            command.make_context(name, arguments)  # raises an error for flags and values that it does not know
    assert (found[0][0] == "python") == (source == BUNDLED)
    assert (["--data", source, "--label", "cell type"] == found[-1][2:6]) == (source != BUNDLED)


@pytest.mark.any_version
@pytest.mark.slow  # it converts and reads all of the bundled cells
def test_commands_to_try_next_work_as_they_stand(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = Page(render(demo_run(source=BUNDLED, bundled=True, label=BUNDLED_LABEL)))
    for program, *arguments in commands(page):
        if program == "python":
            subprocess.run([sys.executable, *arguments], check=True, timeout=PATIENCE_S)
        elif arguments[0] != "demo":  # test_demo.py runs the demo
            zloader(*arguments)
    assert "cell_type1" in (tmp_path / "zloader-quality.html").read_text()
    names: dict[str, Any] = {}
    exec(page.code[0], names)  # the lines of Python, once the commands have made the store
    assert names["loader"].batch_size == 64
    assert names["minibatch"].obs["cell_type1"].shape == (2142 % 64,)
    assert names["zl"] is zl


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
