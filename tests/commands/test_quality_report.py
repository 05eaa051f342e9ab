"""The report of `zloader quality`: what it says about an order, and what it tells the reader to copy."""

from __future__ import annotations

import dataclasses
import shlex

import pandas as pd
import pytest
import typer.main
from helpers import counts, write_store
from pages import Page, drawn
from reported import ACCESS, FLAGS, cell, grid, said, to_copy
from test_cli import zloader

import zloader as zl
from zloader.commands.cli import app
from zloader.commands.quality_grid import QualityGrid, measured
from zloader.commands.quality_report import charts, report

pytestmark = pytest.mark.any_version


def rendered(seen: QualityGrid) -> Page:
    return Page(report(seen, seen.url, {}, []).html())


@pytest.mark.parametrize(
    ("cells", "sizes", "verdict"),
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
def test_the_verdict_and_the_sizes_to_take(cells, sizes, verdict):
    seen = grid(*cells)
    assert seen.verdict == verdict
    assert seen.recommended.sizes == sizes
    told = report(seen, seen.url, {}, [])
    assert verdict in told.verdict
    assert f"batch_size=64, fetch_factor={sizes[1]}, sampling=zl.BlockShuffling(block_size={sizes[0]}, " in told.code
    shuffles = any("--shuffle 0" in block for block in to_copy(told))
    assert shuffles == (seen.recommended.percent < 98)


def test_of_equally_fast_sizes_the_smaller_fetch_is_taken():
    assert grid(cell(64, 256, 50), cell(4, 256, 99), cell(4, 64, 99)).recommended.sizes == (4, 64)


def test_bits_and_percent_of_random_are_in_every_cell():
    seen = grid(cell(64, 256, 98.4), cell(4, 16, 50), cell(4, 256, 101))
    page = rendered(seen)
    drawn_words = [word.strip() for word in page.words]
    for bits, percent in (("1.97 bits", "98%"), ("1.00 bits", "50%"), ("2.02 bits", "101%")):
        assert bits in drawn_words
        assert percent in drawn_words
    assert "64 × 256 (default, recommended) 1.97 ± 0.10 98% 1.77" in page.text
    assert "4 × 16 1.00 ± 0.10 50% 0.90" in page.text


def test_entropy_is_explained():
    text = " ".join(said(report(grid(cell(64, 256, 99)), "a.zarr", {}, [])))
    assert "It is 0 if all 64 rows have the same plate." in text
    assert "random minibatches of 64 have 2.00 bits" in text
    assert "98% of random or more is good" in text


@pytest.mark.parametrize(
    ("percent", "outlined"),
    [(97, ["default of zl.Loader (64 × 256)"]), (99, ["default of zl.Loader (64 × 256)", "recommended (4 × 16)"])],
    ids=["default", "default and recommended"],
)
@pytest.mark.parametrize("listed", [True, False], ids=["asked for", "not asked for"])
def test_the_default_cell_is_outlined_and_named(percent, outlined, listed):
    default, other = cell(64, 256, 97), cell(4, 16, percent)
    seen = grid(default, other)
    chart = charts(seen if listed else dataclasses.replace(seen, cells=[other]))[0]
    (axes,) = drawn(chart).axes
    blocks, factors = ([label.get_text() for label in axis.get_ticklabels()] for axis in (axes.yaxis, axes.xaxis))
    found = [patch for patch in axes.patches if not patch.get_fill()]
    assert [patch.get_label() for patch in found] == outlined
    for patch in found:
        column, row = (round(middle) for middle in patch.get_center())
        assert f"({blocks[row]} × {factors[column]})" in patch.get_label()


def test_fetches_that_hold_the_whole_store_are_drawn_once():
    cells = [cell(4, factor, 100) for factor in (16, 64, 256)]
    chart = charts(grid(cell(64, 256, 100), *cells, rows=3000))[1]
    assert [part.split(":")[0] for part in chart.description.split("; ")] == [
        "block_size 4, fetch_factor 16", "block_size 4, fetch_factor 64", "block_size 64, fetch_factor 256"
    ]  # fmt: skip
    assert "A fetch that holds the whole store is shown once." in chart.caption
    assert "shown once" not in charts(grid(cell(64, 256, 100), *cells, rows=10**6))[1].caption


def test_commands_repeat_the_flags_of_this_one():
    seen = grid(cell(64, 256, 50), x="layers/raw counts", batch_size=32)
    blocks = to_copy(report(seen, "s3://b/my store.zarr", ACCESS, FLAGS))
    found = [shlex.split(line) for block in blocks for line in block.splitlines() if line.startswith("zloader ")]
    assert [words[1] for words in found] == ["info", "bench", "quality", "convert"]
    for _, name, *arguments in found:
        typer.main.get_command(app).commands[name].make_context(name, list(arguments))
        assert arguments[0] == "s3://b/my store.zarr"
        assert set(FLAGS) <= set(arguments)
        if name in ("bench", "quality"):
            assert arguments[arguments.index("--x") + 1] == "layers/raw counts"
            assert arguments[arguments.index("--batch-size") + 1] == "32"
    assert f"zl.open_dataset('s3://b/my store.zarr', storage_options={ACCESS!r})" in blocks[0]


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
