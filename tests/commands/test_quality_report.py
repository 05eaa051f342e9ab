"""The report of `zloader quality`: what it says about an order, and what it tells the reader to copy."""

from __future__ import annotations

import shlex

import pandas as pd
import pytest
import typer.main
from helpers import counts, write_store
from pages import Page
from reported import ACCESS, FLAGS, cell, grid, to_copy
from test_cli import zloader

import zloader as zl
from zloader.commands.cli import app
from zloader.commands.quality_grid import QualityGrid, measured
from zloader.commands.quality_report import report

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
