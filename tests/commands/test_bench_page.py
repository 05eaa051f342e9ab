"""The page of `zloader bench`: its figures and tables have the measured numbers, and a browser shows them."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
from helpers import counts, write_store
from pages import Page, chromium, drawn, labels_through_which_a_line_passes, laid_out, overlapping_ticks, printed
from test_cli import zloader

from zloader.commands.bench_charts import charts
from zloader.commands.bench_page import dollars, render
from zloader.commands.bench_results import BenchEpoch, BenchQuality, BenchRun, Sample
from zloader.commands.bill_run import Prices
from zloader.commands.cli import app
from zloader.commands.page import LIGHT, tiles, unbroken
from zloader.insight.quality import Quality

pytestmark = pytest.mark.any_version

FLAGS = ["--batch-size", "64", "--endpoint-url", "http://127.0.0.1:9"]
SETTINGS = {
    "join": None, "genes_by": None, "fetch_factor": 256, "block_size": 64, "in_flight_bytes": 64_000_000, "x": "X",
    "obs": ["cell_type"], "layout": "csr", "dtype": "float32",
}  # fmt: skip


def epoch(number: int, kind: str = "cold", *, began_s: float = 0.0, elapsed_s: float = 10.0) -> BenchEpoch:
    """An epoch of 6 400 rows, of which a hundredth is read, and mirrored, in each hundredth of the time."""
    wait_s = 0.9 * elapsed_s
    reads, share = kind != "warm", 0.0 if kind == "cold" else 1.0
    figures = {
        "rows": 6400.0, "minibatches": 100.0, "gets": 50.0 * reads, "bytes_read": 3e9 * reads, "elapsed_s": elapsed_s,
        "wait_s": wait_s, "first_wait_s": 0.4, "first_minibatch_s": 0.5, "decode_s": 6.0 * reads, "gather_s": 2.0,
        "cpu_s": 9.0, "loop_cpu_s": 1.0, "stepped_s": 0.0, "rows_per_s": 6400 / elapsed_s, "wait_share": 0.9,
        "bytes_read_per_s": 3e9 * reads / elapsed_s, "mirror_share": 0.4 if reads else 1.0,
        "mirrored_before": share, "mirrored_after": 1.0, "mirror_bytes": 7e9,
    }  # fmt: skip
    samples = [
        Sample(
            at_s=elapsed_s * k / 100,
            rows=64 * k,
            bytes_read=30_000_000 * k * reads,
            wait_s=0.9 * elapsed_s * k / 100,
            mirrored=1.0 if share else k / 100,
        )
        for k in range(1, 101)
    ]
    return BenchEpoch(epoch=number, kind=kind, complete=True, figures=figures, began_s=began_s, samples=samples)


def with_figures(epoch: BenchEpoch, **figures: float) -> BenchEpoch:
    return dataclasses.replace(epoch, figures={**epoch.figures, **figures})


def bench_run(epochs: list[BenchEpoch] | None = None, **changes: Any) -> BenchRun:
    kinds = [("cold", 10.0), ("warm", 2.0), ("warm", 2.0)]
    made = [epoch(k, kind, began_s=11.0 * k, elapsed_s=s) for k, (kind, s) in enumerate(kinds)]
    run = BenchRun(
        urls=["s3://b/atlas.zarr"],
        rows=6400,
        genes=2000,
        local=False,
        cache=Path("/nvme/zloader"),
        batch_size=64,
        step_s=0.0,
        cores=2,
        load=0.1,
        settings=SETTINGS,
        prices=Prices(gigabyte_egress=0.09),
        epochs=made if epochs is None else epochs,
        link_bytes_per_s=320e6,
    )
    return dataclasses.replace(run, **changes)


QUALITY = BenchQuality(
    label="plate",
    measured=Quality(
        minibatches=100,
        entropy_bits=3.0,
        entropy_sd_bits=0.1,
        random_entropy_bits=4.0,
        random_entropy_sd_bits=0.2,
        l1_within=1.0,
        l1_across=None,
        longest_run=7,
        same_block_share=0.0123,
    ),
)
FIGURES = ["speed", "throughput", "waiting", "reading", "mirror"]


def rendered(run: BenchRun) -> Page:
    return Page(render(run, {"anon": True}, FLAGS))


@pytest.fixture(scope="module")
def page() -> Page:
    return rendered(bench_run(quality=QUALITY))


def test_every_figure_is_there_and_can_be_heard(page):
    ids = [str(svg["aria-labelledby"]).split()[0] for svg in page.all("svg")]
    assert ids == [f"{name}-title" for name in FIGURES]
    assert all(svg["role"] == "img" for svg in page.all("svg"))
    for words in (
        "cold epochs: 640 rows per second; limit: the link (cold): 683 rows per second; limit: decoding on all cores "
        "(cold): 2,133 rows per second; warm epochs: 3,200, 3,200 rows per second",
        "epoch 0, cold: 640 rows per second; epoch 1, warm: 3,200 rows per second",
        "cold epoch: until the first minibatch 0.50 s, waiting for later ones 8.60 s, making tensors 0.90 s",
        "epoch 0, cold: 3.0 GB in 50 GETs; epoch 1, warm: 0 B in 0 GETs",
        "epoch 0: 0% to 100%; epoch 1: 100% to 100%",
    ):
        assert words in page.text


def test_every_band_of_the_charts_over_time_has_the_numbers_of_its_epochs():
    for chart in charts(bench_run()):
        if chart.name in ("throughput", "reading", "mirror"):
            (legend,) = drawn(chart).subfigs[0].legends
            assert [text.get_text() for text in legend.get_texts()] == ["cold: epoch 0", "warm: epochs 1 to 2"]


@pytest.mark.parametrize(("n_tiles", "columns"), [(1, 1), (4, 4), (5, 5), (6, 3), (7, 4), (11, 4)])
def test_no_tile_stands_alone_in_a_row(n_tiles, columns):
    assert f"--columns: {columns}" in tiles([("1", "row")] * n_tiles)
    assert n_tiles == 1 or n_tiles % columns != 1


def test_numbers_stay_on_one_line():
    text = "21 600 cells/s, 3.0 GB in 5 s, 1.8 × (1.7 to 2.2), 0.5 %; 3 sets of 64 cells, 12 months, 2 142x"
    joined = "21_600_cells/s, 3.0_GB in 5_s, 1.8_× (1.7 to 2.2), 0.5_%; 3 sets of 64 cells, 12 months, 2_142x"
    assert unbroken(text) == joined.replace("_", "\N{NO-BREAK SPACE}")
    html = render(bench_run(), {}, ["--endpoint-url", "http://h/1 000 s"])
    assert "10.00\N{NO-BREAK SPACE}s" in html
    assert not re.findall(r"<code>[^<]*\xa0", html), "commands are copied"


def test_the_tables_have_the_numbers(page):
    assert "epoch kind rows/s time first minibatch after waiting GETs read from the store read rate" in page.text
    assert "0 cold 640 10.00 s 0.50 s 90% 50 3.0 GB 300 MB/s 40% $0.27" in page.text
    assert "1 warm 3,200 2.00 s 0.50 s 90% 0 0 B 0 B/s 100% under $0.0001" in page.text
    assert (
        "GETs under $0.0001 $0 egress $0.27 $0 NVMe under $0.0001 under $0.0001 in all $0.27 under $0.0001" in page.text
    )
    assert "$0.0004 for 1000 GETs, $0.09 for a GB read" in page.text
    assert "3.0 GB read from the store, cold: 50 GETs, $0.27 an epoch" in page.text


def test_the_advice_is_on_top(page):
    text = page.text
    assert "Cold epochs: The link bounds you: bytes arrived at 300 MB/s, 94% of the 320 MB/s that the link" in text
    assert "Warm epochs are 5.0 times as fast as cold ones: 3,200 rows/s against 640." in text
    assert text.index("The link bounds you") < text.index("Where the time of an epoch went")


def test_the_order_is_judged_only_if_asked(page):
    assert "Minibatches have 75% of the entropy of random ones, by plate." in page.text
    assert "most neighbouring rows in a minibatch 7 pairs of rows from one block 1.23%" in page.text
    assert "entropy" not in rendered(bench_run()).text


def test_the_page_needs_nothing_else(page):
    text = render(bench_run(quality=QUALITY, urls=["<script>alert(1)</script>"]), {}, [])
    assert not {"script", "img", "iframe"} & {tag for tag, _ in Page(text).tags}
    assert not re.findall(r'(?:src|href)="(?!#|data:)', text)
    assert not re.search(r"@import|url\((?!#)", text)
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert not re.findall(r": #[0-9a-f]{6}", text[text.index("<svg") :]), "a colour that does not follow the theme"
    assert set(re.findall(r"var\(--([\w-]+)\)", text)) <= {*LIGHT, "columns"}


@pytest.mark.parametrize(
    ("changes", "there", "not_there"),
    [
        ({"cache": None}, ["--cache zloader-cache", "$0.27"], ["The mirror filling"]),
        ({"epochs": [epoch(3, "warm")]}, ["rows/s, warm"], ["Reading from the store over time", "rows/s, cold"]),
        ({"local": True}, ["The disk bounds you", "disk 320 MB/s, measured by reading without decoding",
                           "limit: the disk"], ["the link"]),
        ({"local": True, "epochs": [with_figures(epoch(0), disk_bytes=0.3e9)]},
         ["90% of what the cold epoch read was there. If all of it came from the disk, 683 rows/s would be the most."],
         ["The disk bounds you"]),
        ({"local": True, "link_bytes_per_s": None}, ["Reads of a local store cost nothing", "disk not measured",
                                                     "keeps files that were used lately in memory"], ["egress"]),
        ({"step_s": 0.09}, ["GPUs $0.0083", "limit: your step", "90 ms of sleep each"], []),
        ({"load": 1.7}, ["its load was 1.7 with 2 cores"], []),
        ({"epochs": [dataclasses.replace(epoch(0), complete=False)]}, ["The run was interrupted in epoch 0",
                                                                      "0 cold, interrupted 640"], []),
        ({"epochs": [epoch(k, elapsed_s=0.1, began_s=k / 5) for k in range(70)]},
         ["This store is too small to measure", "The first 50 of 70 epochs", "The first 20 of 70 epochs"],
         ["bounds you", "times as fast"]),
    ],
    ids=["no mirror", "only warm", "a disk", "in memory", "local", "steps", "a busy machine",
         "interrupted", "small, and many epochs"],
)  # fmt: skip
def test_pages_of_other_runs(changes, there, not_there):
    text = rendered(bench_run(**changes)).text
    assert [words for words in there if words not in text] == []
    assert [words for words in not_there if words in text] == []


def test_advice_is_about_one_epoch_and_not_about_medians_of_several():
    """The medians of these would be an epoch of 10 s that waited 15 s."""
    figures = [(9.0, 1.0), (10.0, 2.0), (20.0, 15.0), (21.0, 20.0), (5.0, 20.0)]
    epochs = [
        with_figures(epoch(k), elapsed_s=elapsed_s, wait_s=wait_s) for k, (elapsed_s, wait_s) in enumerate(figures)
    ]
    pace = bench_run(epochs).paces["cold"]
    assert (pace.elapsed_s, pace.wait_s) == (10.0, 2.0)


@pytest.mark.every(4)
@pytest.mark.parametrize("scale", [1, 1000, 10**6])
@pytest.mark.parametrize("n_epochs", [1, 3, 30])
@pytest.mark.parametrize("n_samples", [1, 100])
def test_charts_are_readable(scale, n_epochs, n_samples):
    kinds = ["cold", "mixed", "warm"]
    epochs = [epoch(k, kinds[min(k, 2)], began_s=1e-4 * scale * k, elapsed_s=1e-4 * scale) for k in range(n_epochs)]
    epochs = [dataclasses.replace(each, samples=each.samples[-n_samples:]) for each in epochs]
    drawings = charts(bench_run(epochs, step_s=0.001))
    assert [chart.name for chart in drawings] == FIGURES
    for chart in drawings:
        figure = drawn(chart)
        assert labels_through_which_a_line_passes(figure) == []
        (axes,) = figure.axes
        assert axes.get_xlabel()
        assert overlapping_ticks(axes) == []


def test_the_code_and_the_commands_fit_the_run(page):
    assert "zl.open_dataset('s3://b/atlas.zarr', cache='/nvme/zloader', storage_options={'anon': True})" in page.code[0]
    assert "obs=['cell_type'])" in page.code[0]
    compile(page.code[0], "page", "exec")
    found = [shlex.split(line) for block in page.code for line in block.splitlines() if line.startswith("zloader ")]
    assert [words[1] for words in found] == ["bench", "bench", "bill"]
    for _, name, *arguments in found:
        if ">" in arguments:
            arguments = arguments[: arguments.index(">")]
        typer.main.get_command(app).commands[name].make_context(name, list(arguments))
        assert name != "bench" or {"s3://b/atlas.zarr", "/nvme/zloader", *FLAGS} <= set(arguments)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["symbol"], "genes_by='symbol'"),
        (["none", "orthologs.tsv"],
         r"genes_by=[None, pd.read_csv('orthologs.tsv', sep='\t', header=None, index_col=0)[1]]"),
    ],
)  # fmt: skip
def test_the_code_names_genes_as_the_run_did(given, text):
    code = rendered(bench_run(settings=SETTINGS | {"genes_by": given})).code[0]
    assert text in code
    assert ("import pandas as pd" in code) == ("pd." in text)
    compile(code, "page", "exec")


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "$0"), (1e-20, "under $0.0001"), (0.0001, "$0.0001"), (0.27, "$0.27"), (0.999, "$1.00"),
     (1234.5, "$1,234.50")],
)  # fmt: skip
def test_dollars(amount, text):
    assert dollars(amount) == text


# ---- in a browser

browser = pytest.mark.skipif(
    chromium() is None, reason="there is no Chromium: CONTRIBUTING.md says how to get one, and $CHROMIUM names it"
)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A report as the command writes it."""
    folder = tmp_path_factory.mktemp("report")
    write_store(counts(503, 97), folder / "cells.zarr", folder)
    zloader("bench", folder / "cells.zarr", "--cache", folder / "cache", "--label", "cell_type", "--step-ms", 1,
            "--batch-size", 16, "--report", folder / "bench.html")  # fmt: skip
    return folder / "bench.html"


@browser
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (500, True)], ids=["wide", "narrow and dark"])
def test_a_browser_shows_every_figure(report, tmp_path, width, dark):
    seen = laid_out(report, tmp_path, width=width, dark=dark)
    assert [figure["id"] for figure in seen["figures"]] == FIGURES
    assert len({figure["title"] for figure in seen["figures"]}) == len(FIGURES)
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
    assert seen["requests"] == []
    assert (seen["paper"] < 100) == (seen["ink"] > 100) == dark
    assert seen["tables"] >= 3


@browser
def test_it_can_be_printed(report, tmp_path):
    pdf = printed(report, tmp_path)
    assert pdf.startswith(b"%PDF")
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 8
