"""The page of `zloader quality`: what it says about an order, what it tells the reader to copy, and its charts."""

from __future__ import annotations

import dataclasses
import re
import shlex

import pandas as pd
import pytest
import typer.main
from helpers import counts, write_store
from pages import Page, drawn, labels_through_which_a_line_passes, overlapping_ticks
from test_cli import zloader

import zloader as zl
from zloader.commands.cli import app
from zloader.commands.page import LIGHT, WARM
from zloader.commands.quality_grid import Cell, QualityGrid, measured
from zloader.commands.quality_page import charts, render
from zloader.insight.quality import Quality

RANDOM_BITS = 2.0
ACCESS = {"anon": True, "client_kwargs": {"endpoint_url": "http://127.0.0.1:9"}}
FLAGS = ["--endpoint-url", "http://127.0.0.1:9", "--anon"]


def cell(block_size: int, fetch_factor: int, percent: float, *, speed: float = 1000, random=RANDOM_BITS) -> Cell:
    measured = Quality(
        minibatches=10,
        entropy_bits=random * percent / 100,
        entropy_sd_bits=0.1,
        random_entropy_bits=random,
        random_entropy_sd_bits=0.1,
        l1_within=None,
        l1_across=1.0,
        longest_run=3,
        same_block_share=0.01,
    )
    plain = dataclasses.replace(measured, entropy_bits=0.9 * measured.entropy_bits)
    return Cell(
        block_size=block_size,
        fetch_factor=fetch_factor,
        rows_per_s=speed,
        gets=10,
        bytes_read=5000,
        quality=plain,
        stratified=measured,
    )


def grid(default: Cell, *others: Cell, **changes) -> QualityGrid:
    made = QualityGrid(
        url="s3://b/a.zarr",
        label="plate",
        x="X",
        rows=9000,
        batch_size=64,
        link_bytes_per_s=400_000_000,
        cells=[default, *others],
        default=default,
    )
    return dataclasses.replace(made, **changes)


@pytest.mark.parametrize(
    ("cells", "sizes", "said"),
    [
        (
            [cell(64, 256, 98.4), cell(4, 256, 100)],
            (64, 256),
            "The default order mixes plate as well as random: its minibatches have 98% of the entropy of random ones. "
            "Keep the default sizes.",
        ),
        (
            [cell(64, 256, 93, speed=5000), cell(16, 256, 99, speed=900), cell(4, 64, 99, speed=500)],
            (16, 256),
            "The default order mixes plate nearly as well as random: its minibatches have 93% of the entropy of random "
            "ones. Try block_size=16 and fetch_factor=256: 99%, at 900 rows/s instead of 5,000 (at 400 MB/s without a "
            "mirror).",
        ),
        (
            [cell(64, 256, 40), cell(4, 256, 70), cell(16, 256, 60)],
            (4, 256),
            "Rows of one plate stay together: in the default order, minibatches have 40% of the entropy of random "
            "ones. The best pair of sizes here is block_size=4 and fetch_factor=256, with 70%. Shuffle the rows once "
            "with zloader convert --shuffle, or try smaller blocks and larger fetches.",
        ),
        (
            [cell(64, 256, 40), cell(4, 256, 42)],
            (64, 256),
            "Rows of one plate stay together: in the default order, minibatches have 40% of the entropy of random "
            "ones. No other pair of sizes here mixes clearly better. Shuffle the rows once with zloader convert "
            "--shuffle, or try smaller blocks and larger fetches.",
        ),
        (
            [cell(64, 256, 0, random=0.0)],
            (64, 256),
            "Nearly all rows have the same plate, so there is nothing to mix: choose another column.",
        ),
    ],
    ids=["good", "nearly", "poor", "nothing better", "one label"],
)
def test_the_verdict_and_the_sizes_to_take(cells, sizes, said):
    seen = grid(*cells)
    assert seen.verdict == said
    assert seen.recommended.sizes == sizes
    page = Page(render(seen, seen.url, {}, []))
    assert said in page.text
    assert f"batch_size=64, fetch_factor={sizes[1]}, sampling=zl.BlockShuffling(block_size={sizes[0]}, " in page.code[0]
    shuffles = any("--shuffle 0" in block for block in page.code)
    assert shuffles == (seen.recommended.percent < 98)


def test_of_equally_fast_sizes_the_smaller_fetch_is_taken():
    assert grid(cell(64, 256, 50), cell(4, 256, 99), cell(4, 64, 99)).recommended.sizes == (4, 64)


def test_bits_and_percent_of_random_are_in_every_cell():
    seen = grid(cell(64, 256, 98.4), cell(4, 16, 50), cell(4, 256, 101))
    page = Page(render(seen, seen.url, {}, []))
    drawn_words = [word.strip() for word in page.words]
    for bits, percent in (("1.97 bits", "98%"), ("1.00 bits", "50%"), ("2.02 bits", "101%")):
        assert bits in drawn_words
        assert percent in drawn_words
    assert "64 × 256 (default, recommended) 1.97 ± 0.10 98% 1.77" in page.text
    assert "4 × 16 1.00 ± 0.10 50% 0.90" in page.text


def test_entropy_is_explained():
    text = Page(render(grid(cell(64, 256, 99)), "a.zarr", {}, [])).text
    assert "It is 0 if all 64 rows have the same plate." in text
    assert "random minibatches of 64 have 2.00 bits" in text
    assert "98% of random or more is good" in text


@pytest.mark.parametrize(
    ("others", "outlined"),
    [([cell(4, 16, 97)], [("default of zl.Loader (64 × 256)", "64", "256", WARM)]),
     ([cell(4, 16, 99)], [("default of zl.Loader (64 × 256)", "64", "256", WARM),
                          ("recommended (4 × 16)", "4", "16", LIGHT["green"])])],
    ids=["default", "default and recommended"],
)  # fmt: skip
@pytest.mark.parametrize("listed", [True, False], ids=["asked for", "not asked for"])
def test_the_default_cell_is_outlined_and_named(others, outlined, listed):
    from matplotlib.colors import to_hex

    default = cell(64, 256, 97)
    seen = grid(default, *others)
    figure = drawn(charts(seen if listed else dataclasses.replace(seen, cells=others))[0])
    (axes,) = figure.axes
    blocks, factors = ([label.get_text() for label in axis.get_ticklabels()] for axis in (axes.yaxis, axes.xaxis))
    found = []
    for patch in axes.patches:
        if not patch.get_fill():
            column, row = (round(middle) for middle in patch.get_center())
            found.append((patch.get_label(), blocks[row], factors[column], to_hex(patch.get_edgecolor())))
    assert found == outlined
    (legend,) = figure.subfigs[0].legends
    assert [text.get_text() for text in legend.get_texts()] == [name for name, *_ in outlined]


@pytest.mark.every(3)
@pytest.mark.parametrize("label", ["plate", "$\\alph$"])
@pytest.mark.parametrize("speed", [1, 1e6, 1e13])
@pytest.mark.parametrize("percents", [(99, 100, 101), (1, 40, 99), (0, 0, 0)], ids=str)
def test_charts_are_readable_and_show_the_differences(label, speed, percents):
    cells = [cell(*sizes, percent, speed=speed * sizes[0]) for sizes, percent in
             zip([(64, 256), (4, 16), (4, 256)], percents, strict=True)]  # fmt: skip
    seen = grid(*cells, label=label)
    for chart in charts(seen):
        assert label in chart.title
        figure = drawn(chart)
        assert labels_through_which_a_line_passes(figure) == []
        (axes,) = figure.axes
        assert re.search(r"\(.+\)$", axes.get_xlabel()), "a label with its unit"
        assert re.search(r"\(.+\)$", axes.get_ylabel())
        assert overlapping_ticks(axes) == []
    low, high = axes.get_ylim()  # of the entropy against the speed
    frame = axes.get_window_extent()
    heights = [axes.transData.transform((0, each.stratified.entropy_bits))[1] for each in cells]
    assert frame.y0 + 5 < min(heights) <= max(heights) < frame.y1 - 5
    values = [RANDOM_BITS, *(of.entropy_bits for each in cells for of in (each.quality, each.stratified))]
    assert max(values) - min(values) > 0.5 * (high - low)
    (percent,) = axes.child_axes
    assert percent.get_ylabel() == "percent of random (%)"
    assert percent.get_ylim() == pytest.approx((100 * low / RANDOM_BITS, 100 * high / RANDOM_BITS))


def test_chance_does_not_look_like_a_difference():
    seen = grid(cell(64, 256, 100.1), cell(4, 16, 99.9))
    seen = dataclasses.replace(seen, cells=[dataclasses.replace(each, quality=each.stratified) for each in seen.cells])
    seen = dataclasses.replace(seen, default=seen.cells[0])
    low, high = drawn(charts(seen)[1]).axes[0].get_ylim()
    assert high - low > 0.1 * RANDOM_BITS - 1e-9


def test_fetches_that_hold_the_whole_store_are_drawn_once():
    cells = [cell(4, factor, 100) for factor in (16, 64, 256)]
    chart = charts(grid(cell(64, 256, 100), *cells, rows=3000))[1]
    assert [part.split(":")[0] for part in chart.description.split("; ")] == [
        "block_size 4, fetch_factor 16", "block_size 4, fetch_factor 64", "block_size 64, fetch_factor 256"
    ]  # fmt: skip
    assert "A fetch that holds the whole store is shown once." in chart.caption
    assert "shown once" not in charts(grid(cell(64, 256, 100), *cells, rows=10**6))[1].caption


def test_names_cannot_break_out_of_the_page():
    seen = grid(cell(64, 256, 99), label="<script>alert(1)</script>", url='s3://b/<i>"')
    page = Page(render(seen, seen.url, ACCESS, FLAGS))
    assert not {"script", "i"} & {tag for tag, _ in page.tags}


def test_commands_repeat_the_flags_of_this_one():
    seen = grid(cell(64, 256, 50), x="layers/raw counts", batch_size=32)
    page = Page(render(seen, "s3://b/my store.zarr", ACCESS, FLAGS))
    found = [shlex.split(line) for block in page.code for line in block.splitlines() if line.startswith("zloader ")]
    assert [words[1] for words in found] == ["info", "bench", "quality", "convert"]
    for _, name, *arguments in found:
        typer.main.get_command(app).commands[name].make_context(name, list(arguments))
        assert arguments[0] == "s3://b/my store.zarr"
        assert set(FLAGS) <= set(arguments)
        if name in ("bench", "quality"):
            assert arguments[arguments.index("--x") + 1] == "layers/raw counts"
            assert arguments[arguments.index("--batch-size") + 1] == "32"
    assert f"zl.open_dataset('s3://b/my store.zarr', storage_options={ACCESS!r})" in page.code[0]


@pytest.mark.any_version
@pytest.mark.slow  # it runs five commands, and reads the store dozens of times
def test_what_the_page_says_works_as_it_stands(tmp_path, monkeypatch):
    """With fetches of 8 blocks and rows in the order of their plates, so that the page says to shuffle them too."""
    monkeypatch.chdir(tmp_path)
    adata = counts(4000, 30)
    adata.obs["plate"] = pd.Categorical([f"p{row // 250}" for row in range(4000)])
    write_store(adata, "plates.zarr", tmp_path)
    zloader("quality", "plates.zarr", "--label", "plate", "--batch-size", 2, "--block-sizes", "64,128",
            "--fetch-factors", "64", "--html", "q.html")  # fmt: skip
    page = Page((tmp_path / "q.html").read_text())
    names: dict[str, object] = {}
    exec(page.code[0], names)
    assert len(next(iter(names["loader"]))) == 2
    lines = [shlex.split(line)[1:] for block in page.code for line in block.splitlines() if line.startswith("zloader ")]
    assert [words[0] for words in lines] == ["info", "bench", "quality", "convert"]
    for words in lines:
        zloader(*words)
    shuffled = zl.open_dataset("plates-shuffled.zarr")
    assert sorted(shuffled.obs(["source_row"])["source_row"]) == list(range(4000))
    again = measured(zl.Loader(shuffled, batch_size=2, rank=0, world_size=1), "plate", [(64, 64)], 1)
    assert again.default.percent >= 98
